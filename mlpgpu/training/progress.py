"""How far a trainer has come, all of which a run file holds.

What changes together is changed by one assignment: whoever changes it makes a new :class:`Progress` and puts it in
place of the old one.  So whatever ends a fit, at whichever instruction, a trainer stands at one moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..errors import ConfigurationError, DtypeError, check_integer, check_number
from ..history import History
from ..schedules import Plateau

Kind = TypeVar("Kind", bound="Replaceable")

MOST_STEPS = 2**53  # as float64, in which rates are computed, counts them
HOOKS = ("step_end", "epoch_end")


class Replaceable:
    """What is replaced as a whole when something of it changes."""

    def changed(self: Kind, **fields: Any) -> Kind:
        """A copy in which these fields are others; ``dataclasses.replace`` would take a tenth of a small step."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **fields)
        return copy


@dataclass(frozen=True)
class FitProgress(Replaceable):
    """Where a fit stands.

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


@dataclass(frozen=True)
class Pending(Replaceable):
    """A step or an epoch that not all callbacks have been told of.

    Attributes:
        hook: ``"step_end"`` or ``"epoch_end"``.
        left: the keys of those to be told, in order.
        is_over: whether one that was told ends the fit.
    """

    hook: Literal["step_end", "epoch_end"]
    left: tuple[str, ...]
    is_over: bool = False

    def among(self, keys: Iterable[str]) -> Pending:
        """For a fit with callbacks of these keys: a resumed one may have others than those of the file."""
        known = set(keys)
        return self.changed(left=tuple(key for key in dict.fromkeys(self.left) if key in known))

    def without(self, key: str, *, is_over: bool = False) -> Pending:
        """After the callback of that key was told, and perhaps ended the fit."""
        left = tuple(other for other in self.left if other != key)
        return self.changed(left=left, is_over=self.is_over or is_over)


@dataclass(frozen=True)
class Progress(Replaceable):
    """Where a trainer stands.

    Attributes:
        steps, epochs: finished ones, over all fits.
        history: of all epochs.
        plateau: what a schedule with memory remembers.
        fit: of the last fit; None before the first and after a single step.
        callbacks: states of the last fit's callbacks, by key.
        pending: of ``steps`` and ``epochs`` finished, what callbacks have not been told of; None if there is nothing.
        is_resumed: whether it is a run file's, and no fit has gone on with it yet.
    """

    steps: int = 0
    epochs: int = 0
    history: History = field(default_factory=History)
    plateau: Plateau = field(default_factory=Plateau)
    fit: FitProgress | None = None
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    pending: Pending | None = None
    is_resumed: bool = False

    def check(self) -> None:
        """Refuse numbers, as a file may hold them, that have no meaning or contradict each other.

        Raises:
            DtypeError, ConfigurationError: there are some.
        """
        check_integer("steps", self.steps, least=0, most=MOST_STEPS)
        check_integer("epochs", self.epochs, least=0, most=MOST_STEPS)
        if not isinstance(self.callbacks, dict):
            raise DtypeError("callbacks", expected="states by name", got=self.callbacks)
        if self.fit is not None:
            check_integer("first_step of the fit", self.fit.first_step, least=0, most=self.steps)
            check_integer("first_epoch of the fit", self.fit.first_epoch, least=0, most=self.epochs)
            for what in ("loss", "weight", "rate"):
                check_number(f"{what} of the fit", getattr(self.fit, what))
        if self.pending is not None:
            _check_pending(self.pending, self)


def _check_pending(pending: Pending, progress: Progress) -> None:
    counts = progress.epochs if pending.hook == "epoch_end" else progress.steps
    if pending.hook not in HOOKS or progress.fit is None or not counts:
        expected = f"one of {', '.join(HOOKS)}, and a fit that has come to one"
        raise ConfigurationError("hook of pending callbacks", expected=expected, got=repr(pending.hook))
    if not all(isinstance(key, str) for key in pending.left) or not isinstance(pending.is_over, bool):
        raise DtypeError("pending callbacks", expected="names, and whether the fit is over", got=pending)
