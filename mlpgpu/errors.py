"""Every error a user can meet.

All of them derive from :class:`MlpgpuError` and are built the same way: *what* was looked at, what
was *expected* there and what was *got* instead, with an optional *hint* at the way out.  Each class
also derives from the built-in exception that a caller would catch for such a mistake.

=====================  ================  ==========================================================
class                  also a            raised when
=====================  ================  ==========================================================
ConfigurationError     ValueError        an argument's value, or a combination of them, has no meaning
UnknownNameError       KeyError          a name is not in the table it is looked up in (a ValueError too)
ShapeError             ValueError        an array or a layer has the wrong number of rows or columns
DtypeError             TypeError         an array or an argument has the wrong type
DataError              ValueError        the values are unusable: NaN, infinity, labels out of range
EmptyDataError         ValueError        there are no rows (a kind of DataError)
DataMismatchError      ValueError        a run is resumed on another data set than it was started on
DivergenceError        ArithmeticError   a loss or a parameter stopped being finite (a ValueError too)
TornStateError         RuntimeError      a trainer is used on after an exception ended a step in its middle
BackendError           RuntimeError      a backend, a card or a driver is missing or unusable
MissingPackageError    ImportError       an optional package is not installed, or too old
FileFormatError        ValueError        a file's contents are damaged, foreign, too new or hostile
StorageError           OSError           the file system refused: no permission, no space, no folder
DownloadError          OSError           a data set is neither in the folder nor to be had
ReadOnlyError          AttributeError    an attribute is set that stays what it was made with
=====================  ================  ==========================================================
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from .names import NEAR, SYNONYMS

Name = TypeVar("Name", bound=str)


class MlpgpuError(Exception):
    """Base of all errors of this package.

    Attributes: ``what`` was looked at, what was ``expected`` there, what was ``got``, and a ``hint``.
    """

    def __init__(self, what: str, *, expected: object, got: object, hint: str = "") -> None:
        self.what, self.expected, self.got, self.hint = what, str(expected), str(got), hint
        message = f"{what}: expected {self.expected}, got {self.got}"
        super().__init__(f"{message} ({hint})" if hint else message)

    def __reduce__(self) -> tuple:
        # Exceptions pickle by their positional arguments, and these are named ones.
        return _rebuild, (type(self), self.what, self.expected, self.got, self.hint), self.__dict__


def _rebuild(kind: type[MlpgpuError], what: str, expected: str, got: str, hint: str) -> MlpgpuError:
    return kind(what, expected=expected, got=got, hint=hint)


class ConfigurationError(MlpgpuError, ValueError):
    """An argument's value, or a combination of arguments, has no meaning."""


class UnknownNameError(MlpgpuError, ValueError, KeyError):
    """A name is not in the table it is looked up in; the hint gives the nearest one that is."""

    # KeyError shows the repr of its argument.
    __str__ = Exception.__str__


class ShapeError(MlpgpuError, ValueError):
    """An array or a layer has the wrong number of dimensions, rows or columns."""


class DtypeError(MlpgpuError, TypeError):
    """An array or an argument has the wrong type."""


class DataError(MlpgpuError, ValueError):
    """Values that cannot be trained on: NaN, infinity, labels out of range."""


class EmptyDataError(DataError):
    """A data set without rows."""


class DataMismatchError(MlpgpuError, ValueError):
    """A run is resumed on another data set than it was started on."""


class DivergenceError(MlpgpuError, ArithmeticError, ValueError):
    """A loss or a parameter stopped being finite.  ``step`` is the first such step, from 0."""

    step: int = -1


class TornStateError(MlpgpuError, RuntimeError):
    """A trainer is used on after an exception ended a step in its middle; what was saved before stands."""


class BackendError(MlpgpuError, RuntimeError):
    """A backend, a card or a driver is missing or unusable."""


class MissingPackageError(MlpgpuError, ImportError):
    """An optional package is not installed, or too old."""

    # ImportError shows a message of its own.
    __str__ = Exception.__str__


class FileFormatError(MlpgpuError, ValueError):
    """A file's contents are damaged, foreign, too new, or not to be trusted."""


class StorageError(MlpgpuError, OSError):
    """The file system refused: no permission, no space, no such folder."""

    # OSError derives its text from an errno that is not there.
    __str__ = Exception.__str__


class DownloadError(MlpgpuError, OSError):
    """A data set is neither in the folder named nor to be had from the network."""

    __str__ = Exception.__str__


class ReadOnlyError(MlpgpuError, AttributeError):
    """An attribute is set that stays what it was made with, or one that there is not."""


def warn_caller(message: str) -> None:
    """Warn of something at the place outside this package that led to it."""
    package, depth = __name__.partition(".")[0], 2  # 1 is here
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


def refuse_setting(owner: object, name: str, settable: Iterable[str], hint: str) -> None:
    """Refuse to set the public attribute ``name`` of ``owner``, unless it is ``settable``.

    Raises:
        ReadOnlyError: always for other public names.
    """
    if name.startswith("_") or name in settable:
        return
    what = f"{type(owner).__name__}.{name}"
    if hasattr(type(owner), name) or name in vars(owner):
        raise ReadOnlyError(what, expected="to be read: it stays as it was made", got="an assignment", hint=hint)
    hint = did_you_mean(name, tuple(settable)) or hint
    raise ReadOnlyError(what, expected=f"one that can be set: {', '.join(settable)}", got=repr(name), hint=hint)


def lookup(kind: str, name: object, table: Iterable[Name]) -> Name:
    """Return ``name`` if ``table`` holds it, or the one there that it is a synonym of; otherwise hint at the nearest.

    Raises:
        DtypeError: ``name`` is not a string.
        UnknownNameError: ``table`` does not hold it.
    """
    names = list(table)
    if not isinstance(name, str):
        raise DtypeError(kind, expected="a name: one of " + ", ".join(names), got=f"{type(name).__name__} {name!r}")
    if name in names:
        return name
    for synonym in SYNONYMS.get(name, ()):
        if synonym in names:
            return names[names.index(synonym)]
    raise UnknownNameError(kind, expected="one of " + ", ".join(names), got=repr(name), hint=did_you_mean(name, names))


def did_you_mean(name: object, names: Sequence[str]) -> str:
    """A hint at the one of ``names`` that is meant, or none."""
    written = str(name).lower()
    if written.startswith("val_"):  # as Keras has it
        written = "validation_" + written.removeprefix("val_")
    meant = _meant(written, names)
    near = [meant] if meant else difflib.get_close_matches(written, names, n=1, cutoff=0.5)
    if near and near[0] == "identity" and written == "softmax":
        return "the loss applies softmax: the last layer's activation is 'identity'"
    return f"did you mean {near[0]!r}?" if near else ""


def _meant(written: str, names: Sequence[str]) -> str | None:
    """The one of ``names`` that ``written`` is another spelling of, or that SYNONYMS and NEAR have for it.

    Spellings may differ in hyphens and the like, and end as other libraries' classes and functions do.
    """
    known = {_letters(name): name for name in names}
    for others in (NEAR, {name: next(iter(set(meant) & set(names)), "") for name, meant in SYNONYMS.items()}):
        known = {_letters(name): meant for name, meant in others.items() if meant in names} | known
    spelled = _letters(written)
    for ending in ("", "loss", "score", "withlogits", "withlogitsloss"):
        if spelled.endswith(ending) and spelled.removesuffix(ending) in known:
            return known[spelled.removesuffix(ending)]
    return None


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def check_integer(what: str, value: object, *, least: int, most: int | None = None) -> int:
    """Return ``value`` as an int if it is a whole number in [least, most].

    Raises:
        DtypeError: it is not a whole number (``True`` is none).
        ConfigurationError: it lies outside the range.
    """
    expected = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise DtypeError(what, expected=expected, got=f"{type(value).__name__} {value!r}")
    try:
        number = value.__index__()
    except TypeError:  # an array of several
        raise DtypeError(what, expected=expected, got=f"{type(value).__name__} {value!r}") from None
    if number < least or (most is not None and number > most):
        raise ConfigurationError(what, expected=expected, got=number)
    return number


def check_number(
    what: str, value: object, *, least: float = float("-inf"), below: float = float("inf"), above: float | None = None
) -> float:
    """Return ``value`` as a float if it is finite, at least ``least``, under ``below`` and over ``above``.

    Raises:
        DtypeError: it is not a real number (``True`` is none).
        ConfigurationError: it is not finite or lies outside the range.
    """
    bounds = [f"> {above:g}"] if above is not None else [f">= {least:g}"] if least != float("-inf") else []
    bounds += [f"< {below:g}"] if below != float("inf") else []
    expected = " ".join(["a finite number", " and ".join(bounds)]).strip()
    if isinstance(value, (bool, np.bool_, str, bytes)) or not hasattr(value, "__float__"):
        raise DtypeError(what, expected=expected, got=f"{type(value).__name__} {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise DtypeError(what, expected=expected, got=f"{type(value).__name__} {value!r}") from None
    except OverflowError:
        raise ConfigurationError(what, expected=expected, got="a number beyond float64") from None
    inside = least <= number < below and (above is None or number > above)
    if not inside or number in (float("inf"), float("-inf")):  # NaN fails the comparison
        raise ConfigurationError(what, expected=expected, got=number)
    return number
