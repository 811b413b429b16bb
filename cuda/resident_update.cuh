// A resident network's last stages: the gradient of each tile's weights, and the optimizer's step along it.
//
//     tile  sum_dw          xᵀ (lines, rows) · dZ (rows, columns) of the tile, by groups of rows
//           update          the groups' sums added up; weights and slots move; of a replicated layer  -> mail COPY
//     row   copy_mail       mail COPY, before the next step's forward stages
#pragma once

#include "resident_memory.cuh"

namespace mlpgpu {

// A thread's number, from which layers count in turn: of two, each has a half of the block to itself.
template <int L>
__device__ __forceinline__ int turned_thread() {
    return (threadIdx.x + L % 2 * RESIDENT_HALF) % RESIDENT_THREADS;
}

// dW of the tile, in groups of rows: a thread takes four lines of every groups-th row.
template <int L, class K>
__device__ __forceinline__ void sum_dw(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int P = T::PITCH, GROUPS = row_groups<K, L>(), LANES = quad_lanes<K, L>();
    const int quad = turned_thread<L>() % LANES, group = turned_thread<L>() / LANES;
    if (!tile_of<L>(k).is_mine || group >= GROUPS || quad >= T::QUADS) return;
    const float* const x = inputs_of<L>(k, k.tag) + 4 * quad;
    const float* const dz = k.shared + Place<K, L>::DZ;
    float sum[4][P] = {};
#pragma unroll 2
    for (int row = group; row < k.rows; row += GROUPS) {
        float four[4], delta[P];
        load_four(x + row * T::INPUT_PITCH, four);
#pragma unroll
        for (int c = 0; c < P; c += 4) load_four(dz + row * P + c, delta + c);
#pragma unroll
        for (int line = 0; line < 4; ++line)
#pragma unroll
            for (int c = 0; c < P; ++c) sum[line][c] = fmaf(four[line], delta[c], sum[line][c]);
    }
    float* const to = k.shared + BatchPlace<K>::SUMS + Place<K, L>::DW + group * T::TILE + quad * T::QUAD_PITCH;
#pragma unroll
    for (int line = 0; line < 4; ++line)
#pragma unroll
        for (int c = 0; c < P; c += 4) store_four(to + line * P + c, sum[line] + c);
}

template <int L, class K>
__device__ __forceinline__ void sum_all_dw(const K& k) {
    sum_dw<L>(k);
    if constexpr (L > 0) sum_all_dw<L - 1>(k);
}

// The groups' sums added up, and the optimizer's rule.  `scale` divides by the batch's weight.
template <int L, class K>
__device__ __forceinline__ void update(const K& k, float scale, const float* rates) {
    using T = LayerOf<K, L>;
    using Rule = typename K::Rule;
    const ResidentTile t = tile_of<L>(k);
    if (!t.is_mine) return;
    float* const w = k.shared + Place<K, L>::WEIGHTS;
    float* const slots = k.shared + Place<K, L>::SLOTS;
    const float* const sums = k.shared + BatchPlace<K>::SUMS + Place<K, L>::DW;
    for (int i = turned_thread<L>(); i < T::QUADS * T::PITCH; i += RESIDENT_THREADS) {  // four columns of a line
        const int line = i / (T::PITCH / 4), column = i % (T::PITCH / 4) * 4;
        if (line >= t.lines) continue;
        const int at = line / 4 * T::QUAD_PITCH + line % 4 * T::PITCH + column;
        float g[4];
        load_four(sums + at, g);
#pragma unroll
        for (int group = 1; group < row_groups<K, L>(); ++group) {
            float more[4];
            load_four(sums + group * T::TILE + at, more);
#pragma unroll
            for (int c = 0; c < 4; ++c) g[c] += more[c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (column + c >= t.columns) continue;
            float slot[Rule::SLOTS > 0 ? Rule::SLOTS : 1];
            for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = slots[s * T::TILE + at + c];
            step_parameter<Rule>(w[at + c], slot, g[c], scale, rates);
            for (int s = 0; s < Rule::SLOTS; ++s) slots[s * T::TILE + at + c] = slot[s];
            if constexpr (T::IS_REPLICATED) {
                const int to = (t.first_line + line) * T::N_OUT + t.first_column + column + c;
                send(k.words(Mail<K, L>::COPY, T::LINES * T::N_OUT) + to, w[at + c], k.tag);
            }
        }
    }
}

// The last layer first: copies of it are on their way while the others move.
template <int L, class K>
__device__ __forceinline__ void update_all(const K& k, float scale, const float* rates) {
    update<L>(k, scale, rates);
    if constexpr (L > 0) update_all<L - 1>(k, scale, rates);
}

// Mail for rows: the weights of a replicated layer as the step before left them.
template <int L, class K>
__device__ __forceinline__ auto copy_mail(const K& k) {
    using T = LayerOf<K, L>;
    constexpr int COUNT = T::LINES * T::N_OUT;
    const uint64_t* const from = k.mail + Mail<K, L>::COPY + (k.parity() ^ 1) * COUNT;
    float* const copy = k.shared + Place<K, L>::COPY;
    return letters<RESIDENT_THREADS, COUNT>(
        COUNT, k.tag - 1, [=](int i) { return from + i; },
        [=](int i, float value) { copy[i / T::N_OUT * T::COPY_PITCH + i % T::N_OUT] = value; });
}

template <int L, class K, class Work, class... Kinds>
__device__ __forceinline__ void receive_copies_beside(const K& k, Work work, Kinds... kinds) {
    if constexpr (L == 0) {
        if constexpr (sizeof...(Kinds) > 0) receive_beside(work, kinds...);
        else work();
    } else if constexpr (LayerOf<K, L>::IS_REPLICATED) {
        receive_copies_beside<L - 1>(k, work, copy_mail<L>(k), kinds...);
    } else {
        receive_copies_beside<L - 1>(k, work, kinds...);
    }
}

}  // namespace mlpgpu
