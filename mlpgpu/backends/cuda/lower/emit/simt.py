"""Dense layers on plain cores, some of them split along k: ``dense/dense.cuh``, ``dense/update.cuh``."""

from __future__ import annotations

from dataclasses import replace

from ..... import plan as ops
from ... import kernels
from ...kernels import Entry, SimtTile, SplitSm80Tile, WarpSplitTile, ceil_div
from ...kernels.launches import At, Launch, Value
from ...select.dense import (
    FewColumns,
    FewRows,
    LargeK,
    SmallN,
    SplitK,
    SplitOperands,
    Strips,
    UpdateByParts,
    WholeBatch,
)
from ..groups import (
    AddPartials,
    DenseAtomic,
    DenseForward,
    DenseGradient,
    DenseInput,
    DenseInputUpdate,
    DensePartials,
    DenseUpdate,
)
from . import whole_batch
from .shard import Grid, Shard

MOST_SUM_BLOCKS = 1 << 16


def forward(shard: Shard, group: DenseForward) -> None:
    op, path = group.op, group.path
    k, n = shard.shapes[op.weight]
    if isinstance(path, WholeBatch):
        whole_batch.forward(shard, group, path)
        return
    shard.add(
        group, kernels.dense_forward(op.activation, path.tile, drops=group.dropout is not None),
        path.tile.grid(shard.rows, n),
        **shard.rows_of(op.x, group.by_order), w=shard.ref(op.weight), b=shard.ref(op.bias), z=shard.stored(op.z),
        y=shard.stored(group.dropout.y if group.dropout else op.y), **shard.kept(group.dropout), k=k, n=n,
    )  # fmt: skip


def partials(shard: Shard, group: DensePartials) -> None:
    """Split-K partials: by a launch, unless the update of the step before has left them."""
    op, path = group.op, group.path
    k, n = shard.shapes[op.weight]
    added = added_partials(shard, op, path)
    if group.by_update:
        before = dict.fromkeys(("dz", "totals", "bias", "bias_slots"))
        entry, grid, values = _few_rows(shard, op.x, op.weight, group.by_update, by_order=True)
        shard.lowered.prologue.append(Launch(entry, grid, {**values, **before}, group.title))
        return
    entry, grid = _part_product(shard, n, path)
    shard.add(
        group, entry, grid,
        **shard.rows_of(op.x, group.by_order), w=shard.ref(op.weight), partials=added["partials"], k=k, n=n,
        part=path.part,
        capacity=shard.plan.capacity,
    )  # fmt: skip


def _part_product(shard: Shard, n: int, path: SplitK) -> tuple[Entry, Grid]:
    if path.tile is None:
        return kernels.dense_forward_few_rows(), (1, 1, path.count)
    return kernels.dense_forward_split_k(path.tile), path.tile.grid(shard.rows, n, path.count)


def added_partials(shard: Shard, op: ops.Dense, path: SplitK) -> dict[str, Value]:
    """Split-K partials, as what adds them up is given them."""
    capacity = shard.plan.capacity
    partials = shard.room(_partials_name(shard, op.weight), 4 * path.count * capacity * shard.shapes[op.weight][1])
    return {"partials": partials, "count": path.count, "capacity": capacity}


def _partials_name(shard: Shard, weight: str) -> str:
    """Of split-K partials: shards run side by side, and may be at different layers.

    Where a rank has several parts of a layer, the step before may have left those of each.
    """
    return f"split-K partials {shard.number}" + (f" of {weight}" if shard.plan.tensor else "")


def add_partials(shard: Shard, group: AddPartials) -> None:
    op, n = group.op, shard.shapes[group.op.weight][1]
    blocks = min(kernels.sum_partials_blocks(shard.rows * n), MOST_SUM_BLOCKS)
    shard.add(
        group, kernels.dense_forward_sum_partials(op.activation), (blocks, 1, 1),
        **added_partials(shard, op, group.path), b=shard.ref(op.bias), z=shard.stored(op.z),
        y=shard.stored(group.dropout.y if group.dropout else op.y), **shard.kept(group.dropout), n=n,
    )  # fmt: skip


def atomic(shard: Shard, group: DenseAtomic) -> None:
    op = group.op
    k, n = shard.shapes[op.weight]
    if op.dx:
        shard.add(group, kernels.zero(), shard.over_elements(k), x=shard.stored(op.dx), n=k)
    shard.add(
        group, kernels.dense_backward_atomic(), (ceil_div(k, 32), ceil_div(n, 32), 1),
        x=shard.ref(op.x), dz=shard.ref(op.dz), w=shard.ref(op.weight), dw=shard.ref(op.dweight),
        db=shard.ref(op.dbias), dx=shard.ref(op.dx), k=k, n=n,
    )  # fmt: skip


def backward_input(shard: Shard, group: DenseInput) -> None:
    op, tile, derivative = group.op, group.path.tile, group.derivative
    k, n = shard.shapes[op.weight]
    shard.add(
        group, kernels.dense_backward_input(derivative.activation, tile, drops=derivative.masked is not None),
        tile.grid(shard.rows, k),
        dz=shard.ref(op.dz), w=shard.ref(op.weight), saved=shard.ref(derivative.saved),
        dx=shard.stored(derivative.of(op.dx)), **shard.kept(derivative.masked) | {"keep": derivative.keep},
        restore=derivative.restore, k=k, n=n,
    )  # fmt: skip


def backward_input_update(shard: Shard, group: DenseInputUpdate) -> None:
    dx = group.dropout.dx if group.dropout else group.op.dx
    launch = whole_batch.backward(shard, group, group.path, dx, group.dropout, group.derivative)
    shard.launches.append(launch)


def gradient(shard: Shard, group: DenseGradient) -> None:
    op, path = group.op, group.path
    k, n = shard.shapes[op.weight]
    tile, grid = (None, kernels.small_n_grid(k, n)) if isinstance(path, SmallN) else (path.tile, path.tile.grid(k, n))
    shard.add(
        group, kernels.dense_backward_weight(tile), grid,
        **shard.rows_of(op.x, group.by_order), dz=shard.ref(op.dz), dw=shard.ref(op.dweight), db=shard.ref(op.dbias),
        k=k, n=n,
    )  # fmt: skip


def update(shard: Shard, group: DenseUpdate) -> None:
    op, path = group.op, group.path
    k, n = shard.shapes[op.weight]
    if isinstance(path, FewRows):
        entry, grid, few = _few_rows(shard, op.x, op.weight, path, by_order=group.by_order)
        partials = few["partials"] if group.leaves_partials else None
        few |= {name: value for name, value in shard.updated(op).items() if name not in few}
        shard.launches.append(Launch(entry, grid, {**few, "dz": shard.ref(op.dz), "partials": partials}, group.title))
        return
    if isinstance(path, WholeBatch):
        launch = whole_batch.backward(shard, group, path)
        beside = replace(launch, on_side_stream=group.on_side_stream, after_others=group.after_others)
        shard.launches.append(beside)
        return
    of_parts: dict[str, Value] = {}
    if isinstance(path, (UpdateByParts, Strips)) or (isinstance(path, SplitOperands) and path.parts > 1):
        entry = kernels.dense_backward_update_by_parts(shard.rule, path.tile)
        grid = path.tile.grid(k, n, path.parts)
        tiles, sums = grid[0] * grid[1], kernels.sums_of_part(path.tile)
        of_parts = {
            "partials": shard.room(f"{op.weight} sums of parts", 4 * tiles * path.parts * sums),
            "arrived": shard.room(f"{op.weight} parts arrived", 4 * tiles), "part": path.part,
        }  # fmt: skip
    else:
        tile: SimtTile | WarpSplitTile | SplitSm80Tile | str
        if isinstance(path, SmallN):
            tile, grid = "small_n", kernels.small_n_grid(k, n)
        elif isinstance(path, FewColumns):
            tile, grid = "few_columns", kernels.few_columns_grid(k)
        elif isinstance(path, LargeK):
            tile, grid = "large_k", (min(shard.multiprocessors, ceil_div(k, kernels.LARGE_K_ROWS)), 1, 1)
        else:
            tile, grid = path.tile, path.tile.grid(k, n)
        entry = kernels.dense_backward_update(shard.rule, tile)
    values = {
        **shard.common, **shard.rows_of(op.x, group.by_order), "dz": shard.ref(op.dz), **shard.updated(op), **of_parts,
        "k": k, "n": n,
    }  # fmt: skip
    shard.launches.append(
        Launch(entry, grid, values, group.title, on_side_stream=group.on_side_stream, after_others=group.after_others)
    )


def _few_rows(
    shard: Shard, x: str, weight: str, path: FewRows, *, by_order: bool
) -> tuple[Entry, Grid, dict[str, Value]]:
    """The update of few rows, its grid, and those of its values that a run's first step begins with."""
    k, n = shard.shapes[weight]
    values: dict[str, Value] = {
        "step": At("step"), **shard.rows_of(x, by_order), "weight": shard.ref(weight),
        "weight_slots": shard.slots_of(weight), "size": shard.slot_pitch, "k": k, "n": n,
        "partials": At(_partials_name(shard, weight)), "part": path.part, "capacity": shard.plan.capacity,
    }  # fmt: skip
    return (
        kernels.dense_update_few_rows(shard.rule, stream=path.stream),
        kernels.few_rows_grid(k, n, path.part),
        values,
    )
