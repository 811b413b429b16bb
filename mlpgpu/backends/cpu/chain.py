"""A plan's chain of operations on a piece of rows as one call of compiled loops, whose parts threads may share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ... import plan as ops
from ...plan import Plan
from .blas import BLAS
from .compiled import output, rows_product
from .copied_rows import CopiedRows
from .loops import Call, Parts, Phases, address_of, has_long_vectors, helpers_of, joined, library, run_steps, steps_of
from .phases import ROW_BLOCK, equal_parts, is_along_k, only_calls, row_parts
from .products import spares_blas

# Of so many rows at most parts have rows of a layer's weight, where :func:`~.phases.is_along_k` says so, whose sums are
# added up; of more they have rows of x, if these fill tiles of products.  64 rows of 784-1024-1024-10 by four parts
# take 1,525 µs along k and 1,283 by rows, of 749-632-632-632-32 875 and 783, of 30-2048-2048-5 3,047 and 3,236; 24 rows
# of the first 528 and 690, 100 rows 2,358 and 2,508.
ALONG_K_ROWS = 48

Values = Sequence[np.ndarray | None]  # the parameters or statistics of an operation


def is_chain(plan: Plan, operations: Sequence[ops.Operation]) -> bool:
    """Whether there are loops for these operations of a plan."""
    has_loops = library(plan.dtype) is not None and BLAS.products(plan.dtype) is not None
    return has_loops and all(isinstance(op, (ops.Dense, ops.Standardize, ops.Output)) for op in operations)


class Chain:
    """Operations on so many rows, bound to what they read and write but for inputs and results.

    Arguments:
        operations, values: in order, and the parameters or statistics of each.
        written: (rows, width), where each of them writes; the last two may be one array.  Of several parts no others
            share memory, since parts do not wait for each other after each operation.
        inputs: (rows, n_in), like those that it will be called with; where it copies them, where to.
        parts: into which it is cut, for threads to share them; the bits follow from their number.
        copied: what copies the inputs of a call, if they are not read where they lie.

    Attributes:
        nbytes: of what several parts write, which nobody else does.
    """

    def __init__(
        self,
        operations: Sequence[ops.Operation],
        values: Sequence[Values],
        written: Sequence[np.ndarray],
        inputs: np.ndarray,
        parts: int = 1,
        copied: CopiedRows | None = None,
    ) -> None:
        self._parts, self._copied = parts, copied
        self._dtype, self._rows = inputs.dtype, row_parts(len(inputs), parts)
        self._found = np.zeros(len(self._rows), np.int64)
        # Which arguments of calls lie in the inputs, or in the results, and how many bytes from their beginning.
        self._inputs: list[tuple[Call, int, int]] = []
        self._results: list[tuple[Call, int, int]] = []
        self._given = inputs
        self.nbytes = 0 if parts == 1 else sum(y.nbytes for y in written)
        self._phases = [self._empty()]
        layers = zip(operations, values, strict=True)
        weights = [of_op[0].shape for op, of_op in layers if isinstance(op, ops.Dense) and of_op[0] is not None]
        is_fast = has_long_vectors(inputs.dtype)
        self._spares_blas = parts == 1 and spares_blas(len(inputs), weights, is_fast=is_fast)
        x = inputs
        if copied is not None:
            for part, rows in enumerate(self._rows):
                self._phases[-1][part] += copied.calls(rows, x[rows])
        for op, of_op, y in zip(operations, values, written, strict=False):
            self._bind(op, of_op, x, y)
            x = y
        for part, rows in enumerate(self._rows):
            result = Call(self._dtype, "activate_identity", x[rows], None, x[rows], rows.stop - rows.start, x.shape[1])
            self._add(part, x[rows], [result])
            self._results.append((result, _RESULT, rows.start * x.strides[0]))
        for call, place, _ in (*self._inputs, *self._results):
            call.forget(place)  # whoever calls keeps it
        del self._given
        calls = [call for phase in self._phases for of_part in phase for call in of_part]
        self._needs_blas = any(call.name.startswith(("product", "vector_product")) for call in calls)
        if parts == 1:
            (self._run,) = joined(calls)
        else:
            self._bound = Phases(self._phases)
            step, finished = steps_of(1, self._dtype), np.zeros(1, np.int64)
            step["phases"], step["phase_count"] = self._bound.address, self._bound.count
            self._run = partial(run_steps, self._dtype, step, 1, parts, helpers_of(parts), finished)

    def _empty(self) -> Parts:
        return [[] for _ in range(self._parts)]

    def _add(self, part: int, x: np.ndarray, calls: Sequence[Call]) -> None:
        """Add calls that read ``x`` to a part of the last phase."""
        self._phases[-1][part] += calls
        offset = address_of(x) - address_of(self._given)
        if self._copied is None and np.may_share_memory(x, self._given):
            self._inputs += [(call, place, offset) for call in calls for place in call.places(x)]

    def _bind(self, op: ops.Operation, values: Values, x: np.ndarray, y: np.ndarray) -> None:
        first, second = values
        if isinstance(op, ops.Dense):
            assert first is not None
            fills_tiles = len(x) > ALONG_K_ROWS and self._rows[0].stop % ROW_BLOCK == 0
            if not fills_tiles and is_along_k(len(x), first.shape, self._parts):
                self._bind_along_k(op, first, second, x, y)
                return
        for part, rows in enumerate(self._rows):
            x_rows, y_rows = x[rows], y[rows]
            if isinstance(op, ops.Standardize):
                calls = [Call(self._dtype, "standardize", x_rows, first, second, y_rows, *y_rows.shape)]
            elif isinstance(op, ops.Output):
                calls = only_calls(output(op, y_rows, y_rows, first, second))
            else:
                assert isinstance(op, ops.Dense) and first is not None
                product = rows_product(x_rows, first, y_rows, spares_blas=self._spares_blas)
                calls = [*only_calls([product]), *self._finish(op, second, y_rows, part)]
            self._add(part, x_rows, calls)

    def _bind_along_k(
        self, op: ops.Dense, weight: np.ndarray, bias: np.ndarray | None, x: np.ndarray, y: np.ndarray
    ) -> None:
        """A layer of which each part has some rows of the weight."""
        shares = np.empty((self._parts, *y.shape), self._dtype)
        self.nbytes += shares.nbytes
        if any(self._phases[-1]):
            self._phases.append(self._empty())
        for part, (columns, share) in enumerate(zip(equal_parts(len(weight), self._parts), shares, strict=True)):
            x_columns = x[:, columns]
            self._add(part, x_columns, only_calls([rows_product(x_columns, weight[columns], share)]))
        self._phases.append(self._empty())
        for part, rows in enumerate(self._rows):
            add = Call(self._dtype, "add_parts", shares[0, rows], y.size, self._parts, y[rows], y[rows].size)
            self._add(part, shares, [add, *self._finish(op, bias, y[rows], part)])

    def _finish(self, op: ops.Dense, bias: np.ndarray | None, y: np.ndarray, part: int) -> list[Call]:
        """What follows a product."""
        # Each input that is infinite or NaN makes a sum so, even where its weight is 0.
        calls = [Call(self._dtype, "find_infinite", y, y.size, self._found[part:])]
        if op.activation != "identity" or bias is not None:
            calls.append(Call(self._dtype, f"activate_{op.activation}", y, bias, y, *y.shape))
        return calls

    def run(self, x: np.ndarray, out: np.ndarray, rows: np.ndarray | None = None) -> bool:
        """Write the results for ``x`` (rows, n_in) to ``out``; returns whether x may not be finite.

        Where it copies them, for all rows of ``x`` or those at ``rows``, in any form of :mod:`~.copied_rows`.
        """
        address, result = address_of(x), address_of(out)
        if self._copied is not None:
            self._copied.point_at(x, rows)
        for call, place, offset in self._inputs:
            call.words[place] = address + offset
        for call, place, offset in self._results:
            call.words[place] = result + offset
        self._found.fill(0)
        if self._needs_blas:
            with BLAS.held(1):
                self._run()
        else:
            self._run()
        return any(self._found.tolist())


_RESULT = 2  # its place among activate's arguments
