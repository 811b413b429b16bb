// Losses and outputs: one struct for each form of a loss and each output in mlpgpu/losses.py.  `row` gives a row's value in every
// lane of its team.  If a loss is a sum or a mean over outputs, `term` gives one output's part of it and its delta.
#pragma once

#include "math/activations.cuh"
#include "math/targets.cuh"

namespace mlpgpu {

struct WarpTeam;  // math/teams.cuh

// The numbers of a loss, which a program keeps; mlpgpu/losses.py has their names.
struct LossNumbers {
    real delta;
    real level, level_rest;  // a rest is 1 minus the number, rounded once
    real label_smoothing, label_smoothing_rest;
    real gamma;
};

extern "C" {
__constant__ LossNumbers loss_numbers;
}

// What a thread has of two neighbouring outputs.
struct alignas(8) Pair {
    float of[2];
};

// Calls work(i) for each of a thread's pairs, STRIDE outputs apart, that a row of n may have.
template <int STRIDE, int PAIRS, class Work>
__device__ __forceinline__ void each_pair(int n, const Work& work) {
    constexpr int AT_ONCE = 2;  // between two looks at whether there are any more
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        if (i > 0 && i % AT_ONCE == 0 && i * STRIDE >= n) break;
        work(i);
    }
}

// A team's row: n logits z, targets t(j), and delta(j, d), which stores each output's delta. Of BATCH outputs of a thread the
// loads are in flight together. If it may keep some IN_REGISTERS, it takes pairs of neighbours, and delta.pairs<STRIDE>(j, of)
// stores those of outputs j and j + 1, j + STRIDE and j + STRIDE + 1, …; bits do not depend on how many it may keep.
template <class Team_, class Target_, class Delta, int BATCH_, int IN_REGISTERS_>
struct RowOf {
    using Team = Team_;
    using Target = Target_;
    static constexpr int BATCH = BATCH_, IN_REGISTERS = IN_REGISTERS_;
    static constexpr bool TAKES_PAIRS = IN_REGISTERS > 0;
    const float* z;
    int n;
    Target target;
    Delta delta;

    // Logits j and j + 1, j + STRIDE and j + STRIDE + 1, …, or `beyond` where there are none. Rows of even length begin at pairs.
    template <int STRIDE, int PAIRS>
    __device__ __forceinline__ void load(int j, float beyond, Pair (&to)[PAIRS]) const {
        if (n % 2 == 0) {
            each_pair<STRIDE, PAIRS>(n, [&](int i) {
                to[i] = j + i * STRIDE < n ? *reinterpret_cast<const Pair*>(z + j + i * STRIDE) : Pair{{beyond, beyond}};
            });
        } else {
            each_pair<STRIDE, PAIRS>(n, [&](int i) {
#pragma unroll
                for (int h = 0; h < 2; ++h) to[i].of[h] = j + i * STRIDE + h < n ? z[j + i * STRIDE + h] : beyond;
            });
        }
    }
    __device__ __forceinline__ float target_or_0(int j) const { return j < n ? target(j) : 0.0f; }
};

// Calls work(j, z) for every SIZE-th column j of a row from `rank` on, in order.
template <int SIZE, int BATCH, class R, class Work>
__device__ __forceinline__ void over_columns(const R& r, int rank, const Work& work) {
    for (int first = rank; first < r.n; first += BATCH * SIZE) {
        float z[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) z[i] = BATCH == 1 || first + i * SIZE < r.n ? r.z[first + i * SIZE] : 0.0f;
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (BATCH == 1 || first + i * SIZE < r.n) work(first + i * SIZE, z[i]);
    }
}

// The same for pairs of neighbours.
template <int SIZE, int BATCH, class R, class Work>
__device__ __forceinline__ void over_pairs(const R& r, int rank, const Work& work) {
    constexpr int STRIDE = 2 * SIZE, PAIRS = BATCH > 1 ? BATCH / 2 : 1;
    for (int first = 2 * rank; first < r.n; first += PAIRS * STRIDE) {
        Pair z[PAIRS];
        r.template load<STRIDE>(first, 0.0f, z);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            if (first + i * STRIDE < r.n) work(first + i * STRIDE, z[i]);
    }
}

template <class Loss>
struct SumOfTerms {
    static constexpr int FEW_COLUMNS = 0;  // up to which LanesAlone is the faster team
    static __device__ __forceinline__ real term_weight(int) { return 1.0f; }  // of an output's term in its row

    template <class R>
    static __device__ __forceinline__ float row(const R& r) {
        if constexpr (R::TAKES_PAIRS) return row_of_pairs(r);
        const float scale = Loss::term_weight(r.n);
        constexpr int SIZE = R::Team::SIZE, BATCH = R::BATCH > 4 ? R::BATCH : 4;
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

    template <class R>
    static __device__ __forceinline__ float row_of_pairs(const R& r) {
        const float scale = Loss::term_weight(r.n);
        constexpr int STRIDE = 2 * R::Team::SIZE, PAIRS = R::BATCH > 4 ? R::BATCH / 2 : 2;
        float sum = 0.0f;
        for (int first = 2 * R::Team::rank(); first < r.n; first += PAIRS * STRIDE) {
            Pair z[PAIRS], t[PAIRS], deltas[PAIRS];
            r.template load<STRIDE>(first, 0.0f, z);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) t[i].of[h] = r.target_or_0(first + i * STRIDE + h);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float delta;
                    const float term = Loss::term(z[i].of[h], t[i].of[h], delta);
                    const bool is_there = first + i * STRIDE + h < r.n;
                    sum += is_there ? term : 0.0f;
                    deltas[i].of[h] = is_there ? delta * scale : 0.0f;
                }
            r.delta.template pairs<STRIDE>(first, deltas);
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
    static __device__ __forceinline__ real term_weight(int n) { return real(1) / n; }
};

struct SquaredError : SumOfTerms<SquaredError> {
    static __device__ __forceinline__ real term(real z, real t, real& delta) {
        delta = z - t;
        return 0.5f * delta * delta;
    }
};

struct MeanSquaredError : MeanOfTerms<MeanSquaredError> {
    static __device__ __forceinline__ real term(real z, real t, real& delta) {
        delta = 2.0f * (z - t);
        return (z - t) * (z - t);
    }
};

struct AbsoluteError : MeanOfTerms<AbsoluteError> {
    static __device__ __forceinline__ real term(real z, real t, real& delta) {
        const real e = z - t;
        delta = e > 0.0f ? 1.0f : e < 0.0f ? -1.0f : e;  // the sign of NaN is NaN, as NumPy has it
        return fabsf(e);
    }
};

struct Huber : MeanOfTerms<Huber> {
    static __device__ __forceinline__ real term(real z, real t, real& delta) {
        const real e = z - t, limit = loss_numbers.delta;
        delta = e > limit ? limit : e < -limit ? -limit : e;
        return delta * (e - 0.5f * delta);
    }
};

struct Quantile : MeanOfTerms<Quantile> {
    static __device__ __forceinline__ real term(real z, real t, real& delta) {
        const real e = z - t;
        delta = e > 0.0f ? loss_numbers.level_rest : e < 0.0f ? -loss_numbers.level : e;
        return e * delta;
    }
};

struct Poisson : MeanOfTerms<Poisson> {
    static __device__ __forceinline__ real term(real z, real t, real& delta) {
        const real rate = expf(z);
        delta = rate - t;
        return rate - z * t;
    }
};

// Σ t (1 - p)^gamma s over both classes, with surprises s = -log p.
struct BinaryFocal : MeanOfTerms<BinaryFocal> {
    static __device__ __forceinline__ real term(real z, real t, real& delta) {
        const real gamma = loss_numbers.gamma, p1 = logistic(z), p0 = logistic(-z);
        const real s1 = Softplus::forward(-z), s0 = Softplus::forward(z);
        const real hard1 = t * expf(-gamma * s0), hard0 = (1.0f - t) * expf(-gamma * s1);  // t p0^gamma, …
        delta = hard0 * (p1 + gamma * (p0 * s0)) - hard1 * (p0 + gamma * (p1 * s1));
        return hard1 * s1 + hard0 * s0;
    }
};

struct BinaryCrossEntropy : MeanOfTerms<BinaryCrossEntropy> {
    static __device__ __forceinline__ real term(real z, real t, real& delta) {
        delta = logistic(z) - t;
        return Softplus::forward(z) - z * t;
    }
};

// A loss of the softmax p of a row: -Σ t log p. Loss::target says what t is of an output's target, and Loss::SPREADS_TARGETS
// whether that is anything else.
template <class Loss>
struct OfSoftmax {
    // Whether all targets are 0 but for one, of 1, which no column beyond n has.
    template <class R>
    static __device__ __forceinline__ constexpr bool has_one() {
        return R::Target::IS_CLASS && !Loss::SPREADS_TARGETS;
    }

    template <class R>
    static __device__ __forceinline__ float row(const R& r) {
        using Team = typename R::Team;
        constexpr int SIZE = Team::SIZE, BATCH = R::BATCH;
        if constexpr (R::TAKES_PAIRS) {
            constexpr int PAIRS = R::IN_REGISTERS / (has_one<R>() ? 2 : 4);  // targets take registers as well
            return r.n <= PAIRS * 2 * SIZE ? row_in_registers<PAIRS>(r) : row_of_pairs(r);
        }
        float largest = -INFINITY;
        over_columns<SIZE, BATCH>(r, Team::rank(), [&](int, float z) { largest = fmaxf(largest, z); });
        largest = Team::max(largest);
        float sum = 0.0f, mass = 0.0f, dot = 0.0f;
        over_columns<SIZE, BATCH>(r, Team::rank(), [&](int j, float z) {
            const float shifted = z - largest, t = Loss::target(r.target(j), r.n);
            sum += expf(shifted);
            mass += t;
            dot += Loss::times(r, t, shifted);
        });
        sum = Team::sum(sum), mass = Team::sum(mass), dot = Team::sum(dot);
        over_columns<Team::DELTA_SIZE, BATCH>(r, Team::delta_rank(), [&](int j, float z) {
            r.delta(j, mass * quotient(expf(z - largest), sum) - Loss::target(r.target(j), r.n));
        });
        return mass * logf(sum) - dot;
    }

    template <class R>
    static __device__ __forceinline__ float row_of_pairs(const R& r) {
        using Team = typename R::Team;
        constexpr int SIZE = Team::SIZE, BATCH = R::BATCH;
        float largest = -INFINITY, sum = 0.0f, mass = 0.0f, dot = 0.0f;
        const auto each = [&](auto work) {
            over_pairs<SIZE, BATCH>(r, Team::rank(), [&](int j, const Pair& z) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (j + h < r.n) work(j + h, z.of[h]);
            });
        };
        each([&](int, float z) { largest = fmaxf(largest, z); });
        largest = Team::max(largest);
        each([&](int j, float z) {
            const float shifted = z - largest, t = Loss::target(r.target(j), r.n);
            sum += expf(shifted);
            mass += t;
            dot += Loss::times(r, t, shifted);
        });
        sum = Team::sum(sum), mass = Team::sum(mass), dot = Team::sum(dot);
        const float inverse = mass * quotient(1.0f, sum);
        over_pairs<SIZE, BATCH>(r, Team::rank(), [&](int j, const Pair& z) {
            Pair deltas[1] = {};
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (j + h < r.n) deltas[0].of[h] = inverse * expf(z.of[h] - largest) - Loss::target(r.target(j + h), r.n);
            r.delta.template pairs<0>(j, deltas);
        });
        return mass * logf(sum) - dot;
    }

    // The same bits, by one load and one exponential of each logit: a thread holds those of PAIRS in registers.
    template <int PAIRS, class R>
    static __device__ __forceinline__ float row_in_registers(const R& r) {
        using Team = typename R::Team;
        constexpr int STRIDE = 2 * Team::SIZE;
        static_assert(Team::SIZE == Team::DELTA_SIZE);
        const int first = 2 * Team::rank();
        const auto each = [&](auto work) {
            each_pair<STRIDE, PAIRS>(r.n, [&](int i) {
#pragma unroll
                for (int h = 0; h < 2; ++h) work(i, h, first + i * STRIDE + h);
            });
        };
        Pair values[PAIRS];
        r.template load<STRIDE>(first, -INFINITY, values);
        float largest = -INFINITY, sum = 0.0f, mass = 0.0f, dot = 0.0f;
        each([&](int i, int h, int) { largest = fmaxf(largest, values[i].of[h]); });
        largest = Team::max(largest);
        constexpr bool HAS_ONE = has_one<R>();
        each([&](int i, int h, int j) {
            float& value = values[i].of[h];
            const bool is_there = HAS_ONE || j < r.n;
            const float shifted = is_there ? value - largest : 0.0f, t = is_there ? Loss::target(r.target(j), r.n) : 0.0f;
            value = is_there ? expf(shifted) : 0.0f;
            sum += value;
            dot = HAS_ONE ? (t != 0.0f ? shifted : dot) : dot + Loss::times(r, t, shifted);
            mass += t;
        });
        sum = Team::sum(sum), mass = HAS_ONE ? 1.0f : Team::sum(mass), dot = Team::sum(dot);
        const float inverse = mass * quotient(1.0f, sum);
        each([&](int i, int h, int j) {
            float& value = values[i].of[h];
            value = HAS_ONE || j < r.n ? inverse * value - Loss::target(r.target(j), r.n) : 0.0f;
        });
        r.delta.template pairs<STRIDE>(first, values);
        return mass * logf(sum) - dot;
    }
};

// Of an index t is 1 there and 0 elsewhere.
struct SoftmaxCrossEntropy : OfSoftmax<SoftmaxCrossEntropy> {
    static constexpr int FEW_COLUMNS = 16;
    static constexpr bool SPREADS_TARGETS = false;
    static __device__ __forceinline__ float target(float t, int) { return t; }
    template <class R>
    static __device__ __forceinline__ float times(const R& r, float t, float shifted) {
        return r.target.times(t, shifted);
    }
    template <class Team, class Target>
    static __device__ __forceinline__ float delta(float z, bool is_there, float t, int) {
        const float largest = Team::max(is_there ? z : -INFINITY);
        const float power = is_there ? expf(z - largest) : 0.0f, sum = Team::sum(power);
        const float mass = Target::IS_CLASS ? 1.0f : Team::sum(is_there ? t : 0.0f);
        return mass * quotient(power, sum) - t;
    }
};

// The same, of targets of which a share goes to all classes alike.
struct SmoothedSoftmaxCrossEntropy : OfSoftmax<SmoothedSoftmaxCrossEntropy> {
    static constexpr int FEW_COLUMNS = 0;
    static constexpr bool SPREADS_TARGETS = true;
    static __device__ __forceinline__ float target(float t, int n) {
        return loss_numbers.label_smoothing_rest * t + loss_numbers.label_smoothing / n;
    }
    template <class R>
    static __device__ __forceinline__ float times(const R&, float t, float shifted) {
        return t * shifted;
    }
    template <class Team, class Target>
    static __device__ __forceinline__ float delta(float z, bool is_there, float t, int n) {
        const float largest = Team::max(is_there ? z : -INFINITY);
        const float power = is_there ? expf(z - largest) : 0.0f, sum = Team::sum(power), to = target(t, n);
        return Team::sum(is_there ? to : 0.0f) * quotient(power, sum) - to;
    }
};

// Σ t (1 - p)^gamma s over classes, with surprises s = -log p.
struct Focal {
    static constexpr int FEW_COLUMNS = 0;
    struct Term {
        float value, slope;  // slope: its derivative by s, through p as well
    };
    // Of a class whose target is t; 0 for another class even if the surprise is infinite.
    static __device__ __forceinline__ Term term(float surprise, float t) {
        if (t == 0.0f) return {0.0f, 0.0f};
        const float gamma = loss_numbers.gamma, rest = -expm1f(-surprise), hard = powf(rest, gamma);
        const float ratio = rest != 0.0f ? surprise / rest : 1.0f;
        return {t * (hard * surprise), t * (hard * (1.0f + gamma * (expf(-surprise) * ratio)))};
    }
    template <class R>
    static __device__ __forceinline__ float row(const R& r) {
        using Team = typename R::Team;
        const int first = Team::rank();
        float largest = -INFINITY, sum = 0.0f, value = 0.0f, slope = 0.0f;
        for (int j = first; j < r.n; j += Team::SIZE) largest = fmaxf(largest, r.z[j]);
        largest = Team::max(largest);
        for (int j = first; j < r.n; j += Team::SIZE) sum += expf(r.z[j] - largest);
        sum = Team::sum(sum);
        const float log_sum = logf(sum);
        for (int j = first; j < r.n; j += Team::SIZE) {
            const Term found = term(log_sum - (r.z[j] - largest), r.target(j));
            value += found.value, slope += found.slope;
        }
        value = Team::sum(value), slope = Team::sum(slope);
        for (int j = Team::delta_rank(); j < r.n; j += Team::DELTA_SIZE) {
            const float shifted = r.z[j] - largest;
            r.delta(j, quotient(expf(shifted), sum) * slope - term(log_sum - shifted, r.target(j)).slope);
        }
        return value;
    }
    template <class Team, class Target>
    static __device__ __forceinline__ float delta(float z, bool is_there, float t, int) {
        const float shifted = z - Team::max(is_there ? z : -INFINITY);
        const float power = is_there ? expf(shifted) : 0.0f, sum = Team::sum(power);
        const float slope = is_there ? term(logf(sum) - shifted, t).slope : 0.0f;
        return quotient(power, sum) * Team::sum(slope) - slope;
    }
};

// Stores deltas times their row's weight.
template <class Store>
struct WeightedDelta {
    Store store;
    float weight;
    int n;
    __device__ __forceinline__ void operator()(int j, float d) const { store(j, d * weight); }
    template <int STRIDE, int PAIRS>
    __device__ __forceinline__ void pairs(int j, Pair (&of)[PAIRS]) const {
        each_pair<STRIDE, PAIRS>(n, [&](int i) { of[i].of[0] *= weight, of[i].of[1] *= weight; });
        store.template pairs<STRIDE>(j, of);
    }
};

// The value of a row of logits z (n,) times its weight, in every thread of the team; `store(j, d)` gets the deltas,
// times the weight too, and store.pairs<STRIDE>(j, of) those of pairs.
template <class Loss, class Team = WarpTeam, int BATCH = 1, int IN_REGISTERS = 0, class Target, class Store>
__device__ __forceinline__ float weighted_row(const float* z, int n, const Target& target, float weight,
                                              const Store& store) {
    const WeightedDelta<Store> delta = {store, weight, n};
    const RowOf<Team, Target, WeightedDelta<Store>, BATCH, IN_REGISTERS> row = {z, n, target, delta};
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

struct ExpOutput {
    template <class Team>
    static __device__ __forceinline__ void row(const float* z, float* y, int n) {
        for (int j = Team::rank(); j < n; j += Team::SIZE) y[j] = expf(z[j]);
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
        for (int j = Team::rank(); j < n; j += Team::SIZE) y[j] = quotient(expf(z[j] - largest), sum);
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
using Outputs = OutputList<IdentityOutput, SigmoidOutput, SoftmaxOutput, ExpOutput>;

}  // namespace mlpgpu
