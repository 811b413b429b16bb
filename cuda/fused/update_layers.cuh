// The updates of several layers in one grid, none of which waits for another: behind a step by blocks of rows, or behind the
// last launch that makes a delta of theirs.
#pragma once

#include "dense/small_n_update.cuh"
#include "dense/split_k.cuh"
#include "dense/update.cuh"

namespace mlpgpu {

// A layer as the host describes it. Its blocks begin at block `first` of the grid, those of one part of the rows after
// another's, and of a part those of one row of tiles after another's.
struct UpdatedLayer {
    int k, n, first;
    int weight, bias;  // offsets into the parameters; -1 without a bias
    int x, dz;         // columns of outputs and of deltas before the layer's, in all rows; x is -1 if it reads `inputs`
    int parts, part;   // of the rows, and how many rows each has, where the blocks of a tile share them
};

// The arrays of such a layer.
struct UpdatedArrays {
    const float* x;
    const int* order;
    const float* dz;
    float *weight, *bias, *weight_slots, *bias_slots;
};

// Where the blocks of a tile have parts of the rows, partials and arrived as in dense/split_k.cuh. There is room for each
// block of the grid, and a tile of a layer takes that of as many blocks as it has.
struct RowParts {
    float* partials;
    unsigned* arrived;
};

// What a block of a layer's grid does, by a tile of its weight.
template <class Rule, class T>
__device__ __forceinline__ void update_block(T, int place, const UpdatedLayer& layer, const UpdatedArrays& of,
                                             const RowParts&, const Step* step, int shard, int shards,
                                             const double* totals, int64_t size) {
    const int wide = ceil_div(layer.k, T::M);
    pdl_wait_and_trigger();
    update_tile<Rule, T>(place % wide * T::M, place / wide * T::N, step, shard, shards, of.x, of.order, of.dz, totals,
                         of.weight, of.bias, of.weight_slots, of.bias_slots, size, layer.k, layer.n);
}

// The same of one part of the rows.
template <class Rule, class T>
__device__ __forceinline__ void update_block(UpdateByParts<T>, int place, const UpdatedLayer& layer,
                                             const UpdatedArrays& of, const RowParts& rows, const Step* step, int shard,
                                             int shards, const double* totals, int64_t size) {
    const int wide = ceil_div(layer.k, T::M), tiles = wide * ceil_div(layer.n, T::N);
    const int tile = place % tiles, which = place / tiles;
    float* const of_tile = rows.partials + static_cast<int64_t>(layer.first + tile * layer.parts) * UpdateByParts<T>::SIZE;
    pdl_wait_and_trigger();
    update_part_of_tile<Rule, T>(tile % wide * T::M, tile / wide * T::N, of_tile, rows.arrived + layer.first + tile, which,
                                 layer.parts, layer.part, step, shard, shards, of.x, of.order, of.dz, totals, of.weight,
                                 of.bias, of.weight_slots, of.bias_slots, size, layer.k, layer.n);
}

// The same without tiles.
template <class Rule>
__device__ __forceinline__ void update_block(SmallN, int place, const UpdatedLayer& layer, const UpdatedArrays& of,
                                             const RowParts&, const Step* step, int shard, int shards,
                                             const double* totals, int64_t size) {
    const int wide = ceil_div(layer.k + 1, SmallN::WEIGHT_ROWS);
    const SmallNStep<Rule> end = {step, totals, of.weight, of.bias, of.weight_slots, of.bias_slots, size, layer.k, layer.n, {}};
    small_n_block(place % wide, place / wide, end, step, shard, shards, of.x, of.order, of.dz, layer.k, layer.n);
}

// outputs and deltas have one array (capacity, columns) after another, which layers read as x and dz; `inputs` are rows of
// the data set by the order unless that is null.  Parameters and slots as in dense/update.cuh.  T is SmallN, a tile of a
// weight, or UpdateByParts of one, which alone has partials and arrived.
// Grid: the blocks of all layers.
template <class Rule, class T>
__device__ __forceinline__ void update_layers(const Step* step, int shard, int shards, const UpdatedLayer* described,
                                              int layer_count, const float* inputs, const int* order,
                                              const float* outputs, const float* deltas, const double* totals,
                                              float* parameters, float* slots, int64_t size, int capacity,
                                              float* partials = nullptr, unsigned* arrived = nullptr) {
    const int block = blockIdx.x;
    int which = 0;
    while (which + 1 < layer_count && block >= described[which + 1].first) ++which;
    const UpdatedLayer layer = described[which];
    const bool is_first = layer.x < 0, has_bias = layer.bias >= 0;
    const UpdatedArrays arrays = {
        is_first ? inputs : outputs + static_cast<int64_t>(capacity) * layer.x,
        is_first ? order : nullptr,
        deltas + static_cast<int64_t>(capacity) * layer.dz,
        parameters + layer.weight,
        has_bias ? parameters + layer.bias : nullptr,
        slots ? slots + layer.weight : nullptr,
        slots && has_bias ? slots + layer.bias : nullptr,
    };
    update_block<Rule>(T(), block - layer.first, layer, arrays, {partials, arrived}, step, shard, shards, totals, size);
}

}  // namespace mlpgpu
