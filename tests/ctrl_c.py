"""Ctrl-C, pressed at a place that a test chooses."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mlpgpu.backends.cpu.threads import Threads
from mlpgpu.training import interrupt


def forget() -> None:
    """As if no fit had been interrupted for a while."""
    interrupt._last = -interrupt.AGAIN_SECONDS


def press_in_step(monkeypatch: pytest.MonkeyPatch, step: int, times: int) -> None:
    """Press Ctrl-C in the middle of a step's gradient, counted from 1."""
    done, run_shards = 0, Threads.run_shards

    def pressed(self: Threads, shards: Any) -> None:
        nonlocal done
        done += 1
        for _ in range(times * (done == step)):
            signal.raise_signal(signal.SIGINT)
        run_shards(self, shards)

    monkeypatch.setattr(Threads, "run_shards", pressed)
