// C = A · B on plain float32 cores for few rows or few tiles: the warps of a block share k, so that tiles small enough to fill
// the card still have work for all threads.
//
// A block computes a tile of C, M x N, in slices of K along k. The slices of both operands lie in shared memory as they are
// stored, and while the block multiplies one the next is loaded into registers. Of each slice the warps take quads of k in
// turn, each for the whole tile. In the end their sums are added up in the order of the warps.
//
// An element of C is the sum, in this order, of a chain of fused multiply-adds for each warp, over ascending k. It follows
// from k alone, but is not the one chain of gemm/simt.cuh, which evaluations keep: the bits of a row must not depend on how
// many go with it.
#pragma once

#include "gemm/simt.cuh"

namespace mlpgpu {

template <int N_, int WARPS_ = 8>
struct WarpSplitTile {
    static constexpr int M = 32, N = N_, WARPS = WARPS_, THREADS = WARPS * WARP, K = 16 * WARPS;
    // A lane has ROWS rows, LANE_ROWS apart, and COLUMNS columns of the tile.
    static constexpr int LANE_ROWS = 8, LANE_COLUMNS = WARP / LANE_ROWS, ROWS = M / LANE_ROWS, COLUMNS = N / LANE_COLUMNS;
    // A staged row along k, padded by a vector, so that rows begin in different banks.
    static constexpr int PITCH = K + 4;
    static constexpr int SHARED_BYTES = 4 * (M + N) * PITCH;
    static_assert(COLUMNS == 2 || COLUMNS == 4, "a lane reads its columns of B as a vector");
    static_assert(WARPS * (M + 1) * N <= (M + N) * PITCH, "the warps' sums lie where the slices were");
    static_assert(M * N % THREADS == 0, "as many elements for each thread");
};

// A lane's row i: LANE_ROWS apart, if rows of A run along k, for rows in different banks; else neighbours.
template <class T, bool A_INNER>
__device__ __forceinline__ int warp_split_row(int lane_row, int i) {
    return A_INNER ? lane_row + T::LANE_ROWS * i : lane_row * T::ROWS + i;
}

// A lane's column i: neighbours, if rows of B run along columns; else LANE_COLUMNS apart, for rows in different banks.
template <class T, bool B_INNER>
__device__ __forceinline__ int warp_split_column(int lane_column, int i) {
    return B_INNER ? lane_column + T::LANE_COLUMNS * i : lane_column * T::COLUMNS + i;
}

// a[i][e] is element k + e of a lane's row i.
template <class T, bool A_INNER>
__device__ __forceinline__ void read_rows(const float* staged_a, int lane_row, int k, float (&a)[T::ROWS][4]) {
    if constexpr (A_INNER) {
#pragma unroll
        for (int i = 0; i < T::ROWS; ++i) load_four(staged_a + warp_split_row<T, true>(lane_row, i) * T::PITCH + k, a[i]);
    } else {
        static_assert(T::ROWS == 4, "a lane reads its rows of A as a vector");
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float of_rows[4];
            load_four(staged_a + (k + e) * T::M + lane_row * T::ROWS, of_rows);
#pragma unroll
            for (int i = 0; i < T::ROWS; ++i) a[i][e] = of_rows[i];
        }
    }
}

// b[e][j] is element k + e of a lane's column j.
template <class T, bool B_INNER>
__device__ __forceinline__ void read_columns(const float* staged_b, int lane_column, int k, float (&b)[4][T::COLUMNS]) {
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

// An element of an array that each warp has one of, added up in their order.
template <class T>
__device__ __forceinline__ float sum_of_warps(const float* of_warps, int size, int element) {
    float sum = of_warps[element];
#pragma unroll
    for (int warp = 1; warp < T::WARPS; ++warp) sum += of_warps[warp * size + element];
    return sum;
}

// Leaves the sums of a tile's elements for each warp in shared memory, (WARPS, M, N), and finishes the sums of B's columns.
template <class T, bool A_INNER, bool B_INNER, class Columns>
__device__ __forceinline__ void multiply_by_warps(const Operand<A_INNER>& a, const Operand<B_INNER>& b, int m0, int n0,
                                                  int k_begin, int k_end, const Columns& columns, float* shared) {
    float* const staged_b = shared + T::M * (A_INNER ? T::PITCH : T::K);
    using SliceA = Slice<T::M, A_INNER ? T::PITCH : T::M, T::K, T::THREADS, A_INNER>;
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

    float c[T::ROWS][T::COLUMNS] = {}, of_columns[T::COLUMNS] = {};
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
            read_rows<T, A_INNER>(shared, lane_row, k, of_a);
            read_columns<T, B_INNER>(staged_b, lane_column, k, of_b);
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int j = 0; j < T::COLUMNS; ++j) {
                    if (Columns::IS_SUMMED) of_columns[j] += of_b[e][j];
#pragma unroll
                    for (int i = 0; i < T::ROWS; ++i) c[i][j] = fmaf(of_a[i][e], of_b[e][j], c[i][j]);
                }
        }
    }

    __syncthreads();  // the sums take the place of the slices
    float* const column_sums = shared + T::WARPS * T::M * T::N;
#pragma unroll
    for (int j = 0; j < T::COLUMNS; ++j) {
        const int column = warp_split_column<T, B_INNER>(lane_column, j);
#pragma unroll
        for (int i = 0; i < T::ROWS; ++i)
            shared[(warp * T::M + warp_split_row<T, A_INNER>(lane_row, i)) * T::N + column] = c[i][j];
        if (Columns::IS_SUMMED && lane_row == 0) column_sums[warp * T::N + column] = of_columns[j];
    }
    __syncthreads();
    if (Columns::IS_SUMMED && m0 == 0 && threadIdx.x < T::N)
        columns.finish(n0 + threadIdx.x, sum_of_warps<T>(column_sums, T::N, threadIdx.x));
}

// Finishes every element of the tile inside C, as gemm_tile of gemm/simt.cuh does; what that reads is in flight while the
// product is computed.
template <int N, int WARPS, bool A_INNER, bool B_INNER, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(WarpSplitTile<N, WARPS>, const Operand<A_INNER>& a, const Operand<B_INNER>& b,
                                          int m0, int n0, int k_begin, int k_end, const Columns& columns,
                                          const Epilogue& epilogue) {
    using T = WarpSplitTile<N, WARPS>;
    constexpr int ELEMENTS = T::M * T::N / T::THREADS;
    SHARED(float, shared);
    typename Epilogue::Loaded loaded[ELEMENTS] = {};
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const int element = threadIdx.x + i * T::THREADS, m = m0 + element / T::N, n = n0 + element % T::N;
        if (m < a.outer && n < b.outer) loaded[i] = epilogue.load(m, n);
    }
    multiply_by_warps<T>(a, b, m0, n0, k_begin, k_end, columns, shared);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const int element = threadIdx.x + i * T::THREADS, m = m0 + element / T::N, n = n0 + element % T::N;
        const auto made = epilogue.finish(sum_of_warps<T>(shared, T::M * T::N, element), loaded[i]);
        if (m < a.outer && n < b.outer) epilogue.put(m, n, made);
    }
}

}  // namespace mlpgpu
