// Which elements a dropout keeps: by half words of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011), the same ones as mlpgpu/random.py makes. Eight neighbours among a batch's elements (row · n + column) share
// a block of them.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

constexpr int DROPOUT_BLOCK = 8, PHILOX_ROUNDS = 10;

struct PhiloxKey {
    uint32_t word[2];

    __device__ __forceinline__ void raise() { word[0] += 0x9E3779B9u, word[1] += 0xBB67AE85u; }
};

__device__ __forceinline__ PhiloxKey philox_key(uint64_t seed) {
    return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}};
}

// By operators or by multiply_wide, which is faster; but it moved registers of kernels that draw beside products, which then
// took 3 % longer.
template <bool WIDE = false>
__device__ __forceinline__ void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, const PhiloxKey& key) {
    const auto multiply = [](uint32_t a, uint32_t b) { return WIDE ? multiply_wide(a, b) : static_cast<uint64_t>(a) * b; };
    const uint64_t first = multiply(0xD2511F53u, c0), second = multiply(0xCD9E8D57u, c2);
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ key.word[0], c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ key.word[1], c3 = static_cast<uint32_t>(first);
}

// Block `block` of a layer's step.
struct DropoutWords {
    uint32_t word[4];

    // That of an element, by its place in the batch; of a number that varies a choice, since an index would put the words in
    // local memory.
    __device__ __forceinline__ uint32_t operator[](int64_t element) const {
        const uint32_t low = element & 2 ? word[1] : word[0], high = element & 2 ? word[3] : word[2];
        const uint32_t both = element & 4 ? high : low;
        return element & 1 ? both >> 16 : both & 0xffffu;
    }
};

template <bool WIDE = false>
__device__ __forceinline__ DropoutWords dropout_words(uint64_t seed, int64_t step, int layer, int64_t block) {
    DropoutWords made = {{static_cast<uint32_t>(block), static_cast<uint32_t>(step), static_cast<uint32_t>(layer),
                          static_cast<uint32_t>(step >> 32)}};
    PhiloxKey key = philox_key(seed);
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        philox_round<WIDE>(made.word[0], made.word[1], made.word[2], made.word[3], key);
        key.raise();
    }
    return made;
}

// x · keep where an element's half word is at least `least` = rate · 2^16, rounded up, else x · 0, which leaves NaN as it is.
// `keep` is 1 / (1 - rate).
__device__ __forceinline__ float keep_or_drop(uint32_t half_word, uint32_t least, float keep, float x) {
    return half_word >= least ? x * keep : x * 0.0f;
}

// A layer's dropout as a launch is told of it; without one `keep` is 0.
struct LayerDropout {
    uint64_t seed;
    int layer;
    uint32_t least;
    float keep;

    __device__ __forceinline__ float operator()(int64_t step, int64_t element, float x) const {
        if (keep == 0.0f) return x;
        return keep_or_drop(dropout_words(seed, step, layer, element / DROPOUT_BLOCK)[element], least, keep, x);
    }
};

}  // namespace mlpgpu
