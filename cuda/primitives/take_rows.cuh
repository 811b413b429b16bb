// Rows of an array, brought together in the order of a list, also from other cards; and columns, put side by side.
#pragma once

#include "common/integers.cuh"
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

template <int BYTES>
struct WordOf;
template <>
struct WordOf<1> {
    using Type = unsigned char;
};
template <>
struct WordOf<4> {
    using Type = unsigned;
};
template <>
struct WordOf<16> {
    using Type = uint4;
};

// Rows of an epoch, brought from one card's partition of a data set, which may lie on another card. The rows are `of_batch`
// neighbours from position `first` on, as many `batch_rows` positions further, and so on, `count` in all. `places` tells for
// each position which row of the data set stands there: where it is in the partition is that less `begin`; what others have
// is left as it is. A row is words of BYTES. Grid: any, of one dimension.
template <int BYTES>
__device__ __forceinline__ void take_partition(const int* places, int64_t first, int of_batch, int batch_rows, int count, int begin,
                                           int end, const unsigned char* partition, int64_t row_bytes, unsigned char* rows) {
    using Word = typename WordOf<BYTES>::Type;
    // Another card answers after a microsecond or two: each thread asks for several words before it waits for the first.
    constexpr int DEPTH = 4;
    const int64_t words = row_bytes / BYTES;
    const int lanes = words < WARP ? power_from(static_cast<int>(words)) : WARP;  // neighbours that have one row
    const int64_t pieces = ceil_div(words, DEPTH * lanes);                          // of a row
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x / lanes, size = count * pieces;
    const bool is_short = size <= 0x7fffffff;  // a division of 64 bits takes a hundred instructions
    for (int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / lanes; i < size; i += stride) {
        const int row = is_short ? static_cast<unsigned>(i) / static_cast<unsigned>(pieces) : i / pieces;
        const int place = places[first + static_cast<int64_t>(row / of_batch) * batch_rows + row % of_batch];
        if (place < begin || place >= end) continue;
        const Word* const from = reinterpret_cast<const Word*>(partition) + (place - begin) * words;
        Word* const to = reinterpret_cast<Word*>(rows) + row * words;
        const int64_t word = (i - row * pieces) * DEPTH * lanes + threadIdx.x % lanes;
        Word held[DEPTH];
#pragma unroll
        for (int j = 0; j < DEPTH; ++j)
            if (word + j * lanes < words) held[j] = from[word + j * lanes];
#pragma unroll
        for (int j = 0; j < DEPTH; ++j)
            if (word + j * lanes < words) to[word + j * lanes] = held[j];
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
