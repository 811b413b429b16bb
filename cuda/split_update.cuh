// The update of a tall weight by some rows: dW = xᵀ dz has many lines and few columns, and little is summed over.
//
// The time is that of reading x, W and its slots, and of writing them, so all is done to keep them on their way.  A
// block keeps the parts of dz, and goes through tiles of W's lines.  Some warps have x copied to a ring of slices, and
// warpgroups multiply.  Each of their warps brings its own lines of W and of the slots to a place in shared memory while
// it multiplies, moves them there, and sends them back.
#pragma once

#include "own_lines.cuh"
#include "split_wgmma.cuh"

namespace mlpgpu {

template <class Rule>
struct TallUpdate {
    static constexpr int ARRAYS = 1 + Rule::SLOTS, GROUPS = ARRAYS < 3 ? 2 : 1;  // as many as have a place for all arrays
    static constexpr int LINES = GROUPS * SplitProduct::M, COLUMNS = SplitProduct::N, ROWS = 128;
    static constexpr int MULTIPLIERS = GROUPS * WARPGROUP, COPIERS = GROUPS * 2 * WARP, THREADS = MULTIPLIERS + COPIERS;
    using Planes = SplitPlanes<ROWS, COLUMNS>;
    // The ring: slices of x, whose rows begin four banks apart from each other.
    static constexpr int DEPTH = 32, PITCH = LINES + 4;
    static constexpr int STAGES = 3, STAGE_BYTES = 4 * DEPTH * PITCH, ALIGNMENT = 16, RING_BYTES = STAGES * (STAGE_BYTES + 16);
    static constexpr int CONSUMERS = MULTIPLIERS / WARP, CLUSTER = 1;
    // A warp's lines of W and of the slots, an array after the other.
    static constexpr int OWN = 16, PLACE_BYTES = 4 * ARRAYS * OWN * COLUMNS;
    static constexpr int SHARED_BYTES = Planes::BYTES + RING_BYTES + CONSUMERS * (PLACE_BYTES + 8) + 8 + 8 * ROWS + 4 * COLUMNS;
};

// As dense_backward_update; at most ROWS rows and COLUMNS columns.  Grid: any number of blocks, of one dimension.
template <class Rule>
__device__ __forceinline__ void dense_backward_update_tall(const Step* step, int share, int shares, const float* x,
                                                           const int* order, const float* dz, const double* totals,
                                                           float* weight, float* bias, float* weight_slots,
                                                           float* bias_slots, int64_t size, int k, int n) {
    using T = TallUpdate<Rule>;
    using Lines = OwnLines<Rule, T::OWN>;
    SHARED(unsigned char, planes);
    unsigned char* const slices = planes + T::Planes::BYTES;
    unsigned char* const places = slices + T::RING_BYTES;
    const uint32_t barriers = shared_address(places + T::CONSUMERS * T::PLACE_BYTES), split = barriers + 8 * T::CONSUMERS;
    const float** const starts =
        reinterpret_cast<const float**>(places + T::CONSUMERS * (T::PLACE_BYTES + 8) + 8);  // of x's rows
    int* const column_flags = reinterpret_cast<int*>(starts + T::ROWS);
    Ring<T> ring(slices);

    const Rows rows = share_rows(step, share, shares);
    const Operand<false> a = {first_row(rows, x, order, k), k, rows.count, k, row_lines(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    // A block has a stretch of lines, and takes the last tile first: the forward product read it last.
    const int stretch = (k + gridDim.x * SplitProduct::M - 1) / (gridDim.x * SplitProduct::M) * SplitProduct::M;
    const int begin = blockIdx.x * stretch, end = min(k, begin + stretch);
    const int last = begin + (end - begin - 1) / T::LINES * T::LINES;
    if (begin >= end) return;

    if (threadIdx.x == 0) {
        ring.make(T::COPIERS);
        for (int i = 0; i < T::CONSUMERS; ++i) barrier_init(barriers + 8 * i, 1);
        barrier_init(split, T::CONSUMERS);
        barrier_publish();
    }
    for (int i = threadIdx.x; i < T::COLUMNS; i += T::THREADS) column_flags[i] = 0;
    find_lines<T::ROWS, T::THREADS>(a, 0, rows.count, starts);
    __syncthreads();

    if (threadIdx.x >= T::MULTIPLIERS) {
        const bool vectored = is_vectored(a.data, a.pitch);
        const int read = (rows.count + SplitProduct::PROMOTED - 1) / SplitProduct::PROMOTED * SplitProduct::PROMOTED;
        for (int line0 = last; line0 >= begin; line0 -= T::LINES)
            for (int row = 0; row < read; row += T::DEPTH) {
                ring.wait_empty();
                copy_lines<T::DEPTH, T::LINES, T::PITCH, T::COPIERS>(starts + row, a.data, vectored, line0, end,
                                                                     ring.address(), threadIdx.x - T::MULTIPLIERS);
                barrier_arrive_copied(ring.full + 8 * ring.stage);
                ring.advance();
            }
        return;
    }
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t brought = barriers + 8 * warp;
    const auto own_lines = [&](int line0) {
        const int line = line0 + warp * T::OWN;
        const int64_t at = static_cast<int64_t>(line) * n;
        return Lines(reinterpret_cast<float*>(places + warp * T::PLACE_BYTES), weight + at,
                     weight_slots + (Rule::SLOTS > 0 ? at : 0), size, n, min(T::OWN, end - line));
    };
    Lines own = own_lines(last);
    if (own.count > 0) own.bring(brought);
    for (int unit = threadIdx.x; unit < T::COLUMNS * (T::ROWS / 8); unit += T::MULTIPLIERS) {
        const int column = unit % T::COLUMNS, octet = unit / T::COLUMNS;
        float values[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const bool inside = column < n && 8 * octet + e < rows.count;
            values[e] = inside ? b.at(column, 8 * octet + e) : 0.0f;
        }
        if (T::Planes::store(planes, column, octet, values)) column_flags[column] = 1;
    }
    publish_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive<1>(split, 0);
    const float scale = static_cast<float>(inverse_weight(totals));
    const float* const rates = schedule + step->run * COLUMNS;
    if (blockIdx.x == 0 && bias && threadIdx.x < static_cast<unsigned>(n)) {
        const InPlace<Rule> of_bias = {bias, bias_slots, size, n, scale, rates};
        float sum = 0.0f;
#pragma unroll 16
        for (int row = 0; row < rows.count; ++row) sum += b.at(threadIdx.x, row);
        of_bias(0, threadIdx.x, sum);
    }
    barrier_wait(split, 0);
    bool any_column = false;
    for (int i = lane; i < T::COLUMNS; i += WARP) any_column = any_column || column_flags[i];

    int parity = 0;
    for (int line0 = last; line0 >= begin; line0 -= T::LINES) {
        float c[SplitProduct::HELD] = {}, sums[SplitProduct::HELD];
        unsigned least[2] = {~0u, ~0u};
        const float* slice = nullptr;
        const auto release = [&] {
            __syncwarp();
            if (lane == 0) barrier_arrive<1>(ring.empty + 8 * ring.stage, 0);
            ring.advance();
        };
        const auto begin_slice = [&](int row) {
            if (row % T::DEPTH != 0) return;
            if (row > 0) release();
            ring.wait_full();
            slice = reinterpret_cast<const float*>(slices + ring.stage * T::STAGE_BYTES) + lane % 4 * 2 * T::PITCH +
                    warp * T::OWN + lane / 4;
        };
        const auto pair = [&](int line, int row) {
            const float* const at = slice + row % T::DEPTH * T::PITCH + line;
            return make_float2(at[0], at[T::PITCH]);
        };
        for (int row = 0; row < rows.count; row += SplitProduct::PROMOTED) {
            multiply_parts<typename T::Planes>(sums, begin_slice, pair, shared_address(planes), row, least);
            release();
#pragma unroll
            for (int i = 0; i < SplitProduct::HELD; ++i) c[i] += sums[i];
        }
        if (own.count > 0) {
            const int line = line0 + warp * T::OWN;
            barrier_wait(brought, parity);
            parity ^= 1;
            finish_fragments(
                c, least, column_flags, any_column, own.count, n,
                [=](int row, int column) {
                    float sum = 0.0f;
                    for (int r = 0; r < rows.count; ++r) sum = fmaf(a.at(line + row, r), b.at(column, r), sum);
                    return sum;
                },
                [=](bool wanted, int row, int column, float sum) {
                    own.step(wanted, row * n + column, sum, scale, rates);
                });
            own.send();
            Lines::template release<0>();
        }
        if (line0 > begin) {
            own = own_lines(line0 - T::LINES);
            own.bring(brought);
        }
    }
}

}  // namespace mlpgpu
