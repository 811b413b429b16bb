// The elements that dropouts keep, as bits: one launch draws them, and epilogues of products read them.
#pragma once

#include "common/integers.cuh"
#include "math/dropout.cuh"

namespace mlpgpu {

// A bit for each of a block's elements, set where its half word is at least `least`. A half word in the upper half of a word is
// compared as the whole word: the lower half cannot change the answer.
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

}  // namespace mlpgpu
