"""Evaluations of a plan on a data set, batch by batch in the set's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ....datasets import Dataset
from ....plan import Plan
from ...evaluation import zero_sums
from .. import kernels
from ..exchange import BoundExchange, Exchange
from ..kernels.launches import MOST_RUN_STEPS, Launch
from ..runtime import Replay, Stream, capture, pinned
from ..select.inference import evaluation_tiers
from .binding import Binder, Put
from .data.feed import Feed
from .graphs import after_exchange
from .metrics import CLEARED, array_of, metric_bytes, metric_launches, rank_bytes, rank_launches
from .workspace import Workspace


@dataclass(frozen=True)
class _Bound:
    """The launches of an evaluation of one data set with some metrics, ready for the stream.

    Attributes:
        names: rows of SUMS, and ``predicts`` whether predictions are made, which a mean loss does not need.
        begin: what runs before the first batch, and ``end`` after the last one.
        batches: what runs for a batch, as a graph, by the rows that its launches are made for.
        fills: bytes of the arrays that are cleared before the first batch, by address.
        sums: of metrics by name, in page-locked memory, since to copy to other memory makes the host wait.
        exchanged: what ranks send each other inside those graphs: it keeps other cards' memory mapped.
    """

    data: Feed
    names: tuple[str, ...]
    predicts: bool
    begin: list[Put]
    end: list[Put]
    fills: dict[int, int]
    sums: dict[str, np.ndarray]
    batches: dict[int, Replay] = field(default_factory=dict)
    exchanged: list[BoundExchange] = field(default_factory=list)


class Evaluation:
    """Evaluates data sets.  The set that was evaluated last stays on the card.

    Arguments:
        workspace: has the plan's arrays and kernels, or gives them when they are first needed; its capacity is the
            rows of a batch.
        join: gives the exchange between ranks that have parts of the network, who then evaluate together.

    Attributes:
        data: that set.
    """

    def __init__(
        self, workspace: Workspace | Callable[[], Workspace], join: Callable[[], Exchange] | None = None
    ) -> None:
        self._given, self._join = workspace, join
        self.data: Feed | None = None
        self._bound: dict[tuple[tuple[str, ...], bool], _Bound] = {}  # by names, and by whether it predicts

    @cached_property
    def _workspace(self) -> Workspace:
        return self._given if isinstance(self._given, Workspace) else self._given()

    @cached_property
    def _exchange(self) -> Exchange | None:
        return None if self._join is None else self._join()

    def set_statistics(self, fitted: np.ndarray) -> None:
        """Statistics (C,), which lie on the card already, were loaded; a data set that is held is told."""
        if "_workspace" in vars(self):
            self._workspace.set_statistics(fitted)

    @property
    def _plan(self) -> Plan:
        return self._workspace.plan

    @property
    def _stream(self) -> Stream:
        return self._workspace.stream

    @property
    def _addresses(self) -> dict[str, int]:
        return self._workspace.arrays.addresses

    def evaluate(self, dataset: Dataset, names: Sequence[str]) -> dict[str, np.ndarray]:
        """See :meth:`Program.evaluate`."""
        loss = np.zeros(2)
        sums: dict[str, np.ndarray] = {}
        for batch, (rows, bound) in enumerate(self._sweep(dataset, names, predicts=bool(names))):
            count, is_last = batch % MOST_RUN_STEPS + 1, rows.stop == len(dataset)
            if is_last:
                sums = bound.sums
                for name, array in sums.items():
                    self._stream.download(array, self._addresses[array_of(name)])
            if is_last or count == MOST_RUN_STEPS:
                losses, _ = self._workspace.numbers.download_losses(count)
                self._wait()
                loss += losses.sum(axis=0)
        return {**{name: array.copy() for name, array in sums.items()}, "loss": loss}

    def predict(self, dataset: Dataset, *, logits: bool) -> np.ndarray:
        """See :meth:`Program.predict`."""
        result = np.empty((len(dataset), self._plan.n_out), np.float32)
        for rows, _ in self._sweep(dataset, (), predicts=True):
            source = self._addresses[self._plan.logits if logits else self._plan.output]
            self._stream.download(result[rows], source)
            self._wait()
        return result

    def hold(self, dataset: Dataset) -> Feed:
        """The data set on the card; it replaces another one that is there."""
        if self.data is None or self.data.dataset is not dataset:
            if self.data is not None:
                self.data.close()
            self._bound = {}
            self.data = None  # the old set makes room for the new one
            self.data = self._workspace.feed(dataset, self._plan.capacity)
        return self.data

    def close(self) -> None:
        """Wait for copies of rows, and free the data set and a workspace of its own."""
        data, self.data = self.data, None
        if data is not None:
            self._stream.synchronize()  # an evaluation that was broken off may write to page-locked memory yet
        self._bound = {}
        if data is not None:
            data.close()
        if not isinstance(self._given, Workspace) and "_workspace" in vars(self):
            self._workspace.close()

    def _sweep(self, dataset: Dataset, names: Sequence[str], *, predicts: bool) -> Iterator[tuple[slice, _Bound]]:
        """Evaluate a data set; yields the rows of each batch once its launches are on the stream, inside the device.

        The card keeps the losses of ``MOST_RUN_STEPS`` batches, and the sums of ``names`` over all batches.
        """
        with self._workspace.device:
            capacity, rows = self._plan.capacity, len(dataset)
            self._stream.synchronize()  # an evaluation that was broken off may have left work behind
            data = self.hold(dataset)
            data.begin_in_order()
            key = tuple(names), predicts
            if key not in self._bound:
                self._bound[key] = self._bind(data, *key)
            bound = self._bound[key]
            for address, size in bound.fills.items():
                self._stream.fill(address, size)
            for put in bound.begin:
                put(self._stream)
            for batch, start in enumerate(range(0, rows, capacity)):
                end = min(start + capacity, rows)
                replay = self._batch(bound, self._tier(end - start))
                data.reach(start)
                self._workspace.numbers.set_step(0, batch, capacity, rows, run=batch % MOST_RUN_STEPS)
                replay.launch(self._stream)
                if end == rows:
                    for put in bound.end:
                        put(self._stream)
                data.prepare()
                yield slice(start, end), bound

    def _bind(self, data: Feed, names: tuple[str, ...], predicts: bool) -> _Bound:
        """The launches of an evaluation, with their kernels and arrays."""
        binder = Binder(self._workspace, data, seed=0, rows=self._tier(min(len(data.dataset), self._plan.capacity)))
        after_last: list[Launch] = []
        fills: dict[int, int] = {}
        sums: dict[str, np.ndarray] = {}
        if names:
            sizes, of_set = metric_bytes(self._plan, names), rank_bytes(self._plan, names, len(data.dataset))
            self._workspace.take(sizes)
            data.arrays.allocate(of_set)
            shapes = {name: zero.shape for name, zero in zero_sums(self._plan, names).items()}
            sums = {name: pinned(self._workspace.device, shape, np.float64) for name, shape in shapes.items()}
            fills = {self._addresses[name]: size for name, size in sizes.items()}
            fills |= {data.arrays.addresses[name]: of_set[name] for name in of_set.keys() & CLEARED}
            assert self._plan.target_kind is not None
            _, textured = data.kind
            self._workspace.auxiliary.load(kernels.metric_entries(self._plan.target_kind, textured=textured))
            if of_set:
                self._workspace.auxiliary.load(kernels.rank_entries(textured=textured))
            after_last = rank_launches(self._plan, names, len(data.dataset))
        begin = [binder.bind(launch) for launch in binder.lowered.evaluation_begin]
        end = [binder.bind(launch) for launch in after_last]
        return _Bound(data, names, predicts, begin, end, fills, sums)

    def _bind_all(self, bound: _Bound, binder: Binder, launches: Sequence[Launch]) -> list[Put]:
        """Launches of a batch, with what ranks exchange before some of them."""
        puts = [binder.bind(launch) for launch in launches]
        if self._exchange is None:
            return puts
        exchanged = self._exchange.bind(binder.lowered.evaluation_collectives(), self._addresses)
        bound.exchanged.append(exchanged)
        return [
            put if launch.exchange is None else after_exchange(exchanged.bind(launch.exchange), put)
            for put, launch in zip(puts, launches, strict=True)
        ]

    def _wait(self) -> None:
        """Wait for what the stream was given.

        Raises:
            RankError: another rank has failed, or has not come within the time limit.
        """
        exchange = self._exchange
        if exchange is None:
            self._stream.synchronize()
            return
        with exchange.limited():
            try:
                exchange.wait(self._stream)
            except BaseException:
                exchange.abort(self._stream)
                raise

    def _tier(self, rows: int) -> int:
        """For how many rows the launches are made that take a batch of so many."""
        return next(tier for tier in evaluation_tiers(self._plan.capacity) if rows <= tier)

    def _batch(self, bound: _Bound, rows: int) -> Replay:
        """The launches for a batch of at most so many rows, captured at first need."""
        if rows not in bound.batches:
            binder = Binder(self._workspace, bound.data, seed=0, rows=rows)
            _, textured = bound.data.kind
            launches = binder.lowered.evaluation if bound.predicts else binder.lowered.loss_alone
            if bound.names:
                of_rows = self._plan.with_capacity(rows)
                launches = [*launches, *metric_launches(of_rows, bound.names, textured=textured)]
            puts = self._bind_all(bound, binder, launches)
            self._stream.synchronize()
            with capture(self._stream, f"an evaluation of up to {rows} rows") as graph:
                for put in puts:
                    put(self._stream)
            bound.batches[rows] = graph.instantiate()
            graph.close()
        return bound.batches[rows]
