"""Which rows of an epoch the shards of one rank are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .....plan import shards_of


class Run(NamedTuple):
    """The same part of some batches: ``of_batch`` rows from position ``first`` of an epoch on, as many a batch further,
    and so on, ``rows`` in all."""

    first: int
    of_batch: int
    rows: int


@dataclass(frozen=True)
class OwnRows:
    """A rank's rows of an epoch: in each batch those of its shards, which are neighbours; perhaps none.

    Attributes:
        rows: of an epoch.
        batch_rows: of a batch; the last one may have fewer.
        shards: those of a batch that the rank computes, of ``shard_count``.
    """

    rows: int
    batch_rows: int
    shards: range = range(1)
    shard_count: int = 1

    @classmethod
    def of_ranks(cls, rows: int, batch_rows: int, shard_count: int, ranks: int) -> list[OwnRows]:
        """Those of each rank."""
        return [cls(rows, batch_rows, shards_of(rank, ranks, shard_count), shard_count) for rank in range(ranks)]

    def _part(self, rows: int) -> slice:
        """The rank's part of a batch of so many rows, as ``shard_rows`` of ``common/step.cuh`` cuts it."""
        return slice(rows * self.shards.start // self.shard_count, rows * self.shards.stop // self.shard_count)

    def _of_batch(self, rows: int) -> int:
        part = self._part(rows)
        return part.stop - part.start

    @property
    def most_of_batch(self) -> int:
        """How many of its rows a whole batch has."""
        return self._of_batch(self.batch_rows)

    @property
    def count(self) -> int:
        """How many rows of an epoch are its own."""
        return self.before(self.rows)

    def before(self, position: int) -> int:
        """How many of its rows lie before a position where a batch begins, or where the epoch ends."""
        whole, rest = divmod(min(position, self.rows), self.batch_rows)
        return whole * self._of_batch(self.batch_rows) + self._of_batch(rest)

    @cached_property
    def positions(self) -> np.ndarray | slice:
        """What :meth:`find` returns, kept."""
        return self.find()

    def find(self) -> np.ndarray | slice:
        """Where its rows are in an epoch, ascending, (count,) int64; of a rank that has all, a slice of all."""
        if len(self.shards) == self.shard_count:
            return slice(None)
        parts = [np.empty(0, np.int64)]
        for first, of_batch, rows in self.runs(0, self.rows):
            batch, row = np.divmod(np.arange(rows), of_batch)
            parts.append(first + batch * self.batch_rows + row)
        return np.concatenate(parts)

    def runs(self, begin: int, end: int) -> Iterator[Run]:
        """Its rows from ``begin``, where a batch begins, to ``end``, where another one does or the epoch ends."""
        whole, rest = divmod(end - begin, self.batch_rows)
        for first, batches, rows in ((begin, whole, self.batch_rows), (end - rest, 1, rest)):
            of_batch = self._of_batch(rows)
            if batches * of_batch:
                yield Run(first + self._part(rows).start, of_batch, batches * of_batch)
