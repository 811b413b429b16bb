"""Learning, from rows that come piece by piece, what a column is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..errors import ConfigurationError, DataError, DtypeError
from .columns import WORDS, Categories, Column, Dates, Ignored, Numbers, TruthValues
from .dates import FORMATS, ISO, candidates, read_dates
from .statistics import NumberStatistics
from .targets import ClassTarget, LabelTarget, NumberTarget, Target
from .values import Values, numbers_in, text_of_number

MOST_TEXTS = 100_000  # different ones of a column that are counted
MOST_CLASSES = 20  # that whole numbers may stand for
LEAST_ROWS, ROWS_OF_ONE = 2, 10_000  # a category has so many rows, and one of so many of all
KINDS = ("number", "truth", "category", "date", "ignore")
TASKS = ("regression", "classification")
Scaling = Literal["standard", "robust", "none"]


@dataclass(frozen=True)
class Options:
    """How columns are learnt; :class:`~mlpgpu.Table` explains them."""

    scaling: Scaling
    most_categories: int
    task: str | None


@dataclass
class Dated:
    """What text comes to if it is read as dates of one format."""

    statistics: NumberStatistics = field(default_factory=NumberStatistics)
    first_bad: tuple[int, str] | None = None  # row and text of the first that is none
    bad: int = 0  # rows


class Learner:
    """One column, of which rows come piece by piece.

    Arguments:
        name: of the column.
        kind: what the user says that it is, one of KINDS, ``"date %d.%m.%Y"`` for dates of a format, or None.
    """

    def __init__(self, name: str, kind: str | None = None) -> None:
        self.name = name
        self.kind, _, self.form = (kind or "").partition(" ")
        self.rows = 0
        self.seen: set[str] = set()  # kinds of values
        self.numbers = NumberStatistics()  # of numbers, truth values and dates
        self.different: set[float] = set()  # numbers, until there are more than MOST_CLASSES
        self.texts: dict[str, list[int]] = {}  # rows that have each, and the first of them
        self.overflows = False  # whether there are more texts than are counted
        self.text_rows = self.missing = 0
        self.dated: dict[str, Dated] | None = None  # by format
        self.is_mixed = False

    @property
    def what(self) -> str:
        return f"column {self.name!r}"

    @property
    def is_conflict(self) -> bool:
        """Whether some rows came as text and others did not: a file is then read again, all of it as text."""
        return "text" in self.seen and len(self.seen) > 1

    def add(self, values: Values, first_row: int) -> None:
        """Add rows, of which the first is ``first_row``."""
        if values.kind == "text":
            self.seen.add("text")
            self._add_text(values, first_row)
        else:
            if values.kind != "nothing":
                self.seen.add(values.kind)
            infinite = np.isinf(values.numbers)
            if infinite.any():
                row = int(infinite.argmax())
                got = f"{values.numbers[row]} at row {first_row + row}"
                raise DataError(self.what, expected="finite numbers", got=got)
            if self.kind == "category":
                self._add_counts(values.numbers, first_row, is_truth=values.kind == "truth values")
            self.numbers.add(values.numbers, first_row)
            if len(self.different) <= MOST_CLASSES:
                self.different |= set(np.unique(values.numbers[~np.isnan(values.numbers)])[: MOST_CLASSES + 1].tolist())
            self.missing += int(np.isnan(values.numbers).sum())
            self.rows += len(values.numbers)

    def _add_counts(self, numbers: np.ndarray, first_row: int, *, is_truth: bool) -> None:
        """Count numbers that the user calls categories."""
        different, counts = np.unique(numbers[~np.isnan(numbers)], return_counts=True)
        for number, count in zip(different, counts.tolist(), strict=True):
            name = str(bool(number)).lower() if is_truth else text_of_number(number)
            self.texts.setdefault(name, [0, first_row])[0] += count

    def _add_text(self, values: Values, first_row: int) -> None:
        codes = values.codes
        counts = np.bincount(codes[codes >= 0], minlength=len(values.texts))
        firsts = values.first_rows() + first_row
        self.rows += len(codes)
        self.missing += len(codes) - int(counts.sum())
        self.text_rows += int(counts.sum())
        self.is_mixed |= values.is_mixed
        self._add_dates(values, counts, firsts, first_row)
        if self.overflows:
            return
        for text, count, first in zip(values.texts.tolist(), counts.tolist(), firsts.tolist(), strict=True):
            self.texts.setdefault(text, [0, first])[0] += count
        self.overflows = len(self.texts) > MOST_TEXTS and self.kind != "category"

    def _add_dates(self, values: Values, counts: np.ndarray, firsts: np.ndarray, first_row: int) -> None:
        if self.dated is None:
            forms: tuple[str, ...] = ()
            if self.kind == "date":
                forms = (self.form,) if self.form else FORMATS
            elif not self.kind:
                forms = candidates(values.texts)
            self.dated = {form: Dated() for form in forms}
        for form, dated in self.dated.items():
            try:
                found = read_dates(values.texts, form)
            except ValueError as error:
                raise ConfigurationError(f"kind of {self.name!r}", expected="a format of dates", got=error) from error
            is_bad = np.isnan(found)
            if is_bad.any():
                place = int(np.where(is_bad, firsts, np.iinfo(np.int64).max).argmin())
                dated.first_bad = dated.first_bad or (int(firsts[place]), str(values.texts[place]))
                dated.bad += int(counts[is_bad].sum())
            dated.statistics.add(values.of_texts(found), first_row)

    # --- what it is ---

    def column(self, options: Options) -> Column:
        """What the column is, as an input.

        Raises:
            DataError: a date or a number cannot be read.
            DtypeError: numbers and text stand side by side, or the values are not what the user says.
        """
        if self.kind == "ignore":
            return Ignored(self.name, "as you say")
        if self.rows == self.missing:
            return Ignored(self.name, "nothing in it")
        if self.kind == "category":
            return self._categories(options)
        if "text" not in self.seen:
            return self._of_numbers(options)
        self._refuse_mixed_kinds()
        if (words := self.words()) is not None:
            false, true = words
            rows = [sum(count for text, (count, _) in self.texts.items() if text.strip().lower() == w) for w in words]
            if 0 in rows and self.kind != "truth" and not self.missing:
                return Ignored(self.name, f"{false if rows[0] else true!r} in all rows")
            return TruthValues(self.name, (false, true), rows[1] > rows[0], self.missing > 0)
        if self.kind == "truth":
            self._refuse_kind("truth values", " and ".join(map(repr, list(self.texts)[:3])))
        if (dates := self._dates(options)) is not None:
            return dates
        self._refuse_mixed()
        return self._categories(options)

    def _refuse_kind(self, expected: str, got: str) -> None:
        raise DtypeError(self.what, expected=f"{expected}, as you say", got=got)

    def _refuse_mixed_kinds(self) -> None:
        if len(self.seen) > 1:
            kinds = " and ".join(sorted(self.seen))
            raise DtypeError(self.what, expected="values of one kind", got=kinds, hint=self._hint("category"))

    def _hint(self, kind: str) -> str:
        return f"kinds={{{self.name!r}: {kind!r}}}"

    def _of_numbers(self, options: Options) -> Column:
        numbers, seen = self.numbers, self.seen
        if len(seen) > 1:
            self._refuse_mixed_kinds()
        if self.kind == "date" and "dates" not in seen:
            self._refuse_kind("dates", next(iter(seen)))
        if self.kind in ("number", "truth") and "dates" in seen:
            self._refuse_kind("numbers" if self.kind == "number" else "truth values", "dates")
        if self.kind == "truth" and not self.different <= {0.0, 1.0}:
            self._refuse_kind("truth values", f"numbers from {numbers.least:g} to {numbers.most:g}")
        if numbers.least == numbers.most and not numbers.missing:
            return Ignored(self.name, "the same in all rows")
        if "dates" in seen:
            return self._dates_of(ISO, numbers, options)
        if ("truth values" in seen and self.kind != "number") or self.kind == "truth":
            return TruthValues(self.name, WORDS[0], numbers.mean > 0.5, numbers.missing > 0)
        center, scale = numbers.scaling(options.scaling)
        return Numbers(self.name, center, scale, numbers.quartiles()[1], numbers.missing > 0)

    def words(self) -> tuple[str, str] | None:
        """The words for false and true, if all texts are these."""
        if self.overflows or self.kind in ("number", "date", "category") or len(self.texts) > 8:
            return None
        found = {text.strip().lower() for text in self.texts}
        return next((words for words in WORDS if found <= set(words)), None)

    def _dates(self, options: Options) -> Column | None:
        dated = self.dated or {}
        good = [form for form, of_form in dated.items() if not of_form.bad]
        if not good:
            best = min(dated, key=lambda form: dated[form].bad, default=None)
            if best is not None and (self.kind == "date" or dated[best].bad * 2 < self.text_rows):
                row, text = dated[best].first_bad or (0, "")
                what, expected = self.what, f"a date in each row, in the form {best}"
                got, hint = f"{text!r} at row {row}", self._hint("category")
                raise DataError(what, expected=expected, got=got, hint=hint if self.kind != "date" else "")
            return None
        if len(good) > 1:
            hint = f"{self._hint('date ' + good[0])}, or 'date {good[1]}'"
            got = f"dates such as {next(iter(self.texts))!r}, that {' and '.join(good[:2])} both read"
            raise DataError(self.what, expected="dates that can be read in one way", got=got, hint=hint)
        statistics = dated[good[0]].statistics
        if statistics.least == statistics.most and not self.missing:
            return Ignored(self.name, "the same in all rows")
        return self._dates_of(good[0], statistics, options)

    def _dates_of(self, form: str, statistics: NumberStatistics, options: Options) -> Dates:
        center, scale = statistics.scaling("standard" if options.scaling == "none" else options.scaling)
        median = statistics.quartiles()[1]
        return Dates(self.name, form, center, scale, median, statistics.has_time, self.missing > 0)

    def _refuse_mixed(self) -> None:
        """Refuse text that is numbers for the most part, or numbers and text as objects."""
        texts = list(self.texts)
        is_number = np.isfinite(numbers_in(np.array(texts, object)))
        rows = sum(self.texts[text][0] for text, is_one in zip(texts, is_number, strict=True) if is_one)
        all_rows = sum(count for count, _ in self.texts.values())
        others = [text for text, is_one in zip(texts, is_number, strict=True) if not is_one]
        if others and (2 * rows >= all_rows or self.is_mixed or self.kind == "number"):
            first = min(others, key=lambda text: self.texts[text][1])
            got = f"{first!r} at row {self.texts[first][1]} beside {rows} rows with numbers"
            hint = f"missing=[{first!r}] if it stands for a missing value, or {self._hint('category')}"
            raise DtypeError(self.what, expected="numbers in all rows, or text in all", got=got, hint=hint)

    def _categories(self, options: Options) -> Column:
        least = max(LEAST_ROWS, self.rows // ROWS_OF_ONE)
        if self.overflows:
            return Ignored(self.name, f"text with more than {MOST_TEXTS:,} different values")
        ordered = sorted(self.texts, key=lambda text: (-self.texts[text][0], text))
        kept = [text for text in ordered if self.texts[text][0] >= least][: options.most_categories]
        if not kept:
            return Ignored(self.name, f"text of which none is in {least} rows or more")
        if len(self.texts) == 1 and not self.missing:
            return Ignored(self.name, f"{kept[0]!r} in all rows")
        return Categories(self.name, tuple(sorted(kept)), len(kept) < len(self.texts), self.missing > 0)

    # --- as a target ---

    def target(self, options: Options, *, is_one_of_several: bool) -> Target:
        """What the column is, as a target.

        Whole numbers are classes if the task is said to be a classification, or if they are 0, 1, … or 1, 2, … up to
        at most MOST_CLASSES of them.

        Raises:
            DataError: a row has no target, or all have the same.
            DtypeError: the targets are dates, or not what the user says.
        """
        what = f"target {self.name!r}"
        if self.kind not in ("", "number", "category", "truth"):
            raise ConfigurationError(f"kind of {what}", expected="'number', 'truth' or 'category'", got=repr(self.kind))
        if self.missing:
            got = f"none in {self.missing} of {self.rows} rows"
            raise DataError(what, expected="a value in each row", got=got, hint="leave these rows out")
        if "dates" in self.seen:
            raise DtypeError(what, expected="numbers or classes", got="dates")
        if len(self.seen) > 1:
            self._refuse_mixed_kinds()
        is_text = "text" in self.seen
        different = self.texts if is_text else self.different
        if len(different) == 1:
            got = f"{next(iter(different))!r} in all {self.rows} rows"
            raise DataError(what, expected="two different values or more", got=got)
        words = self.words() if is_text else None
        if is_one_of_several and (words or "truth values" in self.seen):
            return LabelTarget(self.name, words or WORDS[0])
        is_classes = is_text or "truth values" in self.seen or self.kind in ("category", "truth")
        if options.task is not None:
            is_classes = options.task == "classification"
        elif not is_classes and not is_one_of_several and self.kind != "number":
            is_classes = self._counts_classes()
        if not is_classes:
            if is_text:
                self._refuse_mixed()
                first = next(iter(self.texts))
                raise DtypeError(what, expected="numbers, for a regression", got=f"text, such as {first!r}")
            return NumberTarget(self.name)
        if is_one_of_several:
            raise DtypeError(what, expected="numbers or truth values in each of several targets", got="classes")
        if is_text:
            self._refuse_mixed()
            if self.overflows:
                raise DataError(what, expected=f"up to {MOST_TEXTS:,} classes", got="more")
            return ClassTarget(self.name, tuple(sorted(self.texts)))
        if "truth values" in self.seen:
            return ClassTarget(self.name, WORDS[0])
        if len(different) > MOST_CLASSES and self.kind != "category":
            got = f"more than {MOST_CLASSES} different numbers"
            raise DataError(what, expected="classes", got=got, hint=self._hint("category"))
        numbers = sorted(map(float, self.texts) if self.kind == "category" else self.different)
        return ClassTarget(self.name, tuple(text_of_number(number) for number in numbers))

    def _counts_classes(self) -> bool:
        """Whether the numbers are 0, 1, … or 1, 2, …, and few."""
        numbers = sorted(self.different)
        few = 2 <= len(numbers) <= MOST_CLASSES
        return few and numbers[0] in (0.0, 1.0) and numbers == [numbers[0] + place for place in range(len(numbers))]
