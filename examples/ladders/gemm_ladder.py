"""The matrix product, rung by rung: each kernel of gemm_ladder.cuh, then mlpgpu's own, beside cuBLAS and a serial loop.

Every product is checked against NumPy in float64 before it is timed.  For each rung and size it prints GFLOP/s
(2 m n k / T), how many times as fast as the loop of gemm_serial.c it is, the relative error by Frobenius norms over the
checked rows, and its percentage of cuBLAS (where PyTorch is installed) and of the card's limit: the measured rate of
float32 multiply-adds, and for a plan's product on tensor cores what `explain` takes them to do.  docs/ladder.md walks
through the kernels.

    python examples/ladders/gemm_ladder.py [--quick] [--most-seconds S] [--json PATH] [--picture PATH]
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ladder import FOLDER, command_line, compiled, cuda, draw_rungs, kept, save
from matplotlib.figure import Figure

import mlpgpu as mg
from mlpgpu.backends import State
from mlpgpu.backends.cuda import CudaBackend, kernels
from mlpgpu.backends.cuda.kernels import Entry, SimtTile, arguments, ceil_div
from mlpgpu.backends.cuda.profile.costs import speed_of
from mlpgpu.backends.cuda.profile.peak_rates import PeakRates, measure_peak_rates
from mlpgpu.backends.cuda.profile.probe import Probe, TimedLaunch
from mlpgpu.backends.cuda.profile.workbench import Workbench
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.backends.cuda.select.tiles import simt_tile
from mlpgpu.bench import PRECISIONS, json_lines, surroundings
from mlpgpu.errors import MlpgpuError

try:
    import torch
except ImportError:
    torch = None

SQUARES = [(n, n, n) for n in (500, 1000, 2000, 3000, 5000, 7500, 10_000, 15_000)]
LAYER = (8192, 4096, 4096)  # a layer of the largest network of benchmarks/peers.py, forward
RECTANGLES = [(15_000, 15_000, k) for k in (32, 64, 128)]
QUICK = [(n, n, n) for n in (500, 1000, 2000)] + [(2000, 2000, 32)]
ODD = (259, 131, 197)  # no multiple of a tile along any axis: checked first, and not timed
CHECKED_ROWS = 64
MOST_SECONDS = 2.0  # a run that would take longer is left out, unless an option says otherwise
SERIAL_MOST_FLOPS = 2 * 1000**3  # what is more is taken from the loop's rate at the largest that is not
CUBLAS_SECONDS = 0.05
EPS32 = float(np.finfo(np.float32).eps)
OPERAND_EPS = {"float32": 0.0, "tf32": 2.0**-10, "bfloat16": 2.0**-8}  # of the operands, as a precision rounds them


# --- the rungs ---

WARP, TILE, BLOCK = 32, 32, 128
BLOCK_SHARED_BYTES = 4 * 2 * 8 * (BLOCK + 4)  # a slice of A and one of B
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Rung:
    """A kernel of gemm_ladder.cuh, its grid for an m by n product, and whether it takes B in panels."""

    name: str
    entry: Entry
    grid: Callable[[int, int], Grid]
    in_panels: bool = False


def _rung(
    function: str,
    grid: Callable[[int, int], Grid],
    *,
    threads: int = 256,
    shared_bytes: int = 0,
    blocks: int = 1,
    in_panels: bool = False,
) -> Rung:
    signature = arguments("const float* a, const float* b, float* c, int m, int n, int k")
    entry = Entry(
        f"{function}_rung", "gemm_ladder.cuh", function, signature, threads, shared_bytes, blocks=blocks, block=None
    )  # fmt: skip
    return Rung(function.removeprefix("gemm_").replace("_", " "), entry, grid, in_panels)


def _lines(m: int, n: int) -> Grid:
    return ceil_div(n, 256), m, 1


def _blocks(m: int, n: int) -> Grid:
    return ceil_div(n, BLOCK), ceil_div(m, BLOCK), 1


RUNGS = (
    _rung("gemm_naive", lambda m, n: (ceil_div(m, 256), n, 1)),
    _rung("gemm_coalesced", _lines),
    _rung("gemm_panels", _lines, in_panels=True),
    _rung("gemm_shared_row", _lines, shared_bytes=4 * 256),
    _rung("gemm_reduction", lambda m, n: (n, m, 1), shared_bytes=4 * WARP),
    _rung(
        "gemm_shared_tiles",
        lambda m, n: (ceil_div(n, TILE), ceil_div(m, TILE), 1),
        threads=TILE * TILE,
        shared_bytes=4 * 2 * TILE * TILE,
    ),
    _rung("gemm_register_tiles", _blocks, shared_bytes=BLOCK_SHARED_BYTES, blocks=2),
    _rung("gemm_double_buffered", _blocks, shared_bytes=2 * BLOCK_SHARED_BYTES, blocks=2),
)
OTHER_ORDER = {"reduction"}  # rungs that do not sum over ascending k


def panels(b: np.ndarray) -> np.ndarray:
    """B (k, n) as panels (n / 32, k, 32), the last one filled up with zeros."""
    k, n = b.shape
    padded = np.zeros((k, WARP * ceil_div(n, WARP)), b.dtype)
    padded[:, :n] = b
    return np.ascontiguousarray(padded.reshape(k, -1, WARP).transpose(1, 0, 2))


def of_table(tile: SimtTile) -> Entry:
    """mlpgpu's product on plain cores, from its own table: a dense layer without a bias."""
    return kernels.dense_forward("identity", tile)


def table_values(a: Any, b: Any, c: Any, step: Any, n: int, k: int) -> dict[str, Any]:
    """Its arguments; ``step`` says how many rows there are."""
    rows = {"step": step, "shard": 0, "shards": 1, "order": None}
    return {**rows, "x": a, "w": b, "b": None, "z": None, "y": c, "kept": None, "keep": 1.0, "k": k, "n": n}


def step_of(m: int) -> np.ndarray:
    """A step of m rows."""
    return np.array([(0, 0, 0, m, m)], STEP)


# --- what is multiplied ---


@dataclass(frozen=True)
class Problem:
    """Matrices of normal values, and some rows of their product in float64."""

    a: np.ndarray  # (m, k) float32
    b: np.ndarray  # (k, n) float32
    rows: np.ndarray  # numbers of the rows that are checked
    product: np.ndarray  # (rows, n)
    magnitude: np.ndarray  # (rows, n): the product of absolute values

    @classmethod
    def random(cls, m: int, n: int, k: int) -> Problem:
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
        rows = np.unique(np.linspace(0, m - 1, CHECKED_ROWS).astype(int))
        wide_a, wide_b = a[rows].astype(np.float64), b.astype(np.float64)
        return cls(a, b, rows, wide_a @ wide_b, abs(wide_a) @ abs(wide_b))

    @property
    def size(self) -> tuple[int, int, int]:
        return len(self.a), self.b.shape[1], len(self.b)

    @property
    def flops(self) -> int:
        m, n, k = self.size
        return 2 * m * n * k

    def error(self, what: str, rows: np.ndarray, is_finite: bool, precision: str = "float32") -> float:
        """The relative error of those rows of a product, all of which ``is_finite`` or not.

        Raises:
            SystemExit: an element is not finite, or further off than k roundings of the sum, and those of the
                operands, explain.
        """
        difference = abs(rows - self.product)
        bound = (len(self.b) * EPS32 + 2 * OPERAND_EPS[precision]) * self.magnitude
        if not (difference <= bound).all() or not is_finite:
            sys.exit(f"{what}, {self.size}: wrong by up to {difference.max()}, where {bound.max()} is explained")
        return float(np.linalg.norm(difference) / np.linalg.norm(self.product))

    def error_of(self, what: str, c: np.ndarray, precision: str = "float32") -> float:
        """The relative error of a product (m, n) that the host has."""
        return self.error(what, c[self.rows], bool(np.isfinite(c).all()), precision)


@dataclass(frozen=True)
class Result:
    """A rung at a size; a line of JSON, beside the surroundings.  Where ``left_out`` tells why, it was not timed."""

    rung: str
    m: int
    n: int
    k: int
    kernel: str = ""
    seconds: float | None = None
    gflops: float | None = None
    speedup: float | None = None
    error: float | None = None
    of_cublas: float | None = None
    of_limit: float | None = None
    left_out: str = ""


# --- measuring ---


class Serial:
    """The loop of gemm_serial.c, compiled; its seconds for a product, from its rate where that is long."""

    def __init__(self, folder: Path) -> None:
        self._multiply = compiled("gemm_serial.c", folder).multiply
        floats = np.ctypeslib.ndpointer(np.float32, flags="C")
        self._multiply.argtypes = [*[ctypes.c_int] * 3, *[floats] * 3]
        self._multiply.restype = None
        self._rate = 0.0

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        c = np.empty((len(a), b.shape[1]), np.float32)
        self._multiply(len(a), b.shape[1], len(b), a, b, c)
        return c

    def seconds(self, problem: Problem) -> float:
        if problem.flops <= SERIAL_MOST_FLOPS or not self._rate:
            started = time.perf_counter()
            c = self.multiply(problem.a, problem.b)
            self._rate = problem.flops / (time.perf_counter() - started)
            problem.error_of("the serial loop", c)
        return problem.flops / self._rate


def own_rungs(bench: Workbench, problem: Problem) -> Iterator[tuple[str, str, Callable[[], float], int]]:
    """Each kernel's rung and name, what checks and times it, and where C is."""
    m, n, k = problem.size
    a, b, b_panels = bench.array(problem.a), bench.array(problem.b), bench.array(panels(problem.b))
    c, step = bench.empty(4 * m * n), bench.array(step_of(m))

    def timed(entry: Entry, grid: Grid, values: Mapping[str, Any]) -> Callable[[], float]:
        def run() -> float:
            bench.poison(c, 4 * m * n)
            return bench.seconds(lambda: bench.put(entry, grid, values))

        return run

    sizes = {"c": c, "m": m, "n": n, "k": k}
    for rung in RUNGS:
        values = {"a": a, "b": b_panels if rung.in_panels else b, **sizes}
        yield rung.name, rung.entry.name, timed(rung.entry, rung.grid(m, n), values), c
    tile, _ = simt_tile(m, n, bench.device.multiprocessors)
    yield (
        "mlpgpu, plain cores",
        of_table(tile).name,
        timed(of_table(tile), tile.grid(m, n), table_values(a, b, c, step, n, k)),
        c,
    )


def planned(
    backend: CudaBackend, rates: PeakRates, problem: Problem, precision: str
) -> tuple[TimedLaunch, float, float]:
    """The product as a plan of that precision makes it: its launch as `explain` has it, its seconds, and its error."""
    m, n, k = problem.size
    network = mg.Network([mg.Dense(k, n, bias=False)], seed=0)
    state = State(problem.b.reshape(1, -1), np.empty((0, 1, k * n), np.float32), np.empty((1, 0), np.float32))
    plan = network.lower(capacity=m, precision=precision)
    probe = Probe(plan, backend.device, lambda program: program.load(state), mg.Dataset(problem.a))
    error = problem.error_of(f"mlpgpu, {precision}", probe.predicted, precision)
    with backend.device:
        products = [each for each in probe.launches(rates) if each.flops]
    return products[0], sum(each.seconds for each in products), error


def cublas(problem: Problem, a: Any, b: Any, precision: str) -> tuple[float, float]:
    """PyTorch's product of matrices that are on its device: its seconds, and its error."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = a.to(dtype), b.to(dtype)
    out = torch.empty(len(a), b.shape[1], device="cuda", dtype=dtype)

    def seconds(repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / repeats

    seconds(2)
    repeats = max(1, int(CUBLAS_SECONDS / seconds(1)))
    found = sorted(seconds(repeats) for _ in range(3))[1]
    rows = out[torch.from_numpy(problem.rows).cuda()].float().cpu().numpy()
    return found, problem.error(f"cuBLAS, {precision}", rows, bool(out.isfinite().all()), precision)


class Climb:
    """One size after another: each rung at each of them, unless it would take too long."""

    def __init__(
        self,
        backend: CudaBackend,
        bench: Workbench,
        serial: Serial,
        rates: PeakRates,
        most_seconds: float = MOST_SECONDS,
    ) -> None:
        self._backend, self._bench, self._serial, self._rates_of_card = backend, bench, serial, rates
        self._most_seconds = most_seconds
        self._rates: dict[str, float] = {}  # by rung, of the size before
        self.results: list[Result] = []

    def check(self, size: tuple[int, int, int]) -> None:
        """Each kernel of the ladder at a size, untimed."""
        problem = Problem.random(*size)
        for name, _, run, c in own_rungs(self._bench, problem):
            run()
            self._error(name, problem, c)
        self._bench.clear()

    def at(self, size: tuple[int, int, int]) -> None:
        """All rungs at a size; results are printed as they come."""
        problem = Problem.random(*size)
        self._serial_seconds = self._serial.seconds(problem)
        print("\nm, n, k = {:,}, {:,}, {:,}".format(*size))
        print(f"{'':26}{'GFLOP/s':>12}{'speed-up':>12}{'error':>10}{'of cuBLAS':>11}{'of limit':>10}")
        theirs: dict[str, float] = {}
        if torch:
            a, b = (torch.from_numpy(array).cuda() for array in (problem.a, problem.b))
            for precision in PRECISIONS:
                theirs[precision], error = cublas(problem, a, b, precision)
                self._add(problem, f"cuBLAS, {precision}", "", theirs[precision], error, theirs[precision])
            del a, b
            torch.cuda.empty_cache()
        self._add(problem, "serial loop", "", self._serial_seconds, None, None)
        for name, kernel, run, c in own_rungs(self._bench, problem):
            expected = problem.flops / self._rates[name] if name in self._rates else 0.0
            if expected > self._most_seconds:
                self._leave_out(problem, name, f"would take about {expected:.0f} s")
                continue
            seconds = run()
            error = self._error(name, problem, c)
            self._rates[name] = problem.flops / seconds
            self._add(problem, name, kernel, seconds, error, theirs.get("float32"))
        self._bench.clear()
        for precision in PRECISIONS:
            gc.collect()  # the memory of the program before is the next one's
            name = f"mlpgpu, {precision}"
            try:
                timed, seconds, error = planned(self._backend, self._rates_of_card, problem, precision)
            except MlpgpuError as refused:
                self._leave_out(problem, name, str(refused))
            else:
                kernel, speed = timed.launch.entry.name, speed_of(timed.launch)
                self._add(problem, name, kernel, seconds, error, theirs.get(precision), speed)

    def _error(self, name: str, problem: Problem, c: int) -> float:
        """Of a product on the card, of which the host sees the rows that are checked."""
        m, n, _ = problem.size
        rows = np.stack([self._bench.read(c + 4 * n * int(row), (n,)) for row in problem.rows])
        return problem.error(name, rows, self._bench.is_finite(c, m * n))

    def _add(
        self,
        problem: Problem,
        name: str,
        kernel: str,
        seconds: float,
        error: float | None,
        theirs: float | None,
        speed: float = 1.0,
    ) -> None:
        """``theirs`` are cuBLAS's seconds; the kernel's multiply-adds may be ``speed`` times as fast as plain ones."""
        gflops = 1e-9 * problem.flops / seconds
        speedup = self._serial_seconds / seconds
        of_cublas = theirs / seconds if theirs else None
        of_limit = 1e9 * gflops / (self._rates_of_card.computed * speed)
        self.results.append(
            Result(name, *problem.size, kernel, seconds, gflops, speedup, error, of_cublas, of_limit)
        )  # fmt: skip
        shown = ("" if error is None else f"{error:.1e}", "" if of_cublas is None else f"{of_cublas:.1%}")
        print(f"{name:26}{gflops:12,.1f}{speedup:12,.1f}{shown[0]:>10}{shown[1]:>11}{of_limit:10.1%}")

    def _leave_out(self, problem: Problem, name: str, why: str) -> None:
        self.results.append(Result(name, *problem.size, left_out=why))
        print(f"{name:26}left out: {why}")


# --- the picture ---


def draw(results: Sequence[Result], path: Path) -> None:
    """GFLOP/s by size: square matrices, and flat ones by k."""
    timed = [result for result in results if result.gflops is not None]
    names = dict.fromkeys(result.rung for result in timed)
    squares = [result for result in timed if result.m == result.n == result.k]
    flat = [result for result in timed if result.k < result.m == result.n]
    panels = {"m = n = k": squares}
    if flat:
        panels[f"k, at m = n = {flat[0].m:,}"] = flat
    figure = Figure(figsize=(11, 6), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, own) in zip(all_axes, panels.items(), strict=True):
        draw_rungs(axes, label, {name: [(r.k, r.gflops or 0.0) for r in own if r.rung == name] for name in names})
    figure.axes[0].set_ylabel("GFLOP/s")
    save(figure, path)


def main() -> None:
    parser = command_line("Climb the ladder of matrix products on a GPU.", "gemm_ladder.png")
    parser.add_argument("--most-seconds", type=float, default=MOST_SECONDS, help="of a run (default: %(default)s)")
    options = parser.parse_args()
    if options.only_draw:
        draw(kept(options.json, Result), options.picture)
        return
    backend = cuda()
    with backend.device as device, tempfile.TemporaryDirectory() as folder:
        rates = measure_peak_rates(device)
        print(f"{device.name}: {rates.computed / 1e12:.1f} TFLOP/s of float32 multiply-adds; cuBLAS:", end=" ")
        print(f"PyTorch {torch.__version__}" if torch else "left out, PyTorch is not installed")
        bench = Workbench(device, [*(rung.entry for rung in RUNGS), *map(of_table, kernels.TILES)], FOLDER)
        climb = Climb(backend, bench, Serial(Path(folder)), rates, options.most_seconds)
        climb.check(ODD)
        about = {**surroundings(backend, ("torch",)), "limit_gflops": rates.computed / 1e9, "quick": options.quick}
        for size in QUICK if options.quick else [*SQUARES, LAYER, *RECTANGLES]:
            climb.at(size)
            if options.json:
                options.json.write_text(json_lines(climb.results, about), encoding="utf-8")
    draw(climb.results, options.picture)


if __name__ == "__main__":
    main()
