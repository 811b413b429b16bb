// A dense layer's backward pass and the optimizer's step for few rows and a large W, in one pass over W and its slots.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "math/activations.cuh"
#include "math/optimizers.cuh"
#include "dense/batch_rows.cuh"
#include "whole_batch/copies.cuh"

namespace mlpgpu {

// A warp takes LANE_ROWS neighbouring rows of W along their columns, COLUMNS at a time, and a lane every 32nd of these. So
// an element of W, which is read once, gives its part of dx, then makes its step: what a lane adds up for dx, of at most
// ROWS rows of the batch, stays in registers till the end of the rows of W. `column_warps` of a block's warps share rows,
// at most MOST_COLUMN_WARPS. While a chunk of columns is multiplied, the next one comes by asynchronous copies: dz for the
// whole block, and for each lane its elements of W and of the slots.
template <int ROWS_>
struct WholeBatchBackward {
    static constexpr int ROWS = ROWS_, WARPS = 4, THREADS = WARPS * WARP;
    static constexpr int LANE_ROWS = ROWS > 16 ? 2 : 4, LANE_COLUMNS = 2, COLUMNS = LANE_COLUMNS * WARP;
    static constexpr int MOST_COLUMN_WARPS = ROWS > 16 ? 2 : 4;
    static constexpr int DELTA_PITCH = MOST_COLUMN_WARPS * COLUMNS + 4, DELTAS = ROWS * DELTA_PITCH;  // of a chunk of dz
    static constexpr int COLUMN_VECTORS = COLUMNS / 4, COPIED_ROWS = THREADS / COLUMN_VECTORS;  // of dz, at once
    static constexpr int ELEMENTS = LANE_ROWS * LANE_COLUMNS, MOST_ARRAYS = 3, LANES = MOST_ARRAYS * ELEMENTS * THREADS;
    static constexpr int PITCH = WARPS * LANE_ROWS;  // of staged x (ROWS, rows of W)
    static constexpr int SUMS = ROWS * LANE_ROWS;    // of dx, for each warp
    static constexpr int SHARED_BYTES = 4 * (2 * DELTAS + 2 * LANES + ROWS * PITCH);
    static_assert(COPIED_ROWS % 4 == 0 && ROWS % COPIED_ROWS == 0, "rows of dz that a thread copies have one lead");
    static_assert(WARPS * SUMS <= 2 * DELTAS, "in the end the warps' sums lie where dz was");
    static_assert(MOST_ARRAYS * ELEMENTS <= WARP, "a lane prefetches a cache line of one of the warp's elements");
};

// The elements of W and its slots that a lane moves, one chunk after another; `weight` and `slots` are those of its first
// row, of which `rows` are left. Element e lies i = e / LANE_COLUMNS rows on.
template <class Rule, class T>
struct LaneWeights {
    static constexpr int ARRAYS = 1 + Rule::SLOTS;
    static_assert(ARRAYS <= T::MOST_ARRAYS);
    float *weight, *slots;
    int64_t size;
    int rows, n;
    float* staged;  // of this thread

    __device__ __forceinline__ bool is_inside(int e, int column) const {
        return e / T::LANE_COLUMNS < rows && column + e % T::LANE_COLUMNS * WARP < n;
    }
    __device__ __forceinline__ float* stored(int array, int e, int column) const {
        float* const base = array == 0 ? weight : slots + (array - 1) * size;
        return base + e / T::LANE_COLUMNS * n + column + e % T::LANE_COLUMNS * WARP;
    }
    __device__ __forceinline__ float& element(int array, int e, int stage) const {
        return staged[((stage * T::MOST_ARRAYS + array) * T::ELEMENTS + e) * T::THREADS];
    }

    // A cache line for each element of the first lane of the warp, in which those of other lanes lie.
    __device__ __forceinline__ void prefetch(int first_column) const {
        const int lane = threadIdx.x % WARP, e = lane % T::ELEMENTS, array = lane / T::ELEMENTS;
        if (array < ARRAYS && is_inside(e, first_column)) prefetch_to_l2(stored(array, e, first_column));
    }

    // Elements outside W are never stored; what they give to dx is multiplied by a dz of 0, so they must be numbers.
    __device__ __forceinline__ void clear() const {
#pragma unroll
        for (int e = 0; e < T::ELEMENTS; ++e) element(0, e, 0) = 0.0f, element(0, e, 1) = 0.0f;
    }

    __device__ __forceinline__ void fetch(int column, int stage) const {
#pragma unroll
        for (int e = 0; e < T::ELEMENTS; ++e) {
            if (!is_inside(e, column)) continue;
#pragma unroll
            for (int array = 0; array < ARRAYS; ++array) copy_async<4>(&element(array, e, stage), stored(array, e, column));
        }
    }

    // Moves the elements, of which `w` are the weights, along the sums of their gradient.
    __device__ __forceinline__ void move(int column, int stage, float (&w)[T::ELEMENTS], const float (&sums)[T::ELEMENTS],
                                         float scale, const float* rates) const {
#pragma unroll
        for (int e = 0; e < T::ELEMENTS; ++e) {
            float slot[T::MOST_ARRAYS];
#pragma unroll
            for (int array = 1; array < ARRAYS; ++array) slot[array - 1] = element(array, e, stage);
            step_parameter<Rule>(w[e], slot, sums[e], scale, rates, penalty_slope(w[e]));
            const bool is_stored = is_inside(e, column);
            if (is_stored) *stored(0, e, column) = w[e];
#pragma unroll
            for (int array = 1; array < ARRAYS; ++array)
                if (is_stored) *stored(array, e, column) = slot[array - 1];
        }
    }
};

template <class Rule, class T, bool HAS_DX, class Bias>
__device__ __forceinline__ void backward_of_rows(const Rows& rows, const float* x, const int* indices, const float* dz,
                                                 const double* totals, float* weight, float* slots, int64_t size,
                                                 const float* rates, Bias of_bias, const float* saved, float* dx, int k,
                                                 int n, int activation, int column_warps, const LayerDropout& dropout,
                                                 int64_t step) {
    SHARED(float, shared);
    float* const staged_dz = shared;  // two chunks (ROWS, chunk), each row behind its place by its lead
    float* const staged_x = shared + 2 * T::DELTAS + 2 * T::LANES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, groups = T::WARPS / column_warps;
    const int group = warp / column_warps, block_row = blockIdx.x * groups * T::LANE_ROWS;
    const int first_row = block_row + group * T::LANE_ROWS, chunk = column_warps * T::COLUMNS, stride = gridDim.y * chunk;
    const int of_warp = warp % column_warps * T::COLUMNS + lane;  // in a chunk
    const int64_t begin = static_cast<int64_t>(first_row) * n;
    const LaneWeights<Rule, T> lane_weights = {
        weight + begin, Rule::SLOTS > 0 ? slots + begin : nullptr, size, k - first_row, n,
        shared + 2 * T::DELTAS + threadIdx.x,
    };
    // Rows of dz are copied by vectors, wherever they begin: a thread copies the same ones of every COPIED_ROWS-th row.
    const int copied_row = threadIdx.x / T::COLUMN_VECTORS, copied_column = threadIdx.x % T::COLUMN_VECTORS * 4;
    const int lead = lead_of(dz, copied_row, n), end_row = threadIdx.x;
    const float* const copied = dz + copied_row * n + (copied_column - lead);
    const auto fetch = [&](int first, int stage) {
        lane_weights.fetch(first + of_warp, stage);
        float* const to = staged_dz + stage * T::DELTAS;
#pragma unroll 1
        for (int column = 0; column < chunk; column += T::COLUMNS) {
            const int place = copied_row * T::DELTA_PITCH + copied_column + column;
            const int left = n - first - column - copied_column + lead;
#pragma unroll
            for (int i = 0; i < T::ROWS; i += T::COPIED_ROWS)
                if (copied_row + i < rows.count)
                    copy_vector(to + place + i * T::DELTA_PITCH, copied + first + column + i * n, left);
        }
        if (end_row < rows.count) {  // the vector behind the chunk, which has the end of a row with a lead
            const int from = first + chunk - lead_of(dz, end_row, n);
            copy_vector(to + end_row * T::DELTA_PITCH + chunk, dz + end_row * n + from, n - from);
        }
        commit_copies();
    };
    const auto staged_row = [&](int stage, int r) {
        return staged_dz + stage * T::DELTAS + r * T::DELTA_PITCH + lead_of(dz, r, n);
    };
    int first = blockIdx.y * chunk, stage = 0;
    lane_weights.prefetch(first + of_warp - lane);
    lane_weights.clear();
    for (int i = rows.count * T::DELTA_PITCH + threadIdx.x; i < T::DELTAS; i += T::THREADS)  // rows that are never copied
        staged_dz[i] = staged_dz[T::DELTAS + i] = 0.0f;
    pdl_wait_and_trigger();
    for (int i = threadIdx.x; i < T::ROWS * T::PITCH; i += T::THREADS) {
        const int r = i / T::PITCH, row = block_row + i % T::PITCH;
        const bool is_inside = r < rows.count && row < k;
        copy_or_clear(staged_x + i, x + (is_inside ? static_cast<int64_t>(indices ? indices[r] : r) * k + row : 0), is_inside);
    }
    fetch(first, 0);
    const float scale = mean_scale(totals);
    of_bias.scale = scale;
    float of_dx[T::SUMS] = {};
    float kept_x[T::ROWS][T::LANE_ROWS];  // where no sums for dx take the registers
    const auto read_x = [&](int r, float (&of_x)[T::LANE_ROWS]) {
        load_neighbours(staged_x + r * T::PITCH + group * T::LANE_ROWS, of_x);
    };
    if (!HAS_DX) {
        wait_copies();
        __syncthreads();
#pragma unroll
        for (int r = 0; r < T::ROWS; ++r) read_x(r, kept_x[r]);
    }
    for (int until_bias = blockIdx.x; first < n; first += stride, stage ^= 1, --until_bias) {
        wait_copies();
        __syncthreads();  // the chunk is there for all, and all have read the one before
        if (first + stride < n) fetch(first + stride, stage ^ 1);
        if (until_bias == 0) {  // of the blocks that have this chunk one moves its biases
            until_bias = gridDim.x;
            for (int column = threadIdx.x; of_bias.weight && column < min(chunk, n - first); column += T::THREADS) {
                float sum = 0.0f;
#pragma unroll
                for (int r = 0; r < T::ROWS; ++r) sum += staged_row(stage, r)[column];
                of_bias(0, first + column, sum);
            }
        }
        float w[T::ELEMENTS], sums[T::ELEMENTS] = {};
#pragma unroll
        for (int e = 0; e < T::ELEMENTS; ++e) w[e] = lane_weights.element(0, e, stage);
#pragma unroll
        for (int r = 0; r < T::ROWS; ++r) {
            float delta[T::LANE_COLUMNS];
            if (HAS_DX) read_x(r, kept_x[r]);
#pragma unroll
            for (int q = 0; q < T::LANE_COLUMNS; ++q) delta[q] = staged_row(stage, r)[of_warp + q * WARP];
#pragma unroll
            for (int e = 0; e < T::ELEMENTS; ++e) {
                const int i = e / T::LANE_COLUMNS, q = e % T::LANE_COLUMNS;
                float& sum = of_dx[r * T::LANE_ROWS + i];
                sums[e] = fmaf(kept_x[r][i], delta[q], sums[e]);
                if (HAS_DX) sum = fmaf(delta[q], w[e], sum);
            }
        }
        lane_weights.move(first + of_warp, stage, w, sums, scale, rates);
    }
    if (!HAS_DX) return;

    float* const sums_of_warps = shared;
    sums_to_lanes(of_dx);
    __syncthreads();  // the sums take the place of dz
    constexpr int PER_LANE = T::SUMS > WARP ? T::SUMS / WARP : 1, LANES_EACH = T::SUMS < WARP ? WARP / T::SUMS : 1;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (lane % LANES_EACH == 0) sums_of_warps[warp * T::SUMS + lane / LANES_EACH * PER_LANE + i] = of_dx[i];
    __syncthreads();
    for (int element = threadIdx.x; element < groups * T::SUMS; element += T::THREADS) {
        const int of_group = element / T::SUMS, place = element % T::SUMS;
        const int r = place / T::LANE_ROWS, row = block_row + of_group * T::LANE_ROWS + place % T::LANE_ROWS;
        if (r >= rows.count || row >= k) continue;
        const float* const of_warps = sums_of_warps + of_group * column_warps * T::SUMS + place;
        float sum = of_warps[0];
        for (int other = 1; other < column_warps; ++other) sum += of_warps[other * T::SUMS];
        const int64_t offset = static_cast<int64_t>(rows.first + r) * k + row;
        float slope[1] = {saved ? saved[offset] : 1.0f};
        if (saved) Activations::derivatives(activation, slope);
        dx[offset] = dropout(step, offset, sum) * slope[0];
    }
}

// Updates weight (k, n), bias (n,), or null, and their slots along the gradient by x (B, k), or by the data set's rows by the
// order, and dz; slot s begins s · size elements after the first. dx = (dz Wᵀ) ∘ f'(saved), of W before its step and of the
// activation f of this number; `saved` is null where there is none, and dx where nobody reads it. Between W and f there may
// have been a dropout.
// Grid: (blocks of rows of W, without dx also of its columns).
template <class Rule, class T>
__device__ __forceinline__ void dense_backward_whole_batch(const Step* step, int shard, int shards, const float* x,
                                                           const int* order, const float* dz, const double* totals,
                                                           float* weight, float* bias, float* weight_slots,
                                                           float* bias_slots, int64_t size, const float* saved, float* dx,
                                                           int k, int n, int activation, int column_warps, uint64_t seed,
                                                           uint64_t purpose, uint64_t layer, uint64_t threshold,
                                                           float keep) {
    const Rows rows = shard_rows(step, shard, shards);
    const float* const from = first_input_row(rows, x, order, k);
    const int* const indices = row_indices(rows, order);
    const float* const deltas = dz + static_cast<int64_t>(rows.first) * n;
    const float* const rates = step_rates(step);
    const InPlace<BiasRule<Rule>> of_bias = {bias, bias_slots, size, n, 0.0f, rates};
    const auto run = [&](auto has_dx) {
        backward_of_rows<Rule, T, decltype(has_dx)::value>(rows, from, indices, deltas, totals, weight, weight_slots, size,
                                                           rates, of_bias, saved, dx, k, n, activation, column_warps,
                                                           {seed, purpose, layer, threshold, keep}, step->number);
    };
    dx ? run(Is<true>()) : run(Is<false>());
}

}  // namespace mlpgpu
