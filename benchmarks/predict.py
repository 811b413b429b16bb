"""Predictions: mlpgpu beside scikit-learn, PyTorch, ONNX Runtime and JAX, whichever of them are installed.

Each task is a network, a type of inputs and a number of rows, from host to host or, on a card, of data that lie there
(predict_peers.py has the forms).  A library has a process for each network and each number of threads, so that the
threads of one do not spin in another's turn.  Before anything is timed, all results are compared with float64: one that
errs by more than float32 arithmetic can ends the run.  Then the contenders take turns, round by round; each call is
timed to its end, and figures are the median and the 99th percentile of the calls of all rounds.

    python benchmarks/predict.py [--backend cpu cuda] [--rows N ...] [--random N --seed S] [--only NAME ...]
                                 [--json PATH] [--picture PATH] [--quick]

writes a line of JSON for each contender and task; benchmarks/report.py makes tables and a picture of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import predict_peers as peers
from plain_environment import begin_without_limits
from predict_peers import BYTE, LIBRARIES, OURS, Network, Task

from mlpgpu import bench, text
from mlpgpu.backends.cpu import available_cores
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.errors import MlpgpuError

try:
    import report
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "matplotlib":
        raise
    report = None  # type: ignore[assignment]

NETWORKS = (Network((784, 128, 10)), Network((784, 1024, 1024, 10)), Network((20, 64, 64, 2)))
DTYPES = ("float32", "uint8")
ROWS = {"cpu": (1, 32, 1000, 20_000, 60_000), "cuda": (1, 32, 1000, 60_000)}
PLACES = {"cpu": ("host",), "cuda": ("host", "card")}
PLACE_NAMES = {"host": "host to host", "card": "evaluated on the card"}
ROUNDS, MOST_CALLS, WARM_CALLS = 7, 500, 2
TURN_SECONDS = 0.03  # about what a turn takes, unless one call takes longer
PAUSE = {"cpu": 0.1, "cuda": 0.0}  # seconds between turns, in which the threads of the turn before stop spinning
NETWORKS_AT_ONCE = {"cpu": 1, "cuda": 4}  # whose processes stand side by side; they compile at the same time
RANDOM_SIZES, RANDOM_INPUTS, RANDOM_OUTPUTS, RANDOM_ROWS = (16, 2048), (1, 1000), (2, 100), (1, 60_000)

UNIT = 2.0**-24  # of float32
PRODUCT = 2.0**-21  # what "float32" promises of short products, of |A| |B| (docs/mathematics.md)
DEVIATIONS = 8.0  # an error of as many standard deviations is none of rounding


def progress(message: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {message}", file=sys.stderr, flush=True)


STARTED = time.perf_counter()


# --- what is right ---


@dataclass(frozen=True)
class Reference:
    """Results of a task in float64, and how far float32 arithmetic may be from them.

    A product of n terms with its bias errs, in units of |x| |W| + |b|, by a standard deviation of at most u √(n + 3)
    where its roundings are independent (Higham and Mary, 2019), or by what "float32" promises where that is more.
    Variances pass a layer by the squares of its weights, and an activation, whose slope is at most 1, unchanged.
    A softmax turns errors of d in its logits into relative ones of exp(2 d) - 1.
    """

    probabilities: np.ndarray  # (BASE_ROWS, n_out)
    probability_bounds: np.ndarray
    losses: np.ndarray  # (BASE_ROWS,)
    loss_bounds: np.ndarray
    hits: np.ndarray  # (BASE_ROWS,), 1.0 where the label is the largest logit
    is_near: np.ndarray  # (BASE_ROWS,), whether rounding may change that

    @classmethod
    def of(cls, task: Task) -> Reference:
        h, variance = task.base.astype(np.float64), np.zeros(task.base.shape)
        if task.dtype == "uint8":
            h *= BYTE
        layers = [(w.astype(np.float64), b.astype(np.float64)) for w, b in task.network.layers]
        for place, (w, b) in enumerate(layers):
            deviation = max(PRODUCT, UNIT * np.sqrt(len(w) + 3)) * (np.abs(h) @ np.abs(w) + np.abs(b))
            h, variance = h @ w + b, variance @ w**2 + deviation**2
            if place < len(layers) - 1 and task.network.activation == "relu":
                h = np.maximum(h, 0.0)
            elif place < len(layers) - 1:
                h = np.tanh(h) if task.network.activation == "tanh" else 1.0 / (1.0 + np.exp(-h))
                variance += (8.0 * UNIT) ** 2
        bounds = DEVIATIONS * np.sqrt(variance)
        shifted = h - h.max(axis=1, keepdims=True)
        exponentials = np.exp(shifted)
        sums = exponentials.sum(axis=1, keepdims=True)
        p, worst = exponentials / sums, bounds.max(axis=1, keepdims=True)
        roundings = (4.0 * np.abs(shifted) + p.shape[1] + 16.0) * UNIT
        labels, rows = task.base_labels, np.arange(len(h))
        losses = np.log(sums[:, 0]) - shifted[rows, labels]
        ordered = np.sort(h, axis=1)
        return cls(
            probabilities=p,
            probability_bounds=p * np.expm1(2.0 * worst + roundings) + np.finfo(np.float32).tiny,
            losses=losses,
            loss_bounds=2.0 * worst[:, 0] + roundings.max(axis=1) * (1.0 + losses),
            hits=(h.argmax(axis=1) == labels).astype(np.float64),
            is_near=ordered[:, -1] - ordered[:, -2] <= 2.0 * worst[:, 0],
        )

    def excess(self, task: Task, found: np.ndarray) -> float:
        """The largest error over its bound: at most 1 where all is well, else more, or NaN."""
        index = task.index
        if task.place == "host":
            if found.shape != self.probabilities[index].shape:
                return np.inf
            return float(np.max(np.abs(found - self.probabilities[index]) / self.probability_bounds[index]))
        mean, sums = self.losses[index].mean(), DEVIATIONS * UNIT * np.sqrt(task.rows)
        loss = abs(found[0] - mean) / (self.loss_bounds[index].mean() + (1.0 + sums) * UNIT * mean + sums * mean)
        hits = abs(found[1] - self.hits[index].mean()) / (self.is_near[index].mean() + DEVIATIONS * UNIT)
        return float(np.max([loss, hits]))


# --- processes ---


@dataclass(frozen=True)
class Key:
    """A process: a library, the network that it predicts by, and its threads."""

    library: str
    network: Network
    threads: int


def serve(key: Key, connection: Connection) -> None:
    """Makes all forms of the tasks that it is sent, answers with their results, then times those that it is told to.

    An answer has a result for each (task, form), or why there is none; a form of a task is then asked for as
    (task, form, seconds), and answered by the seconds of calls.
    """
    runs: dict[tuple[Task, str], peers.Run] = {}
    answer: list[tuple[Task, str, np.ndarray | str]] = []
    for task in connection.recv():
        forms = LIBRARIES[key.library].forms(task)
        while True:
            name = "all"
            try:
                found = next(forms, None)
                if found is None:
                    break
                name, make = found
                run = make()
                answer.append((task, name, np.array(run(), np.float64)))
                runs[task, name] = run
            except Exception as error:
                if name == "all" and not any(form == "all" for _, form, _ in answer):
                    traceback.print_exc()
                answer.append((task, name, f"{type(error).__name__}: {error}".splitlines()[0]))
    connection.send(answer)
    while asked := connection.recv():
        task, name, seconds = asked
        connection.send(timed(runs[task, name], seconds))


def timed(run: peers.Run, seconds: float) -> list[float]:
    """Seconds of each of some calls, which together take about ``seconds``."""
    for _ in range(WARM_CALLS):
        started = time.perf_counter()
        run()
        last = time.perf_counter() - started
        if last > seconds:  # one is enough to warm up
            break
    found = []
    for _ in range(min(MOST_CALLS, max(1, round(seconds / last)))):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return found


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside the block these variables are set, for the processes that are started there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Process:
    """A contender's process; ``answers`` are what it made of its tasks."""

    def __init__(self, key: Key, backend: str, tasks: Sequence[Task]) -> None:
        context = multiprocessing.get_context("spawn")
        self.key = key
        self._near, far = context.Pipe()
        self._process: BaseProcess = context.Process(target=serve, args=(key, far), daemon=True)
        with environment({} if key.library == OURS else peers.environment(backend, key.threads)):
            self._process.start()
        far.close()  # the process has a copy; while this one is open, the end of the process would not be noticed
        self._near.send([replace(task, threads=key.threads) for task in tasks])

    def answers(self) -> list[tuple[Task, str, np.ndarray | str]]:
        try:
            found: list[tuple[Task, str, np.ndarray | str]] = self._near.recv()
        except EOFError:
            progress(f"the process of {self.key.library} for {self.key.network.name} ended")
            return []
        return found

    def turn(self, task: Task, form: str, seconds: float) -> list[float]:
        """Seconds of its calls; none if its process has ended."""
        try:
            self._near.send((task, form, seconds))
            found: list[float] = self._near.recv()
        except (EOFError, OSError):
            progress(f"the process of {self.key.library} for {self.key.network.name} ended in {form}")
            return []
        return found

    def close(self) -> None:
        with suppress(OSError):  # it has ended before
            self._near.send(None)
        self._process.join()


# --- turns ---


@dataclass(frozen=True)
class Result:
    """A contender on a task; with the surroundings it is a line of JSON.

    Attributes:
        contender, form, threads: a library, which of its forms, and its threads on the CPU.
        microseconds, p99: of a call, the median and the 99th percentile of all.
        excess: the largest error over what float32 arithmetic allows for.
    """

    backend: str
    network: str
    dtype: str
    rows: int
    place: str
    contender: str
    form: str
    threads: int
    microseconds: float
    p99: float
    fastest: float
    calls: int
    rounds: int
    excess: float


def keys_of(backend: str, network: Network, names: Sequence[str]) -> list[Key]:
    """The processes of a network: ours and, on the CPU, each peer's with one thread and with all."""
    cores = available_cores()
    found = []
    for name in names:
        several = backend == "cpu" and name != OURS
        found += [Key(name, network, threads) for threads in sorted({1, cores} if several else {cores})]
    return found


def measure(
    tasks: Sequence[Task], names: Sequence[str], rounds: int, seconds: float, keep: Callable[[list[Result]], None]
) -> list[Result]:
    """Everyone's results on tasks of one backend; ``keep`` is called with those so far after each task.

    Raises:
        SystemExit: a contender's result is wrong.
    """
    backend = tasks[0].backend
    networks = list(dict.fromkeys(task.network for task in tasks))
    processes = [
        Process(key, backend, [task for task in tasks if task.network == network])
        for network in networks
        for key in keys_of(backend, network, names)
    ]
    try:
        contenders: dict[tuple[Process, Task, str], float] = {}
        references: dict[Task, Reference] = {}
        for process in processes:
            for task, form, found in process.answers():
                where = f"{process.key.library}, {form}: {task.network.name}, {task.dtype}, {task.rows:,} rows"
                if isinstance(found, str):
                    progress(f"{where}, {PLACE_NAMES[task.place]} left out: {found}")
                    continue
                alike = replace(task, rows=1, place="host", threads=0)
                if alike not in references:
                    references[alike] = Reference.of(alike)
                excess = references[alike].excess(task, found)
                if not excess <= 1.0:
                    sys.exit(f"{where}: expected errors within rounding's bound, got {excess:.3g} times the bound")
                contenders[process, task, form] = excess
            progress(f"{process.key.library}, {process.key.network.name}, {process.key.threads} threads: made")
        seconds_of: dict[tuple[Process, Task, str], list[float]] = {each: [] for each in contenders}
        for task in tasks:
            turns = [each for each in contenders if replace(each[1], threads=task.threads) == task]
            for _ in range(rounds):
                last = None
                for process, own, form in turns:
                    if process is not last:
                        time.sleep(PAUSE[backend])
                    last = process
                    seconds_of[process, own, form] += process.turn(own, form, seconds)
            keep(results_of(seconds_of, contenders, rounds))
            progress(f"{task.network.name}, {task.dtype}, {task.rows:,} rows, {PLACE_NAMES[task.place]}: timed")
    finally:
        for process in processes:
            process.close()
    return results_of(seconds_of, contenders, rounds)


Contender = tuple[Process, Task, str]  # and a form


def results_of(
    seconds_of: Mapping[Contender, Sequence[float]], excesses: Mapping[Contender, float], rounds: int
) -> list[Result]:
    """The results of those that were timed."""
    return [
        Result(
            backend=task.backend,
            network=task.network.name,
            dtype=task.dtype,
            rows=task.rows,
            place=task.place,
            contender=process.key.library,
            form=form,
            threads=process.key.threads,
            microseconds=1e6 * statistics.median(taken),
            p99=1e6 * float(np.percentile(taken, 99)),
            fastest=1e6 * min(taken),
            calls=len(taken),
            rounds=rounds,
            excess=excesses[process, task, form],
        )
        for (process, task, form), taken in seconds_of.items()
        if taken
    ]


# --- all of it ---


def random_tasks(count: int, seed: int, backend: str, most_rows: int) -> list[Task]:
    """Networks of one to five layers; sizes and rows are drawn evenly by their logarithms."""
    rng = np.random.default_rng(seed)

    def drawn(least: int, most: int) -> int:
        return int(np.exp(rng.uniform(np.log(least), np.log(most + 1))))

    tasks = []
    for _ in range(count):
        widths = drawn(*RANDOM_INPUTS), *(drawn(*RANDOM_SIZES) for _ in range(rng.integers(5))), drawn(*RANDOM_OUTPUTS)
        network = Network(widths, str(rng.choice(["relu", "relu", "tanh", "sigmoid"])))
        for rows in {1, min(most_rows, drawn(*RANDOM_ROWS))}:
            dtype = str(rng.choice(DTYPES))
            tasks += [Task(network, dtype, rows, place, backend, 0) for place in PLACES[backend]]
    return tasks


def groups(tasks: Sequence[Task], at_once: int) -> list[list[Task]]:
    """The tasks, in groups of so many networks."""
    networks = list(dict.fromkeys(task.network for task in tasks))
    chosen = [networks[start : start + at_once] for start in range(0, len(networks), at_once)]
    return [[task for task in tasks if task.network in some] for some in chosen]


def fastest(results: Sequence[Result]) -> dict[tuple[Any, ...], dict[str, Result]]:
    """Of each task, each contender's fastest form."""
    found: dict[tuple[Any, ...], dict[str, Result]] = {}
    for result in results:
        task = result.backend, result.place, result.network, result.dtype, result.rows
        best = found.setdefault(task, {})
        if result.contender not in best or result.microseconds < best[result.contender].microseconds:
            best[result.contender] = result
    return found


def table(results: Sequence[Result]) -> str:
    """Microseconds of a call, a row for each task, each contender in its fastest form; then ours over the best peer."""
    names = [name for name in LIBRARIES if any(result.contender == name for result in results)]
    cells = [("", "", "network", "inputs", "rows", *names, "best peer / ours", "p99, likewise")]
    for (backend, place, network, dtype, rows), best in fastest(results).items():
        figures = [f"{best[name].microseconds:,.1f}" if name in best else "" for name in names]
        rivals = [result for name, result in best.items() if name != OURS]
        ratios = ["", ""]
        if rivals and OURS in best:
            ratios = [
                f"{min(getattr(each, what) for each in rivals) / getattr(best[OURS], what):.2f}"
                for what in ("microseconds", "p99")
            ]
        cells.append((backend, PLACE_NAMES[place], network, dtype, f"{rows:,}", *figures, *ratios))
    return text.table(cells, "<<<<" + ">" * (len(cells[0]) - 4))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure predictions beside other libraries.")
    parser.add_argument("--backend", nargs="+", choices=list(ROWS), default=["cpu"], help="(default: cpu)")
    parser.add_argument("--rows", nargs="+", type=int, metavar="N", help="these numbers of rows alone")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="of the inputs")
    parser.add_argument("--network", nargs="+", metavar="WIDTHS", help="these alone, like 784-128-10")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="as many networks drawn at random besides")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES), help="these libraries")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each form (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of shorter turns")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line of JSON for each result there")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="draw the results there")
    parser.add_argument("--commit", help="what is measured, where git cannot say")
    arguments = parser.parse_args()
    networks = NETWORKS if arguments.network is None else [network_of(parser, name) for name in arguments.network]
    if not networks and not arguments.random:
        parser.error("expected a network, or --random")
    if arguments.rounds < 1 or arguments.random < 0 or any(rows < 1 for rows in arguments.rows or ()):
        parser.error("expected at least one round and one row, and no fewer than 0 networks drawn")
    rounds, seconds = (1, TURN_SECONDS / 10) if arguments.quick else (arguments.rounds, TURN_SECONDS)

    results: list[Result] = []
    lines: dict[str, str] = {}
    for backend in arguments.backend:
        chosen: CudaBackend | None = None
        try:
            chosen = CudaBackend() if backend == "cuda" else None
        except MlpgpuError as error:
            sys.exit(str(error))
        names = []
        for name in arguments.only:
            if LIBRARIES[name].missing:
                progress(f"{name} is left out: not installed: {', '.join(LIBRARIES[name].missing)}")
            elif backend in LIBRARIES[name].backends:
                names.append(name)
        about = bench.surroundings(chosen, ("scikit-learn", "torch", "onnxruntime", "jax"))
        about["commit"] = arguments.commit or about["commit"]
        tasks = [
            Task(network, dtype, rows, place, backend, 0)
            for network in networks
            for dtype in arguments.dtype
            for rows in arguments.rows or ROWS[backend]
            for place in PLACES[backend]
        ] + random_tasks(arguments.random, arguments.seed, backend, max(arguments.rows or ROWS[backend]))
        of_backend: list[Result] = []
        for group in groups(tasks, NETWORKS_AT_ONCE[backend]):

            def keep(
                found: list[Result],
                before: list[Result] = of_backend,
                backend: str = backend,
                about: dict[str, Any] = about,
            ) -> None:
                lines[backend] = bench.json_lines([*before, *found], about)
                if arguments.json:
                    arguments.json.write_text("".join(lines.values()), encoding="utf-8")

            of_backend = of_backend + measure(group, names, rounds, seconds, keep)
        results += of_backend
        print(f"{about.get('card') or about['machine']}, {about['cores']} cores, {about['versions']}")
    print(table(results))
    if arguments.picture and report is None:
        progress("no picture: matplotlib is not installed")
    elif arguments.picture:
        records = report.parse("".join(lines.values()))
        report.draw_predictions(records, arguments.picture)


def network_of(parser: argparse.ArgumentParser, name: str) -> Network:
    try:
        widths = tuple(int(width) for width in name.split("-"))
    except ValueError:
        widths = ()
    if len(widths) < 2 or min(widths) < 1 or widths[-1] < 2:
        parser.error(f"--network: expected widths like 784-128-10, the last of at least two classes, got {name!r}")
    return Network(widths)


if __name__ == "__main__":
    begin_without_limits()
    main()
