"""Narrow tiles, warps that share k, and blocks that keep few rows whole: each limit, whole steps, and switched off."""

from __future__ import annotations

import dataclasses
import itertools
import math
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import epochs
import numpy as np
import pytest
from drawn import covering
from epochs import Epoch, assert_as_exact
from helpers import EPS32
from host_program import HostProgram
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases.tensor import ERRORS, PRECISION_OF
from test_cuda_lowering import ARCHITECTURES, OWNED, lowered, make_plan, names, plans

from mlpgpu import Dense, Dropout, Huber, Momentum
from mlpgpu import plan as ops
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import (
    BFLOAT16,
    BFLOAT16_PAIR,
    BFLOAT16_TRIPLE,
    HALF,
    HALF_PAIR,
    OF_PRECISION,
    OPERAND_FORMATS,
    WARP_SPLIT_TILES,
    ClusterSplitTile,
    OperandFormat,
    Sm90Tile,
    all_entries,
    narrow_tiles,
)
from mlpgpu.backends.cuda.kernels.launches import At, Lowered
from mlpgpu.backends.cuda.select import dense, thresholds, tiles, updates
from mlpgpu.backends.cuda.select import loss as losses
from mlpgpu.backends.cuda.select.counted import (
    cluster_clocks,
    is_faster,
    pass_clocks,
    product_clocks,
    simt_clocks,
    staged_pass_clocks,
)
from mlpgpu.backends.cuda.select.dense import (
    CountedLayer,
    DensePath,
    Gemm,
    Short,
    Simt,
    SmallN,
    SplitK,
    Strips,
    UpdateByParts,
    WarpSplit,
    WholeBatch,
    count_step,
    dense_path,
    is_wide,
)
from mlpgpu.backends.cuda.select.select import select
from mlpgpu.backends.cuda.select.setting import Setting, Work
from mlpgpu.backends.cuda.select.tiles import (
    gemm_tile,
    product_tile,
    simt_tile,
    small_batch_tile,
    step_tile,
    weight_tile,
)
from mlpgpu.layers import Layer
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import Plan

STEP = Work(
    Setting(132, "sm_90a", "float32", textured=True), is_training=True, rows=64, shards=1, reduction="ordered",
    in_place=True, ends_with_gradient=False, operand_format=BFLOAT16,
)  # fmt: skip
EVERYWHERE = {
    "NARROW_LEAST_ROWS": 1, "NARROW_LEAST_WIDTH": 1, "NARROW_LEAST_WEIGHTS": 1,
    "COUNTED_TENTHS": 0, "LAYERS_TENTHS": 0, "ROW_STEP_IS_USED": False,
    "TENSOR_ROW_STEP_IS_USED": False,
}  # fmt: skip
EACH_FORMAT = [BFLOAT16, BFLOAT16_PAIR, BFLOAT16_TRIPLE, HALF_PAIR]


def shown(value: object) -> str | None:
    """A format in the name of a test; pytest shows the rest."""
    return value.name if isinstance(value, OperandFormat) else None


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
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are split along k from a few of it on."""
    for name, value in {"SPLIT_K_LEAST_K": 36, "PART_LEAST_K": 16, "ROW_STEP_IS_USED": False}.items():
        monkeypatch.setattr(thresholds, name, value)


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
def test_a_step_of_few_rows_fills_the_card_by_narrow_tiles(
    operand_format: OperandFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "CLUSTERS_SHARE_K", False)
    path = dense_path(784, 512, of(64, operand_format=operand_format))
    assert isinstance(path.forward, Gemm) and isinstance(path.dx, Gemm) and isinstance(path.update, Gemm)
    assert [(each.tile.m, each.tile.n) for each in (path.forward, path.dx, path.update)] == [
        (64, 16),
        (64, 16),
        (64, 64),
    ]
    assert path.forward.tile.grid(128, 512, 132) == (64, 1, 1) and path.update.tile.grid(784, 512, 132) == (104, 1, 1)


def test_clusters_share_k_where_tiles_leave_a_card_idle_over_many_terms() -> None:
    for k, n, rows, operand_format, split in (
        (8192, 408, 128, BFLOAT16_PAIR, 8), (3072, 87, 77, BFLOAT16, 8), (1000, 300, 200, HALF, 4),
        (768, 768, 77, BFLOAT16, 0), (1024, 1024, 128, BFLOAT16_PAIR, 0), (1024, 1024, 8192, BFLOAT16, 0),
    ):  # fmt: skip
        path = dense_path(k, n, of(rows, operand_format=operand_format)).forward
        assert isinstance(path, Gemm)
        assert (path.tile.split if isinstance(path.tile, ClusterSplitTile) else 0) == split, (k, n, rows, path.why)
        assert ("clusters of blocks share k" in path.why) == (split > 0)


def test_blocks_that_share_k_have_a_multiprocessor_each() -> None:
    """64 rows of 512 columns are 8 tiles."""
    for multiprocessors, most in ((132, 8), (63, 4), (31, 2), (15, 0)):
        tile, _, _ = step_tile(BFLOAT16, 64, 512, 1 << 15, multiprocessors, "sm_90a", has_floats=False)
        split = tile.split if isinstance(tile, ClusterSplitTile) else 0
        assert split <= most and (split > 0 or most == 0)


def test_neither_an_evaluation_nor_a_product_with_a_loss_shares_k() -> None:
    """An evaluation's bits must not depend on how many rows there are, and a loss needs whole sums in registers."""
    work = of(77)
    evaluation = dense_path(3072, 512, dataclasses.replace(work, is_training=False)).forward
    assert isinstance(evaluation, Gemm) and isinstance(evaluation.tile, Sm90Tile)
    plan = make_plan([Dense(512, 3072, "relu"), Dense(3072, 88)], loss=Huber(1.0), capacity=77, precision="bfloat16")
    (with_loss,) = [name for name in names(lowered(plan, arch="sm_90a").shards[0]) if "loss" in name]
    assert with_loss.startswith("tensor_forward_loss_huber_") and "_by_" not in with_loss
    for ends_with_loss, kind in ((True, Sm90Tile), (False, ClusterSplitTile)):
        forward = dense_path(3072, 88, work, ends_with_loss=ends_with_loss).forward
        assert isinstance(forward, Gemm) and isinstance(forward.tile, kind)


def test_operands_that_need_passes_are_worth_it_for_more_rows_alone() -> None:
    """A pass takes longer than multiply-adds of few rows by warps that share k."""
    few, more = (dense_path(1024, 1024, of(rows, operand_format=HALF_PAIR)) for rows in (64, 255))
    assert isinstance(few.forward, WarpSplit) and isinstance(few.dx, WarpSplit) and on_tensor_cores(more)


@pytest.mark.usefixtures("without_whole_batches")
def test_warps_share_k_for_few_rows_or_few_columns() -> None:
    plain = of(64, operand_format=None)
    for k, n, rows, is_split in (
        (784, 1024, 1, True), (784, 1024, 64, True), (784, 1024, 128, True), (784, 1024, 1024, False),
        (784, 1024, 8192, False), (904, 59, 2048, True), (59, 904, 2048, False),
    ):  # fmt: skip
        path = dense_path(k, n, dataclasses.replace(plain, rows=rows))
        assert isinstance(path.forward, WarpSplit if is_split else Simt)


def test_a_product_of_many_rows_and_few_columns_has_the_tile_of_the_fewest_clocks() -> None:
    """Not the smallest one because all others are padded by more than an eighth."""
    assert simt_tile(8192, 159, 132)[0].name == "32x32"
    tile, why = product_tile(8192, 159, 256, 132)
    assert tile.name == "128x96" and "counted clocks" in why
    of_step, of_evaluation = of(8192, operand_format=None), of(8192, is_training=False, in_place=False)
    for work in (of_step, of_evaluation):
        forward = dense_path(256, 159, work).forward
        assert isinstance(forward, Simt) and forward.tile == tile


@given(st.integers(1, 9000), st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([1, 20, 132]))
def test_the_chosen_tile_of_products_is_counted_least(m: int, n: int, k: int, multiprocessors: int) -> None:
    usual, tile = simt_tile(m, n, multiprocessors)[0], product_tile(m, n, k, multiprocessors)[0]
    clocks = {each: simt_clocks(each, m, n, k, multiprocessors) for each in kernels.TILES}
    assert tile == usual or clocks[tile] == min(clocks.values()) < clocks[usual]
    assert tile != usual or not is_faster(min(clocks.values()), clocks[usual])
    with patch.object(thresholds, "TILES_ARE_COUNTED", False):
        assert product_tile(m, n, k, multiprocessors)[0] == usual


@given(
    st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([1, 16, 64, 255, 256, 5000]),
    st.sampled_from([None, *itertools.chain(*OF_PRECISION.values())]), st.sampled_from(["sm_75", "sm_80", "sm_90a"]),
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
    usual = product_tile(m, n, k, multiprocessors)[0]
    tile, why = small_batch_tile(m, n, k, multiprocessors)
    counted = [simt_clocks(each, m, n, k, multiprocessors) for each in (tile, usual, *WARP_SPLIT_TILES)]
    assert counted[0] <= counted[1] and f"{counted[0]:,}" in why
    assert tile in (usual, *WARP_SPLIT_TILES)
    tenths = thresholds.COUNTED_TENTHS if m <= thresholds.WARP_SPLIT_MOST_ROWS else thresholds.MANY_ROWS_TENTHS
    assert (tile != usual) == (tenths * min(counted[2:]) < 10 * counted[1])
    for operand_format in OPERAND_FORMATS:
        every = (kernels.sm90_tiles, kernels.wide_tiles, kernels.medium_tiles, kernels.shared_tiles, narrow_tiles)
        tiles = [tile for tiles_of in every for tile in tiles_of(operand_format)]
        for has_floats in (False, True):
            chosen, _ = gemm_tile(operand_format, m, n, k, multiprocessors, "sm_90a", has_floats=has_floats)
            clocks = [product_clocks(each, m, n, k, multiprocessors, has_floats=has_floats) for each in tiles]
            assert clocks[tiles.index(chosen)] == min(clocks)


@pytest.mark.parametrize(
    ("k", "n", "rows", "parts", "part"),
    [(12, 256, 8192, 8, 1024), (512, 5, 2048, 8, 256), (128, 10, 16_384, 32, 512), (256, 256, 700, 1, 0),
     (512, 5, 1024, 1, 0)],
)  # fmt: skip
def test_rows_of_an_update_of_few_tiles_are_split_over_blocks(k: int, n: int, rows: int, parts: int, part: int) -> None:
    """As many as the card has room for at once, if they take less by more than a fifth."""
    update = dense_path(k, n, of(rows, operand_format=None)).update
    assert isinstance(update, UpdateByParts) == (parts > 1)
    if isinstance(update, UpdateByParts):
        assert (update.parts, update.part) == (parts, part) and part * parts >= rows > part * (parts - 1)
        assert parts * math.prod(update.tile.grid(k, n)) <= 132
    for changed in ({"in_place": False}, {"reduction": "atomic"}):
        assert not isinstance(dense_path(k, n, of(rows, operand_format=None, **changed)).update, UpdateByParts)
    with patch.object(thresholds, "UPDATES_HAVE_PARTS", False):
        assert not isinstance(dense_path(k, n, of(rows, operand_format=None)).update, UpdateByParts)


@pytest.mark.parametrize("by_order", [True, False])
def test_an_epoch_whose_updates_have_parts(by_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full batch, whose last part has fewer rows, and one so short that parts have none."""
    for name, value in {"ROW_STEP_IS_USED": False, "ADDED_PARTS_CLOCKS": 0, "UPDATES_ARE_GROUPED": False}.items():
        monkeypatch.setattr(thresholds, name, value)
    for name, rows in {"BATCH_SIZE": 700, "LAST_BATCH": 20}.items():
        monkeypatch.setattr(epochs, name, rows)
    layers: list[Layer] = [Dense(9, 40, "gelu"), Dense(40, 36, "relu", bias=False), Dense(36, 3)]
    epoch = Epoch(layers, {}, rates=(0.1, 0.02), precision="float32-ieee", as_bytes=not by_order)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_75", multiprocessors=132)
    names = [launch.entry.name for shard in host.low.shards for launch in shard]
    assert sum(name.startswith("dense_backward_update_by_parts") for name in names) == 3
    check_exact(epoch, host)


def test_weights_of_at_most_eight_columns_have_strips_where_counts_are_less() -> None:
    """By more than half a launch, for an update in place by many rows."""
    many = of(8192, operand_format=None)
    path = dense_path(768, 1, many).update
    assert isinstance(path, Strips) and (path.tile, path.parts, path.part) == (kernels.STRIPS[0], 26, 320)
    assert isinstance(dense_path(768, 7, many).update, Strips)
    others = (768, 9, many), (48, 3, many), (768, 1, of(256, operand_format=None)), (768, 1, of(8192, in_place=False))
    assert not any(isinstance(dense_path(*other).update, Strips) for other in others)
    with patch.object(thresholds, "STRIPS_ARE_USED", False):
        assert isinstance(dense_path(768, 1, many).update, UpdateByParts)


@pytest.mark.parametrize("by_order", [True, False])
def test_an_epoch_whose_last_layer_has_a_head_by_rows_and_strips(
    by_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full batch, whose last block and part have fewer rows, and one so short that some have none."""
    for name, value in {"ROW_STEP_IS_USED": False, "ADDED_PARTS_CLOCKS": 0, "LAUNCH_CLOCKS": 0}.items():
        monkeypatch.setattr(thresholds, name, value)
    for name, rows in {"BATCH_SIZE": 700, "LAST_BATCH": 20}.items():
        monkeypatch.setattr(epochs, name, rows)
    layers: list[Layer] = [Dense(9, 300, "gelu"), Dropout(0.2), Dense(300, 3)]
    epoch = Epoch(layers, {}, rates=(0.1, 0.02), precision="float32-ieee", as_bytes=not by_order)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_75", multiprocessors=8)
    names = [launch.entry.name for shard in host.low.shards for launch in shard]
    assert sum("_rows" in name and name.startswith("head") for name in names) == 1
    assert sum(name.endswith("_strip_128x4") for name in names) == 1
    check_exact(epoch, host)


def test_few_inputs_are_multiplied_from_registers_and_moved_by_strips_of_rows() -> None:
    """Where tiles of few terms fill the card, in steps alone."""
    many = of(8192, operand_format=None)
    path = dense_path(6, 768, many)
    assert isinstance(path.forward, Short) and path.forward.tile == kernels.SHORT_TILES[0]
    assert isinstance(path.update, Strips) and path.update.tile == kernels.strip(6, 768) == kernels.STRIPS[-2]
    assert "k = 6 ≤ 8" in path.forward.why and "k = 6 ≤ 8" in path.update.why
    of_more = dense_path(16, 768, many).forward
    assert isinstance(of_more, Short) and of_more.tile == kernels.SHORT_TILES[1]
    others = (
        (17, 768, many),
        (6, 768, of(512, operand_format=None)),
        (6, 768, dataclasses.replace(many, is_training=False)),
    )
    for other in others:
        assert not isinstance(dense_path(*other).forward, Short)
    with patch.object(thresholds, "SHORT_TILES_ARE_USED", False):
        assert not isinstance(dense_path(6, 768, many).forward, Short)


@pytest.mark.parametrize("by_order", [True, False])
@pytest.mark.parametrize("inputs", [3, 13])
def test_an_epoch_whose_first_layer_has_few_inputs(
    inputs: int, by_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full batch, whose last block and part have fewer rows, and one so short that some have none."""
    for name, value in {"ROW_STEP_IS_USED": False, "ADDED_PARTS_CLOCKS": 0, "LAUNCH_CLOCKS": 0}.items():
        monkeypatch.setattr(thresholds, name, value)
    for name, rows in {"BATCH_SIZE": 700, "LAST_BATCH": 20}.items():
        monkeypatch.setattr(epochs, name, rows)
    layers: list[Layer] = [Dense(inputs, 300, "gelu"), Dropout(0.2), Dense(300, 40)]
    epoch = Epoch(layers, {}, rates=(0.1, 0.02), precision="float32-ieee", as_bytes=not by_order)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_75", multiprocessors=8)
    names = [launch.entry.name for shard in host.low.shards for launch in shard]
    assert sum("_short_" in name for name in names) == 1
    assert sum(name.endswith(f"_strip_{4 if inputs == 3 else 16}x128") for name in names) == 1
    check_exact(epoch, host)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_an_epoch_whose_first_layer_is_moved_as_a_flat_array(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full batch and one of a row, by rows of W that are no vectors."""
    for name, value in {"WHOLE_BATCH_LEAST_WEIGHTS": 1, "ROW_STEP_IS_USED": False}.items():
        monkeypatch.setattr(thresholds, name, value)
    for name, value in {"BATCH_SIZE": rows, "LAST_BATCH": 1}.items():
        monkeypatch.setattr(epochs, name, value)
    layers: list[Layer] = [Dense(37, 41, "gelu"), Dense(41, 36, "tanh", bias=False), Dense(36, 40)]
    options = {"optimizer": OPTIMIZERS["Adam"](0.1)}
    epoch = Epoch(layers, options, rates=(0.1, 0.02), precision="float32-ieee")
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a", multiprocessors=8)
    names = [launch.entry.name for shard in host.low.shards for launch in shard]
    assert f"dense_update_outer_products_Adam_{rows}" in names
    check_exact(epoch, host)


# --- all layers of a step counted together ---


def products_of(layers: list[Layer], rows: int, precision: str = "bfloat16", **options: Any) -> list[str]:
    """Of each layer the forward product's kind."""
    plan = make_plan(layers, capacity=rows, precision=precision, **options)
    selection = select(plan, STEP.setting, is_training=True)
    paths = [each.path for each in selection.operations if isinstance(each.operation, ops.Dense)]
    return [type(path.forward).__name__ for path in paths if isinstance(path, DensePath)]


MANY_ROWS = [Dense(12, 256, "silu"), Dense(256, 256, "silu"), Dense(256, 159)]


def test_layers_of_few_weights_are_on_tensor_cores_at_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 columns, and of 40,704 weights."""
    assert products_of(MANY_ROWS, 8192, loss="squared_error")[1:] == ["Gemm"] * 2
    monkeypatch.setattr(thresholds, "UPDATES_HAVE_PARTS", False)  # by which plain cores move 12 by 256 as fast
    assert products_of(MANY_ROWS, 8192, loss="squared_error") == ["Gemm"] * 3
    assert products_of(MANY_ROWS, 15, loss="squared_error").count("Gemm") == 0
    monkeypatch.setattr(thresholds, "LAYERS_ARE_COUNTED_TOGETHER", False)
    assert products_of(MANY_ROWS, 8192, loss="squared_error")[0] != "Gemm"
    assert products_of(MANY_ROWS, 8192, loss="squared_error")[2] != "Gemm"


def test_what_few_rows_or_weights_gain_is_not_worth_the_passes() -> None:
    """A layer between others on plain cores needs two passes; scaled operands need some of every layer."""
    small = [Dense(20, 24, "relu"), Dense(24, 300, "relu"), Dense(300, 40)]
    assert products_of(small, 64).count("Gemm") == 0
    with patch.object(thresholds, "UNSCALED_STEP_HUNDREDTHS", 1 << 30):
        assert products_of(MANY_ROWS, 512, "float32", loss="squared_error").count("Gemm") == 0


def test_steps_in_float32_have_operands_without_scales_where_that_is_counted_less() -> None:
    """Products of six components in place of three, and no passes; what an evaluation computes follows no batch."""
    layers = [Dense(784, 512, "relu"), Dense(512, 512, "relu"), Dense(512, 10)]
    large = [Dense(784, 4096, "relu"), Dense(4096, 4096, "relu"), Dense(4096, 10)]
    clipped = OPTIMIZERS["Momentum"](0.1, clip_norm=1.0)
    for found, expected, options in (
        (layers, BFLOAT16_TRIPLE, {}),
        (layers, BFLOAT16, {"precision": "bfloat16"}),
        (layers, BFLOAT16_PAIR, {"precision": "tf32"}),
        (layers, HALF_PAIR, {"shards": 2}),
        (layers, BFLOAT16_TRIPLE, {"optimizer": clipped}),
        (layers, HALF_PAIR, {"optimizer": clipped, "capacity": 64}),  # on plain cores, which are counted less
        (layers, HALF_PAIR, {"capacity": 15}),
        (large, HALF_PAIR, {"capacity": 8192}),
    ):
        plan = make_plan(found, loss="softmax_cross_entropy", **{"capacity": 256, "precision": "float32", **options})
        step, evaluation = (select(plan, STEP.setting, is_training=is_training) for is_training in (True, False))
        assert step.work.operand_format == expected
        assert ("counted at" in step.operand_format.why) == (expected == BFLOAT16_TRIPLE)
        is_triple = expected == BFLOAT16_TRIPLE
        assert evaluation.work.operand_format == (HALF_PAIR if is_triple else expected)
    before = dataclasses.replace(STEP.setting, arch="sm_80")
    plan = make_plan(layers, loss="softmax_cross_entropy", capacity=256, precision="float32")
    assert select(plan, before, is_training=True).work.operand_format == HALF_PAIR


def test_steps_in_tf32_have_operands_without_scales_where_rows_of_weights_are_not_aligned() -> None:
    """Passes of scales are slow there; elsewhere components of weights take as much of the memory's time."""
    for widths, rows, expected in (
        ((121, 5895, 979, 87), 128, BFLOAT16_PAIR),
        ((120, 5896, 980, 88), 128, HALF),
        ((13, 2922, 2335, 2), 6921, HALF),  # products are most of the time
    ):
        layers = [Dense(k, n, "relu") for k, n in pairwise(widths)]
        plan = make_plan(layers, loss="squared_error", capacity=rows, precision="tf32")
        step, evaluation = (select(plan, STEP.setting, is_training=is_training) for is_training in (True, False))
        assert (step.work.operand_format, evaluation.work.operand_format) == (expected, HALF)


@pytest.mark.usefixtures("everywhere")
def test_an_evaluation_between_steps_changes_no_bit() -> None:
    """Its operands, of another format, lie in the same arrays; a run makes its own of the weights anew."""
    found = []
    for evaluates in (False, True):
        epoch, host, made = on_host("from product to product", BFLOAT16_TRIPLE)
        assert all("triple" in name for name in made)
        host.load(epoch.state)
        for _ in range(2):
            host.run(epoch.rates)
            if evaluates:
                host.evaluate()
        found.append(host.parameters.copy())
    np.testing.assert_array_equal(*found)


def test_layers_behind_one_that_is_cut_are_counted() -> None:
    """Its clocks are the same either way."""
    layers = [Dense(20_000, 90, "relu"), Dense(90, 200, "relu"), Dense(200, 200, "relu"), Dense(200, 100)]
    assert products_of(layers, 120) == ["SplitK", "Gemm", "Gemm", "Gemm"]


@pytest.mark.usefixtures("without_whole_batches")
@given(st.lists(st.integers(1, 600), min_size=2, max_size=6), st.sampled_from([16, 100, 1000, 9000]),
       st.sampled_from(OPERAND_FORMATS), st.booleans())  # fmt: skip
def test_the_chosen_layers_are_counted_least(
    widths: list[int], rows: int, operand_format: OperandFormat, has_head: bool
) -> None:
    """Of all subsets, by an own count of their products, passes and launches."""
    work = of(rows, operand_format=operand_format)
    last = len(widths) - 2
    layers = [
        CountedLayer(k, n, makes_dx=place > 0, follows=place > 0, has_head=has_head and place == last)
        for place, (k, n) in enumerate(pairwise(widths))
    ]

    def counted(on: tuple[bool, ...]) -> int:
        total = passes = 0
        for place, (layer, is_on) in enumerate(zip(layers, on, strict=True)):
            tensor, plain = dense._tensor_clocks(layer, work), dense._plain_clocks(layer, work)
            total += thresholds.LAYERS_TENTHS * tensor if is_on else 10 * plain
            if operand_format.scaled:
                continue
            if place == 0:
                passes += staged_pass_clocks(operand_format, rows * layer.k) if is_on else 0
            elif on[place - 1] != is_on and not (on[place - 1] and layer.has_head):
                passes += pass_clocks(operand_format, rows * layer.k)
        biases = thresholds.LAUNCH_CLOCKS if any(on) and not operand_format.scaled else 0
        return total + thresholds.LAYERS_TENTHS * (passes + biases)

    step = count_step(layers, work)
    assert step is not None
    forced = [is_wide(layer.k, layer.n) and rows >= thresholds.GEMM_LEAST_ROWS for layer in layers]
    ways = [on for on in product((False, True), repeat=len(layers)) if all(on[i] for i, f in enumerate(forced) if f)]
    least = min(counted(on) for on in ways)
    launches = sum(2 + layer.makes_dx for layer in layers) + 1
    assert step.clocks == least // 10 + launches * thresholds.LAUNCH_CLOCKS


def test_a_step_by_blocks_of_rows_is_left_where_tensor_cores_are_counted_to_take_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """50-128-128-128-1: all layers on tensor cores, for many rows."""
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_IS_USED", False)
    layers = [Dense(50, 128, "relu"), Dense(128, 128, "relu"), Dense(128, 128, "relu"), Dense(128, 1)]
    found = {
        (rows, precision): bool(
            select(make_plan(layers, capacity=rows, precision=precision), STEP.setting, is_training=True).row_step
        )
        for rows in (1024, 8192)
        for precision in ("float32", "bfloat16")
    }
    assert found == {
        (1024, "float32"): True, (1024, "bfloat16"): True, (8192, "float32"): False, (8192, "bfloat16"): False,
    }  # fmt: skip


def test_biases_of_few_row_tiles_are_summed_by_a_launch_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of two would add 32 rows of every slice while the product waits."""
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    monkeypatch.setattr(thresholds, "CLUSTERS_SHARE_ROWS", False)
    many, few = (dense_path(k, 768, of(14_798)).update for k in (1193, 128))
    assert isinstance(many, Gemm) and many.leaves_bias and isinstance(few, Gemm) and not few.leaves_bias
    assert "another launch sums the bias's gradient" in few.why
    layers = [Dense(768, 128, "relu"), Dense(128, 768, "relu"), Dense(768, 668)]
    low = lowered(make_plan(layers, capacity=14_798, precision="bfloat16"), 132, "float32", "sm_90a")
    names = [launch.entry.name for shard in low.shards for launch in shard]
    assert "sum_deltas_bfloat16" in names
    with patch.object(thresholds, "COLUMNS_MAY_BE_SUMMED_APART", False):
        low = lowered(make_plan(layers, capacity=14_798, precision="bfloat16"), 132, "float32", "sm_90a")
    assert not any("sum_deltas" in launch.entry.name for shard in low.shards for launch in shard)


@pytest.mark.parametrize(
    ("k", "n", "rows", "operand_format", "split"),
    [
        (256, 256, 8192, BFLOAT16, 8), (256, 256, 1024, BFLOAT16, 4), (300, 300, 4096, BFLOAT16_PAIR, 4),
        (128, 768, 16_384, BFLOAT16, 8), (512, 512, 256, BFLOAT16, 0),
        (1024, 1024, 1024, BFLOAT16, 0), (4096, 4096, 64, BFLOAT16, 1), (1500, 1500, 128, HALF_PAIR, 1),
        (4096, 4096, 16_384, BFLOAT16, 0),
    ],
)  # fmt: skip
def test_clusters_share_the_rows_of_a_gradient(
    k: int, n: int, rows: int, operand_format: OperandFormat, split: int
) -> None:
    """Of few tiles, by as many blocks as are counted to take the least; of weights that memory bounds, by one each."""
    shapes = frozenset({(k, n)})
    work = of(rows, operand_format=operand_format, tensor_shapes=shapes)
    update = dense_path(k, n, work).update
    assert isinstance(update, Gemm) and getattr(update.tile, "split", 0) == split
    assert str(update).startswith("cluster split" if split else "gemm_sm90")
    assert getattr(update.tile, "side", 64) == 64
    if split > 1:
        counted = cluster_clocks(kernels.ClusterSplitTile(operand_format, split), k, n, rows, 132)
        assert f"{counted:,} by clusters of {split}" in update.why
    stored = dense_path(k, n, of(rows, operand_format=operand_format, tensor_shapes=shapes, in_place=False)).update
    assert isinstance(stored, Gemm) and getattr(stored.tile, "split", 0) == (split if split > 1 else 0)
    with patch.object(thresholds, "CLUSTERS_SHARE_ROWS", False):
        before = dense_path(k, n, work).update
    assert isinstance(before, Gemm) and isinstance(before.tile, kernels.Sm90Tile)
    assert isinstance(weight_tile(operand_format, k, n, rows, 108, "sm_80", in_place=True).tile, kernels.Sm80Tile)


@pytest.mark.parametrize(
    ("k", "n", "rows", "sums_columns"), [(44, 92, 16_384, False), (92, 506, 16_384, True), (256, 256, 8192, True)]
)
def test_clusters_leave_a_bias_to_another_launch_where_few_tiles_share_its_rows(
    k: int, n: int, rows: int, sums_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their warps would sum 22 rows of each slice for one tile of 64 rows."""
    of = weight_tile(BFLOAT16, k, n, rows, 132, "sm_90a", in_place=True)
    assert isinstance(of.tile, kernels.ClusterSplitTile) and of.sums_columns == sums_columns
    monkeypatch.setattr(thresholds, "COLUMNS_MAY_BE_SUMMED_APART", False)
    assert weight_tile(BFLOAT16, k, n, rows, 132, "sm_90a", in_place=True).sums_columns


@pytest.mark.parametrize(
    ("k", "n", "rows", "operand_format", "is_whole"),
    [
        (5919, 380, 2048, BFLOAT16_PAIR, True), (5919, 380, 65, BFLOAT16_PAIR, True),
        (4631, 128, 1024, BFLOAT16_PAIR, True), (5919, 380, 2048, HALF_PAIR, True), (5919, 128, 8192, BFLOAT16, True),
        (90_000, 90, 128, BFLOAT16, False), (5919, 380, 2048, None, False),
    ],
)  # fmt: skip
def test_many_rows_of_a_layer_of_large_k_are_not_split_along_it(
    k: int, n: int, rows: int, operand_format: OperandFormat | None, is_whole: bool
) -> None:
    """In a step of rows that fill a third of a card, or a half with scales; evaluations are as ever."""
    work = of(rows, operand_format=operand_format)
    assert isinstance(dense_path(k, n, work).forward, Gemm) == is_whole
    found = count_step([CountedLayer(64, k), CountedLayer(k, n)], work)
    assert (found is not None and (k, n) in found.shapes) == is_whole
    other = dataclasses.replace(work, setting=dataclasses.replace(work.setting, arch="sm_80"))
    evaluated = of(rows, operand_format=operand_format, is_training=False, in_place=False)
    assert not any(isinstance(dense_path(k, n, each).forward, Gemm) for each in (other, evaluated))


LONG = [Dense(64, 4096, "relu"), Dense(4096, 4096, "relu")]  # before a last layer of large k


@pytest.mark.parametrize(
    ("n", "rows", "precision", "is_on"),
    [
        (10, 4096, "bfloat16", True), (1, 8192, "bfloat16", True), (48, 1024, "bfloat16", True),
        (49, 1024, "bfloat16", True), (197, 128, "bfloat16", True), (413, 64, "float32", True),
        (309, 128, "tf32", True), (10, 49, "bfloat16", False), (10, 8192, "tf32", False),
        (10, 8192, "float32", False), (10, 8192, "float32-ieee", False),
    ],
)  # fmt: skip
def test_a_last_layer_of_few_columns_and_large_k_goes_where_counts_are_less(
    n: int, rows: int, precision: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps alone; of the fewest columns of single 16-bit numbers."""
    layers = [*LONG, Dense(4096, n)]
    assert (products_of(layers, rows, precision)[-1] == "Gemm") == is_on
    plan = make_plan(layers, capacity=rows, precision=precision)
    evaluated = [each.path for each in select(plan, STEP.setting, is_training=False).operations]
    assert isinstance([path for path in evaluated if isinstance(path, DensePath)][-1].forward, SplitK)
    stepped = select(plan, STEP.setting, is_training=True).operations
    path = [each.path for each in stepped if isinstance(each.operation, ops.Dense)][-1]
    is_counted = precision == "bfloat16" or (n >= thresholds.SPLIT_OPERANDS_LEAST_N and precision != "float32-ieee")
    assert isinstance(path, DensePath) and ("those of all layers together" in path.products["dx"].why) == is_counted
    monkeypatch.setattr(thresholds, "CUT_LAYERS_ARE_COUNTED", False)
    assert products_of(layers, rows, precision)[-1] == "SplitK"


@pytest.mark.parametrize("rows", [64, 300, 1024])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_dropout_between_layers_leaves_operands(rows: int, precision: str, activation: str) -> None:
    """So layers go on tensor cores where they do without it; a product that ends with one leaves them itself."""
    layers: list[Layer] = [Dense(30, 2048, activation), Dense(2048, 408, activation), Dense(408, 60)]
    dropped: list[Layer] = [layers[0], Dropout(0.1), layers[1], Dropout(0.1), layers[2]]
    assert products_of(dropped, rows, precision) == products_of(layers, rows, precision) == ["Gemm"] * 3
    low = lowered(make_plan(dropped, capacity=rows, precision=precision), 132, "float32", "sm_90a")
    made = [launch.entry.name for shard in low.shards for launch in (*shard, *low.begin)]
    assert sum(name.startswith("tensor_forward_dropped") for name in made) == 2
    assert not any(name.startswith(("dropout", "split_rows")) for name in made)


def test_a_layer_of_large_k_whose_operands_nobody_leaves_is_on_plain_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over rows of 9,000 numbers takes longer than multiplying few of them by a few columns."""
    monkeypatch.setattr(thresholds, "INPUT_LAYER_IS_APART", False)
    layers: list[Layer] = [Dense(9000, 4, "relu"), Dense(4, 40, "relu"), Dense(40, 90)]
    assert [products_of(layers, rows)[0] for rows in (64, 2048)] == ["SplitK", "Gemm"]


@pytest.mark.parametrize(
    ("k", "n", "rows", "has_head"),
    [
        (6144, 4, 49, True), (4096, 10, 8192, True), (4096, 8, 32, True), (4096, 10, 1, True), (8192, 10, 1024, True),
        (8192, 32, 40, False), (90_000, 10, 64, False), (4096, 33, 64, False),
    ],
)  # fmt: skip
def test_a_layer_of_large_k_has_a_head_where_that_is_counted_to_take_less(
    k: int, n: int, rows: int, has_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = losses.head(k, n, "identity", of(rows, operand_format=None))
    assert bool(found) == has_head and ("counted clocks" in found.why) == (n <= kernels.HEAD_MOST_N)
    low = lowered(make_plan([Dense(8, k, "relu"), Dense(k, n)], capacity=rows, precision="float32-ieee"), 132)
    made = [launch.entry.name for launch in low.shards[0]]
    assert any(name.startswith("head_") for name in made) == has_head
    assert any("split_k" in name or "few_rows" in name or "sum_partials" in name for name in made) != has_head
    monkeypatch.setattr(thresholds, "CUT_LAYERS_HAVE_HEADS", False)
    assert not losses.head(k, n, "identity", of(rows, operand_format=None))


@pytest.mark.parametrize(
    ("k", "rows", "kind"),
    [(1024, 4096, SmallN), (4096, 4096, WarpSplit), (4096, 31, Simt), (1000, 512, SmallN), (1000, 31, Simt)],
)
def test_gradients_of_few_columns_that_are_stored_are_counted(
    k: int, rows: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = of(rows, operand_format=None, in_place=False)
    assert type(dense_path(k, 10, work).update) is kind
    moved = dense_path(k, 10, dataclasses.replace(work, in_place=True)).update
    assert kind is not WarpSplit or isinstance(moved, WarpSplit)
    monkeypatch.setattr(thresholds, "FEW_COLUMNS_TILE_TENTHS", 1 << 30)
    assert not isinstance(dense_path(k, 10, work).update, WarpSplit)
    monkeypatch.setattr(thresholds, "SMALL_N_GRADIENTS_ARE_USED", False)
    assert isinstance(dense_path(k, 10, work).update, Simt)


@pytest.mark.parametrize("multiprocessors", [1, 20, 132])
@pytest.mark.parametrize(
    ("widths", "rows", "precision"),
    [((6766, 355, 9), 136, "bfloat16"), ((7924, 432, 10), 23, "tf32"), ((4329, 76, 24), 27, "tf32"),
     ((4096, 512, 20), 256, "float32")],
)  # fmt: skip
def test_a_first_layer_whose_rows_fill_the_card_has_no_tail(
    widths: tuple[int, int, int], rows: int, precision: str, multiprocessors: int
) -> None:
    """It leaves no parts of its product, which a tail would add up."""
    first, between, outputs = widths
    plan = make_plan([Dense(first, between, "gelu"), Dense(between, outputs)], capacity=rows, precision=precision)
    low = lowered(plan, multiprocessors, arch="sm_90a")
    names = [launch.entry.name for shard in low.shards for launch in shard]
    is_split = any(name.startswith(("dense_forward_split_k", "dense_forward_few")) for name in names)
    assert is_split or not any(name.startswith("tail") for name in names)


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
        if operand_format is not None:  # numbers keep the bits that their precision has
            bits = {"bfloat16": 1, "tf32": 2, "float32": 3}[PRECISION_OF[operand_format]]
            of_more = of(20, operand_format=operand_format)
            assert dense.whole_batch_components(4000, 2000, of_more) == bits
    others: tuple[dict[str, Any], ...] = (
        {"is_training": False, "in_place": False},
        {"reduction": "atomic"},
        {"setting": dataclasses.replace(STEP.setting, arch="sm_75")},
    )
    for other in others:
        path = dense_path(*within[:2], dataclasses.replace(within[2], **other))
        assert not any(isinstance(each, WholeBatch) for each in path.products.values())


@pytest.mark.parametrize(("operand_format", "k", "n"), [(BFLOAT16, 2048, 2048), (HALF, 8192, 2560)], ids=str)
def test_tensor_cores_multiply_more_rows_by_very_large_weights(operand_format: OperandFormat, k: int, n: int) -> None:
    for rows, columns, is_kept in ((16, n, True), (17, n // 2, True), (17, n, False)):
        with patch.object(thresholds, "TENSOR_WHOLE_BATCH_IS_USED", False):
            path = dense_path(k, columns, of(rows, operand_format=operand_format))
        assert isinstance(path.forward, WholeBatch) == is_kept
    assert isinstance(dense_path(8192, 8192, of(32, operand_format=BFLOAT16_PAIR)).forward, WholeBatch)


@pytest.mark.parametrize(
    ("k", "n", "rows", "has_dx", "blocks", "warps"),
    [(4096, 3072, 8, True, (1024, 1), 4), (1061, 4096, 8, True, (266, 1), 4), (6144, 6144, 8, True, (1536, 1), 4),
     (512, 2048, 8, True, (128, 1), 4), (1536, 1536, 16, True, (192, 1), 2), (1536, 1536, 32, True, (192, 1), 2),
     (1536, 64, 8, True, (192, 1), 2), (768, 4096, 8, False, (48, 5), 1), (3073, 6161, 8, False, (769, 1), 4),
     (4096, 3072, 16, True, (256, 1), 1), (6144, 4096, 16, True, (768, 1), 2), (2048, 2048, 4, True, (256, 1), 2),
     (6144, 1536, 4, True, (768, 1), 2), (1536, 3072, 4, True, (384, 1), 4), (4096, 3072, 4, False, (256, 3), 1),
     (3073, 6161, 4, False, (769, 1), 4)],
)  # fmt: skip
def test_backward_passes_of_the_whole_batch_have_the_blocks_that_end_first(
    k: int, n: int, rows: int, has_dx: bool, blocks: tuple[int, int], warps: int
) -> None:
    assert kernels.whole_batch_backward_grid(k, n, rows, 132, has_dx=has_dx) == ((*blocks, 1), warps)


@pytest.mark.parametrize(
    ("k", "n", "rows", "split"),
    [
        (3072, 768, 4, 2),
        (1536, 335, 32, 4),
        (1536, 1536, 16, 1),
        (133, 256, 32, 1),
        (4000, 40, 8, 4),
        (2048, 17, 32, 8),
    ],
)
def test_blocks_share_k_where_columns_make_few(k: int, n: int, rows: int, split: int) -> None:
    path = dense_path(k, n, of(rows))
    assert isinstance(path.forward, WholeBatch) and path.forward.split == split
    assert str(path.forward).endswith(f"k by {split} blocks") == (split > 1)
    assert isinstance(path.dx, WholeBatch) and path.dx.split == 1
    assert isinstance(path.update, WholeBatch) and dataclasses.replace(path.update, flat=None) == path.dx
    older = dense_path(k, n, of(rows, setting=dataclasses.replace(STEP.setting, arch="sm_80"))).forward
    assert isinstance(older, WholeBatch) and older.split == 1


def test_a_forward_product_by_clusters_is_launched_as_such() -> None:
    low = lowered(make_plan([Dense(1024, 256, "relu"), Dense(256, 700)], capacity=8), 132, arch="sm_90a")
    made = [
        (launch.entry.name, launch.grid)
        for shard in low.shards
        for launch in shard
        if "forward_whole" in launch.entry.name
    ]
    assert made == [("dense_forward_whole_batch_8x16_by_2", (32, 1, 1)), ("dense_forward_whole_batch_8x16", (44, 1, 1))]


@pytest.mark.parametrize(("in_place", "is_frozen"), [(False, False), (True, True)])
def test_without_an_update_in_place_the_forward_product_alone_keeps_it(in_place: bool, is_frozen: bool) -> None:
    path = dense_path(784, 512, of(8, in_place=in_place), is_frozen=is_frozen)
    assert [isinstance(each, WholeBatch) for each in path.products.values()] == [True] + [False] * (2 - is_frozen)


@pytest.mark.parametrize(
    ("operand_format", "components", "most"),
    [(BFLOAT16, 1, 32), (BFLOAT16_PAIR, 2, 32), (HALF, 2, 64), (BFLOAT16_TRIPLE, 3, 32), (HALF_PAIR, 3, 64)],
)
def test_small_batches_and_a_large_weight_pass_over_it_on_tensor_cores(
    operand_format: OperandFormat, components: int, most: int
) -> None:
    """Of so many rows, of weights from a size on, which is larger for more rows than 32; of those where tiles would
    need scales."""

    def path(rows: int, k: int, n: int) -> DensePath:
        return dense_path(k, n, of(rows, operand_format=operand_format))

    def made(rows: int, k: int, n: int) -> list[int]:
        of_step = path(rows, k, n).products.values()
        return [each.components if isinstance(each, WholeBatch) else 0 for each in of_step]

    for rows, k, n, is_made in (
        (16, 2048, 2048, False), (17, 1024, 768, True), (17, 1023, 768, False), (32, 1024, 768, True),
        (33, 1024, 1024, False), (33, 2048, 768, most > 32), (64, 1024, 2048, most > 32), (65, 2048, 2048, False),
    ):  # fmt: skip
        assert made(rows, k, n) == [components * is_made] * 3, (rows, k, n)
    forward, dx = (path(most, 3072, 3072).products[name] for name in ("forward", "dx"))
    assert isinstance(forward, WholeBatch) and (forward.rows, forward.split) == (most, 4) and forward != dx
    assert str(dx) == f"whole batch of {most} rows, tensor cores by {components} components"


def test_without_tensor_cores_no_pass_is_made_on_them() -> None:
    assert all(
        isinstance(each, WholeBatch) and not each.components
        for each in dense_path(2048, 2048, of(32, operand_format=None)).products.values()
    )


@pytest.mark.parametrize(
    ("k", "n", "split", "grid"),
    [(3072, 3072, 4, (192, 4, 1)), (1024, 1024, 8, (64, 4, 1)), (1556, 1556, 8, (98, 2, 1)), (100, 1000, 1, (7, 8, 1))],
)
def test_blocks_share_a_weight_until_the_card_is_full(k: int, n: int, split: int, grid: tuple[int, int, int]) -> None:
    assert kernels.tensor_whole_batch_split(k, n, 132) == split
    assert kernels.tensor_whole_batch_backward_grid(k, n, 132) == grid


def test_fragments_pass_from_layer_to_layer() -> None:
    """A launch makes those of the inputs and of the loss's delta, kernels those of all layers between."""
    plan = make_plan(
        [Dense(1100, 1024, "relu"), Dropout(0.2), Dense(1024, 1024, "tanh"), Dense(1024, 900)], capacity=40
    )
    with (
        patch.object(thresholds, "TENSOR_WHOLE_BATCH_LEAST_WEIGHTS_OF_MORE", 1),
        patch.object(thresholds, "TENSOR_WHOLE_BATCH_MOST_ROWS", {False: 64, True: 64}),
        patch.object(thresholds, "WHOLE_BATCHES_ARE_COUNTED", False),
    ):
        low = lowered(plan, 132, arch="sm_90a")
    launches = [launch for shard in low.shards for launch in shard if "fragments" in launch.entry.name]
    launches += [launch for shard in low.shards for launch in shard if "tensor_whole_batch" in launch.entry.name]
    names = [launch.entry.name for launch in launches]
    assert [name.startswith("batch_fragments") for name in names] == [True] * 2 + [False] * 6
    forward, backward = launches[2:5], launches[5:]
    assert [launch.values["fragments"] is None for launch in launches] == [False] * 4 + [True] + [False] * 2 + [True]
    assert forward[1].values["x_fragments"] == forward[0].values["fragments"] == backward[1].values["x_fragments"]
    assert backward[1].values["dz_fragments"] == backward[0].values["fragments"]


FEW_ROWS: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "dx and update in one": ([Dense(9, 40, "gelu"), Dense(40, 36, "tanh", bias=False), Dense(36, 40)], {}),
    "dropout between": ([Dense(9, 40, "relu"), Dropout(0.5), Dense(40, 36)], {"optimizer": OPTIMIZERS["Adam"](0.1)}),
    "dropouts and derivatives": ([Dense(9, 40, "gelu"), Dropout(0.3), Dense(40, 36, "tanh"), Dense(36, 40)], {}),
    "a frozen layer": ([Dense(9, 40, "silu"), Dense(40, 36, "elu", trainable=False), Dense(36, 40)], {}),
    "a norm comes between": (
        [Dense(9, 40, "softplus"), Dense(40, 36)],
        {"optimizer": OPTIMIZERS["Adam"](0.1, clip_norm=0.1)},
    ),
    "shards": ([Dense(9, 40, "sigmoid"), Dense(40, 36)], {"shards": 3}),
    "a head": ([Dense(9, 40, "sigmoid"), Dense(40, 3)], {"loss": Huber(0.5)}),
}


def check_passes(case: str, host: HostProgram, kind: str) -> None:
    """All wide layers go forward by passes of this kind, and back where products move weights in place."""
    layers, options = FEW_ROWS[case]
    made = [launch.entry.name for shard in host.low.shards for launch in shard]
    wide = [layer for layer in layers if isinstance(layer, Dense) and layer.n_out > kernels.SMALL_N_COLUMNS]
    shards, is_stored = options.get("shards", 1), case in ("a norm comes between", "shards")
    assert sum(name.startswith(f"dense_forward_{kind}") for name in made) == shards * len(wide)
    moved = 0 if is_stored else sum(layer.trainable for layer in wide)
    assert sum(name.startswith(f"dense_backward_{kind}") for name in made) == moved


@pytest.mark.parametrize(("rows", "least"), [(1, 1024), (15, 1024), (16, 16_384), (32, 16_384)])
@pytest.mark.parametrize("shape", [(32, 33), (31, 33), (256, 48), (256, 64), (400, 41)])
def test_from_how_many_weights_on_blocks_keep_the_whole_batch(shape: tuple[int, int], rows: int, least: int) -> None:
    """A layer behind one that leaves the step launch by launch."""
    k, n = shape
    layers = [Dense(5000, 2048, "relu"), Dense(2048, k, "relu"), Dense(k, n, "relu"), Dense(n, 10)]
    shard = lowered(make_plan(layers, capacity=rows), arch="sm_90a").shards[0]
    of_layer = names([launch for launch in shard if (launch.values.get("k"), launch.values.get("n")) == shape])
    for products in ("dense_forward", "dense_backward"):
        assert any(name.startswith(f"{products}_whole_batch") for name in of_layer) == (k * n >= least), of_layer


@pytest.mark.parametrize("by_order", [True, False])
@pytest.mark.parametrize("case", FEW_ROWS)
def test_an_epoch_that_keeps_the_whole_batch(case: str, by_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WHOLE_BATCH_LEAST_WEIGHTS", "WHOLE_BATCH_LEAST_WEIGHTS_OF_MORE"):
        monkeypatch.setattr(thresholds, name, 1)
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    layers, options = FEW_ROWS[case]
    epoch = Epoch(layers, options, precision="float32-ieee", as_bytes=not by_order)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_80")
    check_passes(case, host, "whole_batch")
    check_exact(epoch, host)


@pytest.mark.parametrize(("case", "precision"), covering("epochs of passes", FEW_ROWS, ["bfloat16", "tf32", "float32"]))
def test_an_epoch_of_passes_on_tensor_cores(case: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_WEIGHTS", "LEAST_WEIGHTS_OF_MORE", "LEAST_ROWS"):
        monkeypatch.setattr(thresholds, f"TENSOR_WHOLE_BATCH_{name}", 1)
    for name, value in {"WHOLE_BATCH_LEAST_WEIGHTS": 1, "ROW_STEP_IS_USED": False}.items():
        monkeypatch.setattr(thresholds, name, value)
    layers, options = FEW_ROWS[case]
    epoch = Epoch(layers, options, precision=precision, as_bytes=case == "a head")
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a")
    check_passes(case, host, "tensor_whole_batch")
    if precision == "float32":
        check_exact(epoch, host)
    else:
        products = 3 * len(layers) * (3 if "optimizer" in options else 1)  # Adam moves by small gradients' roundings
        check_epoch(epoch, host, BFLOAT16 if precision == "bfloat16" else BFLOAT16_PAIR, products)


def test_a_layer_that_keeps_the_whole_batch_makes_dx_and_moves_in_one_launch() -> None:
    plan = make_plan([Dense(300, 200, "relu"), Dense(200, 150, "tanh"), Dense(150, 128)], capacity=15)
    launches = [launch for shard in lowered(plan, 132, arch="sm_90a").shards for launch in shard]
    backward = [launch for launch in launches if launch.entry.name == "dense_backward_whole_batch_Momentum_16"]
    numbers = [kernels.activation_number(name) for name in ("tanh", "relu", "identity")]
    assert len(backward) == 3 and [launch.values["activation"] for launch in backward] == numbers
    assert [launch.values["dx"] is None for launch in backward] == [False, False, True]
    assert not any(launch.entry.name.startswith(("dense_backward_input", "activation")) for launch in launches)


def test_a_dropout_is_part_of_the_launches_around_it() -> None:
    layers = [Dense(300, 200, "relu"), Dropout(0.4), Dense(200, 150), Dropout(0.2), Dense(150, 128)]
    low = lowered(make_plan(layers, capacity=15), 132, arch="sm_90a")
    launches = [launch for shard in low.shards for launch in shard]
    assert not any(launch.entry.name.startswith(("dropout", "activation")) for launch in launches)
    whole = [launch for launch in launches if "whole_batch" in launch.entry.name]
    assert [launch.values["keep"] for launch in whole] == [1 / 0.6, 1.25, 0.0, 1.25, 1 / 0.6, 0.0]


@pytest.mark.parametrize(
    ("k", "n", "rows", "operand_format", "keeps"),
    [(307, 1112, 20, BFLOAT16_TRIPLE, False), (279, 1082, 32, BFLOAT16, False), (512, 512, 16, BFLOAT16_TRIPLE, True),
     (1888, 1024, 16, BFLOAT16_PAIR, True), (512, 512, 15, BFLOAT16, True), (4096, 4096, 32, HALF, True),
     (1536, 335, 32, BFLOAT16_PAIR, False), (3072, 3072, 19, BFLOAT16_TRIPLE, True)],
)  # fmt: skip
def test_few_rows_keep_the_whole_batch_where_tiles_are_counted_to_take_longer(
    k: int, n: int, rows: int, operand_format: OperandFormat, keeps: bool
) -> None:
    work = of(rows, operand_format=operand_format, tensor_shapes=None)
    layers = [CountedLayer(64, k, makes_dx=False), CountedLayer(k, n, follows=True), CountedLayer(n, 64, follows=True)]
    step = count_step(layers, work)
    shapes = step.shapes if step is not None else frozenset()
    assert ((k, n) in shapes) != keeps
    path = dense_path(k, n, dataclasses.replace(work, tensor_shapes=shapes))
    assert isinstance(path.forward, WholeBatch) == keeps == isinstance(path.update, WholeBatch)
    with patch.object(thresholds, "WHOLE_BATCHES_ARE_COUNTED", False):
        step = count_step(layers, work)
        assert step is None or (k, n) not in step.shapes


def test_weights_whose_dx_nobody_reads_are_moved_as_flat_arrays() -> None:
    """By at most two rows, and by four where rows of W are no vectors."""
    for (k, n, rows), flat in {(300, 400, 1): 1, (300, 400, 2): 2, (300, 401, 3): 4, (300, 400, 4): None,
                               (300, 401, 5): None}.items():  # fmt: skip
        update = dense_path(k, n, of(rows)).update
        assert isinstance(update, WholeBatch) and update.flat == flat
    low = lowered(make_plan([Dense(300, 401, "relu"), Dense(401, 128)], capacity=2), 132, arch="sm_90a")
    names = [launch.entry.name for shard in low.shards for launch in shard]
    assert "dense_update_outer_products_Momentum_2" in names and "dense_backward_whole_batch_Momentum_4" in names
    with patch.object(thresholds, "OUTER_PRODUCTS_ARE_USED", False):
        assert dense_path(300, 401, of(2)).update == dense_path(300, 401, of(2)).dx


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


SOURCES = st.sampled_from(["float32", "uint8"])


@pytest.mark.usefixtures("everywhere")
@given(plans(), SOURCES, st.sampled_from([1, 132]), ARCHITECTURES)
def test_launches_fit_the_table_and_the_arrays(plan: Plan, source: str, multiprocessors: int, arch: str) -> None:
    check_launches(lowered(plan, multiprocessors, source, arch))


@pytest.mark.usefixtures("cut")
@given(plans(), SOURCES, st.sampled_from([1, 132]), ARCHITECTURES, st.booleans())
def test_launches_fit_where_most_layers_are_split_along_k(
    plan: Plan, source: str, multiprocessors: int, arch: str, everywhere: bool
) -> None:
    with patch.dict(vars(thresholds), EVERYWHERE if everywhere else {}):
        check_launches(lowered(plan, multiprocessors, source, arch))


def check_launches(low: Lowered) -> None:
    """Each entry is of the table, each launch fits a card, and each address lies in its array."""
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
CLIPPED = "clipped"
KEPT = {
    **STEPS,
    CLIPPED: (STEPS["a loss at the end"][0], {"loss": Huber(0.5), "optimizer": Momentum(0.1, clip_norm=0.2)}),
}


def on_host(case: str, operand_format: OperandFormat) -> tuple[Epoch, HostProgram, list[str]]:
    """An epoch of a step in the precision of a format, on sm_90a on the host; the names of kernels that multiply."""
    epoch = Epoch(*KEPT[case], rates=(0.1, 0.02), precision=PRECISION_OF[operand_format])
    with patch.object(thresholds, "UNSCALED_STEP_HUNDREDTHS", 0 if operand_format == BFLOAT16_TRIPLE else 1 << 30):
        host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a", multiprocessors=132)
    return epoch, host, [launch.entry.name for shard in host.low.shards for launch in shard if launch.entry.products]


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("case", "operand_format", "sums_apart"),
    covering("epochs on narrow tiles", KEPT, EACH_FORMAT, [False, True]),
    ids=shown,
)
def test_an_epoch_on_narrow_tiles(
    case: str, operand_format: OperandFormat, sums_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full batch and one of two rows on sm_90a, whose copies and products the host makes in their places."""
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    monkeypatch.setattr(thresholds, "CLUSTERS_SHARE_ROWS", False)
    monkeypatch.setattr(thresholds, "CLUSTERS_SHARE_K", False)
    monkeypatch.setattr(thresholds, "SUMMED_TENTHS", 0 if sums_apart else 1 << 30)
    epoch, host, made = on_host(case, operand_format)
    assert all(name.endswith(tuple(NEW)) for name in made)
    assert {name.rpartition("_")[2] for name in made} == {"64x16", "64x64"}
    names = [launch.entry.name for shard in host.low.shards for launch in (*shard, *host.low.finish)]
    if not operand_format.scaled:
        added_up = "sum_biases" if case == CLIPPED else "update_biases"
        assert [any(part in name for name in names) for part in ("sum_deltas", added_up)] == [
            sums_apart,
            not sums_apart,
        ]
    check_epoch(epoch, host, operand_format, len(made))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("split", "operand_format"), covering("epochs whose gradients clusters make", [2, 8], EACH_FORMAT), ids=shown
)
def test_an_epoch_whose_gradients_clusters_make(
    split: int, operand_format: OperandFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    monkeypatch.setattr(thresholds, "CLUSTERS_SHARE_K", False)
    monkeypatch.setattr(thresholds, "CLUSTER_CLOCKS", -(10**6))
    monkeypatch.setattr(thresholds, "CLUSTER_BLOCK_CLOCKS", 10_000 if split == 2 else -10_000)
    monkeypatch.setattr(thresholds, "LARGE_CLUSTER_BLOCK_CLOCKS", 10**6)
    epoch, host, made = on_host("from product to product", operand_format)
    assert sum(name.endswith(f"64x64_by_{split}") for name in made) == 3
    check_epoch(epoch, host, operand_format, len(made))


@pytest.mark.parametrize(
    ("k", "n", "rows", "operand_format", "split"),
    [
        (512, 512, 8192, BFLOAT16, 4), (721, 721, 7782, BFLOAT16, 2), (512, 512, 2048, BFLOAT16_PAIR, 4),
        (1002, 627, 8192, BFLOAT16_PAIR, 2),
    ],
)  # fmt: skip
def test_clusters_that_share_many_rows_have_large_tiles(
    k: int, n: int, rows: int, operand_format: OperandFormat, split: int
) -> None:
    work = of(rows, operand_format=operand_format, tensor_shapes=frozenset({(k, n)}))
    update = dense_path(k, n, work).update
    assert isinstance(update, Gemm) and update.tile == kernels.ClusterSplitTile(operand_format, split, 128)
    counted = cluster_clocks(update.tile, k, n, rows, 132)
    assert f"{counted:,} by clusters of {split} with 128×128" in update.why
    assert str(update) == f"cluster split 128x128 by {split}"


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("split", "operand_format"),
    covering("epochs whose gradients large tiles make", [2, 8], [BFLOAT16, BFLOAT16_PAIR]),
    ids=shown,
)
def test_an_epoch_whose_gradients_large_tiles_make(
    split: int, operand_format: OperandFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    monkeypatch.setattr(thresholds, "CLUSTERS_SHARE_K", False)
    monkeypatch.setattr(thresholds, "CLUSTER_CLOCKS", -(10**6))
    monkeypatch.setattr(thresholds, "CLUSTER_BLOCK_CLOCKS", 10**6)
    monkeypatch.setattr(thresholds, "LARGE_CLUSTER_BLOCK_CLOCKS", 10_000 if split == 2 else -10_000)
    epoch, host, made = on_host("from product to product", operand_format)
    assert sum(name.endswith(f"128x128_by_{split}") for name in made) == 3
    check_epoch(epoch, host, operand_format, len(made))


@pytest.mark.parametrize(
    ("k", "n", "rows", "operand_format", "is_wide"),
    [
        (6144, 6144, 128, BFLOAT16, True), (3072, 6144, 512, BFLOAT16, True), (2605, 2605, 724, BFLOAT16, True),
        (6144, 6144, 128, HALF, False), (6144, 6144, 128, BFLOAT16_PAIR, False), (6144, 6144, 128, HALF_PAIR, False),
        (1536, 768, 64, BFLOAT16, False),  # one wave of wide tiles
        (7001, 1050, 64, BFLOAT16, True), (36_000, 320, 128, BFLOAT16, False),  # a fifth of them would be padding
    ],
)  # fmt: skip
def test_blocks_that_move_many_weights_have_wide_tiles(
    k: int, n: int, rows: int, operand_format: OperandFormat, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tile() -> object:
        return weight_tile(operand_format, k, n, rows, 132, "sm_90a", in_place=True).tile

    assert tile() == kernels.ClusterSplitTile(operand_format, 1, is_wide=is_wide)
    monkeypatch.setattr(thresholds, "WIDE_CLUSTERS_ARE_USED", False)
    assert tile() == kernels.ClusterSplitTile(operand_format, 1)


@pytest.mark.usefixtures("everywhere")
def test_an_epoch_whose_gradients_wide_tiles_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    monkeypatch.setattr(thresholds, "CLUSTERS_SHARE_K", False)
    monkeypatch.setattr(tiles, "_is_one_wave", lambda *_: False)
    for name in ("_is_bound_by_memory", "_leaves_memory_idle"):
        monkeypatch.setattr(tiles, name, lambda *_: True)
    epoch, host, made = on_host("a loss at the end", BFLOAT16)
    assert next(name for name in made if "update" in name).endswith("64x128_by_1")
    check_epoch(epoch, host, BFLOAT16, len(made))


UNSCALED = [each for each in EACH_FORMAT if not each.scaled]


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("place", "operand_format", "case"),
    covering("epochs whose updates are one launch", range(5), UNSCALED, STEPS),
    ids=shown,
)
def test_an_epoch_whose_updates_are_one_launch(
    place: int, operand_format: OperandFormat, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full batch and one of two rows, by each tile that there is."""
    tiles_of = kernels.cluster_tiles(operand_format)
    monkeypatch.setattr(updates, "cluster_tiles", lambda _: tiles_of[place % len(tiles_of) :][:1])
    epoch, host, made = on_host(case, operand_format)
    layers = len(epoch.plan.parameters) // 2
    assert [name for name in made if "update" in name] == [
        f"tensor_backward_updates_{layers}_Momentum_{tiles_of[place % len(tiles_of)].name}"
    ]
    assert not host.low.finish  # which would move biases
    check_epoch(epoch, host, operand_format, len(made))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("split", "operand_format"), covering("epochs whose clusters share k", [2, 8], EACH_FORMAT), ids=shown
)
def test_an_epoch_whose_clusters_share_k(
    split: int, operand_format: OperandFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full batch and a smaller one."""
    monkeypatch.setattr(thresholds, "CLUSTER_PRODUCT_CLOCKS", -(10**6))
    monkeypatch.setattr(thresholds, "CLUSTER_BLOCK_CLOCKS", 10_000 if split == 2 else -10_000)
    epoch, host, made = on_host("from product to product", operand_format)
    activations = [name for name in made if "forward" in name or "backward_input" in name]
    assert len(activations) == 5 and all(name.endswith(f"64x64_by_{split}") for name in activations)
    check_epoch(epoch, host, operand_format, len(made))


def check_exact(epoch: Epoch, host: HostProgram) -> None:
    """Train for an epoch, and compare with the CPU in float32."""
    host.load(epoch.state)
    errors = host.run(epoch.rates).copy()
    ours = (host.parameters, errors, host.evaluate())
    (state, *cpu), (exact_state, *exact) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    for got, value, oracle in zip(ours, (state.parameters[0], *cpu), (exact_state.parameters[0], *exact), strict=True):
        assert_as_exact(got, value, oracle)


def check_epoch(epoch: Epoch, host: HostProgram, operand_format: OperandFormat, products: int) -> None:
    """Train for an epoch of so many products a step, and compare with the CPU."""
    host.load(epoch.state)
    errors = host.run(epoch.rates).copy()
    state, *expected = epoch.on_cpu("float64")
    before = epoch.state.parameters[0]
    ours = (host.parameters - before, errors, host.evaluate())
    for got, value in zip(ours, (state.parameters[0] - before, *expected), strict=True):
        rounding = ERRORS[operand_format.struct] + 64 * EPS32  # of a product, and of its sum
        assert np.linalg.norm(got - value) <= np.sqrt(2 * products) * rounding * np.linalg.norm(value)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("by_order", [True, False])
def test_an_epoch_whose_warps_share_k(by_order: bool) -> None:
    epoch = Epoch(
        [Dense(9, 40, "gelu"), Dense(40, 36, "relu"), Dense(36, 3)], {}, precision="float32-ieee", as_bytes=not by_order
    )
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_75")
    assert any("warp_split" in launch.entry.name for shard in host.low.shards for launch in shard)
    assert not any("warp_split" in launch.entry.name for launch in host.low.evaluation)
    check_exact(epoch, host)


CUT: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "classes": ([Dense(9, 40, "relu"), Dense(40, 3)], {"loss": "softmax_cross_entropy"}),
    "a dropout": ([Dense(9, 33, "tanh"), Dense(33, 50, "relu"), Dropout(0.5), Dense(50, 5)], {"loss": Huber(0.5)}),
    "shards": ([Dense(9, 130, "gelu", bias=False), Dense(130, 2)], {"shards": 3}),
    "a norm comes between": (
        [Dense(9, 70, "relu"), Dense(70, 16)], {"optimizer": OPTIMIZERS["Momentum"](0.01, clip_norm=0.5)},
    ),
}  # fmt: skip


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("by_tiles", [False, True])
@pytest.mark.parametrize("case", CUT)
def test_an_epoch_whose_last_layer_is_split_along_k_but_for_its_head(
    case: str, by_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gradients of few columns, one of them of a shard without rows, that are stored."""
    for name, value in {"SMALL_N_CLOCKS": 1, "FEW_COLUMNS_TILE_TENTHS": 0 if by_tiles else 1 << 30}.items():
        monkeypatch.setattr(thresholds, name, value)
    monkeypatch.setattr(thresholds, "WARP_SPLIT_LEAST_ROWS", 1)
    monkeypatch.setattr(thresholds, "WARP_SPLIT_WEIGHT_CLOCKS", 1)
    epoch = Epoch(*CUT[case], precision="float32-ieee")
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_80")
    made = [launch.entry.name for shard in host.low.shards for launch in shard]
    shards = epoch.plan.shards
    assert sum(name.startswith("head_") for name in made) == shards
    assert any("sum_partials" in launch.entry.name for launch in host.low.evaluation)
    if case in ("shards", "a norm comes between"):
        stored = f"dense_backward_weight_{'warp_split_32x16' if by_tiles else 'small_n'}"
        assert made.count(stored) >= shards
    check_exact(epoch, host)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("seed", range(6))
def test_an_epoch_of_drawn_widths_whose_last_layer_is_split_along_k(seed: int) -> None:
    random = np.random.default_rng(seed)
    k, middle, n = (int(random.integers(low, high)) for low, high in ((1, 36), (36, 300), (1, 33)))
    layers = [Dense(k, middle, "relu", bias=seed % 2 == 0), Dense(middle, n)]
    loss = "softmax_cross_entropy" if n > 1 and seed % 3 else "squared_error"
    epoch = Epoch(layers, {"loss": loss, "shards": 1 + seed % 3}, precision="float32-ieee")
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_80")
    assert any(launch.entry.name.startswith("head_") for launch in host.low.shards[0])
    check_exact(epoch, host)


@pytest.mark.usefixtures("cut", "everywhere")
@pytest.mark.parametrize("n", [1, 3, 17])
@pytest.mark.parametrize("options", [{}, {"shards": 2}], ids=["moved", "stored"])
def test_an_epoch_whose_last_layer_of_large_k_is_on_tensor_cores(n: int, options: dict[str, Any]) -> None:
    epoch = Epoch([Dense(9, 33, "gelu"), Dense(33, 72, "relu"), Dense(72, n)], options, precision="bfloat16")
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a", multiprocessors=132)
    made = [launch.entry.name for launch in host.low.shards[0] if launch.entry.products]
    assert all(name.startswith("tensor_") for name in made)
    assert any("sum_partials" in launch.entry.name for launch in host.low.evaluation)
    check_epoch(epoch, host, BFLOAT16, len(made))


@pytest.mark.parametrize(("precision", "path"), [("bfloat16", "gemm_sm90 64x16"), ("float32", "warp split 32x8")])
def test_a_selection_says_what_was_counted(precision: str, path: str) -> None:
    plan = make_plan([Dense(784, 512, "relu"), Dense(512, 10)], capacity=64, precision=precision)
    printed = str(select(plan, STEP.setting, is_training=True))
    assert f"forward: {path}" in printed and "are counted at" in printed


def test_a_step_cuts_a_product_of_many_inputs_and_few_outputs() -> None:
    """3072 by 38 at 141 rows has 25 tiles: more blocks take parts of k, but not in an evaluation, nor of many tiles."""
    step = of(141, operand_format=None)
    cut = dense_path(3072, 38, step).forward
    assert isinstance(cut, SplitK) and isinstance(cut.tile, kernels.WarpSplitTile)
    assert cut.part % cut.tile.K == 0 and (cut.count - 1) * cut.part < 3072 <= cut.count * cut.part
    evaluation = dataclasses.replace(step, is_training=False, in_place=False)
    others = dense_path(3072, 38, evaluation), dense_path(71, 3072, step)
    assert not any(isinstance(path.forward, SplitK) for path in others)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (64, 8), (3168, 396), (16_384, 396)])
def test_a_loss_has_no_more_blocks_than_a_card_holds_at_once(rows: int, blocks: int) -> None:
    assert losses.loss_blocks(rows, kernels.WARP_TEAM, 132) == blocks
