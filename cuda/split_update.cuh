// The update of a tall weight by some rows: dW = xᵀ dz has many lines and few columns, and little is summed over.
//
// A block keeps dz, split into bfloat16, in shared memory, and goes through tiles of W's lines.  While one tile moves
// its parameters the next one's x is on its way; while it multiplies, its parameters come to the cache.  A tile's
// lines of W and of a slot are one stretch of memory, which threads take in vectors of four.
#pragma once

#include "dense.cuh"
#include "split.cuh"
#include "update.cuh"

namespace mlpgpu {

// As many rows as one slice is deep, and as many columns as a tile is wide; the update changes nothing else.
using TallTile = SplitTile<128, 96, 128, 512>;

// C's part of a warp, to C (M, n) in shared memory; columns from n on are padding.
template <class T>
__device__ __forceinline__ void store_fragments(const float (&c)[T::FRAGMENTS][4], float* shared, int warp_m, int warp_n,
                                                int n) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < T::FRAGMENTS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = warp_n + 8 * j + lane % 4 * 2 + e % 2;
            if (column < n) shared[(warp_m + e / 2 * 8 + lane / 4) * n + column] = c[j][e];
        }
}

// Elements [0, count) of a stretch of W move along `sums`, by all threads of the block.
template <class T, class Rule>
__device__ __forceinline__ void move_stretch(const float* sums, float* weight, float* slots, int64_t pitch, int count,
                                             bool vectored, float scale, const float* rates) {
    constexpr int SLOTS = Rule::SLOTS, HELD = SLOTS > 0 ? SLOTS : 1, BATCH = 3 - SLOTS;
    const int whole = vectored ? count / 4 : 0;
    for (int first = threadIdx.x; first < whole; first += BATCH * T::THREADS) {
        float4 w[BATCH], slot[BATCH][HELD];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int at = first + b * T::THREADS;
            if (at >= whole) break;
            w[b] = reinterpret_cast<const float4*>(weight)[at];
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) slot[b][s] = reinterpret_cast<const float4*>(slots + s * pitch)[at];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int at = first + b * T::THREADS;
            if (at >= whole) break;
            const float4 sum = reinterpret_cast<const float4*>(sums)[at];
            const auto step_one = [&](float& element, float of_sum, auto part) {
                float own[HELD];
#pragma unroll
                for (int s = 0; s < SLOTS; ++s) own[s] = slot[b][s].*part;
                step_parameter<Rule>(element, own, of_sum, scale, rates);
#pragma unroll
                for (int s = 0; s < SLOTS; ++s) slot[b][s].*part = own[s];
            };
            step_one(w[b].x, sum.x, &float4::x), step_one(w[b].y, sum.y, &float4::y);
            step_one(w[b].z, sum.z, &float4::z), step_one(w[b].w, sum.w, &float4::w);
            reinterpret_cast<float4*>(weight)[at] = w[b];
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) reinterpret_cast<float4*>(slots + s * pitch)[at] = slot[b][s];
        }
    }
    const InPlace<Rule> one_by_one = {weight, slots, pitch, 1, scale, rates};
    for (int at = 4 * whole + threadIdx.x; at < count; at += T::THREADS) one_by_one(at, 0, sums[at]);
}

// As dense_backward_update; at most T::K rows and T::N columns.  Grid: any number of blocks, of one dimension.
template <class Rule>
__device__ __forceinline__ void dense_backward_update_tall(const Step* step, int share, int shares, const float* x,
                                                           const int* order, const float* dz, const double* totals,
                                                           float* weight, float* bias, float* weight_slots,
                                                           float* bias_slots, int64_t size, int k, int n) {
    using T = TallTile;
    using SliceA = SplitSlice<T::M, T, false>;
    using SliceB = SplitSlice<T::N, T, false>;
    SHARED(float, shared);
    uint16_t* const staged_a = reinterpret_cast<uint16_t*>(shared);  // then C
    uint16_t* const staged_b = staged_a + T::PARTS * SliceA::PART;
    // Flags of columns; and twice, so that one tile's are cleared while the other's are set and read, flags of rows
    // and whether there is any doubt.
    int* const column_flags = reinterpret_cast<int*>(staged_b + T::PARTS * SliceB::PART);
    int* const tile_flags = column_flags + T::N;
    const Rows rows = share_rows(step, share, shares);
    const Operand<false> a = {first_row(rows, x, order, k), k, rows.count, k, row_lines(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const rates = schedule + step->run * COLUMNS;

    const auto fetch = [&](typename SliceA::Fetched& fetched, int m0) {
        fetched.fetch(a, m0, 0, rows.count, rows.count == T::K && SliceA::Fetched::is_whole(a, m0));
    };
    typename SliceA::Fetched fetched;
    const int stride = gridDim.x * T::M;
    if (static_cast<int>(blockIdx.x) * T::M < k) fetch(fetched, blockIdx.x * T::M);
    for (int i = threadIdx.x; i < T::N + 2 * (T::M + 1); i += T::THREADS) column_flags[i] = 0;
    __syncthreads();
    {
        typename SliceB::Fetched of_dz;
        of_dz.fetch(b, 0, 0, rows.count, false);
        SliceB::stage(of_dz, staged_b, column_flags);
    }
    if (blockIdx.x == 0 && bias && threadIdx.x < static_cast<unsigned>(n)) {
        const InPlace<Rule> of_bias = {bias, bias_slots, size, n, scale, rates};
        float sum = 0.0f;
#pragma unroll 16
        for (int row = 0; row < rows.count; ++row) sum += b.at(threadIdx.x, row);
        of_bias(0, threadIdx.x, sum);
    }

    const int warp = threadIdx.x / WARP, warp_m = warp % T::WARPS_M * 16, warp_n = warp / T::WARPS_M * T::WARP_N;
    int parity = 0;
    for (int m0 = blockIdx.x * T::M; m0 < k; m0 += stride, parity ^= 1) {
        int* const flags = tile_flags + parity * (T::M + 1);
        SliceA::stage(fetched, staged_a, flags);
        __syncthreads();
        if (threadIdx.x <= T::M) tile_flags[(parity ^ 1) * (T::M + 1) + threadIdx.x] = 0;

        const int lines = min(T::M, k - m0), count = lines * n;
        float* const weights = weight + static_cast<int64_t>(m0) * n;
        float* const slots = weight_slots + static_cast<int64_t>(m0) * n;
        for (int at = threadIdx.x * 32; at < count; at += T::THREADS * 32) {
            prefetch_line(weights + at);
            for (int s = 0; s < Rule::SLOTS; ++s) prefetch_line(slots + s * size + at);
        }
        float c[T::FRAGMENTS][4] = {};
#pragma unroll 1
        for (int k0 = 0; k0 < rows.count; k0 += T::DEPTH) {
            float part[T::FRAGMENTS][4] = {};
            multiply_slice<T, SliceA, SliceB>(staged_a, staged_b, warp_m, warp_n, k0, part);
#pragma unroll
            for (int j = 0; j < T::FRAGMENTS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[j][e] += part[j][e];
        }
        bool is_doubtful = threadIdx.x < T::M && flags[threadIdx.x];
        is_doubtful = is_doubtful || (threadIdx.x < T::N && column_flags[threadIdx.x]);
#pragma unroll
        for (int j = 0; j < T::FRAGMENTS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) is_doubtful = is_doubtful || !(fabsf(c[j][e]) < INFINITY);
        if (is_doubtful) flags[T::M] = 1;
        __syncthreads();  // all have read the slice
        store_fragments<T>(c, shared, warp_m, warp_n, n);
        if (m0 + stride < k) fetch(fetched, m0 + stride);
        __syncthreads();
        if (flags[T::M]) {
            for (int at = threadIdx.x; at < count; at += T::THREADS) {
                const int line = at / n, column = at % n;
                if (!flags[line] && !column_flags[column] && fabsf(shared[at]) < INFINITY) continue;
                float sum = 0.0f;
                for (int row = 0; row < rows.count; ++row) sum = fmaf(a.at(m0 + line, row), b.at(column, row), sum);
                shared[at] = sum;
            }
            __syncthreads();
        }
        const bool vectored = reinterpret_cast<uintptr_t>(weights) % 16 == 0 &&
                              (Rule::SLOTS == 0 || reinterpret_cast<uintptr_t>(slots) % 16 == 0) &&
                              (Rule::SLOTS < 2 || size % 4 == 0);
        move_stretch<T, Rule>(shared, weights, slots, size, count, vectored, scale, rates);
        __syncthreads();
    }
}

}  // namespace mlpgpu
