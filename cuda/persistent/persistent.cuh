// The persistent kernel: many training steps in one launch, with weights, optimizer slots and activations on the chip.
//
// Every layer's weights, with the biases as their last row, are cut into tiles. A block holds a tile and its slots in
// shared memory, and it alone updates them. Every row of the batch belongs to one block, which does what lies between
// products: activations, dropout, the loss. A step alternates between tiles and rows:
//
//     tile   Z += X W               a slice of the weight rows, a slice of the columns, all rows of the batch
//     row    h = f(z), loss, dz     one row of the batch, all columns
//     tile   dX += dZ Wᵀ, dW, w     the tile again; W is updated after dX
//
// A layer with few weights is *replicated*: every block that has rows holds a copy of them and multiplies its rows by
// itself. Only dW and the update are left to the tiles, which send the new weights to all copies.
//
// Blocks do not wait at barriers of the grid. They send each other messages (arch/messages.cuh) with the step's
// sequence number. Each message has two words, for even and for odd steps. Two are enough: before a block writes a word
// again two steps later, it has received messages, perhaps by way of other blocks, that its readers sent after they had
// read the word.
//
// All sums have a fixed order.  The blocks must run at once: the launch is cooperative.
//
//     persistent/shape.cuh      layers and their tiles
//     persistent/memory.cuh     layout of shared memory and of messages
//     persistent/inputs.cuh     batches to come
//     persistent/forward.cuh, persistent/output_stage.cuh, persistent/backward.cuh, persistent/update.cuh
//                               the stages of a step, which this file puts in order
#pragma once

#include "persistent/backward.cuh"
#include "persistent/forward.cuh"
#include "persistent/inputs.cuh"
#include "persistent/output_stage.cuh"
#include "persistent/update.cuh"


namespace mlpgpu {

// --- the state ---

// A layer's biases follow its weights in memory, so they are the last row of one matrix.
template <class K, int L>
__host__ __device__ constexpr int64_t parameters_below() {
    if constexpr (L == 0) {
        return 0;
    } else {
        using T = LayerOf<K, L - 1>;
        return parameters_below<K, L - 1>() + static_cast<int64_t>(T::WEIGHT_ROWS) * T::N_OUT;
    }
}

// Calls visit(offset in the tile, offset in the flat arrays) for the tile's weights.
template <int L, class K, class Visit>
__device__ __forceinline__ void each_weight(const K& k, Visit visit) {
    using T = LayerOf<K, L>;
    const WeightTile t = tile_of<L>(k);
    for (int i = compute_thread(); i < t.weight_rows * T::COLUMNS; i += COMPUTE_THREADS) {
        const int weight_row = i / T::COLUMNS, column = i % T::COLUMNS;
        const int64_t offset =
            static_cast<int64_t>(t.first_weight_row + weight_row) * T::N_OUT + t.first_column + column;
        if (column < t.columns)
            visit(weight_row / 4 * T::QUAD_PITCH + weight_row % 4 * T::PITCH + column,
                  parameters_below<K, L>() + offset);
    }
}

// Elements from one slot to the next, as the host lays them out: whole cache lines.
template <class K>
__host__ __device__ constexpr int64_t slot_pitch() {
    return round_up(parameters_below<K, K::LAST + 1>(), 32);
}

template <int L, class K>
__device__ __forceinline__ void load_state(const K& k, const float* parameters, const float* slots) {
    using T = LayerOf<K, L>;
    constexpr int SLOTS = K::Rule::SLOTS;
    constexpr int64_t PITCH = slot_pitch<K>();
    float* const w = k.shared + LayerMemory<K, L>::WEIGHTS;
    each_weight<L>(k, [=](int offset, int64_t from) {
        w[offset] = parameters[from];
        for (int s = 0; s < SLOTS; ++s) w[(s + 1) * T::TILE + offset] = slots[s * PITCH + from];
    });
    const WeightTile t = tile_of<L>(k);
    if constexpr (L == 0) {
        for (int i = compute_thread(); i < t.weight_rows * T::COLUMNS / 2; i += COMPUTE_THREADS) {
            const int weight_row = i / (T::COLUMNS / 2), column = i % (T::COLUMNS / 2) * 2;
            const int64_t offset =
                static_cast<int64_t>(t.first_weight_row + weight_row) * T::N_OUT + t.first_column + column;
            if (column < t.columns)
                put_operand<L>(k, weight_row, column,
                               make_float2(parameters[offset], column + 1 < t.columns ? parameters[offset + 1] : 0.0f));
        }
    } else if (T::HAS_BIAS && t.is_mine && t.first_weight_row + t.weight_rows == T::WEIGHT_ROWS) {  // inputs of biases
        for (int row = compute_thread(); row < LayerMemory<K, L>::STAGED_ROWS; row += COMPUTE_THREADS)
            inputs_of<L>(k, 0)[row * T::INPUT_PITCH + t.weight_rows - 1] = 1.0f;
    }
    if constexpr (T::IS_REPLICATED)
        for (int i = compute_thread(); i < T::WEIGHT_ROWS * T::N_OUT; i += COMPUTE_THREADS) {
            const int offset = i / T::N_OUT * T::COPY_PITCH + i % T::N_OUT;
            k.shared[LayerMemory<K, L>::COPY + offset] = parameters[parameters_below<K, L>() + i];
        }
    if constexpr (L < K::LAST) load_state<L + 1>(k, parameters, slots);
}

template <int L, class K>
__device__ __forceinline__ void store_state(const K& k, float* parameters, float* slots) {
    using T = LayerOf<K, L>;
    constexpr int SLOTS = K::Rule::SLOTS;
    constexpr int64_t PITCH = slot_pitch<K>();
    const float* const w = k.shared + LayerMemory<K, L>::WEIGHTS;
    each_weight<L>(k, [=](int offset, int64_t to) {
        parameters[to] = w[offset];
        for (int s = 0; s < SLOTS; ++s) slots[s * PITCH + to] = w[(s + 1) * T::TILE + offset];
    });
    if constexpr (L < K::LAST) store_state<L + 1>(k, parameters, slots);
}

// --- the steps ---

// Waits until every block has staged its rows of the first batch, whose inputs may then be requested.
template <class K>
__device__ __forceinline__ void grid_rendezvous(const K& k) {
    uint64_t* const words = k.messages + RendezvousLayout<K>::BEGIN;
    if (compute_thread() == 0) send(words + blockIdx.x, 0.0f, k.sequence);
    const auto address = [=](int i) { return words + i; };
    receive(receiver<COMPUTE_THREADS, K::BLOCKS>(K::BLOCKS, k.sequence, address, [](int, float) {}));
    sync_compute_threads();
}

// The producers' part of a launch. They meet the compute threads before the first step and at the end of each.
template <class K>
__device__ __forceinline__ void produce_batches(const K& k, const StepRange& range, float* errors) {
    for (int done = 0; done < StagedInputs<K>::STEPS_BEFORE; ++done) StagedInputs<K>::stage(k, range.batch(done));
    fetch_batch(k, range.batch(0));
    sync_producers();
    store_scale(k, range.batch(0));
    publish_staged<K>();
    sync_all();
    InputCopies<K>::copy(k, range.batch(0));
    for (int done = 0; done <= range.steps; ++done) {
        sync_all();
        StagedInputs<K>::stage(k, range.batch(done + StagedInputs<K>::STEPS_BEFORE));
        if constexpr (K::HAS_OUTPUT_STAGE) {
            sync_producers();
            if (const Batch last = range.batch(done - 1); done > 0 && static_cast<int>(blockIdx.x) < last.rows)
                output_loss(k, last.sequence, errors + 2ll * K::ROWS * last.run);
            sync_producers();  // which has read the last targets
        }
        fetch_batch(k, range.batch(done + 1));
        sync_producers();
        store_scale(k, range.batch(done + 1));
        publish_staged<K>();
        if (done < range.steps) InputCopies<K>::copy(k, range.batch(done + 1));
    }
}

template <class K>
__device__ __forceinline__ void train(K& k, const StepRange& range, float* parameters, float* slots, float* errors) {
    constexpr int LAST = K::LAST;
    load_state<0>(k, parameters, slots);
    sync_all();
    grid_rendezvous(k);
    InputCopies<K>::request(k, range.batch(0));
    sync_all();
    k.rows = range.batch(0).rows;
    for (int done = 0; done < range.steps; ++done) {
        k.key.step = range.step.number + done;
        k.sequence = range.sequence + done;
        if (!K::HAS_COPY_ENGINE) forget(k.block);  // else the tiles' coordinates would take too many registers
        InputCopies<K>::wait(k, done);
        receive_copies_during<LAST>(k, done > 0 && k.has_rows(), [&] { send_z<0>(k); });
        forward<0>(k);
        if constexpr (K::HAS_OUTPUT_STAGE) {
            if (k.has_rows()) output_stage(k);
            backward<LAST - 1>(k);
        } else {
            sync_compute_threads();
            rows_loss(k, errors + 2ll * K::ROWS * (range.step.run + done));
            backward<LAST>(k);
        }
        receive_rest<LAST>(k);
        sync_compute_threads();
        InputCopies<K>::request(k, range.batch(done + 1));
        update_all<LAST>(k);
        const int rows = range.batch(done + 1).rows;
        if (rows < k.rows) {
            sync_compute_threads();  // which have read dZ
            clear_dz<LAST>(k);
        }
        sync_all();
        k.rows = rows;
    }
    store_state<0>(k, parameters, slots);
}

template <int SHARED_BYTES_>
struct PersistentBlock {
    static constexpr int THREADS = COMPUTE_THREADS + PRODUCER_THREADS, SHARED_BYTES = SHARED_BYTES_;
};

// Trains for `steps` steps of one epoch, from *step on. The loss and weight of each row go to errors (steps of a run,
// rows, 2). `sequence` continues from launch to launch, so that no message of an earlier launch is taken for a new one.
// Grid: Net::BLOCKS blocks.
template <class Net, class Loss, template <class> class Target, class Source, class Rule, class Input, int SHARED_BYTES,
          int64_t MESSAGE_WORDS>
__device__ __forceinline__ void train_persistent(const Step* step, int steps, uint32_t sequence, const int* order,
                                         const Input* inputs, float scale, const float* mean, const float* deviation,
                                         Source targets, const float* weights, const float* target_mean,
                                         const float* target_scale, uint64_t seed, float* parameters,
                                         float* slots, uint64_t* messages, void* staged, float* errors) {
    using K = BlockContext<Net, Loss, Target, Source, Rule, Input>;
    static_assert(BatchMemory<K>::END * 4 == SHARED_BYTES && RendezvousLayout<K>::END == MESSAGE_WORDS,
                  "persistent/layout.py lays the memory out in another way");
    SHARED(float, shared);
    K k = {{order, inputs, scale, mean, deviation, weights, target_mean, target_scale},
           targets, messages, static_cast<typename K::X*>(staged), shared, {seed, 0}, sequence, 0,
           static_cast<int>(blockIdx.x)};
    for (int i = threadIdx.x; i < BatchMemory<K>::END; i += blockDim.x) shared[i] = 0.0f;  // padding must be 0
    InputCopies<K>::make(k);
    const StepRange range = {*step, steps, sequence};
    if (threadIdx.x < COMPUTE_THREADS) train(k, range, parameters, slots, errors);
    else produce_batches(k, range, errors);
}

}  // namespace mlpgpu
