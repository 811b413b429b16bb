// The first layer of a network of narrow layers whose inputs are too long for a block's shared memory: its products with the
// batch's rows as they lie in the data set, on tensor cores. Both read each input once, and split it as they do; between them
// fused/tensor_row_step.cuh takes all other layers forward and back.
//
// A warp multiplies 16 inputs (forward) or 16 rows (back) at once, of which a lane loads four neighbours from global memory
// to registers, some products ahead. As sums go over all of them, their order does not matter: of the four that lane
// 4 g + t has, two stand where tensor cores have 2 t and 2 t + 1, and two where they have those 8 further, the first two for
// t < 2 and the last two for others. So the rows of the other operand that eight lanes read lie in different banks.
#pragma once

#include "arch/barriers.cuh"
#include "arch/bulk_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/step.cuh"
#include "gemm/components.cuh"

namespace mlpgpu {

// Outputs are 16 TILES columns with their padding. BYTES are what the slabs need: the first-level cache has what a
// multiprocessor's blocks leave of its memory, and through it all loads pass.
template <int COMPONENTS_, int TILES_, int BYTES>
struct InputLayerShape {
    static constexpr int COMPONENTS = COMPONENTS_, TILES = TILES_, STEP = ComponentsShape::STEP;
    static constexpr int WARPS = 8, THREADS = WARPS * WARP, STAGES = 3;
    static constexpr int BARRIER_WORDS = 8;  // of STAGES barriers, and what aligns the arrays behind them
    static constexpr int SLAB = ComponentsShape::PROMOTED, STEPS = SLAB / STEP;  // inputs or rows of a slab, in products of 16
    static constexpr int INPUTS = 2;        // neighbours of which a lane makes the gradient
    static constexpr int MOST_ROWS = 2048;  // of a block of the gradient, whose numbers it keeps
    static constexpr int SHARED_BYTES = BYTES;
};

// Inputs of the data set, floats or bytes times `scale`, less `mean` over `deviation` (k,) unless they are null. One
// instruction loads WIDTH neighbours, which divides k.
template <class Number, int WIDTH>
struct InputRows {
    const Number* data;
    float scale;
    const float* mean;
    const float* deviation;
    int k;

    struct alignas(WIDTH * sizeof(Number)) Vector {
        Number numbers[WIDTH];
    };

    // Loads neighbours of a row of the data set, which are converted later; beyond a row's end others of the row. It has no
    // branches: where two ways meet, a copy would wait for what was loaded.
    template <int COUNT>
    __device__ __forceinline__ void load(int row, int column, Number (&to)[COUNT]) const {
        const Number* const from = data + static_cast<int64_t>(row) * k;
#pragma unroll
        for (int q = 0; q < COUNT; q += WIDTH) {
            const Vector vector = *reinterpret_cast<const Vector*>(from + smallest(column + q, k - WIDTH));
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) to[q + e] = vector.numbers[e];
        }
    }

    // What was loaded from `column` on as numbers.
    template <int COUNT>
    __device__ __forceinline__ void convert(const Number (&loaded)[COUNT], int column, float (&to)[COUNT]) const {
#pragma unroll
        for (int q = 0; q < COUNT; ++q) to[q] = sizeof(Number) == 1 ? __fmul_rn(scale, loaded[q]) : loaded[q];
        if (deviation)
#pragma unroll
            for (int q = 0; q < COUNT; ++q)
                if (column + q < k) to[q] = quotient(to[q] - mean[column + q], deviation[column + q]);
    }
};

// The row of 16 of the other operand at which a lane points, for load_matrices<true>() of rows in the order of lanes' fours.
__device__ __forceinline__ int row_of_fours() {
    const int lane = threadIdx.x % WARP, t = lane % 8 / 2, is_later = lane / 8 % 2 != t / 2;
    return 4 * t + 2 * is_later + lane % 2;
}

// A ring of slabs of an operand's components in shared memory, rows `pitch` elements apart: one thread has them copied, some
// slabs ahead of the one that all multiply.
template <int COMPONENTS, int STAGES>
struct SlabsInTurn {
    const uint16_t* from;   // of the first slab
    int64_t stride;         // elements from component to component there
    int rows, pitch, slab;  // rows that there are, and of a slab
    uint16_t* stages;
    uint64_t* arrived;  // a barrier for each stage
    int place = 0, parity = 0;  // the stage of the next slab, and the phase of its barrier

    __device__ __forceinline__ SlabsInTurn(const uint16_t* from, int64_t stride, int rows, int pitch, int slab,
                                           uint16_t* stages, uint64_t* arrived)
        : from(from), stride(stride), rows(rows), pitch(pitch), slab(slab), stages(stages), arrived(arrived) {}

    __device__ __forceinline__ int elements() const { return slab * pitch; }  // of a component of a stage

    // Begins to copy slab i, if there is one, to a stage.
    __device__ __forceinline__ void fetch(int i, int to) const {
        const int left = smallest(slab, rows - i * slab);
        if (threadIdx.x != 0 || left <= 0) return;
        const int bytes = 2 * left * pitch;
        const uint32_t barrier = shared_address(arrived + to);
        barrier_expect(barrier, COMPONENTS * bytes);
        for (int p = 0; p < COMPONENTS; ++p)
            bulk_copy(shared_address(stages + (to * COMPONENTS + p) * elements()),
                      from + p * stride + static_cast<int64_t>(i) * elements(), barrier, bytes);
    }

    __device__ __forceinline__ void begin() const {
        for (int i = 0; i < STAGES; ++i) fetch(i, i);
    }

    // Waits for the next slab, i, and for all threads, who have multiplied the one before it, whose place another one gets.
    // Rows behind the last one are zeros.
    __device__ __forceinline__ Components<COMPONENTS> next(int i) {
        barrier_wait(shared_address(arrived + place), parity);
        __syncthreads();
        if (i > 0) fetch(i + STAGES - 1, (place == 0 ? STAGES : place) - 1);
        const Components<COMPONENTS> found = {stages + place * COMPONENTS * elements(), pitch, elements()};
        const int left = rows - i * slab;
        if (left < slab) {
            for (int e = left * pitch + threadIdx.x; e < elements(); e += blockDim.x)
                for (int p = 0; p < COMPONENTS; ++p) found.data[p * found.stride + e] = 0;
            __syncthreads();
        }
        if (++place == STAGES) place = 0, parity ^= 1;
        return found;
    }
};

// Makes the barriers of a ring, by all threads.
__device__ __forceinline__ void make_barriers(uint64_t* barriers, int count) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < count; ++i) barrier_init(shared_address(barriers + i), 1);
        barrier_publish();
    }
    __syncthreads();
}

// sums (16, 16 TILES) += A's fragments times 16 rows of B, from `first_row` on, in the order of lanes' fours. Two tiles at once,
// since a product waits for the one before it in the same sum.
template <class T>
__device__ __forceinline__ void multiply_fours(const unsigned (&a)[T::COMPONENTS][4], const Components<T::COMPONENTS>& b,
                                               int first_row, float (&sums)[T::TILES][2][4]) {
    const uint16_t* const of_lane = b.data + (first_row + row_of_fours()) * b.pitch + threadIdx.x % WARP / 16 * 8;
#pragma unroll
    for (int j = 0; j < T::TILES; j += 2) {
        unsigned of_b[2][T::COMPONENTS][4];
#pragma unroll
        for (int e = 0; e < 2 && j + e < T::TILES; ++e)
#pragma unroll
            for (int p = 0; p < T::COMPONENTS; ++p)
                load_matrices<true>(of_b[e][p], of_lane + p * b.stride + T::STEP * (j + e));
#pragma unroll
        for (int both = T::COMPONENTS - 1; both >= 0; --both)
#pragma unroll
            for (int p = 0; p <= both; ++p)
#pragma unroll
                for (int e = 0; e < 2 && j + e < T::TILES; ++e)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        multiply_matrices<false>(sums[j + e][half], a[p], of_b[e][both - p][2 * half],
                                                 of_b[e][both - p][2 * half + 1]);
    }
}

template <int TILES>
__device__ __forceinline__ void add_tiles(float (&sums)[TILES][2][4], float (&part)[TILES][2][4]) {
#pragma unroll
    for (int j = 0; j < TILES; ++j) add_sums(sums[j], part[j]);
#pragma unroll
    for (int q = 0; q < 8 * TILES; ++q) part[q / 8][q / 4 % 2][q % 4] = 0.0f;
}

// Calls store(half, column, two) for all pairs of neighbours among a lane's sums, of its upper row and of the lower one.
template <int TILES, class Store>
__device__ __forceinline__ void each_pair(const float (&sums)[TILES][2][4], int columns, const Store& store) {
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = ComponentsShape::STEP * j + e / 2 * 8 + threadIdx.x % 4 * 2;
            const float(&four)[4] = sums[j][e / 2];
            if (column < columns) store(e % 2, column, make_float2(four[e % 2 * 2], four[e % 2 * 2 + 1]));
        }
}

// partials (grid y, capacity, n padded to 16): x W of the shard's rows, over `part` inputs for each y of the grid. `image` is W
// (k, n) as fused/update_from_blocks.cuh leaves it. Warps have 16 rows each, `row_warps` of them all of a block's rows; others
// have the same rows and other inputs of a slab. Grid: (16 · row_warps rows, parts of the inputs).
template <class T, int WIDTH, class Number>
__device__ __forceinline__ void input_layer_forward(const Step* step, int shard, int shards, const int* order,
                                                    const Number* data, float scale, const float* mean,
                                                    const float* deviation, const uint16_t* image, float* partials, int k,
                                                    int n, int part, int row_warps, int capacity) {
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int shares = T::WARPS / row_warps, share = warp / row_warps;
    constexpr int COLUMNS = T::STEP * T::TILES;
    const int pitch = components_pitch(n);
    const Rows rows = shard_rows(step, shard, shards);
    const int tile = row_warps * T::STEP, in_tile = warp % row_warps * T::STEP, row = blockIdx.x * tile + in_tile + lane / 4;
    const int first = blockIdx.y * part, end = smallest(k, first + part);  // of the block's inputs
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared);
    SlabsInTurn<T::COMPONENTS, T::STAGES> weights(
        image + static_cast<int64_t>(first) * pitch, static_cast<int64_t>(padded_to_step(k)) * pitch,
        padded_to_step(end) - first, pitch, shares * T::SLAB, reinterpret_cast<uint16_t*>(shared + T::BARRIER_WORDS), barriers);
    make_barriers(barriers, T::STAGES);

    const InputRows<Number, WIDTH> inputs = {data, scale, mean, deviation, k};
    int of_data[2];  // where the batch has no row, any: its sums are left out
#pragma unroll
    for (int h = 0; h < 2; ++h) of_data[h] = row + 8 * h < rows.count ? order[rows.order + rows.first + row + 8 * h] : 0;
    const int count = ceil_div(end - first, weights.slab), own = first + share * T::SLAB;
    Number loaded[T::STEPS][2][4];
    const auto load = [&](int i, int s) {  // what a lane multiplies in product s of slab i
        const int begin = own + i * weights.slab + T::STEP * s, column = (begin < end ? begin : first) + lane % 4 * 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) inputs.load(of_data[h], column, loaded[s][h]);
    };
#pragma unroll
    for (int s = 0; s < T::STEPS; ++s) load(0, s);
    pdl_wait_and_trigger();
    weights.begin();

    float sums[T::TILES][2][4] = {}, partial[T::TILES][2][4] = {};
    for (int i = 0; i < count; ++i) {
        const Components<T::COMPONENTS> w = weights.next(i);
        float(&c)[T::TILES][2][4] = T::COMPONENTS > 2 ? partial : sums;
#pragma unroll
        for (int s = 0; s < T::STEPS; ++s) {
            const int begin = own + i * weights.slab + T::STEP * s;
            float numbers[2][4];
#pragma unroll
            for (int h = 0; h < 2; ++h) inputs.convert(loaded[s][h], begin + lane % 4 * 4, numbers[h]);
            load(i + 1, s);
            float2 pairs[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float(&four)[4] = numbers[e % 2];
                const bool is_later = (lane % 4 / 2 + e / 2) % 2;
                pairs[e] = make_float2(is_later ? four[2] : four[0], is_later ? four[3] : four[1]);
            }
            unsigned of_x[T::COMPONENTS][4];
            split_pairs(pairs, of_x);
            multiply_fours<T>(of_x, w, share * T::SLAB + T::STEP * s, c);
        }
        if (T::COMPONENTS > 2) add_tiles(sums, partial);
    }

    float* const to = partials + (static_cast<int64_t>(blockIdx.y) * capacity + blockIdx.x * tile) * COLUMNS;
    const int row_count = rows.count - static_cast<int>(blockIdx.x) * tile;
    if (shares == 1) {
        each_pair(sums, COLUMNS, [&](int half, int column, const float2& two) {
            const int of_tile = in_tile + lane / 4 + half * 8;
            if (of_tile < row_count) *reinterpret_cast<float2*>(to + of_tile * COLUMNS + column) = two;
        });
        return;
    }
    __syncthreads();  // the warps' sums take the place of the slabs
    float* const all = shared + T::BARRIER_WORDS;
    const int share_size = tile * pitch;  // rows that lie so far apart that lanes' pairs are in different banks
    float* const of_lane = all + share * share_size + (in_tile + lane / 4) * pitch;
    each_pair(sums, COLUMNS, [&](int half, int column, const float2& two) {
        *reinterpret_cast<float2*>(of_lane + half * 8 * pitch + column) = two;
    });
    __syncthreads();
    const int pairs = COLUMNS / 2;
    for (int i = threadIdx.x; i < smallest(tile, row_count) * pairs; i += T::THREADS) {
        const int of_tile = i / pairs, column = 2 * (i - of_tile * pairs);
        float2 sum = {};
        for (int other = 0; other < shares; ++other) {
            const float2 of_share = *reinterpret_cast<const float2*>(all + other * share_size + of_tile * pitch + column);
            sum = make_float2(sum.x + of_share.x, sum.y + of_share.y);
        }
        *reinterpret_cast<float2*>(to + of_tile * COLUMNS + column) = sum;
    }
}

// partials (grid y, k + 1, n padded to 8): xᵀ dz and, as its last row, dz's sums, over `part` of the shard's rows for each y
// of the grid. `deltas` are dz's components (components, delta_rows, n padded to 16 and 8), of which rows behind the shard's
// may have anything. A warp has 8 INPUTS inputs, of which a lane loads INPUTS neighbours of each row, AHEAD products of 16
// rows before they are multiplied.
// Grid: (8 · WARPS · INPUTS inputs, parts of the rows).
template <class T, int AHEAD, int WIDTH, class Number>
__device__ __forceinline__ void input_layer_gradient(const Step* step, int shard, int shards, const int* order,
                                                     const Number* data, float scale, const float* mean,
                                                     const float* deviation, const uint16_t* deltas, float* partials,
                                                     int k, int n, int part, int delta_rows) {
    constexpr int INPUTS = T::INPUTS;
    SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int pitch = components_pitch(n);
    const Rows rows = shard_rows(step, shard, shards);
    const int first = smallest(rows.count, blockIdx.y * part), count = smallest(part, rows.count - first);
    const int input = (blockIdx.x * T::WARPS + warp) * 8 * INPUTS + lane / 4 * INPUTS;  // the lane's first one
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared);
    int* const fetched = reinterpret_cast<int*>(shared) + T::BARRIER_WORDS;  // (part,), a multiple of a slab
    SlabsInTurn<T::COMPONENTS, T::STAGES> of_deltas(
        deltas + static_cast<int64_t>(first) * pitch, static_cast<int64_t>(delta_rows) * pitch, count, pitch, T::SLAB,
        reinterpret_cast<uint16_t*>(fetched + T::MOST_ROWS), barriers);
    const int* const numbers_of_rows = order + rows.order + rows.first + first;
    // Behind the last row stands the first one, which is multiplied by zeros.
    for (int i = threadIdx.x; i < part && count > 0; i += T::THREADS) fetched[i] = numbers_of_rows[i < count ? i : 0];
    make_barriers(barriers, T::STAGES);

    const InputRows<Number, WIDTH> inputs = {data, scale, mean, deviation, k};
    Number loaded[AHEAD][4][INPUTS];
    // Of a lane's four rows the first two are those that stand first.
    const auto row_of = [&](int begin, int r) { return begin + lane % 4 * 4 + (r ^ (lane % 4 / 2 * 2)); };
    const auto load = [&](int begin, Number (&to)[4][INPUTS]) {
#pragma unroll
        for (int r = 0; r < 4; ++r) inputs.load(fetched[row_of(smallest(begin, part - T::STEP), r)], input, to[r]);
    };
    if (count > 0)
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) load(T::STEP * s, loaded[s]);
    pdl_wait_and_trigger();
    of_deltas.begin();

    float sums[T::TILES][2][4] = {}, partial[T::TILES][2][4] = {};
    const int slabs = ceil_div(count, T::SLAB);
    for (int i = 0; i < slabs; ++i) {
        const Components<T::COMPONENTS> dz = of_deltas.next(i);
        float(&c)[T::TILES][2][4] = T::COMPONENTS > 2 ? partial : sums;
#pragma unroll
        for (int s = 0; s < T::STEPS; ++s) {
            const int begin = i * T::SLAB + T::STEP * s;
            float numbers[4][INPUTS];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                inputs.convert(loaded[s % AHEAD][r], input, numbers[r]);
#pragma unroll
                for (int q = 0; q < INPUTS; ++q)
                    if (input + q == k) numbers[r][q] = 1.0f;  // whose sums are the bias's
            }
            load(begin + AHEAD * T::STEP, loaded[s % AHEAD]);
            float2 pairs[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) pairs[e] = make_float2(numbers[e / 2 * 2][e % 2], numbers[e / 2 * 2 + 1][e % 2]);
            unsigned of_x[T::COMPONENTS][4];
            split_pairs(pairs, of_x);
            multiply_fours<T>(of_x, dz, T::STEP * s, c);
        }
        if (T::COMPONENTS > 2) add_tiles(sums, partial);
    }

    const int of_row = round_up(n, 8);
    float* const to = partials + static_cast<int64_t>(blockIdx.y) * (k + 1) * of_row;
    each_pair(sums, of_row, [&](int half, int column, const float2& two) {
        const int of_input = input + half;  // rows of this product are inputs side by side
        if (of_input <= k) *reinterpret_cast<float2*>(to + static_cast<int64_t>(of_input) * of_row + column) = two;
    });
}

}  // namespace mlpgpu
