"""Networks to export, and how far another program's predictions may be from ours."""

from __future__ import annotations

import numpy as np

import mlpgpu as mg
from mlpgpu.layers import input_width

ROWS = 40
OUTPUT_LOSS = {
    "identity": "mean_squared_error",
    "sigmoid": "binary_cross_entropy",
    "softmax": "softmax_cross_entropy",
    "exp": "poisson",
}


def inputs(width: int, precision: str = "float32") -> np.ndarray:
    """(ROWS, width), each column with another mean and deviation."""
    random = np.random.default_rng(5)
    return (random.standard_normal((ROWS, width)) * np.arange(1, width + 1) + 3.0).astype(precision)


def trained(layers: list[mg.layers.Layer], output: str = "identity", precision: str = "float32") -> mg.Network:
    """A network of two steps of a training that gives it this output."""
    net = mg.Network(layers, seed=3)
    x = inputs(net.n_in, precision)
    count = net.n_out
    random = np.random.default_rng(6)
    y = random.integers(count, size=ROWS) if output == "softmax" else random.integers(2, size=(ROWS, count))
    if output == "identity":
        y = random.standard_normal((ROWS, count)) * 7.0 + 20.0
    trainer = mg.Trainer(net, OUTPUT_LOSS[output], mg.Adam(0.01), precision=precision, batch_size=20, backend="cpu")
    trainer.fit((x, y if output == "softmax" else y.astype(precision)), epochs=1, progress=False)
    return net


def stack(activation: str, *, standardized: bool = True, dropout: float = 0.2) -> list[mg.layers.Layer]:
    """Two hidden layers of this activation, the second one without a bias, between standardized inputs and targets."""
    first = [mg.Standardize(5)] * standardized
    return [
        *first,
        mg.Dense(5, 9, activation),
        mg.Dropout(dropout),
        mg.Dense(9, 8, activation, bias=False),
        mg.Dense(8, 3),
        *[mg.Standardize(3)] * standardized,
    ]


def bound(net: mg.Network, predictions: np.ndarray, precision: str | None = None) -> float:
    """How far two computations of these predictions may lie apart that sum in other orders.

    A sum of k products errs by at most k roundings, and an activation by a few; here numbers inside are of the order of
    those that come out, or of 1.
    """
    width, roundings = input_width(net.layers), 0
    for layer in net.layers:
        roundings += width + 8
        width = layer.output_width(width)
    return 2 * roundings * float(np.finfo(precision or net.dtype).eps) * max(1.0, float(np.abs(predictions).max()))
