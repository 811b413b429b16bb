"""The processes of benchmarks/map.py: one measures points, others compile ahead what it will run.

A process reads requests from a pipe and answers them.  If it dies, or takes too long, it is ended, the point that it
was at is recorded as failed, and another one takes its place; so neither a fault of the card nor a crash in a peer's
compiler stops a map.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import map_contenders as contenders
import numpy as np
from counted import thresholds_of
from map_contenders import JAX, OURS, TORCH, Arrays, NotApplicable
from map_points import Point

from mlpgpu import bench
from mlpgpu.backends import Sampling, get_backend
from mlpgpu.backends.cuda import CudaBackend

LOSS_TOLERANCES = {  # relative, of a first epoch's mean loss
    "float64": 1e-6,
    "float32": 1e-4,
    "tf32": 1e-2,
    "bfloat16": 3e-2,
}
REFERENCES = "MLPGPU_MAP_REFERENCES"  # the environment variable that names the folder of steps in float64
ERROR_FLOPS = {"cuda": 4e10, "cpu": 4e9}  # of a step: the most of which one in float64 is affordable
PAUSES = {"cuda": 0.0, "cpu": 0.1}  # before a turn, in which threads of the turn before stop to spin
PEER_PACKAGES = ("torch", "jax", "scikit-learn")


@dataclass(frozen=True)
class Options:
    """How points are measured.

    Attributes:
        libraries: whose contenders are measured; mlpgpu's always.
        forms: the peers' forms, or None for those that have won anywhere.
        profiles: whether each point's costliest launch is found.
        ways: whether mlpgpu is measured in other ways than it chooses as well.
    """

    backend: str
    libraries: tuple[str, ...]
    forms: tuple[str, ...] | None
    rounds: int
    profiles: bool
    ways: bool = False


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


# --- a point ---


def measure(point: Point, options: Options, modules: dict[str, ModuleType]) -> dict[str, Any]:
    """A point's line: each contender's figures or why it failed, ratios, and mlpgpu's costliest launch."""
    started = time.perf_counter()
    workload, backend = point.workload, options.backend
    arrays = workload.arrays()
    order = Sampling(workload.rows, workload.batch_size, seed=0).order(0)
    running: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, list[np.ndarray]] = {}
    is_affordable = workload.flops <= ERROR_FLOPS[backend]
    for name, make in contenders.makers(point, backend, arrays, modules, options.forms, ways=options.ways):
        begun = time.perf_counter()
        try:
            contender = make()
            found[name] = {"loss": contender(order), "peak_bytes": contender.peak_bytes}
            # Of peers' dropouts the masks differ, so that only the step of mlpgpu can be compared.
            is_alike = library_of(name) == OURS or not workload.dropout
            if is_affordable and is_alike and hasattr(contender, "first_step"):
                steps[name] = contender.first_step(order)
        except NotApplicable as refused:
            found[name] = {"left_out": str(refused)}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"failed": first_line(error)}
        else:
            running[name] = contender
            found[name]["made_seconds"] = round(time.perf_counter() - begun, 2)
    line: dict[str, Any] = {"contenders": found}
    made = time.perf_counter()
    try:
        turns = bench.take_turns(running, options.rounds, pause=PAUSES[backend])
        per_step = {
            name: [1e6 * seconds / running[name].epochs / workload.steps for seconds in each]
            for name, each in turns.items()
        }
        for name, each in per_step.items():
            found[name] |= {"microseconds": float(np.median(each)), "fastest": min(each), "slowest": max(each)}
        line |= ratios(per_step)
    except Exception as error:
        traceback.print_exc()
        line["failed"] = first_line(error)
    turned = time.perf_counter()
    for part in (_errors, _costliest):
        try:
            part(point, options, arrays, order, running, steps, line)
        except Exception as error:
            traceback.print_exc()
            line[f"{part.__name__[1:]}_failed"] = first_line(error)
    ended = time.perf_counter()
    line["seconds"] = round(ended - started, 2)
    line["seconds_of"] = {
        "making": round(made - started, 2),
        "turns": round(turned - made, 2),
        "rest": round(ended - turned, 2),
    }
    return line


def _errors(
    point: Point, options: Options, arrays: Arrays, order: np.ndarray, running: dict[str, Any],
    steps: dict[str, list[np.ndarray]], line: dict[str, Any],
) -> None:  # fmt: skip
    if steps:
        expected = kept_reference(point) or contenders.reference(point, arrays, order)
        for name, step in steps.items():
            line["contenders"][name]["error"] = contenders.error_of(step, expected)


def keep_reference(point: Point) -> None:
    """Leave a point's step in float64 for the process that measures, while that has nothing to do."""
    path, workload = _of_reference(point), point.workload
    if path is None or path.exists():
        return
    order = Sampling(workload.rows, workload.batch_size, seed=0).order(0)
    being_made = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(being_made, *contenders.reference(point, workload.arrays(), order))
    being_made.replace(path)


def kept_reference(point: Point) -> list[np.ndarray] | None:
    """What :func:`keep_reference` left, if it did; its file goes."""
    path = _of_reference(point)
    if path is None or not path.exists():
        return None
    with np.load(path) as kept:
        found = [kept[f"arr_{number}"] for number in range(len(kept.files))]
    path.unlink()
    return found


def _of_reference(point: Point) -> Path | None:
    folder = os.environ.get(REFERENCES)
    return Path(folder) / f"{point.seed}-{point.number}.npz" if folder else None


def _costliest(
    point: Point, options: Options, arrays: Arrays, order: np.ndarray, running: dict[str, Any],
    steps: dict[str, list[np.ndarray]], line: dict[str, Any],
) -> None:  # fmt: skip
    if options.profiles and OURS in running:
        line["costliest"] = running[OURS].costliest(point, arrays)


def library_of(contender: str) -> str:
    """The library that a contender is of, by its name: ``"JAX bf16x6, plain scan"`` is JAX's."""
    return contender.partition(",")[0].split()[0]


def ratios(per_step: dict[str, list[float]]) -> dict[str, Any]:
    """How many times as long as mlpgpu each peer's fastest contender takes: the median of the rounds' ratios.

    Of mlpgpu's other ways ``ways`` has each one's ratio.
    """
    if OURS not in per_step:
        return {}
    fastest: dict[str, str] = {}
    ways: dict[str, float] = {}
    for name in sorted(per_step, key=lambda name: float(np.median(per_step[name]))):
        if library_of(name) != OURS:
            fastest.setdefault(library_of(name), name)
        elif name != OURS:
            ways[name.removeprefix(f"{OURS}, ")] = bench.median_ratio(per_step[name], per_step[OURS])
    found = {library: bench.median_ratio(per_step[name], per_step[OURS]) for library, name in fastest.items()}
    line = {"ratios": found, "ratio": min(found.values(), default=None), "fastest": fastest}
    return {**line, "ways": ways} if ways else line


def other_losses(line: dict[str, Any], point: Point) -> list[str]:
    """Contenders that trained to another loss than mlpgpu, where all train in one order and nothing drops out."""
    losses = {name: each["loss"] for name, each in line["contenders"].items() if "loss" in each}
    ours = losses.get(OURS)
    if ours is None or point.workload.dropout:
        return []
    allowed = LOSS_TOLERANCES[point.precision]
    return [name for name, loss in losses.items() if name != "scikit-learn" and not abs(loss / ours - 1) <= allowed]


# --- processes ---


def load(options: Options) -> dict[str, ModuleType]:
    """The peers' modules by library, of those asked for and installed."""
    found = {name: contenders.load(name, options.backend) for name in options.libraries if name != OURS}
    return {name: module for name, module in found.items() if module is not None}


def serve_points(connection: Connection, options: Options) -> None:
    """Measure points one by one; first say what all of them hold for."""
    backend = get_backend(options.backend)
    modules = load(options)
    about = bench.surroundings(backend, PEER_PACKAGES)
    for name in set(options.libraries) - {OURS, *modules}:
        tell(f"{name} is not installed, and left out")
    connection.send(about)
    while (point := connection.recv()) is not None:
        line = measure(point, options, modules)
        line["other_losses"] = other_losses(line, point)
        gc.collect()
        for name in set(modules) & {JAX, TORCH}:
            modules[name].forget()
        connection.send((line, _is_healthy(backend)))


def _is_healthy(backend: Any) -> bool:
    """Whether the card still answers this process, which after a fault in a kernel it does not."""
    try:
        if isinstance(backend, CudaBackend):
            with backend.device:
                return bool(backend.device.free_bytes)
    except Exception:
        return False
    return True


def serve_compiles(connection: Connection, options: Options, library: str, threads: int) -> None:
    """Compile what a library needs for points, into its cache; answers why points failed, by name.

    A request has points, and after how many seconds none of them is begun any more.
    """
    module = None if library == OURS else contenders.load(library, options.backend)
    connection.send(None)
    while True:
        points, seconds = connection.recv()
        end = time.perf_counter() + seconds
        with ThreadPoolExecutor(threads) as pool:
            jobs = {point.name: pool.submit(_compile, library, module, point, options, end) for point in points}
        connection.send({name: first_line(e) for name, job in jobs.items() if (e := job.exception()) is not None})
        if module is not None and library == JAX:
            module.forget()
        gc.collect()  # a program on the card may be part of a cycle


def _compile(library: str, module: Any, point: Point, options: Options, end: float) -> None:
    workload = point.workload
    if time.perf_counter() > end:
        return
    if library == JAX:
        is_affordable = workload.flops <= ERROR_FLOPS[options.backend] and not workload.dropout
        forms = options.forms or contenders.FORMS[JAX, options.backend]
        for contender in contenders.jax_contenders(module, point, options.backend, forms).values():
            contender.compile()
            if is_affordable:
                contender.compile_step()
        return
    few = replace(workload, rows=2 * workload.batch_size)
    arrays = few.arrays()
    if library == OURS:
        if workload.flops <= ERROR_FLOPS[options.backend]:
            keep_reference(point)
        # No step runs on the card, since JAX's compiler measures kernels on the card meanwhile.
        for changed in ({}, *(contenders.WAYS.values() if options.ways else ())):
            with thresholds_of(changed):
                bench.Epochs(few.trainer(backend=options.backend, precision=point.precision), few.dataset(arrays))
    else:
        x, y = module.on_device(arrays, few.scale, options.backend, point.precision)
        for form in contenders.torch_forms(module, options.backend, options.forms):
            module.Contender(few, form, point.precision, x, y)()
        module.forget()


class ProcessLost(Exception):
    """A process ended, or was ended because it took too long."""


class Process:
    """A process that answers requests; it is started when it is made, and ready when it first answers."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far, *arguments), daemon=True)
        self._process.start()
        far.close()  # the process has a copy; while this one is open, the end of the process would not be noticed

    def receive(self, seconds: float) -> Any:
        """Wait for an answer.

        Raises:
            ProcessLost: there is none after so many seconds, or the process ended.
        """
        try:
            if self._connection.poll(max(0.0, seconds)):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise ProcessLost(f"its process ended with status {self._process.exitcode}") from None
        self.close()
        raise ProcessLost(f"no answer after {seconds:.0f} s")

    def ask(self, request: Any, seconds: float) -> Any:
        """Send a request and wait for the answer, as :meth:`receive` does."""
        try:
            self._connection.send(request)
        except OSError:
            raise ProcessLost("its process had ended") from None
        return self.receive(seconds)

    def close(self) -> None:
        """End it, wherever it is."""
        self._process.kill()
        self._process.join()


class Compilers:
    """Processes that compile points ahead: one of many threads for JAX, and several for each other library.

    XLA measures kernels on the card while it compiles, behind a lock of its process: several processes would disturb
    each other's measurements, and JAX would be measured with kernels badly chosen.
    """

    START_SECONDS, POINT_SECONDS = 120.0, 300.0
    LAST_SECONDS = 60.0  # for what was begun before the time was over

    def __init__(self, options: Options, libraries: Sequence[str], tell: Callable[[str], object]) -> None:
        self._options, self._tell = options, tell
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        is_cuda = options.backend == "cuda"
        shares = {JAX: (1, cores), OURS: (max(1, cores // 2), 1) if is_cuda else (0, 1), TORCH: (max(1, cores // 2), 1)}
        self._plans = [(library, *shares[library]) for library in libraries if shares.get(library, (0, 0))[0]]
        self._processes: dict[tuple[str, int], Process] = {}

    def compile(self, points: Sequence[Point], deadline: float) -> None:
        """Compile for points until ``deadline``, a time of ``time.perf_counter``; what fails is told."""
        with ThreadPoolExecutor(max(1, sum(count for _, count, _ in self._plans))) as pool:
            jobs = []
            for library, count, threads in self._plans:
                waiting = [list(points)] if threads > 1 else [[point] for point in points]
                jobs += [pool.submit(self._work, library, place, threads, waiting, deadline) for place in range(count)]
            for job in jobs:
                job.result()

    def _work(self, library: str, place: int, threads: int, waiting: list[list[Point]], deadline: float) -> None:
        """Have one process compile what waits, which others of its library take from as well."""
        while True:
            left = deadline - time.perf_counter()
            try:
                points = waiting.pop(0)
            except IndexError:
                return
            if left <= 0:
                return
            limit = min(left, self.POINT_SECONDS * (1 if threads == 1 else max(1, len(points) / threads)))
            try:
                process = self._processes.get((library, place))
                if process is None:
                    process = Process(serve_compiles, self._options, library, threads)
                    self._processes[library, place] = process
                    process.receive(min(left, self.START_SECONDS))
                for name, failure in process.ask((points, limit), limit + self.LAST_SECONDS).items():
                    self._tell(f"{name}: {library} cannot be compiled: {failure}")
            except ProcessLost as lost:
                self._processes.pop((library, place)).close()
                self._tell(f"compiling {library} for {', '.join(point.name for point in points[:3])}: {lost}")

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


class Measurer:
    """The process that measures, started anew where it is lost or the card does not answer it any more."""

    START_SECONDS = 240.0

    def __init__(self, options: Options, most_seconds: float) -> None:
        self._options, self._most_seconds = options, most_seconds
        self._process: Process | None = None
        self.surroundings: dict[str, Any] = {}  # of the process that began last
        self._is_new = False
        self.begin()

    def begin(self) -> None:
        """Start the process, without waiting for it."""
        self._process, self._is_new = Process(serve_points, self._options), True

    def about(self) -> dict[str, Any]:
        """What all lines hold for.

        Raises:
            ProcessLost: the process cannot begin.
        """
        if self._is_new:
            assert self._process is not None
            self.surroundings = self._process.receive(self.START_SECONDS)
            self._is_new = False
        return self.surroundings

    def measure(self, point: Point) -> dict[str, Any]:
        """A point's line, which says what failed if anything did."""
        try:
            if self._process is None:
                self.begin()
            self.about()
            assert self._process is not None
            line, is_healthy = self._process.ask(point, self._most_seconds)
        except ProcessLost as lost:
            self.close()
            return {"contenders": {}, "failed": str(lost)}
        if not is_healthy:
            self.close()
        return dict(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None


def tell(message: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {message}", file=sys.stderr, flush=True)


STARTED = time.perf_counter()
