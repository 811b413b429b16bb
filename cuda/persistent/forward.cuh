// The persistent kernel's forward stages: from a batch's inputs to the last layer's outputs.
//
//     tile  send_z            x (rows, weight rows) · W (weight rows, columns)        -> messages Z
//     row   rows_forward      receives Z or, if the layer is replicated, multiplies by its copy of W;
//                             h = dropout(f(z))                                       -> messages H
//     tile  inputs_receiver   receives H, which are the next layer's inputs
#pragma once

#include "persistent/memory.cuh"

namespace mlpgpu {

// Sends the tile's Z to the blocks of its rows: neighbouring lanes send neighbouring pairs of columns.
template <int L, class K>
__device__ __forceinline__ void send_z(const K& k) {
    using T = LayerOf<K, L>;
    using P = ProductsOf<K, L>;
    constexpr int PAIRS = T::COLUMNS / 2, PITCH = T::SUM_PITCH, ROWS = K::ROWS;
    const WeightTile t = tile_of<L>(k);
    uint64_t* const z = k.words(MessageLayout<K, L>::Z, static_cast<int64_t>(ROWS) * T::ROW_SLICES * T::OUT_PITCH) +
                        t.row_slice * T::OUT_PITCH + t.first_column;
    const auto send_pair = [&](int row, int column, float2 sum) {
        if (row < k.rows && column < t.columns)
            send(z + row * (T::ROW_SLICES * T::OUT_PITCH) + column, sum, k.sequence);
    };
    float* const sums = k.shared + BatchMemory<K>::SUMS;
    if (t.is_mine)
        P::sum_z(inputs_of<L>(k, k.sequence), operand_of<L>(k), [&](int partial, int row, int column, float2 sum) {
            if constexpr (P::Z_PARTIALS == 1) send_pair(row, column, sum);
            else *reinterpret_cast<float2*>(sums + (partial * ROWS + row) * PITCH + column) = sum;
        });
    if constexpr (P::Z_PARTIALS > 1) {
        sync_compute_threads();
        if (!t.is_mine) return;
#pragma unroll 2
        for (int i = compute_thread(); i < ROWS * PAIRS; i += COMPUTE_THREADS) {
            const int row = i / PAIRS, column = i % PAIRS * 2;
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int partial = 0; partial < P::Z_PARTIALS; ++partial) {
                const float2 more = *reinterpret_cast<const float2*>(sums + (partial * ROWS + row) * PITCH + column);
                sum.x += more.x, sum.y += more.y;
            }
            send_pair(row, column, sum);
        }
    }
}

// Receives a tile's inputs, which are the outputs of the layer below. The input of the biases, a 1, is always there.
template <int L, class K>
__device__ __forceinline__ auto inputs_receiver(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = 2 * T::QUADS;
    const WeightTile t = tile_of<L>(k);
    const int weight_rows = min(t.weight_rows, T::N_IN - t.first_weight_row);
    const uint64_t* const h = k.words(MessageLayout<K, L - 1>::H, static_cast<int64_t>(K::ROWS) * T::IN_PITCH) +
                              t.first_weight_row;
    float* const x = inputs_of<L>(k, k.sequence);
    return receiver<COMPUTE_THREADS, K::ROWS * PAIRS, FlaggedPair>(
        weight_rows > 0 ? k.rows * PAIRS : 0, k.sequence,
        [=](int i) { return h + i / PAIRS * T::IN_PITCH + min(i % PAIRS, (weight_rows - 1) / 2) * 2; },
        [=](int i, float2 values) {
            const int weight_row = i % PAIRS * 2;
            float* const to = x + i / PAIRS * T::INPUT_PITCH + weight_row;
            if (weight_row < weight_rows) to[0] = values.x;
            if (weight_row + 1 < weight_rows) to[1] = values.y;
        });
}

// A lane's part of z for pair i of the block's outputs; `lanes` of them add up to z, without the bias of a replicated
// layer.
template <int L, class K>
__device__ __forceinline__ float2 partial_z(const K& k, int i, int lane, int lanes) {
    using T = LayerOf<K, L>;
    constexpr int PITCH = T::OUT_PITCH, PAIRS = PITCH / 2, TERMS = T::TERMS;
    const int row = k.block_row(i / PAIRS), unit = i % PAIRS * 2;
    float2 sum = make_float2(0.0f, 0.0f);
    if (row >= k.rows) return sum;
    if constexpr (T::IS_REPLICATED) {
        const float* const copy = k.shared + LayerMemory<K, L>::COPY;
        const float* const below = k.shared + LayerMemory<K, L - 1>::H + i / PAIRS * T::IN_PITCH;
#pragma unroll 4
        for (int weight_row = lane; weight_row < T::N_IN; weight_row += lanes) {
            const float2 w = *reinterpret_cast<const float2*>(copy + weight_row * T::COPY_PITCH + unit);
            sum.x = fmaf(below[weight_row], w.x, sum.x), sum.y = fmaf(below[weight_row], w.y, sum.y);
        }
        return sum;
    } else {
        constexpr int MOST = ceil_div(TERMS, lanes_for(K::ROWS_PER_BLOCK * PAIRS, TERMS));
        const uint64_t* const z = k.words(MessageLayout<K, L>::Z, static_cast<int64_t>(K::ROWS) * PITCH * TERMS) + unit;
        return receive_sums<MOST>(z + (static_cast<int64_t>(row) * TERMS + lane * MOST) * PITCH, PITCH,
                                  TERMS - lane * MOST, k.sequence);
    }
}

// What the activation saves for a pair of a row's units, and h = dropout(f(z)).
struct Activated {
    float2 saved, h;
};

template <int L, class K>
__device__ __forceinline__ Activated activate(const K& k, int row, int unit, float2 z) {
    using T = LayerOf<K, L>;
    if constexpr (T::IS_REPLICATED && T::HAS_BIAS) {
        const float* const copy = k.shared + LayerMemory<K, L>::COPY;
        const float2 bias = *reinterpret_cast<const float2*>(copy + T::N_IN * T::COPY_PITCH + unit);
        z.x += bias.x, z.y += bias.y;
    }
    const float2 y = make_float2(T::Activation::forward(z.x), T::Activation::forward(z.y));
    const int64_t element = static_cast<int64_t>(row) * T::N_OUT + unit;
    const float2 h = make_float2(T::Dropout::element(k.key, element, y.x),
                                 T::Dropout::element(k.key, element + 1, y.y));
    return {T::SAVES_Z ? z : y, h};
}

template <int L, class K>
__device__ __forceinline__ void send_h(const K& k, int row, int unit, float2 h) {
    constexpr int PITCH = LayerOf<K, L>::OUT_PITCH;
    send(k.words(MessageLayout<K, L>::H, static_cast<int64_t>(K::ROWS) * PITCH) + row * PITCH + unit, h, k.sequence);
}

// h of the block's rows, by pairs of units.
template <int L, class K>
__device__ __forceinline__ void rows_forward(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = T::OUT_PITCH / 2;
    const auto partial = [&](int i, int lane, int lanes) { return partial_z<L>(k, i, lane, lanes); };
    sum_by_lanes<K::ROWS_PER_BLOCK * PAIRS, T::TERMS>(partial, [&](int i, float2 z) {
        const int row = k.block_row(i / PAIRS), unit = i % PAIRS * 2;
        if (row >= k.rows) return;
        const Activated activated = activate<L>(k, row, unit, z);
        float* const outputs = k.shared + i * 2;  // (rows of the block, PITCH)
        *reinterpret_cast<float2*>(outputs + LayerMemory<K, L>::SAVED) = activated.saved;
        *reinterpret_cast<float2*>(outputs + LayerMemory<K, L>::H) = activated.h;
        if constexpr (L < K::LAST) send_h<L>(k, row, unit, activated.h);
    });
}

template <int L, class K>
__device__ __forceinline__ void forward(const K& k) {
    constexpr bool HAS_OUTPUT_STAGE = K::HAS_OUTPUT_STAGE && L == K::LAST - 1;
    if (!HAS_OUTPUT_STAGE && k.has_rows()) rows_forward<L>(k);
    if constexpr (L < K::LAST && !HAS_OUTPUT_STAGE) {
        constexpr bool IS_TILED = !LayerOf<K, L + 1>::IS_REPLICATED;
        if constexpr (IS_TILED) receive(inputs_receiver<L + 1>(k));
        sync_compute_threads();
        if constexpr (IS_TILED) send_z<L + 1>(k);
        forward<L + 1>(k);
    }
}

}  // namespace mlpgpu
