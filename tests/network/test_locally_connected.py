"""Locally connected layers: a dense layer whose weights are a band, and stacks on one set of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.errors import ConfigurationError, DtypeError, MlpgpuError, ShapeError, UnknownNameError

WINDOW = 4


def band(weight: np.ndarray, n_in: int) -> np.ndarray:
    """The weights (window, n) as those of a dense layer, (n_in, n)."""
    dense = np.zeros((n_in, weight.shape[1]))
    for r, row in enumerate(weight):
        dense[np.arange(len(row)) + r, np.arange(len(row))] = row
    return dense


def float64_network(layers: list, seed: int) -> mg.Network:
    """One that computes in float64."""
    network = mg.Network(layers, seed=seed)
    data = mg.Dataset(np.zeros((2, network.n_in)), np.zeros((2, network.n_out)))
    trainer = mg.Trainer(network, "squared_error", mg.SGD(0.0), batch_size=2, backend="cpu", precision="float64")
    trainer.step(data.x, data.y)
    return network


def test_it_is_a_dense_layer_on_a_band() -> None:
    local = float64_network([mg.LocallyConnected(9, WINDOW, "tanh")], 1)
    dense = float64_network([mg.Dense(9, 6, "tanh")], 1)
    bias = np.linspace(-1.0, 1.0, 6)
    local.parameters["0.bias"] = dense.parameters["0.bias"] = bias
    dense.parameters["0.weight"] = band(local.parameters["0.weight"], 9)
    x = np.random.default_rng(2).normal(size=(5, 9))
    np.testing.assert_allclose(local.forward(x), dense.forward(x), rtol=1e-14)


def test_a_stack_shrinks_on_the_first_columns_of_its_weights() -> None:
    layer = mg.LocallyConnected(12, WINDOW, "tanh", bias="layer")
    network = float64_network([layer] * 3, 3)
    assert (network.n_in, network.n_out) == (12, 3)
    assert {name: array.shape for name, array in network.parameters.items()} == {
        "0.weight": (WINDOW, 9),
        "0.bias": (1,),
    }
    network.parameters["0.bias"] = [0.005]
    weight, y = network.parameters["0.weight"], np.random.default_rng(4).normal(size=(2, 12))
    expected = y
    for width in (12, 9, 6):
        n = width - WINDOW + 1
        expected = np.tanh(expected @ band(weight[:, :n], width) + 0.005)
    np.testing.assert_allclose(network.forward(y), expected, rtol=1e-13)


@pytest.mark.parametrize("activation", ["tanh", "gelu"])  # whose backward passes read y, and z
@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_threads_share_rows_or_columns_with_the_bits_of_one(batch_size: int, activation: str) -> None:
    random = np.random.default_rng(7)
    data = mg.Dataset(random.normal(size=(7, 2100)).astype(np.float32), random.normal(size=(7, 2092)))

    def trained(threads: int) -> np.ndarray:
        layers = [mg.LocallyConnected(2100, 5, activation), mg.LocallyConnected(2096, 5, activation, bias="layer")]
        network = mg.Network(layers, seed=3)
        options: Any = {"batch_size": batch_size, "backend": "cpu", "threads": threads}
        mg.Trainer(network, "mean_squared_error", mg.Adam(0.02), **options).fit(data, 3, progress=False)
        return network.flat_parameters()

    for threads in (2, 3):
        np.testing.assert_array_equal(trained(threads), trained(1))


def test_a_stack_learns_and_is_saved(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    x = random.normal(size=(64, 20)).astype(np.float32)
    layer = mg.LocallyConnected(20, 3, "tanh")
    network = mg.Network([layer, layer, mg.LocallyConnected(16, 5, bias=None)], seed=6)
    data = mg.Dataset(x, 0.1 * np.cumsum(x, axis=1)[:, 4:16])
    history = mg.Trainer(network, "mean_squared_error", mg.Adam(0.02), batch_size=16, backend="cpu").fit(
        data, epochs=40, progress=False
    )
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    network.save(tmp_path / "local.h5")
    twin = mg.load(tmp_path / "local.h5")
    assert twin.layers == network.layers and twin.layers[0] is twin.layers[1]
    np.testing.assert_array_equal(twin.predict(x, backend="cpu"), network.predict(x, backend="cpu"))


def test_arithmetic_counts_what_is_used() -> None:
    layer = mg.LocallyConnected(12, WINDOW)
    plan = mg.Network([layer, layer], seed=1).lower(capacity=5, loss="squared_error", optimizer=mg.SGD(0.1))
    counted = [plan.flops(operation, 5) for operation in plan.training]
    # Forward on 9 and 6 outputs; backward, the weights' gradient for both and dx for the upper one.
    assert [count for count in counted if count] == [2 * 5 * 4 * n for n in (9, 6, 2 * 6, 9)]


@pytest.mark.parametrize("bias", ["output", "layer", None])
@pytest.mark.parametrize("width", [WINDOW, 9, 64])
def test_threads_share_out_a_layer(width: int, bias: Literal["output", "layer"] | None) -> None:
    # The layer below makes the one in question have a dx.
    layers = [mg.Dense(width, width, "tanh"), mg.LocallyConnected(width, WINDOW, "gelu", bias)]
    random = np.random.default_rng(8)
    x, y = random.normal(size=(2, 10, width)).astype(np.float32)
    found = []
    for threads in (1, 2, 3):
        network = mg.Network([*layers, mg.Dense(width - WINDOW + 1, width)], seed=7)
        trainer = mg.Trainer(network, "squared_error", mg.SGD(0.1), batch_size=2, backend="cpu", threads=threads)
        trainer.fit(mg.Dataset(x, y), epochs=2, progress=False)
        found.append((network.flat_parameters().copy(), network.predict(x, backend="cpu")))
    for parameters, outputs in found[1:]:
        np.testing.assert_allclose(parameters, found[0][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs, found[0][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"n_in": 0, "window": 1}, ConfigurationError, ["n_in", "0"]),
        ({"n_in": 5, "window": 0}, ConfigurationError, ["window", "0"]),
        ({"n_in": 5, "window": 6}, ConfigurationError, ["window", "at most n_in, 5", "6"]),
        ({"n_in": 5.0, "window": 2}, DtypeError, ["n_in"]),
        ({"n_in": 5, "window": 2, "activation": "rulu"}, UnknownNameError, ["activation", "rulu", "relu"]),
        ({"n_in": 5, "window": 2, "bias": "row"}, UnknownNameError, ["bias", "row", "layer"]),
        ({"n_in": 5, "window": 2, "bias": True}, MlpgpuError, ["bias", "True"]),
        ({"n_in": 5, "window": 2, "init": "zero"}, UnknownNameError, ["init", "zero"]),
    ],
)
def test_arguments_without_meaning(arguments: dict, error: type[MlpgpuError], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        mg.LocallyConnected(**arguments)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_widths_that_do_not_fit() -> None:
    layer = mg.LocallyConnected(6, WINDOW)
    with pytest.raises(ShapeError, match="4 to 6 columns, got 7 columns"):
        mg.Network([mg.Dense(3, 7), layer])
    with pytest.raises(ShapeError, match="4 to 6 columns, got 3 columns"):
        mg.Network([layer, layer])
