"""How far a trainer has come, all of which a run file holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import check_integer, check_number
from ..history import History
from ..schedules import Plateau

MOST_STEPS = 2**53  # as float64, in which rates are computed, counts them


@dataclass
class FitProgress:
    """Where a fit stands.

    Attributes:
        first_step, first_epoch: the trainer's finished steps and epochs when it began.
        shuffle, drop_last: its arguments.
        data: what its data set is known by.
        loss, weight: sums over the finished steps of the unfinished epoch.
        rate: of the last finished step.
    """

    first_step: int
    first_epoch: int
    shuffle: bool
    drop_last: bool
    data: dict[str, Any]
    loss: float = 0.0
    weight: float = 0.0
    rate: float = 0.0

    def __post_init__(self) -> None:
        for what in ("loss", "weight", "rate"):
            check_number(f"{what} of the fit", getattr(self, what))


@dataclass
class Progress:
    """Where a trainer stands.

    Attributes:
        steps, epochs: finished ones, over all fits.
        history: of all epochs.
        plateau: what a schedule with memory remembers.
        fit: of the last fit; None before the first and after a single step.
    """

    steps: int = 0
    epochs: int = 0
    history: History = field(default_factory=History)
    plateau: Plateau = field(default_factory=Plateau)
    fit: FitProgress | None = None

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, least=0, most=MOST_STEPS)
        check_integer("epochs", self.epochs, least=0, most=MOST_STEPS)
        if self.fit is not None:
            check_integer("first_step of the fit", self.fit.first_step, least=0, most=self.steps)
            check_integer("first_epoch of the fit", self.fit.first_epoch, least=0, most=self.epochs)
