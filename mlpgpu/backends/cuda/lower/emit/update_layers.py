"""The updates of several layers in one launch: ``fused/update_layers.cuh``.

What they read lies in one array of outputs and one of deltas: a step by blocks of rows leaves it so, and for launches
of their own :func:`lay_side_by_side` says so before there are any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ... import kernels
from ...kernels import ceil_div
from ...kernels.launches import DELTAS, OUTPUTS, At, Value
from ...select.counted import slices_in_turn
from ...select.dense import SmallN, UpdateByParts, update_blocks
from ..groups import Group, UpdateLayers
from . import row_step
from .shard import Shard

_ROWS = 32  # of which there are so many, or a multiple, in all arrays side by side: so each begins at a vector


def lay_side_by_side(shard: Shard, made: Iterable[Group]) -> None:
    """Places in both arrays for what launches leave to the updates of several layers."""
    for group in made:
        if not isinstance(group, UpdateLayers) or group.follows_row_step:
            continue
        for array, names in (
            (OUTPUTS, [op.x for op in group.ops if op.x != group.inputs]),
            (DELTAS, [op.dz for op in group.ops]),
        ):
            for name in names:
                begin = shard.lowered.bytes.get(array, 0)
                shard.segments[name] = At(array, begin // 4)
                shard.lowered.bytes[array] = begin + 4 * _padded_capacity(shard) * shard.width(name)


def _padded_capacity(shard: Shard) -> int:
    return _ROWS * ceil_div(shard.plan.capacity, _ROWS)


def update(shard: Shard, group: UpdateLayers) -> None:
    plan, lowered = shard.plan, shard.lowered
    outputs, deltas = (row_step.Y, row_step.DZ) if group.follows_row_step else (OUTPUTS, DELTAS)
    capacity = plan.capacity if group.follows_row_step else _padded_capacity(shard)
    offsets = {parameter.name: parameter.offset for parameter in plan.parameters}
    partials = {partial.name: partial.parameter for partial in plan.partials}
    path = group.paths[0]
    tile = None if isinstance(path, SmallN) else path.tile
    shapes = [shard.shapes[op.weight] for op in group.ops]
    words, blocks = list[int](), list[tuple[int, int]]()
    for op, of_layer, (k, n) in zip(group.ops, group.paths, shapes, strict=True):
        x, dz = shard.ref(op.x), shard.ref(op.dz)
        assert isinstance(x, At) and isinstance(dz, At)
        bias = -1 if op.dbias is None else offsets[partials[op.dbias]]
        places = -1 if op.x == group.inputs else x.offset // capacity, dz.offset // capacity
        parts = (of_layer.parts, of_layer.part) if isinstance(of_layer, UpdateByParts) else (1, 0)
        words += [k, n, sum(count for count, _ in blocks), offsets[op.weight], bias, *places, *parts]
        blocks.append(update_blocks(k, n, of_layer, shard.rows))
    kind = "small_n" if tile is None else tile.name + "_by_parts" * isinstance(path, UpdateByParts)
    described, grid = f"updates of layers, {kind}", sum(count for count, _ in blocks)
    lowered.words[described] = tuple(words)
    rows = shard.rows_of(group.inputs, group.by_order) if group.inputs else {"x": None, "order": None}
    of_parts, lengths = dict[str, Value](), dict[str, int]()
    if isinstance(path, UpdateByParts):
        of_parts = {
            "partials": shard.room("updates of layers, sums of parts", 4 * grid * kernels.PARTS_SUMS),
            "arrived": shard.room("updates of layers, parts arrived", 4 * grid),
        }  # fmt: skip
        lengths = {"slices": slices_in_turn(blocks, shard.multiprocessors)}
    shard.add(
        group, kernels.update_layers(shard.rule, tile, by_parts=bool(of_parts)), (grid, 1, 1), **of_parts,
        described=At(described), layer_count=len(group.ops), inputs=rows["x"], order=rows["order"],
        outputs=At(outputs) if outputs in lowered.bytes else None, deltas=At(deltas), totals=At("totals"),
        parameters=At("parameters"), slots=At("slots") if plan.optimizer and plan.optimizer.slots else None,
        size=shard.slot_pitch, capacity=capacity,
    )  # fmt: skip
    inputs = sum(k for op, (k, _) in zip(group.ops, shapes, strict=True) if op.x == group.inputs)
    lengths |= {
        "inputs": inputs, "hidden": sum(k for k, _ in shapes) - inputs, "deltas": sum(n for _, n in shapes),
        "products": sum(k * n for k, n in shapes),
        "moved": sum((k + (op.dbias is not None)) * n for op, (k, n) in zip(group.ops, shapes, strict=True)),
    }  # fmt: skip
    shard.launches[-1] = replace(shard.launches[-1], lengths=lengths)
