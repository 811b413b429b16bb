"""Steps of several cards whose data are whole on each card, partitioned over all of them, or streamed from the host.

The same set each time; what differs is the room that a card has for it (``memory_share``), and so what becomes of it.
With room for all of the rows they are whole on each card; with room for a partition each card has one, and a step's
rows come from all cards; with less each rank streams the rows of its shards from the host.  A figure is the median of
epochs behind the first two, which bring the rows to the cards.  All three must end with the same parameters.

    python -m mlpgpu launch -n 2 benchmarks/partitioned_rows.py [--networks 4096-4096-10:8192 …] [--json PATH]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import mlpgpu as mg
from mlpgpu.backends.cuda import own_card
from mlpgpu.backends.cuda.kernels import primitives
from mlpgpu.backends.cuda.run.data import pieces
from mlpgpu.backends.cuda.runtime import find_device
from mlpgpu.bench import surroundings

NETWORKS = ("784-1024-1024-10:8192", "4096-4096-4096-4096-4096-10:8192")
ROOMS = {"whole": 1.05, "partitioned": 0.8, "streamed": 0.2}  # of a card, as a part of the set
EPOCHS = 8


@dataclass(frozen=True)
class Result:
    """Microseconds of a step; with the surroundings it is a line of JSON."""

    network: str
    batch_size: int
    rows: int
    precision: str
    inputs: str
    ranks: int
    kept: str
    microseconds: float


def data_of(widths: list[int], rows: int, *, has_bytes: bool) -> mg.Dataset:
    draw = np.random.default_rng(1)
    x = draw.integers(0, 256, (rows, widths[0]), np.uint8) if has_bytes else draw.random((rows, widths[0]), np.float32)
    return mg.Dataset(x, draw.integers(0, widths[-1], rows), scale=1 / 255 if has_bytes else None)


def measure(named: str, kept: str, data: mg.Dataset, options: argparse.Namespace) -> tuple[Result, np.ndarray]:
    """The time of a step, and the parameters at the end."""
    network, _, batch = named.partition(":")
    widths = [int(width) for width in network.split("-")]
    layers = [
        mg.Dense(n_in, n_out, activation="relu" if place < len(widths) - 2 else "identity")
        for place, (n_in, n_out) in enumerate(pairwise(widths))
    ]
    room = ROOMS[kept] * len(data) * (data.storage_x[:1].nbytes + 4)
    trainer = mg.Trainer(
        mg.Network(layers, seed=1), "softmax_cross_entropy", mg.Momentum(0.001, momentum=0.9), batch_size=int(batch),
        precision=options.precision, backend="cuda", parallel="data",
        memory_share=room / find_device(own_card()).total_bytes,
    )  # fmt: skip
    trainer.fit(data, EPOCHS, progress=False)
    program: Any = trainer._engine.program
    fed = program.training.data
    assert (fed.stays, fed.is_partitioned) == (kept != "streamed", kept == "partitioned"), f"{named} is not {kept}"
    steps = -(-len(data) // int(batch))
    found = 1e6 * statistics.median(trainer.history["seconds"][2:]) / steps
    parameters = trainer.network.flat_parameters().copy()
    trainer.close()
    inputs = "bytes" if data.scale is not None else "float32"
    return Result(network, int(batch), len(data), options.precision, inputs, mg.ranks(), kept, found), parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=NETWORKS, metavar="WIDTHS:BATCH")
    parser.add_argument("--precision", default="bfloat16", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=256, help="of an epoch (default: %(default)s)")
    parser.add_argument("--bytes", action="store_true", help="inputs are bytes")
    parser.add_argument("--slots", type=int, default=8, help="slots take no more than 1/SLOTS of the room (default: 8)")
    parser.add_argument("--blocks", type=int, default=primitives.PARTITION_BLOCKS, help="that take rows (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="add a line for each result there")
    options = parser.parse_args()
    primitives.PARTITION_BLOCKS = options.blocks
    pieces.TAKEN_SHARE = options.slots  # the room is small beside that of a set which really exceeds a card
    for named in options.networks:
        widths, batch = named.partition(":")[0].split("-"), int(named.partition(":")[2])
        data = data_of([int(width) for width in widths], batch * options.steps, has_bytes=options.bytes)
        ends: list[np.ndarray] = []
        for kept in ROOMS:
            result, parameters = measure(named, kept, data, options)
            ends.append(parameters)
            if mg.rank() == 0:
                print(f"{named:40} {result.precision} {result.inputs} {kept:11} {result.microseconds:10,.0f} µs a step")
                if options.json is not None:
                    with options.json.open("a", encoding="utf-8") as lines:
                        about = {**dataclasses.asdict(result), **surroundings(packages=["mpi4py"])}
                        lines.write(json.dumps(about, ensure_ascii=False) + "\n")
        assert all((end == ends[0]).all() for end in ends), f"{named}: the ways end with other parameters"


if __name__ == "__main__":
    main()
