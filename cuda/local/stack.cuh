// A stack of locally connected layers in one kernel (local/layer.cuh says what a layer computes).
//
// Each block has a span of columns through all layers, a thread some of them.  A layer's outputs become the next
// one's inputs in shared memory.  What a block needs of its right neighbour's outputs, the first window - 1, its halo,
// comes as mail (arch/messages.cuh).  Mail goes one way, and each layer has words of its own: nobody waits for who gets it, so
// blocks fall in step behind each other, and a wait costs the stack once, not once a layer.
//
// Weights of a layer's own are streamed: a thread has the copy engine bring them, line by line, to a ring of stages
// ahead of need, past the ends of layers, so that memory is never idle.  Weights that serve all layers are held, some
// lines in registers and the others in shared memory.
//
// Every output is one chain of fused multiply-adds in ascending order, as local/layer.cuh makes it.
#pragma once

#include "math/activations.cuh"
#include "arch/hopper.cuh"
#include "arch/messages.cuh"
#include "common/step.cuh"

namespace mlpgpu {

// A layer; offsets are in floats.
struct StackLayer {
    int64_t weight, bias;  // in the parameters: (window, pitch); numbers `bias_step` apart, negative if there are none
    int64_t y;             // in what a training step keeps, and z likewise: (rows, n); the last y is elsewhere
    int32_t n, window, pitch, bias_step;
};

// How the columns and rows of a pass are dealt out to threads, which move VECTOR words at once.
template <int WARPS_, int ROWS_, int COLUMNS_ = 4>
struct StackShape {
    static constexpr int WARPS = WARPS_, ROWS = ROWS_, COLUMNS = COLUMNS_, VECTOR = COLUMNS % 4 ? 2 : 4;
    static constexpr int THREADS = WARPS * WARP, SPAN = COLUMNS * THREADS;
    static constexpr int MOST_HALO = 64;
    static constexpr int PITCH = SPAN + MOST_HALO + 8;  // of a row of inputs in shared memory
};

// The ring of streamed weights: a stage holds the block's span of up to DEPTH lines of ARRAYS arrays, the weights and
// their slots, each from a multiple of four on.
template <class Shape, int STAGES_, int DEPTH_, int ARRAYS_>
struct StackRing {
    static constexpr int STAGES = STAGES_, DEPTH = DEPTH_, ARRAYS = ARRAYS_;
    static constexpr int CONSUMERS = Shape::WARPS, CLUSTER = 1, ALIGNMENT = 16;
    static constexpr int LINE = Shape::SPAN + 4, STAGE = DEPTH * ARRAYS * LINE, STAGE_BYTES = 4 * STAGE;
};

// --- neighbouring words ---

__device__ __forceinline__ void load_two(const float* from, float* to) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x, to[1] = two.y;
}

__device__ __forceinline__ void store_two(float* to, const float* from) {
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
}

// COUNT of them, an even number, from and to an address that is a multiple of the vectors' size.
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

// The first `count` of them, at once where the address allows.
template <int COUNT>
__device__ __forceinline__ bool is_whole(const float* at, int count) {
    return count >= COUNT && reinterpret_cast<uintptr_t>(at) % (COUNT % 4 ? 8 : 16) == 0;
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

// The four from place `by` on, 0 to 3, come to the front.
__device__ __forceinline__ void slide(float (&eight)[8], int by) {
    if (by & 2)
#pragma unroll
        for (int i = 0; i < 6; ++i) eight[i] = eight[i + 2];
    if (by & 1)
#pragma unroll
        for (int i = 0; i < 4; ++i) eight[i] = eight[i + 1];
}

// From word `from` of a line that begins at a multiple of 16 bytes.
__device__ __forceinline__ void load_four_from(const float* line, int from, float* to) {
    const int shift = from & 3;
    float near[8] = {};
    load_four(line + from - shift, near);
    if (shift) load_four(line + from - shift + 4, near + 4);
    slide(near, shift);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = near[i];
}

// --- what the warps of a block do together ---

// Warps go through phases.  In each one a warp waits for both of its neighbours' one before, so that they are never
// more than a phase apart; but there is no barrier at which all would wait.  Of each warp two barriers take turns.
template <class Shape>
struct Phases {
    static constexpr int WORDS = 4 * Shape::WARPS;
    uint32_t barriers;

    // By one thread.
    __device__ __forceinline__ void make() const {
        for (int i = 0; i < 2 * Shape::WARPS; ++i) barrier_init(barriers + 8 * i, 1);
    }

    __device__ __forceinline__ uint32_t of(int warp, int phase) const {
        return barriers + 8 * (2 * warp + (phase & 1));
    }

    // This warp is done with a phase, which concerns its neighbours, if there are any.
    __device__ __forceinline__ void end(int phase) const {
        __syncwarp();
        if (Shape::WARPS > 1 && threadIdx.x % WARP == 0) barrier_arrive<1>(of(threadIdx.x / WARP, phase), 0);
    }

    // Waits until a neighbour, if there is one, is done with a phase, if there was one.
    __device__ __forceinline__ void wait(int warp, int phase) const {
        if (phase >= 0 && warp >= 0 && warp < Shape::WARPS) barrier_wait(of(warp, phase), phase >> 1 & 1);
    }
};

// Brings a layer's weights, stage by stage, and of each slot the same, `size` elements apart.  By a warp: each lane asks
// for a line of a stage, since one thread's instructions for all of them take longer than narrow lines.
template <class T>
__device__ __forceinline__ void bring_layer(Ring<T>& ring, const float* parameters, const float* slots, int64_t size,
                                            const StackLayer& layer, int begin, int columns) {
    const int lane = threadIdx.x % WARP, line = lane / T::ARRAYS, slot = lane % T::ARRAYS - 1;
    int64_t place = layer.weight + static_cast<int64_t>(line) * layer.pitch + begin + max(slot, 0) * size;
    for (int first = 0; first < layer.window; first += T::DEPTH, place += T::DEPTH * layer.pitch) {
        const bool asks = line < min(T::DEPTH, layer.window - first);
        const int bytes = asks ? 4 * round_up(static_cast<int>(place & 3) + columns, 4) : 0;
        const int all = T::DEPTH * T::ARRAYS > 1 ? warp_sum(bytes) : bytes;
        const uint32_t full = ring.full + 8 * ring.stage;
        ring.wait_empty();
        if (lane == 0) barrier_expect(full, all);
        if (asks)
            bulk_copy(ring.address() + 4 * lane * T::LINE, (slot < 0 ? parameters : slots) + (place & ~int64_t{3}), full,
                      bytes);
        ring.advance();
    }
}

// --- weights: over(…, body) calls body(r, w, window) for VECTOR lines of the layer's weights, a thread's columns of
// each, from line r on; those from `window` on are none ---

template <class Shape_, int STAGES, int DEPTH>
struct StreamedWeights {
    using Shape = Shape_;
    using T = StackRing<Shape, STAGES, DEPTH, 1>;
    const float* const stages;
    const float* const parameters;
    Ring<T> ring;

    __device__ __forceinline__ StreamedWeights(float* room, const float* parameters, const StackLayer*, int)
        : stages(room), parameters(parameters), ring(room) {}

    __device__ __forceinline__ void make() const { ring.make(); }

    // By a warp.
    __device__ __forceinline__ void produce(const StackLayer* layers, int count, int begin, int passes) {
        for (int pass = 0; pass < passes; ++pass)
            for (int l = 0; l < count && begin < layers[l].n; ++l) {
                const StackLayer layer = layers[l];
                bring_layer(ring, parameters, nullptr, 0, layer, begin, min(layer.n - begin, Shape::SPAN));
            }
    }

    template <class Body>
    __device__ __forceinline__ void over(const StackLayer& layer, int begin, const Body& body) {
        const int window = layer.window, pitch = layer.pitch;
        int place = static_cast<int>(layer.weight) + begin;  // of a line; its last two bits count
        for (int r = 0; r < window; r += 4) {
            float w[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j, place += pitch) {
                if (r + j >= window) break;
                if (j % DEPTH == 0) ring.wait_full();
                const float* const line = stages + ring.stage * T::STAGE + j % DEPTH * T::LINE;
                load_four_from(line, 4 * threadIdx.x + (place & 3), w[j]);
                if (j % DEPTH + 1 < DEPTH && r + j + 1 < window) continue;
                __syncwarp();
                if (threadIdx.x % WARP == 0) barrier_arrive<1>(ring.empty + 8 * ring.stage, 0);
                ring.advance();
            }
            body(r, w, window);
        }
    }
};

// The block's columns as the way forward has them, in the order of memory, and as in a mirror, where they come from the
// right: number v of the grid's is column MIRROR - v.
template <class Shape, bool IS_MIRRORED>
__device__ __forceinline__ int column_of(int v) {
    return IS_MIRRORED ? static_cast<int>(gridDim.x) * Shape::SPAN - 1 - v : v;
}

// Of WINDOW lines the first IN_REGISTERS in registers, the others in shared memory.  In a mirror a line is
// w'[r, v] = w[r, column of v - r].
template <class Shape_, int WINDOW_, int IN_REGISTERS, bool IS_MIRRORED = false>
struct HeldWeights {
    using Shape = Shape_;
    static constexpr int COLUMNS = Shape::COLUMNS, WINDOW = WINDOW_;
    static constexpr int FLOATS = (WINDOW - IN_REGISTERS) * Shape::SPAN;  // in shared memory
    float* const lines;
    float held[IN_REGISTERS][COLUMNS];

    __device__ __forceinline__ HeldWeights(float* room, const float* parameters, const StackLayer* layers, int begin)
        : lines(room + COLUMNS * threadIdx.x) {
        const StackLayer layer = layers[0];
        const int column = begin + COLUMNS * static_cast<int>(threadIdx.x);
#pragma unroll
        for (int r = 0; r < WINDOW; ++r) {
            float words[COLUMNS];
            float(&to)[COLUMNS] = r < IN_REGISTERS ? held[r < IN_REGISTERS ? r : 0] : words;
            const float* const line = parameters + layer.weight + static_cast<int64_t>(r) * layer.pitch;
            if (IS_MIRRORED) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const int i = column_of<Shape, true>(column + c) - r;
                    to[c] = i >= 0 && i < layer.n ? line[i] : 0.0f;
                }
            } else {
                load_some<COLUMNS>(line + column, layer.n - column, to);
            }
            if (r >= IN_REGISTERS) store_words<COLUMNS>(lines + (r - IN_REGISTERS) * Shape::SPAN, to);
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
                if (r + j >= IN_REGISTERS) load_words<COLUMNS>(lines + (r + j - IN_REGISTERS) * Shape::SPAN, w[j]);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    if (r + j < IN_REGISTERS) w[j][c] = held[r + j < IN_REGISTERS ? r + j : 0][c];
            }
            body(r, w, WINDOW);
        }
    }
};

// --- a block's way through layers, some rows at a time ---

// What a kernel of the way back is given, as local_stack_update says.
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
    uint64_t* mail;
};

template <class Weights_>
struct StackWalk {
    using Weights = Weights_;
    using Shape = typename Weights::Shape;
    static constexpr int ROWS = Shape::ROWS, COLUMNS = Shape::COLUMNS, VECTOR = Shape::VECTOR, WARPS = Shape::WARPS;
    static constexpr int PITCH = Shape::PITCH, SPAN = Shape::SPAN, OF_WARP = COLUMNS * WARP;

    const Rows rows;
    const uint32_t tag;
    const int begin, own, column, warp, lane;  // columns: the block's first one, the thread's in the block and at all
    float* const inputs;                       // two times (ROWS, PITCH), which take turns
    const Phases<Shape> phases;
    Weights weights;
    int phase = 0;  // each gives a layer its inputs

    __device__ __forceinline__ StackWalk(const Rows& rows, uint32_t tag, const float* parameters,
                                         const StackLayer* layers, float* shared)
        : rows(rows),
          tag(tag),
          begin(blockIdx.x * SPAN),
          own(COLUMNS * threadIdx.x),
          column(begin + own),
          warp(threadIdx.x / WARP),
          lane(threadIdx.x % WARP),
          inputs(shared),
          phases{shared_address(shared + 2 * ROWS * PITCH)},
          weights(shared + 2 * ROWS * PITCH + Phases<Shape>::WORDS, parameters, layers, begin) {}

    __device__ __forceinline__ float* inputs_of(int which) const { return inputs + (which & 1) * ROWS * PITCH; }

    // The first layer's inputs, value(row, column of the block), of which there are `count`: the warp's columns, and
    // the last warp's `halo` beyond.
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
        const float* const from = inputs_of(phase) + own;
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

    // One layer: finish(sums) makes outputs of sums.  Beside it the last warp asks for the halo of the next layer, `due`
    // words of each row, and looks when it is done; kept(row, column, value) sees them too.  `words`, `halo` for each
    // row, lie between the block and the one before, and behind them those between it and the next one.
    template <class Finish, class Kept>
    __device__ __forceinline__ void layer(const StackLayer& layer, int here, int due, const uint64_t* words, int halo,
                                          const Finish& finish, const Kept& kept) {
        const auto compute = [&] {
            float sum[ROWS][COLUMNS] = {};
            phases.wait(warp + 1, phase);
            multiply(layer, sum);
            finish(sum);
        };
        float* const to = inputs_of(phase + 1);
        receive_beside(compute, letters<WARP, ROWS * Shape::MOST_HALO>(
                                    here * due, tag,
                                    [&](int i) { return words + (ROWS + i / due) * halo + i % due; },
                                    [&](int i, float value) {
                                        to[i / due * PITCH + SPAN + i % due] = value;
                                        kept(i / due, SPAN + i % due, value);
                                    }));
        phases.end(++phase);
    }

    // Outputs of a row become inputs of the next layer; the first `sent` columns of the block go to the block before.
    __device__ __forceinline__ void pass_on(int q, const float (&value)[COLUMNS], uint64_t* words, int sent) const {
        store_words<COLUMNS>(inputs_of(phase + 1) + q * PITCH + own, value);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (own + c < sent) send(words + own + c, value[c], tag);
    }
};

// --- forward ---

template <class Weights_, class Activation>
struct StackForward : StackWalk<Weights_> {
    using Walk = StackWalk<Weights_>;
    using Walk::ROWS, Walk::COLUMNS, Walk::SPAN, Walk::WARPS;
    using Walk::begin, Walk::column, Walk::phase, Walk::phases, Walk::rows, Walk::warp;

    // As local_stack_forward is given them.
    struct Arguments {
        const float* x;
        const float* parameters;
        const StackLayer* layers;
        int count, m, halo;
        float* kept;
        float* kept_z;
        float* y;
        uint64_t* mail;
    };

    // What a layer of a pass is about: its number, its columns and window and the next one's; the first of its rows
    // in the batch, and how many; and the words between it and the block before.
    struct Place {
        int l, n, window, next_n, next_window;
        int64_t row0;
        int here;
        uint64_t* words;
    };

    const Arguments given;

    __device__ __forceinline__ StackForward(const Arguments& given, const Rows& rows, uint32_t tag, float* shared)
        : Walk(rows, tag, given.parameters, given.layers, shared), given(given) {}

    // Of the outputs from `start` on, how many are the halo of a block that ends there.
    __device__ __forceinline__ int halo_at(const Place& at, int start) const {
        return max(0, min(at.next_window - 1, at.n - start));
    }

    // Biases and activations; outputs go to the next layer, to the block before, and to memory.
    __device__ __forceinline__ void finish(const StackLayer& layer, const Place& at,
                                           float (&sum)[ROWS][COLUMNS]) const {
        float bias[COLUMNS] = {};
        if (layer.bias >= 0)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                if (column + c < at.n)
                    bias[c] = given.parameters[layer.bias + static_cast<int64_t>(column + c) * layer.bias_step];
        float* const out = at.l + 1 == given.count ? given.y : given.kept ? given.kept + layer.y : nullptr;
        const int sent = blockIdx.x > 0 ? halo_at(at, begin) : 0;
        phases.wait(warp - 1, phase);
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            const int64_t place = (at.row0 + q) * at.n + column;
            float value[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sum[q][c] += bias[c], value[c] = Activation::forward(sum[q][c]);
            Walk::pass_on(q, value, at.words + q * given.halo, q < at.here ? sent : 0);
            if (q >= at.here) continue;
            if (given.kept_z) store_some<COLUMNS>(given.kept_z + layer.y + place, at.n - column, sum[q]);
            if (out) store_some<COLUMNS>(out + place, at.n - column, value);
        }
    }

    __device__ __forceinline__ void layer(const Place& at) {
        const StackLayer& layer = given.layers[at.l];
        const int due = warp + 1 == WARPS ? halo_at(at, begin + SPAN) : 0;
        Walk::layer(
            layer, at.here, due, at.words, given.halo,
            [&](float(&sum)[ROWS][COLUMNS]) { finish(layer, at, sum); }, [](int, int, float) {});
    }

    // Rows from number `first` of the shard on.
    __device__ __forceinline__ void pass(int first) {
        const int64_t of_block = ROWS * given.halo, of_layer = gridDim.x * of_block;
        uint64_t* const words = given.mail + first / ROWS * given.count * of_layer + blockIdx.x * of_block;
        Place at = {0, 0, 0, given.layers[0].n, given.layers[0].window, rows.first + first,
                    min(ROWS, rows.count - first), words};
        for (; at.l < given.count && begin < at.next_n; ++at.l, at.words += of_layer) {
            at.n = at.next_n, at.window = at.next_window;
            const bool is_last = at.l + 1 == given.count;
            at.next_n = is_last ? 0 : given.layers[at.l + 1].n;
            at.next_window = is_last ? 1 : given.layers[at.l + 1].window;
            if (at.l == 0)
                Walk::stage(at.here, at.window - 1, given.m - begin,
                            [&](int q, int i) { return given.x[(at.row0 + q) * given.m + begin + i]; });
            layer(at);
        }
        ++phase;
    }
};

// y of the last layer, for all rows of the shard, in passes of ROWS rows; what a step keeps of each layer goes to
// `kept` and `kept_z`, unless they are null.  `halo` is the largest window less 1.  Mail, (passes, count,
// blocks, ROWS, halo), holds words of earlier launches, which launches[1] counts.
// Grid: a block for every SPAN columns of x, all at once.
template <class Weights, class Activation>
__device__ __forceinline__ void local_stack_forward(const Step* step, int shard, int shards, const float* x,
                                                    const float* parameters, const StackLayer* layers, int count,
                                                    int m, int halo, float* kept, float* kept_z, float* y,
                                                    uint64_t* mail, unsigned* launches) {
    using Forward = StackForward<Weights, Activation>;
    SHARED(float, shared);
    const uint32_t tag = launches[1] + 1;
    Forward forward({x, parameters, layers, count, m, halo, kept, kept_z, y, mail}, shard_rows(step, shard, shards),
                    tag, shared);
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
    if (was_last(arrival, shared) && threadIdx.x == 0) launches[1] = tag;
}

}  // namespace mlpgpu
