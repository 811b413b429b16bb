// What differs between a GPU and the host on which tests run the same kernels.
//
// Tests compile kernels with g++ and `-include tests/shim/cuda.h`, which defines MLPGPU_HOST and stands
// in for CUDA's built-ins.  Everything else that a kernel needs to know of the difference is here.
#pragma once

#include <stdint.h>

#if !defined(MLPGPU_HOST)

// The block's dynamic shared memory, as an array of T aligned to 16 bytes.  Kernels have no other.
#define SHARED(T, name)                                     \
    extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    T* const name = reinterpret_cast<T*>(name##_bytes)

#define WARP_ALL 0xffffffffu

using Texture = cudaTextureObject_t;

// Element i of a linear texture of floats: read-only, cached apart from the plain loads.
__device__ __forceinline__ float texel(Texture texture, int64_t i) {
    return tex1Dfetch<float>(texture, static_cast<int>(i));
}

// High and low half of the 128-bit product.
__device__ __forceinline__ void multiply_wide(uint64_t a, uint64_t b, uint64_t& high, uint64_t& low) {
    high = __umul64hi(a, b);
    low = a * b;
}

// Every loop that waits for another thread's word in memory calls this: on the host, others run meanwhile.
__device__ __forceinline__ void pause_spinning() { __nanosleep(32); }

#endif

// The same by plain loads, for more of them than a texture reaches.
__device__ __forceinline__ float texel(const float* data, int64_t i) { return data[i]; }

namespace mlpgpu {

constexpr int WARP = 32;

// Sum over the warp's lanes, the same in every lane and in the same order always.
__device__ __forceinline__ float warp_sum(float value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(WARP_ALL, value, offset);
    return value;
}

__device__ __forceinline__ double warp_sum(double value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(WARP_ALL, value, offset);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(WARP_ALL, value, offset));
    return value;
}

// Sum over the block, in every thread of its first warp.  `scratch` holds one T for each warp; the
// caller puts a barrier before it uses `scratch` again.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
    value = warp_sum(value);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = (blockDim.x + WARP - 1) / WARP;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    if (warp != 0) return T(0);
    return warp_sum(lane < warps ? scratch[lane] : T(0));
}

}  // namespace mlpgpu
