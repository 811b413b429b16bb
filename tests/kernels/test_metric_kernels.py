"""Metrics of whole data sets, batch by batch, as the CUDA program launches them: here on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import EPS, dataset, first_and_thorough
from kernel_cases.metrics import metric_bound
from shim_runner import run
from sklearn import metrics as reference

from mlpgpu import Dataset, Dense, Network
from mlpgpu.backends.base import target_array
from mlpgpu.backends.cuda.kernels.launches import At, Launch
from mlpgpu.backends.cuda.run.metrics import CLEARED, array_of, metric_bytes, metric_launches, rank_bytes, rank_launches
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.backends.evaluation import MetricSums
from mlpgpu.losses import TargetKind
from mlpgpu.metrics import METRICS, SUMS
from mlpgpu.plan import Plan

CAPACITY, ROWS = 16, 37  # the last batch has five rows
CLASSIFIERS = [name for name, sums in SUMS.items() if sums.of in ("classes", "ranks")]
LABELLED = ["binary_log_loss", "label_counts", "exact_matches"]
REGRESSIONS = [name for name, sums in SUMS.items() if sums.of == "numbers" and name not in LABELLED]
RANKINGS = [name for name, sums in SUMS.items() if sums.of == "rankings"]
# Loss, kind of its targets, outputs, and the sums that suit them.
PLANS: list[tuple[str, TargetKind, int, list[str]]] = [
    ("softmax_cross_entropy", "index", 10, [*CLASSIFIERS, "log_loss", *RANKINGS]),
    ("softmax_cross_entropy", "dense", 10, [*CLASSIFIERS, "log_loss"]),
    ("softmax_cross_entropy", "dense", 2, [*CLASSIFIERS, *RANKINGS]),
    ("binary_cross_entropy", "dense", 1, [*CLASSIFIERS, *REGRESSIONS, *LABELLED, *RANKINGS]),
    ("binary_cross_entropy", "dense", 3, [*REGRESSIONS, *LABELLED, *RANKINGS]),
    ("squared_error", "dense", 1, REGRESSIONS),
    ("squared_error", "dense", 10, REGRESSIONS),
]


class HostArrays:
    """Arrays by name, and launches on them as a program would put them on a card."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def launch(self, launch: Launch) -> None:
        parts: dict[At, np.ndarray] = {}
        for value in launch.values.values():
            if isinstance(value, At) and value.array in self.arrays:
                parts[value] = self.arrays[value.array].ravel()[value.offset :]
        args: dict[str, object] = {}
        for argument in launch.entry.arguments:
            value = launch.values[argument.name]
            args[argument.name] = parts.get(value) if isinstance(value, At) else value
        for name, array in run(launch.entry, launch.grid, launch.entry.threads, args).items():
            value = launch.values[name]
            assert isinstance(value, At)
            parts[value][:] = array.ravel()


def zeros(name: str, size: int) -> np.ndarray:
    """An array of the type that kernels take it for."""
    if name in ("positives", "negatives", "areas") or name.startswith("sums"):
        return np.zeros(size // 8)
    types = {"tile sums": np.uint64, "areas done": np.uint32, "rank keys": np.uint32, "sorted keys": np.uint32}
    dtype = np.dtype(types.get(name, np.float32 if name == "rank weights" else np.int32))
    return np.full(size // dtype.itemsize, 0 if name in CLEARED else 77, dtype)


def device_sums(
    plan: Plan, data: Dataset, metrics: list[str], outputs: np.ndarray, textured: bool
) -> dict[str, np.ndarray]:
    """The sums that a program would download, of predictions (rows, n_out)."""
    single, rows = np.dtype(np.float32), len(data)
    sizes = metric_bytes(plan, metrics) | rank_bytes(plan, metrics, rows)
    arrays = {name: zeros(name, size) for name, size in sizes.items()}
    arrays |= {
        "order": np.arange(rows, dtype=np.int32),
        "targets": target_array(data, plan, single).astype(single),
    }
    if data.weight is not None:
        arrays["weights"] = data.weight.astype(single)
    host = HostArrays(arrays)
    for batch, start in enumerate(range(0, rows, plan.capacity)):
        arrays["step"] = np.array([(0, batch, batch, plan.capacity, rows)], STEP)
        of_batch = outputs[start : start + plan.capacity]
        arrays[plan.output] = np.full((plan.capacity, plan.n_out), np.nan, single)
        arrays[plan.output][: len(of_batch)] = of_batch
        for launch in metric_launches(plan, metrics, textured=textured):
            host.launch(launch)
    for launch in rank_launches(plan, metrics, rows):
        host.launch(launch)
    return {name: arrays[array_of(name)] for name in metrics}


@pytest.mark.parametrize("weighted", first_and_thorough([True, False]))
@pytest.mark.parametrize(("loss", "kind", "n_out", "metrics"), PLANS)
def test_batches_as_on_the_host(loss: str, kind: TargetKind, n_out: int, metrics: list[str], weighted: bool) -> None:
    data = dataset(loss, kind, rows=ROWS, n_in=2, n_out=n_out, weighted=weighted)
    if data.weight is not None:  # numbers that the card holds exactly
        data = data.with_weight(data.weight.astype(np.float32).astype(np.float64))
    plan = plan_of(loss, kind, n_out)
    # In eighths, so that several scores are equal.
    outputs = (np.random.default_rng(4).integers(0, 9, (ROWS, n_out)) / 8).astype(np.float32)

    reference = MetricSums(data, plan, metrics, np.dtype(np.float32))
    for start in range(0, ROWS, CAPACITY):
        rows = slice(start, min(start + CAPACITY, ROWS))
        reference.add(rows, outputs[rows])
    target = target_array(data, plan, np.dtype(np.float64))
    for textured in (True, False):
        sums = device_sums(plan, data, metrics, outputs, textured)
        for name, expected in reference.sums.items():
            bound = metric_bound(name, expected, target, weighted=weighted, merges=3)
            assert (abs(sums[name].reshape(expected.shape) - expected) <= bound).all(), name


def plan_of(loss: str, kind: Any, n_out: int) -> Plan:
    return Network([Dense(2, n_out)], seed=1).lower(
        capacity=CAPACITY, loss=loss, target_kind=kind, optimizer=None, precision="float32"
    )


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("n_out", "rows"), first_and_thorough([(1, 9000), (2, 5000), (3, 4100)]))
def test_ranks_as_scikit_learn_has_them(n_out: int, rows: int, weighted: bool) -> None:
    """Several tiles of the sort and of the prefix sums, many equal scores."""
    random = np.random.default_rng(5)
    loss, kind = ("binary_cross_entropy", "dense") if n_out == 1 else ("softmax_cross_entropy", "index")
    labels = random.integers(max(2, n_out), size=rows)
    own = labels == 1 if n_out == 1 else np.eye(n_out, dtype=bool)[labels]
    scores = random.integers(1, 1000, (rows, n_out)) + 200.0 * own.reshape(rows, n_out)
    outputs = (scores / (scores.sum(axis=1, keepdims=True) if n_out > 1 else 1200.0)).astype(np.float32)
    weight = random.integers(0, 9, rows) / 4 if weighted else None
    data = Dataset(random.normal(size=(rows, 2)), labels if n_out > 1 else labels[:, np.newaxis].astype(float), weight)
    plan = dataclasses.replace(plan_of(loss, kind, n_out), capacity=rows)
    sums = device_sums(plan, data, RANKINGS, outputs, False)
    # One class against the others, each a problem of its own.
    positives, of_class = (np.eye(n_out)[labels], outputs) if n_out > 2 else (labels, outputs[:, -1])
    expected = {
        "roc_auc": reference.roc_auc_score(positives, of_class, sample_weight=weight),
        "average_precision": reference.average_precision_score(positives, of_class, sample_weight=weight),
    }
    for name in RANKINGS:
        got = value_of(name, sums[name].reshape(3, -1))
        # Two values of sums of `rows` terms, each with a rounding of its own.
        assert got == pytest.approx(expected[name], rel=4 * rows * EPS), name


def value_of(name: str, sums: np.ndarray) -> Any:
    return METRICS[name].ways["multiclass"][1](sums)


def test_a_score_that_is_no_number_makes_its_curve_nan() -> None:
    data = dataset("softmax_cross_entropy", "index", rows=ROWS, n_in=2, n_out=3)
    plan = plan_of("softmax_cross_entropy", "index", 3)
    outputs = np.random.default_rng(4).random((ROWS, 3)).astype(np.float32)
    outputs[20, 1] = np.nan
    sums = device_sums(plan, data, RANKINGS, outputs, True)
    for name in RANKINGS:
        area, positives, negatives = sums[name].reshape(3, 3)
        assert np.isnan(area).tolist() == [False, True, False]
        assert (positives + negatives == ROWS).all()
        assert np.isnan(value_of(name, sums[name].reshape(3, 3)))


def test_classes_are_found_once_for_all_metrics_that_compare_them() -> None:
    def names(loss: str, metrics: list[str]) -> list[str]:
        plan = Network([Dense(2, 1)]).lower(capacity=CAPACITY, loss=loss, target_kind="dense", optimizer=None)
        return [launch.entry.name for launch in metric_launches(plan, metrics)]

    assert names("binary_cross_entropy", ["accuracy", "r2", "confusion_matrix"]) == [
        "classes_dense", "metric_accuracy", "metric_r2", "metric_confusion_matrix",
    ]  # fmt: skip
    assert names("squared_error", ["r2"]) == ["metric_r2"]
    assert names("binary_cross_entropy", ["true_class_ranks"]) == [
        "classes_dense", "true_class_ranks", "metric_true_class_ranks",
    ]  # fmt: skip
    assert names("binary_cross_entropy", ["roc_auc", "average_precision"]) == ["classes_dense", "rank_keys"]
