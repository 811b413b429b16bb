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
RankError              RuntimeError      ranks do not come to the same calls, or not in time, or disagree
MissingPackageError    ImportError       an optional package is not installed, or too old
FileFormatError        ValueError        a file's contents are damaged, foreign, too new or hostile
StorageError           OSError           the file system refused: no permission, no space, no folder
DownloadError          OSError           a data set is neither in the folder nor to be had
ReadOnlyError          AttributeError    an attribute is set that stays what it was made with
=====================  ================  ==========================================================
"""

from __future__ import annotations

import difflib
import operator
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np

from .names import NEAR, SYNONYMS

Name = TypeVar("Name", bound=str)

MOST_COUNT = 2**63 - 1  # as int64 holds it
SHOWN_CHARACTERS = 300  # of a value in a message


class MlpgpuError(Exception):
    """Base of all errors of this package.

    Attributes: ``what`` was looked at, what was ``expected`` there, what was ``got``, and a ``hint``.
    """

    _most_shown: ClassVar[int] = SHOWN_CHARACTERS  # of what was looked at, and of what was got

    def __init__(self, what: str, *, expected: object, got: object, hint: str = "") -> None:
        self.what, self.got = _shortened(what, self._most_shown), _shortened(got, self._most_shown)
        self.expected, self.hint = str(expected), hint
        message = f"{what}: expected {self.expected}, got {self.got}"
        # Text with halves of surrogate pairs cannot be printed.
        printable = (f"{message} ({hint})" if hint else message).encode("utf-8", "backslashreplace").decode()
        super().__init__(printable)

    def __reduce__(self) -> tuple:
        # Exceptions pickle by their positional arguments, and these are named ones.
        return _rebuild, (type(self), self.what, self.expected, self.got, self.hint), self.__dict__


def _shortened(value: object, most: int = SHOWN_CHARACTERS) -> str:
    """``value`` as text, with its middle left out where that is longer than ``most``."""
    try:
        text = str(value)
    except Exception as error:  # of whoever wrote its __repr__; a whole number may have too many digits
        text = f"a {type(value).__name__} that cannot be shown: {type(error).__name__}"
    gap = " … "
    half = (most - len(gap)) // 2
    return text if len(text) <= most else f"{text[:half]}{gap}{text[-half:]}"


def shown(value: object, *, typed: bool = True) -> str:
    """The repr of a value that is none of those expected, for a message; behind its type, if ``typed``."""
    try:
        text = repr(value)
    except Exception as error:  # as in _shortened
        return f"{type(value).__name__} that cannot be shown: {type(error).__name__}"
    return f"{type(value).__name__} {_shortened(text)}" if typed else _shortened(text)


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

    _most_shown = 1 << 16  # what a compiler says


class RankError(MlpgpuError, RuntimeError):
    """One of several ranks does not come to a call in time, comes to another one, or has other data or arguments."""


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
        raise DtypeError(kind, expected="a name: one of " + ", ".join(names), got=shown(name))
    for known in (name, *SYNONYMS.get(name, ())):
        if known in names:
            return names[names.index(known)]
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


def check_integer(what: str, value: object, *, least: int, most: int | None = None, limit: int = MOST_COUNT) -> int:
    """Return ``value`` as an int if it is a whole number in [least, most].

    ``limit`` is a most that arithmetic sets: messages name it only where a value exceeds it.

    Raises:
        DtypeError: it is not a whole number (``True`` is none).
        ConfigurationError: it lies outside the range.
    """
    expected = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    try:
        if isinstance(value, (bool, np.bool_)) or np.ma.is_masked(value):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except Exception:  # a tensor, or whoever wrote its __index__, may raise any
        raise DtypeError(what, expected=expected, got=shown(value)) from None
    if most is None and number > limit:
        most, expected = limit, f"a whole number from {least} to {limit}"
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
    try:
        if not _may_be_number(value):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ConfigurationError(what, expected=expected, got="a number beyond float64") from None
    except Exception:  # a tensor, or whoever wrote its __float__, may raise any
        raise DtypeError(what, expected=expected, got=shown(value)) from None
    inside = least <= number < below and (above is None or number > above)
    if not inside or number in (float("inf"), float("-inf")):  # NaN fails the comparison
        raise ConfigurationError(what, expected=expected, got=number)
    return number


def _may_be_number(value: Any) -> bool:
    """Whether ``float`` may be asked: it reads text as well, and takes arrays of one element and halves of complex."""
    if isinstance(value, (bool, str, bytes, bytearray, complex)) or not hasattr(value, "__float__"):
        return False
    if isinstance(value, (np.generic, np.ndarray)):
        return value.ndim == 0 and value.dtype.kind in "iuf" and not np.ma.is_masked(value)
    return getattr(value, "ndim", 0) == 0


def check_truth(what: str, value: object) -> bool:
    """Return ``value`` as a bool if it is True or False, NumPy's too.

    Raises:
        DtypeError: it is anything else, which Python might count as true.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise DtypeError(what, expected="True or False", got=shown(value, typed=False))
    return bool(value)


def check_text(what: str, value: object) -> str:
    """Return ``value`` as a str if it is one that files can hold.

    Raises:
        DtypeError: it is no string.
        ConfigurationError: it holds a NUL, or half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise DtypeError(what, expected="a string", got=shown(value))
    text = str.__str__(value)  # a member of an Enum prints as something else
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigurationError(what, expected="text that UTF-8 can hold, without NUL", got=repr(text))
    return text


def as_list(what: str, values: object, expected: str) -> list[Any]:
    """What ``values`` gives one after the other, if it is something that does.

    Raises:
        DtypeError: it is none, or an array of no axis, or fails on the way.
    """
    try:
        return list(values)  # type: ignore[call-overload]
    except Exception as error:  # a tensor, a generator, or whoever wrote its __iter__, may raise any
        raise DtypeError(what, expected=expected, got=shown(values)) from error


@contextmanager
def room_for(what: str, hint: str) -> Iterator[None]:
    """Make an error of ours of memory of the host that is not to be had.

    Raises:
        BackendError: the memory for ``what`` was not there.
    """
    try:
        yield
    except MemoryError as error:
        raise BackendError(
            f"memory for {what}", expected="enough of it", got=error or "too little", hint=hint
        ) from error


def keep_checked(described: object, **fields: object) -> None:
    """Set fields of a frozen dataclass to what they were checked to be."""
    for name, value in fields.items():
        object.__setattr__(described, name, value)
