// Teams: the threads that share a row of a loss, an output or a metric.  All of them get its sums and maxima.
#pragma once

#include "common/reduce.cuh"

namespace mlpgpu {

struct WarpTeam {
    static constexpr int SIZE = WARP, DELTA_SIZE = SIZE;
    static __device__ __forceinline__ int rank() { return threadIdx.x % WARP; }
    static __device__ __forceinline__ int delta_rank() { return rank(); }
    static __device__ __forceinline__ float sum(float value) { return warp_sum(value); }
    static __device__ __forceinline__ float max(float value) { return warp_max(value); }
};

// A thread that has a row to itself.
struct ThreadTeam {
    static constexpr int SIZE = 1, DELTA_SIZE = SIZE;
    static __device__ __forceinline__ int rank() { return 0; }
    static __device__ __forceinline__ int delta_rank() { return rank(); }
    static __device__ __forceinline__ float sum(float value) { return value; }
    static __device__ __forceinline__ float max(float value) { return value; }
};

// The block of a kernel that is launched with a team for each row: as many rows as 256 threads take, or one.
template <class Team>
struct TeamBlock {
    static constexpr int THREADS = Team::SIZE > SumBlock::THREADS ? Team::SIZE : SumBlock::THREADS;
    static constexpr int ROWS = THREADS / Team::SIZE, SHARED_BYTES = SumBlock::SHARED_BYTES;
};

// A warp each of whose lanes sums all columns by itself, but stores the deltas of every 32nd column only: with few
// columns that takes less time than to add up across lanes.
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

    // Each warp's value, in the lane of the warp's number.
    static __device__ __forceinline__ float of_warps(float value) {
        SHARED(float, scratch);
        if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
        __syncthreads();
        value = scratch[threadIdx.x % WARP];
        __syncthreads();
        return value;
    }
};

// Half a warp; the other half does the same work.
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

}  // namespace mlpgpu
