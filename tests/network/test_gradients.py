"""Gradients against central differences of the loss in float64: every layer × activation × loss × weights × shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers import EPS, LOSS_KINDS, LOSS_OF, STEP, Oracle, dataset

from mlpgpu import Dense, Dropout, LocallyConnected, Network, Standardize
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.layers import LAYERS, Layer
from mlpgpu.losses import TargetKind

ROWS, N_IN, N_OUT = 5, 3, 2


def tied(activation: str) -> list[Layer]:
    twice = Dense(3, 3, activation)
    return [twice, Dense(3, 3), twice, Dense(3, N_OUT)]


def shrinking(activation: str) -> list[Layer]:
    """One layer on 6, 5 and 4 columns in turn."""
    stack = LocallyConnected(6, 2, activation, bias="layer")
    return [Dense(N_IN, 6), stack, stack, stack, Dense(3, N_OUT)]


NETWORKS: dict[str, Callable[[str], list[Layer]]] = {
    "one layer": lambda activation: [Dense(N_IN, N_OUT, activation)],
    "three layers": lambda activation: [Dense(N_IN, 4, activation), Dense(4, 3, activation), Dense(3, N_OUT)],
    "no bias": lambda activation: [Dense(N_IN, 4, activation, bias=False), Dense(4, N_OUT, bias=False)],
    "tied": tied,
    "locally connected": lambda activation: [
        LocallyConnected(N_IN, 2, activation),
        Dense(2, 5),
        LocallyConnected(5, 4, bias=None),
    ],
    "shrinking": shrinking,
    "dropout": lambda activation: [Dropout(0.3), Dense(N_IN, 6, activation), Dropout(0.4), Dense(6, N_OUT)],
    "standardize first": lambda activation: [Standardize(N_IN), Dense(N_IN, 4, activation), Dense(4, N_OUT)],
    "standardize last": lambda activation: [Dense(N_IN, 4, activation), Dense(4, N_OUT), Standardize(N_OUT)],
    "frozen": lambda activation: [
        Dense(N_IN, 4, activation, trainable=False),
        Dense(4, 5, activation),
        LocallyConnected(5, 2, activation, trainable=False),
        Dense(4, N_OUT, activation),
        Dense(N_OUT, N_OUT, trainable=False),
    ],
    "dropout last": lambda activation: [Dense(N_IN, N_OUT, activation), Dropout(0.2)],
}


def check(network: Network, oracle: Oracle) -> None:
    """Compare the gradient of each parameter array with differences along a random direction."""
    random = np.random.default_rng(6)
    w = network.flat_parameters().astype(np.float64)
    w += 0.1 * random.normal(size=w.shape)  # biases begin at 0, where relu would bend
    gradient = oracle.gradient(w)
    for parameter in oracle.plan.parameters:
        direction = np.zeros_like(w)
        part = slice(parameter.offset, parameter.end)
        if not parameter.trainable:
            assert not gradient[part].any(), parameter.name
            continue
        direction[part] = random.normal(size=parameter.size)
        direction /= np.linalg.norm(direction)
        losses = [oracle.loss(w + k * STEP * direction) for k in (-2, -1, 1, 2)]
        near, far = (losses[2] - losses[1]) / (2.0 * STEP), (losses[3] - losses[0]) / (4.0 * STEP)
        # The difference over 2h errs by h² f‴/6, that over 4h by four times as much: their distance is three
        # times what the first one errs by.  The loss sums up some hundred products, each rounded once.
        bound = abs(far - near) + 100.0 * EPS * max(1.0, *losses) / STEP
        assert bound <= 1e-6 * max(1.0, np.linalg.norm(gradient)), "too coarse a difference to tell anything"
        assert abs(near - gradient @ direction) <= bound, parameter.name


# Only a regression's targets are standardized.
CASES = [
    (layers, loss, kind)
    for layers in NETWORKS
    for loss, kind in LOSS_KINDS
    if layers != "standardize last" or LOSS_OF[loss].output == "identity"
]


def gradient_cases() -> Iterator[Any]:
    """Every network with every loss and activation; of losses and activations each with one of the others is quick."""
    for (layers, loss, kind), activation, weighted in product(CASES, ACTIVATIONS, (True, False)):
        is_quick = weighted and (activation == "tanh" or loss == "squared_error")
        yield pytest.param(layers, loss, kind, activation, weighted, marks=[] if is_quick else [pytest.mark.thorough])


@pytest.mark.parametrize(("layers", "loss", "kind", "activation", "weighted"), list(gradient_cases()))
def test_gradient(layers: str, loss: str, kind: TargetKind, activation: str, weighted: bool) -> None:
    data = dataset(loss, kind, rows=ROWS, n_in=N_IN, n_out=N_OUT, weighted=weighted, seed=2)
    network = Network(NETWORKS[layers](activation), seed=4)
    network.adapt(data)
    for shards in (1, 3):
        for loops in (False, True):
            check(network, Oracle(network, data, loss, kind, shards=shards, loops=loops))


def test_every_layer_is_checked() -> None:
    used = {type(layer) for layers in NETWORKS.values() for layer in layers("relu")}
    assert used == set(LAYERS.values())


@pytest.mark.parametrize("index", range(4))
def test_each_element(index: int) -> None:
    # Every element on its own, once: a direction could hide two errors that cancel.
    loss, kind = LOSS_KINDS[-1 - index]
    data = dataset(loss, kind, rows=ROWS, n_in=N_IN, n_out=N_OUT, weighted=True, seed=3)
    network = Network(tied("tanh"), seed=4)
    oracle = Oracle(network, data, loss, kind, shards=2)
    w = network.flat_parameters().astype(np.float64)
    difference = [(oracle.loss(w + h) - oracle.loss(w - h)) / (2.0 * STEP) for h in STEP * np.eye(len(w))]
    # As above, with third derivatives under 60: inputs reach 3, and a weight acts twice.
    np.testing.assert_allclose(oracle.gradient(w), difference, rtol=0, atol=10.0 * STEP**2 + 100.0 * EPS / STEP)


def test_more_shares_than_rows() -> None:
    for activation in ACTIVATIONS:
        data = dataset("huber", "dense", rows=2, n_in=N_IN, n_out=N_OUT)
        network = Network(NETWORKS["three layers"](activation), seed=4)
        w = network.flat_parameters().astype(np.float64)
        whole, shared = (Oracle(network, data, "huber", shards=shards).gradient(w) for shards in (1, 5))
        # The same two terms in another order, and a subtraction from parameters under 2.
        np.testing.assert_allclose(shared, whole, rtol=0, atol=8 * EPS)
