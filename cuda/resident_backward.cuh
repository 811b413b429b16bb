// A resident network's backward stages: from the last layer's outputs to the gradient of every layer's z.
//
//     row   rows_loss       the loss, and its delta by the logits
//           rows_backward   mail dX or, below a replicated layer, the row's own product;
//                           dz = f'(z) · dropout of it                            -> mail dZ
//     tile  dz_mail         mail dZ
//           send_dx         dZ (rows, columns) · Wᵀ of the tile                   -> mail dX
#pragma once

#include "resident_forward.cuh"

namespace mlpgpu {

// Each own row's value and weight to `errors` (rows, 2), and its delta by the logits.  A warp takes a row.
template <class K>
__device__ __forceinline__ void rows_loss(const K& k, float* errors) {
    constexpr int L = K::LAST, N = LayerOf<K, L>::N_OUT;
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < K::OWN_ROWS; i += RESIDENT_WARPS) {
        const int row = k.own_row(i);
        if (row >= k.rows) continue;
        const float w = k.data.weights ? k.shared[BatchPlace<K>::WEIGHTS + k.parity() * K::ROWS + row] : 1.0f;
        float* const delta = k.shared + Place<K, L>::DELTA + i * N;
        const float* const wanted = k.shared + BatchPlace<K>::TARGETS + k.parity() * K::OWN_ROWS * K::TARGETS;
        const typename K::template Target<const float*> target = {wanted, i, N, k.data.target_mean,
                                                                  k.data.target_scale};
        const float value = weighted_row<typename K::Loss>(k.shared + Place<K, L>::H + i * N, N, target, w,
                                                           [=](int j, float d) { delta[j] = d; });
        if (lane == 0) errors[2 * row] = value, errors[2 * row + 1] = w;
    }
}

// dz of the block's own rows, from the delta by what the layer gives: of the loss, or of the layer above.
template <int L, class K>
__device__ __forceinline__ void rows_backward(const K& k) {
    using T = LayerOf<K, L>;
    using Above = LayerOf<K, (L < K::LAST ? L + 1 : L)>;
    constexpr int N = T::N_OUT, TERMS = L == K::LAST ? 1 : Above::IS_REPLICATED ? Above::N_OUT : Above::COLUMN_SLICES;
    constexpr int64_t ROWS = K::ROWS;
    float* const deltas = k.shared + Place<K, L>::DELTA;
    const auto part = [&](int i, int lane, int lanes) {
        if (k.own_row(i / N) >= k.rows) return 0.0f;
        if constexpr (L == K::LAST) {
            return deltas[i];
        } else if constexpr (Above::IS_REPLICATED) {
            const float* const dz = k.shared + Place<K, L + 1>::DELTA + i / N * Above::N_OUT;
            const float* const w = k.shared + Place<K, L + 1>::COPY + i % N * Above::COPY_PITCH;
            float sum = 0.0f;
#pragma unroll 8
            for (int j = lane; j < Above::N_OUT; j += lanes) sum = fmaf(dz[j], w[j], sum);
            return sum;
        } else {
            constexpr int MOST = ceil_div(TERMS, lanes_for(K::OWN_ROWS * N, TERMS));
            const int64_t first = static_cast<int64_t>(k.own_row(i / N)) * TERMS + lane * MOST;
            const uint64_t* const dx = k.words(Mail<K, L + 1>::DX, ROWS * TERMS * N) + first * N + i % N;
            return lane * MOST < TERMS ? receive_sum<MOST>(dx, N, min(MOST, TERMS - lane * MOST), k.tag) : 0.0f;
        }
    };
    sum_by_lanes<K::OWN_ROWS * N, TERMS>(part, [&](int i, float dy) {
        const int64_t at = static_cast<int64_t>(k.own_row(i / N)) * N + i % N;
        if (k.own_row(i / N) >= k.rows) return;
        dy = T::Dropout::element(k.key, at, dy);
        const float dz = dy * T::Activation::derivative(k.shared[Place<K, L>::SAVED + i]);
        deltas[i] = dz;
        send(k.words(Mail<K, L>::DZ, ROWS * N) + at, dz, k.tag);
    });
}

// Mail for a tile: its columns of the rows' dZ.
template <int L, class K>
__device__ __forceinline__ auto dz_mail(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int N = T::COLUMNS;
    const ResidentTile t = tile_of<L>(k);
    const uint64_t* const dz = k.words(Mail<K, L>::DZ, static_cast<int64_t>(K::ROWS) * T::N_OUT) + t.first_column;
    float* const to = k.shared + Place<K, L>::DZ;
    return letters<RESIDENT_THREADS, K::ROWS * N>(
        t.is_mine ? k.rows * N : 0, k.tag,
        [=](int i) { return dz + i / N * static_cast<int64_t>(T::N_OUT) + min(i % N, t.columns - 1); },
        [=](int i, float value) {
            if (i % N < t.columns) to[i / N * T::PITCH + i % N] = value;
        });
}

// The tile's part of dX = dZ Wᵀ, sent to the rows' blocks.
template <int L, class K>
__device__ __forceinline__ void send_dx(const K& k) {
    using T = LayerOf<K, L>;
    const ResidentTile t = tile_of<L>(k);
    if (!t.is_mine) return;
    const float* const w = k.shared + Place<K, L>::WEIGHTS;
    const float* const dz = k.shared + Place<K, L>::DZ;
    uint64_t* const dx = k.words(Mail<K, L>::DX, static_cast<int64_t>(K::ROWS) * T::COLUMN_SLICES * T::N_IN);
    const int lines = min(t.lines, T::N_IN - t.first_line);
    constexpr int WIDTH = 4 * T::QUADS;
    for (int i = threadIdx.x; i < k.rows * WIDTH; i += RESIDENT_THREADS) {
        const int row = i / WIDTH, line = i % WIDTH;
        if (line >= lines) continue;
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < T::PITCH; c += 4) {
            float delta[4], weight[4];
            load_four(dz + row * T::PITCH + c, delta);
            load_four(w + line / 4 * T::QUAD_PITCH + line % 4 * T::PITCH + c, weight);
#pragma unroll
            for (int j = 0; j < 4; ++j) sum = fmaf(delta[j], weight[j], sum);
        }
        const int64_t to = (static_cast<int64_t>(row) * T::COLUMN_SLICES + t.column_slice) * T::N_IN;
        send(dx + to + t.first_line + line, sum, k.tag);
    }
}

template <int L, class K>
__device__ __forceinline__ void backward(const K& k) {
    if (k.has_rows()) rows_backward<L>(k);
    if constexpr (L > 0) {
        constexpr bool IS_TILED = !LayerOf<K, L>::IS_REPLICATED;
        if constexpr (IS_TILED) receive(dz_mail<L>(k));
        __syncthreads();
        if constexpr (IS_TILED) send_dx<L>(k);
        backward<L - 1>(k);
    }
}

// What the tiles still lack for dW: dZ of the first layer, which the rows send last, and with it all that
// replicated layers need.
template <int L, class K, class... Kinds>
__device__ __forceinline__ void receive_rest(const K& k, Kinds... kinds) {
    if constexpr (L == 0) receive(dz_mail<0>(k), kinds...);
    else if constexpr (LayerOf<K, L>::IS_REPLICATED) receive_rest<L - 1>(k, dz_mail<L>(k), inputs_mail<L>(k), kinds...);
    else receive_rest<L - 1>(k, kinds...);
}

}  // namespace mlpgpu
