"""The end of a rank that hangs where no exception reaches it, such as in a call of a card's driver."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

LOOK_SECONDS = 0.5


class Deadline:
    """A thread that looks whether what another one does has ended in time.

    Arguments:
        end: ends the process, given what has not ended.
    """

    def __init__(self, end: Callable[[str], object]) -> None:
        self._end = end
        self._due: tuple[float, str] | None = None
        self._is_begun = False

    @contextlib.contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """End the process if the block, of one thread at a time, takes longer than ``seconds``."""
        if not self._is_begun:
            self._is_begun = True
            threading.Thread(target=self._look, name="mlpgpu deadline", daemon=True).start()
        self._due = time.monotonic() + seconds, what
        try:
            yield
        finally:
            self._due = None

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            due = self._due
            if due is not None and time.monotonic() > due[0]:
                self._end(due[1])
