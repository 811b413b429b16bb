"""benchmarks/ranks_model.py: counts beside what was measured, and lines through what was published."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlpgpu.plan.costs import CORES

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("ranks_model")


def test_counts_are_near_what_was_measured(model: Any) -> None:
    measured, cores = model.read()
    assert len(measured) == len(model.NETWORKS) * len(model.WAYS)
    found = np.abs(model.errors(measured, [each.plan for each in measured], cores, CORES))
    assert found.mean() < 0.08
    assert np.exp(found.max()) < 1.5


def test_nvlink_is_a_line_through_nccls_times(model: Any) -> None:
    link = model.nvlink()
    for size, seconds in model.NCCL:
        assert seconds / 1.25 < link.latency + size / link.bandwidth < 1.25 * seconds


@pytest.mark.parametrize("is_hidden", [False, True])
def test_more_cards_never_take_less_than_one(model: Any, is_hidden: bool) -> None:
    link, parameters = model.nvlink(), 2_000_000
    times = [model.card_seconds(1e-4, parameters, cards, link, is_hidden=is_hidden) for cards in (1, *model.CARDS)]
    assert times[0] == 1e-4
    assert all(few < many for few, many in pairwise(times))
    seen = [model.card_seconds(1e-4, parameters, cards, link, is_hidden=False) for cards in (1, *model.CARDS)]
    assert all(time <= other for time, other in zip(times, seen, strict=True))


def test_two_cards_take_what_is_counted_or_more(model: Any) -> None:
    measured, link = model.of_two_cards(), model.nvlink()
    assert len(measured) >= 5
    for network, rows, _, one, two in measured:
        counted = 1e6 * model.card_seconds(one / 2e6, model.parameters_of(network), 2, link, is_hidden=True)
        assert 0.95 * counted < two < 1.1 * one, (network, rows)


def test_what_two_cards_gain_is_near_what_their_launches_are_counted_at(model: Any) -> None:
    for network, rows, precision, one, two in model.of_two_cards():
        assert one / two / 1.13 < model.gain_by_launches(network, rows, precision) < 1.13 * one / two, (network, rows)


def test_what_is_shown_says_what_nobody_measured(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ranks_model.py"])
    model.main()
    printed = capsys.readouterr().out
    assert "in the mean" in printed
    assert "two cards, microseconds of a step" in printed
    assert "cards, computed and not measured" in printed
    for link in ("NVLink", "InfiniBand"):
        assert link in printed
