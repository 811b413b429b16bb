"""What ranks exchange that have parts of a network each: activations and deltas, by rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...plan import Plan, additions, nodes_of, slices_of
from ...plan.tensor_split import columns_of
from ..parts import all_ranks, parts_of_plan
from .threads import Bound


def join_parts(plan: Plan, own: Sequence[np.ndarray], y: np.ndarray) -> Bound:
    """What puts the columns of all parts into ``y`` (B, n), of which this rank has its ``own``, (B, columns) each."""
    parts, rows = parts_of_plan(plan), len(y)
    columns = columns_of(y.shape[1], parts.count)
    copies = [(y[:, columns[part]], array) for part, array in zip(parts.own, own, strict=True)]
    rounds = []
    for place in range(max(len(parts.of(rank)) for rank in range(parts.ranks)) if parts.ranks > 1 else 0):
        nothing = np.empty(0, y.dtype)
        received = [nothing] * parts.ranks
        for rank in range(parts.ranks):
            theirs = parts.of(rank)
            if rank != parts.rank and place < len(theirs):
                part = columns[theirs[place]]
                received[rank] = np.empty((rows, part.stop - part.start), y.dtype)
                copies.append((y[:, part], received[rank]))
        sent = [own[place] if place < len(own) else nothing] * parts.ranks
        sent[parts.rank] = nothing
        rounds.append((sent, received))

    def join() -> None:
        for sent, received in rounds:
            all_ranks().exchange(sent, received)
        for target, source in copies:
            np.copyto(target, source)

    return join


def sum_parts(plan: Plan, own: Sequence[np.ndarray], z: np.ndarray) -> Bound:
    """What writes the sum of all parts to ``z`` (B, n), of which this rank has its ``own``, (B, n) each, overwritten.

    Each rank adds up the nodes of the tree that its parts make; what is left of the tree every rank adds up, or each a
    slice that it sends to the others.
    """
    parts = parts_of_plan(plan)
    assert plan.tensor is not None
    flat, total = [array.reshape(-1) for array in own], z.reshape(-1)
    pairs = []
    nodes = nodes_of(parts.own, parts.count)
    first = parts.own.start
    for node in nodes:
        for i, j in additions(node, [range(part, part + 1) for part in node]):
            pairs.append((flat[node.start - first + i], flat[node.start - first + j]))
    made = [flat[node.start - first] for node in nodes]
    if parts.ranks == 1:
        return _adding(pairs, made[0], total)
    in_slices = plan.tensor.sums_in_slices(z.shape[1])
    slices = slices_of(total.size, parts.ranks) if in_slices else [slice(0, total.size)] * parts.ranks
    mine = slices[parts.rank]
    every: list[range] = []
    arrays: list[np.ndarray] = []
    received: list[list[np.ndarray]] = []
    for rank in range(parts.ranks):
        theirs = nodes_of(parts.of(rank), parts.count)
        if rank == parts.rank:
            received.append([])
            arrays += [array[mine] for array in made]
        else:
            received.append([np.empty(mine.stop - mine.start, z.dtype) for _ in theirs])
            arrays += received[-1]
        every += theirs
    rounds, nothing = [], np.empty(0, z.dtype)
    for place in range(max(len(nodes_of(parts.of(rank), parts.count)) for rank in range(parts.ranks))):
        sent = [made[place][part] if place < len(made) else nothing for part in slices]
        sent[parts.rank] = nothing
        rounds.append((sent, [got[place] if place < len(got) else nothing for got in received]))
    before = _adding(pairs)
    after = _adding([(arrays[i], arrays[j]) for i, j in additions(range(parts.count), every)], arrays[0], total[mine])

    def add() -> None:
        before()
        for to_others, from_others in rounds:
            all_ranks().exchange(to_others, from_others)
        after()
        if in_slices:
            all_ranks().all_gather(total, slices)

    return add


def _adding(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], result: np.ndarray | None = None, to: np.ndarray | None = None
) -> Bound:
    """What adds arrays to others, in this order, and copies the result."""

    def add() -> None:
        for total, other in pairs:
            np.add(total, other, out=total)
        if result is not None and to is not None:
            np.copyto(to, result)

    return add
