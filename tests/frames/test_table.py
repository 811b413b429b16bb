"""Table: what is learnt of columns, what rows become, and what a saved network remembers of it."""

from __future__ import annotations

import copy
import json
import mmap
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import mlpgpu as mg
from mlpgpu.errors import (
    ConfigurationError,
    DataError,
    DtypeError,
    EmptyDataError,
    FileFormatError,
    ShapeError,
    UnknownNameError,
)
from mlpgpu.tables import CSV, csv_file, room, sources
from mlpgpu.tables.columns import Categories, Dates, Ignored, Numbers, TruthValues

ROWS = 400


@pytest.fixture(scope="module")
def houses() -> pd.DataFrame:
    random = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "size": random.normal(80, 20, ROWS).round(2),
            "rooms": random.integers(1, 6, ROWS),
            "city": random.choice(["Berlin", "Oslo", "Paris"], ROWS),
            "garden": random.random(ROWS) < 0.5,
            "sold": pd.Timestamp("2020-01-01") + pd.to_timedelta(random.integers(0, 900, ROWS), unit="D"),
            "name": [f"house {row}" for row in range(ROWS)],
        }
    )
    frame.loc[::7, "size"] = np.nan
    frame.loc[::9, "city"] = None
    frame.loc[5, "city"] = "Ulm"
    frame["price"] = 1000 * frame["size"].fillna(80) + 5e4 * (frame["city"] == "Paris") + random.normal(0, 500, ROWS)
    return frame


@pytest.fixture(scope="module")
def table(houses: pd.DataFrame) -> mg.Table:
    return mg.Table(houses, "price")


@pytest.fixture(scope="module")
def trained(houses: pd.DataFrame, table: mg.Table) -> mg.Network:
    layers = [mg.Dense(table.n_in, 16, activation="relu"), mg.Dense(16, table.n_out), mg.Standardize(table.n_out)]
    trainer = mg.Trainer(mg.Network(layers, seed=1), table.loss, mg.Adam(0.01), metrics=["r2"], backend="cpu")
    trainer.fit(table.dataset(houses), epochs=20, validation=0.1, progress=False)
    assert trainer.history.last["validation_r2"] > 0.9
    return trainer.network


def column(table: mg.Table, name: str) -> Any:
    return next(column for column in table.columns if column.name == name)


def is_mapped(array: Any) -> bool:
    """Whether an array lies in a file."""
    return isinstance(array, mmap.mmap) or (hasattr(array, "base") and is_mapped(array.base))


def test_kinds_of_columns_are_learnt(houses: pd.DataFrame, table: mg.Table) -> None:
    kinds = [type(column) for column in table.columns]
    assert kinds == [Numbers, Numbers, Categories, TruthValues, Dates, Ignored]
    size, city = column(table, "size"), column(table, "city")
    there = houses["size"].dropna()
    assert size.median == np.median(there)
    np.testing.assert_allclose([size.center, size.scale], [there.mean(), there.std(ddof=0)], rtol=1e-12)
    assert city == Categories("city", ("Berlin", "Oslo", "Paris"), has_other=True, has_missing=True)
    assert table.names == (
        *("size", "size missing", "rooms", "city=Berlin", "city=Oslo", "city=Paris", "city other", "city missing"),
        *("garden", "sold", "sold year sin", "sold year cos", "sold week sin", "sold week cos"),
    )
    assert (table.n_in, table.n_out, table.loss, table.classes) == (14, 1, "mean_squared_error", None)


def test_rows_become_inputs(houses: pd.DataFrame, table: mg.Table) -> None:
    data = table.dataset(houses)
    x = dict(zip(table.names, data.x.T, strict=True))
    size = column(table, "size")
    filled = houses["size"].fillna(size.median).to_numpy()
    np.testing.assert_array_equal(x["size"], ((filled - size.center) / size.scale).astype(np.float32))
    np.testing.assert_array_equal(x["size missing"], houses["size"].isna())
    for city in ("Berlin", "Oslo", "Paris"):
        np.testing.assert_array_equal(x[f"city={city}"], houses["city"] == city)
    np.testing.assert_array_equal(x["city other"], houses["city"] == "Ulm")
    np.testing.assert_array_equal(x["city missing"], houses["city"].isna())
    np.testing.assert_array_equal(x["garden"], houses["garden"])
    weekday = houses["sold"].dt.day_of_week.to_numpy()
    same_day = weekday == weekday[0]
    assert len(np.unique(x["sold week sin"][same_day])) == 1
    np.testing.assert_allclose(x["sold week sin"] ** 2 + x["sold week cos"] ** 2, 1, atol=1e-6)
    np.testing.assert_array_equal(data.y, houses["price"])
    assert data.columns == table.names
    assert data.table is table
    assert data.split(0.5)[0].table is table


def test_saved_network_predicts_from_raw_rows(houses: pd.DataFrame, trained: mg.Network, tmp_path: Path) -> None:
    expected = trained.predict(houses)
    trained.save(tmp_path / "model.h5")
    loaded = mg.load(tmp_path / "model.h5")
    assert loaded.table is not None
    assert loaded.table.described() == trained.table.described()
    others = [
        houses.drop(columns=["price", "name"])[["sold", "garden", "city", "rooms", "size"]],
        pl.from_pandas(houses),
        pa.Table.from_pandas(houses),
        {name: houses[name].tolist() for name in houses},
        houses.astype({"city": "category", "rooms": "Int64", "garden": "boolean"}),
        houses.astype({"sold": str, "size": object, "garden": object}),
        houses.assign(sold=houses["sold"].dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")),
        houses.assign(sold=houses["sold"].dt.date),
        houses.assign(sold=houses["sold"].dt.date.astype(pd.ArrowDtype(pa.date32()))),
        houses.assign(sold=houses["sold"].astype(pd.ArrowDtype(pa.timestamp("ms")))),
    ]
    for rows in others:
        np.testing.assert_array_equal(loaded.predict(rows), expected)
    # A row by itself may be added up in another order than among others.
    np.testing.assert_allclose(loaded.predict(houses.iloc[[3]]), expected[[3]], rtol=1e-6)
    np.testing.assert_array_equal(loaded.predict(loaded.table.encode(houses)), expected)
    for copied in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)), loaded.frozen(0)):
        np.testing.assert_array_equal(copied.predict(houses), expected)


def test_files_hold_the_same_rows(houses: pd.DataFrame, table: mg.Table, tmp_path: Path) -> None:
    expected = table.dataset(houses)
    houses.to_csv(tmp_path / "a.csv", index=False)
    houses.to_csv(tmp_path / "b.csv.gz", index=False, sep=";", decimal=",", encoding="utf-16")
    houses.to_csv(tmp_path / "c.tsv", index=False, sep="\t", encoding="utf-8-sig")
    houses.to_parquet(tmp_path / "d.parquet")
    for name in ("a.csv", "b.csv.gz", "c.tsv", "d.parquet"):
        learnt = mg.Table(tmp_path / name, "price")
        assert learnt.described() == table.described(), name
        data = learnt.dataset(str(tmp_path / name))
        np.testing.assert_array_equal(data.x, expected.x)
        np.testing.assert_array_equal(data.y, expected.y)


@pytest.mark.parametrize(("version", "asked"), [("2.2.2", ["round_trip"]), ("3.0.6", ["round_trip"]), ("3.1.0", [])])
def test_numbers_of_a_csv_are_those_of_its_digits_with_any_pandas(
    version: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    given: list[str] = []
    read = pd.read_csv

    def read_csv(stream: Any, *, float_precision: str | None = None, **options: Any) -> Any:
        given.extend([] if float_precision is None else [float_precision])
        return read(stream, **options)

    # A stand-in for the module: pyarrow keeps for good which version of pandas it met first.
    stand_in = SimpleNamespace(**{**vars(pd), "__version__": version, "read_csv": read_csv})
    monkeypatch.setattr(csv_file, "load_pandas", lambda: stand_in)
    assert [len(frame) for _, frame in CSV(tmp_path / "a.csv").chunks(["a", "b"])] == [1]
    assert given == asked


def test_pieces_and_temporary_files_change_nothing(
    houses: pd.DataFrame, table: mg.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = table.dataset(houses)
    houses.to_csv(tmp_path / "a.csv", index=False)
    monkeypatch.setattr(csv_file, "CHUNK_ROWS", 30)
    monkeypatch.setattr(sources, "CHUNK_ROWS", 30)
    monkeypatch.setattr(room, "MEMORY_SHARE", 1e-9)
    for source in (houses, tmp_path / "a.csv"):
        data = table.dataset(source)
        assert is_mapped(data.x)
        np.testing.assert_array_equal(data.x, expected.x)
        np.testing.assert_array_equal(data.y, expected.y)
        learnt = mg.Table(source, "price")
        assert learnt.names == table.names
        np.testing.assert_allclose(column(learnt, "size").scale, column(table, "size").scale, rtol=1e-12)
        assert column(learnt, "size").median == column(table, "size").median


def test_columns_that_change_kind_between_pieces_are_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = ["7", "8"] * 20 + ["7a", "8b", "9c"] * 20
    frame = pd.DataFrame({"code": codes, "y": np.arange(100.0)})
    frame.to_csv(tmp_path / "a.csv", index=False)
    monkeypatch.setattr(csv_file, "CHUNK_ROWS", 10)
    table = mg.Table(tmp_path / "a.csv", "y")
    assert column(table, "code").categories == ("7", "7a", "8", "8b", "9c")
    np.testing.assert_array_equal(table.dataset(tmp_path / "a.csv").x, table.dataset(frame).x)


def test_a_piece_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    days = ["2020-01-05", "2021-02-28"] * 5
    frame = pd.DataFrame({"d": [None] * 10 + days + [None] * 10 + days, "y": np.arange(40.0)})
    frame["c"], frame["b"] = frame["d"].str[:4], frame["d"] == "2020-01-05"
    frame["b"] = frame["b"].astype(object).where(frame["d"].notna(), None)
    monkeypatch.setattr(sources, "CHUNK_ROWS", 10)
    pieces = mg.Table(frame, "y", kinds={"c": "category"})
    x = pieces.encode(frame)
    monkeypatch.undo()
    whole = mg.Table(frame, "y", kinds={"c": "category"})
    assert [type(column) for column in whole.columns] == [Dates, Categories, TruthValues]
    assert pieces.names == whole.names and "d missing" in whole.names
    np.testing.assert_allclose(x, whole.encode(frame), atol=1e-6)


def test_digits_with_zeros_in_front_are_categories(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("zip,y\n" + "01067,1\n10115,2\n" * 5, encoding="utf-8")
    assert column(mg.Table(tmp_path / "a.csv", "y"), "zip").categories == ("01067", "10115")
    as_numbers = mg.Table(tmp_path / "a.csv", "y", kinds={"zip": "number"})
    assert column(as_numbers, "zip").center == (1067 + 10115) / 2


@pytest.mark.parametrize(
    ("y", "task", "classes", "loss"),
    [
        (["a", "b"], None, ("a", "b"), "softmax_cross_entropy"),
        ([False, True], None, ("false", "true"), "softmax_cross_entropy"),
        ([0, 1], None, ("0", "1"), "softmax_cross_entropy"),
        ([1.0, 2.0], None, ("1", "2"), "softmax_cross_entropy"),
        ([3, 8], None, None, "mean_squared_error"),
        ([3, 8], "classification", ("3", "8"), "softmax_cross_entropy"),
        ([0, 1], "regression", None, "mean_squared_error"),
        ([0.5, 1.5], None, None, "mean_squared_error"),
    ],
)
def test_targets_say_what_they_are(y: list[Any], task: Any, classes: Any, loss: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": np.arange(20.0), "y": y * 10})
    table = mg.Table(frame, "y", task=task)
    assert (table.classes, table.loss) == (classes, loss)
    data = table.dataset(frame)
    assert data.classes == classes
    np.testing.assert_array_equal(data.y, np.tile([0, 1] if classes else np.array(y, float), 10))
    frame.to_csv(tmp_path / "a.csv", index=False)
    np.testing.assert_array_equal(table.dataset(tmp_path / "a.csv").y, data.y)


def test_classifier_gives_labels_of_raw_rows(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    x = random.normal(size=300)
    frame = pd.DataFrame({"x": x, "sign": np.where(x > 0, "plus", "minus"), "w": np.ones(300)})
    table = mg.Table(frame, "sign", weight="w")
    assert table.names == ("x",)
    net = mg.Network([mg.Dense(1, 8, activation="tanh"), mg.Dense(8, table.n_out)], seed=1)
    data = table.dataset(frame)
    assert data.weight is not None
    mg.Trainer(net, table.loss, mg.Adam(0.05), backend="cpu").fit(data, epochs=10, progress=False)
    assert set(net.labels({"x": [-2.0, 3.0]})) == {"minus", "plus"}
    assert net.labels(frame.drop(columns="w")).tolist() == net.labels(data).tolist()


def test_several_targets() -> None:
    frame = pd.DataFrame({"x": np.arange(20.0), "a": np.arange(20.0) * 2, "b": np.arange(20.0) ** 2})
    frame["p"], frame["q"] = frame["x"] > 5, np.where(frame["x"] > 9, "yes", "no")
    numbers = mg.Table(frame[["x", "a", "b"]], ["a", "b"])
    assert (numbers.n_out, numbers.loss) == (2, "mean_squared_error")
    assert numbers.dataset(frame[["x", "a", "b"]]).y.shape == (20, 2)
    labels = mg.Table(frame, ["p", "q"])
    assert (labels.n_out, labels.loss, labels.classes) == (2, "binary_cross_entropy", None)
    np.testing.assert_array_equal(labels.dataset(frame).y, np.stack([frame["p"], frame["q"] == "yes"], axis=1))
    with pytest.raises(ConfigurationError, match="'a' of numbers, 'p' of label"):
        mg.Table(frame, ["a", "p"])


def test_unknown_categories_are_other_or_nothing(houses: pd.DataFrame, table: mg.Table) -> None:
    place = table.names.index("city=Berlin")
    rows = houses.iloc[:2].assign(city=["Rome", "Paris"])
    np.testing.assert_array_equal(table.encode(rows)[:, place : place + 5], [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0]])
    without = mg.Table(houses[houses["city"] != "Ulm"].dropna(), "price")
    np.testing.assert_array_equal(
        without.encode(rows)[:, 1:5], np.c_[without.encode(rows)[:, 1], [[0, 0, 0], [0, 0, 1]]]
    )


def test_missing_values_that_training_did_not_have(houses: pd.DataFrame) -> None:
    table = mg.Table(houses.dropna()[["size", "city", "garden", "price"]], "price")
    row = table.encode({"size": [None], "city": [None], "garden": [None]})[0]
    size = column(table, "size")
    assert row[0] == np.float32((size.median - size.center) / size.scale)
    np.testing.assert_array_equal(row[1:-1], 0)
    assert row[-1] == column(table, "garden").usual


def test_robust_scaling_and_none() -> None:
    x = np.r_[np.arange(100.0), 1e9]
    frame = pd.DataFrame({"x": x, "y": np.arange(101.0)})
    robust = column(mg.Table(frame, "y", scaling="robust"), "x")
    lower, median, upper = np.quantile(x, (0.25, 0.5, 0.75))
    assert (robust.center, robust.scale) == (median, upper - lower)
    plain = mg.Table(frame, "y", scaling="none")
    np.testing.assert_array_equal(plain.encode(frame)[:, 0], x.astype(np.float32))


def test_most_frequent_categories_are_kept() -> None:
    frame = pd.DataFrame({"c": list("aaaabbbccd"), "y": np.arange(10.0)})
    assert column(mg.Table(frame, "y"), "c") == Categories("c", ("a", "b", "c"), has_other=True, has_missing=False)
    assert column(mg.Table(frame, "y", most_categories=2), "c").categories == ("a", "b")


@pytest.mark.parametrize(
    ("texts", "form", "first"),
    [
        (["2020-01-05", "2021-02-28"], "ISO 8601", 1578182400),
        (["2020-01-05T10:00:00+02:00", "2021-02-28 00:00:00"], "ISO 8601", 1578211200),
        (["31.01.2020", "05.02.2020"], "%d.%m.%Y", 1580428800),
        (["31/01/2020 10:30", "05/02/2020 00:00"], "%d/%m/%Y %H:%M", 1580466600),
        (["01/31/2020", "02/05/2020"], "%m/%d/%Y", 1580428800),
        (["31 Jan 2020", "05 Feb 2020"], "%d %b %Y", 1580428800),
    ],
)
def test_dates_in_text(texts: list[str], form: str, first: int) -> None:
    frame = pd.DataFrame({"d": texts * 5, "y": np.arange(10.0)})
    dates = column(mg.Table(frame, "y"), "d")
    assert dates.form == form
    assert dates.center - dates.scale == pytest.approx(min(first, 2 * dates.center - first), abs=1.0)


def test_what_is_declared_is_taken() -> None:
    frame = pd.DataFrame({"zip": [10115, 75001] * 10, "flag": [0, 1] * 10, "d": ["01/02/2020", "02/03/2021"] * 10})
    frame["y"] = np.arange(20.0)
    kinds = {"zip": "category", "flag": "truth", "d": "date %d/%m/%Y"}
    table = mg.Table(frame, "y", kinds=kinds)
    assert [type(column) for column in table.columns] == [Categories, TruthValues, Dates]
    assert column(table, "zip").categories == ("10115", "75001")
    assert table.encode(frame)[0, 0] == 1
    with pytest.raises(DataError, match=r"'%d/%m/%Y' and '?%m/%d/%Y|%d/%m/%Y and %m/%d/%Y"):
        mg.Table(frame, "y")


Y = {"y": np.arange(10.0)}


@pytest.mark.parametrize(
    ("columns", "arguments", "error", "message"),
    [
        ({"x": [1.0] * 10, **Y}, {}, DataError, "'x': the same in all rows"),
        ({"x": range(10), "y": [2.0] * 10}, {}, DataError, "target 'y': expected two different values or more"),
        ({"x": range(10), "y": [None, *range(9)]}, {}, DataError, "target 'y': expected a value in each row"),
        ({"x": [*range(9), "abc"], **Y}, {}, DtypeError, "'abc' at row 9 beside 9 rows with numbers"),
        ({"x": [*"123456789", "?"], **Y}, {}, DtypeError, r"'\?' at row 9 .*missing=\['\?'\]"),
        ({"x": [*map(str, range(9)), "?"], **Y}, {"kinds": {"x": "date"}}, DataError, "column 'x': expected a date"),
        ({"x": [1j] * 10, **Y}, {}, DtypeError, "column 'x': expected numbers, truth values, dates or text"),
        ({"x": [b"a"] * 10, **Y}, {}, DtypeError, "column 'x': expected numbers"),
        (
            {"x": pd.Series(["\ud800", "b"] * 5, dtype=object), **Y},
            {},
            DataError,
            "'x': expected text that UTF-8 can hold",
        ),
        ({"x": [[1]] * 10, **Y}, {}, DtypeError, "column 'x': expected numbers"),
        ({"x": [*range(9), np.inf], **Y}, {}, DataError, "column 'x': expected finite numbers, got inf at row 9"),
        ({"x": ["2020-01-01"] * 5 + ["2021-01-01"] * 4 + ["2020-02-30"], **Y}, {}, DataError, "'2020-02-30' at row 9"),
        ({"x": list("ab") * 5, **Y}, {"kinds": {"x": "number"}}, DtypeError, "column 'x'"),
        (
            {"x": list("ab") * 5, **Y},
            {"kinds": {"z": "number"}},
            UnknownNameError,
            "kinds: expected one of the columns",
        ),
        ({"x": list("ab") * 5, **Y}, {"kinds": {"x": "numbers"}}, ValueError, "did you mean 'number'"),
        ({"x": range(10), **Y}, {"target": "Y"}, UnknownNameError, "did you mean 'y'"),
        ({"x": range(10), **Y}, {"scaling": "minmax"}, ValueError, "scaling: expected one of"),
        ({"x": range(10), **Y}, {"task": "ranking"}, ValueError, "task: expected one of"),
        ({"x": range(10), **Y}, {"most_categories": 0}, ConfigurationError, "most_categories"),
        ({"x": range(10), "y": list("ab") * 5}, {"task": "regression"}, DtypeError, "target 'y': expected numbers"),
        ({"x": [], "y": []}, {}, EmptyDataError, "table: expected at least one row"),
        ({0: range(10), **Y}, {}, DtypeError, "names of columns: expected strings, got 0"),
    ],
)
def test_what_cannot_be_learnt(columns: Any, arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        mg.Table(pd.DataFrame(columns), **{"target": "y", **arguments})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda f: f.drop(columns="size"), ShapeError, "no 'size'"),
        (lambda f: f.rename(columns={"city": "City"}), ShapeError, "no 'city' .did you mean 'City'"),
        (
            lambda f: f.assign(size="big"),
            DataError,
            "'size': expected a number, as in training, got 'big' at row 0",
        ),
        (lambda f: f.assign(size=f["sold"]), DtypeError, "column 'size': expected numbers, as in training, got dates"),
        (lambda f: f.assign(city=3.0), DtypeError, "column 'city': expected categories, .* got numbers, such as 3"),
        (lambda f: f.assign(city=f["sold"]), DtypeError, "column 'city': expected categories, .* got dates"),
        (lambda f: f.assign(sold=3.0), DtypeError, "column 'sold': expected dates, as in training, got numbers"),
        (lambda f: f.assign(sold="soon"), DataError, "'soon' at row 0"),
        (lambda f: f.assign(garden=2), DataError, "column 'garden': expected 'false' or 'true'.* got 2.0 at row 0"),
        (lambda f: f.iloc[:0], EmptyDataError, "at least one row"),
    ],
)
def test_rows_of_another_kind_are_refused(
    change: Any, error: Any, message: str, houses: pd.DataFrame, trained: mg.Network
) -> None:
    with pytest.raises(error, match=message):
        trained.predict(change(houses))


def test_new_columns_are_named(houses: pd.DataFrame, trained: mg.Network) -> None:
    with pytest.warns(UserWarning, match="had no 'colour', which is not used"):
        trained.predict(houses.assign(colour="red"))


def test_unknown_class_is_refused() -> None:
    frame = pd.DataFrame({"x": range(4), "y": list("abab")})
    table = mg.Table(frame, "y")
    with pytest.raises(DataError, match="target 'y': expected one of the classes a, b, got 'c' at row 3"):
        table.dataset(frame.assign(y=list("abac")))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"", EmptyDataError, "got nothing"),
        (b"\n\n", EmptyDataError, "got nothing"),
        (b"x,y\n", EmptyDataError, "at least one row"),
        (b"x,y\n1,2\n1,2,3\n", FileFormatError, "rows of 2 cells"),
        (b"x,y\n1,2,3\n1,2,3\n", FileFormatError, "rows of 2 cells"),
        (b"x,x\n1,2\n", ShapeError, "'x' more than once"),
        (b"1,2\n3,4\n", FileFormatError, "names of columns in the first row"),
        ("x,y\nMünchen,2\n".encode("latin-1"), FileFormatError, "expected text in utf-8, got byte 0xfc"),
        (b"x,y\n" + b"a,1\n" * 100_000 + b"\xff,2\n", FileFormatError, "expected text in utf-8, got byte 0xff"),
        (b"x,y\n1,2\n\0\0", FileFormatError, "NUL"),
        (b"\x1f\x8b\x08\x00garbage", FileFormatError, "gzip"),
    ],
)
def test_files_that_are_no_tables(text: bytes, error: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(error, match=message):
        mg.Table(tmp_path / "a.csv", "y")


def test_encoding_may_be_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        "city,y\nMünchen,1\nKöln,2\n".encode("latin-1") * 1 + "Köln,2\nMünchen,3\n".encode("latin-1")
    )
    table = mg.Table(CSV(tmp_path / "a.csv", encoding="latin-1"), "y")
    assert column(table, "city").categories == ("Köln", "München")
    with pytest.raises(ConfigurationError, match="encoding"):
        CSV(tmp_path / "a.csv", encoding="klingon")


def test_paths_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\.csv or \.tsv"):
        mg.Table(tmp_path / "a.xlsx", "y")
    with pytest.raises(mg.errors.StorageError, match="No such file"):
        mg.Table(tmp_path / "a.csv", "y")
    with pytest.raises(mg.errors.StorageError, match="folder"):
        (tmp_path / "b.csv").mkdir()
        mg.Table(tmp_path / "b.csv", "y")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(FileFormatError, match="a Parquet file"):
        mg.Table(tmp_path / "a.parquet", "y")
    with pytest.raises(DtypeError, match="a frame"):
        mg.Table(np.zeros((3, 3)), "y")
    with pytest.raises(DtypeError, match="collect"):
        mg.Table(pl.DataFrame({"x": [1, 2], "y": [1, 2]}).lazy(), "y")


def test_files_that_lie_are_refused(trained: mg.Network) -> None:
    contents = trained.contents()
    described = json.dumps(contents.description)

    def load(change: Any) -> mg.Network:
        changed = json.loads(described)
        change(changed["network"]["table"])
        return mg.Network.from_contents(mg.storage.Contents(changed, contents.arrays, contents.groups))

    assert load(lambda table: None).table is not None
    lies = [
        lambda table: table["columns"].pop(),
        lambda table: table["columns"].pop(0),
        lambda table: table["columns"][0].update(scale=0.0),
        lambda table: table["columns"][0].update(scale="1"),
        lambda table: table["columns"][0].update(kind="Network"),
        lambda table: table["columns"][0].update(name=3),
        lambda table: table["columns"][0].update(name="rooms"),
        lambda table: table["columns"][2].update(categories=[]),
        lambda table: table["columns"][2].update(categories=["Oslo", "Oslo", "Paris"]),
        lambda table: table["columns"][3].update(words=["yes"]),
        lambda table: table["columns"][4].update(form=None),
        lambda table: table["targets"][0].update(kind="ClassTarget"),
        lambda table: table.update(columns=3),
        lambda table: table.update(targets=[{"kind": "NumberTarget", "name": "price"}] * 2),
        lambda table: table.update(missing="NA"),
        lambda table: table.clear(),
    ]
    for number, lie in enumerate(lies):
        if number == 0:  # an ignored column may go
            assert load(lie).table is not None
        else:
            with pytest.raises(FileFormatError):
                load(lie)


def test_table_shows_itself(table: mg.Table) -> None:
    shown = str(table)
    assert "city    categories" in shown
    assert "text of which none is in 2 rows or more" in shown
    assert "<table>" in table._repr_html_()
    assert repr(table) == "Table(6 columns, 14 inputs, target='price')"
    with pytest.raises(mg.errors.ReadOnlyError):
        table.weight = "w"


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(mg.errors.BackendError, match=r"the package pandas.*pip install 'mlpgpu\[tables\]'"):
        mg.Table({"x": [1, 2], "y": [1, 2]}, "y")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(mg.errors.BackendError, match="pip install pyarrow"):
        mg.Table(tmp_path / "a.parquet", "y")
