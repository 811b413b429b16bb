// A resident network's backward stages: from the last layer's outputs to the gradient of every layer's z.
//
//     row   rows_loss       the loss, its delta, and dz = f'(z) · dropout of it     -> mail dZ
//           rows_backward   mail dX or, below a replicated layer, the row's own product;
//                           dz of it                                              -> mail dZ
//     tile  dz_mail         mail dZ
//           send_dx         dZ (rows, columns) · Wᵀ of the tile                   -> mail dX
#pragma once

#include "persistent/forward.cuh"

namespace mlpgpu {

// dz = dy · the dropout's factor · f'(z), by what the activation saved; `element` of the rows' outputs.
template <class T, class K>
__device__ __forceinline__ float through_activation(const K& k, int64_t element, float dy, float saved) {
    return T::Dropout::element(k.key, element, dy) * T::Activation::derivative(saved);
}

// dz of a pair of a row's units, to the tiles.
template <int L, class K>
__device__ __forceinline__ void post_dz(const K& k, int row, int unit, float2 dz) {
    constexpr int WORDS = Mail<K, L>::DZ_WORDS, PITCH = LayerOf<K, L>::OUT_PITCH;
    uint64_t* const mail =
        k.words(Mail<K, L>::DZ, static_cast<int64_t>(K::ROWS) * WORDS) + row * WORDS;
    if constexpr (Mail<K, L>::IS_SHORT) {
        send(mail + unit / 2, __uint_as_float(bfloat_pair(dz.x, dz.y)), k.tag);
        if (WORDS > PITCH / 2 && unit + 2 == PITCH) send(mail + WORDS - 1, 0.0f, k.tag);
    } else {
        send(mail + unit, dz, k.tag);
    }
}

// Each own row's value and weight to `errors` (rows, 2), and the last layer's dz from it.  A warp takes a row.
template <class K>
__device__ __forceinline__ void rows_loss(const K& k, float* errors) {
    constexpr int L = K::LAST;
    using T = LayerOf<K, L>;
    constexpr int N = T::N_OUT, PITCH = T::OUT_PITCH;
    const int lane = threadIdx.x % WARP;
    for (int i = worker() / WARP; i < K::OWN_ROWS; i += RESIDENT_WARPS) {
        const int row = k.own_row(i);
        if (row >= k.rows) continue;
        const float w = k.data.weights ? k.shared[BatchPlace<K>::WEIGHTS + k.parity() * K::ROWS + row] : 1.0f;
        float* const delta = k.shared + Place<K, L>::DELTA + i * PITCH;
        const float* const saved = k.shared + Place<K, L>::SAVED + i * PITCH;
        const float* const wanted = k.shared + BatchPlace<K>::TARGETS + k.parity() * K::OWN_ROWS * K::TARGETS;
        const typename K::template Target<const float*> target = {wanted, i, N, k.data.target_mean,
                                                                  k.data.target_scale};
        const float* const h = k.shared + Place<K, L>::H + i * PITCH;
        const auto put = [=](int j, float d) {
            delta[j] = through_activation<T>(k, static_cast<int64_t>(row) * N + j, d, saved[j]);
        };
        float value;
        if constexpr (N <= K::Loss::FEW_COLUMNS) value = weighted_row<typename K::Loss, LanesAlone>(h, N, target, w, put);
        else value = weighted_row<typename K::Loss>(h, N, target, w, put);
        __syncwarp();
        for (int j = 2 * lane; j < N; j += 2 * WARP)
            post_dz<L>(k, row, j, *reinterpret_cast<const float2*>(delta + j));
        if (lane == 0) errors[2 * row] = value, errors[2 * row + 1] = w;
    }
}

// dz of a pair of a row's units, by what the activation saved of them: to `delta`, and to the tiles.
template <int L, class K>
__device__ __forceinline__ void send_dz(const K& k, int row, int unit, float2 dy, float2 saved, float* delta) {
    using T = LayerOf<K, L>;
    const int64_t element = static_cast<int64_t>(row) * T::N_OUT + unit;
    const float2 dz = make_float2(through_activation<T>(k, element, dy.x, saved.x),
                                  unit + 1 < T::N_OUT ? through_activation<T>(k, element + 1, dy.y, saved.y) : 0.0f);
    *reinterpret_cast<float2*>(delta) = dz;
    post_dz<L>(k, row, unit, dz);
}

// dz of the block's own rows, by pairs of units, from what the layer above gives: its dz and weights, or mail.
template <int L, class K>
__device__ __forceinline__ void rows_backward(const K& k) {
    using T = LayerOf<K, L>;
    using Above = LayerOf<K, L + 1>;
    constexpr int N = T::N_OUT, PITCH = T::OUT_PITCH, PAIRS = PITCH / 2;
    constexpr int TERMS = Above::IS_REPLICATED ? Above::N_OUT : Above::COLUMN_SLICES;
    constexpr int64_t WORDS = static_cast<int64_t>(K::ROWS) * PITCH;
    const auto part = [&](int i, int lane, int lanes) {
        const int row = k.own_row(i / PAIRS), unit = i % PAIRS * 2;
        float2 sum = make_float2(0.0f, 0.0f);
        if (row >= k.rows) return sum;
        if constexpr (Above::IS_REPLICATED) {
            const float* const dz = k.shared + Place<K, L + 1>::DELTA + i / PAIRS * Above::OUT_PITCH;
            const float* const w = k.shared + Place<K, L + 1>::COPY + unit * Above::COPY_PITCH;
            const float* const next = w + (unit + 1 < N ? Above::COPY_PITCH : 0);
#pragma unroll 4
            for (int j = lane; j < TERMS; j += lanes)
                sum.x = fmaf(dz[j], w[j], sum.x), sum.y = fmaf(dz[j], next[j], sum.y);
            return sum;
        } else {
            constexpr int MOST = ceil_div(TERMS, lanes_for(K::OWN_ROWS * PAIRS, TERMS));
            const uint64_t* const dx = k.words(Mail<K, L + 1>::DX, WORDS * TERMS) + unit;
            return receive_sums<MOST>(dx + (static_cast<int64_t>(row) * TERMS + lane * MOST) * PITCH, PITCH,
                                      TERMS - lane * MOST, k.tag);
        }
    };
    sum_by_lanes<K::OWN_ROWS * PAIRS, TERMS>(part, [&](int i, float2 dy) {
        const int row = k.own_row(i / PAIRS), unit = i % PAIRS * 2;
        if (row >= k.rows) return;
        send_dz<L>(k, row, unit, dy, *reinterpret_cast<const float2*>(k.shared + Place<K, L>::SAVED + i * 2),
                   k.shared + Place<K, L>::DELTA + i * 2);
    });
}

// Mail for a tile: its columns of the rows' dZ, in pairs of words.
template <int L, class K>
__device__ __forceinline__ auto dz_mail(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int SIZE = Mail<K, L>::IS_SHORT ? 4 : 2, PAIRS = T::COLUMNS / SIZE, WORDS = Mail<K, L>::DZ_WORDS;
    const ResidentTile t = tile_of<L>(k);
    const uint64_t* const dz =
        k.words(Mail<K, L>::DZ, static_cast<int64_t>(K::ROWS) * WORDS) + t.first_column / SIZE * 2;
    auto* const to = dz_of<L>(k);
    return letters<RESIDENT_THREADS, K::ROWS * PAIRS, MailPair>(
        t.is_mine ? k.rows * PAIRS : 0, k.tag,
        [=](int i) { return dz + i / PAIRS * WORDS + min(i % PAIRS, (t.columns - 1) / SIZE) * 2; },
        [=](int i, float2 values) {
            if (i % PAIRS * SIZE < t.columns)
                *reinterpret_cast<float2*>(to + i / PAIRS * ProductsOf<K, L>::DZ_PITCH + i % PAIRS * SIZE) = values;
        });
}

// The tile's part of dX = dZ Wᵀ by pairs of lines, sent to the rows' blocks.
template <int L, class K>
__device__ __forceinline__ void send_dx(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = 2 * T::QUADS, C = T::COLUMNS;
    const ResidentTile t = tile_of<L>(k);
    const int lines = min(t.lines, T::N_IN - t.first_line);
    if (lines <= 0) return;
    uint64_t* const dx = k.words(Mail<K, L>::DX, static_cast<int64_t>(K::ROWS) * T::COLUMN_SLICES * T::IN_PITCH) +
                         t.column_slice * T::IN_PITCH + t.first_line;
    for (int i = worker(); i < k.rows * PAIRS; i += RESIDENT_THREADS) {
        const int row = i / PAIRS, line = i % PAIRS * 2;
        if (line >= lines) continue;
        const float* const dz = k.shared + Place<K, L>::DZ + row * T::DZ_PITCH;
        const float* const w = k.shared + Place<K, L>::WEIGHTS + line / 4 * T::QUAD_PITCH + line % 4 * T::PITCH;
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
        send(dx + row * (T::COLUMN_SLICES * T::IN_PITCH) + line, sum, k.tag);
    }
}

template <int L, class K>
__device__ __forceinline__ void backward(const K& k) {
    if constexpr (L < K::LAST && !(K::TURNS && L == K::LAST - 1))
        if (k.has_rows()) rows_backward<L>(k);
    if constexpr (L > 0) {
        constexpr bool IS_TILED = !LayerOf<K, L>::IS_REPLICATED;
        if constexpr (IS_TILED) receive(dz_mail<L>(k));
        sync_workers();
        if constexpr (IS_TILED) send_dx<L>(k);
        backward<L - 1>(k);
    }
}

// What the tiles still lack for dW: all that replicated layers need, and dZ of the first layer, which the rows send last.
template <int L, class K>
__device__ __forceinline__ void receive_rest(const K& k) {
    if constexpr (L == 0) {
        receive(dz_mail<0>(k));
    } else {
        if constexpr (LayerOf<K, L>::IS_REPLICATED)
            if (tile_of<L>(k).is_mine) {
                receive(inputs_mail<L>(k));  // long before dZ
                receive(dz_mail<L>(k));
            }
        receive_rest<L - 1>(k);
    }
}

}  // namespace mlpgpu
