// Conversions between float and the bits of float16 and bfloat16.
#pragma once

#include "common/portable.cuh"


#if !defined(MLPGPU_HOST)

// The 16-bit float nearest to x, ties to even, and back.
__device__ __forceinline__ uint16_t half_bits(float x) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float half_value(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

#endif

namespace mlpgpu {

// The bfloat16 nearest to x, ties to even.  Cards before sm_80 have no instruction for it.
__device__ __forceinline__ uint16_t bfloat_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);  // rounding must not make it infinite
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Two bfloat16 in a word, the first in the lower half. Which NaN a NaN becomes may vary from card to card.
__device__ __forceinline__ unsigned bfloat_pair(float first, float second) {
#if !defined(MLPGPU_HOST) && __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return bfloat_bits(first) | static_cast<unsigned>(bfloat_bits(second)) << 16;
#endif
}

__device__ __forceinline__ float2 bfloats(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// The bfloat16 next to two numbers, as a pair; the numbers become the remainders.
__device__ __forceinline__ unsigned split_off(float& first, float& second) {
    const unsigned bits = bfloat_pair(first, second);
    first -= __uint_as_float(bits << 16), second -= __uint_as_float(bits & 0xffff0000);
    return bits;
}

}  // namespace mlpgpu
