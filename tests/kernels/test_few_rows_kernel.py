"""The persistent kernel of few rows: what it computes on the host, how weights are cut, and which plans have it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import epochs
import pytest
from drawn import first_and_drawn
from epochs import Epoch
from host_persistent import check_against_cpu, check_machine_code
from hypothesis import given
from hypothesis import strategies as st
from shim_runner import plant, planted

from mlpgpu import Dense, Dropout, Huber, Network, Standardize
from mlpgpu.backends.cuda.persistent import few_rows
from mlpgpu.backends.cuda.persistent.few_rows import layout_of
from mlpgpu.backends.cuda.persistent.few_rows_tiles import FewRowsTiling
from mlpgpu.backends.cuda.persistent.kernel import FewRowsKernel, OwnedRowsKernel
from mlpgpu.backends.cuda.persistent.network import PersistentNetwork, read_network
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.layers import Layer
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import Plan

SHARED_BYTES = 227 << 10

CASES: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "one activation": (
        [Dense(12, 10, "tanh"), Dense(10, 9, "tanh"), Dense(9, 3)], {"loss": "softmax_cross_entropy"},
    ),
    "activations": (
        [Dense(9, 10, "gelu"), Dense(10, 11, "silu", bias=False), Dense(11, 5, "relu"), Dense(5, 3, "tanh")],
        {"optimizer": OPTIMIZERS["Adam"](0.05, l1=0.01, l2=0.1)},
    ),
    "dropped, standardized": (
        [Standardize(9), Dropout(0.2), Dense(9, 8, "elu"), Dropout(0.3), Dense(8, 3), Standardize(3)],
        {"optimizer": OPTIMIZERS["Nesterov"](0.1)},
    ),
    "dropped last": (
        [Dense(9, 8, "relu"), Dropout(0.3), Dense(8, 20), Dropout(0.2)],
        {"loss": Huber(0.5), "optimizer": OPTIMIZERS["RMSprop"](0.1)},
    ),
    "penalized": (
        [Dropout(0.2), Dense(9, 10, "tanh"), Dense(10, 8, "silu", bias=False), Dense(8, 3)],
        {"optimizer": OPTIMIZERS["AdamW"](0.1, alpha=3.0)},
    ),
    "frozen around": (
        [Dense(9, 10, "gelu", trainable=False), Dense(10, 11, "silu"), Dense(11, 3, trainable=False)],
        {"optimizer": OPTIMIZERS["Momentum"](0.1, l2=0.1)},
    ),
    "more outputs than threads": (
        [Dense(3, 600, "relu"), Dense(600, 3)],
        {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["Adam"](0.05)},
    ),
    "many outputs": ([Dense(40, 530)], {"loss": "softmax_cross_entropy", "optimizer": OPTIMIZERS["SGD"](0.1)}),
    "one layer": ([Dense(70, 3)], {"loss": "binary_cross_entropy"}),
}  # fmt: skip

# What is preferred among the ways to cut a layer.
CUTS = {
    "counted": few_rows.tile_clocks,
    "whole": lambda tiling, *_, **__: tiling.tiles,
    "rows": lambda tiling, *_, **__: -tiling.row_slices,
    "columns": lambda tiling, *_, **__: -tiling.column_slices,
    "both": lambda tiling, *_, **__: (-min(tiling.row_slices, tiling.column_slices), -tiling.tiles),
}


@pytest.fixture(autouse=True)
def counted_anew() -> Iterator[None]:
    """What a test prefers is counted neither before it nor after."""
    few_rows._counted.cache_clear()
    yield
    few_rows._counted.cache_clear()


def network_of(plan: Plan) -> PersistentNetwork:
    network = read_network(plan)
    assert isinstance(network, PersistentNetwork)
    return network


def check_epoch(
    case: str, cut: str, rows: int, blocks: int, monkeypatch: pytest.MonkeyPatch, *, source: str = "float32",
    slots: bool = True,
) -> None:  # fmt: skip
    """Two full batches and a smaller last one, in one launch and in two; slots in shared memory or not."""
    monkeypatch.setattr(epochs, "BATCH_SIZE", rows)
    monkeypatch.setattr(epochs, "LAST_BATCH", max(1, rows // 4))
    monkeypatch.setattr(few_rows, "tile_clocks", CUTS[cut])
    layers, options = CASES[case]
    epoch = Epoch(layers, options, as_bytes=source == "uint8")
    layout = layout_of(network_of(epoch.plan), blocks, SHARED_BYTES)
    assert not isinstance(layout, str)
    if not slots:
        layout = few_rows.FewRowsLayout(layout.network, layout.tilings, 4 * layout.floats)
        assert not any(layout.has_slots)
    check_against_cpu(epoch, FewRowsKernel(layout))


@pytest.mark.parametrize(
    ("case", "cut", "rows", "blocks"),
    first_and_drawn(
        [
            ("activations", "both", 8, 12),
            *((case, "both", 8, 12) for case in CASES),
            *((case, cut, rows, 7) for case in CASES for cut, rows in zip(CUTS, (1, 2, 3, 5, 8), strict=True)),
        ],
        1 / 3,
        "epochs of the persistent kernel of few rows",
    ),
)
def test_an_epoch_as_on_the_cpu(case: str, cut: str, rows: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_epoch(case, cut, rows, blocks, monkeypatch)


@pytest.mark.parametrize(
    ("case", "rows"), [("activations", 8), ("more outputs than threads", 2), ("penalized", 4), ("frozen around", 1)]
)
def test_slots_that_stay_in_the_cards_memory(case: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_epoch(case, "both", rows, 6, monkeypatch, slots=False)


@pytest.mark.parametrize("case", ["dropped, standardized", "one layer"])
def test_bytes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_epoch(case, "both", 4, 5, monkeypatch, source="uint8")


# --- which plans have it, and how they are cut ---


def chosen(*widths: int, arch: str = "sm_90a", multiprocessors: int = 132, **options: Any) -> Any:
    layers = [Dense(*pair, "relu") for pair in itertools.pairwise(widths)]
    defaults = {"capacity": 1, "loss": "squared_error", "optimizer": OPTIMIZERS["Momentum"](0.1)}
    plan = Network(layers, seed=1).lower(**{**defaults, **options})
    return choose_kernel(plan, multiprocessors=multiprocessors, shared_bytes=SHARED_BYTES, arch=arch)


def test_which_plans_train_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(chosen(784, 1024, 1024, 10), FewRowsKernel)
    assert isinstance(chosen(784, 1024, 1024, 10, capacity=8), FewRowsKernel)
    assert isinstance(chosen(784, 1024, 1024, 10, capacity=9), str)
    assert isinstance(chosen(784, 4096, 4096, 10), str)
    # A block owns the only row of either; of the second it would receive more than of the first.
    assert isinstance(chosen(20, 64, 64, 2), OwnedRowsKernel)
    assert isinstance(chosen(*(368, *6 * [384], 238)), FewRowsKernel)
    monkeypatch.setattr(thresholds, "FEW_ROWS_ARE_PERSISTENT", False)
    assert isinstance(chosen(784, 1024, 1024, 10), str)
    assert isinstance(chosen(*(368, *6 * [384], 238)), OwnedRowsKernel)


def test_why_there_are_no_tiles() -> None:
    plan = Network([Dense(4000, 4000)], seed=1).lower(
        capacity=8, loss="squared_error", optimizer=OPTIMIZERS["Momentum"](0.1)
    )
    found = layout_of(network_of(plan), 132, SHARED_BYTES)
    assert isinstance(found, str) and f"bytes, and it has {SHARED_BYTES:,}" in found
    more = layout_of(network_of(Network([Dense(4, 4)]).lower(
        capacity=9, loss="squared_error", optimizer=OPTIMIZERS["Momentum"](0.1)
    )), 132, SHARED_BYTES)  # fmt: skip
    assert more == "9 rows > 8"


def test_one_kernel_serves_all_widths() -> None:
    """So that a network of a shape never seen need not be compiled."""
    names = {chosen(784, width, width, 10).train("float32", textured=True).entry.name for width in (700, 1024, 1111)}
    assert len(names) == 1


@given(
    widths=st.lists(st.integers(1, 900), min_size=2, max_size=5), rows=st.integers(1, 8),
    blocks=st.integers(1, 148), rule=st.sampled_from(sorted(OPTIMIZERS)),
)  # fmt: skip
def test_tiles_cover_the_weights_and_fit(widths: list[int], rows: int, blocks: int, rule: str) -> None:
    layers: list[Layer] = [Dense(*pair, bias=pair[0] % 2 == 0) for pair in itertools.pairwise(widths)]
    plan = Network(layers, seed=1).lower(capacity=rows, loss="squared_error", optimizer=OPTIMIZERS[rule](0.1))
    layout = layout_of(network_of(plan), blocks, SHARED_BYTES)
    if isinstance(layout, str):
        return
    assert 1 <= layout.blocks <= blocks and 4 * layout.all_floats <= SHARED_BYTES
    ends, messages = layout.words["persistent layers"], 0
    for number, tiling in enumerate(layout.tilings):
        assert tiling.row_slices <= tiling.dense.weight_rows and tiling.column_slices <= tiling.dense.n_out
        assert tiling.rows * tiling.row_slices >= tiling.dense.weight_rows
        assert tiling.columns * tiling.column_slices >= tiling.dense.n_out and tiling.pitch >= tiling.columns
        described = ends[number * few_rows.FEW_ROWS_LAYER_WORDS :][: few_rows.FEW_ROWS_LAYER_WORDS]
        assert described[:3] == (tiling.dense.n_in, tiling.dense.weight_rows, tiling.dense.n_out)
        assert described[9] == messages
        messages += (
            2 * layout.rows * (tiling.row_slices * tiling.dense.n_out + tiling.column_slices * tiling.dense.n_in)
        )
    assert messages == layout.message_words


def test_a_tiles_memory() -> None:
    """Rows are filled up to fours, and an odd pitch keeps lanes of neighbouring rows off each other's banks."""
    network = network_of(
        Network([Dense(10, 7)], seed=1).lower(capacity=3, loss="squared_error", optimizer=OPTIMIZERS["Adam"](0.1))
    )
    tiling = FewRowsTiling(network.layers[0], row_slices=2, column_slices=1)
    assert (tiling.rows, tiling.columns, tiling.pitch, tiling.floats) == (6, 7, 9, 72)
    assert tiling.operand_floats(4, is_first=True) == (2 * 8 * 4, 8 * 4)


# --- machine code ---


@pytest.mark.parametrize(
    ("rule", "rows", "arch"),
    first_and_drawn(
        itertools.product(("Adam", "Momentum"), (8, 1, 4), ("sm_90a", "sm_75", "sm_80")), 1 / 3,
        "compiled persistent kernels of few rows",
    ),
)  # fmt: skip
def test_kernels_compile_to_what_their_entries_say(rule: str, rows: int, arch: str) -> None:
    """Warnings are errors; a block's registers fit, and nothing is spilled."""
    kernel = chosen(
        784, 900, 900, 10, capacity=rows, arch=arch, optimizer=OPTIMIZERS[rule](0.1), loss="softmax_cross_entropy"
    )
    assert isinstance(kernel, FewRowsKernel)
    check_machine_code(kernel.train("uint8", textured=True).entry, arch)


# --- planted faults ---

FAULTS = {  # the header, what is right there, and what is planted
    "weights moved before dX is made of them": (
        "persistent/few_rows.cuh", "                __syncthreads();  // an update moves these weights\n", "",
    ),
    "a group's sums left out of a product": (
        "persistent/few_rows.cuh",
        "for (int other = 1; other < groups; ++other)", "for (int other = 2; other < groups; ++other)",
    ),
    "messages that another thread received left out": (
        "persistent/few_rows.cuh",
        "for (int other = 1; other < others; ++other)", "for (int other = 2; other < others; ++other)",
    ),
    "a message left out of a thread's": ("arch/messages.cuh", "words + (first + i) * pitch", "words + first * pitch"),
    "rows beyond the batch in dW": (
        "persistent/few_rows.cuh", "i += WARP) dz[i * ROWS + r] = 0.0f;", "i += WARP) dz[i * ROWS + r] += 0.0f;",
    ),
    "inputs a step late": (
        "persistent/few_rows.cuh", "fetch(range.batch(done + 1));", "fetch(range.batch(done));",
    ),
    "rows of another step": (
        "persistent/few_rows.cuh", "fetch_order(range.batch(done + 2));", "fetch_order(range.batch(done + 1));",
    ),
    "biases whose input is not 1": (
        "persistent/few_rows.cuh", "t.input_rows * ROWS + thread] = 1.0f", "t.input_rows * ROWS + thread] = 0.0f",
    ),
    "dropout of the step before": (
        "persistent/few_rows.cuh", "batch.step, static_cast<int64_t>(r) * layer.n + g.column + i",
        "batch.step - 1, static_cast<int64_t>(r) * layer.n + g.column + i",
    ),
    "biases penalized as weights are": ("persistent/few_rows.cuh", "begin + i < biases", "begin + i <= biases"),
    "a frozen layer updated": (
        "persistent/few_rows_stages.cuh", "layer.is_trained ? FewRowsStage::UPDATE", "true ? FewRowsStage::UPDATE",
    ),
    "a slice too short": (
        "persistent/few_rows_stages.cuh", "layer.rows * (t.row_slice + 1) / layer.row_slices",
        "layer.rows * (t.row_slice + 1) / layer.row_slices - (t.row_slice == 0)",
    ),
    "a step's words taken for those of the step before": (
        "persistent/few_rows_stages.cuh",
        "layer.z + first, g.words_of_parity = layer.row_slices * ROWS * layer.n",
        "layer.z + first, g.words_of_parity = 0",
    ),
}  # fmt: skip


def test_faults_can_be_planted() -> None:
    """Of all, since those that are drawn change with the sources."""
    for fault in FAULTS.values():
        planted(*fault)


@pytest.mark.parametrize("fault", first_and_drawn(FAULTS, 1 / 2, "faults of the persistent kernel of few rows"))
def test_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(*FAULTS[fault], tmp_path, monkeypatch)
    cases = {
        "penalized": ("penalized", "both", 12), "frozen": ("frozen around", "both", 12),
        "dropout": ("dropped, standardized", "both", 12), "another thread": ("one layer", "rows", 40),
        "a group's": ("one layer", "whole", 1), "moved before": ("activations", "whole", 1),
        "a thread's": ("one layer", "rows", 12),
    }  # fmt: skip
    case, cut, blocks = next((case for word, case in cases.items() if word in fault), ("activations", "both", 12))
    with pytest.raises(AssertionError):
        check_epoch(case, cut, 8, blocks, monkeypatch)
