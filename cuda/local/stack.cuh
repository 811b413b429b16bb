// A stack of locally connected layers in one kernel (local/layer.cuh says what a layer computes).
//
// Each block has a span of columns through all layers, a thread some of them. A layer's outputs become the next one's
// inputs in shared memory. What a block needs of its right neighbour's outputs, the first window - 1 or *halo*, comes
// as messages (arch/messages.cuh). Messages go one way, and each layer has its own words: no sender waits for its
// receiver, so blocks run one behind the other, and a wait costs the stack once, not once a layer.
//
// Weights that differ from layer to layer are streamed: a producer warp has the copy engine load them, row by row, into
// a ring of stages before they are needed, past the ends of layers, so that memory is never idle. Weights that all
// layers share stay on the chip, some of their rows in registers and the others in shared memory.
//
// Every output is one chain of fused multiply-adds in ascending order, as local/layer.cuh makes it.
#pragma once

#include "common/reduce.cuh"
#include "common/step.cuh"
#include "common/vectors.cuh"
#include "arch/bulk_copy.cuh"
#include "arch/messages.cuh"
#include "arch/ring.cuh"
#include "math/activations.cuh"

namespace mlpgpu {

// A layer; its offsets are in floats.
struct StackLayer {
    int64_t weight, bias;  // in the parameters: (window, pitch); biases `bias_step` apart, or -1 if there are none
    int64_t y;  // in what a training step keeps, as is z: (rows, n); the last y is elsewhere
    int32_t n, window, pitch, bias_step;
};

// How the columns and rows of a pass are divided among threads, which load and store VECTOR words at once.
template <int WARPS_, int ROWS_, int COLUMNS_ = 4>
struct StackShape {
    static constexpr int WARPS = WARPS_, ROWS = ROWS_, COLUMNS = COLUMNS_, VECTOR = COLUMNS % 4 ? 2 : 4;
    static constexpr int THREADS = WARPS * WARP, SPAN = COLUMNS * THREADS;
    static constexpr int MOST_HALO = 64;
    static constexpr int PITCH = SPAN + MOST_HALO + 8;  // of a row of inputs in shared memory
    static constexpr int PHASE_WORDS = 4 * WARPS;       // of the warps' barriers
    static constexpr int INPUT_BYTES = 4 * (2 * ROWS * PITCH + PHASE_WORDS);  // inputs of two layers, and the barriers
};

// The ring of streamed weights: a stage holds the block's span of up to DEPTH weight rows of ARRAYS arrays, the weights
// and their slots, each from a multiple of four on.
template <class Shape, int STAGES_, int DEPTH_, int ARRAYS_>
struct StackRing {
    static constexpr int STAGES = STAGES_, DEPTH = DEPTH_, ARRAYS = ARRAYS_;
    static constexpr int CONSUMERS = Shape::WARPS, CLUSTER = 1, ALIGNMENT = 16;
    static constexpr int WEIGHT_ROW = Shape::SPAN + 4, STAGE = DEPTH * ARRAYS * WEIGHT_ROW, STAGE_BYTES = 4 * STAGE;
    static constexpr int BYTES = STAGES * (STAGE_BYTES + 16);
};

// --- neighbouring words ---

__device__ __forceinline__ void load_two(const float* from, float* to) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x, to[1] = two.y;
}

__device__ __forceinline__ void store_two(float* to, const float* from) {
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
}

// Loads COUNT words, an even number; the address is a multiple of the vectors' size.
template <int COUNT>
__device__ __forceinline__ void load_words(const float* from, float* to) {
#pragma unroll
    for (int i = 0; i < COUNT; i += COUNT % 4 ? 2 : 4)
        if constexpr (COUNT % 4)
            load_two(from + i, to + i);
        else
            load_four(from + i, to + i);
}

template <int COUNT>
__device__ __forceinline__ void store_words(float* to, const float* from) {
#pragma unroll
    for (int i = 0; i < COUNT; i += COUNT % 4 ? 2 : 4)
        if constexpr (COUNT % 4)
            store_two(to + i, from + i);
        else
            store_four(to + i, from + i);
}

// Whether `count` words fill the vector and the address allows to load or store them at once.
template <int COUNT>
__device__ __forceinline__ bool is_whole(const float* address, int count) {
    return count >= COUNT && reinterpret_cast<uintptr_t>(address) % (COUNT % 4 ? 8 : 16) == 0;
}

template <int COUNT>
__device__ __forceinline__ void load_some(const float* from, int count, float* to) {
    if (is_whole<COUNT>(from, count)) {
        load_words<COUNT>(from, to);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = i < count ? from[i] : 0.0f;
    }
}

template <int COUNT>
__device__ __forceinline__ void store_some(float* to, int count, const float* from) {
    if (is_whole<COUNT>(to, count)) {
        store_words<COUNT>(to, from);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (i < count) to[i] = from[i];
    }
}

// Moves the four words from number `by` on, 0 to 3, to the front.
__device__ __forceinline__ void slide(float (&eight)[8], int by) {
    if (by & 2)
#pragma unroll
        for (int i = 0; i < 6; ++i) eight[i] = eight[i + 2];
    if (by & 1)
#pragma unroll
        for (int i = 0; i < 4; ++i) eight[i] = eight[i + 1];
}

// Loads four words from number `from` of a row that begins at a multiple of 16 bytes.
__device__ __forceinline__ void load_four_from(const float* weight_row, int from, float* to) {
    const int shift = from & 3;
    float near[8] = {};
    load_four(weight_row + from - shift, near);
    if (shift) load_four(weight_row + from - shift + 4, near + 4);
    slide(near, shift);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = near[i];
}

// --- what the warps of a block do together ---

// Warps go through phases. In each one a warp waits until both neighbours have ended the phase before, so that they are
// never more than a phase apart, without a barrier at which all would wait. Each warp has two barriers, for even and
// for odd phases.
template <class Shape>
struct Phases {
    static constexpr int WORDS = Shape::PHASE_WORDS;
    uint32_t barriers;

    // Called by one thread.
    __device__ __forceinline__ void make() const {
        for (int i = 0; i < 2 * Shape::WARPS; ++i) barrier_init(barriers + 8 * i, 1);
    }

    __device__ __forceinline__ uint32_t of(int warp, int phase) const {
        return barriers + 8 * (2 * warp + (phase & 1));
    }

    // Ends a phase of this warp, for its neighbours, if there are any.
    __device__ __forceinline__ void end(int phase) const {
        __syncwarp();
        if (Shape::WARPS > 1 && threadIdx.x % WARP == 0) barrier_arrive<1>(of(threadIdx.x / WARP, phase), 0);
    }

    // Waits until a neighbour, if there is one, has ended a phase, if there was one.
    __device__ __forceinline__ void wait(int warp, int phase) const {
        if (phase >= 0 && warp >= 0 && warp < Shape::WARPS) barrier_wait(of(warp, phase), phase >> 1 & 1);
    }
};

// Loads a layer's weights, stage by stage, and the same of each slot, `size` elements apart. Called by a warp: each
// lane starts the copy of a row of a stage, since one thread would take longer to issue them all than narrow rows take
// to arrive.
template <class T>
__device__ __forceinline__ void load_layer(Ring<T>& ring, const float* parameters, const float* slots, int64_t size,
                                            const StackLayer& layer, int begin, int columns) {
    const int lane = threadIdx.x % WARP, weight_row = lane / T::ARRAYS, slot = lane % T::ARRAYS - 1;
    int64_t offset = layer.weight + static_cast<int64_t>(weight_row) * layer.pitch + begin + max(slot, 0) * size;
    for (int first = 0; first < layer.window; first += T::DEPTH, offset += T::DEPTH * layer.pitch) {
        const bool copies = weight_row < min(T::DEPTH, layer.window - first);
        const int bytes = copies ? 4 * round_up(static_cast<int>(offset & 3) + columns, 4) : 0;
        const int all = T::DEPTH * T::ARRAYS > 1 ? warp_sum(bytes) : bytes;
        const uint32_t full = ring.full + 8 * ring.stage;
        ring.wait_empty();
        if (lane == 0) barrier_expect(full, all);
        if (copies)
            bulk_copy(ring.address() + 4 * lane * T::WEIGHT_ROW,
                      (slot < 0 ? parameters : slots) + (offset & ~int64_t{3}), full, bytes);
        ring.advance();
    }
}

// --- weights: over(…, body) calls body(r, w, window) for VECTOR rows of the layer's weights, a thread's columns of
// each, from row r on; rows from `window` on do not exist ---

template <class Shape_, int STAGES, int DEPTH>
struct StreamedWeights {
    using Shape = Shape_;
    using T = StackRing<Shape, STAGES, DEPTH, 1>;
    static constexpr int THREADS = Shape::THREADS + WARP, SHARED_BYTES = Shape::INPUT_BYTES + T::BYTES;
    const float* const stages;
    const float* const parameters;
    Ring<T> ring;

    __device__ __forceinline__ StreamedWeights(float* room, const float* parameters, const StackLayer*, int)
        : stages(room), parameters(parameters), ring(room) {}

    __device__ __forceinline__ void make() const { ring.make(); }

    // Called by a warp.
    __device__ __forceinline__ void produce(const StackLayer* layers, int count, int begin, int passes) {
        for (int pass = 0; pass < passes; ++pass)
            for (int l = 0; l < count && begin < layers[l].n; ++l) {
                const StackLayer layer = layers[l];
                load_layer(ring, parameters, nullptr, 0, layer, begin, min(layer.n - begin, Shape::SPAN));
            }
    }

    template <class Body>
    __device__ __forceinline__ void over(const StackLayer& layer, int begin, const Body& body) {
        const int window = layer.window, pitch = layer.pitch;
        int offset = static_cast<int>(layer.weight) + begin;  // of a weight row; only its last two bits matter
        for (int r = 0; r < window; r += 4) {
            float w[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j, offset += pitch) {
                if (r + j >= window) break;
                if (j % DEPTH == 0) ring.wait_full();
                const float* const weight_row = stages + ring.stage * T::STAGE + j % DEPTH * T::WEIGHT_ROW;
                load_four_from(weight_row, 4 * threadIdx.x + (offset & 3), w[j]);
                if (j % DEPTH + 1 < DEPTH && r + j + 1 < window) continue;
                __syncwarp();
                if (threadIdx.x % WARP == 0) barrier_arrive<1>(ring.empty + 8 * ring.stage, 0);
                ring.advance();
            }
            body(r, w, window);
        }
    }
};

// The block's columns as the forward pass numbers them, in the order of memory, or mirrored, from the right: number v
// of the grid's columns is column MIRROR - v.
template <class Shape, bool IS_MIRRORED>
__device__ __forceinline__ int column_of(int v) {
    return IS_MIRRORED ? static_cast<int>(gridDim.x) * Shape::SPAN - 1 - v : v;
}

// Keeps the first IN_REGISTERS of WINDOW weight rows in registers and the others in shared memory. A mirrored row is
// w'[r, v] = w[r, column of v - r].
template <class Shape_, int WINDOW_, int IN_REGISTERS, bool IS_MIRRORED = false>
struct OnChipWeights {
    using Shape = Shape_;
    static constexpr int COLUMNS = Shape::COLUMNS, WINDOW = WINDOW_;
    static constexpr int FLOATS = (WINDOW - IN_REGISTERS) * Shape::SPAN;  // in shared memory
    static constexpr int THREADS = Shape::THREADS, SHARED_BYTES = Shape::INPUT_BYTES + 4 * FLOATS;
    float* const shared_rows;
    float registers[IN_REGISTERS][COLUMNS];

    __device__ __forceinline__ OnChipWeights(float* room, const float* parameters, const StackLayer* layers, int begin)
        : shared_rows(room + COLUMNS * threadIdx.x) {
        const StackLayer layer = layers[0];
        const int column = begin + COLUMNS * static_cast<int>(threadIdx.x);
#pragma unroll
        for (int r = 0; r < WINDOW; ++r) {
            float words[COLUMNS];
            float(&to)[COLUMNS] = r < IN_REGISTERS ? registers[r < IN_REGISTERS ? r : 0] : words;
            const float* const weight_row = parameters + layer.weight + static_cast<int64_t>(r) * layer.pitch;
            if (IS_MIRRORED) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const int i = column_of<Shape, true>(column + c) - r;
                    to[c] = i >= 0 && i < layer.n ? weight_row[i] : 0.0f;
                }
            } else {
                load_some<COLUMNS>(weight_row + column, layer.n - column, to);
            }
            if (r >= IN_REGISTERS) store_words<COLUMNS>(shared_rows + (r - IN_REGISTERS) * Shape::SPAN, to);
        }
    }

    __device__ __forceinline__ void make() const {}
    __device__ __forceinline__ void produce(const StackLayer*, int, int, int) const {}

    template <class Body>
    __device__ __forceinline__ void over(const StackLayer&, int, const Body& body) const {
#pragma unroll
        for (int r = 0; r < WINDOW; r += Shape::VECTOR) {
            float w[Shape::VECTOR][COLUMNS];
#pragma unroll
            for (int j = 0; j < Shape::VECTOR; ++j) {
                if (r + j >= WINDOW) continue;
                if (r + j >= IN_REGISTERS)
                    load_words<COLUMNS>(shared_rows + (r + j - IN_REGISTERS) * Shape::SPAN, w[j]);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    if (r + j < IN_REGISTERS) w[j][c] = registers[r + j < IN_REGISTERS ? r + j : 0][c];
            }
            body(r, w, WINDOW);
        }
    }
};

// --- a block's pass through layers, some rows at a time ---

// The arguments of a kernel of the backward pass, as local_stack_update describes them.
struct StackArguments {
    const float* x;
    const StackLayer* layers;
    int count, m, halo;
    const float* kept;
    const float* kept_z;
    const float* y;
    const float* dy;
    int is_derived;
    float* parameters;
    float* slots;
    int64_t size;
    float* dx;
    double* bias_sums;
    uint64_t* messages;
};

template <class Weights_>
struct StackWalk {
    using Weights = Weights_;
    using Shape = typename Weights::Shape;
    static constexpr int ROWS = Shape::ROWS, COLUMNS = Shape::COLUMNS, VECTOR = Shape::VECTOR, WARPS = Shape::WARPS;
    static constexpr int PITCH = Shape::PITCH, SPAN = Shape::SPAN, OF_WARP = COLUMNS * WARP;

    const Rows rows;
    const uint32_t sequence;
    const int begin, block_column, column, warp, lane;  // the block's first column, the thread's there, and in all
    float* const inputs;  // two times (ROWS, PITCH), for even and odd phases
    const Phases<Shape> phases;
    Weights weights;
    int phase = 0;  // in each phase a layer gets its inputs

    __device__ __forceinline__ StackWalk(const Rows& rows, uint32_t sequence, const float* parameters,
                                         const StackLayer* layers, float* shared)
        : rows(rows),
          sequence(sequence),
          begin(blockIdx.x * SPAN),
          block_column(COLUMNS * threadIdx.x),
          column(begin + block_column),
          warp(threadIdx.x / WARP),
          lane(threadIdx.x % WARP),
          inputs(shared),
          phases{shared_address(shared + 2 * ROWS * PITCH)},
          weights(shared + 2 * ROWS * PITCH + Phases<Shape>::WORDS, parameters, layers, begin) {}

    __device__ __forceinline__ float* inputs_of(int which) const { return inputs + (which & 1) * ROWS * PITCH; }

    // Stages the first layer's inputs, value(row, column of the block), of which there are `count`: each warp its
    // columns, and the last warp also the `halo` beyond.
    template <class Value>
    __device__ __forceinline__ void stage(int here, int halo, int count, const Value& value) const {
        phases.wait(warp - 1, phase - 1);
        phases.wait(warp + 1, phase - 1);
        const int end = min((warp + 1) * OF_WARP + (warp + 1 == WARPS ? halo : 0), count);
        for (int q = 0; q < here; ++q)
            for (int i = warp * OF_WARP + lane; i < end; i += WARP) inputs_of(phase)[q * PITCH + i] = value(q, i);
        phases.end(phase);
    }

    // Σ_r w[r, i] x_{i + r} for the thread's columns.
    __device__ __forceinline__ void multiply(const StackLayer& layer, float (&sum)[ROWS][COLUMNS]) {
        const float* const from = inputs_of(phase) + block_column;
        float seen[ROWS][COLUMNS + VECTOR];
#pragma unroll
        for (int q = 0; q < ROWS; ++q) load_words<COLUMNS>(from + q * PITCH, seen[q]);
        weights.over(layer, begin, [&](int r, const float(&w)[VECTOR][COLUMNS], int window) {
#pragma unroll
            for (int q = 0; q < ROWS; ++q) {
                load_words<VECTOR>(from + q * PITCH + r + COLUMNS, seen[q] + COLUMNS);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j)
#pragma unroll
                    for (int c = 0; c < COLUMNS && r + j < window; ++c)
                        sum[q][c] = fmaf(w[j][c], seen[q][j + c], sum[q][c]);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) seen[q][c] = seen[q][c + VECTOR];
            }
        });
    }

    // One layer: finish(sums) makes outputs of sums. Meanwhile the last warp receives the halo of the next layer,
    // `expected` words of each row, and passes them to kept(row, column, value), too. At `words` lie the messages to
    // the block before, `halo` for each row, and behind them those from the next block.
    template <class Finish, class Kept>
    __device__ __forceinline__ void layer(const StackLayer& layer, int here, int expected, const uint64_t* words,
                                          int halo, const Finish& finish, const Kept& kept) {
        const auto compute = [&] {
            float sum[ROWS][COLUMNS] = {};
            phases.wait(warp + 1, phase);
            multiply(layer, sum);
            finish(sum);
        };
        float* const to = inputs_of(phase + 1);
        receive_during(compute, receiver<WARP, ROWS * Shape::MOST_HALO>(
                                    here * expected, sequence,
                                    [&](int i) { return words + (ROWS + i / expected) * halo + i % expected; },
                                    [&](int i, float value) {
                                        to[i / expected * PITCH + SPAN + i % expected] = value;
                                        kept(i / expected, SPAN + i % expected, value);
                                    }));
        phases.end(++phase);
    }

    // Stores outputs of a row as inputs of the next layer, and sends the first `sent` columns of the block to the block
    // before.
    __device__ __forceinline__ void store_outputs(int q, const float (&value)[COLUMNS], uint64_t* words,
                                                  int sent) const {
        store_words<COLUMNS>(inputs_of(phase + 1) + q * PITCH + block_column, value);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (block_column + c < sent) send(words + block_column + c, value[c], sequence);
    }
};

// --- forward ---

template <class Weights_, class Activation>
struct StackForward : StackWalk<Weights_> {
    using Walk = StackWalk<Weights_>;
    using Walk::ROWS, Walk::COLUMNS, Walk::SPAN, Walk::WARPS;
    using Walk::begin, Walk::column, Walk::phase, Walk::phases, Walk::rows, Walk::warp;

    // As local_stack_forward takes them.
    struct Arguments {
        const float* x;
        const float* parameters;
        const StackLayer* layers;
        int count, m, halo;
        float* kept;
        float* kept_z;
        float* y;
        uint64_t* messages;
    };

    // Where a pass is: the layer's number, its columns and window and the next one's; the first of the pass's rows in
    // the batch, and their count; and the messages to the block before.
    struct Position {
        int l, n, window, next_n, next_window;
        int64_t row0;
        int here;
        uint64_t* words;
    };

    const Arguments given;

    __device__ __forceinline__ StackForward(const Arguments& given, const Rows& rows, uint32_t sequence, float* shared)
        : Walk(rows, sequence, given.parameters, given.layers, shared), given(given) {}

    // How many of the outputs from `start` on are the halo of a block that ends there.
    __device__ __forceinline__ int halo_at(const Position& position, int start) const {
        return max(0, min(position.next_window - 1, position.n - start));
    }

    // Adds biases and applies activations; outputs go to the next layer, to the block before, and to memory.
    __device__ __forceinline__ void finish(const StackLayer& layer, const Position& position,
                                           float (&sum)[ROWS][COLUMNS]) const {
        float bias[COLUMNS] = {};
        if (layer.bias >= 0)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                if (column + c < position.n)
                    bias[c] = given.parameters[layer.bias + static_cast<int64_t>(column + c) * layer.bias_step];
        float* const out = position.l + 1 == given.count ? given.y : given.kept ? given.kept + layer.y : nullptr;
        const int sent = blockIdx.x > 0 ? halo_at(position, begin) : 0;
        phases.wait(warp - 1, phase);
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            const int64_t offset = (position.row0 + q) * position.n + column;
            float value[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sum[q][c] += bias[c], value[c] = Activation::forward(sum[q][c]);
            Walk::store_outputs(q, value, position.words + q * given.halo, q < position.here ? sent : 0);
            if (q >= position.here) continue;
            if (given.kept_z) store_some<COLUMNS>(given.kept_z + layer.y + offset, position.n - column, sum[q]);
            if (out) store_some<COLUMNS>(out + offset, position.n - column, value);
        }
    }

    __device__ __forceinline__ void layer(const Position& position) {
        const StackLayer& layer = given.layers[position.l];
        const int expected = warp + 1 == WARPS ? halo_at(position, begin + SPAN) : 0;
        Walk::layer(
            layer, position.here, expected, position.words, given.halo,
            [&](float(&sum)[ROWS][COLUMNS]) { finish(layer, position, sum); }, [](int, int, float) {});
    }

    // Passes rows from number `first` of the shard on through all layers.
    __device__ __forceinline__ void pass(int first) {
        const int64_t of_block = ROWS * given.halo, of_layer = gridDim.x * of_block;
        uint64_t* const words = given.messages + first / ROWS * given.count * of_layer + blockIdx.x * of_block;
        Position position = {0, 0, 0, given.layers[0].n, given.layers[0].window, rows.first + first,
                    min(ROWS, rows.count - first), words};
        for (; position.l < given.count && begin < position.next_n; ++position.l, position.words += of_layer) {
            position.n = position.next_n, position.window = position.next_window;
            const bool is_last = position.l + 1 == given.count;
            position.next_n = is_last ? 0 : given.layers[position.l + 1].n;
            position.next_window = is_last ? 1 : given.layers[position.l + 1].window;
            if (position.l == 0)
                Walk::stage(position.here, position.window - 1, given.m - begin,
                            [&](int q, int i) { return given.x[(position.row0 + q) * given.m + begin + i]; });
            layer(position);
        }
        ++phase;
    }
};

// y of the last layer, for all rows of the shard, in passes of ROWS rows. A training step keeps y and z of each layer
// in `kept` and `kept_z`; null arrays are skipped. `halo` is the largest window less 1. `messages`, (passes, count,
// blocks, ROWS, halo), still holds words of earlier launches, which launches[1] counts.
// Grid: a block for every SPAN columns of x, all at once.
template <class Weights, class Activation>
__device__ __forceinline__ void local_stack_forward(const Step* step, int shard, int shards, const float* x,
                                                    const float* parameters, const StackLayer* layers, int count,
                                                    int m, int halo, float* kept, float* kept_z, float* y,
                                                    uint64_t* messages, unsigned* launches) {
    using Forward = StackForward<Weights, Activation>;
    SHARED(float, shared);
    const uint32_t sequence = launches[1] + 1;
    Forward forward({x, parameters, layers, count, m, halo, kept, kept_z, y, messages}, shard_rows(step, shard, shards),
                    sequence, shared);
    if (threadIdx.x == 0) {
        forward.phases.make();
        forward.weights.make();
        barrier_publish();
    }
    __syncthreads();
    const int rows = forward.rows.count;
    if (threadIdx.x < Forward::Shape::THREADS)
        for (int first = 0; first < rows; first += Forward::ROWS) forward.pass(first);
    else
        forward.weights.produce(layers, count, forward.begin, ceil_div(rows, Forward::ROWS));
    const Arrival arrival = arrive(launches);
    if (was_last(arrival, shared) && threadIdx.x == 0) launches[1] = sequence;
}

}  // namespace mlpgpu
