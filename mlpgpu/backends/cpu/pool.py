"""Threads of the process that help whoever computes a call piece by piece."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np


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
                self._left.wait()
        if self._error is not None:
            raise self._error

    def _take_pieces(self) -> None:
        for piece in self._pieces:
            self._compute(piece)

    def _stop(self) -> None:
        """Leave no piece for anybody, which after an error ends the job early."""
        for _ in self._pieces:
            pass


class Pool:
    """Threads that wait for jobs; they start with the first one, and anew in a forked child."""

    def __init__(self) -> None:
        self.forget_threads()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget_threads)

    def forget_threads(self) -> None:
        """Begin anew, in a process that has none of the threads."""
        self._mutex = threading.Lock()
        self._threads = 0
        self._jobs: SimpleQueue[Job] = SimpleQueue()

    def run(self, pieces: int, compute: Callable[[int], None], threads: int) -> None:
        """Call ``compute`` with each number under ``pieces``, on up to ``threads`` threads with the caller's."""
        job = Job(pieces, compute)
        helpers = min(threads, pieces) - 1
        if helpers > self._threads:
            self._start(helpers)
        for _ in range(helpers):
            self._jobs.put(job)
        job.run()

    def _start(self, threads: int) -> None:
        with self._mutex:
            while self._threads < threads:
                threading.Thread(target=_serve, args=(self._jobs,), name="mlpgpu-predict", daemon=True).start()
                self._threads += 1


def _serve(jobs: SimpleQueue[Job]) -> None:
    with np.errstate(all="ignore"):  # the error state belongs to the thread
        while True:
            jobs.get().help()


POOL = Pool()
