"""Runs drawn at random: their plans, data and callbacks; and what must be the same, whatever broke them off."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from runs import run_of

import mlpgpu as mg

CHECKPOINTS = ("a.h5", "b.h5")  # those of a run, where it has them


class Remember(mg.Callback):
    """Has the CRC of the parameters at every moment that it was told of."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[int] = []

    @property
    def every_steps(self) -> int:
        return self.every

    def _look(self, trainer: Any) -> None:
        self.seen.append(zlib.crc32(trainer.network.flat_parameters()) ^ trainer.steps)

    def step_end(self, trainer: Any) -> None:
        self._look(trainer)

    def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
        self._look(trainer)

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


class Interfere(mg.Callback):
    """Sets the rate and a bias after some epochs, to what follows from the epoch."""

    def __init__(self, bias: str, *, sets_rate: bool) -> None:
        self.bias, self.sets_rate = bias, sets_rate

    def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
        if trainer.epochs % 2 == 0:
            shape = trainer.network.parameters[self.bias].shape
            trainer.network.parameters = {self.bias: np.full(shape, 0.01 * trainer.epochs)}
        elif self.sets_rate:
            trainer.rate = 0.02 / trainer.epochs


class AddColumn(mg.Callback):
    """Adds a column that another one may watch."""

    columns = ("gap",)

    def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
        record["gap"] = record["loss"] - record.get("validation_loss", 0.0)


PRECISIONS = {"cpu": ("float32", "float64"), "cuda": ("float32", "float32-ieee")}


@dataclass(frozen=True)
class RandomRun:
    """A run that follows from its seed, on a backend."""

    seed: int
    backend: str = "cpu"
    settings: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        n_in, hidden, classes = chance.randint(2, 6), chance.randint(3, 12), chance.randint(2, 4)
        rows, batch = chance.randint(16, 60), chance.choice([4, 7, 8, 16])
        is_classifier = chance.random() < 0.6
        epochs = chance.randint(3, 5)
        steps = epochs * (rows // batch)
        schedules = [
            0.02, 0.05, mg.StepDecay(0.05, 0.5, steps=max(1, steps // 3)), mg.CosineDecay(0.05, epochs=epochs),
            mg.WarmUp(0.03, epochs=1.5), mg.OneCycle(0.05, steps=max(2, steps)),
            mg.ReduceOnPlateau(0.05, patience=1, monitor="loss", min_delta=0.1),
        ]  # fmt: skip
        rate, penalties = chance.choice(schedules), chance.choice([{}, {"l2": 1e-3}, {"clip_norm": 0.3}])
        optimizer = chance.choice([mg.SGD, mg.Momentum, mg.Nesterov, mg.RMSprop, mg.Adam, mg.AdamW])(rate, **penalties)
        layers: list[Any] = [mg.Dense(n_in, hidden, chance.choice(["tanh", "gelu", "relu"]))]
        if chance.random() < 0.5:
            layers.append(mg.Dropout(0.2))
        layers.append(mg.Dense(hidden, classes))
        if chance.random() < 0.3:
            layers.insert(0, mg.Standardize(n_in))
        draw = np.random.default_rng(self.seed)
        x = draw.standard_normal((rows, n_in))
        y = draw.integers(0, classes, rows) if is_classifier else draw.standard_normal((rows, classes))
        weight = draw.uniform(0.5, 2.0, rows) if chance.random() < 0.3 else None
        kinds = ["stop", "epochs", "steps", "log", "remember", "interfere", "column"]
        chosen = chance.sample(kinds, chance.randint(2, len(kinds)))
        object.__setattr__(
            self,
            "settings",
            {
                "layers": layers, "loss": "softmax_cross_entropy" if is_classifier else "squared_error",
                "optimizer": optimizer, "data": mg.Dataset(x, y, weight), "epochs": epochs, "batch_size": batch,
                "streams": chance.choice([1, 1, 2, 3]), "precision": chance.choice(PRECISIONS[self.backend]),
                "shuffle": chance.random() < 0.8, "drop_last": chance.random() < 0.3 and batch <= 0.8 * rows,
                "validation": chance.choice([None, 0.2]), "callbacks": chosen, "every": chance.randint(1, 5),
                "patience": chance.randint(1, 3), "bias": f"{len(layers) - 1}.bias", "sets_rate": chance.random() < 0.5,
            },
        )  # fmt: skip

    def trainer(self) -> mg.Trainer:
        s = self.settings
        options = {name: s[name] for name in ("batch_size", "streams", "precision")}
        network = mg.Network(s["layers"], seed=self.seed)
        return mg.Trainer(network, s["loss"], s["optimizer"], backend=self.backend, **options)

    @property
    def least_steps(self) -> int:
        """Steps that all its epochs have, with the rows that are held out left out, and batches that are not full."""
        return self.settings["epochs"] * int(0.8 * len(self.settings["data"]) / self.settings["batch_size"])

    def resume(self, path: Path) -> mg.Trainer:
        return mg.Trainer.resume(path, backend=self.backend)

    def callbacks(self, folder: Path) -> list[mg.Callback]:
        s, monitor = self.settings, "loss" if self.settings["validation"] is None else "validation_loss"
        makers = {
            "stop": lambda: mg.EarlyStopping(monitor, patience=s["patience"]),
            "epochs": lambda: mg.Checkpoint(folder / "a.h5", keep_best=True, monitor=monitor),
            "steps": lambda: mg.Checkpoint(folder / "b.h5", s["every"], "step", keep_best=True, monitor="loss"),
            "log": lambda: mg.CSVLogger(folder / "log.csv"),
            "remember": lambda: Remember(s["every"]),
            "interfere": lambda: Interfere(s["bias"], sets_rate=s["sets_rate"]),
            "column": AddColumn,
        }
        return [makers[kind]() for kind in s["callbacks"]]

    def fit(self, trainer: mg.Trainer, folder: Path, *more: mg.Callback) -> mg.History:
        options = {name: self.settings[name] for name in ("validation", "shuffle", "drop_last")}
        callbacks = [*self.callbacks(folder), *more]
        return trainer.fit(
            self.settings["data"], self.settings["epochs"], callbacks=callbacks, progress=False, **options
        )


def outcome(trainer: mg.Trainer, folder: Path) -> dict[str, Any]:
    """All that a run leaves: what the trainer saves, the files of its checkpoints, its table."""
    left = run_of(trainer, folder / "outcome.h5")
    for name in ("a.h5", "b.h5", "a.best.h5", "b.best.h5"):
        if (folder / name).exists():
            file = mg.Trainer.resume(folder / name, backend=trainer.backend.name)
            left[name] = file.steps, file.epochs, file.network.flat_parameters().tobytes()
    if (folder / "log.csv").exists():
        rows = [row.split(",") for row in (folder / "log.csv").read_text().splitlines()]
        place = rows[0].index("seconds")
        left["log.csv"] = [[cell for k, cell in enumerate(row) if k != place] for row in rows]
    return left


def differences(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of what is not the same."""
    return [name for name in sorted({*got, *expected}) if got.get(name) != expected.get(name)]
