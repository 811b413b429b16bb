"""Activations: every row against its own formula, its derivative against differences, and at the ends of the range."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from helpers import EPS, EPS32, STEP

from mlpgpu.activations import ACTIVATIONS, GELU_BLOCK, LEAKY_SLOPE, Activation

EACH = pytest.mark.parametrize("activation", list(ACTIVATIONS.values()), ids=list(ACTIVATIONS))

# What gelu's Φ may be off by, as activations.py states it; it enters gelu times z.
CDF_ERROR = {np.dtype(np.float64): 1e-14, np.dtype(np.float32): 7e-8}


def forward(activation: Activation, z: np.ndarray) -> np.ndarray:
    y = np.full_like(z, np.nan)
    with np.errstate(over="ignore"):
        activation.forward(z, y, np.full_like(z, np.nan))
    return y


def backward(activation: Activation, z: np.ndarray, dy: np.ndarray) -> np.ndarray:
    saved = z if activation.saves == "z" else forward(activation, z)
    dz = np.full_like(z, np.nan)
    with np.errstate(over="ignore"):
        activation.backward(saved, dy, dz, np.full_like(z, np.nan))
    return dz


def by_formula(formula: str, z: float) -> float:
    """``formula`` evaluated by Python's own functions."""
    expression = re.sub(r"([\d.]+) z", r"\1 * z", formula).replace("·", "*").replace("√2", "sqrt(2)")
    return eval(expression, {"exp": math.exp, "log": math.log, "tanh": math.tanh, "erf": math.erf, "sqrt": math.sqrt,
                             "max": max, "z": z})  # fmt: skip


POINTS = np.concatenate([np.linspace(-40.0, 40.0, 321), [1e-8, -1e-8, 700.0, -700.0]])


@EACH
def test_forward_is_the_formula(activation: Activation) -> None:
    # Neither side takes more than eight roundings of numbers up to 1 + |z|.
    bound = (8 * EPS + CDF_ERROR[POINTS.dtype]) * (1.0 + np.abs(POINTS))
    expected = [by_formula(activation.formula, z) for z in POINTS.tolist()]
    assert (np.abs(forward(activation, POINTS) - expected) <= bound).all()


@EACH
def test_float32_follows_float64(activation: Activation) -> None:
    z = POINTS.astype(np.float32)
    dy = np.ones_like(z)
    bound = (8 * EPS32 + CDF_ERROR[z.dtype]) * (1.0 + np.abs(z, dtype=np.float64))
    for function, arguments in ((forward, (z,)), (backward, (z, dy))):
        narrow = function(activation, *arguments)
        wide = function(activation, *(a.astype(np.float64) for a in arguments))
        assert narrow.dtype == np.float32
        assert (np.abs(narrow - wide) <= bound).all()


@EACH
def test_backward_is_the_derivative(activation: Activation) -> None:
    random = np.random.default_rng(1)
    z, dy = random.normal(scale=3.0, size=(2, 500))
    assert np.abs(z).min() > STEP  # no difference straddles a kink at 0
    difference = (forward(activation, z + STEP) - forward(activation, z - STEP)) / (2.0 * STEP)
    # Third derivatives stay under 3; f has at most eight roundings and Φ's error, of numbers up to 1 + |z|.
    rounding = (8 * EPS + 2 * CDF_ERROR[z.dtype]) * (1.0 + np.abs(z)) / STEP
    assert (np.abs(backward(activation, z, dy) - dy * difference) <= np.abs(dy) * (STEP**2 / 2.0 + rounding)).all()


@EACH
def test_arrays_may_be_shared(activation: Activation) -> None:
    z, dy = np.random.default_rng(2).normal(size=(2, 7, 5))
    scratch = np.empty_like(z)
    y, dz = forward(activation, z), backward(activation, z, dy)
    if activation.saves == "y":
        place = z.copy()
        activation.forward(place, place, scratch)
        assert (place == y).all()
    place = dy.copy()
    activation.backward(z if activation.saves == "z" else y, place, place, scratch)
    assert (place == dz).all()


@EACH
@pytest.mark.parametrize("shape", [(5,), (1, 1), (3, 7), (2, GELU_BLOCK + 1), (GELU_BLOCK + 1, 2), (0, 4)])
def test_any_shape(activation: Activation, shape: tuple[int, ...]) -> None:
    z = np.random.default_rng(3).normal(size=shape)
    assert (forward(activation, z) == forward(activation, z.ravel()).reshape(shape)).all()
    dz = backward(activation, z, np.ones(shape))
    assert (dz == backward(activation, z.ravel(), np.ones(z.size)).reshape(shape)).all()


@EACH
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_far_out_it_stays_finite(activation: Activation, dtype: type) -> None:
    z = np.array([-1e30, -1e4, 1e4, 1e30], dtype)
    assert np.isfinite(forward(activation, z)).all()
    slopes = backward(activation, z, np.ones_like(z))
    assert (np.abs(slopes) <= 1.0).all()


@pytest.mark.parametrize(("name", "slope"), [("relu", 0.0), ("leaky_relu", LEAKY_SLOPE), ("elu", 1.0)])
def test_slope_at_the_kink(name: str, slope: float) -> None:
    assert backward(ACTIVATIONS[name], np.zeros(1), np.ones(1)) == slope


@pytest.mark.parametrize(("dtype", "bound"), list(CDF_ERROR.items()), ids=str)
def test_gelu_has_the_normal_distribution(dtype: np.dtype, bound: float) -> None:
    """Φ(z) = gelu(z) / z, which is odd about ½, 0 and 1 far out."""
    gelu = ACTIVATIONS["gelu"]
    z = np.concatenate([np.linspace(0.01, 9.0, 4001), np.geomspace(10.0, 1e30, 50)]).astype(dtype)
    expected = np.array([0.5 + 0.5 * math.erf(v / math.sqrt(2.0)) for v in z.tolist()])
    found, mirrored = forward(gelu, z) / z, forward(gelu, -z) / -z
    rounding = 2.0 * np.finfo(dtype).eps
    assert found.dtype == dtype
    assert (np.abs(found - expected) <= bound + rounding).all()
    assert (np.abs(mirrored - (1.0 - expected)) <= bound + rounding).all()
    assert (found[-50:] == 1.0).all() and (mirrored[-50:] == 0.0).all()
    assert np.isnan(forward(gelu, np.array([np.nan], dtype))).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 5), (4097, 9), (2, GELU_BLOCK + 7), (0, 4)])
def test_gelu_has_the_same_bits_in_blocks(shape: tuple[int, int], dtype: type) -> None:
    """Whatever lies beside an element in its block, and whether the result takes the argument's place."""
    random = np.random.default_rng(0)
    z = (4.0 * random.normal(size=shape)).astype(dtype)
    dy = random.normal(size=shape).astype(dtype)
    gelu = ACTIVATIONS["gelu"]
    y, dz = forward(gelu, z), backward(gelu, z, dy)
    for row in range(0, len(z), 500):
        one = slice(row, row + 1)
        assert np.array_equal(forward(gelu, z[one]), y[one]) and np.array_equal(
            backward(gelu, z[one], dy[one]), dz[one]
        )
    in_place, delta = z.copy(), dy.copy()
    gelu.forward(in_place, in_place, np.empty_like(z))
    gelu.backward(z, delta, delta, np.empty_like(z))
    assert np.array_equal(in_place, y) and np.array_equal(delta, dz)
