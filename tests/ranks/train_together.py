"""Random runs that ranks train together: what each leaves is written to a folder, one file a run and rank.

``python train_together.py FOLDER FIRST LAST``, by itself or under mpirun.  With ``--slowly`` steps take some
milliseconds, so that somebody may kill a rank meanwhile: the run goes on from the checkpoints that it finds.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "fuzz")]

from killed_runs import latest, run_with_checkpoint
from random_runs import CHECKPOINTS, RandomRun, outcome

import mlpgpu as mg
from mlpgpu.plan import sharding

STREAMS = 1, 2, 3, 4, 7, 8

sharding.LEAST_BLOCK = 8  # elements, so that each rank moves some of these small networks


class Slowly(mg.Callback):
    """Takes its time after each step, and says which processes to kill before the first."""

    every_steps = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, trainer: Any) -> None:
        (self.folder / "begun").touch()

    def step_end(self, trainer: Any) -> None:
        time.sleep(0.01)


def run_of_seed(seed: int) -> RandomRun:
    """The random run of a seed, with shards of its own, and with a checkpoint."""
    run = run_with_checkpoint(seed, "cpu")
    run.settings["streams"] = STREAMS[seed % len(STREAMS)]
    return run


def train(folder: Path, seed: int, *, is_slow: bool) -> None:
    """Train the run of a seed and write down what it leaves, and what every rank has of it."""
    run, own = run_of_seed(seed), folder / str(seed)
    own.mkdir(parents=True, exist_ok=True)
    trainer = latest(run, [own / name for name in CHECKPOINTS])
    (own / f"rank{mg.rank()}.pid").write_text(str(os.getpid()))
    history = run.fit(trainer, own, *([Slowly(own)] if is_slow else []))
    left = outcome(trainer, own) if mg.rank() == 0 else None  # which the other ranks have no part in
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in history.records]
    values = records, trainer.network.flat_parameters().tobytes(), trainer.steps, trainer.rate
    (own / f"rank{mg.rank()}.pickle").write_bytes(pickle.dumps((left, values)))


if __name__ == "__main__":
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        train(Path(sys.argv[1]), number, is_slow="--slowly" in sys.argv)
