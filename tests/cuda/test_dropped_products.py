"""Dropouts as the end of products on plain cores: which ones, and with the bits of launches of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from epochs import Epoch
from host_program import HostProgram
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_lowering import lowered, make_plan, names, plans

from mlpgpu import Dense, Dropout, Huber, LocallyConnected, Standardize
from mlpgpu.backends.cuda.kernels.launches import At, Launch, Lowered
from mlpgpu.backends.cuda.lower.lowering import passes
from mlpgpu.backends.cuda.profile.costs import moved_bytes
from mlpgpu.backends.cuda.profile.predicted import predicted_seconds
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.setting import Setting
from mlpgpu.layers import Layer
from mlpgpu.names import ActivationName
from mlpgpu.plan import Plan


@pytest.fixture(autouse=True)
def launch_by_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)


def apart(made: Any, *arguments: Any, **options: Any) -> Any:
    """What a function makes where dropouts are launches of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thresholds, "PRODUCTS_DROP", False)
        return made(*arguments, **options)


def dropouts(low: Lowered) -> list[str]:
    return [name for shard in low.shards for name in names(shard) if name.startswith("dropout")]


def of_products(low: Lowered, prefix: str) -> list[Launch]:
    return [launch for launch in low.shards[0] if launch.entry.name.startswith(prefix)]


# --- bits ---

STEPS: dict[str, tuple[Callable[[ActivationName], list[Layer]], dict[str, Any]]] = {
    "odd widths": (
        lambda f: [Dense(9, 33, f), Dropout(0.3), Dense(33, 35, f), Dropout(0.5), Dense(35, 37, f), Dense(37, 3)], {},
    ),
    "shards": (
        lambda f: [Standardize(9), Dense(9, 21, f), Dropout(0.1), Dense(21, 7, f), Dropout(0.6), Dense(7, 34)],
        {"shards": 3, "loss": Huber(0.5)},
    ),
    "vectors, inputs, the end": (
        lambda f: [Dropout(0.2), Dense(9, 40, f), Dropout(0.25), Dense(40, 36, f, bias=False), Dropout(0.0)],
        {"loss": Huber(0.5)},
    ),
    "frozen": (
        lambda f: [Dense(9, 33, f), Dropout(0.3), Dense(33, 35, f, trainable=False), Dropout(0.5), Dense(35, 37)], {},
    ),
    "atomic": (
        lambda f: [Dense(9, 33, f), Dropout(0.3), Dense(33, 35, f), Dropout(0.5), Dense(35, 37)],
        {"reduction": "atomic"},
    ),
}  # fmt: skip


def epoch_of(case: str, activation: ActivationName) -> Epoch:
    layers, options = STEPS[case]
    return Epoch(layers(activation), options)


@pytest.mark.parametrize("multiprocessors", [2, 132], ids=["tiles", "warps"])
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus", "gelu"])
@pytest.mark.parametrize("case", STEPS)
def test_an_epoch_has_the_bits_of_launches_apart(case: str, activation: ActivationName, multiprocessors: int) -> None:
    """Two full batches and a last one of two rows, whose shards have one row or none."""
    epoch = epoch_of(case, activation)

    def made() -> tuple[Lowered, np.ndarray, np.ndarray, np.ndarray]:
        host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_75", multiprocessors=multiprocessors)
        host.load(epoch.state)
        return host.low, host.run(epoch.rates).copy(), host.parameters, host.evaluate()

    (low, *found), (other, *expected) = made(), apart(made)
    assert len(dropouts(low)) < len(dropouts(other))
    for one, known in zip(found, expected, strict=True):
        assert np.isfinite(known).all()
        np.testing.assert_array_equal(one.view(np.uint32), known.view(np.uint32))


@pytest.mark.parametrize("multiprocessors", [2, 132], ids=["tiles", "warps"])
def test_what_is_not_finite_stays_so_where_it_is_dropped(multiprocessors: int) -> None:
    epoch = epoch_of("odd widths", "tanh")
    parameters = epoch.state.parameters.copy()
    parameters[0, : 9 * 33].reshape(9, 33)[:, 5] = np.nan

    def made() -> np.ndarray:
        host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_75", multiprocessors=multiprocessors)
        host.load(replace(epoch.state, parameters=parameters))
        host.run(epoch.rates[:1])
        return host.arrays["y1"].copy().reshape(-1, 33)

    found, expected = made(), apart(made)
    assert np.isnan(found[:8, 5]).all() and np.isfinite(found[:8, :5]).all() and (found[:8] == 0.0).any()
    np.testing.assert_array_equal(found, expected)


# --- which ones ---


def test_products_on_plain_cores_end_with_their_dropouts() -> None:
    layers = [Dense(64, 128, "tanh"), Dropout(0.1), Dense(128, 64, "gelu"), Dropout(0.2), Dense(64, 70, "relu")]
    low = lowered(make_plan([*layers, Dropout(0.3), Dense(70, 72)]), arch="sm_90a")
    assert not dropouts(low)
    (first, second, third, last), back = of_products(low, "dense_forward"), of_products(low, "dense_backward_input")
    # Who reads y beside the dropout: of tanh the derivative.
    assert (first.values["z"], first.values["y"], first.values["dropped"]) == (None, At("y0"), At("y1"))
    assert (second.values["z"], second.values["y"], second.values["dropped"]) == (At("z2"), At("y3"), At("y3"))
    assert (third.values["z"], third.values["y"], third.values["dropped"]) == (None, At("y5"), At("y5"))
    assert (last.values["y"], last.values["dropped"], last.values["keep"]) == (At("y6"), None, 0.0)
    assert {At("y2"), At("y4")}.isdisjoint(value for launch in low.shards[0] for value in launch.values.values())
    assert [launch.operation for launch in (first, second, third, last)] == ["1 Dense", "3 Dense", "5 Dense", "7 Dense"]
    assert [launch.entry.name.split("_")[3] for launch in back] == ["relu", "gelu", "tanh"]
    saved = [(launch.values["saved"], launch.values["dx"], launch.values["least"]) for launch in back]
    # A ReLU's zeros say what was dropped; no mask is drawn again.
    assert saved == [
        (At("y5"), At("dy4"), 0), (At("z2"), At("dy2"), 13108), (At("y0"), At("dy0"), 6554),
    ]  # fmt: skip
    assert [launch.values["keep"] for launch in back] == [1 / 0.7, 1.25, 1 / 0.9]
    masks = [(launch.values["layer"], launch.values["least"]) for launch in (first, second)]
    assert masks == [(launch.values["layer"], launch.values["least"]) for launch in (back[2], back[1])]


def test_outputs_that_somebody_reads_are_stored() -> None:
    plan = make_plan([Dense(64, 128, "gelu"), Dropout(0.1), Dense(128, 64)])
    (first, _) = of_products(lowered(plan.to_gradient()), "dense_forward")
    assert (first.values["y"], first.values["dropped"]) == (At("y0"), At("y1"))
    atomic = lowered(make_plan([Dense(64, 128, "relu"), Dropout(0.1), Dense(128, 64)], reduction="atomic"))
    (first, _) = of_products(atomic, "dense_forward")
    assert (first.values["y"], first.values["dropped"]) == (At("y0"), At("y1"))
    assert dropouts(atomic) == ["dropout_backward_relu"]  # behind a kernel that makes all gradients


def test_dropouts_that_stay_launches() -> None:
    assert dropouts(lowered(make_plan([Dropout(0.1), Dense(64, 128)]))) == ["dropout"]
    local = [LocallyConnected(64, 5, "tanh"), Dropout(0.1), LocallyConnected(60, 5)]
    assert dropouts(lowered(make_plan(local))) == ["dropout", "dropout_backward_tanh"]
    cut = [Dense(5000, 64, "tanh"), Dropout(0.1), Dense(64, 128)]  # sums of partials end otherwise
    assert dropouts(lowered(make_plan(cut))) == ["dropout"]
    head = [Dense(64, 128, "tanh"), Dropout(0.1), Dense(128, 10)]  # makes dx
    assert dropouts(lowered(make_plan(head, loss="softmax_cross_entropy"))) == ["dropout_backward_tanh"]
    twice = [Dense(64, 128, "tanh"), Dropout(0.1), Dropout(0.2), Dense(128, 64)]
    assert dropouts(lowered(make_plan(twice))) == ["dropout", "dropout_backward_tanh"]


def test_what_tensor_cores_read_is_made_by_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where operands have no scales, a dropout leaves them; else who makes them reads floats."""
    layers = [Dense(64, 512, "tanh"), Dropout(0.1), Dense(512, 512, "gelu"), Dropout(0.2), Dense(512, 64)]
    monkeypatch.setattr(thresholds, "LAYERS_ARE_COUNTED_TOGETHER", False)
    monkeypatch.setattr(thresholds, "NARROW_TILES_ARE_USED", False)
    options: dict[str, Any] = {"capacity": 1024, "precision": "tf32"}
    low = lowered(make_plan(layers, **options), arch="sm_90a")
    plain = of_products(low, "dense_")
    assert len(of_products(low, "tensor_")) == 3 and len(of_products(low, "dense_forward")) == 2
    assert dropouts(low) == ["dropout", "dropout", "dropout_backward_gelu", "dropout_backward_tanh"]
    assert not any(launch.values.get("dropped") for launch in plain)
    monkeypatch.setattr(thresholds, "MOST_UNSCALED_WEIGHTS", 0)
    scaled = lowered(make_plan(layers, **options), arch="sm_90a")
    first, last = of_products(scaled, "dense_forward")
    assert (first.values["dropped"], last.values["dropped"]) == (At("y1"), None)
    assert dropouts(scaled) == ["dropout", "dropout_backward_tanh"]


def test_a_plan_says_where_its_dropouts_are() -> None:
    layers = [Dropout(0.1), Dense(64, 128, "tanh"), Dropout(0.1), Dense(128, 64)]

    def printed() -> str:
        return str(passes(make_plan(layers), Setting(132, "sm_90a", "float32", textured=True)))

    assert "in the product before it, or a launch" in printed() and "none of these makes x" in printed()
    assert "in the product before it" not in apart(printed) and "launches of their own" in apart(printed)


@given(plans(), st.sampled_from(["sm_75", "sm_80", "sm_90a"]), st.sampled_from([2, 132]))
def test_other_launches_are_as_without(plan: Plan, arch: str, multiprocessors: int) -> None:
    low = lowered(plan, multiprocessors, arch=arch)
    other = apart(lowered, plan, multiprocessors, arch=arch)
    assert low.evaluation == other.evaluation and low.finish == other.finish
    assert set(low.bytes) <= set(other.bytes)
    for shard, known in zip(low.shards, other.shards, strict=True):
        before = [replace(launch, pdl=False) for launch in known]
        changed = [launch for launch in shard if replace(launch, pdl=False) not in before]
        assert all(launch.entry.name.startswith(("dense_forward", "dense_backward_input")) for launch in changed)
        masks = sum(launch.values.get("dropped") is not None or bool(launch.values["least"]) for launch in changed)
        assert len(shard) + masks == len(known)


def test_a_dropout_in_a_product_is_predicted_to_spare_a_launch() -> None:
    plan = make_plan([Dense(64, 128, "tanh"), Dropout(0.1), Dense(128, 64, "tanh"), Dropout(0.1), Dense(64, 70)])
    low, other = lowered(plan, arch="sm_90a"), apart(lowered, plan, arch="sm_90a")
    fused, known = ([predicted_seconds(launch, 32, 132) for launch in each.shards[0]] for each in (low, other))
    assert len(fused) == len(known) - 4 and sum(fused) < sum(known)
    (with_mask, *_), (without, *_) = of_products(low, "dense_forward"), of_products(other, "dense_forward")
    assert predicted_seconds(with_mask, 32, 132) > predicted_seconds(without, 32, 132)
    assert moved_bytes(with_mask, 32) == moved_bytes(without, 32) + 4 * 32 * 128
