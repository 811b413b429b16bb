// A dense layer: x (B, k), W (k, n), b (n,), y (B, n); a gradient is `d` and the name.  All arrays are
// row-major; B is the capacity, and a launch works on one share of the batch's rows.
//
// Formulas: docs/mathematics.md.  The layer's products are those of gemm.cuh with the epilogues below.
#pragma once

#include "activations.cuh"
#include "gemm.cuh"
#include "step.cuh"

namespace mlpgpu {

// z = x W + b, y = f(z).  z is null where f' takes y.
// Grid: (row tiles, column tiles).
template <class Activation, class T>
__device__ __forceinline__ void dense_forward(const Step* step, int share, int shares, const float* x, const float* w,
                                              const float* b, float* z, float* y, int k, int n) {
    const Rows rows = share_rows(step, share, shares);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const Operand<true> a = {x + static_cast<int64_t>(rows.first) * k, rows.count, k, k};
    const Operand<false> weights = {w, n, k, n};
    gemm_tile<T>(a, weights, m0, n0, 0, k, NoColumnSum(), [=](int row, int column, float value) {
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
__device__ __forceinline__ void dense_forward_part(const Step* step, int share, int shares, const float* x,
                                                   const float* w, float* parts, int k, int n, int part, int capacity) {
    const Rows rows = share_rows(step, share, shares);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const int k_begin = blockIdx.z * part, k_end = min(k, k_begin + part);
    const Operand<true> a = {x + static_cast<int64_t>(rows.first) * k, rows.count, k, k};
    const Operand<false> weights = {w, n, k, n};
    float* out = parts + static_cast<int64_t>(blockIdx.z) * capacity * n;
    gemm_tile<T>(a, weights, m0, n0, k_begin, k_end, NoColumnSum(), [=](int row, int column, float value) {
        out[static_cast<int64_t>(rows.first + row) * n + column] = value;
    });
}

// Adds the parts up in order, and finishes as dense_forward does.  Grid: any, of one dimension.
template <class Activation>
__device__ __forceinline__ void dense_forward_sum(const Step* step, int share, int shares, const float* parts,
                                                  const float* b, float* z, float* y, int n, int count, int capacity) {
    const Rows rows = share_rows(step, share, shares);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const int64_t at = first + i;
        float sum = parts[at];
        for (int part = 1; part < count; ++part) sum += parts[static_cast<int64_t>(part) * capacity * n + at];
        sum += b ? b[at % n] : 0.0f;
        if (z) z[at] = sum;
        y[at] = Activation::forward(sum);
    }
}

// dx = (dz Wᵀ) ∘ f'(saved), f being the activation that made x; `saved` is null where there was none, or
// where the derivative is applied later.  Grid: (row tiles, tiles of k).
template <class Activation, class T>
__device__ __forceinline__ void dense_backward_input(const Step* step, int share, int shares, const float* dz,
                                                     const float* w, const float* saved, float* dx, int k, int n) {
    const Rows rows = share_rows(step, share, shares);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const Operand<true> a = {dz + static_cast<int64_t>(rows.first) * n, rows.count, n, n};
    const Operand<true> weights = {w, k, n, n};
    gemm_tile<T>(a, weights, m0, n0, 0, n, NoColumnSum(), [=](int row, int column, float value) {
        const int64_t at = static_cast<int64_t>(rows.first + row) * k + column;
        dx[at] = saved ? value * Activation::derivative(saved[at]) : value;
    });
}

// dW = xᵀ dz (k, n) and db = Σ dz (n,) over the share's rows, in order; db is null without a bias.
// Grid: (tiles of k, tiles of n).
template <class T>
__device__ __forceinline__ void dense_backward_weight(const Step* step, int share, int shares, const float* x,
                                                      const float* dz, float* dw, float* db, int k, int n) {
    const Rows rows = share_rows(step, share, shares);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    const Operand<false> a = {x + static_cast<int64_t>(rows.first) * k, k, rows.count, k};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const ColumnSum columns = {db, db ? n : 0};
    gemm_tile<T>(a, b, m0, n0, 0, rows.count, columns, [=](int row, int column, float value) {
        dw[static_cast<int64_t>(row) * n + column] = value;
    });
}

// Both products of the backward pass from the same staged tiles.  A block owns a tile of W, loads it
// once, and goes through the share's rows: dW and db stay in registers, while each block adds its part
// of dx = dz Wᵀ to memory, which starts at 0, by atomicAdd; so the order of that sum varies.
// Source: the backpropagation kernel of a 2017 course report (see docs/architecture.md).
// Grid: (tiles of k, tiles of n), 256 threads.
struct AtomicTile {
    static constexpr int I = 32, J = 32, R = 32, THREADS = 256;
    static constexpr int PITCH = 33;  // a column of a tile lies in 32 different banks
    static constexpr int SHARED_FLOATS = 3 * 32 * PITCH;
};

__device__ __forceinline__ void dense_backward_atomic(const Step* step, int share, int shares, const float* x,
                                                      const float* dz, const float* w, float* dw, float* db, float* dx,
                                                      int k, int n) {
    using T = AtomicTile;
    SHARED(float, shared);
    float* const tile_w = shared;                        // (I, J)
    float* const tile_x = tile_w + 32 * T::PITCH;        // (R, I)
    float* const tile_dz = tile_x + 32 * T::PITCH;       // (R, J)
    const Rows rows = share_rows(step, share, shares);
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
