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

from .random import WORDS_PER_BLOCK, Purpose, UniformStream, philox, uniforms

DRAWN_AT_A_TIME = 1 << 20  # values of a part


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


def draw_part(
    out: np.ndarray,
    name: str,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    fans: tuple[int, int],
    *,
    seed: int,
    layer: int,
    purpose: Purpose = Purpose.INITIAL_VALUES,
) -> None:
    """Write those of :func:`initial_values` at ``index`` to ``out``, as float32 has them, without making the others.

    ``index`` has a slice without a step for the first axis, or for both; ``out`` is the part's shape.  Normal values,
    which cannot be addressed, are drawn up to the part's end, some rows at a time.
    """
    scheme = INITIALIZERS[name]
    if scheme.distribution == "constant":
        out[...] = 0.0
        return
    rows = range(shape[0])[index[0]]
    if len(shape) == 1:
        shape, columns, out = (shape[0], 1), range(1), out[:, np.newaxis]
    else:
        columns = range(shape[1])[index[1]] if len(index) > 1 else range(shape[1])
    stride = shape[1]
    at_a_time = max(1, DRAWN_AT_A_TIME // stride)
    if scheme.distribution == "normal":
        generator = np.random.Generator(philox(seed=seed, purpose=purpose, layer=layer))
        deviation = math.sqrt(scheme.variance(*fans))
        for first in range(0, rows.stop, at_a_time):
            end = min(first + at_a_time, rows.stop)
            values = (deviation * generator.standard_normal((end - first) * stride)).reshape(-1, stride)
            kept = values[max(rows.start - first, 0) :, columns.start : columns.stop].astype(np.float32)
            if len(kept):
                out[max(first - rows.start, 0) : end - rows.start] = kept
        return
    limit = scheme.limit(fans)
    stream = UniformStream(seed=seed, purpose=purpose, layer=layer)
    # Whole rows lie beside each other; of others each is a piece of its own.
    is_whole = len(columns) == stride
    for first in range(rows.start, rows.stop, at_a_time if is_whole else 1):
        end = min(first + at_a_time, rows.stop) if is_whole else first + 1
        count = (end - first) * len(columns)
        block, skipped = divmod(first * stride + columns.start, WORDS_PER_BLOCK)
        drawn = np.empty(skipped + count)
        stream.fill(drawn, step=0, block=block)
        values = -limit + (limit - -limit) * drawn[skipped:]
        out[first - rows.start : end - rows.start] = values.astype(np.float32).reshape(end - first, len(columns))
