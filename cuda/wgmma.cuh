// C = A · B on the tensor cores of sm_90a, from operands of 16 bits in global memory: bfloat16, or scaled
// float16 in one plane or two (docs/mathematics.md).
//
// A block is one producer and some consumers.  The producer, a thread, has the copy engine bring slices of A
// and B, 64 elements deep along k, to a ring of stages in shared memory.  Each consumer, a warpgroup,
// multiplies 64 rows of the tile, keeps C in registers, and gives stages back.  The blocks of a cluster
// compute neighbouring tiles: each brings its part of a slice that they share, to all of them at once.
// The grid is as large as the card, and a cluster takes one tile after another.
//
// With two planes a · b = hi · hi + 2^-11 (hi · lo + lo · hi), and for few k + 2^-22 lo · lo.  Tensor cores truncate when they accumulate, so
// the first sum restarts with each slice, and is added to C by ordinary float32 additions.
#pragma once

#include "hopper.cuh"
#include "tensor_update.cuh"

namespace mlpgpu {

// Shape of a block's work.  A cluster is CLUSTER tiles, one below the other, that share their columns of B.
template <class Form_, int M_, int N_, int STAGES_, int CLUSTER_>
struct WgmmaTile {
    using Form = Form_;  // of planes.cuh
    static constexpr int PLANES = Form::PLANES, M = M_, N = N_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int K = 64, LINE = 128;  // elements of a slice, and the bytes that they take
    static constexpr int CONSUMERS = M / 64, COUNT = N / 2;  // a thread's elements of C
    static constexpr int A_BYTES = M * LINE, B_BYTES = N * LINE;  // of one plane
    static constexpr int STAGE_BYTES = PLANES * (A_BYTES + B_BYTES), ALIGNMENT = 1024;  // the swizzle follows the address
    // A warp's patch of C on its way to the epilogue, 16 rows; two rows of pairs lie in different banks.
    static constexpr int PATCH_WIDTH = 32, PATCH_PITCH = PATCH_WIDTH + 8, PATCH = 16 * PATCH_PITCH;
};

// A block's tiles, one after another.  Clusters go down columns of up to 16 tiles, so that what runs at the
// same time shares slices of A and of B that the L2 cache holds.
template <class T>
struct Scheduler {
    static constexpr int GROUP = 16 / T::CLUSTER;
    int tiles_m, tiles_n;  // tiles_m of clusters
    int tile;

    __device__ __forceinline__ Scheduler(int m, int n)
        : tiles_m((m + T::CLUSTER * T::M - 1) / (T::CLUSTER * T::M)),
          tiles_n((n + T::N - 1) / T::N),
          tile(blockIdx.x / T::CLUSTER) {}

    __device__ __forceinline__ bool is_done() const { return tile >= tiles_m * tiles_n; }

    __device__ __forceinline__ void advance() { tile += gridDim.x / T::CLUSTER; }

    // First row and column of the tile of the cluster's block `rank`.
    __device__ __forceinline__ void place(int rank, int& m0, int& n0) const {
        const int group = tile / (GROUP * tiles_n), within = tile % (GROUP * tiles_n);
        const int height = min(GROUP, tiles_m - group * GROUP);
        m0 = ((group * GROUP + within % height) * T::CLUSTER + rank) * T::M;
        n0 = within / height * T::N;
    }
};

// One plane's slice of SIZE rows or columns of C: of SHARE parts, one for each block that shares it, this
// block brings one, to all.  INNER: whether the operand's lines run along k; otherwise they come by 64.
template <int SIZE, int SHARE, bool INNER>
__device__ __forceinline__ void bring(uint32_t destination, const TensorMap* map, uint32_t barrier, int outer0, int k0,
                                      int plane, int part) {
    constexpr int LINES = (INNER ? SIZE : 64) / SHARE;
    for (int atom = 0; atom < (INNER ? 1 : SIZE / 64); ++atom) {
        const uint32_t at = destination + (atom * 64 + part * LINES) * 128;
        const int x = INNER ? k0 : outer0 + atom * 64, y = (INNER ? outer0 : k0) + part * LINES;
        if (SHARE > 1)
            tensor_copy_to_all<SHARE>(at, map, barrier, x, y, plane);
        else
            tensor_copy(at, map, barrier, x, y, plane);
    }
}

template <class T, bool A_INNER, bool B_INNER>
__device__ __forceinline__ void produce(const TensorMap* a, const TensorMap* b, int m, int n, int k_begin, int slices,
                                        Ring<T> ring) {
    tensor_map_acquire(a);
    tensor_map_acquire(b);
    const int rank = cluster_rank<T::CLUSTER>();
    for (Scheduler<T> scheduler(m, n); !scheduler.is_done(); scheduler.advance()) {
        int m0, n0;
        scheduler.place(rank, m0, n0);
        for (int slice = 0; slice < slices; ++slice) {
            const int k0 = k_begin + slice * T::K;
            ring.wait_empty();
            const uint32_t full = ring.full + 8 * ring.stage;
            barrier_expect(full, T::STAGE_BYTES);
            for (int plane = 0; plane < T::PLANES; ++plane) {
                const uint32_t at_a = ring.address() + plane * T::A_BYTES;
                const uint32_t at_b = ring.address() + T::PLANES * T::A_BYTES + plane * T::B_BYTES;
                bring<T::M, 1, A_INNER>(at_a, a, full, m0, k0, plane, 0);
                bring<T::N, T::CLUSTER, B_INNER>(at_b, b, full, n0, k0, plane, rank);
            }
            ring.advance();
        }
    }
}

// The products of one slice for 64 rows of the tile.
template <class T, bool A_INNER, bool B_INNER>
struct Slices {
    // From 16 elements along k to the next 16, and from 64 outer elements to the next, in bytes.
    static constexpr int A_STEP = A_INNER ? 32 : 16 * T::LINE, B_STEP = B_INNER ? 32 : 16 * T::LINE;
    static constexpr int ATOM = 64 * T::LINE;
    uint64_t a, b;  // of the first planes

    __device__ __forceinline__ Slices(uint32_t stage, int consumer)
        : a(wgmma_descriptor(stage + consumer * ATOM, ATOM)),
          b(wgmma_descriptor(stage + T::PLANES * T::A_BYTES, ATOM)) {}

    // c += A's plane · B's plane; `add` false: c is overwritten.
    __device__ __forceinline__ void multiply(float (&c)[T::COUNT], int a_plane, int b_plane, bool add) const {
#pragma unroll
        for (int step = 0; step < T::K / 16; ++step) {
            const uint64_t from_a = a + (a_plane * T::A_BYTES + step * A_STEP) / 16;
            const uint64_t from_b = b + (b_plane * T::B_BYTES + step * B_STEP) / 16;
            Wgmma<A_INNER, B_INNER>::multiply(ElementIs<T::Form::HALF>(), c, from_a, from_b, add || step > 0);
        }
    }
};

// Hands a consumer's part of C, from row m0 and column n0 on, to the epilogue (epilogues.cuh).  Each warp lays 16 rows
// and 32 columns at a time out in its patch of shared memory and takes them back as quads, 8 lanes to a row, so that
// memory is read and written in whole lines.
template <class T, class Epilogue>
struct HandOver {
    static constexpr int WIDTH = T::PATCH_WIDTH, PITCH = T::PATCH_PITCH, LANES = WIDTH / 4, QUADS = 16 * LANES / WARP;
    static constexpr int PATCHES = T::N / WIDTH;
    using Read = typename Epilogue::Read;
    using Lines = typename Epilogue::Lines;
    // Where registers hold all that the epilogue reads, it is on its way while the product is made.
    static constexpr int SUMS = T::PLANES == 1 ? T::COUNT : 3 * T::COUNT;
    static constexpr int READ_WORDS = sizeof(Read) / 4, LINE_WORDS = sizeof(Lines) / 4;
    static constexpr bool EARLY = SUMS + PATCHES * QUADS * READ_WORDS + QUADS * LINE_WORDS <= 192;

    const Epilogue& epilogue;
    int m0, n0, m, n;
    Read early[EARLY ? PATCHES : 1][EARLY ? QUADS : 1];

    __device__ __forceinline__ HandOver(const Epilogue& epilogue, int m0, int n0, int m, int n)
        : epilogue(epilogue), m0(m0 + threadIdx.x % WARPGROUP / WARP * 16), n0(n0), m(m), n(n) {
        if constexpr (EARLY) {
            if (!epilogue.is_aligned()) return;
#pragma unroll
            for (int each = 0; each < PATCHES; ++each)
#pragma unroll
                for (int i = 0; i < QUADS; ++i) early[each][i] = read<true>(each, i);
        }
    }

    // Quad i of a lane in a patch.
    __device__ __forceinline__ int line(int i) const { return i * (16 / QUADS) + threadIdx.x % WARP / LANES; }
    __device__ __forceinline__ int column(int each) const { return n0 + each * WIDTH + threadIdx.x % LANES * 4; }
    __device__ __forceinline__ bool inside(int each, int i) const { return m0 + line(i) < m && column(each) < n; }

    template <bool ALIGNED>
    __device__ __forceinline__ Read read(int each, int i) const {
        return inside(each, i) ? epilogue.template read<ALIGNED>(m0 + line(i), column(each)) : Read();
    }

    __device__ __forceinline__ Lines lines(int each, int i) const {
        return inside(each, i) ? epilogue.lines(m0 + line(i), column(each)) : Lines();
    }

    __device__ __forceinline__ void lay_out(const float* c, float* patch) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
            float* const to = patch + (lane / 4 + i % 2 * 8) * PITCH + i / 2 * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = make_float2(c[i * 2], c[i * 2 + 1]);
        }
    }

    template <bool ALIGNED>
    __device__ __forceinline__ void finish(const float* patch, int each, int i, const Read& read, const Lines& lines) const {
        const int row = m0 + line(i);
        float4 quad = *reinterpret_cast<const float4*>(patch + line(i) * PITCH + threadIdx.x % LANES * 4);
        epilogue.settle(row, column(each), quad, lines);
        if (inside(each, i)) epilogue.template write<ALIGNED>(row, column(each), quad, read);
    }

    __device__ __forceinline__ void run(const float (&c)[T::COUNT], float* patch) const {
        if (!epilogue.is_aligned())
            in_turn<false>(c, patch);
        else if constexpr (EARLY)
            all_at_once(c, patch);
        else
            in_turn<true>(c, patch);
    }

    __device__ __forceinline__ void all_at_once(const float (&c)[T::COUNT], float* patch) const {
#pragma unroll
        for (int each = 0; each < PATCHES; ++each) {
            Lines known[QUADS];
#pragma unroll
            for (int i = 0; i < QUADS; ++i) known[i] = lines(each, i);
            lay_out(c + each * (WIDTH / 2), patch);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < QUADS; ++i) finish<true>(patch, each, i, early[each][i], known[i]);
            __syncwarp();
        }
    }

    // Loads of GROUP quads are on their way together, and, where registers allow, one patch ahead.  The epilogue's code
    // stands here once.
    template <bool ALIGNED>
    __device__ __forceinline__ void in_turn(const float (&c)[T::COUNT], float* patch) const {
        constexpr int WORDS = READ_WORDS + LINE_WORDS;
        constexpr bool AHEAD = ALIGNED && WORDS <= 4;
        constexpr int GROUP = !ALIGNED ? 1 : READ_WORDS <= 8 && WORDS <= 12 ? QUADS : 2;
        Read known[GROUP], next[GROUP];
        Lines its_lines[GROUP];
#pragma unroll
        for (int i = 0; AHEAD && i < GROUP; ++i) next[i] = read<ALIGNED>(0, i);
#pragma unroll 1
        for (int each = 0; each < PATCHES; ++each) {
#pragma unroll
            for (int i = 0; AHEAD && i < GROUP; ++i) {
                known[i] = next[i];
                if (each + 1 < PATCHES) next[i] = read<ALIGNED>(each + 1, i);
            }
#pragma unroll
            for (int held = 0; held < PATCHES; ++held)
                if (held == each) lay_out(c + held * (WIDTH / 2), patch);  // registers have no index at run time
            __syncwarp();
#pragma unroll 1
            for (int first = 0; first < QUADS; first += GROUP) {
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    if (!AHEAD) known[i] = read<ALIGNED>(each, first + i);
                    its_lines[i] = lines(each, first + i);
                }
#pragma unroll
                for (int i = 0; i < GROUP; ++i) finish<ALIGNED>(patch, each, first + i, known[i], its_lines[i]);
            }
            __syncwarp();
        }
    }
};

template <class T, bool A_INNER, bool B_INNER, class Epilogue>
__device__ __forceinline__ void consume(int m, int n, int slices, Ring<T> ring, float* patches,
                                        const Epilogue& epilogue) {
    using Slice = Slices<T, A_INNER, B_INNER>;
    const int rank = cluster_rank<T::CLUSTER>();
    const int consumer = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    float* const patch = patches + (threadIdx.x - WARPGROUP) / WARP * T::PATCH;
    int given_back = 0;
    const auto give_back = [&] {
        if (thread < T::CLUSTER) barrier_arrive<T::CLUSTER>(ring.empty + 8 * given_back, thread);
        if (++given_back == T::STAGES) given_back = 0;
    };
    for (Scheduler<T> scheduler(m, n); !scheduler.is_done(); scheduler.advance()) {
        int m0, n0;
        scheduler.place(rank, m0, n0);
        m0 += consumer * 64;
        HandOver<T, Epilogue> hand_over(epilogue, m0, n0, m, n);
        float c[T::COUNT] = {};
        if constexpr (T::PLANES == 1) {
            ring.wait_full();
            wgmma_fence();
            Slice(ring.address(), consumer).multiply(c, 0, 0, false);
            wgmma_commit();
            ring.advance();
            for (int slice = 1; slice < slices; ++slice) {
                ring.wait_full();
                wgmma_fence();
                Slice(ring.address(), consumer).multiply(c, 0, 0, true);
                wgmma_commit();
                ring.advance();
                wgmma_wait<1>();
                give_back();  // the slice before
            }
            wgmma_wait<0>();
            give_back();
        } else {
            float high[T::COUNT], cross[T::COUNT] = {};
            for (int slice = 0; slice < slices; ++slice) {
                ring.wait_full();
                const Slice planes(ring.address(), consumer);
                wgmma_fence();
                planes.multiply(high, 0, 0, false);
                wgmma_commit();
                wgmma_wait<1>();
                if (slice > 0) give_back();  // the slice before
                wgmma_fence();
                planes.multiply(cross, 0, 1, true);
                planes.multiply(cross, 1, 0, true);
                wgmma_commit();
                wgmma_wait<1>();
                for (int i = 0; i < T::COUNT; ++i) c[i] += high[i];
                if (slices <= SHORT_DEPTH / T::K) {
                    wgmma_fence();
                    planes.multiply(high, 1, 1, false);
                    wgmma_commit();
                    wgmma_wait<0>();
                    for (int i = 0; i < T::COUNT; ++i) c[i] = fmaf(high[i], 0x1p-22f, c[i]);
                }
                ring.advance();
            }
            wgmma_wait<0>();
            give_back();
            for (int i = 0; i < T::COUNT; ++i) c[i] = fmaf(cross[i], 0x1p-11f, c[i]);
        }
        hand_over.run(c, patch);
    }
}

// By the producer's other warps, which have nothing else to do.
template <class T, class Epilogue>
__device__ __forceinline__ void finish_columns(int m, int n, const Epilogue& epilogue) {
    for (Scheduler<T> scheduler(m, n); !scheduler.is_done(); scheduler.advance()) {
        int m0, n0;
        scheduler.place(cluster_rank<T::CLUSTER>(), m0, n0);
        if (m0 == 0) epilogue.columns(n0, T::N, threadIdx.x - WARP, WARPGROUP - WARP);
    }
}

// As a product of tensor_dense.cuh.  Threads: a warpgroup for the producer and one for each consumer.
// Grid: any number of clusters, of one dimension.
template <class T>
struct WgmmaProduct {
    using Form = typename T::Form;
    using Source = const TensorMap*;  // the maps know planes and pitches

    template <bool A_INNER, bool B_INNER, class Epilogue>
    static __device__ __forceinline__ void multiply(Source a, int64_t, int, Source b, int64_t, int, int m, int n, int k,
                                                    const Epilogue& epilogue) {
        SHARED(float, patches);
        const Ring<T> ring(patches + 4 * T::CONSUMERS * T::PATCH);
        if (threadIdx.x == 0) ring.make();
        cluster_synchronize<T::CLUSTER>();
        // Of nothing, one slice beyond the border, where the copy engine reads zeros.
        const int k_begin = k > 0 ? 0 : 1 << 30, slices = max(1, (k + T::K - 1) / T::K);
        if (threadIdx.x < WARPGROUP) {
            if (T::CONSUMERS > 1) registers_lower<40>();
            if (threadIdx.x == 0) produce<T, A_INNER, B_INNER>(a, b, m, n, k_begin, slices, ring);
            if (threadIdx.x >= WARP) finish_columns<T>(m, n, epilogue);
        } else {
            if (T::CONSUMERS > 1) registers_raise<232>();
            consume<T, A_INNER, B_INNER>(m, n, slices, ring, patches, epilogue);
        }
        if (T::CLUSTER > 1) cluster_synchronize<T::CLUSTER>();  // others still write to this block's shared memory
    }
};

}  // namespace mlpgpu
