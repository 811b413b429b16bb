"""Activations: one row of :data:`ACTIVATIONS` each, ``y = f(z)`` and ``dz = dy · f′(z)``.

Functions write to arrays that they are given, work element by element on any shape in either
precision, and allocate nothing that grows with it.  A row says which array the derivative is
computed from, ``z`` or ``y``; the plan keeps that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.polynomial import chebyshev

LEAKY_SLOPE = 0.01
ERF_BLOCK = 32_768  # elements; bounds the temporaries of erf, which stay in a core's cache


@dataclass(frozen=True)
class Activation:
    """One activation function.

    Attributes:
        forward: ``forward(z, y, scratch)`` writes f(z) to ``y``, which may be ``z``.
        backward: ``backward(saved, dy, dz, scratch)`` writes dy · f′ to ``dz``, which may be ``dy``.
            Here as in ``forward``, ``scratch`` has the shape of the others and is overwritten.
        saves: whether ``saved`` is ``"z"`` or ``"y"``; if ``"z"``, a training step's forward keeps it apart.
        initializer: the scheme for the weights before it that keeps variances alike across layers.
        formula: for people.
    """

    forward: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    backward: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
    saves: Literal["y", "z"]
    initializer: str
    formula: str


def _identity(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    if y is not z:
        np.copyto(y, z)


def _identity_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    if dz is not dy:
        np.copyto(dz, dy)


def sigmoid(z: np.ndarray, y: np.ndarray) -> None:
    """Write 1 / (1 + exp(-z)) to ``y``, which may be ``z``; where exp overflows, the result is 0."""
    np.negative(z, out=y)
    np.exp(y, out=y)
    np.add(y, 1.0, out=y)
    np.divide(1.0, y, out=y)


def _sigmoid(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    sigmoid(z, y)


def _sigmoid_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.subtract(1.0, y, out=scratch)
    np.multiply(scratch, y, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _tanh(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    np.tanh(z, out=y)


def _tanh_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.multiply(y, y, out=scratch)
    np.subtract(1.0, scratch, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _relu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    floor = scratch[:1]  # NumPy compares with a row nearly twice as fast as with a number
    floor.fill(0.0)
    np.maximum(z, floor, out=y)


def _relu_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.sign(y, out=scratch)  # y is never negative, so its sign is the step function
    np.multiply(dy, scratch, out=dz)


def _leaky_relu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    np.multiply(z, LEAKY_SLOPE, out=scratch)
    np.maximum(z, scratch, out=y)


def _leaky_relu_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.sign(y, out=scratch)
    np.maximum(scratch, LEAKY_SLOPE, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _elu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    np.minimum(z, 0.0, out=scratch)
    np.expm1(scratch, out=scratch)
    np.maximum(z, 0.0, out=y)
    np.add(y, scratch, out=y)


def _elu_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.minimum(y, 0.0, out=scratch)
    np.add(scratch, 1.0, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _softplus(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    np.logaddexp(z, 0.0, out=y)


def _softplus_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.negative(y, out=scratch)  # sigmoid(z) = 1 - exp(-y), and expm1 keeps the small ones exact
    np.expm1(scratch, out=scratch)
    np.negative(scratch, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _silu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    sigmoid(z, scratch)
    np.multiply(z, scratch, out=y)


def _silu_backward(z: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    sigmoid(z, scratch)
    np.multiply(dy, scratch, out=dz)  # f′ = s · (1 + z · (1 - s))
    np.subtract(1.0, scratch, out=scratch)
    np.multiply(scratch, z, out=scratch)
    np.add(scratch, 1.0, out=scratch)
    np.multiply(dz, scratch, out=dz)


# erf(x) = 1 - exp(-x²) · g(x) for x >= 0, where g(x) = exp(x²) · erfc(x) varies slowly: a Chebyshev
# series in 1 / (1 + x/2) converges by a digit per term.  From ERF_END on, erf is 1 in float64.
# (SciPy has an erf, but importing it takes longer than importing all of this package.)
ERF_END = 6.0
_T_END = 1.0 / (1.0 + ERF_END / 2.0)


def _erf_argument(x: np.ndarray, u: np.ndarray) -> None:
    """Map x in [0, ERF_END] to ``u`` in [-1, 1], from the end to the beginning."""
    np.divide(x, 2.0, out=u)
    np.add(u, 1.0, out=u)
    np.divide(2.0, u, out=u)
    np.subtract(u, 1.0 + _T_END, out=u)
    np.divide(u, 1.0 - _T_END, out=u)


def _erf_series(degree: int) -> np.ndarray:
    def scaled_erfc(u: np.ndarray) -> np.ndarray:
        x = 2.0 * (2.0 / ((1.0 - _T_END) * u + (1.0 + _T_END)) - 1.0)
        return np.array([math.exp(v * v) * math.erfc(v) for v in x.tolist()])

    return chebyshev.chebinterpolate(scaled_erfc, degree)


_ERF_SERIES = {np.dtype(np.float64): _erf_series(18), np.dtype(np.float32): _erf_series(12).astype(np.float32)}


class _Erf:
    """The error function of blocks of an array, in place, with room for blocks of ``block``'s shape and type."""

    def __init__(self, block: np.ndarray) -> None:
        self._room = np.empty((6, *block.shape), block.dtype)
        self._series = list(_ERF_SERIES[block.dtype])

    def __call__(self, x: np.ndarray) -> None:
        """Write erf(x) to ``x``, a block of as many rows or fewer."""
        magnitude, u, twice, b1, b0, room = self._room[:, : len(x)]
        np.minimum(np.abs(x, out=magnitude), ERF_END, out=magnitude)
        _erf_argument(magnitude, u)
        # Clenshaw's recurrence, as NumPy's chebval has it, but without its temporaries.
        *series, second, last = self._series
        np.multiply(u, 2.0, out=twice)
        b1.fill(last)
        b0.fill(second)
        for coefficient in reversed(series):
            np.multiply(b1, twice, out=room)
            np.add(b0, room, out=room)
            np.subtract(coefficient, b1, out=b0)
            b1, room = room, b1
        np.multiply(b1, u, out=b1)
        np.add(b0, b1, out=b0)
        np.negative(magnitude, out=u)
        np.multiply(u, magnitude, out=u)
        np.exp(u, out=u)
        np.multiply(u, b0, out=u)
        np.subtract(1.0, u, out=u)
        np.copysign(u, x, out=x)


def _blocks(z: np.ndarray) -> list[slice]:
    """Slices of the first axis that hold about ERF_BLOCK elements each; the first one is the longest."""
    rows = max(1, ERF_BLOCK * len(z) // max(1, z.size))
    return [slice(start, min(start + rows, len(z))) for start in range(0, len(z), rows)]


def erf(x: np.ndarray) -> np.ndarray:
    """The error function of ``x``, any shape; within 1e-14 in float64 and 3e-7 in float32."""
    result = np.array(x, ndmin=1)
    blocks = _blocks(result)
    write = _Erf(result[blocks[0]]) if blocks else None
    for rows in blocks:
        assert write is not None
        write(result[rows])
    return result.reshape(np.shape(x))


def _gelu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    blocks = _blocks(z)
    if not blocks:
        return
    write_erf = _Erf(scratch[blocks[0]])
    for rows in blocks:
        x, s = z[rows], scratch[rows]
        np.multiply(x, math.sqrt(0.5), out=s)
        write_erf(s)
        np.add(s, 1.0, out=s)
        np.multiply(s, 0.5, out=s)
        np.multiply(x, s, out=y[rows])


def _gelu_backward(z: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    density_at_0 = 1.0 / math.sqrt(2.0 * math.pi)
    blocks = _blocks(z)
    if not blocks:
        return
    write_erf, room = _Erf(scratch[blocks[0]]), np.empty_like(scratch[blocks[0]])
    for rows in blocks:
        x, s = z[rows], scratch[rows]
        term = room[: len(x)]
        np.multiply(x, math.sqrt(0.5), out=s)
        write_erf(s)
        np.add(s, 1.0, out=s)
        np.multiply(s, 0.5, out=s)
        np.multiply(x, x, out=term)
        np.multiply(term, -0.5, out=term)
        np.exp(term, out=term)
        np.multiply(term, density_at_0, out=term)
        np.multiply(term, x, out=term)
        np.add(s, term, out=s)
        np.multiply(dy[rows], s, out=dz[rows])


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(_identity, _identity_backward, "y", "glorot_uniform", "z"),
    "sigmoid": Activation(_sigmoid, _sigmoid_backward, "y", "glorot_uniform", "1 / (1 + exp(-z))"),
    "tanh": Activation(_tanh, _tanh_backward, "y", "glorot_uniform", "tanh(z)"),
    "relu": Activation(_relu, _relu_backward, "y", "he_uniform", "max(z, 0)"),
    "leaky_relu": Activation(_leaky_relu, _leaky_relu_backward, "y", "he_uniform", "max(z, 0.01 z)"),
    "elu": Activation(_elu, _elu_backward, "y", "he_uniform", "z if z > 0 else exp(z) - 1"),
    "softplus": Activation(_softplus, _softplus_backward, "y", "he_uniform", "log(1 + exp(z))"),
    "gelu": Activation(_gelu, _gelu_backward, "z", "he_uniform", "z · (1 + erf(z / √2)) / 2"),
    "silu": Activation(_silu, _silu_backward, "z", "he_uniform", "z / (1 + exp(-z))"),
}
