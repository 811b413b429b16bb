// The column head: a head (fused/head.cuh) of few rows, of a long row or of a small weight.
//
// A thread takes a column of W and every so many-th row of it, from memory to registers, with as many loads in flight as
// it has room for; x lies in shared memory. For dx it takes four neighbours of k, and W comes to shared memory by columns
// while the loss is made. Of few rows several blocks have the same ones: each makes their logits, and a share of dx's columns.
// Of a large W these are a cluster, and each adds up a share of k, too.
#pragma once

#include "arch/barriers.cuh"
#include "common/async_copy.cuh"
#include "fused/head.cuh"

namespace mlpgpu {

template <int ROWS_, int SPLIT_ = 1>
struct ColumnHead {
    static constexpr int ROWS = ROWS_, ROWS_PER_LANE = 2;  // of a block; of a thread's dx
    static constexpr int SPLIT = SPLIT_;                   // blocks of a cluster, which have the same rows
    static constexpr int WARPS = ROWS < 4 ? 15 : 8, THREADS = (WARPS + 1) * WARP;  // one warp adds errors up during dx
    static constexpr int BATCH = ROWS < 4 ? 48 : 32, GROUP = 8;  // loads of W in flight; of these between two limits
    static constexpr int STEPS = 16 / ROWS;                      // of k whose x are in flight
    static constexpr int ROOM = 12336, DEPTH = ROOM / ROWS - 1;  // floats of x, later of W's columns; k of x in it
    static constexpr int COLUMN_STEP = 32, GAP = 4;  // columns are multiples long and lie GAP apart, in other banks
    static constexpr int PARTIAL = ROWS * THREADS, LOGITS = ROWS * Head::MOST_COLUMNS;
    static constexpr int SHARED_BYTES = 4 * (ROOM + PARTIAL + 3 * LOGITS + 4 * ROWS);
};

// A thread's elements of W (k, n): a column's from row `first` on, `stride` rows apart. Threads from all() on have none.
template <class T>
struct HeadColumn {
    int n, stride, column, first;

    __device__ __forceinline__ explicit HeadColumn(int n)
        : n(n), stride(T::THREADS / n), column(threadIdx.x % n), first(threadIdx.x / n) {}

    __device__ __forceinline__ bool is_there() const { return first < stride; }

    // values (BATCH,) of rows from k0 on, and before `end`; groups without any are left out.
    __device__ __forceinline__ void load(const float* w, int k0, int end, float (&values)[T::BATCH]) const {
        const float* from = w + static_cast<int64_t>(k0 + first) * n + column;
        const int64_t step = static_cast<int64_t>(stride) * n;
        const int last = is_there() ? end - k0 - first : 0;
#pragma unroll
        for (int i0 = 0; i0 < T::BATCH; i0 += T::GROUP) {
            if (k0 + i0 * stride >= end) break;
#pragma unroll
            for (int i = i0; i < i0 + T::GROUP; ++i, from += step) values[i] = i * stride < last ? __ldcg(from) : 0.0f;
        }
    }

    // Adds their products with x (k, ROWS) to each row's sum, from its row k0 on; its row `depth` has zeros.
    __device__ __forceinline__ void multiply(const float (&values)[T::BATCH], const float* x, int k0, int depth,
                                             float (&sums)[T::ROWS]) const {
#pragma unroll
        for (int i0 = 0; i0 < T::BATCH; i0 += T::GROUP) {
            if (k0 + i0 * stride >= depth) break;
#pragma unroll
            for (int i = i0; i < i0 + T::GROUP; ++i) {
                float of_x[T::ROWS];
                load_neighbours(x + min(k0 + first + i * stride, depth) * T::ROWS, of_x);
#pragma unroll
                for (int r = 0; r < T::ROWS; ++r) sums[r] = fmaf(of_x[r], values[i], sums[r]);
            }
        }
    }

    // Starts to copy the column's rows [k0, k0 + depth), to staged (n, pitch); zeros follow up to a multiple of four.
    __device__ __forceinline__ void copy(const float* w, int k0, int depth, int pitch, float* staged) const {
        const float* from = w + static_cast<int64_t>(k0 + first) * n + column;
        const int64_t step = static_cast<int64_t>(stride) * n;
        float* const to = staged + column * pitch;
        const int end = is_there() ? depth : 0;
#pragma unroll 4
        for (int i = first; i < end; i += stride, from += step) copy_async<4>(to + i, from);
        if (depth + first < round_up(depth, 4)) to[depth + first] = 0.0f;
    }

    // The sum of the threads' sums of a row (THREADS,), in the lane of its column.
    __device__ __forceinline__ float total(const float* sums) const {
        const int lane = threadIdx.x % WARP;
        int lanes = 1;
        while (lanes < n) lanes *= 2;
        const int column = lane % lanes;
        float sum = 0.0f;
#pragma unroll 8
        for (int i = lane / lanes; i < stride; i += WARP / lanes) sum += column < n ? sums[i * n + column] : 0.0f;
        for (int apart = lanes; apart < WARP; apart *= 2) sum += __shfl_xor_sync(WARP_ALL, sum, apart);
        return sum;
    }
};

// x's columns [k0, k0 + depth) of the block's rows to staged (depth + 1, ROWS), with a row of zeros at the end.
template <class T>
__device__ __forceinline__ void stage_head_rows(const float* x, int rows, int k, int k0, int depth, float* staged) {
    for (int i0 = threadIdx.x; i0 <= depth; i0 += T::STEPS * T::THREADS) {
        float values[T::STEPS][T::ROWS];
#pragma unroll
        for (int s = 0; s < T::STEPS; ++s)
#pragma unroll
            for (int r = 0; r < T::ROWS; ++r) {
                const int i = i0 + s * T::THREADS;
                values[s][r] = i < depth && r < rows ? x[static_cast<int64_t>(r) * k + k0 + i] : 0.0f;
            }
#pragma unroll
        for (int s = 0; s < T::STEPS; ++s)
            if (i0 + s * T::THREADS <= depth) store_neighbours(staged + (i0 + s * T::THREADS) * T::ROWS, values[s]);
    }
}

// A thread's part of dx: ROWS of the block's rows, and every SIZE-th vector of four of k.
template <class T>
struct HeadVectors {
    static constexpr int ROWS = T::ROWS_PER_LANE, LANES = WARP * ROWS / T::ROWS, SIZE = T::WARPS * LANES;
    int row, first;  // the first of each; the last warp has no vectors

    __device__ __forceinline__ HeadVectors() {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        row = lane / LANES * ROWS, first = warp < T::WARPS ? warp * LANES + lane % LANES : 1 << 28;
    }

    // Of an array (rows, k) from the block's first row on.
    __device__ __forceinline__ void load(const float* from, int rows, int k, int column, float (&values)[4 * ROWS]) const {
        const bool vectored = is_vectored(from, k);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row + r < rows) four = load_row(from + static_cast<int64_t>(row + r) * k, k, column, vectored);
            unpack(four, values + 4 * r);
        }
    }
};

// As head(), with the same arguments. Grid: (SPLIT blocks for every ROWS rows of the capacity, or of the capacity padded if
// there are components; shares of dx's columns), one block for all of them if row scales are stored. An element of z is the
// sum of the blocks' sums, in the order of their shares of k.
template <class Loss, class Target, class T, bool DROPS, class Source>
__device__ __forceinline__ void column_head(const Step* step, int shard, int shards, const int* order, const float* x,
                                            const float* w, const float* b, Source targets, const float* weights,
                                            const float* mean, const float* scale, float* delta, double* sums,
                                            unsigned* arrived, double* totals, double* losses, const float* saved,
                                            int activation, const uint32_t* kept, float keep, float restore, float* dx,
                                            uint16_t* dx_components, int64_t dx_stride,
                                            int dx_component_count, int* dx_row_scales, int k, int n) {
    SHARED(float, staged);
    float* const partial = staged + T::ROOM;    // (ROWS, THREADS)
    float* const z = partial + T::PARTIAL;      // (ROWS, MOST_COLUMNS)
    float* const deltas = z + T::LOGITS;        // (n, ROWS)
    float* const shares = deltas + T::LOGITS;   // (ROWS, MOST_COLUMNS), of z
    float* const errors = shares + T::LOGITS;   // (ROWS, 2)
    const Step now = *step;  // under way while W's loads begin
    const int parts = T::SPLIT > 1 ? T::SPLIT : gridDim.y, own = T::SPLIT > 1 ? cluster_rank<T::SPLIT>() : blockIdx.y;
    const int share = T::SPLIT > 1 ? round_up(ceil_div(k, parts), T::COLUMN_STEP) : k;
    const int k_begin = T::SPLIT > 1 ? min(k, own * share) : 0, k_end = min(k, k_begin + share);
    const HeadColumn<T> column(n);
    float of_w[T::BATCH];
    column.load(w, k_begin, min(k_end, k_begin + T::DEPTH), of_w);

    // For the loss a warp takes a row and a lane takes a column.
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Rows shard_of = shard_rows(&now, shard, shards);
    const int block = blockIdx.x / T::SPLIT, row0 = block * T::ROWS, rows = min(T::ROWS, shard_of.count - row0);
    const int64_t first = shard_of.first + row0;  // of the block's rows, in the batch
    const bool is_there = warp < rows, has_column = lane < n;
    const int64_t from = is_there ? order[shard_of.order + first + warp] : 0;
    const float bias = b && has_column ? __ldcg(b + lane) : 0.0f;
    pdl_wait_and_trigger();
    ReadTarget<Target> target = {0.0f};
    float row_weight = 1.0f;
    if (is_there && has_column) target.t = Target{targets, from, n, mean, scale}(lane);
    if (is_there && weights) row_weight = weights[from];

    float row_sums[T::ROWS] = {};
    for (int k0 = k_begin; rows > 0 && k0 < k_end; k0 += T::DEPTH) {
        const int depth = min(T::DEPTH, k_end - k0);
        if (k0 > k_begin) __syncthreads();  // x before has been read
        stage_head_rows<T>(x + first * k, rows, k, k0, depth, staged);
        __syncthreads();
        for (int done = 0; done < depth; done += T::BATCH * column.stride) {
            if (k0 + done > k_begin) column.load(w, k0 + done, k0 + depth, of_w);
            column.multiply(of_w, staged, done, depth, row_sums);
        }
    }
#pragma unroll
    for (int r = 0; r < T::ROWS; ++r) partial[r * T::THREADS + threadIdx.x] = row_sums[r];
    __syncthreads();

    // W's columns for the block's first part of dx, and what its slope needs, come while the loss is made.
    const bool has_dx = (dx || dx_components) && rows > 0;
    const int room = (T::ROOM / n - T::GAP) / T::COLUMN_STEP * T::COLUMN_STEP;
    const int part = min(room, round_up(ceil_div(k, parts), T::COLUMN_STEP)), pitch = part + T::GAP;
    const int begin = T::SPLIT > 1 ? k_begin : own * part, stride = T::SPLIT > 1 ? part : parts * part;
    const int of_dx = T::SPLIT > 1 ? k_end : k;  // where its columns end
    using Vectors = HeadVectors<T>;
    const Vectors vectors;
    float slopes[4 * Vectors::ROWS];
    if (has_dx && begin < of_dx) {
        column.copy(w, begin, min(part, of_dx - begin), pitch, staged);
        if (saved && begin + 4 * vectors.first < k) vectors.load(saved + first * k, rows, k, begin + 4 * vectors.first, slopes);
    }
    float sum = is_there ? column.total(partial + warp * T::THREADS) : 0.0f;
    if constexpr (T::SPLIT > 1) {
        const int place = warp * Head::MOST_COLUMNS + lane;
        if (is_there) shares[place] = sum;
        cluster_synchronize<T::SPLIT>();  // all shares are there
        sum = 0.0f;
#pragma unroll
        for (int other = 0; other < T::SPLIT; ++other)
            if (is_there) sum += load_number_of_block<T::SPLIT>(shared_address(shares + place), other);
    }
    if (is_there) {
        float* const logits = z + warp * Head::MOST_COLUMNS;
        if (has_column) logits[lane] = sum + bias;
        __syncwarp();
        const float value = weighted_row<Loss>(logits, n, target, row_weight, [=](int j, float d) {
            deltas[j * T::ROWS + warp] = d;
            if (own == 0) delta[(first + warp) * n + j] = d;
        });
        if (lane == 0) errors[2 * warp] = value, errors[2 * warp + 1] = row_weight;
    } else if (warp < T::ROWS) {
        deltas[lane * T::ROWS + warp] = 0.0f;
        if (lane == 0) errors[2 * warp] = errors[2 * warp + 1] = 0.0f;
    }
    wait_copies();
    cluster_synchronize<T::SPLIT>();  // a block that is done may go, as all have read its shares
    if (warp == T::WARPS && own == 0)
        add_errors_up<T::ROWS>(step, errors, block, gridDim.x / T::SPLIT, sums, arrived, totals, losses);

    const bool is_padding = dx_components && rows <= 0 && row0 < filled_rows(shard_of.count);
    if (!has_dx && !is_padding) return;
    uint16_t* const of_block = dx_components ? dx_components + static_cast<int64_t>(row0) * padded_columns(k) : nullptr;
    const HeadInputGradient gradient = {dx ? dx + first * k : nullptr, of_block, dx_stride, dx_component_count, rows, k,
                                        {kept, keep, k}, row0};
    int tops[Vectors::ROWS];
#pragma unroll
    for (int& top : tops) top = NO_EXPONENT;
    for (int k0 = begin; k0 < of_dx; k0 += stride) {
        const int end = min(of_dx, k0 + part);
        if (k0 > begin && has_dx) {
            __syncthreads();  // the columns before have been read
            column.copy(w, k0, end - k0, pitch, staged);
            wait_copies();
            __syncthreads();
        }
        for (int at = 4 * vectors.first; at < end - k0; at += 4 * Vectors::SIZE) {
            const bool is_read = k0 == begin && at == 4 * vectors.first;
            if (saved && has_dx && !is_read) vectors.load(saved + first * k, rows, k, k0 + at, slopes);
            float sums_of_dx[4 * Vectors::ROWS] = {};
#pragma unroll 4
            for (int j = 0; j < n && has_dx; ++j) {
                float of_column[4], of_delta[Vectors::ROWS];
                load_four(staged + j * pitch + at, of_column);
                load_neighbours(deltas + j * T::ROWS + vectors.row, of_delta);
#pragma unroll
                for (int i = 0; i < 4 * Vectors::ROWS; ++i) sums_of_dx[i] = fmaf(of_delta[i / 4], of_column[i % 4], sums_of_dx[i]);
            }
            if (saved && has_dx) {
#pragma unroll
                for (int i = 0; DROPS && i < 4 * Vectors::ROWS; ++i) slopes[i] *= restore;
                Activations::derivatives(activation, slopes);
#pragma unroll
                for (int i = 0; i < 4 * Vectors::ROWS; ++i) sums_of_dx[i] *= DROPS ? slopes[i] : slopes[i] * keep;
            }
            if (DROPS) gradient.drop<Vectors::ROWS, 4>(sums_of_dx, vectors.row, k0 + at);
#pragma unroll
            for (int i = 0; dx_row_scales && i < 4 * Vectors::ROWS; ++i)
                if (sums_of_dx[i] != 0.0f) tops[i / 4] = max(tops[i / 4], max(exponent_of(sums_of_dx[i]), NO_EXPONENT + 1));
            gradient.store<Vectors::ROWS, 4>(sums_of_dx, vectors.row, k0 + at);
        }
    }
    if (dx_row_scales) store_row_scales<T>(vectors.row, tops, rows, reinterpret_cast<int*>(partial), dx_row_scales + row0);
}

}  // namespace mlpgpu
