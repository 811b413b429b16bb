"""Messages from card to card, and what is common to those who bring them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ....errors import BackendError
from .device import Device, Resource
from .streams import Event, Stream

# Waits until a function says that all ranks have come: raises where one has failed, or the time limit is over.
Wait = Callable[[Callable[[], bool], str], None]

LANES = 2  # streams of linked cards that may have messages at once
ABORT_SECONDS = 2.0  # that steps under way are given to end without messages
NAP_SECONDS = 1e-3


class Place(NamedTuple):
    """An address in another process's memory, which is mapped as long as somebody holds ``memory``."""

    memory: Resource
    address: int


class Message(NamedTuple):
    """Bytes of this card's memory that go to another rank, ``peer``, or come from it; ``to`` is where, if known."""

    peer: int
    address: int
    nbytes: int
    to: Place | None = None


def broken_off() -> BackendError:
    """The error for messages after an abort."""
    got = "one that was broken off"
    return BackendError("messages between cards", expected="an exchange that goes on", got=got)


def comes_to_rest(device: Device, stream: Stream, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Wait for what a stream was given, which is being broken off; whether it ends, or else the device is abandoned.

    ``meanwhile`` is called again and again.
    """
    reached, end = Event(device), time.monotonic() + ABORT_SECONDS
    stream.record(reached)
    while not reached.is_reached:
        if time.monotonic() > end:
            device.abandon()
            return False
        meanwhile()
        time.sleep(NAP_SECONDS)
    return True
