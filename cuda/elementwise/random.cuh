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

// x (rows, n): those of the same values, of an array of `width` columns, that begin at its element `first`: some of its rows
// and columns. A thread makes what a block of words has of a row.
__device__ __forceinline__ void initial_uniform_of_part(uint64_t seed, uint64_t purpose, uint64_t layer, double limit,
                                                        int64_t first, int64_t width, int64_t rows, int64_t n, float* x) {
    const int64_t blocks_of_row = n / 4 + 2, size = rows * blocks_of_row;  // that a row may have elements of
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size; i += stride) {
        const int64_t row = i / blocks_of_row, begin = first + row * width, block = begin / 4 + i % blocks_of_row;
        if (4 * block >= begin + n) continue;
        const PhiloxBlock four = philox(seed, purpose, block, 0, layer, 0);
        for (int word = 0; word < 4; ++word) {
            const int64_t column = 4 * block + word - begin;
            if (column < 0 || column >= n) continue;
            const double u = __dmul_rn(static_cast<double>(four.word[word] >> 11), 1.0 / (1ull << 53));
            x[row * n + column] = static_cast<float>(__dadd_rn(-limit, __dmul_rn(2.0 * limit, u)));
        }
    }
}

}  // namespace mlpgpu
