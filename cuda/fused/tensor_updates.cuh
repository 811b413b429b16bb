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

// Adds up a tile's columns of dz, from `first` on, and moves their biases. Each block of the cluster adds up a run of the rows,
// by vectors of eight columns, so that neighbouring threads read whole cache lines, and moves the biases of its columns.
template <class Product, class Step>
__device__ __forceinline__ void move_bias(const MovedLayer& layer, int first, int64_t component_stride, int rows, const Step& of_bias) {
    constexpr int N = Product::Tile::N, BLOCKS = Product::BLOCKS, OCTETS = N / 8, LANES = 2 * WARPGROUP / OCTETS;
    constexpr int COMPONENTS = Product::Format::COMPONENTS, BATCH = 8 / COMPONENTS;  // rows of a thread in flight
    SHARED(float, shared);  // (LANES, N), then the block's sums (N)
    const int octet = threadIdx.x % OCTETS, lane = threadIdx.x / OCTETS, column = first + 8 * octet, pitch = padded_columns(layer.n);
    const int rank = cluster_rank<BLOCKS>(), end = rows * (rank + 1) / BLOCKS;
    float sum[8] = {};
    if (lane < LANES && column < pitch) {
        for (int from = rows * rank / BLOCKS + lane; from < end; from += BATCH * LANES) {
            BfloatOctet<COMPONENTS> octets[BATCH] = {};
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int row = from + i * LANES;
                if (row < end) octets[i].load(layer.dz + static_cast<int64_t>(row) * pitch + column, component_stride);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) octets[i].add_to(sum);
        }
    }
    if (lane < LANES) store_neighbours(shared + lane * N + 8 * octet, sum);
    __syncthreads();
    float* const sums = shared + LANES * N;
    if (threadIdx.x < N) {
        float total = 0.0f;
#pragma unroll
        for (int l = 0; l < LANES; ++l) total += shared[l * N + threadIdx.x];
        sums[threadIdx.x] = total;
    }
    cluster_synchronize<BLOCKS>();
    constexpr int QUADS = N / BLOCKS / 4;
    if (threadIdx.x < QUADS) {
        const int quad = rank * QUADS + threadIdx.x;
        float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const float4 part = load_of_block<BLOCKS>(shared_address(sums) + 16 * quad, block);
            all.x += part.x, all.y += part.y, all.z += part.z, all.w += part.w;
        }
        const float each[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + 4 * quad + i < layer.n) of_bias(0, first + 4 * quad + i, each[i]);
    }
    if (BLOCKS > 1) cluster_synchronize<BLOCKS>();  // others still read this block's sums
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
    move_bias<Product>(of, of_bias * T::N, padded_rows(capacity) * padded_columns(of.n), rows.count, end.of_bias());
}

}  // namespace mlpgpu
