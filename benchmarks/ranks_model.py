"""What ranks gain, by counts: the model behind ``parallel="auto"``, held to measured steps, and what it says of cards.

    python benchmarks/ranks_model.py [--fit]                              # of the steps in results/ranks_model.jsonl
    python -m mlpgpu launch -n 2 benchmarks/ranks_model.py --measure      # measure these anew, on two ranks

*Checked*: steps of one and two ranks of this host's cores, which ``mlpgpu/plan/costs.py`` counts; ``--fit`` looks for
the constants there.  The file has the fastest epochs of two sessions of ``--measure``.

*Held to two cards*: steps that ``ranks_contenders.py`` measured on one H100 and on two.

*Only computed*: steps on more cards.  Products take what they took on one card (``docs/results.md``), and an exchange
what a line through NCCL's times on two H200s says; over InfiniBand the rate is that of its port, 400 Gbit/s.  Latency
grows with the logarithm of the number of cards.  An exchange is all seen, or hidden behind the backward products.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import mlpgpu as mg
from mlpgpu.backends.cuda.profile.predicted import FITTED_TO
from mlpgpu.backends.cuda.profile.predicted_step import step_seconds as launch_seconds
from mlpgpu.bench import Epochs, json_lines, surroundings
from mlpgpu.names import LossName
from mlpgpu.plan import Link, Plan, Precision
from mlpgpu.plan.costs import CORES, Machine, step_seconds
from mlpgpu.ranks import communicator

RESULTS = Path(__file__).parent / "results" / "ranks_model.jsonl"
OF_TWO_CARDS = RESULTS.with_name("ranks_cuda.jsonl")
NETWORKS = {
    "20-64-64-2": 64,
    "64-128-10": 32,
    "37-211-90-5": 90,
    "784-128-10": 128,
    "256-256-256-10": 128,
    "100-300-300-1": 1024,
    "784-512-512-10": 256,
    "512-512-512-10": 128,
    "784-1024-1024-10": 1024,
}
WAYS = ((1, 1, 1), (1, 2, 1), (1, 2, 2), (1, 4, 1), (2, 2, 1), (2, 4, 1))  # ranks, shards, threads
STEPS = 2  # of an epoch
ROUNDS, WIDE_ROUNDS = 120, 12
WIDE = 1e9  # floating-point operations of a step, from which on there are fewer rounds
TRIES = 1500  # of constants


@dataclass(frozen=True)
class Measured:
    """Steps of a network, in microseconds: the fastest epoch of all rounds, and the tenth part's bound."""

    network: str
    batch_size: int
    ranks: int
    shards: int
    threads: int
    fastest: float
    tenth: float

    @property
    def plan(self) -> Plan:
        options: dict[str, Any] = {"shards": self.shards, "ranks": self.ranks}
        return network_of(self.network).lower(
            capacity=self.batch_size, loss=loss_of(self.network), optimizer=mg.Momentum(0.001), **options
        )


def network_of(name: str) -> mg.Network:
    widths = [int(width) for width in name.split("-")]
    *hidden, last = pairwise(widths)
    return mg.Network([*(mg.Dense(*each, "relu") for each in hidden), mg.Dense(*last)], seed=1)


def loss_of(name: str) -> LossName:
    return "mean_squared_error" if name.endswith("-1") else "softmax_cross_entropy"


# --- what was measured ---


def epochs(name: str, batch: int, ranks: int, shards: int, threads: int) -> Epochs:
    network, draw, rows = network_of(name), np.random.default_rng(0), batch * STEPS
    options: dict[str, Any] = {"streams": shards, "threads": threads, "parallel": "data" if ranks > 1 else "none"}
    trainer = mg.Trainer(network, loss_of(name), mg.Momentum(0.001), batch_size=batch, backend="cpu", **options)
    x, width = draw.standard_normal((rows, network.n_in), np.float32), network.n_out
    return Epochs(trainer, mg.Dataset(x, draw.random(rows) if width == 1 else draw.integers(width, size=rows)))


def measure(name: str, batch: int) -> list[Measured]:
    """All ways, in turns; where one rank trains, the other waits as it does under ``parallel="auto"``."""
    ranks = communicator()
    if ranks is None or ranks.size != 2:
        raise SystemExit("--measure takes two ranks: python -m mlpgpu launch -n 2 benchmarks/ranks_model.py --measure")
    runs = {way: epochs(name, batch, *way) for way in WAYS}
    plan = next(iter(runs.values())).plan
    flops = sum(plan.flops(operation, batch) for operation in plan.training)
    seconds: dict[tuple[int, int, int], list[float]] = {way: [] for way in WAYS}
    for number in range((WIDE_ROUNDS if flops > WIDE else ROUNDS) + 1):
        for way, run in runs.items():
            ranks.barrier()
            started = time.perf_counter()
            if way[0] == 2 or ranks.rank == 0:
                run()
            if number:
                seconds[way].append((time.perf_counter() - started) / STEPS)
            ranks.broadcast(patient=True)
    return [
        Measured(name, batch, *way, 1e6 * min(times), 1e6 * float(np.percentile(times, 10)))
        for way, times in seconds.items()
    ]


def read() -> tuple[list[Measured], int]:
    """What was measured, and on how many cores."""
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    names = [field.name for field in dataclasses.fields(Measured)]
    return [Measured(**{name: line[name] for name in names}) for line in lines], lines[0]["cores"]


def errors(measured: Sequence[Measured], plans: Sequence[Plan], cores: int, machine: Machine) -> np.ndarray:
    """Logarithms of counted over measured, (steps,)."""
    pairs = zip(plans, measured, strict=True)
    counted = [step_seconds(plan, each.threads, cores, machine=machine) for plan, each in pairs]
    return np.log(np.array(counted) * 1e6 / [each.fastest for each in measured])


def fit(measured: Sequence[Measured], cores: int) -> Machine:
    """Constants that a random search ends with, from those of ``costs.py`` on."""
    plans, draw, width = [each.plan for each in measured], np.random.default_rng(0), 0.5
    best, least = CORES, float(np.abs(errors(measured, plans, cores, CORES)).mean())
    for number in range(TRIES):
        factors = np.exp(width * draw.normal(size=7) * (draw.random(7) < 0.4))
        tried = Machine(*(value * factor for value, factor in zip(dataclasses.astuple(best), factors, strict=True)))
        error = float(np.abs(errors(measured, plans, cores, tried)).mean())
        if error < least:
            best, least = tried, error
        if number % 300 == 299:
            width *= 0.6
    return best


def show_measured(measured: Sequence[Measured], cores: int) -> None:
    found = errors(measured, [each.plan for each in measured], cores, CORES)
    for each, error in zip(measured, found, strict=True):
        way = f"{each.ranks} rank{'s' * (each.ranks > 1)} S={each.shards} threads={each.threads}"
        print(f"{each.network:17} {each.batch_size:5} {way:22} {each.fastest:9,.0f} µs, counted ×{math.exp(error):.2f}")
    print(f"in the mean {np.abs(found).mean():.1%} off, at most ×{math.exp(np.abs(found).max()):.2f}")


# --- cards ---

NCCL = ((4 * 101_770, 13.5e-6), (16e6, 76e-6), (256e6, 895e-6))  # an all-reduce on two H200s: bytes, seconds
INFINIBAND_RATE = 0.9 * 50e9  # bytes a second that a card sends through a port of 400 Gbit/s, nine tenths of its rate
CARDS = (2, 4, 8, 64, 1024)
BACKWARD = 2 / 3  # of a step's products: behind those the exchange of the layers above may hide
# Networks, batch on each card, and microseconds of a step on one H200, by docs/results.md
STEPS_OF_CARDS = (
    ("784-128-10", 128, {"float32": 6.6, "bfloat16": 6.4}),
    ("784-1024-1024-10", 1024, {"float32": 143.0, "bfloat16": 66.0}),
    ("4096-4096-4096-4096-4096", 8192, {"float32": 15_630.0, "bfloat16": 4_520.0}),
)


def nvlink() -> Link:
    """The line through NCCL's times, by least squares of relative errors."""
    sizes, seconds = np.array(NCCL).T
    latency, per_byte = np.linalg.lstsq(np.stack([1 / seconds, sizes / seconds], 1), np.ones(len(NCCL)), rcond=None)[0]
    return Link("NVLink", float(latency), float(1 / per_byte))


def card_seconds(step: float, parameters: int, cards: int, link: Link, *, is_hidden: bool) -> float:
    """Seconds of a step on so many cards that each have the rows of one (weak scaling).

    Each card sends and receives (n - 1)/n of the gradient in float32, and as much of the parameters: one all-reduce.
    """
    if cards == 1:
        return step
    moved = 2 * (cards - 1) / cards * 4 * parameters / link.bandwidth
    latency = link.latency * math.log2(cards)
    return step + latency + (max(0.0, moved - BACKWARD * step) if is_hidden else moved)


def parameters_of(network: str) -> int:
    return sum((n_in + 1) * n_out for n_in, n_out in pairwise(int(n) for n in network.split("-")))


def of_two_cards() -> list[tuple[str, int, Precision, float, float]]:
    """Network, rows of one card, precision, and microseconds of a step on one card and on two with half the rows each.

    For each network they are those of the last version that was measured on one card and on two, of the kind that was
    used last: medians of its runs.  Of weak scaling two cards have twice the rows, and take as long as half a step of
    so many on one would.
    """
    lines = [json.loads(line) for line in OF_TWO_CARDS.read_text(encoding="utf-8").splitlines()]
    found: dict[tuple[str, str, int, Precision, int], list[float]] = {}
    for line in lines:
        if line["card"] == lines[-1]["card"] and line["contender"] == "mlpgpu":
            rows = line["batch_size"] // (2 if line["scaling"] == "weak" else 1)
            ranks = line["ranks"] if line["scaling"] == "strong" else 0
            key = line["commit"], line["network"], rows, line["precision"], ranks
            found.setdefault(key, []).append(line["microseconds"])
    made: dict[tuple[str, int, Precision], tuple[float, float]] = {}  # later versions come later
    for (commit, network, rows, precision, ranks), times in found.items():
        if ranks == 1:
            one = float(np.median(times))
            if two := found.get((commit, network, rows, precision, 2)):
                made[network, rows, precision] = one, float(np.median(two))
            if weak := found.get((commit, network, rows, precision, 0)):
                made[network, 2 * rows, precision] = 2 * one, float(np.median(weak))
    return [(*key, *times) for key, times in made.items()]


def gain_by_launches(network: str, rows: int, precision: Precision) -> float:
    """How many times as fast as one card two make a step, by the launches that ``parallel="auto"`` counts."""

    def seconds(ranks: int) -> float:
        options: dict[str, Any] = {"optimizer": mg.Momentum(0.001), "shards": ranks, "ranks": ranks}
        loss: LossName = "softmax_cross_entropy" if network.endswith("-10") else "squared_error"
        found = launch_seconds(
            network_of(network).lower(capacity=rows, loss=loss, precision=precision, **options), FITTED_TO
        )
        assert found is not None
        return found

    return seconds(1) / seconds(2)


def show_two_cards() -> None:
    link, offs = nvlink(), []
    print("\ntwo cards, microseconds of a step: the exchange counted as hidden if it can be, and measured")
    for network, rows, precision, one, two in of_two_cards():
        counted = 1e6 * card_seconds(one / 2 * 1e-6, parameters_of(network), 2, link, is_hidden=True)
        offs.append(two / counted)
        print(
            f"  {network:25} {rows:6} {precision:9} one {one:8,.0f}, two {two:8,.0f}, counted {counted:8,.0f}, "
            f"×{offs[-1]:.2f}; gain ×{one / two:.2f}, by launches ×{gain_by_launches(network, rows, precision):.2f}"
        )
    print(f"measured are ×{min(offs):.2f} to ×{max(offs):.2f} of what is counted")


def show_cards() -> None:
    fitted = nvlink()
    links = (fitted, dataclasses.replace(fitted, name="InfiniBand", bandwidth=INFINIBAND_RATE))
    print(
        "\ncards, computed and not measured: weak scaling, efficiency with the exchange all seen / hidden if it can be"
    )
    for link in links:
        print(link)
        for name, batch, steps in STEPS_OF_CARDS:
            parameters = parameters_of(name)
            for precision, microseconds in steps.items():
                cells = []
                for cards in CARDS:
                    step = microseconds * 1e-6
                    both = [card_seconds(step, parameters, cards, link, is_hidden=hidden) for hidden in (False, True)]
                    cells.append(f"{cards}: {step / both[0]:.2f} / {step / both[1]:.2f}")
                print(f"  {name:25} {batch:5} {precision:9} {'  '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="on two ranks, and write that to results/")
    parser.add_argument("--fit", action="store_true", help="look for the constants of mlpgpu/plan/costs.py")
    options = parser.parse_args()
    if options.measure:
        found = [each for name, batch in NETWORKS.items() for each in measure(name, batch)]
        if mg.rank() == 0:
            RESULTS.write_text(json_lines(found, surroundings(packages=["mpi4py"])), encoding="utf-8")
        return
    measured, cores = read()
    show_measured(measured, cores)
    if options.fit:
        print(fit(measured, cores))
    show_two_cards()
    show_cards()


if __name__ == "__main__":
    main()
