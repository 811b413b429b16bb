"""A program on a card, of one of several ranks that have parts of a network each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..base import Program, Source, State
from ..parts import ProgramOfParts
from . import kernels
from .run.program import CudaProgram
from .select.data import by_kernel


class CardFlat:
    """A flat array on a card; used inside ``with device:``."""

    dtype = np.dtype(np.float32)

    def __init__(self, program: CudaProgram, address: int, size: int) -> None:
        self._stream, self._address, self.size = program.workspace.stream, address, size

    def read(self, first: int, end: int) -> np.ndarray:
        values = np.empty(end - first, np.float32)
        if values.size:
            self._stream.download(values, self._address + values.itemsize * first)
            self._stream.synchronize()
        return values

    def write(self, first: int, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, np.float32)
        if values.size:
            self._stream.upload(self._address + values.itemsize * first, values)
            self._stream.synchronize()  # before the array goes


class CudaTensorProgram(ProgramOfParts, CudaProgram):
    """A plan with parts, on a card: weights, gradients and slots of this rank's parts are there alone.

    Initial values are drawn there, and what goes to the host goes piece by piece.
    """

    def load(self, state: State, *, snapshot: bool = False) -> None:
        with self.device:
            super().load(state, snapshot=snapshot)
            self.state.were_set = True

    def load_pieces(self, source: Source, rows: Any) -> None:
        super().load_pieces(source, rows)
        self.state.were_set = True

    def load_statistics(self, statistics: np.ndarray) -> None:
        self.state.load_statistics(statistics)
        self._tell_statistics()

    def prefetch(self) -> None:
        """Nothing: a rank's parts may be more than the host has page-locked memory for."""

    def _flat(self, source: Source) -> CardFlat:
        count, addresses = self._plan.parameter_count, self.workspace.arrays.addresses
        if isinstance(source, int):
            return CardFlat(self, addresses["slots"] + 4 * kernels.slot_pitch(count) * source, count)
        is_kept = source == "snapshot" and "snapshot" in addresses
        return CardFlat(self, addresses["snapshot" if is_kept else "parameters"], count)

    def _held(self) -> AbstractContextManager[Any]:
        return self.device

    def _new_snapshot(self) -> None:
        with self.device:
            self.state.take_snapshot_array()

    def _read_statistics(self) -> np.ndarray:
        return self.state.read_statistics()

    def _is_own_finite(self) -> bool:
        if by_kernel(self._plan.parameter_count):
            return self.state.is_finite()
        return super()._is_own_finite()

    def _alone(self) -> Program:
        assert self.training is not None
        alone = CudaProgram(self._whole, self.device, self._memory_share, launches_because="its arrays are read")
        alone.attach(self.training.data.dataset, self.training.sampling)
        return alone
