// A dense layer's gradient and the optimizer's step in one kernel: neither dW nor db is ever stored.
//
// It needs the batch's summed weight, so the total error is made before the backward pass; and dx before
// this, because it reads W.  Arrays as in dense/dense.cuh.
#pragma once

#include "dense/dense.cuh"
#include "common/dependent_launch.cuh"
#include "gemm/operands.cuh"
#include "elementwise/update.cuh"

namespace mlpgpu {

// weight (k, n), bias (n,), or null, and their slots, all in place; of slot s they lie s · size on.
// Grid: (tiles of k, tiles of n).
template <class Rule, class T>
__device__ __forceinline__ void dense_backward_update(const Step* step, int shard, int shards, const float* x,
                                                      const int* order, const float* dz, const double* totals,
                                                      float* weight, float* bias, float* weight_slots,
                                                      float* bias_slots, int64_t size, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
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
// bias counting as one more whose x is 1, and COLUMNS of its columns.  Half a warp has PER_LANE of the lines, and each
// of its lanes every so manieth row of the shard; lanes add their sums up, and then warps, in order.
// Grid: (blocks of k + 1, blocks of n).
struct Narrow {
    static constexpr int LINES = 8, COLUMNS = 16, PER_LANE = 4, THREADS = 256, WARPS = THREADS / WARP;
    static constexpr int LANES = WARP * PER_LANE / LINES, SLICES = WARPS * LANES;  // rows at once
    static constexpr int BATCH = 8;                                                // rows of x that a thread holds
    static constexpr int DZ_FLOATS = 1024 * 10, SHARED_FLOATS = DZ_FLOATS + PER_LANE;  // of dz at once, and behind it
    static_assert(WARPS * LINES * COLUMNS <= SHARED_FLOATS, "the sums of all warps take the place of dz");
    static_assert(LANES == PER_LANE * PER_LANE, "a lane ends with one sum of so many lines and columns");
};

// shared (rows, pitch) = so many columns of dz (rows, n), by vectors where that is one stretch of memory in both.
__device__ __forceinline__ void stage_deltas(const float* dz, int rows, int columns, int n, float* shared, int pitch) {
    using T = Narrow;
    if (pitch == n && reinterpret_cast<uintptr_t>(dz) % 16 == 0) {
        constexpr int MOST = T::DZ_FLOATS / (4 * T::THREADS);
        const int size = rows * n;
        float4 values[MOST];
#pragma unroll
        for (int i = 0; i < MOST; ++i) values[i] = row_vector(dz, size, 4 * (threadIdx.x + i * T::THREADS), true);
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const int at = 4 * (threadIdx.x + i * T::THREADS);
            if (at < size) *reinterpret_cast<float4*>(shared + at) = values[i];
        }
        return;
    }
    const int apart = T::THREADS / columns, column = threadIdx.x % columns, first = threadIdx.x / columns;
#pragma unroll 8
    for (int r = first < apart ? first : rows; r < rows; r += apart)
        shared[r * pitch + column] = dz[static_cast<int64_t>(r) * n + column];
}

template <class Rule>
__device__ __forceinline__ void dense_backward_update_narrow(const Step* step, int shard, int shards, const float* x,
                                                             const int* order, const float* dz, const double* totals,
                                                             float* weight, float* bias, float* weight_slots,
                                                             float* bias_slots, int64_t size, int k, int n) {
    using T = Narrow;
    constexpr int GROUPS = T::COLUMNS / T::PER_LANE;  // of columns
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, slice = warp * T::LANES + lane % T::LANES;
    const int first_line = blockIdx.x * T::LINES + lane / T::LANES * T::PER_LANE, n0 = blockIdx.y * T::COLUMNS;

    // What the first threads move in the end, on its way from the beginning.
    const int row = blockIdx.x * T::LINES + threadIdx.x / T::COLUMNS, column = n0 + threadIdx.x % T::COLUMNS;
    const bool moves = threadIdx.x < T::LINES * T::COLUMNS && column < n && (row < k || (row == k && bias));
    const float* const rates = schedule + step->run * COLUMNS;
    const InPlace<Rule> of_weight = {weight, weight_slots, size, n, 0.0f, rates};
    const InPlace<Rule> of_bias = {bias, bias_slots, size, n, 0.0f, rates};
    InPlace<Rule> place = row < k ? of_weight : of_bias;
    typename InPlace<Rule>::Held held = {};
    if (moves) held = place.hold(row < k ? row : 0, column);

    const Rows rows = shard_rows(step, shard, shards);
    const float* const from = first_row(rows, x, order, k);
    const int* const lines = row_lines(rows, order);
    const bool vectored = k % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
    if (!vectored) follow_launch_before();  // single floats are read through the first-level cache
    const int columns = min(T::COLUMNS, n - n0), pitch = columns + (columns % 4 == 0);  // for 16 rows in other banks
    const int most = min(T::BATCH * T::SLICES, T::DZ_FLOATS / pitch / T::SLICES * T::SLICES);
    const float* const of_shard = dz + static_cast<int64_t>(rows.first) * n + n0;
    float sums[GROUPS][T::PER_LANE * T::PER_LANE] = {};
    double read_totals[2] = {};
    for (int row0 = 0; row0 < rows.count; row0 += most) {
        const int staged = min(most, rows.count - row0);
        if (row0 > 0) __syncthreads();
        float values[T::BATCH][T::PER_LANE];
#pragma unroll
        for (int i = 0; i < T::BATCH; ++i) {
            const int r = min(slice + i * T::SLICES, staged - 1);  // no one waits for what is not there
            const int64_t stored = lines ? lines[row0 + r] : row0 + r;
            const float4 four = row_vector(from + stored * k, k, first_line, vectored);
            values[i][0] = four.x, values[i][1] = four.y, values[i][2] = four.z, values[i][3] = four.w;
        }
        follow_launch_before();
        read_totals[0] = totals[0], read_totals[1] = totals[1];  // the division comes later, with nothing to wait for
        stage_deltas(of_shard + static_cast<int64_t>(row0) * n, staged, columns, n, shared, pitch);
        __syncthreads();
        if (first_line <= k && k < first_line + T::PER_LANE) {
#pragma unroll
            for (int i = 0; i < T::BATCH; ++i)
#pragma unroll
                for (int q = 0; q < T::PER_LANE; ++q)
                    if (first_line + q == k) values[i][q] = 1.0f;
        }
#pragma unroll
        for (int i = 0; i < T::BATCH; ++i) {
            const int r = slice + i * T::SLICES;
            if (r >= staged) break;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if (group * T::PER_LANE >= columns) break;
#pragma unroll
                for (int j = 0; j < T::PER_LANE; ++j) {  // also of columns that there are not: no one asks for their sums
                    const float delta = shared[r * pitch + group * T::PER_LANE + j];
                    float* const its = sums[group] + j * T::PER_LANE;
#pragma unroll
                    for (int q = 0; q < T::PER_LANE; ++q) its[q] = fmaf(values[i][q], delta, its[q]);
                }
            }
        }
    }
    __syncthreads();
    const int mine = lane % T::LANES, my_line = lane / T::LANES * T::PER_LANE + mine % T::PER_LANE;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        if (group * T::PER_LANE >= columns) break;
        const float sum = sum_to_lanes(sums[group]);
        shared[(warp * T::LINES + my_line) * T::COLUMNS + group * T::PER_LANE + mine / T::PER_LANE] = sum;
    }
    __syncthreads();
    if (!moves) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < T::WARPS; ++i) sum += shared[i * T::LINES * T::COLUMNS + threadIdx.x];
    place.scale = static_cast<float>(inverse_weight(read_totals));
    place.put(row < k ? row : 0, column, sum, held);
}

// WIDTH neighbours in memory, aligned to as many; what is read or written once is asked to leave the cache soon.
template <int WIDTH>
__device__ __forceinline__ void load_run(const float* at, float (&values)[WIDTH], bool once) {
    if constexpr (WIDTH == 2) {
        const float2* const place = reinterpret_cast<const float2*>(at);
        const float2 two = once ? __ldcs(place) : *place;
        values[0] = two.x, values[1] = two.y;
    } else {
        values[0] = once ? __ldcs(at) : *at;
    }
}

template <int WIDTH>
__device__ __forceinline__ void store_run(float* at, const float (&values)[WIDTH], bool once) {
    if constexpr (WIDTH == 2) {
        float2* const place = reinterpret_cast<float2*>(at);
        const float2 two = make_float2(values[0], values[1]);
        once ? __stcs(place, two) : static_cast<void>(*place = two);
    } else {
        once ? __stcs(at, values[0]) : static_cast<void>(*at = values[0]);
    }
}

// --- few rows ---
//
// When at most FewUpdate::ROWS rows meet a large W (k, n), the time is that of reading and writing W and its slots.  So
// that W is touched once a step, whoever has moved an element multiplies it with the next step's x as well, which
// leaves parts of z as dense_forward_part_few does.  A block takes PART lines of W; a thread the same WIDTH columns of
// every so manieth of them, so that its columns of dz, and its sums of z, stay in registers.
struct FewUpdate {
    static constexpr int THREADS = 256, ROWS = 8, PART = 512, COLUMNS = 256;
    static constexpr int SHARED_FLOATS = 2 * ROWS * PART;  // x of this step and of the next, or the threads' sums
};

// A step's rows of an input (B, k), or of the data set by the order; the shard is the whole batch.
struct FewRows {
    const float* x;
    const int* lines;
    int count;

    __device__ __forceinline__ FewRows(const Step& step, const float* x, const int* order)
        : x(x), lines(order ? order + shard_rows(&step, 0, 1).order : nullptr),
          count(max(0, shard_rows(&step, 0, 1).count)) {}

    // staged (depth, ROWS) = x from column k0 on, 0 for rows that there are not.
    template <int ROWS>
    __device__ __forceinline__ void stage(int k, int k0, int depth, float* staged) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float* const row = x + static_cast<int64_t>(r < count && lines ? lines[r] : r) * k + k0;
            for (int i = threadIdx.x; i < depth; i += blockDim.x) staged[i * ROWS + r] = r < count ? row[i] : 0.0f;
        }
    }
};

template <class Rule, int ROWS, int WIDTH>
__device__ __forceinline__ void update_few(const FewRows& rows, const FewRows& next, const float* dz, float* weight,
                                           float* slots, int64_t size, float scale, const float* rates, float* parts,
                                           int k, int n, int part, int capacity) {
    using T = FewUpdate;
    constexpr int SLOTS = Rule::SLOTS, HELD = SLOTS > 0 ? SLOTS : 1, BATCH = 4 / HELD;
    SHARED(float, shared);
    float* const staged = shared;                   // (part, ROWS) of x
    float* const staged_next = shared + ROWS * part;
    const int k0 = blockIdx.x * part, depth = min(part, k - k0), n0 = blockIdx.y * T::COLUMNS;
    const int width = min(T::COLUMNS, n - n0) / WIDTH, teams = T::THREADS / width;  // a team of threads has a line
    const int team = threadIdx.x / width, column = n0 + threadIdx.x % width * WIDTH;
    const int mine = team < teams ? depth : 0;
    weight += static_cast<int64_t>(k0) * n + column;
    slots += static_cast<int64_t>(k0) * n + column;

    // Two batches of lines: one is on its way while the other one is moved.
    float w[2][BATCH][WIDTH], slot[2][BATCH][HELD][WIDTH];
    const int apart = BATCH * teams;
    const auto fetch = [&](int held, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int line = first + b * teams;
            if (line >= mine) break;
            load_run<WIDTH>(weight + line * n, w[held][b], false);
#pragma unroll
            for (int s = 0; dz && s < SLOTS; ++s)
                load_run<WIDTH>(slots + s * size + line * n, slot[held][b][s], true);
        }
    };
    float delta[ROWS][WIDTH] = {}, z[ROWS][WIDTH] = {};
    const auto move = [&](int held, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int line = first + b * teams;
            if (line >= mine) break;
#pragma unroll
            for (int q = 0; q < WIDTH; ++q) {
                float& element = w[held][b][q];
                if (dz) {
                    float sum = 0.0f, of_element[HELD];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sum = fmaf(staged[line * ROWS + r], delta[r][q], sum);
#pragma unroll
                    for (int s = 0; s < SLOTS; ++s) of_element[s] = slot[held][b][s][q];
                    step_parameter<Rule>(element, of_element, sum, scale, rates);
#pragma unroll
                    for (int s = 0; s < SLOTS; ++s) slot[held][b][s][q] = of_element[s];
                }
#pragma unroll
                for (int r = 0; r < ROWS; ++r) z[r][q] = fmaf(staged_next[line * ROWS + r], element, z[r][q]);
            }
            if (!dz) continue;
            store_run<WIDTH>(weight + line * n, w[held][b], false);
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) store_run<WIDTH>(slots + s * size + line * n, slot[held][b][s], true);
        }
    };

    fetch(0, team);
    fetch(1, team + apart);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < WIDTH; ++q)
            if (dz && mine && r < rows.count) delta[r][q] = dz[r * n + column + q];
    rows.stage<ROWS>(k, k0, depth, staged);
    next.stage<ROWS>(k, k0, depth, staged_next);
    __syncthreads();
    for (int first = team; first < mine; first += 2 * apart) {
#pragma unroll
        for (int held = 0; held < 2; ++held) {
            move(held, first + held * apart);
            fetch(held, first + (held + 2) * apart);
        }
    }

    // The teams' sums of z take the place of x.
    if (!parts) return;
    const int columns = width * WIDTH;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < WIDTH; ++q)
            if (mine) shared[(team * ROWS + r) * columns + column - n0 + q] = z[r][q];
    __syncthreads();
    for (int at = threadIdx.x; at < next.count * columns; at += T::THREADS) {
        float sum = shared[at];
        for (int t = 1; t < teams; ++t) sum += shared[t * ROWS * columns + at];
        parts[(static_cast<int64_t>(blockIdx.x) * capacity + at / columns) * n + n0 + at % columns] = sum;
    }
}

// What all blocks of such an update know: the rows of this step and of the next, or without dz those of this step as the
// next ones.
template <class Rule>
struct FewStep {
    const float* dz;
    float scale;
    const float* rates;
    FewRows rows, next;

    __device__ __forceinline__ FewStep(const Step* step, const float* x, const int* order, const float* dz,
                                       const double* totals)
        : dz(dz), scale(dz ? static_cast<float>(inverse_weight(totals)) : 0.0f), rates(schedule + step->run * COLUMNS),
          rows(*step, x, order), next(after(*step, dz), x, order) {}

    static __device__ __forceinline__ Step after(Step step, const float* dz) {
        step.batch += dz ? 1 : 0;
        return step;
    }

    __device__ __forceinline__ bool is_single() const { return max(rows.count, next.count) <= 1; }

    __device__ __forceinline__ void move_bias(float* bias, float* slots, int64_t size, int n) const {
        if (!dz || !bias || blockIdx.x > 0 || blockIdx.y > 0) return;
        const InPlace<Rule> of_bias = {bias, slots, size, n, scale, rates};
        for (int j = threadIdx.x; j < n; j += blockDim.x) {
            float sum = 0.0f;
            for (int r = 0; r < rows.count; ++r) sum += dz[r * n + j];
            of_bias(0, j, sum);
        }
    }
};

// The step along dz of weight, bias and slots, as above, and the parts (grid x, capacity, n) of the next step's z; both
// for x (B, k), or for the data set by the order.  Without dz there is no step, and z is this step's, before the first
// one of a run; without `parts` there is no z.
// Grid: (parts of k, n over 256).
template <class Rule>
__device__ __forceinline__ void dense_update_few(const Step* step, const float* x, const int* order, const float* dz,
                                                 const double* totals, float* weight, float* bias, float* weight_slots,
                                                 float* bias_slots, int64_t size, float* parts, int k, int n, int part,
                                                 int capacity) {
    const FewStep<Rule> few(step, x, order, dz, totals);
    const auto run = [&](auto held, auto wide) {
        update_few<Rule, decltype(held)::value, decltype(wide)::value>(few.rows, few.next, dz, weight, weight_slots,
                                                                       size, few.scale, few.rates, parts, k, n, part,
                                                                       capacity);
    };
    // Columns in pairs where the arrays allow it; slots lie a multiple of `size` elements apart.
    const bool paired = n % 2 == 0 && reinterpret_cast<uintptr_t>(weight) % 8 == 0 &&
                        reinterpret_cast<uintptr_t>(weight_slots) % 8 == 0 && (Rule::SLOTS < 2 || size % 2 == 0);
    if (few.is_single())
        paired ? run(Is<1>(), Is<2>()) : run(Is<1>(), Is<1>());
    else
        paired ? run(Is<FewUpdate::ROWS>(), Is<2>()) : run(Is<FewUpdate::ROWS>(), Is<1>());
    few.move_bias(bias, bias_slots, size, n);
}

}  // namespace mlpgpu
