// The backward pass through a stack of locally connected layers in one kernel, with the optimizer's step: weights are
// read once and written once. Columns are divided as in local/stack.cuh; a block sends what it has of dx beyond its
// columns to its right neighbour.
//
// A thread has four columns i of dz, and so the weights w[r, i] as they come. dx_j = Σ_r w[r, j - r] dz_{j - r} is
// summed along a diagonal: after four weight rows, sums go to the next thread on the left. Sums that leave a warp on
// the left lack only the terms of the warp before, and what is beyond its columns in the end are this warp's terms of
// the next one's sums.
#pragma once

#include "local/stack.cuh"
#include "math/optimizers.cuh"

namespace mlpgpu {

// Partial sums of dx that the warps of a block exchange, and the inputs that each warp sees.
template <class Shape>
struct StackDeltas {
    static constexpr int ROWS = Shape::ROWS, WARPS = Shape::WARPS, MOST_HALO = Shape::MOST_HALO;
    static constexpr int OF_WARP = 4 * WARP, PITCH = OF_WARP + MOST_HALO + WARP;  // of a warp's row of inputs
    static constexpr int SPILLOVER = ROWS * MOST_HALO;
    static constexpr int FLOATS = ROWS * Shape::SPAN + 2 * (WARPS + 1) * SPILLOVER + WARPS * ROWS * PITCH;
    float* const partials;  // (ROWS, SPAN): each warp's part of dx in its columns
    float* const spillover;  // two times (WARPS + 1, ROWS, MOST_HALO): the part that the warp before adds there
    float* const inputs;     // (WARPS, ROWS, PITCH)

    __device__ __forceinline__ explicit StackDeltas(float* room)
        : partials(room), spillover(partials + ROWS * Shape::SPAN), inputs(spillover + 2 * (WARPS + 1) * SPILLOVER) {}

    __device__ __forceinline__ float* spillover_of(int layer, int warp, int q) const {
        return spillover + ((layer & 1) * (WARPS + 1) + warp) * SPILLOVER + q * MOST_HALO;
    }

    // dx of a column of this thread's warp, after all warps have stored their parts; `halo` is the layer's window less
    // 1.
    __device__ __forceinline__ float sum(int layer, int q, int i, int halo) const {
        const int warp = threadIdx.x / WARP;
        const float part = partials[q * Shape::SPAN + warp * OF_WARP + i];
        return i < halo && blockIdx.x + warp > 0 ? part + spillover_of(layer, warp, q)[i] : part;
    }
};

// A warp stores consecutive words, four a lane; `count` are left from this lane's first on. If the address is no
// multiple of 16 bytes, a lane stores the four words from the next multiple on: its last ones, and the next lane's
// first.
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

// A block's pass through the layers, from the last one to the first.
template <class Shape, int STAGES, class Rule, class Activation>
struct StackUpdate {
    using T = StackRing<Shape, STAGES, (4 >> Rule::SLOTS), 1 + Rule::SLOTS>;
    using Deltas = StackDeltas<Shape>;
    static constexpr int ROWS = Shape::ROWS, SPAN = Shape::SPAN, WARPS = Shape::WARPS, OF_WARP = Deltas::OF_WARP;
    static constexpr int PITCH = Deltas::PITCH, SLOTS = Rule::SLOTS > 0 ? Rule::SLOTS : 1;
    static constexpr int THREADS = Shape::THREADS + WARP;
    static constexpr int SHARED_BYTES = 4 * (Deltas::FLOATS + Shape::PHASE_WORDS) + T::BYTES;

    // Four neighbouring parameters of a thread, with their slots.
    struct Four {
        float w[4], slot[SLOTS][4];
    };

    // What a thread has of a layer in registers: dz of its columns; the sums of dx at its columns, and at the next
    // ones; and the inputs that its columns see.
    struct Registers {
        float dz[ROWS][4], sum[ROWS][8], seen[ROWS][8];
    };

    const StackArguments given;
    const Rows rows;
    const float scale;
    const float* const rates;
    const uint32_t sequence;
    const int begin, column, warp, lane;
    const Deltas deltas;
    const float* const stages;
    const Phases<Shape> phases;
    Ring<T> ring;
    int phase = 0;  // layers that are done
    int above = 0;  // the halo of the layer above

    __device__ __forceinline__ StackUpdate(const StackArguments& given, const Rows& rows, float scale,
                                           const float* rates, uint32_t sequence, float* shared)
        : given(given),
          rows(rows),
          scale(scale),
          rates(rates),
          sequence(sequence),
          begin(blockIdx.x * SPAN),
          column(begin + 4 * threadIdx.x),
          warp(threadIdx.x / WARP),
          lane(threadIdx.x % WARP),
          deltas(shared),
          stages(shared + Deltas::FLOATS + Phases<Shape>::WORDS),
          phases{shared_address(shared + Deltas::FLOATS)},
          ring(stages) {}

    __device__ __forceinline__ float* seen_by_warp(int q) const { return deltas.inputs + (warp * ROWS + q) * PITCH; }

    // The messages of a layer from a block to the next one.
    __device__ __forceinline__ uint64_t* words(int l, unsigned block) const {
        return given.messages + (static_cast<int64_t>(l) * gridDim.x + block) * ROWS * given.halo;
    }

    // A layer's inputs, (rows, their width).
    __device__ __forceinline__ const float* input(int l) const {
        return l > 0 ? given.kept + given.layers[l - 1].y : given.x;
    }

    // Prefetches the inputs of the layer below.
    __device__ __forceinline__ void prefetch_inputs(int l, int width) const {
        if (l == 0) return;
        const int next_width = width + given.layers[l - 1].window - 1, from = begin + warp * OF_WARP + lane * WARP;
        if (lane * WARP < PITCH && from < next_width)
            for (int q = 0; q < rows.count; ++q)
                prefetch_to_l2(input(l - 1) + (rows.first + q) * int64_t{next_width} + from);
    }

    // Loads dz from what the layer above left, and the inputs that the warp's columns see.
    __device__ __forceinline__ void load(int l, const StackLayer& layer, int width, Registers& registers) const {
        const bool is_top = l + 1 == given.count, is_derived = is_top && given.is_derived;
        const float* const of_y = is_top ? given.y : given.kept + layer.y;
        const float* const saved = given.kept_z ? given.kept_z + layer.y : of_y;
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            const int64_t row = rows.first + q;
            const int valid = q < rows.count ? layer.n - column : 0;
            float of_warp[PITCH / WARP], saved_four[4] = {};
#pragma unroll
            for (int i = 0; i < PITCH / WARP; ++i) {
                const int from = begin + warp * OF_WARP + i * WARP + lane;
                of_warp[i] = q < rows.count && from < width ? input(l)[row * width + from] : 0.0f;
            }
            if (!is_derived) load_some<4>(saved + row * layer.n + column, valid, saved_four);
            if (is_top) load_some<4>(given.dy + row * layer.n + column, valid, registers.dz[q]);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (!is_top) registers.dz[q][c] = c < valid ? deltas.sum(l + 1, q, 4 * lane + c, above) : 0.0f;
                if (!is_derived) registers.dz[q][c] *= c < valid ? Activation::derivative(saved_four[c]) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < PITCH / WARP; ++i) seen_by_warp(q)[i * WARP + lane] = of_warp[i];
        }
        __syncwarp();
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            load_four(seen_by_warp(q) + 4 * lane, registers.seen[q]);
#pragma unroll
            for (int k = 0; k < 8; ++k) registers.sum[q][k] = 0.0f;
        }
    }

    // Updates four parameters along their gradient; `first` is the number of the first, of which `valid` are left.
    template <bool ALIGNED, class RuleOfFour = Rule>
    __device__ __forceinline__ void update_four(int64_t first, int valid, Four& four,
                                                const float (&gradient)[4]) const {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float slot[SLOTS];
            for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = four.slot[s][c];
            step_parameter<RuleOfFour>(four.w[c], slot, gradient[c], scale, rates);
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
        store(given.parameters + first, four.w);
#pragma unroll
        for (int s = 0; s < Rule::SLOTS; ++s) store(given.slots + s * given.size + first, four.slot[s]);
    }

    // Updates each output's bias, or stores the warp's part of the gradient of a bias that outputs share.
    __device__ __forceinline__ void update_bias(int l, const StackLayer& layer, const Registers& registers) const {
        if (layer.bias < 0) return;
        if (layer.bias_step == 0) {
            double sum = 0.0;
            for (int q = 0; q < ROWS; ++q)
                for (int c = 0; c < 4; ++c) sum += static_cast<double>(registers.dz[q][c]);
            sum = warp_sum(sum);
            if (lane == 0) given.bias_sums[(static_cast<int64_t>(l) * gridDim.x + blockIdx.x) * WARPS + warp] = sum;
            return;
        }
        Four four;
        float gradient[4] = {};
        const int64_t first = layer.bias + column;
        load_some<4>(given.parameters + first, layer.n - column, four.w);
        for (int s = 0; s < Rule::SLOTS; ++s)
            load_some<4>(given.slots + s * given.size + first, layer.n - column, four.slot[s]);
#pragma unroll
        for (int q = 0; q < ROWS; ++q)
            for (int c = 0; c < 4; ++c) gradient[c] += registers.dz[q][c];
        update_four<false, BiasRule<Rule>>(first, layer.n - column, four, gradient);
    }

    // Loads the thread's weights and slots of a weight row from the stage; ALIGNED: all of them lie on multiples of
    // four.
    template <bool ALIGNED>
    __device__ __forceinline__ void fetch(int64_t weight_row, int offset, Four& four) const {
        const float* const from = stages + ring.stage * T::STAGE + offset * T::ARRAYS * T::WEIGHT_ROW;
        const int block_column = 4 * threadIdx.x;
        const auto words = [&](int array, int64_t start, float(&to)[4]) {
            if (ALIGNED)
                load_four(from + array * T::WEIGHT_ROW + block_column, to);
            else
                load_four_from(from + array * T::WEIGHT_ROW, block_column + static_cast<int>(start & 3), to);
        };
        words(0, weight_row, four.w);
#pragma unroll
        for (int s = 0; s < Rule::SLOTS; ++s) words(1 + s, weight_row + s * given.size, four.slot[s]);
    }

    // Multiplies and updates all rows of a layer's weights, four at a time.
    template <bool ALIGNED>
    __device__ __forceinline__ void multiply_and_update(const StackLayer& layer, Registers& registers) {
        const int window = layer.window, valid = layer.n - column;
        const bool is_ragged = begin + (warp + 1) * OF_WARP > layer.n;  // a copy ends where the layer does
        int64_t weight_row = layer.weight + begin;
        for (int r0 = 0; r0 < window; r0 += 4) {
#pragma unroll
            for (int q = 0; q < ROWS; ++q) load_four(seen_by_warp(q) + 4 * lane + r0 + 4, registers.seen[q] + 4);
#pragma unroll
            for (int j = 0; j < 4; ++j, weight_row += layer.pitch) {
                if (r0 + j >= window) break;
                Four four;
                float gradient[4] = {};
                if (j % T::DEPTH == 0) ring.wait_full();
                fetch<ALIGNED>(weight_row, j % T::DEPTH, four);
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
                        registers.sum[q][j + c] = fmaf(four.w[c], registers.dz[q][c], registers.sum[q][j + c]);
                        gradient[c] = fmaf(registers.dz[q][c], registers.seen[q][j + c], gradient[c]);
                    }
                update_four<ALIGNED>(weight_row + 4 * threadIdx.x, valid, four, gradient);
            }
            shift_left(r0, registers);
        }
    }

    // After four weight rows: moves sums to the next thread on the left, and those that leave the warp to shared
    // memory.
    __device__ __forceinline__ void shift_left(int r0, Registers& registers) const {
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            if (lane == 0) store_four(deltas.partials + q * SPAN + warp * OF_WARP + r0, registers.sum[q]);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float next = __shfl_down_sync(WARP_ALL, registers.sum[q][c], 1);
                registers.sum[q][c] = registers.sum[q][c + 4] + (lane + 1 < WARP ? next : 0.0f);
                registers.sum[q][c + 4] = 0.0f;
                registers.seen[q][c] = registers.seen[q][c + 4];
            }
        }
    }

    // After all weight rows: keeps sums of the warp's columns, and passes the others to the warp on the right, or to
    // the next block.
    __device__ __forceinline__ void store_partials(int l, int window, int width, bool is_needed,
                                                   const Registers& registers) const {
        const int offset = 4 * lane + round_up(window, 4), beyond = offset - OF_WARP;
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            if (beyond < 0) {
                store_four(deltas.partials + q * SPAN + warp * OF_WARP + offset, registers.sum[q]);
            } else if (beyond < window - 1) {
                store_four(deltas.spillover_of(l, warp + 1, q) + beyond, registers.sum[q]);
                const bool is_sent = warp + 1 == WARPS && is_needed && q < rows.count;
                const int sent = is_sent ? min(window - 1, width - begin - SPAN) - beyond : 0;
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (c < sent)
                        send(words(l, blockIdx.x + 1) + q * given.halo + beyond + c, registers.sum[q][c], sequence);
            }
        }
    }

    __device__ __forceinline__ void back(int l) {
        const StackLayer layer = given.layers[l];
        const int window = layer.window, width = layer.n + window - 1;
        const bool is_needed = l > 0 || given.dx;
        const auto compute = [&] {
            Registers registers;
            prefetch_inputs(l, width);
            phases.wait(warp - 1, phase - 1);
            load(l, layer, width, registers);
            update_bias(l, layer, registers);
            if (begin >= layer.n) {
                for (int q = 0; q < ROWS; ++q)
                    for (int i = lane; i < round_up(window, 4); i += WARP)
                        deltas.partials[q * SPAN + warp * OF_WARP + i] = 0.0f;
            } else if ((layer.weight | layer.pitch | (Rule::SLOTS > 0 ? given.size : 0)) % 4 == 0) {
                multiply_and_update<true>(layer, registers);
            } else {
                multiply_and_update<false>(layer, registers);
            }
            phases.wait(warp + 1, phase - 1);
            store_partials(l, window, width, is_needed, registers);
        };
        // The first warp asks for the left neighbour's messages when the layer begins, and waits for them when it is
        // done.
        const int expected = warp == 0 && blockIdx.x > 0 && is_needed ? min(window - 1, width - begin) : 0;
        const auto address = [&](int i) { return words(l, blockIdx.x) + i / expected * given.halo + i % expected; };
        receive_during(compute, receiver<WARP, ROWS * Shape::MOST_HALO>(
                                    rows.count * expected, sequence, address, [&](int i, float value) {
                                        deltas.spillover_of(l, 0, i / expected)[i % expected] = value;
                                    }));
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

    // Called by a warp.
    __device__ __forceinline__ void produce() {
        for (int l = given.count - 1; l >= 0; --l) {
            const StackLayer layer = given.layers[l];
            if (begin < layer.n)
                load_layer(ring, given.parameters, given.slots, given.size, layer, begin, min(layer.n - begin, SPAN));
        }
    }

    // Updates biases that outputs share, by all warps of the block that ends last.
    __device__ __forceinline__ void update_shared_biases() const {
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
            step_parameter<BiasRule<Rule>>(given.parameters[layer.bias], slot, gradient, scale, rates);
            for (int s = 0; s < Rule::SLOTS; ++s) given.slots[s * given.size + layer.bias] = slot[s];
        }
    }
};

// One step of all parameters of a stack along their gradients, and dx, for at most ROWS rows; a null dx is skipped. dy
// is the derivative by the last layer's y, or if `is_derived` by its z. A bias that a layer's outputs share is updated
// by the block that ends last, from bias_sums (count, blocks, WARPS). Other arguments are those of local_stack_forward
// and of `update`; `messages` is (count, blocks, ROWS, halo).
template <class Shape, int STAGES, class Rule, class Activation>
__device__ __forceinline__ void local_stack_update(const Step* step, int shard, int shards, const float* x,
                                                   const StackLayer* layers, int count, int m, int halo,
                                                   const float* kept, const float* kept_z, const float* y,
                                                   const float* dy, int is_derived, const double* totals,
                                                   float* parameters, float* slots, int64_t size, float* dx,
                                                   double* bias_sums, uint64_t* messages, unsigned* launches) {
    SHARED(float, shared);
    const uint32_t sequence = launches[1] + 1;
    StackUpdate<Shape, STAGES, Rule, Activation> update(
        {x, layers, count, m, halo, kept, kept_z, y, dy, is_derived, parameters, slots, size, dx, bias_sums, messages},
        shard_rows(step, shard, shards), mean_scale(totals), step_rates(step),
        sequence, shared);
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
    update.update_shared_biases();
    if (threadIdx.x == 0) launches[1] = sequence;
}

}  // namespace mlpgpu
