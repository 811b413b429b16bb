"""Losses: one row of :data:`LOSSES` each.  They take logits and give value and delta together.

For a batch of B rows a loss writes each row's value, ``value (B,)``, and the derivative of that value
by the logits, ``delta (B, n)``.  The caller multiplies both by the row's sample weight, and divides by
the batch's summed weight, once for all losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .activations import sigmoid
from .metrics import Problem

HUBER_DELTA = 1.0
BY_COLUMNS_ROWS, BY_COLUMNS_BELOW = 32, 16  # rows from which, and columns below which, softmax goes column by column

TargetKind = Literal["index", "dense"]
OutputName = Literal["identity", "sigmoid", "softmax"]
OUTPUTS: tuple[OutputName, ...] = ("identity", "sigmoid", "softmax")


@dataclass(frozen=True)
class Loss:
    """One loss function.

    Attributes:
        evaluate: ``evaluate(z, target, value, delta, scratch)`` writes the values (B,) and the deltas
            (B, n) of logits ``z (B, n)``; ``scratch (B, n)`` is overwritten.
        targets: the forms a target may have, the usual one first: ``"index"``, a class (B,), integer;
            ``"dense"``, (B, n), of the logits' dtype.
        output: what turns logits into predictions.
        formula: a row's value, for people; sums and means run over its n outputs.
    """

    evaluate: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
    targets: tuple[TargetKind, ...]
    output: OutputName
    formula: str


def _squared_error(z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
    np.subtract(z, t, out=delta)
    np.multiply(delta, delta, out=scratch)
    np.add.reduce(scratch, axis=1, out=value)
    np.multiply(value, 0.5, out=value)


def _mean_squared_error(
    z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray
) -> None:
    _squared_error(z, t, value, delta, scratch)
    np.multiply(value, 2.0 / z.shape[1], out=value)
    np.multiply(delta, 2.0 / z.shape[1], out=delta)


def _absolute_error(z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
    np.subtract(z, t, out=delta)
    np.abs(delta, out=scratch)
    np.add.reduce(scratch, axis=1, out=value)
    np.multiply(value, 1.0 / z.shape[1], out=value)
    np.sign(delta, out=delta)
    np.multiply(delta, 1.0 / z.shape[1], out=delta)


def _huber(z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
    # With e = z - t and c = e clipped to [-d, d], both branches are c · (e - c / 2), and delta is c.
    np.subtract(z, t, out=scratch)
    np.clip(scratch, -HUBER_DELTA, HUBER_DELTA, out=delta)
    np.multiply(scratch, 2.0, out=scratch)
    np.subtract(scratch, delta, out=scratch)
    np.multiply(scratch, delta, out=scratch)
    np.add.reduce(scratch, axis=1, out=value)
    np.multiply(value, 0.5 / z.shape[1], out=value)
    np.multiply(delta, 1.0 / z.shape[1], out=delta)


def _binary_cross_entropy(
    z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray
) -> None:
    np.logaddexp(0.0, z, out=scratch)
    np.multiply(z, t, out=delta)
    np.subtract(scratch, delta, out=scratch)
    np.add.reduce(scratch, axis=1, out=value)
    np.multiply(value, 1.0 / z.shape[1], out=value)
    sigmoid(z, delta)
    np.subtract(delta, t, out=delta)
    np.multiply(delta, 1.0 / z.shape[1], out=delta)


def _softmax_cross_entropy(
    z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray
) -> None:
    # Logits are shifted by their row's largest, which changes nothing and keeps exp from overflowing.
    column = value[:, np.newaxis]
    np.maximum.reduce(z, axis=1, out=value)
    np.subtract(z, column, out=scratch)
    if t.ndim == 1:
        rows = np.arange(len(t))
        picked = scratch[rows, t]
        np.exp(scratch, out=delta)
        np.add.reduce(delta, axis=1, out=value)
        np.divide(delta, column, out=delta)
        delta[rows, t] -= 1.0
        np.log(value, out=value)
        np.subtract(value, picked, out=value)
        return
    # -Σ t·log p = Σt · log Σexp - Σ t·shifted; its derivative is Σt · p - t.  Σt is 1 but for rounding.
    mass = t.sum(axis=1)
    np.exp(scratch, out=delta)
    np.add.reduce(delta, axis=1, out=value)
    np.divide(delta, column, out=delta)
    np.multiply(delta, mass[:, np.newaxis], out=delta)
    np.subtract(delta, t, out=delta)
    np.multiply(scratch, t, out=scratch)
    np.log(value, out=value)
    np.multiply(value, mass, out=value)
    np.subtract(value, scratch.sum(axis=1), out=value)


LOSSES: dict[str, Loss] = {
    "squared_error": Loss(_squared_error, ("dense",), "identity", "½ Σ (z - t)²"),
    "mean_squared_error": Loss(_mean_squared_error, ("dense",), "identity", "mean (z - t)²"),
    "absolute_error": Loss(_absolute_error, ("dense",), "identity", "mean |z - t|"),
    "huber": Loss(_huber, ("dense",), "identity", "mean of e²/2 if |e| <= 1 else |e| - 1/2, e = z - t"),
    "binary_cross_entropy": Loss(_binary_cross_entropy, ("dense",), "sigmoid", "mean of log(1 + exp(z)) - t z"),
    "softmax_cross_entropy": Loss(
        _softmax_cross_entropy, ("index", "dense"), "softmax", "log Σ exp(z) - z[t], or -Σ t log softmax(z)"
    ),
}


def _softmax(z: np.ndarray) -> None:
    rows, n = z.shape
    if rows >= BY_COLUMNS_ROWS and 2 <= n < BY_COLUMNS_BELOW:
        _softmax_by_columns(z)
        return
    np.subtract(z, np.maximum.reduce(z, axis=1, keepdims=True), out=z)
    np.exp(z, out=z)
    np.divide(z, np.add.reduce(z, axis=1, keepdims=True), out=z)


def _softmax_by_columns(z: np.ndarray) -> None:
    """The same bits for many short rows, in about half the time: each column of all rows at once."""
    columns = z.T.copy()  # (n, B)
    np.subtract(columns, np.maximum.reduce(columns, axis=0), out=columns)
    np.exp(columns, out=columns)
    # NumPy adds up a row of eight and more in pairs, then what is left one after another.
    terms = list(columns)
    if len(terms) >= 8:
        first, *rest = terms[:8], *terms[8:]
        while len(first) > 1:
            first = [np.add(low, high) for low, high in zip(first[::2], first[1::2], strict=True)]
        terms = [*first, *rest]
    total = terms[0].copy()
    for term in terms[1:]:
        np.add(total, term, out=total)
    np.divide(columns, total, out=columns)
    np.copyto(z, columns.T)


def apply_output(name: OutputName, z: np.ndarray) -> None:
    """Turn logits ``z (B, n)`` into predictions, in place."""
    if name == "softmax":
        _softmax(z)
    elif name == "sigmoid":
        sigmoid(z, z)


def class_count(function: OutputName, n_out: int) -> int:
    """How many classes ``n_out`` outputs tell apart: one sigmoid tells two."""
    return 2 if function == "sigmoid" and n_out == 1 else n_out


def problem_of(function: OutputName, n_out: int) -> Problem:
    """What ``n_out`` outputs that predictions are made of by ``function`` tell of a row."""
    if function == "softmax":
        return "multiclass"
    if function == "sigmoid":
        return "binary" if n_out == 1 else "multilabel"
    return "regression"


def classes_of(function: OutputName, output: np.ndarray) -> np.ndarray:
    """The class of each row of predictions ``output (B, n)``, (B,) intp.

    It is the one with the largest value, the first of several; of one sigmoid, whether it is over ½.
    """
    if class_count(function, output.shape[1]) > output.shape[1]:
        return (output[:, 0] > 0.5).astype(np.intp)
    return output.argmax(axis=1)
