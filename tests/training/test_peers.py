"""Training step by step beside PyTorch and scikit-learn, and files that Keras opens."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.losses import LOSSES
from mlpgpu.optimizers import OPTIMIZERS, AdamW, Optimizer

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras would otherwise look for TensorFlow
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.peers

STEPS = 30
BATCH_SIZES = (16, 16, 5)  # the last batch of an epoch is smaller
WIDTHS = (7, 9, 8, 3)
PRECISIONS = ("float32", "float64")

functional = torch.nn.functional

TORCH_ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "identity": torch.nn.Identity,
    "sigmoid": torch.nn.Sigmoid,
    "tanh": torch.nn.Tanh,
    "relu": torch.nn.ReLU,
    "leaky_relu": torch.nn.LeakyReLU,
    "elu": torch.nn.ELU,
    "softplus": torch.nn.Softplus,
    "gelu": torch.nn.GELU,
    "silu": torch.nn.SiLU,
}

TORCH_LOSSES: dict[str, Callable[..., Any]] = {
    "squared_error": lambda z, t: (z - t).square().sum(dim=1).mean() / 2,
    "mean_squared_error": functional.mse_loss,
    "absolute_error": functional.l1_loss,
    "huber": functional.huber_loss,
    "binary_cross_entropy": functional.binary_cross_entropy_with_logits,
    "softmax_cross_entropy": functional.cross_entropy,
    "quantile": lambda z, t: functional.l1_loss(z, t) / 2,
    "poisson": functional.poisson_nll_loss,
    "binary_focal": lambda z, t: (
        -(t * (-z).sigmoid() ** 2 * functional.logsigmoid(z) + (1 - t) * z.sigmoid() ** 2 * functional.logsigmoid(-z))
    ).mean(),
    "focal": lambda z, t: (
        (-((t if t.ndim == 2 else functional.one_hot(t, z.shape[1])) * (1 - z.softmax(1)) ** 2 * z.log_softmax(1)))
        .sum(1)
        .mean()
    ),
}

TORCH_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda w, o: torch.optim.SGD(w, lr=o.rate, weight_decay=o.l2),
    "Momentum": lambda w, o: torch.optim.SGD(w, lr=o.rate, momentum=o.momentum, weight_decay=o.l2),
    "Nesterov": lambda w, o: torch.optim.SGD(w, lr=o.rate, momentum=o.momentum, nesterov=True, weight_decay=o.l2),
    "RMSprop": lambda w, o: torch.optim.RMSprop(w, lr=o.rate, alpha=o.rho, eps=o.epsilon, weight_decay=o.l2),
    "Adam": lambda w, o: torch.optim.Adam(w, lr=o.rate, betas=(o.beta1, o.beta2), eps=o.epsilon, weight_decay=o.l2),
    "AdamW": lambda w, o: torch.optim.AdamW(
        w, lr=o.rate, betas=(o.beta1, o.beta2), eps=o.epsilon, weight_decay=o.weight_decay
    ),
}


def tolerance(precision: str) -> float:
    """The relative difference that rounding alone may make after STEPS steps.

    A step rounds each number some 2·(7 + 9 + 8) + 16 times on its way forward, back and through the
    sum over rows; errors of earlier steps stay, and add up.
    """
    roundings = 2 * sum(WIDTHS[:-1]) + max(BATCH_SIZES)
    return STEPS * roundings * float(np.finfo(precision).eps)


def batches(kind: str, precision: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """STEPS batches of inputs (B, 7) and targets: classes (B,), or probabilities of 3 classes (B, 3)."""
    rng = np.random.default_rng(3)
    made = []
    for step in range(STEPS):
        rows = BATCH_SIZES[step % len(BATCH_SIZES)]
        x = rng.standard_normal((rows, WIDTHS[0])).astype(precision)
        t = rng.integers(WIDTHS[-1], size=rows) if kind == "index" else rng.dirichlet(np.ones(WIDTHS[-1]), rows)
        made.append((x, t if kind == "index" else t.astype(precision)))
    return made


def dense_layers(activation: str) -> list[mg.Dense]:
    first, second, third, last = WIDTHS
    return [mg.Dense(first, second, activation), mg.Dense(second, third, activation), mg.Dense(third, last)]


def torch_twin(net: mg.Network, activation: str, precision: str) -> Any:
    """A torch network with the same parameters as ``net``."""
    modules: list[Any] = []
    for place, layer in enumerate(net.layers):
        linear = torch.nn.Linear(layer.n_in, layer.n_out, dtype=getattr(torch, precision))
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(net.parameters[f"{place}.weight"].T))
            linear.bias.copy_(torch.tensor(net.parameters[f"{place}.bias"]))
        modules += [linear, TORCH_ACTIVATIONS[activation]()]
    return torch.nn.Sequential(*modules[:-1])


def torch_step(model: Any, stepper: Any, optimizer: Optimizer, loss: Any) -> None:
    stepper.zero_grad()
    loss.backward()
    parameters = list(model.parameters())
    if optimizer.clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip_norm)
        if norm > optimizer.clip_norm:
            for p in parameters:
                p.grad *= (norm + 1e-6) / norm  # PyTorch divided by norm + 1e-6
    # PyTorch has no L1, and AdamW's weight_decay is no L2.
    l2 = optimizer.l2 if isinstance(optimizer, AdamW) else 0.0
    with torch.no_grad():
        for p in parameters:
            p.grad += optimizer.l1 * p.sign() + l2 * p
    stepper.step()


def assert_same_training(
    optimizer: Optimizer,
    *,
    precision: str,
    activation: str = "tanh",
    loss: str = "softmax_cross_entropy",
    kind: str | None = None,
    class_weight: dict[int, float] | None = None,
    streams: int = 1,
) -> None:
    """Train both for STEPS steps; every loss and all final parameters must agree to rounding."""
    net = mg.Network(dense_layers(activation), seed=11)
    model = torch_twin(net, activation, precision)
    stepper = TORCH_OPTIMIZERS[type(optimizer).__name__](model.parameters(), optimizer)
    options = {}
    if class_weight is not None:
        options["weight"] = torch.tensor(list(class_weight.values()), dtype=getattr(torch, precision))
    trainer = mg.Trainer(
        net,
        loss,
        optimizer,
        batch_size=max(BATCH_SIZES),
        precision=precision,
        backend="cpu",
        class_weight=class_weight,
        streams=streams,
    )
    ours, theirs = [], []
    for x, t in batches(kind or LOSSES[loss].targets[0], precision):
        ours.append(trainer.step(x, t))
        value = TORCH_LOSSES[loss](model(torch.from_numpy(x)), torch.from_numpy(t), **options)
        theirs.append(value.item())
        torch_step(model, stepper, optimizer, value)

    bound = tolerance(precision)
    np.testing.assert_allclose(ours, theirs, rtol=bound)
    for place, linear in enumerate(m for m in model if isinstance(m, torch.nn.Linear)):
        for name, expected in (("weight", linear.weight.detach().numpy().T), ("bias", linear.bias.detach().numpy())):
            difference = np.linalg.norm(net.parameters[f"{place}.{name}"] - expected)
            assert difference <= bound * np.linalg.norm(expected), f"{place}.{name}"


RATES = {"SGD": 0.1, "Momentum": 0.05, "Nesterov": 0.05, "RMSprop": 0.003, "Adam": 0.003, "AdamW": 0.003}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", [{}, {"l2": 0.01}, {"l1": 0.001}, {"clip_norm": 0.1}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_torch_does(name: str, options: dict[str, float], precision: str) -> None:
    assert_same_training(OPTIMIZERS[name](RATES[name], **options), precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_decoupled_weight_decay_trains_as_torch_does(precision: str) -> None:
    assert_same_training(mg.AdamW(0.003, weight_decay=0.3), precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_trains_as_torch_does(activation: str, precision: str) -> None:
    assert_same_training(mg.Momentum(0.05), activation=activation, precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("loss", "kind"), [(name, kind) for name, loss in LOSSES.items() for kind in loss.targets])
def test_every_loss_trains_as_torch_does(loss: str, kind: str, precision: str) -> None:
    assert_same_training(mg.Momentum(0.05), loss=loss, kind=kind, precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_class_weights_train_as_torch_does(precision: str) -> None:
    assert_same_training(mg.Momentum(0.05), class_weight={0: 0.5, 1: 1.0, 2: 3.0}, precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_streams_train_as_torch_does(precision: str) -> None:
    assert_same_training(mg.Momentum(0.05), streams=3, precision=precision)


def test_training_in_epochs_is_that_of_scikit_learn() -> None:
    networks = pytest.importorskip("sklearn.neural_network")
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((53, WIDTHS[0])), np.arange(53) % WIDTHS[-1]
    peer = networks.MLPClassifier(
        WIDTHS[1:-1], activation="tanh", solver="sgd", momentum=0.9, nesterovs_momentum=False, alpha=0.0,
        learning_rate_init=0.05, batch_size=16, shuffle=False, warm_start=True, max_iter=1, random_state=1,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest.importorskip("sklearn.exceptions").ConvergenceWarning)
        peer.fit(x, y)  # its first epoch makes the initial values; a warm start forgets the velocity
        net = mg.Network(dense_layers("tanh"), seed=1)
        trainer = mg.Trainer(net, "softmax_cross_entropy", mg.Momentum(0.05), batch_size=16, precision="float64")
        trainer.evaluate(mg.Dataset(x, y))  # the trainer takes the network, whose values are float64 from here on
        for place, (weight, bias) in enumerate(zip(peer.coefs_, peer.intercepts_, strict=True)):
            net.parameters.update({f"{place}.weight": weight, f"{place}.bias": bias})
        peer.set_params(max_iter=STEPS).fit(x, y)
    history = trainer.fit(mg.Dataset(x, y), epochs=STEPS, shuffle=False, progress=False)

    bound = 4 * tolerance("float64")  # an epoch has four steps
    np.testing.assert_allclose(history["loss"], peer.loss_curve_[-STEPS:], rtol=bound)
    for place, weight in enumerate(peer.coefs_):
        difference = np.linalg.norm(net.parameters[f"{place}.weight"] - weight)
        assert difference <= bound * np.linalg.norm(weight)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keras_loads_a_weights_file(activation: str, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    functions = {
        "identity": "linear",
        "leaky_relu": lambda z: keras.activations.leaky_relu(z, negative_slope=0.01),
        "gelu": lambda z: keras.activations.gelu(z, approximate=False),
    }
    net = mg.Network(
        [mg.Dense(7, 9, activation), mg.Dropout(0.2), mg.Dense(9, 8, activation, bias=False), mg.Dense(8, 3)], seed=2
    )
    x = np.random.default_rng(1).standard_normal((20, 7)).astype(np.float32)
    data = mg.Dataset(x, np.arange(20) % 3)
    mg.Trainer(net, "softmax_cross_entropy", mg.Adam(0.01)).fit(data, epochs=2, progress=False)  # no bias stays 0
    net.save(tmp_path / "net.weights.h5")

    function = functions.get(activation, activation)
    model = keras.Sequential(
        [
            keras.layers.Input((7,)),
            keras.layers.Dense(9, activation=function),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(8, activation=function, use_bias=False),
            keras.layers.Dense(3),
        ]
    )
    model.load_weights(tmp_path / "net.weights.h5")
    np.testing.assert_allclose(net.forward(x), model(x).numpy(force=True), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("scales_targets", [False, True])
def test_keras_standardizes_as_the_file_says(scales_targets: bool, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    x = np.random.default_rng(1).standard_normal((50, 3)) * [1.0, 100.0, 0.0] + [5.0, -1000.0, 3.0]
    layers = [mg.Standardize(3), mg.Dense(3, 9, "tanh"), mg.Dense(9, 1), *[mg.Standardize(1)] * scales_targets]
    net = mg.Network(layers, seed=2)
    mg.Trainer(net, "mse", mg.Adam(0.01)).fit((x, x[:, 0] + 2.0), epochs=2, progress=False)
    net.save(tmp_path / "net.weights.h5")

    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Normalization(),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.Dense(1),
            *[keras.layers.Normalization(invert=True)] * scales_targets,
        ]
    )
    model.load_weights(tmp_path / "net.weights.h5")
    predicted = model(x.astype(np.float32)).numpy(force=True)[:, 0]
    np.testing.assert_allclose(net.predict(x), predicted, rtol=1e-5, atol=1e-5)
