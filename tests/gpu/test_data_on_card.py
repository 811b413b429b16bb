"""Data that lie on the card already: the bits of data from the host, without a way over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.backends.cuda.run.card_arrays import CardResult, CardRows
from mlpgpu.backends.cuda.runtime import Device, Stream
from mlpgpu.errors import ConfigurationError, DataError, DataMismatchError, DtypeError

pytestmark = pytest.mark.gpu

RANDOM = np.random.default_rng(8)
X = RANDOM.normal(size=(700, 20)).astype(np.float32)
Y = (X @ RANDOM.normal(size=(20, 5))).argmax(axis=1)
WEIGHT = RANDOM.uniform(0.5, 2.0, len(X)).astype(np.float32)
BYTES = (40 * X + 128).clip(0, 255).astype(np.uint8)


def put(device: Device, array: np.ndarray) -> CardResult:
    """A copy of the array on the card, which speaks both protocols as another library's does."""
    found = CardResult(device, array.shape, array.dtype)
    with device:
        stream = Stream(device)
        stream.upload(found.address, array)
        stream.synchronize()
    return found


def back(result: Any) -> np.ndarray:
    return mg.Dataset(result if len(result.shape) > 1 else _columns(result)).x


def _columns(result: Any) -> Any:
    result.shape = (*result.shape, 1)
    return result


@pytest.fixture
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of an array on the card comes to the host, but for one-dimensional ones: labels and weights."""
    read = CardRows._read

    def checked(self: CardRows, rows: Any) -> np.ndarray:
        assert self.ndim == 1, "inputs pass through the host"
        return read(self, rows)

    monkeypatch.setattr(CardRows, "_read", checked)


def trained(
    data: Any, validation: Any = None, *, layers: Any = None, callbacks: Any = (), **options: Any
) -> mg.Trainer:
    layers = layers or [mg.Dense(20, 33, "tanh"), mg.Dropout(0.2), mg.Dense(33, 5)]
    options = {"optimizer": mg.Adam(0.003), "batch_size": 16, **options}
    trainer = mg.Trainer(mg.Network(layers, seed=3), "softmax_cross_entropy", backend="cuda", **options)
    trainer.fit(data, 3, validation=validation, callbacks=callbacks, progress=False)
    return trainer


def assert_same(trainer: mg.Trainer, expected: mg.Trainer) -> None:
    np.testing.assert_array_equal(trainer.network.flat_parameters(), expected.network.flat_parameters())
    for column in ("loss", "validation_loss"):
        if column in expected.history:
            assert list(trainer.history[column]) == list(expected.history[column])


@pytest.mark.parametrize("x", [X, BYTES], ids=["float32", "uint8"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"streams": 2},
        {"batch_size": 300, "precision": "bfloat16", "layers": [mg.Dense(20, 512, "relu"), mg.Dense(512, 5)]},
        {"optimizer": mg.Momentum(0.05, clip_norm=0.5)},
    ],
    ids=["persistent", "streams", "bfloat16", "clipped"],
)
def test_a_fit_has_the_bits_of_data_from_the_host(
    x: np.ndarray, options: dict[str, Any], device: Device, nothing_read: None
) -> None:
    on_card = put(device, x)
    data = mg.Dataset(on_card, put(device, Y), put(device, WEIGHT), scale=1 / 255)
    host = mg.Dataset(x, Y, WEIGHT, scale=1 / 255)
    assert data.card == device.index and data.storage_x.address == on_card.address  # type: ignore[attr-defined]
    assert_same(trained(data, **options), trained(host, **options))


def test_splits_validate_and_leave_the_array_as_it_was(device: Device) -> None:
    on_card = put(device, X)
    data, host = mg.Dataset(on_card, Y, WEIGHT), mg.Dataset(X, Y, WEIGHT)
    assert_same(*(trained(*each.split(0.2, seed=4)) for each in (data, host)))
    np.testing.assert_array_equal(back(on_card), X)


def test_standardized_inputs(device: Device) -> None:
    layers = [mg.Standardize(20), mg.Dense(20, 33, "tanh"), mg.Dense(33, 5)]
    assert_same(*(trained(mg.Dataset(x, Y), layers=layers) for x in (put(device, X), X)))


def test_large_sets_are_sorted_on_the_card(device: Device) -> None:
    x = RANDOM.normal(size=(1 << 18, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    layers = [mg.Dense(8, 16, "relu"), mg.Dense(16, 2)]
    first, second = (
        trained(mg.Dataset(each, y).split(0.5)[0], layers=layers, batch_size=1000) for each in (put(device, x), x)
    )
    assert_same(first, second)


class SaveInside(mg.Callback):
    """Saves in the middle of the second epoch."""

    every_steps = 59

    def __init__(self, path: Path) -> None:
        self.path = path

    def step_end(self, trainer: Any) -> None:
        if trainer.steps == self.every_steps:
            trainer.save(self.path)


def test_a_run_goes_on_from_data_on_either_side(device: Device, tmp_path: Path) -> None:
    data, host = mg.Dataset(put(device, X), Y), mg.Dataset(X, Y)
    unbroken = trained(host)
    for first, second in ((data, host), (host, data)):
        trained(first, callbacks=[SaveInside(tmp_path / "run.h5")])
        resumed = mg.Trainer.resume(tmp_path / "run.h5")
        resumed.fit(second, 3, progress=False)
        assert_same(resumed, unbroken)
    changed = X.copy()
    changed[5, 5] += 1.0
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    with pytest.raises(DataMismatchError):
        resumed.fit(mg.Dataset(put(device, changed), Y), 3, progress=False)


def test_evaluations_are_those_of_data_from_the_host(device: Device, nothing_read: None) -> None:
    trainer = trained(mg.Dataset(X, Y))
    data, host = mg.Dataset(put(device, X), Y, WEIGHT), mg.Dataset(X, Y, WEIGHT)
    metrics = ["accuracy", "f1_macro", "log_loss"]
    for part, expected in zip((data, *data.split(0.3)), (host, *host.split(0.3)), strict=True):
        found, value = (trainer.evaluate(each, metrics=metrics) for each in (part, expected))
        assert found == value


@pytest.mark.parametrize("rows", [1, 7, 700])
def test_predictions_stay_on_the_card(rows: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    network = trained(mg.Dataset(X, Y)).network
    x = put(device, X[:rows])
    with network.predictor("cuda") as predictor:
        with monkeypatch.context() as patch:
            patch.setattr(CardRows, "_read", lambda *_: pytest.fail("rows pass through the host"))
            found, logits = predictor(x), predictor.logits(x)
        assert isinstance(found, CardResult) and found.shape == (rows, 5)
        np.testing.assert_array_equal(back(found), predictor(X[:rows]))
        np.testing.assert_array_equal(back(logits), predictor.logits(X[:rows]))
        np.testing.assert_array_equal(predictor.labels(x), predictor.labels(X[:rows]))
        with pytest.raises(ConfigurationError, match="none for inputs on a card"):
            predictor(x, out=np.empty((rows, 5), np.float32))


def test_predictions_of_many_pieces_and_of_a_split(device: Device) -> None:
    network = trained(mg.Dataset(X, Y)).network
    x = RANDOM.normal(size=(50_000, 20)).astype(np.float32)
    np.testing.assert_array_equal(
        back(network.predict(put(device, x), backend="cuda")), network.predict(x, backend="cuda")
    )
    part, host = mg.Dataset(put(device, X)).split(0.3)[1], mg.Dataset(X).split(0.3)[1]
    np.testing.assert_array_equal(back(network.predict(part, backend="cuda")), network.predict(host, backend="cuda"))


class Frame:
    """A table of columns on the card, as cuDF has it."""

    def __init__(self, columns: dict[str, CardResult]) -> None:
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name: str) -> CardResult:
        return self._columns[name]

    def to_cupy(self) -> Any:
        raise AssertionError("nobody has to ask for a copy")


@pytest.mark.parametrize("x", [X, BYTES], ids=["float32", "uint8"])
def test_columns_of_a_frame_become_an_array_there(x: np.ndarray, device: Device, nothing_read: None) -> None:
    frame = Frame({f"column {k}": put(device, np.ascontiguousarray(x[:, k])) for k in range(x.shape[1])})
    data = mg.Dataset(frame, put(device, Y), scale=1 / 255)
    assert data.card == device.index and data.columns == tuple(frame.columns)
    assert_same(trained(data), trained(mg.Dataset(x, Y, scale=1 / 255)))


def test_listed_rows_come_to_the_host_together(device: Device) -> None:
    data, host = (mg.Dataset(each, Y).split(0.4, seed=2)[1] for each in (put(device, X), X))
    np.testing.assert_array_equal(data.x, host.x)


def test_a_number_that_is_not_finite_is_found_there(device: Device) -> None:
    wrong = X.copy()
    wrong[600, 3] = np.nan
    with pytest.raises(DataError, match="nan at row 600, column 3"):
        mg.Dataset(put(device, wrong))


# --- PyTorch ---


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_tensors_of_pytorch(torch: Any, nothing_read: None) -> None:
    x, y = torch.tensor(X, device="cuda"), torch.tensor(Y, device="cuda")
    trainer = trained(mg.Dataset(x, y))
    assert_same(trainer, trained(mg.Dataset(X, Y)))
    found = trainer.network.predict(x, backend="cuda")
    assert isinstance(found, torch.Tensor) and found.is_cuda
    np.testing.assert_array_equal(found.cpu().numpy(), trainer.network.predict(X, backend="cuda"))
    assert torch.equal(x.cpu(), torch.tensor(X))


def test_work_of_pytorch_that_is_under_way_is_waited_for(torch: Any) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(4096, 20, device="cuda")
        slow = torch.ones(4096, 4096, device="cuda")
        for _ in range(50):  # tens of milliseconds
            slow = slow @ slow * (1.0 / 4096.0)
        x += slow[:, :20]
        data = mg.Dataset(x)
    np.testing.assert_allclose(data.x, 1.0, rtol=1e-3)


def test_a_result_outlives_the_predictor(torch: Any) -> None:
    network = trained(mg.Dataset(X, Y)).network
    expected = network.predict(X, backend="cuda")
    with network.predictor("cuda") as predictor:
        found = predictor(torch.tensor(X, device="cuda"))
    np.testing.assert_array_equal(found.cpu().numpy(), expected)


def test_tensors_that_cannot_be_read_where_they_lie(torch: Any) -> None:
    x = torch.tensor(X, device="cuda")
    with pytest.raises(DtypeError, match=r"x\.detach"):
        mg.Dataset(x.clone().requires_grad_())
    with pytest.raises(ConfigurationError, match="C-contiguous"):
        mg.Dataset(x.T)
    with pytest.raises(DtypeError, match="float32 or uint8"):
        mg.Dataset(x.double())
    with pytest.raises(DtypeError, match="bfloat16"):
        mg.Dataset(x.bfloat16())
    with pytest.raises(ConfigurationError, match="multiple of 16 bytes"):
        mg.Dataset(x.ravel()[1:-19].reshape(-1, 20))
