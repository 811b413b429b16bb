// C = A · B on plain float32 cores: the one matrix product under every dense layer.
//
// A block computes a tile of C, M x N, in steps of K along the inner dimension.  It stages a slice of A
// and of B in shared memory, both with the inner index first, so that a thread reads the values of its
// patch of C as vectors.  While it multiplies one slice, the next one is on its way to registers.
//
// Every element of C is one chain of fused multiply-adds over ascending k, whatever the tile: tiles may
// follow the shape, and the bits do not.  Outside the borders operands are read as 0 by a select.
#pragma once

#include "portable.cuh"

namespace mlpgpu {

// Shape of a block's work.  256 threads in a square of 16 x 16, each with a patch of C.
template <int M_, int N_, int K_>
struct Tile {
    static constexpr int M = M_, N = N_, K = K_;
    static constexpr int THREADS = 256, SIDE = 16;
    static constexpr int PATCH_M = M / SIDE, PATCH_N = N / SIDE;
    // Rows of a staged slice are padded by a vector, so that columns of it lie in different banks.
    static constexpr int PITCH_A = M + 4, PITCH_B = N + 4;
    static constexpr int STAGE = K * (PITCH_A + PITCH_B);
    static constexpr int SHARED_FLOATS = 2 * STAGE;
};

// A matrix in global memory seen as (outer, inner): outer is C's row or column, inner is k.  INNER_FIRST
// tells which of the two is contiguous.
template <bool INNER_FIRST>
struct Operand {
    const float* data;
    int outer, inner;  // sizes
    int pitch;         // elements from one row of the stored matrix to the next
};

__device__ __forceinline__ bool is_vectored(const float* data, int pitch) {
    return (reinterpret_cast<uintptr_t>(data) % 16 == 0) && pitch % 4 == 0;
}

// Four neighbours along the contiguous axis, from element (line, start) of a matrix of `lines` lines, each
// `length` long; 0 beyond either border.
__device__ __forceinline__ float4 load_four(const float* data, int64_t pitch, int line, int lines, int start, int length,
                                            bool vectored) {
    const bool inside = line < lines && start < length;
    const float* at = data + (inside ? line * pitch + start : 0);
    if (vectored && start + 4 <= length) {
        const float4 four = *reinterpret_cast<const float4*>(at);
        return inside ? four : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float4 four;
    four.x = inside ? at[0] : 0.0f;
    four.y = inside && start + 1 < length ? at[1] : 0.0f;
    four.z = inside && start + 2 < length ? at[2] : 0.0f;
    four.w = inside && start + 3 < length ? at[3] : 0.0f;
    return four;
}

// One operand's slice on its way from global memory through registers to shared memory.
template <int OUTER, int PITCH, int DEPTH, int THREADS, bool INNER_FIRST>
struct Slice {
    static constexpr int VECTORS = OUTER * DEPTH / 4;
    static constexpr int PER_THREAD = (VECTORS + THREADS - 1) / THREADS;
    float4 held[PER_THREAD];

    // Vector v of the slice: where it starts along the outer and the inner axis.
    static __device__ __forceinline__ void place(int v, int& outer, int& inner) {
        if (INNER_FIRST) {
            outer = v / (DEPTH / 4);
            inner = v % (DEPTH / 4) * 4;
        } else {
            outer = v % (OUTER / 4) * 4;
            inner = v / (OUTER / 4);
        }
    }

    // Whether the tile lies inside the matrix along the outer axis, and can be read by vectors.
    static __device__ __forceinline__ bool is_whole(const Operand<INNER_FIRST>& from, int outer0) {
        return outer0 + OUTER <= from.outer && is_vectored(from.data, from.pitch);
    }

    // `whole`: nothing of this slice lies beyond a border.
    __device__ __forceinline__ void fetch(const Operand<INNER_FIRST>& from, int outer0, int inner0, int inner_end,
                                          bool whole) {
        if (whole)
            fetch_whole(from, outer0, inner0);
        else
            fetch_edge(from, outer0, inner0, inner_end);
    }

    // A thread's vectors lie a fixed number of lines apart.
    __device__ __forceinline__ void fetch_whole(const Operand<INNER_FIRST>& from, int outer0, int inner0) {
        constexpr int LINES = THREADS / (INNER_FIRST ? DEPTH / 4 : OUTER / 4);
        int outer, inner;
        place(threadIdx.x, outer, inner);
        const int64_t line = INNER_FIRST ? outer0 + outer : inner0 + inner;
        const float* at = from.data + line * from.pitch + (INNER_FIRST ? inner0 + inner : outer0 + outer);
        const int64_t apart = static_cast<int64_t>(LINES) * from.pitch;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            if (VECTORS % THREADS != 0 && threadIdx.x + i * THREADS >= VECTORS) break;
            held[i] = *reinterpret_cast<const float4*>(at + i * apart);
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
            place(v, outer, inner);
            outer += outer0;
            inner += inner0;
            if (INNER_FIRST)
                held[i] = load_four(from.data, from.pitch, outer, from.outer, inner, inner_end, vectored);
            else
                held[i] = load_four(from.data, from.pitch, inner, inner_end, outer, from.outer, vectored);
        }
    }

    __device__ __forceinline__ void stage(float* shared) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (VECTORS % THREADS != 0 && v >= VECTORS) break;
            int outer, inner;
            place(v, outer, inner);
            if (INNER_FIRST) {
                shared[(inner + 0) * PITCH + outer] = held[i].x;
                shared[(inner + 1) * PITCH + outer] = held[i].y;
                shared[(inner + 2) * PITCH + outer] = held[i].z;
                shared[(inner + 3) * PITCH + outer] = held[i].w;
            } else {
                *reinterpret_cast<float4*>(shared + inner * PITCH + outer) = held[i];
            }
        }
    }
};

// A thread's values of one line of a staged slice: COUNT of them, in runs of up to four that lie 16 runs
// apart, so that a warp's vector reads touch neighbouring words.
template <int COUNT>
struct Run {
    static constexpr int WIDTH = COUNT < 4 ? COUNT : 4;
};

template <int COUNT, int SIDE>
__device__ __forceinline__ int patch_offset(int lane, int i) {
    constexpr int WIDTH = Run<COUNT>::WIDTH;
    return (i / WIDTH) * SIDE * WIDTH + lane * WIDTH + i % WIDTH;
}

template <int COUNT, int SIDE>
__device__ __forceinline__ void read_patch(const float* line, int lane, float (&values)[COUNT]) {
    constexpr int WIDTH = Run<COUNT>::WIDTH;
#pragma unroll
    for (int i = 0; i < COUNT; i += WIDTH) {
        const float* at = line + patch_offset<COUNT, SIDE>(lane, i);
        if (WIDTH == 4) {
            const float4 four = *reinterpret_cast<const float4*>(at);
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) values[i + j] = at[j];
        }
    }
}

// Columns of B summed over k by the thread that owns the column, from the slices that a block stages
// anyway; wanted by the blocks of C's first row of tiles.
struct NoColumnSum {
    static constexpr bool wanted = false;
    __device__ __forceinline__ void store(int, float) const {}
};

struct ColumnSum {
    static constexpr bool wanted = true;
    float* sums;  // (N,)
    int n;
    __device__ __forceinline__ void store(int column, float sum) const {
        if (column < n) sums[column] = sum;
    }
};

// The tile of C whose first row is m0 and first column n0, over k in [k_begin, k_end).  `epilogue(m, n,
// value)` is called once for every element of the tile inside C.
template <class T, bool A_INNER, bool B_INNER, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(const Operand<A_INNER>& a, const Operand<B_INNER>& b, int m0, int n0,
                                          int k_begin, int k_end, const Columns& columns, const Epilogue& epilogue) {
    SHARED(float, shared);
    // A warp covers 4 x 8 patches, so that its vector reads of a slice meet in few words.
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int lane_m = warp / 2 * 4 + lane / 8, lane_n = warp % 2 * 8 + lane % 8;

    using SliceA = Slice<T::M, T::PITCH_A, T::K, T::THREADS, A_INNER>;
    using SliceB = Slice<T::N, T::PITCH_B, T::K, T::THREADS, B_INNER>;
    SliceA slice_a;
    SliceB slice_b;
    const bool a_whole = SliceA::is_whole(a, m0), b_whole = SliceB::is_whole(b, n0);
    float c[T::PATCH_M][T::PATCH_N] = {};
    float column_sum = 0.0f;

    const int k_deep = k_end - T::K;  // the last k from which a slice is whole
    slice_a.fetch(a, m0, k_begin, k_end, a_whole && k_begin <= k_deep);
    slice_b.fetch(b, n0, k_begin, k_end, b_whole && k_begin <= k_deep);
    for (int k0 = k_begin; k0 < k_end; k0 += T::K) {
        float* staged_a = shared + (k0 - k_begin) / T::K % 2 * T::STAGE;
        float* staged_b = staged_a + T::K * T::PITCH_A;
        slice_a.stage(staged_a);
        slice_b.stage(staged_b);
        // One barrier a slice: whoever still reads the other buffer passed the barrier before this one.
        __syncthreads();
        if (Columns::wanted && m0 == 0 && threadIdx.x < T::N)
            for (int k = 0; k < T::K; ++k) column_sum += staged_b[k * T::PITCH_B + threadIdx.x];
        if (k0 + T::K < k_end) {
            const bool deep = k0 + T::K <= k_deep;
            slice_a.fetch(a, m0, k0 + T::K, k_end, a_whole && deep);
            slice_b.fetch(b, n0, k0 + T::K, k_end, b_whole && deep);
        }
#pragma unroll
        for (int k = 0; k < T::K; ++k) {
            float patch_a[T::PATCH_M], patch_b[T::PATCH_N];
            read_patch<T::PATCH_M, T::SIDE>(staged_a + k * T::PITCH_A, lane_m, patch_a);
            read_patch<T::PATCH_N, T::SIDE>(staged_b + k * T::PITCH_B, lane_n, patch_b);
#pragma unroll
            for (int i = 0; i < T::PATCH_M; ++i)
#pragma unroll
                for (int j = 0; j < T::PATCH_N; ++j) c[i][j] = fmaf(patch_a[i], patch_b[j], c[i][j]);
        }
    }

#pragma unroll
    for (int i = 0; i < T::PATCH_M; ++i) {
        const int m = m0 + patch_offset<T::PATCH_M, T::SIDE>(lane_m, i);
#pragma unroll
        for (int j = 0; j < T::PATCH_N; ++j) {
            const int n = n0 + patch_offset<T::PATCH_N, T::SIDE>(lane_n, j);
            if (m < a.outer && n < b.outer) epilogue(m, n, c[i][j]);
        }
    }
    if (Columns::wanted && m0 == 0 && threadIdx.x < T::N) columns.store(n0 + threadIdx.x, column_sum);
}

}  // namespace mlpgpu
