"""Run files while a fit goes on."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import ConfigurationError, check_integer, check_text, check_truth, lookup
from ..history import Record, is_better
from ..metrics import MODES, Mode
from ..storage.files import check_path
from .callback import VALIDATION_LOSS, Callback, TrainerLike, check_monitor, check_place, check_state

RUN_FILES = (".h5", ".hdf5")
UNITS = ("epoch", "step")


class Checkpoint(Callback):
    """Saves the whole run to ``path``, every so many epochs or steps and when the fit ends.

    Arguments:
        path: ends in ``.h5`` or ``.hdf5``; its folder is there when the fit begins.
        every: how many of ``unit``, counted over the life of the trainer.
        unit: ``"epoch"`` or ``"step"``.
        keep_best: also keep the run as of the best epoch, for ``run.h5`` in ``run.best.h5``.
        monitor: the history's column that tells the best; ``validation_loss``, or ``loss`` where
            there is no validation set, if None.
        mode: ``"min"``, ``"max"`` or ``"auto"``, as of :class:`EarlyStopping`.

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
        mode: Mode = "auto",
    ) -> None:
        self.path = check_path("Checkpoint path", path, RUN_FILES)
        self.every = check_integer("Checkpoint every", every, least=1)
        self.unit = lookup("Checkpoint unit", unit, UNITS)
        self.keep_best = check_truth("Checkpoint keep_best", keep_best)
        self.monitor = None if monitor is None else check_text("Checkpoint monitor", monitor)
        if monitor is not None and not keep_best:
            raise ConfigurationError("Checkpoint monitor", expected="None without keep_best=True", got=repr(monitor))
        self.mode = lookup("Checkpoint mode", mode, MODES)
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
        check_place(self, self.path)
        watched = None
        if self.keep_best:
            watched = self.monitor
            if watched is None:
                watched = VALIDATION_LOSS if VALIDATION_LOSS in trainer.monitored else "loss"
            check_place(self, self.best_path)
            check_monitor(type(self).__name__, watched, trainer.monitored)
        if self._loaded != watched:
            self.best = None
        self._watched, self._loaded = watched, None

    def step_end(self, trainer: TrainerLike) -> None:
        trainer.save(self.path)

    def epoch_end(self, trainer: TrainerLike, record: Record) -> None:
        if self._watched is not None:
            value = float(record[self._watched])
            if is_better(self._watched, value, self.best, mode=self.mode):
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
        check_state(self, state, {"best": (float, type(None)), "monitor": (str, type(None))})
        self.best, self._loaded = state["best"], state["monitor"]
