// Losses: a row's value and its delta, both times the row's weight, in one pass over the logits.
//
// A warp takes a row, or, where rows are very wide, a block.  Targets are read through a texture object straight from the data set, by the
// order's row: dense targets as they are, class numbers as floats, exact up to 2^24.  Sets that are more
// than a texture reaches are read by plain loads.
#pragma once

#include "common/reduce.cuh"
#include "common/step.cuh"
#include "math/activations.cuh"
#include "gemm/operands.cuh"

namespace mlpgpu {

// Who takes a row: the threads of a warp, or of a block.  All of them get a sum or a maximum.
struct WarpTeam {
    static constexpr int SIZE = WARP, DELTA_SIZE = SIZE;
    static __device__ __forceinline__ int rank() { return threadIdx.x % WARP; }
    static __device__ __forceinline__ int delta_rank() { return rank(); }
    static __device__ __forceinline__ float sum(float value) { return warp_sum(value); }
    static __device__ __forceinline__ float max(float value) { return warp_max(value); }
};

// A warp each of whose lanes goes through all columns by itself, but takes the deltas of its own ones alone: of few
// columns, that takes less time than to meet for sums.
struct LanesAlone {
    static constexpr int SIZE = 1, DELTA_SIZE = WARP;
    static __device__ __forceinline__ int rank() { return 0; }
    static __device__ __forceinline__ int delta_rank() { return threadIdx.x % WARP; }
    static __device__ __forceinline__ float sum(float value) { return value; }
    static __device__ __forceinline__ float max(float value) { return value; }
};

struct BlockTeam {
    static constexpr int SIZE = WARP * WARP, DELTA_SIZE = SIZE;
    static __device__ __forceinline__ int rank() { return threadIdx.x; }
    static __device__ __forceinline__ int delta_rank() { return rank(); }
    static __device__ __forceinline__ float sum(float value) { return warp_sum(of_warps(warp_sum(value))); }
    static __device__ __forceinline__ float max(float value) { return warp_max(of_warps(warp_max(value))); }

    // The value of each warp, in the lane of its number.
    static __device__ __forceinline__ float of_warps(float value) {
        SHARED(float, scratch);
        if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
        __syncthreads();
        value = scratch[threadIdx.x % WARP];
        __syncthreads();
        return value;
    }
};

// Half a warp, whose other half does the same.
struct HalfWarpTeam {
    static constexpr int SIZE = WARP / 2, DELTA_SIZE = SIZE;
    static __device__ __forceinline__ int rank() { return threadIdx.x % SIZE; }
    static __device__ __forceinline__ int delta_rank() { return rank(); }
    static __device__ __forceinline__ float sum(float value) {
        for (int offset = SIZE / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(WARP_ALL, value, offset);
        return value;
    }
    static __device__ __forceinline__ float max(float value) {
        for (int offset = SIZE / 2; offset > 0; offset /= 2)
            value = fmaxf(value, __shfl_xor_sync(WARP_ALL, value, offset));
        return value;
    }
};

// A team's row: n logits z, targets t(j), and delta(j, d) to put each output's delta away.
template <class Team_, class Target, class Delta>
struct RowOf {
    using Team = Team_;
    const float* z;
    int n;
    Target target;
    Delta delta;
};

// Each struct that follows is a row of the table in mlpgpu/losses.py: `row` gives the row's value in every
// lane.  Where a loss is a sum or a mean over outputs, `term` gives one output's share of it and its delta.

template <class Loss>
struct SumOfTerms {
    static constexpr int FEW_COLUMNS = 0;  // as many as LanesAlone is quick with
    static constexpr int BATCH = 4;  // outputs whose loads are on their way together
    static __device__ __forceinline__ float term_weight(int) { return 1.0f; }  // what an output's term counts in its row

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

    // The delta of the output that a thread of the team holds, if there is one.
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

// How a target is found: a class number for each row, or n numbers.  Source is Texture or const float*.
template <class Source>
struct Index {
    static constexpr bool IS_CLASS = true;  // targets are 0 but for a 1
    Source texture;
    int64_t row;
    int n;
    const float* mean;
    const float* scale;
    static __host__ __device__ constexpr int count(int) { return 1; }  // of numbers that are a row's target
    __device__ __forceinline__ float operator()(int j) const { return texel(texture, row) == static_cast<float>(j) ? 1.0f : 0.0f; }
    // t · value; of another class it is 0 even where the value is infinite.
    static __device__ __forceinline__ float times(float t, float value) { return t != 0.0f ? value : 0.0f; }
};

template <class Source>
struct DenseTarget {
    static constexpr bool IS_CLASS = false;
    Source texture;
    int64_t row;
    int n;
    const float* mean;  // of standardized targets, or null
    const float* scale;
    static __host__ __device__ constexpr int count(int n) { return n; }
    __device__ __forceinline__ float operator()(int j) const {
        const float t = texel(texture, row * n + j);
        return scale ? (t - mean[j]) / scale[j] : t;
    }
    static __device__ __forceinline__ float times(float t, float value) { return t * value; }
};

// The value of a row of logits z (n,) times its weight, in every thread of the team that takes it; `store(j, d)`
// gets its deltas, times the weight too.
template <class Loss, class Team = WarpTeam, class Target, class Store>
__device__ __forceinline__ float weighted_row(const float* z, int n, const Target& target, float weight,
                                              const Store& store) {
    const auto delta = [=](int j, float d) { store(j, d * weight); };
    const RowOf<Team, Target, decltype(delta)> row = {z, n, target, delta};
    return Loss::row(row) * weight;
}

// Adds the blocks' sums of all shards up, in order, to totals (2,), and to the run's losses (steps, 2).
// Grid: one block.
__device__ __forceinline__ void total_error(const Step* step, const double* sums, int count, double* totals,
                                            double* losses) {
    SHARED(double, scratch);
    double value = 0.0, weight = 0.0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        value += sums[2 * i];
        weight += sums[2 * i + 1];
    }
    value = block_sum(value, scratch);
    __syncthreads();
    weight = block_sum(weight, scratch);
    if (threadIdx.x == 0) {
        totals[0] = losses[2 * step->run] = value;
        totals[1] = losses[2 * step->run + 1] = weight;
    }
}

// Of many steps at once: the sums over a step's rows of their values and weights, errors (steps of a run, capacity, 2),
// to the run's losses (steps, 2).  Grid: a block for each step.
__device__ __forceinline__ void step_errors(const Step* step, const float* errors, int capacity, double* losses) {
    SHARED(double, scratch);
    Step its = *step;
    its.batch += blockIdx.x;
    const float* const own = errors + 2ll * capacity * (its.run + blockIdx.x);
    double value = 0.0, weight = 0.0;
    for (int row = threadIdx.x; row < batch_rows(its); row += blockDim.x)
        value += own[2 * row], weight += own[2 * row + 1];
    value = block_sum(value, scratch);
    __syncthreads();
    weight = block_sum(weight, scratch);
    if (threadIdx.x == 0) {
        losses[2 * (its.run + blockIdx.x)] = value;
        losses[2 * (its.run + blockIdx.x) + 1] = weight;
    }
}

// A block leaves its summed value and weight in sums (blocks, 2), given each thread's part of them; and unless
// `totals` is null, the last block to do so adds all of them up in `finish`, which may come much later.
struct Total {
    const Step* step;
    double* sums;
    double* totals;
    double* losses;
    Arrival arrival;

    __device__ __forceinline__ Total(const Step* step, double value, double weight, double* sums, unsigned* arrived,
                                     double* totals, double* losses)
        : step(step), sums(sums), totals(totals), losses(losses), arrival() {
        SHARED(double, scratch);
        value = block_sum(value, scratch);
        __syncthreads();
        weight = block_sum(weight, scratch);
        if (threadIdx.x == 0) {
            const int block = blockIdx.y * gridDim.x + blockIdx.x;
            sums[2 * block] = value;
            sums[2 * block + 1] = weight;
        }
        if (totals) arrival = arrive(arrived);
    }

    __device__ __forceinline__ void finish() const {
        SHARED(double, scratch);
        const unsigned blocks = gridDim.x * gridDim.y;
        if (totals && was_last(arrival, scratch, blocks)) total_error(step, sums, blocks, totals, losses);
    }
};

// value (B,) and delta (B, n) of logits (B, n), times weights (data rows,), which may be null.  delta is left as
// floats, as so many planes of bfloat16 (gemm/operands.cuh), or in an evaluation not at all: what is null is not wanted.
// Grid: as many teams as the capacity has rows, or as planes pad it to.
template <class Loss, class Target, class Team, class Source>
__device__ __forceinline__ void loss(const Step* step, int shard, int shards, const int* order, const float* logits,
                                     Source targets, const float* weights, const float* mean, const float* scale,
                                     float* delta, double* sums, unsigned* arrived, double* totals, double* losses,
                                     uint16_t* planes, int64_t plane, int plane_count, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int row = blockIdx.x * (blockDim.x / Team::SIZE) + threadIdx.x / Team::SIZE;
    uint16_t* const held = planes ? planes + row * static_cast<int64_t>(padded_columns(n)) : nullptr;
    double value = 0.0, weight = 0.0;
    if (row < rows.count) {
        const int64_t at = rows.first + row, from = order[rows.order + at];
        const float w = weights ? weights[from] : 1.0f;
        float* const out = delta ? delta + at * n : nullptr;
        const Target target = {targets, from, n, mean, scale};
        const float v = weighted_row<Loss, Team>(logits + at * n, n, target, w, [=](int j, float d) {
            if (out) out[j] = d;
            const float2 pair[1] = {make_float2(d, 0.0f)};
            unsigned words[MOST_PLANES][1];
            if (held) hold_bfloats(pair, plane_count, words);
#pragma unroll
            for (int p = 0; held && p < MOST_PLANES; ++p)
                if (p < plane_count) held[p * plane + j] = static_cast<uint16_t>(words[p][0]);
        });
        if (Team::rank() == 0) value = v, weight = w;
    } else if (held && row < padded_rows(rows.count)) {
        for (int p = 0; p < plane_count; ++p)
            for (int j = Team::rank(); j < n; j += Team::SIZE) held[p * plane + j] = 0;
    }
    Total(step, value, weight, sums, arrived, totals, losses).finish();
}

// Predictions y (B, n) of logits: the loss's output function, then scaled back where targets were
// standardized.  Grid: as for loss.
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

template <class Output, class Team>
__device__ __forceinline__ void output(const Step* step, int shard, int shards, const float* logits, const float* mean,
                                       const float* scale, float* y, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int row = blockIdx.x * (blockDim.x / Team::SIZE) + threadIdx.x / Team::SIZE;
    if (row >= rows.count) return;
    const int64_t at = static_cast<int64_t>(rows.first + row) * n;
    Output::template row<Team>(logits + at, y + at, n);
    if (scale)
        for (int j = Team::rank(); j < n; j += Team::SIZE) y[at + j] = y[at + j] * scale[j] + mean[j];
}

}  // namespace mlpgpu
