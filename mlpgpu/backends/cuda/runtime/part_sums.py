"""Sums of parts of a network that a kernel exchanges while it runs (``fused/part_sums.cuh``), between linked cards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..kernels import part_sums_words
from .bindings import drv
from .device import Device
from .memory import Arena
from .messages import Place

# Of a flagged word; of the count of a row's messages, and of the word before all counts, that no more will come.
WORD_BYTES, COUNT_BYTES = 8, 4


class ExchangedSums:
    """The table by which a kernel exchanges sums, and this card's inbox; all ranks make this object together.

    Each rank has one part, by its number, of (rows, columns).

    Arguments:
        count: how many parts there are, of which this rank has number ``own``.
        map_memory: where the memory at other ranks' addresses lies here, by rank.
        aborted: the address of the host's word that ends every wait.

    Attributes:
        table: its address.

    Raises:
        BackendError: another rank's memory cannot be mapped, or the card has no room.
    """

    def __init__(
        self, device: Device, count: int, own: int, rows: int, columns: int,
        map_memory: Callable[[Sequence[int]], dict[int, list[Place]]], aborted: int,
    ) -> None:  # fmt: skip
        self.aborted = aborted
        inbox_bytes, counts_bytes = 2 * count * rows * columns * WORD_BYTES, (1 + rows) * COUNT_BYTES
        table = np.zeros(part_sums_words(count), np.int64)
        sizes = {"inbox": inbox_bytes, "counts": counts_bytes, "table": table.nbytes}
        self._arena, addresses = Arena.of(device, sizes)
        inbox, counts, self.table = addresses["inbox"], addresses["counts"], addresses["table"]
        drv.memset_d8(inbox, 0, inbox_bytes)
        drv.memset_d8(counts, 0, counts_bytes)
        device.synchronize()  # before another rank learns where they are
        self._places = {peer: place for peer, (place,) in map_memory([inbox]).items()}
        inboxes = [inbox if part == own else self._places[part].address for part in range(count)]
        table[:] = [count, own, counts, *inboxes]
        drv.memcpy_htod(self.table, table)
