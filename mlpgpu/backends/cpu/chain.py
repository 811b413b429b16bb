"""A plan's chain of operations on a piece of rows as one call of compiled loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ... import plan as ops
from ...plan import Plan
from .blas import BLAS
from .compiled import output, rows_product
from .loops import Call, address_of, joined, library

Values = Sequence[np.ndarray | None]  # the parameters or statistics of an operation


def is_chain(plan: Plan, operations: Sequence[ops.Operation]) -> bool:
    """Whether there are loops for these operations of a plan."""
    has_loops = plan.dtype == np.float32 and library() is not None and BLAS.products is not None
    return has_loops and all(isinstance(op, (ops.Dense, ops.Standardize, ops.Output)) for op in operations)


class Chain:
    """Operations on so many rows, bound to what they read and write but for inputs and results.

    Arguments:
        operations, values: in order, and the parameters or statistics of each.
        written: (rows, width), where each of them writes; the last two may be one array.
        inputs: (rows, n_in), like those that it will be called with.
    """

    def __init__(
        self,
        operations: Sequence[ops.Operation],
        values: Sequence[Values],
        written: Sequence[np.ndarray],
        inputs: np.ndarray,
    ) -> None:
        self._found = np.zeros(1, np.int64)
        calls: list[Call] = []
        x = inputs
        for op, given, y in zip(operations, values, written, strict=False):
            calls += self._calls(op, given, x, y)
            x = y
        self._result = Call("activate_identity", x, None, np.empty_like(x), *x.shape)
        calls.append(self._result)
        # Which arguments of each call are the inputs.  None of them is kept, nor are results.
        self._inputs = [(call, place) for call in calls for place in call.places(inputs)]
        for call, place in self._inputs:
            call.forget(place)
        self._result.forget(_RESULT)
        self._needs_blas = any(call.name.startswith(("product", "row_product")) for call in calls)
        (self._run,) = joined(calls)

    def _calls(self, op: ops.Operation, values: Values, x: np.ndarray, y: np.ndarray) -> list[Call]:
        first, second = values
        if isinstance(op, ops.Standardize):
            return [Call("standardize", x, first, second, y, *y.shape)]
        if isinstance(op, ops.Output):
            return [call for call in output(op, y, y, first, second) if isinstance(call, Call)]
        assert isinstance(op, ops.Dense) and first is not None
        product = rows_product(x, first, y)
        assert isinstance(product, Call)
        # Each input that is infinite or NaN makes a sum so, even where its weight is 0.
        calls = [product, Call("find_infinite", y, y.size, self._found)]
        if op.activation != "identity" or second is not None:
            calls.append(Call(f"activate_{op.activation}", y, second, y, *y.shape))
        return calls

    def run(self, x: np.ndarray, out: np.ndarray) -> bool:
        """Write the results for ``x`` (rows, n_in) to ``out``; returns whether x may not be finite."""
        address = address_of(x)
        for call, place in self._inputs:
            call.words[place] = address
        self._result.words[_RESULT] = address_of(out)
        self._found[0] = 0
        if self._needs_blas:
            with BLAS.held(1):
                self._run()
        else:
            self._run()
        return bool(self._found[0])


_RESULT = 2  # its place among activate's arguments
