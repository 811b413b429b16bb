// The update by few rows (dense/few_rows_update.cuh) as a stream: W (k, n) and its slots pass through shared memory once
// and leave partial sums of the next step's z.
#pragma once

#include "common/integers.cuh"
#include "arch/bulk_tile.cuh"
#include "arch/ring.cuh"
#include "dense/few_rows_update.cuh"

namespace mlpgpu {

// A block has up to PART rows of W. A producer warp loads chunks of WEIGHT_ROWS rows into a ring of stages, and stores a
// chunk once the update warps have released it. Of a chunk's rows an update warp takes every WARPS-th, and a lane every
// 32nd column.
struct StreamUpdate {
    static constexpr int WARPS = 14, THREADS = (WARPS + 1) * WARP, ROWS = FewRowsUpdate::ROWS, PART = 704, COLUMNS = 96;
    static constexpr int ROWS_PER_WARP = 2, WEIGHT_ROWS = ROWS_PER_WARP * WARPS, PER_LANE = COLUMNS / WARP;
    struct Chunks {  // of which as many are used as chunks of n columns fit into all of them: at least five of three arrays
        static constexpr int STAGES = 12, STAGE_BYTES = 15360, ALIGNMENT = 16, CONSUMERS = WARPS, CLUSTER = 1;
        static constexpr int FLOATS = STAGES * STAGE_BYTES / 4, BYTES = STAGES * (STAGE_BYTES + 16);
    };
    static constexpr int SHARED_BYTES = Chunks::BYTES + 4 * 2 * ROWS * PART;  // x of this step and of the next
    static_assert(WARPS * ROWS * COLUMNS <= Chunks::FLOATS, "in the end the warps' sums lie where the chunks were");
};

template <class Rule, int ROWS>
__device__ __forceinline__ void update_stream(const FewRows& rows, const FewRows& next, const float* dz, float* weight,
                                              float* slots, int64_t size, float scale, const float* rates,
                                              float* partials, int k, int n, int part, int capacity) {
    using T = StreamUpdate;
    using Chunk = BulkTile<Rule, T::WEIGHT_ROWS>;
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, arrays = dz ? Chunk::ARRAYS : 1;
    float* const staged = shared + T::Chunks::BYTES / 4;  // (part, ROWS)
    float* const staged_next = staged + ROWS * part;
    const int k0 = blockIdx.x * part, depth = min(part, k - k0), chunks = ceil_div(depth, T::WEIGHT_ROWS);
    const int chunk_floats = Chunk::ARRAYS * T::WEIGHT_ROWS * n;
    const int stages = min(T::Chunks::STAGES, T::Chunks::FLOATS / chunk_floats);
    Ring<T::Chunks> ring(shared);
    const auto chunk_at = [&](int chunk, int stage) {
        const int64_t offset = static_cast<int64_t>(k0 + chunk * T::WEIGHT_ROWS) * n;
        return Chunk(shared + stage * chunk_floats, weight + offset, slots + (Rule::SLOTS > 0 ? offset : 0), size, n,
                     min(T::WEIGHT_ROWS, depth - chunk * T::WEIGHT_ROWS));
    };
    const bool is_producer = warp == T::WARPS;
    if (is_producer) {
        if (lane == 0) ring.make();
        __syncwarp();
        for (int chunk = 0; chunk < min(stages, chunks); ++chunk)
            chunk_at(chunk, chunk).load(ring.full + 8 * chunk, arrays);
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
        for (int chunk = 0; chunk < chunks; ++chunk, ring.advance(stages)) {
            barrier_wait(ring.empty + 8 * ring.stage, ring.parity);
            if (dz) chunk_at(chunk, ring.stage).store();
            // A stage is loaded again one chunk after it was stored, so that the store need not be waited for.
            const int freed = ring.stage == 0 ? stages - 1 : ring.stage - 1;
            const int following = chunk - 1 + stages;
            if (chunk > 0 && following < chunks) {
                Chunk::template wait_stored<1>();
                chunk_at(following, freed).load(ring.full + 8 * freed, arrays);
            }
        }
        Chunk::template wait_stored<0>();
    } else {
        for (int chunk = 0; chunk < chunks; ++chunk, ring.advance(stages)) {
            const Chunk tile = chunk_at(chunk, ring.stage);
            float w[T::ROWS_PER_WARP][T::PER_LANE];
            float slot[T::ROWS_PER_WARP][T::PER_LANE][Chunk::ARRAYS];  // the last slot is unused
            ring.wait_full();
#pragma unroll
            for (int e = 0; e < T::ROWS_PER_WARP; ++e)
#pragma unroll
                for (int q = 0; q < T::PER_LANE; ++q) {
                    const int row = warp + e * T::WARPS, element = row * n + lane + q * WARP;
                    const bool is_inside = row < tile.count && lane + q * WARP < n;
                    w[e][q] = is_inside ? tile.staged(0)[element] : 0.0f;
#pragma unroll
                    for (int s = 0; s < Rule::SLOTS; ++s)
                        slot[e][q][s] = is_inside && dz ? tile.staged(s + 1)[element] : 0.0f;
                }
#pragma unroll
            for (int e = 0; e < T::ROWS_PER_WARP; ++e) {
                const int row = warp + e * T::WARPS, x = chunk * T::WEIGHT_ROWS + row;
                if (row >= tile.count) break;
#pragma unroll
                for (int q = 0; q < T::PER_LANE; ++q) {
                    if (dz) {
                        float sum = 0.0f;
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) sum = fmaf(staged[x * ROWS + r], delta[r][q], sum);
                        step_parameter<Rule>(w[e][q], slot[e][q], sum, scale, rates, penalty_slope(w[e][q]));
                        if (lane + q * WARP < n) {
                            const int element = row * n + lane + q * WARP;
                            tile.staged(0)[element] = w[e][q];
#pragma unroll
                            for (int s = 0; s < Rule::SLOTS; ++s) tile.staged(s + 1)[element] = slot[e][q][s];
                        }
                    }
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) z[r][q] = fmaf(staged_next[x * ROWS + r], w[e][q], z[r][q]);
                }
            }
            publish_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive<1>(ring.empty + 8 * ring.stage, 0);
        }
    }

    if (!partials) return;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int q = 0; q < T::PER_LANE; ++q)
            if (!is_producer && lane + q * WARP < n) shared[(warp * ROWS + r) * n + lane + q * WARP] = z[r][q];
    __syncthreads();
    for (int i = threadIdx.x; i < next.count * n; i += T::THREADS) {
        float sum = shared[i];
        for (int w = 1; w < T::WARPS; ++w) sum += shared[w * ROWS * n + i];
        partials[static_cast<int64_t>(blockIdx.x) * capacity * n + i] = sum;
    }
}

// As dense_update_few_rows; `part` is at most PART, and n at most COLUMNS. Grid: (split-K partials).
template <class Rule>
__device__ __forceinline__ void dense_update_stream(const Step* step, const float* x, const int* order, const float* dz,
                                                    const double* totals, float* weight, float* bias,
                                                    float* weight_slots, float* bias_slots, int64_t size,
                                                    float* partials, int k, int n, int part, int capacity) {
    const FewRowsStep<Rule> few(step, x, order, dz, totals);
    const auto run = [&](auto most_rows) {
        update_stream<Rule, decltype(most_rows)::value>(few.rows, few.next, dz, weight, weight_slots, size, few.scale,
                                                   few.rates, partials, k, n, part, capacity);
    };
    few.is_single() ? run(Is<1>()) : run(Is<FewRowsUpdate::ROWS>());
    few.update_bias(bias, bias_slots, size, n);
}

}  // namespace mlpgpu
