"""Random runs in processes that are killed again and again, and in one that ends them.

All that trains is done in forked children: what a kill leaves is files alone, and CUDA, which does not survive a fork,
is never started in the parent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import select
import signal
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from children import Child
from random_runs import CHECKPOINTS, RandomRun, differences, outcome

import mlpgpu as mg

KILLS = 3  # of a run, at most
FIRST_SECONDS = 480  # of a run that may have to compile its kernels
SECONDS = 100
STARTS = {"cpu": 0.04, "cuda": 1.0}  # seconds within which a process has begun to train, or nearly so
AFTER_STEP = {"cpu": 0.02, "cuda": 0.006}  # seconds within which a run of this size writes a file, or trains on
FINISHED = "finished before"


class TellAfter(mg.Callback):
    """Writes to a pipe after a step; it has no state, so that run files are those of a run without it."""

    def __init__(self, pipe: int, step: int) -> None:
        self.pipe, self.step = pipe, step

    @property
    def every_steps(self) -> int:
        return self.step

    def step_end(self, trainer: Any) -> None:
        os.write(self.pipe, b"!")


class Unbroken:
    """What runs leave that nothing happens to, each trained once."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, str], Child] = {}
        self._outcomes: dict[tuple[int, str], dict[str, Any]] = {}

    def begin(self, runs: Iterable[RandomRun]) -> None:
        """Train them at the same time, each in a child."""
        runs = list(runs)
        if any(run.backend == "cuda" for run in runs):
            importlib.import_module("mlpgpu.backends.cuda")  # so that no child has to; it starts nothing
        for run in runs:
            self._children[run.seed, run.backend] = Child(lambda run=run: _unbroken(run), FIRST_SECONDS)

    def outcome(self, run: RandomRun) -> dict[str, Any]:
        key = run.seed, run.backend
        if key not in self._outcomes:
            if key not in self._children:
                self.begin([run])
            self._outcomes[key] = self._children.pop(key).answer()
        return self._outcomes[key]


def _unbroken(run: RandomRun) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        trainer = run.trainer()
        run.fit(trainer, Path(folder))
        return outcome(trainer, Path(folder))


def run_with_checkpoint(seed: int, backend: str) -> RandomRun:
    """The random run of a seed, with a Checkpoint if it has none, so that there is something to resume."""
    run = RandomRun(seed, backend)
    if not {"epochs", "steps"} & {*run.settings["callbacks"]}:
        run.settings["callbacks"].append("epochs")
    return run


def latest(run: RandomRun, files: Iterable[Path]) -> mg.Trainer:
    """The trainer of the file that is furthest, or a new one."""
    trainers = [run.resume(path) for path in files if path.exists()]
    return max(trainers, key=lambda trainer: (trainer.steps, trainer.epochs), default=None) or run.trainer()


def killed(run: RandomRun, folder: Path, chance: random.Random, unbroken: Unbroken) -> list[str]:
    """Kill a run that has checkpoints up to three times, and end it; returns what became of each."""
    expected = unbroken.outcome(run)
    found: list[str] = []
    for _ in range(chance.randint(1, KILLS)):
        if FINISHED not in found:
            found.append(_killed_once(run, folder, chance))
    wrong = differences(Child(lambda: _ended(run, folder), SECONDS).answer(), expected)
    return found + ([f"WRONG BITS: {', '.join(wrong)}"] if wrong else [])


def _ended(run: RandomRun, folder: Path) -> dict[str, Any]:
    trainer = latest(run, _checkpoints(folder))
    run.fit(trainer, folder)
    return outcome(trainer, folder)


def _checkpoints(folder: Path) -> list[Path]:
    return [folder / name for name in CHECKPOINTS]


def _killed_once(run: RandomRun, folder: Path, chance: random.Random) -> str:
    """Go on with a run, in a child that is killed soon after some step, or while it starts."""
    part, is_early = chance.random(), chance.random() < 0.2
    seconds = chance.uniform(0.0, STARTS[run.backend] if is_early else AFTER_STEP[run.backend])
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which wait and hold nothing
        child = os.fork()
    if not child:
        status = 1
        try:
            trainer = latest(run, _checkpoints(folder))
            step = trainer.steps + 1 + int(part * max(0, run.least_steps - trainer.steps))
            run.fit(trainer, folder, TellAfter(writing, step))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    try:
        if not is_early:
            select.select([reading], [], [], SECONDS)  # the step is over, or the run
        time.sleep(seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        is_saved = any(path.exists() for path in _checkpoints(folder))
        return "killed after a checkpoint" if is_saved else "killed before the first checkpoint"
    return FINISHED if os.WEXITSTATUS(status) == 0 else "FAILED IN THE CHILD"
