// Both backward products of a dense layer at once, by atomic additions.
#pragma once

#include "common/step.cuh"

namespace mlpgpu {

// Both products of the backward pass from the same staged tiles. A block has a tile of W, loads it once, and goes
// through the shard's rows: dW and db stay in registers, while each block adds its part of dx = dz Wᵀ to memory, which
// starts at 0, by atomicAdd; so the order of that sum varies.
// Source: the backpropagation kernel of a 2017 course report (see docs/decisions.md).
// Grid: (tiles of k, tiles of n), 256 threads.
struct AtomicTile {
    static constexpr int I = 32, J = 32, R = 32, THREADS = 256;
    static constexpr int PITCH = 33;  // a column of a tile lies in 32 different banks
    static constexpr int SHARED_BYTES = 4 * 3 * 32 * PITCH;
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
    const int column = threadIdx.x % 32, tile_row = threadIdx.x / 32;  // 8 rows of 32

    for (int i = tile_row; i < T::I; i += 8) {
        const bool inside = i0 + i < k && j0 + column < n;
        tile_w[i * T::PITCH + column] = inside ? w[static_cast<int64_t>(i0 + i) * n + j0 + column] : 0.0f;
    }
    float sum_dw[4] = {};  // elements (tile_row + 8 q, column) of the tile
    float sum_db = 0.0f;
    for (int r0 = 0; r0 < rows.count; r0 += T::R) {
        __syncthreads();
        for (int r = tile_row; r < T::R; r += 8) {
            const int64_t row = rows.first + r0 + r;
            const bool inside = r0 + r < rows.count;
            tile_x[r * T::PITCH + column] = inside && i0 + column < k ? x[row * k + i0 + column] : 0.0f;
            tile_dz[r * T::PITCH + column] = inside && j0 + column < n ? dz[row * n + j0 + column] : 0.0f;
        }
        __syncthreads();
        for (int r = 0; r < T::R; ++r) {
            const float value = tile_dz[r * T::PITCH + column];
            for (int q = 0; q < 4; ++q) sum_dw[q] = fmaf(tile_x[r * T::PITCH + tile_row + 8 * q], value, sum_dw[q]);
            if (tile_row == 0) sum_db += value;
        }
        if (dx) {
            for (int r = tile_row; r < T::R; r += 8) {
                float value = 0.0f;
                for (int j = 0; j < T::J; ++j)
                    value = fmaf(tile_dz[r * T::PITCH + j], tile_w[column * T::PITCH + j], value);
                if (r0 + r < rows.count && i0 + column < k)
                    atomicAdd(dx + static_cast<int64_t>(rows.first + r0 + r) * k + i0 + column, value);
            }
        }
    }
    for (int q = 0; q < 4; ++q) {
        const int i = i0 + tile_row + 8 * q;
        if (i < k && j0 + column < n) dw[static_cast<int64_t>(i) * n + j0 + column] = sum_dw[q];
    }
    if (db && blockIdx.x == 0 && tile_row == 0 && j0 + column < n) db[j0 + column] = sum_db;
}

}  // namespace mlpgpu
