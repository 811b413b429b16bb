"""Between parts of a network: exchanges, each with the launch that makes a whole of it, ``elementwise/parts.cuh``.

Parts of all ranks lie in one array on each card, in their order; a rank's products write to its places, and the others
are sent.  So a sum is added up in the order of the parts, whoever has which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .....plan import Parts, SumParts, bounds
from .....plan.tensor_split import ALIGNMENT
from ... import kernels
from ...kernels.launches import COLUMNS, SUMS, At, Collective, Transfer, Value
from ...select.ranks import sent_by_kernel
from ..groups import BiasGradient, JoinedParts, SumOfParts, TakenColumns
from .shard import PARTS_OF, Shard, rows_of_parts

FLOAT = 4  # bytes
MOST_SUM_BLOCKS = 1 << 16


def exchange_all(
    parts: Parts, kind: str, array: str, of_ranks: Sequence[slice], item_bytes: int, title: str
) -> Collective | None:
    """What gives all ranks each rank's part of an array; None of one rank."""
    own = of_ranks[parts.rank]
    others = [rank for rank in range(parts.ranks) if rank != parts.rank]
    sent = [Transfer(peer, At(array, own.start), own.stop - own.start, item_bytes) for peer in others]
    received = [
        Transfer(peer, At(array, of_ranks[peer].start), of_ranks[peer].stop - of_ranks[peer].start, item_bytes)
        for peer in others
    ]
    sent, received = ([each for each in transfers if each.count] for transfers in (sent, received))
    by_kernel = sent_by_kernel(len(others) * max(part.stop - part.start for part in of_ranks) * item_bytes)
    return Collective(kind, tuple(sent), tuple(received), title, by_kernel.holds) if sent or received else None


def _exchange(shard: Shard, kind: str, y: str, ends: Sequence[int], title: str) -> tuple[At, Collective | None]:
    """The array of all parts of a buffer, and what fills it; parts begin at ``ends``, columns, the last its end."""
    assert shard.plan.tensor is not None
    parts, rows = shard.plan.tensor.parts, rows_of_parts(shard.plan)
    array = shard.room(PARTS_OF + y, FLOAT * rows * ends[-1])
    owned = [parts.of(rank) for rank in range(parts.ranks)]
    of_ranks = [slice(rows * ends[own.start], rows * ends[own.stop]) for own in owned]
    return array, exchange_all(parts, kind, array.array, of_ranks, FLOAT, title)


def exchanged_sums(shard: Shard, op: SumParts, title: str) -> tuple[dict[str, Value], Collective | None]:
    """What a launch is given that adds parts up, and the exchange before it."""
    assert shard.plan.tensor is not None
    n, count = shard.width(op.y), shard.plan.tensor.parts.count
    array, exchange = _exchange(shard, SUMS, op.y, range(0, (count + 1) * n, n), title)
    return {"partials": array, "count": count, "capacity": rows_of_parts(shard.plan)}, exchange


def add(shard: Shard, group: SumOfParts) -> None:
    op, n = group.op, shard.width(group.op.y)
    added, exchange = exchanged_sums(shard, op, group.title)
    blocks = min(kernels.sum_partials_blocks(shard.rows * n), MOST_SUM_BLOCKS)
    launch = shard.launch(
        group, kernels.dense_forward_sum_partials(op.activation), (blocks, 1, 1),
        **added, b=shard.ref(op.bias), z=shard.stored(op.z),
        y=shard.stored(op.y), **shard.kept(None), n=n,
    )  # fmt: skip
    shard.launches.append(replace(launch, exchange=exchange))


def join(shard: Shard, group: JoinedParts) -> None:
    op, n = group.op, shard.width(group.op.y)
    assert shard.plan.tensor is not None
    count = shard.plan.tensor.parts.count
    ends = bounds(n, count)
    array, exchange = _exchange(shard, COLUMNS, op.y, ends, group.title)
    launch = shard.launch(
        group, kernels.join_columns(), shard.over_elements(n), of_parts=array, y=shard.stored(op.y), n=n, count=count,
        alignment=ALIGNMENT if n >= 4 * ALIGNMENT * count else 1, capacity=rows_of_parts(shard.plan),
    )  # fmt: skip
    shard.launches.append(replace(launch, exchange=exchange))


def take(shard: Shard, group: TakenColumns) -> None:
    op, n = group.op, shard.width(group.op.y)
    shard.add(
        group, kernels.take_columns(), shard.over_elements(n), x=shard.ref(op.x), y=shard.stored(op.y), n=n,
        first=op.first, width=shard.width(op.x),
    )  # fmt: skip


def bias_gradient(shard: Shard, group: BiasGradient) -> None:
    """The sums of a delta's columns; where products move weights, the bias moves as well."""
    op, n = group.op, shard.width(group.op.dz)
    grid = kernels.column_sums_grid(n)
    if not group.is_update:
        shard.add(group, kernels.column_sums(), grid, dz=shard.ref(op.dz), db=shard.ref(op.dbias), n=n)
        return
    bias = next(partial.parameter for partial in shard.plan.partials if partial.name == op.dbias)
    launch = shard.launch(
        group, kernels.bias_backward_update(shard.optimizer), grid, dz=shard.ref(op.dz), totals=At("totals"),
        bias=shard.ref(bias), bias_slots=shard.slots_of(bias), size=shard.slot_pitch, n=n,
    )  # fmt: skip
    beside = group.on_side_stream
    shard.launches.append(replace(launch, on_side_stream=beside, after_others=beside))
