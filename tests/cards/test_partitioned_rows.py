"""A data set partitioned over several cards: each step finds its rows, in whatever order streams leave open.

Ranks are threads of this process.  A stand-in for cards keeps what streams are given, and does of it whatever may be
next, drawn by chance, whenever a rank calls; so what no event orders comes in every order sooner or later.  The feed,
the orders of epochs and the loop over steps are the real ones; a step is a check of its rows, and a message.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rank_threads import SECONDS, MappedThreads, RankThreads

import mlpgpu as mg
from mlpgpu.backends import Sampling
from mlpgpu.backends.base import StepLog
from mlpgpu.backends.cuda.exchange import Exchange
from mlpgpu.backends.cuda.kernels import Entry
from mlpgpu.backends.cuda.kernels.launches import GRAPH_STEPS
from mlpgpu.backends.cuda.run import arrays, training
from mlpgpu.backends.cuda.run.data import feed, orders, partitions, pieces
from mlpgpu.backends.cuda.run.data.feed import Feed
from mlpgpu.backends.cuda.run.data.orders import Orders
from mlpgpu.backends.cuda.run.data.own_rows import OwnRows
from mlpgpu.backends.cuda.run.data.partitions import Partitions
from mlpgpu.backends.cuda.run.data.pieces import Pieces
from mlpgpu.backends.cuda.run.graphs import graphs_of
from mlpgpu.plan import shards_of

N_IN, EPOCHS = 20, 4
RANDOM = np.random.default_rng(8)


class World:
    """All cards: their memory, and what their streams were given and have not done yet."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.chance = random.Random(seed)
        self.slow = self.chance.choice((0, 1, 2))  # a rank whose host lags behind
        self.is_eager = self.chance.random() < 0.5  # otherwise nothing is done before somebody waits for it
        self.streams: list[Stream] = []
        self.memory: dict[int, tuple[Card, np.ndarray]] = {}
        self.problems: list[str] = []
        self.at_work: Card | None = None

    def bytes_at(self, address: int, nbytes: int) -> np.ndarray:
        for start, (card, array) in self.memory.items():
            if start <= address and address + nbytes <= start + array.nbytes:
                if card.is_freed and self.at_work is not card:  # to free memory waits for the card's own streams
                    self.problems.append(f"memory of rank {card.rank} is read that it has freed")
                return array[address - start : address - start + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are of no array")

    def step(self) -> bool:
        """Do one thing that may be next; whether there was any."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.todo and stream.todo[0][0]()]
            if ready:
                (stream,) = self.chance.choices(ready, [stream.speed for stream in ready])
                self.at_work = stream.card
                stream.todo.popleft()[1]()
            return bool(ready)

    def pass_time(self, card: Card) -> None:
        """Do some of what may be next, while the host of this card comes to its next call."""
        if card.rank == self.slow:
            time.sleep(1e-4)
        with self.lock:
            for _ in range(self.chance.choice((0, 0, 1, 2, 8)) if self.is_eager else 0):
                self.step()

    def until(self, is_reached: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not is_reached():
            if not self.step():
                assert time.monotonic() < end, "streams wait for each other"
                time.sleep(1e-5)


class Card:
    """A device."""

    index, most_texels, free_bytes, total_bytes = 0, 1 << 27, 1 << 30, 1 << 30

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.is_freed = world, rank, False


class Event:
    def __init__(self, card: Card, **options: object) -> None:
        self._card, self._is_reached = card, lambda: True

    def put(self, is_reached: Callable[[], bool]) -> None:
        self._is_reached = is_reached

    @property
    def is_reached(self) -> bool:
        return self._is_reached()

    def synchronize(self) -> None:
        self._card.world.until(self._is_reached)


class Stream:
    def __init__(self, card: Card, name: str = "") -> None:
        self.card, self.world, self.name = card, card.world, name
        self.todo: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        with self.world.lock:
            self.world.streams.append(self)
            self.speed = self.world.chance.choice((0.01, 1.0, 100.0))

    def do(self, work: Callable[[], None], when: Callable[[], bool] = lambda: True) -> None:
        with self.world.lock:
            self.todo.append((when, work))
        self.world.pass_time(self.card)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Of page-locked memory, which is read when the stream comes to it."""

        def move() -> None:
            self.world.bytes_at(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

        self.do(move)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        def move() -> None:
            self.world.bytes_at(to, nbytes)[:] = self.world.bytes_at(source, nbytes)

        self.do(move)

    def record(self, event: Event) -> None:
        done: list[bool] = []
        event.put(lambda: bool(done))
        self.do(lambda: done.append(True))

    def wait(self, event: Event) -> None:
        reached = event._is_reached  # what it stands for now
        self.do(lambda: None, reached)

    def synchronize(self) -> None:
        self.world.until(lambda: not self.todo)


class Arena:
    @classmethod
    def of(cls, card: Card, sizes: dict[str, int]) -> tuple[Arena, dict[str, int]]:
        made = {name: np.full(max(1, size), 0xEE, np.uint8) for name, size in sizes.items()}
        with card.world.lock:
            card.world.memory |= {array.ctypes.data: (card, array) for array in made.values()}
        return cls(), {name: array.ctypes.data for name, array in made.items()}


class Kernels:
    """What takes rows, in NumPy."""

    def __init__(self, world: World) -> None:
        self._world, self._loaded = world, set[Entry]()

    def load(self, entries: Iterable[Entry]) -> None:
        self._loaded |= set(entries)

    def __getitem__(self, entry: Entry) -> Any:
        assert entry in self._loaded and entry.name.startswith("take_partition")
        return SimpleNamespace(launch=self._launch)

    def _launch(self, stream: Stream, grid: object, values: tuple[int, ...]) -> None:
        places, first, of_batch, batch_rows, count, begin, end, partition, row_bytes, rows = values

        def take(row: int) -> None:
            position = first + row // of_batch * batch_rows + row % of_batch
            place = int(self._world.bytes_at(places + 4 * position, 4).view(np.int32)[0])
            if begin <= place < end:
                source = self._world.bytes_at(partition + (place - begin) * row_bytes, row_bytes)
                self._world.bytes_at(rows + row * row_bytes, row_bytes)[:] = source

        parts = [range(part, count, 3) for part in range(3)]  # not all at once, as a kernel's blocks
        for part in parts:
            stream.do(lambda part=part: [take(row) for row in part])


@pytest.fixture(autouse=True)
def _in_place_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = {
        "Event": Event, "Stream": Stream, "Arena": Arena, "Texture": lambda card, address, count: address,
        "pinned": lambda card, shape, dtype: np.zeros(shape, dtype), "pack": lambda entry, values: tuple(values),
    }  # fmt: skip
    for module in (feed, orders, partitions, arrays):
        for name, stand_in in stand_ins.items():
            if name in vars(module):
                monkeypatch.setattr(module, name, stand_in)


def data_of(rows: int, kind: str) -> mg.Dataset:
    x = RANDOM.integers(0, 256, (rows, N_IN))
    x[:, 0] = np.arange(rows) % 251
    y, weight = RANDOM.integers(3, size=rows), RANDOM.uniform(0.5, 2.0, rows).astype(np.float32)
    if kind == "bytes":
        return mg.Dataset(x.astype(np.uint8), y, weight, scale=1.0)
    whole = mg.Dataset(x.astype(np.float32), y, weight)
    return whole if kind == "floats" else whole.split(0.25, seed=3)[0]


def train(
    team: RankThreads, seed: int, *, shards: int, rows: int, batch_rows: int, kind: str = "floats", room: float = 0.8,
    least_room: float = 0.0,
    calls: Sequence[int] = (1, 7, 100), left: int = 0, first_step: int = 0, shuffle: bool = True, batches: int = 2,
) -> list[Feed]:  # fmt: skip
    """Steps of all ranks, in runs of so many; each checks the rows of its rank's shards.

    Arguments:
        room: of a card, as a part of the set; that of rank 0's may be less, ``least_room``.
        batches: of a piece.
        left: steps of the last epoch that are not made.
    """
    data, world = data_of(rows, kind), World(seed)
    rows = len(data)
    plan = mg.Network([mg.Dense(N_IN, 3)], seed=1).lower(
        capacity=batch_rows, loss="softmax_cross_entropy", optimizer=mg.SGD(0.1), shards=shards, ranks=team.size
    )
    sampling = Sampling(rows, batch_rows, seed=5, shuffle=shuffle)
    row_bytes = (N_IN if kind == "bytes" else 4 * N_IN) + 8

    steps_sent = [0] * team.size

    def work() -> Feed:
        of_rank, ranks = shards_of(team.rank, team.size, shards), cast(Any, team)
        card: Any = Card(world, team.rank)
        stream: Any = Stream(card, "steps")
        loaded: Any = Kernels(world)
        own_room = int(rows * row_bytes * (room if team.rank else least_room or room))
        fed = Feed(
            card, stream, plan, data, batch_rows=batch_rows, room=own_room, exchange=Exchange(ranks, ranks, []),
            loaded=loaded,
        )  # fmt: skip
        state = SimpleNamespace(end_prefetch=lambda: None, were_set=False)
        position = [first_step]

        def check(step: int) -> None:
            epoch, batch = sampling.locate(step)
            part = sampling.batch(batch)
            count = part.stop - part.start
            own = range(part.start + count * of_rank.start // shards, part.start + count * of_rank.stop // shards)
            order, addresses = sampling.order(epoch), fed.arrays.addresses
            places = world.bytes_at(addresses["order"], 4 * rows).view(np.int32)
            for position in own:
                row = order[position]
                expected = [data.x[row], np.float32(data.weight[row]), np.int32(data.y[row])]
                for name, value in zip(("data", "weights", "targets"), expected, strict=True):
                    size = fed._rows[name].row_bytes
                    found = world.bytes_at(addresses[name] + int(places[position]) * size, size)
                    as_stored = np.asarray(value, fed._rows[name].dtype).tobytes()
                    if found.tobytes() != as_stored:
                        world.problems.append(f"rank {card.rank}, step {step}: {name} of row {row}")

        def launch(count: int, before_last: Callable[[], None] | None) -> None:
            *others, _ = graphs_of(count, are_several=before_last is not None)
            for place in range(count):
                if before_last is not None and place == sum(others):
                    before_last()
                position[0] += 1

                def compute(step: int = position[0] - 1) -> None:
                    check(step)
                    steps_sent[card.rank] += 1

                stream.do(compute)
                stream.do(lambda: None, lambda end=position[0] - first_step: min(steps_sent) >= end)

        loop: Any = object.__new__(training.Training)
        workspace = SimpleNamespace(
            device=nullcontext(),
            numbers=SimpleNamespace(
                staged_rates=lambda table: table, download_losses=lambda count: (np.zeros((count, 2)), stream),
                set_step=lambda *numbers, **others: None, take_turn=lambda: None,
            ),
        )  # fmt: skip
        vars(loop).update(
            _workspace=workspace, _state=state, _persistent=None, sampling=sampling, _stream=stream,
            _optimizer=plan.optimizer, data=fed, binder=SimpleNamespace(set_constant=lambda *values: None),
            _exchange=None, graphs=SimpleNamespace(launch=launch), _prologue=[],
            _orders=Orders(card, stream, fed, sampling, lambda *launches: [], lambda entries: False),
        )  # fmt: skip
        steps, done = EPOCHS * sampling.steps_per_epoch - first_step - left, 0
        for count in [*calls, steps]:
            count = min(count, steps - done)
            if count:
                loop.run(first_step + done, np.full(count, 0.1), StepLog(count))
                done += count
        # The last steps were seen to end; other ranks' hosts may be behind.
        fed.close()
        card.is_freed = True
        return fed

    piece_bytes = (
        batches * row_bytes * max(own.most_of_batch for own in OwnRows.of_ranks(rows, batch_rows, shards, team.size))
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", piece_bytes)
        patched.setattr(pieces, "TAKEN_BYTES", piece_bytes)
        patched.setattr(pieces, "TAKEN_BATCHES", 1)
        patched.setattr(pieces, "TAKEN_SHARE", 1)
        fed = team.run(work)
    while world.step():  # what was given to streams and nobody waited for
        pass
    assert not world.problems, world.problems[0]
    return fed


CASES = {
    "a shard each": {"shards": 2, "rows": 70, "batch_rows": 8},
    "three shards of two": {"shards": 3, "rows": 110, "batch_rows": 10, "room": 0.95},
    "bytes": {"shards": 4, "rows": 203, "batch_rows": 9, "kind": "bytes", "room": 0.97},
    "a split": {"shards": 2, "rows": 90, "batch_rows": 7, "kind": "split", "calls": (20, 1, 1, 3)},
    "in order": {"shards": 2, "rows": 70, "batch_rows": 8, "shuffle": False},
    "from the middle of an epoch": {
        "shards": 2,
        "rows": 70,
        "batch_rows": 8,
        "first_step": 4,
        "left": 6,
        "calls": (2,),
    },
    "a batch a piece": {"shards": 2, "rows": 70, "batch_rows": 8, "batches": 1, "calls": (1, 1, 2, 40)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_step_finds_the_rows_of_its_shards(case: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the host reads each row once, for the rank that has it."""
    given: dict[str, Any] = dict(CASES[case])
    given["shards"] = max(ranks, given["shards"])
    read: list[int] = []
    gather = Feed._gather
    monkeypatch.setattr(Feed, "_gather", lambda fed, to, rows: (read.extend(rows), gather(fed, to, rows)))
    for seed in range(3):
        read.clear()
        feeds = train(MappedThreads(ranks), seed, **given)
        assert sorted(read) == list(range(len(feeds[0].dataset)))
        assert all(fed.is_partitioned and fed.stays for fed in feeds)
        assert sum(fed._pieces.own.count for fed in feeds) == len(feeds[0].dataset)


def test_a_rank_without_shards_has_no_rows() -> None:
    feeds = train(MappedThreads(3), 1, shards=2, rows=70, batch_rows=8)
    assert [fed._pieces.own.count for fed in feeds] == [0, 35, 35] and all(fed.is_partitioned for fed in feeds)


@pytest.mark.parametrize(
    ("team", "room", "least_room", "kept"),
    [
        (MappedThreads, 1.0, 0.0, "whole"),
        (MappedThreads, 1.0, 0.8, "partitioned"),  # cards of several kinds: it does not fit that of rank 0
        (MappedThreads, 1.0, 0.3, "streamed"),
        (RankThreads, 0.8, 0.0, "streamed"),  # cards that NCCL joins
    ],
)
def test_ranks_agree_on_where_the_rows_are(team: type[RankThreads], room: float, least_room: float, kept: str) -> None:
    """A rank that streams sends its card the rows of its shards alone."""
    for fed in train(team(2), 4, shards=2, rows=70, batch_rows=8, room=room, least_room=least_room):
        assert (fed.stays, fed.is_partitioned) == (kept != "streamed", kept == "partitioned")
        assert len(fed._order) == {"whole": 70, "partitioned": 0, "streamed": 35}[kept]


@pytest.mark.parametrize("seed", range(40))
def test_pieces_have_the_rows_of_a_rank_s_shards_each_once(seed: int) -> None:
    """Of sets, batches and shards of any size, also where a last batch gives a shard more rows than others do."""
    draw = random.Random(seed)
    rows, batch_rows, shards, ranks = (draw.randint(1, most) for most in (90, 12, 6, 4))
    batch = [range(start, min(start + batch_rows, rows)) for start in range(0, rows, batch_rows)]
    of_ranks = OwnRows.of_ranks(rows, batch_rows, shards, ranks)
    assert sum(own.count for own in of_ranks) == rows
    for rank, own in enumerate(of_ranks):
        of = shards_of(rank, ranks, shards)
        expected = [r for b in batch for r in b[len(b) * of.start // shards : len(b) * of.stop // shards]]
        found = np.arange(rows)[own.find()]
        assert found.tolist() == expected and own.count == len(expected)
        cut = Pieces(own, draw.randint(1, 5), stays=draw.random() < 0.5, is_taken=True)
        turn = draw.randint(0, 1)
        order = cut.order(cut.slot_places(turn))
        for piece in range(cut.count):
            begin, end = piece * cut.rows, min((piece + 1) * cut.rows, rows)
            inside = [r for r in expected if begin <= r < end]
            assert [
                first + i // n * batch_rows + i % n for first, n, k in own.runs(begin, end) for i in range(k)
            ] == inside
            first = cut.slot(turn + piece)
            assert [order[r] for r in inside] == list(range(first, first + len(inside)))
            assert first + len(inside) <= cut.places and first >= (own.count if cut.stays else 0)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 32, 64, 4095])
def test_the_last_graph_is_not_the_only_one_where_reads_end_before_it(count: int) -> None:
    assert sum(graphs_of(count)) == sum(graphs_of(count, are_several=True)) == count
    assert len(graphs_of(count, are_several=True)) >= min(count, 2)
    assert {*graphs_of(count), *graphs_of(count, are_several=True)} <= set(GRAPH_STEPS)


def _waits_for_nothing(*arguments: object) -> None: ...


def _without_sources(take: Any) -> Any:
    def take_at_once(self: Any, piece: int, to: Any) -> None:
        self._sourced = Event(self._device)
        take(self, piece, to)

    return take_at_once


FAULTS: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "a rank frees what others read": (Feed, "reads_to_finish", lambda _: _waits_for_nothing),
    "rows are read that are not there yet": (Partitions, "wait_for_all", lambda _: _waits_for_nothing),
    "rows are read before the list of them is there": (Feed, "_take", _without_sources),
    "another rank's partition": (Partitions, "stride", lambda _: 1),
    "another piece": (OwnRows, "before", lambda before: lambda self, position: max(0, before(self, position) - 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, name, planted = FAULTS[fault]
    monkeypatch.setattr(of, name, planted(vars(of)[name]))
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for seed in range(20):
            train(MappedThreads(2), seed, shards=2, rows=70, batch_rows=8, calls=(1, 7, 9, 8), first_step=4, left=6)
