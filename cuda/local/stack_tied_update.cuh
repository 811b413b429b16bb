// The backward pass through a stack whose layers share one weight matrix, in one kernel, with the optimizer's step.
//
// dx_j = Σ_r w[r, j - r] dz_{j - r} looks to the left, where y_i = Σ_r w[r, i] x_{i + r} looks to the right. So columns
// are numbered as in a mirror: then dx_v = Σ_r w'[r, v] dz_{v + r}, and the backward pass is the pass of
// local/stack.cuh, with weights that never leave the chip. A block writes each layer's dz to memory, including the
// halo.
//
// After all layers a block adds up the gradient of its weights, dw'[r, v] = Σ x_v dz_{v + r} over layers and rows. It waits
// for no other block then, since the forward pass stored x and the block itself computed dz. It updates the weights that it
// holds, which no other block reads.
#pragma once

#include "common/async_copy.cuh"
#include "local/stack.cuh"
#include "math/optimizers.cuh"

namespace mlpgpu {

// How a gradient, whose sums stay in registers, is divided: a thread takes half of its columns at a time, and
// WEIGHT_ROWS rows of them at a time, in PIECES pieces. A warp has FLOATS in shared memory, after the barriers, which
// stay valid: a ring of stages for the terms, and in the end the sums.
template <class Shape, int WINDOW>
struct GradientShape {
    static constexpr int COLUMNS = Shape::COLUMNS / 2, OF_WARP = COLUMNS * WARP, HALF = Shape::SPAN / 2;
    static constexpr int MOST_WEIGHT_ROWS = 32, PIECES = ceil_div(WINDOW, MOST_WEIGHT_ROWS);
    static constexpr int WEIGHT_ROWS = ceil_div(WINDOW, PIECES);
    static constexpr int DELTAS = round_up(OF_WARP + WEIGHT_ROWS - 1, WARP), STAGE = DELTAS + OF_WARP, STAGES = 8;
    static constexpr int FLOATS = largest(STAGES * STAGE, (WEIGHT_ROWS + 1) * OF_WARP);
};

template <class Weights_, class Rule, class Activation>
struct TiedUpdate : StackWalk<Weights_> {
    using Walk = StackWalk<Weights_>;
    using Shape = typename Walk::Shape;
    using Gradient = GradientShape<Shape, Weights_::WINDOW>;
    using Walk::COLUMNS, Walk::SPAN, Walk::WARPS;
    using Walk::begin, Walk::block_column, Walk::column, Walk::inputs, Walk::lane, Walk::phase, Walk::phases;
    using Walk::rows, Walk::warp;
    static_assert(Shape::ROWS == 1, "rows pass one by one");
    static constexpr int WINDOW = Weights_::WINDOW, DELTAS = SPAN + Shape::MOST_HALO;
    // The weights and a layer's outputs, then in their room the gradient.
    static constexpr int THREADS = Shape::THREADS;
    static constexpr int SHARED_BYTES =
        largest(Weights_::SHARED_BYTES + 4 * SPAN, Shape::INPUT_BYTES + 4 * WARPS * Gradient::FLOATS);

    const StackArguments given;
    float* const deltas;
    const float scale;
    const float* const rates;
    float* const saved_below;  // (SPAN,): what the derivative of the layer below takes

    __device__ __forceinline__ TiedUpdate(const StackArguments& given, float* deltas, const Rows& rows, float scale,
                                          const float* rates, uint32_t sequence, float* shared)
        : Walk(rows, sequence, given.parameters, given.layers, shared),
          given(given),
          deltas(deltas),
          scale(scale),
          rates(rates),
          saved_below(shared + 2 * Shape::PITCH + Phases<Shape>::WORDS + Weights_::FLOATS) {}

    __device__ __forceinline__ static void copy_or_zero(float* to, const float* from, bool is_there) {
        if (is_there)
            copy_async<4>(to, from);
        else
            *to = 0.0f;
    }

    __device__ __forceinline__ static int column_of(int v) { return mlpgpu::column_of<Shape, true>(v); }

    // A layer's dz of the shard's row q, (DELTAS,): the block's columns and the halo.
    __device__ __forceinline__ float* deltas_of(int l, int q) const {
        return deltas + ((static_cast<int64_t>(q) * given.count + l) * gridDim.x + blockIdx.x) * DELTAS;
    }

    // The messages of row q of a layer to the block before.
    __device__ __forceinline__ uint64_t* words(int l, int q) const {
        return given.messages + ((static_cast<int64_t>(q) * given.count + l) * gridDim.x + blockIdx.x) * given.halo;
    }

    // A row of y or z, whichever the layer's derivative takes.
    __device__ __forceinline__ const float* saved(int l, int q) const {
        const float* const of_y = l + 1 == given.count ? given.y : given.kept + given.layers[l].y;
        return (given.kept_z ? given.kept_z + given.layers[l].y : of_y) + (rows.first + q) * int64_t{given.layers[l].n};
    }

    // The last layer's dz in a column of the block.
    __device__ __forceinline__ float delta(int q, int i) const {
        const int top = given.count - 1, n = given.layers[top].n, j = column_of(begin + i);
        if (j < 0 || j >= n) return 0.0f;
        const float dy = given.dy[(rows.first + q) * int64_t{n} + j];
        return given.is_derived ? dy : dy * Activation::derivative(saved(top, q)[j]);
    }

    // From dz of a layer to dz of the layer below, or to dx.
    __device__ __forceinline__ void back(int l, int q) {
        const int n = l > 0 ? given.layers[l - 1].n : given.m;
        const int expected = l > 0 && warp + 1 == WARPS && blockIdx.x + 1 < gridDim.x ? WINDOW - 1 : 0;
        if (l > 0)
            for (int i = warp * Walk::OF_WARP + lane, end = i + Walk::OF_WARP; i < end; i += WARP)
                copy_or_zero(saved_below + i, saved(l - 1, q) + column_of(begin + i), column_of(begin + i) < n);
        const auto finish = [&](const float(&sum)[1][COLUMNS]) {
            float value[COLUMNS], taken[COLUMNS];
            wait_copies();
            __syncwarp();
            load_words<COLUMNS>(saved_below + block_column, taken);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const int j = column_of(column + c);
                if (l == 0 && j < n) given.dx[(rows.first + q) * int64_t{n} + j] = sum[0][c];
                value[c] = sum[0][c] * Activation::derivative(taken[c]);  // 0 in columns that the layer lacks
            }
            phases.wait(warp - 1, phase);
            if (l == 0) return;
            Walk::store_outputs(0, value, words(l, q), blockIdx.x > 0 ? WINDOW - 1 : 0);
            store_words<COLUMNS>(deltas_of(l - 1, q) + block_column, value);
        };
        Walk::layer(given.layers[l], 1, expected, words(l, q), given.halo, finish,
                    [&](int, int i, float value) { deltas_of(l - 1, q)[i] = value; });
    }

    // Passes row q of the shard through all layers.
    __device__ __forceinline__ void pass(int q) {
        Walk::stage(1, WINDOW - 1, DELTAS, [&](int, int i) {
            return deltas_of(given.count - 1, q)[i] = delta(q, i);
        });
        for (int l = given.count - 1; l >= (given.dx ? 0 : 1); --l) back(l, q);
        ++phase;
    }

    // --- the gradient ---

    // A layer of a row; layer `count` is beyond the last.
    struct Term {
        int l, q;
        __device__ __forceinline__ void advance(const Rows& rows) {
            if (++q == rows.count) q = 0, ++l;
        }
    };

    // Loads a term's dz, from weight row `first` on, and x of the warp's columns, from column `from` of the block on,
    // to a stage; both are 0 where nothing is left.
    __device__ __forceinline__ void fetch(const Term& term, int from, int first, float* stage) const {
        if (term.l < given.count) {
            const float* const dz = deltas_of(term.l, term.q) + from + first;
            const int width = term.l > 0 ? given.layers[term.l - 1].n : given.m;
            const float* const x = (term.l > 0 ? given.kept + given.layers[term.l - 1].y : given.x) +
                                   (rows.first + term.q) * int64_t{width};
#pragma unroll
            for (int i = lane; i < Gradient::DELTAS; i += WARP) {
                const bool is_seen = first + i < Gradient::OF_WARP + WINDOW - 1;
                copy_or_zero(stage + i, dz + i, is_seen && column_of(begin + from + first + i) >= 0);
            }
#pragma unroll
            for (int i = lane; i < Gradient::OF_WARP; i += WARP) {
                const int j = column_of(begin + from + i);
                copy_or_zero(stage + Gradient::DELTAS + i, x + j, j < width);
            }
        }
        commit_copies();  // an empty group too, since the number of groups tells the stage
    }

    // Updates one parameter.
    template <class RuleOfOne>
    __device__ __forceinline__ void step(int64_t offset, float gradient) const {
        float slot[Rule::SLOTS > 0 ? Rule::SLOTS : 1];
        for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = given.slots[s * given.size + offset];
        step_parameter<RuleOfOne>(given.parameters[offset], slot, gradient, scale, rates);
        for (int s = 0; s < Rule::SLOTS; ++s) given.slots[s * given.size + offset] = slot[s];
    }

    // Updates a piece of the weights, from weight row `first` and column `from` of the block on, and with the first
    // piece the biases that belong to one output. If all outputs share a bias, the sum of dz is added to `shared`.
    __device__ __forceinline__ void update_piece(int from, int first, float* ring, double& shared) const {
        constexpr int THREAD_COLUMNS = Gradient::COLUMNS, WEIGHT_ROWS = Gradient::WEIGHT_ROWS;
        constexpr int STAGES = Gradient::STAGES;
        const StackLayer layer = given.layers[0];
        float sum[WEIGHT_ROWS + 1][THREAD_COLUMNS] = {};  // the last one for biases
        Term next = {0, 0};
        for (int i = 0; i + 1 < STAGES; ++i, next.advance(rows)) fetch(next, from, first, ring + i * Gradient::STAGE);
        for (int i = 0; i < given.count * rows.count; ++i, next.advance(rows)) {
            wait_copies<STAGES - 2>();
            __syncwarp();  // also: all lanes have read the stage that is loaded next
            fetch(next, from, first, ring + (i + STAGES - 1) % STAGES * Gradient::STAGE);
            const float* const stage = ring + i % STAGES * Gradient::STAGE;
            float x[THREAD_COLUMNS], dz[THREAD_COLUMNS + WEIGHT_ROWS - 1];
#pragma unroll
            for (int c = 0; c < THREAD_COLUMNS; ++c) x[c] = stage[Gradient::DELTAS + THREAD_COLUMNS * lane + c];
#pragma unroll
            for (int k = 0; k < THREAD_COLUMNS + WEIGHT_ROWS - 1; ++k) dz[k] = stage[THREAD_COLUMNS * lane + k];
#pragma unroll
            for (int r = 0; r < WEIGHT_ROWS; ++r)
#pragma unroll
                for (int c = 0; c < THREAD_COLUMNS; ++c) sum[r][c] = fmaf(x[c], dz[r + c], sum[r][c]);
            if (first > 0 || layer.bias < 0) continue;
#pragma unroll
            for (int c = 0; c < THREAD_COLUMNS; ++c)
                if (layer.bias_step)
                    sum[WEIGHT_ROWS][c] += dz[c];
                else
                    shared += static_cast<double>(dz[c]);
        }
        wait_copies();
        __syncwarp();
#pragma unroll
        for (int r = 0; r <= WEIGHT_ROWS; ++r)
#pragma unroll
            for (int c = 0; c < THREAD_COLUMNS; ++c)
                ring[r * Gradient::OF_WARP + THREAD_COLUMNS * lane + c] = sum[r][c];
        __syncwarp();
        for (int k = lane; k < Gradient::OF_WARP; k += WARP) {
            const int j = column_of(begin + from + k), last = min(WEIGHT_ROWS, WINDOW - first);
            for (int r = 0; r < last; ++r) {
                const int i = j - first - r;
                if (i >= 0 && i < layer.n)
                    step<Rule>(layer.weight + static_cast<int64_t>(first + r) * layer.pitch + i,
                               ring[r * Gradient::OF_WARP + k]);
            }
            if (first == 0 && layer.bias >= 0 && layer.bias_step && j < layer.n)
                step<BiasRule<Rule>>(layer.bias + j, ring[WEIGHT_ROWS * Gradient::OF_WARP + k]);
        }
        __syncwarp();
    }

    // Updates all parameters of the block, and stores each warp's part of the gradient of a shared bias.
    __device__ __forceinline__ void update_all(float* room) const {
        double shared = 0.0;
        for (int half = 0; half < 2; ++half)
            for (int piece = 0; piece < Gradient::PIECES; ++piece)
                update_piece(half * Gradient::HALF + warp * Gradient::OF_WARP, piece * Gradient::WEIGHT_ROWS,
                     room + warp * Gradient::FLOATS, shared);
        shared = warp_sum(shared);
        if (lane == 0 && given.bias_sums) given.bias_sums[blockIdx.x * WARPS + warp] = shared;
    }

    // Called by a warp when all blocks have stored their parts.
    __device__ __forceinline__ void update_shared_bias() const {
        double sum = 0.0;
        for (int i = lane; i < static_cast<int>(gridDim.x) * WARPS; i += WARP) sum += given.bias_sums[i];
        sum = warp_sum(sum);
        if (lane == 0) step<BiasRule<Rule>>(given.layers[0].bias, static_cast<float>(sum));
    }
};

// One step of a stack's weights and biases along their gradients, and dx; a null dx is skipped. Arguments are those of
// local_stack_update; dz of all layers is written to `deltas`, (rows, count, blocks, SPAN + MOST_HALO), and `messages`
// is (rows, count, blocks, halo).
template <class Weights, class Rule, class Activation>
__device__ __forceinline__ void local_stack_tied_update(
    const Step* step, int shard, int shards, const float* x, const StackLayer* layers, int count, int m, int halo,
    const float* kept, const float* kept_z, const float* y, const float* dy, int is_derived, const double* totals,
    float* parameters, float* slots, int64_t size, float* dx, double* bias_sums, uint64_t* messages, unsigned* launches,
    float* deltas) {
    SHARED(float, shared);
    const uint32_t sequence = launches[1] + 1;
    TiedUpdate<Weights, Rule, Activation> update(
        {x, layers, count, m, halo, kept, kept_z, y, dy, is_derived, parameters, slots, size, dx, bias_sums, messages},
        deltas, shard_rows(step, shard, shards), static_cast<float>(inverse_weight(totals)),
        schedule + step->run * RATES_PER_STEP, sequence, shared);
    // dz is 0 beyond the last block's columns, where no message comes.
    for (int i = threadIdx.x; i < 2 * Weights::Shape::PITCH; i += blockDim.x) shared[i] = 0.0f;
    if (threadIdx.x == 0) {
        update.phases.make();
        barrier_publish();
    }
    __syncthreads();
    for (int q = 0; q < update.rows.count; ++q) update.pass(q);
    __syncthreads();
    update.update_all(shared + 2 * Weights::Shape::PITCH + Phases<typename Weights::Shape>::WORDS);
    __syncthreads();
    const Arrival arrival = arrive(launches);
    if (!was_last(arrival, shared)) return;
    if (bias_sums && threadIdx.x < WARP) update.update_shared_bias();
    if (threadIdx.x == 0) launches[1] = sequence;
}

}  // namespace mlpgpu
