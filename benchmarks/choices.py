"""What users or `select` may choose, each way in turns on one card: targets by texture or by plain loads, and streams.

    python benchmarks/choices.py [--only NAME ...] [--rounds N] [--json PATH]

A row is a workload of mlpgpu.bench at a precision; its figures are microseconds of a training step over whole epochs,
and the median over rounds of its time over the default's, which reads targets by texture and has one stream.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlpgpu as mg
from mlpgpu import bench
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.backends.cuda.runtime import Device
from mlpgpu.errors import MlpgpuError

ROUNDS = 9
DEFAULT, PLAIN = "texture, 1 stream", "plain loads"
STREAMS = (2, 4, 8)


@dataclass(frozen=True)
class Row:
    """A workload at a precision with a choice; the time of a step, and its ratio to the default's."""

    workload: str
    precision: str
    choice: str
    microseconds: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.workload:8} {self.precision:9} {self.choice:18} {self.microseconds:12,.2f} {self.ratio:8.3f}"


@contextmanager
def texels(device: Device, most: int) -> Iterator[None]:
    """Inside the block the card's textures reach so many elements; targets that are more are read by plain loads."""
    reach, device.most_texels = device.most_texels, most
    try:
        yield
    finally:
        device.most_texels = reach


def measure(key: str, precision: str, backend: CudaBackend, rounds: int) -> Iterator[Row]:
    """The rows of a workload, the default first."""
    workload = bench.WORKLOADS[key]
    data = mg.Dataset(*workload.arrays())

    def epochs(streams: int = 1) -> bench.Epochs:
        return bench.Epochs(workload.trainer(backend=backend.name, precision=precision, streams=streams), data)

    contenders = {DEFAULT: epochs()}
    with texels(backend.device, 1):
        contenders[PLAIN] = epochs()
        contenders[PLAIN]()  # the data come to the card with its first step
    if workload.batch_size > 1:
        contenders |= {f"{count} streams": epochs(count) for count in STREAMS}
    seconds = bench.take_turns(contenders, rounds)
    for choice, turns in seconds.items():
        ratio = bench.median_ratio(turns, seconds[DEFAULT])
        yield Row(key, precision, choice, 1e6 * statistics.median(turns) / workload.steps, ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure textures against plain loads, and streams, on a GPU.")
    parser.add_argument("--only", nargs="+", choices=list(bench.WORKLOADS), default=list(bench.WORKLOADS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line of JSON for each row there")
    arguments = parser.parse_args()
    try:
        backend = CudaBackend()
    except MlpgpuError as error:
        sys.exit(str(error))
    rows: list[Row] = []
    print(f"{'workload':8} {'precision':9} {'choice':18} {'µs a step':>12} {'ratio':>8}")
    for key in arguments.only:
        for precision in bench.WORKLOADS[key].precisions:
            for row in measure(key, precision, backend, arguments.rounds):
                rows.append(row)
                print(row, flush=True)
            if arguments.json:
                arguments.json.write_text(bench.json_lines(rows, bench.surroundings(backend)), encoding="utf-8")


if __name__ == "__main__":
    main()
