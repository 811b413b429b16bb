"""Fitted estimators of scikit-learn as networks: they have the attributes, so scikit-learn is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ConfigurationError, DtypeError, FileFormatError
from ..saved import SavedNetwork
from .steps import Activation, Linear, Output, Standardize, Step, network_of

ACTIVATIONS = {"identity": "identity", "logistic": "sigmoid", "tanh": "tanh", "relu": "relu"}
OUTPUTS = {"identity": "identity", "logistic": "sigmoid", "softmax": "softmax", "exp": "exp"}
NETWORKS = ("MLPClassifier", "MLPRegressor")
INPUTS, TARGETS = -1, -2  # places of statistics
HINT = "an MLPClassifier or MLPRegressor, also after a StandardScaler in a Pipeline, or in a TransformedTargetRegressor"


def network_of_estimator(estimator: Any) -> SavedNetwork:
    """The network of a fitted MLP, with the StandardScaler before it and that of the targets.

    Raises:
        DtypeError: it is no such estimator.
        ConfigurationError: it is not fitted, or has another step.
    """
    names = getattr(estimator, "feature_names_in_", None)
    targets: list[Step] = []
    values: dict[str, np.ndarray] = {}
    if _is(estimator, "TransformedTargetRegressor"):
        scaler = _fitted(estimator, "transformer_")
        values |= _statistics(scaler, TARGETS)
        targets = [Standardize(TARGETS, is_inverse=True)]
        estimator = _fitted(estimator, "regressor_")
    steps: list[Step] = []
    if _is(estimator, "Pipeline"):
        *before, estimator = [step for _, step in estimator.steps if step is not None and step != "passthrough"]
        for scaler in before:
            if steps:
                raise ConfigurationError("pipeline for from_sklearn", expected="one StandardScaler", got=scaler)
            values |= _statistics(scaler, INPUTS)
            steps.append(Standardize(INPUTS, is_inverse=False))
    if not any(_is(estimator, name) for name in NETWORKS):
        raise DtypeError("estimator", expected=HINT, got=type(estimator).__name__)
    weights, biases = _fitted(estimator, "coefs_"), _fitted(estimator, "intercepts_")
    activation, output = ACTIVATIONS.get(estimator.activation), OUTPUTS.get(_fitted(estimator, "out_activation_"))
    if activation is None or output is None:
        got = f"{estimator.activation!r}, {estimator.out_activation_!r}"
        raise ConfigurationError("activations of the estimator", expected="those of scikit-learn", got=got)
    for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        n_in, n_out = weight.shape
        steps.append(Linear(place, n_in, n_out, has_bias=True))
        values |= {f"{place}.weight": weight, f"{place}.bias": bias}
        if activation != "identity" and place < len(weights) - 1:
            steps.append(Activation(activation))
    if output != "identity":
        steps.append(Output(output))  # type: ignore[arg-type]
    n_in, n_out = len(weights[0]), weights[-1].shape[1]
    try:
        return network_of(
            f"estimator {type(estimator).__name__}",
            [*steps, *targets],
            values,
            classes=_classes(estimator, n_out, output),
            columns=None if names is None or len(names) != n_in else tuple(map(str, names)),
            has_vector_targets=n_out == 1,
        )
    except FileFormatError as error:
        raise ConfigurationError(error.what, expected=error.expected, got=error.got) from error


def _is(estimator: Any, name: str) -> bool:
    """Whether it is of scikit-learn's class of this name."""
    return any(base.__name__ == name and base.__module__.split(".")[0] == "sklearn" for base in type(estimator).__mro__)


def _fitted(estimator: Any, attribute: str) -> Any:
    try:
        return getattr(estimator, attribute)
    except AttributeError:
        what = f"{type(estimator).__name__}.{attribute}"
        raise ConfigurationError(what, expected="a fitted estimator", got="nothing", hint="fit it") from None


def _statistics(scaler: Any, place: int) -> dict[str, np.ndarray]:
    """What a StandardScaler takes away and divides by."""
    if not _is(scaler, "StandardScaler"):
        expected = "a StandardScaler"
        raise ConfigurationError(
            "transformer for from_sklearn", expected=expected, got=type(scaler).__name__, hint=HINT
        )
    count = _fitted(scaler, "n_features_in_")
    mean = np.zeros(count) if scaler.mean_ is None or not scaler.with_mean else np.asarray(scaler.mean_)
    scale = np.ones(count) if scaler.scale_ is None or not scaler.with_std else np.asarray(scaler.scale_)
    return {f"{place}.mean": mean, f"{place}.scale": scale}


def _classes(estimator: Any, n_out: int, output: str) -> tuple[str, ...] | None:
    """The names of the classes; None where they are the numbers from 0 on, or there are none."""
    classes = getattr(estimator, "classes_", None)
    if classes is None:
        return None
    found = list(classes)
    count = 2 if output == "sigmoid" and n_out == 1 else n_out
    return None if found == list(range(count)) or len(found) != count else tuple(map(str, found))
