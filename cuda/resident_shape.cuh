// A resident network's shape: its layers, how their weights are cut into tiles, and which block has which.
#pragma once

#include "mail.cuh"
#include "philox.cuh"

namespace mlpgpu {

constexpr int RESIDENT_THREADS = 512, RESIDENT_WARPS = RESIDENT_THREADS / WARP;

// How many neighbouring lanes share each of so many sums of so many terms: a power of two.
__host__ __device__ constexpr int lanes_for(int sums, int terms) {
    int lanes = 1;
    while (2 * lanes <= WARP && 2 * lanes <= terms && 2 * lanes * sums <= RESIDENT_THREADS) lanes *= 2;
    return lanes;
}

// COUNT sums of TERMS terms each, by all threads of the block: part(i, lane, lanes) gives a lane's share of sum
// i, and use(i, sum) takes it.
template <int COUNT, int TERMS, class Part, class Use>
__device__ __forceinline__ void sum_by_lanes(Part part, Use use) {
    constexpr int LANES = lanes_for(COUNT, TERMS), SUMS = RESIDENT_THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    for (int first = 0; first < COUNT; first += SUMS) {
        const int i = first + threadIdx.x / LANES;
        float sum = i < COUNT ? part(i, lane, LANES) : 0.0f;
        for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(WARP_ALL, sum, offset);
        if (i < COUNT && lane == 0) use(i, sum);
    }
}

// Where the random words of a dropout come from: the same as for `dropout` in rows.cuh.
struct DropoutKey {
    uint64_t seed, purpose, step;
};

template <uint64_t LAYER, uint64_t THRESHOLD, uint32_t KEEP>  // KEEP: the bits of 1 / (1 - rate)
struct Dropped {
    static __device__ __forceinline__ PhiloxBlock words(const DropoutKey& key, int64_t element) {
        return philox(key.seed, key.purpose, element / 4, key.step, LAYER, 0);
    }
    static __device__ __forceinline__ float apply(const PhiloxBlock& words, int lane, float x) {
        const uint64_t low = lane & 1 ? words.word[1] : words.word[0], high = lane & 1 ? words.word[3] : words.word[2];
        return keep_or_drop(lane & 2 ? high : low, THRESHOLD, __uint_as_float(KEEP), x);
    }
    static __device__ __forceinline__ float element(const DropoutKey& key, int64_t at, float x) {
        return apply(words(key, at), static_cast<int>(at % 4), x);
    }
};

struct NotDropped {
    static __device__ __forceinline__ PhiloxBlock words(const DropoutKey&, int64_t) { return {}; }
    static __device__ __forceinline__ float apply(const PhiloxBlock&, int, float x) { return x; }
    static __device__ __forceinline__ float element(const DropoutKey&, int64_t, float x) { return x; }
};

// A dense layer: its weights are LINES by N_OUT, cut into LINE_SLICES by COLUMN_SLICES tiles, which the blocks
// from FIRST_BLOCK on hold, one each.  Slices of lines begin at multiples of four lines, a *quad*.
template <int N_IN_, int N_OUT_, bool HAS_BIAS_, class Activation_, bool SAVES_Z_, class Dropout_, bool IS_REPLICATED_,
          int LINE_SLICES_, int COLUMN_SLICES_, int FIRST_BLOCK_>
struct ResidentDense {
    static constexpr int N_IN = N_IN_, N_OUT = N_OUT_, LINES = N_IN + HAS_BIAS_;
    static constexpr bool HAS_BIAS = HAS_BIAS_, SAVES_Z = SAVES_Z_, IS_REPLICATED = IS_REPLICATED_;
    static constexpr int LINE_SLICES = LINE_SLICES_, COLUMN_SLICES = COLUMN_SLICES_, FIRST_BLOCK = FIRST_BLOCK_;
    using Activation = Activation_;
    using Dropout = Dropout_;

    static constexpr int ALL_QUADS = ceil_div(LINES, 4);
    static constexpr int QUADS = ceil_div(ALL_QUADS, LINE_SLICES), COLUMNS = ceil_div(N_OUT, COLUMN_SLICES);
    // In shared memory: pitches that are odd multiples of four spread neighbouring quads over all banks.
    static constexpr int PITCH = round_up(COLUMNS, 4);          // of a line of a tile, and of a row of its dz
    static constexpr int QUAD_PITCH = 4 * PITCH + 4;            // of four lines of a tile
    static constexpr int TILE = QUADS * QUAD_PITCH;             // floats of a tile
    static constexpr int INPUT_PITCH = 4 * (QUADS | 1);         // of a row of the tile's inputs
    static constexpr int COPY_PITCH = N_OUT | 1;                // of a line of a replicated layer's copy
};

// The layers, for at most ROWS rows a batch on BLOCKS blocks; inputs may be standardized and dropped before.
template <int ROWS_, int BLOCKS_, bool IS_STANDARDIZED_, class InputDropout_, class... Layers>
struct ResidentNetwork {
    static constexpr int ROWS = ROWS_, BLOCKS = BLOCKS_, LAST = sizeof...(Layers) - 1;
    static constexpr int OWN_ROWS = ceil_div(ROWS, BLOCKS);  // the most rows of a block: every BLOCKS-th
    static constexpr bool IS_STANDARDIZED = IS_STANDARDIZED_;
    using InputDropout = InputDropout_;

    template <int I, class First, class... Rest>
    struct Pick : Pick<I - 1, Rest...> {};
    template <class First, class... Rest>
    struct Pick<0, First, Rest...> {
        using Type = First;
    };
    template <int L>
    using Layer = typename Pick<L, Layers...>::Type;
};

// The tile of a layer that a block has; without one it has no lines.
struct ResidentTile {
    bool is_mine;
    int line_slice, column_slice;
    int first_line, lines, first_column, columns;
};

template <class T>
__device__ __forceinline__ ResidentTile tile_of(int block, int blocks) {
    const int place = (block + blocks - T::FIRST_BLOCK) % blocks;
    const int k = place / T::COLUMN_SLICES, c = place % T::COLUMN_SLICES;
    if (k >= T::LINE_SLICES) return {};
    const int line = T::ALL_QUADS * k / T::LINE_SLICES * 4, column = T::N_OUT * c / T::COLUMN_SLICES;
    const int next_line = min(T::ALL_QUADS * (k + 1) / T::LINE_SLICES * 4, T::LINES);
    const int next_column = T::N_OUT * (c + 1) / T::COLUMN_SLICES;
    return {true, k, c, line, next_line - line, column, next_column - column};
}

}  // namespace mlpgpu
