"""Tensor maps, by which the copy engine reads split operands, on a card."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from ..kernels import TENSOR_MAP_BYTES, padded_columns
from ..kernels.launches import Map
from ..runtime import Arena, Device, Stream, tensor_map
from .arrays import Arrays


class TensorMaps:
    """Maps of arrays on a card, each made once.

    Attributes:
        addresses: of the maps that there are.
    """

    def __init__(self, device: Device, stream: Stream, arrays: Arrays) -> None:
        self._device, self._stream, self._arrays = device, stream, arrays
        self._arenas: list[Arena] = []
        self.addresses: dict[Map, int] = {}

    def make(self, maps: Iterable[Map]) -> None:
        """Put maps on the card, those of them that are not there yet."""
        missing = [each for each in maps if each not in self.addresses]
        if not missing:
            return
        arena, addresses = Arena.of(self._device, {"maps": TENSOR_MAP_BYTES * len(missing)})
        self._arenas.append(arena)
        for each, place in zip(missing, count(addresses["maps"], TENSOR_MAP_BYTES), strict=False):
            shape, pitch = (each.components, each.rows, each.columns), padded_columns(each.columns)
            operand = self._arrays.addresses[each.array] + each.place * each.nbytes
            self._stream.upload(place, tensor_map(operand, shape, pitch, each.box))
            self.addresses[each] = place

    def close(self) -> None:
        """Give their memory back; work that uses it must have ended."""
        for arena in self._arenas:
            arena.close()
        self._arenas, self.addresses = [], {}
