"""Random runs on a card, in processes that are killed and resumed: they end with the bits of unbroken ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

SCRIPT = Path(__file__).parents[1] / "fuzz" / "broken_runs.py"
RUNS, PLANS, SEED = 27, 5, 1937  # few plans, since each has kernels to compile, which all processes take from one cache
KILLS = 50


def test_runs_killed_fifty_times_end_with_the_bits_of_unbroken_ones() -> None:
    """In a process that has not started CUDA, so that its children can."""
    options = [f"--kills={RUNS}", f"--plans={PLANS}", f"--seed={SEED}", "--backend=cuda"]
    paths = {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *filter(None, sys.path)])}
    command = [sys.executable, str(SCRIPT), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **paths})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sum(int(count) for count in re.findall(r"'killed [^']*': (\d+)", ended.stdout)) >= KILLS, ended.stdout
