"""The sums that metrics are made of, and how the host adds predictions to them batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..datasets import Dataset
from ..losses import class_count, classes_of, problem_of
from ..metrics import SUMS, Compared, Problem, curve_count, curve_positives, true_class_ranks
from ..plan import Plan
from .base import target_array


def problem(plan: Plan) -> Problem:
    """What the outputs of a plan tell of a row."""
    assert plan.loss is not None
    return problem_of(plan.loss.output, plan.n_out)


def compared_widths(plan: Plan) -> dict[Compared, int]:
    """How many classes, numbers of a row and curves the metrics of a plan compare."""
    assert plan.loss is not None
    classes = class_count(plan.loss.output, plan.n_out)
    curves = plan.n_out if problem(plan) == "multilabel" else curve_count(classes)
    numbers = plan.n_out
    return {"classes": classes, "ranks": classes, "numbers": numbers, "probabilities": numbers, "rankings": curves}


def zero_sums(plan: Plan, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Rows of SUMS by name before the first batch, 0 in float64."""
    widths = compared_widths(plan)
    return {name: np.zeros(SUMS[name].shape(widths[SUMS[name].of])) for name in names}


class MetricSums:
    """Adds a data set's predictions, in order, to the sums of metrics.

    Attributes:
        sums: rows of SUMS by name, float64; those of ranking metrics stay 0 until the last batch is added.
    """

    def __init__(self, dataset: Dataset, plan: Plan, names: Sequence[str], dtype: np.dtype) -> None:
        assert plan.loss is not None
        self._function = plan.loss.output
        self.sums = zero_sums(plan, names)
        self._weight = dataset.weight
        self._targets: dict[str, np.ndarray] = {}
        self._scores: np.ndarray | None = None  # (rows, curves), of ranking metrics
        self._kinds = {SUMS[name].of for name in names}
        if names:
            target = target_array(dataset, plan, dtype)
            classes = target if target.ndim == 1 else classes_of(self._function, target)
            self._targets = {"classes": classes, "ranks": classes, "numbers": target, "probabilities": target}
            if "rankings" in self._kinds:
                curves = compared_widths(plan)["rankings"]
                has_labels = problem(plan) == "multilabel"
                self._targets["rankings"] = target > 0.5 if has_labels else curve_positives(classes, curves)
                self._scores = np.empty((len(dataset), curves), dtype)

    def add(self, rows: slice, output: np.ndarray) -> None:
        """Add the predictions (B, n_out) for ``rows`` of the data set."""
        compared: dict[Compared, np.ndarray] = {"numbers": output, "probabilities": output}
        if "classes" in self._kinds:
            compared["classes"] = classes_of(self._function, output)
        if "ranks" in self._kinds:
            compared["ranks"] = true_class_ranks(output, self._targets["classes"][rows])
        self._add(rows, compared)
        if self._scores is not None:
            self._scores[rows] = output[:, -self._scores.shape[1] :]
            if rows.stop == len(self._scores):
                self._add(slice(None), {"rankings": self._scores})

    def _add(self, rows: slice, compared: Mapping[Compared, np.ndarray]) -> None:
        weight = None if self._weight is None else self._weight[rows]
        for name, sums in self.sums.items():
            of = SUMS[name].of
            if of in compared:
                SUMS[name].accumulate(compared[of], self._targets[of][rows], weight, sums)
