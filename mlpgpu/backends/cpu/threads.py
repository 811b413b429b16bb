"""Host threads: how many a plan gets, and what runs on them.

The number follows a fixed rule and never a clock, because a BLAS with another number of threads adds
up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from ... import plan as ops
from ...plan import LocallyConnected, Plan
from ...plan.costs import CORES, passes_seconds, shard_seconds
from ..cores import available_cores
from .blas import BLAS
from .loops import has_loop, library
from .pool import POOL

FLOPS_PER_THREAD = 4_000_000  # of a step's largest product, for one more thread to be worth waking
# Of a step, by counts, for one more part of its phases.  What parts exchange by their caches took some 12 µs a step of
# networks of 25,000 parameters by 4 rows, where one part takes 19 to 22; a step of 75 µs by two parts took 107 by one.
SECONDS_PER_PART = 30e-6
UPDATE_SHARE = 0.25  # of the seconds that costs.py counts for an update, which NumPy makes in several passes

Bound = Callable[[], None]  # an operation, bound to views of arrays

_IN_PHASES = (
    *(ops.Gather, ops.Standardize, ops.Dense, ops.Dropout, ops.Output, ops.Reduce, ops.Norm, ops.Update),
    *(ops.ActivationBackward, ops.DenseBackward, ops.DropoutBackward),
)


def is_phased(plan: Plan) -> bool:
    """Whether threads share a plan's steps and evaluations by phases (``phases``), and BLAS has one thread."""
    if plan.ranks > 1 or plan.shards > 1 or plan.tensor is not None:
        return False
    if library(plan.dtype) is None or BLAS.products(plan.dtype) is None or len(plan.partials) > len(plan.gradient):
        return False
    return all(_has_loops(plan.dtype, op) for op in (*plan.training, *plan.evaluation))


def _has_loops(dtype: np.dtype, op: ops.Operation) -> bool:
    if isinstance(op, ops.Loss):
        return op.loss.form == "softmax_cross_entropy" or has_loop(dtype, f"loss_{op.loss.form}")
    return isinstance(op, _IN_PHASES)


def thread_count(plan: Plan) -> int:
    """Threads for a plan, by its arithmetic, or where BLAS has the threads by its largest product, and the cores."""
    if is_phased(plan):
        seconds = shard_seconds(plan, plan.capacity, 1, CORES)[1]
        if plan.training:
            seconds += UPDATE_SHARE * passes_seconds(plan, CORES)
        return max(1, min(available_cores(), int(seconds / SECONDS_PER_PART)))
    operations = plan.training or plan.evaluation
    rows = max(1, plan.capacity // plan.shards)
    largest = max((plan.flops(op, rows) // getattr(op, "products", 1) for op in operations), default=0)
    if plan.tensor is not None:
        return 1  # ranks are threads enough, and the bits of a part must not depend on who has it
    if plan.shards > 1:
        # Shards are threads of their own, each with a single-threaded BLAS.
        return min(plan.shards, available_cores()) if largest >= FLOPS_PER_THREAD else 1
    return max(1, min(available_cores(), largest // FLOPS_PER_THREAD))


def threads_of_bits(plan: Plan, count: int) -> int:
    """On how many of a plan's ``count`` threads its bits depend."""
    return count if plan.shards == 1 and plan.tensor is None else 1


class Threads:
    """The ``count`` threads of a plan.

    Where a plan has several shards there is a thread for each; of one shard threads share the phases, or BLAS has
    them.  BLAS computes no locally connected layer: threads of ours divide its rows or columns.
    """

    def __init__(self, plan: Plan, count: int) -> None:
        self._parts = count if is_phased(plan) else 1
        self._blas_threads = 1 if is_phased(plan) else threads_of_bits(plan, count)
        self._shard_threads = min(count, -(-plan.shards // plan.ranks))
        is_local = any(isinstance(op, LocallyConnected) for op in (*plan.training, *plan.evaluation))
        self._local_threads = self._blas_threads if is_local else 1

    @contextmanager
    def limits(self) -> Iterator[None]:
        """What a step runs under: BLAS has its threads, and NumPy reports no overflow, which shows in the loss."""
        with BLAS.held(self._blas_threads), np.errstate(all="ignore"):
            yield

    def let_others(self) -> None:
        """Between steps: let those compute that wait for BLAS with another number of threads."""
        BLAS.let_others(self._blas_threads)

    def run_shards(self, shards: list[list[Bound]]) -> None:
        """Call each shard's operations in order, the shards side by side."""
        _call_each(shards, self._shard_threads)

    @property
    def count(self) -> int:
        """How many of them there are."""
        return max(self._blas_threads, self._shard_threads, self._parts)

    @property
    def multiply_alone(self) -> bool:
        """Whether a product is one thread's, since BLAS has one."""
        return self._blas_threads == 1

    def call_beside(self, calls: Sequence[Bound]) -> None:
        """Call functions side by side."""
        _call_each([[call] for call in calls], self.count)

    def parts_of_array(self, rows: int, columns: int) -> list[tuple[slice, slice]]:
        """Each thread's part of a (rows, columns) array.

        Parts are ranges of whole rows, which a pass takes faster than pieces of rows, unless there are too few.
        """
        count = self._local_threads
        if rows >= count:
            return [(part, slice(0, columns)) for part in _ranges(rows, count)]
        return [(slice(0, rows), part) for part in _ranges(columns, min(count, columns))]

    def divided(self, bind: Callable[[slice, slice], Bound], rows: int, columns: int) -> Bound:
        """What ``bind(rows, columns)`` gives for each thread's part of a (rows, columns) array, as one function."""
        calls = [[bind(*part)] for part in self.parts_of_array(rows, columns)]
        return calls[0][0] if len(calls) == 1 else partial(_call_each, calls, self._local_threads)


def _call_each(lists: list[list[Bound]], threads: int) -> None:
    """Call the operations of each list in order, up to so many lists side by side."""
    if threads == 1 or len(lists) == 1:
        for operations in lists:
            _call(operations)
    else:
        POOL.run(len(lists), lambda place: _call(lists[place]), threads)


def _call(operations: list[Bound]) -> None:
    for call in operations:
        call()


def _ranges(length: int, count: int) -> list[slice]:
    """``count`` ranges that cover ``length``, as equal as can be."""
    return [slice(length * part // count, length * (part + 1) // count) for part in range(count)]
