"""A program of one of several ranks that have parts of a network each."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from ...errors import room_for
from ...initializers import draw_part
from ..base import Program, Source
from ..parts import HostFlat, ProgramOfParts
from .program import CpuProgram


class TensorProgram(ProgramOfParts, CpuProgram):
    """A plan with parts, in this process's memory."""

    is_readable_while_running = False

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        with self._lock.held(), room_for("the layers' parameters", "more ranks have less each"):
            for p in self._plan.parameters:
                shape, index = (p.of.whole.shape, p.of.index) if p.of else (p.shape, (slice(None),))
                out = self._work.arrays[p.name]
                draw_part(out, p.initializer, shape, index, p.fans, seed=seed, layer=p.layer, purpose=p.purpose)
            self._work.slots.fill(0.0)
            self._work.set_statistics(statistics[0])

    def load_statistics(self, statistics: np.ndarray) -> None:
        with self._lock.held():
            self._work.set_statistics(statistics)

    def _flat(self, source: Source) -> HostFlat:
        if isinstance(source, int):
            return HostFlat(self._work.slots[source])
        is_kept = source == "snapshot" and self._snapshot is not None
        return HostFlat(self._snapshot if is_kept and self._snapshot is not None else self._work.parameters)

    def _held(self) -> AbstractContextManager[None]:
        return self._lock.held()

    def _new_snapshot(self) -> None:
        self._snapshot = np.empty_like(self._work.parameters)

    def _read_statistics(self) -> np.ndarray:
        return self._work.statistics

    def _alone(self) -> Program:
        assert self._training is not None
        alone = CpuProgram(self._whole, self._thread_count)
        alone.attach(self._training[0].dataset, self._training[1])
        return alone
