"""Every public callable, found by the package's public names, and arguments with which each of them works.

A target is a function, a constructor, a method, or a property that can be set.  Its parameters are those of its
signature, so that a new one is attacked as soon as it is there: it then has its default where nothing is said here.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from hostile_values import COLUMNS, ROWS

import mlpgpu as mg
from mlpgpu.layers import Layer
from mlpgpu.network.network import SETTABLE
from mlpgpu.network.parameters import Parameters
from mlpgpu.optimizers import Optimizer
from mlpgpu.schedules import Schedule
from mlpgpu.tables.sources import as_source

OUTPUTS = 3


class World:
    """What calls need: a folder, and fresh objects of each kind; ``random`` draws which."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.folder, self.random = folder, random
        numbers = np.random.default_rng(random.randrange(2**32))
        self.x = numbers.normal(size=(ROWS, COLUMNS)).astype(np.float32)
        self.values = numbers.normal(size=(ROWS, OUTPUTS)).astype(np.float32)
        self.numbers = np.arange(ROWS) % OUTPUTS
        self.classifies = random.random() < 0.5

    @property
    def loss(self) -> str:
        return "softmax_cross_entropy" if self.classifies else "mean_squared_error"

    @property
    def y(self) -> np.ndarray:
        return self.numbers if self.classifies else self.values

    def network(self) -> mg.Network:
        scaled = not self.classifies and self.random.random() < 0.3
        last: list[Layer] = [mg.Standardize(OUTPUTS)] if scaled else []
        return mg.Network([mg.Dense(COLUMNS, 4, "tanh"), mg.Dense(4, OUTPUTS), *last], seed=1)

    def trained(self) -> mg.Network:
        """A network that predicts as its trainer left it."""
        trainer = self.trainer()
        trainer.fit(self.data(), 1, progress=False)
        return trainer.network

    def trainer(self, network: mg.Network | None = None, **options: Any) -> mg.Trainer:
        return mg.Trainer(network or self.network(), **{"loss": self.loss, "batch_size": 5, "backend": "cpu"} | options)

    def data(self) -> mg.Dataset:
        return mg.Dataset(self.x, self.y, np.linspace(0.5, 1.5, ROWS) if self.random.random() < 0.3 else None)

    def history(self) -> mg.History:
        records = [{"epoch": epoch, "loss": 1.0 / epoch, "rate": 0.1, "seconds": 0.5} for epoch in (1, 2, 3)]
        return mg.History(records)

    def saved_network(self) -> Path:
        self.trained().save(self.folder / "network.h5")
        return self.folder / "network.h5"

    def saved_run(self) -> Path:
        trainer = self.trainer()
        trainer.fit(self.data(), 1, progress=False)
        trainer.save(self.folder / "run.h5")
        return self.folder / "run.h5"

    def columns(self) -> dict[str, Any]:
        """A table: numbers, a category, truth values, and a target."""
        return {
            "length": self.x[:, 0].tolist(),
            "kind": ["red", "green", "red"] * (ROWS // 3),
            "is_new": [True, False] * (ROWS // 2),
            "price": self.values[:, 0].tolist(),
        }

    def table(self) -> mg.Table:
        return mg.Table(self.columns(), "price")

    def csv(self) -> Path:
        path = self.folder / "table_of_rows.csv"
        columns = self.columns()
        rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        path.write_text("\n".join(rows))
        return path

    def estimator(self) -> Any:
        from sklearn.neural_network import MLPRegressor

        return MLPRegressor(hidden_layer_sizes=(4,), random_state=1).partial_fit(self.x, self.values)

    def idx(self) -> Path:
        mg.datasets.write_idx(self.folder / "array.idx", np.arange(6, dtype=np.uint8))
        return self.folder / "array.idx"

    def counted(self) -> mg.Histograms:
        histograms = mg.Histograms(of=["parameters"], bins=4)
        self.trainer().fit(self.data(), 1, callbacks=[histograms], progress=False)
        return histograms


class Trial:
    """What is called of a trial of Optuna."""

    def report(self, value: float, step: int) -> None:
        """Nobody asks."""

    def should_prune(self) -> bool:
        return False


Maker = Callable[[World], Any]

# Arguments by target; what is not here has its default, or is never replaced by anything but a hostile value.
USUAL: dict[str, dict[str, Maker]] = {
    "Dense": {"n_in": lambda w: COLUMNS, "n_out": lambda w: 4},
    "LocallyConnected": {"n_in": lambda w: COLUMNS, "window": lambda w: 2},
    "Dropout": {"rate": lambda w: 0.25},
    "Standardize": {"n_in": lambda w: COLUMNS},
    "Constant": {"rate": lambda w: 0.1},
    "StepDecay": {"rate": lambda w: 0.1, "factor": lambda w: 0.5, "epochs": lambda w: 2},
    "ExponentialDecay": {"rate": lambda w: 0.1, "factor": lambda w: 0.5, "epochs": lambda w: 2},
    "CosineDecay": {"rate": lambda w: 0.1, "epochs": lambda w: 2},
    "WarmUp": {"rate": lambda w: 0.1, "epochs": lambda w: 2},
    "OneCycle": {"peak": lambda w: 0.1, "epochs": lambda w: 2},
    "ReduceOnPlateau": {"rate": lambda w: 0.1, "monitor": lambda w: "loss"},
    "Checkpoint": {"path": lambda w: w.folder / "checkpoint.h5"},
    "OptunaPruning": {"trial": lambda w: Trial(), "monitor": lambda w: "loss"},
    "TensorBoard": {"folder": lambda w: w.folder / "board"},
    "CSVLogger": {"path": lambda w: w.folder / "table.csv"},
    "EarlyStopping": {"monitor": lambda w: "loss"},
    "Network": {"layers": lambda w: [mg.Dense(COLUMNS, 4, "relu"), mg.Dense(4, OUTPUTS)], "seed": lambda w: 3},
    "Network.parameters=": {"value": lambda w: {"0.bias": np.zeros(4)}},
    "Network.classes=": {"value": lambda w: ["a", "b", "c"]},
    "Network.output=": {"value": lambda w: "softmax"},
    "Network.adapted=": {"value": lambda w: True},
    "Network.frozen": {"places": lambda w: 0},
    "Network.adapt": {"data": lambda w: w.x},
    "Network.predict": {"x": lambda w: w.x},
    "Network.forward": {"x": lambda w: w.x},
    "Network.labels": {"x": lambda w: w.x},
    "Network.save": {"path": lambda w: w.folder / "saved.h5"},
    **{f"Parameters.{name}": {"key": lambda w: "0.weight"} for name in ("get", "setdefault", "__contains__")},
    "Parameters.update": {"values": lambda w: {"0.bias": np.zeros(4)}},
    "Parameters.__getitem__": {"name": lambda w: "0.weight"},
    "Parameters.__setitem__": {"name": lambda w: "0.bias", "values": lambda w: np.zeros(4)},
    "Predictor": {"network": lambda w: w.trained(), "backend": lambda w: "cpu"},
    "Predictor.__call__": {"x": lambda w: w.x},
    "Predictor.logits": {"x": lambda w: w.x},
    "Predictor.labels": {"x": lambda w: w.x},
    "Trainer": {
        "network": lambda w: w.network(),
        "loss": lambda w: w.loss,
        "backend": lambda w: "cpu",
        "batch_size": lambda w: 5,
    },
    "Trainer.fit": {
        "data": lambda w: w.data(),
        "epochs": lambda w: 1,
        "callbacks": lambda w: [lambda record: True],
        "progress": lambda w: False,
    },
    "Trainer.step": {"x": lambda w: w.x[:5], "y": lambda w: w.y[:5]},
    "Trainer.evaluate": {"data": lambda w: w.data()},
    "Trainer.rate=": {"value": lambda w: 0.05},
    "Trainer.save": {"path": lambda w: w.folder / "saved_run.h5"},
    "Trainer.resume": {"path": lambda w: w.saved_run()},
    "Trainer.histograms": {"bins": lambda w: 4},
    "Dataset": {"x": lambda w: w.x, "y": lambda w: w.y},
    "Dataset.labels": {"n_classes": lambda w: OUTPUTS},
    "Dataset.targets": {"n_out": lambda w: OUTPUTS, "dtype": lambda w: np.float32},
    "Dataset.with_weight": {"weight": lambda w: np.ones(ROWS)},
    "Dataset.first": {"rows": lambda w: 4},
    "Dataset.split": {"fraction": lambda w: 0.5},
    "History": {"records": lambda w: [{"epoch": 1, "loss": 0.5}]},
    "History.best": {"column": lambda w: "loss"},
    "History.__getitem__": {"column": lambda w: "loss"},
    "Histograms.plot": {"path": lambda w: w.folder / "histograms.png"},
    "History.plot": {"path": lambda w: w.folder / "history.png"},
    "Network.export": {"path": lambda w: w.folder / "exported.onnx"},
    "Table": {"source": lambda w: w.columns(), "target": lambda w: "price"},
    "Table.check_columns": {"rows": lambda w: as_source(w.columns())},
    "Table.dataset": {"source": lambda w: w.columns()},
    "Table.encode": {"source": lambda w: w.columns()},
    "tables.CSV": {"path": lambda w: w.csv()},
    "from_sklearn": {"estimator": lambda w: w.estimator()},
    "load": {"path": lambda w: w.saved_network()},
    "datasets.load": {"name": lambda w: "digits"},
    "datasets.read_idx": {"path": lambda w: w.idx()},
    "datasets.write_idx": {"path": lambda w: w.folder / "written.idx", "array": lambda w: np.arange(4, dtype="u1")},
    **{f"{name}.load_state": {"state": lambda w: {}} for name in ("Callback", "CSVLogger", "Histograms")},
    "Checkpoint.load_state": {"state": lambda w: {"best": 0.5, "monitor": "loss"}},
    "EarlyStopping.load_state": {"state": lambda w: mg.EarlyStopping("loss").state()},
}

# What a parameter of a new callable is given, if another one has a parameter of that name.
BY_NAME: dict[str, Maker] = {name: make for usual in USUAL.values() for name, make in usual.items()}

# Whose methods and properties are called, and on what.
OWNERS: dict[str, Maker] = {
    "Network": lambda w: w.trained(),
    "Parameters": lambda w: w.network().parameters,
    "Predictor": lambda w: w.trained().predictor("cpu"),
    "Trainer": lambda w: w.trainer(),
    "Dataset": lambda w: w.data(),
    "Table": lambda w: w.table(),
    "History": lambda w: w.history(),
    "Histograms": lambda w: w.counted(),
    "Callback": lambda w: mg.Callback(),
    "Checkpoint": lambda w: mg.Checkpoint(w.folder / "checkpoint.h5"),
    "CSVLogger": lambda w: mg.CSVLogger(w.folder / "table.csv"),
    "EarlyStopping": lambda w: mg.EarlyStopping("loss"),
}

OPERATORS = ("__call__", "__getitem__", "__setitem__", "__delitem__", "__contains__")

# What plans, programs and trainers alone call, with arguments that they have made; and what nobody can use.
INTERNAL: dict[type, frozenset[str]] = {
    Layer: frozenset({"output_width", "lower"}),
    mg.Loss: frozenset({"evaluate"}),
    Optimizer: frozenset({"table", "update"}),
    Schedule: frozenset({"rates", "observe"}),
    mg.Callback: frozenset({"begin", "step_end", "epoch_end", "end"}),
    mg.Trainer: frozenset({"keep", "restore_kept"}),
    Parameters: frozenset({"pop", "__delitem__"}),  # which refuse, whatever they are given
}
# Functions that need a package, and are attacked where it is installed.
NEEDS = {"to_torch": "torch", "OptunaPruning": "optuna"}
# Bases that cannot be made, errors, and what data sets alone make.
NOT_MADE: tuple[type, ...] = (mg.Loss, mg.Callback, mg.MlpgpuError, mg.datasets.Inputs)


@dataclass(frozen=True)
class Target:
    """A callable: its name, its parameters by name, and how it is called on what ``owner`` makes."""

    name: str
    parameters: Mapping[str, inspect.Parameter]
    owner: Maker | None
    invoke: Callable[[Any, dict[str, Any]], Any]

    def usual(self, world: World) -> dict[str, Any]:
        """Arguments with which it works: those of USUAL; of others the defaults, or what the like are given."""
        known = {name: BY_NAME[name] for name in self._needed if name in BY_NAME} | USUAL.get(self.name, {})
        return {name: make(world) for name, make in known.items()}

    @property
    def _needed(self) -> list[str]:
        """Parameters that have no default."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = self.parameters.items()
        return [name for name, p in found if p.default is inspect.Parameter.empty and p.kind not in variadic]

    @property
    def lacking(self) -> list[str]:
        """Parameters that have no default, and of which nothing is known here."""
        return [name for name in self._needed if name not in BY_NAME and name not in USUAL.get(self.name, {})]


def _parameters(function: Any, *, is_bound: bool) -> dict[str, inspect.Parameter]:
    found = list(inspect.signature(function).parameters.items())[is_bound:]
    return {name: p for name, p in found if p.kind is not inspect.Parameter.VAR_KEYWORD}


def _call(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], given: dict[str, Any]) -> Any:
    kinds = {name: p.kind for name, p in parameters.items()}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    arguments = [value for name, value in given.items() if kinds[name] in positional]
    return function(*arguments, **{name: value for name, value in given.items() if kinds[name] not in positional})


def _function(name: str, function: Callable[..., Any]) -> Target:
    parameters = _parameters(function, is_bound=False)
    return Target(name, parameters, None, lambda _, given: _call(function, parameters, given))


def _method(kind: str, name: str, function: Any) -> Target:
    parameters = _parameters(function, is_bound=True)
    return Target(
        f"{kind}.{name}", parameters, OWNERS[kind], lambda owner, given: _call(getattr(owner, name), parameters, given)
    )


def _setter(kind: str, name: str) -> Target:
    value = inspect.Parameter("value", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return Target(
        f"{kind}.{name}=", {"value": value}, OWNERS[kind], lambda owner, given: setattr(owner, name, given["value"])
    )


def _members(kind: str, world: World) -> list[Target]:
    """Methods and settable properties of a class of OWNERS that Tab shows, or that operators call."""
    owner = OWNERS[kind](world)
    of = type(owner)
    internal = {name for base, names in INTERNAL.items() if issubclass(of, base) for name in names}
    found = []
    for name in (*(name for name in dir(owner) if not name.startswith("_")), *OPERATORS):
        if name in internal:
            continue
        member = inspect.getattr_static(of, name, None)
        if isinstance(member, property):
            if member.fset is not None:
                found.append(_setter(kind, name))
        elif isinstance(member, (classmethod, staticmethod)):
            found.append(_method(kind, name, member.__func__))
        elif inspect.isfunction(member):
            found.append(_method(kind, name, member))
        elif member is None and isinstance(owner, mg.Network) and name in SETTABLE:
            found.append(_setter(kind, name))
    return found


def targets(folder: Path) -> dict[str, Target]:
    """All of them that take anything, by name."""
    found: list[Target] = []
    for module, prefix in ((mg, ""), (mg.datasets, "datasets."), (mg.tables, "tables.")):
        for name in module.__all__:
            public = getattr(module, name)
            if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
                continue
            if prefix and public is getattr(mg, name, None) and name != "load":
                continue
            if inspect.isfunction(public) or (inspect.isclass(public) and public not in NOT_MADE):
                found.append(_function(prefix + name, public))
    world = World(folder, Random(0))
    assert OWNERS["Parameters"](world).__class__ is Parameters
    for kind in OWNERS:
        found += _members(kind, world)
    return {target.name: target for target in found if target.parameters}
