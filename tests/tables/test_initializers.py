"""Initializers: distribution, bounds and variance of each, and that values hang on their address alone."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import kstest

from mlpgpu import SGD, Dense, LocallyConnected, Network, Trainer
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.initializers import INITIALIZERS, initial_values
from mlpgpu.network.parameters import FlatParameters
from mlpgpu.plan import Parameter
from mlpgpu.random import Purpose, uniforms

EACH = pytest.mark.parametrize("name", INITIALIZERS)
FANS = (60, 40)

# The variance that the papers named in initializers.py ask for.
VARIANCES = {
    "glorot_uniform": 2.0 / 100,
    "glorot_normal": 2.0 / 100,
    "he_uniform": 2.0 / 60,
    "he_normal": 2.0 / 60,
    "small_uniform": 2.0 / 300,
    "fan_in_uniform": 1.0 / 180,
    "zeros": 0.0,
}


@pytest.mark.parametrize(("name", "variance"), list(VARIANCES.items()))
def test_variance_is_the_paper_s(name: str, variance: float) -> None:
    assert INITIALIZERS[name].variance(*FANS) == variance


@EACH
def test_values_are_distributed_as_the_row_says(name: str) -> None:
    scheme = INITIALIZERS[name]
    count = 20_000
    values = initial_values(name, (count,), FANS, seed=5, layer=2)
    deviation = math.sqrt(scheme.variance(*FANS))
    if scheme.distribution == "constant":
        assert not values.any()
        return
    # The mean of n values spreads by σ/√n, their mean square by σ² √((κ - 1) / n), κ the kurtosis; 5 of each.
    kurtosis = {"uniform": 9.0 / 5.0, "normal": 3.0}[scheme.distribution]
    assert abs(values.mean()) < 5.0 * deviation / math.sqrt(count)
    spread = math.sqrt((kurtosis - 1.0) / count)
    assert abs(np.square(values).mean() / deviation**2 - 1.0) < 5.0 * spread
    if scheme.distribution == "uniform":
        limit = math.sqrt(3.0) * deviation
        assert np.abs(values).max() <= limit
        fit = kstest(values / limit, "uniform", args=(-1.0, 2.0))
    else:
        fit = kstest(values / deviation, "norm")
    assert fit.pvalue > 1e-6  # about as seldom as 5 deviations


@EACH
def test_values_hang_on_seed_and_layer(name: str) -> None:
    values = initial_values(name, (6, 5), (6, 5), seed=1, layer=0)
    assert values.shape == (6, 5) and values.dtype == np.float64
    assert (initial_values(name, (6, 5), (6, 5), seed=1, layer=0) == values).all()
    for address in ({"seed": 2, "layer": 0}, {"seed": 1, "layer": 1}, {"seed": 1, "layer": 0, "replica": 1}):
        other = initial_values(name, (6, 5), (6, 5), **address)
        assert (other == values).all() == (INITIALIZERS[name].distribution == "constant")


@pytest.mark.parametrize("name", [name for name, row in INITIALIZERS.items() if row.distribution == "uniform"])
def test_uniform_values_round_after_each_operation(name: str) -> None:
    u = uniforms(50, seed=3, purpose=Purpose.INITIAL_VALUES, layer=1)
    b = math.sqrt(3.0 * INITIALIZERS[name].variance(10, 5))
    a = -b
    expected = [a + (b - a) * x for x in u.tolist()]  # Python never fuses
    assert initial_values(name, (10, 5), (10, 5), seed=3, layer=1).ravel().tolist() == expected


@EACH
def test_a_network_casts_once(name: str) -> None:
    network = Network([Dense(7, 3, init=name), Dense(3, 2, init=name, bias=False)], seed=11)
    for place, shape in ((0, (7, 3)), (1, (3, 2))):
        weight = network.parameters[f"{place}.weight"]
        assert weight.dtype == np.float32
        assert (weight == initial_values(name, shape, shape, seed=11, layer=place).astype(np.float32)).all()
    assert not network.parameters["0.bias"].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_defaults_of_a_dense_layer(activation: str) -> None:
    network = Network([Dense(7, 3, activation)], seed=11)
    name = {"sigmoid": "he_uniform", "softplus": "glorot_uniform"}.get(activation, "small_uniform")
    weight = initial_values(name, (7, 3), (7, 3), seed=11, layer=0)
    assert (network.parameters["0.weight"] == weight.astype(np.float32)).all()
    purpose = Purpose.INITIAL_BIASES
    bias = initial_values("fan_in_uniform", (3,), (7, 3), seed=11, layer=0, purpose=purpose)
    assert (network.parameters["0.bias"] == bias.astype(np.float32)).all()
    assert np.abs(bias).max() <= 1.0 / math.sqrt(7)


def test_biases_share_no_words_with_weights() -> None:
    network = Network([Dense(9, 9, "relu")], seed=11)
    weight, bias = (network.parameters[f"0.{name}"] for name in ("weight", "bias"))
    limits = [INITIALIZERS[name].limit((9, 9)) for name in ("small_uniform", "fan_in_uniform")]
    assert limits[0] == pytest.approx(limits[1])  # so that the same words would be the same values
    assert not np.isin(bias, weight).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_defaults_of_a_locally_connected_layer_keep_variances(activation: str) -> None:
    network = Network([LocallyConnected(7, 3, activation)], seed=11)
    expected = initial_values(ACTIVATIONS[activation].initializer, (3, 5), (3, 3), seed=11, layer=0)
    assert (network.parameters["0.weight"] == expected.astype(np.float32)).all()
    assert not network.parameters["0.bias"].any()


def test_a_pickle_of_an_older_version_keeps_its_initial_values() -> None:
    def as_it_was(parameter: Parameter) -> Parameter:
        return replace(parameter, initializer="zeros" if parameter.name.endswith("bias") else "he_uniform")

    network = Network([Dense(7, 3, "relu"), Dense(3, 2)], seed=11)
    parameters = tuple(map(as_it_was, network.lower(capacity=1).parameters))
    older = copy.copy(network)
    older.__dict__["_plan"] = replace(network.lower(capacity=1), parameters=parameters)
    older.__dict__["values"] = FlatParameters(parameters, 11)
    loaded = pickle.loads(pickle.dumps(older))
    expected = initial_values("he_uniform", (7, 3), (7, 3), seed=11, layer=0).astype(np.float32)
    assert not loaded.is_new
    Trainer(loaded, "mse", SGD(0.0), backend="cpu").fit((np.ones((4, 7)), np.ones((4, 2))), 1, progress=False)
    assert (loaded.parameters["0.weight"] == expected).all() and not loaded.parameters["0.bias"].any()
    assert pickle.loads(pickle.dumps(network)).is_new
