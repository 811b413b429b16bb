"""Shards of a batch and slices of flat arrays: who has which, and in which order they are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.plan import Plan, Traffic, additions, block_size, nodes_of, parts_of, shards_of
from mlpgpu.plan.links import SHARED_MEMORY

COUNTS = [*range(1, 18), 31, 32, 33, 100]


def tree(shards: Sequence[int]) -> str:
    """The sum of these shards as its definition has it: of two or more, the first half has a power of two."""
    if len(shards) == 1:
        return str(shards[0])
    half = max(1 << k for k in range(10) if 1 << k < len(shards))
    return f"({tree(shards[:half])}+{tree(shards[half:])})"


def added(whole: range, parts: Sequence[range], terms: Sequence[str]) -> str:
    """What ``additions`` makes of terms."""
    sums = list(terms)
    for first, second in additions(whole, parts):
        sums[first] = f"({sums[first]}+{sums[second]})"
    return sums[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("count", COUNTS)
def test_ranks_add_the_same_tree_as_one(count: int, ranks: int) -> None:
    nodes = [node for rank in range(ranks) for node in nodes_of(shards_of(rank, ranks, count), count)]
    assert [shard for node in nodes for shard in node] == list(range(count))
    own = [added(node, [range(shard, shard + 1) for shard in node], [str(shard) for shard in node]) for node in nodes]
    assert added(range(count), nodes, own) == tree(range(count))


def test_a_rank_with_an_aligned_group_of_shards_sends_one_sum() -> None:
    assert all(len(nodes_of(shards_of(rank, 4, 16), 16)) == 1 for rank in range(4))


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 101_770, 5_000_001, 2**28 + 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 64])
def test_flat_arrays_are_dealt_in_blocks_that_ranks_do_not_change(count: int, ranks: int) -> None:
    parts = parts_of(count, ranks)
    assert len(parts) == ranks
    assert parts[0].start == 0
    assert parts[-1].stop == count
    assert all(first.stop == second.start for first, second in pairwise(parts))
    assert all(part.stop % block_size(count) == 0 for part in parts[:-1] if part.stop < count)
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes[:-1], default=sizes[0]) <= block_size(count)


def plan(ranks: int, *frozen: int, clip_norm: float | None = None, one_exchange: bool | None = False) -> Plan:
    layers = [mg.Dense(40, 50, "relu"), mg.Dense(50, 60, "relu"), mg.Dense(60, 70, "relu"), mg.Dense(70, 3)]
    options = {"loss": "softmax_cross_entropy", "optimizer": mg.Adam(alpha=0.1, clip_norm=clip_norm)}
    network = mg.Network(layers).frozen(*frozen)
    return network.lower(capacity=8, ranks=ranks, shards=6, one_exchange=one_exchange, **options)


@pytest.mark.parametrize("frozen", [(), (0,), (1, 3), (2,)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_slices_have_each_trained_parameter_once(ranks: int, frozen: tuple[int, ...]) -> None:
    lowered = plan(ranks, *frozen)
    moved = np.zeros(lowered.parameter_count, int)
    gradient = np.zeros(lowered.gradient_count, int)
    for each in lowered.slices:
        for part in lowered.trained_in(each.gradient):
            moved[part.offset : part.offset + part.size] += 1
            gradient[part.gradient : part.gradient + part.size] += 1
            assert each.parameters.start <= part.offset
            assert part.offset + part.size <= each.parameters.stop
    assert (gradient == 1).all()
    trained = np.concatenate([np.full(p.size, p.trainable) for p in lowered.parameters])
    np.testing.assert_array_equal(moved, trained)
    assert lowered.slices[0].parameters.start == 0
    assert lowered.slices[-1].parameters.stop == lowered.parameter_count


def test_a_plan_names_what_ranks_exchange_and_how_much() -> None:
    alone, shared = plan(1), plan(2)
    assert shared.alone() == replace(alone, training=shared.alone().training)
    assert [type(op).__name__ for op in shared.training[-4:]] == [
        *("ExchangePartials", "Reduce", "Update", "GatherParameters")
    ]
    assert "on 2 ranks" in str(shared)
    # Three shards of each rank are two nodes of the tree; each sends the other's slice of them, the sums of the loss
    # and the weight of each shard, and its own parameters.
    sent = 4 * (2 * shared.gradient_count + shared.parameter_count) + 2 * 3 * 16
    assert sum(shared.sent_bytes(op, rank) for op in shared.training for rank in range(2)) == sent
    assert f"{sent / 1e3:,.1f} kB between ranks" in str(shared)
    assert "ranks" not in str(alone)


def test_a_small_network_makes_one_exchange() -> None:
    """Each rank receives all sums and moves all parameters; a clipped norm needs nothing further."""
    for clip_norm in (None, 1.0):
        found = plan(2, clip_norm=clip_norm, one_exchange=None)
        kinds = [type(operation).__name__ for operation in found.training]
        assert "GatherPartials" in kinds and "GatherParameters" not in kinds and found.moves_all
        ((place, traffic),) = found.exchanges()
        assert kinds[place] == "GatherPartials"
        assert traffic == Traffic(*[2 * 4 * found.gradient_count + 3 * 16] * 2, messages=6)
        assert {(each.gradient.start, each.gradient.stop) for each in found.slices} == {(0, found.gradient_count)}
        assert found.alone() == plan(1, clip_norm=clip_norm)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 9])
@pytest.mark.parametrize("count", [1, 4, 6, 7, 16])
def test_fast_sends_one_sum_of_each_rank(count: int, ranks: int) -> None:
    network = mg.Network([mg.Dense(40, 50, "relu"), mg.Dense(50, 3)])
    options = {"capacity": 8, "loss": "squared_error", "optimizer": mg.SGD(0.1), "shards": count, "one_exchange": False}
    fast, ordered = (network.lower(ranks=ranks, reduction=name, **options) for name in ("fast", "ordered"))
    sums = [node for rank in range(ranks) for node in fast.nodes(rank)]
    assert [shard for node in sums for shard in node] == list(range(count))
    assert max(len(fast.nodes(rank)) for rank in range(ranks)) == 1
    terms = [str(place) for place in range(len(sums))]
    for first, second in fast.additions():
        terms[first] = f"({terms[first]}+{terms[second]})"
    assert terms[0] == tree(range(len(sums)))
    sent = [
        sum(found.traffic(op, rank).sent for op in found.training for rank in range(ranks)) for found in (fast, ordered)
    ]
    assert sent[0] <= sent[1]
    assert (sent[0] < sent[1]) == any(len(ordered.nodes(rank)) > 1 for rank in range(ranks))
    alone = [network.lower(reduction=name, **options) for name in ("fast", "ordered")]
    assert alone[0] == alone[1] == fast.alone()  # by itself no process adds otherwise


def test_a_wide_network_makes_two_exchanges() -> None:
    network = mg.Network([mg.Dense(784, 1024, "relu"), mg.Dense(1024, 10)])
    for ranks in (2, 4, 64):
        wide = network.lower(
            capacity=128, loss="softmax_cross_entropy", optimizer=mg.Momentum(0.1), ranks=ranks, shards=ranks
        )
        assert not wide.moves_all
        assert [type(wide.training[place]).__name__ for place, _ in wide.exchanges()] == [
            *("ExchangePartials", "GatherParameters")
        ]


def test_a_plan_tells_what_each_exchange_moves_and_its_floor() -> None:
    shared = plan(2, clip_norm=1.0)
    lines = str(shared).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("#   exchange"))
    cells = [line.split() for line in lines[first + 1 : first + 4]]
    assert [words[1] for words in cells] == ["exchange", "norm", "gather"]
    for (place, traffic), words in zip(shared.exchanges(), cells, strict=True):
        assert words[0] == str(place)
        assert words[-1] == "nothing"  # all products come before
        assert words[-2] == f"{1e6 * SHARED_MEMORY.seconds(traffic):.1f}"
        assert f"{traffic.sent / 1e3:,.1f}" in words and f"{traffic.received / 1e3:,.1f}" in words
    assert "by shared memory" in lines[-1]
    for place, traffic in shared.exchanges():
        each = [shared.traffic(shared.training[place], rank) for rank in range(2)]
        assert sum(found.sent for found in each) == sum(found.received for found in each)
        assert traffic.most == max(found.most for found in each)


def test_products_that_do_not_wait_for_an_exchange_hide_it() -> None:
    shared = plan(2)
    *before, first, last = shared.training[:-4]
    exchange, *behind = shared.training[-4:]
    early = replace(shared, training=(*before, exchange, first, last, *behind))
    assert early.hiding(len(before)) == [last]  # the other one is a derivative
    assert early.hiding(len(early.training) - 1) == []


def test_many_shards_are_added_by_the_tree() -> None:
    """Of weights that a step moves by its gradient alone, in an order that matters in float32."""
    x = np.random.default_rng(6).lognormal(0.0, 3.0, (8, 1)).astype(np.float32)
    network = mg.Network([mg.Dense(1, 1, bias=False)])
    network.parameters["0.weight"] = np.zeros((1, 1))
    trainer = mg.Trainer(network, "squared_error", mg.SGD(8.0), batch_size=8, streams=8, backend="cpu")
    trainer.step(x, -np.ones(8))
    g = [np.float32(value) for value in x[:, 0]]
    expected = -(((g[0] + g[1]) + (g[2] + g[3])) + ((g[4] + g[5]) + (g[6] + g[7])))
    assert expected != -sum(g[1:], g[0])
    assert network.parameters["0.weight"][0, 0] == expected
