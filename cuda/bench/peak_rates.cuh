// The peak rate of a card's arithmetic, against which `explain` compares the other kernels.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

constexpr int CHAINS = 8;  // enough to hide the latency of each

// y (blocks · threads,): the sum of independent chains s ← s a + b, `rounds` long, from s = 0, 1, ….  Grid: any.
__device__ __forceinline__ void multiply_add(float a, float b, int rounds, float* y) {
    float s[CHAINS];
    for (int chain = 0; chain < CHAINS; ++chain) s[chain] = static_cast<float>(chain);
#pragma unroll 16
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) s[chain] = fmaf(s[chain], a, b);
    }
    float sum = 0.0f;
    for (int chain = 0; chain < CHAINS; ++chain) sum += s[chain];
    y[blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x] = sum;
}

}  // namespace mlpgpu
