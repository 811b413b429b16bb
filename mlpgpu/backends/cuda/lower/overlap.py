"""Which launches of a plan may begin before the one before them is complete, and what they may read by then; and which
updates run beside what follows them.

Of several ranks it says which launches wait for what was exchanged at the end of the step before.

The rules are those of ``common/dependent_launch.cuh``: when a launch begins, all but the one before it are complete;
until that one is as well, it reads nothing that that one writes, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from ....plan import Plan
from ..kernels.launches import DELTAS, OUTPUTS, At, Collective, Launch, Lowered, Map, Value
from ..select.updates import runs_beside

# Arguments that point to one parameter, or to its slots or parts, in an array of many.
_SEGMENTS = {"w", "other_w", "b", "weight", "bias", "weight_slots", "bias_slots", "db_partials"}
# Arguments that are all of an array in which buffers lie side by side; others there are one buffer.
_WHOLE = {"outputs", "deltas"}

Pointer = tuple[str, At | Map]  # an argument's name, and what it points to


def overlap(lowered: Lowered, plan: Plan, multiprocessors: int) -> Lowered:
    """Let launches of a step, and of an evaluation, overlap where one stream runs them one after another.

    Updates that leave room on so many multiprocessors run on a side stream, beside what follows them.
    """
    evaluation = _chained(lowered.evaluation, None)
    if lowered.pieces:
        return replace(_chained_pieces(_awaiting(lowered, plan)), evaluation=evaluation)
    if len(lowered.shards) != 1 or any(launch.on_side_stream for launch in lowered.shards[0]):
        return replace(lowered, evaluation=evaluation)
    shard = _with_updates_beside(_postponed(lowered.shards[0]), plan.capacity, multiprocessors)
    parts = [lowered.begin, shard, lowered.finish]
    before = next((part[-1] for part in reversed(parts) if part), None)
    joins = any(launch.on_side_stream for launch in shard)
    if joins and not lowered.finish:  # the next step's first launch waits for both streams
        before = None
    for number, part in enumerate(parts):
        if joins and part is lowered.finish:
            before = None
        parts[number] = _chained(part, before)
        before = next((each for each in reversed(parts[number]) if not each.on_side_stream), before)
    begin, shard, finish = parts
    return replace(lowered, begin=begin, shards=[shard], finish=finish, evaluation=evaluation)


def _with_updates_beside(launches: Sequence[Launch], rows: int, multiprocessors: int) -> list[Launch]:
    """Launches, of which updates that leave room on the card are marked to run beside all that follow them.

    Where ranks have parts of a network there are none: what a launch exchanges could be what an update reads.
    """
    made = list(launches)
    if any(launch.exchange for launch in launches):
        return made
    for number, launch in enumerate(launches[:-1]):
        may_run = runs_beside(launch.entry, prod(launch.grid), rows, multiprocessors)
        if may_run and _moves(launch) and not any(_conflict(launch, each) for each in launches[number + 1 :]):
            made[number] = replace(launch, on_side_stream=True)
    return made


def _moves(launch: Launch) -> bool:
    """Whether a launch moves parameters, which are an update's in a step: no other one moves the same."""
    return any(value.array == "parameters" for _, value in _pointers(launch, _is_written))


def _postponed(launches: Sequence[Launch]) -> list[Launch]:
    """Launches with those that split operands, which products wait for, before what nothing in its step waits for."""
    ordered = list(launches)
    for number, (launch, following) in enumerate(pairwise(launches)):
        splits = following.entry.header == "gemm/split_operands.cuh"
        if launch.entry.unawaited and splits and not _conflict(launch, following):
            ordered[number : number + 2] = following, launch
    return ordered


def _chained_pieces(lowered: Lowered) -> Lowered:
    """Launches of a step of several ranks, where one stream has all that products wait for.

    What is exchanged has other streams: a launch that must not run beside it waits for it, and overlaps none before it.
    """
    if len(lowered.shards) != 1:
        return lowered
    parts = [lowered.begin, lowered.shards[0], *(piece.shards[0] for piece in lowered.pieces)]
    before: Launch | None = None
    for number, part in enumerate(parts):
        parts[number] = _chained(part, before)
        before = parts[number][-1] if part else before
    begin, shard, *of_pieces = parts
    pieces = [replace(piece, shards=[part]) for piece, part in zip(lowered.pieces, of_pieces, strict=True)]
    return replace(lowered, begin=begin, shards=[shard], pieces=pieces)


def _chained(launches: Sequence[Launch], before: Launch | None) -> list[Launch]:
    """Launches that follow ``before``, those of them marked that overlap the one before them.

    One that waits for what ranks exchange begins behind that.
    """
    chained: list[Launch] = []
    for launch in launches:
        if launch.on_side_stream:
            chained.append(launch)
            continue
        is_free = not (launch.awaits or launch.receives or launch.exchange)
        takes_part = is_free and before is not None and launch.entry.prefetched is not None
        before = _overlapping(launch, before) if takes_part and before is not None else launch
        chained.append(before)
    return chained


def _overlapping(launch: Launch, before: Launch) -> Launch:
    """The launch as it follows ``before``, which it overlaps unless it would always read too early."""
    assert launch.entry.prefetched is not None
    written = list(_pointers(before, _is_written))

    def is_late(name: str, value: Value) -> bool:
        return isinstance(value, (At, Map)) and any(_may_alias((name, value), other) for other in written)

    late = {bit for name, bit in launch.entry.prefetched if is_late(name, launch.values[name])}
    if 0 in late:
        return launch
    prefetch = sum({bit for _, bit in launch.entry.prefetched} - late)
    values = {**launch.values, "prefetch": prefetch} if "prefetch" in launch.values else launch.values
    return replace(launch, values=values, pdl=True)


def _pointers(launch: Launch, is_asked: Callable[[str], bool]) -> Iterator[Pointer]:
    """Pointer arguments whose C type ``is_asked`` accepts."""
    for argument in launch.entry.arguments:
        value = launch.values[argument.name]
        if isinstance(value, (At, Map)) and is_asked(argument.ctype):
            yield argument.name, value


def _is_written(ctype: str) -> bool:
    return ctype.endswith("*") and not ctype.startswith("const ")


def _may_alias(one: Pointer, other: Pointer) -> bool:
    """Whether two arguments may point to the same elements."""
    (name, a), (other_name, b) = one, other
    names, is_shared = {_of_a_layer(name), _of_a_layer(other_name)}, a.array in (OUTPUTS, DELTAS)
    are_parts = names <= _SEGMENTS or (is_shared and not names & _WHOLE)
    return a.array == b.array and not (are_parts and a != b)


def _of_a_layer(name: str) -> str:
    """The name of an argument without the number of the layer that is behind it, of a launch of several."""
    return name.rstrip("0123456789").removesuffix("_")


def _conflict(one: Launch, other: Launch) -> bool:
    """Whether their order matters."""
    apart = {"parameters", "slots"} if _moves(one) and _moves(other) else set()
    return any(
        _may_alias(a, b)
        for first, second in ((one, other), (other, one))
        for a in _pointers(first, _is_written)
        if a[1].array not in apart
        for b in _pointers(second, lambda _: True)
    )


# --- the exchanges of the step before ---


def _awaiting(lowered: Lowered, plan: Plan) -> Lowered:
    """A step of several ranks: each launch awaits the pieces that conflict with it, unless one before it did.

    Pieces are complete one after another, so who awaited one need await none before it.
    """
    conflicts = _PieceConflicts(lowered, plan)

    def marked(launches: Sequence[Launch], known: set[int]) -> list[Launch]:
        found = []
        for launch in launches:
            new = conflicts.of(launch) - known
            known.update(range(max(new, default=-1) + 1))
            found.append(replace(launch, awaits=tuple(sorted(new))))
        return found

    known: set[int] = set()
    begin = marked(lowered.begin, known)
    shards, pieces = [], [list[list[Launch]]() for _ in lowered.pieces]
    for number, shard in enumerate(lowered.shards):
        of_shard = set(known)
        shards.append(marked(shard, of_shard))
        for piece, to in zip(lowered.pieces, pieces, strict=True):
            to.append(marked(piece.shards[number], of_shard))
    made = [replace(piece, shards=to) for piece, to in zip(lowered.pieces, pieces, strict=True)]
    return replace(lowered, begin=begin, shards=shards, pieces=made)


class _PieceConflicts:
    """Which pieces a launch must not run beside: those that move what it reads, or move or read what it writes.

    What is exchanged at a graph's end no step of it runs beside.
    """

    def __init__(self, lowered: Lowered, plan: Plan) -> None:
        pieces = [(number, piece) for number, piece in enumerate(lowered.pieces) if not piece.at_end]
        self._all = frozenset(number for number, _ in pieces)
        # The pieces that move a parameter, by where it begins.
        self._moved: dict[int, set[int]] = {parameter.offset: set() for parameter in plan.parameters}
        self._written: dict[str, set[int]] = {}  # the pieces that write an array other than parameters
        self._touched: dict[str, set[int]] = {}  # those that read or write it
        for number, piece in pieces:
            for each in piece.exchange:
                if isinstance(each, Collective):
                    for transfer in (*each.sent, *each.received):
                        self._touched.setdefault(transfer.at.array, set()).add(number)
                    for transfer in each.received:
                        self._write(number, transfer.at, transfer.count, plan)
                    continue
                for _, value in _pointers(each, lambda _: True):
                    self._touched.setdefault(value.array, set()).add(number)
                for _, value in _pointers(each, _is_written):
                    if value.array != "parameters":
                        self._written.setdefault(value.array, set()).add(number)
                if "parameters" in each.values and isinstance(moved := each.values["parameters"], At):
                    size = each.values["size"]
                    assert isinstance(size, int)
                    self._write(number, moved, size, plan)

    def _write(self, number: int, at: At, count: int, plan: Plan) -> None:
        if at.array != "parameters":
            self._written.setdefault(at.array, set()).add(number)
            return
        for parameter in plan.parameters:
            if parameter.offset < at.offset + count and at.offset < parameter.end:
                self._moved[parameter.offset].add(number)

    def of(self, launch: Launch) -> set[int]:
        """The numbers of the pieces."""
        found: set[int] = set()
        written = {name for name, _ in _pointers(launch, _is_written)}
        for name, value in _pointers(launch, lambda _: True):
            if value.array == "parameters":
                is_one = name in _SEGMENTS and isinstance(value, At) and value.offset in self._moved
                found |= self._moved[value.offset] if is_one and isinstance(value, At) else self._all
            else:
                found |= (self._touched if name in written else self._written).get(value.array, set())
        return found
