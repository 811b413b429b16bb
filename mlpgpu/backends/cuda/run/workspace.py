"""What the parts of a program share: the plan, the card, its arrays, its kernels, and the numbers of steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....datasets import Dataset
from ....plan import Plan
from ...constants import loss_numbers
from ...inputs import InputScaling, has_more_digits
from ..exchange import Exchange
from ..kernels import Entry
from ..kernels.launches import Lowered
from ..lower.lowering import lower, lower_evaluation
from ..persistent.kernel import PersistentKernel
from ..runtime import Device, LoadedKernels, Stream, pack
from .arrays import Arrays, check_room
from .data.feed import Feed
from .maps import TensorMaps
from .primitives import grid_over
from .steps import StepNumbers
from .trace import Trace

CONSTANTS = "hyper", "schedule"  # the constant variables of math/optimizers.cuh


@dataclass(frozen=True)
class PlanKernels:
    """A plan lowered for data of one kind, and its kernels.

    ``constants`` are the addresses of each constant variable, one in each module that reads it.
    """

    lowered: Lowered
    loaded: LoadedKernels
    constants: Mapping[str, list[int]]


class Workspace:
    """A plan's arrays and kernels on a card; used inside ``with device:``.

    Arguments:
        persistent: the kernel inside which the plan trains, or why it trains launch by launch.
        memory_share: how much of the card's memory a data set may take.
        shared: addresses of arrays that another program owns.
        trace: is told what runs when.
        evaluates: whether it has the plan's evaluation beside its training step.
        rank: of this process among those of the plan.

    Attributes:
        stream: the stream that computes.
        auxiliary: kernels that belong to no plan, loaded when they are first asked for.
        maps: addresses of tensor maps on the card.
        numbers: numbers of steps, in page-locked memory for copies to the card and back.
        fitted: the statistics as they were fitted, (C,) float64.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        persistent: PersistentKernel | str,
        *,
        memory_share: float,
        shared: Mapping[str, int] | None,
        trace: Trace | None,
        evaluates: bool = True,
        rank: int = 0,
    ) -> None:
        self._evaluates, self.rank = evaluates, rank
        self.plan, self.device, self.persistent, self.trace = plan, device, persistent, trace
        self._memory_share = memory_share
        self.stream = Stream(device, "0")
        self.arrays = Arrays(device, shared)
        self.auxiliary = LoadedKernels(device)
        self._maps = TensorMaps(device, self.stream, self.arrays)
        self.maps = self._maps.addresses
        # By the kind of the data, by rows, and by whether kernels reach other ranks' cards.
        self._compiled: dict[tuple[str, bool, int, bool], PlanKernels] = {}
        self.fitted = np.zeros(plan.statistic_count)
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        self.take(self._lower("float32").bytes)
        if isinstance(persistent, PersistentKernel):
            self.take(persistent.layout.bytes)
            self._tell(persistent.words)
        self.numbers = StepNumbers(device, self.stream, self.arrays)

    def take(self, sizes: Mapping[str, int]) -> None:
        """Allocate arrays of zeros of so many bytes, those of them that are not there yet.

        Raises:
            BackendError: the card has not the room; the message says what it has room for.
        """
        if missing := self.arrays.missing(sizes):
            check_room(self.plan, self.device, missing)
        for name, size in self.arrays.allocate(sizes).items():
            self.stream.fill(self.arrays.addresses[name], size)

    def feed(self, dataset: Dataset, batch_rows: int, exchange: Exchange | None = None) -> Feed:
        """The feed of a data set, in batches of so many rows; with ``exchange`` of ranks that train on it together."""
        room, scaling = int(self._memory_share * self.device.total_bytes), None
        if has_more_digits(dataset.storage_x.dtype, self.plan):
            scaling = InputScaling.of(self.plan, self.fitted)
        feed = Feed(
            self.device, self.stream, self.plan, dataset, batch_rows=batch_rows, room=room, scaling=scaling,
            trace=self.trace, exchange=exchange, loaded=self.auxiliary,
        )  # fmt: skip
        feed.follow(self.fitted)
        self._feeds.add(feed)
        return feed

    def set_statistics(self, fitted: np.ndarray) -> None:
        """Statistics (C,) were loaded; sets whose rows are standardized on the host are told what is left to do."""
        self.fitted = fitted.astype(np.float64)
        for feed in self._feeds:
            feed.follow(self.fitted)

    def close(self) -> None:
        """Wait for what the stream was given, and free the arrays."""
        self.stream.synchronize()
        self._maps.close()
        self.arrays.close()

    # --- the plan's kernels ---

    def kernels_for(self, data: Feed, rows: int | None = None, *, reaches_cards: bool = False) -> PlanKernels:
        """The plan's launches on data of this kind, with their kernels, made when first asked for.

        With ``rows`` they are those of an evaluation of at most so many rows, on the plan's arrays.  With
        ``reaches_cards`` kernels reach the memory of other ranks' cards.
        """
        key = *data.kind, rows or self.plan.capacity, reaches_cards
        if key not in self._compiled:
            self._compiled[key] = self._compile(*key)
        return self._compiled[key]

    def _lower(self, source: str, *, textured: bool = True, reaches_cards: bool = False) -> Lowered:
        device = self.device
        lowered = lower(
            self.plan, multiprocessors=device.multiprocessors, source=source, textured=textured, arch=device.arch,
            rank=self.rank, reaches_cards=reaches_cards,
        )  # fmt: skip
        return lowered if self._evaluates else lowered.without_evaluation()

    def _lower_tier(self, source: str, textured: bool, rows: int) -> Lowered:
        """The launches of an evaluation of at most so many rows."""
        device = self.device
        return lower_evaluation(
            self.plan, rows, multiprocessors=device.multiprocessors, source=source, textured=textured,
            arch=device.arch,
        )  # fmt: skip

    def _tell(self, words: Mapping[str, Sequence[int]]) -> None:
        """Upload whole numbers that kernels read, by the names of their arrays."""
        for name, numbers in words.items():
            self.stream.upload(self.arrays.addresses[name], np.array(numbers, np.int32))

    def _compile(self, source: str, textured: bool, rows: int, reaches_cards: bool) -> PlanKernels:
        if is_whole := rows == self.plan.capacity:
            lowered = self._lower(source, textured=textured, reaches_cards=reaches_cards)
        else:
            lowered = self._lower_tier(source, textured, rows)
        self.take(lowered.bytes)  # arrays that the float32 inputs assumed so far do not need
        self._tell(lowered.words)
        self._maps.make(lowered.maps())
        entries = lowered.entries()
        if is_whole and isinstance(self.persistent, PersistentKernel):
            entries = self.persistent.entries(lowered, source, textured=textured)
        loaded = LoadedKernels(self.device, entries)
        if self.plan.loss is not None:
            for address in loaded.constants("loss_numbers"):
                self.stream.upload(address, loss_numbers(self.plan.loss))
        return PlanKernels(lowered, loaded, {name: loaded.constants(name) for name in CONSTANTS})

    # --- kernels of no plan ---

    def launch_over(self, entry: Entry, elements: int, values: Sequence[float]) -> None:
        """Launch a kernel of no plan on a grid for so many elements."""
        self.auxiliary.load([entry])
        self.auxiliary[entry].launch(self.stream, grid_over(elements), pack(entry, values))
