// A layer's dropout of what a block has just stored, at the end of a product.
#pragma once

#include "common/integers.cuh"
#include "common/step.cuh"
#include "math/dropout.cuh"

namespace mlpgpu {

// Goes once more through the block's tile of a product over the rows of a shard, which have n columns: value = load(offset),
// then put(offset, value, factor) with what the dropout multiplies by. Neighbouring threads have neighbouring elements, of which
// each reads several before it writes the first. Which ones are kept lies in the shared memory where the product had its slices,
// so that a block of half words is drawn once, wherever a row begins in it. All threads of the block call this when they have
// stored their elements. What the product knew is found anew, since it has no registers to keep it.
template <class T, class Load, class Put>
__device__ __forceinline__ void drop_tile(const LayerDropout& dropout, const Step* step, int shard, int shards, int n,
                                          const Load& load, const Put& put) {
    constexpr int BLOCKS = T::N / DROPOUT_BLOCK + 1;  // that a row of the tile has elements of, at most
    constexpr int ELEMENTS = T::M * T::N / T::THREADS, BATCH = ELEMENTS < 8 ? ELEMENTS : 8;
    static_assert(T::N % DROPOUT_BLOCK == 0 && T::M * T::N <= T::SHARED_BYTES && ELEMENTS % BATCH == 0);
    SHARED(unsigned char, kept);  // (M, N)
    __syncthreads();  // all elements are stored, and nobody reads slices any more
    const Rows of_shard = shard_rows(step, shard, shards);
    const int row0 = blockIdx.x * T::M, column0 = blockIdx.y * T::N;
    const int rows = min(T::M, of_shard.count - row0), columns = min(T::N, n - column0);
    const int64_t place = static_cast<int64_t>(of_shard.first + row0) * n + column0;  // of the tile's first element
    const auto each = [&](int start, const auto& visit) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int element = threadIdx.x + (start + i) * T::THREADS, row = element / T::N, column = element % T::N;
            if (row < rows && column < columns) visit(i, place + static_cast<int64_t>(row) * n + column, element);
        }
    };
    decltype(load(int64_t{})) loaded[BATCH];
    const auto load_batch = [&](int start) {
        each(start, [&](int i, int64_t offset, int) { loaded[i] = load(offset); });
    };

    load_batch(0);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * BLOCKS; i += T::THREADS) {
        const int row = i / BLOCKS;
        const int64_t first = place + static_cast<int64_t>(row) * n, block = first / DROPOUT_BLOCK + i % BLOCKS;
        const int column = static_cast<int>(block * DROPOUT_BLOCK - first);  // of the block's first element
        if (column >= columns) continue;
        const DropoutWords drawn = dropout_words(dropout.seed, step->number, dropout.layer, block);
#pragma unroll
        for (int lane = 0; lane < DROPOUT_BLOCK; ++lane)
            if (column + lane >= 0 && column + lane < columns)
                kept[row * T::N + column + lane] = drawn[lane] >= dropout.least;
    }
    __syncthreads();
#pragma unroll 1
    for (int start = 0; start < ELEMENTS; start += BATCH) {
        if (start > 0) load_batch(start);
        each(start, [&](int i, int64_t offset, int element) {
            put(offset, loaded[i], kept[element] ? dropout.keep : 0.0f);
        });
    }
}

}  // namespace mlpgpu
