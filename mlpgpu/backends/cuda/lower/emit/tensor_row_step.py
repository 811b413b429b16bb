"""A step by blocks of rows on tensor cores: ``fused/tensor_row_step.cuh``, and the update behind it.

A first layer apart has its components behind those of the other layers, and what its blocks leave of its gradient
behind what blocks of rows leave.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ..... import plan as ops
from .....activations import ACTIVATIONS
from ... import kernels
from ...kernels import ceil_div
from ...kernels.launches import IMAGES, LEFT, At, Launch, Value
from ...select.row_step import BlocksOfRows
from ..groups import TensorRowStep, UpdateFromBlocks
from . import input_layer
from .row_step import dropped
from .rows import of_data, statistics, weighed
from .shard import Shard

LEVELS, LAYERS = "tensor row step.levels", "tensor row step.layers"
SLOPES = "tensor row step.slopes"


def forward_and_back(shard: Shard, group: TensorRowStep) -> None:
    op, form, layer = group.loss, _form(group.path), group.path.input_layer
    described, slope_columns = _described(shard, group)
    shard.lowered.words[LEVELS] = described
    rows = form.tile * ceil_div(shard.plan.capacity, form.tile)
    slopes = shard.room(SLOPES, 4 * rows * slope_columns) if slope_columns else None
    images = shard.room(IMAGES, 2 * (group.path.images + (layer.image if layer else 0)))
    of_layer = layer.gradient_floats * input_layer.row_parts(shard, layer) if layer else 0
    partials = shard.room(LEFT, 4 * (group.path.left + of_layer))
    inputs = next((other for other in group.rows if isinstance(other, ops.Standardize)), None)
    level = input_layer.between(shard, layer) if layer else of_data(shard, inputs)
    targets = {f"target_{name}": value for name, value in statistics(shard, group.targets).items()}
    grid = group.path.grid, 1, 1
    entry = kernels.tensor_row_step(
        op.loss.form, op.kind, form, _activations(group), textured=shard.setting.textured, behind=layer is not None
    )
    shard.add(
        group, entry, grid, **weighed(shard, grid), **targets, **level, parameters=At("parameters"), images=images,
        described=At(LEVELS), layer_count=len(group.layers), tile=form.tile, room=form.room, room_count=form.rooms,
        bias_count=form.biases[-1], seed=At("seed"), slopes=slopes,
        slope_columns=slope_columns, partials=partials, pitch=form.partials[-1],
    )  # fmt: skip
    products = [k * n for k, n in pairwise(form.widths)]
    lengths = {
        "inputs": form.widths[0], "outputs": form.widths[-1], "clocks": group.path.clocks,
        "products": sum(products), "passed": sum(products[layer is None :]), "elements": form.images[-1],
        "parameters": shard.plan.parameter_count, **(input_layer.lengths_between(layer) if layer else {}),
    }  # fmt: skip
    shard.launches[-1] = replace(shard.launches[-1], lengths=lengths)


def update(shard: Shard, group: UpdateFromBlocks) -> None:
    """The update, and before the first step of a run the launch that makes weights' components."""
    form, layer = _form(group.path), group.path.input_layer
    offsets = {parameter.name: parameter.offset for parameter in shard.plan.parameters}
    words, first, of_block = list[int](), 0, form.partials[-1] // 4
    places = [
        (k, n, image, partial // 4, of_block, group.path.grid)
        for (k, n), image, partial in zip(pairwise(form.widths), form.images, form.partials, strict=False)
    ]
    if layer:
        parts = input_layer.row_parts(shard, layer)
        places.append((layer.k, layer.n, form.images[-1], group.path.left // 4, layer.gradient_floats // 4, parts))
    ordered = (*group.layers[layer is not None :], *group.layers[: layer is not None])
    for dense, (k, n, image, begin, pitch, blocks) in zip(ordered, places, strict=True):
        bias, runs = -1 if dense.bias is None else offsets[dense.bias], kernels.sum_runs(blocks)
        words += [k, n, offsets[dense.weight], bias, image, first, begin, pitch, blocks, runs]
        first += kernels.blocks_of_sum(k, n, runs)
    shard.lowered.words[LAYERS] = tuple(words)
    layers: dict[str, Value] = {"described": At(LAYERS), "layer_count": len(group.layers)}
    arrays: dict[str, Value] = {"parameters": At("parameters"), "images": At(IMAGES)}
    left = shard.lowered.bytes[LEFT] // 4
    lengths = {"moved": shard.plan.parameter_count, "elements": shard.lowered.bytes[IMAGES] // 2, "left": left}
    entry = kernels.update_from_blocks(shard.rule, form.components)
    values: dict[str, Value] = {
        "step": At("step"), **layers, **arrays, "partials": At(LEFT), "totals": At("totals"),
        "slots": At("slots") if group.op.optimizer.slots else None, "size": shard.slot_pitch,
    }  # fmt: skip
    shard.launches.append(Launch(entry, (first, 1, 1), values, group.title, lengths))
    of_run = kernels.images_of_weights(form.components)
    described = {"described": At(LAYERS), **arrays}
    grid = ceil_div(lengths["elements"], len(group.layers) * of_run.threads), len(group.layers), 1
    shard.lowered.run_begin.append(Launch(of_run, grid, described, group.title, lengths))


def _form(path: BlocksOfRows) -> kernels.TensorRowStep:
    assert path.form is not None
    return path.form


def _activations(group: TensorRowStep) -> list[str]:
    """Of the hidden layers, each once, in the order of their table; the last one's sums are the logits."""
    layers = (group.behind, *group.layers) if group.behind else group.layers
    hidden = {layer.activation for layer in layers[:-1] or layers}
    return [name for name in ACTIVATIONS if name in hidden]


def _described(shard: Shard, group: TensorRowStep) -> tuple[tuple[int, ...], int]:
    """The levels as the kernel is told of them, and how many columns of slopes it stores."""
    form = _form(group.path)
    offsets = {parameter.name: parameter.offset for parameter in shard.plan.parameters}
    dropouts = {other.x: other for other in group.rows if isinstance(other, ops.Dropout)}
    activations, slopes = _activations(group), group.path.slopes

    def made(layer: ops.Dense, *, is_last: bool) -> list[int]:
        """Of a level what its layer makes it by."""
        bias = -1 if layer.bias is None else offsets[layer.bias]
        saves_z = ACTIVATIONS[layer.activation].saves == "z"
        activation = -1 if is_last else activations.index(layer.activation)
        return [bias, activation, int(saves_z), *dropped(dropouts.get(layer.y))]

    first = next((other for other in dropouts.values() if other.y == group.layers[0].x), None)
    of_inputs = [-1, -1, 0, *dropped(first)] if group.behind is None else made(group.behind, is_last=False)
    words = [form.widths[0], *of_inputs, slopes[0], form.places[0], 0, -1, -1]
    for number, layer in enumerate(group.layers):
        is_last = number + 1 == len(group.layers)
        words += [form.widths[number + 1], *made(layer, is_last=is_last), -1 if is_last else slopes[number + 1]]
        words += [form.places[number + 1], form.biases[number], form.images[number], form.partials[number]]
    return tuple(words), slopes[-1]
