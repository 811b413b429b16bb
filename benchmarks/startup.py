"""What the kernels of a network cost before its first step: nvcc's seconds, cold and with a cache that others filled.

    python benchmarks/startup.py [--card H200] [--json benchmarks/results/startup.json]

No card is needed.  Two ways of compiling are compared: *units*, one run of nvcc for each unit and a cache that knows
whole units, and *entries*, a cache that knows each kernel and units split while cores have nothing to compile.  Each
run of nvcc is made by itself and counted in processor seconds, its children's included, so that other work of the
machine hardly counts.  What c cores would take is worked out from these: runs are given out in order, each to the core
that is free first.  The way of *units* is the one of version 0.1.0 before kernels were noted one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import io
import itertools
import json
import os
import platform
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import mlpgpu as mg
from mlpgpu.backends.cuda.kernels import Entry, units
from mlpgpu.backends.cuda.kernels.launches import Lowered
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.profile.paths import CARDS, Card
from mlpgpu.backends.cuda.runtime.compiler import (
    compile_units,
    find_nvcc,
    nvcc_version,
    split_jobs,
)
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.backends.sources import CACHE_VARIABLE

CORES = (2, 16)
PRECISIONS = ("float32", "tf32", "bfloat16")
PLANS: dict[str, tuple[tuple[int, ...], int]] = {  # widths, rows of a batch
    "784-128-10": ((784, 128, 10), 128),
    "784-512-512-10": ((784, 512, 512, 10), 256),
    "784-1024-1024-10": ((784, 1024, 1024, 10), 1024),
    "50-128-128-128-1": ((50, 128, 128, 128, 1), 128),
}
SWEEP = [(784, a, b, 10) for a, b in itertools.product((64, 128, 256, 512, 1024), (64, 128, 256, 512))]  # shapes
SWEEP_ROWS = 256

Jobs = Sequence[Sequence[Entry]]


def entries_of(widths: tuple[int, ...], rows: int, precision: str, card: Card) -> list[Entry]:
    """The kernels of a network on a card: of its steps on float32 rows, and of its evaluation."""
    loss = "softmax_cross_entropy" if widths[-1] > 1 else "mean_squared_error"
    layers = [
        mg.Dense(k, n, activation="relu" if i + 2 < len(widths) else "identity")
        for i, (k, n) in enumerate(itertools.pairwise(widths))
    ]
    plan = mg.Network(layers, seed=1).lower(capacity=rows, loss=loss, optimizer=mg.Momentum(0.1), precision=precision)
    lowered = lower(plan, multiprocessors=card.multiprocessors, source="float32", arch=card.arch)
    kernel = choose_kernel(plan, multiprocessors=card.multiprocessors, shared_bytes=card.shared_bytes, arch=card.arch)
    if isinstance(kernel, PersistentKernel):
        steps = [kernel.train("float32", textured=True), kernel.add_errors(1)]
        lowered = Lowered(evaluation=[*lowered.evaluation_begin, *lowered.evaluation, *steps])
    return list(lowered.entries())


def makespan(seconds: Iterable[float], cores: int) -> float:
    """When the last of these jobs ends, each begun in order by the core that is free first."""
    free = [0.0] * cores
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


class Nvcc:
    """Processor seconds of runs of nvcc, each measured once, in an empty cache."""

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._seconds: dict[tuple[Entry, ...], float] = {}

    def seconds(self, job: Sequence[Entry]) -> float:
        key = tuple(job)
        if key not in self._seconds:
            with tempfile.TemporaryDirectory() as cache:
                os.environ[CACHE_VARIABLE] = cache
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                with contextlib.redirect_stderr(io.StringIO()):
                    compile_units({job[0].unit: job}, self._arch)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            self._seconds[key] = round(took, 3)
        return self._seconds[key]


class Units:
    """A cache of whole units: a run of nvcc for each that it lacks, whatever the cores."""

    def __init__(self) -> None:
        self._known: set[tuple[Entry, ...]] = set()

    def jobs(self, entries: Sequence[Entry], cores: int) -> Jobs:
        del cores
        missing = [job for job in map(tuple, units(entries).values()) if job not in self._known]
        self._known |= set(missing)
        return missing


class Entries:
    """A cache of kernels: runs of nvcc as the compiler splits them among cores."""

    def __init__(self) -> None:
        self._known: set[Entry] = set()

    def jobs(self, entries: Sequence[Entry], cores: int) -> Jobs:
        missing = [entry for entry in entries if entry not in self._known]
        self._known |= set(missing)
        return split_jobs(missing, cores)


def cold(nvcc: Nvcc, entries: Sequence[Entry], cores: int) -> list[float]:
    """Seconds that a network's kernels take on so many cores with nothing in the cache, by units and by entries."""
    return [makespan(map(nvcc.seconds, cache.jobs(entries, cores)), cores) for cache in (Units(), Entries())]


def swept(
    nvcc: Nvcc, shapes: Sequence[Sequence[Entry]], cores: int, make: Callable[[], Units | Entries]
) -> list[float]:
    """Seconds of each shape in turn, by a cache that has what those before it left."""
    cache = make()
    return [makespan(map(nvcc.seconds, cache.jobs(entries, cores)), cores) for entries in shapes]


def measure(card: Card) -> dict[str, object]:
    """All figures; each is printed as soon as it is known."""
    nvcc, plans, sweeps = Nvcc(card.arch), [], []
    print(f"{'from an empty cache':<28}{'cores':>6}{'units':>9}{'entries':>9}{'ratio':>7}")
    for (name, (widths, rows)), precision, cores in itertools.product(PLANS.items(), PRECISIONS, CORES):
        old, new = cold(nvcc, entries_of(widths, rows, precision, card), cores)
        plans.append({"plan": name, "precision": precision, "cores": cores, "units": old, "entries": new})
        print(f"{name} {precision:<{27 - len(name)}}{cores:6}{old:7.2f} s{new:7.2f} s{old / new:7.2f}", flush=True)
    print(f"\n{'sweep of ' + str(len(SWEEP)) + ' shapes':<28}{'cores':>6}{'units':>9}{'entries':>9}{'ratio':>7}")
    for precision, cores in itertools.product(PRECISIONS, CORES):
        shapes = [entries_of(widths, SWEEP_ROWS, precision, card) for widths in SWEEP]
        old_each, new_each = (swept(nvcc, shapes, cores, make) for make in (Units, Entries))
        row = {"precision": precision, "cores": cores, "units": old_each, "entries": new_each}
        sweeps.append(row)
        for what, take in (("mean", statistics.mean), ("median", statistics.median), ("largest after the first", max)):
            skip = 1 if take is max else 0
            old, new = take(old_each[skip:]), take(new_each[skip:])
            ratio = f"{old / new:7.2f}" if new else f"{'-':>7}"
            print(f"{precision} {what:<{27 - len(precision)}}{cores:6}{old:7.2f} s{new:7.2f} s{ratio}", flush=True)
    return {
        "card": card.name, "nvcc": nvcc_version(find_nvcc()), "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(), "plans": plans, "sweep": [list(widths) for widths in SWEEP], "sweeps": sweeps,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", default="H200", choices=CARDS, help="whose kernels are compiled")
    parser.add_argument("--json", type=Path, help="where to keep all figures")
    given = parser.parse_args()
    figures = measure(CARDS[given.card])
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
