"""What is done with arrays on a card, on a stand-in for it whose memory is the host's."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.backends.cpu.backend import CpuBackend
from mlpgpu.backends.cpu.inference import CpuInference
from mlpgpu.backends.cuda.inference import inference
from mlpgpu.backends.cuda.run import arrays, card_arrays
from mlpgpu.backends.cuda.run.card_arrays import CardResult, CardRows, open_card_array
from mlpgpu.backends.cuda.run.data import feed
from mlpgpu.datasets import interchange
from mlpgpu.datasets.interchange import view_of
from mlpgpu.errors import DtypeError

RANDOM = np.random.default_rng(6)
X, Y = RANDOM.normal(size=(40, 6)).astype(np.float32), RANDOM.integers(3, size=40)
WEIGHT = RANDOM.uniform(0.5, 2.0, 40).astype(np.float32)


def memory(address: int, nbytes: int) -> np.ndarray:
    """So many bytes at an address."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


class HostDevice(nullcontext):
    """A card whose memory is the host's."""

    index, most_texels, free_bytes, total_bytes = 0, 0, 1 << 30, 1 << 30

    def synchronize(self) -> None:
        pass


class HostStream:
    """A stream that does everything at once."""

    number = 5

    def __init__(self, device: Any, name: str = "") -> None:
        pass

    def upload(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(address, np.ascontiguousarray(array).ctypes.data, array.nbytes)

    def download(self, array: np.ndarray, address: int) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(destination, source, nbytes)

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        ctypes.memset(address, byte, nbytes)

    def wait(self, event: Any) -> None:
        pass

    def record(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class HostArena:
    def __init__(self, device: Any, nbytes: int) -> None:
        self._block = np.zeros(nbytes + 512, np.uint8)

    @classmethod
    def of(cls, device: Any, sizes: dict[str, int]) -> tuple[HostArena, dict[str, int]]:
        arena, places, place = cls(device, sum(size + 512 for size in sizes.values())), {}, 0
        start = -(-arena._block.ctypes.data // 16) * 16
        for name, size in sizes.items():
            places[name] = start + place
            place += -(-size // 16) * 16
        return arena, places

    def take(self, nbytes: int) -> int:
        return -(-self._block.ctypes.data // 16) * 16

    def close(self) -> None:
        pass


class HostKernels:
    """The kernels that look at inputs, and bring rows together."""

    def __init__(self, device: Any, entries: Any) -> None:
        pass

    def __getitem__(self, entry: Any) -> Any:
        return SimpleNamespace(launch=getattr(self, entry.name))

    @staticmethod
    def row_checksums(stream: Any, grid: Any, values: list[Any]) -> None:
        x, rows, count, row_bytes, checksums = values
        listed = np.arange(count) if rows is None else memory(rows, 4 * count).view(np.int32)
        found = [zlib.crc32(memory(x + int(row) * row_bytes, row_bytes)) for row in listed]
        ctypes.memmove(checksums, np.array(found, np.uint32).ctypes.data, 4 * count)

    @staticmethod
    def _take(dtype: Any, values: list[Any]) -> None:
        x, rows, count, width, y = values
        row_bytes = width * np.dtype(dtype).itemsize
        for place, row in enumerate(memory(rows, 4 * count).view(np.int32)):
            ctypes.memmove(y + place * row_bytes, x + int(row) * row_bytes, row_bytes)

    @staticmethod
    def put_column_float32(stream: Any, grid: Any, values: list[Any]) -> None:
        x, count, width, column, y = values
        memory(y, 4 * count * width).view(np.float32).reshape(count, width)[:, column] = memory(x, 4 * count).view("f4")

    def take_rows_float32(self, stream: Any, grid: Any, values: list[Any]) -> None:
        self._take(np.float32, values)

    def take_rows_uint8(self, stream: Any, grid: Any, values: list[Any]) -> None:
        self._take(np.uint8, values)

    @staticmethod
    def find_nonfinite(stream: Any, grid: Any, values: list[Any]) -> None:
        x, count, found = values
        if not np.isfinite(memory(x, 4 * count).view(np.float32)).all():
            ctypes.c_uint32.from_address(found).value = 1


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    device = HostDevice()
    for module in (card_arrays, feed):
        monkeypatch.setattr(module, "Stream", HostStream)
    monkeypatch.setattr(card_arrays, "find_device", lambda index: device)
    monkeypatch.setattr(card_arrays, "card_of_address", lambda what, address: 0)
    monkeypatch.setattr(card_arrays, "Arena", HostArena)
    monkeypatch.setattr(arrays, "Arena", HostArena)
    monkeypatch.setattr(card_arrays, "LoadedKernels", HostKernels)
    monkeypatch.setattr(card_arrays, "pack", lambda entry, values: values)
    monkeypatch.setattr(feed, "Event", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(feed, "pinned", lambda device, shape, dtype: np.zeros(shape, dtype))
    yield device


def on_card(array: np.ndarray) -> CardResult:
    """A copy on the card, which speaks both protocols."""
    result = CardResult(HostDevice(), array.shape, array.dtype)  # type: ignore[arg-type]  # a stand-in
    HostStream(None).upload(result.address, array)
    return result


class Interface:
    """The same by the CUDA array interface alone."""

    def __init__(self, result: CardResult, **changed: Any) -> None:
        self._result = result
        self.__cuda_array_interface__ = {**result.__cuda_array_interface__, **changed}


def test_a_result_is_opened_as_it_was_made() -> None:
    for array in (X, Y, WEIGHT, X > 0, X.astype(np.float16)):
        for given in (result := on_card(array), Interface(result)):
            opened = open_card_array("x", given)
            assert (opened.address, opened.shape, opened.dtype) == (result.address, array.shape, array.dtype)
            np.testing.assert_array_equal(opened[:], array, strict=True)
    assert view_of("x", result, 5).owner[0] is result
    with pytest.raises(DtypeError, match="dl_device"):
        result.__dlpack__(dl_device=(1, 0))


def test_streams_of_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(card_arrays, "wait_for_stream", lambda device, number: waited.append(number))
    result = on_card(X)
    for changed in ({}, {"stream": 2}, {"stream": 12345}, {"version": 2}):
        open_card_array("x", Interface(result, **changed))
    assert waited == [2, 12345, 0]


def test_rows_are_read_as_those_of_an_array() -> None:
    rows = open_card_array("x", on_card(X))
    for part in (slice(None), slice(3, 9), slice(9, 3), slice(-4, None), np.array([5, 6, 7, 1, 1, 39]), 0, 17, -1):
        np.testing.assert_array_equal(rows[part], X[part], strict=True)
    np.testing.assert_array_equal(rows.reshape(20, 12)[4:6], X.reshape(20, 12)[4:6], strict=True)


def test_numbers_that_are_not_finite_are_found() -> None:
    wrong = X.copy()
    wrong[3, 2] = np.nan
    assert open_card_array("x", on_card(X)).is_finite and not open_card_array("x", on_card(wrong)).is_finite
    assert open_card_array("x", on_card(X.astype(np.uint8))).is_finite


@pytest.mark.parametrize("x", [X, (X * 40 + 128).astype(np.uint8)], ids=["float32", "uint8"])
def test_the_identity_is_that_of_the_host(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows and of some, without a way over the host."""
    data, host = (mg.Dataset(each, Y, WEIGHT, scale=1.0) for each in (on_card(x), x))
    monkeypatch.setattr(CardRows, "_read", lambda *_: pytest.fail("rows pass through the host"))
    for part, expected in zip((data, *data.split(0.3)), (host, *host.split(0.3)), strict=True):
        assert part.identity() == expected.identity()


# --- training ---


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "squared_error"])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_kernel_finds_the_rows_of_an_epoch_at_its_order(loss: str, is_split: bool, host: Any) -> None:
    """Row i of an epoch is at order[i]: of inputs where the caller has them, of targets and weights beside them."""
    y = Y if loss == "softmax_cross_entropy" else RANDOM.normal(size=(40, 3))
    given = on_card(X)
    data, plain = mg.Dataset(given, y, WEIGHT), mg.Dataset(X, y, WEIGHT)
    if is_split:
        (data, _), (plain, _) = (each.split(0.3, seed=1) for each in (data, plain))
    plan = mg.Network([mg.Dense(6, 3)], seed=1).lower(capacity=8, loss=loss, optimizer=mg.SGD(0.1))
    fed = feed.Feed(host, HostStream(None), plan, data, batch_rows=8, room=1)  # type: ignore[arg-type]  # a stand-in
    addresses = fed.arrays.addresses
    assert addresses["data"] == given.address and fed.stays and fed.pieces == 0 and fed.source == "float32"

    def check(order: np.ndarray) -> None:
        assert fed.reach(0) == len(data)
        fed.prepare()
        places = memory(addresses["order"], 4 * len(data)).view(np.int32)
        width = y[:1].size
        for name, columns, expected in (
            ("data", 6, plain.x),
            ("targets", width, plain.y),
            ("weights", 1, plain.weight),
        ):
            found = memory(addresses[name], 4 * 40 * columns).view(np.float32).reshape(40, columns)[places]
            expected = np.asarray(expected, np.float32).reshape(len(data), columns)
            np.testing.assert_array_equal(found, expected[order])

    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(data))
        fed.begin(order)
        check(order)
    fed.begin_in_order()
    check(np.arange(len(data)))
    fed.begin_in_order()
    check(np.arange(len(data)))
    fed.arrays.allocate({"next order": 4 * len(data)})
    fed.list_next(order, HostStream(None), "next order")  # type: ignore[arg-type]  # a stand-in
    fed.begin_listed("next order", SimpleNamespace())  # type: ignore[arg-type]  # a stand-in
    check(order)
    fed.close()
    np.testing.assert_array_equal(open_card_array("x", given)[:], X)


# --- predictions ---


class SumTiers:
    """Launches whose predictions are three multiples of a row's sum, for at most four rows at a time."""

    item_bytes = 4

    def __init__(self) -> None:
        self.scales: list[float] = []
        self._inputs, self._outputs = np.zeros((4, 6), np.float32), np.zeros((4, 3), np.float32)
        self.addresses = {"data": self._inputs.ctypes.data, "out": self._outputs.ctypes.data}
        self.row_bytes = 24
        self.begun: list[int] = []

    def set_scale(self, scale: float) -> None:
        self.scales.append(scale)

    def tier(self, count: int) -> Any:
        return SimpleNamespace(capacity=4)

    def rooms(self, tier: Any, count: int) -> list[SumTiers]:
        return [self]

    def begin(self, rows: int) -> None:
        self.begun.append(rows)

    def upload(self, stream: Any, rows: slice) -> None:
        assert rows == slice(0, 0)  # the header alone

    def launch(self, stream: Any) -> None:
        self._outputs[:] = self._inputs.sum(axis=1, keepdims=True) * np.arange(1, 4)


@pytest.mark.parametrize("rows", [None, np.array([3, 4, 5, 1, 0, 39, 38, 7, 8])])
def test_predictions_are_made_piece_by_piece(rows: np.ndarray | None, host: Any) -> None:
    tiers = SumTiers()
    one: Any = object.__new__(inference.CudaInference)
    one._at_work, one._stream, one._device = nullcontext, HostStream(None), host
    one._plan, one._tiers_of = SimpleNamespace(n_out=3, logits="out", output="out"), lambda kind: tiers
    one._is_closed, one.close = True, lambda: None
    taken = X if rows is None else X[rows]
    result = inference.CudaInference.run_on_card(one, open_card_array("x", on_card(X)), (len(taken), 3), rows=rows)
    expected = taken.sum(axis=1, keepdims=True) * np.arange(1, 4, dtype=np.float32)
    np.testing.assert_array_equal(open_card_array("y", result)[:], expected, strict=True)
    assert sum(tiers.begun) == len(taken) and max(tiers.begun) == 4 and tiers.scales == [1.0]


def test_a_network_gives_what_the_card_gives(monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
    """The way from `predict` to the card and back, in the caller's library; labels come to the host."""
    network = mg.Network([mg.Dense(6, 3)], seed=2)
    network.output = "softmax"
    asked: list[Any] = []

    def run_on_card(self: Any, x: CardRows, shape: Any, *, rows: Any, scale: Any, logits: bool) -> CardResult:
        asked.append((shape, None if rows is None else len(rows), scale, logits))
        values = x[:] if rows is None else x[rows]
        return on_card(network.logits_of(values) if logits else network.predict(values, backend="cpu"))

    monkeypatch.setattr(CpuBackend, "card", 0)  # a backend that would compute on card 0
    monkeypatch.setattr(CpuInference, "run_on_card", run_on_card, raising=False)
    given = on_card(X)
    expected = network.predict(X, backend="cpu")
    found = network.predict(given, backend="cpu")
    assert isinstance(found, CardResult)
    np.testing.assert_array_equal(open_card_array("y", found)[:], expected)
    np.testing.assert_array_equal(network.labels(given, backend="cpu"), expected.argmax(axis=1))
    part, plain = (mg.Dataset(x).split(0.25, seed=3)[1] for x in (given, X))
    found = network.predict(part, backend="cpu")
    np.testing.assert_array_equal(open_card_array("y", found)[:], network.predict(plain, backend="cpu"))
    assert asked == [((40, 3), None, None, False)] * 2 + [((10, 3), 10, None, False)]


def test_the_reader_is_the_backend_s() -> None:
    assert interchange.open_on_card("x", on_card(X)).card == 0


@pytest.mark.parametrize("piece_bytes", [1 << 24, 50, 1])
def test_listed_rows_come_together(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of some rows, of one, and all at once; neighbours without a list."""
    monkeypatch.setattr(card_arrays, "PIECE_BYTES", piece_bytes)
    rows = open_card_array("x", on_card(X))
    for listed in ([3, 3, 0, 39], [7], [5, 6, 7], [], list(RANDOM.permutation(40))):
        index = np.array(listed, np.int64)
        np.testing.assert_array_equal(rows[index], X[index], strict=True)
    labels = open_card_array("y", on_card(Y))
    np.testing.assert_array_equal(labels[np.array([4, 1, 1])], Y[[4, 1, 1]], strict=True)


def test_columns_are_put_side_by_side() -> None:
    columns = [open_card_array("x", on_card(np.ascontiguousarray(X[:, k]))) for k in (4, 0, 2)]
    joined = columns[0].side_by_side(columns)
    np.testing.assert_array_equal(open_card_array("x", joined)[:], X[:, [4, 0, 2]], strict=True)
