// A resident network's forward stages: from a batch's inputs to the last layer's outputs.
//
//     tile  sum_z           x (rows, lines) · W (lines, columns) of the tile, in parts
//           send_z          the parts added up                                    -> mail Z
//     row   rows_forward    mail Z or, of a replicated layer, the row's own product;
//                           h = dropout(f(z))                                     -> mail H
//     tile  inputs_mail     mail H, which are the next layer's inputs
#pragma once

#include "resident_memory.cuh"

namespace mlpgpu {

template <int L, class K>
__device__ __forceinline__ void sum_z(const K& k) {
    if (!tile_of<L>(k).is_mine) return;
    ProductsOf<K, L>::sum_z(inputs_of<L>(k, k.tag), k.shared + Place<K, L>::WEIGHTS, k.shared + BatchPlace<K>::SUMS);
}

// The parts added up and sent to the rows' blocks: neighbouring pairs by neighbouring lanes.
template <int L, class K>
__device__ __forceinline__ void send_z(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = T::COLUMNS / 2, PITCH = T::SUM_PITCH, ROWS = K::ROWS;
    const ResidentTile t = tile_of<L>(k);
    if (!t.is_mine) return;
    uint64_t* const z = k.words(Mail<K, L>::Z, static_cast<int64_t>(ROWS) * T::LINE_SLICES * T::OUT_PITCH) +
                        t.line_slice * T::OUT_PITCH + t.first_column;
#pragma unroll 2
    for (int i = worker(); i < ROWS * PAIRS; i += RESIDENT_THREADS) {
        const int row = i / PAIRS, column = i % PAIRS * 2;
        if (row >= k.rows || column >= t.columns) continue;
        const float* const sums = k.shared + BatchPlace<K>::SUMS + row * PITCH + column;
        float2 sum = *reinterpret_cast<const float2*>(sums);
#pragma unroll
        for (int part = 1; part < ProductsOf<K, L>::Z_PARTS; ++part) {
            const float2 more = *reinterpret_cast<const float2*>(sums + part * ROWS * PITCH);
            sum.x += more.x, sum.y += more.y;
        }
        send(z + row * (T::LINE_SLICES * T::OUT_PITCH) + column, sum, k.tag);
    }
}

// Mail for a tile: its inputs, which are the rows' outputs of the layer below.  The line of ones is always there.
template <int L, class K>
__device__ __forceinline__ auto inputs_mail(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = 2 * T::QUADS;
    const ResidentTile t = tile_of<L>(k);
    const int lines = min(t.lines, T::N_IN - t.first_line);
    const uint64_t* const h = k.words(Mail<K, L - 1>::H, static_cast<int64_t>(K::ROWS) * T::IN_PITCH) + t.first_line;
    float* const x = inputs_of<L>(k, k.tag);
    return letters<RESIDENT_THREADS, K::ROWS * PAIRS, MailPair>(
        lines > 0 ? k.rows * PAIRS : 0, k.tag,
        [=](int i) { return h + i / PAIRS * T::IN_PITCH + min(i % PAIRS, (lines - 1) / 2) * 2; },
        [=](int i, float2 values) {
            const int line = i % PAIRS * 2;
            float* const to = x + i / PAIRS * T::INPUT_PITCH + line;
            if (line < lines) to[0] = values.x;
            if (line + 1 < lines) to[1] = values.y;
        });
}

// h = dropout(f(z)) of the block's own rows, by pairs of units.
template <int L, class K>
__device__ __forceinline__ void rows_forward(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int PITCH = T::OUT_PITCH, PAIRS = PITCH / 2, TERMS = T::IS_REPLICATED ? T::N_IN : T::LINE_SLICES;
    constexpr int64_t WORDS = static_cast<int64_t>(K::ROWS) * PITCH;
    const float* const copy = k.shared + Place<K, L>::COPY;
    const auto part = [&](int i, int lane, int lanes) {
        const int row = k.own_row(i / PAIRS), unit = i % PAIRS * 2;
        float2 sum = make_float2(0.0f, 0.0f);
        if (row >= k.rows) return sum;
        if constexpr (T::IS_REPLICATED) {
            const float* const below = k.shared + Place<K, L - 1>::H + i / PAIRS * T::IN_PITCH;
#pragma unroll 4
            for (int line = lane; line < T::N_IN; line += lanes) {
                const float2 w = *reinterpret_cast<const float2*>(copy + line * T::COPY_PITCH + unit);
                sum.x = fmaf(below[line], w.x, sum.x), sum.y = fmaf(below[line], w.y, sum.y);
            }
            return sum;
        } else {
            constexpr int MOST = ceil_div(TERMS, lanes_for(K::OWN_ROWS * PAIRS, TERMS));
            const uint64_t* const z = k.words(Mail<K, L>::Z, WORDS * TERMS) + unit;
            return receive_sums<MOST>(z + (static_cast<int64_t>(row) * TERMS + lane * MOST) * PITCH, PITCH,
                                      TERMS - lane * MOST, k.tag);
        }
    };
    sum_by_lanes<K::OWN_ROWS * PAIRS, TERMS>(part, [&](int i, float2 z) {
        const int row = k.own_row(i / PAIRS), unit = i % PAIRS * 2;
        if (row >= k.rows) return;
        if constexpr (T::IS_REPLICATED && T::HAS_BIAS) {
            const float2 bias = *reinterpret_cast<const float2*>(copy + T::N_IN * T::COPY_PITCH + unit);
            z.x += bias.x, z.y += bias.y;
        }
        const float2 y = make_float2(T::Activation::forward(z.x), T::Activation::forward(z.y));
        const int64_t element = static_cast<int64_t>(row) * T::N_OUT + unit;
        const float2 h = make_float2(T::Dropout::element(k.key, element, y.x),
                                     T::Dropout::element(k.key, element + 1, y.y));
        float* const at = k.shared + i * 2;  // (own rows, PITCH)
        *reinterpret_cast<float2*>(at + Place<K, L>::SAVED) = T::SAVES_Z ? z : y;
        *reinterpret_cast<float2*>(at + Place<K, L>::H) = h;
        if constexpr (L < K::LAST) send(k.words(Mail<K, L>::H, WORDS) + row * PITCH + unit, h, k.tag);
    });
}

template <int L, class K>
__device__ __forceinline__ void forward(const K& k) {
    if (k.has_rows()) rows_forward<L>(k);
    if constexpr (L < K::LAST) {
        constexpr bool IS_TILED = !LayerOf<K, L + 1>::IS_REPLICATED;
        if constexpr (IS_TILED) receive(inputs_mail<L + 1>(k));
        sync_workers();
        if constexpr (IS_TILED) {
            sum_z<L + 1>(k);
            sync_workers();
            send_z<L + 1>(k);
        }
        forward<L + 1>(k);
    }
}

}  // namespace mlpgpu
