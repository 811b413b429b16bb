"""Products by one thread: the loop that packs nothing beside OpenBLAS; ``backends/cpu/products.py`` has limits by it.

    python benchmarks/cpu_products.py [--json products.jsonl]

Both are called as a program calls them, in turns; times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlpgpu.backends.cpu.blas import BLAS
from mlpgpu.backends.cpu.compiled import product, unpacked_gradient, unpacked_rows
from mlpgpu.backends.cpu.loops import joined
from mlpgpu.bench import json_lines, surroundings
from mlpgpu.text import table

WEIGHTS = ((64, 64), (784, 128), (300, 300), (784, 1024), (1000, 37), (749, 632), (2048, 2048))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ROUNDS = 15


@dataclass(frozen=True)
class Result:
    """Microseconds of a product of rows by weights (k, n), or of the weights' gradient."""

    of: str
    k: int
    n: int
    rows: int
    by_blas: float
    by_loop: float


def microseconds(calls: list[Callable[[], None]]) -> list[float]:
    """Of each of some calls, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    with BLAS.held(1):
        for number in range(ROUNDS + 1):
            for call, found in zip(calls, times, strict=True):
                started = time.perf_counter()
                call()
                if number:
                    found.append(time.perf_counter() - started)
    return [1e6 * statistics.median(found) for found in times]


def measure(k: int, n: int, rows: int) -> list[Result]:
    draw = np.random.default_rng(0)
    x, weight, dz = (draw.standard_normal(shape, np.float32) for shape in ((rows, k), (k, n), (rows, n)))
    y, gradient = np.empty((rows, n), np.float32), np.empty((k, n), np.float32)
    forward = [*joined([product(x, weight, y)]), *joined([unpacked_rows(x, weight, y)])]
    backward = [*joined([product(x.T, dz, gradient)]), *joined([unpacked_gradient(x, dz, gradient)])]
    return [Result(of, k, n, rows, *microseconds(calls)) for of, calls in (("y", forward), ("gradient", backward))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file to write the results to")
    options = parser.parse_args()
    results = [found for k, n in WEIGHTS for rows in ROWS for found in measure(k, n, rows)]
    for of in ("y", "gradient"):
        cells = [("loop's time by BLAS's", *(f"{rows} rows" for rows in ROWS))]
        for k, n in WEIGHTS:
            own = [found for found in results if (found.of, found.k, found.n) == (of, k, n)]
            cells.append((f"{of}, {k}×{n}", *(f"{found.by_loop / found.by_blas:.2f}" for found in own)))
        print(table(cells, "<" + ">" * len(ROWS)), end="\n\n")
    if options.json:
        options.json.write_text(json_lines(results, surroundings()), encoding="utf-8")


if __name__ == "__main__":
    main()
