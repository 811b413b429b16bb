"""A fit that ends once it no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import FileFormatError, check_integer, check_number, check_text, check_truth, lookup
from ..history import Record, is_better
from ..metrics import MODES, Mode
from .callback import VALIDATION_LOSS, Callback, TrainerLike, check_monitor, check_state


class EarlyStopping(Callback):
    """Ends a fit once ``monitor`` has not improved for ``patience`` epochs.

    To improve is to pass the best value so far by more than ``min_delta``: upward in mode ``"max"``, downward in
    ``"min"``; in ``"auto"`` upward for accuracy, R² and areas under curves, downward for all others.  When the fit
    ends, early or not, ``restore_best`` puts the best epoch's parameters back; not after Ctrl-C, which leaves those
    of the last finished step.
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
        mode: Mode = "auto",
    ) -> None:
        self.monitor = check_text("EarlyStopping monitor", monitor)
        self.patience = check_integer("EarlyStopping patience", patience, least=1)
        self.min_delta = check_number("EarlyStopping min_delta", min_delta, least=0.0)
        self.restore_best = check_truth("EarlyStopping restore_best", restore_best)
        self.mode = lookup("EarlyStopping mode", mode, MODES)
        self._loaded: str | None = None  # the monitor of a state just loaded
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.wait = 0
        self.stopped = False

    def begin(self, trainer: TrainerLike) -> bool:
        check_monitor(type(self).__name__, self.monitor, trainer.monitored)
        if self._loaded != self.monitor:
            self._forget()
        self._loaded = None
        return self.stopped

    def epoch_end(self, trainer: TrainerLike, record: Record) -> bool:
        value = float(record[self.monitor])
        if is_better(self.monitor, value, self.best, self.min_delta, self.mode):
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
        check_state(self, state, kinds)
        best, best_epoch, wait = state["best"], state["best_epoch"], state["wait"]
        if wait < 0 or (best is None) != (best_epoch is None) or (best_epoch is not None and best_epoch < 1):
            what = f"state of {type(self).__name__}"
            expected = "wait >= 0, and best and best_epoch >= 1 both or neither"
            raise FileFormatError(what, expected=expected, got=f"wait={wait}, best={best}, best_epoch={best_epoch}")
        self.best, self.best_epoch, self.wait, self.stopped = best, best_epoch, wait, state["stopped"]
        self._loaded = state["monitor"]
