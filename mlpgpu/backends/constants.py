"""Numbers that stay the same while a plan runs, as kernels and loops read them: structs of cuda/math/."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..losses import Loss
from ..optimizers import Optimizer

# Hyper of math/optimizers.cuh, and LossNumbers of math/losses.cuh.
HYPER = (
    "l1", "l2", "clip_norm", "momentum", "rho", "rho_rest", "beta1", "beta1_rest", "beta2", "beta2_rest",
    "epsilon", "weight_decay", "alpha",
)  # fmt: skip
LOSS_NUMBERS = "delta", "level", "level_rest", "label_smoothing", "label_smoothing_rest", "gamma"


_FLOAT32 = np.dtype(np.float32)


def hyper_parameters(optimizer: Optimizer, dtype: np.dtype = _FLOAT32) -> np.ndarray:
    """The struct Hyper of an optimizer, (13,): 0 for what the optimizer does not have."""
    return _numbers(optimizer, HYPER, dtype)


def loss_numbers(loss: Loss, dtype: np.dtype = _FLOAT32) -> np.ndarray:
    """The struct LossNumbers of a loss, (6,): 0 for what the loss does not have."""
    return _numbers(loss, LOSS_NUMBERS, dtype)


def _numbers(owner: object, names: Sequence[str], dtype: np.dtype) -> np.ndarray:
    """Numbers by name; a rest is 1 minus the number, rounded once."""

    def value(name: str) -> float:
        if name.endswith("_rest"):
            return 1.0 - getattr(owner, name.removesuffix("_rest"), 1.0)
        return getattr(owner, name, 0.0) or 0.0

    with np.errstate(over="ignore"):  # a number beyond float32 leads to an error of ours, by the first step
        return np.array([value(name) for name in names], dtype)
