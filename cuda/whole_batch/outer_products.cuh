// A dense layer's update for few rows and a large W whose dx nobody reads: W and its slots pass as flat arrays.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/integers.cuh"
#include "common/vectors.cuh"
#include "math/optimizers.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

// A thread moves four neighbouring elements of W, by at most ROWS rows of the batch. So memory is accessed in its own order
// and by vectors, wherever rows of W begin, and a block ends as soon as it has moved its elements.
// Grid: blocks of ELEMENTS elements of W, and behind them blocks of THREADS elements of the bias.
template <int ROWS_>
struct OuterProducts {
    static constexpr int ROWS = ROWS_, THREADS = 256, BLOCKS = 4, SHARED_BYTES = 0;
    static constexpr int QUAD = 4, ELEMENTS = QUAD * THREADS;  // rows are no shorter, so a quad ends in the next one at most
};

// Four neighbouring elements of an array of `count`, of which the first is inside.
struct FlatQuad {
    static __device__ __forceinline__ void load(const float* from, int count, int first, bool vectored, float (&quad)[4]) {
        unpack(load_row(from, count, first, vectored), quad);
    }
    static __device__ __forceinline__ void store(float* to, int count, int first, bool vectored, const float (&quad)[4]) {
        store_row(to, count, first, make_float4(quad[0], quad[1], quad[2], quad[3]), vectored);
    }
};

// Arrays are those of dense_backward_update.
template <class Rule, class T>
__device__ __forceinline__ void dense_update_outer_products(const Step* step, int shard, int shards, const float* x,
                                                            const int* order, const float* dz, const double* totals,
                                                            float* weight, float* bias, float* weight_slots, float* bias_slots,
                                                            int64_t size, int k, int n) {
    constexpr int SLOTS = Rule::SLOTS;
    const int of_weight = ceil_div(k * n, T::ELEMENTS);
    if (static_cast<int>(blockIdx.x) >= of_weight) {
        const int column = (blockIdx.x - of_weight) * T::THREADS + threadIdx.x;
        pdl_wait_and_trigger();
        if (!bias || column >= n) return;
        const Rows rows = shard_rows(step, shard, shards);
        float sum = 0.0f;
        for (int r = 0; r < rows.count; ++r) sum += dz[static_cast<int64_t>(rows.first + r) * n + column];
        InPlace<BiasRule<Rule>>{bias, bias_slots, size, n, mean_scale(totals), step_rates(step)}(0, column, sum);
        return;
    }
    const int count = k * n, first = blockIdx.x * T::ELEMENTS + T::QUAD * threadIdx.x;
    bool vectored = is_vectored(weight, T::QUAD);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) vectored = vectored && is_vectored(weight_slots + s * size, T::QUAD);
    float w[T::QUAD], slots[SLOTS > 0 ? SLOTS : 1][T::QUAD];
    if (first < count) {
        FlatQuad::load(weight, count, first, vectored, w);
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) FlatQuad::load(weight_slots + s * size, count, first, vectored, slots[s]);
    }
    pdl_wait_and_trigger();
    if (first >= count) return;
    const Rows rows = shard_rows(step, shard, shards);
    const int* const indices = row_indices(rows, order);
    const float* const inputs = first_input_row(rows, x, order, k);
    const float* const deltas = dz + static_cast<int64_t>(rows.first) * n;
    const int row = first / n, column = first - row * n, of_row = n - column;  // so many elements are of this row
    const int next_row = min(row + 1, k - 1);
    // Loads of all rows are in flight at once; a row behind the last one counts as 0.
    const bool is_vector = is_vectored(deltas, n);
    float value[T::ROWS], next[T::ROWS], delta[T::ROWS][T::QUAD];
#pragma unroll
    for (int r = 0; r < T::ROWS; ++r) {
        const bool is_there = r < rows.count;
        const float* const values = inputs + static_cast<int64_t>(indices && is_there ? indices[r] : is_there ? r : 0) * k;
        const float* const of = deltas + static_cast<int64_t>(is_there ? r : 0) * n;
        value[r] = is_there ? values[row] : 0.0f, next[r] = is_there ? values[next_row] : 0.0f;
        if (is_vector) {
            load_four(of + column, delta[r]);
        } else {
#pragma unroll
            for (int e = 0; e < T::QUAD; ++e) delta[r][e] = of[e < of_row ? column + e : e - of_row];
        }
    }
    float sums[T::QUAD] = {};
#pragma unroll
    for (int r = 0; r < T::ROWS; ++r) {
        if (r >= rows.count) break;
#pragma unroll
        for (int e = 0; e < T::QUAD; ++e) sums[e] = fmaf(e < of_row ? value[r] : next[r], delta[r][e], sums[e]);
    }
    const float scale = mean_scale(totals);
    const float* const rates = step_rates(step);
#pragma unroll
    for (int e = 0; e < T::QUAD; ++e) {
        float slot[SLOTS > 0 ? SLOTS : 1];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) slot[s] = slots[s][e];
        step_parameter<Rule>(w[e], slot, sums[e], scale, rates, penalty_slope(w[e]));
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) slots[s][e] = slot[s];
    }
    FlatQuad::store(weight, count, first, vectored, w);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) FlatQuad::store(weight_slots + s * size, count, first, vectored, slots[s]);
}

}  // namespace mlpgpu
