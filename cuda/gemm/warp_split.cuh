// C = A · B on plain float32 cores for few rows: the warps of a block share k, so that tiles small enough to fill the card
// still have work for 256 threads.
//
// A block computes a tile of C, M x N, in slices of K along k. The slices of both operands lie in shared memory as they are
// stored, and while the block multiplies one the next is loaded into registers. Of each slice the warps take quads of k in
// turn, each for the whole tile. In the end their sums are added up in the order of the warps.
//
// An element of C is the sum, in this order, of eight chains of fused multiply-adds, each over ascending k. It follows from
// k alone, but is not the one chain of gemm/simt.cuh, which evaluations keep: the bits of a row must not depend on how many
// go with it.
#pragma once

#include "gemm/simt.cuh"

namespace mlpgpu {

template <int N_>
struct WarpSplitTile {
    static constexpr int M = 32, N = N_, K = 128, THREADS = 256, WARPS = THREADS / WARP;
    // A lane has ROWS rows, LANE_ROWS apart, and COLUMNS columns of the tile.
    static constexpr int LANE_ROWS = 8, LANE_COLUMNS = WARP / LANE_ROWS, ROWS = M / LANE_ROWS, COLUMNS = N / LANE_COLUMNS;
    // A staged row along k, padded by a vector, so that rows begin in different banks.
    static constexpr int PITCH = K + 4;
    static constexpr int SHARED_BYTES = 4 * (M + N) * PITCH;
    static_assert(COLUMNS == 2 || COLUMNS == 4, "a lane reads its columns of B as a vector");
    static_assert(WARPS * M * N <= (M + N) * PITCH, "the warps' sums lie where the slices were");
};

// A lane's column i: neighbours, if rows of B run along columns; else LANE_COLUMNS apart, for rows in different banks.
template <class T, bool B_INNER>
__device__ __forceinline__ int warp_split_column(int lane_column, int i) {
    return B_INNER ? lane_column + T::LANE_COLUMNS * i : lane_column * T::COLUMNS + i;
}

// b[e][j] is element k + e of a lane's column j.
template <class T, bool B_INNER>
__device__ __forceinline__ void read_quads(const float* staged_b, int lane_column, int k, float (&b)[4][T::COLUMNS]) {
    if constexpr (B_INNER) {
#pragma unroll
        for (int j = 0; j < T::COLUMNS; ++j) {
            float along[4];
            load_four(staged_b + warp_split_column<T, true>(lane_column, j) * T::PITCH + k, along);
#pragma unroll
            for (int e = 0; e < 4; ++e) b[e][j] = along[e];
        }
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float* const from = staged_b + (k + e) * T::N + lane_column * T::COLUMNS;
            if constexpr (T::COLUMNS == 4) {
                load_four(from, b[e]);
            } else {
                const float2 two = *reinterpret_cast<const float2*>(from);
                b[e][0] = two.x, b[e][1] = two.y;
            }
        }
    }
}

// Calls the epilogue for every element of the tile inside C, as gemm_tile of gemm/simt.cuh does.
template <int N, bool A_INNER, bool B_INNER, class Epilogue>
__device__ __forceinline__ void gemm_tile(WarpSplitTile<N>, const Operand<A_INNER>& a, const Operand<B_INNER>& b, int m0,
                                          int n0, int k_begin, int k_end, const NoColumnSum&, const Epilogue& epilogue) {
    using T = WarpSplitTile<N>;
    static_assert(A_INNER, "rows of A run along k");
    SHARED(float, shared);
    float* const staged_b = shared + T::M * T::PITCH;
    using SliceA = Slice<T::M, T::PITCH, T::K, T::THREADS, true>;
    using SliceB = Slice<T::N, B_INNER ? T::PITCH : T::N, T::K, T::THREADS, B_INNER>;
    SliceA slice_a;
    SliceB slice_b;
    const bool a_whole = SliceA::is_whole(a, m0), b_whole = SliceB::is_whole(b, n0);
    const int warp = threadIdx.x / WARP, lane_row = threadIdx.x % WARP / T::LANE_COLUMNS;
    const int lane_column = threadIdx.x % T::LANE_COLUMNS;
    const auto fetch = [&](int k0) {
        const bool is_deep = k0 + T::K <= k_end;
        slice_a.fetch(a, m0, k0, k_end, a_whole && is_deep);
        slice_b.fetch(b, n0, k0, k_end, b_whole && is_deep);
    };

    float c[T::ROWS][T::COLUMNS] = {};
    fetch(k_begin);
    for (int k0 = k_begin; k0 < k_end; k0 += T::K) {
        __syncthreads();  // all have read the slice before
        slice_a.stage_as_stored(shared);
        slice_b.stage_as_stored(staged_b);
        __syncthreads();
        if (k0 + T::K < k_end) fetch(k0 + T::K);
        const int depth = min(T::K, k_end - k0);
#pragma unroll 2
        for (int k = 4 * warp; k < depth; k += 4 * T::WARPS) {
            float of_a[T::ROWS][4], of_b[4][T::COLUMNS];
#pragma unroll
            for (int i = 0; i < T::ROWS; ++i) load_four(shared + (lane_row + i * T::LANE_ROWS) * T::PITCH + k, of_a[i]);
            read_quads<T, B_INNER>(staged_b, lane_column, k, of_b);
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int i = 0; i < T::ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < T::COLUMNS; ++j) c[i][j] = fmaf(of_a[i][e], of_b[e][j], c[i][j]);
        }
    }

    __syncthreads();  // the sums take the place of the slices
#pragma unroll
    for (int i = 0; i < T::ROWS; ++i)
#pragma unroll
        for (int j = 0; j < T::COLUMNS; ++j) {
            const int row = lane_row + i * T::LANE_ROWS, column = warp_split_column<T, B_INNER>(lane_column, j);
            shared[(warp * T::M + row) * T::N + column] = c[i][j];
        }
    __syncthreads();
#pragma unroll
    for (int element = threadIdx.x; element < T::M * T::N; element += T::THREADS) {
        float sum = shared[element];
#pragma unroll
        for (int other = 1; other < T::WARPS; ++other) sum += shared[other * T::M * T::N + element];
        const int m = m0 + element / T::N, n = n0 + element % T::N;
        if (m < a.outer && n < b.outer) epilogue(m, n, sum);
    }
}

}  // namespace mlpgpu
