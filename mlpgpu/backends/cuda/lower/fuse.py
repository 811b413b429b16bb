"""The second pass: neighbours that become one launch, as a new list.

What stands between two operations of a group is never stored: rows that a product fetches by the order, logits inside a
head, dy where the product that makes it multiplies by the activation's derivative.  Buffers that products on tensor
cores read are left as their operands by whoever makes them, where operands have no scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from .... import plan as ops
from ..kernels import OperandFormat
from ..select.dense import (
    Atomic,
    DensePath,
    FewColumns,
    FewRows,
    Gemm,
    Short,
    Simt,
    SmallN,
    SmallUpdate,
    SplitK,
    Strips,
    UpdateByParts,
    WarpSplit,
    WholeBatch,
    in_parts_of_all,
    small_update,
    update_blocks,
    updates_in_one_launch,
)
from ..select.local_stack import LocalStack
from ..select.loss import head_form_of_operands
from ..select.operands import has_own_inputs
from ..select.ranks import exchanged_by_tail
from ..select.select import GatherPath, LocalPath, LossPath, OutputPath, Selected, Selection, no_update_of
from ..select.setting import Verdict
from ..select.updates import MovedTogether, leaves_bias_partials, moved_together
from . import groups
from .cut import cut
from .groups import FLOATS, Derivative, Fused, Group, Stored

_ONE_KERNEL = (ops.Gather, ops.Dense, ops.Loss, ops.DenseBackward, ops.ActivationBackward)  # of a tail's plan
_OF_PARTS = (ops.SumParts, ops.JoinParts, ops.TakeColumns, ops.BiasBackward)
_ONCE = (ops.ExchangePartials, ops.Reduce, ops.Norm, ops.Update, ops.GatherParameters)


@dataclass(frozen=True)
class _Facts:
    """A selection, and what follows from it about buffers: who reads them, who makes them, in which form."""

    selection: Selection

    @cached_property
    def operations(self) -> tuple[ops.Operation, ...]:
        return tuple(each.operation for each in self.selection.operations)

    @cached_property
    def paths(self) -> dict[ops.Operation, object]:
        return {each.operation: each.path for each in self.selection.operations}

    @property
    def operand_format(self) -> OperandFormat | None:
        return self.selection.work.operand_format

    @property
    def is_scaled(self) -> bool:
        """Whether operands have scales, which are facts when a row or a column is whole."""
        return self.operand_format is not None and self.operand_format.scaled

    @cached_property
    def titles(self) -> dict[ops.Operation, str]:
        return {each.operation: each.title for each in reversed(self.selection.operations)}

    def dense_path(self, op: ops.Dense | ops.DenseBackward) -> DensePath:
        path = self.paths[op]
        assert isinstance(path, DensePath)
        return path

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {parameter.name: parameter.shape for parameter in self.selection.plan.parameters}

    def shape(self, weight: str) -> tuple[int, int]:
        """(k, n) of a weight."""
        k, n = self._shapes[weight]
        return k, n

    def is_gemm(self, op: ops.Operation) -> bool:
        """Whether tensor cores make an operation's products."""
        path = self.paths[op]
        return isinstance(path, DensePath) and isinstance(path.forward, Gemm)

    @cached_property
    def _readers(self) -> dict[str, list[ops.Operation]]:
        found: dict[str, list[ops.Operation]] = {}
        for op in self.operations:
            for name in op.reads:
                found.setdefault(name, []).append(op)
        return found

    def readers(self, name: str) -> list[ops.Operation]:
        """The operations that read a buffer, in order."""
        return self._readers.get(name, [])

    @cached_property
    def following(self) -> dict[ops.Operation, ops.Operation]:
        """What comes after each operation that works row by row."""
        return dict(pairwise(op for op in self.operations if not isinstance(op, _ONCE)))

    # --- the batch's rows ---

    @cached_property
    def fetched(self) -> set[str]:
        """Inputs that their readers fetch from the data set by themselves."""
        return {op.x for op in self.operations if isinstance(op, ops.Gather) and self._is_fetched(op)}

    def _is_fetched(self, op: ops.Gather) -> bool:
        path, readers = self.paths[op], self.readers(op.x)
        assert isinstance(path, GatherPath)
        # The atomic backward pass reads x as it lies in memory.
        products = ops.Dense if self.selection.work.reduction == "atomic" else (ops.Dense, ops.DenseBackward)
        # Scaled operands are made beside floats, which products may read: who makes the operands leaves those too.
        is_late = self.is_scaled and any(map(self.is_gemm, readers)) and not self.is_gemm(readers[0])
        # Of bytes, who makes the operands makes numbers as well.
        is_read = bool(path.by_readers) or all(map(self.is_gemm, readers))
        return is_read and all(isinstance(reader, products) for reader in readers) and not is_late

    def by_order(self, name: str) -> bool:
        """Whether products outside the tensor cores fetch these rows: nobody has copied them."""
        return name in self.fetched and not self.is_copied(name)

    def is_copied(self, name: str) -> bool:
        """Whether who makes scaled operands of rows of the data set leaves the floats beside them."""
        return self.is_scaled and name in self.fetched and any(map(self.is_gemm, self.readers(name)))

    # --- forms of buffers ---

    def forms(self, name: str) -> Stored:
        """In which forms a kernel that can make operands leaves a buffer."""
        by_gemm = self.operand_format is not None and any(map(self.is_gemm, self.readers(name)))
        operands = by_gemm and not self.is_scaled
        return Stored(floats=not operands or self._reads_floats(name), operands=operands)

    def _reads_floats(self, name: str) -> bool:
        """Whether anything but tensor cores reads a buffer."""
        plan = self.selection.plan
        is_looked_at = name in (plan.logits, plan.output)
        return is_looked_at or not all(self.is_gemm(op) or op in self._in_products for op in self.readers(name))

    @cached_property
    def _in_products(self) -> set[ops.Operation]:
        """Derivatives that follow the product of a dense layer, or the dropout, that makes what they multiply."""
        made_by = ops.DenseBackward, ops.DropoutBackward
        after = ((op, self.following.get(op)) for op in self.operations if isinstance(op, made_by) and not of_part(op))
        return {other for op, other in after if isinstance(other, ops.ActivationBackward) and other.dy == op.dx}

    @cached_property
    def with_operands(self) -> set[str]:
        """Buffers that their maker leaves as operands."""
        made: list[str | None] = []
        for op in self.operations:
            if isinstance(op, ops.Dense) and self.is_gemm(op):
                made.append(self.output_of(op))
            elif isinstance(op, ops.DenseBackward) and (self.is_gemm(op) or op == self.head_backward):
                made.append(self.delta_of(op))
            elif of_part(op):
                continue
            elif isinstance(op, (ops.Dropout, ops.DropoutBackward)) and op not in self._dropped_by_products:
                made.append(op.y if isinstance(op, ops.Dropout) else op.dx)
            elif isinstance(op, ops.Loss) and not isinstance(self.following.get(op), ops.ActivationBackward):
                made.append(op.delta)
        return {name for name in made if name is not None and self.forms(name).operands}

    @cached_property
    def without_floats(self) -> set[str]:
        """Buffers that are stored as operands alone."""
        return {name for name in self.with_operands if not self.forms(name).floats}

    # --- layers, and the loss after the last one ---

    @cached_property
    def targets(self) -> ops.Standardize | None:
        """What the loss does to targets."""
        return next((op for op in self.operations if isinstance(op, ops.Standardize) and op.x == "target"), None)

    @cached_property
    def layers(self) -> tuple[ops.Dense, ...]:
        return tuple(op for op in self.operations if isinstance(op, ops.Dense))

    @cached_property
    def backwards(self) -> tuple[ops.DenseBackward, ...]:
        """The layers' gradients, in the order of the layers."""
        return tuple(op for op in self.operations if isinstance(op, ops.DenseBackward))[::-1]

    @cached_property
    def has_tail(self) -> bool:
        """Whether the step has dense layers and a loss alone, and shapes that a tail holds."""
        if self.selection.plan.tensor is not None:
            return bool(self.selection.tail)
        only_dense = all(isinstance(op, (*_ONE_KERNEL, *_ONCE)) for op in self.operations)
        return bool(self.selection.tail) and only_dense and len(self.layers) == len(self.backwards)

    def is_part(self, op: ops.Dense | ops.DenseBackward) -> bool:
        """Whether it is of a part of a layer, which a tail follows after an exchange."""
        known = self.selection.plan.parameters
        return any(parameter.name == op.weight and parameter.of is not None for parameter in known)

    @cached_property
    def tail_exchanges(self) -> Verdict:
        """Whether the tail of a network in parts exchanges the sums of a first layer itself, from split-K partials."""
        first, tensor = self.layers[0], self.selection.plan.tensor
        if not self.has_tail or tensor is None or not isinstance(self.dense_path(first).forward, SplitK):
            return Verdict(False, "no tail adds up split-K partials of a part")
        work, columns = self.selection.work, self.selection.plan.buffers[first.y].shape[-1]
        return exchanged_by_tail(tensor.parts, work.rows, columns, work.setting)

    @cached_property
    def tail_layers(self) -> tuple[tuple[ops.Dense | ops.SumParts, ...], tuple[ops.DenseBackward, ...]]:
        """The layers that a tail makes, and their gradients: in the place of a first one in parts their sum."""
        sums = [op for op in self.operations if isinstance(op, ops.SumParts)]
        if not sums:
            return self.layers, self.backwards
        whole = [op for op in self.layers if not self.is_part(op)]
        backwards = [op for op in self.backwards if not self.is_part(op)]
        of_parts = [op for op in self.backwards if self.is_part(op)]
        return (sums[0], *whole), (of_parts[-1], *backwards)

    def loss_after(self, op: ops.Dense) -> ops.Loss | None:
        """The loss of a training step that follows a layer."""
        loss = self.following.get(op)
        return loss if isinstance(loss, ops.Loss) and loss.delta is not None else None

    def loss_path(self, loss: ops.Loss) -> LossPath:
        path = self.paths[loss]
        assert isinstance(path, LossPath)
        return path

    @cached_property
    def head_backward(self) -> ops.DenseBackward | None:
        """The backward pass of the layer that a head does with the loss, if there is a head."""
        if self.has_tail or self.selection.row_step or not self.layers or self.is_gemm(self.layers[-1]):
            return None
        last = self.layers[-1]
        loss = self.loss_after(last)
        if loss is None or not self.loss_path(loss).head or self.by_order(last.x):
            return None
        return next(op for op in self.backwards if op.dz == loss.delta)

    def ends_with_loss(self, op: ops.Dense) -> ops.Loss | None:
        """The loss that a product on tensor cores ends with."""
        loss = self.loss_after(op)
        if loss is None or self.targets or not self.is_gemm(op) or not self.loss_path(loss).product:
            return None
        return loss if loss.delta is not None and self.forms(loss.delta) == Stored(False, True) else None

    # --- the backward pass ---

    @cached_property
    def together(self) -> MovedTogether:
        """The weights that one launch on tensor cores moves, behind the last of their deltas.

        No operation until then works in place on what their gradients are made of.
        """
        moved = [op for op in self.operations if isinstance(op, ops.DenseBackward) and op.dweight and self.is_gemm(op)]
        shapes = {}
        for op in moved if _updates_together(self.selection) else ():
            until = self.operations[self.operations.index(op) + 1 : self.operations.index(moved[-1])]
            written = {name for other in until for name in other.writes}
            if written.isdisjoint((op.x, op.dz)):
                shapes[op.weight] = self.shape(op.weight)
        return moved_together(shapes, self.selection.work)

    def dropout(self, op: ops.Dense) -> ops.Dropout | None:
        """The dropout of a layer's outputs, if it is the next operation."""
        after = self.following.get(op)
        return after if isinstance(after, ops.Dropout) and after.x == op.y and after.part_of is None else None

    def dropout_back(self, op: ops.DenseBackward) -> ops.DropoutBackward | None:
        """The dropout that dx goes back through, if it is the next operation."""
        after = self.following.get(op)
        is_of_dx = isinstance(after, ops.DropoutBackward) and after.dy == op.dx and after.part_of is None
        return after if is_of_dx and isinstance(after, ops.DropoutBackward) else None

    @cached_property
    def behind_dropouts(self) -> dict[ops.Operation, Derivative]:
        """Dense layers whose dx goes back through a dropout, and the activation right before that, in one launch.

        What the dropout left stands for y, where the derivative takes that: so nobody needs y itself.
        """
        found: dict[ops.Operation, Derivative] = {}
        made = {op.y: op.x for op in self.operations if isinstance(op, ops.Dropout)}
        for op in self.backwards:
            path, dropout = self.dense_path(op), self.dropout_back(op)
            if dropout is None or isinstance(path.dx, WholeBatch) or isinstance(path.update, Atomic):
                continue
            after = self.following.get(dropout)
            after = after if isinstance(after, ops.ActivationBackward) and after.dy == dropout.dx else None
            dropped = op.x if after and made.get(op.x) == after.saved else None
            is_relu = after is not None and after.activation == "relu" and dropped is not None
            has_mask = op == self.head_backward or self._drops(path.dx, dropout.dx)
            if is_relu or has_mask:
                found[op] = Derivative(after, dropout=dropout, dropped=dropped)
        return found

    def _drops(self, path: object, made: str) -> bool:
        """Whether a product of this path can end with a dropout and leave what its readers take."""
        if self.has_tail or self.selection.row_step:
            return False
        return isinstance(path, Gemm) or (
            isinstance(path, (Simt, Short, WarpSplit, SplitK)) and not self.forms(made).operands
        )

    @cached_property
    def before_dropouts(self) -> dict[ops.Operation, ops.Dropout]:
        """Dense layers whose launch ends with the dropout that follows: nothing but that reads y."""
        found: dict[ops.Operation, ops.Dropout] = {}
        if self.selection.plan.ends_with_gradient:  # whose outputs are looked at
            return found
        restored = {each.op for each in self.behind_dropouts.values() if each.dropped}
        for op in self.layers:
            dropout = self.dropout(op)
            if dropout is None or not self._drops(self.dense_path(op).forward, dropout.y):
                continue
            if all(reader == dropout or reader in restored for reader in self.readers(op.y)):
                found[op] = dropout
        return found

    @cached_property
    def drawn(self) -> tuple[ops.Dropout, ...]:
        """The dropouts whose masks are drawn before products read them."""
        masked = {each.masked.layer for each in self.behind_dropouts.values() if each.masked}
        ahead = set(self.before_dropouts.values())
        dropouts = (op for op in self.operations if isinstance(op, ops.Dropout))
        return tuple(op for op in dropouts if op in ahead or op.layer in masked)

    @cached_property
    def _dropped_by_products(self) -> set[ops.Operation]:
        """Dropouts that are part of a dense layer's launches."""
        forward = (self.dropout(op) for op in self.layers if isinstance(self.dense_path(op).forward, WholeBatch))
        back = (self.dropout_back(op) for op in self.backwards if isinstance(self.dense_path(op).dx, WholeBatch))
        behind = (each.dropout for each in self.behind_dropouts.values())
        return {op for op in (*forward, *back, *behind, *self.before_dropouts.values()) if op is not None}

    def delta_of(self, op: ops.DenseBackward) -> str | None:
        """What the launch leaves that makes dx, and goes back through what follows."""
        return self.behind_dropouts[op].of(op.dx) if op in self.behind_dropouts else op.dx

    def output_of(self, op: ops.Dense) -> str:
        """What the launch leaves that makes y, or drops some of it."""
        return self.before_dropouts[op].y if op in self.before_dropouts else op.y

    def derivative(self, op: ops.DenseBackward | ops.LocallyConnectedBackward | ops.DropoutBackward) -> Derivative:
        """The activation's derivative that multiplies dx, if it is the next operation."""
        after = self.following.get(op)
        if op in self.behind_dropouts:
            behind = self.behind_dropouts[op]
            return replace(behind, of_operands=behind.saved in self.without_floats)
        if op.dx is None or not isinstance(after, ops.ActivationBackward) or after.dy != op.dx:
            return Derivative()
        return Derivative(after, after.saved in self.without_floats)

    def is_fused(self, op: ops.ActivationBackward) -> bool:
        """Whether the operation before it, which makes dx, multiplies by this derivative."""
        before = next((other for other, after in self.following.items() if after == op), None)
        is_alone = isinstance(before, ops.LocallyConnectedBackward) and before.dz not in self.stacks_back
        makes_dx = isinstance(before, (ops.DenseBackward, ops.LocallyConnectedBackward)) and before.dx == op.dy
        return makes_dx and (is_alone or isinstance(before, ops.DenseBackward))

    @cached_property
    def stacks_back(self) -> dict[str, LocalStack]:
        """The stacks whose backward pass is one kernel, by the delta of each layer."""
        found = {}
        for op, path in self.paths.items():
            if isinstance(op, ops.LocallyConnectedBackward) and isinstance(path, LocalPath) and path.stack:
                found[op.dz] = path.stack
        return found


def _updates_together(selection: Selection) -> bool:
    """Whether one launch may move several weights: a process has all of the network and the batch."""
    return selection.plan.ranks == 1 and selection.plan.tensor is None


def of_part(op: ops.Operation) -> bool:
    """Whether it is a dropout of some of a layer's columns, whose kernel leaves floats and does nothing beside."""
    return isinstance(op, (ops.Dropout, ops.DropoutBackward)) and op.part_of is not None


def fuse(selection: Selection) -> Fused:
    """The groups of a selection, in the order of their launches."""
    facts = _Facts(selection)
    made: list[Group] = []
    done: set[ops.Operation] = set()  # those whose work an earlier group did
    for each in selection.operations:
        op = each.operation
        if op in done or isinstance(op, _ONCE):
            continue
        new = _groups_of(facts, each)
        made += new
        done |= {fused for group in new for fused in group.operations() if _is_done(fused)}
    if drawn := facts.drawn:
        why = "products end with these dropouts or go back through them: their elements are drawn once for both"
        first = next(place for place, group in enumerate(made) if not set(group.operations()).isdisjoint(drawn))
        made.insert(first, groups.DrawDropouts(facts.titles[drawn[0]], why, drawn))
    if selection.row_step and not selection.row_step.form:
        made = _with_updates_after_row_step(facts, made)
    elif selection.work.in_place and _updates_together(selection) and not facts.has_tail:
        made = _with_gemm_updates(facts, _with_updates_of_a_kind(facts, made))
    made += _sums_of_biases(made)
    weights = {op.weight: facts.titles[op] for op in facts.layers if facts.is_gemm(op)}
    # Whose operands need no scales, updates write them beside the weights.
    updates_split = selection.work.in_place and facts.operand_format is not None and not facts.is_scaled
    pieces: tuple[groups.ExchangedPiece, ...] = ()
    if selection.work.is_training and selection.plan.ranks > 1:
        made, pieces = cut(selection.plan, made)
    finish = () if pieces else _finish(facts, made)
    # Scales of a weight are facts of its step, whose first launch clears them.
    pieces_split = bool(pieces) and facts.operand_format is not None and not facts.is_scaled
    return Fused(selection, tuple(made), weights, updates_split, pieces_split, pieces, finish, _notes(selection))


def _sums_of_biases(made: Sequence[Group]) -> list[Group]:
    """What adds up the biases' gradients that products have left as partial sums, and that they do not move."""
    left = [each for each in made if isinstance(each, groups.GemmGradient) and each.leaves_bias and not each.is_update]
    if not left:
        return []
    why = "products store partial sums of biases' gradients, and one launch adds them up"
    return [groups.SumBiases(left[-1].title, why, tuple(each.op for each in left))]


def _with_updates_after_row_step(facts: _Facts, made: list[Group]) -> list[Group]:
    """Updates of small weights as one group: after a row step none of them waits for another."""
    small = SmallN, FewColumns, WarpSplit, UpdateByParts, Strips
    updates = [each for each in made if isinstance(each, groups.DenseUpdate) and isinstance(each.path, small)]
    if not updates:
        return made
    why = f"{updates[0].why}; a row step has left what all layers' updates read"
    path = small_update([facts.shape(each.op.weight) for each in updates], facts.selection.work, why)
    paths = (path,) * len(updates)
    together = _update_layers(facts, updates, paths, path.why, follows_row_step=True)
    return [*(each for each in made if each not in updates), together]


def _with_updates_of_a_kind(facts: _Facts, made: list[Group]) -> list[Group]:
    """Updates of small weights by the same kernel as one group, in the place of the last of them.

    Each stands behind what makes its delta and behind dx of its own layer, which reads the weight, so there all do.
    """
    work = facts.selection.work
    if facts.selection.plan.parameter_count >= 1 << 31:  # more than the kernel is told places of
        return made
    for kind in (UpdateByParts, WarpSplit, SmallN):
        updates = [each for each in made if isinstance(each, groups.DenseUpdate) and isinstance(each.path, kind)]
        updates = [each for each in updates if _stays_readable(facts, each, made, updates[-1])]
        described = [(each, *facts.shape(each.op.weight), path) for each in updates if (path := _small_path(each))]
        # Blocks with the most rows begin first, so that no multiprocessor is left with one of them at the end.
        described.sort(key=lambda each: -update_blocks(each[1], each[2], each[3], work.rows)[1])
        ordered, of_layers = [each for each, *_ in described], [(k, n, path) for _, k, n, path in described]
        verdict = updates_in_one_launch(of_layers, work)
        if not verdict:
            continue
        paths = in_parts_of_all(of_layers, work)
        together, last = _update_layers(facts, ordered, paths, verdict.why, follows_row_step=False), updates[-1]
        made = [together if each is last else each for each in made if each is last or each not in updates]
    return made


def _with_gemm_updates(facts: _Facts, made: list[Group]) -> list[Group]:
    """Updates on tensor cores that one launch makes as one group, in the place of the last of them."""
    together = facts.together
    updates = [each for each in made if isinstance(each, groups.GemmGradient) and each.op.weight in together.weights]
    if not updates or together.tile is None:
        return made
    moved, path = tuple(each.op for each in updates), Gemm(together.tile, together.why)
    group = groups.GemmUpdates(updates[-1].title, together.why, moved, path)
    return [group if each is updates[-1] else each for each in made if each is updates[-1] or each not in updates]


def _small_path(update: groups.DenseUpdate) -> SmallUpdate | None:
    """The kernel of an update, if one launch may make it of several layers."""
    return update.path if isinstance(update.path, (UpdateByParts, WarpSplit, SmallN)) else None


def _stays_readable(facts: _Facts, update: groups.DenseUpdate, made: list[Group], last: Group) -> bool:
    """Whether an update may be made in the place of a later one.

    No launch until then works in place on what it reads, and its x can lie beside other layers': a stack of locally
    connected layers has an array of its own for what it leaves.
    """
    op, later = update.op, made[made.index(update) + 1 : made.index(last) + 1]
    deltas = (group for group in later if not isinstance(group, (groups.DenseUpdate, groups.UpdateLayers)))
    written = {name for group in deltas for other in group.operations() for name in other.writes}
    from_stack = any(isinstance(other, ops.LocallyConnected) and other.y == op.x for other in facts.operations)
    return written.isdisjoint((op.x, op.dz)) and (op.x == facts.layers[0].x or not from_stack)


def _update_layers(
    facts: _Facts,
    updates: Sequence[groups.DenseUpdate],
    paths: Sequence[SmallUpdate],
    why: str,
    *,
    follows_row_step: bool,
) -> groups.UpdateLayers:
    inputs, moved = facts.layers[0].x, tuple(each.op for each in updates)
    return groups.UpdateLayers(
        updates[0].title, why, moved, tuple(paths), inputs if any(op.x == inputs for op in moved) else None,
        any(each.by_order for each in updates), follows_row_step,
    )  # fmt: skip


def _is_done(op: ops.Operation) -> bool:
    """Whether nothing is left of an operation of a group; of a backward pass other groups may do another product."""
    rows = ops.Loss, ops.ActivationBackward, ops.Dropout, ops.DropoutBackward
    return isinstance(op, (*rows, ops.LocallyConnected, ops.LocallyConnectedBackward))


def _groups_of(facts: _Facts, each: Selected) -> list[Group]:
    """The groups that begin with an operation, if there are any."""
    op, path, title = each.operation, each.path, each.title
    blocks = facts.selection.row_step
    if blocks and (blocks.form or not isinstance(op, ops.DenseBackward)):
        return _row_step(facts, op, title) if isinstance(op, ops.Loss) else []
    if isinstance(op, ops.Gather):
        assert isinstance(path, GatherPath)
        why = f"{path.why}, but other kernels read x too" if path.by_readers else path.why
        return [] if op.x in facts.fetched else [groups.GatherRows(title, why, op)]
    if isinstance(op, ops.Standardize):
        return [] if op == facts.targets else [groups.StandardizeRows(title, path.why, op)]
    if isinstance(op, ops.Dense):
        return _gemm_forward(facts, op, title) if facts.is_gemm(op) else _forward(facts, op, title)
    if isinstance(op, ops.LocallyConnected):
        assert isinstance(path, LocalPath)
        if path.stack:
            return [groups.StackForward(title, path.why, path.stack, path.stack.operations)]
        return [groups.LocalForward(title, path.why, op)]
    if isinstance(op, (ops.Dropout, ops.DropoutBackward)):
        x, y = (op.x, op.y) if isinstance(op, ops.Dropout) else (op.dy, op.dx)
        if of_part(op):
            return [groups.DropOut(title, path.why, op, x, y, Derivative(), FLOATS)]
        derivative = facts.derivative(op) if isinstance(op, ops.DropoutBackward) else Derivative()
        return [groups.DropOut(title, path.why, op, x, y, derivative, facts.forms(y))]
    if isinstance(op, ops.Loss):
        return _loss(facts, op, title)
    if isinstance(op, ops.Output):
        assert isinstance(path, OutputPath)
        return [groups.OutputRows(title, path.why, op, path.team)]
    if isinstance(op, ops.ActivationBackward):
        why = f"no product makes {op.dy} just before it, whose epilogue could do it"
        return [] if op.dy in facts.stacks_back else [groups.Differentiate(title, why, op)]
    if isinstance(op, _OF_PARTS):
        return _between_parts(facts, op, path.why, title)
    if isinstance(op, ops.DenseBackward):
        return _gemm_backward(facts, op, title) if facts.is_gemm(op) else _backward(facts, op, title)
    assert isinstance(op, ops.LocallyConnectedBackward) and isinstance(path, LocalPath)
    return _local_backward(facts, op, path, title)


# --- dense layers by multiply-adds, heads, tails ---


def _forward(facts: _Facts, op: ops.Dense, title: str) -> list[Group]:
    path = facts.dense_path(op)
    forward = path.forward
    if facts.has_tail and op is not facts.layers[0] and not facts.is_part(op):
        return []
    if facts.head_backward and op is facts.layers[-1]:
        return [_head(facts, op, facts.head_backward, title)]
    if isinstance(forward, (Simt, Short, WarpSplit, WholeBatch)):
        dropout = facts.dropout(op) if isinstance(forward, WholeBatch) else facts.before_dropouts.get(op)
        return [groups.DenseForward(title, forward.why, op, forward, facts.by_order(op.x), dropout)]
    assert isinstance(forward, SplitK)
    partials = groups.DensePartials(title, forward.why, op, forward, facts.by_order(op.x), _next_partials(facts, op))
    why = "split-K partials are added up in a fixed order"
    added_by_tail = facts.has_tail and (not facts.is_part(op) or facts.tail_exchanges)
    if added_by_tail:
        return [partials]
    return [partials, groups.AddPartials(title, why, op, forward, facts.before_dropouts.get(op))]


def _next_partials(facts: _Facts, op: ops.Dense | ops.DenseBackward) -> FewRows | None:
    """The update that makes the next step's split-K partials too: of rows that the order tells it."""
    path = facts.dense_path(op)
    is_few = isinstance(path.update, FewRows) and isinstance(path.forward, SplitK)
    return path.update if is_few and isinstance(path.update, FewRows) and facts.by_order(op.x) else None


def _head(facts: _Facts, op: ops.Dense, backward: ops.DenseBackward, title: str) -> Group:
    loss = facts.loss_after(op)
    assert loss is not None
    scales, dx = False, facts.delta_of(backward)
    if dx is not None:
        scales = facts.is_scaled and any(map(facts.is_gemm, _backward_readers(facts, dx)))
    path = facts.loss_path(loss)
    stored = facts.forms(dx) if dx else None
    form = head_form_of_operands(path.form) if scales or (stored and stored.operands) else path.form
    return groups.Head(
        title, path.why, form, op, loss, backward, facts.targets, facts.derivative(backward), stored, scales
    )


def _backward_readers(facts: _Facts, delta: str) -> list[ops.DenseBackward]:
    """Of a delta, those that read it along columns as well, for a gradient."""
    return [op for op in facts.backwards if op.dz == delta and op.dweight]


def _loss(facts: _Facts, op: ops.Loss, title: str) -> list[Group]:
    path = facts.loss_path(op)
    if facts.has_tail:
        forward = facts.dense_path(facts.layers[0]).forward
        layers, backwards = facts.tail_layers
        derivatives = tuple(other for other in facts.operations if isinstance(other, ops.ActivationBackward))
        why, part = facts.selection.tail.why, None
        if facts.tail_exchanges:
            why, part = f"{why}; {facts.tail_exchanges.why}", facts.layers[0]
        added = forward if isinstance(forward, SplitK) else None
        return [groups.Tail(title, why, op, layers, backwards, derivatives, facts.targets, added, part)]
    delta = None
    if op.delta:  # an activation's derivative changes the delta as floats
        is_changed = isinstance(facts.following.get(op), ops.ActivationBackward)
        delta = FLOATS if is_changed else facts.forms(op.delta)
    return [groups.LossRows(title, path.why, op, facts.targets, delta, path.team)]


def _row_step(facts: _Facts, op: ops.Loss, title: str) -> list[Group]:
    by_rows = (ops.Gather, ops.Standardize, ops.Dropout, ops.DropoutBackward)
    rows = tuple(other for other in facts.operations if isinstance(other, by_rows) and other != facts.targets)
    derivatives = tuple(other for other in facts.operations if isinstance(other, ops.ActivationBackward))
    first, path = facts.layers[0].x, facts.selection.row_step
    if path.form:
        apart = path.input_layer is not None
        layers, behind = facts.layers[apart:], facts.layers[0] if apart else None
        step = groups.TensorRowStep(
            title, path.why, op, rows, layers, facts.backwards[apart:], derivatives, facts.targets, path, behind
        )
        if behind is None:
            return [step]
        inputs = next((other for other in rows if isinstance(other, ops.Standardize)), None)
        why = "its inputs are too long for a block of rows, or counted to be faster read by launches of their own"
        before = groups.InputLayerForward(facts.titles[behind], why, behind, inputs, path)
        back = facts.backwards[0]
        return [before, step, groups.InputLayerGradient(facts.titles[back], why, back, inputs, path)]
    is_read = any(other.x == first and other.dweight for other in facts.backwards)
    of_rows = groups.RowStep(
        title, path.why, op, rows, facts.layers, facts.backwards, derivatives, facts.targets,
        is_read and not facts.by_order(first),
    )  # fmt: skip
    return [of_rows]


def _backward(facts: _Facts, op: ops.DenseBackward, title: str) -> list[Group]:
    """dx comes first: the other product may change the weights."""
    path, work = facts.dense_path(op), facts.selection.work
    if isinstance(path.update, Atomic):
        return [groups.DenseAtomic(title, path.update.why, op, path.update)]
    made: list[Group] = []
    makes_dx = op.dx and not facts.has_tail and not facts.selection.row_step and op != facts.head_backward
    if makes_dx and isinstance(path.dx, WholeBatch):
        by_order, dropout = facts.by_order(op.x), facts.dropout_back(op)
        derivative = facts.derivative(dropout or op)
        return [groups.DenseInputUpdate(title, path.dx.why, op, path.dx, by_order, dropout, derivative)]
    if makes_dx:
        assert isinstance(path.dx, (Simt, WarpSplit))
        made = [groups.DenseInput(title, path.dx.why, op, path.dx, facts.derivative(op))]
    if op.dweight is None:
        return made
    update, by_order = path.update, facts.by_order(op.x)
    if not work.in_place:
        assert isinstance(update, (Simt, WarpSplit, SmallN))
        return [*made, groups.DenseGradient(title, update.why, op, update, by_order)]
    assert update is not None and not isinstance(update, Gemm)
    on_side_stream = facts.has_tail and op.dx is not None and not isinstance(update, FewRows)
    why, after_others = update.why, facts.selection.updates_after_others
    if on_side_stream:
        why += f"; on a side stream beside the first layer's update, {after_others.why}"
    leaves_partials = _next_partials(facts, op) is not None
    return [
        *made,
        groups.DenseUpdate(
            title, why, op, update, by_order, leaves_partials, on_side_stream, on_side_stream and after_others.holds
        ),
    ]


# --- dense layers on tensor cores ---


def _gemm_forward(facts: _Facts, op: ops.Dense, title: str) -> list[Group]:
    path = facts.dense_path(op).forward
    assert isinstance(path, Gemm)
    made: list[Group] = []
    first = next(other for other in facts.readers(op.x) if isinstance(other, ops.Dense) and facts.is_gemm(other))
    is_own = has_own_inputs(facts.selection.plan, op.weight, facts.operand_format)
    if op.x not in facts.with_operands and (op == first or is_own):
        by_order, is_training = op.x in facts.fetched, facts.selection.work.is_training
        copied = facts.is_copied(op.x)
        is_staged = by_order and not copied and is_training  # the order tells its rows before their step begins
        why = "no kernel before stores its split operands" + ("; one launch for several steps" if is_staged else "")
        made = [groups.SplitRows(title, why, op.x, op, by_order, copied, is_staged, operands=True)]
    if loss := facts.ends_with_loss(op):
        return [*made, groups.GemmForwardLoss(title, facts.loss_path(loss).product.why, op, path, loss)]
    y = facts.forms(facts.output_of(op))
    return [*made, groups.GemmForward(title, path.why, op, path, y, facts.before_dropouts.get(op))]


def _gemm_backward(facts: _Facts, op: ops.DenseBackward, title: str) -> list[Group]:
    path, work = facts.dense_path(op), facts.selection.work
    assert isinstance(path.dx, Gemm)
    if op.dweight is None:
        return _gemm_input(facts, op, path.dx, title)
    assert isinstance(path.update, Gemm)
    has_scales = facts.head_backward is not None and op.dz == facts.delta_of(facts.head_backward) and facts.is_scaled
    has_bias = op.dbias is not None and op.weight not in facts.together.weights  # which move theirs as well
    may_leave = work.in_place or leaves_bias_partials(facts.selection.plan, facts.selection.plan.capacity).holds
    leaves_bias = has_bias and may_leave and path.update.leaves_bias
    sums_bias = has_bias and not leaves_bias
    made: list[Group] = []
    if facts.is_scaled and not has_scales:
        why = "a row's scale follows from the whole row"
        made.append(groups.SplitRows(title, why, op.dz, op, False, False, False, operands=op.dx is not None))
    if op.dz not in facts.with_operands:
        why = "no kernel before stores its split operands"
        if facts.is_scaled:
            why = "a column's scale follows from the whole column"
        rows_too = has_scales and op.dx is not None
        made.append(groups.SplitColumns(title, why, op, rows_too=rows_too, sums=sums_bias))
    elif sums_bias:
        why = "the product makes no partial sums of the bias's gradient"
        made.append(groups.SumDelta(title, why, op))
    if dx := facts.delta_of(op):
        made.append(groups.GemmInput(title, path.dx.why, op, path.dx, facts.derivative(op), facts.forms(dx)))
    made.append(groups.GemmGradient(title, path.update.why, op, path.update, work.in_place, sums_bias, leaves_bias))
    return made


def _gemm_input(facts: _Facts, op: ops.DenseBackward, path: Gemm, title: str) -> list[Group]:
    """The delta that a frozen layer passes on."""
    dx = facts.delta_of(op)
    assert dx is not None
    made: list[Group] = []
    if facts.is_scaled:
        why = "scales of rows are facts when the rows are whole"
        made = [groups.SplitRows(title, why, op.dz, op, False, False, False, operands=True)]
    elif op.dz not in facts.with_operands:
        why = "nobody has left its operands"
        made = [groups.SplitColumns(title, why, op, rows_too=False, sums=False)]
    return [*made, groups.GemmInput(title, path.why, op, path, facts.derivative(op), facts.forms(dx))]


# --- parts of a network ---


def _between_parts(facts: _Facts, op: ops.Operation, why: str, title: str) -> list[Group]:
    if isinstance(op, ops.SumParts) and facts.has_tail:
        return []
    if isinstance(op, ops.SumParts):
        return [groups.SumOfParts(title, why, op)]
    if isinstance(op, ops.JoinParts):
        return [groups.JoinedParts(title, why, op)]
    if isinstance(op, ops.TakeColumns):
        return [groups.TakenColumns(title, why, op)]
    assert isinstance(op, ops.BiasBackward)
    why = "products of a weight's parts have tiles of their own, and every rank must come to the same sum"
    is_update = facts.selection.work.in_place
    return [groups.BiasGradient(title, why, op, is_update, is_update and facts.has_tail)]


# --- locally connected layers ---


def _local_backward(facts: _Facts, op: ops.LocallyConnectedBackward, path: LocalPath, title: str) -> list[Group]:
    stack = path.stack
    if stack is None:
        return [groups.LocalBackward(title, path.why, op, facts.derivative(op), path.has_shared_bias)]
    deltas = {f"d{layer.y}" for layer in stack.operations}
    last = f"d{stack.operations[-1].y}"
    backwards = tuple(
        other for other in facts.operations if isinstance(other, ops.LocallyConnectedBackward) and other.dz in deltas
    )
    derivatives = tuple(
        other for other in facts.operations if isinstance(other, ops.ActivationBackward) and other.dy in deltas
    )
    is_derived = not any(other.dy == last and not facts.is_fused(other) for other in derivatives)
    return [groups.StackBackward(title, path.why, stack, backwards, derivatives, is_derived)]


# --- after all shards ---


def _finish(facts: _Facts, made: list[Group]) -> tuple[Group, ...]:
    """What is left to do once: the total error of several shards, Reduce, Norm, Update."""
    plan = facts.selection.plan
    reduce, norm, update = (
        next((op for op in facts.operations if isinstance(op, kind)), None)
        for kind in (ops.Reduce, ops.Norm, ops.Update)
    )
    if not isinstance(reduce, ops.Reduce):
        return ()
    in_place = facts.selection.in_place
    if in_place:
        assert isinstance(update, ops.Update)
        blocks = facts.selection.row_step
        if blocks.form:
            why = "each block of rows leaves a part of all gradients"
            return (groups.UpdateFromBlocks(facts.titles[update], why, update, facts.layers, blocks),)
        has_partials = any(isinstance(group, groups.GemmGradient) and group.leaves_bias for group in made)
        why = "products store partial sums of biases' gradients; one launch adds them up and updates the biases"
        return (groups.UpdateBiases(facts.titles[update], why, update),) if has_partials else ()
    finish: list[Group] = []
    if plan.shards > 1:
        loss = next(op for op in facts.operations if isinstance(op, ops.Loss))
        finish.append(groups.TotalError(facts.titles[loss], "each shard leaves a sum of the loss", loss))
    # The update adds the shards up itself, unless a parameter is used twice or the norm comes between.
    is_used_twice = len(plan.partials) > len(plan.gradient)
    is_reduced = plan.ends_with_gradient or is_used_twice or (norm is not None and plan.shards > 1)
    if is_reduced:
        finish.append(groups.ReducePartials(facts.titles[reduce], in_place.why, reduce))
    if plan.ends_with_gradient:
        return tuple(finish)
    if isinstance(norm, ops.Norm):
        finish.append(groups.ClipNorm(facts.titles[norm], in_place.why, norm, is_reduced))
    assert isinstance(update, ops.Update)
    finish.append(groups.UpdateAll(facts.titles[update], in_place.why, update, is_reduced, norm is not None))
    return tuple(finish)


def _notes(selection: Selection) -> tuple[str, ...]:
    notes = []
    work = selection.work
    for run, stack in selection.stacks.items():
        way = f"{len(run)} launches, since {stack}" if isinstance(stack, str) else str(stack)
        back = {op.dz for op in selection.plan.training if isinstance(op, ops.LocallyConnectedBackward)}
        if not isinstance(stack, str) and work.is_training and back & {f"d{layer.y}" for layer in run}:
            no_update = no_update_of(stack, work)
            way += f"; backward a kernel per layer, since {no_update}" if no_update else "; backward in one kernel too"
        if len(run) > 1:
            kind = "training" if work.is_training else "evaluation"
            notes.append(f"{kind}, {run[0].y} to {run[-1].y}: {way}")
    return tuple(notes)
