"""Room for inputs of which nobody knows beforehand how many rows there will be."""

from __future__ import annotations

import contextlib
import tempfile
from typing import IO

import numpy as np
import psutil

from ..errors import EmptyDataError, StorageError

MEMORY_SHARE = 0.5  # of the memory that is free, what inputs may take; larger ones lie in a file


class Room:
    """Room for rows of inputs that come piece by piece, in memory or in a temporary file.

    Arguments:
        width: of a row.
        rows: how many come, or None if nobody knows.
    """

    def __init__(self, width: int, rows: int | None) -> None:
        self._width, self._rows = width, 0
        self._most = psutil.virtual_memory().available * MEMORY_SHARE
        is_small = rows is not None and rows * width * 4 <= self._most
        self._whole = np.empty((rows or 0, width), np.float32) if is_small else None
        self._pieces: list[np.ndarray] = []
        self._file: IO[bytes] | None = None
        self._closing = contextlib.ExitStack()

    def take(self, rows: int) -> np.ndarray:
        """The next rows, (rows, width) float32, to be written before others are taken.

        Raises:
            StorageError: there is no room for the temporary file.
        """
        first, self._rows = self._rows, self._rows + rows
        if self._whole is not None:
            return self._whole[first : self._rows]
        piece = np.empty((rows, self._width), np.float32)
        self._pieces.append(piece)
        # Pieces in memory are put together in the end, when there are two of each.
        if self._file is None and 2 * self._rows * self._width * 4 > self._most:
            file = tempfile.TemporaryFile(prefix="mlpgpu-")  # noqa: SIM115 (closed by `filled`, or with this object)
            self._file = self._closing.enter_context(file)
        if self._file is not None:
            self._write(self._file, keep=1)
        return piece

    def _write(self, file: IO[bytes], keep: int) -> None:
        """Move pieces that are filled to the file, all but the last ``keep``."""
        filled = self._pieces[: len(self._pieces) - keep]
        del self._pieces[: len(filled)]
        try:
            for piece in filled:
                file.write(piece.data)
            file.flush()
        except OSError as error:
            expected = f"room for {self._rows * self._width * 4:,} bytes of inputs in {tempfile.gettempdir()}"
            hint = "TMPDIR names another folder; kinds={…: 'ignore'} or most_categories= make fewer inputs"
            raise StorageError("temporary file", expected=expected, got=error.strerror or error, hint=hint) from error

    def filled(self, what: str) -> np.ndarray:
        """All rows, (rows, width).

        Raises:
            EmptyDataError: there are none.
            StorageError: there is no room for the temporary file.
        """
        if not self._rows:
            raise EmptyDataError(what, expected="at least one row", got="none")
        if self._whole is not None:
            return self._whole
        if self._file is None:
            return self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)
        with self._closing:  # the map keeps what it needs
            self._write(self._file, keep=0)
            return np.memmap(self._file, np.float32, "r", shape=(self._rows, self._width))
