"""Training steps launch by launch, captured as graphs, which replay without Python between their launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from ..exchange import BoundExchange
from ..kernels.launches import GRAPH_STEPS, Collective, Launch, Piece
from ..runtime import Device, Event, Replay, Stream, capture
from .binding import Binder, Put
from .steps import STEP


@dataclass(frozen=True)
class BoundPiece:
    """A piece of the gradient, ready for streams: each shard's launches, and what follows them.

    Attributes:
        exchange: what the stream of exchanges runs: it has all sums of this rank's slice, and moves it.
        gather: what the stream that gathers parameters runs then.
        at_end: whether only the last step of a graph exchanges it.
    """

    shards: Sequence[Sequence[tuple[Put, Launch]]]
    exchange: Sequence[Put]
    gather: Sequence[Put]
    at_end: bool


@dataclass(frozen=True)
class BoundStep:
    """The launches of a step, ready for streams: its begin, each shard's with what the plan says of them, its end.

    Between the last two come the pieces of the gradient, where there are several ranks.
    """

    begin: Sequence[tuple[Put, Launch]]
    shards: Sequence[Sequence[tuple[Put, Launch]]]
    pieces: Sequence[BoundPiece]
    finish: Sequence[Put]


def after_exchange(exchange: Put, launch: Put) -> Put:
    """What puts an exchange on a stream, and a launch behind it."""

    def put(stream: Stream) -> None:
        exchange(stream)
        launch(stream)

    return put


SIDE_STREAMS = 3  # the most small updates that follow a tail


class ShardStreams:
    """The streams of a step: one for each shard, and side streams for launches that nothing in the step waits for.

    The first side stream runs its launches one after another.  Launches that are put ``after_others`` take all side
    streams in turn and run beside each other as well: each of them is slow beside a launch that fills the card, and one
    after another they would end behind it.

    What ranks exchange has two further streams, on each of which pieces follow one another: one piece's parameters are
    in flight to other ranks while sums of the next one come from them.

    Arguments:
        first: the first shard's; that of a rank without shards.
        shards: how many this process computes.
    """

    def __init__(self, device: Device, first: Stream, shards: int, *, exchanges: bool = False) -> None:
        self.all = [first, *(Stream(device, str(shard)) for shard in range(1, shards))]
        self._exchange, self._gather = (Stream(device, name) if exchanges else None for name in ("exchange", "gather"))
        self._made = [Event(device) for _ in self.all] if exchanges else []
        self._moved = Event(device)
        # When each piece is exchanged: of the step that is being put, and of the one before, in turns.
        self._exchanged: tuple[list[Event], list[Event]] = [], []
        self._turn, self._device = 0, device
        self._fork = Event(device)
        self._joins = [Event(device) for _ in self.all[1:]]
        self._sides = [Stream(device, f"side {number}") for number in range(SIDE_STREAMS)]
        self._rejoin = Event(device)

    def put(self, step: BoundStep, *, follows: bool = False, ends: bool = True) -> None:
        """Put a step on the streams: they fork for the shards, and join for what is done once.

        Arguments:
            follows: whether the step before was put by the call before, which did not end.
            ends: whether it waits for what it exchanges; else launches of the next step do.
        """
        first, others = self.all[0], self.all[1:]
        self._turn = 1 - self._turn

        def put_one(stream: Stream, put: Put, launch: Launch) -> None:
            if follows:
                for piece in launch.awaits:
                    stream.wait(self._exchanged[1 - self._turn][piece])
            for piece in launch.receives:
                stream.wait(self._exchanged[self._turn][piece])
            put(stream)

        for put, launch in step.begin:
            put_one(first, put, launch)
        first.record(self._fork)
        for stream in others:
            stream.wait(self._fork)
        last: list[tuple[Stream, Put]] = []
        used: list[Stream] = []
        for stream, shard in zip(self.all, step.shards, strict=bool(step.shards)):  # a rank may have none
            for put, launch in shard:
                if not launch.on_side_stream:
                    put_one(stream, put, launch)
                    continue
                side = self._sides[len(last) % SIDE_STREAMS if launch.after_others else 0]
                stream.record(self._rejoin)
                side.wait(self._rejoin)
                used += [side] * (side not in used)
                if launch.after_others:
                    last.append((side, put))
                else:
                    put(side)
        for side, put in last:  # put earlier, they would take multiprocessors that the launches they run beside need
            put(side)
        for side in used:
            side.record(self._rejoin)
            first.wait(self._rejoin)
        self._put_pieces([piece for piece in step.pieces if ends or not piece.at_end], put_one)
        if step.pieces and ends:
            first.wait(self._events(len(step.pieces))[-1])  # and so for those before it
        for stream, join in zip(others, self._joins, strict=True):
            stream.record(join)
            first.wait(join)
        for put in step.finish:
            put(first)

    def _put_pieces(self, pieces: Sequence[BoundPiece], put_one: Callable[[Stream, Put, Launch], None]) -> None:
        """Each piece is exchanged when all shards have made it, beside the products of those after it."""
        exchange, gather = self._exchange, self._gather
        for piece, exchanged in zip(pieces, self._events(len(pieces)), strict=True):
            assert exchange is not None and gather is not None
            for stream, shard in zip(self.all, piece.shards, strict=bool(piece.shards)):
                for put, launch in shard:
                    put_one(stream, put, launch)
            for stream, made in zip(self.all, self._made, strict=True):
                stream.record(made)
                exchange.wait(made)
            for over in piece.exchange:
                over(exchange)
            exchange.record(self._moved)
            gather.wait(self._moved)
            for over in piece.gather:
                over(gather)
            gather.record(exchanged)

    def _events(self, pieces: int) -> list[Event]:
        """When each piece of the step that is being put is exchanged."""
        events = self._exchanged[self._turn]
        while len(events) < pieces:
            events.append(Event(self._device))
        return events[:pieces]


def graphs_of(count: int, *, are_several: bool = False) -> list[int]:
    """Steps of the graphs that make up ``count`` of them, as few as may be; or two at least, if it is not 1."""
    found: list[int] = []
    for steps in GRAPH_STEPS:
        found += [steps] * (count // steps)
        count %= steps
    return [found[0] // 2] * 2 if are_several and len(found) == 1 and found[0] > 1 else found


class StepGraphs:
    """Steps on one data set, as graphs of up to ``GRAPH_STEPS[0]`` of them.

    Arguments:
        addresses: of the program's arrays.
        exchange: what ranks send each other, where there are several.
    """

    def __init__(
        self, binder: Binder, streams: ShardStreams, addresses: Mapping[str, int], exchange: BoundExchange | None = None
    ) -> None:
        self._binder, self._streams, self._addresses, self._exchange = binder, streams, addresses, exchange
        self._bound: dict[int, BoundStep] = {}  # by their place in a graph
        self._replays: dict[int, Replay] = {}  # by their number of steps

    def launch(self, count: int, before_last: Callable[[], None] | None = None) -> None:
        """Put ``count`` steps on the streams, as few graphs; ``before_last`` is called before the last of them."""
        *others, last = graphs_of(count, are_several=before_last is not None)
        for steps in others:
            self.replay(steps).launch(self._streams.all[0])
        if before_last is not None:
            before_last()
        self.replay(last).launch(self._streams.all[0])

    def replay(self, steps: int) -> Replay:
        """The graph of so many steps, captured at first need."""
        if steps not in self._replays:
            with capture(self._streams.all[0], f"a graph of {steps} steps") as graph:
                self.put(steps)
            self._replays[steps] = graph.instantiate()
        return self._replays[steps]

    def put(self, count: int) -> None:
        """Put as many steps as a graph may hold on the streams; the inputs of some are made ready together."""
        stream, lowered, bind = self._streams.all[0], self._binder.lowered, self._binder.bind
        for launch in lowered.initialise:
            bind(launch, graph_steps=count)(stream)
        for place in range(count):
            if place % lowered.stages == 0:
                for launch in lowered.staged:
                    (blocks, _, _), steps = launch.grid, min(lowered.stages, count - place)
                    bind(replace(launch, grid=(blocks, steps, 1)), step=self.step_address(place))(stream)
            self._streams.put(self._step(place), follows=place > 0, ends=place == count - 1)

    def step_address(self, place: int) -> int:
        """The address of the struct Step of the step at this place of a graph."""
        return self._addresses["steps"] + STEP.itemsize * place

    def _step(self, place: int) -> BoundStep:
        """The launches of the step at this place of a graph."""
        if place not in self._bound:
            lowered = self._binder.lowered
            bind = partial(self._bind, place)
            self._bound[place] = BoundStep(
                [(bind(launch), launch) for launch in lowered.begin],
                [[(bind(launch), launch) for launch in shard] for shard in lowered.shards],
                [
                    BoundPiece(
                        [[(bind(launch), launch) for launch in shard] for shard in piece.shards],
                        [bind(each) for each in piece.exchange[: self._gathers_at(piece)]],
                        [bind(each, lane=1) for each in piece.exchange[self._gathers_at(piece) :]],
                        piece.at_end,
                    )
                    for piece in lowered.pieces
                ],
                [bind(launch) for launch in lowered.finish],
            )
        return self._bound[place]

    def _bind(self, place: int, launch: Launch | Collective, lane: int = 0) -> Put:
        """A launch or an exchange of the step at this place; the former may follow an exchange of its own."""
        if isinstance(launch, Collective):
            assert self._exchange is not None
            return self._exchange.bind(launch, lane)
        lowered = self._binder.lowered
        stage = place % lowered.stages
        staged = {name: self._addresses[name] + stage * size for name, size in lowered.staged_bytes.items()}
        first = next(iter([*lowered.begin, *chain.from_iterable(lowered.shards[:1])]), None)
        if launch is first and stage == 0:  # it does not follow the step before
            launch = replace(launch, pdl=False)
        bound = self._binder.bind(launch, stage, step=self.step_address(place), **staged)
        return bound if launch.exchange is None else after_exchange(self._bind(place, launch.exchange), bound)

    def _gathers_at(self, piece: Piece) -> int:
        """What of a piece's exchange a stream of its own runs: from its parameters on, if messages may overlap."""
        if self._exchange is None or self._exchange.lanes == 1:
            return len(piece.exchange)
        is_gathered = [isinstance(each, Collective) and each.gathers for each in piece.exchange]
        return [*is_gathered, True].index(True)

    def close(self) -> None:
        """Destroy the graphs; those that are under way end by themselves."""
        replays, self._replays = self._replays, {}
        for replay in replays.values():
            replay.close()
