"""Table: what the columns of a table mean, and how they become a data set."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from .. import text
from ..datasets import Dataset
from ..datasets.arrays import check_finite
from ..errors import (
    ConfigurationError,
    DataError,
    DtypeError,
    EmptyDataError,
    ShapeError,
    UnknownNameError,
    as_list,
    check_integer,
    did_you_mean,
    lookup,
    refuse_setting,
    shown,
    warn_caller,
)
from ..names import LossName
from ..storage.descriptions import describe, rebuild
from .columns import COLUMNS, Column, Ignored, numbers_of
from .csv_file import CSV
from .frames import is_frame
from .learning import KINDS, TASKS, Learner, Options, Scaling
from .room import Room
from .sources import ParquetSource, Source, as_source
from .targets import TARGETS, ClassTarget, LabelTarget, Target
from .values import values_of

SCALINGS: tuple[Scaling, ...] = ("standard", "robust", "none")
MOST_CATEGORIES = 64
MOST_COLUMNS = 1 << 14
NAMED_MOST = 5  # columns in a message
TURNED_ROWS = 1024  # that are turned at a time
PADDING = 16  # numbers between columns, so that they do not all fall into one set of the cache


class Table:
    """What the columns of a table mean, learnt from rows, so that other rows mean the same.

    A network that is trained on :meth:`dataset` remembers the table, its file too; it then predicts from raw rows:
    ``network.predict(frame)``.

    ==============  =======================================================================================
    columns of      become
    ==============  =======================================================================================
    numbers         one input, scaled; the median where a value is missing
    truth values    one input, 0 or 1
    categories      one input of 0 and 1 for each; rare ones together "other", and so are unknown ones
    dates           the time, scaled; sine and cosine of its place in the year, the week, and the day if there
                    are times of day
    ==============  =======================================================================================

    Where values were missing, one more input says in which rows.  Columns that have one value, nothing, or text
    that hardly repeats are ignored; ``print(table)`` says which.

    Arguments:
        source: a frame (pandas, Polars, Arrow), a mapping of names to columns, a :class:`~mlpgpu.tables.CSV`, or the
            path of a CSV or Parquet file.  Files are read piece by piece and may be larger than memory.
        target: the column to predict, or several of numbers or of truth values; None for none.
        weight: the column of the rows' weights.
        kinds: of columns, where what is found is not meant: ``"number"``, ``"truth"``, ``"category"``, ``"date"``,
            ``"date %d.%m.%Y"`` for dates in a format of ``strftime``, or ``"ignore"``.
        task: ``"regression"`` or ``"classification"``, where the target leaves it open.  Text, truth values, and
            whole numbers that are 0, 1, … or 1, 2, … up to 20 of them are classes.
        scaling: of numbers: ``"standard"``, by mean and standard deviation; ``"robust"``, by median and distance of
            the quartiles; or ``"none"``.
        most_categories: of a column that have an input, the most frequent ones, each in at least 2 rows and in one
            of 10,000.
        missing: texts that stand for missing values, beside those of pandas, such as an empty cell, ``NA`` and
            ``null``.

    Attributes:
        columns: what was learnt of each column, targets and weights aside.
        targets: of each target.

    Raises:
        DataError: a value cannot be read, such as a date; a target is missing, or the same in all rows.
        DtypeError: text and numbers are mixed in a column.
        EmptyDataError: there are no rows.
        UnknownNameError: there is no such column.
        MlpgpuError: an argument has no meaning, or a file cannot be read.
    """

    columns: tuple[Column, ...]
    targets: tuple[Target, ...]
    weight: str | None
    missing: tuple[str, ...]

    def __init__(
        self,
        source: Any,
        target: str | Sequence[str] | None = None,
        *,
        weight: str | None = None,
        kinds: Mapping[str, str] | None = None,
        task: str | None = None,
        scaling: Scaling = "standard",
        most_categories: int = MOST_CATEGORIES,
        missing: Sequence[str] = (),
    ) -> None:
        options = Options(
            lookup("scaling", scaling, SCALINGS),
            check_integer("most_categories", most_categories, least=1),
            None if task is None else lookup("task", task, TASKS),
        )
        target_names, weight, missing = _check_names("target", target), _check_weight(weight), _check_missing(missing)
        checked_kinds = _check_kinds(kinds)
        rows = as_source(source)
        if len(rows.names) > MOST_COLUMNS:
            raise ShapeError(rows.what, expected=f"at most {MOST_COLUMNS:,} columns", got=f"{len(rows.names):,}")
        for kind, name in (*(("target", name) for name in target_names), *((("weight", weight),) if weight else ())):
            _check_column(kind, name, rows.names)
        for name in checked_kinds:
            _check_column("kinds", name, rows.names)
        inputs = [name for name in rows.names if name not in target_names and name != weight]
        learners = _learn(rows, [*inputs, *target_names], checked_kinds, missing)
        several = len(target_names) > 1
        targets = tuple(learners[name].target(options, is_one_of_several=several) for name in target_names)
        self._set(tuple(learners[name].column(options) for name in inputs), targets, weight, missing)

    def _set(
        self, columns: tuple[Column, ...], targets: tuple[Target, ...], weight: str | None, missing: tuple[str, ...]
    ) -> None:
        """Take what was learnt, if a network can be trained on it.

        Raises:
            ConfigurationError: no column is left, or targets do not go together.
        """
        if not any(column.names for column in columns):
            got = "; ".join(f"{column.name!r}: {column}" for column in columns[:NAMED_MOST]) or "none"
            raise DataError("table", expected="a column to learn from", got=got)
        if len({type(target) for target in targets}) > 1 or (len(targets) > 1 and isinstance(targets[0], ClassTarget)):
            got = ", ".join(f"{target.name!r} of {target.called}" for target in targets)
            raise ConfigurationError("targets", expected="numbers, or truth values, in all of several", got=got)
        self.__dict__.update(columns=columns, targets=targets, weight=weight, missing=missing)

    def __setattr__(self, name: str, value: object) -> None:
        refuse_setting(self, name, (), "make a new Table(…)")
        super().__setattr__(name, value)

    # --- what it comes to ---

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs."""
        return tuple(name for column in self.columns for name in column.names)

    @property
    def n_in(self) -> int:
        """How many inputs there are."""
        return len(self.names)

    @property
    def n_out(self) -> int:
        """Outputs of a network for the targets: one for each class, or for each target; 0 without any."""
        return len(self.classes) if self.classes is not None else len(self.targets)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Of a classification."""
        target = self.targets[0] if self.targets else None
        return target.classes if isinstance(target, ClassTarget) else None

    @property
    def loss(self) -> LossName:
        """The usual one for the targets."""
        if self.classes is not None:
            return "softmax_cross_entropy"
        is_labels = bool(self.targets) and isinstance(self.targets[0], LabelTarget)
        return "binary_cross_entropy" if is_labels else "mean_squared_error"

    def dataset(self, source: Any) -> Dataset:
        """The data set of some rows, with the targets and weights that they have.

        Inputs that do not fit into half of the free memory are written to a temporary file and mapped.

        Raises:
            ShapeError: a column that was learnt is missing.
            DataError: a value cannot be read, a target is missing, or there is an unknown class.
            DtypeError: a column is of another kind.
            EmptyDataError: there are no rows.
            MlpgpuError: the source is no table, or cannot be read.
        """
        rows = as_source(source)
        has_targets = self.check_columns(rows)
        x, targets, weights = self._rows(rows, has_targets)
        y: np.ndarray | None = None
        if has_targets:
            y = targets[0] if len(targets) == 1 else np.stack(targets, axis=1)
        classes = self.classes if has_targets else None
        return Dataset(x, y, weights, classes).with_table(self, self.names)

    def encode(self, source: Any) -> np.ndarray:
        """The inputs of some rows, (rows, n_in) float32.

        Raises:
            MlpgpuError: as :meth:`dataset` does.
        """
        rows = as_source(source)
        self.check_columns(rows)
        return self._rows(rows, has_targets=False)[0]

    def pieces(self, source: Any, keep: Sequence[str] = ()) -> Iterator[tuple[np.ndarray, Any]]:
        """Inputs (rows, n_in) float32, piece by piece, each with a frame of the columns to ``keep``, as they came.

        So a file is predicted that does not fit into memory.

        Raises:
            UnknownNameError: a column to keep is not there.
            MlpgpuError: as :meth:`dataset` does.
        """
        rows = as_source(source)
        for name in _check_names("keep", keep):
            _check_column("keep", name, rows.names)
        self.check_columns(rows)
        for first_row, frame in self._frames(rows, (), keep):
            x = np.zeros((len(frame), self.n_in), np.float32)
            self._encode(frame, first_row, x)
            check_finite("x", x, self.names)
            yield x, frame[list(keep)]

    def check_columns(self, rows: Source) -> bool:
        """Whether the rows have all targets.

        Raises:
            ShapeError: a column that was learnt is missing.
        """
        given = set(rows.names)
        used = [column.name for column in self.columns if not isinstance(column, Ignored)]
        targets = [target.name for target in self.targets]
        missing = [name for name in used if name not in given]
        known = {*targets, self.weight, *(column.name for column in self.columns)}
        new = [name for name in rows.names if name not in known]
        if missing:
            hint = did_you_mean(missing[0], new) if new else ""
            expected = f"the columns of training, {_listed(used)}"
            raise ShapeError(rows.what, expected=expected, got=f"no {_listed(missing)}", hint=hint)
        if new:
            warn_caller(f"{rows.what}: the table it was learnt from had no {_listed(new)}, which is not used")
        return bool(targets) and given >= set(targets)

    def _rows(self, rows: Source, has_targets: bool) -> tuple[np.ndarray, list[np.ndarray], np.ndarray | None]:
        """Inputs (rows, n_in), targets (rows,) each, and weights (rows,) where there are any."""
        room = Room(self.n_in, rows.rows)
        targets: list[list[np.ndarray]] = [[] for _ in self.targets]
        weights: list[np.ndarray] = []
        weight = self.weight if has_targets and self.weight in rows.names else None
        others = [] if weight is None else [weight]
        for first_row, frame in self._frames(rows, self.targets if has_targets else (), others):
            self._encode(frame, first_row, room.take(len(frame)))
            if has_targets:
                for target, found in zip(self.targets, targets, strict=True):
                    found.append(target.encode(values_of(target.name, frame[target.name], self.missing), first_row))
            if weight is not None:
                weights.append(numbers_of(weight, values_of(weight, frame[weight], self.missing), first_row))
        x = room.filled(rows.what)
        return x, [np.concatenate(found) for found in targets if found], np.concatenate(weights) if weights else None

    def _frames(self, rows: Source, targets: Sequence[Target], others: Sequence[str] = ()) -> Iterator[tuple[int, Any]]:
        """The rows' columns that are used, these targets and others, piece by piece."""
        used: list[Column | Target] = [column for column in self.columns if not isinstance(column, Ignored)]
        used += targets
        names = dict.fromkeys(column.name for column in used)
        as_text = [column.name for column in used if column.reads_text]
        as_text += [name for name in others if name not in names and name != self.weight]  # 007 is not to become 7
        return rows.chunks(list(names | dict.fromkeys(others)), as_text, self.missing)

    def _encode(self, frame: Any, first_row: int, out: np.ndarray) -> None:
        """Write the inputs of a frame to ``out``, (rows, n_in) float32.

        Columns are made side by side in memory, and turned a few rows at a time: rows that are written one number at
        a time take several times as long.
        """
        turned = np.zeros((self.n_in, len(frame) + PADDING), np.float32)[:, : len(frame)]
        place = 0
        for column in self.columns:
            if width := len(column.names):
                values = values_of(column.name, frame[column.name], self.missing)
                column.encode(values, turned[place : place + width], first_row)
                place += width
        for start in range(0, len(frame), TURNED_ROWS):
            rows = slice(start, start + TURNED_ROWS)
            out[rows] = turned[:, rows].T

    @staticmethod
    def is_table(x: object) -> bool:
        """Whether ``x`` is raw rows of a table, or a file of them, and not an array of inputs."""
        return is_frame(x) or isinstance(x, (str, PathLike, CSV, ParquetSource))

    # --- for people ---

    def __repr__(self) -> str:
        targets = ", ".join(target.name for target in self.targets) or None
        return f"Table({len(self.columns)} columns, {self.n_in} inputs, target={targets!r})"

    def _cells(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("column", "kind", "inputs", "")]
        rows += [(column.name, column.called, str(len(column.names)), str(column)) for column in self.columns]
        rows += [(target.name, f"target: {target.called}", "", str(target)) for target in self.targets]
        return rows + ([(self.weight, "weights", "", "")] if self.weight else [])

    def __str__(self) -> str:
        return text.table([tuple(map(_short, row)) for row in self._cells()], "<<><")

    def _repr_html_(self) -> str:
        return text.html(self._cells(), "<<><", repr(self))

    def __dir__(self) -> list[str]:
        return text.public_names(self, ("check_columns", "described", "is_table", "parse"))

    # --- files ---

    def described(self) -> dict[str, Any]:
        """As a file's JSON holds it."""
        return {
            "columns": [_as_json(column) for column in self.columns],
            "targets": [_as_json(target) for target in self.targets],
            "weight": self.weight,
            "missing": list(self.missing),
        }

    @classmethod
    def parse(cls, described: Any) -> Table:
        """What :meth:`described` gave.

        Raises:
            MlpgpuError, KeyError, TypeError: it has no meaning.
        """
        columns = [rebuild("column of a table", column, COLUMNS) for column in described["columns"]]
        targets = [rebuild("target of a table", target, TARGETS) for target in described["targets"]]
        names = [part.name for part in columns] + [part.name for part in targets]
        if len(set(names)) < len(names):
            raise ConfigurationError("columns of a table", expected="different names", got=names)
        table = cls.__new__(cls)
        weight, missing = _check_weight(described["weight"]), _check_missing(described["missing"])
        table._set(tuple(columns), tuple(targets), weight, missing)
        return table


def _learn(
    rows: Source, names: Sequence[str], kinds: Mapping[str, str], missing: Collection[str]
) -> dict[str, Learner]:
    """Learners that have seen all rows.

    Where a file's cells look like numbers in one piece and not in another, it is read again, such columns as text.
    """
    as_text = {name for name, kind in kinds.items() if kind.partition(" ")[0] in ("category", "date", "truth")}
    as_text |= {name for name in rows.codes if kinds.get(name) != "number"}
    learners: dict[str, Learner] = {}
    pending = list(names)
    while pending:
        learners |= {name: Learner(name, kinds.get(name)) for name in pending}
        used = [name for name in pending if learners[name].kind != "ignore"]
        count = 0
        for first_row, frame in rows.chunks(used, as_text, missing) if used else ():
            count += len(frame)
            for name in used:
                learners[name].add(values_of(name, frame[name], missing), first_row)
        if used and not count:
            raise EmptyDataError(rows.what, expected="at least one row", got="none")
        pending = [name for name in used if rows.is_text and name not in as_text and learners[name].is_conflict]
        as_text |= set(pending)
    return learners


def _as_json(part: Column | Target) -> dict[str, Any]:
    """A description whose tuples are lists, as they come back from JSON."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in describe(part).items()}


def _check_names(what: str, target: str | Sequence[str] | None) -> tuple[str, ...]:
    expected = "the name of a column, or different names"
    names = [] if target is None else [target] if isinstance(target, str) else as_list(what, target, expected)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise DtypeError(what, expected=expected, got=shown(target, typed=False))
    return tuple(names)


def _check_weight(weight: Any) -> str | None:
    if weight is not None and not isinstance(weight, str):
        raise DtypeError("weight", expected="the name of a column", got=shown(weight, typed=False))
    return weight


def _check_missing(missing: Any) -> tuple[str, ...]:
    if isinstance(missing, str) or not isinstance(missing, Sequence) or not all(isinstance(m, str) for m in missing):
        raise DtypeError("missing", expected="a list of texts", got=shown(missing, typed=False))
    return tuple(missing)


def _check_kinds(kinds: Mapping[str, str] | None) -> dict[str, str]:
    if kinds is not None and not isinstance(kinds, Mapping):
        raise DtypeError("kinds", expected="a mapping of columns to kinds", got=shown(kinds, typed=False))
    checked = dict(kinds or {})
    for name, kind in checked.items():
        word, _, form = kind.partition(" ") if isinstance(kind, str) else ("", "", "")
        lookup(f"kinds, of {name!r}", word if form and word == "date" else kind, KINDS)
    return checked


def _check_column(what: str, name: Any, names: Sequence[str]) -> None:
    if name not in names:
        hint = did_you_mean(name, names)
        raise UnknownNameError(what, expected=f"one of the columns {_listed(names)}", got=repr(name), hint=hint)


def _listed(names: Sequence[str]) -> str:
    first = ", ".join(map(repr, names[:NAMED_MOST]))
    return f"{first} and {len(names) - NAMED_MOST} more" if len(names) > NAMED_MOST else first


def _short(cell: str, most: int = 60) -> str:
    return cell if len(cell) <= most else cell[: most - 1] + "…"
