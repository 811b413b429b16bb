"""Trials that promise nothing are broken off."""

from __future__ import annotations

import math
from typing import Any

from ..errors import BackendError, DtypeError, check_text, shown
from ..history import Record
from .callback import VALIDATION_LOSS, Callback, TrainerLike, check_monitor


class OptunaPruning(Callback):
    """Reports a column to an Optuna trial after each epoch, and ends it where its pruner says so (extra ``optuna``).

    ``fit`` then raises ``optuna.TrialPruned``, which an objective lets through::

        def objective(trial):
            rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
            trainer = mlpgpu.Trainer(mlpgpu.Network(layers, seed=1), "mse", mlpgpu.Adam(rate))
            history = trainer.fit(train, epochs=50, validation=0.1, callbacks=[mlpgpu.OptunaPruning(trial)])
            return history["validation_loss"][-1]

    The trainer is then as after the epoch that ended.

    Arguments:
        trial: Optuna's.
        monitor: a column of the history, of which less or more is better as the study says.

    Raises:
        DtypeError: ``trial`` cannot be reported to, or ``monitor`` is no name.
        BackendError: Optuna is not installed.
        ConfigurationError: at the start of a fit: there is no such column.
    """

    def __init__(self, trial: Any, monitor: str = VALIDATION_LOSS) -> None:
        has_hooks = all(callable(getattr(trial, name, None)) for name in ("report", "should_prune"))
        if isinstance(trial, type) or not has_hooks:
            raise DtypeError("OptunaPruning trial", expected="a trial of Optuna", got=shown(trial))
        self.trial = trial
        self.monitor = check_text("OptunaPruning monitor", monitor)
        try:
            from optuna import TrialPruned
        except ImportError as error:
            hint = "pip install 'mlpgpu[optuna]'"
            raise BackendError("OptunaPruning", expected="the package optuna", got=error, hint=hint) from error
        self._pruned = TrialPruned

    def begin(self, trainer: TrainerLike) -> None:
        check_monitor("OptunaPruning", self.monitor, trainer.monitored)

    def epoch_end(self, trainer: TrainerLike, record: Record) -> None:
        value = float(record.get(self.monitor, math.nan))
        self.trial.report(value, trainer.epochs)
        if self.trial.should_prune():
            raise self._pruned(f"after epoch {trainer.epochs}, with {self.monitor} {value:g}")
