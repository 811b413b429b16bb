"""What the second pass makes: groups of operations that are one launch, or a few that belong together.

A group says whose work it does, what it reads and leaves in which form, and why it is one; it holds no address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from .... import plan as ops
from ....text import table
from ..kernels import HeadForm, Team
from ..select.dense import (
    Atomic,
    FewColumns,
    FewRows,
    Gemm,
    LargeK,
    Short,
    Simt,
    SmallN,
    SmallUpdate,
    SplitK,
    SplitOperands,
    Strips,
    UpdateByParts,
    WarpSplit,
    WholeBatch,
)
from ..select.local_stack import LocalStack
from ..select.row_step import BlocksOfRows
from ..select.select import Selection


@dataclass(frozen=True)
class Stored:
    """In which forms a kernel leaves a buffer: as floats, and as operands of tensor cores."""

    floats: bool
    operands: bool


FLOATS = Stored(floats=True, operands=False)


@dataclass(frozen=True)
class Derivative:
    """An activation's derivative, which a kernel that makes dx multiplies it by.

    Attributes:
        of_operands: whether what was saved is there as operands alone.
        dropout: one between the activation and the layer whose dx is made.
        dropped: what it left, if that stands for what the activation saved.  Of a ReLU its zeros are both's, so that it
            needs no mask.
    """

    op: ops.ActivationBackward | None = None
    of_operands: bool = False
    dropout: ops.DropoutBackward | None = None
    dropped: str | None = None

    @property
    def activation(self) -> str:
        return self.op.activation if self.op else "identity"

    @property
    def saved(self) -> str | None:
        return self.dropped or (self.op.saved if self.op else None)

    @property
    def keep(self) -> float:
        """What the derivative is multiplied by: 1 without a dropout."""
        return 1.0 / (1.0 - self.dropout.rate) if self.dropout else 1.0

    @property
    def masked(self) -> ops.DropoutBackward | None:
        """The dropout whose mask dx needs."""
        return None if self.activation == "relu" and self.dropped else self.dropout

    @property
    def restore(self) -> float:
        """What makes that which the activation saved of what the dropout left of it."""
        return 1.0 - self.masked.rate if self.masked and self.dropped else 1.0

    def of(self, dx: str | None) -> str | None:
        """The buffer that a kernel leaves which makes ``dx`` and multiplies by this."""
        return self.dropout.dx if self.dropout else dx


@dataclass(frozen=True)
class Group:
    """What launches do together.

    Attributes:
        title: the operation that asked for its launches, which ``explain`` shows beside each.
        why: why these operations are one group, and why it takes this kernel.
    """

    title: str
    why: str

    def operations(self) -> Iterator[ops.Operation]:
        """The operations whose work the group does, in whole or in part."""
        for field in fields(self):
            value = getattr(self, field.name)
            of_several = (value.op, value.dropout) if isinstance(value, Derivative) else (value,)
            values = value if isinstance(value, tuple) else of_several
            yield from (each for each in values if isinstance(each, ops.Operation))


# --- rows ---


@dataclass(frozen=True)
class GatherRows(Group):
    """The batch's rows, copied by the order."""

    op: ops.Gather


@dataclass(frozen=True)
class StandardizeRows(Group):
    """Inputs, standardized column by column."""

    op: ops.Standardize


@dataclass(frozen=True)
class DrawDropouts(Group):
    """Which elements those dropouts keep that products end with, or go back through, on one shard."""

    ops: tuple[ops.Dropout, ...]


@dataclass(frozen=True)
class DropOut(Group):
    """A dropout, forward or backward, from x to y.

    Attributes:
        derivative: of the activation below it, by which deltas are multiplied as well.
        forms: in which it leaves y.
    """

    op: ops.Dropout | ops.DropoutBackward
    x: str
    y: str
    derivative: Derivative
    forms: Stored


@dataclass(frozen=True)
class Differentiate(Group):
    """An activation's derivative by itself."""

    op: ops.ActivationBackward


@dataclass(frozen=True)
class LossRows(Group):
    """A loss in a launch of its own; ``targets`` is the operation that standardizes them."""

    op: ops.Loss
    targets: ops.Standardize | None
    delta: Stored | None
    team: Team


@dataclass(frozen=True)
class OutputRows(Group):
    """Predictions from logits."""

    op: ops.Output
    team: Team


# --- dense layers by multiply-adds ---


@dataclass(frozen=True)
class DenseForward(Group):
    """A dense layer's outputs, and what a dropout leaves of them; ``by_order`` if the product fetches its rows from the
    data set."""

    op: ops.Dense
    path: Simt | Short | WarpSplit | WholeBatch
    by_order: bool
    dropout: ops.Dropout | None = None


@dataclass(frozen=True)
class DensePartials(Group):
    """Split-K partials; ``by_update`` if the step before leaves them, and only a first step needs the launch."""

    op: ops.Dense
    path: SplitK
    by_order: bool
    by_update: FewRows | None


@dataclass(frozen=True)
class AddPartials(Group):
    """A layer's outputs, or what a dropout leaves of them, from its split-K partials."""

    op: ops.Dense
    path: SplitK
    dropout: ops.Dropout | None = None


@dataclass(frozen=True)
class DenseAtomic(Group):
    """Both products of the backward pass."""

    op: ops.DenseBackward
    path: Atomic


@dataclass(frozen=True)
class DenseInput(Group):
    """dx, with an activation's derivative."""

    op: ops.DenseBackward
    path: Simt | WarpSplit
    derivative: Derivative


@dataclass(frozen=True)
class DenseGradient(Group):
    """dW and db, kept as partials."""

    op: ops.DenseBackward
    path: Simt | WarpSplit | SmallN
    by_order: bool


@dataclass(frozen=True)
class DenseUpdate(Group):
    """dW and db with the optimizer's step.

    Attributes:
        leaves_partials: whether it makes the next step's split-K partials as well.
        on_side_stream: whether it runs on a side stream, and ``after_others`` from which it would take room.
    """

    op: ops.DenseBackward
    path: (
        Simt | WarpSplit | UpdateByParts | Strips | SmallN | FewColumns | FewRows | WholeBatch | LargeK | SplitOperands
    )
    by_order: bool
    leaves_partials: bool
    on_side_stream: bool
    after_others: bool


@dataclass(frozen=True)
class DenseInputUpdate(Group):
    """dx through a dropout and an activation, and dW and db with the optimizer's step, in one pass over W."""

    op: ops.DenseBackward
    path: WholeBatch
    by_order: bool
    dropout: ops.DropoutBackward | None
    derivative: Derivative


@dataclass(frozen=True)
class UpdateLayers(Group):
    """dW and db of several layers with the optimizer's step.

    Attributes:
        paths: of each layer, all of one kind, whose blocks may have other parts of the rows.
        inputs: the buffer that the step's first layer reads, if it is one of these; the others' x lie in one array.
        by_order: whether that one fetches its rows from the data set.
        follows_row_step: whether that has left what they read, and not launches of their own.
    """

    ops: tuple[ops.DenseBackward, ...]
    paths: tuple[SmallUpdate, ...]
    inputs: str | None
    by_order: bool
    follows_row_step: bool


# --- dense layers on tensor cores ---


@dataclass(frozen=True)
class SplitRows(Group):
    """A buffer's rows as operands for ``reader``, with their scales.

    Attributes:
        by_order: whether it fetches them from the data set; ``is_copied`` whether it leaves them as floats too.
        is_staged: whether rows of several steps are split by one launch before those.
        operands: whether operands are made, or scales alone.
    """

    name: str
    reader: ops.Dense | ops.DenseBackward
    by_order: bool
    is_copied: bool
    is_staged: bool
    operands: bool


@dataclass(frozen=True)
class SplitColumns(Group):
    """A delta's operands for dW, and db.

    Attributes:
        rows_too: whether it makes the operands along rows as well, whose scales are known.
        sums: whether it sums db.
    """

    op: ops.DenseBackward
    rows_too: bool
    sums: bool


@dataclass(frozen=True)
class SumDelta(Group):
    """db, from the operands that a delta is already."""

    op: ops.DenseBackward


@dataclass(frozen=True)
class GemmForward(Group):
    """A dense layer's outputs, or what a dropout leaves of them, in the forms that their readers take."""

    op: ops.Dense
    path: Gemm
    y: Stored
    dropout: ops.Dropout | None = None


@dataclass(frozen=True)
class GemmForwardLoss(Group):
    """The last layer's product, which ends with the loss."""

    op: ops.Dense
    path: Gemm
    loss: ops.Loss


@dataclass(frozen=True)
class GemmInput(Group):
    """dx, with an activation's derivative."""

    op: ops.DenseBackward
    path: Gemm
    derivative: Derivative
    dx: Stored


@dataclass(frozen=True)
class GemmGradient(Group):
    """dW, with the optimizer's step where ``is_update``; ``leaves_bias`` if another launch adds up db's partials."""

    op: ops.DenseBackward
    path: Gemm
    is_update: bool
    sums_bias: bool
    leaves_bias: bool


@dataclass(frozen=True)
class SumBiases(Group):
    """Gradients of biases, from the partial sums that products of the weights' have left."""

    ops: tuple[ops.DenseBackward, ...]


@dataclass(frozen=True)
class GemmUpdates(Group):
    """dW and db of several layers, none of which waits for another, with the optimizer's step."""

    ops: tuple[ops.DenseBackward, ...]
    path: Gemm


# --- between parts of a network ---


@dataclass(frozen=True)
class SumOfParts(Group):
    """The sum of what all parts of a layer made, with its bias and activation."""

    op: ops.SumParts


@dataclass(frozen=True)
class JoinedParts(Group):
    """The columns of all parts beside each other."""

    op: ops.JoinParts


@dataclass(frozen=True)
class TakenColumns(Group):
    """A part's columns of what every rank has."""

    op: ops.TakeColumns


@dataclass(frozen=True)
class BiasGradient(Group):
    """The gradient of a bias that every rank has, with the optimizer's step where ``is_update``.

    Attributes:
        on_side_stream: whether it runs there, after what needs the room.
    """

    op: ops.BiasBackward
    is_update: bool
    on_side_stream: bool


# --- several layers ---


@dataclass(frozen=True)
class Head(Group):
    """The last layer, the loss, and dx with an activation's derivative."""

    form: HeadForm
    dense: ops.Dense
    loss: ops.Loss
    backward: ops.DenseBackward
    targets: ops.Standardize | None
    derivative: Derivative
    dx: Stored | None
    leaves_scales: bool


@dataclass(frozen=True)
class Tail(Group):
    """The layers after a first one that is split along k, the loss, and all deltas.

    Attributes:
        layers: all dense layers, of whose first one the split-K partials are made already, or the sums of parts.
        backwards: their gradients, in the same order.
        path: how the partials were made.
        part: of a first layer in parts this rank's, whose partials the launch adds up and exchanges with the others.
    """

    loss: ops.Loss
    layers: tuple[ops.Dense | ops.SumParts, ...]
    backwards: tuple[ops.DenseBackward, ...]
    derivatives: tuple[ops.ActivationBackward, ...]
    targets: ops.Standardize | None
    path: SplitK | None
    part: ops.Dense | None = None


@dataclass(frozen=True)
class StepByRows(Group):
    """A step of dense layers whose blocks go with some rows through all of them, the loss and back.

    Attributes:
        rows: operations row by row that it does as well: the gather, the standardized inputs, dropouts.
        layers: all dense layers; ``backwards`` the gradients of those from the lowest on that is trained.
    """

    loss: ops.Loss
    rows: tuple[ops.Operation, ...]
    layers: tuple[ops.Dense, ...]
    backwards: tuple[ops.DenseBackward, ...]
    derivatives: tuple[ops.ActivationBackward, ...]
    targets: ops.Standardize | None


@dataclass(frozen=True)
class RowStep(StepByRows):
    """All of it but the gradients.

    Attributes:
        stores_inputs: whether gradients read rows that it fetched, and not the data set by the order.
    """

    stores_inputs: bool


@dataclass(frozen=True)
class TensorRowStep(StepByRows):
    """All of it but the sum of the gradients, on tensor cores.

    Attributes:
        path: its blocks.
        behind: a first layer that is apart: its products have launches of their own, and ``layers`` are the others.
    """

    path: BlocksOfRows
    behind: ops.Dense | None


@dataclass(frozen=True)
class InputLayerForward(Group):
    """Such a layer's sums over parts of its inputs.

    Attributes:
        inputs: what standardizes them.
    """

    op: ops.Dense
    inputs: ops.Standardize | None
    path: BlocksOfRows


@dataclass(frozen=True)
class InputLayerGradient(Group):
    """Its gradient over parts of the rows."""

    op: ops.DenseBackward
    inputs: ops.Standardize | None
    path: BlocksOfRows


@dataclass(frozen=True)
class UpdateFromBlocks(Group):
    """The sum of what the blocks of such a step left of the gradients, with the optimizer's step."""

    op: ops.Update
    layers: tuple[ops.Dense, ...]
    path: BlocksOfRows


@dataclass(frozen=True)
class LocalForward(Group):
    """A locally connected layer's outputs."""

    op: ops.LocallyConnected


@dataclass(frozen=True)
class LocalBackward(Group):
    """The gradients of a weight and a bias; and dx, with an activation's derivative."""

    op: ops.LocallyConnectedBackward
    derivative: Derivative
    has_shared_bias: bool


@dataclass(frozen=True)
class StackForward(Group):
    """The outputs of all layers of a stack."""

    stack: LocalStack
    layers: tuple[ops.LocallyConnected, ...]


@dataclass(frozen=True)
class StackBackward(Group):
    """``is_derived`` if dy is already multiplied by the last activation's derivative."""

    stack: LocalStack
    backwards: tuple[ops.LocallyConnectedBackward, ...]
    derivatives: tuple[ops.ActivationBackward, ...]
    is_derived: bool


# --- what is done once, when all shards are through ---


@dataclass(frozen=True)
class TotalError(Group):
    """The batch's loss, from the sums of several shards."""

    loss: ops.Loss


@dataclass(frozen=True)
class ReducePartials(Group):
    """The gradient, from the partials of shards and of a parameter's uses."""

    op: ops.Reduce


@dataclass(frozen=True)
class ClipNorm(Group):
    """The factor that limits the norm of the gradient; of partials, where there are those of one shard alone."""

    op: ops.Norm
    is_reduced: bool


@dataclass(frozen=True)
class UpdateAll(Group):
    """The optimizer's step on all parameters.

    Attributes:
        is_reduced: whether there is a gradient, or partials of shards, which the update adds up itself.
        is_clipped: whether a factor limits its norm.
    """

    op: ops.Update
    is_reduced: bool
    is_clipped: bool


@dataclass(frozen=True)
class UpdateBiases(Group):
    """The optimizer's step on biases whose gradients products leave as partial sums."""

    op: ops.Update


@dataclass(frozen=True)
class ExchangedPiece:
    """Gradients that ranks exchange together.

    Attributes:
        groups: those that make them, for each shard; others are made with the deltas.
        elements: of the flat gradient, slices in order.
        why: where it ends, or why it is one.
        owner: the rank that makes its part of the gradient last and moves the weight along the sum of both in one
            launch; None where the sums are moved by launches behind the exchange.
        fills_the_wait: whether the owner makes its part while it waits for the other one, and moves the weight in a
            launch of its own then.
        is_late: whether it comes behind the weights that have owners, beside their exchange; nothing at the begin of a
            step reads what it moves.
    """

    groups: tuple[Group, ...]
    elements: tuple[slice, ...]
    why: str
    owner: int | None = None
    fills_the_wait: bool = False
    is_late: bool = False

    @property
    def weight(self) -> str:
        """That of a piece that has an owner."""
        (group,) = self.groups
        assert isinstance(group, GemmGradient)
        return group.op.weight


@dataclass(frozen=True)
class Fused:
    """A list of operations as groups.

    Attributes:
        weights: those that are split before all rows, with the title of an operation that reads each.
        updates_split_weights: whether updates make the operands of later steps.
        pieces_split_weights: whether launches behind the exchange of each piece do.
        pieces: of a plan of several ranks, what follows the groups: gradients from the first layer up.
        finish: groups of what is done once, where there is one rank.
        notes: which of several ways some operations take, and why.
    """

    selection: Selection
    groups: tuple[Group, ...]
    weights: Mapping[str, str]
    updates_split_weights: bool
    pieces_split_weights: bool
    pieces: tuple[ExchangedPiece, ...]
    finish: tuple[Group, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("group", "operations", "why")]
        numbers = {each.operation: each.number for each in self.selection.operations}
        for group in (*self.groups, *self.finish):
            done = ", ".join(str(numbers[op]) for op in group.operations())
            rows.append((type(group).__name__, done, group.why))
        for piece in self.pieces:
            done = ", ".join(str(numbers[op]) for group in piece.groups for op in group.operations())
            rows.append((type(piece).__name__, done, piece.why))
        return table(rows, "<<<")
