"""The pieces of the gradient that ranks exchange: in which order a rank makes and moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from .....plan import Norm
from ...kernels.launches import At, Launch, Lowered, Piece
from ...select.ranks import weights_are_sent_first
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
    """The pieces of a rank with one shard, whose stream has all launches: beside products they would wait for blocks.

    All gradients come first, of weights that this rank moves where it makes them last; sums are in flight meanwhile.
    Where the other parameters are few, what makes their gradients fills the time until the other rank's weights' come,
    and they are moved behind the first weight, with which they are sent.
    Operands of weights are made anew in the next step, each before what reads them.  Where they have half the weight's
    bytes, the rank that moves the weight sends them, and the weight behind the last step of a graph.
    """
    numbered = list(enumerate(training.pieces))[len(others) :]
    own = [each for each in numbered if each[1].owner == exchange.rank]
    theirs = [each for each in numbered if each[1].owner != exchange.rank]
    parts = [part for piece in others for part in piece.elements]
    weights_first = bool(numbered) and weights_are_sent_first(sum(part.stop - part.start for part in parts)).holds
    exchanged = exchange.of_pieces([piece.elements for piece in others], are_first=not weights_first)
    of_others = [Piece([[*made, *each.added]], [*each.sums]) for made, each in zip(of_shard, exchanged, strict=False)]
    of_weights = list[Piece]()
    for given, received in zip_longest(theirs, own):
        elements = [each[1].elements if each else () for each in (given, received)]
        sums = exchange.sums(*elements, first=weights_first and not of_weights)
        of_weights.append(Piece([of_shard[given[0]] if given else []], [*sums]))
    first_other, first_weight = (len(of_weights), 0) if weights_first else (0, len(of_others))
    moves = [
        [replace(move, receives=(number,)) for move in each.moves if isinstance(move, Launch)]
        for number, each in enumerate(exchanged, first_other)
    ]
    if weights_first:
        lowered.pieces += [*of_weights, *of_others]
    else:
        moved = [Piece([launches], [*each.parameters]) for launches, each in zip(moves, exchanged, strict=True)]
        lowered.pieces += [*of_others, *of_weights, *moved]
    operand_format = training.selection.work.operand_format
    sends_operands = operand_format is not None and operand_format.is_single and training.pieces_split_weights
    for place, (given, received) in enumerate(zip_longest(own, theirs), first_weight):
        launches = [replace(launch, receives=(place,)) for launch in of_shard[given[0]]] if given else []
        beside = list[slice]()
        if weights_first and place == first_weight:
            launches = [replace(exchange.loss(), receives=(place,)), *launches, *chain.from_iterable(moves)]
            beside = parts
        if sends_operands:
            names = [each[1].weight if each else None for each in (given, received)]
            gathered = exchange.operands(names[0], names[1], beside)
        else:
            elements = [[*(each[1].elements if each else ()), *beside] for each in (given, received)]
            gathered = exchange.parameters(*elements)
        lowered.pieces.append(Piece([launches], [*gathered]))
    if sends_operands and numbered:
        of_own, of_theirs = ([part for _, piece in pieces for part in piece.elements] for pieces in (own, theirs))
        lowered.pieces.append(Piece([[]], [*exchange.parameters(of_own, of_theirs)], at_end=True))
    if training.pieces_split_weights:
        has_operands = {exchange.rank, *(range(training.selection.plan.ranks) if sends_operands else ())}
        left = [piece for piece in training.pieces if piece.owner not in has_operands]
        for weights in _moved_weights(training, left):
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
