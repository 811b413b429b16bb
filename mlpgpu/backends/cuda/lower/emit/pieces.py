"""The pieces of the gradient that ranks exchange: in which order a rank makes and moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from .....plan import Norm
from ...kernels.launches import At, Launch, Lowered, Piece
from ..groups import ExchangedPiece, Fused, GemmGradient
from .emit import emit
from .exchange import Exchange, Exchanged
from .gemm import split_weights
from .shard import Shard


def launches_of_piece(shard: Shard, piece: ExchangedPiece, exchange: Exchange) -> list[Launch]:
    """What makes a piece of a shard's gradient, and moves it where this rank is its owner."""
    if piece.owner != exchange.rank:
        return emit(shard, piece.groups)
    (group,), (elements,) = piece.groups, piece.elements
    assert isinstance(group, GemmGradient)
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
    exchanged = exchange.of_pieces([piece.elements for piece in others])
    if exchange.is_in_line:
        _put_in_line(lowered, training, exchange, exchanged, of_shards[0])
        return exchange.sizes()
    splits = bool(of_shards) and training.pieces_split_weights
    split = _moved_weights(training, others) if splits else [{} for _ in others]
    for number, (each, weights) in enumerate(zip(exchanged, split, strict=True)):
        following = [*each.added, *each.sums, *each.moves, *each.parameters, *split_weights(exchange.shard, weights)]
        lowered.pieces.append(Piece([shard[number] for shard in of_shards], following))
    return exchange.sizes()


def _put_in_line(
    lowered: Lowered, training: Fused, exchange: Exchange, exchanged: Sequence[Exchanged], of_shard: list[list[Launch]]
) -> None:
    """The pieces of a rank with one shard, whose stream has all launches: beside products they would wait for blocks.

    All gradients come first, of weights that this rank moves where it makes them last; sums are in flight meanwhile.
    Operands of weights are made anew in the next step, each before what reads them.  Where they have half the weight's
    bytes, the rank that moves the weight sends them, and the weight behind the last step of a graph.
    """
    count = len(exchanged)
    numbered = list(enumerate(training.pieces))[count:]
    own = [each for each in numbered if each[1].owner == exchange.rank]
    theirs = [each for each in numbered if each[1].owner != exchange.rank]
    for number, each in enumerate(exchanged):
        lowered.pieces.append(Piece([[*of_shard[number], *each.added]], [*each.sums]))
    for given, received in zip_longest(theirs, own):
        sums = exchange.sums(given[1].elements if given else (), received[1].elements if received else ())
        lowered.pieces.append(Piece([of_shard[given[0]] if given else []], [*sums]))
    for number, each in enumerate(exchanged):
        moves = [replace(move, receives=(number,)) for move in each.moves if isinstance(move, Launch)]
        lowered.pieces.append(Piece([moves], [*each.parameters]))
    operand_format = training.selection.work.operand_format
    sends_operands = operand_format is not None and operand_format.is_single and training.pieces_split_weights
    for place, (given, received) in enumerate(zip_longest(own, theirs), count):
        updates = [replace(launch, receives=(place,)) for launch in of_shard[given[0]]] if given else []
        if sends_operands:
            gathered = exchange.operands(*(each[1].weight if each else None for each in (given, received)))
        else:
            gathered = exchange.parameters(given[1].elements if given else (), received[1].elements if received else ())
        lowered.pieces.append(Piece([updates], [*gathered]))
    if sends_operands and numbered:
        of_own, of_theirs = ([part for _, piece in pieces for part in piece.elements] for pieces in (own, theirs))
        lowered.pieces.append(Piece([[]], [*exchange.parameters(of_own, of_theirs)], at_end=True))
    if training.pieces_split_weights:
        has_operands = {exchange.rank, *(range(training.selection.plan.ranks) if sends_operands else ())}
        others = [piece for piece in training.pieces if piece.owner not in has_operands]
        for weights in _moved_weights(training, others):
            for name, title in weights.items():
                _split_before_reader(lowered.shards[0], exchange.shard, name, title)


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
