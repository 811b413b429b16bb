"""Cards of one host, each of a process: copy engines bring what one sends from its memory into another's.

No kernel takes part, so that products keep all multiprocessors.  A process maps the memory of the others that it sends
to, and that its kernels are to read.  Before a copy the receiver says that its memory is ready, behind it the sender
that it is there: words of host memory that all processes have mapped, which streams write and wait for.  The host can
write them too, and so end what waits for a rank that does not come.

Short messages that products wait for anyway come by a kernel (:mod:`.message_kernel`), which tells the other cards and
copies in the time that a copy engine takes to begin.  Sums of parts that one launch goes on with it exchanges itself
(:mod:`.part_sums`).
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ....errors import BackendError
from .bindings import CallError, call, cu, drv
from .device import Device, Resource
from .memory import Arena
from .message_kernel import MessageKernel
from .messages import LANES, NAP_SECONDS, Message, Place, Wait, broken_off, comes_to_rest
from .modules import Function
from .part_sums import ExchangedSums
from .streams import Event, Stream

READY, DONE = 0, 1
WORD_BYTES = 64  # so that no two cards write to one cache line of the host
GREETING_SECONDS = 10.0

Gather = Callable[[Any], list[Any]]  # all ranks' values, on each of them


class Words(Resource):
    """Words that ranks of one host share: for each two ranks, lane, and READY or DONE one that the first waits for.

    And for each rank one that tells its kernels that no more messages come.

    Raises:
        BackendError: the driver does not take the memory.
    """

    def __init__(self, device: Device, memory: mmap.mmap, ranks: int) -> None:
        self._words, self._ranks = np.frombuffer(memory, np.uint32), ranks
        address, flags = self._words.ctypes.data, cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
        try:
            call(cu.cuMemHostRegister, address, len(memory), flags)
            super().__init__(device, address)
            self._address = int(call(cu.cuMemHostGetDevicePointer, address, 0))
        except CallError as error:
            raise BackendError("memory that ranks share", expected="to be locked", got=error) from error

    def _destroy(self, handle: Any) -> None:
        call(cu.cuMemHostUnregister, handle)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """How much memory they take."""
        return ranks * (ranks * LANES * 2 + 1) * WORD_BYTES

    def address(self, waiting: int, other: int, lane: int, kind: int) -> int:
        """Where a card finds a word."""
        return self._address + WORD_BYTES * (((waiting * self._ranks + other) * LANES + lane) * 2 + kind)

    def aborted(self, rank: int) -> int:
        """Where a rank's kernels find whether they are to wait no longer."""
        return self._address + WORD_BYTES * (self._ranks * self._ranks * LANES * 2 + rank)

    def release(self, waiting: int) -> None:
        """Set all words that a rank may wait for."""
        of_rank = self._ranks * LANES * 2 * WORD_BYTES // self._words.itemsize
        self._words[waiting * of_rank : (waiting + 1) * of_rank] = 1
        self._words[(self.aborted(waiting) - self._address) // self._words.itemsize] = 1


class PeerMemory(Resource):
    """Another process's memory of its card, mapped here.

    Attributes:
        number: by which that process's driver knows the allocation, and no later one.

    Raises:
        CallError: the driver refuses.
    """

    def __init__(self, device: Device, exported: bytes, number: int) -> None:
        self.number = number
        handle = cu.CUipcMemHandle()
        handle.reserved = exported
        flag = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        super().__init__(device, call(cu.cuIpcOpenMemHandle, handle, int(flag)))

    def _destroy(self, handle: Any) -> None:
        call(cu.cuIpcCloseMemHandle, handle)


class LinkedCards:
    """This process's card among those of all ranks, which make this object together; inside ``with device:``.

    Arguments:
        memory: which all ranks share, of zeros, of ``Words.nbytes(size)``.
        gather: by which ranks tell each other where their memory is.
        load: loads the kernel of :mod:`.message_kernel`, when it is first needed.

    Raises:
        BackendError: the driver does not take the memory.
    """

    lanes = LANES

    def __init__(
        self, device: Device, rank: int, size: int, memory: mmap.mmap, gather: Gather, wait: Wait,
        load: Callable[[], Function],
    ) -> None:  # fmt: skip
        self.device, self.rank, self.size = device, rank, size
        self._gather, self._wait, self._load = gather, wait, load
        self._kernel: MessageKernel | None = None
        self._words = Words(device, memory, size)
        self._mapped = weakref.WeakValueDictionary[tuple[int, bytes], PeerMemory]()
        self.is_aborted = False

    def reach(self, sent: Sequence[Message], received: Sequence[Message]) -> list[Message]:
        """What is sent, with where it goes; all ranks call this, with all that they will send and receive.

        Raises:
            BackendError: memory of another rank cannot be mapped.
        """
        told = self._gather([(each.peer, *_exported(each.address)) for each in received])
        places = {peer: iter([place for to, *place in told[peer] if to == self.rank]) for peer in range(self.size)}
        return [each._replace(to=self._place(each.peer, *next(places[each.peer]))) for each in sent]

    def map(self, addresses: Sequence[int]) -> dict[int, list[Place]]:
        """Where the memory at other ranks' addresses lies here, by rank; all ranks call this, with their own addresses.

        Raises:
            BackendError: memory of another rank cannot be mapped.
        """
        told = self._gather([_exported(address) for address in addresses])
        others = (rank for rank in range(self.size) if rank != self.rank)
        return {rank: [self._place(rank, *exported) for exported in told[rank]] for rank in others}

    def put(self, sent: Sequence[Message], received: Sequence[Message], stream: Stream, lane: int = 0) -> None:
        """Put messages on a stream, or into the graph that it is captured in; lanes do not wait for each other."""
        if self.is_aborted:
            raise broken_off()
        receivers, senders = (sorted({each.peer for each in messages}) for messages in (sent, received))
        self._signal(stream, lane, READY, senders, receivers)
        # Each rank begins with another receiver, so that no card gets all of them at once.
        for each in sorted(sent, key=lambda message: (message.peer - self.rank) % self.size):
            assert each.to is not None
            stream.copy(each.to.address, each.address, each.nbytes)
        self._signal(stream, lane, DONE, receivers, senders)

    def bind(self, sent: Sequence[Message], received: Sequence[Message]) -> Callable[[Stream, int], None]:
        """What puts short messages, again and again, on a stream and lane by a kernel; all ranks call this together.

        Raises:
            BackendError: memory of another rank cannot be mapped, or the kernel not loaded.
        """
        if self._kernel is None:
            aborted = self._words.aborted(self.rank)
            self._kernel = MessageKernel(self.device, self._load(), self.rank, self.size, self.map, aborted)
        puts = [self._kernel.bind(sent, received, lane) for lane in range(LANES)]

        def put(stream: Stream, lane: int) -> None:
            if self.is_aborted:
                raise broken_off()
            puts[lane](stream)

        return put

    def exchange_sums(self, count: int, own: int, rows: int, columns: int) -> ExchangedSums:
        """What a kernel exchanges sums of parts by; all ranks call this together.

        Raises:
            BackendError: memory of another rank cannot be mapped, or the card has no room.
        """
        return ExchangedSums(self.device, count, own, rows, columns, self.map, self._words.aborted(self.rank))

    def wait(self, stream: Stream, reached: Event | None = None) -> None:
        """Wait for the work that the stream was given; with ``reached``, for what is before that event.

        Raises:
            what ``wait`` raises where another rank has failed, or does not come.
        """
        if self.is_aborted:
            raise broken_off()
        if reached is None:
            reached = Event(self.device)
            stream.record(reached)
        end = reached
        self._wait(lambda: end.is_reached, "steps of several cards")

    def abort(self, stream: Stream) -> bool:
        """End what a stream of this card was given, whatever becomes of other ranks; nothing can be sent afterwards.

        Returns:
            whether the stream has come to its end; otherwise the device is abandoned.
        """
        self.is_aborted = True
        # Again and again: streams take a word back when they pass it.
        return comes_to_rest(self.device, stream, lambda: self._words.release(self.rank))

    def greet(self) -> bool:
        """Send a word to each rank; whether theirs have come, as they were sent.  All ranks call this."""
        stream, arena = Stream(self.device, "greeting"), Arena(self.device, 8 * self.size)
        address, others = arena.take(8 * self.size), [rank for rank in range(self.size) if rank != self.rank]
        words = np.zeros(2 * self.size, np.int32)
        words[: self.size] = self.rank + 1
        stream.upload(address, words)
        received = [Message(other, address + 4 * (self.size + other), 4) for other in others]
        try:
            sent = self.reach([Message(other, address + 4 * other, 4) for other in others], received)
        except (BackendError, CallError, drv.Error):
            return False
        self.put(sent, received, stream)
        stream.download(words, address)
        reached, end = Event(self.device), time.monotonic() + GREETING_SECONDS
        stream.record(reached)
        while not reached.is_reached and time.monotonic() < end:
            time.sleep(NAP_SECONDS)
        if not reached.is_reached:
            self.abort(stream)
            return False
        expected = np.arange(1, self.size + 1)
        expected[self.rank] = 0
        return bool((words[self.size :] == expected).all())

    def _signal(self, stream: Stream, lane: int, kind: int, told: Iterable[int], awaited: Iterable[int]) -> None:
        """Tell ranks, then wait for what others tell this one, and take their words back."""
        kinds, equal = cu.CUstreamBatchMemOpType, cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        wait, write = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32, kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        own = [self._words.address(self.rank, other, lane, kind) for other in awaited]
        operations = [
            *(_operation(write, self._words.address(other, self.rank, lane, kind), 1) for other in told),
            *(_operation(wait, address, 1, equal) for address in own),
            *(_operation(write, address, 0) for address in own),
        ]
        if operations:
            call(cu.cuStreamBatchMemOp, stream.bound, len(operations), operations, 0)

    def _place(self, peer: int, exported: bytes, number: int, offset: int) -> Place:
        memory = self._mapped.get((peer, exported))
        if memory is not None and memory.number != number:  # the peer has freed what is still mapped here
            memory.close()
            memory = None
        if memory is None:
            try:
                memory = self._mapped[peer, exported] = PeerMemory(self.device, exported, number)
            except CallError as error:
                raise BackendError(f"memory of rank {peer}'s card", expected="to be mapped", got=error) from error
        return Place(memory, int(memory.handle) + offset)


def _exported(address: int) -> tuple[bytes, int, int]:
    """How another process finds an address: its allocation's handle and number, and how far behind its begin it is.

    A later allocation at the same place may have the same handle, but never the same number.
    """
    base, _ = call(cu.cuMemGetAddressRange, cu.CUdeviceptr(address))
    number = call(cu.cuPointerGetAttribute, cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, base)
    return bytes(call(cu.cuIpcGetMemHandle, base).reserved), int(number), address - int(base)


def _operation(kind: Any, address: int, value: int, flags: int = 0) -> Any:
    made = cu.CUstreamBatchMemOpParams()
    made.operation = kind
    of_kind = made.waitValue  # which has the same layout as one that writes
    of_kind.operation, of_kind.address = kind, cu.CUdeviceptr(address)
    of_kind.value, of_kind.flags = cu.cuuint32_t(value), int(flags)
    return made
