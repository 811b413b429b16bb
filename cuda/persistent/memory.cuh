// What a block of the resident kernel has and where: its arguments, shared memory, and mail.
#pragma once

#include "elementwise/loss.cuh"
#include "persistent/products.cuh"
#include "elementwise/update.cuh"

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

template <class K, int L>
using LayerOf = typename K::Network::template Layer<L>;
// The first layer's operands may be bfloat16; others come as mail, and are float32.
template <class K, int L>
using ProductsOf = Products<LayerOf<K, L>, K::Network::ROWS,
                            (L > 0 && K::Network::NUMBERS == BFLOATS) ? 1 : K::Network::NUMBERS>;

// A block at a step: what every stage gets.
template <class Net, class Loss_, template <class> class Target_, class Source, class Rule_, class Input_>
struct Resident {
    using Network = Net;
    using Loss = Loss_;
    template <class From>
    using Target = Target_<From>;
    using Rule = Rule_;
    using Input = Input_;
    static constexpr bool HAS_COPY_ENGINE = Net::HAS_COPY_ENGINE;
    static constexpr int ROWS = Net::ROWS, BLOCKS = Net::BLOCKS, LAST = Net::LAST, OWN_ROWS = Net::OWN_ROWS;
    // What the first layer's products read: a tile's inputs, its weights and dZ.
    using X = typename ProductsOf<Resident, 0>::Operand;
    static constexpr int X_PITCH = ProductsOf<Resident, 0>::X_PITCH;  // of a row of inputs
    static constexpr int TARGETS = Target<const float*>::count(Net::template Layer<LAST>::N_OUT);  // of a row

    // Whether a row's way from the last hidden layer's z to its dz is one stage (persistent/output_stage.cuh).
    static constexpr bool TURNS = Net::turns();

    ResidentData<Input> data;
    Source targets;
    uint64_t* mail;
    X* dealt;
    float* shared;
    DropoutKey key;  // of the step
    uint32_t tag;    // of the step; mail begins with another
    int rows;        // of the step's batch
    int block;       // this one

    __device__ __forceinline__ int parity() const { return tag & 1; }
    __device__ __forceinline__ bool has_rows() const { return static_cast<int>(blockIdx.x) < rows; }
    // The row of the batch that is a block's own number `i`.
    __device__ __forceinline__ int own_row(int i) const { return blockIdx.x + i * BLOCKS; }
    // A place of mail of which each step has `count` words.
    __device__ __forceinline__ uint64_t* words(int64_t first, int64_t count) const {
        return mail + first + parity() * count;
    }
};

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
    using P = ProductsOf<K, L>;
    static constexpr int SIZE = sizeof(typename P::Operand);
    static constexpr int STAGED_ROWS = round_up(K::ROWS, P::DW_TERMS);      // what is beyond a batch counts as 0
    static constexpr int WEIGHTS = begin();                                 // the tile
    static constexpr int SLOTS = WEIGHTS + T::TILE;                         // (slots, tile)
    static constexpr int OPERAND = SLOTS + K::Rule::SLOTS * T::TILE;        // the tile in bfloat16, if that is read
    static constexpr int INPUTS = OPERAND + P::W_OPERANDS * SIZE / 4;       // of the first layer two, in turn
    static constexpr int DZ = INPUTS + (L == 0 ? 2 : 1) * STAGED_ROWS * P::X_PITCH * SIZE / 4;
    // All weights, if replicated.
    static constexpr int COPY = DZ + round_up(K::ROWS, P::DZ_ROWS) * P::DZ_PITCH * SIZE / 4 + 8;
    static constexpr int H = COPY + (T::IS_REPLICATED ? round_up(T::LINES * T::COPY_PITCH, 4) : 0);
    static constexpr int SAVED = H + OUTPUTS;                               // of own rows, as is H and DELTA
    static constexpr int DELTA = SAVED + OUTPUTS;
    static constexpr int END = DELTA + OUTPUTS;

    // What threads leave each other to be added up: parts of Z, then of dW.
    static constexpr bool ADDS_Z = !T::IS_REPLICATED && P::Z_PARTS > 1, ADDS_DW = P::DW_PARTS > 1;
    static constexpr int Z_SUMS = ADDS_Z ? P::Z_PARTS * K::ROWS * T::SUM_PITCH : 0;
    static constexpr int DW_SUMS = ADDS_DW ? P::DW_PARTS * T::TILE : 0;
    static constexpr int MOST_SUMS = largest(Z_SUMS, DW_SUMS, L == 0 ? 0 : Place<K, (L > 0 ? L - 1 : 0)>::MOST_SUMS);
};

// The batch's part, then the sums that threads leave each other, for one layer at a time.
template <class K>
struct BatchPlace {
    using LastPlace = Place<K, K::LAST>;
    static constexpr int BARRIER = LastPlace::END;                          // of copies of inputs
    static constexpr int WEIGHTS = BARRIER + 4;                             // (2, rows)
    static constexpr int TARGETS = WEIGHTS + round_up(2 * K::ROWS, 4);      // (2, own rows, targets)
    static constexpr int RATES = TARGETS + round_up(2 * K::OWN_ROWS * K::TARGETS, 4);    // (2, COLUMNS)
    static constexpr int SCALE = RATES + 2 * COLUMNS;                                    // (2,)
    static constexpr int LOGITS = SCALE + 2;                                             // parts: (warps, half a warp)
    static constexpr int OUTPUTS = LOGITS + (K::TURNS ? RESIDENT_WARPS * WARP / 2 : 0);  // (2, half a warp)
    static constexpr int SUMS = OUTPUTS + (K::TURNS ? WARP : 0);
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
    static constexpr int64_t DZ = H + (L < K::LAST ? 2 * ROWS * T::OUT_PITCH : 0);  // (2, rows, DZ_WORDS); H: OUT_PITCH
    static constexpr bool IS_SHORT = sizeof(typename ProductsOf<K, L>::Operand) == 2;  // a word has two of dZ
    static constexpr int DZ_WORDS = IS_SHORT ? round_up(T::OUT_PITCH / 2, 2) : T::OUT_PITCH;
    static constexpr int64_t COPY = DZ + 2 * ROWS * DZ_WORDS;                  // (2, lines, OUT_PITCH)
    static constexpr int64_t END = COPY + (T::IS_REPLICATED ? 2ll * T::LINES * T::OUT_PITCH : 0);
};

// A word of each block that says that it has begun, then.
template <class K>
struct BeginMail {
    static constexpr int64_t AT = Mail<K, K::LAST>::END, END = AT + round_up(K::BLOCKS, 2);
};

// --- what a block has of them ---

template <int L, class K>
__device__ __forceinline__ ResidentTile tile_of(const K& k) {
    return tile_of<LayerOf<K, L>>(k.block, K::BLOCKS);
}

// The tile's inputs (rows, X_PITCH) of the step with a tag, and its dZ (rows, DZ_PITCH).
template <int L, class K>
__device__ __forceinline__ auto inputs_of(const K& k, uint32_t tag) {
    using P = ProductsOf<K, L>;
    return reinterpret_cast<typename P::Operand*>(k.shared + Place<K, L>::INPUTS) +
           (L == 0 ? (tag & 1) * Place<K, L>::STAGED_ROWS * P::X_PITCH : 0);
}

template <int L, class K>
__device__ __forceinline__ auto dz_of(const K& k) {
    return reinterpret_cast<typename ProductsOf<K, L>::Operand*>(k.shared + Place<K, L>::DZ);
}

// The tile's weights as products read them.
template <int L, class K>
__device__ __forceinline__ auto operand_of(const K& k) {
    using P = ProductsOf<K, L>;
    constexpr int AT = sizeof(typename P::Operand) == 4 ? Place<K, L>::WEIGHTS : Place<K, L>::OPERAND;
    return reinterpret_cast<typename P::Operand*>(k.shared + AT);
}

// Two neighbouring weights of the tile that have moved, for products to read.
template <int L, class K>
__device__ __forceinline__ void put_operand(const K& k, int line, int column, float2 w) {
    using P = ProductsOf<K, L>;
    if constexpr (sizeof(typename P::Operand) == 2)
        *reinterpret_cast<unsigned*>(operand_of<L>(k) + line * P::W_PITCH + column) = bfloat_pair(w.x, w.y);
}

}  // namespace mlpgpu
