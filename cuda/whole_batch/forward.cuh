// A dense layer's outputs for few rows and a large W, which take as long as reading W.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/philox.cuh"
#include "math/activations.cuh"
#include "dense/batch_rows.cuh"
#include "whole_batch/copies.cuh"

namespace mlpgpu {

// A block computes COLUMNS columns of z for the whole batch, of at most ROWS rows. Its warps take slices of K rows of W in
// turn, each with a ring of its own: a slice of W and the batch's x along it come by asynchronous copies STAGES - 1 slices
// ahead, so that a warp waits for memory alone. Of a slice a lane has two columns and a quarter of the rows of W.
template <int ROWS_>
struct WholeBatchForward {
    static constexpr int ROWS = ROWS_, COLUMNS = 16, K = 16, WARPS = ROWS > 16 ? 8 : 16, THREADS = WARPS * WARP;
    static constexpr int STAGES = ROWS == 16 ? 3 : 4;  // whose bytes a block may have on every card since sm_80
    static constexpr int PAIRS = COLUMNS / 2, QUARTER = K / (WARP / PAIRS);  // lanes along columns, rows of W of a lane
    static constexpr int STAGE = K * COLUMNS + ROWS * K;
    static constexpr int SHARED_BYTES = 4 * WARPS * STAGES * STAGE;
    static_assert(QUARTER == 4, "a lane reads x along its rows of W as a vector");
    static_assert(ROWS % 8 == 0 && K % 8 == 0, "lanes copy eight rows at a time, four to a row");
    static_assert(WARPS * ROWS * COLUMNS <= WARPS * STAGES * STAGE, "in the end the warps' sums lie where the slices were");
};

// z = x W + b, y = f(z), f being the activation of this number; x (B, k), or the data set by the order. z is null where f'
// takes y; unless `dropped` is null it receives the dropout of y. An element's sum follows a fixed order, which is not that of gemm/simt.cuh. Grid: (column tiles).
template <class T>
__device__ __forceinline__ void dense_forward_whole_batch(const Step* step, int shard, int shards, const float* x,
                                                          const int* order, const float* w, const float* b, float* z,
                                                          float* y, float* dropped, int k, int n, int activation,
                                                          uint64_t seed, uint64_t purpose, uint64_t layer,
                                                          uint64_t threshold, float keep) {
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n0 = blockIdx.x * T::COLUMNS;
    const int copied_row = lane / 4, copied_column = lane % 4 * 4;
    float* const ring = shared + warp * T::STAGES * T::STAGE;
    const Rows rows = shard_rows(step, shard, shards);
    const float* const from = first_input_row(rows, x, order, k);
    const bool w_vectored = is_vectored(w, n), x_vectored = is_vectored(from, k);

    const auto fetch_w = [&](int slice, int stage) {
#pragma unroll
        for (int i = copied_row; i < T::K; i += 8) {
            const int row = slice * T::K + i;
            copy_quad(ring + stage * T::STAGE + i * T::COLUMNS + copied_column, w + static_cast<int64_t>(row) * n,
                      n0 + copied_column, row < k ? n : 0, w_vectored, w);
        }
    };
    // Floats that are copied one by one pass through the first-level cache, which may hold what earlier launches left.
    if (!w_vectored) pdl_wait_and_trigger();
#pragma unroll
    for (int ahead = 0; ahead < T::STAGES - 1; ++ahead) fetch_w(warp + ahead * T::WARPS, ahead);
    if (w_vectored) pdl_wait_and_trigger();

    const int* const indices = row_indices(rows, order);
    const float* copied_rows[T::ROWS / 8];
#pragma unroll
    for (int i = 0; i < T::ROWS / 8; ++i) {
        const int r = copied_row + 8 * i;
        copied_rows[i] = from + static_cast<int64_t>(r < rows.count && indices ? indices[r] : r) * k;
    }
    const auto fetch_x = [&](int slice, int stage) {
#pragma unroll
        for (int i = 0; i < T::ROWS / 8; ++i) {
            const int r = copied_row + 8 * i;
            copy_quad(ring + stage * T::STAGE + T::K * T::COLUMNS + r * T::K + copied_column, copied_rows[i],
                      slice * T::K + copied_column, r < rows.count ? k : 0, x_vectored, x);
        }
    };
#pragma unroll
    for (int ahead = 0; ahead < T::STAGES - 1; ++ahead) {
        fetch_x(warp + ahead * T::WARPS, ahead);
        commit_copies();
    }

    const int quarter = lane / T::PAIRS, pair = lane % T::PAIRS;
    float sums[T::ROWS][2] = {};
    int stage = 0;
    for (int slice = warp; slice * T::K < k; slice += T::WARPS) {
        wait_copies<T::STAGES - 2>();
        __syncwarp();  // the slice is there for all lanes, and all have read the one before
        const int freed = stage == 0 ? T::STAGES - 1 : stage - 1, following = slice + (T::STAGES - 1) * T::WARPS;
        fetch_w(following, freed);
        fetch_x(following, freed);
        commit_copies();
        const float* const staged_w = ring + stage * T::STAGE + quarter * T::QUARTER * T::COLUMNS + 2 * pair;
        const float* const staged_x = ring + stage * T::STAGE + T::K * T::COLUMNS + quarter * T::QUARTER;
        float2 of_w[T::QUARTER];
#pragma unroll
        for (int e = 0; e < T::QUARTER; ++e) of_w[e] = *reinterpret_cast<const float2*>(staged_w + e * T::COLUMNS);
#pragma unroll
        for (int r = 0; r < T::ROWS; ++r) {
            float of_x[T::QUARTER];
            load_four(staged_x + r * T::K, of_x);
#pragma unroll
            for (int e = 0; e < T::QUARTER; ++e) {
                sums[r][0] = fmaf(of_x[e], of_w[e].x, sums[r][0]);
                sums[r][1] = fmaf(of_x[e], of_w[e].y, sums[r][1]);
            }
        }
        stage = stage == T::STAGES - 1 ? 0 : stage + 1;
    }

    wait_copies();
    __syncthreads();  // the sums take the place of the slices
#pragma unroll
    for (int r = 0; r < T::ROWS; ++r)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
#pragma unroll
            for (int offset = T::PAIRS; offset < WARP; offset *= 2) sums[r][q] += __shfl_xor_sync(WARP_ALL, sums[r][q], offset);
            if (quarter == 0) shared[(warp * T::ROWS + r) * T::COLUMNS + 2 * pair + q] = sums[r][q];
        }
    __syncthreads();
    for (int element = threadIdx.x; element < T::ROWS * T::COLUMNS; element += T::THREADS) {
        const int row = element / T::COLUMNS, column = n0 + element % T::COLUMNS;
        if (row >= rows.count || column >= n) continue;
        float sum = shared[element];
#pragma unroll
        for (int other = 1; other < T::WARPS; ++other) sum += shared[other * T::ROWS * T::COLUMNS + element];
        float value[1] = {sum + (b ? b[column] : 0.0f)};
        const int64_t offset = static_cast<int64_t>(rows.first + row) * n + column;
        if (z) z[offset] = value[0];
        Activations::forwards(activation, value);
        y[offset] = value[0];
        if (dropped) dropped[offset] = LayerDropout{seed, purpose, layer, threshold, keep}(step->number, offset, value[0]);
    }
}

}  // namespace mlpgpu
