// The update of few rows (dense/update.cuh) as a stream: W (k, n) and its slots pass through shared memory once, and leave
// parts of the next step's z.
#pragma once

#include "common/integers.cuh"
#include "arch/bulk_tile.cuh"
#include "dense/few_rows_update.cuh"

namespace mlpgpu {

// A block has up to PART lines of W.  One warp has chunks of LINES of them brought to a ring of places, and taken back
// once the others have moved them: each has every so manieth line of a chunk, and a lane every 32nd column.
struct StreamUpdate {
    static constexpr int WARPS = 14, THREADS = (WARPS + 1) * WARP, ROWS = FewRowsUpdate::ROWS, PART = 704, COLUMNS = 96;
    static constexpr int EACH = 2, LINES = EACH * WARPS, PER_LANE = COLUMNS / WARP;
    static constexpr int MOST_STAGES = 12, PLACES = 46080;  // floats: at least five stages of three arrays
    static constexpr int X = 2 * ROWS * PART;               // x of this step and of the next
    static constexpr int SHARED_FLOATS = PLACES + X + 2 * 2 * MOST_STAGES;
    static_assert(WARPS * ROWS * COLUMNS <= PLACES, "in the end the warps' sums take the place of the lines");
};

template <class Rule, int ROWS>
__device__ __forceinline__ void update_stream(const FewRows& rows, const FewRows& next, const float* dz, float* weight,
                                              float* slots, int64_t size, float scale, const float* rates,
                                              float* parts, int k, int n, int part, int capacity) {
    using T = StreamUpdate;
    using Lines = BulkTile<Rule, T::LINES>;
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, arrays = dz ? Lines::ARRAYS : 1;
    float* const staged = shared + T::PLACES;  // (part, ROWS)
    float* const staged_next = staged + ROWS * part;
    const uint32_t brought = shared_address(shared + T::PLACES + T::X), moved = brought + 8 * T::MOST_STAGES;
    const int k0 = blockIdx.x * part, depth = min(part, k - k0), chunks = ceil_div(depth, T::LINES);
    const int place = Lines::ARRAYS * T::LINES * n, stages = min(T::MOST_STAGES, T::PLACES / place);
    const auto chunk_lines = [&](int chunk, int stage) {
        const int64_t at = static_cast<int64_t>(k0 + chunk * T::LINES) * n;
        return Lines(shared + stage * place, weight + at, slots + (Rule::SLOTS > 0 ? at : 0), size, n,
                     min(T::LINES, depth - chunk * T::LINES));
    };
    const bool is_producer = warp == T::WARPS;
    if (is_producer) {
        if (lane == 0)
            for (int i = 0; i < stages; ++i) barrier_init(brought + 8 * i, 1), barrier_init(moved + 8 * i, T::WARPS);
        barrier_publish();
        __syncwarp();
        for (int chunk = 0; chunk < min(stages, chunks); ++chunk)
            chunk_lines(chunk, chunk).bring(brought + 8 * chunk, arrays);
    }

    float delta[ROWS][T::PER_LANE] = {}, z[ROWS][T::PER_LANE] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < T::PER_LANE; ++q)
            if (dz && r < rows.count && lane + q * WARP < n) delta[r][q] = dz[r * n + lane + q * WARP];
    rows.stage<ROWS>(k, k0, depth, staged);
    next.stage<ROWS>(k, k0, depth, staged_next);
    __syncthreads();

    if (is_producer) {
        for (int chunk = 0, stage = 0, parity = 0; chunk < chunks; ++chunk) {
            barrier_wait(moved + 8 * stage, parity);
            if (dz) chunk_lines(chunk, stage).send();
            // A stage is brought a turn after it was sent, so that the way back need not be waited for.
            const int freed = stage == 0 ? stages - 1 : stage - 1;
            const int following = chunk - 1 + stages;
            if (chunk > 0 && following < chunks) {
                Lines::template release<1>();
                chunk_lines(following, freed).bring(brought + 8 * freed, arrays);
            }
            if (++stage == stages) stage = 0, parity ^= 1;
        }
        Lines::template release<0>();
    } else {
        for (int chunk = 0, stage = 0, parity = 0; chunk < chunks; ++chunk) {
            const Lines own = chunk_lines(chunk, stage);
            float w[T::EACH][T::PER_LANE], slot[T::EACH][T::PER_LANE][Lines::ARRAYS];  // the last slot is unused
            barrier_wait(brought + 8 * stage, parity);
#pragma unroll
            for (int e = 0; e < T::EACH; ++e)
#pragma unroll
                for (int q = 0; q < T::PER_LANE; ++q) {
                    const int line = warp + e * T::WARPS, at = line * n + lane + q * WARP;
                    const bool wanted = line < own.count && lane + q * WARP < n;
                    w[e][q] = wanted ? own.place[at] : 0.0f;
#pragma unroll
                    for (int s = 0; s < Rule::SLOTS; ++s) slot[e][q][s] = wanted && dz ? own.placed(s + 1)[at] : 0.0f;
                }
#pragma unroll
            for (int e = 0; e < T::EACH; ++e) {
                const int line = warp + e * T::WARPS, x = chunk * T::LINES + line;
                if (line >= own.count) break;
#pragma unroll
                for (int q = 0; q < T::PER_LANE; ++q) {
                    if (dz) {
                        float sum = 0.0f;
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) sum = fmaf(staged[x * ROWS + r], delta[r][q], sum);
                        step_parameter<Rule>(w[e][q], slot[e][q], sum, scale, rates, penalty_slope(w[e][q]));
                        if (lane + q * WARP < n) {
                            const int at = line * n + lane + q * WARP;
                            own.place[at] = w[e][q];
#pragma unroll
                            for (int s = 0; s < Rule::SLOTS; ++s) own.placed(s + 1)[at] = slot[e][q][s];
                        }
                    }
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) z[r][q] = fmaf(staged_next[x * ROWS + r], w[e][q], z[r][q]);
                }
            }
            publish_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive<1>(moved + 8 * stage, 0);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    }

    if (!parts) return;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < T::PER_LANE; ++q)
            if (!is_producer && lane + q * WARP < n) shared[(warp * ROWS + r) * n + lane + q * WARP] = z[r][q];
    __syncthreads();
    for (int at = threadIdx.x; at < next.count * n; at += T::THREADS) {
        float sum = shared[at];
        for (int w = 1; w < T::WARPS; ++w) sum += shared[w * ROWS * n + at];
        parts[static_cast<int64_t>(blockIdx.x) * capacity * n + at] = sum;
    }
}

// As dense_update_few_rows; `part` is at most PART, and n at most COLUMNS.  Grid: (parts of k).
template <class Rule>
__device__ __forceinline__ void dense_update_stream(const Step* step, const float* x, const int* order, const float* dz,
                                                    const double* totals, float* weight, float* bias,
                                                    float* weight_slots, float* bias_slots, int64_t size, float* parts,
                                                    int k, int n, int part, int capacity) {
    const FewRowsStep<Rule> few(step, x, order, dz, totals);
    const auto run = [&](auto held) {
        update_stream<Rule, decltype(held)::value>(few.rows, few.next, dz, weight, weight_slots, size, few.scale,
                                                   few.rates, parts, k, n, part, capacity);
    };
    few.is_single() ? run(Is<1>()) : run(Is<FewRowsUpdate::ROWS>());
    few.move_bias(bias, bias_slots, size, n);
}

}  // namespace mlpgpu
