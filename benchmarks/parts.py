"""A network in parts on several ranks: ten steps, one slice read, a file by slices, and how much each process held.

    python benchmarks/parts.py --width 8192 --ranks 4
    python benchmarks/parts.py --width 65536 --ranks 2 --backend cuda --without-file    # 155 GB on two cards
    python benchmarks/parts.py --tall --ranks 2 --backend cuda          # microseconds a step of 90000-90-90-10

Three layers of the given width train with Adam for ten steps on noise.  Nobody makes an array of the whole state,
weights and Adam's two slots: each rank draws its parts, on a card where it has one, and the file is written piece by
piece by rank 0.  Printed for each rank are the most bytes that it held, by the kernel's count, in shares of the whole
state; and those of its card that are not free.  ``--resume`` goes on from the file for another ten steps, on the number
of ranks given.  With ``--tall`` a network of 90,000 inputs trains for some epochs instead; with one rank it is whole.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import mlpgpu as mg
from mlpgpu.bench import WORKLOADS, Epochs

STEPS, BATCH = 10, 16
TALL_CALLS, TALL_EPOCHS = 15, 4  # and epochs of a call, as a fit runs short ones


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def card_bytes(trainer: mg.Trainer) -> int:
    """What is taken of this rank's card; 0 on the CPU."""
    device: Any = getattr(trainer.backend, "device", None)
    if device is None:
        return 0
    with device:
        return device.total_bytes - device.free_bytes


def train(width: int, backend: str, path: Path, *, resumes: bool, saves: bool) -> None:
    """What each rank does."""
    before = peak_bytes()
    draw = np.random.default_rng(1)
    x, y = (draw.standard_normal((BATCH, width)).astype(np.float32) for _ in range(2))
    started = time.perf_counter()
    if resumes:
        trainer = mg.Trainer.resume(path, backend=backend)
    else:
        layers = [mg.Dense(width, width, "relu"), mg.Dense(width, width, "relu"), mg.Dense(width, width)]
        network = mg.Network(layers, seed=1)
        trainer = mg.Trainer(network, "mse", "adam", batch_size=BATCH, backend=backend, parallel="tensor")
    made = peak_bytes()
    losses = [trainer.step(x, y)]
    first = time.perf_counter()
    losses += [trainer.step(x, y) for _ in range(STEPS - 1)]
    trained, stepped = peak_bytes(), time.perf_counter()
    index, part = trainer.own_parts("1.weight")[0]
    read = time.perf_counter()
    if saves:
        trainer.save(path)
    saved, written = peak_bytes(), time.perf_counter()
    whole = trainer.network.parameter_count * 4 * 3
    shares = [f"{(peak - before) / whole:.2f}" for peak in (made, trained, saved)]
    mean = float(np.mean([np.square(rows).mean() for rows in np.array_split(part, 64)]))
    print(
        f"rank {mg.rank()} of {mg.ranks()}: state {whole / 1e9:.2f} GB; the most this rank had beside Python's "
        f"{before / 1e9:.2f} GB: {(saved - before) / 1e9:.2f} GB "
        f"(share when made, trained, saved: {', '.join(shares)}), on its card {card_bytes(trainer) / 1e9:.2f} GB; "
        f"loss {losses[0]:.5f} to {losses[-1]:.5f}; 1.weight[{index[-1].start}:{index[-1].stop}] on axis "
        f"{len(index) - 1}, {part.shape}, mean square {mean:.3e}; "
        f"{first - started:.1f} s to the first step, {(stepped - first) / (STEPS - 1):.3f} s for each of the others, "
        f"{read - stepped:.1f} s to read that, {written - read:.1f} s to save",
        flush=True,
    )


def train_tall(backend: str) -> None:
    """Epochs of a network whose first layer is split along k, timed as peers.py times those of one card."""
    workload = WORKLOADS["tall"]
    trainer = workload.trainer(backend=backend, parallel="tensor" if mg.ranks() > 1 else "none")
    train = Epochs(trainer, workload.dataset(workload.arrays()))
    train.epochs, seconds = TALL_EPOCHS, []
    for _ in range(TALL_CALLS):
        started = time.perf_counter()
        loss = train()
        seconds.append((time.perf_counter() - started) / TALL_EPOCHS)
    fastest, median = (1e6 * find(seconds[1:]) / workload.steps for find in (min, statistics.median))
    print(
        f"rank {mg.rank()} of {mg.ranks()}: {workload.name}: {median:.1f} µs a step in the median of "
        f"{TALL_CALLS - 1} times {TALL_EPOCHS} epochs of {workload.steps} steps, {fastest:.1f} in the fastest; "
        f"loss {loss:.6f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="cpu", help="cpu or cuda")
    parser.add_argument("--path", type=Path, default=Path("parts.h5"))
    parser.add_argument("--without-file", action="store_true", help="save nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the file")
    parser.add_argument("--tall", action="store_true", help="microseconds a step of a tall network")
    parser.add_argument("--rank-of", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of or options.ranks == 1:
        if options.tall:
            train_tall(options.backend)
        else:
            saves = not options.without_file
            train(options.width, options.backend, options.path, resumes=options.resume, saves=saves)
        return
    own = [str(Path(__file__).resolve()), "--rank-of", *sys.argv[1:]]
    command = [sys.executable, "-m", "mlpgpu", "launch", "-n", str(options.ranks), *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
