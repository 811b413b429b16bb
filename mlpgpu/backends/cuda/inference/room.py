"""Where rows wait between the host and a card: page-locked memory of the host, and its place on the card.

A piece goes up as one row of bytes: the struct Step of its launches, padded to :data:`HEADER`, then its inputs.
"""

from __future__ import annotations

import numpy as np

from ....plan import Plan
from ..run.arrays import Arrays
from ..run.steps import STEP
from ..runtime import Device, Event, Replay, Stream, pinned

HEADER = 512  # bytes before the inputs, which begin at a multiple of them


class Room:
    """Room for one piece of at most so many rows, whose inputs are of type ``dtype`` on the card.

    Attributes:
        row_bytes: of a row of inputs.
        addresses: for the card, of ``step``, ``data``, ``found``, which is set where inputs are not finite, and of the
            plan's logits and outputs by their names.
        inputs: (capacity, n_in) on the host.
        result: (capacity, n_out) on the host.
        is_up, is_made, is_down: when inputs have arrived on the card, results are there, and have arrived on the host.
        replay: the launches on this room as a graph, or None until it is captured.
    """

    def __init__(self, device: Device, plan: Plan, capacity: int, dtype: np.dtype) -> None:
        self.row_bytes = dtype.itemsize * plan.n_in
        self._host = pinned(device, (HEADER + capacity * self.row_bytes,), np.uint8)
        self._step = self._host[: STEP.itemsize].view(STEP)
        self.inputs = self._host[HEADER:].view(dtype).reshape(capacity, plan.n_in)
        self.result = pinned(device, (capacity, plan.n_out), np.float32)
        self._arrays = Arrays(device)
        results = dict.fromkeys((plan.logits, plan.output), self.result.nbytes)
        self._arrays.allocate({"piece": self._host.nbytes, **results})
        self._place = self._arrays.addresses["piece"]
        self._found = pinned(device, (1,), np.uint32)  # a card writes to page-locked memory by its address on the host
        of_piece = {"step": self._place, "data": self._place + HEADER, "found": self._found.ctypes.data}
        self.addresses = {**self._arrays.addresses, **of_piece}
        self.is_up, self.is_made, self.is_down = Event(device), Event(device), Event(device)
        self.replay: Replay | None = None

    def begin(self, rows: int) -> None:
        """Make ready for a piece of so many rows, which launches read in its header."""
        self._step[0] = (0, 0, 0, rows, rows)
        self._found[0] = 0

    @property
    def is_finite(self) -> bool:
        """Whether the card found nothing else among the inputs, if it looked, once the results are there."""
        return not self._found[0]

    def upload(self, stream: Stream, rows: slice) -> None:
        """Copy these rows to the card, the first ones together with the header."""
        begin = HEADER + rows.start * self.row_bytes if rows.start else 0
        end = HEADER + rows.stop * self.row_bytes
        stream.upload(self._place + begin, self._host[begin:end])

    def upload_from(self, stream: Stream, x: np.ndarray) -> None:
        """Copy rows of the caller's to the card, and the header; on return the array may change, unless page-locked."""
        stream.upload(self._place, self._host[:HEADER])
        stream.upload(self._place + HEADER, x)

    def download(self, stream: Stream, array: str, rows: int) -> None:
        """Copy so many rows of the results to the host."""
        stream.download(self.result[:rows], self.addresses[array])

    def launch(self, stream: Stream) -> None:
        """Compute the piece."""
        assert self.replay is not None
        self.replay.launch(stream)

    def forget_launches(self) -> None:
        """Drop the graph."""
        if self.replay is not None:
            self.replay.close()
            self.replay = None

    def close(self) -> None:
        """Give everything back; work that uses it must have ended."""
        self.forget_launches()
        for event in (self.is_up, self.is_made, self.is_down):
            event.close()
        self._arrays.close()
        del self._host, self._step, self._found, self.inputs, self.result
