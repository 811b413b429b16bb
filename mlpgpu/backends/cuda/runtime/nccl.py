"""Cards of several processes, joined by NCCL: what one sends another goes from memory to memory.

A process joins one card.  The communicator is nonblocking: no call of NCCL's waits for another rank, but for that which
aborts it.  So a rank can stop waiting, and :meth:`JoinedCards.abort` ends what is under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from ....errors import BackendError
from .bindings import load_nccl
from .device import Device
from .memory import Arena
from .messages import Message, Wait, broken_off, comes_to_rest
from .streams import Event, Stream


def check_nccl() -> None:
    """Raise MissingPackageError where nccl4py or NCCL's library is not installed."""
    load_nccl()


def new_identity() -> bytes:
    """A word that one rank makes and by which all of them find each other, each word once.

    Raises:
        MissingPackageError: nccl4py or NCCL's library is not installed.
    """
    return bytes(load_nccl().get_unique_id())


class JoinedCards:
    """This process's card among those of all ranks, which make this object together; inside ``with device:``.

    Arguments:
        identity: the word of :func:`new_identity`, the same on all ranks.

    Raises:
        BackendError: NCCL refuses, of which it says why.
        MissingPackageError: nccl4py or NCCL's library is not installed.
    """

    lanes = 1  # NCCL's messages between two cards come one after another

    def __init__(self, device: Device, rank: int, size: int, identity: bytes, wait: Wait) -> None:
        self.device, self.rank, self.size = device, rank, size
        self._nccl: Any = load_nccl()
        self._wait = wait
        config = self._nccl.Config()
        config.blocking = 0
        self._handle: Any = self._nccl.comm_init_rank_scalable(size, rank, 1, bytearray(identity), config.ptr)
        stream = Stream(device, "greeting")
        try:
            self._settle("joining cards by NCCL")
            self._greet(stream)
        except BaseException:
            self.abort(stream)
            raise

    @property
    def is_aborted(self) -> bool:
        """Whether it is of no more use."""
        return self._handle is None

    def reach(self, sent: Sequence[Message], received: Sequence[Message]) -> list[Message]:
        """What is sent: NCCL knows where it goes."""
        return list(sent)

    def put(self, sent: Sequence[Message], received: Sequence[Message], stream: Stream, lane: int = 0) -> None:
        """Put messages on a stream, all of them as one piece of work, or into the graph that it is captured in.

        Between two ranks the first that one sends is the first that the other receives; sizes must agree.

        Raises:
            BackendError: NCCL refuses.
        """
        nccl = self._nccl
        byte = int(nccl.DataType.Int8)
        self._check()
        nccl.group_start()
        try:
            for each in sent:
                nccl.send(each.address, each.nbytes, byte, each.peer, self._handle, stream.number)
            for each in received:
                nccl.recv(each.address, each.nbytes, byte, each.peer, self._handle, stream.number)
        finally:
            nccl.group_end()
        self._settle("messages between cards")  # until then nothing else may go on the stream

    def wait(self, stream: Stream, reached: Event | None = None) -> None:
        """Wait for the work that the stream was given; with ``reached``, for what is before that event.

        Raises:
            BackendError: NCCL has failed.
            and what ``wait`` raises where another rank has failed, or does not come.
        """
        if reached is None:
            reached = Event(self.device)
            stream.record(reached)
        end = reached

        def is_done() -> bool:
            self._check()
            return end.is_reached

        self._wait(is_done, "steps of several cards")

    def abort(self, stream: Stream) -> bool:
        """End what a stream of this card was given, whatever becomes of other ranks; nothing can be sent afterwards.

        NCCL tells its kernels to end, and then waits: for graphs with messages to be destroyed, and for processes of
        this host to close their connections, which one that hangs never does.  So a thread of its own calls it, and
        nothing may be destroyed before the card is idle: the driver waits where the kernels do.

        Returns:
            whether the stream has come to its end; otherwise the device is abandoned.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            threading.Thread(target=self._abort, args=(handle,), name="mlpgpu abort", daemon=True).start()
        return comes_to_rest(self.device, stream)

    def _abort(self, handle: Any) -> None:
        # NCCL makes the thread's card current again, which without a context is card 0.
        with contextlib.suppress(Exception), self.device:  # what it says of a communicator that is given up
            self._nccl.comm_abort(handle)

    def _greet(self, stream: Stream) -> None:
        """Send a byte to each rank: NCCL connects two cards at their first message, which is to be in no graph."""
        arena = Arena(self.device, 2 * self.size)
        address = arena.take(2 * self.size)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [Message(other, address + other, 1) for other in others]
        self.put(sent, [Message(other, address + self.size + other, 1) for other in others], stream)
        self.wait(stream)
        arena.close()

    def _check(self) -> bool:
        """Whether NCCL has nothing left to do before its next call.

        Raises:
            BackendError: it has failed, or was aborted.
        """
        if self._handle is None:
            raise broken_off()
        nccl = self._nccl
        state = nccl.comm_get_async_error(self._handle)
        if state not in (nccl.Result.Success, nccl.Result.InProgress):
            got = f"{nccl.Result(state).name}: {nccl.get_last_error(self._handle)}"
            raise BackendError(
                f"NCCL of rank {self.rank} of {self.size}", expected="messages that arrive", got=got,
                hint="NCCL_DEBUG=INFO in the environment has NCCL say more",
            )  # fmt: skip
        return bool(state == nccl.Result.Success)

    def _settle(self, what: str) -> None:
        self._wait(self._check, what)
