// A resident network's forward stages: from a batch's inputs to the last layer's outputs.
//
//     tile  sum_z           x (rows, lines) · W (lines, columns) of the tile, by all warps
//           send_z          their parts added up                                  -> mail Z
//     row   rows_forward    mail Z or, of a replicated layer, the row's own product;
//                           h = dropout(f(z))                                     -> mail H
//     tile  inputs_mail     mail H, which are the next layer's inputs
#pragma once

#include "resident_memory.cuh"

namespace mlpgpu {

// The tile's part of Z.  All lanes of a warp read the same weights, each for its own rows.
template <int L, class K>
__device__ __forceinline__ void sum_z(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int P = T::PITCH, PARTS = line_parts<K, L>(), ROWS = K::ROWS;
    constexpr int LANE_ROWS = lane_rows<K>(), ROW_WARPS = row_warps<K>();
    if (!tile_of<L>(k).is_mine) return;
    const float* const w = k.shared + Place<K, L>::WEIGHTS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = warp / ROW_WARPS;
    for (int row_warp = warp % ROW_WARPS; row_warp < ROW_WARPS && part < PARTS; row_warp += RESIDENT_WARPS) {
        const int first = row_warp * LANE_ROWS * WARP + lane;  // and WARP further, if there are two
        const float* x[LANE_ROWS];
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i)
            x[i] = inputs_of<L>(k, k.tag) + min(first + i * WARP, ROWS - 1) * T::INPUT_PITCH;
        float sum[LANE_ROWS][P] = {};
#pragma unroll 1  // instructions come faster from a loop
        for (int quad = part; quad < T::QUADS; quad += PARTS) {
            float four[LANE_ROWS][4];
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i) load_four(x[i] + 4 * quad, four[i]);
#pragma unroll
            for (int line = 0; line < 4; ++line) {
                float weight[P];
#pragma unroll
                for (int c = 0; c < P; c += 4) load_four(w + quad * T::QUAD_PITCH + line * P + c, weight + c);
#pragma unroll
                for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                    for (int c = 0; c < P; ++c) sum[i][c] = fmaf(four[i][line], weight[c], sum[i][c]);
            }
        }
        float* const to = k.shared + BatchPlace<K>::SUMS + (part * ROWS + first) * (P + 4);  // (parts, rows, P + 4)
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
            for (int c = 0; c < P; c += 4)
                if (first + i * WARP < ROWS) store_four(to + i * WARP * (P + 4) + c, sum[i] + c);
    }
}

// The parts added up and sent to the rows' blocks.
template <int L, class K>
__device__ __forceinline__ void send_z(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int P = T::PITCH, ROWS = K::ROWS;
    const ResidentTile t = tile_of<L>(k);
    if (!t.is_mine) return;
    const float* const sums = k.shared + BatchPlace<K>::SUMS;
    uint64_t* const z = k.words(Mail<K, L>::Z, static_cast<int64_t>(ROWS) * T::LINE_SLICES * T::N_OUT);
    for (int i = threadIdx.x; i < k.rows * P; i += RESIDENT_THREADS) {  // neighbouring words by neighbouring lanes
        const int row = i / P, column = i % P;
        float sum = sums[row * (P + 4) + column];
#pragma unroll
        for (int part = 1; part < line_parts<K, L>(); ++part) sum += sums[(part * ROWS + row) * (P + 4) + column];
        const int64_t to = (static_cast<int64_t>(row) * T::LINE_SLICES + t.line_slice) * T::N_OUT + t.first_column;
        if (column < t.columns) send(z + to + column, sum, k.tag);
    }
}

// Mail for a tile: its inputs, which are the rows' outputs of the layer below.  The line of ones is always there.
template <int L, class K>
__device__ __forceinline__ auto inputs_mail(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int WIDTH = 4 * T::QUADS;
    const ResidentTile t = tile_of<L>(k);
    const int lines = min(t.lines, T::N_IN - t.first_line);
    const uint64_t* const h = k.words(Mail<K, L - 1>::H, static_cast<int64_t>(K::ROWS) * T::N_IN) + t.first_line;
    float* const x = inputs_of<L>(k, k.tag);
    return letters<RESIDENT_THREADS, K::ROWS * WIDTH>(
        lines > 0 ? k.rows * WIDTH : 0, k.tag,
        [=](int i) { return h + i / WIDTH * static_cast<int64_t>(T::N_IN) + min(i % WIDTH, lines - 1); },
        [=](int i, float value) {
            if (i % WIDTH < lines) x[i / WIDTH * T::INPUT_PITCH + i % WIDTH] = value;
        });
}

// h = dropout(f(z)) of the block's own rows.
template <int L, class K>
__device__ __forceinline__ void rows_forward(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int N = T::N_OUT, TERMS = T::IS_REPLICATED ? T::N_IN : T::LINE_SLICES;
    constexpr int64_t ROWS = K::ROWS;
    float* const h = k.shared + Place<K, L>::H;
    float* const saved = k.shared + Place<K, L>::SAVED;
    const float* const copy = k.shared + Place<K, L>::COPY;
    const auto part = [&](int i, int lane, int lanes) {
        if (k.own_row(i / N) >= k.rows) return 0.0f;
        if constexpr (T::IS_REPLICATED) {
            const float* const below = k.shared + Place<K, L - 1>::H + i / N * T::N_IN;
            const float* const w = copy + i % N;
            float sum = 0.0f;
#pragma unroll 8
            for (int line = lane; line < T::N_IN; line += lanes) sum = fmaf(below[line], w[line * T::COPY_PITCH], sum);
            return sum;
        } else {
            constexpr int MOST = ceil_div(TERMS, lanes_for(K::OWN_ROWS * N, TERMS));
            const int64_t first = static_cast<int64_t>(k.own_row(i / N)) * TERMS + lane * MOST;
            const uint64_t* const z = k.words(Mail<K, L>::Z, ROWS * TERMS * N) + first * N + i % N;
            return lane * MOST < TERMS ? receive_sum<MOST>(z, N, min(MOST, TERMS - lane * MOST), k.tag) : 0.0f;
        }
    };
    sum_by_lanes<K::OWN_ROWS * N, TERMS>(part, [&](int i, float z) {
        const int64_t at = static_cast<int64_t>(k.own_row(i / N)) * N + i % N;
        if (k.own_row(i / N) >= k.rows) return;
        if constexpr (T::IS_REPLICATED && T::HAS_BIAS) z += copy[T::N_IN * T::COPY_PITCH + i % N];
        const float y = T::Activation::forward(z);
        saved[i] = T::SAVES_Z ? z : y;
        h[i] = T::Dropout::element(k.key, at, y);
        if constexpr (L < K::LAST) send(k.words(Mail<K, L>::H, ROWS * N) + at, h[i], k.tag);
    });
}

template <int L, class K>
__device__ __forceinline__ void forward(const K& k) {
    if (k.has_rows()) rows_forward<L>(k);
    if constexpr (L < K::LAST) {
        constexpr bool IS_TILED = !LayerOf<K, L + 1>::IS_REPLICATED;
        if constexpr (IS_TILED) receive(inputs_mail<L + 1>(k));
        __syncthreads();
        if constexpr (IS_TILED) {
            sum_z<L + 1>(k);
            __syncthreads();
            send_z<L + 1>(k);
        }
        forward<L + 1>(k);
    }
}

}  // namespace mlpgpu
