// C = A · B by wgmma on sm_90a, of float32 operands that are split into three bfloat16 each. gemm/split_sm80.cuh says how
// they are split, and why the sum of six products is as good as that of float32.
//
// Such a product runs at the rate of memory if enough loads are under way. So producer warps only load: they copy slices of
// A to a ring in shared memory as they are, and hold no data in registers. Compute warpgroups split rows of A as they read
// them, each its own rows, so that components of A are never stored. All of them read B, so splitter warps store its
// components once.
#pragma once

#include "common/async_copy.cuh"
#include "arch/bulk_copy.cuh"
#include "arch/ring.cuh"
#include "arch/wgmma.cuh"
#include "gemm/split_sm80.cuh"

namespace mlpgpu {

// A warpgroup's part of C, 64 x N; a warp has 16 rows of it.
struct SplitProduct {
    static constexpr int M = 64, N = 96, COMPONENTS = 3, PROMOTED = 64, PER_THREAD = N / 2;  // elements of C
};

// A key that orders numbers by magnitude, with 0 after all others. A number with a key below TOO_SMALL loses bits when it
// is split. Numbers that are too large or not finite need no test, because their components make sums that are not finite.
__device__ __forceinline__ unsigned magnitude_key(float x) { return (__float_as_uint(x) << 1) - 1; }
constexpr unsigned TOO_SMALL = (27u << 24) - 1;

// --- A: rows of x as they are stored ---

// Stores where rows begin to shared memory; null for rows from `end` on. Copies read nothing else, so they need not wait
// for an order's entry each time.
template <int COUNT, int THREADS, bool INNER_FIRST>
__device__ __forceinline__ void find_rows(const Operand<INNER_FIRST>& from, int first, int end, const float** row_starts) {
    for (int i = threadIdx.x; i < COUNT; i += THREADS) row_starts[i] = first + i < end ? from.row(first + i) : nullptr;
}

// Starts copies of ROWS rows to shared memory, PITCH floats apart: WIDTH floats of each from `start` on. Rows that do not
// exist and elements from `end` on become 0. By THREADS threads, which do not wait.
template <int ROWS, int WIDTH, int PITCH, int THREADS>
__device__ __forceinline__ void copy_rows(const float* const* row_starts, const float* data, bool vectored, int start, int end,
                                           uint32_t to, int thread) {
    constexpr int PER_ROW = WIDTH / 4, AT_ONCE = THREADS / PER_ROW, EACH = ROWS / AT_ONCE, BATCH = EACH < 8 ? EACH : 8;
    static_assert(AT_ONCE * PER_ROW == THREADS && EACH * AT_ONCE == ROWS && EACH % BATCH == 0,
                  "a thread copies the same columns of every AT_ONCE-th row");
    const int row = thread / PER_ROW, column = thread % PER_ROW * 4, inside = max(0, min(4, end - start - column));
    const auto target = [=](int i) { return to + 4 * ((row + i * AT_ONCE) * PITCH + column); };
    if (vectored) {
#pragma unroll 1
        for (int i0 = 0; i0 < EACH; i0 += BATCH) {
            const float* source[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) source[i] = row_starts[row + (i0 + i) * AT_ONCE];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int count = source[i] ? inside : 0;
                copy_async_or_clear<16>(target(i0 + i), count > 0 ? source[i] + start + column : data, 4 * count);
            }
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < EACH; ++i) {
        const float* const source = row_starts[row + i * AT_ONCE];
        const int count = source ? inside : 0;
        for (int e = 0; e < 4; ++e)
            copy_async_or_clear<4>(target(i) + 4 * e, e < count ? source + start + column + e : data, e < count ? 4 : 0);
    }
}

// --- B: its components ---

// The components of K x N elements. Each is made of matrices of 8 columns, in which a column's eight elements are
// neighbours.
template <int K, int N>
struct SplitComponents {
    static constexpr int COLUMN = 16, NEXT_COLUMNS = 8 * COLUMN, NEXT_INNER = N * COLUMN;  // bytes
    static constexpr int COMPONENT = K / 8 * NEXT_INNER, BYTES = SplitProduct::COMPONENTS * COMPONENT;

    // Stores elements 8 · octet to 8 · octet + 7 of a column; returns whether one of them is too small.
    static __device__ __forceinline__ bool store(unsigned char* components, int column, int octet, const float (&values)[8]) {
        unsigned least = ~0u;
        float rest[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) rest[e] = values[e], least = min(least, magnitude_key(values[e]));
#pragma unroll
        for (int component = 0; component < SplitProduct::COMPONENTS; ++component) {
            uint4 bits;
            bits.x = split_off(rest[0], rest[1]), bits.y = split_off(rest[2], rest[3]);
            bits.z = split_off(rest[4], rest[5]), bits.w = split_off(rest[6], rest[7]);
            *reinterpret_cast<uint4*>(components + component * COMPONENT + octet * NEXT_INNER + column * COLUMN) = bits;
        }
        return least < TOO_SMALL;
    }

    // The descriptor of sixteen k of a component, from k on.
    static __device__ __forceinline__ uint64_t descriptor(uint32_t components, int component, int k) {
        return wgmma_descriptor_plain(components + component * COMPONENT + k / 8 * NEXT_INNER, NEXT_INNER, NEXT_COLUMNS);
    }
};

// --- products ---

// A's fragments in a lane's registers: those of sixteen k, and those of the product that is under way.
struct SplitFragments {
    unsigned fragments[2][SplitProduct::COMPONENTS][4];
    unsigned least[2] = {~0u, ~0u};  // the smallest of rows 0 and 8

    // pair(row, k) gives two neighbours along k of A, given offsets from the lane's first element in each 8 x 8.
    template <class Pair>
    __device__ __forceinline__ void fill(int k, const Pair& pair) {
        unsigned (&fragment)[SplitProduct::COMPONENTS][4] = fragments[k / 16 % 2];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            float2 two = pair(q % 2 * 8, k + q / 2 * 8);
            least[q % 2] = min(least[q % 2], min(magnitude_key(two.x), magnitude_key(two.y)));
#pragma unroll
            for (int component = 0; component < SplitProduct::COMPONENTS; ++component) fragment[component][q] = split_off(two.x, two.y);
        }
    }
};

// sums = A · B over PROMOTED of k, the smaller products of components first. The fragments of the first sixteen k are in
// `a`;
// fill(k) makes those from k on while products are under way, and at the end the first sixteen of the next sum.
template <class Components, class Fill>
__device__ __forceinline__ void multiply_components(float (&sums)[SplitProduct::PER_THREAD], const SplitFragments& a,
                                               uint32_t components, int k0, const Fill& fill) {
    using T = SplitProduct;
#pragma unroll
    for (int k = 0; k < T::PROMOTED; k += 16) {
        const unsigned (&fragment)[T::COMPONENTS][4] = a.fragments[k / 16 % 2];
        wgmma_fence();
#pragma unroll
        for (int both = T::COMPONENTS - 1; both >= 0; --both)
#pragma unroll
            for (int component = 0; component <= both; ++component)
                wgmma_of_registers(sums, fragment[component], Components::descriptor(components, both - component, k0 + k),
                                   k > 0 || both < T::COMPONENTS - 1 || component > 0);
        wgmma_commit();
        wgmma_wait<1>();  // the product that read what is filled now is done
        fill(k + 16);
    }
    wgmma_wait<0>();
}

// Calls finish(true, row, column, element of C) for the elements of the warp's 16 x N within `rows` and `columns`, and
// finish(false, …) for others, which must do nothing: so nothing branches. Elements whose row or column is flagged, or that
// are not finite, come from recompute(row, column).
template <class Recompute, class Finish>
__device__ __forceinline__ void finish_fragments(const float (&c)[SplitProduct::PER_THREAD], const unsigned (&least)[2],
                                                 const int* column_flags, bool any_column, int rows, int columns,
                                                 const Recompute& recompute, const Finish& finish) {
    constexpr int COUNT = SplitProduct::PER_THREAD;
    const int lane = threadIdx.x % WARP;
    const auto row = [=](int i) { return lane / 4 + i / 2 % 2 * 8; };
    const auto column = [=](int i) { return lane % 4 * 2 + i / 4 * 8 + i % 2; };
    bool is_row_inexact[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // four lanes share a row
        unsigned of_row = min(least[half], __shfl_xor_sync(WARP_ALL, least[half], 1));
        of_row = min(of_row, __shfl_xor_sync(WARP_ALL, of_row, 2));
        is_row_inexact[half] = of_row < TOO_SMALL;
    }
    float zeros[4] = {};  // becomes NaN if an element is not finite; four independent chains
#pragma unroll
    for (int i = 0; i < COUNT; ++i) zeros[i % 4] = fmaf(c[i], 0.0f, zeros[i % 4]);
    const bool is_finite = zeros[0] + zeros[1] + (zeros[2] + zeros[3]) == 0.0f;
    if (!__any_sync(WARP_ALL, any_column || is_row_inexact[0] || is_row_inexact[1] || !is_finite)) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) finish(row(i) < rows && column(i) < columns, row(i), column(i), c[i]);
        return;
    }
    float elements[COUNT];  // in local memory, since the loop below is not unrolled
#pragma unroll
    for (int i = 0; i < COUNT; ++i) elements[i] = c[i];
#pragma unroll 1
    for (int i = 0; i < COUNT; ++i) {
        if (row(i) >= rows || column(i) >= columns) continue;
        const bool is_right = !is_row_inexact[i / 2 % 2] && !column_flags[column(i)] && fabsf(elements[i]) < INFINITY;
        finish(true, row(i), column(i), is_right ? elements[i] : recompute(row(i), column(i)));
    }
    __syncwarp();
}

// --- a tile of C for gemm/simt.cuh's kernels: A lies along k, B along C's columns ---

// Compute warps multiply, producer warps copy slices of A, and splitter warps split B.
struct SplitSm90Tile {
    static constexpr int GROUPS = 2, M = GROUPS * SplitProduct::M, N = SplitProduct::N, DEPTH = SplitProduct::PROMOTED;
    static constexpr int COMPUTE_THREADS = GROUPS * WARPGROUP, PRODUCER_THREADS = 2 * WARP, SPLITTER_THREADS = 6 * WARP;
    static constexpr int THREADS = COMPUTE_THREADS + PRODUCER_THREADS + SPLITTER_THREADS;
    static constexpr int COMPUTE_REGISTERS = 168, OTHER_REGISTERS = 80;
    static_assert(COMPUTE_THREADS * COMPUTE_REGISTERS + (PRODUCER_THREADS + SPLITTER_THREADS) * OTHER_REGISTERS <= 65536,
                  "registers change hands by warpgroups");
    using Components = SplitComponents<DEPTH, N>;
    struct RingA {  // slices of A, whose rows begin eight banks apart from each other
        static constexpr int DEPTH = SplitSm90Tile::DEPTH, PITCH = DEPTH + 8;
        static constexpr int STAGES = 4, STAGE_BYTES = 4 * M * PITCH, ALIGNMENT = 16;
        static constexpr int CONSUMERS = COMPUTE_THREADS / WARP, CLUSTER = 1, BYTES = STAGES * (STAGE_BYTES + 16);
    };
    struct RingB {  // components
        static constexpr int STAGES = 2, STAGE_BYTES = Components::BYTES, ALIGNMENT = 16;
        static constexpr int CONSUMERS = COMPUTE_THREADS / WARP, CLUSTER = 1, BYTES = STAGES * (STAGE_BYTES + 16);
    };
    static constexpr int SHARED_BYTES = RingA::BYTES + RingB::BYTES + 8 * M + 4 * N;
    // A warp's staging tile, whose rows begin eight banks apart.
    static constexpr int STAGING_PITCH = N + 8, STAGING_SIZE = 16 * STAGING_PITCH;
    static_assert(4 * COMPUTE_THREADS / WARP * STAGING_SIZE <= RingB::BYTES, "in the end they lie where B's components were");
};

// A slice of B in a splitter's registers, where it waits while the slice before it is multiplied.
struct SplitColumns {
    using T = SplitSm90Tile;
    static constexpr int UNITS = T::N * T::DEPTH / 8 / T::SPLITTER_THREADS;  // of eight elements of a column
    static_assert(UNITS * T::SPLITTER_THREADS * 8 == T::N * T::DEPTH, "the same for each thread");
    float values[UNITS][8];

    static __device__ __forceinline__ int column(int thread, int unit) { return (thread + unit * T::SPLITTER_THREADS) % T::N; }
    static __device__ __forceinline__ int octet(int thread, int unit) { return (thread + unit * T::SPLITTER_THREADS) / T::N; }

    // Columns beyond B's repeat its last column: their sums are not used.
    __device__ __forceinline__ void fetch(const Operand<false>& b, int n0, int k0, int k_end, int thread, int unit) {
        const int first = k0 + 8 * octet(thread, unit);
        const int from = min(n0 + column(thread, unit), b.outer - 1);
        const float* const source = b.data + static_cast<int64_t>(first) * b.pitch + from;
        if (k0 + T::DEPTH <= k_end) {
#pragma unroll
            for (int e = 0; e < 8; ++e) values[unit][e] = source[e * b.pitch];
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) values[unit][e] = first + e < k_end ? source[e * b.pitch] : 0.0f;
        }
    }
};

template <class Columns, class Epilogue>
__device__ __forceinline__ void gemm_tile(SplitSm90Tile, const Operand<true>& a, const Operand<false>& b, int m0, int n0,
                                          int k_begin, int k_end, const Columns&, const Epilogue& epilogue) {
    using T = SplitSm90Tile;
    static_assert(!Columns::IS_SUMMED, "kernels that make dW sum dz's columns themselves");
    SHARED(unsigned char, slices);
    unsigned char* const components = slices + T::RingA::BYTES;
    const float** const row_starts = reinterpret_cast<const float**>(components + T::RingB::BYTES);  // of A's rows
    int* const column_flags = reinterpret_cast<int*>(row_starts + T::M);
    Ring<T::RingA> ring_a(slices);
    Ring<T::RingB> ring_b(components);
    if (threadIdx.x == 0) ring_a.make(T::PRODUCER_THREADS), ring_b.make(T::SPLITTER_THREADS / WARP);
    for (int i = threadIdx.x; i < T::N; i += T::THREADS) column_flags[i] = 0;
    find_rows<T::M, T::THREADS>(a, m0, a.outer, row_starts);
    __syncthreads();

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x >= T::COMPUTE_THREADS) {
        registers_lower<T::OTHER_REGISTERS>();
        const int producer = threadIdx.x - T::COMPUTE_THREADS, splitter = producer - T::PRODUCER_THREADS;
        if (splitter < 0) {
            const bool vectored = is_vectored(a.data, a.pitch);
            for (int k0 = k_begin; k0 < k_end; k0 += T::RingA::DEPTH) {
                ring_a.wait_empty();
                copy_rows<T::M, T::RingA::DEPTH, T::RingA::PITCH, T::PRODUCER_THREADS>(row_starts, a.data, vectored, k0, k_end,
                                                                           ring_a.address(), producer);
                barrier_arrive_copied(ring_a.full + 8 * ring_a.stage);
                ring_a.advance();
            }
            return;
        }
        SplitColumns columns;
#pragma unroll
        for (int unit = 0; unit < SplitColumns::UNITS; ++unit) columns.fetch(b, n0, k_begin, k_end, splitter, unit);
        for (int k0 = k_begin; k0 < k_end; k0 += T::DEPTH) {
            ring_b.wait_empty();
#pragma unroll
            for (int unit = 0; unit < SplitColumns::UNITS; ++unit) {
                const int column = SplitColumns::column(splitter, unit), octet = SplitColumns::octet(splitter, unit);
                unsigned char* const stage = components + ring_b.stage * T::RingB::STAGE_BYTES;
                if (T::Components::store(stage, column, octet, columns.values[unit])) column_flags[column] = 1;
            }
            publish_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive<1>(ring_b.full + 8 * ring_b.stage, 0);
            ring_b.advance();
            // Loads start only now, since the fence of publish_shared() would wait for them.
            if (k0 + T::DEPTH < k_end)
#pragma unroll
                for (int unit = 0; unit < SplitColumns::UNITS; ++unit)
                    columns.fetch(b, n0, k0 + T::DEPTH, k_end, splitter, unit);
        }
        return;
    }

    registers_raise<T::COMPUTE_REGISTERS>();
    float c[SplitProduct::PER_THREAD] = {};
    SplitFragments a_fragments;
    const float* slice = nullptr;
    const auto begin_slice = [&] {
        ring_a.wait_full();
        slice = reinterpret_cast<const float*>(slices + ring_a.stage * T::RingA::STAGE_BYTES) +
                (warp * 16 + lane / 4) * T::RingA::PITCH + lane % 4 * 2;
    };
    const auto fill = [&](int k) {
        a_fragments.fill(k, [=](int row, int inner) {
            return *reinterpret_cast<const float2*>(slice + row * T::RingA::PITCH + inner);
        });
    };
    if (k_begin < k_end) begin_slice(), fill(0);
    for (int k0 = k_begin; k0 < k_end; k0 += T::DEPTH) {
        ring_b.wait_full();
        float sums[SplitProduct::PER_THREAD];
        multiply_components<T::Components>(sums, a_fragments, ring_b.address(), 0, [&](int k) {
            if (k < T::DEPTH) return fill(k);
            __syncwarp();
            if (lane == 0) barrier_arrive<1>(ring_a.empty + 8 * ring_a.stage, 0);
            ring_a.advance();
            if (k0 + T::DEPTH < k_end) begin_slice(), fill(0);
        });
        if (lane == 0) barrier_arrive<1>(ring_b.empty + 8 * ring_b.stage, 0);
        ring_b.advance();
#pragma unroll
        for (int i = 0; i < SplitProduct::PER_THREAD; ++i) c[i] += sums[i];
    }
    const int row0 = m0 + warp * 16;
    float* const staging = reinterpret_cast<float*>(components) + warp * T::STAGING_SIZE;
    sync_some<1, T::COMPUTE_THREADS>();
    bool any_column = false;
    for (int i = lane; i < T::N; i += WARP) any_column = any_column || column_flags[i];
    finish_fragments(
        c, a_fragments.least, column_flags, any_column, a.outer - row0, b.outer - n0,
        [=](int row, int column) {
            float sum = 0.0f;
            for (int k = k_begin; k < k_end; ++k) sum = fmaf(a.at(row0 + row, k), b.at(n0 + column, k), sum);
            return sum;
        },
        [=](bool is_inside, int row, int column, float value) {
            if (is_inside) staging[row * T::STAGING_PITCH + column] = value;
        });
    __syncwarp();
    for (int row = 0; row < min(16, a.outer - row0); ++row)
        for (int column = lane; column < min(T::N, b.outer - n0); column += WARP)
            epilogue.put(row0 + row, n0 + column, epilogue.finish(staging[row * T::STAGING_PITCH + column], {}));
}

}  // namespace mlpgpu
