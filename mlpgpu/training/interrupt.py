"""Ctrl-C while a fit runs: the first ends the fit after a step, a second one soon after ends the program."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_SECONDS = 2.0  # a second Ctrl-C within them means the program, not another fit of a loop

_last = -AGAIN_SECONDS  # when a fit was last ended by Ctrl-C, on the clock of time.monotonic


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Collect Ctrl-C in the list given, which is looked at between steps; a second one acts at once.

    So does one within two seconds of that which ended another fit: somebody wants out of a loop of fits.
    Signals reach only the main thread; elsewhere nothing is collected.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.getsignal(signal.SIGINT)
    if before is None or before is signal.SIG_IGN:  # the handler is not Python's, or the process ignores Ctrl-C
        yield received
        return

    def receive(number: int, frame: FrameType | None) -> None:
        global _last
        signal.signal(signal.SIGINT, before)
        if time.monotonic() - _last < AGAIN_SECONDS:
            signal.raise_signal(number)  # to whoever hears of it without a fit
            return
        _last = time.monotonic()
        received.append(number)

    signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
