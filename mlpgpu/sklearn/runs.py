"""What ``partial_fit`` goes on from: a trainer, or what of one a pickle holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..training import Trainer
from ..training.progress import Progress


class KeptRun:
    """A trainer's slots, counts and kept parameters, and the trainer itself while it is in use.

    A trainer keeps its program, and on a card its data set, until it is dropped.  So only one that
    is called again and again, by ``partial_fit``, is kept ``is_live``.
    """

    def __init__(self, trainer: Trainer, *, is_live: bool) -> None:
        self._trainer: Trainer | None = trainer
        self._slots: np.ndarray | None = None  # (K, 1, P)
        self._kept: np.ndarray | None = None  # (P,)
        self._steps = self._epochs = 0
        if not is_live:
            self._rest()

    def _rest(self) -> None:
        trainer = self._trainer
        if trainer is not None:
            self._slots, self._kept = trainer._engine.slots_and_kept()
            self._steps, self._epochs = trainer.steps, trainer.epochs
            trainer.network.values.take_back()
            self._trainer = None

    def at_rest(self) -> KeptRun:
        """The same run without a trainer, for a pickle; this one stays as it is."""
        twin = object.__new__(KeptRun)
        vars(twin).update(vars(self))
        if twin._trainer is not None:
            twin._slots, twin._kept = twin._trainer._engine.slots_and_kept()
            twin._steps, twin._epochs = twin._trainer.steps, twin._trainer.epochs
            twin._trainer = None
        return twin

    def serves(self, batch_rows: int) -> bool:
        """Whether its trainer is there and takes batches of so many rows."""
        return self._trainer is not None and batch_rows <= self._trainer.batch_size

    @property
    def trainer(self) -> Trainer:
        """Its trainer, which there is."""
        assert self._trainer is not None
        return self._trainer

    def taken_up(self, make: Callable[[], Trainer]) -> Trainer:
        """A new trainer that goes on where this run was."""
        self._rest()
        trainer = make()
        kind = trainer.plan.target_kind
        assert kind is not None
        trainer._engine.resume(kind, Progress(self._steps, self._epochs), self._slots, self._kept)
        return trainer
