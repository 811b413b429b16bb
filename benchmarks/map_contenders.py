"""What trains a point of benchmarks/map.py: mlpgpu, JAX, PyTorch and, on the CPU, scikit-learn.

A contender is made, called with an order for a first epoch, and then called for turns; ``epochs`` is how many a call
trains for.  Its ``first_step`` gives the optimizer's first slot after one step, which is proportional to the gradient:
what the error of a step is computed from, beside mlpgpu's in float64.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from counted import thresholds_of
from map_points import BOUNDS, Point, weights_of

from mlpgpu import bench
from mlpgpu.backends import get_backend
from mlpgpu.backends.cpu.bindings import bind
from mlpgpu.backends.cpu.blas import BLAS
from mlpgpu.backends.cpu.loops import joined
from mlpgpu.backends.cpu.program import CpuProgram
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.profile.peak_rates import PeakRates
from mlpgpu.backends.cuda.profile.probe import Probe
from mlpgpu.backends.cuda.run.program import CudaProgram
from mlpgpu.bench import Workload
from mlpgpu.plan import Norm, Reduce, Update

OURS, JAX, TORCH, SKLEARN = LIBRARIES = ("mlpgpu", "JAX", "PyTorch", "scikit-learn")
FORMS = {  # by library and backend, those that have won anywhere; --forms names others
    (JAX, "cuda"): ("unrolled by 4",),
    (JAX, "cpu"): ("plain scan", "unrolled by 4"),
    (TORCH, "cuda"): ("compiled graph", "compiled step"),
    (TORCH, "cpu"): ("eager", "compiled step"),
}
JAX_ALGORITHMS = {"float32": ("JAX", "JAX bf16x6"), "tf32": ("JAX",), "bfloat16": ("JAX",)}
STEPS = 10  # whose loops are timed one by one
CALL_SECONDS = 0.05  # about what a call takes that trains for several epochs before the host waits
JAX_CACHE = "MLPGPU_MAP_JAX"  # the environment's name of the folder with what JAX compiled
# A floor plays no part here: only the launches' times are used.
ANY_RATES = PeakRates(copied=1.0, cached=1.0, computed=1.0, cache_bytes=0)
# By name, what ``--ways`` measures beside mlpgpu as it chooses: thresholds of select that have other values.
NEVER = 1 << 30
WAYS: dict[str, dict[str, float]] = {
    "launch by launch": {"PERSISTENT_IS_USED": False, "ROW_STEP_IS_USED": False},
    "blocks of rows": {"PERSISTENT_IS_USED": False},
    "no whole batch": {"WHOLE_BATCH_IS_USED": False},
    "plain cores": {"NARROW_LEAST_ROWS": NEVER},
    "tensor cores": {"LAYERS_TENTHS": 6},
    "no clusters": {"CLUSTERS_SHARE_ROWS": False},
    "scaled operands": {"UNSCALED_STEP_HUNDREDTHS": NEVER},
    "operands without scales": {"UNSCALED_STEP_HUNDREDTHS": 0},
    "split along k": {
        "UNCUT_LEAST_N": NEVER,
        "UNCUT_LEAST_N_OF_SCALED": NEVER,
        "CUT_LAYERS_ARE_COUNTED": False,
        "CUT_LAYERS_HAVE_HEADS": False,
    },
    "heads of long rows": {"CUT_LAYERS_ARE_COUNTED": False},
    "no heads of long rows": {"CUT_LAYERS_HAVE_HEADS": False},
    "few columns without tiles": {"FEW_COLUMNS_TILE_TENTHS": NEVER},
    "few columns stored by tiles": {"SMALL_N_GRADIENTS_ARE_USED": False},
    "heads by rows": {"COLUMN_HEADS_ARE_USED": False},
    "heads without clusters": {"CLUSTER_HEADS_ARE_USED": False},
    "no tiles between": {"MEDIUM_TILES_ARE_USED": False},
    "no few columns": {"FEW_COLUMNS_MOST_ROWS": 0},
    "sums beside": {"COLUMNS_MAY_BE_SUMMED_APART": False},
    "usual tiles": {"TILES_ARE_COUNTED": False, "UPDATES_HAVE_PARTS": False},
    "updates apart": {"UPDATES_ARE_GROUPED": False, "TENSOR_UPDATES_ARE_GROUPED": False},
    "first layer apart": {"INPUT_LAYER_IS_APART": True, "TENSOR_ROW_STEP_TENTHS": 20},
}
SKLEARN_ACTIVATIONS = {"relu": "relu", "tanh": "tanh", "sigmoid": "logistic", "identity": "identity"}

Arrays = tuple[np.ndarray, np.ndarray]


class NotApplicable(Exception):
    """A library has no such network; it is left out of a point, and that is no failure."""


def load(library: str, backend: str) -> ModuleType | None:
    """The module with a peer's contenders, or None where the peer is not installed.

    On the CPU a peer is kept off any card; its compiled code is kept in the folders that the environment names.
    """
    try:
        if library == JAX:
            if backend == "cpu":
                os.environ["JAX_PLATFORMS"] = "cpu"
            import jax
            import peers_jax

            if os.environ.get(JAX_CACHE):
                jax.config.update("jax_compilation_cache_dir", os.environ[JAX_CACHE])
                jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
                jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            return peers_jax
        if library == TORCH:
            import peers_torch

            return peers_torch
        if library == SKLEARN:
            import sklearn

            module: ModuleType = sklearn
            return module
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "torch", "sklearn"):
            raise
    return None


def epochs_of(point: Point, backend: str) -> int:
    """How many epochs take about CALL_SECONDS."""
    bounds, workload = BOUNDS[backend], point.workload
    step = max(bounds.least_step, workload.flops / bounds.rate[point.precision], weights_of(workload) / bounds.moved)
    return max(1, round(CALL_SECONDS / (step * workload.steps)))


# --- mlpgpu ---


class Ours:
    """A point by mlpgpu; its first epoch has the order that the others are given for theirs.

    Attributes:
        launches: what tells two ways apart: the kernels of a step and their grids, or the persistent kernel.
    """

    def __init__(self, point: Point, backend: str, arrays: Arrays) -> None:
        self._workload, self.epochs = point.workload, epochs_of(point, backend)
        self._backend = get_backend(backend)
        before = self._free_bytes()
        trainer = point.workload.trainer(backend=backend, precision=point.precision)
        self._run = bench.Epochs(trainer, point.workload.dataset(arrays))
        self._run()
        self._run.reset()
        after = self._free_bytes()
        self.peak_bytes = before - after if before is not None and after is not None else None
        self.launches = launches_of(self._run.program)

    def __call__(self, order: np.ndarray | None = None) -> float:
        self._run.epochs = self.epochs if order is None else 1
        return self._run()

    def _free_bytes(self) -> int | None:
        if not isinstance(self._backend, CudaBackend):
            return None
        with self._backend.device:
            return int(self._backend.device.free_bytes)

    def first_step(self, order: np.ndarray) -> list[np.ndarray]:
        """As the peers' contenders give it; the first epoch's order is ``order`` already."""
        self._run.reset()
        self._run.program.run(0, np.full(1, self._workload.rate))
        found = _by_layer(self._workload, self._run.program.read().slots[0, 0])
        self._run.reset()
        return found

    def costliest(self, point: Point, arrays: Arrays) -> dict[str, Any]:
        """The launch, or on the CPU the operation, that takes most of a step: its name and share."""
        program = self._run.program
        if isinstance(program, CpuProgram):
            shares = loop_seconds(program) or operation_seconds(program, self._run)
        elif isinstance(program, CudaProgram) and not isinstance(program.persistent, str):
            shares = {"the persistent kernel": 1.0}
        else:
            plan, initial = self._run.plan, point.workload.network().state(self._run.plan.optimizer)
            assert isinstance(self._backend, CudaBackend)
            device = self._backend.device
            probe = Probe(plan, device, lambda made: made.load(initial), point.workload.dataset(arrays))
            with device:
                launches = probe.launches(ANY_RATES)
            shares = {}
            for number, each in enumerate(launches):
                name = f"{each.launch.operation}: {each.launch.entry.name}"
                name = name if name not in shares else f"{name} ({number})"
                shares[name] = float(each.count * each.seconds)
        total = sum(shares.values())
        ranked = sorted(shares.items(), key=lambda item: -item[1])
        return {
            "launch": ranked[0][0],
            "share": ranked[0][1] / total,
            "launches": len(ranked),
            "shares": {name: round(seconds / total, 4) for name, seconds in ranked[:6]},
        }


def launches_of(program: Any) -> object:
    """What tells apart two ways to make a step on a card; of the CPU None."""
    if not isinstance(program, CudaProgram):
        return None
    if isinstance(program.persistent, PersistentKernel):
        return repr(program.persistent)
    assert program.training is not None
    lowered = program.training.binder.lowered
    steps = replace(lowered, evaluation_begin=[], evaluation=[]).launches()
    return [(each.entry, each.grid) for each in steps]


def makers_of_ways(point: Point, backend: str, arrays: Arrays) -> Iterator[tuple[str, Maker]]:
    """A point by mlpgpu in each way of WAYS; one that comes to launches that another has is not applicable."""
    seen: list[object] = []

    def make(changed: Mapping[str, float]) -> Ours:
        with thresholds_of(changed):
            made = Ours(point, backend, arrays)
        if made.launches in seen:
            raise NotApplicable("another way has these launches")
        seen.append(made.launches)
        return made

    yield OURS, partial(make, {})
    for way, changed in WAYS.items():
        yield f"{OURS}, {way}", partial(make, changed)


def _by_layer(workload: Workload, flat: np.ndarray) -> list[np.ndarray]:
    """Weight and bias of each layer in turn, of values laid out as the parameters are."""
    found, start = [], 0
    for n_in, n_out in pairwise(workload.widths):
        for shape in ((n_in, n_out), (n_out,)):
            end = start + int(np.prod(shape))
            found.append(flat[start:end].reshape(shape))
            start = end
    return found


def loop_seconds(program: CpuProgram) -> dict[str, float]:
    """Seconds of each compiled loop of a step, all parts of a phase one after the other; none without phases."""
    phased, work = program._phased, program._work
    if phased is None:
        return {}
    plan, seconds = program._plan, dict[str, float]()
    assert plan.optimizer is not None
    order, storage = program._rows_of_epoch(0)
    work.now["batch"], work.now["storage"] = order.ctypes.data, storage.ctypes.data
    table = plan.optimizer.table(0, np.full(1, 1e-6))
    work.now["rates"][0, : table.shape[1]] = table[0]
    with BLAS.held(1):
        for _ in range(STEPS):
            for phase, parts in enumerate(phased.training(plan.capacity).calls):
                for call in (call for part in parts for call in part):
                    (run,) = joined([call], work.now)
                    name, started = f"phase {phase}: {call.name}", time.perf_counter()
                    run()
                    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
    return seconds


def operation_seconds(program: CpuProgram, epoch: Callable[[], object]) -> dict[str, float]:
    """Seconds of each operation of an epoch on the CPU, by number and kind."""
    plan = program._plan
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            started = time.perf_counter()
            call()
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started

        return run

    operations = list(enumerate(plan.training))
    shared = [each for each in operations if isinstance(each[1], Reduce | Norm | Update)]
    others = [each for each in operations if each not in shared]
    (calls,) = program._operations(plan.capacity, training=True)
    reduce, rest = program._updates.to_reduce, program._updates.to_move
    kept = list(calls), list(reduce), list(rest)
    # One by one, where neighbours would be one call.
    calls[:] = [
        timed(f"{number} {type(op).__name__}", call)
        for number, op in others
        for call in bind(program._work, [op], slice(0, plan.capacity), 0)
    ]
    for name, updates in (("reduce", reduce), ("update", rest)):
        updates[:] = [timed(name, call) for call in updates]
    try:
        epoch()
    finally:
        calls[:], reduce[:], rest[:] = kept
    return seconds


def reference(point: Point, arrays: Arrays, order: np.ndarray) -> list[np.ndarray]:
    """The first slot after one step in float64, on the first rows of ``order``."""
    workload = point.workload
    rows = order[: workload.batch_size]
    trainer = workload.trainer(backend="cpu", precision="float64")
    run = bench.Epochs(trainer, workload.dataset((arrays[0][rows], arrays[1][rows])), shuffle=False)
    run()
    found = _by_layer(workload, run.program.read().slots[0, 0])
    run.program.close()
    return found


def error_of(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The relative error, by Frobenius norms over all parameters; NaN where one is not finite."""
    square = sum(float(np.sum((a.astype(np.float64) - b) ** 2)) for a, b in zip(found, expected, strict=True))
    return float(np.sqrt(square / sum(float(np.sum(b.astype(np.float64) ** 2)) for b in expected)))


# --- peers ---


class ScikitLearn:
    """A point by scikit-learn, whose parameters and order are its own."""

    peak_bytes = None

    def __init__(self, point: Point, arrays: Arrays, *, epochs: int) -> None:
        from sklearn.neural_network import MLPClassifier, MLPRegressor

        workload = point.workload
        if workload.activation not in SKLEARN_ACTIVATIONS or workload.dropout:
            raise NotApplicable("scikit-learn has no such activation, or no dropout")
        x, y = arrays
        self.epochs = epochs
        dtype = np.float64 if point.precision == "float64" else np.float32
        self._x = (x if workload.scale is None else x * dtype(workload.scale)).astype(dtype)
        is_regression = workload.loss == "squared_error"
        self._y = y[:, 0] if is_regression and y.shape[1] == 1 else y
        self._model = (MLPRegressor if is_regression else MLPClassifier)(
            workload.widths[1:-1], activation=SKLEARN_ACTIVATIONS[workload.activation],
            solver="adam" if workload.optimizer == "adam" else "sgd", momentum=bench.MOMENTUM,
            nesterovs_momentum=False, learning_rate_init=workload.rate, alpha=0.0,
            batch_size=min(workload.batch_size, workload.rows), max_iter=epochs, warm_start=True, tol=0.0,
            n_iter_no_change=1_000_000, random_state=0,
        )  # fmt: skip

    def __call__(self, order: np.ndarray | None = None) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the most epochs were reached
            return float(self._model.fit(self._x, self._y).loss_)


Maker = Callable[[], Any]


def jax_contenders(peers_jax: ModuleType, point: Point, backend: str, forms: tuple[str, ...]) -> dict[str, Any]:
    """JAX's contenders by name, not compiled."""
    named = JAX_ALGORITHMS[point.precision] if backend == "cuda" else ("JAX",)
    epochs = epochs_of(point, backend)
    return {
        f"{algorithm.name}, {form.name}": peers_jax.Contender(point.workload, algorithm, form, epochs=epochs)
        for algorithm in peers_jax.ALGORITHMS[point.precision]
        if algorithm.name in named
        for form in peers_jax.FORMS
        if form.name in forms
    }


def makers(
    point: Point, backend: str, arrays: Arrays, modules: dict[str, ModuleType], forms: tuple[str, ...] | None,
    *, ways: bool = False,
) -> Iterator[tuple[str, Maker]]:  # fmt: skip
    """The contenders of a point: names, and functions that make them.  mlpgpu's comes first."""
    workload, epochs = point.workload, epochs_of(point, backend)
    for number, way in enumerate(makers_of_ways(point, backend, arrays)):
        if ways or not number:
            yield way
    if JAX in modules:
        module = modules[JAX]
        made = jax_contenders(module, point, backend, forms or FORMS[JAX, backend])
        if made:
            dtype = next(iter(made.values())).algorithm.dtype
            xs: list[Any] = []  # brought to the device when the first of them is made

            def start(contender: Any) -> Any:
                if not contender.ready.done():
                    contender.compile()
                    contender.ready.set_result(None)
                if not xs:
                    xs.extend(module.on_card(arrays, dtype, workload.scale))
                return contender.start(*xs)

            for name, contender in made.items():
                yield name, partial(start, contender)
    if TORCH in modules:
        of_torch = modules[TORCH]
        tensors: list[Any] = []

        def make(form: Any) -> Any:
            if not tensors:
                tensors.extend(of_torch.on_device(arrays, workload.scale, backend, point.precision))
            count = epochs if form.captured else 1
            return of_torch.Contender(workload, form, point.precision, *tensors, epochs=count)

        for form in torch_forms(of_torch, backend, forms):
            yield f"{TORCH}, {form.name}", partial(make, form)
    if SKLEARN in modules:
        yield SKLEARN, lambda: ScikitLearn(point, arrays, epochs=epochs)


def torch_forms(peers_torch: ModuleType, backend: str, forms: tuple[str, ...] | None) -> list[Any]:
    """PyTorch's forms by name; on the CPU nothing is captured."""
    chosen = [form for form in peers_torch.FORMS if form.name in (forms or FORMS[TORCH, backend])]
    return chosen if backend == "cuda" else [replace(form, captured=False) for form in chosen]
