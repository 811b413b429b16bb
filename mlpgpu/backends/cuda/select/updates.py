"""Where gradients become parameters: in the products that make them, or in launches of their own; and beside which
launches.
"""

from __future__ import annotations

from collections.abc import Collection

from .... import plan as ops
from ....plan import Plan
from ..kernels import Entry
from . import thresholds
from .setting import Verdict


def updates_in_place(plan: Plan, stacked: Collection[str] = ()) -> Verdict:
    """Whether the products that make gradients also move the parameters.

    Each parameter must have one partial, which is its whole gradient and a dense layer's product makes; or the kernels
    of stacks do without its partials, which are ``stacked``; and nothing may come between.
    """
    made = {name for op in plan.training if isinstance(op, ops.DenseBackward) for name in (op.dweight, op.dbias)}
    made |= {op.dbias for op in plan.training if isinstance(op, ops.BiasBackward)}
    others = [partial for partial in plan.partials if partial.name not in stacked]
    if plan.shards > 1:
        return Verdict(False, f"gradients of {plan.shards} shards are added up before the update")
    if plan.reduction != "ordered":
        return Verdict(False, 'reduction="atomic" stores gradients before the update')
    if len(others) > len({partial.parameter for partial in others}):
        return Verdict(False, "a parameter has several gradients to add up, since it is used more than once")
    if any(partial.name not in made for partial in others):
        return Verdict(False, "kernels of locally connected layers store their gradients")
    if any(isinstance(op, ops.Norm) for op in plan.training):
        return Verdict(False, "the gradient's norm is clipped before the update")
    if plan.ends_with_gradient:
        return Verdict(False, "the step ends with the gradient, without an update")
    return Verdict(True, "one product makes each gradient whole, so its epilogue applies the optimizer")


def runs_beside(update: Entry, blocks: int, rows: int, multiprocessors: int) -> Verdict:
    """Whether an update of so many blocks, by so many rows of the batch, runs beside the launches that follow it.

    Products on tensor cores ask for all of a multiprocessor's shared memory: beside a short update on tensor cores they
    wait longer for that than the update takes.
    """
    if not thresholds.UPDATES_RUN_BESIDE:
        return Verdict(False, "a test or a benchmark asks for one launch after another")
    least = thresholds.BESIDE_LEAST_ROWS * update.cluster
    if update.header == "dense/tensor_update.cuh" and rows < least:
        return Verdict(False, f"{rows:,} rows < {least:,}: others would wait for its shared memory")
    room = thresholds.BESIDE_TENTHS * update.blocks * multiprocessors // 10
    return Verdict(blocks <= room, f"{blocks:,} blocks {'≤' if blocks <= room else '>'} {room:,}, which leave room")
