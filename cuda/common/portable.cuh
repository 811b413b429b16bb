// What differs between a GPU and the host on which tests run the same kernels.
//
// Tests compile kernels with g++ and `-include tests/kernels/shim/cuda.h`, which defines MLPGPU_HOST and stands in for
// CUDA's built-ins. The instructions of arch/ and common/async_copy.cuh have host versions there too.
#pragma once

#include <stdint.h>

#if !defined(MLPGPU_HOST)

// The block's dynamic shared memory, as an array of T aligned to 16 bytes.  Kernels have no other.
#define SHARED(T, name)                                     \
    extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    T* const name = reinterpret_cast<T*>(name##_bytes)

#define WARP_ALL 0xffffffffu

using Texture = cudaTextureObject_t;

// Element i of a linear texture of floats, which is read-only. A kernel that reads targets takes a texture object, or a
// pointer if the array is longer than a texture may be; by the argument's type it calls this function or the one below.
__device__ __forceinline__ float texel(Texture texture, int64_t i) {
    return tex1Dfetch<float>(texture, static_cast<int>(i));
}

// The 64 bits of a product. For C++'s operators nvcc issues one instruction more.
__device__ __forceinline__ uint64_t multiply_wide(uint32_t a, uint32_t b) {
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

// High and low half of the 128-bit product.
__device__ __forceinline__ void multiply_wide(uint64_t a, uint64_t b, uint64_t& high, uint64_t& low) {
    high = __umul64hi(a, b);
    low = a * b;
}

// The lanes whose `bits` are zero, if this lane's are, or else the lanes whose `bits` are nonzero. This is written in PTX
// because nvcc compiles a ballot and a conditional complement to twice the instructions.
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

// Starts to load the cache line of 128 bytes around an address into the second-level cache (L2).
__device__ __forceinline__ void prefetch_to_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Every loop that polls memory calls this: on the host, other threads run meanwhile. The device does not sleep, since
// what it polls for comes within a microsecond.
__device__ __forceinline__ void pause_spinning() {}

// The square root to about a unit of the last place.
__device__ __forceinline__ float fast_sqrt(float x) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

// Ends the kernel with an error.
__device__ __forceinline__ void give_up() { __trap(); }

// A barrier of THREADS of the block's threads, whole warps; NUMBER 0 is the barrier of __syncthreads().
template <int NUMBER, int THREADS>
__device__ __forceinline__ void sync_some() {
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}

// Words that other blocks read while the kernel runs: stored and loaded whole, in the cache that all blocks share. A pair
// of words lies at a multiple of 16 bytes, and each of the two is whole.
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

// Stores a word in page-locked memory of the host, which sees it after all that the thread saw written before.
__device__ __forceinline__ void store_for_host(unsigned* address, unsigned word) {
    __threadfence_system();
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
}

// Words by which cards tell each other: whoever loads the word stored sees all that the thread saw written before.
__device__ __forceinline__ void store_for_card(unsigned* address, unsigned word) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
}

__device__ __forceinline__ unsigned load_from_card(const unsigned* address) {
    unsigned word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
    return word;
}

// A whole word of 64 bits in another card's memory, or from another card; nothing else is ordered by it.
__device__ __forceinline__ void store_word_for_card(uint64_t* address, uint64_t word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

__device__ __forceinline__ uint64_t load_word_from_card(const uint64_t* address) {
    uint64_t word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

// Adds 1 to a word that blocks count by, and returns the count before. The block that finds the last count sees all that
// the others wrote before they counted, if it reads past the first-level cache.
__device__ __forceinline__ unsigned count_up(unsigned* word) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
    return before;
}

#endif

// Element i of an array, by a plain load.
__device__ __forceinline__ float texel(const float* data, int64_t i) { return data[i]; }

namespace mlpgpu {

// The type of numbers in cuda/math/.  Kernels have float32; loops on a processor, made of the same structs, may have float64
// (mlpgpu/backends/cpu/loops/).
#if defined(MLPGPU_REAL)
using real = MLPGPU_REAL;
#else
using real = float;
#endif

constexpr int WARP = 32;

// The block of a kernel whose threads stride over elements and share no memory. Each kernel's file names the struct of
// its block, whose THREADS and SHARED_BYTES the table of entries is compiled against (mlpgpu/backends/cuda/kernels/).
struct PlainBlock {
    static constexpr int THREADS = 256, SHARED_BYTES = 0;
};

// A number as a type, for a generic lambda's argument.
template <int NUMBER>
struct Is {
    static constexpr int value = NUMBER;
};

}  // namespace mlpgpu
