"""One shard of a plan's rows: where its arrays lie, and what each of its launches is given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..... import plan as ops
from .....plan import Plan, bounds, inputs_of
from .....random import least_kept
from ... import kernels
from ...kernels import Entry, Team, ceil_div, strided_grid
from ...kernels.launches import BLOCKS_PER_MULTIPROCESSOR, KEPT_ELEMENTS, At, Launch, Lowered, Value
from ...select.select import Selection
from ..groups import Group

MOST_GRID_Y = 65535

Grid = tuple[int, int, int]
PARTS_OF = "parts of "  # what arrays' names begin with in which parts of all ranks lie
PARTS_ROWS = 16  # that such an array's rows are a multiple of, so that each part begins with a vector


def rows_of_parts(plan: Plan) -> int:
    """The rows of each part in such an array."""
    return ceil_div(plan.capacity, PARTS_ROWS) * PARTS_ROWS


def places_of_parts(plan: Plan, op: ops.BetweenParts) -> dict[str, At]:
    """Where this rank's parts lie, among those of all: whole ones one behind the other, or the columns of each."""
    assert plan.tensor is not None
    parts, width, rows = plan.tensor.parts, plan.buffers[op.y].shape[-1], rows_of_parts(plan)
    ends = bounds(width, parts.count) if isinstance(op, ops.JoinParts) else range(0, parts.count * width, width)
    return {name: At(PARTS_OF + op.y, rows * ends[part]) for part, name in zip(parts.own, op.parts, strict=True)}


def partials_pitch(plan: Plan) -> int:
    """Elements from one shard's partial gradients to the next one's."""
    return plan.partials[-1].end if plan.partials else 0


@dataclass
class Shard:
    """The launches of one shard, as they come to be.

    Attributes:
        lowered: what they go into, with the bytes of the arrays that they ask for.
        number: which of the shards it is.
        first: the first of those that the rank computes.
        launches: those that there are so far.
        shapes: of parameters.
        segments: where the names of the plan lie that are parts of an array.
        read_as_fragments: buffers of which a kernel that makes them leaves fragments too.
        fragments: of which there are some so far.
    """

    selection: Selection
    lowered: Lowered
    number: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        self.plan, self.work, self.setting = self.selection.plan, self.selection.work, self.selection.work.setting
        self.multiprocessors, self.rows = self.setting.multiprocessors, self.work.rows
        self.common: dict[str, Value] = {"step": At("step"), "shard": self.number, "shards": self.work.shards}
        self.launches: list[Launch] = []
        plan, begin = self.plan, (self.number - self.first) * partials_pitch(self.plan)
        self.shapes = {p.name: p.shape for p in plan.parameters}
        self.segments: dict[str, At] = {p.name: At("parameters", p.offset) for p in plan.parameters}
        self.segments |= {s.name: At("statistics", s.offset) for s in plan.statistics}
        self.segments |= {p.name: At("partials", begin + p.offset) for p in plan.partials}
        self.read_as_fragments: frozenset[str] = frozenset()
        self.fragments: set[str] = set()
        self._kept: dict[int, int] = {}  # by a dropout's layer, where the words begin that say what it keeps
        self.inputs: dict[str, At] = {}  # where the rows lie of which a gather makes a buffer
        for each in self.selection.operations:
            op = each.operation
            if isinstance(op, ops.Gather):
                self.inputs[op.x] = At(inputs_of(op))
            elif isinstance(op, ops.BetweenParts):
                self.segments |= places_of_parts(plan, op)

    def rows_of(self, name: str, by_order: bool) -> dict[str, Value]:
        """A product's input: a buffer, or rows of the data set by the order."""
        if by_order:
            return {"x": self.inputs[name], "order": At("order")}
        return {"x": self.ref(name), "order": None}

    def ref(self, name: str | None) -> Value:
        """The address of a buffer, a parameter, a statistic or a partial."""
        return None if name is None else self.segments.get(name, At(name))

    def stored(self, name: str | None) -> Value:
        """A buffer of the plan that is really kept in memory: an array of its own, or where it lies beside others."""
        if name is None or name in self.segments:
            return self.ref(name)
        self.lowered.bytes[name] = 4 * math.prod(self.plan.buffers[name].shape)
        return At(name)

    def room(self, name: str, size: int) -> At:
        """An array of the program's own, of at least so many bytes."""
        self.lowered.bytes[name] = max(self.lowered.bytes.get(name, 0), size)
        return At(name)

    def launch(self, group: Group, entry: Entry, grid: Grid, **values: Value) -> Launch:
        return Launch(entry, grid, {**self.common, **values}, group.title)

    def add(self, group: Group, entry: Entry, grid: Grid, **values: Value) -> None:
        self.launches.append(self.launch(group, entry, grid, **values))

    def width(self, name: str) -> int:
        return self.plan.buffers[name].shape[-1]

    def over_elements(self, n: int, per_thread: int = 1) -> Grid:
        return strided_grid(self.rows * n, self.most_blocks, per_thread)

    @property
    def most_blocks(self) -> int:
        """Of a kernel whose threads stride over an array."""
        return BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors

    def over_rows(self, team: Team) -> Grid:
        """Blocks of teams that have a row each."""
        return ceil_div(self.rows, team.block_rows), 1, 1

    def over_columns(self, n: int, rows: int) -> Grid:
        """Blocks for n columns and so many rows, of which a block may take several in turn."""
        return ceil_div(n, kernels.ROW_THREADS), min(rows, MOST_GRID_Y), 1

    def dropout(self, op: ops.Dropout | ops.DropoutBackward | None) -> dict[str, Value]:
        """What a kernel is told of a dropout; one that keeps 0 times what it is given is none."""
        if op is None:
            return {"seed": At("seed"), "layer": 0, "least": 0, "keep": 0.0}
        return {"seed": At("seed"), "layer": op.layer, "least": least_kept(op.rate), "keep": 1.0 / (1.0 - op.rate)}

    def lay_kept(self, op: ops.Dropout) -> int:
        """Where the words begin that say which elements a dropout keeps, behind those of others."""
        of_step, words = self.lowered.staged_bytes, self.rows * ceil_div(self.width(op.x), kernels.KEPT_BITS)
        begin = of_step.get(self.kept_elements, 0) // 4
        of_step[self.kept_elements] = 4 * (begin + words)
        self._kept[op.layer] = begin
        return begin

    @property
    def kept_elements(self) -> str:
        """The name of the shard's array of such words."""
        return f"{KEPT_ELEMENTS}@{self.number}"

    def kept(self, op: ops.Dropout | ops.DropoutBackward | None) -> dict[str, Value]:
        """What a product is told of a dropout that it ends with; of none, null and a factor of 1."""
        if op is None:
            return {"kept": None, "keep": 1.0}
        return {"kept": At(self.kept_elements, self._kept[op.layer]), "keep": 1.0 / (1.0 - op.rate)}

    def updated(self, op: ops.DenseBackward) -> dict[str, Value]:
        """What a kernel changes that also makes the optimizer's step."""
        bias = next((partial.parameter for partial in self.plan.partials if partial.name == op.dbias), None)
        return {
            "totals": At("totals"), "weight": self.ref(op.weight), "bias": self.ref(bias),
            "weight_slots": self.slots_of(op.weight), "bias_slots": self.slots_of(bias),
            "size": self.slot_pitch,
        }  # fmt: skip

    def slots_of(self, name: str | None) -> Value:
        """Where a parameter's first slot lies; each further one a flat array on."""
        start = self.ref(name)
        has_slots = self.plan.optimizer is not None and self.plan.optimizer.slots
        return At("slots", start.offset) if isinstance(start, At) and has_slots else None

    @property
    def slot_pitch(self) -> int:
        """Elements from one slot of the optimizer to the next."""
        return kernels.slot_pitch(self.plan.parameter_count)

    @property
    def optimizer(self) -> str:
        """The name of the plan's optimizer."""
        return type(self.plan.optimizer).__name__

    @property
    def rule(self) -> str:
        """By which products move parameters in place."""
        assert self.plan.optimizer is not None
        return kernels.rule_of(self.plan.optimizer)
