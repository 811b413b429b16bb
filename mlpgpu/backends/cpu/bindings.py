"""Operations bound to arrays: a function for each, which takes views of a shard's rows and returns a closure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ... import plan as ops
from ...activations import ACTIVATIONS
from ...losses import apply_output
from ...random import half_words, least_kept
from ..inputs import input_standardize
from .between_parts import join_parts, sum_parts
from .compiled import bind_compiled
from .compiled import standardize as standardize_compiled
from .loops import Call, joined
from .products import FEW_ROWS_DX, FEW_ROWS_Y, is_by_transpose
from .threads import Bound
from .workspace import Workspace


def bind(work: Workspace, operations: Sequence[ops.Operation], rows: slice, shard: int) -> list[Bound]:
    """The operations of one shard on its rows of the batch, in order; those of all shards together are left out.

    Those that are compiled loops are called together where they are neighbours.
    """
    steps: list[Bound | Call] = []
    for op in operations:
        if type(op) in _BIND:
            compiled = bind_compiled(work, op, rows, shard)
            steps += [_BIND[type(op)](work, op, rows, shard)] if compiled is None else compiled
    return joined(steps, work.now)


def _product(
    work: Workspace, a: np.ndarray, b: np.ndarray, out: np.ndarray, rows: slice, few: tuple[int, int]
) -> Bound:
    """What writes ``a @ b`` to ``out``, the rows ``rows`` of a buffer; ``few`` says from where on by its transpose."""
    if not is_by_transpose(len(a), b.size, few):
        return partial(np.dot, a, b, out)
    transposed = work.scratch_like(out, rows).reshape(out.shape[::-1])

    def product() -> None:
        np.dot(b.T, a.T, out=transposed)
        np.copyto(out, transposed.T)

    return product


def _bind_gather(work: Workspace, op: ops.Gather, rows: slice, shard: int) -> Bound:
    x = work.view(op.x, rows)
    target = work.view(op.target, rows) if op.target else None
    weight = work.view(op.weight, rows) if op.weight else None
    columns = slice(*op.columns) if op.columns else None

    def gather() -> None:
        # Rows come from an order that is in range by construction; mode="clip" spares NumPy a copy.
        feed = work.feed
        storage, batch = feed.storage[rows], feed.batch[rows]
        if columns is not None:  # np.take would copy all columns of all rows first
            x[...] = feed.dataset.storage_x[storage, columns]
            if feed.dataset.scale is not None:
                np.multiply(x, feed.dataset.scale, out=x)
        elif feed.staging is None:
            np.take(feed.dataset.storage_x, storage, axis=0, out=x, mode="clip")
        else:
            staging = feed.staging[rows]
            np.take(feed.dataset.storage_x, storage, axis=0, out=staging, mode="clip")
            if feed.wide is not None:
                pass  # the next operation rounds them
            elif feed.dataset.scale is None:
                np.copyto(x, staging, casting="same_kind")
            else:
                np.multiply(staging, feed.dataset.scale, out=x, dtype=x.dtype)
        if target is not None and feed.target is not None:
            np.take(feed.target, batch, axis=0, out=target, mode="clip")
        if feed.weight is not None and weight is not None:
            np.take(feed.weight, batch, out=weight, mode="clip")

    return gather


def _bind_standardize(work: Workspace, op: ops.Standardize, rows: slice, shard: int) -> Bound:
    x, y = work.view(op.x, rows), work.view(op.y, rows)
    mean, scale = work.arrays[op.mean], work.arrays[op.scale]

    is_of_inputs = op == input_standardize(work.plan)
    compiled = joined(standardize_compiled(work, op, rows)) if work.is_compiled else ()

    def standardize() -> None:
        feed = work.feed
        if is_of_inputs and feed.wide is not None and feed.staging is not None and work.input_scaling is not None:
            work.input_scaling.standardize(feed.staging[rows], feed.wide[rows], y)
            return
        for call in compiled:
            call()
        if not compiled:
            np.subtract(x, mean, out=y)
            np.divide(y, scale, out=y)

    return standardize


def _forward(
    op: ops.Dense | ops.LocallyConnected | ops.SumParts,
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None:
    """A layer's activation as ``forward(z, y, scratch)``; None for the identity.

    Where z is kept for the backward pass, f′(z) takes its place there: both have most of their work in common.
    """
    activation = ACTIVATIONS[op.activation]
    with_slope = activation.with_slope
    if op.z and with_slope is not None:
        return lambda z, y, scratch: with_slope(z, y, z, scratch)
    return activation.forward if op.activation != "identity" else None


def _bind_dense(work: Workspace, op: ops.Dense, rows: slice, shard: int) -> Bound:
    x, y = work.view(op.x, rows), work.view(op.y, rows)
    z = work.view(op.z, rows) if op.z else y
    weight, bias = work.arrays[op.weight], work.arrays[op.bias] if op.bias else None
    scratch = work.scratch_like(y, rows)
    forward = _forward(op)
    product = _product(work, x, weight, z, rows, FEW_ROWS_Y)

    def dense() -> None:
        product()
        if bias is not None:
            np.add(z, bias, out=z)
        if forward is not None:
            forward(z, y, scratch)

    return dense


def _bind_locally_connected(work: Workspace, op: ops.LocallyConnected, rows: slice, shard: int) -> Bound:
    x, y = work.view(op.x, rows), work.view(op.y, rows)
    z = work.view(op.z, rows) if op.z else y
    n = y.shape[1]
    weight, bias = work.arrays[op.weight][:, :n], work.arrays[op.bias][:n] if op.bias else None
    scratch = work.scratch_like(y, rows)
    forward = _forward(op)
    window = len(weight)

    def outputs(part: slice, columns: slice) -> Bound:
        sums, products, result = z[part, columns], scratch[part, columns], y[part, columns]
        inputs = [x[part, columns.start + r : columns.stop + r] for r in range(window)]
        weights = list(weight[:, columns])
        biases = bias if bias is None or len(bias) == 1 else bias[columns]

        def call() -> None:
            # One pass over the outputs for each weight of a window, so that scratch does not grow with the window.
            np.multiply(inputs[0], weights[0], out=sums)
            for seen, w in zip(inputs[1:], weights[1:], strict=True):
                np.multiply(seen, w, out=products)
                np.add(sums, products, out=sums)
            if biases is not None:
                np.add(sums, biases, out=sums)
            if forward is not None:
                forward(sums, result, products)

        return call

    return work.threads.divided(outputs, len(y), n)


def _bind_dropout(work: Workspace, op: ops.Dropout, rows: slice, shard: int) -> Bound:
    x, y, width = work.view(op.x, rows), work.view(op.y, rows), work.arrays[op.y].shape[1]
    first, layer_width = op.part_of or (0, width)
    mask = work.masks.setdefault((op.layer, first), np.empty((work.plan.capacity, width), work.dtype))[rows]
    least, keep, elements = least_kept(op.rate), 1.0 / (1.0 - op.rate), len(y) * layer_width

    def dropout() -> None:
        drawn = half_words(rows.start * layer_width, elements, seed=work.seed, step=work.step, layer=op.layer)
        np.greater_equal(drawn.reshape(-1, layer_width)[:, first : first + width], least, out=mask)
        np.multiply(mask, keep, out=mask)
        np.multiply(x, mask, out=y)

    return dropout


def _bind_loss(work: Workspace, op: ops.Loss, rows: slice, shard: int) -> Bound:
    logits, target = work.view(op.logits, rows), work.view(op.target, rows)
    weight, value = work.view(op.weight, rows), work.view(op.value, rows)
    column = weight[:, np.newaxis]
    # An evaluation discards the delta: it goes to the buffer of the output, which is written after the loss.
    delta = work.view(op.delta or work.plan.output, rows)
    scratch = work.scratch_like(logits, rows)
    evaluate = op.loss.evaluate
    sums = work.shard_sums[shard]

    def loss() -> None:
        evaluate(logits, target, value, delta, scratch)
        sums[1] = len(value)
        if work.feed.weight is not None:
            np.multiply(value, weight, out=value)
            np.multiply(delta, column, out=delta)
            sums[1] = np.add.reduce(weight)
        sums[0] = np.add.reduce(value)

    return loss


def _bind_output(work: Workspace, op: ops.Output, rows: slice, shard: int) -> Bound:
    logits, y = work.view(op.logits, rows), work.view(op.y, rows)
    mean, scale = (work.arrays[name] if name else None for name in (op.mean, op.scale))

    def output() -> None:
        np.copyto(y, logits)
        apply_output(op.function, y)
        if scale is not None and mean is not None:
            np.multiply(y, scale, out=y)
            np.add(y, mean, out=y)

    return output


def _bind_activation_backward(work: Workspace, op: ops.ActivationBackward, rows: slice, shard: int) -> Bound:
    saved, dy = work.view(op.saved, rows), work.view(op.dy, rows)
    scratch = work.scratch_like(dy, rows)
    activation = ACTIVATIONS[op.activation]
    if activation.with_slope is not None:  # the forward pass left f′(z)
        return lambda: np.multiply(dy, saved, out=dy)
    return lambda: activation.backward(saved, dy, dy, scratch)


def _bind_dense_backward(work: Workspace, op: ops.DenseBackward, rows: slice, shard: int) -> Bound:
    dz, x_transposed = work.view(op.dz, rows), work.view(op.x, rows).T
    input_product = None
    if op.dx:
        input_product = _product(work, dz, work.arrays[op.weight].T, work.view(op.dx, rows), rows, FEW_ROWS_DX)
    dweight = work.partial(op.dweight, shard) if op.dweight else None
    dbias = work.partial(op.dbias, shard) if op.dbias else None
    ones = work.ones[rows]

    def dense_backward() -> None:
        if dweight is not None:
            np.dot(x_transposed, dz, out=dweight)
        if dbias is not None:
            np.dot(ones, dz, out=dbias)
        if input_product is not None:
            input_product()

    return dense_backward


def _bind_bias_backward(work: Workspace, op: ops.BiasBackward, rows: slice, shard: int) -> Bound:
    dz, dbias, ones = work.view(op.dz, rows), work.partial(op.dbias, shard), work.ones[rows]
    return partial(np.dot, ones, dz, dbias)


def _bind_locally_connected_backward(
    work: Workspace, op: ops.LocallyConnectedBackward, rows: slice, shard: int
) -> Bound:
    dz, x = work.view(op.dz, rows), work.view(op.x, rows)
    n = dz.shape[1]
    weight = work.arrays[op.weight][:, :n]
    dweight = work.partial(op.dweight, shard) if op.dweight else None
    dbias = work.partial(op.dbias, shard) if op.dbias else None
    scratch, ones = work.scratch_like(dz, rows), work.ones[rows]
    windows = [x[:, r : r + n] for r in range(len(weight))]

    def parameters() -> None:
        if dweight is None:
            return
        for dw, window in zip(dweight, windows, strict=True):
            np.multiply(dz, window, out=scratch)
            np.dot(ones, scratch, out=dw[:n])
        dweight[:, n:] = 0.0
        if dbias is not None:
            if len(dbias) == 1:
                dbias[0] = np.add.reduce(np.dot(ones, dz))
            else:
                np.dot(ones, dz, out=dbias[:n])
                dbias[n:] = 0.0

    if op.dx is None:
        return parameters
    dx = work.view(op.dx, rows)
    products = work.scratch_like(dx, rows)

    def inputs(part: slice, columns: slice) -> Bound:
        """A part of dx: weight by weight, the deltas of those outputs whose windows reach it are added."""
        part_of_dx = dx[part, columns]
        terms = []
        for r, w in enumerate(weight):
            seen = slice(max(columns.start - r, 0), max(min(columns.stop - r, n), 0))
            reached = part, slice(seen.start + r, seen.stop + r)
            if seen.start < seen.stop:
                terms.append((dz[part, seen], w[seen], products[reached], dx[reached]))

        def call() -> None:
            part_of_dx.fill(0.0)
            for delta, w, term, total in terms:
                np.multiply(delta, w, out=term)
                np.add(total, term, out=total)

        return call

    gradient_of_inputs = work.threads.divided(inputs, *dx.shape)

    def locally_connected_backward() -> None:
        parameters()
        gradient_of_inputs()

    return locally_connected_backward


def _bind_dropout_backward(work: Workspace, op: ops.DropoutBackward, rows: slice, shard: int) -> Bound:
    dy, dx = work.view(op.dy, rows), work.view(op.dx, rows)
    mask = work.masks[op.layer, op.part_of[0] if op.part_of else 0][rows]
    return lambda: np.multiply(dy, mask, out=dx)


def _bind_take_columns(work: Workspace, op: ops.TakeColumns, rows: slice, shard: int) -> Bound:
    y = work.view(op.y, rows)
    taken = work.view(op.x, rows)[:, op.first : op.first + y.shape[1]]
    return partial(np.copyto, y, taken)


def _bind_join_parts(work: Workspace, op: ops.JoinParts, rows: slice, shard: int) -> Bound:
    own = [work.view(name, rows) for name in op.parts]
    return join_parts(work.plan, own, work.view(op.y, rows))


def _bind_sum_parts(work: Workspace, op: ops.SumParts, rows: slice, shard: int) -> Bound:
    y = work.view(op.y, rows)
    z = work.view(op.z, rows) if op.z else y
    bias = work.arrays[op.bias] if op.bias else None
    scratch = work.scratch_like(y, rows)
    forward = _forward(op)
    add = sum_parts(work.plan, [work.view(name, rows) for name in op.parts], z)

    def sum_of_parts() -> None:
        add()
        if bias is not None:
            np.add(z, bias, out=z)
        if forward is not None:
            forward(z, y, scratch)

    return sum_of_parts


_BIND: dict[type[ops.Operation], Callable[[Workspace, Any, slice, int], Bound]] = {
    ops.TakeColumns: _bind_take_columns,
    ops.JoinParts: _bind_join_parts,
    ops.SumParts: _bind_sum_parts,
    ops.Gather: _bind_gather,
    ops.Standardize: _bind_standardize,
    ops.Dense: _bind_dense,
    ops.LocallyConnected: _bind_locally_connected,
    ops.Dropout: _bind_dropout,
    ops.Loss: _bind_loss,
    ops.Output: _bind_output,
    ops.ActivationBackward: _bind_activation_backward,
    ops.DenseBackward: _bind_dense_backward,
    ops.BiasBackward: _bind_bias_backward,
    ops.LocallyConnectedBackward: _bind_locally_connected_backward,
    ops.DropoutBackward: _bind_dropout_backward,
}
