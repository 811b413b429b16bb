"""The orders of a training set's epochs, made while the card works on the epoch before.

The first epoch's order comes from the host, which sends the rows in it.  Of a set that stays on the card the later
ones are lists of places, and the next list lies there before its epoch begins.  The host makes the lists of small sets;
those of large ones come from the card itself: the same random words, sorted by a stable sort, give the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...random import WORDS_PER_BLOCK, Purpose
from ..base import Sampling
from . import kernels
from .driver import Device, Event, Stream
from .feed import Feed
from .kernels import ROW_THREADS, ceil_div
from .launches import At, Launch
from .sorting import Chain

LEAST_ROWS = 1 << 17  # of a set that the card sorts: the host has sorted fewer before an epoch ends
MOST_BLOCKS = 1024
KEYS, SORTED, ROOM = "row keys", "next order", ("sorted keys", "sorted rows")

Bound = Callable[[Stream], None]


def order_launches(rows: int) -> tuple[dict[str, int], list[Launch]]:
    """The bytes of arrays, and the launches that fill ``next order`` with ``places`` (rows,) in an epoch's order."""
    chain = Chain()
    blocks = min(ceil_div(rows, WORDS_PER_BLOCK * ROW_THREADS), MOST_BLOCKS)
    words = Launch(
        kernels.random_words(),
        (blocks, 1, 1),
        {
            "seed": At("seed"), "purpose": int(Purpose.EPOCH_ORDER), "step": At("epoch"), "n": rows, "words": At(KEYS),
        },
    )  # fmt: skip
    spare = At(ROOM[0]), At(ROOM[1])
    sort = list(chain.sort("uint64", rows, At(KEYS), At("places"), sorted_values=At(SORTED), spare=spare))
    sizes = dict.fromkeys((KEYS, ROOM[0]), 8 * rows) | dict.fromkeys(("places", ROOM[1], SORTED), 4 * rows)
    return sizes | chain.bytes, [words, *sort]


class Orders:
    """The epochs of one training set.

    Arguments:
        stream: what computes.
        bind: makes launches ready, with the number of the epoch that they are for.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        data: Feed,
        sampling: Sampling,
        bind: Callable[[Sequence[Launch], int], list[Bound]],
    ) -> None:
        self._device, self._stream, self._data, self._sampling, self._bind = device, stream, data, sampling, bind
        self._epoch = -1  # the one that is under way
        self._made = -1, np.empty(0, np.int64)  # the next one and its order, of a set that does not stay
        self._listed = -1  # the one whose list is on the card, or on its way
        rows = sampling.rows
        self._sizes, self._launches = order_launches(rows)
        has_room = min(data.left_bytes, device.free_bytes) >= sum(self._sizes.values())
        self._on_card = sampling.shuffle and data.stays and has_room and rows >= LEAST_ROWS
        if not self._on_card:
            self._sizes = {SORTED: self._sizes[SORTED]}
        self._lister: Stream | None = None  # beside the one that computes
        self._ready, self._taken = Event(device), Event(device)  # the list is made; the stream has a copy

    def begin(self, epoch: int) -> None:
        """Let the stream go through the set in the order of ``epoch``, if it does not yet."""
        if epoch == self._epoch:
            return
        if epoch == self._listed:
            self._data.begin_listed(SORTED, self._ready)
            self._stream.record(self._taken)
        else:
            self._data.begin(self._made[1] if epoch == self._made[0] else self._sampling.order(epoch))
        self._epoch = epoch

    def prepare(self, epoch: int) -> None:
        """Make an order to come, beside what the stream was given so far."""
        if not self._data.stays:
            self._made = epoch, self._sampling.order(epoch)
            return
        if self._lister is None:
            self._lister = Stream(self._device)
            self._data.reserve(self._sizes)
            if self._on_card:
                assert self._data.place_of is not None
                self._lister.fill(self._data.addresses["tile sums"], self._sizes["tile sums"])
                self._lister.upload(self._data.addresses["places"], self._data.place_of.astype(np.int32))
                self._lister.synchronize()  # before the array goes
        self._lister.wait(self._taken)
        if self._on_card:
            for launch in self._bind(self._launches, epoch):
                launch(self._lister)
        else:
            self._data.list_ahead(self._sampling.order(epoch), self._lister, SORTED)
        self._lister.record(self._ready)
        self._listed = epoch
