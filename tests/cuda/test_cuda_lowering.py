"""Plans as launches: plain data, checked without a GPU; and whole steps of it, run on the host."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from drawn import first_and_drawn
from epochs import Epoch, assert_as_exact
from helpers import EPS32, first_and_thorough, numpy_alone
from host_program import HostProgram
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases.tensor import ERRORS, PRECISION_OF

from mlpgpu import Dataset, Dense, Dropout, Huber, LocallyConnected, Network, Standardize
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends import Sampling, get_backend
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import (
    OF_PRECISION,
    OPERAND_FORMATS,
    TILES,
    OperandFormat,
    all_entries,
    ceil_div,
)
from mlpgpu.backends.cuda.kernels.launches import At, Launch, Lowered, Map
from mlpgpu.backends.cuda.lower.lowering import lower, lower_evaluation
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.dense import is_cut, part_length
from mlpgpu.backends.cuda.select.tiles import gemm_tile, simt_tile
from mlpgpu.backends.cuda.select.updates import updates_in_place
from mlpgpu.layers import Layer
from mlpgpu.losses import LOSSES
from mlpgpu.optimizers import OPTIMIZERS, Optimizer
from mlpgpu.plan import REDUCTIONS, Plan
from mlpgpu.random import least_kept

# What belongs to a data set or a run, not to the plan: the program puts it in.
OWNED = {"order", "data", "scale", "seed", "targets", "plain targets", "weights", "graph_steps"}
NUMBERS = {"scale", "seed", "graph_steps"}


@pytest.fixture
def plain_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither steps by blocks of rows nor tiles for small batches, which would be chosen for the plans of a test."""
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    monkeypatch.setattr(thresholds, "NARROW_TILES_ARE_USED", False)


def lowered(
    plan: Plan, multiprocessors: int = 132, source: str = "float32", arch: str = "sm_75", rank: int = 0
) -> Lowered:
    return lower(plan, multiprocessors=multiprocessors, source=source, arch=arch, rank=rank)


def make_plan(layers: Sequence[Layer], **options: object) -> Plan:
    defaults = {"capacity": 32, "loss": "squared_error", "optimizer": OPTIMIZERS["Momentum"](0.1)}
    return Network(layers, seed=1).lower(**{**defaults, **options})


def names(part: list[Launch]) -> list[str]:
    return [launch.entry.name for launch in part]


@st.composite
def some_frozen(draw: st.DrawFn, layers: list[Layer]) -> list[Layer]:
    """The layers with some of them frozen, but not all."""
    network = Network(layers, seed=1)
    places = [place for place, layer in enumerate(layers) if isinstance(layer, (Dense, LocallyConnected))]
    trained = {id(layers[place]) for place in draw(st.sets(st.sampled_from(places), min_size=1))}
    return list(network.frozen(*(place for place in places if id(layers[place]) not in trained)).layers)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Networks of up to three dense layers, one of them perhaps tied or very tall, and whatever goes with them."""
    activation = st.sampled_from(list(ACTIVATIONS))
    width = st.integers(1, 70)
    n_in = draw(st.one_of(width, st.sampled_from([4096, 5000])))
    n = draw(width)
    layers: list[Layer] = [Standardize(n_in)] if draw(st.booleans()) else []
    layers.append(Dense(n_in, n, draw(activation), bias=draw(st.booleans())))
    if draw(st.booleans()):
        layers.append(Dropout(draw(st.sampled_from([0.1, 0.5]))))
    if draw(st.booleans()):
        layers += [Dense(n, n, draw(activation))] * draw(st.integers(1, 3))
    if draw(st.booleans()):
        window, places = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        window = min(window, n)
        stack = LocallyConnected(n, window, draw(activation), draw(st.sampled_from(["output", "layer", None])))
        for _ in range(places):
            if n >= window:
                layers.append(stack)
                n -= window - 1
    n_out = draw(width)
    layers.append(Dense(n, n_out, draw(st.sampled_from(["identity", "tanh"]))))
    loss = draw(st.sampled_from(list(LOSSES)))
    if LOSSES[loss].output == "identity" and draw(st.booleans()):
        layers.append(Standardize(n_out))
    if draw(st.booleans()):
        layers = draw(some_frozen(layers))
    optimizer = OPTIMIZERS[draw(st.sampled_from(list(OPTIMIZERS)))]
    return make_plan(
        layers,
        capacity=draw(st.sampled_from([1, 3, 32, 1000])),
        loss=loss,
        target_kind=draw(st.sampled_from(LOSSES[loss].targets)),
        optimizer=optimizer(0.1, clip_norm=draw(st.sampled_from([None, 1.0])), alpha=draw(st.sampled_from([0.0, 1.0]))),
        shards=draw(st.integers(1, 3)),
        reduction=draw(st.sampled_from(REDUCTIONS)),
        precision=draw(st.sampled_from(["float32-ieee", *OF_PRECISION])),
    )


# Thresholds by which a step of one shard on sm_90a has nothing but products of operands without scales.
OF_STEPS_ALONE = {
    "UNSCALED_STEP_HUNDREDTHS": 0, "NARROW_LEAST_ROWS": 1, "LAYERS_TENTHS": 0, "ROW_STEP_IS_USED": False,
    "TENSOR_ROW_STEP_IS_USED": False,
}  # fmt: skip
LEAST = ("GEMM_LEAST_WIDTH", "GEMM_LEAST_WEIGHTS", "GEMM_LEAST_ROWS")
ARCHITECTURES = st.sampled_from(["sm_75", "sm_80", "sm_90a"])


def on_tensor_cores(plan: Plan, *, large: bool = False, **options: Any) -> Lowered:
    """As :func:`lowered`, with every product that may be on tensor cores there, in the form of large layers or not.

    Where none may, steps that can be are by blocks of rows for capacities of 3 and 32 rows.
    """
    limits = {**dict.fromkeys(LEAST, 1), "MOST_UNSCALED_WEIGHTS": 0 if large else 1 << 62}
    limits["ROW_STEP_IS_USED"] = plan.capacity in (3, 32)
    with patch.multiple(thresholds, **limits):
        return lowered(plan, **options)


def with_scales(plan: Plan, **options: Any) -> Lowered:
    """As :func:`lowered`, in the form of large layers."""
    with patch.object(thresholds, "MOST_UNSCALED_WEIGHTS", 0):
        return lowered(plan, **options)


@given(plans(), st.sampled_from(["float32", "uint8"]), st.sampled_from([1, 20, 132]), ARCHITECTURES, st.booleans())
def test_launches_fit_the_table_and_the_arrays(
    plan: Plan, source: str, multiprocessors: int, arch: str, large: bool
) -> None:
    low = on_tensor_cores(plan, large=large, multiprocessors=multiprocessors, source=source, arch=arch)
    known = set(all_entries())
    made = ("local/stack", "fused/row_step.cuh")  # for one plan each
    assert {entry for entry in low.entries() if not entry.header.startswith(made)} <= known
    assert all(low.bytes[name] == 4 * len(words) for name, words in low.words.items())
    for launch in low.launches():
        assert set(launch.values) == {argument.name for argument in launch.entry.arguments}
        assert len(launch.grid) == 3 and all(isinstance(axis, int) and axis >= 1 for axis in launch.grid)
        assert max(launch.grid[1:]) <= 65535
        for argument in launch.entry.arguments:
            value = launch.values[argument.name]
            if argument.is_array:
                assert value is None or isinstance(value, Map if argument.ctype == "const TensorMap*" else At)
            else:
                assert isinstance(value, (int, float)) or (isinstance(value, At) and value.array in NUMBERS)
            if isinstance(value, At) and value.array not in OWNED:
                assert 0 <= value.offset * argument.item_bytes < low.bytes[value.array]


@given(plans(), ARCHITECTURES, st.booleans())
def test_arrays_are_written_before_they_are_read(plan: Plan, arch: str, large: bool) -> None:
    low = on_tensor_cores(plan, large=large, arch=arch)
    state = {"step", "parameters", "slots", "statistics", "sums", *low.words, *OWNED}
    for part in (
        *([*low.run_begin, *low.prologue, *low.initialise, *low.staged, *low.begin, *shard] for shard in low.shards),
        [*low.evaluation_begin, *low.evaluation],
    ):
        written = set(state)
        for launch in part:
            for argument in launch.entry.arguments:
                value = launch.values[argument.name]
                if isinstance(value, (At, Map)) and argument.ctype.startswith("const "):
                    assert value.array in written, f"{launch.entry.name} reads {value.array}"
            for argument in launch.entry.arguments:
                value = launch.values[argument.name]
                if isinstance(value, At) and argument.is_pointer and not argument.ctype.startswith("const "):
                    written.add(value.array)


def touched(launch: Launch, name: str) -> tuple[str, float, float]:
    """The array that an argument points to, and where in it what is read or written begins and ends at the most."""
    value = launch.values[name]
    assert isinstance(value, (At, Map))
    k, n = launch.values.get("k"), launch.values.get("n")
    sizes = {"w": (k, n), "weight": (k, n), "weight_slots": (k, n), "b": (n,), "bias": (n,), "bias_slots": (n,)}
    if not isinstance(value, At) or name not in sizes:
        return value.array, 0, math.inf
    return value.array, value.offset, value.offset + math.prod(cast("tuple[int, ...]", sizes[name]))


@given(plans(), ARCHITECTURES)
def test_what_overlaps_reads_nothing_that_is_being_written(plan: Plan, arch: str) -> None:
    """Of a step's first launch, by the one that ends the step before; and of the stream that others run beside."""
    low = on_tensor_cores(plan, arch=arch)
    steps = [[*low.begin, *shard, *low.finish] for shard in low.shards]
    for part in (*steps, low.evaluation):
        part = [launch for launch in part if not launch.on_side_stream]
        for before, launch in zip([part[-1], *part], part, strict=False):
            if not launch.pdl:
                continue
            assert launch.entry.prefetched is not None and (part == low.evaluation or len(low.shards) == 1)
            mask = launch.values.get("prefetch", 0)
            written = written_by(before)
            for name, bit in launch.entry.prefetched:
                if not isinstance(launch.values[name], (At, Map)) or (bit and not mask & bit):
                    continue
                array, begin, end = touched(launch, name)
                assert not any(array == a and begin < e and b < end for a, b, e in written), (launch, before)
    assert not any(launch.pdl for launch in (*low.run_begin, *low.prologue, *low.initialise, *low.staged))
    assert not low.evaluation or not low.evaluation[0].pdl


def written_by(launch: Launch) -> list[tuple[str, float, float]]:
    return [
        touched(launch, argument.name)
        for argument in launch.entry.arguments
        if isinstance(launch.values[argument.name], At) and argument.is_pointer
        if not argument.ctype.startswith("const ")
    ]


@given(plans(), ARCHITECTURES)
def test_launches_beside_an_update_touch_nothing_that_it_touches(plan: Plan, arch: str) -> None:
    """But both may read the same; the step that follows begins behind both streams."""
    low = on_tensor_cores(plan, arch=arch)
    for shard in low.shards:
        for number, update in enumerate(shard):
            if not update.on_side_stream:
                continue
            for launch in shard[number + 1 :]:
                for one, other in ((update, launch), (launch, update)):
                    read = [
                        touched(other, name) for name, value in other.values.items() if isinstance(value, (At, Map))
                    ]
                    for array, begin, end in written_by(one):
                        assert not any(array == a and begin < e and b < end for a, b, e in read), (update, launch)
        joins = any(launch.on_side_stream for launch in shard)
        assert not (joins and [*low.finish, *low.begin, *shard][0].pdl)


def test_products_read_what_was_there_before_the_launch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product's operands A and B and what its end reads, 1, 2 and 4."""
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    low = lowered(tensor_plan(precision="bfloat16"), arch="sm_90a")
    prefetch = [launch.values.get("prefetch") for launch in low.shards[0]]
    # Two updates run beside others, behind all of which what ends the step begins.
    assert [launch.on_side_stream for launch in low.shards[0]] == [False] * 3 + [True, False] * 2
    assert [launch.pdl for launch in low.shards[0]] == [not launch.on_side_stream for launch in low.shards[0]]
    assert [launch.pdl for launch in low.finish] == [False]
    assert list(zip(families(low.shards[0]), prefetch, strict=True)) == [
        ("tensor_forward_relu_bfloat16", 3),  # biases have just moved
        ("tensor_forward_gelu_bfloat16", 6),
        ("head_softmax_cross_entropy_index", None),
        ("dense_backward_update_Momentum_small_n", None),
        ("tensor_backward_input_relu_bfloat16", 6),  # dz is the head's
        ("tensor_backward_update_Momentum_bfloat16", 0),
        ("tensor_backward_update_Momentum_bfloat16", 5),
    ]
    scaled = families(with_scales(tensor_plan(precision="tf32"), arch="sm_90a").shards[0])
    split = scaled.index("split_columns_half")  # products wait for it, and none for the narrow update
    assert scaled[split + 1] == "dense_backward_update_Momentum_small_n"
    apart = lowered(tensor_plan(precision="bfloat16", shards=2), arch="sm_90a")
    assert not any(launch.pdl for shard in apart.shards for launch in shard)


@pytest.mark.usefixtures("plain_launches")
def test_a_small_plan_in_full() -> None:
    layers = [Dense(64, 128, "relu"), Dropout(0.1), Dense(128, 64, "gelu"), Dense(64, 10)]
    optimizer = OPTIMIZERS["Adam"](0.1, clip_norm=1.0)
    low = lowered(make_plan(layers, loss="softmax_cross_entropy", optimizer=optimizer, shards=2), source="uint8")
    assert names(low.shards[0]) == names(low.shards[1])
    assert names(low.shards[0]) == [
        "gather_uint8",
        "dense_forward_dropped_relu_32x32",
        "dense_forward_gelu_32x32",
        "head_softmax_cross_entropy_index_columns_2",  # the last layer, the loss, and dx with the derivative of gelu
        "dense_backward_weight_32x32",
        "dense_backward_input_relu_32x32",  # with the zeros that the dropout left
        "dense_backward_weight_32x32",
        "dense_backward_weight_32x32",
    ]
    assert names(low.finish) == ["total_error", *["reduce"] * 6, "squares", "clip", "update_Adam"]
    assert names(low.evaluation) == [
        "gather_uint8",
        "dense_forward_relu_32x32",
        "dense_forward_gelu_32x32",
        "dense_forward_identity_32x32",
        "loss_softmax_cross_entropy_index",
        "output_softmax",
    ]


@pytest.mark.usefixtures("plain_launches")
def test_a_plan_that_updates_in_place() -> None:
    layers = [Dense(64, 128, "relu"), Dense(128, 10)]
    low = lowered(make_plan(layers, loss="softmax_cross_entropy"))
    assert names([*low.shards[0], *low.finish]) == [
        "dense_forward_relu_32x32",  # and the gather
        "head_softmax_cross_entropy_index_columns_2",  # the last layer, the loss, the total error, and dx
        "dense_backward_update_Momentum_few_columns",
        "dense_backward_update_Momentum_small_n",
    ]
    assert low.bytes["partials"] == 0 and "x" not in low.bytes


@pytest.mark.usefixtures("plain_launches")
def test_dx_is_made_before_the_weights_that_it_reads_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "UPDATES_ARE_GROUPED", False)
    low = lowered(make_plan([Dense(64, 128, "relu"), Dense(128, 300, "tanh"), Dense(300, 64)], capacity=300))
    assert names(low.shards[0])[3:] == [
        "loss_squared_error_dense",  # the last layer is too wide for the head
        "dense_backward_input_tanh_32x32",
        "dense_backward_update_Momentum_small_n",
        "dense_backward_input_relu_32x32",
        "dense_backward_update_Momentum_small_n",
        "dense_backward_update_Momentum_small_n",
    ]


@pytest.mark.usefixtures("plain_launches")
def test_the_kernel_of_an_update_follows_the_shape() -> None:
    def kinds(capacity: int, k: int, n: int) -> list[str]:
        low = lowered(make_plan([Dense(k, n), Dense(n, 3)], capacity=capacity))
        updates = (name for name in names(low.shards[0]) if "_update_" in name)
        return ["few_rows" if "_few_rows_" in name else name.split("Momentum_")[1] for name in updates]

    assert kinds(1024, 1024, 1024) == ["small_n", "128x64"]
    assert kinds(128, 90_000, 90) == ["small_n", "128x96"]
    assert kinds(64, 90, 90) == ["few_columns", "small_n"]
    assert kinds(8, 90_000, 90) == ["few_columns", "few_rows"]
    assert kinds(8, 90_000, 600) == ["few_columns", "128x128"]


@pytest.mark.parametrize(
    "options, arch, expected",
    [
        ({}, "sm_80", True),
        ({"precision": "tf32"}, "sm_90a", True),
        ({}, "sm_75", False),
        ({"precision": "float32-ieee"}, "sm_80", False),
        ({"reduction": "atomic"}, "sm_80", False),
        ({"capacity": 8}, "sm_80", False),  # few rows
    ],
)
def test_products_of_split_operands(options: dict[str, Any], arch: str, expected: bool) -> None:
    """In a step alone; and not of narrow layers."""
    for n, wide in ((90, True), (48, False)):
        low = lowered(make_plan([Dense(90_000, n, "relu"), Dense(n, 10)], **{"capacity": 128, **options}), arch=arch)
        split = [
            name
            for name in names(low.shards[0])
            if "split_k_split" in name or "large_k" in name or "_split_sm80" in name
        ]
        product = "split_sm90_128x96" if arch == "sm_90a" else "split_sm80_64x96"
        update = "large_k" if arch == "sm_90a" and options.get("capacity", 128) <= 128 else "split_sm80_64x96"
        wanted = [f"dense_forward_split_k_{product}", f"dense_backward_update_Momentum_{update}"]
        assert split == (wanted if expected and wide else [])
        assert not any("split_k_split" in name for name in names(low.evaluation))


@pytest.mark.usefixtures("plain_launches")
@given(st.integers(1, 9000), st.integers(1, 64), st.sampled_from(["identity", "tanh"]), st.integers(1, 2))
def test_the_head_is_a_short_narrow_layer_without_an_activation(k: int, n: int, activation: str, shards: int) -> None:
    low = lowered(make_plan([Dense(3, k), Dense(k, n, activation)], shards=shards))
    is_head = any(name.startswith("head_") for name in names(low.shards[0]))
    assert is_head == (n <= 32 and k < 4096 and activation == "identity")
    assert not any(name.startswith("head_") for name in names(low.evaluation))


def test_what_comes_between_keeps_updates_apart() -> None:
    layer = Dense(8, 8, "relu")
    clipped = OPTIMIZERS["SGD"](0.1, clip_norm=1.0)
    assert updates_in_place(make_plan([layer, Dense(8, 8)]))
    for layers, options in (
        ([layer, Dense(8, 8)], {"shards": 2}),
        ([layer, Dense(8, 8)], {"reduction": "atomic"}),
        ([layer, Dense(8, 8)], {"optimizer": clipped}),
        ([layer, layer], {}),
        ([LocallyConnected(8, 1), layer], {}),
    ):
        plan = make_plan(layers, **options)
        assert not updates_in_place(plan)
        assert names(lowered(plan).finish)[-1].startswith("update_")


@pytest.mark.usefixtures("plain_launches")
def test_an_input_that_others_read_is_gathered() -> None:
    """Only products fetch their rows by themselves, of numbers and not of bytes."""
    layers = [Dense(8, 8, "relu"), Dense(8, 8)]

    def first(layers: Sequence[Layer], source: str, **options: object) -> str:
        return names(lowered(make_plan(layers, **options), source=source).shards[0])[0]

    assert first(layers, "float32") == "dense_forward_relu_32x32"
    assert first(layers, "uint8") == "gather_uint8"
    assert first([Standardize(8), *layers], "float32") == "gather_float32"
    assert first([Dropout(0.5), *layers], "float32") == "gather_float32"
    assert first(layers[:1], "float32") == "dense_forward_relu_32x32"
    assert first(layers, "float32", reduction="atomic") == "gather_float32"


def tensor_plan(**options: object) -> Plan:
    """Two layers for tensor cores, and one that is too narrow."""
    layers = [Dense(512, 512, "relu"), Dense(512, 512, "gelu"), Dense(512, 10)]
    return make_plan(layers, **{"capacity": 1024, "loss": "softmax_cross_entropy", **options})


def families(part: list[Launch]) -> list[str]:
    """Names without tiles."""
    return [re.sub(r"(_sm\d\d)?_\d+x\d+(_across_\d)?$", "", name) for name in names(part)]


def test_operands_with_scales_are_split_before_each_product() -> None:
    low = with_scales(tensor_plan(precision="float32"), arch="sm_80")
    pair = "half_pair"
    assert families(low.begin) == ["mask_words", f"split_weights_{pair}"]  # two weights at once
    assert families(low.begin) == families(low.evaluation_begin)
    # A run and an evaluation begin with no flags; a step keeps those that nearly all columns have.
    masks = [launches[0].values["mask"] for launches in (low.run_begin, low.evaluation_begin, low.begin)]
    assert masks == [0, 0, kernels.NONZERO]
    layers = [f"split_rows_{pair}", f"tensor_forward_relu_{pair}", f"split_rows_{pair}", f"tensor_forward_gelu_{pair}"]
    assert families(low.evaluation)[:4] == layers
    fetching, reading = (low.evaluation[place].values for place in (0, 1))  # there is no gather
    assert (fetching["x"], fetching["order"], fetching["copy"]) == (At("data"), At("order"), At("x"))
    assert reading["x"] == At("x")
    of_bytes = with_scales(tensor_plan(precision="float32"), source="uint8", arch="sm_80")
    assert names(of_bytes.evaluation)[0] == "split_rows_uint8_half_pair"  # it also makes numbers of them
    assert of_bytes.evaluation[0].values["copy"] == At("x")
    weight = [f"split_columns_{pair}", f"tensor_backward_update_Momentum_{pair}"]
    backward = [name for name in families(low.shards[0]) if "backward" in name or "split" in name][2:]
    # The head leaves the exponents of rows, so that one pass makes the components for both products.
    (head,) = (launch for launch in low.shards[0] if launch.entry.name.startswith("head"))
    both, _ = (launch.values for launch in low.shards[0] if launch.entry.name.startswith("split_columns"))
    assert head.values["dx_row_scales"] == both["row_scales"] == At("dy1.row_scales") and both["row_components"] == At(
        "dy1.components"
    )
    assert [name for name in backward if not name.startswith("dense")] == [
        *(weight[0], f"tensor_backward_input_relu_{pair}", weight[1]),
        *(f"split_rows_{pair}", *weight),
    ]
    # Of the first layer's delta the sizes of rows alone are wanted.
    assert [launch.values["components"] for launch in low.shards[0] if "split_rows" in launch.entry.name][-1] is None


def test_products_write_operands_of_bfloat16_where_tensor_cores_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    low = lowered(tensor_plan(precision="bfloat16"), arch="sm_90a")
    first, second = (launch for launch in low.shards[0] if launch.entry.name.startswith("tensor_forward"))
    assert (first.values["y"], first.values["y_components"]) == (None, At("y0.components"))
    assert (second.values["y"], second.values["y_components"]) == (At("y1"), None)  # the last layer reads it
    (dx,) = (launch for launch in low.shards[0] if launch.entry.name.startswith("tensor_backward_input"))
    assert (dx.values["saved"], dx.values["saved_components"]) == (None, At("y0.components"))
    assert (dx.values["dx"], dx.values["dx_components"]) == (None, At("dy0.components"))
    (split,) = low.staged
    assert (split.values["x"], split.values["order"]) == (At("data"), At("order"))  # there is no gather
    assert "split_rows_bfloat16" not in names(low.shards[0])
    # Components (1024, 512) of as many steps as 16 MiB hold.
    assert (low.stages, low.staged_bytes, low.bytes["x.components"]) == (16, {"x.components": 1 << 20}, 16 << 20)
    assert not {"x", "y0", "dy1"} & set(low.bytes)
    (head,) = (launch for launch in low.shards[0] if launch.entry.name.startswith("head"))
    assert (head.values["dx"], head.values["dx_components"]) == (None, At("dy1.components"))
    # Updates write the weights' components, so they are split before the first of many steps only.
    assert names(low.run_begin) == ["split_weights_bfloat16"] and not low.begin
    updates = [launch for launch in low.shards[0] if launch.entry.name.startswith("tensor_backward_update")]
    assert [launch.values["w_components"] for launch in updates] == [
        At("1.weight.components"),
        At("0.weight.components"),
    ]
    apart = lowered(tensor_plan(precision="bfloat16", shards=2), arch="sm_90a")
    assert names(apart.begin) == ["split_weights_bfloat16"] and not apart.run_begin
    assert [launch.values["components"] for launch in apart.staged] == [At("x.components"), At("x.components@1")]
    assert apart.stages == 16 and apart.bytes["x.components@1"] == 8 << 20
    of_bytes = lowered(tensor_plan(precision="bfloat16"), source="uint8", arch="sm_90a")
    (split,) = of_bytes.staged
    assert (split.entry.name, split.values["scale"]) == ("split_rows_uint8_bfloat16", At("scale"))
    assert of_bytes.stages == 16 and "x" not in of_bytes.bytes


@pytest.mark.parametrize("activation", ["gelu", "tanh", "relu"])
def test_products_end_with_dropouts_and_go_back_through_them(activation: str) -> None:
    layers = [Dense(512, 512, activation), Dropout(0.2), Dense(512, 512, "relu"), Dense(512, 10)]
    low = lowered(make_plan(layers, capacity=1024, loss="softmax_cross_entropy", precision="bfloat16"), arch="sm_90a")
    assert not [name for name in names(low.shards[0]) if name.startswith(("dropout", "split", "activation"))]
    forward, back = (
        next(launch.values for launch in low.shards[0] if launch.entry.name.startswith(f"tensor_{kind}_{activation}"))
        for kind in ("forward_dropped", "backward_input" + "_dropped" * (activation != "relu"))
    )
    saves_z = activation == "gelu"
    assert (forward["z"], forward["y"], forward["y_components"]) == (
        At("z0") if saves_z else None, None, At("y1.components"),
    )  # fmt: skip
    assert "y0" not in low.bytes and "y1" not in low.bytes
    mask = At("kept elements@0")
    assert (forward["kept"], forward["keep"]) == (mask, 1.25) and back["keep"] == 1.25
    # The zeros of a ReLU that a dropout follows are both's; where a derivative takes y, it is what the dropout left.
    assert back["kept"] == (None if activation == "relu" else mask)
    assert back["restore"] == (0.8 if activation == "tanh" else 1.0)
    assert back["saved"] == (At("z0") if saves_z else None)
    assert back["saved_components"] == (None if saves_z else At("y1.components"))
    assert back["dx_components"] == At("dy0.components")


def test_dropouts_of_several_steps_are_drawn_by_one_launch() -> None:
    layers = [Dense(96, 70, "tanh"), Dropout(0.2), Dense(70, 33, "gelu"), Dropout(0.5), Dense(33, 40)]
    options = {"loss": "softmax_cross_entropy", "capacity": 100, "reduction": "fast", "shards": 2}
    low = lowered(make_plan(layers, **options))
    assert [launch.entry.name for launch in low.staged] == ["draw_dropouts"] * 2
    for shard, launch in enumerate(low.staged):
        words = [50 * ceil_div(n, 32) for n in (70, 33)]
        assert low.staged_bytes[f"kept elements@{shard}"] == 4 * sum(words) and launch.values["words"] == sum(words)
        assert low.bytes[f"kept elements@{shard}"] == low.stages * 4 * sum(words)
        assert low.words["drawn dropouts"] == (1, 70, least_kept(0.2), 0, 3, 33, least_kept(0.5), words[0])
        read = [each.values["kept"] for each in low.shards[shard] if each.values.get("kept")]
        places = [At(f"kept elements@{shard}", begin) for begin in (0, words[0])]
        assert read == [*places, *places[::-1]]


@pytest.mark.usefixtures("plain_launches")
@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ([Dense(40, 33, "tanh"), Dropout(0.2), Dropout(0.3), Dense(33, 40)], "the second one is not a product's"),
        ([Dropout(0.2), Dense(40, 33), Dense(33, 40)], "of inputs"),
    ],
)
def test_other_dropouts_are_launches(layers: list[Layer], why: str) -> None:
    low = lowered(make_plan(layers, loss="softmax_cross_entropy", capacity=100, reduction="fast"))
    assert "dropout" in names(low.shards[0]), why


@pytest.mark.usefixtures("plain_launches")
def test_a_last_product_ends_with_its_loss_where_operands_have_no_scales() -> None:
    first, last = Dense(512, 512, "relu"), Dense(512, 512)

    def step(*layers: Layer, **options: object) -> Lowered:
        plan = make_plan(layers, **{"capacity": 1024, "precision": "bfloat16", **options})
        return lowered(plan, arch="sm_90a")

    low = step(first, last)
    ending, following = low.shards[0][1:3]
    assert ending.entry.name.startswith("tensor_forward_loss_squared_error_bfloat16_sm90_")
    assert (ending.operation, following.operation) == ("2 Dense", "4 DenseBackward")
    assert ending.values["delta_components"] == At("dy1.components") and "dy1" not in low.bytes
    assert (ending.values["sums"], ending.values["totals"]) == (At("sums"), At("totals"))
    assert families(low.evaluation)[-3:-1] == ["tensor_forward_identity_bfloat16", "loss_squared_error_dense"]
    parts = step(first, last, shards=2)
    sums = [shard[1].values["sums"] for shard in parts.shards]
    assert sums == [At("sums"), At("sums", 2 * math.prod(parts.shards[0][1].grid))]
    assert names(parts.finish)[0] == "total_error"
    for apart in (
        step(first, last, precision="tf32"),  # a row's exponent is known when the row is whole
        step(first, last, loss="softmax_cross_entropy", target_kind="dense"),
        step(first, Dense(512, 512, "tanh")),
        step(first, Dense(512, 516)),
        step(first, last, Standardize(512)),
    ):
        assert sum(name.startswith("loss_") for name in names(apart.shards[0])) == 1


@pytest.mark.usefixtures("plain_launches")
def test_products_for_gradients_leave_partial_sums_of_biases_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "TENSOR_UPDATES_ARE_GROUPED", False)
    low = lowered(tensor_plan(precision="bfloat16"), arch="sm_90a")
    assert "sum_deltas_bfloat16" not in names(low.shards[0]) and names(low.finish) == ["update_biases_Momentum"]
    updates = [launch for launch in low.shards[0] if launch.entry.name.startswith("tensor_backward_update")]
    assert all(launch.entry.name.endswith("_64x128") for launch in updates)  # 8 tiles, 3 sums of each
    assert all(launch.values[name] is None for launch in updates for name in ("db", "bias", "bias_slots"))
    assert [launch.values["db_partials"] for launch in updates] == [At("bias partials"), At("bias partials", 24 * 512)]
    assert low.bytes["bias partials"] == 2 * 4 * 24 * 512
    first, second = 512 * 512, 512 * 512 + 512 + 512 * 512  # where biases lie among the parameters
    assert low.words["biases of partials"] == (0, 24, 512, 512, second, 0, 24 * 512, 24, 512, 512, first, 0)
    (update,) = low.finish
    assert update.grid == (4, 1, 1) and update.values["count"] == 2
    # On cards without those products gradients are sums of the components' columns.
    before = lowered(tensor_plan(precision="bfloat16"), arch="sm_80")
    assert names(before.shards[0]).count("sum_deltas_bfloat16") == 2 and not before.words


CLIPPED = OPTIMIZERS["SGD"](0.1, clip_norm=1.0)


@pytest.mark.parametrize(("shards", "optimizer"), [(1, CLIPPED), (2, OPTIMIZERS["Adam"](0.1))])
def test_a_launch_adds_up_what_products_leave_of_gradients_that_are_kept(
    shards: int, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "BIAS_PARTIALS_LEAST_ROWS", 1)
    plan = tensor_plan(precision="bfloat16", optimizer=optimizer, shards=shards)
    low = lowered(plan, arch="sm_90a")
    for number, shard in enumerate(low.shards):
        assert not any(name.startswith("sum_deltas") for name in names(shard))
        assert names(shard)[-1] == "sum_biases" and names(shard).count("sum_biases") == 1
        described, of_shard = shard[-1].values["described"], f"@{number}" * (number > 0)
        assert described == At(f"biases of partials{of_shard}")
        left = [launch.values["db_partials"] for launch in shard if "db_partials" in launch.values]
        assert {at.array for at in left if isinstance(at, At)} == {f"bias partials{of_shard}"}
        known = low.words[f"biases of partials{of_shard}"]
        kept = [shard[-1].values["gradients"], *(launch.values["dw"] for launch in shard if "dw" in launch.values)]
        assert {at.array for at in kept if isinstance(at, At)} == {"partials"}
        pitch = low.bytes["partials"] // 4 // shards
        assert {offset // pitch for offset in known[4::6]} == {number}
    (clipped_too,) = lowered(tensor_plan(precision="bfloat16", optimizer=CLIPPED, shards=2), arch="sm_90a").shards[:1]
    assert summed_layers(clipped_too) == [2]


def test_few_rows_of_two_shards_leave_no_partial_sums() -> None:
    """What the other one of two ranks waits for would come behind all products."""
    low = lowered(tensor_plan(precision="bfloat16", shards=2), arch="sm_90a")
    assert all(summed_layers(shard) == [2] for shard in low.shards) and not low.words


def test_sums_of_deltas_are_launched_together_but_before_what_reads_one() -> None:
    """Products that move weights move biases as well, and stored gradients are read behind all launches of a shard."""
    moved = lowered(tensor_plan(precision="bfloat16"), arch="sm_80")
    assert summed_layers(moved.shards[0]) == [1, 1]
    for sums, read in itertools.pairwise(moved.shards[0]):
        if sums.entry.name.startswith("sum_deltas"):
            assert read.values.get("db") == sums.values["db"] or read.entry.name.startswith("tensor_backward_input")
    stored = lowered(tensor_plan(precision="bfloat16", shards=2), arch="sm_80")
    for number, shard in enumerate(stored.shards):
        assert summed_layers(shard) == [2] and shard[-1].entry.name.startswith("sum_deltas")
        arrays = {shard[-1].values[name].array for name in ("dz", "dz_1")}
        assert arrays == {f"{name}.components" + f"@{number}" * (number > 0) for name in ("dy0", "dy1")}, arrays


def summed_layers(launches: Sequence[Launch]) -> list[int]:
    """Of how many layers each launch sums the deltas."""
    made = [launch for launch in launches if launch.entry.name.startswith("sum_deltas")]
    return [sum(launch.values[f"dz{end}"] is not None for end in kernels.SUMMED_ENDS) for launch in made]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_on_compute_capability_9_products_take_maps_of_components(precision: str) -> None:
    low = lowered(tensor_plan(precision=precision), arch="sm_90a")
    assert len(low.maps()) == len(set(low.maps()))
    for map in low.maps():
        # Steps and evaluations may have operands of another format in one array.
        alike = [other for other in low.maps() if other.array == map.array]
        elements = max(2 * other.components * kernels.padded_columns(other.columns) * other.rows for other in alike)
        places = low.stages if map.array in low.staged_bytes else 1
        assert low.bytes[map.array] == elements * places and map.place < places
        assert map.rows % 128 == 0 < map.box[0] <= 256 and map.box[1] == 64
    products = [launch for launch in low.launches() if launch.entry.name.startswith("tensor")]
    for launch in products:
        sources = [value for value in launch.values.values() if isinstance(value, Map)]
        is_of_several = launch.entry.name.startswith("tensor_backward_updates_2")  # which move both weights
        assert len(sources) == (4 if is_of_several else 2) and launch.entry.needs == "sm_90a"
        assert launch.grid[0] <= 132 or is_of_several
        assert launch.grid[0] % launch.entry.cluster == 0
    assert not lowered(tensor_plan(precision=precision), arch="sm_80").maps()


@pytest.mark.usefixtures("plain_launches")
def test_tiles_of_sm90_follow_what_they_cost() -> None:
    """A product of few large tiles is made of small ones, and one of many of large ones."""
    for operand_format in OPERAND_FORMATS:
        large, small = kernels.sm90_tiles(operand_format)[0], kernels.sm90_tiles(operand_format)[-1]
        for m, n, best in (
            (8192, 4096, large),
            (4096, 4096, large),
            (2048, 2048, large),
            (1024, 1024, small),
            (1, 1, small),
        ):
            assert gemm_tile(operand_format, m, n, 1024, 132, "sm_90a")[0] == best
        others = set(kernels.sm80_tiles(operand_format))
        sizes = [(m, n) for m in (1, 9999) for n in (1, 9999)] if others else []
        assert {gemm_tile(operand_format, m, n, 1024, 132, "sm_100")[0] for m, n in sizes} == others


@pytest.mark.parametrize(
    "precision, arch, options",
    [
        ("float32-ieee", "sm_90a", {}),
        ("float32", "sm_75", {}),
        ("float32", "sm_90a", {"reduction": "atomic"}),
        ("float32", "sm_90a", {"capacity": 15}),
        ("float32", "sm_90a", {"capacity": 256, "shards": 4}),
    ],
)
def test_what_stays_on_plain_cores(precision: str, arch: str, options: dict[str, Any]) -> None:
    low = lowered(tensor_plan(precision=precision, **options), arch=arch)
    assert not any(launch.entry.name.startswith("tensor") for shard in low.shards for launch in shard)


def test_the_bits_of_a_row_do_not_follow_its_batch() -> None:
    """How an evaluation's products are made does not depend on the rows."""
    kinds = [families(lowered(tensor_plan(capacity=rows), arch="sm_90a").evaluation) for rows in (1, 255, 256, 5000)]
    assert all(kind == kinds[0] for kind in kinds) and any(name.startswith("tensor") for name in kinds[0])


@given(plans(), st.sampled_from(["float32", "uint8"]), ARCHITECTURES, st.booleans(), st.sampled_from([1, 33, 1000]))
def test_an_evaluation_of_fewer_rows_fits_the_arrays_of_the_plan(
    plan: Plan, source: str, arch: str, large: bool, rows: int
) -> None:
    limits = {**dict.fromkeys(LEAST, 1), "MOST_UNSCALED_WEIGHTS": 0 if large else 1 << 62}
    with patch.multiple(thresholds, **limits):
        plan = plan.with_capacity(2000)
        options: dict[str, Any] = {"multiprocessors": 132, "source": source, "arch": arch}
        whole, part = lower(plan, **options), lower_evaluation(plan, rows, **options)
    assert not part.shards and not part.run_begin
    assert [launch.operation for launch in part.evaluation_begin] == [
        launch.operation for launch in whole.evaluation_begin
    ]
    for launch in (*part.evaluation_begin, *part.evaluation):
        arrays = {value.array for value in launch.values.values() if isinstance(value, (At, Map))} - OWNED
        assert not arrays & part.words.keys()  # which are told what follows from the rows
        assert all(part.bytes[name] <= whole.bytes[name] for name in arrays)


def test_a_loss_alone_makes_no_predictions() -> None:
    low = lowered(make_plan([Dense(4, 3)], loss="softmax_cross_entropy"))
    assert names(low.evaluation) == [*names(low.loss_alone), "output_softmax"]
    assert low.loss_alone[-1].entry.name.startswith("loss")
    low = lowered(Network([Dense(4, 3)], seed=1).lower(capacity=8))  # a plan without a loss
    assert not any("Loss" in launch.operation for launch in low.evaluation)
    assert low.loss_alone == low.evaluation[:-1] and names(low.evaluation)[-1] == "output_identity"


def test_atomic_backward_is_one_kernel_on_what_was_cleared() -> None:
    low = lowered(make_plan([Dense(64, 128, "relu"), Dense(128, 10)], reduction="atomic"))
    backward = names(low.shards[0])[4:]
    assert backward == ["zero", "dense_backward_atomic", "activation_backward_relu", "dense_backward_atomic"]


def test_the_update_adds_shares_up_unless_something_comes_between() -> None:
    layers = [Dense(8, 8, "relu"), Dense(8, 8)]
    clipped = OPTIMIZERS["SGD"](0.1, clip_norm=1.0)
    assert "reduce" not in names(lowered(make_plan(layers, shards=3)).finish)
    assert "reduce" not in names(lowered(make_plan(layers, shards=1, optimizer=clipped)).finish)
    assert "reduce" in names(lowered(make_plan(layers, shards=3, optimizer=clipped)).finish)
    assert "reduce" in names(lowered(make_plan([layers[0], layers[0]])).finish)


@pytest.mark.usefixtures("plain_launches")
def test_an_activations_derivative_is_taken_in_by_the_product_before_it() -> None:
    low = lowered(make_plan([Dense(4, 4, "tanh"), Dense(4, 4, "silu"), Dense(4, 4)]))
    products = [launch for launch in low.shards[0] if launch.values.get("dx")]
    # silu saves z, tanh y.
    assert [launch.values["saved"] for launch in products] == [At("z1"), At("y0")]
    assert [launch.entry.name.partition("_")[0] for launch in products] == ["head", "dense"]
    assert not any(name.startswith("activation_backward") for name in names(low.shards[0]))


def test_what_a_fused_or_unneeded_operation_would_keep_is_not_stored() -> None:
    low = lowered(make_plan([Dense(4, 4, "relu"), Dense(4, 4), Standardize(4)]))
    assert not {"target", "row_weight", "value", "gradient", "z0"} & set(low.bytes)


@pytest.mark.parametrize(
    "k, n, expected",
    [(4095, 10, None), (4096, 513, None), (4096, 10, 256), (90000, 90, 352), (2**24, 512, 2**18)],
)
def test_parts_of_a_long_product(k: int, n: int, expected: int | None) -> None:
    assert (part_length(k, n) if is_cut(k, n) else None) == expected


@given(st.integers(1, 2**24), st.integers(1, 1024))
def test_parts_cover_the_product(k: int, n: int) -> None:
    if is_cut(k, n):
        assert 2 <= math.ceil(k / part_length(k, n)) <= thresholds.MOST_PARTS


@given(st.sampled_from([1, 64, 5000]), st.integers(1, 3), st.sampled_from([1, 20, 132]))
def test_the_order_of_sums_follows_the_widths_alone(capacity: int, shards: int, multiprocessors: int) -> None:
    """Neither rows nor the card change how a product along k is cut."""
    layers = [Dense(5000, 30, "relu"), Dense(30, 10)]
    low = lowered(make_plan(layers, capacity=capacity, shards=shards), multiprocessors)
    for part in (*low.shards, low.evaluation):
        cuts = [
            (launch.values["part"], launch.grid[2])
            for launch in part
            if launch.entry.name.startswith(("dense_forward_split_k", "dense_forward_few_rows"))
        ]
        sums = [
            launch.values["count"]
            for launch in part
            if launch.entry.name.startswith(("dense_forward_sum_partials", "tail"))
        ]
        assert (cuts, sums) == ([(256, 20)], [20])


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 148))
def test_tiles_fill_the_card_or_are_the_smallest(m: int, n: int, multiprocessors: int) -> None:
    tile, _ = simt_tile(m, n, multiprocessors)
    blocks = {t: math.ceil(m / t.m) * math.ceil(n / t.n) for t in TILES}
    filling = [t for t in TILES if 10 * blocks[t] >= 9 * multiprocessors] or [TILES[-1]]
    work = {t: blocks[t] * t.m * t.n for t in TILES}
    assert all(8 * work[tile] <= 9 * work[t] for t in filling)
    assert all(8 * work[t] > 9 * min(work[u] for u in filling) for t in filling[: filling.index(tile)])


# --- whole steps, on the host ---


TIERED: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "multiply-adds": ([Dense(40, 70, "tanh"), Dense(70, 5)], {"loss": "softmax_cross_entropy"}),
    "tensor cores": ([Dense(40, 70, "relu"), Dense(70, 66)], {"precision": "tf32"}),
}


@pytest.mark.parametrize("case", TIERED)
def test_launches_for_fewer_rows_give_a_batch_the_same_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions, and the loss, by launches of another tile and grid, on arrays that are left as they were."""
    for name in LEAST if case == "tensor cores" else ():
        monkeypatch.setattr(thresholds, name, 1)
    monkeypatch.setattr(thresholds, "FILLING_TENTHS", 1)
    layers, options = TIERED[case]
    network, rows = Network(layers, seed=3), 27
    plan = network.lower(capacity=600, **{"loss": "squared_error", **options}, optimizer=OPTIMIZERS["Momentum"](0.1))
    random = np.random.default_rng(5)
    y = np.arange(rows) % 5 if plan.target_kind == "index" else random.normal(size=(rows, plan.n_out))
    data = Dataset(random.normal(size=(rows, 40)).astype(np.float32), y, random.uniform(0.5, 2.0, rows))
    program = HostProgram(plan, data, Sampling(rows, rows, seed=1))
    program.load(network.state(plan.optimizer))
    expected = program.evaluate()[:rows].copy(), program.arrays["losses"][:2].copy()
    assert np.isfinite(expected[0]).all() and np.isfinite(expected[1]).all()
    whole, tiles = program.low, set()
    for tier in (32, 64, 600):
        part = lower_evaluation(plan, tier, multiprocessors=2, source="float32", arch="sm_80")
        tiles.add((part.evaluation[0].grid, part.evaluation[0].entry.name, part.evaluation[-1].grid))
        found = program.evaluate(part)[:rows], program.arrays["losses"][:2]
        for mine, known in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, known)
    assert len(tiles) == 3 and whole.evaluation == part.evaluation
    network.output = plan.loss.output if plan.loss is not None else network.output
    np.testing.assert_allclose(expected[0], network.predict(data.x, backend="cpu"), rtol=0, atol=2e-2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_in", [9, 4100], ids=["head", "tail"])
def test_a_step_that_ends_with_the_gradient_keeps_outputs(n_in: int, precision: str) -> None:
    """In a training step one kernel makes the last layer and the loss, or all layers behind a long one."""
    options = {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["SGD"](1.0)}
    dropout = [Dropout(0.3)] if n_in < 10 else []
    epoch = Epoch([Dense(n_in, 7, "tanh"), *dropout, Dense(7, 3)], options, rates=[1.0, 1.0])
    plan = dataclasses.replace(epoch.plan, precision=precision).to_gradient()
    host = HostProgram(plan, epoch.data, epoch.sampling)
    host.load(epoch.state)
    before = host.parameters.astype(np.float64)
    ((_, weight),) = host.run(epoch.rates[:1])
    np.testing.assert_array_equal(host.parameters, before)

    with numpy_alone():
        exact = get_backend("cpu").compile(dataclasses.replace(epoch.plan, precision="float64"), threads=1)
    exact.load(epoch.state)
    exact.attach(epoch.data, epoch.sampling)
    exact.run(0, epoch.rates[:1])  # leaves what it computed in the program's arrays
    for y in plan.outputs().values():
        bound = (n_in + 32) * EPS32 * abs(exact._work.arrays[y]).max()
        assert abs(host.arrays[y].reshape(exact._work.arrays[y].shape) - exact._work.arrays[y]).max() <= bound
    gradient, expected = host.arrays["gradient"] / weight, before - exact.read().parameters[0]
    assert abs(gradient - expected).max() <= (n_in + 64) * EPS32 * abs(expected).max()


TIED = Dense(8, 8, "gelu")
STACK = LocallyConnected(12, 4, "silu", bias="layer")
FROZEN, FROZEN_TIED, FROZEN_STACK = (
    Dense(9, 8, "relu", trainable=False),
    dataclasses.replace(TIED, trainable=False),
    dataclasses.replace(STACK, trainable=False),
)
STEPS: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "shards": (
        [Dense(9, 7, "tanh"), Dropout(0.3), Dense(7, 8, "silu", bias=False), Dense(8, 3)],
        {"loss": "softmax_cross_entropy", "shards": 3, "optimizer": OPTIMIZERS["Adam"](0.05, l2=0.1, alpha=1.0)},
    ),
    "tied, clipped, standardized": (
        [Standardize(9), Dense(9, 8, "relu"), TIED, Dropout(0.2), TIED, Dense(8, 3), Standardize(3)],
        {"shards": 2, "optimizer": OPTIMIZERS["Nesterov"](0.1, clip_norm=0.1)},
    ),
    "locally connected": (
        [LocallyConnected(9, 3, "tanh"), Dense(7, 12), STACK, STACK, LocallyConnected(6, 4, bias=None)],
        {"loss": "softmax_cross_entropy", "shards": 2, "optimizer": OPTIMIZERS["Adam"](0.05, clip_norm=0.5)},
    ),
    "cut along k": ([Dense(4100, 5, "sigmoid"), Dense(5, 3, "elu")], {"loss": Huber(0.5), "shards": 2}),
    "few rows, and a tail": (
        [Dense(4100, 64, "gelu"), Dense(64, 9, "tanh", bias=False), Dense(9, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Nesterov"](0.01, l2=0.1)},
    ),
    "few rows, and a tail, penalized": (
        [Dense(4100, 64, "gelu"), Dense(64, 9, "tanh"), Dense(9, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.01, alpha=1.0)},
    ),
    "frozen below and between": (
        [Standardize(9), FROZEN, Dense(8, 7, "gelu"), Dense(7, 8, "silu", trainable=False), Dense(8, 3)],
        {"loss": "softmax_cross_entropy", "shards": 2, "optimizer": OPTIMIZERS["Adam"](0.05, l2=0.1, clip_norm=0.5)},
    ),
    "frozen where products update": (
        [FROZEN, Dropout(0.2), Dense(8, 7, "gelu"), Dense(7, 8, "silu", trainable=False), Dense(8, 3, trainable=False)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.05, l2=0.1, alpha=1.0)},
    ),
    "frozen and cut along k": (
        [Dense(4100, 65, "relu", trainable=False), Dense(65, 7, "tanh"), Dense(7, 3, trainable=False)],
        {"loss": Huber(0.5)},
    ),
    "frozen and tied": (
        [Dense(9, 8), FROZEN_TIED, Dropout(0.2), FROZEN_TIED, Dense(8, 3), Standardize(3)],
        {"optimizer": OPTIMIZERS["Nesterov"](0.1, clip_norm=0.1)},
    ),
    "frozen and locally connected": (
        [Dense(9, 12), FROZEN_STACK, FROZEN_STACK, LocallyConnected(6, 4, bias=None)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.05)},
    ),
    "frozen and atomic": (
        [Dense(9, 40, "gelu"), Dense(40, 36, "relu", trainable=False), Dense(36, 3)],
        {"loss": "binary_cross_entropy", "reduction": "atomic", "optimizer": OPTIMIZERS["RMSprop"](0.01)},
    ),
    "few rows": ([Dense(4100, 65, "relu"), Dropout(0.3), Dense(65, 3)], {"loss": Huber(0.5)}),
    "atomic": (
        [Dense(9, 40, "gelu"), Dense(40, 36, "relu"), Dense(36, 3)],
        {"loss": "binary_cross_entropy", "reduction": "atomic", "optimizer": OPTIMIZERS["RMSprop"](0.01)},
    ),
}


@pytest.mark.parametrize(
    "case",
    [case for case in STEPS if "frozen" not in case] + first_and_thorough(case for case in STEPS if "frozen" in case),
)
def test_an_epoch_as_on_the_cpu(case: str) -> None:
    """Two full batches and a last one of two rows; then predictions."""
    epoch = Epoch(*STEPS[case])
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling)
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    ours = (host.parameters, losses, host.evaluate())
    for parameter in epoch.plan.parameters:
        if not parameter.trainable:
            kept = slice(parameter.offset, parameter.end)
            np.testing.assert_array_equal(host.parameters[kept], epoch.state.parameters[0, kept])
            assert not host.slots(epoch.state.slots)[:, 0, kept].any()
    (state, *cpu), (exact_state, *exact) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    for got, value, oracle in zip(ours, (state.parameters[0], *cpu), (exact_state.parameters[0], *exact), strict=True):
        assert_as_exact(got, value, oracle)


TENSOR_STEPS: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "components from product to product": (
        [Dense(9, 40, "gelu"), Dense(40, 36, "relu"), Dense(36, 3)],
        {"loss": Huber(0.5)},
    ),
    "dropout between, shards": (
        [Standardize(9), Dense(9, 33, "tanh"), Dropout(0.3), Dense(33, 34, "silu", bias=False), Dense(34, 3, "tanh")],
        {"loss": "squared_error", "shards": 2},
    ),
    "dropped ReLUs": (
        [Dense(9, 40, "relu"), Dropout(0.5), Dense(40, 36, "relu"), Dropout(0.5), Dense(36, 3)],
        {"loss": Huber(0.5), "shards": 2},
    ),
    "frozen between": (
        [Dense(9, 40, "gelu"), Dense(40, 36, "relu", trainable=False), Dense(36, 3)],
        {"loss": Huber(0.5)},
    ),
    "frozen below and at the end": (
        [Dense(9, 40, "gelu", trainable=False), Dense(40, 36, "relu"), Dense(36, 72, trainable=False)],
        {"loss": Huber(0.5), "optimizer": OPTIMIZERS["Momentum"](0.1, clip_norm=0.1)},
    ),
    "a loss at the end": ([Dense(9, 40, "gelu"), Dense(40, 72)], {"loss": Huber(0.5)}),
    "penalized": (
        [Dense(9, 40, "gelu"), Dense(40, 72)],
        {"loss": Huber(0.5), "optimizer": OPTIMIZERS["Momentum"](0.1, alpha=1.0)},
    ),
    "a loss at the end, shards": ([Dense(9, 40, "tanh"), Dense(40, 16)], {"loss": "mean_squared_error", "shards": 2}),
    "tied, clipped": (
        [Dense(9, 33, "relu"), *[Dense(33, 33, "sigmoid")] * 2, Dense(33, 3)],
        {"loss": "squared_error", "optimizer": OPTIMIZERS["Momentum"](0.1, clip_norm=0.1)},
    ),
}


@pytest.mark.parametrize(
    "case, operand_format",
    [
        ("a loss at the end, shards", kernels.BFLOAT16),
        ("tied, clipped", kernels.BFLOAT16_PAIR),
        ("tied, clipped", kernels.BFLOAT16_TRIPLE),
        *first_and_drawn(
            [
                ("dropped ReLUs", kernels.HALF_PAIR),
                ("dropped ReLUs", kernels.BFLOAT16),
                ("dropout between, shards", kernels.HALF_PAIR),
                ("dropout between, shards", kernels.BFLOAT16),
                ("dropout between, shards", kernels.BFLOAT16_PAIR),
                ("tied, clipped", kernels.HALF),
                ("frozen between", kernels.HALF_PAIR),
                ("frozen between", kernels.BFLOAT16),
                ("frozen below and at the end", kernels.HALF),
                ("frozen below and at the end", kernels.BFLOAT16_PAIR),
                ("a loss at the end", kernels.BFLOAT16),
                ("penalized", kernels.BFLOAT16),
                *(("components from product to product", operand_format) for operand_format in OPERAND_FORMATS),
            ],
            1 / 3,
            "epochs on tensor cores",
        ),
    ],
)
def test_an_epoch_on_tensor_cores(case: str, operand_format: OperandFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    check_on_tensor_cores(*TENSOR_STEPS[case], operand_format, monkeypatch)


@pytest.mark.parametrize("operand_format", OPERAND_FORMATS, ids=lambda operand_format: operand_format.name)
def test_an_epoch_of_bytes_on_tensor_cores(operand_format: OperandFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that are no vectors, and a dropout behind an activation that keeps z."""
    layers = [Dense(13, 37, "silu"), Dropout(0.3), Dense(37, 35, "relu"), Dense(35, 3)]
    host = check_on_tensor_cores(layers, {"loss": Huber(0.5), "shards": 2}, operand_format, monkeypatch, as_bytes=True)
    launched = names(host.low.launches())
    assert f"split_rows_uint8_{operand_format.name}" in launched and "gather_uint8" not in launched
    assert "draw_dropouts" in launched and not {"dropout_backward_silu", "activation_backward_silu"} & set(launched)


def check_on_tensor_cores(
    layers: list[Layer],
    options: dict[str, Any],
    operand_format: OperandFormat,
    monkeypatch: pytest.MonkeyPatch,
    *,
    as_bytes: bool = False,
) -> HostProgram:
    """A full batch and one of two rows, every product on tensor cores; the rounding of all adds to each number."""
    for name in LEAST:
        monkeypatch.setattr(thresholds, name, 1)
    monkeypatch.setattr(thresholds, "WHOLE_BATCH_IS_USED", False)
    monkeypatch.setattr(thresholds, "MOST_UNSCALED_WEIGHTS", 0 if operand_format.scaled else 1 << 62)
    is_of_steps = operand_format == kernels.BFLOAT16_TRIPLE  # of one shard on sm_90a; evaluations have another one
    if is_of_steps:
        for name, value in OF_STEPS_ALONE.items():
            monkeypatch.setattr(thresholds, name, value)
        options = {**options, "shards": 1}
    epoch = Epoch(layers, options, rates=(0.1, 0.02), precision=PRECISION_OF[operand_format], as_bytes=as_bytes)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a" if is_of_steps else "sm_80")
    assert all(
        operand_format.name in launch.entry.name
        for launch in (itertools.chain(*host.low.shards) if is_of_steps else host.low.launches())
        if launch.entry.name.startswith("tensor")
    )
    assert not any(launch.entry.name.startswith("dense") for launch in host.low.launches())
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    state, *expected = epoch.on_cpu("float64")
    before = epoch.state.parameters[0]
    products = len(epoch.rates) * sum(launch.entry.name.startswith("tensor") for launch in host.low.launches())
    ours = (host.parameters - before, losses, host.evaluate())
    for got, value in zip(ours, (state.parameters[0] - before, *expected), strict=True):
        rounding = ERRORS[operand_format.struct] + 64 * EPS32  # of a product, and of its sum
        assert np.linalg.norm(got - value) <= np.sqrt(products) * rounding * np.linalg.norm(value)
    return host
