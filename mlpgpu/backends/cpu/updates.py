"""What runs once for all shards of a step: Reduce, Norm and Update, bound to flat arrays."""

from __future__ import annotations

import math

import numpy as np

from ... import plan as ops
from .threads import Bound
from .workspace import Workspace

UPDATE_BLOCK = 1 << 17  # elements that an update handles at a time, so that its passes stay in cache


def bind_updates(work: Workspace) -> list[Bound]:
    """Reduce, Norm and Update, in blocks that stay in cache.

    The division by the batch's summed weight and the factor of a clipped norm are one factor, by which the
    update multiplies the gradient.  Where each parameter has one partial, the partials are the gradient.
    """
    plan, count = work.plan, work.plan.gradient_count
    has_sums = plan.shards > 1 or len(plan.partials) > len(plan.gradient)
    gradient = np.empty(count, work.dtype) if has_sums else work.partials[0]
    calls: list[Bound] = []
    for op in plan.training:
        if isinstance(op, ops.Reduce) and has_sums:
            calls.append(_bind_reduce(work, gradient))
        elif isinstance(op, ops.Norm):
            calls.append(_bind_norm(work, op, [gradient[block] for block in _blocks(0, count)]))
        elif isinstance(op, ops.Update):
            calls.append(_bind_update(work, op, gradient))
    return calls


def _blocks(start: int, size: int) -> list[slice]:
    """Slices that cover ``size`` elements from ``start`` on."""
    end = start + size
    return [slice(first, min(first + UPDATE_BLOCK, end)) for first in range(start, end, UPDATE_BLOCK)]


def _bind_reduce(work: Workspace, gradient: np.ndarray) -> Bound:
    terms = [
        (gradient[segment.offset : segment.end].reshape(segment.shape), work.uses(segment.name))
        for segment in work.plan.gradient
    ]

    def reduce() -> None:
        for total, (first, *others) in terms:
            np.copyto(total, first)
            for partial in others:
                np.add(total, partial, out=total)

    return reduce


def _bind_norm(work: Workspace, op: ops.Norm, gradient: list[np.ndarray]) -> Bound:
    wide = np.empty(max(map(len, gradient)))

    def norm() -> None:
        square = 0.0
        for block in gradient:
            # In float64, where the square of no float32 overflows.
            copy = wide[: len(block)]
            np.copyto(copy, block)
            square += float(np.dot(copy, copy))
        length = math.sqrt(square) * work.inverse_weight
        if length > op.limit:
            work.gradient_factor *= op.limit / length

    return norm


def _bind_update(work: Workspace, op: ops.Update, gradient: np.ndarray) -> Bound:
    rule = op.optimizer.update
    scratch = np.empty(min(UPDATE_BLOCK, len(gradient)), work.dtype)
    views = [
        (
            each.alpha,
            work.parameters[moved],
            gradient[along],
            list(work.slots[:, moved]),
            scratch[: moved.stop - moved.start],
        )
        for each in work.plan.trained_ranges
        for moved, along in zip(_blocks(each.offset, each.size), _blocks(each.gradient, each.size), strict=True)
    ]

    def update() -> None:
        factor, row = work.gradient_factor, work.row
        for alpha, w, g, slots, part in views:
            np.multiply(g, factor, out=g)
            if alpha:
                np.multiply(w, alpha * work.inverse_weight, out=part)
                np.add(g, part, out=g)
            rule(w, g, slots, row, part)

    return update
