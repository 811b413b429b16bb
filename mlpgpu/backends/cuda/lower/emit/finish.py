"""What is done once, when all shards are through: ``elementwise/update.cuh``.

And gradients of biases that no product makes: ``elementwise/delta_sums.cuh``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .....plan import Plan, block_size
from ... import kernels
from ...kernels import Entry, ceil_div, padded_rows, strided_grid
from ...kernels.launches import BLOCKS_PER_MULTIPROCESSOR, SQUARES, At, Launch, Value
from ..groups import ClipNorm, Group, ReducePartials, SumBiases, SumDelta, TotalError, UpdateAll, UpdateBiases
from .gemm import BIAS_PARTIALS, PARTIAL_BIASES
from .operands import bias_sum, columns_of, format_of, of_shard
from .parts import exchange_all
from .rows import SUMS_BYTES
from .shard import Grid, Shard, partials_pitch

BIAS_WORDS = 6  # of PartialBias of elementwise/update.cuh


def total_error(shard: Shard, group: TotalError) -> None:
    shard.launches.append(loss_and_weight(shard, group.title))


def loss_and_weight(shard: Shard, title: str) -> Launch:
    """The batch's loss and weight, from the sums that all shards have left."""
    blocks = shard.lowered.bytes["sums"] // SUMS_BYTES
    values: dict[str, Value] = {
        "step": At("step"), "sums": At("sums"), "count": blocks, "totals": At("totals"), "losses": At("losses"),
    }  # fmt: skip
    return Launch(kernels.total_error(), (1, 1, 1), values, title)


def over(shard: Shard, elements: int) -> Grid:
    return strided_grid(elements, BLOCKS_PER_MULTIPROCESSOR * shard.multiprocessors)


def reduce(shard: Shard, group: ReducePartials) -> None:
    """A launch for each parameter that is trained."""
    plan = shard.plan
    shard.lowered.bytes["gradient"] = 4 * plan.gradient_count
    for segment in plan.gradient:
        uses = [partial for partial in plan.partials if partial.parameter == segment.name]
        values: dict[str, Value] = {
            "partials": At("partials", uses[0].offset), "pitch": partials_pitch(plan), "shards": plan.shards,
            "uses": len(uses), "size": segment.size, "gradient": At("gradient", segment.offset),
        }  # fmt: skip
        grid = over(shard, plan.gradient_count)
        shard.launches.append(Launch(kernels.reduce(), grid, values, group.title))


def clip(shard: Shard, group: ClipNorm) -> None:
    """Squares, block by block, then the factor."""
    gradient = At("gradient" if group.is_reduced else "partials")
    if shard.plan.tensor is not None:
        clip_parts(shard, gradient.array, group.title)
        return
    shard.launches.append(squares(shard.plan, gradient, slice(0, shard.plan.gradient_count), group.title))
    shard.launches.append(factor(shard, group.title))


def squares(plan: Plan, gradient: At, part: slice, title: str) -> Launch:
    """The sums of squares of a part of the flat gradient, whole blocks of it, which begins at ``gradient``."""
    size, block = part.stop - part.start, block_size(plan.gradient_count)
    values: dict[str, Value] = {
        "gradient": gradient, "size": size, "part": block, "sums": At("squares", part.start // block),
    }  # fmt: skip
    return Launch(kernels.squares(), (ceil_div(size, block), 1, 1), values, title)


def factor(shard: Shard, title: str) -> Launch:
    """The factor of a clipped norm, from the sums of squares of all blocks."""
    return factor_of(shard, ceil_div(shard.plan.gradient_count, block_size(shard.plan.gradient_count)), title)


def factor_of(shard: Shard, blocks: int, title: str) -> Launch:
    """The factor, from the sums of squares of so many blocks."""
    shard.lowered.bytes |= {"squares": 8 * blocks, "factor": 4}
    values: dict[str, Value] = {
        "sums": At("squares"), "count": blocks, "totals": At("totals"), "factor": At("factor"),
    }  # fmt: skip
    return Launch(kernels.clip(), (1, 1, 1), values, title)


def clip_parts(shard: Shard, gradient: str, title: str) -> None:
    """As :func:`clip`, of arrays that every rank has and of those of all parts, of which each sends its own.

    Blocks are those of each array or part of one, so that they do not depend on who has it.
    """
    plan, tensor = shard.plan, shard.plan.tensor
    assert tensor is not None
    of_arrays, of_parts = tensor.blocks_of_norm()
    ends = [sum(of_arrays)]  # where each part's begin
    for count in of_parts:
        ends.append(ends[-1] + count)
    place, places, block = 0, list(ends), tensor.norm_block
    owned = {parameter.name: parameter.of for parameter in plan.parameters}
    for segment in plan.gradient:
        of, blocks = owned[segment.name], ceil_div(segment.size, block)
        begin = place if of is None else places[of.part]
        values: dict[str, Value] = {
            "gradient": At(gradient, segment.offset), "size": segment.size, "part": block, "sums": At("squares", begin),
        }  # fmt: skip
        shard.launches.append(Launch(kernels.squares(), (blocks, 1, 1), values, title))
        if of is None:
            place += blocks
        else:
            places[of.part] += blocks
    owners = [tensor.parts.of(rank) for rank in range(tensor.parts.ranks)]
    parts = [slice(ends[own.start], ends[own.stop]) for own in owners]
    exchange = exchange_all(tensor.parts, SQUARES, "squares", parts, 8, title)
    shard.launches.append(replace(factor_of(shard, ends[-1], title), exchange=exchange))


def update(shard: Shard, group: UpdateAll) -> None:
    """A launch for each range of parameters of one penalty that nothing frozen interrupts."""
    plan = shard.plan
    pitch, shards = (0, 1) if group.is_reduced else (partials_pitch(plan), plan.shards)
    for each in plan.trained_ranges:
        values: dict[str, Value] = {
            "step": At("step"), "totals": At("totals"), "factor": At("factor") if group.is_clipped else None,
            "partials": At("gradient" if group.is_reduced else "partials", each.gradient), "pitch": pitch,
            "shards": shards, "parameters": At("parameters", each.offset),
            "slots": At("slots", each.offset) if group.op.optimizer.slots else None, "size": each.size,
            "slot_pitch": shard.slot_pitch, "alpha": each.alpha,
        }  # fmt: skip
        entry = kernels.update(shard.optimizer)
        shard.launches.append(Launch(entry, over(shard, each.size), values, group.title))


def update_biases(shard: Shard, group: UpdateBiases) -> None:
    values: dict[str, Value] = {
        "step": At("step"), "totals": At("totals"), "biases": At("parameters"),
        "biases_slots": At("slots") if group.op.optimizer.slots else None, "size": shard.slot_pitch,
    }  # fmt: skip
    shard.launches.append(_over_biases(shard, group, kernels.update_biases(shard.optimizer), values))


def sum_biases(shard: Shard, group: SumBiases) -> None:
    """What products have left by now of the shard's gradients of biases."""
    shard.launches.append(_over_biases(shard, group, kernels.sum_biases(), {"gradients": At("partials")}))


def _over_biases(shard: Shard, group: Group, entry: Entry, values: dict[str, Value]) -> Launch:
    """A launch with a thread for each column of the biases whose gradients products have left as partial sums."""
    described = of_shard(shard, PARTIAL_BIASES)
    words = shard.lowered.words[described]
    known = [words[first : first + BIAS_WORDS] for first in range(0, len(words), BIAS_WORDS)]
    columns, partials = sum(n for _, _, _, n, *_ in known), sum(count * n for _, count, _, n, *_ in known)
    of_biases: dict[str, Value] = {
        "described": At(described), "count": len(known), "column_partials": At(of_shard(shard, BIAS_PARTIALS)),
        "columns": columns,
    }  # fmt: skip
    grid = ceil_div(columns, entry.threads), 1, 1
    return Launch(entry, grid, {**values, **of_biases}, group.title, {"partial_count": partials})


# --- biases' gradients from deltas that are operands ---


def sum_delta(shard: Shard, group: SumDelta) -> None:
    """A launch of its own, which :func:`sums_together` may join with others."""
    op, n = group.op, shard.shapes[group.op.weight][1]
    of_layer = {"dz": columns_of(shard, op.dz, op.dweight), "db": bias_sum(shard, op.dbias, n, is_summed=True), "n": n}
    shard.launches.append(_sums_of_deltas(shard, group.title, [of_layer]))


def _sums_of_deltas(shard: Shard, title: str, deltas: Sequence[Mapping[str, Value]]) -> Launch:
    """The launch that sums these, each the arguments dz, db and n; at most as many as it has room for."""
    absent = {"dz": None, "db": None, "n": 0}
    values = {
        f"{name}{end}": value
        for end, delta in zip(kernels.SUMMED_ENDS, [*deltas, *[absent] * kernels.MOST_SUMMED], strict=False)
        for name, value in delta.items()
    }
    widths = [delta["n"] for delta in deltas]
    grid = kernels.summed_grid(shard.rows, [n for n in widths if isinstance(n, int)])
    partials = shard.room(of_shard(shard, "delta partials"), 4 * kernels.DELTA_SUMS_WIDTH * grid[0] * grid[1])
    arrived = shard.room(of_shard(shard, "delta blocks arrived"), 4 * grid[0])
    values |= {"component_rows": padded_rows(shard.rows), "partials": partials, "arrived": arrived}
    return Launch(kernels.sum_deltas(format_of(shard)), grid, {**shard.common, **values}, title)


def sums_together(shard: Shard, launches: Sequence[Launch]) -> list[Launch]:
    """Launches whose sums of deltas are made by as few of them as may be, each before what reads a sum."""
    made, waiting = list[Launch](), list[Launch]()

    def put() -> None:
        if waiting:
            made.append(_sums_of_deltas(shard, waiting[0].operation, [_delta_of(each) for each in waiting]))
        waiting.clear()

    for launch in launches:
        if launch.entry.function.startswith("sum_deltas"):
            waiting.append(launch)
            if len(waiting) == kernels.MOST_SUMMED:
                put()
            continue
        if any(_reads(launch, each) for each in waiting):
            put()
        made.append(launch)
    put()
    return made


def _delta_of(launch: Launch) -> Mapping[str, Value]:
    """What one launch sums that was made for one layer."""
    return {name: launch.values[name] for name in ("dz", "db", "n")}


def _reads(launch: Launch, summed: Launch) -> bool:
    """Whether a launch is given a sum: of an array that others lie in as well, if it may read any of them."""
    db = summed.values["db"]
    assert isinstance(db, At)
    return any(
        isinstance(value, At) and value.array == db.array and (value == db or argument.ctype.startswith("const "))
        for argument in launch.entry.arguments
        for value in (launch.values[argument.name],)
    )
