// Asynchronous copies of rows that need not begin at vectors.
#pragma once

#include "common/async_copy.cuh"
#include "common/vectors.cuh"
#include "arch/barriers.cuh"

namespace mlpgpu {

// Starts to copy a number, or to clear its place; then nothing is read.
__device__ __forceinline__ void copy_or_clear(float* to, const float* from, bool is_inside) {
    copy_async_or_clear<4>(shared_address(to), from, is_inside ? 4 : 0);
}

// A warp's copies of tiles of WIDTH columns: a lane takes vectors of some rows, or, where rows do not all begin at vectors,
// pairs of numbers, one by one.
template <int WIDTH>
struct TileCopies {
    static constexpr int VECTORS = WIDTH / 4, PAIRS = WIDTH / 2;               // of a row
    static constexpr int VECTOR_ROWS = WARP / VECTORS, PAIR_ROWS = WARP / PAIRS;  // that the warp copies at once
    bool vectored;
    int row, column;  // the first that the lane copies

    __device__ __forceinline__ explicit TileCopies(bool vectored)
        : vectored(vectored),
          row(threadIdx.x % WARP / (vectored ? VECTORS : PAIRS)),
          column(vectored ? threadIdx.x % VECTORS * 4 : threadIdx.x % PAIRS * 2) {}

    // Calls of_row for each row of the lane, given its number among them and how many rows it lies behind the first.
    template <int ROWS, class OfRow>
    __device__ __forceinline__ void each_row(const OfRow& of_row) const {
        if (vectored) {
#pragma unroll
            for (int i = 0; i < ROWS; i += VECTOR_ROWS)
                if (ROWS % VECTOR_ROWS == 0 || row + i < ROWS) of_row(i / VECTOR_ROWS, i);
        } else {
#pragma unroll
            for (int i = 0; i < ROWS; i += PAIR_ROWS) of_row(i / PAIR_ROWS, i);
        }
    }

    // Copies what the lane takes of a row, of which `left` columns are left from its own on.
    __device__ __forceinline__ void copy(float* to, const float* from, int left) const {
        if (vectored) {
            copy_async_or_clear<16>(shared_address(to), from, left > 0 ? 16 : 0);
        } else {
            copy_or_clear(to, from, left > 0);
            copy_or_clear(to + 1, from + 1, left > 1);
        }
    }
};

// How many numbers lie before a row's first column in the vector that holds it, of rows (·, n). It repeats every four rows. Rows
// that are copied by vectors wherever they begin lie so far behind their places in shared memory.
__device__ __forceinline__ int lead_of(const float* rows, int row, int n) {
    return (reinterpret_cast<uintptr_t>(rows) / 4 + static_cast<unsigned>(row) % 4 * n) % 4;
}

// Starts to copy a vector that reaches into a row, of which `left` numbers are left from it on; what lies behind becomes 0.
// What there is of a part of a vector, which may be an array's last one, the thread loads number by number.
__device__ __forceinline__ void copy_vector(float* to, const float* from, int left) {
    if (left >= 4) {
        copy_async<16>(to, from);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = i < left ? load_alone(from + i) : 0.0f;
}

// Starts to copy the vector that has this number, of a row of which `left` are left from it on, or fewer than -3 of none; what
// lies behind becomes 0, and is not read.
__device__ __forceinline__ void copy_vector_or_clear(float* to, const float* number, int left) {
    const int lead = lead_of(number, 0, 0);
    copy_async_or_clear<16>(shared_address(to), number - lead, 4 * largest(0, smallest(left + lead, 4)));
}

// The same of the vector that has this number, of a row of which `left` are left from it on. Of IS_WHOLE it is known that
// the row has all of the vector, which takes a fifth of the instructions.
template <bool IS_WHOLE>
__device__ __forceinline__ void copy_vector_of(float* to, const float* number, int left) {
    const float* const from = reinterpret_cast<const float*>(reinterpret_cast<uintptr_t>(number) / 16 * 16);
    if (IS_WHOLE)
        copy_async<16>(to, from);
    else
        copy_vector(to, from, left + lead_of(number, 0, 0));
}

}  // namespace mlpgpu
