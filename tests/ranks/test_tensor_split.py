"""Networks split into parts: which layer is split how, what ranks compute of it, and that it is the same network."""

from __future__ import annotations

import random
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.backends.base import Sampling, State
from mlpgpu.backends.cpu import CpuBackend
from mlpgpu.backends.cuda import check_plan
from mlpgpu.errors import ConfigurationError
from mlpgpu.initializers import INITIALIZERS, draw_part, initial_values
from mlpgpu.plan import JoinParts, Norm, Parts, Plan, SumParts, split_plan, tensor_split
from mlpgpu.plan.operations import Dense, Gather, TakeColumns
from mlpgpu.plan.tensor import splits_of
from mlpgpu.plan.tensor_split import LATENCY, READ, bounds
from mlpgpu.random import Purpose

KINDS = "whole", "columns", "rows"
LEAST_WEIGHTS = tensor_split.LEAST_WEIGHTS


@pytest.fixture(autouse=True)
def _small_layers_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_split, "LEAST_WEIGHTS", 1 << 12)


def lowered(layers: list[mg.Layer], *, capacity: int = 8, **options: Any) -> Plan:
    settings = {"loss": "squared_error", "optimizer": mg.Adam(0.1), **options}
    return mg.Network(layers, seed=3).lower(capacity=capacity, **settings)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("width", [64, 65, 90, 127, 128, 1000, 4096, 90000])
def test_parts_cover_a_width_and_are_about_equal(width: int, count: int) -> None:
    ends = bounds(width, count)
    assert (ends[0], ends[-1], len(ends)) == (0, width, count + 1)
    sizes = [end - first for first, end in pairwise(ends)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= (1 if width < 64 * count else 2 * tensor_split.ALIGNMENT)


# --- which layer is split how ---


def exchanged(plan: Plan) -> float:
    """What a split costs for a row, counted from the operations that came of it."""
    assert plan.tensor is not None
    count = plan.tensor.parts.count
    total = 0.0
    for op in plan.training:
        if isinstance(op, SumParts):
            total += 2.0 * plan.buffers[op.y].shape[-1] * (count - 1) / count + LATENCY
        elif isinstance(op, JoinParts):
            total += plan.buffers[op.y].shape[-1] * (count - 1) / count + LATENCY
        elif isinstance(op, Gather):
            total += READ * plan.buffers[op.x].shape[-1]
    return total


@pytest.mark.parametrize("seed", range(40))
def test_no_other_split_of_large_layers_exchanges_less(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers, by trying all."""
    monkeypatch.setattr(tensor_split, "LEAST_WEIGHTS", 2000)
    chance = random.Random(seed)
    widths = [chance.choice([3, 20, 64, 300, 5000]) for _ in range(5)]
    layers: list[mg.Layer] = [mg.Dense(n, m, "tanh") for n, m in pairwise(widths)]
    whole, count = lowered(layers), chance.choice([2, 4])
    best = None
    for kinds in product(KINDS, repeat=4):
        fits = [
            kind == "whole" or (n if kind == "rows" else m) >= count
            for kind, (n, m) in zip(kinds, pairwise(widths), strict=True)
        ]
        must = [n * m >= 2000 and max(n, m) >= count for n, m in pairwise(widths)]
        if all(fits) and all(not large or kind != "whole" for large, kind in zip(must, kinds, strict=True)):
            splits = {f"{place}.weight": kind for place, kind in enumerate(kinds)}
            if set(kinds) != {"whole"}:
                cost = exchanged(split_plan(whole, Parts(count, 0, count), splits))  # type: ignore[arg-type]
                best = cost if best is None else min(best, cost)
    if best is None or all(kind == "whole" for kind in splits_of(whole, count).values()):
        return
    chosen = exchanged(split_plan(whole, Parts(count, 0, count)))
    # Parts that begin at multiples of 16 read some columns more or less than a share.
    assert chosen <= best + tensor_split.ALIGNMENT * READ, (widths, splits_of(whole, count))


def test_networks_are_split_as_one_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_split, "LEAST_WEIGHTS", LEAST_WEIGHTS)

    def kinds(*widths: int, count: int = 2) -> tuple[str, ...]:
        return tuple(splits_of(lowered([mg.Dense(n, m, "relu") for n, m in pairwise(widths)]), count).values())

    assert kinds(784, 1024, 1024, 10) == ("columns", "rows", "whole")
    assert kinds(784, 1024, 1024, 100) == ("columns", "columns", "rows")
    assert kinds(784, 1024, 1024, 1024, 10) == ("columns", "rows", "columns", "rows")
    # A tall one along k: a rank reads its columns of the data.
    assert kinds(90000, 90, 90, 10) == ("rows", "whole", "whole")
    assert kinds(65536, 65536, 65536, 65536, count=8) == ("columns", "columns", "rows")
    assert kinds(784, 128, 10) == ("columns", "rows")


def test_what_has_no_split_stays_whole() -> None:
    tied = mg.Dense(64, 64, "tanh")
    plan = lowered([mg.Dense(80, 64), tied, tied, mg.LocallyConnected(64, 3), mg.Dense(62, 1)])
    splits = splits_of(plan, 2)
    assert splits == {"0.weight": splits["0.weight"], "1.weight": "whole", "3.weight": "whole", "4.weight": "whole"}
    assert splits["0.weight"] != "whole"


# --- what each rank has ---


def test_a_part_is_computed_alike_whoever_has_it() -> None:
    """The operations of a part do not depend on the number of ranks, so neither do its bits."""
    whole = lowered([mg.Dense(200, 96, "gelu"), mg.Dropout(0.1), mg.Dense(96, 80), mg.Dense(80, 7)])
    exchanges = SumParts, JoinParts

    def of_part(ranks: int, part: int) -> list[str]:
        (plan,) = (split_plan(whole, own) for r in range(ranks) if part in (own := Parts(4, r, ranks)).own)
        names = [f"/{part}'", f'/{part}"']
        return [
            str(op).replace("dbias='d1.bias'", "dbias=None").replace("dbias='d2.bias'", "dbias=None")
            for op in plan.training
            if not isinstance(op, (*exchanges, Gather)) and any(name in str(op) for name in names)
        ]

    for part in range(4):
        assert of_part(1, part) == of_part(2, part) == of_part(4, part) != []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_have_all_of_the_network_between_them(ranks: int) -> None:
    whole = lowered([mg.Dense(200, 96, "gelu"), mg.Dense(96, 80), mg.Dense(80, 7)])
    seen = {p.name: np.zeros(p.shape, int) for p in whole.parameters}
    for rank in range(ranks):
        plan = split_plan(whole, Parts(4, rank, ranks))
        for p in plan.parameters:
            if p.of is None:
                seen[p.name] += 1
            else:
                assert seen[p.of.whole.name][p.of.index].shape == p.shape
                seen[p.of.whole.name][p.of.index] += ranks  # so that a whole one counts as much as one that is dealt
        assert plan.parameter_count <= whole.parameter_count * -(-4 // ranks) / 4 * 1.1 + 200
        assert plan.buffers["partials"].shape[-1] == plan.buffers["gradient"].shape[-1] == plan.parameter_count
        assert plan.buffers["slots"].shape[-1] == plan.parameter_count
    assert all((count == ranks).all() for count in seen.values())


def test_bytes_are_those_of_what_is_exchanged() -> None:
    whole = lowered([mg.Dense(300, 100, "gelu"), mg.Dense(100, 64)], capacity=10)
    plan = split_plan(whole, Parts(2, 0, 2), {"0.weight": "columns", "1.weight": "rows"})
    assert [type(op) for op in plan.training if plan.sent_bytes(op, 0)] == [SumParts]
    assert sum(plan.sent_bytes(op, 1) for op in plan.training) == 10 * 64 * 4
    joined = split_plan(whole, Parts(4, 1, 2), {"0.weight": "columns", "1.weight": "whole"})
    assert sum(joined.sent_bytes(op, 1) for op in joined.training) == 10 * 50 * 4
    assert split_plan(whole, Parts(4, 0, 1)).sent_bytes(plan.training[3], 0) == 0
    # Four ranks, a large sum: each sends three quarters of its own, and the sum of a quarter to three.
    large = lowered([mg.Dense(300, 256, "gelu"), mg.Dense(256, 2048)], capacity=16)
    plan = split_plan(large, Parts(4, 0, 4), {"0.weight": "columns", "1.weight": "rows"})
    assert sum(plan.sent_bytes(op, 0) for op in plan.training) == 2 * 3 * 16 * 2048 // 4 * 4
    assert "kB between ranks" in str(plan)
    # A clipped norm: each rank's sums of squares, of blocks of each array's part.
    clipped = lowered([mg.Dense(300, 256), mg.Dense(256, 2048)], optimizer=mg.SGD(0.1, clip_norm=1.0))
    parts = split_plan(clipped, Parts(2, 0, 2), {"0.weight": "columns", "1.weight": "rows"})
    (norm,) = (op for op in parts.training if isinstance(op, Norm))
    blocks = -(-300 * 128 // 2**15) + 1 + -(-128 * 2048 // 2**15)
    assert parts.sent_bytes(norm, 0) == 8 * blocks
    assert "part 0 of 4 on rank 0 of 4" in str(plan)
    assert "0.weight by columns, 1.weight by rows" in str(plan)


def test_a_tall_first_layer_reads_its_columns_of_the_data() -> None:
    whole = lowered([mg.Dense(90000, 90, "relu"), mg.Dense(90, 10)])
    plan = split_plan(whole, Parts(2, 1, 2))
    (gather,) = (op for op in plan.training if isinstance(op, Gather))
    assert gather.columns == (45008, 90000) or gather.columns == (45000, 90000) or gather.columns == (44992, 90000)
    assert "x" not in plan.buffers
    assert not any(isinstance(op, TakeColumns) and op.x == "x" for op in plan.training)
    with_standardize = lowered([mg.Standardize(90000), mg.Dense(90000, 90, "relu"), mg.Dense(90, 10)])
    (gather,) = (op for op in split_plan(with_standardize, Parts(2, 1, 2)).training if isinstance(op, Gather))
    assert gather.columns is None


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("shape", [(50, 30), (7, 1), (33,)])
def test_a_part_is_drawn_with_the_bits_of_the_whole(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlpgpu.initializers.DRAWN_AT_A_TIME", 100)
    whole = initial_values(name, shape, (50, 30), seed=5, layer=2).astype(np.float32)
    for first, end in ((0, shape[0]), (3, 6), (5, 7)):
        rows = (slice(first, end),)
        columns = (slice(None), slice(11, 22)) if len(shape) == 2 and shape[1] > 20 else rows
        for index in (rows, columns):
            out = np.full(whole[index].shape, np.nan, np.float32)
            draw_part(out, name, shape, index, (50, 30), seed=5, layer=2, purpose=Purpose.INITIAL_VALUES)
            np.testing.assert_array_equal(out, whole[index])


# --- the same network ---


def after_steps(plan: Plan, parameters: np.ndarray, data: mg.Dataset, steps: int) -> tuple[np.ndarray, ...]:
    """Losses of steps, the parameters and predictions after them."""
    program = CpuBackend().compile(plan)
    assert plan.optimizer is not None
    slots = np.zeros((len(plan.optimizer.slots), 1, len(parameters)), plan.dtype)
    program.load(State(parameters[np.newaxis].astype(plan.dtype), slots, np.zeros((1, plan.statistic_count))))
    program.attach(data, Sampling(len(data), len(data), seed=1, shuffle=False))
    losses = program.run(0, np.full(steps, plan.optimizer.rate))
    return losses, program.read().parameters[0], program.predict(data)


STACKS = {
    "dropout": [mg.Dense(6, 9), mg.Dropout(0.5), mg.Dense(9, 8), mg.Dropout(0.5), mg.Dense(8, 5)],
    "frozen": [mg.Dense(6, 9, trainable=False), mg.Dense(9, 8, bias=False), mg.Dense(8, 5, trainable=False)],
    "one": [mg.Dropout(0.5), mg.Dense(6, 5)],
}


def every_split(layers: list[mg.Layer]) -> list[dict[str, str]]:
    weights = [f"{place}.weight" for place, layer in enumerate(layers) if isinstance(layer, mg.Dense)]
    return [
        dict(zip(weights, kinds, strict=True))
        for kinds in product(KINDS, repeat=len(weights))
        if set(kinds) != {"whole"}
    ]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", STACKS)
def test_every_split_has_the_bits_of_the_whole_where_sums_are_exact(name: str, count: int) -> None:
    """Of whole numbers: outputs, gradients and dropped units, whichever layer is split how, to the bit."""
    layers = STACKS[name]
    draw = np.random.default_rng(2)
    data = mg.Dataset(draw.integers(-2, 3, (4, 6)).astype(float), draw.integers(-3, 4, (4, 5)).astype(float))
    whole = lowered(layers, capacity=4, optimizer=mg.SGD(1.0), precision="float64")
    parameters = draw.integers(-2, 3, whole.parameter_count).astype(float)
    expected = after_steps(whole, parameters, data, 1)
    assert np.abs(expected[1]).max() < 2**45
    assert not np.array_equal(expected[1], parameters)
    for splits in every_split(layers):
        got = after_steps(split_plan(whole, Parts(count), splits), parameters, data, 1)  # type: ignore[arg-type]
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, str(splits))


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_a_product_errs_no_more_than_sums_of_its_length_may(kind: str) -> None:
    """By columns a sum has k terms, by rows the parts' sums are added up; both within γ_k Σ|x w|."""
    draw = np.random.default_rng(4)
    data = mg.Dataset(draw.standard_normal((20, 500)), draw.standard_normal((20, 40)))
    whole = lowered([mg.Dense(500, 40, bias=False)], capacity=20, optimizer=mg.SGD(0.0))
    parameters = draw.standard_normal(whole.parameter_count).astype(np.float32)
    plan = split_plan(whole, Parts(4), {"0.weight": kind})  # type: ignore[dict-item]
    predicted = after_steps(plan, parameters, data, 1)[2]
    x, w = data.x.astype(np.float32).astype(np.longdouble), parameters.reshape(500, 40).astype(np.longdouble)
    u = np.finfo(np.float32).eps / 2
    most = (500 + 4) * u / (1 - 504 * u) * (np.abs(x) @ np.abs(w))
    assert (np.abs(predicted - x @ w) <= most).all()


@pytest.mark.parametrize("activation", ["tanh", "gelu", "relu"])
def test_gradients_are_those_of_the_whole(activation: Any) -> None:
    """In float64, of each way to split three layers: after a step of SGD, to some roundings of the largest number."""
    layers: list[mg.Layer] = [mg.Dense(6, 9, activation), mg.Dropout(0.3), mg.Dense(9, 8, activation), mg.Dense(8, 5)]
    draw = np.random.default_rng(6)
    data = mg.Dataset(draw.standard_normal((7, 6)), draw.standard_normal((7, 5)), draw.uniform(0.5, 2.0, 7))
    whole = lowered(layers, capacity=7, optimizer=mg.SGD(0.5, clip_norm=0.7, l2=0.01), precision="float64")
    parameters = draw.standard_normal(whole.parameter_count)
    expected = after_steps(whole, parameters, data, 3)
    for splits in every_split(layers):
        got = after_steps(split_plan(whole, Parts(3), splits), parameters, data, 3)  # type: ignore[arg-type]
        for ours, theirs in zip(got, expected, strict=True):
            # Some hundred operations one after another, none of which makes numbers far larger than these.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1000 * 2**-53 * np.abs(theirs).max())


def test_bytes_and_memory_maps_are_read_by_columns(tmp_path: Any) -> None:
    draw = np.random.default_rng(7)
    raw = draw.integers(0, 256, (9, 40)).astype(np.uint8)
    np.save(tmp_path / "x.npy", draw.standard_normal((9, 40)))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for x in (raw, mapped, np.asfortranarray(mapped), np.asarray(mapped, np.float32)):
        data = mg.Dataset(x, draw.standard_normal((9, 3)))
        whole = lowered([mg.Dense(40, 3)], capacity=9, optimizer=mg.SGD(0.1), precision="float64")
        plan = split_plan(whole, Parts(2), {"0.weight": "rows"})
        assert all(op.columns for op in plan.training if isinstance(op, Gather))
        parameters = draw.standard_normal(whole.parameter_count)
        got, expected = (after_steps(each, parameters, data, 2) for each in (plan, whole))
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


# --- what is refused ---


def test_what_cannot_be_split_is_refused() -> None:
    def trainer(layers: list[mg.Layer], **options: Any) -> mg.Trainer:
        return mg.Trainer(mg.Network(layers), "squared_error", backend="cpu", **{"parallel": "tensor", **options})

    wide: list[mg.Layer] = [mg.Dense(200, 100), mg.Dense(100, 3)]
    with pytest.raises(ConfigurationError, match=r"layers with parallel='tensor': .*300 or more wide"):
        trainer(wide, parts=300)
    with pytest.raises(ConfigurationError, match=r"at most 12, in a weight 4×3 \(parallel='data' splits the batch"):
        trainer([mg.Dense(4, 3)], parts=2)
    with pytest.raises(ConfigurationError, match=r"streams with parallel='tensor': expected 1 or None, got 2 \(parts="):
        trainer(wide, parts=2, streams=2)
    with pytest.raises(ConfigurationError, match=r"parts: expected parallel='tensor', or None, got 2 of 'data'"):
        trainer(wide, parts=2, parallel="data")
    with pytest.raises(ConfigurationError, match=r"parts: expected .*, got 0"):
        trainer(wide, parts=0)
    with pytest.raises(ConfigurationError, match=r"reduction of parallel='tensor' on the cuda .* got 'atomic'"):
        check_plan(split_plan(lowered(wide, reduction="atomic"), Parts(2)), "a card", (9, 0))
    assert trainer(wide).plan.tensor is None  # a process alone has all of it


def test_dense_operations_name_parts_of_their_own() -> None:
    plan = split_plan(lowered([mg.Dense(200, 96, "gelu"), mg.Dense(96, 80)]), Parts(3, 1, 3))
    names = [op.weight for op in plan.training if isinstance(op, Dense)]
    assert names == ["0.weight/1", "1.weight/1"]
    assert all(name in plan.buffers for op in plan.training for name in op.writes if name.startswith(("y", "z", "Σ")))
