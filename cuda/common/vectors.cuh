// Four neighbouring numbers at once: by one instruction where their address is a multiple of their size.
#pragma once

#include "common/portable.cuh"


namespace mlpgpu {

__device__ __forceinline__ void unpack(const float4& four, float* to) {
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

__device__ __forceinline__ void load_four(const float* from, float* to) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    unpack(four, to);
}

__device__ __forceinline__ void load_four(const unsigned char* from, unsigned char* to) {
    const uchar4 four = *reinterpret_cast<const uchar4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// A number past the first-level cache, by an instruction of its own: the compiler loads a whole vector for some neighbours.
__device__ __forceinline__ float load_alone(const float* from) {
#if defined(MLPGPU_HOST)
    return *from;
#else
    float number;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(number) : "l"(from) : "memory");
    return number;
#endif
}

// 2, or a multiple of 4, neighbours of shared memory.
template <int COUNT>
__device__ __forceinline__ void load_neighbours(const float* from, float (&to)[COUNT]) {
#pragma unroll
    for (int i = 0; i + 4 <= COUNT; i += 4) load_four(from + i, to + i);
    if (COUNT == 2) {
        const float2 two = *reinterpret_cast<const float2*>(from);
        to[0] = two.x, to[1] = two.y;
    }
}

// By one instruction for certain: the compiler makes four of some stores of a float4.
__device__ __forceinline__ void store_vector(float* to, const float (&from)[4]) {
#if defined(MLPGPU_HOST)
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
#else
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3])
                 : "memory");
#endif
}

__device__ __forceinline__ void store_four(float* to, const float* from) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

template <int COUNT>
__device__ __forceinline__ void store_neighbours(float* to, const float (&from)[COUNT]) {
#pragma unroll
    for (int i = 0; i + 4 <= COUNT; i += 4) store_four(to + i, from + i);
    if (COUNT == 2) *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
}

// Whether rows that lie `pitch` elements apart all begin at vectors.
__device__ __forceinline__ bool is_vectored(const float* data, int pitch) {
    return (reinterpret_cast<uintptr_t>(data) % 16 == 0) && pitch % 4 == 0;
}

__device__ __forceinline__ bool is_vectored_or_null(const float* data, int pitch) {
    // Written out, since the compiler makes other code of a call.
    return data == nullptr || (reinterpret_cast<uintptr_t>(data) % 16 == 0 && pitch % 4 == 0);
}

// Columns `column` to `column` + 3 of a row of n, read past the first-level cache where they are a vector; 0 beyond n.
__device__ __forceinline__ float4 load_row(const float* row, int n, int column, bool vectored) {
    if (vectored && column + 4 <= n) return __ldcg(reinterpret_cast<const float4*>(row + column));
    float4 four;
    four.x = column < n ? row[column] : 0.0f;
    four.y = column + 1 < n ? row[column + 1] : 0.0f;
    four.z = column + 2 < n ? row[column + 2] : 0.0f;
    four.w = column + 3 < n ? row[column + 3] : 0.0f;
    return four;
}

__device__ __forceinline__ void store_row(float* row, int n, int column, const float4& four, bool vectored) {
    if (vectored && column + 4 <= n) {
        *reinterpret_cast<float4*>(row + column) = four;
        return;
    }
    if (column < n) row[column] = four.x;
    if (column + 1 < n) row[column + 1] = four.y;
    if (column + 2 < n) row[column + 2] = four.z;
    if (column + 3 < n) row[column + 3] = four.w;
}

// The same for a `column` inside the row, where it is known at compile time whether all four are a vector inside it. If
// they are not, they may be APART columns apart, and begin behind the row.
template <bool ALIGNED, int APART = 1>
__device__ __forceinline__ float4 load_row(const float* row, int n, int column) {
    static_assert(!ALIGNED || APART == 1);
    if (ALIGNED) return __ldcg(reinterpret_cast<const float4*>(row + column));
    float4 four;
    four.x = column < n ? row[column] : 0.0f;
    four.y = column + APART < n ? row[column + APART] : 0.0f;
    four.z = column + 2 * APART < n ? row[column + 2 * APART] : 0.0f;
    four.w = column + 3 * APART < n ? row[column + 3 * APART] : 0.0f;
    return four;
}

template <bool ALIGNED, int APART = 1>
__device__ __forceinline__ void store_row(float* row, int n, int column, const float4& four) {
    static_assert(!ALIGNED || APART == 1);
    if (ALIGNED) {
        *reinterpret_cast<float4*>(row + column) = four;
        return;
    }
    if (APART == 1 || column < n) row[column] = four.x;
    if (column + APART < n) row[column + APART] = four.y;
    if (column + 2 * APART < n) row[column + 2 * APART] = four.z;
    if (column + 3 * APART < n) row[column + 3 * APART] = four.w;
}

}  // namespace mlpgpu
