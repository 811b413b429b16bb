// What an epilogue is: what becomes of a product's sums, for gemm/gemm_sm80.cuh and gemm/gemm_sm90.cuh.
//
// A product passes its epilogue quads: four neighbouring columns of one row of C, the first a multiple of 4. Rows are those
// of the shard.
//     is_aligned()                             whether quads of its arrays are vectors that lie wholly inside a row
//     begin()                                  loads what all quads need; by products that say BEGINS_EPILOGUE, and before
//                                              others get it
//     read<ALIGNED>(row, column)               loads what write() needs, before the sums are complete if registers allow
//     scales(row, column)                      loads what rescale() needs, so that the loads of several quads overlap
//     rescale(row, column, sum, scales)        makes elements of C of the sums; whole warps call it at once, outside C with
//                                              scales of 0
//     kept(row, column)                        loads which elements of a quad a dropout keeps, if it MAY_DROP some
//     write<ALIGNED>(row, column, value, read, kept)
//                                              finishes a quad that begins inside C and may end beyond its last column;
//                                              read<false, APART>(), kept<APART>() and write<false, APART>() take one whose columns are so far apart
//     columns(first, count, thread, threads)   does what is done once per column, by `threads` threads of the blocks that
//                                              compute C's first rows
//     column_partials()                        where gemm/gemm_sm90.cuh stores partial sums of B's columns, or null
// If WRITES_COMPONENTS, an epilogue may read and write nothing but bfloat16 components (it READS_COMPONENTS if it reads
// some) and an array over columns. If is_components_alone(), it is passed pairs of neighbouring columns instead, and the
// caller loads and stores the components:
//     saved(), components()                    the components it reads, or null, and those it writes; it reads the first
//                                              SAVED_COMPONENTS of each element
//     component_stride(), filled()             elements from one component to the next; rows from which on components are 0
//     column_operands(column, operands)        loads what pairs of columns need that lie eight apart
//     pair(sum, column_operand, saved)         finishes a pair, given the numbers that the saved components stand for
//     dropout()                                which elements of C a dropout keeps that comes last, if it MAY_DROP some
// If HAS_ROW_OPERAND, it reads no components, but state of a row and one number per element:
//     row(row, column)                         the state of a row, given a lane's first column of a tile
//     load_row_operand(row, column)            loads the numbers of a pair
//     pair(sum, column_operand, row, numbers)  finishes a pair
//     finish_row(row)                          is called when the lane's columns of the tile have passed
#pragma once

#include "common/reduce.cuh"
#include "math/activations.cuh"
#include "math/kept_elements.cuh"
#include "gemm/operand_formats.cuh"

namespace mlpgpu {

__device__ __forceinline__ void set_element(float4& quad, int i, float value) {
    if (i == 0) quad.x = value;
    if (i == 1) quad.y = value;
    if (i == 2) quad.z = value;
    if (i == 3) quad.w = value;
}

// Stores a quad of a row as bfloat16 components, in each of which it is one vector; elements from column n on become 0. Of
// a quad whose columns are APART, elements up to column `end` are stored one by one.
template <class Format, bool ALIGNED, int APART = 1>
__device__ __forceinline__ void store_quad(uint16_t* row, int64_t component_stride, int column, int n, const float4& value, int end) {
    const auto inside = [&](int i, float x) { return ALIGNED || column + i * APART < n ? x : 0.0f; };
    const float4 filled = make_float4(inside(0, value.x), inside(1, value.y), inside(2, value.z), inside(3, value.w));
    if (APART == 1) {
        store_bfloats<Format::COMPONENTS>(row + column, component_stride, filled);
        return;
    }
    const float2 pairs[2] = {make_float2(filled.x, filled.y), make_float2(filled.z, filled.w)};
    unsigned words[Format::COMPONENTS][2];
    split_to_bfloats(pairs, words);
#pragma unroll
    for (int i = 0; i < 4 * Format::COMPONENTS; ++i) {
        const int p = i / 4, of = i % 4, j = column + of * APART;
        if (j < end) row[p * component_stride + j] = static_cast<uint16_t>(words[p][of / 2] >> of % 2 * 16);
    }
}

// Stores a quad of row `row` as components; rows from `rows` on are padding and become 0, as do columns behind column n - 1
// as far as its vector.
template <class Format, bool ALIGNED, int APART = 1>
__device__ __forceinline__ void store_padded(uint16_t* components, int64_t component_stride, int row, int rows, int column, int n,
                                             const float4& value) {
    uint16_t* const row_components = components + static_cast<int64_t>(row) * padded_columns(n);
    store_quad<Format, ALIGNED, APART>(row_components, component_stride, column, n,
                                       row < rows ? value : make_float4(0.0f, 0.0f, 0.0f, 0.0f), (n + 3) / 4 * 4);
}

// --- from sums to C ---

// Components without scales: sums are elements of C.
struct Unscaled {
    struct Scales {};
    __device__ __forceinline__ Scales scales(int, int) const { return {}; }
    __device__ __forceinline__ void rescale(int, int, float4&, const Scales&) const {}
};

// The float32 array that an operand's components were made of: element (outer, inner), by its strides.
struct Float32Operand {
    const float* data;
    int64_t outer, inner;
};

// Rescales sums by 2^(e of the row + e of the column). Sums that depend on an inexact row or column, and that its errors
// may have changed too much, are recomputed from the float32 arrays. A term is off by at most 2^-20, or 2^-9 with one
// component: that does not matter where sums are at least 16 √length, as docs/mathematics.md derives.
struct Rescaled {
    const int* row_scales;             // of C's rows
    const int* subtracted_row_scales;  // whose exponents are subtracted from those of the rows, or null
    const int* column_scales;          // of C's columns
    Float32Operand a, b;
    int length;  // terms of a sum
    float least;

    __device__ __forceinline__ Rescaled(const int* row_scales, const int* subtracted_row_scales, const int* column_scales,
                                        const Float32Operand& a, const Float32Operand& b, int length)
        : row_scales(row_scales), subtracted_row_scales(subtracted_row_scales), column_scales(column_scales), a(a), b(b),
          length(length),
          least(16.0f * sqrtf(static_cast<float>(length))) {}

    struct Scales {
        int row;  // after the subtraction
        int columns[4];
    };
    __device__ __forceinline__ Scales scales(int row, int column) const {
        const int4 four = *reinterpret_cast<const int4*>(column_scales + column);
        return {row_scales[row] - (subtracted_row_scales ? subtracted_row_scales[row] & ~FLAG_BITS : 0),
                {four.x, four.y, four.z, four.w}};
    }

    __device__ __forceinline__ void rescale(int row, int column, float4& sum, const Scales& scales) const {
        int recomputed = 0;
        float sums[4] = {sum.x, sum.y, sum.z, sum.w};
        int exponents[4];
        const int any = scales.row | scales.columns[0] | scales.columns[1] | scales.columns[2] | scales.columns[3];
        if (any & INEXACT) {  // rarely
#pragma unroll
            for (int i = 0; i < 4; ++i) recomputed |= must_recompute(sums[i], scales.row, scales.columns[i]) << i;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) exponents[i] = exponent_in(scales.row) + exponent_in(scales.columns[i]);
        scale_by(sums, exponents);
        sum = make_float4(sums[0], sums[1], sums[2], sums[3]);
        // One lane after another, the whole warp recomputes the lane's elements.
        for (unsigned lanes = __ballot_sync(WARP_ALL, recomputed); lanes != 0; lanes &= lanes - 1) {
            const int chosen = __ffs(static_cast<int>(lanes)) - 1;
            const int elements = __shfl_sync(WARP_ALL, recomputed, chosen);
            const int m = __shfl_sync(WARP_ALL, row, chosen), n = __shfl_sync(WARP_ALL, column, chosen);
#pragma unroll 1
            for (int i = 0; i < 4; ++i) {
                if (!(elements >> i & 1)) continue;
                const float value = recompute(m, n + i);
                if (static_cast<int>(threadIdx.x % WARP) == chosen) set_element(sum, i, value);
            }
        }
    }

    __device__ __forceinline__ bool must_recompute(float sum, int row_scale, int column_scale) const {
        const float size = fabsf(sum);
        const bool is_accurate = size >= least && size <= LARGEST;
        const int either = row_scale | column_scale, both = row_scale & column_scale;
        return (either & INEXACT) && !(either & HAS_NAN) && (both & NONZERO) && !is_accurate;
    }

    // By a whole warp, in float64, so that the order of the sum changes at most the last bit of the float32 result.
    __device__ __forceinline__ float recompute(int m, int n) const {
        const float* const from_a = a.data + m * a.outer;
        const float* const from_b = b.data + n * b.outer;
        double sum = 0.0;
#pragma unroll 4
        for (int k = threadIdx.x % WARP; k < length; k += WARP)
            sum += static_cast<double>(from_a[k * a.inner]) * from_b[k * b.inner];
        return static_cast<float>(warp_sum(sum));
    }
};

// --- from C to memory ---

struct NoRowOperand {};  // of epilogues without a row operand

// The column operands of an array (n,), or null: pairs from `column` on, eight apart; 0 beyond the last column.
template <int COUNT>
__device__ __forceinline__ void load_column_pairs(const float* of, int n, int column, float2 (&pairs)[COUNT]) {
    const auto each = [&](const auto& pair) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int j = column + i * 8;
            pairs[i] = j < n ? pair(of + j, j) : make_float2(0.0f, 0.0f);
        }
    };
    if (!of)
        each([](const float*, int) { return make_float2(0.0f, 0.0f); });
    else if (reinterpret_cast<uintptr_t>(of) % 8 == 0 && n % 2 == 0)
        each([](const float* from, int) { return __ldcg(reinterpret_cast<const float2*>(from)); });
    else
        each([&](const float* from, int j) { return make_float2(__ldcg(from), j + 1 < n ? __ldcg(from + 1) : 0.0f); });
}

// An epilogue that neither reads nor writes components.
struct NoComponents {
    static constexpr bool WRITES_COMPONENTS = false, READS_COMPONENTS = false, HAS_ROW_OPERAND = false, MAY_DROP = false;
    static constexpr int SAVED_COMPONENTS = 1;
    using Row = NoRowOperand;
    __device__ __forceinline__ bool is_components_alone() const { return false; }

    __device__ __forceinline__ void begin() {}
};

// An epilogue: what rescales sums, and what finishes values.
template <class Sums, class Values>
struct Epilogue {
    Sums sums;
    Values values;

    using Scales = typename Sums::Scales;
    using Read = typename Values::Read;
    __device__ __forceinline__ void begin() { values.begin(); }
    __device__ __forceinline__ bool is_aligned() const { return values.is_aligned(); }
    template <bool ALIGNED, int... APART>
    __device__ __forceinline__ Read read(int row, int column) const {
        return values.template read<ALIGNED, APART...>(row, column);
    }
    __device__ __forceinline__ Scales scales(int row, int column) const { return sums.scales(row, column); }
    __device__ __forceinline__ void rescale(int row, int column, float4& sum, const Scales& scales) const {
        sums.rescale(row, column, sum, scales);
    }
    static constexpr bool MAY_DROP = Values::MAY_DROP;
    template <int APART = 1>
    __device__ __forceinline__ uint64_t kept(int row, int column) const {
        if constexpr (MAY_DROP) return values.template kept<APART>(row, column);
        return 0;
    }
    template <bool ALIGNED, int... APART>
    __device__ __forceinline__ void write(int row, int column, const float4& value, const Read& read, uint64_t kept) const {
        if constexpr (MAY_DROP) values.template write<ALIGNED, APART...>(row, column, value, read, kept);
        else values.template write<ALIGNED, APART...>(row, column, value, read);
    }
    __device__ __forceinline__ void columns(int first, int count, int thread, int threads) const {
        values.columns(first, count, thread, threads);
    }
    __device__ __forceinline__ float* column_partials() const { return values.column_partials(); }

    static constexpr bool WRITES_COMPONENTS = Values::WRITES_COMPONENTS, READS_COMPONENTS = Values::READS_COMPONENTS;
    static constexpr int SAVED_COMPONENTS = Values::SAVED_COMPONENTS;
    __device__ __forceinline__ bool is_components_alone() const { return WRITES_COMPONENTS && values.is_components_alone(); }
    __device__ __forceinline__ const uint16_t* saved() const { return values.saved(); }
    __device__ __forceinline__ uint16_t* components() const { return values.components(); }
    __device__ __forceinline__ int64_t component_stride() const { return values.component_stride(); }
    __device__ __forceinline__ const KeptElements& dropout() const { return values.dropout; }
    __device__ __forceinline__ int filled() const { return values.filled(); }
    template <int COUNT>
    __device__ __forceinline__ void column_operands(int column, float2 (&operands)[COUNT]) const {
        values.column_operands(column, operands);
    }
    __device__ __forceinline__ float2 pair(const float2& sum, const float2& of, const float2& saved) const {
        return values.pair(sum, of, saved);
    }

    static constexpr bool HAS_ROW_OPERAND = Values::HAS_ROW_OPERAND;
    using Row = typename Values::Row;
    __device__ __forceinline__ Row row(int row, int column) const { return values.row(row, column); }
    __device__ __forceinline__ float2 load_row_operand(const Row& row, int column) const { return values.load_row_operand(row, column); }
    __device__ __forceinline__ float2 pair(const float2& sum, const float2& of, Row& row, const float2& row_operand) const {
        return values.pair(sum, of, row, row_operand);
    }
    __device__ __forceinline__ void finish_row(const Row& row) const { values.finish_row(row); }
};

template <class Sums, class Values>
__device__ __forceinline__ Epilogue<Sums, Values> epilogue_of(const Sums& sums, const Values& values) {
    return {sums, values};
}

}  // namespace mlpgpu
