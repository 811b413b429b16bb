// Addressed random words: Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011), the same words as mlpgpu/random.py takes from NumPy.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

struct PhiloxBlock {
    uint64_t word[4];
};

// Block `block` of the address (seed, purpose; step, layer, replica).  NumPy raises the counter once
// before its first block, hence the 1.
__device__ __forceinline__ PhiloxBlock philox(uint64_t seed, uint64_t purpose, uint64_t block, uint64_t step,
                                              uint64_t layer, uint64_t replica) {
    uint64_t c0 = block + 1, c1 = step, c2 = layer, c3 = replica;
    uint64_t k0 = seed, k1 = purpose;
    for (int round = 0; round < 10; ++round) {
        uint64_t high0, low0, high1, low1;
        multiply_wide(0xD2E7470EE14C6C93ull, c0, high0, low0);
        multiply_wide(0xCA5A826395121157ull, c2, high1, low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B97F4A7C15ull;
        k1 += 0xBB67AE8584CAA73Bull;
    }
    return {{c0, c1, c2, c3}};
}

// Dropout of one element: x · keep if the upper 53 bits of its random word are at least `threshold` = rate · 2^53,
// rounded up, else x · 0, which leaves NaN as it is. `keep` is 1 / (1 - rate).
__device__ __forceinline__ float keep_or_drop(uint64_t word, uint64_t threshold, float keep, float x) {
    return (word >> 11) >= threshold ? x * keep : x * 0.0f;
}

// A layer's dropout as a launch is told of it; without one `keep` is 0. Word `element` of the step decides, as an element's
// place in the whole batch.
struct LayerDropout {
    uint64_t seed, purpose, layer, threshold;
    float keep;

    __device__ __forceinline__ float operator()(int64_t step, int64_t element, float x) const {
        if (keep == 0.0f) return x;
        const PhiloxBlock block = philox(seed, purpose, element / 4, step, layer, 0);
        const bool is_odd = element & 1;  // an index that varies would put the words in local memory
        const uint64_t low = is_odd ? block.word[1] : block.word[0], high = is_odd ? block.word[3] : block.word[2];
        return keep_or_drop(element & 2 ? high : low, threshold, keep, x);
    }
};

}  // namespace mlpgpu
