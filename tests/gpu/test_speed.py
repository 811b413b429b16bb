"""The bench command on a card, and epochs that begin again from data that are already there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu import bench
from mlpgpu.__main__ import main
from mlpgpu.backends.cuda.runtime import Device

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_epochs_after_a_reset_have_the_same_bits(device: Device) -> None:
    workload = bench.Workload((33, 20, 7), batch_size=32, rows=1000, rate=0.1)
    run = bench.Epochs(workload.trainer(backend="cuda"), mg.Dataset(*workload.arrays()))
    losses, parameters = [], []
    for _ in range(3):
        losses.append([run(), run()])
        parameters.append(run.program.read().parameters)
        run.reset()
    assert losses[0] == losses[1] == losses[2]
    assert np.array_equal(parameters[0], parameters[1]) and np.array_equal(parameters[0], parameters[2])


def test_bench_measures_the_card(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    arguments = ["--only", "tiny", "--precision", "float32", "--backend", "cuda", "--quick", "--json", str(path)]
    assert main(["bench", *arguments]) == 0
    (line,) = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert line["card"] == device.name and line["rows"] == 60_000
    assert line["microseconds"] < 1000.0  # no step takes what a launch by Python, kernel by kernel, would
    assert line["error"] < 1.5e-6  # a float32 chain's at 4096
