"""The callbacks of a fit, called as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigurationError, DtypeError
from ..history import Record
from .callback import Callback, TrainerLike, as_callback


class Listeners:
    """Callbacks in the order in which they are called: as given, those with columns first, those that save last.

    Raises:
        DtypeError: one is neither a callback nor a function, or has columns that are no names.
        ConfigurationError: a column's name is no name in a file, or two have the same.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
            got = f"{type(callbacks).__name__}"
            raise DtypeError("callbacks", expected="a list of callbacks", got=got, hint="callbacks=[…]")
        self._callbacks: list[Callback] = sorted(
            map(as_callback, callbacks), key=lambda callback: (callback.runs_last, not callback.columns)
        )
        for callback in self._callbacks:
            if isinstance(callback.columns, str):
                raise DtypeError(_columns_of(callback), expected="a tuple of names", got=repr(callback.columns))
            for name in callback.columns:
                check_column(_columns_of(callback), name)
        names = self.columns
        if len(set(names)) < len(names):
            raise ConfigurationError("columns of callbacks", expected="names that differ", got=", ".join(names))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that they add to each record."""
        return tuple(name for callback in self._callbacks for name in callback.columns)

    @property
    def save(self) -> bool:
        """Whether one of them saves the run."""
        return any(callback.runs_last for callback in self._callbacks)

    def steps_until_due(self, step: int, most: int) -> int:
        """How many steps may follow ``step`` finished ones until a ``step_end`` is due, at most ``most``."""
        intervals = [callback.every_steps for callback in self._callbacks]
        return min([most, *(every - step % every for every in intervals if every)])

    # --- the moments of a fit; the first two results say whether the fit ends ---

    def begin(self, trainer: TrainerLike) -> bool:
        return any([_truth(callback, "begin", callback.begin(trainer)) for callback in self._callbacks])

    def add_columns(self, trainer: TrainerLike, record: Record) -> bool:
        """The end of an epoch for callbacks with columns, which come before all that may watch these."""
        return self._end_epoch([c for c in self._callbacks if c.columns and not c.runs_last], trainer, record)

    def epoch_end(self, trainer: TrainerLike, record: Record) -> bool:
        """The end of an epoch for all others."""
        return self._end_epoch([c for c in self._callbacks if not c.columns or c.runs_last], trainer, record)

    def _end_epoch(self, callbacks: Sequence[Callback], trainer: TrainerLike, record: Record) -> bool:
        """What one adds to ``record`` is a column of the history before the next one is called.

        Raises:
            DtypeError: something is added that is no number, or a column is not.
            ConfigurationError: the name of what is added is no name in a file.
        """
        is_over = False
        known = dict(record)
        for callback in callbacks:
            is_over |= _truth(callback, "epoch_end", callback.epoch_end(trainer, record))
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

    def step_end(self, trainer: TrainerLike) -> None:
        for callback in self._callbacks:
            if callback.every_steps and trainer.steps % callback.every_steps == 0:
                callback.step_end(trainer)

    def end(self, trainer: TrainerLike) -> None:
        for callback in self._callbacks:
            callback.end(trainer)

    # --- states, by class and by number among those of one class ---

    def states(self) -> dict[str, dict[str, Any]]:
        return {key: callback.state() for key, callback in self._keyed()}

    def load_states(self, states: Mapping[str, Any]) -> None:
        for key, callback in self._keyed():
            if key in states:
                callback.load_state(states[key])

    def _keyed(self) -> Iterator[tuple[str, Callback]]:
        counts: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            yield f"{name} {counts[name]}", callback


def _truth(callback: Callback, hook: str, value: object) -> bool:
    """Whether what a hook returned is true.

    Raises:
        DtypeError: it is neither true nor false, as an array of several numbers.
    """
    try:
        return bool(value)
    except (TypeError, ValueError) as error:
        what = f"what {type(callback).__name__}.{hook} returns"
        got = f"{type(value).__name__} {value!r}"
        raise DtypeError(what, expected="what is true or false; None goes on", got=got) from error


_COLUMN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # as a file names an array


def check_column(what: str, name: object) -> None:
    """Refuse what is no name of a column that a file can hold."""
    if not isinstance(name, str):
        raise DtypeError(what, expected="a tuple of names", got=f"{type(name).__name__} {name!r}")
    if not _COLUMN.fullmatch(name):
        raise ConfigurationError(what, expected="letters, digits, '_', '.' and '-'", got=repr(name))


def _columns_of(callback: Callback) -> str:
    function = getattr(callback, "function", None)
    name = type(callback).__name__ if function is None else getattr(function, "__name__", repr(function))
    return f"columns of {name}"


def _added(callback: Callback, name: object, value: Any) -> float:
    check_column(_columns_of(callback), name)
    try:
        if np.ndim(value) or isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        what = f"{_columns_of(callback)}, {name!r}"
        raise DtypeError(what, expected="a number", got=f"{type(value).__name__} {value!r}") from None
