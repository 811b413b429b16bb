// Training for many steps in one launch: weights, optimizer slots and activations stay on the chip.
//
// Every layer's weights, with the biases as their last line, are cut into tiles, one for each block, which
// keeps them and their slots in shared memory and alone updates them.  Every row of the batch has one block
// that does what lies between products: activations, dropout, the loss.  A step goes to and fro:
//
//     tile   Z += X W               a slice of the lines, a slice of the columns, all rows
//     row    h = f(z), loss, dz     one row, all columns
//     tile   dX += dZ Wᵀ, dW, w     as before; W after dX
//
// A layer with few weights is *replicated*: every block that has rows holds a copy of them, so that the row
// does its products by itself, and only dW and the update are left to the tiles, which send the new weights.
//
// Blocks do not wait at barriers of the grid: what one needs of another comes as mail (mail.cuh), tagged with the
// step's number.  Each word has two places that take turns.  That is enough: whoever writes a word again two steps
// later has meanwhile had mail, perhaps by way of others, that its readers sent after they read it.
//
// All sums have a fixed order.  The blocks must run at once: the launch is cooperative.
//
//     resident_shape.cuh      layers and their tiles
//     resident_memory.cuh     what is where in shared memory and in the mail
//     resident_inputs.cuh     batches to come
//     resident_forward.cuh, resident_backward.cuh, resident_update.cuh
//                             the stages of a step, which this file puts in order
#pragma once

#include "resident_backward.cuh"
#include "resident_forward.cuh"
#include "resident_inputs.cuh"
#include "resident_update.cuh"

namespace mlpgpu {

// --- the state ---

// A layer's biases follow its weights, and so are the last line of one matrix.
template <class K, int L>
__host__ __device__ constexpr int64_t parameters_below() {
    if constexpr (L == 0) {
        return 0;
    } else {
        using T = LayerOf<K, L - 1>;
        return parameters_below<K, L - 1>() + static_cast<int64_t>(T::LINES) * T::N_OUT;
    }
}

// Calls visit(place in the tile, place in the flat arrays) for the tile's weights.
template <int L, class K, class Visit>
__device__ __forceinline__ void each_weight(const K& k, Visit visit) {
    using T = LayerOf<K, L>;
    const ResidentTile t = tile_of<L>(k);
    for (int i = threadIdx.x; i < t.lines * T::COLUMNS; i += RESIDENT_THREADS) {
        const int line = i / T::COLUMNS, column = i % T::COLUMNS;
        const int64_t at = static_cast<int64_t>(t.first_line + line) * T::N_OUT + t.first_column + column;
        if (column < t.columns)
            visit(line / 4 * T::QUAD_PITCH + line % 4 * T::PITCH + column, parameters_below<K, L>() + at);
    }
}

template <int L, class K>
__device__ __forceinline__ void load_state(const K& k, const float* parameters, const float* slots) {
    using T = LayerOf<K, L>;
    constexpr int SLOTS = K::Rule::SLOTS;
    constexpr int64_t PARAMETERS = parameters_below<K, K::LAST + 1>();
    float* const w = k.shared + Place<K, L>::WEIGHTS;
    each_weight<L>(k, [=](int at, int64_t from) {
        w[at] = parameters[from];
        for (int s = 0; s < SLOTS; ++s) w[(s + 1) * T::TILE + at] = slots[s * PARAMETERS + from];
    });
    const ResidentTile t = tile_of<L>(k);
    if (T::HAS_BIAS && t.is_mine && t.first_line + t.lines == T::LINES) {  // the line of ones
        constexpr int ALL = (L == 0 ? 2 : 1) * K::ROWS;
        for (int row = threadIdx.x; row < ALL; row += RESIDENT_THREADS)
            k.shared[Place<K, L>::INPUTS + row * T::INPUT_PITCH + t.lines - 1] = 1.0f;
    }
    if constexpr (T::IS_REPLICATED)
        for (int i = threadIdx.x; i < T::LINES * T::N_OUT; i += RESIDENT_THREADS) {
            const int at = i / T::N_OUT * T::COPY_PITCH + i % T::N_OUT;
            k.shared[Place<K, L>::COPY + at] = parameters[parameters_below<K, L>() + i];
        }
    if constexpr (L < K::LAST) load_state<L + 1>(k, parameters, slots);
}

template <int L, class K>
__device__ __forceinline__ void store_state(const K& k, float* parameters, float* slots) {
    using T = LayerOf<K, L>;
    constexpr int SLOTS = K::Rule::SLOTS;
    constexpr int64_t PARAMETERS = parameters_below<K, K::LAST + 1>();
    const float* const w = k.shared + Place<K, L>::WEIGHTS;
    each_weight<L>(k, [=](int at, int64_t to) {
        parameters[to] = w[at];
        for (int s = 0; s < SLOTS; ++s) slots[s * PARAMETERS + to] = w[(s + 1) * T::TILE + at];
    });
    if constexpr (L < K::LAST) store_state<L + 1>(k, parameters, slots);
}

// --- all of it ---

template <template <class> class Inputs, class K>
__device__ __forceinline__ void train(K& k, Step step, int steps, float* parameters, float* slots, float* errors) {
    constexpr int LAST = K::LAST;
    for (int i = threadIdx.x; i < BatchPlace<K>::END; i += RESIDENT_THREADS) k.shared[i] = 0.0f;  // pads must be 0
    __syncthreads();
    load_state<0>(k, parameters, slots);
    // The batch `ahead` steps later, as far as there are steps.
    const auto batch = [&](int done, int ahead) -> Batch {
        Step its = step;
        its.batch += ahead;
        const int64_t first = static_cast<int64_t>(its.batch) * its.batch_rows;
        return {k.tag + ahead, step.number + ahead, first, done + ahead < steps ? batch_rows(its) : 0};
    };
    Inputs<K> inputs;
    RowData<K> row_data;
    Batch next = batch(0, 0);
    k.rows = next.rows;
    find_places(k, next);
    __syncthreads();
    inputs.fetch(k, next);
    row_data.fetch(k, next);
    inputs.stage(k, next);
    row_data.stage(k, next);
    find_places(k, batch(0, 1));
    inputs.wait();
    __syncthreads();

    for (int done = 0; done < steps; ++done) {
        k.key.step = step.number;
        next = batch(done, 1);
        inputs.fetch(k, next);
        row_data.fetch(k, next);
        sum_z<0>(k);
        __syncthreads();
        send_z<0>(k);
        const auto stage_next = [&] {  // while Z is on its way
            inputs.stage(k, next);
            row_data.stage(k, next);
        };
        if (done > 0 && k.has_rows()) receive_copies_beside<LAST>(k, stage_next);
        else stage_next();
        const float scale = inverse_row_weight(k);
        float rates[COLUMNS];
        for (int i = 0; i < COLUMNS; ++i) rates[i] = schedule[step.run * COLUMNS + i];
        forward<0>(k);
        __syncthreads();
        rows_loss(k, errors + 2ll * K::ROWS * step.run);
        __syncthreads();
        backward<LAST>(k);
        receive_rest<LAST>(k);
        __syncthreads();
        find_places(k, batch(done, 2));
        sum_all_dw<LAST>(k);
        __syncthreads();
        update_all<LAST>(k, scale, rates);
        inputs.wait();
        __syncthreads();
        k.tag += 1, step.number += 1, step.run += 1, step.batch += 1;
        k.rows = next.rows;
    }
    store_state<0>(k, parameters, slots);
}

// Trains for `steps` steps from *step on, which are of one epoch.  Each row leaves its value and weight in errors
// (steps of a run, rows, 2).  `tag` goes on from launch to launch, so that no mail of an earlier one is taken.
// Grid: Net::BLOCKS blocks.
template <class Net, class Loss, template <class> class Target, class Source, class Rule, class Input,
          template <class> class Inputs, int SHARED_BYTES, int64_t MAIL_WORDS>
__device__ __forceinline__ void resident(const Step* step, int steps, uint32_t tag, const int* order,
                                         const Input* inputs, float scale, const float* mean, const float* deviation,
                                         Source targets, const float* weights, const float* target_mean,
                                         const float* target_scale, uint64_t seed, uint64_t purpose, float* parameters,
                                         float* slots, uint64_t* mail, float* errors) {
    using K = Resident<Net, Loss, Target, Source, Rule, Input>;
    static_assert(BatchPlace<K>::END * 4 == SHARED_BYTES && Mail<K, K::LAST>::END == MAIL_WORDS,
                  "resident.py lays the kernel's memory out in another way");
    SHARED(float, shared);
    K k = {{order, inputs, scale, mean, deviation, weights, target_mean, target_scale},
           targets, mail, shared, {seed, purpose, 0}, tag, 0};
    train<Inputs>(k, *step, steps, parameters, slots, errors);
}

}  // namespace mlpgpu
