// The persistent kernel's last stages: the gradient of each tile's weights, and the optimizer's step.
//
//     tile  update          xᵀ (weight rows, rows) · dZ (rows, columns) of the tile; updates weights and slots;
//                           of a replicated layer                                        -> messages COPY
//     row   copy_receiver   receives COPY, before the next step's forward stages
#pragma once

#include "persistent/memory.cuh"

namespace mlpgpu {

// Updates two neighbouring weights of the tile by their sums of the gradient.
template <int L, class K>
__device__ __forceinline__ void update_pair(const K& k, const WeightTile& t, int weight_row, int column, float2 g) {
    using T = LayerOf<K, L>;
    using Rule = typename K::Rule;
    using Unpenalized = BiasRule<Rule>;
    if (weight_row >= t.weight_rows || column >= t.columns) return;
    float* const w = k.shared + LayerMemory<K, L>::WEIGHTS + (weight_row >> 2) * T::QUAD_PITCH +
                     (weight_row & 3) * T::PITCH + column;
    float2 moved = *reinterpret_cast<const float2*>(w);
    float slot[2][Rule::SLOTS > 0 ? Rule::SLOTS : 1];
    for (int s = 0; s < Rule::SLOTS; ++s) {
        const float2 two = *reinterpret_cast<const float2*>(w + (s + 1) * T::TILE);
        slot[0][s] = two.x, slot[1][s] = two.y;
    }
    const float scale = k.shared[BatchMemory<K>::SCALE + k.parity()];
    const float* const rates = k.shared + BatchMemory<K>::RATES + k.parity() * RATES_PER_STEP;
    if (t.first_weight_row + weight_row < T::N_IN)  // biases follow
        g.x = penalized<Rule>(g.x, moved.x), g.y = penalized<Rule>(g.y, moved.y);
    step_parameter<Unpenalized>(moved.x, slot[0], g.x, scale, rates);
    if (column + 1 < t.columns) step_parameter<Unpenalized>(moved.y, slot[1], g.y, scale, rates);
    for (int s = 0; s < Rule::SLOTS; ++s)
        *reinterpret_cast<float2*>(w + (s + 1) * T::TILE) = make_float2(slot[0][s], slot[1][s]);
    *reinterpret_cast<float2*>(w) = moved;
    put_operand<L>(k, weight_row, column, moved);
    if constexpr (T::IS_REPLICATED) {
        uint64_t* const copies = k.words(MessageLayout<K, L>::COPY, T::WEIGHT_ROWS * T::OUT_PITCH);
        send(copies + (t.first_weight_row + weight_row) * T::OUT_PITCH + t.first_column + column, moved, k.sequence);
    }
}

template <int L, class K>
__device__ __forceinline__ void update(const K& k) {
    using T = LayerOf<K, L>;
    using P = ProductsOf<K, L>;
    constexpr int PAIRS = T::COLUMNS / 2;
    const WeightTile t = tile_of<L>(k);
    float* const sums = k.shared + BatchMemory<K>::SUMS;
    const auto tile_offset = [](int weight_row, int column) {
        return (weight_row >> 2) * T::QUAD_PITCH + (weight_row & 3) * T::PITCH + column;
    };
    P::sum_dw(inputs_of<L>(k, k.sequence), dz_of<L>(k), k.rows, [&](int partial, int weight_row, int column, float2 g) {
        if constexpr (P::DW_PARTIALS == 1) update_pair<L>(k, t, weight_row, column, g);
        else *reinterpret_cast<float2*>(sums + partial * T::TILE + tile_offset(weight_row, column)) = g;
    });
    if constexpr (P::DW_PARTIALS > 1) {
        sync_compute_threads();
        for (int i = compute_thread(); i < 4 * T::QUADS * PAIRS; i += COMPUTE_THREADS) {
            const int weight_row = i / PAIRS, column = i % PAIRS * 2;
            float2 g = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int partial = 0; partial < P::DW_PARTIALS; ++partial) {
                const float* const from = sums + partial * T::TILE + tile_offset(weight_row, column);
                const float2 more = *reinterpret_cast<const float2*>(from);
                g.x += more.x, g.y += more.y;
            }
            update_pair<L>(k, t, weight_row, column, g);
        }
    }
}

// Updates the last layer first: its new copies are in flight while the others are updated.
template <int L, class K>
__device__ __forceinline__ void update_all(const K& k) {
    if constexpr (!LayerOf<K, L>::IS_FROZEN) {
        if (tile_of<L>(k).is_mine) {
            update<L>(k);
            if constexpr (L > 0) sync_compute_threads();
        }
    }
    if constexpr (L > 0) update_all<L - 1>(k);
}

// Sets dZ to 0, before a batch of fewer rows.
template <int L, class K>
__device__ __forceinline__ void clear_dz(const K& k) {
    for (int i = LayerMemory<K, L>::DZ + compute_thread(); i < LayerMemory<K, L>::COPY; i += COMPUTE_THREADS)
        k.shared[i] = 0.0f;
    if constexpr (L > 0) clear_dz<L - 1>(k);
}

// Receives the weights of a replicated layer as the step before left them, if the block needs them.
template <int L, class K>
__device__ __forceinline__ auto copy_receiver(const K& k, bool is_needed) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = T::OUT_PITCH / 2, COUNT = T::WEIGHT_ROWS * PAIRS;
    const uint64_t* const from = k.messages + MessageLayout<K, L>::COPY + (k.parity() ^ 1) * COUNT * 2;
    float* const copy = k.shared + LayerMemory<K, L>::COPY;
    return receiver<COMPUTE_THREADS, COUNT, FlaggedPair>(
        is_needed ? COUNT : 0, k.sequence - 1, [=](int i) { return from + i * 2; },
        [=](int i, float2 values) {
            *reinterpret_cast<float2*>(copy + i / PAIRS * T::COPY_PITCH + i % PAIRS * 2) = values;
        });
}

// Runs `work` while copies of all replicated layers are in flight that are not frozen.
template <int L, class K, class Work, class... Receivers>
__device__ __forceinline__ void receive_copies_during(const K& k, bool are_needed, Work work, Receivers... receivers) {
    if constexpr (L == 0) receive_during(work, receivers...);
    else if constexpr (LayerOf<K, L>::IS_REPLICATED && !LayerOf<K, L>::IS_FROZEN)
        receive_copies_during<L - 1>(k, are_needed, work, copy_receiver<L>(k, are_needed), receivers...);
    else receive_copies_during<L - 1>(k, are_needed, work, receivers...);
}

}  // namespace mlpgpu
