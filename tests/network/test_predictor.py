"""Predictors: the numbers of a plain chain of products, whatever arrays come, whoever calls, and always current."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import mlpgpu as mg
from mlpgpu import errors
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cpu import blas, inference
from mlpgpu.network import predictor as predictor_module
from mlpgpu.random import epoch_order

ROWS = 70


def network(n_in: int = 12, n_out: int = 3) -> mg.Network:
    made = mg.Network([mg.Dense(n_in, 9, "relu"), mg.Dense(9, n_out)], seed=4)
    mg.Trainer(made, "softmax_cross_entropy", mg.SGD(0.1), backend="cpu")  # records the output function
    return made


def inputs(rows: int = ROWS, n_in: int = 12) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, n_in)).astype(np.float32)


def expected(net: mg.Network, x: np.ndarray) -> np.ndarray:
    """Predictions in float64."""
    w = {name: values.astype(np.float64) for name, values in net.parameters.items()}
    z = np.maximum(x @ w["0.weight"] + w["0.bias"], 0.0) @ w["1.weight"] + w["1.bias"]
    exponentials = np.exp(z - z.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_a_predictor_computes_what_the_network_predicts(rows: int) -> None:
    net, x = network(), inputs(rows)
    with net.predictor("cpu") as predictor:
        np.testing.assert_allclose(predictor(x), expected(net, x), atol=1e-6)
        np.testing.assert_array_equal(predictor(x), net.predict(x, backend="cpu"))
        np.testing.assert_array_equal(predictor.logits(x), net.forward(x, backend="cpu"))
        np.testing.assert_array_equal(predictor.labels(x), net.labels(x, backend="cpu"))


def test_a_closed_predictor_says_so() -> None:
    predictor = network().predictor("cpu")
    predictor.close()
    predictor.close()
    for call in (predictor, predictor.logits, predictor.labels):
        with pytest.raises(errors.ConfigurationError, match="closed"):
            call(inputs())
    assert repr(predictor) == "Predictor(12 → 3, output softmax, float32, backend='cpu', closed)"


def test_a_predictor_is_not_pickled() -> None:
    net = network()
    net.predict(inputs(), backend="cpu")
    with pytest.raises(errors.DtypeError, match="pickle the network"):
        pickle.dumps(net.predictor("cpu"))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(net)).forward(inputs()), net.forward(inputs()))


def changes() -> dict[str, Any]:
    def by_step(net: mg.Network) -> None:
        trainer = mg.Trainer(net, "softmax_cross_entropy", mg.SGD(0.5), backend="cpu")
        trainer.step(inputs(8), np.arange(8) % 3)

    def by_name(net: mg.Network) -> None:
        net.parameters["1.bias"] = [3.0, 0.0, -3.0]

    return {"step": by_step, "parameters": by_name}


@pytest.mark.parametrize("change", changes())
def test_a_predictor_follows_its_network(change: str) -> None:
    net, x = network(), inputs()
    predictor = net.predictor("cpu")
    before = predictor(x)
    np.testing.assert_array_equal(net.predict(x, backend="cpu"), before)
    changes()[change](net)
    np.testing.assert_allclose(predictor(x), expected(net, x), atol=1e-6)
    assert np.abs(predictor(x) - before).max() > 1e-4
    np.testing.assert_array_equal(net.predict(x, backend="cpu"), predictor(x))


# --- what comes in ---


def arrays(folder: Path) -> dict[str, Any]:
    """The same whole numbers in many forms."""
    whole = np.random.default_rng(1).integers(0, 2, size=(ROWS, 12))
    file = np.memmap(folder / "x", np.float32, "w+", shape=whole.shape)
    file[:] = whole
    wide = np.zeros((2 * ROWS, 24), np.float64)
    wide[::2, ::2] = whole
    kinds = {np.dtype(code).name: whole.astype(code) for code in "?bhiqHIQefd"}
    return kinds | {
        "list": whole.tolist(),
        "memory map": file,
        "strided": wide[::2, ::2],
        "Fortran": np.asfortranarray(whole.astype(np.float32)),
        "other byte order": whole.astype(">f4"),
        "images": whole.astype(np.float32).reshape(ROWS, 3, 4),
        "strided images": np.asfortranarray(whole.astype(np.float32).reshape(ROWS, 3, 4)),
        "read-only": np.broadcast_to(whole[:1], whole.shape),
        "data set": mg.Dataset(whole.astype(np.float64)),
        "split": mg.Dataset(whole).split(0.5, seed=3)[0],
    }


def test_a_predictor_takes_what_a_data_set_takes(tmp_path: Path) -> None:
    net = network()
    predictor = net.predictor("cpu")
    for name, x in arrays(tmp_path).items():
        rows = mg.Dataset(x).x if not isinstance(x, mg.Dataset) else x.x
        plain = np.array(rows, np.float32)
        np.testing.assert_array_equal(predictor(x), predictor(plain), err_msg=name)
        np.testing.assert_array_equal(net.predict(x, backend="cpu"), predictor(plain), err_msg=name)
        np.testing.assert_allclose(predictor(x), expected(net, plain), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("rows", [1, 3, ROWS, 900])
def test_the_same_numbers_have_the_same_bits_in_whatever_array(rows: int, precision: str) -> None:
    """A call as a whole and in pieces, of one array after another, and of chosen rows."""
    whole = np.random.default_rng(rows).integers(0, 100, size=(rows, 12))
    plain = mg.Network([mg.Dense(12, 9, "relu"), mg.Dense(9, 3)], seed=4)
    standardized = mg.Network([mg.Standardize(12), mg.Dense(12, 9, "tanh"), mg.Dense(9, 3)], seed=4)
    standardized.adapt(mg.Dataset(whole + np.random.default_rng(1).random(whole.shape)))
    wide = np.zeros((rows + 1, 26))
    wide[1:, 1::2] = np.column_stack([whole, np.zeros(rows)])
    kinds = [*(whole.astype(code) for code in "bhiqHIQd"), wide[1:, 1:25:2], wide[1:, 23::-2][:, ::-1]]
    rounded = [*(whole.astype(code) for code in "ef"), np.asfortranarray(whole.astype(np.float32)), whole.astype(">i4")]
    for net, alike in ((plain, kinds + rounded), (standardized, kinds)):  # which rounds what float32 holds before that
        mg.Trainer(net, "softmax_cross_entropy", precision=precision, backend="cpu")
        for predictor in (net.predictor("cpu"), net.predictor("cpu", batch_size=64)):
            expected = predictor(whole.astype(np.float64))
            for x in (*alike, *alike[::-1]):
                np.testing.assert_array_equal(predictor(x), expected, err_msg=f"{x.dtype} {x.strides}")
            for part in mg.Dataset(whole.astype(np.float64)).split(0.5, seed=2) if rows > 1 else ():
                np.testing.assert_array_equal(predictor(part), predictor(np.array(part.x)))


def test_bytes_of_which_nobody_said_what_they_mean() -> None:
    """A network that was never trained takes them as a data set does, which warns where all are 0 and 1."""
    x = np.random.default_rng(2).integers(0, 256, size=(ROWS, 12), dtype=np.uint8)
    net = network()
    predictor = net.predictor("cpu")
    by_data_set = predictor(mg.Dataset(x, scale=1 / 255))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (x, np.asfortranarray(x), x[::-1][::-1]):
            np.testing.assert_array_equal(predictor(array), by_data_set)
        np.testing.assert_array_equal(net.predict(x, backend="cpu"), by_data_set)
        for part in mg.Dataset(x).split(0.5, seed=2):
            np.testing.assert_array_equal(predictor(part), predictor(part.storage_x[part.storage_index]))
    binary = x % 2
    for _ in range(2):
        with pytest.warns(UserWarning, match="only 0 and 1"):
            np.testing.assert_array_equal(predictor(binary), predictor(mg.Dataset(binary, scale=1 / 255)))
    binary[0, 3] = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictor(binary)


def test_bytes_mean_what_they_meant_in_training() -> None:
    x = np.random.default_rng(2).integers(0, 256, size=(ROWS, 12), dtype=np.uint8)
    net = network()
    mg.Trainer(net, "softmax_cross_entropy", mg.SGD(0.1), backend="cpu").step(x[:8], np.arange(8) % 3)
    predictor = net.predictor("cpu")
    np.testing.assert_allclose(predictor(x), expected(net, x / 255), atol=1e-6)
    np.testing.assert_array_equal(predictor(x[:, ::-1]), predictor(np.ascontiguousarray(x[:, ::-1])))
    with pytest.raises(errors.ConfigurationError, match="as in training"):
        predictor(x / 255)
    np.testing.assert_allclose(predictor(mg.Dataset(x / 255, scale=1 / 255)), predictor(x), atol=1e-6)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (np.zeros((0, 12), np.float32), errors.EmptyDataError),
        (np.zeros(12, np.float32), errors.ShapeError),
        (np.zeros((3, 11), np.float32), errors.ShapeError),
        (np.zeros((3, 0), np.float32), errors.ShapeError),
        ([["a"] * 12], errors.DtypeError),
        (np.zeros((3, 12), complex), errors.DtypeError),
        (None, errors.DtypeError),
    ],
)
def test_what_is_no_input_is_refused(x: Any, error: type[Exception]) -> None:
    net = network()
    with pytest.raises(error):
        net.predictor("cpu")(x)
    with pytest.raises(error):
        net.predict(x, backend="cpu")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_what_is_not_finite_is_found_even_where_weights_are_0(value: float, dtype: type, rows: int) -> None:
    net = network()
    net.parameters = {"0.weight": np.zeros((12, 9)), "0.bias": np.full(9, -1.0)}
    for column in range(12):
        x = np.zeros((rows, 12), dtype)
        x[-1, column] = value
        for predictor in (net.predictor("cpu"), net.predictor("cpu", batch_size=7)):  # whole, and piece by piece
            with pytest.raises(errors.DataError, match=f"at row {rows - 1}, column {column}"):
                predictor(x)


def test_what_overflows_the_precision_is_refused_and_what_overflows_a_sum_is_not() -> None:
    net, x = network(), np.zeros((2, 12))
    x[1, 3] = 1e39
    with pytest.raises(errors.DataError, match=r"range of float32, got 1e\+39 at row 1, column 3"):
        net.predictor("cpu")(x)
    x[1, 3] = 1e30  # whose square is infinite
    assert np.isfinite(net.predictor("cpu").logits(x)).all()


# --- out= ---


def test_predictions_go_where_they_are_asked_to() -> None:
    net, x = network(), inputs()
    predictor = net.predictor("cpu")
    out = np.empty((ROWS, 3), np.float32)
    assert predictor(x, out) is out
    np.testing.assert_array_equal(out, predictor(x))
    assert predictor.logits(x, out=out) is out
    np.testing.assert_array_equal(out, predictor.logits(x))


def test_one_output_of_vectors_is_a_vector() -> None:
    net = mg.Network([mg.Dense(12, 1)], seed=1)
    x = inputs()
    mg.Trainer(net, "mse", mg.SGD(0.1), backend="cpu").step(x[:5], np.arange(5.0))
    predictor, out = net.predictor("cpu"), np.empty(ROWS, np.float32)
    assert predictor(x, out) is out
    np.testing.assert_array_equal(out, net.predict(x, backend="cpu"))
    assert predictor.logits(x).shape == (ROWS, 1)
    with pytest.raises(errors.ShapeError, match="out"):
        predictor(x, np.empty((ROWS, 1), np.float32))


def read_only() -> np.ndarray:
    array = np.empty((ROWS, 3), np.float32)
    array.flags.writeable = False
    return array


SHARED = np.zeros((ROWS, 12), np.float32)


@pytest.mark.parametrize(
    ("out", "error"),
    [
        ([], errors.DtypeError),
        (np.empty((ROWS, 3)), errors.DtypeError),
        (np.empty((ROWS, 3), ">f4"), errors.DtypeError),
        (np.empty((ROWS - 1, 3), np.float32), errors.ShapeError),
        (np.empty(ROWS * 3, np.float32), errors.ShapeError),
        (np.empty((3, ROWS), np.float32).T, errors.ConfigurationError),
        (np.empty((ROWS, 6), np.float32)[:, ::2], errors.ConfigurationError),
        (read_only(), errors.ConfigurationError),
        (SHARED.reshape(-1, 3)[:ROWS], errors.ConfigurationError),
    ],
)
def test_an_array_that_cannot_take_predictions_is_refused(out: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="out"):
        network().predictor("cpu")(SHARED, out)


# --- who calls ---


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of some dozen rows goes by pieces, as long ones do."""
    monkeypatch.setattr(inference, "PIECE_FLOPS", 1)
    monkeypatch.setattr(inference, "LEAST_PIECE_ROWS", 1)
    monkeypatch.setattr(inference, "FEW_PIECE_ROWS", 5)


@pytest.mark.usefixtures("small_pieces")
def test_bits_depend_on_no_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = network(), inputs()
    results = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(inference, "available_cores", lambda cores=cores: cores)
        results += [net.predictor("cpu")(x) for _ in range(3)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    np.testing.assert_allclose(results[0], expected(net, x), atol=1e-6)


@pytest.mark.usefixtures("small_pieces")
def test_sixteen_threads_get_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "available_cores", lambda: 3)
    net = network()
    predictor = net.predictor("cpu")
    given = [inputs(rows) for rows in range(1, 65, 4)]
    alone = [predictor(x) for x in given]

    def call(place: int) -> bool:
        return all(np.array_equal(predictor(given[place]), alone[place]) for _ in range(30))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(16)))


@pytest.mark.parametrize("rows", [2, 9, ROWS])
def test_threads_share_columns_of_wide_layers_with_the_same_bits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "PIECE_FLOPS", 1)
    monkeypatch.setattr(inference, "WIDE", 4)
    layers = [mg.LocallyConnected(12, 3, "gelu"), mg.LocallyConnected(10, 2, "silu", bias="layer")]
    for first in ([mg.Dense(12, 9, "relu")], [mg.Standardize(12), mg.Dense(12, 9, "elu", bias=False)], layers):
        net = mg.Network([*first, mg.Dense(9, 17, "softplus"), mg.Dense(17, 3)], seed=4)
        x = inputs(rows)
        net.adapt(x)
        results = []
        for cores in (1, 2, 5):
            monkeypatch.setattr(inference, "available_cores", lambda cores=cores: cores)
            results += [net.predictor("cpu")(x) for _ in range(3)]
        with monkeypatch.context() as alone:
            alone.setattr(inference, "WIDE", 1 << 30)
            np.testing.assert_allclose(results[0], net.predictor("cpu")(x), atol=1e-5)
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])
        x[-1, 5] = np.inf
        with pytest.raises(errors.DataError, match=f"row {rows - 1}, column 5"):
            net.predictor("cpu")(x)


@pytest.mark.usefixtures("small_pieces")
def test_an_error_in_a_piece_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "available_cores", lambda: 3)
    predictor, x = network().predictor("cpu"), inputs()
    before = predictor(x)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(inference.CpuInference, "_take_scratch", fail)
        with pytest.raises(MemoryError):
            predictor(x)
    np.testing.assert_array_equal(predictor(x), before)


def parameters_of(net: mg.Network) -> bytes:
    return b"".join(values.tobytes() for values in net.parameters.values())


def test_a_training_beside_predictions_keeps_its_bits_and_shows_finished_steps() -> None:
    data = mg.Dataset(inputs(200), np.arange(200) % 3)
    x = np.eye(12, dtype=np.float32)

    def train(net: mg.Network) -> bytes:
        trainer = mg.Trainer(net, "softmax_cross_entropy", mg.Momentum(0.1), batch_size=10, backend="cpu", threads=2)
        trainer.fit(data, 15, progress=False)
        return parameters_of(net)

    steps: list[bytes] = []
    follower = network()
    reader = follower.predictor("cpu")

    unbroken = train(network())
    # Logits of each finished step, one after another.
    stepwise = network()
    trainer = mg.Trainer(stepwise, "softmax_cross_entropy", mg.Momentum(0.1), batch_size=10, backend="cpu", threads=2)
    steps.append(stepwise.forward(x, backend="cpu").tobytes())
    for epoch in range(15):
        order = epoch_order(200, seed=stepwise.seed, epoch=epoch)
        for start in range(0, 200, 10):
            rows = order[start : start + 10]
            trainer.step(data.x[rows], data.y[rows])
            steps.append(stepwise.forward(x, backend="cpu").tobytes())
    assert parameters_of(stepwise) == unbroken
    finished, seen, is_over = set(steps), set(), threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.add(reader.logits(x).tobytes())
            seen.add(follower.forward(x, backend="cpu").tobytes())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert train(follower) == unbroken
    finally:
        is_over.set()
        thread.join()
    assert seen <= finished
    assert reader.logits(x).tobytes() == steps[-1]


# --- what is kept ---


def test_a_network_keeps_few_compilations_and_lets_go_of_them() -> None:
    net, x = network(), inputs(2)
    for batch_size in range(1, 20):
        net.predict(x, backend="cpu", batch_size=batch_size)
    kept = [weakref.ref(compiled) for compiled in net._kept._compiled.values()]
    assert 0 < len(kept) <= predictor_module.KEPT_MOST
    copies = copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    assert all(not len(other._kept._compiled) for other in copies)
    for other in copies:
        np.testing.assert_array_equal(other.predict(x, backend="cpu"), net.predict(x, backend="cpu"))
    del net
    assert [reference() for reference in kept] == [None] * len(kept)  # at once, with no cycles to collect


def test_nothing_is_drawn_or_searched_for_or_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = network(), inputs()
    before = net.predict(x, backend="cpu")
    for module, name in (
        (inference, "initial_values"),
        (mg.network.parameters, "initial_values"),
        (blas, "ThreadpoolController"),
        (predictor_module, "choose_backend"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("done again"))
    np.testing.assert_array_equal(net.predict(x, backend="cpu"), before)


def test_a_new_loss_and_a_new_precision_are_followed() -> None:
    net, x = mg.Network([mg.Dense(12, 3)], seed=2), inputs()
    predictor = net.predictor("cpu")
    logits = predictor(x)
    np.testing.assert_array_equal(logits, predictor.logits(x))
    mg.Trainer(net, "softmax_cross_entropy", mg.SGD(0.1), backend="cpu")
    np.testing.assert_allclose(predictor(x).sum(axis=1), 1.0, atol=1e-6)
    mg.Trainer(net, "mse", mg.SGD(0.0), backend="cpu", precision="float64").step(x[:2], np.zeros((2, 3)))
    assert predictor(x).dtype == net.predict(x, backend="cpu").dtype == np.float64
    np.testing.assert_allclose(predictor(x), logits, atol=1e-5)


def test_statistics_and_classes_are_followed() -> None:
    net = mg.Network([mg.Standardize(12), mg.Dense(12, 3)], seed=2)
    mg.Trainer(net, "softmax_cross_entropy", mg.SGD(0.1), backend="cpu")
    predictor, x = net.predictor("cpu"), inputs()
    with pytest.raises(errors.ConfigurationError, match="adapt"):
        predictor(x)
    net.adapt(x)
    before = predictor(x)
    net.adapt(2.0 * x + 3.0)
    assert np.abs(predictor(x) - before).max() > 1e-3
    np.testing.assert_allclose(predictor(2.0 * x + 3.0), before, atol=1e-5)
    assert predictor.labels(x).dtype.kind == "i"
    net.classes = ["a", "b", "c"]
    assert set(predictor.labels(x)) <= {"a", "b", "c"}


def test_parameters_that_diverged_are_refused_until_others_are_set() -> None:
    net, x = network(), inputs()
    predictor = net.predictor("cpu")
    good = net.flat_parameters().copy()
    net.values.replace(np.full_like(good, np.nan))
    for _ in range(2):
        with pytest.raises(errors.DivergenceError, match="diverged"):
            predictor(x)
        with pytest.raises(errors.DivergenceError, match="diverged"):
            net.predict(x, backend="cpu")
    net.values.replace(good)
    np.testing.assert_allclose(predictor(x), expected(net, x), atol=1e-6)


def test_ten_thousand_predictions_leave_the_process_where_it_was() -> None:
    net, x = network(), inputs(40)
    predictor = net.predictor("cpu")
    calls = [predictor, predictor.labels, lambda x: net.predict(x, backend="cpu")]

    def many(times: int) -> int:
        for number in range(times):
            calls[number % 3](x[: 1 + number % 40])
        return psutil.Process().memory_info().rss

    before = many(500)
    threads = threading.active_count()
    assert many(10_000) - before < 4 << 20
    assert threading.active_count() == threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "available_cores", lambda: 3)
    predictor, x = network().predictor("cpu"), inputs()
    before = predictor(x)  # with threads, which the child lacks
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if np.array_equal(predictor(x), before) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_locally_connected_layers_and_all_activations_are_predicted_as_trained() -> None:
    x = inputs()
    for name in ACTIVATIONS:
        layers = [mg.Standardize(12), mg.LocallyConnected(12, 4, name), mg.Dropout(0.5), mg.Dense(9, 2, name)]
        net = mg.Network([*layers, mg.Standardize(2)], seed=3)
        net.adapt((x, x[:, :2] * 3.0 + 1.0))
        y = np.zeros((ROWS, 2), np.float32)
        trainer = mg.Trainer(net, "mse", mg.SGD(0.0), backend="cpu", batch_size=ROWS, metrics=["mean_absolute_error"])
        with net.predictor("cpu") as predictor:
            error = np.abs(predictor(x) - y).mean()
        assert trainer.evaluate((x, y))["mean_absolute_error"] == pytest.approx(error, rel=1e-5), name


def test_an_evaluation_on_other_targets_keeps_its_program_and_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = inputs(), np.arange(ROWS) % 3
    shares = np.eye(3, dtype=np.float32)[labels]  # which say the same
    net = mg.Network([mg.Standardize(12), mg.Dense(12, 3)], seed=2)
    net.adapt(x)
    trainer = mg.Trainer(net, "softmax_cross_entropy", mg.SGD(0.5), backend="cpu", batch_size=16)
    trainer.step(x[:16], labels[:16])
    losses = [trainer.evaluate((x, shares))["loss"]]
    compiled = trainer._engine._compile
    monkeypatch.setattr(trainer._engine, "_compile", lambda _: pytest.fail("compiled again"))
    trainer.step(x[:16], labels[:16])
    losses.append(trainer.evaluate((x, shares))["loss"])
    net.parameters["1.bias"] = [1.0, 2.0, 3.0]
    losses.append(trainer.evaluate((x, shares))["loss"])
    net.adapt(3.0 * x)
    losses.append(trainer.evaluate((x, shares))["loss"])
    assert len(set(losses)) == 4
    monkeypatch.setattr(trainer._engine, "_compile", compiled)
    assert trainer.evaluate((x, labels))["loss"] == pytest.approx(losses[-1], rel=1e-6)
