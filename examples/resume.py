"""Interrupt a run in the middle of an epoch, resume it from its file, and end with the bits of an unbroken run."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import numpy as np

import mlpgpu as mg


class PressCtrlC(mg.Callback):
    """Presses Ctrl-C at a given step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @property
    def every_steps(self) -> int:
        return self.step

    def step_end(self, trainer: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def make_trainer() -> mg.Trainer:
    network = mg.Network([mg.Dense(64, 64, activation="relu"), mg.Dropout(0.2), mg.Dense(64, 10)], seed=3)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(mg.OneCycle(0.01, epochs=10)), batch_size=50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--step", type=int, default=100, help="the step to interrupt at")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where to put the run's file")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / "resume.h5"
    train, _ = mg.datasets.load("digits")

    unbroken = make_trainer()
    unbroken.fit(train, arguments.epochs)

    make_trainer().fit(train, arguments.epochs, callbacks=[PressCtrlC(arguments.step), mg.Checkpoint(path)])
    resumed = mg.Trainer.resume(path)
    print(f"resumed after step {resumed.steps} of {unbroken.steps}")
    resumed.fit(train, arguments.epochs)  # up to so many epochs in all

    parameters = unbroken.network.parameters
    same = all(np.array_equal(parameters[name], resumed.network.parameters[name]) for name in parameters)
    print(f"bit for bit the same: {same}")


if __name__ == "__main__":
    main()
