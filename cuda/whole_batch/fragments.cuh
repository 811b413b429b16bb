// The batch's rows in memory as tensor cores take them: fragments of 16 rows and 16 columns, of the components of
// gemm/components.cuh. Whoever makes rows leaves them so, and each block that multiplies them reads them as they are.
//
// A fragment is four matrices of 8 by 8, each row 16 bytes, which load_matrices() of arch/mma.cuh gives to lanes as operands,
// or transposed: columns of rows 0 to 7, others of them, the same of rows 8 to 15. A matrix has two columns of each four, so
// that lane 4 g + t has columns 4 t to 4 t + 3 of a row in two words: as sums go over all columns, their order does not
// matter, and a lane's columns of a weight are neighbours.
//
// Fragments are (components, column tiles, row tiles, four matrices): of a column tile all rows lie together. Columns behind
// the last one are 0, and rows behind those of the batch may have anything.
#pragma once

#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/integers.cuh"
#include "dense/batch_rows.cuh"
#include "gemm/components.cuh"

namespace mlpgpu {

struct FragmentShape {
    static constexpr int STEP = ComponentsShape::STEP, WORDS = STEP * STEP / 2, LANE_WORDS = WORDS / WARP;
};

template <int COMPONENTS>
struct Fragments : FragmentShape {
    unsigned* data;
    int row_tiles, column_tiles;

    __device__ __forceinline__ Fragments(uint16_t* data, int row_tiles, int n)
        : data(reinterpret_cast<unsigned*>(data)), row_tiles(row_tiles), column_tiles(ceil_div(n, STEP)) {}

    // Words from a column tile to the next one, and from a component to the next one.
    __device__ __forceinline__ int column_stride() const { return row_tiles * WORDS; }
    __device__ __forceinline__ int64_t component_stride() const { return static_cast<int64_t>(column_tiles) * column_stride(); }

    // The words of a tile, of the first component.
    __device__ __forceinline__ unsigned* tile(int column_tile, int row_tile) const {
        return data + static_cast<int64_t>(column_tile) * column_stride() + row_tile * WORDS;
    }

    // Puts two columns of a row there, the first of an even number.
    __device__ __forceinline__ void put(int row, int column, float first, float second) const {
        unsigned words[COMPONENTS];
        split_pair(first, second, words);
        const int matrix = row % STEP / 8 * 2 + column % 4 / 2;
        unsigned* const to = tile(column / STEP, row / STEP) + (matrix * 8 + row % 8) * 4 + column % STEP / 4;
        const int64_t stride = component_stride();
#pragma unroll
        for (int p = 0; p < COMPONENTS; ++p) to[p * stride] = words[p];
    }
};

// Which of a tile's rows a lane copies, whose part is a vector of LANE_WORDS.
__device__ __forceinline__ int lane_row_of_tile() { return threadIdx.x % WARP / 16 * 8 + threadIdx.x % 8; }

// Starts to copy a lane's words of a tile, or clears their place.
__device__ __forceinline__ void copy_or_clear_words(unsigned* to, const unsigned* from, bool is_there) {
    if (is_there)
        copy_async<16>(to, from);
    else
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
}

// A tile in shared memory as an operand whose sums go over columns: B's fragments of its rows 0 to 7, then of the others.
__device__ __forceinline__ void load_rows(unsigned (&to)[4], const unsigned* tile) {
    load_matrices<false>(to, reinterpret_cast<const uint16_t*>(tile + threadIdx.x % WARP * FragmentShape::LANE_WORDS));
}

// One whose sums go over rows: A's fragment, or B's of half of its columns and of the other ones.
template <bool IS_A>
__device__ __forceinline__ void load_columns(unsigned (&to)[4], const unsigned* tile) {
    const int lane = threadIdx.x % WARP, swapped = lane / 16 * 8 + lane / 8 % 2 * 16 + lane % 8;
    load_matrices<true>(to, reinterpret_cast<const uint16_t*>(tile + (IS_A ? lane : swapped) * FragmentShape::LANE_WORDS));
}

struct BatchFragments {
    static constexpr int THREADS = 256, SHARED_BYTES = 0;
};

// fragments = the shard's rows of x (B, n), or of the data set by the order. Grid: (column tiles, blocks that share row tiles).
template <int COMPONENTS>
__device__ __forceinline__ void batch_fragments(const Step* step, int shard, int shards, const float* x, const int* order,
                                                uint16_t* fragments, int row_tiles, int n) {
    using T = FragmentShape;
    pdl_wait_and_trigger();
    const Rows rows = shard_rows(step, shard, shards);
    const float* const from = first_input_row(rows, x, order, n);
    const int* const indices = row_indices(rows, order);
    const Fragments<COMPONENTS> to(fragments, row_tiles, n);
    constexpr int PAIRS = T::STEP / 2;
    const int column = blockIdx.x * T::STEP + threadIdx.x % PAIRS * 2;
    for (int row = blockIdx.y * (BatchFragments::THREADS / PAIRS) + threadIdx.x / PAIRS; row < rows.count;
         row += gridDim.y * (BatchFragments::THREADS / PAIRS)) {
        const float* const at = from + (static_cast<int64_t>(indices ? indices[row] : row) * n + column);
        const float first = column < n ? __ldcg(at) : 0.0f, second = column + 1 < n ? __ldcg(at + 1) : 0.0f;
        to.put(row, column, first, second);
    }
}

}  // namespace mlpgpu
