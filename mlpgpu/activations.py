"""Activations: one row of :data:`ACTIVATIONS` each, ``y = f(z)`` and ``dz = dy · f′(z)``.

Functions write to arrays that they are given, work element by element on any shape in either
precision, and allocate nothing that grows with it.  A row says which array the derivative is
computed from, ``z`` or ``y``; the plan keeps that one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial, chebyshev

LEAKY_SLOPE = 0.01
FEW = 1024  # elements, below which a call takes longer than what it computes
GELU_BLOCK = 16_384  # elements; bounds the temporaries of gelu, which stay in a core's cache

_WithSlope = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


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
        with_slope: of those that save z: ``with_slope(z, y, slope, scratch)`` writes f(z) to ``y`` and f′(z) to
            ``slope``, which may be ``z`` but not ``y``; its bits of either are those of the other two functions.
    """

    forward: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    backward: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
    saves: Literal["y", "z"]
    initializer: str
    formula: str
    with_slope: _WithSlope | None = None


def _identity(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    if y is not z:
        np.copyto(y, z)


def _identity_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    if dz is not dy:
        np.copyto(dz, dy)


def _numbers(dtype: np.dtype, *values: float) -> list[np.ndarray]:
    """Arrays () of one type, which ufuncs take in half the time that they need for Python's numbers."""
    return [np.array(value, dtype) for value in values]


class _Constants:
    """Numbers that several activations need, in one type."""

    def __init__(self, dtype: np.dtype) -> None:
        self.zero, self.one, self.slope = _numbers(dtype, 0.0, 1.0, LEAKY_SLOPE)
        self.least, self.infinity = _numbers(dtype, -math.inf, math.inf)


_CONSTANTS = {np.dtype(kind): _Constants(np.dtype(kind)) for kind in (np.float32, np.float64)}


def sigmoid(z: np.ndarray, y: np.ndarray) -> None:
    """Write 1 / (1 + exp(-z)) to ``y``, which may be ``z``; where exp overflows, the result is 0."""
    one = _CONSTANTS[y.dtype].one
    np.negative(z, out=y)
    np.exp(y, out=y)
    np.add(y, one, out=y)
    np.divide(one, y, out=y)


def _sigmoid(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    sigmoid(z, y)


def _sigmoid_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.subtract(_CONSTANTS[y.dtype].one, y, out=scratch)
    np.multiply(scratch, y, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _tanh(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    np.tanh(z, out=y)


def _tanh_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.multiply(y, y, out=scratch)
    np.subtract(_CONSTANTS[y.dtype].one, scratch, out=scratch)
    np.multiply(dy, scratch, out=dz)


# NumPy has vector instructions for clip between two numbers and for comparisons, and none for the maximum with one
# number or for sign; these take fewer calls, though, which is what counts for few elements.


def _relu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    numbers = _CONSTANTS[z.dtype]
    if z.size < FEW:
        np.maximum(z, numbers.zero, out=y)
    else:
        z.clip(numbers.zero, numbers.infinity, out=y)


def _relu_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    if y.size < FEW:
        np.sign(y, out=scratch)  # y is never negative, so its sign is the step function
        np.multiply(dy, scratch, out=dz)
    else:
        np.multiply(dy, np.greater(y, _CONSTANTS[y.dtype].zero), out=dz)


def _leaky_relu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    np.multiply(z, _CONSTANTS[z.dtype].slope, out=scratch)
    np.maximum(z, scratch, out=y)


def _leaky_relu_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    numbers = _CONSTANTS[y.dtype]
    np.sign(y, out=scratch)
    scratch.clip(numbers.slope, numbers.infinity, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _elu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    numbers = _CONSTANTS[z.dtype]
    z.clip(numbers.least, numbers.zero, out=scratch)
    z.clip(numbers.zero, numbers.infinity, out=y)
    np.expm1(scratch, out=scratch)
    np.add(y, scratch, out=y)


def _elu_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    numbers = _CONSTANTS[y.dtype]
    y.clip(numbers.least, numbers.zero, out=scratch)
    np.add(scratch, numbers.one, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _softplus(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    # max(z, 0) + log(1 + exp(-|z|)): NumPy's logaddexp has no vector instructions.
    numbers = _CONSTANTS[z.dtype]
    np.abs(z, out=scratch)
    np.negative(scratch, out=scratch)
    np.exp(scratch, out=scratch)
    np.log1p(scratch, out=scratch)
    z.clip(numbers.zero, numbers.infinity, out=y)
    np.add(y, scratch, out=y)


def _softplus_backward(y: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
    np.negative(y, out=scratch)  # sigmoid(z) = 1 - exp(-y), and expm1 keeps the small ones exact
    np.expm1(scratch, out=scratch)
    np.negative(scratch, out=scratch)
    np.multiply(dy, scratch, out=dz)


def _silu_with_slope(z: np.ndarray, y: np.ndarray, slope: np.ndarray, scratch: np.ndarray) -> None:
    sigmoid(z, scratch)
    np.multiply(z, scratch, out=y)  # f′ = s + y · (1 - s)
    np.subtract(_CONSTANTS[z.dtype].one, scratch, out=slope)
    np.multiply(slope, y, out=slope)
    np.add(slope, scratch, out=slope)


def _silu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    sigmoid(z, scratch)
    np.multiply(z, scratch, out=y)


# Φ(z) = (1 + tanh(z · P(z²))) / 2 in float32: P(0) is √(2 / π), and the six other coefficients are a weighted fit of
# artanh(erf(z / √2)) / z over z² up to 32, found once; Φ is within 7e-8.  Beyond that P grows, so Φ is 0 or 1.
_TANH_SERIES = (
    1.7561742060578922e-09, -1.3226345174643939e-07, 3.964745701523498e-06, -5.5306198191829026e-05,
    -3.259496224927716e-05, 0.03633308410644531, 0.7978849411010742,
)  # fmt: skip
# In float64 the tail ½ erfc(|z| / √2) is exp(-z²/2) · t · P(t), where t = 1 / (1 + s · |z|) and P varies so slowly that
# a polynomial serves for all of (0, 1], as in formula 7.1.26 of Abramowitz and Stegun (1964).
_TAIL_SCALE, _TAIL_DEGREE = 0.25, 18
_FRACTION_LENGTH = 200  # of the continued fraction of erfc, which then has float64's digits from 2 on


def _scaled_erfc(x: float) -> float:
    """exp(x²) · erfc(x) of x >= 0."""
    if x < 2.0:
        return math.exp(x * x) * math.erfc(x)
    fraction = 0.0
    for n in range(_FRACTION_LENGTH, 0, -1):
        fraction = 0.5 * n / (x + fraction)
    return 1.0 / (math.sqrt(math.pi) * (x + fraction))


def _tail_series() -> np.ndarray:
    """The coefficients of the tail's P, the highest power first."""

    def tail(u: np.ndarray) -> Any:
        t = 0.5 * (u + 1.0)
        return np.array([0.5 * _scaled_erfc((1.0 / v - 1.0) / (_TAIL_SCALE * math.sqrt(2.0))) / v for v in t.tolist()])

    series = Chebyshev(chebyshev.chebinterpolate(tail, _TAIL_DEGREE), domain=[0.0, 1.0])
    return np.asarray(series.convert(kind=Polynomial).coef[::-1])


class _Normal(ABC):
    """The normal distribution in one type: Φ, and its density φ."""

    def __init__(self, dtype: np.dtype, series: Sequence[float]) -> None:
        self._first, *self._others = _numbers(dtype, *series)
        self.half, self._minus_half, self._one, self._scale = _numbers(dtype, 0.5, -0.5, 1.0, _TAIL_SCALE)
        (self._density_at_0,) = _numbers(dtype, 1.0 / math.sqrt(2.0 * math.pi))

    @abstractmethod
    def write(self, z: np.ndarray, distance: np.ndarray, room: np.ndarray) -> None:
        """Write Φ(z) - ½ to ``distance``; ``room`` is overwritten, all of one shape."""

    def write_density(self, z: np.ndarray, density: np.ndarray) -> None:
        """Write φ(z) = exp(-z²/2) / √(2π) to ``density``."""
        np.multiply(z, z, out=density)
        np.multiply(density, self._minus_half, out=density)
        np.exp(density, out=density)
        np.multiply(density, self._density_at_0, out=density)

    def _write_polynomial(self, x: np.ndarray, y: np.ndarray) -> None:
        """Write the series at ``x`` to ``y``."""
        np.multiply(x, self._first, out=y)
        *others, last = self._others
        for coefficient in others:
            np.add(y, coefficient, out=y)
            np.multiply(y, x, out=y)
        np.add(y, last, out=y)


class _NormalByTanh(_Normal):
    def write(self, z: np.ndarray, distance: np.ndarray, room: np.ndarray) -> None:
        np.multiply(z, z, out=room)
        self._write_polynomial(room, distance)
        np.multiply(distance, z, out=distance)
        np.tanh(distance, out=distance)
        np.multiply(distance, self.half, out=distance)


class _NormalByTail(_Normal):
    def write(self, z: np.ndarray, distance: np.ndarray, room: np.ndarray) -> None:
        np.abs(z, out=room)
        np.multiply(room, self._scale, out=room)
        np.add(room, self._one, out=room)
        np.divide(self._one, room, out=room)
        self._write_polynomial(room, distance)
        np.multiply(distance, room, out=distance)
        np.multiply(z, z, out=room)
        np.multiply(room, self._minus_half, out=room)
        np.exp(room, out=room)
        np.multiply(distance, room, out=distance)
        np.subtract(self.half, distance, out=distance)
        np.copysign(distance, z, out=distance)


_NORMAL: dict[np.dtype, _Normal] = {
    np.dtype(np.float32): _NormalByTanh(np.dtype(np.float32), _TANH_SERIES),
    np.dtype(np.float64): _NormalByTail(np.dtype(np.float64), _tail_series().tolist()),
}


def _blocks(z: np.ndarray) -> list[slice]:
    """Slices of the first axis that hold about GELU_BLOCK elements each; the first one is the longest."""
    rows = max(1, GELU_BLOCK * len(z) // max(1, z.size))
    return [slice(start, min(start + rows, len(z))) for start in range(0, len(z), rows)]


def _gelu_parts(z: np.ndarray, y: np.ndarray, slope: np.ndarray | None, scratch: np.ndarray) -> None:
    """f(z) to ``y`` and, if it is wanted, f′(z) = Φ(z) + z · φ(z) to ``slope``, which may be ``z`` but not ``y``."""
    normal = _NORMAL[z.dtype]
    blocks = _blocks(z)
    if not blocks:
        return
    first_room = np.empty_like(z[blocks[0]])
    for rows in blocks:
        x, cdf = z[rows], scratch[rows]
        room = first_room[: len(x)]
        normal.write(x, cdf, room)
        np.add(cdf, normal.half, out=cdf)
        if slope is None:
            np.multiply(x, cdf, out=y[rows])
            continue
        normal.write_density(x, room)
        np.multiply(room, x, out=room)
        np.multiply(x, cdf, out=y[rows])
        np.add(cdf, room, out=slope[rows])


def _gelu(z: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> None:
    _gelu_parts(z, y, None, scratch)


def _by_slope(with_slope: _WithSlope) -> Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]:
    """The backward function of an activation that saves z, from the one that gives its slope."""

    def backward(z: np.ndarray, dy: np.ndarray, dz: np.ndarray, scratch: np.ndarray) -> None:
        slope = np.empty_like(z)
        with_slope(z, np.empty_like(z), slope, scratch)
        np.multiply(dy, slope, out=dz)

    return backward


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(_identity, _identity_backward, "y", "glorot_uniform", "z"),
    "sigmoid": Activation(_sigmoid, _sigmoid_backward, "y", "glorot_uniform", "1 / (1 + exp(-z))"),
    "tanh": Activation(_tanh, _tanh_backward, "y", "glorot_uniform", "tanh(z)"),
    "relu": Activation(_relu, _relu_backward, "y", "he_uniform", "max(z, 0)"),
    "leaky_relu": Activation(_leaky_relu, _leaky_relu_backward, "y", "he_uniform", "max(z, 0.01 z)"),
    "elu": Activation(_elu, _elu_backward, "y", "he_uniform", "z if z > 0 else exp(z) - 1"),
    "softplus": Activation(_softplus, _softplus_backward, "y", "he_uniform", "log(1 + exp(z))"),
    "gelu": Activation(
        _gelu, _by_slope(_gelu_parts), "z", "he_uniform", "z · (1 + erf(z / √2)) / 2", with_slope=_gelu_parts
    ),
    "silu": Activation(
        _silu, _by_slope(_silu_with_slope), "z", "he_uniform", "z / (1 + exp(-z))", with_slope=_silu_with_slope
    ),
}
