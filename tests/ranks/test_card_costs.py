"""What steps of one card and of several are predicted to take, and what is chosen by it; nothing here runs a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

import mlpgpu as mg
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.backends.cuda.kernels.launches import PARAMETERS, PARTIALS, At, Collective, Transfer
from mlpgpu.backends.cuda.profile.predicted_step import NVLINK, step_seconds, traffic_of
from mlpgpu.backends.cuda.runtime import Device
from mlpgpu.plan import Link, Parts, Plan, Traffic
from mlpgpu.plan.costs import is_worth

H200 = "sm_90a"
FREE, FAR = Link("free", 0.0, 1e18), Link("far", 1e-3, 1e9)


def plan(*widths: int, batch: int = 128, ranks: int = 1, shards: int = 2, **options: Any) -> Plan:
    network = mg.Network([mg.Dense(n_in, n_out, "relu") for n_in, n_out in pairwise(widths)])
    given: dict[str, Any] = {"loss": "squared_error", "optimizer": mg.Momentum(0.1), **options}
    return network.lower(capacity=batch, ranks=ranks, shards=shards, **given)


def seconds(lowered: Plan, link: Link = NVLINK) -> float:
    found = step_seconds(lowered, H200, link=link)
    assert found is not None
    return found


def is_gain(*widths: int, **options: Any) -> bool:
    data = plan(*widths, ranks=2, **options)
    return is_worth(seconds(data.alone()), seconds(data))


def test_two_cards_are_worth_it_for_wide_networks_and_not_for_small_ones() -> None:
    assert not is_gain(20, 64, 64, 2, batch=64)
    assert not is_gain(784, 128, 10)
    for precision in ("float32", "tf32", "bfloat16"):
        assert is_gain(784, 1024, 1024, 10, batch=16384, precision=precision)
        assert is_gain(4096, 4096, 4096, batch=8192, precision=precision)


@pytest.mark.parametrize("shards", [2, 4, 5])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_sent_costs_what_the_link_says_unless_it_is_hidden(shards: int, precision: str) -> None:
    options: dict[str, Any] = {"batch": 4096, "ranks": 2, "shards": shards, "precision": precision}
    for widths in ((784, 1024, 1024, 10), (16, 16)):
        lowered = plan(*widths, **options)
        free, near, far = (seconds(lowered, link) for link in (FREE, NVLINK, FAR))
        assert 0.0 < free <= near < far
        exchanges = sum(1 for _ in lowered.exchanges())
        assert far >= exchanges * FAR.latency
    assert near - free < 3 * exchanges * NVLINK.latency  # nothing of this size to hide behind


def test_more_rows_and_wider_layers_take_longer() -> None:
    for ranks in (1, 2):
        found = [
            seconds(plan(64, width, 10, batch=rows, ranks=ranks))
            for width, rows in ((64, 256), (64, 4096), (1024, 4096), (1024, 16384))
        ]
        assert all(first < second for first, second in pairwise(found))


def test_shards_on_one_card_take_at_least_as_long_as_one_of_them() -> None:
    whole = seconds(plan(784, 512, 10, batch=4096, shards=1))
    for shards in (2, 4):
        assert seconds(plan(784, 512, 10, batch=4096, shards=shards)) > whole / shards


def test_cards_without_counts_have_none_and_neither_have_evaluations() -> None:
    lowered = plan(20, 64, 2)
    assert step_seconds(lowered, "sm_80") is None
    assert step_seconds(replace(lowered, training=()), H200) is None
    backend = CudaBackend.__new__(CudaBackend)
    backend.device = cast(Device, SimpleNamespace(arch=H200))
    assert backend.step_seconds(lowered) == seconds(lowered)


def test_parts_take_what_their_launches_do_and_what_is_exchanged_between_them() -> None:
    alone, both = (plan(20_000, 90, 10, batch=128, shards=1, parts=Parts(2, 0, ranks)) for ranks in (1, 2))
    free, near, far = (seconds(both, link) for link in (FREE, NVLINK, FAR))
    assert near - free == pytest.approx(NVLINK.latency, rel=0.1)  # one exchange of 46 KB, which nothing hides
    assert far - free == pytest.approx(FAR.seconds(Traffic(46_080, 46_080, 2)), rel=0.01)
    assert near < seconds(alone)  # which makes both parts


def test_traffic_of_a_collective_is_that_of_its_transfers() -> None:
    sent = Transfer(1, At("partials"), 10, 4), Transfer(1, At("losses"), 2, 8)
    received = (Transfer(1, At("nodes"), 7, 4),)
    assert traffic_of(Collective(PARTIALS, sent, received)) == Traffic(56, 28, 3)
    assert traffic_of(Collective(PARAMETERS, (), ())) == Traffic()
