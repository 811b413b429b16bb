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
    plan, count = work.plan, len(work.parameters)
    has_sums = plan.shards > 1 or len(plan.partials) > len(plan.parameters)
    gradient = np.empty(count, work.dtype) if has_sums else work.partials[0]
    blocks = [slice(start, min(start + UPDATE_BLOCK, count)) for start in range(0, count, UPDATE_BLOCK)]
    calls: list[Bound] = []
    for op in plan.training:
        if isinstance(op, ops.Reduce) and has_sums:
            calls.append(_bind_reduce(work, gradient))
        elif isinstance(op, ops.Norm):
            calls.append(_bind_norm(work, op, [gradient[block] for block in blocks]))
        elif isinstance(op, ops.Update):
            calls.append(_bind_update(work, op, gradient, blocks))
    return calls


def _bind_reduce(work: Workspace, gradient: np.ndarray) -> Bound:
    terms = [
        (gradient[parameter.offset : parameter.end].reshape(parameter.shape), work.uses(parameter.name))
        for parameter in work.plan.parameters
    ]

    def reduce() -> None:
        for total, (first, *others) in terms:
            np.copyto(total, first)
            for partial in others:
                np.add(total, partial, out=total)

    return reduce


def _bind_norm(work: Workspace, op: ops.Norm, gradient: list[np.ndarray]) -> Bound:
    wide = np.empty(min(UPDATE_BLOCK, len(work.parameters)))

    def norm() -> None:
        square = 0.0
        for block in gradient:
            # In float64, where the square of no float32 overflows.
            copy = wide[: len(block)]
            np.copyto(copy, block)
            square += float(np.dot(copy, copy))
        length = math.sqrt(square) * work.inverse_weight
        if length > op.limit:
            work.inverse_weight *= op.limit / length

    return norm


def _bind_update(work: Workspace, op: ops.Update, gradient: np.ndarray, blocks: list[slice]) -> Bound:
    rule = op.optimizer.update
    scratch = np.empty(min(UPDATE_BLOCK, len(gradient)), work.dtype)
    views = [
        (work.parameters[block], gradient[block], list(work.slots[:, block]), scratch[: len(gradient[block])])
        for block in blocks
    ]

    def update() -> None:
        factor, row = work.inverse_weight, work.row
        for w, g, slots, part in views:
            np.multiply(g, factor, out=g)
            rule(w, g, slots, row, part)

    return update
