"""Random runs that ranks train together: what each leaves is written to a folder, one file a run and rank.

``python train_together.py FOLDER FIRST LAST``, by itself or under mpirun.  With ``--slowly`` steps take some
milliseconds, so that somebody may kill a rank meanwhile: the run goes on from the checkpoints that it finds.  With
``--tensor`` ranks have parts of networks of more layers, otherwise shards of the batches; with ``--parts N`` they have
N parts, which ``"auto"`` chooses where there are several ranks.  With ``--cuda`` each rank has a card, and every second
run has layers and batches of up to thousands, in any precision.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "fuzz")]

from killed_runs import latest, run_with_checkpoint
from random_runs import CHECKPOINTS, RandomRun, outcome

import mlpgpu as mg
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.plan import construction, costs, plan, sharding, tensor_split

STREAMS = 1, 2, 3, 4, 7, 8
WIDE_STREAMS = 2, 2, 4, 2, 2, 3, 2  # of wide runs; on two cards two shards have launches that no others have
PARTS = 4, 5, 7
CARD_PRECISIONS = "float32", "float32", "float32-ieee", "tf32", "tf32", "bfloat16", "bfloat16", "bfloat16"
SMALLEST = {
    (sharding, "LEAST_BLOCK"): 8,  # elements, so that each rank moves some of these small networks
    (plan, "NORM_BLOCK"): 16,  # elements, so that a part has several blocks
    (tensor_split, "LEAST_WEIGHTS"): 20,  # so that small layers are split, but for the smallest
    (plan, "LEAST_SLICED"): 100,  # numbers, so that some sums are made by slices
}
thresholds.MOVED_LEAST_ELEMENTS = 1 << 12  # so that most weights of wide runs are moved where they are made
USUAL = {(module, name): getattr(module, name) for module, name in SMALLEST}


class Slowly(mg.Callback):
    """Takes its time after each step, and says which processes to kill before the first."""

    every_steps = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, trainer: Any) -> None:
        (self.folder / "begun").touch()

    def step_end(self, trainer: Any) -> None:
        time.sleep(0.01)


class DataRun(RandomRun):
    """A random run whose shards all ranks compute, or, as ``"auto"`` chooses for small networks, rank 0 alone."""

    def trainer(self) -> mg.Trainer:
        s = self.settings
        options = {name: s[name] for name in ("batch_size", "streams", "precision", "parallel")}
        network = mg.Network(s["layers"], seed=self.seed)
        return mg.Trainer(network, s["loss"], s["optimizer"], backend=self.backend, **options)


class TensorRun(RandomRun):
    """A random run of a network in parts."""

    def trainer(self) -> mg.Trainer:
        s = self.settings
        options = {name: s[name] for name in ("batch_size", "precision", "parts", "parallel")}
        network = mg.Network(s["layers"], seed=self.seed)
        return mg.Trainer(network, s["loss"], s["optimizer"], backend=self.backend, **options)


def layers_of_seed(seed: int, n_in: int, n_out: int) -> list[mg.Layer]:
    """Layers of which one at least is split into seven parts: some tied, frozen, locally connected, dropped out of."""
    chance = random.Random(f"layers {seed}")
    layers: list[mg.Layer] = [mg.Standardize(n_in)] if chance.random() < 0.3 else []
    width = n_in
    for _ in range(chance.randint(1, 5)):
        kind, n = chance.random(), chance.randint(7, 23)
        activation: Any = chance.choice(["tanh", "gelu", "relu", "identity"])
        if kind < 0.1:
            layers.append(mg.LocallyConnected(width, chance.randint(1, min(3, width)), activation))
            width = layers[-1].output_width(width)
        elif kind < 0.2:
            layers += [mg.Dense(width, width, activation)] * 2
        else:
            init = chance.choice([None, None, "he_normal", "zeros"])
            layers.append(mg.Dense(width, n, activation, bias=kind < 0.9, init=init, trainable=kind > 0.3))
            width = n
        if chance.random() < 0.4:
            layers.append(mg.Dropout(chance.choice([0.0, 0.2, 0.5])))
    return [*layers, mg.Dense(width, 16, "tanh"), mg.Dense(16, n_out)]


def between(chance: random.Random, least: int, most: int) -> int:
    """A number whose logarithm is drawn evenly."""
    return round(math.exp(chance.uniform(math.log(least), math.log(most))))


def widen(settings: dict[str, Any], seed: int) -> None:
    """Give a run the rows and the widths for which cards have their kernels of large products."""
    chance, draw = random.Random(f"wide {seed}"), np.random.default_rng(seed)
    widths = [between(chance, chance.choice([8, 130]), 1500)]
    widths += [between(chance, 130, 1500) for _ in range(chance.randint(1, 5))]
    n_out, batch = chance.randint(2, 64), between(chance, 32, 2048)
    if chance.random() < 0.5:  # as many large weights for each of two ranks
        widths, batch = [between(chance, 400, 1500)] * chance.choice([3, 5]), between(chance, 256, 2048)
    layers: list[mg.Layer] = [mg.Standardize(widths[0])] if chance.random() < 0.3 else []
    for n_in, width in pairwise(widths):
        init = chance.choice([None, None, "he_normal"])
        activation: Any = chance.choice(["tanh", "gelu", "relu"])
        layers.append(mg.Dense(n_in, width, activation, bias=chance.random() < 0.9, init=init))
        layers += [mg.Dropout(0.2)] if chance.random() < 0.3 else []
    layers.append(mg.Dense(widths[-1], n_out))
    rows = chance.randint(2 * batch, 4 * batch)
    x, is_classifier = draw.standard_normal((rows, widths[0])), settings["loss"] == "softmax_cross_entropy"
    y = draw.integers(0, n_out, rows) if is_classifier else draw.standard_normal((rows, n_out))
    settings.update(layers=layers, data=mg.Dataset(x, y), batch_size=batch, bias=f"{len(layers) - 1}.bias")


def run_of_seed(seed: int, backend: str, *, is_tensor: bool, parts: int | None, parallel: str) -> RandomRun:
    """The random run of a seed, with shards or parts of its own, or so many parts, and with a checkpoint."""
    settings = run_with_checkpoint(seed, backend).settings
    is_wide = backend == "cuda" and seed % 2 == 1
    for (module, name), value in (USUAL if is_wide else SMALLEST).items():
        setattr(module, name, value)
    if backend == "cuda":
        settings["precision"] = random.Random(f"precision {seed}").choice(CARD_PRECISIONS)
    if is_wide:
        widen(settings, seed)
    if not is_tensor:
        run: RandomRun = DataRun(seed, backend)
        streams = WIDE_STREAMS[seed // 2 % len(WIDE_STREAMS)] if is_wide else STREAMS[seed % len(STREAMS)]
        run.settings.update(settings, streams=streams, parallel=parallel)
        return run
    run = TensorRun(seed, backend)
    data = settings["data"]
    layers = settings["layers"] if is_wide else layers_of_seed(seed, data.n_in, settings["layers"][-1].n_out)
    bias = f"{len(layers) - 1}.bias"
    is_chosen = parts is not None and mg.ranks() > 1
    run.settings.update(
        settings,
        layers=layers,
        bias=bias,
        parallel="auto" if is_chosen else "tensor",
        parts=None if is_chosen else parts or PARTS[seed % len(PARTS)],
    )
    return run


def train(
    folder: Path, seed: int, backend: str, *, is_slow: bool, is_tensor: bool, is_auto: bool, parts: int | None = None
) -> None:
    """Train the run of a seed and write down what it leaves, and what every rank has of it."""
    parallel = "auto" if is_auto else "data"
    run = run_of_seed(seed, backend, is_tensor=is_tensor, parts=parts, parallel=parallel)
    own = folder / str(seed)
    if parts is not None:
        costs.choose_way = lambda *seconds: "tensor"
    construction.is_one_exchange_faster = lambda plan: seed % 2 == 0  # both ways, whose bits are the same
    own.mkdir(parents=True, exist_ok=True)
    trainer = latest(run, [own / name for name in CHECKPOINTS])
    (own / f"rank{mg.rank()}.pid").write_text(str(os.getpid()))
    history = run.fit(trainer, own, *([Slowly(own)] if is_slow else []))
    left = None
    if mg.rank() == 0:
        left = outcome(trainer, own)
    elif is_tensor and parts is None:
        trainer.save(own / "outcome.h5")  # which they do together; in what rank 0 does then the others have no part
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in history.records]
    values = records, trainer.network.flat_parameters().tobytes(), trainer.steps, trainer.rate
    (own / f"rank{mg.rank()}.pickle").write_bytes(pickle.dumps((left, values)))


if __name__ == "__main__":
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        train(
            Path(sys.argv[1]),
            number,
            "cuda" if "--cuda" in sys.argv else "cpu",
            is_slow="--slowly" in sys.argv,
            is_tensor="--tensor" in sys.argv or "--parts" in sys.argv,
            is_auto="--auto" in sys.argv,
            parts=int(sys.argv[-1]) if "--parts" in sys.argv else None,
        )
