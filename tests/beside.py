"""Work that other threads repeat while a test does its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 60.0


@contextmanager
def beside(*works: Callable[[], object]) -> Iterator[None]:
    """While other threads repeat these, each at least once; an error in one of them is raised here."""
    is_over, errors = threading.Event(), []
    have_begun = [threading.Event() for _ in works]

    def repeat(work: Callable[[], object], has_begun: threading.Event) -> None:
        try:
            while not is_over.is_set():
                work()
                has_begun.set()
        except BaseException as error:
            errors.append(error)
        finally:
            has_begun.set()

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(works, have_begun, strict=True)]
    for thread in threads:
        thread.start()
    try:
        assert all(begun.wait(SECONDS) for begun in have_begun)
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
