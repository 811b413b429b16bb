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

// The lanes where `bits` are 0 as they are here, or are not as here.  Of a ballot and a choice nvcc makes twice the
// instructions.
__device__ __forceinline__ unsigned lanes_like(int bits) {
    unsigned lanes;
    asm("{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.b32 p, %1, 0;\n\t"
        "vote.sync.ballot.b32 %0, p, 0xffffffff;\n\t"
        "@!p not.b32 %0, %0;\n\t"
        "}"
        : "=r"(lanes)
        : "r"(bits));
    return lanes;
}

// Brings the 128 bytes around an address to the second-level cache, sometime.
__device__ __forceinline__ void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

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

// Every loop that waits for another thread's word in memory calls this: on the host, others run meanwhile.
// What is waited for comes within a microsecond, so the device does not sleep.
__device__ __forceinline__ void pause_spinning() {}

// Ends the kernel with an error.
__device__ __forceinline__ void give_up() { __trap(); }

// A barrier of so many of the block's threads, whole warps; NUMBER 0 is that of __syncthreads().
template <int NUMBER, int THREADS>
__device__ __forceinline__ void sync_some() {
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}

// A word that other blocks read while the kernel runs, whole: it is in the cache that they share, not in the
// multiprocessor's own.  And two words, each of them whole, at a multiple of 16 bytes.
__device__ __forceinline__ void store_word(uint64_t* place, uint64_t word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place), "l"(word) : "memory");
}

__device__ __forceinline__ uint64_t load_word(const uint64_t* place) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(place) : "memory");
    return word;
}

__device__ __forceinline__ void store_word_pair(uint64_t* place, uint64_t first, uint64_t second) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(first), "l"(second) : "memory");
}

__device__ __forceinline__ void load_word_pair(const uint64_t* place, uint64_t& first, uint64_t& second) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(place) : "memory");
}

// Adds 1 to a word that blocks count by, and returns what it was: who finds the last number sees all that the others wrote
// before they counted, past the first-level cache.
__device__ __forceinline__ unsigned count_up(unsigned* word) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
    return before;
}

// Copies a word, or four floats at addresses that are multiples of 16, to shared memory while the thread goes on, where
// the card can.
__device__ __forceinline__ void copy_one(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    const uint32_t place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place), "l"(from) : "memory");
#else
    *static_cast<unsigned*>(to) = *static_cast<const unsigned*>(from);
#endif
}

__device__ __forceinline__ void copy_four(float* to, const float* from) {
#if __CUDA_ARCH__ >= 800
    const uint32_t place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
#else
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
#endif
}

// Ends a group of such copies.
__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until what this thread copied is there, but for the last groups.
template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// Waits until all that this thread copied is there.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#endif

// The same by plain loads, for more of them than a texture reaches.
__device__ __forceinline__ float texel(const float* data, int64_t i) { return data[i]; }

namespace mlpgpu {

constexpr int WARP = 32;

// The bfloat16 nearest to x, ties to even.  Cards before sm_80 have no instruction for it.
__device__ __forceinline__ uint16_t bfloat_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);  // rounding must not make it infinite
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Two of them in a word, the first in the lower half.  Which NaN one is may vary from card to card.
__device__ __forceinline__ unsigned bfloat_pair(float first, float second) {
#if !defined(MLPGPU_HOST) && __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return bfloat_bits(first) | static_cast<unsigned>(bfloat_bits(second)) << 16;
#endif
}

__device__ __forceinline__ float bfloat_value(uint16_t bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ __forceinline__ float2 bfloats(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Four of them in two words.
__device__ __forceinline__ float4 bfloat_quad(const uint2& words) {
    return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                       __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
}

// Four neighbours at once, from or to an address that is a multiple of their size.
__device__ __forceinline__ void load_four(const float* from, float* to) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

__device__ __forceinline__ void load_four(const unsigned char* from, unsigned char* to) {
    const uchar4 four = *reinterpret_cast<const uchar4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

__device__ __forceinline__ void store_four(float* to, const float* from) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

// A number as a type, for a generic lambda's argument.
template <int NUMBER>
struct Is {
    static constexpr int value = NUMBER;
};

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

// values[i] summed over the 16 lanes of half a warp, in the lane i of them.  Lanes halve what they still have to add:
// each half sends away what the other one keeps.
__device__ __forceinline__ float sum_to_lanes(float (&values)[16]) {
#pragma unroll
    for (int halving = 0; halving < 4; ++halving) {
        const int width = 8 >> halving;
        const bool is_upper = threadIdx.x & width;
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // not up to `width`, which the compiler would keep the values in memory for
            if (i >= width) break;
            const float low = values[i], high = values[i + width];
            values[i] = (is_upper ? high : low) + __shfl_xor_sync(WARP_ALL, is_upper ? low : high, width);
        }
    }
    return values[0];
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

// Finds the last of so many blocks, else of a grid of one dimension, to be done with something: each one arrives, and
// at any later time asks.  The last one then sees what thread 0 of every block wrote before it arrived.  `arrived` is 0 before
// the launch, and again after it.
struct Arrival {
    unsigned* arrived;
    unsigned before;  // how many blocks were there already; thread 0 alone knows
};

__device__ __forceinline__ Arrival arrive(unsigned* arrived) {
    unsigned before = 0;
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(arrived, 1u);
    }
    return {arrived, before};
}

// `scratch` is a word of shared memory that nobody uses any longer.
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
