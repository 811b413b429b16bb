"""Are the defaults good?  mlpgpu beside scikit-learn and PyTorch on 24 data sets, at equal epochs, equally standardized.

A cell is a set, a split of it, hidden widths, an activation and a number of epochs, all drawn from one seed; depths are
1 to 6 hidden layers, splits are five.  There are four parts.  "choose" compares candidates on one half of the sets;
"chosen" and "confirm" have the library's defaults meet those of scikit-learn and PyTorch, on the same half and on the
other one; "momentum" trains regressions at the README's rate of 0.1, and counts how many diverge.  scikit-learn has four of the nine activations and is left out of the
other cells; PyTorch, which has no default batch size, takes mlpgpu's.

Each fit is a line of the results, so a run that was stopped goes on where it was; ``--share`` and ``--rounds`` cut it.

    MLPGPU_DATA=FOLDER python benchmarks/defaults.py [PART …] [--workers N] [--minutes M]
        [--share F] [--rounds SEEDS] [--table]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from defaults_fits import SKLEARN, TORCH, Cell, Method, Scheme, fit
from defaults_sets import DRAW, KINDS, halves, split

from mlpgpu.text import table

RESULTS = Path(__file__).parent / "results" / "defaults.jsonl"
SEEDS = 5
DEPTHS = (1, 2, 3, 4, 5, 6)  # hidden layers
NARROWEST, WIDEST = 16, 160
EPOCHS = (20, 50, 100, 200)
MOST_ROWS = 80_000  # visited in a fit
PARTS = ("choose", "chosen", "confirm", "momentum")
MARGIN = 0.01  # a set whose mean is lower by more is worse
BATCH = 32

DEFAULT = Method("mlpgpu")
PEERS = (Method("scikit-learn"), Method("PyTorch", batch_size=BATCH))

# What is compared on the sets to choose on: initial values first, then rates and batches of each optimizer with the
# initial values that won.
SCHEMES = typing.get_args(Scheme)
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


def cells(part: str, rounds: int = SEEDS) -> Iterator[Cell]:
    """The cells of a part.

    For each set and split there is one of each depth; beside peers two, so that each depth comes with an activation
    that scikit-learn has and with one that it lacks.
    """
    random = np.random.default_rng([DRAW, *part.encode()])
    shared, others = tuple(SKLEARN), tuple(name for name in TORCH if name not in SKLEARN)
    regressions = [name for name in KINDS if KINDS[name] == "R²"]
    names = {**halves(), "chosen": halves()["choose"], "momentum": regressions}[part]
    for name in names:
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
    if part == "momentum":
        return MOMENTUM
    found = {"choose": CANDIDATES, "confirm": [DEFAULT, *PEERS], "chosen": [DEFAULT, *PEERS]}[part]
    return [method for method in found if method.library != "scikit-learn" or cell.activation in SKLEARN]


# --- running ---

Task = tuple[str, Method, Cell]
Row = dict[str, Any]


def tasks(parts: Sequence[str], rounds: int, share: float) -> list[Task]:
    """What is to be run, in an order of its own, so that whatever is cut off is a fair sample."""
    random = np.random.default_rng(DRAW)
    found = []
    for part in parts:
        drawn = list(cells(part, rounds))
        picked = sorted(random.permutation(len(drawn))[: max(1, round(share * len(drawn)))])
        found += [(part, method, drawn[k]) for k in picked for method in methods(part, drawn[k])]
    return [found[k] for k in random.permutation(len(found))]


def key(part: str, method: str, cell: Row) -> tuple[Any, ...]:
    """What makes a row of the results unlike the others."""
    return part, method, cell["set"], cell["seed"], cell["activation"], tuple(cell["hidden"]), cell["epochs"]


def work(task: Task) -> Row:
    """One row of the results."""
    part, method, cell = task
    return {"part": part, "method": method.name, **asdict(cell), **asdict(fit(method, cell))}


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
            file.write(json.dumps(row) + "\n")
            if time.monotonic() > deadline:
                print("time is over; the same command goes on", flush=True)
                pool.terminate()
                return


def read(path: Path) -> list[Row]:
    """The rows of a file of results; none if there is none."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


# --- tables ---


def report(rows: Iterable[Row]) -> str:
    """All tables as text."""
    by_part: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_part[row["part"]].append(row)
    found = []
    if by_part["choose"]:
        found += [f"choose: candidates beside {CANDIDATES[0].name}", candidates(by_part["choose"])]
    for peer in PEERS:
        for part, sets in (("confirm", "sets not looked at"), ("chosen", "sets that it was chosen on")):
            if text := beside(by_part[part], peer.name):
                found += [f"{part}: the default beside {peer.name}, {sets}", text]
    if by_part["momentum"]:
        found += ["momentum: rate 0.1 on standardized regression", diverged(by_part["momentum"])]
    return "\n\n".join(found)


def paired(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """The rows of each cell by method."""
    found: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[key(row["part"], "", row)][row["method"]] = row
    return found


def set_means(rows: Sequence[Row], first: str, second: str) -> dict[str, tuple[float, float, int]]:
    """For each set the mean scores of two methods over the cells that both trained, and how many those are."""
    scores: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for cell in paired(rows).values():
        if first in cell and second in cell:
            scores[cell[first]["set"]].append((cell[first]["score"], cell[second]["score"]))
    return {name: (*np.mean(scores[name], axis=0).tolist(), len(scores[name])) for name in KINDS if name in scores}


def candidates(rows: Sequence[Row]) -> str:
    """Each method's mean difference to the first candidate over sets, of accuracy and R² apart, and how many diverged."""
    head = ("method", "accuracy", "R²", "both", "worst set", "sets under -0.01", "diverged", "seconds")
    lines = []
    for name in sorted({row["method"] for row in rows}):
        means = set_means(rows, name, CANDIDATES[0].name)
        gains = {of: ours - theirs for of, (ours, theirs, _) in means.items()}
        if not gains:
            continue
        parts = [[gain for of, gain in gains.items() if KINDS[of] == kind] for kind in ("accuracy", "R²")]
        fits = [row for row in rows if row["method"] == name]
        worst = min(gains, key=gains.__getitem__)
        lines.append(
            (
                name,
                *(f"{np.mean(part):+.4f}" if part else "" for part in (*parts, list(gains.values()))),
                f"{worst} {gains[worst]:+.3f}",
                str(sum(gain < -MARGIN for gain in gains.values())),
                str(sum(row["diverged"] for row in fits)),
                f"{np.mean([row['seconds'] for row in fits]):.2f}",
            )
        )
    lines.sort(key=lambda cells: -float(cells[3]))
    return table([head, *lines], "<>>><>>>")


def beside(rows: Sequence[Row], peer: str) -> str:
    """The default's mean score on each set beside a peer's."""
    means = set_means(rows, DEFAULT.name, peer)
    if not means:
        return ""
    lines = [("set", "score", "cells", "mlpgpu", peer, "difference", "")]
    for name, (ours, theirs, count) in means.items():
        gain = ours - theirs
        remark = "worse" if gain < -MARGIN else "better" if gain > MARGIN else ""
        lines.append((name, KINDS[name], str(count), f"{ours:.4f}", f"{theirs:.4f}", f"{gain:+.4f}", remark))
    for kind in ("accuracy", "R²"):
        of_kind = [mean for name, mean in means.items() if KINDS[name] == kind]
        if of_kind:
            ours, theirs, count = np.mean(of_kind, axis=0)
            cells_of_kind = str(int(count * len(of_kind)))
            lines.append(("mean", kind, cells_of_kind, f"{ours:.4f}", f"{theirs:.4f}", f"{ours - theirs:+.4f}", ""))
    both = np.mean([ours - theirs for ours, theirs, _ in means.values()])
    lines.append(("mean", "both", "", "", "", f"{both:+.4f}", ""))
    return table(lines, "<<>>>><")


def diverged(rows: Sequence[Row]) -> str:
    """How many fits of each method diverged, and on which sets."""
    lines = [("method", "fits", "diverged", "mean R²", "sets")]
    for name in sorted({row["method"] for row in rows}):
        fits = [row for row in rows if row["method"] == name]
        bad = [row["set"] for row in fits if row["diverged"]]
        where = ", ".join(f"{of} {bad.count(of)}" for of in KINDS if of in bad)
        lines.append((name, str(len(fits)), str(len(bad)), f"{np.mean([row['score'] for row in fits]):.4f}", where))
    return table(lines, "<>>><")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more is begun")
    parser.add_argument("--rounds", type=int, default=SEEDS, help="splits of each set, at most 5")
    parser.add_argument("--share", type=float, default=1.0, help="of the cells")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.table:
        todo = tasks(arguments.parts, arguments.rounds, arguments.share)
        run(todo, arguments.results, arguments.workers, arguments.minutes)
    print(report(read(arguments.results)))


if __name__ == "__main__":
    main()
