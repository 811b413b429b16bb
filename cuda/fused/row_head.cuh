// The row head: a head (fused/head.cuh) of few columns, a small weight and many rows, whose warps wait for no other.
//
// A warp takes two rows from x to dx, and then the next two. Its lanes have vectors of four of k, which they multiply with
// W's columns in shared memory. Of short rows x stays in registers till dx needs its slope.
#pragma once

#include "fused/head.cuh"

namespace mlpgpu {

struct RowHead {
    static constexpr int ROWS = 32, ROWS_PER_LANE = 2;  // of a block; of a warp at once, and so of each of its lanes
    static constexpr int WARPS = 8, THREADS = WARPS * WARP, MOST_COLUMNS = 8;
    static constexpr int VECTORS = 2, DEPTH = 4 * VECTORS * WARP;  // of a row, that a lane has at once; of k, by a warp
    static constexpr int COUNT = ROWS_PER_LANE * 4 * VECTORS;      // numbers of x that a lane has at once
    // Floats for W's columns, each padded to whole vectors of a warp, and by GAP, so that columns begin in different banks.
    static constexpr int ROOM = 9248, GAP = 4;
    static constexpr int LOGITS = WARPS * ROWS_PER_LANE * MOST_COLUMNS;
    static constexpr int SHARED_BYTES = 4 * (ROOM + 2 * LOGITS + 2 * ROWS);
};

// W (k, n) to staged (n, pitch), with zeros behind each column. A thread reads one column.
__device__ __forceinline__ void stage_columns(const float* w, int k, int n, int pitch, float* staged) {
    const int column = threadIdx.x % n, first = threadIdx.x / n, stride = RowHead::THREADS / n;
    if (first >= stride) return;
    const float* from = w + static_cast<int64_t>(first) * n + column;
    float* const to = staged + column * pitch;
#pragma unroll 8
    for (int row = first; row < pitch; row += stride, from += stride * n) to[row] = row < k ? __ldcg(from) : 0.0f;
}

// A lane's vectors of two neighbouring rows.
struct RowHeadLane {
    static constexpr int ROWS = RowHead::ROWS_PER_LANE, WIDTH = 4 * RowHead::VECTORS;  // of a row
    int lane, row;  // the first of them in the block

    // The first column of a vector, of those from k0 on.
    __device__ __forceinline__ int column(int k0, int vector) const { return k0 + 4 * (vector * WARP + lane); }

    // values (ROWS, WIDTH) of an array (rows, k) from the block's first row on; 0 where there are none.
    __device__ __forceinline__ void load(const float* from, int rows, int k, int k0, float (&values)[RowHead::COUNT]) const {
        const bool vectored = is_vectored(from, k);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int v = 0; v < RowHead::VECTORS; ++v) {
                float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (row + r < rows && column(k0, v) < k)
                    four = load_row(from + static_cast<int64_t>(row + r) * k, k, column(k0, v), vectored);
                unpack(four, values + r * WIDTH + 4 * v);
            }
    }
};

// As head(), with the same arguments.
// Grid: one block for every ROWS rows of the capacity, or of the capacity padded if there are components.
template <class Loss, class Target, class T, bool DROPS, class Source>
__device__ __forceinline__ void row_head(const Step* step, int shard, int shards, const int* order, const float* x,
                                         const float* w, const float* b, Source targets, const float* weights,
                                         const float* mean, const float* scale, float* delta, double* sums,
                                         unsigned* arrived, double* totals, double* losses, const float* saved,
                                         int activation, const uint32_t* kept, float keep, float restore, float* dx,
                                         uint16_t* dx_components, int64_t dx_stride, int dx_component_count,
                                         int* dx_row_scales, int k, int n) {
    constexpr int PAIR = T::ROWS_PER_LANE, WIDTH = RowHeadLane::WIDTH;
    SHARED(float, staged);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pitch = round_up(k, 4 * WARP) + T::GAP;
    float* const z = staged + T::ROOM + warp * PAIR * T::MOST_COLUMNS;  // (PAIR, MOST_COLUMNS) of this warp
    float* const deltas = z + T::LOGITS;                                // the same
    float* const errors = staged + T::ROOM + 2 * T::LOGITS;             // (ROWS, 2)
    stage_columns(w, k, n, pitch, staged);
    if (threadIdx.x < 2 * T::ROWS) errors[threadIdx.x] = 0.0f;
    const float bias = b && lane < n ? __ldcg(b + lane) : 0.0f;
    pdl_wait_and_trigger();
    const Rows shard_of = shard_rows(step, shard, shards);
    const int row0 = blockIdx.x * T::ROWS, rows = min(T::ROWS, shard_of.count - row0);
    const int64_t first = shard_of.first + row0;  // of the block's rows, in the batch
    const bool has_dx = dx || dx_components, is_kept = saved == x && k <= T::DEPTH;
    uint16_t* const of_block = dx_components ? dx_components + static_cast<int64_t>(row0) * padded_columns(k) : nullptr;
    const HeadInputGradient gradient = {dx ? dx + first * k : nullptr, of_block, dx_stride, dx_component_count, rows, k,
                                        {kept, keep, k}, row0};
    // Components are 0 in rows that there are not.
    const int end = dx_components ? min(T::ROWS, static_cast<int>(filled_rows(shard_of.count)) - row0) : rows;
    __syncthreads();  // W is there

    for (int row = warp * PAIR; row < end; row += T::WARPS * PAIR) {
        const RowHeadLane own = {lane, row};
        ReadTarget<Target> target[PAIR];
        float row_weight[PAIR];
#pragma unroll
        for (int r = 0; r < PAIR; ++r) {
            const bool is_there = row + r < rows;
            const int64_t from = is_there ? order[shard_of.order + first + row + r] : 0;
            target[r].t = is_there && lane < n ? Target{targets, from, n, mean, scale}(lane) : 0.0f;
            row_weight[r] = is_there && weights ? weights[from] : 1.0f;
        }
        float values[T::COUNT], products[PAIR * T::MOST_COLUMNS] = {};
        for (int k0 = 0; k0 < k; k0 += T::DEPTH) {
            own.load(x + first * k, rows, k, k0, values);
#pragma unroll
            for (int v = 0; v < T::VECTORS; ++v) {
                if (k0 + 4 * WARP * v >= k) break;
#pragma unroll
                for (int j = 0; j < T::MOST_COLUMNS; ++j) {
                    if (j >= n) break;
                    float of_w[4];
                    load_four(staged + j * pitch + own.column(k0, v), of_w);
#pragma unroll
                    for (int i = 0; i < 4 * PAIR; ++i) {
                        float& sum = products[i / 4 * T::MOST_COLUMNS + j];
                        sum = fmaf(values[i / 4 * WIDTH + 4 * v + i % 4], of_w[i % 4], sum);
                    }
                }
            }
        }
        sums_to_lanes(products);
        const int element = lane * PAIR * T::MOST_COLUMNS / WARP;
        const float of_column = __shfl_sync(WARP_ALL, bias, element % T::MOST_COLUMNS);
        __syncwarp();  // the deltas of the rows before have been read
        if (lane % 2 == 0) z[element] = products[0] + of_column;  // the next lane has the same sum
        if (lane < PAIR * T::MOST_COLUMNS) deltas[lane] = 0.0f;
        __syncwarp();
#pragma unroll
        for (int r = 0; r < PAIR; ++r) {
            if (row + r >= rows) break;
            const float* const logits = z + r * T::MOST_COLUMNS;
            const float value = weighted_row<Loss>(logits, n, target[r], row_weight[r], [=](int j, float d) {
                deltas[r * T::MOST_COLUMNS + j] = d;
                delta[(first + row + r) * n + j] = d;
            });
            if (lane == 0) errors[2 * (row + r)] = value, errors[2 * (row + r) + 1] = row_weight[r];
        }
        __syncwarp();
        if (!has_dx) continue;

        int tops[PAIR] = {NO_EXPONENT, NO_EXPONENT};
        for (int k0 = 0; k0 < k; k0 += T::DEPTH) {
            float sum[T::COUNT] = {};
#pragma unroll 2
            for (int j = 0; j < n; ++j) {
                const float of_delta[PAIR] = {deltas[j], deltas[T::MOST_COLUMNS + j]};
#pragma unroll
                for (int v = 0; v < T::VECTORS; ++v) {
                    if (k0 + 4 * WARP * v >= k) break;
                    float of_w[4];
                    load_four(staged + j * pitch + own.column(k0, v), of_w);
#pragma unroll
                    for (int i = 0; i < 4 * PAIR; ++i) {
                        float& element_sum = sum[i / 4 * WIDTH + 4 * v + i % 4];
                        element_sum = fmaf(of_delta[i / 4], of_w[i % 4], element_sum);
                    }
                }
            }
            if (saved) {
                if (!is_kept) own.load(saved + first * k, rows, k, k0, values);
#pragma unroll
                for (int i = 0; DROPS && i < T::COUNT; ++i) values[i] *= restore;
                Activations::derivatives(activation, values);
#pragma unroll
                for (int i = 0; i < T::COUNT; ++i) sum[i] *= DROPS ? values[i] : values[i] * keep;
            }
#pragma unroll
            for (int v = 0; v < T::VECTORS; ++v) {
                const int column = own.column(k0, v);
                if (column >= k) break;
                if (DROPS) gradient.drop<PAIR, WIDTH>(sum + 4 * v, row, column);
#pragma unroll
                for (int i = 0; dx_row_scales && i < 4 * PAIR; ++i) {
                    const float element_sum = sum[i / 4 * WIDTH + 4 * v + i % 4];
                    if (element_sum != 0.0f) tops[i / 4] = max(tops[i / 4], max(exponent_of(element_sum), NO_EXPONENT + 1));
                }
                gradient.store<PAIR, WIDTH>(sum + 4 * v, row, column);
            }
        }
#pragma unroll
        for (int r = 0; dx_row_scales && r < PAIR; ++r) {
            int top = tops[r];
#pragma unroll
            for (int apart = WARP / 2; apart > 0; apart /= 2) top = max(top, __shfl_xor_sync(WARP_ALL, top, apart));
            if (lane == 0 && row + r < rows)
                dx_row_scales[row0 + row + r] = scaling_exponent(top) * 8 | (top > NO_EXPONENT ? NONZERO : 0);
        }
    }
    __syncthreads();  // all errors are there
    if (warp == 0) add_errors_up<T::ROWS>(step, errors, blockIdx.x, gridDim.x, sums, arrived, totals, losses);
}

}  // namespace mlpgpu
