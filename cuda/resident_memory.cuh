// What a block of the resident kernel has and where: its arguments, shared memory, and mail.
#pragma once

#include "loss.cuh"
#include "resident_products.cuh"
#include "update.cuh"

namespace mlpgpu {

template <class Input>
struct ResidentData {
    const int* order;
    const Input* inputs;
    float scale;                       // of inputs
    const float *mean, *deviation;     // of standardized inputs, or null
    const float* weights;              // of rows, or null
    const float *target_mean, *target_scale;
};

// A block at a step: what every stage gets.
template <class Net, class Loss_, template <class> class Target_, class Source, class Rule_, class Input_>
struct Resident {
    using Network = Net;
    using Loss = Loss_;
    template <class From>
    using Target = Target_<From>;
    using Rule = Rule_;
    using Input = Input_;
    static constexpr int ROWS = Net::ROWS, BLOCKS = Net::BLOCKS, LAST = Net::LAST, OWN_ROWS = Net::OWN_ROWS;
    static constexpr int STAGED_ROWS = round_up(ROWS, 8);  // of a tile's inputs and dZ: what is beyond a batch counts as 0
    static constexpr int TARGETS = Target<const float*>::count(Net::template Layer<LAST>::N_OUT);  // of a row

    ResidentData<Input> data;
    Source targets;
    uint64_t* mail;
    float* shared;
    DropoutKey key;  // of the step
    uint32_t tag;    // of the step; mail begins with another
    int rows;        // of the step's batch

    __device__ __forceinline__ int parity() const { return tag & 1; }
    __device__ __forceinline__ bool has_rows() const { return static_cast<int>(blockIdx.x) < rows; }
    // The row of the batch that is a block's own number `i`.
    __device__ __forceinline__ int own_row(int i) const { return blockIdx.x + i * BLOCKS; }
    // A place of mail of which each step has `count` words.
    __device__ __forceinline__ uint64_t* words(int64_t first, int64_t count) const {
        return mail + first + parity() * count;
    }
};

template <class K, int L>
using LayerOf = typename K::Network::template Layer<L>;
template <class K, int L>
using ProductsOf = Products<LayerOf<K, L>, K::ROWS, K::Network::NUMBERS>;

// --- shared memory, in floats ---

// A layer's part of it: one follows the other.
template <class K, int L>
struct Place {
    using T = LayerOf<K, L>;
    static constexpr int begin() {
        if constexpr (L == 0) return 0;
        else return Place<K, L - 1>::END;
    }
    static constexpr int OUTPUTS = round_up(K::OWN_ROWS * T::OUT_PITCH, 4);
    static constexpr int WEIGHTS = begin();                                 // the tile
    static constexpr int SLOTS = WEIGHTS + T::TILE;                         // (slots, tile)
    static constexpr int INPUTS = SLOTS + K::Rule::SLOTS * T::TILE;         // of the first layer two, in turn
    static constexpr int DZ = INPUTS + (L == 0 ? 2 : 1) * K::STAGED_ROWS * T::INPUT_PITCH;
    static constexpr int COPY = DZ + K::STAGED_ROWS * T::DZ_PITCH + 8;      // all weights, if replicated
    static constexpr int H = COPY + (T::IS_REPLICATED ? round_up(T::LINES * T::COPY_PITCH, 4) : 0);
    static constexpr int SAVED = H + OUTPUTS;                               // of own rows, as is H and DELTA
    static constexpr int DELTA = SAVED + OUTPUTS;
    static constexpr int END = DELTA + OUTPUTS;

    // What threads leave each other to be added up: parts of Z, then of dW.
    static constexpr int Z_SUMS = T::IS_REPLICATED ? 0 : ProductsOf<K, L>::Z_PARTS * K::ROWS * T::SUM_PITCH;
    static constexpr int DW_SUMS = ProductsOf<K, L>::DW_PARTS * T::TILE;
    static constexpr int MOST_SUMS = largest(Z_SUMS, DW_SUMS, L == 0 ? 0 : Place<K, (L > 0 ? L - 1 : 0)>::MOST_SUMS);
};

// The batch's part, then the sums that threads leave each other, for one layer at a time.
template <class K>
struct BatchPlace {
    using LastPlace = Place<K, K::LAST>;
    static constexpr int ROWS = LastPlace::END;                             // (2, rows): where in the data, as ints
    static constexpr int WEIGHTS = ROWS + round_up(2 * K::ROWS, 4);         // (2, rows)
    static constexpr int TARGETS = WEIGHTS + round_up(2 * K::ROWS, 4);      // (2, own rows, targets)
    static constexpr int SUMS = TARGETS + round_up(2 * K::OWN_ROWS * K::TARGETS, 4);
    static constexpr int END = SUMS + LastPlace::MOST_SUMS;
};

// --- mail, in words ---

// A layer's part of it, for even and for odd steps.
template <class K, int L>
struct Mail {
    using T = LayerOf<K, L>;
    static constexpr int64_t begin() {
        if constexpr (L == 0) return 0;
        else return Mail<K, L - 1>::END;
    }
    static constexpr int64_t ROWS = K::ROWS;
    static constexpr bool IS_TILED = !T::IS_REPLICATED;
    static constexpr int64_t Z = begin();                                      // (2, rows, line slices, OUT_PITCH)
    static constexpr int64_t DX = Z + (IS_TILED ? 2 * ROWS * T::LINE_SLICES * T::OUT_PITCH : 0);
    static constexpr int64_t H = DX + (IS_TILED && L > 0 ? 2 * ROWS * T::COLUMN_SLICES * T::IN_PITCH : 0);
    static constexpr int64_t DZ = H + (L < K::LAST ? 2 * ROWS * T::OUT_PITCH : 0);  // (2, rows, OUT_PITCH), as is H
    static constexpr int64_t COPY = DZ + 2 * ROWS * T::OUT_PITCH;              // (2, lines, OUT_PITCH)
    static constexpr int64_t END = COPY + (T::IS_REPLICATED ? 2ll * T::LINES * T::OUT_PITCH : 0);
};

// --- what a block has of them ---

template <int L, class K>
__device__ __forceinline__ ResidentTile tile_of(const K&) {
    return tile_of<LayerOf<K, L>>(blockIdx.x, K::BLOCKS);
}

// The tile's inputs (rows, INPUT_PITCH) of the step with a tag.
template <int L, class K>
__device__ __forceinline__ float* inputs_of(const K& k, uint32_t tag) {
    return k.shared + Place<K, L>::INPUTS + (L == 0 ? (tag & 1) * K::STAGED_ROWS * LayerOf<K, L>::INPUT_PITCH : 0);
}

}  // namespace mlpgpu
