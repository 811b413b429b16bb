"""The state of a network of which ranks have some parts each: read and loaded whole, or piece by piece."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ..plan import Parameter, Parts, Plan, part_name, split_axis
from ..plan.tensor_split import columns_of
from ..ranks import Communicator, communicator
from .base import Histogram, Program, Source, State, count_values
from .base import square_sum as sum_of_squares

PIECE = 1 << 20  # numbers that rank 0 has at a time of what it writes to a file


def all_ranks() -> Communicator:
    """The communicator of the ranks that run a plan together; the first step of all waits for all of them."""
    found = communicator()
    assert found is not None
    return found


def parts_of_plan(plan: Plan) -> Parts:
    """The parts of a plan that has some."""
    assert plan.tensor is not None
    return plan.tensor.parts


class Flat(Protocol):
    """A flat array of a rank's parts: parameters, the snapshot, or a slot, wherever it lies."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def size(self) -> int: ...

    def read(self, first: int, end: int) -> np.ndarray:
        """Elements of it, (end - first,); perhaps a view, of which nothing is kept."""
        ...

    def write(self, first: int, values: np.ndarray) -> None:
        """Put values (count,) there, from element ``first`` on."""
        ...


class HostFlat:
    """A flat array in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.dtype, self.size = array, array.dtype, array.size

    def read(self, first: int, end: int) -> np.ndarray:
        return self._array[first:end]

    def write(self, first: int, values: np.ndarray) -> None:
        self._array[first : first + len(values)] = values


class ProgramOfParts(Program):
    """A plan with parts: a step and an evaluation are computed by all ranks together, each on all rows.

    States, as they are loaded and read, are those of the whole network; a rank keeps its parts of them.  Reading one is
    a call of all ranks, and so is what else looks at more than a rank has.
    """

    is_readable_while_running = False
    _plan: Plan

    # --- what a backend says ---

    @abstractmethod
    def _flat(self, source: Source) -> Flat:
        """This rank's parts of one of the flat arrays; parameters in place of a snapshot that was never kept."""

    @abstractmethod
    def _held(self) -> AbstractContextManager[Any]:
        """While this rank's arrays are looked at or changed."""

    @abstractmethod
    def _new_snapshot(self) -> None:
        """Make room for a snapshot, if there is none."""

    @abstractmethod
    def _read_statistics(self) -> np.ndarray:
        """The statistics, (C,) of the plan's type."""

    @abstractmethod
    def _alone(self) -> Program:
        """A program for the whole network, with the data set and the sampling that steps train on."""

    @property
    def _parts(self) -> Parts:
        return parts_of_plan(self._plan)

    @property
    def _whole(self) -> Plan:
        assert self._plan.tensor is not None
        return self._plan.tensor.whole

    def _slots(self) -> range:
        return range(len(self._plan.optimizer.slots) if self._plan.optimizer is not None else 0)

    # --- state ---

    def load(self, state: State, *, snapshot: bool = False) -> None:
        if snapshot:
            self._new_snapshot()
        with self._held():
            self._scatter(state.parameters[0], self._flat("snapshot" if snapshot else "parameters"))
            if not snapshot:
                for slot, whole in enumerate(state.slots):
                    self._scatter(whole[0], self._flat(slot))
        if not snapshot:
            self.load_statistics(state.statistics[0])

    def _scatter(self, whole: np.ndarray, own: Flat) -> None:
        """Copy this rank's parts of a flat array of the whole network."""
        places = {p.name: p for p in self._whole.parameters}
        for p in self._plan.parameters:
            segment = p.of.whole if p.of else places[p.name]
            values = whole[segment.offset : segment.end].reshape(segment.shape)
            own.write(p.offset, (values[p.of.index] if p.of else values).reshape(-1))

    def read(self, *, snapshot: bool = False) -> State:
        with self.together("_read_along", "read", snapshot), self._held():
            slots = [self._gather(self._flat(slot))[np.newaxis] for slot in self._slots()]
            whole = self._gather(self._flat("snapshot" if snapshot else "parameters"))
            shaped = np.reshape(slots, (len(slots), 1, self._whole.parameter_count)).astype(whole.dtype)
            return State(whole[np.newaxis], shaped, self._read_statistics()[np.newaxis].copy())

    def read_parameters(self) -> np.ndarray:
        with self.together("_read_along", "read_parameters"), self._held():
            return self._gather(self._flat("parameters"))

    def _gather(self, own: Flat) -> np.ndarray:
        """A flat array of the whole network, of each rank's parts."""
        whole = np.empty(self._whole.parameter_count, own.dtype)
        for parameter in self._whole.parameters:
            values = whole[parameter.offset : parameter.end].reshape(parameter.shape)
            self._gather_one(own, parameter, values)
        return whole

    def _gather_one(self, own: Flat, parameter: Parameter, values: np.ndarray) -> None:
        """One array of the whole network, of the flat array of this rank's parts and of others'."""
        segments = {p.name: p for p in self._plan.parameters}
        axis = self._axis(parameter)
        if axis is None:
            segment = segments[parameter.name]
            values[...] = own.read(segment.offset, segment.end).reshape(segment.shape)
            return
        columns = columns_of(parameter.shape[axis], self._parts.count)
        size = parameter.size // parameter.shape[axis]  # of one row or column
        flat = np.empty(parameter.size, own.dtype)
        for part in self._parts.own:
            segment = segments[part_name(parameter.name, part)]
            flat[columns[part].start * size : columns[part].stop * size] = own.read(segment.offset, segment.end)
        if self._parts.ranks > 1:
            owned = [self._parts.of(rank) for rank in range(self._parts.ranks)]
            ends = [*(columns[parts.start].start * size for parts in owned), parameter.size]
            all_ranks().all_gather(flat, [slice(*pair) for pair in pairwise(ends)])
        for piece_of in columns:
            piece = flat[piece_of.start * size : piece_of.stop * size]
            index = (*(slice(None),) * axis, piece_of)
            values[index] = piece.reshape(values[index].shape)

    def _axis(self, parameter: Parameter) -> int | None:
        """Along which axis a parameter of the whole network is split."""
        assert self._plan.tensor is not None
        return split_axis(parameter, self._plan.tensor.splits)

    # --- piece by piece ---

    def own_parts(self, name: str) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        with self._held():
            own = self._flat("parameters")
            return [
                (p.of.index if p.of else (slice(None),), own.read(p.offset, p.end).reshape(p.shape).copy())
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
            self._new_snapshot()
        with self._held():
            flat = self._flat(source)
            places = {p.name: place for place, p in enumerate(self._whole.parameters)}
            for p in self._plan.parameters:
                whole, row = p.of.whole if p.of else p, p.size // p.shape[0]
                begin = p.of.first if p.of and p.of.axis == 0 else 0
                at_a_time = max(1, PIECE * whole.shape[0] // whole.size)
                for first in range(0, p.shape[0], at_a_time):
                    end = min(first + at_a_time, p.shape[0])
                    piece = rows(places[whole.name], begin + first, begin + end)
                    taken = piece[p.of.index] if p.of and p.of.axis == 1 else piece
                    flat.write(p.offset + first * row, taken.reshape(-1))

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

    def _pieces_of(self, own: Flat, parameter: Parameter) -> Iterator[np.ndarray]:
        """One array, in pieces of whole rows, each exchanged when it is asked for; nothing of use on other ranks."""
        segments = {p.name: p for p in self._plan.parameters}
        axis = self._axis(parameter)
        row = parameter.size // parameter.shape[0]
        at_a_time = max(1, PIECE // row)
        parts, length = self._parts, parameter.shape[0]
        if axis is None:
            for first in range(0, length, at_a_time):
                yield self._rows(own, segments[parameter.name], first, min(first + at_a_time, length))
            return
        columns = columns_of(parameter.shape[axis], parts.count)
        mine = {part: segments[part_name(parameter.name, part)] for part in parts.own}
        if axis == 0:
            owner = {part: rank for rank in range(parts.ranks) for part in parts.of(rank)}
            for part, rows in enumerate(columns):
                for first in range(rows.start, rows.stop, at_a_time):
                    end = min(first + at_a_time, rows.stop)
                    shape = (end - first, *parameter.shape[1:])
                    taken = first - rows.start, end - rows.start
                    sent = self._rows(own, mine[part], *taken) if part in mine else None
                    yield self._sent_to_first({owner[part]: (sent, shape)}, own.dtype)[owner[part]]
            return
        for first in range(0, length, at_a_time):
            end = min(first + at_a_time, length)
            messages = {}
            for rank in range(parts.ranks):
                theirs = parts.of(rank)
                width = columns[theirs[-1]].stop - columns[theirs[0]].start
                is_own = rank == parts.rank
                beside = np.hstack([self._rows(own, mine[part], first, end) for part in theirs]) if is_own else None
                messages[rank] = beside, (end - first, width)
            got = self._sent_to_first(messages, own.dtype)
            yield np.hstack([got[rank] for rank in range(parts.ranks)]) if parts.rank == 0 else got[parts.rank]

    def _rows(self, own: Flat, segment: Parameter, first: int, end: int) -> np.ndarray:
        """Rows of one of this rank's arrays."""
        row = segment.size // segment.shape[0]
        with self._held():
            values = own.read(segment.offset + first * row, segment.offset + end * row)
        return values.reshape(-1, *segment.shape[1:])

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
            own = self._is_own_finite()
            return own if self._parts.ranks == 1 else all(all_ranks().gather(own))

    def _is_own_finite(self) -> bool:
        """Whether what this rank has is finite."""
        with self._held():
            flat = self._flat("parameters")
            firsts = range(0, flat.size, PIECE)
            return all(bool(np.isfinite(flat.read(first, min(first + PIECE, flat.size))).all()) for first in firsts)

    def square_sum(self, parts: Sequence[slice]) -> float:
        with self.together("_read_along", "square_sum", parts):
            return sum_of_squares(self.read_parameters(), parts)

    def histograms(self, bins: int) -> dict[str, Histogram]:
        with self.together("_read_along", "histograms", bins), self._held():
            found, own = {}, self._flat("parameters")
            for parameter in self._whole.parameters:  # one at a time, since no rank may have room for all
                values = np.empty(parameter.shape, own.dtype)
                self._gather_one(own, parameter, values)
                found[parameter.name] = count_values(values, bins)
            return found

    def sample(self, rows: int, step: int, bins: int) -> dict[str, Histogram]:
        """As :meth:`Program.sample`; each rank computes it on the whole network."""
        with self.together("_read_along", "sample", rows, step, bins):
            state, alone = self.read(), self._alone()
            try:
                alone.load(state)
                return alone.sample(rows, step, bins)
            finally:
                alone.close()
