"""A data set partitioned over the cards of several ranks, which read each other's memory.

Each card keeps the rows that its shards are made of in the first epoch that the set is visited in.  A row's *place*
names its card and where it lies there: ``rank · stride + place in that card's partition``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ... import kernels
from ...exchange import Exchange
from ...runtime import LoadedKernels, Stream, pack
from .own_rows import OwnRows, Run


class Partitions:
    """The partitions of all ranks, seen by one of them; all ranks make this object together.

    Arguments:
        of_ranks: the rows of each rank.
        kernels_of: loads the kernels that take rows.
        row_bytes: of each array of the set.
        addresses: of this rank's partition of each array.

    Raises:
        BackendError: another card's memory cannot be mapped.
    """

    def __init__(
        self,
        exchange: Exchange,
        of_ranks: Sequence[OwnRows],
        loaded: LoadedKernels,
        row_bytes: Mapping[str, int],
        addresses: Mapping[str, int],
    ) -> None:
        self._exchange, self._of_ranks, self._loaded, self._row_bytes = exchange, of_ranks, loaded, row_bytes
        self._entries = {name: kernels.take_partition(size) for name, size in row_bytes.items()}
        loaded.load(self._entries.values())
        self._mapped = exchange.map([addresses[name] for name in row_bytes])  # held as long as rows may be read
        own = {exchange.rank: [addresses[name] for name in row_bytes]}
        of_peers = {peer: [place.address for place in places] for peer, places in self._mapped.items()}
        self._addresses = {peer: dict(zip(row_bytes, found, strict=True)) for peer, found in (own | of_peers).items()}

    @property
    def stride(self) -> int:
        """By how much the places of two ranks' first rows differ."""
        return max(own.count for own in self._of_ranks)

    def place_of(self, order: np.ndarray) -> np.ndarray:
        """The place of each row, (rows,) int64, by the ``order`` (rows,) int64 of the epoch that partitioned it."""
        places = np.empty(len(order), np.int64)
        for rank, own in enumerate(self._of_ranks):
            places[order[own.find()]] = rank * self.stride + np.arange(own.count)
        return places

    def wait_for_all(self) -> None:
        """Wait until all ranks have come here, each of which has its partition on its card by then."""
        self._exchange.gather(None)

    def take(self, stream: Stream, sources: int, runs: Iterable[Run], batch_rows: int, to: Mapping[str, int]) -> None:
        """Bring rows of an epoch, from whichever cards they lie on.

        Arguments:
            sources: address of the places of the epoch's rows, (rows,) int32.
            to: where the first row goes, of each array; the others follow.
        """
        runs, ranks, first = list(runs), len(self._of_ranks), self._exchange.rank
        for peer in (*range(first, ranks), *range(first)):  # so that no card is read by all others at once
            part = slice(peer * self.stride, peer * self.stride + self._of_ranks[peer].count)
            for name, entry in self._entries.items():
                size, place = self._row_bytes[name], to[name]
                for run in runs:
                    values = {
                        "places": sources, "first": run.first, "of_batch": run.of_batch, "batch_rows": batch_rows,
                        "count": run.rows, "begin": part.start, "end": part.stop,
                        "partition": self._addresses[peer][name], "row_bytes": size, "rows": place,
                    }  # fmt: skip
                    packed = pack(entry, [values[argument.name] for argument in entry.arguments])
                    self._loaded[entry].launch(stream, kernels.partition_grid(run.rows, size), packed)
                    place += run.rows * size
