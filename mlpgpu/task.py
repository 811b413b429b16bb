"""What a loss asks of the data, metrics and class weights that come with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backends import target_array
from .datasets import Dataset
from .errors import ConfigurationError, DataError, DtypeError, check_integer, check_number, lookup
from .losses import LOSSES, OutputName, TargetKind, class_count, classes_of
from .metrics import METRICS
from .plan import Plan

ClassNames = tuple[str, ...] | None
ClassWeight = Mapping[Any, float] | str | None


@dataclass(frozen=True)
class Task:
    """A loss on the logits of a network of ``n_out`` outputs."""

    loss: str
    n_out: int

    @property
    def output(self) -> OutputName:
        """The function that makes predictions of logits."""
        return LOSSES[self.loss].output

    @property
    def classes(self) -> int:
        """How many there are."""
        return class_count(self.output, self.n_out)

    def target_kind(self, data: Dataset) -> TargetKind:
        """Class numbers where the loss takes them and there is one target for each row; else numbers."""
        kinds = LOSSES[self.loss].targets
        wide = data.y is not None and data.y.ndim == 2
        return "dense" if wide or "index" not in kinds else "index"

    # --- what is refused ---

    def check_metrics(self, metrics: Sequence[str]) -> tuple[str, ...]:
        """Metrics by name, each once."""
        if isinstance(metrics, str):
            raise DtypeError("metrics", expected="a list of names", got=repr(metrics))
        classifies = self.output == "softmax" or (self.output == "sigmoid" and self.n_out == 1)
        for name in metrics:
            what, of = f"metric {name}", METRICS[lookup("metric", name, METRICS)].of
            if of != "numbers" and not classifies:
                raise ConfigurationError(what, expected="a loss with one class for each row", got=self.loss)
            if of == "ranks" and self.classes < 2:
                got = f"{self.n_out} output of {self.loss}"
                raise ConfigurationError(what, expected="two classes or more", got=got)
            if of == "numbers" and self.output == "softmax":
                raise ConfigurationError(what, expected="a loss of numbers", got=self.loss)
        return tuple(dict.fromkeys(metrics))

    def check_class_weight(self, class_weight: ClassWeight) -> ClassWeight:
        """Weights by class, or ``"balanced"``."""
        if class_weight is None:
            return None
        if self.output == "identity":
            raise ConfigurationError("class_weight", expected="a loss for classification", got=self.loss)
        if isinstance(class_weight, str):
            return lookup("class_weight", class_weight, ("balanced",))
        if not isinstance(class_weight, Mapping):
            got = type(class_weight).__name__
            raise DtypeError("class_weight", expected="a mapping of classes to weights, or 'balanced'", got=got)
        return {key: check_number(f"class_weight[{key!r}]", weight, least=0.0) for key, weight in class_weight.items()}

    def check_data(
        self, data: Dataset, plan: Plan, dtype: np.dtype, *, names: ClassNames, metrics: Sequence[str] = ()
    ) -> None:
        """Refuse targets that do not suit the loss or ``metrics``; ``names`` are the network's classes."""
        if None not in (data.classes, names) and data.classes != names:
            raise ConfigurationError("classes", expected=names, got=data.classes)
        if data.y is None:
            raise DataError("data", expected="targets", got="a data set without y")
        if data.classes is not None and len(data.classes) != self.classes:
            hint = "classes= names those that do not occur"
            expected = f"{self.classes} names, one for each output"
            raise ConfigurationError("classes", expected=expected, got=data.classes, hint=hint)
        kind = self.target_kind(data)
        target = target_array(data, dataclasses.replace(plan, target_kind=kind), dtype)
        if self.output != "identity" and kind == "dense":
            if not ((target >= 0.0) & (target <= 1.0)).all():
                raise DataError(f"targets of {self.loss}", expected="values from 0 to 1", got=_range(target))
            if self.output == "softmax" and not np.allclose(target.sum(axis=1), 1.0, atol=1e-3):
                got = f"sums from {_range(target.sum(axis=1))}"
                raise DataError(f"targets of {self.loss}", expected="rows that sum to 1", got=got)
        for name in metrics:
            if METRICS[name].of == "ranks":
                labels = target if target.ndim == 1 else classes_of(self.output, target)
                self._check_curves(name, labels, data.weight, data.classes or names)

    def _check_curves(self, metric: str, labels: np.ndarray, weight: np.ndarray | None, names: ClassNames) -> None:
        """Refuse rows of these classes, ``labels`` (rows,), that leave one side of a curve empty."""
        weights = np.bincount(labels, weight, minlength=self.classes)
        if not (weights > 0.0).all():
            expected = "rows of every class, with weights over 0"
            missing = int(np.argmin(weights > 0.0))
            got = f"none of class {missing if names is None else repr(names[missing])}"
            raise DataError(f"data for {metric}", expected=expected, got=got)

    # --- class weights ---

    def weighted(self, data: Dataset, class_weight: ClassWeight, names: ClassNames) -> Dataset:
        """The data set with its rows weighted by class as well."""
        if class_weight is None:
            return data
        labels, names = data.labels(self.classes), data.classes or names
        if isinstance(class_weight, str):  # "balanced"
            counts = np.bincount(labels, minlength=self.classes)
            by_class = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
        else:
            by_class = np.ones(self.classes)
            for label, weight in class_weight.items():
                by_class[self._class_number(label, names)] = weight
        rows = by_class[labels]
        return data.with_weight(rows if data.weight is None else rows * data.weight)

    def _class_number(self, label: Any, names: ClassNames) -> int:
        if isinstance(label, str):
            return (names or ()).index(lookup("class in class_weight", label, names or ()))
        return check_integer("class in class_weight", label, least=0, most=self.classes - 1)


def _range(values: np.ndarray) -> str:
    return f"{values.min():g} to {values.max():g}"
