"""Products of few rows by large weights, which the CPU backend computes by their transposes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import EPS

import mlpgpu as mg
from mlpgpu.backends.cpu.bindings import FEW_ROWS_DX, FEW_ROWS_Y

N_IN, N_HIDDEN, N_OUT = 300, 900, 301
RATE = 0.5


@pytest.mark.parametrize("rows", [1, 5, 32, 33, 63, 64])
def test_a_step_is_the_formula(rows: int) -> None:
    """Rows on both sides of where the transposes begin, for y and for dx."""
    weights = N_IN * N_HIDDEN
    assert FEW_ROWS_Y[0] <= weights and FEW_ROWS_Y[1] * 5**2 <= weights < FEW_ROWS_Y[1] * 33**2
    assert FEW_ROWS_DX[0] <= weights and FEW_ROWS_DX[1] * 64**2 <= weights < FEW_ROWS_DX[1] * 66**2
    rng = np.random.default_rng(rows)
    x, y = rng.standard_normal((rows, N_IN)), rng.standard_normal((rows, N_OUT))
    net = mg.Network([mg.Dense(N_IN, N_HIDDEN, "tanh"), mg.Dense(N_HIDDEN, N_OUT)], seed=1)
    trainer = mg.Trainer(net, "squared_error", mg.SGD(RATE), batch_size=rows, precision="float64", backend="cpu")
    w0, b0, w1, b1 = (value.astype(np.float64) for value in net.parameters.values())
    trainer.step(x, y)
    hidden = np.tanh(x @ w0 + b0)
    dy = (hidden @ w1 + b1 - y) / rows
    dz = dy @ w1.T * (1.0 - hidden**2)
    expected = [w0 - RATE * x.T @ dz, b0 - RATE * dz.sum(axis=0), w1 - RATE * hidden.T @ dy, b1 - RATE * dy.sum(axis=0)]
    # Each number is a sum of no more than N_HIDDEN terms, of sums of as many; all of them are near 1.
    bound = 8 * N_HIDDEN * EPS * max(np.abs(value).max() for value in expected)
    for found, value in zip(net.parameters.values(), expected, strict=True):
        assert (np.abs(found - value) <= bound).all()
