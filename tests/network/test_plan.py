"""The plan as plain data: its table, its order, its layouts; no backend is needed for any of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpgpu import SGD, Adam, Dense, Dropout, Momentum, Network, Standardize, plan
from mlpgpu.errors import ConfigurationError
from mlpgpu.layers import Layer
from mlpgpu.losses import LOSSES
from mlpgpu.plan import Operation, Plan

TWICE = Dense(4, 4, "gelu")

NETWORKS: dict[str, list[Layer]] = {
    "one": [Dense(3, 2)],
    "deep": [Dense(3, 5, "relu"), Dense(5, 4, "silu", bias=False), Dense(4, 2, "tanh")],
    "dropout": [Dropout(0.1), Dense(3, 5, "relu"), Dropout(0.2), Dense(5, 2), Dropout(0.3)],
    "standardize": [Standardize(3), Dense(3, 5, "relu"), Dense(5, 2), Standardize(2)],
    "tied": [Dense(3, 4), TWICE, Dropout(0.5), TWICE, Dense(4, 2)],
}
EACH = pytest.mark.parametrize("layers", list(NETWORKS.values()), ids=list(NETWORKS))


def lowered(layers: list[Layer], **options: object) -> Plan:
    defaults = {"capacity": 8, "loss": "squared_error", "optimizer": Momentum(0.1, clip_norm=1.0), "shards": 2}
    return Network(layers, seed=1).lower(**{**defaults, **options})


def kinds(operations: tuple[Operation, ...]) -> list[type[Operation]]:
    return [type(operation) for operation in operations]


def test_table() -> None:
    layers = [Dense(64, 128, "relu"), Dropout(0.1), Dense(128, 10)]
    made = lowered(layers, capacity=32, loss="softmax_cross_entropy", optimizer=Momentum(0.1, clip_norm=5.0))
    table = """\
plan: 64 → 10, 9,610 parameters, float32, up to 32 rows in 2 shards, ordered
#   operation                   reads                        writes                                    MFLOP
0   gather                                                   x 32×64, target 32, row_weight 32
1   dense relu                  x, 0.weight, 0.bias          y0 32×128                                 0.524
2   dropout 0.1                 y0                           y1 32×128
3   dense                       y1, 2.weight, 2.bias         y2 32×10                                  0.082
4   loss softmax_cross_entropy  y2, target, row_weight       value 32, dy2 32×10
5   dense backward              dy2, y1, 2.weight            d2.weight 128×10, d2.bias 10, dy1 32×128  0.164
6   dropout backward 0.1        dy1                          dy0 32×128
7   activation backward relu    dy0, y0                      dy0 32×128
8   dense backward              dy0, x, 0.weight             d0.weight 64×128, d0.bias 128             0.524
9   reduce                      partials, row_weight         gradient 9610
10  norm                        gradient                     gradient 9610
11  update Momentum             gradient, parameters, slots  parameters 9610, slots 1×9610
products: 1.294 MFLOP a step"""
    assert [line.rstrip() for line in str(made).splitlines()] == table.splitlines()


def test_a_step_in_order() -> None:
    assert kinds(lowered(NETWORKS["dropout"]).training) == [
        plan.Gather,
        plan.Dropout,
        plan.Dense,
        plan.Dropout,
        plan.Dense,
        plan.Dropout,
        plan.Loss,
        plan.DropoutBackward,
        plan.DenseBackward,
        plan.DropoutBackward,
        plan.ActivationBackward,
        plan.DenseBackward,  # the first dropout has nothing trained below it
        plan.Reduce,
        plan.Norm,
        plan.Update,
    ]


def test_an_evaluation_in_order() -> None:
    assert kinds(lowered(NETWORKS["dropout"]).evaluation) == [
        plan.Gather,
        plan.Dense,
        plan.Dense,
        plan.Loss,
        plan.Output,
    ]


@EACH
def test_an_evaluation_neither_drops_nor_learns(layers: list[Layer]) -> None:
    for operation in lowered(layers).evaluation:
        assert not type(operation).__name__.endswith("Backward")
        assert not isinstance(operation, (plan.Dropout, plan.Reduce, plan.Norm, plan.Update))


@EACH
def test_targets_and_inputs_are_standardized_in_both_lists(layers: list[Layer]) -> None:
    made = lowered(layers)
    count = sum(isinstance(layer, Standardize) for layer in layers)
    for operations in (made.training, made.evaluation):
        assert kinds(operations).count(plan.Standardize) == count


@EACH
@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.1, clip_norm=1.0)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_read_was_written(layers: list[Layer], optimizer: SGD, training: bool) -> None:
    made = lowered(layers, optimizer=optimizer)
    state = {segment.name for segment in (*made.parameters, *made.statistics)} | {"parameters", "slots"}
    partials = [partial.name for partial in made.partials]
    written: list[str] = []
    for operation in made.training if training else made.evaluation:
        known = state | set(written)
        if set(partials) <= known:
            known.add("partials")  # all of them together
        assert set(operation.reads) <= known, operation
        written += operation.writes
    if training:
        assert [written.count(name) for name in partials] == [1] * len(partials)
    else:
        assert made.output in written and made.logits in written
    assert set(written) <= set(made.buffers) | set(partials)


@EACH
def test_buffers_have_rows_at_capacity(layers: list[Layer]) -> None:
    made = lowered(layers, capacity=7, shards=3, optimizer=Adam(0.1))
    for name, buffer in made.buffers.items():
        assert buffer.name == name and len(buffer.axes) == len(buffer.shape)
        assert buffer.shape[0] == 1
        assert buffer.axes[1] != "row" or buffer.shape[1] == 7
    count = made.parameter_count
    assert made.buffers["gradient"].shape == made.buffers["parameters"].shape == (1, count)
    assert made.buffers["slots"].shape == (1, 2, count)
    assert made.buffers["partials"].shape == (1, 3, made.partials[-1].end)


@EACH
def test_segments_follow_on_from_each_other(layers: list[Layer]) -> None:
    made = lowered(layers)
    for segments in (made.parameters, made.partials, made.statistics):
        end = 0
        for segment in segments:
            assert segment.offset == end
            end = segment.end
    weights = sum(layer.n_in * layer.n_out + layer.bias * layer.n_out for layer in {*layers} if type(layer) is Dense)
    assert made.parameter_count == weights


@EACH
def test_partials_are_laid_out_as_the_parameters_are(layers: list[Layer]) -> None:
    made = lowered(layers)
    uses = [(p.parameter, p.shape) for p in made.partials]
    if layers is NETWORKS["tied"]:
        assert [name for name, _ in uses] == ["0.weight", "0.bias", "1.weight", "1.weight", "1.bias", "1.bias",
                                              "4.weight", "4.bias"]  # fmt: skip
    else:
        assert [(p.name, p.shape, p.offset) for p in made.parameters] == [
            (p.parameter, p.shape, p.offset) for p in made.partials
        ]
    assert {name for name, _ in uses} == {p.name for p in made.parameters}


def test_equal_layers_are_not_one_layer() -> None:
    assert lowered([Dense(3, 3), Dense(3, 3)]).parameter_count == 24
    once = Dense(3, 3)
    assert lowered([once, once]).parameter_count == 12


@given(rows=st.integers(0, 10**6), shards=st.integers(1, 64))
def test_shards_cover_all_rows_evenly(rows: int, shards: int) -> None:
    parts = lowered(NETWORKS["one"], shards=shards).shard_rows(rows)
    assert len(parts) == shards
    assert parts[0].start == 0 and parts[-1].stop == rows
    assert all(before.stop == after.start for before, after in pairwise(parts))
    sizes = [part.stop - part.start for part in parts]
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1


@EACH
def test_arithmetic_of_products(layers: list[Layer]) -> None:
    made = lowered(layers)
    weights = {p.name: p.size for p in made.parameters}
    for operation in made.training:
        products = {plan.Dense: 1, plan.DenseBackward: 2 if getattr(operation, "dx", None) else 1}
        size = weights[operation.weight] if type(operation) in products else 0
        assert made.flops(operation, 5) == 2 * 5 * size * products.get(type(operation), 0)


def test_no_gradient_of_inputs_is_computed() -> None:
    made = lowered(NETWORKS["deep"])
    backward = [operation for operation in made.training if isinstance(operation, plan.DenseBackward)]
    assert [operation.dx for operation in backward] == ["dy1", "dy0", None]


def test_norm_only_where_the_norm_is_clipped() -> None:
    assert plan.Norm not in kinds(lowered(NETWORKS["one"], optimizer=SGD(0.1)).training)
    clipped = lowered(NETWORKS["one"], optimizer=SGD(0.1, clip_norm=2.5))
    (norm,) = (operation for operation in clipped.training if isinstance(operation, plan.Norm))
    assert norm.limit == 2.5


@EACH
def test_without_an_optimizer_or_a_loss(layers: list[Layer]) -> None:
    made = lowered(layers, optimizer=None)
    assert made.training == made.partials == ()
    assert "plan: 3 → 2" in str(made)
    made = lowered(layers, optimizer=None, loss=None, output="softmax")
    assert made.evaluation[-1].function == "softmax"
    assert made.evaluation[0].writes == ("x",)
    assert plan.Loss not in kinds(made.evaluation)


@pytest.mark.parametrize("loss", LOSSES)
def test_predictions_are_the_loss_s(loss: str) -> None:
    made = lowered(NETWORKS["one"], loss=loss)
    assert made.evaluation[-1].function == LOSSES[loss].output
    assert made.target_kind == LOSSES[loss].targets[0]
    target = made.buffers["target"]
    assert (target.shape, target.holds) == (((1, 8), "index") if made.target_kind == "index" else ((1, 8, 2), "real"))


@pytest.mark.parametrize("loss", [name for name, loss in LOSSES.items() if loss.output != "identity"])
def test_classes_cannot_be_standardized(loss: str) -> None:
    with pytest.raises(ConfigurationError, match="regression"):
        lowered(NETWORKS["standardize"], loss=loss)


def test_standardize_in_the_middle() -> None:
    with pytest.raises(ConfigurationError, match="place 1"):
        Network([Dense(3, 3), Standardize(3), Dense(3, 3)])
