"""Calls that threads share: phases of them, whose parts may be computed side by side (``steps.h``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial

import numpy as np

from ...cores import granted_cores
from .calls import Bound, Call, joined, steps_of, table_of
from .library import library

AWAKE_NANOSECONDS = 200_000  # that helpers wait for the next call, far more than lies between two of a fit

Parts = list[list[Call]]  # the calls of each part of a phase


class Phases:
    """Calls by phase and part, bound to their arrays; all phases have as many parts, some of which may be empty.

    Attributes:
        calls: of each part of each phase.
        address, count: of the structs Phase of ``steps.h``.
    """

    def __init__(self, phases: Sequence[Parts]) -> None:
        tables = [[table_of(calls) for calls in parts] for parts in phases]
        parts = [np.array([(each.ctypes.data, len(each)) for each in row], np.int64) for row in tables]
        self._table = np.array([each.ctypes.data for each in parts], np.int64)
        self._kept = tables, parts
        self.calls = phases
        self.address, self.count = self._table.ctypes.data, len(phases)


def helpers_of(parts: int) -> int:
    """How many threads help with phases of so many parts: no more than the process may use, with the one that calls."""
    return min(parts, _cores()) - 1


@functools.cache
def _cores() -> int:
    return granted_cores()


def run_steps(dtype: np.dtype, steps: np.ndarray, count: int, parts: int, helpers: int, finished: np.ndarray) -> None:
    """Compute the first ``count`` of ``steps``, an array of :func:`steps_of`, by the loops over numbers of ``dtype``.

    Their phases have so many ``parts`` each, which ``helpers`` threads share with the calling one.  Afterwards
    ``finished`` (1,) int64 is ``count``.
    """
    found = library(dtype)
    assert found is not None
    found.run_steps(steps.ctypes.data, count, parts, helpers, AWAKE_NANOSECONDS, finished.ctypes.data)


def shared(parts: Parts) -> Bound:
    """One phase of calls, at least one in each part, as a function."""
    if len(parts) == 1:
        (together,) = joined(parts[0])
        return together
    return _Shared(parts)


class _Shared:
    """Calls of one phase, as one."""

    __slots__ = "_kept", "_run"

    def __init__(self, parts: Parts) -> None:
        phases, dtype = Phases([parts]), parts[0][0].dtype
        step, finished = steps_of(1, dtype), np.zeros(1, np.int64)
        step["phases"], step["phase_count"] = phases.address, phases.count
        self._kept = phases
        self._run = partial(run_steps, dtype, step, 1, len(parts), helpers_of(len(parts)), finished)

    def __call__(self) -> None:
        self._run()
