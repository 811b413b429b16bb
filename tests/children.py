"""Forked children of a test, which answer through a pipe and never hang."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

CHILD_SECONDS = 30


class Child:
    """A forked child that calls ``call``, and is ended by SIGALRM if it takes longer than ``seconds``."""

    def __init__(self, call: Callable[[], Any], seconds: int = CHILD_SECONDS) -> None:
        self._reading, writing = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            try:
                answer = True, call()
            except BaseException:
                answer = False, traceback.format_exc()
            with open(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(0)
        os.close(writing)

    def answer(self) -> Any:
        """What the call returned; fails if it raised there, or did not end in time."""
        with open(self._reading, "rb") as pipe:
            written = pipe.read()
        status = os.waitpid(self._child, 0)[1]
        assert status == 0, f"the child ended by signal {status & 127}: it hung or crashed"
        succeeded, answer = pickle.loads(written)
        assert succeeded, answer
        return answer


def answer_of_child(call: Callable[[], Any]) -> Any:
    """What ``call`` returns in a forked child; fails if it raises there, or does not end within 30 seconds."""
    return Child(call).answer()
