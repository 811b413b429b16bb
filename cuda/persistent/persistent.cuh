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
// Blocks do not wait at barriers of the grid: what one needs of another comes as mail (arch/messages.cuh), tagged with the
// step's number.  Each word has two places that take turns.  That is enough: whoever writes a word again two steps
// later has meanwhile had mail, perhaps by way of others, that its readers sent after they read it.
//
// All sums have a fixed order.  The blocks must run at once: the launch is cooperative.
//
//     persistent/shape.cuh      layers and their tiles
//     persistent/memory.cuh     what is where in shared memory and in the mail
//     persistent/inputs.cuh     batches to come
//     persistent/forward.cuh, persistent/output_stage.cuh, persistent/backward.cuh, persistent/update.cuh
//                             the stages of a step, which this file puts in order
#pragma once

#include "persistent/backward.cuh"
#include "persistent/forward.cuh"
#include "persistent/inputs.cuh"
#include "persistent/output_stage.cuh"
#include "persistent/update.cuh"


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
    for (int i = worker(); i < t.lines * T::COLUMNS; i += RESIDENT_THREADS) {
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
    if constexpr (L == 0) {
        for (int i = worker(); i < t.lines * T::COLUMNS / 2; i += RESIDENT_THREADS) {
            const int line = i / (T::COLUMNS / 2), column = i % (T::COLUMNS / 2) * 2;
            const int64_t at = static_cast<int64_t>(t.first_line + line) * T::N_OUT + t.first_column + column;
            if (column < t.columns)
                put_operand<L>(k, line, column,
                               make_float2(parameters[at], column + 1 < t.columns ? parameters[at + 1] : 0.0f));
        }
    } else if (T::HAS_BIAS && t.is_mine && t.first_line + t.lines == T::LINES) {  // the line of ones
        for (int row = worker(); row < Place<K, L>::STAGED_ROWS; row += RESIDENT_THREADS)
            inputs_of<L>(k, 0)[row * T::INPUT_PITCH + t.lines - 1] = 1.0f;
    }
    if constexpr (T::IS_REPLICATED)
        for (int i = worker(); i < T::LINES * T::N_OUT; i += RESIDENT_THREADS) {
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

// The steps of a launch, from its first one and the tag of its mail on.
struct Course {
    Step step;
    int steps;
    uint32_t tag;

    // The batch of the step so many after the first, as far as there are steps.
    __device__ __forceinline__ Batch batch(int done) const {
        Step its = step;
        its.batch += done;
        const int64_t first = static_cast<int64_t>(its.batch) * its.batch_rows;
        return {tag + done, step.number + done, step.run + done, first, done < steps ? batch_rows(its) : 0};
    }
};

// Before the first batch's inputs are asked for, each block has dealt out its rows of it.
template <class K>
__device__ __forceinline__ void meet(const K& k) {
    uint64_t* const words = k.mail + BeginMail<K>::AT;
    if (worker() == 0) send(words + blockIdx.x, 0.0f, k.tag);
    const auto place = [=](int i) { return words + i; };
    receive(letters<RESIDENT_THREADS, K::BLOCKS>(K::BLOCKS, k.tag, place, [](int, float) {}));
    sync_workers();
}

// Couriers and workers meet before the first and at the end of each step.
template <class K>
__device__ __forceinline__ void fetch_batches(const K& k, const Course& course, float* errors) {
    for (int done = 0; done < Dealt<K>::AHEAD; ++done) Dealt<K>::deal(k, course.batch(done));
    fetch(k, course.batch(0));
    sync_couriers();
    leave_scale(k, course.batch(0));
    publish_dealt<K>();
    sync_all();
    Copies<K>::answer(k, course.batch(0));
    for (int done = 0; done <= course.steps; ++done) {
        sync_all();
        Dealt<K>::deal(k, course.batch(done + Dealt<K>::AHEAD));
        if constexpr (K::TURNS) {
            sync_couriers();
            if (const Batch last = course.batch(done - 1); done > 0 && static_cast<int>(blockIdx.x) < last.rows)
                rows_value(k, last.tag, errors + 2ll * K::ROWS * last.run);
            sync_couriers();  // who still needed the last targets
        }
        fetch(k, course.batch(done + 1));
        sync_couriers();
        leave_scale(k, course.batch(done + 1));
        publish_dealt<K>();
        if (done < course.steps) Copies<K>::answer(k, course.batch(done + 1));
    }
}

template <class K>
__device__ __forceinline__ void train(K& k, const Course& course, float* parameters, float* slots, float* errors) {
    constexpr int LAST = K::LAST;
    load_state<0>(k, parameters, slots);
    sync_all();
    meet(k);
    Copies<K>::ask(k, course.batch(0));
    sync_all();
    k.rows = course.batch(0).rows;
    for (int done = 0; done < course.steps; ++done) {
        k.key.step = course.step.number + done;
        k.tag = course.tag + done;
        if (!K::HAS_COPY_ENGINE) forget(k.block);  // the tiles' places would take more registers than there are
        Copies<K>::wait(k, done);
        receive_copies_beside<LAST>(k, done > 0 && k.has_rows(), [&] { send_z<0>(k); });
        forward<0>(k);
        if constexpr (K::TURNS) {
            if (k.has_rows()) rows_turn(k);
            backward<LAST - 1>(k);
        } else {
            sync_workers();
            rows_loss(k, errors + 2ll * K::ROWS * (course.step.run + done));
            backward<LAST>(k);
        }
        receive_rest<LAST>(k);
        sync_workers();
        Copies<K>::ask(k, course.batch(done + 1));
        update_all<LAST>(k);
        const int rows = course.batch(done + 1).rows;
        if (rows < k.rows) {
            sync_workers();  // of dZ
            clear_dz<LAST>(k);
        }
        sync_all();
        k.rows = rows;
    }
    store_state<0>(k, parameters, slots);
}

// Trains for `steps` steps from *step on, which are of one epoch.  Each row leaves its value and weight in errors
// (steps of a run, rows, 2).  `tag` goes on from launch to launch, so that no mail of an earlier one is taken.
// Grid: Net::BLOCKS blocks.
template <class Net, class Loss, template <class> class Target, class Source, class Rule, class Input, int SHARED_BYTES,
          int64_t MAIL_WORDS>
__device__ __forceinline__ void resident(const Step* step, int steps, uint32_t tag, const int* order,
                                         const Input* inputs, float scale, const float* mean, const float* deviation,
                                         Source targets, const float* weights, const float* target_mean,
                                         const float* target_scale, uint64_t seed, uint64_t purpose, float* parameters,
                                         float* slots, uint64_t* mail, void* dealt, float* errors) {
    using K = Resident<Net, Loss, Target, Source, Rule, Input>;
    static_assert(BatchPlace<K>::END * 4 == SHARED_BYTES && BeginMail<K>::END == MAIL_WORDS,
                  "resident.py lays the kernel's memory out in another way");
    SHARED(float, shared);
    K k = {{order, inputs, scale, mean, deviation, weights, target_mean, target_scale},
           targets, mail, static_cast<typename K::X*>(dealt), shared, {seed, purpose, 0}, tag, 0,
           static_cast<int>(blockIdx.x)};
    for (int i = threadIdx.x; i < BatchPlace<K>::END; i += blockDim.x) shared[i] = 0.0f;  // pads must be 0
    Copies<K>::make(k);
    const Course course = {*step, steps, tag};
    if (threadIdx.x < RESIDENT_THREADS) train(k, course, parameters, slots, errors);
    else fetch_batches(k, course, errors);
}

}  // namespace mlpgpu
