// Operand formats: the 16-bit components (hi, hi and lo, or three) that tensor cores multiply in place of float32 numbers.
//
//   Bfloat16        hi is the bfloat16 nearest to x
//   Bfloat16Pair    x = hi + lo · 2^-7: hi as Bfloat16, lo the bfloat16 nearest to (x - hi) · 2^7
//   Bfloat16Triple  x = hi + mid + lo, each the bfloat16 nearest to what those before it leave of x: all 24 bits of x, unless
//                   lo is below the least bfloat16, which loses up to 2^-134
//   Half            x' = x · 2^-e; hi is the half nearest to x'
//   HalfPair        x' = hi + lo · 2^-11: hi as Half, lo the half nearest to (x' - hi) · 2^11
// A scale 2^e belongs to a row of the first operand or to a column of the second one, so it is constant along what a
// product sums over: an element of C is its sum times 2^(e of the row + e of the column). The largest |x'| of a row or
// column lies in [2^14, 2^15). Elements many binades smaller have an absolute error instead of a relative one. A row or
// column with such an element is flagged inexact, and sums that depend on it are recomputed where they may be wrong.
// docs/mathematics.md derives why that suffices, and the four scales:
//   W (k, n)    W' = W · 2^-e_W[row]
//   X (B, k)    X' = X · 2^(e_W[column] - e_X[row]), for x W, and for xᵀ dz
//   dZ (B, n)   dZ' = dZ · 2^-e_Z[row], for dz Wᵀ
//   dZ (B, n)   dZ'' = dZ · 2^(e_X[row] - e_T), for xᵀ dz; e_T is the same for all rows
//
// The components of an array (rows, n) are (COMPONENTS, rows padded to 128, n padded to 64), row-major. They belong to one
// shard, whose first row is row 0. Behind its last one, rows as far as a multiple of 64 are written as 0 each time, since a
// product over the rows takes as many at a time; further ones may hold anything, and give rows of C that nobody stores.
#pragma once

#include "common/integers.cuh"
#include "common/numbers.cuh"

namespace mlpgpu {

constexpr int ROW_PADDING = 128, FILLED_ROWS = 64, COLUMN_PADDING = 64;

__device__ __forceinline__ int64_t padded_rows(int64_t rows) { return round_up(rows, ROW_PADDING); }
__device__ __forceinline__ int64_t filled_rows(int64_t rows) { return round_up(rows, FILLED_ROWS); }
__device__ __forceinline__ int padded_columns(int n) { return round_up(n, COLUMN_PADDING); }

// A row's or column's scale is one word: its exponent times 8, plus these flags.
constexpr int INEXACT = 1;  // an element is not represented to the format's precision, or is infinite
constexpr int HAS_NAN = 2;  // an element is NaN
constexpr int NONZERO = 4;    // an element is not 0
constexpr int FLAG_BITS = 7;

__device__ __forceinline__ int exponent_in(int scale) { return scale >> 3; }

// The exponent of the largest |x'|, and the least |x'| that is represented to the last bit.
constexpr int TOP_EXPONENT = 14;
constexpr float LEAST_EXACT = 1.0f / (1 << 13);

// floor(log2 |x|), or NO_EXPONENT for what scales do not follow: zeros, denormal numbers, which count as 0, and what is
// not finite.
constexpr int NO_EXPONENT = -(1 << 20);

__device__ __forceinline__ int exponent_of(float x) {
    const int biased = static_cast<int>(__float_as_uint(x) >> 23 & 0xff);
    return biased == 0 || biased == 0xff ? NO_EXPONENT : biased - 127;
}

// The exponent for a row or column whose largest element has exponent `top`; one of zeros counts as one of ones.
__device__ __forceinline__ int scaling_exponent(int top) {
    return (top < NO_EXPONENT / 2 ? 0 : top) - TOP_EXPONENT;
}

__device__ __forceinline__ float power_of_two(int exponent) {  // of [-126, 127]
    return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// x · 2^exponent in two steps that both move x the same way, so that nothing is lost that the result can represent.
__device__ __forceinline__ float scale_by(float x, int exponent) {
    exponent = min(max(exponent, -252), 252);
    const int half = exponent / 2;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

// Four neighbours, each by its exponent; nearly always one multiplication each is enough.
__device__ __forceinline__ void scale_by(float (&x)[4], const int (&exponents)[4]) {
    constexpr int LEAST = -64, END = 64;
    const unsigned beyond = (exponents[0] - LEAST) | (exponents[1] - LEAST) | (exponents[2] - LEAST) | (exponents[3] - LEAST);
    if (beyond < END - LEAST) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= power_of_two(exponents[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = scale_by(x[i], exponents[i]);
    }
}

constexpr float LARGEST = 3.4028235e38f, LEAST_NORMAL = 1.1754944e-38f, LARGEST_HALF = 65504.0f;

constexpr int MOST_COMPONENTS = 3;

// Each bfloat16 component stands for 2^bfloat_shift times less than the one before it. Of three none is shifted, so that one
// sum takes all products of components but hi · hi.
__host__ __device__ constexpr int bfloat_shift(int components) { return components > 2 ? 0 : 7; }

// What a component leaves of x for the next one, which is `shifted` times as much. A component that rounding made infinite
// becomes the largest finite one. If x is not finite the remainder is 0, since infinity less infinity would be NaN.
__device__ __forceinline__ float remainder_of(float x, float shifted, unsigned& word) {
    if (!(fabsf(x) <= LARGEST)) return 0.0f;
    if ((word & 0x7fff) == 0x7f80) word = __float_as_uint(x) >> 16;
    return (x - __uint_as_float(word << 16)) * shifted;
}

// Splits pairs of neighbours into words of bfloat16 components.
template <int COMPONENTS, int PAIRS>
__device__ __forceinline__ void split_to_bfloats(const float2 (&x)[PAIRS], unsigned (&words)[COMPONENTS][PAIRS]) {
    constexpr float SHIFTED = 1 << bfloat_shift(COMPONENTS);
    float2 spoilt = {};  // becomes NaN if an element is not finite, since zero times it is added
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        float2 rest = x[i];
#pragma unroll
        for (int p = 0; p < COMPONENTS; ++p) {
            words[p][i] = bfloat_pair(rest.x, rest.y);
            if (p + 1 == COMPONENTS) break;
            const float2 taken = bfloats(words[p][i]);
            rest = make_float2((rest.x - taken.x) * SHIFTED, (rest.y - taken.y) * SHIFTED);
        }
        if (COMPONENTS > 1) spoilt = make_float2(fmaf(rest.x, 0.0f, spoilt.x), fmaf(rest.y, 0.0f, spoilt.y));
    }
    if (COMPONENTS > 1 && !(spoilt.x + spoilt.y == 0.0f)) {  // rarely
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            float2 rest = x[i];
#pragma unroll
            for (int p = 0; p + 1 < COMPONENTS; ++p) {
                const unsigned both = bfloat_pair(rest.x, rest.y);
                unsigned first = both & 0xffff, second = both >> 16;
                rest = make_float2(remainder_of(rest.x, SHIFTED, first), remainder_of(rest.y, SHIFTED, second));
                words[p][i] = first | second << 16;
            }
            words[COMPONENTS - 1][i] = bfloat_pair(rest.x, rest.y);
        }
    }
}

// The same for a number of components known at run time, MOST at most; words of further components have no meaning.
template <int MOST, int PAIRS>
__device__ __forceinline__ void split_to_bfloats(const float2 (&x)[PAIRS], int components, unsigned (&words)[MOST][PAIRS]) {
    if (MOST > 2 && components > 2) {
        split_to_bfloats(x, words);
    } else if (components > 1) {
        unsigned two[2][PAIRS];
        split_to_bfloats(x, two);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) words[0][i] = two[0][i], words[1][i] = two[1][i];
    } else {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) words[0][i] = bfloat_pair(x[i].x, x[i].y);
    }
}

// Stores four neighbours to bfloat16 components.
template <int COMPONENTS>
__device__ __forceinline__ void store_bfloats(uint16_t* to, int64_t component_stride, const float4& x) {
    const float2 pairs[2] = {make_float2(x.x, x.y), make_float2(x.z, x.w)};
    unsigned words[COMPONENTS][2];
    split_to_bfloats(pairs, words);
#pragma unroll
    for (int p = 0; p < COMPONENTS; ++p) *reinterpret_cast<uint2*>(to + p * component_stride) = make_uint2(words[p][0], words[p][1]);
}

// The number that a component and the remainder of the next ones stand for.
template <int COMPONENTS>
__device__ __forceinline__ float2 joined(const float2& high, const float2& low) {
    constexpr float STEP = 1.0f / (1 << bfloat_shift(COMPONENTS));
    return make_float2(fmaf(low.x, STEP, high.x), fmaf(low.y, STEP, high.y));
}

// Four neighbours' words in each bfloat16 component.
template <int COMPONENTS>
struct BfloatQuad {
    uint2 words[COMPONENTS];

    BfloatQuad() = default;
    __device__ __forceinline__ BfloatQuad(const uint16_t* from, int64_t component_stride) {
#pragma unroll
        for (int p = 0; p < COMPONENTS; ++p) words[p] = __ldcg(reinterpret_cast<const uint2*>(from + p * component_stride));
    }
    __device__ __forceinline__ float4 value() const {
        float2 first = bfloats(words[COMPONENTS - 1].x), second = bfloats(words[COMPONENTS - 1].y);
#pragma unroll
        for (int p = COMPONENTS - 2; p >= 0; --p)
            first = joined<COMPONENTS>(bfloats(words[p].x), first), second = joined<COMPONENTS>(bfloats(words[p].y), second);
        return make_float4(first.x, first.y, second.x, second.y);
    }
};

// Eight neighbours, as a vector of each component.
template <int COMPONENTS>
struct BfloatOctet {
    uint4 words[COMPONENTS];

    __device__ __forceinline__ void load(const uint16_t* from, int64_t component_stride) {
#pragma unroll
        for (int p = 0; p < COMPONENTS; ++p) words[p] = __ldcg(reinterpret_cast<const uint4*>(from + p * component_stride));
    }
    __device__ __forceinline__ void add_to(float (&sum)[8]) const {
        add_pair(sum[0], sum[1], [](const uint4& of) { return of.x; });
        add_pair(sum[2], sum[3], [](const uint4& of) { return of.y; });
        add_pair(sum[4], sum[5], [](const uint4& of) { return of.z; });
        add_pair(sum[6], sum[7], [](const uint4& of) { return of.w; });
    }
    template <class Word>
    __device__ __forceinline__ void add_pair(float& first, float& second, const Word& word) const {
        float2 pair = bfloats(word(words[COMPONENTS - 1]));
#pragma unroll
        for (int p = COMPONENTS - 2; p >= 0; --p) pair = joined<COMPONENTS>(bfloats(word(words[p])), pair);
        first += pair.x, second += pair.y;
    }
};

// An operand format has
//     COMPONENTS  numbers per element; each one stands for 2^SHIFT times less than the one before it
//     HALF        whether components are float16, else bfloat16
//     SCALED      whether rows or columns have scales
//     PROMOTED    whether sums of hi · hi restart every so often, because tensor cores truncate
//     SHORT_K     up to this many terms lo · lo is added too: products of pairs leave it out, up to 2^-22 of a term, which
//                 may show in short sums
//     put         stores four neighbours, unless `to` is null, and returns each element's flags; x is multiplied by
//                 2^shift if the format is scaled

template <int COMPONENTS_>
struct Bfloat16s {
    static constexpr int COMPONENTS = COMPONENTS_, SHIFT = bfloat_shift(COMPONENTS), SHORT_K = 0;
    static constexpr bool SCALED = false, HALF = false, PROMOTED = COMPONENTS == 3;

    static __device__ __forceinline__ void put(uint16_t* to, int64_t component_stride, const float4& x, const int (&)[4],
                                               int (&flags)[4]) {
        flags[0] = flags[1] = flags[2] = flags[3] = 0;
        if (to) store_bfloats<COMPONENTS>(to, component_stride, x);
    }
};

using Bfloat16 = Bfloat16s<1>;
using Bfloat16Pair = Bfloat16s<2>;
using Bfloat16Triple = Bfloat16s<3>;

template <int COMPONENTS_>
struct Halves {
    static constexpr int COMPONENTS = COMPONENTS_, SHIFT = 11, SHORT_K = COMPONENTS == 2 ? 128 : 0;
    static constexpr bool SCALED = true, HALF = true, PROMOTED = COMPONENTS == 2;

    static __device__ __forceinline__ void put(uint16_t* to, int64_t component_stride, const float4& x, const int (&shift)[4],
                                               int (&flags)[4]) {
        const float elements[4] = {x.x, x.y, x.z, x.w};
        float scaled[4] = {x.x, x.y, x.z, x.w};
        scale_by(scaled, shift);
        bool are_exact = true;  // or 0, which is so nearly always
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool is_zero = elements[i] == 0.0f;
            are_exact = are_exact & (is_zero | (fabsf(scaled[i]) >= LEAST_EXACT)) & (fabsf(scaled[i]) <= LARGEST_HALF);
            flags[i] = is_zero ? 0 : NONZERO;
        }
        if (!are_exact)
#pragma unroll
            for (int i = 0; i < 4; ++i) flags[i] = flags_of(elements[i], fabsf(scaled[i]));
        if (!to) return;
        uint16_t hi[4], lo[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            hi[i] = half_bits(scaled[i]);
            // If x is not finite lo is 0, since infinity less infinity would be NaN.
            const bool is_finite = fabsf(scaled[i]) <= LARGEST_HALF;
            lo[i] = half_bits(is_finite ? (scaled[i] - half_value(hi[i])) * (1 << SHIFT) : 0.0f);
        }
        *reinterpret_cast<ushort4*>(to) = make_ushort4(hi[0], hi[1], hi[2], hi[3]);
        if (COMPONENTS == 2) *reinterpret_cast<ushort4*>(to + component_stride) = make_ushort4(lo[0], lo[1], lo[2], lo[3]);
    }

    // Of x, whose scaled size this is.
    static __device__ __forceinline__ int flags_of(float x, float size) {
        const bool is_inexact = (fabsf(x) >= LEAST_NORMAL && size < LEAST_EXACT) || fabsf(x) > LARGEST;
        return (x != 0.0f ? NONZERO : 0) | (x != x ? HAS_NAN : 0) | (is_inexact ? INEXACT : 0);
    }
};

using Half = Halves<1>;
using HalfPair = Halves<2>;

}  // namespace mlpgpu
