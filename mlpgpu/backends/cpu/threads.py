"""Host threads: how many a plan gets, and what runs on them.

The number follows a fixed rule and never a clock, because a BLAS with another number of threads adds
up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from ...plan import LocallyConnected, Plan
from ..cores import available_cores
from .blas import BLAS
from .pool import POOL

FLOPS_PER_THREAD = 4_000_000  # of a step's largest product, for one more thread to be worth waking

Bound = Callable[[], None]  # an operation, bound to views of arrays


def thread_count(plan: Plan) -> int:
    """Threads for a plan, by its largest product and the cores."""
    operations = plan.training or plan.evaluation
    rows = max(1, plan.capacity // plan.shards)
    largest = max((plan.flops(op, rows) // getattr(op, "products", 1) for op in operations), default=0)
    if plan.tensor is not None:
        return 1  # ranks are threads enough, and the bits of a part must not depend on who has it
    if plan.shards > 1:
        # Shards are threads of their own, each with a single-threaded BLAS.
        return min(plan.shards, available_cores()) if largest >= FLOPS_PER_THREAD else 1
    return max(1, min(available_cores(), largest // FLOPS_PER_THREAD))


def blas_threads(plan: Plan, count: int) -> int:
    """How many of a plan's ``count`` threads BLAS has, which the bits of products depend on."""
    return count if plan.shards == 1 and plan.tensor is None else 1


class Threads:
    """The ``count`` threads of a plan: BLAS's where the plan has one shard, else a thread for each shard.

    BLAS computes no locally connected layer.  With one shard, threads of ours divide its rows or columns.
    """

    def __init__(self, plan: Plan, count: int) -> None:
        self._blas_threads = blas_threads(plan, count)
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
        return max(self._blas_threads, self._shard_threads)

    def call_beside(self, calls: Sequence[Bound]) -> None:
        """Call functions side by side."""
        _call_each([[call] for call in calls], self.count)

    def divided(self, bind: Callable[[slice, slice], Bound], rows: int, columns: int) -> Bound:
        """What ``bind(rows, columns)`` gives for each thread's part of a (rows, columns) array, to be called at once.

        Parts are ranges of whole rows, which a pass takes faster than pieces of rows, unless there are too few.
        """
        count = self._local_threads
        if rows >= count:
            parts = [(part, slice(0, columns)) for part in _ranges(rows, count)]
        else:
            parts = [(slice(0, rows), part) for part in _ranges(columns, min(count, columns))]
        calls = [[bind(*part)] for part in parts]
        return calls[0][0] if len(calls) == 1 else partial(_call_each, calls, count)


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
