"""What ranks have left of the runs of tests/ranks/train_together.py, read and compared."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Left = list[list[Any]]  # of each run, what each rank has


def left_by(folder: Path, ranks: int, runs: int) -> Left:
    """What so many ranks have left of the first runs."""
    return [
        [pickle.loads((folder / str(seed) / f"rank{rank}.pickle").read_bytes()) for rank in range(ranks)]
        for seed in range(runs)
    ]


def check_same(left: Left, found: Left, chosen: Sequence[str | None]) -> None:
    """Ranks left what one did; what was chosen is in the file, and changes nothing else there."""
    for seed, ((expected,), got) in enumerate(zip(left, found, strict=True)):
        assert [rank for rank, of_rank in enumerate(got) if of_rank[1] != expected[1]] == [], seed
        assert got[0][0].pop("chosen") in chosen, seed
        assert expected[0].pop("chosen", None) is None
        different = [name for name in expected[0] if got[0][0].get(name) != expected[0][name]]
        assert different == [], seed
        assert got[0][0].keys() == expected[0].keys()
