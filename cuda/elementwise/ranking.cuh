// Ranking metrics, which depend on the order of a whole set.
//
// A curve compares the rows of one class, its positives, with all others, by their scores from the highest on.  During
// an evaluation rank_keys keeps what is needed of each row.  Then, for each curve, keys are sorted with their rows
// (primitives/sort.cuh), rank_weights brings the weights into that order, prefix sums (primitives/scan.cuh) give the
// weight of either side up to each rank, and rank_area adds up what the groups of equal scores contribute.
#pragma once

#include "common/reduce.cuh"
#include "common/step.cuh"
#include "math/metrics.cuh"

namespace mlpgpu {

// A score as a number to sort by: the highest comes first, -0 equals 0, and NaN comes last.
constexpr uint32_t NAN_KEY = 0xffffffffu;

__device__ __forceinline__ uint32_t rank_key(float score) {
    if (score != score) return NAN_KEY;
    const uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}

// Keeps a batch's rows at their ranks in the epoch's order: keys (curves, data rows) of the last columns of output (B,
// n), of_class (data rows,), and of_weight (data rows,); null weights are ones. If actual is null, curves are those of
// labels, and rank_labels gives their classes. Grid: any, of one dimension.
__device__ __forceinline__ void rank_keys(const Step* step, const int* order, const float* weights, const float* output,
                                          const int* actual, uint32_t* keys, int* of_class, float* of_weight, int n,
                                          int curves) {
    const Rows rows = shard_rows(step, 0, 1);
    const int64_t count = static_cast<int64_t>(rows.count) * curves;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const int64_t curve = i / rows.count, row = i % rows.count, rank = rows.order + row;
        keys[curve * step->epoch_rows + rank] = rank_key(output[row * n + n - curves + curve]);
        if (curve > 0) continue;
        if (actual) of_class[rank] = actual[row];
        of_weight[rank] = weights ? weights[order[rank]] : 1.0f;
    }
}

// Whether a batch's rows have each label, of_class (n, data rows) of 0 and 1, at their ranks as above. Grid: as above.
template <class Source>
__device__ __forceinline__ void rank_labels(const Step* step, const int* order, Source targets, int* of_class, int n) {
    const Rows rows = shard_rows(step, 0, 1);
    const int64_t count = static_cast<int64_t>(rows.count) * n;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const int64_t label = i / rows.count, rank = rows.order + i % rows.count;
        of_class[label * step->epoch_rows + rank] = texel(targets, static_cast<int64_t>(order[rank]) * n + label) > 0.5f;
    }
}

// The weights (n,) of rows (n,) that belong to a class, and of those that do not; 0 for the others.  Grid: any, of one
// dimension.
__device__ __forceinline__ void rank_weights(const int* rows, const int* of_class, const float* of_weight, int64_t n,
                                             int positive, double* positives, double* negatives) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const int row = rows[i];
        const bool is_positive = of_class[row] == positive;
        positives[i] = is_positive ? of_weight[row] : 0.0;
        negatives[i] = is_positive ? 0.0 : of_weight[row];
    }
}

// The first of the ascending keys [0, end) that is not less than `key`; end if there is none.
__device__ __forceinline__ int64_t lower_bound(const uint32_t* keys, int64_t end, uint32_t key) {
    int64_t first = 0;
    while (first < end) {
        const int64_t middle = (first + end) / 2;
        if (keys[middle] < key)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

// A curve's column of the sums (3, curves): its area, NaN if a key is NaN, and the weights of both sides. keys (n,) are
// sorted, positives and negatives (n,) are prefix sums in their order; partials has a number for each block, and `arrived`
// is as in Arrival. Grid: at most one block for each thread of a block.
template <class Metric>
__device__ __forceinline__ void rank_area(const uint32_t* keys, const double* positives, const double* negatives,
                                          int64_t n, double* partials, unsigned* arrived, double* sums, int curve,
                                          int curves) {
    SHARED(double, scratch);  // one for each warp
    double area = 0.0;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const bool ends_group = i + 1 == n || keys[i + 1] != keys[i];
        if (!ends_group) continue;
        const int64_t first = lower_bound(keys, i, keys[i]);
        const Sides before = first ? Sides{positives[first - 1], negatives[first - 1]} : Sides{0.0, 0.0};
        area += Metric::area(before, {positives[i], negatives[i]});
    }
    area = block_sum(area, scratch);
    if (threadIdx.x == 0) partials[blockIdx.x] = area;
    if (!was_last(arrive(arrived), scratch)) return;
    area = block_sum(threadIdx.x < gridDim.x ? partials[threadIdx.x] : 0.0, scratch);
    if (threadIdx.x != 0) return;
    sums[curve] = keys[n - 1] == NAN_KEY ? double(NAN) : area;
    sums[curves + curve] = positives[n - 1];
    sums[2 * static_cast<int64_t>(curves) + curve] = negatives[n - 1];
}

}  // namespace mlpgpu
