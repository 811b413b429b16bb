"""What launches are given: addresses of a program's arrays, also of those that hold what several steps need.

And that who binds them is let go of: memory of a card must not wait for Python's collector.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from mlpgpu import Adam, Dense, Dropout, Network
from mlpgpu.backends import Sampling
from mlpgpu.backends.cuda.kernels.launches import At, Launch
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.run import binding
from mlpgpu.backends.cuda.run.binding import Binder
from mlpgpu.backends.cuda.run.data import orders
from mlpgpu.backends.cuda.run.graphs import StepGraphs
from mlpgpu.backends.cuda.select import thresholds


def binder_of(lowered: Any, addresses: dict[str, int]) -> Binder:
    """On a workspace that stands in for a card's, whose arrays begin at these addresses."""
    loaded = {launch.entry: SimpleNamespace(launch=lambda *_, **__: None) for launch in lowered.launches()}
    kernels = SimpleNamespace(lowered=lowered, loaded=loaded, constants={})
    workspace: Any = SimpleNamespace(
        kernels_for=lambda data, rows, *, reaches_cards: kernels,
        arrays=SimpleNamespace(addresses=addresses),
        trace=None,
        maps={},
    )
    data: Any = SimpleNamespace(scale=1.0, arrays=SimpleNamespace(addresses={}), targets=7)
    return Binder(workspace, data, seed=1)


@pytest.mark.parametrize("stage", [0, 1])
def test_each_dropout_has_its_own_elements_at_each_step(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several dropouts lie behind each other, and those of several steps too."""
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    widths = [(281, 16), (16, 180), (180, 152)]
    layers = [layer for pair in widths for layer in (Dense(*pair, "tanh"), Dropout(0.3))]
    plan = Network([*layers, Dense(152, 5)], seed=1).lower(capacity=300, loss="squared_error", optimizer=Adam(0.1))
    lowered = lower(plan, multiprocessors=132, source="float32", arch="sm_90a")
    (kept,) = lowered.staged_bytes
    assert lowered.stages > 1 and lowered.bytes[kept] == lowered.stages * lowered.staged_bytes[kept]
    addresses = {name: 1 << (30 + number) for number, name in enumerate([*lowered.bytes, "order", "steps", "data"])}
    bound: list[list[float | None]] = []
    monkeypatch.setattr(binding, "pack", lambda entry, values: bound.append(values))

    binder = binder_of(lowered, addresses)
    begin = addresses[kept] + stage * lowered.staged_bytes[kept]

    def told(launch: Launch) -> float | None:
        binder.bind(launch, stage, step=addresses["steps"], **{kept: begin})
        return bound[-1][[argument.name for argument in launch.entry.arguments].index("kept")]

    dropping = [
        launch
        for launch in lowered.shards[0]
        if isinstance(value := launch.values.get("kept"), At) and value.array == kept
    ]
    words = [300 * -(-n_out // 32) for _, n_out in widths]
    begins = [begin + 4 * sum(words[:number]) for number in range(len(words))]
    assert sorted({told(launch) for launch in dropping}) == begins
    (draw,) = lowered.staged
    assert told(draw) == begin and draw.values["words"] == sum(words)


# --- without the collector ---


@pytest.mark.usefixtures("without_collector")
def test_bound_steps_are_in_no_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "pack", lambda entry, values: b"")
    plan = Network([Dense(300, 200, "relu"), Dense(200, 5)], seed=1).lower(
        capacity=300, loss="squared_error", optimizer=Adam(0.1)
    )
    lowered = lower(plan, multiprocessors=132, source="float32", arch="sm_90a")
    addresses = dict.fromkeys([*lowered.bytes, "order", "steps", "data"], 1 << 30)
    streams: Any = SimpleNamespace()  # nothing is put on them
    made = StepGraphs(binder_of(lowered, addresses), streams, addresses)
    assert len(made._step(0).shards[0]) == len(lowered.shards[0])
    graphs = weakref.ref(made)
    del made
    assert graphs() is None


@pytest.mark.usefixtures("without_collector")
def test_orders_are_in_no_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "Event", lambda device: None)
    of_card: Any = SimpleNamespace(free_bytes=1 << 40)
    data: Any = SimpleNamespace(left_bytes=1 << 40, stays=True)
    made = orders.Orders(of_card, of_card, data, Sampling(1000, 10, seed=1), lambda launches, epoch: [], any)
    assert made._is_compiled()
    found = weakref.ref(made)
    del made
    assert found() is None
