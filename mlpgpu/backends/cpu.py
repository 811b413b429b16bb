"""The NumPy backend: interprets a plan, and is the specification that every kernel is held to.

Compiling allocates every buffer at capacity.  The first step of a given number of rows binds each
operation to views of those buffers, as a list of closures; from then on a step calls the closures and
allocates nothing.  Matrix products run in NumPy's BLAS, everything else in ufuncs with ``out=``.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from threadpoolctl import ThreadpoolController

from .. import plan as ops
from ..activations import ACTIVATIONS
from ..datasets import Dataset
from ..errors import ConfigurationError, check_integer
from ..initializers import initial_values
from ..losses import LOSSES, apply_output
from ..plan import Plan
from ..random import WORDS_PER_BLOCK, Purpose, UniformStream
from .base import MEMORY_SHARE, Backend, Histogram, Program, Sampling, State, bin_edges, scaled, target_array
from .evaluation import MetricSums

FLOPS_PER_THREAD = 4_000_000  # of a step's largest product, for one more thread to be worth waking
UPDATE_BLOCK = 1 << 17  # elements that an update handles at a time, so that its passes stay in cache
BOUND_LIMIT = 8  # numbers of rows to keep closures for

Bound = Callable[[], None]


def available_cores() -> int:
    """Physical cores that this process may use: hyper-threads of one core slow a matrix product down."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


DTYPES = {name: np.dtype(name.removesuffix("-ieee")) for name in ("float32", "float32-ieee", "float64")}


def thread_count(plan: Plan) -> int:
    """Threads for a plan: a fixed rule of its largest product and the cores, for the bits depend on it."""
    operations = plan.training or plan.evaluation
    rows = max(1, plan.capacity // plan.shares)
    largest = max((plan.flops(op, rows) // (2 if getattr(op, "dx", None) else 1) for op in operations), default=0)
    if plan.shares > 1:
        # Shares are threads of their own, each with a single-threaded BLAS.
        return min(plan.shares, available_cores()) if largest >= FLOPS_PER_THREAD else 1
    return max(1, min(available_cores(), largest // FLOPS_PER_THREAD))


class CpuBackend(Backend):
    """Runs plans with NumPy on the host, in float32 or float64."""

    name = "cpu"

    def check(self, plan: Plan) -> None:
        if plan.precision not in DTYPES:
            raise ConfigurationError(
                "precision on the cpu backend", expected="one of " + ", ".join(DTYPES), got=plan.precision
            )
        if plan.replicas != 1:
            raise ConfigurationError("replicas on the cpu backend", expected=1, got=plan.replicas)

    def compile(self, plan: Plan, *, threads: int | None = None, memory_share: float = MEMORY_SHARE) -> Program:
        self.check(plan)
        return CpuProgram(plan, _threads(plan, threads))

    def fingerprint(self, plan: Plan, *, threads: int | None = None) -> dict[str, str | int]:
        loaded = [library for library in ThreadpoolController().info() if library["user_api"] == "blas"]
        # SciPy brings a BLAS of its own, which NumPy's products do not run in.
        of_numpy = [library for library in loaded if "numpy" in library["filepath"]] or loaded
        blas = [" ".join(str(lib.get(key)) for key in ("internal_api", "version", "architecture")) for lib in of_numpy]
        return {
            "backend": self.name,
            "machine": platform.machine(),
            "numpy": np.__version__,
            "blas": ", ".join(sorted(set(blas))),
            "threads": _threads(plan, threads),
        }


def _threads(plan: Plan, threads: int | None) -> int:
    return thread_count(plan) if threads is None else check_integer("threads", threads, least=1)


@dataclass
class _Feed:
    """A data set as the gather reads it, and the batch's rows."""

    dataset: Dataset
    target: np.ndarray | None  # (rows,) class numbers or (rows, n_out)
    weight: np.ndarray | None  # (rows,)
    staging: np.ndarray | None  # (capacity, n_in) of the inputs' type, where that is not the plan's
    batch: np.ndarray  # (B,) the batch's rows in the data set
    storage: np.ndarray  # (B,) the same rows in the array of inputs

    def select(self, batch: np.ndarray, storage: np.ndarray) -> None:
        self.batch, self.storage = batch, storage


class CpuProgram(Program):
    """A plan and its NumPy arrays."""

    def __init__(self, plan: Plan, threads: int) -> None:
        self._plan = plan
        self._dtype = DTYPES[plan.precision]
        self._blas = ThreadpoolController()
        self._blas_threads = threads if plan.shares == 1 else 1
        workers = min(threads, plan.shares)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="mlpgpu-share") if workers > 1 else None
        # Locally connected layers are no products of BLAS's: threads of ours share them out.
        is_local = any(isinstance(op, ops.LocallyConnected) for op in (*plan.training, *plan.evaluation))
        self._local_threads = self._blas_threads if is_local else 1
        self._local_pool = (
            ThreadPoolExecutor(self._local_threads, thread_name_prefix="mlpgpu-local")
            if self._local_threads > 1
            else None
        )

        slots = len(plan.optimizer.slots) if plan.optimizer else 0
        self._parameters = np.zeros(plan.parameter_count, self._dtype)
        self._slots = np.zeros((slots, plan.parameter_count), self._dtype)
        self._statistics = np.zeros(plan.statistic_count, self._dtype)
        self._snapshot: np.ndarray | None = None

        self._arrays: dict[str, np.ndarray] = {}  # buffers, parameters, statistics; share 0's partials
        self._partials = np.zeros((plan.shares, plan.partials[-1].end if plan.partials else 0), self._dtype)
        self._allocate()
        self._masks: dict[int, np.ndarray] = {}  # of each dropout layer, from its forward to its backward pass
        self._streams: dict[tuple[int, int], UniformStream] = {}  # by layer and share
        self._bound: dict[tuple[int, bool], list[list[Bound]]] = {}  # by rows and purpose; of each share
        self._finish = _bind_finish(self)

        self._feed: _Feed  # what the gather reads from; set before anything runs
        self._training: tuple[_Feed, Sampling] | None = None
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None  # its number and its rows, twice
        self._step = 0
        self._inverse_weight = 0.0
        self._row: Sequence[float] = ()  # of the optimizer's table

    def _allocate(self) -> None:
        plan, arrays = self._plan, self._arrays
        for buffer in plan.buffers.values():
            if buffer.axes[1] == "row":
                # Dropout's buffers and deltas are zero before they are written, like all others.
                arrays[buffer.name] = np.zeros(buffer.shape[1:], np.intp if buffer.holds == "index" else self._dtype)
        for flat, segments in ((self._parameters, plan.parameters), (self._statistics, plan.statistics)):
            for segment in segments:
                arrays[segment.name] = flat[segment.offset : segment.end].reshape(segment.shape)
        widest = max((array.shape[1] for array in arrays.values() if array.ndim == 2), default=1)
        self._scratch = np.empty(plan.capacity * widest, self._dtype)
        self._ones = np.ones(plan.capacity, self._dtype)

    # --- state ---

    def load(self, state: State, *, snapshot: bool = False) -> None:
        if snapshot:
            self._snapshot = state.parameters[0].astype(self._dtype)
            return
        np.copyto(self._parameters, state.parameters[0])
        np.copyto(self._slots, state.slots[:, 0])
        np.copyto(self._statistics, state.statistics[0])

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        for p in self._plan.parameters:
            values = initial_values(p.initializer, p.shape, p.fans, seed=seed, layer=p.layer)
            self._arrays[p.name][...] = values.astype(np.float32)
        self._slots.fill(0.0)
        np.copyto(self._statistics, statistics[0])

    def read(self, *, snapshot: bool = False) -> State:
        parameters = self._snapshot if snapshot and self._snapshot is not None else self._parameters
        replicated = parameters[np.newaxis], self._slots[:, np.newaxis], self._statistics[np.newaxis]
        return State(*(array.copy() for array in replicated))

    def snapshot(self) -> None:
        if self._snapshot is None:
            self._snapshot = np.empty_like(self._parameters)
        np.copyto(self._snapshot, self._parameters)

    def restore(self) -> None:
        if self._snapshot is not None:
            np.copyto(self._parameters, self._snapshot)

    def is_finite(self) -> bool:
        return bool(np.isfinite(self._parameters).all())

    def histograms(self, bins: int) -> dict[str, Histogram]:
        return {parameter.name: _count(self._arrays[parameter.name], bins) for parameter in self._plan.parameters}

    def sample(self, rows: int, step: int, bins: int) -> dict[str, Histogram]:
        assert self._training is not None
        plan, (self._feed, sampling) = self._plan, self._training
        rows, self._step = min(rows, sampling.rows), step
        batch = np.arange(rows)
        self._feed.select(batch, self._feed.dataset.storage_rows(batch))
        with self._blas.limit(limits=self._blas_threads, user_api="blas"), np.errstate(all="ignore"):
            self._each_share(self._closures(rows, training=True))
            found = {name: _count(self._arrays[y][:rows], bins) for name, y in plan.outputs().items()}
            weight = self._loss_sums(rows)[1]
            for parameter in plan.parameters:
                uses = [partial.name for partial in plan.partials if partial.parameter == parameter.name]
                partials = [self._partial(name, share) for share in range(plan.shares) for name in uses]
                counted = _count(np.add.reduce(partials), bins)
                found[f"{parameter.name}.gradient"] = scaled(counted, 1.0 / weight if weight > 0.0 else 1.0)
        return found

    # --- running ---

    def attach(self, dataset: Dataset, sampling: Sampling) -> None:
        self._training = self._feed_of(dataset), sampling
        self._epoch = None
        self._streams = {
            (op.layer, share): UniformStream(seed=sampling.seed, purpose=Purpose.DROPOUT, layer=op.layer)
            for op in self._plan.training
            if isinstance(op, ops.Dropout)
            for share in range(self._plan.shares)
        }

    def run(self, first_step: int, rates: np.ndarray) -> np.ndarray:
        assert self._training is not None and self._plan.optimizer is not None
        self._feed, sampling = self._training
        table = self._plan.optimizer.table(first_step, rates).tolist()
        sums = np.empty((len(table), 2))
        with self._blas.limit(limits=self._blas_threads, user_api="blas"), np.errstate(all="ignore"):
            for index, self._row in enumerate(table):
                self._step = first_step + index
                rows = self._select(self._feed, sampling)
                self._each_share(self._closures(rows, training=True))
                sums[index] = _, weight = self._loss_sums(rows)
                self._inverse_weight = 1.0 / weight if weight > 0.0 else 0.0
                for call in self._finish:
                    call()
        return sums

    def evaluate(self, dataset: Dataset, metrics: Sequence[str]) -> dict[str, np.ndarray]:
        sums = MetricSums(dataset, self._plan, metrics, self._dtype)
        loss = np.zeros(2)
        for rows in self._sweep(dataset):
            count = rows.stop - rows.start
            loss += self._loss_sums(count)
            sums.add(rows, self._arrays[self._plan.output][:count])
        return {**sums.sums, "loss": loss}

    def predict(self, dataset: Dataset, *, logits: bool = False) -> np.ndarray:
        result = np.empty((len(dataset), self._plan.n_out), self._dtype)
        source = self._arrays[self._plan.logits if logits else self._plan.output]
        for rows in self._sweep(dataset):
            result[rows] = source[: rows.stop - rows.start]
        return result

    def _sweep(self, dataset: Dataset) -> Iterator[slice]:
        """Evaluate a data set batch by batch, in order, and stop after each for its results to be taken."""
        self._feed = feed = self._feed_of(dataset)
        for start in range(0, len(dataset), self._plan.capacity):
            rows = slice(start, min(start + self._plan.capacity, len(dataset)))
            batch = np.arange(rows.start, rows.stop)
            feed.select(batch, dataset.storage_rows(batch))
            with self._blas.limit(limits=self._blas_threads, user_api="blas"), np.errstate(all="ignore"):
                self._each_share(self._closures(len(batch), training=False))
            yield rows

    def _feed_of(self, dataset: Dataset) -> _Feed:
        plan = self._plan
        target = None if plan.target_kind is None else target_array(dataset, plan, self._dtype)
        weight = None if dataset.weight is None else dataset.weight.astype(self._dtype)
        inputs = dataset.storage_x.dtype
        staging = None if inputs == self._dtype else np.empty((plan.capacity, plan.n_in), inputs)
        nothing = np.empty(0, np.int64)
        return _Feed(dataset, target, weight, staging, nothing, nothing)

    def _select(self, feed: _Feed, sampling: Sampling) -> int:
        """Point the gather at the current step's rows and return their number."""
        epoch, batch = sampling.locate(self._step)
        if self._epoch is None or self._epoch[0] != epoch:
            order = sampling.order(epoch)
            self._epoch = epoch, order, feed.dataset.storage_rows(order)
        rows = sampling.batch(batch)
        feed.select(self._epoch[1][rows], self._epoch[2][rows])
        return len(feed.batch)

    def _each_share(self, shares: list[list[Bound]]) -> None:
        if self._pool is None or len(shares) == 1:
            for share in shares:
                _call(share)
        else:
            list(self._pool.map(_call, shares))

    def _loss_sums(self, rows: int) -> tuple[float, float]:
        """The batch's summed loss and weight."""
        value = float(np.add.reduce(self._arrays["value"][:rows]))
        weighted = self._feed.weight is not None
        return value, float(np.add.reduce(self._arrays["row_weight"][:rows])) if weighted else float(rows)

    def _closures(self, rows: int, *, training: bool) -> list[list[Bound]]:
        """What each share calls for a batch of ``rows``."""
        key = rows, training
        if key not in self._bound:
            if len(self._bound) >= BOUND_LIMIT:
                self._bound.pop(next(iter(self._bound)))
            operations = self._plan.training if training else self._plan.evaluation
            shares = self._plan.share_rows(rows) if training else (slice(0, rows),)
            self._bound[key] = [
                [_BIND[type(operation)](self, operation, part, share) for operation in operations
                 if type(operation) in _BIND]
                for share, part in enumerate(shares)
            ]  # fmt: skip
        return self._bound[key]

    # --- what bindings ask for ---

    def _view(self, name: str, rows: slice) -> np.ndarray:
        return self._arrays[name][rows]

    def _partial(self, name: str, share: int) -> np.ndarray:
        segment = next(partial for partial in self._plan.partials if partial.name == name)
        return self._partials[share, segment.offset : segment.end].reshape(segment.shape)

    def _scratch_like(self, array: np.ndarray, rows: slice) -> np.ndarray:
        """Scratch of the shape of ``array``, a view of ``rows``; shares get parts that do not overlap."""
        start = rows.start * (len(self._scratch) // self._plan.capacity)
        return self._scratch[start : start + array.size].reshape(array.shape)

    def _shared_out(self, bind: Callable[[slice, slice], Bound], rows: int, columns: int) -> Bound:
        """What ``bind`` makes for each thread's rows and columns of a locally connected layer's array, side by side.

        Parts are ranges of whole rows, which a pass takes faster than pieces of rows, unless there are too few.
        """
        count = self._local_threads
        if rows >= count:
            parts = [(part, slice(0, columns)) for part in _ranges(rows, count)]
        else:
            parts = [(slice(0, rows), part) for part in _ranges(columns, min(count, columns))]
        pool, calls = self._local_pool, [[bind(*part)] for part in parts]

        def side_by_side() -> None:
            assert pool is not None
            list(pool.map(_call, calls))

        return calls[0][0] if len(calls) == 1 else side_by_side


def _count(values: np.ndarray, bins: int) -> Histogram:
    finite = values[np.isfinite(values)]
    edges = bin_edges(float(finite.min(initial=np.inf)), float(finite.max(initial=-np.inf)), bins)
    return np.histogram(finite, edges)


def _call(closures: list[Bound]) -> None:
    # NumPy's error state belongs to the thread, and what overflows here shows in the loss.
    with np.errstate(all="ignore"):
        for call in closures:
            call()


def _ranges(length: int, count: int) -> list[slice]:
    """``count`` ranges, as equal as can be."""
    return [slice(length * part // count, length * (part + 1) // count) for part in range(count)]


# --- bindings: one function for each operation, which returns a closure over views of the buffers ---


def _bind_gather(program: CpuProgram, op: ops.Gather, rows: slice, share: int) -> Bound:
    x = program._view(op.x, rows)
    target = program._view(op.target, rows) if op.target else None
    weight = program._view(op.weight, rows) if op.weight else None

    def gather() -> None:
        # Rows come from an order that is in range by construction; mode="clip" spares NumPy a copy.
        feed = program._feed
        storage, batch = feed.storage[rows], feed.batch[rows]
        if feed.staging is None:
            np.take(feed.dataset.storage_x, storage, axis=0, out=x, mode="clip")
        else:
            staging = feed.staging[rows]
            np.take(feed.dataset.storage_x, storage, axis=0, out=staging, mode="clip")
            if feed.dataset.scale is None:
                np.copyto(x, staging, casting="same_kind")
            else:
                np.multiply(staging, feed.dataset.scale, out=x, dtype=x.dtype)
        if target is not None and feed.target is not None:
            np.take(feed.target, batch, axis=0, out=target, mode="clip")
        if feed.weight is not None and weight is not None:
            np.take(feed.weight, batch, out=weight, mode="clip")

    return gather


def _bind_standardize(program: CpuProgram, op: ops.Standardize, rows: slice, share: int) -> Bound:
    x, y = program._view(op.x, rows), program._view(op.y, rows)
    mean, scale = program._arrays[op.mean], program._arrays[op.scale]

    def standardize() -> None:
        np.subtract(x, mean, out=y)
        np.divide(y, scale, out=y)

    return standardize


def _bind_dense(program: CpuProgram, op: ops.Dense, rows: slice, share: int) -> Bound:
    x, y = program._view(op.x, rows), program._view(op.y, rows)
    z = program._view(op.z, rows) if op.z else y
    weight, bias = program._arrays[op.weight], program._arrays[op.bias] if op.bias else None
    scratch = program._scratch_like(y, rows)
    forward = ACTIVATIONS[op.activation].forward if op.activation != "identity" else None

    def dense() -> None:
        np.dot(x, weight, out=z)
        if bias is not None:
            np.add(z, bias, out=z)
        if forward is not None:
            forward(z, y, scratch)

    return dense


def _bind_locally_connected(program: CpuProgram, op: ops.LocallyConnected, rows: slice, share: int) -> Bound:
    x, y = program._view(op.x, rows), program._view(op.y, rows)
    z = program._view(op.z, rows) if op.z else y
    n = y.shape[1]
    weight, bias = program._arrays[op.weight][:, :n], program._arrays[op.bias][:n] if op.bias else None
    scratch = program._scratch_like(y, rows)
    forward = ACTIVATIONS[op.activation].forward if op.activation != "identity" else None
    window = len(weight)

    def outputs(part: slice, columns: slice) -> Bound:
        sums, products, result = z[part, columns], scratch[part, columns], y[part, columns]
        inputs = [x[part, columns.start + r : columns.stop + r] for r in range(window)]
        weights = list(weight[:, columns])
        biases = bias if bias is None or len(bias) == 1 else bias[columns]

        def call() -> None:
            # A pass for each weight of an output: what is stored beside the outputs does not grow with the window.
            np.multiply(inputs[0], weights[0], out=sums)
            for seen, w in zip(inputs[1:], weights[1:], strict=True):
                np.multiply(seen, w, out=products)
                np.add(sums, products, out=sums)
            if biases is not None:
                np.add(sums, biases, out=sums)
            if forward is not None:
                forward(sums, result, products)

        return call

    return program._shared_out(outputs, len(y), n)


def _bind_dropout(program: CpuProgram, op: ops.Dropout, rows: slice, share: int) -> Bound:
    x, y = program._view(op.x, rows), program._view(op.y, rows)
    width = y.shape[1]
    mask = program._masks.setdefault(op.layer, np.empty((program._plan.capacity, width), program._dtype))[rows]
    # Words come in blocks of four, and a share may begin inside one.
    block, skipped = divmod(rows.start * width, WORDS_PER_BLOCK)
    draws = np.empty(skipped + mask.size)
    kept = draws[skipped:].reshape(mask.shape)

    def dropout() -> None:
        program._streams[op.layer, share].fill(draws, step=program._step, block=block)
        np.greater_equal(kept, op.rate, out=mask)
        np.multiply(mask, 1.0 / (1.0 - op.rate), out=mask)
        np.multiply(x, mask, out=y)

    return dropout


def _bind_loss(program: CpuProgram, op: ops.Loss, rows: slice, share: int) -> Bound:
    logits, target = program._view(op.logits, rows), program._view(op.target, rows)
    weight, value = program._view(op.weight, rows), program._view(op.value, rows)
    column = weight[:, np.newaxis]
    # An evaluation has no use for the delta, and leaves it in the buffer of the output to come.
    delta = program._view(op.delta or program._plan.output, rows)
    scratch = program._scratch_like(logits, rows)
    evaluate = LOSSES[op.loss].evaluate

    def loss() -> None:
        evaluate(logits, target, value, delta, scratch)
        if program._feed.weight is not None:
            np.multiply(value, weight, out=value)
            np.multiply(delta, column, out=delta)

    return loss


def _bind_output(program: CpuProgram, op: ops.Output, rows: slice, share: int) -> Bound:
    logits, y = program._view(op.logits, rows), program._view(op.y, rows)
    mean, scale = (program._arrays[name] if name else None for name in (op.mean, op.scale))

    def output() -> None:
        np.copyto(y, logits)
        apply_output(op.function, y)
        if scale is not None and mean is not None:
            np.multiply(y, scale, out=y)
            np.add(y, mean, out=y)

    return output


def _bind_activation_backward(program: CpuProgram, op: ops.ActivationBackward, rows: slice, share: int) -> Bound:
    saved, dy = program._view(op.saved, rows), program._view(op.dy, rows)
    scratch = program._scratch_like(dy, rows)
    backward = ACTIVATIONS[op.activation].backward
    return lambda: backward(saved, dy, dy, scratch)


def _bind_dense_backward(program: CpuProgram, op: ops.DenseBackward, rows: slice, share: int) -> Bound:
    dz, x_transposed = program._view(op.dz, rows), program._view(op.x, rows).T
    dx = program._view(op.dx, rows) if op.dx else None
    weight_transposed = program._arrays[op.weight].T
    dweight = program._partial(op.dweight, share)
    dbias = program._partial(op.dbias, share) if op.dbias else None
    ones = program._ones[rows]

    def dense_backward() -> None:
        np.dot(x_transposed, dz, out=dweight)
        if dbias is not None:
            np.dot(ones, dz, out=dbias)
        if dx is not None:
            np.dot(dz, weight_transposed, out=dx)

    return dense_backward


def _bind_locally_connected_backward(
    program: CpuProgram, op: ops.LocallyConnectedBackward, rows: slice, share: int
) -> Bound:
    dz, x = program._view(op.dz, rows), program._view(op.x, rows)
    n = dz.shape[1]
    weight = program._arrays[op.weight][:, :n]
    dweight = program._partial(op.dweight, share)
    dbias = program._partial(op.dbias, share) if op.dbias else None
    scratch, ones = program._scratch_like(dz, rows), program._ones[rows]
    windows = [x[:, r : r + n] for r in range(len(weight))]

    def parameters() -> None:
        for dw, window in zip(dweight, windows, strict=True):
            np.multiply(dz, window, out=scratch)
            np.dot(ones, scratch, out=dw[:n])
        dweight[:, n:] = 0.0
        if dbias is not None:
            if len(dbias) == 1:
                dbias[0] = np.add.reduce(np.dot(ones, dz))
            else:
                np.dot(ones, dz, out=dbias[:n])
                dbias[n:] = 0.0

    if op.dx is None:
        return parameters
    dx = program._view(op.dx, rows)
    products = program._scratch_like(dx, rows)

    def inputs(part: slice, columns: slice) -> Bound:
        """Of a part of dx: the outputs whose windows reach it, weight by weight."""
        part_of_dx = dx[part, columns]
        terms = []
        for r, w in enumerate(weight):
            seen = slice(max(columns.start - r, 0), max(min(columns.stop - r, n), 0))
            reached = part, slice(seen.start + r, seen.stop + r)
            if seen.start < seen.stop:
                terms.append((dz[part, seen], w[seen], products[reached], dx[reached]))

        def call() -> None:
            part_of_dx.fill(0.0)
            for delta, w, term, total in terms:
                np.multiply(delta, w, out=term)
                np.add(total, term, out=total)

        return call

    share_out = program._shared_out(inputs, *dx.shape)

    def locally_connected_backward() -> None:
        parameters()
        share_out()

    return locally_connected_backward


def _bind_dropout_backward(program: CpuProgram, op: ops.DropoutBackward, rows: slice, share: int) -> Bound:
    dy, dx, mask = program._view(op.dy, rows), program._view(op.dx, rows), program._masks[op.layer][rows]
    return lambda: np.multiply(dy, mask, out=dx)


_BIND: dict[type[ops.Operation], Callable[[CpuProgram, Any, slice, int], Bound]] = {
    ops.Gather: _bind_gather,
    ops.Standardize: _bind_standardize,
    ops.Dense: _bind_dense,
    ops.LocallyConnected: _bind_locally_connected,
    ops.Dropout: _bind_dropout,
    ops.Loss: _bind_loss,
    ops.Output: _bind_output,
    ops.ActivationBackward: _bind_activation_backward,
    ops.DenseBackward: _bind_dense_backward,
    ops.LocallyConnectedBackward: _bind_locally_connected_backward,
    ops.DropoutBackward: _bind_dropout_backward,
}


# --- what runs once for all shares ---


def _bind_finish(program: CpuProgram) -> list[Bound]:
    """Reduce, Norm and Update, in blocks that stay in cache.

    The division by the summed weight, and by what the norm is too large, is one factor that the
    update's pass multiplies by.  Where there is one partial for each parameter, it is the gradient.
    """
    plan = program._plan
    count = len(program._parameters)
    summed = plan.shares > 1 or len(plan.partials) > len(plan.parameters)
    gradient = np.empty(count, program._dtype) if summed else program._partials[0]
    blocks = [slice(start, min(start + UPDATE_BLOCK, count)) for start in range(0, count, UPDATE_BLOCK)]
    scratch = np.empty(min(UPDATE_BLOCK, count), program._dtype)
    calls: list[Bound] = []
    for op in plan.training:
        if isinstance(op, ops.Reduce) and summed:
            calls.append(_bind_reduce(program, gradient))
        elif isinstance(op, ops.Norm):
            calls.append(_bind_norm(program, op, [gradient[block] for block in blocks]))
        elif isinstance(op, ops.Update):
            views = [
                (
                    program._parameters[block],
                    gradient[block],
                    list(program._slots[:, block]),
                    scratch[: len(gradient[block])],
                )
                for block in blocks
            ]
            calls.append(_bind_update(program, op, views))
    return calls


def _bind_reduce(program: CpuProgram, gradient: np.ndarray) -> Bound:
    plan = program._plan
    terms: list[tuple[np.ndarray, list[np.ndarray]]] = []
    for parameter in plan.parameters:
        uses = [partial.name for partial in plan.partials if partial.parameter == parameter.name]
        partials = [program._partial(name, share) for share in range(plan.shares) for name in uses]
        terms.append((gradient[parameter.offset : parameter.end].reshape(parameter.shape), partials))

    def reduce() -> None:
        for total, (first, *others) in terms:
            np.copyto(total, first)
            for partial in others:
                np.add(total, partial, out=total)

    return reduce


def _bind_norm(program: CpuProgram, op: ops.Norm, gradient: list[np.ndarray]) -> Bound:
    wide = np.empty(min(UPDATE_BLOCK, len(program._parameters)))

    def norm() -> None:
        square = 0.0
        for block in gradient:
            # In float64, where the square of no float32 overflows.
            copy = wide[: len(block)]
            np.copyto(copy, block)
            square += float(np.dot(copy, copy))
        length = math.sqrt(square) * program._inverse_weight
        if length > op.limit:
            program._inverse_weight *= op.limit / length

    return norm


def _bind_update(
    program: CpuProgram, op: ops.Update, blocks: list[tuple[np.ndarray, np.ndarray, list[np.ndarray], np.ndarray]]
) -> Bound:
    rule = op.optimizer.update

    def update() -> None:
        factor, row = program._inverse_weight, program._row
        for w, g, slots, scratch in blocks:
            np.multiply(g, factor, out=g)
            rule(w, g, slots, row, scratch)

    return update
