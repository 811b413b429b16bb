"""Other programs load what we export and predict the same, and we load what they save: with PyTorch and Keras."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import OUTPUT_LOSS, ROWS, bound, inputs, stack, trained

import mlpgpu as mg
from mlpgpu.activations import ACTIVATIONS

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras would otherwise look for TensorFlow
# Keras' variables over PyTorch become arrays in a way that NumPy warns of.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")]

keras = pytest.importorskip("keras")

PRECISIONS = ("float32", "float64")
X = inputs(5)


def predicted(model: Any, x: np.ndarray) -> np.ndarray:
    return model(x).numpy(force=True)


def assert_keras_predicts(net: mg.Network, x: np.ndarray, path: Path, *, logits: bool = False) -> Any:
    net.export(path, logits=logits)
    model = keras.saving.load_model(path)
    expected = net.forward(x) if logits else net.predict(x)
    found = predicted(model, x)
    # A model of Keras rounds float64 inputs, whatever the precision of its layers.
    np.testing.assert_allclose(found, expected.reshape(len(x), -1), rtol=0.0, atol=bound(net, expected, "float32"))
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keras_loads_every_activation(activation: str, precision: str, tmp_path: Path) -> None:
    net = trained(stack(activation), precision=precision)
    model = assert_keras_predicts(net, inputs(5, precision), tmp_path / "net.keras")
    assert {str(weight.dtype) for weight in model.trainable_weights} == {precision}


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("output", OUTPUT_LOSS)
def test_keras_loads_every_output(output: str, logits: bool, tmp_path: Path) -> None:
    net = trained(stack("relu", standardized=False), output)
    model = assert_keras_predicts(net, X, tmp_path / "net.keras", logits=logits)
    model.save(tmp_path / "again.keras")  # by Keras itself
    found = mg.load(tmp_path / "again.keras")
    assert found.layers == net.layers
    assert found.output == ("identity" if logits else output)
    assert found.forward(X).tobytes() == net.forward(X).tobytes()


def test_keras_loads_shared_layers_bytes_and_frozen_ones(tmp_path: Path) -> None:
    shared = mg.Dense(5, 5, "leaky_relu")
    net = mg.Network([shared, mg.Dropout(0.5), shared, mg.Dense(5, 2)], seed=1).frozen(3)
    x = np.arange(50, dtype=np.uint8).reshape(10, 5)
    net.remember(mg.Dataset(x, np.zeros((10, 2)), scale=0.25))
    model = assert_keras_predicts(net, x, tmp_path / "net.keras")
    assert [len(layer.weights) for layer in model.layers if layer.weights] == [2, 2]
    assert [layer.trainable for layer in model.layers if layer.weights] == [True, False]
    model.save(tmp_path / "again.keras")
    found = mg.load(tmp_path / "again.keras")
    assert found.layers == net.layers
    assert found.layers[0] is found.layers[2]
    np.testing.assert_array_equal(found.predict(x), net.predict(x))


def test_keras_trains_what_it_loaded(tmp_path: Path) -> None:
    net = trained(stack("relu", standardized=False))
    model = assert_keras_predicts(net, X, tmp_path / "net.keras")
    model.compile("sgd", "mse")
    model.fit(X, np.zeros((ROWS, 3)), epochs=1, verbose=0)
    assert model.count_params() == sum(values.size for values in net.parameters.values())


def keras_model(activation: str, *, is_functional: bool) -> Any:
    """As somebody writes it in Keras, with statistics of the inputs and a softmax."""
    layers = keras.layers
    normalization = layers.Normalization()
    normalization.adapt(X)
    function = {"identity": "linear", "leaky_relu": keras.layers.LeakyReLU(negative_slope=0.01)}.get(
        activation, activation
    )
    chain = [
        normalization,
        layers.Dense(9, activation=function, name="first"),
        layers.Dropout(0.2),
        layers.Dense(8, activation=function, use_bias=False),
        layers.Dense(3, activation="softmax", name="a_last_one"),
    ]
    if not is_functional:
        return keras.Sequential([layers.Input((5,)), *chain])
    start = end = layers.Input((5,))
    for layer in chain:
        end = layer(end)
    return keras.Model(start, end)


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_models_of_keras_are_loaded(activation: str, is_functional: bool, tmp_path: Path) -> None:
    model = keras_model(activation, is_functional=is_functional)
    for name in ("model.keras", "model.h5", "model.weights.h5"):
        path = tmp_path / name
        if name.endswith("weights.h5"):
            model.save_weights(path)
            net = mg.load(path, activation=activation, output="softmax")
        else:
            model.save(path)
            net = mg.load(path)
        assert [layer.activation for layer in net.layers if isinstance(layer, mg.Dense)] == [activation] * 2 + [
            "identity"
        ]
        assert net.output == "softmax"
        np.testing.assert_allclose(net.predict(X), predicted(model, X), rtol=0.0, atol=1e-5)


def test_images_and_bytes_of_keras(tmp_path: Path) -> None:
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((4, 3)), layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(3, activation="sigmoid")]
    )
    model.save(tmp_path / "model.keras")
    net = mg.load(tmp_path / "model.keras")
    x = np.random.default_rng(1).integers(256, size=(20, 12)).astype(np.uint8)
    assert (net.output, net.scale) == ("sigmoid", 1 / 255)
    np.testing.assert_allclose(net.predict(x), predicted(model, x.reshape(20, 4, 3)), rtol=0.0, atol=1e-6)


def test_compiled_models_with_slots_are_loaded(tmp_path: Path) -> None:
    model = keras_model("relu", is_functional=False)
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(X, np.arange(ROWS) % 3, epochs=1, verbose=0)
    for name in ("model.keras", "model.h5"):
        model.save(tmp_path / name)
        np.testing.assert_allclose(mg.load(tmp_path / name).predict(X), predicted(model, X), rtol=0.0, atol=1e-5)
