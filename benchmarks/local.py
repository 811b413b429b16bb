"""Stacks of locally connected layers as one kernel each, beside PyTorch: forward, and a training step.

Weights are distinct for each layer, or one matrix is reused by all layers.  PyTorch's layer is a shift and a
multiplication for each weight of a window, compiled to one kernel; all layers are one CUDA graph, and so is a whole
training step, with its gradients by autograd.  mlpgpu's outputs are checked first, on spans of columns through all
layers, against NumPy in float64 on weights that NumPy draws; a step's loss must fall.  Forward, both take turns, round
by round; steps are measured one after the other, since the card has no room for both.  Figures are medians: of
evaluations by the card's clock, of steps by the host's.  Where a network's weights do not fit twice, PyTorch trains as
many layers as do fit, and the result says how many.

    python benchmarks/local.py [--n N ...] [--k K] [--quick] [--no-peer] [--json benchmarks/results/local.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mlpgpu as mg
from mlpgpu.backends import Sampling, get_backend
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.backends.cuda.profile.peak_rates import measure_peak_rates
from mlpgpu.backends.cuda.profile.probe import Probe
from mlpgpu.bench import surroundings
from mlpgpu.errors import MlpgpuError
from mlpgpu.initializers import INITIALIZERS
from mlpgpu.names import ActivationName
from mlpgpu.plan import Plan
from mlpgpu.random import WORDS_PER_BLOCK, Purpose, philox

try:
    import torch
except ImportError:
    torch = None

WINDOW, SEED = 29, 7
ACTIVATION: ActivationName = "sigmoid"
CHECKED = 64  # columns of a span
STEPS = 8  # that are timed together
LARGEST_ERROR = 1e-5  # of a sigmoid's value, after all layers
ROUNDS, QUICK_ROUNDS = 7, 3


@dataclass(frozen=True)
class Stack:
    """N inputs, K layers, each with WINDOW - 1 outputs fewer."""

    n: int
    k: int
    distinct: bool

    def network(self) -> mg.Network:
        """Without biases: one number for a layer would misalign the weights behind it for vectors of four words."""
        shrink = WINDOW - 1
        if self.distinct:
            layers = [mg.LocallyConnected(self.n - shrink * i, WINDOW, ACTIVATION, None) for i in range(self.k)]
        else:
            layers = [mg.LocallyConnected(self.n, WINDOW, ACTIVATION, None)] * self.k
        return mg.Network(layers, seed=SEED)

    @property
    def name(self) -> str:
        return "distinct" if self.distinct else "reused"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all layers' weights that are used."""
        return 4 * WINDOW * sum(self.n - (WINDOW - 1) * (i + 1) for i in range(self.k))


# --- checks ---


def drawn(plan: Plan, place: int, start: int, count: int) -> np.ndarray:
    """Elements of a layer's initial weights, as a flat array, by their address: float32 values as float64."""
    parameter = plan.parameters[place]
    limit = INITIALIZERS[parameter.initializer].limit(parameter.fans)
    block, skipped = divmod(start, WORDS_PER_BLOCK)
    source = philox(seed=SEED, purpose=Purpose.INITIAL_VALUES, layer=parameter.layer, block=block)
    uniform = np.random.Generator(source).random(skipped + count)[skipped:]
    return (-limit + (limit - -limit) * uniform).astype(np.float32).astype(np.float64)


def span(plan: Plan, stack: Stack, x: np.ndarray, first: int) -> np.ndarray:
    """CHECKED outputs of the last layer, from all that they depend on, in float64."""
    y = x[first : first + CHECKED + (WINDOW - 1) * stack.k].astype(np.float64)
    rows: list[np.ndarray] = []  # of the weights: one for each place of the window
    with ThreadPoolExecutor() as pool:  # NumPy draws without holding Python's lock
        for layer in range(stack.k):
            n = len(y) - WINDOW + 1
            if stack.distinct or layer == 0:
                place, pitch = layer, plan.parameters[layer].shape[1]
                starts = [r * pitch + first for r in range(WINDOW)]
                rows = list(pool.map(lambda start, place=place, n=n: drawn(plan, place, start, n), starts))
            total = np.zeros(n)
            for r, row in enumerate(rows):
                total += row[:n] * y[r : r + n]
            y = 1.0 / (1.0 + np.exp(-total))
    return y


def check(plan: Plan, stack: Stack, x: np.ndarray, y: np.ndarray) -> float:
    """The largest error of spans at both ends and across blocks' borders; too large a one ends the run."""
    firsts = {0, min(4608, plan.n_out // 2) - CHECKED // 2, plan.n_out - CHECKED}
    error = max(abs(span(plan, stack, x, first) - y[first : first + CHECKED]).max() for first in firsts if first >= 0)
    if not (np.isfinite(y).all() and error <= LARGEST_ERROR):
        sys.exit(f"weights {stack.name}: off by {error}")
    return float(error)


# --- ours ---


def forward(backend: CudaBackend, stack: Stack) -> tuple[float, Callable[[], float]]:
    """The error of an evaluation of one row, and a function that measures its seconds."""
    network = stack.network()
    plan = network.lower(capacity=1)
    x = np.random.default_rng(1).normal(size=(1, stack.n)).astype(np.float32)
    probe = Probe(plan, backend.device, network.start, mg.Dataset(x))
    first, second = (probe.program.predict(mg.Dataset(x), logits=True)[0] for _ in range(2))
    if (first.view(np.uint32) != second.view(np.uint32)).any():
        sys.exit(f"weights {stack.name}: another evaluation has other bits")

    def seconds() -> float:
        with backend.device:
            return probe.seconds()

    return check(plan, stack, x[0], first), seconds


def step(backend: CudaBackend, stack: Stack, rounds: int) -> list[float]:
    """The time of training steps of one row by plain SGD, by the host's clock, with the loss and the update."""
    network, optimizer = stack.network(), mg.SGD(1e-3)
    plan = network.lower(capacity=1, loss="squared_error", optimizer=optimizer)
    program = backend.compile(plan)
    network.start(program, optimizer)
    random = np.random.default_rng(2)
    x, y = (random.normal(size=(STEPS, n)).astype(np.float32) for n in (plan.n_in, plan.n_out))
    program.attach(mg.Dataset(x, y), Sampling(STEPS, 1, seed=0))
    before = program.run(0, np.full(STEPS, 1e-3))[:, 0].mean()
    found = []
    for turn in range(1, rounds + 1):
        started = time.perf_counter()
        after = program.run(turn * STEPS, np.full(STEPS, 1e-3))[:, 0].mean()
        found.append((time.perf_counter() - started) / STEPS)
    if not after < before:
        sys.exit(f"the loss went from {before} to {after}")
    return found


# --- PyTorch ---


def shifted(x: Any, w: Any) -> Any:
    """A layer, which PyTorch compiles."""
    total = w[0] * x[: w.shape[1]]
    for r in range(1, WINDOW):
        total = total + w[r] * x[r : r + w.shape[1]]
    return torch.sigmoid(total)


class Peer:
    """The network in PyTorch, on random weights, with the first ``layers`` of the stack's layers."""

    def __init__(self, stack: Stack, layers: int) -> None:
        self._layer = torch.compile(shifted, dynamic=True)
        self._widths = [stack.n - (WINDOW - 1) * (i + 1) for i in range(layers)]
        widths = self._widths if stack.distinct else self._widths[:1]
        self._w = [torch.rand(WINDOW, n, device="cuda").sub_(0.5).requires_grad_() for n in widths]
        self._x = torch.randn(stack.n, device="cuda")
        self._target = torch.randn(self._widths[-1], device="cuda")

    def forward(self) -> Any:
        y, is_one = self._x, len(self._w) == 1
        for layer, n in enumerate(self._widths):
            y = self._layer(y, self._w[0][:, :n] if is_one else self._w[layer])
        return y

    def step(self) -> None:
        """Half the squared error, its gradients, and a step of plain SGD."""
        loss = (self.forward() - self._target).square().sum() / 2
        gradients = torch.autograd.grad(loss, self._w)
        with torch.no_grad():
            torch._foreach_add_(self._w, gradients, alpha=-1e-3)


def captured(put: Callable[[], object]) -> Callable[[], float]:
    """A function that measures the seconds of a CUDA graph of what ``put`` launches."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # autograd remembers streams: none of the capture's may be the default one
        put()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        put()

    def seconds() -> float:
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return seconds


def peer_forward(stack: Stack) -> Callable[[], float]:
    """A function that measures the seconds of PyTorch's forward."""
    network = Peer(stack, stack.k)
    with torch.no_grad():
        return captured(network.forward)


def peer_step(stack: Stack, rounds: int) -> tuple[list[float], int]:
    """The times of PyTorch's training steps, and of how many layers: half as many again and again, until they fit."""
    layers = stack.k
    while True:
        try:
            seconds = captured(Peer(stack, layers).step)
            return [seconds() for _ in range(rounds)], layers
        except torch.cuda.OutOfMemoryError:
            layers //= 2
        gc.collect()  # only now: while the error is handled, it holds what did not fit
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[50_000, 100_000, 300_000])
    parser.add_argument("--k", type=int, default=1_000)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--no-peer", action="store_true", help="leave PyTorch out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        backend = get_backend("cuda")
    except MlpgpuError as refused:
        sys.exit(str(refused))
    assert isinstance(backend, CudaBackend)
    rounds, begun = QUICK_ROUNDS if options.quick else ROUNDS, time.perf_counter()
    with backend.device as device:
        copied = measure_peak_rates(device).copied
    results: list[dict[str, Any]] = []
    has_peer = torch is not None and not options.no_peer

    def add(what: str, stack: Stack, ours: list[float], passes: int, theirs: list[float], **others: Any) -> None:
        floor = 1000 * passes * stack.weight_bytes / copied if stack.distinct else None
        about_stack = {"what": what, "weights": stack.name, "n": stack.n, "k": stack.k}
        pytorch = 1000 * statistics.median(theirs) if theirs else None
        results.append(
            {**about_stack, "ms": 1000 * statistics.median(ours), "floor_ms": floor, "pytorch_ms": pytorch, **others}
        )  # fmt: skip
        print(f"{time.perf_counter() - begun:.1f} s:", results[-1], flush=True)
        if options.json:
            about = surroundings(backend, ["torch"])
            options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n", encoding="utf-8")

    def clear() -> None:
        gc.collect()
        if torch is not None:
            torch.cuda.empty_cache()

    largest = Stack(max(options.n), options.k, distinct=True)
    for stack in (largest, *(Stack(n, options.k, distinct=False) for n in sorted(options.n, reverse=True))):
        error, ours = forward(backend, stack)
        others = peer_forward(stack) if has_peer else None
        found: tuple[list[float], list[float]] = [], []
        for _ in range(rounds):
            found[0].append(ours())
            if others:
                found[1].append(others())
        add("forward", stack, found[0], 1, found[1], error=error)
        del ours, others
        clear()
    for stack in (largest, Stack(largest.n, largest.k, distinct=False)):
        took = step(backend, stack, rounds)
        clear()
        theirs, layers = peer_step(stack, rounds) if has_peer else ([], 0)
        clear()
        add("training step", stack, took, 3, theirs, pytorch_layers=layers)


if __name__ == "__main__":
    main()
