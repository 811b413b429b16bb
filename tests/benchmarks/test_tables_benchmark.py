"""benchmarks/tables.py: both sides train on the same rows, and its report names all parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "tables.py"


def test_both_libraries_train_on_the_same_file(tmp_path: Path) -> None:
    options = [
        "--rows",
        "3000",
        "--epochs",
        "12",
        "--layers",
        "32",
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "a.jsonl"),
    ]
    done = subprocess.run([sys.executable, str(BENCHMARK), *options], capture_output=True, text=True, check=True)
    ours, peer = map(json.loads, (tmp_path / "a.jsonl").read_text("utf-8").splitlines())
    assert (ours["library"], peer["library"]) == ("mlpgpu", "pandas + scikit-learn")
    assert ours["columns"] == 30
    assert min(ours["r2"], peer["r2"]) > 0.2
    for record in (ours, peer):
        assert 0.0 < sum(record["seconds"].values()) < record["wall"]
        assert f"{record['wall']:.1f}" in done.stdout
    assert set(ours["seconds"]) == {"read", "prepare", "train"}
