"""The network of an estimator, and its initial values, which are scikit-learn's."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from ..layers import Dense, Dropout, Layer, Standardize
from ..network import Network
from .settings import Settings

MOST_SEED = 2**31 - 1


def layers_of(settings: Settings, n_in: int, n_out: int, *, scales_targets: bool) -> list[Layer]:
    """Dense layers, with dropouts between, from inputs to logits; standardized at both ends where that is asked for."""
    layers: list[Layer] = [Standardize(n_in)] if settings.standardize else []
    width = n_in
    for hidden, rate in zip(settings.hidden, settings.dropout, strict=True):
        layers.append(Dense(width, hidden, activation=settings.activation))  # type: ignore[arg-type]
        if rate:
            layers.append(Dropout(rate))
        width = hidden
    layers.append(Dense(width, n_out))
    if settings.standardize and scales_targets:
        layers.append(Standardize(n_out))
    return layers


def build(layers: Sequence[Layer], activation: str, random: np.random.RandomState) -> Network:
    """A network of these layers, with the values that scikit-learn's estimators draw of the same ``random``.

    They are uniform on [-a, a] for weights (n_in, n_out) and their biases alike, a = √(6 / (n_in + n_out)), and 2 for 6
    before the logistic sigmoid (Glorot and Bengio, AISTATS 2010, equation 16).  The seed of dropouts and shuffles is
    what a copy of ``random`` would draw next, so that ``random`` itself goes on to the split that scikit-learn makes.
    """
    values = {}
    for place, layer in enumerate(layers):
        if isinstance(layer, Dense):
            a = np.sqrt((2.0 if activation == "sigmoid" else 6.0) / (layer.n_in + layer.n_out))
            values[f"{place}.weight"] = random.uniform(-a, a, (layer.n_in, layer.n_out))
            values[f"{place}.bias"] = random.uniform(-a, a, layer.n_out)
    network = Network(layers, seed=int(copy.deepcopy(random).randint(MOST_SEED)))
    network.parameters = values
    return network


def dense_places(network: Network) -> list[int]:
    """The places of the layers with weights."""
    return [place for place, layer in enumerate(network.layers) if isinstance(layer, Dense)]
