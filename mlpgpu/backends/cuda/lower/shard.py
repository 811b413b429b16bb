"""One shard of a plan's rows: where its arrays lie, and what each of its launches is given."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from .... import plan as ops
from ....plan import Plan
from .. import kernels
from ..kernels import Entry, Team, ceil_div
from ..kernels.launches import At, Launch, Lowered, Value

# A product this long along k and this narrow is cut into parts along k, so that it makes up to MOST_PARTS tiles
# of so many columns.  The cut decides in which order sums are made, so it follows the widths alone.
PART_LEAST_K, PART_MOST_N, PART_K, MOST_PARTS, PART_COLUMNS = 4096, 512, 256, 256, 128
MOST_SPLIT_PARTS, SPLIT_DEPTH = 128, 64  # of split operands: a part for nearly each multiprocessor, in whole slices
BLOCKS_PER_MULTIPROCESSOR = 8
MOST_GRID_Y = 65535


def part_length(k: int, n: int) -> int | None:
    """How much of k each part of a product takes; None for the whole of it."""
    if k < PART_LEAST_K or n > PART_MOST_N:
        return None
    return max(PART_K, 16 * ceil_div(k, 16 * (MOST_PARTS // ceil_div(n, PART_COLUMNS))))


def split_part_length(k: int) -> int:
    """As part_length, of a product that is cut and whose operands are split."""
    return max(PART_K, SPLIT_DEPTH * ceil_div(k, SPLIT_DEPTH * MOST_SPLIT_PARTS))


def updates_in_place(plan: Plan, stacked: Collection[str] = ()) -> bool:
    """Whether the products that make gradients also move the parameters.

    Each parameter must have one partial, which is its whole gradient and a dense layer's product makes; or the kernels
    of stacks do without its partials, which are ``stacked``; and nothing may come between.
    """
    made = {name for op in plan.training if isinstance(op, ops.DenseBackward) for name in (op.dweight, op.dbias)}
    others = [partial for partial in plan.partials if partial.name not in stacked]
    return (
        plan.shards == 1
        and plan.reduction == "ordered"
        and len(others) == len({partial.parameter for partial in others})
        and all(partial.name in made for partial in others)
        and not any(isinstance(op, ops.Norm) for op in plan.training)
        and not plan.ends_with_gradient
    )


def partials_pitch(plan: Plan) -> int:
    """Elements from one shard's partial gradients to the next one's."""
    return plan.partials[-1].end if plan.partials else 0


def title(operations: tuple[ops.Operation, ...], operation: ops.Operation) -> str:
    """What launches are marked with that an operation asked for."""
    return f"{operations.index(operation)} {type(operation).__name__}"


@dataclass(frozen=True)
class Setting:
    """What launches depend on beside the plan: the card, and how it holds the data; as :func:`.lowering.lower` says."""

    multiprocessors: int
    arch: str
    source: str
    textured: bool


@dataclass
class Shard:
    """The launches of one shard, as they come to be.

    Attributes:
        number: which of the ``count`` shards it is.
        in_place: whether the products that make gradients also move the parameters.
        rows: the most that it has.
        lowered: what they go into, with the bytes of the arrays that they ask for.
        operations: the plan's list that is being lowered, and ``is_training`` whether that is a step's.
        operation: the title of the one that is being lowered.
        fetched: inputs that their readers fetch from the data set by themselves.
        shapes: of parameters.
        segments: where the names of the plan lie that are parts of an array.
    """

    plan: Plan
    operations: tuple[ops.Operation, ...]
    setting: Setting
    lowered: Lowered
    number: int = 0
    count: int = 1
    in_place: bool = False

    def __post_init__(self) -> None:
        self.is_training = self.operations is self.plan.training
        self.multiprocessors, self.arch = self.setting.multiprocessors, self.setting.arch
        self.rows = ceil_div(self.plan.capacity, self.count)
        self.common: dict[str, Value] = {"step": At("step"), "shard": self.number, "shards": self.count}
        self.launches: list[Launch] = []
        self.operation = ""
        self.fetched: set[str] = set()
        plan, begin = self.plan, self.number * partials_pitch(self.plan)
        self.shapes = {p.name: p.shape for p in plan.parameters}
        self.segments: dict[str, At] = {p.name: At("parameters", p.offset) for p in plan.parameters}
        self.segments |= {s.name: At("statistics", s.offset) for s in plan.statistics}
        self.segments |= {p.name: At("partials", begin + p.offset) for p in plan.partials}

    def rows_of(self, name: str) -> dict[str, Value]:
        """A product's input: a buffer, or rows of the data set by the order."""
        if name in self.fetched:
            return {"x": At("data"), "order": At("order")}
        return {"x": self.at(name), "order": None}

    def at(self, name: str | None) -> Value:
        """The address of a buffer, a parameter, a statistic or a partial."""
        return None if name is None else self.segments.get(name, At(name))

    def stored(self, name: str) -> Value:
        """A buffer of the plan that is really kept in memory."""
        self.lowered.bytes[name] = 4 * math.prod(self.plan.buffers[name].shape)
        return At(name)

    def launch(self, entry: Entry, grid: tuple[int, int, int], **values: Value) -> Launch:
        """One of the operation that is being lowered."""
        return Launch(entry, grid, {**self.common, **values}, self.operation)

    def add(self, entry: Entry, grid: tuple[int, int, int], **values: Value) -> None:
        self.launches.append(self.launch(entry, grid, **values))

    def width(self, name: str) -> int:
        return self.plan.buffers[name].shape[-1]

    def over_elements(self, n: int, per_thread: int = 1) -> tuple[int, int, int]:
        blocks = ceil_div(self.rows * n, kernels.ROW_THREADS * per_thread)
        return max(1, min(blocks, BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors)), 1, 1

    def over_rows(self, team: Team = kernels.WARP_TEAM) -> tuple[int, int, int]:
        """Blocks of teams that have a row each."""
        return ceil_div(self.rows, team.block_rows), 1, 1

    def over_columns(self, n: int, lines: int) -> tuple[int, int, int]:
        """Blocks for n columns and so many lines, of which a block may take several in turn."""
        return ceil_div(n, kernels.ROW_THREADS), min(lines, MOST_GRID_Y), 1

    def taken_in(self, dx: str, following: ops.Operation | None) -> tuple[str, Value]:
        """The activation whose derivative a kernel that writes ``dx`` can apply at once, and what that takes."""
        if isinstance(following, ops.ActivationBackward) and following.dy == dx:
            return following.activation, self.at(following.saved)
        return "identity", None

    def updated(self, op: ops.DenseBackward) -> dict[str, Value]:
        """What a kernel changes that also makes the optimizer's step."""
        bias = next((partial.parameter for partial in self.plan.partials if partial.name == op.dbias), None)
        return {
            "totals": At("totals"), "weight": self.at(op.weight), "bias": self.at(bias),
            "weight_slots": self.slots_of(op.weight), "bias_slots": self.slots_of(bias),
            "size": self.plan.parameter_count,
        }  # fmt: skip

    def slots_of(self, name: str | None) -> Value:
        """Where a parameter's first slot lies; each further one a flat array on."""
        place = self.at(name)
        has_slots = self.plan.optimizer is not None and self.plan.optimizer.slots
        return At("slots", place.offset) if isinstance(place, At) and has_slots else None
