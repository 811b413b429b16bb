// Arrays of addressed random numbers, with the same bits as those of mlpgpu/random.py and initializers.py. Grid: any,
// of one dimension; a thread makes a whole block of four words.
#pragma once

#include "common/philox.cuh"

namespace mlpgpu {

// words (n,): words 0 … n - 1 of the address (seed, purpose; step).
__device__ __forceinline__ void random_words(uint64_t seed, uint64_t purpose, uint64_t step, int64_t n,
                                             uint64_t* words) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t block = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; 4 * block < n; block += stride) {
        const PhiloxBlock four = philox(seed, purpose, block, step, 0, 0);
        for (int i = 0; i < 4; ++i)
            if (4 * block + i < n) words[4 * block + i] = four.word[i];
    }
}

// x (n,): -limit + 2 limit · u, where u is the upper 53 bits of a word as a number in [0, 1); in float64, each
// operation rounded, and then to float32.
__device__ __forceinline__ void initial_uniform(uint64_t seed, uint64_t purpose, uint64_t layer, double limit,
                                                int64_t n, float* x) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t block = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; 4 * block < n; block += stride) {
        const PhiloxBlock four = philox(seed, purpose, block, 0, layer, 0);
        for (int i = 0; i < 4; ++i) {
            const double u = __dmul_rn(static_cast<double>(four.word[i] >> 11), 1.0 / (1ull << 53));
            // The addition of __dadd_rn is never contracted with the product before it.
            if (4 * block + i < n) x[4 * block + i] = static_cast<float>(__dadd_rn(-limit, __dmul_rn(2.0 * limit, u)));
        }
    }
}

}  // namespace mlpgpu
