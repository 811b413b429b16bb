// The update of few rows (dense_update.cuh) as a stream: W (k, n) and its slots pass through shared memory once, and leave
// parts of the next step's z.
#pragma once

#include "dense_update.cuh"
#include "own_lines.cuh"

namespace mlpgpu {

// A block has up to PART lines of W, of which each of its warps takes LINES at a time; a lane has every 32nd column.
struct StreamUpdate {
    static constexpr int THREADS = 512, WARPS = THREADS / WARP, ROWS = FewUpdate::ROWS, PART = 704, COLUMNS = 96;
    static constexpr int LINES = 4, PER_LANE = COLUMNS / WARP;
    static constexpr int MOST_STAGES = 8, PLACES = 2880;     // floats of a warp: at least two stages of three arrays
    static constexpr int X = 2 * ROWS * PART;                // x of this step and of the next
    static constexpr int SHARED_FLOATS = WARPS * (PLACES + 2 * MOST_STAGES) + X;
    static_assert(COLUMNS * ROWS <= PLACES, "in the end a warp's sums take the place of its lines");
};

template <class Rule, int ROWS>
__device__ __forceinline__ void update_stream(const FewRows& rows, const FewRows& next, const float* dz, float* weight,
                                              float* slots, int64_t size, float scale, const float* rates,
                                              float* parts, int k, int n, int part, int capacity) {
    using T = StreamUpdate;
    using Lines = OwnLines<Rule, T::LINES>;
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, arrays = dz ? Lines::ARRAYS : 1;
    float* const places = shared + warp * T::PLACES;
    float* const staged = shared + T::WARPS * T::PLACES;  // (part, ROWS)
    float* const staged_next = staged + ROWS * part;
    const uint32_t barriers = shared_address(shared + T::WARPS * T::PLACES + T::X + warp * 2 * T::MOST_STAGES);
    const int k0 = blockIdx.x * part, depth = min(part, k - k0);
    const int place = Lines::ARRAYS * T::LINES * n, stages = min(T::MOST_STAGES, T::PLACES / place);
    if (lane == 0)
        for (int i = 0; i < stages; ++i) barrier_init(barriers + 8 * i, 1);
    barrier_publish();
    __syncwarp();

    const auto own_lines = [&](int stage, int first) {
        const int64_t at = static_cast<int64_t>(k0 + first) * n;
        return Lines(places + stage * place, weight + at, slots + (Rule::SLOTS > 0 ? at : 0), size, n,
                     min(T::LINES, depth - first));
    };
    // A stage is brought a turn after its place was used, so that the way back need not be waited for.
    constexpr int APART = T::WARPS * T::LINES;
    const int ahead = (stages - 1) * APART;
    for (int stage = 0, first = warp * T::LINES; stage < stages - 1 && first < depth; ++stage, first += APART)
        own_lines(stage, first).bring(barriers + 8 * stage, arrays);

    float delta[ROWS][T::PER_LANE] = {}, z[ROWS][T::PER_LANE] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < T::PER_LANE; ++q)
            if (dz && r < rows.count && lane + q * WARP < n) delta[r][q] = dz[r * n + lane + q * WARP];
    rows.stage<ROWS>(k, k0, depth, staged);
    next.stage<ROWS>(k, k0, depth, staged_next);
    __syncthreads();

    int stage = 0, parity = 0;
    for (int first = warp * T::LINES; first < depth; first += APART) {
        const Lines own = own_lines(stage, first);
        barrier_wait(barriers + 8 * stage, parity);
#pragma unroll 2
        for (int line = 0; line < own.count; ++line) {
#pragma unroll
            for (int q = 0; q < T::PER_LANE; ++q) {
                const int column = lane + q * WARP, at = line * n + column;
                const bool wanted = column < n;
                float sum = 0.0f, w;
                if (dz) {
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sum = fmaf(staged[(first + line) * ROWS + r], delta[r][q], sum);
                    w = own.step(wanted, at, sum, scale, rates);
                } else {
                    w = wanted ? own.place[at] : 0.0f;
                }
#pragma unroll
                for (int r = 0; r < ROWS; ++r) z[r][q] = fmaf(staged_next[(first + line) * ROWS + r], w, z[r][q]);
            }
        }
        __syncwarp();
        if (dz) own.send();
        if (first + ahead < depth) {
            Lines::template release<1>();
            const int freed = stage == 0 ? stages - 1 : stage - 1;
            own_lines(freed, first + ahead).bring(barriers + 8 * freed, arrays);
        }
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    Lines::template release<0>();

    if (!parts) return;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < T::PER_LANE; ++q)
            if (lane + q * WARP < n) shared[(warp * ROWS + r) * n + lane + q * WARP] = z[r][q];
    __syncthreads();
    for (int at = threadIdx.x; at < next.count * n; at += T::THREADS) {
        float sum = shared[at];
        for (int w = 1; w < T::WARPS; ++w) sum += shared[w * ROWS * n + at];
        parts[static_cast<int64_t>(blockIdx.x) * capacity * n + at] = sum;
    }
}

// As dense_update_few; `part` is at most PART, and n at most COLUMNS.  Grid: (parts of k).
template <class Rule>
__device__ __forceinline__ void dense_update_stream(const Step* step, const float* x, const int* order, const float* dz,
                                                    const double* totals, float* weight, float* bias,
                                                    float* weight_slots, float* bias_slots, int64_t size, float* parts,
                                                    int k, int n, int part, int capacity) {
    const FewStep<Rule> few(step, x, order, dz, totals);
    const auto run = [&](auto held) {
        update_stream<Rule, decltype(held)::value>(few.rows, few.next, dz, weight, weight_slots, size, few.scale,
                                                   few.rates, parts, k, n, part, capacity);
    };
    few.is_single() ? run(Is<1>()) : run(Is<FewUpdate::ROWS>());
    few.move_bias(bias, bias_slots, size, n);
}

}  // namespace mlpgpu
