"""What ranks exchange in a step, and the sums and updates between: a rank adds before it sends, and moves its slice.

The gradient of a batch is a tree of sums over its shards (:mod:`mlpgpu.plan.sharding`).  A rank adds up the nodes that
its shards make, sends each other rank that one's slice of them, adds all ranks' nodes of its own slice along the tree,
moves those parameters, and sends them to all.  So a sum's order follows from the number of shards alone.  Where a plan
makes one exchange of all sums, each rank's slice is all of the gradient, and no parameters are sent.

Arrays of a rank: ``nodes`` (all nodes of all ranks, elements of the slice); ``slots`` (K, parameters of the slice);
``partials`` (own shards, Q); and of parameters that are used twice ``own nodes`` (own nodes, G), since partials have
another layout than the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .....plan import (
    ExchangePartials,
    GatherParameters,
    Loss,
    Norm,
    Operation,
    Plan,
    Reduce,
    Slice,
    Update,
    additions,
    block_size,
    shards_of,
)
from ... import kernels
from ...kernels import ceil_div
from ...kernels.launches import OPERANDS, PARAMETERS, PARTIALS, SQUARES, At, Collective, Launch, Transfer, Value
from ...select.ranks import shards_sent_by_kernel
from ..groups import GemmGradient
from .finish import factor, loss_and_weight, over, squares
from .gemm import moved_weight, received_update
from .operands import weight_components
from .shard import Shard, partials_pitch

HALF, FLOAT, DOUBLE = 2, 4, 8  # bytes
NODES, OWN_NODES = "nodes", "own nodes"


Steps = Iterator[Launch | Collective]


@dataclass(frozen=True)
class Exchanged:
    """What follows a piece of the gradient.

    Attributes:
        added: the sums that this rank sends, or keeps where others' sums are added to them.
        sums: by which ranks send them.
        moves: what moves this rank's slice then; with the batch's loss and weight behind the first piece, and with
            the exchange of squares where a norm is clipped.
        parameters: by which all ranks get what has moved.
    """

    added: list[Launch]
    sums: list[Collective]
    moves: list[Launch | Collective]
    parameters: list[Collective]


@dataclass(frozen=True)
class Exchange:
    """A rank's part of the exchanges of a step.

    Arguments:
        shard: of the plan, for what its launches are given.
        rank: whose part it is.
    """

    shard: Shard
    rank: int

    @property
    def plan(self) -> Plan:
        return self.shard.plan

    @property
    def moved(self) -> Slice:
        """What the rank moves."""
        return self.plan.slices[self.rank]

    @property
    def own(self) -> range:
        """The shards that the rank computes."""
        return shards_of(self.rank, self.plan.ranks, self.plan.shards)

    @cached_property
    def nodes(self) -> list[tuple[int, range]]:
        """The nodes of all ranks, in the tree's order, with the rank that adds each up."""
        plan = self.plan
        return [(rank, node) for rank in range(plan.ranks) for node in plan.nodes(rank)]

    @property
    def is_tied(self) -> bool:
        """Whether a parameter is used more than once, so that partials are not laid out like the gradient."""
        return len(self.plan.partials) > len(self.plan.gradient)

    @property
    def _width(self) -> int:
        """Elements of the slice of the gradient."""
        return self.moved.gradient.stop - self.moved.gradient.start

    def sizes(self) -> dict[str, int]:
        """Bytes of the arrays that follow from the rank."""
        plan, parameters = self.plan, self.moved.parameters
        slots = len(plan.optimizer.slots) if plan.optimizer else 0
        own_nodes = sum(rank == self.rank for rank, _ in self.nodes)
        return {
            **({} if self._adds_in_place else {NODES: FLOAT * len(self.nodes) * self._width}),
            **({OWN_NODES: FLOAT * own_nodes * plan.gradient_count} if self.is_tied else {}),
            "partials": FLOAT * (len(self.nodes) if self._adds_in_place else len(self.own)) * partials_pitch(plan),
            "slots": FLOAT * slots * kernels.slot_pitch(parameters.stop - parameters.start),
        }

    @property
    def is_in_line(self) -> bool:
        """Whether the stream of the rank's one shard has all launches; not where a norm comes between exchanges."""
        return self.plan.shards == self.plan.ranks and not self._is_clipped

    @cached_property
    def _adds_in_place(self) -> bool:
        """Whether what the other of two ranks sends lies behind this one's gradient, like that of a second shard."""
        return self.is_in_line and self.plan.ranks == 2 and not self.is_tied

    @cached_property
    def _by_kernel(self) -> bool:
        """Whether kernels send."""
        return shards_sent_by_kernel(self.plan).holds

    @property
    def _is_clipped(self) -> bool:
        return any(isinstance(each.operation, Norm) for each in self.shard.selection.operations)

    def of_pieces(self, pieces: Sequence[Sequence[slice]], *, are_first: bool = True) -> list[Exchanged]:
        """What follows each of these pieces of the gradient, which follow one another.

        With the first comes the loss, if they ``are_first`` of all that is exchanged in a step.
        """
        made: list[Exchanged] = []
        for piece in pieces:
            added, is_first = [launch for part in piece for launch in self._add_own(part)], are_first and not made
            sums, moves = self.sums(piece, piece, first=is_first), list[Launch | Collective]()
            if is_first:
                moves.append(self.loss())
            if self._is_clipped:
                moves += [launch for part in piece for launch in self._added(part)]
                made.append(Exchanged(added, sums, moves, []))
                continue
            moves += [launch for part in piece for launch in self._updates(part)]
            made.append(Exchanged(added, sums, moves, self.parameters(piece, piece)))
        if self._is_clipped:
            whole = slice(0, self.plan.gradient_count)
            last = made[-1]
            moves = [*last.moves, *self._norm(), *self._updates(whole)]
            made[-1] = replace(last, moves=moves, parameters=self.parameters([whole], [whole]))
        return made

    def loss(self) -> Launch:
        """The loss and the weight of the batch, from all shards' sums, which the first exchange of a step brings."""
        return loss_and_weight(self.shard, self._title(Loss))

    # --- the gradient ---

    def sums(self, given: Sequence[slice], taken: Sequence[slice], *, first: bool = False) -> list[Collective]:
        """The exchange by which ranks have all ranks' nodes of their slices.

        With the ``first`` come all shards' sums of the loss and the weight, which are then added as one rank adds them.

        Arguments:
            given: parts of the gradient that are sent to others, as far as they are in their slices.
            taken: parts that are received, as far as they are in this rank's slice.
        """
        sent, received = self._losses() if first else ([], [])
        for part in given:
            sent += self._sent_sums(part)
        for part in taken:
            received += self._received_sums(part)
        if not (sent or received):
            return []
        return [Collective(PARTIALS, tuple(sent), tuple(received), self._title(ExchangePartials), self._by_kernel)]

    def _received_sums(self, elements: slice) -> list[Transfer]:
        here = _common(elements, self.moved.gradient)
        if here is None:
            return []
        return [
            Transfer(owner, self._node(place, here.start), here.stop - here.start, FLOAT)
            for place, (owner, _) in enumerate(self.nodes)
            if owner != self.rank
        ]

    def _sent_sums(self, elements: slice) -> list[Transfer]:
        sent = []
        for place, (owner, node) in enumerate(self.nodes):
            if owner != self.rank:
                continue
            for peer, other in enumerate(self.plan.slices):
                theirs = _common(elements, other.gradient)
                if peer != self.rank and theirs is not None:
                    start, count = theirs.start, theirs.stop - theirs.start
                    at = self._node(place, start) if self.plan.moves_all else self._kept(node, start)
                    sent.append(Transfer(peer, at, count, FLOAT))
        return sent

    def _losses(self) -> tuple[list[Transfer], list[Transfer]]:
        """This rank's shards' sums of the loss and the weight, to all others; and theirs."""
        of_shard = self.shard.lowered.bytes["sums"] // self.plan.shards // DOUBLE
        computed = [shards_of(rank, self.plan.ranks, self.plan.shards) for rank in range(self.plan.ranks)]
        return self._to_all(
            [[("sums", slice(of_shard * each.start, of_shard * each.stop))] for each in computed], DOUBLE
        )

    def _add_own(self, elements: slice) -> Iterator[Launch]:
        """The nodes of the rank's own shards: on other ranks' slices in place, on its own where all nodes are."""
        pitch, here = partials_pitch(self.plan), _common(elements, self.moved.gradient)
        below = _common(elements, slice(0, self.moved.gradient.start))
        above = _common(elements, slice(self.moved.gradient.stop, self.plan.gradient_count))
        for place, (owner, node) in enumerate(self.nodes):
            if owner != self.rank:
                continue
            if self.is_tied:
                yield from self._add_uses(elements, node)
                if here is not None:
                    yield self._add(self._kept(node, here.start), 0, 1, here, self._node(place, here.start))
                continue
            for part in (below, above):
                if part is not None and len(node) > 1:
                    kept = self._kept(node, part.start)
                    yield self._add(kept, pitch, len(node), part, kept)
            if here is not None and not self._adds_in_place:
                yield self._add(self._kept(node, here.start), pitch, len(node), here, self._node(place, here.start))

    def _add_uses(self, elements: slice, node: range) -> Iterator[Launch]:
        """A node of a piece whose parameters may be used more than once: a launch for each of them."""
        plan = self.plan
        for segment in plan.gradient:
            if not elements.start <= segment.offset < elements.stop:
                continue
            uses = [partial for partial in plan.partials if partial.parameter == segment.name]
            begin = (node.start - self.own.start) * partials_pitch(plan) + uses[0].offset
            part = slice(segment.offset, segment.end)
            kept = self._kept(node, segment.offset)
            yield self._add(At("partials", begin), partials_pitch(plan), len(node), part, kept, uses=len(uses))

    def _kept(self, node: range, element: int) -> At:
        """Where the sum of a node of this rank lies, on other ranks' slices."""
        if self.is_tied:
            place = [own for owner, own in self.nodes if owner == self.rank].index(node)
            return At(OWN_NODES, place * self.plan.gradient_count + element)
        return At("partials", (node.start - self.own.start) * partials_pitch(self.plan) + element)

    def _node(self, place: int, element: int) -> At:
        """An element of the gradient, of this rank's slice, in a node."""
        if self._adds_in_place:
            return At("partials", (place != self.rank) * partials_pitch(self.plan) + element)
        return At(NODES, place * self._width + element - self.moved.gradient.start)

    def _add(self, partials: At, pitch: int, count: int, part: slice, to: At, *, uses: int = 1) -> Launch:
        size = part.stop - part.start
        values: dict[str, Value] = {
            "partials": partials, "pitch": pitch, "shards": count, "uses": uses, "size": size, "gradient": to,
        }  # fmt: skip
        return Launch(kernels.reduce(), over(self.shard, size), values, self._title(Reduce))

    @property
    def _is_regular(self) -> bool:
        """Whether the nodes are added as so many shards are, which one kernel can do."""
        count = len(self.nodes)
        leaves = additions(range(count), [range(place, place + 1) for place in range(count)])
        return self._additions == leaves

    @cached_property
    def _additions(self) -> list[tuple[int, int]]:
        return additions(range(self.plan.shards), [node for _, node in self.nodes])

    def _added(self, elements: slice) -> Iterator[Launch]:
        """The sum of all nodes of this rank's slice of a piece, in the first of them."""
        part = _common(elements, self.moved.gradient)
        if part is None:
            return
        first = self._node(0, part.start)
        if self._is_regular:
            yield self._add(first, self._width, len(self.nodes), part, first)
            return
        for i, j in self._additions:
            to = self._node(i, part.start)
            yield self._add(to, (j - i) * self._width, 2, part, to)

    # --- the norm, the update ---

    def _norm(self) -> Steps:
        """The factor of a clipped norm: squares of blocks, each rank's of its slice, which all ranks then add up."""
        title, block = self._title(Norm), block_size(self.plan.gradient_count)
        if self._width:
            yield squares(self.plan, At(NODES), self.moved.gradient, title)
        parts = [slice(each.gradient.start // block, ceil_div(each.gradient.stop, block)) for each in self.plan.slices]
        if not self.plan.moves_all:
            yield from self._gather(SQUARES, title, [[("squares", part)] for part in parts], DOUBLE)
        yield factor(self.shard, title)

    def _updates(self, elements: slice) -> Iterator[Launch]:
        """Move the parameters of this rank's slice of a piece.

        The nodes are added up on the way, unless a norm, or a tree of unequal nodes, comes between.
        """
        plan, optimizer, part = self.plan, self.plan.optimizer, _common(elements, self.moved.gradient)
        assert optimizer is not None
        is_clipped = self._is_clipped
        is_added = is_clipped or not self._is_regular
        if is_added and not is_clipped:
            yield from self._added(elements)
        first, pitch, count = (0, 0, 1) if is_added else (0, self._width, len(self.nodes))
        if self._adds_in_place:  # the rank's own comes first: of two the order changes no bit
            first, pitch = self.rank, partials_pitch(plan)
        own = self.moved.parameters
        for each in plan.trained_in(part) if part is not None else ():
            values: dict[str, Value] = {
                "step": At("step"), "totals": At("totals"), "factor": At("factor") if is_clipped else None,
                "partials": self._node(first, each.gradient), "pitch": pitch, "shards": count,
                "parameters": At("parameters", each.offset),
                "slots": At("slots", each.offset - own.start) if optimizer.slots else None, "size": each.size,
                "slot_pitch": kernels.slot_pitch(own.stop - own.start), "alpha": each.alpha,
            }  # fmt: skip
            grid = over(self.shard, each.size)
            yield Launch(kernels.update(self.shard.optimizer), grid, values, self._title(Update))

    def parameters(self, given: Sequence[slice], taken: Sequence[slice]) -> list[Collective]:
        """All ranks get the parameters that have moved, those of parts of the gradient.

        Arguments:
            given: parts of which this rank sends its slice.
            taken: parts of which it receives the others'.
        """
        plan = self.plan
        if plan.moves_all:
            return []
        of_ranks = [given if rank == self.rank else taken for rank in range(plan.ranks)]
        ranges = [
            [each for part in of_rank for each in _ranges(plan, _common(part, other.gradient))]
            for of_rank, other in zip(of_ranks, plan.slices, strict=True)
        ]
        parts = [[("parameters", each) for each in of_rank] for of_rank in ranges]
        return list(self._gather(PARAMETERS, self._title(GatherParameters), parts, FLOAT))

    def operands(self, given: str | None, taken: str | None, beside: Sequence[slice] = ()) -> list[Collective]:
        """The other rank gets the operands of a weight that this one has moved, and the other way.

        With them both get the parameters that have moved of parts of the gradient ``beside``.
        """

        def whole(weight: str | None) -> list[tuple[str, slice]]:
            if weight is None:
                return []
            array = weight_components(self.shard, weight).array
            return [(array, slice(0, self.shard.lowered.bytes[array] // HALF))]

        parts = [whole(given if rank == self.rank else taken) for rank in range(self.plan.ranks)]
        gathered = [
            *self._gather(OPERANDS, self._title(GatherParameters), parts, HALF),
            *self.parameters(beside, beside),
        ]
        sent = tuple(transfer for each in gathered for transfer in each.sent)
        received = tuple(transfer for each in gathered for transfer in each.received)
        return [replace(each, sent=sent, received=received) for each in gathered[:1]]

    def moved_where_made(
        self, shard: Shard, group: GemmGradient, elements: slice, *, is_stored: bool = False
    ) -> Launch:
        """What makes this rank's gradient of a weight of its slice, adds the other rank's, and moves the weight.

        Where the gradient ``is_stored``, another launch has made it.
        """
        places = {owner == self.rank: place for place, (owner, _) in enumerate(self.nodes)}
        own, weight, optimizer = self.moved.parameters, shard.ref(group.op.weight), self.plan.optimizer
        assert isinstance(weight, At) and optimizer is not None
        slots = At("slots", weight.offset - own.start) if optimizer.slots else None
        pitch = kernels.slot_pitch(own.stop - own.start)
        gradient, received = (self._node(places[is_own], elements.start) for is_own in (True, False))
        if is_stored:
            return moved_weight(shard, group, gradient, received, slots, pitch)
        return received_update(shard, group, received, slots, pitch)

    # ---

    def _gather(
        self, kind: str, title: str, parts: Sequence[Sequence[tuple[str, slice]]], item_bytes: int
    ) -> Iterator[Collective]:
        """All ranks get each rank's parts of arrays."""
        sent, received = self._to_all(parts, item_bytes)
        if sent or received:
            yield Collective(kind, tuple(sent), tuple(received), title, self._by_kernel)

    def _to_all(
        self, parts: Sequence[Sequence[tuple[str, slice]]], item_bytes: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        """What this rank sends and receives so that all have each rank's parts of arrays."""
        others = [rank for rank in range(self.plan.ranks) if rank != self.rank]
        sent = [_transfer(peer, part, item_bytes) for peer in others for part in parts[self.rank] if _size(part)]
        return sent, [_transfer(peer, part, item_bytes) for peer in others for part in parts[peer] if _size(part)]

    def _title(self, kind: type[Operation]) -> str:
        return next(each.title for each in self.shard.selection.operations if isinstance(each.operation, kind))


def _transfer(peer: int, part: tuple[str, slice], item_bytes: int) -> Transfer:
    return Transfer(peer, At(part[0], part[1].start), _size(part), item_bytes)


def _size(part: tuple[str, slice]) -> int:
    return part[1].stop - part[1].start


def _common(one: slice, other: slice) -> slice | None:
    """What two slices have in common, or None."""
    first, end = max(one.start, other.start), min(one.stop, other.stop)
    return slice(first, end) if first < end else None


def _ranges(plan: Plan, elements: slice | None) -> list[slice]:
    """The parameters, neighbours together, whose gradient lies there."""
    found: list[slice] = []
    for each in plan.trained_in(elements) if elements is not None else ():
        if found and found[-1].stop == each.offset:
            found[-1] = slice(found[-1].start, each.offset + each.size)
        else:
            found.append(slice(each.offset, each.offset + each.size))
    return found
