// A dense layer's outputs for few rows and a large W, which take as long as reading W.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/integers.cuh"
#include "math/activations.cuh"
#include "math/dropout.cuh"
#include "dense/batch_rows.cuh"
#include "whole_batch/copies.cuh"

namespace mlpgpu {

// A block computes COLUMNS columns of z for the whole batch, of at most ROWS rows. Its warps take slices of K rows of W in
// turn, each with a ring of its own: a slice of W and the batch's x along it come by asynchronous copies STAGES - 1 slices
// ahead, so that a warp waits for memory alone. A lane has LANE_ROWS by LANE_COLUMNS elements of z and LANE_K of a slice's rows
// of W, so that a number that it reads from shared memory serves several products. Of few columns the SPLIT blocks of a
// cluster share the slices, and each finishes a part of z, whose sums it reads from the memory of all. Memory gives a tenth
// more in a second of rows of 32 columns, which are cache lines, than of halves of them, and more still of 64 columns. Rows of
// so many are copied by vectors wherever they begin, each behind its place by its lead; of halves that would take more memory.
template <int ROWS_, int COLUMNS_>
struct WholeBatchForward {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, K = 256 / COLUMNS, WARPS = ROWS > 16 ? 8 : 16, THREADS = WARPS * WARP;
    static constexpr int STAGES = ROWS == 16 && COLUMNS < 64 ? 3 : 4;  // whose bytes a block may have on every card since sm_80
    // Rows and columns of z, that a lane adds up along its rows of W.
    static constexpr int LANE_ROWS = smallest(ROWS, 8), LANE_COLUMNS = largest(ROWS / 4, 2);
    static constexpr int ROW_LANES = ROWS / LANE_ROWS, COLUMN_LANES = COLUMNS / LANE_COLUMNS;
    static constexpr int LANES = ROW_LANES * COLUMN_LANES, LANE_K = K / (WARP / LANES);  // lanes of all z; rows of W of a lane
    static constexpr int AT_ONCE = ROWS > 4 ? 2 : 4;  // of a lane's rows of W, that it has in registers
    static constexpr bool MAY_HAVE_LEADS = COLUMNS > 16;
    static constexpr int STAGE = K * (MAY_HAVE_LEADS ? COLUMNS + 4 : COLUMNS) + ROWS * K;
    static constexpr int SHARED_BYTES = 4 * WARPS * STAGES * STAGE;
    static_assert(LANE_K == 4, "a lane reads x along its rows of W as a vector");
    static_assert(WARPS * ROWS * COLUMNS <= WARPS * STAGES * STAGE, "in the end the warps' sums lie where the slices were");
};

// A warp's slices of W, every so many-th one from its first on, which it copies one after another. A pointer advances with
// them, since addresses made anew are a third of all instructions. Without IS_VECTORED rows of W begin between vectors.
template <class T, bool IS_VECTORED>
struct WeightSlices {
    static constexpr bool HAS_LEADS = T::MAY_HAVE_LEADS && !IS_VECTORED, BY_VECTORS = T::MAY_HAVE_LEADS || IS_VECTORED;
    static constexpr int PITCH = HAS_LEADS ? T::COLUMNS + 4 : T::COLUMNS;
    TileCopies<T::COLUMNS> copies;
    const float *next, *next_end;  // the lane's first number of the next slice, and what a row's vectors end with
    int left, left_of_end;         // columns from there on
    int rows, n, apart;            // rows from the slice's first one on; how many rows lie between slices

    __device__ __forceinline__ WeightSlices(const float* w, int first_row, int apart, int n0, int k, int n)
        : copies(BY_VECTORS), next(w + static_cast<int64_t>(first_row + copies.row) * n + n0 + copies.column),
          next_end(w + static_cast<int64_t>(first_row + threadIdx.x % WARP) * n + n0 + T::COLUMNS),
          left(n - n0 - copies.column), left_of_end(n - n0 - T::COLUMNS), rows(k - first_row), n(n), apart(apart) {}

    __device__ __forceinline__ void copy(float* to, const float* number, int left_there) const {
        HAS_LEADS ? copy_vector_or_clear(to, number, left_there) : copies.copy(to, number, left_there);
    }

    // Starts to copy the next slice; rows that there are not become 0.
    __device__ __forceinline__ void fetch(float* slice) {
        copies.template each_row<T::K>([&](int, int behind) {
            const int row = copies.row + behind;
            copy(slice + row * PITCH + copies.column, next + behind * n, row < rows ? left : -4);
        });
        const int row = threadIdx.x % WARP;
        if (HAS_LEADS && row < T::K) copy(slice + row * PITCH + T::COLUMNS, next_end, row < rows ? left_of_end : -4);
        next += static_cast<int64_t>(apart) * n, next_end += static_cast<int64_t>(apart) * n, rows -= apart;
    }
};

// Adds up the products of a warp's slices: z (LANE_ROWS, LANE_COLUMNS) of each lane.
template <class T, int SPLIT, bool IS_VECTORED>
__device__ __forceinline__ void add_slices(const Rows& rows, const float* x, const int* indices, const float* w, int n0, int k,
                                           int n, float* ring, float (&sums)[T::LANE_ROWS][T::LANE_COLUMNS]) {
    using Slices = WeightSlices<T, IS_VECTORED>;
    constexpr int APART = SPLIT * T::WARPS * T::K;  // rows between slices
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_row = (cluster_rank<SPLIT>() * T::WARPS + warp) * T::K;
    Slices slices(w, first_row, APART, n0, k, n);
    // Floats that are copied one by one pass through the first-level cache, which may hold what earlier launches left.
    if (!Slices::BY_VECTORS) pdl_wait_and_trigger();
#pragma unroll
    for (int ahead = 0; ahead < T::STAGES - 1; ++ahead) slices.fetch(ring + ahead * T::STAGE);
    if (Slices::BY_VECTORS) pdl_wait_and_trigger();

    const TileCopies<T::K> x_copies(is_vectored(x, k));
    const float* copied_x[ceil_div(T::ROWS, TileCopies<T::K>::PAIR_ROWS)];
    x_copies.template each_row<T::ROWS>([&](int i, int behind) {
        const int r = x_copies.row + behind < rows.count ? x_copies.row + behind : 0;
        copied_x[i] = x + static_cast<int64_t>(indices ? indices[r] : r) * k + first_row + x_copies.column;
    });
    // Vectors of rows that lanes read at once lie in different banks: four rows of 8 do so by themselves.
    const auto place_of_x = [](int r, int vector) {
        return r * T::K + 4 * (T::K > 8 ? vector ^ r % T::ROW_LANES / 2 * 2 : vector);
    };
    const int place = T::K * Slices::PITCH + place_of_x(x_copies.row, x_copies.column / 4) + x_copies.column % 4;
    int left_of_x = k - first_row - x_copies.column;
    const auto fetch_x = [&](float* slice) {
        x_copies.template each_row<T::ROWS>([&](int i, int behind) {
            if (x_copies.row + behind >= rows.count) return;  // what lies there gives sums that are not stored
            x_copies.copy(slice + place + behind * T::K, copied_x[i], left_of_x);
            copied_x[i] += APART;
        });
        left_of_x -= APART;
    };
#pragma unroll
    for (int ahead = 0; ahead < T::STAGES - 1; ++ahead) {
        fetch_x(ring + ahead * T::STAGE);
        commit_copies();
    }

    const int part = lane / T::LANES, lane_row = lane % T::ROW_LANES;
    const int lane_column = lane % T::LANES / T::ROW_LANES * T::LANE_COLUMNS;
    const auto read_w = [&](const float* staged_w, int row, float (&of_w)[T::LANE_COLUMNS]) {
        staged_w += row * Slices::PITCH;
        if (!Slices::HAS_LEADS) return load_neighbours(staged_w, of_w);
        staged_w += lead_of(w + n0, row, n);  // that of each fourth row, as slices and lanes have whole fours
#pragma unroll
        for (int q = 0; q < T::LANE_COLUMNS; ++q) of_w[q] = staged_w[q];
    };
    int stage = 0;
    for (int row = first_row; row < k; row += APART) {
        wait_copies<T::STAGES - 2>();
        __syncwarp();  // the slice is there for all lanes, and all have read the one before
        float* const freed = ring + (stage == 0 ? T::STAGES - 1 : stage - 1) * T::STAGE;
        slices.fetch(freed);
        fetch_x(freed);
        commit_copies();
        const float* const staged_w = ring + stage * T::STAGE + part * T::LANE_K * Slices::PITCH + lane_column;
        const float* const staged_x = ring + stage * T::STAGE + T::K * Slices::PITCH + place_of_x(lane_row, part);
#pragma unroll 1  // registers have room for AT_ONCE
        for (int first = 0; first < T::LANE_K; first += T::AT_ONCE) {
            float of_w[T::AT_ONCE][T::LANE_COLUMNS];
#pragma unroll
            for (int e = 0; e < T::AT_ONCE; ++e) read_w(staged_w, first + e, of_w[e]);
#pragma unroll
            for (int i = 0; i < T::LANE_ROWS; ++i) {
                float of_x[T::AT_ONCE];
                load_neighbours(staged_x + i * T::ROW_LANES * T::K + first, of_x);
#pragma unroll
                for (int e = 0; e < T::AT_ONCE; ++e)
#pragma unroll
                    for (int q = 0; q < T::LANE_COLUMNS; ++q) sums[i][q] = fmaf(of_x[e], of_w[e][q], sums[i][q]);
            }
        }
        stage = stage == T::STAGES - 1 ? 0 : stage + 1;
    }
    wait_copies();
}

// z = x W + b, y = f(z), f being the activation of this number; x (B, k), or the data set by the order. z is null where f'
// takes y; unless `dropped` is null it receives the dropout of y. An element's sum follows a fixed order, which is not that
// of gemm/simt.cuh. Grid: (SPLIT blocks for each column tile).
template <class T, int SPLIT>
__device__ __forceinline__ void dense_forward_whole_batch(const Step* step, int shard, int shards, const float* x,
                                                          const int* order, const float* w, const float* b, float* z,
                                                          float* y, float* dropped, int k, int n, int activation,
                                                          uint64_t seed, int layer, uint32_t least, float keep) {
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n0 = blockIdx.x / SPLIT * T::COLUMNS;
    const Rows rows = shard_rows(step, shard, shards);
    const float* const from = first_input_row(rows, x, order, k);
    const int* const indices = row_indices(rows, order);
    float* const ring = shared + warp * T::STAGES * T::STAGE;
    float sums[T::LANE_ROWS][T::LANE_COLUMNS] = {};
    is_vectored(w, n) ? add_slices<T, SPLIT, true>(rows, from, indices, w, n0, k, n, ring, sums)
                      : add_slices<T, SPLIT, false>(rows, from, indices, w, n0, k, n, ring, sums);

    const int part = lane / T::LANES, lane_row = lane % T::ROW_LANES;
    const int lane_column = lane % T::LANES / T::ROW_LANES * T::LANE_COLUMNS;
    __syncthreads();  // the sums take the place of the slices
#pragma unroll
    for (int i = 0; i < T::LANE_ROWS; ++i)
#pragma unroll
        for (int q = 0; q < T::LANE_COLUMNS; ++q) {
            float sum = sums[i][q];
#pragma unroll
            for (int offset = T::LANES; offset < WARP; offset *= 2) sum += __shfl_xor_sync(WARP_ALL, sum, offset);
            const int row = warp * T::ROWS + i * T::ROW_LANES + lane_row;
            if (part == 0) shared[row * T::COLUMNS + lane_column + q] = sum;
        }
    __syncthreads();
    const auto finish = [&](int element, float sum) {
        const int row = element / T::COLUMNS, column = n0 + element % T::COLUMNS;
        if (row >= rows.count || column >= n) return;
        float value[1] = {sum + (b ? b[column] : 0.0f)};
        const int64_t offset = static_cast<int64_t>(rows.first + row) * n + column;
        if (z) z[offset] = value[0];
        Activations::forwards(activation, value);
        y[offset] = value[0];
        if (dropped) dropped[offset] = LayerDropout{seed, layer, least, keep}(step->number, offset, value[0]);
    };
    for (int element = threadIdx.x; element < T::ROWS * T::COLUMNS; element += T::THREADS) {
        float sum = shared[element];
#pragma unroll
        for (int other = 1; other < T::WARPS; ++other) sum += shared[other * T::ROWS * T::COLUMNS + element];
        if (SPLIT == 1)
            finish(element, sum);
        else
            shared[element] = sum;
    }
    if constexpr (SPLIT > 1) {
        constexpr int PART = T::ROWS * T::COLUMNS / SPLIT;
        cluster_synchronize<SPLIT>();
        for (int i = threadIdx.x; i < PART; i += T::THREADS) {
            const int element = cluster_rank<SPLIT>() * PART + i;
            float sum = 0.0f;
#pragma unroll
            for (int block = 0; block < SPLIT; ++block)
                sum += load_number_of_block<SPLIT>(shared_address(shared + element), block);
            finish(element, sum);
        }
        cluster_synchronize<SPLIT>();  // others still read this block's sums
    }
}

}  // namespace mlpgpu
