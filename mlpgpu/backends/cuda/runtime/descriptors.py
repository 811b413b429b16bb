"""Descriptors that hardware reads memory through: texture objects, and tensor maps of the copy engine."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ....errors import BackendError
from ..kernels import TENSOR_MAP_BYTES, padded_rows
from .bindings import CallError, call, cu
from .device import Device, Resource

# By the columns of a box: the swizzle that spans the bytes of its rows, as cuda/arch/wgmma.cuh describes operands.
_SWIZZLES = {64: "CU_TENSOR_MAP_SWIZZLE_128B", 16: "CU_TENSOR_MAP_SWIZZLE_32B"}


class Texture(Resource):
    """A texture object over ``texels`` float32 numbers at ``address``; ``int(texture)`` is what a kernel takes.

    Raises:
        BackendError: the card's textures do not reach that far.
    """

    def __init__(self, device: Device, address: int, texels: int) -> None:
        if not 1 <= texels <= device.most_texels:
            raise BackendError("texture", expected=f"1 to {device.most_texels:,} texels", got=f"{texels:,}")
        resource = cu.CUDA_RESOURCE_DESC()
        resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        resource.res.linear.devPtr = address
        resource.res.linear.format = cu.CUarray_format.CU_AD_FORMAT_FLOAT
        resource.res.linear.numChannels = 1
        resource.res.linear.sizeInBytes = 4 * texels
        super().__init__(device, call(cu.cuTexObjectCreate, resource, cu.CUDA_TEXTURE_DESC(), None))

    def _destroy(self, handle: Any) -> None:
        call(cu.cuTexObjectDestroy, handle)

    def __int__(self) -> int:
        return int(self.handle)


def tensor_map(address: int, shape: tuple[int, int, int], pitch: int, box: tuple[int, int]) -> np.ndarray:
    """The descriptor by which the copy engine of compute capability 9.0 reads a 16-bit tensor.

    Args:
        address: of the first element, a multiple of 16.
        shape: components, rows and columns; beyond them the engine reads zeros.
        pitch: elements from one row to the next, a multiple of 8.  All components have ``rows`` padded alike.
        box: rows and columns of what a kernel asks for at once, of 64 or 16 columns.

    Returns:
        (128,) uint8, which kernels read from the card's memory.

    Raises:
        BackendError: the engine cannot read such a tensor.
    """
    components, rows, columns = shape
    bytes_of_row, (box_rows, box_columns) = 2 * pitch, box
    try:
        tensor = call(
            cu.cuTensorMapEncodeTiled, cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, address,
            [cu.cuuint64_t(size) for size in (columns, rows, components)],
            [cu.cuuint64_t(step) for step in (bytes_of_row, bytes_of_row * padded_rows(rows))],
            [cu.cuuint32_t(size) for size in (box_columns, box_rows, 1)], [cu.cuuint32_t(1)] * 3,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, _SWIZZLES[box_columns]),
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
    except CallError as error:
        expected = "an address that is a multiple of 16, a pitch of 8, and at most 256 rows in a box"
        got = f"address {address:#x}, shape {shape}, pitch {pitch}, {box_rows} rows: {error}"
        raise BackendError("tensor map", expected=expected, got=got) from error
    return np.frombuffer(ctypes.string_at(tensor.getPtr(), TENSOR_MAP_BYTES), np.uint8)
