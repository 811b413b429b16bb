// A batch's summed loss and weight, from the sums of blocks.
#pragma once

#include "common/reduce.cuh"
#include "common/step.cuh"

namespace mlpgpu {

struct ValueAndWeight {
    double value, weight;
};

// The sums of both over the block, in every thread of its first warp.
__device__ __forceinline__ ValueAndWeight block_sums(double value, double weight) {
    SHARED(double, scratch);
    value = block_sum(value, scratch);
    __syncthreads();
    weight = block_sum(weight, scratch);
    return {value, weight};
}

// Adds the blocks' sums of all shards up, in order, and stores them to totals (2,) and to the run's losses (steps, 2).
// Grid: one block.
__device__ __forceinline__ void total_error(const Step* step, const double* sums, int count, double* totals,
                                            double* losses) {
    double value = 0.0, weight = 0.0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        value += sums[2 * i];
        weight += sums[2 * i + 1];
    }
    const ValueAndWeight sum = block_sums(value, weight);
    if (threadIdx.x == 0) {
        totals[0] = losses[2 * step->run] = sum.value;
        totals[1] = losses[2 * step->run + 1] = sum.weight;
    }
}

// A block's summed value and weight go to sums (blocks, 2), given each thread's part of them.  Unless `totals` is null,
// the last block to arrive adds all of them up in `finish`, which it may call much later.
struct BatchTotal {
    const Step* step;
    double* sums;
    double* totals;
    double* losses;
    Arrival arrival;

    __device__ __forceinline__ BatchTotal(const Step* step, double value, double weight, double* sums,
                                          unsigned* arrived, double* totals, double* losses)
        : step(step), sums(sums), totals(totals), losses(losses), arrival() {
        const ValueAndWeight sum = block_sums(value, weight);
        if (threadIdx.x == 0) {
            const int block = blockIdx.y * gridDim.x + blockIdx.x;
            sums[2 * block] = sum.value;
            sums[2 * block + 1] = sum.weight;
        }
        if (totals) arrival = arrive(arrived);
    }

    __device__ __forceinline__ void finish() const {
        SHARED(double, scratch);
        const unsigned blocks = gridDim.x * gridDim.y;
        if (totals && was_last(arrival, scratch, blocks)) total_error(step, sums, blocks, totals, losses);
    }
};

}  // namespace mlpgpu
