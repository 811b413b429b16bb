"""Optimizers: how the parameters w follow their gradient g at a rate η.

Each is a frozen description of plain numbers and its rule on flat arrays.  g is the mean gradient
over the batch's rows; where ``clip_norm`` is given, the trainer's plan has already scaled it, and where ``alpha``
is, added its penalty's slope.  Then ``l2 · w + l1 · sign(w)`` is added to it, as PyTorch's weight decay is, and the
rule below applied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import numpy as np

from .errors import DtypeError, check_number, keep_checked, lookup, shown
from .names import OptimizerName
from .schedules import Schedule


@dataclass(frozen=True)
class Optimizer(ABC):
    """What all optimizers share.

    Attributes:
        rate: η, a number or a :class:`~mlpgpu.schedules.Schedule`; each optimizer has a default of its own.
        l1, l2: penalties on all parameters; they do not show in the reported loss.
        clip_norm: the largest Euclidean norm of the whole gradient, or None.
        alpha: the penalty ½ alpha Σ w² over weights, not biases, divided by the batch's summed row weight: that of
            scikit-learn's ``MLPClassifier``.  Like ``l2`` it is never clipped.

    Raises:
        DtypeError, ConfigurationError: an argument is not a number in its range.
    """

    slots: ClassVar[tuple[str, ...]] = ()  # arrays kept for each parameter from step to step, 0 at first
    columns: ClassVar[tuple[str, ...]] = ("rate",)  # numbers that change from step to step

    rate: float | Schedule = 0.01
    _: KW_ONLY
    l1: float = 0.0
    l2: float = 0.0
    clip_norm: float | None = None
    alpha: float = field(default=0.0, metadata={"came_later": True})

    def __post_init__(self) -> None:
        name = type(self).__name__
        rate = self.rate if isinstance(self.rate, Schedule) else check_number("learning rate", self.rate, least=0.0)
        clip = None if self.clip_norm is None else check_number(f"{name} clip_norm", self.clip_norm, above=0.0)
        penalties = {of: check_number(f"{name} {of}", getattr(self, of), least=0.0) for of in ("l1", "l2", "alpha")}
        keep_checked(self, rate=rate, clip_norm=clip, **penalties)

    def table(self, first_step: int, rates: np.ndarray) -> np.ndarray:
        """The changing numbers of consecutive steps, shape (steps, len(columns)), float64.

        ``rates`` is (steps,), and ``first_step`` the first one's number since training began, from 0.
        """
        return rates[:, np.newaxis]

    def update(
        self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], row: Sequence[float], scratch: np.ndarray
    ) -> None:
        """Move parameters ``w`` and ``slots`` by one step; ``row`` is a row of :meth:`table`.

        All arrays are (n,) of one dtype; ``g`` and ``scratch`` are overwritten.
        """
        if self.l2:
            np.multiply(w, self.l2, out=scratch)
            np.add(g, scratch, out=g)
        if self.l1:
            np.sign(w, out=scratch)
            np.multiply(scratch, self.l1, out=scratch)
            np.add(g, scratch, out=g)
        self._rule(w, g, slots, row, scratch)

    @abstractmethod
    def _rule(
        self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], row: Sequence[float], scratch: np.ndarray
    ) -> None: ...


@dataclass(frozen=True)
class SGD(Optimizer):
    """``w ← w - η g``."""

    rate: float | Schedule = 0.03

    def _rule(
        self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], row: Sequence[float], scratch: np.ndarray
    ) -> None:
        np.multiply(g, row[0], out=g)
        np.subtract(w, g, out=w)


@dataclass(frozen=True)
class _Accelerated(Optimizer):
    """Rules with a velocity ``v ← η g + α v``; the rate stands inside the memory."""

    slots: ClassVar[tuple[str, ...]] = ("velocity",)

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        what = f"{type(self).__name__} momentum"
        keep_checked(self, momentum=check_number(what, self.momentum, least=0.0, below=1.0))

    def _accelerate(self, g: np.ndarray, velocity: np.ndarray, rate: float) -> None:
        """``g ← η g``, ``v ← g + α v``."""
        np.multiply(g, rate, out=g)
        np.multiply(velocity, self.momentum, out=velocity)
        np.add(velocity, g, out=velocity)


@dataclass(frozen=True)
class Momentum(_Accelerated):
    """``v ← η g + α v``, ``w ← w - v`` (Rumelhart, Hinton and Williams, Nature 323, 1986).

    With a constant rate this is PyTorch's SGD with momentum.
    """

    def _rule(
        self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], row: Sequence[float], scratch: np.ndarray
    ) -> None:
        (velocity,) = slots
        self._accelerate(g, velocity, row[0])
        np.subtract(w, velocity, out=w)


@dataclass(frozen=True)
class Nesterov(_Accelerated):
    """``v ← η g + α v``, ``w ← w - (η g + α v)`` (Sutskever et al., ICML 2013, as PyTorch writes it)."""

    def _rule(
        self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], row: Sequence[float], scratch: np.ndarray
    ) -> None:
        (velocity,) = slots
        self._accelerate(g, velocity, row[0])
        np.multiply(velocity, self.momentum, out=scratch)
        np.add(scratch, g, out=scratch)
        np.subtract(w, scratch, out=w)


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """``s ← ρ s + (1-ρ) g²``, ``w ← w - η g / (√s + ε)`` (Tieleman and Hinton, lecture 6.5, 2012)."""

    slots: ClassVar[tuple[str, ...]] = ("mean_square",)

    rate: float | Schedule = 0.001
    rho: float = 0.99
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        rho = check_number("RMSprop rho", self.rho, least=0.0, below=1.0)
        keep_checked(self, rho=rho, epsilon=check_number("RMSprop epsilon", self.epsilon, above=0.0))

    def _rule(
        self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], row: Sequence[float], scratch: np.ndarray
    ) -> None:
        (mean_square,) = slots
        np.multiply(g, g, out=scratch)
        np.multiply(scratch, 1.0 - self.rho, out=scratch)
        np.multiply(mean_square, self.rho, out=mean_square)
        np.add(mean_square, scratch, out=mean_square)
        np.sqrt(mean_square, out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.multiply(g, row[0], out=g)
        np.divide(g, scratch, out=g)
        np.subtract(w, g, out=w)


@dataclass(frozen=True)
class _Adaptive(Optimizer):
    """Rules with the step of Adam."""

    slots: ClassVar[tuple[str, ...]] = ("mean", "mean_square")
    columns: ClassVar[tuple[str, ...]] = ("rate", "step_size", "root_scale")

    rate: float | Schedule = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        beta1 = check_number(f"{name} beta1", self.beta1, least=0.0, below=1.0)
        beta2 = check_number(f"{name} beta2", self.beta2, least=0.0, below=1.0)
        epsilon = check_number(f"{name} epsilon", self.epsilon, above=0.0)
        keep_checked(self, beta1=beta1, beta2=beta2, epsilon=epsilon)

    def table(self, first_step: int, rates: np.ndarray) -> np.ndarray:
        t = np.arange(first_step + 1, first_step + 1 + len(rates), dtype=np.float64)
        step_size = rates / (1.0 - self.beta1**t)
        return np.stack([rates, step_size, 1.0 / np.sqrt(1.0 - self.beta2**t)], axis=1)

    def _adapt(
        self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], row: Sequence[float], scratch: np.ndarray
    ) -> None:
        mean, mean_square = slots
        _, step_size, root_scale = row
        np.multiply(g, 1.0 - self.beta1, out=scratch)
        np.multiply(mean, self.beta1, out=mean)
        np.add(mean, scratch, out=mean)
        np.multiply(g, g, out=g)
        np.multiply(g, 1.0 - self.beta2, out=g)
        np.multiply(mean_square, self.beta2, out=mean_square)
        np.add(mean_square, g, out=mean_square)
        np.sqrt(mean_square, out=g)
        np.multiply(g, root_scale, out=g)
        np.add(g, self.epsilon, out=g)
        np.multiply(mean, step_size, out=scratch)
        np.divide(scratch, g, out=g)
        np.subtract(w, g, out=w)


@dataclass(frozen=True)
class Adam(_Adaptive):
    """``m ← β₁ m + (1-β₁) g``, ``v ← β₂ v + (1-β₂) g²``, ``w ← w - η m̂ / (√v̂ + ε)``.

    m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ) at step t from 1 (Kingma and Ba, ICLR 2015).
    """

    _rule = _Adaptive._adapt


@dataclass(frozen=True)
class AdamW(_Adaptive):
    """Adam after ``w ← (1 - η λ) w``, the decay λ apart from the gradient (Loshchilov and Hutter, ICLR 2019)."""

    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_checked(self, weight_decay=check_number("AdamW weight_decay", self.weight_decay, least=0.0))

    def _rule(
        self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], row: Sequence[float], scratch: np.ndarray
    ) -> None:
        np.multiply(w, 1.0 - row[0] * self.weight_decay, out=w)
        self._adapt(w, g, slots, row, scratch)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__: kind for kind in (SGD, Momentum, Nesterov, RMSprop, Adam, AdamW)
}
_BY_NAME = {name.lower(): kind for name, kind in OPTIMIZERS.items()}


def as_optimizer(optimizer: Optimizer | OptimizerName) -> Optimizer:
    """``optimizer`` itself if it is one; if it is a name, that optimizer with its default rate.

    Raises:
        DtypeError: it is neither.
        UnknownNameError: no optimizer has that name.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        kind = OPTIMIZERS.get(optimizer)  # as the class is called
        return (kind or _BY_NAME[lookup("optimizer", optimizer, _BY_NAME)])()
    hint = ""
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        hint = f"{optimizer.__name__}() makes one with the default rate"
    expected = "an optimizer, such as mlpgpu.Adam(0.001), or a name: one of " + ", ".join(_BY_NAME)
    raise DtypeError("optimizer", expected=expected, got=shown(optimizer), hint=hint)
