// Rows of an array, brought together in the order of a list; and columns, put side by side.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

// y (count, width) = those rows of x (any, width) that `rows` (count,) lists, word by word. Grid: any, of one dimension.
template <class Word>
__device__ __forceinline__ void take_rows(const Word* x, const int* rows, int64_t count, int64_t width, Word* y) {
    const int64_t size = count * width, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    const bool is_short = size <= 0x7fffffff;  // a division of 64 bits takes a hundred instructions
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size; i += stride) {
        const int64_t row = is_short ? static_cast<unsigned>(i) / static_cast<unsigned>(width) : i / width;
        y[i] = x[rows[row] * width + (i - row * width)];
    }
}

// Column number `column` of y (count, width) = x (count,). Grid: any, of one dimension.
template <class Word>
__device__ __forceinline__ void put_column(const Word* x, int64_t count, int64_t width, int64_t column, Word* y) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; row < count; row += stride)
        y[row * width + column] = x[row];
}

}  // namespace mlpgpu
