// A dense layer: x (B, k), W (k, n), b (n,), y (B, n); a gradient is `d` and the name.  All arrays are
// row-major; B is the capacity, and a launch works on one shard of the batch's rows.  Where `order` is not
// null, x is the data set, and the order says which of its rows the batch has.
//
// Formulas: docs/mathematics.md.  The layer's products are those of gemm/simt.cuh with the epilogues below.
#pragma once

#include "math/activations.cuh"
#include "gemm/simt.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

// z = x W + b, y = f(z).  z is null where f' takes y.
// Grid: (row tiles, column tiles).
template <class Activation, class T>
__device__ __forceinline__ void dense_forward(const Step* step, int shard, int shards, const float* x, const int* order,
                                              const float* w, const float* b, float* z, float* y, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const Operand<true> a = {first_input_row(rows, x, order, k), rows.count, k, k, row_indices(rows, order)};
    const Operand<false> weights = {w, n, k, n};
    gemm_tile(T(), a, weights, m0, n0, 0, k, NoColumnSum(), [=](int row, int column, float value) {
        const int64_t offset = static_cast<int64_t>(rows.first + row) * n + column;
        const float sum = value + (b ? b[column] : 0.0f);
        if (z) z[offset] = sum;
        y[offset] = Activation::forward(sum);
    });
}

// dx = (dz Wᵀ) ∘ f'(saved) · keep, f being the activation that made x; `saved` is null where there was none, or
// where the derivative is applied later. Where a dropout follows a ReLU, `saved` is what is left of it, whose zeros are
// those of both, and keep is 1 / (1 - rate); otherwise it is 1.  Grid: (row tiles, tiles of k).
template <class Activation, class T>
__device__ __forceinline__ void dense_backward_input(const Step* step, int shard, int shards, const float* dz,
                                                     const float* w, const float* saved, float* dx, float keep, int k,
                                                     int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const Operand<true> a = {dz + static_cast<int64_t>(rows.first) * n, rows.count, n, n};
    const Operand<true> weights = {w, k, n, n};
    gemm_tile(T(), a, weights, m0, n0, 0, n, NoColumnSum(), [=](int row, int column, float value) {
        const int64_t offset = static_cast<int64_t>(rows.first + row) * k + column;
        dx[offset] = saved ? value * (Activation::derivative(saved[offset]) * keep) : value;
    });
}

// dW = xᵀ dz (k, n) and db = Σ dz (n,) over the shard's rows, in order; db is null without a bias.
// Grid: (tiles of k, tiles of n).
template <class T>
__device__ __forceinline__ void dense_backward_weight(const Step* step, int shard, int shards, const float* x,
                                                      const int* order, const float* dz, float* dw, float* db, int k,
                                                      int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    const Operand<false> a = {first_input_row(rows, x, order, k), k, rows.count, k, row_indices(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const auto columns = column_sum(db ? n : 0, [=](int, int column, float sum) { db[column] = sum; });
    gemm_tile(T(), a, b, m0, n0, 0, rows.count, columns, [=](int row, int column, float value) {
        dw[static_cast<int64_t>(row) * n + column] = value;
    });
}

}  // namespace mlpgpu
