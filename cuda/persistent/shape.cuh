// A resident network's shape: its layers, how their weights are cut into tiles, and which block has which.
#pragma once

#include "arch/messages.cuh"
#include "common/philox.cuh"

namespace mlpgpu {

// A block's threads: *workers* go through the stages of a step, and *couriers* fetch what the next step needs.
constexpr int RESIDENT_THREADS = 512, RESIDENT_WARPS = RESIDENT_THREADS / WARP, COURIERS = 128;

// A worker's number; the remainder tells the compiler that a loop over workers has no more rounds than it has.
__device__ __forceinline__ int worker() { return threadIdx.x % RESIDENT_THREADS; }

// Barriers of all, who come to it from two places, and of each kind alone.
__device__ __forceinline__ void sync_all() { sync_some<1, RESIDENT_THREADS + COURIERS>(); }
__device__ __forceinline__ void sync_workers() { sync_some<2, RESIDENT_THREADS>(); }
__device__ __forceinline__ void sync_couriers() { sync_some<3, COURIERS>(); }

// The compiler no longer knows of it what it was, and makes anew what follows from it.
__device__ __forceinline__ void forget(int& number) { asm volatile("" : "+r"(number)); }

// How many neighbouring lanes share each of so many sums of so many terms: a power of two.
__host__ __device__ constexpr int lanes_for(int sums, int terms) {
    int lanes = 1;
    while (2 * lanes <= WARP && 2 * lanes <= terms && 2 * lanes * sums <= RESIDENT_THREADS) lanes *= 2;
    return lanes;
}

// COUNT pairs of sums of TERMS terms each, by all threads of the block: part(i, lane, lanes) gives a lane's share of
// pair i, and use(i, sums) takes them.
template <int COUNT, int TERMS, class Part, class Use>
__device__ __forceinline__ void sum_by_lanes(Part part, Use use) {
    constexpr int LANES = lanes_for(COUNT, TERMS), AT_ONCE = RESIDENT_THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    for (int first = 0; first < COUNT; first += AT_ONCE) {
        const int i = first + worker() / LANES;
        float2 sum = i < COUNT ? part(i, lane, LANES) : make_float2(0.0f, 0.0f);
        for (int offset = LANES / 2; offset > 0; offset /= 2) {
            sum.x += __shfl_xor_sync(WARP_ALL, sum.x, offset);
            sum.y += __shfl_xor_sync(WARP_ALL, sum.y, offset);
        }
        if (i < COUNT && lane == 0) use(i, sum);
    }
}

// Where the random words of a dropout come from: the same as for `dropout` in elementwise/rows.cuh.
struct DropoutKey {
    uint64_t seed, purpose, step;
};

template <uint64_t LAYER, uint64_t THRESHOLD, uint32_t KEEP>  // KEEP: the bits of 1 / (1 - rate)
struct Dropped {
    static constexpr bool DROPS = true;
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
    static constexpr bool DROPS = false;
    static __device__ __forceinline__ PhiloxBlock words(const DropoutKey&, int64_t) { return {}; }
    static __device__ __forceinline__ float apply(const PhiloxBlock&, int, float x) { return x; }
    static __device__ __forceinline__ float element(const DropoutKey&, int64_t, float x) { return x; }
};

// A dense layer: its weights are LINES by N_OUT, cut into LINE_SLICES by COLUMN_SLICES tiles, which the blocks
// from FIRST_BLOCK on hold, one each.  Slices begin at multiples of four lines or columns, a *quad*.
template <int N_IN_, int N_OUT_, bool HAS_BIAS_, class Activation_, bool SAVES_Z_, class Dropout_, bool IS_REPLICATED_,
          int LINE_SLICES_, int COLUMN_SLICES_, int FIRST_BLOCK_>
struct ResidentDense {
    static constexpr int N_IN = N_IN_, N_OUT = N_OUT_, LINES = N_IN + HAS_BIAS_;
    static constexpr bool HAS_BIAS = HAS_BIAS_, SAVES_Z = SAVES_Z_, IS_REPLICATED = IS_REPLICATED_;
    static constexpr int LINE_SLICES = LINE_SLICES_, COLUMN_SLICES = COLUMN_SLICES_, FIRST_BLOCK = FIRST_BLOCK_;
    using Activation = Activation_;
    using Dropout = Dropout_;

    // The most of a tile.
    static constexpr int LINE_QUADS = ceil_div(LINES, 4), COLUMN_QUADS = ceil_div(N_OUT, 4);
    static constexpr int QUADS = ceil_div(LINE_QUADS, LINE_SLICES), COLUMNS = 4 * ceil_div(COLUMN_QUADS, COLUMN_SLICES);
    // In shared memory: pitches that are odd multiples of eight, of four or of two spread neighbours over all banks.
    static constexpr int TERMS = IS_REPLICATED ? N_IN : LINE_SLICES;  // of a row's z
    static constexpr int PITCH = COLUMNS > 8 ? 24 : 8;              // of a line of a tile
    static constexpr int QUAD_PITCH = 4 * PITCH + 4;                // of four lines
    static constexpr int TILE = round_up(QUADS, 2) * QUAD_PITCH;    // floats of a tile
    static constexpr int DZ_PITCH = 4 * (COLUMNS / 4 | 1);          // of a row of the tile's dZ
    static constexpr int SUM_PITCH = COLUMNS + 4;                   // of a row of a part of its Z
    static constexpr int INPUT_PITCH = round_up(4 * QUADS, 8) + 4;  // of a row of the tile's inputs
    static constexpr int COPY_PITCH = round_up(N_OUT, 2) | 2;   // of a line of a replicated layer's copy
    // A row of inputs or outputs among others, which go in pairs.
    static constexpr int IN_PITCH = round_up(N_IN, 2), OUT_PITCH = round_up(N_OUT, 2);
};

// The layers, for at most ROWS rows a batch on BLOCKS blocks; inputs may be standardized and dropped before.
constexpr int BFLOATS = -1;  // for NUMBERS of a network

template <int ROWS_, int BLOCKS_, int NUMBERS_, bool HAS_COPY_ENGINE_, bool IS_STANDARDIZED_, class InputDropout_,
          class... Layers>
struct ResidentNetwork {
    // Of tf32 for an operand of a tile's products; 0: multiply-adds; BFLOATS: it is bfloat16, of the first layer.
    static constexpr int NUMBERS = NUMBERS_;
    static constexpr bool HAS_COPY_ENGINE = HAS_COPY_ENGINE_;
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

    // A block has one row, the last layer is replicated, half a warp holds its outputs, and the block the units below.
    static constexpr bool turns() {
        if constexpr (LAST == 0) return false;
        else
            return OWN_ROWS == 1 && Layer<LAST>::IS_REPLICATED && Layer<LAST>::N_OUT <= WARP / 2 &&
                   Layer<LAST>::IN_PITCH / 2 <= RESIDENT_THREADS;
    }
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
    const int line = T::LINE_QUADS * k / T::LINE_SLICES * 4, column = T::COLUMN_QUADS * c / T::COLUMN_SLICES * 4;
    const int next_line = min(T::LINE_QUADS * (k + 1) / T::LINE_SLICES * 4, T::LINES);
    const int next_column = min(T::COLUMN_QUADS * (c + 1) / T::COLUMN_SLICES * 4, T::N_OUT);
    return {true, k, c, line, next_line - line, column, next_column - column};
}

}  // namespace mlpgpu
