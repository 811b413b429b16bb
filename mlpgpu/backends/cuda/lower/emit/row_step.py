"""All of a step but the gradients in one launch, and those in another: ``fused/row_step.cuh``,
``fused/update_layers.cuh``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..... import plan as ops
from .....activations import ACTIVATIONS
from .....random import least_kept
from ... import kernels
from ...kernels import ceil_div
from ...kernels.launches import At, Value
from ...select.dense import SmallN, UpdateByParts
from ..groups import RowStep, UpdateLayers
from .rows import statistics, weighed
from .shard import Shard

LEVELS, LAYERS, Y, DZ = "row step.levels", "row step.layers", "row step.y", "row step.dz"
SUMS, ARRIVED = "row step.sums of parts", "row step.parts arrived"


def forward_and_back(shard: Shard, group: RowStep) -> None:
    op, layers, capacity = group.loss, group.layers, shard.plan.capacity
    widths = _widths(shard, group)
    lowest = len(layers) - len(group.backwards)
    units = [sum(widths[1 : number + 1]) for number in range(len(layers))]  # before each layer's
    for layer, unit in zip(layers[1:], units[1:], strict=True):
        shard.segments[layer.x] = At(Y, capacity * (unit - shard.width(layer.x)))
    for backward, unit in zip(group.backwards, units[lowest:], strict=True):
        shard.segments[backward.dz] = At(DZ, capacity * unit)
    hidden = units[-1]
    if hidden:
        shard.lowered.bytes[Y] = 4 * capacity * hidden
    shard.lowered.bytes[DZ] = 4 * capacity * sum(widths[1:])
    shard.lowered.words[LEVELS] = _described(shard, group)
    inputs = next((other for other in group.rows if isinstance(other, ops.Standardize)), None)
    is_bytes = shard.setting.source == "uint8"
    targets = {f"target_{name}": value for name, value in statistics(shard, group.targets).items()}
    grid = ceil_div(shard.rows, kernels.ROW_STEP_ROWS), 1, 1
    room = kernels.row_step_shared_bytes(widths)
    entry = kernels.row_step(op.loss.form, op.kind, textured=shard.setting.textured, shared_bytes=room)
    shard.add(
        group, entry, grid, **weighed(shard, grid), **targets,
        data=None if is_bytes else At("data"), bytes=At("data") if is_bytes else None, scale=At("scale"),
        mean=shard.ref(inputs.mean) if inputs else None, deviation=shard.ref(inputs.scale) if inputs else None,
        parameters=At("parameters"), described=At(LEVELS), layer_count=len(layers), lowest=lowest + 1,
        widest=max(widths), seed=At("seed"),
        x=shard.stored(layers[0].x) if group.stores_inputs else None, y=At(Y) if hidden else None,
        dz=At(DZ), capacity=capacity,
    )  # fmt: skip
    products = [k * n for k, n in pairwise(widths)]
    lengths = {
        "inputs": widths[0], "outputs": widths[-1], "hidden": hidden, "deltas": sum(widths[lowest + 1 :]),
        "products": sum(products), "passed": sum(products[lowest + 1 :]), "parameters": shard.plan.parameter_count,
    }  # fmt: skip
    shard.launches[-1] = replace(shard.launches[-1], lengths=lengths)


def update(shard: Shard, group: UpdateLayers) -> None:
    capacity = shard.plan.capacity
    offsets = {parameter.name: parameter.offset for parameter in shard.plan.parameters}
    partials = {partial.name: partial.parameter for partial in shard.plan.partials}
    words, blocks, first = [], 0, None
    path = group.path
    tile = None if isinstance(path, SmallN) else path.tile
    shapes = [shard.shapes[op.weight] for op in group.ops]
    for op, (k, n) in zip(group.ops, shapes, strict=True):
        x, dz = shard.ref(op.x), shard.ref(op.dz)
        assert isinstance(x, At) and isinstance(dz, At)
        is_hidden = x.array == Y
        first = first if is_hidden else op.x
        bias = -1 if op.dbias is None else offsets[partials[op.dbias]]
        places = x.offset // capacity if is_hidden else -1, dz.offset // capacity
        words += [k, n, blocks, offsets[op.weight], bias, *places]
        across, down, _ = kernels.small_n_grid(k, n) if tile is None else tile.grid(k, n)
        blocks += across * down
    shard.lowered.words[LAYERS] = tuple(words)
    rows = shard.rows_of(first, group.by_order) if first else {"x": None, "order": None}
    parts, of_parts = 1, dict[str, Value]()
    if isinstance(path, UpdateByParts):
        parts = path.parts
        of_parts = {
            "partials": shard.room(SUMS, 4 * blocks * parts * kernels.PARTS_SUMS),
            "arrived": shard.room(ARRIVED, 4 * blocks), "part": path.part,
        }  # fmt: skip
    shard.add(
        group, kernels.update_layers(shard.rule, tile, by_parts=bool(of_parts)), (blocks, parts, 1), **of_parts,
        described=At(LAYERS), layer_count=len(group.ops), inputs=rows["x"], order=rows["order"],
        y=At(Y) if Y in shard.lowered.bytes else None, dz=At(DZ), totals=At("totals"), parameters=At("parameters"),
        slots=At("slots") if shard.plan.optimizer and shard.plan.optimizer.slots else None,
        size=shard.plan.parameter_count, capacity=capacity,
    )  # fmt: skip
    inputs = sum(k for op, (k, _) in zip(group.ops, shapes, strict=True) if op.x == first)
    lengths = {
        "inputs": inputs, "hidden": sum(k for k, _ in shapes) - inputs, "deltas": sum(n for _, n in shapes),
        "products": sum(k * n for k, n in shapes),
        "moved": sum((k + (op.dbias is not None)) * n for op, (k, n) in zip(group.ops, shapes, strict=True)),
    }  # fmt: skip
    shard.launches[-1] = replace(shard.launches[-1], lengths=lengths)


def _widths(shard: Shard, group: RowStep) -> list[int]:
    """From the inputs to the outputs."""
    return [shard.width(group.layers[0].x), *(shard.width(layer.y) for layer in group.layers)]


def _described(shard: Shard, group: RowStep) -> tuple[int, ...]:
    """The inputs, and each layer's outputs, as the kernel is told of them, ``RowStepLevel`` each."""
    offsets = {parameter.name: parameter.offset for parameter in shard.plan.parameters}
    first = next((other for other in group.rows if isinstance(other, ops.Dropout)), None)
    dropouts = {other.x: other for other in group.rows if isinstance(other, ops.Dropout)}
    of_inputs = first if first and first.y == group.layers[0].x else None
    identity = kernels.activation_number("identity")
    words = [shard.width(group.layers[0].x), -1, -1, identity, 0, *_dropped(of_inputs)]
    for layer in group.layers:
        bias = -1 if layer.bias is None else offsets[layer.bias]
        saves_z = ACTIVATIONS[layer.activation].saves == "z"
        words += [shard.width(layer.y), offsets[layer.weight], bias, kernels.activation_number(layer.activation)]
        words += [int(saves_z), *_dropped(dropouts.get(layer.y))]
    return tuple(words)


def _dropped(dropout: ops.Dropout | None) -> list[int]:
    """A level's dropout in three words: its number, the least half word that it keeps, and its factor."""
    if dropout is None:
        return [-1, 0, 0]
    keep = np.float32(1.0 / (1.0 - dropout.rate))
    return [dropout.layer, least_kept(dropout.rate), int(keep.view(np.int32))]
