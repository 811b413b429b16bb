"""Into which pieces ranks cut the gradient that they exchange, and in which order a rank makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest

from ....plan import Dense, Plan, Segment
from ..select.ranks import exchanged_apart, fills_the_wait, made_in_the_wait, moved_where_made
from . import groups
from .groups import ExchangedPiece, Group

Makers = Mapping[str, Sequence[Group]]  # groups that make gradients, by the parameter


def cut(plan: Plan, made: Sequence[Group]) -> tuple[list[Group], tuple[ExchangedPiece, ...]]:
    """The groups before the gradients, all deltas among them, and pieces of the gradient, from the first layer up.

    So the exchange of a piece runs beside the products of those after it.  A piece ends where a weight begins.  Weights
    that their owners move where they make the gradient are pieces by themselves, behind all others; or before them, if
    they leave partial sums of biases' gradients, which are in one piece with all that is left then.

    Where an owner makes its gradient while it waits for the other one, small weights behind the first layer come last:
    they are made and exchanged beside the exchange of what has moved.
    """
    of_partial = {partial.name: partial.parameter for partial in plan.partials}
    later: dict[str, list[Group]] = {}  # by the weight whose gradient they make
    sums: dict[str, list[Group]] = {}  # by the bias whose gradient they make, and nothing that a delta waits for
    before, sums_of_biases = list[Group](), list[Group]()
    for group in made:
        if isinstance(group, (groups.DenseGradient, groups.GemmGradient)):
            assert group.op.dweight is not None
            later.setdefault(of_partial[group.op.dweight], []).append(group)
        elif isinstance(group, groups.SumDelta):
            assert group.op.dbias is not None
            sums.setdefault(of_partial[group.op.dbias], []).append(group)
        elif isinstance(group, groups.SumBiases):
            sums_of_biases.append(group)
        else:
            before.append(group)
    moved = list(_moved_by_owners(plan, later))
    apart = {piece.elements[0].start for piece in moved}
    others = [segment for segment in plan.gradient if segment.offset not in apart]
    makers = {segment.name: [*later.get(segment.name, ()), *sums.get(segment.name, ())] for segment in others}
    in_one = plan.moves_all or bool(sums_of_biases)
    if sums_of_biases or not any(piece.fills_the_wait for piece in moved):
        pieces = _pieces(others, makers, later, sums_of_biases, in_one=in_one)
        return before, (*moved, *pieces) if sums_of_biases else (*pieces, *moved)
    small = {segment.name for segment in others if segment.name in later}
    late = _late(plan, small, sums) if fills_the_wait(sum(segment.size for segment in others)) else set()
    early = [segment for segment in others if segment.name not in late]
    last = [segment for segment in others if segment.name in late]
    late_pieces = _pieces(last, makers, later, (), in_one=True, is_late=True) if last else []
    return before, (*_pieces(early, makers, later, (), in_one=in_one), *moved, *late_pieces)


def _moved_by_owners(plan: Plan, later: Makers) -> Iterator[ExchangedPiece]:
    """The weights that their owners move where they make the gradient."""
    found: list[tuple[Segment, Group, int, str]] = []
    for segment in plan.gradient:
        of_weight = later.get(segment.name, ())
        owner, why = moved_where_made(plan, segment)
        if owner is not None and len(of_weight) == 1 and isinstance(of_weight[0], groups.GemmGradient):
            found.append((segment, of_weight[0], owner, why))
    of_owner = max(Counter(owner for *_, owner, _ in found).values(), default=0)
    for segment, group, owner, why in found:
        waits = made_in_the_wait(segment.size, of_owner)
        elements = (slice(segment.offset, segment.end),)
        yield ExchangedPiece((group,), elements, f"{why}; {waits.why}", owner, waits.holds)


def _late(plan: Plan, small: Collection[str], sums: Makers) -> set[str]:
    """Small weights that no launch at the begin of a step reads, and biases whose gradients are made with theirs."""
    layers = [operation for operation in plan.training if isinstance(operation, Dense)]
    behind = [layer for layer in layers[1:] if layer.weight in small]
    with_weight = {layer.bias for layer in behind if layer.bias is not None and layer.bias not in sums}
    return {layer.weight for layer in behind} | with_weight


def _pieces(
    segments: Sequence[Segment],
    makers: Makers,
    later: Makers,
    at_end: Sequence[Group],
    *,
    in_one: bool,
    is_late: bool = False,
) -> list[ExchangedPiece]:
    """These segments of the gradient in pieces, the last of them with the groups ``at_end``."""
    pieces: list[ExchangedPiece] = []
    taken, parts = list[Group](), list[slice]()
    left = sum(segment.size for segment in segments)
    for segment, following in zip_longest(segments, segments[1:]):
        taken += makers[segment.name]
        left -= segment.size
        if parts and parts[-1].stop == segment.offset:
            parts[-1] = slice(parts[-1].start, segment.end)
        else:
            parts.append(slice(segment.offset, segment.end))
        ends = exchanged_apart(sum(each.stop - each.start for each in parts), left, in_one=in_one)
        if following is None or (following.name in later and ends):
            pieces.append(ExchangedPiece((*taken, *at_end), tuple(parts), ends.why, is_late=is_late))
            taken, parts = [], []
    return pieces or [ExchangedPiece((), (), "sums of the loss and of the batch's weight alone")]
