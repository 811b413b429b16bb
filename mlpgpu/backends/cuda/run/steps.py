"""What changes from step to step: its number and batch, its rates, its loss, between the host and the card."""

from __future__ import annotations

import numpy as np

from ..kernels.launches import MOST_RUN_STEPS
from ..runtime import Device, Event, Stream, pinned
from .arrays import Arrays

TABLE_COLUMNS = 3  # of the table of rates in constant memory
TURNS = 2  # batches of steps that may be on a stream at once: one runs while the host puts the next one behind it

# Step of common/step.cuh.
STEP = np.dtype([("number", "<i8"), ("run", "<i4"), ("batch", "<i4"), ("batch_rows", "<i4"), ("epoch_rows", "<i4")])


class StepNumbers:
    """Numbers of the steps of a run, in page-locked memory, for copies to the card and back.

    There are ``TURNS`` sets of them: the card works on the steps of one turn while the host makes the next one ready.
    """

    def __init__(self, device: Device, stream: Stream, arrays: Arrays) -> None:
        self._stream, self._arrays = stream, arrays
        self._steps = pinned(device, (TURNS, MOST_RUN_STEPS), STEP)
        self._losses = pinned(device, (TURNS, MOST_RUN_STEPS, 2), np.float64)
        self._table = pinned(device, (TURNS, MOST_RUN_STEPS, TABLE_COLUMNS), np.float32)
        self._downloaded = [Event(device) for _ in range(TURNS)]
        self._turn = 0

    def take_turn(self) -> None:
        """Use the next set from here on.  The caller has waited for the steps that used this set before."""
        self._turn = (self._turn + 1) % TURNS

    def set_step(self, number: int, batch: int, batch_rows: int, epoch_rows: int, *, run: int = 0) -> None:
        """Name the step that launches from here on belong to; it is the step number ``run`` of its run."""
        # The copy of an earlier step may not have begun yet, so each step of a run has a row of its own on the host.
        steps = self._steps[self._turn]
        steps[run] = (number, run, batch, batch_rows, epoch_rows)
        self._stream.upload(self._arrays.addresses["step"], steps[run : run + 1])

    def staged_rates(self, table: np.ndarray) -> np.ndarray:
        """Rows of an optimizer's table, (steps, up to 3), as the card takes them, (steps, 3)."""
        staged = self._table[self._turn]
        staged[: len(table), : table.shape[1]] = table
        return staged[: len(table)]

    def download_losses(self, count: int) -> tuple[np.ndarray, Event]:
        """Begin to copy the loss and weight sums of the run's first steps: (count, 2), there once the event is."""
        losses, downloaded = self._losses[self._turn, :count], self._downloaded[self._turn]
        self._stream.download(losses, self._arrays.addresses["losses"])
        self._stream.record(downloaded)
        return losses, downloaded
