"""Initial values of weights: one row of :data:`INITIALIZERS` each.

Glorot's schemes have variance 2 / (fan_in + fan_out) (Glorot and Bengio, "Understanding the
difficulty of training deep feedforward neural networks", AISTATS 2010), He's 2 / fan_in (He et al.,
"Delving deep into rectifiers", ICCV 2015).  A uniform distribution on [-a, a] has variance a² / 3.
``"fan_in_uniform"`` is the one on [-1/√fan_in, 1/√fan_in], Glorot and Bengio's equation 1 and PyTorch's default;
``"small_uniform"`` has a third of Glorot's variance, which is the same where both fans are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .random import Purpose, philox, uniforms


@dataclass(frozen=True)
class Initializer:
    """A distribution and its variance as a function of (fan_in, fan_out)."""

    distribution: Literal["uniform", "normal", "constant"]
    variance: Callable[[int, int], float]

    def limit(self, fans: tuple[int, int]) -> float:
        """The a of a uniform distribution on [-a, a] for (fan_in, fan_out)."""
        return math.sqrt(3.0 * self.variance(*fans))


INITIALIZERS: dict[str, Initializer] = {
    "glorot_uniform": Initializer("uniform", lambda fan_in, fan_out: 2.0 / (fan_in + fan_out)),
    "glorot_normal": Initializer("normal", lambda fan_in, fan_out: 2.0 / (fan_in + fan_out)),
    "he_uniform": Initializer("uniform", lambda fan_in, fan_out: 2.0 / fan_in),
    "he_normal": Initializer("normal", lambda fan_in, fan_out: 2.0 / fan_in),
    "small_uniform": Initializer("uniform", lambda fan_in, fan_out: 2.0 / (3.0 * (fan_in + fan_out))),
    "fan_in_uniform": Initializer("uniform", lambda fan_in, fan_out: 1.0 / (3.0 * fan_in)),
    "zeros": Initializer("constant", lambda fan_in, fan_out: 0.0),
}


def initial_values(
    name: str,
    shape: tuple[int, ...],
    fans: tuple[int, int],
    *,
    seed: int,
    layer: int,
    replica: int = 0,
    purpose: Purpose = Purpose.INITIAL_VALUES,
) -> np.ndarray:
    """Values of one parameter, shape ``shape``, dtype float64.

    ``fans`` is (fan_in, fan_out); ``seed``, ``purpose``, ``layer`` and ``replica`` address the random words.
    Uniform values are a + (b - a) · u rounded after each operation, which a kernel can repeat.
    """
    scheme = INITIALIZERS[name]
    count = math.prod(shape)
    if scheme.distribution == "uniform":
        limit = scheme.limit(fans)
        values = -limit + (limit - -limit) * uniforms(count, seed=seed, purpose=purpose, layer=layer, replica=replica)
    elif scheme.distribution == "normal":
        source = philox(seed=seed, purpose=purpose, layer=layer, replica=replica)
        values = math.sqrt(scheme.variance(*fans)) * np.random.Generator(source).standard_normal(count)
    else:
        values = np.zeros(count)
    return values.reshape(shape)
