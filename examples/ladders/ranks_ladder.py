"""The matrix product over ranks: split C and split A, on a grid of processes that have blocks in turn.

Both make C (m, n) = A (m, k) · B (k, n) in float32, of matrices that rank 0 has, and leave C there.  Blocks are dealt
one after another and around again, so that each rank has as much of every region as the others.

- *Split C*: ranks are a grid, and each owns the blocks of C in its rows and columns of that grid.  It gets the rows of
  A and the columns of B that they need.  Nothing is summed up across ranks: the bits are those of the serial program.
- *Split A*: each rank owns blocks of k, columns of A and the rows of B that meet them, and makes a partial of all of C.
  Each rank then receives all partials of its rows and adds them in the ranks' order: bits follow from their number.

Rank 0 prints GFLOP/s (2 m n k / T) of the whole, from and to rank 0, the time of the products and their sum alone, how
many times as fast as the serial program the whole is, and the error ‖C_serial − C‖ / ‖C_serial‖ by Frobenius norms.

    python -m mlpgpu launch -n 4 examples/ladders/ranks_ladder.py [--quick] [--json PATH [--append]] [--picture PATH]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from ladder import command_line, draw_rungs, kept, save
from matplotlib.figure import Figure
from threadpoolctl import threadpool_limits

import mlpgpu as mg
from mlpgpu.bench import json_lines, surroundings
from mlpgpu.ranks import communicator

SQUARES = [(n, n, n) for n in (500, 1000, 2000, 4000)]
FLAT = [(15_000, 15_000, k) for k in (32, 64, 128)]
QUICK = [(300, 300, 300), (1000, 1000, 1000), (1000, 1000, 32)]
BLOCK = 128  # rows or columns of C
TERMS = 8  # of a block of k, so that flat products have some for every rank
ROUNDS = 3


@dataclass(frozen=True)
class Result:
    """A product of one size by one variant: medians of the whole's and of the products' seconds, and the error."""

    rung: str
    ranks: int
    m: int
    n: int
    k: int
    seconds: float
    seconds_of_products: float
    gflops: float
    speedup: float
    error: float


def dealt(length: int, rank: int, ranks: int, block: int = BLOCK) -> list[slice]:
    """The blocks of ``length`` rows or columns that a rank has of so many."""
    return [slice(start, min(start + block, length)) for start in range(rank * block, length, ranks * block)]


def length(blocks: list[slice]) -> int:
    """Rows or columns in these blocks."""
    return sum(block.stop - block.start for block in blocks)


def packed(matrix: np.ndarray, blocks: list[slice], axis: int) -> np.ndarray:
    """These rows (axis 0) or columns (axis 1) of a matrix, side by side in memory of their own."""
    parts = [matrix[block] if axis == 0 else matrix[:, block] for block in blocks]
    shape = (0, matrix.shape[1]) if axis == 0 else (matrix.shape[0], 0)
    return np.concatenate(parts, axis=axis) if parts else np.empty(shape, matrix.dtype)


def multiply_blocks(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (m, k) · b (k, n), block by block: the bits of a block depend on nothing but its row of a and column of b."""
    c = np.empty((len(a), b.shape[1]), a.dtype)
    columns = [np.ascontiguousarray(b[:, block]) for block in dealt(b.shape[1], 0, 1)]
    for rows in dealt(len(a), 0, 1):
        for place, block in enumerate(dealt(b.shape[1], 0, 1)):
            c[rows, block] = a[rows] @ columns[place]
    return c


def grid_of(ranks: int) -> tuple[int, int]:
    """Rows and columns of the squarest grid of so many processes."""
    rows = next(count for count in range(int(ranks**0.5), 0, -1) if ranks % count == 0)
    return rows, ranks // rows


class Group:
    """The ranks, or this process alone."""

    def __init__(self) -> None:
        self.communicator = communicator()
        self.rank, self.count = mg.rank(), mg.ranks()
        self._nothing = np.empty(0, np.float32)

    def exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Array ``sent[r]`` goes to rank r, ``received[r]`` comes from it."""
        if self.communicator is None:
            received[0][...] = sent[0]
        else:
            self.communicator.exchange(sent, received)

    def scatter(self, part: Callable[[int], np.ndarray], rows: int, columns: int) -> np.ndarray:
        """This rank's part, of so many rows and columns, of what rank 0 has and ``part`` cuts."""
        own = np.empty((rows, columns), np.float32)
        sent = [part(rank) if self.rank == 0 else self._nothing for rank in range(self.count)]
        self.exchange(sent, [own if rank == 0 else self._nothing for rank in range(self.count)])
        return own

    def gather(self, own: np.ndarray, shapes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """On rank 0 every rank's part, of these shapes; elsewhere nothing."""
        parts = [np.empty(shape, np.float32) if self.rank == 0 else self._nothing for shape in shapes]
        self.exchange([own if rank == 0 else self._nothing for rank in range(self.count)], parts)
        return parts if self.rank == 0 else []

    def seconds(self) -> float:
        """The time at which all ranks are here."""
        if self.communicator is not None:
            self.communicator.barrier()
        return time.perf_counter()


def split_c(group: Group, size: tuple[int, int, int], a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """C on rank 0, and the seconds of the products alone; ``a`` and ``b`` are what rank 0 has, elsewhere anything."""
    (m, n, k), (grid_rows, grid_columns) = size, grid_of(group.count)

    def rows(rank: int) -> list[slice]:
        return dealt(m, rank // grid_columns, grid_rows)

    def columns(rank: int) -> list[slice]:
        return dealt(n, rank % grid_columns, grid_columns)

    own = group.rank
    a_rows = group.scatter(lambda rank: packed(a, rows(rank), 0), length(rows(own)), k)
    b_columns = group.scatter(lambda rank: packed(b, columns(rank), 1), k, length(columns(own)))
    started = group.seconds()
    c = multiply_blocks(a_rows, b_columns)
    seconds = group.seconds() - started
    shapes = [(length(rows(rank)), length(columns(rank))) for rank in range(group.count)]
    whole = np.empty((m, n) if group.rank == 0 else (0, 0), np.float32)
    for rank, part in enumerate(group.gather(c, shapes)):
        for i, row in enumerate(rows(rank)):
            for j, column in enumerate(columns(rank)):
                at = slice(i * BLOCK, i * BLOCK + row.stop - row.start), slice(j * BLOCK, (j + 1) * BLOCK)
                whole[row, column] = part[at]
    return whole, seconds


def split_a(group: Group, size: tuple[int, int, int], a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """Likewise, by partials that are summed up."""
    m, n, k = size

    def terms(rank: int) -> list[slice]:
        return dealt(k, rank, group.count, TERMS)

    own = terms(group.rank)
    a_columns = group.scatter(lambda rank: packed(a, terms(rank), 1), m, length(own))
    b_rows = group.scatter(lambda rank: packed(b, terms(rank), 0), length(own), n)
    started = group.seconds()
    partial = multiply_blocks(a_columns, b_rows)
    bounds = [m * rank // group.count for rank in range(group.count + 1)]
    rows = [slice(first, end) for first, end in pairwise(bounds)]
    mine = rows[group.rank]
    partials = [np.empty((mine.stop - mine.start, n), np.float32) for _ in range(group.count)]
    group.exchange([partial[part] for part in rows], partials)
    for other in partials[1:]:
        np.add(partials[0], other, out=partials[0])
    seconds = group.seconds() - started
    parts = group.gather(partials[0], [(part.stop - part.start, n) for part in rows])
    return np.concatenate(parts) if parts else np.empty((0, 0), np.float32), seconds


VARIANTS = {"split C": split_c, "split A": split_a}


def error_of(c: np.ndarray, serial: np.ndarray) -> float:
    """‖C_serial − C‖ / ‖C_serial‖, row by row, so that no further matrix is needed."""
    pairs = list(zip(c, serial, strict=True))
    squares = sum(float(np.sum((row.astype(float) - other) ** 2)) for row, other in pairs)
    return (squares / sum(float(np.sum(other.astype(float) ** 2)) for _, other in pairs)) ** 0.5


def measure(group: Group, size: tuple[int, int, int]) -> Iterator[Result]:
    """Every variant, in turns with the serial program on rank 0; other ranks take part and yield nothing."""
    m, n, k = size
    is_first, draw = group.rank == 0, np.random.default_rng(m + k)
    a = draw.uniform(-1.0, 1.0, (m, k) if is_first else (0, 0)).astype(np.float32)
    b = draw.uniform(-1.0, 1.0, (k, n) if is_first else (0, 0)).astype(np.float32)
    serial = np.empty((0, 0), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in ("serial", *VARIANTS)}
    of_products: dict[str, list[float]] = {name: [] for name in VARIANTS}
    errors: dict[str, float] = {}
    for _ in range(ROUNDS):
        started = group.seconds()
        if is_first:
            serial = multiply_blocks(a, b)
        seconds["serial"].append(group.seconds() - started)
        for name, variant in VARIANTS.items():
            started = group.seconds()
            c, products = variant(group, size, a, b)
            seconds[name].append(group.seconds() - started)
            of_products[name].append(products)
            if is_first:
                errors[name] = error_of(c, serial)
    if not is_first:
        return
    alone = statistics.median(seconds["serial"])
    yield Result("serial", 1, m, n, k, alone, alone, 2e-9 * m * n * k / alone, 1.0, 0.0)
    for name in VARIANTS:
        whole, products = statistics.median(seconds[name]), statistics.median(of_products[name])
        of_size = name, group.count, m, n, k
        yield Result(*of_size, whole, products, 2e-9 * m * n * k / whole, alone / whole, errors[name])


def draw(results: Sequence[Result], path: Path) -> None:
    """GFLOP/s of the whole and of the products, by m = n = k."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    square = [result for result in results if result.m == result.n == result.k]
    names = list(dict.fromkeys((result.rung, result.ranks) for result in square))
    for axes, title, what in ((panels[0], "whole", "seconds"), (panels[1], "products alone", "seconds_of_products")):
        rungs = {
            rung if rung == "serial" else f"{rung}, {ranks} ranks": [
                (result.n, 2e-9 * result.n**3 / getattr(result, what))
                for result in square
                if (result.rung, result.ranks) == (rung, ranks)
            ]
            for rung, ranks in names
        }
        draw_rungs(axes, "m = n = k", rungs)
        axes.set(title=f"GFLOP/s, {title}")
    save(figure, path)


def main() -> None:
    parser = command_line(__doc__.splitlines()[0], "ranks_ladder.png")
    parser.add_argument("--append", action="store_true", help="keep what --json has of other numbers of ranks")
    options = parser.parse_args()
    if options.append and options.json is None:
        parser.error("--append needs --json")
    group = Group()
    results: list[Result] = []
    if not options.only_draw:
        with threadpool_limits(1, "blas"):  # a rank is one thread
            for size in QUICK if options.quick else SQUARES + FLAT:
                for result in measure(group, size):
                    results.append(result)
                    print(
                        f"{result.m:6,} × {result.n:6,} × {result.k:6,}  {result.rung:8} {result.ranks} ranks "
                        f"{result.gflops:8.1f} GFLOP/s, products {1e3 * result.seconds_of_products:9.2f} ms of "
                        f"{1e3 * result.seconds:9.2f} ms, {result.speedup:5.2f} × serial, error {result.error:.1e}",
                        flush=True,
                    )
    if group.rank:
        return
    earlier = options.json.read_text(encoding="utf-8") if options.append and options.json.exists() else ""
    if options.json is not None and not options.only_draw:
        options.json.write_text(earlier + json_lines(results, surroundings()), encoding="utf-8")
    draw(kept(options.json, Result) if options.json is not None else results, options.picture)


if __name__ == "__main__":
    main()
