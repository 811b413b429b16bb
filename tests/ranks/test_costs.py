"""What steps cost by counts, and what is chosen by them; nothing here runs a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import mlpgpu as mg
from mlpgpu.plan import Link, Parts, Plan, on_ranks
from mlpgpu.plan.costs import CORES, Machine, choose_way, end_seconds, is_one_exchange_faster, is_worth, step_seconds
from mlpgpu.plan.links import SHARED_MEMORY
from mlpgpu.plan.tensor import split_plan


def plan(*widths: int, batch: int = 128, shards: int = 2, ranks: int = 1) -> Plan:
    network = mg.Network([mg.Dense(n_in, n_out, "relu") for n_in, n_out in pairwise(widths)])
    return network.lower(capacity=batch, loss="squared_error", optimizer=mg.Momentum(0.1), shards=shards, ranks=ranks)


def gain(lowered: Plan, ranks: int, cores: int = 2, threads: int = 1) -> bool:
    one, data = (step_seconds(each, threads, cores) for each in (lowered, on_ranks(lowered, ranks)))
    return is_worth(one, data)


def test_ranks_are_worth_it_for_wide_networks_and_not_for_tiny_ones() -> None:
    assert not gain(plan(20, 64, 64, 2, batch=64), 2)
    assert gain(plan(784, 1024, 1024, 10, batch=1024), 2)
    assert gain(plan(784, 1024, 1024, 10, batch=1024), 2, threads=2)


def test_ranks_that_share_too_few_cores_gain_less() -> None:
    lowered = plan(784, 256, 10, shards=8)
    together = on_ranks(lowered, 8)
    times = [step_seconds(together, 1, cores) for cores in (8, 4, 2, 1)]
    assert all(few > many for many, few in pairwise(times))
    assert gain(lowered, 8, cores=8)
    assert not gain(lowered, 8, cores=1)


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_more_rows_and_wider_layers_take_longer(streams: int) -> None:
    for ranks in (1, 2, 3):
        seconds = [
            step_seconds(plan(64, width, 10, batch=rows, shards=streams, ranks=ranks), 1, 4)
            for width, rows in ((50, 64), (50, 128), (500, 128), (500, 1024))
        ]
        assert all(first < second for first, second in pairwise(seconds))


def in_parts(*widths: int, batch: int, ranks: int = 2) -> Plan:
    return split_plan(plan(*widths, batch=batch, shards=1), Parts(ranks, 0, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_are_counted_faster_where_weights_are_many_and_rows_few(ranks: int) -> None:
    for widths, batch, is_faster in (((1024,) * 5, 16, True), ((128, 128, 10), 4096, False)):
        data = plan(*widths, batch=batch, shards=ranks, ranks=ranks)
        assert (
            step_seconds(in_parts(*widths, batch=batch, ranks=ranks), 1, ranks) < step_seconds(data, 1, ranks)
        ) is is_faster


def test_parts_are_chosen_where_they_are_counted_at_a_tenth_less() -> None:
    assert [choose_way(1.0, 2.0), choose_way(2.0, 1.0), choose_way(1.0, 0.95)] == ["one", "data", "one"]
    ways = [choose_way(3.0, 2.0, tensor) for tensor in (1.0, 1.85, 2.5)]
    assert ways == ["tensor", "data", "data"]
    assert [choose_way(1.0, 2.0, tensor) for tensor in (0.8, 0.95)] == ["tensor", "one"]


def test_parts_cost_arithmetic_of_their_own_and_exchanges_of_rows() -> None:
    few, many = (step_seconds(in_parts(*(2048,) * 3, batch=64, ranks=ranks), 1, 8) for ranks in (2, 8))
    assert many < few
    near, far = (step_seconds(in_parts(512, 512, 512, batch=64), 1, 2, link=replace_latency(s)) for s in (0.0, 1.0))
    assert far - near == pytest.approx(len(in_parts(512, 512, 512, batch=64).exchanges()))


def test_one_shard_has_the_threads_of_blas_and_several_are_threads() -> None:
    """Python's part of several shards is one after another, and threads take longer beside each other."""
    for shards in (1, 4):
        lowered = plan(512, 512, 10, batch=1024, shards=shards)
        one, four = (step_seconds(lowered, threads, 4) for threads in (1, 4))
        assert one / 4 < four < one
    assert step_seconds(lowered, 4, 4) < step_seconds(lowered, 4, 2)


def test_one_exchange_or_two_follows_from_latency_and_bytes() -> None:
    small, wide = (plan(*widths, ranks=2) for widths in ((20, 64, 2), (784, 1024, 10)))
    assert small.moves_all
    assert not wide.moves_all
    assert not is_one_exchange_faster(on_ranks(small, 2, one_exchange=False), replace_latency(0.0), quick())
    assert is_one_exchange_faster(on_ranks(wide, 2, one_exchange=False), replace_latency(0.1))
    # More ranks send as many bytes in slices, and more of them all at once.
    two, many = (end_seconds(on_ranks(wide, ranks).in_one_exchange(), SHARED_MEMORY, CORES) for ranks in (2, 16))
    assert many > 2 * two


def replace_latency(seconds: float) -> Link:
    return replace(SHARED_MEMORY, latency=seconds)


def quick() -> Machine:
    return replace(CORES, wait_seconds=0.0)


def test_costs_of_a_thousand_ranks_are_counted_at_once() -> None:
    lowered = plan(784, 1024, 1024, 10, batch=1024, shards=1024)
    assert 0.0 < step_seconds(on_ranks(lowered, 1024), 1, 1024) < step_seconds(lowered, 1, 1024)
