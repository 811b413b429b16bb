"""A step by blocks of rows on tensor cores: ``fused/tensor_row_step.cuh``, and the update behind it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ..... import plan as ops
from .....activations import ACTIVATIONS
from ... import kernels
from ...kernels import ceil_div
from ...kernels.launches import At, Launch, Value
from ...select.row_step import BlocksOfRows
from ..groups import TensorRowStep, UpdateFromBlocks
from .row_step import dropped
from .rows import statistics, weighed
from .shard import Shard

LEVELS, LAYERS = "tensor row step.levels", "tensor row step.layers"
IMAGES, PARTIALS, SLOPES = "tensor row step.images", "tensor row step.partials", "tensor row step.slopes"


def forward_and_back(shard: Shard, group: TensorRowStep) -> None:
    op, form = group.loss, _form(group.path)
    described, slope_columns = _described(shard, group)
    shard.lowered.words[LEVELS] = described
    rows = form.tile * ceil_div(shard.plan.capacity, form.tile)
    slopes = shard.room(SLOPES, 4 * rows * slope_columns) if slope_columns else None
    images = shard.room(IMAGES, 2 * form.images[-1])
    partials = shard.room(PARTIALS, 4 * form.partials[-1] * group.path.grid)
    inputs = next((other for other in group.rows if isinstance(other, ops.Standardize)), None)
    is_bytes = shard.setting.source == "uint8"
    targets = {f"target_{name}": value for name, value in statistics(shard, group.targets).items()}
    grid = group.path.grid, 1, 1
    entry = kernels.tensor_row_step(op.loss.form, op.kind, form, _activations(group), textured=shard.setting.textured)
    shard.add(
        group, entry, grid, **weighed(shard, grid), **targets,
        data=None if is_bytes else At("data"), bytes=At("data") if is_bytes else None, scale=At("scale"),
        mean=shard.ref(inputs.mean) if inputs else None, deviation=shard.ref(inputs.scale) if inputs else None,
        parameters=At("parameters"), images=images, described=At(LEVELS), layer_count=len(group.layers),
        tile=form.tile, room=form.room, room_count=form.rooms, bias_count=form.biases[-1], seed=At("seed"),
        slopes=slopes, slope_columns=slope_columns, partials=partials, pitch=form.partials[-1],
    )  # fmt: skip
    products = [k * n for k, n in pairwise(form.widths)]
    lengths = {
        "inputs": form.widths[0], "outputs": form.widths[-1], "clocks": group.path.clocks,
        "products": sum(products), "passed": sum(products[1:]), "elements": form.images[-1],
        "parameters": shard.plan.parameter_count,
    }  # fmt: skip
    shard.launches[-1] = replace(shard.launches[-1], lengths=lengths)


def update(shard: Shard, group: UpdateFromBlocks) -> None:
    """The update, and before the first step of a run the launch that makes weights' components."""
    form = _form(group.path)
    offsets = {parameter.name: parameter.offset for parameter in shard.plan.parameters}
    words = list[int]()
    for layer, (k, n), image, partial in zip(
        group.layers, pairwise(form.widths), form.images, form.partials, strict=False
    ):
        bias = -1 if layer.bias is None else offsets[layer.bias]
        words += [k, n, offsets[layer.weight], bias, image, partial, partial // 4]
    shard.lowered.words[LAYERS] = tuple(words)
    vectors = form.partials[-1] // 4
    layers: dict[str, Value] = {"described": At(LAYERS), "layer_count": len(group.layers)}
    arrays: dict[str, Value] = {"parameters": At("parameters"), "images": At(IMAGES)}
    lengths = {"moved": shard.plan.parameter_count, "elements": form.images[-1]}
    entry = kernels.update_from_blocks(shard.rule, form.components)
    values: dict[str, Value] = {
        "step": At("step"), **layers, **arrays, "partials": At(PARTIALS), "pitch": form.partials[-1],
        "blocks": group.path.grid, "vectors": vectors, "totals": At("totals"),
        "slots": At("slots") if group.op.optimizer.slots else None, "size": shard.slot_pitch,
    }  # fmt: skip
    grid = ceil_div(vectors, kernels.SUM_OF_BLOCKS_VECTORS), 1, 1
    shard.launches.append(Launch(entry, grid, values, group.title, lengths))
    first = kernels.images_of_weights(form.components)
    whole = ceil_div(vectors, first.threads), len(group.layers), 1
    described = {"described": At(LAYERS), **arrays}
    shard.lowered.run_begin.append(Launch(first, whole, described, group.title, lengths))


def _form(path: BlocksOfRows) -> kernels.TensorRowStep:
    assert path.form is not None
    return path.form


def _activations(group: TensorRowStep) -> list[str]:
    """Of the hidden layers, each once, in the order of their table; the last one's sums are the logits."""
    hidden = {layer.activation for layer in group.layers[:-1] or group.layers}
    return [name for name in ACTIVATIONS if name in hidden]


def _described(shard: Shard, group: TensorRowStep) -> tuple[tuple[int, ...], int]:
    """The levels as the kernel is told of them, and how many columns of slopes it stores."""
    form = _form(group.path)
    offsets = {parameter.name: parameter.offset for parameter in shard.plan.parameters}
    dropouts = {other.x: other for other in group.rows if isinstance(other, ops.Dropout)}
    first = next((other for other in dropouts.values() if other.y == group.layers[0].x), None)
    activations, slopes = _activations(group), group.path.slopes
    words = [form.widths[0], -1, -1, 0, *dropped(first), slopes[0], form.places[0], 0, -1, -1]
    for number, layer in enumerate(group.layers):
        bias = -1 if layer.bias is None else offsets[layer.bias]
        saves_z = ACTIVATIONS[layer.activation].saves == "z"
        is_last = number + 1 == len(group.layers)
        activation = -1 if is_last else activations.index(layer.activation)
        words += [form.widths[number + 1], bias, activation, int(saves_z)]
        words += [*dropped(dropouts.get(layer.y)), -1 if is_last else slopes[number + 1]]
        words += [form.places[number + 1], form.biases[number], form.images[number], form.partials[number]]
    return tuple(words), slopes[-1]
