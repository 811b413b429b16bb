"""Callbacks for programs of others: TensorBoard's files are read back, and Optuna's pruner ends trials."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from tensorboardX.proto import event_pb2, graph_pb2

import mlpgpu as mg
from mlpgpu import errors

X = np.random.default_rng(1).standard_normal((40, 5)).astype("float32")
Y = X[:, :2] * 2.0


def trainer(rate: float = 0.01) -> mg.Trainer:
    net = mg.Network([mg.Dense(5, 6, "relu"), mg.Dropout(0.1), mg.Dense(6, 2)], seed=1)
    return mg.Trainer(net, "mse", mg.Adam(rate), batch_size=10, backend="cpu")


def events(folder: Path) -> list[Any]:
    """What TensorBoard reads: records of a length, its checksum, an event, its checksum."""
    found = []
    for path in sorted(folder.glob("events.*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (length,) = struct.unpack_from("<Q", data, start)
            found.append(event_pb2.Event.FromString(data[start + 12 : start + 12 + length]))
            start += length + 16
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def test_each_column_is_a_curve(tmp_path: Path) -> None:
    history = trainer().fit(
        (X, Y), 3, validation=0.2, callbacks=[mg.TensorBoard(tmp_path / "run" / "1")], progress=False
    )
    curves = scalars(tmp_path / "run" / "1")
    assert set(curves) == set(history.columns) - {"epoch"}
    for name, curve in curves.items():
        assert [step for step, _ in curve] == [1, 2, 3]
        np.testing.assert_allclose([value for _, value in curve], history[name], rtol=1e-6)


def test_distributions_are_those_that_the_trainer_counts(tmp_path: Path) -> None:
    board, counted = (
        mg.TensorBoard(tmp_path, histograms_every=2, bins=8, of=["parameters"]),
        mg.Histograms(bins=8, of=["parameters"]),
    )
    trainer().fit((X, Y), 4, callbacks=[board, counted], progress=False)
    found = {(e.step, v.tag): v.histo for e in events(tmp_path) for v in e.summary.value if v.HasField("histo")}
    assert set(found) == {(epoch, name) for epoch in (2, 4) for name in counted.epochs[epoch]}
    for (epoch, name), histogram in found.items():
        counts, edges = counted.epochs[epoch][name]
        np.testing.assert_array_equal(histogram.bucket, counts)
        np.testing.assert_allclose(histogram.bucket_limit, edges[1:])
        assert histogram.num == counts.sum()


def test_the_graph_has_the_layers(tmp_path: Path) -> None:
    trainer().fit((X, Y), 1, callbacks=[mg.TensorBoard(tmp_path)], progress=False)
    (graph,) = [graph_pb2.GraphDef.FromString(e.graph_def) for e in events(tmp_path) if e.graph_def]
    assert [(node.name, list(node.input)) for node in graph.node] == [
        ("inputs", []),
        ("0_Dense", ["inputs"]),
        ("1_Dropout", ["0_Dense"]),
        ("2_Dense", ["1_Dropout"]),
    ]


def test_a_second_fit_goes_on_with_the_curves(tmp_path: Path) -> None:
    run, board = trainer(), mg.TensorBoard(tmp_path)
    for _ in range(2):
        run.fit((X, Y), 2, callbacks=[board], progress=False)
    assert sorted(step for step, _ in scalars(tmp_path)["loss"]) == [1, 2, 3, 4]


def test_a_training_has_the_same_bits_with_it(tmp_path: Path) -> None:
    plain, watched = trainer(), trainer()
    plain.fit((X, Y), 2, progress=False)
    watched.fit((X, Y), 2, callbacks=[mg.TensorBoard(tmp_path, histograms_every=1)], progress=False)
    np.testing.assert_array_equal(plain.network.flat_parameters(), watched.network.flat_parameters())


def test_tensorboard_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.ConfigurationError, match="histograms_every"):
        mg.TensorBoard(tmp_path, histograms_every=-1)
    with pytest.raises(errors.DtypeError, match="folder"):
        mg.TensorBoard(3)  # type: ignore[arg-type]
    with pytest.raises(errors.UnknownNameError, match="of"):
        mg.TensorBoard(tmp_path, of=["weights and all"])
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError, match="one to write to"):
        trainer().fit((X, Y), 1, callbacks=[mg.TensorBoard(tmp_path / "file")], progress=False)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(errors.BackendError, match=r"mlpgpu\[tensorboard\]"):
        trainer().fit((X, Y), 1, callbacks=[mg.TensorBoard(tmp_path)], progress=False)


class Pruner(optuna.pruners.BasePruner):
    """Ends a trial after its second epoch."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.last_step == 2


@pytest.mark.parametrize("prunes", [False, True])
def test_optuna_ends_a_trial(prunes: bool) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=Pruner() if prunes else optuna.pruners.NopPruner())
    runs: list[mg.Trainer] = []

    def objective(trial: Any) -> float:
        runs.append(trainer())
        callbacks = [mg.OptunaPruning(trial)]
        return runs[0].fit((X, Y), 4, validation=0.2, callbacks=callbacks, progress=False)["validation_loss"][-1]

    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert trial.state == (optuna.trial.TrialState.PRUNED if prunes else optuna.trial.TrialState.COMPLETE)
    epochs = 2 if prunes else 4
    assert runs[0].epochs == epochs
    assert list(trial.intermediate_values.values()) == list(runs[0].history["validation_loss"])
    assert list(trial.intermediate_values) == list(range(1, epochs + 1))


def test_pruning_refuses() -> None:
    trial = optuna.create_study().ask()
    for wrong in (None, 3, optuna.Trial):
        with pytest.raises(errors.DtypeError, match="a trial of Optuna"):
            mg.OptunaPruning(wrong)
    with pytest.raises(errors.DtypeError, match="monitor"):
        mg.OptunaPruning(trial, 3)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigurationError, match="pass validation= to fit"):
        trainer().fit((X, Y), 1, callbacks=[mg.OptunaPruning(trial)], progress=False)


def test_pruning_needs_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = optuna.create_study().ask()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(errors.BackendError, match=r"mlpgpu\[optuna\]"):
        mg.OptunaPruning(trial)
