"""What users or `select` may choose, each way in turns on one card: targets by texture or by plain loads, streams,
steps by blocks of rows, of few rows, narrow tiles, and who copies the rows of a prediction to page-locked memory.

    python benchmarks/choices.py [--only NAME ...] [--narrow] [--few] [--many-rows] [--copies]
        [--precisions P ...] [--rounds N] [--json PATH]

A row is a workload of mlpgpu.bench at a precision; its figures are microseconds of a training step over whole epochs,
and the median over rounds of its time over the default's, which reads targets by texture and has one stream.  Networks
of SMALL, whose weights one multiprocessor holds, are measured with `thresholds.ROW_STEP_IS_USED` off and on, without
the persistent kernel, beside what is chosen today; those of FEW, large ones for few rows, without blocks that keep the
whole batch, and with them without the persistent kernel; those of counted.py, whose batches leave a card idle, without
narrow tiles, with all of them, and with those of multiply-adds alone; of --many-rows its networks of narrow layers with
limits of widths and weights in the place of counts, as today, and with each count by itself.  Of --copies a row is a
prediction from the host's memory: by NumPy or the driver, by threads in C++ as they are chosen today, and with one
threshold changed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import counted
import numpy as np

import mlpgpu as mg
from mlpgpu import bench
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.backends.cuda.runtime import Device
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.errors import MlpgpuError

ROUNDS = 9
DEFAULT, PLAIN = "texture, 1 stream", "plain loads"
STREAMS = (2, 4, 8)
NARROW, PLAIN_CORES = "narrow tiles", "narrow, plain cores"
TILES, WHOLE_BATCH = "tiles", "whole batch"
LIMITS, ONE_COUNT = "limits", {switch: f"only {switch.split('_')[0].lower()}" for switch in counted.SWITCHES}
TODAY, LAUNCHES, BY_ROWS = "as chosen today", "launch by launch", "blocks of rows"

# As many rows as the persistent kernel takes at most, twice as many, and eight times.
SMALL = {
    f"{name}-{rows}": bench.Workload(widths, rows, 64 * rows, 1e-3, loss="squared_error")
    for name, widths in (("four", (50, 128, 128, 128, 1)), ("three", (20, 64, 64, 2)))
    for rows in (1024, 2048, 8192)
}

# Weights that are large beside the batch.
FEW = {
    "563s at 8": bench.Workload((7, 563, 563, 563, 563, 6), 8, 512, 1e-5, optimizer="adam"),
    "2048 at 2": bench.Workload((955, 2048, 11), 2, 128, 1e-5, optimizer="adam"),
    "1536s at 7": bench.Workload((113, 1536, 1536, 192, 512, 384, 5), 7, 448, 1e-5),
    "1536s at 16": bench.Workload((41, 1536, 1536, 1536, 1536, 1536, 7), 16, 1024, 1e-5, optimizer="adam"),
    "6144s at 4": bench.Workload((66, 6144, 6144, 6144, 1024, 1536, 2), 4, 256, 1e-5, optimizer="adam"),
    "384s at 16": bench.Workload((69, 384, 384, 384, 384, 384, 384, 26), 16, 1024, 1e-5, optimizer="adam"),
    "384s at 32": bench.Workload((69, 384, 384, 384, 384, 384, 384, 26), 32, 2048, 1e-5, optimizer="adam"),
    "784-512s at 32": bench.Workload((784, 512, 512, 10), 32, 2048, 1e-5),
    "4096s at 32": bench.Workload((2738, 4096, 4096, 8), 32, 2048, 1e-5),
}

# Predictions: widths, rows.
PREDICTIONS = [
    (widths, rows) for widths in ((784, 128, 10), (20, 64, 64, 2), (784, 1024, 1024, 10)) for rows in (1000, 60_000)
]
BY_DRIVER, BY_HELPERS = "NumPy or driver", "C++"
MEGABYTE = 1 << 20
COPY_CHOICES: dict[str, dict[str, float]] = {
    BY_DRIVER: {"INFERENCE_COPY_THREADS": 0},
    BY_HELPERS: {},
    "C++, 4 threads": {"INFERENCE_COPY_THREADS": 4},
    "C++, 8 threads": {"INFERENCE_COPY_THREADS": 8},
    "C++, 64 KiB/thread": {"INFERENCE_THREAD_BYTES": MEGABYTE // 16},
    "C++, never past": {"INFERENCE_PAST_CACHES_BYTES": 1 << 62},
    "C++, past caches": {"INFERENCE_PAST_CACHES_BYTES": 0},
    "C++, awake 50 µs": {"INFERENCE_AWAKE_SECONDS": 50e-6},
    "C++, awake 1 ms": {"INFERENCE_AWAKE_SECONDS": 1e-3},
    "C++, 2 parts": {"INFERENCE_PARTS": 2},
    "C++, 8 parts": {"INFERENCE_PARTS": 8, "INFERENCE_LEAST_PART_BYTES": MEGABYTE // 4},
    "C++, half pieces": {"INFERENCE_PIECE_BYTES": 2 * MEGABYTE, "INFERENCE_LEAST_PIECE_BYTES": MEGABYTE // 2},
    "C++, double pieces": {"INFERENCE_PIECE_BYTES": 8 * MEGABYTE, "INFERENCE_LEAST_PIECE_BYTES": 2 * MEGABYTE},
}
COPY_PAUSE = 0.01  # seconds before a turn, in which threads of the turn before fall asleep


@dataclass(frozen=True)
class Row:
    """A workload at a precision with a choice; the time of a step, and its ratio to the default's."""

    workload: str
    precision: str
    choice: str
    microseconds: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.workload:28} {self.precision:9} {self.choice:19} {self.microseconds:12,.2f} {self.ratio:8.3f}"


@contextmanager
def texels(device: Device, most: int) -> Iterator[None]:
    """Inside the block the card's textures reach so many elements; targets that are more are read by plain loads."""
    reach, device.most_texels = device.most_texels, most
    try:
        yield
    finally:
        device.most_texels = reach


@contextmanager
def way(choice: str) -> Iterator[None]:
    """Inside the block plans are compiled to launches, to steps by blocks of rows, or as they are today."""
    before = thresholds.ROW_STEP_IS_USED, thresholds.PERSISTENT_IS_USED
    if choice != TODAY:
        thresholds.ROW_STEP_IS_USED, thresholds.PERSISTENT_IS_USED = choice == BY_ROWS, False
    try:
        yield
    finally:
        thresholds.ROW_STEP_IS_USED, thresholds.PERSISTENT_IS_USED = before


def measure_small(key: str, backend: CudaBackend, rounds: int) -> Iterator[Row]:
    """The rows of a network of SMALL, what is chosen today first."""
    workload = SMALL[key]
    data = mg.Dataset(*workload.arrays())
    contenders = {}
    for choice in (TODAY, LAUNCHES, BY_ROWS):
        with way(choice):
            contenders[choice] = bench.Epochs(workload.trainer(backend=backend.name), data)
            contenders[choice]()  # compiles, and brings the data to the card
    yield from rows_of(key, "float32", workload, bench.take_turns(contenders, rounds), TODAY)


def measure_few(key: str, precision: str, backend: CudaBackend, rounds: int) -> Iterator[Row]:
    """The rows of a network of FEW, what is chosen today first."""
    workload = FEW[key]
    data = mg.Dataset(*workload.arrays())
    choices: dict[str, dict[str, float]] = {
        TODAY: {}, TILES: {"WHOLE_BATCH_IS_USED": False}, WHOLE_BATCH: {"PERSISTENT_IS_USED": False},
    }  # fmt: skip
    contenders = {}
    for choice, changed in choices.items():
        with counted.thresholds_of(changed):
            contenders[choice] = bench.Epochs(workload.trainer(backend=backend.name, precision=precision), data)
            contenders[choice]()
    yield from rows_of(key, precision, workload, bench.take_turns(contenders, rounds), TODAY)


def measure_copies(widths: Sequence[int], rows: int, backend: CudaBackend, rounds: int) -> Iterator[Row]:
    """The rows of a prediction from the host's memory, that of NumPy or the driver first."""
    network = mg.Network([mg.Dense(*pair, activation="relu") for pair in pairwise(widths)], seed=1)
    x = np.random.default_rng(1).standard_normal((rows, widths[0]), np.float32)
    out, name, expected = np.empty((rows, widths[-1]), np.float32), f"{'-'.join(map(str, widths))}, {rows:,}", None
    with ExitStack() as stack:
        predictors = {}
        for choice, changed in COPY_CHOICES.items():
            with counted.thresholds_of(changed):
                predictors[choice] = stack.enter_context(network.predictor(backend.name))
                predictors[choice](x, out=out)
            expected = out.copy() if expected is None else expected
            if not np.allclose(out, expected, 1e-4, 1e-4):
                raise SystemExit(f"{name}: the predictions by {choice} are not those by {BY_DRIVER}")
        seconds: dict[str, list[float]] = {choice: [] for choice in predictors}
        for _ in range(rounds):
            for choice, predictor in predictors.items():
                with counted.thresholds_of(COPY_CHOICES[choice]):
                    time.sleep(COPY_PAUSE)
                    seconds[choice].append(median_call(predictor, x, out))
    for choice, turns in seconds.items():
        ratio = bench.median_ratio(turns, seconds[BY_DRIVER])
        yield Row(name, "float32", choice, 1e6 * statistics.median(turns), ratio)


def median_call(predictor: mg.Predictor, x: np.ndarray, out: np.ndarray) -> float:
    """Seconds of a call, the median of as many as a turn has."""
    found: list[float] = []
    while len(found) < 5 or sum(found) < bench.TURN_SECONDS:
        started = time.perf_counter()
        predictor(x, out=out)
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def rows_of(
    key: str, precision: str, workload: bench.Workload, seconds: dict[str, list[float]], default: str
) -> Iterator[Row]:
    """A row for each choice that had its turns."""
    for choice, turns in seconds.items():
        ratio = bench.median_ratio(turns, seconds[default])
        yield Row(key, precision, choice, 1e6 * statistics.median(turns) / workload.steps, ratio)


def measure(key: str, precision: str, backend: CudaBackend, rounds: int) -> Iterator[Row]:
    """The rows of a workload, the default first."""
    workload = bench.WORKLOADS[key]
    data = mg.Dataset(*workload.arrays())

    def epochs(streams: int = 1) -> bench.Epochs:
        return bench.Epochs(workload.trainer(backend=backend.name, precision=precision, streams=streams), data)

    contenders = {DEFAULT: epochs()}
    with texels(backend.device, 1):
        contenders[PLAIN] = epochs()
        contenders[PLAIN]()  # the data come to the card with its first step
    if workload.batch_size > 1:
        contenders |= {f"{count} streams": epochs(count) for count in STREAMS}
    yield from rows_of(key, precision, workload, bench.take_turns(contenders, rounds), DEFAULT)


def measure_narrow(key: str, precision: str, backend: CudaBackend, rounds: int) -> Iterator[Row]:
    """The rows of a batch that leaves a card idle, the default first."""
    workload = counted.WORKLOADS[key]
    data = mg.Dataset(*workload.arrays())
    contenders = {}
    for choice, used, on_tensor_cores in ((DEFAULT, False, True), (NARROW, True, True), (PLAIN_CORES, True, False)):
        with counted.narrow_tiles(used=used, on_tensor_cores=on_tensor_cores):
            contenders[choice] = bench.Epochs(workload.trainer(backend=backend.name, precision=precision), data)
            contenders[choice]()
    yield from rows_of(key, precision, workload, bench.take_turns(contenders, rounds), DEFAULT)


def measure_many_rows(key: str, precision: str, backend: CudaBackend, rounds: int) -> Iterator[Row]:
    """The rows of a network of narrow layers, that by limits first."""
    workload = counted.MANY_ROWS[key]
    data = mg.Dataset(*workload.arrays())
    alone = {name: [other for other in counted.SWITCHES if other != switch] for switch, name in ONE_COUNT.items()}
    contenders = {}
    for choice, off in {LIMITS: counted.SWITCHES, TODAY: (), **alone}.items():
        with counted.without(*off):
            contenders[choice] = bench.Epochs(workload.trainer(backend=backend.name, precision=precision), data)
            contenders[choice]()
    yield from rows_of(key, precision, workload, bench.take_turns(contenders, rounds), LIMITS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure textures, streams, steps by blocks of rows, narrow tiles and copies on a GPU, each way."
    )
    known = [*bench.WORKLOADS, *SMALL, *FEW, *counted.WORKLOADS, *counted.MANY_ROWS]
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    parser.add_argument("--narrow", action="store_true", help="only what narrow tiles are for")
    parser.add_argument("--few", action="store_true", help="only large networks for few rows")
    parser.add_argument("--many-rows", action="store_true", help="only narrow layers at many rows")
    parser.add_argument("--precisions", nargs="+", choices=bench.PRECISIONS, default=bench.PRECISIONS)
    parser.add_argument("--copies", action="store_true", help="only who copies the rows of predictions")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line of JSON for each row there")
    arguments = parser.parse_args()
    try:
        backend = CudaBackend()
    except MlpgpuError as error:
        sys.exit(str(error))
    rows: list[Row] = []
    print(f"{'workload':28} {'precision':9} {'choice':19} {'µs a step':>12} {'ratio':>8}")
    keys: Iterable[str | tuple[Sequence[int], int]] = arguments.only
    for asked, of_kind in (
        (arguments.copies, PREDICTIONS), (arguments.narrow, counted.WORKLOADS), (arguments.few, FEW),
        (arguments.many_rows, counted.MANY_ROWS),
    ):  # fmt: skip
        keys = of_kind if asked else keys
    for key in keys:
        if isinstance(key, tuple):
            widths, count = key
            parts = [measure_copies(widths, count, backend, arguments.rounds)]
        elif key in SMALL:
            parts = [measure_small(key, backend, arguments.rounds)]
        elif key in FEW:
            parts = [measure_few(key, precision, backend, arguments.rounds) for precision in arguments.precisions]
        elif key in counted.WORKLOADS:
            parts = [measure_narrow(key, precision, backend, arguments.rounds) for precision in arguments.precisions]
        elif key in counted.MANY_ROWS:
            parts = [measure_many_rows(key, precision, backend, arguments.rounds) for precision in arguments.precisions]
        else:
            precisions = bench.WORKLOADS[key].precisions
            parts = [measure(key, precision, backend, arguments.rounds) for precision in precisions]
        for part in parts:
            for row in part:
                rows.append(row)
                print(row, flush=True)
            if arguments.json:
                arguments.json.write_text(bench.json_lines(rows, bench.surroundings(backend)), encoding="utf-8")


if __name__ == "__main__":
    main()
