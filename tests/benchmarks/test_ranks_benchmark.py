"""benchmarks/ranks.py: what it starts, and what it makes of the times."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("ranks")


def test_efficiencies_and_ratios_are_of_the_same_round(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    of_one = {"mlpgpu": 100.0, "ddp": 300.0}

    def microseconds(contender: str, network: str, batch: int, count: int, *others: object) -> float:
        assert others == (0.1, "cuda", "tf32")
        calls.append((contender, batch, count))
        disturbed = 2.0 if len(calls) <= 6 else 1.0  # all of the first round
        return disturbed * of_one[contender] * batch / 64 / count * (1.25 if count > 1 else 1.0)

    monkeypatch.setattr(ranks, "microseconds", microseconds)
    options = argparse.Namespace(
        ranks=[1, 2], only=["mlpgpu", "ddp"], rounds=3, seconds=0.1, backend="cuda", scaling=["strong", "weak"]
    )
    results = ranks.measure("8-4-2", 64, "tf32", options)
    assert calls[:6] == [(name, batch, count) for batch, count in ((64, 1), (64, 2), (128, 2)) for name in of_one]
    assert len(calls) == 3 * 6
    found = {(each.scaling, each.ranks, each.contender): each for each in results}
    assert found["strong", 2, "mlpgpu"].microseconds == 62.5
    assert found["strong", 2, "ddp"].efficiency == pytest.approx(0.8)
    assert found["weak", 2, "mlpgpu"].efficiency == pytest.approx(0.8)
    assert found["weak", 2, "ddp"].batch_size == 128
    assert found["strong", 1, "ddp"].of_ours == pytest.approx(3.0)
    assert found["strong", 1, "mlpgpu"].of_ours is None


def test_every_contender_trains(ranks: Any, tmp_path: Path) -> None:
    """Ours, on two ranks; peers where they are installed."""
    assert ranks.microseconds("mlpgpu", "6-5-3", 8, 2, 0.01) > 0.0
    assert ranks.command("jax", 2)[0] == sys.executable
    for by_torch in ("ddp", "captured"):
        assert "torch.distributed.run" in ranks.command(by_torch, 2)
    contenders = importlib.import_module("ranks_contenders").CONTENDERS
    assert {name for names in ranks.CONTENDERS.values() for name in names} == contenders.keys()


def test_on_cards_each_precision_is_measured(ranks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(ranks, "microseconds", lambda *arguments: asked.append(arguments) or 10.0)
    monkeypatch.setattr(sys, "argv", ["ranks.py", "--backend", "cuda", "--networks", "4-2:8", "--rounds", "1"])
    ranks.main()
    assert {(name, where, precision) for name, *_, where, precision in asked} == {
        (name, "cuda", precision) for name in ranks.CONTENDERS["cuda"] for precision in ranks.PRECISIONS["cuda"]
    }


def test_results_are_kept(ranks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "microseconds", lambda *arguments: 10.0)
    path = tmp_path / "ranks.jsonl"
    monkeypatch.setattr(sys, "argv", ["ranks.py", "--networks", "4-2:8", "--rounds", "1", "--json", str(path)])
    ranks.main()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 9
    assert {line["network"] for line in lines} == {"4-2"}
    assert all(line["microseconds"] == 10.0 and line["versions"]["mlpgpu"] for line in lines)
