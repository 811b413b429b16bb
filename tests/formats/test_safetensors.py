"""Safetensors: our networks come back with every bit, other programs' Linear layers by their names and shapes."""

from __future__ import annotations

import itertools
import json
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from exported import OUTPUT_LOSS, inputs, stack, trained
from safetensors.numpy import load_file, save_file

import mlpgpu as mg
from mlpgpu import errors
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.network.formats import limits

X = inputs(5)


def assert_same(found: mg.Network, net: mg.Network, x: np.ndarray = X) -> None:
    assert found.layers == net.layers
    assert (found.output, found.seed, found.remembered, found.adapted) == (
        *(net.output, net.seed, net.remembered),
        net.adapted,
    )
    assert found.dtype == net.dtype
    for name, values in net.parameters.items():
        assert found.parameters[name].tobytes() == values.tobytes()
    assert found.flat_statistics().tobytes() == net.flat_statistics().tobytes()
    assert found.predict(x).tobytes() == net.predict(x).tobytes()


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_comes_back(activation: str, precision: str, tmp_path: Path) -> None:
    net = trained(stack(activation), precision=precision)
    net.export(tmp_path / "net.safetensors")
    assert_same(mg.load(tmp_path / "net.safetensors"), net, inputs(5, precision))


@pytest.mark.parametrize("output", OUTPUT_LOSS)
def test_every_output_comes_back(output: str, tmp_path: Path) -> None:
    net = trained(stack("silu", standardized=False), output)
    net.export(tmp_path / "net.safetensors")
    assert_same(mg.load(tmp_path / "net.safetensors"), net)


def test_layers_that_share_values_do_so_again(tmp_path: Path) -> None:
    shared, local = mg.Dense(5, 5, "tanh"), mg.LocallyConnected(5, 2)
    net = trained([shared, shared, local, local, mg.Dense(3, 2)])
    net.export(tmp_path / "net.safetensors")
    found = mg.load(tmp_path / "net.safetensors")
    assert found.layers[0] is found.layers[1]
    assert_same(found, net)


def test_names_classes_and_bytes_come_back(tmp_path: Path) -> None:
    train, test = mg.datasets.load("digits")
    net = mg.Network([mg.Dense(64, 10)], seed=1).frozen(0)
    net.remember(mg.Dataset(train.x, train.y, classes=[f"digit {k}" for k in range(10)], scale=1 / 255))
    net.export(tmp_path / "net.safetensors")
    assert_same(mg.load(tmp_path / "net.safetensors"), net, np.asarray(test.x))


def test_names_are_those_of_a_torch_sequential(tmp_path: Path) -> None:
    net = trained(stack("relu"))
    net.export(tmp_path / "net.safetensors")
    tensors = load_file(tmp_path / "net.safetensors")
    # Standardize, Linear, ReLU, Dropout, Linear, ReLU, Linear, Standardize
    names = {"0.mean", "0.scale", "1.weight", "1.bias", "4.weight", "6.weight", "6.bias", "7.mean", "7.scale"}
    assert set(tensors) == names
    np.testing.assert_array_equal(tensors["1.weight"], net.parameters["1.weight"].T)


def save_foreign(path: Path, names: list[str], widths: list[int], dtype: str = "float32") -> list[np.ndarray]:
    """A file of Linear layers; returns the weights (n_in, n_out)."""
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal(shape).astype(dtype) for shape in itertools.pairwise(widths)]
    tensors = {f"{name}.weight": np.ascontiguousarray(w.T) for name, w in zip(names, weights, strict=True)}
    tensors |= {f"{name}.bias": np.arange(w.shape[1], dtype=dtype) for name, w in zip(names, weights, strict=True)}
    save_file(tensors, path)
    return weights


@pytest.mark.parametrize(
    ("names", "widths"),
    [
        (["0", "2", "10"], [5, 7, 7, 3]),
        (["fc1", "fc2", "fc3"], [5, 5, 5, 5]),
        (["module.layers.9.linear", "module.layers.10.linear"], [5, 8, 3]),
        (["input", "body", "head"], [5, 8, 7, 3]),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_linear_layers_of_others(names: list[str], widths: list[int], dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"  # what it is, is told by its content
    weights = save_foreign(path, names, widths, dtype)
    net = mg.load(path, activation="tanh", output="softmax")
    y = x = inputs(5, str(net.dtype))
    assert net.dtype == (np.float64 if dtype == "float64" else np.float32)
    for place, weight in enumerate(weights):
        y = y @ weight.astype(net.dtype) + np.arange(weight.shape[1])
        y = np.tanh(y) if place < len(weights) - 1 else y
    np.testing.assert_allclose(net.forward(x), y, rtol=1e-4, atol=1e-5)
    assert net.output == "softmax"
    assert [layer.activation for layer in net.layers] == ["tanh"] * (len(names) - 1) + ["identity"]


def test_functions_must_be_said_where_no_file_has_them(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_foreign(path, ["0", "2"], [5, 4, 3])
    with pytest.raises(errors.ConfigurationError, match='activation="relu"'):
        mg.load(path)
    with pytest.raises(errors.ConfigurationError, match="2 of them"):
        mg.load(path, activation=["relu"])
    with pytest.raises(errors.UnknownNameError, match="'relu'"):
        mg.load(path, activation="rleu")
    with pytest.raises(errors.UnknownNameError, match="output"):
        mg.load(path, activation="relu", output="tanh")
    with pytest.raises(errors.DtypeError, match="a list of one for each layer"):
        mg.load(path, activation=3)  # type: ignore[arg-type]
    net = mg.load(path, activation=["relu", "linear"])
    assert net.layers[0] == mg.Dense(5, 4, "relu")
    for own in ("own.safetensors", "own.h5"):
        (net.save if own.endswith("h5") else net.export)(tmp_path / own)
        with pytest.raises(errors.ConfigurationError, match="which the file has"):
            mg.load(tmp_path / own, activation="relu")


F4 = "float32"
FOREIGN = {
    "no order": ({"a.weight": np.ones((5, 5), F4), "b.weight": np.ones((5, 5), F4)}, "tell their order"),
    "two ways round": ({"a.weight": np.ones((4, 5), F4), "b.weight": np.ones((5, 4), F4)}, "tell their order"),
    "widths": ({"0.weight": np.ones((4, 5), F4), "1.weight": np.ones((2, 3), F4)}, "fit each other"),
    "a convolution": ({"0.weight": np.ones((4, 5, 3, 3), F4), "0.bias": np.ones(4, F4)}, "n_out, n_in"),
    "a batch norm": ({"0.weight": np.ones(4, F4), "0.bias": np.ones(4, F4)}, "n_out, n_in"),
    "a long bias": ({"0.weight": np.ones((4, 5), F4), "0.bias": np.ones(5, F4)}, "n_out, n_in"),
    "a bias alone": ({"0.bias": np.ones(5, F4)}, "n_out, n_in"),
    "integers": ({"0.weight": np.ones((4, 5), "int64")}, "I64"),
    "infinity": ({"0.weight": np.full((4, 5), np.inf, F4)}, "finite"),
    "no rows": ({"0.weight": np.ones((0, 5), F4)}, "at least one column"),
    "scales of 0": ({"0.mean": np.ones(5, F4), "0.scale": np.zeros(5, F4), "1.weight": np.ones((2, 5), F4)}, "over 0"),
    "nothing": ({}, "at least one dense layer"),
    "statistics alone": ({"0.mean": np.ones(5, F4), "0.scale": np.ones(5, F4)}, "at least one dense layer"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_other_modules_are_refused(case: str, tmp_path: Path) -> None:
    tensors, match = FOREIGN[case]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(errors.FileFormatError, match=match):
        mg.load(tmp_path / "model.safetensors", activation="relu")


def test_a_description_that_lies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    net = trained(stack("relu"))
    net.export(path)
    tensors = load_file(path)
    described = net.saved().described()

    def refused(description: object, values: dict[str, np.ndarray], match: str) -> None:
        text = description if isinstance(description, str) else json.dumps(description)
        save_file(values, path, {"mlpgpu": text})
        with pytest.raises(errors.FileFormatError, match=match):
            mg.load(path)

    refused("{", tensors, "JSON")
    refused("[]", tensors, "JSON object")
    refused("[" * 100_000, tensors, "JSON")
    refused({**described, "layers": []}, tensors, "description")
    refused({**described, "layers": described["layers"] * 200}, tensors, "description|at most")
    refused({**described, "output": "tanh"}, tensors, "description")
    refused({**described, "seed": 2**70}, tensors, "description")
    refused(described, {name: v for name, v in tensors.items() if name != "1.bias"}, "description")
    refused(described, {**tensors, "9.weight": np.ones((2, 2), F4)}, "also 9.weight")
    refused(described, {**tensors, "1.bias": np.ones(3, F4)}, "description")
    lying = [dict(layer) for layer in described["layers"]]
    lying[1]["n_out"] = 2**40
    refused({**described, "layers": lying}, tensors, "description")


@pytest.mark.parametrize("seed", range(2))
def test_damaged_files_are_refused_or_harmless(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    trained(stack("relu")).export(path)
    whole, rng = path.read_bytes(), random.Random(seed)
    header = int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3, 20))):
            data[rng.randrange(8 + header)] = rng.randrange(256)
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        path.write_bytes(data)
        try:
            mg.load(path).predict(X)
        except errors.MlpgpuError:
            refused += 1
    assert refused > 40


def test_what_would_take_all_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + b'{"a":1}')
    with pytest.raises(errors.FileFormatError, match="a header of at most"):
        mg.load(path)
    header = json.dumps({"0.weight": {"dtype": "F32", "shape": [1 << 20, 1 << 22], "data_offsets": [0, 1 << 44]}})
    with open(path, "wb") as file:  # sparse: a few bytes on the disk
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + (1 << 42))
    with pytest.raises(errors.FileFormatError, match="half of the free memory"):
        mg.load(path)
    save_foreign(path, ["0"], [5, 3])
    with monkeypatch.context() as patched, pytest.raises(errors.FileFormatError, match="at most 1 tensors"):
        patched.setattr("mlpgpu.network.formats.safetensors_file.MOST_ARRAYS", 1)
        mg.load(path)
    monkeypatch.setattr(limits, "MEMORY_SHARE", 0.0)
    with pytest.raises(errors.FileFormatError, match="half of the free memory"):
        mg.load(path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    net = trained(stack("relu"))
    net.export(path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (lambda: mg.load(path), lambda: net.export(path)):
        with pytest.raises(errors.BackendError, match=r"mlpgpu\[safetensors\]"):
            call()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_are_refused(protocol: int, tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps({"0.weight": [1.0]}, protocol))
    with pytest.raises(errors.FileFormatError, match="a pickle"):
        mg.load(path)


def test_files_of_no_format(tmp_path: Path) -> None:
    for content in (b"", b"x", b"\x00" * 8, b"\x00" * 100, b"{" * 100, b"\x89HDF\r\n\x1a\n{", b"\x08\x08" * 100):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(errors.FileFormatError):
            mg.load(tmp_path / "file")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(errors.StorageError, match="readable"):
            mg.load(path)
