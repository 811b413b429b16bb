// The way back through a stack of locally connected layers in one kernel, which also moves the parameters: weights are
// read once, and written once.  Columns are dealt out as in local/stack.cuh; what a block has of dx beyond its own
// columns goes to its right neighbour as mail.
//
// A thread has four columns i of dz, and so w[r, i] as it comes.  dx_j = Σ_r w[r, j - r] dz_{j - r} is summed along a
// diagonal: after four lines, sums move on to the next thread on the left.  What leaves a warp on the left is whole but
// for terms of the warp before, and what is beyond its columns in the end is that warp's terms of the next one's.
#pragma once

#include "local/stack.cuh"
#include "elementwise/update.cuh"

namespace mlpgpu {

// What a thread keeps of a layer's columns, and what it shares.
template <class Shape>
struct StackDeltas {
    static constexpr int ROWS = Shape::ROWS, WARPS = Shape::WARPS, MOST_HALO = Shape::MOST_HALO;
    static constexpr int OF_WARP = 4 * WARP, PITCH = OF_WARP + MOST_HALO + WARP;  // of a warp's row of inputs
    static constexpr int OVER = ROWS * MOST_HALO;
    static constexpr int FLOATS = ROWS * Shape::SPAN + 2 * (WARPS + 1) * OVER + WARPS * ROWS * PITCH;
    float* const own;     // (ROWS, SPAN): each warp's part of dx in its columns
    float* const over;    // two times (WARPS + 1, ROWS, MOST_HALO): the part of the warp before, in a warp's columns
    float* const inputs;  // (WARPS, ROWS, PITCH)

    __device__ __forceinline__ explicit StackDeltas(float* room)
        : own(room), over(own + ROWS * Shape::SPAN), inputs(over + 2 * (WARPS + 1) * OVER) {}

    __device__ __forceinline__ float* over_of(int layer, int warp, int q) const {
        return over + ((layer & 1) * (WARPS + 1) + warp) * OVER + q * MOST_HALO;
    }

    // dx of a column of this thread's warp, when all warps have left their parts; `halo` is the layer's window less 1.
    __device__ __forceinline__ float sum(int layer, int q, int i, int halo) const {
        const int warp = threadIdx.x / WARP;
        const float part = own[q * Shape::SPAN + warp * OF_WARP + i];
        return i < halo && blockIdx.x + warp > 0 ? part + over_of(layer, warp, q)[i] : part;
    }
};

// A warp stores a stretch of memory, four words a lane, of which `count` are left from this lane's first on.  Where
// that is no multiple of 16 bytes, a lane stores the four from the next multiple on: its last, the next one's first.
__device__ __forceinline__ void store_stretch(float* to, int count, const float (&four)[4]) {
    const int lane = threadIdx.x % WARP, shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) / 4 & 3);
    if (shift == 0) {
        store_some<4>(to, count, four);
        return;
    }
    float near[8] = {four[0], four[1], four[2], four[3]};
#pragma unroll
    for (int i = 0; i < 3; ++i) near[4 + i] = __shfl_down_sync(WARP_ALL, four[i], 1);
    slide(near, 4 - shift);
    const bool is_whole = lane + 1 < WARP && count >= 8 - shift, is_first = lane == 0 || count < 4 - shift;
    if (is_whole) store_four(to + 4 - shift, near);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < count && (i < 4 - shift ? is_first : !is_whole)) to[i] = four[i];
}

// A block's way through the layers, from the last one to the first.
template <class Shape, int STAGES, class Rule, class Activation>
struct StackUpdate {
    using T = StackRing<Shape, STAGES, (4 >> Rule::SLOTS), 1 + Rule::SLOTS>;
    using Deltas = StackDeltas<Shape>;
    static constexpr int ROWS = Shape::ROWS, SPAN = Shape::SPAN, WARPS = Shape::WARPS, OF_WARP = Deltas::OF_WARP;
    static constexpr int PITCH = Deltas::PITCH, SLOTS = Rule::SLOTS > 0 ? Rule::SLOTS : 1;

    // Four neighbouring parameters of a thread, with their slots.
    struct Four {
        float w[4], slot[SLOTS][4];
    };

    // What a thread holds of a layer: dz of its columns; the sums of dx that are at its columns, and those that come to
    // them next; and the inputs that its columns see.
    struct Held {
        float dz[ROWS][4], sum[ROWS][8], seen[ROWS][8];
    };

    const StackArguments given;
    const Rows rows;
    const float scale;
    const float* const rates;
    const uint32_t tag;
    const int begin, column, warp, lane;
    const Deltas deltas;
    const float* const stages;
    const Phases<Shape> phases;
    Ring<T> ring;
    int phase = 0;  // layers that are done
    int above = 0;  // the halo of the layer above

    __device__ __forceinline__ StackUpdate(const StackArguments& given, const Rows& rows, float scale,
                                           const float* rates, uint32_t tag, float* shared)
        : given(given),
          rows(rows),
          scale(scale),
          rates(rates),
          tag(tag),
          begin(blockIdx.x * SPAN),
          column(begin + 4 * threadIdx.x),
          warp(threadIdx.x / WARP),
          lane(threadIdx.x % WARP),
          deltas(shared),
          stages(shared + Deltas::FLOATS + Phases<Shape>::WORDS),
          phases{shared_address(shared + Deltas::FLOATS)},
          ring(stages) {}

    __device__ __forceinline__ float* seen_by_warp(int q) const { return deltas.inputs + (warp * ROWS + q) * PITCH; }

    // The words of a layer between a block and the one before.
    __device__ __forceinline__ uint64_t* words(int l, unsigned block) const {
        return given.mail + (static_cast<int64_t>(l) * gridDim.x + block) * ROWS * given.halo;
    }

    // A layer's inputs, (rows, their width).
    __device__ __forceinline__ const float* input(int l) const {
        return l > 0 ? given.kept + given.layers[l - 1].y : given.x;
    }

    // Asks memory for the inputs of the layer below.
    __device__ __forceinline__ void look_ahead(int l, int width) const {
        if (l == 0) return;
        const int next_width = width + given.layers[l - 1].window - 1, from = begin + warp * OF_WARP + lane * WARP;
        if (lane * WARP < PITCH && from < next_width)
            for (int q = 0; q < rows.count; ++q)
                prefetch_line(input(l - 1) + (rows.first + q) * int64_t{next_width} + from);
    }

    // dz from what the layer above left, and the inputs that the warp's columns see.
    __device__ __forceinline__ void load(int l, const StackLayer& layer, int width, Held& held) const {
        const bool is_top = l + 1 == given.count, is_derived = is_top && given.is_derived;
        const float* const of_y = is_top ? given.y : given.kept + layer.y;
        const float* const saved = given.kept_z ? given.kept_z + layer.y : of_y;
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            const int64_t row = rows.first + q;
            const int valid = q < rows.count ? layer.n - column : 0;
            float of_warp[PITCH / WARP], at_hand[4] = {};
#pragma unroll
            for (int i = 0; i < PITCH / WARP; ++i) {
                const int from = begin + warp * OF_WARP + i * WARP + lane;
                of_warp[i] = q < rows.count && from < width ? input(l)[row * width + from] : 0.0f;
            }
            if (!is_derived) load_some<4>(saved + row * layer.n + column, valid, at_hand);
            if (is_top) load_some<4>(given.dy + row * layer.n + column, valid, held.dz[q]);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (!is_top) held.dz[q][c] = c < valid ? deltas.sum(l + 1, q, 4 * lane + c, above) : 0.0f;
                if (!is_derived) held.dz[q][c] *= c < valid ? Activation::derivative(at_hand[c]) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < PITCH / WARP; ++i) seen_by_warp(q)[i * WARP + lane] = of_warp[i];
        }
        __syncwarp();
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            load_four(seen_by_warp(q) + 4 * lane, held.seen[q]);
#pragma unroll
            for (int k = 0; k < 8; ++k) held.sum[q][k] = 0.0f;
        }
    }

    // The step of four parameters along a gradient; the first one is number `at` of all, of which `valid` are left.
    template <bool ALIGNED>
    __device__ __forceinline__ void move(int64_t at, int valid, Four& four, const float (&gradient)[4]) const {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float slot[SLOTS];
            for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = four.slot[s][c];
            step_parameter<Rule>(four.w[c], slot, gradient[c], scale, rates);
            for (int s = 0; s < Rule::SLOTS; ++s) four.slot[s][c] = slot[s];
        }
        const auto store = [&](float* to, const float(&words)[4]) {
            if (!ALIGNED)
                store_stretch(to, valid, words);
            else if (valid >= 4)
                store_four(to, words);
            else
                store_some<4>(to, valid, words);
        };
        store(given.parameters + at, four.w);
#pragma unroll
        for (int s = 0; s < Rule::SLOTS; ++s) store(given.slots + s * given.size + at, four.slot[s]);
    }

    // The step of each output's bias; or the warp's part of the gradient of one that they share.
    __device__ __forceinline__ void move_bias(int l, const StackLayer& layer, const Held& held) const {
        if (layer.bias < 0) return;
        if (layer.bias_step == 0) {
            double sum = 0.0;
            for (int q = 0; q < ROWS; ++q)
                for (int c = 0; c < 4; ++c) sum += static_cast<double>(held.dz[q][c]);
            sum = warp_sum(sum);
            if (lane == 0) given.bias_sums[(static_cast<int64_t>(l) * gridDim.x + blockIdx.x) * WARPS + warp] = sum;
            return;
        }
        Four four;
        float gradient[4] = {};
        const int64_t at = layer.bias + column;
        load_some<4>(given.parameters + at, layer.n - column, four.w);
        for (int s = 0; s < Rule::SLOTS; ++s)
            load_some<4>(given.slots + s * given.size + at, layer.n - column, four.slot[s]);
#pragma unroll
        for (int q = 0; q < ROWS; ++q)
            for (int c = 0; c < 4; ++c) gradient[c] += held.dz[q][c];
        move<false>(at, layer.n - column, four, gradient);
    }

    // A line of the thread's weights and slots from the stage; ALIGNED says that all of them lie on multiples of four.
    template <bool ALIGNED>
    __device__ __forceinline__ void fetch(int64_t line, int place, Four& four) const {
        const float* const from = stages + ring.stage * T::STAGE + place * T::ARRAYS * T::LINE;
        const int own = 4 * threadIdx.x;
        const auto words = [&](int array, int64_t start, float(&to)[4]) {
            if (ALIGNED)
                load_four(from + array * T::LINE + own, to);
            else
                load_four_from(from + array * T::LINE, own + static_cast<int>(start & 3), to);
        };
        words(0, line, four.w);
#pragma unroll
        for (int s = 0; s < Rule::SLOTS; ++s) words(1 + s, line + s * given.size, four.slot[s]);
    }

    // All lines of a layer's weights, four at a time.
    template <bool ALIGNED>
    __device__ __forceinline__ void walk(const StackLayer& layer, Held& held) {
        const int window = layer.window, valid = layer.n - column;
        const bool is_ragged = begin + (warp + 1) * OF_WARP > layer.n;  // a copy ends where the layer does
        int64_t line = layer.weight + begin;
        for (int r0 = 0; r0 < window; r0 += 4) {
#pragma unroll
            for (int q = 0; q < ROWS; ++q) load_four(seen_by_warp(q) + 4 * lane + r0 + 4, held.seen[q] + 4);
#pragma unroll
            for (int j = 0; j < 4; ++j, line += layer.pitch) {
                if (r0 + j >= window) break;
                Four four;
                float gradient[4] = {};
                if (j % T::DEPTH == 0) ring.wait_full();
                fetch<ALIGNED>(line, j % T::DEPTH, four);
                if (j % T::DEPTH == T::DEPTH - 1 || r0 + j + 1 == window) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive<1>(ring.empty + 8 * ring.stage, 0);
                    ring.advance();
                }
                if (is_ragged)
#pragma unroll
                    for (int c = 0; c < 4; ++c) four.w[c] = c < valid ? four.w[c] : 0.0f;
#pragma unroll
                for (int q = 0; q < ROWS; ++q)
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        held.sum[q][j + c] = fmaf(four.w[c], held.dz[q][c], held.sum[q][j + c]);
                        gradient[c] = fmaf(held.dz[q][c], held.seen[q][j + c], gradient[c]);
                    }
                move<ALIGNED>(line + 4 * threadIdx.x, valid, four, gradient);
            }
            hand_left(r0, held);
        }
    }

    // After four lines: sums go to the next thread on the left, and those that leave the warp to shared memory.
    __device__ __forceinline__ void hand_left(int r0, Held& held) const {
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            if (lane == 0) store_four(deltas.own + q * SPAN + warp * OF_WARP + r0, held.sum[q]);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float next = __shfl_down_sync(WARP_ALL, held.sum[q][c], 1);
                held.sum[q][c] = held.sum[q][c + 4] + (lane + 1 < WARP ? next : 0.0f);
                held.sum[q][c + 4] = 0.0f;
                held.seen[q][c] = held.seen[q][c + 4];
            }
        }
    }

    // After all lines: sums of the warp's columns stay, the others go to the warp on the right, or to the next block.
    __device__ __forceinline__ void leave(int l, int window, int width, bool is_wanted, const Held& held) const {
        const int place = 4 * lane + round_up(window, 4), beyond = place - OF_WARP;
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            if (beyond < 0) {
                store_four(deltas.own + q * SPAN + warp * OF_WARP + place, held.sum[q]);
            } else if (beyond < window - 1) {
                store_four(deltas.over_of(l, warp + 1, q) + beyond, held.sum[q]);
                const bool is_sent = warp + 1 == WARPS && is_wanted && q < rows.count;
                const int sent = is_sent ? min(window - 1, width - begin - SPAN) - beyond : 0;
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (c < sent) send(words(l, blockIdx.x + 1) + q * given.halo + beyond + c, held.sum[q][c], tag);
            }
        }
    }

    __device__ __forceinline__ void back(int l) {
        const StackLayer layer = given.layers[l];
        const int window = layer.window, width = layer.n + window - 1;
        const bool is_wanted = l > 0 || given.dx;
        const auto compute = [&] {
            Held held;
            look_ahead(l, width);
            phases.wait(warp - 1, phase - 1);
            load(l, layer, width, held);
            move_bias(l, layer, held);
            if (begin >= layer.n) {
                for (int q = 0; q < ROWS; ++q)
                    for (int i = lane; i < round_up(window, 4); i += WARP)
                        deltas.own[q * SPAN + warp * OF_WARP + i] = 0.0f;
            } else if ((layer.weight | layer.pitch | (Rule::SLOTS > 0 ? given.size : 0)) % 4 == 0) {
                walk<true>(layer, held);
            } else {
                walk<false>(layer, held);
            }
            phases.wait(warp + 1, phase - 1);
            leave(l, window, width, is_wanted, held);
        };
        // The first warp asks for what comes from the left when the layer begins, and looks when it is done.
        const int due = warp == 0 && blockIdx.x > 0 && is_wanted ? min(window - 1, width - begin) : 0;
        receive_beside(compute, letters<WARP, ROWS * Shape::MOST_HALO>(
                                    rows.count * due, tag,
                                    [&](int i) { return words(l, blockIdx.x) + i / due * given.halo + i % due; },
                                    [&](int i, float value) { deltas.over_of(l, 0, i / due)[i % due] = value; }));
        phases.end(phase++);
        above = window - 1;
    }

    __device__ __forceinline__ void run() {
        for (int l = given.count - 1; l >= 0; --l)
            if (begin < given.layers[l].n + given.layers[l].window - 1) back(l);
        phases.wait(warp - 1, phase - 1);
        for (int q = 0; given.dx && q < rows.count; ++q)
            for (int c = 0; c < 4; ++c)
                if (column + c < given.m)
                    given.dx[(rows.first + q) * int64_t{given.m} + column + c] = deltas.sum(0, q, 4 * lane + c, above);
    }

    // By a warp.
    __device__ __forceinline__ void produce() {
        for (int l = given.count - 1; l >= 0; --l) {
            const StackLayer layer = given.layers[l];
            if (begin < layer.n)
                bring_layer(ring, given.parameters, given.slots, given.size, layer, begin, min(layer.n - begin, SPAN));
        }
    }

    // The steps of biases that outputs share, by all warps of the block that ends last.
    __device__ __forceinline__ void move_shared_biases() const {
        for (int l = warp; l < given.count; l += WARPS + 1) {
            const StackLayer layer = given.layers[l];
            if (layer.bias < 0 || layer.bias_step) continue;
            double sum = 0.0;
            for (int i = lane; i < ceil_div(layer.n, SPAN) * WARPS; i += WARP)
                sum += given.bias_sums[static_cast<int64_t>(l) * gridDim.x * WARPS + i];
            const float gradient = static_cast<float>(warp_sum(sum));
            if (lane > 0) continue;
            float slot[SLOTS];
            for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = given.slots[s * given.size + layer.bias];
            step_parameter<Rule>(given.parameters[layer.bias], slot, gradient, scale, rates);
            for (int s = 0; s < Rule::SLOTS; ++s) given.slots[s * given.size + layer.bias] = slot[s];
        }
    }
};

// One step of all parameters of a stack along their gradients, and dx, unless that is null; at most ROWS rows.
// dy is the derivative by the last layer's y, or where `is_derived` by its z.  A bias that a layer's outputs share
// takes its step in the block that ends last, from bias_sums (count, blocks, WARPS).  The others are those of
// local_stack_forward, and of `update`; mail is (count, blocks, ROWS, halo).
template <class Shape, int STAGES, class Rule, class Activation>
__device__ __forceinline__ void local_stack_update(const Step* step, int shard, int shards, const float* x,
                                                   const StackLayer* layers, int count, int m, int halo,
                                                   const float* kept, const float* kept_z, const float* y,
                                                   const float* dy, int is_derived, const double* totals,
                                                   float* parameters, float* slots, int64_t size, float* dx,
                                                   double* bias_sums, uint64_t* mail, unsigned* launches) {
    SHARED(float, shared);
    const uint32_t tag = launches[1] + 1;
    StackUpdate<Shape, STAGES, Rule, Activation> update(
        {x, layers, count, m, halo, kept, kept_z, y, dy, is_derived, parameters, slots, size, dx, bias_sums, mail},
        shard_rows(step, shard, shards), static_cast<float>(inverse_weight(totals)), schedule + step->run * COLUMNS,
        tag, shared);
    if (threadIdx.x == 0) {
        update.phases.make();
        update.ring.make();
        barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x < Shape::THREADS)
        update.run();
    else
        update.produce();
    __syncthreads();
    const Arrival arrival = arrive(launches);
    if (!was_last(arrival, shared)) return;
    update.move_shared_biases();
    if (threadIdx.x == 0) launches[1] = tag;
}

}  // namespace mlpgpu
