"""How a data set is cut into pieces, and where on a card their rows lie: plain numbers, which ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ...exchange import Exchange
from ...kernels.launches import GRAPH_STEPS
from .own_rows import OwnRows

PIECE_BYTES = 16 << 20
# Rows from other cards come fast, and a piece ends a run of steps: of large pieces there are fewer.
TAKEN_BYTES, TAKEN_BATCHES = 64 << 20, max(GRAPH_STEPS)
TAKEN_SHARE = 8  # but slots take no more than this part of the room, unless a piece is one batch
SLOTS = 2  # pieces that are on the card at once, of a set that is not
MOST_ROWS = 2**31 - 1  # positions are 32-bit


@dataclass(frozen=True)
class Pieces:
    """Pieces of an epoch, each of whole batches.

    Attributes:
        own: the rows that come to this card, which are those of its rank's shards, or all.
        batches: of a piece.
        stays: whether these rows stay on the card, one piece behind another.
        is_taken: whether later pieces are taken from such rows of several cards, into slots behind those of this card.
    """

    own: OwnRows
    batches: int
    stays: bool
    is_taken: bool = False

    @property
    def rows(self) -> int:
        """Rows of an epoch from one piece's first row to the next one's, among them those of other ranks."""
        return min(self.own.rows, self.batches * self.own.batch_rows)

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return -(-self.own.rows // self.rows)

    @cached_property
    def begins(self) -> list[int]:
        """How many of the rows that come to this card are before each piece, and how many there are."""
        return [self.own.before(piece * self.rows) for piece in range(self.count)] + [self.own.count]

    @cached_property
    def most_rows(self) -> int:
        """How many rows of a piece come to this card at most; room for one, at least."""
        return max(1, *(end - begin for begin, end in pairwise(self.begins)))

    @property
    def _kept(self) -> int:
        """How many rows stay on the card, in front of the slots."""
        return self.own.count if self.stays else 0

    @property
    def places(self) -> int:
        """For how many rows the card has room, at least one."""
        has_slots = self.is_taken or not self.stays
        return max(1, self._kept + SLOTS * self.most_rows * has_slots)

    def slot(self, turn: int) -> int:
        """The first place of the slot that is used in this turn."""
        return self._kept + turn % SLOTS * self.most_rows

    def slot_places(self, first_turn: int) -> np.ndarray:
        """Where in the slots each row that comes to this card is, the first piece in this turn: (count,) int64."""
        firsts = [self.slot(first_turn + piece) - begin for piece, begin in enumerate(self.begins[:-1])]
        return np.repeat(np.array(firsts, np.int64), np.diff(self.begins)) + np.arange(self.own.count)

    def order(self, places: np.ndarray) -> np.ndarray:
        """The places by position in the epoch, (rows,); those of other ranks' rows, which no kernel asks for, are 0."""
        if isinstance(self.own.positions, slice):
            return places
        whole = np.zeros(self.own.rows, places.dtype)
        whole[self.own.positions] = places
        return whole


def cut(rows: int, batch_rows: int, row_bytes: int, room: int) -> Pieces:
    """The pieces of a set of so many rows on one card, whose data may take ``room`` bytes."""
    return Pieces(OwnRows(rows, batch_rows), max(1, PIECE_BYTES // (row_bytes * batch_rows)), rows * row_bytes <= room)


def cut_for_ranks(
    alone: Pieces, of_ranks: Sequence[OwnRows], exchange: Exchange, row_bytes: int, room: int
) -> tuple[Pieces, Pieces | None]:
    """The pieces of a set on this rank's card, where ranks train on it together; all of them call this.

    They agree, since a piece ends a run of steps, each of which all of them make together.

    Arguments:
        alone: the pieces if there were this rank alone.
        of_ranks: the rows of each rank's shards.

    Returns:
        pieces that come from the host; and those that are taken from all cards, once a partitioned set is there.
    """
    own, most = of_ranks[exchange.rank], row_bytes * max(each.most_of_batch for each in of_ranks)
    left = room - own.count * row_bytes - 2 * 4 * own.rows  # for slots, beside a partition and two lists
    wanted = min(max(TAKEN_BYTES // most, TAKEN_BATCHES), max(1, room // (TAKEN_SHARE * SLOTS * most)))
    told = exchange.gather((alone.stays, min(wanted, max(0, left // (SLOTS * most)))))
    if all(stays for stays, _ in told):
        return alone, None
    batches, taken = max(1, PIECE_BYTES // most), min(fitting for _, fitting in told)
    has_places = exchange.size * max(each.count for each in of_ranks) <= MOST_ROWS
    if taken and has_places and exchange.maps_memory:
        return Pieces(own, batches, stays=True), Pieces(own, taken, stays=True, is_taken=True)
    return Pieces(own, batches, stays=False), None
