"""Whole plans on a card against the CPU backend in float64, on the same network, shuffles and masks.

How far float32 may stray is not set by hand.  A dot product in float32 is the exact one of terms that
are moved by no more than a rounding for each (Higham, *Accuracy and Stability of Numerical Algorithms*,
section 3.1): so the same training runs in float64 from weights and inputs moved by as much as the
roundings of all steps, and what that changes is what a card may be off by.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from helpers import EPS32, LOSS_KINDS, LOSS_OF, dataset, numpy_alone
from kernel_cases.tensor import ERRORS, PRECISION_OF

from mlpgpu import SGD, Adam, Dataset, Dense, Dropout, LocallyConnected, Momentum, Network, Standardize, Trainer
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda.kernels import BFLOAT16_TRIPLE, OF_PRECISION, OPERAND_FORMATS, SUMS_OF_TERMS, OperandFormat
from mlpgpu.backends.cuda.run import training
from mlpgpu.backends.cuda.runtime import Device, modules
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.layers import Layer
from mlpgpu.losses import LOSSES, Loss, TargetKind
from mlpgpu.optimizers import OPTIMIZERS, Optimizer

# Networks inside one kernel are for test_persistent.py: to compile one for each plan would take minutes.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_once", "launches")]

SIZES = (1, 31, 32, 33, 127, 257)
ROUNDINGS = 16  # of a formula beside its sums, as in kernel_cases/
MOMENTUM = Momentum(0.05)
NUDGES = 3  # runs from moved weights and inputs
# Where roundings are large, an optimizer that divides by a gradient's size turns the step of a small one round, and
# three runs may miss it: of 60 runs of one step by RMSprop the first three strayed by 0.02, a sixth of all by 0.15.
ROUGH_NUDGES = 12


@dataclass(frozen=True)
class Case:
    """A network, its data and how it is trained."""

    layers: tuple[Layer, ...]
    loss: str | Loss = "softmax_cross_entropy"
    kind: TargetKind = "index"
    optimizer: Optimizer = MOMENTUM
    rows: int = 70
    batch_size: int = 32
    epochs: int = 2
    streams: int = 1
    reduction: str = "ordered"
    source: str = "float64"
    weighted: bool = False
    class_weight: str | None = None
    precision: str = "float32"
    operand_format: OperandFormat | None = None  # of a precision other than float32

    @property
    def widths(self) -> tuple[int, int]:
        dense = [layer for layer in self.layers if isinstance(layer, Dense)]
        return dense[0].n_in, dense[-1].n_out

    @property
    def steps(self) -> int:
        return self.epochs * -(-self.rows // self.batch_size)

    @property
    def roundings(self) -> int:
        """Of one step: those of its longest chain of products, forward and back."""
        widths = sum(layer.n_in + layer.n_out for layer in self.layers if isinstance(layer, Dense))
        return min(self.rows, self.batch_size) + widths + ROUNDINGS

    @property
    def reach(self) -> float:
        """How far, of their size, all roundings of a training may move weights and inputs."""
        products = 3 * sum(isinstance(layer, Dense) for layer in self.layers)
        operand_format = (
            0.0 if self.precision == "float32" or self.operand_format is None else ERRORS[self.operand_format.struct]
        )
        return self.steps * (self.roundings * EPS32 + products * operand_format)

    def data(self) -> Dataset:
        n_in, n_out = self.widths
        data = dataset(self.loss, self.kind, rows=self.rows, n_in=n_in, n_out=n_out, weighted=self.weighted)
        if self.source == "float64":
            return data
        x = (50.0 * data.x + 128.0).clip(0.0, 255.0).astype("uint8") if self.source == "uint8" else data.x.astype("f4")
        return Dataset(x, data.y, data.weight)

    def one_step(self) -> Case:
        return dataclasses.replace(self, epochs=1, batch_size=self.rows)


def train(case: Case, *, nudge: int | None = None, **options: Any) -> dict[str, np.ndarray]:
    """What a training leaves, as float64 arrays by name; with ``nudge`` from moved weights and inputs."""
    network, data = Network(case.layers, seed=5), case.data()
    network.adapt(data)
    if nudge is not None:
        random, reach = np.random.default_rng(nudge), case.reach
        x = data.x.astype(np.float64) * (1.0 if data.scale is None else data.scale)
        moved = x * (1.0 + random.uniform(-reach, reach, x.shape))
        data = Dataset(moved, data.y, data.weight, scale=data.scale)
        for name, values in network.parameters.items():
            network.parameters[name] = values * (1.0 + random.uniform(-reach, reach, values.shape))
    trainer = Trainer(
        network, case.loss, case.optimizer, batch_size=case.batch_size, class_weight=case.class_weight, **options
    )
    before = network.flat_parameters().astype(np.float64)
    trainer.fit(data, case.epochs, progress=False)
    after = network.flat_parameters().astype(np.float64)
    return {
        "change": after - before,
        "parameters": after,
        "losses": np.array(trainer.history["loss"]),
        "evaluation": np.array([trainer.evaluate(data)["loss"]]),
        "predictions": network.predict(data, backend=trainer.backend.name, batch_size=13).astype(np.float64),
    }


def on_card(case: Case) -> dict[str, np.ndarray]:
    return train(case, backend="cuda", streams=case.streams, reduction=case.reduction, precision=case.precision)


def check(case: Case) -> None:
    nudges = range(NUDGES if case.precision == "float32" else ROUGH_NUDGES)
    with numpy_alone():
        expected, *nudged = (
            train(case, nudge=nudge, backend="cpu", precision="float64", threads=1) for nudge in (None, *nudges)
        )
    # What else is rounded: in each step the weights themselves, and terms of order one in a loss.
    beside = {"change": np.linalg.norm(expected["parameters"]), "losses": ROUNDINGS, "evaluation": ROUNDINGS}
    for name, got in on_card(case).items():
        assert np.isfinite(got).all()
        reach = max(np.linalg.norm(moved[name] - expected[name]) for moved in nudged)
        own = ROUNDINGS * np.linalg.norm(expected[name]) + beside.get(name, 0.0)
        assert np.linalg.norm(got - expected[name]) <= 2.0 * reach + case.steps * EPS32 * own, name


def check_both(case: Case) -> None:
    """After one step, and after several."""
    check(case.one_step())
    check(case)


def mlp(*widths: int) -> tuple[Layer, ...]:
    pairs = list(itertools.pairwise(widths))
    return (*(Dense(n_in, n_out, "tanh") for n_in, n_out in pairs[:-1]), Dense(*pairs[-1]))


# --- the tables ---


@pytest.mark.parametrize("reduction", ["ordered", "atomic"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, reduction: str) -> None:
    layers = (Dense(31, 33, activation), Dense(33, 65, activation, bias=False), Dense(65, 3))
    check_both(Case(layers, reduction=reduction, streams=2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("loss", "kind"), [case for case in LOSS_KINDS if case[0] != "poisson"])
def test_losses_and_optimizers(loss: str, kind: TargetKind, optimizer: str) -> None:
    check_both(Case(mlp(7, 33, 5), LOSS_OF[loss], kind, OPTIMIZERS[optimizer](0.01), weighted=True))


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_penalties_and_clipping(optimizer: str, streams: int) -> None:
    penalized = OPTIMIZERS[optimizer](0.01, l1=0.01, l2=0.02, clip_norm=0.1)
    check_both(Case(mlp(7, 33, 5), optimizer=penalized, streams=streams))


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_penalty_on_weights_alone(optimizer: str, clip_norm: float | None) -> None:
    penalized = OPTIMIZERS[optimizer](0.01, alpha=3.0, clip_norm=clip_norm)
    check_both(Case(mlp(7, 33, 5), optimizer=penalized, weighted=True))


@pytest.mark.parametrize("batch_size", [1, 7, 40, 200])
@pytest.mark.parametrize("k", [300, 4100])
def test_a_penalty_on_weights_alone_in_each_product(k: int, batch_size: int) -> None:
    """In the epilogues of tiles, of few rows and of a large k."""
    layers = (Dense(k, 64, "tanh"), Dense(64, 40, "gelu"), Dense(40, 3))
    check(Case(layers, optimizer=Momentum(0.01, alpha=3.0), rows=2 * batch_size, batch_size=batch_size, epochs=1))


@pytest.mark.parametrize("source", ["uint8", "float32"])
@pytest.mark.parametrize("optimizer", ["Momentum", "Adam"])
def test_steps_by_blocks_of_rows(source: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan has them yet unless asked.  A block of an H200 has the shared memory for the last of these."""
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", True)
    rule = OPTIMIZERS[optimizer](0.01, alpha=1.0)
    check(Case(mlp(33, 20, 5), source=source, optimizer=rule, weighted=True))
    dropped = (Dropout(0.2), Dense(50, 64, "gelu"), Dropout(0.3), Dense(64, 64, "silu", bias=False), Dense(64, 3))
    check(Case(dropped, source=source, optimizer=rule))
    check(Case(mlp(50, 128, 128, 128, 3), source=source, optimizer=rule, rows=1500, batch_size=1024))


# --- sizes, shards, inputs ---


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: int) -> None:
    others = [other for other in SIZES if other != size]
    for other, rows in zip(others, (257, 33, 127, 1, 31), strict=True):
        check(Case(mlp(size, other, 31), rows=rows, batch_size=size, epochs=1 if rows > 8 * size else 2))
        check(Case(mlp(other, size, other), rows=size, batch_size=2 * size))


@pytest.mark.parametrize("reduction", ["ordered", "atomic"])
@pytest.mark.parametrize("streams", range(1, 9))
@pytest.mark.parametrize("rows", [3, 70])
def test_streams(streams: int, reduction: str, rows: int) -> None:
    layers = (Dense(33, 40, "gelu"), Dropout(0.3), Dense(40, 31, "relu"), Dense(31, 5))
    check_both(Case(layers, rows=rows, streams=streams, reduction=reduction, weighted=True))


@pytest.mark.parametrize("streams", [1, 3])
def test_several_dropouts(streams: int, launches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products end with them, and one launch draws what all of them keep for several steps."""
    monkeypatch.setattr(thresholds, "ROW_STEP_IS_USED", False)
    hidden = (Dense(33, 340, "gelu"), Dropout(0.3), Dense(340, 200, "relu"), Dropout(0.25), Dense(200, 150, "tanh"))
    layers = (Dropout(0.2), *hidden, Dropout(0.1), Dense(150, 5))
    check_both(Case(layers, rows=900, batch_size=300, streams=streams))


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("source", ["uint8", "float32", "float64"])
def test_sources_and_weights(source: str, streams: int) -> None:
    layers = (Dropout(0.2), *mlp(33, 17, 4))
    check_both(Case(layers, source=source, streams=streams))
    check_both(Case(layers, source=source, streams=streams, weighted=True, class_weight="balanced"))


@pytest.mark.parametrize("reduction", ["ordered", "atomic"])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.2])
def test_tied_layers(streams: int, reduction: str, clip_norm: float | None) -> None:
    tied = Dense(33, 33, "tanh")
    layers = (Dense(7, 33, "relu"), tied, Dense(33, 33, "silu"), tied, tied, Dense(33, 3))
    check_both(Case(layers, optimizer=Adam(0.01, clip_norm=clip_norm), streams=streams, reduction=reduction))


@pytest.mark.parametrize("reduction", ["ordered", "atomic"])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("bias", ["output", "layer", None])
def test_locally_connected_layers(bias: Literal["output", "layer"] | None, streams: int, reduction: str) -> None:
    stack = LocallyConnected(300, 29, "tanh", bias)
    layers = (Dense(7, 300), stack, stack, stack, Dropout(0.2), LocallyConnected(216, 1, "gelu", bias), Dense(216, 3))
    check_both(Case(layers, optimizer=Adam(0.01), streams=streams, reduction=reduction, weighted=True))


@pytest.mark.parametrize("source", ["uint8", "float32"])
@pytest.mark.parametrize("loss", [name for name, loss in LOSSES.items() if loss.output == "identity"])
def test_standardized_inputs_and_targets(loss: str, source: str) -> None:
    layers = (Standardize(7), *mlp(7, 33, 2), Standardize(2))
    check_both(Case(layers, loss, "dense", source=source, streams=2, weighted=True))


@pytest.mark.parametrize("reduction", ["ordered", "atomic"])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("k", [4096, 5001])
def test_products_cut_along_k(k: int, streams: int, reduction: str) -> None:
    layers = (Dense(k, 33, "gelu"), Dense(33, k, "tanh"), Dense(k, 3))
    check(Case(layers, rows=40, batch_size=16, epochs=1, streams=streams, reduction=reduction, optimizer=SGD(0.01)))


# Losses whose deltas are no larger than errors of order one.
RANDOM_KINDS = [(loss, kind) for loss, kind in LOSS_KINDS if loss in (*SUMS_OF_TERMS, "softmax_cross_entropy")]


def random_case(seed: int) -> Case:
    random = np.random.default_rng(seed)

    def pick(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    loss, kind = pick(RANDOM_KINDS)
    widths = [pick((*SIZES, int(random.integers(2, 300)))) for _ in range(random.integers(2, 6))]
    layers: list[Layer] = [
        Dense(n_in, n_out, pick(list(ACTIVATIONS)), bias=bool(random.integers(2)))
        for n_in, n_out in itertools.pairwise(widths)
    ]
    layers[-1] = Dense(widths[-2], widths[-1])
    if random.integers(2):
        layers.insert(int(random.integers(len(layers))), Dropout(0.25))
    if random.integers(3) == 0:
        layers.insert(0, Standardize(widths[0]))
    rows = int(pick((*SIZES, 200)))
    return Case(
        tuple(layers),
        loss,
        kind,
        OPTIMIZERS[pick(list(OPTIMIZERS))](
            0.01, l2=pick((0.0, 0.01)), clip_norm=pick((None, 0.3)), alpha=pick((0.0, 1.0))
        ),
        rows=rows,
        batch_size=pick([size for size in (*SIZES, 64) if size > rows / 12]),
        streams=int(random.integers(1, 9)),
        reduction=pick(("ordered", "atomic")),
        source=pick(("uint8", "float32", "float64")),
        weighted=bool(random.integers(2)),
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_plans(seed: int) -> None:
    check_both(random_case(seed))


# --- the same bits ---


@pytest.mark.parametrize("streams", [1, 2, 3, 8])
def test_ordered_runs_repeat_their_bits(streams: int) -> None:
    tied = Dense(65, 65, "gelu")
    case = Case(
        (Dense(4097, 65, "relu"), Dropout(0.2), tied, tied, Dense(65, 10)),
        optimizer=Adam(0.01, clip_norm=0.5), rows=300, batch_size=64, streams=streams,
    )  # fmt: skip
    first, *others = (on_card(case) for _ in range(3))
    for other in others:
        assert all((other[name] == first[name]).all() for name in first)


def test_predict_gives_a_row_the_same_bits_in_any_batch() -> None:
    # Wide and long enough for the largest tiles, and for a product cut along k.
    network = Network([Dense(4097, 33, "gelu"), Dense(33, 641, "tanh"), Dense(641, 7)], seed=1)
    network.output = "softmax"
    x = np.random.default_rng(0).normal(size=(4200, 4097)).astype(np.float32)
    whole = network.predict(x, backend="cuda", batch_size=len(x))
    assert np.isfinite(whole).all()
    for batch_size in (33, 700, 1024):
        np.testing.assert_array_equal(network.predict(x, backend="cuda", batch_size=batch_size), whole)
    np.testing.assert_array_equal(network.predict(x[:40], backend="cuda", batch_size=1), whole[:40])


# --- on tensor cores ---


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """All products of dense layers are made on tensor cores, however small."""
    if device.compute_capability < (8, 0):
        pytest.skip("needs compute capability 8.0")
    for name in ("GEMM_LEAST_WIDTH", "GEMM_LEAST_WEIGHTS", "GEMM_LEAST_ROWS"):
        monkeypatch.setattr(thresholds, name, 1)
    monkeypatch.setattr(thresholds, "WHOLE_BATCH_IS_USED", False)  # of few rows plain cores would make them


EACH_FORM = pytest.mark.parametrize(
    "operand_format", OPERAND_FORMATS, indirect=True, ids=lambda operand_format: operand_format.name
)


@pytest.fixture
def operand_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OperandFormat:
    """What components hold in the test, whatever the widths."""
    operand_format: OperandFormat = request.param
    monkeypatch.setattr(thresholds, "MOST_UNSCALED_WEIGHTS", 0 if operand_format.scaled else 1 << 62)
    is_of_steps_alone = operand_format == BFLOAT16_TRIPLE
    monkeypatch.setattr(thresholds, "UNSCALED_STEP_HUNDREDTHS", 0 if is_of_steps_alone else 1 << 30)
    return operand_format


def in_form(case: Case, operand_format: OperandFormat) -> Case:
    return dataclasses.replace(case, precision=PRECISION_OF[operand_format], operand_format=operand_format)


TENSOR_CASES = {
    "activations": Case((*(Dense(33, 33, name) for name in ACTIVATIONS), Dense(33, 3)), epochs=1),
    "large": Case((Dense(700, 600, "relu"), Dense(600, 530, "tanh"), Dense(530, 10)), rows=600, batch_size=512),
    "shards, dropout, bytes": Case(
        (Dense(33, 40, "gelu"), Dropout(0.3), Dense(40, 130, "relu"), Dense(130, 5)), streams=3, source="uint8"
    ),
    "tied, clipped": Case(
        (Dense(7, 33, "relu"), *(2 * [Dense(33, 33, "tanh")]), Dense(33, 3)), optimizer=Adam(0.01, clip_norm=0.2)
    ),
    "standardized": Case((Standardize(7), *mlp(7, 33, 2), Standardize(2)), "squared_error", "dense", weighted=True),
    "a loss at the end": Case(
        (Dense(33, 40, "gelu"), Dense(40, 136)), "squared_error", "dense", rows=300, batch_size=130, weighted=True
    ),
    "of shards": Case((Dense(33, 40, "gelu"), Dense(40, 72)), "binary_cross_entropy", "dense", streams=2),
    "one row": Case(mlp(31, 257, 3), batch_size=1, rows=3),
}


@EACH_FORM
@pytest.mark.parametrize("case", TENSOR_CASES)
@pytest.mark.usefixtures("on_tensor_cores")
def test_plans_on_tensor_cores(case: str, operand_format: OperandFormat) -> None:
    check_both(in_form(TENSOR_CASES[case], operand_format))


@EACH_FORM
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.usefixtures("on_tensor_cores")
def test_random_plans_on_tensor_cores(seed: int, operand_format: OperandFormat) -> None:
    check_both(in_form(dataclasses.replace(random_case(seed), reduction="ordered"), operand_format))


@EACH_FORM
@pytest.mark.parametrize("streams", [1, 2])
def test_tensor_cores_repeat_their_bits(streams: int, operand_format: OperandFormat) -> None:
    layers = (Dense(700, 600, "relu"), Dropout(0.2), Dense(600, 530, "gelu"), Dense(530, 10))
    case = in_form(Case(layers, rows=1100, batch_size=1024, streams=streams), operand_format)
    first, *others = (on_card(case) for _ in range(3))
    for other in others:
        assert all((other[name] == first[name]).all() for name in first)


@EACH_FORM
def test_launches_that_overlap_change_no_bit(operand_format: OperandFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (Dense(700, 600, "relu"), Dense(600, 530, "gelu"), Dense(530, 10))
    case = in_form(Case(layers, rows=5000, batch_size=1024, epochs=3), operand_format)
    overlapping = on_card(case)
    monkeypatch.setattr(modules, "PDL_CAPABILITY", (1000, 0))
    apart = on_card(case)
    assert all((overlapping[name] == apart[name]).all() for name in apart)


@pytest.mark.parametrize(
    "operand_format", OF_PRECISION["float32"], indirect=True, ids=lambda operand_format: operand_format.name
)
@pytest.mark.usefixtures("operand_format")
def test_predict_on_tensor_cores_gives_a_row_the_same_bits_in_any_batch() -> None:
    network = Network([Dense(900, 1025, "gelu"), Dense(1025, 640, "tanh"), Dense(640, 7)], seed=1)
    network.output = "softmax"
    random = np.random.default_rng(0)
    x = (random.normal(size=(4200, 900)) * 10.0 ** random.uniform(-12.0, 12.0, (4200, 1))).astype(np.float32)
    whole = network.predict(x, backend="cuda", batch_size=len(x))
    assert np.isfinite(whole).all()
    for batch_size in (33, 700, 1024):
        np.testing.assert_array_equal(network.predict(x, backend="cuda", batch_size=batch_size), whole)
    np.testing.assert_array_equal(network.predict(x[:40], backend="cuda", batch_size=1), whole[:40])


@EACH_FORM
def test_a_resumed_run_on_tensor_cores_ends_with_the_same_bits(operand_format: OperandFormat, tmp_path: Path) -> None:
    layers = (Dense(700, 600, "relu"), Dropout(0.2), Dense(600, 530, "gelu"), Dense(530, 10))
    case, precision = in_form(Case(layers, rows=1100, batch_size=512), operand_format), PRECISION_OF[operand_format]
    data, options = case.data(), {"batch_size": 512, "backend": "cuda", "precision": precision}
    unbroken, broken = (Trainer(Network(layers, seed=5), case.loss, MOMENTUM, **options) for _ in range(2))
    unbroken.fit(data, 2, progress=False)
    broken.fit(data, 1, progress=False)
    broken.save(tmp_path / "run.h5")
    resumed = Trainer.resume(tmp_path / "run.h5")
    resumed.fit(data, 2, progress=False)  # goes on up to the second epoch
    assert resumed.precision == precision
    np.testing.assert_array_equal(resumed.network.flat_parameters(), unbroken.network.flat_parameters())


# Batches that leave a card idle: narrow tiles in every product that may have them.
SMALL_BATCHES = {
    "of one tile": Case((Dense(784, 512, "relu"), Dense(512, 512, "gelu"), Dense(512, 10)), rows=150, batch_size=64),
    "of shards": Case(
        (Dense(70, 260, "relu"), Dropout(0.3), Dense(260, 270, "tanh"), Dense(270, 5)),
        rows=300, batch_size=130, streams=2, source="uint8",
    ),
    "a loss at the end": Case(
        (Dense(200, 256, "gelu"), Dense(256, 264)), "squared_error", "dense", rows=100, batch_size=33, weighted=True
    ),
}  # fmt: skip


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    least = {"NARROW_LEAST_ROWS": 1, "NARROW_LEAST_WIDTH": 1, "NARROW_LEAST_WEIGHTS": 1, "LAYERS_TENTHS": 0}
    least["COUNTED_TENTHS"] = 0
    for name, value in {"NARROW_TILES_ARE_USED": True, **least}.items():
        monkeypatch.setattr(thresholds, name, value)


@EACH_FORM
@pytest.mark.parametrize("case", SMALL_BATCHES)
@pytest.mark.usefixtures("narrow")
def test_small_batches_by_narrow_tiles(case: str, operand_format: OperandFormat) -> None:
    check_both(in_form(SMALL_BATCHES[case], operand_format))
    first, second = (on_card(in_form(SMALL_BATCHES[case], operand_format)) for _ in range(2))
    assert all((second[name] == first[name]).all() for name in first)


@pytest.mark.parametrize("case", SMALL_BATCHES)
@pytest.mark.usefixtures("narrow")
def test_small_batches_by_warps_that_share_k(case: str) -> None:
    check_both(dataclasses.replace(SMALL_BATCHES[case], precision="float32-ieee"))


def test_ieee_float32_stays_on_plain_cores() -> None:
    layers = (Dense(700, 600, "relu"), Dense(600, 10))
    case = Case(layers, rows=600, batch_size=512)
    plain, split = (on_card(dataclasses.replace(case, precision=name)) for name in ("float32-ieee", "float32"))
    assert (plain["change"] != split["change"]).any()
    assert np.linalg.norm(plain["change"] - split["change"]) <= 1e-4 * np.linalg.norm(plain["change"])


def test_the_bounds_tell_wrong_from_right(monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = Case(mlp(33, 65, 5)), training.hyper_parameters
    check(case)
    monkeypatch.setattr(training, "hyper_parameters", lambda optimizer: np.float32(0.99) * right(optimizer))
    with pytest.raises(AssertionError, match="change"):
        check(case)
