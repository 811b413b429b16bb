"""The pieces of the gradient that ranks exchange: in which order a rank makes and moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from .....plan import Norm
from ...kernels.launches import Collective, Launch, Lowered, Piece
from ..groups import ExchangedPiece, Fused, GemmGradient
from .emit import emit
from .exchange import Exchange
from .gemm import split_weights
from .shard import Shard


def launches_of_piece(shard: Shard, piece: ExchangedPiece, exchange: Exchange) -> list[Launch]:
    """What makes a piece of a shard's gradient, and moves it where this rank is its mover."""
    if piece.mover != exchange.rank:
        return emit(shard, piece.groups)
    (group,), (elements,) = piece.groups, piece.elements
    assert isinstance(group, GemmGradient)
    return [exchange.moved_where_made(shard, group, elements)]


def put_pieces(
    lowered: Lowered, training: Fused, exchange: Exchange, of_shards: list[list[list[Launch]]]
) -> dict[str, int]:
    """The pieces of a rank whose shards' launches are there; returns the bytes of arrays that follow from the rank.

    Gradients of weights that another rank moves where it makes them come before those that this rank moves so: their
    sums are on their way meanwhile.
    """
    if not of_shards:  # a rank without shards has the sums of the others' all the same
        some = Lowered()
        emit(Shard(training.selection, some), training.groups)
        lowered.bytes["sums"] = some.bytes["sums"]
    splits = bool(of_shards) and training.pieces_split_weights
    others = [piece for piece in training.pieces if piece.mover is None]
    following = exchange.of_pieces([piece.elements for piece in others])
    if splits:
        for weights, exchanged in zip(_moved_weights(training, others), following, strict=True):
            exchanged += split_weights(exchange.shard, weights)
    for number, exchanged in enumerate(following):
        lowered.pieces.append(Piece([shard[number] for shard in of_shards], exchanged))

    numbered = list(enumerate(training.pieces))[len(others) :]
    own = [each for each in numbered if each[1].mover == exchange.rank]
    theirs = [each for each in numbered if each[1].mover != exchange.rank]
    first = len(lowered.pieces)
    for given, taken in zip_longest(theirs, own):
        launches = [shard[given[0]] if given else [] for shard in of_shards]
        sums = exchange.sums(given[1].elements if given else (), taken[1].elements if taken else ())
        lowered.pieces.append(Piece(launches, list(sums)))
    for place, (given, taken) in enumerate(zip_longest(own, theirs)):
        updates = [
            [replace(launch, receives=(first + place,)) for launch in shard[given[0]]] if given else []
            for shard in of_shards
        ]
        gathered: list[Launch | Collective] = [
            *exchange.parameters(given[1].elements if given else (), taken[1].elements if taken else ())
        ]
        if splits and taken:
            gathered += split_weights(exchange.shard, *_moved_weights(training, [taken[1]]))
        lowered.pieces.append(Piece(updates, gathered))
    return exchange.sizes()


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
