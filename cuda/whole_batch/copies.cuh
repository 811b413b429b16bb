// Asynchronous copies of neighbours that may end at a border, and need not lie as a vector does.
#pragma once

#include "common/async_copy.cuh"
#include "common/vectors.cuh"
#include "arch/barriers.cuh"

namespace mlpgpu {

// Starts to copy an element, or to clear its place; `none` is any address.
__device__ __forceinline__ void copy_or_clear(float* to, const float* from, bool is_inside, const float* none) {
    copy_async_or_clear<4>(shared_address(to), is_inside ? from : none, is_inside ? 4 : 0);
}

// Starts to copy four neighbours of a row from `column` on, of which those from `length` on become 0.
__device__ __forceinline__ void copy_quad(float* to, const float* row, int column, int length, bool vectored, const float* none) {
    if (vectored) {
        const bool is_inside = column < length;
        copy_async_or_clear<16>(shared_address(to), is_inside ? row + column : none, is_inside ? 16 : 0);
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) copy_or_clear(to + e, row + column + e, column + e < length, none);
}

}  // namespace mlpgpu
