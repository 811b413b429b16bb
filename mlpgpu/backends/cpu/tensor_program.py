"""A program of one of several ranks that have parts of a network each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...errors import room_for
from ...initializers import draw_part
from ...plan import Parameter, Plan, split_axis
from ...plan.tensor import part_name
from ...plan.tensor_split import columns_of
from ..base import Histogram, Source, State
from ..base import square_sum as sum_of_squares
from .between_parts import all_ranks, parts_of_plan
from .program import CpuProgram, count_values

PIECE = 1 << 20  # numbers that rank 0 has at a time of what it writes to a file


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
        with self.together("_read_along", "read", snapshot):
            parameters = self._snapshot if snapshot and self._snapshot is not None else self._work.parameters
            with self._lock.held():
                slots = [self._gather(slot)[np.newaxis] for slot in self._work.slots]
                whole = self._gather(parameters)
                shaped = np.reshape(slots, (len(slots), 1, self._whole.parameter_count)).astype(whole.dtype)
                return State(whole[np.newaxis], shaped, self._work.statistics[np.newaxis].copy())

    def read_parameters(self) -> np.ndarray:
        with self.together("_read_along", "read_parameters"), self._lock.held():
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

    # --- piece by piece ---

    def own_parts(self, name: str) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        with self._lock.held():
            return [
                (p.of.index if p.of else (slice(None),), self._work.arrays[p.name].copy())
                for p in self._plan.parameters
                if name == (p.of.whole.name if p.of else p.name)
            ]

    def pieces(self, source: Source, places: Sequence[int]) -> Iterator[np.ndarray]:
        """Parameters, the snapshot, or a slot by its number, of the whole network, on rank 0, which alone calls this.

        ``places`` are those of the arrays in the whole plan, one after another; each comes in pieces along its first
        axis, which no longer hold once the next is asked for.  The other ranks call :meth:`send_pieces` meanwhile.
        """
        if self._parts.ranks > 1:
            all_ranks().broadcast((source, tuple(places)))
        coming = self._exchanged(source, places)
        try:
            yield from coming
        finally:
            for _ in coming:  # which the others send anyway
                pass

    def load_pieces(self, source: Source, rows: Callable[[int, int, int], np.ndarray]) -> None:
        if source == "snapshot":
            self._snapshot = np.empty_like(self._work.parameters)
        with self._lock.held():
            flat = self._flat(source)
            places = {p.name: place for place, p in enumerate(self._whole.parameters)}
            for p in self._plan.parameters:
                whole, own = p.of.whole if p.of else p, flat[p.offset : p.end].reshape(p.shape)
                begin = p.of.first if p.of and p.of.axis == 0 else 0
                at_a_time = max(1, PIECE * whole.shape[0] // whole.size)
                for first in range(0, len(own), at_a_time):
                    end = min(first + at_a_time, len(own))
                    piece = rows(places[whole.name], begin + first, begin + end)
                    own[first:end] = piece[p.of.index] if p.of and p.of.axis == 1 else piece

    def load_statistics(self, statistics: np.ndarray) -> None:
        with self._lock.held():
            self._work.set_statistics(statistics)

    def send_pieces(self) -> Any:
        """Send rank 0 this one's parts of what it asks for, until it ends that; returns what it then says."""
        while (asked := all_ranks().broadcast())[0] is not None:
            for _ in self._exchanged(*asked):
                pass
        return asked[1]

    def end_pieces(self, told: Any) -> None:
        """Have :meth:`send_pieces` of the others return ``told``, on rank 0."""
        if self._parts.ranks > 1:
            all_ranks().broadcast((None, told))

    def _exchanged(self, source: Source, places: Sequence[int]) -> Iterator[np.ndarray]:
        for place in places:
            yield from self._pieces_of(self._flat(source), self._whole.parameters[place])

    def _flat(self, source: Source) -> np.ndarray:
        """This rank's parts of one of the flat arrays."""
        if isinstance(source, int):
            return self._work.slots[source]
        is_kept = source == "snapshot" and self._snapshot is not None
        return self._snapshot if is_kept and self._snapshot is not None else self._work.parameters

    def _pieces_of(self, own: np.ndarray, parameter: Parameter) -> Iterator[np.ndarray]:
        """One array, in pieces of whole rows, each exchanged when it is asked for; nothing of use on other ranks."""
        segments = {p.name: p for p in self._plan.parameters}
        axis = split_axis(parameter, self._splits)
        if axis is None:
            segment = segments[parameter.name]
            yield own[segment.offset : segment.end].reshape(segment.shape)
            return
        parts, length = self._parts, parameter.shape[0]
        columns = columns_of(parameter.shape[axis], parts.count)
        mine = {part: segments[part_name(parameter.name, part)] for part in parts.own}
        arrays = {part: own[s.offset : s.end].reshape(s.shape) for part, s in mine.items()}
        row = parameter.size // length
        at_a_time = max(1, PIECE // row)
        if axis == 0:
            owner = {part: rank for rank in range(parts.ranks) for part in parts.of(rank)}
            for part, rows in enumerate(columns):
                for first in range(rows.start, rows.stop, at_a_time):
                    end = min(first + at_a_time, rows.stop)
                    taken = slice(first - rows.start, end - rows.start)
                    shape = (end - first, *parameter.shape[1:])
                    sent = arrays[part][taken] if part in arrays else None
                    yield self._sent_to_first({owner[part]: (sent, shape)}, own.dtype)[owner[part]]
            return
        for first in range(0, length, at_a_time):
            rows = slice(first, min(first + at_a_time, length))
            count = rows.stop - rows.start
            messages = {}
            for rank in range(parts.ranks):
                theirs = parts.of(rank)
                width = columns[theirs[-1]].stop - columns[theirs[0]].start
                beside = np.hstack([arrays[part][rows] for part in theirs]) if rank == parts.rank else None
                messages[rank] = beside, (count, width)
            got = self._sent_to_first(messages, own.dtype)
            yield np.hstack([got[rank] for rank in range(parts.ranks)]) if parts.rank == 0 else got[parts.rank]

    def _sent_to_first(
        self, messages: Mapping[int, tuple[np.ndarray | None, tuple[int, ...]]], dtype: np.dtype
    ) -> dict[int, np.ndarray]:
        """What ranks send to rank 0, by rank, as it has it; others have what they sent.

        Arguments:
            messages: of each rank that sends, its array where it is this rank, and the array's shape.
        """
        nothing, ranks, rank = np.empty(0, dtype), self._parts.ranks, self._parts.rank
        found = {source: np.ascontiguousarray(array) for source, (array, _) in messages.items() if array is not None}
        if ranks == 1:
            return found
        sent, received = [nothing] * ranks, [nothing] * ranks
        if rank == 0:
            for source, (_, shape) in messages.items():
                if source != 0:
                    found[source] = received[source] = np.empty(shape, dtype)
        elif rank in found:
            sent[0] = found[rank]
        all_ranks().exchange(sent, received)
        return {source: found.get(source, nothing) for source in messages}

    # --- what looks at more than a rank has ---

    def is_finite(self) -> bool:
        with self.together("_read_along", "is_finite"):
            with self._lock.held():
                flat = self._work.parameters
                own = all(np.isfinite(flat[first : first + PIECE]).all() for first in range(0, len(flat), PIECE))
            return own if self._parts.ranks == 1 else all(all_ranks().gather(own))

    def square_sum(self, parts: Sequence[slice]) -> float:
        with self.together("_read_along", "square_sum", parts):
            return sum_of_squares(self.read_parameters(), parts)

    def histograms(self, bins: int) -> dict[str, Histogram]:
        with self.together("_read_along", "histograms", bins), self._lock.held():
            found = {}
            for parameter in self._whole.parameters:  # one at a time, since no rank may have room for all
                values = np.empty(parameter.shape, self._work.dtype)
                self._gather_one(self._work.parameters, parameter, values)
                found[parameter.name] = count_values(values, bins)
            return found

    def sample(self, rows: int, step: int, bins: int) -> dict[str, Histogram]:
        """As :meth:`Program.sample`; each rank computes it on the whole network."""
        assert self._training is not None
        with self.together("_read_along", "sample", rows, step, bins):
            alone = CpuProgram(self._whole, self._thread_count)
            alone.load(self.read())
            alone.attach(self._training[0].dataset, self._training[1])
            return alone.sample(rows, step, bins)
