"""Cards joined by NCCL, without a card: which of its functions are called, when and with what, and what is refused.

A stand-in for NCCL checks its rules, as its documentation states them; it moves nothing.  That NCCL itself does what is
asked of it can only be seen on cards (tests/gpu/test_ranks_on_cards.py).
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import re
import sys
import threading
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launched import run_ranks

import mlpgpu.backends.cuda as cuda_backend
from mlpgpu.backends.base import StepLog
from mlpgpu.backends.cuda import exchange, own_card
from mlpgpu.backends.cuda.exchange import Card, Exchange, check_cards, check_problems, join, warn_of_kinds
from mlpgpu.backends.cuda.kernels.launches import At, Collective, Transfer
from mlpgpu.backends.cuda.run.training import Training
from mlpgpu.backends.cuda.runtime import JoinedCards, Message, bindings, messages, nccl
from mlpgpu.errors import BackendError, ConfigurationError, MissingPackageError, RankError

RANK, SIZE, IDENTITY = 1, 3, bytes(range(128))


class Result(enum.IntEnum):
    Success = 0
    RemoteError = 6
    InProgress = 7


class StandIn:
    """NCCL as one process sees it, with a nonblocking communicator, whose calls take a while.

    Attributes:
        calls: what was called, with the arguments.
        looks: how often it says that it is at work before it is done.
        is_aborted: an event, which is set once it was aborted.
        frees: whether work on the card that waits for other ranks ends then, as NCCL says.
    """

    Result, DataType = Result, SimpleNamespace(Int8=0, Float32=7)

    def __init__(self, looks: int = 2) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.looks = looks
        self._left = 0
        self._groups = 0
        self._in_group = 0
        self._handle: object = None
        self.failure: Result | None = None
        self.is_aborted, self.frees = threading.Event(), True

    class Config:
        """Whose fields NCCL reads from its address."""

        def __init__(self) -> None:
            self.blocking, self.ptr = 1, 4711
            StandIn.config = self  # type: ignore[attr-defined]

    def get_version(self) -> int:
        return 22800

    def get_unique_id(self) -> bytes:
        return IDENTITY

    def comm_init_rank_scalable(self, nranks: int, myrank: int, n_id: int, comm_ids: bytearray, config: int) -> object:
        assert self._handle is None and isinstance(comm_ids, bytearray) and len(comm_ids) == 128 * n_id
        assert config == StandIn.config.ptr and StandIn.config.blocking == 0  # type: ignore[attr-defined]
        self._begin("init", nranks, myrank, bytes(comm_ids))
        self._handle = object()
        return self._handle

    def comm_get_async_error(self, comm: object) -> int:
        assert comm is self._handle and not self._groups
        if self.failure is not None:
            return self.failure
        self._left = max(self._left - 1, 0)
        return Result.InProgress if self._left else Result.Success

    def get_last_error(self, comm: object) -> str:
        assert comm is self._handle
        return "the cable is out"

    def group_start(self) -> None:
        assert not self._left, "NCCL was not through with the call before"
        self._groups += 1
        self.calls.append(("group_start",))

    def group_end(self) -> None:
        self._groups -= 1
        assert self._groups == 0
        self._begin("group_end")

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: object, stream: int) -> None:
        self._message("send", sendbuff, count, datatype, peer, comm, stream)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: object, stream: int) -> None:
        self._message("recv", recvbuff, count, datatype, peer, comm, stream)

    def _message(
        self, name: str, address: int, count: int, datatype: int, peer: int, comm: object, stream: int
    ) -> None:
        # Outside of a group two cards that both send first would wait for each other.
        assert self._groups == 1 and comm is self._handle and datatype == 0
        assert count > 0 and 0 <= peer < SIZE and peer != RANK
        self.calls.append((name, peer, address, count, stream))

    def comm_abort(self, comm: object) -> None:
        assert comm is self._handle
        self._handle, self.failure = None, None
        self.calls.append(("abort",))
        self.is_aborted.set()

    def _begin(self, *call: Any) -> None:
        self.calls.append(call)
        self._left = self.looks


class Clock:
    """Waits as a communicator does, but for so many looks."""

    def __init__(self, limit: int = 50) -> None:
        self.limit, self.waits = limit, list[str]()

    def __call__(self, is_done: Any, what: str) -> None:
        self.waits.append(what)
        for _ in range(self.limit):
            if is_done():
                return
        raise RankError(what, expected="all ranks", got="one that hangs")


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """NCCL, and a card's memory and streams, of which addresses and numbers are all there is."""
    numbers, made = itertools.count(70), StandIn()

    class Arena:
        def __init__(self, device: object, nbytes: int) -> None:
            self.nbytes = nbytes

        def take(self, nbytes: int) -> int:
            assert nbytes <= self.nbytes
            return 1000

        def close(self) -> None:
            made.calls.append(("close",))

    class Stream:
        def __init__(self, device: object, name: str = "") -> None:
            self.number, self.is_stuck = next(numbers), False

        def record(self, event: Event) -> None:
            event.left, event.is_stuck = 3, self.is_stuck

    class Event:
        left, is_stuck = 0, False

        def __init__(self, device: object) -> None: ...

        @property
        def is_reached(self) -> bool:
            self.left -= 1
            return self.left <= 0 and (not self.is_stuck or (made.frees and made.is_aborted.is_set()))

    for name, stand_in in {"Arena": Arena, "Stream": Stream, "Event": Event}.items():
        monkeypatch.setattr(nccl, name, stand_in)
    monkeypatch.setattr(messages, "Event", Event)
    monkeypatch.setattr(nccl, "load_nccl", lambda: made)
    monkeypatch.setattr(messages, "ABORT_SECONDS", 0.2)
    return made


class Abandonable(contextlib.nullcontext[None]):
    """A device, which knows whether it was abandoned."""

    is_abandoned = False

    def abandon(self) -> None:
        self.is_abandoned = True


def joined(clock: Clock | None = None) -> JoinedCards:
    return JoinedCards(Abandonable(), RANK, SIZE, IDENTITY, clock or Clock())  # type: ignore[arg-type]  # a stand-in


def stream() -> Any:
    return nccl.Stream(None)  # type: ignore[arg-type]


def test_cards_join_and_greet_before_anything_is_captured(standin: StandIn) -> None:
    clock = Clock()
    joined(clock)
    assert standin.calls == [
        ("init", SIZE, RANK, IDENTITY),
        ("group_start",), ("send", 0, 1000, 1, 70), ("send", 2, 1002, 1, 70), ("recv", 0, 1003, 1, 70),
        ("recv", 2, 1005, 1, 70), ("group_end",),
        ("close",),
    ]  # fmt: skip
    assert len(clock.waits) == 3  # for the communicator, for the messages to be under way, and to be there


def test_messages_are_one_group_on_one_stream(standin: StandIn) -> None:
    cards, on = joined(), stream()
    standin.calls.clear()
    cards.put([Message(2, 8, 12), Message(0, 20, 4)], [Message(0, 40, 16)], on)
    assert standin.calls == [
        ("group_start",), ("send", 2, 8, 12, on.number), ("send", 0, 20, 4, on.number),
        ("recv", 0, 40, 16, on.number), ("group_end",),
    ]  # fmt: skip
    cards.put([], [Message(2, 0, 1)], on)  # NCCL is through with the ones before, or the stand-in would object


def test_what_nccl_refuses_is_told(standin: StandIn) -> None:
    cards = joined()
    standin.failure = Result.RemoteError
    for call in (lambda: cards.put([Message(0, 0, 1)], [], stream()), lambda: cards.wait(stream())):
        with pytest.raises(BackendError, match=r"rank 1 of 3.*RemoteError: the cable is out.*NCCL_DEBUG"):
            call()


def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_limit(standin: StandIn) -> None:
    clock = Clock()
    cards, on = joined(clock), stream()
    on.is_stuck = True
    with pytest.raises(RankError, match="steps of several cards"):
        cards.wait(on)
    assert cards.abort(on) and cards.abort(on)
    assert standin.calls[-1] == ("abort",) and standin.calls.count(("abort",)) == 1 and cards.is_aborted
    for call in (lambda: cards.put([], [], on), lambda: cards.wait(on)):
        with pytest.raises(BackendError, match="broken off"):
            call()


def test_ranks_that_never_join_are_not_waited_for_either(standin: StandIn) -> None:
    standin.looks = 1000
    with pytest.raises(RankError, match="joining cards"):
        joined()
    assert standin.is_aborted.wait(10.0)


class Refusing:
    """A finder of modules that finds no nccl."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "nccl":
            raise ModuleNotFoundError("No module named 'nccl'", name="nccl")


def test_without_nccl4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "nccl"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingPackageError, match=re.escape("mlpgpu[nccl]")):
        bindings.load_nccl()


def test_nccl4py_has_the_functions_that_are_called() -> None:
    """Their names and arguments, where the package is installed; the library need not be."""
    pytest.importorskip("nccl.bindings")
    from nccl.bindings import nccl as real  # type: ignore[import-not-found,unused-ignore]

    for name in ("send", "recv", "group_start", "group_end", "comm_init_rank_scalable", "comm_get_async_error",
                 "comm_abort", "get_last_error", "get_unique_id", "get_version"):  # fmt: skip
        ours = getattr(StandIn, name).__code__
        given = ", ".join(ours.co_varnames[1 : ours.co_argcount])
        signature = re.sub(r"\b(intptr_t|size_t|int) ", "", getattr(real, name).__doc__.partition(" ->")[0])
        assert signature == f"{name}({given})"
    config = real.Config()
    config.blocking = 0
    assert config.blocking == 0 and isinstance(config.ptr, int) and int(real.DataType.Int8) == 0
    assert [real.Result[each.name].value for each in Result] == [each.value for each in Result]
    assert len(bytes(real.UniqueId())) == len(IDENTITY)


# --- which cards ---


CARDS = [Card("a", "0000:01:00.0", ("H200", "sm_90a", 132)), Card("a", "0000:02:00.0", ("H200", "sm_90a", 132))]


def test_cards_of_one_kind_are_taken_without_a_word() -> None:
    cards = [*CARDS, Card("b", "0000:01:00.0", CARDS[0].kind)]
    check_cards(cards)
    warn_of_kinds(cards)  # an error here, if it did


def test_two_ranks_on_one_card_are_refused() -> None:
    with pytest.raises(RankError, match=r"0000:02:00.0 of a on ranks 1 and 2.*as many ranks on a host as it has cards"):
        check_cards([*CARDS, CARDS[1]])


def test_cards_of_several_kinds_work_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="H200 on rank 0, L4 on rank 2"):
        warn_of_kinds([*CARDS, Card("b", "0000:01:00.0", ("L4", "sm_89", 58))])


def test_one_shard_is_for_cards_of_one_kind() -> None:
    """Each rank computes it, and nothing makes their parameters alike."""
    kinds = [card.kind for card in CARDS]
    Exchange(Ranks(None), None, kinds).check_kinds()  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"one kind, got H200, L4.*streams=2"):
        Exchange(Ranks(None), None, [*kinds, ("L4", "sm_89", 58)]).check_kinds()  # type: ignore[arg-type]


def test_a_rank_that_cannot_join_is_an_error_on_all() -> None:
    with pytest.raises(MissingPackageError, match=r"rank 1 of 2 on b.*No module"):
        check_problems([CARDS[0], Card("b", "0", CARDS[0].kind)], ["", "No module named 'nccl'"])


@pytest.mark.parametrize(
    ("cards", "local", "expected"), [(4, 0, 0), (4, 3, 3), (1, 3, 0), (2, 2, "3 or more, one for each rank")]
)
def test_a_rank_has_the_card_of_its_number_on_the_host(
    cards: int, local: int, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one card in sight, its launcher may have shown it that one alone; that no two have it is checked later."""
    for name, value in {"ranks": 8, "local_rank": local, "count_devices": cards}.items():
        monkeypatch.setattr(cuda_backend, name, lambda value=value: value)
    if isinstance(expected, int):
        assert own_card() == expected
    else:
        with pytest.raises(ConfigurationError, match=expected):
            own_card()


# --- joining, and what a step asks for ---


class Ranks:
    """A communicator of which all other ranks say what this one says; ``first`` is what rank 0 broadcasts."""

    rank, size = RANK, SIZE

    def __init__(self, first: Any) -> None:
        self.first, self.wait_until = first, Clock()

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, Card):
            return [Card(value.host, f"{value.bus}-{rank}", value.kind) for rank in range(SIZE)]
        return [value] * SIZE

    def broadcast(self, value: Any) -> Any:
        return self.first

    def limited(self, what: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


def test_all_ranks_join_by_the_word_of_rank_0_once(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    word = IDENTITY[::-1]
    monkeypatch.setattr(exchange, "communicator", lambda: Ranks(word))
    monkeypatch.setattr(exchange, "_joined", [])
    card: Any = SimpleNamespace(
        name="H200", arch="sm_90a", multiprocessors=132, bus_id="0000:01:00.0", reaches=lambda bus: False
    )
    assert join(card) is join(card)
    assert [call for call in standin.calls if call[0] == "init"] == [("init", SIZE, RANK, word)]


def test_a_collective_is_bound_to_addresses(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "check_collectives", lambda of_ranks: None)
    cards = joined()
    made = Exchange(Ranks(None), cards, [])  # type: ignore[arg-type]
    standin.calls.clear()
    collective = Collective(
        "partials", (Transfer(0, At("partials", 3), 5, 4), Transfer(2, At("sums", 1), 2, 8)),
        (Transfer(2, At("nodes", 7), 6, 4),),
    )  # fmt: skip
    on = stream()
    made.bind([collective], {"partials": 1024, "sums": 4096, "nodes": 8192}).bind(collective)(on)
    assert standin.calls[1:-1] == [
        ("send", 0, 1024 + 12, 20, on.number), ("send", 2, 4096 + 8, 16, on.number),
        ("recv", 2, 8192 + 28, 24, on.number),
    ]  # fmt: skip


@pytest.mark.parametrize("frees", [True, False])
def test_steps_that_cannot_end_are_broken_off_and_stay_so(frees: bool, standin: StandIn) -> None:
    """Graphs are destroyed once the card is through with them; a card that never is is left alone."""
    standin.frees = frees
    cards: Any = joined()
    training: Any = object.__new__(Training)
    on = stream()
    on.is_stuck = True
    made = Exchange(Ranks(None), cards, [])  # type: ignore[arg-type]  # stand-ins
    training._stream, training._exchange = on, made
    training._workspace = SimpleNamespace(device=contextlib.nullcontext())
    training.graphs = SimpleNamespace(close=lambda: standin.calls.append(("graphs",)))
    log = StepLog(2)
    log.begin()
    log.put(lambda: training._wait(np.ones((2, 2)), None))
    with pytest.raises(RankError, match="one that hangs"):
        log.finish()
    assert standin.calls[-1] == (("graphs",) if frees else ("abort",)) and ("abort",) in standin.calls
    assert cards.device.is_abandoned != frees
    with pytest.raises(BackendError, match="broken off"):
        log.finish()
    assert log.finished == 0 and not log.is_whole


# --- waiting for cards, by real ranks under mpirun ---

WAITING = """
    import os, signal, sys, time
    from mlpgpu.errors import RankError
    from mlpgpu.ranks import communicator

    c = communicator()
    c.barrier()
    begun = time.monotonic()
    def never():
        return False
"""
ENDS = {
    "a rank that hangs": ("time.sleep(4 if c.rank else 0)", "1", "one that does not come, or hangs", 0.9),
    "a rank that fails": ("if c.rank: raise ValueError('broken')", "60", "rank 1 failed: ValueError: broken", 0.0),
    "a rank that is killed": ("if c.rank: os.kill(os.getpid(), 9)", "60", "rank 1 was killed or crashed", 0.0),
    "a rank that has ended": ("if c.rank: sys.exit()", "60", "rank 1 at its end", 0.4),
}


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", ENDS)
def test_work_that_another_rank_never_ends_is_left(case: str, tmp_path: Path) -> None:
    other, limit, told, least = ENDS[case]
    script = f"""
    if c.rank == 0:
        try:
            c.wait_until(never, "steps of several cards")
        except RankError as error:
            seconds = time.monotonic() - begun
            print(f"told after {{seconds:.1f}}: {{error}}", flush=True)
            assert {least} <= seconds < 30
    time.sleep(2.0 if c.rank else 0.0)  # by then rank 0 waits
    {other}
    """
    done = run_ranks(tmp_path, 2, dedent(WAITING + script), MLPGPU_RANKS_TIMEOUT=limit)
    # mpirun may end rank 0 as well, where the other one is killed, before it has said more than that.
    assert case == "a rank that is killed" or "steps of several cards on rank 0 of 2" in done.output
    assert told in done.output + done.errors


def test_work_that_ends_is_waited_for(tmp_path: Path) -> None:
    script = """
    ends = time.monotonic() + 0.3
    c.wait_until(lambda: time.monotonic() > ends, "steps")
    assert 0.3 <= time.monotonic() - begun < 5
    print("done", flush=True)
    """
    done = run_ranks(tmp_path, 2, dedent(WAITING + script))
    assert (done.code, done.output) == (0, "done\n" * 2), done.errors


# --- a card that hangs with another rank, in calls that no exception ends ---

HANGING = """
    import os, signal, threading
    from contextlib import nullcontext
    from types import SimpleNamespace
    from unittest.mock import MagicMock
    import numpy as np
    from mlpgpu.backends import Sampling
    from mlpgpu.backends.base import StepLog
    from mlpgpu.backends.cuda.exchange import Exchange
    from mlpgpu.backends.cuda.run.training import Training
    from mlpgpu.backends.cuda.runtime import JoinedCards, messages, nccl
    from mlpgpu.ranks import communicator

    c = communicator()
    c.barrier()
    c._seconds = 1.0
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

    class Card(nullcontext):
        is_idle = is_abandoned = False
        def abandon(self):
            self.is_abandoned = True
        def free(self):  # waits for the card, as the driver may
            if not (self.is_idle or self.is_abandoned):
                hang()
        def hear(self, handle):
            self.is_idle = {hears}
            hang()

    class Event:
        def __init__(self, device):
            self.device = device
        @property
        def is_reached(self):
            return self.device.is_idle

    def hang(*arguments):
        threading.Event().wait()

    nccl.Event = messages.Event = Event
    card = Card()
    cards = object.__new__(JoinedCards)
    results = SimpleNamespace(Success=0, InProgress=7)
    cards._nccl = SimpleNamespace(Result=results, comm_get_async_error=lambda handle: 0, comm_abort=card.hear)
    cards.device, cards._handle, cards._wait = card, 1, c.wait_until
    training = object.__new__(Training)
    for name in ("_workspace", "_optimizer", "_orders", "_stream", "binder"):
        setattr(training, name, MagicMock())
    training._state, training._persistent, training._prologue = MagicMock(were_set=False), None, []
    training._workspace.numbers.download_losses = lambda count: (np.ones((count, 2)), None)
    training.sampling, training.data = Sampling(8, 4, seed=1), MagicMock(reach=lambda row: 8)
    training.graphs = SimpleNamespace(close=card.free, launch={launch})
    training._exchange = Exchange(c, cards, [])
    try:
        training.run(0, np.ones(2), StepLog(2))
    finally:
        card.free()  # what a trainer does while an error passes
"""
HANGS = {
    "NCCL waits for the other rank's process": ("True", "lambda *given: None"),
    "kernels do not hear that they are to end": ("False", "lambda *given: None"),
    "launches wait for kernels": ("True", "hang"),
}


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", HANGS)
def test_a_rank_ends_by_the_time_limit_wherever_the_card_hangs(case: str, tmp_path: Path) -> None:
    hears, launch = HANGS[case]
    script = dedent(HANGING).replace("{hears}", hears).replace("{launch}", launch)
    done = run_ranks(tmp_path, 2, script)
    assert done.code == 1
    assert "mlpgpu: rank 0 of 2 failed:" in done.errors, done.errors
    assert "RankError: steps of several cards on rank 0 of 2: expected all ranks within 1 s" in done.errors
    assert done.seconds < 40.0
