"""Arrays of other libraries on a card, read where they lie; and results on a card for them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ....datasets.checksum import joined_checksum
from ....datasets.interchange import CUDA, CardArray, CardView, capsule_of, view_of
from ....errors import DtypeError
from .. import kernels
from ..runtime import Arena, Device, LoadedKernels, Stream, card_of_address, find_device, pack, wait_for_stream
from .primitives import grid_over

PIECE_BYTES = 16 << 20  # of listed rows that come to the host together


class CardRows:
    """An array on a card that another library made; its rows are read as those of a memory map are.

    Nothing is written to it.  It is copied, or pickled, as an array on the host.

    Attributes:
        card: the card's number.
        address: of the first element.
        owner: the array as it came.
    """

    def __init__(self, device: Device, view: CardView, shape: tuple[int, ...], owner: Any) -> None:
        self._device, self._view, self.owner = device, view, owner
        self.card, self.address, self.shape, self.dtype = device.index, view.address, shape, view.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def reshape(self, *shape: int) -> CardRows:
        """The same elements in another shape of as many."""
        assert prod(shape) == prod(self.shape)
        return CardRows(self._device, self._view, shape, self.owner)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Rows on the host: of a number, a slice without a step, or an array of numbers."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            assert step == 1
            return self._read(slice(start, max(start, stop)))
        if isinstance(rows, (int, np.integer)):
            return self._read(slice(int(rows) % len(self), int(rows) % len(self) + 1))[0]
        listed = np.asarray(rows)
        return self._read(slice(int(listed[0]), int(listed[0]) + len(listed)) if is_run(listed) else listed)

    def __reduce__(self) -> Any:
        return np.array, (self[:],)

    def _read(self, rows: slice | np.ndarray) -> np.ndarray:
        """Neighbouring rows, or those of a list, which the card brings together in pieces."""
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        found = np.empty((count, *self.shape[1:]), self.dtype)
        if not found.nbytes:
            return found
        with self._device:
            stream = Stream(self._device)
            if isinstance(rows, slice):
                stream.download(found, self.address + rows.start * self.row_bytes)
                stream.synchronize()
                return found
            listed = ListedRows(self._device, stream, self, rows, "uint8")
            size = max(1, PIECE_BYTES // self.row_bytes)
            arena, address = Arena.of(self._device, {"rows": min(size, count) * self.row_bytes})
            for first in range(0, count, size):
                part = slice(first, min(first + size, count))
                listed.take(part, address["rows"])
                stream.download(found[part], address["rows"])
            stream.synchronize()
            listed.close()
            arena.close()
        return found

    def side_by_side(self, columns: Sequence[CardRows]) -> CardResult:
        """Columns of a table in one array: see :class:`~mlpgpu.datasets.interchange.CardArray`."""
        width, entry = len(columns), kernels.put_column(self.dtype.name)
        joined = CardResult(self._device, (len(self), width), self.dtype)
        with self._device:
            stream, functions = Stream(self._device), LoadedKernels(self._device, [entry])
            for place, column in enumerate(columns):
                values = {
                    "x": column.address, "count": len(self), "width": width, "column": place, "y": joined.address,
                }  # fmt: skip
                packed = pack(entry, [values[a.name] for a in entry.arguments])
                functions[entry].launch(stream, grid_over(len(self)), packed)
            stream.synchronize()
        return joined

    def checksum(self, rows: np.ndarray | None) -> int:
        """The CRC-32 of these rows (n,), or of all, as of bytes on the host; a kernel makes that of each row."""
        entry = kernels.row_checksums()
        found = np.empty(len(self) if rows is None else len(rows), np.uint32)
        listed = None if rows is None else np.ascontiguousarray(rows, np.int32)
        with self._device:
            stream, functions = Stream(self._device), LoadedKernels(self._device, [entry])
            arena, address = Arena.of(self._device, {"checksums": found.nbytes, "rows": found.nbytes})
            if listed is not None:
                stream.upload(address["rows"], listed)
            values = {
                "x": self.address, "rows": None if listed is None else address["rows"], "count": len(found),
                "row_bytes": self.row_bytes, "checksums": address["checksums"],
            }  # fmt: skip
            packed = pack(entry, [values[a.name] for a in entry.arguments])
            functions[entry].launch(stream, grid_over(len(found)), packed)
            stream.download(found, address["checksums"])
            stream.synchronize()
            arena.close()
        return joined_checksum(found, self.row_bytes)

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite, which a kernel finds out; bytes are."""
        if self.dtype.kind != "f":
            return True
        assert self.dtype == np.float32
        entry, count = kernels.find_nonfinite(), prod(self.shape)
        found = np.empty(1, np.uint32)
        with self._device:
            stream, functions = Stream(self._device), LoadedKernels(self._device, [entry])
            arena = Arena(self._device, found.nbytes)
            told = arena.take(found.nbytes)
            stream.fill(told, found.nbytes)
            values = {"x": self.address, "n": count, "found": told}
            functions[entry].launch(stream, grid_over(count), pack(entry, [values[a.name] for a in entry.arguments]))
            stream.download(found, told)
            stream.synchronize()
            arena.close()
        return not found[0]


class ListedRows:
    """Those rows (n,) of an array on a card that a list names; used inside ``with device:``.

    Arguments:
        source: what elements are copied as, ``"float32"`` or ``"uint8"``: the array's type, or bytes of any.
    """

    def __init__(self, device: Device, stream: Stream, x: CardArray, rows: np.ndarray, source: str) -> None:
        self._entry, self._stream, self._x = kernels.take_rows(source), stream, x.address
        self._functions = LoadedKernels(device, [self._entry])
        self._width = prod(x.shape[1:]) * x.dtype.itemsize // (1 if source == "uint8" else 4)
        listed = np.ascontiguousarray(rows, np.int32)
        self._arena, address = Arena.of(device, {"rows": listed.nbytes})
        self._rows = address["rows"]
        stream.upload(self._rows, listed)
        stream.synchronize()  # before the list goes

    def take(self, part: slice, to: int) -> None:
        """Copy this part of the rows to an address on the card."""
        count = part.stop - part.start
        values = {"x": self._x, "rows": self._rows + 4 * part.start, "count": count, "width": self._width, "y": to}
        packed = pack(self._entry, [values[a.name] for a in self._entry.arguments])
        self._functions[self._entry].launch(self._stream, grid_over(count * self._width), packed)

    def close(self) -> None:
        """Free the list; copies must have ended."""
        self._arena.close()


def is_run(rows: np.ndarray) -> bool:
    """Whether rows (n,) are neighbours that ascend, one at least."""
    return len(rows) > 0 and bool((np.diff(rows) == 1).all())


def open_card_array(what: str, x: Any) -> CardRows:
    """See :func:`mlpgpu.datasets.interchange.open_on_card`."""
    told = x.__dlpack_device__() if hasattr(type(x), "__dlpack_device__") else None
    if told is None:
        view = view_of(what, x, 0)
        index = card_of_address(what, view.address) if view.nbytes else 0
    else:
        index = int(told[1])
    device = find_device(index)
    with device:
        if told is None:
            if view.stream is not None:
                wait_for_stream(device, view.stream)
        else:
            stream = Stream(device)
            view = view_of(what, x, stream.number)
            stream.synchronize()
    return CardRows(device, view, view.shape, x)


class CardResult:
    """An array that was computed on a card, complete: for any library that speaks DLPack or the CUDA array interface.

    Attributes:
        address: of the first element.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._device, self.shape, self.dtype, self.card = device, shape, dtype, device.index
        nbytes = max(1, prod(shape) * dtype.itemsize)
        with device:
            self._arena = Arena(device, nbytes)
        self.address = self._arena.take(nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "strides": None,
            "version": 3, "stream": None,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.card

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        """A capsule; nothing has to wait, since the array is complete.

        Raises:
            DtypeError: another device is asked for.
        """
        device = options.get("dl_device")
        if device is not None and tuple(device) != self.__dlpack_device__():
            raise DtypeError("dl_device", expected=self.__dlpack_device__(), got=device)
        return capsule_of(self, self.address, self.shape, self.dtype, card=self.card)
