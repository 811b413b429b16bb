"""How a data set's rows come to the card, in the order in which epochs visit them.

In the first epoch the rows are uploaded piece by piece, in that epoch's order, while the card works on the piece
before: threads of the host gather a piece into one of two page-locked buffers, from which a stream of its own copies
it.  A set that fits into the memory allowed stays on the card in that order, and later epochs are lists of positions in
it.  A larger set is uploaded again in every epoch, into room for two pieces that are used in turns, the slots.  Either
way a kernel finds row i of the epoch at position ``order[i]``, and computes the same bits.

Where several ranks train together, a set that fits is whole on each card.  Of a larger one each rank sends its card the
rows of its own shards alone.  If the cards can read each other's memory, and these rows of the first epoch fit into the
room of each, they stay there as its partition of the set (:mod:`.partitions`), and in later epochs a kernel brings each
piece's rows from all cards into the slots, in place of the host.

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

from .....datasets import Dataset
from .....errors import BackendError, ConfigurationError
from .....plan import Plan
from ....base import target_array
from ....inputs import InputScaling
from ...exchange import Exchange
from ...runtime import Device, Event, LoadedKernels, Stream, Texture, pinned
from ...select.data import by_texture
from ..arrays import Arrays
from ..trace import Trace
from .own_rows import OwnRows
from .partitions import Partitions
from .pieces import MOST_ROWS, SLOTS, Pieces, cut, cut_for_ranks

FILL_THREADS = 4
SOURCES = "row sources"  # where each of an epoch's rows lies, of a set that is partitioned


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
        exchange: of ranks that train together on the set, in the plan's shards; all of them make this object, and begin
            epochs, together.
        loaded: loads kernels that belong to no plan; needed with ``exchange``.

    Attributes:
        arrays: ``data``, ``targets``, ``weights``, ``order`` and ``statistics`` on the card, those of them that the set
            has; they come before a program's arrays of these names.
        source: the type of the inputs on the card, ``"uint8"`` or ``"float32"``.
        targets: what kernels read targets through: a texture object, or where none reaches an address; None without.
        scale: the factor that inputs are multiplied by.
        stays: whether the whole set stays on the card, or on the cards of all ranks together.
        is_partitioned: whether each rank's card has a partition of the set.
        place_of: the position of each row, (rows,) int64, once a set that stays has its order; of a set that is
            partitioned, its place among all cards.
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
        exchange: Exchange | None = None,
        loaded: LoadedKernels | None = None,
    ) -> None:
        rows = len(dataset)
        stored_rows = rows if dataset.card is None else len(dataset.storage_x)
        if stored_rows > MOST_ROWS:
            raise BackendError("data on a GPU", expected=f"at most {MOST_ROWS:,} rows", got=f"{stored_rows:,}")
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
        if self._is_on_card:
            room = max(room, rows * row_bytes)
        self._pieces, of_ranks = cut(rows, batch_rows, row_bytes, room), list[OwnRows]()
        self._taken: Pieces | None = None  # the pieces of later epochs of a set that is partitioned
        if exchange is not None:
            of_ranks = OwnRows.of_ranks(rows, batch_rows, plan.shards, exchange.size)
            room_for_rows = 0 if self._is_on_card else room
            self._pieces, self._taken = cut_for_ranks(self._pieces, of_ranks, exchange, row_bytes, room_for_rows)
        self.stays, self.is_partitioned = self._is_on_card or self._pieces.stays, self._taken is not None
        places = stored_rows if self._is_on_card else (self._taken or self._pieces).places

        sizes = {name: places * each.row_bytes for name, each in self._rows.items()}
        sizes["order"] = 4 * rows
        if self.is_partitioned:
            sizes[SOURCES] = 4 * rows
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
            {
                name: pinned(device, (self._pieces.most_rows, *each.shape), each.dtype)
                for name, each in self._rows.items()
            }
            for _ in range(0 if self._is_on_card else SLOTS)
        ]
        self._copied: list[Event | None] = [None] * SLOTS  # when the copy from each buffer ends
        self._sent = 0  # pieces, over all epochs
        self._order = np.empty(0, np.int64)  # the rows that come to this card, in the order that pieces are cut from
        self._arrived: dict[int, Event] = {}  # the pieces of that order that were sent, and when each has arrived
        self._last = Event(device)  # when the piece that was sent last has arrived
        self._working: int | None = None  # the piece that the stream is on
        self._left: list[Event | None] = [None] * SLOTS  # when the steps on what is in each slot end
        self._first_turn = 0  # of the epoch's first piece in the slots
        self._end_steps: Callable[[], None] | None = None  # tells the trace that the steps on a piece end
        self.place_of: np.ndarray | None = None
        self._is_in_order = False  # whether the order on the card is that of the data set
        self._list = pinned(device, (rows,), np.int32)
        self._listed = Event(device)
        self._partitions: Partitions | None = None
        self._takes = False  # whether pieces are taken from the partitions of all cards
        self._finished: Event | None = None  # the last read of other cards that was waited for ahead of its steps
        self._sourced = Event(device)  # when the card knows where the epoch's rows lie
        if self.is_partitioned:
            assert exchange is not None and loaded is not None
            of_arrays = {name: each.row_bytes for name, each in self._rows.items()}
            self._partitions = Partitions(exchange, of_ranks, loaded, of_arrays, self.arrays.addresses)
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
        return 0 if self._is_on_card else self._pieces.count

    @property
    def piece_rows(self) -> int:
        """Rows of an epoch from one piece's first row to the next one's."""
        return self._pieces.rows

    def _place_beside(self) -> None:
        """Bring targets and weights to the places of their rows in an array of inputs on the card."""
        self.place_of = self.dataset.storage_rows(np.arange(len(self.dataset)))
        for name, each in self._rows.items():
            placed = np.zeros((len(self.dataset.storage_x), *each.shape), each.dtype)
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
            self._stream.wait(self._last)  # rows of a piece that was left may yet be taken by the old list
            self._send_list(self._stream, self.place_of[order], SOURCES if self._partitions else "order")
            self._take_from_partitions()
            return
        self._order, self._arrived = order[self._pieces.own.positions], {}
        places = np.arange(len(self._order))
        if self._partitions:
            self.place_of = self._partitions.place_of(order)
        elif self.stays:
            self.place_of = np.empty(len(order), np.int64)
            self.place_of[order] = places
        else:
            self._first_turn = self._sent % SLOTS
            places = self._pieces.slot_places(self._first_turn)
        self._send_list(self._stream, self._pieces.order(places), "order")

    def _take_from_partitions(self) -> None:
        """If the set is partitioned, begin an epoch whose list is on the stream: all cards have its rows."""
        if self._partitions is None:
            return
        if not self._takes:
            assert self._taken is not None
            self._last.synchronize()
            self._partitions.wait_for_all()
            self._pieces, self._takes, self._first_turn = self._taken, True, 0
            self._buffers, self._order = [], np.empty(0, np.int64)  # nothing comes from the host any more
            of_all_epochs = self._pieces.order(self._pieces.slot_places(0))
            self._send_list(self._stream, of_all_epochs, "order")
        self._stream.record(self._sourced)
        self._arrived = {}

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
        self._stream.wait(self._last)
        addresses = self.arrays.addresses
        to = SOURCES if self._partitions else "order"
        self._stream.copy(addresses[to], addresses[places], 4 * len(self.dataset))
        self._take_from_partitions()

    def _send_all(self) -> None:
        """Send the pieces that an epoch left out which was entered in its middle, of a set that is to stay."""
        for piece in range(0 if self._takes else self.pieces):
            self._send(piece)

    def reach(self, row: int) -> int:
        """Let the stream wait for the piece that holds ``row`` of the epoch; returns the row where the piece ends.

        Once copies of all pieces of a set that stays have been issued, the stream waits for the last of them, and the
        whole epoch counts as one piece.
        """
        piece, end = row // self.piece_rows, len(self.dataset)
        if not self._uses_slots and len(self._arrived) == self.pieces:
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
        self._send_next()

    def reads_to_finish(self) -> Callable[[], None] | None:
        """What has all reads of other cards end before the steps that the stream is given next, or None if all do.

        Ranks that see the end of those steps may then free what they have: the last steps of each run come behind it.
        """
        is_last = self._working is None or self._working + 1 >= self.pieces
        if not self._takes or is_last or self._finished is self._last:
            return None
        return self._finish_reads

    def _finish_reads(self) -> None:
        self._send_next()
        self._stream.wait(self._last)
        self._finished = self._last

    def _send_next(self) -> None:
        if self._working is not None and self._working + 1 < self.pieces:
            self._send(self._working + 1)

    @property
    def _uses_slots(self) -> bool:
        """Whether steps find their rows in the slots."""
        return self._takes or not self.stays

    def _slot(self, piece: int) -> int:
        """The number of the slot that a piece has."""
        return (self._first_turn + piece) % SLOTS

    def _leave(self) -> None:
        """The stream has been given the last steps on the piece that it is on."""
        if self._working is not None and self._uses_slots:
            event = Event(self._device)
            self._stream.record(event)
            self._left[self._slot(self._working)] = event
        self._working = None

    def _send(self, piece: int) -> None:
        """Bring a piece of the order to its place on the card, unless that was done."""
        if piece in self._arrived:
            return
        begin, end = self._pieces.begins[piece : piece + 2]
        buffer = None if self._takes else self._filled(self._order[begin:end])
        end_copy = self._trace.begin(self._copies, f"piece {piece}") if self._trace else None
        place, left = begin, None
        if self._uses_slots:
            place, left = self._pieces.slot(self._slot(piece)), self._left[self._slot(piece)]
        if left is not None:
            self._copies.wait(left)
        to = {name: self.arrays.addresses[name] + place * each.row_bytes for name, each in self._rows.items()}
        event = Event(self._device)
        if buffer is None:
            self._take(piece, to)
        else:
            for name, rows in buffer.items():
                if len(rows):
                    self._copies.upload(to[name], rows)
            self._copied[self._sent % SLOTS] = event
            self._sent += 1
        self._copies.record(event)
        self._arrived[piece] = self._last = event
        if end_copy:
            end_copy()

    def _filled(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of the data set in a page-locked buffer, from which nothing is copied any more."""
        buffer, copied = self._buffers[self._sent % SLOTS], self._copied[self._sent % SLOTS]
        if copied is not None:
            copied.synchronize()
        self._gather(buffer, rows)
        return {name: array[: len(rows)] for name, array in buffer.items()}

    def _take(self, piece: int, to: Mapping[str, int]) -> None:
        """Bring a piece from the partitions of all cards."""
        assert self._partitions is not None
        self._copies.wait(self._sourced)
        begin, own = piece * self.piece_rows, self._pieces.own
        runs = own.runs(begin, min(begin + self.piece_rows, own.rows))
        self._partitions.take(self._copies, self.arrays.addresses[SOURCES], runs, own.batch_rows, to)

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
