"""What a callback is, and what it may ask of a trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..backends import Histogram
from ..errors import ConfigurationError, DtypeError, FileFormatError, StorageError, did_you_mean, shown
from ..history import History, Record
from ..metrics import VALIDATION
from ..network import Network

ADDS = "a callback that adds a column names it in its columns"
VALIDATION_LOSS = f"{VALIDATION}loss"
STATE_TYPES = {type(None): "None", bool: "a boolean", int: "a whole number", float: "a finite float", str: "a string"}

HOOKS = ("begin", "step_end", "epoch_end", "end")
# What Keras, skorch, PyTorch Lightning and fastai call them.
OTHER_HOOKS = {
    **dict.fromkeys(("on_train_begin", "on_train_start", "on_fit_start", "before_fit"), "begin"),
    **dict.fromkeys(("on_batch_end", "on_train_batch_end", "after_batch"), "step_end"),
    **dict.fromkeys(("on_epoch_end", "on_train_epoch_end", "on_validation_epoch_end", "after_epoch"), "epoch_end"),
    **dict.fromkeys(("on_train_end", "on_fit_end", "after_fit"), "end"),
}


class TrainerLike(Protocol):
    """What callbacks use of a trainer."""

    @property
    def network(self) -> Network:
        """What it trains."""

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
        columns: names of numbers that ``epoch_end`` puts into each record.  They stand in the history, and
            EarlyStopping, Checkpoint and ReduceOnPlateau may watch them: who has columns is called first.
    """

    runs_last: ClassVar[bool] = False
    columns: Sequence[str] = ()

    @property
    def every_steps(self) -> int | None:
        """``step_end`` is called whenever ``trainer.steps`` is a multiple of this; never if None."""
        return None

    def begin(self, trainer: TrainerLike) -> object:
        """Before a fit's first step: check what the fit lacks.  What is true says: nothing is left to train."""

    def step_end(self, trainer: TrainerLike) -> None:
        """After a step that ``every_steps`` asks for."""

    def epoch_end(self, trainer: TrainerLike, record: Record) -> object:
        """After an epoch, whose record is the history's last.  The fit ends here if it returns what is true.

        Numbers that it adds to ``record`` stand in the history.
        """

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
        check_state(self, state, {})


class FunctionCallback(Callback):
    """Calls ``function(record)`` after each epoch; the fit ends if that returns what is true.

    Numbers that it adds to the record stand in the history; those in its attribute ``columns`` can be watched.
    """

    def __init__(self, function: Callable[[Record], object]) -> None:
        self.function = function
        self.columns = getattr(function, "columns", ())

    def epoch_end(self, trainer: TrainerLike, record: Record) -> object:
        return self.function(record)


def as_callback(value: object) -> Callback:
    """``value`` itself if it is a callback, a :class:`FunctionCallback` if it is a function.

    Raises:
        DtypeError: it is neither; a class is neither.
        ConfigurationError: its methods are named as other libraries name hooks, and none would ever be called.
    """
    if isinstance(value, Callback):
        _check_hooks(type(value))
        return value
    if callable(value) and not isinstance(value, type):
        return FunctionCallback(value)
    got = f"class {value.__name__}" if isinstance(value, type) else shown(value)
    raise DtypeError("callback", expected="a Callback or a function of an epoch's record", got=got)


def _check_hooks(kind: type[Callback]) -> None:
    """Refuse a class that has hooks of other libraries' names, and none of ours."""
    if any(getattr(kind, hook) is not getattr(Callback, hook) for hook in HOOKS):
        return
    for name in dir(kind):
        if name.startswith(("on_", "after_", "before_")) and callable(getattr(kind, name)):
            hint = f"did you mean {OTHER_HOOKS[name]!r}?" if name in OTHER_HOOKS else ""
            raise ConfigurationError(
                f"methods of {kind.__name__}", expected=f"one of {', '.join(HOOKS)}", got=name, hint=hint
            )


def check_monitor(owner: str, monitor: str, monitored: Sequence[str]) -> None:
    """Refuse to watch what is none of the columns ``monitored``."""
    if monitor not in monitored:
        hint = did_you_mean(monitor, monitored) or ADDS
        if str(monitor).startswith((VALIDATION, "val_")) and not any(name.startswith(VALIDATION) for name in monitored):
            hint = "pass validation= to fit"
        expected = "one of " + ", ".join(monitored)
        raise ConfigurationError(f"{owner} monitor", expected=expected, got=repr(monitor), hint=hint)


def check_place(owner: Callback, path: Path) -> None:
    what = f"{type(owner).__name__} path {path}"
    if not os.path.isdir(path.parent):
        raise StorageError(what, expected="a folder that is there", got=f"no folder {path.parent}")
    if os.path.isdir(path):
        raise StorageError(what, expected="a file or nothing", got="a folder")


def check_state(owner: Callback, state: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Raises FileFormatError unless ``state`` holds just these keys, of just these types, and finite numbers."""
    what = f"state of {type(owner).__name__}"
    if not isinstance(state, Mapping) or set(state) != set(kinds):
        got = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise FileFormatError(what, expected="keys " + (", ".join(kinds) or "(none)"), got=got or "no keys")
    for key, allowed in kinds.items():
        value = state[key]
        if type(value) not in allowed or (isinstance(value, float) and not math.isfinite(value)):
            expected = " or ".join(STATE_TYPES[kind] for kind in allowed)
            raise FileFormatError(f"{what}, {key}", expected=expected, got=shown(value, typed=False))
