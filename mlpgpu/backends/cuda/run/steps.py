"""What changes from step to step: its number and batch, its rates, its loss, between the host and the card."""

from __future__ import annotations

import numpy as np

from ..kernels.launches import MOST_RUN_STEPS
from ..runtime import Device, Stream, pinned
from .arrays import Arrays

TABLE_COLUMNS = 3  # of the table of rates in constant memory

# Step of common/step.cuh.
STEP = np.dtype([("number", "<i8"), ("run", "<i4"), ("batch", "<i4"), ("batch_rows", "<i4"), ("epoch_rows", "<i4")])


class StepNumbers:
    """Numbers of the steps of a run, in page-locked memory, for copies to the card and back."""

    def __init__(self, device: Device, stream: Stream, arrays: Arrays) -> None:
        self._stream, self._arrays = stream, arrays
        self._steps = pinned(device, (MOST_RUN_STEPS,), STEP)
        self._losses = pinned(device, (MOST_RUN_STEPS, 2), np.float64)
        self._table = pinned(device, (MOST_RUN_STEPS, TABLE_COLUMNS), np.float32)

    def set_step(self, number: int, batch: int, batch_rows: int, epoch_rows: int, *, run: int = 0) -> None:
        """Name the step that launches from here on belong to; it is the step number ``run`` of its run."""
        # The copy of an earlier step may not have begun yet, so each step of a run has a row of its own on the host.
        self._steps[run] = (number, run, batch, batch_rows, epoch_rows)
        self._stream.upload(self._arrays.addresses["step"], self._steps[run : run + 1])

    def staged_rates(self, table: np.ndarray) -> np.ndarray:
        """Rows of an optimizer's table, (steps, up to 3), as the card takes them, (steps, 3)."""
        self._table[: len(table), : table.shape[1]] = table
        return self._table[: len(table)]

    def download_losses(self, count: int) -> np.ndarray:
        """Begin to copy the loss and weight sums of the run's first steps: (count, 2), there when the stream is."""
        self._stream.download(self._losses[:count], self._arrays.addresses["losses"])
        return self._losses[:count]
