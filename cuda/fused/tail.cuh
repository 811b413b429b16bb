// The tail: the layers after a tall first one in one kernel, from partial sums of its z to the deltas of all layers. A
// block takes one row of the batch.
//
// Where ranks have parts of the first layer, the partial sums are those of this card's part, and blocks exchange their rows'
// sums with the other cards (part_sums.cuh); or they are the sums of all parts, which have been exchanged before.
//
// For one row these layers are short (some ten thousand multiply-adds); as one launch per product they would wait for each
// other longer than they compute. Only the gradients need all rows, and other launches make them.
#pragma once

#include "common/async_copy.cuh"
#include "common/batch_total.cuh"
#include "fused/part_sums.cuh"
#include "math/losses.cuh"
#include "math/teams.cuh"

namespace mlpgpu {

// A layer as the host describes it.  Offsets are into the parameters, and -1 where there is none.
struct TailLayer {
    int n;       // columns; its inputs are those of the layer before
    int weight;  // none for the first
    int bias;
    int activation;
    int saves_z;  // whether f' takes z instead of y
};

struct Tail {
    static constexpr int THREADS = 1024, MOST_WEIGHTS = 10240;
    static constexpr int MOST_UNITS = 1024;  // of all layers together
    static constexpr int MOST_LAYERS = 32;
    static constexpr int RUNS = 8;             // of partial sums of a part, as PartSum::WARPS of dense/split_k.cuh
    static constexpr int MOST_PART_COLUMNS = THREADS / RUNS;  // of a first layer whose parts are exchanged
    static constexpr int LAYER_WORDS = sizeof(TailLayer) / 4;
    static constexpr int SHARED_BYTES = 4 * (THREADS + MOST_WEIGHTS + 3 * MOST_UNITS + MOST_LAYERS * LAYER_WORDS);
};

// Calls finish(j, Σ over i < count of a·b) in thread j for each j < n, where `term(i, j)` is (a, b). The block's warps
// divide columns and terms among themselves, a thread loads BATCH of its terms at once, and sums are added in order.
template <int BATCH, class Term, class Finish>
__device__ __forceinline__ void sum_terms(int n, int count, float* partial, const Term& term, const Finish& finish) {
    const int side = ceil_div(n, WARP), warp = threadIdx.x / WARP;  // warps that share a term
    const int slices = Tail::THREADS / WARP / side, slice = warp / side;
    const int j = (warp - slice * side) * WARP + threadIdx.x % WARP;
    const int terms_of_thread = slice < slices && j < n ? count : 0;
    float sum = 0.0f;
    for (int first = slice; first < terms_of_thread; first += BATCH * slices) {
        float2 terms[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = first + b * slices;
            terms[b] = i < terms_of_thread ? term(i, j) : make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) sum = fmaf(terms[b].x, terms[b].y, sum);
    }
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n) {
#pragma unroll 8
        for (int s = 1; s < slices; ++s) sum += partial[s * side * WARP + j];
        finish(j, sum);
    }
    __syncthreads();
}

// Calls finish(j, Σ over i < count of partials[i · pitch + j]) in thread j for each j < n, at most MOST_PART_COLUMNS. Sums
// are added as dense_forward_sum_partials adds them: in runs, one after another, then run after run.
template <class Finish>
__device__ __forceinline__ void sum_runs(int n, int count, const float* partials, int pitch, float* partial,
                                         const Finish& finish) {
    constexpr int BATCH = 16;  // loads that a thread has in flight
    const int side = ceil_div(n, WARP), warp = threadIdx.x / WARP, which = warp / side;
    const int j = (warp - which * side) * WARP + threadIdx.x % WARP, run = ceil_div(count, Tail::RUNS);
    const int end = which < Tail::RUNS && j < n ? min(count, (which + 1) * run) : 0;
    float sum = 0.0f;
    for (int first = which * run; first < end; first += BATCH) {
        float terms[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) terms[b] = first + b < end ? partials[(first + b) * pitch + j] : 0.0f;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) sum += terms[b];
    }
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n) {
#pragma unroll
        for (int r = 1; r < Tail::RUNS; ++r) sum += partial[r * side * WARP + j];
        finish(j, sum);
    }
    __syncthreads();
}

// partials (count, capacity, n) are partial sums of the first layer's z; `layer_count` counts all layers. Stores y and dz
// of all layers, one layer after another, each (capacity, n), and the batch's loss as elementwise/loss.cuh does. `exchange`
// is null, or the table of PartSums by which cards exchange sums.
// Grid: one block for each row of the capacity.
template <class Loss, class Target, class Source>
__device__ __forceinline__ void tail(const Step* step, int shard, int shards, const int* order, const float* partials,
                                     const float* parameters, const TailLayer* described, int layer_count,
                                     Source targets,
                                     const float* weights, const float* mean, const float* scale, float* y, float* dz,
                                     double* sums, unsigned* arrived, double* totals, double* losses, int count,
                                     int capacity, int n, const int64_t* exchange, const unsigned* aborted,
                                     unsigned char* memory) {
    SHARED(float, partial);
    float* const staged = partial + Tail::THREADS;        // weights, layer after layer
    float* const outputs = staged + Tail::MOST_WEIGHTS;   // y of all layers
    float* const slopes = outputs + Tail::MOST_UNITS;     // f' of all layers
    float* const deltas = slopes + Tail::MOST_UNITS;      // dz of all layers
    TailLayer* const layers = reinterpret_cast<TailLayer*>(deltas + Tail::MOST_UNITS);
    for (int i = threadIdx.x; i < layer_count * Tail::LAYER_WORDS; i += Tail::THREADS)
        reinterpret_cast<int*>(layers)[i] = reinterpret_cast<const int*>(described)[i];
    const Rows rows = shard_rows(step, shard, shards);
    const int row = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    double value = 0.0, weight = 0.0;
    __syncthreads();
    if (row < rows.count) {
        const int64_t batch_row = rows.first + row, from = order[rows.order + batch_row];
        const float row_weight = weights ? weights[from] : 1.0f;
        for (int l = 1, to = 0, inputs = n; l < layer_count; ++l) {
            const TailLayer layer = layers[l];
            const int size = inputs * layer.n;
            for (int i = threadIdx.x; i < size; i += Tail::THREADS) copy_async<4>(staged + to + i, parameters + layer.weight + i);
            to += size, inputs = layer.n;
        }

        // Forward. `unit` is the number of a layer's first output among those of all layers.
        const float* of_layer = staged;
        for (int l = 0, unit = 0; l < layer_count; unit += layers[l++].n) {
            const TailLayer layer = layers[l];
            const int columns = layer.n, inputs = l > 0 ? layers[l - 1].n : 0;
            // The thread that finishes a column reads its bias before it waits for the sum.
            const bool is_biased = layer.bias >= 0 && static_cast<int>(threadIdx.x) < columns;
            const float bias = is_biased ? parameters[layer.bias + threadIdx.x] : 0.0f;
            const auto finish = [&](int j, float sum) {
                const float z = sum + bias;
                float result[1] = {z};
                Activations::forwards(layer.activation, result);
                float slope[1] = {layer.saves_z ? z : result[0]};
                Activations::derivatives(layer.activation, slope);
                outputs[unit + j] = result[0], slopes[unit + j] = slope[0];
                y[static_cast<int64_t>(capacity) * unit + batch_row * columns + j] = result[0];
            };
            if (l == 0) {
                const float* const row_partials = partials + batch_row * n;
                const int pitch = capacity * n;
                if (exchange) {
                    const PartSums parts = {exchange, aborted, memory, pitch};
                    unsigned* const sent = parts.sent(row);
                    const uint32_t sequence = *sent + 1;
                    sum_runs(n, count, row_partials, pitch, partial,
                             [&](int j, float sum) { finish(j, parts.all(sum, batch_row * n + j, sequence)); });
                    if (threadIdx.x == 0) *sent = sequence;
                } else {
                    // Thirteen terms at once are as many as registers hold for 128 partials and 90 columns.
                    sum_terms<13>(n, count, partial,
                                  [=](int i, int j) { return make_float2(row_partials[i * pitch + j], 1.0f); }, finish);
                }
                wait_copies();
                __syncthreads();
            } else {
                const float* const x = outputs + unit - inputs;
                sum_terms<8>(columns, inputs, partial,
                             [=](int i, int j) { return make_float2(x[i], of_layer[i * columns + j]); }, finish);
                of_layer += inputs * columns;
            }
        }

        const int last = layers[layer_count - 1].n;
        int unit = 0;
        for (int l = 0; l + 1 < layer_count; ++l) unit += layers[l].n;
        if (threadIdx.x < WARP) {
            const Target target = {targets, from, last, mean, scale};
            const float v = weighted_row<Loss>(outputs + unit, last, target, row_weight,
                                               [=](int j, float d) { deltas[unit + j] = d * slopes[unit + j]; });
            if (threadIdx.x == 0) value = v, weight = row_weight;
        }
        __syncthreads();

        // Backward: dz of a layer and of the one before it, of which a warp takes every 32nd unit.
        for (int l = layer_count - 1; l >= 0; --l) {
            const int columns = layers[l].n, inputs = l > 0 ? layers[l - 1].n : 0;
            for (int j = threadIdx.x; j < columns; j += Tail::THREADS)
                dz[static_cast<int64_t>(capacity) * unit + batch_row * columns + j] = deltas[unit + j];
            if (l == 0) break;
            const float* const d = deltas + unit;
            of_layer -= inputs * columns;
            unit -= inputs;
            for (int i = warp; i < inputs; i += Tail::THREADS / WARP) {
                float sum = 0.0f;
#pragma unroll 4
                for (int j = lane; j < columns; j += WARP) sum = fmaf(d[j], of_layer[i * columns + j], sum);
                sum = warp_sum(sum);
                if (lane == 0) deltas[unit + i] = sum * slopes[unit + i];
            }
            __syncthreads();
        }
    }
    add_threads_up(step, value, weight, sums, arrived, totals, losses);
}

}  // namespace mlpgpu
