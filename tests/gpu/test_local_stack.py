"""Stacks of locally connected layers in one kernel: against the CPU backend, and a launch for each by bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import EPS32

import mlpgpu as mg
from mlpgpu import Dense, Dropout
from mlpgpu import LocallyConnected as Local
from mlpgpu.backends.cuda.runtime import Device
from mlpgpu.backends.cuda.select import local_stack, thresholds
from mlpgpu.backends.cuda.select.local_stack import LocalStack
from mlpgpu.layers import Layer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper(device: Device) -> None:
    """Other cards have a launch for each layer, which test_plans.py tests."""
    if device.arch != "sm_90a":
        pytest.skip("needs sm_90a")


def shrinking(n: int, windows: tuple[int, ...], activation: str, bias: Any = "layer") -> list[Layer]:
    layers: list[Layer] = []
    for window in windows:
        layers.append(Local(n, window, activation, bias))
        n -= window - 1
    return layers


# Layers, rows of a batch, optimizer.  The first spans have many blocks and few warps, the last few of either.
CASES: dict[str, tuple[list[Layer], int, mg.Optimizer]] = {
    "one row": (shrinking(5000, (29,) * 6, "tanh"), 1, mg.SGD(0.05)),
    "wide": ([*shrinking(40000, (29, 29, 7), "tanh", "output"), Dense(39938, 5)], 1, mg.Momentum(0.01)),
    "two rows": (shrinking(3001, (5, 65, 1, 33), "gelu", "output"), 2, mg.Adam(0.001, alpha=1.0)),
    "four rows, the last batch shorter": (
        [Dense(17, 900, "tanh"), *shrinking(900, (9, 10, 11), "silu", None), Dense(873, 6)], 4, mg.AdamW(0.001),
    ),
    "eight rows": (
        [*shrinking(700, (29, 3), "relu"), Dropout(0.3), *shrinking(670, (4, 4), "elu", "output")],
        8, mg.RMSprop(0.001),
    ),
    "more rows than a pass": (shrinking(2000, (29,) * 4, "tanh", "output"), 20, mg.Momentum(0.05)),
    "reused, one row": ([Local(3000, 29, "tanh", "layer")] * 30, 1, mg.SGD(0.01)),
    "reused, two rows": ([Local(3000, 13, "tanh", "output")] * 9, 2, mg.SGD(0.01, alpha=1.0)),
    "reused, many blocks": ([*[Local(40000, 29, "tanh", "output")] * 12, Dense(39664, 5)], 1, mg.Momentum(0.01)),
    "reused, and dx": ([Dense(17, 900, "tanh"), *[Local(900, 33, "gelu", "layer")] * 4], 3, mg.AdamW(0.001)),
}  # fmt: skip


# What sanitize.sh watches: three blocks of a warp, and on two multiprocessors two of three or four.
SMALL: dict[str, tuple[list[Layer], int, mg.Optimizer]] = {
    "small, distinct": (shrinking(300, (5, 9), "tanh"), 2, mg.Momentum(0.05)),
    "small, reused": ([Local(500, 23, "gelu", "layer")] * 3, 2, mg.Adam(0.001)),
    "few blocks, distinct": (shrinking(700, (3, 5, 2), "tanh", "output"), 1, mg.Momentum(0.05)),
    "few blocks, reused": ([Local(700, 29, "tanh", "layer")] * 3, 1, mg.SGD(0.05)),
}


def data_of(network: mg.Network, batch_size: int) -> mg.Dataset:
    random = np.random.default_rng(9)
    rows = 3 * batch_size - batch_size // 2
    x = random.normal(size=(rows, network.n_in)).astype(np.float32)
    return mg.Dataset(x, random.normal(size=(rows, network.n_out)).astype(np.float32))


def run(case: str, backend: str, precision: str = "float32") -> dict[str, np.ndarray]:
    layers, batch_size, optimizer = (CASES | SMALL)[case]
    network = mg.Network(layers, seed=4)
    data = data_of(network, batch_size)
    trainer = mg.Trainer(
        network, "mean_squared_error", optimizer, batch_size=batch_size, backend=backend, precision=precision
    )
    before = network.flat_parameters().astype(np.float64)
    trainer.fit(data, 2, progress=False)
    return {
        "change": network.flat_parameters() - before,
        "losses": np.array(trainer.history["loss"]),
        "predictions": network.predict(data.x, backend=backend, batch_size=batch_size),
        "rows": network.predict(data.x, backend=backend, batch_size=1),
    }


def stacks_made(monkeypatch: pytest.MonkeyPatch) -> list[LocalStack | str]:
    made: list[LocalStack | str] = []
    choose = local_stack.choose_stack
    monkeypatch.setattr(
        local_stack, "choose_stack", lambda *args, **options: made.append(choose(*args, **options)) or made[-1]
    )
    return made


@pytest.mark.parametrize("case", CASES)
def test_training_as_on_the_cpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


@pytest.mark.parametrize("case", SMALL)
def test_small_stacks(case: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.startswith("few blocks"):
        monkeypatch.setattr(device, "multiprocessors", 2)
    check(case, monkeypatch)


def check(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way errs by no more than a few times what the CPU's own float32 does; and the bits repeat."""
    made = stacks_made(monkeypatch)
    got, again = run(case, "cuda"), run(case, "cuda")
    assert any(isinstance(stack, LocalStack) for stack in made)
    exact, cpu = run(case, "cpu", "float64"), run(case, "cpu")
    for name, value in got.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(value.view(np.uint8), again[name].view(np.uint8))
        error = max(np.linalg.norm(cpu[name] - exact[name]), 8 * EPS32 * np.linalg.norm(exact[name]))
        assert np.linalg.norm(value - exact[name]) <= 4 * error, name
    np.testing.assert_array_equal(got["predictions"], got["rows"])  # the bits of a row do not follow its batch


@pytest.mark.parametrize("case", ["two rows", "more rows than a pass", "reused, one row"])
def test_predictions_have_the_bits_of_one_launch_for_each_layer(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, batch_size, _ = CASES[case]
    network = mg.Network(layers, seed=4)
    x = data_of(network, batch_size).x
    stacked = network.predict(x, backend="cuda", batch_size=batch_size)
    monkeypatch.setattr(thresholds, "STACKS_ARE_USED", False)
    np.testing.assert_array_equal(stacked, network.predict(x, backend="cuda", batch_size=batch_size))
