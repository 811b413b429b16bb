"""The first pass: a path for every operation of a plan, with the reason why it is this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .... import plan as ops
from ....plan import Plan
from ....text import table
from ..kernels import WHOLE_HEAD, HeadForm, Team
from . import loss as losses
from . import thresholds
from .data import shard_costs, target_reads
from .dense import CountedLayer, DensePath, count_step, dense_path, is_cut, on_tensor_cores, spared_clocks
from .local_stack import LocalStack, find_stacks, stacked_partials
from .operands import plan_format, step_formats
from .row_step import BlocksOfRows, blocks_of_rows
from .setting import Setting, Verdict, Work, work_of
from .updates import updates_in_place


@dataclass(frozen=True)
class LocalPath:
    """A locally connected layer, or its backward pass: part of a stack in one kernel, or launches of its own."""

    stack: LocalStack | None
    why: str
    has_shared_bias: bool = False  # whether its bias is one number

    def __str__(self) -> str:
        return "one kernel for the stack" if self.stack else "a kernel for this layer"


@dataclass(frozen=True)
class GatherPath:
    """Rows of the data set: ``by_readers`` if products may fetch them; else a launch copies or splits them."""

    by_readers: Verdict

    def __str__(self) -> str:
        return "in the products that read x, or a launch" if self.by_readers else "a launch"

    @property
    def why(self) -> str:
        return self.by_readers.why


@dataclass(frozen=True)
class LossPath:
    """A loss: with the last layer in a head, at the end of its product, or in a launch with a team for each row.

    Attributes:
        form: the kernel of the head, if there is one, and ``form_why`` it is another one than usual.
    """

    head: Verdict
    product: Verdict
    team: Team
    form: HeadForm = WHOLE_HEAD
    form_why: str = ""

    def __str__(self) -> str:
        if self.head:
            return str(self.form)
        return "epilogue of the last product" if self.product else f"a launch, {self.team}"

    @property
    def why(self) -> str:
        if self.head:
            return "; ".join(filter(None, (self.head.why, self.form_why)))
        if self.product:
            return self.product.why
        not_in_product = f"; not in its product's epilogue: {self.product.why}" * (self.head != self.product)
        return f"not fused with the last layer: {self.head.why}{not_in_product}"


@dataclass(frozen=True)
class OutputPath:
    """Predictions, by a team for each row."""

    team: Team
    why: str

    def __str__(self) -> str:
        return f"a launch, {self.team}"


@dataclass(frozen=True)
class UpdatePath:
    """What ends a step: nothing where products update in place, else launches over all parameters."""

    in_place: Verdict

    def __str__(self) -> str:
        return "in epilogues of the gradients' products" if self.in_place else "launches of its own"

    @property
    def why(self) -> str:
        return self.in_place.why


@dataclass(frozen=True)
class ExchangePath:
    """What ranks send each other."""

    why: str = "copy engines, or NCCL between hosts, send what is another card's, beside the products of later layers"
    way: str = "sends and receives, on streams of their own"

    def __str__(self) -> str:
        return self.way


BETWEEN_PARTS = ExchangePath(
    "what follows reads what all parts made, which copy engines bring, or NCCL between hosts",
    "an exchange, then a launch",
)


@dataclass(frozen=True)
class LaunchPath:
    """An operation that is a launch, over all elements."""

    why: str = "elementwise: there is one kernel for it"

    def __str__(self) -> str:
        return "a launch"


Path = DensePath | LocalPath | GatherPath | LossPath | OutputPath | UpdatePath | ExchangePath | LaunchPath


_GRADIENTS = (ops.DenseBackward, ops.Reduce, ops.Norm, ops.Update)  # what blocks of rows leave to other launches


@dataclass(frozen=True)
class Selected:
    """An operation of a list, by its number there, and its path."""

    number: int
    operation: ops.Operation
    path: Path

    @property
    def title(self) -> str:
        """What launches are marked with that it asked for."""
        return f"{self.number} {type(self.operation).__name__}"


@dataclass(frozen=True)
class Selection:
    """A plan's training step, or its evaluation, with a path for each operation.

    Attributes:
        operand_format: whether there are products on tensor cores, and of which operands.
        tail: whether the shapes are those of a tail, and ``updates_after_others`` when the updates of its layers run.
        row_step: whether all of a step, or all but the gradients, is one launch by blocks of rows.
        stacks: what becomes of the locally connected layers, those together that follow each other.
    """

    plan: Plan
    work: Work
    operations: tuple[Selected, ...]
    operand_format: Verdict
    row_step: BlocksOfRows
    tail: Verdict
    updates_after_others: Verdict
    in_place: Verdict
    stacks: dict[tuple[ops.LocallyConnected, ...], LocalStack | str]

    def __str__(self) -> str:
        rows = [("operation", "path", "why")]
        for each in self.operations:
            is_loss = isinstance(each.operation, ops.Loss)
            found = [("tail", self.tail.why)] if is_loss and self.tail else reasons(each)
            if self.row_step:
                found = self._with_row_step(each, found)
            rows += [(each.title if number == 0 else "", *reason) for number, reason in enumerate(found)]
        kind = "a training step" if self.work.is_training else "an evaluation"
        head = [f"paths of {kind}; tensor cores: {self.operand_format.why}"]
        if self.work.is_training and not self.row_step:
            head.append(f"forward, loss and deltas are not one launch by blocks of rows: {self.row_step.why}")
        if self.work.is_training and not self.tail:
            head.append(f"layers after the first are not fused into one kernel (tail): {self.tail.why}")
        if self.work.is_training and self.plan.target_kind is not None:
            head.append(f"targets are read {target_reads(textured=self.work.setting.textured)}")
        if self.work.shards > 1:
            head.append(f"the batch is split over {shard_costs(self.work.shards)}")
        return "\n".join([*head, table(rows, "<<<")])

    def _with_row_step(self, each: Selected, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """What a step by blocks of rows makes of the paths of an operation."""
        made = "blocks of rows", "in the launch of the loss"
        if isinstance(each.operation, ops.Loss):
            return [(made[0], self.row_step.why)]
        if not isinstance(each.operation, _GRADIENTS):
            return [made]
        return [(f"dx: {made[0]}", made[1]) if path.startswith("dx: ") else (path, why) for path, why in found]


def reasons(each: Selected) -> list[tuple[str, str]]:
    """What the path of an operation is, and why: a pair for each of its products."""
    path, op = each.path, each.operation
    if not isinstance(path, DensePath):
        return [(str(path), path.why)]
    is_forward = isinstance(op, ops.Dense)
    asked = {"forward": is_forward, "dx": isinstance(op, ops.DenseBackward) and op.dx, "update": not is_forward}
    shown = [(f"{name}: {product}", product.why) for name, product in path.products.items() if asked[name]]
    is_frozen = isinstance(op, ops.DenseBackward) and op.dweight is None
    return [*shown, ("no update", "the layer is frozen: it passes the delta on")] if is_frozen else shown


def select(plan: Plan, setting: Setting, *, is_training: bool) -> Selection:
    """Paths for a plan's training step, or for its evaluation."""
    operations = plan.training if is_training else plan.evaluation
    shards = plan.shards if is_training else 1
    found, format_verdict = plan_format(plan, setting.arch)
    in_place = updates_in_place(
        plan, stacked_partials(plan, multiprocessors=setting.multiprocessors, arch=setting.arch)
    )
    formats = step_formats(plan, setting.arch, found) if is_training else (found,)
    works = [work_of(plan, setting, each, is_training=is_training, in_place=in_place.holds) for each in formats]
    blocks, tail, work, why = _whole_steps(plan, works)
    if why:
        format_verdict = Verdict(True, why)
    stacks = find_stacks(plan, operations, shards=shards, multiprocessors=setting.multiprocessors, arch=setting.arch)
    choices = _Choices(plan, work, in_place, {layer.y: stack for run, stack in stacks.items() for layer in run})
    selected = tuple(Selected(number, op, choices.path(op)) for number, op in enumerate(operations))
    after_others = losses.updates_after_others(work)
    return Selection(plan, work, selected, format_verdict, blocks, tail, after_others, in_place, stacks)


def _whole_steps(plan: Plan, works: Sequence[Work]) -> tuple[BlocksOfRows, Verdict, Work, str]:
    """Whether a step goes by blocks of rows, or has a tail; the work, with what is counted of all its layers; and why
    it is not the first one of ``works``, which differ in their operands."""
    work = works[0]
    if plan.tensor is not None:  # whose ranks choose alike, whatever parts they have
        in_parts = BlocksOfRows(False, "ranks have parts of the network, and exchange between layers")
        tail = _tail_of_parts(plan, work) if work.is_training else in_parts
        return in_parts, tail, replace(work, has_tail=tail.holds), ""
    operations = plan.training if work.is_training else plan.evaluation
    dense = [op for op in operations if isinstance(op, ops.Dense)]
    shapes = {segment.name: segment.shape for segment in (*plan.parameters, *plan.partials)}
    widths = [(shapes[op.weight][0], shapes[op.weight][1]) for op in dense]
    has_frozen = plan.gradient_count < plan.parameter_count
    activation = dense[-1].activation if dense else ""

    def tail_of(work: Work) -> Verdict:
        found = losses.tail(widths, activation, work, plan.parameter_count, has_frozen=has_frozen)
        if found and on_tensor_cores(*widths[0], work):
            return Verdict(False, "tensor cores make the first layer's product, which leaves no parts of it")
        return found

    layers = [_counted_layers(plan, dense, widths, each) for each in works]
    steps = [count_step(of_work, each) for of_work, each in zip(layers, works, strict=True)]
    step = steps[0]
    if step is None:
        tail = tail_of(work)
        return blocks_of_rows(plan, work), tail, replace(work, has_tail=tail.holds), ""
    chosen, why, known = work, "", step.clocks - spared_clocks(layers[0], step, work)
    for other, of_other, counted in zip(works[1:], layers[1:], steps[1:], strict=True):
        assert other.operand_format is not None and counted is not None
        clocks = counted.clocks - spared_clocks(of_other, counted, other)
        if counted.shapes and thresholds.UNSCALED_STEP_HUNDREDTHS * clocks < 100 * known:
            why = (
                f"a step has operands of {other.operand_format.contents}, counted at {clocks:,} clocks, and {known:,} "
                "by those of its evaluation"
            )
            chosen, step = other, counted
    without = replace(work, tensor_shapes=frozenset())
    blocks, tail = blocks_of_rows(plan, work, step), tail_of(without)  # a tail spares launches that any other way has
    if blocks or tail:
        return blocks, tail, replace(without, has_tail=tail.holds), ""
    return blocks, tail, replace(chosen, tensor_shapes=step.shapes), why


_OF_TAIL = (ops.Gather, ops.Dense, ops.SumParts, ops.Loss, ops.DenseBackward, ops.ActivationBackward, ops.BiasBackward)
_BEHIND_TAIL = (ops.Reduce, ops.Norm, ops.Update)


def _tail_of_parts(plan: Plan, work: Work) -> Verdict:
    """Whether layers that are whole on every rank, after a first one in parts along k, are one kernel with the loss.

    It follows from the whole network, so that each rank comes to the same.
    """
    assert plan.tensor is not None
    whole, splits = plan.tensor.whole, plan.tensor.splits
    between = [op for op in plan.training if isinstance(op, ops.BetweenParts)]
    is_plain = all(isinstance(op, (*_OF_TAIL, *_BEHIND_TAIL)) for op in plan.training)
    if not is_plain or len(between) != 1 or list(splits.values()) != ["rows", *["whole"] * (len(splits) - 1)]:
        return Verdict(
            False, "a tail of a network in parts follows a first layer by rows, and dense layers that are whole"
        )
    shapes = {parameter.name: parameter.shape for parameter in whole.parameters}
    widths = [(shapes[weight][0], shapes[weight][1]) for weight in splits]
    last = [op for op in plan.training if isinstance(op, ops.Dense)][-1].activation
    has_frozen = whole.gradient_count < whole.parameter_count
    return losses.tail(widths, last, work, whole.parameter_count, has_frozen=has_frozen)


def _counted_layers(
    plan: Plan, dense: list[ops.Dense], widths: list[tuple[int, int]], work: Work
) -> list[CountedLayer]:
    backwards = {(op.weight, op.x): op for op in plan.training if isinstance(op, ops.DenseBackward)}
    has_loss = any(isinstance(op, ops.Loss) and dense and op.logits == dense[-1].y for op in plan.training)
    dropped = {op.y: op.x for op in plan.training if isinstance(op, ops.Dropout) and op.part_of is None}
    counted = []
    for before, op, (k, n) in zip([None, *dense], dense, widths, strict=False):
        backward = backwards.get((op.weight, op.x))
        has_head = op is dense[-1] and has_loss and bool(losses.head(k, n, op.activation, work))
        counted.append(
            CountedLayer(
                k, n,
                is_moved=backward is not None and backward.dweight is not None,
                makes_dx=backward is not None and backward.dx is not None,
                follows=before is not None and before.y in (op.x, dropped.get(op.x)),
                has_head=has_head,
                head_clocks=losses.cut_head_clocks(k, n, work) if has_head and is_cut(k, n) else 0,
            )
        )  # fmt: skip
    return counted


@dataclass(frozen=True)
class _Choices:
    """What the paths of a list of operations follow from.

    Attributes:
        stacks: what becomes of each locally connected layer, by its y.
    """

    plan: Plan
    work: Work
    in_place: Verdict
    stacks: dict[str, LocalStack | str]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {segment.name: segment.shape for segment in (*self.plan.parameters, *self.plan.partials)}

    @cached_property
    def _frozen(self) -> set[str]:
        return {parameter.name for parameter in self.plan.parameters if not parameter.trainable}

    def widths(self, weight: str) -> tuple[int, int]:
        """(k, n) of a weight."""
        k, n = self._shapes[weight]
        return k, n

    def path(self, op: ops.Operation) -> Path:
        """The path of one operation."""
        if isinstance(op, (ops.Dense, ops.DenseBackward)):
            is_frozen = op.weight in self._frozen
            ends_with_loss = isinstance(op, ops.Dense) and self._ends_with_loss(op)
            return dense_path(*self.widths(op.weight), self.work, is_frozen=is_frozen, ends_with_loss=ends_with_loss)
        if isinstance(op, (ops.LocallyConnected, ops.LocallyConnectedBackward)):
            return self._local(op)
        if isinstance(op, ops.Loss):
            return self._loss(op)
        if isinstance(op, ops.Output):
            n = self.plan.buffers[op.y].shape[-1]
            return OutputPath(losses.team_of(n), losses.team_reason(n))
        if isinstance(op, ops.Gather):
            is_float = self.work.setting.source == "float32"
            why = (
                "inputs are float32, which products can load by row indices"
                if is_float
                else "inputs are uint8: a launch makes float32 of them, or operands if tensor cores alone read them"
            )
            return GatherPath(Verdict(is_float, why))
        if isinstance(op, (ops.Reduce, ops.Norm, ops.Update)):
            return UpdatePath(self.in_place)
        if isinstance(op, (ops.ExchangePartials, ops.GatherParameters)):
            return ExchangePath()
        if isinstance(op, (ops.SumParts, ops.JoinParts)):
            return BETWEEN_PARTS
        return LaunchPath()

    def _local(self, op: ops.LocallyConnected | ops.LocallyConnectedBackward) -> LocalPath:
        if isinstance(op, ops.LocallyConnected):
            stack = self.stacks[op.y]
            return LocalPath(None, stack) if isinstance(stack, str) else LocalPath(stack, str(stack))
        stack = self.stacks[op.dz.removeprefix("d")]
        is_shared = op.dbias is not None and self._shapes[op.dbias] != (self.widths(op.weight)[1],)
        if isinstance(stack, str):
            return LocalPath(None, stack, is_shared)
        no_update = no_update_of(stack, self.work)
        why = no_update or f"{stack}; it also updates the parameters"
        return LocalPath(None if no_update else stack, why, is_shared)

    def _ends_with_loss(self, op: ops.Dense) -> bool:
        """Whether a loss may end the product of a layer on tensor cores."""
        loss = next((each for each in self.plan.training if isinstance(each, ops.Loss) and each.logits == op.y), None)
        n = self.widths(op.weight)[1]
        return loss is not None and bool(losses.product_with_loss(n, op.activation, loss.loss.form, self.work))

    def _loss(self, op: ops.Loss) -> LossPath:
        n = self.plan.buffers[op.logits].shape[-1]
        every = (*self.plan.training, *self.plan.evaluation)
        last = next((each for each in every if isinstance(each, ops.Dense) and each.y == op.logits), None)
        if last is None or op.delta is None:
            apart = Verdict(False, "the last layer is not dense" if last is None else "an evaluation stores the logits")
            return LossPath(apart, apart, losses.team_of(n))
        head = losses.head(*self.widths(last.weight), last.activation, self.work)
        product = losses.product_with_loss(n, last.activation, op.loss.form, self.work)
        return LossPath(head, product, losses.team_of(n), *losses.head_form(*self.widths(last.weight), self.work))


def no_update_of(stack: LocalStack, work: Work) -> str:
    """Why the backward pass through a stack is not one kernel in this step; nothing where it is."""
    return stack.no_update or ("" if work.in_place else "gradients are stored before the update")
