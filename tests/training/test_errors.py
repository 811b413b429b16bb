"""The errors themselves, and the checks that raise them."""

from __future__ import annotations

import builtins
import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu import errors
from mlpgpu.backends.cpu import CpuBackend
from mlpgpu.errors import (
    BackendError,
    ConfigurationError,
    DataError,
    DataMismatchError,
    DivergenceError,
    DownloadError,
    DtypeError,
    EmptyDataError,
    FileFormatError,
    MissingPackageError,
    MlpgpuError,
    RankError,
    ReadOnlyError,
    ShapeError,
    StorageError,
    TornStateError,
    UnknownNameError,
    check_integer,
    check_number,
    lookup,
)

CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, MlpgpuError)}
BUILT_IN = {
    "ConfigurationError": ValueError,
    "UnknownNameError": ValueError,
    "ShapeError": ValueError,
    "DtypeError": TypeError,
    "DataError": ValueError,
    "EmptyDataError": DataError,
    "DataMismatchError": ValueError,
    "DivergenceError": ArithmeticError,
    "TornStateError": RuntimeError,
    "BackendError": RuntimeError,
    "RankError": RuntimeError,
    "MissingPackageError": ImportError,
    "FileFormatError": ValueError,
    "StorageError": OSError,
    "DownloadError": OSError,
    "ReadOnlyError": AttributeError,
}


def test_the_table_in_the_docstring_is_complete() -> None:
    assert CLASSES.keys() == {*BUILT_IN, "MlpgpuError"}
    for name, kind in BUILT_IN.items():
        line = next(line for line in (errors.__doc__ or "").splitlines() if line.startswith(f"{name} "))
        assert issubclass(CLASSES[name], kind)
        assert issubclass(CLASSES[name], getattr(builtins, line.split()[1]))


@pytest.mark.parametrize("name", CLASSES)
def test_a_message_says_what_was_expected_and_what_came(name: str) -> None:
    error = CLASSES[name]("x", expected=(3, 2), got=None)
    assert str(error) == "x: expected (3, 2), got None"
    assert (error.what, error.expected, error.got, error.hint) == ("x", "(3, 2)", "None", "")
    assert str(CLASSES[name]("x", expected=1, got=2, hint="turn it")) == "x: expected 1, got 2 (turn it)"


@pytest.mark.parametrize("name", CLASSES)
def test_errors_are_copied_whole(name: str) -> None:
    error = CLASSES[name]("x", expected=1, got=2, hint="turn it")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert (twin.what, twin.expected, twin.got, twin.hint) == ("x", "1", "2", "turn it")


def test_a_divergence_keeps_its_step_when_it_is_copied() -> None:
    error = DivergenceError("loss at step 7", expected="a finite value", got="NaN")
    error.step = 7
    assert pickle.loads(pickle.dumps(error)).step == 7


# Each class is raised by the library


X = np.arange(12.0).reshape(6, 2)
LABELS = np.arange(6) % 2


def new_trainer(rate: float = 0.1) -> mg.Trainer:
    return mg.Trainer(mg.Network([mg.Dense(2, 2)], seed=1), "softmax_cross_entropy", mg.SGD(rate), batch_size=4)


def resume_on_other_data(folder: Path) -> None:
    trainer = new_trainer()
    trainer.fit(mg.Dataset(X, LABELS), 1, progress=False)
    trainer.save(folder / "run.h5")
    mg.Trainer.resume(folder / "run.h5").fit(mg.Dataset(X + 1.0, LABELS), 2, progress=False)


def diverge(folder: Path) -> None:
    mg.Trainer(mg.Network([mg.Dense(2, 2)], seed=1), "huber", mg.SGD(3e38), batch_size=6).fit(
        mg.Dataset(X, X), 3, progress=False
    )


def load_text(folder: Path) -> None:
    (folder / "net.h5").write_text("weights")
    mg.load(folder / "net.h5")


RAISED_BY: dict[type[MlpgpuError], Any] = {
    ConfigurationError: lambda folder: mg.Dropout(2.0),
    ReadOnlyError: lambda folder: setattr(mg.Network([mg.Dense(2, 3)]), "seed", 1),
    UnknownNameError: lambda folder: mg.Dense(2, 2, "reluu"),
    ShapeError: lambda folder: mg.Network([mg.Dense(2, 3), mg.Dense(2, 3)]),
    DtypeError: lambda folder: mg.Dense(2.0, 2),  # type: ignore[arg-type]
    DataError: lambda folder: mg.Dataset(X * np.nan),
    EmptyDataError: lambda folder: mg.Dataset(X[:0]),
    DataMismatchError: resume_on_other_data,
    DivergenceError: diverge,
    FileFormatError: load_text,
    StorageError: lambda folder: mg.load(folder / "missing.h5"),
}
# A missing backend or package, the network, and steps ended in their middle: test_history.py, tests/estimators/,
# tests/data/test_datasets.py and test_one_moment.py.
RAISED_ELSEWHERE = {BackendError, DownloadError, MissingPackageError, RankError, TornStateError}


@pytest.mark.parametrize("kind", RAISED_BY)
def test_every_class_is_raised(kind: type[MlpgpuError], tmp_path: Path) -> None:
    with pytest.raises(kind, match=r"expected .*, got ") as caught:
        RAISED_BY[kind](tmp_path)
    assert type(caught.value) is kind
    assert caught.value.what and caught.value.expected and caught.value.got


def test_no_class_is_forgotten() -> None:
    assert {*RAISED_BY, *RAISED_ELSEWHERE, MlpgpuError} == {*CLASSES.values()}


# The checks


def test_lookup() -> None:
    table = {"relu": 1, "leaky_relu": 2, "gelu": 3}
    assert lookup("activation", "relu", table) == "relu"
    with pytest.raises(UnknownNameError) as caught:
        lookup("activation", "Relu", table)
    assert str(caught.value) == (
        "activation: expected one of relu, leaky_relu, gelu, got 'Relu' (did you mean 'relu'?)"
    )
    with pytest.raises(UnknownNameError, match=r"got 'softsign'$"):
        lookup("activation", "softsign", table)
    for name in (None, 3, b"relu", ["relu"]):
        with pytest.raises(DtypeError, match="activation: expected a name: one of relu, leaky_relu, gelu, got"):
            lookup("activation", name, table)


@pytest.mark.parametrize("value", [1, 5, np.int64(3), np.uint8(2)])
def test_check_integer_takes_whole_numbers(value: Any) -> None:
    checked = check_integer("n", value, least=1, most=5)
    assert type(checked) is int and checked == value


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ConfigurationError, "n: expected a whole number from 1 to 5, got 0"),
        (6, ConfigurationError, "n: expected a whole number from 1 to 5, got 6"),
        (1.0, DtypeError, "got float 1.0"),
        (True, DtypeError, "got bool True"),
        (np.True_, DtypeError, "n: expected a whole number"),
        ("1", DtypeError, "got str '1'"),
        (None, DtypeError, "got NoneType None"),
        (np.array([1, 2]), DtypeError, "n: expected a whole number"),
    ],
)
def test_check_integer_refuses(value: Any, error: type[MlpgpuError], message: str) -> None:
    with pytest.raises(error) as caught:
        check_integer("n", value, least=1, most=5)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [0, 0.5, np.float32(0.25), np.int8(0)])
def test_check_number_takes_real_numbers(value: Any) -> None:
    checked = check_number("p", value, least=0.0, below=1.0)
    assert type(checked) is float and checked == value


@pytest.mark.parametrize(
    ("value", "limits", "error", "message"),
    [
        (-0.1, {"least": 0.0}, ConfigurationError, "p: expected a finite number >= 0, got -0.1"),
        (1.0, {"least": 0.0, "below": 1.0}, ConfigurationError, "p: expected a finite number >= 0 and < 1, got 1.0"),
        (0.0, {"above": 0.0}, ConfigurationError, "p: expected a finite number > 0, got 0.0"),
        (float("nan"), {}, ConfigurationError, "p: expected a finite number, got nan"),
        (float("inf"), {"above": 0.0}, ConfigurationError, "got inf"),
        (float("-inf"), {}, ConfigurationError, "got -inf"),
        pytest.param(10**400, {}, ConfigurationError, "p: expected a finite number, got", id="huge"),
        (False, {}, DtypeError, "got bool False"),
        ("0.5", {}, DtypeError, "got str '0.5'"),
        (1j, {}, DtypeError, "got complex 1j"),
        (None, {}, DtypeError, "got NoneType None"),
        (np.array([0.5, 0.5]), {}, DtypeError, "p: expected a finite number"),
    ],
)
def test_check_number_refuses(value: Any, limits: dict, error: type[MlpgpuError], message: str) -> None:
    with pytest.raises(error) as caught:
        check_number("p", value, **limits)
    assert message in str(caught.value)


def test_a_plan_for_several_replicas_is_refused_by_the_cpu() -> None:
    plan = mg.Network([mg.Dense(2, 2)], seed=1).lower(capacity=4, replicas=2)
    with pytest.raises(ConfigurationError, match="replicas on the cpu backend: expected 1, got 2"):
        CpuBackend().compile(plan)
