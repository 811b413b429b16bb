"""Copies of rows by C++: in the type that a card takes, in one pass that also looks for what is not finite.

Where there is no compiler, or none that can build it, there are no such copies; :func:`why_not` says why.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from pathlib import Path
from types import TracebackType

import numpy as np

from ..host_library import UnusableError, built
from ..inputs import InputScaling
from ..native import COPY, described
from ..sources import native_folder

OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-pthread")
LINKED = ("-fPIC", "-shared")

_JOB = "compute", "what", "pieces", "slot", "number"


class _Copying(ctypes.Structure):
    """The struct Copying of copies.h, pointers as integers."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*COPY, *_JOB, "is_infinite"))


class _Library:
    """The functions of copies.h."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(os.fspath(path))
        self.begin, self.finish, self.helper_count = library.begin_copy, library.finish_copy, library.helper_count
        self.begin.argtypes, self.begin.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), None
        self.finish.argtypes, self.finish.restype = (ctypes.c_void_p,), ctypes.c_int64
        self.helper_count.restype = ctypes.c_int64


@functools.cache
def _found() -> _Library | str:
    """The library, or why there is none."""
    try:
        folders = [Path(__file__).parent, native_folder()]
        return _Library(built("row_copies", '#include "copies.h"\n', folders, OPTIONS, LINKED))
    except (UnusableError, OSError, AttributeError) as error:
        return str(error).strip() or type(error).__name__


def is_there() -> bool:
    """Whether rows can be copied so.  The first call on a machine compiles, for about two seconds."""
    return not isinstance(_found(), str)


def why_not() -> str | None:
    """Why they can not, if so."""
    found = _found()
    return found if isinstance(found, str) else None


class Begun:
    """A copy under way."""

    __slots__ = "_address", "_copying", "_library", "_to", "is_finite"

    def __init__(self, library: _Library, copying: _Copying, to: np.ndarray) -> None:
        self._library, self._copying, self._to = library, copying, to
        self._address = ctypes.addressof(copying)
        self.is_finite: bool | None = None

    def begin(self, helpers: int, awake_nanoseconds: int) -> None:
        """Have helpers begin."""
        self._library.begin(self._address, helpers, awake_nanoseconds)

    def finish(self) -> bool:
        """Copy what is left, and wait for the helpers; returns whether each number that was written is finite."""
        if self.is_finite is None:
            self.is_finite = bool(self._library.finish(self._address))
        return self.is_finite


class RowCopies:
    """Copies of rows of one array; as a context manager it ends, in any case, when none is under way.

    Use :meth:`of` to make one.  Arrays must stay as they are meanwhile.
    """

    def __init__(self, library: _Library, x: np.ndarray, read: dict[str, int], rows: np.ndarray | None) -> None:
        self._library, self._kept = library, [x, rows]
        self._whole = _Copying(**read, rows=0 if rows is None else rows.ctypes.data)
        self._under_way: deque[Begun] = deque()

    @classmethod
    def of(
        cls, x: np.ndarray, rows: np.ndarray | None, dtype: np.dtype, scaling: InputScaling | None = None
    ) -> RowCopies | None:
        """Copies of ``x`` (any, n_in), or of the rows that ``rows`` (any,) lists, as ``dtype``, float32 or uint8.

        None where there is no library, or where ``x`` is of another type, byte order or alignment.

        Arguments:
            scaling: standardizes them first, in float64.
        """
        found = _found()
        read = None if isinstance(found, str) else described(x, dtype)
        if isinstance(found, str) or read is None:
            return None
        copies = cls(found, x, read, None if rows is None else np.ascontiguousarray(rows, np.int64))
        if scaling is not None:
            mean, scale = (np.ascontiguousarray(each, np.float64) for each in (scaling.mean, scaling.scale))
            copies._kept += [mean, scale]
            copies._whole.mean, copies._whole.scale = mean.ctypes.data, scale.ctypes.data
        return copies

    def begin(
        self, part: slice, to: np.ndarray, *, threads: int = 1, awake: float = 0.0, past_caches: bool = False
    ) -> Begun:
        """Begin to copy a part of the rows to ``to`` (its rows, n_in), C-contiguous.

        Arguments:
            threads: with the one that calls; all others are shared by everyone who copies, so there may be fewer.
            awake: seconds for which threads that have nothing left wait for the next copy before they sleep.
            past_caches: what is written does not displace what caches hold.
        """
        copying = _Copying.from_buffer_copy(self._whole)
        copying.first, copying.count, copying.is_past_caches = part.start, len(to), past_caches
        copying.to = to.ctypes.data
        begun = Begun(self._library, copying, to)
        if threads > 1:
            self._under_way.append(begun)  # before it begins, so that nothing lets its arrays go
            begun.begin(threads - 1, round(1e9 * awake))
        return begun

    def __enter__(self) -> RowCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._under_way:
            self._under_way[0].finish()
            self._under_way.popleft()
