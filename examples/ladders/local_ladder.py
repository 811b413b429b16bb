"""A locally connected network, rung by rung: each kernel of local_ladder.cuh, then mlpgpu's own, beside a serial loop.

K layers of N, N - R + 1, N - 2 (R - 1), … units, the first of them the inputs, R = 29, and a launch for each layer.
Weights are each layer's own, or those of the first serve all.  Every kernel is checked against NumPy in float64 before
it is timed, and the outputs of the whole network are the same bits on every rung.  It prints outputs per second, how
many times as fast as the loop of local_serial.c that is, and, where each weight is read once, the percentage of the
memory's rate, which is measured.  docs/ladder.md walks through the kernels.

    python examples/ladders/local_ladder.py [--quick] [--json PATH] [--picture PATH]
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ladder import FOLDER, command_line, compiled, cuda, draw_rungs, kept, save
from matplotlib.figure import Figure

import mlpgpu as mg
from mlpgpu.backends.cuda import CudaBackend, kernels
from mlpgpu.backends.cuda.kernels import Entry, arguments, ceil_div
from mlpgpu.backends.cuda.profile.peak_rates import measure_peak_rates
from mlpgpu.backends.cuda.profile.probe import Probe
from mlpgpu.backends.cuda.profile.workbench import Workbench
from mlpgpu.backends.cuda.run.program import CudaProgram
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.bench import json_lines, surroundings
from mlpgpu.errors import MlpgpuError

WINDOW, BIAS, THREADS = 29, 0.005, 256
SIZES = [(n, 1000) for n in (50_000, 100_000, 200_000, 300_000)] + [(300_000, k) for k in (10, 30, 100, 300)]
QUICK = [(50_000, 30), (50_000, 100), (100_000, 30)]
POOL = 4  # layers' weights that are drawn; further layers hold copies of them
SERIAL_LAYERS = 10  # that the loop is timed on
DEPTH_TOLERANCE = 1e-5  # of a plan's outputs, in (0, 1), against the rungs': layers contract, so errors do not grow
EPS32 = float(np.finfo(np.float32).eps)

Layout = Literal["none", "outputs", "window", "arrays"]  # what the weights' first axis is, if there are any


def outputs(n: int, k: int, window: int) -> int:
    """Of all layers of a network of k layers, the first of which are its n inputs."""
    return (k - 1) * n - (window - 1) * k * (k - 1) // 2


# --- the rungs ---


@dataclass(frozen=True)
class Operands:
    """What a layer's kernels take: arrays, or their addresses.  ``w`` is a list of them where the layout is arrays."""

    x: Any
    w: Any
    y: Any
    bias: Any  # an array of one
    step: Any  # of one row
    n: int
    pitch: int
    window: int


@dataclass(frozen=True)
class Rung:
    """A kernel, the layout of its weights, and how it takes its operands."""

    name: str
    entry: Entry
    layout: Layout
    values: Callable[[Operands], dict[str, Any]]

    @staticmethod
    def grid(n: int) -> tuple[int, int, int]:
        return ceil_div(n, THREADS), 1, 1


def rungs(window: int) -> tuple[Rung, ...]:
    """The kernels of local_ladder.cuh for a window."""
    halo = 4 * (THREADS + window - 1)

    def common(o: Operands) -> dict[str, Any]:
        return {"x": o.x, "y": o.y, "bias": BIAS, "n": o.n}

    def one_array(o: Operands) -> dict[str, Any]:
        return {**common(o), "w": o.w}

    def pitched(o: Operands) -> dict[str, Any]:
        return {**one_array(o), "pitch": o.pitch}

    def arrays(o: Operands) -> dict[str, Any]:
        return {**common(o), **{f"w{r}": w for r, w in enumerate(o.w)}}

    def rung(
        name: str, layout: Layout, values: Callable[[Operands], dict[str, Any]], weights: str, shared_bytes: int = 0
    ) -> Rung:
        function = f"local_{name.replace(' ', '_').replace('-', '_')}"
        signature = {
            "none": "const float* x, float* y, float bias, int n",
            "outputs": "const float* x, const float* w, float* y, float bias, int n",
            "window": "const float* x, const float* w, float* y, float bias, int n, int pitch",
            "arrays": "const float* x, float* y, float bias, int n" + weights,
        }[layout]
        instance = function if layout == "arrays" else f"{function}<{window}>"
        name_of_entry, takes = f"{function}_{window}", arguments(signature)
        entry = Entry(name_of_entry, "local_ladder.cuh", instance, takes, THREADS, shared_bytes, block=None)
        return Rung(name, entry, layout, values)

    each = "".join(f", const float* w{r}" for r in range(window))
    return (
        rung("stencil", "none", common, each),
        rung("row-major", "outputs", one_array, each),
        rung("transposed", "window", pitched, each),
        rung("staged", "window", pitched, each, halo),
        rung("read-only", "window", pitched, each, halo),
        rung("separate", "arrays", arrays, each, halo),
        rung("separate read-only", "arrays", arrays, each, halo),
    )


def of_table() -> Rung:
    """mlpgpu's own kernel of one layer, from its table of kernels."""

    def values(o: Operands) -> dict[str, Any]:
        rows = {"step": o.step, "shard": 0, "shards": 1}
        layer = {"x": o.x, "w": o.w, "b": o.bias, "z": None, "y": o.y, "b_step": 0}
        return {**rows, **layer, "m": o.n + o.window - 1, "n": o.n, "window": o.window, "pitch": o.pitch}

    return Rung("mlpgpu, a layer", kernels.local_forward("sigmoid"), "window", values)


STEP_OF_ONE = np.array([(0, 0, 0, 1, 1)], STEP)
BIAS_ARRAY = np.array([BIAS], np.float32)


# --- the network ---


@dataclass(frozen=True)
class Stack:
    """Inputs and weights of a network whose layers are locally connected.

    Attributes:
        x: the inputs (n,).
        w: weights (POOL or fewer, window, pitch), uniform in [-1, 1]; layer l has number l modulo their count.
        layers: that compute something, one fewer than K.
    """

    x: np.ndarray
    w: np.ndarray
    layers: int

    @classmethod
    def random(cls, n: int, k: int, window: int, pool: int = POOL) -> Stack:
        rng = np.random.default_rng(0)
        w = rng.random((min(pool, k - 1), window, n - window + 1), np.float32)
        return cls(rng.random(n, np.float32), 2 * w - 1, k - 1)

    @property
    def window(self) -> int:
        return self.w.shape[1]

    @property
    def pitch(self) -> int:
        """From a weight of an output to the next one of the same output: the first layer's outputs."""
        return self.w.shape[2]

    def width(self, layer: int) -> int:
        """Outputs of a layer."""
        return len(self.x) - (layer + 1) * (self.window - 1)

    def weights(self, layout: Layout, layer: int) -> Any:
        w = self.w[layer % len(self.w)]
        if layout == "none":
            return None
        return np.ascontiguousarray(w.T) if layout == "outputs" else list(w) if layout == "arrays" else w

    def layer(self, x: np.ndarray, layer: int) -> np.ndarray:
        """A layer's outputs in float64."""
        return 1.0 / (1.0 + np.exp(-self._sum(x, self.w[layer % len(self.w)]) - BIAS))

    def _sum(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        n = len(x) - self.window + 1
        total = np.zeros(n)
        for r, line in enumerate(w[:, :n]):
            total += line.astype(np.float64) * x[r : r + n]
        return total

    def check(self, what: str, x: np.ndarray, y: np.ndarray, layer: int, *, weightless: bool = False) -> float:
        """The relative error of a layer's outputs y, by Euclidean norms.

        Raises:
            SystemExit: one is further off than a rounding for each weight, and those of f, explain.
        """
        w = self.w[layer % len(self.w)]
        if weightless:
            w = np.ones_like(w)
        wide = x.astype(np.float64)
        right = 1.0 / (1.0 + np.exp(-self._sum(wide, w) - BIAS))
        bound = EPS32 * ((self.window + 1) * (self._sum(abs(wide), abs(w)) + BIAS) + 16)
        difference = abs(y - right)
        if not (difference <= bound).all():
            sys.exit(f"{what}: wrong by up to {difference.max()}, where {bound.max()} is explained")
        return float(np.linalg.norm(difference) / np.linalg.norm(right))


@dataclass(frozen=True)
class Result:
    """A rung on a network; a line of JSON, beside the surroundings.  Where ``left_out`` tells why, it was not timed."""

    rung: str
    n: int
    k: int
    weights: str
    kernel: str = ""
    seconds: float | None = None
    outputs_per_second: float | None = None
    speedup: float | None = None
    error: float | None = None
    of_limit: float | None = None
    left_out: str = ""


# --- measuring ---


class Serial:
    """The loop of local_serial.c, compiled."""

    def __init__(self, folder: Path) -> None:
        self._layer = compiled("local_serial.c", folder).layer
        floats = np.ctypeslib.ndpointer(np.float32, flags="C")
        self._layer.argtypes = [ctypes.c_int, ctypes.c_int, floats, floats, ctypes.c_float, floats]
        self._layer.restype = None

    def run(self, stack: Stack, most_layers: int | None = None) -> np.ndarray:
        """The last layer's outputs."""
        return self._run(stack, stack.layers if most_layers is None else min(most_layers, stack.layers))[0]

    def rate(self, stack: Stack) -> float:
        """Outputs per second, over the first layers."""
        layers = min(SERIAL_LAYERS, stack.layers)
        return sum(map(stack.width, range(layers))) / self._run(stack, layers)[1]

    def _run(self, stack: Stack, layers: int) -> tuple[np.ndarray, float]:
        weights = [stack.weights("outputs", layer) for layer in range(min(layers, len(stack.w)))]
        x, seconds = stack.x, 0.0
        for layer in range(layers):
            y = np.empty(stack.width(layer), np.float32)
            started = time.perf_counter()
            self._layer(len(y), stack.window, x, weights[layer % len(weights)], BIAS, y)
            seconds += time.perf_counter() - started
            x = y
        return x, seconds


class OnCard:
    """A stack's arrays on the card, with the weights in one layout."""

    def __init__(self, bench: Workbench, stack: Stack, layout: Layout, *, distinct: bool) -> None:
        self._bench, self._stack, self._layout = bench, stack, layout
        self.x = bench.array(stack.x)
        self._between = [bench.empty(4 * stack.pitch) for _ in range(2)]
        self._bias, self._step = bench.array(BIAS_ARRAY), bench.array(STEP_OF_ONE)
        self._apart = 4 * stack.w[0].size if distinct else 0  # bytes from a layer's weights to the next one's
        self._weights = 0
        if layout != "none":
            self._weights = self._copies(stack.layers if distinct else 1)

    def _copies(self, count: int) -> int:
        """The weights of so many layers, those beyond the pool copied within the card."""
        stack, size = self._stack, 4 * self._stack.w[0].size
        address = self._bench.empty(size * count)
        pool = min(count, len(stack.w))
        for layer in range(pool):
            w = stack.weights("outputs" if self._layout == "outputs" else "window", layer)
            self._bench.upload(address + layer * size, w)
        for layer in range(pool, count):
            self._bench.copy(address + layer * size, address + layer % pool * size, size)
        return address

    def put(self, rung: Rung, layers: int) -> int:
        """Launch the first layers; returns where the last one's outputs are."""
        stack, source = self._stack, self.x
        for layer in range(layers):
            n, target = stack.width(layer), self._between[layer % 2]
            at = self._weights + layer * self._apart
            w = [at + 4 * r * stack.pitch for r in range(stack.window)] if rung.layout == "arrays" else at
            operands = Operands(source, w, target, self._bias, self._step, n, stack.pitch, stack.window)
            self._bench.put(rung.entry, rung.grid(n), rung.values(operands))
            source = target
        return source


def planned(backend: CudaBackend, bench: Workbench, stack: Stack, *, distinct: bool) -> tuple[float, np.ndarray]:
    """The network as a plan runs it: seconds of an evaluation, and the outputs.

    Weights are copied within the card: those of all layers may be more than the host would hold.
    """
    window = stack.window
    if distinct:
        widths = [len(stack.x), *map(stack.width, range(stack.layers))]
        layers = [mg.LocallyConnected(n_in, window, "sigmoid", "layer", "zeros") for n_in, _ in pairwise(widths)]
    else:
        layers = [mg.LocallyConnected(len(stack.x), window, "sigmoid", "layer", "zeros")] * stack.layers
    network = mg.Network(layers, seed=0)
    plan = network.lower(capacity=1)

    def start(program: CudaProgram) -> None:
        network.start(program)
        pool, bias = [bench.array(w) for w in stack.w], bench.array(BIAS_ARRAY)
        for p in plan.parameters:
            place = program.address("parameters") + 4 * p.offset
            if p.name.endswith("bias"):
                bench.copy(place, bias, 4)
                continue
            (_, n), source = p.shape, pool[int(p.name.partition(".")[0]) % len(pool)]
            for r in range(window):
                bench.copy(place + 4 * r * n, source + 4 * r * stack.pitch, 4 * n)
        bench.clear()

    probe = Probe(plan, backend.device, start, mg.Dataset(stack.x[np.newaxis]))
    with backend.device:
        return probe.seconds(), probe.predicted[0]


class Climb:
    """One network after another, each rung on each of them."""

    def __init__(self, backend: CudaBackend, bench: Workbench, serial: Serial, limit: float) -> None:
        self._backend, self._bench, self._serial, self._limit = backend, bench, serial, limit
        self.results: list[Result] = []

    def at(self, n: int, k: int, *, distinct: bool) -> None:
        """All rungs on a network; results are printed as they come."""
        stack = Stack.random(n, k, WINDOW, POOL if distinct else 1)
        self._about = n, k, "distinct" if distinct else "reused"
        self._serial_rate = self._serial.rate(stack)
        print("\nN = {:,}, K = {:,}, weights {}".format(*self._about))
        print(f"{'':20}{'ms':>10}{'outputs/s':>12}{'speed-up':>12}{'error':>10}{'of limit':>10}")
        self._add("serial loop", "", outputs(n, k, WINDOW) / self._serial_rate, None, None)
        last: np.ndarray | None = None
        for rung in (*rungs(WINDOW), of_table()):
            try:
                card = OnCard(self._bench, stack, rung.layout, distinct=distinct)
                error, seconds, y = self._measure(rung, card, stack)
            except MlpgpuError as refused:
                self._leave_out(rung.name, str(refused))
                continue
            finally:
                self._bench.clear()
            reads_once = distinct and rung.layout != "none"
            floor = 4 * WINDOW * outputs(n, k, WINDOW) / self._limit if reads_once else None
            self._add(rung.name, rung.entry.name, seconds, error, floor)
            if rung.layout != "none":
                last = y if last is None else last
                if not np.isfinite(y).all() or not np.array_equal(y.view(np.uint32), last.view(np.uint32)):
                    sys.exit(f"{rung.name}: the network's outputs are not finite, or not those of the other rungs")
        gc.collect()  # programs hold themselves, and the memory of the one before is this one's
        try:
            seconds, y = planned(self._backend, self._bench, stack, distinct=distinct)
        except MlpgpuError as refused:
            self._leave_out("mlpgpu, a plan", str(refused))
            return
        if last is not None and not (abs(y - last) <= DEPTH_TOLERANCE).all():
            sys.exit(f"mlpgpu, a plan: off by up to {abs(y - last).max()}")
        floor = 4 * WINDOW * outputs(n, k, WINDOW) / self._limit if distinct else None
        self._add("mlpgpu, a plan", "", seconds, None, floor)

    def _measure(self, rung: Rung, card: OnCard, stack: Stack) -> tuple[float, float, np.ndarray]:
        """The first layer's error, the network's seconds, and its outputs."""
        first = self._bench.read(card.put(rung, 1), (stack.width(0),))
        error = stack.check(rung.name, stack.x, first, 0, weightless=rung.layout == "none")
        seconds = self._bench.seconds(lambda: card.put(rung, stack.layers))
        return error, seconds, self._bench.read(card.put(rung, stack.layers), (stack.width(stack.layers - 1),))

    def _add(self, name: str, kernel: str, seconds: float, error: float | None, floor: float | None) -> None:
        n, k, _ = self._about
        rate = outputs(n, k, WINDOW) / seconds
        speedup, of_limit = rate / self._serial_rate, None if floor is None else floor / seconds
        self.results.append(Result(name, *self._about, kernel, seconds, rate, speedup, error, of_limit))
        shown = ("" if error is None else f"{error:.1e}", "" if of_limit is None else f"{of_limit:.1%}")
        print(f"{name:20}{1000 * seconds:10,.3f}{rate:12.3g}{speedup:12,.1f}{shown[0]:>10}{shown[1]:>10}")

    def _leave_out(self, name: str, why: str) -> None:
        self.results.append(Result(name, *self._about, left_out=why))
        print(f"{name:20}left out: {why}")


# --- the picture ---


def draw(results: Sequence[Result], path: Path) -> None:
    """Outputs per second, against N at the greatest depth and against depth at the greatest N."""
    timed = [result for result in results if result.outputs_per_second is not None]
    n, k = max(result.n for result in timed), max(result.k for result in timed)
    names = dict.fromkeys(result.rung for result in timed)
    figure = Figure(figsize=(11, 8), layout="constrained")
    for line, weights in zip(figure.subplots(2, 2, sharey=True), ("distinct", "reused"), strict=True):
        own = [result for result in timed if result.weights == weights]
        panels = (
            (f"N, at K = {k:,}", [(result.n, result) for result in own if result.k == k]),
            (f"K, at N = {n:,}", [(result.k, result) for result in own if result.n == n]),
        )
        for axes, (label, found) in zip(line, panels, strict=True):
            rungs = {name: [(x, r.outputs_per_second or 0.0) for x, r in found if r.rung == name] for name in names}
            draw_rungs(axes, label, rungs)
            axes.set_title(f"weights {weights}")
        line[0].set_ylabel("outputs per second")
    save(figure, path)


def main() -> None:
    options = command_line("Climb the ladder of locally connected networks on a GPU.", "local_ladder.png").parse_args()
    if options.only_draw:
        draw(kept(options.json, Result), options.picture)
        return
    backend = cuda()
    with backend.device as device, tempfile.TemporaryDirectory() as folder:
        limit = measure_peak_rates(device).copied
        print(f"{device.name}: {limit / 1e9:,.0f} GB/s")
        bench = Workbench(device, [rung.entry for rung in (*rungs(WINDOW), of_table())], FOLDER)
        climb = Climb(backend, bench, Serial(Path(folder)), limit)
        about = {**surroundings(backend), "limit_bytes_per_second": limit, "window": WINDOW, "quick": options.quick}
        for n, k in QUICK if options.quick else SIZES:
            for distinct in (True, False):
                climb.at(n, k, distinct=distinct)
                if options.json:
                    options.json.write_text(json_lines(climb.results, about), encoding="utf-8")
    draw(climb.results, options.picture)


if __name__ == "__main__":
    main()
