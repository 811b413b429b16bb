// The update behind fused/tensor_row_step.cuh: adds up what its blocks left of the gradients, in order, moves all layers by
// it, and leaves their weights as that kernel takes them.
#pragma once

#include "fused/tensor_row_step.cuh"
#include "math/optimizers.cuh"

namespace mlpgpu {

// A layer as the host describes it.
struct LayerOfBlocks {
    int k, n;
    int weight, bias;  // offsets into the parameters; -1 without a bias
    int image;  // as TensorRowStepLevel has it
    int first;  // vectors of four before its own among one part of all layers' gradients
    int begin;  // vectors of four in `partials` before those of its own first block
    int pitch;  // vectors from block to block
    int blocks;
};

struct SumOfBlocks {
    static constexpr int THREADS = 256, WARPS = THREADS / WARP, SHARED_BYTES = 4 * 4 * THREADS;
};

// Stores the components of four neighbours of a weight (k, n) to its image. Neighbours beyond n are given as 0.
template <int COMPONENTS>
__device__ __forceinline__ void put_weights(uint16_t* image, int k, int n, int row, int column, const float (&values)[4]) {
    const int pitch = components_pitch(n);
    const Components<COMPONENTS> to = {image, pitch, padded_to_step(k) * pitch};
    to.put(row, column, values[0], values[1]);
    to.put(row, column + 2, values[2], values[3]);
}

// The layer that a vector of one part of all gradients belongs to.
__device__ __forceinline__ const LayerOfBlocks& layer_at(const LayerOfBlocks* described, int layer_count, int vector) {
    int which = 0;
    while (which + 1 < layer_count && vector >= described[which + 1].first) ++which;
    return described[which];
}

// A warp sums a run of the vectors that a layer's blocks have left in `partials`. Parameters and slots as in
// dense/update.cuh.
// Grid: a block for every 32 of `vectors`.
template <class Rule, int COMPONENTS>
__device__ __forceinline__ void update_from_blocks(const Step* step, const LayerOfBlocks* described, int layer_count,
                                                   const float* partials, int vectors, const double* totals,
                                                   float* parameters, float* slots, int64_t size, uint16_t* images) {
    using T = SumOfBlocks;
    SHARED(float4, sums);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int vector = blockIdx.x * WARP + lane;
    const LayerOfBlocks layer = layer_at(described, layer_count, vector);
    const int run = ceil_div(layer.blocks, T::WARPS);
    pdl_wait_and_trigger();
    float4 sum = {};
    if (vector < vectors) {
        const float4* const from = reinterpret_cast<const float4*>(partials) + layer.begin + (vector - layer.first);
#pragma unroll 8
        for (int b = warp * run; b < min(layer.blocks, (warp + 1) * run); ++b) {
            const float4 part = __ldcg(from + static_cast<int64_t>(b) * layer.pitch);
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp > 0 || vector >= vectors) return;
    for (int w = 1; w < T::WARPS; ++w) {
        const float4 part = sums[w * WARP + lane];
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    const int of_row = partial_pitch(layer.n) / 4, row = (vector - layer.first) / of_row;
    const int column = 4 * (vector - layer.first - row * of_row);
    const float gradient[4] = {sum.x, sum.y, sum.z, sum.w}, scale = mean_scale(totals);
    const float* const rates = step_rates(step);
    const auto move = [&](auto rule, int offset, int place, float g) {
        const InPlace<decltype(rule)> of = {parameters + offset, slots ? slots + offset : nullptr, size, layer.n, scale, rates};
        const auto moved = of.finish(g, of.load(place, 0));
        of.put(place, 0, moved);
        return moved.w;
    };
    if (row == layer.k) {
        for (int j = 0; j < 4; ++j)
            if (layer.bias >= 0 && column + j < layer.n) move(BiasRule<Rule>(), layer.bias + column + j, 0, gradient[j]);
        return;
    }
    float moved[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (column + j < layer.n) moved[j] = move(Rule(), layer.weight + column + j, row, gradient[j]);
    put_weights<COMPONENTS>(images + layer.image, layer.k, layer.n, row, column, moved);
}

// The weights as they are when training begins, padding included.
// Grid: (any, layers).
template <int COMPONENTS>
__device__ __forceinline__ void images_of_weights(const LayerOfBlocks* described, const float* parameters, uint16_t* images) {
    const LayerOfBlocks layer = described[blockIdx.y];
    const int quads = components_pitch(layer.n) / 4, rows = padded_to_step(layer.k);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * quads; i += gridDim.x * blockDim.x) {
        const int row = i / quads, column = 4 * (i - row * quads);
        float values[4] = {};
        for (int j = 0; j < 4; ++j)
            if (row < layer.k && column + j < layer.n)
                values[j] = parameters[layer.weight + static_cast<int64_t>(row) * layer.n + column + j];
        put_weights<COMPONENTS>(images + layer.image, layer.k, layer.n, row, column, values);
    }
}

}  // namespace mlpgpu
