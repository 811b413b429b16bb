// What becomes of a product's elements, for both kinds of tensor-core products (tensor.cuh, wgmma.cuh).
//
// A product hands its epilogue quads: four neighbouring columns of one row, the first a multiple of 4.
//     settle(row, column, inside, sum)   makes C of the sums; whole warps call it at once, also outside C
//     read(row, column)                  loads what write needs, so that several quads' loads overlap
//     write(row, column, value, read)    the quad begins inside C; its end may lie beyond the last column
// Rows are those of the share.
#pragma once

#include "activations.cuh"
#include "planes.cuh"

namespace mlpgpu {

__device__ __forceinline__ void set_element(float4& quad, int i, float value) {
    if (i == 0) quad.x = value;
    if (i == 1) quad.y = value;
    if (i == 2) quad.z = value;
    if (i == 3) quad.w = value;
}

// Columns `column` to `column` + 3 of a row of n; 0 beyond it.
__device__ __forceinline__ float4 load_quad(const float* row, int column, int n) {
    return row_vector(row, n, column, reinterpret_cast<uintptr_t>(row) % 16 == 0);
}

__device__ __forceinline__ void store_quad(float* row, int column, int n, const float4& value) {
    if (column + 4 <= n && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
        *reinterpret_cast<float4*>(row + column) = value;
        return;
    }
    row[column] = value.x;
    if (column + 1 < n) row[column + 1] = value.y;
    if (column + 2 < n) row[column + 2] = value.z;
    if (column + 3 < n) row[column + 3] = value.w;
}

// The same of a row of a plane of bfloat16, whose padding holds 0.
__device__ __forceinline__ float4 load_quad(const uint16_t* row, int column, int) {
    const ushort4 bits = *reinterpret_cast<const ushort4*>(row + column);
    return make_float4(bfloat_value(bits.x), bfloat_value(bits.y), bfloat_value(bits.z), bfloat_value(bits.w));
}

__device__ __forceinline__ void store_quad(uint16_t* row, int column, int n, const float4& value) {
    const auto bits = [&](int i, float x) { return column + i < n ? bfloat_bits(x) : static_cast<uint16_t>(0); };
    *reinterpret_cast<ushort4*>(row + column) =
        make_ushort4(bits(0, value.x), bits(1, value.y), bits(2, value.z), bits(3, value.w));
}

// --- from sums to C ---

// Planes without scales.
struct AsIs {
    __device__ __forceinline__ void settle(int, int, bool, float4&) const {}
};

// The float32 array that an operand's planes were made of: element (outer, inner), by its steps.
struct Original {
    const float* data;
    int64_t outer, inner;
};

// Scales sums back.  Those that what is not held in their lines may have moved too far are made again from
// the float32 arrays.  A term is off by at most 2^-20, or 2^-9 with one plane: nothing beside 16 √length
// where sums are that large, as docs/mathematics.md derives.
struct Scaled {
    const int* rows;         // lines of C's rows
    const int* row_weights;  // lines whose exponents the rows' are less by, or null
    const int* columns;      // lines of C's columns
    Original a, b;
    int length;  // of the sums
    float least;

    __device__ __forceinline__ Scaled(const int* rows, const int* row_weights, const int* columns, const Original& a,
                                      const Original& b, int length)
        : rows(rows), row_weights(row_weights), columns(columns), a(a), b(b), length(length),
          least(16.0f * sqrtf(static_cast<float>(length))) {}

    __device__ __forceinline__ void settle(int row, int column, bool inside, float4& sum) const {
        const int line = inside ? rows[row] : 0;
        const int exponent = exponent_in(line) - (inside && row_weights ? exponent_in(row_weights[row]) : 0);
        const int4 lines = inside ? *reinterpret_cast<const int4*>(columns + column) : make_int4(0, 0, 0, 0);
        int doubtful = 0;
        finish(sum.x, line, exponent, lines.x, 1, doubtful);
        finish(sum.y, line, exponent, lines.y, 2, doubtful);
        finish(sum.z, line, exponent, lines.z, 4, doubtful);
        finish(sum.w, line, exponent, lines.w, 8, doubtful);
        // Lanes take turns, and the whole warp works on each one's elements.
        for (unsigned lanes = __ballot_sync(WARP_ALL, doubtful); lanes != 0; lanes &= lanes - 1) {
            const int turn = __ffs(static_cast<int>(lanes)) - 1;
            const int elements = __shfl_sync(WARP_ALL, doubtful, turn);
            const int m = __shfl_sync(WARP_ALL, row, turn), n = __shfl_sync(WARP_ALL, column, turn);
#pragma unroll 1
            for (int i = 0; i < 4; ++i) {
                if (!(elements >> i & 1)) continue;
                const float value = exact(m, n + i);
                if (static_cast<int>(threadIdx.x % WARP) == turn) set_element(sum, i, value);
            }
        }
    }

    __device__ __forceinline__ void finish(float& sum, int line, int exponent, int column, int bit,
                                           int& doubtful) const {
        const float size = fabsf(sum);
        const bool good = size >= least && size <= 3.4028235e38f;
        const int either = line | column, both = line & column;
        if ((either & UNHELD) && !(either & NAN_IN) && (both & USED) && !good) doubtful |= bit;
        sum = scale_by(sum, exponent + exponent_in(column));
    }

    // By a whole warp: in float64, so the order matters to no bit that float32 shows but the last.
    __device__ __forceinline__ float exact(int m, int n) const {
        const float* const from_a = a.data + m * a.outer;
        const float* const from_b = b.data + n * b.outer;
        double sum = 0.0;
        for (int k = threadIdx.x % WARP; k < length; k += WARP)
            sum += static_cast<double>(from_a[k * a.inner]) * from_b[k * b.inner];
        return static_cast<float>(warp_sum(sum));
    }
};

// --- from C to memory ---

// z = C + b, y = f(z).  `y_plane` takes y as bfloat16, with rows of 0 from `rows` on.  What is null is not wanted.
template <class Activation>
struct Forward {
    const float* b;  // (n,)
    float* z;        // (rows, n)
    float* y;        // (rows, n)
    uint16_t* y_plane;
    int rows, n;

    using Read = float4;
    __device__ __forceinline__ Read read(int, int column) const {
        return b ? load_quad(b, column, n) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __device__ __forceinline__ void write(int row, int column, const float4& value, const Read& bias) const {
        float4 sum = make_float4(value.x + bias.x, value.y + bias.y, value.z + bias.z, value.w + bias.w);
        const int64_t at = static_cast<int64_t>(row) * n;
        if (z && row < rows) store_quad(z + at, column, n, sum);
        sum = make_float4(Activation::forward(sum.x), Activation::forward(sum.y), Activation::forward(sum.z),
                          Activation::forward(sum.w));
        if (y && row < rows) store_quad(y + at, column, n, sum);
        if (y_plane) store_quad(y_plane + static_cast<int64_t>(row) * padded_columns(n), column, row < rows ? n : 0, sum);
    }
};

// dx = C ∘ f'(saved), `saved` being an array or a plane of bfloat16, or neither; `dx_plane` as above.
template <class Activation>
struct BackwardInput {
    const float* saved;           // (rows, k)
    const uint16_t* saved_plane;  // (rows, k)
    float* dx;                    // (rows, k)
    uint16_t* dx_plane;
    int rows, k;

    using Read = float4;
    __device__ __forceinline__ Read read(int row, int column) const {
        if (saved && row < rows) return load_quad(saved + static_cast<int64_t>(row) * k, column, k);
        if (saved_plane) return load_quad(saved_plane + static_cast<int64_t>(row) * padded_columns(k), column, k);
        return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __device__ __forceinline__ void write(int row, int column, float4 value, const Read& of) const {
        if (saved || saved_plane) {
            value.x *= Activation::derivative(of.x), value.y *= Activation::derivative(of.y);
            value.z *= Activation::derivative(of.z), value.w *= Activation::derivative(of.w);
        }
        if (dx && row < rows) store_quad(dx + static_cast<int64_t>(row) * k, column, k, value);
        if (dx_plane) store_quad(dx_plane + static_cast<int64_t>(row) * padded_columns(k), column, row < rows ? k : 0, value);
    }
};

// C as it is, to (m, n).
struct Store {
    float* to;
    int n;

    struct Read {};
    __device__ __forceinline__ Read read(int, int) const { return {}; }
    __device__ __forceinline__ void write(int row, int column, const float4& value, const Read&) const {
        store_quad(to + static_cast<int64_t>(row) * n, column, n, value);
    }
};

// The two together.
template <class Settle, class Write>
struct Epilogue {
    Settle sums;
    Write values;

    using Read = typename Write::Read;
    __device__ __forceinline__ void settle(int row, int column, bool inside, float4& sum) const {
        sums.settle(row, column, inside, sum);
    }
    __device__ __forceinline__ Read read(int row, int column) const { return values.read(row, column); }
    __device__ __forceinline__ void write(int row, int column, const float4& value, const Read& read) const {
        values.write(row, column, value, read);
    }
};

template <class Settle, class Write>
__device__ __forceinline__ Epilogue<Settle, Write> epilogue_of(const Settle& sums, const Write& values) {
    return {sums, values};
}

}  // namespace mlpgpu
