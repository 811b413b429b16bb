"""Ctrl-C while a trainer is at work: the first ends a fit after a step, a further one soon ends the program.

``docs/interrupts.md`` has the table of what it does when.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_SECONDS = 2.0  # a second Ctrl-C within them means the program, not another fit of a loop

Handler = Callable[[int, FrameType | None], object] | int

_last = -AGAIN_SECONDS  # when a fit was last ended by Ctrl-C, on the clock of time.monotonic
_current: Interrupts | None = None  # those of the innermost fit or call of the main thread


class Interrupts:
    """What becomes of Ctrl-C during a fit, or during a call that is not to be broken off in its middle.

    The first one of a fit is only noted.  A further one, or any in a call without a fit, is for the program: it is
    passed on to the handler that was there before, which raises KeyboardInterrupt unless the user has set another one.
    That is done at the next :meth:`check`, between steps, or at once while foreign code runs; and at once, too, where
    one waits for such a check already.

    Attributes:
        is_received: whether there was one.
    """

    def __init__(self, before: Handler, *, ends_fit: bool) -> None:
        self.is_received = False
        self._before, self._ends_fit = before, ends_fit
        self._is_open = self._waits = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        global _last
        is_first = self._ends_fit and not self.is_received and _current is self
        self.is_received = True
        if is_first and time.monotonic() - _last >= AGAIN_SECONDS:
            _last = time.monotonic()
        elif self._is_open or self._waits or _current is not self:
            self._pass_on(frame)  # it may be left over from a fit that an exception ended as it was cleaning up
        else:
            self._waits = True

    def check(self) -> None:
        """Pass on a Ctrl-C that waits for it."""
        if self._waits:
            self._pass_on(sys._getframe())

    def _pass_on(self, frame: FrameType | None) -> None:
        self._waits = False
        signal.signal(signal.SIGINT, self._before)
        if callable(self._before):
            self._before(signal.SIGINT, frame)
        else:
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def open(self) -> Iterator[None]:
        """While code runs that may be broken off anywhere."""
        self.check()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @contextmanager
    def closed(self) -> Iterator[None]:
        """While code runs that is not to be broken off, perhaps inside such that may be."""
        was_open, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = was_open
            if was_open:
                self.check()


@contextmanager
def interrupts_of_fit() -> Iterator[Interrupts]:
    """Receive Ctrl-C for a fit, which looks between steps whether there was one.

    One within two seconds of that which ended another fit is for the program: somebody wants out of a loop of fits.
    Signals reach only the main thread; elsewhere none is received.
    """
    with _installed(ends_fit=True) as interrupts:
        yield interrupts


@contextmanager
def uninterrupted() -> Iterator[None]:
    """While a call is under way that Ctrl-C is not to break off in its middle; it acts at the end, a second at once."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _current is not None and signal.getsignal(signal.SIGINT) == _current.receive:
        with _current.closed():
            yield
    else:
        with _installed(ends_fit=False):
            yield


@contextmanager
def _installed(*, ends_fit: bool) -> Iterator[Interrupts]:
    global _current
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if before is None or before is signal.SIG_IGN:  # the handler is not Python's, or the process ignores Ctrl-C
        yield Interrupts(signal.SIG_IGN, ends_fit=ends_fit)
        return
    outer, interrupts = _current, Interrupts(before, ends_fit=ends_fit)
    try:
        _current = interrupts
        signal.signal(signal.SIGINT, interrupts.receive)
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        _current = outer
        interrupts.check()
