// Targets of a row, read straight from the data set by the order's row: a class number as a float, exact up to 2^24, or
// n numbers.  Source is Texture, or const float* for sets that are larger than a texture reaches; all kernels that read
// targets take it as a template argument, and only texel() of common/portable.cuh tells the two apart.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

template <class Source>
struct Index {
    static constexpr bool IS_CLASS = true;  // targets are 0 but for one, which is 1
    Source values;
    int64_t row;
    int n;
    const float* mean;
    const float* scale;
    static __host__ __device__ constexpr int count(int) { return 1; }  // numbers of a row's target
    __device__ __forceinline__ float operator()(int j) const {
        return texel(values, row) == static_cast<float>(j) ? 1.0f : 0.0f;
    }
    // t · value; 0 for another class even if the value is infinite.
    static __device__ __forceinline__ float times(float t, float value) { return t != 0.0f ? value : 0.0f; }
};

template <class Source>
struct DenseTarget {
    static constexpr bool IS_CLASS = false;
    Source values;
    int64_t row;
    int n;
    const float* mean;  // of standardized targets, or null
    const float* scale;
    static __host__ __device__ constexpr int count(int n) { return n; }
    __device__ __forceinline__ float operator()(int j) const {
        const float t = texel(values, row * n + j);
        return scale ? (t - mean[j]) / scale[j] : t;
    }
    static __device__ __forceinline__ float times(float t, float value) { return t * value; }
};

}  // namespace mlpgpu
