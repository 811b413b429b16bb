// The 16-bit planes that tensor cores multiply, made of float32 arrays.
//
// A form says how a number x is held:
//   Bfloat16   the bfloat16 nearest to x
//   Half       x' = x · 2^-e; the half nearest to x'
//   HalfPair   x' = hi + lo · 2^-11: hi as Half, lo the half nearest to (x' - hi) · 2^11
// Exponents e belong to lines.  A line is what a product does not sum over: a row of C for its first
// operand, a column of C for its second; so C's element is its sum times 2^(e of the row + e of the
// column).  A line's largest |x'| lies in [2^14, 2^15).  What is many binades smaller is held with an
// absolute error instead of a relative one: the line is flagged, and products see to it.  Why that
// suffices is derived in docs/mathematics.md, as are the four scales:
//   W (k, n)    W' = W · 2^-e_W[row]
//   X (B, k)    X' = X · 2^(e_W[column] - e_X[row]), for x W, and for xᵀ dz
//   dZ (B, n)   dZ' = dZ · 2^-e_Z[row], for dz Wᵀ
//   dZ (B, n)   dZ'' = dZ · 2^(e_X[row] - e_T), for xᵀ dz; e_T is one for all
//
// Planes of an array (lines, n) are (PLANES, lines padded to 128, n padded to 64), row-major, and belong
// to one share: its first row is row 0.  The padding is written as 0 each time, so products read it.
#pragma once

#include "step.cuh"

namespace mlpgpu {

constexpr int PLANE_ROWS = 128, PLANE_COLUMNS = 64;

__device__ __forceinline__ int64_t padded_rows(int64_t rows) { return (rows + PLANE_ROWS - 1) / PLANE_ROWS * PLANE_ROWS; }
__device__ __forceinline__ int padded_columns(int n) { return (n + PLANE_COLUMNS - 1) / PLANE_COLUMNS * PLANE_COLUMNS; }

// What is known of a line, in one word: its exponent · 8, and these.
constexpr int UNHELD = 1;  // it has an element that is not held to the form's precision, or is infinite
constexpr int NAN_IN = 2;  // it has a NaN
constexpr int USED = 4;    // it has an element other than 0
constexpr int FLAGS = 7;

__device__ __forceinline__ int exponent_in(int line) { return line >> 3; }

// Of |x'|: its place in the range, and below what it is not held to the last bit.
constexpr int TOP_EXPONENT = 14;
constexpr float LEAST_HELD = 1.0f / (1 << 13);

// floor(log2 |x|), or NO_EXPONENT for what a line's scale does not follow: zeros, denormal numbers, which
// count as 0, and what is not finite.
constexpr int NO_EXPONENT = -(1 << 20);

__device__ __forceinline__ int exponent_of(float x) {
    const int biased = static_cast<int>(__float_as_uint(x) >> 23 & 0xff);
    return biased == 0 || biased == 0xff ? NO_EXPONENT : biased - 127;
}

// The exponent of a line whose largest element has exponent `top`; a line of zeros counts as one of ones.
__device__ __forceinline__ int line_exponent(int top) {
    return (top < NO_EXPONENT / 2 ? 0 : top) - TOP_EXPONENT;
}

__device__ __forceinline__ float power_of_two(int exponent) {  // of [-126, 127]
    return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// x · 2^exponent in two steps, which both move x the same way: nothing is lost that the result can hold.
__device__ __forceinline__ float scale_by(float x, int exponent) {
    exponent = min(max(exponent, -252), 252);
    const int half = exponent / 2;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

// An element as a form holds it, in 16-bit words, and what that says of its lines.
struct Held {
    uint16_t hi, lo;
    int flags;
};

struct Bfloat16 {
    static constexpr int PLANES = 1;
    static constexpr bool SCALED = false, HALF = false;
    static __device__ __forceinline__ Held hold(float x, int) { return {bfloat_bits(x), 0, 0}; }
};

// `exponent` is what x is multiplied with, as a power of two.
__device__ __forceinline__ Held hold_half(float x, int exponent) {
    const float scaled = scale_by(x, exponent);
    const float size = fabsf(scaled);
    const int flags = (x != 0.0f ? USED : 0) | (x != x ? NAN_IN : 0) |
                      ((exponent_of(x) > NO_EXPONENT && size < LEAST_HELD) || fabsf(x) > 3.4028235e38f ? UNHELD : 0);
    const uint16_t hi = half_bits(scaled);
    // Of what is not finite there is no rest: infinity less infinity would be NaN.
    const float rest = size <= 65504.0f ? (scaled - half_value(hi)) * 2048.0f : 0.0f;
    return {hi, half_bits(rest), flags};
}

struct Half {
    static constexpr int PLANES = 1;
    static constexpr bool SCALED = true, HALF = true;
    static __device__ __forceinline__ Held hold(float x, int exponent) { return hold_half(x, exponent); }
};

struct HalfPair {
    static constexpr int PLANES = 2;
    static constexpr bool SCALED = true, HALF = true;
    static __device__ __forceinline__ Held hold(float x, int exponent) { return hold_half(x, exponent); }
};

// A float32 array's row in vectors of four; 0 beyond its end.
__device__ __forceinline__ float4 row_vector(const float* row, int n, int column, bool vectored) {
    if (vectored && column + 4 <= n) return *reinterpret_cast<const float4*>(row + column);
    float4 four;
    four.x = column < n ? row[column] : 0.0f;
    four.y = column + 1 < n ? row[column + 1] : 0.0f;
    four.z = column + 2 < n ? row[column + 2] : 0.0f;
    four.w = column + 3 < n ? row[column + 3] : 0.0f;
    return four;
}

// Words j to j + 3 of an array that reaches as far as the padding; 0 where there is none.  They may be
// changing, so they are read where others write them, past the first-level cache.
__device__ __forceinline__ int4 vector_of(const int* words, int j) {
    return words ? __ldcg(reinterpret_cast<const int4*>(words + j)) : make_int4(0, 0, 0, 0);
}

// What a row's vectors are made of: planes, flags of the row, and of its columns where they are wanted.
template <class Form>
struct RowPlanes {
    const int* weight_lines;
    uint16_t* planes;
    int64_t plane;
    int* columns;
    int shift, flags;

    __device__ __forceinline__ void put(int j, const float4& x) {
        const int4 weight = vector_of(Form::SCALED ? weight_lines : nullptr, j);
        const Held held[4] = {
            Form::hold(x.x, shift + exponent_in(weight.x)), Form::hold(x.y, shift + exponent_in(weight.y)),
            Form::hold(x.z, shift + exponent_in(weight.z)), Form::hold(x.w, shift + exponent_in(weight.w))};
        if (planes) {
            *reinterpret_cast<ushort4*>(planes + j) = make_ushort4(held[0].hi, held[1].hi, held[2].hi, held[3].hi);
            if (Form::PLANES == 2)
                *reinterpret_cast<ushort4*>(planes + plane + j) =
                    make_ushort4(held[0].lo, held[1].lo, held[2].lo, held[3].lo);
        }
        if (!Form::SCALED) return;
        flags |= held[0].flags | held[1].flags | held[2].flags | held[3].flags;
        if (!columns) return;
        const int4 there = vector_of(columns, j);
        const int known[4] = {there.x, there.y, there.z, there.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (held[i].flags & ~known[i]) atomicOr(columns + j + i, held[i].flags);
    }
};

// The largest exponent of four elements that meet these weights.
__device__ __forceinline__ int top_exponent(const float4& x, const int4& weight) {
    return max(max(exponent_of(x.x) + exponent_in(weight.x), exponent_of(x.y) + exponent_in(weight.y)),
               max(exponent_of(x.z) + exponent_in(weight.z), exponent_of(x.w) + exponent_in(weight.w)));
}

// The planes of one row by one block, and its line.  `row` is null for a row of padding.
// Where an argument may be null:
//   weight_lines  of the weights that the row's columns will meet
//   planes        what is asked for is the line alone
//   columns       flags are added to those of the columns, where they are not yet there
// Arrays over columns reach as far as the padding.
template <class Form>
__device__ __forceinline__ void split_row(const float* row, const int* weight_lines, uint16_t* planes, int64_t plane,
                                          int* line, int* columns, int n) {
    SHARED(int, scratch);  // a word for each warp, twice
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const int first = 4 * threadIdx.x, stride = 4 * blockDim.x, pitch = padded_columns(n);
    const bool vectored = reinterpret_cast<uintptr_t>(row) % 16 == 0;
    const auto vector = [&](int j) {
        return row && j < n ? row_vector(row, n, j, vectored) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    };

    // Of a row that is not too long each thread keeps its part in registers; the rest is read twice.
    constexpr int KEPT = 4;
    float4 kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i] = vector(first + i * stride);

    RowPlanes<Form> out = {weight_lines, planes, plane, columns, 0, 0};
    if (Form::SCALED) {
        int top = NO_EXPONENT;
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            if (first + i * stride < n) top = max(top, top_exponent(kept[i], vector_of(weight_lines, first + i * stride)));
        for (int j = first + KEPT * stride; j < n; j += stride)
            top = max(top, top_exponent(vector(j), vector_of(weight_lines, j)));
        top = warp_max(top);
        if (lane == 0) scratch[warp] = top;
        __syncthreads();
        for (int i = 0; i < warps; ++i) top = max(top, scratch[i]);
        out.shift = -line_exponent(top);
    }
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (first + i * stride < pitch) out.put(first + i * stride, kept[i]);
    for (int j = first + KEPT * stride; j < pitch; j += stride) out.put(j, vector(j));
    if (!Form::SCALED) return;

    const int flags = warp_or(out.flags);
    if (lane == 0) scratch[warps + warp] = flags;
    __syncthreads();
    if (threadIdx.x == 0) {
        int seen = 0;
        for (int i = 0; i < warps; ++i) seen |= scratch[warps + i];
        *line = -out.shift * 8 + seen;
    }
}

// Planes of a share's rows of x (B, n), each scaled by itself, and their lines (rows,); columns (n,).  With an
// order the rows are those of a data set.  Grid: (rows padded to 128,).
template <class Form>
__device__ __forceinline__ void split_rows(const Step* step, int share, int shares, const float* x,
                                           const int* order, const int* weight_lines, uint16_t* planes,
                                           int64_t plane, int* lines, int* columns, int n) {
    const Rows rows = share_rows(step, share, shares);
    const int r = blockIdx.x;
    if (r >= padded_rows(rows.count)) return;
    const int64_t row = rows.first + static_cast<int64_t>(r);
    const int64_t from = order && r < rows.count ? order[rows.order + row] : row;
    split_row<Form>(r < rows.count ? x + from * n : nullptr, weight_lines,
                    planes ? planes + r * static_cast<int64_t>(padded_columns(n)) : nullptr, plane, lines + r,
                    columns, n);
}

// The same of weights w (k, n).  Grid: (k padded to 128,).
template <class Form>
__device__ __forceinline__ void split_weights(const float* w, uint16_t* planes, int* lines, int* columns, int k,
                                              int n) {
    const int64_t r = blockIdx.x, pitch = padded_columns(n);
    split_row<Form>(r < k ? w + r * n : nullptr, nullptr, planes + r * pitch, padded_rows(k) * pitch, lines + r,
                    columns, n);
}

// sums[column] = the warps' sums of a column each lane, added up in their order.
__device__ __forceinline__ void column_sum(float sum, float* scratch, float* sums, int column, int n) {
    scratch[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < WARP && column < n && sums) {
        for (unsigned i = 1; i < blockDim.x / WARP; ++i) sum += scratch[i * WARP + threadIdx.x];
        sums[column] = sum;
    }
}

// Planes of dz (B, n) for xᵀ dz, and db (n,) = Σ dz, by blocks that go through all rows of 32 columns.
// `lines` are those of dz's rows, `x_lines` those of x's, whose scale moves into dz.  Writes columns (n,).
// db is null without a bias.  Grid: (n padded to 64, over 32).
template <class Form>
__device__ __forceinline__ void split_columns(const Step* step, int share, int shares, const float* dz,
                                              const int* lines, const int* x_lines, uint16_t* planes, int64_t plane,
                                              int* columns, float* db, int n) {
    constexpr int BATCH = 8;
    SHARED(float, scratch);
    const Rows rows = share_rows(step, share, shares);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const int column = blockIdx.x * WARP + lane, pitch = padded_columns(n);
    int* const words = reinterpret_cast<int*>(scratch);

    int top = NO_EXPONENT;  // e_T
    if (Form::SCALED) {
        for (int r = threadIdx.x; r < rows.count; r += blockDim.x)
            if (lines[r] & USED) top = max(top, exponent_in(lines[r]) + exponent_in(x_lines[r]));
        top = warp_max(top);
        if (lane == 0) words[warp] = top;
        __syncthreads();
        top = warp_max(lane < warps ? words[lane] : NO_EXPONENT);
        if (top < NO_EXPONENT / 2) top = 0;
        __syncthreads();
    }

    float sum = 0.0f;
    int seen = 0;
    const int end = static_cast<int>(padded_rows(rows.count));
    for (int first = warp; first < end; first += BATCH * warps) {
        float x[BATCH];  // all on their way before the first is stored
        int shift[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int r = first + i * warps;
            shift[i] = Form::SCALED && r < rows.count ? exponent_in(x_lines[r]) - top : 0;
            x[i] = r < rows.count && column < n ? dz[(rows.first + static_cast<int64_t>(r)) * n + column] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int r = first + i * warps;
            if (r >= end) break;
            const Held held = Form::hold(x[i], shift[i]);
            sum += x[i];
            seen |= held.flags;
            const int64_t at = r * static_cast<int64_t>(pitch) + column;
            planes[at] = held.hi;
            if (Form::PLANES == 2) planes[plane + at] = held.lo;
        }
    }
    column_sum(sum, scratch, db, column, n);
    if (!Form::SCALED) return;
    __syncthreads();
    words[threadIdx.x] = seen;
    __syncthreads();
    if (warp == 0 && column < n) {
        for (int i = 1; i < warps; ++i) seen |= words[i * WARP + lane];
        columns[column] = top * 8 + seen;
    }
}

// db (n,) = Σ over the share's rows of dz, given as a plane of bfloat16.  Grid: (n over 32).
__device__ __forceinline__ void sum_columns(const Step* step, int share, int shares, const uint16_t* dz, float* db,
                                            int n) {
    SHARED(float, scratch);
    const Rows rows = share_rows(step, share, shares);
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int column = blockIdx.x * WARP + threadIdx.x % WARP;
    const int64_t pitch = padded_columns(n);
    float sum = 0.0f;
#pragma unroll 8
    for (int r = warp; r < rows.count; r += warps) sum += bfloat_value(dz[r * pitch + column]);
    column_sum(sum, scratch, db, column, n);
}

// words = 0.  Grid: any, of one dimension.
__device__ __forceinline__ void clear_words(int* words, int64_t size) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x)
        words[i] = 0;
}

}  // namespace mlpgpu
