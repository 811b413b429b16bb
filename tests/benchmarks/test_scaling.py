"""benchmarks/scaling.py: what it counts, what it calls efficiency, and that its jobs run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


scaling = load()


def test_work_is_counted() -> None:
    assert scaling.Job("locally connected", 10, 1, k=3, window=3).work == 8 + 6
    assert scaling.Job("dense", 10, 1).work == 10


def test_efficiency(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_turns(jobs: Sequence, rounds: int) -> dict:
        assert rounds == 2
        # Two threads are as fast as one and a half, whatever they do; second rounds are disturbed.
        return {job: [job.work / {1: 1.0, 2: 1.5}[job.threads], 1e9] for job in jobs}

    monkeypatch.setattr(scaling, "take_turns", take_turns)
    lines = scaling.strong_and_weak(scaling.Job("locally connected", 100, 1, k=4, window=5), [1, 2], 2)
    found = {(line.scaling, line.threads): line for line in lines}
    assert found.keys() == {("strong", 1), ("strong", 2), ("weak", 1), ("weak", 2)}
    assert [line.efficiency for line in lines] == pytest.approx([1.0, 0.75, 1.0, 0.75])
    assert found["strong", 2].rate == pytest.approx(1.5)
    assert {line.size for line in lines} == {100}


@pytest.mark.thorough
def test_it_runs(tmp_path: Path) -> None:
    results, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    sizes = ["--n", "500", "--k", "3", "--window", "5", "--batch", "8", "--threads", "2", "--rounds", "1"]
    command = [sys.executable, str(SCRIPT), *sizes, "--json", str(results), "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = json.loads(results.read_text())["lines"]
    assert [(line["kind"], line["scaling"], line["threads"]) for line in lines] == [
        (kind, way, threads)
        for kind in ("locally connected", "dense")
        for way in ("strong", "weak")
        for threads in (1, 2)
    ]
    assert all(line["seconds"] > 0 for line in lines) and "efficiency" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_layers_that_shrink_to_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--n", "56", "--k", "3", "--window", "29"])
    with pytest.raises(SystemExit):
        scaling.main()
    assert "need N > (K - 1) (R - 1) inputs" in capsys.readouterr().err
