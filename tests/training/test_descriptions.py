"""Descriptions in files: how many there may be, how deep they lie, and what a run file's numbers must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu import storage
from mlpgpu.errors import ConfigurationError, FileFormatError
from mlpgpu.layers import MOST_LAYERS
from mlpgpu.schedules import SCHEDULES
from mlpgpu.storage.descriptions import MOST_DEPTH, describe, rebuild


def nested(depth: int) -> Any:
    schedule: Any = 0.1
    for _ in range(depth):
        schedule = mg.WarmUp(schedule, epochs=1)
    return schedule


def test_descriptions_lie_inside_each_other_to_a_limit() -> None:
    deepest = nested(MOST_DEPTH)
    assert rebuild("schedule", describe(deepest), SCHEDULES, SCHEDULES) == deepest
    with pytest.raises(ConfigurationError, match="nested at most 16 deep"):
        describe(nested(MOST_DEPTH + 1))
    described: dict[str, Any] = describe(deepest)
    for _ in range(5000):  # deeper than Python calls
        described = {"kind": "WarmUp", "rate": described, "epochs": 1.0, "steps": None}
    with pytest.raises(ConfigurationError, match="nested at most 16 deep"):
        rebuild("schedule", described, SCHEDULES, SCHEDULES)


def test_a_network_has_layers_to_a_limit(tmp_path: Path) -> None:
    layer = mg.Dense(2, 2)
    with pytest.raises(ConfigurationError, match="at most 1024 of them, got 1025"):
        mg.Network([layer] * (MOST_LAYERS + 1))
    contents = mg.Network([layer] * 2, seed=1).contents()
    contents.description["network"]["layers"] += [{"kind": "same", "place": 0}] * MOST_LAYERS
    storage.write(tmp_path / "many.h5", contents)
    with pytest.raises(FileFormatError, match="at most 1024 of them, got 1026"):
        mg.load(tmp_path / "many.h5")


def run_contents(path: Path) -> storage.Contents:
    x = np.random.default_rng(1).standard_normal((20, 3))
    trainer = mg.Trainer(mg.Network([mg.Dense(3, 2)], seed=1), "squared_error", mg.SGD(0.1), batch_size=5)
    trainer.fit(mg.Dataset(x, x[:, :2]), 2, progress=False)
    trainer.save(path)
    return storage.read(path)


RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "steps beyond 64 bits": ({"steps": 2**70}, "steps"),
    "epochs beyond 64 bits": ({"epochs": 2**70}, "history"),
    "a fit that begins after the last step": ({"fit": {"first_step": 9}}, "first_step"),
    "a fit that begins after the last epoch": ({"fit": {"first_epoch": 3}}, "first_epoch"),
    "a fit of no rows": ({"fit": {"rows": 0}}, "rows"),
    "a text in a fit": ({"fit": {"rows": "20"}}, "rows"),
    "class weights of null": ({"class_weight": [[0, None]]}, "class weight"),
    "class weights of one kind twice": ({"class_weight": [[0, 1.0], [0, 2.0]]}, "class weight"),
    "a class that is a list": ({"class_weight": [[[0], 1.0]]}, "class weight"),
    "columns without a history": ({"columns": []}, "columns"),
    "a column twice": ({"columns": ["epoch", "loss", "rate", "seconds", "loss"]}, "columns"),
    "a number as columns": ({"columns": 7}, "columns"),
    "a list as callbacks": ({"callbacks": [1]}, "callbacks"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_without_meaning_is_refused(tmp_path: Path, name: str) -> None:
    changes, message = RUNS[name]
    contents = run_contents(tmp_path / "run.h5")
    run = contents.description["run"]
    for key, value in changes.items():
        run[key] = {**run[key], **value} if isinstance(value, dict) else value
    storage.write(tmp_path / "hostile.h5", contents)
    with pytest.raises(FileFormatError, match=message):
        mg.Trainer.resume(tmp_path / "hostile.h5")


@pytest.mark.parametrize(
    "column", [np.ones((2, 2)), np.ones(3), np.array(1.0), np.array([1.0, np.inf]), np.array([1.5, 2.0])]
)
def test_a_history_of_another_form_is_refused(tmp_path: Path, column: np.ndarray) -> None:
    contents = run_contents(tmp_path / "run.h5")
    contents.arrays["/mlpgpu/run/history/epoch"] = column
    storage.write(tmp_path / "hostile.h5", contents)
    with pytest.raises(FileFormatError, match="history"):
        mg.Trainer.resume(tmp_path / "hostile.h5")
