"""Trainer: epochs, batches and rates around a program, and what is needed to stop and go on."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from tqdm import tqdm

from . import storage
from .backends import MEMORY_SHARE, Histogram, Program, Sampling, choose_backend, get_backend
from .callbacks import Callback, as_callback
from .datasets import Dataset
from .descriptions import describe, rebuild
from .errors import (
    BackendError,
    ConfigurationError,
    DataMismatchError,
    DivergenceError,
    DtypeError,
    FileFormatError,
    MlpgpuError,
    check_integer,
    check_number,
    lookup,
)
from .history import History, Record
from .losses import LOSSES, TargetKind
from .metrics import METRICS, VALIDATION
from .network import Network
from .optimizers import OPTIMIZERS, Optimizer
from .plan import CARD_PRECISIONS, PRECISIONS, REDUCTIONS, Plan
from .schedules import SCHEDULES, Clock, Plateau, ReduceOnPlateau, as_schedule
from .task import ClassWeight, Task

RUN_SECONDS = 0.05  # about how long a program runs between looks at Ctrl-C
RUN_STEPS = 4096  # at most, between them


@dataclass
class _Fit:
    """Where a fit stands; what a run file holds of it.

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
        check_integer("first step of the fit", self.first_step, least=0)
        check_integer("first epoch of the fit", self.first_epoch, least=0)
        for what in ("loss", "weight", "rate"):
            check_number(f"{what} of the fit", getattr(self, what))


class Trainer:
    """Trains a network on data sets, and knows how to stop at any step and go on later with the same bits.

    Arguments:
        network: taken over; its parameters are the trainer's from the first fit, step or evaluation on.
        loss: a name in :data:`~mlpgpu.losses.LOSSES`; it takes logits.
        optimizer: such as ``mlpgpu.Momentum(0.1)``.
        batch_size: rows of a step; a data set's last batch may be smaller.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"``, or ``"cuda:1"`` for another card.
        precision: of matrix products.  ``"float32"`` errs no more than float32 arithmetic does, however it is
            made; ``"float32-ieee"`` is made of IEEE float32 operations alone.  ``"tf32"`` and ``"bfloat16"``
            round the operands of large products to 11 and 8 bits, on a card; ``"float64"`` is for the CPU.
        streams: shares that each batch is split into, each with a gradient of its own.
        reduction: ``"ordered"`` for the same bits in every run, or ``"atomic"`` for sums by atomics on the card.
        metrics: names in :data:`~mlpgpu.metrics.METRICS`, for ``evaluate`` and for validation.
        class_weight: a mapping of classes, by number or name, to weights of their training rows (1 for
            those it leaves out), or ``"balanced"`` for weights inverse to the classes' frequencies.
        threads: host threads; by a fixed rule of the plan and the cores if None.
        memory_share: of a card's memory, what a data set may take; a larger one is streamed through it.

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
        loss: str,
        optimizer: Optimizer,
        *,
        batch_size: int = 32,
        backend: str = "auto",
        precision: str = "float32",
        streams: int = 1,
        reduction: str = "ordered",
        metrics: Sequence[str] = (),
        class_weight: Mapping[Any, float] | str | None = None,
        threads: int | None = None,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        if not isinstance(network, Network):
            raise DtypeError("network", expected="a mlpgpu.Network", got=type(network).__name__)
        if not isinstance(optimizer, Optimizer):
            expected = "an optimizer, such as mlpgpu.Momentum(0.1)"
            raise DtypeError("optimizer", expected=expected, got=f"{type(optimizer).__name__} {optimizer!r}")
        self.network = network
        self.loss = lookup("loss", loss, LOSSES)
        self.optimizer = optimizer
        self.batch_size = check_integer("batch_size", batch_size, least=1)
        self.streams = check_integer("streams", streams, least=1)
        self.precision = lookup("precision", precision, PRECISIONS)
        self.reduction = lookup("reduction", reduction, REDUCTIONS)
        self._task = Task(self.loss, network.n_out)
        self.metrics = self._task.check_metrics(metrics)
        self.class_weight = self._task.check_class_weight(class_weight)
        self.threads = None if threads is None else check_integer("threads", threads, least=1)
        self.memory_share = check_number("memory_share", memory_share, least=0.0, below=1.0)
        self.plan = self._lower(LOSSES[self.loss].targets[0])
        self.backend = choose_backend(backend, self.plan)

        self.history = History()
        self.steps = 0
        self.epochs = 0
        self._schedule = as_schedule(optimizer.rate)
        self._plateau = Plateau()
        self._program: Program | None = None
        self._holder = self._current_parameters  # one object, for the network to know the trainer by
        self._read: np.ndarray | None = None  # parameters as last read, (P,), until they change
        self._slots: np.ndarray | None = None  # (K, 1, P), where a file gave them
        self._kept: np.ndarray | None = None  # (P,), likewise
        self._keeps = False
        self._fit: _Fit | None = None
        self._resumed = False
        self._listeners: list[Callback] = []
        self._callback_states: dict[str, dict[str, Any]] = {}
        self._monitored: tuple[str, ...] = ()

        network.output = self._task.output

    def _lower(self, kind: TargetKind) -> Plan:
        return self.network.lower(
            capacity=self.batch_size,
            loss=self.loss,
            target_kind=kind,
            optimizer=self.optimizer,
            precision=self.precision,
            reduction=self.reduction,
            shares=self.streams,
        )

    # --- training ---

    def fit(
        self,
        data: Dataset,
        epochs: int,
        *,
        validation: Dataset | None = None,
        callbacks: Sequence[Any] = (),
        shuffle: bool = True,
        drop_last: bool = False,
        progress: bool = True,
    ) -> History:
        """Train for ``epochs`` passes over ``data``.

        The first fit of a resumed trainer goes on with the interrupted one, up to ``epochs`` epochs in
        all; it takes the same data and arguments.  Ctrl-C ends a fit after a finished step; the history
        is then marked ``interrupted``, and the trainer can be saved.

        Arguments:
            validation: evaluated after each epoch; its columns in the history begin with ``validation_``.
            callbacks: see :mod:`mlpgpu.callbacks`; or functions of an epoch's record, which end the fit
                by returning True.
            shuffle: whether each epoch has its own order.
            drop_last: whether to leave out an epoch's last batch if it is smaller.
            progress: whether to show a bar, if standard error is a terminal.

        Returns:
            the history of all epochs so far.

        Raises:
            MlpgpuError: data or arguments do not suit the network or each other; nothing has changed then.
            DataMismatchError: a resumed fit is given other data or arguments than it began with.
            DivergenceError: a loss or a parameter is not finite any more.
        """
        epochs = check_integer("epochs", epochs, least=1)
        self._check(data)
        if validation is not None:
            self._check(validation, self.metrics)
        listeners = [as_callback(callback) for callback in callbacks]
        listeners.sort(key=lambda callback: callback.runs_last)
        if drop_last and len(data) < self.batch_size:
            expected = f"at least one batch of {self.batch_size} rows with drop_last=True"
            raise ConfigurationError("data", expected=expected, got=f"{len(data)} rows")
        validated = ("loss", *(name for name in self.metrics if METRICS[name].is_scalar)) if validation else ()
        monitored = ("loss", *(VALIDATION + name for name in validated))
        if isinstance(self._schedule, ReduceOnPlateau) and self._schedule.monitor not in monitored:
            hint = "pass validation= to fit"
            got = repr(self._schedule.monitor)
            raise ConfigurationError("ReduceOnPlateau monitor", expected=f"one of {monitored}", got=got, hint=hint)
        fit = self._continued(data, shuffle, drop_last) if self._resumed else self._begun(data, shuffle, drop_last)
        weighted = self._weighted(data)
        self._monitored = monitored
        if self._resumed:
            _load_states(listeners, self._callback_states)
        finished = any([callback.begin(self) is True for callback in listeners])

        # Nothing is left to refuse: from here on the trainer and the network change.
        if not self.network.adapted:
            self.network.adapt(data)
        self.network.classes = data.classes or self.network.classes
        self.network.scale = data.scale or self.network.scale
        self._fit, self._listeners, self._resumed = fit, listeners, False
        self.history.interrupted = False
        sampling = Sampling(
            rows=len(data),
            batch_size=self.batch_size,
            seed=self.network.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            first_step=fit.first_step,
            first_epoch=fit.first_epoch,
        )
        program = self._ready(data)
        program.attach(weighted, sampling)
        target = fit.first_epoch + epochs
        hidden = None if progress else True  # None: hidden unless standard error is a terminal
        with (
            tqdm(total=target, initial=self.epochs, unit="epoch", disable=hidden) as bar,
            _deferred_interrupt() as stop,
        ):
            while self.epochs < target and not finished:
                started, before = time.perf_counter(), self.steps
                self._train_epoch(program, sampling, stop)
                if stop:
                    self.history.interrupted = True
                    where = f"after step {self.steps}, in epoch {self.epochs + 1}"
                    print(f"mlpgpu: interrupted {where}; the network is as that step left it", file=sys.stderr)
                    break
                if any(callback.runs_last for callback in listeners):
                    program.prefetch()  # what they save comes while the validation is under way
                record = self._end_epoch(validation, started)
                finished = any([callback.epoch_end(self, record) is True for callback in listeners])
                rows = (self.steps - before) / sampling.steps_per_epoch * len(data) / record["seconds"]
                bar.set_postfix_str(_postfix(record, rows))
                bar.update()
        for callback in listeners:
            callback.end(self)
        self._callback_states = _states(listeners)
        self._check_finite(self.steps - 1)
        return self.history

    def _train_epoch(self, program: Program, sampling: Sampling, stop: list[int]) -> None:
        """Train from wherever the epoch stands to its end, or until ``stop`` is not empty."""
        fit = self._fit
        assert fit is not None
        count = 1
        first = fit.first_step + (self.epochs - fit.first_epoch) * sampling.steps_per_epoch
        while (done := self.steps - first) < sampling.steps_per_epoch and not stop:
            boundaries = [callback.every_steps for callback in self._listeners if callback.every_steps]
            room = [every - self.steps % every for every in boundaries]
            count = min(count, RUN_STEPS, sampling.steps_per_epoch - done, *room)
            batch = np.arange(done, done + count)
            clock = Clock(
                step=self.steps + np.arange(count),
                epoch=self.epochs + batch / sampling.steps_per_epoch,
                epochs_per_step=1.0 / sampling.steps_per_epoch,
                factor=self._plateau.factor,
            )
            started = time.perf_counter()
            losses = self._run(program, clock)
            elapsed = time.perf_counter() - started
            # Added one by one, so that the sum does not depend on how many steps ran at a time.
            for loss, weight in losses.tolist():
                fit.loss += loss
                fit.weight += weight
            for callback in self._listeners:
                if callback.every_steps and self.steps % callback.every_steps == 0:
                    callback.step_end(self)
            count = max(1, int(count * min(2.0, RUN_SECONDS / max(elapsed, 1e-9))))

    def _run(self, program: Program, clock: Clock) -> np.ndarray:
        """Run the steps of ``clock``; returns (steps, 2), their losses and weights, summed over rows."""
        rates = self._schedule.rates(clock)
        if not self.network.is_held_by(self._holder):  # a callback set parameters
            self._set_aside()
            self._load(program)
        self._read = None
        sums = program.run(self.steps, rates)
        self.steps += len(rates)
        if self._fit is not None:
            self._fit.rate = float(rates[-1])
        finite = np.isfinite(sums[:, 0])
        if not finite.all():
            self._raise_diverged("loss", self.steps - len(finite) + int(np.argmin(finite)))
        return sums

    def _end_epoch(self, validation: Dataset | None, started: float) -> Record:
        """Close the epoch's books: its record, the history, the plateau."""
        fit = self._fit
        assert fit is not None
        record: Record = {"epoch": self.epochs + 1, "loss": fit.loss / fit.weight if fit.weight else 0.0}
        if validation is not None:
            results = self.evaluate(validation)
            record |= {
                VALIDATION + name: results[name] for name in ("loss", *self.metrics) if np.ndim(results[name]) == 0
            }
        record |= {"rate": fit.rate, "seconds": time.perf_counter() - started}
        fit.loss = fit.weight = 0.0
        self.epochs += 1
        self.history.append(record)
        if isinstance(self._schedule, ReduceOnPlateau):
            self._plateau = self._schedule.observe(self._plateau, record[self._schedule.monitor])
        return record

    def step(self, x: ArrayLike, y: ArrayLike, weight: ArrayLike | None = None) -> float:
        """Train for one step on the rows given, at most ``batch_size``, and return the loss before the update.

        ``x`` is (rows, n_in), ``y`` what a :class:`Dataset` takes, ``weight`` (rows,).

        Raises:
            MlpgpuError: they do not suit the network.
            ConfigurationError: the schedule counts epochs, which single steps do not make.
            DivergenceError: the loss is not finite.
        """
        is_bytes = getattr(x, "dtype", None) == np.uint8
        data = Dataset(x, y, weight, self.network.classes, scale=self.network.scale if is_bytes else None)
        self._check(data)
        if len(data) > self.batch_size:
            raise ConfigurationError(
                "x", expected=f"at most batch_size = {self.batch_size} rows", got=f"{len(data)} rows"
            )
        if isinstance(self._schedule, ReduceOnPlateau):
            what = "learning rate in Trainer.step, which knows no epochs"
            raise ConfigurationError(what, expected="a schedule in steps", got="ReduceOnPlateau")
        clock = Clock(step=np.array([self.steps]))
        self._schedule.rates(clock)  # raises before anything has changed
        if not self.network.adapted:
            hint = "call network.adapt(dataset)"
            raise ConfigurationError("network", expected="fitted Standardize layers", got="unfitted ones", hint=hint)
        program = self._ready(data)
        rows = len(data)
        sampling = Sampling(rows, rows, seed=self.network.seed, shuffle=False, first_step=self.steps)
        program.attach(self._weighted(data), sampling)
        self._fit, self._resumed = None, False
        loss, weighted = self._run(program, clock)[0]
        return float(loss / weighted) if weighted else 0.0

    def evaluate(self, data: Dataset, metrics: Sequence[str] | None = None) -> dict[str, Any]:
        """The mean loss over a data set, without penalties or class weights, and metrics.

        Returns:
            ``"loss"`` and each metric by name: floats, or an array for a confusion matrix.

        Raises:
            MlpgpuError: the data do not suit the network, or a metric does not suit the loss.
            DataError: a metric of ranks is asked for, and no row of some class has a weight over 0.
        """
        names = self.metrics if metrics is None else self._task.check_metrics(metrics)
        self._check(data, names)
        if not self.network.adapted:
            hint = "call network.adapt(dataset), or train"
            raise ConfigurationError("network", expected="fitted Standardize layers", got="unfitted ones", hint=hint)
        kind = self._task.target_kind(data)
        if self._program is None or kind == self.plan.target_kind:
            program = self._ready(data)
        else:  # a fit may be under way on the other kind, and goes on with its program
            plan = dataclasses.replace(self._lower(kind), training=(), optimizer=None)
            program = self.backend.compile(plan, threads=self.threads, memory_share=self.memory_share)
            self.network.start(program)
        sums = program.evaluate(data, names)
        value, weight = sums.pop("loss")
        return {"loss": float(value / weight), **{name: METRICS[name].finish(sums[name]) for name in names}}

    # --- what callbacks use ---

    @property
    def monitored(self) -> tuple[str, ...]:
        """The columns that the current fit's records have, and that can be monitored."""
        return self._monitored

    def keep(self) -> None:
        """Keep the parameters as they are now, in place of what was kept before."""
        assert self._program is not None
        self._program.snapshot()
        self._keeps = True

    def restore_kept(self) -> None:
        """Put the parameters that were kept back."""
        if self._program is not None and self._keeps:
            self._program.restore()
            self._read = None

    def histograms(self, bins: int, of: Sequence[str] = ("parameters",)) -> dict[str, Histogram]:
        """Finite values counted in equal bins, counts (bins,) and edges (bins + 1,), by name.

        ``of`` names some of ``"parameters"``, ``"activations"`` and ``"gradients"``, see
        :class:`~mlpgpu.callbacks.Histograms`; the latter two of the first batch of the fit's data as they stand.
        """
        assert self._program is not None
        if not self.network.is_held_by(self._holder):  # a callback set parameters
            self._set_aside()
            self._load(self._program)
        found = self._program.histograms(bins) if "parameters" in of else {}
        if {"activations", "gradients"} & set(of):
            sampled = self._program.sample(self.batch_size, self.steps, bins)
            kinds = {"activation": "activations", "gradient": "gradients"}
            found |= {name: counted for name, counted in sampled.items() if kinds[name.rpartition(".")[2]] in of}
        return found

    # --- the program, and what it holds ---

    def _ready(self, data: Dataset) -> Program:
        """The program, compiled for training on data of this kind, with the network's current parameters."""
        kind = self._task.target_kind(data)
        if self._program is None or kind != self.plan.target_kind:
            self._set_aside()
            self.plan = self._lower(kind)
            self._program = self.backend.compile(self.plan, threads=self.threads, memory_share=self.memory_share)
            self._load(self._program)
        elif not self.network.is_held_by(self._holder):
            self._set_aside()
            self._load(self._program)
        return self._program

    @property
    def _dtype(self) -> np.dtype:
        """The type of parameters and targets."""
        return np.dtype("float64" if self.precision == "float64" else "float32")

    def _set_aside(self) -> None:
        """Take what belongs to the run rather than to the network out of the program."""
        if self._program is not None:
            state = self._program.read()
            self._slots, self._read = state.slots, state.parameters[0]
            self._kept = self._program.read(snapshot=True).parameters[0] if self._keeps else None

    def _load(self, program: Program) -> None:
        """Give the program the network's parameters, and what was set aside; take the network over."""
        if self._slots is None:
            self.network.start(program, self.optimizer)
        else:
            state = dataclasses.replace(self.network.state(), slots=self._slots)
            program.load(state)
            if self._kept is not None:
                program.load(dataclasses.replace(state, parameters=self._kept[np.newaxis]), snapshot=True)
        self._slots = self._kept = self._read = None
        self.network.hand_over(self._holder, self._dtype)

    def _current_parameters(self) -> np.ndarray:
        if self._read is None:
            assert self._program is not None
            self._read = self._program.read().parameters[0]
            self._read.flags.writeable = False
        return self._read

    def _check_finite(self, step: int) -> None:
        if self._program is not None and self.network.is_held_by(self._holder):
            is_finite = self._program.is_finite()
        else:
            is_finite = bool(np.isfinite(self.network.flat_parameters()).all())
        if not is_finite:
            self._raise_diverged("a parameter", step)

    def _raise_diverged(self, what: str, step: int) -> None:
        hint = "a lower rate, clip_norm= or standardized inputs may help; the last checkpoint stands"
        error = DivergenceError(f"{what} at step {step}", expected="a finite value", got="NaN or infinity", hint=hint)
        error.step = step
        raise error

    # --- data ---

    def _check(self, data: Dataset, metrics: Sequence[str] = ()) -> None:
        """Refuse a data set that does not suit network and loss, or ``metrics``."""
        self.network.check(data)
        self._task.check_data(data, self.plan, self._dtype, names=self.network.classes, metrics=metrics)

    def _weighted(self, data: Dataset) -> Dataset:
        """The data set with its rows weighted by class as well."""
        return self._task.weighted(data, self.class_weight, self.network.classes)

    # --- beginning and going on ---

    def _begun(self, data: Dataset, shuffle: bool, drop_last: bool) -> _Fit:
        return _Fit(self.steps, self.epochs, shuffle, drop_last, data.identity())

    def _continued(self, data: Dataset, shuffle: bool, drop_last: bool) -> _Fit:
        fit = self._fit
        if fit is None:
            return self._begun(data, shuffle, drop_last)
        hint = "to train the network on something else, load it with mlpgpu.load and make a new Trainer"
        for what, expected, got in (
            ("data of the resumed fit", fit.data, data.identity()),
            ("shuffle of the resumed fit", fit.shuffle, shuffle),
            ("drop_last of the resumed fit", fit.drop_last, drop_last),
        ):
            if expected != got:
                raise DataMismatchError(what, expected=expected, got=got, hint=hint)
        return fit

    # --- files ---

    def save(self, path: str | PathLike[str]) -> None:
        """Write the network and the run to an HDF5 file, replacing it whole or not at all.

        Raises:
            DivergenceError: a parameter is not finite.
            StorageError: the file cannot be written.
        """
        self._check_finite(self.steps - 1)
        storage.write(path, self._contents())

    def _contents(self) -> storage.Contents:
        network = self.network.contents()
        run = {
            "loss": self.loss,
            "optimizer": describe(self.optimizer),
            "batch_size": self.batch_size,
            "precision": self.precision,
            "streams": self.streams,
            "reduction": self.reduction,
            "metrics": list(self.metrics),
            "memory_share": self.memory_share,
            "class_weight": _plain_class_weight(self.class_weight),
            "target_kind": self.plan.target_kind,
            "made_by": self.backend.fingerprint(self.plan, threads=self.threads),
            "steps": self.steps,
            "epochs": self.epochs,
            "plateau": describe(self._plateau),
            "fit": None if self._fit is None else dataclasses.asdict(self._fit),
            "callbacks": _states(self._listeners) if self._listeners else self._callback_states,
            "columns": list(self.history.columns),
        }
        arrays = {f"/mlpgpu/run/history/{name}": np.array(self.history[name]) for name in self.history.columns}
        slots, kept = self._slots, self._kept
        if self._program is not None:
            slots = self._program.read().slots
            kept = self._program.read(snapshot=True).parameters[0] if self._keeps else None
        run |= {"has_slots": slots is not None, "has_kept": kept is not None}
        if slots is not None:
            arrays |= {f"/mlpgpu/run/slots/{name}": slots[k, 0] for k, name in enumerate(self.optimizer.slots)}
        if kept is not None:
            arrays["/mlpgpu/run/kept"] = kept
        return storage.Contents({**network.description, "run": run}, {**network.arrays, **arrays}, network.groups)

    @classmethod
    def resume(cls, path: str | PathLike[str], *, backend: str | None = None, threads: int | None = None) -> Trainer:
        """The trainer that :meth:`save` wrote, ready to go on.

        Its first ``fit`` continues the one that was interrupted.  ``backend`` and ``threads`` override
        what the run was made by; where the same bits cannot be promised, a warning says so.  On the CPU a run
        in tf32 or bfloat16 goes on in float32.

        Raises:
            StorageError: the file cannot be read.
            FileFormatError: it is damaged, not one of ours, from a newer version, or holds no run.
            BackendError: there is no such backend here; ``backend="cpu"`` goes on anywhere.
        """
        if backend is not None:
            get_backend(backend)
        contents = storage.read(path)
        network = Network.from_contents(contents)
        if "run" not in contents.description:
            hint = "mlpgpu.load reads the network in it"
            raise FileFormatError(str(path), expected="a file of Trainer.save", got="a network alone", hint=hint)
        try:
            return cls._from(network, contents, backend, threads)
        except (BackendError, FileFormatError):
            raise
        except (MlpgpuError, ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"run in {path}", expected="one that mlpgpu wrote", got=str(error)) from error

    @classmethod
    def _from(cls, network: Network, contents: storage.Contents, backend: str | None, threads: int | None) -> Trainer:
        run = contents.description["run"]
        made_by = run["made_by"]
        class_weight = run["class_weight"]
        if isinstance(class_weight, list):
            class_weight = {key: check_number("class weight", value, least=0.0) for key, value in class_weight}
        trainer = cls(
            network,
            run["loss"],
            rebuild("optimizer", run["optimizer"], OPTIMIZERS, SCHEDULES),
            batch_size=run["batch_size"],
            backend=backend or made_by["backend"],
            precision="float32" if backend == "cpu" and run["precision"] in CARD_PRECISIONS else run["precision"],
            streams=run["streams"],
            reduction=run["reduction"],
            metrics=run["metrics"],
            class_weight=class_weight,
            threads=threads or made_by["threads"],
            memory_share=run["memory_share"],
        )
        trainer.plan = trainer._lower(lookup("target kind", run["target_kind"], LOSSES[trainer.loss].targets))
        trainer.steps = check_integer("steps", run["steps"], least=0)
        trainer.epochs = check_integer("epochs", run["epochs"], least=0)
        trainer._plateau = rebuild("plateau", run["plateau"], {"Plateau": Plateau})
        trainer._fit = None if run["fit"] is None else _Fit(**run["fit"])
        trainer._resumed = True
        trainer._callback_states = dict(run["callbacks"])

        dtype, count = trainer._dtype, trainer.plan.parameter_count
        if run["has_slots"]:
            stored = [contents.arrays.get(f"/mlpgpu/run/slots/{name}") for name in trainer.optimizer.slots]
            flat = [_expect_flat(slot, count, dtype) for slot in stored]
            trainer._slots = np.reshape(flat, (len(flat), 1, count)).astype(dtype)
        if run["has_kept"]:
            trainer._kept, trainer._keeps = _expect_flat(contents.arrays.get("/mlpgpu/run/kept"), count, dtype), True
        columns = {name: contents.arrays[f"/mlpgpu/run/history/{name}"].tolist() for name in run["columns"]}
        trainer.history = _history(columns)

        now = trainer.backend.fingerprint(trainer.plan, threads=trainer.threads)
        if now != made_by:
            differing = {key: (made_by.get(key), now.get(key)) for key in now if made_by.get(key) != now.get(key)}
            warnings.warn(f"the resumed run may not repeat its bits: made by, and now: {differing}", stacklevel=3)
        return trainer


def _history(columns: Mapping[str, Sequence[float]]) -> History:
    """The history with these columns, where NaN stands for what an epoch's record lacks."""
    rows = zip(*columns.values(), strict=True)
    records = [{name: value for name, value in zip(columns, row, strict=True) if value == value} for row in rows]
    return History([{**record, "epoch": int(record["epoch"])} for record in records])


def _expect_flat(array: np.ndarray | None, count: int, dtype: np.dtype) -> np.ndarray:
    if array is None or array.shape != (count,) or array.dtype != dtype:
        got = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise FileFormatError("array of a run", expected=f"{dtype} ({count},)", got=got)
    return array


def _plain_class_weight(class_weight: ClassWeight) -> Any:
    """As JSON holds it, whose keys would all be strings: pairs."""
    if class_weight is None or isinstance(class_weight, str):
        return class_weight
    return [[label if isinstance(label, str) else int(label), weight] for label, weight in class_weight.items()]


def _states(listeners: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    return {key: callback.state() for key, callback in _keyed(listeners)}


def _load_states(listeners: Sequence[Callback], states: Mapping[str, Any]) -> None:
    for key, callback in _keyed(listeners):
        if key in states:
            callback.load_state(states[key])


def _keyed(listeners: Sequence[Callback]) -> Iterator[tuple[str, Callback]]:
    """Callbacks by class, and by number among those of one class."""
    counts: dict[str, int] = {}
    for callback in listeners:
        name = type(callback).__name__
        counts[name] = counts.get(name, 0) + 1
        yield f"{name} {counts[name]}", callback


def _postfix(record: Record, rows_per_second: float) -> str:
    shown = [f"{name} {value:.4g}" for name, value in record.items() if name not in ("epoch", "rate", "seconds")]
    return ", ".join([*shown, f"{rows_per_second:,.0f} rows/s"])


@contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """Collect Ctrl-C in the list given, to be looked at between steps; a second one acts at once.

    Signals reach only the main thread; elsewhere nothing is collected.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.getsignal(signal.SIGINT)
    if before is None or before is signal.SIG_IGN:  # not ours to replace
        yield received
        return

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
