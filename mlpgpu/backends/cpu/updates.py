"""What runs once for all shards of a step, bound to flat arrays: Reduce, Norm, Update, and what ranks exchange."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ... import plan as ops
from ...plan import Plan, additions, block_size, parts_of, shards_of
from ..parts import all_ranks, parts_of_plan
from .compiled import bind_update
from .threads import Bound
from .workspace import Workspace

UPDATE_BLOCK = 1 << 17  # elements that a pass handles at a time, so that those that follow find them in cache


@dataclass
class _Sums:
    """What an update is made from.

    Attributes:
        slice: this rank's part of the flat arrays.
        totals: (own shards, G), each shard's gradient.
        gradient: (elements of the slice,), where the sum of all shards comes to lie.
        pairs: which arrays are added to which to make it, on the elements of the slice.
        received: (nodes, elements of the slice) of each other rank, empty for this one.
    """

    slice: ops.Slice
    totals: np.ndarray
    gradient: np.ndarray
    pairs: list[tuple[np.ndarray, np.ndarray]]
    received: list[np.ndarray]

    @classmethod
    def of(cls, work: Workspace) -> _Sums:
        plan, rank, own = work.plan, work.rank, work.slice
        is_tied = len(plan.partials) > len(plan.gradient)
        totals = np.empty((len(work.shards), plan.gradient_count), work.dtype) if is_tied else work.partials
        size = own.gradient.stop - own.gradient.start
        parts: list[np.ndarray] = []
        received: list[np.ndarray] = []
        for other in range(plan.ranks):
            theirs = plan.nodes(other)
            arrays = np.empty((0 if other == rank else len(theirs), size), work.dtype)
            received.append(arrays)
            parts += _rows(totals, plan, rank, own.gradient) if other == rank else list(arrays)
        pairs = [(parts[i], parts[j]) for i, j in plan.additions()]
        return cls(own, totals, parts[0], pairs, received)


@dataclass(frozen=True)
class Updates:
    """The operations behind those of the shards, in blocks that stay in cache.

    The division by the batch's summed weight and the factor of a clipped norm are one factor, by which the
    update multiplies the gradient.  Where a parameter has one use, its partials are its shards' gradients.

    Attributes:
        to_reduce: what adds the partials up, which ranks exchange before, with the shards' sums of loss and weight.
        to_move: what follows.
        gradient: (elements of this rank's slice,), where the sum comes to lie.
    """

    to_reduce: list[Bound]
    to_move: list[Bound]
    gradient: np.ndarray

    @classmethod
    def of(cls, work: Workspace) -> Updates:
        """Those of a plan, bound to its arrays."""
        to_reduce: list[Bound] = []
        to_move: list[Bound] = []
        if not work.plan.training:
            return cls(to_reduce, to_move, np.empty(0, work.dtype))
        sums = _Sums.of(work)
        for op in work.plan.training:
            if type(op) in _BIND:
                bound = _BIND[type(op)](work, op, sums)
                (to_reduce if isinstance(op, (ops.ExchangePartials, ops.Reduce)) else to_move).extend(bound)
        return cls(to_reduce, to_move, sums.gradient)

    def reduce(self) -> None:
        """Add the partials up, and have all ranks know the shards' sums of loss and weight; changes no parameter."""
        for call in self.to_reduce:
            call()

    def move(self) -> None:
        """Move the parameters."""
        for call in self.to_move:
            call()


def _rows(totals: np.ndarray, plan: Plan, rank: int, elements: slice) -> list[np.ndarray]:
    """Where the sums of a rank's nodes lie once its shards are added, on these elements."""
    first = shards_of(rank, plan.ranks, plan.shards).start
    return [totals[node.start - first, elements] for node in plan.nodes(rank)]


def _blocks(start: int, size: int) -> list[slice]:
    """Slices that cover ``size`` elements from ``start`` on."""
    end = start + size
    return [slice(first, min(first + UPDATE_BLOCK, end)) for first in range(start, end, UPDATE_BLOCK)]


def _bind_exchange(work: Workspace, op: ops.ExchangePartials, sums: _Sums) -> list[Bound]:
    """This rank's nodes are added up and go to whom they are for with its losses and weights; theirs come here."""
    plan, rank = work.plan, work.rank
    dealt = [shards_of(other, plan.ranks, plan.shards) for other in range(plan.ranks)]
    losses = [work.shard_sums[shards.start : shards.stop] for shards in dealt]
    sent = [[*_rows(sums.totals, plan, rank, part.gradient), losses[rank]] for part in plan.slices]
    received = [[*arrays, of_theirs] for arrays, of_theirs in zip(sums.received, losses, strict=True)]
    return [*_bind_uses(work, sums), *_bind_shards(work, sums), lambda: all_ranks().exchange_several(sent, received)]


def _bind_uses(work: Workspace, sums: _Sums) -> list[Bound]:
    """Each shard's partials of a parameter that is used twice, added one after another."""
    if sums.totals is work.partials:
        return []
    terms = [
        (sums.totals[place, segment.offset : segment.end].reshape(segment.shape), work.uses(segment.name, shard))
        for place, shard in enumerate(work.shards)
        for segment in work.plan.gradient
    ]

    def add_uses() -> None:
        for total, (first, *others) in terms:
            np.copyto(total, first)
            for partial in others:
                np.add(total, partial, out=total)

    return [add_uses]


def _bind_shards(work: Workspace, sums: _Sums) -> list[Bound]:
    """The shards of each node of this rank, added up."""
    first, pairs = work.shards.start, []
    for node in work.plan.nodes(work.rank):
        for i, j in additions(node, [range(shard, shard + 1) for shard in node]):
            pairs.append((sums.totals[node.start - first + i], sums.totals[node.start - first + j]))
    return _bind_additions(pairs)


def _bind_additions(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[Bound]:
    """Add flat arrays to others, in this order, block by block."""
    if not pairs:
        return []
    terms = [(total[block], other[block]) for block in _blocks(0, len(pairs[0][0])) for total, other in pairs]

    def add() -> None:
        for total, other in terms:
            np.add(total, other, out=total)

    return [add]


def _bind_reduce(work: Workspace, op: ops.Reduce, sums: _Sums) -> list[Bound]:
    if work.plan.ranks > 1:
        return _bind_additions(sums.pairs)
    return [*_bind_uses(work, sums), *_bind_shards(work, sums)]


def _bind_norm(work: Workspace, op: ops.Norm, sums: _Sums) -> list[Bound]:
    """Squares are summed up over fixed blocks, in float64, where the square of no float32 overflows."""
    if work.plan.tensor is not None:
        return _bind_norm_of_parts(work, op, sums)
    count, block = work.plan.gradient_count, block_size(work.plan.gradient_count)
    squares = np.zeros(-(-count // block))
    own, ranks = sums.slice.gradient, 1 if work.plan.moves_all else work.plan.ranks
    at_a_time = max(1, UPDATE_BLOCK // block) * block
    wide = np.empty(min(at_a_time, max(len(sums.gradient), 1)))
    passes = []
    for first in range(0, len(sums.gradient), at_a_time):
        part = sums.gradient[first : first + at_a_time]
        whole = len(part) // block * block
        start = (own.start + first) // block
        if whole:
            rows = whole // block
            passes.append((part[:whole], wide[:whole].reshape(rows, block), squares[start : start + rows]))
        if whole < len(part):  # the last block of all
            passes.append((part[whole:], wide[: len(part) - whole].reshape(1, -1), squares[-1:]))
    parts = [slice(part.start // block, -(-part.stop // block)) for part in parts_of(count, ranks)]

    def norm() -> None:
        for part, rows, result in passes:
            np.copyto(rows, part.reshape(rows.shape))
            np.einsum("ij,ij->i", rows, rows, out=result)
        if ranks > 1:
            all_ranks().all_gather(squares, parts)
        length = math.sqrt(_sum(squares)) * work.inverse_weight
        if length > op.limit:
            work.gradient_factor *= op.limit / length

    return [norm]


def _bind_norm_of_parts(work: Workspace, op: ops.Norm, sums: _Sums) -> list[Bound]:
    """As above: of arrays that every rank has the squares are counted once, of others each rank's are put together.

    Blocks are those of each part of an array, so that they do not depend on who has it; the sum over them is rounded
    once, so that their order does not matter.
    """
    plan, parts = work.plan, parts_of_plan(work.plan)
    assert plan.tensor is not None
    trained = {p.name: p for p in plan.parameters if p.trainable}
    most = plan.tensor.norm_block
    shared = sum(-(-p.size // most) for p in trained.values() if p.of is None)
    of_parts = plan.tensor.norm_blocks()
    squares = np.zeros(shared + sum(of_parts))
    place_of_part = [shared + sum(of_parts[:part]) for part in range(parts.count)]
    slices = [slice(place_of_part[parts.of(r).start], 0) for r in range(parts.ranks)]
    slices = [slice(s.start, n.start) for s, n in pairwise([*slices, slice(len(squares), 0)])]
    passes, wide, place = [], np.empty(most), 0
    for segment in plan.gradient:
        of = trained[segment.name].of
        for first in range(segment.offset, segment.end, most):
            block = sums.gradient[first : min(first + most, segment.end)]
            if of is None:
                passes.append((block, wide[: len(block)], place))
                place += 1
            else:
                passes.append((block, wide[: len(block)], place_of_part[of.part]))
                place_of_part[of.part] += 1

    def norm() -> None:
        for part, rows, number in passes:
            np.copyto(rows, part)
            squares[number] = np.dot(rows, rows)
        if parts.ranks > 1:
            all_ranks().all_gather(squares, slices)
        length = math.sqrt(_sum(squares)) * work.inverse_weight
        if length > op.limit:
            work.gradient_factor *= op.limit / length

    return [norm]


def _sum(values: np.ndarray) -> float:
    """The sum, rounded once; NaN or infinite where a number is."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # a sum that no float64 holds; infinities of both signs
        return math.inf


def _bind_update(work: Workspace, op: ops.Update, sums: _Sums) -> list[Bound]:
    if work.is_compiled:
        return [bind_update(work, op, sums.gradient)]
    rule, own = op.optimizer.update, sums.slice
    scratch = np.empty(min(UPDATE_BLOCK, max(len(sums.gradient), 1)), work.dtype)
    views = [
        (
            each.alpha,
            work.parameters[moved],
            sums.gradient[along],
            list(work.slots[:, moved.start - own.parameters.start : moved.stop - own.parameters.start]),
            scratch[: moved.stop - moved.start],
        )
        for each in work.plan.trained_in(own.gradient)
        for moved, along in zip(
            _blocks(each.offset, each.size), _blocks(each.gradient - own.gradient.start, each.size), strict=True
        )
    ]

    def update() -> None:
        factor, row = work.gradient_factor, work.row
        for alpha, w, g, slots, part in views:
            np.multiply(g, factor, out=g)
            if alpha:
                np.multiply(w, alpha * work.inverse_weight, out=part)
                np.add(g, part, out=g)
            rule(w, g, slots, row, part)

    return [update]


def _bind_gather(work: Workspace, op: ops.GatherParameters, sums: _Sums) -> list[Bound]:
    parts = [each.parameters for each in work.plan.slices]
    return [lambda: all_ranks().all_gather(work.parameters, parts)]


_BIND: dict[type[ops.Operation], Callable[[Workspace, Any, _Sums], list[Bound]]] = {
    ops.ExchangePartials: _bind_exchange,
    ops.GatherPartials: _bind_exchange,
    ops.Reduce: _bind_reduce,
    ops.Norm: _bind_norm,
    ops.Update: _bind_update,
    ops.GatherParameters: _bind_gather,
}
