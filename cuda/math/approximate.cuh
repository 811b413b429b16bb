// A root, a quotient, a logarithm and an exponential without a branch. The correctly rounded ones have a slow path for rare
// numbers, and log1pf and expm1f are long, so that few elements of a thread overlap.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

// By the units that approximate them, off by up to 1 and 2 units of the last place. Of a denominator from 2^126 on a
// quotient is 0.
__device__ __forceinline__ real root(real x) { return fast_sqrt(x); }
__device__ __forceinline__ real quotient(real a, real b) { return __fdividef(a, b); }

// x times a polynomial, from the coefficient of the highest power on. No loop is left for a compiler that makes vectors of
// the loop around it.
template <class... Coefficients>
__device__ __forceinline__ float times_polynomial(float x, float highest, Coefficients... others) {
    float sum = highest;
    ((sum = fmaf(sum, x, others)), ...);
    return x * sum;
}

// log(1 + x) for x in [0, 1], off by up to 2 units of the last place: x times the polynomial of degree 9 that is nearest to
// log(1 + x) / x by its largest relative error, 5e-9 (Lawson's algorithm: C. L. Lawson, "Contributions to the theory of
// linear least maximum approximation", 1961).
__device__ __forceinline__ float log_plus_one(float x) {
    return times_polynomial(x, -0.0032440233f, 0.0198514536f, -0.0569595173f, 0.106036536f, -0.153055921f, 0.196759388f,
                            -0.249541342f, 0.333299637f, -0.499999017f, 1.0f);
}

// exp(x) - 1 for x <= 0, off by up to 4 units of the last place: from -0.7 on by the polynomial of degree 5 that is found
// likewise, to 1e-8, below by the exponential, from which 1 takes no more than a bit.
__device__ __forceinline__ float exp_minus_one(float x) {
    const float below = expf(x) - 1.0f;
    const float near = times_polynomial(x, 0.00103013404f, 0.00806245673f, 0.0415693521f, 0.166650593f, 0.499999017f, 1.0f);
    return x < -0.7f ? below : near;
}

}  // namespace mlpgpu
