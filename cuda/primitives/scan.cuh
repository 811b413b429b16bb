// Prefix sums of any length in one pass over memory, in an order that does not depend on timing.
//
// A block takes the next tile that no block has taken, and works on several at once: some are in flight from memory;
// the next one has arrived, and the block stores its sum to `sums` for all to read; and the tile whose sum it stored a
// step before is written out, with the sum of all tiles before it, which the other blocks have stored meanwhile. So
// tiles and sums are there when they are needed, and memory is never idle.
//
// The sum of tiles 0 … t - 1 is that of whole groups of 32 tiles, one after the other, and of the tiles of t's group
// before it. Each group is added up by a tree. A float's bits are the same in every run and on every card. Source of
// the waiting between tiles: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016,
// where a tile takes whatever sums it finds.
#pragma once

#include "common/async_copy.cuh"
#include "common/reduce.cuh"

namespace mlpgpu {

// Sums over lanes 0 … lane - 1, by an up-sweep and a down-sweep over a tree of the warp's lanes; `total` is the sum
// over all.
// Source: Brent and Kung, "A regular layout for parallel adders", 1982.
template <class T>
__device__ __forceinline__ T warp_scan(T value, T& total) {
    const int rank = threadIdx.x % WARP + 1;
#pragma unroll
    for (int width = 1; width < WARP; width *= 2) {
        const T left = __shfl_up_sync(WARP_ALL, value, width);
        if (rank % (2 * width) == 0) value = left + value;
    }
#pragma unroll
    for (int width = WARP / 4; width > 0; width /= 2) {
        const T left = __shfl_up_sync(WARP_ALL, value, width);
        if (rank % (2 * width) == width && rank > width) value = left + value;
    }
    total = __shfl_sync(WARP_ALL, value, WARP - 1);
    const T before = __shfl_up_sync(WARP_ALL, value, 1);
    return rank == 1 ? T(0) : before;
}

// The sum of the warps before the caller's, where `of_warp` is a warp's sum in each of its lanes; and the block's
// total. `scratch` holds one T for each of WARPS warps.
template <int WARPS, class T>
__device__ __forceinline__ T block_sums_before(T of_warp, T& total, T* scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) scratch[warp] = of_warp;
    __syncthreads();
    const T before = warp_scan(lane < WARPS ? scratch[lane] : T(0), total);
    return __shfl_sync(WARP_ALL, before, warp);
}

// A word of `sums` is 0 until its tile's sum is stored; the word of a sum is never 0.
constexpr uint64_t SUM_READY = uint64_t(1) << 32;

__device__ __forceinline__ uint64_t word_of(int sum) { return SUM_READY | static_cast<uint32_t>(sum); }
__device__ __forceinline__ uint64_t word_of(float sum) { return SUM_READY | __float_as_uint(sum); }
__device__ __forceinline__ uint64_t word_of(double sum) {
    // A double takes all 64 bits. Inverted they are 0 for only one of many NaNs, which is replaced by another.
    return ~static_cast<uint64_t>(__double_as_longlong(sum == sum ? sum : double(NAN)));
}
__device__ __forceinline__ void sum_of(uint64_t word, int& sum) { sum = static_cast<int>(word); }
__device__ __forceinline__ void sum_of(uint64_t word, float& sum) {
    sum = __uint_as_float(static_cast<uint32_t>(word));
}
__device__ __forceinline__ void sum_of(uint64_t word, double& sum) {
    sum = __longlong_as_double(static_cast<long long>(~word));
}

// The type in which groups are added up, of which there may be thousands.
template <class T> struct Wide { using Type = T; };
template <> struct Wide<float> { using Type = double; };

// A tile of a block.
template <class T>
struct ScanTile {
    static constexpr int THREADS = 512, WARPS = THREADS / WARP, ROUNDS = 3, VECTOR = 16 / sizeof(T), STAGES = 2;
    static constexpr int OF_WARP = WARP * ROUNDS * VECTOR, SIZE = WARPS * OF_WARP;
    struct alignas(16) Vector { T of[VECTOR]; };
    // The stages; for each warp the sum of a group of tiles, in the widest type, and its own sum; the number of a tile.
    static constexpr int SHARED_BYTES = STAGES * SIZE * sizeof(T) + WARPS * (sizeof(double) + sizeof(T)) + sizeof(int);

    int number;  // among all tiles; numbers from their count on stand for no tile
    Vector values[ROUNDS];  // of the thread
    T before;  // sum of the tile's warps before the thread's
};

// The sum of the tiles before a tile, asked for tile after tile. Whole groups are added only once.
template <class T, int WARPS>
struct TilesBefore {
    using Sum = typename Wide<T>::Type;
    const uint64_t* sums;  // of all tiles
    Sum* scratch;          // (WARPS,)
    Sum total = 0;
    int groups = 0;  // that `total` has

    // Sum of tiles 0 … tile - 1, in every thread.
    __device__ __forceinline__ T sum(int tile) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, last = tile / WARP;
        for (;;) {
            // Each warp adds up a group, each lane loads one of its tiles.
            const int other = (groups + warp) * WARP + lane;
            T value = T(0);
            if (other < tile) {
                uint64_t word = load_word(sums + other);
                while (!word) {
                    pause_spinning();
                    word = load_word(sums + other);
                }
                sum_of(word, value);
            }
            __syncwarp();
            value = warp_sum(value);
            if (lane == 0) scratch[warp] = value;
            __syncthreads();
            const int whole = min(last - groups, WARPS);
#pragma unroll 1
            for (int i = 0; i < whole; ++i) total += scratch[i];
            groups += whole;
            if (whole < WARPS) return static_cast<T>(total + scratch[whole]);
            __syncthreads();
        }
    }
};

// y_i = x_0 + … + x_i, or without x_i if `exclusive`; x and y (n,) may be the same array. tile_sums (1 + tiles,) are 0
// before the launch, and again after it: the first word counts the tiles that were taken, and the blocks that are done.
// Grid: any; blocks that do not run with the first ones find nothing left to do.
template <class T>
__device__ __forceinline__ void prefix_sum(const T* x, T* y, int64_t n, int exclusive, uint64_t* tile_sums) {
    using Tile = ScanTile<T>;
    using Vector = typename Tile::Vector;
    SHARED(Vector, slots);  // (STAGES, ROUNDS, THREADS): each thread uses only its vectors
    constexpr int OF_SLOT = Tile::ROUNDS * Tile::THREADS;
    auto* const of_groups = reinterpret_cast<typename Wide<T>::Type*>(slots + Tile::STAGES * OF_SLOT);  // (WARPS,)
    T* const of_warps = reinterpret_cast<T*>(of_groups + Tile::WARPS);                                 // (WARPS,)
    int* const taken = reinterpret_cast<int*>(of_warps + Tile::WARPS);                                 // a tile
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int tiles = static_cast<int>(ceil_div(n, Tile::SIZE));
    unsigned *const ticket = reinterpret_cast<unsigned*>(tile_sums), *const done = ticket + 1;
    uint64_t* const sums = tile_sums + 1;

    // Calls use(round, i, whole) for each of the thread's vectors of a tile, whose elements are x_i ….
    const auto for_vectors = [&](int tile, const T* array, auto use) {
        const bool whole = (tile + 1ll) * Tile::SIZE <= n && reinterpret_cast<uintptr_t>(array) % 16 == 0;
        const int64_t first = static_cast<int64_t>(tile) * Tile::SIZE + warp * Tile::OF_WARP + lane * Tile::VECTOR;
#pragma unroll
        for (int round = 0; round < Tile::ROUNDS; ++round) use(round, first + round * WARP * Tile::VECTOR, whole);
    };
    const auto slot = [&](int stage, int round) {
        return slots + stage * OF_SLOT + round * Tile::THREADS + threadIdx.x;
    };
    const auto fetch = [&](int stage, int tile) {
        if (tile < tiles) {
            for_vectors(tile, x, [&](int round, int64_t offset, bool whole) {
                T* const to = slot(stage, round)->of;
                if (whole) {
                    copy_async<16>(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(x + offset));
                } else {
                    for (int i = 0; i < Tile::VECTOR; ++i) to[i] = offset + i < n ? x[offset + i] : T(0);
                }
            });
        }
        commit_copies();
    };
    const auto store = [&](const Tile& tile, T start) {
        for_vectors(tile.number, y, [&](int round, int64_t offset, bool whole) {
            Vector vector;
            for (int i = 0; i < Tile::VECTOR; ++i) vector.of[i] = start + tile.values[round].of[i];
            if (whole) {
                *reinterpret_cast<Vector*>(y + offset) = vector;
            } else {
                for (int i = 0; i < Tile::VECTOR; ++i)
                    if (offset + i < n) y[offset + i] = vector.of[i];
            }
        });
    };
    // Replaces each value by the sum of its warp's values up to it, and returns the sum of all.
    const auto add_up = [&](Tile& tile) {
        T of_warp = T(0);
#pragma unroll
        for (int round = 0; round < Tile::ROUNDS; ++round) {
            T* const value = tile.values[round].of;
            T of_thread = value[0], total;
            for (int i = 1; i < Tile::VECTOR; ++i) of_thread = of_thread + value[i];
            T sum = of_warp + warp_scan(of_thread, total);
            for (int i = 0; i < Tile::VECTOR; ++i) {
                const T next = sum + value[i];
                value[i] = exclusive ? sum : next;
                sum = next;
            }
            of_warp = of_warp + total;
        }
        return of_warp;
    };

    // Thread 0 asks for a tile one step before it is taken.
    unsigned asked = threadIdx.x == 0 ? atomicAdd(ticket, 1u) : 0;
    const auto take = [&] {
        if (threadIdx.x != 0) return;
        *taken = static_cast<int>(asked);
        asked = atomicAdd(ticket, 1u);
    };
    int coming[Tile::STAGES];  // tiles, in the order of their stages
#pragma unroll
    for (int stage = 0; stage < Tile::STAGES; ++stage) {
        take();
        __syncthreads();
        fetch(stage, coming[stage] = *taken);
        __syncthreads();
    }
    TilesBefore<T, Tile::WARPS> tiles_before{sums, of_groups};
    Tile now, next;  // what a step writes out, and what it adds up
    now.number = tiles;  // none
    for (int stage = 0;; stage = (stage + 1) % Tile::STAGES) {
        next.number = coming[0];
        wait_copies<Tile::STAGES - 1>();
        for (int round = 0; round < Tile::ROUNDS; ++round) next.values[round] = *slot(stage, round);
        const T of_warp = next.number < tiles ? add_up(next) : T(0);
        T of_tile;
        take();
        next.before = block_sums_before<Tile::WARPS>(of_warp, of_tile, of_warps);
        if (threadIdx.x == 0 && next.number < tiles) store_word(sums + next.number, word_of(of_tile));
        for (int i = 1; i < Tile::STAGES; ++i) coming[i - 1] = coming[i];
        fetch(stage, coming[Tile::STAGES - 1] = *taken);
        if (now.number < tiles) {
            const T start = tiles_before.sum(now.number);
            store(now, start + now.before);
        } else {
            __syncthreads();  // all threads have read `taken`, as after sum()
        }
        now = next;
        if (now.number >= tiles) break;
    }
    if (!was_last(arrive(done), taken)) return;
    for (int tile = threadIdx.x; tile < tiles; tile += Tile::THREADS) sums[tile] = 0;
    if (threadIdx.x == 0) *ticket = 0;
}

}  // namespace mlpgpu
