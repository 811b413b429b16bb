// C = A · B by clusters whose blocks share k: for few tiles and many terms, and for epilogues of many bytes.
//
// The SPLIT blocks of a cluster make one tile of C, each over its part of k, as gemm/gemm_sm90.cuh makes one: a producer
// and consumers. Each leaves its sums in shared memory. Then every block finishes its part of the tile's rows, of which it
// adds the sums of all blocks up, in the order of their ranks. All threads of a block take part in the epilogue. Two or
// three blocks of small tiles are on a multiprocessor at once, so that one multiplies while another one's epilogue waits for
// memory; of large ones, which read less from the second-level cache, there is one. With a
// SPLIT of 1 that is all that differs from gemm/gemm_sm90.cuh. The epilogue loads what it moves just before it stores it:
// where tiles were prefetched to the second-level cache, memory gave a tenth less in a second.
#pragma once

#include "gemm/gemm_sm90.cuh"

namespace mlpgpu {

// The only tile of a block of such a cluster, like a Scheduler. Blocks that begin together have the same rows of C, so that
// what their epilogues read and write lies together.
template <class T>
struct OnlyTile : Scheduler<T> {
    bool is_made = false;
    __device__ __forceinline__ OnlyTile(int m, int n, int tile) : Scheduler<T>(m, n) { this->tile = tile; }
    __device__ __forceinline__ bool is_done() const { return is_made || Scheduler<T>::is_done(); }
    __device__ __forceinline__ void advance() { is_made = true; }
    __device__ __forceinline__ void origin(int, int& m0, int& n0) const {
        m0 = this->tile / this->tiles_n * T::M;
        n0 = this->tile % this->tiles_n * T::N;
    }
};

// A tile's sums in shared memory, in the place of the ring's stages, which nobody reads any more.
template <class T, int SPLIT>
struct SharedSums {
    static constexpr int PITCH = T::N + 8;  // so that pairs of four rows lie in different banks
    static constexpr int ROWS = T::M / SPLIT, LANES = T::N / 4, THREADS = WARPGROUP * (1 + T::CONSUMERS);
    static constexpr int QUADS = (ROWS * LANES + THREADS - 1) / THREADS;  // of a thread
    static_assert(4 * T::M * PITCH <= T::STAGES * T::STAGE_BYTES && ROWS * LANES % WARP == 0);

    float* sums;
    uint32_t address;
    int m0, n0, m, n;

    // By a consumer, of its part of the tile.
    __device__ __forceinline__ void store(const float (&c)[T::COUNT], int consumer) const {
        const int warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP;
        const int row = consumer / T::ACROSS * 64 + warp * 16 + lane / 4;
        const int column = consumer % T::ACROSS * T::WIDTH + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < T::COUNT / 2; ++i) {
            float* const to = sums + (row + i % 2 * 8) * PITCH + column + i / 2 * 8;
            *reinterpret_cast<float2*>(to) = make_float2(c[i * 2], c[i * 2 + 1]);
        }
    }

    // Quad i of a thread: its row and first column in the tile.
    __device__ __forceinline__ int row_of(int i, int rank) const {
        return rank * ROWS + (i * THREADS + static_cast<int>(threadIdx.x)) / LANES;
    }
    __device__ __forceinline__ int column() const { return threadIdx.x % LANES * 4; }

    // The blocks' partial sums, added up.
    __device__ __forceinline__ float4 total(int i, int rank) const {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int block = 0; block < SPLIT; ++block) {
            const float4 part = load_of_block<SPLIT>(address + 4 * (row_of(i, rank) * PITCH + column()), block);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        return sum;
    }

    // Of rows that are no vectors, a thread's four columns are LANES apart instead, so that neighbours' loads and stores are
    // neighbours. An epilogue that reads components gets neighbours all the same, since components are always vectors. Nobody
    // else reads this block's sums of its own rows.
    template <int APART>
    __device__ __forceinline__ int first_column() const {
        return threadIdx.x % LANES * (APART == 1 ? 4 : 1);
    }
    __device__ __forceinline__ float4 spread(int i, int rank, const float4& quad) const {
        float* const row = sums + row_of(i, rank) * PITCH;
        *reinterpret_cast<float4*>(row + column()) = quad;
        __syncwarp();
        const float* const first = row + first_column<LANES>();
        return make_float4(first[0], first[LANES], first[2 * LANES], first[3 * LANES]);
    }

    // Finishes the block's rows; all blocks' sums are there once the cluster has met.
    template <bool ALIGNED, class Epilogue>
    __device__ __forceinline__ void finish(int rank, const Epilogue& epilogue) const {
        using Read = typename Epilogue::Read;
        using Scales = typename Epilogue::Scales;
        // Quads whose loads overlap: more take too many registers.
        constexpr bool HAS_SCALES = sizeof(Scales) >= sizeof(int);
        // For registers of which three blocks have a third each.
        constexpr bool IS_LARGE = T::COMPONENTS == 1 && T::N == 64 && sizeof(Read) > 3 * sizeof(float4);
        constexpr int MOST = !HAS_SCALES ? (IS_LARGE ? 2 : 4) : T::COMPONENTS > 1 ? 2 : 1, GROUP = QUADS < MOST ? QUADS : MOST;
        Read read[GROUP];
        Scales scales[GROUP];
        uint64_t kept[GROUP];
        const auto takes_part = [&](int i) { return i * THREADS + static_cast<int>(threadIdx.x) < ROWS * LANES; };  // whole warps do
        constexpr int APART = ALIGNED || Epilogue::READS_COMPONENTS ? 1 : LANES;
        const int to = n0 + first_column<APART>();
        const int end = Epilogue::WRITES_COMPONENTS && APART > 1 ? (n + 3) / 4 * 4 : n;  // behind n components are 0
        const auto inside = [&](int i, int j) { return takes_part(i) && m0 + row_of(i, rank) < m && j < end; };
        const auto load = [&](int first) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const int row = m0 + row_of(first + i, rank), j = n0 + column();
                read[i] = inside(first + i, to) ? epilogue.template read<ALIGNED, APART>(row, to) : Read();
                scales[i] = inside(first + i, j) ? epilogue.scales(row, j) : Scales();
                kept[i] = inside(first + i, to) ? epilogue.template kept<APART>(row, to) : 0;
            }
        };
        load(0);
        cluster_synchronize<SPLIT>();
#pragma unroll 1
        for (int first = 0; first < QUADS && takes_part(first); first += GROUP) {
            if (first > 0) load(first);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                if (!takes_part(first + i)) break;
                const int row = m0 + row_of(first + i, rank);
                float4 quad = total(first + i, rank);
                epilogue.rescale(row, n0 + column(), quad, scales[i]);
                if (APART > 1) quad = spread(first + i, rank, quad);
                if (inside(first + i, to)) epilogue.template write<ALIGNED, APART>(row, to, quad, read[i], kept[i]);
            }
        }
    }
};

// As a product of dense/tensor_dense.cuh.  Grid: SPLIT blocks for each tile, of one dimension.
template <class T, int SPLIT>
struct GemmClusterSplit {
    using Tile = T;
    using Format = typename T::Format;
    using Source = const TensorMap*;
    static constexpr bool BEGINS_EPILOGUE = true;
    static constexpr int BLOCKS = SPLIT;  // of a tile
    static_assert(T::CLUSTER == 1, "a cluster's blocks load different slices");

    template <bool A_INNER, bool B_INNER>
    struct Block {  // the stages and their barriers
        static constexpr int THREADS = WARPGROUP * (1 + T::CONSUMERS);
        static constexpr int SHARED_BYTES = T::ALIGNMENT + T::STAGES * (T::STAGE_BYTES + 16);
    };

    template <bool A_INNER, bool B_INNER, class Epilogue>
    static __device__ __forceinline__ void multiply(Source a, int64_t, int, Source b, int64_t, int, int m, int n, int k,
                                                    int prefetch, Epilogue epilogue) {
        multiply_tile<A_INNER, B_INNER>(a, b, m, n, k, blockIdx.x / SPLIT, prefetch, epilogue);
    }

    // The tile of this number.
    template <bool A_INNER, bool B_INNER, class Epilogue>
    static __device__ __forceinline__ void multiply_tile(Source a, Source b, int m, int n, int k, int number, int prefetch,
                                                         Epilogue epilogue) {
        SHARED(float, shared);
        const Ring<T> ring(shared);
        const int rank = cluster_rank<SPLIT>(), tiles = (m + T::M - 1) / T::M, summing = summing_warps(tiles);
        const OnlyTile<T> tile(m, n, number);
        // A batch may have fewer rows than the grid is for. All blocks of a cluster have the same tile, so none waits here.
        if (tile.is_done()) {
            pdl_wait_and_trigger();
            return;
        }
        const int all = (k + T::K - 1) / T::K, begin = all * rank / SPLIT, slices = all * (rank + 1) / SPLIT - begin;
        constexpr bool MAY_SUM = !Format::SCALED;
        float* const column_partials = MAY_SUM ? epilogue.column_partials() : nullptr;
        SharedSums<T, SPLIT> sums = {shared + (ring.stages - shared_address(shared)) / 4, ring.stages, 0, 0, m, n};
        tile.origin(0, sums.m0, sums.n0);
        if (threadIdx.x == 0) ring.make(1, T::CONSUMERS + (column_partials ? summing : 0));
        __syncthreads();
        const auto begin_epilogue = [&] {  // while the first slices are in flight
            if (!(prefetch & PREFETCH_EPILOGUE)) pdl_wait();
            epilogue.begin();
        };
        const int warp = threadIdx.x / WARP, consumer = static_cast<int>(threadIdx.x) / WARPGROUP - 1;
        float c[T::COUNT] = {};
        if (consumer >= 0) {
            begin_epilogue();
            Ring<T> read = ring;
            int released = 0;
            const auto release = [&] {
                if (threadIdx.x % WARPGROUP == 0) barrier_arrive<1>(ring.empty + 8 * released, 0);
                if (++released == T::STAGES) released = 0;
            };
            float cross[T::COUNT] = {};
            if (slices > 0) multiply_slices<T, A_INNER, B_INNER>(c, cross, slices, read, consumer, release, [] {});
            if (T::COMPONENTS > 1) add_cross<T>(c, cross);
        } else if (warp == 0) {
            if (threadIdx.x == 0)
                produce<T, A_INNER, B_INNER>(a, b, tile, begin * T::K, slices, ring, prefetch & (PREFETCH_A | PREFETCH_B));
            begin_epilogue();
        } else {
            if (warp == WARPGROUP / WARP - 1) pdl_wait_and_trigger();
            begin_epilogue();
            pdl_wait();
            const int64_t before = static_cast<int64_t>(rank) * tiles * summing * padded_columns(n);
            if (column_partials && warp <= summing)
                sum_columns<T>(tile, m, n, slices, ring, column_partials + before, warp - 1);
            else if (!column_partials && rank == 0)
                finish_columns<T>(tile, epilogue);
        }
        __syncthreads();  // nobody reads the stages any more
        if (consumer >= 0) sums.store(c, consumer);
        pdl_wait();
        // Components have padding behind column n, which must be 0, so a vector may not be written whole there.
        const bool is_aligned = epilogue.is_aligned() && (!Epilogue::WRITES_COMPONENTS || n % 4 == 0);
        is_aligned ? sums.template finish<true>(rank, epilogue) : sums.template finish<false>(rank, epilogue);
        if (SPLIT > 1) cluster_synchronize<SPLIT>();  // others still read this block's sums
    }
};

}  // namespace mlpgpu
