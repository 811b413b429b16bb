"""The shim itself: kernels that are right give the right numbers, and each planted fault is found."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import shim_runner
from kept_builds import KEPT_DAYS, forget_unused
from shim_runner import KernelFault, Unwritten, prepare, run

from mlpgpu.backends.cuda.kernels import Entry, arguments

pytestmark = pytest.mark.xdist_group("shim")  # one process compiles the kernels below

KERNELS = r"""
#include "common/reduce.cuh"

namespace mlpgpu {

extern "C" {
__constant__ float factor;
__constant__ float table[4];
}

// y = x reversed, through shared memory.
template <bool BARRIER>
__device__ void reverse(const float* x, float* y, int n) {
    SHARED(float, tile);
    const int i = threadIdx.x;
    if (i < n) tile[i] = x[i];
    if constexpr (BARRIER) __syncthreads();
    if (i < n) y[i] = tile[n - 1 - i];
}

// The sum over each block, twice: what block_sum says of the second use of its scratch is tested too.
template <bool BARRIER>
__device__ void sums(const float* x, float* first, float* second) {
    SHARED(float, scratch);
    const float value = x[blockIdx.x * blockDim.x + threadIdx.x];
    const float sum = block_sum(value, scratch);
    if constexpr (BARRIER) __syncthreads();
    const float twice = block_sum(2 * value, scratch);
    if (threadIdx.x == 0) first[blockIdx.x] = sum, second[blockIdx.x] = twice;
}

template <class T>
__device__ void shuffles(const T* x, T* up, T* down, T* rotated, T* swapped) {
    const int i = threadIdx.x, lane = i % 32;
    up[i] = __shfl_up_sync(WARP_ALL, x[i], 3, 8);
    down[i] = __shfl_down_sync(WARP_ALL, x[i], 5);
    rotated[i] = __shfl_sync(WARP_ALL, x[i], lane + 1);
    // The halves of a warp need not wait for each other.
    if (lane < 16) swapped[i] = __shfl_xor_sync(0x0000ffffu, x[i], 4);
    else swapped[i] = __shfl_xor_sync(0xffff0000u, x[i], 8);
}

__device__ void votes(const int* x, unsigned* ballot, int* any, int* all) {
    const int i = threadIdx.x;
    ballot[i] = __ballot_sync(WARP_ALL, x[i] > 0);
    any[i] = __any_sync(WARP_ALL, x[i] > 0);
    all[i] = __all_sync(WARP_ALL, x[i] > 0);
}

__device__ void look_up(Texture texture, const int* place, float* y) {
    y[threadIdx.x] = texel(texture, place[threadIdx.x]);
}

__device__ void histogram(const float* x, int* counts, float* sum, int* most) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(counts + i % 3, 1);
    atomicAdd(sum, x[i]);
    atomicMax(most, i);
}

__device__ void products(const uint64_t* a, const uint64_t* b, uint64_t* high, uint64_t* low) {
    multiply_wide(a[threadIdx.x], b[threadIdx.x], high[threadIdx.x], low[threadIdx.x]);
}

__device__ void scale(const float* x, float* y, float by) {
    y[threadIdx.x] = by * factor * (x ? x[threadIdx.x] : table[threadIdx.x]);
}

__device__ void places(int4* y) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    y[block * threads + thread] = make_int4(block, threadIdx.x, threadIdx.y, threadIdx.z);
}

// Every block waits until all have come, and then returns what the one after it has left.
template <bool COUNT>
__device__ void meet(int* arrived, int* left, int* y) {
    left[blockIdx.x] = 10 * blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (COUNT) atomicAdd(arrived, 1);
        while (*static_cast<volatile int*>(arrived) < static_cast<int>(gridDim.x)) pause_spinning();
    }
    __syncthreads();
    if (threadIdx.x == 0) y[blockIdx.x] = left[(blockIdx.x + 1) % gridDim.x];
}

// Threads that have exited count as arrived.
__device__ void early_exit(int* y, int n) {
    if (static_cast<int>(threadIdx.x) >= n) return;
    __syncthreads();
    y[threadIdx.x] = 1;
}

// Faults.

template <int BORDER>
__device__ void copy(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n + BORDER) y[i] = x[i];
}

__device__ void before_start(const float* x, float* y) { y[threadIdx.x] = x[static_cast<int>(threadIdx.x) - 1]; }

__device__ void unwritten_shared(float* y) {
    SHARED(float, tile);
    if (threadIdx.x != 5) tile[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = fmaxf(tile[threadIdx.x], 0.0f);
}

__device__ void shared_overflow(float* y) {
    SHARED(float, tile);
    tile[threadIdx.x + 1] = 1;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x + 1];
}

__device__ void divergent(int* y) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    y[threadIdx.x] = 1;
}

// Warps 0 and 1 reverse a row by themselves, and warp 2 meets them only afterwards.  TOGETHER: how many they wait for.
template <int TOGETHER>
__device__ void two_of_three(float* y) {
    SHARED(float, row);
    if (threadIdx.x < 64) {
        row[threadIdx.x] = static_cast<float>(threadIdx.x);
        sync_some<1, TOGETHER>();
        y[threadIdx.x] = row[63 - threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x >= 64) y[threadIdx.x] = row[threadIdx.x - 64];
}

__device__ void barrier_and_warp(int* y) {
    if (threadIdx.x == 3) __syncthreads();
    else __syncwarp();
    y[threadIdx.x] = 1;
}

__device__ void outside_mask(int* y) { y[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 0); }

// In a block that is not made of whole warps.
__device__ void absent_lane(const float* x, float* y) { y[threadIdx.x] = warp_sum(x[threadIdx.x]); }

__device__ void local_overflow(const int* place, float* y) {
    float sums[4] = {};
    __syncthreads();
    sums[place[0]] += 1;
    y[threadIdx.x] = sums[3];
}

__device__ void misaligned(const float* x, float* y) {
    reinterpret_cast<float4*>(y)[0] = reinterpret_cast<const float4*>(x + 1)[0];
}

__device__ void overflow(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x] + 1; }

__device__ void endless(int* y) {
    while (*static_cast<volatile int*>(y) == 0) {}
}

__device__ void recursion(int* y, int depth) {
    volatile char frame[4096];
    frame[0] = static_cast<char>(depth);
    if (depth < 1000) recursion(y, depth + 1);
    y[0] = frame[0];
}

}  // namespace mlpgpu
"""

# Name, instantiation, parameters, bytes of shared memory, cooperative.
TABLE = [
    ("reverse_right", "reverse<true>", "const float* x, float* y, int n", 256, False),
    ("reverse_wrong", "reverse<false>", "const float* x, float* y, int n", 256, False),
    ("sums_right", "sums<true>", "const float* x, float* first, float* second", 16, False),
    ("sums_wrong", "sums<false>", "const float* x, float* first, float* second", 16, False),
    *(
        (f"shuffles_{t}", f"shuffles<{t}>", f"const {t}* x, {t}* up, {t}* down, {t}* rotated, {t}* swapped", 0, False)
        for t in ("float", "double", "int", "uint32_t", "int64_t", "uint64_t")
    ),
    ("votes_", "votes", "const int* x, unsigned* ballot, int* any, int* all", 0, False),
    ("look_up_", "look_up", "Texture texture, const int* place, float* y", 0, False),
    ("histogram_", "histogram", "const float* x, int* counts, float* sum, int* most", 0, False),
    ("products_", "products", "const uint64_t* a, const uint64_t* b, uint64_t* high, uint64_t* low", 0, False),
    ("scale_", "scale", "const float* x, float* y, float by", 0, False),
    ("places_", "places", "int4* y", 0, False),
    ("meet_right", "meet<true>", "int* arrived, int* left, int* y", 0, True),
    ("meet_wrong", "meet<false>", "int* arrived, int* left, int* y", 0, True),
    ("meet_in_turn", "meet<true>", "int* arrived, int* left, int* y", 0, False),
    ("early_exit_", "early_exit", "int* y, int n", 0, False),
    ("copy_right", "copy<0>", "const float* x, float* y, int n", 0, False),
    ("copy_too_far", "copy<1>", "const float* x, float* y, int n", 0, False),
    ("copy_too_short", "copy<-1>", "const float* x, float* y, int n", 0, False),
    ("before_start_", "before_start", "const float* x, float* y", 0, False),
    ("unwritten_shared_", "unwritten_shared", "float* y", 128, False),
    ("shared_overflow_", "shared_overflow", "float* y", 128, False),
    ("divergent_", "divergent", "int* y", 0, False),
    ("two_of_three_right", "two_of_three<64>", "float* y", 256, False),
    ("two_of_three_wrong", "two_of_three<96>", "float* y", 256, False),
    ("barrier_and_warp_", "barrier_and_warp", "int* y", 0, False),
    ("outside_mask_", "outside_mask", "int* y", 0, False),
    ("absent_lane_", "absent_lane", "const float* x, float* y", 0, False),
    ("local_overflow_", "local_overflow", "const int* place, float* y", 0, False),
    ("misaligned_", "misaligned", "const float* x, float* y", 0, False),
    ("overflow_", "overflow", "const int* x, int* y", 0, False),
    ("endless_", "endless", "int* y", 0, False),
    ("recursion_", "recursion", "int* y, int depth", 0, False),
]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entry]:
    header = tmp_path_factory.mktemp("kernels") / "planted.cuh"
    header.write_text(KERNELS)
    entries = {
        name: Entry(name, str(header), function, arguments(parameters), 1024, shared, cooperative, block=None)
        for name, function, parameters, shared, cooperative in TABLE
    }
    prepare(entries.values())
    return entries


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(3).normal(size=64).astype(np.float32)


def out(n: int, dtype: type = np.float32) -> Unwritten:
    return Unwritten((n,), dtype)


# Kernels that are right.


def test_reverse(kernel: dict[str, Entry], x: np.ndarray) -> None:
    for n in (1, 31, 33, 64):
        y = run(kernel["reverse_right"], 1, 64, {"x": x[:n], "y": out(n), "n": n}, shared_bytes=4 * n)["y"]
        np.testing.assert_array_equal(y, x[:n][::-1])


@pytest.mark.parametrize("blocks, threads", [(1, 32), (3, 64), (2, 128)])
def test_block_sum(kernel: dict[str, Entry], blocks: int, threads: int) -> None:
    x = np.arange(blocks * threads, dtype=np.float32)
    sums = run(kernel["sums_right"], blocks, threads, {"x": x, "first": out(blocks), "second": out(blocks)})
    np.testing.assert_array_equal(sums["first"], x.reshape(blocks, threads).sum(axis=1))
    np.testing.assert_array_equal(sums["second"], 2 * sums["first"])


@pytest.mark.parametrize(
    "ctype, dtype",
    [
        ("float", np.float32),
        ("double", np.float64),
        ("int", np.int32),
        ("uint32_t", np.uint32),
        ("int64_t", np.int64),
        ("uint64_t", np.uint64),
    ],
)
def test_shuffles(kernel: dict[str, Entry], ctype: str, dtype: type) -> None:
    x = (np.arange(64) * 1.5).astype(dtype)
    names = ("up", "down", "rotated", "swapped")
    got = run(kernel[f"shuffles_{ctype}"], 1, 64, {"x": x, **{name: out(64, dtype) for name in names}})
    lanes = np.arange(64) % 32
    warps = x.reshape(2, 32)
    np.testing.assert_array_equal(got["up"], np.where(lanes % 8 >= 3, np.roll(x, 3), x))
    np.testing.assert_array_equal(got["down"], np.where(lanes + 5 < 32, np.roll(x, -5), x))
    np.testing.assert_array_equal(got["rotated"], np.roll(warps, -1, axis=1).ravel())
    source = np.where(lanes < 16, lanes ^ 4, lanes ^ 8)
    np.testing.assert_array_equal(got["swapped"], warps[:, source[:32]].ravel())


def test_votes(kernel: dict[str, Entry]) -> None:
    x = np.array([0, 1] * 16 + [1] * 32 + [0] * 32, np.int32)
    args = {"x": x, "ballot": out(96, np.uint32), "any": out(96, np.int32), "all": out(96, np.int32)}
    got = run(kernel["votes_"], 1, 96, args)
    np.testing.assert_array_equal(got["ballot"][::32], [0xAAAAAAAA, 0xFFFFFFFF, 0])
    np.testing.assert_array_equal(got["any"], np.repeat([1, 1, 0], 32))
    np.testing.assert_array_equal(got["all"], np.repeat([0, 1, 0], 32))


def test_texture(kernel: dict[str, Entry], x: np.ndarray) -> None:
    place = np.array([63, 0, 7], np.int32)
    got = run(kernel["look_up_"], 1, 3, {"texture": x, "place": place, "y": out(3)})
    np.testing.assert_array_equal(got["y"], x[place])


def test_atomics(kernel: dict[str, Entry], x: np.ndarray) -> None:
    args = {"x": x, "counts": np.zeros(3, np.int32), "sum": np.zeros(1, np.float32), "most": np.zeros(1, np.int32)}
    # A sum of n terms in any order is off by at most n units in the last place of the sum of magnitudes.
    bound = 64 * np.finfo(np.float32).eps * abs(x).sum()
    got = run(kernel["histogram_"], 2, 32, args, tolerance={"sum": bound})
    np.testing.assert_array_equal(got["counts"], [22, 21, 21])
    assert got["most"] == 63
    assert abs(got["sum"] - x.sum(dtype=np.float64)) <= bound
    assert args["counts"].sum() == 0  # the caller's arrays stay as they are


def test_the_order_of_atomic_sums_shows(kernel: dict[str, Entry], x: np.ndarray) -> None:
    args = {"x": x, "counts": np.zeros(3, np.int32), "sum": np.zeros(1, np.float32), "most": np.zeros(1, np.int32)}
    with pytest.raises(KernelFault, match=r"histogram_: sum\[0\].* in descending order"):
        run(kernel["histogram_"], 2, 32, args)


def test_multiply_wide(kernel: dict[str, Entry]) -> None:
    a = np.array([2**64 - 1, 0xD2E7470EE14C6C93, 3], np.uint64)
    b = np.array([2**64 - 1, 0x9E3779B97F4A7C15, 5], np.uint64)
    got = run(kernel["products_"], 1, 3, {"a": a, "b": b, "high": out(3, np.uint64), "low": out(3, np.uint64)})
    products = [int(p) * int(q) for p, q in zip(a, b, strict=True)]
    assert got["high"].tolist() == [product >> 64 for product in products]
    assert got["low"].tolist() == [product % 2**64 for product in products]


def test_constants_and_null_pointers(kernel: dict[str, Entry], x: np.ndarray) -> None:
    constants = {"factor": np.float32([2]), "table": np.float32([1, 2, 3])}
    got = run(kernel["scale_"], 1, 64, {"x": x, "y": out(64), "by": 0.5}, constants=constants)
    np.testing.assert_array_equal(got["y"], x)
    got = run(kernel["scale_"], 1, 3, {"x": None, "y": out(3), "by": 0.5}, constants=constants)
    np.testing.assert_array_equal(got["y"], [1, 2, 3])
    with pytest.raises(KernelFault, match="scale_: y"):  # table[3] was not set
        run(kernel["scale_"], 1, 4, {"x": None, "y": out(4), "by": 0.5}, constants=constants)


def test_three_dimensions(kernel: dict[str, Entry]) -> None:
    y = run(kernel["places_"], (2, 3, 2), (3, 2, 2), {"y": Unwritten((12, 2, 2, 3, 4), np.int32)})["y"]
    block, z, y_, x_ = np.meshgrid(*(np.arange(n) for n in (12, 2, 2, 3)), indexing="ij")
    np.testing.assert_array_equal(y, np.stack([block, x_, y_, z], axis=-1))


def test_cooperative_blocks_wait_for_each_other(kernel: dict[str, Entry]) -> None:
    args = {"arrived": np.zeros(1, np.int32), "left": out(4, np.int32), "y": out(4, np.int32)}
    got = run(kernel["meet_right"], 4, 64, args)
    np.testing.assert_array_equal(got["y"], [10, 20, 30, 0])


def test_some_warps_meet_by_themselves(kernel: dict[str, Entry]) -> None:
    expected = [*range(63, -1, -1), *range(32)]
    np.testing.assert_array_equal(run(kernel["two_of_three_right"], 1, 96, {"y": out(96)})["y"], expected)


def test_exited_threads_count_as_arrived(kernel: dict[str, Entry]) -> None:
    assert run(kernel["early_exit_"], 1, 64, {"y": out(40, np.int32), "n": 40})["y"].all()


def test_one_array_under_two_names_is_one_buffer(kernel: dict[str, Entry], x: np.ndarray) -> None:
    got = run(kernel["reverse_right"], 1, 64, {"x": x, "y": x, "n": 64})
    np.testing.assert_array_equal(got["y"], x[::-1])


# Planted faults: each is found, and told by its name.


@pytest.mark.parametrize(
    "name, block, args, report",
    [
        ("reverse_wrong", 64, {"x": np.ones(64, np.float32), "y": out(64), "n": 64}, r"y\[.*a barrier is missing"),
        ("sums_wrong", 64, {"x": np.ones(64, np.float32), "first": out(1), "second": out(1)}, "a barrier is missing"),
        ("copy_too_far", 33, {"x": np.ones(32, np.float32), "y": out(32), "n": 32}, "heap-buffer-overflow"),
        ("copy_too_short", 32, {"x": np.ones(32, np.float32), "y": out(32), "n": 32}, r"y\[31\]"),
        ("before_start_", 32, {"x": np.ones(32, np.float32), "y": out(32)}, "heap-buffer-overflow"),
        ("unwritten_shared_", 32, {"y": out(32)}, r"y\[5\]"),
        ("shared_overflow_", 32, {"y": out(32)}, "heap-buffer-overflow"),
        ("divergent_", 64, {"y": out(64, np.int32)}, "divergent barrier"),
        ("two_of_three_wrong", 96, {"y": out(96)}, r"64 threads, .* wait in sync_some .*[\s\S]*deadlock"),
        ("barrier_and_warp_", 32, {"y": out(32, np.int32)}, r"1 threads, .* wait in __syncthreads .*[\s\S]*deadlock"),
        ("outside_mask_", 32, {"y": out(32, np.int32)}, "leaves out the calling lane 16"),
        ("absent_lane_", 33, {"x": np.ones(33, np.float32), "y": out(33)}, "which does not take part"),
        ("look_up_", 1, {"texture": np.ones(4, np.float32), "place": np.int32([4]), "y": out(1)}, "texel 4 of"),
        ("look_up_", 1, {"texture": np.ones(4, np.float32), "place": np.int32([-1]), "y": out(1)}, "texel -1 of"),
        ("local_overflow_", 32, {"place": np.int32([4]), "y": out(32)}, r"planted\.cuh:\d+:\d+: runtime error"),
        ("misaligned_", 1, {"x": np.ones(8, np.float32), "y": out(4)}, "misaligned address"),
        ("overflow_", 1, {"x": np.int32([2**31 - 1]), "y": out(1, np.int32)}, "signed integer overflow"),
        ("recursion_", 1, {"y": out(1, np.int32), "depth": 0}, "stack-overflow"),
        ("endless_", 1, {"y": np.zeros(1, np.int32)}, "the launch does not end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planted_fault(kernel: dict[str, Entry], name: str, block: int, args: dict[str, object], report: str) -> None:
    with pytest.raises(KernelFault, match=report) as caught:
        run(kernel[name], 1, block, args, seconds=1)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["meet_wrong", "meet_in_turn"])
def test_waiting_for_a_block_that_never_comes(kernel: dict[str, Entry], name: str) -> None:
    args = {"arrived": np.zeros(1, np.int32), "left": out(4, np.int32), "y": out(4, np.int32)}
    with pytest.raises(KernelFault, match=r"wait in pause_spinning at [\s\S]*deadlock"):
        run(kernel[name], 4, 64, args)


def test_the_report_names_the_thread_and_the_next_launch_works(kernel: dict[str, Entry]) -> None:
    x = np.ones(70, np.float32)
    with pytest.raises(KernelFault, match=r"in kernel copy_too_far, ascending order, block \(2, 0, 0\), thread \(6, "):
        run(kernel["copy_too_far"], 3, 32, {"x": x, "y": out(70), "n": 70})
    np.testing.assert_array_equal(run(kernel["copy_right"], 3, 32, {"x": x, "y": out(70), "n": 70})["y"], x)


# What the caller gets wrong.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block": 1025}, "at most 1024 threads, got"),
        ({"grid": (1, 0)}, "at least 1"),
        ({"args": {"x": np.ones(1, np.float32)}}, r"expected \['x', 'y', 'n'\]"),
        ({"args": {"x": np.ones(1), "y": out(1), "n": 1}}, "x: expected an array of float32, got float64"),
        ({"args": {"x": [1.0], "y": out(1), "n": 1}}, "x: expected an array, Unwritten or None, got list"),
    ],
)
def test_refused_launches(kernel: dict[str, Entry], change: dict[str, object], message: str) -> None:
    good = {"grid": 1, "block": 1, "args": {"x": np.ones(1, np.float32), "y": out(1), "n": 1}}
    with pytest.raises(ValueError, match=message):
        run(kernel["copy_right"], **{**good, **change})


def test_excluded_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="does not run on the host: wgmma"):
        prepare([Entry("fast", "gemm/simt.cuh", "fast", (), 128, host_excluded="wgmma", block=None)])


def test_a_compile_error_shows_the_compilers_lines(tmp_path: Path) -> None:
    header = tmp_path / "broken.cuh"
    header.write_text("namespace mlpgpu { __device__ void broken() { no_such_function(); } }\n")
    with pytest.raises(RuntimeError, match=r"broken\.cuh:1:.*error:.*no_such_function"):
        prepare([Entry("broken_", str(header), "broken", (), 32, block=None)])


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    shim_runner._compiler.cache_clear()
    yield
    shim_runner._compiler.cache_clear()


def test_a_missing_compiler_is_a_failure(without_compiler: None) -> None:
    with pytest.raises(RuntimeError, match=r"g\+\+, which is not on the PATH"):
        prepare([Entry("any", "common/portable.cuh", "any", (), 32, block=None)])


def test_programs_are_kept_by_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    header = tmp_path / "kept.cuh"
    kept = "namespace mlpgpu {{ __device__ void kept(int* y) {{ y[0] = {}; }} }}"
    cache = tmp_path / "cache"
    entry = Entry("kept_", str(header), "kept", arguments("int* y"), 32, block=None)

    def launch(number: int) -> set[Path]:
        """Launch as a new session would; what lies in the cache then."""
        header.write_text(kept.format(number))
        monkeypatch.setattr(shim_runner, "_programs", {})
        assert run(entry, 1, 1, {"y": out(1, np.int32)})["y"] == number
        return {path for path in (cache / "shim").iterdir() if path.suffix != ".lock"}

    monkeypatch.setenv("MLPGPU_CACHE", os.fspath(cache))
    first = launch(1)
    assert launch(1) == first
    second = launch(2)
    assert len(second - first) == 2  # an object and a program, the part they share is kept
    assert launch(1) == second


def test_what_was_not_used_for_long_is_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "shim"
    folder.mkdir()
    for name, days in (("new", 0), ("used", KEPT_DAYS - 1), ("unused", KEPT_DAYS + 1)):
        (folder / name).touch()
        moment = time.time() - 86400 * days
        os.utime(folder / name, (moment, moment))
    forget_unused(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"new", "used"}
