// A resident network's last stages: the gradient of each tile's weights, and the optimizer's step along it.
//
//     tile  update          xᵀ (lines, rows) · dZ (rows, columns) of the tile; weights and slots move along it;
//                           of a replicated layer                                              -> mail COPY
//     row   copy_mail       mail COPY, before the next step's forward stages
#pragma once

#include "persistent/memory.cuh"

namespace mlpgpu {

// The optimizer's rule for two neighbouring weights of the tile, by their sums of the gradient.
template <int L, class K>
__device__ __forceinline__ void move_two(const K& k, const ResidentTile& t, int line, int column, float2 g) {
    using T = LayerOf<K, L>;
    using Rule = typename K::Rule;
    if (line >= t.lines || column >= t.columns) return;
    float* const w = k.shared + Place<K, L>::WEIGHTS + (line >> 2) * T::QUAD_PITCH + (line & 3) * T::PITCH + column;
    float2 moved = *reinterpret_cast<const float2*>(w);
    float slot[2][Rule::SLOTS > 0 ? Rule::SLOTS : 1];
    for (int s = 0; s < Rule::SLOTS; ++s) {
        const float2 two = *reinterpret_cast<const float2*>(w + (s + 1) * T::TILE);
        slot[0][s] = two.x, slot[1][s] = two.y;
    }
    const float scale = k.shared[BatchPlace<K>::SCALE + k.parity()];
    const float* const rates = k.shared + BatchPlace<K>::RATES + k.parity() * COLUMNS;
    step_parameter<Rule>(moved.x, slot[0], g.x, scale, rates);
    if (column + 1 < t.columns) step_parameter<Rule>(moved.y, slot[1], g.y, scale, rates);
    for (int s = 0; s < Rule::SLOTS; ++s)
        *reinterpret_cast<float2*>(w + (s + 1) * T::TILE) = make_float2(slot[0][s], slot[1][s]);
    *reinterpret_cast<float2*>(w) = moved;
    put_operand<L>(k, line, column, moved);
    if constexpr (T::IS_REPLICATED) {
        uint64_t* const copies = k.words(Mail<K, L>::COPY, T::LINES * T::OUT_PITCH);
        send(copies + (t.first_line + line) * T::OUT_PITCH + t.first_column + column, moved, k.tag);
    }
}

template <int L, class K>
__device__ __forceinline__ void update(const K& k) {
    using T = LayerOf<K, L>;
    using P = ProductsOf<K, L>;
    constexpr int PAIRS = T::COLUMNS / 2;
    const ResidentTile t = tile_of<L>(k);
    float* const sums = k.shared + BatchPlace<K>::SUMS;
    const auto place = [](int line, int column) { return (line >> 2) * T::QUAD_PITCH + (line & 3) * T::PITCH + column; };
    P::sum_dw(inputs_of<L>(k, k.tag), dz_of<L>(k), k.rows, [&](int part, int line, int column, float2 g) {
        if constexpr (P::DW_PARTS == 1) move_two<L>(k, t, line, column, g);
        else *reinterpret_cast<float2*>(sums + part * T::TILE + place(line, column)) = g;
    });
    if constexpr (P::DW_PARTS > 1) {
        sync_workers();
        for (int i = worker(); i < 4 * T::QUADS * PAIRS; i += RESIDENT_THREADS) {
            const int line = i / PAIRS, column = i % PAIRS * 2;
            float2 g = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int part = 0; part < P::DW_PARTS; ++part) {
                const float2 more = *reinterpret_cast<const float2*>(sums + part * T::TILE + place(line, column));
                g.x += more.x, g.y += more.y;
            }
            move_two<L>(k, t, line, column, g);
        }
    }
}

// The last layer first: copies of it are on their way while the others move.
template <int L, class K>
__device__ __forceinline__ void update_all(const K& k) {
    if (tile_of<L>(k).is_mine) {
        update<L>(k);
        if constexpr (L > 0) sync_workers();
    }
    if constexpr (L > 0) update_all<L - 1>(k);
}

// No dZ, for a batch of fewer rows.
template <int L, class K>
__device__ __forceinline__ void clear_dz(const K& k) {
    for (int i = Place<K, L>::DZ + worker(); i < Place<K, L>::COPY; i += RESIDENT_THREADS) k.shared[i] = 0.0f;
    if constexpr (L > 0) clear_dz<L - 1>(k);
}

// Mail for rows: the weights of a replicated layer as the step before left them, if they are wanted.
template <int L, class K>
__device__ __forceinline__ auto copy_mail(const K& k, bool is_wanted) {
    using T = LayerOf<K, L>;
    constexpr int PAIRS = T::OUT_PITCH / 2, COUNT = T::LINES * PAIRS;
    const uint64_t* const from = k.mail + Mail<K, L>::COPY + (k.parity() ^ 1) * COUNT * 2;
    float* const copy = k.shared + Place<K, L>::COPY;
    return letters<RESIDENT_THREADS, COUNT, MailPair>(
        is_wanted ? COUNT : 0, k.tag - 1, [=](int i) { return from + i * 2; },
        [=](int i, float2 values) {
            *reinterpret_cast<float2*>(copy + i / PAIRS * T::COPY_PITCH + i % PAIRS * 2) = values;
        });
}

// Does the work while copies of all replicated layers are on their way.
template <int L, class K, class Work, class... Kinds>
__device__ __forceinline__ void receive_copies_beside(const K& k, bool are_wanted, Work work, Kinds... kinds) {
    if constexpr (L == 0) receive_beside(work, kinds...);
    else if constexpr (LayerOf<K, L>::IS_REPLICATED)
        receive_copies_beside<L - 1>(k, are_wanted, work, copy_mail<L>(k, are_wanted), kinds...);
    else receive_copies_beside<L - 1>(k, are_wanted, work, kinds...);
}

}  // namespace mlpgpu
