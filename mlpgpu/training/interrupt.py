"""Ctrl-C while a fit runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Collect Ctrl-C in the list given, which is looked at between steps; a second one acts at once.

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
        received.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
