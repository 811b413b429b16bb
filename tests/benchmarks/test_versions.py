"""benchmarks/versions.py: two checkouts in turns, here this one and itself on the CPU."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "versions.py"


@pytest.mark.thorough
def test_a_checkout_has_the_bits_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    options = ["--backend", "cpu", "--only", "narrow", "large", "--rounds", "2", "--json", str(path)]
    done = subprocess.run([sys.executable, SCRIPT, ROOT, *options], capture_output=True, text=True)
    assert not done.stderr
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["workload"], row["precision"], row["way"]) for row in rows] == [
        ("narrow", "float32", "training step"), ("narrow", "float32", "evaluation"),
    ]  # fmt: skip
    assert all(row["same_bits"] and row["new_microseconds"] > 0.0 for row in rows)
    assert rows[0]["commit"] == rows[0]["old_commit"]


@pytest.mark.parametrize(
    ("ratio", "repeat", "slower"), [(1.019, 1.0, False), (1.03, 1.0, True), (1.03, 0.96, False), (0.9, 1.0, False)]
)
def test_a_row_is_slower_beyond_what_the_old_version_differs(ratio: float, repeat: float, slower: bool) -> None:
    row = runpy.run_path(str(SCRIPT))["Row"]("tiny", "tf32", "training step", 6.0, 6.0, ratio, repeat, True)
    assert row.is_slower == slower and ("SLOWER" in str(row)) == slower and "OTHER BITS" not in str(row)


def test_it_wants_a_checkout(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, tmp_path, "--backend", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and str(tmp_path) in done.stderr
