"""The soak, a hundredth of it; ``make soak`` does all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="handles are counted as Linux has them")
def test_memory_files_and_threads_stay_level() -> None:
    command = [sys.executable, str(SCRIPT), "--scale", "0.01"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 12
