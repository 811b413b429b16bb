"""The pieces of the gradient that ranks exchange: in which order a rank makes and moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from .....plan import Norm
from ...kernels.launches import At, Launch, Lowered, Piece
from ...select.ranks import fills_the_wait
from ..groups import ExchangedPiece, Fused, GemmGradient
from .emit import emit
from .exchange import Exchange
from .gemm import split_weights
from .shard import Shard


def launches_of_piece(shard: Shard, piece: ExchangedPiece, exchange: Exchange) -> list[Launch]:
    """What makes a piece of a shard's gradient, and moves it where this rank is its owner."""
    if piece.owner != exchange.rank:
        return emit(shard, piece.groups)
    (group,), (elements,) = piece.groups, piece.elements
    assert isinstance(group, GemmGradient)
    if piece.fills_the_wait:
        return [*emit(shard, piece.groups), exchange.moved_where_made(shard, group, elements, is_stored=True)]
    return [exchange.moved_where_made(shard, group, elements)]


def put_pieces(
    lowered: Lowered, training: Fused, exchange: Exchange, of_shards: list[list[list[Launch]]]
) -> dict[str, int]:
    """The pieces of a rank whose shards' launches are there; returns the bytes of arrays that follow from the rank."""
    if not of_shards:  # a rank without shards has the sums of the others' all the same
        some = Lowered()
        emit(Shard(training.selection, some), training.groups)
        lowered.bytes["sums"] = some.bytes["sums"]
    others = [piece for piece in training.pieces if piece.owner is None]
    if exchange.is_in_line:
        _put_in_line(lowered, training, exchange, others, of_shards[0])
        return exchange.sizes()
    exchanged = exchange.of_pieces([piece.elements for piece in others])
    splits = bool(of_shards) and training.pieces_split_weights
    split = _moved_weights(training, others) if splits else [{} for _ in others]
    for number, (each, weights) in enumerate(zip(exchanged, split, strict=True)):
        following = [*each.added, *each.sums, *each.moves, *each.parameters, *split_weights(exchange.shard, weights)]
        lowered.pieces.append(Piece([shard[number] for shard in of_shards], following))
    return exchange.sizes()


def _put_in_line(
    lowered: Lowered,
    training: Fused,
    exchange: Exchange,
    others: Sequence[ExchangedPiece],
    of_shard: Sequence[list[Launch]],
) -> None:
    """The pieces of a rank with one shard, whose stream has most launches: beside products they would wait for blocks.

    A weight that this rank moves where it makes its gradient comes behind all gradients that it sends, which are in
    flight meanwhile.  Where the other parameters are few, the rank makes their gradients while it waits for those of
    its weights, and moves them as soon as it has the other rank's, beside its first weight, with which they are sent: a
    message of their own would come before the weight, for which the other rank waits.  Small weights that are late are
    made, moved and sent in a piece of their own behind all that; their operands follow them.  Where products leave
    partial sums of biases' gradients, the other parameters come last, since every product must have ended then.

    What a weight's update divides by is the weight of the whole batch.  Behind the gradient's exchange its sum would be
    waited for, so where weights are moved like that all losses are exchanged first, beside the products of the deltas.
    """
    weights = _MovedWeights(training, exchange, of_shard)
    come_last = training.pieces[0].owner is not None
    size = sum(part.stop - part.start for piece in others for part in piece.elements)
    fill = weights.count > 0 and not come_last and fills_the_wait(size).holds
    goes_ahead = weights.count > 0 and _behind_loss(lowered.shards[0]) < len(lowered.shards[0])
    if goes_ahead:
        lowered.pieces.append(Piece([[]], [*exchange.sums((), (), first=True), exchange.loss()]))
    begin, is_first = len(lowered.pieces), not goes_ahead
    exchanged = exchange.of_pieces([piece.elements for piece in others], are_first=is_first and not (fill or come_last))
    made = [launches for launches, piece in zip(of_shard, training.pieces, strict=True) if piece.owner is None]
    of_others = [Piece([[*part, *each.added]], [*each.sums]) for part, each in zip(made, exchanged, strict=True)]

    def moved_behind(pieces: int) -> list[Piece]:
        """What moves them, where so many pieces come before theirs."""
        moved = list[Piece]()
        for number, each in enumerate(exchanged, pieces):
            launches = [replace(move, receives=(number,)) for move in each.moves if isinstance(move, Launch)]
            moved.append(Piece([launches], [*each.parameters]))
        return moved

    splits = training.pieces_split_weights
    if fill:
        beside = [part for piece in others for part in piece.elements if not piece.is_late]
        early, behind = list[Piece](), list[Piece]()
        for known, piece, each in zip(others, of_others, exchanged, strict=True):
            piece.exchange.extend(each.moves)
            if known.is_late:
                (moved,) = _moved_weights(training, [known])
                piece.exchange.extend([*each.parameters, *(split_weights(exchange.shard, moved) if splits else ())])
            (behind if known.is_late else early).append(piece)
        lowered.pieces += [*weights.sums(first=is_first), *early, *weights.moved(begin, beside=beside), *behind]
    elif come_last:
        lowered.pieces += [*weights.sums(first=is_first), *weights.moved(begin)]
        lowered.pieces += [*of_others, *moved_behind(begin + 2 * weights.count)]
    else:
        lowered.pieces += [*of_others, *weights.sums(), *moved_behind(begin), *weights.moved(begin + len(others))]
    lowered.pieces += weights.at_end()
    if splits:
        has_operands = {exchange.rank, *(range(training.selection.plan.ranks) if weights.sends_operands else ())}
        left = [piece for piece in training.pieces if piece.owner not in has_operands and not piece.is_late]
        for moved in _moved_weights(training, left):
            for name, title in moved.items():
                _split_before_reader(lowered.shards[0], exchange.shard, name, title)
    if goes_ahead:
        _put_beside(lowered, begin)


def _put_beside(lowered: Lowered, number: int) -> None:
    """Have the launches behind the loss made beside its exchange, with the gradient of the piece of this number."""
    (launches,), piece = lowered.shards, lowered.pieces[number]
    place = _behind_loss(launches)
    lowered.shards[0] = launches[:place]
    lowered.pieces[number] = replace(piece, shards=[[*launches[place:], *piece.shards[0]]])


def _behind_loss(launches: Sequence[Launch]) -> int:
    """The place behind the last launch that leaves sums of the loss."""
    arrays = [{getattr(value, "array", "") for value in launch.values.values()} for launch in launches]
    return max(place for place, read in enumerate(arrays, 1) if "sums" in read)


class _MovedWeights:
    """Of two ranks, the weights that each moves where it makes their gradients last.

    Operands of weights are made anew in the next step, each before what reads them.  Where they have half the weight's
    bytes, the rank that moves the weight sends them, and the weight behind the last step of a graph.

    Arguments:
        of_shard: launches of the rank's shard, of each piece.
    """

    def __init__(self, training: Fused, exchange: Exchange, of_shard: Sequence[list[Launch]]) -> None:
        known = [each for each in zip(training.pieces, of_shard, strict=True) if each[0].owner is not None]
        self._own = [each for each in known if each[0].owner == exchange.rank]
        self._theirs = [each for each in known if each[0].owner != exchange.rank]
        self._exchange, operand_format = exchange, training.selection.work.operand_format
        self.sends_operands = (
            operand_format is not None and operand_format.is_single and training.pieces_split_weights and bool(known)
        )

    @property
    def count(self) -> int:
        """How many pieces they are, of both ranks together: in each one both may have a weight."""
        return max(len(self._own), len(self._theirs))

    def sums(self, *, first: bool = False) -> list[Piece]:
        """The other rank's gradients, and the exchange of them; behind the ``first`` of a step comes the loss."""
        pieces = list[Piece]()
        for theirs, own in zip_longest(self._theirs, self._own):
            elements = [each[0].elements if each else () for each in (theirs, own)]
            is_first = first and not pieces
            sums = self._exchange.sums(*elements, first=is_first)
            loss = [self._exchange.loss()] * is_first
            pieces.append(Piece([theirs[1] if theirs else []], [*sums, *loss]))
        return pieces

    def moved(self, begin: int, *, beside: Sequence[slice] = ()) -> list[Piece]:
        """Their own gradients, with which they move them; ``begin`` pieces come before those of :meth:`sums`.

        With the first weight other parameters are sent, of parts ``beside`` of the gradient.
        """
        pieces = list[Piece]()
        for place, (own, theirs) in enumerate(zip_longest(self._own, self._theirs), begin):
            # The last launch moves the weight; one before it makes the gradient while the other one comes.
            launches = [*own[1][:-1], replace(own[1][-1], receives=(place,))] if own else []
            if self.sends_operands:
                given, taken = (each[0].weight if each else None for each in (own, theirs))
                gathered = self._exchange.operands(given, taken, beside)
            else:
                elements = [[*(each[0].elements if each else ()), *beside] for each in (own, theirs)]
                gathered = self._exchange.parameters(*elements)
            beside = ()
            pieces.append(Piece([launches], [*gathered]))
        return pieces

    def at_end(self) -> list[Piece]:
        """The weights themselves, behind the last step of a graph, where only their operands are sent before."""
        if not self.sends_operands:
            return []
        own, theirs = ([part for each in known for part in each[0].elements] for known in (self._own, self._theirs))
        return [Piece([[]], [*self._exchange.parameters(own, theirs)], at_end=True)]


def _split_before_reader(launches: list[Launch], shard: Shard, weight: str, title: str) -> None:
    """Put the launch that makes a weight's operands before the first one that reads them."""
    (split,) = split_weights(shard, {weight: title})
    components = split.values["components"]
    assert isinstance(components, At)
    arrays = ({getattr(value, "array", "") for value in launch.values.values()} for launch in launches)
    launches.insert(next(place for place, read in enumerate(arrays) if components.array in read), split)


def _moved_weights(training: Fused, pieces: Sequence[ExchangedPiece]) -> list[dict[str, str]]:
    """The weights whose operands are made anew behind each piece, with titles; behind the last, if it moves all."""
    plan, weights = training.selection.plan, training.weights
    begins = {segment.name: segment.offset for segment in plan.gradient if segment.name in weights}
    is_clipped = any(isinstance(operation, Norm) for operation in plan.training)
    parts = [piece.elements for piece in pieces]
    if is_clipped:
        parts = [*(() for _ in parts[1:]), (slice(0, plan.gradient_count),)]
    return [
        {
            name: weights[name]
            for name, begin in begins.items()
            if any(part.start <= begin < part.stop for part in of_piece)
        }
        for of_piece in parts
    ]
