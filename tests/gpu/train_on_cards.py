"""Runs for tests/gpu/test_ranks_on_cards.py: ``python train_on_cards.py FOLDER CASE``, by itself or under mpirun.

Each rank writes to the folder what it ends with, and rank 0 the whole run.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mlpgpu as mg
from mlpgpu.backends.cuda import own_card
from mlpgpu.backends.cuda.runtime import find_device
from mlpgpu.backends.cuda.select import thresholds

TIED = mg.Dense(64, 64, "tanh")


@dataclass(frozen=True)
class Case:
    """A network of these layers, trained on so many rows.

    Attributes:
        options: of the trainer.
        validates: whether a share of the rows is held out.
        room: for the rows on a card, as a part of what they take there; of less than 1 several cards have partitions.
        has_bytes: whether inputs are bytes, in place of float32.
        sorts: whether the card makes the orders of its epochs, however few rows there are.
    """

    layers: list[mg.layers.Layer]
    options: dict[str, Any]
    rows: int = 500
    epochs: int = 3
    validates: bool = False
    batch_size: int = 48
    loss: str = "softmax_cross_entropy"
    room: float | None = None
    has_bytes: bool = False
    sorts: bool = False


SMALL = [mg.Dense(20, 64, "relu"), mg.Dense(64, 64, "tanh"), mg.Dense(64, 3)]
EVEN = [mg.Dense(1024, 1024, "relu"), mg.Dense(1024, 1024, "relu"), mg.Dense(1024, 10)]
LARGE = [mg.Dense(2048, 2048, "relu"), mg.Dense(2048, 2048, "relu", bias=False), mg.Dense(2048, 10)]
WIDE = [mg.Dense(784, 2048, "relu"), mg.Dense(2048, 2048, "relu"), mg.Dense(2048, 10)]

# In each the last batch of an epoch is short; "wide" is exchanged in several pieces, "moved where made" as well, whose
# weights each have a rank that moves them along the other one's gradient and its own; the others are exchanged in one.
CASES = {
    "two shards": Case(SMALL, {"streams": 2, "optimizer": mg.Adam(0.01)}),
    "three shards": Case([mg.Standardize(20), *SMALL], {"streams": 3, "optimizer": mg.Momentum(0.05)}),
    "eight shards": Case(SMALL, {"streams": 8, "optimizer": mg.RMSprop(0.01)}, rows=483),
    "clipped": Case(SMALL, {"streams": 4, "optimizer": mg.Nesterov(0.1, clip_norm=0.05)}),
    "tied and dropped": Case(
        [mg.Dense(20, 64, "relu"), TIED, mg.Dropout(0.2), TIED, mg.Dense(64, 3)],
        {"streams": 2, "optimizer": mg.AdamW(0.01), "class_weight": {0: 2.0}},
    ),
    "validated": Case(SMALL, {"streams": 2, "metrics": ["accuracy"]}, validates=True),
    "streamed": Case(
        SMALL, {"streams": 2, "memory_share": 1e-6, "optimizer": mg.SGD(0.1)}, rows=40_000, batch_size=512
    ),
    "one shard": Case(SMALL, {"streams": 1, "optimizer": mg.Adam(0.01)}),
    "clipped, two shards": Case(SMALL, {"streams": 2, "optimizer": mg.Adam(0.01, clip_norm=0.05)}),
    "wide": Case(WIDE, {"streams": 2, "precision": "bfloat16"}, rows=4000, batch_size=512),
    "wide, float32": Case(WIDE, {"streams": 4, "optimizer": mg.Adam(0.001, clip_norm=1.0)}, rows=3000, batch_size=512),
    "moved where made": Case(
        EVEN, {"streams": 2, "precision": "bfloat16", "optimizer": mg.Adam(0.001, alpha=0.1)}, rows=3000, batch_size=512
    ),
    "moved where made, tf32": Case(EVEN, {"streams": 2, "precision": "tf32"}, rows=3000, batch_size=512),
    "moved where made, large": Case(LARGE, {"streams": 2, "optimizer": mg.Momentum(0.01)}, rows=3000, batch_size=1024),
    "moved where made, many rows": Case(
        EVEN, {"streams": 2, "precision": "bfloat16"}, rows=50_000, batch_size=32_768, epochs=2
    ),
    "partitioned": Case(SMALL, {"streams": 2}, rows=40_007, batch_size=512, room=0.8),
    "partitioned, three shards": Case(
        [mg.Standardize(20), *SMALL], {"streams": 3, "optimizer": mg.Adam(0.01)}, rows=40_007, batch_size=509, room=0.9
    ),
    "partitioned bytes": Case(
        [mg.Dense(783, 64, "relu"), mg.Dropout(0.2), mg.Dense(64, 10)],
        {"streams": 4, "optimizer": mg.Adam(0.01)},
        rows=9_001,
        batch_size=256,
        room=0.75,
        has_bytes=True,
        validates=True,
    ),
    "partitioned, wide": Case(
        EVEN,
        {"streams": 2, "precision": "bfloat16", "class_weight": {0: 2.0}},
        rows=6000,
        batch_size=512,
        room=0.8,
        sorts=True,
    ),
}

DEEP = [mg.Dense(256, 512, "tanh"), mg.Dropout(0.2), mg.Dense(512, 500, "gelu"), mg.Dense(500, 300, "relu")]
TIED_WIDE = mg.Dense(256, 256, "tanh")
TALL = [mg.Dense(20_000, 90, "relu"), mg.Dense(90, 90, "relu"), mg.Dense(90, 10)]

# Networks in parts. The first layer of the tall ones is split along k, so that each card has columns of the data alone.
PARTS = {
    "deep": Case([*DEEP, mg.Dropout(0.3), mg.Dense(300, 10)], {"parts": 2, "optimizer": mg.Adam(0.001, alpha=0.1)}),
    "clipped, validated": Case(
        [mg.Standardize(256), *DEEP, mg.Dense(300, 10)],
        {"parts": 2, "metrics": ["accuracy"], "optimizer": mg.Nesterov(0.05, clip_norm=0.1)},
        validates=True,
    ),
    "four parts": Case([*DEEP, mg.Dense(300, 10)], {"parts": 4, "optimizer": mg.RMSprop(0.001)}),
    "local, tied": Case(
        [mg.LocallyConnected(300, 45, "tanh"), TIED_WIDE, TIED_WIDE, *DEEP, mg.Dense(300, 10)],
        {"parts": 2, "optimizer": mg.Momentum(0.05)},
    ),
    "tensor cores": Case(
        LARGE, {"parts": 2, "precision": "bfloat16", "optimizer": mg.Momentum(0.05)}, rows=3000, batch_size=512
    ),
    "tensor cores, tf32": Case(WIDE, {"parts": 3, "precision": "tf32"}, rows=3000, batch_size=512),
    "tensor cores, float32": Case(LARGE, {"parts": 2, "optimizer": mg.Adam(0.001)}, rows=3000, batch_size=1024),
    "tall": Case(TALL, {"parts": 2, "optimizer": mg.Momentum(0.01)}, rows=1000, batch_size=128),
    "tall, few rows": Case(TALL, {"parts": 2, "optimizer": mg.Momentum(0.001)}, rows=50, batch_size=4, epochs=2),
    "tall, streamed": Case(
        TALL, {"parts": 2, "memory_share": 1e-6, "optimizer": mg.SGD(0.01)}, rows=1000, batch_size=128
    ),
}

# Runs that end with a rank that is killed or stopped.
ENDLESS = {
    "endless": Case(SMALL, {"streams": 2}, rows=4000, epochs=1_000_000),
    "endless, tall": Case(TALL, {"parts": 2}, rows=1000, batch_size=128, epochs=1_000_000),
}


def data_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    draw, last = np.random.default_rng(1), case.layers[-1]
    n_in = next(layer.n_in for layer in case.layers if isinstance(layer, (mg.Dense, mg.LocallyConnected)))
    x: np.ndarray = draw.standard_normal((case.rows, n_in)).astype(np.float32)
    if case.has_bytes:
        x = np.clip(128 + 40 * x, 0, 255).astype(np.uint8)
    return x, (x[:, : last.n_out].argmax(axis=1)).astype(np.int64)  # type: ignore[attr-defined]


def memory_share(case: Case, row_bytes: int) -> float:
    """Of a card's memory, the room that the case has for its rows, which have a target and a weight as well."""
    assert case.room is not None
    rows = case.rows - case.rows // 5 if case.validates else case.rows
    return case.room * rows * (row_bytes + 8) / find_device(own_card()).total_bytes


def check_partitioned(trainer: mg.Trainer) -> None:
    """Raise AssertionError unless the card of each rank had a partition of the set, and epochs were taken from all."""
    program: Any = trainer._engine.program
    fed = program.training.data
    assert fed.is_partitioned and fed._takes and fed.pieces > 2, (fed.is_partitioned, fed.pieces)


def end_here(folder: Path, how: signal.Signals) -> None:
    """Leave a file, whose time tells when, and send this process the signal."""
    (folder / "ended").touch()
    os.kill(os.getpid(), how)


def main(folder: Path, name: str, *, ends: str = "") -> None:
    """Run a case.  ``ends``: what becomes of rank 1 after some seconds, ``"killed"`` or ``"stopped"``.

    ``"whole"`` has one process train a network whole that others have in parts, and ``"auto"`` leaves it to ranks to
    choose parts.
    """
    case, me = {**CASES, **PARTS, **ENDLESS}[name], mg.rank()
    parallel = "tensor" if "parts" in case.options else "data"
    if ends in ("killed", "stopped") and me == 1:
        how = signal.SIGKILL if ends == "killed" else signal.SIGSTOP
        threading.Timer(20.0, end_here, (folder, how)).start()  # kernels are compiled before that
    if case.sorts:
        thresholds.SORT_LEAST_ROWS = 1
    saved = folder / "run.h5"
    if saved.exists():
        trainer = mg.Trainer.resume(saved, backend="cuda")
    else:
        network = mg.Network(case.layers, seed=2)
        options = {"optimizer": mg.Momentum(0.05), "parallel": parallel, **case.options}
        if case.room is not None:
            options["memory_share"] = memory_share(case, data_of(case)[0][:1].nbytes)
        if ends == "whole":
            options = {**options, "parallel": "none", "parts": None}
        if ends == "auto":
            options = {**options, "parallel": "auto", "parts": None}
        trainer = mg.Trainer(network, case.loss, backend="cuda", batch_size=case.batch_size, **options)
    held = {"validation": 0.2} if case.validates else {}
    if ends == "auto":
        assert trainer.plan.choice is not None and trainer.plan.choice.way == "tensor", trainer.plan.choice
    history = trainer.fit(data_of(case), case.epochs, progress=False, **held)
    if case.room is not None and mg.ranks() > 1:
        check_partitioned(trainer)
    trainer.save(folder / f"saved{mg.ranks()}.h5")
    records = [{key: value for key, value in record.items() if key != "seconds"} for record in history.records]
    predicted = trainer.network.predict(data_of(case)[0]).tobytes() if "parts" in case.options else None
    left = records, trainer.network.flat_parameters().tobytes(), trainer.steps, predicted
    (folder / f"rank{me}of{mg.ranks()}.pickle").write_bytes(pickle.dumps(left))
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], ends=next(iter(sys.argv[3:]), ""))
