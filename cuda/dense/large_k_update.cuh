// The update of a weight with large k by few enough rows: dW = xᵀ dz has many rows and few columns, and its sums are short.
//
// It takes as long as reading x, W and its slots and writing W and its slots, so all roles keep loads under way. A block
// splits dz once and goes over tiles of W's rows. Producer warps copy x to a ring of slices. Compute warpgroups, each on
// its own tile, store sums to shared memory. Update warps hold a tile of W and of its slots in registers by then, update it
// along the sums, write it back and fetch their next tile.
#pragma once

#include "gemm/split_sm90.cuh"
#include "math/optimizers.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

template <class Rule>
struct LargeKUpdate {
    static constexpr int ARRAYS = 1 + Rule::SLOTS;
    static constexpr int GROUPS = ARRAYS < 3 ? 2 : 1;  // of compute threads: as many as leave the update threads enough registers
    static constexpr int WEIGHT_ROWS = SplitProduct::M, COLUMNS = SplitProduct::N, ROWS = 128;
    static constexpr int COMPUTE_THREADS = GROUPS * WARPGROUP, UPDATE_THREADS = 2 * WARPGROUP, PRODUCER_THREADS = WARPGROUP;
    static constexpr int THREADS = COMPUTE_THREADS + UPDATE_THREADS + PRODUCER_THREADS, REGISTERS = 65536 / THREADS / 8 * 8;
    static constexpr int COMPUTE_REGISTERS = 144, UPDATE_REGISTERS = GROUPS > 1 ? 80 : 128, PRODUCER_REGISTERS = 32;
    static_assert(COMPUTE_THREADS * COMPUTE_REGISTERS + UPDATE_THREADS * UPDATE_REGISTERS + PRODUCER_THREADS * PRODUCER_REGISTERS <=
                      THREADS * REGISTERS,
                  "registers change hands by warpgroups");
    using Components = SplitComponents<ROWS, COLUMNS>;
    struct RingX {  // slices, whose rows begin four banks apart from each other
        static constexpr int DEPTH = 32, PITCH = WEIGHT_ROWS + 4;
        static constexpr int STAGES = 12, STAGE_BYTES = 4 * DEPTH * PITCH, ALIGNMENT = 16;
        static constexpr int CONSUMERS = WARPGROUP / WARP, CLUSTER = 1, BYTES = STAGES * (STAGE_BYTES + 16);
    };
    static constexpr int SUMS = WEIGHT_ROWS * COLUMNS;            // of a tile
    static constexpr int UNITS = SUMS / 4 / UPDATE_THREADS;  // of an update thread, of four elements each
    static constexpr int SHARED_BYTES =
        Components::BYTES + 4 * GROUPS * SUMS + RingX::BYTES + 2 * GROUPS * 8 + 8 * ROWS + 4 * COLUMNS;
};

// An update thread's share of W and of its slots: some vectors of four of a tile's `length` elements, which are contiguous.
template <class Rule>
struct UpdatedTile {
    using T = LargeKUpdate<Rule>;
    float* first[T::ARRAYS];
    bool vectored = true;
    int thread;
    float4 fetched[T::UNITS][T::ARRAYS];

    __device__ __forceinline__ UpdatedTile(float* weight, float* slots, int64_t size, int thread) : thread(thread) {
        first[0] = weight;
        for (int s = 0; s < Rule::SLOTS; ++s) first[1 + s] = slots + s * size;
        for (int i = 0; i < T::ARRAYS; ++i) vectored = vectored && reinterpret_cast<uintptr_t>(first[i]) % 16 == 0;
    }

    __device__ __forceinline__ int element(int unit) const { return 4 * (thread + unit * T::UPDATE_THREADS); }
    __device__ __forceinline__ bool holds(int unit, int length) const { return vectored && element(unit) + 4 <= length; }

    __device__ __forceinline__ void fetch(int64_t offset, int length) {
#pragma unroll
        for (int unit = 0; unit < T::UNITS; ++unit)
#pragma unroll
            for (int i = 0; i < T::ARRAYS; ++i)
                if (holds(unit, length))
                    fetched[unit][i] = *reinterpret_cast<const float4*>(first[i] + offset + element(unit));
    }

    // Updates all of the tile along its sums, and writes it back.
    __device__ __forceinline__ void update(int64_t offset, int length, const float* sums, float scale,
                                         const float* rates) const {
#pragma unroll
        for (int unit = 0; unit < T::UNITS; ++unit) {
            if (!holds(unit, length)) continue;
            float sum[4], values[T::ARRAYS][4];
            load_four(sums + element(unit), sum);
#pragma unroll
            for (int i = 0; i < T::ARRAYS; ++i)
                unpack(fetched[unit][i], values[i]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float slot[T::ARRAYS];  // of which the last one is unused
#pragma unroll
                for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = values[1 + s][e];
                step_parameter<Rule>(values[0][e], slot, sum[e], scale, rates, penalty_slope(values[0][e]));
#pragma unroll
                for (int s = 0; s < Rule::SLOTS; ++s) values[1 + s][e] = slot[s];
            }
#pragma unroll
            for (int i = 0; i < T::ARRAYS; ++i) store_four(first[i] + offset + element(unit), values[i]);
        }
        // Elements that fill no vector were not fetched in advance.
        for (int e = (vectored ? length / 4 * 4 : 0) + thread; e < length; e += T::UPDATE_THREADS) {
            float w = first[0][offset + e], slot[T::ARRAYS];
            for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = first[1 + s][offset + e];
            step_parameter<Rule>(w, slot, sums[e], scale, rates, penalty_slope(w));
            first[0][offset + e] = w;
            for (int s = 0; s < Rule::SLOTS; ++s) first[1 + s][offset + e] = slot[s];
        }
    }
};

// A block's tiles, and what its warps do with them.
template <class Rule>
struct LargeKBlock {
    using T = LargeKUpdate<Rule>;
    using RingX = typename T::RingX;
    Operand<false> x, dz;
    int n, begin, end, count, slices;  // rows of W; tiles; slices of x per tile
    unsigned char *components, *staged;
    float* sums;                       // of one tile per group
    uint32_t summed, consumed;            // barriers of each group: its sums are complete, and were used
    const float** row_starts;              // of x's rows
    int* column_flags;
    Ring<RingX> ring;

    __device__ __forceinline__ LargeKBlock(const Operand<false>& x, const Operand<false>& dz, unsigned char* shared)
        : x(x), dz(dz), n(dz.outer), components(shared), staged(components + T::Components::BYTES + 4 * T::GROUPS * T::SUMS),
          sums(reinterpret_cast<float*>(components + T::Components::BYTES)), summed(shared_address(staged + RingX::BYTES)),
          consumed(summed + 8 * T::GROUPS),
          row_starts(reinterpret_cast<const float**>(staged + RingX::BYTES + 2 * T::GROUPS * 8)),
          column_flags(reinterpret_cast<int*>(row_starts + T::ROWS)), ring(staged) {
        const int stretch = ceil_div(x.outer, gridDim.x * T::WEIGHT_ROWS) * T::WEIGHT_ROWS;
        begin = blockIdx.x * stretch, end = min(x.outer, begin + stretch);
        count = max(0, end - begin + T::WEIGHT_ROWS - 1) / T::WEIGHT_ROWS;
        constexpr int PROMOTED = SplitProduct::PROMOTED;
        slices = ceil_div(x.inner, PROMOTED) * (PROMOTED / RingX::DEPTH);
    }

    // The last tile comes first: the forward product read it last.
    __device__ __forceinline__ int first_row(int tile) const { return begin + (count - 1 - tile) * T::WEIGHT_ROWS; }
    __device__ __forceinline__ int64_t tile_offset(int tile) const { return static_cast<int64_t>(first_row(tile)) * n; }
    __device__ __forceinline__ int length(int tile) const {
        return tile < count ? min(T::WEIGHT_ROWS, end - first_row(tile)) * n : 0;
    }

    // dz is loaded before any copy of x starts, since it would have to wait for those copies.
    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            ring.make(T::PRODUCER_THREADS);
            for (int i = 0; i < T::GROUPS; ++i) {
                barrier_init(summed + 8 * i, WARPGROUP / WARP);
                barrier_init(consumed + 8 * i, T::UPDATE_THREADS / WARP);
            }
            barrier_publish();
        }
        for (int i = threadIdx.x; i < T::COLUMNS; i += T::THREADS) column_flags[i] = 0;
        find_rows<T::ROWS, T::THREADS>(x, 0, x.inner, row_starts);
        constexpr int OCTETS = T::COLUMNS * T::ROWS / 8, EACH = ceil_div(OCTETS, T::THREADS);
        float deltas[EACH][8];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int unit = threadIdx.x + i * T::THREADS, column = unit % T::COLUMNS, row = unit / T::COLUMNS * 8 + e;
                deltas[i][e] = column < n && row < dz.inner ? dz.at(column, row) : 0.0f;
            }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = threadIdx.x + i * T::THREADS, column = unit % T::COLUMNS;
            if (unit < OCTETS && T::Components::store(components, column, unit / T::COLUMNS, deltas[i])) column_flags[column] = 1;
        }
        publish_shared();
        __syncthreads();
    }

    __device__ __forceinline__ void produce(int thread) {
        const bool vectored = is_vectored(x.data, x.pitch);
        for (int tile = 0; tile < count; ++tile)
            for (int slice = 0; slice < slices; ++slice) {
                ring.wait_empty();
                copy_rows<RingX::DEPTH, T::WEIGHT_ROWS, RingX::PITCH, T::PRODUCER_THREADS>(
                    row_starts + slice * RingX::DEPTH, x.data, vectored, first_row(tile), end, ring.address(), thread);
                barrier_arrive_copied(ring.full + 8 * ring.stage);
                ring.advance();
            }
    }

    __device__ __forceinline__ void update(UpdatedTile<Rule> updated, float scale, const float* rates) const {
        updated.fetch(tile_offset(0), length(0));
        for (int tile = 0; tile < count; ++tile) {
            const int group = tile % T::GROUPS;
            barrier_wait(summed + 8 * group, tile / T::GROUPS % 2);
            updated.update(tile_offset(tile), length(tile), sums + group * T::SUMS, scale, rates);
            __syncwarp();
            if (threadIdx.x % WARP == 0) barrier_arrive<1>(consumed + 8 * group, 0);
            // Not one vector at a time between the updates: waiting for a load means waiting for all loads issued after it
            // too.
            updated.fetch(tile_offset(tile + 1), length(tile + 1));
        }
    }

    __device__ __forceinline__ void multiply(int group) {
        const int warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP;
        float* const warp_sums = sums + group * T::SUMS + warp * 16 * n;
        bool any_column = false;
        for (int i = lane; i < T::COLUMNS; i += WARP) any_column = any_column || column_flags[i];
        const float* slice = nullptr;
        const auto begin_slice = [&] {
            ring.wait_full();
            slice = reinterpret_cast<const float*>(staged + ring.stage * RingX::STAGE_BYTES) + lane % 4 * 2 * RingX::PITCH +
                    warp * 16 + lane / 4;
        };
        const auto end_slice = [&] {
            __syncwarp();
            if (lane == 0) barrier_arrive<1>(ring.empty + 8 * ring.stage, 0);
            ring.advance();
        };
        const auto skip = [&](int tiles) {
            for (int i = 0; i < slices * tiles; ++i) ring.advance();
        };
        skip(group);
        for (int tile = group, parity = 1; tile < count; tile += T::GROUPS, parity ^= 1, skip(T::GROUPS - 1)) {
            float c[SplitProduct::PER_THREAD] = {}, sums_of_rows[SplitProduct::PER_THREAD];
            SplitFragments fragments;
            const auto fill = [&](int row) {
                if (row % RingX::DEPTH == 0) {
                    if (row > 0) end_slice();
                    begin_slice();
                }
                fragments.fill(row, [=](int weight_row, int row) {
                    const float* const source = slice + row % RingX::DEPTH * RingX::PITCH + weight_row;
                    return make_float2(source[0], source[RingX::PITCH]);
                });
            };
            for (int batch_row0 = 0; batch_row0 < x.inner; batch_row0 += SplitProduct::PROMOTED) {
                if (batch_row0 == 0) fill(0);
                multiply_components<typename T::Components>(sums_of_rows, fragments, shared_address(components), batch_row0, [&](int row) {
                    if (row < SplitProduct::PROMOTED) return fill(row);
                    end_slice();
                    if (batch_row0 + row < x.inner) fill(0);
                });
#pragma unroll
                for (int i = 0; i < SplitProduct::PER_THREAD; ++i) c[i] += sums_of_rows[i];
            }
            barrier_wait(consumed + 8 * group, parity);
            const int row0 = first_row(tile) + warp * 16;
            finish_fragments(
                c, fragments.least, column_flags, any_column, end - row0, n,
                [=](int row, int column) {
                    float sum = 0.0f;
                    for (int r = 0; r < x.inner; ++r) sum = fmaf(x.at(row0 + row, r), dz.at(column, r), sum);
                    return sum;
                },
                [=](bool is_inside, int row, int column, float sum) {
                    if (is_inside) warp_sums[row * n + column] = sum;
                });
            __syncwarp();
            if (lane == 0) barrier_arrive<1>(summed + 8 * group, 0);
        }
    }
};

// As dense_backward_update; at most ROWS rows and COLUMNS columns.  Grid: any number of blocks, of one dimension.
template <class Rule>
__device__ __forceinline__ void dense_backward_update_large_k(const Step* step, int shard, int shards, const float* x,
                                                           const int* order, const float* dz, const double* totals,
                                                           float* weight, float* bias, float* weight_slots,
                                                           float* bias_slots, int64_t size, int k, int n) {
    using T = LargeKUpdate<Rule>;
    SHARED(unsigned char, shared);
    const Rows rows = shard_rows(step, shard, shards);
    const Operand<false> a = {first_input_row(rows, x, order, k), k, rows.count, k, row_indices(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const rates = schedule + step->run * RATES_PER_STEP;
    // The last block, which has the fewest rows of W, updates the bias.
    if (blockIdx.x == gridDim.x - 1 && bias && threadIdx.x < static_cast<unsigned>(n)) {
        const InPlace<BiasRule<Rule>> of_bias = {bias, bias_slots, size, n, scale, rates};
        float sum = 0.0f;
#pragma unroll 16
        for (int row = 0; row < rows.count; ++row) sum += b.at(threadIdx.x, row);
        of_bias(0, threadIdx.x, sum);
    }
    LargeKBlock<Rule> tiles(a, b, shared);
    if (tiles.count == 0) return;
    tiles.prepare();
    if (threadIdx.x < T::COMPUTE_THREADS) {
        registers_raise<T::COMPUTE_REGISTERS>();
        tiles.multiply(threadIdx.x / WARPGROUP);
    } else if (threadIdx.x < T::COMPUTE_THREADS + T::UPDATE_THREADS) {
        registers_lower<T::UPDATE_REGISTERS>();
        tiles.update(UpdatedTile<Rule>(weight, weight_slots, size, threadIdx.x - T::COMPUTE_THREADS), scale, rates);
    } else {
        registers_lower<T::PRODUCER_REGISTERS>();
        tiles.produce(threadIdx.x - T::COMPUTE_THREADS - T::UPDATE_THREADS);
    }
}

}  // namespace mlpgpu
