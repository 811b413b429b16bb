"""The values of one column as they come, told apart by kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import DataError, DtypeError
from .frames import load_pandas

ValueKind = Literal["numbers", "truth values", "dates", "text", "nothing"]
NUMBERS = frozenset(("integer", "floating", "decimal", "mixed-integer-float"))  # what pandas finds among objects
DATES = frozenset(("date", "datetime", "datetime64"))
SECONDS = np.timedelta64(1, "s")


@dataclass(frozen=True, eq=False)
class Values:
    """A column of a table, or some rows of it.

    Attributes:
        kind: what the values are; ``"nothing"`` where all are missing.
        numbers: (rows,) float64, NaN where missing: numbers; truth values as 0 and 1; dates as seconds since 1970,
            UTC.  Empty for text.
        codes: of text, (rows,) places in ``texts``, -1 where missing; otherwise empty.
        texts: of text, the different values, (n,) of strings, in the order in which they first appear.
        is_mixed: whether text and numbers stood side by side.
    """

    kind: ValueKind
    numbers: np.ndarray
    codes: np.ndarray
    texts: np.ndarray
    is_mixed: bool = False

    def first_rows(self) -> np.ndarray:
        """The row in which each of ``texts`` first appears, (n,)."""
        first = np.zeros(len(self.texts) + 1, np.int64)  # the last one is of rows without text, at -1
        first[self.codes[::-1]] = np.arange(len(self.codes))[::-1]  # of equal codes the first one is written last
        return first[:-1]

    def of_texts(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of each of ``texts``, (n,) float64, spread over the rows, (rows,), NaN where missing."""
        return np.append(numbers, np.nan)[self.codes]  # the last one is at -1


NO_NUMBERS, NO_CODES, NO_TEXTS = np.empty(0), np.empty(0, np.int64), np.empty(0, object)


def _numbers(kind: ValueKind, numbers: np.ndarray) -> Values:
    is_nothing = bool(np.isnan(numbers).all())
    return Values("nothing" if is_nothing else kind, numbers, NO_CODES, NO_TEXTS)


def _text(codes: np.ndarray, texts: Iterable[str], missing: Iterable[str], *, is_mixed: bool = False) -> Values:
    """Text of these codes, where the empty text and those in ``missing`` are missing."""
    kept = list(texts)
    none = {"", *missing}
    if none & set(kept):
        is_there = np.array([text not in none for text in kept], bool)
        places = np.append(np.where(is_there, np.cumsum(is_there) - 1, -1), -1)
        codes, kept = places[codes], [text for text in kept if text not in none]
    kind: ValueKind = "text" if len(kept) and (codes >= 0).any() else "nothing"
    if kind == "nothing":
        return _numbers(kind, np.full(len(codes), np.nan))
    return Values(kind, NO_NUMBERS, codes.astype(np.int64, copy=False), np.array(kept, object), is_mixed)


def values_of(name: str, series: Any, missing: Iterable[str] = ()) -> Values:
    """The values of a pandas series; texts in ``missing`` count as missing, and so does the empty one.

    Raises:
        DataError: text has surrogates.
        DtypeError: they are neither numbers, truth values, dates nor text.
    """
    pandas = load_pandas()
    types, dtype = pandas.api.types, series.dtype
    if isinstance(dtype, pandas.CategoricalDtype):
        codes, texts = np.asarray(series.cat.codes), _texts(name, dtype.categories)
        _check_unicode(name, texts)
        used = np.unique(codes[codes >= 0])  # categories that no row has are none
        places = np.full(len(texts) + 1, -1)
        places[used] = np.arange(len(used))
        return _text(places[codes], [texts[place] for place in used], missing)
    if types.is_bool_dtype(dtype):
        return _numbers("truth values", series.to_numpy(np.float64, na_value=np.nan))
    if types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype):
        return _numbers("numbers", series.to_numpy(np.float64, na_value=np.nan))
    if isinstance(dtype, pandas.ArrowDtype) and dtype.kind == "M":
        return _numbers("dates", seconds_of(pandas.to_datetime(series.astype(object), utc=True)))
    if types.is_datetime64_any_dtype(dtype):
        return _numbers("dates", seconds_of(series))
    if types.is_timedelta64_dtype(dtype):
        return _numbers("numbers", series.dt.total_seconds().to_numpy(np.float64))
    if types.is_string_dtype(dtype) or types.is_object_dtype(dtype):
        return _objects(name, series, missing)
    raise _refused(name, str(dtype))


def _objects(name: str, series: Any, missing: Iterable[str]) -> Values:
    pandas = load_pandas()
    found = pandas.api.types.infer_dtype(series, skipna=True)
    if found == "empty":
        return _numbers("nothing", np.full(len(series), np.nan))
    if found == "boolean" or found in NUMBERS:
        numbers = pandas.to_numeric(series.where(series.notna(), np.nan).astype(object)).to_numpy(np.float64)
        return _numbers("truth values" if found == "boolean" else "numbers", numbers)
    if found in DATES:
        return _numbers("dates", seconds_of(pandas.to_datetime(series, utc=True)))
    if found == "string":
        codes, different = pandas.factorize(series)
        texts = [str(text) for text in different]
        _check_unicode(name, texts)
        return _text(codes, texts, missing)
    if found.startswith("mixed"):
        try:
            codes, different = pandas.factorize(series)
        except TypeError:  # lists and the like, which cannot be told apart
            raise _refused(name, found) from None
        texts = _texts(name, different)
        _check_unicode(name, texts)
        names, places = np.unique(np.array(texts, object), return_inverse=True)  # the text "1" and the number 1 are one
        return _text(np.append(places, -1)[codes], map(str, names), missing, is_mixed=True)
    raise _refused(name, found)


def _check_unicode(name: str, texts: Iterable[str]) -> None:
    """Refuse surrogates, which no file can hold."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        got = f"{error.object[error.start]!r}"
        raise DataError(f"column {name!r}", expected="text that UTF-8 can hold", got=got) from error


def _texts(name: str, values: Iterable[Any]) -> list[str]:
    """Values as text: whole numbers without a point, truth values in lower case."""
    texts = []
    for value in values:
        if isinstance(value, (bool, np.bool_)):
            texts.append(str(bool(value)).lower())
        elif isinstance(value, (int, float, np.number)):
            texts.append(text_of_number(float(value)))
        elif isinstance(value, str):
            texts.append(str(value))
        else:
            raise _refused(name, f"{type(value).__name__} {value!r}")
    return texts


def text_of_number(number: float) -> str:
    """A number as a category has it: 3, not 3.0."""
    return str(int(number)) if number == np.floor(number) and abs(number) < 2.0**53 else repr(float(number))


def _refused(name: str, got: str) -> DtypeError:
    return DtypeError(f"column {name!r}", expected="numbers, truth values, dates or text", got=got)


def seconds_of(series: Any) -> np.ndarray:
    """Dates as seconds since 1970, (rows,) float64, NaN where missing; with a time zone those of UTC."""
    if getattr(series.dt, "tz", None) is not None:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    dates = series.to_numpy()
    seconds = (dates - np.datetime64(0, "s")) / SECONDS
    seconds[np.isnat(dates)] = np.nan
    return seconds


def numbers_in(texts: np.ndarray) -> np.ndarray:
    """The numbers that texts stand for, (n,) float64, NaN where one is none."""
    numbers = load_pandas().to_numeric(load_pandas().Series(texts, dtype=object), errors="coerce")
    return numbers.to_numpy(np.float64, na_value=np.nan)
