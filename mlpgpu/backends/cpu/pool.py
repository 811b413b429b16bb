"""Threads of the process that help whoever computes something piece by piece: a prediction, or shards of a step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from ...locks import at_fork


class Job:
    """The pieces of one call, each computed by the thread that comes for it first.

    The caller computes pieces itself and waits for no thread that has not begun, so a busy pool holds nobody up.
    """

    def __init__(self, pieces: int, compute: Callable[[int], None]) -> None:
        self._pieces = iter(range(pieces))  # from which any thread takes the next one
        self._compute = compute
        self._mutex = threading.Lock()
        self._helpers = 0
        self._is_over = False
        self._left = threading.Event()  # once the last helper has left
        self._error: BaseException | None = None

    def help(self) -> None:
        """Compute pieces beside the caller, unless it has come to its end."""
        with self._mutex:
            if self._is_over:
                return
            self._helpers += 1
        try:
            self._take_pieces()
        except BaseException as error:  # which the caller raises
            self._error = error
            self._stop()
        with self._mutex:
            self._helpers -= 1
            if self._is_over and not self._helpers:
                self._left.set()

    def run(self) -> None:
        """Compute pieces on the caller's thread, until all are done by whomever."""
        try:
            self._take_pieces()
        finally:
            self._stop()
            with self._mutex:
                self._is_over = True
                is_alone = not self._helpers
            if not is_alone:
                self._wait_for_helpers()
            self._compute = _nothing  # a thread that comes too late holds no arrays of the caller's
        if self._error is not None:
            raise self._error

    def _wait_for_helpers(self) -> None:
        try:
            self._left.wait()
        except BaseException:  # Ctrl-C: nobody computes on when the error passes by
            self._left.wait()
            raise

    def _take_pieces(self) -> None:
        for piece in self._pieces:
            self._compute(piece)

    def _stop(self) -> None:
        """Leave no piece for anybody, which after an error ends the job early."""
        for _ in self._pieces:
            pass


def _nothing(piece: int) -> None:
    """What is computed of a job that is over."""


class Pool:
    """Threads that wait for jobs; they start with the first one, and anew in a forked child.

    There are as many as the jobs of one moment asked for, up to the cores or what one job asked for.
    """

    def __init__(self) -> None:
        self.forget_threads()
        at_fork(after_in_child=self.forget_threads)

    def forget_threads(self) -> None:
        """Begin anew, in a process that has none of the threads."""
        self._mutex = threading.RLock()  # a handler of signals may compute while its thread does
        self._threads = 0
        self._asked = 0  # by the jobs under way
        self._jobs: SimpleQueue[Job] = SimpleQueue()

    def run(self, pieces: int, compute: Callable[[int], None], threads: int) -> None:
        """Call ``compute`` with each number under ``pieces``, on up to ``threads`` threads with the caller's."""
        job = Job(pieces, compute)
        helpers = min(threads, pieces) - 1
        with self._mutex:
            self._asked += helpers
            if self._asked > self._threads:
                self._start(min(self._asked, max(helpers, (os.cpu_count() or 1) - 1)))
        try:
            for _ in range(helpers):
                self._jobs.put(job)
            job.run()
        finally:
            with self._mutex:
                self._asked -= helpers

    def _start(self, threads: int) -> None:
        while self._threads < threads:
            threading.Thread(target=_serve, args=(self._jobs,), name="mlpgpu-helper", daemon=True).start()
            self._threads += 1


def _serve(jobs: SimpleQueue[Job]) -> None:
    with np.errstate(all="ignore"):  # the error state belongs to the thread
        while True:
            jobs.get().help()


POOL = Pool()
