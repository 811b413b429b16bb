"""How a rank ends: what it tells the others when it fails, and that it waits for them when it does not.

An exception that nobody catches is printed with the rank's number, and ends all ranks.  A script that comes to its end
waits for the others' ends before MPI is finalized, since MPI would wait without seeing that one of them fails.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ..errors import RankError
from .watch import INTERRUPTED, Watch, exit_status, tell

HEAR_SECONDS = 0.3  # mpirun kills a rank some second after it has told it to end


class Ends:
    """The hooks of one process that is a rank.

    Arguments:
        watch: what it knows of the others.
        progress: has MPI go on with what it has begun; called while this rank waits for the others' ends.
        finalize: called when all ranks have come to their ends, unless one failed.
        abort: has the launcher end the others; called with the exit code where they cannot be told to end.
    """

    def __init__(
        self,
        watch: Watch,
        progress: Callable[[], object],
        finalize: Callable[[], None],
        abort: Callable[[int], None],
    ) -> None:
        self._watch, self._progress, self._finalize, self._abort = watch, progress, finalize, abort
        self._code = 0  # what sys.exit was called with last
        self._process = os.getpid()
        self._hook_before, self._exit_before = sys.excepthook, sys.exit

    def install(self) -> None:
        """Take over uncaught exceptions, ``sys.exit``, what is done at the script's end, and SIGTERM, if nobody has."""
        sys.excepthook = self._show
        sys.exit = self._exit
        atexit.register(self._leave)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # not in the main thread, which alone receives signals
                signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Say why, then end: mpirun terminates all as soon as one rank is killed, perhaps before they hear of it."""
        signal.signal(number, signal.SIG_DFL)
        watch, end = self._watch, time.monotonic() + HEAR_SECONDS
        if os.getpid() == self._process:
            while watch.failure is None and time.monotonic() < end:
                time.sleep(0.01)
            if watch.failure is None:
                tell(f"rank {watch.rank} of {watch.size} ends: it was terminated")
        signal.raise_signal(number)

    def _exit(self, status: Any = None, /) -> NoReturn:
        self._code = 0 if status is None else status if isinstance(status, int) else 1
        self._exit_before(status)
        raise AssertionError("sys.exit returned")

    def _show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught exception, unless another rank's end is its reason, and tell the others."""
        watch = self._watch
        if os.getpid() != self._process:
            self._hook_before(kind, error, trace)
            return
        text = f"failed: {_in_a_line(kind, error)}"
        failure = watch.failure
        if issubclass(kind, KeyboardInterrupt):
            self._code = INTERRUPTED
            if watch.fail(INTERRUPTED, "was interrupted") and watch.rank == 0:
                tell("interrupted")  # all ranks are at once, or rank 0 soon hears of it
            return
        # A rank that waits for one that has left ends with that one's exit code, whichever the launcher sees first.
        of_left = [code for code in watch.left.values() if code] if issubclass(kind, RankError) else []
        self._code = failure.code if failure else next(iter(of_left), 1)
        if failure is None or not (issubclass(kind, RankError) or failure.text == text):
            self._print(kind, error, trace)
            watch.fail(self._code, text)

    def _print(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        name = f"rank {self._watch.rank} of {self._watch.size} failed"
        if self._hook_before is sys.__excepthook__:
            tell(f"{name}:\n{''.join(traceback.format_exception(kind, error, trace)).rstrip()}")
        else:
            tell(f"{name}:")
            self._hook_before(kind, error, trace)

    def _leave(self) -> None:
        """At the end of the script, after functions that were registered later."""
        if os.getpid() != self._process:
            return
        watch = self._watch
        try:
            if watch.failure is None:
                watch.leave(self._code, self._progress)
        except KeyboardInterrupt:
            watch.fail(INTERRUPTED, "was interrupted")
        if watch.failure is None:
            self._finalize()
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        status = exit_status(self._code or watch.failure.code)
        if watch.failure.rank == watch.rank and not watch.wait_for_others():
            self._abort(status)
        os._exit(status)


def _in_a_line(kind: type[BaseException], error: BaseException) -> str:
    lines = traceback.format_exception_only(kind, error)
    return " ".join("".join(lines).split())
