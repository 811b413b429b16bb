// The two products of a tile, by all compute warps of the block, from shared memory to shared memory:
//
//     Products::sum_z    x (rows, X_PITCH) · W (a tile), in Z_PARTIALS partial sums over weight rows
//     Products::sum_dw   xᵀ · dZ (rows, DZ_PITCH), in DW_PARTIALS partial sums over rows
//
// put(partial, row or weight row, column, sums) gets pairs of neighbouring columns, and the caller adds partial sums
// up. Products<T, ROWS, TF32_TERMS> are made by multiply-adds, or on tensor cores from operands that are split into one
// or two terms of tf32, or that lie in shared memory as bfloat16.
#pragma once

#include "common/vectors.cuh"
#include "arch/mma.cuh"
#include "persistent/shape.cuh"

namespace mlpgpu {

// Operands that lie in shared memory as float32.
template <class T>
struct FloatOperands {
    using Operand = float;
    static constexpr int X_PITCH = T::INPUT_PITCH, DZ_PITCH = T::DZ_PITCH;
    static constexpr int W_OPERANDS = 0, W_PITCH = 0;
    static constexpr int DW_TERMS = 8, DZ_ROWS = 8;  // terms that dW takes at once, and what rows are padded to
};

// Products by multiply-adds in float32. Reads of shared memory bound them, one word of each lane a clock.
template <class T, int ROWS>
struct FmaProducts : FloatOperands<T> {
    static constexpr int C = T::COLUMNS;
    // For Z, rows go to the lanes of a warp, one or two each; the remaining warps divide the weight rows.
    static constexpr int LANE_ROWS = ROWS > WARP ? 2 : 1, ROW_WARPS = ceil_div(ROWS, LANE_ROWS * WARP);
    static constexpr int Z_PARTIALS = smallest(T::QUADS, largest(1, COMPUTE_WARPS / ROW_WARPS));
    // For dW, threads go to the tile's quads and to groups of rows; the limit bounds the memory that partial sums take.
    static constexpr int MOST_PARTIALS = 14;
    static constexpr int QUAD_LANES = power_from(T::QUADS);
    static constexpr int DW_PARTIALS = smallest(smallest(ceil_div(ROWS, 4), MOST_PARTIALS),
                                                COMPUTE_THREADS / QUAD_LANES);

    // All lanes of a warp read the same weights, each for its rows.
    template <class Put>
    static __device__ __forceinline__ void sum_z(const float* inputs, const float* w, Put put) {
        const int lane = threadIdx.x % WARP, warp = compute_thread() / WARP, partial = warp / ROW_WARPS;
        for (int row_warp = warp % ROW_WARPS; row_warp < ROW_WARPS && partial < Z_PARTIALS; row_warp += COMPUTE_WARPS) {
            const int first = row_warp * LANE_ROWS * WARP + lane;  // and first + WARP, if a lane has two rows
            const float* x[LANE_ROWS];
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i)
                x[i] = inputs + min(first + i * WARP, ROWS - 1) * T::INPUT_PITCH;
            float sum[LANE_ROWS][C] = {};
#pragma unroll 1  // instructions come faster from a loop
            for (int quad = partial; quad < T::QUADS; quad += Z_PARTIALS) {
                float four[LANE_ROWS][4];
#pragma unroll
                for (int i = 0; i < LANE_ROWS; ++i) load_four(x[i] + 4 * quad, four[i]);
#pragma unroll
                for (int weight_row = 0; weight_row < 4; ++weight_row) {
                    float weight[C];
#pragma unroll
                    for (int c = 0; c < C; c += 4)
                        load_four(w + quad * T::QUAD_PITCH + weight_row * T::PITCH + c, weight + c);
#pragma unroll
                    for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                        for (int c = 0; c < C; ++c) sum[i][c] = fmaf(four[i][weight_row], weight[c], sum[i][c]);
                }
            }
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                for (int c = 0; c < C; c += 2)
                    if (const int row = first + i * WARP; row < ROWS)
                        put(partial, row, c, make_float2(sum[i][c], sum[i][c + 1]));
        }
    }

    // A thread takes four weight rows and every DW_PARTIALS-th row of the batch.
    template <class Put>
    static __device__ __forceinline__ void sum_dw(const float* inputs, const float* dz, int rows, Put put) {
        const int quad = compute_thread() % QUAD_LANES, partial = compute_thread() / QUAD_LANES;
        if (partial >= DW_PARTIALS || quad >= T::QUADS) return;
        const float* const x = inputs + 4 * quad;
        float sum[4][C] = {};
#pragma unroll(C > 8 ? 1 : 2)
        for (int row = partial; row < rows; row += DW_PARTIALS) {
            float four[4], delta[C];
            load_four(x + row * T::INPUT_PITCH, four);
#pragma unroll
            for (int c = 0; c < C; c += 4) load_four(dz + row * T::DZ_PITCH + c, delta + c);
#pragma unroll
            for (int weight_row = 0; weight_row < 4; ++weight_row)
#pragma unroll
                for (int c = 0; c < C; ++c) sum[weight_row][c] = fmaf(four[weight_row], delta[c], sum[weight_row][c]);
        }
#pragma unroll
        for (int weight_row = 0; weight_row < 4; ++weight_row)
#pragma unroll
            for (int c = 0; c < C; c += 2)
                put(partial, 4 * quad + weight_row, c, make_float2(sum[weight_row][c], sum[weight_row][c + 1]));
    }
};

// A warp's sums of 16 x 8 products, eight terms at a time, of operands that are split into so many terms of tf32.
template <int TF32_TERMS>
struct Tf32Sums;

// One term: tensor cores take the first eleven bits of an operand and ignore the others.
template <>
struct Tf32Sums<1> {
    using Operand = unsigned;
    float sum[4] = {};

    static __device__ __forceinline__ Operand operand(float x) { return __float_as_uint(x); }
    __device__ __forceinline__ void add(const Operand (&a)[4], const Operand (&b)[2]) {
        multiply_tf32(sum, a, b[0], b[1]);
    }
    __device__ __forceinline__ float value(int i) const { return sum[i]; }
};

// Two terms: `high` is x rounded to eleven bits, and `low` is the rest, of which tensor cores take the first eleven
// bits, so that together they err by at most 2⁻²³ x. The product of two low terms, at most 2⁻²² of the whole, is left
// out.
template <>
struct Tf32Sums<2> {
    struct Operand {
        unsigned high, low;
    };
    float high[4] = {}, mixed[2][4] = {};  // three sums, so that no instruction waits for the one before

    static __device__ __forceinline__ Operand operand(float x) {
        const unsigned high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
        return {high, __float_as_uint(x - __uint_as_float(high))};
    }
    __device__ __forceinline__ void add(const Operand (&a)[4], const Operand (&b)[2]) {
        const unsigned a_high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
        const unsigned a_low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
        multiply_tf32(mixed[0], a_low, b[0].high, b[1].high);
        multiply_tf32(mixed[1], a_high, b[0].low, b[1].low);
        multiply_tf32(high, a_high, b[0].high, b[1].high);
    }
    __device__ __forceinline__ float value(int i) const { return high[i] + (mixed[0][i] + mixed[1][i]); }
};

// Into how many partial sums `steps` steps are divided for all warps to have work, with so many blocks of 16 rows.
__host__ __device__ constexpr int mma_partials(int sixteens, int steps) {
    return smallest(steps, largest(1, COMPUTE_WARPS / sixteens));
}

// Passes on a warp's sixteen rows of sums from m on, as far as they are before `end`.
template <int C, class Sums, int EIGHTS, class Put>
__device__ __forceinline__ void put_sixteen(const Sums (&sums)[EIGHTS], int m, int end, Put put) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (const int row = m + g + 8 * half, column = 8 * n + 2 * t; row < end && column < C)
                put(row, column, make_float2(sums[n].value(2 * half), sums[n].value(2 * half + 1)));
}

// Products on tensor cores: a warp takes 16 rows of Z or weight rows of dW, all columns, and every partials-th step of
// eight terms. Lane 4 g + t reads rows or columns g and terms t, and the pitches spread these over all banks.
template <class T, int ROWS, int TF32_TERMS>
struct Tf32Products : FloatOperands<T> {
    static constexpr int C = T::COLUMNS, EIGHTS = ceil_div(C, 8), WEIGHT_ROWS = 4 * T::QUADS;
    static constexpr int Z_STEPS = ceil_div(WEIGHT_ROWS, 8), DW_STEPS = ceil_div(ROWS, 8);
    static constexpr int Z_SIXTEENS = ceil_div(ROWS, 16), DW_SIXTEENS = ceil_div(WEIGHT_ROWS, 16);
    // With many rows, half of the warps send Z from registers, which takes less time than to add partial sums up.
    static constexpr int MANY_ROWS = 96;
    static constexpr int Z_PARTIALS = ROWS >= MANY_ROWS ? 1 : mma_partials(Z_SIXTEENS, Z_STEPS);
    static constexpr int DW_PARTIALS = mma_partials(DW_SIXTEENS, DW_STEPS);
    using Sums = Tf32Sums<TF32_TERMS>;

    template <class Put>
    static __device__ __forceinline__ void sum_z(const float* inputs, const float* weights, Put put) {
        const int warp = compute_thread() / WARP, partial = warp % Z_PARTIALS;
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        for (int m = warp / Z_PARTIALS * 16; m < ROWS; m += COMPUTE_WARPS / Z_PARTIALS * 16) {
            const float* const w = weights + t * T::PITCH + g;
            const float* const x = inputs + min(m + g, ROWS - 1) * T::INPUT_PITCH + t;
            const float* const next = inputs + min(m + g + 8, ROWS - 1) * T::INPUT_PITCH + t;
            Sums sums[EIGHTS];
            each_step<Z_STEPS, Z_PARTIALS>(partial, [&](int step) {
                const float a[4] = {x[8 * step], next[8 * step], x[8 * step + 4], next[8 * step + 4]};
                const float* const quads = w + 2 * step * T::QUAD_PITCH;
                add(sums, a, quads, quads + T::QUAD_PITCH);
            });
            put_sixteen<C>(sums, m, ROWS, [&](int row, int column, float2 z) { put(partial, row, column, z); });
        }
    }

    // It does not matter which of eight rows is which term of an instruction: a lane takes two neighbouring rows. dZ is
    // 0 beyond the batch.
    template <class Put>
    static __device__ __forceinline__ void sum_dw(const float* inputs, const float* deltas, int, Put put) {
        const int warp = compute_thread() / WARP, partial = warp % DW_PARTIALS;
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        for (int m = warp / DW_PARTIALS * 16; m < WEIGHT_ROWS; m += COMPUTE_WARPS / DW_PARTIALS * 16) {
            const float* const x = inputs + 2 * t * T::INPUT_PITCH + m + g;
            const float* const dz = deltas + 2 * t * T::DZ_PITCH + g;
            Sums sums[EIGHTS];
            each_step<DW_STEPS, DW_PARTIALS>(partial, [&](int step) {
                const float* const row = x + 8 * step * T::INPUT_PITCH;
                const float* const next = row + T::INPUT_PITCH;
                const float a[4] = {row[0], row[8], next[0], next[8]};
                const float* const delta = dz + 8 * step * T::DZ_PITCH;
                add(sums, a, delta, delta + T::DZ_PITCH);
            });
            put_sixteen<C>(sums, m, WEIGHT_ROWS,
                           [&](int weight_row, int column, float2 g) { put(partial, weight_row, column, g); });
        }
    }

  private:
    // Calls visit(step) for the steps of a partial sum; the counts of steps differ by at most one.
    template <int STEPS, int PARTIALS, class Visit>
    static __device__ __forceinline__ void each_step(int partial, Visit visit) {
#pragma unroll 4
        for (int i = 0; i < STEPS / PARTIALS; ++i) visit(partial + i * PARTIALS);
        if (partial < STEPS % PARTIALS) visit(partial + STEPS / PARTIALS * PARTIALS);
    }

    // Multiplies eight terms; `first` and `second` are the lane's two terms of the other operand.
    static __device__ __forceinline__ void add(Sums (&sums)[EIGHTS], const float (&a)[4], const float* first,
                                               const float* second) {
        const typename Sums::Operand operands[4] = {Sums::operand(a[0]), Sums::operand(a[1]), Sums::operand(a[2]),
                                                    Sums::operand(a[3])};
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
            sums[n].add(operands, {Sums::operand(first[8 * n]), Sums::operand(second[8 * n])});
    }
};

// Products on tensor cores of operands in bfloat16. A warp takes 16 rows of Z or weight rows of dW, and all terms.
template <class T, int ROWS>
struct Bfloat16Products {
    using Operand = uint16_t;
    static constexpr int C = T::COLUMNS, EIGHTS = ceil_div(C, 8), WEIGHT_ROWS = 4 * T::QUADS;
    // Pitches that are odd multiples of sixteen bytes spread eight rows over all banks.
    static constexpr int X_PITCH = round_up(WEIGHT_ROWS, 16) + 8, W_PITCH = EIGHTS == 1 ? 8 : 24, DZ_PITCH = W_PITCH;
    static constexpr int DW_TERMS = 16, DZ_ROWS = 32;  // the other operand is loaded for two steps at once
    static constexpr int W_OPERANDS = round_up(WEIGHT_ROWS, 32) * W_PITCH;
    static constexpr int Z_PARTIALS = 1, DW_PARTIALS = 1;

    template <class Put>
    static __device__ __forceinline__ void sum_z(const uint16_t* x, const uint16_t* w, Put put) {
        for (int m = compute_thread() / WARP * 16; m < ROWS; m += COMPUTE_WARPS * 16) {
            Sums sums[EIGHTS];
            multiply<true, ceil_div(WEIGHT_ROWS, 16)>(sums, x, m, w);
            put_sixteen<C>(sums, m, ROWS, [&](int row, int column, float2 z) { put(0, row, column, z); });
        }
    }

    template <class Put>
    static __device__ __forceinline__ void sum_dw(const uint16_t* x, const uint16_t* dz, int, Put put) {
        for (int m = compute_thread() / WARP * 16; m < WEIGHT_ROWS; m += COMPUTE_WARPS * 16) {
            Sums sums[EIGHTS];
            multiply<false, ceil_div(ROWS, 16)>(sums, x, m, dz);
            put_sixteen<C>(sums, m, WEIGHT_ROWS,
                           [&](int weight_row, int column, float2 g) { put(0, weight_row, column, g); });
        }
    }

  private:
    struct Sums {
        float sum[2][4] = {};  // two sums, so that an instruction need not wait for the one before
        __device__ __forceinline__ float value(int i) const { return sum[0][i] + sum[1][i]; }
    };

    // Multiplies sixteen rows of x, or of its transpose, from m on, by the other operand.
    template <bool INNER_FIRST, int STEPS>
    static __device__ __forceinline__ void multiply(Sums (&sums)[EIGHTS], const uint16_t* x, int m,
                                                    const uint16_t* other) {
        const uint16_t* const weight_row = other + threadIdx.x % WARP * W_PITCH;
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            unsigned b[EIGHTS][4];
#pragma unroll
            for (int n = 0; n < EIGHTS; ++n) load_matrices<true>(b[n], weight_row + 16 * step * W_PITCH + 8 * n);
#pragma unroll
            for (int i = 0; i < 2 && step + i < STEPS; ++i) {
                unsigned a[4];
                load_fragments<INNER_FIRST, 0>(a, x, X_PITCH, m, 16 * (step + i));
#pragma unroll
                for (int n = 0; n < EIGHTS; ++n)
                    multiply_matrices<false>(sums[n].sum[i], a, b[n][2 * i], b[n][2 * i + 1]);
            }
        }
    }
};

template <class T, int ROWS, int TF32_TERMS>
struct Products : Tf32Products<T, ROWS, TF32_TERMS> {};
template <class T, int ROWS>
struct Products<T, ROWS, 0> : FmaProducts<T, ROWS> {};
template <class T, int ROWS>
struct Products<T, ROWS, BFLOAT16> : Bfloat16Products<T, ROWS> {};

}  // namespace mlpgpu
