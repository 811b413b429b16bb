"""In which format tensor cores are given a plan's operands."""

from __future__ import annotations

from .... import plan as ops
from ....plan import Plan
from ..kernels import OF_PRECISION, OperandFormat, architecture
from . import thresholds
from .dense import is_wide
from .setting import Verdict


def operand_format(precision: str, arch: str, *, is_large: bool) -> OperandFormat | None:
    """The format of a precision, for networks of large layers or not; None where there are no such products."""
    if precision not in OF_PRECISION or architecture(arch) < architecture("sm_80"):
        return None
    return OF_PRECISION[precision][is_large]


def plan_format(plan: Plan, arch: str) -> tuple[OperandFormat | None, Verdict]:
    """The operand format of a plan, or None, and why.

    The widths of its evaluation decide: predictions must have the same bits whether a plan trains or not.
    """
    shapes = {parameter.name: parameter.shape for parameter in plan.parameters}
    widths = [shapes[op.weight] for op in plan.evaluation if isinstance(op, ops.Dense)]
    largest = max((k * n for k, n in widths if is_wide(k, n)), default=0)
    if plan.reduction != "ordered":
        return None, Verdict(False, f"sums are {plan.reduction}, which products on tensor cores do not make")
    is_large = largest > thresholds.MOST_UNSCALED_WEIGHTS
    found = operand_format(plan.precision, arch, is_large=is_large)
    if found is None:
        why = f"{arch} lacks them" if plan.precision in OF_PRECISION else f"{plan.precision} keeps to multiply-adds"
        return None, Verdict(False, why)
    most = thresholds.MOST_UNSCALED_WEIGHTS
    size = f"the largest wide weight has {largest:,} elements, {'more than' if is_large else 'at most'} {most:,}"
    return found, Verdict(True, f"{plan.precision} is made of {found.name} operands; {size}")
