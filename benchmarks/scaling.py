"""Strong and weak scaling over the threads of the CPU backend: locally connected stacks, and dense training.

Strong: the same work on 1, 2, … threads; efficiency is T(1) / (p T(p)).  Weak: p times the work on p threads;
efficiency is T(1) / T(p).  What grows is the width N of a stack, whose columns the threads divide, and the batch of a
training step, which is split into shards (`streams=` of a trainer), one for each thread.

Each number of threads has a process of its own.  They take turns, round by round, so that other work of the machine
disturbs all of them alike; where there is much of it, no efficiency can be measured, so the load is printed and kept.
A time is the fastest of the rounds.

    python benchmarks/scaling.py [--n N ...] [--k K] [--window R] [--threads P ...] [--rounds N] [--json PATH]
                                 [--picture PATH]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

import mlpgpu as mg
from mlpgpu.backends import get_backend
from mlpgpu.backends.cpu import available_cores
from mlpgpu.bench import Epochs, Workload, surroundings

RESULTS = Path(__file__).with_name("results") / "scaling.json"
WIDTHS, DEPTH, WINDOW = (50_000, 100_000, 300_000), 30, 29
BATCH = 2048  # rows of a step of dense training, for each thread where work grows
PAUSE = 0.05  # seconds between turns, in which the threads of the turn before stop spinning

Kind = Literal["locally connected", "dense"]


@dataclass(frozen=True)
class Job:
    """What a process does in a turn.

    Attributes:
        size: the width of a stack's inputs, or the rows of a training step.
        k: layers of a stack, the inputs among them; an output depends on ``window`` inputs.
    """

    kind: Kind
    size: int
    threads: int
    k: int = 0
    window: int = 0

    @property
    def work(self) -> int:
        """How many outputs are computed, or rows trained on."""
        if self.kind == "dense":
            return self.size
        return (self.k - 1) * self.size - (self.window - 1) * self.k * (self.k - 1) // 2


def make(job: Job) -> Callable[[], object]:
    """A function that does the job once."""
    return _stack(job) if job.kind == "locally connected" else _training(job)


def _stack(job: Job) -> Callable[[], object]:
    """One evaluation of a stack on one row of inputs; one matrix of weights serves all layers."""
    layer = mg.LocallyConnected(job.size, job.window, activation="sigmoid", bias="layer")
    network = mg.Network([layer] * (job.k - 1), seed=0)
    program = get_backend("cpu").compile(network.lower(capacity=1), threads=job.threads)
    program.load(network.state())
    data = mg.Dataset(np.random.default_rng(0).random((1, job.size), np.float32))
    return lambda: program.predict(data, logits=True)


def _training(job: Job) -> Callable[[], object]:
    """A step of 784-300-10 with sigmoid units on all rows."""
    workload = Workload(
        (784, 300, 10), job.size, job.size, 0.1, loss="squared_error", activation="sigmoid", last="sigmoid"
    )  # fmt: skip
    data = mg.Dataset(*workload.arrays())
    trainer = workload.trainer(backend="cpu", streams=job.threads, threads=job.threads)
    return Epochs(trainer, data, shuffle=False)


# --- turns ---


def serve(job: Job, connection: Connection) -> None:
    """A job's process: makes it, warms it up, and answers each request with the seconds of a turn."""
    run = make(job)
    run()
    connection.send(None)
    while connection.recv():
        started = time.perf_counter()
        run()
        connection.send(time.perf_counter() - started)


def take_turns(jobs: Sequence[Job], rounds: int) -> dict[Job, list[float]]:
    """Seconds of each job, round by round."""
    context = multiprocessing.get_context("spawn")
    running: dict[Job, tuple[BaseProcess, Connection]] = {}
    for job in dict.fromkeys(jobs):
        near, far = context.Pipe()
        process: BaseProcess = context.Process(target=serve, args=(job, far), daemon=True)
        process.start()
        far.close()  # the process has a copy; while this one is open, the end of the process would not be noticed
        near.recv()
        running[job] = process, near
    seconds: dict[Job, list[float]] = {job: [] for job in running}
    for _ in range(rounds):
        for job, (_, connection) in running.items():
            time.sleep(PAUSE)
            connection.send(True)
            seconds[job].append(connection.recv())
    for served, connection in running.values():
        connection.send(False)
        served.join()
    return seconds


# --- results ---


@dataclass(frozen=True)
class Result:
    """A number of threads on one job; ``rate`` is work per second, in outputs or rows."""

    kind: Kind
    scaling: Literal["strong", "weak"]
    size: int  # of the job of one thread
    threads: int
    k: int
    window: int
    seconds: float
    median_seconds: float
    rate: float
    efficiency: float


def strong_and_weak(base: Job, threads: Sequence[int], rounds: int) -> list[Result]:
    """Both scalings of a job from one thread on."""
    jobs = {
        (scaling, count): Job(base.kind, base.size * (count if scaling == "weak" else 1), count, base.k, base.window)
        for scaling in ("strong", "weak")
        for count in threads
    }
    seconds = take_turns(list(jobs.values()), rounds)
    one = min(seconds[jobs["strong", 1]]) / jobs["strong", 1].work
    results = []
    for (scaling, count), job in jobs.items():
        fastest = min(seconds[job])
        results.append(
            Result(
                kind=job.kind,
                scaling="weak" if scaling == "weak" else "strong",
                size=base.size,
                threads=count,
                k=job.k,
                window=job.window,
                seconds=fastest,
                median_seconds=statistics.median(seconds[job]),
                rate=job.work / fastest,
                # Of work per thread and second: a stack of p N inputs has a little more than p times the outputs.
                efficiency=one * job.work / (count * fastest),
            )
        )
    return results


def show(results: Sequence[Result]) -> None:
    for each in results:
        print(
            f"{each.kind:18}{each.size:>10,}{each.scaling:>8}{each.threads:4} threads{1000 * each.seconds:12.2f} ms"
            f"{each.rate:12.3g}/s  efficiency {each.efficiency:.2f}"
        )


def draw(results: Sequence[Result], path: Path) -> None:
    """Efficiency by threads: strong beside weak."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, scaling in zip(figure.subplots(1, 2, sharey=True), ("strong", "weak"), strict=True):
        for kind, size in dict.fromkeys((each.kind, each.size) for each in results):
            curve = [each for each in results if (each.kind, each.size, each.scaling) == (kind, size, scaling)]
            axes.plot(
                [each.threads for each in curve], [each.efficiency for each in curve], "o-", label=f"{kind}, {size:,}"
            )
        axes.axhline(1.0, color="gray", lw=0.8)
        axes.set(xlabel="threads", title=f"{scaling} scaling", ylim=(0, 1.15))
        axes.set_xticks(sorted({each.threads for each in results}))
    figure.axes[0].set_ylabel("efficiency")
    figure.axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Strong and weak scaling over threads of the CPU backend.")
    parser.add_argument("--n", type=int, nargs="+", default=WIDTHS, help="inputs of a stack (default: %(default)s)")
    parser.add_argument("--k", type=int, default=DEPTH, help="layers, inputs among them (default: %(default)s)")
    parser.add_argument(
        "--window", type=int, default=WINDOW, help="inputs that an output depends on (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of dense training (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", help="to try (default: 1 to the cores)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="PATH", help="results (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default="scaling.png", help="where to draw (default: %(default)s)")
    options = parser.parse_args()
    if options.k < 2 or min(options.n) <= (options.k - 1) * (options.window - 1) or options.window < 1:
        parser.error(
            f"K layers of a window R need N > (K - 1) (R - 1) inputs: {options.n}, {options.k}, {options.window}"
        )
    threads = sorted({1, *(options.threads or range(1, available_cores() + 1))})
    about: dict[str, Any] = {**surroundings(), "load_before": os.getloadavg()[0], "rounds": options.rounds}
    print(f"{about['machine']}, {about['cores']} cores, load {about['load_before']:.1f}")

    results: list[Result] = []
    jobs = [Job("locally connected", n, 1, options.k, options.window) for n in options.n]
    for job in [*jobs, Job("dense", options.batch, 1)]:
        found = strong_and_weak(job, threads, max(1, options.rounds))
        show(found)
        results += found
    about["load_after"] = os.getloadavg()[0]
    document = {**about, "lines": [asdict(result) for result in results]}
    options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draw(results, options.picture)


if __name__ == "__main__":
    main()
