"""Operations bound to compiled loops; each function takes views of a shard's rows, or of a part of a batch.

Where one returns None, the operation or these rows of it are left to NumPy (``bindings``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ... import plan as ops
from ...activations import ACTIVATIONS
from ...random import least_kept
from ..constants import hyper_parameters, loss_numbers
from ..inputs import input_standardize
from .blas import BLAS
from .loops import Call, has_long_vectors, has_loop, joined, shared
from .products import (
    FEW_ROWS_DX,
    FEW_ROWS_Y,
    is_by_transpose,
    packs_nothing,
    packs_nothing_for_gradient,
    packs_nothing_for_inputs,
)
from .threads import Bound
from .workspace import Workspace

Steps = list[Bound | Call]

WHOLE = slice(None)

# Elements of an update from which on threads share it: waking one takes about 20 µs, and moving so many elements 80.
SHARED_UPDATE = 1 << 18
LINE = 16  # numbers of a cache line, or of two in float64


def bind_compiled(work: Workspace, op: ops.Operation, rows: slice, shard: int) -> Steps | None:
    """What an operation of one shard calls on its rows, or None."""
    bound = _BIND.get(type(op))
    if bound is None or not work.is_compiled or rows.start == rows.stop:
        return None
    return bound(work, op, rows, shard)


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, *, adds: bool = False) -> Bound | Call:
    """What writes ``a @ b`` to ``out``, or adds it, which only OpenBLAS does.

    Rows of a and b have no gaps, or those of their transposes have none.
    """
    blas = BLAS.products(out.dtype)
    if blas is None:
        assert not adds
        return partial(np.dot, a, b, out)
    (a_flipped, a_pitch), (b_flipped, b_pitch) = _layout(a), _layout(b)
    (m, k), n = a.shape, b.shape[1]
    of_out = out, _layout(out)[1], adds
    operands = a, a_pitch, b, b_pitch
    return Call(out.dtype, f"product{blas.bits}", blas.gemm, a_flipped, b_flipped, m, n, k, *operands, *of_out)


def _layout(matrix: np.ndarray) -> tuple[bool, int]:
    """Whether a matrix lies transposed, and how many elements lie from each row, or column then, to the next."""
    item = matrix.itemsize
    if matrix.strides[1] == item and matrix.strides[0] >= item * matrix.shape[1]:
        return False, max(matrix.strides[0] // item, 1)
    return True, max(matrix.strides[1] // item, 1)


def _speed(dtype: np.dtype, *, is_alone: bool) -> dict[str, bool]:
    """How fast loops are beside BLAS, as :mod:`~.products` asks; ``is_alone`` says that BLAS has one thread."""
    is_fast = is_alone and has_long_vectors(dtype)
    return {"is_fast": is_fast, "is_faster": is_fast and BLAS.has_short_vectors}


def rows_product(
    x: np.ndarray, weight: np.ndarray, out: np.ndarray, *, is_alone: bool = True, spares_blas: bool = False
) -> Bound | Call:
    """What writes ``x @ weight`` to ``out``, x (B, k) or some columns of an array, weight (k, n).

    ``is_alone`` says whether one thread makes it, even where BLAS does; ``spares_blas`` that BLAS never does.
    """
    rows, n = len(x), weight.shape[1]
    if spares_blas or packs_nothing(rows, weight.size, n, **_speed(out.dtype, is_alone=is_alone)):
        return unpacked_rows(x, weight, out)
    if rows == 1:
        return _vector_product(weight.T, x, out)
    return _vector_product(x, weight, out) if n == 1 else product(x, weight, out)


def gradient_product(
    x: np.ndarray, dz: np.ndarray, out: np.ndarray, *, adds: bool = False, is_alone: bool = True
) -> Bound | Call:
    """What writes ``x.T @ dz`` to ``out``, or adds it, x (B, k) or some columns of an array, dz (B, n)."""
    rows, n = dz.shape
    if not adds and packs_nothing_for_gradient(rows, out.size, n, **_speed(out.dtype, is_alone=is_alone)):
        return unpacked_gradient(x, dz, out)
    return (_vector_product if n == 1 else product)(x.T, dz, out, adds=adds)


def _vector_product(matrix: np.ndarray, vector: np.ndarray, out: np.ndarray, *, adds: bool = False) -> Bound | Call:
    """What writes ``matrix @ vector`` to ``out``, or adds it; vector and out have one row or one column."""
    blas, (is_transposed, pitch) = BLAS.products(out.dtype), _layout(matrix)
    if blas is None:
        assert not adds
        return partial(np.dot, matrix, vector.reshape(-1), out.reshape(-1))
    shape = matrix.shape[::-1] if is_transposed else matrix.shape
    operands = matrix, pitch, vector, out
    return Call(out.dtype, f"vector_product{blas.bits}", blas.gemv, is_transposed, *shape, *operands, adds)


def unpacked_rows(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> Call:
    """What writes ``x @ weight`` to ``out`` by the loop that packs nothing."""
    (rows, k), n = x.shape, weight.shape[1]
    return Call(out.dtype, "unpacked_product", x, _pitch(x), 1, weight, out, rows, n, k)


def unpacked_gradient(x: np.ndarray, dz: np.ndarray, out: np.ndarray) -> Call:
    """What writes ``x.T @ dz`` to ``out`` by the loop that packs nothing."""
    (rows, k), n = x.shape, dz.shape[1]
    return Call(out.dtype, "unpacked_product", x, 1, _pitch(x), dz, out, k, n, rows)


def _pitch(matrix: np.ndarray) -> int:
    """How many elements lie from each row to the next, whose own have no gaps."""
    return matrix.strides[0] // matrix.itemsize


def _transposed_product(a: np.ndarray, b: np.ndarray, transposed: np.ndarray, out: np.ndarray) -> Steps:
    """What writes ``a @ b`` to ``out`` (B, n), or some columns of an array, by way of ``transposed`` (n, B)."""
    return [product(b.T, a.T, transposed), Call(out.dtype, "transpose", transposed, out, *out.shape, _pitch(out))]


def _bind_standardize(work: Workspace, op: ops.Standardize, rows: slice, shard: int) -> Steps | None:
    # Inputs may have to be standardized in float64, which the data set says.
    return None if op == input_standardize(work.plan) else standardize(work, op, rows)


def standardize(work: Workspace, op: ops.Standardize, rows: slice) -> Steps:
    """What standardizes rows in the plan's precision."""
    x, y = work.view(op.x, rows), work.view(op.y, rows)
    return [Call(work.dtype, "standardize", x, work.arrays[op.mean], work.arrays[op.scale], y, *y.shape)]


def _bind_dense(work: Workspace, op: ops.Dense, rows: slice, shard: int) -> Steps:
    return [*forward_product(work, op, rows), *activation(work, op, rows)]


def forward_product(work: Workspace, op: ops.Dense, rows: slice) -> Steps:
    """What makes ``x W`` of rows, where the bias is added and the activation computed."""
    x, z, weight = work.view(op.x, rows), work.view(op.z or op.y, rows), work.arrays[op.weight]
    is_alone = work.threads.multiply_alone
    is_packed = not packs_nothing(len(x), weight.size, weight.shape[1], **_speed(work.dtype, is_alone=is_alone))
    if is_packed and is_by_transpose(len(x), weight.size, FEW_ROWS_Y):
        return _transposed_product(x, weight, work.scratch_like(z, rows).reshape(z.shape[::-1]), z)
    return [rows_product(x, weight, z, is_alone=is_alone)]


def activation(work: Workspace, op: ops.Dense, rows: slice) -> Steps:
    """What adds a layer's bias and computes its activation."""
    y, bias = work.view(op.y, rows), work.arrays[op.bias] if op.bias else None
    if op.activation == "identity" and bias is None:
        return []
    return [Call(work.dtype, _activation_loop(op), work.view(op.z or op.y, rows), bias, y, *y.shape)]


def _activation_loop(op: ops.Weighted) -> str:
    """The loop of a layer's activation; where z is kept for the backward pass, f′(z) takes its place there."""
    is_with_slope = op.z and ACTIVATIONS[op.activation].with_slope is not None
    return f"activate_with_slope_{op.activation}" if is_with_slope else f"activate_{op.activation}"


def _bind_locally_connected(work: Workspace, op: ops.LocallyConnected, rows: slice, shard: int) -> Steps:
    x, y, z = work.view(op.x, rows), work.view(op.y, rows), work.view(op.z or op.y, rows)
    weight, bias = work.arrays[op.weight], work.arrays[op.bias] if op.bias else None

    def outputs(part: slice, columns: slice) -> list[Call]:
        sums, results = z[part, columns], y[part, columns]
        biases = (bias, 0) if bias is None or len(bias) == 1 else (bias[columns], 1)
        windows = x[part, columns.start :], _pitch(x), weight[:, columns], _pitch(weight), len(weight)
        calls = [Call(work.dtype, "local_forward", *windows, *biases, sums, _pitch(z), *sums.shape)]
        if op.activation != "identity":
            # Rows of some of the columns have gaps between them.
            at_once = len(sums) if sums.shape[1] == y.shape[1] else 1
            for row in range(0, len(sums), at_once):
                pieces = sums[row : row + at_once], None, results[row : row + at_once]
                calls.append(Call(work.dtype, _activation_loop(op), *pieces, at_once, sums.shape[1]))
        return calls

    return [shared([outputs(*part) for part in work.threads.parts_of_array(*y.shape)])]


def _bind_dropout(work: Workspace, op: ops.Dropout, rows: slice, shard: int) -> Steps:
    x, y, width = work.view(op.x, rows), work.view(op.y, rows), work.arrays[op.y].shape[1]
    first, layer_width = op.part_of or (0, width)
    mask = work.masks.setdefault((op.layer, first), np.empty((work.plan.capacity, width), work.dtype))[rows]
    place = rows.start * layer_width + first, layer_width, *y.shape
    drawn = op.layer, least_kept(op.rate), 1.0 / (1.0 - op.rate)
    return [Call(work.dtype, "dropout_step", x, mask, y, *place, *drawn)]


def _bind_dropout_backward(work: Workspace, op: ops.DropoutBackward, rows: slice, shard: int) -> Steps:
    dy, dx = work.view(op.dy, rows), work.view(op.dx, rows)
    mask = work.masks[op.layer, op.part_of[0] if op.part_of else 0][rows]
    return [Call(work.dtype, "multiply", dy, mask, dx, dx.size)]


def _bind_loss(work: Workspace, op: ops.Loss, rows: slice, shard: int) -> Steps | None:
    return loss(work, op, rows, work.shard_sums[shard])


def loss(work: Workspace, op: ops.Loss, rows: slice, sums: np.ndarray) -> Steps | None:
    """What computes the loss of rows; their loss and weight go to ``sums`` (2,) float64."""
    logits, target = work.view(op.logits, rows), work.view(op.target, rows)
    weight, value = work.view(op.weight, rows), work.view(op.value, rows)
    # An evaluation discards the delta: it goes to the buffer of the output, which is written after the loss.
    delta = work.view(op.delta or work.plan.output, rows)
    scratch, form = work.scratch_like(logits, rows), op.loss.form
    if form == "softmax_cross_entropy":
        name = f"{form}_of_{op.kind}"
        steps: Steps = [Call(work.dtype, name, logits, target, value, delta, scratch, *logits.shape)]
    elif has_loop(work.dtype, f"loss_{form}"):
        numbers = loss_numbers(op.loss, work.dtype)
        steps = [Call(work.dtype, f"loss_{form}", logits, target, value, delta, scratch, *logits.shape, numbers)]
    else:
        return None
    return [*steps, Call(work.dtype, "weigh_rows", work.described_feed, weight, value, delta, *delta.shape, sums)]


def _bind_output(work: Workspace, op: ops.Output, rows: slice, shard: int) -> Steps:
    return output(
        op,
        work.view(op.logits, rows),
        work.view(op.y, rows),
        *(work.arrays.get(name or "") for name in (op.mean, op.scale)),
    )


def output(
    op: ops.Output, logits: np.ndarray, y: np.ndarray, mean: np.ndarray | None, scale: np.ndarray | None
) -> Steps:
    """Predictions ``y`` of ``logits``, which may be the same array."""
    steps: Steps = []
    if op.function == "softmax":
        steps.append(Call(y.dtype, "softmax", logits, y, *y.shape))
    elif op.function == "exp":
        steps.append(Call(y.dtype, "exponential", logits, y, y.size))
    elif op.function == "sigmoid" or y is not logits:
        steps.append(Call(y.dtype, f"activate_{op.function}", logits, None, y, *y.shape))
    if mean is not None and scale is not None:
        steps.append(Call(y.dtype, "unstandardize", y, mean, scale, y, *y.shape))
    return steps


def _bind_activation_backward(work: Workspace, op: ops.ActivationBackward, rows: slice, shard: int) -> Steps:
    saved, dy = work.view(op.saved, rows), work.view(op.dy, rows)
    if ACTIVATIONS[op.activation].with_slope is not None:  # the forward pass left f′(z)
        return [Call(work.dtype, "multiply", dy, saved, dy, dy.size)]
    return [Call(work.dtype, f"activation_backward_{op.activation}", saved, dy, dy.size)]


def _bind_dense_backward(work: Workspace, op: ops.DenseBackward, rows: slice, shard: int) -> Steps:
    dz = work.view(op.dz, rows)
    steps: Steps = []
    if op.dweight:
        x, out = work.view(op.x, rows), work.partial(op.dweight, shard)
        steps.append(gradient_product(x, dz, out, is_alone=work.threads.multiply_alone))
    if op.dbias:
        steps.append(column_sums(dz, work.partial(op.dbias, shard)))
    return [*steps, *input_gradient(work, op, rows)]


def _bind_locally_connected_backward(
    work: Workspace, op: ops.LocallyConnectedBackward, rows: slice, shard: int
) -> Steps:
    dz, x, weight = work.view(op.dz, rows), work.view(op.x, rows), work.arrays[op.weight]
    n, window = dz.shape[1], len(weight)
    steps: Steps = []
    if op.dweight:
        dweight = work.partial(op.dweight, shard)

        def gradient(columns: slice) -> list[Call]:
            deltas, out = dz[:, columns], dweight[:, columns]
            inputs = x[:, columns.start :], _pitch(x)
            made = out, _pitch(dweight), window, *deltas.shape
            return [Call(work.dtype, "local_gradient", deltas, _pitch(dz), *inputs, *made)]

        parts = [gradient(columns) for _, columns in work.threads.parts_of_array(0, n)]
        steps += [shared(parts), partial(dweight[:, n:].fill, 0.0)]
    if op.dbias:
        dbias = work.partial(op.dbias, shard)
        is_one = len(dbias) == 1  # of all columns
        of_columns = np.empty(n, work.dtype) if is_one else dbias[:n]
        add = partial(np.add.reduce, of_columns, out=dbias, keepdims=True)
        steps += [column_sums(dz, of_columns), add if is_one else partial(dbias[n:].fill, 0.0)]
    if op.dx:
        dx = work.view(op.dx, rows)

        def inputs_gradient(part: slice, columns: slice) -> list[Call]:
            out, of_weight = dx[part, columns], (weight, _pitch(weight), window, n)
            made = out, _pitch(dx), len(out), columns.start, columns.stop
            return [Call(work.dtype, "local_input_gradient", dz[part], _pitch(dz), *of_weight, *made)]

        steps.append(shared([inputs_gradient(*part) for part in work.threads.parts_of_array(*dx.shape)]))
    return steps


def _bind_bias_backward(work: Workspace, op: ops.BiasBackward, rows: slice, shard: int) -> Steps:
    return [column_sums(work.view(op.dz, rows), work.partial(op.dbias, shard))]


def column_sums(dz: np.ndarray, out: np.ndarray, *, adds: bool = False) -> Call:
    """What writes the sums of the columns of ``dz`` (B, n), whose rows have no gaps, to ``out``, or adds them."""
    return Call(dz.dtype, "column_sums", dz, out, *dz.shape, _pitch(dz), adds)


def input_gradient(work: Workspace, op: ops.DenseBackward, rows: slice, columns: slice = WHOLE) -> Steps:
    """What makes dx of rows, or some columns of it, if it is wanted."""
    if not op.dx:
        return []
    dz, weight, dx = work.view(op.dz, rows), work.arrays[op.weight], work.view(op.dx, rows)
    if weight.shape[1] == 1 and columns == WHOLE:  # each row of dx is a multiple of one
        return [Call(work.dtype, "unpacked_product", dz, 1, 1, weight, dx, len(dz), len(weight), 1)]
    speed, part = _speed(work.dtype, is_alone=work.threads.multiply_alone), weight[columns]
    unpacked = packs_nothing_for_inputs(len(dz), part.size, **speed)
    if not (unpacked or is_by_transpose(len(dz), weight.size, FEW_ROWS_DX)):
        return [product(dz, part.T, dx[:, columns])]
    transposed = work.scratch_like(dx, rows).reshape(dx.shape[::-1])
    if unpacked:
        return _unpacked_input_gradient(dz, part, transposed[columns], dx[:, columns])
    return _transposed_product(dz, part.T, transposed[columns], dx[:, columns])


def _unpacked_input_gradient(dz: np.ndarray, weight: np.ndarray, transposed: np.ndarray, dx: np.ndarray) -> Steps:
    """What writes ``dz @ weight.T`` to ``dx`` (B, k), or some columns of an array, by the loop that packs nothing.

    The weight is transposed, or where that has more numbers, dz, and dx by way of ``transposed`` (k, B).
    """
    (rows, n), (k, _), dtype = dz.shape, weight.shape, dx.dtype
    if k * n < rows * (k + n) and _pitch(dx) == k:
        flipped = np.empty((n, k), dtype)
        return [Call(dtype, "transpose", weight, flipped, n, k, k), unpacked_rows(dz, flipped, dx)]
    flipped = np.empty((n, rows), dtype)
    return [
        Call(dtype, "transpose", dz, flipped, n, rows, rows),
        unpacked_rows(weight, flipped, transposed),
        Call(dtype, "transpose", transposed, dx, rows, k, _pitch(dx)),
    ]


def bind_update(work: Workspace, op: ops.Update, gradient: np.ndarray) -> Bound:
    """What moves this rank's slice of the parameters along its ``gradient`` (elements of the slice,)."""
    own, now = work.slice.gradient, work.now
    parts = work.threads.count if len(gradient) >= SHARED_UPDATE else 1
    ends = [own.start + len(gradient) * part // parts // LINE * LINE for part in range(parts)] + [own.stop]
    pieces = [slice(*each) for each in pairwise(ends)]
    calls = [moves(work, op, gradient[each.start - own.start : each.stop - own.start], each) for each in pieces]
    runs = [run for each in calls for run in joined(each, now)]

    def update() -> None:
        now["rates"][0, : len(work.row)] = work.row
        now["scale"], now["inverse_weight"] = work.gradient_factor, work.inverse_weight
        work.threads.call_beside(runs)

    return update


def moves(work: Workspace, op: ops.Update, gradient: np.ndarray, elements: slice) -> list[Call]:
    """What moves the parameters whose gradient is ``gradient``, these elements of the plan's flat one."""
    own, rule, slots = work.slice.parameters, op.optimizer, work.slots
    return [
        Call(
            work.dtype, f"update_step_{type(rule).__name__}", work.parameters[each.offset : each.offset + each.size],
            gradient[each.gradient - elements.start :][: each.size],
            slots[:, each.offset - own.start :] if len(slots) else None, slots.shape[1],
            each.size, float(rule.l2), float(each.alpha), hyper_parameters(rule, work.dtype),
        )
        for each in work.plan.trained_in(elements)
    ]  # fmt: skip


_BIND: dict[type[ops.Operation], Callable[[Workspace, Any, slice, int], Steps | None]] = {
    ops.Standardize: _bind_standardize,
    ops.Dense: _bind_dense,
    ops.LocallyConnected: _bind_locally_connected,
    ops.Dropout: _bind_dropout,
    ops.Loss: _bind_loss,
    ops.Output: _bind_output,
    ops.ActivationBackward: _bind_activation_backward,
    ops.DenseBackward: _bind_dense_backward,
    ops.LocallyConnectedBackward: _bind_locally_connected_backward,
    ops.BiasBackward: _bind_bias_backward,
    ops.DropoutBackward: _bind_dropout_backward,
}
