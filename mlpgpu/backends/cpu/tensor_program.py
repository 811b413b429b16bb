"""A program of one of several ranks that have parts of a network each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...errors import room_for
from ...initializers import draw_part
from ...plan import Parameter, Plan
from ...plan.tensor import part_name, split_axis
from ...plan.tensor_split import columns_of
from ..base import Histogram, State
from ..base import square_sum as sum_of_squares
from .between_parts import all_ranks, parts_of_plan
from .program import CpuProgram, count_values


class TensorProgram(CpuProgram):
    """A plan with parts: a step and an evaluation are computed by all ranks together, each on all rows.

    States, as they are loaded and read, are those of the whole network; a rank keeps its parts of them.  Reading one is
    a call of all ranks, and so is what else looks at more than a rank has.
    """

    is_readable_while_running = False

    def __init__(self, plan: Plan, threads: int) -> None:
        super().__init__(plan, threads)
        self._parts = parts_of_plan(plan)
        assert plan.tensor is not None
        self._whole, self._splits = plan.tensor.whole, plan.tensor.splits

    # --- state ---

    def load(self, state: State, *, snapshot: bool = False) -> None:
        if snapshot:
            self._snapshot = np.empty_like(self._work.parameters)
            self._scatter(state.parameters[0], self._snapshot)
            return
        with self._lock.held():
            self._scatter(state.parameters[0], self._work.parameters)
            for whole, own in zip(state.slots, self._work.slots, strict=True):
                self._scatter(whole[0], own)
            self._work.set_statistics(state.statistics[0])

    def _scatter(self, whole: np.ndarray, own: np.ndarray) -> None:
        """Copy this rank's parts of a flat array of the whole network."""
        places = {p.name: p for p in self._whole.parameters}
        for p in self._plan.parameters:
            segment = p.of.whole if p.of else places[p.name]
            values = whole[segment.offset : segment.end].reshape(segment.shape)
            own[p.offset : p.end].reshape(p.shape)[...] = values[p.of.index] if p.of else values

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        with self._lock.held(), room_for("the layers' parameters", "more ranks have less each"):
            for p in self._plan.parameters:
                shape, index = (p.of.whole.shape, p.of.index) if p.of else (p.shape, (slice(None),))
                out = self._work.arrays[p.name]
                draw_part(out, p.initializer, shape, index, p.fans, seed=seed, layer=p.layer, purpose=p.purpose)
            self._work.slots.fill(0.0)
            self._work.set_statistics(statistics[0])

    def read(self, *, snapshot: bool = False) -> State:
        with self.together("read_along", "read", snapshot):
            parameters = self._snapshot if snapshot and self._snapshot is not None else self._work.parameters
            with self._lock.held():
                slots = [self._gather(slot)[np.newaxis] for slot in self._work.slots]
                whole = self._gather(parameters)
                shaped = np.reshape(slots, (len(slots), 1, self._whole.parameter_count)).astype(whole.dtype)
                return State(whole[np.newaxis], shaped, self._work.statistics[np.newaxis].copy())

    def read_parameters(self) -> np.ndarray:
        with self.together("read_along", "read_parameters"), self._lock.held():
            return self._gather(self._work.parameters)

    def _gather(self, own: np.ndarray) -> np.ndarray:
        """A flat array of the whole network, of each rank's parts."""
        whole = np.empty(self._whole.parameter_count, own.dtype)
        for parameter in self._whole.parameters:
            values = whole[parameter.offset : parameter.end].reshape(parameter.shape)
            self._gather_one(own, parameter, values)
        return whole

    def _gather_one(self, own: np.ndarray, parameter: Parameter, values: np.ndarray) -> None:
        """One array of the whole network, of the flat array of this rank's parts and of others'."""
        segments = {p.name: p for p in self._plan.parameters}
        axis = split_axis(parameter, self._splits)
        if axis is None:
            segment = segments[parameter.name]
            values[...] = own[segment.offset : segment.end].reshape(segment.shape)
            return
        columns = columns_of(parameter.shape[axis], self._parts.count)
        size = parameter.size // parameter.shape[axis]  # of one row or column
        flat = np.empty(parameter.size, own.dtype)
        for part in self._parts.own:
            segment = segments[part_name(parameter.name, part)]
            flat[columns[part].start * size : columns[part].stop * size] = own[segment.offset : segment.end]
        if self._parts.ranks > 1:
            owned = [self._parts.of(rank) for rank in range(self._parts.ranks)]
            ends = [*(columns[parts.start].start * size for parts in owned), parameter.size]
            all_ranks().all_gather(flat, [slice(*pair) for pair in pairwise(ends)])
        for piece_of in columns:
            piece = flat[piece_of.start * size : piece_of.stop * size]
            index = (*(slice(None),) * axis, piece_of)
            values[index] = piece.reshape(values[index].shape)

    def is_finite(self) -> bool:
        with self.together("read_along", "is_finite"):
            own = super().is_finite()
            return own if self._parts.ranks == 1 else all(all_ranks().gather(own))

    def square_sum(self, parts: Sequence[slice]) -> float:
        with self.together("read_along", "square_sum", parts):
            return sum_of_squares(self.read_parameters(), parts)

    def histograms(self, bins: int) -> dict[str, Histogram]:
        with self.together("read_along", "histograms", bins), self._lock.held():
            found = {}
            for parameter in self._whole.parameters:  # one at a time, since no rank may have room for all
                values = np.empty(parameter.shape, self._work.dtype)
                self._gather_one(self._work.parameters, parameter, values)
                found[parameter.name] = count_values(values, bins)
            return found

    def sample(self, rows: int, step: int, bins: int) -> dict[str, Histogram]:
        """As :meth:`Program.sample`; each rank computes it on the whole network."""
        assert self._training is not None
        with self.together("read_along", "sample", rows, step, bins):
            alone = CpuProgram(self._whole, self._thread_count)
            alone.load(self.read())
            alone.attach(self._training[0].dataset, self._training[1])
            return alone.sample(rows, step, bins)
