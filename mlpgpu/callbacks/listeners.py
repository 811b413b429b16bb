"""The callbacks of a fit, called as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..history import Record
from .callback import Callback, TrainerLike, as_callback


class Listeners:
    """Callbacks in the order in which they are called: as given, those that save the run last.

    Raises:
        DtypeError: one is neither a callback nor a function.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self._callbacks: list[Callback] = sorted(map(as_callback, callbacks), key=lambda callback: callback.runs_last)

    @property
    def save(self) -> bool:
        """Whether one of them saves the run."""
        return any(callback.runs_last for callback in self._callbacks)

    def steps_until_due(self, step: int, most: int) -> int:
        """How many steps may follow ``step`` finished ones until a ``step_end`` is due, at most ``most``."""
        intervals = [callback.every_steps for callback in self._callbacks]
        return min([most, *(every - step % every for every in intervals if every)])

    # --- the moments of a fit; the first two results say whether the fit ends ---

    def begin(self, trainer: TrainerLike) -> bool:
        return any([callback.begin(trainer) is True for callback in self._callbacks])

    def epoch_end(self, trainer: TrainerLike, record: Record) -> bool:
        return any([callback.epoch_end(trainer, record) is True for callback in self._callbacks])

    def step_end(self, trainer: TrainerLike) -> None:
        for callback in self._callbacks:
            if callback.every_steps and trainer.steps % callback.every_steps == 0:
                callback.step_end(trainer)

    def end(self, trainer: TrainerLike) -> None:
        for callback in self._callbacks:
            callback.end(trainer)

    # --- states, by class and by number among those of one class ---

    def states(self) -> dict[str, dict[str, Any]]:
        return {key: callback.state() for key, callback in self._keyed()}

    def load_states(self, states: Mapping[str, Any]) -> None:
        for key, callback in self._keyed():
            if key in states:
                callback.load_state(states[key])

    def _keyed(self) -> Iterator[tuple[str, Callback]]:
        counts: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            yield f"{name} {counts[name]}", callback
