"""Network: parameters and who holds them, use, files, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu import storage
from mlpgpu.errors import (
    ConfigurationError,
    DataError,
    DtypeError,
    FileFormatError,
    MlpgpuError,
    ShapeError,
    StorageError,
    UnknownNameError,
)

DRAW = np.random.default_rng(11)
X = DRAW.standard_normal((30, 4)).astype(np.float32)
LABELS = np.arange(30) % 3
VALUES = 100.0 * X[:, :2].astype(np.float64) + 5000.0


def new_network() -> mg.Network:
    return mg.Network([mg.Dense(4, 5, "tanh"), mg.Dropout(0.1), mg.Dense(5, 3)], seed=1)


def new_trainer(network: mg.Network, loss: str = "softmax_cross_entropy", **options: Any) -> mg.Trainer:
    return mg.Trainer(network, loss, mg.Momentum(0.05), batch_size=8, **options)


def new_regression() -> mg.Network:
    return mg.Network([mg.Standardize(4), mg.Dense(4, 6, "tanh"), mg.Dense(6, 2), mg.Standardize(2)], seed=1)


def bits(network: mg.Network) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in network.parameters.items()}


# Parameters


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_initial_values_are_drawn_where_they_are_needed(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = new_network().flat_parameters()
    network, copied = new_network(), pickle.loads(pickle.dumps(new_network()))
    with monkeypatch.context() as patch:
        patch.setattr(
            mg.network.parameters, "initial_values", lambda *args, **options: pytest.fail("drawn on the host")
        )
        str(network)
        trainer = new_trainer(network, precision=precision, backend="cpu")
        trainer.evaluate(mg.Dataset(X, LABELS))
        assert network.dtype == precision and not network.is_new
        assert copied.is_new
        predicted = copied.predict(X, backend="cpu")
        assert copied.is_new
    np.testing.assert_array_equal(network.flat_parameters(), expected)
    np.testing.assert_array_equal(copied.flat_parameters(), expected)
    np.testing.assert_array_equal(copied.predict(X, backend="cpu"), predicted)
    assert not copied.is_new


def test_parameters_are_a_mapping_by_place() -> None:
    parameters = new_network().parameters
    assert list(parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [values.shape for values in parameters.values()] == [(4, 5), (5,), (5, 3), (3,)]
    assert {values.dtype for values in parameters.values()} == {np.dtype(np.float32)}
    assert len(parameters) == 4 and "1.weight" not in parameters
    assert repr(parameters) == (
        "0.weight: float32 (4, 5)\n0.bias: float32 (5,)\n2.weight: float32 (5, 3)\n2.bias: float32 (3,)"
    )


def test_what_is_read_is_a_copy_that_cannot_be_written_to() -> None:
    network = new_network()
    before = bits(network)
    read = network.parameters["0.weight"]
    with pytest.raises(ValueError, match="read-only"):
        read[0, 0] = 1.0
    network.parameters["0.weight"] = np.zeros((4, 5))
    assert read.tobytes() == before["0.weight"]


def test_one_parameter_is_set_and_the_others_stay() -> None:
    network = new_network()
    before = bits(network)
    values = np.arange(3.0)
    network.parameters["2.bias"] = values
    values[0] = 9.0
    assert network.parameters["2.bias"].tolist() == [0.0, 1.0, 2.0]
    assert {name: data for name, data in bits(network).items() if name != "2.bias"} == {
        name: data for name, data in before.items() if name != "2.bias"
    }


def test_all_parameters_are_set_at_once() -> None:
    network, other = new_network(), mg.Network([mg.Dense(4, 5, "tanh"), mg.Dense(5, 3)], seed=2)
    network.parameters = dict(zip(network.parameters, other.parameters.values(), strict=True))
    np.testing.assert_array_equal(network.forward(X), other.forward(X))
    network.parameters.update({"0.bias": [1, 2, 3, 4, 5], "2.bias": [True, False, True]})
    assert network.parameters["0.bias"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert network.parameters["2.bias"].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "values", "error", "message"),
    [
        ("0.weights", np.zeros((4, 5)), UnknownNameError, r"got '0\.weights' \(did you mean '0\.weight'\?\)"),
        (0, np.zeros((4, 5)), DtypeError, "expected a name: one of 0.weight, .*got int 0"),
        ("0.weight", np.zeros((5, 4)), ShapeError, r"0\.weight: expected \(4, 5\), got \(5, 4\)"),
        ("0.bias", 1.0, ShapeError, r"0\.bias: expected \(5,\), got \(\)"),
        ("0.bias", [1.0, 2.0, np.nan, 0.0, 0.0], DataError, r"0\.bias: expected finite values, got NaN or infinity"),
        ("0.bias", [1e39, 0.0, 0.0, 0.0, 0.0], DataError, r"0\.bias: expected finite values"),
        ("0.bias", ["a"] * 5, DtypeError, r"0\.bias: expected real numbers, got list"),
        ("0.bias", [1j] * 5, DtypeError, r"0\.bias: expected real numbers, got list"),
        ("0.bias", [[1.0], [2.0, 3.0]], ShapeError, r"0\.bias: expected \(5,\), got .*inhomogeneous"),
    ],
)
def test_bad_parameters_change_nothing(name: Any, values: Any, error: type[Exception], message: str) -> None:
    network = new_network()
    before = bits(network)
    with pytest.raises(error, match=message):
        network.parameters[name] = values
    with pytest.raises(error, match=message):  # the first of these two would do
        network.parameters = {"2.bias": np.ones(3), name: values}
    assert bits(network) == before


def test_parameters_are_not_deleted() -> None:
    network = new_network()
    with pytest.raises(ConfigurationError, match=r"expected to be read or set, got del '0\.bias'"):
        del network.parameters["0.bias"]
    assert len(network.parameters) == 4


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_parameters_are_current_while_a_trainer_holds_them(precision: str) -> None:
    network = new_network()
    trainer = new_trainer(network, precision=precision)
    before = bits(network)
    trainer.step(X[:8], LABELS[:8])
    after = bits(network)
    assert all(after[name] != before[name] for name in after)
    assert {values.dtype for values in network.parameters.values()} == {np.dtype(precision)}
    assert network.forward(X).dtype == np.dtype(precision)
    trainer.step(X[:8], LABELS[:8])
    assert bits(network) != after


def test_what_is_set_during_training_is_trained_on() -> None:
    network = new_network()
    trainer = mg.Trainer(network, "softmax_cross_entropy", mg.SGD(0.0), batch_size=30)
    trainer.step(X, LABELS)
    network.parameters = {name: np.zeros_like(values) for name, values in network.parameters.items()}
    assert trainer.step(X, LABELS) == pytest.approx(np.log(3.0), rel=1e-6)
    assert trainer.evaluate(mg.Dataset(X, LABELS))["loss"] == pytest.approx(np.log(3.0), rel=1e-6)


def test_class_numbers_and_distributions_may_alternate() -> None:
    one_hot = np.eye(3)[LABELS]
    mixed, plain = new_trainer(new_network(), precision="float64"), new_trainer(new_network(), precision="float64")
    for k, (start, targets) in enumerate([(0, LABELS), (8, one_hot), (16, LABELS)]):
        rows = slice(start, start + 8)
        assert mixed.step(X[rows], targets[rows]) == pytest.approx(plain.step(X[rows], LABELS[rows]), rel=1e-12), k
        mixed.evaluate(mg.Dataset(X, one_hot if k % 2 else LABELS))
    for name, values in plain.network.parameters.items():
        np.testing.assert_allclose(mixed.network.parameters[name], values, rtol=1e-9, atol=1e-12)


def test_setting_parameters_keeps_the_optimizer_slots() -> None:
    touched, alone = new_trainer(new_network()), new_trainer(new_network())
    for trainer in (touched, alone):
        trainer.step(X[:8], LABELS[:8])
        if trainer is touched:
            trainer.network.parameters = dict(trainer.network.parameters)
        trainer.step(X[8:16], LABELS[8:16])
    assert bits(touched.network) == bits(alone.network)


def test_parameters_have_one_owner_at_a_time() -> None:
    network = new_network()
    first, second = new_trainer(network), new_trainer(network)
    first.step(X[:8], LABELS[:8])
    taken = bits(network)
    second.evaluate(mg.Dataset(X, LABELS))  # the second trainer begins with what the first one learnt
    assert bits(network) == taken
    second.step(X[:8], LABELS[:8])
    learnt = bits(network)
    assert learnt != taken
    first.evaluate(mg.Dataset(X, LABELS))
    assert bits(network) == learnt


def test_a_dropped_trainer_frees_its_program_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        network = new_network()
        trainer = new_trainer(network, backend="cpu")
        trainer.fit(mg.Dataset(X, LABELS), 2, validation=mg.Dataset(X, LABELS), progress=False)
        program = weakref.ref(trainer._engine.program)
        del trainer
        assert program() is not None  # the network's parameters lie in it
        del network
        assert program() is None
    finally:
        gc.enable()


def test_what_is_read_or_set_while_a_program_changes_them_is_not_mistaken_for_the_result() -> None:
    network = new_network()
    trainer = new_trainer(network)
    trainer.step(X[:8], LABELS[:8])
    program = trainer._engine.program
    assert program is not None and network.values.is_owned_by(program)
    before = bits(network)
    with network.values.changing():
        network.values.read()
        program.run(trainer.steps, np.array([0.1]))
    assert bits(network) != before
    with network.values.changing():
        network.parameters["0.bias"] = np.ones(5)
    assert not network.values.is_owned_by(program)
    assert network.parameters["0.bias"].tolist() == [1.0] * 5


# Tied layers


def test_a_layer_placed_twice_has_one_set_of_parameters(tmp_path: Path) -> None:
    shared = mg.Dense(4, 4, "tanh")
    network = mg.Network([shared, mg.Dense(4, 4), shared, mg.Dense(4, 2)], seed=5)
    assert list(network.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    apart = mg.Network([mg.Dense(4, 4, "tanh"), mg.Dense(4, 4), mg.Dense(4, 4, "tanh"), mg.Dense(4, 2)], seed=6)
    values = dict(network.parameters)
    apart.parameters = {**values, "2.weight": values["0.weight"], "2.bias": values["0.bias"]}
    np.testing.assert_array_equal(network.forward(X), apart.forward(X))

    trainer = mg.Trainer(network, "squared_error", mg.SGD(0.01), batch_size=8)
    trainer.step(X[:8], VALUES[:8] / 5000.0)
    network.save(tmp_path / "tied.h5")
    loaded = mg.load(tmp_path / "tied.h5")
    assert loaded.layers[0] is loaded.layers[2]
    assert bits(loaded) == bits(network)
    np.testing.assert_array_equal(loaded.forward(X), network.forward(X))


# Copies


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copy_of_a_network_in_training_stands_alone(duplicate: Callable[[Any], Any]) -> None:
    network = new_network()
    trainer = new_trainer(network)
    trainer.step(X[:8], LABELS[:8])
    twin = duplicate(network)
    assert bits(twin) == bits(network)
    assert (twin.output, twin.seed, twin.layers) == ("softmax", 1, network.layers)
    before = bits(twin)
    trainer.step(X[:8], LABELS[:8])
    assert bits(twin) == before
    new_trainer(twin).step(X[:8], LABELS[:8])
    assert bits(twin) != before


@pytest.mark.parametrize(
    "thing",
    [
        mg.Dense(3, 2, "gelu", bias=False, init="he_normal"),
        mg.Dropout(0.5),
        mg.Standardize(3),
        mg.AdamW(mg.WarmUp(mg.CosineDecay(0.1, epochs=3), steps=5), clip_norm=1.0),
        mg.ReduceOnPlateau(0.1),
    ],
)
def test_descriptions_pickle(thing: object) -> None:
    assert pickle.loads(pickle.dumps(thing)) == thing


def test_a_data_set_pickles() -> None:
    data = mg.Dataset(X, LABELS, np.ones(30), ["a", "b", "c"])
    for part in (data, data.split(0.3)[0]):
        twin = pickle.loads(pickle.dumps(part))
        assert twin.identity() == part.identity()
        assert twin.classes == part.classes


# Use


def test_forward_predict_and_labels() -> None:
    network = new_network()
    np.testing.assert_array_equal(network.predict(X), network.forward(X))  # nobody said what the logits are for
    names = np.array(["ant", "bee", "cat"])
    new_trainer(network).fit(mg.Dataset(X, names[LABELS]), 1, progress=False)
    logits, probabilities = network.forward(X), network.predict(X)
    assert logits.shape == probabilities.shape == (30, 3)
    exponentials = np.exp(logits.astype(np.float64))
    # Each probability is a quotient of exponentials: some ulps each.
    np.testing.assert_allclose(probabilities, exponentials / exponentials.sum(axis=1, keepdims=True), rtol=1e-6)
    assert network.labels(X).tolist() == names[logits.argmax(axis=1)].tolist()
    assert network.labels(mg.Dataset(X)).tolist() == network.labels(X.tolist()).tolist()


def test_labels_without_names_are_numbers() -> None:
    network = new_network()
    new_trainer(network).fit(mg.Dataset(X, LABELS), 1, progress=False)
    np.testing.assert_array_equal(network.labels(X), network.forward(X).argmax(axis=1))


def test_labels_of_two_classes_from_one_logit() -> None:
    network = mg.Network([mg.Dense(4, 1)], seed=1)
    new_trainer(network, "binary_cross_entropy").fit(
        mg.Dataset(X, np.where(X[:, 0] > 0, "yes", "no")), 30, progress=False
    )
    probabilities = network.predict(X)
    np.testing.assert_allclose(probabilities, 1.0 / (1.0 + np.exp(-network.forward(X)[:, 0])), rtol=1e-5)
    assert network.labels(X).tolist() == np.where(probabilities > 0.5, "yes", "no").tolist()
    assert (network.labels(X) == np.where(X[:, 0] > 0, "yes", "no")).mean() > 0.9


def test_a_single_class_works() -> None:
    network = mg.Network([mg.Dense(4, 1)], seed=1)
    data = mg.Dataset(X, ["only"] * 30)
    trainer = new_trainer(network, metrics=["accuracy"])
    history = trainer.fit(data, 2, validation=data, progress=False)
    assert history["loss"] == [0.0, 0.0]
    assert network.labels(X).tolist() == ["only"] * 30
    assert history["validation_accuracy"] == [1.0, 1.0]


def test_labels_need_a_classifier() -> None:
    with pytest.raises(ConfigurationError, match="labels: expected a network trained to classify, got output identity"):
        new_network().labels(X)
    network = new_network()
    new_trainer(network, "binary_cross_entropy")
    with pytest.raises(ConfigurationError, match="got output sigmoid"):
        network.labels(X)


@pytest.mark.parametrize("rows", [1, 7, 29, 30, 31, None])
def test_predictions_do_not_depend_on_the_rows_at_a_time(rows: int | None) -> None:
    network = new_network()
    # A dot product of n terms is off by at most n roundings, whatever their order.
    np.testing.assert_allclose(network.predict(X, batch_size=rows), network.predict(X, batch_size=30), atol=1e-6)


def test_one_row_is_enough() -> None:
    network = new_network()
    trainer = new_trainer(network)
    assert trainer.fit(mg.Dataset(X[:1], LABELS[:1]), 2, progress=False)["loss"][0] > 0.0
    assert network.predict(X[:1]).shape == (1, 3)


def test_bytes_mean_what_they_meant_in_training() -> None:
    pixels = DRAW.integers(0, 17, (30, 4)).astype(np.uint8)
    network = new_network()
    new_trainer(network).fit(mg.Dataset(pixels, LABELS, scale=1 / 16), 1, progress=False)
    np.testing.assert_allclose(
        network.predict(pixels), network.predict(mg.Dataset(pixels / 16.0, scale=1 / 16)), rtol=1e-5
    )
    with pytest.raises(ConfigurationError, match=r"scale of byte inputs: expected 1/16, got 1/255"):
        network.predict(mg.Dataset(pixels))


def test_standardized_inputs_and_targets_are_fitted_by_fit() -> None:
    network = new_regression()
    assert not network.adapted
    trainer = new_trainer(network, "mean_squared_error", metrics=["mean_absolute_error", "r2"])
    data = mg.Dataset(X * 50.0 + 1000.0, VALUES)
    trainer.fit(data, 200, progress=False)
    predicted = network.predict(data)
    results = trainer.evaluate(data)
    # Metrics are in the targets' units, the loss in units of their deviation.
    assert results["r2"] > 0.95
    np.testing.assert_allclose(results["mean_absolute_error"], np.abs(predicted - VALUES).mean(), rtol=1e-5)
    np.testing.assert_allclose(results["loss"], np.mean(((predicted - VALUES) / VALUES.std(axis=0)) ** 2), rtol=1e-2)
    np.testing.assert_allclose(predicted, network.forward(data) * VALUES.std(axis=0) + VALUES.mean(axis=0), rtol=1e-6)


def test_standardize_fitted_by_hand_stays_so() -> None:
    network = new_regression()
    network.adapt(mg.Dataset(X, VALUES))
    fitted = network.flat_statistics().copy()
    wide = X.astype(np.float64)
    expected = [wide.mean(axis=0), wide.std(axis=0), VALUES.mean(axis=0), VALUES.std(axis=0)]
    np.testing.assert_allclose(fitted, np.concatenate(expected), rtol=1e-12)
    new_trainer(network, "squared_error").fit(mg.Dataset(X[:10] * 3.0, VALUES[:10]), 1, progress=False)
    np.testing.assert_array_equal(network.flat_statistics(), fitted)


def test_a_column_that_does_not_vary_is_only_shifted() -> None:
    constant = X.copy()
    constant[:, 1] = 0.1
    network = mg.Network([mg.Standardize(4), mg.Dense(4, 2)], seed=1)
    network.adapt(mg.Dataset(constant))
    assert network.flat_statistics()[5] == 1.0
    assert np.isfinite(network.predict(constant)).all()


@pytest.mark.parametrize("use", [lambda n: n.predict(X), lambda n: new_trainer(n, "squared_error").evaluate(
    mg.Dataset(X, VALUES)), lambda n: new_trainer(n, "squared_error").step(X[:8], VALUES[:8])])  # fmt: skip
def test_a_network_that_was_never_adapted_is_refused(use: Callable[[mg.Network], Any]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"expected fitted Standardize layers, got unfitted ones \(call .*adapt"
    ):
        use(new_regression())


def test_adapting_needs_suitable_data() -> None:
    network = new_regression()
    with pytest.raises(DataError, match="got no y"):
        network.adapt(mg.Dataset(X))
    with pytest.raises(ShapeError, match=r"x: expected \(rows, 4\), got \(30, 2\)"):
        network.adapt(mg.Dataset(X[:, :2], VALUES))
    assert not network.adapted
    np.testing.assert_array_equal(network.flat_statistics(), [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (X[:, :3], ShapeError, r"x: expected \(rows, 4\), got \(30, 3\)"),
        (X[0], ShapeError, r"expected \(rows, features\), got shape \(4,\) \(.*x\.reshape\(1, -1\)\)"),
        (X[:0], DataError, r"x: expected at least one row, got shape \(0, 4\)"),
        ([["a"] * 4], DtypeError, "x: expected real numbers of up to 64 bits, got dtype <U1"),
        (X.astype(complex), DtypeError, "got dtype complex128"),
        ([[1.0, 2.0, np.nan, 0.0]], DataError, "x: expected finite numbers, got nan at row 0, column 2"),
        ([[1.0, 2.0, 0.0, -np.inf]], DataError, "x: expected finite numbers, got -inf at row 0, column 3"),
        ([[1.0], [1.0, 2.0]], ShapeError, "x: expected"),
    ],
)
@pytest.mark.parametrize("method", ["predict", "forward"])
def test_bad_inputs_are_refused(method: str, x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(new_network(), method)(x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ConfigurationError, "batch_size: expected a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, DtypeError, "batch_size: expected a whole number of at least 1, got float 2.5"),
        ({"backend": "gpu"}, UnknownNameError, "backend: expected one of auto, cpu, cuda, got 'gpu'"),
    ],
)
def test_bad_options_of_predict_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        new_network().predict(X, **options)


# Description


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    shared = mg.Dense(5, 5, "relu")
    network = mg.Network(
        [mg.Standardize(4), mg.Dense(4, 5), shared, mg.Dropout(0.1), shared, mg.Dense(5, 1000)], seed=3
    )
    network.summary()
    assert capsys.readouterr().out.splitlines() == [
        "place  layer                                                                   output  parameters",
        "    0  Standardize(n_in=4)                                                          4           0",
        "    1  Dense(n_in=4, n_out=5, activation='identity', bias=True, init=None)          5          25",
        "    2  Dense(n_in=5, n_out=5, activation='relu', bias=True, init=None)              5          30",
        "    3  Dropout(rate=0.1)                                                            5           0",
        "    4  Dense(n_in=5, n_out=5, activation='relu', bias=True, init=None)              5        as 2",
        "    5  Dense(n_in=5, n_out=1000, activation='identity', bias=True, init=None)    1000       6,000",
        "6,055 parameters in float32, output identity",
    ]


def test_repr_builds_the_network_again() -> None:
    network = new_network()
    names = {kind: getattr(mg, kind) for kind in ("Network", "Dense", "Dropout")}
    assert bits(eval(repr(network), names)) == bits(network)


def test_a_seed_is_drawn_if_none_is_given() -> None:
    first, second = (mg.Network([mg.Dense(4, 3)]) for _ in range(2))
    assert first.seed != second.seed
    assert bits(first) != bits(second)
    assert bits(mg.Network([mg.Dense(4, 3)], seed=first.seed)) == bits(first)


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        (
            [mg.Dense(4, 5), mg.Dropout(0.5), mg.Dense(6, 3)],
            ShapeError,
            ["layers[2] Dense(n_in=6", "after layers[1] Dropout", "expected 6 columns, got 5 columns"],
        ),
        (
            [mg.Dense(4, 5), mg.Standardize(3)],
            ShapeError,
            ["layers[1] Standardize", "layers[0] Dense(n_in=4, n_out=5", "expected 3 columns, got 5 columns"],
        ),
        ([], ConfigurationError, ["expected at least one with parameters, got []"]),
        ([mg.Dropout(0.5)], ConfigurationError, ["at least one with parameters", "Dropout(rate=0.5)"]),
        ([mg.Standardize(3)], ConfigurationError, ["at least one with parameters", "Standardize(n_in=3)"]),
        (
            [mg.Dense(4, 5), mg.Standardize(5), mg.Dense(5, 3)],
            ConfigurationError,
            ["Standardize: expected to be the first layer or the last, got place 1"],
        ),
        (mg.Dense(4, 5), DtypeError, ["layers: expected a list of layers, got Dense"]),
        ([mg.Dense(4, 5), "relu"], DtypeError, ["layers[1]: expected a layer, got str 'relu'"]),
        ([mg.Dense], DtypeError, ["layers[0]: expected a layer, got"]),
    ],
)
def test_layers_that_make_no_network_are_named(layers: Any, error: type[MlpgpuError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        mg.Network(layers)
    for part in words:
        assert part in str(caught.value)


# Files


def test_a_saved_network_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    network = new_regression()
    trainer = new_trainer(network, "huber", precision="float64")
    trainer.fit(mg.Dataset(X, VALUES), 2, progress=False)
    network.save(tmp_path / "net.h5")
    loaded = mg.load(tmp_path / "net.h5")
    assert bits(loaded) == bits(network)
    assert loaded.layers == network.layers
    assert (loaded.seed, loaded.output, loaded.adapted, loaded.n_in, loaded.n_out) == (1, "identity", True, 4, 2)
    assert loaded.predict(X).tobytes() == network.predict(X).tobytes()
    loaded.save(tmp_path / "again.h5")
    assert (tmp_path / "again.h5").read_bytes() == (tmp_path / "net.h5").read_bytes()


def test_a_loaded_network_knows_its_classes_and_its_scale(tmp_path: Path) -> None:
    pixels = DRAW.integers(0, 17, (30, 4)).astype(np.uint8)
    network = new_network()
    new_trainer(network).fit(mg.Dataset(pixels, np.array(["a", "ß", "c"])[LABELS], scale=1 / 16), 2, progress=False)
    network.save(str(tmp_path / "net.h5"))
    loaded = mg.load(str(tmp_path / "net.h5"))
    assert (loaded.classes, loaded.scale) == (("a", "c", "ß"), 1 / 16)
    assert loaded.labels(pixels).tolist() == network.labels(pixels).tolist()


def test_a_loaded_network_is_trained_on(tmp_path: Path) -> None:
    network = new_network()
    new_trainer(network).fit(mg.Dataset(X, LABELS), 1, progress=False)
    network.save(tmp_path / "net.h5")
    loaded = mg.load(tmp_path / "net.h5")
    for trained in (network, loaded):
        mg.Trainer(trained, "softmax_cross_entropy", mg.Adam(0.01)).fit(mg.Dataset(X, LABELS), 2, progress=False)
    assert bits(loaded) == bits(network)


def test_weights_stand_where_keras_looks_for_them(tmp_path: Path) -> None:
    network = mg.Network(
        [mg.Standardize(4), mg.Dense(4, 5, "relu"), mg.Dropout(0.1), mg.Dense(5, 5, bias=False), mg.Dense(5, 3)], seed=1
    )
    network.save(tmp_path / "net.weights.h5")
    with h5py.File(tmp_path / "net.weights.h5") as file:
        found: dict[str, Any] = {}
        file["layers"].visititems(lambda name, item: found.update({name: getattr(item, "shape", None)}))
        np.testing.assert_array_equal(file["layers/dense_1/vars/0"][()], network.parameters["3.weight"])
    assert found == {
        "dense": None,
        "dense/vars": None,
        "dense/vars/0": (4, 5),
        "dense/vars/1": (5,),
        "dense_1": None,
        "dense_1/vars": None,
        "dense_1/vars/0": (5, 5),
        "dense_2": None,
        "dense_2/vars": None,
        "dense_2/vars/0": (5, 3),
        "dense_2/vars/1": (3,),
        "dropout": None,
        "dropout/vars": None,
        "normalization": None,
        "normalization/vars": None,
        "normalization/vars/0": (4,),
        "normalization/vars/1": (4,),
        "normalization/vars/2": (),
    }


def test_a_network_that_is_not_finite_replaces_no_good_file(tmp_path: Path) -> None:
    network = new_network()
    path = tmp_path / "net.h5"
    network.save(path)
    good = path.read_bytes()
    trainer = mg.Trainer(network, "mean_squared_error", mg.SGD(1e30), batch_size=30)
    with pytest.raises(ArithmeticError):
        for _ in range(20):
            trainer.step(X, np.tile(X[:, :1], 3))
    assert not np.isfinite(network.parameters["0.weight"]).all()
    for save in (network.save, trainer.save):
        with pytest.raises(MlpgpuError, match=r"expected .*finite"):
            save(path)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


def test_saving_where_there_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        new_network().save(tmp_path / "missing" / "net.h5")
    with pytest.raises(StorageError, match=r"nothing\.h5: expected a readable file"):
        mg.load(tmp_path / "nothing.h5")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": ["a", "b"]}, "classes"),
        ({"classes": "abc"}, "classes"),
        ({"scale": 0.0}, "scale"),
        ({"scale": "1"}, "scale"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
        ({"output": "argmax"}, "output"),
        ({"precision": "float16"}, "float16"),
        ({"layers": []}, "layers"),
        ({"layers": [{"kind": "same", "place": 0}]}, "expected one that mlpgpu wrote"),
        ({"layers": [{"kind": "Conv"}]}, "Conv"),
        ({"layers": [{"kind": "Dense", "n_in": 4, "n_out": 5}]}, "fields"),
        ({"layers": None}, "expected one that mlpgpu wrote"),
    ],
)
def test_a_description_without_meaning_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.h5"
    new_network().save(path)
    good = storage.read(path)
    network = {**good.description["network"], **change}
    storage.write(path, storage.Contents({"network": network}, good.arrays, good.groups))
    with pytest.raises(FileFormatError, match=message):
        mg.load(path)


def test_a_tied_place_in_a_file_must_come_later(tmp_path: Path) -> None:
    path = tmp_path / "net.h5"
    shared = mg.Dense(4, 4)
    mg.Network([shared, shared], seed=1).save(path)
    good = storage.read(path)
    for place in (-1, 1, "0", None, True):
        description = {"network": copy.deepcopy(good.description["network"])}
        description["network"]["layers"][1]["place"] = place
        storage.write(path, storage.Contents(description, good.arrays, good.groups))
        with pytest.raises(FileFormatError):
            mg.load(path)


def test_a_huge_layer_in_a_file_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "net.h5"
    mg.Network([mg.Dense(4, 4)], seed=1).save(path)
    good = storage.read(path)
    layer = {**good.description["network"]["layers"][0], "n_in": 1 << 23, "n_out": 1 << 23}
    description = {"network": {**good.description["network"], "layers": [layer]}}
    storage.write(path, storage.Contents(description, good.arrays, good.groups))
    with pytest.raises(FileFormatError, match=r"expected float32 \(8388608, 8388608\), got float32 \(4, 4\)"):
        mg.load(path)
