"""A step as phases whose parts threads share.

Up to the deltas a part has some rows of the batch, from their inputs through the loss to all dx, and waits for no
other; then it makes the gradients of some of the parameters, and moves these.  So a step waits twice for the slowest
thread.

- Of few rows threads exchange no weights, but sums: of a layer a part has some rows of W, makes its share of x W, its
  columns of dx, and its rows of dW, and moves them, so that they stay in a thread's cache from step to step.
- Of many rows and few parameters a part takes a block of its rows at a time through all layers and back, so that they
  stay in the cache, and adds up gradients of its own; then all parts' gradients are added up.

How a step is cut into parts follows from the plan, the number of rows and of threads, and never from who is there to
compute (``loops/steps.h``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ... import plan as ops
from .compiled import (
    activation,
    bind_compiled,
    column_sums,
    gradient_product,
    input_gradient,
    loss,
    moves,
    rows_product,
    unpacked_gradient,
)
from .loops import Call, Parts, Phases
from .threads import Bound
from .workspace import Workspace

LEAST_ROWS = 8  # of a part: products of fewer take nearly as long
ROW_BLOCK = 8  # parts of many rows are multiples of it, as tiles of products are
# A layer is cut along k, so that each part has some rows of its weight, if the batch has at most so many rows, and
# the weight at least so many elements, so many for each squared row of the batch, and an input for every so many
# rows. Cut by rows of the batch, each part has BLAS pack the whole weight; cut along k, the sums of all parts are
# added up. A step of n-n-n-10 along k takes, of its time by rows, 0.98, 1.04, 1.10 for n = 128 and 48, 128 and 384
# rows; for n = 362 0.78, 0.83, 1.03; for n = 1024 0.74, 0.88, 1.00; and 24-2000-24 0.93, 1.10, 1.23 at 32, 64 and 100
# rows.
ALONG_K_MOST_ROWS, ALONG_K_FROM_WEIGHTS, ALONG_K_BY_SQUARED_ROW, ALONG_K_ROWS_BY_INPUT = 320, 1 << 14, 2, 2
GRADIENT_BLOCK = 1 << 14  # elements that are made and moved before the next ones, where products need not be larger

# Parts add up gradients of their own, block by block, of plans of at most so many parameters, where the rows of a part
# take more than so many bytes; a block has so many, or the least rows by which products are fast.
BLOCKED_PARAMETERS, BLOCK_BYTES, LEAST_BLOCK_ROWS = 1 << 17, 1 << 19, 128

Piece = tuple[list[Call], np.ndarray, slice]  # what makes a gradient, where it lies, and which of the plan's it is


def training_phases(work: Workspace, rows: int) -> Phases:
    """Those of a step of so many rows."""
    return Phases(_Cut(work, rows).step())


def evaluation_phases(work: Workspace, rows: int) -> tuple[Phases, np.ndarray]:
    """Those of a batch of so many rows of an evaluation, and where parts' sums of loss and weight come to lie."""
    cut = _Cut(work, rows)
    return Phases(cut.batch(work.plan.evaluation)), cut.sums


def row_parts(rows: int, parts: int) -> list[slice]:
    """The rows of each part, at most so many parts."""
    count = max(1, min(parts, rows // LEAST_ROWS))
    block = ROW_BLOCK if rows >= 4 * ROW_BLOCK * count else 1
    blocks = -(-rows // block)
    ends = [min(rows, blocks * part // count * block) for part in range(count + 1)]
    return [slice(*each) for each in pairwise(ends)]


def equal_parts(length: int, parts: int) -> list[slice]:
    """So many parts of a length, some of them empty where it is short."""
    ends = [length * part // parts for part in range(parts + 1)]
    return [slice(*each) for each in pairwise(ends)]


def is_along_k(rows: int, shape: tuple[int, ...], parts: int) -> bool:
    """Whether parts of a layer are rows of its weight (k, n), in a batch of so many rows."""
    k, n = shape
    is_large = k >= parts and k * n >= max(ALONG_K_FROM_WEIGHTS, ALONG_K_BY_SQUARED_ROW * rows**2)
    return parts > 1 and is_large and rows <= min(ALONG_K_MOST_ROWS, ALONG_K_ROWS_BY_INPUT * k)


class _Cut:
    """How a batch of so many rows is cut into parts.

    Attributes:
        rows: of each part, at least one of them.
        sums: (parts that have rows, or blocks of all of them, 2) float64, their sums of loss and weight.
    """

    def __init__(self, work: Workspace, rows: int) -> None:
        self._work, self._parts = work, work.threads.count
        self._all = slice(0, rows)
        self.rows = row_parts(rows, self._parts)
        self.sums = np.zeros((len(self.rows), 2))

    def step(self) -> list[Parts]:
        """The phases of a step."""
        work, training = self._work, self._work.plan.training
        update = next(op for op in training if isinstance(op, ops.Update))
        norm = next((op for op in training if isinstance(op, ops.Norm)), None)
        blocks = self._blocks()
        if blocks:
            gradients = np.zeros((len(blocks), work.plan.gradient_count), work.dtype)
            phases = [self._in_blocks(blocks, gradients)]
            pieces = [self._added(gradients, place) for place in range(self._parts)]
        else:
            layers = [op for op in training if isinstance(op, ops.DenseBackward)]
            phases = self.batch(training)
            if norm is None:
                last = [[self._total(place), *self._moved(layers, update, place)] for place in range(self._parts)]
                return [*phases, last]
            pieces = [[piece for op in layers for piece in self._gradients(op, place)] for place in range(self._parts)]
        moved = [
            [call for _, gradient, elements in of_part for call in moves(work, update, gradient, elements)]
            for of_part in pieces
        ]
        made = [[call for calls, _, _ in of_part for call in calls] for of_part in pieces]
        if norm is None:
            return [*phases, [[self._total(place), *made[place], *calls] for place, calls in enumerate(moved)]]
        # All gradients must be there before the first is moved.
        squares = np.zeros(sum(map(len, pieces)))
        places = iter(range(len(squares)))
        for calls, of_part in zip(made, pieces, strict=True):
            calls += [
                Call(work.dtype, "square_sum", each, len(each), squares[next(places) :]) for _, each, _ in of_part
            ]
        clip = Call(work.dtype, "clip", squares, len(squares), norm.limit)
        return [*phases, made, [[self._total(place), clip, *calls] for place, calls in enumerate(moved)]]

    def _total(self, place: int) -> Call:
        """What adds up the sums of loss and weight, for a part's update."""
        return Call(self._work.dtype, "total", self.sums, len(self.sums), place == 0)

    def batch(self, operations: Sequence[ops.Operation]) -> list[Parts]:
        """The phases from the gather to the last delta, or prediction."""
        phases: list[Parts] = []
        can_go_on = False  # whether parts of the last phase are rows
        for op in operations:
            if isinstance(op, (ops.Dense, ops.DenseBackward)) and self._is_along_k(op):
                along_k, of_rows = self._products(op) if isinstance(op, ops.Dense) else (self._input_gradients(op), [])
                phases += [along_k] if along_k else []
                can_go_on = can_go_on and not along_k
            else:
                each_part = zip(self.rows, self.sums, strict=True)
                of_rows = [only_calls(self._in_rows(op, rows, sums)) for rows, sums in each_part]
            if any(of_rows):
                if not can_go_on:
                    phases.append([[] for _ in range(self._parts)])
                can_go_on = True
                for calls, more in zip(phases[-1], of_rows, strict=False):
                    calls += more
        return phases

    def _in_rows(self, op: ops.Operation, rows: slice, sums: np.ndarray) -> Sequence[Bound | Call]:
        """What an operation calls for some rows."""
        work = self._work
        if isinstance(op, ops.Gather):
            return [_gather(work, op, rows)]
        if isinstance(op, (ops.Reduce, ops.Norm, ops.Update)):
            return []
        if isinstance(op, ops.DenseBackward):
            return input_gradient(work, op, rows)
        found = loss(work, op, rows, sums) if isinstance(op, ops.Loss) else bind_compiled(work, op, rows, 0)
        if isinstance(op, ops.Standardize) and found is None:  # of inputs, which `gather` may have standardized
            x, y = work.view(op.x, rows), work.view(op.y, rows)
            mean, scale = work.arrays[op.mean], work.arrays[op.scale]
            return [Call(work.dtype, "standardize_inputs", work.described_feed, x, mean, scale, y, *y.shape)]
        assert found is not None
        return found

    # --- layers whose parts are rows of W ---

    def _is_along_k(self, op: ops.Dense | ops.DenseBackward) -> bool:
        return is_along_k(self._all.stop, self._work.arrays[op.weight].shape, self._parts)

    def _products(self, op: ops.Dense) -> tuple[Parts, Parts]:
        """Each part's share of x W; and what adds them up for some rows and computes the activation."""
        work, z = self._work, self._work.arrays[op.z or op.y]
        x, weight = work.view(op.x, self._all), work.arrays[op.weight]
        (k, n), count = weight.shape, self._all.stop
        shares = np.empty((self._parts, count, n), work.dtype)
        along_k = [
            only_calls([rows_product(x[:, part], weight[part], share)])
            for part, share in zip(equal_parts(k, self._parts), shares, strict=True)
        ]
        of_rows = [
            only_calls([
                Call(work.dtype, "add_parts", shares[0, rows], count * n, self._parts, z[rows], z[rows].size),
                *activation(work, op, rows),
            ])
            for rows in self.rows
        ]  # fmt: skip
        return along_k, of_rows

    def _input_gradients(self, op: ops.DenseBackward) -> Parts:
        """Each part's columns of dx, if it is wanted."""
        if not op.dx:
            return []
        columns = equal_parts(len(self._work.arrays[op.weight]), self._parts)
        return [only_calls(input_gradient(self._work, op, self._all, part)) for part in columns]

    # --- gradients of parameters ---

    def _own(self, op: ops.DenseBackward, place: int, length: int) -> slice:
        """The rows of a layer's weight, or elements of its bias, whose gradient a part makes."""
        if len(self.rows) > 1 or self._is_along_k(op):
            return equal_parts(length, self._parts)[place]
        return slice(0, length if place == 0 else 0)  # all for the part that alone reads them

    def _gradients(self, op: ops.DenseBackward, place: int) -> list[Piece]:
        """What makes a part's share of a layer's gradients."""
        work, dz, found = self._work, self._work.view(op.dz, self._all), []
        if op.dweight:
            x, dweight, offset = work.view(op.x, self._all), work.partial(op.dweight, 0), _offset(work, op.dweight)
            part, n = self._own(op, place, len(dweight)), dweight.shape[1]
            if part.start < part.stop:
                made = only_calls([gradient_product(x[:, part], dz, dweight[part])])
                found.append((made, dweight[part].ravel(), slice(offset + part.start * n, offset + part.stop * n)))
        if op.dbias:
            dbias, offset = work.partial(op.dbias, 0), _offset(work, op.dbias)
            part = self._own(op, place, len(dbias))
            if part.start < part.stop:
                made = [column_sums(dz[:, part], dbias[part])]
                found.append((made, dbias[part], slice(offset + part.start, offset + part.stop)))
        return found

    def _moved(self, layers: Sequence[ops.DenseBackward], update: ops.Update, place: int) -> Iterator[Call]:
        """What makes a part's share of all gradients, and moves each as soon as it is there."""
        work = self._work
        for op in layers:
            for calls, gradient, elements in self._gradients(op, place):
                if calls[0].name == "unpacked_product":
                    yield from self._moved_by_blocks(op, update, place)
                else:
                    yield from calls
                    yield from moves(work, update, gradient, elements)

    def _moved_by_blocks(self, op: ops.DenseBackward, update: ops.Update, place: int) -> Iterator[Call]:
        """A part of a weight, of which a few rows of W are moved before the next gradients are made."""
        assert op.dweight is not None
        work, dz, n = self._work, self._work.view(op.dz, self._all), self._work.arrays[op.weight].shape[1]
        x, part = work.view(op.x, self._all), self._own(op, place, len(work.arrays[op.weight]))
        at_once = max(1, GRADIENT_BLOCK // n)
        gradient = np.empty((min(at_once, part.stop - part.start), n), work.dtype)
        for first in range(part.start, part.stop, at_once):
            rows = slice(first, min(first + at_once, part.stop))
            made, offset = gradient[: rows.stop - first], _offset(work, op.dweight)
            yield unpacked_gradient(x[:, rows], dz, made)
            yield from moves(work, update, made.ravel(), slice(offset + first * n, offset + rows.stop * n))

    # --- blocks of rows ---

    def _blocks(self) -> list[list[slice]]:
        """The blocks of each part's rows; none if parts are not computed so."""
        work, plan = self._work, self._work.plan
        of_rows = (each for each in plan.buffers.values() if each.axes[1:] == ("row", "unit"))
        row_bytes = work.dtype.itemsize * sum(buffer.shape[-1] for buffer in of_rows)
        rows = self.rows[0].stop
        at_once = max(LEAST_BLOCK_ROWS, BLOCK_BYTES // row_bytes)
        if plan.gradient_count > BLOCKED_PARAMETERS or rows < 2 * at_once:
            return []
        blocks = []
        for part in self.rows:
            found = row_parts(part.stop - part.start, (part.stop - part.start) // at_once)
            blocks.append([slice(part.start + each.start, part.start + each.stop) for each in found])
        self.sums = np.zeros((sum(map(len, blocks)), 2))
        return blocks

    def _in_blocks(self, blocks: list[list[slice]], gradients: np.ndarray) -> Parts:
        """From the gather to each part's gradients (parts, gradient), block by block."""
        work, parts = self._work, []
        sums = iter(self.sums)
        for of_part, gradient in zip(blocks, gradients, strict=True):
            calls: list[Call] = []
            for number, rows in enumerate(of_part):
                own_sums = next(sums)
                for op in work.plan.training:
                    calls += only_calls(self._in_rows(op, rows, own_sums))
                    if isinstance(op, ops.DenseBackward) and op.dweight:
                        dz, out = work.view(op.dz, rows), self._out(op.dweight, gradient)
                        calls += only_calls([gradient_product(work.view(op.x, rows), dz, out, adds=number > 0)])
                        if op.dbias:
                            calls.append(column_sums(dz, self._out(op.dbias, gradient), adds=number > 0))
            parts.append(calls)
        return [*parts, *([] for _ in range(self._parts - len(parts)))]

    def _out(self, partial: str, gradient: np.ndarray) -> np.ndarray:
        segment = next(each for each in self._work.plan.partials if each.name == partial)
        return gradient[segment.offset : segment.end].reshape(segment.shape)

    def _added(self, gradients: np.ndarray, place: int) -> list[Piece]:
        """What adds up a part's share of all parts' gradients."""
        count, size = gradients.shape
        elements = equal_parts(size, self._parts)[place]
        total = gradients[0, elements]
        add = Call(self._work.dtype, "add_parts", total, size, count, total, len(total))
        return [([add] if count > 1 else [], total, elements)] if len(total) else []


def only_calls(steps: Sequence[Bound | Call]) -> list[Call]:
    """These steps, each of which is a loop, since :func:`~.threads.is_phased` has looked."""
    assert all(isinstance(step, Call) for step in steps)
    return list(steps)  # type: ignore[arg-type]


def _gather(work: Workspace, op: ops.Gather, rows: slice) -> Call:
    standardized = next((e.y for e in work.plan.evaluation if isinstance(e, ops.Standardize) and e.x == op.x), op.x)
    arrays = (work.view(name, rows) if name else None for name in (op.x, standardized, op.target, op.weight))
    return Call(work.dtype, "gather", work.described_feed, rows.start, rows.stop - rows.start, *arrays)


def _offset(work: Workspace, partial: str) -> int:
    return next(each.offset for each in work.plan.partials if each.name == partial)
