"""Numbers that float32 does not hold, masked ones, arrays that nobody may write to: nothing is silently wrong."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.errors import BackendError, ConfigurationError, DataError, DtypeError, MlpgpuError

ROWS = 8
X = np.linspace(-1.0, 1.0, ROWS * 3).reshape(ROWS, 3)
Y = X @ [1.0, -2.0, 0.5]
LABELS = np.arange(ROWS) % 2


def trainer(*, precision: Any = "float32", first: tuple[Any, ...] = (), **options: Any) -> mg.Trainer:
    network = mg.Network([*first, mg.Dense(3, 1)], seed=1)
    return mg.Trainer(network, "mean_squared_error", mg.SGD(0.1), precision=precision, backend="cpu", **options)


def huge(row: int = 2, value: float = 1e39) -> np.ndarray:
    x = X.copy()
    x[row, 1] = value
    return x


@pytest.mark.parametrize("value", [1e39, -1e39, 1e300])
def test_inputs_beyond_float32_are_refused_wherever_they_come(value: float) -> None:
    made, data = trainer(), (huge(value=value), Y)
    words = rf"x: expected numbers in the range of float32, got {value:g}".replace("+", r"\+")
    for use in (
        lambda: made.fit(data, 1, progress=False),
        lambda: made.fit((X, Y), 1, validation=data, progress=False),
        lambda: made.step(*data),
        lambda: made.evaluate(data),
        lambda: made.network.predict(data[0]),
        lambda: made.network.predictor("cpu")(data[0]),
    ):
        with pytest.raises(DataError, match=words + " at row 2, column 1"):
            use()
    assert made.steps == 0


def test_what_float64_holds_is_trained_on_in_float64() -> None:
    network = mg.Network([mg.Dense(3, 1)], seed=1)
    made = mg.Trainer(network, "absolute_error", mg.SGD(0.1), precision="float64", backend="cpu")
    assert np.isfinite(made.evaluate((huge(), Y))["loss"])


def test_a_first_standardize_layer_takes_what_float32_does_not_hold() -> None:
    made = trainer(first=(mg.Standardize(3),))
    assert np.isfinite(made.fit((huge(value=5e38), Y), 2, progress=False).last["loss"])
    assert np.isfinite(made.network.predict(huge(value=5e38))).all()


@pytest.mark.parametrize("of", ["x", "y"])
@pytest.mark.parametrize("factor", [1e300, 1e40, 1e-50])
def test_columns_whose_statistics_float32_does_not_hold_cannot_be_standardized(of: str, factor: float) -> None:
    layers = [mg.Standardize(3), mg.Dense(3, 1)] if of == "x" else [mg.Dense(3, 1), mg.Standardize(1)]
    network = mg.Network(layers, seed=1)
    data = (X * factor, Y) if of == "x" else (X, Y * factor)
    with pytest.raises(DataError, match=rf"{of}: expected columns with a mean of at most .* in column 0"):
        network.adapt(data)
    assert not network.adapted


def test_a_part_without_the_rows_in_question_is_trained_on() -> None:
    whole = mg.Dataset(huge(row=ROWS - 1), Y)
    made = trainer()
    assert np.isfinite(made.fit(whole.first(ROWS - 1), 1, progress=False).last["loss"])
    with pytest.raises(DataError, match="at row 7, column 1"):
        made.evaluate(whole)
    with pytest.raises(DataError, match="at row"):
        for part in whole.split(0.5, seed=3):
            made.evaluate(part)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (np.full(ROWS, 1e-50), "weight: expected 0, or at least 1.18e-38, .*got 1e-50 at row 0"),
        (np.array([1.0] * (ROWS - 1) + [1e-40]), "got 1e-40 at row 7"),
        (np.full(ROWS, 1e39), r"weight: expected a sum of at most 3.4e\+38"),
        (np.full(ROWS, 1e38, np.float32), r"weight: expected a sum of at most 3.4e\+38"),
    ],
)
def test_weights_that_float32_does_not_hold_are_refused(weight: np.ndarray, words: str) -> None:
    made = trainer()
    before = made.network.parameters["0.weight"]
    for use in (
        lambda: made.fit((X, Y, weight), 1, progress=False),
        lambda: made.step(X, Y, weight),
        lambda: made.evaluate((X, Y, weight)),
    ):
        with pytest.raises(DataError, match=words):
            use()
    assert made.steps == 0
    np.testing.assert_array_equal(before, made.network.parameters["0.weight"])


def test_small_weights_that_float32_holds_train_as_their_ratios_say() -> None:
    made = [trainer(), trainer()]
    for one, factor in zip(made, (1.0, 1e-30), strict=True):
        one.fit((X, Y, np.linspace(0.5, 1.0, ROWS) * factor), 3, shuffle=False, progress=False)
    np.testing.assert_allclose(*(one.network.parameters["0.weight"] for one in made), rtol=1e-5)


def test_class_weights_that_float32_does_not_hold_are_refused() -> None:
    network = mg.Network([mg.Dense(3, 2)], seed=1)
    made = mg.Trainer(network, "softmax_cross_entropy", class_weight={0: 1e-50}, backend="cpu")
    with pytest.raises(DataError, match="weight: expected 0, or at least"):
        made.fit((X, LABELS), 1, progress=False)


@pytest.mark.parametrize("scale", [1e39, 1e38, 1e-50])
def test_a_scale_that_float32_does_not_hold_is_refused(scale: float) -> None:
    with pytest.raises(ConfigurationError, match=r"scale: expected from 1\.18e-38 to 1\.33e"):
        mg.Dataset(np.arange(6, dtype=np.uint8).reshape(2, 3), scale=scale)


MASKED = np.ma.MaskedArray(X, mask=np.eye(ROWS, 3) > 0)


@pytest.mark.parametrize(
    "nested",
    [
        lambda masked: masked,
        lambda masked: list(masked),
        lambda masked: [tuple(row) for row in masked],
        lambda masked: [[row] for row in masked],
    ],
)
@pytest.mark.filterwarnings("error")
def test_masked_values_are_refused_however_deep_they_lie(nested: Any) -> None:
    x, made = nested(MASKED), trainer()
    for use in (
        lambda: mg.Dataset(x),
        lambda: made.step(x, Y),
        lambda: made.network.predict(x),
        lambda: made.network.adapt(x),
        lambda: made.fit((X, nested(MASKED)), 1),
        lambda: made.network.parameters.update({"0.weight": nested(MASKED[:1].T)}),
    ):
        with pytest.raises(DataError, match="masked"):
            use()


def test_an_array_without_masked_values_is_taken() -> None:
    np.testing.assert_array_equal(mg.Dataset(np.ma.MaskedArray(X, mask=False)).x, X)


def test_a_metric_of_masked_values_is_none() -> None:
    made = trainer(metrics=[{"mine": lambda y, prediction: np.ma.masked}])
    with pytest.raises(DataError, match="metric mine: expected no masked values"):
        made.evaluate((X, Y))


def test_predictions_are_not_written_under_a_mask() -> None:
    predictor = trainer().network.predictor("cpu")
    with pytest.raises(DtypeError, match=r"out: expected a C-contiguous float32 array .*got MaskedArray"):
        predictor(X, out=np.ma.MaskedArray(np.empty((ROWS, 1), np.float32), mask=True))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_copies_of_data_sets_are_as_immutable_as_they_are(copied: Any) -> None:
    data = mg.Dataset(X, LABELS, np.ones(ROWS))
    for one in (data, data.first(3), data.split(0.5)[1], data.with_weight(np.ones(ROWS))):
        one.labels(2)
        twin = copied(one)
        for name in ("x", "y", "weight", "storage_x"):
            np.testing.assert_array_equal(getattr(one, name), getattr(twin, name))
            assert not getattr(twin, name).flags.writeable
        assert not twin.labels(2).flags.writeable
        assert twin.identity() == one.identity()


@pytest.mark.parametrize("rows", [0, -1, True, 1.0, "2", None])
def test_the_first_rows_are_a_whole_number_of_at_least_one(rows: Any) -> None:
    with pytest.raises(MlpgpuError, match="rows: expected a whole number of at least 1"):
        mg.Dataset(X, LABELS).first(rows)


def test_memory_that_is_not_to_be_had_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mg.Trainer(mg.Network([mg.Dense(3, 1)], seed=1), "mean_squared_error", batch_size=10**6, backend="cpu")

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError("Unable to allocate 1 TiB")

    monkeypatch.setattr(np, "zeros", refuse)
    words = "memory for a batch_size of 1000000 rows in 1 shards: expected enough of it, got Unable to allocate 1 TiB"
    with pytest.raises(BackendError, match=words):
        made.step(X, Y)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2**31}, r"batch_size: expected a whole number from 1 to 2147483647, got 2147483648"),
        ({"batch_size": 2**70}, r"batch_size: expected a whole number from 1 to 2147483647, got 118"),
        ({"streams": 2**20}, "streams: expected a whole number from 1 to 1024, got 1048576"),
        ({"threads": 10**400}, "threads: expected a whole number from 1 to 1024, got 1000"),
    ],
)
def test_numbers_beyond_what_is_counted_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as raised:
        trainer(**options)
    assert len(str(raised.value)) < 500


def test_layers_of_more_parameters_than_any_memory_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="layers: expected arrays of at most 281474976710656 numbers"):
        mg.Network([mg.Dense(2**31 - 1, 2**31 - 1)])


def test_more_threads_than_a_blas_has_are_no_change_by_somebody_else() -> None:
    made = trainer(threads=1000)
    made.fit((X, Y), 1, progress=False)  # a warning would be an error
    assert made.threads == 1000
