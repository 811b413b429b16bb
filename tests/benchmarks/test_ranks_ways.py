"""benchmarks/ranks_ways.py: what it draws, and what it makes of the times of two ranks."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import mpirun, run

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("ranks_ways")


def test_networks_follow_from_the_seed(ways: Any) -> None:
    once, again, other = (
        [ways.drawn(chance) for _ in range(20)] for chance in map(random.Random, ("one", "one", "another"))
    )
    assert once == again != other


@pytest.mark.parametrize(("chosen", "least"), [("one", 0.5), ("data", 1.0), ("tensor", 0.8)])
def test_a_choice_is_held_to_the_fastest_way_that_there_is(ways: Any, chosen: str, least: float) -> None:
    point = ways.Point("8-8-1", 16, 2, chosen, 1.0, 1.0, 1.0, 8.0, 4.0, 5.0)
    assert point.least == least
    assert ways.Point("8-8-1", 16, 2, "one", 1.0, 1.0, 0.0, 8.0, 16.0, 0.0).least == 1.0


@pytest.mark.xdist_group("ranks")
@pytest.mark.thorough
def test_a_line_for_each_network(ways: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "ranks_ways.py"), "--seed", "a", "--points", "2", "--json"]
    done = run([*mpirun(), "-n", "2", *command, str(tmp_path / "ways.jsonl")])
    assert done.code == 0, done.errors
    lines = [json.loads(line) for line in (tmp_path / "ways.jsonl").read_text().splitlines()]
    chance = random.Random("a")
    assert [(line["network"], line["batch_size"]) for line in lines] == [ways.drawn(chance) for _ in range(2)]
    assert all(line["one"] > 0 and line["data"] > 0 and line["chosen"] in ways.PARALLEL for line in lines)
    assert done.output.splitlines()[-1].startswith("within a tenth of the fastest way ")
