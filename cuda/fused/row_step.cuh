// Blocks of rows: all of a training step but the gradients in one launch, for networks whose weights one multiprocessor
// holds. A block takes ROWS rows of the batch from the data set through all layers and the loss to the deltas.
//
// A row needs no other row until the gradients are summed. So a block that has all weights in shared memory waits for no
// other block, and what passes from layer to layer stays there too. It stores what the gradients' products read: inputs of
// layers, and deltas.
//
// Each z and each element of dx is one chain of multiply-adds over ascending k, as those of gemm/simt.cuh are: the bits are
// the same. `Level` l is what layer l makes, level 0 the inputs.
#pragma once

#include "common/async_copy.cuh"
#include "common/batch_total.cuh"
#include "common/dependent_launch.cuh"
#include "common/vectors.cuh"
#include "math/dropout.cuh"
#include "math/losses.cuh"
#include "math/teams.cuh"

namespace mlpgpu {

// A level as the host describes it.  Offsets are into the parameters, and -1 where there is none.
struct RowStepLevel {
    int n;       // columns; those of the level before are the layer's inputs
    int weight;
    int bias;
    int activation;
    int saves_z;  // whether f' takes z instead of y
    int dropout;  // the number of the dropout that follows, or -1
    uint32_t least;  // half word that it keeps
    float keep;
};

struct RowStepShape {
    static constexpr int ROWS = 8, THREADS = 256, MOST_LEVELS = 32;
    static constexpr int LEVEL_WORDS = sizeof(RowStepLevel) / 4;
    // A thread takes as many rows of a column as leave this many threads work: each weight that it reads from shared memory
    // then serves more multiply-adds. Four warps are one for each scheduler.
    static constexpr int LEAST_THREADS = 128;
    static_assert(ROWS == THREADS / WARP, "a warp takes a row of the inputs and of the loss");
};

template <int BYTES>
struct RowStep : RowStepShape {
    static constexpr int SHARED_BYTES = BYTES;
};

// Floats from a row of a matrix in shared memory to the next one: vectors of four, an odd number of them, so that eight
// rows' vectors lie in different banks.
__device__ __forceinline__ int row_step_pitch(int n) { return 4 * (ceil_div(n, 4) | 1); }

// Starts to copy a weight (k, n), and its bias as one more row.
__device__ __forceinline__ void stage_weight(const float* parameters, const RowStepLevel& level, int k, float* staged) {
    const int n = level.n, pitch = row_step_pitch(n), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool vectored = is_vectored(parameters + level.weight, n);
    for (int i = warp; i < k; i += RowStepShape::THREADS / WARP) {
        const float* const from = parameters + level.weight + static_cast<int64_t>(i) * n;
        float* const to = staged + i * pitch;
        if (vectored)
            for (int j = 4 * lane; j < n; j += 4 * WARP) copy_async<16>(to + j, from + j);
        else
            for (int j = lane; j < n; j += WARP) copy_async<4>(to + j, from + j);
    }
    if (level.bias < 0) return;
    for (int j = threadIdx.x; j < n; j += RowStepShape::THREADS)
        copy_async<4>(staged + k * pitch + j, parameters + level.bias + j);
}

// A staged weight, or its transpose, in products over its rows, or columns.
template <bool TRANSPOSED>
struct StagedWeight {
    const float* data;
    int pitch;

    __device__ __forceinline__ float at(int i, int column) const {
        return TRANSPOSED ? data[column * pitch + i] : data[i * pitch + column];
    }
    // Elements i to i + 3 of a column; i is a multiple of 4.
    __device__ __forceinline__ void four(int i, int column, float (&w)[4]) const {
        if (TRANSPOSED) {
            load_four(data + column * pitch + i, w);
        } else {
#pragma unroll
            for (int q = 0; q < 4; ++q) w[q] = data[(i + q) * pitch + column];
        }
    }
};

// Calls finish(row, column, Σ over i < count of x[row, i] · w[i, column]) for each row of the block and each column, x
// (ROWS, pitch) being in shared memory. A thread takes R rows of a column at once.
template <int R, class Weight, class Finish>
__device__ __forceinline__ void multiply_rows(const float* x, int pitch, int count, const Weight& weight, int columns,
                                              const Finish& finish) {
    using T = RowStepShape;
    for (int item = threadIdx.x; item < T::ROWS / R * columns; item += T::THREADS) {
        const int row = item / columns * R, column = item % columns;
        const float* const rows = x + row * pitch;
        float sums[R] = {};
        int i = 0;
#pragma unroll 2
        for (; i + 4 <= count; i += 4) {
            float w[4];
            weight.four(i, column, w);
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float of_row[4];
                load_four(rows + r * pitch + i, of_row);
#pragma unroll
                for (int q = 0; q < 4; ++q) sums[r] = fmaf(of_row[q], w[q], sums[r]);
            }
        }
        for (; i < count; ++i)
#pragma unroll
            for (int r = 0; r < R; ++r) sums[r] = fmaf(rows[r * pitch + i], weight.at(i, column), sums[r]);
#pragma unroll
        for (int r = 0; r < R; ++r) finish(row + r, column, sums[r]);
    }
}

template <class Weight, class Finish>
__device__ __forceinline__ void multiply(const float* x, int pitch, int count, const Weight& weight, int columns,
                                         const Finish& finish) {
    constexpr int LEAST = RowStepShape::LEAST_THREADS;
    if (columns >= LEAST)
        multiply_rows<8>(x, pitch, count, weight, columns, finish);
    else if (2 * columns >= LEAST)
        multiply_rows<4>(x, pitch, count, weight, columns, finish);
    else if (4 * columns >= LEAST)
        multiply_rows<2>(x, pitch, count, weight, columns, finish);
    else
        multiply_rows<1>(x, pitch, count, weight, columns, finish);
}

// Finishes a level's rows h (ROWS, pitch), which hold x·W of layers, or the inputs: adds the bias, applies the activation,
// whose slopes it leaves in `slopes` (ROWS, pitch), and the dropout, which slopes take as well. Both pointers may be null.
// Unless `stored` (rows, n) is null it receives the level. Neighbours in the batch share a block of half words.
__device__ __forceinline__ void finish_level(const RowStepLevel& level, const float* bias, float* h, float* slopes,
                                             float* stored, int rows, int64_t first, uint64_t seed, int64_t step) {
    const int n = level.n, pitch = row_step_pitch(n), size = rows * n;
    for (int start = 4 * threadIdx.x; start < size; start += 4 * RowStepShape::THREADS) {
        int places[4];
        float values[4], of_slope[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int element = min(start + q, size - 1), row = element / n, column = element - row * n;
            places[q] = row * pitch + column;
            values[q] = h[places[q]] + (bias ? bias[column] : 0.0f);
            of_slope[q] = values[q];
        }
        Activations::forwards(level.activation, values);
        if (slopes) {
#pragma unroll
            for (int q = 0; q < 4; ++q) of_slope[q] = level.saves_z ? of_slope[q] : values[q];
            Activations::derivatives(level.activation, of_slope);
        }
        if (level.dropout >= 0) {
            const int64_t element = first * n + start;  // a multiple of four, since `first` is one of ROWS
            const DropoutWords drawn = dropout_words(seed, step, level.dropout, element / DROPOUT_BLOCK);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                values[q] = keep_or_drop(drawn[element + q], level.least, level.keep, values[q]);
                of_slope[q] = keep_or_drop(drawn[element + q], level.least, level.keep, of_slope[q]);
            }
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            if (start + q >= size) break;
            h[places[q]] = values[q];
            if (slopes) slopes[places[q]] = of_slope[q];
            if (stored) stored[first * n + start + q] = values[q];
        }
    }
}

// The rows of the data set that the order names, as floats or as bytes times `scale`, less `mean` over `deviation` (n,)
// unless they are null, in h (ROWS, pitch); 0 in rows that there are not.
__device__ __forceinline__ void fetch_inputs(const int* order, const float* data, const unsigned char* bytes, float scale,
                                             const float* mean, const float* deviation, float* h, int rows, int n) {
    const int row = threadIdx.x / WARP, pitch = row_step_pitch(n);
    const int64_t from = row < rows ? order[row] : 0;
    for (int j = threadIdx.x % WARP; j < n; j += WARP) {
        float value = 0.0f;
        if (row < rows) {
            value = bytes ? __fmul_rn(scale, static_cast<float>(bytes[from * n + j])) : data[from * n + j];
            if (deviation) value = (value - mean[j]) / deviation[j];
        }
        h[row * pitch + j] = value;
    }
}

// Stores deltas times their slopes, which lie in shared memory where the deltas are to lie.
struct SlopedDelta {
    float* of_row;
    float* stored;
    int n;
    __device__ __forceinline__ void operator()(int j, float d) const { stored[j] = of_row[j] = d * of_row[j]; }
    template <int STRIDE, int PAIRS>
    __device__ __forceinline__ void pairs(int j, const Pair (&of)[PAIRS]) const {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (j + i * STRIDE + h < n) (*this)(j + i * STRIDE + h, of[i].of[h]);
    }
};

// Runs a batch in one shard. There are `layer_count` layers, so one level more is described; the widest has `widest`
// columns. The rows of the data set are `data` or `bytes`; the other one is null. Stores x (rows, columns of level 0),
// unless it is null; y of all levels between the first and the last; dz of all layers from layer `lowest` on, counted
// from 1; and the batch's loss as elementwise/loss.cuh does. y and dz have one level after another, each (capacity, n).
// Grid: one block for every ROWS rows of the capacity.
template <class Loss, class Target, class Source>
__device__ __forceinline__ void row_step(const Step* step, int shard, int shards, const int* order, const float* data,
                                           const unsigned char* bytes, float scale, const float* mean,
                                           const float* deviation, const float* parameters,
                                           const RowStepLevel* described, int layer_count, int lowest, int widest,
                                           Source targets, const float* weights, const float* target_mean,
                                           const float* target_scale, uint64_t seed, float* x, float* y,
                                           float* dz, double* sums, unsigned* arrived, double* totals, double* losses,
                                           int capacity) {
    using T = RowStepShape;
    SHARED(float, shared);
    RowStepLevel* const levels = reinterpret_cast<RowStepLevel*>(shared);
    const int room = T::ROWS * row_step_pitch(widest);  // of a level
    float* const odd = shared + T::MOST_LEVELS * T::LEVEL_WORDS;  // levels, in turns
    float* const even = odd + room;
    for (int i = threadIdx.x; i < (layer_count + 1) * T::LEVEL_WORDS; i += T::THREADS)
        reinterpret_cast<int*>(levels)[i] = reinterpret_cast<const int*>(described)[i];
    const Rows shard_of = shard_rows(step, shard, shards);
    const int row0 = blockIdx.x * T::ROWS, rows = min(T::ROWS, shard_of.count - row0);
    const int64_t first = row0;
    const int row = threadIdx.x / WARP;  // of the loss
    double value = 0.0, weight = 0.0;
    __syncthreads();
    const int* const order_of_block = order + shard_of.order + first;
    if (rows > 0) fetch_inputs(order_of_block, data, bytes, scale, mean, deviation, even, rows, levels[0].n);
    pdl_wait_and_trigger();
    if (rows > 0) {
        // The first layer is computed while the weights of the others are still in flight.
        float* const first_deltas = even + room;
        float* first_weight = first_deltas;
        for (int l = 1; l <= layer_count; ++l) first_weight += T::ROWS * row_step_pitch(levels[l].n);
        float* of_layer = first_weight;
        for (int l = 1; l <= layer_count; ++l) {
            stage_weight(parameters, levels[l], levels[l - 1].n, of_layer);
            if (l == 1) commit_copies();
            of_layer += (levels[l - 1].n + 1) * row_step_pitch(levels[l].n);
        }
        commit_copies();
        __syncthreads();
        if (x || levels[0].dropout >= 0) finish_level(levels[0], nullptr, even, nullptr, x, rows, first, seed, step->number);

        // Forward. `unit` is the number of a level's first column among those of all layers.
        float* deltas = first_deltas;  // slopes before
        of_layer = first_weight;
        int unit = 0;
        wait_copies<1>();
        for (int l = 1; l <= layer_count; ++l) {
            const RowStepLevel level = levels[l];
            const int k = levels[l - 1].n, pitch = row_step_pitch(level.n);
            const float* const from = l % 2 ? even : odd;
            float* const to = l % 2 ? odd : even;
            __syncthreads();
            multiply(from, row_step_pitch(k), k, StagedWeight<false>{of_layer, pitch}, level.n,
                     [=](int r, int j, float sum) { to[r * pitch + j] = sum; });
            __syncthreads();
            float* const stored = l < layer_count ? y + static_cast<int64_t>(capacity) * unit : nullptr;
            finish_level(level, level.bias >= 0 ? of_layer + k * pitch : nullptr, to, deltas, stored, rows, first, seed, step->number);
            if (l == 1) wait_copies<0>();
            if (l < layer_count) deltas += T::ROWS * pitch, of_layer += (k + 1) * pitch, unit += level.n;
        }
        __syncthreads();

        const int last = levels[layer_count].n, last_pitch = row_step_pitch(last);
        if (row < rows) {
            const int64_t from = order_of_block[row];
            const Target target = {targets, from, last, target_mean, target_scale};
            const float row_weight = weights ? weights[from] : 1.0f;
            const float* const logits = (layer_count % 2 ? odd : even) + row * last_pitch;
            float* const of_row = deltas + row * last_pitch;
            float* const stored = dz + static_cast<int64_t>(capacity) * unit + (first + row) * last;
            const float v = weighted_row<Loss, WarpTeam, 1, 4>(logits, last, target, row_weight, SlopedDelta{of_row, stored, last});
            if (threadIdx.x % WARP == 0) value = v, weight = row_weight;
        }
        __syncthreads();

        // Backward: of each layer the deltas of its inputs. Rows that there are not hold anything, and store nothing.
        for (int l = layer_count; l > lowest; --l) {
            const int n = levels[l].n, k = levels[l - 1].n, pitch = row_step_pitch(n), below = row_step_pitch(k);
            const float* const dy = deltas;
            deltas -= T::ROWS * below, unit -= k;
            float* const of_inputs = deltas;
            float* const stored = dz + static_cast<int64_t>(capacity) * unit + first * k;
            multiply(dy, pitch, n, StagedWeight<true>{of_layer, pitch}, k, [=](int r, int i, float sum) {
                if (r >= rows) return;
                const float delta = sum * of_inputs[r * below + i];
                of_inputs[r * below + i] = stored[r * k + i] = delta;
            });
            of_layer -= (levels[l - 2].n + 1) * below;
            __syncthreads();
        }
    }
    add_threads_up(step, value, weight, sums, arrived, totals, losses);
}

}  // namespace mlpgpu
