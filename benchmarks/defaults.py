"""Are the defaults good?  mlpgpu beside scikit-learn and PyTorch on 24 data sets, equally long, equally standardized.

A cell is a set, a split of it, hidden widths, an activation and a number of epochs, all drawn from one seed; depths are
1 to 6 hidden layers, splits are five.  There are four parts.  "choose" compares candidates on one half of the sets;
"chosen" and "confirm" have the library's defaults meet those of scikit-learn and PyTorch, on the same half and on the
other one; "momentum" trains regressions at the README's rate of 0.1, and counts how many diverge.  scikit-learn has
four of the nine activations and is left out of the other cells; PyTorch, which has no default batch size, takes
mlpgpu's.  "deep" asks what other initial values give stacks of five to eight layers of 32 ReLU units.

Each fit is a line of the results, so a run that was stopped goes on where it was; ``--share`` and ``--rounds`` cut it.

    MLPGPU_DATA=FOLDER python benchmarks/defaults.py [PART …] [--workers N] [--minutes M]
        [--share F] [--rounds SEEDS] [--table] [--write]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from defaults_fits import SKLEARN, TORCH, Cell, Method, Scheme, fit
from defaults_report import COLUMNS, DOCUMENT, Row, key, read, report, write
from defaults_sets import DRAW, KINDS, halves, split

from mlpgpu.names import OptimizerName

RESULTS = Path(__file__).parent / "results" / "defaults.jsonl"
SEEDS = 5
DEPTHS = (1, 2, 3, 4, 5, 6)  # hidden layers
NARROWEST, WIDEST = 16, 160
EPOCHS = (20, 50, 100, 200)
MOST_ROWS = 80_000  # visited in a fit
PARTS = ("choose", "chosen", "confirm", "momentum", "deep")
DEEP_DEPTHS, DEEP_WIDTH, DEEP_EPOCHS = (5, 6, 8), 32, 60
BATCH = 32

DEFAULT = Method("mlpgpu")
PEERS = (Method("scikit-learn"), Method("PyTorch", batch_size=BATCH))

# What is compared on the sets to choose on: initial values, and rates and batches of each optimizer with PyTorch's
# initial values, which a trial had ahead.
SCHEMES = typing.get_args(Scheme)[:-2]  # without those of deep stacks
SCHEMES_OF_DEEP: tuple[Scheme, ...] = ("glorot, last third", "by depth, last third")
CANDIDATES = [
    *(Method("mlpgpu", "adam", 0.001, BATCH, scheme) for scheme in SCHEMES),
    *(Method("mlpgpu", "adam", rate, BATCH, "torch") for rate in (0.0005, 0.002, 0.004)),
    *(Method("mlpgpu", "adam", rate, batch, "torch") for rate, batch in ((0.001, 64), (0.002, 64), (0.002, 128))),
    Method("mlpgpu", "adamw", 0.001, BATCH, "torch"),
    *(Method("mlpgpu", "sgd", rate, BATCH, "torch") for rate in (0.03, 0.1, 0.3)),
    *(Method("mlpgpu", "momentum", rate, BATCH, "torch") for rate in (0.01, 0.03, 0.1)),
    *(Method("mlpgpu", "nesterov", rate, BATCH, "torch") for rate in (0.01, 0.03, 0.1)),
    *(Method("mlpgpu", "rmsprop", rate, BATCH, "torch") for rate in (0.0005, 0.001, 0.002)),
]
MOMENTUM = [
    Method("mlpgpu", "momentum", 0.1, BATCH, scheme, loss)
    for scheme in (None, "he", "glorot", "torch", "glorot third", "larger fan", "torch, last 0")
    for loss in ("squared_error", "mean_squared_error")
]
# What deep narrow stacks of ReLU learn from: the default, and larger weights in all layers but the last.
DEEP_OPTIMIZERS: tuple[tuple[OptimizerName, float], ...] = (("adam", 0.001), ("momentum", 0.01), ("momentum", 0.03))
DEEP = [
    Method("mlpgpu", optimizer, rate, BATCH, scheme)
    for optimizer, rate in DEEP_OPTIMIZERS
    for scheme in (None, *SCHEMES_OF_DEEP)
]


def cells(part: str, rounds: int = SEEDS) -> Iterator[Cell]:
    """The cells of a part.

    For each set and split there is one of each depth; beside peers two, so that each depth comes with an activation
    that scikit-learn has and with one that it lacks.
    """
    if part == "deep":
        for name, seed, depth in product(halves()["confirm"], range(rounds), DEEP_DEPTHS):
            epochs = min(DEEP_EPOCHS, max(EPOCHS[0], MOST_ROWS // len(split(name, seed).x)))
            yield Cell(name, seed, "relu", (DEEP_WIDTH,) * depth, epochs)
        return
    random = np.random.default_rng([DRAW, *part.encode()])
    shared, others = tuple(SKLEARN), tuple(name for name in TORCH if name not in SKLEARN)
    regressions = [name for name in KINDS if KINDS[name] == "R²"]
    half = halves()
    sets: dict[str, list[str]] = {**half, "chosen": half["choose"], "momentum": regressions}
    for name in sets[part]:
        if part in ("confirm", "chosen"):
            sources = [cycle(random.permutation(shared)), cycle(random.permutation(others))]
        else:
            sources = [cycle(random.permutation([*shared, *others]))]
        for seed in range(SEEDS):
            for depth in DEPTHS:
                for source in sources:
                    activation = str(next(source))
                    widths = np.exp(random.uniform(np.log(NARROWEST), np.log(WIDEST), depth)).astype(int)
                    epochs = int(random.choice(EPOCHS))
                    if seed < rounds:
                        yield _cell(part, name, seed, activation, widths, epochs)


def _cell(part: str, name: str, seed: int, activation: Any, widths: np.ndarray, epochs: int) -> Cell:
    affordable = max(EPOCHS[0], MOST_ROWS // len(split(name, seed).x))
    if part == "momentum":
        epochs = EPOCHS[0]  # what diverges does so early
    return Cell(name, seed, activation, tuple(map(int, widths)), min(epochs, affordable))


def methods(part: str, cell: Cell) -> list[Method]:
    """Who trains a cell."""
    if part in ("momentum", "deep"):
        return MOMENTUM if part == "momentum" else DEEP
    found = {"choose": CANDIDATES, "confirm": [DEFAULT, *PEERS], "chosen": [DEFAULT, *PEERS]}[part]
    return [method for method in found if method.library != "scikit-learn" or cell.activation in SKLEARN]


# --- running ---

Task = tuple[str, Method, Cell]


def tasks(parts: Sequence[str], rounds: int, share: float) -> list[Task]:
    """What is to be run, in an order of its own, so that whatever is cut off is a fair sample."""
    random = np.random.default_rng(DRAW)
    found = []
    for part in parts:
        drawn = list(cells(part, rounds))
        picked = sorted(random.permutation(len(drawn))[: max(1, round(share * len(drawn)))])
        found += [(part, method, drawn[k]) for k in picked for method in methods(part, drawn[k])]
    return [found[k] for k in random.permutation(len(found))]


def work(task: Task) -> Row:
    """One row of the results."""
    part, method, cell = task
    outcome = fit(method, cell)
    measured = {name: round(getattr(outcome, name), 4) for name in ("score", "train_score", "seconds")}
    return {"part": part, "method": method.name, **asdict(cell), **measured, "diverged": outcome.diverged}


def run(todo: Sequence[Task], path: Path, workers: int, minutes: float) -> None:
    """Add what is not yet in the file to it, by processes of one thread each."""
    done = {key(row["part"], row["method"], row) for row in read(path)}
    todo = [task for task in todo if key(task[0], task[1].name, asdict(task[2])) not in done]
    print(f"{len(todo)} fits to do, {len(done)} done", flush=True)
    deadline = time.monotonic() + 60.0 * minutes
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # read where the processes import NumPy
    os.environ["MLPGPU_BACKEND"] = "cpu"
    with multiprocessing.get_context("spawn").Pool(workers) as pool, path.open("a", encoding="utf-8") as file:
        for row in pool.imap_unordered(work, todo, chunksize=4):
            file.write(json.dumps([row[name] for name in COLUMNS], separators=(",", ":")) + "\n")
            if time.monotonic() > deadline:
                print("time is over; the same command goes on", flush=True)
                pool.terminate()
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more is begun")
    parser.add_argument("--rounds", type=int, default=SEEDS, help="splits of each set, at most 5")
    parser.add_argument("--share", type=float, default=1.0, help="of the cells")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/defaults.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.table:
        todo = tasks(arguments.parts, arguments.rounds, arguments.share)
        run(todo, arguments.results, arguments.workers, arguments.minutes)
    tables = report(read(arguments.results))
    print("\n\n".join(f"{title}\n\n{text}" for title, text in tables))
    if arguments.write:
        write(tables, DOCUMENT)


if __name__ == "__main__":
    main()
