// The updates of several layers in one grid: where a step by blocks of rows has left all that they read, none waits for another.
#pragma once

#include "common/dependent_launch.cuh"
#include "dense/update.cuh"

namespace mlpgpu {

// A layer as the host describes it. Its tiles lie one row of tiles after another from block `first` on.
struct UpdatedLayer {
    int k, n, first;
    int weight, bias;  // offsets into the parameters; -1 without a bias
    int x, dz;         // columns of y and of dz before the layer's, in all rows; x is -1 where the layer reads `inputs`
};

// y and dz have one array (capacity, columns) after another; `inputs` are rows of the data set by the order unless that is
// null.  Parameters and slots as in dense/update.cuh.
// Grid: the tiles of all layers.
template <class Rule, class T>
__device__ __forceinline__ void update_layers(const Step* step, int shard, int shards, const UpdatedLayer* described,
                                              int layer_count, const float* inputs, const int* order, const float* y,
                                              const float* dz, const double* totals, float* parameters, float* slots,
                                              int64_t size, int capacity) {
    const int block = blockIdx.x;
    int which = 0;
    while (which + 1 < layer_count && block >= described[which + 1].first) ++which;
    const UpdatedLayer layer = described[which];
    const int wide = ceil_div(layer.k, T::M), place = block - layer.first;
    const bool is_first = layer.x < 0;
    const float* const x = is_first ? inputs : y + static_cast<int64_t>(capacity) * layer.x;
    pdl_wait_and_trigger();
    update_tile<Rule, T>(place % wide * T::M, place / wide * T::N, step, shard, shards, x, is_first ? order : nullptr,
                         dz + static_cast<int64_t>(capacity) * layer.dz, totals, parameters + layer.weight,
                         layer.bias >= 0 ? parameters + layer.bias : nullptr, slots ? slots + layer.weight : nullptr,
                         slots && layer.bias >= 0 ? slots + layer.bias : nullptr, size, layer.k, layer.n);
}

}  // namespace mlpgpu
