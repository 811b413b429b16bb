// What a step does once: add partial gradients up, measure the norm, update, move on to the next step.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/step.cuh"

namespace mlpgpu {

// What a fit keeps, as mlpgpu/optimizers.py names it; and, for each step of a run, what changes.
struct Hyper {
    float l1, l2;
    float clip_norm;
    float momentum;
    float rho, rho_rest;  // a rest is 1 minus the number, rounded once
    float beta1, beta1_rest;
    float beta2, beta2_rest;
    float epsilon;
    float weight_decay;
};

constexpr int MOST_STEPS = 4096, COLUMNS = 3;

// Every thread reads the same word at once, which is what constant memory is for.
extern "C" {
__constant__ Hyper hyper;
__constant__ float schedule[MOST_STEPS * COLUMNS];
}

// One struct for each row of the table of optimizers: w and its slots move by one step along g.
struct SGDRule {
    static constexpr int SLOTS = 0;
    static __device__ __forceinline__ void update(float& w, float g, float*, const float* row) { w -= row[0] * g; }
};

struct MomentumRule {
    static constexpr int SLOTS = 1;
    static __device__ __forceinline__ void update(float& w, float g, float* slot, const float* row) {
        slot[0] = hyper.momentum * slot[0] + row[0] * g;
        w -= slot[0];
    }
};

struct NesterovRule {
    static constexpr int SLOTS = 1;
    static __device__ __forceinline__ void update(float& w, float g, float* slot, const float* row) {
        slot[0] = hyper.momentum * slot[0] + row[0] * g;
        w -= hyper.momentum * slot[0] + row[0] * g;
    }
};

struct RMSpropRule {
    static constexpr int SLOTS = 1;
    static __device__ __forceinline__ void update(float& w, float g, float* slot, const float* row) {
        slot[0] = hyper.rho * slot[0] + hyper.rho_rest * g * g;
        w -= row[0] * g / (sqrtf(slot[0]) + hyper.epsilon);
    }
};

struct AdamRule {
    static constexpr int SLOTS = 2;
    static __device__ __forceinline__ void update(float& w, float g, float* slot, const float* row) {
        slot[0] = hyper.beta1 * slot[0] + hyper.beta1_rest * g;
        slot[1] = hyper.beta2 * slot[1] + hyper.beta2_rest * g * g;
        w -= row[1] * slot[0] / (sqrtf(slot[1]) * row[2] + hyper.epsilon);
    }
};

struct AdamWRule {
    static constexpr int SLOTS = 2;
    static __device__ __forceinline__ void update(float& w, float g, float* slot, const float* row) {
        w *= 1.0f - row[0] * hyper.weight_decay;
        AdamRule::update(w, g, slot, row);
    }
};

// The l1 penalty's slope at w, without a branch.
__device__ __forceinline__ float penalty_slope(float w) {
    return hyper.l1 * ((w > 0.0f ? 1.0f : 0.0f) - (w < 0.0f ? 1.0f : 0.0f));
}

// One step of the parameter w: `sum` is its gradient summed over rows and not yet divided, which `scale` does;
// `row` is the step's row of the schedule, and `slope` the l1 penalty's at w.
template <class Rule>
__device__ __forceinline__ void step_parameter(float& w, float* slot, float sum, float scale, const float* row,
                                               float slope) {
    const float g = sum * scale + hyper.l2 * w + slope;
    Rule::update(w, g, slot, row);
}

// The same, where registers are short: comparisons, of which the compiler makes branches, take fewer for the slope.
template <class Rule>
__device__ __forceinline__ void step_parameter(float& w, float* slot, float sum, float scale, const float* row) {
    step_parameter<Rule>(w, slot, sum, scale, row, w > 0.0f ? hyper.l1 : w < 0.0f ? -hyper.l1 : 0.0f);
}

// A product's epilogue: an element of dW moves its parameter by a step, in place.
template <class Rule>
struct InPlace {
    static constexpr int SLOTS = Rule::SLOTS;
    float* weight;   // (k, n)
    float* slots;    // of slot s, the same (k, n) `pitch` elements on
    int64_t pitch;
    int n;
    float scale;
    const float* row;

    struct Held {
        float w;
        float slot[SLOTS > 0 ? SLOTS : 1];
    };

    __device__ __forceinline__ void prefetch(int k, int column) const {
        const int64_t at = static_cast<int64_t>(k) * n + column;
        prefetch_line(weight + at);
        for (int s = 0; s < SLOTS; ++s) prefetch_line(slots + s * pitch + at);
    }

    __device__ __forceinline__ Held hold(int k, int column) const {
        const int64_t at = static_cast<int64_t>(k) * n + column;
        Held held;
        held.w = __ldcg(weight + at);
        for (int s = 0; s < SLOTS; ++s) held.slot[s] = __ldcg(slots + s * pitch + at);
        return held;
    }

    __device__ __forceinline__ void put(int k, int column, float sum, Held held) const {
        const int64_t at = static_cast<int64_t>(k) * n + column;
        step_parameter<Rule>(held.w, held.slot, sum, scale, row);
        weight[at] = held.w;
        for (int s = 0; s < SLOTS; ++s) slots[s * pitch + at] = held.slot[s];
    }

    __device__ __forceinline__ void operator()(int k, int column, float sum) const {
        put(k, column, sum, hold(k, column));
    }
};

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

__device__ __forceinline__ double inverse_weight(const double* totals) { return totals[1] > 0.0 ? 1.0 / totals[1] : 0.0; }

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

// The mean gradient of every parameter from its partials (shards, pitch), the penalties, the rule.
// factor is null where nothing is clipped.  slots (SLOTS, size).
template <class Rule>
__device__ __forceinline__ void update(const Step* step, const double* totals, const float* factor,
                                       const float* partials, int64_t pitch, int shards, float* parameters,
                                       float* slots, int64_t size) {
    const float* const row = schedule + step->run * COLUMNS;
    const float scale = static_cast<float>(inverse_weight(totals)) * (factor ? factor[0] : 1.0f);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        float g = partials[i];
        for (int shard = 1; shard < shards; ++shard) g += partials[shard * pitch + i];
        float w = parameters[i];
        float slot[Rule::SLOTS > 0 ? Rule::SLOTS : 1];
        for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = slots[s * size + i];
        step_parameter<Rule>(w, slot, g, scale, row);
        parameters[i] = w;
        for (int s = 0; s < Rule::SLOTS; ++s) slots[s * size + i] = slot[s];
    }
}

// A bias whose gradient a product has left as parts, (parts, n padded): where those begin, how many there are, how far
// they lie apart, how long it is, and where it lies among the parameters, in two words.
struct PartedBias {
    int begin, parts, pitch, n;
    unsigned offset, offset_high;
};

// Biases move along the sums of their parts, in order; together they have so many columns.  slots (SLOTS, size).
// Grid: a thread for each column.
template <class Rule>
__device__ __forceinline__ void update_biases(const Step* step, const double* totals, const int* described, int count,
                                              const float* column_parts, float* biases, float* biases_slots,
                                              int64_t size, int columns) {
    const PartedBias* const known = reinterpret_cast<const PartedBias*>(described);
    int j = blockIdx.x * blockDim.x + threadIdx.x, which = 0;
    if (j >= columns) return;  // whoever waits, the block does
    while (which + 1 < count && j >= known[which].n) j -= known[which++].n;
    const PartedBias bias = known[which];
    follow_launch_before();
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < bias.parts; ++i) sum += column_parts[bias.begin + static_cast<int64_t>(i) * bias.pitch + j];
    const int64_t offset = static_cast<int64_t>(bias.offset_high) << 31 | bias.offset;
    const float scale = static_cast<float>(inverse_weight(totals));
    const InPlace<Rule> move = {biases + offset, biases_slots ? biases_slots + offset : nullptr, size, bias.n, scale,
                                schedule + step->run * COLUMNS};
    move(0, j, sum);
}

}  // namespace mlpgpu
