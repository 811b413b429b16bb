// The products of a dense layer that is cut along k (dense.cuh), made as in split.cuh.  Arrays as in dense.cuh.
#pragma once

#include "dense_update.cuh"
#include "split.cuh"

namespace mlpgpu {

// An epilogue: elements of C are put away, (m, n).
struct Store {
    float* to;
    int n;
    struct Held {};
    __device__ __forceinline__ void prefetch(int, int) const {}
    __device__ __forceinline__ Held hold(int, int) const { return {}; }
    __device__ __forceinline__ void put(int row, int column, float value, Held) const {
        to[static_cast<int64_t>(row) * n + column] = value;
    }
};

// As dense_forward_part.  Grid: (row tiles, column tiles, parts).
template <class T>
__device__ __forceinline__ void dense_forward_part_split(const Step* step, int share, int shares, const float* x,
                                                         const int* order, const float* w, float* parts, int k, int n,
                                                         int part, int capacity) {
    const Rows rows = share_rows(step, share, shares);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const int k_begin = blockIdx.z * part, k_end = min(k, k_begin + part);
    const Operand<true> a = {first_row(rows, x, order, k), rows.count, k, k, row_lines(rows, order)};
    const Operand<false> weights = {w, n, k, n};
    float* const out = parts + (static_cast<int64_t>(blockIdx.z) * capacity + rows.first) * n;
    split_tile<T>(a, weights, m0, n0, k_begin, k_end, Store{out, n});
}

// As dense_backward_update, of the weight; of the bias, the blocks of the first row of tiles add dz up themselves.
// Grid: (tiles of k, tiles of n).
template <class Rule, class T>
__device__ __forceinline__ void dense_backward_update_split(const Step* step, int share, int shares, const float* x,
                                                            const int* order, const float* dz, const double* totals,
                                                            float* weight, float* bias, float* weight_slots,
                                                            float* bias_slots, int64_t size, int k, int n) {
    const Rows rows = share_rows(step, share, shares);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    const float* const of_share = dz + static_cast<int64_t>(rows.first) * n;
    const Operand<false> a = {first_row(rows, x, order, k), k, rows.count, k, row_lines(rows, order)};
    const Operand<false> b = {of_share, n, rows.count, n};
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const row = schedule + step->run * COLUMNS;
    const int column = n0 + threadIdx.x;
    if (bias && m0 == 0 && threadIdx.x < T::N && column < n) {
        float sum = 0.0f;
#pragma unroll 16
        for (int r = 0; r < rows.count; ++r) sum += of_share[static_cast<int64_t>(r) * n + column];
        InPlace<Rule>{bias, bias_slots, size, n, scale, row}(0, column, sum);
    }
    split_tile<T>(a, b, m0, n0, 0, rows.count, InPlace<Rule>{weight, weight_slots, size, n, scale, row});
}

}  // namespace mlpgpu
