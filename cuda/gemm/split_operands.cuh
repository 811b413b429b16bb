// Kernels that split float32 arrays into operands for tensor cores (gemm/operand_formats.cuh).
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/step.cuh"
#include "common/vectors.cuh"
#include "gemm/operand_formats.cuh"

namespace mlpgpu {

// Words j to j + 3 of an array that reaches as far as the padding; 0 if it is null. If other blocks may be CHANGING them,
// they are read past the first-level cache.
template <bool CHANGING>
__device__ __forceinline__ int4 vector_of(const int* words, int j) {
    if (!words) return make_int4(0, 0, 0, 0);
    const int4* const vector = reinterpret_cast<const int4*>(words + j);
    return CHANGING ? __ldcg(vector) : *vector;
}

// What a row is split into: components, flags of the row, and flags of its columns unless they are null.
template <class Format>
struct SplitRow {
    float* copy;
    uint16_t* components;
    int64_t component_stride;
    int* column_scales;
    int n;
    int shift, flags;

    // Splits four elements from column j on, given the scales of the weights' rows that multiply them and the columns'
    // flags.
    __device__ __forceinline__ void put(int j, const float4& x, const int4& weight, const int4& there) {
        const int shifts[4] = {shift + exponent_in(weight.x), shift + exponent_in(weight.y),
                               shift + exponent_in(weight.z), shift + exponent_in(weight.w)};
        int found[4];
        if (copy) store_row(copy, n, j, x, reinterpret_cast<uintptr_t>(copy) % 16 == 0);
        Format::put(components ? components + j : nullptr, component_stride, x, shifts, found);
        if (!Format::SCALED) return;
        flags |= found[0] | found[1] | found[2] | found[3];
        if (!column_scales) return;
        const int known[4] = {there.x, there.y, there.z, there.w};
        const int missing[4] = {found[0] & ~known[0], found[1] & ~known[1], found[2] & ~known[2], found[3] & ~known[3]};
        if ((missing[0] | missing[1] | missing[2] | missing[3]) == 0) return;  // nearly always
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (missing[i]) atomicOr(column_scales + j + i, found[i]);
    }
};

// The largest exponent of four elements, with those of the weights' rows that multiply them.
__device__ __forceinline__ int top_exponent(const float4& x, const int4& weight) {
    return max(max(exponent_of(x.x) + exponent_in(weight.x), exponent_of(x.y) + exponent_in(weight.y)),
               max(exponent_of(x.z) + exponent_in(weight.z), exponent_of(x.w) + exponent_in(weight.w)));
}

// The threads of a block that share a row: whole warps, as many as can keep the row in registers if the block has so many.
struct RowTeam {
    static constexpr int THREADS = 256, SHARED_BYTES = 4 * 2 * THREADS / WARP;
    static constexpr int VECTORS = 4;  // of a row that a thread keeps in registers
    int size, row, thread;          // threads per row; this thread's row among the block's; its number in its team

    __device__ __forceinline__ explicit RowTeam(int n) : size(WARP) {
        while (size < static_cast<int>(blockDim.x) && 4 * VECTORS * size < n) size *= 2;
        row = threadIdx.x / size, thread = threadIdx.x % size;
    }
    __device__ __forceinline__ int rows() const { return blockDim.x / size; }
    __device__ __forceinline__ int warps() const { return size / WARP; }
};

// Columns `column` to `column` + 3 of a row of n, the first a multiple of 4; 0 beyond n. Bytes are numbers once scaled.
__device__ __forceinline__ float4 load_numbers(const float* row, float, int n, int column) {
    return load_row(row, n, column, reinterpret_cast<uintptr_t>(row) % 16 == 0);
}

__device__ __forceinline__ float4 load_numbers(const unsigned char* row, float scale, int n, int column) {
    unsigned char four[4] = {};
    if (reinterpret_cast<uintptr_t>(row) % 4 == 0 && column + 4 <= n) {
        load_four(row + column, four);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (column + i < n) four[i] = row[column + i];
    }
    return make_float4(scale * static_cast<float>(four[0]), scale * static_cast<float>(four[1]),
                       scale * static_cast<float>(four[2]), scale * static_cast<float>(four[3]));
}

// Splits one row by each team of a block, and stores its scale. `row` is null for a row of padding. Null arguments:
//   weight_row_scales  the columns are not multiplied by scaled rows of weights
//   copy               the float32 row is not copied
//   components         only the scale is made
//   column_scales      flags of columns are not collected; else those that are missing are added
// Arrays over columns reach as far as the padding.
template <class Format, class Source>
__device__ __forceinline__ void split_row(const RowTeam& team, const Source* row, float scale, const int* weight_row_scales, float* copy,
                                          uint16_t* components, int64_t component_stride, int* row_scale, int* column_scales, int n) {
    SHARED(int, scratch);  // two words per warp
    constexpr int VECTORS = RowTeam::VECTORS;
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, first_warp = team.row * team.warps();
    const int first = 4 * team.thread, stride = 4 * team.size, pitch = padded_columns(n);
    const auto vector = [&](int j) {
        return row && j < n ? load_numbers(row, scale, n, j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    };
    const auto weight_of = [&](int j) { return vector_of<false>(Format::SCALED && j < pitch ? weight_row_scales : nullptr, j); };
    const auto known_of = [&](int j) { return vector_of<true>(Format::SCALED && j < pitch ? column_scales : nullptr, j); };

    // Each thread keeps its part of a row in registers; of a longer row a piece at a time, so that all loads of a piece are on
    // their way at once. Of several pieces scales need all, from the last to the first, which is then put without a load.
    const int piece = VECTORS * stride;
    int begin = Format::SCALED ? first + (n - 1) / piece * piece : first;
    float4 in_registers[VECTORS];
    int4 weight[VECTORS];
    const auto load = [&] {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            in_registers[i] = vector(begin + i * stride);
            weight[i] = weight_of(begin + i * stride);
        }
    };
    load();

    SplitRow<Format> out = {copy, components, component_stride, column_scales, n, 0, 0};
    if (Format::SCALED) {
        int top = NO_EXPONENT;
        while (true) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                if (begin + i * stride < n) top = max(top, top_exponent(in_registers[i], weight[i]));
            if (begin == first) break;
            begin -= piece;
            load();
        }
        top = warp_max(top);
        if (team.thread % WARP == 0) scratch[warp] = top;
        __syncthreads();
        for (int i = 0; i < team.warps(); ++i) top = max(top, scratch[first_warp + i]);
        out.shift = -scaling_exponent(top);
    }
    while (true) {
        int4 known = known_of(begin);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int4 there = known;
            if (i + 1 < VECTORS) known = known_of(begin + (i + 1) * stride);
            if (begin + i * stride < pitch) out.put(begin + i * stride, in_registers[i], weight[i], there);
        }
        begin += piece;
        if (begin >= pitch) break;
        load();
    }
    if (!Format::SCALED) return;

    const int flags = warp_or(out.flags);
    if (team.thread % WARP == 0) scratch[warps + warp] = flags;
    __syncthreads();
    if (team.thread == 0) {
        int seen = 0;
        for (int i = 0; i < team.warps(); ++i) seen |= scratch[warps + first_warp + i];
        *row_scale = -out.shift * 8 + seen;
    }
}

// Splits a shard's rows of x (B, n), each with its own scale, and stores row scales (rows,) and, in `column_scales` (n,),
// flags of columns. With an order the rows are those of a data set, of floats or of bytes that are multiplied by `scale`, and
// `copy` (B, n) receives them as floats. Unscaled rows may be those of several steps, which are stored one after another.
// Grid: (filled rows, over rows per block; steps).
template <class Format, class Source>
__device__ __forceinline__ void split_rows(const Step* step, int shard, int shards, const Source* x,
                                           const int* order, float scale, const int* weight_row_scales, float* copy, uint16_t* components,
                                           int64_t component_stride, int* row_scales, int* column_scales, int n) {
    pdl_wait_and_trigger();
    const Rows rows = shard_rows(step + blockIdx.y, shard, shards);
    const RowTeam team(n);
    const int r = blockIdx.x * team.rows() + team.row;
    if (r >= filled_rows(rows.count)) return;  // as do all threads of the block
    const int64_t row = rows.first + static_cast<int64_t>(r);
    const int64_t from = order && r < rows.count ? order[rows.order + row] : row;
    split_row<Format>(team, r < rows.count ? x + from * n : nullptr, scale, weight_row_scales,
                    copy && r < rows.count ? copy + row * n : nullptr,
                    components ? components + blockIdx.y * Format::COMPONENTS * component_stride + r * static_cast<int64_t>(padded_columns(n))
                           : nullptr,
                    component_stride, row_scales + r, column_scales, n);
}

// The same for weights w (k, n), and for other weights in the same launch unless they are null.
// Grid: filled rows, over rows per block; then the same for the other weights.
template <class Format>
__device__ __forceinline__ void split_weights(const float* w, uint16_t* components, int* row_scales, int* column_scales, int k, int n,
                                              const float* other_w, uint16_t* other_components, int* other_row_scales,
                                              int* other_column_scales, int other_k, int other_n) {
    pdl_wait_and_trigger();
    int64_t block = blockIdx.x;
    const int64_t blocks = filled_rows(k) / RowTeam(n).rows();
    if (block >= blocks) {
        block -= blocks;
        w = other_w, components = other_components, row_scales = other_row_scales, column_scales = other_column_scales, k = other_k, n = other_n;
    }
    const RowTeam team(n);
    const int64_t r = block * team.rows() + team.row, pitch = padded_columns(n);
    split_row<Format>(team, r < k ? w + r * n : nullptr, 1.0f, nullptr, nullptr, components + r * pitch, padded_rows(k) * pitch, row_scales + r,
                    column_scales, n);
}

// Work over the columns of dz (B, n): a block takes WIDTH columns and a part of the rows, a thread four neighbours of every
// ROWS-th row.
struct ColumnBlock {
    static constexpr int WIDTH = 64, THREADS = 256, LANES = WIDTH / 4, ROWS = THREADS / LANES, BATCH = 4;
    static constexpr int SHARED_BYTES = 4 * ROWS * WIDTH;
};

// Four neighbours of a shard's row of dz.
__device__ __forceinline__ float4 delta_vector(const float* dz, const Rows& rows, int row, int n, int column) {
    const float* const deltas = dz + (rows.first + static_cast<int64_t>(row)) * n;
    return load_row(deltas, n, column, reinterpret_cast<uintptr_t>(deltas) % 16 == 0);
}

// shared (ROWS, WIDTH) holds four values of each thread; thread j joins those of column j, one after another.
template <class T, class Join>
__device__ __forceinline__ T join_rows(T* shared, const T (&values)[4], T result, const Join& join) {
    __syncthreads();
    const int row = threadIdx.x / ColumnBlock::LANES, column = threadIdx.x % ColumnBlock::LANES * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[row * ColumnBlock::WIDTH + column + i] = values[i];
    __syncthreads();
    if (threadIdx.x < ColumnBlock::WIDTH)
        for (int i = 0; i < ColumnBlock::ROWS; ++i) result = join(result, shared[i * ColumnBlock::WIDTH + threadIdx.x]);
    return result;
}

// The common exponent of dz'': the largest of dz · 2^(e_X[row]), less the exponent at which components begin.
__device__ __forceinline__ int delta_exponent(const Rows& rows, const int* row_scales, const int* x_row_scales, int* scratch) {
    constexpr int BATCH = 8;  // rows whose loads overlap
    int top = NO_EXPONENT;
    for (int first = threadIdx.x; first < rows.count; first += BATCH * blockDim.x) {
        int of_row[BATCH], of_x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int r = first + i * static_cast<int>(blockDim.x);
            of_row[i] = r < rows.count ? row_scales[r] : 0, of_x[i] = r < rows.count ? x_row_scales[r] : 0;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (of_row[i] & NONZERO) top = max(top, exponent_in(of_row[i]) + exponent_in(of_x[i]));
    }
    top = warp_max(top);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = top;
    __syncthreads();
    for (int i = 0; i < static_cast<int>(blockDim.x) / WARP; ++i) top = max(top, scratch[i]);
    return top < NO_EXPONENT / 2 ? 0 : top;
}

// Splits dz (B, n) for xᵀ dz; and db (n,) = Σ dz, unless db is null. `row_scales` are the row scales of dz; the scales of x's rows move into dz. Blocks store sums over their rows as
// partials (grid y, n padded) and their flags in `partial_flags`; the last block of a column adds them up, in order, and
// stores the column's scale. If `row_components` is not null, dz is also split for dz Wᵀ: then `row_scales` have exponents
// already, and flags are added. Grid: (n padded to 64, over 64; any number of parts of the rows).
template <class Format>
__device__ __forceinline__ void split_columns(const Step* step, int shard, int shards, const float* dz,
                                              int* row_scales, const int* x_row_scales, uint16_t* components, uint16_t* row_components,
                                              int64_t component_stride, int* column_scales, float* partials, int* partial_flags, unsigned* arrived,
                                              float* db, int n) {
    pdl_wait_and_trigger();
    using T = ColumnBlock;
    SHARED(float, shared);
    int* const words = reinterpret_cast<int*>(shared);
    const Rows rows = shard_rows(step, shard, shards);
    const int pitch = padded_columns(n), column = blockIdx.x * T::WIDTH + threadIdx.x % T::LANES * 4;
    const int top = Format::SCALED ? delta_exponent(rows, row_scales, x_row_scales, words) : 0;

    const int end = static_cast<int>(filled_rows(rows.count));
    const int part = ceil_div(end, gridDim.y * T::ROWS) * T::ROWS;
    const int part_end = min(end, static_cast<int>(blockIdx.y + 1) * part);
    float sum[4] = {};
    int seen[4] = {};
    for (int first = blockIdx.y * part + threadIdx.x / T::LANES; first < part_end; first += T::BATCH * T::ROWS) {
        float4 four[T::BATCH];  // all loads are issued before the first store
        int shift[T::BATCH], row_shift[T::BATCH];
#pragma unroll
        for (int i = 0; i < T::BATCH; ++i) {
            const int r = first + i * T::ROWS;
            const bool inside = r < min(rows.count, part_end) && column < n;
            shift[i] = Format::SCALED && inside ? exponent_in(x_row_scales[r]) - top : 0;
            row_shift[i] = Format::SCALED && inside && row_components ? -exponent_in(row_scales[r]) : 0;
            four[i] = inside ? delta_vector(dz, rows, r, n, column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < T::BATCH; ++i) {
            const int r = first + i * T::ROWS;
            if (r >= part_end) break;
            const float x[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
            const int64_t offset = r * static_cast<int64_t>(pitch) + column;
            const int shifts[4] = {shift[i], shift[i], shift[i], shift[i]};
            int found[4];
            Format::put(components + offset, component_stride, four[i], shifts, found);
#pragma unroll
            for (int q = 0; q < 4; ++q) sum[q] += x[q], seen[q] |= found[q];
            if (Format::SCALED && row_components) {
                const int row_shifts[4] = {row_shift[i], row_shift[i], row_shift[i], row_shift[i]};
                Format::put(row_components + offset, component_stride, four[i], row_shifts, found);
                const int flags = (found[0] | found[1] | found[2] | found[3]) & ~NONZERO;
                if (r >= rows.count)
                    row_scales[r] = scaling_exponent(NO_EXPONENT) * 8;
                else if (flags)
                    atomicOr(row_scales + r, flags);
            }
        }
    }

    if (!Format::SCALED && !db) return;
    const int result_column = blockIdx.x * T::WIDTH + threadIdx.x;  // of the first WIDTH threads
    const int offset = blockIdx.y * pitch + result_column;
    const float part_sum = join_rows(shared, sum, 0.0f, [](float a, float b) { return a + b; });
    const int part_seen = Format::SCALED ? join_rows(words, seen, 0, [](int a, int b) { return a | b; }) : 0;
    if (threadIdx.x < T::WIDTH) {
        partials[offset] = part_sum;
        if (Format::SCALED) partial_flags[offset] = part_seen;
    }
    __syncthreads();
    if (!was_last(arrive(arrived + blockIdx.x), words, gridDim.y) || threadIdx.x >= T::WIDTH || result_column >= n) return;
    float total = 0.0f;
    int flags = 0;
#pragma unroll 8
    for (int i = 0; i < static_cast<int>(gridDim.y); ++i) {
        total += __ldcg(partials + i * pitch + result_column);
        if (Format::SCALED) flags |= __ldcg(partial_flags + i * pitch + result_column);
    }
    if (db) db[result_column] = total;
    if (Format::SCALED) column_scales[result_column] = top * 8 + flags;
}

// Keeps of each word only the bits of a mask. Grid: any, of one dimension.
__device__ __forceinline__ void mask_words(int* words, int mask, int64_t size) {
    pdl_wait_and_trigger();
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x)
        words[i] &= mask;
}

}  // namespace mlpgpu
