"""Plans on the host: a program's state, its steps, and its sweeps over data sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...datasets import Dataset
from ...errors import room_for
from ...initializers import initial_values
from ...locks import GroupLock
from ...plan import Plan, additions, shards_of
from ...ranks import rank
from ..base import Histogram, Program, Sampling, State, StepLog, count_values, scaled
from ..evaluation import MetricSums
from ..parts import all_ranks
from .bindings import bind
from .phased_steps import PhasedSteps
from .threads import Bound, Threads, is_phased
from .updates import Updates
from .workspace import Feed, Workspace

BOUND_LIMIT = 8  # numbers of rows for which bound operations are kept


class CpuProgram(Program):
    """A plan, its arrays and its threads.

    A lock is held while a step or a batch of an evaluation is computed, so other threads find finished ones.

    Each rank of the plan has such a program; only what all of them call talks to the others.
    """

    is_readable_while_running = True

    def __init__(self, plan: Plan, threads: int) -> None:
        self._plan, self._lock = plan, GroupLock()
        self._thread_count = threads
        self._threads = Threads(plan, threads)
        self._work = Workspace(plan, self._threads, rank() if plan.ranks > 1 else 0)
        self._snapshot: np.ndarray | None = None  # (P,)
        self._bound: dict[tuple[int, bool], list[list[Bound]]] = {}  # each shard's, by rows and whether to train
        self._updates = Updates.of(self._work)
        self._phased = PhasedSteps(self._work) if is_phased(plan) else None
        # How shards' sums of loss and weight are added up.
        self._additions = additions(range(plan.shards), [range(shard, shard + 1) for shard in range(plan.shards)])
        self._training: tuple[Feed, Sampling] | None = None
        # The current epoch: its number, its rows in order, and the same rows in the array of inputs, (rows,) each.
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    # --- state ---

    def load(self, state: State, *, snapshot: bool = False) -> None:
        if snapshot:
            self._snapshot = state.parameters[0].astype(self._work.dtype)
            return
        with self._lock.held():
            np.copyto(self._work.parameters, state.parameters[0])
            np.copyto(self._work.slots, state.slots[:, 0, self._work.slice.parameters])
            self._work.set_statistics(state.statistics[0])

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        with self._lock.held(), room_for("the layers' parameters", "narrower layers have fewer"):
            for p in self._plan.parameters:
                values = initial_values(p.initializer, p.shape, p.fans, seed=seed, layer=p.layer, purpose=p.purpose)
                self._work.arrays[p.name][...] = values.astype(np.float32)
            self._work.slots.fill(0.0)
            self._work.set_statistics(statistics[0])

    def read(self, *, snapshot: bool = False) -> State:
        work = self._work
        parameters = self._snapshot if snapshot and self._snapshot is not None else work.parameters
        slots = np.zeros((len(work.slots), 1, self._plan.parameter_count), work.dtype)
        with self._lock.held():
            slots[:, 0, work.slice.parameters] = work.slots
            return State(parameters[np.newaxis].copy(), slots, work.statistics[np.newaxis].copy())

    def copy_parameters(self) -> tuple[np.ndarray, np.ndarray]:
        """The parameters (P,) after the last finished step, and the statistics (C,) as they were fitted, in float64."""
        with self._lock.held():
            return self._work.parameters.copy(), self._work.fitted

    def snapshot(self) -> None:
        if self._snapshot is None:
            self._snapshot = np.empty_like(self._work.parameters)
        with self._lock.held():
            np.copyto(self._snapshot, self._work.parameters)

    def restore(self) -> None:
        if self._snapshot is not None:
            with self._lock.held():
                np.copyto(self._work.parameters, self._snapshot)

    def is_finite(self) -> bool:
        with self._lock.held():
            return bool(np.isfinite(self._work.parameters).all())

    def histograms(self, bins: int) -> dict[str, Histogram]:
        with self._lock.held():
            return {p.name: count_values(self._work.arrays[p.name], bins) for p in self._plan.parameters}

    def sample(self, rows: int, step: int, bins: int) -> dict[str, Histogram]:
        assert self._training is not None
        work, (feed, sampling) = self._work, self._training
        if self._plan.ranks > 1:  # a rank asks for itself
            alone = CpuProgram(self._plan.alone(), self._thread_count)
            alone.load(self.read())
            alone.attach(feed.dataset, sampling)
            return alone.sample(rows, step, bins)
        rows = min(rows, sampling.rows)
        batch = np.arange(rows)
        with self._lock.held(), self._threads.limits():
            work.feed, work.step = feed, step
            feed.select(batch, feed.dataset.storage_rows(batch))
            self._threads.run_shards(self._operations(rows, training=True))
            found = {name: count_values(work.view(y, slice(rows)), bins) for name, y in self._plan.outputs().items()}
            self._updates.reduce()
            weight = self._batch_sums()[1]
            for segment in self._plan.gradient:
                counted = count_values(self._updates.gradient[segment.offset : segment.end], bins)
                found[f"{segment.name}.gradient"] = scaled(counted, 1.0 / weight if weight > 0.0 else 1.0)
        return found

    # --- running ---

    def attach(self, dataset: Dataset, sampling: Sampling) -> None:
        self._training = Feed.of(dataset, self._plan), sampling
        self._epoch = None
        self._work.seed = sampling.seed

    def run(self, first_step: int, rates: np.ndarray, log: StepLog | None = None) -> np.ndarray:
        assert self._training is not None and self._plan.optimizer is not None
        work, (feed, sampling) = self._work, self._training
        with np.errstate(over="ignore"):  # a rate that is too high leads to an error of ours, by its first step
            table = self._plan.optimizer.table(first_step, rates)
        log = log or StepLog(len(table))
        with self._lock.held(), self._threads.limits():
            if self._phased is not None:
                self._run_phases(self._phased, first_step, table.astype(work.dtype), log)
                return log.sums
            for index, row in enumerate(table.tolist()):
                if index:  # those who wait do so for one step at most
                    self._threads.let_others()
                    self._lock.let_others()
                work.feed, work.row, work.step = feed, row, first_step + index
                rows = self._select(feed, sampling, work.step)
                self._threads.run_shards(self._operations(rows, training=True))
                self._updates.reduce()
                log.sums[index] = _, weight = self._batch_sums()
                work.inverse_weight = work.gradient_factor = 1.0 / weight if weight > 0.0 else 0.0
                log.begin()
                self._updates.move()
                log.end(index + 1)
        return log.sums

    def _run_phases(self, phased: PhasedSteps, first_step: int, rates: np.ndarray, log: StepLog) -> None:
        """Take steps, several in one call, all of one epoch."""
        assert self._training is not None
        self._work.feed, sampling = self._training
        while (done := log.finished) < len(rates):
            if done:
                self._threads.let_others()
                self._lock.let_others()
            epoch, first = sampling.locate(first_step + done)
            order, storage = self._rows_of_epoch(epoch)
            end = min(sampling.steps_per_epoch, first + len(rates) - done, first + phased.at_once)
            batches = [sampling.batch(batch) for batch in range(first, end)]
            phased.train(first_step + done, batches, order, storage, rates[done:], log)

    def _batch_sums(self) -> tuple[float, float]:
        """The loss and the weight of the batch, those of all shards added up."""
        sums = self._work.shard_sums
        for first, second in self._additions:
            sums[first] += sums[second]
        return float(sums[0, 0]), float(sums[0, 1])

    def _select(self, feed: Feed, sampling: Sampling, step: int) -> int:
        """Point the gather at a step's rows and return their number."""
        epoch, batch = sampling.locate(step)
        order, storage = self._rows_of_epoch(epoch)
        rows = sampling.batch(batch)
        feed.select(order[rows], storage[rows])
        return len(feed.batch)

    def _rows_of_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's rows in order, and the same rows in the array of inputs, (rows,) int64 each."""
        assert self._training is not None
        feed, sampling = self._training
        if self._epoch is None or self._epoch[0] != epoch:
            order = sampling.order(epoch)
            self._epoch = epoch, order, feed.dataset.storage_rows(order)
        return self._epoch[1], self._epoch[2]

    def evaluate(self, dataset: Dataset, names: Sequence[str], *, shared: bool = False) -> dict[str, np.ndarray]:
        sums = MetricSums(dataset, self._plan, names, self._work.dtype)
        loss = np.zeros(2)
        if shared and self._plan.ranks > 1:
            losses, predictions = self._evaluate_shared(dataset, has_metrics=bool(names))
            for batch, rows in enumerate(self._batches(len(dataset))):
                loss += losses[batch]
                sums.add(rows, predictions[rows])
            return {**sums.sums, "loss": loss}
        for rows in self._sweep(dataset):
            count = rows.stop - rows.start
            loss += self._work.shard_sums[0]
            sums.add(rows, self._work.view(self._plan.output, slice(count)))
        return {**sums.sums, "loss": loss}

    def _evaluate_shared(self, dataset: Dataset, *, has_metrics: bool) -> tuple[np.ndarray, np.ndarray]:
        """Each batch's sums of loss and weight (batches, 2), and predictions (rows, n_out), of all ranks together.

        Without metrics nobody needs the predictions of others.
        """
        batches = self._batches(len(dataset))
        losses, width = np.empty((len(batches), 2)), self._plan.n_out
        predictions = np.empty((len(dataset), width), self._work.dtype)
        dealt = [shards_of(rank, self._plan.ranks, len(batches)) for rank in range(self._plan.ranks)]
        own = dealt[self._work.rank]
        for batch, rows in zip(own, self._sweep(dataset, own), strict=True):
            count = rows.stop - rows.start
            losses[batch] = self._work.shard_sums[0]
            predictions[rows] = self._work.view(self._plan.output, slice(count))
        all_ranks().all_gather(losses.reshape(-1), [slice(2 * each.start, 2 * each.stop) for each in dealt])
        if has_metrics:
            starts = [rows.start for rows in batches] + [len(dataset)]
            parts = [slice(starts[each.start] * width, starts[each.stop] * width) for each in dealt]
            all_ranks().all_gather(predictions.reshape(-1), parts)
        return losses, predictions

    def predict(self, dataset: Dataset, *, logits: bool = False) -> np.ndarray:
        result = np.empty((len(dataset), self._plan.n_out), self._work.dtype)
        source = self._work.arrays[self._plan.logits if logits else self._plan.output]
        for rows in self._sweep(dataset):
            result[rows] = source[: rows.stop - rows.start]
        return result

    def close(self) -> None:
        with self._lock.held():
            self._bound.clear()
            if self._phased is not None:
                self._phased.clear()

    def _batches(self, rows: int) -> list[slice]:
        """The rows of each batch of an evaluation."""
        return [slice(start, min(start + self._plan.capacity, rows)) for start in range(0, rows, self._plan.capacity)]

    def _sweep(self, dataset: Dataset, batches: range | None = None) -> Iterator[slice]:
        """Evaluate a data set batch by batch, in order, and stop after each for its results to be taken.

        Of the batches only those numbered so, if they are given.
        """
        feed = Feed.of(dataset, self._plan)
        every = self._batches(len(dataset))
        for rows in every if batches is None else every[batches.start : batches.stop]:
            batch = np.arange(rows.start, rows.stop)
            feed.select(batch, dataset.storage_rows(batch))
            with self._lock.held():
                self._work.feed = feed
                with self._threads.limits():
                    if self._phased is not None:
                        self._work.shard_sums[0] = self._phased.evaluate()
                    else:
                        self._threads.run_shards(self._operations(len(batch), training=False))
                yield rows

    def _operations(self, rows: int, *, training: bool) -> list[list[Bound]]:
        """What each shard calls for a batch of ``rows``; an evaluation is one shard."""
        key = rows, training
        if key not in self._bound:
            if len(self._bound) >= BOUND_LIMIT:
                self._bound.pop(next(iter(self._bound)))
            operations = self._plan.training if training else self._plan.evaluation
            parts = self._plan.shard_rows(rows) if training else (slice(0, rows),)
            shards = self._work.shards if training else range(1)
            self._bound[key] = [bind(self._work, operations, parts[shard], shard) for shard in shards]
        return self._bound[key]
