// C = A · B on plain float32 cores where one of the three sizes is small, so that memory takes nearly all of the time: of few
// columns or few rows a strip of C, whose k the warps of a block share; of a short k a tile whose B lies in registers.
#pragma once

#include "gemm/warp_split.cuh"

namespace mlpgpu {

// A strip of FEW columns of C, or of FEW rows. Along the other side, the wide one, a lane has four neighbours, so that their
// operand passes from memory to registers as it lies there, a row of it to a warp. The slice of the other operand that a warp
// multiplies lies in shared memory, from which all lanes read the same elements at once. The next slices are in flight
// meanwhile, and it is known a slice earlier where those of shared memory lie, as rows of A may have to be looked up. In the
// end the warps' sums are added up in their order.
template <int FEW_, bool OF_ROWS_>
struct Strip {
    static constexpr bool OF_ROWS = OF_ROWS_;
    static constexpr int FEW = FEW_, LANE = 4, WIDE = LANE * WARP, WARPS = 8, THREADS = WARPS * WARP;
    static constexpr int M = OF_ROWS ? FEW : WIDE, N = OF_ROWS ? WIDE : FEW;
    static constexpr int AT_ONCE = FEW > 4 ? 4 : 8, K = WARPS * AT_ONCE;  // k that a warp, and all of them, multiply at once
    static constexpr int LOADED = (AT_ONCE * FEW + WARP - 1) / WARP;      // elements of shared memory, by a lane
    static constexpr int SHARED_BYTES = 4 * WARPS * M * N;
    static_assert(LOADED * WARP <= M * N, "a warp's slice lies where its sums will");
};

template <int N>
using StripTile = Strip<N, false>;
template <int M>
using RowStripTile = Strip<M, true>;

// Adds up the warps' sums of a strip, which lie in shared memory, (WARPS, FEW, WIDE), and finishes them; then their sums of
// B's columns, which put_columns(shared) leaves there, (WARPS, N).
template <class T, class Columns, class Epilogue, class PutColumns>
__device__ __forceinline__ void finish_strip(float* shared, int m0, int n0, int m_end, int n_end, const Columns& columns,
                                             const Epilogue& epilogue, const PutColumns& put_columns) {
    __syncthreads();
    for (int element = threadIdx.x; element < T::M * T::N; element += T::THREADS) {
        const int few = element / T::WIDE, wide = element % T::WIDE;
        const int row = m0 + (T::OF_ROWS ? few : wide), column = n0 + (T::OF_ROWS ? wide : few);
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

// What a warp has of AT_ONCE neighbouring k from k0 on; 0 from k_end on.
template <class T>
struct StripSlice {
    float few[T::LOADED], wide[T::AT_ONCE][T::LANE];

    // The k and the column of a lane's element i of the few, if it has that one.
    static __device__ __forceinline__ int element(int i) { return i * WARP + threadIdx.x % WARP; }
    static __device__ __forceinline__ int k_of(int i) { return element(i) / T::FEW; }
    static __device__ __forceinline__ bool has(const Operand<false>& from, int few0, int i) {
        return element(i) < T::AT_ONCE * T::FEW && few0 + element(i) % T::FEW < from.outer;
    }

    // Where the rows of a lane's elements lie.
    static __device__ __forceinline__ void find(const Operand<false>& from, int k0, int k_end, int (&rows)[T::LOADED]) {
#pragma unroll
        for (int i = 0; i < T::LOADED; ++i) {
            const int k = k0 + k_of(i);
            rows[i] = from.indices && k < k_end ? from.indices[k] : k;
        }
    }

    __device__ __forceinline__ void load(const Operand<false>& of_few, const int (&rows)[T::LOADED], const Operand<false>& of_wide,
                                         int few0, int w, int k0, int k_end, bool vectored) {
#pragma unroll
        for (int i = 0; i < T::LOADED; ++i) {
            const bool is_inside = k0 + k_of(i) < k_end && has(of_few, few0, i);
            const float* const row = of_few.data + static_cast<int64_t>(rows[i]) * of_few.pitch;
            few[i] = is_inside ? row[few0 + element(i) % T::FEW] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < T::AT_ONCE; ++i) {
            float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (k0 + i < k_end && w < of_wide.outer) four = load_row(of_wide.row(k0 + i), of_wide.outer, w, vectored);
            unpack(four, wide[i]);
        }
    }
};

template <int FEW, bool OF_ROWS, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(Strip<FEW, OF_ROWS>, const Operand<false>& a, const Operand<false>& b, int m0, int n0,
                                          int k_begin, int k_end, const Columns& columns, const Epilogue& epilogue) {
    using T = Strip<FEW, OF_ROWS>;
    using Slice = StripSlice<T>;
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Operand<false>&of_few = OF_ROWS ? a : b, &of_wide = OF_ROWS ? b : a;
    const int few0 = OF_ROWS ? m0 : n0, w = (OF_ROWS ? n0 : m0) + T::LANE * lane;
    const bool vectored = is_vectored(of_wide.data, of_wide.pitch);
    float* const of_warp = shared + warp * T::M * T::N;  // its slice, (AT_ONCE, FEW), and in the end its sums, (FEW, WIDE)
    float c[FEW][T::LANE] = {}, of_columns[OF_ROWS ? T::LANE : FEW] = {};
    int rows[T::LOADED];
    Slice next;
    const int k_first = k_begin + warp * T::AT_ONCE;
    Slice::find(of_few, k_first, k_end, rows);
    next.load(of_few, rows, of_wide, few0, w, k_first, k_end, vectored);
    Slice::find(of_few, k_first + T::K, k_end, rows);
    for (int k0 = k_first; k0 < k_end; k0 += T::K) {
        __syncwarp();  // all have read the slice before
#pragma unroll
        for (int i = 0; i < T::LOADED; ++i) of_warp[Slice::element(i)] = next.few[i];
        __syncwarp();
        const Slice slice = next;
        next.load(of_few, rows, of_wide, few0, w, k0 + T::K, k_end, vectored);
        Slice::find(of_few, k0 + 2 * T::K, k_end, rows);
#pragma unroll
        for (int i = 0; i < T::AT_ONCE; ++i) {
            constexpr int READ = FEW < 4 ? FEW : 4;
#pragma unroll
            for (int f = 0; f < FEW; f += READ) {
                float few[READ];
                if constexpr (READ == 1)
                    few[0] = of_warp[i];
                else
                    load_neighbours(of_warp + i * FEW + f, few);
#pragma unroll
                for (int e = 0; e < READ; ++e) {
                    if (Columns::IS_SUMMED && !OF_ROWS) of_columns[f + e] += few[e];
#pragma unroll
                    for (int j = 0; j < T::LANE; ++j) c[f + e][j] = fmaf(few[e], slice.wide[i][j], c[f + e][j]);
                }
            }
#pragma unroll
            for (int j = 0; j < T::LANE; ++j)
                if (Columns::IS_SUMMED && OF_ROWS) of_columns[j] += slice.wide[i][j];
        }
    }
    __syncwarp();
#pragma unroll
    for (int f = 0; f < FEW; ++f) store_four(of_warp + f * T::WIDE + T::LANE * lane, c[f]);
    finish_strip<T>(shared, m0, n0, a.outer, b.outer, columns, epilogue, [&](float* sums) {
        if constexpr (OF_ROWS) {
            store_four(sums + warp * T::N + T::LANE * lane, of_columns);
        } else {
#pragma unroll
            for (int f = 0; f < FEW; ++f)
                if (lane == 0) sums[warp * FEW + f] = of_columns[f];
        }
    });
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
