// Gradients of biases, db (n,) = Σ dz, from the components of deltas that are operands already: of up to MOST layers in one
// launch, which takes hardly longer than its bytes where a launch for each layer would wait for its last block.
//
// A block takes WIDTH columns of one layer and a run of the rows, of which each of its warps takes every eighth; a lane takes
// eight neighbouring columns, a vector of each component. Blocks leave sums over their rows, and the last one of some
// columns adds these up, in order. So a sum has the same bits whichever layers a launch has. Runs are long, since a block
// meets six barriers and two fences behind its rows.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/step.cuh"
#include "common/vectors.cuh"
#include "gemm/operand_formats.cuh"

namespace mlpgpu {

struct DeltaSums {
    static constexpr int MOST = 4, THREADS = 256, WARPS = THREADS / WARP, OF_LANE = 8, WIDTH = OF_LANE * WARP;
    static constexpr int SHARED_BYTES = 4 * WARPS * WIDTH;
};

struct SummedDelta {
    const uint16_t* components;  // (components, component_rows, n padded)
    float* db;
    int n;  // 0 of a layer that is not there
};

// The block's layer, and its first column there: blocks of the layers lie one behind another.
__device__ __forceinline__ SummedDelta delta_of_block(const SummedDelta (&deltas)[DeltaSums::MOST], int& column) {
    SummedDelta found = deltas[0];
    int block = blockIdx.x;
#pragma unroll
    for (int i = 1; i < DeltaSums::MOST; ++i) {
        const int before = ceil_div(deltas[i - 1].n, DeltaSums::WIDTH);
        if (block < before) break;
        block -= before, found = deltas[i];
    }
    column = block * DeltaSums::WIDTH;
    return found;
}

// partials (grid y, grid x, WIDTH); `arrived` (grid x) is 0 before the launch and behind it.
// Grid: (of each layer n / WIDTH, rounded up; any number of runs of the rows).
template <class Format>
__device__ __forceinline__ void sum_deltas(const Step* step, int shard, int shards, const uint16_t* dz, float* db, int n,
                                           const uint16_t* dz_1, float* db_1, int n_1, const uint16_t* dz_2, float* db_2,
                                           int n_2, const uint16_t* dz_3, float* db_3, int n_3, int component_rows,
                                           float* partials, unsigned* arrived) {
    pdl_wait_and_trigger();
    using T = DeltaSums;
    constexpr int BATCH = 8 / Format::COMPONENTS;  // rows of a lane in flight
    SHARED(float, shared);  // (warps, columns); behind their sums its first word tells whether the block was the last
    const SummedDelta deltas[T::MOST] = {{dz, db, n}, {dz_1, db_1, n_1}, {dz_2, db_2, n_2}, {dz_3, db_3, n_3}};
    int first_column;
    const SummedDelta delta = delta_of_block(deltas, first_column);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, column = first_column + T::OF_LANE * lane;
    const int pitch = padded_columns(delta.n), rows = shard_rows(step, shard, shards).count;
    const int64_t component_stride = static_cast<int64_t>(component_rows) * pitch;

    const int run = ceil_div(rows, static_cast<int>(gridDim.y));
    const int begin = blockIdx.y * run, end = column < delta.n ? min(rows, begin + run) : 0;
    const uint16_t* const from = delta.components + column;
    float sum[T::OF_LANE] = {};
    for (int first = begin + warp; first < end; first += BATCH * T::WARPS) {
        BfloatOctet<Format::COMPONENTS> octets[BATCH] = {};
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int row = first + i * T::WARPS;
            if (row < end) octets[i].load(from + static_cast<int64_t>(row) * pitch, component_stride);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) octets[i].add_to(sum);
    }

    store_neighbours(shared + warp * T::WIDTH + T::OF_LANE * lane, sum);
    __syncthreads();
    const int of_column = first_column + threadIdx.x;
    const bool has_column = of_column < delta.n;
    float* const of_columns = partials + static_cast<int64_t>(blockIdx.x) * T::WIDTH + threadIdx.x;
    const int64_t apart = static_cast<int64_t>(gridDim.x) * T::WIDTH;
    if (has_column) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < T::WARPS; ++w) total += shared[w * T::WIDTH + threadIdx.x];
        of_columns[blockIdx.y * apart] = total;
    }
    __syncthreads();
    if (!was_last(arrive(arrived + blockIdx.x), shared, gridDim.y) || !has_column) return;
    float total = 0.0f;
#pragma unroll 16
    for (int i = 0; i < static_cast<int>(gridDim.y); ++i) total += __ldcg(of_columns + i * apart);
    delta.db[of_column] = total;
}

}  // namespace mlpgpu
