// The shape of a persistent network: its layers, how their weights are cut into tiles, and which block has which tile.
#pragma once

#include "arch/messages.cuh"
#include "math/dropout.cuh"

namespace mlpgpu {

// A block has *compute* threads, which go through the stages of a step, and *producer* threads, which fetch the next
// batch.
constexpr int COMPUTE_THREADS = 512, COMPUTE_WARPS = COMPUTE_THREADS / WARP, PRODUCER_THREADS = 128;

// The number among compute threads; the remainder tells the compiler that loops over them have no extra rounds.
__device__ __forceinline__ int compute_thread() { return threadIdx.x % COMPUTE_THREADS; }

// A barrier of all threads, which compute threads and producers call in different places, and one of each kind alone.
__device__ __forceinline__ void sync_all() { sync_some<1, COMPUTE_THREADS + PRODUCER_THREADS>(); }
__device__ __forceinline__ void sync_compute_threads() { sync_some<2, COMPUTE_THREADS>(); }
__device__ __forceinline__ void sync_producers() { sync_some<3, PRODUCER_THREADS>(); }

// Hides the value from the compiler, which then recomputes what follows from it instead of keeping that in registers.
__device__ __forceinline__ void forget(int& number) { asm volatile("" : "+r"(number)); }

// How many neighbouring lanes add up one of `sums` sums of `terms` terms: a power of two.
__host__ __device__ constexpr int lanes_for(int sums, int terms) {
    int lanes = 1;
    while (2 * lanes <= WARP && 2 * lanes <= terms && 2 * lanes * sums <= COMPUTE_THREADS) lanes *= 2;
    return lanes;
}

// Makes COUNT pairs of sums of TERMS terms each, by all compute threads: partial(i, lane, lanes) gives a lane's part of
// pair i, and use(i, sums) takes the result.
template <int COUNT, int TERMS, class Partial, class Use>
__device__ __forceinline__ void sum_by_lanes(Partial partial, Use use) {
    constexpr int LANES = lanes_for(COUNT, TERMS), AT_ONCE = COMPUTE_THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    for (int first = 0; first < COUNT; first += AT_ONCE) {
        const int i = first + compute_thread() / LANES;
        float2 sum = i < COUNT ? partial(i, lane, LANES) : make_float2(0.0f, 0.0f);
        for (int offset = LANES / 2; offset > 0; offset /= 2) {
            sum.x += __shfl_xor_sync(WARP_ALL, sum.x, offset);
            sum.y += __shfl_xor_sync(WARP_ALL, sum.y, offset);
        }
        if (i < COUNT && lane == 0) use(i, sum);
    }
}

// The address of a step's dropouts among all half words.
struct DropoutKey {
    uint64_t seed;
    int64_t step;
};

template <int LAYER, uint32_t LEAST, uint32_t KEEP>  // KEEP: the bits of 1 / (1 - rate)
struct Dropped {
    static constexpr bool DROPS = true;
    static __device__ __forceinline__ DropoutWords words(const DropoutKey& key, int64_t element) {
        return dropout_words(key.seed, key.step, LAYER, element / DROPOUT_BLOCK);
    }
    static __device__ __forceinline__ float apply(const DropoutWords& words, int64_t element, float x) {
        return keep_or_drop(words[element], LEAST, __uint_as_float(KEEP), x);
    }
    static __device__ __forceinline__ float element(const DropoutKey& key, int64_t number, float x) {
        return apply(words(key, number), number, x);
    }
};

struct NotDropped {
    static constexpr bool DROPS = false;
    static __device__ __forceinline__ DropoutWords words(const DropoutKey&, int64_t) { return {}; }
    static __device__ __forceinline__ float apply(const DropoutWords&, int64_t, float x) { return x; }
    static __device__ __forceinline__ float element(const DropoutKey&, int64_t, float x) { return x; }
};

// A dense layer: its weights are WEIGHT_ROWS by N_OUT, cut into ROW_SLICES by COLUMN_SLICES tiles, which the blocks
// from FIRST_BLOCK on hold, one each. Slices begin at multiples of four weight rows or columns, a *quad*. A frozen layer's
// tiles make no dW and no update; if it is replicated it has none, since its copies stay as they are.
template <int N_IN_, int N_OUT_, bool HAS_BIAS_, class Activation_, bool SAVES_Z_, class Dropout_, bool IS_REPLICATED_,
          int ROW_SLICES_, int COLUMN_SLICES_, int FIRST_BLOCK_, bool IS_FROZEN_ = false>
struct PersistentDense {
    static constexpr int N_IN = N_IN_, N_OUT = N_OUT_, WEIGHT_ROWS = N_IN + HAS_BIAS_;
    static constexpr bool HAS_BIAS = HAS_BIAS_, SAVES_Z = SAVES_Z_, IS_REPLICATED = IS_REPLICATED_;
    static constexpr bool IS_FROZEN = IS_FROZEN_;
    static constexpr int ROW_SLICES = ROW_SLICES_, COLUMN_SLICES = COLUMN_SLICES_, FIRST_BLOCK = FIRST_BLOCK_;
    using Activation = Activation_;
    using Dropout = Dropout_;

    // The size of the largest tile.
    static constexpr int ROW_QUADS = ceil_div(WEIGHT_ROWS, 4), COLUMN_QUADS = ceil_div(N_OUT, 4);
    static constexpr int QUADS = ceil_div(ROW_QUADS, ROW_SLICES), COLUMNS = 4 * ceil_div(COLUMN_QUADS, COLUMN_SLICES);
    // In shared memory, pitches that are odd multiples of eight, of four or of two spread neighbours over all banks.
    static constexpr int TERMS = IS_REPLICATED ? N_IN : ROW_SLICES;  // of a row's z
    static constexpr int PITCH = COLUMNS > 8 ? 24 : 8;  // of a weight row of a tile
    static constexpr int QUAD_PITCH = 4 * PITCH + 4;  // of four weight rows
    static constexpr int TILE = round_up(QUADS, 2) * QUAD_PITCH;    // floats of a tile
    static constexpr int DZ_PITCH = 4 * (COLUMNS / 4 | 1);          // of a row of the tile's dZ
    static constexpr int SUM_PITCH = COLUMNS + 4;  // of a row of a partial sum of Z
    static constexpr int INPUT_PITCH = round_up(4 * QUADS, 8) + 4;  // of a row of the tile's inputs
    static constexpr int COPY_PITCH = round_up(N_OUT, 2) | 2;  // of a weight row of a replicated layer's copy
    // Pitches of a row of inputs or outputs among others, which are sent in pairs.
    static constexpr int IN_PITCH = round_up(N_IN, 2), OUT_PITCH = round_up(N_OUT, 2);
};

// The layers, for at most ROWS rows a batch on BLOCKS blocks; inputs may be standardized and dropped before.
constexpr int BFLOAT16 = -1;  // in place of a number of tf32 terms

template <int ROWS_, int BLOCKS_, int TF32_TERMS_, bool HAS_COPY_ENGINE_, bool IS_STANDARDIZED_, class InputDropout_,
          class... Layers>
struct PersistentNetwork {
    // Terms of tf32 for an operand of a tile's products; 0 for multiply-adds; BFLOAT16 if the first layer's are
    // bfloat16.
    static constexpr int TF32_TERMS = TF32_TERMS_;
    static constexpr bool HAS_COPY_ENGINE = HAS_COPY_ENGINE_;
    static constexpr int ROWS = ROWS_, BLOCKS = BLOCKS_, LAST = sizeof...(Layers) - 1;
    static constexpr int ROWS_PER_BLOCK = ceil_div(ROWS, BLOCKS);  // at most: a block has every BLOCKS-th row
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

    // Whether a block has one row, the last layer is replicated, half a warp holds its outputs, and the block the units
    // below.
    static constexpr bool has_output_stage() {
        if constexpr (LAST == 0) return false;
        else
            return ROWS_PER_BLOCK == 1 && Layer<LAST>::IS_REPLICATED && Layer<LAST>::N_OUT <= WARP / 2 &&
                   Layer<LAST>::IN_PITCH / 2 <= COMPUTE_THREADS;
    }
};

// The tile of a layer that a block has; a block without one has 0 weight rows.
struct WeightTile {
    bool is_mine;
    int row_slice, column_slice;
    int first_weight_row, weight_rows, first_column, columns;
};

template <class T>
__device__ __forceinline__ WeightTile tile_of(int block, int blocks) {
    const int tile = (block + blocks - T::FIRST_BLOCK) % blocks;
    const int k = tile / T::COLUMN_SLICES, c = tile % T::COLUMN_SLICES;
    if (k >= T::ROW_SLICES || (T::IS_FROZEN && T::IS_REPLICATED)) return {};
    const int weight_row = T::ROW_QUADS * k / T::ROW_SLICES * 4, column = T::COLUMN_QUADS * c / T::COLUMN_SLICES * 4;
    const int next_row = min(T::ROW_QUADS * (k + 1) / T::ROW_SLICES * 4, T::WEIGHT_ROWS);
    const int next_column = min(T::COLUMN_QUADS * (c + 1) / T::COLUMN_SLICES * 4, T::N_OUT);
    return {true, k, c, weight_row, next_row - weight_row, column, next_column - column};
}

}  // namespace mlpgpu
