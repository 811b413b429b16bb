// A dense layer: x (B, k), W (k, n), b (n,), y (B, n); a gradient is `d` and the name.  All arrays are
// row-major; B is the capacity, and a launch works on one shard of the batch's rows.  Where `order` is not
// null, x is the data set, and the order says which of its rows the batch has.
//
// Formulas: docs/mathematics.md.  The layer's products are those of gemm/simt.cuh with the epilogues below.
#pragma once

#include "math/activations.cuh"
#include "gemm/simt.cuh"
#include "common/step.cuh"

namespace mlpgpu {

// The shard's rows of an input x, or of the data set by the order.
__device__ __forceinline__ const float* first_row(const Rows& rows, const float* x, const int* order, int k) {
    return order ? x : x + static_cast<int64_t>(rows.first) * k;
}
__device__ __forceinline__ const int* row_lines(const Rows& rows, const int* order) {
    return order ? order + rows.order + rows.first : nullptr;
}

// An epilogue: elements of C are put away, from row `first` of an array of n columns on.
struct PutAway {
    float* to;
    int first, n;
    struct Held {};
    __device__ __forceinline__ void prefetch(int, int) const {}
    __device__ __forceinline__ Held hold(int, int) const { return {}; }
    __device__ __forceinline__ void put(int row, int column, float value, Held) const { (*this)(row, column, value); }
    __device__ __forceinline__ void operator()(int row, int column, float value) const {
        to[static_cast<int64_t>(first + row) * n + column] = value;
    }
};

// z = x W + b, y = f(z).  z is null where f' takes y.
// Grid: (row tiles, column tiles).
template <class Activation, class T>
__device__ __forceinline__ void dense_forward(const Step* step, int shard, int shards, const float* x, const int* order,
                                              const float* w, const float* b, float* z, float* y, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const Operand<true> a = {first_row(rows, x, order, k), rows.count, k, k, row_lines(rows, order)};
    const Operand<false> weights = {w, n, k, n};
    gemm_tile(T(), a, weights, m0, n0, 0, k, NoColumnSum(), [=](int row, int column, float value) {
        const int64_t at = static_cast<int64_t>(rows.first + row) * n + column;
        const float sum = value + (b ? b[column] : 0.0f);
        if (z) z[at] = sum;
        y[at] = Activation::forward(sum);
    });
}

// The same where k is so long, and n so short, that few tiles would be left with much work each: every
// layer of the grid takes `part` values of k and leaves its sums in parts (grid z, B, n).
// Grid: (row tiles, column tiles, parts).
template <class T>
__device__ __forceinline__ void dense_forward_part(const Step* step, int shard, int shards, const float* x,
                                                   const int* order, const float* w, float* parts, int k, int n,
                                                   int part, int capacity) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const int k_begin = blockIdx.z * part, k_end = min(k, k_begin + part);
    const Operand<true> a = {first_row(rows, x, order, k), rows.count, k, k, row_lines(rows, order)};
    const Operand<false> weights = {w, n, k, n};
    float* const out = parts + static_cast<int64_t>(blockIdx.z) * capacity * n;
    gemm_tile(T(), a, weights, m0, n0, k_begin, k_end, NoColumnSum(), PutAway{out, rows.first, n});
}

// The same for at most Few::ROWS rows, whose time is that of reading W.  A block takes a part for all columns:
// its lines of W, which are one stretch of memory, come piece by piece through registers to shared memory, the next
// piece while this one is multiplied.  A thread takes every 256th column.  The bits are the same.
// Grid: (1, 1, parts).
struct Few {
    static constexpr int ROWS = 8, THREADS = 256, MOST_COLUMNS = 512;
    static constexpr int PER_THREAD = 32, PIECE = THREADS * PER_THREAD;  // floats of W
    static constexpr int X = 3072;  // floats of x beside them
    static constexpr int SHARED_FLOATS = PIECE + X;
};

// A stretch of memory on its way to shared memory; `vectored` where it begins and ends at vectors.
struct Piece {
    float held[Few::PER_THREAD];

    __device__ __forceinline__ void fetch(const float* from, int size, bool vectored) {
        if (vectored) {
#pragma unroll
            for (int i = 0; i < Few::PER_THREAD; i += 4) {
                const int at = (i / 4 * Few::THREADS + threadIdx.x) * 4;
                const float4 four = at < size ? *reinterpret_cast<const float4*>(from + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                held[i] = four.x, held[i + 1] = four.y, held[i + 2] = four.z, held[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < Few::PER_THREAD; ++i) {
                const int at = (i / 4 * Few::THREADS + threadIdx.x) * 4 + i % 4;
                held[i] = at < size ? from[at] : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void stage(float* shared) const {
#pragma unroll
        for (int i = 0; i < Few::PER_THREAD; i += 4)
            *reinterpret_cast<float4*>(shared + (i / 4 * Few::THREADS + threadIdx.x) * 4) =
                make_float4(held[i], held[i + 1], held[i + 2], held[i + 3]);
    }
};

// sums[c][r] += x[r, ·] · W[·, column c], over a piece of `depth` lines: staged_x (depth, ROWS), staged (depth, n).
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void few_rows(const float* staged, const float* staged_x, int depth, int n,
                                         float (&sums)[COLUMNS][Few::ROWS]) {
#pragma unroll 8
    for (int i = 0; i < depth; ++i) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = threadIdx.x + c * Few::THREADS;
            const float w = column < n ? staged[i * n + column] : 0.0f;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sums[c][r] = fmaf(staged_x[i * ROWS + r], w, sums[c][r]);
        }
    }
}

template <int ROWS>
__device__ __forceinline__ void few_rows_part(const Rows& rows, const float* x, const int* lines, const float* w,
                                              float* parts, int k, int n, int k_begin, int k_end) {
    constexpr int COLUMNS = Few::MOST_COLUMNS / Few::THREADS;
    SHARED(float, staged);
    float* const staged_x = staged + Few::PIECE;
    // Whole vectors of lines, so that every piece begins at one if W does.
    const int deep = min(Few::PIECE / n, Few::X / ROWS) / 4 * 4;
    const bool vectored = is_vectored(w, 0) && (k_end - k_begin) * n % 4 == 0;
    float sums[COLUMNS][Few::ROWS] = {};
    Piece piece;
    piece.fetch(w + static_cast<int64_t>(k_begin) * n, min(deep, k_end - k_begin) * n, vectored);
    for (int k0 = k_begin; k0 < k_end; k0 += deep) {
        const int depth = min(deep, k_end - k0);
        __syncthreads();
        piece.stage(staged);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool is_row = r < rows.count;
            const float* const line = x + static_cast<int64_t>(is_row && lines ? lines[r] : r) * k + k0;
            for (int i = threadIdx.x; i < depth; i += Few::THREADS) staged_x[i * ROWS + r] = is_row ? line[i] : 0.0f;
        }
        __syncthreads();
        if (k0 + deep < k_end)
            piece.fetch(w + static_cast<int64_t>(k0 + deep) * n, min(deep, k_end - k0 - deep) * n, vectored);
        if (n <= Few::THREADS) {  // one column for each thread
            float (&first)[1][Few::ROWS] = reinterpret_cast<float (&)[1][Few::ROWS]>(sums);
            few_rows<ROWS>(staged, staged_x, depth, n, first);
        } else {
            few_rows<ROWS>(staged, staged_x, depth, n, sums);
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = threadIdx.x + c * Few::THREADS;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (r < rows.count && column < n) parts[static_cast<int64_t>(rows.first + r) * n + column] = sums[c][r];
    }
}

__device__ __forceinline__ void dense_forward_part_few(const Step* step, int shard, int shards, const float* x,
                                                       const int* order, const float* w, float* parts, int k, int n,
                                                       int part, int capacity) {
    const Rows rows = shard_rows(step, shard, shards);
    const int k_begin = blockIdx.z * part, k_end = min(k, k_begin + part);
    float* const out = parts + static_cast<int64_t>(blockIdx.z) * capacity * n;
    const float* const from = first_row(rows, x, order, k);
    const int* const lines = row_lines(rows, order);
    if (rows.count <= 1)
        few_rows_part<1>(rows, from, lines, w, out, k, n, k_begin, k_end);
    else if (rows.count <= 4)
        few_rows_part<4>(rows, from, lines, w, out, k, n, k_begin, k_end);
    else
        few_rows_part<Few::ROWS>(rows, from, lines, w, out, k, n, k_begin, k_end);
}

// Adds the parts up in order, and finishes as dense_forward does.  A block takes 32 neighbouring elements, and
// each of its warps a run of the parts; the runs' sums are added up in order too.
// Grid: any, of one dimension.
struct PartSum {
    static constexpr int THREADS = 256, WARPS = THREADS / WARP;
    static constexpr int SHARED_FLOATS = WARPS * WARP;
};

template <class Activation>
__device__ __forceinline__ void dense_forward_sum(const Step* step, int shard, int shards, const float* parts,
                                                  const float* b, float* z, float* y, int n, int count, int capacity) {
    SHARED(float, shared);  // (warps, elements)
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    const int64_t pitch = static_cast<int64_t>(capacity) * n;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int run = (count + PartSum::WARPS - 1) / PartSum::WARPS;
    for (int64_t start = blockIdx.x * static_cast<int64_t>(WARP); start < size;
         start += gridDim.x * static_cast<int64_t>(WARP)) {
        const int64_t at = first + start + lane;
        const bool inside = start + lane < size;
        float sum = 0.0f;
#pragma unroll 16
        for (int part = warp * run; part < min(count, (warp + 1) * run); ++part)
            sum += inside ? parts[part * pitch + at] : 0.0f;
        shared[threadIdx.x] = sum;
        __syncthreads();
        if (warp == 0 && inside) {
            for (int w = 1; w < PartSum::WARPS; ++w) sum += shared[w * WARP + lane];
            sum += b ? b[at % n] : 0.0f;
            if (z) z[at] = sum;
            y[at] = Activation::forward(sum);
        }
        __syncthreads();
    }
}

// dx = (dz Wᵀ) ∘ f'(saved), f being the activation that made x; `saved` is null where there was none, or
// where the derivative is applied later.  Grid: (row tiles, tiles of k).
template <class Activation, class T>
__device__ __forceinline__ void dense_backward_input(const Step* step, int shard, int shards, const float* dz,
                                                     const float* w, const float* saved, float* dx, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const Operand<true> a = {dz + static_cast<int64_t>(rows.first) * n, rows.count, n, n};
    const Operand<true> weights = {w, k, n, n};
    gemm_tile(T(), a, weights, m0, n0, 0, n, NoColumnSum(), [=](int row, int column, float value) {
        const int64_t at = static_cast<int64_t>(rows.first + row) * k + column;
        dx[at] = saved ? value * Activation::derivative(saved[at]) : value;
    });
}

// dW = xᵀ dz (k, n) and db = Σ dz (n,) over the shard's rows, in order; db is null without a bias.
// Grid: (tiles of k, tiles of n).
template <class T>
__device__ __forceinline__ void dense_backward_weight(const Step* step, int shard, int shards, const float* x,
                                                      const int* order, const float* dz, float* dw, float* db, int k,
                                                      int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    const Operand<false> a = {first_row(rows, x, order, k), k, rows.count, k, row_lines(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const auto columns = column_sum(db ? n : 0, [=](int, int column, float sum) { db[column] = sum; });
    gemm_tile(T(), a, b, m0, n0, 0, rows.count, columns, [=](int row, int column, float value) {
        dw[static_cast<int64_t>(row) * n + column] = value;
    });
}

// Both products of the backward pass from the same staged tiles.  A block owns a tile of W, loads it
// once, and goes through the shard's rows: dW and db stay in registers, while each block adds its part
// of dx = dz Wᵀ to memory, which starts at 0, by atomicAdd; so the order of that sum varies.
// Source: the backpropagation kernel of a 2017 course report (see docs/decisions.md).
// Grid: (tiles of k, tiles of n), 256 threads.
struct AtomicTile {
    static constexpr int I = 32, J = 32, R = 32, THREADS = 256;
    static constexpr int PITCH = 33;  // a column of a tile lies in 32 different banks
    static constexpr int SHARED_FLOATS = 3 * 32 * PITCH;
};

__device__ __forceinline__ void dense_backward_atomic(const Step* step, int shard, int shards, const float* x,
                                                      const float* dz, const float* w, float* dw, float* db, float* dx,
                                                      int k, int n) {
    using T = AtomicTile;
    SHARED(float, shared);
    float* const tile_w = shared;                        // (I, J)
    float* const tile_x = tile_w + 32 * T::PITCH;        // (R, I)
    float* const tile_dz = tile_x + 32 * T::PITCH;       // (R, J)
    const Rows rows = shard_rows(step, shard, shards);
    const int i0 = blockIdx.x * T::I, j0 = blockIdx.y * T::J;
    const int column = threadIdx.x % 32, line = threadIdx.x / 32;  // 8 lines of 32

    for (int i = line; i < T::I; i += 8) {
        const bool inside = i0 + i < k && j0 + column < n;
        tile_w[i * T::PITCH + column] = inside ? w[static_cast<int64_t>(i0 + i) * n + j0 + column] : 0.0f;
    }
    float sum_dw[4] = {};  // elements (line + 8 q, column) of the tile
    float sum_db = 0.0f;
    for (int r0 = 0; r0 < rows.count; r0 += T::R) {
        __syncthreads();
        for (int r = line; r < T::R; r += 8) {
            const int64_t row = rows.first + r0 + r;
            const bool inside = r0 + r < rows.count;
            tile_x[r * T::PITCH + column] = inside && i0 + column < k ? x[row * k + i0 + column] : 0.0f;
            tile_dz[r * T::PITCH + column] = inside && j0 + column < n ? dz[row * n + j0 + column] : 0.0f;
        }
        __syncthreads();
        for (int r = 0; r < T::R; ++r) {
            const float value = tile_dz[r * T::PITCH + column];
            for (int q = 0; q < 4; ++q) sum_dw[q] = fmaf(tile_x[r * T::PITCH + line + 8 * q], value, sum_dw[q]);
            if (line == 0) sum_db += value;
        }
        if (dx) {
            for (int r = line; r < T::R; r += 8) {
                float value = 0.0f;
                for (int j = 0; j < T::J; ++j)
                    value = fmaf(tile_dz[r * T::PITCH + j], tile_w[column * T::PITCH + j], value);
                if (r0 + r < rows.count && i0 + column < k)
                    atomicAdd(dx + static_cast<int64_t>(rows.first + r0 + r) * k + i0 + column, value);
            }
        }
    }
    for (int q = 0; q < 4; ++q) {
        const int i = i0 + line + 8 * q;
        if (i < k && j0 + column < n) dw[static_cast<int64_t>(i) * n + j0 + column] = sum_dw[q];
    }
    if (db && blockIdx.x == 0 && line == 0 && j0 + column < n) db[j0 + column] = sum_db;
}

}  // namespace mlpgpu
