"""The orders of a training set's epochs, made while the card works on the epoch before.

The first epoch's order comes from the host, which sends the rows in it.  For a set that stays on the card, later orders
are lists of positions in it, and the next list is on the card before its epoch begins.  The card makes the lists of
large sets: the same random words, in a stable sort, give the same order.  The host makes those of others, until the
card has waited for them too long: epochs of few steps are shorter than a sort by the host.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .....random import WORDS_PER_BLOCK, Purpose
from ....base import Sampling
from ... import kernels
from ...kernels.launches import At, Launch
from ...runtime import Device, Event, Replay, Stream, capture
from ...select.data import sorts_on_card, sorts_on_card_after
from ..primitives import Chain, grid_over
from .feed import Feed

KEYS, SORTED, SPARE = "row keys", "next order", ("sorted keys", "sorted rows")


def order_launches(rows: int) -> tuple[dict[str, int], list[Launch]]:
    """The bytes of arrays, and the launches that fill ``next order`` with ``places`` (rows,) in an epoch's order."""
    chain = Chain()
    words = Launch(
        kernels.random_words(),
        grid_over(rows, WORDS_PER_BLOCK),
        {
            "seed": At("seed"), "purpose": int(Purpose.EPOCH_ORDER), "step": At("epoch"), "n": rows, "words": At(KEYS),
        },
    )  # fmt: skip
    spare = At(SPARE[0]), At(SPARE[1])
    sort = list(chain.sort("uint64", rows, At(KEYS), At("places"), sorted_values=At(SORTED), spare=spare))
    sizes = dict.fromkeys((KEYS, SPARE[0]), 8 * rows) | dict.fromkeys(("places", SPARE[1], SORTED), 4 * rows)
    return sizes | chain.bytes, [words, *sort]


class Orders:
    """The epochs of one training set.

    Arguments:
        stream: the stream that computes.
        bind: makes launches ready for streams, given the number of the epoch that they are for.
        are_compiled: whether to load these kernels runs no compiler.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        data: Feed,
        sampling: Sampling,
        bind: Callable[[Sequence[Launch], int], list[Callable[[Stream], None]]],
        are_compiled: Callable[[Iterable[kernels.Entry]], bool],
    ) -> None:
        self._device, self._stream, self._data, self._sampling, self._bind = device, stream, data, sampling, bind
        self._epoch = -1  # the epoch under way
        self._made = -1, np.empty(0, np.int64)  # the next epoch and its order, of a set that does not stay
        self._listed = -1  # the epoch whose list is on the card, or is being copied
        rows = sampling.rows
        self._sizes, self._launches = order_launches(rows)
        has_room = min(data.left_bytes, device.free_bytes) >= sum(self._sizes.values())
        self._may_sort = sampling.shuffle and data.stays and has_room
        self._on_card = self._may_sort and sorts_on_card(rows).holds
        # A closure over `self` would keep it, and all that it holds, until garbage is collected.
        self._is_compiled = functools.cache(functools.partial(_are_compiled, self._launches, are_compiled))
        self._sort: Replay | None = None  # of the words of an epoch's rows
        self._waited = 0.0  # seconds, of the card for lists of the host
        self._lister: Stream | None = None  # makes lists, beside the stream that computes
        self._ready, self._taken = Event(device), Event(device)  # when the list is made, and when it is copied
        self._trained = Event(device)  # when the stream has done what it was given before a list was begun

    def begin(self, epoch: int) -> None:
        """Let the stream visit the rows in the order of ``epoch``, unless it does so already."""
        if epoch == self._epoch:
            return
        if epoch == self._listed:
            self._data.begin_listed(SORTED, self._ready)
            self._stream.record(self._taken)
        else:
            self._data.begin(self._made[1] if epoch == self._made[0] else self._sampling.order(epoch))
        self._epoch = epoch

    def prepare(self, epoch: int) -> None:
        """Make the order of a later epoch, beside the work that the stream was given so far."""
        if not self._data.stays:
            self._made = epoch, self._sampling.order(epoch)
            return
        if self._lister is None:
            self._lister = Stream(self._device, "orders")
            self._data.arrays.allocate({SORTED: self._sizes[SORTED]})
        self._lister.wait(self._taken)
        if self._on_card:
            self._list_on_card(epoch, self._lister)
        else:
            self._list_on_host(epoch, self._lister)
        self._lister.record(self._ready)
        self._listed = epoch

    def _list_on_card(self, epoch: int, lister: Stream) -> None:
        words, *sort = self._launches
        if self._sort is None:
            assert self._data.place_of is not None
            self._data.arrays.allocate(self._sizes)
            addresses, places = self._data.arrays.addresses, self._data.place_of.astype(np.int32)
            lister.fill(addresses["tile sums"], self._sizes["tile sums"])
            lister.upload(addresses["places"], places)
            lister.synchronize()  # before the array goes
            bound = self._bind(sort, epoch)
            with capture(lister, "an epoch's order") as graph:
                for put in bound:
                    put(lister)
            self._sort = graph.instantiate()
        for put in self._bind([words], epoch):
            put(lister)
        self._sort.launch(lister)

    def _list_on_host(self, epoch: int, lister: Stream) -> None:
        begun = time.perf_counter()
        self._stream.record(self._trained)
        self._data.list_next(self._sampling.order(epoch), lister, SORTED)
        if self._trained.is_reached:
            self._waited += time.perf_counter() - begun
        self._on_card = self._may_sort and sorts_on_card_after(self._waited, is_compiled=self._is_compiled).holds


def _are_compiled(launches: Sequence[Launch], of_entries: Callable[[Iterable[kernels.Entry]], bool]) -> bool:
    return of_entries(launch.entry for launch in launches)
