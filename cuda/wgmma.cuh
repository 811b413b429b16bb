// C = A · B on the tensor cores of sm_90a, from operands of 16 bits in global memory: bfloat16, or scaled
// float16 in one plane or two (docs/mathematics.md).
//
// A block is one producer and some consumers.  The producer, a thread, has the copy engine bring slices of A
// and B, 64 elements deep along k, to a ring of stages in shared memory.  Each consumer, a warpgroup,
// multiplies 64 rows of the tile, keeps C in registers, and gives stages back.  The blocks of a cluster
// compute neighbouring tiles: each brings its part of a slice that they share, to all of them at once.
// The grid is as large as the card, and a cluster takes one tile after another.
//
// With two planes a · b = hi · hi + 2^-11 (hi · lo + lo · hi).  Tensor cores truncate when they accumulate, so the first
// sum restarts with each slice, and is added to C by ordinary float32 additions.
#pragma once

#include "hopper.cuh"

namespace mlpgpu {

// Shape of a block's work; CLUSTER_M x CLUSTER_N neighbouring tiles make a cluster.
template <class Form_, int M_, int N_, int STAGES_, int CLUSTER_M_, int CLUSTER_N_>
struct WgmmaTile {
    using Form = Form_;  // of planes.cuh
    static constexpr int PLANES = Form::PLANES, M = M_, N = N_, STAGES = STAGES_;
    static constexpr int CLUSTER_M = CLUSTER_M_, CLUSTER_N = CLUSTER_N_, CLUSTER = CLUSTER_M * CLUSTER_N;
    static constexpr int K = 64, LINE = 128;  // elements of a slice, and the bytes that they take
    static constexpr int CONSUMERS = M / 64, COUNT = N / 2;  // a thread's elements of C
    static constexpr int A_BYTES = M * LINE, B_BYTES = N * LINE;  // of one plane
    static constexpr int STAGE_BYTES = PLANES * (A_BYTES + B_BYTES);
};

// An operand (outer, k) in planes.  OUTER: whether its lines run along the outer axis.
template <bool OUTER_>
struct Planes {
    static constexpr bool OUTER = OUTER_;
    const TensorMap* map;  // of (planes, rows, columns) as stored
};

// Where block after block of the cluster's tiles lies: columns of up to 8 tiles, so that what runs at the
// same time shares slices of A and of B that the L2 cache holds.
template <class T>
struct Scheduler {
    static constexpr int GROUP = 8;
    int tiles_m, tiles_n;  // of clusters
    int tile;

    __device__ __forceinline__ Scheduler(int m, int n)
        : tiles_m((m + T::CLUSTER_M * T::M - 1) / (T::CLUSTER_M * T::M)),
          tiles_n((n + T::CLUSTER_N * T::N - 1) / (T::CLUSTER_N * T::N)),
          tile(blockIdx.x / T::CLUSTER) {}

    __device__ __forceinline__ bool is_done() const { return tile >= tiles_m * tiles_n; }

    __device__ __forceinline__ void advance() { tile += gridDim.x / T::CLUSTER; }

    // First row and column of the cluster's tile.
    __device__ __forceinline__ void place(int& m0, int& n0) const {
        const int group = tile / (GROUP * tiles_n), within = tile % (GROUP * tiles_n);
        const int height = min(GROUP, tiles_m - group * GROUP);
        m0 = (group * GROUP + within % height) * (T::CLUSTER_M * T::M);
        n0 = within / height * (T::CLUSTER_N * T::N);
    }
};

// The ring of stages: of each, one barrier that is passed when it is full and one when it is empty.
template <class T>
struct Ring {
    uint32_t stages, full, empty;  // addresses
    int stage = 0, parity = 0;

    __device__ __forceinline__ explicit Ring(const void* shared)
        : stages((shared_address(shared) + 1023) & ~1023u),  // the swizzle follows the address
          full(stages + T::STAGES * T::STAGE_BYTES),
          empty(full + 8 * T::STAGES) {}

    // Whoever reads a slice that a block brings has to give its stage back: all blocks in that block's row and column.
    __device__ __forceinline__ void make() const {
        for (int i = 0; i < T::STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, T::CONSUMERS * (T::CLUSTER_M + T::CLUSTER_N - 1));
        }
        barrier_publish();
    }

    __device__ __forceinline__ uint32_t address() const { return stages + stage * T::STAGE_BYTES; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full + 8 * stage, parity); }
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + 8 * stage, parity ^ 1); }

    __device__ __forceinline__ void advance() {
        if (++stage == T::STAGES) stage = 0, parity ^= 1;
    }
};

// A block's place in the cluster: its tile is `m` tiles down and `n` to the right.
template <class T>
struct Place {
    int rank, m, n;

    __device__ __forceinline__ Place() : rank(T::CLUSTER > 1 ? cluster_rank() : 0), m(rank % T::CLUSTER_M), n(rank / T::CLUSTER_M) {}

    // Blocks in the same row share slices of A, blocks in the same column slices of B.
    __device__ __forceinline__ uint16_t row() const {
        uint16_t mask = 0;
        for (int i = 0; i < T::CLUSTER_N; ++i) mask |= 1 << (m + i * T::CLUSTER_M);
        return mask;
    }
    __device__ __forceinline__ uint16_t column() const { return ((1 << T::CLUSTER_M) - 1) << (n * T::CLUSTER_M); }

    // The i-th of the blocks in this one's row or column, this one among them.
    __device__ __forceinline__ int neighbour(int i) const {
        if (i < T::CLUSTER_N) return m + i * T::CLUSTER_M;
        const int other = i - T::CLUSTER_N;
        return n * T::CLUSTER_M + other + (other >= m);
    }
};

// One plane's slice of SIZE outer elements: this block brings part `part` of SHARE.
template <int SIZE, int SHARE, bool OUTER>
__device__ __forceinline__ void bring(uint32_t destination, const TensorMap* map, uint32_t barrier, int outer0, int k0,
                                      int plane, int part, uint16_t mask) {
    constexpr int LINES = (OUTER ? 64 : SIZE) / SHARE;
    for (int atom = 0; atom < (OUTER ? SIZE / 64 : 1); ++atom) {
        const uint32_t at = destination + (atom * 64 + part * LINES) * 128;
        const int x = OUTER ? outer0 + atom * 64 : k0, y = (OUTER ? k0 : outer0) + part * LINES;
        if (SHARE > 1)
            tensor_copy(at, map, barrier, x, y, plane, mask);
        else
            tensor_copy(at, map, barrier, x, y, plane);
    }
}

template <class T, class A, class B>
__device__ __forceinline__ void produce(const A& a, const B& b, int m, int n, int k_begin, int slices, Ring<T> ring) {
    tensor_map_acquire(a.map);
    tensor_map_acquire(b.map);
    const Place<T> place;
    const uint16_t row = place.row(), column = place.column();
    for (Scheduler<T> scheduler(m, n); !scheduler.is_done(); scheduler.advance()) {
        int m0, n0;
        scheduler.place(m0, n0);
        m0 += place.m * T::M;
        n0 += place.n * T::N;
        for (int slice = 0; slice < slices; ++slice) {
            const int k0 = k_begin + slice * T::K;
            ring.wait_empty();
            const uint32_t full = ring.full + 8 * ring.stage;
            barrier_expect(full, T::STAGE_BYTES);
            for (int plane = 0; plane < T::PLANES; ++plane) {
                const uint32_t at_a = ring.address() + plane * T::A_BYTES;
                const uint32_t at_b = ring.address() + T::PLANES * T::A_BYTES + plane * T::B_BYTES;
                bring<T::M, T::CLUSTER_N, A::OUTER>(at_a, a.map, full, m0, k0, plane, place.n, row);
                bring<T::N, T::CLUSTER_M, B::OUTER>(at_b, b.map, full, n0, k0, plane, place.m, column);
            }
            ring.advance();
        }
    }
}

// The products of one slice for 64 rows of the tile.
template <class T, bool A_OUTER, bool B_OUTER>
struct Slices {
    // From 16 elements along k to the next 16, and from 64 outer elements to the next, in bytes.
    static constexpr int A_STEP = A_OUTER ? 16 * T::LINE : 32, B_STEP = B_OUTER ? 16 * T::LINE : 32;
    static constexpr int ATOM = 64 * T::LINE;
    uint64_t a, b;  // of the first planes

    __device__ __forceinline__ Slices(uint32_t stage, int consumer)
        : a(wgmma_descriptor(stage + consumer * ATOM, ATOM)),
          b(wgmma_descriptor(stage + T::PLANES * T::A_BYTES, ATOM)) {}

    // c += A's plane · B's plane; `add` false: c is overwritten.
    __device__ __forceinline__ void multiply(float (&c)[T::COUNT], int a_plane, int b_plane, bool add) const {
#pragma unroll
        for (int step = 0; step < T::K / 16; ++step)
            Wgmma<A_OUTER, B_OUTER>::multiply(ElementIs<T::Form::HALF>(), c, a + (a_plane * T::A_BYTES + step * A_STEP) / 16,
                                              b + (b_plane * T::B_BYTES + step * B_STEP) / 16, add || step > 0);
    }
};

// Each of a consumer's threads hands its part of C to the epilogue as quads, four neighbouring columns of
// a row: it swaps pairs with the thread beside it.
template <class T, class Epilogue>
__device__ __forceinline__ void finish(const float (&c)[T::COUNT], int m0, int n0, int m, int n,
                                       const Epilogue& epilogue) {
    constexpr int BATCH = 8;  // quads whose reads are on their way together
    const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    const bool odd = lane & 1;
    const int row0 = m0 + thread / WARP * 16 + lane / 4;
    const int column0 = n0 + (odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
    for (int first = 0; first < T::COUNT / 4; first += BATCH) {
        typename Epilogue::Read read[BATCH];
        float4 quads[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            // Two quads, of rows 8 apart, lie in each pair of blocks of eight columns.
            const int pair = (first + i) / 2, half = (first + i) % 2;
            const int row = row0 + 8 * half, column = column0 + 16 * pair;
            const float* left = c + 8 * pair + 2 * half;
            const float* right = left + 4;
            const float x = __shfl_xor_sync(WARP_ALL, odd ? left[0] : right[0], 1);
            const float y = __shfl_xor_sync(WARP_ALL, odd ? left[1] : right[1], 1);
            quads[i] = odd ? make_float4(x, y, right[0], right[1]) : make_float4(left[0], left[1], x, y);
            if (row < m && column < n) read[i] = epilogue.read(row, column);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int row = row0 + 8 * ((first + i) % 2), column = column0 + 16 * ((first + i) / 2);
            if (row < m && column < n) epilogue.write(row, column, quads[i], read[i]);
        }
    }
}

template <class T, class A, class B, class Epilogue>
__device__ __forceinline__ void consume(int m, int n, int slices, Ring<T> ring, const Epilogue& epilogue) {
    using Slice = Slices<T, A::OUTER, B::OUTER>;
    const Place<T> place;
    const int consumer = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    int given_back = 0;
    const auto give_back = [&] {
        if (thread < T::CLUSTER_M + T::CLUSTER_N - 1)
            barrier_arrive(ring.empty + 8 * given_back, place.neighbour(thread));
        if (++given_back == T::STAGES) given_back = 0;
    };
    for (Scheduler<T> scheduler(m, n); !scheduler.is_done(); scheduler.advance()) {
        int m0, n0;
        scheduler.place(m0, n0);
        m0 += place.m * T::M + consumer * 64;
        n0 += place.n * T::N;
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
                ring.advance();
            }
            wgmma_wait<0>();
            give_back();
            for (int i = 0; i < T::COUNT; ++i) c[i] = fmaf(cross[i], 0x1p-11f, c[i]);
        }
        finish<T>(c, m0, n0, m, n, epilogue);
    }
}

// C (m, n) = A (m, k) · B (k, n).  Threads: a warpgroup for the producer and one for each consumer.
// Grid: (clusters · CLUSTER,), any number of clusters.
template <class T, class A, class B, class Epilogue>
__device__ __forceinline__ void wgmma_product(const A& a, const B& b, int m, int n, int k, const Epilogue& epilogue) {
    SHARED(unsigned char, shared);
    const Ring<T> ring(shared);
    if (threadIdx.x == 0) ring.make();
    if (T::CLUSTER > 1)
        cluster_synchronize();
    else
        __syncthreads();
    // Of nothing, one slice beyond the border, where the copy engine reads zeros.
    const int k_begin = k > 0 ? 0 : 1 << 30, slices = max(1, (k + T::K - 1) / T::K);
    if (threadIdx.x < WARPGROUP) {
        registers_lower<40>();
        if (threadIdx.x == 0) produce<T>(a, b, m, n, k_begin, slices, ring);
    } else {
        registers_raise<232>();
        consume<T, A, B>(m, n, slices, ring, epilogue);
    }
    if (T::CLUSTER > 1) cluster_synchronize();  // others still write to this block's shared memory
}

}  // namespace mlpgpu
