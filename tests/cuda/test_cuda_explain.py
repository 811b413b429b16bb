"""What a launch must do at least, computed from plans without a GPU, and how it is printed."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from helpers import EPS32
from hypothesis import given
from hypothesis import strategies as st
from shim_runner import Unwritten, run
from test_cuda_lowering import on_tensor_cores, plans

import mlpgpu as mg
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels.launches import At, Launch, Lowered, Map
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.profile import explain, predicted
from mlpgpu.backends.cuda.profile.costs import array_bytes, flops, lengths_of, moved_bytes
from mlpgpu.backends.cuda.profile.explain import Profile, gantt
from mlpgpu.backends.cuda.profile.paths import CARDS, describe_on
from mlpgpu.backends.cuda.profile.peak_rates import PeakRates
from mlpgpu.backends.cuda.profile.predictions import describe_predictions
from mlpgpu.backends.cuda.profile.probe import TimedLaunch
from mlpgpu.backends.cuda.run.trace import Span
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.inference import most_rows, piece_rows
from mlpgpu.backends.cuda.select.network import FewRowsNetwork, few_rows_network
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.backends.cuda.select.setting import Setting
from mlpgpu.layers import Layer
from mlpgpu.losses import LOSSES
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import Plan

RATES = PeakRates(copied=4e12, cached=8e12, computed=50e12, cache_bytes=1 << 20)
ROWS = 30


def plan(**options: object) -> Plan:
    dense = mg.Dense(33, 33, activation="tanh")  # used twice
    layers = [mg.Standardize(50), mg.Dense(50, 33), dense, mg.Dropout(0.5), dense, mg.Dense(33, 7, bias=False)]
    chosen = {"capacity": ROWS, "loss": "softmax_cross_entropy", "optimizer": mg.Adam(0.1, clip_norm=1.0), **options}
    return mg.Network(layers, seed=1).lower(**chosen)


def lowered(plan: Plan, source: str = "uint8") -> Lowered:
    return lower(plan, multiprocessors=132, source=source)


def launch_of(launches: list[Launch], family: str) -> Launch:
    """The first launch of a kernel whose name begins so."""
    return next(launch for launch in launches if launch.entry.name.startswith(family))


def test_every_launch_names_its_operation() -> None:
    step = plan(shards=2)
    low = lowered(step)
    for launches, operations in ((low.shards[1], step.training), (low.finish, step.training)):
        for launch in launches:
            number, kind = launch.operation.split()
            assert type(operations[int(number)]).__name__ == kind
    assert [launch.operation for launch in low.shards[0]][:4] == ["0 Gather", "1 Standardize", "2 Dense", "3 Dense"]
    assert [launch.operation for launch in low.finish][-2:] == ["16 Norm", "17 Update"]
    assert [launch.operation for launch in low.evaluation][-2:] == ["6 Loss", "7 Output"]


def any_plan(draw: Random) -> Plan:
    """A plan of any kind, small or large enough for each way in which products are made."""
    activation = partial(draw.choice, list(ACTIVATIONS))
    is_wide = draw.random() < 0.2
    n_in, n = draw.choice([draw.randint(1, 70), 300, 5000, 20_000]), draw.choice([draw.randint(1, 70), 90, 512])
    if is_wide:
        n_in = n = 512
    layers: list[Layer] = [mg.Standardize(n_in)] if draw.random() < 0.3 else []
    if draw.random() < 0.3:
        tied, chosen = draw.choice([True, False]), activation()
        window, biases = draw.randint(1, min(n_in, 29)), draw.choice(["output", "layer", None])
        first = mg.LocallyConnected(n_in, window, chosen, biases)
        for _ in range(draw.randint(1, 3)):
            if n_in >= window:
                layers.append(first if tied else mg.LocallyConnected(n_in, window, chosen, biases))
                n_in -= window - 1
    layers.append(mg.Dense(n_in, n, activation(), bias=draw.random() < 0.7, trainable=draw.random() < 0.8))
    if draw.random() < 0.3:
        layers.append(mg.Dropout(0.5))
    if draw.random() < 0.4:
        layers += draw.randint(1, 2) * [mg.Dense(n, n, activation())]
    layers.append(mg.Dense(n, 512 if is_wide else draw.randint(1, 70), draw.choice(["identity", activation()])))
    loss, optimizer = draw.choice(list(LOSSES)), OPTIMIZERS[draw.choice(list(OPTIMIZERS))]
    return mg.Network(layers, seed=1).lower(
        capacity=256 if is_wide else draw.choice([1, 8, 32, 100, 256]),
        loss=loss,
        target_kind=draw.choice(LOSSES[loss].targets),
        optimizer=optimizer(0.1, clip_norm=draw.choice([None, None, None, 1.0])),
        shards=draw.choice([1, 1, 1, 1, 3]),
        reduction=draw.choice(["ordered", "ordered", "ordered", "atomic"]),
        precision=draw.choice(["float32-ieee", "float32", "tf32", "bfloat16"]),
    )


# Kernels in the folders of those that multiply, which only add, or make operands ready.
NO_PRODUCTS = {
    "dense_forward_sum_partials", "split_rows", "split_weights", "split_columns", "mask_words", "local_backward_bias",
    "local_backward_shared_bias", "update_from_blocks", "images_of_weights", "batch_fragments", "move_weight",
}  # fmt: skip


def family(entry: kernels.Entry) -> str:
    return entry.function.partition("<")[0]


def multiplies(entry: kernels.Entry) -> bool:
    """Whether it should, by where its source lies."""
    folders = {header.partition("/")[0] for header in entry.headers}
    of_products = {"dense", "whole_batch", "gemm", "fused", "local", "persistent"}
    return bool(folders & of_products) and family(entry) not in NO_PRODUCTS


def check_extents(low: Lowered, rows: int) -> None:
    """No kernel is told of more than its arrays hold, for so many rows of a shard."""
    for launch in [launch for shard in low.shards for launch in shard] + low.finish:
        lengths = lengths_of(launch, rows)
        for argument in launch.entry.arguments:
            value = launch.values[argument.name]
            if isinstance(value, Map):
                assert array_bytes(argument, lengths) <= value.nbytes, (launch.entry.name, argument)
            elif isinstance(value, At) and value.array in low.bytes:
                end = argument.item_bytes * value.offset + array_bytes(argument, lengths)
                assert end <= low.bytes[value.array], (launch.entry.name, argument)


def test_flops_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some hundred plans, on each kind of card, and of all kernels that multiply."""
    multiplied = {"local_stack_forward", "local_stack_update", "local_stack_tied_update", "train_persistent"}
    missing = multiplied | {family(entry) for entry in kernels.all_entries() if multiplies(entry)}
    missing.remove("network_forward")  # of predictions alone, which are below
    narrow = mg.Network([mg.Dense(12, 300, "relu"), mg.Dense(300, 300)], seed=1)
    many_rows = narrow.lower(capacity=2000, loss="huber", optimizer=OPTIMIZERS["Adam"](0.1), precision="float32-ieee")
    ends = mg.Network([mg.Dense(12, 600, "relu"), mg.Dense(600, 10)], seed=1)
    one_wave = ends.lower(capacity=1000, loss="huber", optimizer=OPTIMIZERS["Adam"](0.1), precision="float32-ieee")
    ends = mg.Network([mg.Dense(12, 600, "relu"), mg.Dense(600, 1)], seed=1)
    waves = ends.lower(capacity=5000, loss="huber", optimizer=OPTIMIZERS["Adam"](0.1), precision="float32-ieee")
    layers = [mg.Dense(12, 30, "relu"), mg.Dense(30, 40, "tanh"), mg.Dense(40, 5)]
    by_rows = mg.Network(layers, seed=1).lower(
        capacity=4000, loss="huber", optimizer=OPTIMIZERS["Adam"](0.1), precision="tf32"
    )
    wide = mg.Network([mg.Dense(1200, 1100, "relu"), mg.Dense(1100, 1000), mg.Dense(1000, 10)], seed=1)
    few_rows = wide.lower(capacity=30, loss="huber", optimizer=OPTIMIZERS["Adam"](0.1), precision="tf32")
    tall = mg.Network([mg.Dense(3000, 40, "relu"), mg.Dense(40, 5)], seed=1)
    apart = tall.lower(capacity=1000, loss="huber", optimizer=OPTIMIZERS["Adam"](0.1), precision="tf32")
    named = many_rows, one_wave, waves, by_rows, few_rows, apart
    monkeypatch.setattr(thresholds, "INPUT_LAYER_IS_APART", True)
    for seed, step in enumerate([*(any_plan(Random(seed)) for seed in range(250)), *named]):
        shards = [rows.stop - rows.start for rows in step.shard_rows(step.capacity)]
        of_step, of_evaluation = (
            sum(step.flops(operation, step.capacity) for operation in operations)
            for operations in (step.training, step.evaluation)
        )
        for arch in ("sm_75", "sm_80", "sm_90a"):
            low = lower(step, multiprocessors=132, source="float32", arch=arch)
            of_shards = ((launch, rows) for part, rows in zip(low.shards, shards, strict=True) for launch in part)
            assert sum(flops(launch, rows) for launch, rows in of_shards) == of_step > 0, (seed, arch)
            assert sum(flops(launch, step.capacity) for launch in low.evaluation) == of_evaluation, (seed, arch)
            check_extents(low, -(-step.capacity // step.shards))
            missing -= {family(launch.entry) for launch in low.launches()}
            with patch.object(thresholds, "WHOLE_BATCHES_ARE_COUNTED", False):
                low = lower(step, multiprocessors=132, source="float32", arch=arch)
                missing -= {family(launch.entry) for launch in low.launches()}
            with patch.object(thresholds, "ROW_STEP_IS_USED", True):
                low = lower(step, multiprocessors=132, source="float32", arch=arch)
            if any(family(launch.entry) == "row_step" for launch in low.launches()):
                assert sum(flops(launch, step.capacity) for launch in low.shards[0]) == of_step, (seed, arch)
                check_extents(low, step.capacity)
                missing -= {family(launch.entry) for launch in low.shards[0]}
            kernel = choose_kernel(step, multiprocessors=132, shared_bytes=227 << 10, arch=arch)
            if not isinstance(kernel, str):
                launch = kernel.train("float32", textured=True)
                assert flops(launch, step.capacity) == of_step, (seed, arch)
                missing.discard(family(launch.entry))
    assert not missing


@pytest.mark.parametrize("widths", [(3, 2), (784, 128, 10), (20, 64, 64, 2), (33, 1025, 7, 5, 1)])
def test_flops_of_a_network_in_one_launch_are_those_of_the_plan(widths: tuple[int, ...]) -> None:
    plan = mg.Network([mg.Dense(k, n, "relu") for k, n in pairwise(widths)], seed=1).lower(capacity=8, output="exp")
    network = few_rows_network(plan, Setting(132, "sm_90a", "float32", textured=False))
    assert isinstance(network, FewRowsNetwork)
    launch = Launch(kernels.network_forward("float32"), (1, 1, 1), {}, lengths=network.lengths)
    for rows in (1, 8):
        assert flops(launch, rows) == sum(plan.flops(operation, rows) for operation in plan.evaluation) > 0


def test_what_multiplies_has_products() -> None:
    assert [entry.name for entry in kernels.all_entries() if bool(entry.products) != multiplies(entry)] == []


# Lengths that only launches of these headers tell, each with the test that compares them with the plan.
OF_LAUNCHES = {
    "fused/tail.cuh": {"units", "outputs", "products", "parameters", "words", "bytes"},
    "fused/network.cuh": {"products", "parameters"},
    "fused/row_step.cuh": {"inputs", "outputs", "hidden", "deltas", "products", "passed", "parameters"},
    "fused/update_layers.cuh": {"inputs", "hidden", "deltas", "products", "moved"},
    "fused/input_layer.cuh": {"columns", "elements", "delta_elements", "gradient"},
    "fused/tensor_row_step.cuh": {
        *("inputs", "outputs", "products", "passed", "elements", "parameters"),
        *("columns", "delta_elements"),
    },
    "fused/update_from_blocks.cuh": {"moved", "elements", "left"},
    "elementwise/update.cuh": {"partial_count"},
    "primitives/send_messages.cuh": {"words", "bytes"},  # no launch of a plan's
}
# Arrays whose bytes are not counted.
UNCOUNTED = {
    "step", "next", "steps",  # a step's description
    "x", "w", "dz",  # float32 arrays beside split operands, read only where those do not hold a number
    "partials", "partial_flags", "arrived", "db_partials", "tile_sums", "scratch",  # scratch memory
    "slots", "weight_slots", "bias_slots", "biases_slots",  # of SGD, which has none
    "sums",  # of a metric
    "kept",  # a bit for each element that a dropout keeps
}  # fmt: skip


def check_axes(entry: kernels.Entry) -> None:
    lengths = {a.name for a in entry.arguments if a.ctype in ("int", "int64_t")} | {
        "rows",
        "grid.x",
        "grid.y",
        "grid.z",
    }
    lengths |= OF_LAUNCHES.get(entry.header, set())
    for argument in entry.arguments:
        assert (argument.axes is not None) == argument.is_array, argument
        assert not (argument.is_updated and argument.ctype.startswith("const ")), argument
        assert {axis for axis in argument.axes or () if isinstance(axis, str)} <= lengths, argument
        of_a_layer = argument.name.rstrip("0123456789").removesuffix("_")  # of a launch of several
        assert 0 not in (argument.axes or ()) or of_a_layer in UNCOUNTED, argument
        assert not argument.is_array or argument.item_bytes
    for product in entry.products:
        assert set(product.axes) <= lengths and set(product.when) <= {a.name for a in entry.arguments if a.is_array}


def test_signatures_state_the_axes_of_every_array() -> None:
    for entry in kernels.all_entries():
        check_axes(entry)


def test_a_signature_says_what_is_updated() -> None:
    x, w, total, k = kernels.arguments("const float* x[rows,k], inout uint64_t* w[3,k], double* total[], int k")
    assert (x.ctype, x.axes, x.is_updated, x.item_bytes) == ("const float*", ("rows", "k"), False, 4)
    assert (w.ctype, w.axes, w.is_updated, w.item_bytes) == ("uint64_t*", (3, "k"), True, 8)
    assert (total.axes, k.axes, k.is_array) == ((), None, False)


def test_bytes_by_hand() -> None:
    low = lowered(plan())
    shard, finish = low.shards[0], low.finish
    assert moved_bytes(launch_of(shard, "gather"), ROWS) == ROWS * (50 * (1 + 4) + 4)
    assert moved_bytes(launch_of(shard, "standardize"), ROWS) == 4 * (2 * ROWS * 50 + 2 * 50)
    assert moved_bytes(launch_of(shard, "dense_forward"), ROWS) == 4 * (ROWS * (50 + 33) + 50 * 33 + 33)
    # order, logits (30, 7), class numbers; weights; a value and a weight, in float64, of each block of 8 rows, of all
    # of them, and of the step; the counter of blocks twice
    total = 16 * (4 + 2) + 2 * 4
    assert moved_bytes(launch_of(low.evaluation, "loss"), ROWS) == 4 * ROWS * (1 + 7 + 1 + 1) + total
    # the last layer, without a bias, takes x and what its activation saved, and makes dx and the delta
    of_blocks = 16 * (15 + 2) + 2 * 4  # of two rows
    assert moved_bytes(launch_of(shard, "head"), ROWS) == 4 * ROWS * (3 * 33 + 1 + 7 + 1 + 1) + 4 * 33 * 7 + of_blocks
    # a weight without a bias, whose dz is the loss's delta
    assert moved_bytes(launch_of(shard, "dense_backward_weight"), ROWS) == 4 * (ROWS * (33 + 7) + 33 * 7)
    count = plan().parameter_count
    # gradient once; parameters and both slots twice; the two totals, and the factor
    assert moved_bytes(launch_of(finish, "update"), ROWS) == 4 * count * (1 + 2 + 4) + 16 + 4
    # the parameter that is used twice has two partials
    twice = next(launch for launch in finish if launch.values.get("uses") == 2)
    assert moved_bytes(twice, ROWS) == 4 * 33 * 33 * (2 + 1)


def test_bytes_of_a_product_in_parts() -> None:
    network = mg.Network([mg.Dense(5000, 3)], seed=1)
    part, total, *_ = lowered(network.lower(capacity=10), "float32").evaluation
    parts = -(-5000 // 256)
    assert moved_bytes(part, 10) == 4 * (10 + 10 * 5000 + 5000 * 3 + parts * 10 * 3)
    assert moved_bytes(total, 10) == 4 * (parts * 10 * 3 + 3 + 10 * 3)
    assert (flops(part, 10), flops(total, 10)) == (2 * 10 * 5000 * 3, 0)


def test_bytes_of_an_update_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    network = mg.Network([mg.Dense(50, 33)], seed=1)
    low = lowered(network.lower(capacity=ROWS, loss="squared_error", optimizer=mg.Adam(0.1)))
    launch = launch_of(low.shards[0], "dense_backward_update")
    # x, dz and the totals; the weight, the bias and both slots of each twice
    assert moved_bytes(launch, ROWS) == 4 * (ROWS * (50 + 33) + 2 * 3 * (50 * 33 + 33)) + 16
    assert flops(launch, ROWS) == 2 * ROWS * 50 * 33


def test_a_dense_target_is_as_wide_as_the_logits() -> None:
    dense = launch_of(lowered(plan(target_kind="dense")).shards[0], "head")
    index = launch_of(lowered(plan()).shards[0], "head")
    assert moved_bytes(dense, ROWS) - moved_bytes(index, ROWS) == 4 * ROWS * (7 - 1)


def test_a_floor_is_the_slower_of_arithmetic_and_memory() -> None:
    assert RATES.floor(50_000_000, 8) == pytest.approx(1e-6)
    assert RATES.floor(2, 4_000_000) == pytest.approx(1e-6)
    assert RATES.floor(2, 800_000) == pytest.approx(1e-7)  # it fits in the cache
    assert RATES.floor(0, 0) == 0.0


def test_the_chains_of_multiply_adds() -> None:
    """All of them are computed, or the rate would be too high; from s, ``rounds`` halvings towards 2."""
    entry, rounds = kernels.multiply_add(), 20
    threads = 2 * entry.threads
    args = {"a": 0.5, "b": 1.0, "rounds": rounds, "y": Unwritten((threads,), np.float32)}
    starts = np.arange(kernels.CHAINS)
    expected = (2 + (starts - 2) / 2**rounds).sum()
    y = run(entry, grid=2, block=entry.threads, args=args)["y"]
    np.testing.assert_allclose(y, np.full(threads, expected), rtol=kernels.CHAINS * EPS32)


def test_a_profile_is_printed() -> None:
    step = plan(shards=2)
    low = lowered(step)
    launches = [launch_of(low.shards[0], "dense_forward"), *low.initialise]
    rows = ROWS // 2
    counted = [
        (Fraction(2), flops(launches[0], rows), moved_bytes(launches[0], rows)), (Fraction(1, 32), 0, 0),
    ]  # fmt: skip
    timed = [
        TimedLaunch(launch, count, 40, 1024, operations, nbytes, RATES.floor(operations, nbytes), 1.5e-6, 2e-6)
        for launch, (count, operations, nbytes) in zip(launches, counted, strict=True)
    ]
    spans = [Span("0", "first", 0.0, 2e-6), Span("1", "second", 1e-6, 4e-6)]
    profile = Profile("a step", RATES, timed, 5e-6, {"x": 6000, "none": 0, "slots": 12_000}, {"one step": spans})
    assert profile.kernel_seconds == pytest.approx((2 + 1 / 32) * 2e-6)
    head, kernel_table, arrays, timeline = str(profile).split("\n\n")
    assert head.startswith(
        "a step\npeak rates of this card: copying 4,000 GB/s, and 8,000 GB/s inside its cache of 1 MiB; 50.0"
    )
    heading, dense, deal, total = kernel_table.splitlines()
    assert heading.split()[:4] == ["operation", "kernel", "launches", "grid"]
    name, grid = launches[0].entry.name, "×".join(map(str, launches[0].grid))
    assert dense.split() == [
        "2",
        "Dense",
        name,
        "2",
        grid,
        "256",
        "40",
        "1,024",
        "0.050",
        "11.7",
        "0.00",
        "1.50",
        "2.00",
        "0.1%",
    ]
    assert deal.split()[:5] == ["initialise_steps", "1/32", "1×1×1", "32", "40"]
    assert deal.split()[5:] == ["1,024", "0.0", "0.00", "1.50", "2.00", "0.0%"]
    sums = "sum of the launches 4.06 µs, predicted 3.05 µs, the whole as one graph 5.00 µs"
    assert total == f"{sums} (ratio 0.81, as shards run side by side)"
    assert [line.split() for line in arrays.splitlines()[1:]] == [
        ["slots", "12,000"],
        ["x", "6,000"],
        ["total", "18,000"],
    ]
    assert timeline == "one step\n" + gantt(spans)
    updates = [replace(each, count=Fraction(1), launch=replace(each.launch, on_side_stream=True)) for each in timed[:1]]
    *_, total = str(replace(profile, launches=[*updates, timed[1]])).split("\n\n")[1].splitlines()
    assert total.endswith(", as the updates of 2 Dense run beside the launches that follow them)")


def test_a_timeline_has_a_line_for_each_launch_by_stream() -> None:
    spans = [Span("1", "b", 2e-6, 4e-6), Span("0", "a", 0.0, 2e-6), Span("0", "c", 4e-6, 4.001e-6)]
    heading, *lines = gantt(spans).splitlines()
    assert heading.split()[0] == "stream"
    assert [line.split()[:4] for line in lines] == [
        ["0", "a", "0.0", "2.0"],
        ["0", "c", "4.0", "4.0"],
        ["1", "b", "2.0", "4.0"],
    ]
    start = lines[0].index("=")
    bars = [line[start:].ljust(explain.GANTT_COLUMNS) for line in lines]
    assert bars[0].strip() == "=" * 30 and bars[0].startswith("=")
    assert bars[1].endswith("=") and bars[1].strip() == "="
    assert bars[2].strip().strip("=") == "" and bars[2].endswith("=")


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "squared_error", None])
def test_random_data_suit_the_plan(scale: float | None, loss: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "DATA_BYTES", 100_000)
    made = plan(loss=loss, optimizer=mg.SGD(0.1) if loss else None)
    data = explain.random_data(made, scale)
    assert data.scale == scale and data.n_in == 50
    assert len(data) == ROWS * (1 if loss is None else 100_000 // (ROWS * (50 * (4 if scale is None else 1) + 28)))
    targets = 0 if loss is None else 1 if loss == "softmax_cross_entropy" else 7
    assert (0 if data.y is None else data.y.size) == targets * len(data)
    if loss == "softmax_cross_entropy":
        assert np.array_equal(np.unique(data.y), np.arange(7))


# --- predictions ---


@pytest.mark.parametrize("source", ["float32", "uint8"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_predictions_are_explained_by_the_launches_that_make_them(arch: str, source: str) -> None:
    """Those of a network that is one launch for few rows, and of one that is on tensor cores where there are some."""
    small = mg.Network([mg.Dense(784, 128, "relu"), mg.Dense(128, 10)]).lower(capacity=1, output="softmax")
    large = mg.Network([mg.Standardize(784), mg.Dense(784, 1024), mg.Dense(1024, 10)]).lower(capacity=1)
    for plan in (small, large):
        told = describe_predictions(plan, 132, arch, source).split("\n\n")
        assert [part.split(":")[0] for part in told] == [
            f"a prediction of {rows}" for rows in ("1 row", "100 rows", "100,000 rows")
        ]
        most = piece_rows(plan.with_capacity(most_rows()), 4 if source == "float32" else 1)
        for part, rows in zip(told[1:], (128, most), strict=True):
            assert f"made for up to {rows:,} rows, as a graph" in part
            options: dict[str, Any] = {"multiprocessors": 132, "source": source, "arch": arch, "textured": False}
            low = lower(plan.with_capacity(rows), **options)
            lines = part.splitlines()
            body = lines[next(n for n, line in enumerate(lines) if line.startswith("operation ")) + 1 :]
            for launch, line in zip(low.evaluation, body, strict=False):
                assert line.startswith(launch.operation) and f" {launch.entry.name} " in line
                assert "×".join(map(str, launch.grid)) in line and line.split()[-1]
            looks = source == "float32" and rows > 128
            assert len(body) == len(low.evaluation) + looks and ("find_nonfinite_rows" in part) == looks
            is_split = bool(low.evaluation_begin)
            assert ("once, when parameters have changed: " in part) == is_split
        assert "for each piece of" in told[2] and "for each piece" not in told[1]
    assert "network_forward" in describe_predictions(small, 132, arch, source).split("\n\n")[0]
    first = describe_predictions(large, 132, arch, source).split("\n\n")[0]
    on_tensor_cores = "the network is not one launch: 2 Dense is made otherwise than by chains of multiply-adds"
    assert (on_tensor_cores in first) == (arch != "sm_75")


# --- predicted ---


def dense_plan(*widths: int, rows: int, precision: str = "float32") -> Plan:
    layers = [mg.Dense(*pair, "relu") for pair in pairwise(widths)]
    return mg.Network(layers, seed=1).lower(
        capacity=rows, loss="squared_error", optimizer=mg.Adam(0.1), precision=precision
    )


def predicted_step(*widths: int, rows: int, precision: str = "float32") -> list[Launch]:
    plan = dense_plan(*widths, rows=rows, precision=precision)
    low = lower(plan, multiprocessors=132, source="float32", arch="sm_90a")
    return [*low.begin, *low.shards[0], *low.finish]


def seconds(launches: list[Launch], rows: int, rates: PeakRates = predicted.H200) -> float:
    return sum(predicted.predicted_seconds(launch, rows, 132, rates) for launch in launches)


@given(plans(), st.booleans())
def test_every_launch_of_a_step_is_predicted(plan: Plan, large: bool) -> None:
    low = on_tensor_cores(plan, large=large, multiprocessors=132, arch="sm_90a")
    for launch in (*low.begin, *low.shards[0], *low.finish):
        found = predicted.predicted_seconds(launch, plan.capacity, 132)
        assert 1e-6 < found < 1.0 and math.isfinite(found), launch.entry.name


def test_more_rows_take_longer_and_so_does_less_memory() -> None:
    widths = 784, 1024, 1024, 10
    for precision in ("float32", "tf32", "bfloat16"):
        few, many = (seconds(predicted_step(*widths, rows=rows, precision=precision), rows) for rows in (1024, 16_384))
        assert 3 * few < many
    slow = PeakRates(copied=1e12, cached=1e12, computed=predicted.H200.computed, cache_bytes=predicted.H200.cache_bytes)
    large = predicted_step(64, 8192, 8192, 10, rows=4)
    assert seconds(large, 4, slow) > 2 * seconds(large, 4)


def test_no_launch_is_predicted_to_outrun_memory() -> None:
    for launch in predicted_step(64, 8192, 8192, 10, rows=4):
        assert predicted.predicted_seconds(launch, 4, 132) >= predicted.H200.floor(0, moved_bytes(launch, 4))


def test_a_step_on_a_card_that_is_not_here_is_described_with_its_prediction() -> None:
    plan = dense_plan(784, 1024, 1024, 10, rows=1024)
    text = describe_on(plan, CARDS["H200"], "float32")
    launches = predicted_step(784, 1024, 1024, 10, rows=1024)
    *_, last = text.splitlines()
    assert last.split() == ["in", "all", f"{seconds(launches, 1024) * 1e6:,.1f}"]
    assert all(launch.entry.name in text for launch in launches)
    assert "predicted" not in describe_on(plan, CARDS["A100"], "float32")
