"""Short messages between linked cards, by a launch on each (``primitives/send_messages.cuh``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..kernels import MESSAGE_BLOCKS, MESSAGE_WORD_BYTES, message_blocks
from .bindings import drv
from .device import Device
from .memory import Arena
from .messages import LANES, Message, Place
from .modules import Function, pack
from .streams import Stream

READY, DONE = 0, 1
WORDS_BYTES = MESSAGE_BLOCKS * MESSAGE_WORD_BYTES  # of the words that blocks wait for, for one peer, lane and kind


class MessageKernel:
    """The kernel that sends, and words in this card's memory that it waits for; all ranks make this object together.

    Arguments:
        function: of :func:`~mlpgpu.backends.cuda.kernels.send_messages`.
        map_memory: where the memory at other ranks' addresses lies here, by rank.
        aborted: the address of the host's word that ends every wait.

    Raises:
        BackendError: another rank's memory cannot be mapped.
    """

    def __init__(
        self, device: Device, function: Function, rank: int, size: int,
        map_memory: Callable[[Sequence[int]], dict[int, list[Place]]], aborted: int,
    ) -> None:  # fmt: skip
        self._device, self._function, self._rank, self._size, self._aborted = device, function, rank, size, aborted
        nbytes = size * LANES * 2 * WORDS_BYTES
        self._arena = Arena(device, nbytes)
        self._words = self._arena.take(nbytes)
        drv.memset_d8(self._words, 0, nbytes)
        device.synchronize()  # before another rank learns where they are
        self._places = {peer: place for peer, (place,) in map_memory([self._words]).items()}

    def bind(self, sent: Sequence[Message], received: Sequence[Message], lane: int) -> Callable[[Stream], None]:
        """What puts these messages on the stream of this lane; peers bind theirs."""
        receivers, senders = (list(dict.fromkeys(each.peer for each in messages)) for messages in (sent, received))
        table = [len(receivers), len(senders), len(sent)]
        for peer in receivers:
            table += [self._own(peer, lane, READY), self._of(peer, lane, DONE)]
        for peer in senders:
            table += [self._own(peer, lane, DONE), self._of(peer, lane, READY)]
        for each in sent:
            assert each.to is not None
            table += [each.address, each.to.address, each.nbytes]
        words = np.array(table, np.int64)
        arena = Arena(self._device, words.nbytes)
        address = arena.take(words.nbytes)
        drv.memcpy_htod(address, words)
        packed, function = pack(self._function.entry, [address, self._aborted, None]), self._function

        kept = arena, [each.to for each in sent]  # the table, and what is mapped
        # Both of two cards know what the other one sends; of more, a card does not know what others send each other.
        nbytes = max(sum(each.nbytes for each in messages) for messages in (sent, received))
        grid = (message_blocks(nbytes) if self._size == 2 else MESSAGE_BLOCKS), 1, 1

        def put(stream: Stream) -> None:
            assert kept
            function.launch(stream, grid, packed)

        return put

    def _own(self, peer: int, lane: int, kind: int) -> int:
        """The address of words that this card waits for, and a peer writes."""
        return self._words + _offset(peer, lane, kind)

    def _of(self, peer: int, lane: int, kind: int) -> int:
        """The address of words that a peer waits for, and this card writes."""
        return self._places[peer].address + _offset(self._rank, lane, kind)


def _offset(writer: int, lane: int, kind: int) -> int:
    return WORDS_BYTES * ((writer * LANES + lane) * 2 + kind)
