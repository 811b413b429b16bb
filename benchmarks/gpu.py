"""What training takes on a card: mlpgpu beside PyTorch, cuBLAS, its own CPU backend and a plain C loop.

Whoever is compared does the same work on the same random data in the same run.  They take turns, round
by round; figures are medians, and a ratio is the median of the rounds' ratios.  A turn ends when the
card has finished.  PyTorch computes in strict float32 with its fused optimizer, on data that lie on the
card, gathered by an index list that it shuffles there.  Tables come last; a part that fails says so, and
the others go on.

    python benchmarks/gpu.py [--only PART ...] [--quick] [--json PATH] [--data FOLDER] [--commit NAME]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu import surroundings

import mlpgpu as mg
from mlpgpu.backends import Sampling, State
from mlpgpu.backends.base import MEMORY_SHARE
from mlpgpu.backends.cuda import compiler, kernels
from mlpgpu.backends.cuda.driver import Device, Event, Module, Stream, describe_machine, find_device, pack
from mlpgpu.backends.cuda.lowering import At, Launch, lower
from mlpgpu.backends.cuda.program import DOUBLES, STEP
from mlpgpu.errors import BackendError
from mlpgpu.plan import Plan
from mlpgpu.plan import lower as lower_layers

DEVICE = "cuda"
MOMENTUM = 0.9
TURN_SECONDS = 0.15  # about what a turn takes, unless one call takes longer
PRODUCT_SECONDS = 0.03  # likewise, of one matrix product repeated
ROOT = Path(mg.__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """How thorough a run is."""

    quick: bool
    data: str | None

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 7


@dataclass
class Table:
    """A part's results; each row has one value for each column."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cells = [self.columns, *(tuple(_cell(value) for value in row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([f"\n{self.title}", *lines, *self.notes])

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": self.notes}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def progress(message: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {message}", file=sys.stderr, flush=True)


STARTED = time.perf_counter()


def free_memory() -> None:
    """Give back what nobody holds any longer, ours and PyTorch's."""
    gc.collect()
    torch.cuda.empty_cache()


def take_turns(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each contender, round by round; each ends when its work is done."""
    calls = {}
    for name, run in contenders.items():
        run()  # compiles, captures, fills caches
        started = time.perf_counter()
        run()
        calls[name] = max(1, round(TURN_SECONDS / (time.perf_counter() - started)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            started = time.perf_counter()
            for _ in range(calls[name]):
                run()
            seconds[name].append((time.perf_counter() - started) / calls[name])
    return seconds


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


# --- one network on one set of random rows, by each contender ---


@dataclass(frozen=True)
class Workload:
    """A network, the rows it is trained on, and how."""

    widths: tuple[int, ...]
    batch_size: int
    rows: int
    rate: float
    loss: str = "softmax_cross_entropy"
    activation: str = "relu"
    last: str = "identity"

    @property
    def name(self) -> str:
        return f"{'-'.join(map(str, self.widths))}, batch {self.batch_size:,}"

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.rows // self.batch_size)

    def network(self) -> mg.Network:
        *hidden, (n_in, n_out) = pairwise(self.widths)
        layers = [mg.Dense(*widths, activation=self.activation) for widths in hidden]
        return mg.Network([*layers, mg.Dense(n_in, n_out, activation=self.last)], seed=0)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (rows, n_in), and labels (rows,) or for a squared error targets (rows, n_out)."""
        rng = np.random.default_rng(0)
        n_out = self.widths[-1]
        x = rng.random((self.rows, self.widths[0]), dtype=np.float32)
        if self.loss == "squared_error":
            return x, rng.random((self.rows, n_out), dtype=np.float32)
        return x, rng.integers(n_out, size=self.rows)


class Ours:
    """mlpgpu's program of a workload; a call trains for one epoch and returns its mean loss."""

    def __init__(
        self,
        workload: Workload,
        data: mg.Dataset,
        *,
        backend: str = "cuda",
        streams: int = 1,
        reduction: str = "ordered",
        shuffle: bool = True,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        network = workload.network()
        trainer = mg.Trainer(
            network,
            workload.loss,
            mg.Momentum(workload.rate, momentum=MOMENTUM),
            batch_size=workload.batch_size,
            backend=backend,
            streams=streams,
            reduction=reduction,
        )
        self.plan: Plan = trainer.plan
        self.rates = np.full(workload.steps, workload.rate)
        self.step = 0
        parameters = network.flat_parameters()[np.newaxis]
        self.program = trainer.backend.compile(self.plan, memory_share=memory_share)
        self.program.load(State(parameters, np.zeros_like(parameters)[np.newaxis], np.empty((1, 0), np.float32)))
        self.program.attach(data, Sampling(workload.rows, workload.batch_size, seed=0, shuffle=shuffle))

    def __call__(self) -> float:
        loss, weight = self.program.run(self.step, self.rates).sum(axis=0)
        self.step += len(self.rates)
        return float(loss / weight)


class PyTorch:
    """A workload by PyTorch, from the same parameters; a call trains for one epoch and returns its mean loss."""

    def __init__(self, workload: Workload, x: torch.Tensor, y: torch.Tensor, *, compiled: bool = False) -> None:
        self.workload = workload
        modules: list[torch.nn.Module] = []
        parameters = workload.network().parameters
        for k, (n_in, n_out) in enumerate(pairwise(workload.widths)):
            linear = torch.nn.Linear(n_in, n_out, device=DEVICE)
            with torch.no_grad():
                linear.weight.copy_(torch.tensor(parameters[f"{k}.weight"]).T)
                linear.bias.copy_(torch.tensor(parameters[f"{k}.bias"]))
            modules += [linear, torch.nn.ReLU()]
        model = torch.nn.Sequential(*modules[:-1])
        self.parameters = list(model.parameters())
        self.initial = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.SGD(self.parameters, lr=workload.rate, momentum=MOMENTUM, fused=True)
        self.order = torch.arange(workload.rows, device=DEVICE)
        self.batches = [self.order[k * workload.batch_size :][: workload.batch_size] for k in range(workload.steps)]
        self.losses = torch.zeros(workload.steps, device=DEVICE)
        self.graph: torch.cuda.CUDAGraph | None = None

        def forward(batch: torch.Tensor) -> torch.Tensor:
            z, target = model(x[batch]), y[batch]
            if workload.loss == "squared_error":
                return 0.5 / len(batch) * torch.nn.functional.mse_loss(z, target, reduction="sum")
            return torch.nn.functional.cross_entropy(z, target)

        # Compiled for the full batch, and again for a shorter last one.
        self.forward = torch.compile(forward, dynamic=False) if compiled else forward

    def run_steps(self) -> None:
        for k, batch in enumerate(self.batches):
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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.run_steps()
        self.graph = graph
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
        counts = [len(batch) for batch in self.batches]
        return float(np.average(losses, weights=counts))


# --- steps ---

WORKLOADS = (
    Workload((784, 128, 10), batch_size=128, rows=60_000, rate=1e-3),
    Workload((783, 30, 10), batch_size=32, rows=20_000, rate=1e-3),
    Workload((784, 1024, 1024, 10), batch_size=1024, rows=61_440, rate=1e-3),
    Workload((4096,) * 5, batch_size=8192, rows=16_384, rate=1e-7, loss="squared_error"),
    Workload((90_000, 90, 90, 10), batch_size=128, rows=6_400, rate=1e-5),
    Workload((90_000, 90, 90, 10), batch_size=1, rows=512, rate=1e-5),
)
LOSS_TOLERANCE = 1e-4  # relative; rounding at a ReLU's kink moves the mean loss by up to 1e-5
BEATS_CPU = (783, 30, 10)  # where a GPU lost to its CPU in a course report of 2017


def steps(options: Options) -> Table:
    """Whole epochs, a shuffle included, of every workload by every contender."""
    columns = ("workload", "contender", "µs/step", "fastest", "times mlpgpu's", "first epoch's loss")
    table = Table("Training steps in float32, whole epochs with data on the card", columns)
    for workload in WORKLOADS:
        progress(workload.name)
        try:
            table.rows += _measure_steps(workload, options, table.notes)
        except Exception as error:
            traceback.print_exc()
            table.notes.append(f"{workload.name} failed: {_first_line(error)}")
        free_memory()
    return table


def _measure_steps(workload: Workload, options: Options, notes: list[str]) -> list[tuple[Any, ...]]:
    contenders, losses = _contenders(workload, options, notes)
    seconds = take_turns(contenders, options.rounds)
    rows = []
    for name, own in seconds.items():
        per_step = [1e6 * value / workload.steps for value in own]
        times = median_ratio(own, seconds["mlpgpu"])
        rows.append((workload.name, name, statistics.median(per_step), min(per_step), times, losses[name]))
    astray = [name for name, loss in losses.items() if abs(loss / losses["mlpgpu"] - 1) > LOSS_TOLERANCE]
    notes += [f"{workload.name}: {name} trained to another loss" for name in astray]
    sampling = Sampling(workload.rows, workload.batch_size, seed=0)
    started = time.perf_counter()
    sampling.order(1)
    shuffle = 1e6 * (time.perf_counter() - started) / workload.steps
    notes.append(f"{workload.name}: {shuffle:.2f} µs of mlpgpu's step are the host's making of the order")
    return rows


def _contenders(
    workload: Workload, options: Options, notes: list[str]
) -> tuple[dict[str, Callable[[], float]], dict[str, float]]:
    """Those that could be made, and the mean loss of a first epoch in the same order by each."""
    arrays = workload.arrays()
    data = mg.Dataset(*arrays)
    contenders: dict[str, Callable[[], float]] = {"mlpgpu": Ours(workload, data)}
    if workload.widths == BEATS_CPU:
        contenders["mlpgpu, CPU"] = Ours(workload, data, backend="cpu")
    losses = {name: contender() for name, contender in contenders.items()}

    x, y = (torch.from_numpy(array).to(DEVICE) for array in arrays)
    order = Sampling(workload.rows, workload.batch_size, seed=0).order(0)
    makers: dict[str, Callable[[], PyTorch]] = {
        "PyTorch eager": lambda: PyTorch(workload, x, y),
        "PyTorch graph": lambda: PyTorch(workload, x, y).capture(),
    }
    if not options.quick:
        makers["PyTorch compiled graph"] = lambda: PyTorch(workload, x, y, compiled=True).capture()
    for name, make in makers.items():
        started = time.perf_counter()
        try:
            contender = make()
            losses[name] = contender(order)
        except Exception as error:
            notes.append(f"{workload.name}: {name} failed: {_first_line(error)}")
            continue
        progress(f"  {name} made in {time.perf_counter() - started:.1f} s")
        contenders[name] = contender
    return contenders, losses


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- matrix products ---


@dataclass(frozen=True)
class Product:
    """A product of two n by n matrices as a dense layer needs it, by its operands' names in the launch."""

    name: str
    prefix: str  # of the entries that compute it
    layers: int  # that a network needs to have it
    a: str
    b: str
    c: str
    transpose_a: bool = False
    transpose_b: bool = False


PRODUCTS = (
    Product("NN: x W", "dense_forward", 1, "x", "w", "y"),
    Product("NT: dz Wᵀ", "dense_backward_input", 2, "dz", "w", "dx", transpose_b=True),
    Product("TN: xᵀ dz", "dense_backward_weight", 1, "x", "dz", "dw", transpose_a=True),
)
PRODUCT_SIZES = (1024, 2048, 4096, 8192)
CUBLAS_SHARE = 0.6  # of cuBLAS's rate that is wanted


class Kernels:
    """The launches of one product, taken out of a plan's step, on arrays that PyTorch holds."""

    def __init__(self, device: Device, product: Product, size: int) -> None:
        plan = lower_layers(
            [mg.Dense(size, size) for _ in range(product.layers)],
            size,
            capacity=size,
            loss="squared_error",
            optimizer=mg.SGD(0.1),
        )
        lowered = lower(plan, multiprocessors=device.multiprocessors, source="float32")
        launches = [launch for launch in lowered.shares[0] if launch.entry.name.startswith(product.prefix)]
        self._arrays = {
            name: torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for name, nbytes in lowered.bytes.items()
        }
        step = np.array([(0, 0, 0, size, size)], STEP)
        self._arrays["step"].copy_(torch.from_numpy(step.view(np.uint8)))
        values = {name: value for launch in launches for name, value in launch.values.items()}
        self.a, self.b, self.c = (self._matrix(values[name], size) for name in (product.a, product.b, product.c))
        torch.cuda.synchronize()  # our streams do not wait for PyTorch's

        units = kernels.units(launch.entry for launch in launches)
        cubins = compiler.compile_units(units, device.arch)
        self._modules = {header: Module(device, cubin.image) for header, cubin in cubins.items()}
        self._bound = [self._bind(launch) for launch in launches]
        self._stream = Stream(device)
        self._events = Event(device, timing=True), Event(device, timing=True)

    def _matrix(self, at: Any, size: int) -> torch.Tensor:
        """The (size, size) float32 at a place in one of the arrays."""
        whole: torch.Tensor = self._arrays[at.array].view(torch.float32)
        return whole[at.offset : at.offset + size * size].view(size, size)

    def _bind(self, launch: Launch) -> Callable[[Stream], None]:
        def address(value: Any) -> float | None:
            if not isinstance(value, At):
                return value
            return int(self._arrays[value.array].data_ptr()) + value.offset * (8 if value.array in DOUBLES else 4)

        function = self._modules[launch.entry.header].function(launch.entry)
        packed = pack(launch.entry, [address(launch.values[a.name]) for a in launch.entry.arguments])
        return lambda stream: function.launch(stream, launch.grid, packed)

    def seconds(self, repeats: int) -> float:
        """Of one product, by events around ``repeats`` of them."""
        start, end = self._events
        self._stream.record(start)
        for _ in range(repeats):
            for launch in self._bound:
                launch(self._stream)
        self._stream.record(end)
        end.synchronize()
        return end.seconds_since(start) / repeats


def _torch_seconds(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats


def products(options: Options) -> Table:
    """Our products' rates and errors beside cuBLAS's."""
    columns = (
        "n", "product", "TFLOP/s", "cuBLAS", "of cuBLAS",
        "error", "cuBLAS's error", "largest error", "cuBLAS's largest",
    )  # fmt: skip
    table = Table("Products of n by n float32 matrices, normal values", columns)
    table.notes += [
        "error: relative Frobenius, against float64; largest error: of |c - c64| / (|A| |B|), element by element",
        f"wanted: at least {CUBLAS_SHARE:.0%} of cuBLAS's rate",
    ]
    device = find_device(0)
    for size in PRODUCT_SIZES[: 2 if options.quick else None]:
        for product in PRODUCTS:
            progress(f"{product.name}, n = {size}")
            with device:
                table.rows.append(_measure_product(device, product, size, options.rounds))
            free_memory()
    table.notes += [f"missed: {n} {name}" for n, name, _, _, share, *_ in table.rows if share < CUBLAS_SHARE]
    return table


def _measure_product(device: Device, product: Product, size: int, rounds: int) -> tuple[Any, ...]:
    ours = Kernels(device, product, size)
    ours.a.normal_()
    ours.b.normal_()
    ours.c.fill_(math.nan)
    a = ours.a.T if product.transpose_a else ours.a
    b = ours.b.T if product.transpose_b else ours.b
    theirs = torch.empty_like(ours.c)

    def cublas() -> object:
        return torch.matmul(a, b, out=theirs)

    cublas()
    torch.cuda.synchronize()
    ours.seconds(1)
    reference, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    errors = []
    for c in (ours.c, theirs):
        difference = c.double() - reference
        errors.append((float(difference.norm() / reference.norm()), float((difference.abs() / scale).max())))
    del reference, scale, difference

    repeats = max(1, round(PRODUCT_SECONDS / ours.seconds(1)))
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        seconds[0].append(ours.seconds(repeats))
        seconds[1].append(_torch_seconds(cublas, repeats))
    rates = [2e-12 * size**3 / statistics.median(own) for own in seconds]
    share = median_ratio(seconds[1], seconds[0])
    (own_norm, own_largest), (their_norm, their_largest) = errors
    return size, product.name, *rates, share, own_norm, their_norm, own_largest, their_largest


# --- MNIST ---

EPOCHS = 10
WANTED_ACCURACY = 0.98


def _mnist(options: Options) -> tuple[mg.Dataset, mg.Dataset]:
    folder = options.data or os.environ.get("MLPGPU_DATA")
    if not folder:
        raise FileNotFoundError("name the folder of MNIST's files by --data or MLPGPU_DATA")
    return mg.datasets.load("mnist", folder)


def _mnist_trainer(backend: str, seed: int) -> mg.Trainer:
    network = mg.Network([mg.Dense(784, 128, activation="relu"), mg.Dense(128, 10)], seed=seed)
    optimizer = mg.Momentum(mg.OneCycle(0.2, epochs=EPOCHS), momentum=MOMENTUM)
    return mg.Trainer(
        network, "softmax_cross_entropy", optimizer, batch_size=128, backend=backend, metrics=["accuracy"]
    )


def mnist(options: Options) -> Table:
    """Test accuracies of both backends by seed."""
    train, test = _mnist(options)
    columns = ("backend", "mean accuracy", "deviation", "lowest", "highest", "s/epoch")
    table = Table(f"MNIST, 784-128-10, batch 128, {EPOCHS} epochs", columns)
    accuracies: dict[str, list[float]] = {"cpu": [], "cuda": []}
    seconds: dict[str, list[float]] = {"cpu": [], "cuda": []}
    for seed in range(2 if options.quick else 5):
        for backend, own in accuracies.items():
            progress(f"MNIST on {backend}, seed {seed}")
            trainer = _mnist_trainer(backend, seed)
            history = trainer.fit(train, EPOCHS, progress=False)
            seconds[backend] += history["seconds"][1:]
            own.append(trainer.evaluate(test)["accuracy"])
    for backend, own in accuracies.items():
        spread = statistics.stdev(own)
        row = (statistics.mean(own), spread, min(own), max(own), statistics.median(seconds[backend]))
        table.rows.append((backend, *row))
    differences = [b - a for a, b in zip(accuracies["cpu"], accuracies["cuda"], strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    table.notes.append(
        f"cuda - cpu, seed by seed: {statistics.mean(differences):+.5f}, standard error of the mean {error:.5f}"
    )
    return table


def target(options: Options) -> Table:
    """Seconds to a test accuracy from an empty kernel cache, told apart."""
    train, test = _mnist(options)
    table = Table(f"MNIST, 784-128-10, to {WANTED_ACCURACY:.0%} test accuracy", ("part", "seconds"))
    before = os.environ.get(compiler.CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[compiler.CACHE_VARIABLE] = folder
        try:
            trainer = _mnist_trainer("cuda", seed=0)
            sampling = Sampling(len(train), trainer.batch_size, seed=0)
            started = time.perf_counter()
            program = trainer.backend.compile(trainer.plan)
            program.attach(train, sampling)
            first = time.perf_counter() - started
            started = time.perf_counter()
            program.attach(train, sampling)
            attach = time.perf_counter() - started
            started = time.perf_counter()
            history = trainer.fit(
                train,
                EPOCHS,
                validation=test,
                callbacks=[lambda record: record["validation_accuracy"] >= WANTED_ACCURACY],
                progress=False,
            )
            fit = time.perf_counter() - started
        finally:
            os.environ.pop(compiler.CACHE_VARIABLE)
            if before is not None:
                os.environ[compiler.CACHE_VARIABLE] = before
    epochs, reached = len(history), history["validation_accuracy"][-1]
    seconds = list(history["seconds"])
    epoch = statistics.median(seconds[1:] or seconds)
    table.rows += [
        ("compiling the kernels", first - attach),
        ("memory for the data, on the card and page-locked", attach),
        ("upload and graphs: the first epoch, less a later one", seconds[0] - epoch),
        ("training, and a test after each epoch", sum(seconds) - seconds[0] + epoch),
        ("loading kernels, and the rest of the fit", fit - attach - sum(seconds)),
        ("sum", first - attach + fit),
    ]
    table.notes.append(f"test accuracy {reached:.4f} after epoch {epochs} of a schedule over {EPOCHS}")
    return table


# --- the table of 2017 ---

PATTERNS = 60_000
PLAIN = "C, one thread"
STREAMED = "mlpgpu, 8 streams"
PUBLISHED = {PLAIN: 1.0, "mlpgpu, CPU": 170 / 15.0, "mlpgpu": 3000.0, STREAMED: 3000.0}


class PlainC:
    """backprop.c on a workload of one batch; a call trains for one epoch and returns the total error before it."""

    def __init__(self, workload: Workload, x: np.ndarray, y: np.ndarray, folder: Path) -> None:
        library = folder / "backprop.so"
        source = Path(__file__).with_name("backprop.c")
        command = ["cc", "-O2", "-std=c11", "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
        subprocess.run(command, check=True)
        self._train: Any = ctypes.CDLL(str(library)).train_epoch
        self._train.restype = ctypes.c_double
        floats = np.ctypeslib.ndpointer(np.float32, flags="C")
        widths = np.ctypeslib.ndpointer(np.int32, flags="C")
        whole, real = ctypes.c_int, ctypes.c_float
        self._train.argtypes = [whole, widths, whole, floats, floats, real, real, *[floats] * 5]
        parameters = workload.network().flat_parameters().copy()
        row = np.zeros(sum(workload.widths), np.float32)
        # Ours divides the sum over patterns by their number, which this loop leaves to the rate.
        self._arguments = (
            len(workload.widths) - 1, np.array(workload.widths, np.int32), len(x), x, y,
            workload.rate / len(x), MOMENTUM, parameters, np.zeros_like(parameters), np.zeros_like(parameters),
            row, row.copy(),
        )  # fmt: skip

    def __call__(self) -> float:
        return float(self._train(*self._arguments))


def published(options: Options) -> Table:
    """A table of 2017 made again: a plain loop, the CPU backend and the card on one network, full batch."""
    patterns = PATTERNS // 10 if options.quick else PATTERNS
    workload = Workload(
        (784, 300, 10), patterns, patterns, rate=0.1, loss="squared_error", activation="sigmoid", last="sigmoid"
    )
    rng = np.random.default_rng(0)
    x = rng.random((patterns, 784), dtype=np.float32)
    y = np.eye(10, dtype=np.float32)[rng.integers(10, size=patterns)]
    data = mg.Dataset(x, y)
    columns = ("contender", "s/epoch", "total error 1", "2", "3", "times the C loop", "published")
    table = Table(f"Full batch: 784-300-10, sigmoid, squared error, momentum, {patterns:,} patterns", columns)
    contenders = {
        "mlpgpu, CPU": Ours(workload, data, backend="cpu", shuffle=False),
        "mlpgpu": Ours(workload, data, shuffle=False),
        STREAMED: Ours(workload, data, shuffle=False, streams=8),
    }
    errors = {name: [patterns * contender() for _ in range(3)] for name, contender in contenders.items()}
    seconds = {name: statistics.median(own) for name, own in take_turns(contenders, options.rounds).items()}
    with tempfile.TemporaryDirectory() as folder:
        plain = PlainC(workload, x, y, Path(folder))
        errors[PLAIN], turns = [], []
        for epoch in range(3):
            progress(f"C loop, epoch {epoch + 1}")
            started = time.perf_counter()
            errors[PLAIN].append(plain())
            turns.append(time.perf_counter() - started)
        seconds[PLAIN] = statistics.median(turns)
    for name, ratio in PUBLISHED.items():
        table.rows.append((name, seconds[name], *errors[name], seconds[PLAIN] / seconds[name], ratio))
    table.notes.append("published (2017): 170 s for the original code, 15.0 s by OpenMP, about 3,000 times on a GPU")
    return table


# --- streams ---


def streams(options: Options) -> Table:
    """Shares of a large batch on several streams, and both reductions."""
    workload = Workload((784, 1024, 1024, 10), batch_size=8192, rows=81_920, rate=1e-3)
    data = mg.Dataset(*workload.arrays())
    columns = ("streams", "reduction", "µs/step", "of one stream", "kernels side by side")
    table = Table(f"Streams: {workload.name}", columns)
    settings = [(count, "ordered") for count in (1, 2, 3, 4)] + [(1, "atomic"), (2, "atomic")]
    names = {f"{count} {reduction}": (count, reduction) for count, reduction in settings}
    contenders = {
        name: Ours(workload, data, streams=count, reduction=reduction) for name, (count, reduction) in names.items()
    }
    seconds = take_turns(contenders, options.rounds)
    for name, (count, reduction) in names.items():
        per_step = 1e6 * statistics.median(seconds[name]) / workload.steps
        shared = _side_by_side(contenders[name])
        ratio = median_ratio(seconds[name], seconds["1 ordered"])
        table.rows.append((count, reduction, per_step, ratio, shared))
    table.notes.append("side by side: of the time in which kernels run, that in which two or more do, by CUPTI")
    return table


def _side_by_side(run: Callable[[], object]) -> float | None:
    """The share of the card's busy time in which at least two kernels run; None where none were seen."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    edges = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem"):
            edges += [(event.time_range.start, 1), (event.time_range.end, -1)]
    busy = doubled = 0.0
    running = 0
    edges.sort()  # at one time ends come before starts
    for (start, change), (end, _) in pairwise(edges):
        running += change
        busy += (end - start) * (running > 0)
        doubled += (end - start) * (running > 1)
    return doubled / busy if busy else None


# --- data larger than the memory allowed ---

TIMES_ALLOWED = 4
MOST_OF_RESIDENT = 1.1


def feed(options: Options) -> Table:
    """A set that stays on the card, and the same one where it may take a quarter of its size there."""
    workload = Workload((784, 1024, 1024, 10), batch_size=1024, rows=61_440, rate=1e-3)
    x, y = workload.arrays()
    data = mg.Dataset(x, y)
    share = (x.nbytes + 4 * y.size) / TIMES_ALLOWED / find_device(0).total_bytes
    contenders = {"stays": Ours(workload, data), "streams through": Ours(workload, data, memory_share=share)}
    losses = {name: contender() for name, contender in contenders.items()}
    seconds = take_turns(contenders, options.rounds)
    columns = ("set", "µs/step", "times the resident step", "first epoch's loss")
    table = Table(f"A set of {TIMES_ALLOWED} times the memory allowed: {workload.name}, float32", columns)
    for name, own in seconds.items():
        per_step = 1e6 * statistics.median(own) / workload.steps
        table.rows.append((name, per_step, median_ratio(own, seconds["stays"]), losses[name]))
    table.notes.append(f"wanted: at most {MOST_OF_RESIDENT} times, and the same bits")
    if len(set(losses.values())) > 1:
        table.notes.append("missed: the losses differ")
    return table


# --- memory ---

MEMORY_SLACK = 1.05


def memory(options: Options) -> Table:
    """Device memory that a program and its data take, beside the bound."""
    medium = Workload((784, 1024, 1024, 10), batch_size=1024, rows=60_000, rate=1e-3)
    tall = Workload((90_000, 90, 90, 10), batch_size=128, rows=1_280, rate=1e-5)
    wide = Workload((4096,) * 5, batch_size=8192, rows=16_384, rate=1e-7, loss="squared_error")
    cases = [(medium, 1, True), (medium, 1, False), (medium, 4, False), (wide, 1, False), (tall, 1, False)]
    columns = ("workload", "streams", "inputs", "used MB", "bound MB", "of bound")
    table = Table("Device memory, a program's, its data's and its graphs'", columns)
    table.notes.append(
        "bound: data + parameters × (2 + slots + streams) + activations + what the program keeps besides, "
        f"times {MEMORY_SLACK}"
    )
    device = find_device(0)
    _train_briefly(WORKLOADS[0], 1, as_bytes=False)  # what the first use of the card takes is nobody's
    for workload, count, as_bytes in cases:
        free_memory()
        with device:
            before = device.free_bytes
        program = _train_briefly(workload, count, as_bytes=as_bytes)
        with device:
            used = before - device.free_bytes
        bound = MEMORY_SLACK * _memory_bound(program.plan, workload, device, as_bytes=as_bytes)
        del program
        inputs = "bytes" if as_bytes else "float32"
        table.rows.append((workload.name, count, inputs, used / 1e6, bound / 1e6, used / bound))
        if used > bound:
            table.notes.append(f"missed: {workload.name}, {count} streams, {inputs}")
    return table


def _train_briefly(workload: Workload, count: int, *, as_bytes: bool) -> Ours:
    x, y = workload.arrays()
    ours = Ours(workload, mg.Dataset((255 * x).astype(np.uint8) if as_bytes else x, y), streams=count)
    ours()
    return ours


def _memory_bound(plan: Plan, workload: Workload, device: Device, *, as_bytes: bool) -> int:
    """Bytes, without the slack."""
    target_width = 1 if plan.target_kind == "index" else plan.n_out
    data = workload.rows * (plan.n_in * (1 if as_bytes else 4) + 4 * target_width + 4)  # and the order
    assert plan.optimizer is not None
    parameters = 4 * plan.parameter_count * (2 + len(plan.optimizer.slots) + plan.shares)
    activations = sum(4 * math.prod(buffer.shape) for buffer in plan.buffers.values() if "row" in buffer.axes)
    counted = {"parameters", "snapshot", "slots", "partials", "gradient", *plan.buffers}
    source = "uint8" if as_bytes else "float32"
    stored = lower(plan, multiprocessors=device.multiprocessors, source=source).bytes
    return data + parameters + activations + sum(size for name, size in stored.items() if name not in counted)


# --- start ---

FIRST_STEP = """
import time
import numpy as np
import mlpgpu as mg
imported = time.time()
net = mg.Network([mg.Dense(784, 128, activation="relu"), mg.Dense(128, 10)], seed=0)
trainer = mg.Trainer(net, "softmax_cross_entropy", mg.Momentum(0.1), batch_size=128, backend="cuda")
trainer.step(np.random.default_rng(0).random((128, 784), dtype=np.float32), np.arange(128) % 10)
print(imported, time.time())
"""


def start(options: Options) -> Table:
    """From the start of a process to the end of its first step, with and without compiled kernels."""
    columns = ("kernel cache", "import", "first step", "from process start", "goal")
    table = Table("Seconds to the first training step, 784-128-10", columns)
    cold, warm = [], []
    for _ in range(1 if options.quick else 2):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(_first_step(folder))
            warm += [_first_step(folder) for _ in range(3)]
    for name, runs, goal in (("empty", cold, "< 10"), ("warm", warm, "< 1")):
        imports, first_steps = (statistics.median(values) for values in zip(*runs, strict=True))
        table.rows.append((name, imports, first_steps, imports + first_steps, goal))
    table.notes.append("the goals are from the end of the import")
    return table


def _first_step(cache: str) -> tuple[float, float]:
    """Seconds to the end of the import, and from there to the end of the step."""
    environment = {**os.environ, compiler.CACHE_VARIABLE: cache}
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    imported, stepped = map(float, done.stdout.split())
    return imported - started, stepped - imported


# --- all of it ---

# Memory comes first, while PyTorch holds none.
PARTS: dict[str, Callable[[Options], Table]] = {
    "memory": memory,
    "start": start,
    "steps": steps,
    "products": products,
    "streams": streams,
    "feed": feed,
    "mnist": mnist,
    "target": target,
    "published": published,
}


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training on a GPU beside other ways to do it.")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    parser.add_argument("--quick", action="store_true", help="three rounds, smaller sizes, nothing compiled by PyTorch")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument("--data", metavar="FOLDER", help="where MNIST's files are (default: $MLPGPU_DATA)")
    parser.add_argument("--commit", help="what is measured, where git cannot say")
    arguments = parser.parse_args()
    try:
        device = find_device(0)
    except BackendError as error:
        sys.exit(str(error))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    options = Options(arguments.quick, arguments.data)
    about = surroundings()
    results: dict[str, Any] = {
        **about,
        "commit": arguments.commit or about["commit"],
        "card": device.name,
        "driver": _driver_version(),
        "nvcc": compiler.nvcc_version(compiler.find_nvcc()),
        "cuda": describe_machine(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "quick": options.quick,
        "parts": {},
        "failed": {},
    }
    tables = []
    for name in arguments.only or PARTS:
        progress(name)
        started = time.perf_counter()
        try:
            table = PARTS[name](options)
        except Exception as error:
            traceback.print_exc()
            results["failed"][name] = _first_line(error)
        else:
            tables.append(table)
            results["parts"][name] = {**table.plain(), "seconds": time.perf_counter() - started}
        free_memory()
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    print(f"{results['card']}, driver {results['driver']}, nvcc {results['nvcc']}, PyTorch {torch.__version__}")
    print(f"mlpgpu {mg.__version__}, commit {results['commit']}, {results['machine']}, {results['cores']} cores")
    for table in tables:
        print(table)
    for name, failure in results["failed"].items():
        print(f"\n{name} failed: {failure}")


if __name__ == "__main__":
    main()
