"""All of a step but the gradients in one launch: ``fused/row_step.cuh``."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..... import plan as ops
from .....activations import ACTIVATIONS
from .....random import least_kept
from ... import kernels
from ...kernels import ceil_div
from ...kernels.launches import At
from ..groups import RowStep
from .rows import of_data, statistics, weighed
from .shard import Shard

LEVELS, Y, DZ = "row step.levels", "row step.y", "row step.dz"


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
    targets = {f"target_{name}": value for name, value in statistics(shard, group.targets).items()}
    grid = ceil_div(shard.rows, kernels.ROW_STEP_ROWS), 1, 1
    room = kernels.row_step_shared_bytes(widths)
    entry = kernels.row_step(op.loss.form, op.kind, textured=shard.setting.textured, shared_bytes=room)
    shard.add(
        group, entry, grid, **weighed(shard, grid), **targets, **of_data(shard, inputs),
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
    words = [shard.width(group.layers[0].x), -1, -1, identity, 0, *dropped(of_inputs)]
    for layer in group.layers:
        bias = -1 if layer.bias is None else offsets[layer.bias]
        saves_z = ACTIVATIONS[layer.activation].saves == "z"
        words += [shard.width(layer.y), offsets[layer.weight], bias, kernels.activation_number(layer.activation)]
        words += [int(saves_z), *dropped(dropouts.get(layer.y))]
    return tuple(words)


def dropped(dropout: ops.Dropout | None) -> list[int]:
    """A level's dropout in three words: its number, the least half word that it keeps, and its factor."""
    if dropout is None:
        return [-1, 0, 0]
    keep = np.float32(1.0 / (1.0 - dropout.rate))
    return [dropout.layer, least_kept(dropout.rate), int(keep.view(np.int32))]
