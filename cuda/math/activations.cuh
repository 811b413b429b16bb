// Activations: y = f(z) and f'(saved), where saved is y or z as mlpgpu/activations.py says. One struct for each row of
// its table, with the same name.
#pragma once

#include "math/approximate.cuh"

namespace mlpgpu {

__device__ __forceinline__ real logistic(real z) { return quotient(1.0f, 1.0f + expf(-z)); }

struct Identity {
    static __device__ __forceinline__ real forward(real z) { return z; }
    static __device__ __forceinline__ real derivative(real) { return 1.0f; }
};

struct Sigmoid {
    static __device__ __forceinline__ real forward(real z) { return logistic(z); }
    static __device__ __forceinline__ real derivative(real y) { return y * (1.0f - y); }
};

struct Tanh {
    static __device__ __forceinline__ real forward(real z) { return tanhf(z); }
    static __device__ __forceinline__ real derivative(real y) { return 1.0f - y * y; }
};

// Comparisons let NaN pass through, as NumPy's maximum and sign do.
struct Relu {
    static __device__ __forceinline__ real forward(real z) { return z <= 0.0f ? 0.0f : z; }
    static __device__ __forceinline__ real derivative(real y) { return y > 0.0f ? 1.0f : y; }  // y is never negative
};

struct LeakyRelu {
    static constexpr real slope = real(0.01);
    static __device__ __forceinline__ real forward(real z) { return z <= 0.0f ? slope * z : z; }
    static __device__ __forceinline__ real derivative(real y) { return y > 0.0f ? 1.0f : y <= 0.0f ? slope : y; }
};

// Whether all that f' asks of y is whether it is above 0, which its leading component tells, but of y below 2^-134.
template <class Activation>
constexpr bool DERIVED_BY_SIGN = false;
template <>
constexpr bool DERIVED_BY_SIGN<Relu> = true;
template <>
constexpr bool DERIVED_BY_SIGN<LeakyRelu> = true;

struct Elu {
    static __device__ __forceinline__ real forward(real z) {
        const real below = exp_minus_one(z < 0.0f ? z : 0.0f);  // of all elements, and not behind a branch of some
        return z <= 0.0f ? below : z;
    }
    static __device__ __forceinline__ real derivative(real y) { return y > 0.0f ? 1.0f : y + 1.0f; }
};

struct Softplus {
    static __device__ __forceinline__ real forward(real z) { return fmaxf(z, real(0)) + log_plus_one(expf(-fabsf(z))); }
    static __device__ __forceinline__ real derivative(real y) { return -exp_minus_one(-y); }
};

struct Gelu {
    static constexpr real ROOT_OF_HALF = real(0.70710678118654752);
    static __device__ __forceinline__ real forward(real z) { return z * (0.5f * (1.0f + erff(z * ROOT_OF_HALF))); }
    static __device__ __forceinline__ real derivative(real z) {
        const real density = real(0.39894228040143268) * expf(-0.5f * z * z);
        return 0.5f * (1.0f + erff(z * ROOT_OF_HALF)) + z * density;
    }
};

struct Silu {
    static __device__ __forceinline__ real forward(real z) { return z * logistic(z); }
    static __device__ __forceinline__ real derivative(real z) {
        const real s = logistic(z);
        return s * (1.0f + z * (1.0f - s));
    }
};

// All activations, in the order of the table, for kernels that select one by its number.
template <class... Each>
struct ActivationList {
    // Replaces each value by f of it.
    template <int COUNT>
    static __device__ __forceinline__ void forwards(int number, float (&values)[COUNT]) {
        int index = 0;
        ((number == index++ ? apply(values, [](float z) { return Each::forward(z); }) : static_cast<void>(0)), ...);
    }

    // Replaces each value by f' of it.
    template <int COUNT>
    static __device__ __forceinline__ void derivatives(int number, float (&values)[COUNT]) {
        int index = 0;
        ((number == index++ ? apply(values, [](float y) { return Each::derivative(y); }) : static_cast<void>(0)), ...);
    }

    template <int COUNT, class Function>
    static __device__ __forceinline__ void apply(float (&values)[COUNT], const Function& function) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = function(values[i]);
    }
};
using Activations = ActivationList<Identity, Sigmoid, Tanh, Relu, LeakyRelu, Elu, Softplus, Gelu, Silu>;

}  // namespace mlpgpu
