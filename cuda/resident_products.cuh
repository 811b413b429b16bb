// The two products of a tile of the resident kernel, by all of the block's warps, from shared memory to shared memory:
//
//     Products::sum_z    x (rows, INPUT_PITCH) · W (a tile), cut along the lines in Z_PARTS parts
//     Products::sum_dw   xᵀ · dZ (rows, DZ_PITCH), cut along the rows in DW_PARTS parts
//
// The parts, of Z (parts, rows, SUM_PITCH) and of dW (parts, a tile), are added up by others.  The same is done by
// multiply-adds, or on tensor cores with each operand taken as one number of tf32 or as two: Products<T, ROWS, NUMBERS>.
#pragma once

#include "matrix.cuh"
#include "resident_shape.cuh"

namespace mlpgpu {

// By multiply-adds in float32.  What bounds them is what they read of shared memory, a word of each lane a clock.
template <class T, int ROWS>
struct MultiplyAdds {
    static constexpr int C = T::COLUMNS;
    // For Z, rows go to the lanes of a warp, one or two each; what warps are left over share the lines.
    static constexpr int LANE_ROWS = ROWS > WARP ? 2 : 1, ROW_WARPS = ceil_div(ROWS, LANE_ROWS * WARP);
    static constexpr int Z_PARTS = smallest(T::QUADS, largest(1, RESIDENT_WARPS / ROW_WARPS));
    // For dW, threads go to the tile's quads and to groups of rows, not so many that what they leave takes much memory.
    static constexpr int MOST_PARTS = 14;
    static constexpr int QUAD_LANES = power_from(T::QUADS);
    static constexpr int DW_PARTS = smallest(smallest(ceil_div(ROWS, 4), MOST_PARTS), RESIDENT_THREADS / QUAD_LANES);

    // All lanes of a warp read the same weights, each for its own rows.
    static __device__ __forceinline__ void sum_z(const float* inputs, const float* w, float* parts) {
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
            float* const to = parts + (part * ROWS + first) * T::SUM_PITCH;
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                for (int c = 0; c < C; c += 4)
                    if (first + i * WARP < ROWS) store_four(to + i * WARP * T::SUM_PITCH + c, sum[i] + c);
        }
    }

    // A thread takes four lines of every DW_PARTS-th row.
    static __device__ __forceinline__ void sum_dw(const float* inputs, const float* dz, int rows, float* parts) {
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
        float* const to = parts + part * T::TILE + quad * T::QUAD_PITCH;
#pragma unroll
        for (int line = 0; line < 4; ++line)
#pragma unroll
            for (int c = 0; c < C; c += 4) store_four(to + line * T::PITCH + c, sum[line] + c);
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

// On tensor cores: a warp takes 16 rows of Z or lines of dW, all columns, and every parts-th eight terms.  Lane 4 g + t
// reads rows or columns g and terms t, and the pitches spread these over all banks.
template <class T, int ROWS, int NUMBERS>
struct TensorProducts {
    static constexpr int C = T::COLUMNS, EIGHTS = ceil_div(C, 8), LINES = 4 * T::QUADS;
    static constexpr int Z_STEPS = ceil_div(LINES, 8), DW_STEPS = ceil_div(ROWS, 8);
    static constexpr int Z_SIXTEENS = ceil_div(ROWS, 16), DW_SIXTEENS = ceil_div(LINES, 16);
    static constexpr int Z_PARTS = smallest(Z_STEPS, largest(1, RESIDENT_WARPS / Z_SIXTEENS));
    static constexpr int DW_PARTS = smallest(DW_STEPS, largest(1, RESIDENT_WARPS / DW_SIXTEENS));
    using Sums = TensorSums<NUMBERS>;

    static __device__ __forceinline__ void sum_z(const float* inputs, const float* weights, float* parts) {
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
            float* const to = parts + (part * ROWS + m) * T::SUM_PITCH;
            store(sums, ROWS - m, [=](int row) { return to + row * T::SUM_PITCH; });
        }
    }

    // Which of eight rows is which term of an instruction does not matter: a lane's are two that follow each other.
    // dZ is 0 beyond the batch.
    static __device__ __forceinline__ void sum_dw(const float* inputs, const float* deltas, int, float* parts) {
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
            // A tile's lines lie in fours, QUAD_PITCH apart.
            float* const to = parts + part * T::TILE + m / 4 * T::QUAD_PITCH;
            store(sums, LINES - m, [=](int line) { return to + line / 4 * T::QUAD_PITCH + line % 4 * T::PITCH; });
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

    // The first `count` of sixteen rows of sums, each to where place(row) says.
    template <class Place>
    static __device__ __forceinline__ void store(const Sums (&sums)[EIGHTS], int count, Place place) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (const int row = g + 8 * half, column = 8 * n + 2 * t; row < count && column < C)
                    *reinterpret_cast<float2*>(place(row) + column) =
                        make_float2(sums[n].at(2 * half), sums[n].at(2 * half + 1));
    }
};

template <class T, int ROWS, int NUMBERS>
struct Products : TensorProducts<T, ROWS, NUMBERS> {};
template <class T, int ROWS>
struct Products<T, ROWS, 0> : MultiplyAdds<T, ROWS> {};

}  // namespace mlpgpu
