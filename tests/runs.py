"""Run files to compare: all that one holds of a trainer, and a callback that writes one after each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlpgpu as mg
from mlpgpu import storage


class SaveEveryStep(mg.Callback):
    """Leaves one run file for each step in ``folder``, and one for each epoch."""

    runs_last = True
    every_steps = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step_end(self, trainer: Any) -> None:
        trainer.save(self.folder / f"step{trainer.steps}.h5")

    def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
        trainer.save(self.folder / f"epoch{trainer.epochs}.h5")


def run_of(trainer: mg.Trainer, path: Path) -> dict[str, Any]:
    """All that a run file holds of a trainer, but for the history's seconds and callbacks without a memory."""
    trainer.save(path)
    contents = storage.read(path)
    run = dict(contents.description["run"])
    run["callbacks"] = {name: state for name, state in run["callbacks"].items() if state}
    arrays = {name: (value.dtype, value.shape, value.tobytes()) for name, value in contents.arrays.items()}
    arrays.pop("/mlpgpu/run/history/seconds", None)  # of single steps there is no history
    return run | contents.description["network"] | arrays


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in got if got[name] != expected[name]] == []
