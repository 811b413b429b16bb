// The persistent kernel of few rows: many training steps of at most 8 rows in one launch, with all weights in shared memory.
//
// Every layer's weights, with the biases as their last row, are cut into tiles, and a block has at most one tile of each
// layer, which it alone updates. A product over a whole layer is the sum of what the tiles of a slice of rows, or of columns,
// make of it. Whoever needs that sum receives all parts from the blocks that made them and adds them up itself: of so few rows
// they are so few numbers that each block can do again what lies between two products. So a layer takes one message forward and
// one back:
//
//     forward    h = f(sum of Z)     of the layer below, for the tile's rows        Z = h W of the tile        -> messages Z
//     loss       z = sum of Z        of the last layer, all columns; the loss's delta, dz of the tile's columns
//     backward   dz = f'(z) · (sum of dX) of the layer above, for the tile's columns; dX = dz Wᵀ of the tile   -> messages dX
//     update     dW = hᵀ dz, W, while dX is in flight
//
// Messages are flagged words (arch/messages.cuh), each with a word for even and one for odd steps. Two are enough: before a
// block sends Z again two steps later it has received, in the step between, dX or logits of all blocks that read its Z, which
// they sent after they had read it; before it sends dX again it has received Z of all blocks that read its dX.
//
// All sums have a fixed order.  The blocks must run at once: the launch is cooperative.
#pragma once

#include "common/numbers.cuh"
#include "common/vectors.cuh"
#include "arch/messages.cuh"
#include "math/dropout.cuh"
#include "math/losses.cuh"
#include "math/optimizers.cuh"
#include "math/teams.cuh"
#include "persistent/few_rows_stages.cuh"
#include "persistent/step_range.cuh"

namespace mlpgpu {

template <int SHARED_BYTES_>
struct FewRowsShared {
    static constexpr int THREADS = FewRowsBlock::THREADS, SHARED_BYTES = SHARED_BYTES_;
};

// What the kernel is given of the data: inputs are scaled, standardized unless `deviation` is null, and dropped.
template <class Input>
struct FewRowsData {
    const int* order;
    const Input* inputs;
    float scale;
    const float *mean, *deviation;
    const float* weights;  // of rows, or null
    const float *target_mean, *target_scale;
    LayerDropout dropout;
};

// The activations of a network's layers, by their numbers: the identity (0) and another one, or any of the table.
template <class Activation>
struct OneActivation {
    static __device__ __forceinline__ float forward(int number, float z) {
        return number == 0 ? z : Activation::forward(z);
    }
    static __device__ __forceinline__ float derivative(int number, float saved) {
        return number == 0 ? 1.0f : Activation::derivative(saved);
    }
};

struct AnyActivation {
    static __device__ __forceinline__ float forward(int number, float z) {
        float value[1] = {z};
        Activations::forwards(number, value);
        return value[0];
    }
    static __device__ __forceinline__ float derivative(int number, float saved) {
        float value[1] = {saved};
        Activations::derivatives(number, value);
        return value[0];
    }
};

template <class OfLayers, class Loss, template <class> class Target, class Source, class Rule, class Input, int ROWS>
struct FewRowsSteps {
    static constexpr int THREADS = FewRowsBlock::THREADS, WARPS = FewRowsBlock::WARPS;
    static constexpr int LOG_THREADS = FewRowsBlock::LOG_THREADS, LOG_ROWS = FewRowsStages<ROWS>::LOG_ROWS;
    static constexpr int SLOTS = Rule::SLOTS;

    FewRowsData<Input> data;
    Source targets;
    uint64_t* messages;
    float *parameters, *slots;  // the flat arrays
    int64_t slot_pitch;
    uint64_t seed;
    FewRowsStages<ROWS> of;
    float* shared;
    float* partials;  // (THREADS, ROWS), of one product or sum at a time
    float* of_rows;   // of even and of odd steps: targets (ROWS, count), the rows' weights, 1 / their sum, and the order
    int target_count;

    __device__ __forceinline__ float* rows_of(uint32_t sequence) const {
        return of_rows + (sequence & 1) * (ROWS * (target_count + 2) + 1);
    }
    __device__ __forceinline__ int* order_of(uint32_t sequence) const {
        return reinterpret_cast<int*>(rows_of(sequence) + ROWS * (target_count + 1) + 1);
    }

    // --- messages and products ---

    // Adds up what a stage receives, in a fixed order, and stores what follows from it.
    __device__ __forceinline__ void receive(const FewRowsStage& g, const Batch& batch) const {
        const int shift = g.shift, log_parts = g.log_parts, here_shift = min(shift + LOG_ROWS, LOG_THREADS - log_parts);
        const int here = 1 << here_shift, parts = 1 << log_parts, part = threadIdx.x >> here_shift;
        const int terms = part < parts ? (g.terms - part + parts - 1) >> log_parts : 0;
        const uint64_t* const words = messages + g.words + (batch.sequence & 1) * g.words_of_parity + part * g.pitch;
#pragma unroll 1
        for (int first = 0; first < ROWS << shift; first += here) {
            const int number = first + (threadIdx.x & (here - 1)), r = number >> shift, i = number & ((1 << shift) - 1);
            float sum = 0.0f;
            if (i < g.count) sum = receive_sum(words + r * g.row_pitch + i, g.pitch << log_parts, terms, batch.sequence);
            if (log_parts > 0) {
                partials[threadIdx.x] = sum;
                __syncthreads();
                const int others = part == 0 ? min(parts, g.terms) : 0;
#pragma unroll 4
                for (int other = 1; other < others; ++other) sum += partials[other * here + threadIdx.x];
                if (first + here < ROWS << shift) __syncthreads();
            }
            if (part == 0 && i < g.count) use(g, batch, r, i, sum);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void use(const FewRowsStage& g, const Batch& batch, int r, int i, float sum) const {
        if (g.dz >= 0) {
            const int offset = i * ROWS + r;
            shared[g.dz + offset] = sum * shared[g.factors + offset];
            return;
        }
        const FewRowsLayer& layer = of.layers[g.layer];
        const bool has_factor = g.factors >= 0 && i >= g.first && i < g.end;
        const float y = OfLayers::forward(layer.activation, sum);
        float keep = 1.0f;  // 0 for one that is dropped
        if (layer.keep != 0.0f)
            keep = LayerDropout{seed, layer.dropout, layer.least, layer.keep}(
                batch.step, static_cast<int64_t>(r) * layer.n + g.column + i, 1.0f);
        if (g.h >= 0) shared[g.h + i * g.h_pitch + r * g.h_row_pitch] = y * keep;
        if (has_factor)
            shared[g.factors + (i - g.first) * ROWS + r] =
                OfLayers::derivative(layer.activation, layer.saves_z ? sum : y) * keep;
    }

    // A thread has an output, and groups of threads share the elements; there are x and weights of 0 up to the next four.
    __device__ __forceinline__ void multiply(const FewRowsStage& g, uint32_t sequence) const {
        const int shift = g.output_shift, width = 1 << shift, groups = 1 << g.log_groups;
        const int group = threadIdx.x >> shift, place = threadIdx.x & (width - 1), inputs = g.inputs;
        const float* const x = shared + g.x + (sequence & 1) * g.x_of_parity;
        uint64_t* const sent = messages + g.sent + (sequence & 1) * g.sent_of_parity;
#pragma unroll 1
        for (int first = 0; first < g.outputs; first += THREADS) {
            float sums[ROWS] = {};
            if (group < groups && first + place < g.outputs) {
                const int to_input = g.to_input;
                const float* w = shared + g.w + (first + place) * g.to_output + 4 * group * to_input;
#pragma unroll 1
                for (int e = 4 * group; e < inputs; e += 4 * groups, w += 4 * groups * to_input) {
                    float values[4 * ROWS];
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) load_four(x + e * ROWS + 4 * i, values + 4 * i);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) sums[r] = fmaf(values[i * ROWS + r], w[i * to_input], sums[r]);
                }
                if (groups == 1)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) send(sent + r * g.sent_pitch + first + place, sums[r], sequence);
            }
            if (groups == 1) {
                __syncthreads();  // an update moves these weights
                continue;
            }
            if (group < groups)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) partials[((group * ROWS + r) << shift) + place] = sums[r];
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < ROWS << shift; i += THREADS) {
                const int r = i >> shift, output = first + (i & (width - 1));
                if (output >= g.outputs) continue;
                float sum = partials[i];
#pragma unroll 4
                for (int other = 1; other < groups; ++other) sum += partials[i + other * (ROWS << shift)];
                send(sent + r * g.sent_pitch + output, sum, sequence);
            }
            __syncthreads();
        }
    }

    // --- a batch ---

    // Fetches where a batch's rows lie, a step before `fetch` asks for them.
    __device__ __forceinline__ void fetch_order(const Batch& batch) const {
        const int r = threadIdx.x;
        if (r < batch.rows) order_of(batch.sequence)[r] = data.order[batch.first + r];
    }

    // Fetches what the tile of the first layer and the loss need of a batch; rows that it lacks have inputs of 0.
    __device__ __forceinline__ void fetch(const Batch& batch) const {
        if (batch.rows == 0) return;
        const int* const order = order_of(batch.sequence);
        float* const read = rows_of(batch.sequence);
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        float target = 0.0f;  // its load and those of inputs are in flight together
        if (warp < batch.rows && lane < target_count)
            target = texel(targets, static_cast<int64_t>(order[warp]) * target_count + lane);
        if (of.tiles[0].is_mine) fetch_inputs(batch, order);
        if (warp < batch.rows && lane < target_count) read[warp * target_count + lane] = target;
        if (warp < batch.rows)
#pragma unroll 1
            for (int j = lane + WARP; j < target_count; j += WARP)
                read[warp * target_count + j] = texel(targets, static_cast<int64_t>(order[warp]) * target_count + j);
        if (warp == 0) {
            const float weight = lane < batch.rows ? (data.weights ? data.weights[order[lane]] : 1.0f) : 0.0f;
            if (lane < ROWS) read[ROWS * target_count + lane] = weight;
            const double sum = warp_sum(static_cast<double>(weight));
            if (lane == 0) read[ROWS * target_count + ROWS] = static_cast<float>(sum > 0.0 ? 1.0 / sum : 0.0);
        }
    }

    // The inputs of the biases are 1, and those of rows that the batch lacks 0.
    __device__ __forceinline__ void fetch_inputs(const Batch& batch, const int* order) const {
        constexpr int AT_ONCE = 4;
        const FewRowsTile& t = of.tiles[0];
        const int n_in = of.layers[0].n_in, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        constexpr int WARPS_EACH = WARPS / ROWS;  // that have a row
        const int r = warp / WARPS_EACH, begin = warp % WARPS_EACH * WARP + lane;
        const bool is_there = r < batch.rows;
        const Input* const from = data.inputs + (is_there ? order[r] * static_cast<int64_t>(n_in) : 0) + t.first_row;
        float* const x = shared + of.layers[0].inputs + (batch.sequence & 1) * (round_up(t.rows, 4) * ROWS) + r;
        const bool is_changed = data.deviation || data.dropout.keep != 0.0f;
#pragma unroll 1
        for (int first = begin; first < t.rows; first += AT_ONCE * WARPS_EACH * WARP) {
            Input raw[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int row = first + i * WARPS_EACH * WARP;
                raw[i] = is_there && row < t.input_rows ? from[row] : static_cast<Input>(0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int row = first + i * WARPS_EACH * WARP;
                if (row < t.rows) x[row * ROWS] = row < t.input_rows ? data.scale * static_cast<float>(raw[i]) : 1.0f;
            }
        }
        if (!is_changed || !is_there) return;
#pragma unroll 1
        for (int row = begin; row < t.input_rows; row += WARPS_EACH * WARP) {
            const int column = t.first_row + row;
            float value = x[row * ROWS];
            if (data.deviation) value = (value - data.mean[column]) / data.deviation[column];
            x[row * ROWS] = data.dropout(batch.step, static_cast<int64_t>(r) * n_in + column, value);
        }
    }

    // --- what follows ---

    // The loss of each row, and dz of the tile's columns of the last layer. The first block writes the rows' values and
    // weights to `errors` (rows, 2).
    __device__ __forceinline__ void loss(const Batch& batch, float* errors) const {
        const FewRowsTile& t = of.tiles[of.last];
        const int n = of.layers[of.last].n, r = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const float* const factors = shared + of.layers[of.last].factors;
        float* const dz = shared + of.layers[of.last].dz;
        if (r < batch.rows) {
            const float* const read = rows_of(batch.sequence);
            const float weight = read[ROWS * target_count + r];
            const Target<const float*> target = {read, r, n, data.target_mean, data.target_scale};
            const float value = weighted_row<Loss>(shared + of.logits + r * n, n, target, weight, [=](int j, float d) {
                const int i = j - t.first_column;
                if (i >= 0 && i < t.columns) dz[i * ROWS + r] = d * factors[i * ROWS + r];
            });
            if (blockIdx.x == 0 && lane == 0) errors[2 * r] = value, errors[2 * r + 1] = weight;
        } else if (r < ROWS) {
            for (int i = lane; i < t.columns; i += WARP) dz[i * ROWS + r] = 0.0f;
        }
        __syncthreads();
    }

    // Moves the tile by a step. A thread has a column, and groups of threads share the rows. Rows beyond the tile's, up to the
    // next four, hold 0 in shared memory and stay so.
    template <bool IN_SHARED>
    __device__ __forceinline__ void update(int l, const Batch& batch) const {
        constexpr int AT_ONCE = IN_SHARED || ROWS > 4 ? 4 : 8;  // rows of a thread
        const FewRowsLayer& layer = of.layers[l];
        const FewRowsTile& t = of.tiles[l];
        const float* const x =
            shared + layer.inputs + (l == 0 ? (batch.sequence & 1) * (round_up(t.rows, 4) * ROWS) : 0);
        const float scale = rows_of(batch.sequence)[ROWS * target_count + ROWS];
        const float* const rates = schedule + batch.run * RATES_PER_STEP;
        const int biases = layer.n_in - t.first_row, shift = t.column_shift;
        const int groups = THREADS >> shift, group = threadIdx.x >> shift, rows = t.rows, pitch = layer.pitch;
#pragma unroll 1
        for (int column = threadIdx.x & ((1 << shift) - 1); column < t.columns; column += THREADS) {
            float delta[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) delta[r] = shared[layer.dz + column * ROWS + r];
            float* const weights = shared + layer.weights + column;
            float* const shared_slots = shared + layer.slots + column;
            float* const flat_slots = slots + layer.parameters + t.first_row * static_cast<int64_t>(layer.n) +
                                      t.first_column + column;
            float slot[AT_ONCE][SLOTS > 0 ? SLOTS : 1];
            const auto load_slots = [&](int begin) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
                    for (int s = 0; s < SLOTS; ++s) {
                        if constexpr (IN_SHARED)
                            slot[i][s] = shared_slots[s * layer.slot_pitch + (begin + i) * pitch];
                        else if (begin + i < rows)
                            slot[i][s] = __ldcg(flat_slots + s * slot_pitch + static_cast<int64_t>(begin + i) * layer.n);
                    }
            };
            if (!IN_SHARED) load_slots(AT_ONCE * group);
#pragma unroll 1
            for (int begin = AT_ONCE * group; begin < rows; begin += AT_ONCE * groups) {
                float w[AT_ONCE], moved[AT_ONCE][SLOTS > 0 ? SLOTS : 1], values[AT_ONCE * ROWS];
                if (IN_SHARED) load_slots(begin);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    w[i] = weights[(begin + i) * pitch];
#pragma unroll
                    for (int s = 0; s < SLOTS; ++s) moved[i][s] = slot[i][s];
                }
                if (!IN_SHARED) load_slots(begin + AT_ONCE * groups);  // in flight meanwhile
#pragma unroll
                for (int i = 0; i < AT_ONCE / 4 * ROWS; ++i) load_four(x + begin * ROWS + 4 * i, values + 4 * i);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    float sum = 0.0f;
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sum = fmaf(values[i * ROWS + r], delta[r], sum);
                    if (begin + i < biases) sum = penalized<Rule>(sum, w[i]);
                    step_parameter<BiasRule<Rule>>(w[i], moved[i], sum, scale, rates, penalty_slope(w[i]));
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
                    for (int s = 0; s < SLOTS; ++s) {
                        if constexpr (IN_SHARED)
                            shared_slots[s * layer.slot_pitch + (begin + i) * pitch] = moved[i][s];
                        else if (begin + i < rows)
                            flat_slots[s * slot_pitch + static_cast<int64_t>(begin + i) * layer.n] = moved[i][s];
                    }
                    if (IN_SHARED || begin + i < rows) weights[(begin + i) * pitch] = w[i];
                }
            }
        }
    }

    // --- a launch ---

    // Calls visit(array, offset in the layer's tile, offset in the flat arrays) for the tile's weights: array 0 has those,
    // and each other one a slot.
    template <class Visit>
    __device__ __forceinline__ void each_parameter(const Visit& visit) const {
        for (int l = 0; l <= of.last; ++l) {
            const FewRowsLayer& layer = of.layers[l];
            const FewRowsTile& t = of.tiles[l];
            for (int i = threadIdx.x; t.is_mine && i < t.rows * t.columns; i += THREADS) {
                const int row = i / t.columns, column = i - row * t.columns;
                const int64_t offset = layer.parameters + static_cast<int64_t>(t.first_row + row) * layer.n +
                                       t.first_column + column;
                float* const weight = shared + row * layer.pitch + column;
                visit(weight + layer.weights, parameters + offset);
                for (int s = 0; s < SLOTS && layer.slots >= 0; ++s)
                    visit(weight + layer.slots + s * layer.slot_pitch, slots + s * slot_pitch + offset);
            }
        }
    }

    __device__ __forceinline__ void train(const StepRange& range, float* errors, int capacity) const {
        const int thread = threadIdx.x;
        if (thread <= of.last) of.find_tile(thread);
        __syncthreads();
        if (thread < of.count()) of.find_stage(thread);
        each_parameter([](float* in_tile, const float* flat) { *in_tile = *flat; });
        for (int l = 1; l <= of.last; ++l) {  // the inputs of the biases
            const FewRowsTile& t = of.tiles[l];
            if (t.is_mine && t.input_rows < t.rows && thread < ROWS)
                shared[of.layers[l].inputs + t.input_rows * ROWS + thread] = 1.0f;
        }
        fetch_order(range.batch(0));
        __syncthreads();
        fetch(range.batch(0));
        fetch_order(range.batch(1));
        __syncthreads();
        for (int done = 0; done < range.steps; ++done) {
            const Batch batch = range.batch(done);
#pragma unroll 1
            for (int s = 0; s < of.count(); ++s) {
                const FewRowsStage& g = of.stages[s];
                if (g.is_skipped) continue;
                if (g.count > 0) receive(g, batch);
                if (g.outputs > 0) multiply(g, batch.sequence);
                if (g.then == FewRowsStage::FETCH) {
                    fetch(range.batch(done + 1));
                    fetch_order(range.batch(done + 2));
                } else if (g.then == FewRowsStage::LOSS) {
                    loss(batch, errors + 2ll * capacity * batch.run);
                } else if (g.then == FewRowsStage::UPDATE) {
                    if (of.layers[g.layer].slots >= 0 || SLOTS == 0) update<true>(g.layer, batch);
                    else update<false>(g.layer, batch);
                }
            }
            __syncthreads();
        }
        each_parameter([](const float* in_tile, float* flat) { *flat = *in_tile; });
    }
};

// Trains for `steps` steps of one epoch, from *step on, of at most `capacity` ≤ ROWS rows. The loss and weight of each row go
// to errors (steps of a run, capacity, 2). `sequence` continues from launch to launch, so that no message of an earlier launch
// is taken for a new one. A block uses `shared_floats` of its shared memory.
// Grid: the blocks of the layer with the most tiles.
template <class OfLayers, class Loss, template <class> class Target, class Source, class Rule, class Input, int ROWS>
__device__ __forceinline__ void train_few_rows(const Step* step, int steps, uint32_t sequence, const int* order,
                                               const Input* inputs, float scale, const float* mean, const float* deviation,
                                               Source targets, const float* weights, const float* target_mean,
                                               const float* target_scale, uint64_t seed, float* parameters, float* slots,
                                               uint64_t* messages, int64_t slot_pitch, int dropout, uint32_t least,
                                               float keep, const FewRowsLayer* described, int layer_count,
                                               int shared_floats, int capacity, float* errors) {
    SHARED(float, shared);
    for (int i = threadIdx.x; i < shared_floats; i += blockDim.x) shared[i] = 0.0f;  // padding must be 0
    __syncthreads();
    constexpr int LAYER = sizeof(FewRowsLayer) / 4, TILE = sizeof(FewRowsTile) / 4, STAGE = sizeof(FewRowsStage) / 4;
    for (int i = threadIdx.x; i < layer_count * LAYER; i += blockDim.x)
        reinterpret_cast<int*>(shared)[i] = reinterpret_cast<const int*>(described)[i];
    __syncthreads();
    float* const tiles = shared + layer_count * LAYER;
    float* const stages = tiles + layer_count * TILE;
    FewRowsStages<ROWS> of = {reinterpret_cast<const FewRowsLayer*>(shared), reinterpret_cast<FewRowsTile*>(tiles),
                              reinterpret_cast<FewRowsStage*>(stages), layer_count - 1, 0};
    const int partials = round_up(layer_count * (LAYER + TILE) + of.count() * STAGE, 4), n = of.layers[of.last].n;
    of.logits = partials + FewRowsBlock::THREADS * ROWS;
    const FewRowsSteps<OfLayers, Loss, Target, Source, Rule, Input, ROWS> of_steps = {
        {order, inputs, scale, mean, deviation, weights, target_mean, target_scale, {seed, dropout, least, keep}},
        targets, messages, parameters, slots, slot_pitch, seed, of, shared, shared + partials,
        shared + of.logits + round_up(ROWS * n, 4), Target<const float*>::count(n)};
    of_steps.train({*step, steps, sequence}, errors, capacity);
}

}  // namespace mlpgpu
