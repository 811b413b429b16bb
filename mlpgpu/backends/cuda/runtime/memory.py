"""Memory of a card, and memory of the host that copies to it can be asynchronous from.

:class:`Arena` and :func:`pinned` are the only places that allocate either kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
from numpy.typing import DTypeLike

from ....errors import BackendError
from .bindings import CallError, call, cu, drv
from .device import Device, Resource
from .machine import find_device

ALIGNMENT = 512  # bytes; a texture over linear memory asks for it, and cuMemAlloc keeps it


def aligned(nbytes: int) -> int:
    """How many bytes of an arena a piece of ``nbytes`` takes: the next multiple of 512."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena(Resource):
    """Memory of a card, allocated once and handed out piece by piece.

    Raises:
        BackendError: the card has not that much free.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        try:
            super().__init__(device, drv.mem_alloc(max(nbytes, ALIGNMENT)))
        except drv.MemoryError as error:
            free, total = drv.mem_get_info()
            raise BackendError(
                f"memory of GPU {device.index}",
                expected=f"{nbytes:,} bytes free",
                got=f"{free:,} of {total:,}",
                hint="lower the batch size, the streams or the layers' widths, or end what else uses the card",
            ) from error
        self._next = int(self.handle)
        self._end = self._next + nbytes

    @classmethod
    def of(cls, device: Device, sizes: Mapping[str, int]) -> tuple[Arena, dict[str, int]]:
        """An arena of arrays of so many bytes each, uninitialised, and their addresses by name.

        Raises:
            BackendError: the card has not that much free.
        """
        arena = cls(device, sum(map(aligned, sizes.values())))
        return arena, {name: arena.take(size) for name, size in sizes.items()}

    @property
    def left_bytes(self) -> int:
        """How many bytes are not handed out yet."""
        return self._end - self._next

    def take(self, nbytes: int) -> int:
        """The address of the next ``nbytes``, a multiple of 512.  They are uninitialised.

        Raises:
            BackendError: there is less left.
        """
        if nbytes > self.left_bytes:
            raise BackendError("arena", expected=f"at most the {self.left_bytes:,} bytes left", got=f"{nbytes:,}")
        address = self._next
        self._next += aligned(nbytes)
        return address


def card_of_address(what: str, address: int) -> int:
    """The number of the card whose memory an address is of; ``what`` is what an error calls the array there.

    Raises:
        BackendError: the driver knows no such memory.
    """
    find_device()  # which starts the driver
    asked = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    try:
        return int(call(cu.cuPointerGetAttribute, asked, cu.CUdeviceptr(address)))
    except CallError as error:
        raise BackendError(what, expected="memory of a card", got=f"address {address:#x}: {error}") from error


def pinned(device: Device, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array in page-locked memory, without which a copy to or from a card makes the host wait.

    It lives as long as the array and its views; copies that use it must have ended by then.

    Raises:
        BackendError: the system does not grant that much.
    """
    try:
        array: np.ndarray = drv.pagelocked_empty(shape, dtype)
    except drv.MemoryError as error:
        expected = f"{np.dtype(dtype).itemsize * int(np.prod(shape)):,} bytes to lock"
        raise BackendError("page-locked memory", expected=expected, got=error, hint="end other programs") from error
    weakref.finalize(array, device.destroy, [array.base], drv.PagelockedHostAllocation.free)
    return array
