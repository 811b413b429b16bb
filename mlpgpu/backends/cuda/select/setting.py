"""What choices follow from beside an operation's own widths."""

from __future__ import annotations

from dataclasses import dataclass

from ....activations import ACTIVATIONS
from ....plan import Dense, Dropout, Plan
from ..kernels import OperandFormat, ceil_div


@dataclass(frozen=True)
class Setting:
    """The card, and how it holds the data.

    Attributes:
        multiprocessors: of the card.
        arch: what the card is compiled for, such as ``"sm_90a"``.
        source: the type of the inputs, ``"float32"`` or ``"uint8"``.
        textured: whether targets are read through a texture.
        reaches_cards: whether kernels reach the memory of other ranks' cards.
    """

    multiprocessors: int
    arch: str
    source: str
    textured: bool
    reaches_cards: bool = False


@dataclass(frozen=True)
class Verdict:
    """An answer, and the reason for it."""

    holds: bool
    why: str

    def __bool__(self) -> bool:
        return self.holds


@dataclass(frozen=True)
class Work:
    """What all operations of a training step, or of an evaluation, have in common.

    Attributes:
        rows: the most of a shard.
        shards: into how many the batch is split; an evaluation is never split.
        in_place: whether the products that make gradients also make the optimizer's step.
        operand_format: of products on tensor cores, or None where there are none.
        tensor_shapes: (k, n) of the layers that a step's count puts on tensor cores; None where no network was counted,
            and each layer is counted by itself.
        has_floats: whether the step's products of activations write or read float32 arrays beside operands: z, where a
            derivative takes it, and what scaled operands are made of; or end with dropouts, which take as long.
        has_tail: whether one launch makes what follows a first layer that is split along k.
    """

    setting: Setting
    is_training: bool
    rows: int
    shards: int
    reduction: str
    in_place: bool
    ends_with_gradient: bool
    operand_format: OperandFormat | None
    tensor_shapes: frozenset[tuple[int, int]] | None = None
    has_floats: bool = False
    has_tail: bool = False


def work_of(
    plan: Plan, setting: Setting, operand_format: OperandFormat | None, *, is_training: bool, in_place: bool
) -> Work:
    """The work of a plan's training step, or of its evaluation."""
    shards = plan.shards if is_training else 1
    keeps_z = any(isinstance(op, Dense) and ACTIVATIONS[op.activation].saves == "z" for op in plan.training)
    drops_out = any(isinstance(op, Dropout) for op in plan.training)
    is_scaled = operand_format is not None and operand_format.scaled  # whose operands lie beside floats
    return Work(
        setting, is_training, ceil_div(plan.capacity, shards), shards, plan.reduction, in_place and is_training,
        plan.ends_with_gradient, operand_format,
        has_floats=is_training and (keeps_z or drops_out or is_scaled),
    )  # fmt: skip
