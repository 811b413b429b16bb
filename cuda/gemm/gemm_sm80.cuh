// C = A · B on tensor cores since sm_80, of split operands (gemm/operand_formats.cuh).
//
// A block computes a tile of C in slices of 32 along k. Slices are copied to shared memory some stages ahead, and read from
// there as fragments, so an operand may be stored either way round.
//
// Tensor cores truncate when they accumulate, so long sums drift. With two components the sum of each slice is made apart,
// first lo · hi + hi · lo, then hi · hi on top, and added to C rounded to nearest. The order of every sum follows from k
// alone, whatever the tile.
#pragma once

#include "common/async_copy.cuh"
#include "arch/mma.cuh"
#include "gemm/epilogue.cuh"

namespace mlpgpu {

// 8 warps, WARPS_M x WARPS_N of them, each with its part of the tile in fragments of 16 x 8.
template <int M_, int N_, int STAGES_>
struct Sm80Tile {
    static constexpr int M = M_, N = N_, K = 32, STAGES = STAGES_, THREADS = 256;
    static constexpr int WARPS_M = M == 128 && N == 64 ? 4 : 2, WARPS_N = 8 / WARPS_M;
    static constexpr int WARP_M = M / WARPS_M, WARP_N = N / WARPS_N;
    static constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8;  // fragments of a warp
};

// Components seen as (outer, inner): outer is the row or column of C, inner is k. INNER_FIRST tells which is contiguous.
template <bool INNER_FIRST>
struct SplitOperand {
    const uint16_t* data;
    int64_t component_stride;  // elements from one component to the next
    int pitch;      // from one row of the stored matrix to the next
};

// A slice of one component in shared memory: ROWS rows of LENGTH elements along the contiguous index, padded by 16 bytes so
// that eight rows begin in different banks.
template <int OUTER, int K, bool INNER_FIRST>
struct OperandSlice {
    static constexpr int ROWS = INNER_FIRST ? OUTER : K, LENGTH = INNER_FIRST ? K : OUTER;
    static constexpr int PITCH = LENGTH + 8, SIZE = ROWS * PITCH;

    template <int THREADS>
    static __device__ __forceinline__ void fetch(uint16_t* slice, const SplitOperand<INNER_FIRST>& from, int component,
                                                 int outer0, int inner0) {
        constexpr int VECTORS = LENGTH / 8;
        const int first_row = INNER_FIRST ? outer0 : inner0, start = INNER_FIRST ? inner0 : outer0;
        const uint16_t* const data = from.data + component * from.component_stride;
#pragma unroll
        for (int v = threadIdx.x; v < ROWS * VECTORS; v += THREADS) {
            const int row = v / VECTORS, offset = v % VECTORS * 8;
            // Elements beyond the padding do not reach C, so any value will do.
            const int column = min(start + offset, from.pitch - 8);
            copy_async<16>(slice + row * PITCH + offset, data + static_cast<int64_t>(first_row + row) * from.pitch + column);
        }
    }

    template <int OUTER_BIT>
    static __device__ __forceinline__ void load(unsigned (&to)[4], const uint16_t* slice, int outer0, int inner0) {
        load_fragments<INNER_FIRST, OUTER_BIT>(to, slice, PITCH, outer0, inner0);
    }
};

template <class Array, class Function>
__device__ __forceinline__ void for_each(Array& array, const Function& function) {
#pragma unroll
    for (auto& fragments : array)
#pragma unroll
        for (auto& fragment : fragments)
#pragma unroll
            for (float& x : fragment) function(x);
}

// Passes a warp's part of C, from (row0, column0) on, to the epilogue. Pairs become quads: each lane swaps a pair with its
// neighbour, and takes every other block of eight columns.
template <class T, bool ALIGNED, class Epilogue>
__device__ __forceinline__ void finish_fragments(const float (&c)[T::FRAGMENTS_M][T::FRAGMENTS_N][4], int row0, int column0, int rows,
                                          int columns, const Epilogue& epilogue) {
    constexpr int QUADS = T::FRAGMENTS_N / 2;
    using Read = typename Epilogue::Read;
    using Scales = typename Epilogue::Scales;
    const int lane = threadIdx.x % WARP;
    const bool odd = lane & 1;
    const auto column = [&](int q) { return column0 + (odd ? 8 : 0) + lane % 4 / 2 * 4 + 16 * q; };
#pragma unroll
    for (int i = 0; i < T::FRAGMENTS_M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + lane / 4 + 16 * i + 8 * half;
            const auto inside = [&](int q) { return row < rows && column(q) < columns; };
            Read read[QUADS];
            Scales scales[QUADS];
            uint64_t kept[QUADS];
#pragma unroll
            for (int q = 0; q < QUADS; ++q)
                read[q] = inside(q) ? epilogue.template read<ALIGNED>(row, column(q)) : Read(),
                scales[q] = inside(q) ? epilogue.scales(row, column(q)) : Scales(),
                kept[q] = inside(q) ? epilogue.kept(row, column(q)) : 0;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const float* const left = c[i][2 * q] + 2 * half;
                const float* const right = c[i][2 * q + 1] + 2 * half;
                const float x = __shfl_xor_sync(WARP_ALL, odd ? left[0] : right[0], 1);
                const float y = __shfl_xor_sync(WARP_ALL, odd ? left[1] : right[1], 1);
                float4 quad = odd ? make_float4(x, y, right[0], right[1]) : make_float4(left[0], left[1], x, y);
                epilogue.rescale(row, column(q), quad, scales[q]);
                if (inside(q)) epilogue.template write<ALIGNED>(row, column(q), quad, read[q], kept[q]);
            }
        }
}

// The tile of C (rows, columns) whose first row is m0 and first column n0, summed over [0, depth); the padding fills the
// last slice up.
template <class Format, class T, bool A_INNER, bool B_INNER, class Epilogue>
__device__ __forceinline__ void multiply_components(const SplitOperand<A_INNER>& a, const SplitOperand<B_INNER>& b, int m0,
                                            int n0, int rows, int columns, int depth, const Epilogue& epilogue) {
    using SliceA = OperandSlice<T::M, T::K, A_INNER>;
    using SliceB = OperandSlice<T::N, T::K, B_INNER>;
    constexpr int P = Format::COMPONENTS, STAGE = P * (SliceA::SIZE + SliceB::SIZE);
    constexpr bool PROMOTED = P > 1;
    SHARED(uint16_t, shared);
    const int warp = threadIdx.x / WARP;
    const int warp_m = warp / T::WARPS_N * T::WARP_M, warp_n = warp % T::WARPS_N * T::WARP_N;
    const int slices = (depth + T::K - 1) / T::K;  // not by ceil_div, of which nvcc makes other code of the whole loop

    const auto fetch = [&](int slice) {
        uint16_t* const stage = shared + slice % T::STAGES * STAGE;
        for (int p = 0; slice < slices && p < P; ++p) {
            SliceA::template fetch<T::THREADS>(stage + p * SliceA::SIZE, a, p, m0, slice * T::K);
            SliceB::template fetch<T::THREADS>(stage + P * SliceA::SIZE + p * SliceB::SIZE, b, p, n0, slice * T::K);
        }
        commit_copies();  // an empty group too, since the number of groups tells the stage
    };

    float c[T::FRAGMENTS_M][T::FRAGMENTS_N][4] = {};
    float slice_sums[PROMOTED ? T::FRAGMENTS_M : 1][PROMOTED ? T::FRAGMENTS_N : 1][4];

    // to += component p of A · component q of B, over one slice.
    const auto multiply = [&](const uint16_t* stage, int p, int q, auto& to) {
        const uint16_t* const slice_a = stage + p * SliceA::SIZE;
        const uint16_t* const slice_b = stage + P * SliceA::SIZE + q * SliceB::SIZE;
#pragma unroll
        for (int k = 0; k < T::K; k += 16) {
            unsigned fragments_b[(T::FRAGMENTS_N + 1) / 2][4];
#pragma unroll
            for (int j = 0; j < T::FRAGMENTS_N; j += 2)
                SliceB::template load<1>(fragments_b[j / 2], slice_b, warp_n + 8 * j, k);
#pragma unroll
            for (int i = 0; i < T::FRAGMENTS_M; ++i) {
                unsigned fragment_a[4];
                SliceA::template load<0>(fragment_a, slice_a, warp_m + 16 * i, k);
#pragma unroll
                for (int j = 0; j < T::FRAGMENTS_N; ++j)
                    multiply_matrices<Format::HALF>(to[i][j], fragment_a, fragments_b[j / 2][j % 2 * 2],
                                                  fragments_b[j / 2][j % 2 * 2 + 1]);
            }
        }
    };

    for (int slice = 0; slice < T::STAGES - 1; ++slice) fetch(slice);
    for (int slice = 0; slice < slices; ++slice) {
        wait_copies<T::STAGES - 2>();
        // One barrier per slice: it also frees the stage that was read last, which is filled next.
        __syncthreads();
        fetch(slice + T::STAGES - 1);
        const uint16_t* const stage = shared + slice % T::STAGES * STAGE;
        if constexpr (PROMOTED) {
            constexpr float STEP = 1.0f / (1 << Format::SHIFT);
            for_each(slice_sums, [](float& x) { x = 0.0f; });
            if (depth <= Format::SHORT_K) {
                multiply(stage, 1, 1, slice_sums);
                for_each(slice_sums, [](float& x) { x *= STEP; });
            }
            multiply(stage, 1, 0, slice_sums);
            multiply(stage, 0, 1, slice_sums);
            // Without scales, lo of an infinite number is 0 and its product has either sign or is NaN: hi · hi alone is
            // right.
            for_each(slice_sums, [](float& x) { x = Format::SCALED || fabsf(x) <= LARGEST ? x * STEP : 0.0f; });
            multiply(stage, 0, 0, slice_sums);
#pragma unroll
            for (int i = 0; i < T::FRAGMENTS_M; ++i)
#pragma unroll
                for (int j = 0; j < T::FRAGMENTS_N; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) c[i][j][e] += slice_sums[i][j][e];
        } else {
            multiply(stage, 0, 0, c);
        }
    }

    if (m0 == 0) epilogue.columns(n0, T::N, threadIdx.x, T::THREADS);
    const int row0 = m0 + warp_m, column0 = n0 + warp_n;
    if (epilogue.is_aligned())
        finish_fragments<T, true>(c, row0, column0, rows, columns, epilogue);
    else
        finish_fragments<T, false>(c, row0, column0, rows, columns, epilogue);
}

// As a product of dense/tensor_dense.cuh.  Grid: (row tiles, column tiles).
template <class Format_, class T>
struct GemmSm80 {
    using Format = Format_;
    using Source = const uint16_t*;
    static constexpr bool BEGINS_EPILOGUE = false;

    template <bool A_INNER, bool B_INNER>
    struct Block {
        static constexpr int THREADS = T::THREADS;
        static constexpr int SHARED_BYTES =
            2 * T::STAGES * Format::COMPONENTS *
            (OperandSlice<T::M, T::K, A_INNER>::SIZE + OperandSlice<T::N, T::K, B_INNER>::SIZE);
    };

    template <bool A_INNER, bool B_INNER, class Epilogue>
    static __device__ __forceinline__ void multiply(Source a, int64_t a_stride, int a_pitch, Source b, int64_t b_stride,
                                                    int b_pitch, int m, int n, int k, int, const Epilogue& epilogue) {
        const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
        if (m0 >= m) return;
        const SplitOperand<A_INNER> operand_a = {a, a_stride, a_pitch};
        const SplitOperand<B_INNER> operand_b = {b, b_stride, b_pitch};
        multiply_components<Format, T>(operand_a, operand_b, m0, n0, m, n, k, epilogue);
    }
};

}  // namespace mlpgpu
