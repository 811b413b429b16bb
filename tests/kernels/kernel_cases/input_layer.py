"""A first layer apart from those that blocks of rows take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from helpers import EPS32

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import InputLayer, ceil_div

from .case import Batch, Case, blank, expect, generator, normal, whole, wide
from .row_step import image_of

# Of a product of two numbers by what their components leave out: each is off by half a bit of those that they have,
# and the smallest products are not made.
_ERRORS = {1: 2.0**-7 + 2.0**-16, 2: 3.0 * 2.0**-16, 3: 2.0**-22}

SLAB, SOURCES = kernels.INPUT_LAYER_SLAB, ("float32", "uint8")


@dataclass(frozen=True)
class _Inputs:
    """A data set, and the batch's rows of it as the layer takes them.

    Attributes:
        args: what a kernel is told of it.
        rows: (rows, k), of numbers that float32 has.
    """

    args: dict[str, object]
    rows: np.ndarray


def _inputs(batch: Batch, k: int, *, as_bytes: bool, standardized: bool) -> _Inputs:
    """Rows that no shard fetches are NaN, or bytes that no other row has."""
    random, shape = generator(), (2 * batch.epoch_rows, k)
    scale = np.float32(0.01 if as_bytes else 1.0)
    if as_bytes:
        data = random.integers(0, 255, shape).astype(np.uint8)
        rows = (scale * data[batch.fetched].astype(np.float32)).astype(np.float32)
    else:
        data = np.full(shape, np.nan, np.float32)
        rows = data[batch.fetched] = normal(len(batch.fetched), k)
    mean = deviation = None
    if standardized:
        mean, deviation = normal(k), (1.0 + abs(normal(k))).astype(np.float32)
        rows = ((rows - mean) / deviation).astype(np.float32)
    args = {
        **batch.args, "order": batch.order, "data": data, "scale": float(scale), "mean": mean, "deviation": deviation,
    }  # fmt: skip
    return _Inputs(args, wide(rows))


def _bound(layer: InputLayer, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of a product: what components leave out, and roundings of its sums."""
    terms = left.shape[-1]
    return (_ERRORS[layer.components] + (terms + 4) * EPS32) * (abs(left) @ abs(right))


def _variant(batch: Batch, layer: InputLayer, *, as_bytes: bool, standardized: bool) -> str:
    words = f"-{layer.row_warps}warps" + "-bytes" * as_bytes + "-standardized" * standardized
    return f"{batch}-{layer.k}-{layer.n}{words}"


def input_layer_forward(batch: Batch, layer: InputLayer, *, as_bytes: bool = False, standardized: bool = False) -> Case:
    inputs = _inputs(batch, layer.k, as_bytes=as_bytes, standardized=standardized)
    args, x = inputs.args, inputs.rows
    weight = normal(layer.k, layer.n)
    shape = layer.parts, batch.capacity, layer.columns
    value, bound, written = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    for part in range(layer.parts):
        own = slice(part * layer.part, (part + 1) * layer.part)
        value[part, : len(x), : layer.n] = x[:, own] @ wide(weight[own])
        bound[part, : len(x), : layer.n] = _bound(layer, x[:, own], wide(weight[own]))
        written[part, : len(x)] = True
    args |= {
        "image": image_of(weight, layer.components).ravel(), "partials": blank(*shape), "k": layer.k, "n": layer.n,
        "part": layer.part, "row_warps": layer.row_warps, "capacity": batch.capacity,
    }  # fmt: skip
    entry = kernels.input_layer_forward(layer, SOURCES[as_bytes])
    grid = ceil_div(batch.most_rows, layer.tile), layer.parts
    name = _variant(batch, layer, as_bytes=as_bytes, standardized=standardized)
    return Case(name, entry, grid, args, {"partials": expect(value, bound, written)})


def input_layer_gradient(
    batch: Batch, layer: InputLayer, *, as_bytes: bool = False, standardized: bool = False
) -> Case:
    inputs = _inputs(batch, layer.k, as_bytes=as_bytes, standardized=standardized)
    x, count = np.hstack([inputs.rows, np.ones((len(inputs.rows), 1))]), len(inputs.rows)
    delta_rows, parts = SLAB * ceil_div(batch.capacity, SLAB), ceil_div(batch.capacity, layer.row_part)
    dz = normal(count, layer.n)
    deltas = np.full((layer.components, delta_rows, layer.pitch), 0x7FC0, np.uint16)
    deltas[:, :count] = image_of(np.pad(dz, ((0, -count % 16), (0, 0))), layer.components)[:, :count]
    shape = parts, layer.k + 1, layer.gradient_floats // (layer.k + 1)
    value, bound = np.zeros(shape), np.zeros(shape)
    for part in range(parts):
        own = slice(part * layer.row_part, (part + 1) * layer.row_part)
        value[part, :, : layer.n] = x[own].T @ wide(dz[own])
        bound[part, :, : layer.n] = _bound(layer, x[own].T, wide(dz[own]))
    args = {
        **inputs.args, "deltas": deltas, "partials": blank(*shape), "k": layer.k, "n": layer.n, "part": layer.row_part,
        "delta_rows": delta_rows,
    }  # fmt: skip
    entry = kernels.input_layer_gradient(layer, SOURCES[as_bytes])
    name = _variant(batch, layer, as_bytes=as_bytes, standardized=standardized)
    return Case(name, entry, (layer.gradient_blocks, parts), args, {"partials": expect(value, bound)})


def input_layer_cases() -> Iterator[Case]:
    for components in kernels.COMPONENTS_OF_PRECISION.values():
        few, some, most = (
            InputLayer(k, n, components, warps, SLAB * 8 // warps, SLAB)
            for k, n, warps in ((70, 7, 2), (321, 40, 4), (300, 117, 8))
        )
        for layer in (few, some, most):
            of_parts = replace(layer, part=2 * layer.part, row_part=2 * SLAB)
            for batch in (whole(35), Batch(150, 170), Batch(150, 170, 1)):
                yield input_layer_forward(batch, layer)
                yield input_layer_gradient(batch, layer)
            for is_changed in (False, True):
                yield input_layer_forward(whole(150), of_parts, as_bytes=True, standardized=is_changed)
                yield input_layer_gradient(whole(150), of_parts, as_bytes=True, standardized=is_changed)
        for k in (64, 68):  # whole slabs, and some inputs of one
            layer = replace(most, k=k, part=256)
            yield input_layer_forward(whole(20), layer, standardized=True)
            yield input_layer_gradient(whole(20), layer, standardized=True)
            yield input_layer_forward(whole(20), layer, as_bytes=True)
            yield input_layer_gradient(whole(20), layer, as_bytes=True)
