// C = A · B by wgmma on sm_90a, of split operands (gemm/operand_formats.cuh) in global memory.
//
// A block is one producer warpgroup and some consumer warpgroups. One producer thread lets the copy engine load slices of A
// and B, 64 elements along k, into a ring of stages in shared memory. Each consumer multiplies 64 rows of the tile, keeps
// its part of C in registers, and releases stages. The blocks of a cluster compute neighbouring tiles and share slices of
// B: each loads a part of such a slice into all of them at once. The grid is as large as the card, and a cluster computes
// one tile after another.
//
// With two components a · b = hi · hi + 2^-SHIFT (hi · lo + lo · hi), and for halves and small k also + 2^-22 lo · lo. With
// three it is hi · hi and the five other products of components whose ranks add up to at most 2, hi being of rank 0.
// Tensor cores truncate when they accumulate. So if the format is PROMOTED, the sum of hi · hi restarts with each slice,
// and is added to C by float32 additions.
#pragma once

#include "common/dependent_launch.cuh"
#include "arch/bulk_copy.cuh"
#include "arch/ring.cuh"
#include "gemm/staging.cuh"

namespace mlpgpu {

// The shape of a block's work. A cluster is CLUSTER tiles, one below the other, that share their columns of B. ACROSS
// consumers share 64 rows: in a small tile, where the epilogue takes a large part of the time, more warps finish it. Tiles
// of 16 columns let products of few rows fill the card.
template <class Format_, int M_, int N_, int STAGES_, int CLUSTER_, int ACROSS_>
struct Sm90Tile {
    using Format = Format_;  // of gemm/operand_formats.cuh
    static constexpr int COMPONENTS = Format::COMPONENTS, M = M_, N = N_, STAGES = STAGES_, CLUSTER = CLUSTER_, ACROSS = ACROSS_;
    static constexpr int K = 64, ROW_BYTES = 128;  // elements of a slice along k, and their bytes
    static constexpr int CONSUMERS = M / 64 * ACROSS, WIDTH = N / ACROSS;  // columns of a consumer
    static constexpr int COUNT = WIDTH / 2;                                // a thread's elements of C
    // Of a thread, where warpgroups share out those that a block of so many threads begins with.
    static constexpr int PRODUCER_REGISTERS = CONSUMERS > 2 ? 32 : 40;
    static constexpr int CONSUMER_REGISTERS = CONSUMERS > 3 ? 112 : CONSUMERS > 2 ? 152 : 232;
    static constexpr int A_BYTES = M * ROW_BYTES, B_BYTES = N * ROW_BYTES;  // of one component
    static constexpr int SUMS = (COMPONENTS > 1 ? 2 : 1) + Format::PROMOTED;  // of an element, while a product is made
    static constexpr int STAGE_BYTES = COMPONENTS * (A_BYTES + B_BYTES), ALIGNMENT = 1024;  // the swizzle follows the address
    // The bytes of a row of B in shared memory, if rows run along C's columns.
    static constexpr int B_ROW_BYTES = N < 64 ? 2 * N : ROW_BYTES;
    static_assert(N % 64 == 0 || (N == 16 && ACROSS == 1 && CLUSTER == 1), "wgmma_descriptor has rows of 128 and 32 bytes");
    // A warp's staging tile, 16 rows, padded so that two rows of pairs lie in different banks.
    static constexpr int STAGING_WIDTH = WIDTH < 32 ? WIDTH : 32, STAGING_PITCH = STAGING_WIDTH + 8;
    static constexpr int STAGING_SIZE = 16 * STAGING_PITCH;
};

// A block's tiles, one after another. Clusters go down columns of up to 16 tiles, so that tiles computed at the same time
// share slices of A and B in the second-level cache.
template <class T>
struct Scheduler {
    static constexpr int GROUP = 16 / T::CLUSTER;
    int tiles_m, tiles_n;  // tiles_m counts clusters
    int tile;

    __device__ __forceinline__ Scheduler(int m, int n)
        : tiles_m((m + T::CLUSTER * T::M - 1) / (T::CLUSTER * T::M)),  // not by ceil_div: nvcc would make other code
          tiles_n((n + T::N - 1) / T::N),
          tile(blockIdx.x / T::CLUSTER) {}

    __device__ __forceinline__ bool is_done() const { return tile >= tiles_m * tiles_n; }

    __device__ __forceinline__ void advance() { tile += gridDim.x / T::CLUSTER; }

    // First row and column of the tile of the cluster's block `rank`.
    __device__ __forceinline__ void origin(int rank, int& m0, int& n0) const {
        const int group = tile / (GROUP * tiles_n), within = tile % (GROUP * tiles_n);
        const int height = min(GROUP, tiles_m - group * GROUP);
        const int column = height == GROUP ? within / GROUP : within / height;  // most often by a shift
        m0 = ((group * GROUP + within - column * height) * T::CLUSTER + rank) * T::M;
        n0 = column * T::N;
    }
};

// One component's slice of SIZE rows or columns of C. If SHARE blocks share the slice, this block loads one of SHARE
// portions into all of them. INNER: whether the operand's rows run along k; if not, boxes are up to 64 wide.
template <int SIZE, int SHARE, bool INNER>
__device__ __forceinline__ void load_slice(uint32_t destination, const TensorMap* map, uint32_t barrier, int outer0, int k0,
                                      int component, int portion) {
    constexpr int PORTION = SIZE / SHARE, BOX = INNER || PORTION < 64 ? PORTION : 64;
    for (int outer = portion * PORTION; outer < (portion + 1) * PORTION; outer += BOX) {
        const uint32_t address = destination + outer * 128;
        const int x = INNER ? k0 : outer0 + outer, y = INNER ? outer0 + outer : k0;
        if (SHARE > 1)
            tensor_copy_to_all<SHARE>(address, map, barrier, x, y, component);
        else
            tensor_copy(address, map, barrier, x, y, component);
    }
}

// Fills the ring with slices of a block's tiles, which are a Scheduler or the like.
template <class T, bool A_INNER, bool B_INNER, class Tiles>
__device__ __forceinline__ void produce(const TensorMap* a, const TensorMap* b, Tiles scheduler, int k_begin, int slices,
                                        Ring<T> ring, int prefetch) {
    tensor_map_acquire(a);
    tensor_map_acquire(b);
    const int rank = cluster_rank<T::CLUSTER>();
    int m0, n0;
    const auto load_a = [&](int slice) {
        for (int component = 0; component < T::COMPONENTS; ++component)
            load_slice<T::M, 1, A_INNER>(ring.address() + component * T::A_BYTES, a, ring.full + 8 * ring.stage, m0,
                                    k_begin + slice * T::K, component, 0);
    };
    const auto load_b = [&](int slice) {
        for (int component = 0; component < T::COMPONENTS; ++component)
            load_slice<T::N, T::CLUSTER, B_INNER>(ring.address() + T::COMPONENTS * T::A_BYTES + component * T::B_BYTES, b,
                                             ring.full + 8 * ring.stage, n0, k_begin + slice * T::K, component, rank);
    };
    // One operand of the first slices may be loaded while the launch before still computes the other one.
    int preloaded = 0;
    if (prefetch != (PREFETCH_A | PREFETCH_B) && !scheduler.is_done()) {
        scheduler.origin(rank, m0, n0);
        const Ring<T> first = ring;
        for (; prefetch && preloaded < min(slices, T::STAGES); ++preloaded, ring.advance()) {
            barrier_expect(ring.full + 8 * ring.stage, T::STAGE_BYTES);
            prefetch == PREFETCH_A ? load_a(preloaded) : load_b(preloaded);
        }
        pdl_wait();
        ring = first;
        for (int slice = 0; slice < preloaded; ++slice, ring.advance()) prefetch == PREFETCH_A ? load_b(slice) : load_a(slice);
    }
    for (; !scheduler.is_done(); scheduler.advance(), preloaded = 0) {
        scheduler.origin(rank, m0, n0);
        for (int slice = preloaded; slice < slices; ++slice) {
            ring.wait_empty();
            barrier_expect(ring.full + 8 * ring.stage, T::STAGE_BYTES);
            load_a(slice);
            load_b(slice);
            ring.advance();
        }
    }
}

// The products of one slice for a consumer.
template <class T, bool A_INNER, bool B_INNER>
struct Slices {
    // From 16 elements along k to the next 16, and from 64 outer elements to the next, in bytes.
    static constexpr int A_STEP = A_INNER ? 32 : 16 * T::ROW_BYTES, B_STEP = B_INNER ? 32 : 16 * T::B_ROW_BYTES;
    static constexpr int ATOM = 64 * T::ROW_BYTES, B_ROW_BYTES = B_INNER ? T::ROW_BYTES : T::B_ROW_BYTES;
    uint64_t a, b;  // of the first components

    // Where a consumer's columns of B begin: behind whole atoms of 64 of them, and within one if rows run along them.
    static __device__ __forceinline__ int first_column(int consumer) {
        const int column = consumer % T::ACROSS * T::WIDTH;
        return B_INNER ? column * T::ROW_BYTES : column / 64 * ATOM + column % 64 * 2;
    }

    __device__ __forceinline__ Slices(uint32_t stage, int consumer)
        : a(wgmma_descriptor(stage + consumer / T::ACROSS * ATOM, ATOM)),
          b(wgmma_descriptor<B_ROW_BYTES>(stage + T::COMPONENTS * T::A_BYTES + first_column(consumer), ATOM)) {}

    // c += A's component · B's component; `add` false: c is overwritten.
    __device__ __forceinline__ void multiply(float (&c)[T::COUNT], int a_stride, int b_stride, bool add) const {
#pragma unroll
        for (int step = 0; step < T::K / 16; ++step) {
            const uint64_t from_a = a + (a_stride * T::A_BYTES + step * A_STEP) / 16;
            const uint64_t from_b = b + (b_stride * T::B_BYTES + step * B_STEP) / 16;
            Wgmma<A_INNER, B_INNER>::multiply(ElementIs<T::Format::HALF>(), c, from_a, from_b, add || step > 0);
        }
    }

    // c += all other products of components than hi · hi, the smallest first.
    __device__ __forceinline__ void multiply_cross(float (&c)[T::COUNT]) const {
#pragma unroll
        for (int both = T::COMPONENTS - 1; both > 0; --both)
#pragma unroll
            for (int p = 0; p <= both; ++p) multiply(c, p, both - p, true);
    }
};

// A barrier after the ring's, passed once the producer's last warp has waited for the launch before. Consumers wait here,
// as late as they can: to wait for the launch itself takes half a microsecond, even if it is complete.
template <class T>
__device__ __forceinline__ uint32_t launch_barrier(const Ring<T>& ring) {
    return ring.empty + 8 * T::STAGES;
}

// What could not be prefetched at the start of a tile is prefetched this many slices before its end.
constexpr int LAST_SLICES = 4;

// c += 2^-SHIFT cross. Without scales only finite terms are added: later components of an infinite operand are 0, and the
// product with them has either sign or is NaN.
template <class T>
__device__ __forceinline__ void add_cross(float (&c)[T::COUNT], const float (&cross)[T::COUNT]) {
    constexpr float STEP = 1.0f / (1 << T::Format::SHIFT);
#pragma unroll
    for (int i = 0; i < T::COUNT; ++i)
        c[i] = T::Format::SCALED || fabsf(cross[i]) <= LARGEST ? fmaf(cross[i], STEP, c[i]) : c[i];
}

// A consumer's sums over at least one slice, which it releases: `c`, and with several components `cross`, which starts from 0.
// `late` is called LAST_SLICES before the end.
template <class T, bool A_INNER, bool B_INNER, class Release, class Late>
__device__ __forceinline__ void multiply_slices(float (&c)[T::COUNT], float (&cross)[T::COUNT], int slices, Ring<T>& ring,
                                                int consumer, const Release& release, const Late& late) {
    using Slice = Slices<T, A_INNER, B_INNER>;
    if constexpr (T::COMPONENTS == 1) {
        ring.wait_full();
        wgmma_fence();
        Slice(ring.address(), consumer).multiply(c, 0, 0, false);
        wgmma_commit();
        ring.advance();
        for (int slice = 1; slice < slices; ++slice) {
            ring.wait_full();
            if (slice == slices - LAST_SLICES) late();
            wgmma_fence();
            Slice(ring.address(), consumer).multiply(c, 0, 0, true);
            wgmma_commit();
            ring.advance();
            wgmma_wait<1>();
            release();  // the slice before
        }
        wgmma_wait<0>();
        release();
    } else if constexpr (!T::Format::PROMOTED) {
        for (int slice = 0; slice < slices; ++slice) {
            ring.wait_full();
            if (slice == slices - LAST_SLICES) late();
            const Slice products(ring.address(), consumer);
            wgmma_fence();
            products.multiply(c, 0, 0, true);
            products.multiply_cross(cross);
            wgmma_commit();
            ring.advance();
            wgmma_wait<1>();
            if (slice > 0) release();  // the slice before
        }
        wgmma_wait<0>();
        release();
    } else {
        float high[T::COUNT];
        for (int slice = 0; slice < slices; ++slice) {
            ring.wait_full();
            const Slice products(ring.address(), consumer);
            wgmma_fence();
            products.multiply(high, 0, 0, false);
            wgmma_commit();
            wgmma_wait<1>();
            if (slice > 0) release();  // the slice before
            wgmma_fence();
            products.multiply_cross(cross);
            wgmma_commit();
            wgmma_wait<1>();
            for (int i = 0; i < T::COUNT; ++i) c[i] += high[i];
            if (T::Format::SHORT_K > 0 && slices <= T::Format::SHORT_K / T::K) {
                wgmma_fence();
                products.multiply(high, 1, 1, false);
                wgmma_commit();
                wgmma_wait<0>();
                for (int i = 0; i < T::COUNT; ++i) c[i] = fmaf(high[i], 0x1p-22f, c[i]);
            }
            ring.advance();
        }
        wgmma_wait<0>();
        release();
    }
}

template <class T, bool A_INNER, bool B_INNER, class Epilogue>
__device__ __forceinline__ void consume(int m, int n, int slices, Ring<T> ring, float* stagings, bool is_prefetched,
                                        const Epilogue& epilogue) {
    const int rank = cluster_rank<T::CLUSTER>();
    const int consumer = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    float* const staging = stagings + (threadIdx.x - WARPGROUP) / WARP * T::STAGING_SIZE;
    int released = 0;
    const auto release = [&] {
        if (thread < T::CLUSTER) barrier_arrive<T::CLUSTER>(ring.empty + 8 * released, thread);
        if (++released == T::STAGES) released = 0;
    };
    const bool components_alone = Epilogue::WRITES_COMPONENTS && epilogue.is_components_alone();
    // Epilogues that read more have waited for the launch before already.
    constexpr bool MAY_PREFETCH_LATE = sizeof(typename Epilogue::Read) <= sizeof(BfloatQuad<MOST_COMPONENTS>);
    if (!MAY_PREFETCH_LATE) is_prefetched = true;
    bool has_waited = false;
    const auto wait_launch = [&] {
        if (!has_waited) barrier_wait(launch_barrier(ring), 0);
        has_waited = true;
    };
    const bool prefetches_rows = !components_alone && epilogue.is_aligned();
    for (Scheduler<T> scheduler(m, n); !scheduler.is_done(); scheduler.advance()) {
        int m0, n0;
        scheduler.origin(rank, m0, n0);
        m0 += consumer / T::ACROSS * 64, n0 += consumer % T::ACROSS * T::WIDTH;
        StagedComponents<T, Epilogue> staged_components(epilogue, m0, n0, m, n, components_alone && is_prefetched);
        StagedEpilogue<T, Epilogue> staged_quads(epilogue, m0, n0, m, n, prefetches_rows && is_prefetched);
        const auto prefetch_late = [&] {
            if constexpr (MAY_PREFETCH_LATE) {
                if (is_prefetched) return;
                wait_launch();
                if (components_alone) staged_components.prefetch();
                if (prefetches_rows) staged_quads.prefetch();
                is_prefetched = true;
            }
        };
        float c[T::COUNT] = {};
        float cross[T::COUNT] = {};
        multiply_slices<T, A_INNER, B_INNER>(c, cross, slices, ring, consumer, release, prefetch_late);
        wait_launch();
        prefetch_late();
        if (T::COMPONENTS > 1) add_cross<T>(c, cross);
        if (components_alone)
            staged_components.run(c, staging);
        else
            staged_quads.run(c, staging);
    }
    wait_launch();
}

// Calls the epilogue for the columns of all tiles, by the other warps of the producer's warpgroup, which have nothing else
// to do.
template <class T, class Tiles, class Epilogue>
__device__ __forceinline__ void finish_columns(Tiles scheduler, const Epilogue& epilogue) {
    for (; !scheduler.is_done(); scheduler.advance()) {
        int m0, n0;
        scheduler.origin(cluster_rank<T::CLUSTER>(), m0, n0);
        if (m0 == 0) epilogue.columns(n0, T::N, threadIdx.x - WARP, WARPGROUP - WARP);
    }
}

// A quad and that of the lane `apart` lanes away, added.
__device__ __forceinline__ float4 add_lanes(const float4& quad, int apart) {
    const auto both = [&](float x) { return x + __shfl_xor_sync(WARP_ALL, x, apart); };
    return make_float4(both(quad.x), both(quad.y), both(quad.z), both(quad.w));
}

// By how many warps a block sums B's columns. Each takes its part of the rows of a slice, one row after another: where few
// tiles share a slice's 64 rows, one warp would take longer than the product.
__device__ __forceinline__ int summing_warps(int tiles) { return tiles <= 8 ? WARPGROUP / WARP - 1 : 1; }

// Sums B's columns, by summing_warps() warps that read the slices beside the consumers, this being number `warp` of them;
// B's rows run along the columns. The tiles that share columns divide the rows of each slice among themselves, and each of
// their warps stores its sums as a row of `partials` (row tiles x warps, n padded). Of a narrow tile the lanes of a quad of
// columns take one set of the rows each.
template <class T, class Tiles>
__device__ __forceinline__ void sum_columns(Tiles scheduler, int m, int n, int slices, Ring<T> ring, float* partials, int warp) {
    constexpr int QUADS = ceil_div(T::N, 4 * WARP);  // neighbouring columns that a lane sums
    constexpr int LANES = smallest(WARP, T::N / 4), SETS = WARP / LANES;
    const int tiles = (m + T::M - 1) / T::M, parts = tiles * summing_warps(tiles);
    const int lane = threadIdx.x % WARP % LANES, set = threadIdx.x % WARP / LANES, pitch = padded_columns(n);
    const auto has_quad = [&](int q) { return T::N % (4 * LANES) == 0 || (q * WARP + lane) * 4 < T::N; };  // of 192 half a warp
    for (; !scheduler.is_done(); scheduler.advance()) {
        int m0, n0;
        scheduler.origin(cluster_rank<T::CLUSTER>(), m0, n0);
        const int tile = m0 / T::M, part = tile * summing_warps(tiles) + warp;
        const bool inside = tile < tiles;  // a cluster's last tile may lie beyond C
        const int first = inside ? T::K * part / parts : 0, end = inside ? T::K * (part + 1) / parts : 0;
        float4 sums[QUADS] = {};
        for (int slice = 0; slice < slices; ++slice) {
            ring.wait_full();
#pragma unroll 2  // two rows' loads are in flight
            for (int row = first + set; row < end; row += SETS)
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    if (!has_quad(q)) continue;
                    const int column = (q * WARP + lane) * 4, atom = column / 64;
                    const uint32_t address =
                        ring.address() + T::COMPONENTS * T::A_BYTES + (atom * 64 + row) * T::ROW_BYTES + column % 64 * 2;
                    BfloatQuad<T::COMPONENTS> quad;
#pragma unroll
                    for (int p = 0; p < T::COMPONENTS; ++p) quad.words[p] = load_shared(swizzled(address + p * T::B_BYTES));
                    const float4 four = quad.value();
                    sums[q].x += four.x, sums[q].y += four.y, sums[q].z += four.z, sums[q].w += four.w;
                }
            __syncwarp();
            if (threadIdx.x % WARP < T::CLUSTER) barrier_arrive<T::CLUSTER>(ring.empty + 8 * ring.stage, threadIdx.x % WARP);
            ring.advance();
        }
        pdl_wait();
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
#pragma unroll
            for (int other = LANES; other < WARP; other *= 2) sums[q] = add_lanes(sums[q], other);
            const int j = n0 + (q * WARP + lane) * 4;
            if (inside && set == 0 && j < pitch && has_quad(q))
                *reinterpret_cast<float4*>(partials + static_cast<int64_t>(part) * pitch + j) = sums[q];
        }
    }
}

// As a product of dense/tensor_dense.cuh.  Threads: a warpgroup for the producer and one for each consumer.
// Grid: any number of clusters, of one dimension.
template <class T>
struct GemmSm90 {
    using Format = typename T::Format;
    using Source = const TensorMap*;  // the maps know components and pitches
    static constexpr bool BEGINS_EPILOGUE = false;

    template <bool A_INNER, bool B_INNER>
    struct Block {  // staging tiles, then the stages and their barriers, and the barrier of the launch before
        static constexpr int THREADS = WARPGROUP * (1 + T::CONSUMERS);
        static constexpr int SHARED_BYTES =
            4 * 4 * T::CONSUMERS * T::STAGING_SIZE + T::ALIGNMENT + T::STAGES * (T::STAGE_BYTES + 16) + 16;
    };

    template <bool A_INNER, bool B_INNER, class Epilogue>
    static __device__ __forceinline__ void multiply(Source a, int64_t, int, Source b, int64_t, int, int m, int n, int k,
                                                    int prefetch, const Epilogue& epilogue) {
        SHARED(float, stagings);
        const Ring<T> ring(stagings + 4 * T::CONSUMERS * T::STAGING_SIZE);
        // Columns of scaled operands are summed by the kernel that splits them.
        constexpr bool MAY_SUM = !Format::SCALED && !A_INNER && !B_INNER;
        float* const column_partials = MAY_SUM ? epilogue.column_partials() : nullptr;
        if (threadIdx.x == 0) {
            barrier_init(launch_barrier(ring), 1);
            ring.make(1, T::CONSUMERS + (column_partials ? summing_warps((m + T::M - 1) / T::M) : 0));
        }
        cluster_synchronize<T::CLUSTER>();
        // If k is 0, one out-of-bounds slice is read, which the copy engine fills with zeros.
        const int k_begin = k > 0 ? 0 : 1 << 30, slices = max(1, (k + T::K - 1) / T::K);
        if (threadIdx.x < WARPGROUP) {
            if (T::CONSUMERS > 1) registers_lower<T::PRODUCER_REGISTERS>();
            const int warp = threadIdx.x / WARP;
            if (threadIdx.x == 0)
                produce<T, A_INNER, B_INNER>(a, b, Scheduler<T>(m, n), k_begin, slices, ring,
                                             prefetch & (PREFETCH_A | PREFETCH_B));
            if (warp == WARPGROUP / WARP - 1) {
                pdl_wait_and_trigger();
                __syncwarp();
                if (threadIdx.x % WARP == 0) barrier_arrive<T::CLUSTER>(launch_barrier(ring), cluster_rank<T::CLUSTER>());
            }
            if (warp > 0 && !(MAY_SUM && column_partials)) pdl_wait();
            if constexpr (MAY_SUM)
                if (column_partials && warp > 0 && warp <= summing_warps((m + T::M - 1) / T::M))
                    sum_columns<T>(Scheduler<T>(m, n), m, n, slices, ring, column_partials, warp - 1);
            if (!column_partials && warp > 0) finish_columns<T>(Scheduler<T>(m, n), epilogue);
        } else {
            if (T::CONSUMERS > 1) registers_raise<T::CONSUMER_REGISTERS>();
            consume<T, A_INNER, B_INNER>(m, n, slices, ring, stagings, prefetch & PREFETCH_EPILOGUE, epilogue);
        }
        if (T::CLUSTER > 1) cluster_synchronize<T::CLUSTER>();  // others still write to this block's shared memory
    }
};

}  // namespace mlpgpu
