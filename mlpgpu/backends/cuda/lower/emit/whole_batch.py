"""Dense layers whose blocks keep the whole batch: ``whole_batch/``, on plain cores and on tensor cores.

Those on tensor cores read rows as fragments, beside the float32 arrays after which these are named.  Kernels that make
such rows leave their fragments; a launch makes those of others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..... import plan as ops
from ... import kernels
from ...kernels.launches import At, Launch, Value
from ...select.dense import DensePath, WholeBatch
from ...select.select import Selection
from ..groups import DenseForward, DenseInputUpdate, DenseUpdate, Derivative, Differentiate, Group
from .operands import of_shard
from .shard import Shard

NO_DERIVATIVE = Derivative()


def read_as_fragments(selection: Selection, made: Sequence[Group]) -> frozenset[str]:
    """The buffers that layers read as fragments, but for those that a launch changes once they are made."""
    found: set[str] = set()
    for each in selection.operations:
        op, path = each.operation, each.path
        if isinstance(op, ops.Dense) and isinstance(path, DensePath) and _is_on_tensor_cores(path.forward):
            found.add(op.x)
        if isinstance(op, ops.DenseBackward) and isinstance(path, DensePath) and _is_on_tensor_cores(path.update):
            found |= {op.x, op.dz}
    return frozenset(found - {group.op.dy for group in made if isinstance(group, Differentiate)})


def _is_on_tensor_cores(path: object) -> bool:
    return isinstance(path, WholeBatch) and path.components > 0


def forward(shard: Shard, group: DenseForward, path: WholeBatch) -> None:
    op, dropout = group.op, group.dropout
    k, n = shard.shapes[op.weight]
    values: dict[str, Value] = {
        "w": shard.ref(op.weight), "b": shard.ref(op.bias), "z": shard.stored(op.z), "y": shard.stored(op.y),
        "dropped": shard.stored(dropout.y) if dropout else None, "k": k, "n": n,
        "activation": kernels.activation_number(op.activation), **shard.dropout(dropout),
    }  # fmt: skip
    grid = kernels.whole_batch_forward_grid(n, path.columns, path.split)
    if not path.components:
        entry = kernels.dense_forward_whole_batch(path.rows, path.columns, path.split)
        shard.add(group, entry, grid, **shard.rows_of(op.x, group.by_order), **values)
        return
    x = _fragments(shard, group, path, op.x, k, by_order=group.by_order)
    entry = kernels.dense_forward_tensor_whole_batch(path.rows, path.components, path.split)
    left = _left(shard, path, dropout.y if dropout else op.y, n)
    shard.add(group, entry, grid, x_fragments=x, fragments=left, row_tiles=_row_tiles(shard), **values)


def backward(
    shard: Shard,
    group: DenseInputUpdate | DenseUpdate,
    path: WholeBatch,
    dx: str | None = None,
    dropout: ops.DropoutBackward | None = None,
    derivative: Derivative = NO_DERIVATIVE,
) -> Launch:
    """The update of a weight, and dx where somebody reads it."""
    op = group.op
    k, n = shard.shapes[op.weight]
    sms, has_dx = shard.multiprocessors, dx is not None
    if path.flat and not has_dx:
        entry = kernels.dense_update_outer_products(shard.rule, path.flat)
        x = shard.rows_of(op.x, group.by_order)
        return shard.launch(
            group, entry, kernels.outer_products_grid(k, n), **x, dz=shard.ref(op.dz), **shard.updated(op), k=k, n=n
        )
    values: dict[str, Value] = {
        "dz": shard.ref(op.dz), **shard.updated(op), "saved": shard.ref(derivative.saved), "dx": shard.stored(dx),
        "k": k, "n": n, "activation": kernels.activation_number(derivative.activation), **shard.dropout(dropout),
    }  # fmt: skip
    if not path.components:
        entry = kernels.dense_backward_whole_batch(shard.rule, path.rows)
        grid, column_warps = kernels.whole_batch_backward_grid(k, n, path.rows, sms, has_dx=has_dx)
        x = shard.rows_of(op.x, group.by_order)
        return shard.launch(group, entry, grid, **x, column_warps=column_warps, **values)
    of_x = _fragments(shard, group, path, op.x, k, by_order=group.by_order)
    of_dz = _fragments(shard, group, path, op.dz, n)
    entry = kernels.dense_backward_tensor_whole_batch(shard.rule, path.rows, path.components)
    grid = kernels.tensor_whole_batch_backward_grid(k, n, sms)
    values |= {"x_fragments": of_x, "dz_fragments": of_dz, "row_tiles": _row_tiles(shard)}
    values |= dict.fromkeys(("fragments", "partials", "arrived"))
    if dx:
        values["fragments"] = _left(shard, path, dx, k)
    if dx and grid[1] > 1:
        partials = 4 * kernels.tensor_whole_batch_partials(grid, path.rows)
        values["partials"] = shard.room(of_shard(shard, "sums of dx"), partials)
        values["arrived"] = shard.room(of_shard(shard, "sums of dx arrived"), 4 * grid[0])
    return shard.launch(group, entry, grid, **values)


def _row_tiles(shard: Shard) -> int:
    return kernels.ceil_div(shard.rows, kernels.FRAGMENT)


def _room(shard: Shard, path: WholeBatch, name: str, n: int) -> At:
    tiles = _row_tiles(shard) * kernels.ceil_div(n, kernels.FRAGMENT)
    return shard.room(of_shard(shard, f"{name}.fragments"), 2 * path.components * tiles * kernels.FRAGMENT**2)


def _left(shard: Shard, path: WholeBatch, name: str, n: int) -> At | None:
    """Where a kernel leaves the fragments of rows that it makes, if somebody reads them."""
    if name not in shard.read_as_fragments:
        return None
    shard.fragments.add(name)
    return _room(shard, path, name, n)


def _fragments(shard: Shard, group: Group, path: WholeBatch, name: str, n: int, *, by_order: bool = False) -> At:
    """The fragments of a buffer, or of rows of the data set, which a launch makes unless a kernel has left them."""
    at = _room(shard, path, name, n)
    if name not in shard.fragments:
        entry, grid = kernels.batch_fragments(path.components), kernels.batch_fragments_grid(n, shard.rows)
        x = shard.rows_of(name, by_order)
        shard.add(group, entry, grid, **x, fragments=at, row_tiles=_row_tiles(shard), n=n)
        shard.fragments.add(name)
    return at
