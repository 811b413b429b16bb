// A dense layer forward as a split-K product: partial sums, and the kernel that adds them up.
#pragma once

#include "math/activations.cuh"
#include "gemm/simt.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

// An epilogue that stores elements of C to an array of n columns, from row `first` on.
struct StoreRows {
    float* to;
    int first, n;
    struct Loaded {};
    __device__ __forceinline__ void prefetch(int, int) const {}
    __device__ __forceinline__ Loaded load(int, int) const { return {}; }
    __device__ __forceinline__ void put(int row, int column, float value, Loaded) const { (*this)(row, column, value); }
    __device__ __forceinline__ void operator()(int row, int column, float value) const {
        to[static_cast<int64_t>(first + row) * n + column] = value;
    }
};

// dense_forward split along k, for so large k and small n that there would be few tiles with much work each: each z of the
// grid takes `part` values of k and stores its sums in partials (grid z, B, n).
// Grid: (row tiles, column tiles, split-K partials).
template <class T>
__device__ __forceinline__ void dense_forward_split_k(const Step* step, int shard, int shards, const float* x,
                                                   const int* order, const float* w, float* partials, int k, int n,
                                                   int part, int capacity) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const int k_begin = blockIdx.z * part, k_end = min(k, k_begin + part);
    const Operand<true> a = {first_input_row(rows, x, order, k), rows.count, k, k, row_indices(rows, order)};
    const Operand<false> weights = {w, n, k, n};
    float* const out = partials + static_cast<int64_t>(blockIdx.z) * capacity * n;
    gemm_tile(T(), a, weights, m0, n0, k_begin, k_end, NoColumnSum(), StoreRows{out, rows.first, n});
}

// Adds partial sums in order, and finishes as dense_forward does. A block takes 32 neighbouring elements, and each of its
// warps a run of the partials; the sums of the runs are added in order too.
// Grid: any, of one dimension.
struct PartSum {
    static constexpr int THREADS = 256, WARPS = THREADS / WARP;
    static constexpr int SHARED_BYTES = 4 * WARPS * WARP;
};

template <class Activation>
__device__ __forceinline__ void dense_forward_sum_partials(const Step* step, int shard, int shards, const float* partials,
                                                  const float* b, float* z, float* y, int n, int count, int capacity) {
    SHARED(float, shared);  // (warps, elements)
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    const int64_t pitch = static_cast<int64_t>(capacity) * n;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int run = ceil_div(count, PartSum::WARPS);
    for (int64_t start = blockIdx.x * static_cast<int64_t>(WARP); start < size;
         start += gridDim.x * static_cast<int64_t>(WARP)) {
        const int64_t offset = first + start + lane;
        const bool inside = start + lane < size;
        float sum = 0.0f;
#pragma unroll 16
        for (int part = warp * run; part < min(count, (warp + 1) * run); ++part)
            sum += inside ? partials[part * pitch + offset] : 0.0f;
        shared[threadIdx.x] = sum;
        __syncthreads();
        if (warp == 0 && inside) {
            for (int w = 1; w < PartSum::WARPS; ++w) sum += shared[w * WARP + lane];
            sum += b ? b[offset % n] : 0.0f;
            if (z) z[offset] = sum;
            y[offset] = Activation::forward(sum);
        }
        __syncthreads();
    }
}

}  // namespace mlpgpu
