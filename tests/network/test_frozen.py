"""Frozen layers: what a step leaves as it is, and what it does not compute; and how a layer comes to be frozen."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import assert_same, run_of

import mlpgpu as mg
from mlpgpu import plan, storage
from mlpgpu.backends.cuda.lower.lowering import lower, passes
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.backends.cuda.select.setting import Setting
from mlpgpu.errors import ConfigurationError, DtypeError, ReadOnlyError
from mlpgpu.layers import Layer
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.storage.descriptions import describe, rebuild

DRAW = np.random.default_rng(8)
X = DRAW.standard_normal((60, 6)).astype(np.float32)
Y = DRAW.integers(0, 3, 60)
LOSS = "softmax_cross_entropy"
PENALTIES: dict[str, Any] = {"l1": 0.01, "l2": 0.1, "clip_norm": 0.5}


def stack() -> list[Layer]:
    return [mg.Standardize(6), mg.Dense(6, 9, "relu"), mg.Dense(9, 8, "gelu"), mg.Dense(8, 7, "tanh"), mg.Dense(7, 3)]


def network(*frozen: int) -> mg.Network:
    made = mg.Network(stack(), seed=2)
    made.adapt((X, Y))
    return made.frozen(*frozen)


def trainer(of: mg.Network, optimizer: Any = None, **options: Any) -> mg.Trainer:
    chosen = {"batch_size": 16, "backend": "cpu", "streams": 1, **options}
    return mg.Trainer(of, LOSS, optimizer or mg.Adam(0.05, **PENALTIES), **chosen)


def fit(made: mg.Trainer, data: Any = (X, Y), epochs: int = 3) -> mg.Network:
    made.fit(data, epochs, progress=False)
    return made.network


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_leave_frozen_weights_and_their_slots(name: str, tmp_path: Path) -> None:
    made = trainer(network(1, 3), OPTIMIZERS[name](0.05, **PENALTIES), streams=2)
    before = dict(made.network.parameters)
    fit(made)
    for parameter, values in made.network.parameters.items():
        assert np.array_equal(values, before[parameter]) == (parameter[0] in "13")
    made.save(tmp_path / "run.h5")
    arrays = storage.read(tmp_path / "run.h5").arrays
    for slot in OPTIMIZERS[name].slots:
        flat = arrays[f"/mlpgpu/run/slots/{slot}"]
        for parameter, segment in made.network.segments.items():
            moved = bool(flat[segment.offset : segment.end].any())
            assert moved == (parameter[0] not in "13"), (slot, parameter)


@pytest.mark.parametrize("options", [{}, {"streams": 3}], ids=["one", "shards"])
@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["plain", "penalties and clipped norm"])
def test_it_trains_as_the_upper_layers_alone(penalties: dict[str, Any], options: dict[str, Any]) -> None:
    """On the outputs of the lower ones, with the same bits: neither penalty nor norm sees what is frozen.

    Sums of the frozen layers are exact, since BLAS's bits of a row may depend on the other rows of a batch.
    """
    x = np.rint(4.0 * X) / 4.0
    layers = [mg.Dense(6, 9, "relu"), mg.Dense(9, 8, "relu"), mg.Dense(8, 7, "tanh"), mg.Dense(7, 3)]
    whole = mg.Network(layers, seed=2).frozen(0, 1)
    whole.parameters = {
        name: np.rint(8.0 * DRAW.uniform(-1.0, 1.0, values.shape)) / 8.0
        for name, values in whole.parameters.items()
        if name[0] in "01"
    }
    lower_layers = mg.Network(whole.layers[:2], seed=2)
    lower_layers.parameters = {name: values for name, values in whole.parameters.items() if name[0] in "01"}
    upper = mg.Network(whole.layers[2:], seed=2)
    upper.parameters = {f"{int(name[0]) - 2}{name[1:]}": whole.parameters[name] for name in list(whole.parameters)[4:]}
    fit(trainer(whole, mg.Adam(0.05, **penalties), **options), (x, Y))
    outputs = lower_layers.forward(x, backend="cpu")
    assert np.array_equal(outputs, lower_layers.forward(x[::-1], backend="cpu")[::-1]), "sums that are not exact"
    fit(trainer(upper, mg.Adam(0.05, **penalties), **options), (outputs, Y))
    for name, values in upper.parameters.items():
        np.testing.assert_array_equal(whole.parameters[f"{int(name[0]) + 2}{name[1:]}"], values)


def test_tied_layers_are_frozen_together() -> None:
    twice = mg.Dense(6, 6, "tanh")
    tied = mg.Network([twice, mg.Dense(6, 6), twice, mg.Dense(6, 3)], seed=1).frozen(2)
    assert tied.layers[0] is tied.layers[2] and not tied.layers[0].trainable  # type: ignore[attr-defined]
    before = dict(tied.parameters)
    fit(trainer(tied))
    kept = [name for name, values in tied.parameters.items() if np.array_equal(values, before[name])]
    assert kept == ["0.weight", "0.bias"]
    equal = mg.Dense(6, 6)
    (first, second, _) = mg.Network([mg.Dense(6, 6), equal, mg.Dense(6, 3)]).frozen(1).layers
    assert first.trainable and not second.trainable  # type: ignore[attr-defined]


def products(of: mg.Network, **options: Any) -> list[str]:
    """What the matrix products of a step's backward pass make."""
    step = of.lower(capacity=16, loss=LOSS, optimizer=mg.Adam(0.1), **options).training
    return [name for op in step if isinstance(op, plan.WeightedBackward) for name in (op.dweight, op.dx) if name]


def test_a_step_makes_no_products_for_what_is_frozen() -> None:
    assert products(network()) == ["d4.weight", "dy3", "d3.weight", "dy2", "d2.weight", "dy1", "d1.weight"]
    assert products(network(1, 2)) == ["d4.weight", "dy3", "d3.weight"]
    assert products(network(4, 2)) == ["dy3", "d3.weight", "dy2", "dy1", "d1.weight"]
    assert products(network(1, 2, 3)) == ["d4.weight"]


def test_the_plan_says_what_is_frozen() -> None:
    step = network(1, 3).lower(capacity=16, loss=LOSS, optimizer=mg.Adam(0.1))
    assert "230 parameters (126 frozen)" in str(step)
    assert step.gradient_count == 104
    assert [(each.offset, each.gradient, each.size) for each in step.trained_ranges] == [(63, 0, 80), (206, 80, 24)]


SETTING = Setting(132, "sm_90a", "float32", True)


def launches(of: mg.Network, optimizer: Any, **options: Any) -> list[str]:
    step = of.lower(capacity=16, loss=LOSS, optimizer=optimizer, **options)
    low = lower(step, multiprocessors=132, source="float32", arch="sm_90a")
    return [launch.entry.name for launch in (*low.shards[0], *low.finish)]


def test_a_card_launches_less(monkeypatch: pytest.MonkeyPatch) -> None:
    # A step by blocks of rows is one launch whatever is frozen.
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    every, fewer = (launches(network(*places), mg.Adam(0.1)) for places in ((), (1, 2)))
    assert sum("backward_update" in name for name in every) == 4
    assert sum("backward_update" in name for name in fewer) == 2
    assert sum("backward_input" in name for name in every) == 2 and not any("backward_input" in name for name in fewer)
    clipped = launches(network(1, 3), mg.Adam(0.1, clip_norm=1.0))
    assert clipped[-4:] == ["squares", "clip", "update_Adam", "update_Adam"]  # one for each range that is trained
    assert launches(network(1, 2), mg.Adam(0.1, clip_norm=1.0)).count("update_Adam") == 1


def test_a_card_updates_weights_and_biases_apart_where_only_weights_have_a_penalty() -> None:
    step = network().lower(capacity=16, loss=LOSS, optimizer=mg.Adam(0.1, alpha=0.5, clip_norm=1.0))
    low = lower(step, multiprocessors=132, source="float32", arch="sm_90a")
    updates = [launch.values for launch in low.finish if launch.entry.name == "update_Adam"]
    assert [values["alpha"] for values in updates] == [0.5, 0.0] * 4
    assert [values["size"] for values in updates] == [parameter.size for parameter in step.parameters]


def test_explain_says_why() -> None:
    step = network(1, 3).lower(capacity=16, loss=LOSS, optimizer=mg.Adam(0.1))
    assert isinstance(choose_kernel(step, multiprocessors=132, shared_bytes=227 << 10, arch="sm_90a"), PersistentKernel)
    assert re.search(r"no update +the layer is frozen: it passes the delta on", str(passes(step, SETTING)))
    tall = mg.Network([mg.Dense(5000, 64), mg.Dense(64, 3)]).frozen(0)
    shown = str(passes(tall.lower(capacity=16, loss=LOSS, optimizer=mg.Adam(0.1)), SETTING))
    assert "a layer is frozen, and a tail makes the deltas of all" in shown
    local = mg.LocallyConnected(64, 3, trainable=False)
    stacked = mg.Network([mg.Dense(8, 64), local, local, mg.Dense(60, 3)])
    (note,) = lower(
        stacked.lower(capacity=8, loss=LOSS, optimizer=mg.Adam(0.1)), multiprocessors=132, source="float32",
        arch="sm_90a",
    ).notes[:1]  # fmt: skip
    assert "since a layer of it is frozen" in note


def test_a_network_all_frozen_is_refused() -> None:
    made = network(1, 2, 3, 4)
    before, output = dict(made.parameters), made.output
    message = (
        r"layers: expected one with trainable=True, for a step to train, got frozen ones alone \(network.frozen\(\)"
    )
    with pytest.raises(ConfigurationError, match=message):
        trainer(made)
    assert made.output == output and all(np.array_equal(made.parameters[name], before[name]) for name in before)
    assert made.predict(X).shape == (60, 3)


def test_parameters_of_frozen_layers_can_be_set() -> None:
    made = trainer(network(1))
    fit(made, epochs=1)
    made.network.parameters["1.weight"] = np.full((6, 9), 0.25)
    fit(made, epochs=1)
    assert (made.network.parameters["1.weight"] == 0.25).all()


def test_a_loaded_network_is_frozen_and_trained_on(tmp_path: Path) -> None:
    trained = fit(trainer(network()))
    trained.save(tmp_path / "net.h5")
    loaded = mg.load(tmp_path / "net.h5")
    upper = loaded.frozen(1, 2)
    np.testing.assert_array_equal(upper.predict(X), trained.predict(X))
    assert (upper.output, upper.remembered, upper.adapted, upper.seed) == ("softmax", loaded.remembered, True, 2)
    fit(trainer(upper))
    assert not np.array_equal(upper.parameters["4.weight"], trained.parameters["4.weight"])
    np.testing.assert_array_equal(loaded.predict(X), trained.predict(X))  # the other network has not moved
    upper.save(tmp_path / "upper.h5")
    again = mg.load(tmp_path / "upper.h5")
    assert again.layers == upper.layers and repr(again) == repr(upper)
    assert again.frozen().layers == loaded.layers
    new = mg.Network([*upper.layers[:3], mg.Dense(8, 5)])  # a new last layer
    new.parameters = {
        name: values for name, values in upper.parameters.items() if name in new.parameters and name[0] < "3"
    }
    np.testing.assert_array_equal(new.parameters["2.bias"], upper.parameters["2.bias"])


def test_new_values_are_drawn_as_if_nothing_were_frozen() -> None:
    plain, frozen = (mg.Network(stack(), seed=2).frozen(*places) for places in ((), (1, 3)))
    assert frozen.is_new
    for name, values in plain.parameters.items():
        np.testing.assert_array_equal(values, frozen.parameters[name])


def test_a_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    unbroken = trainer(network(1, 3))
    unbroken.fit((X, Y), 4, progress=False)
    broken = trainer(network(1, 3))
    broken.fit((X, Y), 2, progress=False)
    broken.save(tmp_path / "half.h5")
    resumed = mg.Trainer.resume(tmp_path / "half.h5", backend="cpu")
    assert [getattr(layer, "trainable", None) for layer in resumed.network.layers] == [None, False, True, False, True]
    resumed.fit((X, Y), 4, progress=False)
    assert_same(run_of(resumed, tmp_path / "a.h5"), run_of(unbroken, tmp_path / "b.h5"))


def test_an_older_file_knows_of_no_frozen_layers() -> None:
    for layer in (mg.Dense(3, 2), mg.LocallyConnected(4, 2)):
        described = describe(layer)
        assert described.pop("trainable") is True
        assert rebuild("layer", described, {type(layer).__name__: type(layer)}) == layer


def test_what_is_shown() -> None:
    assert repr(mg.Dense(3, 2)) == "Dense(n_in=3, n_out=2, activation='identity', bias=True, init=None)"
    shown = repr(mg.LocallyConnected(4, 2, trainable=False))
    assert shown.endswith("bias='output', init=None, trainable=False)")
    text = str(network(1, 3))
    assert text.count("trainable=False") == 2
    assert text.endswith("230 parameters in float32, 126 of them frozen, output identity")
    assert "frozen" not in str(network())


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda net: net.frozen(5), ConfigurationError, "place of a layer: expected a whole number from 0 to 4, got 5"),
        (lambda net: net.frozen(-1), ConfigurationError, "from 0 to 4, got -1"),
        (lambda net: net.frozen([0, 1]), DtypeError, r"place of a layer: .* got list \[0, 1\]"),
        (lambda net: mg.Dense(3, 2, trainable=0), DtypeError, "Dense trainable: expected True or False, got 0"),
        (lambda net: mg.LocallyConnected(3, 2, trainable="no"), DtypeError, "LocallyConnected trainable"),
        (lambda net: setattr(net.layers[1], "trainable", False), ReadOnlyError, r"network.frozen\(0, 1\)"),
        (lambda net: setattr(net.layers[1], "n_out", 4), ReadOnlyError, "make a new layer"),
    ],
)
def test_mistakes(wrong: Callable[[mg.Network], Any], error: type[Exception], message: str) -> None:
    made = network()
    with pytest.raises(error, match=message):
        wrong(made)
    assert made.layers == network().layers


def test_layers_are_copied_and_compared_as_before() -> None:
    layer = mg.Dense(3, 2, "relu", trainable=False)
    assert copy.deepcopy(layer) == layer == copy.copy(layer) and hash(copy.copy(layer)) == hash(layer)
    assert layer != mg.Dense(3, 2, "relu")


def test_a_step_with_frozen_layers_counts_their_gradients_as_none(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    class Look(mg.Callback):
        def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
            found.append(trainer.histograms(4, ("parameters", "gradients")))

    trainer(network(1, 3)).fit((X, Y), 1, callbacks=[Look()], progress=False)
    gradients = {name for name in found[0] if name.endswith(".gradient")}
    assert gradients == {"2.weight.gradient", "2.bias.gradient", "4.weight.gradient", "4.bias.gradient"}
    assert "1.weight" in found[0]
