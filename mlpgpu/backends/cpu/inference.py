"""Predictions on the host: a plan's chain of operations, computed for pieces of rows that stay in cache.

One thread computes a piece from its inputs to its outputs, with one thread of BLAS, in arrays that are used again.  How
rows are cut into pieces follows from their number and the plan alone, so the same rows give the same bits on any number
of cores, whatever else runs beside them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isfinite
from typing import Any

import numpy as np

from ... import plan as ops
from ...activations import ACTIVATIONS
from ...errors import room_for
from ...initializers import initial_values
from ...losses import apply_output
from ...plan import Plan
from ..base import Inference, Program, State
from ..cores import available_cores
from ..inputs import InputScaling, has_more_digits, input_standardize
from .blas import BLAS
from .chain import Chain, Values, is_chain
from .copied_rows import CopiedRows, can_be_copied, kind_of
from .pool import POOL
from .program import CpuProgram
from .tensor_program import TensorProgram

# What cuts a call into pieces.  One-threaded products (SkylakeX, k = 784 and 1,024, n = 128 and 1,024) reach 24 to 52
# GFLOP/s by 16 rows, 50 to 86 by 64, 84 to 90 by 250 and up to 98 by 1,000, since BLAS copies the weights each time.
PIECE_FLOPS = 1 << 24  # at least, by more than one piece: about 0.2 ms, many times what waking a thread takes
LEAST_PIECE_ROWS = 16
FEW_PIECE_ROWS = 192
MANY_ROWS, MANY_PIECE_ROWS = 8192, 512  # of a call so long that larger pieces still reach all cores
# Without compiled loops threads share the columns of layers that are at least so wide, rather than rows, below so many:
# by 32 rows of 784-1024-1024-10 that takes no longer in all than one thread does, where halves of the rows take 1.4
# times as long.
COLUMNS_BELOW_ROWS, WIDE = 384, 512
# Threads share a call of compiled loops below so many rows, or so many operations, by as many parts as its operations
# ask for; reading the weights counts as much as multiplying so many rows.  On two cores of 784-1024-1024-10 by 2, 4 and
# 8 parts 32 rows take 639, 693 and 670 µs, 100 rows 2,122, 2,542 and 2,962, where NumPy by columns took 3,317; of
# 749-632-632-632-32 128 rows 1,875, 2,123 and 2,653, and 3,327.  From the limit on pieces of rows take as long.
SHARED_ROWS, SHARED_FLOPS, READING_ROWS = 384, 1 << 28, 3
PARTS_FROM = (4, 1 << 25), (2, 1 << 22)
KEPT_CHAINS, KEPT_BYTES = 8, 1 << 25  # numbers of rows, and bytes that their calls write, of more than one number
# The widest array of a call that is not cut has so many bytes at most, of a piece so many that the second-level cache
# keeps it from loop to loop.
CALL_BYTES, PIECE_BYTES = 1 << 22, 1 << 20

Compute = Callable[[Values, np.ndarray, np.ndarray, np.ndarray], bool]
ComputeColumns = Callable[[Values, np.ndarray, np.ndarray, np.ndarray, slice], bool]
Steps = Sequence[tuple[Compute, Values]]


def _refuse_columns(values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray, columns: slice) -> bool:
    raise NotImplementedError("only weighted layers are computed by columns")


@dataclass(frozen=True)
class Stage:
    """An operation of the chain: ``compute(values, x, y, scratch)`` writes (B, width) to ``y``.

    Each element of x that is infinite or NaN makes a sum of a weighted layer so, even where its weight is 0.  So these
    sums, which are fewer, are looked at in place of the inputs: ``compute`` returns whether x may not be finite.

    Attributes:
        names: of what it reads beside x.
        is_in_place: whether ``y`` is ``x``.
        compute_columns: ``compute_columns(values, x, y, scratch, columns)`` writes these columns of y to ``y``; of
            weighted layers alone.
    """

    names: tuple[str | None, ...]
    width: int
    compute: Compute
    is_in_place: bool = False
    compute_columns: ComputeColumns = _refuse_columns


class Scratch:
    """Arrays for one piece at a time: its inputs as the plan takes them, and what stages write."""

    def __init__(self, plan: Plan, widths: Sequence[int], capacity: int) -> None:
        self._widths = widths
        self._dtype, self._n_in, self._capacity = plan.dtype, plan.n_in, capacity
        size = capacity * max(widths)
        # Each stage reads what the one before wrote, so two arrays serve all.
        self._written = np.empty(size, plan.dtype), np.empty(size, plan.dtype)
        self._scratch = np.empty(size, plan.dtype)
        self._inputs: np.ndarray | None = None
        self._gathered: np.ndarray | None = None
        self._views: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._chains: dict[tuple[Hashable, ...], Chain] = {}
        self._chained: Loaded | None = None  # what the chains read

    def views(self, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each stage where it writes a piece of ``rows``, and its scratch."""
        views = self._views.get(rows)
        if views is None:
            if len(self._views) >= KEPT_CHAINS:
                self._views.clear()
            views = self._views[rows] = [
                (_rows_of(self._written[place % 2], rows, width), _rows_of(self._scratch, rows, width))
                for place, width in enumerate(self._widths)
            ]
        return views

    def chain(
        self,
        operations: Sequence[ops.Operation],
        loaded: Loaded,
        part: slice,
        last: int,
        x: np.ndarray,
        parts: int,
        kind: Hashable = None,
        copied: Callable[[], CopiedRows] | None = None,
    ) -> Chain:
        """What computes ``part`` of the operations on rows like ``x``; those from ``last`` on write to one array.

        Threads share it by so many ``parts``.  Where it copies inputs to ``x`` first, ``copied`` makes what copies
        those of a ``kind``.
        """
        if self._chained is not loaded:
            self._chains.clear()
            self._chained = loaded
        key = len(x), part.start, part.stop, parts, kind
        chain = self._chains.get(key)
        if chain is None:
            if parts == 1:
                written = [y for y, _ in self.views(len(x))]
            else:
                written = [np.empty((len(x), width), self._dtype) for width in self._widths]
            written[last:] = [written[last]] * (len(written) - last)
            copies = None if copied is None else copied()
            chain = Chain(operations[part], loaded.values[part], written[part], x, parts, copies)
            kept = sum(each.nbytes for each in (*self._chains.values(), chain))
            if len(self._chains) >= KEPT_CHAINS or kept > KEPT_BYTES:
                self._chains.clear()
            self._chains[key] = chain
        return chain

    def inputs(self, rows: int) -> np.ndarray:
        """(rows, n_in) in the plan's precision, for inputs that come as something else."""
        if self._inputs is None:
            self._inputs = np.empty((self._capacity, self._n_in), self._dtype)
        return self._inputs[:rows]

    def gathered(self, rows: int, dtype: np.dtype) -> np.ndarray:
        """(rows, n_in) of ``dtype``, for inputs whose rows are chosen one by one."""
        if self._gathered is None or self._gathered.dtype != dtype:
            self._gathered = np.empty((self._capacity, self._n_in), dtype)
        return self._gathered[:rows]


def _are_finite(x: np.ndarray) -> bool:
    return bool(np.isfinite(x).all())


def _rows_of(flat: np.ndarray, rows: int, width: int) -> np.ndarray:
    return flat[: rows * width].reshape(rows, width)


@dataclass(frozen=True, eq=False)
class Loaded:
    """The parameters that calls use, all of one step.

    Attributes:
        values: of each operation.
        scaling: of inputs that are standardized before they are rounded.
        steps: what predictions call, and what logits do.
        steps_of_digits: the same on such inputs; empty if there are none.
    """

    values: Sequence[Values]
    scaling: InputScaling | None
    steps: tuple[Steps, Steps]
    steps_of_digits: tuple[Steps, Steps]


def _pieces(rows: int, of_piece: int) -> list[slice]:
    return [slice(start, min(start + of_piece, rows)) for start in range(0, rows, of_piece)]


def _part_of(
    part: slice, x: np.ndarray, out: np.ndarray, rows: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Inputs, results and chosen rows of a part of a call."""
    return (x[part], out[part], None) if rows is None else (x, out[part], rows[part])


@lru_cache(maxsize=64)
def parts_of_call(rows: int, row_flops: int) -> int:
    """Into how many parts a call of so many rows is cut, which its bits follow from."""
    flops = (rows + READING_ROWS) * row_flops
    return next((parts for parts, least in PARTS_FROM if flops >= least), 1)


class CpuInference(Inference):
    """A plan's evaluation on the host."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._operations = [op for op in plan.evaluation if not isinstance(op, ops.Gather)]
        # Whether compiled loops compute it.
        self._is_chain = is_chain(plan, self._operations)
        stages = [_STAGES[type(op)](plan, op) for op in plan.evaluation if not isinstance(op, ops.Gather)]
        self._stages = stages
        self._computes = [stage.compute for stage in stages]
        self._names = [stage.names for stage in stages]
        self._widths = [stage.width for stage in stages]
        self._last = max(place for place, stage in enumerate(stages) if not stage.is_in_place)  # writes the result
        self._dtype = plan.dtype
        row_bytes = plan.dtype.itemsize * max(plan.n_in, *self._widths)
        self._capacity = max(1, min(plan.capacity, CALL_BYTES // row_bytes))
        self._most_of_piece = max(1, min(self._capacity, PIECE_BYTES // row_bytes))
        self._flops = [plan.flops(op, 1) for op in plan.evaluation if not isinstance(op, ops.Gather)]
        self._row_flops = max(1, sum(self._flops))
        # Of a row, the most of a layer whose columns threads may share.
        self._wide_flops = max((f for f, n in zip(self._flops, self._widths, strict=True) if n >= WIDE), default=0)
        self._standardizes = input_standardize(plan) is not None
        self._threads = available_cores()
        self._free: deque[Scratch] = deque()  # of calls that have ended
        self._loaded = Loaded([], None, ([], []), ([], []))

    # --- parameters ---

    def load(self, state: State) -> None:
        dtype = self._plan.dtype
        self._set(state.parameters[0].astype(dtype, copy=False), state.statistics[0])

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        with room_for("the layers' parameters", "narrower layers have fewer"):
            parameters = np.empty(self._plan.parameter_count, self._plan.dtype)
            for p in self._plan.parameters:
                values = initial_values(p.initializer, p.shape, p.fans, seed=seed, layer=p.layer, purpose=p.purpose)
                parameters[p.offset : p.end] = values.ravel().astype(np.float32)
        self._set(parameters, statistics[0])

    def load_from(self, program: Program) -> bool:
        if not isinstance(program, CpuProgram) or isinstance(program, TensorProgram):  # which has a part of them
            return False
        self._set(*program.copy_parameters())
        return True

    def _set(self, parameters: np.ndarray, statistics: np.ndarray) -> None:
        """Use these flat arrays from the next call on; whoever computes by others keeps them until it has done."""
        arrays: dict[str | None, np.ndarray | None] = {None: None}
        rounded = statistics.astype(self._plan.dtype)
        for flat, segments in ((parameters, self._plan.parameters), (rounded, self._plan.statistics)):
            for segment in segments:
                arrays[segment.name] = flat[segment.offset : segment.end].reshape(segment.shape)
        values = [tuple(arrays[name] for name in names) for names in self._names]
        steps = [*zip(self._computes, values, strict=True)]
        scaling = InputScaling.of(self._plan, statistics.astype(np.float64))
        of_digits = [] if scaling is None else [(_standardize_in_float64(scaling), ()), *steps[1:]]
        self._loaded = Loaded(values, scaling, (steps, steps[:-1]), (of_digits, of_digits[:-1]))

    # --- calls ---

    def run(
        self,
        x: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
        scale: float | None = None,
        logits: bool = False,
    ) -> bool:
        is_rounded = not self._standardizes or not has_more_digits(x.dtype, self._plan)
        loaded, count = self._loaded, len(out)
        is_shared = count < SHARED_ROWS or count * self._row_flops < SHARED_FLOPS
        if self._is_chain and is_shared:
            pieces = -(-count // self._capacity)
            shared = parts_of_call(-(-count // max(1, pieces)), self._row_flops)
            if pieces <= 1:
                return self._compute_chain(loaded, x, out, rows, scale, shared, is_rounded=is_rounded, logits=logits)
            # One after another, each of which threads share.
            options: dict[str, Any] = {"scale": scale, "is_rounded": is_rounded, "logits": logits}
            of_pieces = [_part_of(part, x, out, rows) for part in _pieces(count, -(-count // pieces))]
            return all([self._compute_chain(loaded, *piece, parts=shared, **options) for piece in of_pieces])
        steps = (loaded.steps if is_rounded else loaded.steps_of_digits)[logits]
        piece_rows = self._rows_of_pieces(count)
        with np.errstate(all="ignore"):
            if count * self._wide_flops >= PIECE_FLOPS and count < COLUMNS_BELOW_ROWS and count <= self._capacity:
                return self._compute_by_columns(steps, x, out, rows, scale, is_rounded=is_rounded)
            compute_piece: Callable[..., bool]
            if self._is_chain:
                compute_piece = partial(self._compute_chain, loaded, scale=scale, is_rounded=is_rounded, logits=logits)
            else:
                compute_piece = partial(self._compute, steps, scale=scale, is_rounded=is_rounded)
            if count <= piece_rows:
                return compute_piece(x, out, rows)
            parts = _pieces(count, piece_rows)
            are_finite = [False] * len(parts)

            def compute(piece: int) -> None:
                are_finite[piece] = compute_piece(*_part_of(parts[piece], x, out, rows))

            POOL.run(len(parts), compute, self._threads)
            return all(are_finite)

    def _rows_of_pieces(self, rows: int) -> int:
        """How many rows at a time a call of ``rows`` is computed by."""
        pieces = 1
        if rows > self._capacity or rows * self._row_flops >= 2 * PIECE_FLOPS:
            least = MANY_PIECE_ROWS if rows >= MANY_ROWS else FEW_PIECE_ROWS
            bound = min(max(rows // least, rows // LEAST_PIECE_ROWS and 2), rows * self._row_flops // PIECE_FLOPS)
            while 2 * pieces <= bound:  # powers of two, which cores share evenly
                pieces *= 2
        if pieces == 1 and rows <= self._capacity:
            return rows
        return min(self._most_of_piece, -(-rows // pieces))

    def _compute_chain(
        self,
        loaded: Loaded,
        x: np.ndarray,
        out: np.ndarray,
        rows: np.ndarray | None,
        scale: float | None,
        parts: int = 1,
        *,
        is_rounded: bool,
        logits: bool,
    ) -> bool:
        """As :meth:`_compute`, by compiled loops, of which threads may share so many parts."""
        scratch, count = self._take_scratch(), len(self._operations)
        part = slice(0 if is_rounded else 1, count - logits)  # the last operation is the output's function
        chain_of = partial(scratch.chain, self._operations, loaded, part, self._last)
        try:
            if rows is None and is_rounded and x.dtype == self._dtype and x.flags.carray:
                return not chain_of(x, parts).run(x, out) or _are_finite(x)
            ready = scratch.inputs(len(out)) if is_rounded else scratch.views(len(out))[0][0]
            if can_be_copied(x, rows, self._dtype):
                scaling = None if is_rounded else loaded.scaling
                copied = partial(CopiedRows, x, self._dtype, scale, scaling)
                is_suspect = chain_of(ready, parts, (kind_of(x), scale, rows is None), copied).run(x, out, rows)
                return not is_suspect or _are_finite(ready if is_rounded else x if rows is None else x[rows])
            inputs = self._inputs(scratch, x, rows, scale, is_rounded=is_rounded)
            if is_rounded:
                ready = inputs
            else:
                assert loaded.scaling is not None
                with np.errstate(all="ignore"):
                    loaded.scaling.standardize(inputs, np.empty(inputs.shape), ready)
            return not chain_of(ready, parts).run(ready, out) or _are_finite(inputs)
        finally:
            self._free.append(scratch)

    def _compute(
        self,
        steps: Steps,
        x: np.ndarray,
        out: np.ndarray,
        rows: np.ndarray | None,
        scale: float | None,
        *,
        is_rounded: bool,
    ) -> bool:
        """Compute a piece, whose rows are all of ``x`` or ``rows`` of it; returns whether its inputs are finite.

        ``is_rounded`` says whether the steps take them in the plan's precision, and not as they are.
        """
        scratch = self._take_scratch()
        BLAS.acquire(1)
        try:
            inputs = y = self._inputs(scratch, x, rows, scale, is_rounded=is_rounded)
            is_finite, last, count = True, self._last, len(out)
            for place, ((compute, values), (written, spare)) in enumerate(
                zip(steps, scratch.views(count), strict=False)
            ):
                if place >= last:
                    written = out
                if compute(values, y, written, spare):
                    is_finite = is_finite and _are_finite(inputs)
                y = written
        finally:
            BLAS.release()
            self._free.append(scratch)
        return is_finite

    def _compute_by_columns(
        self,
        steps: Steps,
        x: np.ndarray,
        out: np.ndarray,
        rows: np.ndarray | None,
        scale: float | None,
        *,
        is_rounded: bool,
    ) -> bool:
        """As :meth:`_compute`, for few rows of a wide network: threads share the columns of each large layer."""
        scratch = self._take_scratch()
        try:
            inputs = y = self._inputs(scratch, x, rows, scale, is_rounded=is_rounded)
            is_finite, count = True, len(out)
            for place, ((compute, values), (written, spare)) in enumerate(
                zip(steps, scratch.views(count), strict=False)
            ):
                if place >= self._last:
                    written = out
                parts = self._parts_of_columns(place, count)
                if parts:
                    is_suspect = self._share_columns(place, parts, values, y, written, spare)
                else:
                    with BLAS.held(1):
                        is_suspect = compute(values, y, written, spare)
                if is_suspect:
                    is_finite = is_finite and _are_finite(inputs)
                y = written
        finally:
            self._free.append(scratch)
        return is_finite

    def _share_columns(
        self, place: int, parts: list[slice], values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray
    ) -> bool:
        """Call a stage for parts of its columns, on several threads; returns whether x may not be finite."""
        compute_columns = self._stages[place].compute_columns
        are_suspect = [False] * len(parts)

        def compute(part: int) -> None:
            columns = parts[part]
            with BLAS.held(1):  # by each thread itself: one that waits for others must not hold what they wait for
                are_suspect[part] = compute_columns(values, x, y[:, columns], scratch[:, columns], columns)

        POOL.run(len(parts), compute, self._threads)
        return any(are_suspect)

    def _parts_of_columns(self, place: int, rows: int) -> list[slice]:
        """The columns of a stage that threads share, by its width and the rows alone; none if one computes them all."""
        width = self._widths[place]
        if width < WIDE or rows * self._flops[place] < PIECE_FLOPS:
            return []
        parts = 4 if width < 4 * WIDE else 8
        return [slice(width * part // parts, width * (part + 1) // parts) for part in range(parts)]

    def _take_scratch(self) -> Scratch:
        try:
            return self._free.pop()
        except IndexError:
            return Scratch(self._plan, self._widths, self._capacity)

    def _inputs(
        self, scratch: Scratch, x: np.ndarray, rows: np.ndarray | None, scale: float | None, *, is_rounded: bool
    ) -> np.ndarray:
        """The inputs as the first step takes them, (B, n_in): ``x`` itself where it is so already."""
        if rows is not None:
            # Rows are in range by construction; mode="clip" spares NumPy a copy.
            x = np.take(x, rows, axis=0, out=scratch.gathered(len(rows), x.dtype), mode="clip")
        if not is_rounded or (x.dtype == self._dtype and x.flags.carray):
            return x
        inputs = scratch.inputs(len(x))
        with np.errstate(all="ignore"):
            np.copyto(inputs, x, casting="unsafe")
        if scale is not None:
            np.multiply(inputs, scale, out=inputs)
        return inputs

    def close(self) -> None:
        self._free.clear()


def _dense(plan: Plan, op: ops.Dense) -> Stage:
    forward = ACTIVATIONS[op.activation].forward if op.activation != "identity" else None

    def finish(y: np.ndarray, bias: np.ndarray | None, scratch: np.ndarray) -> None:
        if bias is not None:
            np.add(y, bias, out=y)
        if forward is not None:
            forward(y, y, scratch)

    def dense(values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> bool:
        weight, bias = values
        assert weight is not None
        np.dot(x, weight, out=y)
        is_suspect = not isfinite(np.vdot(y, y))  # a sum that is too large for its square is found to be none
        finish(y, bias, scratch)
        return is_suspect

    def columns_of_dense(values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray, columns: slice) -> bool:
        weight, bias = values
        assert weight is not None
        np.matmul(x, weight[:, columns], out=y)
        is_suspect = not isfinite(np.vdot(y, y))
        finish(y, bias if bias is None else bias[columns], scratch)
        return is_suspect

    return Stage((op.weight, op.bias), plan.buffers[op.y].shape[-1], dense, compute_columns=columns_of_dense)


def _locally_connected(plan: Plan, op: ops.LocallyConnected) -> Stage:
    forward = ACTIVATIONS[op.activation].forward if op.activation != "identity" else None
    n = plan.buffers[op.y].shape[-1]

    def columns_of_locally_connected(
        values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray, columns: slice
    ) -> bool:
        weight, bias = values
        assert weight is not None
        # One pass over the outputs for each weight of a window, so that scratch does not grow with the window.
        np.multiply(x[:, columns], weight[0, columns], out=y)
        for r in range(1, len(weight)):
            np.multiply(x[:, columns.start + r : columns.stop + r], weight[r, columns], out=scratch)
            np.add(y, scratch, out=y)
        is_suspect = not isfinite(np.vdot(y, y))
        if bias is not None:
            np.add(y, bias if len(bias) == 1 else bias[columns], out=y)
        if forward is not None:
            forward(y, y, scratch)
        return is_suspect

    def locally_connected(values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> bool:
        return columns_of_locally_connected(values, x, y, scratch, slice(0, n))

    return Stage((op.weight, op.bias), n, locally_connected, compute_columns=columns_of_locally_connected)


def _standardize(plan: Plan, op: ops.Standardize) -> Stage:
    def standardize(values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> bool:
        mean, scale = values
        assert mean is not None and scale is not None
        np.subtract(x, mean, out=y)
        np.divide(y, scale, out=y)
        return False

    return Stage((op.mean, op.scale), plan.n_in, standardize)


def _standardize_in_float64(scaling: InputScaling) -> Compute:
    def standardize(values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> bool:
        scaling.standardize(x, np.empty(x.shape), y)
        return False

    return standardize


def _output(plan: Plan, op: ops.Output) -> Stage:
    def output(values: Values, x: np.ndarray, y: np.ndarray, scratch: np.ndarray) -> bool:
        mean, scale = values
        apply_output(op.function, y)
        if mean is not None and scale is not None:
            np.multiply(y, scale, out=y)
            np.add(y, mean, out=y)
        return False

    return Stage((op.mean, op.scale), plan.n_out, output, is_in_place=True)


_STAGES: dict[type[ops.Operation], Callable[[Plan, Any], Stage]] = {
    ops.Dense: _dense,
    ops.LocallyConnected: _locally_connected,
    ops.Standardize: _standardize,
    ops.Output: _output,
}
