"""Ranks that are killed while they train: the others end, the checkpoint stands, and any number of ranks goes on."""

from __future__ import annotations

import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from drawn import first_and_drawn
from launched import clean_environ, kill, mpirun, run

SCRIPT = Path(__file__).with_name("train_together.py")
SECONDS = 10.0  # within which the others end
BEGINNING = 60.0  # within which ranks have begun


def command(folder: Path, seed: int, ranks: int, *options: str) -> list[str]:
    begin = [*mpirun(), "-n", str(ranks)] if ranks > 1 else []
    return [*begin, sys.executable, str(SCRIPT), str(folder), str(seed), str(seed + 1), *options]


def left(folder: Path, seed: int) -> dict[str, Any]:
    """What the run of a seed leaves."""
    return pickle.loads((folder / str(seed) / "rank0.pickle").read_bytes())[0]


def kill_one(folder: Path, seed: int, ranks: int, chance: random.Random, *options: str) -> str:
    """Kill one of the ranks at some moment of their fit; returns what the others said, or nothing if all was over."""
    own = folder / str(seed)
    signs = [own / "begun", *(own / f"rank{rank}.pid" for rank in range(ranks))]
    process = subprocess.Popen(
        command(folder, seed, ranks, "--slowly", *options),
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        started = time.monotonic()
        while not all(sign.exists() for sign in signs) and process.poll() is None:
            assert time.monotonic() - started < BEGINNING, "no rank began to train"
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.4))
        pids = [int((own / f"rank{rank}.pid").read_text()) for rank in range(ranks)]
        others = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        if process.poll() is not None:
            assert process.returncode == 0
            return ""
        psutil.Process(pids[chance.randrange(ranks)]).send_signal(signal.SIGKILL)
        killed = time.monotonic()
        said, _ = process.communicate(timeout=SECONDS)
        _, alive = psutil.wait_procs(others, timeout=max(0.1, SECONDS - (time.monotonic() - killed)))
        assert not alive, f"ranks that go on alone: {alive}\n{said}"
        return said if process.returncode else ""
    except psutil.NoSuchProcess:  # it had just ended
        assert process.wait(SECONDS) == 0
        return ""
    finally:
        if process.poll() is None:
            kill(process)
        if process.stdout is not None:
            process.stdout.close()
        process.wait()


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("seed", first_and_drawn(range(20), 1 / 2, "killed ranks"))
@pytest.mark.parametrize("split", ["data", "tensor"])
def test_a_killed_rank_ends_the_others_and_any_number_goes_on(split: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{seed} {split}")
    options = ["--tensor"] if split == "tensor" else []
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    alone = run(command(whole, seed, 1, *options))
    assert alone.code == 0, alone.errors
    said = kill_one(broken, seed, chance.choice([2, 3, 4]), chance, *options)
    # Of ranks and mpirun, whoever is first tells it; mpirun may kill the others before they do.
    assert not said or re.search(r"rank \d of \d ends: rank \d was killed|exited on\s+signal 9", said), said
    rest = run(command(broken, seed, chance.choice([1, 2, 3]), *options))
    assert rest.code == 0, rest.errors
    got, expected = left(broken, seed), left(whole, seed)
    assert got.keys() == expected.keys()
    assert [name for name in got if got[name] != expected[name]] == []
