"""The kernel that holds a whole network: which plans have one, and what it computes, on the host."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drawn import first_and_drawn
from epochs import Epoch
from helpers import first_and_thorough
from host_persistent import HostKernel, check_against_cpu, check_machine_code
from hypothesis import given
from hypothesis import strategies as st
from shim_runner import plant, planted

from mlpgpu import Dense, Dropout, Huber, LocallyConnected, Network, Standardize
from mlpgpu.backends.cuda.persistent.kernel import OwnedRowsKernel, PersistentKernel
from mlpgpu.backends.cuda.persistent.tiles import COMPUTE_THREADS, MOST_MMA_COLUMNS
from mlpgpu.backends.cuda.run.persistent import MOST_SEQUENCE, BoundPersistentSteps, PersistentSteps
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.layers import Layer
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import Plan

SHARED_BYTES = 227 << 10


def make_plan(layers: list[Layer], **options: Any) -> Plan:
    defaults = {"capacity": 32, "loss": "squared_error", "optimizer": OPTIMIZERS["Momentum"](0.1)}
    return Network(layers, seed=1).lower(**{**defaults, **options})


def test_launches_are_bound_once_and_steps_numbered_on() -> None:
    """Also behind the last number there is, when messages of old steps are cleared; a second set goes on counting."""
    done: list[tuple[Any, ...]] = []
    arrays = SimpleNamespace(addresses={"messages": 64}, sizes={"messages": 8})
    stream = SimpleNamespace(fill=lambda address, nbytes: done.append(("fill", address, nbytes)))
    workspace: Any = SimpleNamespace(stream=stream, arrays=arrays)
    kernel: Any = SimpleNamespace(
        train=lambda source, textured: ("train", source, textured), add_errors=lambda steps: ("errors", steps)
    )

    def bound(*launch: object) -> Any:
        done.append(("bound", *launch))
        return lambda on: done.append(launch)

    binder: Any = SimpleNamespace(
        data=SimpleNamespace(kind=("uint8", True)), bind=lambda launch: bound(*launch),
        prepare=lambda launch, **first: lambda **changed: done.append((*launch, *changed.items())),
    )  # fmt: skip
    steps = PersistentSteps(workspace, kernel)
    of_set = BoundPersistentSteps(steps, binder)
    for count in (5, 3, 5):
        of_set.put(count)
    launch = "train", "uint8", True
    assert done == [
        (*launch, ("steps", 5), ("sequence", 1)), ("bound", "errors", 5), ("errors", 5),
        (*launch, ("steps", 3), ("sequence", 6)), ("bound", "errors", 3), ("errors", 3),
        (*launch, ("steps", 5), ("sequence", 9)), ("errors", 5),
    ]  # fmt: skip
    done.clear()
    steps.sequence = MOST_SEQUENCE - 4
    BoundPersistentSteps(steps, binder).put(5)
    assert done[:2] == [("fill", 64, 8), (*launch, ("steps", 5), ("sequence", 1))] and steps.sequence == 6


# --- on the host ---

WIDE = {"MOST_REPLICATED": 0}  # every layer in tiles
CASES: dict[str, tuple[list[Layer], dict[str, Any], dict[str, int]]] = {
    "copied": (
        [Dense(12, 10, "tanh"), Dense(10, 9, "relu"), Dense(9, 3)],
        {"loss": "softmax_cross_entropy"}, {},
    ),
    "tiled": (
        [Dense(9, 10, "gelu"), Dense(10, 11, "silu", bias=False), Dense(11, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.05, l1=0.01, l2=0.1)}, WIDE,
    ),
    "dropped, standardized": (
        [Standardize(9), Dropout(0.2), Dense(9, 8, "elu"), Dropout(0.3), Dense(8, 3), Standardize(3)],
        {"optimizer": OPTIMIZERS["Nesterov"](0.1)}, {},
    ),
    "dropped, in fours, tiled": (
        [Dropout(0.2), Dense(8, 8, "sigmoid"), Dropout(0.3), Dense(8, 7, "tanh"), Dense(7, 3)],
        {"loss": Huber(0.5), "optimizer": OPTIMIZERS["AdamW"](0.1)}, WIDE,
    ),
    "penalized, copied": (
        [Dense(12, 10, "tanh"), Dense(10, 9, "relu", bias=False), Dense(9, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.05, l2=0.1, alpha=3.0)}, {},
    ),
    "penalized, tiled": (
        [Dropout(0.2), Dense(9, 10, "tanh"), Dense(10, 8, "silu", bias=False), Dense(8, 3)],
        {"optimizer": OPTIMIZERS["Nesterov"](0.1, alpha=3.0)}, WIDE,
    ),
    "frozen below, copied": (
        [Dense(12, 10, "tanh", trainable=False), Dropout(0.2), Dense(10, 9, "relu"), Dense(9, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.05, l1=0.01, l2=0.1)}, {},
    ),
    "frozen above, copied": (
        [Standardize(12), Dense(12, 10, "tanh"), Dense(10, 9, "gelu"), Dense(9, 3, trainable=False)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Momentum"](0.1, alpha=3.0)}, {},
    ),
    "frozen between, tiled": (
        [Dense(9, 10, "gelu"), Dense(10, 11, "silu", bias=False, trainable=False), Dense(11, 3)],
        {"optimizer": OPTIMIZERS["AdamW"](0.05, l2=0.1)}, WIDE,
    ),
    "frozen around, tiled": (
        [Dense(9, 10, "gelu", trainable=False), Dense(10, 11, "silu"), Dense(11, 3, trainable=False)],
        {"optimizer": OPTIMIZERS["Nesterov"](0.1, l2=0.1)}, WIDE,
    ),
    "one layer": ([Dense(40, 3)], {"loss": "binary_cross_entropy", "optimizer": OPTIMIZERS["SGD"](0.1)}, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "source", "arch", "blocks"),
    [
        *((case, "float32", "sm_90a", 5) for case in CASES),
        *first_and_drawn(
            [
                *((case, "uint8", "sm_75", 5) for case in ("copied", "dropped, in fours, tiled", "one layer")),
                *((case, "uint8", "sm_80", 12) for case in ("copied", "dropped, standardized")),
                *((case, "float32", "sm_90a", 12) for case in CASES),
            ],
            1 / 2,
            "epochs of the persistent kernel",
        ),
    ],
)
def test_an_epoch_as_on_the_cpu(
    case: str, source: str, arch: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_epoch(case, source, arch, blocks, monkeypatch)


def check_epoch(case: str, source: str, arch: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two full batches and a last one of two rows, in one launch and in two, of up to eight rows on so many blocks."""
    layers, options, limits = CASES[case]
    for name, value in limits.items():
        monkeypatch.setattr(thresholds, name, value)
    epoch = Epoch(layers, options, as_bytes=source == "uint8")
    kernel = choose_kernel(epoch.plan, multiprocessors=blocks, shared_bytes=SHARED_BYTES, arch=arch)
    assert isinstance(kernel, PersistentKernel)
    check_against_cpu(epoch, kernel)


@pytest.mark.parametrize(("precision", "error"), [("tf32", 2.0**-10), ("bfloat16", 2.0**-9)])
@pytest.mark.parametrize("blocks", first_and_thorough([5, 12]))
def test_an_epoch_of_short_operands(precision: str, error: float, blocks: int) -> None:
    """The errors of all products' operands add up to the change's, at random."""
    layers, options, _ = CASES["copied"]
    epoch = Epoch(layers, options, precision=precision)
    kernel = choose_kernel(epoch.plan, multiprocessors=blocks, shared_bytes=SHARED_BYTES, arch="sm_90a")
    assert isinstance(kernel, PersistentKernel)
    host = HostKernel(epoch.plan, kernel, epoch.data, epoch.sampling, epoch.state)
    losses = host.run(0, epoch.rates)
    exact, exact_losses, _ = epoch.on_cpu("float64")
    before = epoch.state.parameters[0]
    operands = 2 * 3 * len(layers) * len(epoch.rates)
    for got, value in ((host.values["parameters"] - before, exact.parameters[0] - before), (losses, exact_losses)):
        assert np.linalg.norm(got - value) <= np.sqrt(operands) * error * np.linalg.norm(value)


# --- which plans have one ---


def chosen(layers: list[Layer], *, multiprocessors: int = 132, arch: str = "sm_90a", **options: Any) -> Any:
    plan = make_plan(layers, **options)
    return choose_kernel(plan, multiprocessors=multiprocessors, shared_bytes=SHARED_BYTES, arch=arch)


TIED = Dense(8, 8)


@pytest.mark.parametrize(
    ("why", "layers", "options"),
    [
        ("no training step", [Dense(4, 3)], {"optimizer": None}),
        ("atomic", [Dense(4, 3)], {"reduction": "atomic"}),
        ("split over streams", [Dense(4, 3)], {"shards": 2}),
        ("norm is clipped", [Dense(4, 3)], {"optimizer": OPTIMIZERS["SGD"](0.1, clip_norm=1.0)}),
        ("share their weights", [Dense(4, 8), TIED, TIED, Dense(8, 3)], {}),
        ("has no LocallyConnected", [LocallyConnected(9, 3), Dense(7, 3)], {}),
        ("a dropout follows another", [Dense(4, 3), Dropout(0.1), Dropout(0.1), Dense(3, 3)], {}),
        ("2113 units is too wide", [Dense(4, 2113), Dense(2113, 3)], {}),
        ("a batch of 1025 rows is larger", [Dense(4, 3)], {"capacity": 1025}),
        ("a tile of its weights, with 1000 rows", [Dense(4000, 300), Dense(300, 3)], {"capacity": 1000}),
        ("bytes of shared memory", [Dense(784, 128), Dense(128, 10)], {"capacity": 300}),
    ],
)
def test_plans_that_train_launch_by_launch(why: str, layers: list[Layer], options: dict[str, Any]) -> None:
    found = chosen(layers, **options)
    assert isinstance(found, str) and why in found


def test_the_network_of_the_table_in_full() -> None:
    kernel = chosen([Dense(784, 128, "relu"), Dense(128, 10)], capacity=128, loss="softmax_cross_entropy")
    assert isinstance(kernel, PersistentKernel)
    first, last = kernel.layout.layers
    # Eight slices of the inputs by sixteen of the units: a block multiplies 128 rows by 100 weight rows of 8 columns.
    tiling = first.tiling
    assert (tiling.row_slices, tiling.column_slices, tiling.quads, tiling.columns) == (8, 16, 25, 8)
    assert (first.is_replicated, last.is_replicated) == (False, True)
    assert kernel.layout.blocks == 132 and last.first_block == 128
    entry = kernel.train("float32", textured=True).entry
    assert entry.cooperative and entry.shared_bytes == kernel.layout.shared_bytes <= SHARED_BYTES


@st.composite
def stacks(draw: st.DrawFn) -> tuple[list[Layer], dict[str, Any]]:
    widths = draw(st.lists(st.integers(1, 1000), min_size=2, max_size=6))
    layers: list[Layer] = [Dense(a, b, bias=draw(st.booleans())) for a, b in itertools.pairwise(widths)]
    return layers, {"capacity": draw(st.integers(1, 300)), "multiprocessors": draw(st.integers(1, 148))}


@given(stacks())
def test_tiles_cover_the_weights_and_fit(stack: tuple[list[Layer], dict[str, Any]]) -> None:
    layers, options = stack
    kernel = chosen(layers, **options)
    if not isinstance(kernel, OwnedRowsKernel):  # of others test_few_rows_kernel.py tests it
        return
    layout = kernel.layout
    assert layout.shared_bytes <= SHARED_BYTES and 1 <= layout.blocks <= options["multiprocessors"]
    for layer in layout.layers:
        tiling = layer.tiling
        assert tiling.tiles <= layout.blocks and layer.first_block < layout.blocks
        assert (
            tiling.quads * 4 * tiling.row_slices >= tiling.weight_rows
            and tiling.columns * tiling.column_slices >= tiling.n_out
        )
        assert tiling.columns <= MOST_MMA_COLUMNS and tiling.quads <= COMPUTE_THREADS // 2
        # No tile is empty: its block would wait for messages that nobody sends.
        assert tiling.row_slices <= -(-tiling.weight_rows // 4) and tiling.column_slices <= -(-tiling.n_out // 4)
    assert not layout.layers[0].is_replicated


def test_copies_that_stay_as_they_are_have_no_tiles() -> None:
    """No block waits for messages of a frozen layer that every block has, or holds nothing else."""
    hidden, last = Dense(784, 128, "relu"), Dense(128, 10, trainable=False)
    options: dict[str, Any] = {"capacity": 32, "loss": "softmax_cross_entropy"}
    frozen, trained = chosen([hidden, last], **options), chosen([hidden, Dense(128, 10)], **options)
    assert isinstance(frozen, PersistentKernel) and isinstance(trained, PersistentKernel)
    assert frozen.layout.layers[1].is_replicated
    assert frozen.layout.blocks == max(32, frozen.layout.layers[0].tiling.tiles)
    assert trained.layout.blocks > trained.layout.layers[0].tiling.tiles
    names = [kernel.train("float32", textured=True).entry.function for kernel in (frozen, trained)]
    assert names[0].count(", true>") == 1 + names[1].count(", true>")


@pytest.mark.parametrize("multiprocessors", [108, 132])
def test_the_choice_follows_plan_and_card_alone(multiprocessors: int) -> None:
    layers: list[Layer] = [Dense(300, 257, "tanh"), Dropout(0.5), Dense(257, 33, "gelu"), Dense(33, 7)]
    first, second = (chosen(layers, multiprocessors=multiprocessors, capacity=100) for _ in range(2))
    assert first == second and isinstance(first, PersistentKernel)
    assert first.train("float32", textured=False) == second.train("float32", textured=False)


# --- machine code ---

COMPILED: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "tiny": ([Dense(784, 128, "relu"), Dense(128, 10)], {"capacity": 128, "loss": "softmax_cross_entropy"}),
    "three tiled, dropped": (
        [Standardize(31), Dense(31, 257, "gelu"), Dropout(0.5), Dense(257, 127, "elu"), Dense(127, 5)],
        {"capacity": 33, "optimizer": OPTIMIZERS["AdamW"](0.1)},
    ),
    "frozen below": (
        [Dense(784, 128, "relu", trainable=False), Dense(128, 64, "relu"), Dense(64, 10)],
        {"capacity": 128, "loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.001)},
    ),
    "of an estimator": (
        [Dense(30, 100, "relu"), Dense(100, 1)],
        {"capacity": 200, "loss": "binary_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.001, alpha=1e-4)},
    ),
}


@pytest.mark.parametrize(
    ("case", "arch"),
    first_and_drawn(itertools.product(COMPILED, ["sm_90a", "sm_75", "sm_80"]), 1 / 2, "compiled persistent kernels"),
)
def test_kernels_compile_to_what_their_entries_say(case: str, arch: str) -> None:
    """Warnings are errors; a block's registers fit, and what a thread spills is no more than a few words."""
    layers, options = COMPILED[case]
    kernel = chosen(layers, arch=arch, **options)
    assert isinstance(kernel, PersistentKernel)
    for source in ("float32", "uint8") if case == "tiny" else ("uint8",):
        check_machine_code(kernel.train(source, textured=True).entry, arch)


# --- planted faults ---

FAULTS = {  # the header, what is right there, and what is planted
    "barrier removed before Z is added up": (
        "persistent/forward.cuh",
        "    if constexpr (P::Z_PARTIALS > 1) {\n        sync_compute_threads();\n",
        "    if constexpr (P::Z_PARTIALS > 1) {\n",
    ),
    "a part of the weight rows left out of Z": (
        "persistent/forward.cuh",
        "for (int partial = 0; partial < P::Z_PARTIALS; ++partial)",
        "for (int partial = 1; partial < P::Z_PARTIALS; ++partial)",
    ),
    "products of low terms left out": (
        "persistent/products.cuh",
        "        multiply_tf32(mixed[1], a_high, b[0].low, b[1].low);\n",
        "",
    ),
    "rows beyond the batch in dW": ("persistent/persistent.cuh", "            clear_dz<LAST>(k);\n", ""),
    "producers a step late": (
        "persistent/persistent.cuh",
        "fetch_batch(k, range.batch(done + 1));",
        "fetch_batch(k, range.batch(done));",
    ),
    "weights updated before dX is made of them": (
        "persistent/backward.cuh",
        "if constexpr (IS_TILED) send_dx<L>(k);",
        "if constexpr (IS_TILED) k.shared[LayerMemory<K, L>::WEIGHTS] *= 1.1f, __syncthreads(), send_dx<L>(k);",
    ),
    "a slice too short": (
        "persistent/shape.cuh",
        "T::ROW_QUADS * (k + 1) / T::ROW_SLICES * 4",
        "T::ROW_QUADS * (k + 1) / T::ROW_SLICES * 4 - 1",
    ),
    "biases whose input is not 1": ("persistent/inputs.cuh", "four[j] = 1.0f;", "four[j] = 0.0f;"),
    "rows of a full batch in the last one": ("persistent/persistent.cuh", "k.rows = rows;", "k.rows = K::ROWS;"),
    "biases penalized as weights are": (
        "persistent/update.cuh",
        "t.first_weight_row + weight_row < T::N_IN",
        "t.first_weight_row + weight_row <= T::N_IN",
    ),
    "the last weights not penalized": (
        "persistent/update.cuh",
        "t.first_weight_row + weight_row < T::N_IN",
        "t.first_weight_row + weight_row < T::N_IN - 1",
    ),
    "a frozen layer updated": ("persistent/update.cuh", "if constexpr (!LayerOf<K, L>::IS_FROZEN) {", "{"),
    "dropout of the step before": (
        "persistent/persistent.cuh",
        "k.key.step = range.step.number + done;",
        "k.key.step = range.step.number;",
    ),
}


def test_faults_can_be_planted() -> None:
    """Of all, since those that are drawn change with the sources."""
    for fault in FAULTS.values():
        planted(*fault)


@pytest.mark.parametrize("fault", first_and_drawn(FAULTS, 1 / 2, "faults of the persistent kernel"))
def test_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(*FAULTS[fault], tmp_path, monkeypatch)
    cases = {"penalized": "penalized, tiled", "frozen": "frozen between, tiled"}
    case = next((case for word, case in cases.items() if word in fault), "dropped, in fours, tiled")
    with pytest.raises(AssertionError):
        check_epoch(case, "float32", "sm_90a", 5, monkeypatch)
