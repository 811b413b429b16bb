"""Learning rates as functions of time.

A schedule maps steps to rates in float64.  Time runs in steps over the life of a trainer, or in
epochs, counted with fractions within an epoch: a length is given as one or the other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from .errors import ConfigurationError, check_integer, check_number, check_text, keep_checked, lookup, shown
from .metrics import MODES, Mode, improves


@dataclass(frozen=True)
class Clock:
    """The time of consecutive steps.

    Attributes:
        step: (n,) int64, steps since the trainer was made, from 0.
        epoch: (n,) float64, epochs since then with fractions; None where only steps are known, as in
            ``Trainer.step``.
        epochs_per_step: how much of an epoch a step is.
        factor: what a schedule with memory (:class:`ReduceOnPlateau`) multiplies by at present.
    """

    step: np.ndarray
    epoch: np.ndarray | None = None
    epochs_per_step: float = 0.0
    factor: float = 1.0


class Schedule(ABC):
    """A learning rate that changes with time.  Schedules are frozen dataclasses of plain numbers."""

    @abstractmethod
    def rates(self, clock: Clock) -> np.ndarray:
        """The rate of each step, shape (n,), float64."""

    @property
    def length(self) -> tuple[float | None, int | None]:
        """After how many epochs, or steps, it stays at its last rate; (None, None) if it never does."""
        return None, None


def _check_length(owner: object, epochs: float | None, steps: int | None) -> None:
    """Keep the length of a schedule as the number that it is."""
    name = type(owner).__name__
    if (epochs is None) == (steps is None):
        got = f"epochs={shown(epochs)}, steps={shown(steps)}"
        raise ConfigurationError(name, expected="one of epochs= and steps=", got=got)
    if steps is not None:
        keep_checked(owner, steps=check_integer(f"{name} steps", steps, least=1))
    else:
        keep_checked(owner, epochs=check_number(f"{name} epochs", epochs, above=LEAST_LENGTH))


def _keep_numbers(owner: object, **bounds: dict[str, float]) -> None:
    """Check fields of a schedule against what :func:`check_number` is told of each, and keep them as floats."""
    name = type(owner).__name__
    kept = {field: check_number(f"{name} {field}", getattr(owner, field), **bound) for field, bound in bounds.items()}
    keep_checked(owner, **kept)


_FROM_0, _ABOVE_0 = {"least": 0.0}, {"above": 0.0}
_SHARE = {"above": 0.0, "below": 1.0}
LEAST_LENGTH = 1e-9  # epochs, of which a step is a larger part; what is divided by it stays finite
_RISE = {"above": LEAST_LENGTH, "below": 1.0}


def _progress(owner: object, clock: Clock, epochs: float | None, steps: int | None) -> np.ndarray:
    """Elapsed time in units of the length given, shape (n,)."""
    if steps is not None:
        return clock.step / steps
    if clock.epoch is None:
        what = f"{type(owner).__name__} in Trainer.step, which knows no epochs"
        raise ConfigurationError(what, expected="a length in steps=", got=f"epochs={epochs}")
    return clock.epoch / epochs


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rate at every step."""

    rate: float

    def __post_init__(self) -> None:
        _keep_numbers(self, rate=_FROM_0)

    def rates(self, clock: Clock) -> np.ndarray:
        return np.full(len(clock.step), float(self.rate))


@dataclass(frozen=True)
class StepDecay(Schedule):
    """``rate · factor ** floor(time / length)``."""

    rate: float
    factor: float
    epochs: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        _keep_numbers(self, rate=_FROM_0, factor=_ABOVE_0)
        _check_length(self, self.epochs, self.steps)

    def rates(self, clock: Clock) -> np.ndarray:
        return self.rate * self.factor ** np.floor(_progress(self, clock, self.epochs, self.steps))


@dataclass(frozen=True)
class ExponentialDecay(Schedule):
    """``rate · factor ** (time / length)``."""

    rate: float
    factor: float
    epochs: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        _keep_numbers(self, rate=_FROM_0, factor=_ABOVE_0)
        _check_length(self, self.epochs, self.steps)

    def rates(self, clock: Clock) -> np.ndarray:
        return self.rate * self.factor ** _progress(self, clock, self.epochs, self.steps)


@dataclass(frozen=True)
class CosineDecay(Schedule):
    """Half a cosine from ``rate`` to ``final`` over the length, then ``final``.

    Source: Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts.
    """

    rate: float
    epochs: float | None = None
    steps: int | None = None
    final: float = 0.0

    def __post_init__(self) -> None:
        _keep_numbers(self, rate=_FROM_0, final=_FROM_0)
        _check_length(self, self.epochs, self.steps)

    @property
    def length(self) -> tuple[float | None, int | None]:
        return self.epochs, self.steps

    def rates(self, clock: Clock) -> np.ndarray:
        progress = np.minimum(_progress(self, clock, self.epochs, self.steps), 1.0)
        return self.final + (self.rate - self.final) * 0.5 * (1.0 + np.cos(np.pi * progress))


@dataclass(frozen=True)
class WarmUp(Schedule):
    """A linear rise over the length to another schedule's rate, which runs from the start beside it.

    ``rate`` is a number or a schedule without memory; step k has min(1, (k + 1) / length) of its rate.
    """

    rate: float | Schedule
    epochs: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        rate = self.rate if isinstance(self.rate, Schedule) else check_number("WarmUp rate", self.rate, least=0.0)
        keep_checked(self, rate=rate)
        if isinstance(rate, ReduceOnPlateau):
            raise ConfigurationError("WarmUp rate", expected="a schedule without memory", got="ReduceOnPlateau")
        _check_length(self, self.epochs, self.steps)

    @property
    def length(self) -> tuple[float | None, int | None]:
        return as_schedule(self.rate).length

    def rates(self, clock: Clock) -> np.ndarray:
        # A step counts when it ends, so that the first one is not wasted on a rate of 0.
        one_step = clock.epochs_per_step / self.epochs if self.epochs is not None else 1.0 / (self.steps or 1)
        rise = np.minimum(_progress(self, clock, self.epochs, self.steps) + one_step, 1.0)
        return as_schedule(self.rate).rates(clock) * rise


@dataclass(frozen=True)
class OneCycle(Schedule):
    """From ``peak / start_divisor`` up to ``peak`` and down to ``peak / final_divisor``, in half cosines.

    The rise takes the fraction ``rise`` of the length; afterwards the rate stays at its last value.
    Source: Smith and Topin, "Super-convergence", 2018, with cosines for their straight lines.
    """

    peak: float
    epochs: float | None = None
    steps: int | None = None
    rise: float = 0.3
    start_divisor: float = 25.0
    final_divisor: float = 1e5

    def __post_init__(self) -> None:
        _keep_numbers(self, peak=_FROM_0, rise=_RISE, start_divisor=_ABOVE_0, final_divisor=_ABOVE_0)
        _check_length(self, self.epochs, self.steps)

    @property
    def length(self) -> tuple[float | None, int | None]:
        return self.epochs, self.steps

    def rates(self, clock: Clock) -> np.ndarray:
        progress = np.minimum(_progress(self, clock, self.epochs, self.steps), 1.0)
        start, final = self.peak / self.start_divisor, self.peak / self.final_divisor
        up = 0.5 * (1.0 - np.cos(np.pi * np.minimum(progress / self.rise, 1.0)))
        down = 0.5 * (1.0 - np.cos(np.pi * np.maximum(progress - self.rise, 0.0) / (1.0 - self.rise)))
        return np.where(progress < self.rise, start + (self.peak - start) * up, self.peak + (final - self.peak) * down)


@dataclass(frozen=True)
class Plateau:
    """What :class:`ReduceOnPlateau` remembers: the best value so far, epochs since, the factor reached."""

    best: float | None = None
    wait: int = 0
    factor: float = 1.0

    def __post_init__(self) -> None:
        keep_checked(
            self,
            best=None if self.best is None else check_number("Plateau best", self.best),
            wait=check_integer("Plateau wait", self.wait, least=0),
            factor=check_number("Plateau factor", self.factor, least=0.0),
        )


@dataclass(frozen=True)
class ReduceOnPlateau(Schedule):
    """``rate``, times ``factor`` whenever ``monitor`` has not improved for ``patience`` epochs; not under ``least``.

    ``monitor`` is a column of the history; to improve is to pass the best value by more than ``min_delta``, upward or
    downward by ``mode``, as of ``EarlyStopping``.
    The description has no memory of its own: the trainer keeps a :class:`Plateau` and saves it.
    """

    rate: float
    factor: float = 0.1
    patience: int = 5
    monitor: str = "validation_loss"
    min_delta: float = 1e-4
    least: float = 0.0
    mode: Mode = field(default="auto", metadata={"came_later": True})

    def __post_init__(self) -> None:
        _keep_numbers(self, rate=_FROM_0, factor=_SHARE, min_delta=_FROM_0, least=_FROM_0)
        keep_checked(
            self,
            patience=check_integer("ReduceOnPlateau patience", self.patience, least=1),
            monitor=check_text("ReduceOnPlateau monitor", self.monitor),
            mode=lookup("ReduceOnPlateau mode", self.mode, MODES),
        )

    def rates(self, clock: Clock) -> np.ndarray:
        return np.full(len(clock.step), max(self.rate * clock.factor, self.least))

    def observe(self, plateau: Plateau, value: float) -> Plateau:
        """The memory after an epoch with ``value`` in the column monitored, where NaN and infinity never improve."""
        best = plateau.best
        if math.isfinite(value) and (best is None or improves(self.monitor, value, best, self.min_delta, self.mode)):
            return Plateau(value, 0, plateau.factor)
        if plateau.wait + 1 >= self.patience:
            return Plateau(best, 0, plateau.factor * self.factor)
        return Plateau(best, plateau.wait + 1, plateau.factor)


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind
    for kind in (Constant, StepDecay, ExponentialDecay, CosineDecay, WarmUp, OneCycle, ReduceOnPlateau)
}


def as_schedule(rate: float | Schedule) -> Schedule:
    """``rate`` itself if it is a schedule, a :class:`Constant` if it is a number.

    Raises:
        DtypeError, ConfigurationError: it is neither, or a number that is negative or not finite.
    """
    if isinstance(rate, Schedule):
        return rate
    return Constant(check_number("learning rate", rate, least=0.0))
