"""Steps that several ranks make on cards, on the host: whole steps of all ranks, to the bits of one rank.

The kernels are run by the host's stand-in for CUDA, and messages are copied; NCCL has no part in it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from drawn import generator, share_of
from epochs import Epoch
from host_program import HostProgram
from hypothesis import given
from hypothesis import strategies as st
from lockstep import MODES, Deadlock, Lockstep
from test_cuda_lowering import ARCHITECTURES, OWNED, on_tensor_cores, plans

from mlpgpu import Dense, Dropout, Huber, LocallyConnected, Standardize
from mlpgpu.backends.cuda.exchange import check_collectives
from mlpgpu.backends.cuda.kernels.launches import At, Launch, Lowered
from mlpgpu.backends.cuda.lower import overlap as overlapping
from mlpgpu.backends.cuda.lower.emit import exchange as emitted
from mlpgpu.backends.cuda.lower.emit import pieces as emitted_pieces
from mlpgpu.backends.cuda.lower.lowering import lower, passes
from mlpgpu.backends.cuda.run.graphs import ShardStreams
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.setting import Setting
from mlpgpu.errors import RankError
from mlpgpu.layers import Layer
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import Plan, on_ranks, sharding

TIED = Dense(8, 8, "gelu")
STACK = LocallyConnected(12, 4, "silu", bias="layer")
ON_TENSOR_CORES = {
    "GEMM_LEAST_WIDTH": 1, "GEMM_LEAST_WEIGHTS": 1, "GEMM_LEAST_ROWS": 1, "MOST_UNSCALED_WEIGHTS": 1 << 62,
    "MOST_STAGED_BYTES": 0,  # the host has room for the inputs of one step
}  # fmt: skip

# Layers, options of the plan, and limits of the paths.
NETWORKS: dict[str, tuple[list[Layer], dict[str, Any], dict[str, int]]] = {
    "dropout and a penalty": (
        [Dense(9, 7, "tanh"), Dropout(0.3), Dense(7, 8, "silu", bias=False), Dense(8, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.05, l2=0.1, alpha=1.0)},
        {},
    ),
    "clipped": (
        [Standardize(9), Dense(9, 8, "relu"), Dense(8, 3), Standardize(3)],
        {"optimizer": OPTIMIZERS["Nesterov"](0.1, clip_norm=0.1)},
        {},
    ),
    "tied": (
        [Dense(9, 8, "relu"), TIED, Dropout(0.2), TIED, Dense(8, 3)],
        {"optimizer": OPTIMIZERS["RMSprop"](0.02)},
        {},
    ),
    "tied, clipped": (
        [Dense(9, 8), TIED, TIED, Dense(8, 3)],
        {"loss": Huber(0.5), "optimizer": OPTIMIZERS["Adam"](0.05, clip_norm=0.05)},
        {},
    ),
    "frozen between": (
        [Dense(9, 7, "gelu"), Dense(7, 8, "silu", trainable=False), Dense(8, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Momentum"](0.1, alpha=0.5)},
        {},
    ),
    "locally connected": (
        [LocallyConnected(9, 3, "tanh"), Dense(7, 12), STACK, STACK, LocallyConnected(6, 4, bias=None)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["SGD"](0.05)},
        {},
    ),
    "on tensor cores": (
        [Dense(9, 33, "tanh"), Dropout(0.3), Dense(33, 34, "relu"), Dense(34, 3)],
        {"precision": "bfloat16", "optimizer": OPTIMIZERS["Momentum"](0.1)},
        ON_TENSOR_CORES,
    ),
    "on tensor cores, scaled": (
        [Dense(9, 33, "relu"), Dense(33, 16)],
        {"loss": "mean_squared_error", "optimizer": OPTIMIZERS["AdamW"](0.01, clip_norm=0.5)},
        {**ON_TENSOR_CORES, "MOST_UNSCALED_WEIGHTS": 0},
    ),
    # Of two ranks with a shard each, both move weights where they make their gradients.
    "moved where made": (
        [Dense(16, 33, "relu"), Dense(33, 20, "relu"), Dense(20, 34, "relu", bias=False), Dense(34, 18)],
        {"precision": "bfloat16", "optimizer": OPTIMIZERS["Adam"](0.02, alpha=0.3, l2=0.1, l1=0.01)},
        ON_TENSOR_CORES,
    ),
    "moved where made, no biases": (
        [
            Dense(16, 33, bias=False),
            Dense(33, 20, "tanh", bias=False),
            Dense(20, 34, bias=False),
            Dense(34, 18, bias=False),
        ],
        {"precision": "bfloat16", "optimizer": OPTIMIZERS["Momentum"](0.05)},
        ON_TENSOR_CORES,
    ),
    "moved where made, scaled": (
        [Dense(16, 24, "relu", bias=False), Dense(24, 24, "relu", bias=False), Dense(24, 16, bias=False)],
        {"loss": "mean_squared_error", "optimizer": OPTIMIZERS["Momentum"](0.1)},
        {**ON_TENSOR_CORES, "MOST_UNSCALED_WEIGHTS": 0},
    ),
    # Each moves one, so that they may make its gradient in the wait; then the last weight, which is small, is late.
    "moved where made, a small one late": (
        [Dense(24, 24, "relu"), Dense(24, 24, "tanh"), Dense(24, 6)],
        {"precision": "bfloat16", "optimizer": OPTIMIZERS["Momentum"](0.05)},
        {**ON_TENSOR_CORES, "MOVED_LEAST_ELEMENTS": 400},
    ),
    "moved where made, scaled, a small one late": (
        [Dense(24, 24, "relu"), Dense(24, 24, "tanh"), Dense(24, 6)],
        {"loss": "mean_squared_error", "optimizer": OPTIMIZERS["Adam"](0.02)},
        {**ON_TENSOR_CORES, "MOST_UNSCALED_WEIGHTS": 0, "MOVED_LEAST_ELEMENTS": 400},
    ),
}
SHARDS, RANKS = range(2, 9), (2, 3, 4)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each rank moves some of these small networks, in several pieces."""
    monkeypatch.setattr(sharding, "LEAST_BLOCK", 8)
    monkeypatch.setattr(thresholds, "EXCHANGE_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(thresholds, "MOVED_LEAST_ELEMENTS", 1)


def epoch_of(name: str, shards: int, ranks: int, *, one_exchange: bool = False) -> Epoch:
    """Full batches of 8 rows and a last one of 2, whose shards are mostly empty."""
    layers, options, _ = NETWORKS[name]
    options = {**options, "shards": shards, "ranks": ranks, "one_exchange": one_exchange}
    precision = options.pop("precision", "float32")
    return Epoch(layers, options, precision=precision)


def limited(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for limit, value in NETWORKS[name][2].items():
        monkeypatch.setattr(thresholds, limit, value)


@functools.cache
def alone(name: str, shards: int, arch: str = "sm_80") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parameters, slots and losses of one rank."""
    epoch = epoch_of(name, shards, 1)
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch=arch)
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    slots = host.slots(epoch.state.slots)
    assert np.isfinite(host.parameters).all() and (host.parameters != epoch.state.parameters[0]).any()
    return host.parameters.copy(), slots.copy(), losses


def check(
    name: str,
    shards: int,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: int = 0,
    mode: str,
    one_exchange: bool = False,
    arch: str = "sm_80",
) -> None:
    """Every rank ends with the parameters and losses of one rank, and with its slice of the slots."""
    limited(monkeypatch, name)
    expected, slots, losses = alone(name, shards, arch)
    epoch = epoch_of(name, shards, ranks, one_exchange=one_exchange)
    lockstep = Lockstep(epoch.plan, epoch.data, epoch.sampling, seed=seed, mode=mode, patch=monkeypatch, arch=arch)
    lockstep.run(epoch.state, epoch.rates)
    for rank in lockstep.ranks:
        np.testing.assert_array_equal(rank.host.parameters, expected)
        np.testing.assert_array_equal(rank.host.losses(len(epoch.rates)), losses)
        own = epoch.plan.slices[rank.rank].parameters
        kept = slots[:, :, own]
        np.testing.assert_array_equal(rank.host.slots(kept), kept)


def _cases() -> list[Any]:
    """Each network, and each number of ranks, in what always runs; a share of the others in the thorough tests."""
    draw = generator("ranks in lockstep")
    always = {
        (name, SHARDS[place % len(SHARDS)], RANKS[place % len(RANKS)]): place % 3 == 1
        for place, name in enumerate(NETWORKS)
    }
    always["dropout and a penalty", 7, 3] = False
    others = [case for case in itertools.product(NETWORKS, SHARDS, RANKS) if case not in always]
    cases = []
    for case in (*always, *share_of(others, 1 / 10, "ranks in lockstep")):
        mode, seed, one_exchange = draw.choice(MODES), draw.randrange(1 << 30), draw.random() < 0.5
        marks = [] if case in always else pytest.mark.thorough
        cases.append(pytest.param(*case, mode, seed, always.get(case, one_exchange), marks=marks))
    return cases


@pytest.mark.parametrize(("name", "shards", "ranks", "mode", "seed", "one_exchange"), _cases())
def test_any_number_of_ranks_has_the_bits_of_one(
    name: str, shards: int, ranks: int, mode: str, seed: int, one_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, shards, ranks, monkeypatch, seed=seed, mode=mode, one_exchange=one_exchange)


@pytest.mark.parametrize("name", NETWORKS)
def test_ranks_with_a_shard_each_have_all_launches_in_one_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, 3, 3, monkeypatch, seed=9, mode="drawn")


MOVES = "tensor_backward_update_received", "move_weight"  # kernels that move a weight along two gradients
ONE_EACH = "moved where made, scaled", *(name for name in NETWORKS if name.endswith("a small one late"))
MOVED_WHERE_MADE = [name for name in NETWORKS if name.startswith("moved where made")]


@pytest.mark.parametrize("in_the_wait", [False, True], ids=["moved by products", "made in the wait"])
@pytest.mark.parametrize("least", [1, 1 << 20], ids=["others sent first", "weights sent first"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MOVED_WHERE_MADE)
def test_two_ranks_move_weights_where_they_make_the_gradient(
    name: str, mode: str, least: int, in_the_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "EXCHANGE_LEAST_ELEMENTS", least)
    monkeypatch.setattr(thresholds, "IN_THE_WAIT_MOST_ELEMENTS", in_the_wait << 22)
    in_the_wait = in_the_wait and name in ONE_EACH
    check(name, 2, 2, monkeypatch, seed=5, mode=mode)
    plan = epoch_of(name, 2, 2).plan
    for rank in range(2):
        lowered = lower(plan, multiprocessors=2, source="float32", arch="sm_80", rank=rank)
        names = [launch.entry.name for launch in lowered.launches()]
        received, moves = (
            [place for place, each in enumerate(names) if kind in each]
            for kind in ("backward_update_received", "move_weight")
        )
        assert received or in_the_wait, names
        assert len(moves) == in_the_wait
        if in_the_wait:
            assert "tensor_backward_weight" in names[moves[0] - 1]
        assert sum("tensor_backward_weight" in each for each in names) >= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_products_leave_partial_sums_of_biases_on_any_number_of_ranks(
    ranks: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_90a, whose copies and products the host makes in their places; the biases come behind all products."""
    monkeypatch.setattr(thresholds, "BIAS_PARTIALS_LEAST_ROWS", 1)
    check("moved where made", 2, ranks, monkeypatch, seed=7, mode=mode, arch="sm_90a")
    lows = [lowered(epoch_of("moved where made", 2, ranks), rank, arch="sm_90a") for rank in range(ranks)]
    made = [[launch.entry.name for piece in low.pieces for launch in _launches(piece)] for low in lows if low.shards]
    assert len(made) == 2
    for names in made:
        behind = names[names.index("sum_biases") + 1 :]
        assert behind and not any(name.startswith(("sum_", "tensor")) for name in behind)
        assert any("backward_update_received" in name for name in names) == (ranks == 2)


@pytest.mark.parametrize("name", ["dropout and a penalty", "tied, clipped"])
def test_in_one_piece_as_in_several(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the gradient is cut decides no bits."""
    monkeypatch.setattr(thresholds, "EXCHANGE_LEAST_ELEMENTS", 1 << 20)
    check(name, 4, 2, monkeypatch, mode="drawn")


# --- faults that these tests must find ---


def _off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = emitted.Exchange._kept

    def shifted(self: emitted.Exchange, node: range, element: int) -> At:
        at = kept(self, node, element)
        return dataclasses.replace(at, offset=max(at.offset - 1, 0))

    monkeypatch.setattr(emitted.Exchange, "_kept", shifted)


def _too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of exchanges does not wait for the shards."""
    put = ShardStreams._put_pieces

    def at_once(self: ShardStreams, *arguments: Any) -> None:
        wait, self._exchange.wait = self._exchange.wait, lambda event: None  # type: ignore[union-attr]
        put(self, *arguments)
        self._exchange.wait = wait  # type: ignore[union-attr]

    monkeypatch.setattr(ShardStreams, "_put_pieces", at_once)


def _unawaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of a step do not wait for what the step before exchanges."""
    monkeypatch.setattr(overlapping._PieceConflicts, "of", lambda self, launch: set())


def _last_unawaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do, but for the last piece."""
    of = overlapping._PieceConflicts.of
    monkeypatch.setattr(overlapping._PieceConflicts, "of", lambda self, launch: of(self, launch) - {max(self._all)})


def _stale_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of tensor cores are those of the weights before the step."""
    monkeypatch.setattr(emitted_pieces, "_moved_weights", lambda training, pieces: [{} for _ in pieces])


def _one_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitted.Exchange, "_is_regular", False)
    additions = emitted.Exchange._additions.func  # type: ignore[attr-defined]
    monkeypatch.setattr(emitted.Exchange, "_additions", property(lambda self: additions(self)[:-1]))


def _one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are added in their order, not by the tree."""
    monkeypatch.setattr(emitted.Exchange, "_is_regular", False)
    in_order = property(lambda self: [(0, place) for place in range(1, len(self.nodes))])
    monkeypatch.setattr(emitted.Exchange, "_additions", in_order)


def _before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    of_pieces = emitted.Exchange.of_pieces

    def turned(self: emitted.Exchange, *args: Any) -> Any:
        return [
            dataclasses.replace(made, moves=made.moves[:-1], parameters=[*made.parameters, *made.moves[-1:]])
            for made in of_pieces(self, *args)
        ]

    monkeypatch.setattr(emitted.Exchange, "of_pieces", turned)


def _half_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank clips by the squares of its own slice."""
    gather = emitted.Exchange._gather

    def without(self: emitted.Exchange, kind: str, *args: Any) -> Any:
        return () if kind == "squares" else gather(self, kind, *args)

    monkeypatch.setattr(emitted.Exchange, "_gather", without)


def _own_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank divides by the weight of its own rows."""
    monkeypatch.setattr(emitted.Exchange, "_losses", lambda self: ([], []))


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, int]] = {
    "a slice off by one": (_off_by_one, "dropout and a penalty", 2),
    "an exchange before its kernel": (_too_early, "dropout and a penalty", 2),
    "a step beside its exchange": (_unawaited, "dropout and a penalty", 2),
    "a layer beside its exchange": (_last_unawaited, "dropout and a penalty", 2),
    "operands that stay": (_stale_operands, "on tensor cores", 2),
    "a node of the tree skipped": (_one_skipped, "dropout and a penalty", 4),
    "nodes in another order": (_one_after_another, "dropout and a penalty", 4),
    "parameters before their update": (_before_the_update, "dropout and a penalty", 2),
    "squares of one slice": (_half_a_norm, "clipped", 2),
    "the weight of one rank": (_own_sums, "dropout and a penalty", 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name, ranks = FAULTS[fault]
    limited(monkeypatch, name)
    alone(name, 4)
    plant(monkeypatch)
    with pytest.raises((AssertionError, Deadlock)):
        for mode in MODES:
            check(name, 4, ranks, monkeypatch, mode=mode)


def _along_half_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's half is that of the step before."""
    put = ShardStreams._put_pieces

    def at_once(self: ShardStreams, pieces: Any, put_one: Any) -> None:
        def put_at_once(stream: Any, bound: Any, launch: Launch) -> None:
            put_one(stream, bound, dataclasses.replace(launch, receives=()))

        put(self, pieces, put_at_once)

    monkeypatch.setattr(ShardStreams, "_put_pieces", at_once)


@pytest.mark.parametrize("name", ["moved where made", "moved where made, no biases"])
def test_what_is_moved_along_half_its_gradient_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "EXCHANGE_LEAST_ELEMENTS", 1 << 20)
    limited(monkeypatch, name)
    alone(name, 2)
    _along_half_the_gradient(monkeypatch)
    with pytest.raises(AssertionError):
        for mode in MODES:
            check(name, 2, 2, monkeypatch, mode=mode)


# --- lowering, and what cards must agree about ---


def lowered(epoch: Epoch, rank: int, **options: Any) -> Lowered:
    return lower(epoch.plan, multiprocessors=2, source="float32", rank=rank, **options)


@given(plans(), st.integers(2, 5), st.integers(2, 8), ARCHITECTURES, st.booleans(), st.booleans())
def test_ranks_send_what_the_others_receive(
    plan: Plan, ranks: int, shards: int, arch: str, large: bool, one_exchange: bool
) -> None:
    """As much as the plan says, and launches stay within their arrays."""
    plan = on_ranks(dataclasses.replace(plan, shards=shards), ranks, one_exchange=one_exchange)
    lows = [on_tensor_cores(plan, large=large, arch=arch, rank=rank) for rank in range(ranks)]
    check_collectives([low.collectives() for low in lows])
    for low in lows:
        for launch in low.launches():
            for argument in launch.entry.arguments:
                value = launch.values[argument.name]
                if isinstance(value, At) and value.array not in OWNED:
                    assert 0 <= value.offset * argument.item_bytes < low.bytes[value.array], (launch, argument)
        assert not one_exchange or [each.kind for each in low.collectives()] in ([], ["partials"])
        for collective in low.collectives():
            for transfer in (*collective.sent, *collective.received):
                end = (transfer.at.offset + transfer.count) * transfer.item_bytes
                assert transfer.count > 0 and end <= low.bytes[transfer.at.array]
        assert low.finish == [] and not any(launch.pdl for launch in _launches_beside(low))
        assert len(low.shards) == 1 or not any(launch.pdl for piece in low.pieces for launch in _launches(piece))


def _launches(piece: Any) -> list[Launch]:
    return [*itertools.chain(*piece.shards), *(each for each in piece.exchange if isinstance(each, Launch))]


def _launches_beside(low: Lowered) -> list[Launch]:
    """Those of the streams of exchanges."""
    return [each for piece in low.pieces for each in piece.exchange if isinstance(each, Launch)]


def test_gradients_come_from_the_first_layer_up_behind_all_deltas() -> None:
    epoch = epoch_of("dropout and a penalty", 4, 2)
    made = passes(epoch.plan, Setting(2, "sm_75", "float32", True)).training
    assert made is not None
    assert [type(group).__name__ for group in made.groups if "Gradient" in type(group).__name__] == []
    assert [piece.groups[0].op.dweight for piece in made.pieces] == ["d0.weight", "d2.weight", "d3.weight"]  # type: ignore[attr-defined]
    low = lowered(epoch, 0)
    assert [[launch.entry.name[:21] for launch in shard] for piece in low.pieces for shard in piece.shards] == [
        ["dense_backward_weight"]
    ] * 6
    kinds = [[each.kind for each in piece.exchange if not isinstance(each, Launch)] for piece in low.pieces]
    assert kinds[0][0] == "partials" and kinds[-1][-1] == "parameters"


@pytest.mark.parametrize("in_the_wait", [False, True], ids=["moved by products", "made in the wait"])
@pytest.mark.parametrize("name", ["moved where made", "moved where made, a small one late"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sums_fill_the_time_until_the_other_rank_s_weights_come(
    rank: int, name: str, in_the_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss comes first, beside the deltas, and what has moved is sent with the first weight that has.

    Small weights behind the first layer are made and exchanged last, where another gradient fills the time as well.
    """
    monkeypatch.setattr(thresholds, "EXCHANGE_LEAST_ELEMENTS", 1 << 20)
    monkeypatch.setattr(thresholds, "IN_THE_WAIT_MOST_ELEMENTS", in_the_wait << 22)
    limited(monkeypatch, name)
    in_the_wait = in_the_wait and name in ONE_EACH
    low = lowered(epoch_of(name, 2, 2), rank, arch="sm_80")
    of_losses = [any(each.at.array == "sums" for each in one.received) for one in low.collectives()]
    assert of_losses == [True] + [False] * (len(of_losses) - 1)
    assert not low.pieces[0].shards[0]
    launched = [[launch.entry.name for launch in piece.shards[0]] for piece in low.pieces if piece.shards[0]]
    first = launched[0]
    deltas = [place for place, name in enumerate(first) if "backward_input" in name]
    assert deltas and all("backward_weight" in name for name in first[max(deltas) + 1 :])
    (sums,) = (names for names in launched if any(name.startswith("sum_deltas") for name in names))
    theirs = launched[: launched.index(sums)]
    assert all("backward_weight" in names[-1] for names in theirs) and not any("update" in name for name in first)
    moved = [place for place, names in enumerate(launched) if names[-1].startswith(MOVES)]
    assert [len(launched[place]) for place in moved] == [1 + in_the_wait, *[1] * (len(moved) - 1)]
    assert moved[0] == launched.index(sums) + 1
    behind = launched[moved[-1] + 1 :]
    assert all("backward_weight" in name for names in behind for name in names) and len(behind) == in_the_wait
    loss, *moves = (launch.entry.name for launch in _launches_beside(low))
    kinds = {each.rpartition("_")[0] for each in moves}
    assert loss == "total_error" and kinds == ({"update", "split_weights"} if in_the_wait else {"update"})
    gathered = [one for one in low.collectives() if one.kind == "operands"]
    of_biases = [any(each.at.array == "parameters" for each in one.sent) for one in gathered]
    assert of_biases == [True] + [False] * (len(gathered) - 1)


@pytest.mark.parametrize("name", ["dropout and a penalty", "on tensor cores"])
def test_a_layer_awaits_its_own_piece_of_the_step_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the exchange of the last layers hides behind the next step's first ones."""
    limited(monkeypatch, name)
    (shard, *_) = lowered(epoch_of(name, 4, 2), 0, arch="sm_80").shards
    awaited = [launch.awaits for launch in shard if launch.awaits]
    assert awaited == [(0,), (1,), (2,)] and shard[0].awaits in ((), (0,))


def test_a_clipped_step_awaits_all_that_is_moved_at_its_end() -> None:
    low = lowered(epoch_of("clipped", 4, 2), 0)
    assert next(launch.awaits for launch in low.shards[0] if launch.awaits)[-1] == len(low.pieces) - 1


def test_small_networks_are_exchanged_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "EXCHANGE_LEAST_ELEMENTS", 1 << 20)
    low = lowered(epoch_of("dropout and a penalty", 4, 2), 0)
    assert [each.kind for each in low.collectives()] == ["partials", "parameters"]
    low = lowered(epoch_of("clipped", 4, 2, one_exchange=True), 0)
    assert [each.kind for each in low.collectives()] == ["partials"]


def test_a_rank_has_its_own_partials_and_slots() -> None:
    epoch, one = epoch_of("dropout and a penalty", 8, 4), epoch_of("dropout and a penalty", 8, 1)
    whole = lower(one.plan, multiprocessors=2, source="float32").bytes
    lows = [lowered(epoch, rank).bytes for rank in range(4)]
    assert sum(low["partials"] for low in lows) == whole["partials"]
    slots = len(one.plan.optimizer.slots) if one.plan.optimizer else 0
    padding = 4 * slots * 31 * (len(lows) + 1)  # of each rank's, whose slots begin at cache lines
    assert abs(sum(low["slots"] for low in lows) - whole["slots"]) <= padding


@pytest.mark.parametrize("change", ["size", "order", "number"])
def test_ranks_that_would_send_something_else_are_told(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "EXCHANGE_LEAST_ELEMENTS", 1 << 20)
    epoch = epoch_of("dropout and a penalty", 4, 2)
    (partials, parameters), others = (lowered(epoch, rank).collectives() for rank in range(2))
    first, *rest = partials.sent
    larger = dataclasses.replace(partials, sent=(dataclasses.replace(first, count=first.count + 1), *rest))
    changed = {"size": [larger, parameters], "order": [parameters, partials], "number": [parameters]}[change]
    with pytest.raises(RankError, match="rank 1 receives"):
        check_collectives([changed, others])


def test_lists_of_one_rank_are_as_they_were() -> None:
    with patch.object(thresholds, "EXCHANGE_LEAST_ELEMENTS", 1 << 20):
        low = lower(epoch_of("clipped", 4, 1).plan, multiprocessors=2, source="float32")
    assert low.pieces == [] and low.collectives() == [] and low.finish
