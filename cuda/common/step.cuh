// Which rows a launch works on.  Captured graphs replay unchanged: the step's number and its rows are
// not arguments but lie in device memory, from where a graph's first kernel initialises those of its steps.
#pragma once

#include "common/portable.cuh"


namespace mlpgpu {

struct Step {
    int64_t number;        // since training began, from 0: the address of random words
    int32_t run;           // since the program's run began: the row of this step's loss and rates
    int32_t batch;         // in the epoch
    int32_t batch_rows;    // of a full batch
    int32_t epoch_rows;    // that the epoch visits
};

// Rows [first, first + count) of the batch; `order` is where row 0 of the batch stands in the epoch.
struct Rows {
    int first;
    int count;
    int64_t order;
};

__device__ __forceinline__ int batch_rows(const Step& step) {
    const int64_t left = step.epoch_rows - static_cast<int64_t>(step.batch) * step.batch_rows;
    return left < step.batch_rows ? static_cast<int>(left) : step.batch_rows;
}

// The rows of one shard: sizes differ by at most one, and may be 0 (Plan.shard_rows).
__device__ __forceinline__ Rows shard_rows(const Step* step, int shard, int shards) {
    const int64_t rows = batch_rows(*step);
    int first = 0, end = static_cast<int>(rows);
    if (shards > 1) {  // since two 64-bit divisions take a hundred instructions each
        first = static_cast<int>(rows * shard / shards);
        end = static_cast<int>(rows * (shard + 1) / shards);
    }
    return {first, end - first, static_cast<int64_t>(step->batch) * step->batch_rows};
}

struct StepsBlock {
    static constexpr int THREADS = WARP, SHARED_BYTES = 0;
};

// steps (count,) = the next steps, one for the launches of each in a graph; `next` becomes the step after them.
// Grid: one block.
__device__ __forceinline__ void initialise_steps(Step* next, Step* steps, int count) {
    const Step first = *next;
    __syncthreads();
    for (int i = threadIdx.x; i <= count; i += blockDim.x) {
        Step step = first;
        step.number += i, step.run += i, step.batch += i;
        (i < count ? steps[i] : *next) = step;
    }
}

}  // namespace mlpgpu
