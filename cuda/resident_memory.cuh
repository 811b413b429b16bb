// What a block of the resident kernel has and where: its arguments, shared memory, and mail.
#pragma once

#include "loss.cuh"
#include "resident_shape.cuh"
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
    // A place of mail whose words for one step are (count, …).
    __device__ __forceinline__ uint64_t* words(int64_t first, int64_t count) const {
        return mail + first + parity() * count;
    }
};

template <class K, int L>
using LayerOf = typename K::Network::template Layer<L>;

// --- how a block's threads share a tile ---

// A product's rows go to the lanes of a warp, one or two each; what warps are left over share the lines.
template <class K>
__host__ __device__ constexpr int lane_rows() {
    return K::ROWS > WARP ? 2 : 1;
}
template <class K>
__host__ __device__ constexpr int row_warps() {
    return ceil_div(K::ROWS, lane_rows<K>() * WARP);
}
// Into how many parts the warps cut a tile's lines for Z.
template <class K, int L>
__host__ __device__ constexpr int line_parts() {
    return smallest(LayerOf<K, L>::QUADS, largest(1, RESIDENT_WARPS / row_warps<K>()));
}
// For dW half the block's threads go to a tile's quads and to groups of rows: so many lanes, and groups.
constexpr int RESIDENT_HALF = RESIDENT_THREADS / 2;
template <class K, int L>
__host__ __device__ constexpr int quad_lanes() {
    int lanes = 1;
    while (lanes < LayerOf<K, L>::QUADS) lanes *= 2;
    return lanes;
}
template <class K, int L>
__host__ __device__ constexpr int row_groups() {
    return smallest(ceil_div(K::ROWS, 4), RESIDENT_HALF / quad_lanes<K, L>());
}

// --- shared memory, in floats ---

// A layer's part of it: one follows the other.
template <class K, int L>
struct Place {
    using T = LayerOf<K, L>;
    static constexpr int begin() {
        if constexpr (L == 0) return 0;
        else return Place<K, L - 1>::END;
    }
    static constexpr int OUTPUTS = round_up(K::OWN_ROWS * T::N_OUT, 4);
    static constexpr int WEIGHTS = begin();                                 // the tile
    static constexpr int SLOTS = WEIGHTS + T::TILE;                         // (slots, tile)
    static constexpr int INPUTS = SLOTS + K::Rule::SLOTS * T::TILE;         // of the first layer two, in turn
    static constexpr int DZ = INPUTS + (L == 0 ? 2 : 1) * K::ROWS * T::INPUT_PITCH;
    static constexpr int COPY = DZ + K::ROWS * T::PITCH;                    // all weights, if replicated
    static constexpr int H = COPY + (T::IS_REPLICATED ? round_up(T::LINES * T::COPY_PITCH, 4) : 0);
    static constexpr int SAVED = H + OUTPUTS;                               // of own rows, as is H and DELTA
    static constexpr int DELTA = SAVED + OUTPUTS;
    static constexpr int END = DELTA + OUTPUTS;

    // What threads leave each other before it is added up: of Z for one layer at a time, of dW for all at once.
    static __host__ __device__ constexpr int begin_dw() {
        if constexpr (L == 0) return 0;
        else return Place<K, L - 1>::DW_END;
    }
    static constexpr int Z = line_parts<K, L>() * K::ROWS * (T::PITCH + 4);
    static constexpr int DW = begin_dw(), DW_END = DW + row_groups<K, L>() * T::TILE;
    static constexpr int MOST_Z = L == 0 ? Z : largest(Z, Place<K, (L > 0 ? L - 1 : 0)>::MOST_Z);
};

// The batch's part, then the sums that threads leave each other.
template <class K>
struct BatchPlace {
    using LastPlace = Place<K, K::LAST>;
    static constexpr int ROWS = LastPlace::END;                             // (2, rows): where in the data, as ints
    static constexpr int WEIGHTS = ROWS + round_up(2 * K::ROWS, 4);         // (2, rows)
    static constexpr int TARGETS = WEIGHTS + round_up(2 * K::ROWS, 4);      // (2, own rows, targets)
    static constexpr int SUMS = TARGETS + round_up(2 * K::OWN_ROWS * K::TARGETS, 4);
    static constexpr int END = SUMS + largest(LastPlace::MOST_Z, LastPlace::DW_END);
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
    static constexpr int64_t Z = begin();                                   // (2, rows, line slices, n_out)
    static constexpr int64_t DX = Z + (IS_TILED ? 2 * ROWS * T::LINE_SLICES * T::N_OUT : 0);
    static constexpr int64_t H = DX + (IS_TILED && L > 0 ? 2 * ROWS * T::COLUMN_SLICES * T::N_IN : 0);
    static constexpr int64_t DZ = H + (L < K::LAST ? 2 * ROWS * T::N_OUT : 0);  // (2, rows, n_out), as is H
    static constexpr int64_t COPY = DZ + 2 * ROWS * T::N_OUT;               // (2, lines, n_out)
    static constexpr int64_t END = COPY + (T::IS_REPLICATED ? 2ll * T::LINES * T::N_OUT : 0);
};

// --- what a block has of them ---

template <int L, class K>
__device__ __forceinline__ ResidentTile tile_of(const K&) {
    return tile_of<LayerOf<K, L>>(blockIdx.x, K::BLOCKS);
}

// The tile's inputs (rows, INPUT_PITCH) of the step with a tag.
template <int L, class K>
__device__ __forceinline__ float* inputs_of(const K& k, uint32_t tag) {
    return k.shared + Place<K, L>::INPUTS + (L == 0 ? (tag & 1) * K::ROWS * LayerOf<K, L>::INPUT_PITCH : 0);
}

}  // namespace mlpgpu
