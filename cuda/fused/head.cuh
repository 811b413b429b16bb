// The head: a network's last dense layer, if it has few columns, with the loss and dx in one kernel.
//
// A block takes Head::ROWS rows from the layer's input x (B, k) to delta and dx. A thread takes four of them and PER_LANE
// of k, and keeps their x in registers, since dx may need its slope there. W's columns lie in shared memory one after
// another, for both products. One more warp adds the loss up meanwhile.
#pragma once

#include "common/batch_total.cuh"
#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/step.cuh"
#include "common/vectors.cuh"
#include "gemm/operand_formats.cuh"
#include "math/kept_elements.cuh"
#include "math/losses.cuh"
#include "math/teams.cuh"

namespace mlpgpu {

struct Head {
    static constexpr int ROWS = 8, MOST_COLUMNS = 32;
    static constexpr int WARPS = 8, THREADS = (WARPS + 1) * WARP;  // compute warps, and one that adds errors up
    static constexpr int ROWS_PER_LANE = 4, LANES = WARP * ROWS_PER_LANE / ROWS;
    static constexpr int DEPTH = 1024, OF_WARP = DEPTH / WARPS, PER_LANE = OF_WARP / LANES;  // of k at once
    static constexpr int GROUP = 12, PITCH = DEPTH + 4;     // columns of W at once, and floats from one to the next
    static constexpr int PARTIAL = WARPS * ROWS * MOST_COLUMNS, LOGITS = ROWS * MOST_COLUMNS;
    static constexpr int SHARED_BYTES = 4 * (GROUP * PITCH + PARTIAL + 2 * LOGITS + 4 * ROWS);
};

// A target that is read before it is needed: one per lane, since a row has no more columns than a warp has lanes.
template <class Target>
struct ReadTarget {
    float t;
    __device__ __forceinline__ float operator()(int) const { return t; }
    static __device__ __forceinline__ float times(float t, float value) { return Target::times(t, value); }
};

// Columns [j0, j0 + GROUP) and rows [k0, k0 + DEPTH) of W (k, n), held in registers between memory and shared memory, with
// zeros after the last row for the warp that multiplies it. Threads read W as it lies in memory, each in one column, and
// issue all loads before the first store.
struct HeadColumns {
    static constexpr int MOST = Head::DEPTH / (Head::THREADS / Head::GROUP) + 1;
    int start, stride, all;
    float values[MOST];

    __device__ __forceinline__ HeadColumns(const float* w, int k, int n, int k0, int j0) {
        const int depth = min(Head::DEPTH, k - k0), columns = min(Head::GROUP, n - j0);
        stride = Head::THREADS / columns;
        const int column = threadIdx.x % columns, first = threadIdx.x / columns;
        const int end = first < stride ? round_up(depth, Head::OF_WARP) : 0;
        const float* from = w + static_cast<int64_t>(k0 + first) * n + j0 + column;
        const int64_t step = static_cast<int64_t>(stride) * n;
        const int rows_of_w = ceil_div(min(depth, end) - first, stride);
        all = ceil_div(end - first, stride), start = column * Head::PITCH + first;
#pragma unroll
        for (int i = 0; i < MOST; ++i, from += step) values[i] = i < rows_of_w ? __ldcg(from) : 0.0f;
    }

    // To staged (GROUP, PITCH).
    __device__ __forceinline__ void put(float* staged) const {
        constexpr int NOWHERE = Head::DEPTH;  // between two columns; an unconditional store takes three instructions less
#pragma unroll
        for (int i = 0, offset = start; i < MOST; ++i, offset += stride) staged[i < all ? offset : NOWHERE] = values[i];
    }
};

// A thread's share: its rows, and its k in two vectors, since neighbours in memory go to neighbouring lanes.
struct HeadThread {
    static constexpr int VECTORS = Head::PER_LANE / 4, COUNT = Head::ROWS_PER_LANE * Head::PER_LANE;
    int warp, lane, row0;  // row0: the first of its rows in the block

    __device__ __forceinline__ HeadThread()
        : warp(threadIdx.x / WARP), lane(threadIdx.x % WARP), row0(lane / Head::LANES * Head::ROWS_PER_LANE) {}

    __device__ __forceinline__ bool has_row() const { return warp < Head::ROWS; }
    // Whether the thread has part of so much of k.
    __device__ __forceinline__ bool computes(int depth) const { return warp < Head::WARPS && warp * Head::OF_WARP < depth; }
    // The first element of a vector, of DEPTH.
    __device__ __forceinline__ int offset(int vector) const {
        return ((warp * VECTORS + vector) * Head::LANES + lane % Head::LANES) * 4;
    }

    // values (ROWS_PER_LANE, PER_LANE) of x, whose first row is the block's, from column k0 on; 0 where there are none.
    __device__ __forceinline__ void load(const float* x, int rows, int k, int k0, float (&values)[COUNT]) const {
        const bool vectored = is_vectored(x, k);
#pragma unroll
        for (int r = 0; r < Head::ROWS_PER_LANE; ++r) {
            const float* const row = x + static_cast<int64_t>(row0 + r) * k;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (row0 + r < rows) four = load_row(row, k, k0 + offset(v), vectored);
                unpack(four, values + r * Head::PER_LANE + 4 * v);
            }
        }
    }

    // Loads the thread's k of a staged column of W.
    __device__ __forceinline__ void weights(const float* column, float (&w)[Head::PER_LANE]) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) load_four(column + offset(v), w + 4 * v);
    }

    // The same from a column in memory, whose first `rows` rows lie n apart; those after them count as 0.
    __device__ __forceinline__ void weights(const float* column, int rows, int n, float (&w)[Head::PER_LANE]) const {
#pragma unroll
        for (int i = 0; i < Head::PER_LANE; ++i) {
            const int row = offset(i / 4) + i % 4;
            w[i] = row < rows ? column[static_cast<int64_t>(row) * n] : 0.0f;
        }
    }
};

// Adds to partial (WARPS, ROWS, MOST_COLUMNS) the products of x's values with the staged columns from j0 on.
__device__ __forceinline__ void add_products(const HeadThread& thread, const float (&x)[HeadThread::COUNT],
                                             const float* staged, int j0, int n, bool is_first, float* partial) {
    constexpr int ROWS = Head::ROWS_PER_LANE, COLUMNS = Head::LANES / ROWS;
#pragma unroll
    for (int j = 0; j < Head::GROUP; j += COLUMNS) {
        if (j0 + j >= n) break;
        float sums[COLUMNS * ROWS] = {};
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            if (j0 + j + c >= n) break;
            float w[Head::PER_LANE];
            thread.weights(staged + (j + c) * Head::PITCH, w);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int i = 0; i < Head::PER_LANE; ++i)
                    sums[c * ROWS + r] = fmaf(x[r * Head::PER_LANE + i], w[i], sums[c * ROWS + r]);
        }
        const float sum = sum_to_lanes(sums);
        const int sum_number = thread.lane % Head::LANES;  // of those that sum_to_lanes() left in the half warp's lanes
        const int row = thread.row0 + sum_number % ROWS, column = j0 + j + sum_number / ROWS;
        if (column >= n) continue;
        float& partial_sum = partial[(thread.warp * Head::ROWS + row) * Head::MOST_COLUMNS + column];
        partial_sum = is_first ? sum : partial_sum + sum;
    }
}

// By one warp: adds a block's errors (ROWS, 2) up, and then the blocks' sums (common/batch_total.cuh).
template <int ROWS>
__device__ __forceinline__ void add_errors_up(const Step* step, const float* errors, int block, int blocks, double* sums,
                                              unsigned* arrived, double* totals, double* losses) {
    const int lane = threadIdx.x % WARP;
    ValueAndWeight sum = {0.0, 0.0};
    if (ROWS > 8) {
        static_assert(ROWS <= 8 || ROWS == WARP, "a lane has a row");
        sum = {warp_sum(static_cast<double>(errors[2 * lane])), warp_sum(static_cast<double>(errors[2 * lane + 1]))};
    } else if (lane == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum.value += errors[2 * r], sum.weight += errors[2 * r + 1];
    }
    add_block_up(step, sum, block, blocks, sums, arrived, totals, losses);
}

// Stores the row scales of a block's rows of dx, from the largest exponents that each thread has found of its rows.
template <class T>
__device__ __forceinline__ void store_row_scales(int row0, const int (&tops)[T::ROWS_PER_LANE], int rows, int* of_warps,
                                                 int* row_scales) {
    constexpr int LANES = WARP * T::ROWS_PER_LANE / T::ROWS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < T::ROWS_PER_LANE; ++r) {
        int top = tops[r];
#pragma unroll
        for (int apart = LANES / 2; apart > 0; apart /= 2) top = max(top, __shfl_xor_sync(WARP_ALL, top, apart));
        if (lane % LANES == 0 && warp < T::WARPS) of_warps[warp * T::ROWS + row0 + r] = top;
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row >= rows) return;
    int top = NO_EXPONENT;
#pragma unroll
    for (int i = 0; i < T::WARPS; ++i) top = max(top, of_warps[i * T::ROWS + row]);
    row_scales[row] = scaling_exponent(top) * 8 | (top > NO_EXPONENT ? NONZERO : 0);
}

// Where dx goes: as floats, as bfloat16 components (gemm/operand_formats.cuh), or both; null arrays are skipped.
struct HeadInputGradient {
    float* dx;              // from the block's first row on
    uint16_t* components;   // likewise
    int64_t component_stride;
    int component_count, rows, k;
    KeptElements dropout;
    int first;  // of the block's rows in the shard

    // Applies the dropout to columns `column` to `column` + 3 of ROWS rows, PITCH apart in `values`, from the block's row `row` on.
    template <int ROWS, int PITCH>
    __device__ __forceinline__ void drop(float* values, int row, int column) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (row + r >= rows || column >= k) continue;
            const uint32_t word = dropout.word(first + row + r, column);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values[r * PITCH + i] = dropout(KeptElements::has(word, column + i), values[r * PITCH + i]);
        }
    }

    // Stores columns `column` to `column` + 3 of ROWS rows, PITCH apart in `values`, from the block's row `row` on.
    // Components are 0 in rows that do not exist.
    template <int ROWS, int PITCH>
    __device__ __forceinline__ void store(const float* values, int row, int column) const {
#pragma unroll
        for (int r = 0; dx && r < ROWS; ++r) {
            const float* const four = values + r * PITCH;
            float* const to = dx + static_cast<int64_t>(row + r) * k;
            if (row + r < rows)
                store_row(to, k, column, make_float4(four[0], four[1], four[2], four[3]), is_vectored(to, 0));
        }
        if (components && component_count == MOST_COMPONENTS)
            put_components<ROWS, PITCH, MOST_COMPONENTS, 1>(values, row, column, MOST_COMPONENTS);
        else if (components)
            put_components<ROWS, PITCH, 2, 2>(values, row, column, component_count);
    }

    // Stores `count` components, MOST at most, and splits AT_ONCE rows before it stores them: of three components one row,
    // since the words of two spill registers.
    template <int ROWS, int PITCH, int MOST, int AT_ONCE>
    __device__ __forceinline__ void put_components(const float* values, int row, int column, int count) const {
        const int pitch = padded_columns(k);  // so that vectors are whole; columns from k on are 0, as those of W are
        uint16_t* to = components + static_cast<int64_t>(row) * pitch + column;
#pragma unroll
        for (int r0 = 0; r0 < ROWS; r0 += AT_ONCE) {
            float2 pairs[2 * AT_ONCE];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) {
                const float* const pair = values + (r0 + i / 2) * PITCH + i % 2 * 2;
                pairs[i] = row + r0 + i / 2 < rows ? make_float2(pair[0], pair[1]) : make_float2(0.0f, 0.0f);
            }
            unsigned words[MOST][2 * AT_ONCE];
            split_to_bfloats(pairs, count, words);
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r, to += pitch)
#pragma unroll
                for (int p = 0; p < MOST; ++p)
                    if (p < count)
                        *reinterpret_cast<uint2*>(to + p * component_stride) = make_uint2(words[p][2 * r], words[p][2 * r + 1]);
        }
    }
};

// z = x W + b, the loss of the rows (math/losses.cuh) and delta (B, n); and dx = (delta Wᵀ) ∘ f'(saved) · keep,
// where `activation` is the number of f, which made x, and `saved` is null if there was none; between f and W there may have been
// a dropout, as dense/dense.cuh says. dx is stored as floats, as bfloat16 components (gemm/operand_formats.cuh), or not at all: null outputs are skipped.
// `dx_row_scales` (rows,) receive its exponents.
// Grid: one block for every ROWS rows of the capacity, or of the capacity padded if there are components.
template <class Loss, class Target, bool DROPS, class Source>
__device__ __forceinline__ void head(const Step* step, int shard, int shards, const int* order, const float* x,
                                     const float* w, const float* b, Source targets, const float* weights,
                                     const float* mean, const float* scale, float* delta, double* sums,
                                     unsigned* arrived, double* totals, double* losses, const float* saved,
                                     int activation, const uint32_t* kept, float keep, float restore, float* dx,
                                     uint16_t* dx_components, int64_t dx_stride,
                                     int dx_component_count, int* dx_row_scales, int k, int n) {
    using T = Head;
    SHARED(float, staged);
    float* const partial = staged + T::GROUP * T::PITCH;  // (WARPS, ROWS, MOST_COLUMNS)
    float* const z = partial + T::PARTIAL;                // (ROWS, MOST_COLUMNS)
    float* const deltas = z + T::LOGITS;                  // (n, ROWS)
    float* const errors = deltas + T::LOGITS;             // (ROWS, 2)
    const HeadThread thread;
    const Rows shard_of = shard_rows(step, shard, shards);
    const int row0 = blockIdx.x * T::ROWS, rows = min(T::ROWS, shard_of.count - row0);
    const int64_t first = shard_of.first + row0;  // of the block's rows, in the batch
    const bool is_whole = k <= T::DEPTH && n <= T::GROUP;  // W that is staged serves both products

    // For the loss a warp takes a row and a lane takes a column.
    const bool is_there = thread.has_row() && thread.warp < rows, has_column = thread.lane < n;
    const int64_t from = is_there ? order[shard_of.order + first + thread.warp] : 0;
    const float bias = b && has_column ? __ldcg(b + thread.lane) : 0.0f;
    ReadTarget<Target> target = {0.0f};
    float row_weight = 1.0f;
    float values[HeadThread::COUNT];  // of x, and later of dx's slope
    for (int k0 = 0; rows > 0 && k0 < k; k0 += T::DEPTH) {
        for (int j0 = 0; j0 < n; j0 += T::GROUP) {
            const HeadColumns columns(w, k, n, k0, j0);
            if (k0 + j0 == 0) pdl_wait_and_trigger();
            if (j0 == 0 && thread.computes(k - k0)) thread.load(x + first * k, rows, k, k0, values);
            columns.put(staged);
            if (k0 + j0 == 0 && is_there) {  // `from` has arrived meanwhile
                if (has_column) target.t = Target{targets, from, n, mean, scale}(thread.lane);
                if (weights) row_weight = weights[from];
            }
            __syncthreads();
            if (thread.computes(k - k0)) add_products(thread, values, staged, j0, n, k0 == 0, partial);
            __syncthreads();
        }
    }
    if (is_there) {
        float* const logits = z + thread.warp * T::MOST_COLUMNS;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < T::WARPS; ++i)
            if (i * T::OF_WARP < k) sum += partial[(i * T::ROWS + thread.warp) * T::MOST_COLUMNS + thread.lane];
        if (has_column) logits[thread.lane] = sum + bias;
        __syncwarp();
        const float value = weighted_row<Loss>(logits, n, target, row_weight, [=](int j, float d) {
            deltas[j * T::ROWS + thread.warp] = d;
            delta[(first + thread.warp) * n + j] = d;
        });
        if (thread.lane == 0) errors[2 * thread.warp] = value, errors[2 * thread.warp + 1] = row_weight;
    } else if (thread.has_row()) {
        deltas[thread.lane * T::ROWS + thread.warp] = 0.0f;
        if (thread.lane == 0) errors[2 * thread.warp] = errors[2 * thread.warp + 1] = 0.0f;
    }
    __syncthreads();
    if (rows <= 0) pdl_wait_and_trigger();
    if (thread.warp == T::WARPS) add_errors_up<T::ROWS>(step, errors, blockIdx.x, gridDim.x, sums, arrived, totals, losses);

    const bool is_padding = dx_components && rows <= 0 && row0 < filled_rows(shard_of.count);
    if (!((dx || dx_components) && rows > 0) && !is_padding) return;
    uint16_t* const of_block = dx_components ? dx_components + static_cast<int64_t>(row0) * padded_columns(k) : nullptr;
    const HeadInputGradient gradient = {dx ? dx + first * k : nullptr, of_block, dx_stride, dx_component_count, rows, k,
                                        {kept, keep, k}, row0};
    int tops[T::ROWS_PER_LANE];
#pragma unroll
    for (int& top : tops) top = NO_EXPONENT;
    for (int k0 = 0; k0 < k; k0 += T::DEPTH) {
        float sum[HeadThread::COUNT] = {};
        if (!thread.computes(k - k0)) continue;
#pragma unroll 2
        for (int j = 0; j < n && !is_padding; ++j) {
            float of_w[T::PER_LANE], of_delta[T::ROWS_PER_LANE];
            if (is_whole)
                thread.weights(staged + j * T::PITCH, of_w);
            else
                thread.weights(w + static_cast<int64_t>(k0) * n + j, k - k0, n, of_w);
            load_four(deltas + j * T::ROWS + thread.row0, of_delta);
#pragma unroll
            for (int r = 0; r < T::ROWS_PER_LANE; ++r)
#pragma unroll
                for (int i = 0; i < T::PER_LANE; ++i)
                    sum[r * T::PER_LANE + i] = fmaf(of_delta[r], of_w[i], sum[r * T::PER_LANE + i]);
        }
        if (saved && !(is_whole && saved == x)) thread.load(saved + first * k, rows, k, k0, values);
        if (saved) {
#pragma unroll
            for (int i = 0; DROPS && i < HeadThread::COUNT; ++i) values[i] *= restore;
            Activations::derivatives(activation, values);
#pragma unroll
            for (int i = 0; i < HeadThread::COUNT; ++i) sum[i] *= DROPS ? values[i] : values[i] * keep;
        }
#pragma unroll
        for (int v = 0; DROPS && v < HeadThread::VECTORS; ++v)
            gradient.drop<T::ROWS_PER_LANE, T::PER_LANE>(sum + 4 * v, thread.row0, k0 + thread.offset(v));
        if (dx_row_scales) {
#pragma unroll
            for (int i = 0; i < HeadThread::COUNT; ++i) {
                int& top = tops[i / T::PER_LANE];
                if (sum[i] != 0.0f) top = max(top, max(exponent_of(sum[i]), NO_EXPONENT + 1));
            }
        }
#pragma unroll
        for (int v = 0; v < HeadThread::VECTORS; ++v) {
            const int column = k0 + thread.offset(v);
            if (column >= k) break;
            gradient.store<T::ROWS_PER_LANE, T::PER_LANE>(sum + 4 * v, thread.row0, column);
        }
    }
    if (dx_row_scales) store_row_scales<T>(thread.row0, tops, rows, reinterpret_cast<int*>(partial), dx_row_scales + row0);
}

}  // namespace mlpgpu
