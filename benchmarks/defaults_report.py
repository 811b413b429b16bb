"""Tables of what benchmarks/defaults.py measured, as text and in docs/defaults.md."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from defaults_sets import KINDS

from mlpgpu.text import table

DOCUMENT = Path(__file__).parents[1] / "docs" / "defaults.md"
BEGIN, END = "<!-- made by benchmarks/defaults.py -->", "<!-- end of what it made -->"
COLUMNS = (  # of a line of the results
    *("part", "method", "set", "seed", "activation", "hidden", "epochs", "score", "train_score", "seconds", "diverged"),
)
DEFAULT, PEERS, FORMER = "mlpgpu", ("scikit-learn", "PyTorch 32"), "mlpgpu adam 0.001 32 he"  # methods
MARGIN = 0.01  # a set whose mean is lower by more is worse
Row = dict[str, Any]


def key(part: str, method: str, cell: Row) -> tuple[Any, ...]:
    """What makes a row of the results unlike the others."""
    return part, method, cell["set"], cell["seed"], cell["activation"], tuple(cell["hidden"]), cell["epochs"]


def read(path: Path) -> list[Row]:
    """The rows of a file of results; none if there is none."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [dict(zip(COLUMNS, json.loads(line), strict=True)) for line in lines]


def report(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """All tables as text, each with its title."""
    by_part: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_part[row["part"]].append(row)
    found = []
    if by_part["choose"]:
        found.append((f"choose: mean differences to {FORMER}", candidates(by_part["choose"])))
    for peer in PEERS:
        for part, sets in (("confirm", "sets not looked at"), ("chosen", "sets that it was chosen on")):
            if text := beside(by_part[part], peer):
                found.append((f"{part}: the defaults beside {peer}, {sets}", text))
    if by_part["momentum"]:
        found.append(("momentum: rate 0.1 on standardized regression", diverged(by_part["momentum"])))
    if by_part["deep"]:
        found.append(("deep: stacks of 32 ReLU units, sets not looked at", of_depths(by_part["deep"])))
    return found


def of_depths(rows: Sequence[Row]) -> str:
    """Mean scores by depth and method, over sets, and on how many a method is worse, or better, than the default."""
    lines = [("layers", "method", "accuracy", "R²", "both", "sets worse", "better", "diverged")]
    names = sorted({row["method"] for row in rows})
    for depth in sorted({len(row["hidden"]) for row in rows}):
        of_depth = [row for row in rows if len(row["hidden"]) == depth]
        for name in names:
            # A method's name is the optimizer's and then the scheme's, which the default lacks.
            default = " ".join(name.split()[:4])
            means = set_means(of_depth, name, default)
            parts = [[mean for of, (mean, *_) in means.items() if KINDS[of] == kind] for kind in ("accuracy", "R²")]
            gains = [mine - known for mine, known, _ in means.values()]
            lines.append(
                (
                    str(depth),
                    name,
                    *(f"{np.mean(part):.3f}" if part else "" for part in (*parts, [*parts[0], *parts[1]])),
                    str(sum(gain < -MARGIN for gain in gains)),
                    str(sum(gain > MARGIN for gain in gains)),
                    str(sum(row["diverged"] for row in of_depth if row["method"] == name)),
                )
            )
    return table(lines, "><>>>>>>")


def write(tables: Sequence[tuple[str, str]], document: Path) -> None:
    """Replace the tables in the document."""
    before, rest = document.read_text("utf-8").split(BEGIN)
    after = rest.split(END)[1]
    made = "".join(f"\n### {title}\n\n```\n{text}\n```\n" for title, text in tables)
    document.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", "utf-8")


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
    """Each method's mean difference to the former defaults over sets, accuracy and R² apart, and how many diverged."""
    head = ("method", "accuracy", "R²", "both", "worst set", "sets under -0.01", "diverged", "seconds")
    lines = []
    for name in sorted({row["method"] for row in rows}):
        means = set_means(rows, name, FORMER)
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
    means = set_means(rows, DEFAULT, peer)
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
