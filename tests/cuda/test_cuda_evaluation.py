"""Which launches an evaluation puts on the stream, batch by batch, on a stand-in for the card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.backends.cuda.lower.lowering import lower_evaluation
from mlpgpu.backends.cuda.run import evaluation
from mlpgpu.backends.cuda.run.evaluation import Evaluation
from mlpgpu.backends.cuda.select import thresholds

LOSS = np.array([2.0, 4.0])  # of a batch: its value and weight


class Card:
    """All that an evaluation asks of a workspace, with a note of what it is given.

    Attributes:
        did: what ran, in order.
        lowered_for: the rows that launches were made for.
    """

    def __init__(self, network: mg.Network, capacity: int) -> None:
        self.plan = network.lower(capacity=capacity, loss="softmax_cross_entropy", optimizer=mg.SGD(0.1))
        self.did: list[str] = []
        self.lowered_for: list[int] = []
        self.device = nullcontext()
        self.arrays = SimpleNamespace(addresses={"y": 1})
        self.auxiliary = SimpleNamespace(load=lambda entries: None)
        self.stream = SimpleNamespace(
            synchronize=lambda: self.did.append("wait"),
            fill=lambda address, size: self.did.append("clear"),
            download=lambda array, address: array.fill(7.0),
        )
        self.numbers = SimpleNamespace(
            set_step=lambda *step, run: self.did.append(f"batch {step[1]}"),
            download_losses=lambda count: (np.tile(LOSS, (count, 1)), None),
        )

    def take(self, sizes: dict[str, int]) -> None:
        self.arrays.addresses |= dict.fromkeys(sizes, 1)

    def feed(self, dataset: mg.Dataset, batch_rows: int) -> Any:
        def nothing(*_: object) -> None:
            pass

        arrays = SimpleNamespace(allocate=nothing, addresses={})
        return SimpleNamespace(
            dataset=dataset, kind=("float32", True), arrays=arrays, begin_in_order=nothing, reach=nothing,
            prepare=nothing, close=nothing,
        )  # fmt: skip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], tuple[Card, Evaluation]]]:
    class Binder:
        def __init__(self, card: Card, data: Any, seed: int, rows: int) -> None:
            card.lowered_for.append(rows)
            self._card, self._rows = card, rows
            self.lowered = lower_evaluation(card.plan, rows, multiprocessors=132, source="float32")

        def bind(self, launch: Any) -> Callable[[Any], None]:
            return lambda stream: self._card.did.append(f"{launch.entry.name} for {self._rows}")

    @contextmanager
    def capture(stream: Any, name: str) -> Iterator[Any]:
        before, graph = len(made.did), SimpleNamespace(close=lambda: None)
        yield graph
        captured, made.did = made.did[before:], made.did[:before]
        replay = SimpleNamespace(launch=lambda stream: made.did.extend(captured))
        graph.instantiate = lambda: replay

    def make(capacity: int) -> tuple[Card, Evaluation]:
        nonlocal made
        made = Card(mg.Network([mg.Dense(4, 3)], seed=1), capacity)
        return made, Evaluation(lambda: made)  # type: ignore[arg-type, return-value]  # a stand-in

    made = Card(mg.Network([mg.Dense(4, 3)], seed=1), 1)
    monkeypatch.setattr(evaluation, "Binder", Binder)
    monkeypatch.setattr(evaluation, "capture", capture)
    monkeypatch.setattr(evaluation, "pinned", lambda device, shape, dtype: np.zeros(shape, dtype))
    return make


def data_of(rows: int) -> mg.Dataset:
    return mg.Dataset(np.zeros((rows, 4), np.float32), np.arange(rows) % 3)


@pytest.mark.parametrize(
    ("rows", "tiers"), [(5, [1024]), (1024, [1024]), (1025, [2048]), (5000, [8192]), (10_000, [8192, 2048])]
)
def test_launches_are_those_of_the_first_tier_with_room(rows: int, tiers: list[int], card: Any) -> None:
    made, one = card(8192)
    found = one.evaluate(data_of(rows), ())
    np.testing.assert_array_equal(found["loss"], LOSS * len(tiers))
    ran = [each for each in made.did if " for " in each]
    assert list(dict.fromkeys(int(each.rpartition(" ")[2]) for each in ran)) == tiers
    assert set(made.lowered_for) == set(tiers)  # launches of other tiers would be compiled for nothing
    assert not any("output" in each for each in ran)


def test_a_second_evaluation_binds_nothing_and_waits_at_its_ends_alone(card: Any) -> None:
    made, one = card(8192)
    data = data_of(10_000)
    for names in ((), ("accuracy", "confusion_matrix")):
        first = one.evaluate(data, names)
        made.did, made.lowered_for = [], []
        second = one.evaluate(data, names)
        assert made.lowered_for == [] and made.did.count("wait") == 2
        assert made.did[0] == made.did[-1] == "wait"
        assert set(second) == {*names, "loss"}
        for name in second:
            np.testing.assert_array_equal(first[name], second[name])
            assert first[name] is not second[name] and not np.shares_memory(first[name], second[name])
    assert any("output" in each for each in made.did)  # which metrics look at
    one.evaluate(data, ())
    assert made.lowered_for == []  # that of the mean loss is still there


def test_another_set_is_bound_anew(card: Any) -> None:
    made, one = card(8192)
    one.evaluate(data_of(5), ())
    made.lowered_for = []
    one.evaluate(data_of(6), ())
    assert made.lowered_for


def test_predictions_are_made_where_they_are_asked_for(card: Any) -> None:
    made, one = card(8192)
    made.arrays.addresses |= {made.plan.output: 1, made.plan.logits: 1}
    found = one.predict(data_of(9000), logits=False)
    assert found.shape == (9000, 3) and (found == 7.0).all()
    assert made.did[-2].startswith("output")


def test_a_plan_of_few_rows_has_no_other_tier(card: Any) -> None:
    made, one = card(100)
    one.evaluate(data_of(250), ())
    assert set(made.lowered_for) == {100}
    assert [each for each in made.did if each.startswith("batch")] == ["batch 0", "batch 1", "batch 2"]


def test_tiers_ascend() -> None:
    assert list(thresholds.EVALUATION_TIERS) == sorted(set(thresholds.EVALUATION_TIERS))
    assert thresholds.EVALUATION_TIERS[-1] < thresholds.EVALUATION_ROWS
