"""A map of training speed: networks drawn at random, mlpgpu beside JAX, PyTorch and, on the CPU, scikit-learn.

All train on the same random rows, which lie on the device, for whole epochs, shuffles included, and take turns, round
by round, in one process; a point's figures are medians, and its ratios medians of the rounds' ratios.  Each peer stands
in its fastest form: JAX as several epochs in one jitted call with donated state, whose inputs lie on the card in the
type that it multiplies; PyTorch compiled, with an epoch captured as one CUDA graph.  map_points.py states how networks
are drawn.  What the contenders run is compiled ahead on all cores, some points at a time.

    python benchmarks/map.py [--points N] [--numbers 3 10-19] [--seed NAME] [--grid]
                             [--only mlpgpu JAX PyTorch scikit-learn]
                             [--backend cuda|cpu] [--ways] [--most-seconds S] [--json PATH] [--picture PATH] …
    python benchmarks/map.py --again FILE ... [--below RATIO] …
    python benchmarks/map.py --report FILE ... [--picture PATH]

A line of JSON is appended for each point: the network, card, driver, versions and commit; each contender's microseconds
a step, first epoch's loss, peak of memory, and the error of one step's gradient against float64 where that takes
little; the ratios; and what takes most of mlpgpu's step.  What fails is recorded, and the next point goes on.  A point
that the file has is skipped, so a run can be repeated until all are there; --retry measures those again in which
something failed.  With --ways mlpgpu takes turns with itself, its thresholds changed, which shows where another way
than the chosen one takes less.  With --again mlpgpu alone runs kept files' points, beside their peers' figures.  At
the end the map is drawn, and the worst points are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import map_kept
import map_report
from map_contenders import JAX_CACHE, LIBRARIES, OURS
from map_measure import REFERENCES, Compilers, Measurer, Options, ProcessLost, tell
from map_points import BOUNDS, Point, draw, grid
from plain_environment import begin_without_limits

from mlpgpu import bench

POINTS, SEED = 40, "first"
CHUNK = 8  # points compiled together, before they are measured: what is compiled is lost if the time is over
LIBRARIES_OF = {"cuda": ("mlpgpu", "JAX", "PyTorch"), "cpu": LIBRARIES}
POINT_SECONDS = {"cuda": 120.0, "cpu": 400.0}  # at most, before a point counts as failed
COMPILING_SHARE = 0.6  # of the time that is left, at most, for compiling some points ahead


def numbers_of(text: str) -> range:
    """The numbers that ``"7"`` or ``"10-19"`` stands for.

    Raises:
        argparse.ArgumentTypeError: it stands for none.
    """
    first, _, last = text.partition("-")
    is_number = first.isdecimal() and (last.isdecimal() or first == text)
    found = range(int(first), int(last or first) + 1) if is_number else range(0)
    if not found:
        raise argparse.ArgumentTypeError(f"expected a number such as 7, or a range such as 10-19, got {text!r}")
    return found


def add_numbers(parser: argparse.ArgumentParser, points: int) -> None:
    """Options that say which points of a draw are asked for, so many if nobody says; see :func:`asked_numbers`."""
    parser.add_argument("--points", type=int, default=points, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first one (default: 0)")
    parser.add_argument(
        "--numbers", nargs="+", type=numbers_of, metavar="N", help="these points alone; 10-19 are ten of them"
    )


def asked_numbers(arguments: argparse.Namespace) -> Iterable[int]:
    """The numbers of the points that these options ask for, each once."""
    if arguments.numbers:
        return dict.fromkeys(itertools.chain.from_iterable(arguments.numbers))
    return range(arguments.first, arguments.first + arguments.points)


def key_of(line: dict[str, Any]) -> tuple[str, str, int]:
    return line["backend"], line["seed"], line["number"]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, if there is one; a last one that was cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            tell(f"{path}: a line that was cut off is left out")
    return lines


def has_failed(line: dict[str, Any]) -> bool:
    """Whether anything in a point's line failed."""
    return "failed" in line or any("failed" in each for each in line["contenders"].values())


def missing(
    points: Iterable[Point], lines: Iterable[dict[str, Any]], backend: str, libraries: Iterable[str], *, retry: bool
) -> list[Point]:
    """The points that the lines do not have, by all the libraries; with ``retry`` also those where something failed."""
    done: dict[tuple[str, str, int], set[str]] = {}
    for line in lines:
        if not (retry and has_failed(line)):
            done.setdefault(key_of(line), set()).update(line["libraries"])
    return [point for point in points if not set(libraries) <= done.get((backend, point.seed, point.number), set())]


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file, whose last one may have been cut off."""
    is_cut = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * bool(is_cut) + json.dumps(line, ensure_ascii=False) + "\n")


def run(
    points: Sequence[Point], options: Options, path: Path, most_seconds: float, commit: str | None,
    compiled: Sequence[str], kept: Mapping[tuple[str, int], dict[str, Any]],
) -> None:  # fmt: skip
    """Compile and measure points, some at a time, until they are all in the file or the time is over.

    ``compiled`` are libraries for which nothing is compiled ahead, and ``kept`` the lines that have peers' figures.
    """
    deadline = time.perf_counter() + most_seconds
    measurer = Measurer(options, POINT_SECONDS[options.backend])
    compilers = Compilers(options, [each for each in options.libraries if each not in compiled], tell)
    chunk = max(1, min(CHUNK, len(points)))
    count = 0
    try:
        measurer.about()  # what cannot begin says so before anything is compiled
        for start in range(0, len(points), chunk):
            left = deadline - time.perf_counter()
            if left <= 0:
                break
            some = points[start : start + chunk]
            begun = time.perf_counter()
            compilers.compile(some, begun + COMPILING_SHARE * left)
            tell(f"{len(some)} points compiled ahead in {time.perf_counter() - begun:.1f} s")
            for point in some:
                if time.perf_counter() > deadline:
                    break
                line = measurer.measure(point)
                known = kept.get((point.seed, point.number))
                line = line if known is None else map_kept.beside(line, known)
                about = measurer.surroundings
                written = {
                    "backend": options.backend, **point.plain(), **line, **about,
                    "libraries": list(options.libraries), "commit": commit or about.get("commit"),
                    "flops": point.workload.flops, "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
                }  # fmt: skip
                append(path, written)
                count += 1
                tell(f"{point.name}: {point}: {map_report.summary(written)}")
    finally:
        measurer.close()
        compilers.close()
    tell(f"{count} of {len(points)} points measured")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure networks drawn at random beside JAX and PyTorch.")
    add_numbers(parser, POINTS)
    parser.add_argument("--seed", default=SEED, metavar="NAME", help="of the draw (default: %(default)s)")
    parser.add_argument("--grid", action="store_true", help="784-w-w-10 over widths and batches, in place of a draw")
    parser.add_argument(
        "--precision", nargs="+", choices=(*bench.PRECISIONS, "float64"),
        help="points of these precisions alone; float64 is of the CPU, and by itself",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, metavar="NAME", help="these libraries alone")
    parser.add_argument("--forms", nargs="+", metavar="NAME", help="the peers in these forms")
    parser.add_argument("--backend", choices=BOUNDS, default="cuda")
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    parser.add_argument("--no-profile", action="store_true", help="do not look for what takes most of a step")
    parser.add_argument("--ways", action="store_true", help="mlpgpu in other ways than it chooses as well")
    parser.add_argument("--most-seconds", type=float, default=1e9, metavar="S", help="end after about so long")
    parser.add_argument("--json", type=Path, default=Path("map.jsonl"), metavar="PATH", help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="draw the map there, as PNG or SVG")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="for compiled code (default: a temporary one)")
    parser.add_argument("--retry", action="store_true", help="measure points again in which something failed")
    parser.add_argument(
        "--compiled", nargs="+", choices=LIBRARIES, default=(), metavar="NAME",
        help="the cache has what these libraries run, of mlpgpu by benchmarks/ahead.py",
    )  # fmt: skip
    parser.add_argument("--commit", help="what is measured, where git cannot say")
    parser.add_argument("--again", nargs="+", type=Path, metavar="FILE", help="mlpgpu alone, at these files' points")
    parser.add_argument("--below", type=float, default=1e9, metavar="RATIO", help="of --again, points of lower ratios")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="measure nothing; report these files")
    arguments = parser.parse_args()
    for path in arguments.again or ():
        if not path.is_file():
            parser.error(f"--again: expected files of lines that --json wrote, got {path}, which is none")
    if arguments.report:
        lines = [line for path in arguments.report for line in read(path)]
        print(map_report.report(lines, arguments.picture))
        return

    backend, bounds = arguments.backend, BOUNDS[arguments.backend]
    if arguments.precision == ["float64"]:
        bounds = dataclasses.replace(bounds, precisions=("float64",))
    libraries = tuple(dict.fromkeys((OURS, *(arguments.only or LIBRARIES_OF[backend]))))
    drawn = list(grid(bounds)) if arguments.grid else []
    drawn = drawn or [draw(arguments.seed, number, bounds) for number in asked_numbers(arguments)]
    kept = {}
    if arguments.again:
        lines = [line for path in arguments.again for line in read(path)]
        kept, libraries = map_kept.kept(lines, backend, arguments.below), (OURS,)
        drawn = [map_kept.point_of(line) for line in kept.values()]
    if arguments.precision:
        drawn = [point for point in drawn if point.precision in arguments.precision]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    points = missing(drawn, read(arguments.json), backend, libraries, retry=arguments.retry)
    tell(f"{len(drawn)} points, {len(drawn) - len(points)} of them measured already")
    options = Options(
        backend, libraries, tuple(arguments.forms) if arguments.forms else None, arguments.rounds,
        profiles=not arguments.no_profile, ways=arguments.ways,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.cache or Path(temporary)).resolve()
        # The processes inherit these.
        os.environ[JAX_CACHE] = str(folder / "jax")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torch")
        os.environ[REFERENCES] = temporary
        if points:
            try:
                run(
                    points, options, arguments.json, arguments.most_seconds, arguments.commit, arguments.compiled, kept
                )  # fmt: skip
            except ProcessLost as lost:
                sys.exit(f"the process that measures cannot begin: {lost}; its message stands above")
    print(map_report.report(read(arguments.json), arguments.picture))


if __name__ == "__main__":
    begin_without_limits()
    main()
