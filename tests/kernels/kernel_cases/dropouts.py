"""What kernels are told of a dropout, and what it makes of their results."""

from __future__ import annotations

import math

import numpy as np
from helpers import EPS32

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.random import half_words, least_kept

from .case import LAYER, SEED, STEP_NUMBER, Batch, Output, activation_bound, derivative, expect


def dropout_arguments(rate: float) -> dict[str, object]:
    """What a kernel is told of a dropout; of none, for a rate of 0, it keeps 0 times what it is given."""
    keep = np.float32(1.0 / (1.0 - rate) if rate else 0.0)
    return {"seed": SEED, "layer": LAYER, "least": least_kept(rate), "keep": keep}


def is_kept(shape: tuple[int, ...], rate: float, step: int = STEP_NUMBER) -> np.ndarray:
    """Which elements of a batch a dropout keeps."""
    return half_words(0, math.prod(shape), seed=SEED, step=step, layer=LAYER).reshape(shape) / 2**16 >= rate


def dropped(output: Output, batch: Batch, rate: float) -> Output:
    """What a dropout makes of an output."""
    if not rate:
        return output
    shape = output.value.shape
    factor = is_kept(shape, rate) * np.float32(1.0 / (1.0 - rate))
    value = output.value * factor
    return expect(value, output.bound * factor + 2 * EPS32 * abs(value), batch.written(*shape))


def kept_bits(batch: Batch, n: int, rate: float, step: int = STEP_NUMBER) -> np.ndarray:
    """Which elements of a shard's rows a dropout keeps, 32 of a row in a word; one word at least."""
    bits = np.packbits(is_kept((batch.capacity, n), rate, step)[batch.part], axis=1, bitorder="little")
    words = np.zeros((max(1, len(bits)), kernels.ceil_div(n, kernels.KEPT_BITS)), np.uint32)
    words.view(np.uint8)[: len(bits), : bits.shape[1]] = bits
    return words.ravel()


def kept_arguments(batch: Batch, n: int, rate: float) -> dict[str, object]:
    """What a product is told of a dropout that it ends with; of none, for a rate of 0."""
    if not rate:
        return {"kept": None, "keep": np.float32(1)}
    return {"kept": kept_bits(batch, n, rate), "keep": np.float32(1.0 / (1.0 - rate))}


def differentiated(
    activation: str, batch: Batch, dx: np.ndarray, bound: np.ndarray, saved: np.ndarray | None, rate: float
) -> tuple[Output, dict[str, object]]:
    """dx through a dropout and an activation, of which something is saved, and what its product is told of both.

    A dropout of rate 0 is none; behind a ReLU there is one nevertheless, whose zeros are those of what is saved.
    """
    arguments = kept_arguments(batch, dx.shape[1], rate)
    restore = np.float32(1.0 - rate if rate and ACTIVATIONS[activation].saves == "y" else 1)
    if saved is not None:
        of = saved * restore
        slope = derivative(activation, of)
        bound = abs(slope) * bound + abs(dx) * activation_bound(of, slope)
        dx = dx * slope
        if activation == "relu" and not rate:
            arguments["keep"] = np.float32(2)
            dx, bound = 2 * dx, 2 * bound
    made = dropped(expect(dx, bound, batch.written(*dx.shape)), batch, rate)
    return made, {**arguments, "restore": restore}
