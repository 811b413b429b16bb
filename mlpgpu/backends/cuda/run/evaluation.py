"""Evaluations of a plan on a data set, batch by batch in the set's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....datasets import Dataset
from ...evaluation import zero_sums
from .. import kernels
from ..kernels.launches import MOST_RUN_STEPS, Launch
from .binding import Binder
from .feed import Feed
from .metrics import CLEARED, array_of, metric_bytes, metric_launches, rank_bytes, rank_launches
from .workspace import Workspace


class Evaluation:
    """Evaluates data sets.  The set that was evaluated last stays on the card.

    Attributes:
        data: that set.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._plan = workspace, workspace.plan
        self._stream, self._addresses = workspace.stream, workspace.arrays.addresses
        self.data: Feed | None = None

    def evaluate(self, dataset: Dataset, names: Sequence[str]) -> dict[str, np.ndarray]:
        """As :meth:`Program.evaluate`."""
        sums, loss = zero_sums(self._plan, names), np.zeros(2)
        for batch, rows in enumerate(self._sweep(dataset, names)):
            count, is_last = batch % MOST_RUN_STEPS + 1, rows.stop == len(dataset)
            if is_last:
                for name, array in sums.items():
                    self._stream.download(array, self._addresses[array_of(name)])
            if is_last or count == MOST_RUN_STEPS:
                losses = self._workspace.numbers.download_losses(count)
                self._stream.synchronize()
                loss += losses.sum(axis=0)
        return {**sums, "loss": loss}

    def predict(self, dataset: Dataset, *, logits: bool) -> np.ndarray:
        """As :meth:`Program.predict`."""
        result = np.empty((len(dataset), self._plan.n_out), np.float32)
        for rows in self._sweep(dataset):
            source = self._addresses[self._plan.logits if logits else self._plan.output]
            self._stream.download(result[rows], source)
            self._stream.synchronize()
        return result

    def hold(self, dataset: Dataset) -> Feed:
        """The data set on the card; it replaces another one that is there."""
        if self.data is None or self.data.dataset is not dataset:
            if self.data is not None:
                self.data.close()
            self.data = None  # the old set makes room for the new one
            self.data = self._workspace.feed(dataset, self._plan.capacity)
        return self.data

    def _sweep(self, dataset: Dataset, names: Sequence[str] = ()) -> Iterator[slice]:
        """Evaluate a data set; yields the rows of each batch once its launches are on the stream, inside the device.

        The card keeps the losses of ``MOST_RUN_STEPS`` batches, and the sums of ``names`` over all batches.
        """
        capacity, rows = self._plan.capacity, len(dataset)
        with self._workspace.device:
            self._stream.synchronize()  # an evaluation that was broken off may have left work behind
            data = self.hold(dataset)
            data.begin(np.arange(rows))
            binder = Binder(self._workspace, data, seed=0)
            lowered = binder.lowered
            of_metrics, after_last = self._begin_metrics(data, names)
            launches = [binder.bind(launch) for launch in [*lowered.evaluation, *of_metrics]]
            for launch in lowered.evaluation_begin:
                binder.bind(launch)(self._stream)
            for batch, start in enumerate(range(0, rows, capacity)):
                data.reach(start)
                self._workspace.numbers.set_step(0, batch, capacity, rows, run=batch % MOST_RUN_STEPS)
                for put in launches:
                    put(self._stream)
                end = min(start + capacity, rows)
                if end == rows:
                    for launch in after_last:
                        binder.bind(launch)(self._stream)
                data.prepare()
                yield slice(start, end)

    def _begin_metrics(self, data: Feed, names: Sequence[str]) -> tuple[list[Launch], list[Launch]]:
        """The launches of metrics, for each batch and after the last one; loads their kernels, clears their sums."""
        if not names:
            return [], []
        sizes, of_set = metric_bytes(self._plan, names), rank_bytes(self._plan, names, len(data.dataset))
        self._workspace.take(sizes)
        data.arrays.allocate(of_set)
        for name, size in sizes.items():
            self._stream.fill(self._addresses[name], size)
        for name in of_set.keys() & CLEARED:
            self._stream.fill(data.arrays.addresses[name], of_set[name])
        assert self._plan.target_kind is not None
        _, textured = data.kind
        self._workspace.auxiliary.load(kernels.metric_entries(self._plan.target_kind, textured=textured))
        if of_set:
            self._workspace.auxiliary.load(kernels.rank_entries(textured=textured))
        of_batch = metric_launches(self._plan, names, textured=textured)
        return of_batch, rank_launches(self._plan, names, len(data.dataset))
