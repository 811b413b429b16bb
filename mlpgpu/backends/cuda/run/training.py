"""Training on one data set: which steps run on which rows, and what they are given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ....datasets import Dataset
from ...base import Sampling, StepLog
from ...constants import hyper_parameters
from ..exchange import Exchange
from ..kernels.launches import ABORTED, EXCHANGED_SUMS, MOST_RUN_STEPS, Launch
from ..runtime import Event, ExchangedSums
from .binding import Binder, Put
from .data.orders import Orders
from .graphs import ShardStreams, StepGraphs
from .persistent import BoundPersistentSteps, PersistentSteps
from .state import DeviceState
from .steps import TURNS
from .workspace import Workspace


class Training:
    """A training set on a card, and steps on it; made inside ``with device:``.

    Arguments:
        persistent: what runs steps inside one kernel, or None where they run launch by launch.
        exchange: what ranks send each other, where several train together: all of them make this object, and call
            :meth:`run`, together.

    Attributes:
        data: the set.
        binder: binds launches to it.
        graphs: the steps launch by launch.
    """

    def __init__(
        self,
        workspace: Workspace,
        state: DeviceState,
        streams: ShardStreams,
        persistent: PersistentSteps | None,
        dataset: Dataset,
        sampling: Sampling,
        exchange: Exchange | None = None,
    ) -> None:
        assert workspace.plan.optimizer is not None
        self._workspace, self._state, self.sampling = workspace, state, sampling
        self._stream, self._optimizer = workspace.stream, workspace.plan.optimizer
        has_parts = workspace.plan.tensor is not None
        of_shards = exchange if not has_parts else None  # parts of a network all compute all rows
        self.data = workspace.feed(dataset, sampling.batch_size, of_shards)
        reaches_cards = has_parts and exchange is not None and exchange.reaches_cards
        self.binder = binder = Binder(workspace, self.data, sampling.seed, reaches_cards=reaches_cards)
        self._exchange, addresses = exchange, workspace.arrays.addresses
        bound = exchange.bind(binder.lowered.collectives(), addresses) if exchange is not None else None
        self._sums: ExchangedSums | None = None  # holds the memory by which a launch exchanges sums of parts
        if exchange is not None and binder.lowered.part_sums is not None:
            self._sums = exchange.exchange_sums(binder.lowered.part_sums)
            binder.tell({EXCHANGED_SUMS: self._sums.table, ABORTED: self._sums.aborted})
        self.graphs = StepGraphs(binder, streams, addresses, bound)
        self._persistent = BoundPersistentSteps(persistent, binder) if persistent is not None else None
        self._run_begin: list[Put] = []
        self._prologue: list[Put] = []
        if persistent is None:
            self._run_begin = [binder.bind(launch) for launch in binder.lowered.run_begin]
            self._prologue = [binder.bind(launch) for launch in binder.lowered.prologue]

        def bind(launches: Sequence[Launch], epoch: int) -> list[Put]:
            workspace.auxiliary.load(launch.entry for launch in launches)
            return [binder.bind(launch, epoch=epoch) for launch in launches]

        self._orders = Orders(
            workspace.device, self._stream, self.data, sampling, bind, workspace.auxiliary.are_compiled
        )
        binder.set_constant("hyper", hyper_parameters(self._optimizer))
        self._stream.synchronize()

    def run(self, first_step: int, rates: np.ndarray, log: StepLog) -> np.ndarray:
        """See :meth:`Program.run`."""
        sampling, numbers = self.sampling, self._workspace.numbers
        with np.errstate(over="ignore"):  # a rate that is too high leads to an error of ours, by its first step
            table = self._optimizer.table(first_step, rates).astype(np.float32)
        with self._workspace.device:
            self._state.end_prefetch()
            if self._state.were_set:
                for put in self._run_begin:
                    put(self._stream)
                self._state.were_set = False
            given = 0
            while given < len(rates):
                epoch, batch = sampling.locate(first_step + given)
                self._orders.begin(epoch)
                end = self.data.reach(batch * sampling.batch_size)
                of_piece = min(sampling.steps_per_epoch, -(-end // sampling.batch_size)) - batch
                count = min(len(rates) - given, of_piece, MOST_RUN_STEPS)
                numbers.take_turn()
                self.begin_at(first_step + given, batch)
                self.binder.set_constant("schedule", numbers.staged_rates(table[given : given + count]))
                before_last = self.data.reads_to_finish() if given + count == len(rates) else None
                log.begin()
                with self._together():
                    self.put(count, before_last)
                    losses, downloaded = numbers.download_losses(count)
                log.put(functools.partial(self._wait, losses, downloaded))
                self.data.prepare()
                if batch + count == sampling.steps_per_epoch:
                    self._orders.prepare(epoch + 1)
                given += count
                # The card goes on with these steps while the host puts those of the next epoch behind them.
                while log.under_way >= TURNS:
                    log.finish_first()
            log.finish()
        return log.sums

    def _wait(self, losses: np.ndarray, downloaded: Event) -> np.ndarray:
        """Wait for steps that were put on the streams, after which their sums are in ``losses``.

        Raises:
            RankError: another rank has failed, or has not come within the time limit.
        """
        with self._workspace.device:
            if self._exchange is None:
                downloaded.synchronize()
            else:
                with self._together():
                    self._exchange.wait(self._stream, downloaded)
        return losses

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """While steps are put or waited for: those that end by an error, as other ranks do not come, are broken off.

        Whatever waits for the card later, be it to free memory, would else wait as long as a rank hangs.
        """
        if self._exchange is None:
            yield
            return
        with self._exchange.limited():
            try:
                yield
            except BaseException:
                if self._exchange.abort(self._stream):
                    self.graphs.close()  # NCCL waits for graphs that it is part of
                raise

    def begin_at(self, step: int, batch: int) -> None:
        """Steps from here on begin with this number, at this batch of the epoch."""
        self._workspace.numbers.set_step(step, batch, self.sampling.batch_size, len(self.data.dataset))

    def put(self, count: int, before_last: Callable[[], None] | None = None) -> None:
        """Put so many steps on the streams, in graphs or inside one kernel.

        ``before_last`` is called before the last graph.
        """
        if self._persistent is not None:
            assert before_last is None  # one rank alone reads no other card
            self._persistent.put(count)
            return
        for put in self._prologue:  # the step before has done it, but without the rows that have come since
            put(self._stream)
        self.graphs.launch(count, before_last)

    def close(self) -> None:
        """Wait for copies of rows, and end the threads that make them."""
        self.data.close()
