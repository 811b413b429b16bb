"""What replaces several launches: the last layer with the loss, or all layers after one of large k.

``fused/head.cuh``, ``fused/column_head.cuh``, ``fused/tail.cuh``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ..... import plan as ops
from .....activations import ACTIVATIONS
from ... import kernels
from ...kernels import ceil_div
from ...kernels.launches import ABORTED, EXCHANGED_SUMS, At, PartSums, Value
from ...select.loss import head_parts
from ..groups import Head, Tail
from .operands import component_count, elements_of, rows_words, written
from .parts import exchanged_sums
from .rows import statistics, weighed
from .shard import Shard, rows_of_parts
from .simt import added_partials


def head(shard: Shard, group: Head) -> None:
    dense, op, backward, derivative = group.dense, group.loss, group.backward, group.derivative
    delta = shard.stored(backward.dz)
    made = derivative.of(backward.dx)
    dx, components = written(shard, made, group.dx)
    scales = rows_words(shard, made) if group.leaves_scales and made else None
    rows = kernels.filled_rows(shard.rows) if components else shard.rows
    k, blocks = shard.shapes[dense.weight][0], ceil_div(rows, group.form.rows)
    parts = head_parts(group.form, k, blocks, shard.work) if scales is None else 1
    entry = kernels.head(
        op.loss.form, op.kind, textured=shard.setting.textured, form=group.form, drops=derivative.masked is not None
    )
    shard.add(
        group, entry, (group.form.split * blocks, parts, 1),
        **weighed(shard, (blocks, 1, 1)), **statistics(shard, group.targets), x=shard.ref(dense.x),
        w=shard.ref(dense.weight), b=shard.ref(dense.bias), delta=delta, saved=shard.ref(derivative.saved),
        activation=kernels.activation_number(derivative.activation),
        **shard.kept(derivative.masked) | {"keep": derivative.keep}, restore=derivative.restore, dx=dx,
        dx_components=components, dx_stride=elements_of(shard, dense.x), dx_component_count=component_count(shard),
        dx_row_scales=scales, k=k, n=shard.width(op.logits),
    )  # fmt: skip


def tail(shard: Shard, group: Tail) -> None:
    op, first, capacity, exchange = group.loss, group.layers[0], shard.plan.capacity, None
    added: dict[str, Value]
    exchanged: dict[str, Value] = {"exchange": None, "aborted": None, "memory": None}
    if group.part is not None:
        assert group.path is not None and shard.plan.tensor is not None
        parts = shard.plan.tensor.parts
        shard.lowered.part_sums = PartSums(parts.count, parts.rank, capacity, shard.width(first.y))
        added = added_partials(shard, group.part, group.path)
        exchanged |= {"exchange": At(EXCHANGED_SUMS), "aborted": At(ABORTED)}
    elif isinstance(first, ops.SumParts):
        capacity = rows_of_parts(shard.plan)
        added, exchange = exchanged_sums(shard, first, group.title)
    else:
        assert group.path is not None
        added = added_partials(shard, first, group.path)
    units = 0
    for layer, backward in zip(group.layers, group.backwards, strict=True):
        shard.segments[layer.y] = At("tail.y", capacity * units)
        shard.segments[backward.dz] = At("tail.dz", capacity * units)
        units += shard.width(layer.y)
    shard.lowered.bytes |= dict.fromkeys(("tail.y", "tail.dz"), 4 * capacity * units)
    shard.lowered.words["tail.layers"] = _described(shard, group)
    grid = shard.rows, 1, 1
    shard.add(
        group, kernels.tail(op.loss.form, op.kind, textured=shard.setting.textured), grid,
        **weighed(shard, grid), **statistics(shard, group.targets), **added,
        parameters=At("parameters"), described=At("tail.layers"), layer_count=len(group.layers), y=At("tail.y"),
        dz=At("tail.dz"), n=shard.width(first.y), **exchanged,
    )  # fmt: skip
    shard.launches[-1] = replace(shard.launches[-1], lengths=_lengths(shard, group), exchange=exchange)


def _lengths(shard: Shard, group: Tail) -> dict[str, int]:
    """The lengths that the kernel's entry names beside its arguments."""
    widths = [shard.width(layer.y) for layer in group.layers]
    products = sum(k * n for k, n in pairwise(widths))
    biases = sum(n for layer, n in zip(group.layers, widths, strict=True) if layer.bias is not None)
    part_sums = shard.lowered.part_sums
    words = kernels.part_sums_words(part_sums.count) if part_sums else 0
    return {
        "units": sum(widths), "outputs": widths[-1], "products": products, "parameters": products + biases,
        "words": words, "bytes": 0,
    }  # fmt: skip


def _described(shard: Shard, group: Tail) -> tuple[int, ...]:
    """The layers as the kernel is told of them, ``TailLayer`` each."""
    offsets = {parameter.name: parameter.offset for parameter in shard.plan.parameters}
    words: list[int] = []
    for number, layer in enumerate(group.layers):
        weight = offsets[layer.weight] if isinstance(layer, ops.Dense) and number else -1
        bias = -1 if layer.bias is None else offsets[layer.bias]
        saves_z = ACTIVATIONS[layer.activation].saves == "z"
        words += [shard.width(layer.y), weight, bias, kernels.activation_number(layer.activation), int(saves_z)]
    return tuple(words)
