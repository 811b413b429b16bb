"""Ctrl-C, pressed at a place that a test chooses."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mlpgpu.backends.cpu.phased_steps import PhasedSteps
from mlpgpu.backends.cpu.threads import Threads
from mlpgpu.training import interrupt


def forget() -> None:
    """As if no fit had been interrupted for a while."""
    interrupt._last = -interrupt.AGAIN_SECONDS


def press_in_step(monkeypatch: pytest.MonkeyPatch, step: int, times: int) -> None:
    """Press Ctrl-C in the middle of a step's gradient, counted from 1, or before a call that takes it with others."""
    done, run_shards, call = 0, Threads.run_shards, PhasedSteps._call

    def press(steps: int) -> None:
        nonlocal done
        done += steps
        for _ in range(times * (done - steps < step <= done)):
            signal.raise_signal(signal.SIGINT)

    def pressed(self: Threads, shards: Any) -> None:
        press(1)
        run_shards(self, shards)

    def pressed_before(self: PhasedSteps, count: int) -> None:
        press(count)
        call(self, count)

    monkeypatch.setattr(Threads, "run_shards", pressed)
    monkeypatch.setattr(PhasedSteps, "_call", pressed_before)
