"""What steps of small batches are counted to take, launch by launch.

    python benchmarks/counted.py [--launches NAME PRECISION] [--many-rows]

Rows are small networks at their batch sizes; columns are launches and microseconds of a step on an H200, without and
with ``thresholds.NARROW_TILES_ARE_USED``; of --many-rows networks with narrow layers, without and with counts in the
place of limits of widths and weights.  ``benchmarks/choices.py`` measures the same networks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from mlpgpu import text
from mlpgpu.backends.cuda.kernels.launches import Launch
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.profile.paths import CARDS
from mlpgpu.backends.cuda.profile.predicted import predicted_seconds
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.bench import PRECISIONS, Workload

CARD = CARDS["H200"]

# (widths, batch size): those whose times of before are known, and others.
NETWORKS = {
    "512s at 64": ((784, 512, 512, 10), 64),
    "512s at 128": ((784, 512, 512, 10), 128),
    "512s at 256": ((784, 512, 512, 10), 256),
    "1024s at 64": ((784, 1024, 1024, 10), 64),
    "1024s at 128": ((784, 1024, 1024, 10), 128),
    "256-512s at 512": ((256, 512, 512, 512, 10), 512),
    "2048s at 64": ((784, 2048, 2048, 10), 64),
    "funnel at 128": ((2048, 1024, 512, 256, 10), 128),
    "deep 256s at 256": ((128, 256, 256, 256, 256, 256, 256, 10), 256),
}
WORKLOADS = {
    name: Workload(widths, batch, 64 * batch, 1e-3, precisions=PRECISIONS) for name, (widths, batch) in NETWORKS.items()
}

# Layers of few weights or columns, at many rows.
MANY_ROWS = {
    f"{'-'.join(map(str, widths))}, batch {batch:,}": Workload(
        widths, batch, 32 * batch, 1e-4, loss="squared_error", precisions=PRECISIONS
    )
    for widths, batch in (
        ((12, 256, 256, 159), 8192),
        ((13, 128, 64, 512, 5), 1024),
        ((626, 271, 296, 904, 59, 102, 2), 2048),
        ((316, 161, 1679, 637, 42), 1024),
        ((768, 128, 768, 668), 14798),
        ((50, 128, 128, 128, 1), 8192),
        ((784, 256, 256, 10), 4096),
        ((183, 256, 399), 512),
    )
}
# Of what follows from counts: the layers that tensor cores make, who sums biases' gradients, tiles of multiply-adds,
# updates whose blocks have parts of the rows, on plain cores and by clusters on tensor cores, and blocks of rows there.
SWITCHES = (
    "LAYERS_ARE_COUNTED_TOGETHER", "COLUMNS_MAY_BE_SUMMED_APART", "TILES_ARE_COUNTED", "UPDATES_HAVE_PARTS",
    "CLUSTERS_SHARE_ROWS", "TENSOR_ROW_STEP_IS_USED",
)  # fmt: skip


@contextmanager
def thresholds_of(changed: Mapping[str, float]) -> Iterator[None]:
    """Inside the block these thresholds have other values."""
    before = {name: getattr(thresholds, name) for name in changed}
    vars(thresholds).update(changed)
    try:
        yield
    finally:
        vars(thresholds).update(before)


def without(*switches: str) -> AbstractContextManager[None]:
    """Inside the block these thresholds are off."""
    return thresholds_of(dict.fromkeys(switches, False))


@contextmanager
def narrow_tiles(*, used: bool = True, on_tensor_cores: bool = True) -> Iterator[None]:
    """Inside the block plans have the narrow tiles or not; or those of multiply-adds alone."""
    least = thresholds.NARROW_LEAST_ROWS if on_tensor_cores else 1 << 30
    with thresholds_of({"NARROW_TILES_ARE_USED": used, "NARROW_LEAST_ROWS": least}):
        yield


@dataclass(frozen=True)
class Counted:
    """A launch of a step, and how many microseconds it is counted at."""

    launch: Launch
    microseconds: float


def count(launch: Launch, rows: int, share: float = 1.0) -> Counted:
    """A launch for so many rows, of which a step has a share."""
    return Counted(launch, 1e6 * share * predicted_seconds(launch, rows, CARD.multiprocessors))


def step(workload: Workload, precision: str) -> list[Counted] | str:
    """The launches of a step; or that it trains inside one kernel."""
    plan = workload.plan(precision)
    sms, most_bytes = CARD.multiprocessors, CARD.shared_bytes
    chosen = choose_kernel(plan, multiprocessors=sms, shared_bytes=most_bytes, arch=CARD.arch)
    if isinstance(chosen, PersistentKernel):
        return "one kernel"
    lowered = lower(plan, multiprocessors=CARD.multiprocessors, source="float32", arch=CARD.arch)
    staged = [count(launch, workload.batch_size, 1 / lowered.stages) for launch in lowered.staged]
    launches = (*lowered.begin, *lowered.shards[0], *lowered.finish)
    return [*staged, *(count(launch, workload.batch_size) for launch in launches)]


def ways(*, many_rows: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What is compared: without narrow tiles and with them, or without counts in the place of limits and with them."""
    return (without(*SWITCHES), nullcontext()) if many_rows else (narrow_tiles(used=False), narrow_tiles())


def rows(*, many_rows: bool = False) -> Iterator[tuple[str, ...]]:
    """Of the table: network, precision, launches and microseconds in both ways, and what the second gains."""
    for workload in (MANY_ROWS if many_rows else WORKLOADS).values():
        for precision in PRECISIONS:
            found = []
            for way in ways(many_rows=many_rows):
                with way:
                    found.append(step(workload, precision))
            before, after = found
            if isinstance(before, str) or isinstance(after, str):
                yield workload.name, precision, "", "one kernel", "", "", ""
                continue
            times = [sum(each.microseconds for each in made) for made in (before, after)]
            yield (
                workload.name, precision, str(len(before)), f"{times[0]:.0f}", str(len(after)), f"{times[1]:.0f}",
                f"{times[0] / times[1]:.1f}",
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what steps of small batches take on an H200.")
    parser.add_argument("--launches", nargs=2, metavar=("NAME", "PRECISION"), help="the launches of one network")
    parser.add_argument("--many-rows", action="store_true", help="networks of narrow layers at many rows")
    arguments = parser.parse_args()
    new = "counts" if arguments.many_rows else "narrow tiles"
    if arguments.launches:
        name, precision = arguments.launches
        for way, word in zip(ways(many_rows=arguments.many_rows), ("without", "with"), strict=True):
            with way:
                made = step((MANY_ROWS if arguments.many_rows else WORKLOADS)[name], precision)
            print(f"{name}, {precision}, {word} {new}")
            for each in [] if isinstance(made, str) else made:
                print(f"  {each.launch.entry.name:60} {each.microseconds:6.1f}")
        return
    head = "network", "precision", "launches", "µs", f"with {new}", "µs", "times as fast"
    print(text.table([head, *rows(many_rows=arguments.many_rows)], "<<>>>>>"))


if __name__ == "__main__":
    main()
