"""The lock that threads with one key hold together, and the limit of BLAS's threads that is held by it."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator

import pytest

from mlpgpu.backends.cpu.blas import BLAS
from mlpgpu.locks import GroupLock


def started(target: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def wait_until(condition: object) -> None:
    end = time.monotonic() + 10.0
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)


class Holder:
    """A thread that holds a lock until it is told to let go."""

    def __init__(self, lock: GroupLock, key: int) -> None:
        self._lock, self._key = lock, key
        self._holds, self._told = threading.Event(), threading.Event()
        self._thread = started(self._hold)
        assert self._holds.wait(10.0)

    def _hold(self) -> None:
        with self._lock.held(self._key):
            self._holds.set()
            self._told.wait(10.0)

    def let_go(self) -> None:
        self._told.set()
        self._thread.join(10.0)


def test_equal_keys_are_held_together_and_others_in_order_of_arrival() -> None:
    lock, order = GroupLock(), []

    def enter(name: str, key: int) -> None:
        with lock.held(key):
            order.append(name)

    lock.acquire(1)
    together = started(enter, "first", 1)
    together.join(10.0)
    threads = []
    for name, key in (("second", 2), ("third", 1), ("fourth", 2)):
        threads.append(started(enter, name, key))
        wait_until(lambda: len(lock._waiting) == len(threads))
    assert order == ["first"]  # the third one does not pass the second, although its key is that of the holder
    lock.release()
    for thread in threads:
        thread.join(10.0)
    assert order == ["first", "second", "third", "fourth"]


def test_a_holder_lets_others_in_between() -> None:
    lock, steps, seen = GroupLock(), [], []

    def read() -> None:
        with lock.held():
            seen.append(len(steps))

    with lock.held():
        reader = started(read)
        wait_until(lambda: lock._waiting)
        for step in range(5):
            steps.append(step)
            lock.let_others()
    reader.join(10.0)
    assert seen == [1]


def test_one_who_is_interrupted_while_waiting_holds_up_nobody() -> None:
    lock = GroupLock()
    holder = Holder(lock, 1)

    class Interrupted(BaseException):
        pass

    class Gate:
        def acquire(self, timeout: float = -1.0) -> bool:
            if self.is_made:
                raise Interrupted
            self.is_made = True
            return True

        is_made = False

        def release(self) -> None:
            pass

    original = threading.Lock
    threading.Lock = Gate  # type: ignore[assignment, misc]
    try:
        with pytest.raises(Interrupted):
            lock.acquire(2)
    finally:
        threading.Lock = original  # type: ignore[misc]
    holder.let_go()
    Holder(lock, 3).let_go()
    assert not lock._holders


def test_a_thread_that_lost_the_lock_to_an_exception_gets_it_again() -> None:
    """It got the lock, and before it came to the code that gives it back there was Ctrl-C."""
    lock, order = GroupLock(), []
    lock.acquire(1)
    waiting = started(lambda: [lock.acquire(2), order.append(2), lock.release()])
    wait_until(lambda: lock.is_awaited)
    with lock.held(1):
        order.append(1)
    waiting.join(10.0)
    assert order == [2, 1]
    lock.release()  # by code that ends late
    assert not lock._holders


@pytest.fixture
def found() -> Iterator[int]:
    """BLAS with two threads, as others have set it."""
    (library, *_) = BLAS.libraries
    before = library.get()
    library.set(2)
    yield 2
    library.set(before)


def test_the_threads_of_blas_are_given_back_as_they_were_found(found: int) -> None:
    (library, *_) = BLAS.libraries
    with BLAS.held(1):
        assert library.get() == 1
        Holder(BLAS, 1).let_go()
        assert library.get() == 1
    assert library.get() == found


def test_a_change_of_threads_by_others_is_told_and_stays(found: int) -> None:
    (library, *_) = BLAS.libraries
    BLAS.acquire(1)
    library.set(found)
    with pytest.warns(RuntimeWarning, match="set by somebody else"):
        BLAS.release()
    assert library.get() == found


def test_a_warning_that_is_an_error_holds_up_nobody(found: int) -> None:
    (library, *_) = BLAS.libraries
    BLAS.acquire(1)
    waiting = started(lambda: [BLAS.acquire(found), BLAS.release()])
    wait_until(lambda: BLAS.is_awaited)
    library.set(found)
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match="set by somebody else"):
        warnings.simplefilter("error")
        BLAS.release()
    waiting.join(10.0)
    assert not waiting.is_alive() and not BLAS._holders
    assert library.get() == found


def test_threads_that_ask_for_other_limits_take_turns(found: int) -> None:
    (library, *_) = BLAS.libraries
    wrong: list[int] = []

    def hold(limit: int) -> None:
        for _ in range(300):
            with BLAS.held(limit):
                if library.get() != limit:
                    wrong.append(limit)
                BLAS.let_others(limit)
                if library.get() != limit:
                    wrong.append(limit)

    threads = [started(hold, limit) for limit in (1, 2, 1, 2)]
    for thread in threads:
        thread.join(30.0)
    assert not wrong and library.get() == found
