// Many training steps as one call, by several threads.
//
// A step is a list of phases, and a phase a list of calls for each of its parts, such as some rows of the batch or some
// rows of a weight.  Parts of a phase may be computed side by side; a phase begins once the one before it has ended.
// What each part consists of follows from the number of parts alone, and never from who computes it: each thread has a
// part that it takes first, since its cache holds what that part read last, and takes one that nobody has begun
// otherwise.  So nobody waits for a thread that is not there, and the bits are those of one thread.
#pragma once

#include <vector>

#include "loops.h"
#include "threads.h"

namespace mlpgpu {

// A data set, and where its rows lie.
struct Feed {
    Copy inputs;     // without a list of rows; x is null where somebody else has gathered the batch
    double scale;    // of each input, 0 if none
    const void* targets;  // class numbers, or (rows, target_width)
    int64_t target_width;  // 0: class numbers
    const real* weights;  // (rows,) or null
    int64_t is_standardized;  // whether inputs are standardized as they are gathered, by whomever
};

struct Part {
    const Call* calls;
    int64_t count;
};

struct Phase {
    const Part* parts;
};

// What differs from step to step.
struct TrainingStep {
    const Phase* phases;
    int64_t phase_count;
    const int64_t *batch, *storage;  // the batch's rows in the data set, and in the array of inputs
    uint64_t number, seed;
    double scale, inverse_weight;  // of an update that is called by itself: what `total` finds otherwise
    real rates[RATES_PER_STEP + 1];
    double loss, weight;  // of the batch, once it is computed
};

// The step that this thread computes a call of, and by what it multiplies gradients, and an update's penalty, in it.
static thread_local const TrainingStep* this_step;
static thread_local double gradient_scale, penalty_scale;

// Copies `count` rows from place `first` on, of the copy's list where it has one, to `to` (count, columns): times a scale
// unless it is 0, or standardized.
inline void copy_rows(const Copy* given, real scale, int64_t first, int64_t count, real* to) {
    Copy copy = *given;
    copy.first = first, copy.count = count, copy.to = reinterpret_cast<char*>(to);
    constexpr int64_t ELEMENTS = CHUNK_BYTES / sizeof(real);
    int64_t left = count * copy.columns;
    for (int64_t chunk = 0; left > 0; ++chunk, left -= ELEMENTS, to += ELEMENTS) {
        copy_chunk<real>(copy, chunk);
        if (scale == 0) continue;
        EACH for (int64_t i = 0; i < (left < ELEMENTS ? left : ELEMENTS); ++i) to[i] *= scale;
    }
}

// --- calls that read the step ---

// Copies the batch's rows from `first` on, `count` of them: inputs to x (count, columns), or standardized ones to
// `standardized` where the feed standardizes, and targets and weights where there are any.
inline void gather(const Feed* feed, int64_t first, int64_t count, real* x, real* standardized, void* target,
                   real* weight) {
    if (!feed->inputs.x) return;
    Copy inputs = feed->inputs;
    inputs.rows = this_step->storage;
    copy_rows(&inputs, static_cast<real>(feed->scale), first, count, inputs.mean ? standardized : x);
    const int64_t *rows = this_step->batch + first, width = feed->target_width;
    if (!feed->targets) target = nullptr;
    if (target && !width) {
        for (int64_t i = 0; i < count; ++i)
            static_cast<int64_t*>(target)[i] = static_cast<const int64_t*>(feed->targets)[rows[i]];
    } else if (target) {
        for (int64_t i = 0; i < count; ++i)
            memcpy(static_cast<real*>(target) + i * width, static_cast<const real*>(feed->targets) + rows[i] * width,
                   width * sizeof(real));
    }
    if (weight && feed->weights) {
        for (int64_t i = 0; i < count; ++i) weight[i] = feed->weights[rows[i]];
    }
}

// As `standardize`, of inputs that `gather` may have standardized.
inline void standardize_inputs(const Feed* feed, const real* x, const real* mean, const real* scale, real* y,
                               int64_t rows, int64_t n) {
    if (!feed->is_standardized) standardize(x, mean, scale, y, rows, n);
}

// As `weigh`, by weights where the data set has some.
inline void weigh_rows(const Feed* feed, const real* weight, real* value, real* delta, int64_t rows, int64_t n,
                       double* sums) {
    weigh(feed->weights ? weight : nullptr, value, delta, rows, n, sums);
}

// As `dropout`, in this step.
inline void dropout_step(const real* x, real* mask, real* y, int64_t first, int64_t pitch, int64_t rows, int64_t n,
                         int64_t layer, int64_t least, real keep) {
    const uint64_t seed_and_step[] = {this_step->seed, static_cast<uint64_t>(this_step->number)};
    dropout(x, mask, y, first, pitch, rows, n, seed_and_step, layer, least, keep);
}

// Adds up the sums (parts, 2) of loss and weight, for what this part calls next; one part `tells` the step of them.
inline void total(const double* sums, int64_t parts, int64_t tells) {
    double loss = 0.0, weight = 0.0;
    for (int64_t i = 0; i < parts; ++i) loss += sums[2 * i], weight += sums[2 * i + 1];
    gradient_scale = penalty_scale = weight > 0.0 ? 1.0 / weight : 0.0;
    if (tells) {
        TrainingStep* step = const_cast<TrainingStep*>(this_step);
        step->loss = loss, step->weight = weight;
    }
}

// sum = the sum of the squares of x, in float64, where the square of no float32 overflows.
inline void square_sum(const real* x, int64_t count, double* sum) {
    double found = 0.0;
#pragma omp simd reduction(+ : found)
    for (int64_t i = 0; i < count; ++i) found += static_cast<double>(x[i]) * x[i];
    *sum = found;
}

// Scales what this part moves next, so that the gradient, of which `squares` (parts,) are sums, is no longer than `limit`.
inline void clip(const double* squares, int64_t parts, double limit) {
    double sum = 0.0;
    for (int64_t i = 0; i < parts; ++i) sum += squares[i];
    const double length = sqrt(sum) * gradient_scale;
    if (length > limit) gradient_scale *= limit / length;
}

// As `update`, by this step's rates and weight.  The penalty `alpha` is over the batch's weight, as the gradient is.
template <class Rule>
void update_step(real* w, const real* sum, real* slots, int64_t pitch, int64_t count, double l2, double alpha,
                 const Hyper* numbers) {
    Hyper own = *numbers;
    own.l2 = static_cast<real>(l2 + alpha * penalty_scale);
    update<Rule>(w, sum, slots, pitch, count, static_cast<real>(gradient_scale), this_step->rates, &own);
}

// --- who computes what ---

// Calls in order, on the calling thread; `step` may be null where none of them reads it.
extern "C" void run(const Call* calls, int64_t count, const TrainingStep* step) {
    const NoDenormals guard;
    this_step = step;
    if (step) gradient_scale = step->scale, penalty_scale = step->inverse_weight;
    for (int64_t i = 0; i < count; ++i) calls[i].function(calls[i].words);
}

struct Team {
    struct alignas(APART) Turn {
        std::atomic<int64_t> next{0};  // the phase of which nobody has taken this part yet
    };
    const TrainingStep* steps;
    int64_t step_count, parts;
    std::vector<Turn> turns;
    alignas(APART) std::atomic<int64_t> done{0};  // parts of all phases so far

    Team(const TrainingStep* steps, int64_t step_count, int64_t parts)
        : steps(steps), step_count(step_count), parts(parts), turns(parts) {}

    // Waits until so many parts are done.
    void await(int64_t count) const {
        for (int i = 0; done.load(std::memory_order_acquire) < count; ++i) wait_a_little(i);
    }

    // Takes parts, `own` before others, until all steps are done or have been taken by others.
    void compute(int64_t own) {
        const NoDenormals guard;
        int64_t number = 0;  // of the phase, over all steps
        for (const TrainingStep* step = steps; step < steps + step_count; ++step) {
            this_step = step;
            for (const Phase* phase = step->phases; phase < step->phases + step->phase_count; ++phase, ++number) {
                await(number * parts);
                for (int64_t i = 0; i < parts; ++i) {
                    const int64_t place = own + i < parts ? own + i : own + i - parts;
                    int64_t expected = number;
                    if (turns[place].next.load(std::memory_order_relaxed) != number ||
                        !turns[place].next.compare_exchange_strong(expected, number + 1, std::memory_order_relaxed))
                        continue;
                    const Part& part = phase->parts[place];
                    for (int64_t call = 0; call < part.count; ++call) part.calls[call].function(part.calls[call].words);
                    done.fetch_add(1, std::memory_order_acq_rel);
                }
            }
        }
    }
};

inline void compute_beside(void* team, int64_t piece) {
    leave(pool.caller_core.load(std::memory_order_relaxed));
    static_cast<Team*>(team)->compute(piece + 1);
}

// Steps whose phases have so many parts each, with up to so many helpers, fewer than parts, that stay awake for so long
// after it; `finished` is their number once they are.
extern "C" void run_steps(const TrainingStep* steps, int64_t count, int64_t parts, int64_t helpers,
                          int64_t awake_nanoseconds, int64_t* finished) {
    Team team(steps, count, parts);
    Job job = {compute_beside, &team, helpers, -1, 0};
    if (helpers) begin(job, helpers, awake_nanoseconds);
    team.compute(0);
    int64_t phases = 0;
    for (const TrainingStep* step = steps; step < steps + count; ++step) phases += step->phase_count;
    team.await(phases * parts);
    if (helpers) take_back(job);
    *finished = count;
}

}  // namespace mlpgpu
