"""Locks that outlive a fork: one for short pieces of work, and one that threads with the same key hold together.

A forked child has the thread that forked and none of the others, so what those held would be held for ever.  In the
child every lock of these classes is free, unless the thread that forked holds it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import TracebackType


class Mutex:
    """A lock that one thread holds at a time, and that nobody but the forking thread holds in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        _LOCKS.add(self)

    def forget_others(self) -> None:
        """Begin anew, in a process that has none of the threads but this one."""
        if self._holder != threading.get_ident():
            self._lock, self._holder = threading.Lock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder = 0
        self._lock.release()


class GroupLock:
    """Threads that ask with equal keys may hold the lock at once; with other keys they take turns in order of arrival.

    Nobody is passed for ever: who asks while others wait comes after them, even with the key of those that hold
    the lock.  Without a key a thread holds it alone.  A thread that holds it does not ask again: if one does, Ctrl-C
    or the like came between its getting the lock and the code that gives it back, and it is given back before.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._holders: set[int] = set()  # threads
        self.forget_others()
        _LOCKS.add(self)

    def forget_others(self) -> None:
        """Begin anew, in a process that has none of the threads but this one."""
        self._mutex = threading.RLock()  # a handler of signals may ask while its thread does
        self._holders &= {threading.get_ident()}
        self._waiting: deque[tuple[Hashable, threading.Lock, int]] = deque()

    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread holds it."""
        return threading.get_ident() in self._holders

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for those that hold the lock."""
        return bool(self._waiting)

    def acquire(self, key: Hashable = None, seconds: float = -1.0) -> bool:
        """Wait until nobody holds the lock with another key, then hold it.

        Returns:
            whether it is held, which it is unless so many ``seconds`` passed.
        """
        thread = threading.get_ident()
        with self._mutex:
            if thread in self._holders:
                self._leave(thread)
            if not self._holders:
                self.begin(key)
                self._key = key
                self._holders.add(thread)
                return True
            if key is not None and self._key == key and not self._waiting:
                self._holders.add(thread)
                return True
            gate = threading.Lock()
            gate.acquire()
            place = key, gate, thread
            self._waiting.append(place)
        try:
            if gate.acquire(timeout=seconds):  # the thread that leaves last opens it
                return True
            with self._mutex:
                if place not in self._waiting:  # it was let in at the last moment
                    return True
                self._waiting.remove(place)
            return False
        except BaseException:  # Ctrl-C, while this thread waited or as it was let in
            with self._mutex:
                if place in self._waiting:
                    self._waiting.remove(place)
                else:
                    self._leave(thread)
            raise

    def release(self) -> None:
        """Hold the lock no longer."""
        with self._mutex:
            self._leave(threading.get_ident())

    @contextmanager
    def held(self, key: Hashable = None) -> Iterator[None]:
        """While it is held."""
        self.acquire(key)
        try:
            yield
        finally:
            self.release()

    def let_others(self, key: Hashable = None) -> None:
        """Let those that wait have the lock, and hold it again after them; costs next to nothing where nobody waits."""
        if self._waiting:
            self.release()
            try:
                self.acquire(key)
            except BaseException:  # Ctrl-C: whoever holds the lock still holds it when the error passes by
                self.acquire(key)
                raise

    def _leave(self, thread: int) -> None:
        if thread not in self._holders:  # it was given back already
            return
        self._holders.remove(thread)
        if self._holders:
            return
        try:
            self.end()
        finally:  # whatever it raises, such as a warning that is an error, holds up nobody
            if self._waiting:
                key = self._waiting[0][0]
                self.begin(key)
                self._key = key
                while not self._holders or (key is not None and self._waiting and self._waiting[0][0] == key):
                    _, gate, thread = self._waiting.popleft()
                    self._holders.add(thread)
                    gate.release()

    def begin(self, key: Hashable) -> None:
        """What is done before the first thread holds the lock with ``key``."""

    def end(self) -> None:
        """What is done once nobody holds the lock any longer."""


_LOCKS: weakref.WeakSet[Mutex | GroupLock] = weakref.WeakSet()


def at_fork(**calls: Callable[[], None]) -> None:
    """Have functions called ``before`` a fork, ``after_in_parent`` and ``after_in_child``, where there are forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**calls)


def _forget_other_threads() -> None:
    for lock in list(_LOCKS):
        lock.forget_others()


at_fork(after_in_child=_forget_other_threads)
