// A locally connected layer: x (B, m), w (window, pitch), y (B, n), n = m - window + 1 ≤ pitch; a gradient is `d` and
// the name. Output i sees x_i … x_{i + window - 1} through weights that no other output has, w[0, i], w[1, i], …, so
// that neighbouring threads read neighbouring words. The layer may use only the first n columns of w.
//
// Every sum is one chain of fused multiply-adds in ascending order.
#pragma once

#include "common/reduce.cuh"
#include "common/step.cuh"
#include "math/activations.cuh"

namespace mlpgpu {

constexpr int LOCAL_ROWS = 4;  // rows that share one read of a weight

// Calls store(row, Σ_r weight(r) · input(row, r)) for up to ROWS rows from number row0 of the shard on: a weight is
// read once for all of them. Loads of TERMS terms of a window are in flight together, also where fewer are left.
template <int ROWS, class Weight, class Input, class Store>
__device__ __forceinline__ void over_window(const Rows& rows, int row0, int window, const Weight& weight,
                                            const Input& input, const Store& store) {
    constexpr int TERMS = ROWS == 1 ? 16 : 4;
    float sums[ROWS] = {};
    for (int first = 0; first < window; first += TERMS) {
        float w[TERMS], x[TERMS][ROWS];
#pragma unroll
        for (int j = 0; j < TERMS; ++j) {
            const int r = first + j;
            w[j] = r < window ? weight(r) : 0.0f;
#pragma unroll
            for (int q = 0; q < ROWS; ++q)
                x[j][q] = r < window ? input(rows.first + min(row0 + q, rows.count - 1), r) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < TERMS; ++j)
#pragma unroll
            for (int q = 0; q < ROWS; ++q)
                if (first + j < window) sums[q] = fmaf(w[j], x[j][q], sums[q]);
    }
#pragma unroll
    for (int q = 0; q < ROWS; ++q)
        if (row0 + q < rows.count) store(rows.first + row0 + q, sums[q]);
}

// The same for each row of the shard, LOCAL_ROWS at a time, or a single row by itself.
template <class Weight, class Input, class Store>
__device__ __forceinline__ void over_windows(const Rows& rows, int window, const Weight& weight, const Input& input,
                                             const Store& store) {
    for (int row0 = blockIdx.y * LOCAL_ROWS; row0 < rows.count; row0 += gridDim.y * LOCAL_ROWS)
        if (row0 + 1 < rows.count)
            over_window<LOCAL_ROWS>(rows, row0, window, weight, input, store);
        else
            over_window<1>(rows, row0, window, weight, input, store);
}

// z_i = b_i + Σ_r w[r, i] x_{i + r}, y = f(z). z is null if f' takes y; neighbours in b lie `b_step` apart, which is 0
// if all outputs share one bias. Grid: (columns of y, rows in fours).
template <class Activation>
__device__ __forceinline__ void local_forward(const Step* step, int shard, int shards, const float* x, const float* w,
                                              const float* b, float* z, float* y, int m, int n, int window, int pitch,
                                              int b_step) {
    const Rows rows = shard_rows(step, shard, shards);
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float bias = b ? b[static_cast<int64_t>(i) * b_step] : 0.0f;
    over_windows(
        rows, window, [=](int r) { return w[static_cast<int64_t>(r) * pitch + i]; },
        [=](int64_t row, int r) { return x[row * m + i + r]; },
        [=](int64_t row, float sum) {
            if (z) z[row * n + i] = sum + bias;
            y[row * n + i] = Activation::forward(sum + bias);
        });
}

// dx_j = (Σ_r w[r, j - r] dz_{j - r}) f'(saved_j), where f is the activation that made x; `saved` is null if there was
// none. Grid: (columns of x, rows in fours).
template <class Activation>
__device__ __forceinline__ void local_backward_input(const Step* step, int shard, int shards, const float* dz,
                                                     const float* w, const float* saved, float* dx, int m, int n,
                                                     int window, int pitch) {
    const Rows rows = shard_rows(step, shard, shards);
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= m) return;
    // At either end some windows do not reach j.
    const int first = max(0, j - n + 1), last = min(window - 1, j);
    over_windows(
        rows, last - first + 1,
        [=](int r) { return w[static_cast<int64_t>(first + r) * pitch + j - first - r]; },
        [=](int64_t row, int r) { return dz[row * n + j - first - r]; },
        [=](int64_t row, float sum) {
            dx[row * m + j] = saved ? sum * Activation::derivative(saved[row * m + j]) : sum;
        });
}

// dw[r, i] = Σ dz_i x_{i + r} over the shard's rows, and 0 in columns from n on.  Grid: (columns of w, its rows).
__device__ __forceinline__ void local_backward_weight(const Step* step, int shard, int shards, const float* x,
                                                      const float* dz, float* dw, int m, int n, int window,
                                                      int pitch) {
    const Rows rows = shard_rows(step, shard, shards);
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pitch) return;
    for (int r = blockIdx.y; r < window; r += gridDim.y) {
        float sum = 0.0f;
        if (i < n)
            for (int64_t row = rows.first; row < rows.first + rows.count; ++row)
                sum = fmaf(dz[row * n + i], x[row * m + i + r], sum);
        dw[static_cast<int64_t>(r) * pitch + i] = sum;
    }
}

// db_i = Σ dz_i over the shard's rows, and 0 from n on.  Grid: columns of w.
__device__ __forceinline__ void local_backward_bias(const Step* step, int shard, int shards, const float* dz, float* db,
                                                    int n, int pitch) {
    const Rows rows = shard_rows(step, shard, shards);
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pitch) return;
    float sum = 0.0f;
    if (i < n)
        for (int64_t row = rows.first; row < rows.first + rows.count; ++row) sum += dz[row * n + i];
    db[i] = sum;
}

// db = Σ dz over the shard's rows and all outputs, which have one bias.  Grid: one block.
__device__ __forceinline__ void local_backward_shared_bias(const Step* step, int shard, int shards, const float* dz,
                                                           float* db, int n) {
    SHARED(double, scratch);
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, end = first + static_cast<int64_t>(rows.count) * n;
    double sum = 0.0;
    for (int64_t i = first + threadIdx.x; i < end; i += blockDim.x) sum += static_cast<double>(dz[i]);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) db[0] = static_cast<float>(sum);
}

}  // namespace mlpgpu
