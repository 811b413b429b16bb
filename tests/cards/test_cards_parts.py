"""Networks in parts on cards, on the host: whole steps of all ranks, by the kernels' sources, with messages copied.

The bits follow from the number of parts, whoever has which; and they are as near to float64 as the CPU's are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawn import covering
from epochs import BATCH_SIZE, Epoch
from helpers import EPS32, numpy_alone
from lockstep import MODES, Deadlock, Lockstep

import mlpgpu as mg
from mlpgpu.backends import State
from mlpgpu.backends.cuda.exchange import check_collectives
from mlpgpu.backends.cuda.kernels.launches import EXCHANGED_SUMS, At, Launch, Lowered, PartSums
from mlpgpu.backends.cuda.lower.emit import parts as emitted
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.layers import Layer
from mlpgpu.plan import Parts, Plan, plan, split_plan, tensor_split

TIED = mg.Dense(8, 8, "gelu")
ON_TENSOR_CORES = {
    "GEMM_LEAST_WIDTH": 1, "GEMM_LEAST_WEIGHTS": 1, "GEMM_LEAST_ROWS": 1, "MOST_UNSCALED_WEIGHTS": 1 << 62,
    "MOST_STAGED_BYTES": 0,
}  # fmt: skip

# Layers, options of the plan, and limits of the paths.
NETWORKS: dict[str, tuple[list[Layer], dict[str, Any], dict[str, int]]] = {
    "dropouts": (
        [
            mg.Dense(21, 9, "tanh"),
            mg.Dropout(0.3),
            mg.Dense(9, 12, "silu"),
            mg.Dropout(0.2),
            mg.Dense(12, 5, "relu"),
            mg.Dropout(0.2),
            mg.Dense(5, 3),
        ],
        {"loss": "softmax_cross_entropy", "optimizer": mg.Adam(0.05, l2=0.1, alpha=1.0)},
        {},
    ),
    "clipped": (
        [mg.Standardize(21), mg.Dense(21, 16, "relu"), mg.Dense(16, 9, "gelu"), mg.Dense(9, 3), mg.Standardize(3)],
        {"optimizer": mg.Nesterov(0.1, clip_norm=0.05)},
        {},
    ),
    "tied, local, frozen": (
        [
            mg.Dense(21, 8),
            TIED,
            TIED,
            mg.LocallyConnected(8, 3, "tanh"),
            mg.Dense(6, 9, "silu", trainable=False),
            mg.Dense(9, 12, "relu"),
            mg.Dense(12, 3),
        ],
        {"loss": mg.Huber(0.5), "optimizer": mg.RMSprop(0.02)},
        {},
    ),
    "one pass over each weight": (
        [mg.Dense(21, 66, "relu"), mg.Dropout(0.3), mg.Dense(66, 60, "relu"), mg.Dense(60, 34)],
        {"loss": "mean_squared_error", "optimizer": mg.Adam(0.01)},
        {"WHOLE_BATCH_LEAST_WEIGHTS": 1, "WHOLE_BATCH_LEAST_WEIGHTS_OF_MORE": 1, "NARROW_TILES_ARE_USED": False},
    ),
    "split along k": (
        [mg.Dense(6000, 9, "relu"), mg.Dense(9, 2)],
        {"optimizer": mg.Momentum(0.001)},
        {"SPLIT_K_LEAST_K": 8, "FEW_ROWS_LEAST_WEIGHTS": 1},
    ),
    "a tail": (
        [mg.Dense(6000, 9, "gelu"), mg.Dense(9, 2, "tanh", bias=False), mg.Dense(2, 5)],
        {"loss": "softmax_cross_entropy", "optimizer": mg.Adam(0.001)},
        {},
    ),
    "on tensor cores": (
        [
            mg.Dense(40, 66, "tanh"),
            mg.Dropout(0.3),
            mg.Dense(66, 68, "relu"),
            mg.Dense(68, 33, "relu"),
            mg.Dense(33, 3),
        ],
        {"precision": "bfloat16", "optimizer": mg.Momentum(0.1)},
        ON_TENSOR_CORES,
    ),
    "on tensor cores, scaled": (
        [mg.Dense(40, 33, "relu"), mg.Dense(33, 34, "silu"), mg.Dense(34, 16)],
        {"loss": "mean_squared_error", "optimizer": mg.AdamW(0.01)},
        {**ON_TENSOR_CORES, "MOST_UNSCALED_WEIGHTS": 0},
    ),
}
ROUNDED = {"on tensor cores"}  # whose operands have fewer digits than the CPU's


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_split, "LEAST_WEIGHTS", 20)
    monkeypatch.setattr(plan, "NORM_BLOCK", 16)


def limited(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for limit, value in NETWORKS[name][2].items():
        monkeypatch.setattr(thresholds, limit, value)


def epoch_of(name: str, *, as_bytes: bool = False) -> Epoch:
    """Full batches of 8 rows and a last one of 2."""
    layers, options, _ = NETWORKS[name]
    options = dict(options)
    return Epoch(layers, options, precision=options.pop("precision", "float32"), as_bytes=as_bytes)


def plans_of(whole: Plan, count: int, ranks: int) -> list[Plan]:
    return [split_plan(whole, Parts(count, rank, ranks)) for rank in range(ranks)]


def state_of(own: Plan, whole: Plan, state: State) -> State:
    """A rank's parts of a state."""
    places = {p.name: p for p in whole.parameters}

    def part(flat: np.ndarray) -> np.ndarray:
        values = []
        for p in own.parameters:
            segment = p.of.whole if p.of else places[p.name]
            array = flat[segment.offset : segment.end].reshape(segment.shape)
            values.append((array[p.of.index] if p.of else array).ravel())
        return np.concatenate(values)

    slots = np.array([[part(slot[0])] for slot in state.slots], np.float32).reshape(len(state.slots), 1, -1)
    return State(part(state.parameters[0])[np.newaxis], slots, state.statistics)


def whole_of(whole: Plan, plans: list[Plan], flats: list[np.ndarray]) -> np.ndarray:
    """A flat array of the whole network; what all ranks have must be alike."""
    found = np.full(whole.parameter_count, np.nan, np.float32)
    for own, flat in zip(plans, flats, strict=True):
        for p in own.parameters:
            segment = p.of.whole if p.of else next(each for each in whole.parameters if each.name == p.name)
            array = found[segment.offset : segment.end].reshape(segment.shape)
            place = array[p.of.index] if p.of else array
            values = flat[p.offset : p.end].reshape(p.shape)
            if not np.isnan(place).all():
                np.testing.assert_array_equal(place, values)
            place[...] = values
    return found


Left = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def train(epoch: Epoch, count: int, ranks: int, patch: pytest.MonkeyPatch, *, mode: str = "drawn") -> Left:
    """Parameters, slots, losses and predictions that all ranks end with."""
    plans = plans_of(epoch.plan, count, ranks)
    states = [state_of(own, epoch.plan, epoch.state) for own in plans]
    lockstep = Lockstep(plans, epoch.data, epoch.sampling, seed=count, mode=mode, patch=patch)
    lockstep.run(states, epoch.rates)
    hosts = [rank.host for rank in lockstep.ranks]
    losses = [host.losses(len(epoch.rates)).copy() for host in hosts]
    parameters = whole_of(epoch.plan, plans, [host.parameters for host in hosts])
    of_slots = [host.slots(state.slots) for host, state in zip(hosts, states, strict=True)]
    slots = [whole_of(epoch.plan, plans, [each[slot, 0] for each in of_slots]) for slot in range(len(of_slots[0]))]
    predictions = lockstep.evaluate()
    for other_losses, other in zip(losses[1:], predictions[1:], strict=True):
        np.testing.assert_array_equal(other_losses, losses[0])
        np.testing.assert_array_equal(other[:BATCH_SIZE], predictions[0][:BATCH_SIZE])
    return parameters, np.array(slots), losses[0], predictions[0][:BATCH_SIZE].copy()


def assert_equal(got: Left, expected: Left) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("name", "count"), covering("networks in parts", NETWORKS, [2, 3, 5]))
def test_the_bits_follow_from_the_number_of_parts(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank that has all parts, of some, and of as many as there are parts; and they are near to float64."""
    limited(monkeypatch, name)
    epoch = epoch_of(name)
    expected = train(epoch, count, 1, monkeypatch)
    assert np.isfinite(expected[0]).all() and (expected[0] != epoch.state.parameters[0]).any()
    for place, ranks in enumerate(range(2, count + 1)):
        assert_equal(train(epoch, count, ranks, monkeypatch, mode=MODES[place % len(MODES)]), expected)
    oracle, losses, predictions = epoch.on_cpu("float64")
    if name in ROUNDED:
        np.testing.assert_allclose(expected[0], oracle.parameters[0], atol=0.05)
        return
    # Float32 of the CPU twice: roundings grow as they happen to, by NumPy's passes and by compiled loops.
    with numpy_alone():
        by_numpy = epoch.on_cpu("float32")
    of_cpu = [(state.parameters[0], state.slots[:, 0], *rest) for state, *rest in (by_numpy, epoch.on_cpu("float32"))]
    exact = oracle.parameters[0], oracle.slots[:, 0], losses, predictions
    for got, true, *others in zip(expected, exact, *of_cpu, strict=True):
        if got.size:
            error = max(*(abs(other - true).max() for other in others), 4 * EPS32 * abs(true).max())
            assert abs(got - true).max() <= 8 * error


def test_bytes_of_which_each_rank_has_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = epoch_of("split along k", as_bytes=True)
    assert all(set(own.input_columns()) == {f"data/{part}"} for part, own in enumerate(plans_of(epoch.plan, 3, 3)))
    assert_equal(train(epoch, 3, 3, monkeypatch), train(epoch, 3, 1, monkeypatch))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (5, 3), (4, 4)])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_what_ranks_send_is_what_others_expect(
    name: str, count: int, ranks: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps and evaluations, and of as many bytes as the plan says where each rank has one part."""
    limited(monkeypatch, name)
    whole = epoch_of(name).plan
    plans = plans_of(whole, count, ranks)
    lowered = [lower(own, multiprocessors=132, source="float32", arch=arch) for own in plans]
    check_collectives([each.collectives() for each in lowered])
    check_collectives([each.evaluation_collectives() for each in lowered])
    if count == ranks == 2:
        for rank, (own, low) in enumerate(zip(plans, lowered, strict=True)):
            sent = sum(each.count * each.item_bytes for one in low.collectives() for each in one.sent)
            least = sum(own.traffic(op, rank).sent for op in own.training)
            rows = emitted.rows_of_parts(own) / own.capacity
            assert least <= sent <= rows * least


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_behind_a_sum_along_k_are_one_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all of them are whole on every rank; the launch has the exchange before it."""
    limited(monkeypatch, name)
    own = plans_of(epoch_of(name).plan, 2, 2)[1]
    (launches,) = lower(own, multiprocessors=2, source="float32", arch="sm_80").shards
    tails = [launch for launch in launches if launch.entry.name.startswith("tail")]
    assert len(tails) == (name in ("a tail", "split along k"))
    assert all(launch.exchange is not None for launch in tails)


TALL = [mg.Dense(90000, 90, "relu"), mg.Dense(90, 90), mg.Dense(90, 10)]


def lowered_tall(layers: list[mg.Dense], rows: int, parts: int, ranks: int, **options: Any) -> Lowered:
    whole = mg.Network(layers).lower(capacity=rows, loss="softmax_cross_entropy", optimizer=mg.Momentum(0.1))
    splits = {f"{number}.weight": "whole" if number else "rows" for number in range(len(layers))}
    own = split_plan(whole, Parts(parts, 1 % ranks, ranks), splits)
    return lower(own, multiprocessors=132, source="float32", arch="sm_90a", **options)


def test_a_tail_exchanges_sums_itself_where_kernels_reach_other_cards() -> None:
    """From the part's split-K partials: no launch adds them up, and nothing is exchanged before it."""
    low = lowered_tall(TALL, 128, 2, 2, reaches_cards=True)
    assert low.part_sums == PartSums(count=2, own=1, rows=128, columns=90)
    product, tail = low.shards[0][:2]
    assert tail.entry.name.startswith("tail") and tail.values["partials"] == product.values["partials"]
    assert tail.values["exchange"] == At(EXCHANGED_SUMS) and tail.values["count"] == product.grid[2]
    assert not low.collectives()


@pytest.mark.parametrize(
    ("layers", "rows", "parts", "ranks", "reaches_cards"),
    [
        (TALL, 128, 2, 2, False),
        (TALL, 133, 2, 2, True),  # blocks that wait would keep others from multiprocessors
        (TALL, 128, 4, 2, True),  # a rank has two parts
        (TALL, 128, 2, 1, True),  # all parts are here
        ([mg.Dense(90000, 130, "relu"), mg.Dense(130, 10)], 128, 2, 2, True),
    ],
)
def test_else_launches_add_parts_up_before_an_exchange(
    layers: list[mg.Dense], rows: int, parts: int, ranks: int, reaches_cards: bool
) -> None:
    low = lowered_tall(layers, rows, parts, ranks, reaches_cards=reaches_cards)
    tails = [launch for launch in low.shards[0] if launch.entry.name.startswith("tail")]
    assert low.part_sums is None and bool(low.collectives()) == (ranks > 1)
    assert all(launch.values["exchange"] is None and launch.values["count"] == parts for launch in tails)


def test_no_launch_begins_before_what_it_exchanges() -> None:
    low = lowered_tall(TALL, 128, 2, 2)
    exchanging = [launch for launch in (*low.shards[0], *low.evaluation) if launch.exchange is not None]
    assert exchanging and not any(launch.pdl for launch in exchanging)


def _without(change: Callable[[Launch], Launch]) -> Callable[..., Any]:
    made = emitted.Shard.launch

    @functools.wraps(made)
    def launch(*arguments: Any, **values: Any) -> Launch:
        return change(made(*arguments, **values))

    return launch


@pytest.mark.parametrize("fault", ["no exchange", "another place", "a part left out"])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = emitted.exchange_all
    epoch = epoch_of("dropouts")
    expected = train(epoch, 3, 1, monkeypatch)
    if fault == "no exchange":
        monkeypatch.setattr(emitted, "exchange_all", lambda *arguments: None)
    elif fault == "another place":

        def shifted(*arguments: Any) -> Any:
            found = exchange(*arguments)
            moved = [replace(each, at=replace(each.at, offset=each.at.offset + 1), count=each.count - 1)
                     for each in found.received]  # fmt: skip
            sent = [replace(each, count=each.count - 1) for each in found.sent]
            return replace(found, sent=tuple(sent), received=tuple(moved))

        monkeypatch.setattr(emitted, "exchange_all", shifted)
    else:

        def fewer(launch: Launch) -> Launch:
            count = launch.values.get("count")
            return replace(launch, values={**launch.values, "count": 2}) if count == 3 else launch

        monkeypatch.setattr(emitted.Shard, "launch", _without(fewer))
    with pytest.raises((AssertionError, Deadlock)):
        assert_equal(train(epoch, 3, 3, monkeypatch), expected)
