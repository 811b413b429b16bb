"""Forked children of a test, which answer through a pipe and never hang."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

CHILD_SECONDS = 30


def answer_of_child(call: Callable[[], Any]) -> Any:
    """What ``call`` returns in a forked child; fails if it raises there, or does not end within 30 seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_SECONDS)
        try:
            answer = True, call()
        except BaseException:
            answer = False, traceback.format_exc()
        with open(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        written = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended by signal {status & 127}: it hung or crashed"
    succeeded, answer = pickle.loads(written)
    assert succeeded, answer
    return answer
