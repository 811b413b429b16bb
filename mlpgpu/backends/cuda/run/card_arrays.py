"""Arrays of other libraries on a card, read where they lie; and results on a card for them."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ....datasets.checksum import joined_checksum
from ....datasets.interchange import CUDA, CardView, capsule_of, view_of
from ....errors import DtypeError
from .. import kernels
from ..runtime import Arena, Device, LoadedKernels, Stream, card_of_address, find_device, pack, wait_for_stream
from .primitives import grid_over


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
            return self._read(runs_of(np.arange(start, max(start, stop))), max(0, stop - start))
        if isinstance(rows, (int, np.integer)):
            return self._read([(int(rows) % len(self), 1)], 1)[0]
        return self._read(runs_of(np.asarray(rows)), len(rows))

    def __reduce__(self) -> Any:
        return np.array, (self[:],)

    def _read(self, runs: list[tuple[int, int]], count: int) -> np.ndarray:
        found = np.empty((count, *self.shape[1:]), self.dtype)
        with self._device:
            stream, place = Stream(self._device), 0
            for first, rows in runs:
                if rows and self.row_bytes:
                    stream.download(found[place : place + rows], self.address + first * self.row_bytes)
                place += rows
            stream.synchronize()
        return found

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


def runs_of(rows: np.ndarray) -> list[tuple[int, int]]:
    """Rows (n,) as runs of neighbours that ascend: the first of each, and how many they are."""
    if not len(rows):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(int(rows[first]), end - first) for first, end in pairwise(cuts)]


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
