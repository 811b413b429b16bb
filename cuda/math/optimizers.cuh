// Optimizers: one struct for each row of the table in mlpgpu/optimizers.py.  `update` moves w and its slots by one step
// along the gradient g; `row` is the step's row of the schedule.
#pragma once

#include "common/step.cuh"
#include "math/approximate.cuh"

namespace mlpgpu {

// Hyper-parameters, which stay the same during a fit; mlpgpu/optimizers.py has their names.
struct Hyper {
    real l1, l2;
    real clip_norm;
    real momentum;
    real rho, rho_rest;  // a rest is 1 minus the number, rounded once
    real beta1, beta1_rest;
    real beta2, beta2_rest;
    real epsilon;
    real weight_decay;
    real alpha;
};

constexpr int MOST_STEPS = 4096, RATES_PER_STEP = 3;

// Constant memory, because every thread of a warp reads the same word at once.
extern "C" {
__constant__ Hyper hyper;
__constant__ float schedule[MOST_STEPS * RATES_PER_STEP];
}

// Roots and quotients are approximate, as a step is by its gradient's roundings anyway. The correctly rounded ones took a
// third of the time of updates. No root of a float32 is so large that a quotient by it is 0.

struct SGDRule {
    static constexpr int SLOTS = 0;
    static __device__ __forceinline__ void update(real& w, real g, real*, const real* row) { w -= row[0] * g; }
};

struct MomentumRule {
    static constexpr int SLOTS = 1;
    static __device__ __forceinline__ void update(real& w, real g, real* slot, const real* row) {
        slot[0] = hyper.momentum * slot[0] + row[0] * g;
        w -= slot[0];
    }
};

struct NesterovRule {
    static constexpr int SLOTS = 1;
    static __device__ __forceinline__ void update(real& w, real g, real* slot, const real* row) {
        slot[0] = hyper.momentum * slot[0] + row[0] * g;
        w -= hyper.momentum * slot[0] + row[0] * g;
    }
};

struct RMSpropRule {
    static constexpr int SLOTS = 1;
    static __device__ __forceinline__ void update(real& w, real g, real* slot, const real* row) {
        slot[0] = hyper.rho * slot[0] + hyper.rho_rest * g * g;
        w -= quotient(row[0] * g, root(slot[0]) + hyper.epsilon);
    }
};

struct AdamRule {
    static constexpr int SLOTS = 2;
    static __device__ __forceinline__ void update(real& w, real g, real* slot, const real* row) {
        slot[0] = hyper.beta1 * slot[0] + hyper.beta1_rest * g;
        slot[1] = hyper.beta2 * slot[1] + hyper.beta2_rest * g * g;
        w -= quotient(row[1] * slot[0], root(slot[1]) * row[2] + hyper.epsilon);
    }
};

struct AdamWRule {
    static constexpr int SLOTS = 2;
    static __device__ __forceinline__ void update(real& w, real g, real* slot, const real* row) {
        w *= 1.0f - row[0] * hyper.weight_decay;
        AdamRule::update(w, g, slot, row);
    }
};

// A rule whose weights also have the penalty ½ alpha Σ w², which is divided by the batch's weight as the gradient is.
template <class Rule>
struct WithAlpha : Rule {};

using SGDWithAlphaRule = WithAlpha<SGDRule>;
using MomentumWithAlphaRule = WithAlpha<MomentumRule>;
using NesterovWithAlphaRule = WithAlpha<NesterovRule>;
using RMSpropWithAlphaRule = WithAlpha<RMSpropRule>;
using AdamWithAlphaRule = WithAlpha<AdamRule>;
using AdamWWithAlphaRule = WithAlpha<AdamWRule>;

template <class Rule>
struct RuleOfBiases {
    using Type = Rule;
};

template <class Rule>
struct RuleOfBiases<WithAlpha<Rule>> {
    using Type = Rule;
};

// The rule of biases, which that penalty spares.
template <class Rule>
using BiasRule = typename RuleOfBiases<Rule>::Type;

template <class Rule>
constexpr bool HAS_ALPHA = false;
template <class Rule>
constexpr bool HAS_ALPHA<WithAlpha<Rule>> = true;

// A weight's gradient summed over rows, with the slope at w of the penalty that the rule has, if any.
template <class Rule>
__device__ __forceinline__ real penalized(real sum, real w) {
    if constexpr (HAS_ALPHA<Rule>) return sum + hyper.alpha * w;
    else return sum;
}

// The l1 penalty's slope at w, without a branch.
__device__ __forceinline__ real penalty_slope(real w) {
    return hyper.l1 * ((w > 0.0f ? 1.0f : 0.0f) - (w < 0.0f ? 1.0f : 0.0f));
}

// One step of the parameter w, a weight, or a bias where the rule is a BiasRule: `sum` is its gradient summed over rows,
// which `scale` divides by the batch's weight; `row` is the step's row of the schedule, and `slope` that of the l1 penalty
// at w.
template <class Rule>
__device__ __forceinline__ void step_parameter(real& w, real* slot, real sum, real scale, const real* row,
                                               real slope) {
    const real g = penalized<Rule>(sum, w) * scale + hyper.l2 * w + slope;
    Rule::update(w, g, slot, row);
}

// The same with fewer registers: the compiler makes branches of these comparisons.
template <class Rule>
__device__ __forceinline__ void step_parameter(real& w, real* slot, real sum, real scale, const real* row) {
    step_parameter<Rule>(w, slot, sum, scale, row, w > 0.0f ? hyper.l1 : w < 0.0f ? -hyper.l1 : 0.0f);
}

// Rates of the step: its row of the schedule.
__device__ __forceinline__ const float* step_rates(const Step* step) { return schedule + step->run * RATES_PER_STEP; }

__device__ __forceinline__ double inverse_weight(const double* totals) {
    return totals[1] > 0.0 ? 1.0 / totals[1] : 0.0;
}

// 1 / the batch's summed weight, which makes a mean gradient of a sum.
__device__ __forceinline__ float mean_scale(const double* totals) { return static_cast<float>(inverse_weight(totals)); }

// A product's epilogue that updates parameters in place: an element of dW moves its parameter by a step.
template <class Rule>
struct InPlace {
    static constexpr int SLOTS = Rule::SLOTS, OVERLAPPING = 8;
    float* weight;   // (k, n)
    float* slots;    // slot s lies s · pitch elements on
    int64_t pitch;
    int n;
    float scale;
    const float* row;

    struct Loaded {
        float w;
        float slot[SLOTS > 0 ? SLOTS : 1];
    };

    __device__ __forceinline__ void prefetch(int k, int column) const {
        const int64_t offset = static_cast<int64_t>(k) * n + column;
        prefetch_to_l2(weight + offset);
        for (int s = 0; s < SLOTS; ++s) prefetch_to_l2(slots + s * pitch + offset);
    }

    __device__ __forceinline__ Loaded load(int k, int column) const {
        const int64_t offset = static_cast<int64_t>(k) * n + column;
        Loaded loaded;
        loaded.w = __ldcg(weight + offset);
        for (int s = 0; s < SLOTS; ++s) loaded.slot[s] = __ldcg(slots + s * pitch + offset);
        return loaded;
    }

    __device__ __forceinline__ Loaded finish(float sum, Loaded loaded) const {
        step_parameter<Rule>(loaded.w, loaded.slot, sum, scale, row);
        return loaded;
    }

    __device__ __forceinline__ void put(int k, int column, const Loaded& moved) const {
        const int64_t offset = static_cast<int64_t>(k) * n + column;
        weight[offset] = moved.w;
        for (int s = 0; s < SLOTS; ++s) slots[s * pitch + offset] = moved.slot[s];
    }

    __device__ __forceinline__ void operator()(int k, int column, float sum) const {
        put(k, column, finish(sum, load(k, column)));
    }
};

}  // namespace mlpgpu
