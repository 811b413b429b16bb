"""What ranks tell each other: objects, and arrays without copies.

Every call is collective: all ranks make the same calls in the same order, from one thread at a time.  In each of them
every rank gets one message, perhaps an empty one, from every rank that it hears of, whose tag says which call it is of.
So a rank that waits knows which ranks have not come, and sees it when one has come to another call.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..errors import ConfigurationError, RankError, ShapeError, shown
from .deadline import Deadline
from .watch import GRACE_SECONDS, INTERRUPTED, Watch

CALLS = ("broadcast", "gather", "all_gather", "exchange", "barrier")
MOST_BYTES = 1 << 30  # of one message, since MPI counts by 32 bits
ROUND = 1 << 15  # tags return after so many calls; the least that MPI grants is 32,767 of them, MPICH and Open MPI 2²⁰

SPINS = 200  # looks before a rank that waits lets others have its core
YIELDS = 100  # further looks before it sleeps between them, since a yielding process may get the core back at once
NAP_SECONDS = 50e-6
LONG_NAP_SECONDS = 1e-3
SHORT_WAIT_SECONDS = 0.1  # a longer one is no part of a step
LATE_SECONDS = 0.5  # for what a rank sent before it came to its end


class Communicator:
    """Messages between the ranks, over mpi4py.

    Every call raises :class:`~mlpgpu.errors.RankError` where the ranks make different calls, where a message is not of
    the size expected, and where other ranks have not come within the time limit.

    Arguments:
        mpi: the module ``mpi4py.MPI``.
        comm: its communicator, which nobody else uses.
        seconds: the time limit of a call.
        watch: tells of ranks that have ended.

    Attributes:
        rank, size: this process's number, from 0, and how many there are.
    """

    def __init__(self, mpi: Any, comm: Any, seconds: float, watch: Watch) -> None:
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank, self.size = int(comm.rank), int(comm.size)
        self._mpi, self._comm, self._seconds, self._watch = mpi, comm, seconds, watch
        self._deadline = Deadline(self._end)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._calls = 0
        self._is_forbidden = False
        self._statuses: list[Any] = []
        # A call that failed leaves requests, whose arrays MPI may still write to.
        self._abandoned: list[Any] = []

    def limit(self, seconds: float) -> None:
        """Set the time limit of further calls."""
        self._seconds = seconds

    def broadcast(self, value: Any = None, *, patient: bool = False) -> Any:
        """Rank 0's ``value`` on all ranks, by pickle; with ``patient`` no time limit runs."""
        call = self._begin("broadcast")
        if self.rank == 0:
            sent = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
            self._swap(call, {other: [np.array([sent.size])] for other in self._others}, {}, patient)
            self._swap(call, {key: [sent] for key in self._others}, {}, patient)
            return value
        return pickle.loads(self._receive_bytes(call, [0], patient)[0])

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by pickle, on all ranks."""
        call = self._begin("gather")
        sent = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
        received = self._receive_bytes(call, self._others, False, sent)
        return [value if rank == self.rank else pickle.loads(received[rank]) for rank in range(self.size)]

    def all_gather(self, array: np.ndarray, parts: Sequence[slice]) -> None:
        """Have all ranks get each rank's part of an array, in place.

        Arguments:
            array: of one dimension and contiguous, of the same length and dtype on all ranks.
            parts: a slice for each rank, perhaps an empty one; of this rank's it sends the elements, into the others it
                receives theirs.
        """
        if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
            got = f"shape {array.shape}, strides {array.strides}"
            raise ShapeError("all_gather's array", expected="one dimension, contiguous and writeable", got=got)
        self._check_count("all_gather's parts", parts)
        views = [array[part] for part in parts]
        if not all(view.flags.c_contiguous for view in views):
            raise ConfigurationError("all_gather's parts", expected="slices without a step", got=shown(parts))
        call = self._begin("all_gather")
        own = views[self.rank]
        self._swap(call, {key: [own] for key in self._others}, {other: [views[other]] for other in self._others})

    def exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send an array to each rank, and receive one from each.

        Arguments:
            sent: contiguous arrays, ``sent[r]`` for rank r; one may be empty.
            received: contiguous arrays, ``received[r]`` is filled by rank r's array for this rank, of as many bytes;
                that of this rank gets a copy of what it sends itself.
        """
        self._check_count("exchange's sent", sent)
        self._check_count("exchange's received", received)
        _check_arrays([[array] for array in sent], [[array] for array in received])
        own, to = sent[self.rank], received[self.rank]
        if own.size != to.size:
            raise ShapeError("exchange's received from itself", expected=f"{own.size} elements", got=to.size)
        call = self._begin("exchange")
        if own is not to:
            to.reshape(-1)[...] = own.reshape(-1)
        self._swap(
            call,
            {other: [sent[other]] for other in self._others},
            {other: [received[other]] for other in self._others},
        )

    def exchange_several(self, sent: Sequence[Sequence[np.ndarray]], received: Sequence[Sequence[np.ndarray]]) -> None:
        """Send several arrays to each rank at once, and receive several from each.

        Arguments:
            sent: contiguous arrays, ``sent[r]`` those for rank r; none are sent to this rank itself.
            received: contiguous arrays, ``received[r]`` are filled by rank r's arrays for this rank, of as many bytes
                each, in their order.
        """
        self._check_count("exchange's sent", sent)
        self._check_count("exchange's received", received)
        _check_arrays(sent, received)
        call = self._begin("exchange")
        self._swap(
            call,
            {other: sent[other] for other in self._others},
            {other: received[other] for other in self._others},
        )

    def barrier(self) -> None:
        """Return when all ranks have come."""
        call = self._begin("barrier")
        nothing = np.empty(0, np.uint8)
        self._swap(call, {key: [nothing] for key in self._others}, {key: [nothing] for key in self._others})

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for something that takes all ranks but is no message of theirs here, such as work of their cards.

        Arguments:
            is_done: asked again and again; what it raises ends the wait.
            what: what is waited for.

        Raises:
            KeyboardInterrupt: a rank was interrupted.
            RankError: one has failed or has come to its end, or the time limit is over.
        """
        if self._is_forbidden:
            raise RankError(what, expected="the rank itself", got="a child, in which MPI does not work")
        what = f"{what} on rank {self.rank} of {self.size}"
        looks, started, late = 0, time.monotonic(), 0.0
        while not is_done():
            looks += 1
            if looks <= SPINS:
                continue
            waited = time.monotonic() - started
            time.sleep(NAP_SECONDS if waited < SHORT_WAIT_SECONDS else LONG_NAP_SECONDS)
            self._look_for_failure(what)
            left = self._watch.left
            if left:  # its work may be done all the same
                late = late or waited
                if waited - late > LATE_SECONDS:
                    raise RankError(what, expected="all ranks", got=f"rank {min(left)} at its end")
            if waited > self._seconds:
                hint = "MLPGPU_RANKS_TIMEOUT sets the limit, in seconds"
                expected = f"all ranks within {self._seconds:g} s"
                raise RankError(what, expected=expected, got="one that does not come, or hangs", hint=hint)

    def limited(self, what: str) -> AbstractContextManager[None]:
        """End the process some seconds after the time limit, unless the block has ended.

        It is for calls that may wait for other ranks without looking at the time, such as those of a card's driver.
        """
        return self._deadline.within(self._seconds + GRACE_SECONDS, what)

    def _end(self, what: str) -> None:
        got = "a call that waits for one of them without end"
        error = RankError(
            f"{what} on rank {self.rank} of {self.size}", expected=f"all ranks within {self._seconds:g} s", got=got
        )
        self._watch.end(f"failed: {type(error).__name__}: {error}")

    def _look_for_failure(self, what: str) -> None:
        """Raise if another rank has failed, or was interrupted."""
        failure = self._watch.failure
        if failure is not None:
            if failure.code == INTERRUPTED:
                raise KeyboardInterrupt
            raise RankError(what, expected="all ranks", got=f"rank {failure.rank} {failure.text}")

    def forbid(self) -> None:
        """Have all further calls raise: in a forked child, since MPI does not survive a fork."""
        self._is_forbidden = True

    def _check_count(self, what: str, values: Sequence[Any]) -> None:
        if len(values) != self.size:
            raise ConfigurationError(what, expected=f"{self.size}, one for each rank", got=len(values))

    def _begin(self, name: str) -> tuple[str, int]:
        """Count a call; its name and the tag of its messages."""
        if self._is_forbidden:
            what = f"{name} in a forked child of rank {self.rank}"
            raise RankError(what, expected="the rank itself", got="a child, in which MPI does not work")
        if self._abandoned:
            what = f"{name} of rank {self.rank} of {self.size}"
            raise RankError(what, expected="calls before it that succeeded", got="one that was broken off")
        self._calls += 1
        return name, self._calls % ROUND * len(CALLS) + CALLS.index(name)

    def _receive_bytes(
        self, call: tuple[str, int], sources: list[int], patient: bool, sent: np.ndarray | None = None
    ) -> dict[int, np.ndarray]:
        """Bytes from each of the ``sources``, whose numbers come before; ``sent`` goes to the same."""
        sizes = {source: np.zeros(1, np.int64) for source in sources}
        own = {} if sent is None else {source: [np.array([sent.size])] for source in sources}
        self._swap(call, own, {source: [size] for source, size in sizes.items()}, patient)
        received = {source: np.empty(int(size[0]), np.uint8) for source, size in sizes.items()}
        data = {} if sent is None else {key: [sent] for key in sources}
        self._swap(call, data, {source: [array] for source, array in received.items()}, patient)
        return received

    def _swap(
        self,
        call: tuple[str, int],
        sent: Mapping[int, Sequence[np.ndarray]],
        received: Mapping[int, Sequence[np.ndarray]],
        patient: bool = False,
    ) -> None:
        """Send and receive contiguous arrays, by rank, and return when all of it is done."""
        requests, peers, sizes = [], [], []
        comm, byte, tag = self._comm, self._mpi.BYTE, call[1]
        for other, arrays in received.items():
            for piece in _pieces(arrays):
                requests.append(comm.Irecv([piece, byte], other, tag))
                peers.append(other)
                sizes.append(piece.nbytes)
        for other, arrays in sent.items():
            for piece in _pieces(arrays):
                requests.append(comm.Isend([piece, byte], other, tag))
                peers.append(other)
        while len(self._statuses) < len(requests):
            self._statuses.append(self._mpi.Status())
        statuses = self._statuses[: len(requests)]
        try:
            looks = 0
            while not self._mpi.Request.Testall(requests, statuses):
                looks += 1
                if looks > SPINS:
                    os.sched_yield()
                    if looks > SPINS + YIELDS:
                        self._wait_long(call, requests, peers, statuses, patient)
                        break
            for status, peer, size in zip(statuses, peers, sizes, strict=False):  # the first ones are those received
                if status.Get_count(byte) != size:
                    what = f"{call[0]} of rank {self.rank} of {self.size}"
                    raise RankError(what, expected=f"{size} bytes of rank {peer}", got=status.Get_count(byte))
        except BaseException as error:  # also Ctrl-C
            self._abandoned += [requests, sent, received]
            if isinstance(error, self._mpi.Exception):
                what = f"{call[0]} of rank {self.rank} of {self.size}"
                raise RankError(what, expected="messages of the sizes that it takes", got=str(error)) from error
            raise

    def _wait_long(
        self, call: tuple[str, int], requests: list[Any], peers: list[int], statuses: list[Any], patient: bool
    ) -> None:
        """Wait until all requests are done, with looks at the clock and at the other ranks.

        Raises:
            KeyboardInterrupt: one of them was interrupted.
            RankError: one has failed, has come to its end or to another call, or the time limit is over.
        """
        started, late = time.monotonic(), 0.0
        while not self._mpi.Request.Testall(requests, statuses):
            waited = time.monotonic() - started
            time.sleep(NAP_SECONDS if waited < SHORT_WAIT_SECONDS else LONG_NAP_SECONDS)
            self._look_for_failure(self._describe(call))
            if waited < SHORT_WAIT_SECONDS:
                continue
            self._look_for_others(call, set(peers))
            if self._watch.left:
                late = late or waited
                if waited - late > LATE_SECONDS:
                    self._look_for_left(call, requests, peers)
            if not patient and waited > self._seconds:
                absent = self._absent(requests, peers)
                hint = "MLPGPU_RANKS_TIMEOUT sets the limit, in seconds"
                expected = f"{name_ranks(absent)} within {self._seconds:g} s"
                raise RankError(self._describe(call), expected=expected, got="nothing of them", hint=hint)

    def _describe(self, call: tuple[str, int]) -> str:
        return f"{call[0]}, call {self._calls} of rank {self.rank} of {self.size}"

    def _absent(self, requests: list[Any], peers: list[int]) -> list[int]:
        """The ranks that have not come, or not taken what was sent to them."""
        return sorted({peer for peer, request in zip(peers, requests, strict=True) if not request.Test()})

    def _look_for_left(self, call: tuple[str, int], requests: list[Any], peers: list[int]) -> None:
        """Raise if one of the ranks that this one waits for has come to its script's end."""
        left = self._watch.left
        absent = [rank for rank in self._absent(requests, peers) if rank in left]
        if absent:
            code = f" with exit code {left[absent[0]]}" * (left[absent[0]] != 0)
            raise RankError(self._describe(call), expected="all ranks", got=f"rank {absent[0]} at its end{code}")

    def _look_for_others(self, call: tuple[str, int], waiting: set[int]) -> None:
        """Raise if one of the ranks that this one waits for has come to another call."""
        status = self._mpi.Status()
        for other in waiting:
            if self._comm.Iprobe(other, self._mpi.ANY_TAG, status):
                number, kind = divmod(status.Get_tag(), len(CALLS))
                if number == self._calls % ROUND and CALLS[kind] != call[0]:
                    what = f"call {self._calls} of {self.size} ranks"
                    got = f"{CALLS[kind]} on rank {other}"
                    raise RankError(what, expected=f"{call[0]} on all of them, as on rank {self.rank}", got=got)


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _check_arrays(sent: Sequence[Sequence[np.ndarray]], received: Sequence[Sequence[np.ndarray]]) -> None:
    """Refuse what MPI cannot read or write as it lies."""
    for name, ranks in (("sent", sent), ("received", received)):
        for array in itertools.chain.from_iterable(ranks):
            if not array.flags.c_contiguous or (name == "received" and not array.flags.writeable):
                expected = "contiguous arrays" if name == "sent" else "contiguous, writeable arrays"
                got = f"shape {array.shape}, strides {array.strides}"
                raise ShapeError(f"exchange's {name}", expected=expected, got=got)


def _pieces(arrays: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Arrays, those in pieces that are longer than MPI can count the bytes of."""
    for array in arrays:
        if array.nbytes <= MOST_BYTES:
            yield array
        else:
            flat = array.reshape(-1).view(np.uint8)
            yield from (flat[begin : begin + MOST_BYTES] for begin in range(0, flat.size, MOST_BYTES))
