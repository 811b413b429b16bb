"""``.keras`` archives of ours, and archives and HDF5 files as Keras writes them, made here by hand."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from exported import OUTPUT_LOSS, inputs, stack, trained

import mlpgpu as mg
from mlpgpu import errors
from mlpgpu.activations import ACTIVATIONS

X = inputs(5)
RNG = np.random.default_rng(8)
KERNELS = [RNG.standard_normal(shape).astype("float32") for shape in ((5, 4), (4, 3))]
BIASES = [RNG.standard_normal(4).astype("float32"), RNG.standard_normal(3).astype("float32")]


def layer(kind: str, **config: Any) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": kind, "config": config, "registered_name": None}


INPUT = layer("InputLayer", name="input_layer", batch_shape=[None, 5], sparse=False, ragged=False)
FIRST = layer("Dense", name="hidden", units=4, activation="tanh", use_bias=True)
SECOND = layer("Dense", name="last", units=3, activation="linear", use_bias=True)


def sequential(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"module": "keras", "class_name": "Sequential", "config": {"name": "s", "layers": list(layers)}}


def functional(chain: list[dict[str, Any]], legacy: bool = False) -> dict[str, Any]:
    entries = []
    for place, entry in enumerate(chain):
        name = entry["config"]["name"]
        source = chain[place - 1]["config"]["name"] if place else None
        history = {"class_name": "__keras_tensor__", "config": {"shape": [None, 5], "keras_history": [source, 0, 0]}}
        node: Any = [[source, 0, 0, {}]] if legacy else {"args": [history], "kwargs": {}}
        entries.append({**entry, "name": name, "inbound_nodes": [node] if place else []})
    end = [entries[-1]["name"], 0, 0]
    config = {"name": "f", "layers": entries[::-1], "input_layers": [], "output_layers": [end] if legacy else end}
    return {"module": "keras.src.models.functional", "class_name": "Functional", "config": config}


def put_weights(file: h5py.File, root: str = "layers", *, reverse: bool = False) -> None:
    """As Keras 3 does; ``reverse`` if the model names its layers from last to first."""
    pairs = list(zip(KERNELS, BIASES, strict=True))[:: -1 if reverse else 1]
    for name, (kernel, bias) in zip(("dense", "dense_1"), pairs, strict=True):
        file[f"{root}/{name}/vars/0"] = kernel
        file[f"{root}/{name}/vars/1"] = bias
    file.create_group(f"{root}/input_layer/vars")
    file["optimizer/vars/0"] = np.zeros((), "int32")


def put_legacy(group: h5py.Group, *, keras_2: bool) -> None:
    """By names, as before Keras 3."""
    names = ["hidden", "dropout", "last"]
    group.attrs["layer_names"] = [name.encode() for name in names] if keras_2 else names
    group.create_group("dropout").attrs["weight_names"] = []
    ends = ("kernel:0", "bias:0") if keras_2 else ("kernel", "bias")
    for name, arrays in zip(("hidden", "last"), zip(KERNELS, BIASES, strict=True), strict=True):
        weights = [f"{name}/{end}" if keras_2 else f"sequential/{name}/{end}" for end in ends]
        group.create_group(name).attrs["weight_names"] = [w.encode() for w in weights] if keras_2 else weights
        for weight, array in zip(weights, arrays, strict=True):
            group[name][weight] = array


def archive(path: Path, config: Any, put: Callable[[h5py.File], None] = put_weights, **options: Any) -> Path:
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        put(file)
    with zipfile.ZipFile(path, "w", **options) as made:
        made.writestr("metadata.json", "{}")
        made.writestr("config.json", config if isinstance(config, str) else json.dumps(config))
        made.writestr("model.weights.h5", weights.getvalue())
    return path


def expected(function: Callable[[np.ndarray], np.ndarray] = np.tanh) -> np.ndarray:
    return function(X @ KERNELS[0] + BIASES[0]) @ KERNELS[1] + BIASES[1]


def check(net: mg.Network, *, activation: str = "tanh", output: str = "identity") -> None:
    assert net.layers == (mg.Dense(5, 4, activation), mg.Dense(4, 3))
    assert net.output == output
    for place, (kernel, bias) in enumerate(zip(KERNELS, BIASES, strict=True)):
        np.testing.assert_array_equal(net.parameters[f"{place}.weight"], kernel)
        np.testing.assert_array_equal(net.parameters[f"{place}.bias"], bias)


# --- ours ---


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_comes_back_with_every_bit(activation: str, precision: str, tmp_path: Path) -> None:
    net, path, x = trained(stack(activation), precision=precision), tmp_path / "net.keras", inputs(5, precision)
    net.export(path)
    found = mg.load(path)
    assert found.layers == net.layers
    assert found.predict(x).tobytes() == net.predict(x).tobytes()


def without_ours(path: Path) -> None:
    """Take away what is ours in an archive, as Keras does when it saves what it loaded."""
    with zipfile.ZipFile(path) as file:
        config, weights = file.read("config.json"), io.BytesIO(file.read("model.weights.h5"))
    with h5py.File(weights, "r+") as found:
        del found["mlpgpu"]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("config.json", config)
        file.writestr("model.weights.h5", weights.getvalue())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_configuration_says_every_activation_too(activation: str, tmp_path: Path) -> None:
    net, path = trained(stack(activation)), tmp_path / "net.keras"
    net.export(path)
    without_ours(path)
    found = mg.load(path)
    assert found.layers == net.layers
    # Keras keeps the squares of scales, whose roots may be a rounding beside them.
    np.testing.assert_allclose(found.predict(X), net.predict(X), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("output", OUTPUT_LOSS)
def test_every_output(output: str, logits: bool, tmp_path: Path) -> None:
    net, path = trained(stack("relu"), output) if output == "identity" else trained(stack("relu")[:-1], output), None
    for path in (tmp_path / "net.keras", tmp_path / "net.safetensors", tmp_path / "config.keras"):
        net.export(path, logits=logits)
        if path.stem == "config":
            without_ours(path)
        found = mg.load(path)
        assert found.output == ("identity" if logits else output)
        y = net.forward(X) if logits else net.predict(X)
        np.testing.assert_allclose(found.predict(X), y, rtol=1e-6, atol=1e-6)


def test_shared_layers_and_bytes(tmp_path: Path) -> None:
    shared, path = mg.Dense(5, 5, "leaky_relu"), tmp_path / "net.keras"
    net = mg.Network([shared, mg.Dropout(0.5), shared, mg.Dense(5, 2)], seed=1).frozen(3)
    x = np.arange(50, dtype=np.uint8).reshape(10, 5)
    net.remember(mg.Dataset(x, np.zeros((10, 2)), scale=0.25))
    net.export(path)
    without_ours(path)
    found = mg.load(path)
    assert found.layers == net.layers
    assert found.layers[0] is found.layers[2]
    assert found.scale == 0.25
    np.testing.assert_array_equal(found.predict(x), net.predict(x))


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.keras", "b.keras"):
        trained(stack("gelu")).export(tmp_path / name)
    assert (tmp_path / "a.keras").read_bytes() == (tmp_path / "b.keras").read_bytes()


def test_what_keras_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigurationError, match="LocallyConnected"):
        mg.Network([mg.LocallyConnected(5, 2), mg.Dense(4, 1)], seed=1).export(tmp_path / "net.keras")
    for scale in (1e-8, 1e-30, 1e25):
        net = mg.Network([mg.Standardize(2), mg.Dense(2, 1)], seed=1)
        net.adapt(np.array([[0.0, 0.0], [scale, 1.0]]))
        with pytest.raises(errors.ConfigurationError, match="deviations from 1e-07"):
            net.export(tmp_path / "net.keras")
    assert list(tmp_path.iterdir()) == []


# --- Keras' ---


@pytest.mark.parametrize("put", [put_weights, lambda file: put_weights(file, "_layer_checkpoint_dependencies")])
@pytest.mark.parametrize("layers", [[FIRST, SECOND], [INPUT, FIRST, SECOND], [INPUT, layer("Flatten"), FIRST, SECOND]])
def test_archives_of_a_sequential(layers: list[Any], put: Callable[[h5py.File], None], tmp_path: Path) -> None:
    check(mg.load(archive(tmp_path / "model.zip", sequential(*layers), put)))


@pytest.mark.parametrize("legacy", [False, True])
def test_archives_of_a_functional_chain(legacy: bool, tmp_path: Path) -> None:
    config = functional([INPUT, FIRST, SECOND], legacy)
    check(mg.load(archive(tmp_path / "m.keras", config, lambda file: put_weights(file, reverse=True))))


@pytest.mark.parametrize("keras_2", [False, True])
def test_legacy_models(keras_2: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.h5"
    first = {**FIRST, "config": {**FIRST["config"], "batch_input_shape": [None, 5]}}
    layers = [first, layer("Dropout", name="dropout", rate=0.5), SECOND, layer("Softmax", name="softmax", axis=-1)]
    text = json.dumps(sequential(*layers))
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = text.encode() if keras_2 else text
        put_legacy(file.create_group("model_weights"), keras_2=keras_2)
    net = mg.load(path)
    assert net.layers == (mg.Dense(5, 4, "tanh"), mg.Dropout(0.5), mg.Dense(4, 3))
    assert net.output == "softmax"
    np.testing.assert_allclose(net.forward(X), expected(), rtol=1e-5, atol=1e-5)
    with pytest.raises(errors.ConfigurationError, match="which the file has"):
        mg.load(path, activation="relu")


@pytest.mark.parametrize("kind", ["3", "2.13", "legacy", "legacy, in pieces"])
def test_weights_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.weights.h5"
    with h5py.File(path, "w") as file:
        if kind.startswith("legacy"):
            put_legacy(file, keras_2=True)
            if kind.endswith("pieces"):
                names = file.attrs["layer_names"]
                del file.attrs["layer_names"]
                file.attrs["layer_names0"], file.attrs["layer_names1"] = names[:1], names[1:]
        else:
            put_weights(file, "layers" if kind == "3" else "_layer_checkpoint_dependencies")
    check(mg.load(path, activation="tanh", output="softmax"), output="softmax")
    check(mg.load(path, activation=["gelu", "linear"]), activation="gelu")
    with pytest.raises(errors.ConfigurationError, match="activation="):
        mg.load(path)


def test_layers_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "model.weights.h5"
    kernels = [RNG.standard_normal((3, 3)).astype("float32") for _ in range(12)]
    with h5py.File(path, "w") as file:
        for place, kernel in enumerate(kernels):  # in an alphabetical listing dense_10 comes before dense_2
            file[f"layers/dense{f'_{place}' if place else ''}/vars/0"] = kernel
    net = mg.load(path, activation="relu")
    for place, kernel in enumerate(kernels):
        np.testing.assert_array_equal(net.parameters[f"{place}.weight"], kernel)


def test_statistics_of_a_normalization(tmp_path: Path) -> None:
    mean, variance = np.arange(5, dtype="float32"), np.arange(5, dtype="float32")

    def put(file: h5py.File) -> None:
        put_weights(file)
        for number, values in enumerate((mean, variance, np.zeros((), "int64"))):
            file[f"layers/normalization/vars/{number}"] = values

    normalization = layer("Normalization", name="n", axis=[-1], invert=False, mean=None, variance=None)
    scaled = (X - mean) / np.maximum(np.sqrt(variance), 1e-7)
    y = np.tanh(scaled @ KERNELS[0] + BIASES[0]) @ KERNELS[1] + BIASES[1]
    given = layer("Normalization", name="n", axis=-1, mean=[*range(5)], variance=[[*range(5)]])
    for entry in (normalization, given):
        net = mg.load(archive(tmp_path / "m.keras", sequential(entry, FIRST, SECOND), put))
        np.testing.assert_allclose(net.predict(X), y, rtol=1e-4, atol=1e-4)
    with h5py.File(tmp_path / "w.h5", "w") as file:
        put(file)
    np.testing.assert_allclose(mg.load(tmp_path / "w.h5", activation="tanh").predict(X), y, rtol=1e-4, atol=1e-4)


LAST = (
    ({"activation": "sigmoid"}, "sigmoid"),
    ({"activation": "softmax"}, "softmax"),
    ({"activation": "exponential"}, "exp"),
    ({"activation": {"class_name": "function", "config": "softmax", "module": "keras.activations"}}, "softmax"),
    ({"activation": {"class_name": "Softmax", "config": {"axis": -1}, "module": "keras.layers"}}, "softmax"),
)


@pytest.mark.parametrize(("config", "output"), LAST)
def test_a_last_function_is_the_outputs(config: dict[str, Any], output: str, tmp_path: Path) -> None:
    last = {**SECOND, "config": {**SECOND["config"], **config}}
    check(mg.load(archive(tmp_path / "m.keras", sequential(FIRST, last))), output=output)


HIDDEN = {
    "leaky_relu": layer("LeakyReLU", negative_slope=0.01),
    "leaky_relu of Keras 2": layer("LeakyReLU", alpha=0.009999999776482582),
    "leaky_relu by ReLU": layer("ReLU", negative_slope=0.01, max_value=None, threshold=0.0),
    "relu": layer("ReLU", max_value=None, negative_slope=0.0, threshold=0.0),
    "elu": layer("ELU", alpha=1.0),
    "silu": layer("Activation", activation="swish"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_activations_as_layers(name: str, tmp_path: Path) -> None:
    plain = {**FIRST, "config": {**FIRST["config"], "activation": "linear"}}
    net = mg.load(archive(tmp_path / "m.keras", sequential(plain, HIDDEN[name], SECOND)))
    check(net, activation=name.split(" ")[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_numbers_of_other_precisions(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "model.weights.h5"
    with h5py.File(path, "w") as file:
        if dtype == "bfloat16":
            short = (KERNELS[0].view(np.uint32) >> 16).astype(np.uint16).view("V2")
            file["layers/dense/vars/0"] = short
            file["layers/dense/vars/0"].attrs["dtype"] = "bfloat16"
        else:
            file["layers/dense/vars/0"] = KERNELS[0].astype(dtype)
    net = mg.load(path)
    assert net.dtype == ("float64" if dtype == "float64" else "float32")
    tolerance = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 0.0}[dtype]
    np.testing.assert_allclose(net.parameters["0.weight"], KERNELS[0], rtol=tolerance, atol=1e-7)


REFUSED = {
    "another layer": (sequential(FIRST, layer("BatchNormalization"), SECOND), "BatchNormalization"),
    "code": (sequential(FIRST, layer("Lambda", function="os.system('x')"), SECOND), "Lambda"),
    "a layer of somebody": (sequential({**FIRST, "module": "my.layers"}, SECOND), "layers of Keras"),
    "a registered layer": (sequential({**FIRST, "registered_name": "my>Dense"}, SECOND), "layers of Keras"),
    "another model": ({**sequential(FIRST, SECOND), "class_name": "MyModel"}, "a model of"),
    "another slope": (sequential(FIRST, layer("LeakyReLU", negative_slope=0.2), SECOND), "negative_slope"),
    "a clipped relu": (sequential(FIRST, layer("ReLU", max_value=6.0), SECOND), "max_value"),
    "another elu": (sequential(FIRST, layer("ELU", alpha=2.0), SECOND), "alpha"),
    "a hidden softmax": (
        sequential({**FIRST, "config": {**FIRST["config"], "activation": "softmax"}}, SECOND),
        "softmax",
    ),
    "an unknown function": (
        sequential({**FIRST, "config": {**FIRST["config"], "activation": "mish"}}, SECOND),
        "an activation of",
    ),
    "keras' leaky_relu": (
        sequential({**FIRST, "config": {**FIRST["config"], "activation": "leaky_relu"}}, SECOND),
        "slope is 0.2",
    ),
    "two functions": (sequential(FIRST, layer("ReLU"), SECOND), "right after a dense layer"),
    "a function first": (sequential(layer("ReLU"), FIRST, SECOND), "right after a dense layer"),
    "an offset": (sequential(layer("Rescaling", scale=2.0, offset=1.0), FIRST, SECOND), "offset"),
    "a late rescaling": (sequential(FIRST, layer("Rescaling", scale=2.0, offset=0.0), SECOND), "rescaling elsewhere"),
    "images": (
        sequential(layer("InputLayer", batch_shape=[None, 1, 5]), FIRST, SECOND),
        "Flatten before Dense",
    ),
    "a rate of 1": (sequential(FIRST, layer("Dropout", rate=1.0), SECOND), "rate"),
    "other units": (sequential({**FIRST, "config": {**FIRST["config"], "units": 7}}, SECOND), "values of Dense"),
    "huge units": (sequential({**FIRST, "config": {**FIRST["config"], "units": 2**60}}, SECOND), "values of Dense"),
    "no bias": (sequential({**FIRST, "config": {**FIRST["config"], "use_bias": False}}, SECOND), "values of Dense"),
    "more layers": (sequential(FIRST, SECOND, SECOND), "values of Dense"),
    "other widths": (sequential(SECOND, FIRST), "values of Dense"),
    "no layers": (sequential(), "at least one dense layer"),
    "many layers": (sequential(*[layer("Dropout", rate=0.5)] * 5000), "at most 4096"),
    "a list": ([], "JSON object"),
    "no JSON": ("{", "JSON"),
    "NaN": ('{"class_name": NaN}', "JSON"),
    "depth": ("[" * 100_000, "JSON"),
    "nothing": ({}, "undamaged"),
    "no configuration": ({"class_name": "Sequential"}, "undamaged"),
    "numbers for layers": ({"class_name": "Sequential", "config": {"layers": [1, 2]}}, "undamaged"),
    "a deep node": (
        {
            "class_name": "Functional",
            "config": {
                "layers": [{**FIRST, "inbound_nodes": [json.loads("[" * 900 + "]" * 900)]}],
                "output_layers": ["hidden", 0, 0],
            },
        },
        "one after the other|undamaged",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_models_are_refused(case: str, tmp_path: Path) -> None:
    config, match = REFUSED[case]
    with pytest.raises(errors.FileFormatError, match=match):
        mg.load(archive(tmp_path / "m.keras", config))


def test_a_cycle_and_two_inputs_are_refused(tmp_path: Path) -> None:
    config = functional([INPUT, FIRST, SECOND])
    entries = {entry["name"]: entry for entry in config["config"]["layers"]}
    node = entries["last"]["inbound_nodes"][0]
    entries["hidden"]["inbound_nodes"] = [{"args": [[node["args"][0], node["args"][0]]]}]
    with pytest.raises(errors.FileFormatError, match="2 inputs of 'hidden'"):
        mg.load(archive(tmp_path / "m.keras", config))
    entries["hidden"]["inbound_nodes"] = [node]  # its own output
    with pytest.raises(errors.FileFormatError, match="a cycle"):
        mg.load(archive(tmp_path / "m.keras", config))


def test_archives_that_lie_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "m.keras", sequential(FIRST, SECOND), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(errors.FileFormatError, match="compressed"):
        mg.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("config.json", json.dumps(sequential(FIRST, SECOND)))
    with pytest.raises(errors.FileFormatError, match=r"a member model\.weights\.h5"):
        mg.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("config.json", b" " * (17 << 20))
    with pytest.raises(errors.FileFormatError, match=r"config\.json stored"):
        mg.load(path)
    with zipfile.ZipFile(path, "w") as file:
        for number in range(12):
            file.writestr(f"{number}", b"")
    monkeypatch.setattr("mlpgpu.network.formats.keras_file.MOST_MEMBERS", 10)
    with pytest.raises(errors.FileFormatError, match="at most 10 members"):
        mg.load(path)


def hostile(file: h5py.File, case: str) -> None:
    """Weights as an enemy writes them."""
    file["layers/dense_1/vars/0"], file["layers/dense_1/vars/1"] = KERNELS[1], BIASES[1]
    group = file.create_group("layers/dense/vars")
    group["1"] = BIASES[0]
    if case == "chunked":
        group.create_dataset("0", data=KERNELS[0], chunks=(1, 1))
    elif case == "compressed":
        group.create_dataset("0", data=np.zeros((5, 4), "f4"), compression="gzip")
    elif case == "huge":
        group.create_dataset("0", (1 << 20, 1 << 20), "f4", chunks=(1024, 1024))
    elif case == "not written":
        group.create_dataset("0", (1 << 14, 1 << 10), "f4")
    elif case == "soft":
        group["0"] = h5py.SoftLink("/layers/dense_1/vars/0")
    elif case == "external":
        group["0"] = h5py.ExternalLink("/etc/passwd", "/")
    elif case == "text":
        group["0"] = np.array([[b"a"]])
    elif case == "complex":
        group["0"] = KERNELS[0].astype("c8")
    elif case == "a group":
        group.create_group("0")
    elif case == "NaN":
        group["0"] = np.full((5, 4), np.nan, "f4")
    elif case == "outside":
        group.create_dataset("0", (5, 4), "f4", external=[("/etc/passwd", 0, 80)])


CASES = (*("chunked", "compressed", "huge", "not written", "soft", "external", "text", "complex", "a group", "NaN"),)


@pytest.mark.parametrize("case", [*CASES, "outside", "missing"])
def test_hostile_weights_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(errors.FileFormatError):
        mg.load(archive(tmp_path / "m.keras", sequential(FIRST, SECOND), lambda file: hostile(file, case)))
    with h5py.File(tmp_path / "w.h5", "w") as file:
        hostile(file, case)
    with pytest.raises(errors.FileFormatError):
        mg.load(tmp_path / "w.h5", activation="tanh")


def test_layers_that_share_bytes_cannot_ask_for_more_than_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.zeros((100, 100), "f4")
        for number in range(1, 20):
            file[f"layers/dense_{number}/vars/0"] = file["layers/dense/vars/0"]
    with pytest.raises(errors.FileFormatError, match="that are in the file"):
        mg.load(path, activation="tanh")


def test_hdf5_files_of_nobody_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["numbers"] = np.arange(5)
    with pytest.raises(errors.FileFormatError, match="of mlpgpu or of Keras"):
        mg.load(path)
    with h5py.File(path, "w") as file:
        put_weights(file)
        file["layers/lstm/vars/0"] = np.zeros((3, 3), "f4")
    with pytest.raises(errors.FileFormatError, match="'lstm'"):
        mg.load(path, activation="relu")
    with h5py.File(path, "w") as file:
        file.create_group("layers")
    with pytest.raises(errors.FileFormatError, match="0 and 0"):
        mg.load(path, activation="relu")


def damaged(whole: bytes, rng: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 3, 20))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


@pytest.mark.parametrize("kind", ["ours", "archive", "weights", "legacy"])
def test_damaged_files_are_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    path, rng = tmp_path / "file", random.Random(kind)
    hints = {"activation": "relu"} if kind == "weights" else {}
    if kind == "ours":
        trained(stack("relu")).export(tmp_path / "net.keras")
        path = tmp_path / "net.keras"
    elif kind == "archive":
        archive(path, sequential(FIRST, SECOND))
    else:
        with h5py.File(path, "w") as file:
            if kind == "weights":
                put_weights(file)
            else:
                file.attrs["model_config"] = json.dumps(sequential(FIRST, SECOND))
                put_legacy(file.create_group("model_weights"), keras_2=True)
    whole, x = path.read_bytes(), X
    mg.load(path, **hints).predict(x)
    refused = 0
    for _ in range(60):
        path.write_bytes(damaged(whole, rng))
        try:
            with np.errstate(all="ignore"):
                mg.load(path, **hints).predict(x)
        except errors.MlpgpuError:
            refused += 1
    assert refused > 5
