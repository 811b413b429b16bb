"""benchmarks/walk.py: a batch goes down through the folders of the package, and no way leads back up."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mlpgpu as mg

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "walk.py"
# From top to bottom.  Data sets are asked for their rows from every folder, and plans for their shapes.
LEVELS = ("training", "network", "backends/cpu")


def ways(call: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The files from the top down to each call that enters nothing else."""
    files = (*above, call.file) if call.file else above
    if not call.calls:
        yield files
    for each in call.calls:
        yield from ways(each, files)


def test_a_batch_goes_down_and_never_up_again() -> None:
    walked = runpy.run_path(str(SCRIPT), run_name="walk")["walked"]
    data = mg.Dataset(np.ones((8, 3), np.float32), np.zeros(8, int))
    network = mg.Network([mg.Dense(3, 2)], seed=0)
    trainer = mg.Trainer(network, loss="softmax_cross_entropy", optimizer=mg.SGD(0.1), backend="cpu")
    found = list(ways(walked(lambda: trainer.fit(data, epochs=1, progress=False))))
    assert any(way[-1] == "backends/cpu/loops/calls.py" for way in found)
    for way in found:
        levels = [LEVELS.index(level) for file in way for level in LEVELS if file.startswith(level)]
        assert levels == sorted(levels), way
