"""What a file holds of a run, beside the network; ``docs/file-format.md`` tells where."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import storage
from ..backends import Source
from ..errors import (
    ConfigurationError,
    DataError,
    DtypeError,
    FileFormatError,
    ShapeError,
    check_integer,
    check_number,
    lookup,
)
from ..history import History, Record
from ..losses import LOSSES, TargetKind, as_loss
from ..network.stored import check_form
from ..optimizers import OPTIMIZERS, Optimizer
from ..plan import WAYS
from ..schedules import SCHEDULES, Plateau
from ..storage.descriptions import describe, rebuild
from .progress import FitProgress, Pending, Progress

# The trainer's arguments that a file holds, by name.
ARGUMENTS = (
    *("loss", "optimizer", "batch_size", "precision", "streams", "reduction", "metrics", "class_weight"),
    "memory_share",
    "parallel",
    "parts",
)
ADDED = {"parallel": "auto", "parts": None}  # arguments that files of older versions lack

_HISTORY, _SLOTS, KEPT = "/mlpgpu/run/history", "/mlpgpu/run/slots", "/mlpgpu/run/kept"


def slot_paths(optimizer: Optimizer) -> list[str]:
    """Where the optimizer's slots lie in a file."""
    return [f"{_SLOTS}/{name}" for name in optimizer.slots]


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A trainer between two steps.

    Attributes:
        arguments: the trainer's, by name.
        kind: the targets that it was trained on last.
        made_by: what the bits of the run depend on.
        chosen: how several ranks compute the steps, where ``parallel="auto"`` chose; None where it had no choice.
        slots: the optimizer's arrays, (K, 1, P), or None before the first step.
        kept: the parameters of the best epoch, (P,), or None.
    """

    arguments: Mapping[str, Any]
    kind: TargetKind
    made_by: dict[str, Any]
    progress: Progress
    slots: np.ndarray | None
    kept: np.ndarray | None
    chosen: str | None = None

    def contents(self, network: storage.Contents) -> storage.Contents:
        """The contents of a file that holds ``network`` as well."""
        progress, optimizer, loss = self.progress, self.arguments["optimizer"], self.arguments["loss"]
        # An exception may have come between a record and the count of its epoch.
        records, pending = progress.history.records[: progress.epochs], progress.pending
        columns = tuple(dict.fromkeys(name for record in records for name in record))
        run = {
            **self.arguments,
            "loss": loss if isinstance(loss, str) else describe(loss),
            "optimizer": describe(optimizer),
            "metrics": list(self.arguments["metrics"]),
            "class_weight": _pairs(self.arguments["class_weight"]),
            "target_kind": self.kind,
            "made_by": self.made_by,
            "chosen": self.chosen,
            "steps": progress.steps,
            "epochs": progress.epochs,
            "plateau": describe(progress.plateau),
            "fit": None if progress.fit is None else dataclasses.asdict(progress.fit),
            "callbacks": progress.callbacks,
            "pending": None if pending is None else {**dataclasses.asdict(pending), "left": list(pending.left)},
            "columns": list(columns),
            "lacking": {name: lacking for name in columns if (lacking := _lacking(records, name))},
            "has_slots": self.slots is not None,
            "has_kept": self.kept is not None,
        }
        arrays = {f"{_HISTORY}/{name}": np.array([record.get(name, np.nan) for record in records]) for name in columns}
        if self.slots is not None:
            arrays |= {path: self.slots[k, 0] for k, path in enumerate(slot_paths(optimizer))}
        if self.kept is not None:
            arrays[KEPT] = self.kept
        return storage.Contents({**network.description, "run": run}, {**network.arrays, **arrays}, network.groups)

    def flat_paths(self, contents: storage.Contents) -> dict[Source, str]:
        """Where the file of these contents has the flat arrays, by the numbers of slots, and ``"snapshot"``."""
        run = contents.description["run"]
        paths: dict[Source, str] = {}
        if run["has_slots"]:
            paths.update(enumerate(slot_paths(self.arguments["optimizer"])))
        if run["has_kept"]:
            paths["snapshot"] = KEPT
        return paths

    @classmethod
    def parse(cls, contents: storage.Contents, parameter_count: int, file: storage.OpenFile | None = None) -> SavedRun:
        """What :meth:`contents` gave, of a network of so many parameters.

        Where there is a ``file``, slots and kept parameters stay there, and are found to have the right shapes.

        Raises:
            FileFormatError: arrays are missing or of other shapes.
            MlpgpuError, ArithmeticError, KeyError, TypeError, ValueError: the description has no meaning.
        """
        run = contents.description["run"]
        arguments = {name: {**ADDED, **run}[name] for name in ARGUMENTS}
        optimizer = rebuild("optimizer", run["optimizer"], OPTIMIZERS, SCHEDULES)
        arguments["class_weight"] = _class_weight(run["class_weight"])
        kinds = {kind.__name__: kind for kind in LOSSES.values()}
        loss = as_loss(run["loss"] if isinstance(run["loss"], str) else rebuild("loss", run["loss"], kinds))
        progress = Progress(
            steps=run["steps"],
            epochs=run["epochs"],
            history=_history(contents, run["columns"], run["epochs"], run.get("lacking")),
            plateau=rebuild("plateau", run["plateau"], {"Plateau": Plateau}),
            fit=None if run["fit"] is None else FitProgress(**run["fit"]),
            callbacks=run["callbacks"],
            pending=_pending(run.get("pending")),
        )
        progress.check()
        form = (parameter_count,), np.dtype("float64" if run["precision"] == "float64" else "float32")
        slots = kept = None
        if file is not None:
            large = [*(slot_paths(optimizer) if run["has_slots"] else ()), *([KEPT] if run["has_kept"] else ())]
            for path in large:
                check_form(file, path, *form)
        elif run["has_slots"]:
            flat = [_expect(contents.arrays.get(path), *form) for path in slot_paths(optimizer)]
            slots = np.reshape(flat, (len(flat), 1, parameter_count)).astype(form[1])
        if run["has_kept"] and file is None:
            kept = _expect(contents.arrays.get(KEPT), *form)
        return cls(
            arguments={**arguments, "loss": loss.described, "optimizer": optimizer},
            kind=lookup("target kind", run["target_kind"], loss.targets),
            made_by=run["made_by"],
            progress=progress,
            slots=slots,
            kept=kept,
            chosen=None if run.get("chosen") is None else lookup("choice", run["chosen"], WAYS),
        )


def _lacking(records: Sequence[Record], column: str) -> list[list[int]]:
    """Which records lack the column, as ranges [first, end)."""
    ranges: list[list[int]] = []
    for place, record in enumerate(records):
        if column in record:
            continue
        if ranges and ranges[-1][1] == place:
            ranges[-1][1] = place + 1
        else:
            ranges.append([place, place + 1])
    return ranges


def _pending(described: Any) -> Pending | None:
    if described is None:
        return None
    if not isinstance(described, dict) or not isinstance(described["left"], list):
        raise DtypeError("pending callbacks", expected="a hook and a list of names", got=described)
    return Pending(**{**described, "left": tuple(described["left"])})


def _history(contents: storage.Contents, names: Any, epochs: int, lacking: Any) -> History:
    """The history of so many epochs with these columns.

    ``lacking`` has ranges of records that lack a column, by column; None in a file of older versions, in which NaN
    stands for what is lacking, too.
    """
    if not isinstance(names, list) or len(set(names)) != len(names):
        raise ConfigurationError("columns of the history", expected="a list of different names", got=names)
    if not isinstance(lacking, (dict, type(None))):
        raise DtypeError("records that lack a column", expected="ranges by column", got=lacking)
    arrays = {name: contents.arrays[f"{_HISTORY}/{name}"] for name in names}
    for name, array in arrays.items():
        if array.shape != (epochs,):
            raise ShapeError(f"history, {name}", expected=(epochs,), got=array.shape)
    if epochs and "epoch" not in names:
        raise ConfigurationError("columns of the history", expected="epoch among them", got=names)
    records: list[Record] = [{} for _ in range(epochs)]
    for name, array in arrays.items():
        lacks = np.isnan(array) if lacking is None else _lacks(epochs, lacking.get(name, []))
        for record, value, is_lacking in zip(records, array.tolist(), lacks.tolist(), strict=True):
            if not is_lacking:
                record[name] = value
    for record in records:
        if record.get("epoch", 0.5) % 1.0 != 0.0:  # of infinity it is NaN
            raise DataError("history, epoch", expected="whole numbers", got=arrays["epoch"])
    return History([{**record, "epoch": int(record["epoch"])} for record in records])


def _lacks(epochs: int, ranges: Any) -> np.ndarray:
    """Whether each of so many records is in one of the ranges [first, end), (epochs,)."""
    lacks = np.zeros(epochs, bool)
    for first, end in ranges:
        least = check_integer("record of the history", first, least=0, most=epochs)
        lacks[least : check_integer("record of the history", end, least=least, most=epochs)] = True
    return lacks


def _class_weight(pairs: Any) -> Any:
    """Class weights of their pairs, or a name or None as they are."""
    if not isinstance(pairs, list):
        return pairs
    found: dict[str | int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], (str, int)) or pair[0] in found:
            raise ConfigurationError("class weights", expected="pairs of class and weight, each class once", got=pairs)
        found[pair[0]] = check_number("class weight", pair[1], least=0.0)
    return found


def _expect(array: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if array is None or array.shape != shape or array.dtype != dtype:
        got = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise FileFormatError("array of a run", expected=f"{dtype} {shape}", got=got)
    return array


def _pairs(class_weight: Any) -> Any:
    """Class weights as pairs of class and weight, because the keys of a JSON object would all be strings."""
    if class_weight is None or isinstance(class_weight, str):
        return class_weight
    return [[label, weight] for label, weight in class_weight.items()]
