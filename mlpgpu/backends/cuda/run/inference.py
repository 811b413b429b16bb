"""Predictions on a card."""

from __future__ import annotations

import threading

import numpy as np

from ....datasets import Dataset
from ....errors import DataError
from ....plan import Plan
from ...base import MEMORY_SHARE, Inference, State
from ..runtime import Device
from .program import CudaProgram


class CudaInference(Inference):
    """A plan on a card, for one call at a time."""

    def __init__(self, plan: Plan, device: Device) -> None:
        self._program: CudaProgram | None = CudaProgram(plan, device, MEMORY_SHARE)
        self._lock = threading.Lock()

    def load(self, state: State) -> None:
        with self._lock:
            assert self._program is not None
            self._program.load(state)

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        with self._lock:
            assert self._program is not None
            self._program.draw(seed, statistics)

    def run(
        self,
        x: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
        scale: float | None = None,
        logits: bool = False,
    ) -> bool:
        try:
            dataset = Dataset(x if rows is None else x[rows], scale=scale)
        except DataError:
            return False
        with self._lock:
            assert self._program is not None
            out[...] = self._program.predict(dataset, logits=logits)
        return True

    def close(self) -> None:
        with self._lock:
            self._program = None
