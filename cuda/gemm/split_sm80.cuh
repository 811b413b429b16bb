// C = A · B on tensor cores since sm_80, of float32 operands that are split into three bfloat16 as they are staged.
//
// Each component takes eight bits of a number, so that three hold all 24: x = x1 + x2 + x3. Of the nine products of
// components the three smallest, together at most 2⁻²³ of the whole, are left out. Tensor cores truncate when they
// accumulate, so the sum over each 64 k is made apart and added to C rounded to nearest. bfloat16 has the range of float32,
// so no scales are needed. An element that is not finite, or whose last component would be too small for a bfloat16, is
// flagged as it is split: rows and columns of C that depend on it are recomputed as chains of multiply-adds, and so are
// elements
// of C that are not finite. (Error bound: docs/mathematics.md.)
//
// For products whose operands are read once or twice, this saves the pass that splits them (gemm/split_operands.cuh).
#pragma once

#include "common/numbers.cuh"
#include "arch/mma.cuh"
#include "gemm/simt.cuh"

namespace mlpgpu {

// The shape of a block's work: WARPS_M x WARPS_N warps, each with its part of the tile in fragments. K is the depth of a
// slice; one sum is made over PROMOTED k, or over a slice if that is less.
template <int M_, int N_, int K_ = 32, int THREADS_ = 256>
struct SplitSm80Tile {
    static constexpr int M = M_, N = N_, K = K_, THREADS = THREADS_, PROMOTED = 64, COMPONENTS = 3;
    static constexpr int DEPTH = K < PROMOTED ? K : PROMOTED;
    static constexpr int WARPS_M = M / 16, WARPS_N = THREADS / WARP / WARPS_M, WARP_N = N / WARPS_N;
    static constexpr int FRAGMENTS = WARP_N / 8;  // of a warp, 16 x 8 each, side by side
    static_assert(WARPS_M * 16 == M && WARPS_M * WARPS_N == THREADS / WARP && FRAGMENTS % 2 == 0,
                  "whole fragments for each warp");
    // Slices of both operands in three components, and a flag for each row and column; then C, where the slices were.
    static constexpr int PITCH = 8;  // padding of a row, in elements
    static constexpr int SLICES = COMPONENTS * 2 * (K * (M + PITCH) > M * (K + PITCH) ? K * (M + PITCH) : M * (K + PITCH)) +
                                  COMPONENTS * 2 * K * (N + PITCH);
    static constexpr int SHARED_BYTES = (SLICES > 4 * M * N ? SLICES : 4 * M * N) + 4 * (M + N);
};

// Whether x splits: it is 0, or neither so large that rounding may overflow nor so small that x3, which is 2⁻¹⁶ of
// it, would lose bits below bfloat16's smallest number.
__device__ __forceinline__ bool splits(float x) {
    const unsigned twice = __float_as_uint(x) << 1;  // without the sign
    constexpr unsigned LEAST = 27u << 24, MOST = 254u << 24;
    return twice - LEAST < MOST - LEAST || twice == 0;
}

// A slice of an operand in shared memory, component after component: rows of the contiguous index, padded so that eight of
// them begin in different banks.
template <int OUTER, class T, bool INNER_FIRST>
struct SplitSlice {
    static constexpr int ROWS = INNER_FIRST ? OUTER : T::K, LENGTH = INNER_FIRST ? T::K : OUTER;
    static constexpr int PITCH = LENGTH + T::PITCH, SIZE = ROWS * PITCH;
    using Fetched = Slice<OUTER, 0, T::K, T::THREADS, INNER_FIRST>;

    // Splits what was fetched; `flags` (OUTER,) are set where an element does not split.
    static __device__ __forceinline__ void stage(const Fetched& fetched, uint16_t* slice, int* flags) {
#pragma unroll
        for (int i = 0; i < Fetched::PER_THREAD; ++i) {
            const int v = threadIdx.x + i * T::THREADS;
            if (Fetched::VECTORS % T::THREADS != 0 && v >= Fetched::VECTORS) break;
            int outer, inner;
            Fetched::locate(v, outer, inner);
            float rest[4] = {fetched.fetched[i].x, fetched.fetched[i].y, fetched.fetched[i].z, fetched.fetched[i].w};
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (!splits(rest[e])) flags[INNER_FIRST ? outer : outer + e] = 1;
            uint16_t* const target = slice + (INNER_FIRST ? outer * PITCH + inner : inner * PITCH + outer);
#pragma unroll
            for (int component = 0; component < T::COMPONENTS; ++component) {
                const unsigned low = split_off(rest[0], rest[1]), high = split_off(rest[2], rest[3]);
                *reinterpret_cast<uint2*>(target + component * SIZE) = make_uint2(low, high);
            }
        }
    }

    template <int OUTER_BIT>
    static __device__ __forceinline__ void load(unsigned (&to)[4], const uint16_t* slice, int outer0, int inner0) {
        load_fragments<INNER_FIRST, OUTER_BIT>(to, slice, PITCH, outer0, inner0);
    }
};

// sums += A · B over DEPTH of a staged slice from k0 on: the six largest products of components, the smaller ones first.
template <class T, class SliceA, class SliceB>
__device__ __forceinline__ void multiply_slice(const uint16_t* slice_a, const uint16_t* slice_b, int warp_m, int warp_n,
                                               int k0, float (&sums)[T::FRAGMENTS][4]) {
#pragma unroll
    for (int k = k0; k < k0 + T::DEPTH; k += 16) {
        unsigned a[T::COMPONENTS][4];
#pragma unroll
        for (int p = 0; p < T::COMPONENTS; ++p) SliceA::template load<0>(a[p], slice_a + p * SliceA::SIZE, warp_m, k);
#pragma unroll
        for (int j = 0; j < T::FRAGMENTS; j += 2) {
            unsigned b[T::COMPONENTS][4];
#pragma unroll
            for (int p = 0; p < T::COMPONENTS; ++p)
                SliceB::template load<1>(b[p], slice_b + p * SliceB::SIZE, warp_n + 8 * j, k);
#pragma unroll
            for (int both = T::COMPONENTS - 1; both >= 0; --both)
#pragma unroll
                for (int p = 0; p <= both; ++p)
#pragma unroll
                    for (int side = 0; side < 2; ++side)
                        multiply_matrices<false>(sums[j + side], a[p], b[both - p][2 * side], b[both - p][2 * side + 1]);
        }
    }
}

// As gemm/simt.cuh's for its tiles. B's columns are summed from the float32 array.
template <int M, int N, bool A_INNER, bool B_INNER, class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(SplitSm80Tile<M, N>, const Operand<A_INNER>& a,
                                                   const Operand<B_INNER>& b, int m0, int n0, int k_begin, int k_end,
                                                   const Columns& columns, const Epilogue& epilogue) {
    using T = SplitSm80Tile<M, N>;
    using SliceA = SplitSlice<T::M, T, A_INNER>;
    using SliceB = SplitSlice<T::N, T, B_INNER>;
    SHARED(float, shared);
    uint16_t* const staged_a = reinterpret_cast<uint16_t*>(shared);
    uint16_t* const staged_b = staged_a + T::COMPONENTS * SliceA::SIZE;
    int* const row_flags = reinterpret_cast<int*>(shared) + T::SHARED_BYTES / 4 - T::M - T::N;
    int* const column_flags = row_flags + T::M;
    for (int i = threadIdx.x; i < T::M + T::N; i += T::THREADS) row_flags[i] = 0;
    prefetch_rows<T::M, T::N, T::THREADS>(m0, n0, a.outer, b.outer, epilogue);
    const int summed_column = n0 + threadIdx.x;
    if (Columns::IS_SUMMED && m0 == 0 && threadIdx.x < T::N && columns.wants(summed_column)) {
        float sum = 0.0f;
#pragma unroll 16
        for (int k = k_begin; k < k_end; ++k) sum += b.at(summed_column, k);
        columns.finish(summed_column, sum);
    }

    typename SliceA::Fetched fetched_a;
    typename SliceB::Fetched fetched_b;
    const bool a_whole = SliceA::Fetched::is_whole(a, m0), b_whole = SliceB::Fetched::is_whole(b, n0);
    const auto fetch = [&](int k0) {
        const bool is_deep = k0 + T::K <= k_end;
        fetched_a.fetch(a, m0, k0, k_end, a_whole && is_deep);
        fetched_b.fetch(b, n0, k0, k_end, b_whole && is_deep);
    };
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int warp_m = warp % T::WARPS_M * 16, warp_n = warp / T::WARPS_M * T::WARP_N;
    float c[T::FRAGMENTS][4] = {}, sums[T::FRAGMENTS][4] = {};

    if (k_begin < k_end) fetch(k_begin);
    for (int k0 = k_begin; k0 < k_end; k0 += T::K) {
        __syncthreads();
        SliceA::stage(fetched_a, staged_a, row_flags);
        SliceB::stage(fetched_b, staged_b, column_flags);
        __syncthreads();
        if (k0 + T::K < k_end) fetch(k0 + T::K);
        multiply_slice<T, SliceA, SliceB>(staged_a, staged_b, warp_m, warp_n, 0, sums);
        if ((k0 - k_begin) % T::PROMOTED == T::PROMOTED - T::K || k0 + T::K >= k_end) {
#pragma unroll
            for (int j = 0; j < T::FRAGMENTS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[j][e] += sums[j][e], sums[j][e] = 0.0f;
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < T::FRAGMENTS; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float2*>(shared + (warp_m + 8 * half + lane / 4) * T::N + warp_n + 8 * j + lane % 4 * 2) =
                make_float2(c[j][2 * half], c[j][2 * half + 1]);
    __syncthreads();
    for (int element = threadIdx.x; element < T::M * T::N; element += T::THREADS) {
        const int m = m0 + element / T::N, n = n0 + element % T::N;
        // A product of components that overflows leaves infinity or NaN, of either sign.
        const bool must_recompute = row_flags[element / T::N] || column_flags[element % T::N] || !(fabsf(shared[element]) < INFINITY);
        if (m >= a.outer || n >= b.outer || !must_recompute) continue;
        float sum = 0.0f;
        for (int k = k_begin; k < k_end; ++k) sum = fmaf(a.at(m, k), b.at(n, k), sum);
        shared[element] = sum;
    }
    // Each thread finishes the elements that it recomputed, so no barrier is needed in between.
    finish_rows<T::M, T::N, T::THREADS>(shared, m0, n0, a.outer, b.outer, epilogue);
}

}  // namespace mlpgpu
