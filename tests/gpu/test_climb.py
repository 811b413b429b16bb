"""Both ladders climbed on the card, on small sizes: every rung is checked by the scripts themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.profile.workbench import Workbench
from mlpgpu.backends.cuda.runtime import Device

pytestmark = pytest.mark.gpu
LADDERS = Path(__file__).parents[2] / "examples" / "ladders"


@pytest.mark.parametrize("name", ("gemm_ladder", "local_ladder"))
def test_climb(name: str, device: Device, tmp_path: Path) -> None:
    results, picture = tmp_path / "results.jsonl", tmp_path / "picture.png"
    script = LADDERS / f"{name}.py"
    command = [sys.executable, script, "--quick", "--json", results, "--picture", picture]
    done = subprocess.run(command, cwd=LADDERS.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert all(line["seconds"] or line["left_out"] for line in lines)
    assert {line["card"] for line in lines} == {device.name}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_workbench(device: Device) -> None:
    entry = kernels.multiply_add()
    with device:
        bench = Workbench(device, [entry])
        y = bench.empty(4 * 2 * entry.threads)
        assert np.isnan(bench.read(y, (2 * entry.threads,))).all()
        seconds = bench.seconds(lambda: bench.put(entry, (2, 1, 1), {"a": 0.5, "b": 1.0, "rounds": 60, "y": y}))
        assert 0.0 < seconds < 0.1
        np.testing.assert_allclose(bench.read(y, (2 * entry.threads,)), 2.0 * kernels.CHAINS)
        bench.clear()
