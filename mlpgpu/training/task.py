"""What a loss asks of the data, metrics and class weights that come with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import target_values
from ..callbacks import check_column
from ..datasets import Dataset
from ..datasets.arrays import as_array
from ..errors import (
    ConfigurationError,
    DataError,
    DtypeError,
    as_list,
    check_integer,
    check_number,
    check_text,
    lookup,
    shown,
)
from ..layers import Standardize
from ..losses import Loss, OutputName, TargetKind, class_count, classes_of, problem_of
from ..metrics import SUMS, Problem, element_columns, find_metric, is_metric, metric_name, top_k_of
from ..network import Data, Network

ClassNames = tuple[str, ...] | None
Columns = tuple[str, ...]
MetricFunction = Callable[..., Any]  # of (y, prediction[, weight])
Metrics = Sequence[str | MetricFunction | Mapping[str, MetricFunction]] | Mapping[str, MetricFunction]
RANKINGS = frozenset(name for name, sums in SUMS.items() if sums.of == "rankings")

# What a metric is for, by the problems that it suits.
_PROBLEMS: dict[Problem, str] = {
    "multiclass": "classes",
    "binary": "two classes",
    "multilabel": "labels",
    "regression": "numbers",
}

ClassWeight = Mapping[Any, float] | str | None


@dataclass(frozen=True)
class Prepared:
    """A data set that was found to suit a network, its loss and its metrics.

    Attributes:
        dataset: as it was given, to evaluate.
        weighted: its rows weighted by class as well, to train on.
        kind: what its targets are.
    """

    dataset: Dataset
    weighted: Dataset
    kind: TargetKind


@dataclass(frozen=True)
class Task:
    """A loss on the logits of a network of ``n_out`` outputs, with targets of ``dtype``."""

    loss: Loss
    n_out: int
    dtype: np.dtype

    @property
    def output(self) -> OutputName:
        """The function that makes predictions of logits."""
        return self.loss.output

    @property
    def problem(self) -> Problem:
        """What the outputs tell of a row."""
        return problem_of(self.output, self.n_out)

    @property
    def classes(self) -> int:
        """How many there are."""
        return class_count(self.output, self.n_out)

    # --- arguments of a trainer ---

    def check_metrics(self, metrics: Metrics) -> dict[str, MetricFunction | None]:
        """Metrics by name, each once, with the function of those that are one's own."""
        listed = _listed(metrics)
        functions = own_metrics(listed)
        names: list[str] = []
        for given in listed:
            if isinstance(given, Mapping) or callable(given):
                names += own_metrics([given])
            else:
                names.append(metric_name(given))
        for name in names:
            if name not in functions:
                self._check_metric(name)
        return {name: functions.get(name) for name in names}

    def columns(self, metrics: Sequence[str], functions: Iterable[str], names: ClassNames) -> dict[str, Columns]:
        """The history's columns for metrics by name: one for a number, one for each class or output.

        ``names`` are those of the classes.  Metrics of one's own, ``functions``, have one.
        """
        found: dict[str, Columns] = {}
        for name in metrics:
            per = "set" if name in functions else find_metric(name).per
            if per == "set":
                found[name] = (name,)
            elif per != "pair":
                count = self.classes if per == "class" else self.n_out
                labels = names if per == "class" and names is not None and len(names) == count else range(count)
                found[name] = element_columns(name, [str(label) for label in labels])
        return found

    def _check_metric(self, name: str) -> None:
        """Refuse a metric that does not suit the problem."""
        what, metric, problem = f"metric {name}", find_metric(name), self.problem
        got = f"{self.n_out} output{'s' * (self.n_out > 1)} of {self.loss}"
        averages = ", ".join(f"{name}_{average}" for average in ("macro", "micro", "weighted", "per_class"))
        if problem not in metric.ways:
            *others, last = (_PROBLEMS[suited] for suited in metric.ways)
            expected = "a loss for " + ", ".join(others) + f" or {last}" * bool(others) + last * (not others)
            hint = f"of labels there are {averages}" if metric.asks_two and problem == "multilabel" else ""
            raise ConfigurationError(what, expected=expected, got=got, hint=hint)
        if metric.asks_two and self.classes != 2:
            hint = f"of several classes there are {averages}"
            raise ConfigurationError(what, expected="two classes", got=got, hint=hint)
        if metric.ways[problem][0] in RANKINGS and self.classes < 2 and problem != "multilabel":
            raise ConfigurationError(what, expected="two classes or more", got=got)
        k = top_k_of(name)
        if k is not None and k >= self.classes:
            raise ConfigurationError(what, expected=f"fewer than the {self.classes} classes", got=k)

    def check_class_weight(self, class_weight: ClassWeight) -> ClassWeight:
        """Weights by class, or ``"balanced"``."""
        if class_weight is None:
            return None
        if self.problem == "regression":
            raise ConfigurationError("class_weight", expected="a loss for classification", got=self.loss)
        if isinstance(class_weight, str):
            return lookup("class_weight", class_weight, ("balanced",))
        if not isinstance(class_weight, Mapping):
            got = type(class_weight).__name__
            raise DtypeError("class_weight", expected="a mapping of classes to weights, or 'balanced'", got=got)
        found: dict[str | int, float] = {}
        for key, weight in class_weight.items():
            if isinstance(key, str):
                label: str | int = check_text("class in class_weight", key)
            else:
                label = check_integer("class in class_weight", key, least=0, most=self.classes - 1)
            found[label] = check_number(f"class_weight[{label!r}]", weight, least=0.0)
        return found

    # --- data ---

    def prepare(
        self,
        data: Data,
        network: Network,
        *,
        metrics: Sequence[str] = (),
        class_weight: ClassWeight = None,
        after: Dataset | None = None,
    ) -> Prepared:
        """Check a data set once, for all that a fit or an evaluation does with it.

        Class numbers are its targets where the loss takes them and there is one target for each row.  It is to
        mean what the network's training data did, and what ``after`` does, which it is about to be trained on.

        Raises:
            MlpgpuError: it does not suit the network, the loss, ``metrics`` or ``class_weight``.
        """
        remembered = network.remembered if after is None else network.remembered.after(after)
        argument = "data" if after is None else "validation"
        data = network.check(network.as_dataset(data, remembered, argument=argument), remembered)
        names = remembered.classes
        if None not in (data.classes, names) and data.classes != names:
            hint = f"Dataset(x, y, classes={'train' if after is not None else 'network'}.classes)"
            raise ConfigurationError("classes", expected=names, got=data.classes, hint=hint)
        if data.y is None:
            raise DataError("data", expected="targets", got="a data set without y")
        if data.classes is not None and len(data.classes) != self.classes:
            hint = "Dataset(x, y, classes=[…]) names all of them, in the training data's order: classes=train.classes"
            expected = f"{self.classes} names, one for each output"
            raise ConfigurationError("classes", expected=expected, got=data.classes, hint=hint)
        kind: TargetKind = "index" if data.y.ndim == 1 and "index" in self.loss.targets else "dense"
        target = target_values(data, self.loss, kind, self.n_out, self.dtype)
        if kind == "dense":
            self._check_range(target)
        if any(_ranks(name) for name in metrics):
            self._check_curves(metrics, target, data.weight, data.classes or names)
        # A first Standardize layer is given float64.
        is_standardized = isinstance(network.layers[0], Standardize)
        data.warn_of_merging(np.dtype(np.float64) if is_standardized else self.dtype)
        data.check_range(self.dtype, inputs=not is_standardized)
        weighted = self._weighted(data, class_weight, data.classes or names)
        if weighted is not data:
            weighted.check_range(self.dtype, inputs=False)
        return Prepared(data, weighted, kind)

    def _check_range(self, target: np.ndarray) -> None:
        """Refuse targets (rows, n_out) that are no probabilities, or no rates, where the loss asks for such."""
        what = f"targets of {self.loss}"
        if self.output == "exp" and not (target >= 0.0).all():
            raise DataError(what, expected="values of at least 0", got=_range(target))
        if self.problem != "regression" and not ((target >= 0.0) & (target <= 1.0)).all():
            hint = "labels of 1 and 2 are y - 1, and of -1 and 1 (y > 0)" if self.classes == 2 else ""
            raise DataError(what, expected="values from 0 to 1", got=_range(target), hint=hint)
        if self.output == "softmax" and not np.allclose(target.sum(axis=1), 1.0, atol=1e-3):
            got = f"sums from {_range(target.sum(axis=1))}"
            raise DataError(what, expected="rows that sum to 1", got=got)

    def _check_curves(
        self, metrics: Sequence[str], target: np.ndarray, weight: np.ndarray | None, names: ClassNames
    ) -> None:
        """Refuse rows of such targets, (rows,) classes or (rows, n_out), as leave one side of a curve empty."""
        metric = next(filter(_ranks, metrics))
        if self.problem == "multilabel":
            counted = np.ones(len(target), bool) if weight is None else weight > 0.0
            labels = target[counted] > 0.5
            mixed = labels.any(axis=0) & ~labels.all(axis=0)
            if not mixed.all():
                expected = f"rows with label {int(np.argmin(mixed))} and rows without, of weights over 0"
                raise DataError(f"data for {metric}", expected=expected, got="all or none with it")
            return
        classes = target if target.ndim == 1 else classes_of(self.output, target)
        has_rows = np.bincount(classes, weight, minlength=self.classes) > 0.0
        if not has_rows.all():
            missing = int(np.argmin(has_rows))
            got = f"none of class {missing if names is None else repr(names[missing])}"
            hint = f"evaluate(data, metrics=[…]) without {metric}"
            raise DataError(
                f"data for {metric}", expected="rows of every class, with weights over 0", got=got, hint=hint
            )

    def _weighted(self, data: Dataset, class_weight: ClassWeight, names: ClassNames) -> Dataset:
        """The data set with its rows weighted by class as well."""
        if class_weight is None:
            return data
        labels = data.labels(self.classes)
        if isinstance(class_weight, str):  # "balanced"
            counts = np.bincount(labels, minlength=self.classes)
            by_class = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
        else:
            by_class = np.ones(self.classes)
            for label, weight in class_weight.items():
                by_class[self._class_number(label, names)] = weight
        of_rows = by_class[labels]
        return data.with_weight(of_rows if data.weight is None else of_rows * data.weight)

    def _class_number(self, label: Any, names: ClassNames) -> int:
        if isinstance(label, str):
            return (names or ()).index(lookup("class in class_weight", label, names or ()))
        return check_integer("class in class_weight", label, least=0, most=self.classes - 1)


def own_metrics(metrics: Metrics) -> dict[str, MetricFunction]:
    """The functions among ``metrics`` by the names of their metrics.

    Raises:
        DtypeError: a function has no name, or what should be one is none.
        ConfigurationError: a name is that of another metric or column, or none that a file can hold.
    """
    found: dict[str, MetricFunction] = {}
    for given in _listed(metrics):
        if isinstance(given, Mapping):
            pairs: list[tuple[Any, Any]] = list(given.items())
        elif callable(given):
            pairs = [(getattr(given, "__name__", ""), given)]
        else:
            continue
        for name, function in pairs:
            if name in ("", "<lambda>"):
                hint = 'metrics=[{"name": function}] gives it one'
                raise DtypeError(
                    "metric", expected="a function with a name", got=shown(function, typed=False), hint=hint
                )
            check_column("name of a metric", name)
            if not callable(function):
                expected, got = "a function of (y, prediction) or (y, prediction, weight)", shown(function, typed=False)
                raise DtypeError(f"metric {name}", expected=expected, got=got)
            taken = is_metric(name) or name == "loss"
            if taken or found.get(name, function) is not function:
                expected = "a name that no other metric has"
                raise ConfigurationError("name of a metric", expected=expected, got=repr(name))
            found[name] = function
    return found


def _listed(metrics: object) -> list[Any]:
    """Names, functions, and mappings of names to functions, one of which may stand alone."""
    if isinstance(metrics, Mapping):
        return [metrics]
    expected = "a list of names and functions"
    if isinstance(metrics, str):
        raise DtypeError("metrics", expected=expected, got=shown(metrics, typed=False))
    return as_list("metrics", metrics, expected)


def call_metric(name: str, function: MetricFunction, dataset: Dataset, prediction: np.ndarray) -> Any:
    """What a metric of one's own makes of predictions (rows, n_out), or (rows,).

    ``function`` is given weights (rows,), ones if the data set has none, where it asks for a third argument; and
    as ``weight=`` or ``sample_weight=``, as scikit-learn's are called, where there are weights.
    """
    weight, options = dataset.weight, {}
    arguments: list[np.ndarray | None] = [dataset.y, prediction]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function that tells nothing of itself
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) > 2 and (positional[2].default is positional[2].empty):
        arguments.append(np.ones(len(dataset), np.float32) if weight is None else weight)
    elif weight is not None:
        options = {p.name: weight for p in parameters if p.name in ("weight", "sample_weight")}
    value = function(*arguments, **options)
    if not isinstance(value, (str, bytes)):
        array = as_array(f"metric {name}", value, "of numbers")
        if array.dtype.kind in "biuf":
            return float(array) if array.ndim == 0 else array
    raise DtypeError(f"metric {name}", expected="a number or an array of numbers", got=shown(value, typed=False))


def _ranks(name: str) -> bool:
    """Whether a metric, which may be one's own, is one of rankings."""
    return is_metric(name) and any(of in RANKINGS for of, _ in find_metric(name).ways.values())


def _range(values: np.ndarray) -> str:
    return f"{values.min():g} to {values.max():g}"
