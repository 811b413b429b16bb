// A resident network's forward stages: from a batch's inputs to the last layer's outputs.
//
//     tile  send_z          x (rows, lines) · W (lines, columns) of the tile        -> mail Z
//     row   rows_forward    mail Z or, of a replicated layer, the row's own product;
//                           h = dropout(f(z))                                     -> mail H
//     tile  inputs_mail     mail H, which are the next layer's inputs
#pragma once

#include "persistent/memory.cuh"

namespace mlpgpu {

// Z of the tile, to the rows' blocks: neighbouring pairs by neighbouring lanes.
template <int L, class K>
__device__ __forceinline__ void send_z(const K& k) {
    using T = LayerOf<K, L>;
    using P = ProductsOf<K, L>;
    constexpr int PAIRS = T::COLUMNS / 2, PITCH = T::SUM_PITCH, ROWS = K::ROWS;
    const ResidentTile t = tile_of<L>(k);
    uint64_t* const z = k.words(Mail<K, L>::Z, static_cast<int64_t>(ROWS) * T::LINE_SLICES * T::OUT_PITCH) +
                        t.line_slice * T::OUT_PITCH + t.first_column;
    const auto post = [&](int row, int column, float2 sum) {
        if (row < k.rows && column < t.columns) send(z + row * (T::LINE_SLICES * T::OUT_PITCH) + column, sum, k.tag);
    };
    float* const sums = k.shared + BatchPlace<K>::SUMS;
    if (t.is_mine)
        P::sum_z(inputs_of<L>(k, k.tag), operand_of<L>(k), [&](int part, int row, int column, float2 sum) {
            if constexpr (P::Z_PARTS == 1) post(row, column, sum);
            else *reinterpret_cast<float2*>(sums + (part * ROWS + row) * PITCH + column) = sum;
        });
    if constexpr (P::Z_PARTS > 1) {
        sync_workers();
        if (!t.is_mine) return;
#pragma unroll 2
        for (int i = worker(); i < ROWS * PAIRS; i += RESIDENT_THREADS) {
            const int row = i / PAIRS, column = i % PAIRS * 2;
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int part = 0; part < P::Z_PARTS; ++part) {
                const float2 more = *reinterpret_cast<const float2*>(sums + (part * ROWS + row) * PITCH + column);
                sum.x += more.x, sum.y += more.y;
            }
            post(row, column, sum);
        }
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

// A part of z of pair i of the own rows' units: without biases of a replicated layer.  All `lanes` have others.
template <int L, class K>
__device__ __forceinline__ float2 part_of_z(const K& k, int i, int lane, int lanes) {
    using T = LayerOf<K, L>;
    constexpr int PITCH = T::OUT_PITCH, PAIRS = PITCH / 2, TERMS = T::TERMS;
    const int row = k.own_row(i / PAIRS), unit = i % PAIRS * 2;
    float2 sum = make_float2(0.0f, 0.0f);
    if (row >= k.rows) return sum;
    if constexpr (T::IS_REPLICATED) {
        const float* const copy = k.shared + Place<K, L>::COPY;
        const float* const below = k.shared + Place<K, L - 1>::H + i / PAIRS * T::IN_PITCH;
#pragma unroll 4
        for (int line = lane; line < T::N_IN; line += lanes) {
            const float2 w = *reinterpret_cast<const float2*>(copy + line * T::COPY_PITCH + unit);
            sum.x = fmaf(below[line], w.x, sum.x), sum.y = fmaf(below[line], w.y, sum.y);
        }
        return sum;
    } else {
        constexpr int MOST = ceil_div(TERMS, lanes_for(K::OWN_ROWS * PAIRS, TERMS));
        const uint64_t* const z = k.words(Mail<K, L>::Z, static_cast<int64_t>(K::ROWS) * PITCH * TERMS) + unit;
        return receive_sums<MOST>(z + (static_cast<int64_t>(row) * TERMS + lane * MOST) * PITCH, PITCH,
                                  TERMS - lane * MOST, k.tag);
    }
}

// What the activation saves of a pair of a row's units, and h = dropout(f(z)) of it.
struct Activated {
    float2 saved, h;
};

template <int L, class K>
__device__ __forceinline__ Activated activate(const K& k, int row, int unit, float2 z) {
    using T = LayerOf<K, L>;
    if constexpr (T::IS_REPLICATED && T::HAS_BIAS) {
        const float* const copy = k.shared + Place<K, L>::COPY;
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
    send(k.words(Mail<K, L>::H, static_cast<int64_t>(K::ROWS) * PITCH) + row * PITCH + unit, h, k.tag);
}

// h of the block's own rows, by pairs of units.
template <int L, class K>
__device__ __forceinline__ void rows_forward(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = T::OUT_PITCH / 2;
    const auto part = [&](int i, int lane, int lanes) { return part_of_z<L>(k, i, lane, lanes); };
    sum_by_lanes<K::OWN_ROWS * PAIRS, T::TERMS>(part, [&](int i, float2 z) {
        const int row = k.own_row(i / PAIRS), unit = i % PAIRS * 2;
        if (row >= k.rows) return;
        const Activated its = activate<L>(k, row, unit, z);
        float* const at = k.shared + i * 2;  // (own rows, PITCH)
        *reinterpret_cast<float2*>(at + Place<K, L>::SAVED) = its.saved;
        *reinterpret_cast<float2*>(at + Place<K, L>::H) = its.h;
        if constexpr (L < K::LAST) send_h<L>(k, row, unit, its.h);
    });
}

template <int L, class K>
__device__ __forceinline__ void forward(const K& k) {
    constexpr bool TURNS = K::TURNS && L == K::LAST - 1;
    if (!TURNS && k.has_rows()) rows_forward<L>(k);
    if constexpr (L < K::LAST && !TURNS) {
        constexpr bool IS_TILED = !LayerOf<K, L + 1>::IS_REPLICATED;
        if constexpr (IS_TILED) receive(inputs_mail<L + 1>(k));
        sync_workers();
        if constexpr (IS_TILED) send_z<L + 1>(k);
        forward<L + 1>(k);
    }
}

}  // namespace mlpgpu
