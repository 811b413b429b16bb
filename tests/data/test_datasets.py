"""Dataset: what it keeps, refuses and splits; the named sets: where they are found and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpgpu.datasets import Dataset, load, named, read_idx, write_idx
from mlpgpu.errors import (
    ConfigurationError,
    DataError,
    DownloadError,
    DtypeError,
    EmptyDataError,
    FileFormatError,
    ShapeError,
    StorageError,
    UnknownNameError,
)

X = np.arange(12, dtype=np.float32).reshape(6, 2)


# Inputs


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.int8, np.int64, np.uint16])
def test_inputs_are_kept_not_copied(dtype: type) -> None:
    x = np.full((5, 4, 3), 7, dtype)
    data = Dataset(x)
    assert (len(data), data.n_in, data.x.shape, data.x.dtype) == (5, 12, (5, 12), dtype)
    assert np.shares_memory(data.x, x)
    assert x.flags.writeable
    assert not data.x.flags.writeable


@pytest.mark.parametrize("dtype", [np.bool_, np.float16])
def test_other_numbers_become_float32(dtype: Any) -> None:
    x = np.array([[0, 1], [1, 1]]).astype(dtype)
    data = Dataset(x)
    np.testing.assert_array_equal(data.x, x.astype(np.float32), strict=True)
    assert data.scale is None


def test_layouts_are_made_contiguous_and_native() -> None:
    for x in (np.asfortranarray(X), np.repeat(X, 2, axis=0)[::2], X.astype(">f4"), X.astype(">i2"), X.tolist()):
        data = Dataset(x)
        np.testing.assert_array_equal(data.x, X)
        assert data.x.flags.c_contiguous
        assert data.x.dtype.isnative


def test_scale_belongs_to_bytes() -> None:
    assert Dataset(np.full((2, 2), 7, np.uint8)).scale == 1 / 255
    assert Dataset(np.ones((2, 2), np.uint8), scale=0.5).scale == 0.5
    assert Dataset(X).scale is None
    told = Dataset(X, scale=0.5)  # floats that were multiplied already
    assert (told.scale, told.inputs.scale) == (None, 0.5)
    assert told.x.tolist() == X.tolist()
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="scale"):
            Dataset(np.ones((2, 2), np.uint8), scale=scale)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.ones(3), ShapeError, r"expected \(rows, features\), got shape \(3,\)"),
        (5.0, ShapeError, r"expected \(rows, features\), got shape \(\)"),
        ([[1, 2], [3]], ShapeError, r"expected \(rows, features\)"),
        (np.ones((0, 3)), EmptyDataError, "at least one row"),
        (np.ones((3, 0)), ShapeError, "at least one feature"),
        (np.ones((3, 2, 0)), ShapeError, "at least one feature"),
        (np.ones((2, 2), complex), DtypeError, "got dtype complex128"),
        (np.array([["a"]]), DtypeError, "got dtype <U1"),
        (np.array([[object()]]), DtypeError, "got dtype object"),
        (np.zeros((2, 2), "M8[s]"), DtypeError, "got dtype datetime64"),
        (None, DtypeError, "got dtype object"),
    ],
)
def test_bad_inputs(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Dataset(x)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_non_finite_number_is_named(value: float) -> None:
    x = np.zeros((1000, 1000), np.float32)  # rows 524 … lie beyond the first chunk
    x[700, 3] = x[701, 1] = value
    with pytest.raises(DataError, match=rf"x: expected finite numbers, got {value} at row 700, column 3"):
        Dataset(x)
    with pytest.raises(DataError, match=rf"y: .* got {value} at row 2$"):
        Dataset(X, np.array([0, 0, value, 0, 0, 0]))
    with pytest.raises(DataError, match=rf"y: .* got {value} at row 5, column 1$"):
        Dataset(X, np.array([[0, 0]] * 5 + [[0, value]]))
    with pytest.raises(DataError, match=rf"weight: .* got {value} at row 1$"):
        Dataset(X, weight=[1, value, 1, 1, 1, 1])


def test_a_memory_map_is_never_read_as_a_whole(tmp_path: Path) -> None:
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(1 << 14, 1 << 10))  # 64 MiB
    tracemalloc.start()
    try:
        data = Dataset(x, np.zeros(1 << 14, np.uint8))
        rest, _ = data.split(0.25)
        identities = data.identity(), rest.identity()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert np.shares_memory(data.x, x)
    assert np.shares_memory(rest.storage_x, x)
    assert [identity["rows"] for identity in identities] == [1 << 14, 3 << 12]


# Targets, classes and weights


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.uint64, np.bool_, np.float32, np.float64])
def test_targets_are_kept(dtype: type) -> None:
    for y in (np.array([0, 1, 0, 1, 1, 0], dtype), np.ones((6, 3), dtype)):
        kept = Dataset(X, y).y
        assert kept is not None
        np.testing.assert_array_equal(kept, y, strict=True)
        assert not kept.flags.writeable


def test_half_precision_targets_become_float32() -> None:
    y = Dataset(X, np.ones(6, np.float16)).y
    assert y is not None
    assert y.dtype == np.float32


@pytest.mark.parametrize("dtype", ["U", object, "T"])
def test_strings_are_coded(dtype: Any) -> None:
    y = np.array(["dog", "cat", "dog", "eel", "cat", "dog"])
    data = Dataset(X, y.astype(np.dtypes.StringDType() if dtype == "T" else dtype))
    assert data.classes == ("cat", "dog", "eel")
    assert {type(name) for name in data.classes} == {str}
    np.testing.assert_array_equal(data.y, np.array([1, 0, 1, 2, 0, 1]), strict=True)
    other = Dataset(X[:2], ["eel", "dog"], classes=data.classes)
    np.testing.assert_array_equal(other.y, [2, 1])
    assert other.classes == data.classes


def test_named_integer_labels() -> None:
    assert Dataset(X[:2], [0, 1], classes=["cat", "dog"]).classes == ("cat", "dog")
    assert Dataset(X[:2], [False, True], classes=["no", "yes"]).classes == ("no", "yes")


@pytest.mark.parametrize(
    ("y", "classes", "error", "message"),
    [
        ([0, 1, 2, 0, 1, 2], ["cat", "dog"], DataError, "from 0 to 1, got 2 at row 2"),
        ([0, -1, 0, 0, 0, 0], ["cat", "dog"], DataError, "from 0 to 1, got -1 at row 1"),
        (["a", "b", "c", "a", "a", "a"], ["a", "b"], DataError, "one of the classes a, b, got 'c' at row 2"),
        ([0.5] * 6, ["a"], ConfigurationError, r"got float64 \(6,\)"),
        ([[0, 1]] * 6, ["a", "b"], ConfigurationError, r"got int64 \(6, 2\)"),
        (None, ["a"], ConfigurationError, "none without y"),
        ([0] * 6, ["a", "a"], ConfigurationError, "names that differ, got a, a"),
        ([0] * 6, "ab", DtypeError, "a sequence of names, got 'ab'"),
        ([0] * 6, [0, 1], DtypeError, "a sequence of names"),
        ([0] * 6, [], DtypeError, "a sequence of names"),
        ([0] * 5, None, ShapeError, r"y: expected \(6,\) or \(6, outputs\), as x has 6 rows, got shape \(5,\)"),
        (0, None, ShapeError, r"got shape \(\)"),
        (np.ones((6, 0)), None, ShapeError, r"got shape \(6, 0\)"),
        (np.ones((6, 1, 1)), None, ShapeError, r"got shape \(6, 1, 1\)"),
        ([["a"]] * 6, None, ShapeError, r"expected \(6,\), got shape \(6, 1\)"),
        (["a"] * 5, None, ShapeError, r"expected \(6,\), got shape \(5,\)"),
        (np.ones(6, complex), None, DtypeError, "got dtype complex128"),
        (np.array(["a", 1, None] * 2, object), None, DtypeError, "got dtype object"),
        (np.array([b"a"] * 6), None, DtypeError, "got dtype .S1"),
    ],
)
def test_bad_targets(y: Any, classes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Dataset(X, y, classes=classes)


def test_weights() -> None:
    for given_, kept in (
        (np.float64, np.float64),
        (np.float32, np.float32),
        (np.int64, np.float32),
        (bool, np.float32),
    ):
        weight = Dataset(X, weight=np.array([1, 0, 1, 1, 1, 1], given_)).weight
        assert weight is not None
        np.testing.assert_array_equal(weight, np.array([1, 0, 1, 1, 1, 1], kept), strict=True)
    np.testing.assert_array_equal(Dataset(X, weight=np.full(6, 200, np.uint8)).weight, np.full(6, 200, np.float32))


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ([1] * 5, ShapeError, r"expected \(6,\), as x has 6 rows, got shape \(5,\)"),
        ([[1]] * 6, ShapeError, r"got shape \(6, 1\)"),
        ([1, 1, -0.5, 1, 1, 1], DataError, "at least 0, got -0.5 at row 2"),
        ([0] * 6, DataError, "a weight above 0, got 6 times 0"),
        (["a"] * 6, DtypeError, "got dtype <U1"),
    ],
)
def test_bad_weights(weight: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Dataset(X, weight=weight)
    with pytest.raises(error, match=message):
        Dataset(X).with_weight(weight)


def test_with_weight() -> None:
    data = Dataset(X, [0, 1, 2, 0, 1, 2])
    weighted = data.with_weight([1, 2, 3, 4, 5, 6])
    assert data.weight is None
    np.testing.assert_array_equal(weighted.weight, np.arange(1, 7, dtype=np.float32), strict=True)
    assert weighted.with_weight(None).identity() == data.identity() != weighted.identity()
    part = data.split(0.5)[1]
    np.testing.assert_array_equal(part.with_weight([1, 2, 3]).x, part.x)


# What a trainer reads


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_, np.float32])
def test_labels(dtype: type) -> None:
    data = Dataset(X, np.array([0, 1, 1, 0, 1, 0], dtype))
    np.testing.assert_array_equal(data.labels(2), np.array([0, 1, 1, 0, 1, 0], np.intp), strict=True)
    assert data.labels(2) is data.labels(2)
    np.testing.assert_array_equal(data.labels(300), data.labels(2))
    with pytest.raises(DataError, match=r"from 0 to 0, got (1|True|1.0) at row 1"):
        data.labels(1)


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        (None, DataError, "got no y"),
        (np.ones((6, 2)), ShapeError, r"class labels \(6,\), got shape \(6, 2\)"),
        ([0, 1, 0.5, 0, 0, 0.25], DataError, "whole numbers, got 0.5 at row 2"),
        ([0, 1, 0, -1, 0, -2], DataError, "from 0 to 2, got -1 at row 3"),
        ([0, 1, 3, 9, 0, 0], DataError, "from 0 to 2, got 3 at row 2"),
    ],
)
def test_bad_labels(y: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Dataset(X, y).labels(3)


def test_numeric_targets() -> None:
    column = Dataset(X, [3, -1, 4, 1, -5, 9])
    np.testing.assert_array_equal(
        column.targets(1, np.float32), np.float32([[3], [-1], [4], [1], [-5], [9]]), strict=True
    )
    square = np.ones((6, 2), np.float32)
    assert np.shares_memory(Dataset(X, square).targets(2, np.float32), square)
    assert Dataset(X, square).targets(2, np.float64).dtype == np.float64


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        (None, DataError, "got no y"),
        ([1] * 6, ShapeError, r"targets \(6, 2\), got shape \(6,\)"),
        (np.ones((6, 3)), ShapeError, r"targets \(6, 2\), got shape \(6, 3\)"),
        (["cat"] * 6, DtypeError, "numeric targets, got labels of the classes cat"),
        ([[0, 0]] * 5 + [[0, -1e39]], DataError, "y as float32: .* -inf at row 5, column 1"),
    ],
)
def test_bad_numeric_targets(y: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Dataset(X, y).targets(2, np.float32)


def test_immutable() -> None:
    data = Dataset(X, [0] * 6, [1] * 6)
    for name in ("x", "y", "weight", "classes", "scale", "n_in", "storage_x", "anything"):
        with pytest.raises(AttributeError):
            setattr(data, name, None)
    for part in (data, *data.split(0.5)):
        for array in (part.x, part.y, part.weight, part.labels(1), part.targets(1, np.float32)):
            assert array is not None
            assert not array.flags.writeable


def test_repr() -> None:
    assert repr(Dataset(X)) == "Dataset(6 rows, 2 features, float32, y: none)"
    text = repr(Dataset(np.full((2, 2, 2), 7, np.uint8), ["b", "a"]))
    assert text == "Dataset(2 rows, 4 features, uint8, y: int64 (2,), classes: a, b)"


def test_pickle() -> None:
    data = Dataset(X, ["a", "b"] * 3).split(0.5)[0]
    back = pickle.loads(pickle.dumps(data))
    assert back.identity() == data.identity()
    assert back.classes == data.classes


def test_identity() -> None:
    y, weight = np.array([0, 1, 0, 1, 0, 1]), np.arange(6, dtype=np.float32)
    identity = Dataset(X, y, weight).identity()
    assert identity == {
        "rows": 6,
        "n_in": 2,
        "x_dtype": "float32",
        "scale": None,
        "y_shape": [6],
        "y_dtype": "int64",
        "has_weight": True,
        "crc": zlib.crc32(X.tobytes() + y.tobytes() + weight.tobytes()),
    }
    assert json.loads(json.dumps(identity)) == identity


def test_identity_tells_sets_apart() -> None:
    bytes_ = np.full((6, 2), 7, np.uint8)
    sets = [
        Dataset(X),
        Dataset(X[::-1]),
        Dataset(X[:5]),
        Dataset(X.reshape(4, 3)),
        Dataset(X.astype(np.float64)),
        Dataset(X, np.zeros(6)),
        Dataset(X, np.zeros((6, 1))),
        Dataset(X, np.zeros(6, np.int64)),
        Dataset(X, weight=np.ones(6)),
        Dataset(bytes_),
        Dataset(bytes_, scale=1.0),
    ]
    identities = {json.dumps(data.identity()) for data in sets}
    assert len(identities) == len(sets)


def test_identity_of_a_split_is_that_of_its_rows() -> None:
    x = np.random.default_rng(0).integers(0, 255, (3000, 500), np.uint8)  # more than one chunk
    part = Dataset(x, np.arange(3000) % 3, np.ones(3000)).split(0.1)[0]
    assert part.identity() == Dataset(part.x, part.y, part.weight).identity()


# Splits


def rows_of(data: Dataset) -> np.ndarray:
    return data.storage_rows(np.arange(len(data)))


@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**64 - 1),
    stratify=st.sampled_from([None, False]),
)
def test_split_properties(labels: list[int], fraction: float, seed: int, stratify: bool | None) -> None:
    rows, held_rows = len(labels), round(fraction * len(labels))
    x = np.arange(rows, dtype=np.float32)[:, None]
    data = Dataset(x, labels, np.arange(1, rows + 1))
    if not 0 < held_rows < rows:
        with pytest.raises(ConfigurationError, match="at least one row in each part"):
            data.split(fraction)
        return
    rest, held = data.split(fraction, seed=seed, stratify=stratify)
    assert len(held) == held_rows
    np.testing.assert_array_equal(np.sort(np.concatenate([rows_of(rest), rows_of(held)])), np.arange(rows))
    for part in (rest, held):
        assert part.storage_x is data.storage_x
        np.testing.assert_array_equal(part.x[:, 0], rows_of(part))
        np.testing.assert_array_equal(part.y, np.array(labels)[rows_of(part)])
        np.testing.assert_array_equal(part.weight, rows_of(part) + 1)
    counts = np.bincount(labels, minlength=5)
    if stratify is None and counts[counts > 0].min() > 1:
        got = np.bincount(np.array(labels)[rows_of(held)], minlength=5)
        assert (np.abs(got - counts * held_rows / rows) < 1).all()


def test_largest_remainders_by_hand() -> None:
    labels = np.repeat([7, 3, 5], [4, 5, 3])  # quotas of 4 in 12: 7 -> 1 1/3, 3 -> 1 2/3, 5 -> 1
    held = Dataset(np.ones((12, 1)), labels).split(1 / 3)[1]
    np.testing.assert_array_equal(np.unique(held.y, return_counts=True), [[3, 5, 7], [2, 1, 1]])
    tied = Dataset(np.ones((4, 1)), [1, 1, 0, 0]).split(0.25)[1]  # 1/2 each: to the lower label
    np.testing.assert_array_equal(tied.y, [0])


def test_split_depends_on_seed_and_rows_alone() -> None:
    a, b = (Dataset(x) for x in (np.zeros((50, 1)), np.full((50, 7), 7, np.uint8)))
    np.testing.assert_array_equal(rows_of(a.split(0.2, seed=3)[1]), rows_of(b.split(0.2, seed=3)[1]))
    assert (rows_of(a.split(0.2, seed=3)[1]) != rows_of(a.split(0.2, seed=4)[1])).any()
    assert (np.diff(rows_of(a.split(0.2)[0])) < 0).any()


def test_splits_of_splits() -> None:
    x = np.arange(40, dtype=np.float64).reshape(20, 2)
    data = Dataset(x, np.arange(20), np.arange(20) + 1)
    middle = data.split(0.5, seed=1)[1]
    rest, held = middle.split(0.3, seed=2)
    assert sorted([*rows_of(rest), *rows_of(held)]) == sorted(rows_of(middle))
    np.testing.assert_array_equal(held.x, x[rows_of(held)])
    np.testing.assert_array_equal(held.y, rows_of(held))
    np.testing.assert_array_equal(held.weight, rows_of(held) + 1)
    assert np.shares_memory(held.storage_x, x)
    order = np.array([2, 0])
    np.testing.assert_array_equal(x[held.storage_rows(order)], held.x[order])
    np.testing.assert_array_equal(data.storage_rows(order), order)


@pytest.mark.parametrize(
    ("y", "problem"), [(None, "no class labels"), ([0.5] * 6, "no class labels"), ([0, 0, 1, 1, 1, 2], "class 2")]
)
def test_stratify_where_it_is_impossible(y: Any, problem: str) -> None:
    data = Dataset(X, y)
    with pytest.raises(DataError, match=problem):
        data.split(0.5, stratify=True)
    assert len(data.split(0.5)[1]) == 3


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan"), 0.05, 0.95])
def test_bad_fractions(fraction: float) -> None:
    with pytest.raises(ConfigurationError, match="fraction"):
        Dataset(X).split(fraction)


def test_bad_seeds_and_single_rows() -> None:
    with pytest.raises(ConfigurationError, match="seed"):
        Dataset(X).split(0.5, seed=-1)
    with pytest.raises(DtypeError, match="fraction"):
        Dataset(X).split("half")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"at least one row in each part, got 0.5 of 1"):
        Dataset(X[:1]).split(0.5)


def test_a_part_needs_a_weight_above_0() -> None:
    with pytest.raises(DataError, match=r"weight of (rest|held_out): expected a weight above 0, got 3 times 0"):
        Dataset(X, weight=[1, 0, 0, 0, 0, 0]).split(0.5)


# Named sets


def test_digits() -> None:
    train, test = load("digits")
    assert (len(train), len(test), train.n_in, train.scale, train.x.dtype) == (1438, 359, 64, 1 / 16, np.uint8)
    assert train.x.max() == 16
    # Accuracies are comparable between versions only while this split stands still.
    assert (train.identity()["crc"], test.identity()["crc"]) == (4196042523, 4240091954)
    for part in (train, test):
        np.testing.assert_allclose(np.bincount(part.labels(10)) / len(part), 0.1, atol=0.005)


def test_bundled_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")
    digits = datasets.load_digits()
    folder = next(folder for folder in named.BUNDLED_FOLDERS if (folder / "digits").is_dir()) / "digits"
    np.testing.assert_array_equal(read_idx(folder / "images.idx3-ubyte.gz"), digits.images)
    np.testing.assert_array_equal(read_idx(folder / "labels.idx1-ubyte.gz"), digits.target)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_published_sets(name: str) -> None:
    folder = os.environ.get(named.FOLDER_VARIABLE)
    if not folder:
        pytest.skip(f"${named.FOLDER_VARIABLE} names no folder with {name}")
    train, test = load(name, folder)
    assert (train.x.shape, test.x.shape, train.x.dtype) == ((60000, 784), (10000, 784), np.uint8)
    assert np.bincount(test.labels(10)).sum() == 10000
    assert len(train.classes or range(10)) == 10


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'fashion-mnist'"):
        load("fashion_mnist")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data set "toy" of 3 + 2 rows, published at a server on this machine; yields the folder that it serves."""
    published = tmp_path / "published"
    published.mkdir()
    files = []
    for part, rows in (("train", 3), ("test", 2)):
        for kind, shape in (("images", (rows, 2, 2)), ("labels", (rows,))):
            path = published / f"{part}-{kind}.gz"
            write_idx(path, np.ones(shape, np.uint8))
            files.append(named.File(path.name, hashlib.sha256(path.read_bytes()).hexdigest()))

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(published)))
    url = f"http://127.0.0.1:{server.server_port}/"
    source = named.Source(((files[0], files[1]), (files[2], files[3])), 1 / 255, url, ("zero", "one"))
    monkeypatch.setitem(named.SOURCES, "toy", source)
    monkeypatch.delenv(named.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield published
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pooch keeps downloads during a test."""
    pooch = pytest.importorskip("pooch", reason="needs the extra 'data'")
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    return tmp_path / "cache" / "mlpgpu" / "toy"


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(named.SOURCES, "toy", replace(named.SOURCES["toy"], url="http://127.0.0.1:9/"))


def test_a_folder_itself_or_its_subfolder(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    train, test = load("toy", toy)
    assert (len(train), len(test), train.n_in, train.classes) == (3, 2, 4, ("zero", "one"))
    shutil.copytree(toy, tmp_path / "data" / "toy")
    assert load("toy", str(tmp_path / "data"))[0].identity() == train.identity()
    monkeypatch.setenv(named.FOLDER_VARIABLE, str(tmp_path / "data"))
    assert load("toy")[1].identity() == test.identity()


def test_a_folder_that_lacks_files(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    (toy / "test-images.gz").unlink()
    with pytest.raises(StorageError, match=r"published/toy or .*published, got no test-images.gz$"):
        load("toy", toy)
    with pytest.raises(StorageError, match=r"got no images.idx3-ubyte.gz, labels.idx1-ubyte.gz$"):
        load("digits", toy)


def test_a_file_that_is_not_the_published_one(toy: Path) -> None:
    write_idx(toy / "test-labels.gz", np.zeros(2, np.uint8))
    with pytest.raises(FileFormatError, match=r"test-labels.gz: expected SHA-256 [0-9a-f]{64}, got [0-9a-f]{64}"):
        load("toy", toy)


def test_a_download_happens_once(toy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("toy")
    assert sorted(path.name for path in cache.iterdir()) == sorted(path.name for path in toy.iterdir())
    without_network(monkeypatch)
    assert [part.identity() for part in load("toy")] == [part.identity() for part in first]


def test_what_the_variables_folder_lacks_is_downloaded(toy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(named.FOLDER_VARIABLE, str(toy / "elsewhere"))
    assert len(load("toy")[0]) == 3
    assert len(list(cache.iterdir())) == 4


def test_offline(toy: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_network(monkeypatch)
    with pytest.raises(DownloadError, match=r"http://127.0.0.1:9/train-images.gz.*MLPGPU_DATA is not set.*folder="):
        load("toy")
    monkeypatch.setenv(named.FOLDER_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(DownloadError, match=r"not in a folder: .*nowhere"):
        load("toy")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing"])
def test_a_bad_download_leaves_nothing(toy: Path, cache: Path, damage: str) -> None:
    path = toy / "test-labels.gz"
    contents = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"changed" if damage == "changed" else contents[:-5])
    with pytest.raises(DownloadError, match=r"to download http.*/test-labels.gz"):
        load("toy")
    assert sorted(file.name for file in cache.iterdir()) == ["test-images.gz", "train-images.gz", "train-labels.gz"]


def test_a_download_that_breaks_off_leaves_nothing(toy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end_early(handler: SimpleHTTPRequestHandler, source: Any, output: Any) -> None:
        output.write(source.read(10))
        handler.close_connection = True

    monkeypatch.setattr(SimpleHTTPRequestHandler, "copyfile", end_early)
    with pytest.raises(DownloadError, match=r"train-images.gz"):
        load("toy")
    assert list(cache.iterdir()) == []


def test_without_pooch(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DownloadError, match=r"pip install 'mlpgpu\[data\]'"):
        load("toy")


def test_a_cache_that_cannot_be_made(toy: Path, cache: Path) -> None:
    cache.parents[1].write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="to download"):
        load("toy")
