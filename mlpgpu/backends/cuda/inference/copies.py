"""Rows of an array of the caller's, copied to page-locked memory in the type that the card takes, or as they lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from ...inputs import InputScaling
from ...row_copies import RowCopies
from ..select.inference import past_caches, seconds_awake, threads_for

AT_ONCE = 8  # pieces that are copied at the same time
DOT_MOST = 8192  # elements of which BLAS makes a dot product on one thread


class Fill(Protocol):
    """Copies a part of the rows; with ``check`` returns whether each number is finite."""

    def __call__(self, part: slice, to: np.ndarray, *, check: bool) -> bool: ...


@dataclass(frozen=True)
class Copying:
    """How parts of the rows are copied.

    Attributes:
        begin: begins to copy a part to an array; returns what does the rest, and returns whether each number is
            finite, where that is looked at.
        at_once: how many parts are begun before the first is finished.
    """

    begin: Callable[[slice, np.ndarray], Callable[[], bool]]
    at_once: int = 1


def copied_alone(fill: Fill, *, check: bool) -> Copying:
    """The calling thread copies."""
    return Copying(lambda part, to: partial(fill, part, to, check=check))


def copied_by_pool(fill: Fill, pool: ThreadPoolExecutor, *, check: bool) -> Copying:
    """Threads in Python copy, a part each."""

    def begin(part: slice, to: np.ndarray) -> Callable[[], bool]:
        copied = pool.submit(fill, part, to, check=check)
        # What no thread has begun yet, the calling one does sooner than they do.
        return lambda: fill(part, to, check=check) if copied.cancel() else copied.result()

    return Copying(begin, AT_ONCE)


def copied_by_helpers(copies: RowCopies, nbytes: int, threads: int) -> Copying:
    """Threads in C++ copy, up to so many, all of them the same part; ``nbytes`` are those of all rows."""
    count, awake, is_past = threads_for(nbytes, threads), seconds_awake(), past_caches(nbytes)

    def begin(part: slice, to: np.ndarray) -> Callable[[], bool]:
        return copies.begin(part, to, threads=count, awake=awake, past_caches=is_past).finish

    return Copying(begin, AT_ONCE if count > 1 else 1)


def parts(rows: slice, most: int) -> Iterator[slice]:
    """The rows in parts of at most so many."""
    for start in range(rows.start, rows.stop, most):
        yield slice(start, min(start + most, rows.stop))


def as_they_lie(x: np.ndarray, rows: np.ndarray | None, dtype: np.dtype) -> np.ndarray | None:
    """``x`` if the driver can copy its rows to the card as they lie, else None."""
    return x if rows is None and x.dtype == dtype and x.flags.c_contiguous else None


def fill_from(x: np.ndarray, rows: np.ndarray | None, scaling: InputScaling | None = None) -> Fill:
    """What copies a part of the rows of ``x``, or of those that ``rows`` lists; ``scaling`` standardizes them first."""
    is_same = x.dtype in (np.float32, np.uint8)  # byte order included
    is_float, can_overflow = x.dtype.kind == "f", x.dtype.kind == "f" and x.dtype.itemsize > 4

    def fill(part: slice, to: np.ndarray, *, check: bool) -> bool:
        if rows is None:
            source = x[part]
        elif is_same and x.dtype == to.dtype and x.flags.c_contiguous:
            np.take(x, rows[part], axis=0, out=to, mode="clip")
            return not check or not is_float or all_finite(to)
        else:
            source = x[rows[part]]
        if scaling is not None:
            with np.errstate(all="ignore"):
                scaling.standardize(source, np.empty(source.shape), to)
            return not check or all_finite(to)
        if can_overflow:
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(to, source, casting="unsafe")
        else:
            np.copyto(to, source, casting="unsafe")
        return not check or not is_float or all_finite(to)

    return fill


def all_finite(x: np.ndarray) -> bool:
    """Whether all elements of a C-contiguous float32 array are finite numbers."""
    flat = x.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(np.dot(flat, flat) if x.size <= DOT_MOST else np.add.reduce(flat)):
            return True  # else finite numbers may have been too large for their sum
    return math.isfinite(x.max()) and math.isfinite(x.min())
