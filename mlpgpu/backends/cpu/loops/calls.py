"""Calls of compiled loops, with their arguments as 64-bit words, and lists of them as one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .library import library

Argument = np.ndarray | float | int | None  # an array is its address, None a null pointer


def address_of(array: np.ndarray) -> int:
    """Where an array's first element lies."""
    address: int = array.__array_interface__["data"][0]
    return address


class Call:
    """One loop with its arguments.

    Arguments:
        name: of the loop, as in ``loops.h``.
        arguments: in the order of the function there; arrays are C-contiguous where it walks over them.
        prepare: what is called with it before, such as what sets arguments that change.
    """

    def __init__(self, name: str, *arguments: Argument, prepare: Callable[[Call], object] | None = None) -> None:
        found = library()
        assert found is not None
        self.name, self.address = name, found.address(name)
        self.words = np.zeros(len(arguments), np.int64)
        self._numbers = self.words.view(np.float64)
        self._kept: list[Argument] = list(arguments)  # their memory, as long as this may be called
        self.prepare = prepare
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


def joined(steps: Sequence[Bound | Call]) -> list[Bound]:
    """Functions and calls in order, with neighbouring calls as one function."""
    result: list[Bound] = []
    calls: list[Call] = []
    for step in steps:
        if isinstance(step, Call):
            calls.append(step)
            continue
        if calls:
            result.append(_Together(calls))
            calls = []
        result.append(step)
    if calls:
        result.append(_Together(calls))
    return result


class _Together:
    """Calls in order, as one."""

    __slots__ = "_kept", "_prepared", "_run"

    def __init__(self, calls: list[Call]) -> None:
        found = library()
        assert found is not None
        table = np.array(
            [(call.address, call.words.ctypes.data) for call in calls], np.int64
        )  # structs Call of loops.h
        self._kept = calls, table
        self._run = partial(found.run, ctypes.c_void_p(table.ctypes.data), ctypes.c_int64(len(calls)))
        self._prepared = [(call.prepare, call) for call in calls if call.prepare is not None]

    def __call__(self) -> None:
        for prepare, call in self._prepared:
            prepare(call)
        self._run()
