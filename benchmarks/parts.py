"""A network in parts on several ranks: ten steps, one slice read, a file by slices, and how much each process held.

    python benchmarks/parts.py --width 8192 --ranks 4

Three layers of the given width train with Adam for ten steps on noise.  Nobody makes an array of the whole state,
weights and Adam's two slots: each rank draws its parts, and the file is written piece by piece by rank 0.  Printed for
each rank are the most bytes that it held, by the kernel's count, in shares of the whole state.  ``--resume`` goes on
from the file for another ten steps, on the number of ranks given.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import mlpgpu as mg

STEPS, BATCH = 10, 16


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(width: int, path: Path, *, resumes: bool) -> None:
    """What each rank does."""
    before = peak_bytes()
    draw = np.random.default_rng(1)
    x, y = (draw.standard_normal((BATCH, width)).astype(np.float32) for _ in range(2))
    started = time.perf_counter()
    if resumes:
        trainer = mg.Trainer.resume(path)
    else:
        layers = [mg.Dense(width, width, "relu"), mg.Dense(width, width, "relu"), mg.Dense(width, width)]
        network = mg.Network(layers, seed=1)
        trainer = mg.Trainer(network, "mse", "adam", batch_size=BATCH, backend="cpu", parallel="tensor")
    made = peak_bytes()
    losses = [trainer.step(x, y) for _ in range(STEPS)]
    trained, stepped = peak_bytes(), time.perf_counter()
    index, part = trainer.own_parts("1.weight")[0]
    trainer.save(path)
    saved, written = peak_bytes(), time.perf_counter()
    whole = trainer.network.parameter_count * 4 * 3
    shares = [f"{(peak - before) / whole:.2f}" for peak in (made, trained, saved)]
    print(
        f"rank {mg.rank()} of {mg.ranks()}: state {whole / 1e9:.2f} GB; the most this rank had beside Python's "
        f"{before / 1e9:.2f} GB: {(saved - before) / 1e9:.2f} GB "
        f"(share when made, trained, saved: {', '.join(shares)}); "
        f"loss {losses[0]:.5f} to {losses[-1]:.5f}; 1.weight[{index[-1].start}:{index[-1].stop}] on axis "
        f"{len(index) - 1}, {part.shape}, mean square {np.square(part).mean():.3e}; "
        f"{stepped - started:.1f} s to the last step, {written - stepped:.1f} s to save",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--path", type=Path, default=Path("parts.h5"))
    parser.add_argument("--resume", action="store_true", help="go on from the file")
    parser.add_argument("--rank-of", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(options.width, options.path, resumes=options.resume)
        return
    own = [str(Path(__file__).resolve()), "--rank-of", "--width", str(options.width), "--path", str(options.path)]
    command = [sys.executable, "-m", "mlpgpu", "launch", "-n", str(options.ranks), *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    sys.exit(subprocess.run(command + ["--resume"] * options.resume, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
