"""A data set's rows on their way to the card, in the order in which epochs visit them.

The first epoch's rows go up piece by piece, in that epoch's order, while the card works on the piece
before: host threads gather them into one of two page-locked buffers, from which a stream of its own
copies them.  Where the set fits into the memory allowed it stays there, in that order, and later epochs
are lists of places in it.  A larger set goes up anew in every epoch, into two pieces' room that take
turns.  Either way a kernel finds row i of the epoch at place ``order[i]``, and computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from ...datasets import Dataset
from ...errors import BackendError
from ...plan import Plan
from ..base import target_array
from .driver import Arena, Device, Event, Stream, Texture, aligned, pinned

PIECE_BYTES = 16 << 20
FILL_THREADS = 4
SLOTS = 2  # page-locked buffers, and pieces of a set that does not stay
MOST_ROWS = 2**31 - 1  # places are 32-bit


class _Rows:
    """One array of the set: where its rows come from, and how they are on the card."""

    def __init__(self, source: np.ndarray, dtype: np.dtype, is_stored: bool) -> None:
        self.source, self.dtype = source, dtype
        self.is_stored = is_stored  # indexed by storage rows, not by rows of the data set
        self.shape = source.shape[1:]
        self.row_bytes = int(np.prod(self.shape, dtype=np.int64)) * dtype.itemsize


class Feed:
    """A data set for one program.

    Arguments:
        stream: what computes; it waits for rows that are not there yet.
        batch_rows: pieces hold whole batches of so many rows.
        room: bytes of the card's memory that the rows may take.

    Attributes:
        addresses: of ``data``, ``targets``, ``weights`` and ``order`` on the card; those that there are.
        texture: of the targets, or None where they are more than a texture reaches.
        scale: what inputs are multiplied by.
        stays: whether the whole set stays on the card.
        place_of: of each row, (rows,) int64, once a set that stays has its order.
        left_bytes: of the room.

    Raises:
        BackendError: the card has not the memory, or the set has too many rows.
    """

    def __init__(
        self, device: Device, stream: Stream, plan: Plan, dataset: Dataset, *, batch_rows: int, room: int
    ) -> None:
        rows = len(dataset)
        if rows > MOST_ROWS:
            raise BackendError("data on a GPU", expected=f"at most {MOST_ROWS:,} rows", got=f"{rows:,}")
        self.dataset, self.scale = dataset, 1.0 if dataset.scale is None else dataset.scale
        self._device, self._stream = device, stream
        self._arrays = _arrays(plan, dataset)
        row_bytes = sum(array.row_bytes for array in self._arrays.values())
        self.piece_rows = min(rows, batch_rows * max(1, PIECE_BYTES // (row_bytes * batch_rows)))
        self.stays = rows * row_bytes <= room
        self._places = rows if self.stays else SLOTS * self.piece_rows

        sizes = {name: self._places * array.row_bytes for name, array in self._arrays.items()}
        sizes["order"] = 4 * rows
        self._arenas: list[Arena] = []
        self.addresses: dict[str, int] = {}
        self.reserve(sizes)
        self.nbytes = sum(sizes.values())
        self.left_bytes = room - self.nbytes
        self.texture: Texture | None = None
        if "targets" in sizes and sizes["targets"] // 4 <= device.most_texels:
            self.texture = Texture(device, self.addresses["targets"], sizes["targets"] // 4)

        self._copies = Stream(device)
        self._pool = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="mlpgpu-feed")
        self._buffers = [
            {name: pinned(device, (self.piece_rows, *a.shape), a.dtype) for name, a in self._arrays.items()}
            for _ in range(SLOTS)
        ]
        self._copied: list[Event | None] = [None] * SLOTS  # when the copy from each buffer ends
        self._sent = 0  # pieces, over all epochs
        self._order = np.empty(0, np.int64)  # that pieces are made in
        self._arrived: dict[int, Event] = {}  # of that order's pieces, those that were sent
        self._last = Event(device)  # the arrival of what was sent last
        self._working: int | None = None  # the piece that the stream is on
        self._left: list[Event | None] = [None] * SLOTS  # the last step on each room of a set that does not stay
        self._first_room = 0  # of the epoch's first piece
        self.place_of: np.ndarray | None = None
        self._list = pinned(device, (rows,), np.int32)
        self._listed = Event(device)

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Arrays of so many bytes that stay as long as the set does, those of them that are not there yet."""
        missing = {name: size for name, size in sizes.items() if name not in self.addresses}
        if missing:
            self._arenas.append(Arena(self._device, sum(map(aligned, missing.values()))))
            self.addresses |= {name: self._arenas[-1].take(size) for name, size in missing.items()}

    @property
    def pieces(self) -> int:
        """How many pieces an epoch has."""
        return -(-len(self.dataset) // self.piece_rows)

    def begin(self, order: np.ndarray) -> None:
        """Begin an epoch that visits the rows in ``order``, (rows,) int64."""
        self._leave()
        if self.place_of is not None:
            self._send_all()
            places = self.place_of[order]
        else:
            places = np.arange(len(order))
            self._order, self._arrived = order, {}
            if self.stays:
                self.place_of = np.empty(len(order), np.int64)
                self.place_of[order] = places
            else:
                self._first_room = self._sent % SLOTS
                places = (places + self._first_room * self.piece_rows) % self._places
        self._send_list(self._stream, places, "order")

    def list_ahead(self, order: np.ndarray, stream: Stream, array: str) -> None:
        """Put the list of an epoch to come into an array on the card, of a set that stays and has its places."""
        assert self.place_of is not None
        self._send_list(stream, self.place_of[order], array)

    def _send_list(self, stream: Stream, places: np.ndarray, array: str) -> None:
        self._listed.synchronize()  # the list before this one is on the card
        self._list[:] = places
        stream.upload(self.addresses[array], self._list)
        stream.record(self._listed)

    def begin_listed(self, places: str, ready: Event) -> None:
        """Begin an epoch whose list is on the card by ``ready``, in the array of this name."""
        self._leave()
        self._send_all()
        self._stream.wait(ready)
        self._stream.copy(self.addresses["order"], self.addresses[places], 4 * len(self.dataset))

    def _send_all(self) -> None:
        """What an epoch that was entered in its middle left out."""
        for piece in range(self.pieces):
            self._send(piece)

    def reach(self, row: int) -> int:
        """Let the stream wait for the piece that holds ``row`` of the epoch; returns the row where that ends.

        Once all pieces of a set that stays are on their way, it waits for the last of them.
        """
        if self.stays and len(self._arrived) == self.pieces:
            self._stream.wait(self._last)
            self._working = None
            return len(self.dataset)
        piece = row // self.piece_rows
        if self._working != piece:
            self._leave()
            self._send(piece)
            self._stream.wait(self._arrived[piece])
            self._working = piece
        return min(len(self.dataset), (piece + 1) * self.piece_rows)

    def prepare(self) -> None:
        """Send the piece after the one that the stream is on, while the card works on that."""
        if self._working is not None and self._working + 1 < self.pieces:
            self._send(self._working + 1)

    def _room(self, piece: int) -> int:
        return (self._first_room + piece) % SLOTS

    def _leave(self) -> None:
        """What the stream was given so far were the last steps on their piece."""
        if self._working is not None and not self.stays:
            event = Event(self._device)
            self._stream.record(event)
            self._left[self._room(self._working)] = event
        self._working = None

    def _send(self, piece: int) -> None:
        """Copy a piece of the order to the card, unless that was done."""
        if piece in self._arrived:
            return
        buffer, copied = self._buffers[self._sent % SLOTS], self._copied[self._sent % SLOTS]
        if copied is not None:
            copied.synchronize()
        rows = self._order[piece * self.piece_rows : (piece + 1) * self.piece_rows]
        self._gather(buffer, rows)

        place = piece * self.piece_rows if self.stays else self._room(piece) * self.piece_rows
        left = None if self.stays else self._left[self._room(piece)]
        if left is not None:
            self._copies.wait(left)
        for name, array in self._arrays.items():
            self._copies.upload(self.addresses[name] + place * array.row_bytes, buffer[name][: len(rows)])
        event = Event(self._device)
        self._copies.record(event)
        self._arrived[piece] = self._copied[self._sent % SLOTS] = self._last = event
        self._sent += 1

    def _gather(self, buffer: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        """Fill a buffer with rows of the data set, each thread a part of them."""

        def fill(part: slice) -> None:
            stored = self.dataset.storage_rows(rows[part])
            for name, array in self._arrays.items():
                index, out = stored if array.is_stored else rows[part], buffer[name][part]
                if array.source.dtype == array.dtype:
                    np.take(array.source, index, axis=0, out=out, mode="clip")
                else:
                    out[...] = array.source[index]

        bounds = [len(rows) * part // FILL_THREADS for part in range(FILL_THREADS + 1)]
        list(self._pool.map(fill, [slice(low, high) for low, high in pairwise(bounds)]))

    def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        self._copies.synchronize()
        self._pool.shutdown()


def _arrays(plan: Plan, dataset: Dataset) -> dict[str, _Rows]:
    """Inputs, as bytes if they are; and of those that there are, targets and weights, as float32."""
    single = np.dtype(np.float32)
    arrays = {"data": _Rows(dataset.storage_x, np.dtype(np.uint8) if dataset.scale is not None else single, True)}
    if plan.target_kind is not None:
        arrays["targets"] = _Rows(target_array(dataset, plan, single), single, False)
    if dataset.weight is not None:
        arrays["weights"] = _Rows(dataset.weight, single, False)
    return arrays
