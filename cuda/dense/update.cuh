// A dense layer's gradient and the optimizer's step in one kernel: neither dW nor db is ever stored.
//
// It needs the batch's summed weight, so the total error is made before the backward pass; and dx before
// this, because it reads W.  Arrays as in dense/dense.cuh.
#pragma once

#include "math/optimizers.cuh"
#include "dense/dense.cuh"

namespace mlpgpu {

// weight (k, n), bias (n,), or null, and their slots, all in place; of slot s they lie s · size on.
// Grid: (tiles of k, tiles of n).
template <class Rule, class T>
__device__ __forceinline__ void dense_backward_update(const Step* step, int shard, int shards, const float* x,
                                                      const int* order, const float* dz, const double* totals,
                                                      float* weight, float* bias, float* weight_slots,
                                                      float* bias_slots, int64_t size, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    const Operand<false> a = {first_input_row(rows, x, order, k), k, rows.count, k, row_indices(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const row = schedule + step->run * RATES_PER_STEP;
    const InPlace<Rule> of_weight = {weight, weight_slots, size, n, scale, row};
    const InPlace<Rule> of_bias = {bias, bias_slots, size, n, scale, row};
    gemm_tile_in_place(T(), a, b, m0, n0, 0, rows.count, column_sum(bias ? n : 0, of_bias), of_weight);
}

}  // namespace mlpgpu
