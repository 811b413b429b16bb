"""Narrow tiles, and tiles whose warps share k: at each limit, in whole steps on the host, and switched off."""

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

from mlpgpu import Dense, Huber
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
from mlpgpu.backends.cuda.select.dense import DensePath, Gemm, Simt, WarpSplit, dense_path, is_wide
from mlpgpu.backends.cuda.select.select import select
from mlpgpu.backends.cuda.select.setting import Setting, Work
from mlpgpu.backends.cuda.select.tiles import gemm_tile, simt_tile, small_batch_tile
from mlpgpu.layers import Layer
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


# --- switched off ---


@pytest.mark.usefixtures("unused")
@given(plans(), ARCHITECTURES, st.sampled_from([1, 132]))
def test_without_the_switch_no_plan_has_them(plan: Plan, arch: str, multiprocessors: int) -> None:
    assert not has_new_tiles(lowered(plan, multiprocessors, arch=arch))


@pytest.mark.usefixtures("unused")
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
