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

}  // namespace mlpgpu
