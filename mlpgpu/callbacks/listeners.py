"""The callbacks of a fit, called as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigurationError, DtypeError, as_list, shown
from ..history import Record
from .callback import Callback, TrainerLike, as_callback

SCHEDULE = "schedule"  # no key of a callback, which ends in a number


class Listeners:
    """Callbacks in the order in which they are called: as given, those with columns first, those that save last.

    Each has a key, by which a run file knows it: its class and its number among those of one class.

    Raises:
        DtypeError: one is neither a callback nor a function, or has columns that are no names.
        ConfigurationError: a column's name is no name in a file, or two have the same.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
            expected, got = "a list of callbacks", type(callbacks).__name__
            raise DtypeError("callbacks", expected=expected, got=got, hint="callbacks=[…]")
        given = as_list("callbacks", callbacks, "a list of callbacks")
        ordered = sorted(map(as_callback, given), key=lambda callback: (callback.runs_last, not callback.columns))
        self._callbacks = _keyed(ordered)
        for callback in ordered:
            if isinstance(callback.columns, str):
                raise DtypeError(_columns_of(callback), expected="a tuple of names", got=repr(callback.columns))
            for name in callback.columns:
                check_column(_columns_of(callback), name)
        self._followed: Mapping[str, Any] | None = None  # the states of those that rank 0 calls, on another rank
        names = self.columns
        if len(set(names)) < len(names):
            raise ConfigurationError("columns of callbacks", expected="names that differ", got=", ".join(names))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that they add to each record."""
        return tuple(name for callback in self._callbacks.values() for name in callback.columns)

    @property
    def save(self) -> bool:
        """Whether one of them saves the run."""
        return any(callback.runs_last for callback in self._callbacks.values())

    @property
    def keys(self) -> tuple[str, ...]:
        """Their names, by class and by number among those of one class, in order."""
        return tuple(self._callbacks)

    @property
    def moments(self) -> dict[str, str]:
        """When each is called and which columns it adds, as words."""
        described = {key: (callback.every_steps, tuple(callback.columns)) for key, callback in self._callbacks.items()}
        return {key: f"every {steps} steps, columns {columns}" for key, (steps, columns) in described.items()}

    def steps_until_due(self, step: int, most: int) -> int:
        """How many steps may follow ``step`` finished ones until a ``step_end`` is due, at most ``most``."""
        intervals = [callback.every_steps for callback in self._callbacks.values()]
        return min([most, *(every - step % every for every in intervals if every)])

    # --- the moments of a fit ---

    def begin(self, trainer: TrainerLike) -> bool:
        """Whether the fit has nothing to do."""
        return any([_truth(callback, "begin", callback.begin(trainer)) for callback in self._callbacks.values()])

    def due_after_step(self, steps: int) -> tuple[str, ...]:
        """The keys of those that are told of the end of this step, in order."""
        keyed = self._callbacks.items()
        return tuple(key for key, callback in keyed if callback.every_steps and steps % callback.every_steps == 0)

    def due_after_epoch(self) -> tuple[str, ...]:
        """The keys of those that are told of an epoch's end, in order.

        :data:`SCHEDULE` among them stands for the schedule of the rates: those with columns come before it.
        """
        keyed = [(key, callback) for key, callback in self._callbacks.items() if _hears_of_epochs(callback)]
        first = [key for key, callback in keyed if callback.columns and not callback.runs_last]
        return (*first, SCHEDULE, *(key for key, _ in keyed if key not in first))

    def step_end(self, key: str, trainer: TrainerLike) -> None:
        """Tell one of a step's end."""
        self._callbacks[key].step_end(trainer)

    def epoch_end(self, key: str, trainer: TrainerLike, record: Record) -> bool:
        """Tell one of an epoch's end; what it adds to ``record`` is a column of the history when the next one is told.

        Returns:
            whether the fit ends.

        Raises:
            DtypeError: something is added that is no number, or a column is not.
            ConfigurationError: the name of what is added is no name in a file.
        """
        callback, known = self._callbacks[key], dict(record)
        is_over = _truth(callback, "epoch_end", callback.epoch_end(trainer, record))
        added = {name: _added(callback, name, value) for name, value in record.items() if name not in known}
        missing = [name for name in callback.columns if name not in added]
        if missing:
            expected, got = f"{missing[0]!r} in the record after epoch_end", ", ".join(added) or "none"
            raise DtypeError(_columns_of(callback), expected=expected, got=got)
        known |= added
        record.clear()  # what was there is the trainer's
        record.update(known)
        if added:
            trainer.history.extend_last(added)
        return is_over

    def columns_of(self, keys: Iterable[str]) -> set[str]:
        """The columns that those with these keys add."""
        return {name for key in keys if key in self._callbacks for name in self._callbacks[key].columns}

    def end(self, key: str, trainer: TrainerLike) -> None:
        """Tell one of the fit's end."""
        self._callbacks[key].end(trainer)

    # --- states ---

    def states(self) -> dict[str, dict[str, Any]]:
        """Copies of their states, by key."""
        if self._followed is not None:
            return dict(self._followed)
        return {key: _copy(callback.state()) for key, callback in self._callbacks.items()}

    def follow(self, states: Mapping[str, Any]) -> None:
        """Have these states from now on: those of the callbacks of rank 0, which alone calls them."""
        self._followed = states

    def settle(self) -> None:
        """At a fit's end: hand the states followed to this rank's callbacks, so that their attributes tell them."""
        if self._followed is not None:
            self.load_states(self._followed)

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Hand back what :meth:`states` gave."""
        for key, callback in self._callbacks.items():
            if key in states:
                callback.load_state(states[key])


def _keyed(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Callbacks by class and by number among those of one class."""
    counts: dict[str, int] = {}
    keyed = {}
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] = counts.get(name, 0) + 1
        keyed[f"{name} {counts[name]}"] = callback
    return keyed


def _hears_of_epochs(callback: Callback) -> bool:
    return bool(callback.columns) or getattr(callback.epoch_end, "__func__", None) is not Callback.epoch_end


def _copy(state: Any) -> Any:
    """A copy that does not change with the callback."""
    if isinstance(state, Mapping):
        return {key: _copy(value) for key, value in state.items()}
    return [_copy(value) for value in state] if isinstance(state, list) else state


def _truth(callback: Callback, hook: str, value: object) -> bool:
    """Whether what a hook returned is true.

    Raises:
        DtypeError: it is neither true nor false, as an array of several numbers.
    """
    try:
        return bool(value)
    except Exception as error:  # an array of several, a tensor, or whoever wrote its __bool__
        what = f"what {type(callback).__name__}.{hook} returns"
        got = shown(value)
        raise DtypeError(what, expected="what is true or false; None goes on", got=got) from error


_COLUMN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # as a file names an array


def check_column(what: str, name: object) -> None:
    """Refuse what is no name of a column that a file can hold."""
    if not isinstance(name, str):
        raise DtypeError(what, expected="a tuple of names", got=shown(name))
    if not _COLUMN.fullmatch(name):
        raise ConfigurationError(what, expected="letters, digits, '_', '.' and '-'", got=repr(name))


def _columns_of(callback: Callback) -> str:
    function = getattr(callback, "function", None)
    name = type(callback).__name__ if function is None else getattr(function, "__name__", repr(function))
    return f"columns of {name}"


def _added(callback: Callback, name: object, value: Any) -> float:
    check_column(_columns_of(callback), name)
    try:
        if np.ndim(value) or isinstance(value, (str, bytes)) or np.ma.is_masked(value):
            raise TypeError
        return float(value)
    except Exception:  # a tensor, or whoever wrote its __float__, may raise any
        what = f"{_columns_of(callback)}, {name!r}"
        raise DtypeError(what, expected="a number", got=shown(value)) from None
