// A dense layer's backward pass and the optimizer's step for a small batch and a large W on tensor cores, in one pass over W
// and its slots.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/integers.cuh"
#include "common/reduce.cuh"
#include "common/vectors.cuh"
#include "math/activations.cuh"
#include "math/dropout.cuh"
#include "math/optimizers.cuh"
#include "whole_batch/copies.cuh"
#include "whole_batch/fragments.cuh"

namespace mlpgpu {

// A block takes 16 rows of W along their columns, COLUMNS at a time, and each of its warps 16 by 16 of them: these, split, are
// an operand of dxᵀ = W dzᵀ; and the same lane then has their gradient, xᵀ dz, and moves them. The sums of dx, of at most ROWS
// rows of the batch, stay in registers till the end of the rows of W. W and its slots come to shared memory by asynchronous
// copies, STAGES - 1 chunks ahead, and so do dz's fragments; those of x stay there.
template <int ROWS_, int COMPONENTS_, int SLOTS_>
struct TensorWholeBatchBackward : FragmentShape {
    static constexpr int ROWS = ROWS_, COMPONENTS = COMPONENTS_, WARPS = 8, THREADS = WARPS * WARP, ROW_TILES = ROWS / STEP;
    static constexpr int COLUMNS = STEP * WARPS, ARRAYS = 1 + SLOTS_, ROOM = 112 * 1024;  // of one of two blocks of sm_90a
    static constexpr int WEIGHT_PITCH = COLUMNS + 16, WEIGHTS = ARRAYS * STEP * WEIGHT_PITCH;  // of a chunk
    static constexpr int FRAGMENTS = COMPONENTS * ROW_TILES * WORDS;  // of 16 columns, in words
    // As many chunks of W and dz as leave room for two blocks; without room for two of each, dz is multiplied and then copied.
    static constexpr bool has_room(int stages) { return 4 * (stages * WEIGHTS + (stages * WARPS + 1) * FRAGMENTS) <= ROOM; }
    static constexpr int STAGES = has_room(4) ? 4 : has_room(3) ? 3 : 2, DELTA_STAGES = has_room(STAGES) ? STAGES : 1;
    static __host__ __device__ constexpr int after(int stage, int count) {  // the stage so many after one
        return STAGES == 2 ? stage ^ count : stage + count < STAGES ? stage + count : stage + count - STAGES;
    }
    static constexpr int SUM_PITCH = STEP + 4, SUMS = ROWS * SUM_PITCH;  // of dx, of a warp: in the end they lie where all else was
    static constexpr int SHARED_BYTES = 4 * largest(STAGES * WEIGHTS + (DELTA_STAGES * WARPS + 1) * FRAGMENTS, WARPS * SUMS);
    static constexpr int BLOCKS = SHARED_BYTES <= ROOM ? 2 : 1;  // of a multiprocessor of sm_90a
    static_assert(BLOCKS * (SHARED_BYTES + 1024) <= 228 * 1024, "a block's memory has 1,024 bytes more");
    static_assert(ARRAYS * STEP <= THREADS, "a thread copies the end of one of the rows");
};

// Of a fragment's rows of W, as of its columns (whole_batch/fragments.cuh), a lane has this one and that 2 further.
__device__ __forceinline__ int lane_row_of_weight() { return threadIdx.x % WARP / 8 * 4 + threadIdx.x / 4 % 2; }

template <class Rule, class T, bool HAS_DX>
__device__ __forceinline__ void tensor_backward_of_rows(const Rows& rows, const Fragments<T::COMPONENTS>& x,
                                                        const Fragments<T::COMPONENTS>& of_dz, const float* dz,
                                                        const double* totals, float* weight, float* slots, int64_t size,
                                                        const float* rates, InPlace<BiasRule<Rule>> of_bias,
                                                        const float* saved, float* dx, uint16_t* fragments,
                                                        float* partials, unsigned* arrived, int k, int n, int activation,
                                                        const LayerDropout& dropout, int64_t number) {
    constexpr int ARRAYS = T::ARRAYS;
    SHARED(float, shared);
    unsigned* const staged_x = reinterpret_cast<unsigned*>(shared + T::STAGES * T::WEIGHTS);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, of_lane = lane * T::LANE_WORDS;
    unsigned* const staged_dz = staged_x + (1 + T::DELTA_STAGES * warp) * T::FRAGMENTS;
    const int block_row = blockIdx.x * T::STEP, stride = gridDim.y * T::COLUMNS, of_warp = warp * T::STEP;
    const auto array = [&](int of) { return of == 0 ? weight : slots + (of - 1) * size; };
    const auto place = [&](int stage, int of, int row) {
        return shared + stage * T::WEIGHTS + (of * T::STEP + row) * T::WEIGHT_PITCH;
    };

    constexpr int AHEAD = T::STAGES - 1;
    int first = blockIdx.y * T::COLUMNS, stage = 0;  // whose copies the chunk is in
    constexpr int VECTORS = T::COLUMNS / 4, COPIED_ROWS = T::THREADS / VECTORS;
    const int copied_row = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS * 4;
    const int end_row = threadIdx.x % T::STEP, end_array = threadIdx.x / T::STEP;
    // Elements before what the thread copies of the next chunk; pointers of all arrays would take too many registers.
    int64_t copied = static_cast<int64_t>(block_row + copied_row) * n + first + vector;
    const float* end = array(smallest(end_array, ARRAYS - 1)) + (static_cast<int64_t>(block_row + end_row) * n + first + T::COLUMNS);
    const bool has_end = end_array < ARRAYS && lead_of(end, 0, 0) > 0;
    const auto fetch_w = [&](int first, int stage) {
        if (first >= n) return;
        const int left = n - first;
        const auto fetch = [&](auto is_whole) {
            constexpr bool IS_WHOLE = decltype(is_whole)::value;
#pragma unroll
            for (int i = 0; i < T::STEP; i += COPIED_ROWS)
#pragma unroll
                for (int of = 0; of < ARRAYS; ++of)  // rows that there are not become 0, since how a pair is split tells on others
                    copy_vector_of<IS_WHOLE>(place(stage, of, copied_row + i) + vector, array(of) + (copied + i * n),
                                             block_row + copied_row + i < k ? left - vector : -4);
            if (has_end) copy_vector_of<IS_WHOLE>(place(stage, end_array, end_row) + T::COLUMNS, end,
                                                  block_row + end_row < k ? left - T::COLUMNS : -4);
        };
        left >= T::COLUMNS + 4 && block_row + T::STEP <= k ? fetch(Is<true>()) : fetch(Is<false>());
        copied += stride, end += stride;
    };
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) fetch_w(first + ahead * stride, ahead);
    pdl_wait_and_trigger();

    // Rows that there are not become 0, of dz and of x, as sums go over all.
    const int left_rows = rows.count - lane_row_of_tile();
    const unsigned* copied_dz = of_dz.tile(first / T::STEP + warp, 0) + of_lane;
    const int64_t component_stride = of_dz.component_stride();
    const int dz_stride = stride / T::STEP * of_dz.column_stride();
    const auto fetch_dz = [&](int column, int stage) {
        if (column >= n) return;
#pragma unroll
        for (int tile = 0; tile < T::ROW_TILES; ++tile)
#pragma unroll
            for (int p = 0; p < T::COMPONENTS; ++p)
                copy_or_clear_words(
                    staged_dz + (stage * T::FRAGMENTS + (p * T::ROW_TILES + tile) * T::WORDS + of_lane),
                    copied_dz + p * component_stride + tile * T::WORDS, tile * T::STEP < left_rows);
        copied_dz += dz_stride;
    };
    fetch_dz(first + of_warp, 0);
    for (int tile = warp; tile < T::ROW_TILES; tile += T::WARPS)
#pragma unroll
        for (int p = 0; p < T::COMPONENTS; ++p)
            copy_or_clear_words(staged_x + (p * T::ROW_TILES + tile) * T::WORDS + of_lane,
                                x.tile(blockIdx.x, tile) + p * x.component_stride() + of_lane,
                                tile * T::STEP < left_rows);
    commit_copies();
#pragma unroll
    for (int ahead = 1; ahead < AHEAD; ++ahead) {  // the first one has x and all of W so far
        fetch_dz(first + ahead * stride + of_warp, ahead);
        commit_copies();
    }
    const float scale = mean_scale(totals);
    of_bias.scale = scale;
    const int lane_row = lane_row_of_weight(), row = block_row + lane_row, lane_column = of_warp + lane % 4 * 4;
    bool is_vectored = n % 4 == 0 && size % 4 == 0 && reinterpret_cast<uintptr_t>(weight) % 16 == 0;
    if (ARRAYS > 1) is_vectored &= reinterpret_cast<uintptr_t>(slots) % 16 == 0;
    float of_dx[HAS_DX ? T::ROW_TILES : 1][2][4] = {};
    int until_bias = blockIdx.x;
    for (; first < n; first += stride, --until_bias, stage = T::after(stage, 1)) {
        wait_copies<AHEAD - 1>();
        __syncthreads();  // the chunk is there for all, and all have moved the one before
        fetch_w(first + AHEAD * stride, T::after(stage, AHEAD));
        if (T::DELTA_STAGES > 1) fetch_dz(first + AHEAD * stride + of_warp, T::after(stage, AHEAD));
        commit_copies();
        if (until_bias == 0) {  // of the blocks that have this chunk one moves its biases
            until_bias = gridDim.x;
            const int column = first + threadIdx.x;
            if (of_bias.weight && threadIdx.x < T::COLUMNS && column < n) {
                float sum = 0.0f;
#pragma unroll 4
                for (int r = 0; r < rows.count; ++r) sum += __ldcg(dz + static_cast<int64_t>(r) * n + column);
                of_bias(0, column, sum);
            }
        }
        float arrays[ARRAYS][2][4];
#pragma unroll
        for (int of = 0; of < ARRAYS; ++of)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float* const from = place(stage, of, lane_row + 2 * h) + lane_column;
                if (is_vectored) {
                    load_neighbours(from, arrays[of][h]);
                } else {
                    const int lead = lead_of(array(of), row + 2 * h, n);
#pragma unroll
                    for (int q = 0; q < 4; ++q) arrays[of][h][q] = from[lead + q];
                }
            }
        unsigned of_w[T::COMPONENTS][4];
        if (HAS_DX) {
            float2 pairs[4];
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float(&w)[4] = arrays[0][part % 2];
                pairs[part] = make_float2(w[part / 2 * 2], w[part / 2 * 2 + 1]);
            }
            split_pairs(pairs, of_w);
        }
        const unsigned* const of_chunk = staged_dz + (T::DELTA_STAGES > 1 ? stage : 0) * T::FRAGMENTS;
        const bool has_columns = first + of_warp < n;  // else there is no dz
        float gradients[2][4] = {};
#pragma unroll
        for (int tile = 0; tile < T::ROW_TILES; ++tile) {
            if (!has_columns) break;
            unsigned words[T::COMPONENTS][4];
            if (HAS_DX) {
#pragma unroll
                for (int p = 0; p < T::COMPONENTS; ++p)
                    load_rows(words[p], of_chunk + (p * T::ROW_TILES + tile) * T::WORDS);
                float part[2][4] = {};
                float(&sums)[2][4] = T::COMPONENTS > 2 ? part : of_dx[HAS_DX ? tile : 0];
                multiply_fragments(sums, of_w, words);
                if (T::COMPONENTS > 2) add_sums(of_dx[HAS_DX ? tile : 0], part);
            }
            unsigned of_x[T::COMPONENTS][4];
#pragma unroll
            for (int p = 0; p < T::COMPONENTS; ++p) {
                load_columns<false>(words[p], of_chunk + (p * T::ROW_TILES + tile) * T::WORDS);
                load_columns<true>(of_x[p], staged_x + (p * T::ROW_TILES + tile) * T::WORDS);
            }
            float part[2][4] = {};
            float(&c)[2][4] = T::COMPONENTS > 2 ? part : gradients;
            multiply_fragments(c, of_x, words);
            if (T::COMPONENTS > 2) add_sums(gradients, part);
        }
        if (T::DELTA_STAGES == 1) {
            __syncwarp();  // all lanes have read dz
            fetch_dz(first + stride + of_warp, 0);
            commit_copies();
        }
        if (!has_columns) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float slot[2];
#pragma unroll
                for (int of = 1; of < ARRAYS; ++of) slot[of - 1] = arrays[of][h][q];
                float& w = arrays[0][h][q];
                step_parameter<Rule>(w, slot, gradients[q / 2][2 * h + q % 2], scale, rates, penalty_slope(w));
#pragma unroll
                for (int of = 1; of < ARRAYS; ++of) arrays[of][h][q] = slot[of - 1];
            }
        if (is_vectored) {
#pragma unroll
            for (int of = 0; of < ARRAYS; ++of)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (row + 2 * h < k && lane_column < n - first)
                        store_vector(array(of) + (static_cast<int64_t>(row + 2 * h) * n + first + lane_column), arrays[of][h]);
            continue;
        }
        // What no vectors can store goes back to where it was, so that lanes store what lies side by side.
#pragma unroll
        for (int of = 0; of < ARRAYS; ++of)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* const to = place(stage, of, lane_row + 2 * h) + lane_column + lead_of(array(of), row + 2 * h, n);
#pragma unroll
                for (int q = 0; q < 4; ++q) to[q] = arrays[of][h][q];
            }
        __syncwarp();
        const int column = of_warp + lane % T::STEP;
        if (first + column >= n) continue;
#pragma unroll
        for (int of = 0; of < ARRAYS; ++of)
#pragma unroll
            for (int of_block = lane / T::STEP; of_block < T::STEP; of_block += WARP / T::STEP) {
                const int other = block_row + of_block;
                if (other >= k) break;
                array(of)[static_cast<int64_t>(other) * n + first + column] =
                    place(stage, of, of_block)[column + lead_of(array(of), other, n)];
            }
    }
    if (!HAS_DX) return;

    wait_copies();
    __syncthreads();  // the sums take the place of all else
    float* const of_sums = shared + warp * T::SUMS + lane_row;
#pragma unroll
    for (int b = 0; b < T::ROW_TILES; ++b)
#pragma unroll
        for (int q = 0; q < 8; ++q) {
            const int r = T::STEP * b + q / 4 * 8 + lane % 4 * 2 + q % 2;
            of_sums[r * T::SUM_PITCH + q % 4 / 2 * 2] = of_dx[HAS_DX ? b : 0][q / 4][q % 4];
        }
    __syncthreads();
    constexpr int PAIRS = T::STEP / 2;
    const int pairs = PAIRS * rows.count, column = threadIdx.x % PAIRS * 2;
    const auto sum_of = [&](int r) {
        float2 sum = {};
#pragma unroll
        for (int other = 0; other < T::WARPS; ++other) {
            float two[2];
            load_neighbours(shared + other * T::SUMS + r * T::SUM_PITCH + column, two);
            sum = make_float2(sum.x + two[0], sum.y + two[1]);
        }
        return sum;
    };
    float2* const of_blocks = reinterpret_cast<float2*>(partials) + static_cast<int64_t>(blockIdx.x) * gridDim.y * T::ROWS * PAIRS;
    if (gridDim.y > 1) {  // other blocks have other columns of these rows: the last one adds up what all have, in their order
        for (int pair = threadIdx.x; pair < pairs; pair += T::THREADS)
            of_blocks[blockIdx.y * T::ROWS * PAIRS + pair] = sum_of(pair / PAIRS);
        __threadfence();
        __syncthreads();
        if (!was_last(arrive(arrived + blockIdx.x), shared, gridDim.y)) return;
    }
    const Fragments<T::COMPONENTS> of_gradients(fragments, x.row_tiles, k);
#pragma unroll 2
    for (int pair = threadIdx.x; pair < pairs; pair += T::THREADS) {
        const int r = pair / PAIRS;
        float2 sum = {};
        if (gridDim.y == 1) sum = sum_of(r);
        for (unsigned block = 0; gridDim.y > 1 && block < gridDim.y; ++block) {
            const float2 part = __ldcg(of_blocks + block * T::ROWS * PAIRS + pair);
            sum = make_float2(sum.x + part.x, sum.y + part.y);
        }
        float made[2] = {sum.x, sum.y};
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const bool is_inside = block_row + column + q < k;
            const int64_t offset = static_cast<int64_t>(rows.first + r) * k + block_row + column + q;
            float slope[1] = {saved && is_inside ? saved[offset] : 1.0f};
            if (saved) Activations::derivatives(activation, slope);
            made[q] = is_inside ? dropout(number, offset, made[q]) * slope[0] : 0.0f;
            if (is_inside) dx[offset] = made[q];
        }
        if (fragments) of_gradients.put(r, block_row + column, made[0], made[1]);
    }
}

// Updates weight (k, n), bias (n,), or null, and their slots along the gradient by x (B, k) and dz, both as fragments, dz as
// numbers too; slot s begins s · size elements after the first. dx = (dz Wᵀ) ∘ f'(saved), of W before its step and of the
// activation f of this number, also as fragments unless these are null; `saved` is null where there is none, and dx where
// nobody reads it. Between W and f there may have been a dropout.
// Grid: (blocks of rows of W, blocks that share their columns). Several of the latter need room for their `partials` of dx, and
// `arrived`, a word for each block of rows, which is 0 before the launch and after it.
template <class Rule, class T>
__device__ __forceinline__ void dense_backward_tensor_whole_batch(const Step* step, int shard, int shards,
                                                                  const uint16_t* x_fragments, const uint16_t* dz_fragments,
                                                                  const float* dz, const double* totals, float* weight,
                                                                  float* bias, float* weight_slots, float* bias_slots,
                                                                  int64_t size, const float* saved, float* dx,
                                                                  uint16_t* fragments, float* partials, unsigned* arrived,
                                                                  int row_tiles, int k, int n, int activation, uint64_t seed,
                                                                  int layer, uint32_t least, float keep) {
    const Rows rows = shard_rows(step, shard, shards);
    const float* const deltas = dz + static_cast<int64_t>(rows.first) * n;
    const float* const rates = step_rates(step);
    const Fragments<T::COMPONENTS> x(const_cast<uint16_t*>(x_fragments), row_tiles, k);
    const Fragments<T::COMPONENTS> of_dz(const_cast<uint16_t*>(dz_fragments), row_tiles, n);
    const InPlace<BiasRule<Rule>> of_bias = {bias, bias_slots, size, n, 0.0f, rates};
    const auto run = [&](auto has_dx) {
        tensor_backward_of_rows<Rule, T, decltype(has_dx)::value>(rows, x, of_dz, deltas, totals, weight, weight_slots, size,
                                                                  rates, of_bias, saved, dx, fragments, partials, arrived, k, n,
                                                                  activation, {seed, layer, least, keep}, step->number);
    };
    dx ? run(Is<true>()) : run(Is<false>());
}

}  // namespace mlpgpu
