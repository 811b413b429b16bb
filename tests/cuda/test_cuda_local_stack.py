"""Stacks of locally connected layers in one kernel: which there are, and what they compute, on the host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import epochs
import numpy as np
import pytest
from drawn import first_and_drawn, share_of
from epochs import Epoch, assert_as_exact
from helpers import first_and_thorough
from host_program import HostProgram
from hypothesis import given
from hypothesis import strategies as st
from shim_runner import plant, planted
from test_cuda_lowering import make_plan

from mlpgpu import Adam, AdamW, Dense, Dropout, LocallyConnected, Momentum, RMSprop
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import OnChipWeights, StackShape, StreamedWeights, units
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.profile.costs import flops, moved_bytes
from mlpgpu.backends.cuda.runtime.compiler import compile_units
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.local_stack import choose_stack, runs_of_layers, streamed_weights
from mlpgpu.layers import Layer

Local = LocallyConnected


TIED = Local(700, 23, "tanh", "layer")

# Layers, rows of a batch and of the last one, options.  On two multiprocessors 400 columns are two blocks of two warps.
CASES: dict[str, tuple[list[Layer], tuple[int, int], dict[str, Any]]] = {
    "one row": (
        [Local(400, 5, "tanh", "layer"), Local(396, 5, "tanh"), Local(392, 1, "tanh", None), Dense(392, 3)],
        (1, 1), {"optimizer": Momentum(0.1)},
    ),
    "two rows, every alignment": (
        [Local(301, 29, "gelu", "layer"), Local(273, 17, "gelu"), Local(257, 65, "gelu", None), Dense(193, 3)],
        (2, 1), {"optimizer": Adam(0.01, alpha=1.0)},
    ),
    "four rows, and dx": (
        [Dense(9, 150, "tanh"), Local(150, 9, "silu", "layer"), Local(142, 9, "silu"), Dense(134, 3)],
        (4, 3), {"optimizer": AdamW(0.01, weight_decay=0.1)},
    ),
    "eight rows, two stacks": (
        [Local(300, 5, "relu"), Local(296, 5, "relu"), Dropout(0.2), Local(292, 3, "elu"), Local(290, 3, "elu"),
         Dense(288, 3)],
        (8, 3), {"optimizer": RMSprop(0.01)},
    ),
    "more rows than a pass": (
        [*[Local(500 - 9 * i, 10, "tanh") for i in range(3)], Dense(473, 3)], (11, 7), {},
    ),
    "on chip": ([*[TIED] * 4, Dense(612, 3)], (1, 1), {}),
    "on chip, three rows": ([*[TIED] * 4, Dense(612, 3)], (3, 2), {"optimizer": Momentum(0.1)}),
    "on chip, and dx": (
        [Dense(9, 500, "tanh"), *[Local(500, 33, "gelu", "output")] * 3, Dense(404, 3)], (2, 1),
        {"optimizer": Adam(0.01, alpha=1.0)},
    ),
    # Of three outputs the largest error would be a matter of luck.
    "on chip twice": ([*[TIED] * 2, Dropout(0.2), *[TIED] * 2, Dense(612, 30)], (1, 1), {}),
    "columns that nobody uses": (
        [Local(400, 5, "tanh"), Local(500, 5, "tanh"), Dense(392, 3)], (1, 1),
        {"optimizer": AdamW(0.01, weight_decay=0.1)},
    ),
    "on chip, columns that nobody uses": (
        [Dense(9, 400, "relu"), *[Local(500, 5, "tanh")] * 2, Dense(392, 3)], (1, 1),
        {"optimizer": AdamW(0.01, weight_decay=0.1)},
    ),
}  # fmt: skip


def check(case: str, monkeypatch: pytest.MonkeyPatch) -> HostProgram:
    """Two full batches and a last one; then predictions."""
    layers, (rows, last), options = CASES[case]
    monkeypatch.setattr(epochs, "BATCH_SIZE", rows)
    monkeypatch.setattr(epochs, "LAST_BATCH", last)
    epoch = Epoch(layers, options, rates=(0.02, 0.004, 0.01))
    host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a")
    host.load(epoch.state)
    losses = host.run(epoch.rates).copy()
    ours = (host.parameters, losses, host.evaluate()[:rows])
    (state, *cpu), (exact_state, *exact) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    for got, value, oracle in zip(ours, (state.parameters[0], *cpu), (exact_state.parameters[0], *exact), strict=True):
        assert_as_exact(got, value, oracle)
    return host


@pytest.mark.parametrize("case", [*list(CASES)[:3], *first_and_drawn(list(CASES)[3:], 1 / 2, "epochs of local stacks")])
def test_an_epoch_as_on_the_cpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = check(case, monkeypatch)
    names = [launch.entry.name for launch in host.low.launches()]
    assert any(name.startswith("local_stack_forward") for name in names)
    assert any("OnChip" in launch.entry.function for launch in host.low.launches()) == case.startswith("on chip")
    # If the backward pass is one kernel too, there are neither gradients nor partials.
    in_place = host.low.bytes["partials"] == 0
    assert in_place == any(re.match("local_stack_(tied_)?update", name) for name in names)
    assert in_place == (case not in ("more rows than a pass", "on chip twice") and "nobody uses" not in case)
    assert not any(name.startswith("local_forward") for name in names)
    back = [note.partition("; backward ")[2] for note in host.low.notes if note.startswith("training")]
    assert {"more rows than a pass": "8 of 11 rows at once", "on chip twice": "stored before the update"}.get(
        case, "no layer uses" if "nobody" in case else "in one kernel"
    ) in back[0]


@pytest.mark.parametrize("case", first_and_thorough(["two rows, every alignment", "more rows than a pass", "on chip"]))
def test_predictions_have_the_bits_of_one_launch_for_each_layer(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, (rows, _), _ = CASES[case]
    monkeypatch.setattr(epochs, "BATCH_SIZE", rows)
    epoch = Epoch(layers, {"optimizer": None})
    found = []
    for is_used in (True, False):
        monkeypatch.setattr(thresholds, "STACKS_ARE_USED", is_used)
        host = HostProgram(epoch.plan, epoch.data, epoch.sampling, arch="sm_90a")
        host.load(epoch.state)
        found.append(host.evaluate()[:rows])
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


# --- which stacks there are ---


def chosen(layers: list[Layer], *, multiprocessors: int = 132, arch: str = "sm_90a", **options: Any) -> Any:
    plan = make_plan(layers, **{"capacity": 1, **options})
    (run,) = runs_of_layers(plan.evaluation)
    return choose_stack(plan, run, shards=options.get("shards", 1), multiprocessors=multiprocessors, arch=arch)


PAIR: list[Layer] = [Local(100, 5, "tanh"), Local(96, 5, "tanh")]


@pytest.mark.parametrize(
    ("why", "layers", "options"),
    [
        ("at least two layers", [Local(9, 3)], {}),
        ("this card is sm_80", PAIR, {"arch": "sm_80"}),
        ("split over streams", PAIR, {"shards": 2}),
        ("a batch of 33 rows is larger than 32", PAIR, {"capacity": 33}),
        ("a window of 66 is larger than 65", [Local(100, 5), Local(96, 66)], {}),
        ("20,000 columns are more than 13,824", [Local(20000, 2), Local(19999, 2)], {"multiprocessors": 4}),
    ],
)
def test_layers_that_are_launches(why: str, layers: list[Layer], options: dict[str, Any]) -> None:
    found = chosen(layers, **options)
    assert isinstance(found, str) and why in found


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "STACKS_ARE_USED", False)
    assert "switched off" in chosen(PAIR)


def test_a_stack_ends_where_something_comes_between_or_the_activation_changes() -> None:
    layers = [*PAIR, Local(92, 5, "relu"), Local(88, 5, "relu"), Dropout(0.5), Local(84, 5, "relu"), Dense(80, 3)]
    plan = make_plan(layers)
    assert [len(run) for run in runs_of_layers(plan.training)] == [2, 2, 1]
    assert [len(run) for run in runs_of_layers(plan.evaluation)] == [2, 3]  # without the dropout
    notes = lower(plan, multiprocessors=132, source="float32", arch="sm_90a").notes
    assert len(notes) == 4 and "training, y0 to y1: 2 layers in one kernel" in notes[0]
    assert (
        "2 launches, since the kernel for stacks needs the copy engine of sm_90a"
        in lower(plan, multiprocessors=132, source="float32", arch="sm_80").notes[0]
    )


def test_the_network_of_the_report() -> None:
    """N = 300,000, R = 29: a block has 2,304 columns; of one matrix 20 rows are in registers and 9 in shared memory."""
    reused = chosen([Local(300_000, 29, "sigmoid", "layer")] * 5)
    assert reused.weights == OnChipWeights(StackShape(12, 1, 6), 29) and reused.blocks == 131 and not reused.no_update
    distinct = chosen([Local(300_000 - 28 * i, 29, "sigmoid", "layer") for i in range(5)])
    assert distinct.weights == StreamedWeights(StackShape(18, 1), 1) and distinct.weights.stages == 23
    assert not distinct.no_update and distinct.message_words == 5 * 131 * 28
    updates = [stack.update(optimizer) for stack in (distinct, reused) for optimizer in ("SGD", "Adam")]
    for entry in (reused.forward, distinct.forward, *updates):
        assert entry.cooperative and entry.shared_bytes <= kernels.STACK_SHARED_BYTES


@given(st.integers(2, 400_000), st.integers(1, 66), st.integers(1, 40), st.integers(1, 148), st.booleans())
def test_stacks_fit(n: int, window: int, capacity: int, multiprocessors: int, tied: bool) -> None:
    window = min(window, (n + 1) // 2)
    first = Local(n, window, "tanh")
    layers: list[Layer] = [first, first if tied else Local(n - window + 1, window, "tanh")]
    made = chosen(layers, multiprocessors=multiprocessors, capacity=capacity, optimizer=Adam(0.1))
    if isinstance(made, str):
        return
    shape = made.weights.shape
    assert (made.blocks - 1) * shape.span < n <= made.blocks * shape.span and made.blocks <= multiprocessors
    updates = not made.no_update
    assert updates == (isinstance(made.weights, OnChipWeights) or (not tied and capacity <= shape.rows))
    entries = [made.forward, *([made.update("Adam")] if updates else [])]
    assert all(entry.shared_bytes <= kernels.STACK_SHARED_BYTES and entry.threads <= 1024 for entry in entries)
    if isinstance(made.weights, StreamedWeights):
        assert made.weights.stages >= 2 and (not updates or kernels.stack_update_stages("Adam", shape) >= 2)
    assert made.halo == window - 1 <= kernels.STACK_MOST_HALO


def test_what_a_stack_must_do_at_least() -> None:
    """Distinct weights are read once forward, and read and written once in the backward pass, with their slots."""
    low = lower(
        make_plan(PAIR, capacity=1, optimizer=Momentum(0.1)), multiprocessors=132, source="float32", arch="sm_90a"
    )
    launches = {launch.entry.function.partition("<")[0]: launch for launch in low.shards[0]}
    weights, outputs = 5 * (96 + 92), 96 + 92
    forward, update = launches["local_stack_forward"], launches["local_stack_update"]
    # dx is made of the second layer alone: nobody asks for the first one's
    assert flops(forward, 1) == 2 * weights and flops(update, 1) == 2 * weights + 2 * 5 * 92
    assert moved_bytes(forward, 1) == 4 * (100 + weights + outputs + 92) + 2 * 40 + 4
    assert moved_bytes(update, 1) == 4 * (100 + 4 * weights + outputs + 2 * 92) + 2 * 40 + 2 * 8 + 4


# --- machine code ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    share_of([StackShape(warps, rows) for rows, warps in thresholds.STACK_MOST_WARPS.items()], 1 / 2, "stacks"),
    ids=str,
)
def test_kernels_compile_without_many_spills(shape: StackShape) -> None:
    entries = [kernels.local_stack_forward("gelu", streamed_weights(shape))]
    rules = ("SGD", "AdamW", "AdamWWithAlpha")
    entries += [kernels.local_stack_update("gelu", rule, shape) for rule in rules]
    if shape.rows == 1:
        widest = StackShape(OnChipWeights.MOST_WARPS, 1, OnChipWeights.COLUMNS)
        for weights in (OnChipWeights(widest, window) for window in (4, 29)):
            entries.append(kernels.local_stack_forward("gelu", weights))
            entries += [kernels.local_stack_tied_update("gelu", rule, weights) for rule in rules]
    cubins = compile_units(units(entries), "sm_90a")
    for entry in entries:
        kernel = cubins[entry.unit].resources[entry.name]
        assert max(kernel.spill_bytes, kernel.stack_bytes) <= entry.spill_bytes
        assert kernel.registers * entry.threads <= 65536 and kernel.shared_bytes == 0


# --- planted faults ---

FORWARD, UPDATE, TIED_UPDATE = "local/stack.cuh", "local/stack_update.cuh", "local/stack_tied_update.cuh"
ROW, ALIGNMENTS = "one row", "two rows, every alignment"
FAULTS = {  # the header, what is right there, what is planted, and the case that finds it
    "a halo one column short": (FORWARD, "position.next_window - 1,", "position.next_window - 2,", ROW),
    "a layer begun before its inputs are whole": (FORWARD, "phases.wait(warp + 1, phase);", "", ROW),
    "another stage read": (FORWARD, "ring.stage * T::STAGE", "(ring.stage ^ 1) * T::STAGE", ALIGNMENTS),
    "outputs put over inputs": (FORWARD, "inputs_of(phase + 1) + q", "inputs_of(phase) + q", ROW),
    "partial sums added up too early": (UPDATE, "phases.wait(warp - 1, phase - 1);\n            load", "load", ROW),
    "a weight row taken for aligned": (FORWARD, "slide(near, shift);", "", ALIGNMENTS),
    "a weight row off in shared memory": (FORWARD, "(r + j - IN_REGISTERS)", "(r + j + 1 - IN_REGISTERS)", "on chip"),
    "rows of the pass before": (FORWARD, "rows.first + first,", "rows.first,", "more rows than a pass"),
    "the part of the warp before left out": (UPDATE, "blockIdx.x + warp > 0 ?", "blockIdx.x + warp > 1 ?", ROW),
    "sums that stay where they are": (UPDATE, "lane + 1 < WARP ? next : 0.0f", "next", ROW),
    "a derivative taken twice": (
        UPDATE, "is_top && given.is_derived;", "is_top && given.is_derived < 0;", "four rows, and dx",
    ),
    "a mirror one column off": (FORWARD, "Shape::SPAN - 1 - v", "Shape::SPAN - 2 - v", "on chip"),
    "a halo that the gradient does not see": (TIED_UPDATE, "[i] = value;", "[i] = 0 * value;", "on chip"),
    "a term left out of the sums": (TIED_UPDATE, "i < given.count * rows.count", "i + 1 < given.count", "on chip"),
    "the other stage added": (TIED_UPDATE, "ring + i % STAGES", "ring + (i + 1) % STAGES", "on chip"),
    "rows that share their dz": (TIED_UPDATE, "deltas + ((static_cast<int64_t>(q)", "deltas + ((0 * q",
                                    "on chip, three rows"),
    "a stack's dx left out": (TIED_UPDATE, "given.dx ? 0 : 1", "1", "on chip, and dx"),
    "a shared bias's step left out": (TIED_UPDATE, "if (lane == 0) step<", "if (lane < 0) step<", "on chip"),
    "a bias's step left out": (UPDATE, "layer.bias < 0 || layer.bias_step) continue", "true) continue", ROW),
}  # fmt: skip


def test_faults_can_be_planted() -> None:
    """Of all, since those that are drawn change with the sources."""
    for file, right, wrong, _ in FAULTS.values():
        planted(file, right, wrong)


@pytest.mark.parametrize("fault", first_and_drawn(FAULTS, 1 / 2, "faults of local stacks"))
def test_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, right, wrong, case = FAULTS[fault]
    plant(file, right, wrong, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check(case, monkeypatch)
