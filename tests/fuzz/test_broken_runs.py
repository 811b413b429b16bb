"""Random runs that exceptions, Ctrl-C and kills break off; the whole by ``broken_runs.py``."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from broken_runs import attack, interrupts
from killed_runs import run_with_checkpoint

pytestmark = pytest.mark.xdist_group("broken runs")


@pytest.mark.parametrize(
    ("how", "seeds"),
    [
        ("exceptions", range(1)),
        ("interrupts", range(1)),
        ("kills", range(1)),
        *(
            pytest.param(how, range(100, 105), marks=pytest.mark.thorough)
            for how in ("exceptions", "interrupts", "kills")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C as an object is forgotten
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork, nor signals to one process")
def test_a_run_that_is_broken_off_ends_with_the_bits_of_an_unbroken_one(how: str, seeds: range) -> None:
    found = {seed: attack(seed, how) for seed in seeds}
    assert any(found.values())
    assert {seed: what for seed, what in found.items() if any(each.split()[0].isupper() for each in what)} == {}


def test_every_random_run_trains() -> None:
    """Also where rows are held out, and batches that are not full are left out."""
    for seed in range(9100, 9200):
        run = run_with_checkpoint(seed, "cpu")
        assert run.least_steps > 0 or not run.settings["drop_last"]
        assert {"epochs", "steps"} & {*run.settings["callbacks"]}


def test_ctrl_c_reaches_runs_in_the_background() -> None:
    """Of what a shell starts there, Python leaves SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts(random.Random(1), 0):
            time.sleep(5.0)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
