// A root, a quotient and a logarithm without a branch. The correctly rounded ones have a slow path for rare numbers, and
// log1pf one for what is no number, behind a branch for each element, so that no two elements of a thread overlap.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

// By the units that approximate them, off by up to 1 and 2 units of the last place. Of a denominator from 2^126 on a
// quotient is 0.
__device__ __forceinline__ float root(float x) { return fast_sqrt(x); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }

// log(1 + x) for x in [0, 1], by David Goldberg, "What Every Computer Scientist Should Know About Floating-Point
// Arithmetic", 1991, theorem 4: what rounding adds to 1 + x changes the logarithm and its argument alike.
__device__ __forceinline__ float log_plus_one(float x) {
    const float sum = 1.0f + x, rounded = sum - 1.0f;
    const float ratio = quotient(logf(sum), rounded);
    return x * (rounded == 0.0f ? 1.0f : ratio);
}

}  // namespace mlpgpu
