"""A first layer apart from those that blocks of rows take: ``fused/input_layer.cuh``."""

from __future__ import annotations

from dataclasses import replace

from ..... import plan as ops
from ... import kernels
from ...kernels import InputLayer, ceil_div
from ...kernels.launches import IMAGES, LEFT, At, Value
from ...select.counted import input_layer_forward_clocks, input_layer_gradient_clocks
from ...select.row_step import BlocksOfRows
from ..groups import InputLayerForward, InputLayerGradient
from .shard import Shard

SUMS, DELTAS = "input layer.sums", "input layer.deltas"


def forward(shard: Shard, group: InputLayerForward) -> None:
    layer = _layer(group.path)
    grid = ceil_div(shard.rows, layer.tile), layer.parts, 1
    shard.add(
        group, kernels.input_layer_forward(layer, shard.setting.source), grid, **_rows(shard, group.inputs),
        image=At(IMAGES, group.path.images),
        partials=_sums(shard, layer), k=layer.k, n=layer.n,
        part=layer.part, row_warps=layer.row_warps, capacity=shard.plan.capacity,
    )  # fmt: skip
    clocks = input_layer_forward_clocks(layer, shard.rows, _item_bytes(shard), shard.multiprocessors)
    lengths = {"elements": layer.image, "columns": layer.columns, "clocks": clocks}
    shard.launches[-1] = replace(shard.launches[-1], lengths=lengths)


def gradient(shard: Shard, group: InputLayerGradient) -> None:
    layer = _layer(group.path)
    entry = kernels.input_layer_gradient(layer, shard.setting.source)
    shard.add(
        group, entry, (layer.gradient_blocks, row_parts(shard, layer), 1),
        **_rows(shard, group.inputs), deltas=_deltas(shard, layer),
        partials=At(LEFT, group.path.left), k=layer.k, n=layer.n,
        part=layer.row_part, delta_rows=_delta_rows(shard),
    )  # fmt: skip
    clocks = input_layer_gradient_clocks(layer, shard.rows, _item_bytes(shard), shard.multiprocessors)
    lengths = lengths_between(layer) | {"gradient": layer.gradient_floats, "clocks": clocks}
    shard.launches[-1] = replace(shard.launches[-1], lengths=lengths)


def between(shard: Shard, layer: InputLayer) -> dict[str, Value]:
    """What a step by blocks of rows is told of the layer that it stands behind."""
    return {
        "input_sums": _sums(shard, layer), "input_parts": layer.parts, "capacity": shard.plan.capacity,
        "deltas": _deltas(shard, layer), "delta_rows": _delta_rows(shard),
    }  # fmt: skip


def lengths_between(layer: InputLayer) -> dict[str, int]:
    return {"columns": layer.columns, "delta_elements": layer.components * layer.pitch}


def _layer(path: BlocksOfRows) -> InputLayer:
    assert path.input_layer is not None
    return path.input_layer


def row_parts(shard: Shard, layer: InputLayer) -> int:
    """Parts of the rows of which the gradient is left."""
    return ceil_div(shard.plan.capacity, layer.row_part)


def _rows(shard: Shard, inputs: ops.Standardize | None) -> dict[str, Value]:
    """The rows of the data set, and what standardizes them."""
    return {
        "order": At("order"), "data": At("data"), "scale": At("scale"),
        "mean": shard.ref(inputs.mean) if inputs else None, "deviation": shard.ref(inputs.scale) if inputs else None,
    }  # fmt: skip


def _item_bytes(shard: Shard) -> int:
    return kernels.ITEM_BYTES[kernels.SOURCES[shard.setting.source]]


def _sums(shard: Shard, layer: InputLayer) -> At:
    return shard.room(SUMS, 4 * layer.parts * shard.plan.capacity * layer.columns)


def _deltas(shard: Shard, layer: InputLayer) -> At:
    return shard.room(DELTAS, 2 * layer.components * _delta_rows(shard) * layer.pitch)


def _delta_rows(shard: Shard) -> int:
    return kernels.INPUT_LAYER_SLAB * ceil_div(shard.plan.capacity, kernels.INPUT_LAYER_SLAB)
