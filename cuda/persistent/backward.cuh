// The persistent kernel's backward stages: from the last layer's outputs to the gradient of every layer's z.
//
//     row   rows_loss       the loss, its delta, dz = f'(z) · dropout of delta        -> messages dZ
//           rows_backward   receives dX or, below a replicated layer, multiplies by its copy of W;
//                           dz from that                                            -> messages dZ
//     tile  dz_receiver     receives dZ
//           send_dx         dZ (rows, columns) · Wᵀ of the tile                     -> messages dX
#pragma once

#include "persistent/forward.cuh"

namespace mlpgpu {

// dz = dy · the dropout's factor · f'(z), where f' takes what the activation saved; `element` addresses the dropout.
template <class T, class K>
__device__ __forceinline__ float through_activation(const K& k, int64_t element, float dy, float saved) {
    return T::Dropout::element(k.key, element, dy) * T::Activation::derivative(saved);
}

// Sends dz of a pair of a row's units to the tiles.
template <int L, class K>
__device__ __forceinline__ void send_dz(const K& k, int row, int unit, float2 dz) {
    constexpr int WORDS = MessageLayout<K, L>::DZ_WORDS, PITCH = LayerOf<K, L>::OUT_PITCH;
    uint64_t* const messages =
        k.words(MessageLayout<K, L>::DZ, static_cast<int64_t>(K::ROWS) * WORDS) + row * WORDS;
    if constexpr (MessageLayout<K, L>::HAS_BFLOAT_PAIRS) {
        send(messages + unit / 2, __uint_as_float(bfloat_pair(dz.x, dz.y)), k.sequence);
        if (WORDS > PITCH / 2 && unit + 2 == PITCH) send(messages + WORDS - 1, 0.0f, k.sequence);
    } else {
        send(messages + unit, dz, k.sequence);
    }
}

// Writes the loss and the weight of each of the block's rows to `errors` (rows, 2), and sends the last layer's dz. A
// warp takes a row.
template <class K>
__device__ __forceinline__ void rows_loss(const K& k, float* errors) {
    constexpr int L = K::LAST;
    using T = LayerOf<K, L>;
    constexpr int N = T::N_OUT, PITCH = T::OUT_PITCH;
    const int lane = threadIdx.x % WARP;
    for (int i = compute_thread() / WARP; i < K::ROWS_PER_BLOCK; i += COMPUTE_WARPS) {
        const int row = k.block_row(i);
        if (row >= k.rows) continue;
        const float w = k.data.weights ? k.shared[BatchMemory<K>::WEIGHTS + k.parity() * K::ROWS + row] : 1.0f;
        float* const delta = k.shared + LayerMemory<K, L>::DELTA + i * PITCH;
        const float* const saved = k.shared + LayerMemory<K, L>::SAVED + i * PITCH;
        const float* const targets = k.shared + BatchMemory<K>::TARGETS + k.parity() * K::ROWS_PER_BLOCK * K::TARGETS;
        const typename K::template Target<const float*> target = {targets, i, N, k.data.target_mean,
                                                                  k.data.target_scale};
        const float* const h = k.shared + LayerMemory<K, L>::H + i * PITCH;
        const auto put = [=](int j, float d) {
            delta[j] = through_activation<T>(k, static_cast<int64_t>(row) * N + j, d, saved[j]);
        };
        float value;
        if constexpr (N <= K::Loss::FEW_COLUMNS)
            value = weighted_row<typename K::Loss, LanesAlone>(h, N, target, w, put);
        else
            value = weighted_row<typename K::Loss>(h, N, target, w, put);
        __syncwarp();
        for (int j = 2 * lane; j < N; j += 2 * WARP)
            send_dz<L>(k, row, j, *reinterpret_cast<const float2*>(delta + j));
        if (lane == 0) errors[2 * row] = value, errors[2 * row + 1] = w;
    }
}

// Computes dz of a pair of a row's units from dy; stores it to `delta` and sends it to the tiles.
template <int L, class K>
__device__ __forceinline__ void backward_pair(const K& k, int row, int unit, float2 dy, float2 saved, float* delta) {
    using T = LayerOf<K, L>;
    const int64_t element = static_cast<int64_t>(row) * T::N_OUT + unit;
    const float2 dz = make_float2(through_activation<T>(k, element, dy.x, saved.x),
                                  unit + 1 < T::N_OUT ? through_activation<T>(k, element + 1, dy.y, saved.y) : 0.0f);
    *reinterpret_cast<float2*>(delta) = dz;
    send_dz<L>(k, row, unit, dz);
}

// dz of the block's rows, by pairs of units: from dz and the copied weights of a replicated layer above, or from
// messages.
template <int L, class K>
__device__ __forceinline__ void rows_backward(const K& k) {
    using T = LayerOf<K, L>;
    using Above = LayerOf<K, L + 1>;
    constexpr int N = T::N_OUT, PITCH = T::OUT_PITCH, PAIRS = PITCH / 2;
    constexpr int TERMS = Above::IS_REPLICATED ? Above::N_OUT : Above::COLUMN_SLICES;
    constexpr int64_t WORDS = static_cast<int64_t>(K::ROWS) * PITCH;
    const auto partial = [&](int i, int lane, int lanes) {
        const int row = k.block_row(i / PAIRS), unit = i % PAIRS * 2;
        float2 sum = make_float2(0.0f, 0.0f);
        if (row >= k.rows) return sum;
        if constexpr (Above::IS_REPLICATED) {
            const float* const dz = k.shared + LayerMemory<K, L + 1>::DELTA + i / PAIRS * Above::OUT_PITCH;
            const float* const w = k.shared + LayerMemory<K, L + 1>::COPY + unit * Above::COPY_PITCH;
            const float* const next = w + (unit + 1 < N ? Above::COPY_PITCH : 0);
#pragma unroll 4
            for (int j = lane; j < TERMS; j += lanes)
                sum.x = fmaf(dz[j], w[j], sum.x), sum.y = fmaf(dz[j], next[j], sum.y);
            return sum;
        } else {
            constexpr int MOST = ceil_div(TERMS, lanes_for(K::ROWS_PER_BLOCK * PAIRS, TERMS));
            const uint64_t* const dx = k.words(MessageLayout<K, L + 1>::DX, WORDS * TERMS) + unit;
            return receive_sums<MOST>(dx + (static_cast<int64_t>(row) * TERMS + lane * MOST) * PITCH, PITCH,
                                      TERMS - lane * MOST, k.sequence);
        }
    };
    sum_by_lanes<K::ROWS_PER_BLOCK * PAIRS, TERMS>(partial, [&](int i, float2 dy) {
        const int row = k.block_row(i / PAIRS), unit = i % PAIRS * 2;
        if (row >= k.rows) return;
        backward_pair<L>(k, row, unit, dy,
                         *reinterpret_cast<const float2*>(k.shared + LayerMemory<K, L>::SAVED + i * 2),
                   k.shared + LayerMemory<K, L>::DELTA + i * 2);
    });
}

// Receives the tile's columns of dZ, in pairs of words.
template <int L, class K>
__device__ __forceinline__ auto dz_receiver(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int SIZE = MessageLayout<K, L>::HAS_BFLOAT_PAIRS ? 4 : 2, PAIRS = T::COLUMNS / SIZE;
    constexpr int WORDS = MessageLayout<K, L>::DZ_WORDS;
    const WeightTile t = tile_of<L>(k);
    const uint64_t* const dz =
        k.words(MessageLayout<K, L>::DZ, static_cast<int64_t>(K::ROWS) * WORDS) + t.first_column / SIZE * 2;
    auto* const to = dz_of<L>(k);
    return receiver<COMPUTE_THREADS, K::ROWS * PAIRS, FlaggedPair>(
        t.is_mine ? k.rows * PAIRS : 0, k.sequence,
        [=](int i) { return dz + i / PAIRS * WORDS + min(i % PAIRS, (t.columns - 1) / SIZE) * 2; },
        [=](int i, float2 values) {
            if (i % PAIRS * SIZE < t.columns)
                *reinterpret_cast<float2*>(to + i / PAIRS * ProductsOf<K, L>::DZ_PITCH + i % PAIRS * SIZE) = values;
        });
}

// Sends the tile's part of dX = dZ Wᵀ, by pairs of weight rows, to the blocks of its rows.
template <int L, class K>
__device__ __forceinline__ void send_dx(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = 2 * T::QUADS, C = T::COLUMNS;
    const WeightTile t = tile_of<L>(k);
    const int weight_rows = min(t.weight_rows, T::N_IN - t.first_weight_row);
    if (weight_rows <= 0) return;
    uint64_t* const dx = k.words(MessageLayout<K, L>::DX,
                                 static_cast<int64_t>(K::ROWS) * T::COLUMN_SLICES * T::IN_PITCH) +
                         t.column_slice * T::IN_PITCH + t.first_weight_row;
    for (int i = compute_thread(); i < k.rows * PAIRS; i += COMPUTE_THREADS) {
        const int row = i / PAIRS, weight_row = i % PAIRS * 2;
        if (weight_row >= weight_rows) continue;
        const float* const dz = k.shared + LayerMemory<K, L>::DZ + row * T::DZ_PITCH;
        const float* const w = k.shared + LayerMemory<K, L>::WEIGHTS + weight_row / 4 * T::QUAD_PITCH +
                               weight_row % 4 * T::PITCH;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < C; c += 4) {
            float delta[4], weight[2][4];
            load_four(dz + c, delta);
            load_four(w + c, weight[0]);
            load_four(w + T::PITCH + c, weight[1]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sum.x = fmaf(delta[j], weight[0][j], sum.x), sum.y = fmaf(delta[j], weight[1][j], sum.y);
        }
        send(dx + row * (T::COLUMN_SLICES * T::IN_PITCH) + weight_row, sum, k.sequence);
    }
}

template <int L, class K>
__device__ __forceinline__ void backward(const K& k) {
    if constexpr (L < K::LAST && !(K::HAS_OUTPUT_STAGE && L == K::LAST - 1))
        if (k.has_rows()) rows_backward<L>(k);
    if constexpr (L > 0) {
        constexpr bool IS_TILED = !LayerOf<K, L>::IS_REPLICATED;
        if constexpr (IS_TILED) receive(dz_receiver<L>(k));
        sync_compute_threads();
        if constexpr (IS_TILED) send_dx<L>(k);
        backward<L - 1>(k);
    }
}

// Receives what the tiles still need for dW: everything for replicated layers, and dZ of the first layer, which comes
// last. A first layer that is frozen receives its dZ all the same: it says that rows have read Z.
template <int L, class K>
__device__ __forceinline__ void receive_rest(const K& k) {
    if constexpr (L == 0) {
        receive(dz_receiver<0>(k));
    } else {
        if constexpr (LayerOf<K, L>::IS_REPLICATED)
            if (tile_of<L>(k).is_mine) {
                receive(inputs_receiver<L>(k));  // these come long before dZ
                receive(dz_receiver<L>(k));
            }
        receive_rest<L - 1>(k);
    }
}

}  // namespace mlpgpu
