"""Steps by phases: their bits follow from the number of parts alone, whoever computes them; else they are NumPy's but
for rounding."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import answer_of_child
from helpers import numpy_alone
from sanitized import SANITIZERS, run_sanitized
from test_loops import FLOAT32, needs_loops, of_each_type

import mlpgpu as mg
from mlpgpu.backends import Sampling, get_backend
from mlpgpu.backends.cpu import chain, inference, phased_steps, threads
from mlpgpu.backends.cpu.blas import BLAS
from mlpgpu.backends.cpu.loops import library
from mlpgpu.backends.cpu.loops.library import OPTIONS, unit
from mlpgpu.backends.cpu.phases import equal_parts, row_parts
from mlpgpu.backends.cpu.program import CpuProgram
from mlpgpu.backends.cpu.threads import is_phased, thread_count
from mlpgpu.backends.sources import native_folder, source_folder
from mlpgpu.datasets import Dataset

pytestmark = [
    needs_loops,
    pytest.mark.skipif(BLAS.products(FLOAT32) is None, reason="products of another BLAS than OpenBLAS"),
]

ROWS, N_IN = 203, 13
SMALL = (N_IN, 40, 21, 3)
ONE = (N_IN, 300, 1)
WIDE = (N_IN, 300, 260, 3)  # whose second layer is shared by rows of its weight where rows of the batch are few


def network(widths: tuple[int, ...] = SMALL, *, first: tuple[Any, ...] = ()) -> mg.Network:
    *hidden, last = pairwise(widths)
    layers: list[Any] = [mg.Dense(*each, "gelu" if place else "relu") for place, each in enumerate(hidden)]
    return mg.Network(
        [*first, *layers[:1], *([mg.Dropout(0.2)] if hidden else []), *layers[1:], mg.Dense(*last)], seed=3
    )


def inputs() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 200, (ROWS, N_IN))


def data(x: np.ndarray | None = None, *, weighted: bool = False, dense: bool = False, **options: Any) -> Dataset:
    draw = np.random.default_rng(6)
    y = draw.dirichlet(np.ones(3), ROWS) if dense else draw.integers(0, 3, ROWS)
    weight = draw.uniform(0.0, 2.0, ROWS) if weighted else None
    return Dataset(inputs().astype(np.float32) / 200 if x is None else x, y, weight, **options)


def program(
    net: mg.Network, dataset: Dataset, batch_size: int, parts: int, helpers: int | None = None, **options: Any
) -> CpuProgram:
    """A program whose phases have so many parts, with so many helpers."""
    optimizer = options.pop("optimizer", mg.Adam(0.01))
    kind = "dense" if dataset.y is not None and dataset.y.ndim == 2 else "index"
    options = {"loss": "softmax_cross_entropy", "target_kind": kind, **options}
    plan = net.lower(capacity=batch_size, optimizer=optimizer, **options)
    made = get_backend("cpu").compile(plan, threads=parts)
    assert isinstance(made, CpuProgram) and (made._phased is not None) == is_phased(plan)
    if helpers is not None and made._phased is not None:
        made._phased._helpers = helpers
    net.adapt(dataset)
    made.load(net.state(optimizer))
    made.attach(dataset, Sampling(len(dataset), batch_size, seed=7))
    return made


def wide_program(net: mg.Network, dataset: Dataset, batch_size: int, **options: Any) -> CpuProgram:
    """The same by NumPy, in float64."""
    with numpy_alone():
        made = program(net, dataset, batch_size, 1, precision="float64", **options)
    assert made._phased is None
    return made


def after(made: CpuProgram, steps: int = 24, at_once: int | None = None) -> np.ndarray:
    """The losses of so many steps, taken in runs of ``at_once``, and the parameters and slots that they leave."""
    runs = range(0, steps, at_once or steps)
    sums = [made.run(first, np.full(min(at_once or steps, steps - first), 0.01)) for first in runs]
    state = made.read()
    return np.concatenate([*(each.ravel() for each in sums), state.parameters.ravel(), state.slots.ravel()])


@pytest.mark.parametrize("batch_size", [1, 5, 16, 64, 203])
@pytest.mark.parametrize("widths", [SMALL, WIDE], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@of_each_type
def test_bits_follow_from_the_parts_alone(
    dtype: np.dtype, parts: int, widths: tuple[int, ...], batch_size: int
) -> None:
    dataset, options = data(weighted=True), {"precision": str(dtype)}
    expected = after(program(network(widths), dataset, batch_size, parts, helpers=0, **options))
    assert np.isfinite(expected).all()
    for helpers in {0, 1, parts - 1} - {parts}:
        if helpers < parts:
            for at_once in (None, 1, 5):
                made = program(network(widths), dataset, batch_size, parts, helpers, **options)
                found = after(made, at_once=at_once)
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e6])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_norm_is_clipped_as_by_numpy(parts: int, limit: float) -> None:
    optimizer = mg.Momentum(0.1, clip_norm=limit, l2=0.01)
    found = after(program(network(), data(weighted=True), 50, parts, optimizer=optimizer), 12)
    wide = wide_program(network(), data(weighted=True), 50, optimizer=optimizer)
    np.testing.assert_allclose(found, after(wide, 12), rtol=2e-3, atol=2e-5)
    for helpers in range(parts):
        again = program(network(), data(weighted=True), 50, parts, helpers, optimizer=optimizer)
        np.testing.assert_array_equal(after(again, 12), found)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 50, 203])
@pytest.mark.parametrize("widths", [SMALL, WIDE], ids=str)
def test_a_step_is_numpys_but_for_rounding(
    widths: tuple[int, ...], batch_size: int, weighted: bool, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, optimizer = data(weighted=weighted, dense=dense), mg.Momentum(0.01, l1=0.001, l2=0.01, alpha=0.1)
    found = after(program(network(widths), dataset, batch_size, 2, optimizer=optimizer), 12)
    wide = after(wide_program(network(widths), dataset, batch_size, optimizer=optimizer), 12)
    np.testing.assert_allclose(found, wide, rtol=2e-3, atol=2e-5)
    by_loops = after(program(network(widths), dataset, batch_size, 2, optimizer=optimizer, precision="float64"), 12)
    np.testing.assert_allclose(by_loops, wide, rtol=1e-10, atol=1e-12)


SOURCES = {
    "float64": lambda x: x.astype(np.float64), "float16": lambda x: x.astype(np.float16),
    "int16": lambda x: x.astype(np.int16), "uint64": lambda x: x.astype(np.uint64),
    "big-endian": lambda x: x.astype(">f4"), "big-endian double": lambda x: x.astype(">f8"),
    "columns apart": lambda x: np.repeat(x.astype(np.float32), 2, axis=1)[:, ::2],
    "backwards": lambda x: x[::-1].astype(np.float32)[::-1], "Fortran's": lambda x: np.asfortranarray(x, np.float32),
    "read-only": lambda x: np.broadcast_to(x.astype(np.float32), x.shape),
}  # fmt: skip


@pytest.mark.parametrize("kind", SOURCES)
@of_each_type
def test_inputs_of_any_type_have_the_same_bits(dtype: np.dtype, kind: str) -> None:
    x, precision = inputs(), str(dtype)
    expected = after(program(network(), data(x.astype(np.float32)), 20, 2, precision=precision))
    found = after(program(network(), data(SOURCES[kind](x)), 20, 2, precision=precision))
    np.testing.assert_array_equal(found, expected)


@of_each_type
def test_bytes_are_scaled(dtype: np.dtype) -> None:
    x, precision = inputs(), str(dtype)
    expected = after(program(network(), data(x.astype(dtype) * dtype.type(1 / 255)), 20, 2, precision=precision))
    found = after(program(network(), data(x.astype(np.uint8), scale=1 / 255), 20, 2, precision=precision))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["float64", "int16", "big-endian double", "float32", "uint8"])
def test_inputs_are_standardized_as_numpy_does(kind: str) -> None:
    """In float64 where they have more digits than float32, and their batch is gathered by whomever."""
    net = network(first=(mg.Standardize(N_IN),))
    x = inputs()
    x = (1.7e9 + x if kind in ("float64", "big-endian double") else x).astype(">f8" if kind[0] == "b" else kind)
    dataset = data(x)
    made = program(net, dataset, 20, 2)
    assert made._phased is not None
    found = after(made)
    # What they are standardized to, as inputs of a network without that layer, but for the random words of its layers.
    one = program(network(first=(mg.Standardize(N_IN),)), dataset, 20, 1)
    one._phased = None
    np.testing.assert_allclose(found, after(one), rtol=2e-3, atol=2e-5)


def test_an_epochs_last_batch_may_be_smaller() -> None:
    made = program(network(), data(), 64, 2)
    sums = made.run(0, np.full(9, 0.01))
    np.testing.assert_array_equal(sums[:, 1], [64, 64, 64, 11, 64, 64, 64, 11, 64])


def test_phases_of_more_numbers_of_rows_than_are_kept() -> None:
    expected = after(program(network(), data(), 64, 2), 4)
    made = program(network(), data(), 64, 2)
    assert made._phased is not None
    made.run(0, np.full(1, 0.01))  # so that those of 64 rows are the oldest
    for rows in range(1, phased_steps.BOUND_LIMIT):
        made._phased.training(rows)
    made.load(network().state(mg.Adam(0.01)))
    made.attach(data(), Sampling(ROWS, 64, seed=7))
    made._phased.at_once = 4
    gc.collect()
    np.testing.assert_array_equal(after(made, 4), expected)


@pytest.mark.parametrize("batch_size", [1, 9, 64, ROWS])
def test_one_output_is_a_product_of_vectors(batch_size: int) -> None:
    draw = np.random.default_rng(1)
    dataset = Dataset(inputs().astype(np.float32) / 200, draw.standard_normal((ROWS, 1)).astype(np.float32))
    for widths in (ONE, (N_IN, 1), (1, 1), (1, 40, 1)):
        narrow = Dataset(dataset.x[:, : widths[0]], dataset.y)
        options: Any = {"loss": "squared_error", "optimizer": mg.Momentum(0.01)}
        wide = after(wide_program(network(widths), narrow, batch_size, **options), 12)
        for parts in (1, 2):
            found = after(program(network(widths), narrow, batch_size, parts, **options), 12)
            np.testing.assert_allclose(found, wide, rtol=2e-3, atol=2e-5)
        predictions = network(widths).predictor("cpu")(narrow.x)
        np.testing.assert_allclose(predictions, network(widths).forward(narrow.x.astype(np.float64)), atol=1e-5)


@pytest.mark.parametrize("loss", ["squared_error", "huber", "binary_cross_entropy"])
def test_an_evaluation_is_that_of_one_part(loss: str) -> None:
    draw = np.random.default_rng(1)
    dataset = Dataset(inputs().astype(np.float32) / 200, draw.integers(0, 2, (ROWS, 3)).astype(np.float32))
    one, three = (program(network(), dataset, 64, parts, loss=loss) for parts in (1, 3))
    expected, found = (made.evaluate(dataset, ["mean_absolute_error"]) for made in (one, three))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(three.predict(dataset), one.predict(dataset), rtol=1e-4, atol=1e-6)


def test_which_plans_have_phases() -> None:
    def lowered(net: mg.Network, **options: Any) -> bool:
        options = {"loss": "softmax_cross_entropy", "optimizer": mg.Adam(0.01), **options}
        return is_phased(net.lower(capacity=10, **options))

    assert (
        lowered(network()) and lowered(network().frozen(0)) and lowered(network(), optimizer=mg.SGD(1.0, clip_norm=1.0))
    )
    assert not lowered(network(), shards=2)
    assert lowered(network(), precision="float64")
    assert not lowered(network(), loss=mg.Focal(gamma=2.0))
    tied = mg.Dense(N_IN, N_IN)
    assert not lowered(mg.Network([tied, tied, mg.Dense(N_IN, 3)]))
    assert not lowered(mg.Network([mg.LocallyConnected(N_IN, 3), mg.Dense(N_IN - 2, 3)]))


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 100, 366, 1000])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_cover_what_they_share(parts: int, rows: int) -> None:
    for found in (row_parts(rows, parts), equal_parts(rows, parts)):
        assert [place for part in found for place in range(part.start, part.stop)] == list(range(rows))
        assert len(found) <= parts
    assert len(equal_parts(rows, parts)) == parts


def test_threads_follow_from_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available_cores", lambda: 16)

    def count(*widths: int, batch: int) -> int:
        net = mg.Network([mg.Dense(*each) for each in pairwise(widths)])
        return thread_count(net.lower(capacity=batch, loss="squared_error", optimizer=mg.Momentum(0.1)))

    assert count(4, 8, 1, batch=4) == 1
    assert 2 <= count(784, 128, 10, batch=128) <= 16
    assert count(784, 1024, 1024, 10, batch=1024) == 16


# --- predictions ---


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 8, 40, 64, 130])
@pytest.mark.parametrize("widths", [SMALL, WIDE], ids=str)
def test_a_predictions_bits_follow_from_its_parts_alone(
    widths: tuple[int, ...], rows: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "parts_of_call", lambda rows, row_flops: parts)
    net = network(widths)
    mg.Trainer(net, "softmax_cross_entropy", backend="cpu")
    draw = np.random.default_rng(rows)
    x, another = (draw.standard_normal((rows, N_IN)).astype(np.float32) for _ in range(2))
    found, logits = net.predict(x, backend="cpu"), net.forward(x, backend="cpu")
    plan = net.lower(capacity=rows, precision="float64")
    with numpy_alone():
        wide = get_backend("cpu").compile(plan)
    wide.load(net.state())
    np.testing.assert_allclose(logits, wide.predict(Dataset(x), logits=True), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(chain, "helpers_of", lambda parts: 0)
    predictor = network(widths).predictor("cpu")
    predictor(another)  # whose sums are not in the way
    np.testing.assert_array_equal(predictor.logits(x), logits)
    np.testing.assert_array_equal(net.predict(x, backend="cpu"), found)


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_in_every_part(wrong: float, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "parts_of_call", lambda rows, row_flops: parts)
    predictor = network(WIDE).predictor("cpu")
    for rows in (2, 70, 150):
        x = np.ones((rows, N_IN), np.float32)
        predictor(x)
        for row in range(0, rows, 7):
            x[row, row % N_IN] = wrong
            with pytest.raises(mg.errors.DataError):
                predictor(x)
            x[row] = 1.0


@pytest.mark.parametrize("kept", [0, 1 << 25])
def test_what_calls_of_several_parts_write_is_kept_up_to_a_limit(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "KEPT_BYTES", kept)
    made: list[int] = []
    bound = inference.Chain

    def counted(*arguments: Any) -> chain.Chain:
        made.append(len(arguments[3]))
        return bound(*arguments)

    monkeypatch.setattr(inference, "Chain", counted)
    monkeypatch.setattr(inference, "parts_of_call", lambda rows, row_flops: 4)
    predictor = network(WIDE).predictor("cpu")
    for rows in (64, 380, 64, 380):
        predictor(np.ones((rows, N_IN), np.float32))
    assert made == ([64, 380] if kept else [64, 380, 64, 380])


def test_calls_are_cut_by_their_operations() -> None:
    assert [inference.parts_of_call(rows, 203_000) for rows in (1, 16, 32, 100, 1000)] == [1, 1, 2, 2, 4]
    assert [inference.parts_of_call(rows, 3_700_000) for rows in (1, 8)] == [2, 4]
    assert inference.parts_of_call(32, 11_000) == 1


# --- threads ---


def test_many_threads_train_at_once() -> None:
    dataset = data()
    expected = [after(program(network(), dataset, 8 + place, 1 + place)) for place in range(4)]
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            made = [program(network(), dataset, 8 + place, 1 + place) for place in range(4)]
            for found, own in zip(pool.map(after, made), expected, strict=True):
                np.testing.assert_array_equal(found, own)


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@needs_loops
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores, of Linux")
def test_a_helper_sleeps_off_its_callers_core_and_may_run_on_all_when_it_wakes() -> None:
    """Unless somebody says meanwhile where it may run."""
    script = f"""
    import os, threading, time
    import numpy as np
    import mlpgpu as mg

    cores, ours = set({CORES}), os.getpid()
    net = mg.Network([mg.Dense(200, 300, "relu"), mg.Dense(300, 300)], seed=0)
    predictor, x = net.predictor("cpu"), np.ones((300, 200), np.float32)
    before = set(os.listdir("/proc/self/task"))

    def until(expected, within=20.0):
        end = time.monotonic() + within
        while not expected():
            assert time.monotonic() < end, {{tid: os.sched_getaffinity(tid) for tid in helpers}}
            time.sleep(0.002)

    for _ in range(20):
        predictor(x)
    helpers = [int(tid) for tid in set(os.listdir("/proc/self/task")) - before if tid != str(ours)]
    helpers = [tid for tid in helpers if not any(thread.native_id == tid for thread in threading.enumerate())]
    assert len(helpers) == 1, helpers
    (helper,) = helpers
    until(lambda: len(os.sched_getaffinity(helper)) == len(cores) - 1)
    os.sched_setaffinity(0, cores - os.sched_getaffinity(helper))  # the caller stays where it was
    end = time.monotonic() + 20.0
    while os.sched_getaffinity(helper) != cores:
        predictor(x)
        assert time.monotonic() < end
    until(lambda: len(os.sched_getaffinity(helper)) == len(cores) - 1)
    told = os.sched_getaffinity(0)
    os.sched_setaffinity(helper, told)
    for _ in range(50):
        predictor(x)
        assert os.sched_getaffinity(helper) == told
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_trains_with_threads_of_its_own() -> None:
    dataset = data()
    expected = after(program(network(), dataset, 32, 3, helpers=2))
    mine = program(network(), dataset, 32, 3, helpers=2)
    assert answer_of_child(lambda: bool((after(mine) == expected).all()))
    np.testing.assert_array_equal(after(mine), expected)
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            after(program(network(), dataset, 32, 3, helpers=2))

    with ThreadPoolExecutor(1) as pool:  # forks while others train
        running = pool.submit(go_on)
        try:
            for _ in range(5):
                assert answer_of_child(lambda: bool((after(program(network(), dataset, 32, 3)) == expected).all()))
        finally:
            stop.set()
        running.result()


SANITIZED = """
import sys
import numpy as np
from mlpgpu.backends.cpu.loops import library as made_by
module = sys.modules[made_by.__module__]
module.OPTIONS = (*(each for each in module.OPTIONS if each != "-O3"), "-O1", *{flags!r})
sys.path.insert(0, {folder!r})
import test_phases as tests
assert made_by(tests.FLOAT32) is not None, module.why_not(tests.FLOAT32)
for dtype in map(np.dtype, ("float32", "float64")):
    for parts in (1, 2, 5):
        for widths, batch_sizes in ((tests.SMALL, (1, 3, 16, 203)), (tests.WIDE, (3, 203))):
            for batch_size in batch_sizes:
                tests.test_bits_follow_from_the_parts_alone(dtype, parts, widths, batch_size)
    for kind in tests.SOURCES:
        tests.test_inputs_of_any_type_have_the_same_bits(dtype, kind)
    tests.test_bytes_are_scaled(dtype)
for kind in ("float64", "int16", "float32"):
    tests.test_inputs_are_standardized_as_numpy_does(kind)
print("done")
"""


@pytest.mark.thorough
def test_phases_stay_within_their_arrays(tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers."""
    run_sanitized(SANITIZED.format(flags=SANITIZERS, folder=str(Path(__file__).parent)), tmp_path)


RACES = """
#include <cstdio>
#include <thread>

using namespace mlpgpu;

// Each part of a phase reads what all parts of the one before wrote, and writes a place of its own.
constexpr int PARTS = 4, PHASES = 3, STEPS = 200;
struct Numbers {
    int64_t places[2][PARTS];
};
static void count(const Word* words) {
    Numbers* numbers = static_cast<Numbers*>(words[0].address);
    const int64_t phase = words[1].integer, part = words[2].integer;
    int64_t sum = 1;
    for (int64_t place : numbers->places[phase % 2]) sum = sum > place + 1 ? sum : place + 1;
    numbers->places[(phase + 1) % 2][part] = sum;
}

int main() {
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller)
        callers.emplace_back([&wrong, caller] {
            Numbers numbers = {};
            Word words[2 * PHASES][PARTS][3];
            Call calls[2 * PHASES][PARTS];
            Part parts[2 * PHASES][PARTS];
            Phase phases[2 * PHASES];
            for (int phase = 0; phase < 2 * PHASES; ++phase) {
                for (int part = 0; part < PARTS; ++part) {
                    words[phase][part][0].address = &numbers;
                    words[phase][part][1].integer = phase, words[phase][part][2].integer = part;
                    calls[phase][part] = {count, words[phase][part]};
                    parts[phase][part] = {&calls[phase][part], 1};
                }
                phases[phase] = {parts[phase]};
            }
            std::vector<TrainingStep> steps(STEPS);
            for (TrainingStep& step : steps) step.phases = phases, step.phase_count = 2 * PHASES;
            int64_t finished = 0;
            for (int round = 1; round <= 10; ++round) {
                run_steps(steps.data(), STEPS, PARTS, caller ? 3 : round % PARTS, round % 2 ? 0 : 20000, &finished);
                wrong += finished != STEPS;
                for (int64_t place : numbers.places[0]) wrong += place != int64_t{2} * PHASES * STEPS * round;
            }
        });
    for (std::thread& caller : callers) caller.join();
    std::printf("%d wrong\\n", wrong.load());
}
"""


@pytest.mark.thorough
def test_threads_have_no_races(tmp_path: Path) -> None:
    """Under the thread sanitizer."""
    found = library(FLOAT32)
    assert found is not None
    (tmp_path / "races.cpp").write_text(unit() + RACES)
    folders = [Path(str(threads.__file__)).parent / "loops", native_folder(), source_folder()]
    options = [each for each in OPTIONS if each not in ("-O3", "-march=native")]
    command = ["g++", *options, "-O1", "-g", "-fsanitize=thread", *(f"-I{each}" for each in folders)]
    subprocess.run([*command, "races.cpp", "-o", "races", "-lmvec", "-lm"], cwd=tmp_path, check=True)
    done = subprocess.run(["setarch", "-R", "./races"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stdout + done.stderr
