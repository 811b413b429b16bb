"""A lock that threads get in the order in which they ask, and that threads with the same key hold together."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class GroupLock:
    """Threads that ask with equal keys may hold the lock at once; with other keys they take turns in order of arrival.

    Nobody is passed for ever: who asks while others wait comes after them, even with the key of those that hold
    the lock.  Without a key a thread holds it alone.  A thread that holds it does not ask again: if one does, Ctrl-C
    or the like came between its getting the lock and the code that gives it back, and it is given back before.
    In a forked child nobody holds it, because the threads that did are not there.
    """

    def __init__(self) -> None:
        self.forget_holders()
        _LOCKS.add(self)

    def forget_holders(self) -> None:
        """Begin anew, in a process that has none of the threads that held the lock or waited for it."""
        self._mutex = threading.RLock()  # a handler of signals may ask while its thread does
        self._key: Hashable = None
        self._holders: set[int] = set()  # threads
        self._waiting: deque[tuple[Hashable, threading.Lock, int]] = deque()

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for those that hold the lock."""
        return bool(self._waiting)

    def acquire(self, key: Hashable = None) -> None:
        """Wait until nobody holds the lock with another key, then hold it."""
        thread = threading.get_ident()
        with self._mutex:
            if thread in self._holders:
                self._leave(thread)
            if not self._holders:
                self.begin(key)
                self._key = key
                self._holders.add(thread)
                return
            if key is not None and self._key == key and not self._waiting:
                self._holders.add(thread)
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((key, gate, thread))
        try:
            gate.acquire()  # the thread that leaves last opens it
        except BaseException:  # Ctrl-C, while this thread waited or as it was let in
            with self._mutex:
                if (key, gate, thread) in self._waiting:
                    self._waiting.remove((key, gate, thread))
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


_LOCKS: weakref.WeakSet[GroupLock] = weakref.WeakSet()


def _forget_all_holders() -> None:
    for lock in list(_LOCKS):
        lock.forget_holders()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all_holders)
