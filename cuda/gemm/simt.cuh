// C = A · B on plain float32 cores: the matrix product under every dense layer without tensor cores.
//
// A block computes a tile of C, M x N, in steps of K along the inner dimension. It stages a slice of A and of B in shared
// memory, both with the inner index first, so that a thread reads the values for its part of C as vectors. While the block
// multiplies one slice, the next one is loaded into registers.
//
// Every element of C is one chain of fused multiply-adds over ascending k, whatever the tile: tiles may follow the shape,
// and the bits stay the same. Outside the borders operands are read as 0 by a select.
#pragma once

#include "common/integers.cuh"
#include "common/vectors.cuh"

namespace mlpgpu {

// The shape of a block's work: 256 threads in a square of 16 x 16, each with THREAD_M x THREAD_N elements of C.
template <int M_, int N_, int K_>
struct SimtTile {
    static constexpr int M = M_, N = N_, K = K_;
    static constexpr int THREADS = 256, SIDE = 16;
    static constexpr int THREAD_M = M / SIDE, THREAD_N = N / SIDE;
    // Rows of a staged slice are padded by a vector, so that columns of it lie in different banks.
    static constexpr int PITCH_A = M + 4, PITCH_B = N + 4;
    static constexpr int STAGE = K * (PITCH_A + PITCH_B);
    static constexpr int SHARED_BYTES = 4 * 2 * STAGE;
};

// A matrix in global memory seen as (outer, inner): outer is C's row or column, inner is k.  INNER_FIRST
// tells which of the two is contiguous.
template <bool INNER_FIRST>
struct Operand {
    const float* data;
    int outer, inner;            // sizes
    int pitch;                   // elements from one row of the stored matrix to the next
    const int* indices = nullptr;  // the stored row of each row, or null where it is the same

    __device__ __forceinline__ const float* row(int64_t i) const { return data + (indices ? indices[i] : i) * pitch; }
    __device__ __forceinline__ float at(int i, int k) const { return INNER_FIRST ? row(i)[k] : row(k)[i]; }
};

// Four neighbours along the contiguous axis, from element (row, start) of a matrix of `rows` stored rows, each `length`
// long; 0 beyond either border.
template <class From>
__device__ __forceinline__ float4 load_edge(const From& from, int row, int rows, int start, int length,
                                            bool vectored) {
    const bool inside = row < rows && start < length;
    const float* source = inside ? from.row(row) + start : from.data;
    if (vectored && start + 4 <= length) {
        const float4 four = *reinterpret_cast<const float4*>(source);
        return inside ? four : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float4 four;
    four.x = inside ? source[0] : 0.0f;
    four.y = inside && start + 1 < length ? source[1] : 0.0f;
    four.z = inside && start + 2 < length ? source[2] : 0.0f;
    four.w = inside && start + 3 < length ? source[3] : 0.0f;
    return four;
}

// One operand's slice, which passes from global memory through registers to shared memory.
template <int OUTER, int PITCH, int DEPTH, int THREADS, bool INNER_FIRST>
struct Slice {
    static constexpr int VECTORS = OUTER * DEPTH / 4;
    static constexpr int PER_THREAD = ceil_div(VECTORS, THREADS);
    float4 fetched[PER_THREAD];

    // Vector v of the slice: where it starts along the outer and the inner axis.
    static __device__ __forceinline__ void locate(int v, int& outer, int& inner) {
        if (INNER_FIRST) {
            outer = v / (DEPTH / 4);
            inner = v % (DEPTH / 4) * 4;
        } else {
            outer = v % (OUTER / 4) * 4;
            inner = v / (OUTER / 4);
        }
    }

    // Whether the tile lies inside the matrix along the outer axis and can be read by vectors.
    static __device__ __forceinline__ bool is_whole(const Operand<INNER_FIRST>& from, int outer0) {
        return outer0 + OUTER <= from.outer && is_vectored(from.data, from.pitch);
    }

    // `whole`: no element of this slice lies beyond a border.
    __device__ __forceinline__ void fetch(const Operand<INNER_FIRST>& from, int outer0, int inner0, int inner_end,
                                          bool whole) {
        if (whole)
            fetch_whole(from, outer0, inner0);
        else
            fetch_edge(from, outer0, inner0, inner_end);
    }

    // The vectors of a thread lie a fixed number of stored rows apart, unless rows are indexed or no whole number of them
    // makes up one vector per thread.
    __device__ __forceinline__ void fetch_whole(const Operand<INNER_FIRST>& from, int outer0, int inner0) {
        constexpr int PER_ROW = (INNER_FIRST ? DEPTH : OUTER) / 4, ROWS = THREADS / PER_ROW;
        int outer, inner;
        locate(threadIdx.x, outer, inner);
        const int first_row = INNER_FIRST ? outer0 + outer : inner0 + inner;
        const int start = INNER_FIRST ? inner0 + inner : outer0 + outer;
        const float* const first = from.data + static_cast<int64_t>(first_row) * from.pitch + start;
        const int64_t stride = static_cast<int64_t>(ROWS) * from.pitch;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (VECTORS % THREADS != 0 && v >= VECTORS) break;
            const float* source = first + i * stride;
            if (THREADS % PER_ROW != 0) {
                locate(v, outer, inner);
                source = from.row(INNER_FIRST ? outer0 + outer : inner0 + inner) + (INNER_FIRST ? inner0 + inner : outer0 + outer);
            } else if (from.indices) {
                source = from.row(first_row + i * ROWS) + start;
            }
            fetched[i] = *reinterpret_cast<const float4*>(source);
        }
    }

    __device__ __forceinline__ void fetch_edge(const Operand<INNER_FIRST>& from, int outer0, int inner0,
                                               int inner_end) {
        const bool vectored = is_vectored(from.data, from.pitch);
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (VECTORS % THREADS != 0 && v >= VECTORS) break;
            int outer, inner;
            locate(v, outer, inner);
            outer += outer0;
            inner += inner0;
            if (INNER_FIRST)
                fetched[i] = load_edge(from, outer, from.outer, inner, inner_end, vectored);
            else
                fetched[i] = load_edge(from, inner, inner_end, outer, from.outer, vectored);
        }
    }

    __device__ __forceinline__ void stage(float* shared) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (VECTORS % THREADS != 0 && v >= VECTORS) break;
            int outer, inner;
            locate(v, outer, inner);
            if (INNER_FIRST) {
                shared[(inner + 0) * PITCH + outer] = fetched[i].x;
                shared[(inner + 1) * PITCH + outer] = fetched[i].y;
                shared[(inner + 2) * PITCH + outer] = fetched[i].z;
                shared[(inner + 3) * PITCH + outer] = fetched[i].w;
            } else {
                *reinterpret_cast<float4*>(shared + inner * PITCH + outer) = fetched[i];
            }
        }
    }

    // The same with rows as they are stored, whichever way that is.
    __device__ __forceinline__ void stage_as_stored(float* shared) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (VECTORS % THREADS != 0 && v >= VECTORS) break;
            int outer, inner;
            locate(v, outer, inner);
            float* const to = INNER_FIRST ? shared + outer * PITCH + inner : shared + inner * PITCH + outer;
            *reinterpret_cast<float4*>(to) = fetched[i];
        }
    }
};

// A thread's values of one row of a staged slice: COUNT of them, in runs of four or two that lie 16 runs apart, so that the
// vector reads of a warp touch neighbouring words.
template <int COUNT>
struct Run {
    static constexpr int WIDTH = COUNT % 4 == 0 ? 4 : 2;
    static_assert(COUNT % 2 == 0, "a vector is an even number of elements wide");
};

template <int COUNT, int SIDE>
__device__ __forceinline__ int thread_offset(int lane, int i) {
    constexpr int WIDTH = Run<COUNT>::WIDTH;
    return (i / WIDTH) * SIDE * WIDTH + lane * WIDTH + i % WIDTH;
}

template <int COUNT, int SIDE>
__device__ __forceinline__ void read_values(const float* row, int lane, float (&values)[COUNT]) {
    constexpr int WIDTH = Run<COUNT>::WIDTH;
#pragma unroll
    for (int i = 0; i < COUNT; i += WIDTH) {
        const float* source = row + thread_offset<COUNT, SIDE>(lane, i);
        if (WIDTH == 4) {
            const float4 four = *reinterpret_cast<const float4*>(source);
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        } else {
            const float2 two = *reinterpret_cast<const float2*>(source);
            values[i] = two.x, values[i + 1] = two.y;
        }
    }
}

template <int COUNT, int SIDE>
__device__ __forceinline__ void write_values(float* row, int lane, const float (&values)[COUNT]) {
    constexpr int WIDTH = Run<COUNT>::WIDTH;
#pragma unroll
    for (int i = 0; i < COUNT; i += WIDTH) {
        float* source = row + thread_offset<COUNT, SIDE>(lane, i);
        if (WIDTH == 4)
            *reinterpret_cast<float4*>(source) = make_float4(values[i], values[i + 1], values[i + 2], values[i + WIDTH - 1]);
        else
            *reinterpret_cast<float2*>(source) = make_float2(values[i], values[i + 1]);
    }
}

// Which part of the tile a thread computes. A warp covers 4 x 8 threads' parts, so that its vector reads of a slice touch
// few distinct words.
__device__ __forceinline__ int thread_row() { return threadIdx.x / WARP / 2 * 4 + threadIdx.x % WARP / 8; }
__device__ __forceinline__ int thread_column() { return threadIdx.x / WARP % 2 * 8 + threadIdx.x % 8; }

// Sums of B's columns over k, each by one thread from the slices that the block stages anyway. The blocks of C's first row
// of tiles make them.
struct NoColumnSum {
    static constexpr bool IS_SUMMED = false;
    __device__ __forceinline__ bool wants(int) const { return false; }
    __device__ __forceinline__ void finish(int, float) const {}
};

template <class Epilogue>
struct ColumnSum {
    static constexpr bool IS_SUMMED = true;
    int n;  // columns that are summed
    Epilogue epilogue;
    __device__ __forceinline__ bool wants(int column) const { return column < n; }
    __device__ __forceinline__ void finish(int column, float sum) const {
        if (wants(column)) epilogue(0, column, sum);
    }
};

template <class Epilogue>
__device__ __forceinline__ ColumnSum<Epilogue> column_sum(int n, const Epilogue& epilogue) {
    return {n, epilogue};
}

// A thread's part c of the tile of C whose first row is m0 and first column n0: the sums over k in [k_begin, k_end).
template <class T, bool A_INNER, bool B_INNER, class Columns>
__device__ __forceinline__ void multiply_tile(const Operand<A_INNER>& a, const Operand<B_INNER>& b, int m0, int n0,
                                              int k_begin, int k_end, const Columns& columns,
                                              float (&c)[T::THREAD_M][T::THREAD_N]) {
    SHARED(float, shared);
    using SliceA = Slice<T::M, T::PITCH_A, T::K, T::THREADS, A_INNER>;
    using SliceB = Slice<T::N, T::PITCH_B, T::K, T::THREADS, B_INNER>;
    SliceA slice_a;
    SliceB slice_b;
    const bool a_whole = SliceA::is_whole(a, m0), b_whole = SliceB::is_whole(b, n0);
    float column_sum = 0.0f;

    const int k_deep = k_end - T::K;  // the last k from which a slice is whole
    slice_a.fetch(a, m0, k_begin, k_end, a_whole && k_begin <= k_deep);
    slice_b.fetch(b, n0, k_begin, k_end, b_whole && k_begin <= k_deep);
    for (int k0 = k_begin; k0 < k_end; k0 += T::K) {
        float* staged_a = shared + (k0 - k_begin) / T::K % 2 * T::STAGE;
        float* staged_b = staged_a + T::K * T::PITCH_A;
        slice_a.stage(staged_a);
        slice_b.stage(staged_b);
        // One barrier per slice: a thread that still reads the other buffer has passed the barrier before this one.
        __syncthreads();
        if (Columns::IS_SUMMED && m0 == 0 && threadIdx.x < T::N)
            for (int k = 0; k < T::K; ++k) column_sum += staged_b[k * T::PITCH_B + threadIdx.x];
        if (k0 + T::K < k_end) {
            const bool is_deep = k0 + T::K <= k_deep;
            slice_a.fetch(a, m0, k0 + T::K, k_end, a_whole && is_deep);
            slice_b.fetch(b, n0, k0 + T::K, k_end, b_whole && is_deep);
        }
#pragma unroll
        for (int k = 0; k < T::K; ++k) {
            float values_a[T::THREAD_M], values_b[T::THREAD_N];
            read_values<T::THREAD_M, T::SIDE>(staged_a + k * T::PITCH_A, thread_row(), values_a);
            read_values<T::THREAD_N, T::SIDE>(staged_b + k * T::PITCH_B, thread_column(), values_b);
#pragma unroll
            for (int i = 0; i < T::THREAD_M; ++i)
#pragma unroll
                for (int j = 0; j < T::THREAD_N; ++j) c[i][j] = fmaf(values_a[i], values_b[j], c[i][j]);
        }
    }
    if (Columns::IS_SUMMED && m0 == 0 && threadIdx.x < T::N) columns.finish(n0 + threadIdx.x, column_sum);
}

// Epilogues.
//
// prefetch(row, column) is called first, for a column of each cache line: epilogues in place bring what they read to the
// second-level cache. Then elements come in rows, so that neighbouring threads have neighbouring columns: load(row, column)
// reads what finish(sum, loaded) needs to make an element of C, which put(row, column, made) writes. A thread reads for
// OVERLAPPING elements before it writes the first, and finishes all of them, so that they overlap. Their code occurs once or
// twice: 64 elements' activations in a row would fill the cache of instructions.

// Prefetches the epilogue's arrays to the second-level cache while the product is computed.
template <int M, int N, int THREADS, class Epilogue>
__device__ __forceinline__ void prefetch_rows(int m0, int n0, int m_end, int n_end, const Epilogue& epilogue) {
    constexpr int CACHE_LINE = 32;  // floats
    for (int element = threadIdx.x; element < M * (N / CACHE_LINE); element += THREADS) {
        const int m = m0 + element / (N / CACHE_LINE), n = n0 + element % (N / CACHE_LINE) * CACHE_LINE;
        if (m < m_end && n < n_end) epilogue.prefetch(m, n);
    }
}

// Finishes rows of C in shared memory, (M, N) from element (m0, n0) on; a thread takes every THREADS-th element.
template <int M, int N, int THREADS, class Epilogue>
__device__ __forceinline__ void finish_rows(const float* shared, int m0, int n0, int m_end, int n_end,
                                            const Epilogue& epilogue) {
    constexpr int BATCH = M * N / THREADS < Epilogue::OVERLAPPING ? M * N / THREADS : Epilogue::OVERLAPPING;
    static_assert(M * N % THREADS == 0, "as many elements for each thread");
#pragma unroll 1
    for (int start = threadIdx.x; start < M * N; start += BATCH * THREADS) {
        typename Epilogue::Loaded fetched[BATCH] = {};
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int element = start + i * THREADS, m = m0 + element / N, n = n0 + element % N;
            if (element < M * N && m < m_end && n < n_end) fetched[i] = epilogue.load(m, n);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int element = start + i * THREADS, m = m0 + element / N, n = n0 + element % N;
            const auto made = epilogue.finish(element < M * N ? shared[element] : 0.0f, fetched[i]);
            if (element < M * N && m < m_end && n < n_end) epilogue.put(m, n, made);
        }
    }
}

// Finishes every element of the tile inside C, some rows at a time, which pass through shared memory. The type of the first
// argument selects how the tile is computed; gemm/warp_split.cuh, gemm/split_sm80.cuh and gemm/split_sm90.cuh have other ways.
template <int M, int N, int K, bool A_INNER, bool B_INNER, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(SimtTile<M, N, K>, const Operand<A_INNER>& a, const Operand<B_INNER>& b, int m0,
                                          int n0, int k_begin, int k_end, const Columns& columns,
                                          const Epilogue& epilogue) {
    using T = SimtTile<M, N, K>;
    constexpr int RUN = Run<T::THREAD_M>::WIDTH, ROWS = RUN * T::SIDE;
    static_assert(4 * ROWS * T::N <= T::SHARED_BYTES, "rows of the tile fit where the slices were");
    SHARED(float, shared);
    prefetch_rows<T::M, T::N, T::THREADS>(m0, n0, a.outer, b.outer, epilogue);
    float c[T::THREAD_M][T::THREAD_N] = {};
    multiply_tile<T>(a, b, m0, n0, k_begin, k_end, columns, c);
#pragma unroll
    for (int first = 0; first < T::THREAD_M; first += RUN) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            write_values<T::THREAD_N, T::SIDE>(shared + (thread_row() * RUN + i) * T::N, thread_column(), c[first + i]);
        __syncthreads();
        finish_rows<ROWS, T::N, T::THREADS>(shared, m0 + first * T::SIDE, n0, a.outer, b.outer, epilogue);
    }
}

}  // namespace mlpgpu
