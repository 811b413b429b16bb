// Metrics: one struct for each row of the table in mlpgpu/metrics.py, which says what their sums are.
//
// The sums (k, columns), float64, stay on the card from batch to batch.  One block alone adds to a column,
// in an order that follows from the number of rows, so that every run has the same bits.
#pragma once

#include "elementwise/loss.cuh"

namespace mlpgpu {

// --- classes ---

// Whether a comes before b where the largest is looked for; NaN is the largest, as NumPy's argmax has it.
__device__ __forceinline__ bool ranks_above(float a, float b) { return a > b || (a != a && b == b); }

// The class of a row of n values x(j), in every lane: the largest, the first of several; or, where one value
// tells two classes apart, whether it is over 1/2.
template <class Row>
__device__ __forceinline__ int class_of(Row x, int n, int classes, int lane) {
    if (classes > n) return x(0) > 0.5f;
    float largest = -INFINITY;
    int at = n;
    for (int j = lane; j < n; j += WARP) {
        const float value = x(j);
        if (at == n || ranks_above(value, largest)) largest = value, at = j;
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(WARP_ALL, largest, offset);
        const int other_at = __shfl_xor_sync(WARP_ALL, at, offset);
        const bool is_first_of_equals = !ranks_above(largest, other) && other_at < at;
        if (ranks_above(other, largest) || is_first_of_equals) largest = other, at = other_at;
    }
    return at;
}

// The classes (B,) of predictions output (B, n), and those of their targets.  A warp takes a row.
// Grid: as for loss.
template <class Target, class Source>
__device__ __forceinline__ void classes(const Step* step, const int* order, const float* output, Source targets,
                                        int* predicted, int* actual, int n, int classes) {
    const Rows rows = shard_rows(step, 0, 1);
    const int lane = threadIdx.x % WARP, row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows.count) return;
    const float* const y = output + static_cast<int64_t>(row) * n;
    const Target target = {targets, order[rows.order + row], n, nullptr, nullptr};
    const int of_output = class_of([=](int j) { return y[j]; }, n, classes, lane);
    const int of_target = class_of(target, n, classes, lane);
    if (lane == 0) predicted[row] = of_output, actual[row] = of_target;
}

// --- what a metric sees of a batch ---

struct Batch {
    Rows rows;
    const int* order;
    const float* weights;  // (data rows,), or null for ones
    double* scratch;       // one for each warp

    __device__ __forceinline__ int64_t place(int64_t row) const { return order[rows.order + row]; }
    __device__ __forceinline__ double weight(int64_t row) const { return weights ? weights[place(row)] : 1.0; }

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

// Class numbers (B,), from the kernel above.
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
        return texel(targets, batch.place(row) * n + column);
    }
};

// --- the metrics: `add` adds a batch to the block's column of the sums, whose rows lie `columns` apart ---

struct AccuracyMetric {
    static __device__ __forceinline__ void add(const Batch& batch, const Classes& of, double* sums, int) {
        const double right = batch.sum(
            batch.rows.count, [=](int64_t row) { return of.output[row] == of.target[row] ? batch.weight(row) : 0.0; });
        const double weight = batch.weight_sum();
        if (threadIdx.x == 0) sums[0] += right, sums[1] += weight;
    }
};

// The mean over a row's numbers of a measure of their error.
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

// Of each output total weight, residual, mean and spread; merged as Chan et al. do (1983).
struct R2Metric {
    template <class Source>
    static __device__ __forceinline__ void add(const Batch& batch, const Numbers<Source>& of, double* sums, int columns) {
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

// Adds the batch to the sums (k, columns).  Grid: one block for each column.
template <class Metric, class Compared, class Output, class Targets>
__device__ __forceinline__ void metric(const Step* step, const int* order, const float* weights, const Output* output,
                                       Targets targets, double* sums, int n) {
    SHARED(double, scratch);
    const Batch batch = {shard_rows(step, 0, 1), order, weights, scratch};
    const Compared compared = {output, targets, n};
    Metric::add(batch, compared, sums + blockIdx.x, gridDim.x);
}

}  // namespace mlpgpu
