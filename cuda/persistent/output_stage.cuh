// The persistent kernel's output stage, for blocks of one row with few outputs: from the last hidden layer's z to its
// dz without another stage between. Each group of lanes that has z of a pair of units continues with the last layer,
// each lane for some outputs. Each warp then adds the partial logits up, computes the loss's delta, and goes back
// through the weights it still has in registers. All warps do the same work there, which takes less time than to wait
// for one of them.
//
//     row   output_stage   receives Z or, if the layer is replicated, multiplies by its copy of W; h    -> messages H
//                          the last layer, the loss's delta, dz                                         -> messages dZ
//                          dz of the layer below                                                        -> messages dZ
//           output_loss    the loss's value, one step later
#pragma once

#include "persistent/backward.cuh"
#include "persistent/inputs.cuh"

namespace mlpgpu {

// The target and the weight of the block's only row.
template <class K>
using RowTarget = typename K::template Target<const float*>;

template <class K>
__device__ __forceinline__ RowTarget<K> row_target(const K& k, uint32_t sequence) {
    const float* const targets = k.shared + BatchMemory<K>::TARGETS + (sequence & 1) * K::TARGETS;
    return {targets, 0, LayerOf<K, K::LAST>::N_OUT, k.data.target_mean, k.data.target_scale};
}

template <class K>
__device__ __forceinline__ float* row_outputs(const K& k, uint32_t sequence) {
    return k.shared + BatchMemory<K>::OUTPUTS + (sequence & 1) * (WARP / 2);
}

template <class K>
__device__ __forceinline__ float row_weight(const K& k, uint32_t sequence) {
    return k.data.weights ? k.shared[BatchMemory<K>::WEIGHTS + (sequence & 1) * K::ROWS + blockIdx.x] : 1.0f;
}

template <class K>
__device__ __forceinline__ void output_stage(const K& k) {
    constexpr int LAST = K::LAST, L = LAST - 1, TEAM = WARP / 2;
    using T = LayerOf<K, L>;
    using Above = LayerOf<K, LAST>;
    constexpr int N = Above::N_OUT, PAIRS = T::OUT_PITCH / 2, LANES = lanes_for(PAIRS, T::TERMS);
    constexpr int OUTPUTS = ceil_div(N, LANES);  // of a lane
    const int row = blockIdx.x, pair = compute_thread() / LANES, unit = 2 * pair, lane = threadIdx.x % LANES;
    const int warp = compute_thread() / WARP, rank = threadIdx.x % TEAM;
    const float* const copy = k.shared + LayerMemory<K, LAST>::COPY;
    sync_compute_threads();  // all threads have received the copy
    float2 z = pair < PAIRS ? partial_z<L>(k, pair, lane, LANES) : make_float2(0.0f, 0.0f);
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        z.x += __shfl_xor_sync(WARP_ALL, z.x, offset);
        z.y += __shfl_xor_sync(WARP_ALL, z.y, offset);
    }
    Activated activated = {};
    if (pair < PAIRS) activated = activate<L>(k, row, unit, z);
    if (pair < PAIRS && lane == 0) send_h<L>(k, row, unit, activated.h);

    float2 w[OUTPUTS];
    float* const partials = k.shared + BatchMemory<K>::LOGITS;
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int j = lane + i * LANES;
        const float* const weights = copy + unit * Above::COPY_PITCH + j;
        w[i].x = j < N && unit < T::N_OUT ? weights[0] : 0.0f;
        w[i].y = j < N && unit + 1 < T::N_OUT ? weights[Above::COPY_PITCH] : 0.0f;
        float partial = unit < T::N_OUT ? activated.h.x * w[i].x : 0.0f;
        if (unit + 1 < T::N_OUT) partial = fmaf(activated.h.y, w[i].y, partial);
#pragma unroll
        for (int offset = LANES; offset < WARP; offset *= 2) partial += __shfl_xor_sync(WARP_ALL, partial, offset);
        if (threadIdx.x % WARP < LANES && j < N) partials[warp * TEAM + j] = partial;
    }
    sync_compute_threads();
    float logit = 0.0f;
#pragma unroll
    for (int i = 0; i < COMPUTE_WARPS; i += 2) logit += partials[(i + threadIdx.x % WARP / TEAM) * TEAM + rank];
    logit += __shfl_xor_sync(WARP_ALL, logit, TEAM);
    const int64_t element = static_cast<int64_t>(row) * N + rank;
    const bool is_there = rank < N;
    if (Above::HAS_BIAS && is_there) logit += copy[Above::N_IN * Above::COPY_PITCH + rank];
    const float y = Above::Activation::forward(logit), output = Above::Dropout::element(k.key, element, y);
    const float delta = K::Loss::template delta<HalfWarpTeam, RowTarget<K>>(
        output, is_there, is_there ? row_target(k, k.sequence)(rank) : 0.0f, N);
    const float dz = is_there ? through_activation<Above>(k, element, delta * row_weight(k, k.sequence),
                                                          Above::SAVES_Z ? logit : y)
                              : 0.0f;
    if (warp == 0 && is_there) row_outputs(k, k.sequence)[rank] = output;

    float2 dy = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int j = lane + i * LANES;
        const float other_dz = __shfl_sync(WARP_ALL, dz, j % WARP);
        if (j < N) dy.x = fmaf(other_dz, w[i].x, dy.x), dy.y = fmaf(other_dz, w[i].y, dy.y);
    }
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        dy.x += __shfl_xor_sync(WARP_ALL, dy.x, offset);
        dy.y += __shfl_xor_sync(WARP_ALL, dy.y, offset);
    }
    if (pair < PAIRS && lane == 0)
        backward_pair<L>(k, row, unit, dy, activated.saved, k.shared + LayerMemory<K, L>::DELTA + unit);

    const float next = __shfl_down_sync(WARP_ALL, dz, 1);
    if (compute_thread() < N && rank % 2 == 0) send_dz<LAST>(k, row, rank, make_float2(dz, rank + 1 < N ? next : 0.0f));
}

// Writes the row's loss and weight to `errors` (rows, 2); the producers do it one step later.
template <class K>
__device__ __forceinline__ void output_loss(const K& k, uint32_t sequence, float* errors) {
    constexpr int N = LayerOf<K, K::LAST>::N_OUT;
    if (producer_thread() >= WARP) return;
    const float weight = row_weight(k, sequence);
    const float value = weighted_row<typename K::Loss, HalfWarpTeam>(
        row_outputs(k, sequence), N, row_target(k, sequence), weight, [](int, float) {});
    if (producer_thread() == 0) errors[2 * blockIdx.x] = value, errors[2 * blockIdx.x + 1] = weight;
}

}  // namespace mlpgpu
