// Where a resident network turns back, if a block has one row and few outputs: from the last hidden layer's z to its dz
// in one stage.  Each group of lanes that has z of a pair of units goes on with it, each lane for some outputs; then
// each warp adds the parts of the logits up, makes the loss's delta of them, and goes back with the weights it still
// holds.  All warps do the same there, which takes less time than to have one do it and wait for it.
//
//     row   rows_turn       mail Z or, of a replicated layer, the row's own product; h              -> mail H
//                           the last layer, the loss's delta, dz                                    -> mail dZ
//                           dz of the layer below                                                   -> mail dZ
//           rows_value      the loss's value, in the step after
#pragma once

#include "persistent/backward.cuh"
#include "persistent/inputs.cuh"

namespace mlpgpu {

// The target and the weight of the block's only row.
template <class K>
using OwnTarget = typename K::template Target<const float*>;

template <class K>
__device__ __forceinline__ OwnTarget<K> own_target(const K& k, uint32_t tag) {
    const float* const wanted = k.shared + BatchPlace<K>::TARGETS + (tag & 1) * K::TARGETS;
    return {wanted, 0, LayerOf<K, K::LAST>::N_OUT, k.data.target_mean, k.data.target_scale};
}

template <class K>
__device__ __forceinline__ float* own_outputs(const K& k, uint32_t tag) {
    return k.shared + BatchPlace<K>::OUTPUTS + (tag & 1) * (WARP / 2);
}

template <class K>
__device__ __forceinline__ float own_weight(const K& k, uint32_t tag) {
    return k.data.weights ? k.shared[BatchPlace<K>::WEIGHTS + (tag & 1) * K::ROWS + blockIdx.x] : 1.0f;
}

template <class K>
__device__ __forceinline__ void rows_turn(const K& k) {
    constexpr int LAST = K::LAST, L = LAST - 1, TEAM = WARP / 2;
    using T = LayerOf<K, L>;
    using Above = LayerOf<K, LAST>;
    constexpr int N = Above::N_OUT, PAIRS = T::OUT_PITCH / 2, LANES = lanes_for(PAIRS, T::TERMS);
    constexpr int OUTPUTS = ceil_div(N, LANES);  // of a lane
    const int row = blockIdx.x, pair = worker() / LANES, unit = 2 * pair, lane = threadIdx.x % LANES;
    const int warp = worker() / WARP, rank = threadIdx.x % TEAM;
    const float* const copy = k.shared + Place<K, LAST>::COPY;
    sync_workers();  // they have received the copy
    float2 z = pair < PAIRS ? part_of_z<L>(k, pair, lane, LANES) : make_float2(0.0f, 0.0f);
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        z.x += __shfl_xor_sync(WARP_ALL, z.x, offset);
        z.y += __shfl_xor_sync(WARP_ALL, z.y, offset);
    }
    Activated its = {};
    if (pair < PAIRS) its = activate<L>(k, row, unit, z);
    if (pair < PAIRS && lane == 0) send_h<L>(k, row, unit, its.h);

    float2 w[OUTPUTS];
    float* const parts = k.shared + BatchPlace<K>::LOGITS;
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int j = lane + i * LANES;
        const float* const at = copy + unit * Above::COPY_PITCH + j;
        w[i].x = j < N && unit < T::N_OUT ? at[0] : 0.0f;
        w[i].y = j < N && unit + 1 < T::N_OUT ? at[Above::COPY_PITCH] : 0.0f;
        float part = unit < T::N_OUT ? its.h.x * w[i].x : 0.0f;
        if (unit + 1 < T::N_OUT) part = fmaf(its.h.y, w[i].y, part);
#pragma unroll
        for (int offset = LANES; offset < WARP; offset *= 2) part += __shfl_xor_sync(WARP_ALL, part, offset);
        if (threadIdx.x % WARP < LANES && j < N) parts[warp * TEAM + j] = part;
    }
    sync_workers();
    float logit = 0.0f;
#pragma unroll
    for (int i = 0; i < RESIDENT_WARPS; i += 2) logit += parts[(i + threadIdx.x % WARP / TEAM) * TEAM + rank];
    logit += __shfl_xor_sync(WARP_ALL, logit, TEAM);
    const int64_t element = static_cast<int64_t>(row) * N + rank;
    const bool is_there = rank < N;
    if (Above::HAS_BIAS && is_there) logit += copy[Above::N_IN * Above::COPY_PITCH + rank];
    const float y = Above::Activation::forward(logit), output = Above::Dropout::element(k.key, element, y);
    const float delta = K::Loss::template delta<HalfWarpTeam, OwnTarget<K>>(
        output, is_there, is_there ? own_target(k, k.tag)(rank) : 0.0f, N);
    const float dz = is_there ? through_activation<Above>(k, element, delta * own_weight(k, k.tag),
                                                          Above::SAVES_Z ? logit : y)
                              : 0.0f;
    if (warp == 0 && is_there) own_outputs(k, k.tag)[rank] = output;

    float2 dy = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int j = lane + i * LANES;
        const float its_dz = __shfl_sync(WARP_ALL, dz, j % WARP);
        if (j < N) dy.x = fmaf(its_dz, w[i].x, dy.x), dy.y = fmaf(its_dz, w[i].y, dy.y);
    }
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        dy.x += __shfl_xor_sync(WARP_ALL, dy.x, offset);
        dy.y += __shfl_xor_sync(WARP_ALL, dy.y, offset);
    }
    if (pair < PAIRS && lane == 0) send_dz<L>(k, row, unit, dy, its.saved, k.shared + Place<K, L>::DELTA + unit);

    const float next = __shfl_down_sync(WARP_ALL, dz, 1);
    if (worker() < N && rank % 2 == 0) post_dz<LAST>(k, row, rank, make_float2(dz, rank + 1 < N ? next : 0.0f));
}

// The row's value and weight to `errors` (rows, 2), by couriers in the step after.
template <class K>
__device__ __forceinline__ void rows_value(const K& k, uint32_t tag, float* errors) {
    constexpr int N = LayerOf<K, K::LAST>::N_OUT;
    if (courier() >= WARP) return;
    const float weight = own_weight(k, tag);
    const float value = weighted_row<typename K::Loss, HalfWarpTeam>(own_outputs(k, tag), N,
                                                                     own_target(k, tag), weight, [](int, float) {});
    if (courier() == 0) errors[2 * blockIdx.x] = value, errors[2 * blockIdx.x + 1] = weight;
}

}  // namespace mlpgpu
