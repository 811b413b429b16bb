"""Metrics of whole data sets, batch by batch, as the CUDA program launches them: here on the host."""

from __future__ import annotations

import kernel_cases
import numpy as np
import pytest
from helpers import dataset
from shim_runner import run

from mlpgpu import Dataset, Dense, Network
from mlpgpu.backends.base import target_array
from mlpgpu.backends.cuda.lowering import At
from mlpgpu.backends.cuda.program import STEP, metric_bytes, metric_launches, sums_of
from mlpgpu.backends.evaluation import MetricSums
from mlpgpu.losses import TargetKind
from mlpgpu.metrics import METRICS
from mlpgpu.plan import Plan

CAPACITY, ROWS = 16, 37  # the last batch has five rows
CLASSIFIERS = [name for name, metric in METRICS.items() if metric.of == "classes"]
REGRESSIONS = [name for name, metric in METRICS.items() if metric.of == "numbers"]
# Loss, kind of its targets, outputs, and the metrics that suit them.
PLANS: list[tuple[str, TargetKind, int, list[str]]] = [
    ("softmax_cross_entropy", "index", 10, CLASSIFIERS),
    ("softmax_cross_entropy", "dense", 10, CLASSIFIERS),
    ("binary_cross_entropy", "dense", 1, [*CLASSIFIERS, *REGRESSIONS]),
    ("binary_cross_entropy", "dense", 3, REGRESSIONS),
    ("squared_error", "dense", 1, REGRESSIONS),
    ("squared_error", "dense", 10, REGRESSIONS),
]


def device_sums(
    plan: Plan, data: Dataset, metrics: list[str], outputs: np.ndarray, textured: bool
) -> dict[str, np.ndarray]:
    """The sums that a program would download, of predictions (rows, n_out)."""
    single = np.dtype(np.float32)
    arrays: dict[str, np.ndarray] = {
        name: np.zeros(size // 8) if name.startswith("sums") else np.full(size // 4, -1, np.int32)
        for name, size in metric_bytes(plan, metrics).items()
    }
    arrays |= {
        "order": np.arange(len(data), dtype=np.int32),
        "targets": target_array(data, plan, single).astype(single),
    }
    if data.weight is not None:
        arrays["weights"] = data.weight.astype(single)
    for batch, start in enumerate(range(0, len(data), plan.capacity)):
        arrays["step"] = np.array([(0, batch, batch, plan.capacity, len(data))], STEP)
        rows = outputs[start : start + plan.capacity]
        arrays[plan.output] = np.full((plan.capacity, plan.n_out), np.nan, single)
        arrays[plan.output][: len(rows)] = rows
        for launch in metric_launches(plan, metrics, textured=textured):
            args = {name: arrays.get(v.array) if isinstance(v, At) else v for name, v in launch.values.items()}
            for name, array in run(launch.entry, launch.grid, launch.entry.threads, args).items():
                value = launch.values[name]
                assert isinstance(value, At)
                arrays[value.array] = array
    return {name: arrays[sums_of(name)] for name in metrics}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("loss", "kind", "n_out", "metrics"), PLANS)
def test_batches_as_on_the_host(loss: str, kind: TargetKind, n_out: int, metrics: list[str], weighted: bool) -> None:
    data = dataset(loss, kind, rows=ROWS, n_in=2, n_out=n_out, weighted=weighted)
    if data.weight is not None:  # numbers that the card holds exactly
        data = data.with_weight(data.weight.astype(np.float32).astype(np.float64))
    plan = Network([Dense(2, n_out)], seed=1).lower(
        capacity=CAPACITY, loss=loss, target_kind=kind, optimizer=None, precision="float32"
    )
    outputs = np.random.default_rng(4).random((ROWS, n_out)).astype(np.float32)

    reference = MetricSums(data, plan, metrics, np.dtype(np.float32))
    for start in range(0, ROWS, CAPACITY):
        rows = slice(start, min(start + CAPACITY, ROWS))
        reference.add(rows, outputs[rows])
    target = target_array(data, plan, np.dtype(np.float64))
    for textured in (True, False):
        sums = device_sums(plan, data, metrics, outputs, textured)
        for name, expected in reference.sums.items():
            bound = kernel_cases.metric_bound(name, expected, target, weighted=weighted, merges=3)
            assert (abs(sums[name].reshape(expected.shape) - expected) <= bound).all(), name


def test_classes_are_found_once_for_all_metrics_that_compare_them() -> None:
    def names(loss: str, metrics: list[str]) -> list[str]:
        plan = Network([Dense(2, 1)]).lower(capacity=CAPACITY, loss=loss, target_kind="dense", optimizer=None)
        return [launch.entry.name for launch in metric_launches(plan, metrics)]

    assert names("binary_cross_entropy", ["accuracy", "r2", "confusion_matrix"]) == [
        "classes_dense", "metric_accuracy", "metric_r2", "metric_confusion_matrix",
    ]  # fmt: skip
    assert names("squared_error", ["r2"]) == ["metric_r2"]
