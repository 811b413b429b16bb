"""Copies of float32 rows to memory that a card would read: NumPy's, PyTorch's and those in C++, in turns.

    python benchmarks/row_copies.py [--bytes N ...] [--threads N ...] [--rounds N] [--pinned]

Figures are microseconds of a copy, the median over rounds, and gigabytes a second.  It needs no GPU, unless the memory
is to be page-locked.  NumPy's and PyTorch's copies look for nothing; what a look costs them stands in its own row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from mlpgpu import bench
from mlpgpu.backends.cores import granted_cores
from mlpgpu.backends.cuda.inference.copies import all_finite
from mlpgpu.backends.cuda.runtime import find_device, pinned
from mlpgpu.backends.cuda.select.thresholds import INFERENCE_AWAKE_SECONDS, INFERENCE_COPY_THREADS
from mlpgpu.backends.row_copies import RowCopies, why_not

try:
    import torch
except ImportError:
    torch = None

COLUMNS = 784
BYTES = (80_000, 800_000, 3_136_000, 188_160_000)
REST = 1e-3  # seconds in which threads fall asleep, and caches and clocks too
PAUSE = 0.3  # seconds before a turn, for which PyTorch's threads spin after one of theirs


def rows_of(to: np.ndarray, copies: RowCopies, threads: int, *, past_caches: bool, awake: float) -> None:
    with copies:
        copies.begin(slice(0, len(to)), to, threads=threads, awake=awake, past_caches=past_caches).finish()


def copied_and_looked_at(x: np.ndarray, to: np.ndarray) -> bool:
    np.copyto(to, x)
    return all_finite(to)


def contenders(x: np.ndarray, to: np.ndarray, threads: list[int]) -> dict[str, Callable[[], object]]:
    """Each way to copy ``x`` (rows, columns) to ``to``."""
    found: dict[str, Callable[[], object]] = {
        "np.copyto": partial(np.copyto, to, x),
        "np.copyto, then a look": partial(copied_and_looked_at, x, to),
    }
    if torch is not None:
        source, target = torch.from_numpy(x), torch.from_numpy(to)
        found[f"torch copy_, {torch.get_num_threads()} threads"] = lambda: target.copy_(source)
    copies = RowCopies.of(x, None, to.dtype)
    if copies is None:
        raise SystemExit(why_not())
    for count in threads:
        for past_caches in (False, True):
            name = f"C++ with a look, {count} threads{', past the caches' * past_caches}"
            found[name] = partial(rows_of, to, copies, count, past_caches=past_caches, awake=INFERENCE_AWAKE_SECONDS)

        def rested(count: int = count) -> None:
            time.sleep(REST)
            rows_of(to, copies, count, past_caches=False, awake=0.0)

        found[f"C++ with a look, {count} threads, 1 ms later"] = rested
    return found


def measured(run: Callable[[], object], rest: float) -> float:
    """Seconds of a call, the median of those of a turn."""
    seconds: list[float] = []
    until = time.perf_counter() + bench.TURN_SECONDS
    while len(seconds) < 5 or time.perf_counter() < until:
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started - rest)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure copies of rows on the host.")
    parser.add_argument("--bytes", nargs="+", type=int, default=BYTES)
    most = min(INFERENCE_COPY_THREADS, granted_cores())
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, min(2, most), min(4, most), most}))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pinned", action="store_true", help="to page-locked memory, by a GPU's driver")
    arguments = parser.parse_args()
    device = find_device() if arguments.pinned else None
    print(f"{bench.surroundings(None)['machine']}, {granted_cores()} cores")
    for nbytes in arguments.bytes:
        rows = max(1, nbytes // (4 * COLUMNS))
        x = np.random.default_rng(1).standard_normal((rows, COLUMNS), np.float32)
        if device is None:
            to = np.empty_like(x)
        else:
            with device:
                to = pinned(device, x.shape, np.float32)
        to[...] = 0
        ways = contenders(x, to, arguments.threads)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, run in ways.items():
                time.sleep(PAUSE)
                run()
                # A sleep takes longer than it is asked to.
                rest = measured(partial(time.sleep, REST), 0.0) if "later" in name else 0.0
                seconds[name].append(measured(run, rest))
        print(f"{x.nbytes:,} bytes")
        for name, found in seconds.items():
            median = statistics.median(found)
            print(f"  {name:45} {1e6 * median:10,.1f} µs {x.nbytes / median / 1e9:7.1f} GB/s")


if __name__ == "__main__":
    main()
