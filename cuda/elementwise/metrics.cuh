// Metrics that are added up batch by batch.  Their sums (k, columns), float64, stay on the card from batch to batch.
// One block alone adds to a column, in an order that follows from the number of rows: every run has the same bits.
#pragma once

#include "math/metrics.cuh"
#include "math/targets.cuh"

namespace mlpgpu {

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

// The ranks (B,) of the true classes actual (B,) among predictions output (B, n).  A warp takes a row.  Grid: as for loss.
__device__ __forceinline__ void true_class_ranks(const Step* step, const float* output, const int* actual, int* ranks,
                                                 int n) {
    const Rows rows = shard_rows(step, 0, 1);
    const int lane = threadIdx.x % WARP, row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows.count) return;
    const float* const y = output + static_cast<int64_t>(row) * n;
    const int rank = rank_of_class([=](int j) { return y[j]; }, n, actual[row], lane);
    if (lane == 0) ranks[row] = rank;
}

// Large, since where the sums have one column, one block adds up the whole batch.
struct MetricBlock {
    static constexpr int THREADS = 1024, SHARED_BYTES = SumBlock::SHARED_BYTES;
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
