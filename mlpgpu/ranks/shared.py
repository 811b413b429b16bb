"""Memory that all ranks have, where they are on one host."""

from __future__ import annotations

import mmap
import os
import tempfile

from .communicator import Communicator

FOLDER = "/dev/shm"  # files of memory, on Linux


def share_memory(ranks: Communicator, nbytes: int) -> mmap.mmap | None:
    """Memory of so many zeros that all ranks have, or None where they are on several hosts, or the system has none.

    All ranks call it together, and get the same answer.
    """
    made = _make(nbytes) if ranks.rank == 0 else None
    name = ranks.broadcast(made[0] if made else None)
    if name is None:
        return None
    memory = made[1] if made else _open(name, nbytes)
    is_shared = all(ranks.gather(memory is not None))
    if made is not None:
        os.unlink(name)  # what is mapped stays
    return memory if is_shared else None


def _make(nbytes: int) -> tuple[str, mmap.mmap] | None:
    """A file's name, which no other host has, and its memory."""
    try:
        file, name = tempfile.mkstemp(prefix="mlpgpu-", dir=FOLDER)
        try:
            os.ftruncate(file, nbytes)
            return name, mmap.mmap(file, nbytes)
        finally:
            os.close(file)
    except OSError:
        return None


def _open(name: str, nbytes: int) -> mmap.mmap | None:
    try:
        with open(name, "r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError):
        return None
