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

// By one warp, whose lane 0 has a block's sums: they go to sums (blocks, 2). Unless `totals` is null, the last block to
// arrive adds all of them up, to totals (2,) and the run's losses (steps, 2).
__device__ __forceinline__ void add_block_up(const Step* step, ValueAndWeight sum, int block, int blocks, double* sums,
                                             unsigned* arrived, double* totals, double* losses) {
    const int lane = threadIdx.x % WARP;
    unsigned before = 0;
    if (lane == 0) {
        sums[2 * block] = sum.value, sums[2 * block + 1] = sum.weight;
        if (totals && blocks > 1) before = count_up(arrived);
    }
    if (!totals || __shfl_sync(WARP_ALL, before, 0) != static_cast<unsigned>(blocks - 1)) return;
    if (blocks > 1) {
        sum = {0.0, 0.0};
#pragma unroll 8
        for (int i = lane; i < blocks; i += WARP) sum.value += __ldcg(sums + 2 * i), sum.weight += __ldcg(sums + 2 * i + 1);
        sum.value = warp_sum(sum.value), sum.weight = warp_sum(sum.weight);
    }
    if (lane > 0) return;
    if (blocks > 1) *arrived = 0;
    totals[0] = losses[2 * step->run] = sum.value;
    totals[1] = losses[2 * step->run + 1] = sum.weight;
}

// The same by a block, each of whose threads has a part of its sums.
__device__ __forceinline__ void add_threads_up(const Step* step, double value, double weight, double* sums,
                                               unsigned* arrived, double* totals, double* losses) {
    const ValueAndWeight sum = block_sums(value, weight);
    if (threadIdx.x >= WARP) return;
    const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
    add_block_up(step, sum, block, blocks, sums, arrived, totals, losses);
}

}  // namespace mlpgpu
