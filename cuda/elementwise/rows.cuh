// Kernels that go through the rows of a shard element by element: zero, gather, standardize, dropout and
// the derivative of an activation.  Grid: any, of one dimension.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/step.cuh"
#include "common/vectors.cuh"
#include "gemm/operand_formats.cuh"
#include "math/activations.cuh"
#include "math/dropout.cuh"

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

// y = x · mask · keep. In the backward pass x is a delta, and y = x · mask · keep ∘ f'(saved) unless `saved` is null. Half word
// (row in batch · n + column) of the layer's step decides (math/dropout.cuh), so that nothing is stored between the passes. The
// kernel stores y as floats, as `component_count` components of bfloat16, or as both: the form that nobody reads is null.
// Components have rows of padding behind the shard's, which become 0.
template <class Activation>
__device__ __forceinline__ void dropout(const Step* step, int shard, int shards, const float* x, const float* saved, float* y,
                                        uint16_t* components, int64_t component_stride, int component_count, int n,
                                        uint64_t seed, int layer, uint32_t least, float keep) {
    pdl_wait_and_trigger();
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, end = first + static_cast<int64_t>(rows.count) * n;
    const bool is_vectored = n % 4 == 0;  // else a vector may belong to two rows, and a shard's ends may lie inside one
    const int pitch = padded_columns(n);
    // Four elements; `lane` is the number of the first one in its block of half words.
    const auto drop_four = [&](int64_t place, const DropoutWords& drawn, int lane) {
        const auto inside = [&](int q) { return place + q >= first && place + q < end; };
        if (place + 4 <= first || place >= end) return;
        float of[4], slope[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        const auto load = [&](const float* from, float (&to)[4]) {
            if (is_vectored) return load_four(from + place, to);
#pragma unroll
            for (int q = 0; q < 4; ++q) to[q] = inside(q) ? from[place + q] : 0.0f;
        };
        load(x, of);
        if (saved) {
            load(saved, slope);
#pragma unroll
            for (int q = 0; q < 4; ++q) slope[q] = Activation::derivative(slope[q]);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) of[q] = keep_or_drop(drawn[lane + q], least, keep, of[q]) * slope[q];
        if (y && is_vectored) store_four(y + place, of);
#pragma unroll
        for (int q = 0; q < 4; ++q)
            if (y && !is_vectored && inside(q)) y[place + q] = of[q];
        if (!components) return;
        const float2 pairs[2] = {make_float2(of[0], of[1]), make_float2(of[2], of[3])};
        unsigned split[MOST_COMPONENTS][2];
        split_to_bfloats(pairs, component_count, split);
        const int64_t in_shard = place - first;
        int64_t row = 0, column = in_shard;  // the shard's first row may begin behind the first element
        if (in_shard >= 0) {
            row = end - first <= 0x7fffffff ? static_cast<unsigned>(in_shard) / static_cast<unsigned>(n) : in_shard / n;
            column -= row * n;
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
            for (int p = 0; p < MOST_COMPONENTS; ++p) {
                if (p >= component_count || (is_vectored && q > 0) || !inside(q)) continue;
                uint16_t* const to = components + p * component_stride + row * pitch + column;
                if (is_vectored)
                    *reinterpret_cast<uint2*>(to) = make_uint2(split[p][0], split[p][1]);
                else
                    *to = static_cast<uint16_t>(split[p][q / 2] >> q % 2 * 16);
            }
            if (++column == n) column = 0, ++row;
        }
    };
    // A thread takes a whole block of half words.
#pragma unroll 1
    for (int64_t block = first / DROPOUT_BLOCK + first_element(); block * DROPOUT_BLOCK < end; block += element_stride()) {
        const DropoutWords drawn = dropout_words(seed, step->number, layer, block);
#pragma unroll
        for (int lane = 0; lane < DROPOUT_BLOCK; lane += 4) drop_four(block * DROPOUT_BLOCK + lane, drawn, lane);
    }
    const int64_t padding = components ? (padded_rows(rows.count) - rows.count) * pitch : 0;
#pragma unroll 1
    for (int64_t i = first_element(); i < padding; i += element_stride())
#pragma unroll 1
        for (int p = 0; p < component_count; ++p)
            components[p * component_stride + static_cast<int64_t>(rows.count) * pitch + i] = 0;
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
