// Arithmetic of sizes, at compile time and at run time.
#pragma once

namespace mlpgpu {

template <class A, class B>
__host__ __device__ constexpr auto ceil_div(A a, B b) {
    return (a + b - 1) / b;
}

template <class A, class B>
__host__ __device__ constexpr auto round_up(A a, B b) {
    return ceil_div(a, b) * b;
}

__host__ __device__ constexpr int largest(int a) { return a; }
template <class... More>
__host__ __device__ constexpr int largest(int a, int b, More... more) {
    return largest(a < b ? b : a, more...);
}

__host__ __device__ constexpr int smallest(int a, int b) { return a < b ? a : b; }

// The smallest power of two from n on.
__host__ __device__ constexpr int power_from(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

}  // namespace mlpgpu
