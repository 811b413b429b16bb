// A dense layer's backward pass and the optimizer's step for few rows and a large W, in one pass over W and its slots.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/integers.cuh"
#include "common/reduce.cuh"
#include "math/activations.cuh"
#include "math/dropout.cuh"
#include "math/optimizers.cuh"
#include "dense/batch_rows.cuh"
#include "whole_batch/copies.cuh"

namespace mlpgpu {

// A warp takes LANE_ROWS neighbouring rows of W along their columns, COLUMNS at a time, and a lane every 32nd of these. So
// an element of W, which is read once, gives its part of dx, then makes its step: what a lane adds up for dx, of at most
// ROWS rows of the batch, stays in registers till the end of the rows of W. `column_warps` of a block's warps share rows,
// at most MOST_COLUMN_WARPS. While a chunk of columns is multiplied, STAGES - 1 others come by asynchronous copies. Blocks are
// large since each fetches all of dz from the second-level cache.
template <int ROWS_>
struct WholeBatchBackward {
    static constexpr int ROWS = ROWS_, WARPS = 8, THREADS = WARPS * WARP;
    static constexpr int BLOCKS = ROWS < 8 ? 3 : 2;  // of a multiprocessor of sm_90a
    static constexpr int LANE_ROWS = 2, LANE_COLUMNS = 2, COLUMNS = LANE_COLUMNS * WARP;
    static constexpr int MOST_COLUMN_WARPS = ROWS > 8 ? 2 : 4;
    static constexpr int DELTA_PITCH = MOST_COLUMN_WARPS * COLUMNS + 4, DELTAS = ROWS * DELTA_PITCH;  // of a chunk of dz
    static constexpr int COLUMN_VECTORS = COLUMNS / 4, COPIED_ROWS = smallest(ROWS, THREADS / COLUMN_VECTORS);  // of dz, at once
    static constexpr int STAGES = ROWS > 16 ? 3 : 4, MOST_ARRAYS = 3, ELEMENTS = LANE_ROWS * LANE_COLUMNS;
    static constexpr int WEIGHT_PITCH = COLUMNS + 4, WEIGHTS = MOST_ARRAYS * LANE_ROWS * WEIGHT_PITCH;  // of a warp's chunk
    static constexpr int PITCH = WARPS * LANE_ROWS;  // of staged x (ROWS, rows of W)
    static constexpr int SUMS = ROWS * LANE_ROWS;    // of dx, for each warp
    static constexpr int SHARED_BYTES = 4 * (STAGES * (DELTAS + WARPS * WEIGHTS) + ROWS * PITCH);
    static_assert(BLOCKS * (SHARED_BYTES + 1024) <= 228 * 1024, "a block's memory has 1,024 bytes more");
    static_assert(COPIED_ROWS % 4 == 0 && ROWS % COPIED_ROWS == 0, "rows of dz that a thread copies have one lead");
    static_assert(WARPS * SUMS <= STAGES * DELTAS, "in the end the warps' sums lie where dz was");
    static_assert(MOST_ARRAYS * LANE_ROWS <= WARP, "a lane copies the end of one of the warp's rows");
};

// The rows of W and its slots that a warp moves, one chunk after another. They are copied by vectors, wherever they begin, so
// that copies pass the first-level cache by: a row lies behind its place by its lead. Element e of a lane lies
// e / LANE_COLUMNS rows on. Pointers advance with the chunks, since addresses made anew are a third of all instructions.
template <class Rule, class T>
struct WarpWeights {
    static constexpr int ARRAYS = 1 + Rule::SLOTS, VECTORS = T::COLUMNS / 4;
    static_assert(ARRAYS <= T::MOST_ARRAYS);
    float* elements[ARRAYS];  // the lane's first one in this chunk
    const float* end;         // of one of the rows, the vector behind what the warp has of this chunk
    int lead[ARRAYS][T::LANE_ROWS];
    int lane, rows, n, stride;  // `rows` are left
    float* staged;              // of this warp and chunk
    int stage = 0;

    __device__ __forceinline__ WarpWeights(float* weight, float* slots, int64_t size, int row, int column, int k, int n,
                                           int stride, float* staged)
        : lane(threadIdx.x % WARP), rows(k - row), n(n), stride(stride), staged(staged) {
        const auto first = [&](int array) {
            return (array == 0 ? weight : slots + (array - 1) * size) + static_cast<int64_t>(row) * n + column;
        };
#pragma unroll
        for (int array = 0; array < ARRAYS; ++array) {
            elements[array] = first(array) + lane;
#pragma unroll
            for (int i = 0; i < T::LANE_ROWS; ++i) lead[array][i] = lead_of(first(array), i, n);
        }
        end = first(min(lane / T::LANE_ROWS, ARRAYS - 1)) + lane % T::LANE_ROWS * n + T::COLUMNS;
    }

    __device__ __forceinline__ float* place(int array, int row) const {
        return staged + (array * T::LANE_ROWS + row) * T::WEIGHT_PITCH;
    }

    // Starts to copy the chunk so many ahead, of which `left` columns are left from the warp's first one on. What lies behind
    // a row becomes 0, as a dz of 0 is multiplied by it; rows that there are not give sums that are not stored.
    template <bool IS_WHOLE>
    __device__ __forceinline__ void fetch(int ahead, int left) const {
        const int shift = (stage + ahead < T::STAGES ? ahead : ahead - T::STAGES) * T::WEIGHTS;
        const int copied_row = lane / VECTORS, vector = lane % VECTORS * 4;
#pragma unroll
        for (int i = 0; i < T::LANE_ROWS; i += WARP / VECTORS) {
            const int row = copied_row + i;
            if (row >= rows) break;
#pragma unroll
            for (int array = 0; array < ARRAYS; ++array)
                copy_vector_of<IS_WHOLE>(place(array, row) + shift + vector,
                                         elements[array] + (row * n + ahead * stride + vector - lane), left - vector);
        }
        const int row = lane % T::LANE_ROWS;
        if (lane < ARRAYS * T::LANE_ROWS && row < rows && lead_of(end, 0, 0) > 0)
            copy_vector_of<IS_WHOLE>(place(0, 0) + shift + lane * T::WEIGHT_PITCH + T::COLUMNS, end + ahead * stride,
                                     left - T::COLUMNS);
    }
    __device__ __forceinline__ void fetch(int ahead, int left) const {
        left >= T::COLUMNS + 4 ? fetch<true>(ahead, left) : fetch<false>(ahead, left);
    }

    __device__ __forceinline__ float element(int array, int e) const {
        const int row = e / T::LANE_COLUMNS;
        return place(array, row)[lead[array][row] + lane + e % T::LANE_COLUMNS * WARP];
    }

    // Moves the elements, of which `w` are the weights, along the sums of their gradient.
    __device__ __forceinline__ void move(int left, float (&w)[T::ELEMENTS], const float (&sums)[T::ELEMENTS], float scale,
                                         const float* rates) const {
#pragma unroll
        for (int e = 0; e < T::ELEMENTS; ++e) {
            const int row = e / T::LANE_COLUMNS, apart = e % T::LANE_COLUMNS * WARP;
            float slot[T::MOST_ARRAYS];
#pragma unroll
            for (int array = 1; array < ARRAYS; ++array) slot[array - 1] = element(array, e);
            step_parameter<Rule>(w[e], slot, sums[e], scale, rates, penalty_slope(w[e]));
            if (row >= rows || lane + apart >= left) continue;
#pragma unroll
            for (int array = 0; array < ARRAYS; ++array)
                (elements[array] + row * n)[apart] = array == 0 ? w[e] : slot[array - 1];
        }
    }

    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int array = 0; array < ARRAYS; ++array) elements[array] += stride;
        end += stride;
        const bool is_last = stage == T::STAGES - 1;
        stage = is_last ? 0 : stage + 1;
        staged += is_last ? -(T::STAGES - 1) * T::WEIGHTS : T::WEIGHTS;
    }
};

template <class Rule, class T, bool HAS_DX, class Bias>
__device__ __forceinline__ void backward_of_rows(const Rows& rows, const float* x, const int* indices, const float* dz,
                                                 const double* totals, float* weight, float* slots, int64_t size,
                                                 const float* rates, Bias of_bias, const float* saved, float* dx, int k,
                                                 int n, int activation, int column_warps, const LayerDropout& dropout,
                                                 int64_t step) {
    SHARED(float, shared);
    float* const staged_dz = shared;  // chunks (ROWS, chunk), each row behind its place by its lead
    float* const staged_weights = shared + T::STAGES * T::DELTAS;
    float* const staged_x = staged_weights + T::WARPS * T::STAGES * T::WEIGHTS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, groups = T::WARPS / column_warps;
    const int group = warp / column_warps, block_row = blockIdx.x * groups * T::LANE_ROWS;
    const int first_row = block_row + group * T::LANE_ROWS, chunk = column_warps * T::COLUMNS, stride = gridDim.y * chunk;
    const int of_warp = warp % column_warps * T::COLUMNS;  // in a chunk
    int first = blockIdx.y * chunk;
    WarpWeights<Rule, T> of_weights(weight, slots, size, first_row, first + of_warp, k, n, stride,
                                    staged_weights + warp * T::STAGES * T::WEIGHTS);
#pragma unroll
    for (int ahead = 0; ahead < T::STAGES - 1; ++ahead) of_weights.fetch(ahead, n - first - of_warp - ahead * stride);

    // A thread copies the same vectors of every COPIED_ROWS-th row of dz, and that behind the chunk, which has the end of a
    // row with a lead.
    const int copied_row = threadIdx.x / T::COLUMN_VECTORS, copied_column = threadIdx.x % T::COLUMN_VECTORS * 4;
    const int end_row = threadIdx.x;
    const float *copied = dz + copied_row * n + first + copied_column, *copied_end = dz + end_row * n + first + chunk;
    const auto fetch_part = [&](auto is_whole, int left, float* to) {
        constexpr bool IS_WHOLE = decltype(is_whole)::value;
#pragma unroll 1
        for (int column = 0; column < chunk; column += T::COLUMNS)
#pragma unroll
            for (int i = 0; i < T::ROWS; i += T::COPIED_ROWS)
                if (copied_row + i < rows.count)
                    copy_vector_of<IS_WHOLE>(to + (copied_row + i) * T::DELTA_PITCH + column + copied_column,
                                             copied + (column + i * n), left - column - copied_column);
        if (end_row < rows.count)
            copy_vector_of<IS_WHOLE>(to + end_row * T::DELTA_PITCH + chunk, copied_end, left - chunk);
    };
    const auto fetch_dz = [&](int left, int stage) {
        float* const to = staged_dz + (stage < T::STAGES ? stage : stage - T::STAGES) * T::DELTAS;
        left >= chunk + 4 ? fetch_part(Is<true>(), left, to) : fetch_part(Is<false>(), left, to);
        copied += stride, copied_end += stride;
    };
    const auto staged_row = [&](int stage, int r) {
        return staged_dz + stage * T::DELTAS + r * T::DELTA_PITCH + lead_of(dz, r, n);
    };
    for (int i = rows.count * T::DELTA_PITCH + threadIdx.x; i < T::DELTAS; i += T::THREADS)  // rows that are never copied
#pragma unroll
        for (int stage = 0; stage < T::STAGES; ++stage) staged_dz[stage * T::DELTAS + i] = 0.0f;
    pdl_wait_and_trigger();
    for (int i = threadIdx.x; i < T::ROWS * T::PITCH; i += T::THREADS) {
        const int r = i / T::PITCH, row = block_row + i % T::PITCH;
        const bool is_inside = r < rows.count && row < k;
        copy_or_clear(staged_x + i, x + (is_inside ? static_cast<int64_t>(indices ? indices[r] : r) * k + row : 0), is_inside);
    }
#pragma unroll
    for (int ahead = 0; ahead < T::STAGES - 1; ++ahead) {
        if (n - first > ahead * stride) fetch_dz(n - first - ahead * stride, ahead);
        commit_copies();  // the first one also of x, and of all of W so far
    }
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
    for (int until_bias = blockIdx.x; first < n; first += stride, --until_bias) {
        wait_copies<T::STAGES - 2>();
        __syncthreads();  // the chunk is there for all, and all have read the one before
        const int left = n - first - of_warp, ahead = T::STAGES - 1, stage = of_weights.stage;
        if (n - first > ahead * stride) {
            fetch_dz(n - first - ahead * stride, stage + ahead);
            of_weights.fetch(ahead, left - ahead * stride);
        }
        commit_copies();
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
        for (int e = 0; e < T::ELEMENTS; ++e) w[e] = of_weights.element(0, e);
#pragma unroll
        for (int r = 0; r < T::ROWS; ++r) {
            float delta[T::LANE_COLUMNS];
            if (HAS_DX) read_x(r, kept_x[r]);
#pragma unroll
            for (int q = 0; q < T::LANE_COLUMNS; ++q) delta[q] = staged_row(stage, r)[of_warp + lane + q * WARP];
#pragma unroll
            for (int e = 0; e < T::ELEMENTS; ++e) {
                const int i = e / T::LANE_COLUMNS, q = e % T::LANE_COLUMNS;
                float& sum = of_dx[r * T::LANE_ROWS + i];
                sums[e] = fmaf(kept_x[r][i], delta[q], sums[e]);
                if (HAS_DX) sum = fmaf(delta[q], w[e], sum);
            }
        }
        of_weights.move(left, w, sums, scale, rates);
        of_weights.advance();
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
                                                           int layer, uint32_t least, float keep) {
    const Rows rows = shard_rows(step, shard, shards);
    const float* const from = first_input_row(rows, x, order, k);
    const int* const indices = row_indices(rows, order);
    const float* const deltas = dz + static_cast<int64_t>(rows.first) * n;
    const float* const rates = step_rates(step);
    const InPlace<BiasRule<Rule>> of_bias = {bias, bias_slots, size, n, 0.0f, rates};
    const auto run = [&](auto has_dx) {
        backward_of_rows<Rule, T, decltype(has_dx)::value>(rows, from, indices, deltas, totals, weight, weight_slots, size,
                                                           rates, of_bias, saved, dx, k, n, activation, column_warps,
                                                           {seed, layer, least, keep}, step->number);
    };
    dx ? run(Is<true>()) : run(Is<false>());
}

}  // namespace mlpgpu
