// Which rows of an input a launch multiplies: those of its shard, by the order if there is one.
#pragma once

#include "common/step.cuh"

namespace mlpgpu {

// The shard's rows of an input x, or of the data set by the order.
__device__ __forceinline__ const float* first_input_row(const Rows& rows, const float* x, const int* order, int k) {
    return order ? x : x + static_cast<int64_t>(rows.first) * k;
}
__device__ __forceinline__ const int* row_indices(const Rows& rows, const int* order) {
    return order ? order + rows.order + rows.first : nullptr;
}

}  // namespace mlpgpu
