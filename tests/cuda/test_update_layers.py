"""The updates of several layers in one launch, and beside others: which ones they are, and whole steps launch by launch
on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import epochs
import numpy as np
import pytest
from epochs import Epoch, assert_as_exact
from host_program import HostProgram

from mlpgpu import Dense, Dropout, LocallyConnected, Network, Standardize
from mlpgpu import plan as ops
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import BFLOAT16, WARP_SPLIT_WEIGHT, ceil_div, cluster_split_tiles
from mlpgpu.backends.cuda.kernels.launches import DELTAS, OUTPUTS, At, Launch, Lowered, Map
from mlpgpu.backends.cuda.lower import fuse as fusing
from mlpgpu.backends.cuda.lower import groups, lowering
from mlpgpu.backends.cuda.lower.lowering import lower, passes
from mlpgpu.backends.cuda.lower.overlap import overlap
from mlpgpu.backends.cuda.profile.costs import flops, moved_bytes
from mlpgpu.backends.cuda.profile.predicted import CLOCKS, LAUNCH_SECONDS, predicted_seconds
from mlpgpu.backends.cuda.run.arrays import _grows_with_rows
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.counted import grouped_clocks, slices_in_turn
from mlpgpu.backends.cuda.select.dense import SmallN, UpdateByParts, WarpSplit, update_blocks, updates_in_one_launch
from mlpgpu.backends.cuda.select.select import select
from mlpgpu.backends.cuda.select.setting import Setting, work_of
from mlpgpu.backends.cuda.select.updates import moved_together, runs_beside
from mlpgpu.layers import Layer
from mlpgpu.names import ActivationName
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import Plan

H100 = Setting(132, "sm_90a", "float32", textured=True)
WIDTHS, ROWS = (48, 84, 21, 36, 95, 187), 4371  # of which the last layer is on tensor cores


@pytest.fixture(autouse=True)
def launch_by_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores are counted at more than they take, so that narrow layers of these networks are on plain cores."""
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_IS_USED", False)
    monkeypatch.setattr(thresholds, "LAYERS_TENTHS", 17)


def stack(widths: Sequence[int], activation: ActivationName = "softplus", rate: float | None = 0.5) -> list[Layer]:
    layers: list[Layer] = []
    *hidden, last = pairwise(widths)
    for k, n in hidden:
        layers += [Dense(k, n, activation), *([Dropout(rate)] if rate else [])]
    layers.append(Dense(*last))
    return layers


def plan_of(layers: Sequence[Layer], **options: Any) -> Plan:
    defaults = {"capacity": ROWS, "loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Momentum"](0.1)}
    return Network(layers, seed=1).lower(**{**defaults, **options})


def lowered(plan: Plan, arch: str = "sm_90a") -> Lowered:
    return lower(plan, multiprocessors=132, source="float32", arch=arch)


def launches(low: Lowered) -> list[Launch]:
    return [launch for shard in low.shards for launch in shard]


def updates(low: Lowered) -> list[str]:
    """What moves weights on plain cores, by the ends of names."""
    found = [launch.entry.name for launch in launches(low)]
    return [
        name.replace("dense_backward_update", "one").replace("update_layers", "several")
        for name in found
        if name.startswith(("dense_backward_update", "update_layers"))
    ]


# --- whole steps ---

BY_PARTS, BY_TILES, WITHOUT_TILES = "by_parts", "warp_split_32x16", "small_n"
KINDS: dict[str, tuple[tuple[int, int], int, dict[str, Any]]] = {  # full and last batch, multiprocessors, thresholds
    BY_PARTS: ((700, 20), 132, {"ADDED_PARTS_CLOCKS": 0}),
    BY_TILES: ((70, 35), 60, {"UPDATES_HAVE_PARTS": False, "FEW_COLUMNS_MOST_ROWS": 0, "SMALL_N_CLOCKS": 10**6}),
    WITHOUT_TILES: ((21, 5), 60, {"FEW_COLUMNS_MOST_ROWS": 0}),
}
STEPS: dict[str, list[Layer]] = {
    "dropouts": [
        Dense(9, 41, "softplus"), Dropout(0.5), Dense(41, 37, "relu", bias=False), Dropout(0.5),
        Dense(37, 18, "gelu"), Dense(18, 3),
    ],
    "standardized, frozen between": [
        Standardize(9), Dropout(0.2), Dense(9, 23, "silu"), Dense(23, 19, "relu", trainable=False),
        Dense(19, 21, "tanh"), Dense(21, 33),
    ],
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["Momentum", "Adam", "SGD"])
@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_the_bits_of_a_launch_for_each_layer(
    kind: str, case: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full batch, and a last one so short that some blocks have no rows."""
    (rows, last), multiprocessors, changed = KINDS[kind]
    for name, value in {**changed, "WHOLE_BATCH_IS_USED": False}.items():
        monkeypatch.setattr(thresholds, name, value)
    monkeypatch.setattr(epochs, "BATCH_SIZE", rows)
    monkeypatch.setattr(epochs, "LAST_BATCH", last)
    options = {"optimizer": OPTIMIZERS[optimizer](0.01), "capacity": rows}
    as_bytes = case != "dropouts" or optimizer == "SGD"
    epoch = Epoch(STEPS[case], options, rates=(0.01, 0.02), precision="float32-ieee", as_bytes=as_bytes)
    found = both_ways(epoch, kind, monkeypatch, arch="sm_75", multiprocessors=multiprocessors)
    (state, cpu, _), (exact_state, exact, _) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    assert_as_exact(found[0], cpu, exact)
    assert_as_exact(found[1], state.parameters[0], exact_state.parameters[0])


def both_ways(epoch: Epoch, kind: str, monkeypatch: pytest.MonkeyPatch, **card: Any) -> tuple[np.ndarray, ...]:
    """Losses, parameters and slots after an epoch, the same with updates of a kind in one launch and in several."""
    found = []
    for is_used in (True, False):
        monkeypatch.setattr(thresholds, "UPDATES_ARE_GROUPED", is_used)
        host = HostProgram(epoch.plan, epoch.data, epoch.sampling, **card)
        kinds = [name for name in updates(host.low) if name.startswith("several") and name.endswith(kind)]
        assert len(kinds) == is_used
        host.load(epoch.state)
        losses = host.run(epoch.rates).copy()
        found.append((losses, host.parameters.copy(), host.arrays["slots"].copy()))
    assert np.isfinite(found[0][0]).all()
    for mine, known in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, known)
    return found[0]


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_layers_beside_tensor_cores_have_the_same_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their deltas come from products there, and go to such."""
    limits = {"NARROW_LEAST_ROWS": 1, "NARROW_LEAST_WEIGHTS": 1, "COUNTED_TENTHS": 0, "ADDED_PARTS_CLOCKS": 0,
              "LAYERS_ARE_COUNTED_TOGETHER": False, "WHOLE_BATCH_IS_USED": False}  # fmt: skip
    for name, value in limits.items():
        monkeypatch.setattr(thresholds, name, value)
    monkeypatch.setattr(epochs, "BATCH_SIZE", 520)
    monkeypatch.setattr(epochs, "LAST_BATCH", 20)
    layers: list[Layer] = [
        Dense(9, 41, "softplus"), Dropout(0.5), Dense(41, 66, "relu"), Dropout(0.5), Dense(66, 70, "tanh"),
        Dense(70, 35, "relu"), Dense(35, 33),
    ]  # fmt: skip
    epoch = Epoch(layers, {"capacity": 520}, rates=(0.01, 0.02), precision=precision)
    both_ways(epoch, BY_PARTS, monkeypatch, arch="sm_90a", multiprocessors=132)
    names = [launch.entry.name for launch in launches(lowered(epoch.plan))]
    assert sum(name.startswith("tensor_backward_update") for name in names) == 1


# --- which layers are moved together ---


def test_updates_by_parts_are_one_launch_behind_the_last_delta() -> None:
    """All layers in as many parts as leave their blocks on the card at once."""
    plan = plan_of(stack(WIDTHS), precision="tf32")
    low = lowered(plan)
    *_, before, launch = launches(low)
    assert launch.entry == kernels.update_layers("Momentum", WARP_SPLIT_WEIGHT, by_parts=True) and launch.pdl
    assert before.entry.name.startswith("dense_backward_input_dropped_softplus")
    assert updates(low) == ["several_Momentum_warp_split_32x16_by_parts"]
    offsets = {parameter.shape: parameter.offset for parameter in plan.parameters}
    layers = [(k, n, 4, 1280) for k, n in ((36, 95), (48, 84), (21, 36), (84, 21))]  # k, n; parts, rows of each
    words = low.words["updates of layers, warp_split_32x16_by_parts"]
    described = [words[first : first + 9] for first in range(0, len(words), 9)]
    by_shape = {each[:2]: each for each in described}
    assert sorted((*each[:2], *each[7:]) for each in described) == sorted(layers)
    for k, n, *_ in layers:
        assert by_shape[k, n][3:5] == (offsets[k, n], offsets[n,])
    begins = [each[2] for each in described]
    tiles = [ceil_div(each[0], 32) * ceil_div(each[1], 16) * each[7] for each in described]
    assert begins == [sum(tiles[:i]) for i in range(4)] and launch.grid == (sum(tiles), 1, 1) == (132, 1, 1)
    # The first layer reads the data set by the order; what others read lies side by side, in whole vectors.
    padded = 4384
    assert (launch.values["inputs"], launch.values["order"]) == (At("data"), At("order"))
    assert launch.values["capacity"] == padded and by_shape[48, 84][5] == -1
    assert low.bytes[OUTPUTS] == 4 * padded * (84 + 21 + 36) and low.bytes[DELTAS] == 4 * padded * (84 + 21 + 36 + 95)
    before_x = 0
    for each in described:
        if each[5] >= 0:
            assert each[5] == before_x
            before_x += each[0]
    assert [each[6] for each in described] == [sum(each[1] for each in described[:i]) for i in range(4)]
    assert all(_grows_with_rows(name, plan) for name in (OUTPUTS, DELTAS))


def test_what_others_write_there_is_what_it_reads() -> None:
    """Each x and dz is one buffer, which one launch writes as floats, or several in place."""
    plan = plan_of(stack(WIDTHS), precision="tf32")
    low = lowered(plan)
    words, padded = low.words["updates of layers, warp_split_32x16_by_parts"], 4384
    for first in range(0, len(words), 9):
        k, n, *_, x, dz, _, _ = words[first : first + 9]
        for array, columns, width in ((OUTPUTS, x, k), (DELTAS, dz, n)):
            place = At(array, padded * columns)
            writers = [
                launch
                for launch in launches(low)
                for argument in launch.entry.arguments
                if launch.values[argument.name] == place and argument.ctype == "float*"
            ]
            assert columns < 0 or {launch.values.get("n") for launch in writers} | {
                launch.values.get("k") for launch in writers
            } >= {width}


def test_launches_beside_each_other_still_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that lie in one array are told apart."""
    plan = plan_of(stack(WIDTHS), precision="tf32")
    together = launches(lowered(plan))[:-1]
    monkeypatch.setattr(thresholds, "UPDATES_ARE_GROUPED", False)
    apart = [launch for launch in launches(lowered(plan)) if "by_parts" not in launch.entry.name]
    assert [launch.entry for launch in together] == [launch.entry for launch in apart]
    assert [launch.pdl for launch in together] == [launch.pdl for launch in apart]
    assert [launch.values.get("prefetch") for launch in together] == [launch.values.get("prefetch") for launch in apart]


def test_kinds_are_launches_of_their_own_and_one_layer_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    by_parts, one = "several_Momentum_warp_split_32x16_by_parts", "one_by_parts_Momentum_warp_split_32x16"
    assert updates(lowered(plan_of([Dense(48, 84, "relu"), Dense(84, 10)]))) == [by_parts]
    assert updates(lowered(plan_of([Dense(48, 84)]))) == [one]
    frozen = [Dense(48, 84, "relu"), Dense(84, 21, "relu", trainable=False), Dense(21, 10)]
    assert updates(lowered(plan_of(frozen))) == [by_parts]
    assert updates(lowered(plan_of([replace(frozen[0], trainable=False), *frozen[1:]]))) == [one]
    # Few columns by few rows have no such launch.
    layers = [Dense(48, 84, "relu"), Dense(84, 21, "relu"), Dense(21, 10)]
    few = updates(lowered(plan_of(layers, precision="float32-ieee", capacity=20)))
    assert few == ["one_Momentum_few_columns", "several_Momentum_small_n"]
    monkeypatch.setattr(thresholds, "UPDATES_HAVE_PARTS", False)
    layers = [Dense(48, 84, "relu"), Dense(84, 21)]
    assert updates(lowered(plan_of(layers, precision="float32-ieee"))) == ["several_Momentum_small_n"]
    monkeypatch.setattr(thresholds, "SMALL_N_CLOCKS", 10**6)
    assert updates(lowered(plan_of(layers, precision="float32-ieee"))) == ["several_Momentum_warp_split_32x16"]


def test_layers_of_several_kinds_are_a_launch_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a layer of one kind makes the delta of one of another."""
    monkeypatch.setattr(thresholds, "UPDATES_HAVE_PARTS", False)
    layers = [Dense(20, 100, "relu"), Dense(100, 200, "tanh"), Dense(200, 20, "relu"), Dense(20, 900)]
    low = lowered(plan_of(layers, capacity=4096, precision="float32-ieee", loss="squared_error"))
    assert updates(low) == ["several_Momentum_warp_split_32x16", "several_Momentum_small_n"]
    by_tiles, without = low.words["updates of layers, warp_split_32x16"], low.words["updates of layers, small_n"]
    assert {by_tiles[:2], by_tiles[9:11]} == {(100, 200), (20, 900)}
    assert {without[:2], without[9:11]} == {(20, 100), (200, 20)}
    columns = sorted([*by_tiles[5::9], *without[5::9]])
    assert columns[0] == -1 and len(set(columns)) == 4  # all buffers lie in one array, each at a place of its own


@pytest.mark.parametrize(
    "options",
    [{"shards": 2}, {"reduction": "atomic"}, {"optimizer": OPTIMIZERS["SGD"](0.1, clip_norm=1.0)},
     {"ranks": 2, "shards": 2}],
)  # fmt: skip
def test_gradients_that_are_stored_stay_as_they_are(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(stack(WIDTHS), **options)
    low = lowered(plan)
    monkeypatch.setattr(thresholds, "UPDATES_ARE_GROUPED", False)
    assert low == lowered(plan) and not any(name.startswith("several") for name in updates(low))


def test_layers_on_tensor_cores_keep_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    low = lowered(plan_of(stack((132, 21, 71, 28, 223, 202, 56, 274), "relu"), capacity=8192, precision="tf32"))
    found = [launch.entry.name for launch in launches(low)]
    assert sum(name.startswith("tensor_backward_update") for name in found) == 3
    assert updates(low) == ["several_Momentum_warp_split_32x16_by_parts"] and found[-1].startswith("update_layers")
    assert launches(low)[-1].values["layer_count"] == 4 and launches(low)[-1].grid == (105, 1, 1)  # 35 tiles, 3 parts


def test_a_threshold_switches_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "UPDATES_ARE_GROUPED", False)
    low = lowered(plan_of(stack(WIDTHS), precision="tf32"))
    assert updates(low) == ["one_by_parts_Momentum_warp_split_32x16"] * 4
    assert OUTPUTS not in low.bytes and DELTAS not in low.bytes


@pytest.mark.parametrize("name", ["dz", "x"])
def test_a_layer_whose_rows_are_written_before_the_launch_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group by hand, as no plan has such: an activation's derivative in place on what an update has read."""
    plan = plan_of(stack((48, 84, 21, 10), rate=None))
    monkeypatch.setattr(thresholds, "UPDATES_ARE_GROUPED", False)
    selection = select(plan, H100, is_training=True)
    made = list(fusing.fuse(selection).groups)
    monkeypatch.setattr(thresholds, "UPDATES_ARE_GROUPED", True)
    first, second, third = (each for each in made if isinstance(each, groups.DenseUpdate))
    in_place = groups.Differentiate("", "", ops.ActivationBackward("relu", "y", getattr(second.op, name)))
    for place, moved in ((0, {first.op, second.op, third.op}), (1, {first.op, third.op})):
        spoilt = list(made)
        spoilt.insert(made.index(second) + place, in_place)
        found = fusing._with_updates_of_a_kind(fusing._Facts(selection), spoilt)
        (together,) = (each for each in found if isinstance(each, groups.UpdateLayers))
        assert set(together.ops) == moved and (second in found) == (second.op not in moved)


def test_what_a_stack_leaves_is_not_moved_beside_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "WHOLE_BATCH_IS_USED", False)  # such passes move each layer by itself
    layers = [Dense(48, 84, "relu"), LocallyConnected(84, 9, "relu"), LocallyConnected(76, 9, "relu"),
              Dense(68, 30, "relu"), Dense(30, 20)]  # fmt: skip
    plan = plan_of(layers, capacity=8)
    fused = passes(plan, H100).training
    assert fused is not None and fused.selection.in_place and fused.selection.stacks
    (together,) = (each for each in fused.groups if isinstance(each, groups.UpdateLayers))
    assert {op.weight for op in together.ops} == {"0.weight", "4.weight"} and together.inputs == "x"


# --- on tensor cores ---


def on_tensor_cores(**options: Any) -> Lowered:
    return lowered(plan_of(stack((784, 512, 384, 10), "relu", None), precision="bfloat16", **options))


def test_updates_on_tensor_cores_are_one_launch() -> None:
    low = on_tensor_cores(capacity=256)
    (update,) = (each for each in launches(low) if each.entry.name.startswith("tensor_backward_updates"))
    tile = next(each for each in kernels.cluster_tiles(BFLOAT16) if update.entry.name.endswith(each.name))
    assert update is launches(low)[-1] and not low.finish  # behind all deltas, and it moves the biases too
    values, first = update.values, 0
    assert [values[f"weight_{i}"] for i in (0, 1)] == [At("parameters", 784 * 512 + 512), At("parameters")]
    assert [values[f"bias_{i}"] for i in (0, 1)] == [
        At("parameters", 784 * 512 + 512 + 512 * 384),
        At("parameters", 784 * 512),
    ]
    for number, (k, n) in enumerate(((512, 384), (784, 512))):
        assert (values[f"k_{number}"], values[f"n_{number}"], values[f"first_{number}"]) == (k, n, first)
        first += tile.clusters(k, n) + math.ceil(n / tile.n)  # tiles of the weight, then of the bias
        dz, components = values[f"dz_{number}"], values[f"dz_components_{number}"]
        assert isinstance(dz, At) and isinstance(components, Map) and dz.array == components.array
    assert update.grid == (tile.split * first, 1, 1) and values["capacity"] == 256
    assert update.lengths == {"clocks": grouped_clocks(tile, [(512, 384), (784, 512)], 256, 132)}


def test_a_layer_without_a_bias_has_no_tiles_of_one() -> None:
    layers = [Dense(784, 512, "relu", bias=False), Dense(512, 384, "relu"), Dense(384, 10)]
    low = lowered(plan_of(layers, precision="bfloat16", capacity=256))
    (update,) = (each for each in launches(low) if each.entry.name.startswith("tensor_backward_updates"))
    tile = next(each for each in kernels.cluster_tiles(BFLOAT16) if update.entry.name.endswith(each.name))
    tiles = tile.clusters(784, 512) + tile.clusters(512, 384) + math.ceil(384 / tile.n)
    assert update.values["bias_1"] is None and update.grid == (tile.split * tiles, 1, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"shards": 2}, {"optimizer": OPTIMIZERS["SGD"](0.1, clip_norm=1.0)}, {"ranks": 2, "shards": 2},
        {"precision": "float32", "capacity": 4096},  # whose operands have scales
    ],
)  # fmt: skip
def test_updates_on_tensor_cores_that_keep_their_launches(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(stack((784, 512, 384, 10), "relu", None), **{"precision": "bfloat16", "capacity": 256, **options})
    low = lowered(plan)
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    assert low == lowered(plan)
    assert not any("tensor_backward_updates" in each.name for each in low.entries())


def test_what_one_launch_moves_is_chosen_by_counts() -> None:
    work = work_of(plan_of(stack(WIDTHS)), H100, BFLOAT16, is_training=True, in_place=True)
    shapes = {"a": (915, 915), "b": (915, 915), "c": (36, 915)}
    found = moved_together(shapes, replace(work, rows=1024))
    assert found.weights == {"a", "b", "c"} and found.tile in kernels.wide_cluster_tiles(BFLOAT16)
    assert "one launch moves 3 layers" in found.why
    large = moved_together({**shapes, "d": (8192, 8192)}, replace(work, rows=1024))
    assert large.weights == {"a", "b", "c"}  # the others' launches end no later so
    for others in ({}, {"e": (8192, 8192)}, {"c": (36, 915)}):  # too few are left to go together
        assert not moved_together({"d": (8192, 8192), **others}, replace(work, rows=1024)).weights
    alone = moved_together({"c": (36, 915)}, replace(work, rows=1024))
    assert alone.weights == {"c"}  # whose bias needs no launch of its own
    many = moved_together({f"{number}": (64, 64) for number in range(40)}, replace(work, rows=1024))
    assert len(many.weights) == thresholds.GROUPED_MOST_LAYERS
    for other in (
        replace(work, in_place=False),
        replace(work, operand_format=kernels.HALF_PAIR),
        replace(work, setting=replace(work.setting, arch="sm_80")),
    ):
        assert not moved_together(shapes, other).weights and moved_together(shapes, other).tile is None
    assert not moved_together({}, work).weights


# --- beside other launches ---

DEEP = (132, 21, 71, 28, 223, 202, 56, 274)


def beside(low: Lowered) -> list[str]:
    return [launch.entry.name.split("_sm90_")[0] for launch in launches(low) if launch.on_side_stream]


def test_updates_that_leave_room_run_beside_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    plan = plan_of(stack(DEEP, "relu"), capacity=8192, precision="tf32")
    low = lowered(plan)
    assert beside(low) == ["tensor_backward_update_Momentum_bfloat16_pair"] * 3
    assert not launches(low)[-1].on_side_stream  # nothing of the step follows it
    of_step = [launch for launch in launches(low) if not launch.on_side_stream]
    # Behind both streams a launch begins when all is complete; others still overlap the one before on their stream.
    assert not low.finish[0].pdl and low.finish[0].entry.prefetched is not None
    assert sum(launch.pdl for launch in of_step) > 8
    monkeypatch.setattr(thresholds, "UPDATES_RUN_BESIDE", False)
    alone = lowered(plan)
    assert beside(alone) == [] and alone.finish[0].pdl
    assert [launch.entry for launch in launches(alone)] == [launch.entry for launch in launches(low)]


def test_a_step_without_an_end_begins_behind_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of([Dense(784, 512, "relu"), Dense(512, 512, "relu"), Dense(512, 10)], capacity=64, precision="tf32")
    monkeypatch.setattr(thresholds, "NARROW_TILES_ARE_USED", False)
    low = lowered(plan)
    first = next(iter([*low.begin, *launches(low)]))
    assert beside(low) == ["dense_backward_update_Momentum_few_columns"] and not low.finish and not first.pdl
    monkeypatch.setattr(thresholds, "UPDATES_RUN_BESIDE", False)
    assert [launch.entry for launch in launches(lowered(plan))] == [launch.entry for launch in launches(low)]


@pytest.mark.parametrize(("rows", "count"), [(8192, 3), (4095, 0)])
def test_short_updates_on_tensor_cores_have_none_beside_them(
    rows: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By clusters of eight, 512 rows a block."""
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    monkeypatch.setattr(thresholds, "LAYERS_TENTHS", 11)
    plan = plan_of(stack((58, 44, 92, 506, 92), "relu", None), capacity=rows, precision="bfloat16")
    assert len([name for name in beside(lowered(plan)) if name.startswith("tensor")]) == count


def test_an_update_whose_rows_are_written_later_stays_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    plan = plan_of(stack(DEEP, "relu"), capacity=8192, precision="tf32")
    low = lowering._emit(plan, passes(plan, H100))
    (shard,) = low.shards
    *_, third = (launch for launch in shard if launch.entry.name.startswith("tensor_backward_update"))
    dx = next(launch for launch in shard if launch.entry.name.startswith("tensor_backward_input"))
    spoilt = replace(low, shards=[[*shard, dx]])  # which reads the first one's weight, and writes the second one's dz
    found = [launch.operation for launch in launches(overlap(spoilt, plan, 132)) if launch.on_side_stream]
    assert found == [third.operation]


def test_reasons_to_run_beside_others() -> None:
    update = kernels.tensor_backward_update("Adam", cluster_split_tiles(BFLOAT16)[2])  # clusters of four
    assert runs_beside(update, 100, 2048, 132) and runs_beside(update, 277, 2048, 132)
    assert not runs_beside(update, 278, 2048, 132) and "278 blocks > 277" in runs_beside(update, 278, 2048, 132).why
    assert not runs_beside(update, 1, 2047, 132) and "2,047 rows < 2,048" in runs_beside(update, 1, 2047, 132).why
    plain = kernels.update_layers("Adam", WARP_SPLIT_WEIGHT, by_parts=True)
    assert runs_beside(plain, 92, 1, 132) and not runs_beside(plain, 93, 1, 132)


# --- counts and reasons ---


def test_the_reason_has_both_counts() -> None:
    plan = plan_of(stack(WIDTHS), precision="tf32")
    shown = str(passes(plan, H100).training)
    # 132 blocks have 5 slices of rows; alone 2, 1, 1 and 2.
    one = 5 * 5800 + 6000 + 6400
    apart = 6 * 5800 + 4 * (6000 + 6400)
    assert "UpdateLayers" in shown and "4 layers are moved by the same kernel" in shown
    assert f"{one:,} in one launch behind their deltas, {apart:,} in 4" in shown


def test_counts_by_hand() -> None:
    work = select(plan_of(stack(WIDTHS)), H100, is_training=True).work
    tile = WARP_SPLIT_WEIGHT
    parts = UpdateByParts(tile, 9, 512, "")
    assert update_blocks(48, 84, parts, ROWS) == (12 * 9, 2)
    assert update_blocks(48, 84, WarpSplit(tile, ""), ROWS) == (12, 18)
    assert update_blocks(48, 84, SmallN(""), ROWS) == (7 * 6, 9)
    assert slices_in_turn([(108, 2), (108, 2), (162, 1)], 132) == 5 and slices_in_turn([(1, 1), (200, 3)], 132) == 6
    for path, clocks in ((WarpSplit(tile, ""), 18 * 5800), (SmallN(""), 9 * 7000)):
        why = updates_in_one_launch([(48, 84, path)] * 3, work).why
        assert f"{clocks + 6400:,} in one launch behind their deltas, {3 * (clocks + 6400):,} in 3" in why
    assert not updates_in_one_launch([(48, 84, parts)], work)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_predictions_flops_and_bytes(optimizer: str) -> None:
    plan = plan_of(stack(WIDTHS), precision="tf32", optimizer=OPTIMIZERS[optimizer](0.1))
    launch = launches(lowered(plan))[-1]
    assert predicted_seconds(launch, ROWS, 132) == pytest.approx(LAUNCH_SECONDS + (5 * 5800 + 6000) / CLOCKS)
    shapes = [(48, 84), (84, 21), (21, 36), (36, 95)]
    assert flops(launch, ROWS) == 2 * ROWS * sum(k * n for k, n in shapes)
    moved = sum((k + 1) * n for k, n in shapes)
    read = 4 * ROWS * (1 + sum(k + n for k, n in shapes)) + 4 * 36 + 16
    arrays = 8 * moved * (1 + {"SGD": 0, "Adam": 2}[optimizer])
    of_parts = 132 * (4 * kernels.PARTS_SUMS + 8)
    assert moved_bytes(launch, ROWS) == read + arrays + of_parts
