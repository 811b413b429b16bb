"""History: columns, the table, the best epoch, and the picture."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlpgpu.errors import (
    BackendError,
    ConfigurationError,
    EmptyDataError,
    StorageError,
    UnknownNameError,
)
from mlpgpu.history import History, is_better


def record(epoch: int, loss: float, **others: float) -> dict[str, float]:
    return {"epoch": epoch, "loss": loss, **others, "rate": 0.1, "seconds": 1.25}


def epochs(count: int) -> History:
    return History([record(epoch, 1.0 / epoch) for epoch in range(1, count + 1)])


def test_columns_come_in_order_and_lack_what_a_record_lacks() -> None:
    history = History([record(1, 0.5)])
    history.append(record(2, 0.25, validation_loss=0.75))
    assert history.columns == ("epoch", "loss", "rate", "seconds", "validation_loss")
    assert history["loss"] == [0.5, 0.25]
    first, second = history["validation_loss"]
    assert math.isnan(first)
    assert second == 0.75
    assert len(history) == 2
    assert history.last == record(2, 0.25, validation_loss=0.75)
    assert list(history) == history.records == [record(1, 0.5), history.last]
    assert history.interrupted is False


def test_records_are_copies() -> None:
    given = record(1, 0.5)
    history = History([given])
    added = record(2, 0.4)
    history.append(added)
    for outside in (given, added, history.last, history.records[0], next(iter(history))):
        outside["loss"] = 9.0
    assert history["loss"] == [0.5, 0.4]


def test_unknown_column_names_the_columns() -> None:
    with pytest.raises(UnknownNameError, match=r"one of epoch, loss, rate, seconds, got 'los'.*'loss'"):
        epochs(1)["los"]


@pytest.mark.parametrize("look", [lambda h: h["loss"], lambda h: h.last, lambda h: h.best("loss")])
def test_no_epoch_yet(look: Callable[[History], object], tmp_path: Path) -> None:
    with pytest.raises(EmptyDataError, match="at least one epoch"):
        look(History())
    with pytest.raises(EmptyDataError, match="at least one epoch"):
        History().plot(tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())
    assert repr(History()) == "History of 0 epochs"


def test_best_knows_which_way_is_better() -> None:
    history = History(
        [
            record(1, 0.5, validation_accuracy=0.8),
            record(2, math.nan, validation_accuracy=0.9),
            record(3, 0.2, validation_accuracy=0.9),
            record(4, 0.3, validation_accuracy=0.7),
        ]
    )
    assert history.best("loss")["epoch"] == 3
    assert history.best("validation_accuracy")["epoch"] == 2


def test_best_needs_a_finite_value() -> None:
    with pytest.raises(EmptyDataError, match="a finite value"):
        History([record(1, math.nan)]).best("loss")


@pytest.mark.parametrize(
    ("value", "best", "min_delta", "expected"),
    [(1.0, None, 0.0, True), (1.0, 1.0, 0.0, False), (0.9, 1.0, 0.0, True), (0.9, 1.0, 0.2, False)]
    + [(value, best, 0.0, False) for value in (math.nan, math.inf, -math.inf) for best in (None, 1.0)],
)
def test_is_better(value: float, best: float | None, min_delta: float, expected: bool) -> None:
    assert is_better("loss", value, best, min_delta) is expected


def test_table() -> None:
    history = History([record(1, 0.123456), record(12, 12.0, validation_loss=3e-7)])
    assert repr(history) == (
        "History of 2 epochs\n"
        "epoch    loss    rate  seconds  validation_loss\n"
        "    1  0.1235  0.1000     1.25\n"
        "   12   12.00  0.1000     1.25        3.000e-07"
    )
    history.interrupted = True
    assert repr(history).startswith("History of 2 epochs, the last fit interrupted\n")


def test_table_puts_the_epoch_first() -> None:
    assert repr(History([{"loss": 1.0, "epoch": 1}])).splitlines()[1:] == ["epoch   loss", "    1  1.000"]


@pytest.mark.parametrize("count", [20, 21, 1000])
def test_long_tables_are_shortened_in_the_middle(count: int) -> None:
    first_cells = [line.split()[0] for line in repr(epochs(count)).splitlines()[2:]]
    head, tail = [str(n) for n in range(1, 11)], [str(n) for n in range(count - 9, count + 1)]
    assert first_cells == head + ["…"] * (count > 20) + tail


@pytest.mark.parametrize(("name", "magic"), [("curve.png", b"\x89PNG"), ("curve.SVG", b"<?xml")])
def test_plot(tmp_path: Path, name: str, magic: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another test may have imported it
    history = History([record(n, 1.0 / n, validation_loss=2.0 / n, validation_accuracy=0.5) for n in range(1, 4)])
    path = history.plot(str(tmp_path / name))
    assert path == tmp_path / name
    assert path.read_bytes().startswith(magic)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("others", [{}, {"validation_loss": 0.5}, {"validation_loss": 0.5, "validation_r2": 0.1}])
def test_plot_says_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, float]) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []

    class Figure(figure_module.Figure):
        def savefig(self, *args: object, **options: object) -> None:
            drawn.append(self)
            super().savefig(*args, **options)

    monkeypatch.setattr(figure_module, "Figure", Figure)
    History([record(1, 0.7, **others), record(2, 0.6, **others)]).plot(tmp_path / "curve.svg")
    panels = {axes.get_ylabel(): [text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn[0].axes}
    losses = {"loss": ["loss", "validation loss"][: 1 + ("validation_loss" in others)]}
    assert panels == losses | ({"r2": ["validation r2"]} if "validation_r2" in others else {})
    assert {axes.get_xlabel() for axes in drawn[0].axes} == {"epoch"}
    assert list(drawn[0].axes[0].lines[0].get_xdata()) == [1, 2]
    assert list(drawn[0].axes[0].lines[0].get_ydata()) == [0.7, 0.6]


@pytest.mark.parametrize("name", ["curve", "curve.pdf", "png", ".png"])
def test_plot_refuses_other_formats(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"ends in \.png or \.svg"):
        epochs(1).plot(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendError, match=r"pip install 'mlpgpu\[plot\]'"):
        epochs(1).plot(tmp_path / "curve.png")


def test_plot_into_no_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        epochs(1).plot(tmp_path / "missing" / "curve.png")
