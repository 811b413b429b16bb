// The updates of several layers on tensor cores in one grid, none of which waits for another: behind the launch that makes
// the last of their deltas. Blocks of their own move the biases.
#pragma once

#include "dense/tensor_update.cuh"

namespace mlpgpu {

// A layer as tensor_backward_update moves one, but for its bias, which is null without one. Its tiles are those of the weight
// (k, n) from the grid's tile `first` on, and behind them one for each T::N columns of the bias.
struct MovedLayer {
    const TensorMap* x_components;
    const TensorMap* dz_components;
    const uint16_t* dz;  // the components themselves
    float *weight, *bias;
    uint16_t* w_components;
    float *weight_slots, *bias_slots;
    int k, n, first;
};

// Adds up a block's columns of dz, from `first` on, and moves their biases. Neighbouring threads have neighbouring quads of
// columns, and each thread every LANES-th row.
template <class Product, class Step>
__device__ __forceinline__ void move_bias(const MovedLayer& layer, int first, int64_t component_stride, int rows, const Step& of_bias) {
    constexpr int QUADS = Product::Tile::N / Product::BLOCKS / 4, LANES = 2 * WARPGROUP / QUADS;
    SHARED(float, shared);
    float4* const sums = reinterpret_cast<float4*>(shared);  // (LANES, QUADS)
    const int quad = threadIdx.x % QUADS, lane = threadIdx.x / QUADS, column = first + 4 * quad, pitch = padded_columns(layer.n);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](const float4& other) { sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w; };
    if (lane < LANES && column < pitch)
#pragma unroll 8
        for (int row = lane; row < rows; row += LANES)
            add(BfloatQuad<Product::Format::COMPONENTS>(layer.dz + static_cast<int64_t>(row) * pitch + column, component_stride).value());
#pragma unroll 1
    for (int half = LANES / 2; half > 0; half /= 2) {
        if (lane >= half && lane < 2 * half) sums[(lane - half) * QUADS + quad] = sum;
        __syncthreads();
        if (lane < half) add(sums[lane * QUADS + quad]);
        __syncthreads();
    }
    const float each[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (lane == 0 && column + i < layer.n) of_bias(0, column + i, each[i]);
}

// By a Product that is a GemmClusterSplit of components without scales; a batch has at most `capacity` rows on this shard.
// Grid: Product::BLOCKS for each tile of all layers, which are in their order.
template <class Product, class Rule, class... Layers>
__device__ __forceinline__ void tensor_backward_updates(const Step* step, int shard, int shards, const double* totals,
                                                        int64_t size, int capacity, int prefetch, const Layers&... layers) {
    using T = typename Product::Tile;
    MovedLayer of;
    int tile = blockIdx.x / Product::BLOCKS;
    const auto take = [&](const MovedLayer& each) {
        if (tile >= each.first) of = each;
    };
    (take(layers), ...);
    tile -= of.first;
    const Rows rows = shard_rows(step, shard, shards);
    UpdateEpilogue<typename Product::Format, Rule, false> end = {
        {}, of.weight, of.bias, of.w_components, padded_rows(of.k) * padded_columns(of.n), of.weight_slots, of.bias_slots, size,
        nullptr, nullptr, of.n, step, totals, nullptr};
    const int of_bias = tile - ceil_div(of.k, T::M) * ceil_div(of.n, T::N);
    if (of_bias < 0) {
        end.bias = nullptr;
        Product::template multiply_tile<false, false>(of.x_components, of.dz_components, of.k, of.n, rows.count, tile, prefetch,
                                                      epilogue_of(Unscaled(), end));
        return;
    }
    pdl_wait_and_trigger();
    end.begin();
    const int first = of_bias * T::N + blockIdx.x % Product::BLOCKS * (T::N / Product::BLOCKS);
    move_bias<Product>(of, first, padded_rows(capacity) * padded_columns(of.n), rows.count, end.of_bias());
}

}  // namespace mlpgpu
