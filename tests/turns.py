"""Turns on a card that several test processes share: many at a time, or one that has it to itself."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Inside, this process shares the card, or has it alone, with all that take turns by files in ``folder``."""
    with (folder / "mlpgpu-turns.door").open("w") as door, (folder / "mlpgpu-turns.card").open("w") as card:
        # Who waits to be alone holds the door, so that those who are let in meanwhile do not keep it waiting for ever.
        fcntl.flock(door, fcntl.LOCK_EX)
        try:
            fcntl.flock(card, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(card, fcntl.LOCK_UN)  # also for children that were forked meanwhile, and live on
