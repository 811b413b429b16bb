"""The course of a fit as scikit-learn counts it: its curves, when it has converged, and its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..callbacks import Callback
from ..history import Record
from ..metrics import VALIDATION
from ..training import Trainer
from .building import dense_places
from .losses import CountedLoss
from .settings import Settings

SMALLEST_RATE = 1e-6  # of learning_rate="adaptive", as in scikit-learn
ADAPTIVE_DIVISOR = 5.0


@dataclass
class Course:
    """What goes on from fit to fit of a warm start, and from call to call of ``partial_fit``.

    Attributes:
        losses: of each epoch.
        scores, validation_losses: likewise, of the rows held out.
        best_loss, best_score: so far.
        no_improvement: epochs since, one after another.
        samples: rows seen, each as often as it was.
        rate: the learning rate, before it is made that of our gradient.
    """

    losses: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    best_loss: float = math.inf
    best_score: float | None = None
    no_improvement: int = 0
    samples: int = 0
    rate: float = 0.0


class Follower(Callback):
    """Keeps a :class:`Course` through one fit of a trainer, which it ends once that has converged.

    An epoch's loss has the penalty ½ alpha Σ w² over its batches' rows, as scikit-learn's has; of the weights at the
    epoch's beginning if it has one batch, and else of the mean of Σ w² at its beginning and end.

    Arguments:
        rows, batch_rows: of the fit.
        weight: the mean weight of a row.
        monitor: the history's column of the score, or None where no rows are held out.
        higher_is_better: whether the score is to rise.
        is_whole: whether the best epoch's parameters are put back whenever the fit ends, and not, as ``partial_fit``
            has it, only once it has converged.

    Attributes:
        epochs: finished ones of this fit.
        converged: whether it ended because it had.
    """

    def __init__(
        self,
        course: Course,
        settings: Settings,
        counted: CountedLoss,
        *,
        rows: int,
        batch_rows: int,
        weight: float,
        monitor: str | None,
        higher_is_better: bool,
        is_whole: bool,
    ) -> None:
        self._course, self._settings, self._counted = course, settings, counted
        self._rows, self._weight = rows, weight
        self._batches = math.ceil(rows / batch_rows)
        self._monitor, self._sign = monitor, 1.0 if higher_is_better else -1.0
        self._square, self._is_whole = 0.0, is_whole
        self._weights: list[slice] = []  # of the network's parameters, those that alpha counts
        self.epochs = 0
        self.converged = False

    def begin(self, trainer: Trainer) -> None:  # type: ignore[override]
        if self._settings.alpha:
            segments = trainer.network.segments
            weights = [segments[f"{place}.weight"] for place in dense_places(trainer.network)]
            self._weights = [slice(segment.offset, segment.end) for segment in weights]
        self._square = self._squares(trainer)
        if self._is_whole and self._monitor is not None and self._course.best_score is not None:
            trainer.keep()  # a warm start begins at the best epoch so far

    def epoch_end(self, trainer: Trainer, record: Record) -> bool:  # type: ignore[override]
        course, settings = self._course, self._settings
        self.epochs += 1
        course.samples += self._rows
        loss = record["loss"] * self._counted.value_factor + self._counted.offset + self._penalty(trainer)
        course.losses.append(loss)
        if settings.verbose:
            print(f"Iteration {self.epochs}, loss = {loss:.8f}")
        if self._monitor is None:
            improves = not loss > course.best_loss - settings.tol
            course.best_loss = min(loss, course.best_loss)
        else:
            improves = self._observe(trainer, record)
        course.no_improvement = 0 if improves else course.no_improvement + 1
        if settings.learning_rate == "invscaling":
            self._set_rate(trainer, settings.rate / (course.samples + 1) ** settings.power_t)
        return course.no_improvement > settings.patience and self._give_up(trainer)

    def _observe(self, trainer: Trainer, record: Record) -> bool:
        """Note the score of the rows held out, and whether it has improved."""
        course = self._course
        assert self._monitor is not None
        score = record[self._monitor]
        course.scores.append(score)
        course.validation_losses.append(record[f"{VALIDATION}loss"] * self._counted.value_factor + self._counted.offset)
        if self._settings.verbose:
            print(f"Validation score: {score:f}")
        best = -math.inf if course.best_score is None else self._sign * course.best_score
        improves = not self._sign * score < best + self._settings.tol
        if self._sign * score > best:
            course.best_score = score
            trainer.keep()
        return improves

    def _give_up(self, trainer: Trainer) -> bool:
        """Whether the fit ends now; an adaptive rate is lowered first."""
        course, settings = self._course, self._settings
        what = "Training loss" if self._monitor is None else "Validation score"
        told = f"{what} did not improve more than tol={settings.tol:f} for {settings.patience} consecutive epochs."
        if settings.learning_rate == "adaptive" and course.rate > SMALLEST_RATE:
            self._set_rate(trainer, course.rate / ADAPTIVE_DIVISOR)
            course.no_improvement = 0
            if settings.verbose:
                print(f"{told} Setting learning rate to {course.rate:f}")
            return False
        self.converged = True
        if settings.verbose:
            print(f"{told} Stopping.")
        return True

    def end(self, trainer: Trainer) -> None:  # type: ignore[override]
        if self._is_whole or self.converged:
            self.restore_best(trainer)

    def restore_best(self, trainer: Trainer) -> bool:
        """Put the best epoch's parameters back, if there is one by a score."""
        has_best = self._monitor is not None and self._course.best_score is not None
        if has_best:
            trainer.restore_kept()
        return has_best

    def _set_rate(self, trainer: Trainer, rate: float) -> None:
        self._course.rate = rate
        trainer.rate = rate * self._counted.gradient_factor

    def _penalty(self, trainer: Trainer) -> float:
        if not self._settings.alpha:
            return 0.0
        square, self._square = self._square, self._squares(trainer)
        if self._batches > 1:
            square = 0.5 * (square + self._square)
        return 0.5 * self._settings.alpha * square * self._batches / (self._rows * self._weight)

    def _squares(self, trainer: Trainer) -> float:
        """Σ w² over weights."""
        return trainer.network.values.square_sum(self._weights) if self._weights else 0.0
