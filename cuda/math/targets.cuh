// Targets of a row, read straight from the data set by the order's row: a class number as a float, exact up to 2^24, or
// n numbers.  Source is Texture, or const float* for sets that are larger than a texture reaches; all kernels that read
// targets take it as a template argument, and only texel() of common/portable.cuh tells the two apart.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

// The targets of a class, 0 but for one, which is 1. A number that is no class's has none.
struct OneHot {
    static constexpr bool IS_CLASS = true;
    int column;
    __device__ __forceinline__ explicit OneHot(float number) : column(static_cast<int>(number)) {
        if (static_cast<float>(column) != number) column = -1;
    }
    __device__ __forceinline__ float operator()(int j) const { return column == j ? 1.0f : 0.0f; }
    // t · value; 0 for another class even if the value is infinite.
    static __device__ __forceinline__ float times(float t, float value) { return t != 0.0f ? value : 0.0f; }
};

// Those of a row that many columns ask for are of_row(), which has read what all of them share.
template <class Source>
struct Index {
    static constexpr bool IS_CLASS = OneHot::IS_CLASS;
    Source values;
    int64_t row;
    int n;
    const float* mean;
    const float* scale;
    static __host__ __device__ constexpr int count(int) { return 1; }  // numbers of a row's target
    __device__ __forceinline__ OneHot of_row() const { return OneHot(texel(values, row)); }
    __device__ __forceinline__ float operator()(int j) const { return of_row()(j); }
    static __device__ __forceinline__ float times(float t, float value) { return OneHot::times(t, value); }
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
    __device__ __forceinline__ DenseTarget of_row() const { return *this; }
    static __device__ __forceinline__ float times(float t, float value) { return t * value; }
};

}  // namespace mlpgpu
