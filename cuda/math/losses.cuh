// Losses and outputs: one struct for each row of the tables in mlpgpu/losses.py.  `row` gives a row's value in every
// lane of its team.  If a loss is a sum or a mean over outputs, `term` gives one output's part of it and its delta.
#pragma once

#include "math/activations.cuh"
#include "math/targets.cuh"
#include "math/teams.cuh"

namespace mlpgpu {

// A team's row: n logits z, targets t(j), and delta(j, d), which stores each output's delta.
template <class Team_, class Target, class Delta>
struct RowOf {
    using Team = Team_;
    const float* z;
    int n;
    Target target;
    Delta delta;
};

template <class Loss>
struct SumOfTerms {
    static constexpr int FEW_COLUMNS = 0;  // up to which LanesAlone is the faster team
    static constexpr int BATCH = 4;  // outputs whose loads are in flight together
    static __device__ __forceinline__ float term_weight(int) { return 1.0f; }  // of an output's term in its row

    template <class R>
    static __device__ __forceinline__ float row(const R& r) {
        const float scale = Loss::term_weight(r.n);
        constexpr int SIZE = R::Team::SIZE;
        float sum = 0.0f;
        for (int first = R::Team::rank(); first < r.n; first += BATCH * SIZE) {
            float z[BATCH], t[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int j = first + i * SIZE;
                z[i] = j < r.n ? r.z[j] : 0.0f;
                t[i] = j < r.n ? r.target(j) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int j = first + i * SIZE;
                if (j >= r.n) break;
                float delta;
                sum += Loss::term(z[i], t[i], delta);
                r.delta(j, delta * scale);
            }
        }
        return R::Team::sum(sum) * scale;
    }

    // The delta of a thread's output, for teams with a thread for each output.
    template <class Team, class Target>
    static __device__ __forceinline__ float delta(float z, bool, float t, int n) {
        float delta;
        Loss::term(z, t, delta);
        return delta * Loss::term_weight(n);
    }
};

template <class Loss>
struct MeanOfTerms : SumOfTerms<Loss> {
    static __device__ __forceinline__ float term_weight(int n) { return 1.0f / n; }
};

struct SquaredError : SumOfTerms<SquaredError> {
    static __device__ __forceinline__ float term(float z, float t, float& delta) {
        delta = z - t;
        return 0.5f * delta * delta;
    }
};

struct MeanSquaredError : MeanOfTerms<MeanSquaredError> {
    static __device__ __forceinline__ float term(float z, float t, float& delta) {
        delta = 2.0f * (z - t);
        return (z - t) * (z - t);
    }
};

struct AbsoluteError : MeanOfTerms<AbsoluteError> {
    static __device__ __forceinline__ float term(float z, float t, float& delta) {
        const float e = z - t;
        delta = e > 0.0f ? 1.0f : e < 0.0f ? -1.0f : e;  // the sign of NaN is NaN, as NumPy has it
        return fabsf(e);
    }
};

struct Huber : MeanOfTerms<Huber> {
    static __device__ __forceinline__ float term(float z, float t, float& delta) {
        const float e = z - t;
        delta = e > 1.0f ? 1.0f : e < -1.0f ? -1.0f : e;
        return delta * (e - 0.5f * delta);
    }
};

struct BinaryCrossEntropy : MeanOfTerms<BinaryCrossEntropy> {
    static __device__ __forceinline__ float term(float z, float t, float& delta) {
        delta = logistic(z) - t;
        return Softplus::forward(z) - z * t;
    }
};

// -Σ t log p; of an index t is 1 there and 0 elsewhere.
struct SoftmaxCrossEntropy {
    static constexpr int FEW_COLUMNS = 16;
    template <class R>
    static __device__ __forceinline__ float row(const R& r) {
        using Team = typename R::Team;
        const int first = Team::rank();
        float largest = -INFINITY;
        for (int j = first; j < r.n; j += Team::SIZE) largest = fmaxf(largest, r.z[j]);
        largest = Team::max(largest);
        float sum = 0.0f, mass = 0.0f, dot = 0.0f;
        for (int j = first; j < r.n; j += Team::SIZE) {
            const float shifted = r.z[j] - largest, t = r.target(j);
            sum += expf(shifted);
            mass += t;
            dot += r.target.times(t, shifted);
        }
        sum = Team::sum(sum), mass = Team::sum(mass), dot = Team::sum(dot);
        for (int j = Team::delta_rank(); j < r.n; j += Team::DELTA_SIZE)
            r.delta(j, mass * (expf(r.z[j] - largest) / sum) - r.target(j));
        return mass * logf(sum) - dot;
    }
    template <class Team, class Target>
    static __device__ __forceinline__ float delta(float z, bool is_there, float t, int) {
        const float largest = Team::max(is_there ? z : -INFINITY);
        const float power = is_there ? expf(z - largest) : 0.0f, sum = Team::sum(power);
        const float mass = Target::IS_CLASS ? 1.0f : Team::sum(is_there ? t : 0.0f);
        return mass * (power / sum) - t;
    }
};

// The value of a row of logits z (n,) times its weight, in every thread of the team; `store(j, d)` gets the deltas,
// times the weight too.
template <class Loss, class Team = WarpTeam, class Target, class Store>
__device__ __forceinline__ float weighted_row(const float* z, int n, const Target& target, float weight,
                                              const Store& store) {
    const auto delta = [=](int j, float d) { store(j, d * weight); };
    const RowOf<Team, Target, decltype(delta)> row = {z, n, target, delta};
    return Loss::row(row) * weight;
}

// --- outputs: the functions that make predictions of logits ---

struct IdentityOutput {
    template <class Team>
    static __device__ __forceinline__ void row(const float* z, float* y, int n) {
        for (int j = Team::rank(); j < n; j += Team::SIZE) y[j] = z[j];
    }
};

struct SigmoidOutput {
    template <class Team>
    static __device__ __forceinline__ void row(const float* z, float* y, int n) {
        for (int j = Team::rank(); j < n; j += Team::SIZE) y[j] = logistic(z[j]);
    }
};

struct SoftmaxOutput {
    template <class Team>
    static __device__ __forceinline__ void row(const float* z, float* y, int n) {
        float largest = -INFINITY;
        for (int j = Team::rank(); j < n; j += Team::SIZE) largest = fmaxf(largest, z[j]);
        largest = Team::max(largest);
        float sum = 0.0f;
        for (int j = Team::rank(); j < n; j += Team::SIZE) sum += expf(z[j] - largest);
        sum = Team::sum(sum);
        for (int j = Team::rank(); j < n; j += Team::SIZE) y[j] = expf(z[j] - largest) / sum;
    }
};

// All outputs, in the order of the table, for kernels that select one by its number.
template <class... Each>
struct OutputList {
    template <class Team>
    static __device__ __forceinline__ void row(int number, const float* z, float* y, int n) {
        int index = 0;
        ((number == index++ ? Each::template row<Team>(z, y, n) : static_cast<void>(0)), ...);
    }
};
using Outputs = OutputList<IdentityOutput, SigmoidOutput, SoftmaxOutput>;

}  // namespace mlpgpu
