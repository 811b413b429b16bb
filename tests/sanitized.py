"""Tests of compiled C++ in a process under GCC's sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"


def run_sanitized(script: str, cache: Path) -> None:
    """Run a script that builds libraries with SANITIZERS in ``cache``, and prints "done" once no access was wrong."""
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    tests = Path(__file__).parent
    environment = {
        **os.environ, "MLPGPU_CACHE": str(cache), "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
        "LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
