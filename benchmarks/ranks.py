"""One network trained by several ranks, on this machine's cores or cards: scaling, beside PyTorch's DDP and JAX.

Contenders have one thread a rank: ours by MPI under ``"ordered"``, DistributedDataParallel by gloo, JAX with a device a
rank and the batch sharded over them, an epoch in one jit; its single device takes all cores, though told otherwise.
With ``--backend cuda`` each rank has a card: ours by copy engines, DistributedDataParallel by NCCL, and ``captured``:
PyTorch with one flat gradient, one all-reduce, and steps captured as a CUDA graph.
Each measurement is a process of its own, or one a rank; contenders take turns, round by round, and a figure is the
median of the rounds.  Ratios are of the same round.

*Strong*: the batch is the same for any number of ranks.  *Weak*: it grows with them.  Efficiency is the time of one
rank over the time of all, times their number if strong.  ``ranks_model.py`` has a
model of it.

    python benchmarks/ranks.py [--backend cuda] [--ranks 1 2] [--only mlpgpu …] [--rounds 3] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlpgpu.bench import json_lines, surroundings

CONTENDERS = {"cpu": ("mlpgpu", "ddp", "jax"), "cuda": ("mlpgpu", "captured", "ddp", "jax")}
BY_TORCH = "ddp", "captured"  # which torchrun starts
CHILD = Path(__file__).with_name("ranks_contenders.py")
ROOT = Path(__file__).parents[1]
NETWORKS = {
    "cpu": ("784-128-10:128", "784-1024-1024-10:1024", "256-512-512-512-10:512"),
    "cuda": ("784-128-10:128", "784-1024-1024-10:1024", "784-1024-1024-10:8192", "4096-4096-4096-4096-4096-10:8192"),
}
PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "tf32", "bfloat16")}
SCALINGS = "strong", "weak"
STEPS = 16  # of an epoch
SECONDS = 300  # after which a child has failed


@dataclass(frozen=True)
class Result:
    """A contender's medians over the rounds, in microseconds a step."""

    backend: str
    precision: str
    network: str
    batch_size: int
    scaling: str
    ranks: int
    contender: str
    microseconds: float
    efficiency: float | None
    of_ours: float | None  # its time over ours, the median over the rounds


def command(contender: str, ranks: int) -> list[str]:
    """What starts a contender on so many ranks."""
    python = [sys.executable, str(CHILD), contender]
    if ranks == 1 or contender == "jax":
        return python
    if contender in BY_TORCH:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [sys.executable, *launcher, str(CHILD), contender]
    return [sys.executable, "-m", "mlpgpu", "launch", "-n", str(ranks), str(CHILD), contender]


def microseconds(
    contender: str,
    network: str,
    batch: int,
    ranks: int,
    seconds: float,
    backend: str = "cpu",
    precision: str = "float32",
) -> float:
    arguments = [network, str(batch), str(batch * STEPS), str(ranks), str(seconds), backend, precision]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # Packages may lie in a folder that only PYTHONPATH names.  Sums by multicast are not what is compared.
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"NCCL_NVLS_ENABLE": "0", **os.environ, **threads, "PYTHONPATH": paths}
    done = subprocess.run(
        [*command(contender, ranks), *arguments], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        raise SystemExit(f"{contender} on {ranks} ranks failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(network: str, batch: int, precision: str, options: argparse.Namespace) -> list[Result]:
    """All contenders on all numbers of ranks, strong and weak, in turns."""
    cases = [
        (scaling, ranks, batch * ranks if scaling == "weak" else batch)
        for scaling in options.scaling
        for ranks in options.ranks
        if scaling == "strong" or ranks > 1
    ]
    times: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(options.rounds):
        for scaling, ranks, rows in cases:
            for contender in options.only:
                found = microseconds(contender, network, rows, ranks, options.seconds, options.backend, precision)
                times.setdefault((scaling, ranks, contender), []).append(found)
    return [
        Result(
            *(options.backend, precision, network, rows, scaling, ranks, contender),
            microseconds=statistics.median(times[scaling, ranks, contender]),
            efficiency=_efficiency(times, scaling, ranks, contender),
            of_ours=_ratio(times, scaling, ranks, contender),
        )
        for scaling, ranks, rows in cases
        for contender in options.only
    ]


def _efficiency(
    times: dict[tuple[str, int, str], list[float]], scaling: str, ranks: int, contender: str
) -> float | None:
    alone = times.get(("strong", 1, contender))
    if alone is None:
        return None
    pairs = zip(alone, times[scaling, ranks, contender], strict=True)
    return statistics.median(one / (many * (ranks if scaling == "strong" else 1)) for one, many in pairs)


def _ratio(times: dict[tuple[str, int, str], list[float]], scaling: str, ranks: int, contender: str) -> float | None:
    ours = times.get((scaling, ranks, "mlpgpu"))
    if ours is None or contender == "mlpgpu":
        return None
    return statistics.median(theirs / own for theirs, own in zip(times[scaling, ranks, contender], ours, strict=True))


def show(results: Sequence[Result]) -> None:
    for result in results:
        efficiency = "" if result.efficiency is None else f", efficiency {result.efficiency:.2f}"
        ratio = "" if result.of_ours is None else f", {result.of_ours:.2f} × ours"
        print(
            f"{result.network:20} {result.precision:8} batch {result.batch_size:6,} {result.scaling:6} "
            f"{result.ranks} ranks {result.contender:8} {result.microseconds:10,.0f} µs a step{efficiency}{ratio}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="(default: %(default)s)")
    parser.add_argument("--backend", choices=CONTENDERS, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=sorted({*CONTENDERS["cpu"], *CONTENDERS["cuda"]}))
    parser.add_argument("--networks", nargs="+", metavar="WIDTHS:BATCH")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS["cuda"])
    parser.add_argument("--scaling", nargs="+", choices=SCALINGS, default=SCALINGS, help="(default: both)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line for each result there")
    options = parser.parse_args()
    backend = options.backend
    options.only = options.only or CONTENDERS[backend]
    results: list[Result] = []
    for named in options.networks or NETWORKS[backend]:
        network, _, batch = named.partition(":")
        for precision in options.precisions or PRECISIONS[backend]:
            found = measure(network, int(batch), precision, options)
            show(found)
            results += found
            if options.json is not None:  # after each, so that what was measured is there whatever ends the rest
                about = surroundings(packages=["torch", "jax", "mpi4py"])
                options.json.write_text(json_lines(results, about), encoding="utf-8")


if __name__ == "__main__":
    main()
