"""Soak: the same work again and again, after which memory, handles, files and threads stand where they stood.

    python tests/fuzz/soak.py [--backend cuda] [--scale 0.1]

Each row of the table is one kind of work, cut into ten parts.  Memory may grow while pools and caches fill; what is
told is the growth from the end of the second part to the end of the last, per unit of work and in all.  It fails where
memory has grown by more than ALLOWED bytes, or handles, files or threads by more than one.

glibc keeps what was freed, for each thread's arena apart and between blocks that are still in use: how much depends on
cores and on chance, and it counts as the process's memory.  So all threads have one arena, and glibc is asked to give
back what is free before memory is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

import mlpgpu as mg

ALLOWED = 4 << 20
PARTS = 10

BATCH, STEPS_PER_EPOCH = 4, 512  # so that a million steps leave a history of 2,000 epochs to whatever is saved
DRAW = np.random.default_rng(0)
ROWS = BATCH * STEPS_PER_EPOCH
X, LABELS = DRAW.normal(size=(ROWS, 4)).astype(np.float32), DRAW.integers(0, 2, ROWS)
DATA, FEW = mg.Dataset(X, LABELS), mg.Dataset(X[:512], LABELS[:512])


M_ARENA_MAX = -8  # of glibc's malloc.h


def share_one_arena() -> None:
    """Have threads that come from now on take their memory from one arena, where the library is glibc."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


def give_freed_memory_back() -> None:
    """Collect garbage, and have glibc return what is free to the system."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@dataclass(frozen=True)
class Level:
    """What the process has: bytes of memory here and on the card, open files, threads, and entries of the folder."""

    memory: int
    card: int
    handles: int
    threads: int
    files: int


class Soak:
    """The work, on one backend, in a folder of its own."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        self.process = psutil.Process()
        self.trainer = self.made()
        self.trainer.fit(DATA, 1, progress=False)
        self.network = self.trainer.network
        self.predictor = self.network.predictor(backend)

    def made(self, seed: int = 1) -> mg.Trainer:
        network = mg.Network([mg.Dense(4, 4, "relu"), mg.Dense(4, 2)], seed=seed)
        return mg.Trainer(network, "softmax_cross_entropy", mg.Momentum(1e-4), batch_size=BATCH, backend=self.backend)

    def level(self) -> Level:
        give_freed_memory_back()
        card = 0
        if self.backend.startswith("cuda"):
            from mlpgpu.backends.cuda.runtime import find_device

            with find_device(0) as device:
                card = device.total_bytes - device.free_bytes
        return Level(
            self.process.memory_info().rss,
            card,
            self.process.num_fds(),
            threading.active_count(),
            len(os.listdir(self.folder)),
        )

    # --- kinds of work, each of so many units ---

    def steps(self, count: int) -> None:
        """Steps of one long fit after another."""
        self.trainer.fit(DATA, -(-count // STEPS_PER_EPOCH), progress=False)

    def single_steps(self, count: int) -> None:
        for _ in range(count):
            self.trainer.step(X[:BATCH], LABELS[:BATCH])

    def fits(self, count: int) -> None:
        for seed in range(count):
            self.made(seed).fit((X[:16], LABELS[:16]), 1, validation=(X[:8], LABELS[:8]), progress=False)

    def failed_fits(self, count: int) -> None:
        """Fits that end by an error of a callback."""

        def fail(record: dict[str, float]) -> None:
            raise ZeroDivisionError

        for seed in range(count):
            with contextlib.suppress(ZeroDivisionError):
                self.made(seed).fit((X[:16], LABELS[:16]), 1, callbacks=[fail], progress=False)

    def predictions(self, count: int) -> None:
        for number in range(count):
            self.predictor(X[: 1 + number % 64])

    def predictors(self, count: int) -> None:
        for _ in range(count):
            with self.network.predictor(self.backend) as predictor:
                predictor(X[:3])

    def evaluations(self, count: int) -> None:
        for _ in range(count):
            self.trainer.evaluate(FEW)

    def checkpoints(self, count: int) -> None:
        for _ in range(count):
            self.trainer.save(self.folder / "run.h5")

    def resumes(self, count: int) -> None:
        self.trainer.save(self.folder / "run.h5")
        for _ in range(count):
            mg.Trainer.resume(self.folder / "run.h5", backend=self.backend).step(X[:BATCH], LABELS[:BATCH])

    def copies(self, count: int) -> None:
        for _ in range(count):
            copy.deepcopy(self.trainer).step(X[:BATCH], LABELS[:BATCH])

    def threads(self, count: int) -> None:
        """Fits in threads that come and go."""
        for start in range(0, count, 4):
            workers = [threading.Thread(target=self.fits, args=(1,)) for _ in range(min(4, count - start))]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()


WORK: dict[str, tuple[Callable[[Soak, int], None], int]] = {
    "steps": (Soak.steps, 1_000_000),
    "single steps": (Soak.single_steps, 20_000),
    "fits": (Soak.fits, 10_000),
    "fits that fail": (Soak.failed_fits, 2_000),
    "predictions": (Soak.predictions, 100_000),
    "predictors": (Soak.predictors, 2_000),
    "evaluations": (Soak.evaluations, 1_000),
    "checkpoints": (Soak.checkpoints, 3_000),
    "resumes": (Soak.resumes, 1_000),
    "copies": (Soak.copies, 1_000),
    "fits in threads": (Soak.threads, 1_000),
}


def soak(backend: str, scale: float, names: list[str]) -> bool:
    """Do all the work and print a row for each kind; returns whether everything stayed level."""
    is_level = True
    heads = ("KiB grown", 11), ("bytes/unit", 12), ("on card", 9), ("handles", 9), ("threads", 9), ("files", 7)
    print(f"{'work':16}{'units':>10}{'CPU s':>9}" + "".join(head.rjust(width) for head, width in heads))
    with tempfile.TemporaryDirectory() as folder:
        made = Soak(backend, Path(folder))
        for name in names:
            work, units = WORK[name]
            part = max(1, int(units * scale) // PARTS)
            began, levels = time.process_time(), []
            for _ in range(PARTS):
                with contextlib.redirect_stderr(io.StringIO()):
                    work(made, part)
                levels.append(made.level())
            first, last = levels[1], levels[-1]
            grown, on_card = last.memory - first.memory, last.card - first.card
            handles, threads, files = (
                last.handles - first.handles,
                last.threads - first.threads,
                last.files - first.files,
            )
            print(
                f"{name:16}{part * PARTS:>10,}{time.process_time() - began:>9.1f}{grown / 1024:>11,.0f}"
                f"{grown / (part * (PARTS - 2)):>12.2f}{on_card:>9,}{handles:>9}{threads:>9}{files:>7}",
                flush=True,
            )
            is_level &= grown <= ALLOWED and on_card <= 0 and max(handles, threads, files) <= 1
    return is_level


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="of the units of work")
    parser.add_argument("--only", default="", help="part of the name of the work")
    given = parser.parse_args()
    names = [name for name in WORK if given.only in name]
    share_one_arena()
    sys.exit(not soak(given.backend, given.scale, names))


if __name__ == "__main__":
    main()
