"""Seconds per epoch on the CPU: mlpgpu, a bare NumPy loop, scikit-learn and PyTorch, on the same work.

An epoch shuffles 10,000 rows and visits all of them in batches: ReLU between layers, softmax cross entropy, stochastic
gradient descent with momentum, float32, the mean loss added up.  Each contender has a process, with its default number
of threads, so that the spinning threads of one do not slow the next down.  They take turns, round by round, so that
other work of the machine disturbs all of them alike; a ratio is the median of the rounds' ratios.  All processes are
started again a few times, because one process may run two threads a fifth slower than the next, for as long as it
lives.

    python benchmarks/cpu.py [--starts N] [--rounds N] [--quick] [--only CASE ...] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from plain_environment import begin_without_limits

import mlpgpu as mg
from mlpgpu.bench import surroundings

ROWS = 10_000
RATE, MOMENTUM = 0.01, 0.9
PRODUCT_SIZE = 2048  # of the square matrices whose product shows the CPU's limit
PAUSE = 0.2  # seconds between turns, in which the threads of the turn before stop spinning
SLACK = 100e6  # bytes that a fit may take beside data, parameters and activations


@dataclass(frozen=True)
class Case:
    """One network, and how many times faster than each contender mlpgpu is to be on it."""

    widths: tuple[int, ...]
    batch_size: int
    epochs: int  # in a turn
    targets: dict[str, float]

    @property
    def name(self) -> str:
        return "-".join(map(str, self.widths))

    @property
    def parameters(self) -> int:
        return sum((n_in + 1) * n_out for n_in, n_out in pairwise(self.widths))

    @property
    def flops(self) -> int:
        """Multiplications and additions of an epoch's matrix products; no gradient by the inputs is needed."""
        products = [n_in * n_out for n_in, n_out in pairwise(self.widths)]
        return 2 * ROWS * (3 * sum(products) - products[0])

    @property
    def memory_bound(self) -> float:
        """Bytes: the data, four times the parameters, a batch's activations, and SLACK."""
        activations = self.batch_size * sum(self.widths)
        return 4.0 * (ROWS * self.widths[0] + 4 * self.parameters + activations) + 8.0 * ROWS + SLACK


def _targets(sklearn: float, torch: float) -> dict[str, float]:
    return {"bare NumPy": 1.0 / 1.05, "scikit-learn": sklearn, "PyTorch eager": torch, "PyTorch compiled": torch}


CASES = (
    Case((784, 128, 10), 128, 5, _targets(sklearn=1.8, torch=1.0)),
    Case((784, 1024, 1024, 10), 1024, 1, _targets(sklearn=1.2, torch=0.9)),
    Case((783, 30, 10), 32, 8, _targets(sklearn=2.0, torch=1.0)),
)


def make_data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs (ROWS, n_in), float32, and labels (ROWS,), int64."""
    rng = np.random.default_rng(0)
    x = rng.random((ROWS, case.widths[0]), dtype=np.float32)
    return x, rng.integers(case.widths[-1], size=ROWS)


# --- contenders: each makes a function that trains for a number of epochs and returns the last mean loss ---

Train = Callable[[int], float]


def ours(case: Case) -> Train:
    x, y = make_data(case)
    *hidden, (n_in, n_out) = pairwise(case.widths)
    net = mg.Network([*(mg.Dense(*widths, activation="relu") for widths in hidden), mg.Dense(n_in, n_out)], seed=0)
    optimizer = mg.Momentum(RATE, momentum=MOMENTUM)
    trainer = mg.Trainer(net, "softmax_cross_entropy", optimizer, batch_size=case.batch_size, backend="cpu")
    data = mg.Dataset(x, y)
    return lambda epochs: float(trainer.fit(data, epochs=epochs, progress=False)["loss"][-1])


def bare_numpy(case: Case) -> Train:
    """The loop that somebody who knows NumPy writes, without preallocated arrays."""
    x, y = make_data(case)
    rng = np.random.default_rng(0)
    weights = [
        rng.standard_normal((n_in, n_out), dtype=np.float32) * np.float32(math.sqrt(2.0 / n_in))
        for n_in, n_out in pairwise(case.widths)
    ]
    biases = [np.zeros(n_out, np.float32) for n_out in case.widths[1:]]
    velocities = [(np.zeros_like(w), np.zeros_like(b)) for w, b in zip(weights, biases, strict=True)]
    last = len(weights) - 1

    def epoch() -> float:
        order = rng.permutation(ROWS)
        total = 0.0
        for start in range(0, ROWS, case.batch_size):
            batch = order[start : start + case.batch_size]
            ys, labels = [x[batch]], y[batch]  # (B, n) of each layer
            rows = np.arange(len(batch))
            for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
                z = ys[-1] @ w + b
                ys.append(np.maximum(z, 0) if k < last else z)

            shifted = ys[-1] - ys[-1].max(axis=1, keepdims=True)
            exponentials = np.exp(shifted)
            sums = exponentials.sum(axis=1, keepdims=True)
            total += float((np.log(sums[:, 0]) - shifted[rows, labels]).sum())
            dz = exponentials / sums
            dz[rows, labels] -= 1
            dz /= len(batch)

            for k in range(last, -1, -1):
                dw, db = ys[k].T @ dz, dz.sum(axis=0)
                if k:
                    dz = (dz @ weights[k].T) * (ys[k] > 0)
                for parameter, velocity, gradient in zip((weights[k], biases[k]), velocities[k], (dw, db), strict=True):
                    velocity *= MOMENTUM
                    velocity += RATE * gradient
                    parameter -= velocity
        return total / ROWS

    return lambda epochs: [epoch() for _ in range(epochs)][-1]


def scikit_learn(case: Case) -> Train:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    x, y = make_data(case)
    model = MLPClassifier(
        case.widths[1:-1],
        solver="sgd",
        momentum=MOMENTUM,
        nesterovs_momentum=False,
        learning_rate_init=RATE,
        alpha=0.0,
        batch_size=case.batch_size,
        warm_start=True,  # a fit goes on from the last one's weights
        tol=0.0,
        n_iter_no_change=1_000_000,
        random_state=0,
    )

    def train(epochs: int) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # that max_iter was reached
            return float(model.set_params(max_iter=epochs).fit(x, y).loss_)

    return train


def pytorch(case: Case, *, compiled: bool) -> Train:
    import torch

    x, y = map(torch.from_numpy, make_data(case))
    torch.manual_seed(0)
    modules: list[Any] = []
    for n_in, n_out in pairwise(case.widths):
        modules += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
    model = torch.nn.Sequential(*modules[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def forward(xs: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(xs), labels)

    step = optimizer.step
    if compiled:
        torch._logging.set_logs(dynamo=logging.ERROR)  # it warns that it leaves a profiler's mark out
        # One compilation for the full batch and one for the last.
        forward, step = torch.compile(forward, dynamic=False), torch.compile(optimizer.step)

    def epoch() -> float:
        order = torch.randperm(ROWS)
        total = torch.zeros(())
        for start in range(0, ROWS, case.batch_size):
            batch = order[start : start + case.batch_size]
            loss = forward(x[batch], y[batch])
            optimizer.zero_grad()
            loss.backward()
            step()
            total += loss.detach() * len(batch)
        return float(total) / ROWS

    return lambda epochs: [epoch() for _ in range(epochs)][-1]


def large_product(case: Case) -> Train:
    """The CPU's limit: one product of two large float32 matrices, whatever the number of epochs."""
    a = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    out = np.empty_like(a)
    return lambda epochs: float(np.dot(a, a, out=out)[0, 0])


LIMIT = "large product"
CONTENDERS: dict[str, Callable[[Case], Train]] = {
    "mlpgpu": ours,
    "bare NumPy": bare_numpy,
    "scikit-learn": scikit_learn,
    "PyTorch eager": lambda case: pytorch(case, compiled=False),
    "PyTorch compiled": lambda case: pytorch(case, compiled=True),
    LIMIT: large_product,
}


# --- turns ---


@dataclass(frozen=True)
class Turn:
    """A turn: seconds by the clock and of all threads, the loss, and the process's peak of memory so far."""

    seconds: float
    cpu_seconds: float
    loss: float
    peak_bytes: int  # beside the imports; 0 where the system does not say


def peak_bytes() -> int:
    """The process's largest resident set; unlike getrusage's, it does not begin with the parent's."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def serve(name: str, case: Case, connection: Connection) -> None:
    """A contender's process: makes it, warms it up, and answers each number of epochs with a Turn."""
    imported = psutil.Process().memory_info().rss
    try:
        train = CONTENDERS[name](case)
        train(1)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0])
        return
    connection.send(None)
    while epochs := connection.recv():
        started, cpu_started = time.perf_counter(), time.process_time()
        loss = train(epochs)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        connection.send(Turn(seconds, cpu_seconds, loss, max(0, peak_bytes() - imported)))


def start(name: str, case: Case) -> tuple[BaseProcess, Connection, str | None]:
    """A contender's process, the connection to it, and why it cannot run, or None."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=serve, args=(name, case, far), daemon=True)
    process.start()
    far.close()  # the process has a copy; while this one is open, the end of the process would not be noticed
    try:
        return process, near, near.recv()
    except EOFError:
        return process, near, "its process ended"


def take_turns(case: Case, starts: int, rounds: int) -> tuple[dict[str, list[Turn]], dict[str, str]]:
    """Each contender's turns, and the reasons of those that could not run."""
    turns: dict[str, list[Turn]] = {}
    failures: dict[str, str] = {}
    for _ in range(starts):
        running: list[tuple[str, BaseProcess, Connection]] = []
        for name in [name for name in CONTENDERS if name not in failures]:
            process, connection, failure = start(name, case)
            if failure:
                failures[name] = failure
            else:
                running.append((name, process, connection))
        for _ in range(rounds):
            for name, _, connection in running:
                time.sleep(PAUSE)
                connection.send(case.epochs)
                turns.setdefault(name, []).append(connection.recv())
        for _, process, connection in running:
            connection.send(0)
            process.join()
    return turns, failures


# --- results ---


@dataclass(frozen=True)
class Result:
    """One contender on one case."""

    contender: str
    seconds_per_epoch: float
    fastest_seconds_per_epoch: float
    cpu_seconds_per_epoch: float
    gflops: float
    share_of_limit: float
    speedup: float | None  # how many times faster mlpgpu is
    target: float | None
    loss: float


def summarize(case: Case, turns: dict[str, list[Turn]]) -> list[Result]:
    limit = 2e-9 * PRODUCT_SIZE**3 / statistics.median(turn.seconds for turn in turns[LIMIT])
    lines = []
    for name, taken in turns.items():
        epochs, flops = (1, 2 * PRODUCT_SIZE**3) if name == LIMIT else (case.epochs, case.flops)
        seconds = statistics.median(turn.seconds for turn in taken) / epochs
        ratios = [a.seconds / b.seconds for a, b in zip(taken, turns["mlpgpu"], strict=True)]
        lines.append(
            Result(
                contender=name,
                seconds_per_epoch=seconds,
                fastest_seconds_per_epoch=min(turn.seconds for turn in taken) / epochs,
                cpu_seconds_per_epoch=statistics.median(turn.cpu_seconds for turn in taken) / epochs,
                gflops=flops / seconds / 1e9,
                share_of_limit=flops / seconds / 1e9 / limit,
                speedup=statistics.median(ratios) if name in case.targets else None,
                target=case.targets.get(name),
                loss=taken[-1].loss,
            )
        )
    return lines


def show(case: Case, lines: list[Result], failures: dict[str, str], peak: int) -> None:
    print(f"\n{case.name}, batches of {case.batch_size}, {ROWS:,} rows")
    columns = ("s/epoch", "fastest", "cpu s", "GFLOP/s", "of limit", " mlpgpu is", "target")
    print(" " * 18 + "".join(f"{column:>10}" for column in columns))
    for line in lines:
        row = f"{line.contender:18}"
        if line.contender == LIMIT:
            print(f"{row}{'':30}{line.gflops:10.1f}")
            continue
        row += f"{line.seconds_per_epoch:10.4f}{line.fastest_seconds_per_epoch:10.4f}{line.cpu_seconds_per_epoch:10.4f}"
        row += f"{line.gflops:10.1f}{line.share_of_limit:10.0%}"
        if line.speedup is not None and line.target is not None:
            verdict = "" if line.speedup >= line.target else "  missed"
            row += f"{line.speedup:11.2f}x{line.target:9.2f}x{verdict}"
        print(row)
    for name, failure in failures.items():
        print(f"{name:18}skipped: {failure}")
    verdict = "not measured on this system" if not peak else f"{peak / 1e6:.0f} MB"
    print(f"peak memory beyond imports: {verdict}; bound {case.memory_bound / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare training on the CPU with other libraries.")
    parser.add_argument("--starts", type=int, default=3, help="of each process (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="turns after each start (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one start")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these networks alone")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    arguments = parser.parse_args()
    starts, rounds = 1 if arguments.quick else max(1, arguments.starts), max(1, arguments.rounds)

    results: dict[str, Any] = {
        **surroundings(packages=("scikit-learn", "torch")),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "starts": starts,
        "rounds": rounds,
        "rows": ROWS,
        "cases": [],
    }
    print(f"{results['machine']}, {results['cores']} cores, {results['versions']}")
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        turns, failures = take_turns(case, starts, rounds)
        lines, peak = summarize(case, turns), max(turn.peak_bytes for turn in turns["mlpgpu"])
        show(case, lines, failures, peak)
        results["cases"].append(
            {
                **asdict(case),
                "name": case.name,
                "parameters": case.parameters,
                "peak_bytes": peak,
                "peak_bound_bytes": case.memory_bound,
                "contenders": [asdict(line) for line in lines],
                "skipped": failures,
            }
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    begin_without_limits()
    main()
