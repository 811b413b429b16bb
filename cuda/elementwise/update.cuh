// What a step does once: add partial gradients up, measure the norm, update parameters.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "math/optimizers.cuh"

namespace mlpgpu {

// gradient (size,) = Σ over shards and uses of a parameter's partials, in that order.  The partials of a
// use lie `pitch` apart from shard to shard, and those of a shard `size` apart from use to use.
__device__ __forceinline__ void reduce(const float* partials, int64_t pitch, int shards, int uses, int64_t size,
                                       float* gradient) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        float sum = partials[i];
        for (int term = 1; term < shards * uses; ++term)
            sum += partials[term / uses * pitch + term % uses * size + i];
        gradient[i] = sum;
    }
}

// Each block's sum of squares of gradient (size,), before the division by the summed weight.
__device__ __forceinline__ void squares(const float* gradient, int64_t size, double* sums) {
    SHARED(double, scratch);
    double sum = 0.0;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x)
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
        float g = partials[i];
        for (int shard = 1; shard < shards; ++shard) g += partials[shard * pitch + i];
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
// length, and the bias's offset in the parameters, in two words.
struct PartialBias {
    int begin, count, pitch, n;
    unsigned offset, offset_high;
};

// Updates biases along the sums of their gradients' partials, added in order; together they have `columns` columns.  slots
// (SLOTS, size).
// Grid: a thread for each column.
template <class Rule>
__device__ __forceinline__ void update_biases(const Step* step, const double* totals, const int* described, int count,
                                              const float* column_partials, float* biases, float* biases_slots,
                                              int64_t size, int columns) {
    const PartialBias* const known = reinterpret_cast<const PartialBias*>(described);
    int j = blockIdx.x * blockDim.x + threadIdx.x, which = 0;
    if (j >= columns) return;  // the other threads wait for the block
    while (which + 1 < count && j >= known[which].n) j -= known[which++].n;
    const PartialBias bias = known[which];
    pdl_wait_and_trigger();
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < bias.count; ++i) sum += column_partials[bias.begin + static_cast<int64_t>(i) * bias.pitch + j];
    const int64_t offset = static_cast<int64_t>(bias.offset_high) << 31 | bias.offset;
    const InPlace<Rule> update = {biases + offset, biases_slots ? biases_slots + offset : nullptr, size, bias.n,
                                  mean_scale(totals), step_rates(step)};
    update(0, j, sum);
}

}  // namespace mlpgpu
