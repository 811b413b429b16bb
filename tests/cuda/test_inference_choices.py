"""How predictions and evaluations are cut and launched, decided without a card."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.backends import row_copies
from mlpgpu.backends.cuda.inference.copies import as_they_lie, fill_from, parts
from mlpgpu.backends.cuda.inference.inference import CudaInference
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.inference import (
    by_helpers,
    copy_threads,
    evaluation_rows,
    half_rows,
    part_rows,
    past_caches,
    piece_rows,
    row_tiers,
    rows_in_flow,
    threads_for,
    uploaded_as_they_lie,
)
from mlpgpu.backends.cuda.select.network import FewRowsNetwork, few_rows_network
from mlpgpu.backends.cuda.select.setting import Setting
from mlpgpu.layers import Layer
from mlpgpu.locks import Mutex
from mlpgpu.plan import Plan


def plan_of(layers: list[Layer], rows: int = 1 << 20, **options: object) -> Plan:
    return mg.Network(layers, seed=1).lower(capacity=rows, **options)  # type: ignore[arg-type]


def chosen(layers: list[Layer], arch: str = "sm_90a", **options: object) -> FewRowsNetwork | str:
    return few_rows_network(plan_of(layers, **options), Setting(132, arch, "float32", textured=False))


TINY: list[Layer] = [mg.Standardize(784), mg.Dense(784, 128, activation="relu"), mg.Dropout(0.1), mg.Dense(128, 10)]
MEDIUM: list[Layer] = [mg.Dense(784, 1024, activation="relu"), mg.Dense(1024, 1024), mg.Dense(1024, 10)]


def test_a_small_network_is_one_launch_for_few_rows() -> None:
    network = chosen(TINY, output="softmax")
    assert isinstance(network, FewRowsNetwork)
    assert len(network.layers) == 2 and network.spread == 1 and network.standardize is not None
    assert [network.blocks(rows) for rows in (1, 8, 9, 32)] == [16, 16, 32, 64]
    assert network.pitch == 784 and "1 layers by all blocks, 1 by one" in str(network)


def test_a_network_of_few_weights_is_one_block() -> None:
    network = chosen([mg.Dense(20, 64), mg.Dense(64, 64), mg.Dense(64, 2)])
    assert isinstance(network, FewRowsNetwork) and network.spread == 0
    assert network.blocks(32) == 1


@pytest.mark.parametrize(
    ("layers", "arch", "why"),
    [
        (MEDIUM, "sm_90a", "1 Dense is made otherwise"),
        ([mg.Dense(9000, 90)], "sm_75", "1 Dense is made otherwise"),
        ([mg.LocallyConnected(50, 3)], "sm_75", "1 LocallyConnected has no part"),
        ([mg.Dense(4, 20_000)], "sm_75", "a block takes a row"),
    ],
)
def test_what_is_no_such_network_says_why(layers: list[Layer], arch: str, why: str) -> None:
    found = chosen(layers, arch)
    assert isinstance(found, str) and re.search(why, found)


def test_multiply_adds_make_wide_layers_where_there_are_no_tensor_cores() -> None:
    assert isinstance(chosen(MEDIUM, "sm_75"), FewRowsNetwork)


@pytest.mark.parametrize("layers", [TINY, MEDIUM, [mg.Dense(90_000, 90), mg.Dense(90, 10)]])
def test_a_plan_for_predictions_keeps_neither_z_nor_masks(layers: list[Layer]) -> None:
    plan = plan_of(layers, 1000, output="softmax")
    lowered = lower(plan, multiprocessors=132, source="float32", textured=False, arch="sm_90a")
    assert lowered.evaluation and not lowered.shards and not any(lowered.bytes[name] for name in ("slots", "partials"))
    assert all(launch.values.get("z") is None for launch in lowered.evaluation)
    assert not any("dropout" in launch.entry.name for launch in lowered.evaluation)


def test_pieces_have_room_and_bytes_enough() -> None:
    for layers, item_bytes in ((TINY, 4), (TINY, 1), (MEDIUM, 4), ([mg.Dense(90_000, 90)], 4), ([mg.Dense(2, 2)], 4)):
        plan = plan_of(layers)
        most = piece_rows(plan, item_bytes)
        assert 8 <= most <= thresholds.INFERENCE_MOST_ROWS
        assert most <= 32 or most * item_bytes * plan.n_in <= thresholds.INFERENCE_PIECE_BYTES
        tiers = row_tiers(most)
        assert list(tiers) == sorted(set(tiers)) and tiers[-1] == most
        for rows in (most + 1, 10 * most, 1000 * most):
            assert 1 <= rows_in_flow(rows, item_bytes * plan.n_in, most) <= most
    assert piece_rows(plan_of(TINY, 100), 4) == 100


def test_an_evaluation_takes_many_rows_whatever_the_batch_size() -> None:
    options = {"loss": "softmax_cross_entropy", "optimizer": mg.Momentum(0.1)}
    found = {evaluation_rows(plan_of(TINY, rows, **options)) for rows in (1, 128, 9000)}
    assert found == {8192}
    assert evaluation_rows(plan_of([mg.Dense(10_000_000, 2)], 1)) == 3


def test_a_plan_of_another_capacity_is_the_same_otherwise() -> None:
    options = {"loss": "softmax_cross_entropy", "optimizer": mg.Momentum(0.1)}
    for layers in (TINY, MEDIUM):
        assert plan_of(layers, 7, **options).with_capacity(300) == plan_of(layers, 300, **options)


@pytest.mark.parametrize("dtype", ["float32", "float64", ">f4", "uint8", "int64", "bool"])
@pytest.mark.parametrize("rows", [3, 5000])
def test_rows_are_copied_in_the_type_of_the_card(dtype: str, rows: int) -> None:
    random = np.random.default_rng(1)
    x = random.integers(0, 200, (6000, 90)).astype(dtype)
    order = random.permutation(6000)
    for listed in (None, order):
        to = np.full((rows, 90), np.nan, np.float32)
        assert fill_from(x, listed)(slice(100, 100 + rows), to, check=True)
        assert np.array_equal(to, x[slice(100, 100 + rows) if listed is None else order[100 : 100 + rows]])


@pytest.mark.parametrize("rows", [3, 5000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_what_is_not_finite_in_float32_is_found(value: float, rows: int) -> None:
    x, to = np.full((rows, 90), 3e38), np.empty((rows, 90), np.float32)  # whose sum and squares are beyond float32
    assert fill_from(x, None)(slice(0, rows), to, check=True)
    x[-2, 7] = value
    assert not fill_from(x, None)(slice(0, rows), to, check=True)


def test_arrays_go_up_as_they_lie_where_nothing_is_to_be_done_to_them() -> None:
    x = np.zeros((40, 90), np.float32)
    assert as_they_lie(x, None, x.dtype) is x and as_they_lie(x[3:9], None, x.dtype) is not None
    assert as_they_lie(x, np.arange(40), x.dtype) is None
    for other in (x[:, ::2], x.astype(">f4"), x.astype(np.float64), x.astype(np.uint8)):
        assert as_they_lie(other, None, x.dtype) is None
    megabyte = 1 << 20
    assert uploaded_as_they_lie(3 * megabyte, "float32", 1024)
    assert not uploaded_as_they_lie(3 * megabyte, "float32", 8)  # the host looks for what is not finite
    assert uploaded_as_they_lie(3 * megabyte, "uint8", 8)
    assert not uploaded_as_they_lie(1000, "uint8", 1024) and not uploaded_as_they_lie(200 * megabyte, "uint8", 1024)


def test_parts_cover_all_rows_once() -> None:
    for rows, most in ((10, 3), (9, 3), (1, 5)):
        covered = [row for part in parts(slice(2, 2 + rows), most) for row in range(part.start, part.stop)]
        assert covered == list(range(2, 2 + rows))
    assert half_rows(10, 4) == 10 and half_rows(1_000_001, 400) == 500_001


def test_threads_in_c_follow_from_cores_and_bytes() -> None:
    assert [copy_threads(cores, is_compiled=True) for cores in (1, 2, 6, 64)] == [0, 2, 6, 12]
    assert copy_threads(64, is_compiled=False) == 0
    megabyte = 1 << 20
    assert [threads_for(nbytes, 8) for nbytes in (80_000, megabyte, 3 * megabyte, 200 * megabyte)] == [1, 4, 8, 8]
    assert threads_for(200 * megabyte, 2) == 2
    assert part_rows(1000, 80) == 1000 and part_rows(1000, 3136) == 250 and part_rows(300, 3136) == 300
    assert not past_caches(80_000) and past_caches(3 * megabyte) and past_caches(188 * megabyte)
    assert not by_helpers(1024 * 80) and by_helpers(1024 * 3136)


# --- predictions, with memory of the host in a card's place ---


class HostRoom:
    """A room whose card has what was in page-locked memory when it went up, and answers with its first columns."""

    def __init__(self, capacity: int, n_in: int, n_out: int, dtype: np.dtype) -> None:
        self.inputs, self.result = np.zeros((capacity, n_in), dtype), np.zeros((capacity, n_out), np.float32)
        self.row_bytes, self.is_finite, self.uploads = dtype.itemsize * n_in, True, 0
        self.is_up = self.is_made = self.is_down = SimpleNamespace(synchronize=lambda: None)
        self._card = np.zeros_like(self.inputs)

    def begin(self, rows: int) -> None:
        self.inputs[...], self._card[...] = 99, 98

    def upload(self, stream: Any, rows: slice) -> None:
        self._card[rows] = self.inputs[rows]
        self.uploads += 1

    def upload_from(self, stream: Any, x: np.ndarray) -> None:
        self._card[: len(x)] = x

    def launch(self, stream: Any) -> None:
        self.is_finite = bool(np.isfinite(self._card).all())

    def download(self, stream: Any, array: str, rows: int) -> None:
        self.result[:rows] = self._card[:rows, : self.result.shape[1]]


def inference_on_host(copy_threads: int, capacity: int, dtype: np.dtype, *, checks_inputs: bool) -> CudaInference:
    """One of 90-7 by hand, whose launches take so many rows."""
    made: Any = object.__new__(CudaInference)
    made._plan, made._network, made._scaling = plan_of([mg.Dense(90, 7)]), "none", None
    made._lock, made._is_closed, made._pool, made._copy_threads = Mutex(), False, None, copy_threads
    made._device = nullcontext()
    made._device.check_process = made._device.synchronize = lambda: None
    made._stream = made._up = made._down = SimpleNamespace(
        synchronize=lambda: None, record=lambda event: None, wait=lambda event: None
    )
    rooms = [HostRoom(capacity, 90, 7, dtype) for _ in range(11)]
    tier = SimpleNamespace(capacity=capacity, checks_inputs=checks_inputs, by_helpers=copy_threads > 0)
    made._tiers = dict.fromkeys(
        ("float32", "uint8"),
        SimpleNamespace(
            dtype=dtype, item_bytes=dtype.itemsize, set_scale=lambda scale: None, tier=lambda rows: tier,
            rooms=lambda tier, count: rooms[:count],
        ),
    )  # fmt: skip
    made.rooms = rooms
    return made


@pytest.mark.parametrize("copy_threads", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4", "uint8", "int64"])
@pytest.mark.parametrize(("count", "capacity"), [(5, 9000), (9000, 9000), (30_000, 700)])
def test_rows_come_to_a_card_whoever_copies_them(
    copy_threads: int, dtype: str, count: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if copy_threads and not row_copies.is_there():
        pytest.skip("no copies in C++")
    monkeypatch.setattr(thresholds, "INFERENCE_LEAST_PIECE_BYTES", 1 << 16)  # more pieces than there are rooms
    random = np.random.default_rng(count)
    x = random.integers(0, 200, (count + 100, 90)).astype(dtype)
    scale, card = (0.5, np.dtype(np.uint8)) if dtype == "uint8" else (None, np.dtype(np.float32))
    made = inference_on_host(copy_threads, capacity, card, checks_inputs=copy_threads == 0)
    out = np.empty((count, 7), np.float32)
    for rows, chosen in ((None, slice(count)), (random.permutation(count + 100)[:count],) * 2):
        source = x[:count] if rows is None else x
        assert made.run(source, out, rows=rows, scale=scale)
        np.testing.assert_array_equal(out, x[chosen][:, :7].astype(np.float32))
    if copy_threads and count == capacity:
        assert made.rooms[0].uploads == 2 * (1 if card == np.uint8 else thresholds.INFERENCE_PARTS)
    if dtype != "uint8" and np.dtype(dtype).kind == "f":
        x[count - 1, 80] = np.nan
        assert not made.run(x[:count], out)
        assert made.run(x[: count - 1], out[: count - 1])
