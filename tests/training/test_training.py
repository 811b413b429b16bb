"""Training as a whole: a step worked out by hand, what is learnt, and what must not change a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from helpers import EPS, LOSS_KINDS, LOSS_OF, Oracle, dataset
from hypothesis import given
from hypothesis import strategies as st

from mlpgpu import (
    SGD,
    Adam,
    Callback,
    CosineDecay,
    Dataset,
    Dense,
    Dropout,
    History,
    Momentum,
    Network,
    ReduceOnPlateau,
    Standardize,
    StepDecay,
    Trainer,
    WarmUp,
)
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends import StepLog
from mlpgpu.backends.cpu.program import CpuProgram
from mlpgpu.errors import ConfigurationError, DivergenceError
from mlpgpu.layers import Layer
from mlpgpu.losses import Loss, TargetKind
from mlpgpu.optimizers import OPTIMIZERS, Optimizer
from mlpgpu.random import epoch_order, half_words
from mlpgpu.training import fit as fit_module

SOFTMAX = "softmax_cross_entropy"


class EveryFifthStep(Callback):
    """Hears of steps, and of no epoch."""

    every_steps = 5


def small_network(seed: int = 1) -> Network:
    return Network([Dense(4, 8, "tanh"), Dropout(0.2), Dense(8, 3)], seed=seed)


def small_data(rows: int = 20, *, weighted: bool = False) -> Dataset:
    return dataset(SOFTMAX, "index", rows=rows, n_in=4, n_out=3, weighted=weighted)


def trained(
    network: Network,
    data: Dataset,
    *,
    loss: str | Loss = SOFTMAX,
    optimizer: Optimizer | None = None,
    epochs: int = 3,
    batch_size: int = 8,
    precision: str = "float64",
    shuffle: bool = True,
    drop_last: bool = False,
    **options: object,
) -> Trainer:
    trainer = Trainer(network, loss, optimizer or Momentum(0.1), batch_size=batch_size, precision=precision, **options)
    trainer.fit(data, epochs, shuffle=shuffle, drop_last=drop_last, progress=False)
    return trainer


def flat(trainer: Trainer) -> np.ndarray:
    return trainer.network.flat_parameters()


def without_seconds(history: History) -> list[dict[str, float]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


def close(actual: np.ndarray, expected: np.ndarray, *, terms: int, steps: int = 1) -> None:
    """Assert equality but for the order of sums.

    Sums of ``terms`` products of order one differ by at most eps for each; at rates of 0.1 and below, a
    step adds that much once more to what the steps before it left, and amplifies it by less than two at
    worst, but by about one on average.
    """
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4 * terms * steps * EPS * scale)


# --- by hand ---


def test_two_steps_worked_out_on_paper() -> None:
    # All numbers are sums of a few powers of two, so that float64 holds them exactly.
    network = Network([Dense(2, 2, "relu"), Dense(2, 1)], seed=0)
    network.parameters = {
        "0.weight": [[1.0, -1.0], [0.5, 1.0]],
        "0.bias": [0.0, 0.5],
        "1.weight": [[1.0], [-0.5]],
        "1.bias": [0.25],
    }
    trainer = Trainer(network, "squared_error", Momentum(0.5, momentum=0.5), batch_size=2, precision="float64")
    x, t = [[1.0, 2.0], [2.0, -1.0]], [[1.0], [0.75]]

    # Row A: z = (1 + 1, -1 + 2) + (0, ½) = (2, 1.5);    out = 2 - 0.75 + 0.25 = 1.5;   e = 0.5
    # Row B: z = (2 - ½, -2 - 1) + (0, ½) = (1.5, -2.5), relu (1.5, 0); out = 1.75;     e = 1
    # Loss: ½ (0.25 + 1) / 2 = 0.3125
    assert trainer.step(x, t) == 0.3125
    # dW₁ = ½ Σ e y = ½ ((1, 0.75) + (1.5, 0)) = (1.25, 0.375);  db₁ = ½ (0.5 + 1) = 0.75
    # dz₀ = e W₁, where relu is open:  A (0.5, -0.25), B (1, 0)
    # dW₀ = ½ Σ xᵀ dz₀ = ½ [(0.5, -0.25) + 2 (1, 0);  2 (0.5, -0.25) - (1, 0)] = [1.25, -0.125;  0, -0.25]
    # db₀ = ½ (1.5, -0.25) = (0.75, -0.125)
    # v = η g, w = w - v with η = ½:
    assert network.parameters["0.weight"].tolist() == [[0.375, -0.9375], [0.5, 1.125]]
    assert network.parameters["0.bias"].tolist() == [-0.375, 0.5625]
    assert network.parameters["1.weight"].tolist() == [[0.375], [-0.6875]]
    assert network.parameters["1.bias"].tolist() == [-0.125]

    # Row A: z = (0.375 + 1, -0.9375 + 2.25) + b₀ = (1, 1.875)
    #        out = 0.375 - 0.6875 · 1.875 - 0.125 = -1.0390625;   e = -2.0390625
    # Row B: z = (0.75 - 0.5, -1.875 - 1.125) + b₀ = (-0.125, -2.4375), relu (0, 0); out = -0.125;  e = -0.875
    # Loss: ½ (4.15777587890625 + 0.765625) / 2
    assert trainer.step(x, t) == 1.2308502197265625
    # dW₁ = ½ e_A (1, 1.875) = (-1.01953125, -1.91162109375);  db₁ = ½ (e_A + e_B) = -1.45703125
    # dz₀ = A e_A (0.375, -0.6875) = (-0.7646484375, 1.40185546875), B (0, 0)
    # dW₀ = ½ [dz₀; 2 dz₀] = [-0.38232421875, 0.700927734375;  -0.7646484375, 1.40185546875],  db₀ = its first row
    # v = ½ g + ½ v with the v of the first step, ½ of its gradients; for instance
    #   v of W₀[0, 0] = -0.191162109375 + ½ · 0.625 = 0.121337890625, and 0.375 less that is 0.253662109375
    assert network.parameters["0.weight"].tolist() == [
        [0.253662109375, -1.2567138671875],
        [0.88232421875, 0.486572265625],
    ]
    assert network.parameters["0.bias"].tolist() == [-0.371337890625, 0.2432861328125]
    assert network.parameters["1.weight"].tolist() == [[0.572265625], [0.174560546875]]
    assert network.parameters["1.bias"].tolist() == [0.416015625]


def by_hand(
    network: Network, data: Dataset, batches: Sequence[np.ndarray], rate: float, alpha: float
) -> list[np.ndarray]:
    """Momentum on squared error for [Dense(tanh), Dense], batch by batch, as a textbook writes it."""
    parameters = [values.astype(float) for values in network.parameters.values()]
    w0, b0, w1, b1 = parameters
    velocities = [np.zeros_like(p) for p in parameters]
    for rows in batches:
        x, t = data.x[rows], data.y[rows]  # (B, n_in), (B, n_out)
        y = np.tanh(x @ w0 + b0)
        error = (y @ w1 + b1 - t) / len(rows)
        dz = error @ w1.T * (1.0 - y**2)
        for p, v, g in zip(parameters, velocities, (x.T @ dz, dz.sum(0), y.T @ error, error.sum(0)), strict=True):
            v *= alpha
            v += rate * g
            p -= v
    return parameters


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("rows", "batch_size"), [(20, 8), (16, 8), (9, 1), (8, 8), (20, 19)])
def test_epochs_follow_a_hand_loop(rows: int, batch_size: int, shuffle: bool, drop_last: bool) -> None:
    data = dataset("squared_error", "dense", rows=rows, n_in=4, n_out=2)
    network = Network([Dense(4, 5, "tanh"), Dense(5, 2)], seed=3)
    batches = []
    for epoch in range(3):
        order = epoch_order(rows, seed=3, epoch=epoch) if shuffle else np.arange(rows)
        stop = rows - rows % batch_size if drop_last else rows
        batches += [order[start : start + batch_size][: stop - start] for start in range(0, stop, batch_size)]
    expected = by_hand(network, data, batches, 0.05, 0.9)
    trainer = trained(
        network,
        data,
        loss="squared_error",
        optimizer=Momentum(0.05),
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    assert trainer.steps == len(batches)
    close(flat(trainer), np.concatenate([p.ravel() for p in expected]), terms=rows + 9, steps=len(batches))


def test_a_batch_may_be_larger_than_the_data() -> None:
    data = small_data(5)
    large, exact = (trained(small_network(), data, batch_size=size) for size in (64, 5))
    assert large.steps == exact.steps == 3
    assert (flat(large) == flat(exact)).all()
    with pytest.raises(ConfigurationError, match="at least one batch of 64 rows"):
        trained(small_network(), data, batch_size=64, drop_last=True)


def test_an_epoch_s_loss_is_the_mean_over_its_rows() -> None:
    data = small_data(20, weighted=True)
    network = Network([Dense(4, 3)], seed=1)
    w = network.flat_parameters().astype(np.float64)
    expected = Oracle(network, data, SOFTMAX).loss(w)
    trainer = trained(network, data, optimizer=SGD(0.0), epochs=1)
    assert trainer.history["loss"] == pytest.approx([expected], rel=20 * EPS)
    assert trainer.evaluate(data)["loss"] == pytest.approx(expected, rel=20 * EPS)


# --- learning ---


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_xor_is_learnt(precision: str) -> None:
    x, y = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], [0, 1, 1, 0]
    network = Network([Dense(2, 8, "tanh"), Dense(8, 1)], seed=1)
    trained(
        network,
        Dataset(x, y),
        loss="binary_cross_entropy",
        optimizer=Adam(0.1),
        epochs=150,
        batch_size=4,
        precision=precision,
    )
    assert np.abs(network.predict(x) - y).max() < 0.05
    assert network.labels(x).tolist() == y


def test_sixteen_samples_are_learnt_by_heart() -> None:
    random = np.random.default_rng(0)
    data = Dataset(random.normal(size=(16, 8)), random.integers(4, size=16))
    trainer = trained(
        Network([Dense(8, 32, "relu"), Dense(32, 4)], seed=1),
        data,
        optimizer=Adam(0.02),
        epochs=300,
        batch_size=16,
        precision="float32",
        metrics=["accuracy"],
    )
    assert trainer.evaluate(data) == {"loss": pytest.approx(0.0, abs=1e-3), "accuracy": 1.0}


# --- the same bits, and other ones ---


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_seed_repeats_its_bits(streams: int, precision: str) -> None:
    first, second = (
        trained(small_network(), small_data(weighted=True), precision=precision, streams=streams) for _ in range(2)
    )
    assert (flat(first) == flat(second)).all()
    assert without_seconds(first.history) == without_seconds(second.history)


def test_another_seed_differs() -> None:
    first, second = (trained(small_network(seed), small_data()) for seed in (1, 2))
    assert (flat(first) != flat(second)).any()
    # Nor do shuffles and masks, from the same initial values.
    network = small_network(2)
    network.parameters = dict(small_network(1).parameters)
    assert (flat(trained(network, small_data())) != flat(first)).any()


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_streams_change_the_order_of_sums_alone(rows: int) -> None:
    data = small_data(rows, weighted=True)
    one, *others = (trained(small_network(), data, streams=streams) for streams in (1, 2, 3, 4))
    for other in others:
        close(flat(other), flat(one), terms=8, steps=one.steps)
        np.testing.assert_allclose(other.history["loss"], one.history["loss"], rtol=8 * one.steps * EPS)


@pytest.mark.parametrize("streams", [2, 3])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_threads_that_run_shares_change_no_bit(streams: int, precision: str) -> None:
    one, two = (
        trained(small_network(), small_data(), streams=streams, threads=threads, precision=precision)
        for threads in (1, 2)
    )
    assert (flat(one) == flat(two)).all()


def test_dropout_s_masks_hang_on_step_row_and_unit() -> None:
    # One wide layer that copies its input, whose gradient shows which inputs were kept.
    rows, width, rate, seed = 5, 6, 0.4, 7
    network = Network([Dropout(rate), Dense(width, 1, bias=False)], seed=seed)
    random = np.random.default_rng(1)
    data = Dataset(random.normal(size=(rows, width)), random.normal(size=(rows, 1)))
    for streams in (1, 3):
        network.parameters = {"1.weight": np.zeros((width, 1))}
        trainer = Trainer(network, "squared_error", SGD(1.0), batch_size=rows, precision="float64", streams=streams)
        for step in range(3):
            network.parameters = {"1.weight": np.zeros((width, 1))}
            trainer.step(data.x, data.y)
            drawn = half_words(0, rows * width, seed=seed, step=step, layer=0).reshape(rows, width)
            kept = data.x * (drawn / 2**16 >= rate) / (1.0 - rate)
            close(network.parameters["1.weight"], kept.T @ data.y / rows, terms=rows)


# --- weights ---


def test_weights_are_repetitions() -> None:
    data, times = small_data(12), np.arange(12) % 4  # weight 0 leaves a row out
    repeated = np.repeat(np.arange(12), times)
    # Dropout draws by the place in the batch, and shuffles by the number of rows.
    layers = [Dense(4, 8, "tanh"), Dense(8, 3)]
    by_weight = trained(Network(layers, seed=1), data.with_weight(times), batch_size=64, shuffle=False)
    by_row = trained(Network(layers, seed=1), Dataset(data.x[repeated], data.y[repeated]), batch_size=64, shuffle=False)
    close(flat(by_weight), flat(by_row), terms=len(repeated), steps=3)
    np.testing.assert_allclose(by_weight.history["loss"], by_row.history["loss"], rtol=2 * len(repeated) * 3 * EPS)


def test_a_scale_of_all_weights_changes_nothing() -> None:
    data = small_data(20, weighted=True)
    plain, doubled = (trained(small_network(), data.with_weight(data.weight * k)) for k in (1.0, 4.0))
    assert (flat(plain) == flat(doubled)).all()  # by a power of two: no rounding differs


def test_a_batch_of_no_weight_moves_by_momentum_alone() -> None:
    network = Network([Dense(4, 3)], seed=1)
    trainer = Trainer(network, SOFTMAX, Momentum(0.1, momentum=0.5), batch_size=8, precision="float64")
    before = network.flat_parameters().copy()
    data = small_data(16).with_weight(np.arange(16) < 8)
    trainer.fit(data, 1, shuffle=False, progress=False)
    # v = η g in the first step and ½ v in the second.
    g = Oracle(Network([Dense(4, 3)], seed=1), Dataset(data.x[:8], data.y[:8]), SOFTMAX).gradient(before.astype(float))
    close(flat(trainer), before - 1.5 * 0.1 * g, terms=8, steps=2)


@pytest.mark.parametrize("given_weight", [False, True])
def test_class_weights_are_row_weights(given_weight: bool) -> None:
    data = small_data(20, weighted=given_weight)
    given = np.ones(20) if data.weight is None else data.weight
    by_class = {0: 0.5, 2: 3.0}  # class 1 has 1
    weighted = data.with_weight(given * np.array([0.5, 1.0, 3.0])[data.y])
    assert (
        flat(trained(small_network(), data, class_weight=by_class)) == flat(trained(small_network(), weighted))
    ).all()
    counts = np.bincount(data.y)
    balanced = data.with_weight(given * (20 / (3 * counts))[data.y])
    assert (
        flat(trained(small_network(), data, class_weight="balanced")) == flat(trained(small_network(), balanced))
    ).all()


def test_class_weights_by_name() -> None:
    names = np.array(["red", "green", "blue"])
    data = small_data(20)
    named = Dataset(data.x, names[data.y], classes=names)
    by_name = trained(small_network(), named, class_weight={"blue": 2.0})
    assert (flat(by_name) == flat(trained(small_network(), data, class_weight={2: 2.0}))).all()


def test_an_evaluation_counts_rows_by_weight_but_not_by_class() -> None:
    data = small_data(20, weighted=True)
    trainer = trained(small_network(), data, class_weight={0: 5.0}, batch_size=7)
    oracle = Oracle(Network([Dense(4, 8, "tanh"), Dense(8, 3)], seed=1), data, SOFTMAX)
    assert trainer.evaluate(data)["loss"] == pytest.approx(oracle.loss(flat(trainer)), rel=40 * EPS)


# --- penalties and clipping ---


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("limit", [0.01, 100.0])
def test_penalties_and_clipping_by_formula(limit: float, streams: int) -> None:
    data = small_data(20, weighted=True)
    network = Network([Dense(4, 8, "tanh"), Dense(8, 3)], seed=1)
    before = network.flat_parameters().astype(np.float64)
    g = Oracle(network, data, SOFTMAX).gradient(before)
    length = np.sqrt(np.sum(g**2))
    assert 0.01 < length < 100.0
    clipped = g * min(1.0, limit / length)
    expected = before - 0.1 * (clipped + 0.02 * before + 0.03 * np.sign(before))
    optimizer = SGD(0.1, l1=0.03, l2=0.02, clip_norm=limit)
    trainer = trained(network, data, optimizer=optimizer, batch_size=20, shuffle=False, epochs=1, streams=streams)
    close(flat(trainer), expected, terms=20)


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_alpha_is_of_weights_and_over_the_batch_s_weight(clip_norm: float | None) -> None:
    data, rate, alpha = small_data(weighted=True), 0.1, 0.7
    options = {"epochs": 1, "batch_size": 32}
    networks = [small_network(), small_network()]
    before = dict(networks[0].parameters), dict(networks[1].parameters)  # drawn, so that both begin with float32's
    plain, penalized = (
        trained(network, data, optimizer=SGD(rate, alpha=each, clip_norm=clip_norm), **options)
        for network, each in zip(networks, (0.0, alpha), strict=True)
    )
    assert data.weight is not None
    for name, values in plain.network.parameters.items():
        share = rate * alpha / float(data.weight.sum(dtype=np.float64)) if name.endswith("weight") else 0.0
        moved = values - share * before[0][name].astype(np.float64)
        np.testing.assert_allclose(penalized.network.parameters[name], moved, rtol=16 * EPS, atol=16 * EPS)


@pytest.mark.parametrize("kind", list(OPTIMIZERS.values()), ids=list(OPTIMIZERS))
def test_an_update_in_blocks_has_the_bits_of_one(kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = kind(0.01, l1=0.01, l2=0.01)
    whole = trained(small_network(), small_data(), optimizer=optimizer)
    monkeypatch.setattr("mlpgpu.backends.cpu.updates.UPDATE_BLOCK", 10)
    assert (flat(trained(small_network(), small_data(), optimizer=optimizer)) == flat(whole)).all()


# --- single steps, and who holds the parameters ---


@pytest.mark.parametrize("kind", list(OPTIMIZERS.values()), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("streams", [1, 2])
def test_steps_are_those_of_a_fit(kind: type[Optimizer], streams: int) -> None:
    data = small_data(20, weighted=True)
    rate = StepDecay(0.02, 0.5, steps=2)
    fit = trained(small_network(), data, optimizer=kind(rate), shuffle=False, epochs=2, streams=streams)
    stepped = Trainer(small_network(), SOFTMAX, kind(rate), batch_size=8, precision="float64", streams=streams)
    losses = [
        stepped.step(data.x[rows], data.y[rows], data.weight[rows])
        for _ in range(2)
        for rows in (slice(0, 8), slice(8, 16), slice(16, 20))
    ]
    assert (flat(stepped) == flat(fit)).all()
    sums = np.array([data.weight[rows].sum() for rows in (slice(0, 8), slice(8, 16), slice(16, 20))])
    np.testing.assert_allclose(fit.history["loss"], np.reshape(losses, (2, 3)) @ sums / sums.sum(), rtol=20 * EPS)


def test_steps_between_fits_leave_each_other_s_state_alone() -> None:
    data = small_data(8)
    trainer = trained(small_network(), data, optimizer=Adam(0.01), epochs=1, shuffle=False)
    trainer.evaluate(small_data(11, weighted=True))  # other rows, and weights, in the same buffers
    trainer.step(data.x, data.y)
    trainer.fit(data, 1, shuffle=False, progress=False)
    assert (flat(trainer) == flat(trained(small_network(), data, optimizer=Adam(0.01), shuffle=False))).all()


def test_two_trainers_hand_a_network_to_each_other() -> None:
    data = small_data(8)
    layers = [Dense(4, 8, "tanh"), Dense(8, 3)]
    network = Network(layers, seed=1)
    oracle = Oracle(Network(layers, seed=1), data, SOFTMAX)
    a = Trainer(network, SOFTMAX, Momentum(0.1, momentum=0.5), batch_size=8, precision="float64")
    b = Trainer(network, SOFTMAX, SGD(0.2), batch_size=8, precision="float64")
    w = network.flat_parameters().astype(np.float64)
    v = 0.1 * oracle.gradient(w)
    for step, trainer in enumerate((a, b, a)):
        trainer.step(data.x, data.y)
        if trainer is b:
            w = w - 0.2 * oracle.gradient(w)
        else:  # a keeps its velocity while b has the network
            v = v if step == 0 else 0.1 * oracle.gradient(w) + 0.5 * v
            w = w - v
        close(network.flat_parameters(), w, terms=8, steps=3)
        assert (flat(a) == flat(b)).all()
        assert a.evaluate(data) == b.evaluate(data)


def test_parameters_that_are_set_are_what_is_trained() -> None:
    data = small_data(8)
    network = Network([Dense(4, 3)], seed=1)
    trainer = trained(network, data, optimizer=SGD(0.1))
    chosen = np.linspace(-1.0, 1.0, 12).reshape(4, 3)
    network.parameters["0.weight"] = chosen
    network.parameters = {"0.bias": [0.0, 0.5, 1.0]}
    assert (network.parameters["0.weight"] == chosen).all()
    start = network.flat_parameters().copy()
    trainer.step(data.x, data.y)
    g = Oracle(Network([Dense(4, 3)], seed=1), data, SOFTMAX).gradient(start)
    close(flat(trainer), start - 0.1 * g, terms=8)


def test_parameters_are_a_mapping() -> None:
    parameters = Network([Dense(4, 3, bias=False)], seed=1).parameters
    assert list(parameters) == ["0.weight"] and len(parameters) == 1
    assert "0.weight" in parameters
    assert "0.bias" not in parameters
    assert parameters.get("0.bias") is None


def test_standardized_targets_are_scaled_back() -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=(40, 3)) * [1.0, 100.0, 0.01] + [0.0, 1e3, 5.0]
    y = (x - x.mean(0)) / x.std(0) @ random.normal(size=(3, 2)) * [1e3, 1e-3] + [1e4, 7.0]
    network = Network([Standardize(3), Dense(3, 2), Standardize(2)], seed=1)
    trainer = trained(
        network, Dataset(x, y), loss="mean_squared_error", optimizer=SGD(0.3), epochs=100, batch_size=40, metrics=["r2"]
    )
    # A linear map between standardized columns: descent at this rate finds it to the last digits.
    np.testing.assert_allclose((network.predict(x) - y) / y.std(0), 0.0, atol=1e-6)
    assert trainer.evaluate(Dataset(x, y))["r2"] == pytest.approx(1.0, abs=1e-9)


# --- rates ---


def test_rates_follow_the_schedule() -> None:
    data = small_data(20)  # three steps an epoch
    in_steps, in_epochs = (
        trained(small_network(), data, optimizer=SGD(StepDecay(0.1, 0.5, **length)), epochs=4)
        for length in ({"steps": 6}, {"epochs": 2})
    )
    assert in_steps.history["rate"] == in_epochs.history["rate"] == [0.1, 0.1, 0.05, 0.05]
    assert (flat(in_steps) == flat(in_epochs)).all()


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("rows", [7, 20, 33])
def test_short_epochs_run_together(rows: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits, rates and records are those of epochs one by one, however many run at a time."""
    runs: list[int] = []
    run = CpuProgram.run

    def counted(self: CpuProgram, first_step: int, rates: np.ndarray, log: StepLog | None = None) -> np.ndarray:
        runs.append(len(rates))
        return run(self, first_step, rates, log)

    monkeypatch.setattr(CpuProgram, "run", counted)
    monkeypatch.setattr(fit_module, "RUN_SECONDS", 1e9)
    data, schedule, epochs = small_data(rows), WarmUp(CosineDecay(0.1, epochs=39.7), epochs=2.3), 40
    steps_per_epoch = -(-rows // 8)
    made = {}
    of_name: dict[str, list[object]] = {"alone": [], "told": [lambda record: None], "steps": [EveryFifthStep()]}
    for name, callbacks in of_name.items():
        runs.clear()
        trainer = Trainer(small_network(), SOFTMAX, Momentum(schedule), batch_size=8, precision=precision)
        trainer.fit(data, epochs, callbacks=callbacks, progress=False)
        made[name] = trainer, max(runs)
        assert sum(runs) == trainer.steps == epochs * steps_per_epoch and trainer.epochs == epochs
        assert all(record["seconds"] > 0.0 for record in trainer.history)
    alone, at_once = made["alone"]
    assert at_once > 10 * steps_per_epoch >= steps_per_epoch >= made["told"][1]
    assert made["steps"][1] <= 5
    for name in ("told", "steps"):
        assert (flat(made[name][0]) == flat(alone)).all()
        assert without_seconds(made[name][0].history) == without_seconds(alone.history)


def test_a_loss_that_is_not_finite_ends_the_records_of_epochs_that_ran_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit_module, "RUN_SECONDS", 1e9)
    network = Network([Dense(1, 1, bias=False)], seed=1)
    trainer = Trainer(network, "squared_error", SGD(100.0), batch_size=1, precision="float32")
    data = Dataset(np.ones((1, 1)), np.zeros((1, 1)))
    with pytest.raises(DivergenceError) as raised:
        trainer.fit(data, 100, progress=False)
    assert len(trainer.history) == trainer.epochs <= raised.value.step
    assert np.isfinite(trainer.history["loss"]).all() and trainer.epochs > 2


def test_a_rate_at_its_step() -> None:
    # A single weight of gradient 1 counts what the rates sum up to.
    network = Network([Dense(1, 1, bias=False, init="zeros")], seed=1)
    trainer = Trainer(network, "absolute_error", SGD(StepDecay(1.0, 0.5, steps=1)), batch_size=1, precision="float64")
    for expected in (-1.0, -1.5, -1.75):
        trainer.step([[1.0]], [[-10.0]])
        assert network.parameters["0.weight"] == expected


def test_reduce_on_plateau_in_a_fit() -> None:
    # A rate too small to improve anything: after the first epoch, every two epochs without improvement reduce it.
    schedule = ReduceOnPlateau(1e-12, factor=0.5, patience=2, monitor="loss", least=2e-13)
    trainer = trained(Network([Dense(4, 3)], seed=1), small_data(8), optimizer=SGD(schedule), epochs=8)
    rates = [1e-12, 1e-12, 1e-12, 5e-13, 5e-13, 2.5e-13, 2.5e-13, 2e-13]
    assert trainer.history["rate"] == rates


# --- any network ---


@st.composite
def networks(draw: Callable) -> tuple[list[Layer], str, TargetKind]:
    widths = draw(st.lists(st.integers(1, 17), min_size=2, max_size=5))
    activations = draw(st.lists(st.sampled_from(list(ACTIVATIONS)), min_size=len(widths), max_size=len(widths)))
    layers: list[Layer] = [
        Dense(n_in, n_out, activation, bias=draw(st.booleans()))
        for n_in, n_out, activation in zip(widths, widths[1:], activations, strict=False)
    ]
    if draw(st.booleans()):
        layers.insert(draw(st.integers(0, len(layers))), Dropout(0.25))
    # The exponential of logits that a network of any weights gives is too large to train on.
    kinds = [(loss, kind) for loss, kind in LOSS_KINDS if loss != "poisson"]
    return layers, *draw(st.sampled_from(kinds))


@given(case=networks(), rows=st.integers(1, 40), batch_size=st.integers(1, 50), streams=st.integers(1, 4))
def test_any_network(case: tuple[list[Layer], str, TargetKind], rows: int, batch_size: int, streams: int) -> None:
    layers, loss, kind = case
    dense = [layer for layer in layers if isinstance(layer, Dense)]
    shapes: dict[str, tuple[int, ...]] = {}
    for place, layer in enumerate(layers):
        if isinstance(layer, Dense):
            shapes[f"{place}.weight"] = (layer.n_in, layer.n_out)
            shapes |= {f"{place}.bias": (layer.n_out,)} if layer.bias else {}
    n_in, n_out = dense[0].n_in, dense[-1].n_out
    data = dataset(loss, kind, rows=rows, n_in=n_in, n_out=n_out, weighted=rows % 2 == 0)
    one, shared = (
        trained(
            Network(layers, seed=5),
            data,
            loss=LOSS_OF[loss],
            optimizer=SGD(0.01),
            epochs=2,
            batch_size=batch_size,
            streams=count,
        )
        for count in (1, streams)
    )
    assert one.steps == 2 * -(-rows // batch_size)
    for trainer in (one, shared):
        assert np.isfinite(trainer.history["loss"]).all()
        assert {name: values.shape for name, values in trainer.network.parameters.items()} == shapes
    terms = min(rows, batch_size) + sum(layer.n_in for layer in dense)
    close(flat(shared), flat(one), terms=terms, steps=one.steps)
    whole = one.network.predict(data)
    assert whole.shape == (rows, n_out)
    for size in (1, 7):
        # The depth of the network times the products in a unit, at most; parts of numbers of order one.
        close(one.network.predict(data, batch_size=size), whole, terms=terms)
