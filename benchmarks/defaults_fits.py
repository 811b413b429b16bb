"""One fit of one network by mlpgpu, scikit-learn or PyTorch, and how good it is on the rows held out."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from defaults_sets import KINDS, Split, split
from sklearn.neural_network import MLPClassifier, MLPRegressor

import mlpgpu as mg
from mlpgpu.errors import DivergenceError
from mlpgpu.names import ActivationName, LossName, OptimizerName
from mlpgpu.optimizers import as_optimizer

Scheme = Literal[
    "he",
    "glorot",
    "lecun",
    "torch weights",
    "torch",
    "scikit-learn",
    "glorot third",
    "larger fan",
    "torch, last 0",
    "glorot, last third",
    "by depth, last third",
]
TORCH: dict[str, Callable[[], Any]] = {
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
SKLEARN = {"identity": "identity", "sigmoid": "logistic", "tanh": "tanh", "relu": "relu"}
WORST = -1.0  # R² of a fit that went worse or not at all, so that one fit cannot decide a mean


@dataclass(frozen=True)
class Method:
    """A library with what it is told; what is None is the library's default.

    Attributes:
        scheme: what the initial values are, by the libraries that use such; None for mlpgpu's default.
        loss: of a regression by mlpgpu.
    """

    library: Literal["mlpgpu", "scikit-learn", "PyTorch"]
    optimizer: OptimizerName | None = None
    rate: float | None = None
    batch_size: int | None = None
    scheme: Scheme | None = None
    loss: LossName = "mean_squared_error"

    @property
    def name(self) -> str:
        """What the results call it."""
        told = (self.optimizer, self.rate, self.batch_size, self.scheme)
        words = [str(value) for value in told if value is not None]
        if self.loss != "mean_squared_error":
            words.append(self.loss)
        return " ".join([self.library, *words])


@dataclass(frozen=True)
class Cell:
    """A network on a set, and for how long it is trained; every method is given the same ones."""

    set: str
    seed: int
    activation: ActivationName
    hidden: tuple[int, ...]
    epochs: int


@dataclass(frozen=True)
class Outcome:
    """How a fit ended.

    Attributes:
        score, train_score: accuracy or R² of the rows held out, and of those trained on.
        diverged: whether a number was not finite, or R² on the training rows is under -1.
    """

    score: float
    train_score: float
    diverged: bool
    seconds: float


def fit(method: Method, cell: Cell) -> Outcome:
    """Train the cell's network by the method."""
    data = split(cell.set, cell.seed)
    begin = time.perf_counter()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = FITS[method.library](method, cell, data)
    seconds = time.perf_counter() - begin
    if found is None:
        failed = 0.0 if KINDS[cell.set] == "accuracy" else WORST
        return Outcome(failed, failed, diverged=True, seconds=seconds)
    train, test = (_score(cell, y, prediction) for y, prediction in zip((data.y, data.test_y), found, strict=True))
    return Outcome(max(test, WORST), max(train, WORST), diverged=train < -1.0, seconds=seconds)


def _score(cell: Cell, y: np.ndarray, prediction: np.ndarray) -> float:
    """Accuracy of classes, or R² of values, averaged over the columns of values."""
    if KINDS[cell.set] == "accuracy":
        return float((prediction == y).mean())
    # Beside a constant as it is known before the test rows are: few rows may have nearly no variance of their own.
    # Targets are standardized, so that constant is 0.
    error = np.square(prediction.reshape(y.shape) - y.astype(np.float64)).sum(axis=0)
    return float((1.0 - error / np.square(y.astype(np.float64)).sum(axis=0)).mean())


Predictions = tuple[np.ndarray, np.ndarray]  # of the training rows and those held out


def _by_mlpgpu(method: Method, cell: Cell, data: Split) -> Predictions | None:
    widths = (data.x.shape[1], *cell.hidden, data.n_out)
    activations: list[ActivationName] = [*([cell.activation] * len(cell.hidden)), "identity"]
    pairs = zip(pairwise(widths), activations, strict=True)
    network = mg.Network([mg.Dense(n_in, n_out, f) for (n_in, n_out), f in pairs], seed=cell.seed)
    if method.scheme is not None:
        for name, values in initial_values(method.scheme, cell, widths).items():
            network.parameters[name] = values
    is_classifier = KINDS[cell.set] == "accuracy"
    options: dict[str, Any] = {}
    if method.optimizer is not None:
        optimizer = as_optimizer(method.optimizer)
        options["optimizer"] = optimizer if method.rate is None else replace(optimizer, rate=method.rate)
    if method.batch_size is not None:
        options["batch_size"] = method.batch_size
    loss = "softmax_cross_entropy" if is_classifier else method.loss
    trainer = mg.Trainer(network, loss, backend="cpu", threads=1, **options)
    try:
        trainer.fit((data.x, data.y), cell.epochs, progress=False)
    except DivergenceError:
        return None
    train, test = (network.labels(x) if is_classifier else network.predict(x) for x in (data.x, data.test_x))
    return train, test


def initial_values(scheme: Scheme, cell: Cell, widths: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Uniform weights and biases by parameter, as a library draws them or a paper asks for."""
    random = np.random.default_rng(cell.seed)
    found: dict[str, np.ndarray] = {}
    for place, (n_in, n_out) in enumerate(pairwise(widths)):
        is_last = place == len(cell.hidden)
        activation = "identity" if is_last else cell.activation
        glorot, torch_s = math.sqrt(6.0 / (n_in + n_out)), 1.0 / math.sqrt(n_in)
        is_he = scheme == "he" and activation not in ("identity", "sigmoid", "tanh")
        weight, bias = {
            "he": (math.sqrt(6.0 / n_in) if is_he else glorot, 0.0),
            "glorot": (glorot, 0.0),
            "lecun": (math.sqrt(3.0 / n_in), 0.0),
            "torch weights": (torch_s, 0.0),
            "torch": (torch_s, torch_s),
            "scikit-learn": (glorot, glorot) if activation != "sigmoid" else (glorot / math.sqrt(3.0),) * 2,
            "glorot third": (glorot / math.sqrt(3.0), torch_s),
            "larger fan": (1.0 / math.sqrt(max(n_in, n_out)), torch_s),
            "torch, last 0": (0.0, 0.0) if is_last else (torch_s, torch_s),
            "glorot, last third": (glorot / math.sqrt(3.0) if is_last else glorot, torch_s),
            # A ReLU layer of equal widths passes on half of its variance times n: a sixth of a third of Glorot's.  So
            # through any number of layers as much is left as through five.
            "by depth, last third": (
                glorot * math.sqrt(1.0 / 3.0 if is_last else max(1.0 / 3.0, 2.0 * 6.0 ** (-5.0 / len(cell.hidden)))),
                torch_s,
            ),
        }[scheme]
        found[f"{place}.weight"] = random.uniform(-weight, weight, (n_in, n_out))
        found[f"{place}.bias"] = random.uniform(-bias, bias, n_out)
    return found


def _by_sklearn(method: Method, cell: Cell, data: Split) -> Predictions | None:
    is_classifier = KINDS[cell.set] == "accuracy"
    options: dict[str, Any] = {}
    if method.rate is not None:
        options["learning_rate_init"] = method.rate
    if method.optimizer is not None:
        options["solver"] = method.optimizer
    if method.batch_size is not None:
        options["batch_size"] = method.batch_size
    model = (MLPClassifier if is_classifier else MLPRegressor)(
        hidden_layer_sizes=cell.hidden,
        activation=SKLEARN[cell.activation],
        max_iter=cell.epochs,
        n_iter_no_change=cell.epochs,  # all of them, as the others
        random_state=cell.seed,
        **options,
    )
    try:
        model.fit(data.x, data.y if is_classifier or data.n_out > 1 else data.y.ravel())
        return model.predict(data.x), model.predict(data.test_x)
    except ValueError:  # what is not finite
        return None


def _by_torch(method: Method, cell: Cell, data: Split) -> Predictions | None:
    torch.set_num_threads(1)
    torch.manual_seed(cell.seed)
    is_classifier = KINDS[cell.set] == "accuracy"
    layers: list[Any] = []
    for n_in, n_out in pairwise((data.x.shape[1], *cell.hidden)):
        layers += [torch.nn.Linear(n_in, n_out), TORCH[cell.activation]()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(cell.hidden[-1], data.n_out))
    optimizer = torch.optim.Adam(model.parameters(), **({} if method.rate is None else {"lr": method.rate}))
    loss_of = torch.nn.CrossEntropyLoss() if is_classifier else torch.nn.MSELoss()
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    assert method.batch_size is not None  # PyTorch has no default that anybody would take
    for _ in range(cell.epochs):
        for rows in torch.randperm(len(x)).split(method.batch_size):
            optimizer.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        train, test = (model(torch.from_numpy(part)).numpy() for part in (data.x, data.test_x))
    if not np.isfinite(train).all():
        return None
    return (train.argmax(axis=1), test.argmax(axis=1)) if is_classifier else (train, test)


FITS: dict[str, Callable[[Method, Cell, Split], Predictions | None]] = {
    "mlpgpu": _by_mlpgpu,
    "scikit-learn": _by_sklearn,
    "PyTorch": _by_torch,
}
