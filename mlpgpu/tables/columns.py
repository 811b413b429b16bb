"""What was learnt of each column of a table: how its values become inputs of a network.

Each class is a description of plain data, which a model's file holds as JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigurationError, DataError, DtypeError, check_number
from .dates import read_dates
from .values import Values, numbers_in, text_of_number

DAY = 86400.0  # seconds
WEEK = 7 * DAY
YEAR = 365.2425 * DAY  # of the Gregorian calendar, on average
SHOWN = 3  # categories in a message
# What false and true are called, in lower case.
WORDS = (("false", "true"), ("no", "yes"), ("n", "y"), ("f", "t"), ("off", "on"), ("0", "1"))
TRUTH = {word: float(value) for words in WORDS for value, word in enumerate(words)}


@dataclass(frozen=True)
class Column(ABC):
    """A column of a table.

    Attributes:
        name: as the table has it.
    """

    name: str
    reads_text: ClassVar[bool] = False  # whether a file's cells are to come as they are written
    called: ClassVar[str]  # for people

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise DtypeError("name of a column", expected="a string", got=repr(self.name))

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Of the inputs that the column becomes."""

    @abstractmethod
    def encode(self, values: Values, out: np.ndarray, first_row: int) -> None:
        """Write the inputs of rows that begin with ``first_row`` to ``out``, (inputs, rows) float32 zeros.

        Raises:
            DataError: a value cannot be read as what the column has.
            DtypeError: all values are of another kind.
        """

    def refuse(self, expected: str, got: str, hint: str = "") -> DtypeError:
        return DtypeError(f"column {self.name!r}", expected=expected, got=got, hint=hint)


def numbers_of(name: str, values: Values, first_row: int, expected: str = "a number") -> np.ndarray:
    """Numbers (rows,) float64, NaN where missing, also of those that came as text.

    Raises:
        DataError: a text is no number, or a number is not finite.
        DtypeError: the values are dates.
    """
    what = f"column {name!r}"
    if values.kind == "dates":
        raise DtypeError(what, expected="numbers, as in training", got="dates")
    numbers = values.numbers
    if values.kind == "text":
        found = numbers_in(values.texts)
        refuse_text(what, values, np.isnan(found), first_row, expected)
        numbers = values.of_texts(found)
    infinite = np.isinf(numbers)
    if infinite.any():
        row = int(infinite.argmax())
        raise DataError(what, expected="finite numbers", got=f"{numbers[row]} at row {first_row + row}")
    return numbers


def refuse_text(what: str, values: Values, is_bad: np.ndarray, first_row: int, expected: str, hint: str = "") -> None:
    """Raise DataError for the first row with one of the texts that are bad, (n,) bool, if any."""
    if is_bad.any():
        row = int(values.first_rows()[is_bad].min())
        got = f"{values.texts[values.codes[row]]!r} at row {first_row + row}"
        raise DataError(what, expected=expected, got=got, hint=hint)


def truth_of(what: str, words: tuple[str, str], values: Values, first_row: int) -> np.ndarray:
    """0, 1 and NaN for each row, (rows,) float64; ``words`` are false and true in text.

    Raises:
        DataError: a value is neither.
        DtypeError: the values are dates.
    """
    expected = f"{words[0]!r} or {words[1]!r}, as in training"
    if values.kind == "dates":
        raise DtypeError(what, expected="truth values, as in training", got="dates")
    if values.kind == "text":
        places = {**TRUTH, words[0]: 0.0, words[1]: 1.0}
        found = np.array([places.get(text.strip().lower(), np.nan) for text in values.texts])
        refuse_text(what, values, np.isnan(found), first_row, expected)
        return values.of_texts(found)
    others = ~np.isnan(values.numbers) & (values.numbers != 0.0) & (values.numbers != 1.0)
    if others.any():
        row = int(others.argmax())
        raise DataError(what, expected=expected, got=f"{values.numbers[row]} at row {first_row + row}")
    return values.numbers


def spelled(text: str, places: Mapping[str, int]) -> int:
    """Where ``text``, or the same number or truth value in the usual spelling, stands in ``places``, or -1."""
    if text in places:
        return places[text]
    number = numbers_in(np.array([text], object))[0]
    return places.get(text_of_number(number) if np.isfinite(number) else text.lower(), -1)


@dataclass(frozen=True)
class Numbers(Column):
    """A column of numbers: (value - center) / scale, with the median where one is missing.

    Attributes:
        median: of the values that were there.
        has_missing: whether some were missing, so that an input says which.
    """

    center: float
    scale: float
    median: float
    has_missing: bool
    called = "numbers"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("center", "median"):
            object.__setattr__(self, field, check_number(f"{field} of {self.name!r}", getattr(self, field)))
        object.__setattr__(self, "scale", check_number(f"scale of {self.name!r}", self.scale, above=0.0))
        check_truth(self, "has_missing")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(_missing(self.name),) * self.has_missing)

    def encode(self, values: Values, out: np.ndarray, first_row: int) -> None:
        numbers = numbers_of(self.name, values, first_row, "a number, as in training")
        is_missing = np.isnan(numbers)
        if is_missing.any():
            numbers = np.where(is_missing, self.median, numbers)
            if self.has_missing:
                out[1] = is_missing
        with np.errstate(over="ignore"):  # what overflows is refused by the data set, with its row
            np.divide(numbers - self.center, self.scale, out=out[0], casting="same_kind")

    def __str__(self) -> str:
        return f"around {self.center:.6g}, scale {self.scale:.6g}" + _or_median(self, f"{self.median:.6g}")


@dataclass(frozen=True)
class TruthValues(Column):
    """A column of truth values, an input of 0 and 1, with the more frequent one where one is missing.

    Attributes:
        words: what false and true are in text, in lower case.
        usual: the more frequent one.
        has_missing: whether some were missing, so that an input says which.
    """

    words: tuple[str, str]
    usual: bool
    has_missing: bool
    called = "truth values"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "words", check_texts(self.name, self.words))
        if len(self.words) != 2:
            raise ConfigurationError(f"words of {self.name!r}", expected="two of them", got=self.words)
        check_truth(self, "usual", "has_missing")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(_missing(self.name),) * self.has_missing)

    def encode(self, values: Values, out: np.ndarray, first_row: int) -> None:
        numbers = truth_of(f"column {self.name!r}", self.words, values, first_row)
        is_missing = np.isnan(numbers)
        out[0] = np.where(is_missing, float(self.usual), numbers)
        if self.has_missing:
            out[1] = is_missing

    def __str__(self) -> str:
        return " or ".join(self.words) + _or_median(self, self.words[self.usual])


@dataclass(frozen=True)
class Categories(Column):
    """A column of categories, an input of 0 and 1 for each.

    What is not among them has an input of its own, "other", if rare categories were there to learn from; otherwise
    all inputs are 0.  So are they where the category is missing, if none was missing in training.

    Attributes:
        categories: those with an input, as text.
        has_other: whether rare ones were there.
        has_missing: whether some were missing, so that an input says which.
    """

    categories: tuple[str, ...]
    has_other: bool
    has_missing: bool
    reads_text = True
    called = "categories"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "categories", check_texts(self.name, self.categories))
        check_truth(self, "has_other", "has_missing")
        if not self.categories:
            raise ConfigurationError(f"categories of {self.name!r}", expected="one or more", got="none")

    @property
    def names(self) -> tuple[str, ...]:
        known = (f"{self.name}={category}" for category in self.categories)
        return (*known, *(f"{self.name} other",) * self.has_other, *(_missing(self.name),) * self.has_missing)

    def encode(self, values: Values, out: np.ndarray, first_row: int) -> None:
        if values.kind == "nothing":
            codes, known = np.full(out.shape[1], -1), np.empty(0, np.int64)
        else:
            codes, texts = self._coded(values)
            by_name = {category: place for place, category in enumerate(self.categories)}
            known = np.array([by_name.get(text, -1) for text in texts], np.int64)
        other = len(self.categories)
        places = np.where(known < 0, other if self.has_other else -1, known)
        missing = other + self.has_other if self.has_missing else -1
        inputs = np.append(places, missing)[codes]  # -1 where no input is 1
        rows = np.flatnonzero(inputs >= 0)
        out[inputs[rows], rows] = 1.0

    def _coded(self, values: Values) -> tuple[np.ndarray, list[str]]:
        """Codes (rows,), -1 where missing, and what they stand for.

        Numbers are refused where no category is one: the column is another one than in training.
        """
        expected = f"categories, such as {', '.join(map(repr, self.categories[:SHOWN]))}"
        if values.kind == "dates":
            raise self.refuse(expected, "dates")
        if values.kind == "text":
            if np.isfinite(numbers_in(values.texts)).all():
                self._refuse_numbers(expected, str(values.texts[0]))
            return values.codes, values.texts.tolist()
        is_missing = np.isnan(values.numbers)
        different, codes = np.unique(np.where(is_missing, 0.0, values.numbers), return_inverse=True)
        codes = np.where(is_missing, -1, codes)
        if values.kind == "truth values":
            return codes, ["true" if number else "false" for number in different]
        texts = [text_of_number(number) for number in different]
        self._refuse_numbers(expected, texts[codes[~is_missing][0]])
        return codes, texts

    def _refuse_numbers(self, expected: str, such_as: str) -> None:
        if not np.isfinite(numbers_in(np.array(self.categories, object))).any():
            raise self.refuse(expected, f"numbers, such as {such_as}")

    def __str__(self) -> str:
        shown = ", ".join(self.categories[:SHOWN])
        more = f" and {len(self.categories) - SHOWN} more" if len(self.categories) > SHOWN else ""
        return shown + more + ", other" * self.has_other + ", missing" * self.has_missing


@dataclass(frozen=True)
class Dates(Column):
    """A column of dates: their time, scaled as numbers are, and where in the year, the week and the day they lie.

    Of each period there are the sine and the cosine of the angle 2π t / period, t in seconds since 1970 UTC; where a
    date is missing they are 0, and the time is the median.

    Attributes:
        form: how text is read, by the codes of ``strftime``, or ``"ISO 8601"``.
        center, scale, median: of seconds since 1970.
        has_time: whether some were not midnight, so that the day is a period too.
        has_missing: whether some were missing, so that an input says which.
    """

    form: str
    center: float
    scale: float
    median: float
    has_time: bool
    has_missing: bool
    reads_text = True
    called = "dates"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.form, str):
            raise DtypeError(f"form of {self.name!r}", expected="a string", got=repr(self.form))
        for field in ("center", "median"):
            object.__setattr__(self, field, check_number(f"{field} of {self.name!r}", getattr(self, field)))
        object.__setattr__(self, "scale", check_number(f"scale of {self.name!r}", self.scale, above=0.0))
        check_truth(self, "has_time", "has_missing")

    @property
    def periods(self) -> dict[str, float]:
        """Seconds by name."""
        return {"year": YEAR, "week": WEEK} | ({"day": DAY} if self.has_time else {})

    @property
    def names(self) -> tuple[str, ...]:
        waves = (f"{self.name} {period} {wave}" for period in self.periods for wave in ("sin", "cos"))
        return (self.name, *waves, *(_missing(self.name),) * self.has_missing)

    def encode(self, values: Values, out: np.ndarray, first_row: int) -> None:
        seconds = self.seconds(values, first_row)
        is_missing = np.isnan(seconds)
        out[0] = (np.where(is_missing, self.median, seconds) - self.center) / self.scale
        for place, period in enumerate(self.periods.values()):
            angles = np.where(is_missing, 0.0, seconds % period * (2.0 * np.pi / period))
            out[1 + 2 * place] = np.sin(angles)
            out[2 + 2 * place] = np.where(is_missing, 0.0, np.cos(angles))
        if self.has_missing:
            out[-1] = is_missing

    def seconds(self, values: Values, first_row: int) -> np.ndarray:
        """Seconds since 1970 for each row, (rows,) float64, NaN where missing."""
        if values.kind in ("dates", "nothing"):
            return values.numbers
        if values.kind != "text":
            raise self.refuse("dates, as in training", values.kind)
        try:
            found = read_dates(values.texts, self.form)
        except ValueError as error:
            raise ConfigurationError(f"form of {self.name!r}", expected="a format of dates", got=error) from error
        what, expected = f"column {self.name!r}", f"a date in the form {self.form}"
        refuse_text(what, values, np.isnan(found), first_row, expected)
        return values.of_texts(found)

    def __str__(self) -> str:
        return f"{self.form}, around {_day(self.center)}" + _or_median(self, _day(self.median))


@dataclass(frozen=True)
class Ignored(Column):
    """A column that is not used.

    Attributes:
        why: for people.
    """

    why: str
    called = "ignored"

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def encode(self, values: Values, out: np.ndarray, first_row: int) -> None:
        pass

    def __str__(self) -> str:
        return str(self.why)


COLUMNS: dict[str, type[Column]] = {kind.__name__: kind for kind in (Numbers, TruthValues, Categories, Dates, Ignored)}


def _missing(name: str) -> str:
    return f"{name} missing"


def _or_median(column: Any, instead: str) -> str:
    return f"; {instead} where missing" if column.has_missing else ""


def _day(seconds: float) -> str:
    return str(np.datetime64(int(seconds), "s"))[:10]


def check_truth(column: Any, *fields: str) -> None:
    for field in fields:
        if not isinstance(getattr(column, field), bool):
            what = f"{field} of {column.name!r}"
            raise DtypeError(what, expected="True or False", got=repr(getattr(column, field)))


def check_texts(name: str, texts: Any) -> tuple[str, ...]:
    what = f"texts of {name!r}"
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise DtypeError(what, expected="a list of strings", got=repr(texts))
    if len(set(texts)) < len(texts):
        raise ConfigurationError(what, expected="different ones", got=repr(texts))
    return tuple(texts)
