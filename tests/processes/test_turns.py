"""Test processes that share a card: who asks to be alone there is, and gets its turn."""

from __future__ import annotations

import os
import time
from pathlib import Path

from children import Child
from turns import turn


def test_who_is_alone_meets_nobody(tmp_path: Path) -> None:
    """Six processes note when they begin and end; only those that share may overlap."""

    def work(number: int) -> list[tuple[float, float, bool]]:
        spans = []
        for round_ in range(4):
            alone = (number + round_) % 3 == 0
            with turn(tmp_path, alone=alone):
                began = time.monotonic()
                time.sleep(0.01)
                spans.append((began, time.monotonic(), alone))
        return spans

    children = [Child(lambda number=number: work(number)) for number in range(6)]  # type: ignore[misc]  # a bound argument
    spans = [span for child in children for span in child.answer()]
    assert len(spans) == 24
    for place, (began, ended, alone) in enumerate(spans):
        for other_began, other_ended, other_alone in spans[:place]:
            overlaps = began < other_ended and other_began < ended
            assert not (overlaps and (alone or other_alone))


def test_who_shares_meets_others(tmp_path: Path) -> None:
    """Each of two processes keeps its turn until the other one has it too."""
    pipes = os.pipe(), os.pipe()

    def work(number: int) -> bytes:
        with turn(tmp_path, alone=False):
            os.write(pipes[number][1], b"here")
            return os.read(pipes[1 - number][0], 4)

    children = [Child(lambda number=number: work(number)) for number in range(2)]  # type: ignore[misc]  # a bound argument
    assert [child.answer() for child in children] == [b"here", b"here"]
    for ends in pipes:
        for end in ends:
            os.close(end)


def test_a_forked_child_does_not_keep_the_turn(tmp_path: Path) -> None:
    with turn(tmp_path, alone=True):
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
    try:
        with turn(tmp_path, alone=True):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
