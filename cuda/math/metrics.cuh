// What metrics are made of: one struct for each row of the table in mlpgpu/metrics/sums.py, which says what the sums are.
#pragma once

#include "common/reduce.cuh"
#include "common/step.cuh"

namespace mlpgpu {

// --- classes ---

// Whether a comes before b in the search for the largest; NaN is the largest, as in NumPy's argmax.
__device__ __forceinline__ bool ranks_above(float a, float b) { return a > b || (a != a && b == b); }

// The class of a row of n values x(j), in every lane: the first of the largest; or, if one value distinguishes two
// classes, whether it is over 1/2.
template <class Row>
__device__ __forceinline__ int class_of(Row x, int n, int classes, int lane) {
    if (classes > n) return x(0) > 0.5f;
    float largest = -INFINITY;
    int position = n;
    for (int j = lane; j < n; j += WARP) {
        const float value = x(j);
        if (position == n || ranks_above(value, largest)) largest = value, position = j;
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(WARP_ALL, largest, offset);
        const int other_position = __shfl_xor_sync(WARP_ALL, position, offset);
        const bool is_first_of_equals = !ranks_above(largest, other) && other_position < position;
        if (ranks_above(other, largest) || is_first_of_equals) largest = other, position = other_position;
    }
    return position;
}

// How many of n values x(j) come before that of a class, in every lane: the higher ones, and of equal ones those of
// higher numbers; of one value that distinguishes two classes, whether it tells the other one.
template <class Row>
__device__ __forceinline__ int rank_of_class(Row x, int n, int actual, int lane) {
    if (n == 1) return (x(0) > 0.5f) != (actual != 0);
    const float value = x(actual);
    int rank = 0;
    for (int j = lane; j < n; j += WARP) rank += ranks_above(x(j), value) || (j > actual && !ranks_above(value, x(j)));
    for (int offset = WARP / 2; offset > 0; offset /= 2) rank += __shfl_xor_sync(WARP_ALL, rank, offset);
    return rank;
}

// --- what metrics take of a batch ---

struct Batch {
    Rows rows;
    const int* order;
    const float* weights;  // (data rows,), or null for ones
    double* scratch;       // one for each warp

    __device__ __forceinline__ int64_t data_row(int64_t row) const { return order[rows.order + row]; }
    __device__ __forceinline__ double weight(int64_t row) const { return weights ? weights[data_row(row)] : 1.0; }

    // Σ term(i) over i < count, in every thread of the block.
    template <class Term>
    __device__ __forceinline__ double sum(int64_t count, Term term) const {
        double value = 0.0;
        for (int64_t i = threadIdx.x; i < count; i += blockDim.x) value += term(i);
        value = block_sum(value, scratch);
        __syncthreads();
        if (threadIdx.x == 0) scratch[0] = value;
        __syncthreads();
        value = scratch[0];
        __syncthreads();
        return value;
    }

    __device__ __forceinline__ double weight_sum() const {
        return sum(rows.count, [=](int64_t row) { return weight(row); });
    }
};

// Class numbers (B,), which the kernel `classes` makes.
struct Classes {
    const int* output;
    const int* target;
    int n;
};

// Predictions (B, n), and the data set's targets (data rows, n).
template <class Source>
struct Numbers {
    const float* output;
    Source targets;
    int n;

    __device__ __forceinline__ float target(const Batch& batch, int64_t row, int column) const {
        return texel(targets, batch.data_row(row) * n + column);
    }
};

// Probabilities (B, n), and the data set's targets as losses read them.
template <class Target, class Source>
struct Probabilities {
    const float* output;
    Source targets;
    int n;

    __device__ __forceinline__ Target target(const Batch& batch, int64_t row) const {
        return {targets, batch.data_row(row), n, nullptr, nullptr};
    }
};

// --- metrics by batches: `add` adds a batch to the block's column of the sums, whose rows lie `columns` apart ---

struct AccuracyMetric {
    static __device__ __forceinline__ void add(const Batch& batch, const Classes& of, double* sums, int) {
        const double right = batch.sum(
            batch.rows.count, [=](int64_t row) { return of.output[row] == of.target[row] ? batch.weight(row) : 0.0; });
        const double weight = batch.weight_sum();
        if (threadIdx.x == 0) sums[0] += right, sums[1] += weight;
    }
};

// The mean of a measure of the error over a row's numbers.
template <class Measure>
struct ErrorMetric {
    template <class Source>
    static __device__ __forceinline__ void add(const Batch& batch, const Numbers<Source>& of, double* sums, int) {
        const double error = batch.sum(static_cast<int64_t>(batch.rows.count) * of.n, [=](int64_t i) {
            const int64_t row = i / of.n;
            return batch.weight(row) * Measure::of(of.output[i] - of.target(batch, row, static_cast<int>(i % of.n)));
        });
        const double weight = batch.weight_sum();
        if (threadIdx.x == 0) sums[0] += error / of.n, sums[1] += weight;
    }
};

struct Magnitude {
    static __device__ __forceinline__ float of(float error) { return fabsf(error); }
};

struct Square {
    static __device__ __forceinline__ float of(float error) { return error * error; }
};

using MeanAbsoluteErrorMetric = ErrorMetric<Magnitude>;
using MeanSquaredErrorMetric = ErrorMetric<Square>;

// For each output: total weight, residual, mean and spread; merged as by Chan et al. (1983).
struct R2Metric {
    template <class Source>
    static __device__ __forceinline__ void add(const Batch& batch, const Numbers<Source>& of, double* sums,
                                               int columns) {
        const int column = blockIdx.x, count = batch.rows.count;
        const double weight = batch.weight_sum();
        if (weight == 0.0) return;
        const auto target = [=](int64_t row) { return static_cast<double>(of.target(batch, row, column)); };
        const double mean =
            batch.sum(count, [=](int64_t row) { return batch.weight(row) * target(row); }) / weight;
        const double residual = batch.sum(count, [=](int64_t row) {
            const double e = of.output[row * of.n + column] - target(row);
            return batch.weight(row) * e * e;
        });
        const double spread = batch.sum(count, [=](int64_t row) {
            const double e = target(row) - mean;
            return batch.weight(row) * e * e;
        });
        if (threadIdx.x != 0) return;
        const int64_t pitch = columns;
        const double total = sums[0], shift = mean - sums[2 * pitch], part = weight / (total + weight);
        sums[0] = total + weight;
        sums[pitch] += residual;
        sums[2 * pitch] += shift * part;
        sums[3 * pitch] += spread + shift * shift * total * part;
    }
};

// Row: the true class; column: the predicted one.  A warp takes a cell.
struct ConfusionMatrixMetric {
    static __device__ __forceinline__ void add(const Batch& batch, const Classes& of, double* sums, int columns) {
        const int predicted = blockIdx.x, lane = threadIdx.x % WARP;
        for (int actual = threadIdx.x / WARP; actual < of.n; actual += blockDim.x / WARP) {
            double weight = 0.0;
            for (int row = lane; row < batch.rows.count; row += WARP)
                if (of.target[row] == actual && of.output[row] == predicted) weight += batch.weight(row);
            weight = warp_sum(weight);
            if (lane == 0) sums[static_cast<int64_t>(actual) * columns] += weight;
        }
    }
};

// The rows whose true class has the block's column as its rank.
struct TrueClassRanksMetric {
    static __device__ __forceinline__ void add(const Batch& batch, const Classes& of, double* sums, int) {
        const int rank = blockIdx.x;
        const double weight =
            batch.sum(batch.rows.count, [=](int64_t row) { return of.output[row] == rank ? batch.weight(row) : 0.0; });
        if (threadIdx.x == 0) sums[0] += weight;
    }
};

// A probability as far from 0 and 1 as float32 tells numbers near 1 apart, so that logarithms are finite.
__device__ __forceinline__ double clipped(float p) {
    constexpr float MARGIN = 1.1920929e-7f;
    return p < MARGIN ? MARGIN : p > 1.0f - MARGIN ? 1.0f - MARGIN : p;
}

// Σ -t log p over a row's classes.
struct LogLossMetric {
    template <class Target, class Source>
    static __device__ __forceinline__ void add(const Batch& batch, const Probabilities<Target, Source>& of,
                                               double* sums, int) {
        const double surprise = batch.sum(static_cast<int64_t>(batch.rows.count) * of.n, [=](int64_t i) {
            const int64_t row = i / of.n;
            const float t = of.target(batch, row)(static_cast<int>(i % of.n));
            return t != 0.0f ? -batch.weight(row) * (t * log(clipped(of.output[i]))) : 0.0;
        });
        const double weight = batch.weight_sum();
        if (threadIdx.x == 0) sums[0] += surprise, sums[1] += weight;
    }
};

struct BinaryLogLossMetric {
    template <class Source>
    static __device__ __forceinline__ void add(const Batch& batch, const Numbers<Source>& of, double* sums, int) {
        const double surprise = batch.sum(static_cast<int64_t>(batch.rows.count) * of.n, [=](int64_t i) {
            const int64_t row = i / of.n;
            const double t = of.target(batch, row, static_cast<int>(i % of.n)), p = clipped(of.output[i]);
            return -batch.weight(row) * (t * log(p) + (1.0 - t) * log(1.0 - p));
        });
        const double weight = batch.weight_sum();
        if (threadIdx.x == 0) sums[0] += surprise / of.n, sums[1] += weight;
    }
};

// Of the block's label: rows that have it and are given it, that are given it, that have it, all rows.
struct LabelCountsMetric {
    template <class Source>
    static __device__ __forceinline__ void add(const Batch& batch, const Numbers<Source>& of, double* sums,
                                               int columns) {
        const int label = blockIdx.x, count = batch.rows.count;
        const auto given = [=](int64_t row) { return of.output[row * of.n + label] > 0.5f; };
        const auto there = [=](int64_t row) { return of.target(batch, row, label) > 0.5f; };
        const double hits =
            batch.sum(count, [=](int64_t row) { return given(row) && there(row) ? batch.weight(row) : 0.0; });
        const double predicted = batch.sum(count, [=](int64_t row) { return given(row) ? batch.weight(row) : 0.0; });
        const double actual = batch.sum(count, [=](int64_t row) { return there(row) ? batch.weight(row) : 0.0; });
        const double weight = batch.weight_sum();
        if (threadIdx.x != 0) return;
        const int64_t pitch = columns;
        sums[0] += hits, sums[pitch] += predicted, sums[2 * pitch] += actual, sums[3 * pitch] += weight;
    }
};

// The rows of which all labels are right.
struct ExactMatchesMetric {
    template <class Source>
    static __device__ __forceinline__ void add(const Batch& batch, const Numbers<Source>& of, double* sums, int) {
        const double right = batch.sum(batch.rows.count, [=](int64_t row) {
            bool is_right = true;
            for (int j = 0; j < of.n; ++j)
                is_right &= (of.output[row * of.n + j] > 0.5f) == (of.target(batch, row, j) > 0.5f);
            return is_right ? batch.weight(row) : 0.0;
        });
        const double weight = batch.weight_sum();
        if (threadIdx.x == 0) sums[0] += right, sums[1] += weight;
    }
};

// By how much predictions lie below targets, and by how much above: means over a row's numbers.
struct ErrorSidesMetric {
    template <class Source>
    static __device__ __forceinline__ void add(const Batch& batch, const Numbers<Source>& of, double* sums, int) {
        const auto side = [=](float sign) {
            return batch.sum(static_cast<int64_t>(batch.rows.count) * of.n, [=](int64_t i) {
                const int64_t row = i / of.n;
                const float error = sign * (of.target(batch, row, static_cast<int>(i % of.n)) - of.output[i]);
                return batch.weight(row) * (error < 0.0f ? 0.0f : error);
            });
        };
        const double below = side(1.0f), above = side(-1.0f), weight = batch.weight_sum();
        if (threadIdx.x == 0) sums[0] += below / of.n, sums[1] += above / of.n, sums[2] += weight;
    }
};

// --- ranking metrics: what a group of equal scores contributes, between the sums before it and with it ---

// The weights of a curve's two sides, up to some rank.
struct Sides {
    double positives, negatives;
};

// The trapezoid under the curve, not yet divided by the weights of both sides.
struct RocAucMetric {
    static __device__ __forceinline__ double area(Sides before, Sides after) {
        return (after.negatives - before.negatives) * (after.positives + before.positives) / 2.0;
    }
};

// The step of recall times the precision reached there, not yet divided by the positives' weight.
struct AveragePrecisionMetric {
    static __device__ __forceinline__ double area(Sides before, Sides after) {
        const double gained = after.positives - before.positives;
        return gained > 0.0 ? gained * (after.positives / (after.positives + after.negatives)) : 0.0;
    }
};

}  // namespace mlpgpu
