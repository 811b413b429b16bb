// The end of a network in one kernel: its last dense layer, of few columns, the loss, and dx.
//
// A block takes Head::ROWS rows from the layer's input x (B, k) to its delta, and keeps what belongs to them in
// shared memory, with the rows as the innermost axis: so a thread reads the values of all rows as two vectors.
#pragma once

#include "loss.cuh"

namespace mlpgpu {

struct Head {
    static constexpr int THREADS = 512, ROWS = 8, MOST_COLUMNS = 32;
    static constexpr int DEPTH = 1024;  // of x that is staged at once
    static constexpr int MOST_SLICES = 64;
    static constexpr int BATCH = 24;  // elements of W that a thread has on their way at once
    static constexpr int PARTIAL = THREADS * ROWS, STAGED = DEPTH * ROWS, LOGITS = ROWS * MOST_COLUMNS;
    static constexpr int SHARED_FLOATS = PARTIAL + STAGED + 2 * LOGITS;
};

// sums[r] += values[r] · factor, of all rows.
__device__ __forceinline__ void add_rows(float (&sums)[Head::ROWS], const float* values, float factor) {
#pragma unroll
    for (int r = 0; r < Head::ROWS; r += 4) {
        const float4 four = *reinterpret_cast<const float4*>(values + r);
        sums[r] = fmaf(four.x, factor, sums[r]), sums[r + 1] = fmaf(four.y, factor, sums[r + 1]);
        sums[r + 2] = fmaf(four.z, factor, sums[r + 2]), sums[r + 3] = fmaf(four.w, factor, sums[r + 3]);
    }
}

// staged (depth, ROWS) = the block's rows of x (rows, k) from column k0 on, 0 for rows that there are not.  All
// loads of a thread are on their way before it stores the first.
__device__ __forceinline__ void stage_rows(const float* x, int rows, int k, int k0, int depth, float* staged) {
    constexpr int PER_THREAD = Head::DEPTH / Head::THREADS;
    float values[PER_THREAD][Head::ROWS];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int column = threadIdx.x + i * Head::THREADS;
#pragma unroll
        for (int r = 0; r < Head::ROWS; ++r)
            values[i][r] = column < depth && r < rows ? x[static_cast<int64_t>(r) * k + k0 + column] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        float* const line = staged + (threadIdx.x + i * Head::THREADS) * Head::ROWS;
#pragma unroll
        for (int r = 0; r < Head::ROWS; r += 4)
            *reinterpret_cast<float4*>(line + r) =
                make_float4(values[i][r], values[i][r + 1], values[i][r + 2], values[i][r + 3]);
    }
}

// z (ROWS, n) = x W + b.  Threads divide W (k, n) among themselves as it lies in memory: each has a column, and
// every so manieth k.  Their sums are added up in order.
__device__ __forceinline__ void head_logits(const float* x, int rows, const float* w, const float* b, int k, int n,
                                            float* staged, float* partial, float* z) {
    const int slices = min(Head::THREADS / n, Head::MOST_SLICES), slice = threadIdx.x / n, column = threadIdx.x % n;
    const int apart = Head::BATCH * slices;
    float sums[Head::ROWS] = {}, of_w[Head::BATCH];
    for (int k0 = 0; k0 < k; k0 += Head::DEPTH) {
        const int depth = slice < slices ? min(Head::DEPTH, k - k0) : 0;
        const auto fetch = [&](int from) {
#pragma unroll
            for (int b = 0; b < Head::BATCH; ++b) {
                const int i = from + b * slices;
                of_w[b] = i < depth ? w[static_cast<int64_t>(k0 + i) * n + column] : 0.0f;
            }
        };
        fetch(slice);  // on its way while x is staged
        stage_rows(x, rows, k, k0, min(Head::DEPTH, k - k0), staged);
        __syncthreads();
        for (int from = slice; from < depth; from += apart) {
            if (from != slice) fetch(from);
#pragma unroll
            for (int b = 0; b < Head::BATCH; ++b)
                if (from + b * slices < depth) add_rows(sums, staged + (from + b * slices) * Head::ROWS, of_w[b]);
        }
        __syncthreads();
    }
    if (slice < slices)
        for (int r = 0; r < Head::ROWS; ++r) partial[(slice * Head::ROWS + r) * n + column] = sums[r];
    __syncthreads();
    const int at = threadIdx.x, size = Head::ROWS * n;
    if (at < size) {
        float sum = partial[at];
#pragma unroll 8
        for (int s = 1; s < slices; ++s) sum += partial[s * size + at];
        z[at] = sum + (b ? b[column] : 0.0f);
    }
    __syncthreads();
}

// z = x W + b, the loss of the rows (see loss.cuh) and delta (B, n); and dx = (delta Wᵀ) ∘ f'(saved), f being the
// activation that made x, by its number; `saved` is null where there was none.  dx is left as floats, as a plane of
// bfloat16 (planes.cuh), or not at all: what is null is not wanted.
// Grid: one block for every ROWS rows of the capacity, or of what planes pad it to.
template <class Loss, class Target, class Source>
__device__ __forceinline__ void head(const Step* step, int share, int shares, const int* order, const float* x,
                                     const float* w, const float* b, Source targets, const float* weights,
                                     const float* mean, const float* scale, float* delta, double* sums,
                                     unsigned* arrived, double* totals, double* losses, const float* saved,
                                     int activation, float* dx, uint16_t* dx_planes, int k, int n) {
    SHARED(float, partial);
    float* const staged = partial + Head::PARTIAL;  // (DEPTH, ROWS)
    float* const z = staged + Head::STAGED;         // (ROWS, n)
    float* const deltas = z + Head::LOGITS;         // (n, ROWS)
    const Rows share_of = share_rows(step, share, shares);
    const int row0 = blockIdx.x * Head::ROWS, rows = min(Head::ROWS, share_of.count - row0);
    const int64_t first = share_of.first + row0;    // of the block's rows, in the batch

    double value = 0.0, weight = 0.0;
    if (rows > 0) {
        const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP;  // of the first ROWS warps
        const int64_t from = row < rows ? order[share_of.order + first + row] : 0;
        const float row_weight = weights && row < rows ? weights[from] : 1.0f;
        head_logits(x + first * k, rows, w, b, k, n, staged, partial, z);
        if (row < rows) {
            const Target target = {targets, from, n, mean, scale};
            const float v = weighted_row<Loss>(z + row * n, n, target, row_weight, [=](int j, float d) {
                deltas[j * Head::ROWS + row] = d;
                delta[(first + row) * n + j] = d;
            });
            if (lane == 0) value = v, weight = row_weight;
        } else if (row < Head::ROWS) {
            for (int j = lane; j < n; j += WARP) deltas[j * Head::ROWS + row] = 0.0f;
        }
    }
    const Total total(step, value, weight, sums, arrived, totals, losses);  // with barriers behind all deltas
    const bool is_padding = dx_planes && rows <= 0 && row0 < padded_rows(share_of.count);
    if (((dx || dx_planes) && rows > 0) || is_padding) {
        const bool is_staged = saved == x && k <= Head::DEPTH;  // where the activation saved what it gave
        for (int i = threadIdx.x; i < k; i += Head::THREADS) {
            constexpr int BATCH = 16;
            float sum[Head::ROWS] = {}, slope[Head::ROWS] = {};
            if (is_staged) {
#pragma unroll
                for (int r = 0; r < Head::ROWS; r += 4) load_four(staged + i * Head::ROWS + r, slope + r);
            } else if (saved) {
#pragma unroll
                for (int r = 0; r < Head::ROWS; ++r)
                    if (r < rows) slope[r] = saved[(first + r) * k + i];
            }
            for (int j0 = 0; j0 < n && !is_padding; j0 += BATCH) {
                float of_w[BATCH];
#pragma unroll
                for (int b = 0; b < BATCH; ++b) of_w[b] = j0 + b < n ? w[static_cast<int64_t>(i) * n + j0 + b] : 0.0f;
#pragma unroll
                for (int b = 0; b < BATCH; ++b)
                    if (j0 + b < n) add_rows(sum, deltas + (j0 + b) * Head::ROWS, of_w[b]);
            }
            if (saved) Activations::derivatives(activation, slope);
#pragma unroll
            for (int r = 0; r < Head::ROWS; ++r) {
                const float value = r >= rows ? 0.0f : saved ? sum[r] * slope[r] : sum[r];
                if (dx && r < rows) dx[(first + r) * k + i] = value;
                if (dx_planes)
                    dx_planes[(row0 + r) * static_cast<int64_t>(padded_columns(k)) + i] =
                        static_cast<uint16_t>(bfloat_pair(value, 0.0f));
            }
        }
    }
    total.finish();
}

}  // namespace mlpgpu
