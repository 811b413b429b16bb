// The update of a weight with small n by few rows of the batch.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/integers.cuh"
#include "math/optimizers.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

// A thread has a row of W: neighbours read neighbours of x, BATCH rows of it at once, and dz, a few numbers for each row,
// lies in shared memory. So every sum is one chain over the rows, and no block waits for another.
struct FewColumns {
    static constexpr int THREADS = 64, COLUMNS = 16, BATCH = 16, STAGED_ROWS = 64, GROUP = 4;
    static constexpr int SHARED_BYTES = 4 * (STAGED_ROWS + 1) * COLUMNS;  // dz, and behind it what unused sums read
    static_assert(STAGED_ROWS % BATCH == 0 && COLUMNS % GROUP == 0 && THREADS >= COLUMNS, "");
};

// dense_backward_update of a weight of at most COLUMNS columns.
// Grid: (blocks of k).
template <class Rule>
__device__ __forceinline__ void dense_backward_update_few_columns(const Step* step, int shard, int shards, const float* x,
                                                                  const int* order, const float* dz,
                                                                  const double* totals, float* weight, float* bias,
                                                                  float* weight_slots, float* bias_slots, int64_t size,
                                                                  int k, int n) {
    using T = FewColumns;
    using Weight = InPlace<Rule>;
    SHARED(float, shared);
    pdl_wait_and_trigger();
    const Rows rows = shard_rows(step, shard, shards);
    const int* const indices = row_indices(rows, order);
    const int row = blockIdx.x * T::THREADS + threadIdx.x, read_row = min(row, k - 1);
    const float* const of_row = first_input_row(rows, x, order, k) + read_row;
    const float* const deltas = dz + static_cast<int64_t>(rows.first) * n;
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const rates = schedule + step->run * RATES_PER_STEP;
    const Weight of_weight = {weight, weight_slots, size, n, scale, rates};
    typename Weight::Loaded loaded[T::COLUMNS];
#pragma unroll
    for (int j = 0; j < T::COLUMNS; ++j)
        if (j < n) loaded[j] = of_weight.load(read_row, j);

    float sums[T::COLUMNS] = {}, of_column = 0.0f;
    for (int row0 = 0; row0 < rows.count; row0 += T::STAGED_ROWS) {
        const int staged = min(T::STAGED_ROWS, rows.count - row0);
        if (row0 > 0) __syncthreads();
        for (int i = threadIdx.x; i < staged * n; i += T::THREADS) shared[i] = deltas[static_cast<int64_t>(row0) * n + i];
        __syncthreads();
        for (int first = 0; first < staged; first += T::BATCH) {
            float values[T::BATCH];
#pragma unroll
            for (int i = 0; i < T::BATCH; ++i) {
                const int r = row0 + min(first + i, staged - 1);
                values[i] = of_row[static_cast<int64_t>(indices ? indices[r] : r) * k];
            }
#pragma unroll
            for (int i = 0; i < T::BATCH; ++i) {
                if (first + i >= staged) break;
                const float* const delta = shared + (first + i) * n;
                if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < n) of_column += delta[threadIdx.x];
#pragma unroll
                for (int group = 0; group < T::COLUMNS; group += T::GROUP) {
                    if (group >= n) break;
#pragma unroll
                    for (int j = group; j < group + T::GROUP; ++j) sums[j] = fmaf(values[i], delta[j], sums[j]);
                }
            }
        }
    }
    if (row < k) {
#pragma unroll
        for (int j = 0; j < T::COLUMNS; ++j)
            if (j < n) of_weight.put(row, j, sums[j], loaded[j]);
    }
    if (bias && blockIdx.x == 0 && static_cast<int>(threadIdx.x) < n)
        InPlace<BiasRule<Rule>>{bias, bias_slots, size, n, scale, rates}(0, threadIdx.x, of_column);
}

}  // namespace mlpgpu
