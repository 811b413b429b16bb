// C = A · B of few columns and large k on plain float32 cores: a strip of C, whose k the warps of a block share.
//
// A lane has four neighbouring rows of C, so that A, which takes nearly all of the memory's time, passes from memory to
// registers as it lies there, a row of it to a warp. In the end the warps' sums are added up in their order.
#pragma once

#include "gemm/warp_split.cuh"

namespace mlpgpu {

template <int N_>
struct StripTile {
    static constexpr int M = 4 * WARP, N = N_, WARPS = 8, THREADS = WARPS * WARP;
    static constexpr int AT_ONCE = 4, K = WARPS * AT_ONCE;  // k that a warp, and all of them, have in flight
    static constexpr int SHARED_BYTES = 4 * WARPS * (M + 1) * N;
};

template <int N, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(StripTile<N>, const Operand<false>& a, const Operand<false>& b, int m0, int n0,
                                          int k_begin, int k_end, const Columns& columns, const Epilogue& epilogue) {
    using T = StripTile<N>;
    SHARED(float, shared);  // (WARPS, M, N), and the sums of B's columns (WARPS, N)
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, m = m0 + 4 * lane;
    const bool vectored = is_vectored(a.data, a.pitch);
    float c[4][N] = {}, of_columns[N] = {};
    for (int k0 = k_begin + warp * T::AT_ONCE; k0 < k_end; k0 += T::K) {
        float of_a[T::AT_ONCE][4], of_b[T::AT_ONCE][N];
#pragma unroll
        for (int i = 0; i < T::AT_ONCE; ++i) {
            const bool is_inside = k0 + i < k_end;
            float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (is_inside && m < a.outer) four = load_row(a.row(k0 + i), a.outer, m, vectored);
            unpack(four, of_a[i]);
#pragma unroll
            for (int j = 0; j < N; ++j) of_b[i][j] = is_inside && n0 + j < b.outer ? b.row(k0 + i)[n0 + j] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < T::AT_ONCE; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (Columns::IS_SUMMED) of_columns[j] += of_b[i][j];
#pragma unroll
                for (int r = 0; r < 4; ++r) c[r][j] = fmaf(of_a[i][r], of_b[i][j], c[r][j]);
            }
    }
    float* const column_sums = shared + T::WARPS * T::M * N;
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) shared[(warp * T::M + 4 * lane + r) * N + j] = c[r][j];
        if (Columns::IS_SUMMED && lane == 0) column_sums[warp * N + j] = of_columns[j];
    }
    __syncthreads();
    for (int element = threadIdx.x; element < T::M * N; element += T::THREADS) {
        const int row = m0 + element / N, column = n0 + element % N;
        if (row >= a.outer || column >= b.outer) continue;
        const auto made = epilogue.finish(sum_of_warps<T>(shared, T::M * N, element), epilogue.load(row, column));
        epilogue.put(row, column, made);
    }
    if (Columns::IS_SUMMED && m0 == 0 && threadIdx.x < N)
        columns.finish(n0 + threadIdx.x, sum_of_warps<T>(column_sums, N, threadIdx.x));
}

}  // namespace mlpgpu
