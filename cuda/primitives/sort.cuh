// A stable radix sort of keys with their values, eight bits at a time from the lowest on.
//
// For each digit of eight bits: every block counts its tile's digits (sort_counts); the prefix sums of the counts
// (primitives/scan.cuh), digit by digit and tile by tile within, tell where a tile's keys of a digit begin; and every
// block sorts its tile in shared memory and writes it out in runs (sort_scatter). Source: Knuth, "The Art of Computer
// Programming", volume 3, 5.2.5, radix list sort; ranks within a warp by ballots.
#pragma once

#include "primitives/scan.cuh"

namespace mlpgpu {

constexpr int DIGITS = 256;

// 8,192 keys of 32 bits, or 4,096 of 64: the keys of a digit are then some 128 bytes in a row.
template <class Key>
struct SortTile {
    static constexpr int THREADS = 512, WARPS = THREADS / WARP, ROUNDS = 64 / sizeof(Key);
    static constexpr int OF_WARP = WARP * ROUNDS, SIZE = WARPS * OF_WARP;
};

struct SortCountsBlock {
    static constexpr int THREADS = 512, SHARED_BYTES = sizeof(int) * DIGITS;
};

// The keys of a tile; then positions for each warp and digit, an offset for each digit, and a word for each warp.
template <class Key>
struct SortScatterBlock {
    using Tile = SortTile<Key>;
    static constexpr int THREADS = Tile::THREADS;
    static constexpr int SHARED_BYTES = Tile::SIZE * sizeof(Key) + sizeof(int) * (Tile::WARPS * DIGITS + DIGITS + Tile::WARPS);
};

template <class Key>
__device__ __forceinline__ int digit_of(Key key, int shift) {
    return static_cast<int>(key >> shift) & (DIGITS - 1);
}

// COUNT numbers below 2¹⁶, two in a register; they must be stored in their order.
template <int COUNT>
struct HalfWords {
    unsigned pairs[COUNT / 2];

    __device__ __forceinline__ int get(int i) const { return i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffff; }
    __device__ __forceinline__ void put(int i, int number) {
        unsigned& pair = pairs[i / 2];
        pair = i % 2 ? (pair & 0xffff) | static_cast<unsigned>(number) << 16 : static_cast<unsigned>(number);
    }
};

// counts (DIGITS, tiles) of the keys (n,).  Grid: one block for each tile.
template <class Key>
__device__ __forceinline__ void sort_counts(const Key* keys, int64_t n, int shift, int* counts) {
    using Tile = SortTile<Key>;
    SHARED(int, count);  // (DIGITS,)
    const int digit = threadIdx.x;  // that the thread counts
    if (digit < DIGITS) count[digit] = 0;
    __syncthreads();
    const int64_t first = blockIdx.x * static_cast<int64_t>(Tile::SIZE) + threadIdx.x;
    Key loaded[Tile::ROUNDS];  // loads of all of them are in flight together
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        const int64_t i = first + round * Tile::THREADS;
        loaded[round] = i < n ? keys[i] : Key(0);
    }
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round)
        if (first + round * Tile::THREADS < n) atomicAdd(count + digit_of(loaded[round], shift), 1);
    __syncthreads();
    if (digit < DIGITS) counts[digit * static_cast<int64_t>(gridDim.x) + blockIdx.x] = count[digit];
}

// The lanes whose digit is the caller's.
__device__ __forceinline__ unsigned lanes_alike(int digit) {
    unsigned alike = WARP_ALL;
#pragma unroll
    for (int bit = 1; bit < DIGITS; bit *= 2) alike &= lanes_like(digit & bit);
    return alike;
}

// Sorts keys and values (n,) by one digit, stably; starts (DIGITS, tiles) are the exclusive prefix sums of counts. If
// values is null, they are the keys' positions. Grid: as for sort_counts.
template <class Key>
__device__ __forceinline__ void sort_scatter(const Key* keys, const int* values, int64_t n, int shift,
                                             const int* starts, Key* keys_out, int* values_out) {
    using Tile = SortTile<Key>;
    SHARED(Key, in_order);                                              // (SIZE,): keys, then values
    int* const positions = reinterpret_cast<int*>(in_order + Tile::SIZE);  // (WARPS, DIGITS)
    int* const offsets = positions + Tile::WARPS * DIGITS;                 // (DIGITS,)
    int* const scratch = offsets + DIGITS;                              // (WARPS,)
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t first = blockIdx.x * static_cast<int64_t>(Tile::SIZE);
    const int count = static_cast<int>(min(static_cast<int64_t>(Tile::SIZE), n - first));
    const auto position_of = [&](int round) { return warp * Tile::OF_WARP + round * WARP + lane; };  // in the input

    // Loads all keys at once. After the last key stand others that come last.
    Key loaded[Tile::ROUNDS];
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round)
        loaded[round] = position_of(round) < count ? keys[first + position_of(round)] : ~Key(0);
    const int digit = threadIdx.x;  // that the thread counts, if there is one
    const int start_of_digit = digit < DIGITS ? starts[digit * static_cast<int64_t>(gridDim.x) + blockIdx.x] : 0;

    // Each key's rank among the keys of its digit in the same warp.
    int* const warp_counts = positions + warp * DIGITS;
    for (int i = lane; i < DIGITS; i += WARP) warp_counts[i] = 0;
    __syncwarp();
    HalfWords<Tile::ROUNDS> ranks;
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        int* const of_digit = warp_counts + digit_of(loaded[round], shift);
        const unsigned alike = lanes_alike(digit_of(loaded[round], shift));
        const int before = __popc(alike & ((1u << lane) - 1));
        ranks.put(round, *of_digit + before);
        __syncwarp();
        if (before == 0) *of_digit += __popc(alike);
        __syncwarp();
    }
    __syncthreads();

    // Where each warp's keys of a digit begin in the tile, and the distance from there to their position in the output.
    int of_digit = 0;
    for (int w = 0; digit < DIGITS && w < Tile::WARPS; ++w) {
        const int of_warp = positions[w * DIGITS + digit];
        positions[w * DIGITS + digit] = of_digit;
        of_digit += of_warp;
    }
    int of_warp, total;
    const int in_warp = warp_scan(of_digit, of_warp);
    const int start = block_sums_before<Tile::WARPS>(of_warp, total, scratch) + in_warp;
    if (digit < DIGITS) offsets[digit] = start_of_digit - start;
    for (int w = 0; digit < DIGITS && w < Tile::WARPS; ++w) positions[w * DIGITS + digit] += start;
    __syncthreads();

    // Writes keys in order, in runs; then the values, which were loaded meanwhile, in the same way.
    HalfWords<Tile::ROUNDS> ordered;  // positions in the tile
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        const int position = ranks.get(round) + warp_counts[digit_of(loaded[round], shift)];
        in_order[position] = loaded[round];
        ordered.put(round, position);
    }
    int loaded_values[Tile::ROUNDS];
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        const int i = position_of(round);
        loaded_values[round] = values && i < count ? values[first + i] : static_cast<int>(first + i);
    }
    __syncthreads();
    int to[Tile::ROUNDS];
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        const int i = round * Tile::THREADS + threadIdx.x;
        const Key key = in_order[i];
        to[round] = i + offsets[digit_of(key, shift)];
        if (i < count) keys_out[to[round]] = key;
    }
    __syncthreads();
    int* const values_in_order = reinterpret_cast<int*>(in_order);
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) values_in_order[ordered.get(round)] = loaded_values[round];
    __syncthreads();
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        const int i = round * Tile::THREADS + threadIdx.x;
        if (i < count) values_out[to[round]] = values_in_order[i];
    }
}

}  // namespace mlpgpu
