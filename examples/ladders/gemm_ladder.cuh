// C (m, n) = A (m, k) · B (k, n), rung by rung: each kernel has one idea more than the one before it.  Matrices are
// row-major float32 of any size from 1 on.
//
// Every element of C is one chain of fused multiply-adds over ascending k, so all rungs give the same bits; that of
// the reduction alone sums in another order.
#pragma once

#include "common/reduce.cuh"
#include "gemm/simt.cuh"

namespace mlpgpu {

constexpr int LADDER_THREADS = 256;

// A line of a matrix whose lines are `pitch` long.
template <class T>
__device__ __forceinline__ T* line_of(T* matrix, int line, int pitch) {
    return matrix + static_cast<int64_t>(line) * pitch;
}

// 1. Naive: a thread for each element of C.  Neighbouring threads have neighbouring rows, so that each reads A, and
// writes C, in a memory line of its own.  Grid: (rows / 256, columns).
__device__ __forceinline__ void gemm_naive(const float* a, const float* b, float* c, int m, int n, int k) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y;
    if (row >= m) return;
    float sum = 0.0f;
    for (int p = 0; p < k; ++p) sum = fmaf(line_of(a, row, k)[p], line_of(b, p, n)[column], sum);
    line_of(c, row, n)[column] = sum;
}

// 2. Coalesced: neighbouring threads have neighbouring columns.  A warp reads a whole memory line of B at a time, and
// one word of A for all its threads.  Grid: (columns / 256, rows).
__device__ __forceinline__ void gemm_coalesced(const float* a, const float* b, float* c, int, int n, int k) {
    const int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n) return;
    float sum = 0.0f;
    for (int p = 0; p < k; ++p) sum = fmaf(line_of(a, row, k)[p], line_of(b, p, n)[column], sum);
    line_of(c, row, n)[column] = sum;
}

// 3. Panels: B lies as panels (columns / 32, k, 32), so that what a warp reads next follows what it has just read.
// Grid: as before.
__device__ __forceinline__ void gemm_panels(const float* a, const float* panels, float* c, int, int n, int k) {
    const int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n) return;
    const float* const panel = line_of(panels, column / WARP, k * WARP) + column % WARP;
    float sum = 0.0f;
    for (int p = 0; p < k; ++p) sum = fmaf(line_of(a, row, k)[p], panel[p * WARP], sum);
    line_of(c, row, n)[column] = sum;
}

// 4. Row in shared memory: a block reads its row of A once, a piece at a time, and its threads share it.
// Grid: as before.
__device__ __forceinline__ void gemm_shared_row(const float* a, const float* b, float* c, int, int n, int k) {
    SHARED(float, piece);
    const int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0.0f;
    for (int k0 = 0; k0 < k; k0 += LADDER_THREADS) {
        const int length = min(LADDER_THREADS, k - k0), p = threadIdx.x;
        __syncthreads();
        if (p < length) piece[p] = line_of(a, row, k)[k0 + p];
        __syncthreads();
        if (column < n)
            for (int p = 0; p < length; ++p) sum = fmaf(piece[p], line_of(b, k0 + p, n)[column], sum);
    }
    if (column < n) line_of(c, row, n)[column] = sum;
}

// 5. Reduction: a block for each element of C; its threads share the sum over k and add up their parts.
// Grid: (columns, rows).
__device__ __forceinline__ void gemm_reduction(const float* a, const float* b, float* c, int, int n, int k) {
    SHARED(float, scratch);
    const int row = blockIdx.y, column = blockIdx.x;
    float sum = 0.0f;
    for (int p = threadIdx.x; p < k; p += LADDER_THREADS)
        sum = fmaf(line_of(a, row, k)[p], line_of(b, p, n)[column], sum);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) line_of(c, row, n)[column] = sum;
}

// 6. Shared tiles: a block makes 32 x 32 of C from tiles of A and B in shared memory.  What is read from global
// memory is used 32 times.  Grid: (columns / 32, rows / 32).
__device__ __forceinline__ void gemm_shared_tiles(const float* a, const float* b, float* c, int m, int n, int k) {
    constexpr int SIDE = 32;
    SHARED(float, shared);
    float* const tile_a = shared;
    float* const tile_b = shared + SIDE * SIDE;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    const int row = blockIdx.y * SIDE + y, column = blockIdx.x * SIDE + x;
    float sum = 0.0f;
    for (int k0 = 0; k0 < k; k0 += SIDE) {
        // 0 beyond the borders: it adds nothing.
        tile_a[threadIdx.x] = row < m && k0 + x < k ? line_of(a, row, k)[k0 + x] : 0.0f;
        tile_b[threadIdx.x] = k0 + y < k && column < n ? line_of(b, k0 + y, n)[column] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int p = 0; p < SIDE; ++p) sum = fmaf(tile_a[y * SIDE + p], tile_b[p * SIDE + x], sum);
        __syncthreads();
    }
    if (row < m && column < n) line_of(c, row, n)[column] = sum;
}

// What the next two rungs share: a block of 16 x 16 threads makes BLOCK x BLOCK of C in slices DEPTH deep, of which A's
// lies transposed, and each thread a patch of 8 x 8 in registers.  Lines of a slice are padded by a vector.
struct Patches {
    static constexpr int BLOCK = 128, DEPTH = 8, SIDE = 16, PATCH = BLOCK / SIDE, PITCH = BLOCK + 4;
    static constexpr int SLICE = DEPTH * PITCH;
};

// 7. Register tiles: a thread makes 8 x 8 elements, with 64 multiply-adds for every 16 words from shared memory.
// Its rows and columns lie 16 apart, so that a warp reads neighbouring words.  Grid: (columns / 128, rows / 128).
__device__ __forceinline__ void gemm_register_tiles(const float* a, const float* b, float* c, int m, int n, int k) {
    using T = Patches;
    SHARED(float, shared);
    float* const slice_a = shared;
    float* const slice_b = shared + T::SLICE;
    const int y = threadIdx.x / T::SIDE, x = threadIdx.x % T::SIDE;
    const int row0 = blockIdx.y * T::BLOCK, column0 = blockIdx.x * T::BLOCK;
    float sums[T::PATCH][T::PATCH] = {};
    for (int k0 = 0; k0 < k; k0 += T::DEPTH) {
        for (int i = threadIdx.x; i < T::BLOCK * T::DEPTH; i += LADDER_THREADS) {
            const int row = i / T::DEPTH, p = i % T::DEPTH;
            const bool inside = row0 + row < m && k0 + p < k;
            slice_a[p * T::PITCH + row] = inside ? line_of(a, row0 + row, k)[k0 + p] : 0.0f;
        }
        for (int i = threadIdx.x; i < T::BLOCK * T::DEPTH; i += LADDER_THREADS) {
            const int p = i / T::BLOCK, column = i % T::BLOCK;
            const bool inside = k0 + p < k && column0 + column < n;
            slice_b[p * T::PITCH + column] = inside ? line_of(b, k0 + p, n)[column0 + column] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int p = 0; p < T::DEPTH; ++p) {
            float of_a[T::PATCH], of_b[T::PATCH];
#pragma unroll
            for (int i = 0; i < T::PATCH; ++i) {
                of_a[i] = slice_a[p * T::PITCH + y + i * T::SIDE];
                of_b[i] = slice_b[p * T::PITCH + x + i * T::SIDE];
            }
#pragma unroll
            for (int i = 0; i < T::PATCH; ++i)
#pragma unroll
                for (int j = 0; j < T::PATCH; ++j) sums[i][j] = fmaf(of_a[i], of_b[j], sums[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < T::PATCH; ++i)
#pragma unroll
        for (int j = 0; j < T::PATCH; ++j) {
            const int row = row0 + y + i * T::SIDE, column = column0 + x + j * T::SIDE;
            if (row < m && column < n) line_of(c, row, n)[column] = sums[i][j];
        }
}

// 8. Vectors and two buffers: everything is read four words at a time, and while a slice is multiplied the next one is
// on its way to registers.  One barrier a slice is enough: whoever still reads the other buffer passed the barrier
// before this one.  Grid: as before.
__device__ __forceinline__ void gemm_double_buffered(const float* a, const float* b, float* c, int m, int n, int k) {
    using T = Patches;
    SHARED(float, shared);
    const Operand<true> from_a{a, m, k, k};
    const Operand<false> from_b{b, n, k, n};
    const bool a_vectored = is_vectored(a, k), b_vectored = is_vectored(b, n);
    const int row0 = blockIdx.y * T::BLOCK, column0 = blockIdx.x * T::BLOCK;
    // A thread's vector of each slice: where it begins.
    const int a_row = threadIdx.x / 2, a_p = threadIdx.x % 2 * 4;
    const int b_p = threadIdx.x / 32, b_column = threadIdx.x % 32 * 4;
    float4 next_a, next_b;
    const auto fetch = [&](int k0) {
        next_a = load_edge(from_a, row0 + a_row, m, k0 + a_p, k, a_vectored);
        next_b = load_edge(from_b, k0 + b_p, k, column0 + b_column, n, b_vectored);
    };
    const int y = threadIdx.x / T::SIDE, x = threadIdx.x % T::SIDE;
    float sums[T::PATCH][T::PATCH] = {};
    fetch(0);
    for (int k0 = 0; k0 < k; k0 += T::DEPTH) {
        float* const slice_a = shared + k0 / T::DEPTH % 2 * 2 * T::SLICE;
        float* const slice_b = slice_a + T::SLICE;
        slice_a[(a_p + 0) * T::PITCH + a_row] = next_a.x;
        slice_a[(a_p + 1) * T::PITCH + a_row] = next_a.y;
        slice_a[(a_p + 2) * T::PITCH + a_row] = next_a.z;
        slice_a[(a_p + 3) * T::PITCH + a_row] = next_a.w;
        *reinterpret_cast<float4*>(slice_b + b_p * T::PITCH + b_column) = next_b;
        __syncthreads();
        if (k0 + T::DEPTH < k) fetch(k0 + T::DEPTH);
#pragma unroll
        for (int p = 0; p < T::DEPTH; ++p) {
            float of_a[T::PATCH], of_b[T::PATCH];
            read_values<T::PATCH, T::SIDE>(slice_a + p * T::PITCH, y, of_a);
            read_values<T::PATCH, T::SIDE>(slice_b + p * T::PITCH, x, of_b);
#pragma unroll
            for (int i = 0; i < T::PATCH; ++i)
#pragma unroll
                for (int j = 0; j < T::PATCH; ++j) sums[i][j] = fmaf(of_a[i], of_b[j], sums[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < T::PATCH; ++i)
#pragma unroll
        for (int j = 0; j < T::PATCH; ++j) {
            const int row = row0 + thread_offset<T::PATCH, T::SIDE>(y, i);
            const int column = column0 + thread_offset<T::PATCH, T::SIDE>(x, j);
            if (row < m && column < n) line_of(c, row, n)[column] = sums[i][j];
        }
}

}  // namespace mlpgpu
