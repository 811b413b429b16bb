"""Predictors: the numbers of a plain chain of products, whatever arrays come, whoever calls, and always current."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu import errors

ROWS = 70


def network(n_in: int = 12, n_out: int = 3) -> mg.Network:
    made = mg.Network([mg.Dense(n_in, 9, "relu"), mg.Dense(9, n_out)], seed=4)
    mg.Trainer(made, "softmax_cross_entropy", mg.SGD(0.1), backend="cpu")  # records the output function
    return made


def inputs(rows: int = ROWS, n_in: int = 12) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, n_in)).astype(np.float32)


def expected(net: mg.Network, x: np.ndarray) -> np.ndarray:
    """Predictions in float64."""
    w = {name: values.astype(np.float64) for name, values in net.parameters.items()}
    z = np.maximum(x @ w["0.weight"] + w["0.bias"], 0.0) @ w["1.weight"] + w["1.bias"]
    exponentials = np.exp(z - z.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_a_predictor_computes_what_the_network_predicts(rows: int) -> None:
    net, x = network(), inputs(rows)
    with net.predictor("cpu") as predictor:
        np.testing.assert_allclose(predictor(x), expected(net, x), atol=1e-6)
        np.testing.assert_array_equal(predictor(x), net.predict(x, backend="cpu"))
        np.testing.assert_array_equal(predictor.logits(x), net.forward(x, backend="cpu"))
        np.testing.assert_array_equal(predictor.labels(x), net.labels(x, backend="cpu"))


def test_a_closed_predictor_says_so() -> None:
    predictor = network().predictor("cpu")
    predictor.close()
    predictor.close()
    for call in (predictor, predictor.logits, predictor.labels):
        with pytest.raises(errors.ConfigurationError, match="closed"):
            call(inputs())
    assert repr(predictor) == "Predictor(12 → 3, output softmax, float32, backend='cpu', closed)"


def test_a_predictor_is_not_pickled() -> None:
    net = network()
    net.predict(inputs(), backend="cpu")
    with pytest.raises(errors.DtypeError, match="pickle the network"):
        pickle.dumps(net.predictor("cpu"))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(net)).forward(inputs()), net.forward(inputs()))


def changes() -> dict[str, Any]:
    def by_step(net: mg.Network) -> None:
        trainer = mg.Trainer(net, "softmax_cross_entropy", mg.SGD(0.5), backend="cpu")
        trainer.step(inputs(8), np.arange(8) % 3)

    def by_name(net: mg.Network) -> None:
        net.parameters["1.bias"] = [3.0, 0.0, -3.0]

    return {"step": by_step, "parameters": by_name}


@pytest.mark.parametrize("change", changes())
def test_a_predictor_follows_its_network(change: str) -> None:
    net, x = network(), inputs()
    predictor = net.predictor("cpu")
    before = predictor(x)
    np.testing.assert_array_equal(net.predict(x, backend="cpu"), before)
    changes()[change](net)
    np.testing.assert_allclose(predictor(x), expected(net, x), atol=1e-6)
    assert np.abs(predictor(x) - before).max() > 1e-4
    np.testing.assert_array_equal(net.predict(x, backend="cpu"), predictor(x))
