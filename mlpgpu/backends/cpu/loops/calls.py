"""Calls of compiled loops, with their arguments as 64-bit words, and lists of them as one call."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .library import library

Argument = np.ndarray | float | int | None  # an array is its address, None a null pointer


def _asked_address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _read_address(array: np.ndarray) -> int:
    return _word_at(id(array) + _HEADER_BYTES).value or 0


# The address is the first field of an array's object, behind CPython's header (PyArrayObject of NumPy's C API).
# Reading it takes 0.1 µs, asking NumPy for it 0.8, and a prediction of one row, which takes 4 µs, needs two addresses.
_HEADER_BYTES, _word_at = object.__basicsize__, ctypes.c_void_p.from_address
_PROBE = np.arange(4)[1:]
_is_read = platform.python_implementation() == "CPython" and _read_address(_PROBE) == _asked_address(_PROBE)
address_of: Callable[[np.ndarray], int] = _read_address if _is_read else _asked_address  # of an array's first element


def steps_of(count: int, dtype: np.dtype) -> np.ndarray:
    """So many structs TrainingStep of ``steps.h``, pointers as integers, whose rates are of this type; all 0."""
    fields = [
        *((name, np.int64) for name in ("phases", "phase_count", "batch", "storage")),
        *((name, np.uint64) for name in ("number", "seed")),
        *((name, np.float64) for name in ("scale", "inverse_weight")),
        ("rates", dtype, 4),
        *((name, np.float64) for name in ("loss", "weight")),
    ]
    return np.zeros(count, np.dtype(fields))


class Call:
    """One loop with its arguments.

    Arguments:
        dtype: of the numbers that it computes with.
        name: of the loop, as in ``loops.h``.
        arguments: in the order of the function there; arrays are C-contiguous where it walks over them.
    """

    def __init__(self, dtype: np.dtype, name: str, *arguments: Argument) -> None:
        found = library(dtype)
        assert found is not None
        self.dtype, self.name, self.address = dtype, name, found.address(name)
        self.words = np.zeros(len(arguments), np.int64)
        self._numbers = self.words.view(np.float64)
        self._kept: list[Argument] = list(arguments)  # their memory, as long as this may be called
        for place, argument in enumerate(arguments):
            self.set(place, argument)

    def set(self, place: int, argument: Argument) -> None:
        """Give another argument."""
        self._kept[place] = argument
        if isinstance(argument, np.ndarray):
            self.words[place] = address_of(argument)
        elif isinstance(argument, float):
            self._numbers[place] = argument
        else:
            self.words[place] = argument or 0

    def forget(self, place: int) -> None:
        """Keep an argument's array no longer; whoever calls sets its address each time."""
        self._kept[place] = None

    def places(self, array: np.ndarray) -> list[int]:
        """Which arguments are this array."""
        return [place for place, argument in enumerate(self._kept) if argument is array]


Bound = Callable[[], None]


def table_of(calls: Sequence[Call]) -> np.ndarray:
    """The structs Call of ``loops.h``, (calls, 2) int64."""
    return np.array([(call.address, call.words.ctypes.data) for call in calls], np.int64).reshape(-1, 2)


def joined(steps: Sequence[Bound | Call], now: np.ndarray | None = None) -> list[Bound]:
    """Functions and calls in order, with neighbouring calls, all of one type of numbers, as one function.

    ``now`` (1,) of :func:`steps_of` is the step, for calls that read it.
    """
    result: list[Bound] = []
    calls: list[Call] = []
    for step in steps:
        if isinstance(step, Call):
            calls.append(step)
            continue
        if calls:
            result.append(_Together(calls, now))
            calls = []
        result.append(step)
    if calls:
        result.append(_Together(calls, now))
    return result


class _Together:
    """Calls in order, as one."""

    __slots__ = "_kept", "_run"

    def __init__(self, calls: list[Call], now: np.ndarray | None) -> None:
        found = library(calls[0].dtype)
        assert found is not None
        table = table_of(calls)
        self._kept = calls, table, now
        of_step = ctypes.c_void_p(None if now is None else now.ctypes.data)
        self._run = partial(found.run, ctypes.c_void_p(table.ctypes.data), ctypes.c_int64(len(calls)), of_step)

    def __call__(self) -> None:
        self._run()
