"""Inputs of float64 and integers keep their digits up to a first Standardize; a warning where float32 merges values."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import EPS32

import mlpgpu as mg
from mlpgpu.backends.cuda.inference.copies import fill_from
from mlpgpu.backends.cuda.run.data.feed import Feed, _rows_of
from mlpgpu.backends.inputs import InputScaling, has_more_digits

ROWS, N_IN = 90, 3
DRAW = np.random.default_rng(12)
NOISE = DRAW.standard_normal((ROWS, N_IN))
COUNTED = DRAW.integers(0, 1000, (ROWS, N_IN))
INPUTS: dict[str, np.ndarray] = {
    "noise far from 0": 1e9 + NOISE,
    "timestamps": 1_700_000_000 + COUNTED,
    "timestamps of 32 bits": (1_700_000_000 + COUNTED).astype(np.uint32),
    "years": (1990 + COUNTED % 31).astype(np.int16),
    "beside each other": np.array([1e-3, 1.0, 1e12]) * (1.0 + 1e-7 * NOISE),
}
LAYERS: list[mg.layers.Layer] = [mg.Standardize(N_IN), mg.Dense(N_IN, 8, "tanh"), mg.Dense(8, 1)]
EACH = pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)


def standardized(x: np.ndarray) -> np.ndarray:
    """In float64, then rounded once."""
    wide = x.astype(np.float64)
    return ((wide - wide.mean(axis=0)) / wide.std(axis=0)).astype(np.float32)


def targets(x: np.ndarray) -> np.ndarray:
    return standardized(x)[:, 0].astype(np.float64) * 2.0


def network(*, is_neutral: bool = False) -> mg.Network:
    made = mg.Network(LAYERS, seed=5)
    made.adapted = is_neutral  # its statistics are a mean of 0 and a scale of 1
    return made


def trainer(of: mg.Network, **options: Any) -> mg.Trainer:
    return mg.Trainer(of, "squared_error", mg.Adam(0.02), batch_size=16, backend="cpu", **options)


@EACH
def test_training_sees_what_float64_standardized(x: np.ndarray) -> None:
    """With the bits of a training on inputs that were standardized in float64 beforehand."""
    y = targets(x)
    ours, given = trainer(network(), streams=2), trainer(network(is_neutral=True), streams=2)
    ours.fit((x, y), 3, validation=(x[:20], y[:20]), progress=False)
    ready = standardized(x)
    given.fit((ready, y), 3, validation=(ready[:20], y[:20]), progress=False)
    fitted = ours.network.flat_statistics()
    np.testing.assert_allclose(fitted[:N_IN], x.astype(np.float64).mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(ours.history["loss"], given.history["loss"], rtol=1e-4)
    np.testing.assert_allclose(ours.history["validation_loss"], given.history["validation_loss"], rtol=1e-4)
    assert ours.history["loss"][-1] < 0.7 * ours.history["loss"][0]


@EACH
def test_predictions_see_it(x: np.ndarray, tmp_path: Path) -> None:
    net = network()
    net.adapt(x)
    mean, scale = np.split(net.flat_statistics(), 2)
    ready = ((x.astype(np.float64) - mean) / scale).astype(np.float32)
    expected = network(is_neutral=True).predict(ready, backend="cpu")
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(net.predict(x, backend="cpu"), expected)
    np.testing.assert_array_equal(net.predict(mapped, backend="cpu"), expected)
    np.testing.assert_array_equal(net.predict(mg.Dataset(x), backend="cpu"), expected)
    of_few = network(is_neutral=True).predict(ready[:7], backend="cpu")  # another number of rows may have other bits
    np.testing.assert_array_equal(net.predict(mg.Dataset(x).first(7), backend="cpu"), of_few)
    with net.predictor(backend="cpu") as predictor:
        np.testing.assert_array_equal(predictor(x), expected)
        np.testing.assert_array_equal(predictor(x.astype(np.float64)), expected)
    made = trainer(net)
    made.evaluate((x, targets(x)))  # the trainer has the parameters from here on
    np.testing.assert_array_equal(net.predict(x, backend="cpu"), expected)


@EACH
def test_under_float64_nothing_is_rounded(x: np.ndarray) -> None:
    made = trainer(network(), precision="float64")
    made.fit((x, targets(x)), 1, progress=False)
    net = made.network
    mean, scale = np.split(net.flat_statistics(), 2)
    values = net.parameters
    hidden = np.tanh((x.astype(np.float64) - mean) / scale @ values["1.weight"] + values["1.bias"])
    expected = hidden @ values["2.weight"][:, 0] + values["2.bias"]
    np.testing.assert_allclose(net.predict(x, backend="cpu"), expected, rtol=0, atol=1e-13)


def test_float32_and_bytes_are_standardized_as_they_were() -> None:
    """In float32, by the rounded statistics."""
    for x in (INPUTS["years"].astype(np.float32), DRAW.integers(0, 256, (ROWS, N_IN)).astype(np.uint8)):
        net = network()
        data = mg.Dataset(x, scale=1.0)
        net.adapt(data)
        mean, scale = np.split(net.flat_statistics().astype(np.float32), 2)
        expected = network(is_neutral=True).predict((x.astype(np.float32) - mean) / scale, backend="cpu")
        np.testing.assert_array_equal(net.predict(data, backend="cpu"), expected)


def test_statistics_that_change_are_followed() -> None:
    x = INPUTS["noise far from 0"]
    net = network()
    net.adapt(x)
    made = trainer(net)
    before = made.evaluate((x, targets(x)))["loss"]
    net.adapt(1.0 + x)
    assert made.evaluate((1.0 + x, targets(x)))["loss"] == pytest.approx(before, rel=1e-5)


# --- on a card ---


@EACH
def test_rows_go_to_a_card_standardized(x: np.ndarray) -> None:
    """What the feed's threads put into a page-locked buffer, and the statistics that the card goes on with."""
    net = network()
    net.adapt(x)
    plan, data = net.lower(capacity=16, loss="squared_error"), mg.Dataset(x, targets(x))
    assert has_more_digits(data.storage_x.dtype, plan)
    scaling = InputScaling.of(plan, net.flat_statistics())
    assert scaling is not None
    feed: Any = object.__new__(Feed)
    feed.dataset, feed._scaling, feed._rows = data, scaling, _rows_of(plan, data)
    buffer = {"data": np.empty((50, N_IN), np.float32), "targets": np.empty((50, 1), np.float32)}
    with ThreadPoolExecutor(2) as feed._pool:
        feed._gather(buffer, np.arange(20, 70))
    mean, scale = np.split(net.flat_statistics(), 2)
    expected = ((x.astype(np.float64) - mean) / scale).astype(np.float32)
    np.testing.assert_array_equal(buffer["data"], expected[20:70])

    np.testing.assert_array_equal(scaling.left_of(net.flat_statistics()), [0.0] * N_IN + [1.0] * N_IN)
    moved = np.concatenate([mean + 2.0 * scale, 4.0 * scale])
    shift, factor = np.split(scaling.left_of(moved), 2)
    np.testing.assert_allclose((expected - shift) / factor, (x - mean - 2.0 * scale) / (4.0 * scale), atol=1e-5)


@EACH
def test_rows_to_predict_go_to_a_card_standardized(x: np.ndarray) -> None:
    """What a predictor's threads put into page-locked memory, of all rows in order or of some that are listed."""
    net = network()
    net.adapt(x)
    scaling = InputScaling.of(net.lower(capacity=16), net.flat_statistics())
    mean, scale = np.split(net.flat_statistics(), 2)
    expected = ((x.astype(np.float64) - mean) / scale).astype(np.float32)
    to, listed = np.empty((11, N_IN), np.float32), DRAW.permutation(ROWS)
    for rows, chosen in ((None, slice(5, 16)), (listed, listed[5:16])):
        assert fill_from(x, rows, scaling)(slice(5, 16), to, check=True)
        np.testing.assert_array_equal(to, expected[chosen])
    endless = x.astype(np.float64)
    endless[7, 1] = np.inf
    assert not fill_from(endless, None, scaling)(slice(5, 16), to, check=True)


def test_what_a_card_standardizes_itself() -> None:
    plan = network().lower(capacity=16)
    assert not any(has_more_digits(np.dtype(kind), plan) for kind in ("f4", ">f4", "f2", "?", "u1"))
    assert not has_more_digits(np.dtype(float), mg.Network([mg.Dense(3, 1)]).lower(capacity=1))
    last = mg.Network([mg.Dense(3, 1), mg.Standardize(1)]).lower(capacity=1, loss="squared_error")
    assert not has_more_digits(np.dtype(float), last) and InputScaling.of(last, np.ones(2)) is None
    assert not has_more_digits(np.dtype(float), network().lower(capacity=1, precision="float64"))


# --- the warning ---


def messages(data: mg.Dataset, *layers: mg.layers.Layer, fits: int = 1, precision: Any = "float32") -> list[str]:
    """Warnings of fits of a network with these layers, which were given at this file."""
    made = mg.Trainer(
        mg.Network([*layers, mg.Dense(data.n_in, 1)], seed=1), "squared_error", mg.SGD(0.0), backend="cpu",
        precision=precision,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(fits):
            made.fit(data, 1, progress=False)
    assert all(each.filename == __file__ and each.category is UserWarning for each in caught)
    return [str(each.message) for each in caught]


def set_of(x: np.ndarray) -> mg.Dataset:
    return mg.Dataset(x, np.zeros(len(x)))


IDS = np.stack([np.arange(40), 123_456_789 + np.arange(40)], axis=1)
MERGED = {
    "ids": (
        IDS,
        "x, column 1: float32 merges values that differ, such as 123456789 and 123456790; a first Standardize",
    ),
    "timestamps": (1.7e9 + 60.0 * np.arange(40.0)[:, None], "such as 1700000000 and 1700000060"),
    "noise": (1e9 + NOISE, "x, column 0: float32 merges values that differ, such as 99999999"),
    "seconds of a year": (1.7e9 + 3e7 * DRAW.random((5000, 1)), "x, column 0: float32 merges"),
}
KEPT = {
    "noise": NOISE,
    "much noise": DRAW.random((200_000, 1)),
    "small integers": COUNTED,
    "years": 1990 + COUNTED % 31,
    "far-off integers that float32 has": 1 << 30 << COUNTED % 8,
    "one value": np.full((9, 2), 1e9 + 1),
    "float32": (1e9 + NOISE).astype(np.float32),
    "temperatures": 290.0 + NOISE,
}


@pytest.mark.parametrize(("x", "message"), MERGED.values(), ids=MERGED)
def test_merged_values_are_told(x: np.ndarray, message: str) -> None:
    (told,) = messages(set_of(x))
    assert message in told
    assert messages(set_of(x), mg.Standardize(x.shape[1])) == []
    assert messages(set_of(x), precision="float64") == []


@pytest.mark.parametrize("x", KEPT.values(), ids=KEPT)
def test_nothing_is_told_of_other_values(x: np.ndarray) -> None:
    assert messages(set_of(x)) == []


def test_it_is_told_once_for_a_data_set_and_its_splits() -> None:
    data = set_of(IDS)
    assert len(messages(data, fits=3)) == 1
    assert messages(data) == messages(data.split(0.5)[0]) == []
    assert len(messages(set_of(IDS))) == 1


def test_columns_are_told_by_name() -> None:
    class Table:
        columns = ("size", "time")

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return IDS

    (told,) = messages(mg.Dataset(Table(), np.zeros(40)))
    assert told.startswith("x, column 'time': float32 merges")


def test_float64_merges_too() -> None:
    x = (1 << 60) + np.arange(40)[:, None]
    (told,) = messages(set_of(x), mg.Standardize(1))
    assert "float64 merges values that differ, such as 1152921504606846976 and 1152921504606846977; subtract" in told


def test_integers_are_known_by_what_they_were() -> None:
    """A run that an older version began on integers, which it kept as float32, goes on."""
    small, large = COUNTED, 1_700_000_000 + COUNTED
    for dtype in (np.int16, np.int64, np.uint32):
        assert mg.Dataset(small.astype(dtype)).identity() == mg.Dataset(small.astype(np.float32)).identity()
    assert mg.Dataset(large).identity()["x_dtype"] == "int64"
    assert mg.Dataset(large).identity()["crc"] != mg.Dataset(large + 1).identity()["crc"]


def test_rounding_once_is_within_float32() -> None:
    """The reproducer: noise far from 0 is predicted as the noise alone."""
    x = INPUTS["noise far from 0"]
    net = network()
    net.adapt(x)
    alone = network()
    alone.adapt(x - 1e9)
    np.testing.assert_allclose(
        net.predict(x, backend="cpu"), alone.predict(x - 1e9, backend="cpu"), rtol=0, atol=64 * EPS32
    )
