"""The benchmark of defaults: what was measured is what docs/defaults.md says, and the defaults win."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """benchmarks/defaults_report.py; its neighbours are imported by their bare names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import defaults_report

    yield defaults_report
    for name in set(sys.modules) - before:
        if name.startswith("defaults_"):
            del sys.modules[name]


def rows(report: ModuleType) -> list[dict]:
    found: list[dict] = report.read(ROOT / "benchmarks" / "results" / "defaults.jsonl")
    return found


def test_the_document_has_the_tables_of_the_results(report: ModuleType, tmp_path: Path) -> None:
    document = ROOT / "docs" / "defaults.md"
    copy = tmp_path / "defaults.md"
    copy.write_bytes(document.read_bytes())
    report.write(report.report(rows(report)), copy)
    assert copy.read_text("utf-8") == document.read_text("utf-8")


@pytest.mark.parametrize("peer", ["scikit-learn", "PyTorch 32"])
def test_the_defaults_win_on_sets_not_looked_at(report: ModuleType, peer: str) -> None:
    confirmed = [row for row in rows(report) if row["part"] == "confirm"]
    means = report.set_means(confirmed, "mlpgpu", peer)
    gains = [ours - theirs for ours, theirs, _ in means.values()]
    assert len(gains) >= 12 and np.mean(gains) >= 0.0
    assert sum(gain < -report.MARGIN for gain in gains) <= 2
    assert {row["seed"] for row in confirmed} == set(range(5))
    assert {len(row["hidden"]) for row in confirmed} == {1, 2, 3, 4, 5, 6}
    assert len({row["activation"] for row in confirmed}) == 9
    assert not any(row["diverged"] for row in confirmed if row["method"] == "mlpgpu")


def test_means_are_of_cells_that_both_trained(report: ModuleType) -> None:
    def row(method: str, score: float, seed: int) -> dict:
        cell = {"part": "confirm", "set": "iris", "seed": seed, "activation": "relu", "hidden": [3], "epochs": 20}
        return {**cell, "method": method, "score": score, "train_score": score, "seconds": 0.1, "diverged": False}

    both = [row("mlpgpu", 0.9, 0), row("scikit-learn", 0.5, 0), row("mlpgpu", 0.1, 1), row("scikit-learn", 0.7, 2)]
    assert report.set_means(both, "mlpgpu", "scikit-learn") == {"iris": (0.9, 0.5, 1)}
    ((title, text),) = report.report(both)
    assert title == "confirm: the defaults beside scikit-learn, sets not looked at"
    assert "iris" in text and "+0.4000  better" in text
