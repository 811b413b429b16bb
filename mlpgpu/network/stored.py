"""Parameters that lie in an open file, for networks that nobody may have room for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import storage
from ..backends import square_sum
from ..errors import FileFormatError
from ..layers import Layer
from .saved import parameter_paths

PIECE = 1 << 20  # numbers that are looked at, at a time


class StoredParameters:
    """The parameters of a network as a file has them; whoever asks reads them there, whole or some rows.

    Raises:
        FileFormatError: the file lacks some, or has others, or numbers that are not finite.
    """

    is_readable_while_running = False

    def __init__(self, file: storage.OpenFile, layers: Sequence[Layer], dtype: np.dtype) -> None:
        self._file, self._dtype = file, dtype
        self._arrays = parameter_paths(layers)
        for parameter, path in self._arrays:
            check_form(file, path, parameter.shape, dtype)
            for first in range(0, parameter.size, PIECE):
                if not np.isfinite(file.read(path, first, min(PIECE, parameter.size - first))).all():
                    raise FileFormatError(path, expected="finite values", got="NaN or infinity")

    def rows(self, place: int, first: int, end: int) -> np.ndarray:
        """Rows ``first`` to ``end`` of the array at a place in the plan."""
        parameter, path = self._arrays[place]
        row = parameter.size // parameter.shape[0]
        return self._file.read(path, first * row, (end - first) * row).reshape(-1, *parameter.shape[1:])

    def read_parameters(self) -> np.ndarray:
        """All of them, (P,)."""
        flat = [self._file.read(path, 0, parameter.size) for parameter, path in self._arrays]
        return np.concatenate([np.empty(0, self._dtype), *flat])

    def is_finite(self) -> bool:
        """Whether each of them is a finite number."""
        return True

    def square_sum(self, parts: Sequence[slice]) -> float:
        """The sum of the squares of these parts of them, (P,)."""
        return square_sum(self.read_parameters(), parts)


def check_form(file: storage.OpenFile, path: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise FileFormatError unless a file has an array of this shape and dtype."""
    form = file.form(path)
    if form != (shape, dtype):
        got = "nothing" if form is None else f"{form[1]} {form[0]}"
        raise FileFormatError(path, expected=f"{dtype} {shape}", got=got)
