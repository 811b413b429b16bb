"""Other programs load what we export and predict the same, and we load what they save: with PyTorch and Keras."""

from __future__ import annotations

import os
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import OUTPUT_LOSS, ROWS, bound, inputs, stack, trained

import mlpgpu as mg
from mlpgpu import errors
from mlpgpu.activations import ACTIVATIONS

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras would otherwise look for TensorFlow
# Keras' variables over PyTorch become arrays in a way that NumPy warns of.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")]

torch = pytest.importorskip("torch")
keras = pytest.importorskip("keras")
safetensors = pytest.importorskip("safetensors.torch")

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


# --- PyTorch ---


def assert_torch_predicts(net: mg.Network, x: np.ndarray, *, logits: bool = False) -> Any:
    state = torch.get_rng_state()
    model = mg.to_torch(net, logits=logits)
    assert torch.equal(torch.get_rng_state(), state)
    expected = net.forward(x) if logits else net.predict(x)
    with torch.no_grad():
        found = model(torch.from_numpy(x)).numpy()
    assert found.dtype == net.dtype
    np.testing.assert_allclose(found, expected.reshape(len(x), -1), rtol=0.0, atol=bound(net, expected))
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_predicts_every_activation(activation: str, precision: str, tmp_path: Path) -> None:
    net = trained(stack(activation), precision=precision)
    x = inputs(5, precision)
    model = assert_torch_predicts(net, x)
    # The names in a safetensors file are those of its state dict.
    net.export(tmp_path / "net.safetensors")
    found = safetensors.load_file(tmp_path / "net.safetensors")
    model.load_state_dict(found)
    assert set(found) == set(model.state_dict())
    # A state dict comes back, with the functions that it does not have.
    torch.save(model.state_dict(), tmp_path / "net.pt")
    again = mg.load(tmp_path / "net.pt", activation=activation)
    dense = [layer for layer in net.layers if not isinstance(layer, mg.Dropout)]
    assert again.layers == tuple(dense)
    for ours, other in zip(net.parameters.values(), again.parameters.values(), strict=True):
        assert ours.tobytes() == other.tobytes()
    np.testing.assert_allclose(again.predict(x), net.predict(x), rtol=1e-6)  # statistics in the model's precision


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("output", OUTPUT_LOSS)
def test_torch_predicts_every_output(output: str, logits: bool) -> None:
    assert_torch_predicts(trained(stack("relu", standardized=False), output), X, logits=logits)


@pytest.mark.parametrize("bias", ["output", "layer", None])
def test_torch_has_locally_connected_layers(bias: str | None) -> None:
    shared = mg.LocallyConnected(9, 3, "tanh", bias=bias)
    net = trained([shared, shared, mg.LocallyConnected(5, 2, bias=bias), mg.Dense(4, 2)])
    model = assert_torch_predicts(net, inputs(9))
    assert model[0] is model[2]


def test_torch_takes_bytes_shared_layers_and_frozen_ones() -> None:
    shared = mg.Dense(5, 5, "softplus")
    net = mg.Network([shared, mg.Dropout(0.5), shared, mg.Dense(5, 2)], seed=1).frozen(3)
    x = np.arange(50, dtype=np.uint8).reshape(10, 5)
    net.remember(mg.Dataset(x, np.zeros((10, 2)), scale=0.25))
    model = assert_torch_predicts(net, x)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    model.double()(torch.from_numpy(x))
    net.parameters["0.bias"] = np.ones(5)
    assert not (model[1].bias == 1.0).any()  # values are copies


def test_to_torch_refuses() -> None:
    with pytest.raises(errors.DtypeError, match=r"mlpgpu\.Network"):
        mg.to_torch(mg.Dense(3, 2))
    with pytest.raises(errors.ConfigurationError, match="fitted Standardize"):
        mg.to_torch(mg.Network([mg.Standardize(3), mg.Dense(3, 2)], seed=1))


class Model(torch.nn.Module):
    """As somebody writes one, with layers out of alphabetical order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 8)
        self.body = torch.nn.Linear(8, 8, bias=False)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(torch.relu(self.body(torch.relu(self.first(x)))))


@pytest.mark.parametrize("nested", [None, "state_dict", "model_state_dict"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_state_dicts_of_others(dtype: str, nested: str | None, tmp_path: Path) -> None:
    model = Model().to(getattr(torch, dtype))
    state: dict[str, Any] = model.state_dict()
    torch.save({nested: state, "epoch": 3, "loss": 0.5} if nested else state, tmp_path / "model.bin")
    net = mg.load(tmp_path / "model.bin", activation="relu", output="softmax")
    precision = "float64" if dtype == "float64" else "float32"
    assert net.dtype == precision
    x = inputs(5, precision)
    with torch.no_grad():
        expected = model.to(getattr(torch, precision))(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(net.forward(x), expected, rtol=1e-5, atol=1e-5)
    assert net.output == "softmax"
    assert net.layers[1] == mg.Dense(8, 8, "relu", bias=False)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/mlpgpu_was_here",)


HOSTILE: dict[str, tuple[Any, str]] = {
    "code": ({"0.weight": Evil()}, "names and tensors alone"),
    "a model": (Model(), "names and tensors alone"),
    "bytes": ({"0.weight": bytearray(10)}, "names and tensors alone"),
    "a list": ([torch.ones(3, 5)], "a state dict of"),
    "numbers": ({"0.weight": 3.0}, "tensors by name"),
    "numbers for names": ({3: torch.ones(3, 5)}, "tensors by name"),
    "integers": ({"0.weight": torch.ones(3, 5, dtype=torch.int64)}, "floating point"),
    "complex": ({"0.weight": torch.ones(3, 5, dtype=torch.complex64)}, "names and tensors alone"),
    "sparse": ({"0.weight": torch.ones(3, 5).to_sparse()}, "names and tensors alone"),
    "strides of 0": ({"0.weight": torch.ones(1, 1).expand(1 << 20, 1 << 20)}, "bytes of '0.weight'"),
    "NaN": ({"0.weight": torch.full((3, 5), torch.nan)}, "finite"),
    "a convolution": (torch.nn.Conv2d(3, 4, 3).state_dict(), "n_out, n_in"),
    "a batch norm": (torch.nn.BatchNorm1d(4).state_dict(), "floating point"),
    "other widths": ({"0.weight": torch.ones(3, 5), "1.weight": torch.ones(3, 5)}, "fit each other"),
    "nothing": ({}, "at least one dense layer"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_other_torch_files_are_refused(case: str, tmp_path: Path) -> None:
    content, match = HOSTILE[case]
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(errors.FileFormatError, match=match):
        mg.load(tmp_path / "model.pt", activation="relu")
    assert not Path("/tmp/mlpgpu_was_here").exists()


def test_programs_and_old_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(3, 2)).save(path)
    with pytest.raises(errors.FileFormatError, match="a whole program"):
        mg.load(path)
    torch.save(Model().state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(errors.FileFormatError, match="a pickle"):
        mg.load(path)


def repacked(path: Path, change: Callable[[str, bytes], bytes], **options: Any) -> None:
    with zipfile.ZipFile(path) as file:
        members = {info.filename: file.read(info) for info in file.infolist()}
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, data in members.items():
            file.writestr(name, change(name, data))


def test_torch_archives_that_lie_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"0.weight": torch.ones(4, 5)}, path)
    # As many numbers claimed as there are not: four bytes for the storage's 20, and for the shape's.
    repacked(path, lambda name, data: data.replace(b"K\x14", b"J\0\0\0\1").replace(b"K\4K\5", b"M\0\x10M\0\x10"))
    with pytest.raises(errors.FileFormatError, match="undamaged"):
        mg.load(path)
    torch.save({"0.weight": torch.ones(4, 5)}, path)
    repacked(path, lambda name, data: data, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(errors.FileFormatError, match="stored as they are"):
        mg.load(path)


def test_damaged_torch_files_are_refused_or_harmless(tmp_path: Path) -> None:
    path, rng = tmp_path / "model.pt", random.Random(4)
    torch.save(Model().state_dict(), path)
    with zipfile.ZipFile(path) as file:
        whole = {info.filename: file.read(info) for info in file.infolist()}
    refused = 0
    for _ in range(150):
        members = {name: bytearray(data) for name, data in whole.items()}
        pickle = next(data for name, data in members.items() if name.endswith("data.pkl"))
        for _ in range(rng.choice((1, 1, 3))):
            pickle[rng.randrange(len(pickle))] = rng.randrange(256)
        with zipfile.ZipFile(path, "w") as file:  # with checksums that are right
            for name, data in members.items():
                file.writestr(name, bytes(data))
        try:
            mg.load(path, activation="relu").predict(X)
        except errors.MlpgpuError:
            refused += 1
    assert refused > 50
