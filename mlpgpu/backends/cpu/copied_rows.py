"""Inputs of a prediction that a compiled loop copies: bytes, other numbers, chosen rows, columns with gaps."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import numpy as np

from ..inputs import InputScaling
from ..native import COPY, described
from .loops import Call, address_of, has_loop

_X, _ROWS, _ROW_COUNT = (COPY.index(name) for name in ("x", "rows", "row_count"))


class CopiedRows:
    """Rows of an array as ``copy_rows`` of ``steps.h`` reads them: one after another, or those of a list.

    Arguments:
        x: (N, n_in), of the kind of arrays that it is pointed at.
        dtype: of the copies.
        scale: what numbers are multiplied by, or None.
        scaling: what standardizes them before they are rounded, or None.
    """

    def __init__(self, x: np.ndarray, dtype: np.dtype, scale: float | None, scaling: InputScaling | None) -> None:
        fields = described(x, dtype)
        assert fields is not None
        if scaling is not None:
            fields |= {"mean": address_of(scaling.mean), "scale": address_of(scaling.scale)}
        self._words = np.array([fields.get(name, 0) for name in COPY], np.int64)
        self._dtype, self._scale, self._kept = dtype, scale or 0.0, scaling

    def calls(self, rows: slice, to: np.ndarray) -> list[Call]:
        """What copies these of the rows to ``to`` (rows, n_in)."""
        return [Call(self._dtype, "copy_rows", self._words, self._scale, rows.start, rows.stop - rows.start, to)]

    def point_at(self, x: np.ndarray, rows: np.ndarray | None) -> None:
        """Copy all rows of ``x``, or those at ``rows`` (int64, C-contiguous); whoever calls keeps both."""
        words = self._words
        words[_X], words[_ROW_COUNT] = address_of(x), len(x)
        words[_ROWS] = 0 if rows is None else address_of(rows)


def can_be_copied(x: np.ndarray, rows: np.ndarray | None, dtype: np.dtype) -> bool:
    """Whether a loop reads rows of such an array, to write them as ``dtype``."""
    is_list = rows is None or (rows.dtype == np.int64 and rows.flags.carray)
    return is_list and x.flags.aligned and _has_copies(x.dtype, dtype)


def kind_of(x: np.ndarray) -> Hashable:
    """What arrays have in common that the same :class:`CopiedRows` can be pointed at."""
    return x.dtype, x.strides


@lru_cache(maxsize=64)
def _has_copies(given: np.dtype, dtype: np.dtype) -> bool:
    return has_loop(dtype, "copy_rows") and described(np.zeros((1, 1), given), dtype) is not None
