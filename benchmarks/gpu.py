"""What training takes on a card beside the steps themselves: memory, start-up, streams, feeding, and MNIST.

Contenders do the same work on the same data in the same run.  They take turns, round by round; figures are medians,
and a ratio is the median of the rounds' ratios.  A turn ends when the card has finished.  Tables come last; a part that
fails says so, and the others go on.  Steps beside PyTorch's and JAX's are in peers.py.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mlpgpu as mg
from mlpgpu.backends import Sampling
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.runtime import Device, compiler, describe_machine, find_device
from mlpgpu.backends.sources import CACHE_VARIABLE
from mlpgpu.bench import MOMENTUM, WORKLOADS, Epochs, Workload, median_ratio, surroundings, take_turns
from mlpgpu.errors import BackendError
from mlpgpu.plan import Plan

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
    """Give unused memory back to the card, ours and PyTorch's."""
    gc.collect()
    torch.cuda.empty_cache()


def train(workload: Workload, data: mg.Dataset, *, shuffle: bool = True, **options: Any) -> Epochs:
    """A workload on the card, unless ``options``, a trainer's, say otherwise; a call trains for an epoch."""
    return Epochs(workload.trainer(**{"backend": "cuda", **options}), data, shuffle=shuffle)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- MNIST ---

EPOCHS = 10
TARGET_ACCURACY = 0.98


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
        for backend, found in accuracies.items():
            progress(f"MNIST on {backend}, seed {seed}")
            trainer = _mnist_trainer(backend, seed)
            history = trainer.fit(train, EPOCHS, progress=False)
            seconds[backend] += history["seconds"][1:]
            found.append(trainer.evaluate(test)["accuracy"])
    for backend, found in accuracies.items():
        spread = statistics.stdev(found)
        row = (statistics.mean(found), spread, min(found), max(found), statistics.median(seconds[backend]))
        table.rows.append((backend, *row))
    differences = [b - a for a, b in zip(accuracies["cpu"], accuracies["cuda"], strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    table.notes.append(
        f"cuda - cpu, seed by seed: {statistics.mean(differences):+.5f}, standard error of the mean {error:.5f}"
    )
    return table


def target(options: Options) -> Table:
    """Seconds from an empty kernel cache to a test accuracy, part by part."""
    train, test = _mnist(options)
    table = Table(f"MNIST, 784-128-10, to {TARGET_ACCURACY:.0%} test accuracy", ("part", "seconds"))
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
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
                callbacks=[lambda record: record["validation_accuracy"] >= TARGET_ACCURACY],
                progress=False,
            )
            fit = time.perf_counter() - started
        finally:
            os.environ.pop(CACHE_VARIABLE)
            if before is not None:
                os.environ[CACHE_VARIABLE] = before
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

PUBLISHED_ROWS = 60_000
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
        # mlpgpu divides the sum over rows by their number; here the rate does.
        self._arguments = (
            len(workload.widths) - 1, np.array(workload.widths, np.int32), len(x), x, y,
            workload.rate / len(x), MOMENTUM, parameters, np.zeros_like(parameters), np.zeros_like(parameters),
            row, row.copy(),
        )  # fmt: skip

    def __call__(self) -> float:
        return float(self._train(*self._arguments))


def published(options: Options) -> Table:
    """A table of 2017 made again: a plain loop, the CPU backend and the card on one network, full batch."""
    rows = PUBLISHED_ROWS // 10 if options.quick else PUBLISHED_ROWS
    workload = Workload(
        (784, 300, 10), rows, rows, rate=0.1, loss="squared_error", activation="sigmoid", last="sigmoid"
    )
    rng = np.random.default_rng(0)
    x = rng.random((rows, 784), dtype=np.float32)
    y = np.eye(10, dtype=np.float32)[rng.integers(10, size=rows)]
    data = mg.Dataset(x, y)
    columns = ("contender", "s/epoch", "total error 1", "2", "3", "times the C loop", "published")
    table = Table(f"Full batch: 784-300-10, sigmoid, squared error, momentum, {rows:,} rows", columns)
    contenders = {
        "mlpgpu, CPU": train(workload, data, backend="cpu", shuffle=False),
        "mlpgpu": train(workload, data, shuffle=False),
        STREAMED: train(workload, data, shuffle=False, streams=8),
    }
    errors = {name: [rows * contender() for _ in range(3)] for name, contender in contenders.items()}
    seconds = {name: statistics.median(turns) for name, turns in take_turns(contenders, options.rounds).items()}
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
    """Shards of a large batch on several streams, and both reductions."""
    workload = Workload((784, 1024, 1024, 10), batch_size=8192, rows=81_920, rate=1e-3)
    data = mg.Dataset(*workload.arrays())
    columns = ("streams", "reduction", "µs/step", "of one stream", "kernels side by side")
    table = Table(f"Streams: {workload.name}", columns)
    settings = [(count, "ordered") for count in (1, 2, 3, 4)] + [(1, "atomic"), (2, "atomic")]
    names = {f"{count} {reduction}": (count, reduction) for count, reduction in settings}
    contenders = {
        name: train(workload, data, streams=count, reduction=reduction) for name, (count, reduction) in names.items()
    }
    seconds = take_turns(contenders, options.rounds)
    for name, (count, reduction) in names.items():
        per_step = 1e6 * statistics.median(seconds[name]) / workload.steps
        doubled = _side_by_side(contenders[name])
        ratio = median_ratio(seconds[name], seconds["1 ordered"])
        table.rows.append((count, reduction, per_step, ratio, doubled))
    table.notes.append("side by side: the part of the time with kernels running in which two or more run, by CUPTI")
    return table


def _side_by_side(run: Callable[[], object]) -> float | None:
    """The part of the card's busy time in which at least two kernels run; None where none were seen."""
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
    contenders = {"stays": train(workload, data), "streams through": train(workload, data, memory_share=share)}
    losses = {name: contender() for name, contender in contenders.items()}
    seconds = take_turns(contenders, options.rounds)
    columns = ("set", "µs/step", "times the resident step", "first epoch's loss")
    table = Table(f"A set of {TIMES_ALLOWED} times the memory allowed: {workload.name}, float32", columns)
    for name, turns in seconds.items():
        per_step = 1e6 * statistics.median(turns) / workload.steps
        table.rows.append((name, per_step, median_ratio(turns, seconds["stays"]), losses[name]))
    table.notes.append(f"expected: at most {MOST_OF_RESIDENT} times, and the same bits")
    if len(set(losses.values())) > 1:
        table.notes.append("missed: the losses differ")
    return table


# --- memory ---

MEMORY_SLACK = 1.05


def memory(options: Options) -> Table:
    """Device memory that a program and its data take, beside a bound."""
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
    _train_briefly(WORKLOADS["tiny"], 1, as_bytes=False)  # memory that the first use of the card takes does not count
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


def _train_briefly(workload: Workload, count: int, *, as_bytes: bool) -> Epochs:
    x, y = workload.arrays()
    ours = train(workload, mg.Dataset((255 * x).astype(np.uint8) if as_bytes else x, y), streams=count)
    ours()
    return ours


def _memory_bound(plan: Plan, workload: Workload, device: Device, *, as_bytes: bool) -> int:
    """Bytes, without the slack."""
    target_width = 1 if plan.target_kind == "index" else plan.n_out
    data = workload.rows * (plan.n_in * (1 if as_bytes else 4) + 4 * target_width + 4)  # and the order
    assert plan.optimizer is not None
    parameters = 4 * plan.parameter_count * (2 + len(plan.optimizer.slots) + plan.shards)
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
    environment = {**os.environ, CACHE_VARIABLE: cache}
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
    "streams": streams,
    "feed": feed,
    "mnist": mnist,
    "target": target,
    "published": published,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training on a GPU beside other ways to do it.")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    parser.add_argument("--quick", action="store_true", help="three rounds, smaller sizes, nothing compiled by PyTorch")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument("--data", metavar="FOLDER", help="where MNIST's files are (default: $MLPGPU_DATA)")
    parser.add_argument("--commit", help="what is measured, where git cannot say")
    arguments = parser.parse_args()
    try:
        backend = CudaBackend()
    except BackendError as error:
        sys.exit(str(error))

    options = Options(arguments.quick, arguments.data)
    about = surroundings(backend, ("torch",))
    results: dict[str, Any] = {
        **about,
        "commit": arguments.commit or about["commit"],
        "nvcc": compiler.nvcc_version(compiler.find_nvcc()),
        "cuda": describe_machine(),
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
