// Losses and outputs over rows: a row's value and its delta, both times the row's weight, in one pass over the logits.
// A warp takes a row, or, if rows are very wide, a block.
#pragma once

#include "common/batch_total.cuh"
#include "common/dependent_launch.cuh"
#include "gemm/operand_formats.cuh"
#include "math/losses.cuh"
#include "math/teams.cuh"

namespace mlpgpu {

// The sums over each step's rows of their values and weights, from errors (steps of a run, capacity, 2) to the run's
// losses (steps, 2).  Grid: a block for each step.
__device__ __forceinline__ void step_errors(const Step* first, const float* errors, int capacity, double* losses) {
    Step step = *first;
    step.batch += blockIdx.x;
    const float* const of_step = errors + 2ll * capacity * (step.run + blockIdx.x);
    double value = 0.0, weight = 0.0;
    for (int row = threadIdx.x; row < batch_rows(step); row += blockDim.x)
        value += of_step[2 * row], weight += of_step[2 * row + 1];
    const ValueAndWeight sum = block_sums(value, weight);
    if (threadIdx.x == 0) {
        losses[2 * (step.run + blockIdx.x)] = sum.value;
        losses[2 * (step.run + blockIdx.x) + 1] = sum.weight;
    }
}

// Where a row's deltas go: to floats, to components of bfloat16 (gemm/operand_formats.cuh), or nowhere.
struct StoredDelta {
    float* out;
    uint16_t* split;
    int64_t component_stride;
    int component_count, n;

    __device__ __forceinline__ void operator()(int j, float d) const {
        if (out) out[j] = d;
        if (!split) return;
        const float2 pair[1] = {make_float2(d, 0.0f)};
        unsigned words[MOST_COMPONENTS][1];
        split_to_bfloats(pair, component_count, words);
#pragma unroll
        for (int p = 0; p < MOST_COMPONENTS; ++p)
            if (p < component_count) split[p * component_stride + j] = static_cast<uint16_t>(words[p][0]);
    }
    // Stores a thread's pairs. An output beyond the row is 0, as the components' padding has to be.
    template <int STRIDE, int PAIRS>
    __device__ __forceinline__ void pairs(int j, const Pair (&of)[PAIRS]) const {
        if (out && n % 2 == 0) {
            each_pair<STRIDE, PAIRS>(n, [&](int i) {
                if (j + i * STRIDE < n) *reinterpret_cast<Pair*>(out + j + i * STRIDE) = of[i];
            });
        } else if (out) {
            each_pair<STRIDE, PAIRS>(n, [&](int i) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (j + i * STRIDE + h < n) out[j + i * STRIDE + h] = of[i].of[h];
            });
        }
        if (!split) return;
        if (component_count == 1) store_split<1, STRIDE>(j, of);
        if (component_count == 2) store_split<2, STRIDE>(j, of);
        if (component_count == 3) store_split<3, STRIDE>(j, of);
    }
    template <int COMPONENTS, int STRIDE, int PAIRS>
    __device__ __forceinline__ void store_split(int j, const Pair (&of)[PAIRS]) const {
        each_pair<STRIDE, PAIRS>(n, [&](int i) {
            const float2 pair[1] = {make_float2(of[i].of[0], of[i].of[1])};
            unsigned words[COMPONENTS][1];
            split_to_bfloats(pair, words);
#pragma unroll
            for (int p = 0; p < COMPONENTS; ++p)
                if (j + i * STRIDE < n) *reinterpret_cast<unsigned*>(split + p * component_stride + j + i * STRIDE) = words[p][0];
        });
    }
};

// value (B,) and delta (B, n) of logits (B, n), times weights (data rows,), which may be null.  delta is stored
// as floats, or split into components of bfloat16 (gemm/operand_formats.cuh); null outputs are skipped, as in evaluations.
// Grid: at most as many teams as the capacity has rows, or as components pad it to; a team takes every so many-th row.
template <class Loss, class Target, class Team, class Source>
__device__ __forceinline__ void loss(const Step* step, int shard, int shards, const int* order, const float* logits,
                                     Source targets, const float* weights, const float* mean, const float* scale,
                                     float* delta, double* sums, unsigned* arrived, double* totals, double* losses,
                                     uint16_t* components, int64_t component_stride, int component_count, int n) {
    constexpr int BATCH = Team::SIZE == WARP ? 8 : 1;  // the 32 warps of a wide row's block overlap their loads anyway
    constexpr int IN_REGISTERS = Team::SIZE == WARP ? 32 : 4;
    const Rows rows = shard_rows(step, shard, shards);
    const int teams_of_block = blockDim.x / Team::SIZE, end = components ? filled_rows(rows.count) : rows.count;
    double value = 0.0, weight = 0.0;
    const int stride = gridDim.x * teams_of_block, first = blockIdx.x * teams_of_block + threadIdx.x / Team::SIZE;
    const int* const order_of_batch = order + rows.order + rows.first;
    // The row of the data set, loaded one row ahead, and the first one while the logits are made.
    int64_t next = first < rows.count ? __ldcg(order_of_batch + first) : 0;
    pdl_wait_and_trigger();
    for (int row = first; row < end; row += stride) {
        uint16_t* const split = components ? components + row * static_cast<int64_t>(padded_columns(n)) : nullptr;
        if (row >= rows.count) {
            for (int p = 0; p < component_count; ++p)
                for (int j = Team::rank(); j < n; j += Team::SIZE) split[p * component_stride + j] = 0;
            continue;
        }
        const int64_t batch_row = rows.first + row, from = next;
        if (row + stride < rows.count) next = __ldcg(order_of_batch + row + stride);
        const float w = weights ? weights[from] : 1.0f;
        const StoredDelta to = {delta ? delta + batch_row * n : nullptr, split, component_stride, component_count, n};
        const auto target = Target{targets, from, n, mean, scale}.of_row();
        const float v = weighted_row<Loss, Team, BATCH, IN_REGISTERS>(logits + batch_row * n, n, target, w, to);
        if (Team::rank() == 0) value += v, weight += w;
    }
    add_threads_up(step, value, weight, sums, arrived, totals, losses);
}

// Predictions y (B, n) of logits: the loss's output function, then scaled back if targets were
// standardized.  Grid: as for loss.
template <class Output, class Team>
__device__ __forceinline__ void output(const Step* step, int shard, int shards, const float* logits, const float* mean,
                                       const float* scale, float* y, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int row = blockIdx.x * (blockDim.x / Team::SIZE) + threadIdx.x / Team::SIZE;
    if (row >= rows.count) return;
    const int64_t first = static_cast<int64_t>(rows.first + row) * n;
    Output::template row<Team>(logits + first, y + first, n);
    if (scale)
        for (int j = Team::rank(); j < n; j += Team::SIZE) y[first + j] = y[first + j] * scale[j] + mean[j];
}

}  // namespace mlpgpu
