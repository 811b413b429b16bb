"""The loop of a fit: epochs, runs of steps, and what happens between them."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..backends import Sampling
from ..callbacks import Listeners, TrainerLike
from ..history import Record
from ..metrics import VALIDATION
from ..schedules import Clock, ReduceOnPlateau
from .engine import Engine
from .interrupt import deferred_interrupt
from .progress import FitProgress
from .task import Columns, MetricFunction, Prepared

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a notebook without widgets: its bar is one of text
    from tqdm.auto import tqdm

RUN_SECONDS = 0.05  # about how long a program runs between looks at Ctrl-C
RUN_STEPS = 4096  # at most, between them


@dataclass
class FitLoop:
    """What the epochs of a fit need, once nothing is left to refuse.

    Attributes:
        trainer: what callbacks are called with.
        fit: the part of the engine's progress that belongs to this fit.
        sampling: the rows of each step.
        validation: evaluated after each epoch, by ``metrics``, if it is there; ``functions`` are those of one's own.
        columns: the history's for the numbers of each metric.
    """

    trainer: TrainerLike
    engine: Engine
    fit: FitProgress
    sampling: Sampling
    listeners: Listeners
    validation: Prepared | None
    metrics: tuple[str, ...]
    functions: Mapping[str, MetricFunction]
    columns: Mapping[str, Columns]

    def run(self, epochs: int, *, is_over: bool, shows_bar: bool) -> None:
        """Train, unless the fit is over, until ``epochs`` are finished, a callback ends the fit, or Ctrl-C does."""
        progress = self.engine.progress
        with (
            tqdm(total=epochs, initial=progress.epochs, unit="epoch", disable=not (shows_bar and _has_viewer())) as bar,
            deferred_interrupt() as stop,
        ):
            while progress.epochs < epochs and not is_over:
                started, before = time.perf_counter(), progress.steps
                self._train_epoch(stop)
                if stop:
                    progress.history.interrupted = True
                    where = f"after step {progress.steps}, in epoch {progress.epochs + 1}"
                    told = f"mlpgpu: interrupted {where}; the network is as that step left it"
                    print(f"{told} (Ctrl-C again at once ends the program)", file=sys.stderr)
                    break
                if self.listeners.save:
                    self.engine.prefetch()  # what they save is copied while the validation is under way
                record = self._end_epoch(started)
                is_over = self.listeners.add_columns(self.trainer, record)
                schedule = self.engine.schedule  # which a callback may have set
                if isinstance(schedule, ReduceOnPlateau):
                    progress.plateau = schedule.observe(progress.plateau, record[schedule.monitor])
                is_over |= self.listeners.epoch_end(self.trainer, record)
                of_epoch = (progress.steps - before) / self.sampling.steps_per_epoch
                bar.set_postfix_str(_postfix(record, of_epoch * self.sampling.rows / record["seconds"]))
                bar.update()

    def _train_epoch(self, stop: list[int]) -> None:
        """Train from where the epoch stands to its end, or until ``stop`` is not empty."""
        progress, fit, steps = self.engine.progress, self.fit, self.sampling.steps_per_epoch
        first = fit.first_step + (progress.epochs - fit.first_epoch) * steps
        count = 1
        while (done := progress.steps - first) < steps and not stop:
            count = self.listeners.steps_until_due(progress.steps, min(count, RUN_STEPS, steps - done))
            clock = Clock(
                step=progress.steps + np.arange(count),
                epoch=progress.epochs + np.arange(done, done + count) / steps,
                epochs_per_step=1.0 / steps,
                factor=progress.plateau.factor,
            )
            started = time.perf_counter()
            sums = self.engine.take_steps(clock)
            elapsed = time.perf_counter() - started
            # Added one by one, so that the sum does not depend on how many steps ran at a time.
            for loss, weight in sums.tolist():
                fit.loss += loss
                fit.weight += weight
            self.listeners.step_end(self.trainer)
            count = max(1, int(count * min(2.0, RUN_SECONDS / max(elapsed, 1e-9))))

    def _end_epoch(self, started: float) -> Record:
        """Close the epoch's books: its record, the history."""
        progress, fit = self.engine.progress, self.fit
        record: Record = {"epoch": progress.epochs + 1, "loss": fit.loss / fit.weight if fit.weight else 0.0}
        if self.validation is not None:
            results = self.engine.evaluate(self.validation, self.metrics, self.functions)
            for name, value in results.items():
                if np.ndim(value) == 0 or name not in self.functions:
                    pairs = zip(self.columns.get(name, ()), np.ravel(value).tolist(), strict=False)
                    record |= {VALIDATION + column: number for column, number in pairs}
        record |= {"rate": fit.rate, "seconds": time.perf_counter() - started}
        fit.loss = fit.weight = 0.0
        progress.epochs += 1
        progress.history.append(record)
        return record


def _has_viewer() -> bool:
    """Whether somebody sees a bar: at a terminal or in a notebook, whose standard error is no terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    in_notebook = shell is not None and "IPKernelApp" in getattr(shell, "config", ())
    return in_notebook or (sys.stderr is not None and sys.stderr.isatty())


def _postfix(record: Record, rows_per_second: float) -> str:
    shown = [f"{name} {value:.4g}" for name, value in record.items() if name not in ("epoch", "rate", "seconds")]
    return ", ".join([*shown, f"{rows_per_second:,.0f} rows/s"])
