// Which elements a dropout keeps: by half words of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011), the same ones as mlpgpu/random.py makes. Eight neighbours among a batch's elements (row · n + column) share
// a block of them.
#pragma once

#include "common/integers.cuh"
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
template <bool WIDE>
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

// Which of a block's elements have half words of at least `least`: a bit for each. A half word in the upper half of a word
// is compared together with the lower one, which decides nothing.
__device__ __forceinline__ uint32_t kept_of_block(const DropoutWords& drawn, uint32_t least) {
    if (least >> 16) return 0;
    const uint32_t high = least << 16;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < DROPOUT_BLOCK; ++i) {
        const uint32_t half_word = i % 2 ? drawn.word[i / 2] : drawn.word[i / 2] << 16;
        if (half_word >= high) bits |= 1u << i;
    }
    return bits;
}

// x · keep where an element's half word is at least `least` = rate · 2^16, rounded up, else x · 0, which leaves NaN as it is.
// `keep` is 1 / (1 - rate).
__device__ __forceinline__ float keep_or_drop(uint32_t half_word, uint32_t least, float keep, float x) {
    return half_word >= least ? x * keep : x * 0.0f;
}

// Which elements of a shard's rows a dropout keeps, as draw_dropouts of elementwise/rows.cuh has left them: a bit for each, 32
// in a word, where each row begins a new one. Without a dropout `words` is null.
struct KeptElements {
    static constexpr int OF_WORD = 32;

    const uint32_t* words;
    float keep;  // 1 / (1 - rate)
    int n;       // columns

    __device__ __forceinline__ uint32_t word(int row, int column) const {
        return words[static_cast<int64_t>(row) * ceil_div(n, OF_WORD) + column / OF_WORD];
    }
    static __device__ __forceinline__ bool has(uint32_t word, int column) { return word >> column % OF_WORD & 1; }

    // The words of four elements of a row, APART columns from each other: neighbours from a multiple of 4 on, or such that the
    // first two and the last two lie in one word each. They are taken apart later, so that loads of several overlap.
    template <int APART>
    __device__ __forceinline__ uint64_t of_quad(int row, int column) const {
        const uint64_t first = word(row, column);
        if (3 * APART < OF_WORD || column + 2 * APART >= n) return first;
        return static_cast<uint64_t>(word(row, column + 2 * APART)) << OF_WORD | first;
    }
    template <int APART>
    static __device__ __forceinline__ bool has(uint64_t of_quad, int column, int i) {
        const bool is_later = 3 * APART >= OF_WORD && i >= 2;
        return has(static_cast<uint32_t>(is_later ? of_quad >> OF_WORD : of_quad), column + i * APART);
    }

    // x after the dropout; one that is not kept becomes x · 0, which leaves NaN as it is.
    __device__ __forceinline__ float operator()(bool is_kept, float x) const { return is_kept ? x * keep : x * 0.0f; }
    template <int APART>
    __device__ __forceinline__ void drop(uint64_t of_quad, int column, float4& quad) const {
        const auto after = [&](int i, float x) { return (*this)(has<APART>(of_quad, column, i), x); };
        quad = make_float4(after(0, quad.x), after(1, quad.y), after(2, quad.z), after(3, quad.w));
    }
};

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
