// Sums and largest values over a warp and over a block, and which block of a grid is the last to finish.
#pragma once

#include "common/integers.cuh"
#include "common/portable.cuh"

namespace mlpgpu {

// Sum over the warp's lanes, the same in every lane and in the same order always.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(WARP_ALL, value, offset);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(WARP_ALL, value, offset));
    return value;
}

__device__ __forceinline__ int warp_max(int value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(WARP_ALL, value, offset));
    return value;
}

__device__ __forceinline__ int warp_or(int value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value |= __shfl_xor_sync(WARP_ALL, value, offset);
    return value;
}

// Sums values[i] over the 16 lanes of half a warp, and leaves the sum in lane i. In each of four steps a lane passes half
// of its values to another lane and adds what that lane passes back.
__device__ __forceinline__ float sum_to_lanes(float (&values)[16]) {
#pragma unroll
    for (int halving = 0; halving < 4; ++halving) {
        const int width = 8 >> halving;
        const bool is_upper = threadIdx.x & width;
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // a constant bound: if it varied, values would be in local memory
            if (i >= width) break;
            const float low = values[i], high = values[i + width];
            values[i] = (is_upper ? high : low) + __shfl_xor_sync(WARP_ALL, is_upper ? low : high, width);
        }
    }
    return values[0];
}

// Sums each of COUNT values over the whole warp. Of at most WARP values, sum i is left in values[0] of lane i · WARP / COUNT;
// of more, a lane has COUNT / WARP neighbouring sums. In each step a lane passes half of its values to another lane.
template <int COUNT>
__device__ __forceinline__ void sums_to_lanes(float (&values)[COUNT]) {
    static_assert(COUNT >= 8 && (COUNT & (COUNT - 1)) == 0);
#pragma unroll
    for (int halving = 0; halving < 5; ++halving) {
        const int width = WARP / 2 >> halving, left = COUNT >> (halving + 1);
        const bool is_upper = threadIdx.x & width;
        if (left == 0) values[0] += __shfl_xor_sync(WARP_ALL, values[0], width);
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {  // a constant bound: if it varied, values would be in local memory
            if (i >= left) break;
            const float low = values[i], high = values[i + left];
            values[i] = (is_upper ? high : low) + __shfl_xor_sync(WARP_ALL, is_upper ? low : high, width);
        }
    }
}

// The block of a kernel that calls block_sum: its scratch memory holds a double for each warp of the largest block.
struct SumBlock {
    static constexpr int THREADS = 256, SHARED_BYTES = sizeof(double) * WARP;
};

// Sum over the block, in every thread of its first warp.  `scratch` holds one T for each warp; the
// caller puts a barrier before it uses `scratch` again.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
    value = warp_sum(value);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = ceil_div(blockDim.x, WARP);
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    if (warp != 0) return T(0);
    return warp_sum(lane < warps ? scratch[lane] : T(0));
}

// Finds the last block to finish among `blocks`, or of a one-dimensional grid. Each block arrives, and asks at any later
// time whether it was the last. The last block sees what thread 0 of every block wrote before it arrived. `arrived` is 0
// before the launch and again after it.
struct Arrival {
    unsigned* arrived;
    unsigned before;  // blocks that had arrived before; only thread 0 knows it
};

__device__ __forceinline__ Arrival arrive(unsigned* arrived) {
    unsigned before = 0;
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(arrived, 1u);
    }
    return {arrived, before};
}

// `scratch` is a word of shared memory that no thread needs any longer.
__device__ __forceinline__ bool was_last(const Arrival& arrival, void* scratch, unsigned blocks = gridDim.x) {
    unsigned* const is_last = static_cast<unsigned*>(scratch);
    __syncthreads();
    if (threadIdx.x == 0) {
        *is_last = arrival.before == blocks - 1;
        if (*is_last) *arrival.arrived = 0;
        __threadfence();
    }
    __syncthreads();
    const bool result = *is_last;
    __syncthreads();
    return result;
}

}  // namespace mlpgpu
