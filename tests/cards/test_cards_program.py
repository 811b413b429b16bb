"""Programs of several ranks on cards, whole: data, orders, graphs, state, evaluations, on the host in place of cards.

Each rank is a thread with a host card of its own; messages go from one's memory to the other's, by queues.  What NCCL
does, and what streams leave open, is no part of it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import dataset
from host_card import HostCard, Stream, take_over
from rank_threads import SECONDS, MappedThreads

from mlpgpu import Adam, Dense, Dropout, Momentum, Network
from mlpgpu.backends import Sampling, State
from mlpgpu.backends.cuda import exchange
from mlpgpu.backends.cuda.exchange import Exchange
from mlpgpu.backends.cuda.run import program as programs
from mlpgpu.backends.cuda.run.data import pieces
from mlpgpu.backends.cuda.run.data.feed import Feed
from mlpgpu.backends.cuda.run.data.partitions import Partitions
from mlpgpu.backends.cuda.run.program import CudaProgram
from mlpgpu.backends.cuda.run.state import DeviceState
from mlpgpu.backends.cuda.runtime import Message
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.plan import sharding

POLL_SECONDS = 0.1
ROWS, BATCH = 21, 8
NETWORKS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "two exchanges": (
        [Dense(6, 9, "tanh"), Dropout(0.2), Dense(9, 3)],
        {"optimizer": Adam(0.02), "shards": 3, "one_exchange": False},
    ),
    "one exchange": (
        [Dense(6, 9, "relu"), Dense(9, 3)],
        {"optimizer": Momentum(0.1), "shards": 4, "one_exchange": True},
    ),
    "clipped": (
        [Dense(6, 9, "relu"), Dense(9, 3)],
        {"optimizer": Adam(0.02, clip_norm=0.05), "shards": 2, "one_exchange": False},
    ),
    "one shard": ([Dense(6, 9, "relu"), Dense(9, 3)], {"optimizer": Adam(0.02), "shards": 1}),
}


class Team(MappedThreads):
    """The ranks, and the messages between their cards."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lanes, self.cards = 2, list[HostCard]()
        self._channels: dict[tuple[int, int, int], queue.Queue[np.ndarray]] = defaultdict(queue.Queue)

    def reach(self, sent: Sequence[Message], received: Sequence[Message]) -> list[Message]:
        return list(sent)

    def put(self, sent: Sequence[Message], received: Sequence[Message], stream: Stream, lane: int = 0) -> None:
        card, me = stream.device, self.rank

        def move() -> None:
            for peer, address, nbytes, _ in sent:
                self._channels[me, peer, lane].put(card.bytes_at(address, nbytes).copy())
            for peer, address, nbytes, _ in received:
                card.bytes_at(address, nbytes)[:] = self._arrived(self._channels[peer, me, lane])

        card.do(move)

    def _arrived(self, channel: queue.Queue[np.ndarray]) -> np.ndarray:
        """The next message, unless none comes because another rank has failed."""
        for _ in range(int(SECONDS / POLL_SECONDS)):
            with contextlib.suppress(queue.Empty):
                return channel.get(timeout=POLL_SECONDS)
            if self.has_failed:
                raise threading.BrokenBarrierError
        raise queue.Empty

    def wait(self, stream: Stream, reached: object = None) -> None: ...

    def abort(self, stream: Stream) -> bool:
        return True

    def limited(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def train(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch, begin: State | None = None, *, share: float = 0.5,
    rows: int = ROWS, runs: Iterable[int] = (4, 2), **others: Any,
) -> list[Any]:  # fmt: skip
    """What each rank has after two epochs and an evaluation; ``share`` of the memory is for the data."""
    layers, options = NETWORKS[name]
    options = {**options, **others}
    network = Network(layers, seed=3)
    plan = network.lower(capacity=BATCH, loss="softmax_cross_entropy", ranks=ranks, **options)
    data = dataset("softmax_cross_entropy", "index", rows=rows, n_in=6, n_out=3, weighted=True)
    data = type(data)(data.x.astype(np.float32), data.y, data.weight)
    team = Team(ranks)
    monkeypatch.setattr(programs, "communicator", lambda: team)
    monkeypatch.setattr(programs, "rank", lambda: team.rank)
    monkeypatch.setattr(programs, "join", lambda card: Exchange(team, team, [("host", "sm_80", 2)]))  # type: ignore[arg-type]

    def work() -> Any:
        own: Any = HostCard(team.rank if ranks > 1 else 0)
        own.peers = team.cards
        team.cards.append(own)
        program = CudaProgram(plan, own, share, launches_because="a test asks for it")
        if begin is None:
            program.draw(3, np.zeros((1, plan.statistic_count)))
        else:
            program.load(begin)
        sampling = Sampling(rows, BATCH, seed=11)
        program.attach(data, sampling)
        losses, done = [], 0
        for count in runs:
            losses.append(program.run(done, np.full(count, 0.05 if done == 0 else 0.02)))
            done += count
        program.prefetch()
        state = program.read()
        sums = program.evaluate(data, ["accuracy"], shared=True)
        histograms = program.sample(5, 6, 4)
        program.close()
        return np.concatenate(losses), state, sums, histograms, plan.slices[team.rank if ranks > 1 else 0].parameters

    return team.run(work)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(monkeypatch)
    monkeypatch.setattr(sharding, "LEAST_BLOCK", 8)
    monkeypatch.setattr(thresholds, "EXCHANGE_LEAST_ELEMENTS", 1)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_programs_of_ranks_end_as_one_does(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, parameters, evaluations and samples of each; and slots, of which each has those of its slice."""
    ((losses, state, sums, histograms, _),) = train(name, 1, monkeypatch)
    assert np.isfinite(state.parameters).all()
    for got_losses, got, got_sums, got_histograms, own in train(name, ranks, monkeypatch):
        np.testing.assert_array_equal(got_losses, losses)
        np.testing.assert_array_equal(got.parameters, state.parameters)
        own = slice(None) if name == "one shard" else own
        np.testing.assert_array_equal(got.slots[:, :, own], state.slots[:, :, own])
        for key, value in sums.items():
            np.testing.assert_array_equal(got_sums[key], value)
        for key, (counts, _) in histograms.items():
            np.testing.assert_array_equal(got_histograms[key][0], counts)


def test_ranks_go_on_from_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whose slots each takes its own."""
    ((_, begin, *_),) = train("two exchanges", 1, monkeypatch)
    ((_, expected, *_),) = train("two exchanges", 1, monkeypatch, begin)
    for _, got, *_ in train("two exchanges", 2, monkeypatch, begin):
        np.testing.assert_array_equal(got.parameters, expected.parameters)


def test_data_that_stream_through_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    ((losses, state, *_),) = train("two exchanges", 1, monkeypatch)
    for got_losses, got, *_ in train("two exchanges", 2, monkeypatch, share=1e-9):
        np.testing.assert_array_equal(got_losses, losses)
        np.testing.assert_array_equal(got.parameters, state.parameters)


@pytest.mark.parametrize("name", ["two exchanges", "one exchange"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough), 4])
def test_data_that_no_card_has_room_for_are_partitioned(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For three epochs and a part of a fourth, in pieces; the first pieces from the host, the others from all cards."""
    rows, room = 101, 101 * 32 - 1
    sizes = {"PIECE_BYTES": 2 * 4 * 32, "TAKEN_BYTES": 3 * 4 * 32, "TAKEN_BATCHES": 1, "TAKEN_SHARE": 1}
    for size, value in sizes.items():
        monkeypatch.setattr(pieces, size, value)
    given: dict[str, Any] = {"rows": rows, "runs": (2, 15, 24), "shards": 4}
    ((losses, state, sums, _, _),) = train(name, 1, monkeypatch, **given)
    taken: list[bool] = []
    take = Feed._take
    monkeypatch.setattr(Feed, "_take", lambda self, *arguments: (taken.append(True), take(self, *arguments)))
    for got_losses, got, got_sums, *_ in train(name, ranks, monkeypatch, share=room / (1 << 30), **given):
        np.testing.assert_array_equal(got_losses, losses)
        np.testing.assert_array_equal(got.parameters, state.parameters)
        np.testing.assert_array_equal(got_sums["loss"], sums["loss"])
    assert len(taken) >= 2 * ranks * 4


@pytest.mark.parametrize("fault", ["another address", "another slice", "no messages", "another partition"])
def test_a_fault_planted_in_a_program_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = exchange._message
    if fault == "another address":

        def shifted(transfer: Any, addresses: Any) -> Message:
            found = message(transfer, addresses)
            return found._replace(address=found.address + 4 * (found.nbytes > 4 and transfer.at.array == "partials"))

        monkeypatch.setattr(exchange, "_message", shifted)
    elif fault == "another slice":  # slots of which nothing was there before would not show it
        swapped = property(lambda self: self._plan.slices[-1 - self._workspace.rank].parameters)
        monkeypatch.setattr(DeviceState, "_own", swapped)
    elif fault == "another partition":
        monkeypatch.setattr(Partitions, "stride", 40)
    else:
        monkeypatch.setattr(Team, "put", lambda *arguments: None)
    with pytest.raises((AssertionError, ValueError)):
        if fault == "another slice":
            test_ranks_go_on_from_a_state(monkeypatch)
        elif fault == "another partition":
            test_data_that_no_card_has_room_for_are_partitioned("one exchange", 2, monkeypatch)
        else:
            test_programs_of_ranks_end_as_one_does("two exchanges", 2, monkeypatch)
