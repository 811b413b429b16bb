"""Operations bound to compiled loops, in float32; each function takes views of a shard's rows.

Where one returns None, the operation or these rows of it are left to NumPy (``bindings``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import plan as ops
from ...activations import ACTIVATIONS
from ...random import Purpose
from ..constants import hyper_parameters, loss_numbers
from ..inputs import input_standardize
from .blas import BLAS
from .loops import Call, joined, library
from .products import FEW_ROWS_DX, FEW_ROWS_Y, has_few_rows, has_few_rows_of_gradient, is_by_transpose
from .threads import Bound
from .workspace import Workspace

Steps = list[Bound | Call]

_L2 = 1  # its place in Hyper

# Elements of an update from which on threads share it: waking one takes about 20 µs, and moving so many elements 80.
SHARED_UPDATE = 1 << 18
LINE = 16  # float32 of a cache line


def bind_compiled(work: Workspace, op: ops.Operation, rows: slice, shard: int) -> Steps | None:
    """What an operation of one shard calls on its rows, or None."""
    bound = _BIND.get(type(op))
    if bound is None or not work.is_compiled or rows.start == rows.stop:
        return None
    return bound(work, op, rows, shard)


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Bound | Call:
    """What writes ``a @ b`` to ``out``; each of a and b is C-contiguous, or its transpose is."""
    blas = BLAS.products
    if blas is None:
        return partial(np.dot, a, b, out)
    flips = [not each.flags.c_contiguous for each in (a, b)]
    pitches = [max(1, (each.T if flip else each).shape[1]) for each, flip in zip((a, b), flips, strict=True)]
    (m, k), n = a.shape, b.shape[1]
    return Call(f"product{blas.bits}", blas.gemm, *flips, m, n, k, a, pitches[0], b, pitches[1], out, max(1, n))


def rows_product(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> Bound | Call:
    """What writes ``x @ weight`` to ``out``, x (B, k), weight (k, n)."""
    (rows, k), n, blas = x.shape, weight.shape[1], BLAS.products
    if has_few_rows(rows, weight.size):
        return Call("few_rows_product", x, k, 1, weight, out, rows, n, k)
    if rows == 1 and blas is not None:
        return Call(f"row_product{blas.bits}", blas.gemv, n, k, x, weight, out)
    return product(x, weight, out)


def _gradient(x: np.ndarray, dz: np.ndarray, out: np.ndarray) -> Bound | Call:
    """What writes ``x.T @ dz`` to ``out``, x (B, k), dz (B, n)."""
    (rows, k), n = x.shape, dz.shape[1]
    if has_few_rows_of_gradient(rows, out.size, n):
        return Call("few_rows_product", x, 1, k, dz, out, k, n, rows)
    return product(x.T, dz, out)


def _transposed_product(work: Workspace, a: np.ndarray, b: np.ndarray, out: np.ndarray, rows: slice) -> Steps:
    transposed = work.scratch_like(out, rows).reshape(out.shape[::-1])
    return [product(b.T, a.T, transposed), Call("transpose", transposed, out, *out.shape)]


def _bind_standardize(work: Workspace, op: ops.Standardize, rows: slice, shard: int) -> Steps | None:
    # Inputs may have to be standardized in float64, which the data set says.
    return None if op == input_standardize(work.plan) else standardize(work, op, rows)


def standardize(work: Workspace, op: ops.Standardize, rows: slice) -> Steps:
    """What standardizes rows in float32."""
    x, y = work.view(op.x, rows), work.view(op.y, rows)
    return [Call("standardize", x, work.arrays[op.mean], work.arrays[op.scale], y, *y.shape)]


def _bind_dense(work: Workspace, op: ops.Dense, rows: slice, shard: int) -> Steps:
    x, y = work.view(op.x, rows), work.view(op.y, rows)
    z = work.view(op.z, rows) if op.z else y
    bias = work.arrays[op.bias] if op.bias else None
    weight = work.arrays[op.weight]
    if is_by_transpose(len(x), weight.size, FEW_ROWS_Y) and not has_few_rows(len(x), weight.size):
        steps = _transposed_product(work, x, weight, z, rows)
    else:
        steps = [rows_product(x, weight, z)]
    if op.activation != "identity" or bias is not None:
        # Where z is kept for the backward pass, f′(z) takes its place there.
        is_with_slope = op.z and ACTIVATIONS[op.activation].with_slope is not None
        name = f"activate_with_slope_{op.activation}" if is_with_slope else f"activate_{op.activation}"
        steps.append(Call(name, z, bias, y, *y.shape))
    return steps


def _bind_dropout(work: Workspace, op: ops.Dropout, rows: slice, shard: int) -> Steps | None:
    if op.part_of:
        return None
    x, y = work.view(op.x, rows), work.view(op.y, rows)
    width = y.shape[1]
    mask = work.masks.setdefault((op.layer, 0), np.empty((work.plan.capacity, width), work.dtype))[rows]
    threshold = math.ceil(op.rate * 2**53)
    address = rows.start * width, y.size, work.seed_and_step, int(Purpose.DROPOUT), op.layer
    return [Call("dropout", x, mask, y, *address, threshold, 1.0 / (1.0 - op.rate))]


def _bind_dropout_backward(work: Workspace, op: ops.DropoutBackward, rows: slice, shard: int) -> Steps:
    dy, dx = work.view(op.dy, rows), work.view(op.dx, rows)
    mask = work.masks[op.layer, op.part_of[0] if op.part_of else 0][rows]
    return [Call("multiply", dy, mask, dx, dx.size)]


def _bind_loss(work: Workspace, op: ops.Loss, rows: slice, shard: int) -> Steps | None:
    logits, target = work.view(op.logits, rows), work.view(op.target, rows)
    weight, value = work.view(op.weight, rows), work.view(op.value, rows)
    # An evaluation discards the delta: it goes to the buffer of the output, which is written after the loss.
    delta = work.view(op.delta or work.plan.output, rows)
    scratch, form = work.scratch_like(logits, rows), op.loss.form
    if form == "softmax_cross_entropy":
        name = f"{form}_of_{op.kind}"
        steps: Steps = [Call(name, logits, target, value, delta, scratch, *logits.shape)]
    elif library_has(f"loss_{form}"):
        numbers = loss_numbers(op.loss)
        steps = [Call(f"loss_{form}", logits, target, value, delta, scratch, *logits.shape, numbers)]
    else:
        return None

    def prepare(call: Call) -> None:
        call.set(0, None if work.feed.weight is None else weight)

    sums = work.shard_sums[shard]
    return [*steps, Call("weigh", None, value, delta, *delta.shape, sums, prepare=prepare)]


def library_has(name: str) -> bool:
    """Whether there is such a loop."""
    found = library()
    return found is not None and found.has(name)


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
        steps.append(Call("softmax", logits, y, *y.shape))
    elif op.function == "exp":
        steps.append(Call("exponential", logits, y, y.size))
    elif op.function == "sigmoid" or y is not logits:
        steps.append(Call(f"activate_{op.function}", logits, None, y, *y.shape))
    if mean is not None and scale is not None:
        steps.append(Call("unstandardize", y, mean, scale, y, *y.shape))
    return steps


def _bind_activation_backward(work: Workspace, op: ops.ActivationBackward, rows: slice, shard: int) -> Steps:
    saved, dy = work.view(op.saved, rows), work.view(op.dy, rows)
    if ACTIVATIONS[op.activation].with_slope is not None:  # the forward pass left f′(z)
        return [Call("multiply", dy, saved, dy, dy.size)]
    return [Call(f"activation_backward_{op.activation}", saved, dy, dy.size)]


def _bind_dense_backward(work: Workspace, op: ops.DenseBackward, rows: slice, shard: int) -> Steps:
    dz = work.view(op.dz, rows)
    steps: Steps = []
    if op.dweight:
        steps.append(_gradient(work.view(op.x, rows), dz, work.partial(op.dweight, shard)))
    if op.dbias:
        steps.append(Call("column_sums", dz, work.partial(op.dbias, shard), *dz.shape))
    if op.dx:
        weight, dx = work.arrays[op.weight].T, work.view(op.dx, rows)
        if is_by_transpose(len(dz), weight.size, FEW_ROWS_DX):
            steps += _transposed_product(work, dz, weight, dx, rows)
        else:
            steps.append(product(dz, weight, dx))
    return steps


def bind_update(work: Workspace, op: ops.Update, gradient: np.ndarray) -> Bound:
    """What moves this rank's slice of the parameters along its ``gradient`` (elements of the slice,)."""
    own, rule = work.slice, op.optimizer
    rates = np.zeros(3, np.float32)
    moves: list[tuple[Call, float, np.ndarray]] = []
    parts = work.threads.count if len(gradient) >= SHARED_UPDATE else 1
    beside: list[list[Call]] = [[] for _ in range(parts)]
    for each in work.plan.trained_in(own.gradient):
        ends = [each.size * part // parts // LINE * LINE for part in range(parts)] + [each.size]
        for calls, first, end in zip(beside, ends[:-1], ends[1:], strict=True):
            moved = slice(each.offset + first - own.parameters.start, each.offset + end - own.parameters.start)
            along = slice(each.gradient + first - own.gradient.start, each.gradient + end - own.gradient.start)
            numbers = hyper_parameters(rule)
            call = Call(
                f"update_{type(rule).__name__}", work.parameters[each.offset + first : each.offset + end],
                gradient[along], work.slots[:, moved] if len(work.slots) else None, work.slots.shape[1],
                end - first, 0.0, rates, numbers,
            )  # fmt: skip
            calls.append(call)
            moves.append((call, each.alpha, numbers))
    runs = [run for calls in beside for run in joined(calls)]

    def update() -> None:
        rates[: len(work.row)] = work.row
        for call, alpha, numbers in moves:
            call.set(_SCALE, work.gradient_factor)
            # Its penalty is divided by the batch's weight, as the gradient is, and never clipped: as l2's is.
            numbers[_L2] = rule.l2 + alpha * work.inverse_weight
        work.threads.call_beside(runs)

    return update


_SCALE = 5  # its place among update's arguments

_BIND: dict[type[ops.Operation], Callable[[Workspace, Any, slice, int], Steps | None]] = {
    ops.Standardize: _bind_standardize,
    ops.Dense: _bind_dense,
    ops.Dropout: _bind_dropout,
    ops.Loss: _bind_loss,
    ops.Output: _bind_output,
    ops.ActivationBackward: _bind_activation_backward,
    ops.DenseBackward: _bind_dense_backward,
    ops.DropoutBackward: _bind_dropout_backward,
}
