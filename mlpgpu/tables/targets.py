"""What was learnt of the columns to be predicted: how their values become targets, and predictions values again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import ConfigurationError, DataError, DtypeError
from .columns import check_texts, numbers_of, refuse_text, spelled, truth_of
from .values import Values, numbers_in, text_of_number


@dataclass(frozen=True)
class Target(ABC):
    """A column to be predicted."""

    name: str
    called: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise DtypeError("name of a column", expected="a string", got=repr(self.name))

    @property
    def reads_text(self) -> bool:
        """Whether a file's cells are to come as they are written."""
        return False

    @property
    def what(self) -> str:
        """Of errors."""
        return f"target {self.name!r}"

    @abstractmethod
    def encode(self, values: Values, first_row: int) -> np.ndarray:
        """Targets (rows,) of rows that begin with ``first_row``: float64, or int64 class numbers.

        Raises:
            DataError: one is missing, or cannot be read.
            DtypeError: they are of another kind.
        """

    def refuse_missing(self, is_missing: np.ndarray, first_row: int) -> None:
        """Raise DataError if a row has no target."""
        if is_missing.any():
            count, row = int(is_missing.sum()), first_row + int(is_missing.argmax())
            got = f"none in {count} rows, the first of them row {row}"
            raise DataError(self.what, expected="a value in each row", got=got, hint="leave these rows out")


@dataclass(frozen=True)
class NumberTarget(Target):
    """Numbers to be predicted."""

    called = "numbers"

    def encode(self, values: Values, first_row: int) -> np.ndarray:
        numbers = numbers_of(self.name, values, first_row, "a number, as in training")
        self.refuse_missing(np.isnan(numbers), first_row)
        return numbers

    def __str__(self) -> str:
        return self.called


@dataclass(frozen=True)
class LabelTarget(Target):
    """One of several labels, each of which is true or false of a row.

    Attributes:
        words: what false and true are in text, in lower case.
    """

    words: tuple[str, str]
    called = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "words", check_texts(self.name, self.words))
        if len(self.words) != 2:
            raise ConfigurationError(self.what, expected="two words", got=self.words)

    def encode(self, values: Values, first_row: int) -> np.ndarray:
        truth = truth_of(self.what, self.words, values, first_row)
        self.refuse_missing(np.isnan(truth), first_row)
        return truth

    def __str__(self) -> str:
        return " or ".join(self.words)


@dataclass(frozen=True)
class ClassTarget(Target):
    """Classes to be predicted.

    Attributes:
        classes: their names, in the order of their numbers.
    """

    classes: tuple[str, ...]
    called = "classes"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "classes", check_texts(self.name, self.classes))
        if len(self.classes) < 2:
            raise ConfigurationError(self.what, expected="two classes or more", got=self.classes)

    @property
    def reads_text(self) -> bool:
        # Classes that were learnt of numbers are their usual spelling, by which numbers are found again.
        numbers = numbers_in(np.array(self.classes, object))
        pairs = zip(self.classes, numbers.tolist(), strict=True)
        return any(not np.isfinite(number) or text_of_number(number) != name for name, number in pairs)

    def encode(self, values: Values, first_row: int) -> np.ndarray:
        if values.kind == "dates":
            raise DtypeError(self.what, expected="classes, as in training", got="dates")
        places = {name: place for place, name in enumerate(self.classes)}
        expected = f"one of the classes {', '.join(self.classes)}"
        if values.kind == "text":
            self.refuse_missing(values.codes < 0, first_row)
            found = np.array([spelled(text, places) for text in values.texts])
            refuse_text(self.what, values, found < 0, first_row, expected)
            return found[values.codes].astype(np.int64)
        self.refuse_missing(np.isnan(values.numbers), first_row)
        different, codes = np.unique(values.numbers, return_inverse=True)
        texts = [text_of_number(number) for number in different]
        if values.kind == "truth values":
            texts = ["true" if number else "false" for number in different]
        found = np.array([places.get(text, -1) for text in texts])[codes]
        if (found < 0).any():
            row = int((found < 0).argmax())
            raise DataError(self.what, expected=expected, got=f"{texts[codes[row]]!r} at row {first_row + row}")
        return found.astype(np.int64)

    def __str__(self) -> str:
        return ", ".join(self.classes)


TARGETS: dict[str, type[Target]] = {kind.__name__: kind for kind in (NumberTarget, LabelTarget, ClassTarget)}
