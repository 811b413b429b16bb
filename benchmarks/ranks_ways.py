"""What ``parallel="auto"`` chooses on ranks of this host's cores, beside each way measured: one, shards, parts.

    python -m mlpgpu launch -n 2 benchmarks/ranks_ways.py --seed a-new-word [--points 16] [--json ways.jsonl]

Networks are drawn by the seed.  A way is timed by epochs, in turns with the others; where rank 0 trains alone the other
ranks wait, as they do under ``"auto"``.  ``least`` is the fastest way's time by the chosen one's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from ranks_model import loss_of, network_of

import mlpgpu as mg
from mlpgpu.bench import Epochs, json_lines, surroundings
from mlpgpu.errors import ConfigurationError
from mlpgpu.names import ParallelName
from mlpgpu.plan import Choice, Way
from mlpgpu.ranks import Communicator, communicator

WIDTHS = 16, 32, 64, 100, 128, 256, 300, 512, 784, 1024, 2048
BATCHES = 8, 16, 32, 64, 100, 128, 256, 512, 1024
MOST_FLOPS = 2e10  # of a step; networks with more are drawn again
STEPS = 4  # of an epoch
SECONDS, MOST_ROUNDS = 2.0, 60  # about so long each way, in at most so many rounds
PARALLEL: dict[Way, ParallelName] = {"one": "none", "data": "data", "tensor": "tensor"}


@dataclass(frozen=True)
class Point:
    """A network, microseconds of a step each way, counted and measured (0 where a way cannot be), and the choice."""

    network: str
    batch_size: int
    ranks: int
    chosen: Way
    counted_one: float
    counted_data: float
    counted_tensor: float
    one: float
    data: float
    tensor: float

    @property
    def least(self) -> float:
        """How near the chosen way is to the fastest one, at most 1."""
        times: dict[Way, float] = {"one": self.one, "data": self.data, "tensor": self.tensor}
        return min(time for time in times.values() if time) / times[self.chosen]


def drawn(chance: random.Random) -> tuple[str, int]:
    """A network of one to five hidden layers, even or uneven, and a batch."""
    while True:
        count, n_out = chance.randint(1, 5), chance.choice([1, 10, 100])
        even = [chance.choice(WIDTHS)] * count
        hidden = even if chance.random() < 0.6 else [chance.choice(WIDTHS) for _ in even]
        widths, batch = [chance.choice(WIDTHS), *hidden, n_out], chance.choice(BATCHES)
        flops = 6 * batch * sum(a * b for a, b in pairwise(widths))
        if flops < MOST_FLOPS:
            return "-".join(map(str, widths)), batch


def trainer(name: str, batch: int, parallel: ParallelName, streams: int | None = None) -> mg.Trainer:
    options: dict[str, Any] = {"batch_size": batch, "backend": "cpu", "threads": 1}
    optimizer = mg.Momentum(0.001)
    return mg.Trainer(network_of(name), loss_of(name), optimizer, parallel=parallel, streams=streams, **options)


def measure(name: str, batch: int, ranks: Communicator) -> Point | None:
    """All ways in turns; None on all ranks but the first."""
    draw, network = np.random.default_rng(0), network_of(name)
    x = draw.standard_normal((batch * STEPS, network.n_in), np.float32)
    y = draw.random(len(x)) if network.n_out == 1 else draw.integers(network.n_out, size=len(x))
    runs: dict[Way, Epochs] = {}
    for way, parallel in PARALLEL.items():
        try:
            made = trainer(name, batch, parallel, None if way == "tensor" else ranks.size)
        except ConfigurationError:  # no layer can be split
            continue
        runs[way] = Epochs(made, mg.Dataset(x, y))
    seconds: dict[Way, list[float]] = {way: [] for way in runs}
    rounds, number = MOST_ROUNDS, -1
    while number < rounds:
        for way, run in runs.items():
            ranks.barrier()
            started = time.perf_counter()
            if way != "one" or ranks.rank == 0:
                run()
            if number >= 0:
                seconds[way].append((time.perf_counter() - started) / STEPS)
            ranks.broadcast(patient=True)
        number += 1
        if number == 1:
            slowest = max(times[0] for times in seconds.values()) * STEPS
            rounds = ranks.broadcast(max(4, min(MOST_ROUNDS, int(SECONDS / slowest))))
    found: Choice | None = trainer(name, batch, "auto").plan.choice
    if ranks.rank:
        return None
    assert found is not None
    counted = [1e6 * (each or 0.0) for each in (found.one, found.data, found.tensor)]
    took = [1e6 * statistics.median(seconds.get(way, [0.0])) for way in PARALLEL]
    return Point(name, batch, ranks.size, found.way, *counted, *took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="ways", help="what the networks are drawn by")
    parser.add_argument("--points", type=int, default=16)
    parser.add_argument("--json", type=Path, help="a file to write the points to")
    options = parser.parse_args()
    ranks = communicator()
    if ranks is None:
        raise SystemExit("several ranks are compared: python -m mlpgpu launch -n 2 benchmarks/ranks_ways.py")
    chance, points = random.Random(options.seed), []
    for _ in range(options.points):
        point = measure(*drawn(chance), ranks)
        if point is not None:
            points.append(point)
            print(
                f"{point.network:34} {point.batch_size:5}  one {point.one:8,.0f} ({point.counted_one:8,.0f})  data "
                f"{point.data:8,.0f} ({point.counted_data:8,.0f})  tensor {point.tensor:8,.0f} "
                f"({point.counted_tensor:8,.0f}) µs, counted in brackets; chosen {point.chosen:6}  ×{point.least:.2f}",
                flush=True,
            )
    if points:
        near = sum(point.least >= 0.9 for point in points)
        print(f"within a tenth of the fastest way {near} of {len(points)}, least ×{min(p.least for p in points):.2f}")
        if options.json:
            about = {"seed": options.seed, **surroundings(packages=["mpi4py"])}
            options.json.write_text(json_lines(points, about), encoding="utf-8")


if __name__ == "__main__":
    main()
