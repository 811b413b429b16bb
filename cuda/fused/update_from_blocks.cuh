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
    int image;   // as TensorRowStepLevel has it
    int first;   // blocks of this kernel before the layer's own
    int begin;   // vectors of four in `partials` before those of the layer's own first block
    int pitch;   // vectors from block to block
    int blocks;  // that left a part of its gradient
    int runs;    // in which those are summed, each by a thread of another warp: a power of two
};

struct SumOfBlocks {
    static constexpr int THREADS = 256, WARPS = THREADS / WARP, SHARED_BYTES = 4 * 4 * THREADS;
};

// Stores the components of one number of a weight (k, n) to its image.
template <int COMPONENTS>
__device__ __forceinline__ void put_weight(uint16_t* image, int k, int n, int row, int column, float value) {
    const int pitch = components_pitch(n), stride = padded_to_step(k) * pitch;
    unsigned words[COMPONENTS];
    split_pair(value, 0.0f, words);
#pragma unroll
    for (int p = 0; p < COMPONENTS; ++p) image[p * stride + row * pitch + column] = static_cast<uint16_t>(words[p]);
}

// The layer that a block belongs to.
__device__ __forceinline__ const LayerOfBlocks& layer_of_block(const LayerOfBlocks* described, int layer_count) {
    int which = 0;
    while (which + 1 < layer_count && static_cast<int>(blockIdx.x) >= described[which + 1].first) ++which;
    return described[which];
}

// A thread sums a run of what a layer's blocks have left in `partials` of four neighbours; then the block's threads add up the
// runs of one number each, side by side, and move it. Parameters and slots as in dense/update.cuh.
// Grid: for each layer a block for every THREADS / runs vectors of its gradient.
template <class Rule, int COMPONENTS>
__device__ __forceinline__ void update_from_blocks(const Step* step, const LayerOfBlocks* described, int layer_count,
                                                   const float* partials, const double* totals, float* parameters,
                                                   float* slots, int64_t size, uint16_t* images) {
    using T = SumOfBlocks;
    using Bias = BiasRule<Rule>;
    constexpr int NUMBERS = 4;  // that a thread moves at most
    SHARED(float4, sums);
    const LayerOfBlocks layer = layer_of_block(described, layer_count);
    const int of_row = partial_pitch(layer.n), across = T::THREADS / layer.runs;  // vectors of the block
    const int begin = (blockIdx.x - layer.first) * across, vectors = smallest(across, (layer.k + 1) * of_row / 4 - begin);
    int offsets[NUMBERS], rows[NUMBERS], columns[NUMBERS];  // of a thread's numbers; -1 for none
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        const int place = threadIdx.x + i * T::THREADS, of_layer = 4 * begin + place;
        const int row = of_layer / of_row, column = of_layer - row * of_row, to = row < layer.k ? layer.weight : layer.bias;
        rows[i] = row, columns[i] = column;
        offsets[i] = place < 4 * vectors && column < layer.n && to >= 0 ? to + (row < layer.k ? row * layer.n : 0) + column : -1;
    }
    pdl_wait_and_trigger();
    const float* const rates = step_rates(step);
    const float scale = mean_scale(totals);
    const InPlace<Rule> of_weight = {parameters, slots, size, 0, scale, rates};
    const InPlace<Bias> of_bias = {parameters, slots, size, 0, scale, rates};
    typename InPlace<Rule>::Loaded loaded[NUMBERS];
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i)
        if (offsets[i] >= 0) loaded[i] = of_weight.load(0, offsets[i]);

    const int run = threadIdx.x / across, vector = threadIdx.x - run * across, count = ceil_div(layer.blocks, layer.runs);
    float4 sum = {};
    if (vector < vectors) {
        const float4* const from = reinterpret_cast<const float4*>(partials) + layer.begin + begin + vector;
        const int end = smallest(layer.blocks, (run + 1) * count);
#pragma unroll 8
        for (int b = run * count; b < end; ++b) {
            const float4 part = __ldcg(from + static_cast<int64_t>(b) * layer.pitch);
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();

    const float* const of_runs = reinterpret_cast<const float*>(sums);
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        if (offsets[i] < 0) continue;
        float gradient = 0.0f;
        for (int r = 0; r < layer.runs; ++r) gradient += of_runs[4 * r * across + threadIdx.x + i * T::THREADS];
        if (rows[i] == layer.k) {
            of_bias(0, offsets[i], gradient);
        } else {
            const auto moved = of_weight.finish(gradient, loaded[i]);
            of_weight.put(0, offsets[i], moved);
            put_weight<COMPONENTS>(images + layer.image, layer.k, layer.n, rows[i], columns[i], moved.w);
        }
    }
}

// The weights as they are when training begins, padding included.
// Grid: (any, layers).
template <int COMPONENTS>
__device__ __forceinline__ void images_of_weights(const LayerOfBlocks* described, const float* parameters, uint16_t* images) {
    const LayerOfBlocks layer = described[blockIdx.y];
    const int pitch = components_pitch(layer.n), rows = padded_to_step(layer.k);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * pitch; i += gridDim.x * blockDim.x) {
        const int row = i / pitch, column = i - row * pitch;
        const bool is_weight = row < layer.k && column < layer.n;
        const float value = is_weight ? parameters[layer.weight + static_cast<int64_t>(row) * layer.n + column] : 0.0f;
        put_weight<COMPONENTS>(images + layer.image, layer.k, layer.n, row, column, value);
    }
}

}  // namespace mlpgpu
