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

// value (B,) and delta (B, n) of logits (B, n), times weights (data rows,), which may be null.  delta is stored
// as floats, or split into components of bfloat16 (gemm/operand_formats.cuh); null outputs are skipped, as in evaluations.
// Grid: at most as many teams as the capacity has rows, or as components pad it to; a team takes every so many-th row.
template <class Loss, class Target, class Team, class Source>
__device__ __forceinline__ void loss(const Step* step, int shard, int shards, const int* order, const float* logits,
                                     Source targets, const float* weights, const float* mean, const float* scale,
                                     float* delta, double* sums, unsigned* arrived, double* totals, double* losses,
                                     uint16_t* components, int64_t component_stride, int component_count, int n) {
    constexpr int BATCH = Team::SIZE == WARP ? 8 : 1;  // the 32 warps of a wide row's block overlap their loads anyway
    constexpr int IN_REGISTERS = Team::SIZE == WARP ? 16 : 4;
    pdl_wait_and_trigger();
    const Rows rows = shard_rows(step, shard, shards);
    const int teams_of_block = blockDim.x / Team::SIZE, end = components ? filled_rows(rows.count) : rows.count;
    double value = 0.0, weight = 0.0;
    for (int row = blockIdx.x * teams_of_block + threadIdx.x / Team::SIZE; row < end; row += gridDim.x * teams_of_block) {
        uint16_t* const split = components ? components + row * static_cast<int64_t>(padded_columns(n)) : nullptr;
        if (row >= rows.count) {
            for (int p = 0; p < component_count; ++p)
                for (int j = Team::rank(); j < n; j += Team::SIZE) split[p * component_stride + j] = 0;
            continue;
        }
        const int64_t batch_row = rows.first + row, from = order[rows.order + batch_row];
        const float w = weights ? weights[from] : 1.0f;
        float* const out = delta ? delta + batch_row * n : nullptr;
        const auto target = Target{targets, from, n, mean, scale}.of_row();
        const float v = weighted_row<Loss, Team, BATCH, IN_REGISTERS>(logits + batch_row * n, n, target, w, [=](int j, float d) {
            if (out) out[j] = d;
            const float2 pair[1] = {make_float2(d, 0.0f)};
            unsigned words[MOST_COMPONENTS][1];
            if (split) split_to_bfloats(pair, component_count, words);
#pragma unroll
            for (int p = 0; split && p < MOST_COMPONENTS; ++p)
                if (p < component_count) split[p * component_stride + j] = static_cast<uint16_t>(words[p][0]);
        });
        if (Team::rank() == 0) value += v, weight += w;
    }
    BatchTotal(step, value, weight, sums, arrived, totals, losses).finish();
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
