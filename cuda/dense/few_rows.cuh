// The partial sums of a split-K product (dense/split_k.cuh) for few rows.
#pragma once

#include "common/vectors.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

// dense_forward_split_k for at most FewRowsForward::ROWS rows, which takes as long as reading W. A block takes a part of k
// for all columns: its rows of W are contiguous in memory and come piece by piece through registers to shared memory, the
// next piece while this one is multiplied. A thread takes every 256th column. The bits are the same.
// Grid: (1, 1, split-K partials).
struct FewRowsForward {
    static constexpr int ROWS = 8, THREADS = 256, MOST_COLUMNS = 512;
    static constexpr int PER_THREAD = 32, PIECE = THREADS * PER_THREAD;  // floats of W
    static constexpr int X = 3072;  // floats of x beside them
    static constexpr int SHARED_BYTES = 4 * (PIECE + X);
};

// A contiguous piece of an array, in registers between memory and shared memory; `vectored` if it begins and ends at
// vectors.
struct Piece {
    float fetched[FewRowsForward::PER_THREAD];

    __device__ __forceinline__ void fetch(const float* from, int size, bool vectored) {
        if (vectored) {
#pragma unroll
            for (int i = 0; i < FewRowsForward::PER_THREAD; i += 4) {
                const int offset = (i / 4 * FewRowsForward::THREADS + threadIdx.x) * 4;
                unpack(offset < size ? *reinterpret_cast<const float4*>(from + offset) : make_float4(0.0f, 0.0f, 0.0f, 0.0f), fetched + i);
            }
        } else {
#pragma unroll
            for (int i = 0; i < FewRowsForward::PER_THREAD; ++i) {
                const int offset = (i / 4 * FewRowsForward::THREADS + threadIdx.x) * 4 + i % 4;
                fetched[i] = offset < size ? from[offset] : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void stage(float* shared) const {
#pragma unroll
        for (int i = 0; i < FewRowsForward::PER_THREAD; i += 4)
            store_four(shared + (i / 4 * FewRowsForward::THREADS + threadIdx.x) * 4, fetched + i);
    }
};

// sums[c][r] += x[r, ·] · W[·, column c], over a piece of `depth` rows: staged_x (depth, ROWS), staged (depth, n).
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void few_rows(const float* staged, const float* staged_x, int depth, int n,
                                         float (&sums)[COLUMNS][FewRowsForward::ROWS]) {
#pragma unroll 8
    for (int i = 0; i < depth; ++i) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = threadIdx.x + c * FewRowsForward::THREADS;
            const float w = column < n ? staged[i * n + column] : 0.0f;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sums[c][r] = fmaf(staged_x[i * ROWS + r], w, sums[c][r]);
        }
    }
}

template <int ROWS>
__device__ __forceinline__ void few_rows_of_part(const Rows& rows, const float* x, const int* indices, const float* w,
                                              float* partials, int k, int n, int k_begin, int k_end) {
    constexpr int COLUMNS = FewRowsForward::MOST_COLUMNS / FewRowsForward::THREADS;
    SHARED(float, staged);
    float* const staged_x = staged + FewRowsForward::PIECE;
    // A multiple of four rows, so that every piece begins at a vector if W does.
    const int piece_depth = min(FewRowsForward::PIECE / n, FewRowsForward::X / ROWS) / 4 * 4;
    const bool vectored = is_vectored(w, 0) && (k_end - k_begin) * n % 4 == 0;
    float sums[COLUMNS][FewRowsForward::ROWS] = {};
    Piece piece;
    piece.fetch(w + static_cast<int64_t>(k_begin) * n, min(piece_depth, k_end - k_begin) * n, vectored);
    for (int k0 = k_begin; k0 < k_end; k0 += piece_depth) {
        const int depth = min(piece_depth, k_end - k0);
        __syncthreads();
        piece.stage(staged);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool is_row = r < rows.count;
            const float* const row = x + static_cast<int64_t>(is_row && indices ? indices[r] : r) * k + k0;
            for (int i = threadIdx.x; i < depth; i += FewRowsForward::THREADS) staged_x[i * ROWS + r] = is_row ? row[i] : 0.0f;
        }
        __syncthreads();
        if (k0 + piece_depth < k_end)
            piece.fetch(w + static_cast<int64_t>(k0 + piece_depth) * n, min(piece_depth, k_end - k0 - piece_depth) * n, vectored);
        if (n <= FewRowsForward::THREADS) {  // one column for each thread
            float (&first)[1][FewRowsForward::ROWS] = reinterpret_cast<float (&)[1][FewRowsForward::ROWS]>(sums);
            few_rows<ROWS>(staged, staged_x, depth, n, first);
        } else {
            few_rows<ROWS>(staged, staged_x, depth, n, sums);
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = threadIdx.x + c * FewRowsForward::THREADS;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (r < rows.count && column < n) partials[static_cast<int64_t>(rows.first + r) * n + column] = sums[c][r];
    }
}

__device__ __forceinline__ void dense_forward_few_rows(const Step* step, int shard, int shards, const float* x,
                                                       const int* order, const float* w, float* partials, int k, int n,
                                                       int part, int capacity) {
    const Rows rows = shard_rows(step, shard, shards);
    const int k_begin = blockIdx.z * part, k_end = min(k, k_begin + part);
    float* const out = partials + static_cast<int64_t>(blockIdx.z) * capacity * n;
    const float* const from = first_input_row(rows, x, order, k);
    const int* const indices = row_indices(rows, order);
    if (rows.count <= 1)
        few_rows_of_part<1>(rows, from, indices, w, out, k, n, k_begin, k_end);
    else if (rows.count <= 4)
        few_rows_of_part<4>(rows, from, indices, w, out, k, n, k_begin, k_end);
    else
        few_rows_of_part<FewRowsForward::ROWS>(rows, from, indices, w, out, k, n, k_begin, k_end);
}

}  // namespace mlpgpu
