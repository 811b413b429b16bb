"""Rows of the caller's arrays as ``rows.h`` reads them."""

from __future__ import annotations

import numpy as np

# The struct Copy of rows.h, pointers as integers.
COPY = (
    *("x", "kind", "row_bytes", "item_bytes", "columns", "rows", "row_count", "mean", "scale", "first", "count", "to"),
    "is_past_caches",
)

# The types that are copied to float32 or float64, in the order of the enumeration Kind of rows.h behind BYTES.
BYTES = 0
KINDS = ("f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
_KIND = {np.dtype(name): number for number, name in enumerate(KINDS, 1)} | {np.dtype(bool): 1 + KINDS.index("u1")}


def described(x: np.ndarray, dtype: np.dtype) -> dict[str, int] | None:
    """The fields of COPY that say how to read ``x`` (rows, columns) as ``dtype``, float32, float64 or uint8.

    None where its numbers are of another type, byte order or alignment, or where there are none.
    """
    if not x.flags.aligned or not x.size:
        return None
    kind = BYTES if dtype == x.dtype == np.uint8 else _KIND.get(x.dtype)
    if kind is None or (kind != BYTES and dtype not in (np.float32, np.float64)):
        return None
    row_bytes, item_bytes = x.strides if x.shape[1] > 1 else (x.strides[0],) * 2
    return {
        "x": x.ctypes.data, "kind": kind, "row_bytes": row_bytes, "item_bytes": item_bytes, "columns": x.shape[1],
        "row_count": len(x),
    }  # fmt: skip
