"""Losses by scikit-learn's names, and how scikit-learn counts them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigurationError, DtypeError, lookup
from ..losses import LOSSES, Loss, Poisson, SquaredError, as_loss


@dataclass(frozen=True)
class CountedLoss:
    """A loss, and what makes scikit-learn's gradient and value of it.

    Attributes:
        loss: ours, as a trainer takes it.
        gradient_factor: scikit-learn's gradient is ours times this.
        value_factor: scikit-learn's value is ours times this, and plus ``offset``.
        offset: what its value has of the targets alone.
    """

    loss: Loss
    gradient_factor: float = 1.0
    value_factor: float = 1.0
    offset: float = 0.0


def classification_loss(given: object, n_classes: int, *, is_multilabel: bool) -> tuple[CountedLoss, int]:
    """The loss that a classifier's argument names, and how many outputs it has.

    ``"log_loss"`` has one output for each label or class, but a single one for two classes or fewer, and adds the
    labels' losses up, as scikit-learn does; ours are their mean.

    Raises:
        DtypeError, UnknownNameError: it names no loss.
        ConfigurationError: it is none for so many classes, or for labels.
    """
    names = ["log_loss", *(name for name, kind in LOSSES.items() if kind.output in ("softmax", "sigmoid"))]
    if given == "log_loss":
        if not is_multilabel and n_classes > 2:
            return CountedLoss(as_loss("softmax_cross_entropy")), n_classes
        outputs = n_classes if is_multilabel else 1
        return CountedLoss(as_loss("binary_cross_entropy"), outputs, outputs), outputs
    loss = _loss(given, names)
    if loss.output == "softmax":
        if is_multilabel:
            raise ConfigurationError("loss", expected="one of labels, such as 'log_loss'", got=loss)
        return CountedLoss(loss), max(n_classes, 2)
    if loss.output != "sigmoid":
        raise ConfigurationError("loss", expected="one of classes, such as 'log_loss'", got=loss)
    if n_classes > 2 and not is_multilabel:
        raise ConfigurationError("loss", expected=f"one of {n_classes} classes, such as 'log_loss'", got=loss)
    return CountedLoss(loss), n_classes if is_multilabel else 1


def regression_loss(given: object, y: np.ndarray, weight: np.ndarray | None) -> CountedLoss:
    """The loss that a regressor's argument names, for targets y (rows, outputs) with weights (rows,).

    scikit-learn reports the mean over outputs of the squared error and follows the gradient of their sum; of
    ``"poisson"`` both are sums, and the value has y log y - y as well, so that 0 is the least.

    Raises:
        DtypeError, UnknownNameError: it names no loss.
        ConfigurationError: it is one for classes.
    """
    loss = _loss(given, [name for name, kind in LOSSES.items() if kind.output in ("identity", "exp")])
    outputs = y.shape[1]
    if isinstance(loss, SquaredError):
        return CountedLoss(loss, 1.0, 1.0 / outputs)
    if isinstance(loss, Poisson):
        positive = np.where(y > 0.0, y, 1.0)
        entropy = np.average(y * np.log(positive) - y, axis=0, weights=weight).sum()
        return CountedLoss(loss, outputs, outputs, float(entropy))
    if loss.output in ("softmax", "sigmoid"):
        raise ConfigurationError("loss", expected="one of numbers, such as 'squared_error'", got=loss)
    return CountedLoss(loss)


def _loss(given: object, names: list[str]) -> Loss:
    if isinstance(given, Loss):
        return given
    if not isinstance(given, str):
        raise DtypeError("loss", expected="a name or a loss, such as mlpgpu.Huber(delta=2.0)", got=repr(given))
    return as_loss(lookup("loss", given, names))
