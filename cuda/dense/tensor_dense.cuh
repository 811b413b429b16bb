// The products of a dense layer on tensor cores: x (B, k), W (k, n), y (B, n), as split operands beside the float32 arrays
// of dense/dense.cuh.
//
// A Product is how C = A · B is computed: GemmSm80 of gemm/gemm_sm80.cuh, or GemmSm90 of gemm/gemm_sm90.cuh.
//     Format  the operand format (gemm/operand_formats.cuh)
//     Source  the type of an operand: its components, or the copy engine's map of them
//     multiply<A_INNER, B_INNER>(a, a_stride, a_pitch, b, b_stride, b_pitch, m, n, k, prefetch, epilogue)
//             INNER tells whether the operand's rows run along k; `stride` and `pitch` are elements from one component
//             and from one row to the next
// Null outputs are skipped. Row and column scales are those of gemm/operand_formats.cuh.
#pragma once

#include "common/step.cuh"
#include "common/vectors.cuh"
#include "gemm/epilogue.cuh"

namespace mlpgpu {

// z = C + b, y = f(z); where the epilogue DROPS elements, y is what the dropout leaves of f(z). `y_components` receive y as
// bfloat16, with rows of 0 from `rows` on. Null outputs are skipped.
template <class Format, class Activation, bool DROPS>
struct ForwardEpilogue {
    const float* b;  // (n,)
    float* z;        // (rows, n)
    float* y;        // (rows, n)
    uint16_t* y_components;
    int64_t y_stride;
    KeptElements dropout;
    int rows, n;

    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ bool is_aligned() const {
        return is_vectored_or_null(b, n) && is_vectored_or_null(z, n) && is_vectored_or_null(y, n);
    }

    using Read = float4;
    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ Read read(int, int column) const {
        return b ? load_row<ALIGNED, APART>(b, n, column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    template <int APART = 1>
    __device__ __forceinline__ uint64_t kept(int row, int column) const {
        return row < rows ? dropout.of_quad<APART>(row, column) : 0;
    }
    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ void write(int row, int column, const float4& value, const Read& bias, uint64_t kept = 0) const {
        float4 sum = make_float4(value.x + bias.x, value.y + bias.y, value.z + bias.z, value.w + bias.w);
        const int64_t offset = static_cast<int64_t>(row) * n;
        if (z && row < rows) store_row<ALIGNED, APART>(z + offset, n, column, sum);
        sum = make_float4(Activation::forward(sum.x), Activation::forward(sum.y), Activation::forward(sum.z),
                          Activation::forward(sum.w));
        if (DROPS) dropout.drop<APART>(kept, column, sum);
        if (y && row < rows) store_row<ALIGNED, APART>(y + offset, n, column, sum);
        if (WRITES_COMPONENTS && y_components) store_padded<Format, ALIGNED, APART>(y_components, y_stride, row, rows, column, n, sum);
    }
    __device__ __forceinline__ void columns(int, int, int, int) const {}
    __device__ __forceinline__ float* column_partials() const { return nullptr; }

    static constexpr bool WRITES_COMPONENTS = !Format::SCALED, READS_COMPONENTS = false, HAS_ROW_OPERAND = false;
    static constexpr bool MAY_DROP = DROPS;
    static constexpr int SAVED_COMPONENTS = 1;
    using Row = NoRowOperand;
    __device__ __forceinline__ bool is_components_alone() const { return y_components && !y && !z; }
    __device__ __forceinline__ const uint16_t* saved() const { return nullptr; }
    __device__ __forceinline__ uint16_t* components() const { return y_components; }
    __device__ __forceinline__ int64_t component_stride() const { return y_stride; }
    __device__ __forceinline__ int filled() const { return rows; }
    template <int COUNT>
    __device__ __forceinline__ void column_operands(int column, float2 (&operands)[COUNT]) const {
        load_column_pairs(b, n, column, operands);
    }
    __device__ __forceinline__ float2 pair(const float2& sum, const float2& bias, const float2&) const {
        return make_float2(Activation::forward(sum.x + bias.x), Activation::forward(sum.y + bias.y));
    }
};

// z = x W + b, y = f(z); where the kernel DROPS elements, y is what the dropout leaves of f(z), and `kept` are the bits of those
// that stay. Components of y are stored if the format has no scales.
template <class Product, class Activation, bool DROPS = false>
__device__ __forceinline__ void tensor_forward(const Step* step, int shard, int shards,
                                               typename Product::Source x_components, int64_t x_stride,
                                               typename Product::Source w_components, const int* x_row_scales,
                                               const int* w_column_scales, const float* x, const float* w, const float* b,
                                               float* z, float* y, uint16_t* y_components, int64_t y_stride,
                                               const uint32_t* kept, float keep, int prefetch, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = rows.first;
    const int pitch_k = padded_columns(k), pitch_n = padded_columns(n);
    const ForwardEpilogue<typename Product::Format, Activation, DROPS> end = {
        b, z ? z + first * n : z, y ? y + first * n : y, y_components, y_stride, {kept, keep, n}, rows.count, n};
    const auto multiply = [&](int written, const auto& epilogue) {
        Product::template multiply<true, false>(x_components, x_stride, pitch_k, w_components, padded_rows(k) * pitch_n, pitch_n,
                                                written, n, k, prefetch, epilogue);
    };
    if constexpr (Product::Format::SCALED)
        multiply(rows.count,
                 epilogue_of(Rescaled(x_row_scales, nullptr, w_column_scales, {x + first * k, k, 1}, {w, 1, n}, k), end));
    else
        multiply(y_components ? filled_rows(rows.count) : rows.count, epilogue_of(Unscaled(), end));
}

// dx = C ∘ f'(saved) · keep; where the epilogue DROPS elements, dx is what the dropout leaves of C ∘ f'(saved · restore), as
// dense/dense.cuh says. `saved` is an array or bfloat16 components, or neither; `dx_components` as above.
template <class Format, class Activation, bool DROPS>
struct BackwardInputEpilogue {
    const float* saved_array;      // (rows, k)
    const uint16_t* saved_components;  // (components, rows, k)
    float* dx;                     // (rows, k)
    uint16_t* dx_components;
    int64_t dx_stride;  // also of the saved components
    float keep, restore;
    KeptElements dropout;
    int rows, k;

    static constexpr bool WRITES_COMPONENTS = !Format::SCALED, READS_COMPONENTS = WRITES_COMPONENTS;
    static constexpr int SAVED_COMPONENTS = DERIVED_BY_SIGN<Activation> ? 1 : Format::COMPONENTS;
    static constexpr bool HAS_ROW_OPERAND = false, MAY_DROP = DROPS;
    using Row = NoRowOperand;

    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ bool is_aligned() const {
        return is_vectored_or_null(saved_array, k) && is_vectored_or_null(dx, k);
    }

    __device__ __forceinline__ float slope(float of) const {
        return DROPS ? Activation::derivative(of * restore) : Activation::derivative(of) * keep;
    }

    // The words of a quad as they lie in the array, which are as many as of two components, or in the components.
    struct Read {
        BfloatQuad<SAVED_COMPONENTS == MOST_COMPONENTS ? MOST_COMPONENTS : 2> quad;
    };
    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ Read read(int row, int column) const {
        static_assert(APART == 1 || !READS_COMPONENTS);
        Read found = {};
        if (WRITES_COMPONENTS && saved_components) {
            const BfloatQuad<SAVED_COMPONENTS> quad(saved_components + static_cast<int64_t>(row) * padded_columns(k) + column,
                                                    dx_stride);
#pragma unroll
            for (int p = 0; p < SAVED_COMPONENTS; ++p) found.quad.words[p] = quad.words[p];
        } else if (saved_array && row < rows) {
            const float4 x = load_row<ALIGNED, APART>(saved_array + static_cast<int64_t>(row) * k, k, column);
            found.quad.words[0] = make_uint2(__float_as_uint(x.x), __float_as_uint(x.y));
            found.quad.words[1] = make_uint2(__float_as_uint(x.z), __float_as_uint(x.w));
        }
        return found;
    }
    template <int APART = 1>
    __device__ __forceinline__ uint64_t kept(int row, int column) const {
        return row < rows ? dropout.of_quad<APART>(row, column) : 0;
    }
    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ void write(int row, int column, float4 value, const Read& read, uint64_t kept = 0) const {
        if (saved_array || (WRITES_COMPONENTS && saved_components)) {
            const auto& words = read.quad.words;
            float4 of = make_float4(__uint_as_float(words[0].x), __uint_as_float(words[0].y),
                                    __uint_as_float(words[1].x), __uint_as_float(words[1].y));
            if (WRITES_COMPONENTS && saved_components) {
                BfloatQuad<SAVED_COMPONENTS> quad;
#pragma unroll
                for (int p = 0; p < SAVED_COMPONENTS; ++p) quad.words[p] = words[p];
                of = quad.value();
            }
            value.x *= slope(of.x), value.y *= slope(of.y);
            value.z *= slope(of.z), value.w *= slope(of.w);
        }
        if (DROPS) dropout.drop<APART>(kept, column, value);
        if (dx && row < rows) store_row<ALIGNED, APART>(dx + static_cast<int64_t>(row) * k, k, column, value);
        if (WRITES_COMPONENTS && dx_components)
            store_padded<Format, ALIGNED, APART>(dx_components, dx_stride, row, rows, column, k, value);
    }
    __device__ __forceinline__ void columns(int, int, int, int) const {}
    __device__ __forceinline__ float* column_partials() const { return nullptr; }

    __device__ __forceinline__ bool is_components_alone() const { return dx_components && !dx && !saved_array; }
    __device__ __forceinline__ const uint16_t* saved() const { return saved_components; }
    __device__ __forceinline__ uint16_t* components() const { return dx_components; }
    __device__ __forceinline__ int64_t component_stride() const { return dx_stride; }
    __device__ __forceinline__ int filled() const { return rows; }
    template <int COUNT>
    __device__ __forceinline__ void column_operands(int, float2 (&)[COUNT]) const {}
    __device__ __forceinline__ float2 pair(const float2& sum, const float2&, const float2& of) const {
        if (!saved_components) return sum;
        return make_float2(sum.x * slope(of.x), sum.y * slope(of.y));
    }
};

// dx = (dz Wᵀ) ∘ f'(saved), f being the activation that made x. Between f and W there may have been a dropout, as
// dense/dense.cuh says. Components of dx and of what is saved as of y above.
template <class Product, class Activation, bool DROPS = false>
__device__ __forceinline__ void tensor_backward_input(const Step* step, int shard, int shards,
                                                      typename Product::Source dz_components, int64_t dz_stride,
                                                      typename Product::Source w_components, const int* dz_row_scales,
                                                      const int* w_row_scales, const float* dz, const float* w,
                                                      const float* saved, const uint16_t* saved_components, float* dx,
                                                      uint16_t* dx_components, int64_t dx_stride, const uint32_t* kept,
                                                      float keep, float restore, int prefetch, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = rows.first;
    const int pitch = padded_columns(n);
    const BackwardInputEpilogue<typename Product::Format, Activation, DROPS> end = {
        saved ? saved + first * k : saved, saved_components, dx ? dx + first * k : dx, dx_components, dx_stride,
        keep, restore, {kept, keep, k}, rows.count, k};
    const auto multiply = [&](int written, const auto& epilogue) {
        Product::template multiply<true, true>(dz_components, dz_stride, pitch, w_components, padded_rows(k) * pitch, pitch,
                                               written, k, n, prefetch, epilogue);
    };
    if constexpr (Product::Format::SCALED)
        multiply(rows.count,
                 epilogue_of(Rescaled(dz_row_scales, nullptr, w_row_scales, {dz + first * n, n, 1}, {w, n, 1}, n), end));
    else
        multiply(dx_components ? filled_rows(rows.count) : rows.count, epilogue_of(Unscaled(), end));
}

// Stores dW to (k, n).
struct GradientEpilogue : NoComponents {
    float* to;
    float* db_partials;  // (row tiles, n padded), or null: another launch adds them up
    int n;

    __device__ __forceinline__ bool is_aligned() const { return is_vectored_or_null(to, n); }

    struct Read {};
    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ Read read(int, int) const {
        return {};
    }
    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ void write(int row, int column, const float4& value, const Read&) const {
        store_row<ALIGNED, APART>(to + static_cast<int64_t>(row) * n, n, column, value);
    }
    __device__ __forceinline__ void columns(int, int, int, int) const {}
    __device__ __forceinline__ float* column_partials() const { return db_partials; }
};

// dW = xᵀ dz (k, n), finished by the epilogue `end`.
template <class Product, class Write>
__device__ __forceinline__ void multiply_backward_weight(const Step* step, int shard, int shards,
                                                         typename Product::Source x_components, int64_t x_stride,
                                                         typename Product::Source dz_components, int64_t dz_stride,
                                                         const int* x_column_scales, const int* w_row_scales,
                                                         const int* dz_column_scales, const float* x, const float* dz,
                                                         int prefetch, int k, int n, const Write& end) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = rows.first;
    const auto multiply = [&](const auto& epilogue) {
        Product::template multiply<false, false>(x_components, x_stride, padded_columns(k), dz_components, dz_stride,
                                                 padded_columns(n), k, n, rows.count, prefetch, epilogue);
    };
    if constexpr (Product::Format::SCALED)
        multiply(epilogue_of(
            Rescaled(x_column_scales, w_row_scales, dz_column_scales, {x + first * k, 1, k}, {dz + first * n, 1, n}, rows.count), end));
    else
        multiply(epilogue_of(Unscaled(), end));
}

// Partial sums of db are stored unless `db_partials` is null.
template <class Product>
__device__ __forceinline__ void tensor_backward_weight(const Step* step, int shard, int shards,
                                                       typename Product::Source x_components, int64_t x_stride,
                                                       typename Product::Source dz_components, int64_t dz_stride,
                                                       const int* x_column_scales, const int* w_row_scales, const int* dz_column_scales,
                                                       const float* x, const float* dz, float* dw,
                                                       float* db_partials, int prefetch, int k, int n) {
    multiply_backward_weight<Product>(step, shard, shards, x_components, x_stride, dz_components, dz_stride, x_column_scales, w_row_scales,
                                      dz_column_scales, x, dz, prefetch, k, n, GradientEpilogue{{}, dw, db_partials, n});
}

}  // namespace mlpgpu
