// The way back through a stack all of whose layers have the same weights, in one kernel, which also moves them.
//
// dx_j = Σ_r w[r, j - r] dz_{j - r} looks to the left, where y_i = Σ_r w[r, i] x_{i + r} looks to the right.  So columns
// are numbered as in a mirror: then dx_v = Σ_r w'[r, v] dz_{v + r}, and the way back through the layers is that of
// local/stack.cuh, with weights that never leave the chip.  A block leaves each layer's dz in memory, halo and all.
//
// With all layers behind it, it adds up its weights' gradient, dw'[r, v] = Σ x_v dz_{v + r} over layers and rows.  It
// waits for nobody there: x is from the way forward, dz its own.  The weights that it moves are those that it held, and
// no other block reads them.
#pragma once

#include "local/stack.cuh"
#include "elementwise/update.cuh"

namespace mlpgpu {

// How a gradient is dealt out, whose sums stay in registers: a thread has half of the columns that it has of a layer,
// twice, and PIECES times LINES lines of them.  A warp has FLOATS in shared memory, behind the barriers, which stay what
// they are: what it adds comes there, to a ring of stages, and in the end the sums.
template <class Shape, int WINDOW>
struct GradientShape {
    static constexpr int COLUMNS = Shape::COLUMNS / 2, OF_WARP = COLUMNS * WARP, HALF = Shape::SPAN / 2;
    static constexpr int MOST_LINES = 32, PIECES = ceil_div(WINDOW, MOST_LINES), LINES = ceil_div(WINDOW, PIECES);
    static constexpr int DELTAS = round_up(OF_WARP + LINES - 1, WARP), STAGE = DELTAS + OF_WARP, STAGES = 8;
    static constexpr int FLOATS = largest(STAGES * STAGE, (LINES + 1) * OF_WARP);
};

template <class Weights_, class Rule, class Activation>
struct TiedUpdate : StackWalk<Weights_> {
    using Walk = StackWalk<Weights_>;
    using Shape = typename Walk::Shape;
    using Gradient = GradientShape<Shape, Weights_::WINDOW>;
    using Walk::COLUMNS, Walk::SPAN, Walk::WARPS;
    using Walk::begin, Walk::column, Walk::inputs, Walk::lane, Walk::own, Walk::phase, Walk::phases, Walk::rows;
    using Walk::warp;
    static_assert(Shape::ROWS == 1, "rows pass one by one");
    static constexpr int WINDOW = Weights_::WINDOW, DELTAS = SPAN + Shape::MOST_HALO;

    const StackArguments given;
    float* const deltas;
    const float scale;
    const float* const rates;
    float* const at_hand;  // (SPAN,): what the layer below takes for its derivative

    __device__ __forceinline__ TiedUpdate(const StackArguments& given, float* deltas, const Rows& rows, float scale,
                                          const float* rates, uint32_t tag, float* shared)
        : Walk(rows, tag, given.parameters, given.layers, shared),
          given(given),
          deltas(deltas),
          scale(scale),
          rates(rates),
          at_hand(shared + 2 * Shape::PITCH + Phases<Shape>::WORDS + Weights_::FLOATS) {}

    __device__ __forceinline__ static void copy_or_zero(float* to, const float* from, bool is_there) {
        if (is_there)
            copy_one(to, from);
        else
            *to = 0.0f;
    }

    __device__ __forceinline__ static int column_of(int v) { return mlpgpu::column_of<Shape, true>(v); }

    // A layer's dz of the shard's row q: (DELTAS,) for the block's columns and what is beyond.
    __device__ __forceinline__ float* deltas_of(int l, int q) const {
        return deltas + ((static_cast<int64_t>(q) * given.count + l) * gridDim.x + blockIdx.x) * DELTAS;
    }

    // Of row q the words of a layer between a block and the one before.
    __device__ __forceinline__ uint64_t* words(int l, int q) const {
        return given.mail + ((static_cast<int64_t>(q) * given.count + l) * gridDim.x + blockIdx.x) * given.halo;
    }

    // A row of what a layer's derivative takes, y or z.
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

    // From dz of a layer to that of the layer below, or to dx.
    __device__ __forceinline__ void back(int l, int q) {
        const int n = l > 0 ? given.layers[l - 1].n : given.m;
        const int due = l > 0 && warp + 1 == WARPS && blockIdx.x + 1 < gridDim.x ? WINDOW - 1 : 0;
        if (l > 0)
            for (int i = warp * Walk::OF_WARP + lane, end = i + Walk::OF_WARP; i < end; i += WARP)
                copy_or_zero(at_hand + i, saved(l - 1, q) + column_of(begin + i), column_of(begin + i) < n);
        const auto finish = [&](const float(&sum)[1][COLUMNS]) {
            float value[COLUMNS], taken[COLUMNS];
            wait_for_copies();
            __syncwarp();
            load_words<COLUMNS>(at_hand + own, taken);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const int j = column_of(column + c);
                if (l == 0 && j < n) given.dx[(rows.first + q) * int64_t{n} + j] = sum[0][c];
                value[c] = sum[0][c] * Activation::derivative(taken[c]);  // of columns that the layer lacks 0
            }
            phases.wait(warp - 1, phase);
            if (l == 0) return;
            Walk::pass_on(0, value, words(l, q), blockIdx.x > 0 ? WINDOW - 1 : 0);
            store_words<COLUMNS>(deltas_of(l - 1, q) + own, value);
        };
        Walk::layer(given.layers[l], 1, due, words(l, q), given.halo, finish,
                    [&](int, int i, float value) { deltas_of(l - 1, q)[i] = value; });
    }

    // Row q of the shard through all layers.
    __device__ __forceinline__ void pass(int q) {
        Walk::stage(1, WINDOW - 1, DELTAS, [&](int, int i) {
            return deltas_of(given.count - 1, q)[i] = delta(q, i);
        });
        for (int l = given.count - 1; l >= (given.dx ? 0 : 1); --l) back(l, q);
        ++phase;
    }

    // --- the gradient ---

    // A layer of a row; layer `count` is none.
    struct Term {
        int l, q;
        __device__ __forceinline__ void advance(const Rows& rows) {
            if (++q == rows.count) q = 0, ++l;
        }
    };

    // Brings a term's dz, from line `first` on, and x of the warp's columns, from `from` of the block on, to a stage;
    // 0 where there is none.
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
        end_copies();  // also of nothing: the number of groups tells the stage
    }

    // The step of a parameter.
    __device__ __forceinline__ void step(int64_t at, float gradient) const {
        float slot[Rule::SLOTS > 0 ? Rule::SLOTS : 1];
        for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = given.slots[s * given.size + at];
        step_parameter<Rule>(given.parameters[at], slot, gradient, scale, rates);
        for (int s = 0; s < Rule::SLOTS; ++s) given.slots[s * given.size + at] = slot[s];
    }

    // The steps of a piece of the weights, from line `first` on, and from column `from` of the block on; with the first
    // lines those of the outputs' own biases.  Of a bias that they share the sum of dz is added to `shared`.
    __device__ __forceinline__ void move(int from, int first, float* ring, double& shared) const {
        constexpr int MINE = Gradient::COLUMNS, LINES = Gradient::LINES, STAGES = Gradient::STAGES;
        const StackLayer layer = given.layers[0];
        float sum[LINES + 1][MINE] = {};  // the last one of a bias
        Term next = {0, 0};
        for (int i = 0; i + 1 < STAGES; ++i, next.advance(rows)) fetch(next, from, first, ring + i * Gradient::STAGE);
        for (int i = 0; i < given.count * rows.count; ++i, next.advance(rows)) {
            wait_for_copies<STAGES - 2>();
            __syncwarp();  // and all lanes are done with the stage that is brought next
            fetch(next, from, first, ring + (i + STAGES - 1) % STAGES * Gradient::STAGE);
            const float* const stage = ring + i % STAGES * Gradient::STAGE;
            float x[MINE], dz[MINE + LINES - 1];
#pragma unroll
            for (int c = 0; c < MINE; ++c) x[c] = stage[Gradient::DELTAS + MINE * lane + c];
#pragma unroll
            for (int k = 0; k < MINE + LINES - 1; ++k) dz[k] = stage[MINE * lane + k];
#pragma unroll
            for (int r = 0; r < LINES; ++r)
#pragma unroll
                for (int c = 0; c < MINE; ++c) sum[r][c] = fmaf(x[c], dz[r + c], sum[r][c]);
            if (first > 0 || layer.bias < 0) continue;
#pragma unroll
            for (int c = 0; c < MINE; ++c)
                if (layer.bias_step)
                    sum[LINES][c] += dz[c];
                else
                    shared += static_cast<double>(dz[c]);
        }
        wait_for_copies();
        __syncwarp();
#pragma unroll
        for (int r = 0; r <= LINES; ++r)
#pragma unroll
            for (int c = 0; c < MINE; ++c) ring[r * Gradient::OF_WARP + MINE * lane + c] = sum[r][c];
        __syncwarp();
        for (int k = lane; k < Gradient::OF_WARP; k += WARP) {
            const int j = column_of(begin + from + k), last = min(LINES, WINDOW - first);
            for (int r = 0; r < last; ++r) {
                const int i = j - first - r;
                if (i >= 0 && i < layer.n)
                    step(layer.weight + static_cast<int64_t>(first + r) * layer.pitch + i,
                         ring[r * Gradient::OF_WARP + k]);
            }
            if (first == 0 && layer.bias >= 0 && layer.bias_step && j < layer.n)
                step(layer.bias + j, ring[LINES * Gradient::OF_WARP + k]);
        }
        __syncwarp();
    }

    // All steps of the block; of a bias that all outputs share it leaves each warp's part of the gradient.
    __device__ __forceinline__ void move_all(float* room) const {
        double shared = 0.0;
        for (int half = 0; half < 2; ++half)
            for (int piece = 0; piece < Gradient::PIECES; ++piece)
                move(half * Gradient::HALF + warp * Gradient::OF_WARP, piece * Gradient::LINES,
                     room + warp * Gradient::FLOATS, shared);
        shared = warp_sum(shared);
        if (lane == 0 && given.bias_sums) given.bias_sums[blockIdx.x * WARPS + warp] = shared;
    }

    // By a warp, when all blocks have left their parts.
    __device__ __forceinline__ void move_shared_bias() const {
        double sum = 0.0;
        for (int i = lane; i < static_cast<int>(gridDim.x) * WARPS; i += WARP) sum += given.bias_sums[i];
        sum = warp_sum(sum);
        if (lane == 0) step(given.layers[0].bias, static_cast<float>(sum));
    }
};

// One step of a stack's weights and biases along their gradients, and dx, unless that is null.  Arguments are those of
// local_stack_update; dz of all layers go to `deltas`, (rows, count, blocks, SPAN + MOST_HALO), and mail is (rows,
// count, blocks, halo).
template <class Weights, class Rule, class Activation>
__device__ __forceinline__ void local_stack_tied_update(
    const Step* step, int shard, int shards, const float* x, const StackLayer* layers, int count, int m, int halo,
    const float* kept, const float* kept_z, const float* y, const float* dy, int is_derived, const double* totals,
    float* parameters, float* slots, int64_t size, float* dx, double* bias_sums, uint64_t* mail, unsigned* launches,
    float* deltas) {
    SHARED(float, shared);
    const uint32_t tag = launches[1] + 1;
    TiedUpdate<Weights, Rule, Activation> update(
        {x, layers, count, m, halo, kept, kept_z, y, dy, is_derived, parameters, slots, size, dx, bias_sums, mail},
        deltas, shard_rows(step, shard, shards), static_cast<float>(inverse_weight(totals)), schedule + step->run * COLUMNS,
        tag, shared);
    // Beyond the last block's columns dz is 0, and nobody sends it.
    for (int i = threadIdx.x; i < 2 * Weights::Shape::PITCH; i += blockDim.x) shared[i] = 0.0f;
    if (threadIdx.x == 0) {
        update.phases.make();
        barrier_publish();
    }
    __syncthreads();
    for (int q = 0; q < update.rows.count; ++q) update.pass(q);
    __syncthreads();
    update.move_all(shared + 2 * Weights::Shape::PITCH + Phases<typename Weights::Shape>::WORDS);
    __syncthreads();
    const Arrival arrival = arrive(launches);
    if (!was_last(arrival, shared)) return;
    if (bias_sums && threadIdx.x < WARP) update.move_shared_bias();
    if (threadIdx.x == 0) launches[1] = tag;
}

}  // namespace mlpgpu
