"""Training steps on a card: mlpgpu beside PyTorch and JAX, whoever of them is installed, on the same work.

All train on the same random rows, which lie on the card, for whole epochs, shuffles included, with momentum, and take
turns, round by round, in one process on one card; figures are medians.  PyTorch runs eagerly, as one CUDA graph of an
epoch's steps captured by hand, and compiled and captured, which is the fastest and alone in tf32 and bfloat16; JAX runs
an epoch as one jitted scan, unrolled fourfold.  "float32" means what each computes there in float32: JAX also by its
algorithms of several tensor-core products.
"bfloat16" keeps float32 parameters and multiplies in bfloat16: PyTorch by autocast, JAX by casts.

Each contender's error is that of its product of two 4096 by 4096 matrices, against float64.  The products of the
largest network, launch by launch, stand beside cuBLAS's of the very numbers that they multiply, in turns of 5 ms: as a
step launches them, with what their ends do beside, and by the same kernels where C is only stored.

    python benchmarks/peers.py [--only NAME ...] [--precision NAME ...] [--quick] [--json PATH] [--commit NAME]

writes a line of JSON for each result; benchmarks/report.py makes tables and the chart of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import mlpgpu as mg
from mlpgpu import bench
from mlpgpu.backends import Sampling
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.backends.cuda.costs import flops
from mlpgpu.backends.cuda.explain import random_data
from mlpgpu.backends.cuda.products import Operand, Products
from mlpgpu.bench import Epochs, Product, Result, Workload
from mlpgpu.errors import MlpgpuError

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the card for itself
try:
    import torch
except ImportError:
    torch = None
try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None

LOSS_TOLERANCES = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 3e-2}  # relative, of a first epoch's mean loss
UNROLL = 4  # steps in the body of JAX's scan: 784-128-10 at batch 128 took 36 µs a step by 1, 29 by 4, 30 by 8
PRODUCT_SECONDS = 5e-3  # about what a turn at one product takes


def progress(message: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {message}", file=sys.stderr, flush=True)


STARTED = time.perf_counter()


def free_memory() -> None:
    """Give back what nobody holds any longer."""
    gc.collect()
    if torch:
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- contenders: called with an order, or None for a shuffle of their own, they train for an epoch ---

Contender = Callable[..., float]


@contextmanager
def torch_precision(precision: str) -> Iterator[None]:
    """PyTorch's float32 products are computed in tf32, or bfloat16, or as float32."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        yield


class PyTorch:
    """A workload by PyTorch, from the parameters that mlpgpu starts with."""

    def __init__(self, workload: Workload, precision: str, x: Any, y: Any, *, compiled: bool = False) -> None:
        self.workload, self.precision = workload, precision
        modules: list[Any] = []
        parameters = workload.network().parameters
        for k, (n_in, n_out) in enumerate(pairwise(workload.widths)):
            linear = torch.nn.Linear(n_in, n_out, device="cuda")
            with torch.no_grad():
                linear.weight.copy_(torch.tensor(parameters[f"{k}.weight"]).T)
                linear.bias.copy_(torch.tensor(parameters[f"{k}.bias"]))
            modules += [linear, torch.nn.ReLU()]
        model = torch.nn.Sequential(*modules[:-1])
        self.parameters = list(model.parameters())
        self.initial = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.SGD(self.parameters, lr=workload.rate, momentum=bench.MOMENTUM, fused=True)
        self.order = torch.arange(workload.rows, device="cuda")
        self.batches = [self.order[k * workload.batch_size :][: workload.batch_size] for k in range(workload.steps)]
        self.losses = torch.zeros(workload.steps, device="cuda")
        self.graph: Any = None

        def forward(batch: Any) -> Any:
            z, target = model(x[batch]), y[batch]
            if workload.loss == "squared_error":
                return 0.5 / len(batch) * torch.nn.functional.mse_loss(z.float(), target, reduction="sum")
            return torch.nn.functional.cross_entropy(z.float(), target)

        # Compiled for the full batch, and again for a shorter last one.
        self.forward = torch.compile(forward, dynamic=False) if compiled else forward

    def run_steps(self) -> None:
        for k, batch in enumerate(self.batches):
            with torch_precision(self.precision):
                loss = self.forward(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses[k] = loss.detach()

    def capture(self) -> PyTorch:
        """Make one graph of a whole epoch's steps, and go back to the initial parameters."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run_steps()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # What is collected meanwhile may free memory of the card, which ends a capture.
        gc.collect()
        gc.disable()
        try:
            # Of other threads, such as JAX has, a capture minds nothing.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.run_steps()
        finally:
            gc.enable()
        with torch.no_grad():
            for parameter, initial in zip(self.parameters, self.initial, strict=True):
                parameter.copy_(initial)
                self.optimizer.state[parameter]["momentum_buffer"].zero_()
        return self

    def __call__(self, order: np.ndarray | None = None) -> float:
        if order is None:
            torch.randperm(self.workload.rows, out=self.order)
        else:
            self.order.copy_(torch.tensor(order))
        if self.graph is None:
            self.run_steps()
        else:
            self.graph.replay()
        losses: np.ndarray = self.losses.cpu().numpy()  # waits for them
        return float(np.average(losses, weights=[len(batch) for batch in self.batches]))


@dataclass(frozen=True)
class Algorithm:
    """How JAX multiplies matrices: operands of ``dtype``, by an algorithm or precision of its own by name."""

    contender: str
    dtype: str
    precision: str

    def dot(self, a: Any, b: Any) -> Any:
        presets = jax.lax.DotAlgorithmPreset
        chosen = getattr(presets, self.precision) if self.precision in presets.__members__ else self.precision
        return jnp.dot(a.astype(self.dtype), b.astype(self.dtype), precision=chosen)


ALGORITHMS = {
    "float32": (
        Algorithm("JAX", "float32", "highest"),
        Algorithm("JAX bf16x6", "float32", "BF16_BF16_F32_X6"),
        Algorithm("JAX tf32x3", "float32", "TF32_TF32_F32_X3"),
    ),
    "tf32": (Algorithm("JAX", "float32", "TF32_TF32_F32"),),
    "bfloat16": (Algorithm("JAX", "bfloat16", "default"),),
}


class Jax:
    """A workload by JAX, from the parameters that mlpgpu starts with: an epoch is one jitted scan."""

    def __init__(self, workload: Workload, algorithm: Algorithm, x: Any, y: Any) -> None:
        self.workload, self.x, self.y = workload, x, y
        batch_size, rate = workload.batch_size, workload.rate
        whole = workload.rows // batch_size
        initial = workload.network().parameters
        count = len(workload.widths) - 1
        parameters = [(jnp.asarray(initial[f"{k}.weight"]), jnp.asarray(initial[f"{k}.bias"])) for k in range(count)]
        self.state = parameters, jax.tree.map(jnp.zeros_like, parameters)
        self.key = jax.random.key(0)

        def mean_loss(parameters: Any, h: Any, target: Any) -> Any:
            for k, (w, b) in enumerate(parameters):
                z = algorithm.dot(h, w) + b.astype(algorithm.dtype)
                h = jax.nn.relu(z) if k < count - 1 else z.astype("float32")
            if workload.loss == "squared_error":
                return 0.5 / len(h) * jnp.sum((h - target) ** 2)
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h), target[:, None], axis=1))

        def epoch(state: Any, order: Any, x: Any, y: Any) -> Any:
            def step(state: Any, batch: Any) -> Any:
                parameters, velocities = state
                loss, gradients = jax.value_and_grad(mean_loss)(parameters, x[batch], y[batch])
                velocities = jax.tree.map(lambda v, g: bench.MOMENTUM * v + rate * g, velocities, gradients)
                return (jax.tree.map(jnp.subtract, parameters, velocities), velocities), loss

            batches = order[: whole * batch_size].reshape(whole, batch_size)
            state, losses = jax.lax.scan(step, state, batches, unroll=min(UNROLL, whole))
            if whole < workload.steps:  # a shorter last batch
                state, last = step(state, order[whole * batch_size :])
                losses = jnp.append(losses, last)
            return state, losses

        self.epoch = jax.jit(epoch, donate_argnums=0)
        self.shuffle = jax.jit(lambda key: jnp.argsort(jax.random.bits(key, (workload.rows,))))  # one sort; theirs, two

    def __call__(self, order: np.ndarray | None = None) -> float:
        if order is None:
            self.key, key = jax.random.split(self.key)
            shuffled = self.shuffle(key)
        else:
            shuffled = jnp.asarray(order.astype(np.int32))
        self.state, losses = self.epoch(self.state, shuffled, self.x, self.y)
        counts = np.full(self.workload.steps, self.workload.batch_size)
        counts[-1] += self.workload.rows - counts.sum()
        return float(np.average(np.asarray(losses), weights=counts))  # waits for them


def warm_up(*, compiled: bool) -> None:
    """Have PyTorch's and JAX's compilers start, 10 s each, side by side: later, no thread may disturb a capture."""
    starting = None
    if jax:
        a = jnp.ones((64, 64))
        starting = threading.Thread(target=lambda: jax.jit(Algorithm("", "float32", "highest").dot)(a, a))
        starting.start()
    if torch and compiled:
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        with suppress(Exception):  # who cannot compile is named when its turn comes
            torch.compile(lambda x: torch.relu(x).sum())(x).backward()
    if starting:
        starting.join()


# --- steps ---


class Errors:
    """Of each contender's product of the same two matrices, computed once."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._product = Product.random(bench.PRODUCT_SIZE)
        self._found: dict[tuple[str, str], float] = {}

    def of(self, contender: str, precision: str) -> float:
        """Of a contender by name; PyTorch's forms all call one library."""
        key = contender.partition(",")[0], precision
        if key not in self._found:
            self._found[key] = self._measure(*key)
        return self._found[key]

    def _measure(self, contender: str, precision: str) -> float:
        a, b = self._product.a, self._product.b
        if contender == "mlpgpu":
            return bench.forward_error(self._product, self._backend, precision)
        if contender == "PyTorch":
            with torch_precision(precision):
                c = torch.from_numpy(a).cuda() @ torch.from_numpy(b).cuda()
            return self._product.error(c.float().cpu().numpy())
        algorithm = next(algorithm for algorithm in ALGORITHMS[precision] if algorithm.contender == contender)
        c = jax.jit(algorithm.dot)(jnp.asarray(a), jnp.asarray(b))
        return self._product.error(np.asarray(c.astype("float32")))


class Ours(Epochs):
    """A workload by mlpgpu, whose first epoch has the order that the others are given for theirs."""

    def __call__(self, order: np.ndarray | None = None) -> float:
        return super().__call__()


def contenders(
    workload: Workload, precision: str, arrays: tuple[np.ndarray, np.ndarray], *, quick: bool
) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Names, and functions that make them."""
    yield "mlpgpu", lambda: Ours(workload.trainer(backend="cuda", precision=precision), mg.Dataset(*arrays))
    if torch:
        x, y = (torch.from_numpy(array).cuda() for array in arrays)
        if precision == "float32":
            yield "PyTorch, eager", lambda: PyTorch(workload, precision, x, y)
        if precision == "float32" or quick:
            yield "PyTorch, graph", lambda: PyTorch(workload, precision, x, y).capture()
        if not quick:
            yield "PyTorch, compiled graph", lambda: PyTorch(workload, precision, x, y, compiled=True).capture()
    if jax:
        xs, ys = (jnp.asarray(array if array.dtype == np.float32 else array.astype(np.int32)) for array in arrays)
        for algorithm in ALGORITHMS[precision][: 1 if quick else None]:
            yield algorithm.contender, partial(Jax, workload, algorithm, xs, ys)


def steps(
    key: str, precision: str, arrays: tuple[np.ndarray, np.ndarray], errors: Errors, *, quick: bool
) -> list[Result]:
    """Everyone's steps of a workload at a precision; who fails is named and left out."""
    workload = bench.WORKLOADS[key]
    progress(f"{key}: {workload.name}, {precision}")
    order = Sampling(workload.rows, workload.batch_size, seed=0).order(0)
    running: dict[str, Contender] = {}
    losses: dict[str, float] = {}
    for name, make in contenders(workload, precision, arrays, quick=quick):
        started = time.perf_counter()
        try:
            contender = make()
            losses[name] = contender(order)
        except Exception as error:
            traceback.print_exc()
            progress(f"  {name} failed: {first_line(error)}")
            continue
        running[name] = contender
        progress(f"  {name} made in {time.perf_counter() - started:.1f} s")
        first = next(iter(losses))
        if abs(losses[name] / losses[first] - 1) > LOSS_TOLERANCES[precision]:
            progress(f"  {name} trained to another loss: {losses[name]:.6g}; {first} {losses[first]:.6g}")
    seconds = bench.take_turns(running, bench.QUICK_ROUNDS if quick else bench.ROUNDS)
    return [
        bench.summarize(key, workload, precision, name, own, loss=losses[name], error=errors.of(name, precision))
        for name, own in seconds.items()
    ]


# --- the products of the largest network, beside cuBLAS ---


@dataclass(frozen=True)
class Kernel:
    """A product that a step launches, measured three ways in turns: seconds are medians of rounds.

    Attributes:
        microseconds: of the launch as a step has it, with all that its end does beside storing C.
        alone_microseconds: of the same kernel where its end stores C as it is: in bfloat16 in that precision, but
            gradients of weights in float32.
        cublas_microseconds: of cuBLAS's product of the same numbers, in the order that they are stored in.
    """

    workload: str
    precision: str
    operation: str
    kernel: str
    form: str
    gigaflop: float
    microseconds: float
    alone_microseconds: float
    cublas_microseconds: float

    @property
    def teraflops(self) -> tuple[float, float, float]:
        """As launched, alone, and of cuBLAS."""
        as_launched, alone, cublas = self.microseconds, self.alone_microseconds, self.cublas_microseconds
        return 1e3 * self.gigaflop / as_launched, 1e3 * self.gigaflop / alone, 1e3 * self.gigaflop / cublas


# Whether the first and the second operand are transposed.
FORMS = {"backward_input": (False, True), "backward_weight": (True, False), "forward": (False, False)}


def kernels(key: str, precision: str, backend: CudaBackend, *, quick: bool) -> list[Kernel]:
    """Each product that a step launches: all of them and cuBLAS's take turns, so that the card is as warm for each."""
    workload = bench.WORKLOADS[key]
    progress(f"{key}: products in {precision}")
    trainer = workload.trainer(backend="cuda", precision=precision)
    state = trainer.network.state(trainer.plan.optimizer)
    device, data = backend.device, random_data(trainer.plan, None)
    products = Products(trainer.plan, device, lambda program: program.load(state), data)
    running: dict[tuple[int, str], Callable[[], float]] = {}
    launches = products.launches
    for place, launch in enumerate(launches):
        form = bench.product_form(launch.entry.name)
        assert form is not None
        running[place, "as launched"] = products.turn(launch, PRODUCT_SECONDS)
        running[place, "alone"] = products.turn(products.alone(launch), PRODUCT_SECONDS)
        a, b = (torch_operand(operand) for operand in products.operands(launch))
        running[place, "cuBLAS"] = cublas_turn(form, a, b, precision)
    rounds = bench.QUICK_ROUNDS if quick else bench.ROUNDS
    seconds: dict[tuple[int, str], list[float]] = {turn: [] for turn in running}
    for count in range(rounds + 1):  # the first one warms the card
        for turn, run in running.items():
            took = run()
            if count:
                seconds[turn].append(took)
    found = []
    for place, launch in enumerate(launches):
        name = launch.entry.name
        times = (1e6 * statistics.median(seconds[place, turn]) for turn in ("as launched", "alone", "cuBLAS"))
        gigaflop = 1e-9 * flops(launch, trainer.plan.capacity)
        found.append(Kernel(key, precision, launch.operation, name, str(bench.product_form(name)), gigaflop, *times))
    return found


class CudaArray:
    """Memory of the card as PyTorch takes it over."""

    def __init__(self, operand: Operand) -> None:
        self.__cuda_array_interface__ = {
            "shape": (max(1, operand.planes), operand.rows, operand.pitch),
            "strides": None if operand.planes < 2 else (2 * operand.plane, 2 * operand.pitch, 2),
            "typestr": "<i2" if operand.planes else "<f4",
            "data": (operand.address, False),
            "version": 2,
        }


def torch_operand(operand: Operand) -> Any:
    """A copy of a matrix that our product multiplies, its nearest bfloat16 alone where it lies in planes of those."""
    matrix = torch.as_tensor(CudaArray(operand), device="cuda")[0, :, : operand.columns].clone()
    return matrix.view(torch.bfloat16) if operand.planes else matrix


def cublas_turn(form: str, a: Any, b: Any, precision: str) -> Callable[[], float]:
    """Runs cuBLAS's product, through PyTorch, for its turn, and returns the seconds of each time."""
    is_first, is_second = FORMS[form]
    left, right = a.T if is_first else a, b.T if is_second else b
    product = partial(
        torch.matmul, left, right, out=torch.empty(len(left), right.shape[1], device="cuda", dtype=a.dtype)
    )

    def run(repeats: int = 0) -> float:
        with torch_precision("tf32" if precision == "tf32" else "float32"):
            return cuda_seconds(product, repeats or count)

    count = max(1, round(PRODUCT_SECONDS / run(2)))
    return run


def cuda_seconds(run: Callable[[], object], repeats: int) -> float:
    """Of one call on the card, by events around ``repeats`` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats


# --- all of it ---


def show_kernels(found: Sequence[Kernel]) -> None:
    for kernel in found:
        as_launched, alone, cublas = kernel.teraflops
        print(
            f"{kernel.precision:9} {kernel.operation:14} {kernel.kernel:50} {kernel.microseconds:9,.1f} µs, alone "
            f"{kernel.alone_microseconds:9,.1f}, cuBLAS {kernel.cublas_microseconds:9,.1f}: TFLOP/s {as_launched:6.1f} "
            f"{alone:6.1f} {cublas:6.1f}, {as_launched / cublas:.3f} and {alone / cublas:.3f} of cuBLAS"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training steps beside PyTorch and JAX on a GPU.")
    parser.add_argument("--only", nargs="+", choices=[*bench.WORKLOADS, "products"], help="these workloads alone")
    parser.add_argument("--precision", nargs="+", choices=bench.PRECISIONS, default=bench.PRECISIONS)
    parser.add_argument("--quick", action="store_true", help="three rounds, nothing compiled by PyTorch, one JAX")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line of JSON for each result there")
    parser.add_argument("--commit", help="what is measured, where git cannot say")
    arguments = parser.parse_args()
    try:
        backend = CudaBackend()
    except MlpgpuError as error:
        sys.exit(str(error))
    about = bench.surroundings(backend, ("torch", "jax"))
    about["commit"] = arguments.commit or about["commit"]
    for name, module in {"PyTorch": torch, "JAX": jax}.items():
        if module is None:
            progress(f"{name} is not installed, and left out")

    wanted = arguments.only or [*bench.WORKLOADS, "products"]
    if wanted != ["products"]:
        warm_up(compiled=not arguments.quick)
    errors = Errors(backend)
    results: list[Result] = []
    products: list[Kernel] = []
    failed = []

    def attempt(into: list[Any], run: Callable[..., list[Any]], *given: Any) -> None:
        try:
            into += run(*given, quick=arguments.quick)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{run.__name__} of {' in '.join(given[:2])} failed: {first_line(error)}")
        free_memory()
        if arguments.json:
            arguments.json.write_text(bench.json_lines([*results, *products], about), encoding="utf-8")

    for key in (name for name in wanted if name != "products"):
        arrays = bench.WORKLOADS[key].arrays()
        for precision in (name for name in bench.WORKLOADS[key].precisions if name in arguments.precision):
            attempt(results, steps, key, precision, arrays, errors)
    if "products" in wanted and torch:
        for precision in arguments.precision:
            attempt(products, kernels, "large", precision, backend)

    print(f"{about['card']}, driver {about['driver']}, {about['versions']}, commit {about['commit']}")
    print(bench.table(results))
    show_kernels(products)
    print(*failed, sep="\n")


if __name__ == "__main__":
    main()
