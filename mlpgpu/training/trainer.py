"""Trainer: what a user sees of training."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import platform
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from .. import storage
from ..backends import (
    MEMORY_SHARE,
    MOST_BINS,
    MOST_ROWS,
    MOST_SHARDS,
    MOST_THREADS,
    Histogram,
    Sampling,
    choose_backend,
    get_backend,
)
from ..callbacks import SCHEDULE, Listeners, check_counted, check_monitor
from ..datasets import Dataset
from ..errors import (
    BackendError,
    ConfigurationError,
    DataMismatchError,
    DtypeError,
    FileFormatError,
    MlpgpuError,
    StorageError,
    check_integer,
    check_number,
    check_truth,
    lookup,
    refuse_setting,
    shown,
    warn_caller,
)
from ..history import History
from ..losses import Loss, as_loss
from ..metrics import VALIDATION, is_metric
from ..names import LossName, OptimizerName, ParallelName, PrecisionName, ReductionName
from ..network import Data, Network
from ..network.saved import parameter_paths
from ..optimizers import Optimizer, as_optimizer
from ..plan import CARD_PRECISIONS, MOST_PARTS, PRECISIONS, REDUCTIONS, WAYS, Choice, Parts, Plan
from ..plan.costs import choice_of
from ..ranks import check_agreement, on_one_host, rank, ranks
from ..schedules import Clock, ReduceOnPlateau, Schedule, as_schedule
from ..text import html, public_names, tell
from ..version import __version__
from .copies import CopiedTrainer, check_pickles
from .engine import Engine, InFile
from .fit import FitLoop
from .interrupt import uninterrupted
from .progress import MOST_STEPS, FitProgress
from .run_file import ARGUMENTS, KEPT, SavedRun, slot_paths
from .task import Columns, MetricFunction, Metrics, Prepared, Task, own_metrics
from .team import Team

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

PARALLELS = ("auto", "data", "tensor", "none")
OWN_COLUMNS = ("epoch", "loss", "rate", "seconds")  # of every record


def _takes_targets_with_inputs(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Tell whoever passes targets beside inputs, as other libraries have it, how it is done here."""

    @functools.wraps(method)
    def checked(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        _, *given = arguments
        if len(given) > 2 or "y" in options or (len(given) == 2 and _is_array(given[1])):
            what = f"Trainer.{method.__name__}"
            hint = f"{method.__name__}((x, y){', epochs=10' if method.__name__ == 'fit' else ''})"
            raise DtypeError(what, expected="inputs and targets as one argument", got="two", hint=hint)
        return method(*arguments, **options)

    return checked


def _is_array(value: object) -> bool:
    """Whether somebody means numbers by it, not names or functions."""
    if isinstance(value, (list, tuple)):
        return bool(value) and not (isinstance(value[0], str) or callable(value[0]))
    return getattr(value, "ndim", 0) > 0 or (not isinstance(value, (str, Mapping)) and hasattr(value, "__array__"))


class Trainer:
    """Trains a network on data sets, and knows how to stop at any step and go on later with the same bits.

    Arguments:
        network: taken over; its parameters are the trainer's from the first fit, step or evaluation on.
        loss: a name in :data:`~mlpgpu.losses.LOSSES`, or a loss with its numbers, such as ``mlpgpu.Huber(delta=2.0)``;
            it takes logits.
        optimizer: such as ``mlpgpu.Momentum(0.1)``, or its name, such as ``"momentum"``, for its default rate.
        batch_size: rows of a step; a data set's last batch may be smaller.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"``, or ``"cuda:1"`` for another card.
        precision: a bound on the error of matrix products A B.  ``"float32"``: no more than float32 arithmetic has.
            ``"tf32"`` and ``"bfloat16"``, on a card: no more than products of operands cut to 11 bits and rounded
            to 8 have, which is 2⁻⁹ and 2⁻⁷ of ``|A| |B|``, and the roundings of the sum.  In which format operands
            are multiplied is another matter; it may be a finer one, and differ between layers and versions.
            ``"float32-ieee"`` names the way instead: IEEE float32 operations alone.  ``"float64"`` is for the CPU.
        streams: shards (S) that each batch is split into, each with a gradient of its own.  If None, as many as ranks
            train the network together, 1 for a process by itself.  Bits depend on S, not on the number of ranks.
        reduction: ``"ordered"`` for the same bits in every run, or ``"atomic"`` for sums by atomics on the card.
            ``"fast"`` is ``"ordered"`` but for several ranks with more shards than one each: every rank then sends one
            sum, as in an all-reduce, and the bits depend on the number of ranks as well.
        metrics: for ``evaluate`` and for validation, names in :data:`~mlpgpu.metrics.METRICS`, ``top_<k>_accuracy``,
            ``pinball_<level>``, and functions of your own, ``function(y, prediction)`` or
            ``function(y, prediction, weight)``: targets as the data set has them, predictions (rows, n_out) as
            ``predict`` gives them, the rows' weights (rows,).  A function's name is its metric's; a mapping of names
            to functions gives others.
        class_weight: a mapping of classes, by number or name, to weights of their training rows (1 for
            those it leaves out), or ``"balanced"`` for weights inverse to the classes' frequencies.
        threads: host threads; by a fixed rule of the plan and the cores if None.
        memory_share: of a card's memory, what a data set may take; a larger one is streamed through it, or
            partitioned over the cards of several ranks (``docs/ranks.md``).
        parallel: what several ranks do, which ``mpirun`` or ``python -m mlpgpu launch`` started; ``docs/ranks.md``
            tells how.  ``"data"``: all train the network together, each on some of the shards, with one optimizer state
            between them.  ``"tensor"``: each has parts of the layers' weights, with the optimizer's state of them,
            and computes all rows.  ``"auto"``: by shards, unless rank 0 is faster by itself, with the same bits, or
            all are by parts, by counts that ``print(trainer.plan)`` shows; by parts only where neither ``streams``
            nor ``reduction`` is given, and in a fit alone: before and after it each rank has the whole network.
            ``"none"``: each trains a network of its own.
        parts: how many parts the layers are split into by ``"tensor"``; as many as there are ranks if None, and where
            ``"auto"`` chose.  Bits depend on it, not on the number of ranks.

    A trainer is copied, and pickled, with all that :meth:`save` writes, its network included: the copy goes on by
    itself, with the same bits.  It frees what it holds when it is dropped, or by :meth:`close` or a ``with`` block.

    Attributes:
        network, plan: what is trained, and how.
        history: of all epochs so far.
        steps, epochs: finished ones, over all fits.

    Raises:
        MlpgpuError: an argument has no meaning, alone or with the others.
    """

    def __init__(
        self,
        network: Network,
        loss: LossName | Loss,
        optimizer: Optimizer | OptimizerName = "adam",
        *,
        batch_size: int = 32,
        backend: str = "auto",
        precision: PrecisionName = "float32",
        streams: int | None = None,
        reduction: ReductionName = "ordered",
        metrics: Metrics = (),
        class_weight: Mapping[Any, float] | str | None = None,
        threads: int | None = None,
        memory_share: float = MEMORY_SHARE,
        parallel: ParallelName = "auto",
        parts: int | None = None,
    ) -> None:
        if not isinstance(network, Network):
            raise DtypeError("network", expected="a mlpgpu.Network", got=shown(network))
        self.network = network
        self.loss = as_loss(loss).described
        self.optimizer = as_optimizer(optimizer)
        self.batch_size = check_integer("batch_size", batch_size, least=1, limit=MOST_ROWS)
        self.parallel = lookup("parallel", parallel, PARALLELS)
        self._team = Team(is_alone=self.parallel == "none")
        self.parts = self._check_parts(parts, streams)
        shards = (self._team.ranks if self.parts is None else 1) if streams is None else streams
        self.streams = check_integer("streams", shards, least=1, limit=MOST_SHARDS)
        self._may_have_parts = self.parallel == "auto" and streams is None and reduction == "ordered"
        self.precision = lookup("precision", precision, PRECISIONS)
        self.reduction = lookup("reduction", reduction, REDUCTIONS)
        lower = self._lowering()
        plan = lower()
        self._task = Task(as_loss(loss), network.n_out, plan.dtype)
        found = self._task.check_metrics(metrics)
        self.metrics, self._functions = tuple(found), {name: own for name, own in found.items() if own is not None}
        self.class_weight = self._task.check_class_weight(class_weight)
        self.threads = _check_threads(threads)
        self.memory_share = check_number("memory_share", memory_share, least=0.0, below=1.0)
        self.backend = choose_backend(backend, plan)

        options = {"threads": self.threads, "memory_share": self.memory_share}
        self._engine = Engine(network, self.backend, self._team, plan, lower, **options)
        self._chosen: str | None = None  # how ranks compute the steps, where that is chosen here
        self._choose(None)
        self._loop: FitLoop | None = None  # of the fit under way
        self._has_told_of_more = False  # that a further fit adds to the epochs before
        self._monitored: tuple[str, ...] = ()
        self._work = ""  # what is under way
        self._worker = 0, 0  # the process and the thread that it is under way in
        self._is_closed = False
        self._is_made = True

        network.output = self._task.output

    @property
    def plan(self) -> Plan:
        """What a step of a fit and an evaluation compute."""
        return self._engine.plan_of_fit

    @property
    def history(self) -> History:
        """The epochs so far."""
        return self._engine.progress.history

    @property
    def steps(self) -> int:
        """Finished steps, over all fits."""
        return self._engine.progress.steps

    @property
    def epochs(self) -> int:
        """Finished epochs, over all fits."""
        return self._engine.progress.epochs

    @property
    def rate(self) -> float | Schedule:
        """The learning rate, a number or a schedule; may be set between steps, and by callbacks.

        A schedule counts steps and epochs over the life of the trainer.

        Raises:
            DtypeError, ConfigurationError: what is set is neither, or negative or not finite.
        """
        return self.optimizer.rate

    @rate.setter
    def rate(self, rate: float | Schedule) -> None:
        self._check_usable("rate")
        self._team.command("_set_rate", rate)
        self._set_rate(rate)

    def _set_rate(self, rate: float | Schedule) -> None:
        optimizer = replace(self.optimizer, rate=rate)
        schedule = as_schedule(rate)
        if self._work and isinstance(schedule, ReduceOnPlateau):
            check_monitor("ReduceOnPlateau", schedule.monitor, self._monitored)
        self.__dict__["optimizer"] = optimizer
        self._engine.set_schedule(schedule, self._lowering(self.plan.choice))

    def _choose(self, kept: str | None, parts: int | None = None) -> None:
        """Choose how ranks compute the steps where ``parallel="auto"`` leaves it open, or as was ``kept`` in a file.

        The number of shards stays what it is, so the bits do, too, unless ranks have ``parts`` of the network: then
        they follow from the number of these.
        """
        self._chosen, count = kept, self._team.ranks
        if self.parallel != "auto" or (count == 1 and kept != "tensor"):
            return
        choice = Choice(count, "data")
        if kept is not None:
            choice = Choice(count, lookup("choice", kept, WAYS), is_kept=True)
        elif on_one_host():
            seconds = functools.partial(self.backend.step_seconds, threads=self.threads)
            choice = choice_of(count, self._lowering(), seconds, may_split=self._may_have_parts)
        self._chosen, all_parts = choice.way, None
        if choice.way == "tensor":
            count_of_parts = self._check_count(count if parts is None else parts)
            self.__dict__.update(streams=1, parts=count_of_parts)
            all_parts = None if count == 1 else Parts(count_of_parts)
        self._engine.set_lowering(self._lowering(choice if count > 1 else None), all_parts)

    def _lowering(self, choice: Choice | None = None) -> Callable[..., Plan]:
        """Gives the plan; holds no reference to the trainer, so that a dropped one frees its program at once."""
        return functools.partial(
            self.network.lower,
            capacity=self.batch_size,
            loss=self.loss,
            optimizer=self.optimizer,
            precision=self.precision,
            reduction=self.reduction,
            shards=self.streams,
            ranks=self._team.ranks if self.parts is None and (choice is None or choice.way == "data") else 1,
            choice=choice,
            parts=None if self.parts in (None, 1) else Parts(self.parts, rank(), self._team.ranks),
        )

    def _check_parts(self, parts: int | None, streams: int | None) -> int | None:
        """The number of parts that layers are split into, None if they are not."""
        if self.parallel != "tensor":
            if parts is not None:
                got = f"{parts} of {self.parallel!r}"
                raise ConfigurationError("parts", expected="parallel='tensor', or None", got=got)
            return None
        if streams not in (None, 1):
            hint = "parts= is how many parts layers are split into; parallel='data' splits the batch into streams"
            raise ConfigurationError("streams with parallel='tensor'", expected="1 or None", got=streams, hint=hint)
        return self._check_count(self._team.ranks if parts is None else parts)

    def _check_count(self, parts: int) -> int:
        """A number of parts, of which there is one for each rank at least."""
        count, ranks = check_integer("parts", parts, least=1, limit=MOST_PARTS), self._team.ranks
        if count < ranks:
            hint = f"start at most {count} ranks: a run keeps the number of parts that it began with"
            raise ConfigurationError("parts", expected=f"at least one for each of {ranks} ranks", got=count, hint=hint)
        return count

    def __repr__(self) -> str:
        network = " → ".join(str(width) for width in (self.network.n_in, self.network.n_out))
        made = f"{network}, loss={self.loss!r}, optimizer={self.optimizer}, batch_size={self.batch_size}"
        where = f"backend={self.backend.name!r}, precision={self.precision!r}"
        return f"Trainer({made}, {where}; {self.epochs} epochs, {self.steps} steps)"

    def _repr_html_(self) -> str:
        names = (
            *("loss", "optimizer", "batch_size", "precision", "streams", "reduction", "metrics", "class_weight"),
            *("parallel", "parts"),
        )
        rows = [
            ("setting", "value"),
            *((name, str(getattr(self, name))) for name in names),
            ("backend", self.backend.name),
        ]
        title = f"Trainer after {self.epochs} epochs, {self.steps} steps"
        return html(rows, "<<", title) + self.network._repr_html_()

    def __dir__(self) -> list[str]:
        return public_names(self)

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_is_made") and type(self) is Trainer:
            hint = "make a new Trainer(trainer.network, …), which goes on from the same parameters"
            refuse_setting(self, name, ("rate",), hint)
        super().__setattr__(name, value)

    # --- training ---

    @contextmanager
    def _at_work(self, work: str) -> Iterator[None]:
        """While a fit or a step is under way, no other can begin, whether a callback or a thread wants it."""
        self._work, self._worker = work, (os.getpid(), threading.get_ident())
        try:
            yield
        finally:
            self._work, self._loop = "", None

    def _check_usable(self, work: str) -> None:
        """Refuse ``work`` with a closed trainer, and with one that another thread trains, here or before a fork."""
        what = f"Trainer.{work}"
        if self._is_closed:
            hint = "Trainer(trainer.network, …) goes on from the same parameters"
            raise ConfigurationError(what, expected="an open trainer", got="a closed one", hint=hint)
        process, thread = self._worker
        if not self._work or thread == threading.get_ident():
            return
        if process != os.getpid():
            got = f"a process that was forked during {self._work} in another thread"
            hint = "go on from a checkpoint by Trainer.resume, or start processes by 'spawn'"
            raise ConfigurationError(what, expected="a process forked between steps", got=got, hint=hint)
        if work not in ("fit", "step", "close"):  # of which _check_idle says what a callback may do instead
            hint = "any thread may use trainer.network; a callback may use all of the trainer"
            expected, got = "a call between steps", f"one from another thread during {self._work}"
            raise ConfigurationError(what, expected=expected, got=got, hint=hint)

    def _check_idle(self, work: str) -> None:
        self._check_usable(work)
        if self._work:
            hint = "a callback may evaluate, save, set parameters and the rate; it ends the fit by returning True"
            expected, got = "no training under way", f"a call during {self._work}"
            raise ConfigurationError(f"Trainer.{work}", expected=expected, got=got, hint=hint)

    @_takes_targets_with_inputs
    def fit(
        self,
        data: Data,
        epochs: int,
        *,
        validation: Data | float | None = None,
        callbacks: Sequence[Any] = (),
        shuffle: bool = True,
        drop_last: bool = False,
        progress: bool = True,
    ) -> History:
        """Train for ``epochs`` passes over ``data``, a Dataset or arrays ``(x, y)`` or ``(x, y, weight)``.

        A further fit adds ``epochs`` to those before.  The first fit of a resumed trainer goes on with the interrupted
        one, up to ``epochs`` epochs in all; it takes the same data and arguments.  Either says so on standard error,
        a further fit once, if it may show a bar.  Ctrl-C ends a fit after a finished step; the history
        is then marked ``interrupted``, and the trainer can be saved.

        Arguments:
            validation: evaluated after each epoch; its columns in the history begin with ``validation_``.  A
                number, above 0 and below 1, holds out that share of ``data``, as :meth:`Dataset.split` does
                with the network's seed.
            callbacks: see :mod:`mlpgpu.callbacks`; or functions of an epoch's record, which end the fit
                by returning what is true, and may add numbers to the record.
            shuffle: whether each epoch has its own order.
            drop_last: whether to leave out an epoch's last batch if it is smaller.
            progress: whether to show a bar, if standard error is a terminal.

        Returns:
            the history of all epochs so far.

        Raises:
            MlpgpuError: data or arguments do not suit the network or each other; nothing has changed then.
            DataMismatchError: a resumed fit is given other data or arguments than it began with.
            TornStateError: an exception ended an earlier step in its middle.
            DivergenceError: a loss or a parameter is not finite any more.
        """
        self._check_idle("fit")
        self._engine.check_whole()
        epochs = check_integer("epochs", epochs, least=1, limit=MOST_STEPS)
        shuffle, drop_last = check_truth("shuffle", shuffle), check_truth("drop_last", drop_last)
        progress = check_truth("progress", progress)
        listeners = Listeners(callbacks)
        data = self.network.as_dataset(data)
        held_out: Data | None
        if validation is not None and not isinstance(validation, (Dataset, tuple)):
            if _is_array(validation) or not hasattr(validation, "__float__"):
                self.network.as_dataset(validation, argument="validation")  # type: ignore[arg-type]  # which refuses it
            share = check_number("validation", validation, above=0, below=1)
            data, held_out = data.split(share, seed=self.network.seed)
        else:
            held_out = validation
        trained = self._prepare(data, self.network, class_weight=self.class_weight)
        validated = None
        if held_out is not None:
            validated = self._prepare(held_out, self.network, metrics=self.metrics, after=data)
        if drop_last and len(data) < self.batch_size:
            expected = f"at least one batch of {self.batch_size} rows with drop_last=True"
            raise ConfigurationError("data", expected=expected, got=f"{len(data)} rows")
        engine, schedule = self._engine, self._engine.schedule
        of_metrics: dict[str, Columns] = {}
        if validated is not None:
            names = data.classes or self.network.remembered.classes
            of_metrics = self._task.columns(("loss", *self.metrics), ("loss", *self._functions), names)
        monitored = "loss", *(VALIDATION + column for columns in of_metrics.values() for column in columns)
        if clash := set(listeners.columns) & {*monitored, *OWN_COLUMNS}:
            expected = f"names other than {', '.join((*monitored, *OWN_COLUMNS))}"
            raise ConfigurationError("columns of callbacks", expected=expected, got=", ".join(sorted(clash)))
        monitored += listeners.columns
        if isinstance(schedule, ReduceOnPlateau):
            check_monitor("ReduceOnPlateau", schedule.monitor, monitored)
        before = engine.progress
        fit, pending = FitProgress(self.steps, self.epochs, shuffle, drop_last, data.identity()), None
        if before.is_resumed and before.fit is not None:
            fit = _continued(before.fit, fit)
            pending = None if before.pending is None else before.pending.among((SCHEDULE, *listeners.keys))
        self._monitored = monitored
        if before.is_resumed:
            listeners.load_states(before.callbacks)
        is_over, states = self._team.lead(lambda: (listeners.begin(self), listeners.states()), self)
        if not self._team.is_leader:
            listeners.follow(states)
        called = {f"callback {key}": moments for key, moments in listeners.moments.items()}
        self._check_agreement(trained, validated, epochs=epochs, shuffle=shuffle, drop_last=drop_last, **called)
        sampling = Sampling(
            rows=len(data),
            batch_size=self.batch_size,
            seed=self.network.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            first_step=fit.first_step,
            first_epoch=fit.first_epoch,
        )
        self._tell(sampling, epochs, is_over=is_over, shows_progress=progress)
        self.network.check_finite()

        # Nothing is left to refuse: from here on the trainer and the network change.
        self.network.remember(data)
        with self._at_work("fit"), engine.sharing():
            engine.attach(trained, sampling)
            evaluated = validated, self.metrics, self._functions, of_metrics
            loop = FitLoop(self, self._team, self.network, engine, sampling, listeners, monitored, *evaluated)
            self.history.interrupted = False
            engine.progress = engine.progress.changed(fit=fit, callbacks=states, pending=pending, is_resumed=False)
            self._loop = loop
            loop.run(fit.first_epoch + epochs, is_over=is_over, shows_bar=progress)
        engine.check_finite()
        return self.history

    def _check_agreement(self, trained: Prepared, validated: Prepared | None, **arguments: Any) -> None:
        """Refuse to train with ranks that would not train the same; all of them call this.

        Raises:
            RankError: ranks differ in versions, the trainer, the network, data or arguments.
        """
        if self._team.communicator is None:
            return
        network, values = self.network, "as all ranks trained them"
        crc = self._engine.file_crc
        told = self._team.communicator.gather((self._engine.has_trained_values, network.is_new, crc is not None))
        if all(is_new for _, is_new, _ in told):
            values = "those that the seed draws"
        elif all(is_in_file for _, _, is_in_file in told):
            values = f"those of a file of CRC {crc}"
        elif not all(is_trained for is_trained, _, _ in told):
            values = f"of CRC {zlib.crc32(network.flat_parameters())}"
        facts: dict[str, str | int | float] = {
            "mlpgpu's version": __version__,
            **{f"Trainer's {name}": str(getattr(self, name)) for name in ARGUMENTS},
            "Trainer's backend": self.backend.name,
            "who computes the steps": self._chosen or "as told",
            "finished steps": self.steps,
            "the network's layers": str(network.layers),
            "the network's seed": network.seed,
            "the network's parameters": values,
            "the network's statistics": zlib.crc32(network.flat_statistics()),
            "data": str(trained.dataset.identity()),
            "what computes": str("" if self.parts is None else self.backend.fingerprint(self.plan)),
            "validation": "none" if validated is None else str(validated.dataset.identity()),
            **{name: str(value) for name, value in arguments.items()},
        }
        check_agreement(self._team.communicator, facts)

    def _tell(self, sampling: Sampling, epochs: int, *, is_over: bool, shows_progress: bool) -> None:
        """Say which epochs a fit trains that is not the first, and whether a schedule ends before it does."""
        if not self._team.is_leader:
            return
        done, last_epoch = self.epochs - sampling.first_epoch, sampling.first_epoch + epochs
        if self._engine.progress.is_resumed and (is_over or done >= epochs):
            why = f"has finished {done} epochs of {epochs}" if done >= epochs else "was ended by a callback"
            hint = f"epochs= counts those before it was resumed, too: epochs={done + epochs} trains {epochs} more"
            tell(f"nothing is left to do: the resumed fit {why} ({hint})")
            return
        if self._engine.progress.is_resumed and self.steps > sampling.first_step:
            where = f"goes on after step {self.steps}, in epoch {self.epochs + 1}, up to epoch {last_epoch}"
            tell(f"the resumed fit {where}: epochs={epochs} counts the {done} that it had finished, too")
        elif shows_progress and self.epochs and not self._has_told_of_more:
            self._has_told_of_more = True
            more = f"epochs={epochs} trains {epochs} more, up to epoch {last_epoch}"
            tell(f"this trainer has trained {self.epochs} epochs: {more} (a Trainer begins anew)")
        schedule, steps_per_epoch = self._engine.schedule, sampling.steps_per_epoch
        of_epochs, of_steps = schedule.length
        last_step = min(sampling.first_step + epochs * steps_per_epoch, MOST_STEPS)
        end: float
        if of_steps is not None:
            end, begin, last, unit = of_steps, self.steps, last_step, "step"
        elif of_epochs is not None:
            end, begin, last, unit = of_epochs, self.epochs, last_epoch, "epoch"
        else:
            return
        if last > end:
            clock = Clock(np.array([last_step]), np.array([float(last_epoch)]), 1.0 / steps_per_epoch)
            rate = f"its last rate, {schedule.rates(clock)[0]:g}; trainer.rate = … sets another"
            when = (
                "ended before this fit, all of which"
                if begin >= end
                else f"ends with {unit} {end:g} of {last}; the rest"
            )
            tell(f"{type(schedule).__name__} {when} is trained at {rate}")

    def step(self, x: ArrayLike, y: ArrayLike, weight: ArrayLike | None = None) -> float:
        """Train for one step on the rows given, at most ``batch_size``, and return the loss before the update.

        ``x`` is (rows, n_in), ``y`` what a :class:`Dataset` takes, ``weight`` (rows,).

        Raises:
            MlpgpuError: they do not suit the network.
            TornStateError: an exception ended an earlier step in its middle.
            ConfigurationError: the schedule counts epochs, which single steps do not make.
            DivergenceError: the loss is not finite.
        """
        self._check_idle("step")
        self._engine.check_whole()
        prepared = self._prepare((x, y, weight), self.network, class_weight=self.class_weight)
        data = prepared.dataset
        rows = len(data)
        if rows > self.batch_size:
            raise ConfigurationError("x", expected=f"at most batch_size = {self.batch_size} rows", got=f"{rows} rows")
        engine, schedule = self._engine, self._engine.schedule
        if isinstance(schedule, ReduceOnPlateau):
            what = "learning rate in Trainer.step, which knows no epochs"
            raise ConfigurationError(what, expected="a schedule in steps", got="ReduceOnPlateau")
        clock = Clock(step=np.array([self.steps]))
        schedule.rates(clock)  # raises before anything has changed
        self.network.check_adapted("call network.adapt(dataset)")
        self._check_agreement(prepared, None)
        sampling = Sampling(rows, rows, seed=self.network.seed, shuffle=False, first_step=self.steps)
        self.network.remember(data)
        with self._at_work("step"), uninterrupted():
            engine.attach(prepared, sampling)
            engine.progress = engine.progress.changed(fit=None, pending=None, is_resumed=False)
            loss, weighted = engine.take_steps(clock)[0]
        return float(loss / weighted) if weighted else 0.0

    @_takes_targets_with_inputs
    def evaluate(self, data: Data, metrics: Metrics | None = None) -> dict[str, Any]:
        """The mean loss over a data set or arrays ``(x, y)``, without penalties or class weights, and metrics.

        Returns:
            ``"loss"`` and each metric by name: floats; arrays (classes,) of metrics ``…_per_class``, (n_out,) of
            ``r2_per_output``, and (classes, classes) of a confusion matrix.  In a history such arrays but the matrix
            have a column for each element, such as ``validation_f1_per_class.setosa``, or ``.0`` without names.

        Raises:
            MlpgpuError: the data do not suit the network, or a metric does not suit the loss.
            DataError: a ranking metric is asked for, and no row of some class has a weight over 0.
        """
        names, functions = self.metrics, self._functions
        if metrics is not None:
            found = self._task.check_metrics(metrics)
            names, functions = tuple(found), {name: own for name, own in found.items() if own is not None}
        self._check_usable("evaluate")
        prepared = self._prepare(data, self.network, metrics=names)
        self.network.check_adapted("call network.adapt(dataset), or train")
        if not self._engine.has_parts:
            return self._engine.evaluate(prepared, names, functions)
        with self._together("_evaluate_along", prepared, names, tuple(functions)):
            return self._engine.evaluate(prepared, names, functions)

    def _evaluate_along(self, prepared: Prepared, metrics: Sequence[str], own: Sequence[str]) -> None:
        """Compute this rank's parts of what rank 0 evaluates."""
        self._engine.evaluate(prepared, metrics, dict.fromkeys(own, _nothing))

    def _read_along(self, name: str, *arguments: Any) -> None:
        """See :meth:`Engine._read_along`."""
        self._engine._read_along(name, *arguments)

    def _prepare(self, data: Data, network: Network, **options: Any) -> Prepared:
        """A data set that suits the task, and lies where the backend can read it."""
        prepared = self._task.prepare(data, network, **options)
        self.backend.check_place(prepared.dataset)
        return prepared

    @contextmanager
    def _together(self, name: str, *arguments: Any) -> Iterator[None]:
        """While all ranks do something together, which the followers of rank 0 do by a method of this name.

        Where ranks have parts of the network, the others first get parameters that a callback has set on rank 0.
        """
        engine = self._engine
        if self._team.is_followed and engine.has_parts and not engine.has_values and not self.network.is_new:
            self._team.command("_take_values", self.network.flat_parameters())
        with self._team.together(name, *arguments):
            yield

    def _take_values(self, values: np.ndarray) -> None:
        self.network.values.replace(values)

    def own_parts(self, name: str) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        """What this rank has of a parameter, such as ``"0.weight"``; no other rank is asked.

        Returns:
            for each part of it a copy, and where it lies: ``network.parameters[name][index]``.  The whole array where
            it is not split.

        Raises:
            UnknownNameError: there is no parameter of that name.
        """
        lookup("parameter", name, self.network.segments)
        self._check_usable("own_parts")
        if not self._engine.has_parts:
            return [((slice(None),), self.network.parameters[name])]
        return self._engine.ready().own_parts(name)

    # --- what callbacks use ---

    @property
    def monitored(self) -> tuple[str, ...]:
        """The columns that the current fit's records have, and that can be monitored."""
        return self._monitored

    def keep(self) -> None:
        """Keep the parameters as they are now, in place of what was kept before."""
        self._check_usable("keep")
        with uninterrupted(), self._together("keep"):
            self._engine.keep()

    def restore_kept(self) -> None:
        """Put the parameters that were kept back."""
        self._check_usable("restore_kept")
        with uninterrupted(), self._together("restore_kept"):
            self._engine.restore_kept()

    def histograms(self, bins: int, of: Sequence[str] = ("parameters",)) -> dict[str, Histogram]:
        """Finite values counted in equal bins, counts (bins,) and edges (bins + 1,), by name.

        ``of`` names some of ``"parameters"``, ``"activations"`` and ``"gradients"``, see
        :class:`~mlpgpu.callbacks.Histograms`; the latter two of the first batch of the fit's data as they stand.

        Raises:
            ConfigurationError: the latter two are asked for before the first fit.
        """
        bins, of = check_integer("bins", bins, least=1, most=MOST_BINS), check_counted("of", of)
        self._check_usable("histograms")
        with self._together("histograms", bins, of) if self._engine.has_parts else contextlib.nullcontext():
            return self._engine.histograms(bins, of)

    # --- the end ---

    def close(self) -> None:
        """Free the program: the arrays, on a card or here, and the threads.  Closing twice does nothing.

        The network has its parameters and goes on by itself; the optimizer's state is gone, unless it was saved.
        A trainer that is dropped does the same.

        Raises:
            ConfigurationError: a fit or a step is under way.
            BackendError: a card that has failed does not give the parameters back.
        """
        if not self._is_closed:
            self._check_idle("close")
            self._is_closed = True
            self._engine.close()

    def __enter__(self) -> Trainer:
        self._check_usable("__enter__")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*((MlpgpuError,) if error is not None else ())):  # which says why
            self.close()

    # --- copies ---

    def __reduce__(self) -> Any:
        check_pickles(self._functions)
        return type(self)._of_copy, (self._copied(self.network),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        return type(self)._of_copy(self._copied(copy.deepcopy(self.network, memo)))

    def __copy__(self) -> Trainer:
        return copy.deepcopy(self)  # two trainers of one network would take it from each other

    def _copied(self, network: Network) -> CopiedTrainer:
        """What a copy is made of, which trains ``network``."""
        self._check_usable("copy")
        with self._whole_state():
            run = self._saved().contents(storage.Contents({}))
            if self._engine.has_parts:
                self.network.contents()
        continues = self._engine.progress.is_resumed or self._work == "fit"
        return CopiedTrainer(network, run, self._functions, continues, self.history.interrupted, self._engine.saved)

    @classmethod
    def _of_copy(cls, copied: CopiedTrainer) -> Trainer:
        saved = SavedRun.parse(copied.run, copied.network.parameter_count)
        trainer = cls._of(copied.network, saved, None, None, copied.functions)
        engine = trainer._engine
        engine.progress = engine.progress.changed(is_resumed=copied.is_to_be_continued)
        trainer.history.interrupted = copied.interrupted
        engine.saved = copied.saved
        if differing := trainer._differences(saved):
            warn_caller(f"the copied trainer may not repeat its bits: made by, and now: {differing}")
        return trainer

    # --- files ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network and the run to an HDF5 file, replacing it whole or not at all.

        Of several ranks that train it together, rank 0 writes.  After single steps all of them call this; after a fit
        rank 0 may do so alone, and in a callback it does.

        Raises:
            DivergenceError: a loss or a parameter is not finite.
            StorageError: the file cannot be written.
            TornStateError: an exception ended a step in its middle.
        """
        self._check_usable("save")
        if self._engine.has_parts:
            with uninterrupted(), self._together("_save_parts", os.fspath(path)):
                self._save_parts(path)
            return
        with uninterrupted():
            saved = self._saved()
            if self._team.is_leader:
                storage.write(path, saved.contents(self.network.contents()))
            self._engine.saved = os.fspath(path), self.steps

    def _save_parts(self, path: str | os.PathLike[str]) -> None:
        """Save a network of which ranks have parts: all of them call this, and rank 0 never has all of it."""
        engine = self._engine
        engine.check_whole()
        engine.ready()
        engine.check_finite()
        with engine.gathering() as gathered:
            if gathered is not None:
                slots = np.empty((len(self.optimizer.slots), 1, 0))  # the arrays come piece by piece
                saved = self._described(slots, np.empty(0) if engine.keeps else None)
                paths = {path: place for place, (_, path) in enumerate(parameter_paths(self.network.layers))}
                arrays = {path: gathered("parameters", place) for path, place in paths.items()}
                arrays |= {path: gathered(slot) for slot, path in enumerate(slot_paths(self.optimizer))}
                if engine.keeps:
                    arrays[KEPT] = gathered("snapshot")
                storage.write_pieces(path, saved.contents(self.network.contents_but_parameters()), arrays)
        engine.saved = os.fspath(path), self.steps

    def _saved(self) -> SavedRun:
        """What a file holds of the run.

        Raises:
            DivergenceError, TornStateError: as :meth:`save` does.
        """
        self._engine.check_whole()
        self._engine.check_finite()
        self._team.command("_gather")
        return self._described(*self._engine.slots_and_kept())

    def _described(self, slots: np.ndarray | None, kept: np.ndarray | None) -> SavedRun:
        """What a file holds of the run, with these slots and kept parameters."""
        kind = self.plan.target_kind
        assert kind is not None
        return SavedRun(
            arguments={name: getattr(self, name) for name in ARGUMENTS},
            kind=kind,
            made_by=self.backend.fingerprint(self.plan, threads=self.threads),
            progress=self._engine.progress if self._loop is None else self._loop.to_save(),
            slots=slots,
            kept=kept,
            chosen=self._chosen,
        )

    def _gather(self) -> None:
        self._engine.gather()

    def _whole_state(self) -> AbstractContextManager[None]:
        """While the whole state is asked for that ranks have parts of: have the others do so, too."""
        return self._together("_save_along") if self._engine.has_parts else contextlib.nullcontext()

    def _save_along(self) -> None:
        self._saved()
        self.network.contents()

    def _differences(self, saved: SavedRun) -> dict[str, tuple[Any, Any]]:
        """What the bits depend on and is another here than where the run was made: what it was made by, and now."""
        made_by, now = saved.made_by, self.backend.fingerprint(self.plan, threads=self.threads)
        return {key: (made_by.get(key), now.get(key)) for key in {**made_by, **now} if made_by.get(key) != now.get(key)}

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        *,
        backend: str | None = None,
        threads: int | None = None,
        rate: float | Schedule | None = None,
        metrics: Metrics = (),
    ) -> Trainer:
        """The trainer that :meth:`save` wrote, ready to go on.

        Its first ``fit`` continues the one that was interrupted.  ``backend`` and ``threads`` override
        what the run was made by; where the same bits cannot be promised, a warning says so.  On the CPU a run
        in tf32 or bfloat16 goes on in float32.  ``rate`` takes the place of the run's, as setting it does;
        ``metrics`` are the run's own ones, functions, which no file holds.

        Raises:
            StorageError: the file cannot be read.
            FileFormatError: it is damaged, not one of ours, from a newer version, or holds no run.
            BackendError: there is no such backend here; ``backend="cpu"`` goes on anywhere.
        """
        if backend is not None:
            get_backend(backend)
        if rate is not None:
            as_schedule(rate)  # raises before the file is read
        threads = _check_threads(threads)
        functions = own_metrics(metrics)
        file, stored = _file_of_parts(path), None
        if file is None:
            contents = storage.read(path)
            network = Network.from_contents(contents)
        else:
            contents = file.contents("/mlpgpu/statistics/", "/mlpgpu/run/history/")
            network, stored = Network.from_file(file, contents)
        if "run" not in contents.description:
            hint = "mlpgpu.load reads the network in it"
            raise FileFormatError(str(path), expected="a file of Trainer.save", got="a network alone", hint=hint)
        try:
            saved = SavedRun.parse(contents, network.parameter_count, file)
            in_file = None
            if file is not None and stored is not None:
                in_file = InFile(file, stored, saved.flat_paths(contents))
            trainer = cls._of(network, saved, backend, threads, functions, in_file)
            differing = trainer._differences(saved)
        except (BackendError, FileFormatError):
            raise
        except (MlpgpuError, ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"run in {path}", expected="one that mlpgpu wrote", got=str(error)) from error
        if differing:
            warnings.warn(f"the resumed run may not repeat its bits: made by, and now: {differing}", stacklevel=2)
        if rate is not None:
            trainer.rate = rate
        return trainer

    @classmethod
    def _of(
        cls,
        network: Network,
        saved: SavedRun,
        backend: str | None,
        threads: int | None,
        functions: Mapping[str, MetricFunction],
        in_file: InFile | None = None,
    ) -> Trainer:
        arguments = dict(saved.arguments)
        lacking = [name for name in arguments["metrics"] if not is_metric(name) and name not in functions]
        if lacking:
            names = ", ".join(lacking)
            hint = f"Trainer.resume(path, metrics=[{names}]) takes them"
            tell(f"the run goes on without its own metrics, {names} ({hint})")
        kept = [name for name in arguments["metrics"] if name not in lacking]
        arguments["metrics"] = [{name: functions[name]} if name in functions else name for name in kept]
        if backend == "cpu" and arguments["precision"] in CARD_PRECISIONS:
            arguments["precision"] = "float32"
        made_by = saved.made_by
        if threads is None and arguments["streams"] == 1:  # shards have the same bits on any number of threads
            threads = made_by["threads"]
        parts = arguments["parts"]
        if arguments["parallel"] == "auto":  # which chose them
            arguments["parts"] = None
        trainer = cls(network, **arguments, backend=made_by["backend"] if backend is None else backend, threads=threads)
        trainer._choose(saved.chosen, parts)
        progress = saved.progress.changed(is_resumed=True)
        trainer._engine.resume(saved.kind, progress, saved.slots, saved.kept, in_file)
        return trainer


def _file_of_parts(path: str | os.PathLike[str]) -> storage.OpenFile | None:
    """The file of a run whose network ranks have parts of, of which this one reads its own; None of any other run."""
    if ranks() == 1:
        return None
    try:
        file = storage.open_file(path)
    except StorageError as error:
        what, hint = f"{error.what} on rank {rank()} of {ranks()}, host {platform.node()}", "each rank reads all of it"
        raise StorageError(what, expected=error.expected, got=error.got, hint=hint) from error
    run = file.description.get("run")
    return file if isinstance(run, dict) and run.get("parallel") == "tensor" else None


def _nothing(*arguments: Any) -> float:
    """In place of a metric of one's own, which rank 0 computes."""
    return 0.0


def _check_threads(threads: int | None) -> int | None:
    return None if threads is None else check_integer("threads", threads, least=1, limit=MOST_THREADS)


def _continued(begun: FitProgress, asked: FitProgress) -> FitProgress:
    """The fit that was begun, if what is asked for now is the same.

    Raises:
        DataMismatchError: the data or the arguments are others.
    """
    hint = "to train the network on something else, load it with mlpgpu.load and make a new Trainer"
    for what in ("data", "shuffle", "drop_last"):
        expected, got = getattr(begun, what), getattr(asked, what)
        if expected != got:
            raise DataMismatchError(f"{what} of the resumed fit", expected=expected, got=got, hint=hint)
    return begun
