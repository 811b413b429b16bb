"""What operations are bound to: a plan's arrays, and the numbers that change from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets import Dataset
from ...plan import Gather, Plan, shards_of
from ..base import target_array
from ..inputs import InputScaling, has_more_digits
from ..native import COPY, described
from .loops import library, steps_of
from .threads import Threads

FEED_WORDS = len(COPY) + 5


@dataclass
class Feed:
    """A data set as the gather reads it, and the batch's rows."""

    dataset: Dataset
    dtype: np.dtype  # of the plan's numbers
    target: np.ndarray | None  # (rows,) class numbers or (rows, n_out)
    weight: np.ndarray | None  # (rows,)
    staging: np.ndarray | None  # (capacity, n_in) of the inputs' type, where that is not the plan's
    wide: np.ndarray | None  # (capacity, n_in) float64, where inputs are standardized before they are rounded
    has_columns: bool  # whether some columns of the inputs are gathered
    batch: np.ndarray  # (B,) the batch's rows in the data set
    storage: np.ndarray  # (B,) the same rows in the array of inputs

    @classmethod
    def of(cls, dataset: Dataset, plan: Plan) -> Feed:
        """The feed of a data set for a plan; no rows are selected yet."""
        target = None if plan.target_kind is None else target_array(dataset, plan, plan.dtype)
        weight = None if dataset.weight is None else dataset.weight.astype(plan.dtype)
        inputs = dataset.storage_x.dtype
        takes_columns = any(isinstance(op, Gather) and op.columns for op in plan.evaluation)
        staging = None if inputs == plan.dtype or takes_columns else np.empty((plan.capacity, plan.n_in), inputs)
        wide = np.empty((plan.capacity, plan.n_in)) if has_more_digits(inputs, plan) else None
        nothing = np.empty(0, np.int64)
        return cls(dataset, plan.dtype, target, weight, staging, wide, takes_columns, nothing, nothing)

    def select(self, batch: np.ndarray, storage: np.ndarray) -> None:
        """Set the batch's rows, (B,) each."""
        self.batch, self.storage = batch, storage

    def described(self, scaling: InputScaling | None) -> np.ndarray:
        """The struct Feed of ``steps.h``, FEED_WORDS int64; its first one is 0 where NumPy has to gather the batch.

        ``scaling`` is what standardizes inputs that have more digits than float32.
        """
        fields = None if self.has_columns else described(self.dataset.storage_x, self.dtype)
        fields, target = fields or {}, self.target
        is_standardized = self.wide is not None and scaling is not None
        if is_standardized and fields:
            assert scaling is not None
            fields |= {"mean": scaling.mean.ctypes.data, "scale": scaling.scale.ctypes.data}
        words = np.array([*(fields.get(name, 0) for name in COPY), 0, 0, 0, 0, is_standardized], np.int64)
        if self.staging is not None and self.dataset.scale is not None:
            words[-5:].view(np.float64)[0] = self.dataset.scale
        if target is not None:
            words[-4:-2] = target.ctypes.data, target.shape[1] if target.ndim == 2 else 0
        if self.weight is not None:
            words[-2] = self.weight.ctypes.data
        return words


class Workspace:
    """The NumPy arrays of a plan, allocated at capacity, and what a step reads beside them.

    Attributes:
        parameters (P,), slots (K, P), statistics (C,): the state; of slots, those of ``slice`` alone.
        rank: of this process among those that run the plan.
        shards: those that it computes.
        slice: the part of the flat arrays that it moves.
        fitted: the statistics as they came, (C,) float64, and ``input_scaling`` those of a first ``Standardize`` layer.
        partials: (own shards, Q), their partial gradients.
        shard_sums: (S, 2) float64, the loss and the weight of each shard, summed over its rows; of those of other ranks
            once they are exchanged.  Of an evaluation's batch they are those of shard 0.
        arrays: the buffers of rows, and each parameter and statistic as a view of its flat array, by name.
        ones: (capacity,).
        is_compiled: whether compiled loops compute what they can.
        masks: (capacity, width) of each dropout layer, by its number and first unit, from forward to backward pass.
        feed: the data set and the batch's rows; set before anything runs.
        described_feed: the same as compiled loops read it, a struct Feed of ``steps.h``.
        now: (1,) of :func:`~.loops.steps_of`, the current step as compiled loops read it.
        inverse_weight: 1 / the batch's summed weight.
        gradient_factor: the same, times the factor of a clipped norm.
        row: the step's row of the optimizer's table.
    """

    def __init__(self, plan: Plan, threads: Threads, rank: int = 0) -> None:
        self.plan, self.threads, self.dtype = plan, threads, plan.dtype
        self.is_compiled = library(plan.dtype) is not None
        self.rank = rank
        self.shards, self.slice = shards_of(rank, plan.ranks, plan.shards), plan.slices[rank]
        slots = len(plan.optimizer.slots) if plan.optimizer else 0
        self.parameters = np.zeros(plan.parameter_count, self.dtype)
        self.slots = np.zeros((slots, self.slice.parameters.stop - self.slice.parameters.start), self.dtype)
        self.statistics = np.zeros(plan.statistic_count, self.dtype)
        self.fitted = np.zeros(plan.statistic_count)
        self.input_scaling: InputScaling | None = None
        self.partials = np.zeros((len(self.shards), plan.partials[-1].end if plan.partials else 0), self.dtype)
        self.shard_sums = np.empty((plan.shards, 2))
        self.arrays: dict[str, np.ndarray] = {}
        for buffer in plan.buffers.values():
            if buffer.axes[1] == "row":
                dtype = np.intp if buffer.holds == "index" else self.dtype
                self.arrays[buffer.name] = np.zeros(buffer.shape[1:], dtype)
        for flat, segments in ((self.parameters, plan.parameters), (self.statistics, plan.statistics)):
            for segment in segments:
                self.arrays[segment.name] = flat[segment.offset : segment.end].reshape(segment.shape)
        widest = max((array.shape[1] for array in self.arrays.values() if array.ndim == 2), default=1)
        self._scratch = np.empty(plan.capacity * widest, self.dtype)
        self.ones = np.ones(plan.capacity, self.dtype)
        self.masks: dict[tuple[int, int], np.ndarray] = {}
        self._feed: Feed | None = None
        self.described_feed = np.zeros(FEED_WORDS, np.int64)
        self.now = steps_of(1, self.dtype)
        self.inverse_weight = self.gradient_factor = 0.0
        self.row: Sequence[float] = ()

    @property
    def step(self) -> int:
        """The number of the current step."""
        return int(self.now["number"][0])

    @step.setter
    def step(self, step: int) -> None:
        self.now["number"] = step

    @property
    def seed(self) -> int:
        """Of the random numbers that dropouts draw."""
        return int(self.now["seed"][0])

    @seed.setter
    def seed(self, seed: int) -> None:
        self.now["seed"] = seed

    @property
    def feed(self) -> Feed:
        assert self._feed is not None
        return self._feed

    @feed.setter
    def feed(self, feed: Feed) -> None:
        if feed is not self._feed:
            self._feed = feed
            self._describe_feed()

    @property
    def gathers(self) -> bool:
        """Whether compiled loops can gather rows of the feed."""
        return bool(self.described_feed[0])

    def _describe_feed(self) -> None:
        if self._feed is not None:
            self.described_feed[...] = self._feed.described(self.input_scaling)

    def set_statistics(self, fitted: np.ndarray) -> None:
        """Take statistics (C,)."""
        self.fitted = fitted.astype(np.float64)
        self.input_scaling = InputScaling.of(self.plan, self.fitted)
        np.copyto(self.statistics, self.fitted)
        self._describe_feed()

    def view(self, name: str, rows: slice) -> np.ndarray:
        """These rows of a buffer."""
        return self.arrays[name][rows]

    def partial(self, name: str, shard: int) -> np.ndarray:
        """A shard's partial gradient, in the shape of its parameter."""
        segment = next(partial for partial in self.plan.partials if partial.name == name)
        return self.partials[shard - self.shards.start, segment.offset : segment.end].reshape(segment.shape)

    def uses(self, parameter: str, shard: int) -> list[np.ndarray]:
        """A shard's partial gradients of a parameter, in the order in which they are added up."""
        names = [partial.name for partial in self.plan.partials if partial.parameter == parameter]
        return [self.partial(name, shard) for name in names]

    def scratch_like(self, array: np.ndarray, rows: slice) -> np.ndarray:
        """Scratch of the shape of ``array``, a view of ``rows``; shards get parts that do not overlap."""
        start = rows.start * (len(self._scratch) // self.plan.capacity)
        return self._scratch[start : start + array.size].reshape(array.shape)
