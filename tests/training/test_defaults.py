"""What somebody gets who says nothing, and that the README's momentum does not diverge on standardized regressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn import datasets as bundled

import mlpgpu as mg
from mlpgpu.errors import DivergenceError
from mlpgpu.names import LossName

Arrays = tuple[np.ndarray, np.ndarray]
REGRESSIONS: dict[str, Callable[[], Arrays]] = {
    "diabetes": lambda: bundled.load_diabetes(return_X_y=True),
    "linnerud": lambda: bundled.load_linnerud(return_X_y=True),
    "friedman1": lambda: bundled.make_friedman1(500, noise=1.0, random_state=0),
    "friedman2": lambda: bundled.make_friedman2(500, noise=50.0, random_state=0),
    "friedman3": lambda: bundled.make_friedman3(500, noise=0.1, random_state=0),
    "regression": lambda: bundled.make_regression(500, 20, noise=10.0, random_state=0),
    "outputs": lambda: bundled.make_regression(500, 12, n_targets=3, noise=10.0, random_state=0),
    "uncorrelated": lambda: bundled.make_sparse_uncorrelated(500, random_state=0),
}


def standardized(arrays: Arrays, seed: int, n_hidden: int = 128, **options: Any) -> mg.Network:
    """The README's network between a standardization of inputs and one of targets."""
    x, y = arrays
    n_in, n_out = x.shape[1], 1 if y.ndim == 1 else y.shape[1]
    layers = [
        mg.Standardize(n_in),
        mg.Dense(n_in, n_hidden, "relu", **options),
        mg.Dropout(0.1),
        mg.Dense(n_hidden, n_out, **options),
        mg.Standardize(n_out),
    ]
    return mg.Network(layers, seed=seed)


def explained(arrays: Arrays, network: mg.Network, loss: LossName, optimizer: mg.Momentum, epochs: int) -> float:
    """R² on the rows that the network was trained on."""
    trainer = mg.Trainer(network, loss, optimizer, backend="cpu", metrics=["r2"])
    trainer.fit(arrays, epochs, progress=False)
    return float(np.mean(trainer.evaluate(arrays)["r2"]))


@pytest.mark.parametrize("loss", ["squared_error", "mean_squared_error"])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_momentum_of_the_readme_does_not_diverge(name: str, loss: LossName) -> None:
    arrays = REGRESSIONS[name]()
    for seed in range(3):
        optimizer = mg.Momentum(0.1, momentum=0.9)
        found = explained(arrays, standardized(arrays, seed), loss, optimizer, epochs=10)
        assert found > 0.0, seed  # better than the mean, which a fit that went wild is not


def test_it_did_by_he_s_initial_values_and_the_error_names_the_usual_rate() -> None:
    arrays = REGRESSIONS["diabetes"]()
    hint = r"a lower rate \(Momentum has 0.01 by default\)"
    with pytest.raises(DivergenceError, match=hint):
        explained(arrays, standardized(arrays, 0, init="he_uniform"), "mean_squared_error", mg.Momentum(0.1), epochs=30)


def test_the_usual_rate_is_not_hinted_at_where_it_was_taken() -> None:
    arrays = REGRESSIONS["diabetes"]()
    network = mg.Network([mg.Dense(10, 1)], seed=0)
    with pytest.raises(DivergenceError, match=r"\((a lower rate, clip_norm=)"):
        explained((arrays[0] * 1e6, arrays[1]), network, "mean_squared_error", mg.Momentum(), epochs=30)


def test_a_width_does_not_change_the_size_of_what_a_layer_gives() -> None:
    """The sum of squares of n ReLU units on d standardized inputs stays under d / 3, and biases' share."""
    x = np.random.default_rng(0).standard_normal((200, 9)).astype(np.float32)
    for width in (16, 128, 1024):
        layer = mg.Network([mg.Dense(9, width, "relu")], seed=2)
        layer.parameters["0.bias"] = np.zeros(width)
        size = np.square(layer.predict(x)).sum(axis=1).mean()
        # Its mean over weights is n d / (3 (n + d)); one draw of n d weights spreads around it.
        assert size == pytest.approx(width * 9 / (3 * (width + 9)), rel=4.0 / np.sqrt(width))


def test_a_classifier_that_is_told_nothing_learns() -> None:
    x, y = bundled.load_wine(return_X_y=True)
    network = mg.Network([mg.Standardize(13), mg.Dense(13, 100, "relu"), mg.Dense(100, 3)], seed=1)
    trainer = mg.Trainer(network, "softmax_cross_entropy", backend="cpu", metrics=["accuracy"])
    assert (trainer.optimizer, trainer.batch_size) == (mg.Adam(0.001), 32)
    train, test = mg.Dataset(x, y).split(0.25, seed=1)
    trainer.fit(train, 40, progress=False)
    assert trainer.evaluate(test)["accuracy"] > 0.95


def test_default_rates() -> None:
    rates = {kind: kind().rate for kind in (mg.Adam, mg.AdamW, mg.RMSprop, mg.Momentum, mg.Nesterov, mg.SGD)}
    assert list(rates.values()) == [0.001, 0.001, 0.001, 0.01, 0.01, 0.03]
