"""Callbacks: what happens beside training, after steps and epochs.

A trainer saves each callback's :meth:`~Callback.state` with itself, and hands it back before it
resumes, so that a resumed fit stops, keeps and saves where an unbroken one does.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from .backends import MOST_BINS, Histogram
from .errors import (
    BackendError,
    ConfigurationError,
    DtypeError,
    EmptyDataError,
    FileFormatError,
    StorageError,
    check_integer,
    check_number,
    lookup,
)
from .files import check_path, replace_file
from .history import PICTURES, History, Record, is_better
from .metrics import VALIDATION

VALIDATION_LOSS = f"{VALIDATION}loss"
RUN_FILES = (".h5", ".hdf5")
UNITS = ("epoch", "step")
STATE_TYPES = {type(None): "None", bool: "a boolean", int: "a whole number", float: "a finite float", str: "a string"}


class TrainerLike(Protocol):
    """What callbacks use of a trainer."""

    @property
    def history(self) -> History:
        """The epochs so far."""

    @property
    def steps(self) -> int:
        """Finished steps."""

    @property
    def epochs(self) -> int:
        """Finished epochs; in :meth:`Callback.epoch_end` the one just ended is among them."""

    @property
    def monitored(self) -> tuple[str, ...]:
        """The columns that this fit's records will have."""

    def save(self, path: Path) -> None:
        """Write the whole run, the callbacks' states included."""

    def keep(self) -> None:
        """Set the present parameters aside as the best."""

    def restore_kept(self) -> None:
        """Put the parameters set aside in place of the present ones."""

    def histograms(self, bins: int, of: Sequence[str]) -> dict[str, Histogram]:
        """Counts (bins,) of finite values, and edges (bins + 1,), by name; of parameters, activations, gradients."""


class Callback:
    """Something to do beside training.  Every hook of this base class does nothing.

    Attributes:
        runs_last: True for what saves the trainer: it must see the states that the others leave.
    """

    runs_last: ClassVar[bool] = False

    @property
    def every_steps(self) -> int | None:
        """``step_end`` is called whenever ``trainer.steps`` is a multiple of this; never if None."""
        return None

    def begin(self, trainer: TrainerLike) -> bool | None:
        """Before a fit's first step: check what the fit lacks.  True: there is nothing left to train."""

    def step_end(self, trainer: TrainerLike) -> None:
        """After a step that ``every_steps`` asks for."""

    def epoch_end(self, trainer: TrainerLike, record: Record) -> bool | None:
        """After an epoch, whose record is the history's last.  True: the fit ends here."""

    def end(self, trainer: TrainerLike) -> None:
        """After the fit, also when it was stopped early or interrupted, but not after an error."""

    def state(self) -> dict[str, Any]:
        """What a resumed fit must know: finite numbers, strings, booleans, None and lists of these."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave, right before the ``begin`` of a resumed fit.

        Raises:
            FileFormatError: it is no such state; nothing was taken over.
        """
        _check_state(self, state, {})


class EarlyStopping(Callback):
    """Ends a fit once ``monitor`` has not improved for ``patience`` epochs.

    To improve is to pass the best value so far by more than ``min_delta``: upward for accuracy and
    R², downward for all others.  When the fit ends, early or not, ``restore_best`` puts the best
    epoch's parameters back; not after Ctrl-C, which leaves those of the last finished step.
    A fit that is resumed on another monitor starts counting anew, as a fresh fit does.

    Attributes:
        best: the best value in this fit, or None before the first finite one.
        best_epoch: its epoch, from 1, or None.
        wait: epochs since then.
        stopped: whether patience ran out.

    Raises:
        DtypeError, ConfigurationError: patience is under 1 or min_delta under 0, or no number at all;
            at the start of a fit: ``monitor`` is no column of its history.
    """

    def __init__(
        self,
        monitor: str = VALIDATION_LOSS,
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = True,
    ) -> None:
        self.monitor = monitor
        self.patience = check_integer("EarlyStopping patience", patience, least=1)
        self.min_delta = check_number("EarlyStopping min_delta", min_delta, least=0.0)
        self.restore_best = restore_best
        self._loaded: str | None = None  # the monitor of a state just loaded
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.wait = 0
        self.stopped = False

    def begin(self, trainer: TrainerLike) -> bool:
        _check_monitor(self, self.monitor, trainer)
        if self._loaded != self.monitor:
            self._forget()
        self._loaded = None
        return self.stopped

    def epoch_end(self, trainer: TrainerLike, record: Record) -> bool:
        value = float(record[self.monitor])
        if is_better(self.monitor, value, self.best, self.min_delta):
            self.best, self.best_epoch, self.wait = value, int(record["epoch"]), 0
            if self.restore_best:
                trainer.keep()
        else:
            self.wait += 1
        self.stopped = self.wait >= self.patience
        return self.stopped

    def end(self, trainer: TrainerLike) -> None:
        if self.restore_best and self.best is not None and not trainer.history.interrupted:
            trainer.restore_kept()

    def state(self) -> dict[str, Any]:
        """``monitor``, and ``best``, ``best_epoch``, ``wait`` and ``stopped`` as the attributes are."""
        return {
            "monitor": self.monitor,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "wait": self.wait,
            "stopped": self.stopped,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        kinds = {
            "monitor": (str,),
            "best": (float, type(None)),
            "best_epoch": (int, type(None)),
            "wait": (int,),
            "stopped": (bool,),
        }
        _check_state(self, state, kinds)
        best, best_epoch, wait = state["best"], state["best_epoch"], state["wait"]
        if wait < 0 or (best is None) != (best_epoch is None) or (best_epoch is not None and best_epoch < 1):
            what = f"state of {type(self).__name__}"
            expected = "wait >= 0, and best and best_epoch >= 1 both or neither"
            raise FileFormatError(what, expected=expected, got=f"wait={wait}, best={best}, best_epoch={best_epoch}")
        self.best, self.best_epoch, self.wait, self.stopped = best, best_epoch, wait, state["stopped"]
        self._loaded = state["monitor"]


class Checkpoint(Callback):
    """Saves the whole run to ``path``, every so many epochs or steps and when the fit ends.

    Arguments:
        path: ends in ``.h5`` or ``.hdf5``; its folder is there when the fit begins.
        every: how many of ``unit``, counted over the life of the trainer.
        unit: ``"epoch"`` or ``"step"``.
        keep_best: also keep the run as of the best epoch, for ``run.h5`` in ``run.best.h5``.
        monitor: the history's column that tells the best; ``validation_loss``, or ``loss`` where
            there is no validation set, if None.

    Attributes:
        best: the best value in this fit, or None.

    Raises:
        DtypeError, ConfigurationError, UnknownNameError: an argument is none of the above, or there is
            a monitor without ``keep_best``; at the start of a fit: ``monitor`` is no column of its history.
        StorageError: at the start of a fit: the folder is not there; later: the file cannot be written.
    """

    runs_last: ClassVar[bool] = True

    def __init__(
        self,
        path: str | PathLike[str],
        every: int = 1,
        unit: Literal["epoch", "step"] = "epoch",
        keep_best: bool = False,
        monitor: str | None = None,
    ) -> None:
        self.path = check_path("Checkpoint path", path, RUN_FILES)
        self.every = check_integer("Checkpoint every", every, least=1)
        self.unit = lookup("Checkpoint unit", unit, UNITS)
        if monitor is not None and not keep_best:
            raise ConfigurationError("Checkpoint monitor", expected="None without keep_best=True", got=repr(monitor))
        self.keep_best = keep_best
        self.monitor = monitor
        self.best: float | None = None
        self._watched: str | None = None  # the monitor of this fit
        self._loaded: str | None = None  # the monitor of a state just loaded

    @property
    def best_path(self) -> Path:
        """Where the run as of the best epoch is kept."""
        return self.path.with_name(f"{self.path.stem}.best{self.path.suffix}")

    @property
    def every_steps(self) -> int | None:
        return self.every if self.unit == "step" else None

    def begin(self, trainer: TrainerLike) -> None:
        _check_place(self, self.path)
        watched = None
        if self.keep_best:
            watched = self.monitor
            if watched is None:
                watched = VALIDATION_LOSS if VALIDATION_LOSS in trainer.monitored else "loss"
            _check_place(self, self.best_path)
            _check_monitor(self, watched, trainer)
        if self._loaded != watched:
            self.best = None
        self._watched, self._loaded = watched, None

    def step_end(self, trainer: TrainerLike) -> None:
        trainer.save(self.path)

    def epoch_end(self, trainer: TrainerLike, record: Record) -> None:
        if self._watched is not None:
            value = float(record[self._watched])
            if is_better(self._watched, value, self.best):
                self.best = value  # before saving: the file is to hold it
                trainer.save(self.best_path)
        if self.unit == "epoch" and trainer.epochs % self.every == 0:
            trainer.save(self.path)

    def end(self, trainer: TrainerLike) -> None:
        # Even if the last step was saved: EarlyStopping may have put other parameters in place since.
        trainer.save(self.path)

    def state(self) -> dict[str, Any]:
        """``best`` as the attribute is, and ``monitor``, the column it is of, or None without ``keep_best``."""
        return {"best": self.best, "monitor": self._watched}

    def load_state(self, state: Mapping[str, Any]) -> None:
        _check_state(self, state, {"best": (float, type(None)), "monitor": (str, type(None))})
        self.best, self._loaded = state["best"], state["monitor"]


class CSVLogger(Callback):
    """Writes the whole history to a CSV file after each epoch, a header line first.

    The file is replaced as a whole, so a resumed run repeats no line.  Numbers are written so that
    they read back exactly; what an epoch lacks is left empty.

    Raises:
        DtypeError, ConfigurationError: ``path`` names no file.
        StorageError: at the start of a fit: its folder is not there; later: it cannot be written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = check_path("CSVLogger path", path)

    def begin(self, trainer: TrainerLike) -> None:
        _check_place(self, self.path)

    def epoch_end(self, trainer: TrainerLike, record: Record) -> None:
        table = io.StringIO()
        writer = csv.DictWriter(table, trainer.history.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(trainer.history)
        replace_file(f"table {self.path}", self.path, table.getvalue().encode())


COUNTED = ("parameters", "activations", "gradients")


class Histograms(Callback):
    """Counts the values of layers after each ``every`` epochs, where they lie: on a card, by a kernel.

    Bins are equal, from the least finite value to the greatest, and counts are NumPy's.  A fit begins with none.

    Activations are what a layer with parameters puts out, and gradients those of the mean loss, without penalties,
    before their norm is clipped; both of one step on the first batch of the training data as they stand, the same rows
    each time.  It moves nothing, so a training has the same bits with histograms or without.  On a card this step is
    computed in float32 by kernels that store all of it.

    Arguments:
        path: of a picture that is drawn anew with each count; ends in ``.png`` or ``.svg``.
        bins: at most 4,096.
        of: what is counted, some of ``"parameters"``, ``"activations"`` and ``"gradients"``.

    Attributes:
        epochs: ``epochs[e][name]`` is counts (bins,) and edges (bins + 1,) after epoch e, from 1; ``name`` is a
            parameter's, such as ``"0.weight"``, or ``"0.activation"``, or ``"0.weight.gradient"``.

    Raises:
        DtypeError, ConfigurationError: an argument has no meaning.
        BackendError: a picture is asked for, and matplotlib is not installed.
        StorageError: at the start of a fit: the picture's folder is not there; later: it cannot be written.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        bins: int = 64,
        every: int = 1,
        of: Sequence[str] = COUNTED,
    ) -> None:
        if isinstance(of, str) or not of:
            raise DtypeError("Histograms of", expected="some of " + ", ".join(COUNTED), got=repr(of))
        self.of = tuple(lookup("Histograms of", kind, COUNTED) for kind in of)
        self.path = None if path is None else check_path("Histograms path", path, PICTURES)
        self.bins = check_integer("Histograms bins", bins, least=1, most=MOST_BINS)
        self.every = check_integer("Histograms every", every, least=1)
        self.epochs: dict[int, dict[str, Histogram]] = {}

    def begin(self, trainer: TrainerLike) -> None:
        self.epochs = {}
        if self.path is not None:
            _check_place(self, self.path)

    def epoch_end(self, trainer: TrainerLike, record: Record) -> None:
        if trainer.epochs % self.every == 0:
            self.epochs[trainer.epochs] = trainer.histograms(self.bins, self.of)
            if self.path is not None:
                self.plot(self.path)

    def plot(self, path: str | PathLike[str]) -> Path:
        """Draw a row for each layer, with a line for each epoch that was counted, the last one darkest.

        Raises:
            ConfigurationError: the name does not end in ``.png`` or ``.svg``.
            EmptyDataError: nothing was counted yet.
            BackendError: matplotlib is not installed.
            StorageError: the picture cannot be written.
        """
        path = check_path("picture", path, PICTURES)
        if not self.epochs:
            raise EmptyDataError("Histograms", expected="at least one count", got="none")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            hint = "pip install 'mlpgpu[plot]'"
            raise BackendError("Histograms.plot", expected="the package matplotlib", got=error, hint=hint) from error

        of_layer: dict[str, list[str]] = {}  # names by the layer's place
        for name in next(iter(self.epochs.values())):
            of_layer.setdefault(name.partition(".")[0], []).append(name)
        columns = max(map(len, of_layer.values()))
        figure = Figure(figsize=(4.5 * columns, 2.5 * len(of_layer)), layout="tight")  # inches
        grid = figure.subplots(len(of_layer), columns, squeeze=False)
        panels = {
            name: axes
            for row, names in zip(grid, of_layer.values(), strict=True)
            for name, axes in zip(names, row, strict=False)
        }
        for axes in set(grid.ravel()) - set(panels.values()):
            axes.remove()
        for name, axes in panels.items():
            for place, (epoch, of_epoch) in enumerate(self.epochs.items(), 1):
                counts, edges = of_epoch[name]
                label = f"epoch {epoch}" if place in (1, len(self.epochs)) else None
                shade = 0.15 + 0.85 * place / len(self.epochs)
                # As a density, so that epochs of other widths compare.
                density = counts / (max(1, counts.sum()) * np.diff(edges))
                axes.stairs(density, edges, color="tab:blue", alpha=shade, label=label)
            axes.set(title=name, ylabel="density")
            axes.legend(fontsize="small")
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
        replace_file(f"picture {path}", path, picture.getvalue())
        return path


class FunctionCallback(Callback):
    """Calls ``function(record)`` after each epoch with a copy of its record; the fit ends if that returns True."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self.function = function

    def epoch_end(self, trainer: TrainerLike, record: Record) -> bool:
        return self.function(dict(record)) is True


def as_callback(value: object) -> Callback:
    """``value`` itself if it is a callback, a :class:`FunctionCallback` if it is a function.

    Raises:
        DtypeError: it is neither; a class is neither.
    """
    if isinstance(value, Callback):
        return value
    if callable(value) and not isinstance(value, type):
        return FunctionCallback(value)
    got = f"class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r}"
    raise DtypeError("callback", expected="a Callback or a function of an epoch's record", got=got)


def _check_monitor(owner: Callback, monitor: str, trainer: TrainerLike) -> None:
    if monitor not in trainer.monitored:
        hint = "pass validation= to fit" if str(monitor).startswith(VALIDATION) else ""
        expected = "one of " + ", ".join(trainer.monitored)
        raise ConfigurationError(f"{type(owner).__name__} monitor", expected=expected, got=repr(monitor), hint=hint)


def _check_place(owner: Callback, path: Path) -> None:
    what = f"{type(owner).__name__} path {path}"
    if not os.path.isdir(path.parent):
        raise StorageError(what, expected="a folder that is there", got=f"no folder {path.parent}")
    if os.path.isdir(path):
        raise StorageError(what, expected="a file or nothing", got="a folder")


def _check_state(owner: Callback, state: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Raises FileFormatError unless ``state`` holds just these keys, of just these types, and finite numbers."""
    what = f"state of {type(owner).__name__}"
    if not isinstance(state, Mapping) or set(state) != set(kinds):
        got = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise FileFormatError(what, expected="keys " + (", ".join(kinds) or "(none)"), got=got or "no keys")
    for key, allowed in kinds.items():
        value = state[key]
        if type(value) not in allowed or (isinstance(value, float) and not math.isfinite(value)):
            expected = " or ".join(STATE_TYPES[kind] for kind in allowed)
            raise FileFormatError(f"{what}, {key}", expected=expected, got=repr(value))
