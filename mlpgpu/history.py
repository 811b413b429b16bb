"""History: what each epoch of a trainer came to, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, overload

from .errors import (
    MOST_COUNT,
    BackendError,
    DtypeError,
    EmptyDataError,
    as_list,
    check_integer,
    check_number,
    check_text,
    lookup,
    shown,
)
from .metrics import MODES, VALIDATION, Mode, improves
from .pictures import check_picture, deliver
from .text import html, public_names, table

Record: TypeAlias = dict[str, float]

SHOWN_ROWS = 10  # at either end of a table


class History:
    """The epochs of a trainer so far, one record each.

    A record holds ``epoch`` (from 1), ``loss``, ``rate`` (the learning rate at the epoch's end),
    ``seconds`` and, where there was a validation set, ``validation_loss`` and ``validation_<metric>``.
    ``history["loss"]`` is a column, ``len(history)`` the number of epochs; iteration gives the records.

    Attributes:
        interrupted: whether Ctrl-C ended the last fit.
    """

    def __init__(self, records: Sequence[Mapping[str, float]] = ()) -> None:
        listed = as_list("records", records, "a list of mappings, one for each epoch")
        self._records: list[Record] = [_check_record(record) for record in listed]
        self.interrupted = False

    def append(self, record: Mapping[str, float]) -> None:
        """Add an epoch."""
        self._records.append(dict(record))

    def extend_last(self, columns: Mapping[str, float]) -> None:
        """Add columns to the last epoch's record."""
        self._records[-1].update(columns)

    @property
    def records(self) -> list[Record]:
        """A copy of the records, first epoch first."""
        return [dict(record) for record in self._records]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names that any record holds, in order of first appearance."""
        return tuple(dict.fromkeys(name for record in self._records for name in record))

    @property
    def last(self) -> Record:
        """The last epoch's record.

        Raises:
            EmptyDataError: there is no epoch yet.
        """
        self._check_epochs()
        return dict(self._records[-1])

    def best(self, column: str, mode: Mode = "auto") -> Record:
        """The record of the best epoch by ``column``, the first of equals.

        Higher is better in mode ``"max"``, lower in ``"min"``; in ``"auto"`` higher for accuracy, R² and areas under
        curves, lower for all others.

        Raises:
            UnknownNameError: no record holds the column.
            EmptyDataError: there is no epoch yet, or none with a finite value there.
        """
        mode = lookup("mode", mode, MODES)
        found = None
        best: float | None = None
        for record, value in zip(self._records, self[column], strict=True):
            if is_better(column, value, best, mode=mode):
                found, best = record, value
        if found is None:
            raise EmptyDataError(f"history column {column!r}", expected="a finite value", got="none")
        return dict(found)

    @overload
    def plot(self, path: str | PathLike[str]) -> Path: ...

    @overload
    def plot(self, path: None = None) -> Any: ...

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Draw the losses, and the metrics if there are any, over the epochs.

        Args:
            path: where to; ends in ``.png`` or ``.svg``.

        Returns:
            ``path``; or without one the figure, one of matplotlib's, which a notebook shows.

        Raises:
            ConfigurationError: the name ends in something else.
            EmptyDataError: there is no epoch yet.
            BackendError: matplotlib is not installed.
            StorageError: the picture cannot be written.
        """
        checked = check_picture(path)
        self._check_epochs()
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            hint = "pip install 'mlpgpu[plot]'"
            raise BackendError("History.plot", expected="the package matplotlib", got=error, hint=hint) from error

        losses = [name for name in ("loss", f"{VALIDATION}loss") if name in self.columns]
        metrics = [name for name in self.columns if name.startswith(VALIDATION) and name not in losses]
        metric = metrics[0].removeprefix(VALIDATION).replace("_", " ") if len(metrics) == 1 else "metric"
        panels = [(label, names) for label, names in (("loss", losses), (metric, metrics)) if names]
        figure = Figure(figsize=(5.0 * len(panels), 4.0), layout="tight")  # inches
        for axes, (label, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for name in names:
                axes.plot(self["epoch"], self[name], marker=".", label=name.replace("_", " "))
            axes.set(xlabel="epoch", ylabel=label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
            axes.legend()
        return deliver(figure, checked)

    def __getitem__(self, column: str) -> list[float]:
        """The values of a column, one per epoch; NaN where a record lacks it.

        Raises:
            UnknownNameError: no record holds it.
            EmptyDataError: there is no epoch yet.
        """
        self._check_epochs()
        lookup("history column", column, self.columns)
        return [record.get(column, math.nan) for record in self._records]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __repr__(self) -> str:
        rows = self._rows()
        return f"{self._title}\n{table(rows, '>' * len(rows[0]))}" if rows else self._title

    def _repr_html_(self) -> str:
        rows = self._rows()
        return html(rows, ">" * len(rows[0]), self._title) if rows else f"<p>{self._title}</p>"

    @property
    def _title(self) -> str:
        return f"History of {len(self)} epochs" + (", the last fit interrupted" if self.interrupted else "")

    def _rows(self) -> list[list[str]]:
        """The cells of a table, heads first; none before the first epoch."""
        names = sorted(self.columns, key=lambda name: name != "epoch")
        rows = [names] + [[_cell(name, record) for name in names] for record in self._records]
        if len(self) > 2 * SHOWN_ROWS:
            rows[1 + SHOWN_ROWS : -SHOWN_ROWS] = [["…"] * len(names)]
        return rows if names else []

    def __dir__(self) -> list[str]:
        return public_names(self, ("append", "extend_last"))

    def _check_epochs(self) -> None:
        if not self._records:
            raise EmptyDataError("history", expected="at least one epoch", got="none")


def _check_record(record: object) -> Record:
    """An epoch's record with the numbers that it was checked to hold.

    Raises:
        DtypeError, ConfigurationError: it is no mapping of names to numbers.
    """
    if not isinstance(record, Mapping):
        raise DtypeError("record of an epoch", expected="a mapping of names to numbers", got=shown(record))
    return {check_text("column of a record", name): _number(name, value) for name, value in record.items()}


def _number(name: str, value: object) -> float:
    """``value`` as an int or a float; NaN and infinity, which a metric may be, are floats too."""
    if isinstance(value, float) and not math.isfinite(value):
        return float(value)
    what = f"{name!r} of a record"
    return check_integer(what, value, least=-MOST_COUNT) if hasattr(value, "__index__") else check_number(what, value)


def _cell(name: str, record: Record) -> str:
    if name not in record:
        return ""
    return format(record[name], {"epoch": ".0f", "seconds": ".2f"}.get(name, "#.4g"))


def is_better(column: str, value: float, best: float | None, min_delta: float = 0.0, mode: Mode = "auto") -> bool:
    """Whether ``value`` passes the best one so far, if any, by more than ``min_delta``.

    NaN and infinity pass nothing, so that a best value can stand in a file's JSON.
    """
    return math.isfinite(value) and (best is None or improves(column, value, best, min_delta, mode))


def retime(history: History, epochs: int, of_seconds: Callable[[list[float]], Sequence[float]]) -> None:
    """Have the records of the last epochs say how long each took, given what they say."""
    records = history._records[-epochs:]
    for record, seconds in zip(records, of_seconds([record["seconds"] for record in records]), strict=True):
        record["seconds"] = seconds
