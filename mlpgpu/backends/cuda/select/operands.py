"""In which format tensor cores are given a plan's operands."""

from __future__ import annotations

from .... import plan as ops
from ....plan import Plan
from ..kernels import OF_PRECISION, OF_STEPS, OperandFormat, Sm90Tile, architecture
from . import thresholds
from .dense import is_wide
from .setting import Verdict

FLOATS_OF_VECTOR = 4  # that a load brings at once


def operand_format(precision: str, arch: str, *, is_large: bool) -> OperandFormat | None:
    """The format of a precision, for networks of large layers or not; None where there are no such products."""
    if precision not in OF_PRECISION or architecture(arch) < architecture("sm_80"):
        return None
    return OF_PRECISION[precision][is_large]


def plan_format(plan: Plan, arch: str) -> tuple[OperandFormat | None, Verdict]:
    """The operand format of a plan, or None, and why.

    The widths of its evaluation decide: predictions must have the same bits whether a plan trains or not.
    """
    # Of a network in parts those of all parts, so that each rank comes to the same.
    whole = plan if plan.tensor is None else plan.tensor.whole
    shapes = {p.name: [p.shape] if plan.tensor is None else plan.tensor.shapes(p) for p in whole.parameters}
    widths = [shape for op in whole.evaluation if isinstance(op, ops.Dense) for shape in shapes[op.weight]]
    largest = max((k * n for k, n in widths if is_wide(k, n)), default=0)
    if plan.reduction != "ordered":
        return None, Verdict(False, f'not used, since reduction="{plan.reduction}"')
    is_large = largest > thresholds.MOST_UNSCALED_WEIGHTS
    found = operand_format(plan.precision, arch, is_large=is_large)
    if found is None:
        needed = f"the kernels need sm_80 or a later card, and this is {arch}"
        why = needed if plan.precision in OF_PRECISION else f"{plan.precision} multiplies float32 on plain cores"
        return None, Verdict(False, f"not used, since {why}")
    if not largest:
        return found, Verdict(True, "not used, since no layer is large enough")
    limit = f"{largest:,} elements {'>' if is_large else '≤'} {thresholds.MOST_UNSCALED_WEIGHTS:,}"
    return found, Verdict(True, f"{plan.precision} by operands of {found.contents}; the largest weight has {limit}")


def step_formats(plan: Plan, arch: str, found: OperandFormat | None) -> tuple[OperandFormat | None, ...]:
    """The operand formats that a plan's steps may have, the first one being that of its evaluation.

    A second one has more products of components, and no scales: who makes a number splits it, where scales take passes
    over x, deltas and weights.  Of one product instead of three, as tf32 has, these passes outweigh what components of
    weights take of the memory's time only where rows of most weights begin at no multiple of 16 bytes.
    """
    other = OF_STEPS.get(plan.precision)
    is_plain = plan.shards == 1 and plan.tensor is None
    is_another = found is not None and found.scaled and is_plain and arch == Sm90Tile.needs
    if not other or not is_another:
        return (found,)
    return (found, other) if plan.precision == "float32" or _is_unaligned(plan) else (found,)


def _is_unaligned(plan: Plan) -> bool:
    """Whether of most weights rows of float32 begin at any byte."""
    sizes = {True: 0, False: 0}
    for parameter in plan.parameters:
        if len(parameter.shape) == 2:
            sizes[parameter.shape[1] % FLOATS_OF_VECTOR != 0] += parameter.size
    return sizes[True] > sizes[False]


def has_own_inputs(plan: Plan, weight: str, found: OperandFormat | None) -> bool:
    """Whether a part of a weight has operands of its own of an input that other parts of the layer read as well.

    Scaled operands of x follow from the scales of the weight's rows, and each part has others.
    """
    if plan.tensor is None or found is None or not found.scaled:
        return False
    of = next(parameter.of for parameter in plan.parameters if parameter.name == weight)
    return of is not None and of.axis == 1
