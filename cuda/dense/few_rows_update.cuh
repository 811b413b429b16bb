// The update of a large weight by few rows.
#pragma once

#include "math/optimizers.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

// Loads WIDTH neighbours from an address aligned to them; if `once`, with the hint that they will not be used again soon.
template <int WIDTH>
__device__ __forceinline__ void load_run(const float* address, float (&values)[WIDTH], bool once) {
    if constexpr (WIDTH == 2) {
        const float2* const pair = reinterpret_cast<const float2*>(address);
        const float2 two = once ? __ldcs(pair) : *pair;
        values[0] = two.x, values[1] = two.y;
    } else {
        values[0] = once ? __ldcs(address) : *address;
    }
}

template <int WIDTH>
__device__ __forceinline__ void store_run(float* address, const float (&values)[WIDTH], bool once) {
    if constexpr (WIDTH == 2) {
        float2* const pair = reinterpret_cast<float2*>(address);
        const float2 two = make_float2(values[0], values[1]);
        once ? __stcs(pair, two) : static_cast<void>(*pair = two);
    } else {
        once ? __stcs(address, values[0]) : static_cast<void>(*address = values[0]);
    }
}

// When at most FewRowsUpdate::ROWS rows are multiplied with a large W (k, n), a step takes as long as reading and writing W
// and its slots. So that W is touched once a step, the thread that updates an element also multiplies it with the next
// step's x, and stores partial sums of z as dense_forward_few_rows does. A block takes PART rows of W; a thread takes the
// same WIDTH columns of some of them, so that its columns of dz and its sums of z stay in registers.
struct FewRowsUpdate {
    static constexpr int THREADS = 256, ROWS = 8, PART = 512, COLUMNS = 256;
    static constexpr int SHARED_BYTES = 4 * 2 * ROWS * PART;  // x of this step and of the next, or the threads' sums
};

// A step's rows of an input (B, k), or of the data set by the order; the shard is the whole batch.
struct FewRows {
    const float* x;
    const int* indices;
    int count;

    __device__ __forceinline__ FewRows(const Step& step, const float* x, const int* order)
        : x(x), indices(order ? order + shard_rows(&step, 0, 1).order : nullptr),
          count(max(0, shard_rows(&step, 0, 1).count)) {}

    // staged (depth, ROWS) = x from column k0 on, 0 for rows that do not exist.
    template <int ROWS>
    __device__ __forceinline__ void stage(int k, int k0, int depth, float* staged) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float* const row = x + static_cast<int64_t>(r < count && indices ? indices[r] : r) * k + k0;
            for (int i = threadIdx.x; i < depth; i += blockDim.x) staged[i * ROWS + r] = r < count ? row[i] : 0.0f;
        }
    }
};

template <class Rule, int ROWS, int WIDTH>
__device__ __forceinline__ void update_few(const FewRows& rows, const FewRows& next, const float* dz, float* weight,
                                           float* slots, int64_t size, float scale, const float* rates, float* partials,
                                           int k, int n, int part, int capacity) {
    using T = FewRowsUpdate;
    constexpr int SLOTS = Rule::SLOTS, SLOT_ROOM = SLOTS > 0 ? SLOTS : 1, BATCH = 4 / SLOT_ROOM;
    SHARED(float, shared);
    float* const staged = shared;                   // (part, ROWS) of x
    float* const staged_next = shared + ROWS * part;
    const int k0 = blockIdx.x * part, depth = min(part, k - k0), n0 = blockIdx.y * T::COLUMNS;
    const int width = min(T::COLUMNS, n - n0) / WIDTH, teams = T::THREADS / width;  // a team of threads takes a row
    const int team = threadIdx.x / width, column = n0 + threadIdx.x % width * WIDTH;
    const int team_rows = team < teams ? depth : 0;
    weight += static_cast<int64_t>(k0) * n + column;
    slots += static_cast<int64_t>(k0) * n + column;

    // Two batches of rows: one is loaded while the other one is updated.
    float w[2][BATCH][WIDTH], slot[2][BATCH][SLOT_ROOM][WIDTH];
    const int row_step = BATCH * teams;
    const auto fetch = [&](int buffer, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int row = first + b * teams;
            if (row >= team_rows) break;
            load_run<WIDTH>(weight + row * n, w[buffer][b], false);
#pragma unroll
            for (int s = 0; dz && s < SLOTS; ++s)
                load_run<WIDTH>(slots + s * size + row * n, slot[buffer][b][s], true);
        }
    };
    float delta[ROWS][WIDTH] = {}, z[ROWS][WIDTH] = {};
    const auto move = [&](int buffer, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int row = first + b * teams;
            if (row >= team_rows) break;
#pragma unroll
            for (int q = 0; q < WIDTH; ++q) {
                float& element = w[buffer][b][q];
                if (dz) {
                    float sum = 0.0f, of_element[SLOT_ROOM];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sum = fmaf(staged[row * ROWS + r], delta[r][q], sum);
#pragma unroll
                    for (int s = 0; s < SLOTS; ++s) of_element[s] = slot[buffer][b][s][q];
                    step_parameter<Rule>(element, of_element, sum, scale, rates);
#pragma unroll
                    for (int s = 0; s < SLOTS; ++s) slot[buffer][b][s][q] = of_element[s];
                }
#pragma unroll
                for (int r = 0; r < ROWS; ++r) z[r][q] = fmaf(staged_next[row * ROWS + r], element, z[r][q]);
            }
            if (!dz) continue;
            store_run<WIDTH>(weight + row * n, w[buffer][b], false);
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) store_run<WIDTH>(slots + s * size + row * n, slot[buffer][b][s], true);
        }
    };

    fetch(0, team);
    fetch(1, team + row_step);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < WIDTH; ++q)
            if (dz && team_rows && r < rows.count) delta[r][q] = dz[r * n + column + q];
    rows.stage<ROWS>(k, k0, depth, staged);
    next.stage<ROWS>(k, k0, depth, staged_next);
    __syncthreads();
    for (int first = team; first < team_rows; first += 2 * row_step) {
#pragma unroll
        for (int buffer = 0; buffer < 2; ++buffer) {
            move(buffer, first + buffer * row_step);
            fetch(buffer, first + (buffer + 2) * row_step);
        }
    }

    // In shared memory the teams' sums of z replace x.
    if (!partials) return;
    const int columns = width * WIDTH;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < WIDTH; ++q)
            if (team_rows) shared[(team * ROWS + r) * columns + column - n0 + q] = z[r][q];
    __syncthreads();
    for (int i = threadIdx.x; i < next.count * columns; i += T::THREADS) {
        float sum = shared[i];
        for (int t = 1; t < teams; ++t) sum += shared[t * ROWS * columns + i];
        partials[(static_cast<int64_t>(blockIdx.x) * capacity + i / columns) * n + n0 + i % columns] = sum;
    }
}

// The rows of this step and of the next one. Without dz there is no update, and the rows of this step count as the next
// ones.
template <class Rule>
struct FewRowsStep {
    const float* dz;
    float scale;
    const float* rates;
    FewRows rows, next;

    __device__ __forceinline__ FewRowsStep(const Step* step, const float* x, const int* order, const float* dz,
                                       const double* totals)
        : dz(dz), scale(dz ? static_cast<float>(inverse_weight(totals)) : 0.0f),
            rates(schedule + step->run * RATES_PER_STEP),
          rows(*step, x, order), next(after(*step, dz), x, order) {}

    static __device__ __forceinline__ Step after(Step step, const float* dz) {
        step.batch += dz ? 1 : 0;
        return step;
    }

    __device__ __forceinline__ bool is_single() const { return max(rows.count, next.count) <= 1; }

    __device__ __forceinline__ void update_bias(float* bias, float* slots, int64_t size, int n) const {
        if (!dz || !bias || blockIdx.x > 0 || blockIdx.y > 0) return;
        const InPlace<BiasRule<Rule>> of_bias = {bias, slots, size, n, scale, rates};
        for (int j = threadIdx.x; j < n; j += blockDim.x) {
            float sum = 0.0f;
            for (int r = 0; r < rows.count; ++r) sum += dz[r * n + j];
            of_bias(0, j, sum);
        }
    }
};

// Updates weight, bias and slots along dz, and stores partials (grid x, capacity, n) of the next step's z; both for x (B,
// k), or for the data set by the order. Without dz, before the first step of a run, it only makes this step's z; if
// `partials` is null, it makes no z.
// Grid: (split-K partials, n over 256).
template <class Rule>
__device__ __forceinline__ void dense_update_few_rows(const Step* step, const float* x, const int* order, const float* dz,
                                                 const double* totals, float* weight, float* bias, float* weight_slots,
                                                 float* bias_slots, int64_t size, float* partials, int k, int n, int part,
                                                 int capacity) {
    const FewRowsStep<Rule> few(step, x, order, dz, totals);
    const auto run = [&](auto most_rows, auto width) {
        update_few<Rule, decltype(most_rows)::value, decltype(width)::value>(few.rows, few.next, dz, weight, weight_slots,
                                                                       size, few.scale, few.rates, partials, k, n, part,
                                                                       capacity);
    };
    // Columns come in pairs where all arrays are aligned to them; a slot is `size` elements after the one before.
    const bool paired = n % 2 == 0 && reinterpret_cast<uintptr_t>(weight) % 8 == 0 &&
                        reinterpret_cast<uintptr_t>(weight_slots) % 8 == 0 && (Rule::SLOTS < 2 || size % 2 == 0);
    if (few.is_single())
        paired ? run(Is<1>(), Is<2>()) : run(Is<1>(), Is<1>());
    else
        paired ? run(Is<FewRowsUpdate::ROWS>(), Is<2>()) : run(Is<FewRowsUpdate::ROWS>(), Is<1>());
    few.update_bias(bias, bias_slots, size, n);
}

}  // namespace mlpgpu
