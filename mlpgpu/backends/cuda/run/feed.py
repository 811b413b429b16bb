"""How a data set's rows come to the card, in the order in which epochs visit them.

In the first epoch the rows are uploaded piece by piece, in that epoch's order, while the card works on the piece
before: threads of the host gather a piece into one of two page-locked buffers, from which a stream of its own copies
it.  A set that fits into the memory allowed stays on the card in that order, and later epochs are lists of positions in
it.  A larger set is uploaded again in every epoch, into room for two pieces that are used in turns.  Either way a
kernel finds row i of the epoch at position ``order[i]``, and computes the same bits.

Inputs that lie on the card already, in an array of the caller's, stay where they are: targets and weights come beside
them, each at its row's place in that array, and orders are lists of its rows.

Inputs that have more digits than float32 and come to a first ``Standardize`` layer are standardized while they are
gathered, in float64, and rounded once.  The layer's operation then finds a mean of 0 and a scale of 1 among statistics
that belong to the set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from ....datasets import Dataset
from ....errors import BackendError, ConfigurationError
from ....plan import Plan
from ...base import target_array
from ...inputs import InputScaling
from ..runtime import Device, Event, Stream, Texture, pinned
from ..select.data import by_texture
from .arrays import Arrays
from .trace import Trace

PIECE_BYTES = 16 << 20
FILL_THREADS = 4
SLOTS = 2  # page-locked buffers, and pieces of a set that does not stay
MOST_DATA_ROWS = 2**31 - 1  # positions are 32-bit


class _Rows:
    """One array of the set: the rows on the host, and how they are stored on the card."""

    def __init__(self, source: np.ndarray, dtype: np.dtype, is_stored: bool) -> None:
        self.source, self.dtype = source, dtype
        self.is_stored = is_stored  # indexed by storage rows, not by rows of the data set
        self.shape = source.shape[1:]
        self.row_bytes = int(np.prod(self.shape, dtype=np.int64)) * dtype.itemsize


class Feed:
    """A data set for one program.

    Arguments:
        stream: the stream that computes; it waits for rows that are not on the card yet.
        batch_rows: a piece holds whole batches of this many rows.
        room: bytes of the card's memory that the rows may take.
        scaling: standardizes inputs while they are gathered, or None where the card does.
        trace: is told of the copies of pieces, and of the steps on each.

    Attributes:
        arrays: ``data``, ``targets``, ``weights``, ``order`` and ``statistics`` on the card, those of them that the set
            has; they come before a program's arrays of these names.
        source: the type of the inputs on the card, ``"uint8"`` or ``"float32"``.
        targets: what kernels read targets through: a texture object, or where none reaches an address; None without.
        scale: the factor that inputs are multiplied by.
        stays: whether the whole set stays on the card.
        place_of: the position of each row, (rows,) int64, once a set that stays has its order.
        left_bytes: how much of the room is left.

    Raises:
        BackendError: the card has not the memory, or the set has too many rows.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        plan: Plan,
        dataset: Dataset,
        *,
        batch_rows: int,
        room: int,
        scaling: InputScaling | None = None,
        trace: Trace | None = None,
    ) -> None:
        rows = len(dataset)
        places = rows if dataset.card is None else len(dataset.storage_x)
        if places > MOST_DATA_ROWS:
            raise BackendError("data on a GPU", expected=f"at most {MOST_DATA_ROWS:,} rows", got=f"{places:,}")
        self.dataset, self.scale = dataset, 1.0 if dataset.scale is None else dataset.scale
        self.source = "float32" if dataset.scale is None else "uint8"
        self._device, self._stream, self._trace, self._scaling = device, stream, trace, scaling
        self._rows = _rows_of(plan, dataset)
        inputs: Any = dataset.storage_x  # an array, or a CardArray
        self._is_on_card = dataset.card is not None
        if self._is_on_card and "data" not in plan.input_columns():
            hint = "Dataset(data.x, data.y, data.weight) is on the host"
            expected, got = "inputs on the host, of which each rank takes its columns", f"inputs on GPU {dataset.card}"
            raise ConfigurationError("data with parallel='tensor'", expected=expected, got=got, hint=hint)
        row_bytes = max(1, sum(each.row_bytes for each in self._rows.values()))
        self.piece_rows = min(rows, batch_rows * max(1, PIECE_BYTES // (row_bytes * batch_rows)))
        self.stays = self._is_on_card or rows * row_bytes <= room
        self._places = places if self.stays else SLOTS * self.piece_rows

        sizes = {name: self._places * each.row_bytes for name, each in self._rows.items()}
        sizes["order"] = 4 * rows
        if scaling is not None:
            sizes["statistics"] = 4 * plan.statistic_count
        self.arrays = Arrays(device, {"data": inputs.address} if self._is_on_card else None)
        self.arrays.allocate(sizes)
        self.nbytes = sum(sizes.values())
        self.left_bytes = room - self.nbytes
        address, elements = self.arrays.addresses.get("targets"), sizes.get("targets", 0) // 4
        self._texture: Texture | None = None
        if address is not None and by_texture(elements, device.most_texels):
            self._texture = Texture(device, address, elements)
        self.targets = address if self._texture is None else int(self._texture)

        self._copies = Stream(device, "copies")
        self._pool = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="mlpgpu-feed")
        self._buffers = [
            {name: pinned(device, (self.piece_rows, *each.shape), each.dtype) for name, each in self._rows.items()}
            for _ in range(0 if self._is_on_card else SLOTS)
        ]
        self._copied: list[Event | None] = [None] * SLOTS  # when the copy from each buffer ends
        self._sent = 0  # pieces, over all epochs
        self._order = np.empty(0, np.int64)  # the order that pieces are cut from
        self._arrived: dict[int, Event] = {}  # the pieces of that order that were sent, and when each has arrived
        self._last = Event(device)  # when the piece that was sent last has arrived
        self._working: int | None = None  # the piece that the stream is on
        self._left: list[Event | None] = [None] * SLOTS  # when the steps on each piece's room of a set that moves end
        self._first_room = 0  # of the epoch's first piece
        self._end_steps: Callable[[], None] | None = None  # tells the trace that the steps on a piece end
        self.place_of: np.ndarray | None = None
        self._is_in_order = False  # whether the order on the card is that of the data set
        self._list = pinned(device, (rows,), np.int32)
        self._listed = Event(device)
        if self._is_on_card:
            self._place_beside()

    @property
    def kind(self) -> tuple[str, bool]:
        """What kernels depend on: ``source``, and whether they read targets through a texture."""
        return self.source, self._texture is not None

    def follow(self, fitted: np.ndarray) -> None:
        """Statistics are ``fitted`` (C,) from now on."""
        if self._scaling is not None:
            left = self._scaling.left_of(fitted).astype(np.float32)
            self._stream.upload(self.arrays.addresses["statistics"], left)
            self._stream.synchronize()  # before the array goes

    @property
    def pieces(self) -> int:
        """How many pieces an epoch has that must come to the card."""
        if self._is_on_card:
            return 0
        return -(-len(self.dataset) // self.piece_rows)

    def _place_beside(self) -> None:
        """Bring targets and weights to the places of their rows in an array of inputs on the card."""
        self.place_of = self.dataset.storage_rows(np.arange(len(self.dataset)))
        for name, each in self._rows.items():
            placed = np.zeros((self._places, *each.shape), each.dtype)
            placed[self.place_of] = each.source
            self._copies.upload(self.arrays.addresses[name], placed)
        self._copies.record(self._last)
        self._copies.synchronize()  # before the arrays go

    def begin(self, order: np.ndarray) -> None:
        """Begin an epoch that visits the rows in ``order``, (rows,) int64."""
        self._is_in_order = False
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

    def begin_in_order(self) -> None:
        """Begin an epoch that visits the rows in their order; that of a set that stays is told the card once."""
        if self.place_of is None or not self._is_in_order:
            self.begin(np.arange(len(self.dataset)))
            self._is_in_order = self.stays
            return
        self._leave()
        self._send_all()

    def list_next(self, order: np.ndarray, stream: Stream, array: str) -> None:
        """Write the positions of a later epoch's rows to an array on the card; the set must stay and have its order."""
        assert self.place_of is not None
        self._send_list(stream, self.place_of[order], array)

    def _send_list(self, stream: Stream, places: np.ndarray, array: str) -> None:
        self._listed.synchronize()  # the list before this one is on the card
        self._list[:] = places
        stream.upload(self.arrays.addresses[array], self._list)
        stream.record(self._listed)

    def begin_listed(self, places: str, ready: Event) -> None:
        """Begin an epoch whose list is on the card by ``ready``, in the array of this name."""
        self._leave()
        self._send_all()
        self._stream.wait(ready)
        addresses = self.arrays.addresses
        self._stream.copy(addresses["order"], addresses[places], 4 * len(self.dataset))

    def _send_all(self) -> None:
        """Send the pieces that an epoch left out which was entered in its middle."""
        for piece in range(self.pieces):
            self._send(piece)

    def reach(self, row: int) -> int:
        """Let the stream wait for the piece that holds ``row`` of the epoch; returns the row where the piece ends.

        Once copies of all pieces of a set that stays have been issued, the stream waits for the last of them, and the
        whole epoch counts as one piece.
        """
        piece, end = row // self.piece_rows, len(self.dataset)
        if self.stays and len(self._arrived) == self.pieces:
            self._stream.wait(self._last)
            self._working = None
        else:
            if self._working != piece:
                self._leave()
                self._send(piece)
                self._stream.wait(self._arrived[piece])
                self._working = piece
            end = min(end, (piece + 1) * self.piece_rows)
        if self._trace:
            self._end_steps = self._trace.begin(self._stream, f"steps from piece {piece}")
        return end

    def prepare(self) -> None:
        """Send the piece after the one that the stream is on, while the card works on that."""
        if self._end_steps:
            self._end_steps()
            self._end_steps = None
        if self._working is not None and self._working + 1 < self.pieces:
            self._send(self._working + 1)

    def _room(self, piece: int) -> int:
        return (self._first_room + piece) % SLOTS

    def _leave(self) -> None:
        """The stream has been given the last steps on the piece that it is on."""
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

        end_copy = self._trace.begin(self._copies, f"piece {piece}") if self._trace else None
        place = piece * self.piece_rows if self.stays else self._room(piece) * self.piece_rows
        left = None if self.stays else self._left[self._room(piece)]
        if left is not None:
            self._copies.wait(left)
        for name, each in self._rows.items():
            self._copies.upload(self.arrays.addresses[name] + place * each.row_bytes, buffer[name][: len(rows)])
        event = Event(self._device)
        self._copies.record(event)
        self._arrived[piece] = self._copied[self._sent % SLOTS] = self._last = event
        self._sent += 1
        if end_copy:
            end_copy()

    def _gather(self, buffer: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        """Fill a buffer with rows of the data set, each thread a part of them."""

        def fill(part: slice) -> None:
            stored = self.dataset.storage_rows(rows[part])
            for name, each in self._rows.items():
                index, out = stored if each.is_stored else rows[part], buffer[name][part]
                if name == "data" and self._scaling is not None:
                    taken = each.source[index]
                    self._scaling.standardize(taken, np.empty(taken.shape), out)
                elif each.source.dtype == each.dtype:
                    np.take(each.source, index, axis=0, out=out, mode="clip")
                else:
                    out[...] = each.source[index]

        bounds = [len(rows) * part // FILL_THREADS for part in range(FILL_THREADS + 1)]
        list(self._pool.map(fill, [slice(low, high) for low, high in pairwise(bounds)]))

    def close(self) -> None:
        """Wait for copies under way, and end the threads."""
        self._copies.synchronize()
        self._pool.shutdown()


def _rows_of(plan: Plan, dataset: Dataset) -> dict[str, _Rows]:
    """Inputs, as bytes if they are stored so; targets and weights, where the set has them, as float32.

    Inputs on the card are left out.
    """
    single = np.dtype(np.float32)
    found = {}
    if dataset.card is None:
        dtype = np.dtype(np.uint8) if dataset.scale is not None else single
        for name, columns in plan.input_columns().items():
            found[name] = _Rows(dataset.storage_x[:, columns], dtype, True)
    if plan.target_kind is not None:
        found["targets"] = _Rows(target_array(dataset, plan, single), single, False)
    if dataset.weight is not None:
        found["weights"] = _Rows(dataset.weight, single, False)
    return found
