"""Copies of rows by threads in C++: equal to NumPy's, whoever copies, in forked children and under sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from children import answer_of_child
from sanitized import SANITIZERS, run_sanitized

from mlpgpu.backends import row_copies
from mlpgpu.backends.cores import available_cores, granted_cores
from mlpgpu.backends.inputs import InputScaling
from mlpgpu.backends.native import KINDS
from mlpgpu.backends.row_copies import RowCopies, copies, is_there, why_not
from mlpgpu.backends.sources import native_folder

DRAW = np.random.default_rng(11)
FLOAT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint8)
CHUNK = 1 << 14  # numbers of float32
SHAPES = (1, 1), (7, 3), (40, 784), (3000, 1), (1000, 20), (2, CHUNK + 1), (1, 3 * CHUNK - 1), (1, 2 * CHUNK)

needs_copies = pytest.mark.skipif(not is_there(), reason=f"no copies in C++: {why_not()}")


def copied(
    x: np.ndarray,
    rows: np.ndarray | None = None,
    part: slice | None = None,
    dtype: np.dtype = FLOAT32,
    scaling: InputScaling | None = None,
    *,
    threads: int = 3,
    past_caches: bool = False,
    before: int = 5,
) -> tuple[np.ndarray, bool]:
    """What is copied of a part of the rows, so many numbers `before` which others lie, and whether it is finite."""
    part = part or slice(0, len(x if rows is None else rows))
    count = (part.stop - part.start) * x.shape[1]
    room = np.full(before + count + 7, 77, dtype)
    to = room[before : before + count].reshape(-1, x.shape[1])
    made = RowCopies.of(x, rows, dtype, scaling)
    assert made is not None
    with made:
        is_finite = made.begin(part, to, threads=threads, awake=1e-4, past_caches=past_caches).finish()
    assert (room[:before] == 77).all() and (room[before + count :] == 77).all()
    return to, is_finite


def views(x: np.ndarray, shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """Arrays of this shape that lie in various ways, of one that is twice as high and wide."""
    n, k = shape
    yield x[:n, :k].copy()
    yield x[n:, k:]
    yield x[::-2, ::2]
    yield x[:n, :k][:, ::-1]
    yield np.asfortranarray(x[:n, :k])
    yield np.broadcast_to(x[0, :k], shape)


@needs_copies
@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*KINDS, "?"])
def test_rows_are_those_that_numpy_copies(dtype: str, shape: tuple[int, int], past_caches: bool) -> None:
    whole = DRAW.integers(-(1 << 62), 1 << 62, (2 * shape[0], 2 * shape[1])).astype(dtype)
    if dtype in ("f4", "f8"):
        whole = DRAW.standard_normal(whole.shape).astype(dtype)
    for x in views(whole, shape):
        part = slice(len(x) // 3, len(x))
        for rows in (None, DRAW.integers(0, len(x), len(x))):
            expected = (x if rows is None else x[rows])[part].astype(np.float32)
            to, is_finite = copied(x, rows, part, threads=1 + len(x) % 3, past_caches=past_caches)
            assert is_finite
            np.testing.assert_array_equal(to, expected)


@needs_copies
@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 65536), (1, 65535)], ids=str)
def test_bytes_stay_bytes(shape: tuple[int, int], past_caches: bool) -> None:
    whole = DRAW.integers(0, 256, (2 * shape[0], 2 * shape[1])).astype(np.uint8)
    for x in views(whole, shape):
        for rows in (None, DRAW.permutation(len(x))):
            to, is_finite = copied(x, rows, dtype=UINT8, past_caches=past_caches)
            assert is_finite
            np.testing.assert_array_equal(to, x if rows is None else x[rows])


@needs_copies
@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e300])
def test_what_is_not_finite_is_found_wherever_it_stands(wrong: float, dtype: str, past_caches: bool) -> None:
    if wrong == 1e300 and dtype == "f4":
        return
    x = np.full((3, 37), 3e38, dtype)  # finite, though sums are not
    assert copied(x, past_caches=past_caches)[1]
    for place in range(x.size):
        x.flat[place] = wrong
        to, is_finite = copied(x, past_caches=past_caches)
        assert not is_finite
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(to, x.astype(np.float32))
        x.flat[place] = -3e38
    wide = np.zeros((5, CHUNK), dtype)
    for place in (0, CHUNK - 1, CHUNK, 3 * CHUNK + 77, wide.size - 1):
        wide.flat[place] = wrong
        assert not copied(wide, past_caches=past_caches)[1]
        assert copied(wide, part=slice(4, 5), past_caches=past_caches)[1] == (place < 4 * CHUNK)
        wide.flat[place] = 0.0


@needs_copies
@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("dtype", ["f8", "i8", "u8", "i4"])
def test_rows_are_standardized_with_numpys_bits(dtype: str, past_caches: bool) -> None:
    x = (1.7e9 + DRAW.integers(0, 1000, (900, 21))).astype(dtype)
    mean, scale = 1.7e9 + DRAW.standard_normal(21), np.abs(DRAW.standard_normal(21)) + 0.1
    scaling = InputScaling(mean, scale, (slice(0, 21), slice(21, 42)))
    for rows in (None, DRAW.permutation(len(x))):
        expected = np.empty(x.shape, np.float32)
        scaling.standardize(x if rows is None else x[rows], np.empty(x.shape), expected)
        to, is_finite = copied(x, rows, scaling=scaling, past_caches=past_caches)
        assert is_finite
        np.testing.assert_array_equal(to, expected)


@needs_copies
def test_listed_rows_never_lie_beside_the_array() -> None:
    """A list that changes while it is read, by another thread, makes wrong predictions and nothing worse."""
    x = DRAW.standard_normal((6, 4)).astype(np.float32)
    to, _ = copied(x, np.array([-1, 1 << 60, 3, -(1 << 60)]))
    np.testing.assert_array_equal(to, x[[0, 5, 3, 0]])


@needs_copies
def test_what_is_not_for_them_is_left_to_numpy() -> None:
    x = np.zeros((4, 3), np.float32)
    unaligned = np.zeros(49, np.uint8)[1:].view(np.float32).reshape(4, 3)
    for other in (x.astype(">f4"), x.astype(np.float16), x.astype(np.longdouble), unaligned, x[:0]):
        assert RowCopies.of(other, None, FLOAT32) is None
    assert RowCopies.of(x, None, UINT8) is None
    assert RowCopies.of(x, None, FLOAT32) is not None


# --- threads ---


@needs_copies
def test_more_copies_than_slots_end_in_any_order() -> None:
    x = DRAW.standard_normal((40, 3000)).astype(np.float32)
    for order in (range(40), range(39, -1, -1), DRAW.permutation(40)):
        to = np.zeros_like(x)
        made = RowCopies.of(x, None, FLOAT32)
        assert made is not None
        with made:
            begun = [made.begin(slice(row, row + 1), to[row : row + 1], threads=4) for row in range(40)]
            assert all(begun[place].finish() for place in order)
        np.testing.assert_array_equal(to, x)


@needs_copies
def test_copies_that_nobody_finished_end_with_the_block() -> None:
    x, to = np.ones((3000, 784), np.float32), np.zeros((3000, 784), np.float32)
    made = RowCopies.of(x, None, FLOAT32)
    assert made is not None
    with pytest.raises(KeyboardInterrupt), made:
        for start in range(0, 3000, 1000):
            made.begin(slice(start, start + 1000), to[start : start + 1000], threads=3)
        raise KeyboardInterrupt
    assert (to == 1.0).all()


@needs_copies
def test_many_threads_copy_at_once() -> None:
    x = DRAW.standard_normal((2000, 100)).astype(np.float32)
    endless = x.copy()
    endless[1999, 99] = np.inf

    def hammer(seed: int) -> int:
        draw = np.random.default_rng(seed)
        for _ in range(150):
            first = int(draw.integers(0, 1999))
            source, wrong = (endless, True) if draw.random() < 0.5 else (x, False)
            part = slice(first, int(draw.integers(first + 1, 2001)))
            to, is_finite = copied(source, part=part, threads=4, past_caches=bool(seed % 2))
            assert np.array_equal(to, source[part]) and is_finite == (not wrong or part.stop < 2000)
        return seed

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(hammer, range(8))) == list(range(8))
    assert 3 <= helper_count() <= 7


def helper_count() -> int:
    found = copies._found()
    assert not isinstance(found, str)
    return int(found.helper_count())


@needs_copies
def test_threads_that_wait_for_a_copy_sleep_soon() -> None:
    x = np.ones((2000, 784), np.float32)
    copied(x, threads=4)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    to, _ = copied(x, threads=4)
    assert (to == 1.0).all()


@needs_copies
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    x, to = DRAW.standard_normal((3000, 784)).astype(np.float32), np.zeros((3000, 784), np.float32)
    copied(x)
    assert helper_count() >= 2
    made = RowCopies.of(x, None, FLOAT32)
    assert made is not None

    def copy_in_child() -> tuple[int, bool, bool, int]:
        at_first = helper_count()
        begun.finish()  # the parent's helpers are not here
        found, _ = copied(x)
        return at_first, bool((to == x).all()), bool((found == x).all()), helper_count()

    with made:
        begun = made.begin(slice(0, 3000), to, threads=3)
        assert answer_of_child(copy_in_child) == (0, True, True, 2)
        assert begun.finish()
    np.testing.assert_array_equal(to, x)
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            copied(x)

    with ThreadPoolExecutor(2) as pool:  # forks while others copy
        running = [pool.submit(go_on) for _ in range(2)]
        for _ in range(10):
            assert answer_of_child(lambda: bool((copied(x)[0] == x).all()))
        stop.set()
        assert [each.result() for each in running] == [None, None]


AT_EXIT = """
import sys, threading
import numpy as np
from mlpgpu.backends.row_copies import RowCopies
x = np.ones((20000, 784), np.float32)
def copy_on(awake):
    while True:
        made, to = RowCopies.of(x, None, x.dtype), np.empty_like(x)
        with made:
            made.begin(slice(0, len(x)), to, threads=4, awake=awake).finish()
        if sys.argv[1] != "busy":
            return
if sys.argv[1] == "busy":
    for _ in range(2):
        threading.Thread(target=copy_on, args=(0.0,), daemon=True).start()
else:
    copy_on(5.0 if sys.argv[1] == "awake" else 0.0)
print("done")
"""


@needs_copies
@pytest.mark.parametrize("state", ["asleep", "awake", "busy"])
def test_a_process_ends_whatever_its_helpers_do(state: str) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT, state], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# --- the compiler, cores ---


def test_without_a_compiler_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path))
    try:
        for name, value, why in (
            ("CXX", str(tmp_path / "none"), f"{tmp_path / 'none'} is not there"),
            ("MLPGPU_LOOPS", "0", "MLPGPU_LOOPS is 0"),
        ):
            monkeypatch.setenv(name, value)
            copies._found.cache_clear()
            assert not row_copies.is_there() and why_not() == why
            assert RowCopies.of(np.zeros((4, 3), np.float32), None, FLOAT32) is None
    finally:
        copies._found.cache_clear()


def test_a_containers_quota_is_kept(tmp_path: Path) -> None:
    assert granted_cores(tmp_path) == available_cores()
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert granted_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert granted_cores(tmp_path) == available_cores()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, expected in (("-1", available_cores()), ("50000", 1), ("100000000", available_cores())):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert granted_cores(tmp_path) == expected


SANITIZED = """
import sys
from mlpgpu.backends.row_copies import copies
copies.OPTIONS = (*(each for each in copies.OPTIONS if each != "-O3"), "-O1", *{flags!r})
sys.path.insert(0, {folder!r})
import test_row_copies as tests
assert tests.is_there(), tests.why_not()
for past in (False, True):
    for shape in tests.SHAPES:
        for dtype in tests.KINDS:
            tests.test_rows_are_those_that_numpy_copies(dtype, shape, past)
        tests.test_bytes_stay_bytes(shape, past)
    tests.test_rows_are_standardized_with_numpys_bits("f8", past)
tests.test_listed_rows_never_lie_beside_the_array()
tests.test_more_copies_than_slots_end_in_any_order()
tests.test_many_threads_copy_at_once()
print("done")
"""


@needs_copies
@pytest.mark.thorough
def test_copies_stay_within_their_arrays(tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers."""
    run_sanitized(SANITIZED.format(flags=SANITIZERS, folder=str(Path(__file__).parent)), tmp_path)


RACES = """
#include "copies.h"
#include <cstdio>
#include <thread>
#include <vector>

// Threads that copy at once, several copies each, in the order in which they began and backwards.
int main() {
    std::vector<float> x(1 << 17, 1.5f);
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int caller = 0; caller < 4; ++caller)
        callers.emplace_back([&x, &wrong, caller] {
            std::vector<float> to(x.size());
            for (int round = 0; round < 40; ++round) {
                std::fill(to.begin(), to.end(), 0.0f);
                mlpgpu::Copying copies[6] = {};
                const int64_t part = x.size() / 6;
                for (int i = 0; i < 6; ++i) {
                    mlpgpu::Copy& copy = copies[i].copy;
                    copy.x = reinterpret_cast<const char*>(x.data()), copy.kind = mlpgpu::FLOAT32;
                    copy.row_bytes = copy.item_bytes = sizeof(float), copy.columns = 1, copy.row_count = x.size();
                    copy.first = i * part, copy.count = part, copy.to = reinterpret_cast<char*>(to.data() + i * part);
                    begin_copy(&copies[i], 3, round % 2 ? 0 : 20000);
                }
                for (int i = 0; i < 6; ++i) wrong += !finish_copy(&copies[caller % 2 ? i : 5 - i]);
                for (int64_t i = 0; i < 6 * part; ++i) wrong += to[i] != 1.5f;
            }
        });
    for (std::thread& caller : callers) caller.join();
    std::printf("%d wrong, %d helpers\\n", wrong.load(), static_cast<int>(helper_count()));
}
"""


@needs_copies
@pytest.mark.thorough
def test_threads_have_no_races(tmp_path: Path) -> None:
    """Under the thread sanitizer."""
    (tmp_path / "races.cpp").write_text(RACES)
    module: ModuleType = copies
    include = (*(f"-I{each}" for each in (Path(str(module.__file__)).parent, native_folder())),)
    options = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-fopenmp-simd", "-pthread", *include]
    subprocess.run(["g++", *options, "races.cpp", "-o", "races"], cwd=tmp_path, check=True)
    done = subprocess.run(["setarch", "-R", "./races"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0 wrong, 3 helpers\n"), done.stdout + done.stderr
