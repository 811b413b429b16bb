"""Narrow tiles, warps that share k, and blocks that keep few rows whole: each limit, whole steps, and switched off."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from epochs import Epoch, assert_as_exact
from helpers import EPS32
from host_program import HostProgram
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases.tensor import ERRORS
from test_cuda_lowering import ARCHITECTURES, OWNED, lowered, make_plan, plans

from mlpgpu import Dense, Dropout, Huber
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import (
    BFLOAT16,
    BFLOAT16_PAIR,
    HALF_PAIR,
    OF_PRECISION,
    OPERAND_FORMATS,
    WARP_SPLIT_TILES,
    OperandFormat,
    all_entries,
    narrow_tiles,
)
from mlpgpu.backends.cuda.kernels.launches import At, Lowered
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.counted import gemm_clocks, is_faster, simt_clocks
from mlpgpu.backends.cuda.select.dense import DensePath, Gemm, Simt, WarpSplit, WholeBatch, dense_path, is_wide
from mlpgpu.backends.cuda.select.select import select
from mlpgpu.backends.cuda.select.setting import Setting, Work
from mlpgpu.backends.cuda.select.tiles import gemm_tile, simt_tile, small_batch_tile
from mlpgpu.layers import Layer
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import Plan

STEP = Work(
    Setting(132, "sm_90a", "float32", textured=True), is_training=True, rows=64, shards=1, reduction="ordered",
    in_place=True, ends_with_gradient=False, operand_format=BFLOAT16,
)  # fmt: skip
EVERYWHERE = {
    "NARROW_LEAST_ROWS": 1, "NARROW_LEAST_WIDTH": 1, "NARROW_LEAST_WEIGHTS": 1,
    "COUNTED_TENTHS": 0, "ROW_STEP_IS_USED": False,
}  # fmt: skip
NEW = {f"_{tile.name}" for operand_format in OPERAND_FORMATS for tile in narrow_tiles(operand_format)}
NEW |= {f"_{tile.name}" for tile in WARP_SPLIT_TILES}


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "NARROW_TILES_ARE_USED", False)


@pytest.fixture
def without_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are multiplied by tiles."""
    monkeypatch.setattr(thresholds, "WHOLE_BATCH_IS_USED", False)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new tiles in every product that may have them, whatever is counted."""
    for name, value in EVERYWHERE.items():
        monkeypatch.setattr(thresholds, name, value)


def of(rows: int = 64, **changed: Any) -> Work:
    return dataclasses.replace(STEP, rows=rows, **changed)


def has_new_tiles(low: Lowered) -> bool:
    return any(entry.name.endswith(tuple(NEW)) for entry in low.entries())


def on_tensor_cores(path: DensePath) -> bool:
    return all(isinstance(product, Gemm) for product in path.products.values())


# --- chosen ---


@pytest.mark.usefixtures("without_whole_batches")
@pytest.mark.parametrize(
    ("below", "at"),
    [
        ((784, 512, of(15)), (784, 512, of(16))),
        ((63, 2048, of(64)), (64, 2048, of(64))),
        ((255, 256, of(64)), (256, 256, of(64))),
        ((4096, 512, of(64)), (4096, 513, of(64))),
    ],
    ids=["rows", "width", "weights", "split along k"],
)
def test_each_limit_of_tensor_cores(
    below: tuple[int, int, Work], at: tuple[int, int, Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is counted."""
    monkeypatch.setattr(thresholds, "COUNTED_TENTHS", 0)
    assert not on_tensor_cores(dense_path(*below)) and on_tensor_cores(dense_path(*at))
    for card in ("sm_75", "sm_80", "sm_100"):
        setting = dataclasses.replace(STEP.setting, arch=card)
        assert not on_tensor_cores(dense_path(*at[:2], dataclasses.replace(at[2], setting=setting)))


@pytest.mark.parametrize("operand_format", [BFLOAT16, BFLOAT16_PAIR], ids=lambda each: each.name)
def test_a_step_of_few_rows_fills_the_card_by_narrow_tiles(operand_format: OperandFormat) -> None:
    path = dense_path(784, 512, of(64, operand_format=operand_format))
    assert isinstance(path.forward, Gemm) and isinstance(path.dx, Gemm) and isinstance(path.update, Gemm)
    assert [(each.tile.m, each.tile.n) for each in (path.forward, path.dx, path.update)] == [
        (64, 16),
        (64, 16),
        (64, 64),
    ]
    assert path.forward.tile.grid(128, 512, 132) == (64, 1, 1) and path.update.tile.grid(784, 512, 132) == (104, 1, 1)


def test_operands_that_need_passes_are_worth_it_for_more_rows_alone() -> None:
    """A pass takes longer than multiply-adds of few rows by warps that share k."""
    few, more = (dense_path(1024, 1024, of(rows, operand_format=HALF_PAIR)) for rows in (64, 255))
    assert isinstance(few.forward, WarpSplit) and isinstance(few.dx, WarpSplit) and on_tensor_cores(more)


@pytest.mark.usefixtures("without_whole_batches")
def test_warps_share_k_for_few_rows_alone() -> None:
    plain = of(64, operand_format=None)
    for rows, is_split in ((1, True), (64, True), (128, True), (1024, False), (8192, False)):
        path = dense_path(784, 1024, dataclasses.replace(plain, rows=rows))
        assert {type(path.forward), type(path.dx)} == {WarpSplit if is_split else Simt}


@given(
    st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([1, 16, 64, 255, 256, 5000]),
    st.sampled_from([None, *OPERAND_FORMATS]), st.sampled_from(["sm_75", "sm_80", "sm_90a"]),
)  # fmt: skip
def test_an_evaluation_sums_in_the_order_of_widths_alone(
    k: int, n: int, rows: int, operand_format: OperandFormat | None, arch: str
) -> None:
    """Neither the rows nor the switch decide between main loops, and no warps share k."""
    setting = dataclasses.replace(STEP.setting, arch=arch)
    work = of(rows, is_training=False, in_place=False, operand_format=operand_format, setting=setting)
    forward = dense_path(k, n, work).forward
    assert isinstance(forward, Gemm) == (operand_format is not None and is_wide(k, n))
    assert not isinstance(forward, WarpSplit)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 20, 132]))
def test_the_chosen_tile_is_counted_least(m: int, n: int, k: int, multiprocessors: int) -> None:
    usual = simt_tile(m, n, multiprocessors)[0]
    tile, why = small_batch_tile(m, n, k, multiprocessors)
    counted = [simt_clocks(each, m, n, k, multiprocessors) for each in (tile, usual, *WARP_SPLIT_TILES)]
    assert counted[0] <= counted[1] and (f"{counted[0]:,}" in why or m > thresholds.WARP_SPLIT_MOST_ROWS)
    assert tile in (usual, *WARP_SPLIT_TILES)
    few = m <= thresholds.WARP_SPLIT_MOST_ROWS
    assert (tile != usual) == (few and is_faster(min(counted[2:]), counted[1]))
    for operand_format in OPERAND_FORMATS:
        chosen, _ = gemm_tile(operand_format, m, n, multiprocessors, "sm_90a")
        tiles = (*kernels.sm90_tiles(operand_format), *narrow_tiles(operand_format))
        clocks = [gemm_clocks(each, m, n, k, multiprocessors) for each in tiles]
        assert clocks[tiles.index(chosen)] == min(clocks)


def test_steps_by_blocks_of_rows_and_tails_are_left_alone() -> None:
    small = make_plan([Dense(50, 128, "relu"), Dense(128, 128, "relu"), Dense(128, 1)], capacity=2048)
    assert select(small, STEP.setting, is_training=True).row_step
    tall = make_plan([Dense(90_000, 90, "relu"), Dense(90, 90, "relu"), Dense(90, 10)], capacity=128)
    assert select(tall, STEP.setting, is_training=True).tail


# --- few rows ---


@pytest.mark.parametrize(
    ("beyond", "within"),
    [
        ((784, 512, of(33)), (784, 512, of(32))),
        ((127, 129, of(32)), (128, 128, of(32))),
        ((2048, 16, of(32)), (2048, 17, of(32))),
        ((4096, 512, of(32)), (4096, 513, of(32))),
    ],
    ids=["rows", "weights", "columns", "split along k"],
)
def test_few_rows_and_a_large_weight_keep_the_whole_batch(
    beyond: tuple[int, int, Work], within: tuple[int, int, Work]
) -> None:
    """In whatever precision."""
    for operand_format in (None, *OPERAND_FORMATS):
        outside, inside = (
            dense_path(k, n, dataclasses.replace(work, operand_format=operand_format))
            for k, n, work in (beyond, within)
        )
        assert not any(isinstance(each, WholeBatch) for each in outside.products.values())
        assert all(isinstance(each, WholeBatch) for each in inside.products.values())
    for other in (
        {"is_training": False, "in_place": False},
        {"reduction": "atomic"},
        {"setting": dataclasses.replace(STEP.setting, arch="sm_75")},
    ):
        path = dense_path(*within[:2], dataclasses.replace(within[2], **other))  # type: ignore[arg-type]
        assert not any(isinstance(each, WholeBatch) for each in path.products.values())


@pytest.mark.parametrize(("in_place", "is_frozen"), [(False, False), (True, True)])
def test_without_an_update_in_place_the_forward_product_alone_keeps_it(in_place: bool, is_frozen: bool) -> None:
    path = dense_path(784, 512, of(8, in_place=in_place), is_frozen=is_frozen)
    assert [isinstance(each, WholeBatch) for each in path.products.values()] == [True] + [False] * (2 - is_frozen)


FEW_ROWS: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "dx and update in one": ([Dense(9, 40, "gelu"), Dense(40, 36, "tanh", bias=False), Dense(36, 40)], {}),
    "dropout between": ([Dense(9, 40, "relu"), Dropout(0.5), Dense(40, 36)], {"optimizer": OPTIMIZERS["Adam"](0.1)}),
    "a frozen layer": ([Dense(9, 40, "silu"), Dense(40, 36, "elu", trainable=False), Dense(36, 40)], {}),
    "a norm comes between": (
        [Dense(9, 40, "softplus"), Dense(40, 36)],
        {"optimizer": OPTIMIZERS["Adam"](0.1, clip_norm=0.1)},
    ),
    "shards": ([Dense(9, 40, "sigmoid"), Dense(40, 36)], {"shards": 3}),
    "a head": ([Dense(9, 40, "sigmoid"), Dense(40, 3)], {"loss": Huber(0.5)}),
}


@pytest.mark.parametrize("by_order", [True, False])
@pytest.mark.parametrize("case", FEW_ROWS)
def test_an_epoch_that_keeps_the_whole_batch(case: str, by_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "WHOLE_BATCH_LEAST_WEIGHTS", 1)
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    layers, options = FEW_ROWS[case]
    epoch = Epoch(layers, options, precision="float32-ieee", as_bytes=not by_order)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_80")
    made = [launch.entry.name for shard in host.low.shards for launch in shard]
    wide = [layer for layer in layers if isinstance(layer, Dense) and layer.n_out > kernels.SMALL_N_COLUMNS]
    shards, is_stored = options.get("shards", 1), case in ("a norm comes between", "shards")
    assert sum(name.startswith("dense_forward_whole_batch") for name in made) == shards * len(wide)
    moved = 0 if is_stored else sum(layer.trainable for layer in wide)
    assert sum(name.startswith("dense_backward_whole_batch") for name in made) == moved
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    ours = (host.parameters, losses, host.evaluate())
    (state, *cpu), (exact_state, *exact) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    for got, value, oracle in zip(ours, (state.parameters[0], *cpu), (exact_state.parameters[0], *exact), strict=True):
        assert_as_exact(got, value, oracle)


def test_a_layer_that_keeps_the_whole_batch_makes_dx_and_moves_in_one_launch() -> None:
    plan = make_plan([Dense(300, 200, "relu"), Dense(200, 150, "tanh"), Dense(150, 128)], capacity=20)
    launches = [launch for shard in lowered(plan, 132, arch="sm_90a").shards for launch in shard]
    backward = [launch for launch in launches if launch.entry.name == "dense_backward_whole_batch_Momentum_32"]
    numbers = [kernels.activation_number(name) for name in ("tanh", "relu", "identity")]
    assert len(backward) == 3 and [launch.values["activation"] for launch in backward] == numbers
    assert [launch.values["dx"] is None for launch in backward] == [False, False, True]
    assert not any(launch.entry.name.startswith(("dense_backward_input", "activation")) for launch in launches)


# --- switched off ---


@pytest.mark.usefixtures("unused")
@given(plans(), ARCHITECTURES, st.sampled_from([1, 132]))
def test_without_the_switch_no_plan_has_them(plan: Plan, arch: str, multiprocessors: int) -> None:
    assert not has_new_tiles(lowered(plan, multiprocessors, arch=arch))


@pytest.mark.usefixtures("unused", "without_whole_batches")
@pytest.mark.parametrize("rows", [16, 64, 128, 255])
def test_without_the_switch_steps_of_few_rows_are_on_plain_cores(rows: int) -> None:
    path = dense_path(784, 512, of(rows))
    assert isinstance(path.forward, Simt) and isinstance(path.dx, Simt)


# --- launches ---


@pytest.mark.usefixtures("everywhere")
@given(plans(), st.sampled_from(["float32", "uint8"]), st.sampled_from([1, 132]), ARCHITECTURES)
def test_launches_fit_the_table_and_the_arrays(plan: Plan, source: str, multiprocessors: int, arch: str) -> None:
    low = lowered(plan, multiprocessors, source, arch)
    known = set(all_entries())
    assert {entry for entry in low.entries() if not entry.header.startswith("local/stack")} <= known
    for launch in low.launches():
        assert set(launch.values) == {argument.name for argument in launch.entry.arguments}
        assert len(launch.grid) == 3 and min(launch.grid) >= 1 and max(launch.grid[1:]) <= 65535
        for argument in launch.entry.arguments:
            value = launch.values[argument.name]
            if isinstance(value, At) and value.array not in OWNED:
                assert 0 <= value.offset * argument.item_bytes < low.bytes[value.array]
    for mapped in low.maps():
        assert mapped.rows % 128 == 0 < mapped.box[0] <= 256 and mapped.box[1] in (16, 64)


STEPS: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "from product to product": ([Dense(9, 40, "gelu"), Dense(40, 36, "relu"), Dense(36, 3)], {"loss": Huber(0.5)}),
    "a loss at the end": ([Dense(9, 40, "tanh"), Dense(40, 72)], {"loss": Huber(0.5)}),
}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("operand_format", [BFLOAT16, BFLOAT16_PAIR, HALF_PAIR], ids=lambda each: each.name)
@pytest.mark.parametrize("case", STEPS)
def test_an_epoch_on_narrow_tiles(case: str, operand_format: OperandFormat) -> None:
    """A full batch and one of two rows on sm_90a, whose copies and products the host makes in their places."""
    precision = next(precision for precision, formats in OF_PRECISION.items() if operand_format in formats)
    epoch = Epoch(*STEPS[case], rates=(0.1, 0.02), precision=precision)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a", multiprocessors=132)
    made = [launch.entry.name for shard in host.low.shards for launch in shard if launch.entry.products]
    assert all(name.endswith(tuple(NEW)) for name in made)
    assert {name.rpartition("_")[2] for name in made} == {"64x16", "64x64"}
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    state, *expected = epoch.on_cpu("float64")
    before = epoch.state.parameters[0]
    ours = (host.parameters - before, losses, host.evaluate())
    for got, value in zip(ours, (state.parameters[0] - before, *expected), strict=True):
        rounding = ERRORS[operand_format.struct] + 64 * EPS32  # of a product, and of its sum
        assert np.linalg.norm(got - value) <= np.sqrt(2 * len(made)) * rounding * np.linalg.norm(value)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("by_order", [True, False])
def test_an_epoch_whose_warps_share_k(by_order: bool) -> None:
    epoch = Epoch(
        [Dense(9, 40, "gelu"), Dense(40, 36, "relu"), Dense(36, 3)], {}, precision="float32-ieee", as_bytes=not by_order
    )
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_75")
    assert any("warp_split" in launch.entry.name for shard in host.low.shards for launch in shard)
    assert not any("warp_split" in launch.entry.name for launch in host.low.evaluation)
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    ours = (host.parameters, losses, host.evaluate())
    (state, *cpu), (exact_state, *exact) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    for got, value, oracle in zip(ours, (state.parameters[0], *cpu), (exact_state.parameters[0], *exact), strict=True):
        assert_as_exact(got, value, oracle)


@pytest.mark.parametrize(("precision", "path"), [("bfloat16", "gemm_sm90 64x16"), ("float32", "warp split 32x8")])
def test_a_selection_says_what_was_counted(precision: str, path: str) -> None:
    plan = make_plan([Dense(784, 512, "relu"), Dense(512, 10)], capacity=64, precision=precision)
    printed = str(select(plan, STEP.setting, is_training=True))
    assert f"forward: {path}" in printed and "are counted at" in printed
