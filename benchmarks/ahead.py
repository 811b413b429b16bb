"""Compiles the kernels of a map's points for a card that need not be here, into the cache.

    python benchmarks/ahead.py [--points N] [--first N] [--numbers 3 10-19] [--seed NAME] [--ways] [--card NAME]
    python benchmarks/ahead.py --again FILE ... [--below RATIO] [--ways] [--card NAME]

Where a card is lent by the minute, its time is for measuring: run this elsewhere, with the same nvcc, and take the
folder that MLPGPU_CACHE names along.  benchmarks/map.py then finds all kernels of these points compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import map_kept
from counted import thresholds_of
from map import add_numbers, asked_numbers, read
from map_contenders import WAYS
from map_points import BOUNDS, Point, draw

from mlpgpu.backends.cuda.kernels import Entry
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.profile.paths import CARDS, Card
from mlpgpu.backends.cuda.runtime.compiler import compile_entries
from mlpgpu.backends.cuda.select.persistent import choose_kernel


def entries_of(point: Point, changed: Mapping[str, float], card: Card) -> list[Entry]:
    """The kernels that a program of the point loads, with these thresholds."""
    with thresholds_of(changed):
        plan = point.workload.plan(point.precision)
        source = point.workload.source
        lowered = lower(plan, multiprocessors=card.multiprocessors, source=source, arch=card.arch)
        kernel = choose_kernel(
            plan, multiprocessors=card.multiprocessors, shared_bytes=card.shared_bytes, arch=card.arch
        )
        if isinstance(kernel, PersistentKernel):
            return kernel.entries(lowered, source, textured=True)
        return lowered.entries()


def ways(*, others: bool) -> Iterator[Mapping[str, float]]:
    yield {}
    if others:
        yield from WAYS.values()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile what a map's points need for a card that is not here.")
    add_numbers(parser, 40)
    parser.add_argument("--seed", default="first", metavar="NAME", help="of the draw (default: %(default)s)")
    parser.add_argument(
        "--again", nargs="+", type=Path, metavar="FILE", help="these files' points, as map.py takes them"
    )
    parser.add_argument("--below", type=float, default=1e9, metavar="RATIO", help="of --again, points of lower ratios")
    parser.add_argument("--ways", action="store_true", help="those of map.py --ways as well")
    parser.add_argument(
        "--card", choices=CARDS, default="H200", help="(default: %(default)s, which stands for an H100)"
    )
    arguments = parser.parse_args()
    card = CARDS[arguments.card]
    points = [draw(arguments.seed, number, BOUNDS["cuda"]) for number in asked_numbers(arguments)]
    if arguments.again:
        for path in arguments.again:
            if not path.is_file():
                parser.error(f"--again: expected files of lines that map.py --json wrote, got {path}, which is none")
        lines = [line for path in arguments.again for line in read(path)]
        points = [map_kept.point_of(line) for line in map_kept.kept(lines, "cuda", arguments.below).values()]
    programs = [entries_of(point, changed, card) for point in points for changed in ways(others=arguments.ways)]
    print(f"{len(programs)} programs of {len({entry for each in programs for entry in each})} kernels")
    for done, entries in enumerate(programs, start=1):
        compile_entries(entries, card.arch)
        print(f"\r{done} of {len(programs)}", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
