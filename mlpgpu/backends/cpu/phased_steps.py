"""Steps and evaluations by phases: many steps as one call of compiled loops."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...plan import Gather
from ..base import StepLog
from ..inputs import input_standardize
from .bindings import bind
from .loops import Phases, address_of, helpers_of, run_steps, steps_of
from .phases import evaluation_phases, training_phases
from .workspace import Workspace

CALL_SECONDS = 4e-3  # about what a call takes of many steps: nobody who waits for a step's end waits much longer
MOST_STEPS = 4096  # of one call
BOUND_LIMIT = 8  # numbers of rows for which phases are kept


class PhasedSteps:
    """Steps and evaluations of a plan.

    Attributes:
        at_once: steps that a call should take, by what the last ones took.
    """

    def __init__(self, work: Workspace) -> None:
        self._work, self._parts = work, work.threads.count
        self._helpers = helpers_of(self._parts)
        self._steps, self._finished = steps_of(MOST_STEPS, work.dtype), np.zeros(1, np.int64)
        self._training: dict[int, Phases] = {}  # by rows
        self._evaluation: dict[int, tuple[Phases, np.ndarray]] = {}
        self.at_once = 1

    def train(
        self,
        first_step: int,
        batches: Sequence[slice],
        order: np.ndarray,
        storage: np.ndarray,
        rates: np.ndarray,
        log: StepLog,
    ) -> None:
        """Take the next steps, or the first of them alone, and tell ``log`` of them.

        Arguments:
            batches: of each step the part of ``order`` that it trains on, all but perhaps the last of one length.
            order, storage: (rows,) int64, an epoch's rows in order, in the data set and in its array of inputs.
            rates: (steps or more, rates of a step), in the plan's precision.
        """
        work, started = self._work, time.perf_counter()
        count = len(batches) if work.gathers else 1
        steps, first, last = self._steps[:count], batches[0], batches[count - 1]
        starts = first.start + np.arange(count) * (first.stop - first.start)
        steps["batch"] = address_of(order) + order.itemsize * starts
        steps["storage"] = address_of(storage) + storage.itemsize * starts
        steps["number"], steps["seed"] = first_step + np.arange(count), work.now["seed"]
        steps["rates"][:, : rates.shape[1]] = rates[:count]
        # Held here, as the second may take the place of the first among those that are kept.
        phases = self.training(first.stop - first.start), self.training(last.stop - last.start)
        _set_phases(steps, phases[0])
        _set_phases(steps[-1:], phases[1])
        if not work.gathers:
            work.feed.select(order[last], storage[last])
            self._gather()
        # An exception comes before the call or after it, where the steps are finished.
        self._finished[0] = 0
        log.put(self._finished_sums)
        self._call(count)
        log.finish()
        fitting = count * CALL_SECONDS / max(time.perf_counter() - started, 1e-9)
        self.at_once = max(1, min(int(fitting), 2 * self.at_once, MOST_STEPS))

    def _finished_sums(self) -> np.ndarray:
        """The loss and the weight of each step that the last call has finished, (steps, 2)."""
        steps = self._steps[: int(self._finished[0])]
        return np.stack([steps["loss"], steps["weight"]], axis=1)

    def _call(self, count: int) -> None:
        run_steps(self._work.dtype, self._steps, count, self._parts, self._helpers, self._finished)

    def evaluate(self) -> np.ndarray:
        """Evaluate the rows that the feed has selected; returns their loss and weight, (2,)."""
        work, feed = self._work, self._work.feed
        rows, step = len(feed.batch), self._steps[:1]
        found = self._evaluation.get(rows)
        if found is None:
            found = self._evaluation[rows] = evaluation_phases(work, rows)
            _forget_first(self._evaluation)
        phases, sums = found
        step["batch"], step["storage"] = address_of(feed.batch), address_of(feed.storage)
        _set_phases(step, phases)
        if not work.gathers:
            self._gather()
        self._call(1)
        return np.add.reduce(sums)

    def clear(self) -> None:
        """Forget what is bound."""
        self._training.clear()
        self._evaluation.clear()

    def _gather(self) -> None:
        """Have NumPy gather the rows that the feed has selected, and standardize inputs that have more digits."""
        work, rows = self._work, slice(0, len(self._work.feed.batch))
        for op in work.plan.evaluation:
            is_of_inputs = work.feed.wide is not None and op == input_standardize(work.plan)
            if isinstance(op, Gather) or is_of_inputs:
                for call in bind(work, [op], rows, 0):
                    call()

    def training(self, rows: int) -> Phases:
        """The phases of a step of so many rows."""
        phases = self._training.get(rows)
        if phases is None:
            phases = self._training[rows] = training_phases(self._work, rows)
            _forget_first(self._training)
        return phases


def _set_phases(steps: np.ndarray, phases: Phases) -> None:
    steps["phases"], steps["phase_count"] = phases.address, phases.count


def _forget_first(bound: dict[int, Any]) -> None:
    if len(bound) > BOUND_LIMIT:
        bound.pop(next(iter(bound)))
