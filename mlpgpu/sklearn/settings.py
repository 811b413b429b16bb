"""The arguments of an estimator, checked when a fit begins, as scikit-learn has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..activations import ACTIVATIONS
from ..errors import ConfigurationError, DtypeError, check_integer, check_number, lookup
from ..optimizers import OPTIMIZERS, SGD, Adam, AdamW, Momentum, Nesterov, Optimizer, RMSprop

LearningRate = Literal["constant", "invscaling", "adaptive"]
LEARNING_RATES: tuple[LearningRate, ...] = ("constant", "invscaling", "adaptive")
AUTO_BATCH = 200  # rows, at most: scikit-learn's batch_size="auto"
NAMES = ("sgd", "adam", *(name.lower() for name in OPTIMIZERS if name not in ("SGD", "Adam")))


@dataclass(frozen=True)
class Settings:
    """Checked arguments.

    Attributes:
        hidden: the hidden layers' widths.
        dropout: a rate for each of them.
        is_named: whether the optimizer came as a name, and so has the numbers of these arguments.
        batch_size: None for ``"auto"``.
        learning_rate: ``"constant"`` but for SGD, with a momentum or without: others ignore it, as in scikit-learn.
        patience: ``n_iter_no_change``, which may be infinite.
    """

    hidden: tuple[int, ...]
    activation: str
    dropout: tuple[float, ...]
    optimizer: Optimizer
    is_named: bool
    alpha: float
    batch_size: int | None
    learning_rate: LearningRate
    power_t: float
    max_iter: int
    shuffle: bool
    tol: float
    patience: float
    early_stopping: bool
    validation_fraction: float
    metric: str | Callable[..., Any]
    standardize: bool
    verbose: int

    @classmethod
    def of(cls, estimator: Any, default_metric: str) -> Settings:
        """The arguments of an estimator.

        Raises:
            DtypeError, ConfigurationError, UnknownNameError: one has no meaning.
        """
        hidden = _widths(estimator.hidden_layer_sizes)
        patience = estimator.n_iter_no_change
        is_endless = isinstance(patience, float) and patience == math.inf
        optimizer, is_named = _optimizer(estimator)
        learning_rate = lookup("learning_rate", estimator.learning_rate, LEARNING_RATES)
        has_rule = is_named and isinstance(optimizer, (SGD, Momentum, Nesterov))
        if estimator.batch_size != "auto":
            check_integer("batch_size", estimator.batch_size, least=1)
        fraction = check_number("validation_fraction", estimator.validation_fraction, least=0.0, below=1.0)
        metric = estimator.metric
        if metric is not None and not isinstance(metric, str) and not callable(metric):
            raise DtypeError("metric", expected="a name or a function of (y, prediction)", got=repr(metric))
        return cls(
            hidden=hidden,
            activation=lookup("activation", estimator.activation, ACTIVATIONS),
            dropout=_dropout(estimator.dropout, len(hidden)),
            optimizer=optimizer,
            is_named=is_named,
            alpha=check_number("alpha", estimator.alpha, least=0.0),
            batch_size=None if estimator.batch_size == "auto" else int(estimator.batch_size),
            learning_rate=learning_rate if has_rule else "constant",
            power_t=check_number("power_t", estimator.power_t, least=0.0),
            max_iter=check_integer("max_iter", estimator.max_iter, least=1),
            shuffle=_truth("shuffle", estimator.shuffle),
            tol=check_number("tol", estimator.tol, least=0.0),
            patience=math.inf if is_endless else check_integer("n_iter_no_change", patience, least=1),
            early_stopping=_truth("early_stopping", estimator.early_stopping),
            validation_fraction=fraction,
            metric=default_metric if metric is None else metric,
            standardize=_truth("standardize", estimator.standardize),
            verbose=_verbose(estimator.verbose),
        )

    def optimizer_for(self, factor: float) -> Optimizer:
        """The optimizer that, on our gradient, moves as the one asked for does on the gradient times ``factor``.

        The penalty's slope is not multiplied.  An optimizer that came as an object keeps its numbers, which are for
        our gradient.
        """
        optimizer = replace(self.optimizer, alpha=self.alpha / factor)
        if factor == 1.0 or not self.is_named:
            return optimizer
        if isinstance(optimizer, (Adam, AdamW, RMSprop)):  # which divide by the gradient's size
            return replace(optimizer, epsilon=optimizer.epsilon / factor)
        return replace(optimizer, rate=self.rate * factor)

    @property
    def rate(self) -> float:
        """``learning_rate_init``, of an optimizer that came as a name."""
        assert isinstance(self.optimizer.rate, (int, float))
        return float(self.optimizer.rate)

    def rows(self, count: int) -> int:
        """The batch size for so many rows."""
        return min(count, self.batch_size or AUTO_BATCH)


def _widths(given: Any) -> tuple[int, ...]:
    if isinstance(given, str) or (not isinstance(given, Iterable) and not hasattr(given, "__index__")):
        raise DtypeError("hidden_layer_sizes", expected="a number of units, or several", got=repr(given))
    widths = list(given) if isinstance(given, Iterable) else [given]
    return tuple(
        check_integer(f"hidden_layer_sizes must be > 0; number {place}", width, least=1)
        for place, width in enumerate(widths)
    )


def _dropout(given: Any, layers: int) -> tuple[float, ...]:
    rates = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given] * layers
    if len(rates) != layers:
        expected = f"a rate, or one for each of {layers} hidden layers"
        raise ConfigurationError("dropout", expected=expected, got=rates)
    return tuple(check_number("dropout", rate, least=0.0, below=1.0) for rate in rates)


def _optimizer(estimator: Any) -> tuple[Optimizer, bool]:
    """The optimizer, with the numbers that the arguments give it, and whether it came as a name."""
    given, solver = estimator.optimizer, estimator.solver
    if given is None:
        what, given = "solver", solver
    elif solver == "adam":  # as nobody says otherwise
        what = "optimizer"
    else:
        raise ConfigurationError("optimizer, and solver", expected="one of them", got=f"{given!r}, and {solver!r}")
    if isinstance(given, Optimizer):
        return given, False
    if isinstance(given, str) and given.lower() == "lbfgs":
        hint = "scikit-learn's own MLPClassifier and MLPRegressor have it"
        expected = "an optimizer that takes batches: one of " + ", ".join(NAMES)
        raise ConfigurationError(what, expected=expected, got=repr(given), hint=hint)
    if not isinstance(given, str):
        raise DtypeError(what, expected="an optimizer, such as mlpgpu.Adam(0.001), or its name", got=repr(given))
    name = lookup(what, given if given in OPTIMIZERS else given.lower(), (*NAMES, *OPTIMIZERS)).lower()
    rate = check_number("learning_rate_init", estimator.learning_rate_init, above=0.0)
    if name in ("sgd", "momentum", "nesterov"):
        momentum = check_number("momentum", estimator.momentum, least=0.0, below=1.0)
        if name == "sgd" and momentum == 0.0:
            return SGD(rate), True
        is_nesterov = name == "nesterov" or (name == "sgd" and estimator.nesterovs_momentum)
        return (Nesterov if is_nesterov else Momentum)(rate, momentum=momentum), True
    epsilon = check_number("epsilon", estimator.epsilon, above=0.0)
    if name == "rmsprop":
        return RMSprop(rate, epsilon=epsilon), True
    beta1 = check_number("beta_1", estimator.beta_1, least=0.0, below=1.0)
    beta2 = check_number("beta_2", estimator.beta_2, least=0.0, below=1.0)
    return (Adam if name == "adam" else AdamW)(rate, beta1=beta1, beta2=beta2, epsilon=epsilon), True


def _truth(what: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise DtypeError(what, expected="True or False", got=repr(value))
    return bool(value)


def _verbose(value: Any) -> int:
    return int(value) if isinstance(value, (bool, np.bool_)) else check_integer("verbose", value, least=0)
