"""Steps by blocks of rows: what takes them, and whole steps on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from drawn import covering, first_and_drawn
from epochs import Epoch, assert_as_exact
from helpers import first_and_thorough
from host_program import HostProgram
from shim_runner import KernelFault, plant

from mlpgpu import Dense, Dropout, Huber, Network, Standardize
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels.launches import Lowered
from mlpgpu.backends.cuda.lower.lowering import lower, passes
from mlpgpu.backends.cuda.profile.costs import flops, moved_bytes
from mlpgpu.backends.cuda.runtime.compiler import compile_units
from mlpgpu.backends.cuda.select import dense, thresholds
from mlpgpu.backends.cuda.select import row_step as row_step_choices
from mlpgpu.backends.cuda.select.row_step import row_step
from mlpgpu.backends.cuda.select.select import select
from mlpgpu.backends.cuda.select.setting import Setting, Verdict
from mlpgpu.backends.cuda.select.tiles import simt_tile
from mlpgpu.layers import Layer
from mlpgpu.losses import LOSSES
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import Plan

H200, A100, T4 = (Setting(132, arch, "float32", textured=True) for arch in ("sm_90a", "sm_80", "sm_75"))


@pytest.fixture(autouse=True)
def plain_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "small_batch_tile", lambda m, n, k, sms: simt_tile(m, n, sms))  # one chain over k
    monkeypatch.setattr(thresholds, "WARP_SPLIT_LEAST_ROWS", 1)  # updates as the row step's second launch makes them
    monkeypatch.setattr(thresholds, "COUNTED_TENTHS", 0)
    monkeypatch.setattr(thresholds, "LAYERS_ARE_COUNTED_TOGETHER", False)  # whatever launches would take
    monkeypatch.setattr(kernels, "SMALL_N_COLUMNS", 0)
    monkeypatch.setattr(thresholds, "FILLING_TENTHS", 10**6)  # no tiles fill the tests' card of two multiprocessors
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_IS_USED", False)


def plan_of(layers: Sequence[Layer], **options: Any) -> Plan:
    defaults = {"capacity": 1024, "loss": "squared_error", "optimizer": OPTIMIZERS["Momentum"](0.1)}
    return Network(layers, seed=1).lower(**{**defaults, **options})


def verdict(plan: Plan, setting: Setting = H200) -> Verdict:
    return select(plan, setting, is_training=True).row_step


def names(low: Lowered) -> list[str]:
    return [launch.entry.name for shard in low.shards for launch in shard]


# --- whole steps ---

STEPS: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "widths of every number of rows a thread": (
        [Dense(9, 130, "relu"), Dense(130, 66, "gelu"), Dense(66, 35, "tanh", bias=False), Dense(35, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Nesterov"](0.01, l2=0.1, alpha=1.0)},
    ),
    "standardized, dropouts": (
        [Standardize(9), Dropout(0.2), Dense(9, 21, "silu"), Dropout(0.3), Dense(21, 7, "elu"), Dropout(0.5),
         Dense(7, 2), Standardize(2)],
        {"loss": "squared_error"},
    ),
    "frozen below and between": (
        [Dense(9, 8, "relu", trainable=False), Dense(8, 7, "gelu"), Dense(7, 12, "silu", trainable=False),
         Dense(12, 3)],
        {"loss": Huber(0.5)},
    ),
    "frozen above": ([Dense(9, 8, "relu"), Dense(8, 3, trainable=False)], {"loss": "binary_cross_entropy"}),
    "one layer with an activation": ([Dense(9, 3, "sigmoid")], {"loss": "squared_error"}),
}  # fmt: skip


def check_epoch(epoch: Epoch) -> HostProgram:
    """Two full batches and a last one of two rows, as the CPU has them."""
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a")
    assert sum(name.startswith("row_step") for name in names(host.low)) == 1
    assert not any(
        name.startswith(("gather", "standardize", "dense_forward", "head", "loss")) for name in names(host.low)
    )
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    (state, cpu, _), (exact_state, exact, _) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    assert_as_exact(losses, cpu, exact)
    assert_as_exact(host.parameters, state.parameters[0], exact_state.parameters[0])
    return host


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("case", STEPS)
def test_an_epoch_as_on_the_cpu(case: str, as_bytes: bool) -> None:
    check_epoch(Epoch(*STEPS[case], as_bytes=as_bytes))


def any_epoch(draw: Random) -> Epoch:
    """Of a network whose loss no head takes, and whose dropouts multiply without a rounding."""
    n, options = draw.randint(1, 140), {}
    layers: list[Layer] = [Standardize(n)] if draw.random() < 0.5 else []
    layers += [Dropout(0.5)] * (draw.random() < 0.3)
    for last in [False] * draw.randint(0, 3) + [True]:
        k, n = n, draw.randint(33, 140) if last else draw.randint(1, 140)
        activation = draw.choice([*ACTIVATIONS])
        layers.append(Dense(k, n, activation, bias=draw.random() < 0.7, trainable=last or draw.random() < 0.8))
        layers += [Dropout(0.5)] * (draw.random() < 0.3)
    name = draw.choice(list(LOSSES))
    if LOSSES[name].output == "identity" and draw.random() < 0.5:
        layers.append(Standardize(n))
    options = {
        "loss": name, "target_kind": draw.choice(LOSSES[name].targets),
        "optimizer": OPTIMIZERS[draw.choice(list(OPTIMIZERS))](0.01, alpha=draw.choice([0.0, 0.1]), l1=0.01),
    }  # fmt: skip
    return Epoch(layers, options, rates=(0.01, 0.02), as_bytes=draw.random() < 0.3)


@pytest.mark.parametrize("seed", first_and_thorough(range(6)))
def test_any_epoch_has_the_bits_of_launch_by_launch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch, found = any_epoch(Random(seed)), []
    monkeypatch.setattr(thresholds, "WHOLE_BATCH_IS_USED", False)  # passes of few rows add up in another order
    for is_used in (True, False):
        monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", is_used)
        host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a")
        assert any(name.startswith("row_step") for name in names(host.low)) == is_used
        host.load(epoch.state)
        losses = host.run(epoch.rates).copy()
        assert np.isfinite(losses).all()
        found.append((losses, host.parameters.copy()))
    for mine, known in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, known)


FAULTS = {
    "deltas before the activation's slope": ("of_inputs[r * below + i] = stored", "stored"),
    "the mask of another row": ("element = first * n + start", "element = (first + 4) * n + start"),
    "inputs that are not standardized": ("if (deviation) value", "if (deviation && j < 0) value"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("fused/row_step.cuh", *FAULTS[fault], tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check_epoch(Epoch(*STEPS["standardized, dropouts"]))


# --- what takes them ---

BETWEEN = [Dense(50, 128, "relu"), Dense(128, 128, "relu"), Dense(128, 128, "relu"), Dense(128, 1)]


def test_it_is_switched_off_by_a_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    found = verdict(plan_of(BETWEEN))
    assert not found and "a test" in found.why


def test_the_choice_follows_from_capacity_and_kind() -> None:
    assert [bool(verdict(plan_of(BETWEEN), card)) for card in (H200, A100, T4)] == [True, False, False]
    for precision in ("float32-ieee", "float32", "tf32", "bfloat16"):
        assert verdict(plan_of(BETWEEN, precision=precision))
    # Of 58,112 floats: 288 of levels, 8 rows of 204 and of 3 · 244, weights and biases 2 · 244 and (n + 1) · 204.
    assert [bool(verdict(plan_of([Dense(1, n, "relu"), Dense(n, 200)]))) for n in (244, 243)] == [False, True]
    refused: list[tuple[list[Layer], dict[str, Any], str]] = [
        (BETWEEN, {"shards": 2}, "streams"),
        (BETWEEN, {"reduction": "atomic"}, "atomic"),
        (BETWEEN, {"optimizer": OPTIMIZERS["SGD"](0.1, clip_norm=1.0)}, "clipped"),
        ([BETWEEN[1], BETWEEN[1]], {}, "share their weights"),
        ([Dense(4096, 5, "relu"), Dense(5, 3)], {}, "split along k"),
        ([Dense(2, 2, "relu") for _ in range(32)], {}, "32 layers"),
    ]
    for layers, options, why in refused:
        found = verdict(plan_of(layers, **options))
        assert not found and why in found.why, found
    assert not row_step(
        plan_of(BETWEEN).to_gradient(), select(plan_of(BETWEEN).to_gradient(), H200, is_training=True).work
    )
    assert not select(plan_of(BETWEEN), H200, is_training=False).row_step


def test_explain_says_path_and_reason() -> None:
    shown = str(passes(plan_of(BETWEEN), H200).training)
    assert "RowStep" in shown and "187,488 of 232,448 bytes of shared memory" in shown
    selection = str(select(plan_of(BETWEEN), H200, is_training=True))
    assert "1 Dense" in selection and "in the launch of the loss" in selection and "simt" not in selection


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_and_bytes_are_those_of_the_plan(frozen: bool) -> None:
    layers = [dataclasses.replace(BETWEEN[0], trainable=not frozen), *BETWEEN[1:]]
    step = plan_of(layers)
    low = lower(step, multiprocessors=132, source="uint8", arch="sm_90a")
    assert sum(flops(launch, 1024) for launch in low.shards[0]) == sum(step.flops(op, 1024) for op in step.training)
    first, second = low.shards[0]
    moved = step.gradient_count
    read = 1024 * 4 * (sum(k for k in (50, 128, 128, 128)[frozen:]) + 3 * 128 + 1 - 128 * frozen)
    assert second.entry == kernels.update_layers("Momentum", kernels.WARP_SPLIT_WEIGHT) and second.grid == (
        4 + 8 * (4 + 4 + 2 * (not frozen)),
        1,
        1,
    )
    assert moved_bytes(second, 1024) == read + 16 * moved + 36 * (4 - frozen) + 2 * 8
    assert first.entry.shared_bytes == 187_488 and first.grid == (128, 1, 1)
    hidden, deltas = 3 * 128, 3 * 128 + 1 - 128 * frozen
    stored = 0 if frozen else 4 * 50
    # a row: its place, bytes, target, sample weight; what is stored
    of_rows = 1024 * (4 + 50 + 4 + 4 + stored + 4 * hidden + 4 * deltas)
    once = 4 * step.parameter_count + 5 * 36 - 36 + 16 * 128 + 2 * 4 + 2 * 16
    assert moved_bytes(first, 1024) == of_rows + once


def test_shared_bytes_are_what_the_kernel_lays_out() -> None:
    """By hand, for 5-6-3: vectors of four, an odd number of them a row."""
    assert [kernels.row_step_pitch(n) for n in (1, 4, 5, 8, 9, 12, 128)] == [4, 4, 12, 12, 12, 12, 132]
    rows, weights = 8 * (2 * 12 + 12 + 4), 6 * 12 + 7 * 4
    assert kernels.row_step_shared_bytes((5, 6, 3)) == 4 * (32 * 8 + rows + weights)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvcc_compiles_it_without_spills(arch: str) -> None:
    entry = kernels.row_step(
        "squared_error", "dense", shared_bytes=kernels.row_step_shared_bytes((50, 128, 128, 128, 1))
    )
    (cubin,) = compile_units({"row_step.cuh": [entry]}, arch).values()
    (took,) = cubin.resources.values()
    assert took.spill_bytes == took.stack_bytes == took.shared_bytes == 0
    assert took.registers * entry.threads <= 65536


# --- the same on tensor cores ---


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by blocks of rows are on tensor cores, whatever other ways take, and of few rows."""
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_IS_USED", True)
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_LEAST_ROWS", 1)
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_TENTHS", 10**6)


TENSOR_STEPS: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "several activations, penalties, a layer without a bias": (
        [Dense(9, 40, "relu"), Dense(40, 21, "gelu"), Dense(21, 35, "tanh", bias=False), Dense(35, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Nesterov"](0.01, l2=0.1, alpha=1.0)},
    ),
    "standardized, dropouts": (
        [Standardize(9), Dropout(0.2), Dense(9, 21, "silu"), Dropout(0.3), Dense(21, 7, "relu"), Dropout(0.5),
         Dense(7, 2), Standardize(2)],
        {"loss": "squared_error"},
    ),
    "many outputs": (
        [Dense(41, 64, "elu"), Dense(64, 64, "relu"), Dense(64, 49)],
        {"loss": "softmax_cross_entropy"},
    ),
    "one layer": ([Dense(5, 3)], {"loss": Huber(0.5)}),
}  # fmt: skip

# Of what an epoch changes: by half a bit of 8 or 16 for each number that is multiplied, and some of them are summed.
CHANGES = {"bfloat16": 2.0**-4, "tf32": 2.0**-12}


def check_tensor_epoch(
    case: str,
    precision: str,
    *,
    as_bytes: bool = False,
    steps: dict[str, tuple[list[Layer], dict[str, Any]]] = TENSOR_STEPS,
    name: str = "tensor_row_step",
) -> None:
    epoch = Epoch(*steps[case], precision=precision, as_bytes=as_bytes)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a")
    assert next(made for made in names(host.low) if made.startswith("tensor_row")).startswith(f"{name}_")
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    (state, cpu, _), (exact_state, exact, _) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    if precision == "float32":
        assert_as_exact(losses, cpu, exact)
        assert_as_exact(host.parameters, state.parameters[0], exact_state.parameters[0])
        return
    before, after = epoch.state.parameters[0], exact_state.parameters[0]
    change = np.linalg.norm(after - before)
    assert np.linalg.norm(host.parameters - after) <= CHANGES[precision] * change
    np.testing.assert_allclose(losses, exact, rtol=CHANGES[precision])


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize(
    ("case", "as_bytes", "precision"),
    covering("epochs on tensor cores", TENSOR_STEPS, [False, True], ["float32", "tf32", "bfloat16"]),
)
def test_an_epoch_on_tensor_cores_is_as_exact_as_its_components(case: str, as_bytes: bool, precision: str) -> None:
    check_tensor_epoch(case, precision, as_bytes=as_bytes)


@pytest.fixture
def apart(on_tensor_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has launches of its own wherever it can."""
    monkeypatch.setattr(row_step_choices, "_apart_clocks", lambda layer, work: -(10**9) * (layer is not None))


APART_STEPS: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "standardized, dropouts behind it": (
        [Standardize(150), Dense(150, 21, "silu"), Dropout(0.3), Dense(21, 7, "relu"), Dropout(0.5), Dense(7, 2)],
        {"loss": "squared_error"},
    ),
    "inputs that are vectors, slopes that are stored": (
        [Dense(196, 40, "gelu"), Dense(40, 70, "relu"), Dense(70, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Nesterov"](0.01, l2=0.1, alpha=1.0)},
    ),
    "as many outputs as there may be, no bias, one layer behind it": (
        [Dense(321, 128, "tanh", bias=False), Dense(128, 5)],
        {"loss": "softmax_cross_entropy"},
    ),
    "few inputs": ([Dense(3, 70, "relu"), Dense(70, 2)], {"loss": Huber(0.5)}),
}  # fmt: skip


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("case", "as_bytes", "precision"),
    covering("epochs with a first layer apart", APART_STEPS, [False, True], ["float32", "tf32", "bfloat16"], rounds=2),
)
def test_an_epoch_with_a_first_layer_apart_is_as_exact_as_its_components(
    case: str, as_bytes: bool, precision: str
) -> None:
    check_tensor_epoch(case, precision, as_bytes=as_bytes, steps=APART_STEPS, name="tensor_row_step_behind")


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("seed", first_and_drawn(range(80, 86), 1 / 2, "epochs with a first layer apart"))
def test_any_epoch_with_a_first_layer_apart_is_as_exact_as_float32(seed: int) -> None:
    epoch = any_tensor_epoch(Random(seed), most_inputs=400, least_layers=2)
    check_any_tensor_epoch(epoch, name="tensor_row_step_behind_3")


APART_FAULTS = {
    "no gradient of the bias": ("numbers[r][q] = 1.0f", "numbers[r][q] = 0.0f"),
    "rows of the other operand in another order": ("2 * is_later + lane", "2 * !is_later + lane"),
    "deltas of rows that are not there": ("if (left < slab) {", "if (left < 0) {"),
    "one slab for all": ("static_cast<int64_t>(i) * elements()", "static_cast<int64_t>(0) * elements()"),
}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("fault", APART_FAULTS)
def test_a_fault_planted_in_a_first_layer_apart_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("fused/input_layer.cuh", *APART_FAULTS[fault], tmp_path, monkeypatch)
    case, name = "inputs that are vectors, slopes that are stored", "tensor_row_step_behind"
    with pytest.raises((AssertionError, KernelFault)):
        check_tensor_epoch(case, "float32", steps=APART_STEPS, name=name)


def any_tensor_epoch(draw: Random, most_inputs: int = 100, least_layers: int = 1) -> Epoch:
    """Of a network that blocks of rows take on tensor cores, whose dropouts multiply without a rounding."""
    n = draw.randint(1, most_inputs)
    layers: list[Layer] = [Standardize(n)] if draw.random() < 0.4 else []
    layers += [Dropout(0.5)] * (least_layers == 1 and draw.random() < 0.3)
    for last in [False] * draw.randint(least_layers - 1, 4) + [True]:
        k, n = n, draw.randint(1, 100)
        activation = "identity" if last else draw.choice([*ACTIVATIONS])
        layers.append(Dense(k, n, activation, bias=draw.random() < 0.7))
        layers += [Dropout(0.5)] * (not last and draw.random() < 0.3)
    name = draw.choice(list(LOSSES))
    if LOSSES[name].output == "identity" and draw.random() < 0.5:
        layers.append(Standardize(n))
    rule = OPTIMIZERS[draw.choice(["SGD", "Momentum", "Nesterov"])]  # whose steps are as exact as gradients
    options = {
        "loss": name, "target_kind": draw.choice(LOSSES[name].targets),
        "optimizer": rule(0.01, alpha=draw.choice([0.0, 0.1]), l1=0.01),
    }  # fmt: skip
    return Epoch(layers, options, rates=(0.01, 0.02), as_bytes=draw.random() < 0.3)


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize("seed", first_and_drawn(range(60, 70), 1 / 3, "epochs on tensor cores"))
def test_any_epoch_on_tensor_cores_is_as_exact_as_float32(seed: int) -> None:
    check_any_tensor_epoch(any_tensor_epoch(Random(seed)))


def check_any_tensor_epoch(epoch: Epoch, name: str = "tensor_row_step_3") -> None:
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a")
    assert sum(made.startswith(name) for made in names(host.low)) == 1
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    (state, cpu, _), (exact_state, exact, _) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    scale = max(abs(cpu - exact).max(), 1e-6 * abs(exact).max())
    assert abs(losses - exact).max() <= 8 * scale
    assert_as_exact(host.parameters, state.parameters[0], exact_state.parameters[0])


TENSOR_FAULTS = {
    "the mask of another row": ("element = (first + row", "element = (first + 4 + row"),
    "inputs that are not standardized": ("if (deviation)", "if (deviation && column < 0)"),
    "deltas before the activation's slope": ("? values[q] * slope[q] : 0.0f", "? values[q] : 0.0f * slope[q]"),
}


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_planted_on_tensor_cores_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("fused/tensor_row_step.cuh", *TENSOR_FAULTS[fault], tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check_tensor_epoch("standardized, dropouts", "float32")


NARROW = [Dense(50, 64, "relu"), Dense(64, 64, "gelu"), Dense(64, 10)]


def tensor_verdict(layers: Sequence[Layer] = NARROW, setting: Setting = H200, **options: Any) -> Verdict:
    found = select(plan_of(layers, **options), setting, is_training=True).row_step
    return Verdict(found.form is not None, found.why)


@pytest.mark.usefixtures("on_tensor_cores")
def test_tensor_cores_are_chosen_by_card_precision_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_verdict()
    refused: list[tuple[list[Layer], Setting, dict[str, Any], str]] = [
        (NARROW, A100, {}, "sm_80"),
        (NARROW, H200, {"precision": "float32-ieee"}, "float32-ieee"),
        (NARROW, H200, {"shards": 2}, "where they stand"),
        (NARROW, H200, {"optimizer": OPTIMIZERS["SGD"](0.1, clip_norm=1.0)}, "where they stand"),
        ([Dense(50, 64, "relu", trainable=False), *NARROW[1:]], H200, {}, "frozen"),
        ([*NARROW[:2], Dense(64, 10, "tanh")], H200, {}, "follows the last layer"),
        ([*NARROW, Dropout(0.5)], H200, {}, "follows the last layer"),
        ([Dense(300, 300, "relu"), Dense(300, 10)], H200, {}, "no room"),
    ]
    for layers, setting, options, why in refused:
        found = tensor_verdict(layers, setting, **options)
        assert not found and why in found.why, found
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_LEAST_ROWS", 2000)
    assert "1024 rows < 2000" in tensor_verdict().why
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_LEAST_ROWS", 1)
    monkeypatch.setattr(thresholds, "TENSOR_ROW_STEP_TENTHS", 0)
    assert "counted clocks" in tensor_verdict().why and not tensor_verdict()


@pytest.mark.usefixtures("on_tensor_cores")
def test_blocks_and_rows_follow_from_the_capacity_alone() -> None:
    for capacity in (1, 100, 1024, 20_000):
        found = select(plan_of(NARROW, capacity=capacity), H200, is_training=True).row_step
        assert found.form and found.grid == min(132, kernels.ceil_div(capacity, found.form.tile))
        (low,) = lower(plan_of(NARROW, capacity=capacity), multiprocessors=132, source="float32", arch="sm_90a").shards
        assert low[0].grid == (found.grid, 1, 1) and low[0].entry.shared_bytes == 232_448


@pytest.mark.usefixtures("on_tensor_cores")
def test_explain_says_that_blocks_are_on_tensor_cores() -> None:
    shown = str(passes(plan_of(NARROW), H200).training)
    assert "TensorRowStep" in shown and "on tensor cores; counted clocks" in shown and "UpdateFromBlocks" in shown


def test_components_take_what_the_kernel_lays_out() -> None:
    """By hand, for 5-20-3: columns of 16, 32 and 16, and 8 behind each row."""
    form = kernels.TensorRowStep((5, 20, 3), 2, 32, 100_000)
    assert form.places == [0, 24, 64, 88] and form.biases == [0, 20, 23]
    assert form.images == [0, 2 * 16 * 40, 2 * 16 * 40 + 2 * 32 * 24] and form.partials == [0, 6 * 24, 6 * 24 + 21 * 8]
    assert form.products == 3 and form.room == 1536 and form.rooms == 2
    levels, rows, logits, barriers, biases = 32 * 12, 128, 32 * 3, 4, 24
    of_rows = 4 * (levels + rows + logits + barriers + biases) + 2 * 2 * 32 * 88
    rooms = [
        dataclasses.replace(form, shared_bytes=of_rows + 3072 * count - short).rooms
        for count, short in ((2, 0), (2, 1), (1, 0), (1, 1))
    ]
    assert rooms == [2, 1, 1, 0]


def test_nvcc_compiles_the_kernels_of_tensor_cores_without_more_spills_than_the_table_says() -> None:
    entries = [entry for entry in kernels.tensor_row_step_entries() if "_3_" in entry.name]
    for cubin in compile_units({"tensor_row_step.cuh": entries[:2]}, "sm_90a").values():
        for name, took in cubin.resources.items():
            assert took.registers * kernels.TENSOR_ROW_STEP_THREADS <= 65536, name
