// C = A · B on plain float32 cores where one of the three sizes is small, so that memory takes nearly all of the time: of few
// columns or few rows a strip of C, whose k the warps of a block share; of a short k a tile whose B lies in registers.
#pragma once

#include "gemm/warp_split.cuh"

namespace mlpgpu {

// A strip of few columns. A lane has four neighbouring rows of C, so that A passes from memory to registers as it lies there,
// a row of it to a warp. In the end the warps' sums are added up in their order.
template <int N_>
struct StripTile {
    static constexpr int M = 4 * WARP, N = N_, WARPS = 8, THREADS = WARPS * WARP;
    static constexpr int AT_ONCE = 4, K = WARPS * AT_ONCE;  // k that a warp, and all of them, have in flight
    static constexpr int SHARED_BYTES = 4 * WARPS * M * N;
};

// Adds up the warps' sums of a strip, which lie in shared memory, (WARPS, M, N), and finishes them; then their sums of B's
// columns, which put_columns(shared) leaves there, (WARPS, N).
template <class T, class Columns, class Epilogue, class PutColumns>
__device__ __forceinline__ void finish_strip(float* shared, int m0, int n0, int m_end, int n_end, const Columns& columns,
                                             const Epilogue& epilogue, const PutColumns& put_columns) {
    __syncthreads();
    for (int element = threadIdx.x; element < T::M * T::N; element += T::THREADS) {
        const int row = m0 + element / T::N, column = n0 + element % T::N;
        if (row >= m_end || column >= n_end) continue;
        const auto made = epilogue.finish(sum_of_warps<T>(shared, T::M * T::N, element), epilogue.load(row, column));
        epilogue.put(row, column, made);
    }
    if (!Columns::IS_SUMMED || m0 > 0) return;
    __syncthreads();
    put_columns(shared);
    __syncthreads();
    if (threadIdx.x < T::N) columns.finish(n0 + threadIdx.x, sum_of_warps<T>(shared, T::N, threadIdx.x));
}

template <int N, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(StripTile<N>, const Operand<false>& a, const Operand<false>& b, int m0, int n0,
                                          int k_begin, int k_end, const Columns& columns, const Epilogue& epilogue) {
    using T = StripTile<N>;
    SHARED(float, shared);
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
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) shared[(warp * T::M + 4 * lane + r) * N + j] = c[r][j];
    finish_strip<T>(shared, m0, n0, a.outer, b.outer, columns, epilogue, [&](float* sums) {
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (lane == 0) sums[warp * N + j] = of_columns[j];
    });
}

// A strip of few rows. A lane has four neighbouring columns of C, so that B passes as A does above. Of a warp's slice of A each
// lane loads some elements, which all lanes are given when they are multiplied; and the next slice is in flight meanwhile,
// since rows of A may have to be looked up first.
template <int M_>
struct RowStripTile {
    static constexpr int M = M_, N = 4 * WARP, WARPS = 8, THREADS = WARPS * WARP;
    static constexpr int AT_ONCE = M > 8 ? 4 : 8, K = WARPS * AT_ONCE, LOADED = AT_ONCE * M / WARP;  // of A, by a lane
    static constexpr int SHARED_BYTES = 4 * WARPS * M * N;
    static_assert(AT_ONCE * M % WARP == 0 && WARP % M == 0);
};

// What a warp has of AT_ONCE neighbouring k.
template <class T>
struct RowStripSlice {
    float a[T::LOADED], b[T::AT_ONCE][4];

    __device__ __forceinline__ void load(const Operand<false>& from_a, const Operand<false>& from_b, int m0, int n, int k0,
                                         int k_end, bool vectored) {
        const int lane = threadIdx.x % WARP, row = lane % T::M;
#pragma unroll
        for (int i = 0; i < T::LOADED; ++i) {
            const int k = k0 + (i * WARP + lane) / T::M;
            a[i] = k < k_end && m0 + row < from_a.outer ? from_a.row(k)[m0 + row] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < T::AT_ONCE; ++i) {
            float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (k0 + i < k_end && n < from_b.outer) four = load_row(from_b.row(k0 + i), from_b.outer, n, vectored);
            unpack(four, b[i]);
        }
    }

    // A's element of row `row` and of the i-th k.
    __device__ __forceinline__ float of_a(int i, int row) const {
        const int element = i * T::M + row;
        return __shfl_sync(WARP_ALL, a[element / WARP], element % WARP);
    }
};

template <int M, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(RowStripTile<M>, const Operand<false>& a, const Operand<false>& b, int m0, int n0,
                                          int k_begin, int k_end, const Columns& columns, const Epilogue& epilogue) {
    using T = RowStripTile<M>;
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n = n0 + 4 * lane;
    const bool vectored = is_vectored(b.data, b.pitch);
    float c[M][4] = {}, of_columns[4] = {};
    RowStripSlice<T> next;
    next.load(a, b, m0, n, k_begin + warp * T::AT_ONCE, k_end, vectored);
    for (int k0 = k_begin + warp * T::AT_ONCE; k0 < k_end; k0 += T::K) {
        const RowStripSlice<T> slice = next;
        next.load(a, b, m0, n, k0 + T::K, k_end, vectored);
#pragma unroll
        for (int i = 0; i < T::AT_ONCE; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (Columns::IS_SUMMED) of_columns[j] += slice.b[i][j];
#pragma unroll
            for (int r = 0; r < M; ++r) {
                const float of_row = slice.of_a(i, r);
#pragma unroll
                for (int j = 0; j < 4; ++j) c[r][j] = fmaf(of_row, slice.b[i][j], c[r][j]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < M; ++r) store_four(shared + (warp * M + r) * T::N + 4 * lane, c[r]);
    finish_strip<T>(shared, m0, n0, a.outer, b.outer, columns, epilogue,
                    [&](float* sums) { store_four(sums + warp * T::N + 4 * lane, of_columns); });
}

// A tile of at most K terms. A lane has every 32nd column with its part of B, and a warp goes down rows of C, whose A lies in
// shared memory; so each element passes from its sum to its epilogue at once, and warps do not wait for each other. The
// sum is the chain of gemm/simt.cuh.
template <int K_>
struct ShortTile {
    static constexpr int M = 128, LANE_COLUMNS = 4, N = LANE_COLUMNS * WARP, K = K_, WARPS = 8, THREADS = WARPS * WARP;
    static constexpr int SHARED_BYTES = 4 * M * K;
};

template <int K, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(ShortTile<K>, const Operand<true>& a, const Operand<false>& b, int m0, int n0, int,
                                          int k_end, const Columns&, const Epilogue& epilogue) {
    using T = ShortTile<K>;
    static_assert(!Columns::IS_SUMMED);
    SHARED(float, shared);  // A (M, K), filled up with zeros
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float of_b[K][T::LANE_COLUMNS];
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int j = 0; j < T::LANE_COLUMNS; ++j) {
            const int n = n0 + lane + j * WARP;
            of_b[k][j] = k < k_end && n < b.outer ? b.row(k)[n] : 0.0f;
        }
#pragma unroll
    for (int i = 0; i < T::M * K / T::THREADS; ++i) {
        const int element = threadIdx.x + i * T::THREADS, m = m0 + element / K, k = element % K;
        shared[element] = m < a.outer && k < k_end ? a.row(m)[k] : 0.0f;
    }
    __syncthreads();
#pragma unroll 2
    for (int i = warp; i < T::M; i += T::WARPS) {
        const int m = m0 + i;
        if (m >= a.outer) break;
        typename Epilogue::Loaded loaded[T::LANE_COLUMNS] = {};
        float c[T::LANE_COLUMNS] = {};
#pragma unroll
        for (int j = 0; j < T::LANE_COLUMNS; ++j)
            if (n0 + lane + j * WARP < b.outer) loaded[j] = epilogue.load(m, n0 + lane + j * WARP);
#pragma unroll
        for (int k = 0; k < K; k += 4) {
            float of_a[4];
            load_four(shared + i * K + k, of_a);
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int j = 0; j < T::LANE_COLUMNS; ++j) c[j] = fmaf(of_a[e], of_b[k + e][j], c[j]);
        }
#pragma unroll
        for (int j = 0; j < T::LANE_COLUMNS; ++j) {
            const auto made = epilogue.finish(c[j], loaded[j]);
            if (n0 + lane + j * WARP < b.outer) epilogue.put(m, n0 + lane + j * WARP, made);
        }
    }
}

}  // namespace mlpgpu
