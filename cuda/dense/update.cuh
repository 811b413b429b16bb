// The gradient of a dense layer and the optimizer's step in one kernel: neither dW nor db is stored.
//
// It needs the batch's total weight, so the total is made before the backward pass; and it follows dx, which reads W.
// Arrays are those of dense/dense.cuh.
#pragma once

#include "math/optimizers.cuh"
#include "dense/dense.cuh"

namespace mlpgpu {

// Moves the weights of the tile whose first row is m0 and first column n0, and the biases of its columns if m0 is 0.
template <class Rule, class T>
__device__ __forceinline__ void update_tile(int m0, int n0, const Step* step, int shard, int shards, const float* x,
                                            const int* order, const float* dz, const double* totals, float* weight,
                                            float* bias, float* weight_slots, float* bias_slots, int64_t size, int k,
                                            int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const Operand<false> a = {first_input_row(rows, x, order, k), k, rows.count, k, row_indices(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const row = schedule + step->run * RATES_PER_STEP;
    const InPlace<Rule> of_weight = {weight, weight_slots, size, n, scale, row};
    const InPlace<BiasRule<Rule>> of_bias = {bias, bias_slots, size, n, scale, row};
    gemm_tile(T(), a, b, m0, n0, 0, rows.count, column_sum(bias ? n : 0, of_bias), of_weight);
}

// weight (k, n), bias (n,), or null, and their slots are updated in place; slot s begins s · size elements after the first.
// Grid: (tiles of k, tiles of n).
template <class Rule, class T>
__device__ __forceinline__ void dense_backward_update(const Step* step, int shard, int shards, const float* x,
                                                      const int* order, const float* dz, const double* totals,
                                                      float* weight, float* bias, float* weight_slots,
                                                      float* bias_slots, int64_t size, int k, int n) {
    update_tile<Rule, T>(blockIdx.x * T::M, blockIdx.y * T::N, step, shard, shards, x, order, dz, totals, weight, bias,
                         weight_slots, bias_slots, size, k, n);
}

}  // namespace mlpgpu
