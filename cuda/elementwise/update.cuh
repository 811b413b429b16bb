// What a step does once: add partial gradients up, measure the norm, update parameters.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "math/optimizers.cuh"

namespace mlpgpu {

constexpr int SHARD_LEVELS = 11;  // of a tree of at most 1,024 shards

// Σ of_shard(0) … of_shard(shards − 1), by a binary tree in which the first half of every sum has a power of two of
// shards (mlpgpu/plan/sharding.py).  nodes[l] holds a sum of 2^l shards while the shard's number has bit l.
template <class OfShard>
__device__ __forceinline__ float tree_sum(int shards, const OfShard& of_shard) {
    if (shards == 1) return of_shard(0);
    float nodes[SHARD_LEVELS];
    for (int shard = 0; shard < shards; ++shard) {
        float sum = of_shard(shard);
        bool is_placed = false;
#pragma unroll
        for (int level = 0; level < SHARD_LEVELS; ++level) {
            const bool is_second = shard >> level & 1;
            if (!is_placed && is_second) sum = nodes[level] + sum;
            if (!is_placed && !is_second) nodes[level] = sum;
            is_placed |= !is_second;
        }
    }
    // What is left are nodes of the bits of `shards`; the smallest one is the last.
    float sum = 0.0f;
    bool has_sum = false;
#pragma unroll
    for (int level = 0; level < SHARD_LEVELS; ++level) {
        if (!(shards >> level & 1)) continue;
        sum = has_sum ? nodes[level] + sum : nodes[level];
        has_sum = true;
    }
    return sum;
}

// gradient (size,) = Σ over shards of the sum of a parameter's partials over its uses, which are added in order.  The
// partials of a use lie `pitch` apart from shard to shard, and those of a shard `size` apart from use to use.
__device__ __forceinline__ void reduce(const float* partials, int64_t pitch, int shards, int uses, int64_t size,
                                       float* gradient) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        gradient[i] = tree_sum(shards, [=](int shard) {
            float sum = partials[shard * pitch + i];
            for (int use = 1; use < uses; ++use) sum += partials[shard * pitch + use * size + i];
            return sum;
        });
    }
}

// The sums of squares of gradient (size,), before the division by the summed weight, one for every `part` elements: a sum
// does not depend on who has which of the others.  Grid: a block for each.
__device__ __forceinline__ void squares(const float* gradient, int64_t size, int64_t part, double* sums) {
    SHARED(double, scratch);
    const int64_t begin = blockIdx.x * part, end = begin + part < size ? begin + part : size;
    double sum = 0.0;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
        sum += static_cast<double>(gradient[i]) * gradient[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// factor[0] = min(1, clip_norm / norm of the mean gradient), from the blocks' sums.  Grid: one block.
__device__ __forceinline__ void clip(const double* sums, int count, const double* totals, float* factor) {
    SHARED(double, scratch);
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        const double norm = sqrt(sum) * inverse_weight(totals);
        factor[0] = norm > hyper.clip_norm ? static_cast<float>(hyper.clip_norm / norm) : 1.0f;
    }
}

// Updates `size` parameters along their mean gradient, from partials (shards, pitch), with the penalties.  That of
// `alpha`, ½ alpha Σ w², is divided by the batch's weight as the gradient is, but never clipped.
// `factor` is null if nothing is clipped.  slots (SLOTS, slot_pitch), from the first of these parameters on: parameters
// of frozen layers may lie before and behind.
template <class Rule>
__device__ __forceinline__ void update(const Step* step, const double* totals, const float* factor,
                                       const float* partials, int64_t pitch, int shards, float* parameters,
                                       float* slots, int64_t size, int64_t slot_pitch, float alpha) {
    const float* const row = step_rates(step);
    const float scale = mean_scale(totals) * (factor ? factor[0] : 1.0f);
    const float unclipped_alpha = factor ? alpha / factor[0] : alpha;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        float g = tree_sum(shards, [=](int shard) { return partials[shard * pitch + i]; });
        float w = parameters[i];
        float slot[Rule::SLOTS > 0 ? Rule::SLOTS : 1];
        for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = slots[s * slot_pitch + i];
        if (alpha != 0.0f) g += unclipped_alpha * w;
        step_parameter<Rule>(w, slot, g, scale, row);
        parameters[i] = w;
        for (int s = 0; s < Rule::SLOTS; ++s) slots[s * slot_pitch + i] = slot[s];
    }
}

// A bias whose gradient a product has left as partial sums, (count, n padded): where those begin, their count, pitch and
// length, and the offset of the bias or of its gradient, in two words.
struct PartialBias {
    int begin, count, pitch, n;
    unsigned offset, offset_high;
};

// Adds up, in order, the partials of a column of biases' gradients, which together have `columns` columns, and gives the
// sum to `finish`(bias, offset, column, sum).
// Grid: a thread for each column.
template <class Finish>
__device__ __forceinline__ void sum_bias_partials(const int* described, int count, const float* column_partials,
                                                  int columns, const Finish& finish) {
    const PartialBias* const known = reinterpret_cast<const PartialBias*>(described);
    int j = blockIdx.x * blockDim.x + threadIdx.x, which = 0;
    if (j >= columns) return;  // the other threads wait for the block
    while (which + 1 < count && j >= known[which].n) j -= known[which++].n;
    const PartialBias bias = known[which];
    pdl_wait_and_trigger();
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < bias.count; ++i) sum += column_partials[bias.begin + static_cast<int64_t>(i) * bias.pitch + j];
    finish(bias, static_cast<int64_t>(bias.offset_high) << 31 | bias.offset, j, sum);
}

// Updates biases along the sums of their gradients' partials.  slots (SLOTS, size).
template <class Rule>
__device__ __forceinline__ void update_biases(const Step* step, const double* totals, const int* described, int count,
                                              const float* column_partials, float* biases, float* biases_slots,
                                              int64_t size, int columns) {
    sum_bias_partials(described, count, column_partials, columns, [=](const PartialBias& bias, int64_t offset, int j, float sum) {
        const InPlace<Rule> update = {biases + offset, biases_slots ? biases_slots + offset : nullptr, size, bias.n,
                                      mean_scale(totals), step_rates(step)};
        update(0, j, sum);
    });
}

// Stores the sums of biases' gradients' partials.
__device__ __forceinline__ void sum_biases(const int* described, int count, const float* column_partials,
                                           float* gradients, int columns) {
    sum_bias_partials(described, count, column_partials, columns,
                      [=](const PartialBias&, int64_t offset, int j, float sum) { gradients[offset + j] = sum; });
}

}  // namespace mlpgpu
