"""scikit-learn's callbacks, from version 1.9 on: each epoch is a task of the fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..callbacks import Callback
from ..history import Record
from ..training import Trainer
from .course import Follower


class EpochTasks(Callback):
    """Tells the callbacks that ``set_callbacks`` gave an estimator of the fit and its epochs.

    A callback that returns what is true at the end of an epoch ends the fit.

    Arguments:
        estimator: as it is being fitted.
        data: ``X``, ``y`` and ``metadata``, as callbacks are given them.
        epochs: at most.
        follower: which has been told of an epoch before, and whether the fit ends with it.
        fitted: gives the attributes that make a fitted estimator of a copy.
    """

    def __init__(
        self,
        estimator: Any,
        data: Mapping[str, Any],
        epochs: int,
        follower: Follower,
        fitted: Callable[[], dict[str, Any]],
    ) -> None:
        self._given = {"estimator": estimator, **data}
        self._epochs, self._follower, self._fitted = epochs, follower, fitted
        self._fit = estimator._init_callback_context(max_subtasks=epochs)
        self._epoch: Any = None

    @classmethod
    def of(cls, estimator: Any, **arguments: Any) -> list[EpochTasks]:
        """One for an estimator that has such callbacks; none for others, and where scikit-learn has none."""
        has_any = getattr(estimator, "_skl_callbacks", None) or hasattr(estimator, "_parent_callback_ctx")
        return [cls(estimator, **arguments)] if has_any and hasattr(estimator, "_init_callback_context") else []

    def begin(self, trainer: Trainer) -> None:  # type: ignore[override]
        self._fit.call_on_fit_task_begin(**self._given)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch = self._fit.subcontext(task_name="epoch").call_on_fit_task_begin(**self._given)

    def epoch_end(self, trainer: Trainer, record: Record) -> bool:  # type: ignore[override]
        is_over = self._epoch.call_on_fit_task_end(**self._given, reconstruction_attributes=self._fitted)
        if not (is_over or self._follower.converged or self._follower.epochs == self._epochs):
            self._begin_epoch()
        return bool(is_over)

    def end(self, trainer: Trainer) -> None:  # type: ignore[override]
        self._fit.call_on_fit_task_end(**self._given, reconstruction_attributes=self._fitted)
