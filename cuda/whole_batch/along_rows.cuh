// A dense layer's backward pass and the optimizer's step for a few rows of the batch, along rows of W as they lie in memory.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "math/activations.cuh"
#include "math/dropout.cuh"
#include "math/optimizers.cuh"
#include "dense/batch_rows.cuh"
#include "whole_batch/copies.cuh"

namespace mlpgpu {

// Teams of 32 to THREADS of a block's threads take GROUP neighbouring rows of W at a time, and a thread a vector of each of
// them, so that a card reads and writes W and its slots nearly in the order in which they lie. dz lies in shared memory, for
// at most MOST_COLUMNS columns of W: BEFORE zeros, a row's deltas, and zeros behind them.
template <int ROWS_>
struct AlongRows {
    static constexpr int ROWS = ROWS_, THREADS = 256, GROUP = ROWS > 2 ? 2 : 4, BLOCKS = 2;
    static constexpr int MOST_COLUMNS = ROWS > 4 ? 3072 : ROWS > 2 ? 4096 : 8192, BEFORE = 4, BEHIND = 8;
    static constexpr int PITCH = BEFORE + MOST_COLUMNS + BEHIND, DELTAS = ROWS * PITCH;
    static constexpr int SUMS = ROWS * GROUP;  // of dx, for each warp
    static constexpr int SHARED_BYTES = 4 * (DELTAS + 2 * THREADS / WARP * SUMS);
};

// Where a vector of a row of W lies, and of its slots, that begins `column` columns into the row: that may be before its first
// one. A vector that reaches beyond the row is taken number by number, without what is not the row's.
template <class Rule, bool IS_WHOLE>
struct RowVector {
    static constexpr int ARRAYS = 1 + Rule::SLOTS;
    float* first;            // W's at `column`
    int64_t to_slots, size;  // from W's element to that of the first slot, and from each slot to the next
    int column, n;

    __device__ __forceinline__ float* place(int array) const {
        return first + (array > 0 ? to_slots + (array - 1) * size : 0);
    }
    __device__ __forceinline__ bool has(int c) const { return column + c >= 0 && column + c < n; }

    __device__ __forceinline__ void load(float (&values)[ARRAYS][4]) const {
#pragma unroll
        for (int array = 0; array < ARRAYS; ++array) {
            if constexpr (IS_WHOLE) {
                unpack(__ldcg(reinterpret_cast<const float4*>(place(array))), values[array]);
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c) values[array][c] = has(c) ? load_alone(place(array) + c) : 0.0f;
            }
        }
    }

    // Makes a step along the sums of the gradient.
    __device__ __forceinline__ void move(float (&values)[ARRAYS][4], const float (&sums)[4], float scale,
                                         const float* rates) const {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float slot[Rule::SLOTS > 0 ? Rule::SLOTS : 1];
#pragma unroll
            for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = values[1 + s][c];
            step_parameter<Rule>(values[0][c], slot, sums[c], scale, rates, penalty_slope(values[0][c]));
#pragma unroll
            for (int s = 0; s < Rule::SLOTS; ++s) values[1 + s][c] = slot[s];
        }
#pragma unroll
        for (int array = 0; array < ARRAYS; ++array) {
            if constexpr (IS_WHOLE) {
                store_vector(place(array), values[array]);
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (has(c)) place(array)[c] = values[array][c];
            }
        }
    }
};

// Of eight neighbours four, from number 4 - lead on.
__device__ __forceinline__ void take_behind_lead(const float (&eight)[8], int lead, float (&four)[4]) {
    const int skipped = 3 - lead;
    float five[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) five[i] = skipped & 2 ? eight[i + 3] : eight[i + 1];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = skipped & 1 ? five[i + 1] : five[i];
}

template <class Rule, class T, bool HAS_DX, class Bias>
__device__ __forceinline__ void backward_along_rows(const Rows& rows, const float* x, const int* indices, const float* dz,
                                                    const double* totals, float* weight, float* slots, int64_t size,
                                                    const float* rates, Bias of_bias, const float* saved, float* dx, int k,
                                                    int n, int activation, int threads, const LayerDropout& dropout,
                                                    int64_t step) {
    SHARED(float, shared);
    float* const sums_of_warps = shared + T::DELTAS;  // of two rounds
    const int thread = threadIdx.x % threads, teams = T::THREADS / threads, all_teams = gridDim.x * teams;
    const int team = blockIdx.x * teams + threadIdx.x / threads, rounds = ceil_div(ceil_div(k, T::GROUP), all_teams);
    const int first = blockIdx.y * threads + thread, stride = gridDim.y * threads;  // of a row's vectors
    bool is_vectored = true;  // else W's vectors are none of its slots
#pragma unroll
    for (int s = 0; s < Rule::SLOTS; ++s) is_vectored = is_vectored && lead_of(slots + s * size, 0, n) == lead_of(weight, 0, n);
    const auto vector_of = [&](auto is_whole, int row, int column) {
        return RowVector<Rule, decltype(is_whole)::value>{weight + static_cast<int64_t>(row) * n + column, slots - weight,
                                                          size, column, n};
    };
    // Whether all vectors of a group are whole, those at this place of its rows.
    const auto are_whole = [&](int first_row, int vector) {
        return is_vectored && first_row + T::GROUP <= k && vector > 0 && 4 * vector + 4 <= n;
    };
    if (are_whole(team * T::GROUP, first))
#pragma unroll
        for (int i = 0; i < T::GROUP; ++i) {
            const int row = team * T::GROUP + i;
            const auto early = vector_of(Is<true>(), row, 4 * first - lead_of(weight, row, n));
#pragma unroll
            for (int array = 0; array < 1 + Rule::SLOTS; ++array) prefetch_to_l2(early.place(array));
        }
    pdl_wait_and_trigger();
#pragma unroll 1
    for (int r = 0; r < T::ROWS; ++r)
        for (int i = threadIdx.x; i < n + T::BEFORE + T::BEHIND; i += T::THREADS) {
            const int column = i - T::BEFORE;
            shared[r * T::PITCH + i] = r < rows.count && column >= 0 && column < n ? dz[r * n + column] : 0.0f;
        }
    __syncthreads();
    const float scale = mean_scale(totals);
    of_bias.scale = scale;
    const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
    for (int column = block * T::THREADS + threadIdx.x; of_bias.weight && column < n; column += blocks * T::THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < T::ROWS; ++r) sum += shared[r * T::PITCH + T::BEFORE + column];
        of_bias(0, column, sum);
    }

#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        const int first_row = (round * all_teams + team) * T::GROUP;
        float of_dx[T::SUMS] = {};
        int lead[T::GROUP];
#pragma unroll
        for (int i = 0; i < T::GROUP; ++i) lead[i] = lead_of(weight, first_row + i, n);
        const auto input = [&](int r, int row) {
            return r < rows.count ? x[static_cast<int64_t>(indices ? indices[r] : r) * k + row] : 0.0f;
        };
        float of_x[T::ROWS][T::GROUP];
#pragma unroll
        for (int r = 0; r < T::ROWS; ++r)
#pragma unroll
            for (int i = 0; i < T::GROUP; ++i) of_x[r][i] = first_row + i < k ? input(r, first_row + i) : 0.0f;
#pragma unroll 1
        for (int vector = first; 4 * vector < n + 3 && first_row < k; vector += stride) {
            if (!are_whole(first_row, vector)) {
#pragma unroll 1
                for (int i = 0; i < min(T::GROUP, k - first_row); ++i) {
                    const int of_row = lead_of(weight, first_row + i, n);
                    const auto place = vector_of(Is<false>(), first_row + i, 4 * vector - of_row);
                    float values[1 + Rule::SLOTS][4], sums[4] = {};
                    place.load(values);
#pragma unroll
                    for (int r = 0; r < T::ROWS; ++r) {
                        float deltas[8], delta[4], sum = 0.0f;
                        load_neighbours(shared + r * T::PITCH + 4 * vector, deltas);
                        take_behind_lead(deltas, of_row, delta);
                        const float factor = input(r, first_row + i);
#pragma unroll
                        for (int c = 0; c < 4; ++c) {
                            sums[c] = fmaf(factor, delta[c], sums[c]);
                            sum = fmaf(delta[c], values[0][c], sum);
                        }
#pragma unroll
                        for (int other = 0; other < T::GROUP; ++other)
                            if (HAS_DX && other == i) of_dx[r * T::GROUP + other] += sum;
                    }
                    place.move(values, sums, scale, rates);
                }
                continue;
            }
            float values[T::GROUP][1 + Rule::SLOTS][4], sums[T::GROUP][4] = {};
#pragma unroll
            for (int i = 0; i < T::GROUP; ++i)
                vector_of(Is<true>(), first_row + i, 4 * vector - lead[i]).load(values[i]);
#pragma unroll
            for (int r = 0; r < T::ROWS; ++r) {
                float deltas[8];
                load_neighbours(shared + r * T::PITCH + 4 * vector, deltas);
#pragma unroll
                for (int i = 0; i < T::GROUP; ++i) {
                    float delta[4], &of_element = of_dx[r * T::GROUP + i];
                    take_behind_lead(deltas, lead[i], delta);
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        sums[i][c] = fmaf(of_x[r][i], delta[c], sums[i][c]);
                        if (HAS_DX) of_element = fmaf(delta[c], values[i][0][c], of_element);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < T::GROUP; ++i)
                vector_of(Is<true>(), first_row + i, 4 * vector - lead[i]).move(values[i], sums[i], scale, rates);
        }
        if (!HAS_DX) continue;
        sums_to_lanes(of_dx);
        constexpr int LANES_EACH = WARP / T::SUMS;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = threads / WARP;
        float* const of_round = sums_of_warps + (round % 2 * (T::THREADS / WARP) + warp - warp % warps) * T::SUMS;
        if (lane % LANES_EACH == 0) of_round[warp % warps * T::SUMS + lane / LANES_EACH] = of_dx[0];
        __syncthreads();
        const int r = thread / T::GROUP, row = first_row + thread % T::GROUP;
        if (thread >= T::SUMS || r >= rows.count || row >= k) continue;
        float sum = of_round[thread];
        for (int other = 1; other < warps; ++other) sum += of_round[other * T::SUMS + thread];
        const int64_t offset = static_cast<int64_t>(rows.first + r) * k + row;
        float slope[1] = {saved ? saved[offset] : 1.0f};
        if (saved) Activations::derivatives(activation, slope);
        dx[offset] = dropout(step, offset, sum) * slope[0];
    }
}

// What dense_backward_whole_batch does (whole_batch/backward.cuh), for at most T::ROWS rows and T::MOST_COLUMNS columns.
// Grid: (groups of rows of W, without dx also parts of a row's vectors); `threads` make a team, a power of 2 from 32 on.
template <class Rule, class T>
__device__ __forceinline__ void dense_backward_along_rows(const Step* step, int shard, int shards, const float* x,
                                                          const int* order, const float* dz, const double* totals,
                                                          float* weight, float* bias, float* weight_slots,
                                                          float* bias_slots, int64_t size, const float* saved, float* dx,
                                                          int k, int n, int activation, int threads, uint64_t seed,
                                                          int layer, uint32_t least, float keep) {
    const Rows rows = shard_rows(step, shard, shards);
    const float* const from = first_input_row(rows, x, order, k);
    const int* const indices = row_indices(rows, order);
    const float* const deltas = dz + static_cast<int64_t>(rows.first) * n;
    const float* const rates = step_rates(step);
    const InPlace<BiasRule<Rule>> of_bias = {bias, bias_slots, size, n, 0.0f, rates};
    const auto run = [&](auto has_dx) {
        backward_along_rows<Rule, T, decltype(has_dx)::value>(rows, from, indices, deltas, totals, weight, weight_slots,
                                                              size, rates, of_bias, saved, dx, k, n, activation, threads,
                                                              {seed, layer, least, keep}, step->number);
    };
    dx ? run(Is<true>()) : run(Is<false>());
}

}  // namespace mlpgpu
