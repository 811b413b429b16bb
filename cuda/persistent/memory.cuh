// What a block of the persistent kernel works with: its arguments, its shared memory, and its messages.
#pragma once

#include "common/numbers.cuh"
#include "math/losses.cuh"
#include "math/optimizers.cuh"
#include "math/teams.cuh"
#include "persistent/products.cuh"

namespace mlpgpu {

template <class Input>
struct TrainingData {
    const int* order;
    const Input* inputs;
    float scale;  // of inputs
    const float *mean, *deviation;  // of standardized inputs, or null
    const float* weights;  // of rows, or null
    const float *target_mean, *target_scale;
};

template <class K, int L>
using LayerOf = typename K::Network::template Layer<L>;
// The first layer's operands may be bfloat16. Those of other layers come as messages, in float32.
template <class K, int L>
using ProductsOf = Products<LayerOf<K, L>, K::Network::ROWS,
                            (L > 0 && K::Network::TF32_TERMS == BFLOAT16) ? 1 : K::Network::TF32_TERMS>;

// What every stage is given: the kernel's arguments, and the block's number and step.
template <class Net, class Loss_, template <class> class Target_, class Source, class Rule_, class Input_>
struct BlockContext {
    using Network = Net;
    using Loss = Loss_;
    template <class From>
    using Target = Target_<From>;
    using Rule = Rule_;
    using Input = Input_;
    static constexpr bool HAS_COPY_ENGINE = Net::HAS_COPY_ENGINE;
    static constexpr int ROWS = Net::ROWS, BLOCKS = Net::BLOCKS, LAST = Net::LAST, ROWS_PER_BLOCK = Net::ROWS_PER_BLOCK;
    // Type of what the first layer's products read: a tile's inputs, its weights and dZ.
    using X = typename ProductsOf<BlockContext, 0>::Operand;
    static constexpr int X_PITCH = ProductsOf<BlockContext, 0>::X_PITCH;  // of a row of inputs
    static constexpr int TARGETS = Target<const float*>::count(Net::template Layer<LAST>::N_OUT);  // of a row

    // Whether a row goes from the last hidden layer's z to its dz in one stage (persistent/output_stage.cuh).
    static constexpr bool HAS_OUTPUT_STAGE = Net::has_output_stage();

    TrainingData<Input> data;
    Source targets;
    uint64_t* messages;
    X* staged;
    float* shared;
    DropoutKey key;  // of the step
    uint32_t sequence;  // of the step's messages; what lies in their words before has another
    int rows;        // of the step's batch
    int block;  // the block's number

    __device__ __forceinline__ int parity() const { return sequence & 1; }
    __device__ __forceinline__ bool has_rows() const { return static_cast<int>(blockIdx.x) < rows; }
    // The number in the batch of the block's row i.
    __device__ __forceinline__ int block_row(int i) const { return blockIdx.x + i * BLOCKS; }
    // The words of messages of which each step has `count`, at this step.
    __device__ __forceinline__ uint64_t* words(int64_t first, int64_t count) const {
        return messages + first + parity() * count;
    }
};

// --- shared memory, in floats ---

// A layer's part of shared memory; layers follow each other.
template <class K, int L>
struct LayerMemory {
    using T = LayerOf<K, L>;
    static constexpr int begin() {
        if constexpr (L == 0) return 0;
        else return LayerMemory<K, L - 1>::END;
    }
    static constexpr int OUTPUTS = round_up(K::ROWS_PER_BLOCK * T::OUT_PITCH, 4);
    using P = ProductsOf<K, L>;
    static constexpr int SIZE = sizeof(typename P::Operand);
    static constexpr int STAGED_ROWS = round_up(K::ROWS, P::DW_TERMS);  // rows beyond the batch count as 0
    static constexpr int WEIGHTS = begin();  // of the tile
    static constexpr int SLOTS = WEIGHTS + T::TILE;                         // (slots, tile)
    static constexpr int OPERAND = SLOTS + K::Rule::SLOTS * T::TILE;  // the tile in bfloat16, if products read that
    static constexpr int INPUTS = OPERAND + P::W_OPERANDS * SIZE / 4;  // two batches of the first layer, in alternation
    static constexpr int DZ = INPUTS + (L == 0 ? 2 : 1) * STAGED_ROWS * P::X_PITCH * SIZE / 4;
    // A copy of all weights, if the layer is replicated.
    static constexpr int COPY = DZ + round_up(K::ROWS, P::DZ_ROWS) * P::DZ_PITCH * SIZE / 4 + 8;
    static constexpr int H = COPY + (T::IS_REPLICATED ? round_up(T::WEIGHT_ROWS * T::COPY_PITCH, 4) : 0);
    static constexpr int SAVED = H + OUTPUTS;  // of the block's rows, as are H and DELTA
    static constexpr int DELTA = SAVED + OUTPUTS;
    static constexpr int END = DELTA + OUTPUTS;

    // Room for partial sums that threads leave each other: of Z, then of dW.
    static constexpr bool ADDS_Z = !T::IS_REPLICATED && P::Z_PARTIALS > 1, ADDS_DW = P::DW_PARTIALS > 1;
    static constexpr int Z_SUMS = ADDS_Z ? P::Z_PARTIALS * K::ROWS * T::SUM_PITCH : 0;
    static constexpr int DW_SUMS = ADDS_DW ? P::DW_PARTIALS * T::TILE : 0;
    static constexpr int MOST_SUMS =
        largest(Z_SUMS, DW_SUMS, L == 0 ? 0 : LayerMemory<K, (L > 0 ? L - 1 : 0)>::MOST_SUMS);
};

// The batch's part of shared memory, then the partial sums of one layer at a time.
template <class K>
struct BatchMemory {
    using LastLayer = LayerMemory<K, K::LAST>;
    static constexpr int BARRIER = LastLayer::END;  // for copies of inputs
    static constexpr int WEIGHTS = BARRIER + 4;                             // (2, rows)
    static constexpr int TARGETS = WEIGHTS + round_up(2 * K::ROWS, 4);  // (2, rows of the block, targets)
    static constexpr int RATES = TARGETS + round_up(2 * K::ROWS_PER_BLOCK * K::TARGETS, 4);    // (2, RATES_PER_STEP)
    static constexpr int SCALE = RATES + 2 * RATES_PER_STEP;                                    // (2,)
    static constexpr int LOGITS = SCALE + 2;  // partial sums: (warps, half a warp)
    static constexpr int OUTPUTS = LOGITS + (K::HAS_OUTPUT_STAGE ? COMPUTE_WARPS * WARP / 2 : 0);  // (2, half a warp)
    static constexpr int SUMS = OUTPUTS + (K::HAS_OUTPUT_STAGE ? WARP : 0);
    static constexpr int END = SUMS + LastLayer::MOST_SUMS;
};

// --- messages, in words ---

// A layer's messages, for even and for odd steps.
template <class K, int L>
struct MessageLayout {
    using T = LayerOf<K, L>;
    static constexpr int64_t begin() {
        if constexpr (L == 0) return 0;
        else return MessageLayout<K, L - 1>::END;
    }
    static constexpr int64_t ROWS = K::ROWS;
    static constexpr bool IS_TILED = !T::IS_REPLICATED;
    static constexpr int64_t Z = begin();  // (2, rows, row slices, OUT_PITCH)
    static constexpr int64_t DX = Z + (IS_TILED ? 2 * ROWS * T::ROW_SLICES * T::OUT_PITCH : 0);
    static constexpr int64_t H = DX + (IS_TILED && L > 0 ? 2 * ROWS * T::COLUMN_SLICES * T::IN_PITCH : 0);
    static constexpr int64_t DZ = H + (L < K::LAST ? 2 * ROWS * T::OUT_PITCH : 0);  // (2, rows, DZ_WORDS)
    static constexpr bool HAS_BFLOAT_PAIRS = sizeof(typename ProductsOf<K, L>::Operand) == 2;  // of dZ, in a word
    static constexpr int DZ_WORDS = HAS_BFLOAT_PAIRS ? round_up(T::OUT_PITCH / 2, 2) : T::OUT_PITCH;
    static constexpr int64_t COPY = DZ + 2 * ROWS * DZ_WORDS;  // (2, weight rows, OUT_PITCH)
    static constexpr int64_t END = COPY + (T::IS_REPLICATED ? 2ll * T::WEIGHT_ROWS * T::OUT_PITCH : 0);
};

// The words by which blocks tell each other that they have begun, after all layers.
template <class K>
struct RendezvousLayout {
    static constexpr int64_t BEGIN = MessageLayout<K, K::LAST>::END, END = BEGIN + round_up(K::BLOCKS, 2);
};

// --- the block's parts of both ---

template <int L, class K>
__device__ __forceinline__ WeightTile tile_of(const K& k) {
    return tile_of<LayerOf<K, L>>(k.block, K::BLOCKS);
}

// The tile's inputs (rows, X_PITCH) of the step with a sequence number, and its dZ (rows, DZ_PITCH).
template <int L, class K>
__device__ __forceinline__ auto inputs_of(const K& k, uint32_t sequence) {
    using P = ProductsOf<K, L>;
    return reinterpret_cast<typename P::Operand*>(k.shared + LayerMemory<K, L>::INPUTS) +
           (L == 0 ? (sequence & 1) * LayerMemory<K, L>::STAGED_ROWS * P::X_PITCH : 0);
}

template <int L, class K>
__device__ __forceinline__ auto dz_of(const K& k) {
    return reinterpret_cast<typename ProductsOf<K, L>::Operand*>(k.shared + LayerMemory<K, L>::DZ);
}

// The tile's weights as products read them.
template <int L, class K>
__device__ __forceinline__ auto operand_of(const K& k) {
    using P = ProductsOf<K, L>;
    constexpr int OFFSET = sizeof(typename P::Operand) == 4 ? LayerMemory<K, L>::WEIGHTS : LayerMemory<K, L>::OPERAND;
    return reinterpret_cast<typename P::Operand*>(k.shared + OFFSET);
}

// Stores two neighbouring updated weights for the products to read, where these read bfloat16.
template <int L, class K>
__device__ __forceinline__ void put_operand(const K& k, int weight_row, int column, float2 w) {
    using P = ProductsOf<K, L>;
    if constexpr (sizeof(typename P::Operand) == 2)
        *reinterpret_cast<unsigned*>(operand_of<L>(k) + weight_row * P::W_PITCH + column) = bfloat_pair(w.x, w.y);
}

}  // namespace mlpgpu
