"""What the ranks of a plan send each other from card to card, and who they are."""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from ...errors import BackendError, MissingPackageError, RankError
from ...ranks import Communicator, communicator, share_memory
from .kernels import send_messages
from .kernels.launches import Collective, PartSums, Transfer
from .runtime import (
    Device,
    Event,
    ExchangedSums,
    Function,
    JoinedCards,
    LinkedCards,
    LoadedKernels,
    Message,
    Place,
    Stream,
    Words,
    check_nccl,
    new_identity,
)

CARDS_MAY_BE_LINKED = True  # benchmarks compare both ways

Told = TypeVar("Told")


class Joined(Protocol):
    """What an exchange asks of the cards: :class:`LinkedCards`, :class:`JoinedCards`, in tests what stands in."""

    @property
    def lanes(self) -> int: ...

    def reach(self, sent: Sequence[Message], received: Sequence[Message]) -> list[Message]: ...

    def put(self, sent: Sequence[Message], received: Sequence[Message], stream: Stream, lane: int = 0) -> None: ...

    def wait(self, stream: Stream, reached: Event | None = None) -> None: ...

    def abort(self, stream: Stream) -> bool: ...


@runtime_checkable
class MapsMemory(Protocol):
    """What is asked of cards whose kernels can read each other's memory, such as :class:`LinkedCards`."""

    def map(self, addresses: Sequence[int]) -> dict[int, list[Place]]: ...


@runtime_checkable
class SendsByKernel(Protocol):
    """What is asked of cards whose kernels can write each other's memory, as well."""

    def bind(self, sent: Sequence[Message], received: Sequence[Message]) -> Callable[[Stream, int], None]: ...

    def exchange_sums(self, count: int, own: int, rows: int, columns: int) -> ExchangedSums: ...


@dataclass(frozen=True)
class BoundExchange:
    """Collectives of a program, each with the messages that it sends and receives.

    Attributes:
        by_kernel: for each collective that a kernel sends, what puts it on a stream, given the stream's lane.
    """

    cards: Joined
    messages: Mapping[Collective, tuple[Sequence[Message], Sequence[Message]]]
    by_kernel: Mapping[Collective, Callable[[Stream, int], None]]

    @property
    def lanes(self) -> int:
        """How many streams may have messages at once."""
        return self.cards.lanes

    def bind(self, collective: Collective, lane: int = 0) -> Callable[[Stream], None]:
        """What puts a collective on a stream, the one of this lane."""
        if collective in self.by_kernel:
            put = self.by_kernel[collective]
            return lambda stream: put(stream, lane)
        sent, received = self.messages[collective]
        return lambda stream: self.cards.put(sent, received, stream, lane)


class Exchange:
    """Collectives of programs, which all ranks put on their streams in the same order.

    Arguments:
        ranks: by which they agree.
        cards: by which they send.
        kinds: of the ranks' cards: name, architecture and number of multiprocessors.
    """

    def __init__(self, ranks: Communicator, cards: Joined, kinds: Sequence[tuple[str, str, int]]) -> None:
        self._ranks, self._cards, self._kinds = ranks, cards, kinds

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._ranks.size

    def gather(self, value: Told) -> list[Told]:
        """Every rank's value, on all of them, which call this together."""
        return self._ranks.gather(value)

    @property
    def maps_memory(self) -> bool:
        """Whether kernels of one card can read another one's memory."""
        return isinstance(self._cards, MapsMemory)

    @property
    def reaches_cards(self) -> bool:
        """Whether kernels of one card can write to another one's memory."""
        return isinstance(self._cards, SendsByKernel)

    def exchange_sums(self, sums: PartSums) -> ExchangedSums:
        """What a launch exchanges these by; all ranks call this together.

        Raises:
            BackendError: another rank's memory cannot be reached, or the card has no room.
        """
        assert isinstance(self._cards, SendsByKernel)
        return self._cards.exchange_sums(sums.count, sums.own, sums.rows, sums.columns)

    def map(self, addresses: Sequence[int]) -> dict[int, list[Place]]:
        """Where the memory at other ranks' addresses lies here, by rank; all ranks call this, with their own addresses.

        Raises:
            BackendError: another rank's memory cannot be reached.
        """
        assert isinstance(self._cards, MapsMemory)
        return self._cards.map(addresses)

    def check_kinds(
        self,
        what: str = "cards of ranks that train one shard",
        hint: str = "with streams=2 or more each rank computes some shards, and all have the same parameters",
    ) -> None:
        """Raise RankError where cards are of several kinds, whose bits may differ, and what each computes must not."""
        if len(set(self._kinds)) > 1:
            got = ", ".join(sorted({name for name, *_ in self._kinds}))
            raise RankError(what, expected="one kind", got=got, hint=hint)

    def bind(self, collectives: Sequence[Collective], addresses: Mapping[str, int]) -> BoundExchange:
        """A program's collectives of arrays at these addresses; all ranks call this, of the same program.

        Raises:
            RankError: what one sends is not what another one expects, on all ranks.
            BackendError: another rank's memory cannot be reached.
        """
        check_collectives(self._ranks.gather(tuple(collectives)))
        sent = [_message(each, addresses) for collective in collectives for each in collective.sent]
        received = [_message(each, addresses) for collective in collectives for each in collective.received]
        reached = iter(self._cards.reach(sent, received))
        bound = {
            collective: (
                [next(reached) for _ in collective.sent],
                [_message(each, addresses) for each in collective.received],
            )
            for collective in collectives
        }
        cards = self._cards
        by_kernel = {}
        if isinstance(cards, SendsByKernel):
            by_kernel = {each: cards.bind(*bound[each]) for each in collectives if each.by_kernel}
        return BoundExchange(cards, bound, by_kernel)

    def wait(self, stream: Stream, reached: Event | None = None) -> None:
        """Wait for what the stream was given; with ``reached``, for what is before that event.

        Raises:
            RankError: another rank has failed or come to its end, or does not come within the time limit.
        """
        self._cards.wait(stream, reached)

    def limited(self) -> AbstractContextManager[None]:
        """End the process some seconds after the time limit if the block, which calls the driver, has not ended."""
        return self._ranks.limited("steps of several cards")

    def abort(self, stream: Stream) -> bool:
        """End what the stream was given; nothing can be exchanged afterwards.

        Returns:
            whether it has ended; otherwise the card is of no more use to this process.
        """
        return self._cards.abort(stream)


def _message(transfer: Transfer, addresses: Mapping[str, int]) -> Message:
    address = addresses[transfer.at.array] + transfer.at.offset * transfer.item_bytes
    return Message(transfer.peer, address, transfer.count * transfer.item_bytes)


def check_collectives(of_ranks: Sequence[Sequence[Collective]]) -> None:
    """Raise RankError unless between any two ranks one receives what the other sends, in the same order."""
    ranks = range(len(of_ranks))
    for sender, receiver in ((a, b) for a in ranks for b in ranks if a != b):
        sent = _sizes(of_ranks[sender], receiver, is_sent=True)
        received = _sizes(of_ranks[receiver], sender, is_sent=False)
        if sent != received:
            place = next((i for i, (one, other) in enumerate(zip(sent, received, strict=False)) if one != other), None)
            of = "{0[1]:,} bytes of {0[0]}".format
            expected, got = (
                (f"{len(sent)} messages from rank {sender}", f"{len(received)}")
                if place is None
                else (f"{of(received[place])} from rank {sender}", of(sent[place]))
            )
            hint = "cards of one kind, and the same data, have the same messages"
            raise RankError(f"what rank {receiver} receives in a step", expected=expected, got=got, hint=hint)


def _sizes(collectives: Sequence[Collective], peer: int, *, is_sent: bool) -> list[tuple[str, int]]:
    return [
        (each.kind, transfer.count * transfer.item_bytes)
        for each in collectives
        for transfer in (each.sent if is_sent else each.received)
        if transfer.peer == peer
    ]


Kind = tuple[str, str, int]


@dataclass(frozen=True)
class Card:
    """The card of a rank, as it tells the others.

    Attributes:
        host, bus: where it is.
        kind: its name, architecture and number of multiprocessors.
    """

    host: str
    bus: str
    kind: Kind


_joined: list[tuple[Device, Exchange]] = []  # the exchange of this process's card, once it has joined


def join(device: Device) -> Exchange:
    """The exchange of this process's card with those of all ranks, made by its first call, which all of them make.

    Inside ``with device:``.

    Raises:
        MissingPackageError: nccl4py or NCCL's library is missing on a rank.
        RankError: two ranks have one card, or they do not come.
        BackendError: NCCL refuses.
    """
    if not _joined or _joined[0][0] is not device:
        ranks = communicator()
        assert ranks is not None
        kind = device.name, device.arch, device.multiprocessors
        cards = ranks.gather(Card(platform.node(), device.bus_id, kind))
        check_cards(cards)
        if ranks.rank == 0:
            warn_of_kinds(cards)
        joined = _linked(device, ranks, cards) or _by_nccl(device, ranks, cards)
        _joined[:] = [(device, Exchange(ranks, joined, [card.kind for card in cards]))]
    return _joined[0][1]


def _linked(device: Device, ranks: Communicator, cards: Sequence[Card]) -> LinkedCards | None:
    """Cards whose copy engines reach each other, or None, on all ranks, where those of one do not."""
    others = [card.bus for card in cards if card.bus != device.bus_id]
    reaches = len({card.host for card in cards}) == 1 and all(map(device.reaches, others))
    if not (CARDS_MAY_BE_LINKED and all(ranks.gather(reaches))):
        return None
    memory = share_memory(ranks, Words.nbytes(ranks.size))
    if memory is None:
        return None
    linked = None
    with contextlib.suppress(BackendError):
        load = partial(_message_function, device)
        linked = LinkedCards(device, ranks.rank, ranks.size, memory, ranks.gather, ranks.wait_until, load)
    if not all(ranks.gather(linked is not None)):
        return None
    assert linked is not None
    return linked if all(ranks.gather(linked.greet())) else None


def _message_function(device: Device) -> Function:
    entry = send_messages()
    return LoadedKernels(device, [entry])[entry]


def _by_nccl(device: Device, ranks: Communicator, cards: Sequence[Card]) -> JoinedCards:
    """Cards that NCCL joins, on any hosts.

    Raises:
        MissingPackageError: nccl4py or NCCL's library is missing on a rank, on all of them.
        BackendError: NCCL refuses.
    """
    problem = ""
    try:
        check_nccl()
    except MissingPackageError as error:
        problem = str(error)
    check_problems(cards, ranks.gather(problem))
    identity = ranks.broadcast(new_identity() if ranks.rank == 0 else None)
    return JoinedCards(device, ranks.rank, ranks.size, identity, ranks.wait_until)


def check_problems(cards: Sequence[Card], problems: Sequence[str]) -> None:
    """Raise MissingPackageError where a rank has a reason why NCCL cannot join its card."""
    for rank, (card, problem) in enumerate(zip(cards, problems, strict=True)):
        if problem:
            what = f"rank {rank} of {len(cards)} on {card.host}"
            hint = 'pip install "mlpgpu[nccl]", or nccl4py for a libnccl.so.2 that is there'
            raise MissingPackageError(what, expected="nccl4py and NCCL's library", got=problem, hint=hint)


def check_cards(cards: Sequence[Card]) -> None:
    """Raise RankError where two ranks have the same card."""
    places: dict[tuple[str, str], int] = {}
    for rank, card in enumerate(cards):
        first = places.setdefault((card.host, card.bus), rank)
        if first != rank:
            got = f"GPU {card.bus} of {card.host} on ranks {first} and {rank}"
            hint = "start as many ranks on a host as it has cards; CUDA_VISIBLE_DEVICES may hide some"
            raise RankError("cards of the ranks", expected="one for each rank", got=got, hint=hint)


def warn_of_kinds(cards: Sequence[Card]) -> None:
    """Warn where cards are of several kinds: they compute together, but bits follow from them."""
    kinds: dict[Kind, int] = {}
    for rank, card in enumerate(cards):
        kinds.setdefault(card.kind, rank)
    if len(kinds) > 1:
        named = ", ".join(f"{name} on rank {rank}" for (name, _, _), rank in kinds.items())
        warnings.warn(
            f"ranks have cards of several kinds ({named}): the slowest decides the time of a step, and the bits of "
            "a run follow from which rank has which",
            stacklevel=2,
        )
