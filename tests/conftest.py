"""Settings shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from kept_builds import forget_unused

CACHE = Path(__file__).parents[1] / ".venv" / "cache"

# What is tested here is the NumPy backend, on a machine with a card too; tests/gpu asks for cuda by name.
os.environ.setdefault("MLPGPU_BACKEND", "cpu")

# What nvcc and g++ made is kept beside the environments, for the next run of this checkout.
os.environ.setdefault("MLPGPU_CACHE", str(CACHE))

# Products of tests are small: a thread of BLAS beside another waits longer than it multiplies.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell lets its background jobs ignore Ctrl-C, and their children too; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run and no clock: a red run can be repeated on any machine.
settings.register_profile("mlpgpu", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("mlpgpu")


def pytest_sessionstart(session: pytest.Session) -> None:
    is_first_process = not hasattr(session.config, "workerinput")
    if is_first_process and os.environ["MLPGPU_CACHE"] == str(CACHE):  # another folder may be somebody's own
        forget_unused(CACHE)


def pytest_runtest_setup() -> None:
    from ctrl_c import forget  # it imports NumPy, whose BLAS reads the environment that is set above

    forget()  # a Ctrl-C of the test before would turn one that comes within seconds into the program's end


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is dropped is freed by counts of references alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
