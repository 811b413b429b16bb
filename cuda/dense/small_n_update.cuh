// The gradient of a weight with small n, without tiles: stored, or with the optimizer's step, for many rows of the batch and
// for few.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/vectors.cuh"
#include "math/optimizers.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

// dW and db where tiles would be few or mostly padding: a block takes WEIGHT_ROWS rows of W, where the bias
// counts as one more row whose x is 1, and COLUMNS columns. Half a warp takes PER_LANE of the rows, and each of its lanes
// some rows of the shard; lanes add their sums up, and then warps do, in order.
// Grid: (blocks of k + 1, blocks of n).
struct SmallN {
    static constexpr int WEIGHT_ROWS = 8, COLUMNS = 16, PER_LANE = 4, THREADS = 256, WARPS = THREADS / WARP;
    static constexpr int LANES = WARP * PER_LANE / WEIGHT_ROWS, SLICES = WARPS * LANES;  // rows at once
    static constexpr int BATCH = 8;                                                // rows of x that a thread holds
    static constexpr int DZ_FLOATS = 1024 * 10, SHARED_BYTES = 4 * (DZ_FLOATS + PER_LANE);  // of dz at once, and padding after it
    static_assert(4 * WARPS * WEIGHT_ROWS * COLUMNS <= SHARED_BYTES, "the sums of all warps fit where dz was");
    static_assert(LANES == PER_LANE * PER_LANE, "a lane ends with the sum of one row and column");
};

// shared (rows, pitch) = some columns of dz (rows, n), copied by vectors where both are contiguous.
__device__ __forceinline__ void stage_deltas(const float* dz, int rows, int columns, int n, float* shared, int pitch) {
    using T = SmallN;
    if (pitch == n && reinterpret_cast<uintptr_t>(dz) % 16 == 0) {
        constexpr int MOST = T::DZ_FLOATS / (4 * T::THREADS);
        const int size = rows * n;
        float4 values[MOST];
#pragma unroll
        for (int i = 0; i < MOST; ++i) values[i] = load_row(dz, size, 4 * (threadIdx.x + i * T::THREADS), true);
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const int offset = 4 * (threadIdx.x + i * T::THREADS);
            if (offset < size) *reinterpret_cast<float4*>(shared + offset) = values[i];
        }
        return;
    }
    const int stride = T::THREADS / columns, column = threadIdx.x % columns, first = threadIdx.x / columns;
#pragma unroll 8
    for (int r = first < stride ? first : rows; r < rows; r += stride)
        shared[r * pitch + column] = dz[static_cast<int64_t>(r) * n + column];
}

// What becomes of the sums of a weight (k, n) and its bias, row k, which may be null: a step of the optimizer.
template <class Rule>
struct SmallNStep {
    using Parameter = InPlace<BiasRule<Rule>>;
    using Loaded = typename Parameter::Loaded;
    const Step* step;
    const double* totals;
    float *weight, *bias, *weight_slots, *bias_slots;
    int64_t size;
    int k, n;
    double read_totals[2];

    __device__ __forceinline__ bool has_bias() const { return bias; }
    __device__ __forceinline__ Parameter parameter(int row, float scale) const {
        const float* const rates = schedule + step->run * RATES_PER_STEP;
        const Parameter of_weight = {weight, weight_slots, size, n, scale, rates};
        const Parameter of_bias = {bias, bias_slots, size, n, scale, rates};
        return row < k ? of_weight : of_bias;
    }
    // Before the launch before has ended.
    __device__ __forceinline__ Loaded load(int row, int column) const {
        return parameter(row, 0.0f).load(row < k ? row : 0, column);
    }
    // After it has: the division comes later, when they have arrived.
    __device__ __forceinline__ void read() { read_totals[0] = totals[0], read_totals[1] = totals[1]; }
    __device__ __forceinline__ void put(int row, int column, float sum, const Loaded& loaded) const {
        if (row < k) sum = penalized<Rule>(sum, loaded.w);
        const Parameter of = parameter(row, static_cast<float>(inverse_weight(read_totals)));
        of.put(row < k ? row : 0, column, of.finish(sum, loaded));
    }
};

// The same: they are stored.
struct SmallNGradient {
    struct Loaded {};
    float *dw, *db;
    int k, n;

    __device__ __forceinline__ bool has_bias() const { return db; }
    __device__ __forceinline__ Loaded load(int, int) const { return {}; }
    __device__ __forceinline__ void read() const {}
    __device__ __forceinline__ void put(int row, int column, float sum, Loaded) const {
        (row < k ? dw + static_cast<int64_t>(row) * n : db)[column] = sum;
    }
};

// What block (across, down) of a layer's grid does; End is one of those.
template <class End>
__device__ __forceinline__ void small_n_block(int across, int down, End end, const Step* step, int shard, int shards,
                                              const float* x, const int* order, const float* dz, int k, int n) {
    using T = SmallN;
    constexpr int GROUPS = T::COLUMNS / T::PER_LANE;  // of columns
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, slice = warp * T::LANES + lane % T::LANES;
    const int first_row = across * T::WEIGHT_ROWS + lane / T::LANES * T::PER_LANE, n0 = down * T::COLUMNS;

    // What the first threads read of the parameters that they update at the end is loaded at the beginning.
    const int row = across * T::WEIGHT_ROWS + threadIdx.x / T::COLUMNS, column = n0 + threadIdx.x % T::COLUMNS;
    const bool has_sum =
        threadIdx.x < T::WEIGHT_ROWS * T::COLUMNS && column < n && (row < k || (row == k && end.has_bias()));
    typename End::Loaded loaded = {};
    if (has_sum) loaded = end.load(row, column);

    const Rows rows = shard_rows(step, shard, shards);
    const float* const from = first_input_row(rows, x, order, k);
    const int* const indices = row_indices(rows, order);
    const bool vectored = k % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
    if (!vectored) pdl_wait_and_trigger();  // single floats are read through the first-level cache
    // The pitch is no multiple of 4, so that 16 rows begin in different banks.
    const int columns = min(T::COLUMNS, n - n0), pitch = columns + (columns % 4 == 0);
    const int most = min(T::BATCH * T::SLICES, T::DZ_FLOATS / pitch / T::SLICES * T::SLICES);
    const float* const of_shard = dz + static_cast<int64_t>(rows.first) * n + n0;
    float sums[GROUPS][T::PER_LANE * T::PER_LANE] = {};
    for (int row0 = 0; row0 < rows.count; row0 += most) {
        const int staged = min(most, rows.count - row0);
        if (row0 > 0) __syncthreads();
        float values[T::BATCH][T::PER_LANE];
#pragma unroll
        for (int i = 0; i < T::BATCH; ++i) {
            const int r = min(slice + i * T::SLICES, staged - 1);  // rows beyond the last repeat it
            const int64_t stored = indices ? indices[row0 + r] : row0 + r;
            unpack(load_row(from + stored * k, k, first_row, vectored), values[i]);
        }
        pdl_wait_and_trigger();
        end.read();
        stage_deltas(of_shard + static_cast<int64_t>(row0) * n, staged, columns, n, shared, pitch);
        __syncthreads();
        if (first_row <= k && k < first_row + T::PER_LANE) {
#pragma unroll
            for (int i = 0; i < T::BATCH; ++i)
#pragma unroll
                for (int q = 0; q < T::PER_LANE; ++q)
                    if (first_row + q == k) values[i][q] = 1.0f;
        }
#pragma unroll
        for (int i = 0; i < T::BATCH; ++i) {
            const int r = slice + i * T::SLICES;
            if (r >= staged) break;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if (group * T::PER_LANE >= columns) break;
#pragma unroll
                for (int j = 0; j < T::PER_LANE; ++j) {  // also of columns beyond n, whose sums are not used
                    const float delta = shared[r * pitch + group * T::PER_LANE + j];
                    float* const column_sums = sums[group] + j * T::PER_LANE;
#pragma unroll
                    for (int q = 0; q < T::PER_LANE; ++q) column_sums[q] = fmaf(values[i][q], delta, column_sums[q]);
                }
            }
        }
    }
    if (rows.count <= 0) pdl_wait_and_trigger();
    __syncthreads();
    const int half_lane = lane % T::LANES, summed_row = lane / T::LANES * T::PER_LANE + half_lane % T::PER_LANE;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        if (group * T::PER_LANE >= columns) break;
        const float sum = sum_to_lanes(sums[group]);
        shared[(warp * T::WEIGHT_ROWS + summed_row) * T::COLUMNS + group * T::PER_LANE + half_lane / T::PER_LANE] = sum;
    }
    __syncthreads();
    if (!has_sum) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < T::WARPS; ++i) sum += shared[i * T::WEIGHT_ROWS * T::COLUMNS + threadIdx.x];
    end.put(row, column, sum, loaded);
}

template <class Rule>
__device__ __forceinline__ void dense_backward_update_small_n(const Step* step, int shard, int shards, const float* x,
                                                             const int* order, const float* dz, const double* totals,
                                                             float* weight, float* bias, float* weight_slots,
                                                             float* bias_slots, int64_t size, int k, int n) {
    const SmallNStep<Rule> end = {step, totals, weight, bias, weight_slots, bias_slots, size, k, n, {}};
    small_n_block(blockIdx.x, blockIdx.y, end, step, shard, shards, x, order, dz, k, n);
}

// dense_backward_weight (dense/dense.cuh), with the grid of the update.
__device__ __forceinline__ void dense_backward_weight_small_n(const Step* step, int shard, int shards, const float* x,
                                                              const int* order, const float* dz, float* dw, float* db,
                                                              int k, int n) {
    const SmallNGradient end = {dw, db, k, n};
    small_n_block(blockIdx.x, blockIdx.y, end, step, shard, shards, x, order, dz, k, n);
}

// The same by few rows of the batch: a thread has a row of W. Neighbours read neighbours of x, BATCH rows of it at once, and
// dz, a few numbers for each row, lies in shared memory. So every sum is one chain over the rows.
struct FewColumns {
    static constexpr int THREADS = 64, COLUMNS = 16, BATCH = 16, STAGED_ROWS = 64, GROUP = 4;
    static constexpr int SHARED_BYTES = 4 * (STAGED_ROWS + 1) * COLUMNS;  // dz, and behind it what unused sums read
    static_assert(STAGED_ROWS % BATCH == 0 && COLUMNS % GROUP == 0 && THREADS >= COLUMNS, "");
};

// dense_backward_update (dense/update.cuh) of a weight of at most COLUMNS columns.
// Grid: (blocks of k).
template <class Rule>
__device__ __forceinline__ void dense_backward_update_few_columns(const Step* step, int shard, int shards, const float* x,
                                                                  const int* order, const float* dz,
                                                                  const double* totals, float* weight, float* bias,
                                                                  float* weight_slots, float* bias_slots, int64_t size,
                                                                  int k, int n) {
    using T = FewColumns;
    using Weight = InPlace<Rule>;
    SHARED(float, shared);
    pdl_wait_and_trigger();
    const Rows rows = shard_rows(step, shard, shards);
    const int* const indices = row_indices(rows, order);
    const int row = blockIdx.x * T::THREADS + threadIdx.x, read_row = min(row, k - 1);
    const float* const of_row = first_input_row(rows, x, order, k) + read_row;
    const float* const deltas = dz + static_cast<int64_t>(rows.first) * n;
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const rates = schedule + step->run * RATES_PER_STEP;
    const Weight of_weight = {weight, weight_slots, size, n, scale, rates};
    typename Weight::Loaded loaded[T::COLUMNS];
#pragma unroll
    for (int j = 0; j < T::COLUMNS; ++j)
        if (j < n) loaded[j] = of_weight.load(read_row, j);

    float sums[T::COLUMNS] = {}, of_column = 0.0f;
    for (int row0 = 0; row0 < rows.count; row0 += T::STAGED_ROWS) {
        const int staged = min(T::STAGED_ROWS, rows.count - row0);
        if (row0 > 0) __syncthreads();
        for (int i = threadIdx.x; i < staged * n; i += T::THREADS) shared[i] = deltas[static_cast<int64_t>(row0) * n + i];
        __syncthreads();
        for (int first = 0; first < staged; first += T::BATCH) {
            float values[T::BATCH];
#pragma unroll
            for (int i = 0; i < T::BATCH; ++i) {
                const int r = row0 + min(first + i, staged - 1);
                values[i] = of_row[static_cast<int64_t>(indices ? indices[r] : r) * k];
            }
#pragma unroll
            for (int i = 0; i < T::BATCH; ++i) {
                if (first + i >= staged) break;
                const float* const delta = shared + (first + i) * n;
                if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < n) of_column += delta[threadIdx.x];
#pragma unroll
                for (int group = 0; group < T::COLUMNS; group += T::GROUP) {
                    if (group >= n) break;
#pragma unroll
                    for (int j = group; j < group + T::GROUP; ++j) sums[j] = fmaf(values[i], delta[j], sums[j]);
                }
            }
        }
    }
    if (row < k) {
#pragma unroll
        for (int j = 0; j < T::COLUMNS; ++j)
            if (j < n) of_weight.put(row, j, of_weight.finish(sums[j], loaded[j]));
    }
    if (bias && blockIdx.x == 0 && static_cast<int>(threadIdx.x) < n)
        InPlace<BiasRule<Rule>>{bias, bias_slots, size, n, scale, rates}(0, threadIdx.x, of_column);
}

}  // namespace mlpgpu
