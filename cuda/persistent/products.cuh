// The two products of a tile of the resident kernel, by all of the block's warps, from shared memory to shared memory:
//
//     Products::sum_z    x (rows, X_PITCH) · W (a tile), cut along the lines in Z_PARTS parts
//     Products::sum_dw   xᵀ · dZ (rows, DZ_PITCH), cut along the rows in DW_PARTS parts
//
// put(part, row or line, column, sums) takes pairs of neighbouring columns, which others add up if there are several
// parts.  The same is done by multiply-adds, or on tensor cores with each operand taken as one number of tf32 or as
// two, or with operands that lie there as bfloat16: Products<T, ROWS, NUMBERS>.
#pragma once

#include "arch/mma.cuh"
#include "persistent/shape.cuh"

namespace mlpgpu {

// What lies in shared memory as float32.
template <class T>
struct Floats {
    using Operand = float;
    static constexpr int X_PITCH = T::INPUT_PITCH, DZ_PITCH = T::DZ_PITCH;
    static constexpr int W_OPERANDS = 0, W_PITCH = 0;
    static constexpr int DW_TERMS = 8, DZ_ROWS = 8;  // rows of which dW takes as many at once, and has room for
};

// By multiply-adds in float32.  What bounds them is what they read of shared memory, a word of each lane a clock.
template <class T, int ROWS>
struct MultiplyAdds : Floats<T> {
    static constexpr int C = T::COLUMNS;
    // For Z, rows go to the lanes of a warp, one or two each; what warps are left over share the lines.
    static constexpr int LANE_ROWS = ROWS > WARP ? 2 : 1, ROW_WARPS = ceil_div(ROWS, LANE_ROWS * WARP);
    static constexpr int Z_PARTS = smallest(T::QUADS, largest(1, RESIDENT_WARPS / ROW_WARPS));
    // For dW, threads go to the tile's quads and to groups of rows, not so many that what they leave takes much memory.
    static constexpr int MOST_PARTS = 14;
    static constexpr int QUAD_LANES = power_from(T::QUADS);
    static constexpr int DW_PARTS = smallest(smallest(ceil_div(ROWS, 4), MOST_PARTS), RESIDENT_THREADS / QUAD_LANES);

    // All lanes of a warp read the same weights, each for its own rows.
    template <class Put>
    static __device__ __forceinline__ void sum_z(const float* inputs, const float* w, Put put) {
        const int lane = threadIdx.x % WARP, warp = worker() / WARP, part = warp / ROW_WARPS;
        for (int row_warp = warp % ROW_WARPS; row_warp < ROW_WARPS && part < Z_PARTS; row_warp += RESIDENT_WARPS) {
            const int first = row_warp * LANE_ROWS * WARP + lane;  // and WARP further, if there are two
            const float* x[LANE_ROWS];
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i)
                x[i] = inputs + min(first + i * WARP, ROWS - 1) * T::INPUT_PITCH;
            float sum[LANE_ROWS][C] = {};
#pragma unroll 1  // instructions come faster from a loop
            for (int quad = part; quad < T::QUADS; quad += Z_PARTS) {
                float four[LANE_ROWS][4];
#pragma unroll
                for (int i = 0; i < LANE_ROWS; ++i) load_four(x[i] + 4 * quad, four[i]);
#pragma unroll
                for (int line = 0; line < 4; ++line) {
                    float weight[C];
#pragma unroll
                    for (int c = 0; c < C; c += 4) load_four(w + quad * T::QUAD_PITCH + line * T::PITCH + c, weight + c);
#pragma unroll
                    for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                        for (int c = 0; c < C; ++c) sum[i][c] = fmaf(four[i][line], weight[c], sum[i][c]);
                }
            }
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                for (int c = 0; c < C; c += 2)
                    if (const int row = first + i * WARP; row < ROWS)
                        put(part, row, c, make_float2(sum[i][c], sum[i][c + 1]));
        }
    }

    // A thread takes four lines of every DW_PARTS-th row.
    template <class Put>
    static __device__ __forceinline__ void sum_dw(const float* inputs, const float* dz, int rows, Put put) {
        const int quad = worker() % QUAD_LANES, part = worker() / QUAD_LANES;
        if (part >= DW_PARTS || quad >= T::QUADS) return;
        const float* const x = inputs + 4 * quad;
        float sum[4][C] = {};
#pragma unroll(C > 8 ? 1 : 2)
        for (int row = part; row < rows; row += DW_PARTS) {
            float four[4], delta[C];
            load_four(x + row * T::INPUT_PITCH, four);
#pragma unroll
            for (int c = 0; c < C; c += 4) load_four(dz + row * T::DZ_PITCH + c, delta + c);
#pragma unroll
            for (int line = 0; line < 4; ++line)
#pragma unroll
                for (int c = 0; c < C; ++c) sum[line][c] = fmaf(four[line], delta[c], sum[line][c]);
        }
#pragma unroll
        for (int line = 0; line < 4; ++line)
#pragma unroll
            for (int c = 0; c < C; c += 2) put(part, 4 * quad + line, c, make_float2(sum[line][c], sum[line][c + 1]));
    }
};

// A warp's sums of 16 x 8 products, eight terms at a time, of operands that are taken as so many numbers of tf32 each.
template <int NUMBERS>
struct TensorSums;

// As they are: tensor cores take the first eleven bits of an operand, and ignore the others.
template <>
struct TensorSums<1> {
    using Operand = unsigned;
    float sum[4] = {};

    static __device__ __forceinline__ Operand operand(float x) { return __float_as_uint(x); }
    __device__ __forceinline__ void add(const Operand (&a)[4], const Operand (&b)[2]) {
        multiply_tf32(sum, a, b[0], b[1]);
    }
    __device__ __forceinline__ float at(int i) const { return sum[i]; }
};

// As the sum of two: `high` is x rounded to eleven bits, and `low` what it lacks, of which tensor cores take the first
// eleven bits, so that together they err by 2⁻²³ x at most.  The product of two low parts, 2⁻²² at most, is left out.
template <>
struct TensorSums<2> {
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
    __device__ __forceinline__ float at(int i) const { return high[i] + (mixed[0][i] + mixed[1][i]); }
};

// Into how many parts so many steps of each of so many sixteens of sums are cut, for all warps to have some.
__host__ __device__ constexpr int parts_of(int sixteens, int steps) {
    return smallest(steps, largest(1, RESIDENT_WARPS / sixteens));
}

// A warp's sixteen rows of sums from m on, as far as they are before `end`.
template <int C, class Sums, int EIGHTS, class Put>
__device__ __forceinline__ void put_sixteen(const Sums (&sums)[EIGHTS], int m, int end, Put put) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (const int row = m + g + 8 * half, column = 8 * n + 2 * t; row < end && column < C)
                put(row, column, make_float2(sums[n].at(2 * half), sums[n].at(2 * half + 1)));
}

// On tensor cores: a warp takes 16 rows of Z or lines of dW, all columns, and every parts-th eight terms.  Lane 4 g + t
// reads rows or columns g and terms t, and the pitches spread these over all banks.
template <class T, int ROWS, int NUMBERS>
struct TensorProducts : Floats<T> {
    static constexpr int C = T::COLUMNS, EIGHTS = ceil_div(C, 8), LINES = 4 * T::QUADS;
    static constexpr int Z_STEPS = ceil_div(LINES, 8), DW_STEPS = ceil_div(ROWS, 8);
    static constexpr int Z_SIXTEENS = ceil_div(ROWS, 16), DW_SIXTEENS = ceil_div(LINES, 16);
    // Z of many rows is sent from registers, by half of the warps; that takes less time than to add parts up.
    static constexpr int MANY_ROWS = 96;
    static constexpr int Z_PARTS = ROWS >= MANY_ROWS ? 1 : parts_of(Z_SIXTEENS, Z_STEPS);
    static constexpr int DW_PARTS = parts_of(DW_SIXTEENS, DW_STEPS);
    using Sums = TensorSums<NUMBERS>;

    template <class Put>
    static __device__ __forceinline__ void sum_z(const float* inputs, const float* weights, Put put) {
        const int warp = worker() / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, part = warp % Z_PARTS;
        for (int m = warp / Z_PARTS * 16; m < ROWS; m += RESIDENT_WARPS / Z_PARTS * 16) {
            const float* const w = weights + t * T::PITCH + g;
            const float* const x = inputs + min(m + g, ROWS - 1) * T::INPUT_PITCH + t;
            const float* const next = inputs + min(m + g + 8, ROWS - 1) * T::INPUT_PITCH + t;
            Sums sums[EIGHTS];
            each_step<Z_STEPS, Z_PARTS>(part, [&](int step) {
                const float a[4] = {x[8 * step], next[8 * step], x[8 * step + 4], next[8 * step + 4]};
                const float* const quads = w + 2 * step * T::QUAD_PITCH;
                add(sums, a, quads, quads + T::QUAD_PITCH);
            });
            put_sixteen<C>(sums, m, ROWS, [&](int row, int column, float2 z) { put(part, row, column, z); });
        }
    }

    // Which of eight rows is which term of an instruction does not matter: a lane's are two that follow each other.
    // dZ is 0 beyond the batch.
    template <class Put>
    static __device__ __forceinline__ void sum_dw(const float* inputs, const float* deltas, int, Put put) {
        const int warp = worker() / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, part = warp % DW_PARTS;
        for (int m = warp / DW_PARTS * 16; m < LINES; m += RESIDENT_WARPS / DW_PARTS * 16) {
            const float* const x = inputs + 2 * t * T::INPUT_PITCH + m + g;
            const float* const dz = deltas + 2 * t * T::DZ_PITCH + g;
            Sums sums[EIGHTS];
            each_step<DW_STEPS, DW_PARTS>(part, [&](int step) {
                const float* const row = x + 8 * step * T::INPUT_PITCH;
                const float* const next = row + T::INPUT_PITCH;
                const float a[4] = {row[0], row[8], next[0], next[8]};
                const float* const delta = dz + 8 * step * T::DZ_PITCH;
                add(sums, a, delta, delta + T::DZ_PITCH);
            });
            put_sixteen<C>(sums, m, LINES, [&](int line, int column, float2 g) { put(part, line, column, g); });
        }
    }

  private:
    // Calls visit(step) for a part's steps, of which all parts have as many but for one.
    template <int STEPS, int PARTS, class Visit>
    static __device__ __forceinline__ void each_step(int part, Visit visit) {
#pragma unroll 4
        for (int i = 0; i < STEPS / PARTS; ++i) visit(part + i * PARTS);
        if (part < STEPS % PARTS) visit(part + STEPS / PARTS * PARTS);
    }

    // The products of eight terms; of the other operand, those of a lane's two terms lie at `first` and at `second`.
    static __device__ __forceinline__ void add(Sums (&sums)[EIGHTS], const float (&a)[4], const float* first,
                                               const float* second) {
        const typename Sums::Operand operands[4] = {Sums::operand(a[0]), Sums::operand(a[1]), Sums::operand(a[2]),
                                                    Sums::operand(a[3])};
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
            sums[n].add(operands, {Sums::operand(first[8 * n]), Sums::operand(second[8 * n])});
    }
};

// On tensor cores, of operands in bfloat16.  A warp takes 16 rows of Z or lines of dW, and all terms.
template <class T, int ROWS>
struct BfloatProducts {
    using Operand = uint16_t;
    static constexpr int C = T::COLUMNS, EIGHTS = ceil_div(C, 8), LINES = 4 * T::QUADS;
    // Pitches that are odd multiples of sixteen bytes spread eight rows over all banks.
    static constexpr int X_PITCH = round_up(LINES, 16) + 8, W_PITCH = EIGHTS == 1 ? 8 : 24, DZ_PITCH = W_PITCH;
    static constexpr int DW_TERMS = 16, DZ_ROWS = 32;  // the other operand comes in two steps' terms
    static constexpr int W_OPERANDS = round_up(LINES, 32) * W_PITCH;
    static constexpr int Z_PARTS = 1, DW_PARTS = 1;

    template <class Put>
    static __device__ __forceinline__ void sum_z(const uint16_t* x, const uint16_t* w, Put put) {
        for (int m = worker() / WARP * 16; m < ROWS; m += RESIDENT_WARPS * 16) {
            Sums sums[EIGHTS];
            multiply<true, ceil_div(LINES, 16)>(sums, x, m, w);
            put_sixteen<C>(sums, m, ROWS, [&](int row, int column, float2 z) { put(0, row, column, z); });
        }
    }

    template <class Put>
    static __device__ __forceinline__ void sum_dw(const uint16_t* x, const uint16_t* dz, int, Put put) {
        for (int m = worker() / WARP * 16; m < LINES; m += RESIDENT_WARPS * 16) {
            Sums sums[EIGHTS];
            multiply<false, ceil_div(ROWS, 16)>(sums, x, m, dz);
            put_sixteen<C>(sums, m, LINES, [&](int line, int column, float2 g) { put(0, line, column, g); });
        }
    }

  private:
    struct Sums {
        float sum[2][4] = {};  // two, so that an instruction need not wait for the one before
        __device__ __forceinline__ float at(int i) const { return sum[0][i] + sum[1][i]; }
    };

    // Sixteen rows of x, or of its transpose, from m on, times the other operand.
    template <bool INNER_FIRST, int STEPS>
    static __device__ __forceinline__ void multiply(Sums (&sums)[EIGHTS], const uint16_t* x, int m,
                                                    const uint16_t* other) {
        const uint16_t* const line = other + threadIdx.x % WARP * W_PITCH;
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            unsigned b[EIGHTS][4];
#pragma unroll
            for (int n = 0; n < EIGHTS; ++n) load_matrices<true>(b[n], line + 16 * step * W_PITCH + 8 * n);
#pragma unroll
            for (int i = 0; i < 2 && step + i < STEPS; ++i) {
                unsigned a[4];
                load_fragments<INNER_FIRST, 0, X_PITCH>(a, x, m, 16 * (step + i));
#pragma unroll
                for (int n = 0; n < EIGHTS; ++n)
                    multiply_matrices<false>(sums[n].sum[i], a, b[n][2 * i], b[n][2 * i + 1]);
            }
        }
    }
};

template <class T, int ROWS, int NUMBERS>
struct Products : TensorProducts<T, ROWS, NUMBERS> {};
template <class T, int ROWS>
struct Products<T, ROWS, 0> : MultiplyAdds<T, ROWS> {};
template <class T, int ROWS>
struct Products<T, ROWS, BFLOATS> : BfloatProducts<T, ROWS> {};

}  // namespace mlpgpu
