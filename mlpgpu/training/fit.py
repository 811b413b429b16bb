"""The loop of a fit: epochs, runs of steps, and what happens between them."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import Sampling
from ..callbacks import SCHEDULE, Listeners, TrainerLike
from ..history import Record, retime
from ..metrics import VALIDATION
from ..network import Network
from ..schedules import Clock, ReduceOnPlateau
from .engine import Engine
from .interrupt import Interrupts, interrupts_of_fit
from .progress import Pending, Progress
from .task import Columns, MetricFunction, Prepared
from .team import Team

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a notebook without widgets: its bar is one of text
    from tqdm.auto import tqdm

RUN_SECONDS = 0.05  # about how long a program runs between looks at Ctrl-C
RUN_STEPS = 4096  # at most, between them


@dataclass
class Books:
    """Closes the books of epochs; it holds no trainer, as an engine holds it, so that a dropped trainer is freed.

    Attributes:
        started: when the epoch under way began.
    """

    started: float = 0.0

    def closed(self, progress: Progress, ended: float, **columns: float) -> Progress:
        """The progress after an epoch that ended at this time, whose record, with ``columns``, joins the history."""
        assert progress.fit is not None
        loss, weight = progress.fit.loss, progress.fit.weight
        record: Record = {"epoch": progress.epochs + 1, "loss": loss / weight if weight else 0.0, **columns}
        progress.history.append(record | {"rate": progress.fit.rate, "seconds": ended - self.started})
        self.started = ended
        return progress.changed(epochs=progress.epochs + 1, fit=progress.fit.changed(loss=0.0, weight=0.0))


@dataclass
class FitLoop:
    """What the epochs of a fit need, once nothing is left to refuse.

    Attributes:
        trainer: what callbacks are called with.
        team: the ranks, each of which runs this loop; rank 0 calls callbacks, says how many steps run at a time, and
            shows the bar.
        sampling: the rows of each step.
        monitored: the columns that its records have.
        validation: evaluated after each epoch, by ``metrics``, if it is there; ``functions`` are those of one's own.
        columns: the history's for the numbers of each metric.
    """

    trainer: TrainerLike
    team: Team
    network: Network
    engine: Engine
    sampling: Sampling
    listeners: Listeners
    monitored: tuple[str, ...]
    validation: Prepared | None
    metrics: tuple[str, ...]
    functions: Mapping[str, MetricFunction]
    columns: Mapping[str, Columns]

    def __post_init__(self) -> None:
        self._called: str | None = None  # the key of the callback that is being told of a step's or an epoch's end
        self._is_interrupted = False  # as all ranks know
        self._steps_at_once = 1  # as many as fit into RUN_SECONDS, by the last ones
        self._books = Books()

    def run(self, epochs: int, *, is_over: bool, shows_bar: bool) -> None:
        """Train, unless the fit is over, until ``epochs`` are finished, a callback ends the fit, or Ctrl-C does."""
        shows_bar &= self.team.is_leader
        with interrupts_of_fit() as interrupts, _bar(shows_bar, epochs, self.engine.progress.epochs) as bar:
            is_over |= self._tell_pending(interrupts, fills=True)
            while self.engine.progress.epochs < epochs and not is_over:
                started, before = time.perf_counter(), self.engine.progress
                self._books.started = started
                self._train_epoch(epochs, interrupts)
                if self._is_interrupted:
                    break
                if self.listeners.save:
                    self.engine.prefetch()  # what they save is copied while the validation is under way
                self._end_epoch(interrupts)
                is_over = self._tell_pending(interrupts)
                if bar is not None:
                    after, elapsed = self.engine.progress, time.perf_counter() - started
                    of_epoch = (after.steps - before.steps) / self.sampling.steps_per_epoch
                    bar.set_postfix_str(_postfix(after.history.last, of_epoch * self.sampling.rows / elapsed))
                    bar.update(after.epochs - before.epochs)
            self._note(interrupts, epochs)
            for key in self.listeners.keys:
                self._end(key, interrupts)
                self.engine.progress = self.engine.progress.changed(callbacks=self.listeners.states())
            self._note(interrupts, epochs)
            self.listeners.settle()
            self.engine.gather()

    def _note(self, interrupts: Interrupts, epochs: int) -> None:
        """Mark the history and tell the user if there was a Ctrl-C, once."""
        progress = self.engine.progress
        self._agree_on_steps(0, interrupts)
        if not self._is_interrupted or progress.history.interrupted:
            return
        progress.history.interrupted = True
        if not self.team.is_leader:
            return
        where = f"in epoch {progress.epochs + 1}" if progress.epochs < epochs else "at the end of the last epoch"
        told = f"mlpgpu: interrupted after step {progress.steps}, {where}; the network is as that step left it"
        print(f"{told} (Ctrl-C again at once ends the program)", file=sys.stderr)

    def _train_epoch(self, epochs: int, interrupts: Interrupts) -> None:
        """Train from where the epoch stands to its end, or until Ctrl-C.

        Where nothing comes between this epoch and the next ones, and they are short, steps of several run at a time:
        then this ends with the last of these, and the others' books are closed.
        """
        engine, steps = self.engine, self.sampling.steps_per_epoch
        while (done := self._steps_of_epoch) < steps:
            progress = engine.progress
            left = (epochs - progress.epochs if self._is_unbroken else 1) * steps - done
            most = min(self._steps_at_once, RUN_STEPS, left)
            count = self.listeners.steps_until_due(progress.steps, most)
            if done + count > steps:
                count -= (done + count) % steps
            count = self._agree_on_steps(count, interrupts)
            if self._is_interrupted:
                return
            whole, batch = np.divmod(done + np.arange(count), steps)
            clock = Clock(
                step=progress.steps + np.arange(count),
                epoch=progress.epochs + whole + batch / steps,
                epochs_per_step=1.0 / steps,
                factor=progress.plateau.factor,
            )
            started = time.perf_counter()
            ends = range(steps - done, count, steps)
            engine.take_steps(clock, self.listeners.due_after_step, ends, self._books.closed)
            elapsed = time.perf_counter() - started
            self._agree_on_seconds(len(ends))
            interrupts.check()
            self._tell_pending(interrupts)
            fitting = count * RUN_SECONDS / max(elapsed, 1e-9)
            self._steps_at_once = max(1, int(min(fitting, 2 * self._steps_at_once)))
        self._agree_on_steps(0, interrupts)

    @property
    def _steps_of_epoch(self) -> int:
        """How many steps of the epoch under way are finished."""
        sampling, progress = self.sampling, self.engine.progress
        first = sampling.first_step + (progress.epochs - sampling.first_epoch) * sampling.steps_per_epoch
        return progress.steps - first

    @property
    def _is_unbroken(self) -> bool:
        """Whether nobody looks at the network, or is told anything, between two epochs."""
        is_told = isinstance(self.engine.schedule, ReduceOnPlateau) or self.listeners.due_after_epoch() != (SCHEDULE,)
        return self.validation is None and not is_told

    def _agree_on_steps(self, count: int, interrupts: Interrupts) -> int:
        """Rank 0's number of steps; notes whether a rank was interrupted."""
        if self.team.ranks == 1:
            self._is_interrupted = interrupts.is_received
            return count
        count, was_interrupted = self.team.agreed_steps(count, is_interrupted=interrupts.is_received)
        self._is_interrupted |= was_interrupted
        return count

    def _end_epoch(self, interrupts: Interrupts) -> None:
        """Evaluate what is to be, and close the epoch's books."""
        columns: Record = {}
        if self.validation is not None:
            with interrupts.open():
                results = self.engine.evaluate(self.validation, self.metrics, self.functions, together=True)
            for name, value in results.items():
                if np.ndim(value) == 0 or name not in self.functions:
                    pairs = zip(self.columns.get(name, ()), np.ravel(value).tolist(), strict=False)
                    columns |= {VALIDATION + column: number for column, number in pairs}
        closed = self._books.closed(self.engine.progress, time.perf_counter(), **columns)
        self.engine.progress = closed.changed(pending=Pending("epoch_end", self.listeners.due_after_epoch()))
        self._agree_on_seconds(1)

    def _agree_on_seconds(self, epochs: int) -> None:
        """Have the last epochs' records say how long they took rank 0."""
        if epochs and self.team.ranks > 1:
            retime(self.engine.progress.history, epochs, self.team.agreed)

    # --- callbacks, each of which is told once of a step or an epoch, whatever ends the fit in between ---

    def _tell_pending(self, interrupts: Interrupts, *, fills: bool = False) -> bool:
        """Tell those that have not been told of the last step or epoch; returns whether one ends the fit.

        What a resumed fit watches and the record has not is NaN where ``fills`` says so.
        """
        engine, pending = self.engine, self.engine.progress.pending
        if pending is None:
            return False
        record = self._last_record(pending.left, fills) if pending.hook == "epoch_end" else {}
        while pending is not None and pending.left:
            key, ends = pending.left[0], False
            if key == SCHEDULE:
                self._tell_schedule(record)
            else:
                ends = self._tell(key, pending.hook, record, interrupts)
            engine.progress = self._after(key, engine.progress, is_over=ends)
            pending = engine.progress.pending
        engine.progress = engine.progress.changed(pending=None)
        return pending is not None and pending.is_over

    def _tell(self, key: str, hook: str, record: Record, interrupts: Interrupts) -> bool:
        """Tell a callback, which may add to ``record``; returns whether it ends the fit."""
        known = set(record)
        is_over = self._lead(lambda: (self._call(key, hook, record, interrupts), record), record)
        if not self.team.is_leader and (added := {name: record[name] for name in record if name not in known}):
            self.engine.progress.history.extend_last(added)
        return is_over

    def _end(self, key: str, interrupts: Interrupts) -> None:
        def end() -> tuple[bool, Record]:
            with interrupts.open():
                self.listeners.end(key, self.trainer)
            return False, {}

        self._lead(end, {})

    def _lead(self, call: Callable[[], tuple[bool, Record]], record: Record) -> bool:
        """Have rank 0 call a callback, and all ranks have what it left: states, ``record``, parameters that it set."""
        if self.team.ranks == 1:
            return call()[0]

        def led() -> tuple[bool, Record, dict[str, Any], np.ndarray | None]:
            is_over, left = call()
            values = None if self.engine.has_values else self.network.flat_parameters()
            return is_over, left, self.listeners.states(), values

        is_over, left, states, values = self.team.lead(led, self.trainer)
        if not self.team.is_leader:
            record.update(left)
            self.listeners.follow(states)
            if values is not None:
                self.network.values.replace(values)
        return is_over

    def _call(self, key: str, hook: str, record: Record, interrupts: Interrupts) -> bool:
        try:
            self._called = key
            with interrupts.open():
                if hook == "epoch_end":
                    return self.listeners.epoch_end(key, self.trainer, record)
                self.listeners.step_end(key, self.trainer)
                return False
        finally:
            self._called = None

    def _tell_schedule(self, record: Record) -> None:
        schedule, progress = self.engine.schedule, self.engine.progress  # which a callback may have set
        if isinstance(schedule, ReduceOnPlateau):
            plateau = schedule.observe(progress.plateau, record[schedule.monitor])
            self.engine.progress = self._after(SCHEDULE, progress.changed(plateau=plateau))

    def _after(self, key: str, progress: Progress, *, is_over: bool = False) -> Progress:
        """The progress after the one of that key was told of what is pending."""
        if progress.pending is None:
            return progress
        return progress.changed(
            callbacks=self.listeners.states(), pending=progress.pending.without(key, is_over=is_over)
        )

    def to_save(self) -> Progress:
        """The progress as a file is to hold it that a callback has the trainer write while it is told of something."""
        progress = self.engine.progress
        return progress if self._called is None else self._after(self._called, progress)

    def _last_record(self, left: tuple[str, ...], fills: bool) -> Record:
        """The record of the last epoch, as the first of those ``left`` is to see it."""
        added = self.listeners.columns_of(left)
        record = {name: value for name, value in self.engine.progress.history.last.items() if name not in added}
        lacking = [name for name in self.monitored if name not in record and name not in added] if fills else []
        return record | dict.fromkeys(lacking, math.nan)


@contextmanager
def _bar(shows_bar: bool, epochs: int, done: int) -> Iterator[Any]:
    """A bar, or None where nobody would see it.

    Ctrl-C is received already: in the middle of tqdm it could leave tqdm's lock taken, and the next bar would wait for
    ever.
    """
    if not (shows_bar and _has_viewer()):
        yield None
        return
    with tqdm(total=epochs, initial=done, unit="epoch") as bar:
        yield bar


def _has_viewer() -> bool:
    """Whether somebody sees a bar: at a terminal or in a notebook, whose standard error is no terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    in_notebook = shell is not None and "IPKernelApp" in getattr(shell, "config", ())
    return in_notebook or (sys.stderr is not None and sys.stderr.isatty())


def _postfix(record: Record, rows_per_second: float) -> str:
    shown = [f"{name} {value:.4g}" for name, value in record.items() if name not in ("epoch", "rate", "seconds")]
    return ", ".join([*shown, f"{rows_per_second:,.0f} rows/s"])
