"""Processes that are killed while they save: what is there is the old file or the new one, whole."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import first_and_thorough

import mlpgpu as mg

X, LABELS = np.random.default_rng(1).normal(size=(40, 30)), np.arange(40) % 3


def trainer_of(seed: int) -> mg.Trainer:
    network = mg.Network([mg.Dense(30, 200, "relu"), mg.Dense(200, 200), mg.Dense(200, 3)], seed=seed)
    trainer = mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=20, backend="cpu")
    trainer.fit((X, LABELS), 1, progress=False)
    return trainer


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("kills", "unnamed"), first_and_thorough([(6, True), (30, False), (80, True)]))
def test_a_killed_save_leaves_the_old_file_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, unnamed: bool
) -> None:
    """``unnamed``: whether the system has files without a name, of which a kill leaves nothing."""
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path, draw = tmp_path / "run.h5", random.Random(kills)
    trainers = [trainer_of(seed) for seed in range(2)]
    whole = {trainer.network.flat_parameters().tobytes(): trainer for trainer in trainers}
    trainers[0].save(path)
    begun = time.perf_counter()
    trainers[0].save(path)
    seconds = time.perf_counter() - begun
    seen: set[bytes] = set()
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            while True:
                for trainer in trainers[::-1]:
                    trainer.save(path)
        time.sleep(draw.uniform(0.0, 5.0 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        resumed = mg.Trainer.resume(path)
        values = resumed.network.flat_parameters().tobytes()
        assert values in whole and resumed.steps == 2
        assert mg.load(path).flat_parameters().tobytes() == values
        seen.add(values)
    assert len(seen) == 2 or kills < 30
    left = [name for name in os.listdir(tmp_path) if name != "run.h5"]
    assert all(name.endswith(".partial") for name in left)
    if unnamed and hasattr(os, "O_TMPFILE"):
        assert len(left) <= kills // 4 + 1  # between the link and the move, which is short
    trainers[0].save(path)  # what is left behind is in nobody's way
