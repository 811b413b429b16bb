// A dense layer's gradient and the optimizer's step in one kernel: neither dW nor db is ever stored.
//
// It needs the batch's summed weight, so the total error is made before the backward pass; and dx before
// this, because it reads W.  Arrays as in dense.cuh.
#pragma once

#include "dense.cuh"
#include "update.cuh"

namespace mlpgpu {

// weight (k, n), bias (n,), or null, and their slots, all in place; of slot s they lie s · size on.
// Grid: (tiles of k, tiles of n).
template <class Rule, class T>
__device__ __forceinline__ void dense_backward_update(const Step* step, int share, int shares, const float* x,
                                                      const int* order, const float* dz, const double* totals,
                                                      float* weight, float* bias, float* weight_slots,
                                                      float* bias_slots, int64_t size, int k, int n) {
    const Rows rows = share_rows(step, share, shares);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    const Operand<false> a = {first_row(rows, x, order, k), k, rows.count, k, row_lines(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const row = schedule + step->run * COLUMNS;
    const InPlace<Rule> of_weight = {weight, weight_slots, size, n, scale, row};
    const InPlace<Rule> of_bias = {bias, bias_slots, size, n, scale, row};
    gemm_tile_in_place(T(), a, b, m0, n0, 0, rows.count, column_sum(bias ? n : 0, of_bias), of_weight);
}

// The same where tiles would be too few, or would compute little but padding: a block takes LINES rows of W, the
// bias counting as one more whose x is 1, and COLUMNS of its columns.  Its threads divide the share's rows among
// themselves, and their sums are added up in order.
// Grid: (blocks of k + 1, blocks of n).
struct Narrow {
    static constexpr int LINES = 8, COLUMNS = 16, SLICES = 64, THREADS = LINES * SLICES;
    static constexpr int ROWS = 512;                // whose dz is staged at once
    static constexpr int PITCH = COLUMNS + 4;       // rows of it that a warp reads at once lie in different banks
    static constexpr int SHARED_FLOATS = ROWS * PITCH;
    static_assert(THREADS / WARP * LINES * COLUMNS <= SHARED_FLOATS, "the sums of all warps take the place of dz");
};

template <class Rule>
__device__ __forceinline__ void dense_backward_update_narrow(const Step* step, int share, int shares, const float* x,
                                                             const int* order, const float* dz, const double* totals,
                                                             float* weight, float* bias, float* weight_slots,
                                                             float* bias_slots, int64_t size, int k, int n) {
    using T = Narrow;
    constexpr int PER_THREAD = T::ROWS / T::SLICES;
    SHARED(float, shared);
    const Rows rows = share_rows(step, share, shares);
    const float* const from = first_row(rows, x, order, k);
    const int* const lines = row_lines(rows, order);
    const int slice = threadIdx.x / T::LINES, line = blockIdx.x * T::LINES + threadIdx.x % T::LINES;
    const int n0 = blockIdx.y * T::COLUMNS;
    const float* const of_share = dz + static_cast<int64_t>(rows.first) * n;

    float sums[T::COLUMNS] = {};
    for (int row0 = 0; row0 < rows.count; row0 += T::ROWS) {
        const int staged = min(T::ROWS, rows.count - row0);
        float values[PER_THREAD];  // of x, on their way while dz is staged
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int row = row0 + slice + i * T::SLICES;
            const int64_t stored = lines && row < rows.count ? lines[row] : row;
            values[i] = line == k ? 1.0f : line < k && row < rows.count ? from[stored * k + line] : 0.0f;
        }
        // A column for each thread, and so manieth rows of it: all loads are on their way before the first is stored.
        constexpr int APART = T::THREADS / T::COLUMNS, STAGED_PER_THREAD = T::ROWS / APART;
        const int column = threadIdx.x % T::COLUMNS, first = threadIdx.x / T::COLUMNS;
        float deltas[STAGED_PER_THREAD];
#pragma unroll
        for (int i = 0; i < STAGED_PER_THREAD; ++i) {
            const int row = first + i * APART;
            const bool inside = row < staged && n0 + column < n;
            deltas[i] = inside ? of_share[static_cast<int64_t>(row0 + row) * n + n0 + column] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < STAGED_PER_THREAD; ++i) shared[(first + i * APART) * T::PITCH + column] = deltas[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            if (slice + i * T::SLICES >= staged) break;
            const float* const of_row = shared + (slice + i * T::SLICES) * T::PITCH;
#pragma unroll
            for (int j = 0; j < T::COLUMNS; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(of_row + j);
                sums[j] = fmaf(values[i], four.x, sums[j]), sums[j + 1] = fmaf(values[i], four.y, sums[j + 1]);
                sums[j + 2] = fmaf(values[i], four.z, sums[j + 2]), sums[j + 3] = fmaf(values[i], four.w, sums[j + 3]);
            }
        }
    }
    // First over the slices of a warp, then over the warps.
    __syncthreads();
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < T::COLUMNS; ++j) {
        for (int offset = T::LINES; offset < WARP; offset *= 2) sums[j] += __shfl_xor_sync(WARP_ALL, sums[j], offset);
        if (lane < T::LINES) shared[(threadIdx.x / WARP * T::LINES + lane) * T::COLUMNS + j] = sums[j];
    }
    __syncthreads();
    if (threadIdx.x >= T::LINES * T::COLUMNS) return;
    const int row = blockIdx.x * T::LINES + threadIdx.x / T::COLUMNS, column = n0 + threadIdx.x % T::COLUMNS;
    if (column >= n || row > k || (row == k && !bias)) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < T::THREADS / WARP; ++warp) sum += shared[warp * T::LINES * T::COLUMNS + threadIdx.x];
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const rates = schedule + step->run * COLUMNS;
    if (row < k)
        InPlace<Rule>{weight, weight_slots, size, n, scale, rates}(row, column, sum);
    else
        InPlace<Rule>{bias, bias_slots, size, n, scale, rates}(0, column, sum);
}

// WIDTH neighbours in memory, aligned to as many: to stay in the cache, or (once) to leave it soon.
template <int WIDTH>
__device__ __forceinline__ void load_run(const float* at, float (&values)[WIDTH]) {
    if constexpr (WIDTH == 4) {
        const float4 four = *reinterpret_cast<const float4*>(at);
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else {
        values[0] = *at;
    }
}

template <int WIDTH>
__device__ __forceinline__ void load_run_once(const float* at, float (&values)[WIDTH]) {
    if constexpr (WIDTH == 4) {
        const float4 four = __ldcs(reinterpret_cast<const float4*>(at));
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else {
        values[0] = __ldcs(at);
    }
}

template <int WIDTH>
__device__ __forceinline__ void store_run(float* at, const float (&values)[WIDTH]) {
    if constexpr (WIDTH == 4)
        *reinterpret_cast<float4*>(at) = make_float4(values[0], values[1], values[2], values[3]);
    else
        *at = values[0];
}

template <int WIDTH>
__device__ __forceinline__ void store_run_once(float* at, const float (&values)[WIDTH]) {
    if constexpr (WIDTH == 4)
        __stcs(reinterpret_cast<float4*>(at), make_float4(values[0], values[1], values[2], values[3]));
    else
        __stcs(at, values[0]);
}

// The same for at most FewUpdate::ROWS rows, whose time is that of reading and writing parameters and slots.  A
// block takes a stretch of W as it lies in memory, a thread runs of WIDTH neighbours; x and dz come to shared memory
// meanwhile.  The slots are asked not to take the cache from W, which the next step reads first.
// Grid: one block for every SIZE elements of W.
struct FewUpdate {
    static constexpr int THREADS = 256, ROWS = 8, PER_THREAD = 16, SIZE = THREADS * PER_THREAD;
    static constexpr int LEAST_COLUMNS = 16, MOST_COLUMNS = 512;
    static constexpr int LINES = SIZE / LEAST_COLUMNS + 2;  // the most that a stretch touches
    static constexpr int SHARED_FLOATS = ROWS * (LINES + MOST_COLUMNS);
};

template <class Rule, int WIDTH>
__device__ __forceinline__ void update_few(const Rows& rows, const float* x, const int* lines, const float* dz,
                                           float* weight, float* slots, int64_t size, float scale, const float* row,
                                           int k, int n) {
    using T = FewUpdate;
    constexpr int SLOTS = Rule::SLOTS, HELD = SLOTS > 0 ? SLOTS : 1, RUNS = T::PER_THREAD / WIDTH;
    SHARED(float, shared);
    float* const values = shared;                            // (rows, LINES) of x
    float* const deltas = values + T::ROWS * T::LINES;       // (rows, n)
    const int start = blockIdx.x * T::SIZE, end = min(start + T::SIZE, k * n), line0 = start / n;

    float w[RUNS][WIDTH], slot[RUNS][HELD][WIDTH];
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const int at = start + (threadIdx.x + i * T::THREADS) * WIDTH;
        if (at >= end) break;
        load_run<WIDTH>(weight + at, w[i]);
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) load_run_once<WIDTH>(slots + s * size + at, slot[i][s]);
    }
    const int touched = (end - 1) / n - line0 + 1;
    for (int r = 0; r < rows.count; ++r) {
        const float* const of_row = x + static_cast<int64_t>(lines ? lines[r] : r) * k + line0;
        for (int i = threadIdx.x; i < touched; i += T::THREADS) values[r * T::LINES + i] = of_row[i];
        for (int i = threadIdx.x; i < n; i += T::THREADS) deltas[r * n + i] = dz[static_cast<int64_t>(r) * n + i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const int at = start + (threadIdx.x + i * T::THREADS) * WIDTH;
        if (at >= end) break;
        int line = at / n, column = at - line * n;
        line -= line0;
#pragma unroll
        for (int q = 0; q < WIDTH; ++q) {
            float sum = 0.0f, of_element[HELD];
            for (int r = 0; r < rows.count; ++r) sum = fmaf(values[r * T::LINES + line], deltas[r * n + column], sum);
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) of_element[s] = slot[i][s][q];
            step_parameter<Rule>(w[i][q], of_element, sum, scale, row);
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) slot[i][s][q] = of_element[s];
            if (++column == n) ++line, column = 0;
        }
        store_run<WIDTH>(weight + at, w[i]);
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) store_run_once<WIDTH>(slots + s * size + at, slot[i][s]);
    }
}

template <class Rule>
__device__ __forceinline__ void dense_backward_update_few(const Step* step, int share, int shares, const float* x,
                                                          const int* order, const float* dz, const double* totals,
                                                          float* weight, float* bias, float* weight_slots,
                                                          float* bias_slots, int64_t size, int k, int n) {
    const Rows rows = share_rows(step, share, shares);
    const float* const from = first_row(rows, x, order, k);
    const int* const lines = row_lines(rows, order);
    const float* const of_share = dz + static_cast<int64_t>(rows.first) * n;
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const row = schedule + step->run * COLUMNS;
    // Slots lie a multiple of `size` elements apart.
    const bool vectored = is_vectored(weight, k * n) && is_vectored(weight_slots, Rule::SLOTS > 1 ? size % 4 : 0);
    if (vectored)
        update_few<Rule, 4>(rows, from, lines, of_share, weight, weight_slots, size, scale, row, k, n);
    else
        update_few<Rule, 1>(rows, from, lines, of_share, weight, weight_slots, size, scale, row, k, n);
    if (bias && blockIdx.x == 0) {
        const InPlace<Rule> of_bias = {bias, bias_slots, size, n, scale, row};
        for (int j = threadIdx.x; j < n; j += blockDim.x) {
            float sum = 0.0f;
            for (int r = 0; r < rows.count; ++r) sum += of_share[static_cast<int64_t>(r) * n + j];
            of_bias(0, j, sum);
        }
    }
}

}  // namespace mlpgpu
