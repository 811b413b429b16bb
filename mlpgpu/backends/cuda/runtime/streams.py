"""Streams and events: copies, fills, and the order of work on a card."""

from __future__ import annotations

import numpy as np

from ....errors import BackendError
from .bindings import call, cu, drv
from .device import Device, Resource


class Event(Resource):
    """A point in a stream's work.  Only with ``timing`` is the time recorded when work reaches it."""

    def __init__(self, device: Device, *, timing: bool = False) -> None:
        super().__init__(device, drv.Event(0 if timing else drv.event_flags.DISABLE_TIMING))

    def synchronize(self) -> None:
        """Wait until all work before the event is done."""
        self.handle.synchronize()

    @property
    def is_reached(self) -> bool:
        """Whether all work before the event is done."""
        return bool(self.handle.query())

    def seconds_since(self, earlier: Event) -> float:
        """The time between two events that were reached, both with timing."""
        return float(self.handle.time_since(earlier.handle)) / 1000


class Stream(Resource):
    """A queue of work, which does not wait for the default stream.

    Addresses are those of the card's memory.  An array that a copy reads or writes must stay as it is, and alive, until
    the stream has passed the copy; a copy of an array that is not page-locked makes the host wait.

    Attributes:
        name: what a timeline calls it.
    """

    def __init__(self, device: Device, name: str = "") -> None:
        super().__init__(device, drv.Stream(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self.name = name
        self.number = int(self.handle.handle)  # as other libraries name streams
        self.bound = cu.CUstream(self.handle.handle)  # the same stream as cuda-bindings take it

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a C-contiguous array to the card."""
        _check_contiguous(array)
        drv.memcpy_htod_async(address, array, self.handle)

    def download(self, array: np.ndarray, address: int) -> None:
        """Fill a C-contiguous array from the card."""
        _check_contiguous(array)
        drv.memcpy_dtoh_async(array, address, self.handle)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy within the card."""
        drv.memcpy_dtod_async(destination, source, nbytes, self.handle)

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        """Set ``nbytes`` bytes to the same value."""
        drv.memset_d8_async(address, byte, nbytes, self.handle)

    def record(self, event: Event) -> None:
        """Place the event behind the work so far."""
        event.handle.record(self.handle)

    def wait(self, event: Event) -> None:
        """Start nothing that follows before ``event`` is reached."""
        self.handle.wait_for_event(event.handle)

    def synchronize(self) -> None:
        """Wait until all work that the stream has been given is done."""
        self.handle.synchronize()


def wait_for_stream(device: Device, number: int) -> None:
    """Wait for the stream of this number, another library's; for the context's whole work if it is 0."""
    if number:
        call(cu.cuStreamSynchronize, cu.CUstream(number))
    else:
        device.synchronize()


def _check_contiguous(array: np.ndarray) -> None:
    if not array.flags.c_contiguous:
        raise BackendError("copy", expected="a C-contiguous array", got=f"strides {array.strides} of {array.shape}")
