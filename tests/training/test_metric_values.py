"""Metrics of a trainer's evaluations, of every problem, against scikit-learn's of the same predictions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import EPS
from sklearn import metrics as reference

import mlpgpu as mg
from mlpgpu.errors import DataError
from mlpgpu.metrics import METRICS, element_columns, find_metric
from mlpgpu.names import LossName

ROWS = 50
RANDOM = np.random.default_rng(6)
X = RANDOM.normal(size=(ROWS, 4))
WEIGHT = RANDOM.uniform(0.0, 2.0, ROWS)
AVERAGES = {"micro": "micro", "macro": "macro", "weighted": "weighted", "per_class": None}
SCORES = {
    "precision": reference.precision_score,
    "recall": reference.recall_score,
    "f1": reference.f1_score,
}


class Problem:
    """Targets for X, predictions of a network for them, and what scikit-learn is to be called with."""

    def __init__(self, loss: LossName, n_out: int, y: np.ndarray, weighted: bool) -> None:
        network = mg.Network([mg.Dense(4, n_out)], seed=3)
        network.parameters["0.weight"] = 3.0 * network.parameters["0.weight"]
        self.trainer = mg.Trainer(network, loss, mg.SGD(0.1), precision="float64", batch_size=7)
        self.weight = WEIGHT if weighted else None
        self.data = mg.Dataset(X, y, self.weight)
        self.trainer.evaluate(self.data)  # from now on predictions are in float64
        self.y, self.output = y, network.predict(X)

    def check(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """The metric is ``function``'s value, of the true and predicted classes where no others are given."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that are absent
            expected = function(*arguments, sample_weight=self.weight, **options)
        found = self.trainer.evaluate(self.data, [name])[name]
        np.testing.assert_allclose(found, expected, rtol=8 * ROWS * EPS, atol=8 * ROWS * EPS, err_msg=name)


WEIGHTS = pytest.mark.parametrize("weighted", [False, True])


def check_scores(problem: Problem, true: np.ndarray, predicted: np.ndarray, classes: list[int]) -> None:
    for name, score in SCORES.items():
        for suffix, average in AVERAGES.items():
            options: dict[str, Any] = {"labels": classes} if average is None else {}
            problem.check(f"{name}_{suffix}", score, true, predicted, average=average, zero_division=0, **options)


@WEIGHTS
@pytest.mark.parametrize("absent", [(), (2,), (0, 4)])
def test_several_classes(weighted: bool, absent: tuple[int, ...]) -> None:
    y = RANDOM.choice([c for c in range(5) if c not in absent], ROWS)
    problem = Problem("softmax_cross_entropy", 5, y, weighted)
    if absent == (2,):  # nor is it predicted
        problem.trainer.network.parameters["0.bias"] = np.array([0.0, 0.0, -50.0, 0.0, 0.0])
        problem.output = problem.trainer.network.predict(X)
    predicted = problem.output.argmax(axis=1)
    check_scores(problem, y, predicted, list(range(5)))
    problem.check("accuracy", reference.accuracy_score, y, predicted)
    problem.check("balanced_accuracy", reference.balanced_accuracy_score, y, predicted)
    problem.check("matthews_corrcoef", reference.matthews_corrcoef, y, predicted)
    problem.check("log_loss", reference.log_loss, y, problem.output, labels=range(5))
    problem.check("confusion_matrix", reference.confusion_matrix, y, predicted, labels=range(5))
    for k in range(1, 5):
        problem.check(f"top_{k}_accuracy", reference.top_k_accuracy_score, y, problem.output, k=k, labels=range(5))
    # Distributions of which a class has all are classes.
    of_classes = problem.trainer.evaluate(problem.data, ["log_loss", "f1_macro", "top_2_accuracy"])
    dense = mg.Dataset(X, np.eye(5)[y], problem.weight)
    found = problem.trainer.evaluate(dense, ["log_loss", "f1_macro", "top_2_accuracy"])
    assert found == pytest.approx(of_classes, rel=8 * ROWS * EPS)


@WEIGHTS
@pytest.mark.parametrize("n_out", [1, 2])
def test_two_classes(weighted: bool, n_out: int) -> None:
    y = RANDOM.integers(2, size=ROWS)
    loss: LossName = "binary_cross_entropy" if n_out == 1 else "softmax_cross_entropy"
    problem = Problem(loss, n_out, y if n_out == 2 else y[:, np.newaxis].astype(float), weighted)
    second = problem.output[:, -1]
    predicted = (second > 0.5).astype(int)
    check_scores(problem, y, predicted, [0, 1])
    for name, score in SCORES.items():
        problem.check(name, score, y, predicted, zero_division=0)
    problem.check("balanced_accuracy", reference.balanced_accuracy_score, y, predicted)
    problem.check("matthews_corrcoef", reference.matthews_corrcoef, y, predicted)
    problem.check("log_loss", reference.log_loss, y, second)
    problem.check("top_1_accuracy", reference.top_k_accuracy_score, y, second, k=1)
    if n_out == 1:
        problem.check("binary_accuracy", reference.accuracy_score, y, predicted)


@WEIGHTS
def test_several_labels(weighted: bool) -> None:
    y = (RANDOM.random((ROWS, 4)) < 0.3).astype(float)
    problem = Problem("binary_cross_entropy", 4, y, weighted)
    problem.check("roc_auc", reference.roc_auc_score, y, problem.output)
    problem.check("average_precision", reference.average_precision_score, y, problem.output)
    y[:, 1] = 0.0  # nobody has it
    predicted = (problem.output > 0.5).astype(int)
    check_scores(problem, y, predicted, list(range(4)))
    problem.check("accuracy", reference.accuracy_score, y, predicted)
    problem.check("hamming_loss", reference.hamming_loss, y, predicted)
    of_labels = [reference.log_loss(y[:, j], problem.output[:, j], sample_weight=problem.weight, labels=[0, 1])
                 for j in range(4)]  # fmt: skip
    found = problem.trainer.evaluate(problem.data, ["log_loss", "binary_accuracy", "hamming_loss"])
    assert found["log_loss"] == pytest.approx(np.mean(of_labels), rel=8 * ROWS * EPS)
    assert found["binary_accuracy"] == pytest.approx(1.0 - found["hamming_loss"], rel=ROWS * EPS)
    with pytest.raises(DataError, match="expected rows with label 1 and rows without, of weights over 0"):
        problem.trainer.evaluate(problem.data, ["roc_auc"])


@WEIGHTS
def test_numbers(weighted: bool) -> None:
    y = RANDOM.normal(size=(ROWS, 3))
    if not weighted:  # with weights the mean of a constant is rounded, in scikit-learn as well
        y[:, 1] = 2.0
    problem = Problem("squared_error", 3, y, weighted)
    problem.check("r2", reference.r2_score, y, problem.output)
    problem.check("r2_per_output", reference.r2_score, y, problem.output, multioutput="raw_values")
    problem.check("mean_absolute_error", reference.mean_absolute_error, y, problem.output)
    problem.check("mean_squared_error", reference.mean_squared_error, y, problem.output)
    for level in (0.05, 0.5, 0.9):
        problem.check(f"pinball_{level}", reference.mean_pinball_loss, y, problem.output, alpha=level)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_equal_scores_rank_as_scikit_learns(k: int) -> None:
    y = np.arange(ROWS) % 4
    problem = Problem("softmax_cross_entropy", 4, y, False)
    problem.trainer.network.parameters["0.weight"] = np.zeros((4, 4))
    problem.trainer.network.parameters["0.bias"] = np.zeros(4)
    equal = np.full((ROWS, 4), 0.25)
    problem.check(f"top_{k}_accuracy", reference.top_k_accuracy_score, y, equal, k=k)


def test_one_class_alone() -> None:
    problem = Problem("softmax_cross_entropy", 3, np.full(ROWS, 1), False)
    predicted = problem.output.argmax(axis=1)
    problem.check("matthews_corrcoef", reference.matthews_corrcoef, problem.y, predicted)
    problem.check("balanced_accuracy", reference.balanced_accuracy_score, problem.y, predicted)
    check_scores(problem, problem.y, predicted, [0, 1, 2])


def test_every_metric_is_compared() -> None:
    """What a new row of the table has to be added to."""
    scores = {f"{name}_{suffix}" for name in SCORES for suffix in AVERAGES} | set(SCORES)
    others = {
        *("accuracy", "mean_absolute_error", "mean_squared_error", "r2", "r2_per_output", "confusion_matrix"),
        *("roc_auc", "average_precision", "balanced_accuracy", "matthews_corrcoef", "binary_accuracy"),
        *("hamming_loss", "log_loss"),
    }
    assert scores | others == set(METRICS)


# --- in a history ---


def test_an_array_has_a_column_for_each_class(tmp_path: Path) -> None:
    names = np.array(["setosa", "versicolor", "virginica"])
    y = names[RANDOM.integers(3, size=ROWS)]
    trainer = mg.Trainer(
        mg.Network([mg.Dense(4, 3)], seed=1), "softmax_cross_entropy", mg.SGD(0.1),
        metrics=["f1_per_class", "f1_macro", "top_2_accuracy", "confusion_matrix"],
    )  # fmt: skip
    stopping = mg.EarlyStopping("validation_f1_per_class.setosa", patience=50)
    callbacks = [stopping, mg.CSVLogger(tmp_path / "log.csv"), mg.Checkpoint(tmp_path / "run.h5")]
    history = trainer.fit((X, y), 3, validation=(X, y), callbacks=callbacks, progress=False)
    found = trainer.evaluate((X, y))
    columns = [f"validation_f1_per_class.{name}" for name in names]
    assert [history[name][stopping.best_epoch - 1] for name in columns] == found["f1_per_class"].tolist()
    assert np.mean(found["f1_per_class"]) == pytest.approx(found["f1_macro"], rel=8 * EPS)
    assert stopping.best == max(history[columns[0]])  # higher is better
    assert set(columns) <= set((tmp_path / "log.csv").read_text().splitlines()[0].split(","))
    assert not any("confusion" in name for name in history.columns)
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    assert resumed.history[columns[2]] == history[columns[2]]
    assert resumed.metrics == ("f1_per_class", "f1_macro", "top_2_accuracy", "confusion_matrix")
    assert resumed.evaluate((X, y))["f1_macro"] == found["f1_macro"]


def test_outputs_and_classes_without_names_have_numbers() -> None:
    y = RANDOM.normal(size=(ROWS, 2))
    network = mg.Network([mg.Dense(4, 2)], seed=1)
    trainer = mg.Trainer(network, "squared_error", mg.SGD(0.01), metrics=["r2_per_output"])
    history = trainer.fit((X, y), 1, validation=(X, y), progress=False)
    assert {"validation_r2_per_output.0", "validation_r2_per_output.1"} <= set(history.columns)
    names = np.array(["a/b", "a b"])
    classes = names[RANDOM.integers(2, size=ROWS)]
    trainer = mg.Trainer(network, "softmax_cross_entropy", mg.SGD(0.01), metrics=["recall_per_class"])
    history = trainer.fit((X, classes), 1, validation=(X, classes), progress=False)
    assert {"validation_recall_per_class.0", "validation_recall_per_class.1"} <= set(history.columns)
    assert element_columns("f1", ["grün", "a b", "c"]) == ("f1.gr_n", "f1.a_b", "f1.c")


def test_numbers_in_names() -> None:
    trainer = mg.Trainer(
        mg.Network([mg.Dense(4, 1)]), "mse", mg.SGD(0.1), metrics=["pinball_.9", "pinball_0.90", "r2_score"]
    )
    assert trainer.metrics == ("pinball_0.9", "r2")
    assert not find_metric("pinball_0.9").higher_is_better
