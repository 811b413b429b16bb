"""Losses: one row of :data:`LOSSES` each.  They take logits and give value and delta together.

For a batch of B rows a loss writes each row's value, ``value (B,)``, and the derivative of that value
by the logits, ``delta (B, n)``.  The caller multiplies both by the row's sample weight, and divides by
the batch's summed weight, once for all losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np

from .activations import sigmoid
from .errors import check_number, keep_checked, lookup
from .metrics import Problem

BY_COLUMNS_ROWS, BY_COLUMNS_BELOW = 32, 16  # rows from which, and columns below which, softmax goes column by column
LOSS_BY_COLUMNS_ROWS = 256  # the same for the cross entropy, whose row's way is shorter

TargetKind = Literal["index", "dense"]
OutputName = Literal["identity", "sigmoid", "softmax", "exp"]
OUTPUTS: tuple[OutputName, ...] = ("identity", "sigmoid", "softmax", "exp")


@dataclass(frozen=True)
class Loss(ABC):
    """One loss function with its numbers.

    Attributes:
        targets: the forms a target may have, the usual one first: ``"index"``, a class (B,), integer;
            ``"dense"``, (B, n), of the logits' dtype.
        output: what turns logits into predictions.
        formula: a row's value, for people; sums and means run over its n outputs.
    """

    targets: ClassVar[tuple[TargetKind, ...]] = ("dense",)
    output: ClassVar[OutputName] = "identity"
    formula: ClassVar[str]

    @abstractmethod
    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        """Write the values (B,) and the deltas (B, n) of logits ``z (B, n)``; ``scratch (B, n)`` is overwritten."""

    @property
    def name(self) -> str:
        """In LOSSES."""
        return _NAMES[type(self)]

    @property
    def form(self) -> str:
        """The computation, in :data:`FORMS`: that of the name, unless numbers leave something out."""
        return self.name

    @property
    def described(self) -> str | Loss:
        """The name, where numbers are the usual ones; else the loss."""
        return self.name if self == type(self)() else self

    def __str__(self) -> str:
        usual = type(self)()
        numbers = [(field.name, getattr(self, field.name)) for field in fields(self)]
        others = [f"{name}={number:g}" for name, number in numbers if number != getattr(usual, name)]
        return f"{self.name}({', '.join(others)})" if others else self.name


@dataclass(frozen=True)
class SquaredError(Loss):
    """½ Σ (z - t)²."""

    formula = "½ Σ (z - t)²"

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        np.subtract(z, t, out=delta)
        np.multiply(delta, delta, out=scratch)
        np.add.reduce(scratch, axis=1, out=value)
        np.multiply(value, 0.5, out=value)


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """The mean of (z - t)² over outputs."""

    formula = "mean (z - t)²"

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        SquaredError().evaluate(z, t, value, delta, scratch)
        np.multiply(value, 2.0 / z.shape[1], out=value)
        np.multiply(delta, 2.0 / z.shape[1], out=delta)


@dataclass(frozen=True)
class AbsoluteError(Loss):
    """The mean of ``|z - t|`` over outputs."""

    formula = "mean |z - t|"

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        np.subtract(z, t, out=delta)
        np.abs(delta, out=scratch)
        np.add.reduce(scratch, axis=1, out=value)
        np.multiply(value, 1.0 / z.shape[1], out=value)
        np.sign(delta, out=delta)
        np.multiply(delta, 1.0 / z.shape[1], out=delta)


@dataclass(frozen=True)
class Huber(Loss):
    """Squared errors near 0, absolute ones from ``delta`` on (Huber 1964).

    Arguments:
        delta: over 0, in the units of the targets as the loss sees them.
    """

    delta: float = 1.0
    formula = "mean of e²/2 if |e| <= delta else delta (|e| - delta/2), e = z - t"

    def __post_init__(self) -> None:
        keep_checked(self, delta=check_number("delta of Huber", self.delta, above=0.0))

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        # With e = z - t and c = e clipped to [-d, d], both branches are c · (e - c / 2), and delta is c.
        np.subtract(z, t, out=scratch)
        np.clip(scratch, -self.delta, self.delta, out=delta)
        np.multiply(scratch, 2.0, out=scratch)
        np.subtract(scratch, delta, out=scratch)
        np.multiply(scratch, delta, out=scratch)
        np.add.reduce(scratch, axis=1, out=value)
        np.multiply(value, 0.5 / z.shape[1], out=value)
        np.multiply(delta, 1.0 / z.shape[1], out=delta)


@dataclass(frozen=True)
class Quantile(Loss):
    """The pinball loss, least where z is the ``level`` quantile of the targets (Koenker and Bassett 1978).

    Arguments:
        level: over 0 and under 1; of ½ it is half of the absolute error.
    """

    level: float = 0.5
    formula = "mean of max(level e, (level - 1) e), e = t - z"

    def __post_init__(self) -> None:
        keep_checked(self, level=check_number("level of Quantile", self.level, above=0.0, below=1.0))

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        np.subtract(z, t, out=scratch)
        np.sign(scratch, out=delta)
        np.multiply(delta, 1.0 - self.level, out=delta, where=delta > 0.0)
        np.multiply(delta, self.level, out=delta, where=delta < 0.0)
        np.multiply(scratch, delta, out=scratch)
        np.add.reduce(scratch, axis=1, out=value)
        np.multiply(value, 1.0 / z.shape[1], out=value)
        np.multiply(delta, 1.0 / z.shape[1], out=delta)


@dataclass(frozen=True)
class Poisson(Loss):
    """Of counts, or rates, with the logarithm as link: predictions are exp(z).

    It is PyTorch's ``poisson_nll_loss(log_input=True)``: Keras' ``Poisson`` of exp(z), and scikit-learn's half Poisson
    deviance but for terms of the target alone.
    """

    output = "exp"
    formula = "mean of exp(z) - t z"

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        np.exp(z, out=delta)
        np.multiply(z, t, out=scratch)
        np.subtract(delta, scratch, out=scratch)
        np.add.reduce(scratch, axis=1, out=value)
        np.multiply(value, 1.0 / z.shape[1], out=value)
        np.subtract(delta, t, out=delta)
        np.multiply(delta, 1.0 / z.shape[1], out=delta)


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """The mean of -t log p - (1 - t) log(1 - p) over outputs, p = sigmoid(z)."""

    output = "sigmoid"
    formula = "mean of log(1 + exp(z)) - t z"

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        np.logaddexp(0.0, z, out=scratch)
        np.multiply(z, t, out=delta)
        np.subtract(scratch, delta, out=scratch)
        np.add.reduce(scratch, axis=1, out=value)
        np.multiply(value, 1.0 / z.shape[1], out=value)
        sigmoid(z, delta)
        np.subtract(delta, t, out=delta)
        np.multiply(delta, 1.0 / z.shape[1], out=delta)


@dataclass(frozen=True)
class BinaryFocal(Loss):
    """The binary cross entropy with what is found anyway weighted less (Lin et al. 2017), without their alpha.

    Arguments:
        gamma: at least 0, which gives the binary cross entropy.
    """

    gamma: float = 2.0
    output = "sigmoid"
    formula = "mean of -t (1 - p)^gamma log p - (1 - t) p^gamma log(1 - p), p = sigmoid(z)"

    def __post_init__(self) -> None:
        keep_checked(self, gamma=check_number("gamma of BinaryFocal", self.gamma, least=0.0))

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        # With p1 = p, p0 = 1 - p, and surprises s = -log p: the value is Σ t_i (1 - p_i)^γ s_i, i of 0 and 1.
        p1, p0 = np.empty_like(z), np.empty_like(z)
        sigmoid(z, p1)
        np.negative(z, out=scratch)
        sigmoid(scratch, p0)
        s1, s0 = np.logaddexp(0.0, scratch), np.logaddexp(0.0, z)
        hard1, hard0 = t * np.exp(-self.gamma * s0), (1.0 - t) * np.exp(-self.gamma * s1)  # t p0^γ, (1 - t) p1^γ
        np.add(hard1 * s1, hard0 * s0, out=scratch)
        np.add.reduce(scratch, axis=1, out=value)
        np.multiply(value, 1.0 / z.shape[1], out=value)
        np.subtract(hard0 * (p1 + self.gamma * (p0 * s0)), hard1 * (p0 + self.gamma * (p1 * s1)), out=delta)
        np.multiply(delta, 1.0 / z.shape[1], out=delta)


@dataclass(frozen=True)
class SoftmaxCrossEntropy(Loss):
    """-Σ t log softmax(z), of a class or a distribution.

    Arguments:
        label_smoothing: from 0 to under 1, the share of each target that goes to all n classes alike:
            (1 - s) t + s / n (Szegedy et al. 2016), as in PyTorch and Keras.  Evaluations smooth as well.
    """

    label_smoothing: float = 0.0
    targets = ("index", "dense")
    output = "softmax"
    formula = "log Σ exp(z) - z[t], or -Σ t log softmax(z)"

    def __post_init__(self) -> None:
        what = "label_smoothing of SoftmaxCrossEntropy"
        keep_checked(self, label_smoothing=check_number(what, self.label_smoothing, least=0.0, below=1.0))

    @property
    def form(self) -> str:
        return f"smoothed_{self.name}" if self.label_smoothing else self.name

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        if self.label_smoothing:
            t = (1.0 - self.label_smoothing) * _distribution(z, t) + self.label_smoothing / z.shape[1]
        if t.ndim == 1 and _suits_columns(z, LOSS_BY_COLUMNS_ROWS):
            _cross_entropy_by_columns(z, t, value, delta, scratch)
            return
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


@dataclass(frozen=True)
class Focal(Loss):
    """The softmax cross entropy with what is found anyway weighted less (Lin et al. 2017), without their alpha.

    Arguments:
        gamma: at least 0, which gives the softmax cross entropy.
    """

    gamma: float = 2.0
    targets = ("index", "dense")
    output = "softmax"
    formula = "-Σ t (1 - p)^gamma log p, p = softmax(z)"

    def __post_init__(self) -> None:
        keep_checked(self, gamma=check_number("gamma of Focal", self.gamma, least=0.0))

    def evaluate(self, z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray) -> None:
        # With surprises s = -log p: v = Σ t (1 - p)^γ s, and dv/ds = t (1 - p)^γ (1 + γ p s / (1 - p)) =: t g, whose
        # last quotient tends to 1 where p does.  As ds_k/dz_j = p_j - [j = k], dv/dz_j = p_j Σ t g - t_j g_j.
        t = _distribution(z, t)
        column = value[:, np.newaxis]
        np.maximum.reduce(z, axis=1, out=value)
        np.subtract(z, column, out=scratch)
        np.exp(scratch, out=delta)
        np.add.reduce(delta, axis=1, out=value)
        np.divide(delta, column, out=delta)
        surprise = np.log(column) - scratch
        rest = -np.expm1(-surprise)
        hard = rest**self.gamma
        quotient = np.divide(surprise, rest, out=np.ones_like(rest), where=rest != 0.0)
        there = t != 0.0
        slope = np.multiply(t, hard * (1.0 + self.gamma * (delta * quotient)), out=np.zeros_like(z), where=there)
        np.add.reduce(np.multiply(t, hard * surprise, out=np.zeros_like(z), where=there), axis=1, out=value)
        np.multiply(delta, slope.sum(axis=1)[:, np.newaxis], out=delta)
        np.subtract(delta, slope, out=delta)


def _distribution(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Targets as distributions (B, n) of the logits' type."""
    if t.ndim == 2:
        return t
    dense = np.zeros_like(z)
    dense[np.arange(len(t)), t] = 1.0
    return dense


LOSSES: dict[str, type[Loss]] = {
    "squared_error": SquaredError,
    "mean_squared_error": MeanSquaredError,
    "absolute_error": AbsoluteError,
    "huber": Huber,
    "binary_cross_entropy": BinaryCrossEntropy,
    "softmax_cross_entropy": SoftmaxCrossEntropy,
    "quantile": Quantile,
    "poisson": Poisson,
    "binary_focal": BinaryFocal,
    "focal": Focal,
}
_NAMES = {kind: name for name, kind in LOSSES.items()}

# Computations with a kernel of their own, each with the loss whose it is.
FORMS: dict[str, type[Loss]] = {**LOSSES, "smoothed_softmax_cross_entropy": SoftmaxCrossEntropy}


def as_loss(given: object) -> Loss:
    """The loss that is meant by a name, or by a loss itself.

    Raises:
        DtypeError, UnknownNameError: it is neither.
    """
    return given if isinstance(given, Loss) else LOSSES[lookup("loss", given, LOSSES)]()


def _suits_columns(z: np.ndarray, least_rows: int) -> bool:
    """Whether rows are so many and so short that a softmax goes column by column."""
    rows, n = z.shape
    return rows >= least_rows and 2 <= n < BY_COLUMNS_BELOW


def _softmax(z: np.ndarray) -> None:
    if _suits_columns(z, BY_COLUMNS_ROWS):
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
    total = _row_sums(columns)
    np.divide(columns, total, out=columns)
    np.copyto(z, columns.T)


def apply_output(name: OutputName, z: np.ndarray) -> None:
    """Turn logits ``z (B, n)`` into predictions, in place."""
    if name == "softmax":
        _softmax(z)
    elif name == "sigmoid":
        sigmoid(z, z)
    elif name == "exp":
        np.exp(z, out=z)


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


def _row_sums(columns: np.ndarray) -> np.ndarray:
    """Sums (B,) over the rows of which these are the columns (n, B), with the bits of a sum row by row."""
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
    return total


def _cross_entropy_by_columns(
    z: np.ndarray, t: np.ndarray, value: np.ndarray, delta: np.ndarray, scratch: np.ndarray
) -> None:
    """The softmax cross entropy of classes (B,), with the bits that it has row by row."""
    columns = scratch.reshape(z.shape[::-1])  # (n, B)
    np.copyto(columns, z.T)
    np.maximum.reduce(columns, axis=0, out=value)
    np.subtract(columns, value, out=columns)
    rows = np.arange(len(t))
    picked = columns[t, rows]
    np.exp(columns, out=columns)
    np.copyto(value, _row_sums(columns))
    np.divide(columns, value, out=columns)
    np.copyto(delta, columns.T)
    delta[rows, t] -= 1.0
    np.log(value, out=value)
    np.subtract(value, picked, out=value)
