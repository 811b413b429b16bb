// Kernels that go through the rows of a shard element by element: zero, gather, standardize, dropout and
// the derivative of an activation.  Grid: any, of one dimension.
#pragma once

#include "common/philox.cuh"
#include "common/step.cuh"
#include "math/activations.cuh"

namespace mlpgpu {

__device__ __forceinline__ int64_t first_element() {
    return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
}

__device__ __forceinline__ int64_t element_stride() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// x = 0, before atomics add to it.
__device__ __forceinline__ void zero(const Step* step, int shard, int shards, float* x, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    for (int64_t i = first_element(); i < size; i += element_stride()) x[first + i] = 0.0f;
}

// x[row, :] = scale · data[order[row], :].  Source is float, or unsigned char with its scale.
template <class Source>
__device__ __forceinline__ void gather(const Step* step, int shard, int shards, const int* order, const Source* data,
                                       float scale, float* x, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t size = static_cast<int64_t>(rows.count) * n;
    const bool is_short = size <= 0x7fffffff;  // a division of 64 bits takes a hundred instructions
    for (int64_t i = first_element(); i < size; i += element_stride()) {
        const int64_t row = is_short ? static_cast<unsigned>(i) / static_cast<unsigned>(n) : i / n;
        const int64_t column = i - row * n, from = order[rows.order + rows.first + row];
        x[(rows.first + row) * n + column] = scale * static_cast<float>(data[from * n + column]);
    }
}

// *found = 1 if an element of data is not finite.
__device__ __forceinline__ void find_nonfinite_rows(const Step* step, int shard, int shards, const float* data,
                                                    unsigned* found, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    bool is_finite = true;
#pragma unroll 4
    for (int64_t i = first_element(); i < size; i += element_stride())
        is_finite = is_finite && fabsf(data[first + i]) < INFINITY;
    if (!is_finite) *found = 1;
}

// y = (x - mean) / scale, column by column.
__device__ __forceinline__ void standardize(const Step* step, int shard, int shards, const float* x, const float* mean,
                                            const float* scale, float* y, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    for (int64_t i = first_element(); i < size; i += element_stride())
        y[first + i] = (x[first + i] - mean[i % n]) / scale[i % n];
}

// y = x · mask · keep, and the same for deltas in the backward pass: word (row in batch · n + column) of the layer's
// step decides (keep_or_drop), so that nothing is stored between the passes.
__device__ __forceinline__ void dropout(const Step* step, int shard, int shards, const float* x, float* y, int n,
                                        uint64_t seed, uint64_t purpose, uint64_t layer, uint64_t threshold,
                                        float keep) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, end = first + static_cast<int64_t>(rows.count) * n;
    // A thread takes a whole block of four words; a shard's ends may lie inside one.
    for (int64_t block = first / 4 + first_element(); block * 4 < end; block += element_stride()) {
        const PhiloxBlock words = philox(seed, purpose, block, step->number, layer, 0);
        for (int lane = 0; lane < 4; ++lane) {
            const int64_t element = block * 4 + lane;
            if (element >= first && element < end)
                y[element] = keep_or_drop(words.word[lane], threshold, keep, x[element]);
        }
    }
}

// dz = dy ∘ f'(saved), in place.
template <class Activation>
__device__ __forceinline__ void activation_backward(const Step* step, int shard, int shards, const float* saved,
                                                    float* dy, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    for (int64_t i = first_element(); i < size; i += element_stride())
        dy[first + i] *= Activation::derivative(saved[first + i]);
}

}  // namespace mlpgpu
