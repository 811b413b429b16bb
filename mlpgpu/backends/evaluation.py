"""The sums that metrics are made of, and how the host adds predictions to them batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..datasets import Dataset
from ..losses import LOSSES, class_count, classes_of
from ..metrics import METRICS, TargetsOf, curve_count, curve_positives
from ..plan import Plan
from .base import target_array


def compared_widths(plan: Plan) -> dict[TargetsOf, int]:
    """How many classes, numbers of a row and curves the metrics of a plan compare."""
    assert plan.loss is not None
    classes = class_count(LOSSES[plan.loss].output, plan.n_out)
    return {"classes": classes, "numbers": plan.n_out, "rankings": curve_count(classes)}


def zero_sums(plan: Plan, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """The sums of each metric by name before the first batch, 0 in float64."""
    widths = compared_widths(plan)
    return {name: np.zeros(METRICS[name].shape(widths[METRICS[name].of])) for name in metrics}


class MetricSums:
    """Adds a data set's predictions, in order, to the sums of metrics.

    Attributes:
        sums: of each metric by name, float64; those of ranking metrics stay 0 until the last batch is added.
    """

    def __init__(self, dataset: Dataset, plan: Plan, metrics: Sequence[str], dtype: np.dtype) -> None:
        assert plan.loss is not None
        self._function = LOSSES[plan.loss].output
        self.sums = zero_sums(plan, metrics)
        self._weight = dataset.weight
        self._targets: dict[str, np.ndarray] = {}
        self._scores: np.ndarray | None = None  # (rows, curves), of ranking metrics
        if metrics:
            target = target_array(dataset, plan, dtype)
            classes = target if target.ndim == 1 else classes_of(self._function, target)
            self._targets = {"classes": classes, "numbers": target}
            if any(METRICS[name].of == "rankings" for name in metrics):
                curves = compared_widths(plan)["rankings"]
                self._targets["rankings"] = curve_positives(classes, curves)
                self._scores = np.empty((len(dataset), curves), dtype)

    def add(self, rows: slice, output: np.ndarray) -> None:
        """Add the predictions (B, n_out) for ``rows`` of the data set."""
        compared: dict[TargetsOf, np.ndarray] = {"numbers": output}
        if any(METRICS[name].of == "classes" for name in self.sums):
            compared["classes"] = classes_of(self._function, output)
        self._add(rows, compared)
        if self._scores is not None:
            self._scores[rows] = output[:, -self._scores.shape[1] :]
            if rows.stop == len(self._scores):
                self._add(slice(None), {"rankings": self._scores})

    def _add(self, rows: slice, compared: Mapping[TargetsOf, np.ndarray]) -> None:
        weight = None if self._weight is None else self._weight[rows]
        for name, sums in self.sums.items():
            of = METRICS[name].of
            if of in compared:
                METRICS[name].accumulate(compared[of], self._targets[of][rows], weight, sums)
