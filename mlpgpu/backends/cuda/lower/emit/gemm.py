"""Dense layers on tensor cores: what splits operands, and products of them.

``gemm/split_operands.cuh``, ``gemm/gemm_sm80.cuh``, ``gemm/gemm_sm90.cuh``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

from ..... import plan as ops
from ... import kernels
from ...kernels import (
    ClusterSplitTile,
    GemmTile,
    Sm80Tile,
    ceil_div,
    filled_rows,
    padded_columns,
    padded_rows,
    strided_grid,
)
from ...kernels.launches import At, Launch, Map, Value
from ...select.counted import grouped_clocks
from ...select.operands import has_own_inputs
from ..groups import (
    GemmForward,
    GemmForwardLoss,
    GemmGradient,
    GemmInput,
    GemmUpdates,
    SplitColumns,
    SplitRows,
)
from .operands import (
    bias_sum,
    collected_column_scales,
    columns_of,
    component_elements,
    components,
    components_of,
    elements_of,
    floats,
    format_of,
    of_shard,
    rows_words,
    weight_components,
    weight_words,
    words,
    written,
)
from .rows import weighed
from .shard import Shard

# Arrays: partial sums of biases' gradients, and a description of each bias, PartialBias of elementwise/update.cuh.
BIAS_PARTIALS, PARTIAL_BIASES = "bias partials", "biases of partials"


def split_weights(shard: Shard, readers: Mapping[str, str]) -> list[Launch]:
    """Operands of all weights that tensor cores read, of two in a launch; ``readers`` are titles by weight."""
    weights = list(readers)
    launches = []
    for first, second in zip_longest(weights[::2], weights[1::2]):
        blocks = sum(kernels.row_blocks(*shard.shapes[weight])[0] for weight in (first, second) if weight)
        values = {**_weight(shard, first, ""), **_weight(shard, second, "other_")}
        launches.append(Launch(kernels.split_weights(format_of(shard)), (blocks, 1, 1), values, readers[first]))
    return launches


def _weight(shard: Shard, weight: str | None, prefix: str) -> dict[str, Value]:
    """A weight as an argument of the kernel that splits it."""
    values: dict[str, Value] = dict.fromkeys(("w", "components", "row_scales", "column_scales"))
    k = n = 0
    if weight:
        k, n = shard.shapes[weight]
        values = {
            "w": shard.ref(weight),
            "components": weight_components(shard, weight),
            **weight_words(shard, weight),
        }
    return {prefix + name: value for name, value in {**values, "k": k, "n": n}.items()}


def split_rows(shard: Shard, group: SplitRows) -> None:
    name, n = group.name, shard.width(group.name)
    is_input = group.reader.x == name
    beside = _inputs(shard, group.reader) if is_input else name
    operands = None
    if group.operands:
        operands = components(shard, of_shard(shard, f"{beside}.components"), elements_of(shard, name))
    columns = (
        collected_column_scales(shard, of_shard(shard, f"{beside}.column_scales"), n)
        if is_input and shard.work.is_training
        else None
    )
    source = shard.setting.source if group.by_order else "float32"
    launch = shard.launch(
        group, kernels.split_rows(format_of(shard), source), kernels.row_blocks(shard.rows, n),
        **shard.rows_of(name, group.by_order), scale=At("scale") if group.by_order else 1.0,
        weight_row_scales=weight_words(shard, group.reader.weight)["row_scales"] if is_input else None,
        copy=shard.stored(name) if group.is_copied else None, components=operands,
        component_stride=component_elements(shard, n),
        row_scales=rows_words(shard, beside), column_scales=columns, n=n,
    )  # fmt: skip
    if not group.is_staged:
        shard.launches.append(launch)
        return
    assert operands is not None
    shard.lowered.staged.append(launch)
    shard.lowered.staged_bytes[operands.array] = 2 * format_of(shard).components * component_elements(shard, n)


def split_columns(shard: Shard, group: SplitColumns) -> None:
    """A launch that goes through the columns of deltas."""
    op, operand_format = group.op, format_of(shard)
    n = shard.shapes[op.weight][1]
    operands, grid = columns_of(shard, group.op.dz, op.dweight), kernels.column_blocks(shard.rows, n)
    partials = shard.room(of_shard(shard, "column partials"), 4 * grid[1] * padded_columns(n))
    arrived = shard.room(of_shard(shard, "columns arrived"), 4 * grid[0])
    flags = (
        shard.room(of_shard(shard, "column partial flags"), 4 * grid[1] * padded_columns(n))
        if operand_format.scaled
        else None
    )
    shard.add(
        group, kernels.split_columns(operand_format), grid,
        dz=shard.ref(op.dz), row_scales=rows_words(shard, op.dz), x_row_scales=rows_words(shard, _inputs(shard, op)),
        components=operands, row_components=components_of(shard, op.dz) if group.rows_too else None,
        column_scales=_delta_columns(shard, op.dz), db=bias_sum(shard, op.dbias, n, is_summed=group.sums),
        component_stride=component_elements(shard, n), partials=partials, partial_flags=flags, arrived=arrived, n=n,
    )  # fmt: skip


def _inputs(shard: Shard, op: ops.Dense | ops.DenseBackward) -> str:
    """After what the operands of a layer's input are named: that, or that of a part whose scales they have."""
    is_own = has_own_inputs(shard.plan, op.weight, shard.work.operand_format)
    return f"{op.x} for {op.weight}" if is_own else op.x


def _input_components(shard: Shard, op: ops.Dense | ops.DenseBackward) -> At:
    return components(shard, of_shard(shard, f"{_inputs(shard, op)}.components"), elements_of(shard, op.x))


def _delta_columns(shard: Shard, dz: str) -> Value:
    return words(shard, of_shard(shard, f"{dz}.column_scales"), padded_columns(shard.width(dz)))


def forward(shard: Shard, group: GemmForward) -> None:
    op = group.op
    k, n = shard.shapes[op.weight]
    y, y_components = written(shard, group.dropout.y if group.dropout else op.y, group.y)
    tile = group.path.tile
    shard.add(
        group, kernels.tensor_forward(op.activation, tile, drops=group.dropout is not None),
        tile.grid(filled_rows(shard.rows) if y_components else shard.rows, n, shard.multiprocessors),
        **_forward_operands(shard, group), x_row_scales=rows_words(shard, _inputs(shard, op)),
        w_column_scales=weight_words(shard, op.weight)["column_scales"], x=floats(shard, op.x),
        w=floats(shard, op.weight),
        b=shard.ref(op.bias), z=shard.stored(op.z), y=y, y_components=y_components,
        y_stride=component_elements(shard, n), **shard.kept(group.dropout), prefetch=0,
        k=k, n=n,
    )  # fmt: skip


def forward_loss(shard: Shard, group: GemmForwardLoss) -> None:
    op, loss, tile = group.op, group.loss, group.path.tile
    k, n = shard.shapes[op.weight]
    assert loss.delta is not None
    delta_components = components_of(shard, loss.delta)
    grid = tile.grid(filled_rows(shard.rows), n, shard.multiprocessors)
    given = {**_forward_operands(shard, group), **weighed(shard, grid), "targets": At("plain targets")}
    entry = kernels.tensor_forward_loss(loss.loss.form, tile)
    shard.add(group, entry, grid, **given, b=shard.ref(op.bias), delta_components=delta_components, k=k, n=n)


def _forward_operands(shard: Shard, group: GemmForward | GemmForwardLoss) -> dict[str, Value]:
    op, tile = group.op, group.path.tile
    k, n = shard.shapes[op.weight]
    x, w = _sources(
        tile, (_input_components(shard, op), shard.rows, k), (weight_components(shard, op.weight), k, n), a_inner=True,
        b_inner=False,
    )  # fmt: skip
    return {"x_components": x, "x_stride": component_elements(shard, k), "w_components": w}


def backward_input(shard: Shard, group: GemmInput) -> None:
    op, tile, derivative = group.op, group.path.tile, group.derivative
    k, n = shard.shapes[op.weight]
    saved: dict[str, Value] = {"saved": shard.ref(derivative.saved), "saved_components": None}
    if derivative.of_operands and derivative.saved is not None:
        saved = {"saved": None, "saved_components": components_of(shard, derivative.saved)}
    dx, dx_components = written(shard, derivative.of(op.dx), group.dx)
    dz_source, w_source = _sources(
        tile, (components_of(shard, op.dz), shard.rows, n), (weight_components(shard, op.weight), k, n), a_inner=True,
        b_inner=True,
    )  # fmt: skip
    shard.add(
        group, kernels.tensor_backward_input(derivative.activation, tile, drops=derivative.masked is not None),
        tile.grid(filled_rows(shard.rows) if dx_components else shard.rows, k, shard.multiprocessors),
        dz_components=dz_source, dz_stride=component_elements(shard, n), w_components=w_source,
        dz_row_scales=rows_words(shard, op.dz),
        w_row_scales=weight_words(shard, op.weight)["row_scales"], dz=floats(shard, op.dz), w=floats(shard, op.weight),
        **saved,
        dx=dx, dx_components=dx_components, dx_stride=component_elements(shard, k),
        **shard.kept(derivative.masked) | {"keep": derivative.keep}, restore=derivative.restore, prefetch=0,
        k=k, n=n,
    )  # fmt: skip


def gradient(shard: Shard, group: GemmGradient) -> None:
    op, tile = group.op, group.path.tile
    k, n = shard.shapes[op.weight]
    operands, grid = _gradient_operands(shard, group), tile.grid(k, n, shard.multiprocessors)
    if not group.is_update:
        left = _bias_partials(shard, group, shard.ref(op.dbias)) if group.leaves_bias else None
        entry = kernels.tensor_backward_weight(tile)
        shard.add(group, entry, grid, **operands, dw=shard.ref(op.dweight), db_partials=left)
        return
    updated = shard.updated(op)
    db_partials = _bias_partials(shard, group, updated["bias"]) if group.leaves_bias else None
    if group.leaves_bias:
        updated |= {"bias": None, "bias_slots": None}
    shard.add(
        group, kernels.tensor_backward_update(shard.rule, tile), grid,
        **operands, db=bias_sum(shard, op.dbias, n, is_summed=group.sums_bias), db_partials=db_partials,
        w_components=_moved_components(shard, op.weight), **updated,
    )  # fmt: skip


def updates(shard: Shard, group: GemmUpdates) -> None:
    """The updates of several layers, one grid of tiles, of which each layer has some of its bias behind the others."""
    values, shapes, tiles, tile = dict[str, Value](), list[tuple[int, int]](), 0, group.path.tile
    assert isinstance(tile, ClusterSplitTile)
    for number, op in enumerate(group.ops):
        k, n = shard.shapes[op.weight]
        x, dz = _gradient_sources(shard, op, tile)
        moved = {name: value for name, value in shard.updated(op).items() if name.startswith(("weight", "bias"))}
        of_layer = {
            "x_components": x, "dz_components": dz, "dz": columns_of(shard, op.dz, op.dweight), **moved,
            "w_components": weight_components(shard, op.weight), "k": k, "n": n, "first": tiles,
        }  # fmt: skip
        values |= {f"{name}_{number}": value for name, value in of_layer.items()}
        tiles += tile.clusters(k, n) + (ceil_div(n, tile.n) if op.dbias else 0)
        shapes.append((k, n))
    lengths = {"clocks": grouped_clocks(tile, shapes, shard.rows, shard.multiprocessors)}
    launch = shard.launch(
        group, kernels.tensor_backward_updates(shard.rule, tile, len(group.ops)), (tile.split * tiles, 1, 1), **values,
        totals=At("totals"), size=shard.slot_pitch, capacity=shard.rows, prefetch=0,
    )  # fmt: skip
    shard.launches.append(replace(launch, lengths=lengths))


def received_update(shard: Shard, group: GemmGradient, received: At, slots: At | None, slot_pitch: int) -> Launch:
    """The gradient, to which that of the other shard is added, and the weight's step; its bias is moved elsewhere."""
    op, tile = group.op, group.path.tile
    k, n = shard.shapes[op.weight]
    updated = {**shard.updated(op), "bias": None, "bias_slots": None, "weight_slots": slots, "size": slot_pitch}
    left = _bias_partials(shard, group, shard.ref(op.dbias)) if group.leaves_bias else None
    return shard.launch(
        group, kernels.tensor_backward_update(shard.rule, tile, receives=True), tile.grid(k, n, shard.multiprocessors),
        **_gradient_operands(shard, group), db=None, db_partials=left,
        w_components=_moved_components(shard, op.weight), **updated, received=received,
    )  # fmt: skip


def moved_weight(
    shard: Shard, group: GemmGradient, gradient: At, received: At, slots: At | None, slot_pitch: int
) -> Launch:
    """The step of the weight along the gradient that is stored, and that of the other shard."""
    op = group.op
    k, n = shard.shapes[op.weight]
    # Another launch makes operands that have scales; a kernel that makes none is the same for all formats.
    components = _moved_components(shard, op.weight)
    entry = kernels.move_weight(shard.rule, kernels.BFLOAT16 if components is None else format_of(shard))
    return shard.launch(
        group, entry, strided_grid(k * ceil_div(n, 4), shard.most_blocks), totals=At("totals"), gradient=gradient,
        received=received, weight=shard.ref(op.weight), w_components=components, weight_slots=slots, size=slot_pitch,
        k=k, n=n,
    )  # fmt: skip


def _moved_components(shard: Shard, weight: str) -> Value:
    """The operands of a weight that a product moves, where it can make them: they have no scales."""
    return None if format_of(shard).scaled else weight_components(shard, weight)


def _gradient_operands(shard: Shard, group: GemmGradient) -> dict[str, Value]:
    op = group.op
    k, n = shard.shapes[op.weight]
    x_source, dz_source = _gradient_sources(shard, op, group.path.tile)
    return {
        "x_components": x_source, "x_stride": component_elements(shard, k), "dz_components": dz_source,
        "dz_stride": component_elements(shard, n),
        "x_column_scales": collected_column_scales(shard, of_shard(shard, f"{_inputs(shard, op)}.column_scales"), k),
        "w_row_scales": weight_words(shard, op.weight)["row_scales"], "dz_column_scales": _delta_columns(shard, op.dz),
        "x": floats(shard, op.x), "dz": floats(shard, op.dz), "prefetch": 0, "k": k, "n": n,
    }  # fmt: skip


def _gradient_sources(shard: Shard, op: ops.DenseBackward, tile: GemmTile) -> tuple[Value, Value]:
    """What a weight's gradient is made of."""
    k, n = shard.shapes[op.weight]
    x, dz = (_input_components(shard, op), shard.rows, k), (columns_of(shard, op.dz, op.dweight), shard.rows, n)
    return _sources(tile, x, dz, a_inner=False, b_inner=False)


def _bias_partials(shard: Shard, group: GemmGradient, bias: Value) -> At:
    """Where a product stores partial sums of the gradient of a ``bias``; another launch adds them up.

    That one updates the bias, or stores the gradient, whose place among the partials is given then.
    """
    lowered, partials, known = shard.lowered, of_shard(shard, BIAS_PARTIALS), of_shard(shard, PARTIAL_BIASES)
    k, n = shard.shapes[group.op.weight]
    pitch, count = padded_columns(n), group.path.tile.column_partials(k)
    assert isinstance(bias, At) and count is not None
    begin = lowered.bytes.get(partials, 0) // 4
    lowered.bytes[partials] = 4 * (begin + count * pitch)
    described = begin, count, pitch, n, *divmod(bias.offset, 1 << 31)[::-1]
    lowered.words[known] = (*lowered.words.get(known, ()), *described)
    return At(partials, begin)


Operand = tuple[At, int, int]  # components, rows, columns


def _sources(tile: GemmTile, a: Operand, b: Operand, *, a_inner: bool, b_inner: bool) -> tuple[Value, Value]:
    """What a product is given of its operands: components, or maps of them."""
    if isinstance(tile, Sm80Tile):
        return a[0], b[0]
    boxes = tile.boxes(a_inner=a_inner, b_inner=b_inner)
    first, second = (
        Map(operand.array, tile.operand_format.components, padded_rows(rows), columns, box)
        for (operand, rows, columns), box in zip((a, b), boxes, strict=True)
    )
    return first, second
