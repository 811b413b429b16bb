// Split-K products: a dense layer forward, whose partial sums another kernel adds up, and the update of a weight, whose k
// are the batch's rows.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "math/activations.cuh"
#include "gemm/warp_split.cuh"
#include "dense/update.cuh"

namespace mlpgpu {

// dense_forward split along k, for so large k and small n that there would be few tiles with much work each: each z of the
// grid takes `part` values of k and stores its sums in partials (grid z, B, n).
// Grid: (row tiles, column tiles, split-K partials).
template <class T>
__device__ __forceinline__ void dense_forward_split_k(const Step* step, int shard, int shards, const float* x,
                                                   const int* order, const float* w, float* partials, int k, int n,
                                                   int part, int capacity) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const int k_begin = blockIdx.z * part, k_end = min(k, k_begin + part);
    const Operand<true> a = {first_input_row(rows, x, order, k), rows.count, k, k, row_indices(rows, order)};
    const Operand<false> weights = {w, n, k, n};
    const int64_t first = (static_cast<int64_t>(blockIdx.z) * capacity + rows.first) * n;
    gemm_tile(T(), a, weights, m0, n0, k_begin, k_end, NoColumnSum(), StoreRows{{n}, partials + first});
}

// Adds partial sums in order, and finishes as dense_forward does. A block takes 32 neighbouring elements, and each of its
// warps a run of the partials; the sums of the runs are added in order too. Of MANY elements a thread takes all runs of one,
// in the same order.
// Grid: any, of one dimension.
struct PartSum {
    static constexpr int THREADS = 256, WARPS = THREADS / WARP;
    static constexpr int SHARED_BYTES = 4 * WARPS * WARP, MANY = 1 << 16;
};

template <class Activation>
__device__ __forceinline__ void dense_forward_sum_partials(const Step* step, int shard, int shards, const float* partials,
                                                  const float* b, float* z, float* y, const uint32_t* kept, float keep,
                                                  int n, int count, int capacity) {
    SHARED(float, shared);  // (warps, elements)
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    const int64_t pitch = static_cast<int64_t>(capacity) * n;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int run = ceil_div(count, PartSum::WARPS);
    const auto sum_of_run = [=](int which, int64_t offset) {
        float sum = 0.0f;
#pragma unroll 16
        for (int part = which * run; part < min(count, (which + 1) * run); ++part) sum += partials[part * pitch + offset];
        return sum;
    };
    const auto finish = [=](int64_t offset, float sum) {
        sum += b ? b[offset % n] : 0.0f;
        if (z) z[offset] = sum;
        sum = Activation::forward(sum);
        if (kept) {
            const KeptElements elements = {kept, keep, n};
            const int row = static_cast<int>((offset - first) / n), column = static_cast<int>(offset % n);
            sum = elements(elements.has(elements.word(row, column), column), sum);
        }
        y[offset] = sum;
    };
    if (size >= PartSum::MANY) {
        for (int64_t i = blockIdx.x * static_cast<int64_t>(PartSum::THREADS) + threadIdx.x; i < size;
             i += gridDim.x * static_cast<int64_t>(PartSum::THREADS)) {
            float sum = sum_of_run(0, first + i);
            for (int which = 1; which < PartSum::WARPS; ++which) sum += sum_of_run(which, first + i);
            finish(first + i, sum);
        }
        return;
    }
    for (int64_t start = blockIdx.x * static_cast<int64_t>(WARP); start < size;
         start += gridDim.x * static_cast<int64_t>(WARP)) {
        const int64_t offset = first + start + lane;
        const bool inside = start + lane < size;
        float sum = inside ? sum_of_run(warp, offset) : 0.0f;
        shared[threadIdx.x] = sum;
        __syncthreads();
        if (warp == 0 && inside) {
            for (int w = 1; w < PartSum::WARPS; ++w) sum += shared[w * WARP + lane];
            finish(offset, sum);
        }
        __syncthreads();
    }
}

// dense_backward_update of a weight that makes few tiles, by many rows: the blocks of a tile have parts of the rows, `part`
// each, and the last one to arrive adds their sums up, in the order of the parts, and moves the weight. partials (tiles of k,
// tiles of n, parts, SIZE) has the sums of a tile and of its columns; arrived (tiles of k, tiles of n) is 0 between launches.
// Grid: (tiles of k, tiles of n, parts).
template <class T>
struct UpdateByParts {
    static constexpr int SIZE = T::M * T::N + T::N, THREADS = T::THREADS, SHARED_BYTES = T::SHARED_BYTES;
};

// The sums of a tile over the rows from `first` to `end`, and of its columns, to of_part (SIZE,).
template <class T, class Columns>
__device__ __forceinline__ void sum_part(T, const Operand<false>& a, const Operand<false>& b, int m0, int n0, int first,
                                         int end, const Columns& columns, float* of_part) {
    gemm_tile(T(), a, b, m0, n0, first, end, columns, StoreRows{{T::N}, of_part - (static_cast<int64_t>(m0) * T::N + n0)});
}

// The same by tiles that have an element for each thread.
template <int N, int WARPS, class Columns>
__device__ __forceinline__ void sum_part(WarpSplitTile<N, WARPS>, const Operand<false>& a, const Operand<false>& b, int m0,
                                         int n0, int first, int end, const Columns& columns, float* of_part) {
    using T = WarpSplitTile<N, WARPS>;
    static_assert(T::M * T::N == T::THREADS);
    SHARED(float, shared);
    multiply_by_warps<T>(a, b, m0, n0, first, end, columns, shared);
    of_part[threadIdx.x] = sum_of_warps<T>(shared, T::M * T::N, threadIdx.x);
}

// The block of part `which` of `parts`, of the tile whose first row is m0 and first column n0: of_tile (parts, SIZE) and
// `arrived` are the tile's.
template <class Rule, class T>
__device__ __forceinline__ void update_part_of_tile(int m0, int n0, float* of_tile, unsigned* arrived, int which, int parts,
                                                    int part, const Step* step, int shard, int shards, const float* x,
                                                    const int* order, const float* dz, const double* totals,
                                                    float* weight, float* bias, float* weight_slots, float* bias_slots,
                                                    int64_t size, int k, int n) {
    constexpr int ELEMENTS = T::M * T::N, SIZE = UpdateByParts<T>::SIZE;
    SHARED(float, shared);
    const Rows rows = shard_rows(step, shard, shards);
    const Operand<false> a = {first_input_row(rows, x, order, k), k, rows.count, k, row_indices(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    float* const of_part = of_tile + which * SIZE;
    const int first = min(rows.count, which * part), end = min(rows.count, first + part);
    const auto columns = column_sum(bias ? n : 0, [=](int, int column, float sum) { of_part[ELEMENTS + column - n0] = sum; });
    sum_part(T(), a, b, m0, n0, first, end, columns, of_part);
    __syncthreads();
    if (!was_last(arrive(arrived), shared, parts)) return;

    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const rates = schedule + step->run * RATES_PER_STEP;
    const InPlace<Rule> of_weight = {weight, weight_slots, size, n, scale, rates};
    // What the rule reads of some elements of a thread is in flight while their sums are, those of four parts at once.
    constexpr int OWN = ELEMENTS > T::THREADS ? ELEMENTS / T::THREADS : 1, AT_ONCE = OWN > 4 ? 4 : OWN;
    static_assert(OWN * T::THREADS == ELEMENTS || ELEMENTS < T::THREADS);
    static_assert(OWN % AT_ONCE == 0);
#pragma unroll 1
    for (int first_element = threadIdx.x; first_element < ELEMENTS; first_element += AT_ONCE * T::THREADS) {
        typename InPlace<Rule>::Loaded loaded[AT_ONCE] = {};
        float sums_of_parts[AT_ONCE] = {};
        const auto element = [=](int own) { return first_element + own * T::THREADS; };
        const auto row = [=](int own) { return m0 + element(own) / T::N; };
        const auto column = [=](int own) { return n0 + element(own) % T::N; };
        const auto is_inside = [=](int own) { return row(own) < k && column(own) < n; };
#pragma unroll
        for (int own = 0; own < AT_ONCE; ++own)
            if (is_inside(own)) loaded[own] = of_weight.load(row(own), column(own));
#pragma unroll 4
        for (int i = 0; i < parts; ++i)
#pragma unroll
            for (int own = 0; own < AT_ONCE; ++own)
                if (is_inside(own)) sums_of_parts[own] += __ldcg(of_tile + i * SIZE + element(own));
#pragma unroll
        for (int own = 0; own < AT_ONCE; ++own)
            if (is_inside(own)) of_weight.put(row(own), column(own), of_weight.finish(sums_of_parts[own], loaded[own]));
    }
    const int column = n0 + threadIdx.x;
    if (!bias || m0 > 0 || threadIdx.x >= T::N || column >= n) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < parts; ++i) sum += __ldcg(of_tile + i * SIZE + ELEMENTS + threadIdx.x);
    InPlace<BiasRule<Rule>>{bias, bias_slots, size, n, scale, rates}(0, column, sum);
}

template <class Rule, class T>
__device__ __forceinline__ void dense_backward_update_by_parts(const Step* step, int shard, int shards, const float* x,
                                                               const int* order, const float* dz, const double* totals,
                                                               float* weight, float* bias, float* weight_slots,
                                                               float* bias_slots, int64_t size, float* partials,
                                                               unsigned* arrived, int part, int k, int n) {
    const int tile = blockIdx.x * gridDim.y + blockIdx.y, parts = gridDim.z;
    pdl_wait_and_trigger();
    update_part_of_tile<Rule, T>(blockIdx.x * T::M, blockIdx.y * T::N,
                                 partials + static_cast<int64_t>(tile) * parts * UpdateByParts<T>::SIZE, arrived + tile,
                                 blockIdx.z, parts, part, step, shard, shards, x, order, dz, totals, weight, bias,
                                 weight_slots, bias_slots, size, k, n);
}

}  // namespace mlpgpu
