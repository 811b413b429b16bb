// Products of matrices in shared memory on tensor cores, by all warps of a block: operands are one, two or three bfloat16
// components of each number, whose sum it is: 8, 16 or all 24 bits.
//
// Products of components are those of gemm/split_sm80.cuh. But numbers whose last component is below bfloat16's least lose up
// to 2^-134, and a sum over what is not finite may be NaN where it is infinite.
#pragma once

#include "arch/mma.cuh"
#include "common/integers.cuh"
#include "common/numbers.cuh"
#include "math/approximate.cuh"

namespace mlpgpu {

struct ComponentsShape {
    static constexpr int STEP = 16;        // what rows, columns and terms are padded to
    static constexpr int BANKS_APART = 8;  // elements behind a row, so that eight rows lie in different banks
    static constexpr int PROMOTED = 64;    // terms of a sum that tensor cores, which truncate, add up by themselves
    static constexpr int ITEM_EIGHTS = 2;  // columns, times 8, that take a warp as long as what it does once for all of them
};

__device__ __forceinline__ int padded_to_step(int n) {
    return static_cast<int>((static_cast<unsigned>(n) + ComponentsShape::STEP - 1) & ~(ComponentsShape::STEP - 1u));
}
__device__ __forceinline__ int components_pitch(int n) { return padded_to_step(n) + ComponentsShape::BANKS_APART; }

// The upper half of a number's bits; a NaN stays one.
__device__ __forceinline__ unsigned leading_half(float x) { return __float_as_uint(x) >> 16 | (x != x ? 0x40u : 0u); }
// What that leaves of it: nothing of what is not finite, since infinity less infinity would be NaN.
__device__ __forceinline__ float remainder_of_half(float x) {
    return fabsf(x) < INFINITY ? x - __uint_as_float(__float_as_uint(x) & 0xffff0000u) : 0.0f;
}

// The components of pairs of numbers, as words.
template <int COUNT, int COMPONENTS>
__device__ __forceinline__ void split_pairs(const float2 (&pairs)[COUNT], unsigned (&words)[COMPONENTS][COUNT]) {
    float rests = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        float rest = pairs[i].x, other = pairs[i].y;
#pragma unroll
        for (int p = 0; p < COMPONENTS; ++p) words[p][i] = split_off(rest, other);
        rests = i == 0 ? fabsf(rest) + fabsf(other) : rests + (fabsf(rest) + fabsf(other));
    }
    if (COMPONENTS > 1 && !(rests < INFINITY)) {  // rarely
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            words[0][i] = leading_half(pairs[i].x) | leading_half(pairs[i].y) << 16;
            float rest = remainder_of_half(pairs[i].x), other = remainder_of_half(pairs[i].y);
#pragma unroll
            for (int p = 1; p < COMPONENTS; ++p) words[p][i] = split_off(rest, other);
        }
    }
}

template <int COMPONENTS>
__device__ __forceinline__ void split_pair(float first, float second, unsigned (&words)[COMPONENTS]) {
    const float2 pair[1] = {make_float2(first, second)};
    unsigned split[COMPONENTS][1];
    split_pairs(pair, split);
#pragma unroll
    for (int p = 0; p < COMPONENTS; ++p) words[p] = split[p][0];
}

// A matrix in shared memory: component after component, rows `pitch` elements apart.
template <int COMPONENTS>
struct Components {
    static constexpr int COUNT = COMPONENTS;
    uint16_t* data;
    int pitch, stride;

    __device__ __forceinline__ void put(int row, int column, float first, float second) const {
        unsigned words[COMPONENTS];
        split_pair(first, second, words);
        uint16_t* const to = data + row * pitch + column;
#pragma unroll
        for (int p = 0; p < COMPONENTS; ++p) *reinterpret_cast<unsigned*>(to + p * stride) = words[p];
    }

    __device__ __forceinline__ float2 at(int row, int column) const {
        const uint16_t* const from = data + row * pitch + column;
        float2 sum = {};
#pragma unroll
        for (int p = COMPONENTS - 1; p >= 0; --p) {
            const float2 part = bfloats(*reinterpret_cast<const unsigned*>(from + p * stride));
            sum = make_float2(sum.x + part.x, sum.y + part.y);
        }
        return sum;
    }
};

// sums (16, 16) += A · B of fragments of components: the largest products of components, the smaller ones first.
template <int COMPONENTS>
__device__ __forceinline__ void multiply_fragments(float (&sums)[2][4], const unsigned (&a)[COMPONENTS][4],
                                                   const unsigned (&b)[COMPONENTS][4]) {
#pragma unroll
    for (int both = COMPONENTS - 1; both >= 0; --both)
#pragma unroll
        for (int p = 0; p <= both; ++p)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                multiply_matrices<false>(sums[half], a[p], b[both - p][2 * half], b[both - p][2 * half + 1]);
}

__device__ __forceinline__ void add_sums(float (&sums)[2][4], const float (&part)[2][4]) {
#pragma unroll
    for (int q = 0; q < 8; ++q) sums[q / 4][q % 4] += part[q / 4][q % 4];
}

// sums (16, 8 · count) += A · B over `terms`, a multiple of 16: the largest products of components, the smaller ones first.
// A_INNER and B_INNER tell whether what is summed over is contiguous. Where `are_ones` A's elements are 1.
template <int COMPONENTS, bool A_INNER, bool B_INNER>
__device__ __forceinline__ void multiply_components(const Components<COMPONENTS>& a, int row0,
                                                    const Components<COMPONENTS>& b, int column0, int terms, int count,
                                                    bool are_ones, float (&sums)[4][4]) {
    using T = ComponentsShape;
    constexpr unsigned ONES = 0x3f803f80u;  // two bfloat16
#pragma unroll 1
    for (int begin = 0; begin < terms; begin += T::PROMOTED) {
        float part[4][4] = {};
        float(&c)[4][4] = COMPONENTS > 2 ? part : sums;
        const int end = min(terms, begin + T::PROMOTED);
#pragma unroll 1
        for (int k = begin; k < end; k += T::STEP) {
            unsigned of_a[COMPONENTS][4];
#pragma unroll
            for (int p = 0; p < COMPONENTS; ++p) {
                if (are_ones)
                    of_a[p][0] = of_a[p][1] = of_a[p][2] = of_a[p][3] = p == 0 ? ONES : 0;
                else
                    load_fragments<A_INNER, 0>(of_a[p], a.data + p * a.stride, a.pitch, row0, k);
            }
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                if (2 * side >= count) break;
                unsigned of_b[COMPONENTS][4];
#pragma unroll
                for (int p = 0; p < COMPONENTS; ++p)
                    load_fragments<B_INNER, 1>(of_b[p], b.data + p * b.stride, b.pitch, column0 + T::STEP * side, k);
#pragma unroll
                for (int both = COMPONENTS - 1; both >= 0; --both)
#pragma unroll
                    for (int p = 0; p <= both; ++p)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            if (2 * side + half < count)
                                multiply_matrices<false>(c[2 * side + half], of_a[p], of_b[both - p][2 * half],
                                                         of_b[both - p][2 * half + 1]);
            }
        }
        if (COMPONENTS > 2)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[j][e] += part[j][e];
    }
}

// C = A · B, whose rows and columns are multiples of 16, by all of WARPS warps. begin(row, column) is called before the sums
// at `row` and `row` + 8 of two neighbouring columns are made, and finish(row, column, sums, begun) with what it gave. Where
// `has_ones` rows of ones follow A's last one, whose sums are those of B's columns. A short `finish` IS_SHORT.
template <int WARPS, int COMPONENTS, bool A_INNER, bool B_INNER, bool IS_SHORT = false, class Begin, class Finish>
__device__ __forceinline__ void multiply_by_warps(const Components<COMPONENTS>& a, int rows,
                                                  const Components<COMPONENTS>& b, int columns, int terms, bool has_ones,
                                                  const Begin& begin, const Finish& finish) {
    using T = ComponentsShape;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned high = static_cast<unsigned>(rows) / T::STEP + has_ones, eights = static_cast<unsigned>(columns) / 8;
    // A warp makes 8, 16 or 32 columns at once, by which all warps are through first.
    unsigned wide = 0, across = 0, least = ~0u;
#pragma unroll
    for (unsigned other = 4; other >= 1; other /= 2) {
        const unsigned of_other = (eights + other - 1) / other, rounds = (high * of_other + WARPS - 1) / WARPS;
        const unsigned takes = rounds * (other + T::ITEM_EIGHTS);
        if (takes < least) wide = other, across = of_other, least = takes;
    }
    const float inverse = quotient(1.0f, static_cast<float>(across));  // since a division takes longer
    for (unsigned item = warp; item < high * across; item += WARPS) {
        const unsigned band = static_cast<unsigned>((static_cast<float>(item) + 0.5f) * inverse);
        const int row0 = band * T::STEP, column0 = (item - band * across) * wide * 8;
        const int count = min(wide, eights - column0 / 8u);
        const int row = row0 + lane / 4, column = column0 + lane % 4 * 2;
        float4 begun[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) begun[j] = j < count ? begin(row, column + 8 * j) : float4();
        float sums[4][4] = {};
        multiply_components<COMPONENTS, A_INNER, B_INNER>(a, row0, b, column0, terms, count, row0 == rows, sums);
        if constexpr (IS_SHORT) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (j < count) finish(row, column + 8 * j, sums[j], begun[j]);
        } else {
            // Not unrolled: what is executed once costs more to fetch than to execute.
#pragma unroll 1
            for (int j = 0; j < count; ++j) {
                float c[4];
                float4 of_begin = begun[0];
#pragma unroll
                for (int q = 0; q < 4; ++q) c[q] = sums[0][q];
#pragma unroll
                for (int other = 1; other < 4; ++other)
                    if (other == j) {
                        of_begin = begun[other];
#pragma unroll
                        for (int q = 0; q < 4; ++q) c[q] = sums[other][q];
                    }
                finish(row, column + 8 * j, c, of_begin);
            }
        }
    }
}

}  // namespace mlpgpu
