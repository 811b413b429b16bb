"""The sums of an evaluation, and their making on the host from predictions that come batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..datasets import Dataset
from ..losses import LOSSES, class_count, classes_of
from ..metrics import METRICS, TargetsOf
from ..plan import Plan
from .base import target_array


def compared_widths(plan: Plan) -> dict[TargetsOf, int]:
    """How many classes metrics of this plan tell apart, and how many numbers of a row they compare."""
    assert plan.loss is not None
    return {"classes": class_count(LOSSES[plan.loss].output, plan.n_out), "numbers": plan.n_out}


def zero_sums(plan: Plan, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """The sums of each metric by name before the first batch, float64."""
    widths = compared_widths(plan)
    return {name: np.zeros(METRICS[name].shape(widths[METRICS[name].of])) for name in metrics}


class MetricSums:
    """Adds a data set's predictions to the sums of metrics.

    Attributes:
        sums: of each metric by name, float64.
    """

    def __init__(self, dataset: Dataset, plan: Plan, metrics: Sequence[str], dtype: np.dtype) -> None:
        assert plan.loss is not None
        self._function = LOSSES[plan.loss].output
        self.sums = zero_sums(plan, metrics)
        self._weight = dataset.weight
        self._targets: dict[str, np.ndarray] = {}
        if metrics:
            target = target_array(dataset, plan, dtype)
            classes = target if target.ndim == 1 else classes_of(self._function, target)
            self._targets = {"classes": classes, "numbers": target}

    def add(self, rows: slice, output: np.ndarray) -> None:
        """Add the predictions (B, n_out) for ``rows`` of the data set."""
        weight = None if self._weight is None else self._weight[rows]
        for name, sums in self.sums.items():
            metric = METRICS[name]
            predicted = classes_of(self._function, output) if metric.of == "classes" else output
            metric.accumulate(predicted, self._targets[metric.of][rows], weight, sums)
