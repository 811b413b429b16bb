"""The soak, a hundredth of it; ``make soak`` does all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")


# In a process of its own, since what other tests have freed lies between the blocks of this one.
FREED = """
import sys, threading
import numpy as np, psutil
sys.path.insert(0, sys.argv[1])
import soak

process, kept = psutil.Process(), []

def work():
    blocks = [np.ones(2000) for _ in range(3000)]  # 48 MB, too small for the system to be asked for each
    kept.extend(blocks[::1000])

def rounds(count):
    for _ in range(count):
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

rounds(1)  # arenas and stacks of as many threads
soak.give_freed_memory_back()
before = process.memory_info().rss
rounds(3)
freed = process.memory_info().rss
soak.give_freed_memory_back()
print(len(kept), freed - before, process.memory_info().rss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it asks glibc")
def test_what_threads_freed_counts_as_no_memory() -> None:
    """Of blocks freed but for one in a thousand at most a third stays; threads get other arenas in each run."""
    command = [sys.executable, "-c", FREED, str(SCRIPT.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    kept, freed, left = map(int, done.stdout.split())
    assert kept == 48
    assert freed > 60 << 20, "nothing was there to be given back"
    assert left < freed / 3


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="handles are counted as Linux has them")
def test_memory_files_and_threads_stay_level() -> None:
    command = [sys.executable, str(SCRIPT), "--scale", "0.01"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 12
