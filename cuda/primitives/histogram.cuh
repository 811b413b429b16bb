// Counts of values between edges, the least and the greatest value, and a check that all values are finite.
#pragma once

#include "common/reduce.cuh"
#include "common/vectors.cuh"

namespace mlpgpu {

constexpr int MOST_BINS = 4096;

// Calls use(value) for the block's part of x (n,), and use(filler) beyond its end. Blocks take runs of four values for
// each thread, which loads all of them before it uses one.
constexpr int VALUES_PER_THREAD = 4;

template <class Use>
__device__ __forceinline__ void for_each(const float* x, int64_t n, float filler, Use use) {
    const int64_t run = static_cast<int64_t>(VALUES_PER_THREAD) * blockDim.x;
    const bool is_aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
    for (int64_t start = blockIdx.x * run; start < n; start += gridDim.x * run) {
        const int64_t offset = start + VALUES_PER_THREAD * threadIdx.x;
        float values[VALUES_PER_THREAD];
        if (is_aligned && start + run <= n) {
            load_four(x + offset, values);
        } else {
            for (int i = 0; i < VALUES_PER_THREAD; ++i) values[i] = offset + i < n ? x[offset + i] : filler;
        }
        for (int i = 0; i < VALUES_PER_THREAD; ++i) use(values[i]);
    }
}

struct ExtremesBlock {
    static constexpr int THREADS = 256, SHARED_BYTES = sizeof(float) * 2 * THREADS / WARP;
};

// partials (blocks, 2): the least and the greatest of the finite values of x (n,) that a block sees, or infinities, the
// greater one first, if it sees none. Grid: any, of one dimension.
__device__ __forceinline__ void extremes(const float* x, int64_t n, float* partials) {
    SHARED(float, scratch);  // (2, warps)
    float greatest = -INFINITY, greatest_negated = -INFINITY;
    for_each(x, n, NAN, [&](float value) {
        if (!(fabsf(value) < INFINITY)) return;
        greatest = fmaxf(greatest, value);
        greatest_negated = fmaxf(greatest_negated, -value);
    });
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    greatest = warp_max(greatest), greatest_negated = warp_max(greatest_negated);
    if (lane == 0) scratch[warp] = greatest, scratch[warps + warp] = greatest_negated;
    __syncthreads();
    if (warp != 0) return;
    greatest = warp_max(lane < warps ? scratch[lane] : -INFINITY);
    greatest_negated = warp_max(lane < warps ? scratch[warps + lane] : -INFINITY);
    if (lane == 0) partials[2 * blockIdx.x] = -greatest_negated, partials[2 * blockIdx.x + 1] = greatest;
}

// found (1,) becomes 1 if a value of x (n,) is infinite or NaN, and keeps its value otherwise. Grid: any, of one
// dimension.
__device__ __forceinline__ void find_nonfinite(const float* x, int64_t n, unsigned* found) {
    bool is_finite = true;
    for_each(x, n, 0.0f, [&](float value) { is_finite = is_finite && fabsf(value) < INFINITY; });
    if (!is_finite) *found = 1;
}

struct HistogramBlock {
    static constexpr int THREADS = 256, SHARED_BYTES = sizeof(unsigned) * MOST_BINS;
};

// counts (bins,) += the values of x (n,) in each bin: edges[i] ≤ x < edges[i + 1], and the last edge belongs to the
// last bin; values outside and NaN are not counted. edges (bins + 1,) rise by equal steps, up to their rounding. Counts
// are whole numbers, so their order does not matter. Grid: any, of one dimension.
__device__ __forceinline__ void histogram(const float* x, int64_t n, const double* edges, int bins,
                                          unsigned long long* counts) {
    SHARED(unsigned, shared);  // (copies, bins)
    // Neighbouring warps have separate counters while there is room, so that fewer atomics meet in one word.
    const int warps = blockDim.x / WARP, copies = max(1, min(warps, MOST_BINS / bins));
    for (int i = threadIdx.x; i < copies * bins; i += blockDim.x) shared[i] = 0;
    __syncthreads();
    unsigned* const counters = shared + threadIdx.x / WARP % copies * bins;
    const double low = edges[0], high = edges[bins], per_bin = bins / (high - low);
    for_each(x, n, NAN, [&](double value) {
        if (!(value >= low && value <= high)) return;
        int bin = min(bins - 1, static_cast<int>((value - low) * per_bin));
        if (value < edges[bin]) --bin;
        if (bin + 1 < bins && value >= edges[bin + 1]) ++bin;
        atomicAdd(counters + bin, 1u);
    });
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        unsigned long long sum = 0;
        for (int copy = 0; copy < copies; ++copy) sum += shared[copy * bins + bin];
        if (sum) atomicAdd(counts + bin, sum);
    }
}

}  // namespace mlpgpu
