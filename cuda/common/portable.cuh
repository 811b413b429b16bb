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
__device__ __forceinline__ void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

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
__device__ __forceinline__ void store_word(uint64_t* address, uint64_t word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

__device__ __forceinline__ uint64_t load_word(const uint64_t* address) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

__device__ __forceinline__ void store_word_pair(uint64_t* address, uint64_t first, uint64_t second) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second) : "memory");
}

__device__ __forceinline__ void load_word_pair(const uint64_t* address, uint64_t& first, uint64_t& second) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(address) : "memory");
}

// Adds 1 to a word that blocks count by, and returns what it was: who finds the last number sees all that the others wrote
// before they counted, past the first-level cache.
__device__ __forceinline__ unsigned count_up(unsigned* word) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
    return before;
}

#endif

// The same by plain loads, for more of them than a texture reaches.
__device__ __forceinline__ float texel(const float* data, int64_t i) { return data[i]; }

namespace mlpgpu {

constexpr int WARP = 32;

// A number as a type, for a generic lambda's argument.
template <int NUMBER>
struct Is {
    static constexpr int value = NUMBER;
};

}  // namespace mlpgpu
