// Counts of values between edges, and what lies at both ends.
#pragma once

#include "portable.cuh"

namespace mlpgpu {

constexpr int MOST_BINS = 4096;

// Of the finite values of x (n,) that a block sees, the least and the greatest: parts (blocks, 2).  Infinities, the
// greater one first, where it sees none.  Grid: any, of one dimension.
__device__ __forceinline__ void extremes(const float* x, int64_t n, float* parts) {
    SHARED(float, scratch);  // (2, warps)
    float greatest = -INFINITY, greatest_negated = -INFINITY;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const float value = x[i];
        if (!(fabsf(value) < INFINITY)) continue;
        greatest = fmaxf(greatest, value);
        greatest_negated = fmaxf(greatest_negated, -value);
    }
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    greatest = warp_max(greatest), greatest_negated = warp_max(greatest_negated);
    if (lane == 0) scratch[warp] = greatest, scratch[warps + warp] = greatest_negated;
    __syncthreads();
    if (warp != 0) return;
    greatest = warp_max(lane < warps ? scratch[lane] : -INFINITY);
    greatest_negated = warp_max(lane < warps ? scratch[warps + lane] : -INFINITY);
    if (lane == 0) parts[2 * blockIdx.x] = -greatest_negated, parts[2 * blockIdx.x + 1] = greatest;
}

// counts (bins,) += the values of x (n,) in each bin: edges[i] ≤ x < edges[i + 1], and the last edge belongs to the
// last bin; values outside and NaN count nowhere.  edges (bins + 1,) rise by equal steps, up to their rounding.
// Counts are whole numbers, so their order does not matter.  Grid: any, of one dimension.
__device__ __forceinline__ void histogram(const float* x, int64_t n, const double* edges, int bins,
                                          unsigned long long* counts) {
    SHARED(unsigned, shared);  // (copies, bins)
    // Neighbouring warps count in copies of their own while there is room: fewer meet in one word.
    const int warps = blockDim.x / WARP, copies = max(1, min(warps, MOST_BINS / bins));
    for (int i = threadIdx.x; i < copies * bins; i += blockDim.x) shared[i] = 0;
    __syncthreads();
    unsigned* const own = shared + threadIdx.x / WARP % copies * bins;
    const double low = edges[0], high = edges[bins], per_bin = bins / (high - low);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const double value = x[i];
        if (!(value >= low && value <= high)) continue;
        int bin = min(bins - 1, static_cast<int>((value - low) * per_bin));
        if (value < edges[bin]) --bin;
        if (bin + 1 < bins && value >= edges[bin + 1]) ++bin;
        atomicAdd(own + bin, 1u);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        unsigned long long sum = 0;
        for (int copy = 0; copy < copies; ++copy) sum += shared[copy * bins + bin];
        if (sum) atomicAdd(counts + bin, sum);
    }
}

}  // namespace mlpgpu
