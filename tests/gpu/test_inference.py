"""Predictions on a card: the same bits for a row in any batch, whatever the types of inputs, threads and memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mlpgpu import Dense, Dropout, LocallyConnected, Momentum, Network, Standardize, Trainer
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda.inference.inference import CudaInference
from mlpgpu.backends.cuda.run.program import CudaProgram
from mlpgpu.backends.cuda.runtime import Device, pinned
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.errors import BackendError
from mlpgpu.layers import Layer
from mlpgpu.losses import OutputName

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_once")]

COUNTS = (1, 2, 7, 8, 9, 32, 33, 127, 1000, 5000)
PRECISIONS = ("float32", "tf32", "bfloat16")


def drawn(seed: int) -> list[Layer]:
    """A network of widths and activations drawn at random."""
    random = np.random.default_rng(seed)
    wide = seed % 3 == 2
    widths = [int(random.integers(1, 1500 if wide else 300)) for _ in range(int(random.integers(2, 6)))]
    layers: list[Layer] = [Standardize(widths[0])] if seed % 2 else []
    for k, n in itertools.pairwise(widths):
        layers.append(
            Dense(
                k, n, activation=list(ACTIVATIONS)[random.integers(len(ACTIVATIONS))], bias=bool(random.random() < 0.8)
            )
        )
    return layers


NETWORKS: dict[str, list[Layer]] = {
    "tiny": [Dense(784, 128, activation="relu"), Dropout(0.1), Dense(128, 10)],
    "medium": [Dense(784, 1024, activation="relu"), Dense(1024, 1024, activation="relu"), Dense(1024, 10)],
    "small": [Dense(20, 64, activation="tanh"), Dense(64, 64, activation="relu"), Dense(64, 2)],
    "standardized": [Standardize(30), Dense(30, 50, activation="gelu"), Dense(50, 3), Standardize(3)],
    "local": [LocallyConnected(200, 9, activation="relu"), LocallyConnected(192, 9), Dense(184, 5)],
    "tall": [Dense(9000, 90, activation="sigmoid"), Dense(90, 10)],
    "one": [Dense(1, 1)],
    **{f"drawn{seed}": drawn(seed) for seed in range(9)},
}


def network_of(name: str, output: OutputName = "softmax") -> Network:
    network = Network(NETWORKS[name], seed=3)
    if isinstance(network.layers[-1], Standardize):
        output = "identity"
    network.output = output
    random = np.random.default_rng(1)
    if not network.adapted:
        x = 3.0 + 2.0 * random.normal(size=(500, network.n_in))
        network.adapt((x, 5.0 + random.normal(size=(500, network.n_out))))
    return network


@pytest.fixture(params=["C++", "NumPy or the driver"])
def copied_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who copies rows to page-locked memory."""
    if request.param != "C++":
        monkeypatch.setattr(thresholds, "INFERENCE_COPY_THREADS", 0)


@contextmanager
def inference(
    network: Network, device: Device, precision: str = "float32", rows: int = 1 << 20
) -> Iterator[CudaInference]:
    plan = network.lower(capacity=rows, output=network.output, precision=precision)
    made = CudaInference(plan, device)
    made.load(network.state())
    try:
        yield made
    finally:
        made.close()


def predict(made: CudaInference, x: np.ndarray, n_out: int, **options: object) -> np.ndarray:
    out = np.full((len(x), n_out), np.nan, np.float32)
    assert made.run(x, out, **options)  # type: ignore[arg-type]
    return out


def inputs(rows: int, n_in: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(rows, n_in)).astype(np.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_row_has_the_same_bits_in_any_batch(name: str, precision: str, device: Device) -> None:
    network = network_of(name)
    x = inputs(max(COUNTS), network.n_in)
    with inference(network, device, precision) as made:
        expected = predict(made, x, network.n_out)
        logits = predict(made, x, network.n_out, logits=True)
        for count in COUNTS:
            first = (max(COUNTS) - count) // 3
            part = slice(first, first + count)
            assert np.array_equal(predict(made, x[part], network.n_out), expected[part]), count
            assert np.array_equal(predict(made, x[part], network.n_out, logits=True), logits[part]), count
    with inference(network, device, precision, rows=100) as made:
        assert np.array_equal(predict(made, x[:333], network.n_out), expected[:333])
    reference = network.predict(x[:40], backend="cpu")
    tolerance = 1e-4 if precision == "float32" else 0.1
    assert np.allclose(expected[:40], reference, atol=tolerance * (1.0 + abs(reference).max()), rtol=tolerance)


@pytest.mark.usefixtures("copied_by")
@pytest.mark.parametrize("name", ["tiny", "medium", "small", "standardized"])
def test_inputs_of_other_types_mean_the_same(name: str, device: Device) -> None:
    network = network_of(name)
    whole = np.random.default_rng(2).integers(0, 256, (2000, network.n_in)).astype(np.uint8)
    with inference(network, device) as made:
        for count in (1, 5, 40, 2000):
            expected = predict(made, whole[:count].astype(np.float32), network.n_out)
            for dtype in ("float64", ">f4", "int64", "uint8", "float16"):
                found = predict(made, whole[:count].astype(dtype), network.n_out)
                if name == "standardized" and dtype in ("float64", "int64"):  # in float64, then rounded
                    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4), (count, dtype)
                else:
                    assert np.array_equal(found, expected), (count, dtype)
            strided = np.asfortranarray(whole[:count].astype(np.float32))
            assert np.array_equal(predict(made, strided, network.n_out), expected)
            scaled = predict(made, whole[:count], network.n_out, scale=0.25)
            quarter = predict(made, whole[:count].astype(np.float32) * np.float32(0.25), network.n_out)
            assert np.array_equal(scaled, quarter), count
            order = np.random.default_rng(3).permutation(2000)[:count]
            picked = np.empty((count, network.n_out), np.float32)
            assert made.run(whole, picked, rows=order, scale=0.25)
            taken = predict(made, whole[order], network.n_out, scale=0.25)
            assert np.array_equal(picked, taken), count


@pytest.mark.usefixtures("copied_by")
def test_arrays_that_go_up_as_they_lie_mean_the_same(device: Device, tmp_path: Path) -> None:
    network = network_of("tiny")
    x = inputs(9000, network.n_in)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with inference(network, device) as made:
        with device:
            locked = pinned(device, (1000, network.n_in), np.float32)
        for rows in (200, 1000, 6000, 9000):
            by_host = predict(made, x, network.n_out, rows=np.arange(9000))[:rows]
            assert np.array_equal(predict(made, x[:rows], network.n_out), by_host)
            assert np.array_equal(predict(made, mapped[:rows], network.n_out), by_host)
        np.copyto(locked, x[:1000])
        found = predict(made, locked, network.n_out)
        locked[...] = 0.0  # the card has read everything by then
        assert np.array_equal(found, predict(made, x[:1000], network.n_out))


@pytest.mark.usefixtures("copied_by")
def test_what_is_not_finite_is_told(device: Device) -> None:
    network = network_of("tiny")
    with inference(network, device) as made:
        for rows in (1, 20, 4000):
            for value in (np.nan, np.inf, -np.inf):
                x = inputs(rows, network.n_in)
                x[rows // 2, 3] = value
                assert not made.run(x, np.empty((rows, 10), np.float32))
            x = inputs(rows, network.n_in).astype(np.float64)
            x[-1, -1] = 1e300
            assert not made.run(x, np.empty((rows, 10), np.float32))
            assert made.run(np.full((rows, network.n_in), 3e38), np.empty((rows, 10), np.float32))


@pytest.mark.usefixtures("copied_by")
def test_threads_get_the_bits_of_one(device: Device) -> None:
    network = network_of("tiny")
    x = inputs(6000, network.n_in)
    with inference(network, device) as made, ThreadPoolExecutor(16) as pool:
        expected = predict(made, x, network.n_out)

        def run(number: int) -> bool:
            random = np.random.default_rng(number)
            for _ in range(20):
                count = int(random.choice([1, 3, 8, 50, 700, 6000]))
                first = int(random.integers(0, 6001 - count))
                found = predict(made, x[first : first + count], network.n_out)
                if not np.array_equal(found, expected[first : first + count]):
                    return False
            return True

        assert all(pool.map(run, range(16)))


def test_parameters_are_those_of_the_last_load(device: Device) -> None:
    for name in ("tiny", "medium"):
        network, other = network_of(name), network_of(name)
        other.parameters["0.weight"] = 2.0 * other.parameters["0.weight"]
        x = inputs(3000, network.n_in)
        with inference(network, device) as made, inference(other, device) as doubled:
            before, after = (predict(each, x, network.n_out) for each in (made, doubled))
            assert not np.array_equal(before, after)
            made.load(other.state())
            for count in (1, 40, 3000):
                assert np.array_equal(predict(made, x[:count], network.n_out), after[:count])
            made.load(network.state())
            assert np.array_equal(predict(made, x[:5], network.n_out), before[:5])


def test_it_follows_a_trainer_on_the_card(device: Device) -> None:
    network = network_of("tiny")
    x, y = inputs(512, network.n_in), np.arange(512) % 10
    trainer = Trainer(network, "softmax_cross_entropy", Momentum(0.05), batch_size=64, backend="cuda")
    with inference(network, device) as made:
        for _ in range(3):
            trainer.fit((x, y), 1, progress=False)
            program = trainer._engine.program
            assert isinstance(program, CudaProgram) and made.load_from(program)
            followed = predict(made, x, network.n_out)
            with inference(network, device) as anew:
                assert np.array_equal(predict(anew, x, network.n_out), followed)


@pytest.mark.alone
def test_predictions_leave_memory_where_it_was(device: Device) -> None:
    network = network_of("tiny")
    x, out = inputs(1500, network.n_in), np.empty((1500, 10), np.float32)
    with inference(network, device) as made:
        for count in (1, 1500):
            assert made.run(x[:count], out[:count])
        with device:
            before = device.free_bytes
        for number in range(3000):
            count = 1 if number % 10 else 1500
            assert made.run(x[:count], out[:count])
        with device:
            assert device.free_bytes == before


@pytest.mark.alone
def test_closing_gives_everything_back(device: Device) -> None:
    network = network_of("medium")
    x, out = inputs(5000, network.n_in), np.empty((5000, 10), np.float32)
    with device:
        before = device.free_bytes
    for _ in range(4):
        with inference(network, device) as made:
            assert made.run(x, out) and made.run(x[:1], out[:1])
        with pytest.raises(BackendError, match="closed"):
            made.run(x, out)
        made.close()
    with device:
        assert before - device.free_bytes < 64 << 20


@pytest.mark.usefixtures("copied_by")
@pytest.mark.parametrize("rows", [3, 700, 70_000])
def test_digits_beyond_float32_reach_standardize(rows: int) -> None:
    """With the bits of inputs that were standardized in float64 beforehand, and rounded once."""
    x = 1e9 + np.random.default_rng(rows).standard_normal((rows, 5))
    layers: list[Layer] = [Standardize(5), Dense(5, 40, "tanh"), Dense(40, 2)]
    net, given = (Network(layers, seed=3) for _ in range(2))
    net.adapt(x)
    given.adapted = True  # by a mean of 0 and a scale of 1
    mean, scale = np.split(net.flat_statistics(), 2)
    expected = given.predict(((x - mean) / scale).astype(np.float32), backend="cuda")
    np.testing.assert_array_equal(net.predict(x, backend="cuda"), expected)
    np.testing.assert_allclose(net.predict(x, backend="cpu"), expected, rtol=0, atol=1e-5)
    whole = (1_700_000_000 + np.arange(rows * 5)).reshape(rows, 5)
    net.adapt(whole)  # statistics change, and so does what is left of them
    mean, scale = np.split(net.flat_statistics(), 2)
    expected = given.predict(((whole - mean) / scale).astype(np.float32), backend="cuda")
    np.testing.assert_array_equal(net.predict(whole, backend="cuda"), expected)
