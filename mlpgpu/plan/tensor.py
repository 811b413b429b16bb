"""A plan split into parts: from the plan of a whole network to what one of several ranks computes of it.

Each array of a split layer becomes one for each part that the rank has, named ``0.weight/2`` for part 2, and so does
each operation on them.  What lies between is whole on every rank, and computed alike there.  Where a part needs what
others have, an operation says so: ``SumParts`` and ``JoinParts`` exchange, ``TakeColumns`` takes of what is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ..errors import ConfigurationError
from .operations import (
    ActivationBackward,
    BiasBackward,
    Dense,
    DenseBackward,
    Dropout,
    DropoutBackward,
    Gather,
    JoinParts,
    LocallyConnected,
    LocallyConnectedBackward,
    Operation,
    SumParts,
    TakeColumns,
    Weighted,
    WeightedBackward,
)
from .plan import Buffer, Parameter, Partial, PartOf, Plan, Tensor, split_axis
from .tensor_split import LEAST_WEIGHTS, Parts, Split, Stage, bounds, choose_splits

WHOLE, IN_PARTS = "whole", "in parts"  # where a buffer is: on every rank, or each part's columns where the part is


def split_plan(whole: Plan, parts: Parts, splits: Mapping[str, Split] | None = None) -> Plan:
    """What the rank of ``parts`` computes of a plan for one process.

    ``splits`` says how each layer is split, by its weight; as :func:`splits_of` does if None.

    Raises:
        ConfigurationError: no layer can be split into so many parts.
    """
    splits = splits or splits_of(whole, parts.count)
    if all(split == "whole" for split in splits.values()):
        largest = max(_shapes(whole), key=math.prod, default=None)
        hint = "parallel='data' splits the batch instead"
        expected = f"a dense layer of {LEAST_WEIGHTS:,} weights or more, {parts.count} or more wide, for each its part"
        got = (
            "none" if largest is None else f"at most {math.prod(largest):,}, in a weight {largest[0]:,}×{largest[1]:,}"
        )
        raise ConfigurationError("layers with parallel='tensor'", expected=expected, got=got, hint=hint)
    tensor = Tensor(parts, splits, whole)
    buffers: dict[str, Buffer] = {}
    lists = []
    for operations in (whole.training, whole.evaluation):
        splitter = _Splitter(whole, splits, parts)
        lists.append(splitter.run(operations))
        buffers |= splitter.buffers
    parameters = _parameters(whole.parameters, splits, parts)
    partials = _partials(whole, parameters)
    count, trained = parameters[-1].end, sum(p.size for p in parameters if p.trainable)
    sizes = {"partials": partials[-1].end if partials else 0, "gradient": trained, "slots": count, "parameters": count}
    for name, size in sizes.items():
        if name in whole.buffers:
            flat = whole.buffers[name]
            buffers[name] = replace(flat, shape=(*flat.shape[:-1], size))
    return replace(
        whole,
        parameters=parameters,
        partials=partials,
        buffers=buffers,
        training=tuple(lists[0]),
        evaluation=tuple(lists[1]),
        tensor=tensor,
    )


def splits_of(whole: Plan, count: int) -> Mapping[str, Split]:
    """How each layer is split, by its weight; a layer that is used twice has one weight, and is not."""
    operations = whole.training or whole.evaluation
    layers = [op for op in operations if isinstance(op, Weighted)]
    shapes = {parameter.name: parameter.shape for parameter in whole.parameters}
    with_dx = {op.weight for op in operations if isinstance(op, WeightedBackward) and op.dx}
    gathered = next(op.x for op in operations if isinstance(op, Gather))
    stages = []
    for op in layers:
        is_tied = sum(other.weight == op.weight for other in layers) > 1
        n_in, n_out = shapes[op.weight]
        can_split = isinstance(op, Dense) and not is_tied
        stages.append(Stage(n_in, n_out, n_in * n_out, can_split, op.weight in with_dx, op.x == gathered))
    chosen = choose_splits(stages, count)
    return {op.weight: split for op, split in zip(layers, chosen, strict=True)}


def _shapes(plan: Plan) -> list[tuple[int, ...]]:
    return [p.shape for op in plan.evaluation if isinstance(op, Dense) for p in plan.parameters if p.name == op.weight]


def part_name(name: str, part: int) -> str:
    """The name of one part's array."""
    return f"{name}/{part}"


def _parameters(whole: Sequence[Parameter], splits: Mapping[str, Split], parts: Parts) -> tuple[Parameter, ...]:
    """Those of a rank, each part's arrays beside each other."""
    found: list[Parameter] = []
    for parameter in whole:
        axis = split_axis(parameter, splits)
        if axis is None:
            found.append(replace(parameter, offset=found[-1].end if found else 0))
            continue
        ends = bounds(parameter.shape[axis], parts.count)
        for part in parts.own:
            shape = list(parameter.shape)
            shape[axis] = ends[part + 1] - ends[part]
            of = PartOf(parameter, axis, ends[part], ends[part + 1], part)
            offset = found[-1].end if found else 0
            name = part_name(parameter.name, part)
            found.append(replace(parameter, name=name, shape=tuple(shape), offset=offset, of=of))
    return tuple(found)


def _partials(whole: Plan, parameters: Sequence[Parameter]) -> tuple[Partial, ...]:
    """Those of a rank's parameters, in their order."""
    found: list[Partial] = []
    for parameter in parameters:
        name = parameter.of.whole.name if parameter.of else parameter.name
        for partial in whole.partials:
            if partial.parameter == name:
                own = part_name(partial.name, parameter.of.part) if parameter.of else partial.name
                found.append(Partial(own, parameter.shape, found[-1].end if found else 0, parameter.name))
    return tuple(found)


class _Splitter:
    """Rewrites a list of operations for the parts of a rank, and declares the buffers that it names."""

    def __init__(self, whole: Plan, splits: Mapping[str, Split], parts: Parts) -> None:
        self.buffers: dict[str, Buffer] = {}
        self._whole, self._splits, self._parts = whole, splits, parts
        self._operations: list[tuple[Operation, int | None]] = []  # each with the part that it is of
        self._places: dict[str, set[str]] = {}  # where each buffer is
        self._made: dict[str, str] = {}  # where each buffer was made
        self._list: Sequence[Operation] = ()

    def run(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations of this rank."""
        self._list = operations
        for op in operations:
            _RULES.get(type(op), _Splitter._as_it_is)(self, op)
        return _part_after_part(self._operations)

    def _put(self, op: Operation, part: int | None = None) -> None:
        """Add an operation, on whole buffers or on those of a part."""
        self._operations.append((op, part))

    # --- buffers ---

    def _declare(self, name: str | None) -> str | None:
        """A buffer as the whole plan has it."""
        if name is not None and name in self._whole.buffers:
            self.buffers[name] = self._whole.buffers[name]
            self._places[name], self._made[name] = {WHOLE}, WHOLE
        return name

    def _declare_parts(self, name: str) -> list[str]:
        """A buffer for the columns of each of the rank's parts."""
        ends = bounds(self._width(name), self._parts.count)
        self._places[name], self._made[name] = {IN_PARTS}, IN_PARTS
        return [self._like(name, part_name(name, p), ends[p + 1] - ends[p]) for p in self._parts.own]

    def _like(self, name: str, own: str, width: int) -> str:
        """A buffer like another, of other columns."""
        buffer = self._whole.buffers[name]
        self.buffers[own] = replace(buffer, name=own, shape=(*buffer.shape[:-1], width))
        return own

    def _width(self, name: str) -> int:
        return self._whole.buffers[name].shape[-1]

    def _first(self, name: str, part: int) -> int:
        return bounds(self._width(name), self._parts.count)[part]

    def _need(self, name: str) -> str:
        """A buffer, on every rank."""
        if WHOLE not in self._places[name]:
            made = self._made[name]
            self._put(JoinParts(tuple(part_name(name, p) for p in self._parts.own), name))
            places = self._places[name]
            self._declare(name)
            self._places[name], self._made[name] = places | {WHOLE}, made
        return name

    def _need_parts(self, name: str) -> list[str]:
        """A buffer's columns of each part."""
        names = [part_name(name, p) for p in self._parts.own]
        if IN_PARTS not in self._places[name]:
            places, made = self._places[name], self._made[name]
            self._declare_parts(name)
            self._places[name], self._made[name] = places | {IN_PARTS}, made
            for part, own in zip(self._parts.own, names, strict=True):
                self._put(TakeColumns(name, self._first(name, part), own), part)
        return names

    def _sums(self, y: str) -> list[str]:
        """Buffers of the parts' products, of which ``y`` is made."""
        return [self._like(y, part_name(f"Σ{y}", p), self._width(y)) for p in self._parts.own]

    def _of(self, name: str | None) -> list[str | None]:
        """The names of each part's array of a split parameter or partial."""
        return [None if name is None else part_name(name, p) for p in self._parts.own]

    # --- rules ---

    def _as_it_is(self, op: Operation) -> None:
        """What every rank computes alike, on whole buffers."""
        for name in op.reads:
            if name in self._places:
                self._need(name)
        for name in op.writes:
            if not name.startswith(("partials", "gradient", "slots", "parameters")):
                self._declare(name)
        self._put(op)

    def _gather(self, op: Gather) -> None:
        """Inputs come in parts where nothing needs the whole of them."""
        readers = [other for other in self._list if op.x in other.reads]
        by_rows = (Dense, DenseBackward)
        if not readers or any(not isinstance(r, by_rows) or self._splits[r.weight] != "rows" for r in readers):
            self._as_it_is(op)
            return
        self._declare(op.target)
        self._declare(op.weight)
        for place, (part, x) in enumerate(zip(self._parts.own, self._declare_parts(op.x), strict=True)):
            first = self._first(op.x, part)
            columns = first, first + self.buffers[x].shape[-1]
            own = replace(op, x=x, columns=columns)
            self._put(own if place == 0 else replace(own, target=None, weight=None), part)

    def _dense(self, op: Dense) -> None:
        split = self._splits[op.weight]
        if split == "whole":
            self._as_it_is(op)
        elif split == "columns":
            x = self._need(op.x)
            zs = self._declare_parts(op.z) if op.z else self._of(None)
            ys = self._declare_parts(op.y)
            for part, *own in zip(self._parts.own, self._of(op.weight), self._of(op.bias), zs, ys, strict=True):
                weight, bias, z, y = own
                assert weight is not None and y is not None
                self._put(replace(op, x=x, weight=weight, bias=bias, z=z, y=y), part)
        else:
            sums = self._sums(op.y)
            own_parts = self._parts.own
            for part, x, weight, y in zip(own_parts, self._need_parts(op.x), self._of(op.weight), sums, strict=True):
                assert weight is not None
                self._put(Dense(x, weight, None, "identity", None, y), part)
            self._declare(op.z)
            self._declare(op.y)
            self._put(SumParts(tuple(sums), op.y, op.bias, op.activation, op.z))

    def _dropout(self, op: Dropout | DropoutBackward) -> None:
        """Each part drops units of its own columns; backward as forward."""
        source, result = (op.x, op.y) if isinstance(op, Dropout) else (op.dy, op.dx)
        forward = (
            source
            if isinstance(op, Dropout)
            else next(other.x for other in self._list if isinstance(other, Dropout) and other.layer == op.layer)
        )
        if self._made[forward] == WHOLE:
            self._as_it_is(op)
            return
        width = self._width(source)
        for part, x, y in zip(self._parts.own, self._need_parts(source), self._declare_parts(result), strict=True):
            columns = self._first(source, part), width
            if isinstance(op, Dropout):
                self._put(replace(op, x=x, y=y, part_of=columns), part)
            else:
                self._put(replace(op, dy=x, dx=y, part_of=columns), part)

    def _activation_backward(self, op: ActivationBackward) -> None:
        """In place, where the forward pass saved what it needs."""
        if self._made[op.saved] == WHOLE:
            self._need(op.dy)
            self._put(op)
            self._places[op.dy] = {WHOLE}
            return
        dys = self._need_parts(op.dy)
        for part, saved, dy in zip(self._parts.own, self._of(op.saved), dys, strict=True):
            assert saved is not None
            self._put(ActivationBackward(op.activation, saved, dy), part)
        self._places[op.dy] = {IN_PARTS}

    def _dense_backward(self, op: DenseBackward) -> None:
        split = self._splits[op.weight]
        if split == "whole":
            self._as_it_is(op)
            return
        weights, dweights = self._of(op.weight), self._of(op.dweight)
        if split == "columns":
            dzs, dbiases = self._need_parts(op.dz), self._of(op.dbias)
            xs = [op.x] * len(dzs)
            dxs: Sequence[str | None] = self._sums(op.dx) if op.dx else self._of(None)
        else:  # a bias is whole, and every rank makes its gradient in the same way, whatever its parts are
            dzs, xs = [self._need(op.dz)] * len(weights), [part_name(op.x, p) for p in self._parts.own]
            dbiases = [None] * len(weights)
            if op.dbias is not None:
                self._put(BiasBackward(op.dz, op.dbias))
            dxs = self._declare_parts(op.dx) if op.dx else self._of(None)
        of_parts = zip(self._parts.own, dzs, xs, weights, dweights, dbiases, dxs, strict=True)
        for part, dz, x, weight, dweight, dbias, dx in of_parts:
            assert weight is not None
            self._put(DenseBackward(dz, x, weight, dweight, dbias, dx), part)
        if split == "columns" and op.dx:
            self._declare(op.dx)
            self._put(SumParts(tuple(dx for dx in dxs if dx), op.dx))


def _part_after_part(operations: Sequence[tuple[Operation, int | None]]) -> list[Operation]:
    """Operations with those of one part beside each other: what follows what is the same, however many there are.

    Only those between two operations on whole buffers change places, and no part reads what another one writes.
    """
    found: list[Operation] = []
    for is_of_parts, run in groupby(operations, key=lambda each: each[1] is not None):
        each = list(run)
        found += [op for op, _ in (sorted(each, key=lambda one: one[1] or 0) if is_of_parts else each)]
    return found


_RULES: dict[type[Operation], Callable[[_Splitter, Any], None]] = {
    Gather: _Splitter._gather,
    Dense: _Splitter._dense,
    Dropout: _Splitter._dropout,
    DropoutBackward: _Splitter._dropout,
    ActivationBackward: _Splitter._activation_backward,
    DenseBackward: _Splitter._dense_backward,
    LocallyConnected: _Splitter._as_it_is,
    LocallyConnectedBackward: _Splitter._as_it_is,
}
