// A dense layer's outputs for a small batch and a large W on tensor cores, in about the time that reading W takes.
#pragma once

#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/integers.cuh"
#include "common/vectors.cuh"
#include "math/activations.cuh"
#include "math/dropout.cuh"
#include "arch/barriers.cuh"
#include "whole_batch/copies.cuh"
#include "whole_batch/fragments.cuh"

namespace mlpgpu {

// A block computes COLUMNS columns of z for the whole batch, of at most ROWS rows, as zᵀ = Wᵀ xᵀ. Slices of K rows of W come
// to shared memory by asynchronous copies, two slices ahead, and x's fragments along a slice one ahead. Warps split W as they
// read it: each has 16 columns and some of a slice's K, so that no number of W is split twice. The SPLIT blocks of a cluster
// have every SPLIT-th slice each, and each finishes a part of z, whose sums it reads from the memory of all.
template <int ROWS_, int COMPONENTS_>
struct TensorWholeBatchForward : FragmentShape {
    static constexpr int ROWS = ROWS_, COMPONENTS = COMPONENTS_, WARPS = 8, THREADS = WARPS * WARP, ROW_TILES = ROWS / STEP;
    static constexpr int COLUMNS = 64, K = 64, STAGES = 3, GROUPS = COLUMNS / STEP, SHARES = WARPS / GROUPS;
    static constexpr int STEPS = K / STEP / SHARES;  // of 16 of k, of a warp
    static constexpr int WEIGHT_PITCH = COLUMNS + 4, WEIGHTS = K * WEIGHT_PITCH;  // a row lies behind its place by its lead
    static constexpr int INPUTS = COMPONENTS * K / STEP * ROW_TILES * WORDS;      // of x along a slice, in words
    static constexpr int SUM_PITCH = COLUMNS + 4, SUMS = ROWS * SUM_PITCH;
    static constexpr int SHARED_BYTES = 4 * (STAGES * WEIGHTS + 2 * INPUTS);
    static constexpr int BLOCKS = SHARED_BYTES <= 112 * 1024 ? 2 : 1;  // of a multiprocessor of sm_90a
    static_assert(BLOCKS * (SHARED_BYTES + 1024) <= 228 * 1024, "a block's memory has 1,024 bytes more");
    static_assert(WARPS % ROW_TILES == 0, "a warp copies the same row tile of all slices");
    static_assert(THREADS % (COLUMNS / 2) == 0, "a thread finishes the same columns of all rows");
    static_assert(4 * SHARES * SUMS <= SHARED_BYTES, "in the end the warps' sums lie where the slices were");
};

// z = x W + b, y = f(z), f being the activation of this number, of x (B, k) as fragments. z is null where f' takes y; unless
// `dropped` is null it receives the dropout of y. Unless `fragments` is null the block leaves what the next layer takes, y or
// its dropout, as fragments too. Grid: SPLIT blocks for each COLUMNS columns.
template <class T, int SPLIT>
__device__ __forceinline__ void dense_forward_tensor_whole_batch(const Step* step, int shard, int shards,
                                                                 const uint16_t* x_fragments, const float* w, const float* b,
                                                                 float* z, float* y, float* dropped, uint16_t* fragments,
                                                                 int row_tiles, int k, int n, int activation, uint64_t seed,
                                                                 int layer, uint32_t least, float keep) {
    using X = Fragments<T::COMPONENTS>;
    SHARED(float, shared);
    unsigned* const staged_x = reinterpret_cast<unsigned*>(shared + T::STAGES * T::WEIGHTS);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n0 = blockIdx.x / SPLIT * T::COLUMNS;
    const int rank = cluster_rank<SPLIT>(), count = max(0, ceil_div(ceil_div(k, T::K) - rank, SPLIT));  // of the block's slices
    const auto slice_of = [&](int i) { return (rank + i * SPLIT) * T::K; };

    constexpr int VECTORS = T::COLUMNS / 4, COPIED_ROWS = T::THREADS / VECTORS;
    const int copied_row = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS * 4, left = n - n0;
    const float* copied_w = w + static_cast<int64_t>(slice_of(0) + copied_row) * n + n0 + vector;  // of the next slice
    const float* copied_end = w + static_cast<int64_t>(slice_of(0) + threadIdx.x) * n + n0 + T::COLUMNS;
    const int64_t slice_stride = static_cast<int64_t>(SPLIT * T::K) * n;
    const bool has_end = threadIdx.x < T::K && lead_of(w + n0, threadIdx.x, n) > 0;
    const auto fetch_w = [&](int i, int stage) {
        if (i >= count) return;
        float* const to = shared + stage * T::WEIGHTS;
        const int rows_left = k - slice_of(i);
        const auto fetch = [&](auto is_whole) {
            constexpr bool IS_WHOLE = decltype(is_whole)::value;
#pragma unroll
            for (int row = 0; row < T::K; row += COPIED_ROWS)
                copy_vector_of<IS_WHOLE>(to + (row + copied_row) * T::WEIGHT_PITCH + vector, copied_w + row * n,
                                         row + copied_row < rows_left ? left - vector : -4);
            if (has_end)
                copy_vector_of<IS_WHOLE>(to + threadIdx.x * T::WEIGHT_PITCH + T::COLUMNS, copied_end,
                                         static_cast<int>(threadIdx.x) < rows_left ? left - T::COLUMNS : -4);
        };
        rows_left >= T::K && left >= T::COLUMNS + 4 ? fetch(Is<true>()) : fetch(Is<false>());
        copied_w += slice_stride, copied_end += slice_stride;
    };
#pragma unroll
    for (int ahead = 0; ahead < T::STAGES - 1; ++ahead) {
        fetch_w(ahead, ahead);
        commit_copies();
    }
    pdl_wait_and_trigger();

    const Rows rows = shard_rows(step, shard, shards);
    const X x(const_cast<uint16_t*>(x_fragments), row_tiles, k);
    // A warp copies a row tile of every COLUMN_STEP-th column tile of a slice.
    constexpr int COLUMN_STEP = T::WARPS / T::ROW_TILES, SLICE_COLUMNS = T::K / T::STEP;
    const int copied_column = warp / T::ROW_TILES, row_tile = warp % T::ROW_TILES;
    const bool has_row = row_tile * T::STEP + lane_row_of_tile() < rows.count;
    const unsigned* copied_x = x.tile(slice_of(0) / T::STEP + copied_column, row_tile) + lane * T::LANE_WORDS;
    const int64_t component_stride = x.component_stride();
    const int column_stride = x.column_stride();
    const auto fetch_x = [&](int i) {
        if (i >= count) return;
        unsigned* const to = staged_x + i % 2 * T::INPUTS + warp * T::WORDS + lane * T::LANE_WORDS;
        const int columns = x.column_tiles - slice_of(i) / T::STEP;
#pragma unroll
        for (int j = 0; j < SLICE_COLUMNS; j += COLUMN_STEP) {
            if (j + copied_column >= smallest(SLICE_COLUMNS, columns)) break;
#pragma unroll
            for (int p = 0; p < T::COMPONENTS; ++p)  // rows that there are not give sums that are not stored
                copy_or_clear_words(to + (p * SLICE_COLUMNS + j) * T::ROW_TILES * T::WORDS,
                                    copied_x + p * component_stride + j * column_stride, has_row);
        }
        copied_x += SPLIT * SLICE_COLUMNS * column_stride;
    };
    fetch_x(0);
    commit_copies();
    commit_copies();  // as if of W, like the last one of each slice

    // Of 16 rows and columns of W a lane has rows 4 (lane % 4) and three more, columns lane / 4 and 8 further.
    const int group = warp % T::GROUPS * T::STEP, share = warp / T::GROUPS * T::STEPS, lane_row = lane % 4 * 4;
    const float* const lane_weights = shared + (share * T::STEP + lane_row) * T::WEIGHT_PITCH + group + lane / 4;
    int leads[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) leads[i] = i * T::WEIGHT_PITCH + lead_of(w + n0, i, n);
    float sums[T::ROW_TILES][2][4] = {};
    for (int i = 0, stage = 0; i < count; ++i, stage = stage + 1 == T::STAGES ? 0 : stage + 1) {
        wait_copies<1>();
        __syncthreads();  // the slice is there for all, and all have multiplied the one before
        fetch_x(i + 1);
        commit_copies();
        fetch_w(i + T::STAGES - 1, stage == 0 ? T::STAGES - 1 : stage - 1);
        commit_copies();
        const float* const staged = lane_weights + stage * T::WEIGHTS;
        unsigned of_w[T::STEPS][T::COMPONENTS][4];
#pragma unroll
        for (int s = 0; s < T::STEPS; ++s) {
            float2 pairs[4];
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float* const at = staged + T::STEP * s * T::WEIGHT_PITCH + part % 2 * 8;
                pairs[part] = make_float2(at[leads[part / 2 * 2]], at[leads[part / 2 * 2 + 1]]);
            }
            split_pairs(pairs, of_w[s]);
        }
        const int steps = smallest(T::STEPS, ceil_div(k - slice_of(i), T::STEP) - share);  // that x has fragments for
        const unsigned* const slice = staged_x + i % 2 * T::INPUTS + share * T::ROW_TILES * T::WORDS;
        float part[T::ROW_TILES][2][4] = {};
        float(&c)[T::ROW_TILES][2][4] = T::COMPONENTS > 2 ? part : sums;
#pragma unroll
        for (int s = 0; s < T::STEPS; ++s) {
            if (s >= steps) break;
#pragma unroll
            for (int tile = 0; tile < T::ROW_TILES; ++tile) {
                unsigned of_x[T::COMPONENTS][4];
#pragma unroll
                for (int p = 0; p < T::COMPONENTS; ++p)
                    load_rows(of_x[p], slice + ((p * SLICE_COLUMNS + s) * T::ROW_TILES + tile) * T::WORDS);
                multiply_fragments(c[tile], of_w[s], of_x);
            }
        }
        if (T::COMPONENTS > 2)
#pragma unroll
            for (int tile = 0; tile < T::ROW_TILES; ++tile) add_sums(sums[tile], part[tile]);
    }

    wait_copies();
    __syncthreads();  // the sums take the place of the slices
    float* const of_share = shared + warp / T::GROUPS * T::SUMS + group + lane / 4;
#pragma unroll
    for (int tile = 0; tile < T::ROW_TILES; ++tile)
#pragma unroll
        for (int q = 0; q < 8; ++q) {
            const int row = T::STEP * tile + q / 4 * 8 + lane % 4 * 2 + q % 2;
            of_share[row * T::SUM_PITCH + q % 4 / 2 * 8] = sums[tile][q / 4][q % 4];
        }
    __syncthreads();
    constexpr int PAIRS = T::COLUMNS / 2;
    const X of_outputs(fragments, row_tiles, n);
    const int first = n0 + threadIdx.x % PAIRS * 2;  // of the two columns that the thread finishes
    float bias[2] = {};
#pragma unroll
    for (int q = 0; q < 2; ++q)
        if (b && first + q < n) bias[q] = b[first + q];
    const auto finish = [&](int pair, const float (&of_pair)[2]) {
        const int row = pair / PAIRS;
        if (first >= round_up(n, T::STEP)) return;
        float taken[2] = {};
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            if (first + q >= n) continue;
            float value[1] = {of_pair[q] + bias[q]};
            const int64_t offset = static_cast<int64_t>(rows.first + row) * n + first + q;
            if (z) z[offset] = value[0];
            Activations::forwards(activation, value);
            y[offset] = value[0];
            taken[q] = keep == 0.0f ? value[0] : LayerDropout{seed, layer, least, keep}(step->number, offset, value[0]);
            if (dropped) dropped[offset] = taken[q];
        }
        if (fragments) of_outputs.put(row, first, taken[0], taken[1]);
    };
    const auto place = [&](int pair) { return pair / PAIRS * T::SUM_PITCH + pair % PAIRS * 2; };
    const int pairs = rows.count * PAIRS;
    for (int pair = threadIdx.x; pair < pairs; pair += T::THREADS) {
        float two[2];
        load_neighbours(shared + place(pair), two);
#pragma unroll
        for (int other = 1; other < T::SHARES; ++other) {
            float more[2];
            load_neighbours(shared + other * T::SUMS + place(pair), more);
            two[0] += more[0], two[1] += more[1];
        }
        if (SPLIT == 1)
            finish(pair, two);
        else
            store_neighbours(shared + place(pair), two);
    }
    if constexpr (SPLIT > 1) {
        cluster_synchronize<SPLIT>();
        for (int pair = rank * T::THREADS + threadIdx.x; pair < pairs; pair += SPLIT * T::THREADS) {
            float two[2] = {};
#pragma unroll
            for (int block = 0; block < SPLIT; ++block)
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    two[q] += load_number_of_block<SPLIT>(shared_address(shared + place(pair) + q), block);
            finish(pair, two);
        }
        cluster_synchronize<SPLIT>();  // others still read this block's sums
    }
}

}  // namespace mlpgpu
