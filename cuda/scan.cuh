// Prefix sums of any length in one pass over memory, in an order that does not depend on timing.
//
// A block takes the next tile that nobody has taken, adds it up, and learns what all tiles before it come to from
// words that their blocks left in `nodes`.  Those are the nodes of a tree whose inner ones have 1,024 children: each
// tile leaves its own sum, the last of 1,024 tiles also theirs, and so on.  Tiles 0 … t - 1 are then up to 1,023 nodes
// of each level, which the block's threads fetch side by side; as many as run at once have one parent or two, so most
// blocks wait for words alone that wait for nothing.  Every sum has its fixed tree: a float's bits are the same in
// every run.
// Source of the waiting between tiles: Merrill and Garland, "Single-pass parallel prefix scan with decoupled
// look-back", 2016, where a tile takes whatever sums it finds.
#pragma once

#include "portable.cuh"

namespace mlpgpu {

// Sums over lanes 0 … lane - 1, by sweeping up a tree of the warp's lanes and down again; `total` is that of all.
// Source: Blelloch, "Prefix sums and their applications", 1990.
template <class T>
__device__ __forceinline__ T warp_scan(T value, T& total) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int width = 1; width < WARP; width *= 2) {
        const T left = __shfl_up_sync(WARP_ALL, value, width);
        if ((lane + 1) % (2 * width) == 0) value = left + value;
    }
    total = __shfl_sync(WARP_ALL, value, WARP - 1);
    if (lane == WARP - 1) value = T(0);
#pragma unroll
    for (int width = WARP / 2; width > 0; width /= 2) {
        const T left = __shfl_up_sync(WARP_ALL, value, width);
        const T right = __shfl_down_sync(WARP_ALL, value, width);
        if ((lane + 1) % (2 * width) == 0)
            value = left + value;
        else if ((lane + 1) % (2 * width) == width)
            value = right;
    }
    return value;
}

// What the warps before the caller's come to, `of_warp` being the same in a warp's lanes; and the block's total.
// `scratch` holds one T for each of WARPS warps.
template <int WARPS, class T>
__device__ __forceinline__ T block_sums_before(T of_warp, T& total, T* scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) scratch[warp] = of_warp;
    __syncthreads();
    const T before = warp_scan(lane < WARPS ? scratch[lane] : T(0), total);
    return __shfl_sync(WARP_ALL, before, warp);
}

// A word of `nodes` is 0 until its tile's sum is there, whose word never is.
constexpr uint64_t NODE_READY = uint64_t(1) << 32;

__device__ __forceinline__ uint64_t node_of(int value) { return NODE_READY | static_cast<uint32_t>(value); }
__device__ __forceinline__ uint64_t node_of(float value) { return NODE_READY | __float_as_uint(value); }
__device__ __forceinline__ uint64_t node_of(double value) {
    // All 64 bits are taken.  Inverted they are 0 for one of many NaNs only, in whose place stands another.
    return ~static_cast<uint64_t>(__double_as_longlong(value == value ? value : double(NAN)));
}
__device__ __forceinline__ void value_of(uint64_t node, int& value) { value = static_cast<int>(node); }
__device__ __forceinline__ void value_of(uint64_t node, float& value) {
    value = __uint_as_float(static_cast<uint32_t>(node));
}
__device__ __forceinline__ void value_of(uint64_t node, double& value) {
    value = __longlong_as_double(static_cast<long long>(~node));
}

// Sum over the block in a fixed order, in every thread.  `scratch` holds one T for each of WARPS warps.
template <int WARPS, class T>
__device__ __forceinline__ T block_total(T value, T* scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    value = warp_sum(value);
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_sum(lane < WARPS ? scratch[lane] : T(0));
}

constexpr int LEVELS = 3, LEVEL_BITS = 10;  // of the tree, and of a node's number among its parent's children

// What the thread's share of a node's elder brothers comes to, once all of them are there.
template <int THREADS, class T>
__device__ __forceinline__ T sum_of_elders(const uint64_t* first, int elders) {
    constexpr int WORDS = ((1 << LEVEL_BITS) + THREADS - 1) / THREADS;
    uint64_t words[WORDS];  // asked for at once: most are there already
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int elder = i * THREADS + threadIdx.x;
        words[i] = elder < elders ? load_word(first + elder) : 0;
    }
    T sum = T(0);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int elder = i * THREADS + threadIdx.x;
        if (elder >= elders) break;
        while (!words[i]) {
            pause_spinning();
            words[i] = load_word(first + elder);
        }
        T value;
        value_of(words[i], value);
        sum = sum + value;
    }
    return sum;
}

// What tiles 0 … tile - 1 of `tiles` come to, in every thread of a block that calls it with the sum of its own tile.
// nodes (LEVELS, tiles), of which the first ones of each level are taken; scratch (LEVELS, WARPS).
template <int WARPS, class T>
__device__ __forceinline__ T sum_before(uint64_t* nodes, int tile, int tiles, T own, T* scratch) {
    if (threadIdx.x == 0) store_word(nodes + tile, node_of(own));
    const auto elders = [&](int level) { return tile >> level * LEVEL_BITS & ((1 << LEVEL_BITS) - 1); };
    const auto node = [&](int level) { return nodes + static_cast<int64_t>(level) * tiles + (tile >> level * LEVEL_BITS); };
    T parts[LEVELS], sum = T(0);
#pragma unroll
    for (int level = LEVELS - 1; level >= 0; --level) {  // the oldest first
        parts[level] = sum_of_elders<WARPS * WARP, T>(node(level) - elders(level), elders(level));
        sum = sum + parts[level];
    }
    bool is_last = true;  // of its parent's children, on each level so far
#pragma unroll
    for (int level = 0; level + 1 < LEVELS; ++level) {
        is_last = is_last && elders(level) == (1 << LEVEL_BITS) - 1;
        if (!is_last) continue;
        own = block_total<WARPS>(parts[level], scratch + level * WARPS) + own;
        if (threadIdx.x == 0) store_word(node(level + 1), node_of(own));
    }
    return block_total<WARPS>(sum, scratch + (LEVELS - 1) * WARPS);
}

// The next tile that no block has taken: those before it are done or under way, so waiting for them ends.
__device__ __forceinline__ int next_tile(unsigned* ticket, int* scratch) {
    if (threadIdx.x == 0) *scratch = static_cast<int>(atomicAdd(ticket, 1u));
    __syncthreads();
    const int tile = *scratch;
    __syncthreads();
    return tile;
}

// A tile of 8,192 floats, or of 4,096 doubles: so large that memory stays busy while most blocks wait for others.
template <class T>
struct ScanTile {
    static constexpr int THREADS = 256, WARPS = THREADS / WARP, ROUNDS = 32 / sizeof(T), VECTOR = 4;
    static constexpr int OF_WARP = WARP * ROUNDS * VECTOR, SIZE = WARPS * OF_WARP;
};

// y_i = x_0 + … + x_i, or without x_i where `exclusive`; x and y (n,) may be the same array.  ticket and nodes (of all
// levels) are 0 before the launch.  Grid: one block for each tile.
template <class T>
__device__ __forceinline__ void prefix_sum(const T* x, T* y, int64_t n, int exclusive, unsigned* ticket,
                                           uint64_t* nodes) {
    using Tile = ScanTile<T>;
    SHARED(T, scratch);  // (1 + LEVELS, WARPS)
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int tile = next_tile(ticket, reinterpret_cast<int*>(scratch));
    const int64_t first = static_cast<int64_t>(tile) * Tile::SIZE + warp * Tile::OF_WARP + lane * Tile::VECTOR;
    const bool whole = (tile + 1ll) * Tile::SIZE <= n && reinterpret_cast<uintptr_t>(x) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(y) % 16 == 0;
    struct alignas(16) Vector { T of[Tile::VECTOR]; };

    Vector values[Tile::ROUNDS];
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        const int64_t at = first + round * WARP * Tile::VECTOR;
        if (whole) {
            values[round] = *reinterpret_cast<const Vector*>(x + at);
        } else {
            for (int i = 0; i < Tile::VECTOR; ++i) values[round].of[i] = at + i < n ? x[at + i] : T(0);
        }
    }
    // In place of each value, what its warp's values up to it come to.
    T of_warp = T(0);
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        T* const value = values[round].of;
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
    T of_tile;
    const T before_warp = block_sums_before<Tile::WARPS>(of_warp, of_tile, scratch);
    const T start = sum_before<Tile::WARPS>(nodes, tile, gridDim.x, of_tile, scratch + Tile::WARPS) + before_warp;
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        const int64_t at = first + round * WARP * Tile::VECTOR;
        for (int i = 0; i < Tile::VECTOR; ++i) values[round].of[i] = start + values[round].of[i];
        if (whole) {
            *reinterpret_cast<Vector*>(y + at) = values[round];
        } else {
            for (int i = 0; i < Tile::VECTOR; ++i)
                if (at + i < n) y[at + i] = values[round].of[i];
        }
    }
}

}  // namespace mlpgpu
