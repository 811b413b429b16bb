// Kernels between parts of a network, which ranks have some of each (mlpgpu/plan/tensor.py): columns put beside each other
// and taken, a bias's gradient that every rank makes alike, and a dropout of some of a layer's columns. Grid: any, of one
// dimension, but for column_sums.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/step.cuh"
#include "math/dropout.cuh"
#include "math/optimizers.cuh"

namespace mlpgpu {

// Where part `part` of `count` begins among n columns (mlpgpu/plan/tensor_split.py): at a multiple of `alignment`.
__device__ __forceinline__ int part_begin(int64_t n, int part, int count, int alignment) {
    return part == count ? static_cast<int>(n) : static_cast<int>(n * part / count / alignment) * alignment;
}

// y (rows, n) from the columns of `count` parts: those of each are an array (capacity, columns), one behind the other.
__device__ __forceinline__ void join_columns(const Step* step, int shard, int shards, const float* of_parts, float* y, int n,
                                             int count, int alignment, int capacity) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t size = static_cast<int64_t>(rows.count) * n, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size; i += stride) {
        const int64_t row = rows.first + i / n;
        const int column = static_cast<int>(i % n);
        int part = static_cast<int>(static_cast<int64_t>(column) * count / n);  // or the one after it
        while (part + 1 < count && part_begin(n, part + 1, count, alignment) <= column) ++part;
        const int first = part_begin(n, part, count, alignment), end = part_begin(n, part + 1, count, alignment);
        y[row * n + column] = of_parts[static_cast<int64_t>(capacity) * first + row * (end - first) + column - first];
    }
}

// y (rows, n) = columns first … first + n - 1 of x (rows, width).
__device__ __forceinline__ void take_columns(const Step* step, int shard, int shards, const float* x, float* y, int n,
                                             int first, int width) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t size = static_cast<int64_t>(rows.count) * n, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size; i += stride) {
        const int64_t row = rows.first + i / n;
        y[row * n + i % n] = x[row * width + first + i % n];
    }
}

struct ColumnSums {
    static constexpr int THREADS = 256, ROWS = THREADS / WARP;
    static constexpr int SHARED_BYTES = 8 * THREADS;
};

// Σ dz over the rows of a shard, added up in float64 and rounded once, which is given to `finish`(column, sum). A block takes
// 32 columns, and each of its warps every eighth row.
template <class Finish>
__device__ __forceinline__ void sum_columns_of_block(const Step* step, int shard, int shards, const float* dz, int n,
                                                     const Finish& finish) {
    SHARED(double, sums);  // (warps, columns)
    const Rows rows = shard_rows(step, shard, shards);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    double sum = 0.0;
#pragma unroll 4
    for (int row = warp; row < rows.count; row += ColumnSums::ROWS)
        if (column < n) sum += dz[static_cast<int64_t>(rows.first + row) * n + column];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp != 0 || column >= n) return;
    for (int other = 1; other < ColumnSums::ROWS; ++other) sum += sums[other * WARP + lane];
    finish(column, static_cast<float>(sum));
}

// db (n,) = Σ dz over the rows of a shard.
// Grid: (n / 32, rounded up).
__device__ __forceinline__ void column_sums(const Step* step, int shard, int shards, const float* dz, float* db, int n) {
    sum_columns_of_block(step, shard, shards, dz, n, [=](int column, float sum) { db[column] = sum; });
}

// Moves a bias (n,) along that; slots (SLOTS, size).
// Grid: (n / 32, rounded up).
template <class Rule>
__device__ __forceinline__ void bias_backward_update(const Step* step, int shard, int shards, const float* dz,
                                                     const double* totals, float* bias, float* bias_slots, int64_t size,
                                                     int n) {
    pdl_wait_and_trigger();
    const InPlace<BiasRule<Rule>> update = {bias, bias_slots, size, n, mean_scale(totals), step_rates(step)};
    sum_columns_of_block(step, shard, shards, dz, n, [&](int column, float sum) { update(0, column, sum); });
}

// y (rows, n) = x · mask · keep, where x has columns `first` … of a layer of `width` columns: half word (row in batch · width +
// first + column) of the layer's step decides, as for the whole layer (elementwise/rows.cuh). A thread takes what a block of
// half words decides on.
__device__ __forceinline__ void dropout_of_part(const Step* step, int shard, int shards, const float* x, float* y, int n,
                                                int first, int width, uint64_t seed, int layer, uint32_t least, float keep) {
    const Rows rows = shard_rows(step, shard, shards);
    const int blocks_of_row = n / DROPOUT_BLOCK + 2;  // that a row may have elements of
    const int64_t size = static_cast<int64_t>(rows.count) * blocks_of_row;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size; i += stride) {
        const int64_t row = rows.first + i / blocks_of_row, begin = row * width + first;
        const int64_t block = begin / DROPOUT_BLOCK + i % blocks_of_row;
        const int64_t from = block * DROPOUT_BLOCK < begin ? begin : block * DROPOUT_BLOCK;
        const int64_t to = (block + 1) * DROPOUT_BLOCK < begin + n ? (block + 1) * DROPOUT_BLOCK : begin + n;
        if (from >= to) continue;
        const DropoutWords drawn = dropout_words(seed, step->number, layer, block);
        for (int64_t element = from; element < to; ++element) {
            const int64_t place = row * n + element - begin;
            y[place] = keep_or_drop(drawn[element], least, keep, x[place]);
        }
    }
}

}  // namespace mlpgpu
