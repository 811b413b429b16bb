// What cuda/math/ needs of CUDA where a processor runs it: its words, and functions that the compiler can call for a whole
// vector of numbers at once.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <type_traits>
#include <utility>

#define MLPGPU_HOST
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __constant__ thread_local  // each thread sets the numbers of the plan that it runs

// glibc has these functions for vectors too (libmvec), and uses them for numbers one by one beside a loop's vectors.
#define VECTOR __attribute__((simd("notinbranch"), const, nothrow))
extern "C" {
VECTOR float expf(float);
VECTOR float logf(float);
VECTOR float log1pf(float);
VECTOR float expm1f(float);
VECTOR float tanhf(float);
VECTOR float erff(float);
VECTOR double exp(double);
VECTOR double log(double);
VECTOR double log1p(double);
VECTOR double expm1(double);
VECTOR double tanh(double);
VECTOR double erf(double);
}
#undef VECTOR

namespace mlpgpu {

// As CUDA has it: of a number and NaN the number.  A comparison can be part of a vector loop, a call cannot.
__forceinline__ float fmaxf(float a, float b) { return a >= b || b != b ? a : b; }
__forceinline__ float fabsf(float a) { return __builtin_fabsf(a); }
__forceinline__ float sqrtf(float a) { return __builtin_sqrtf(a); }

// What a card approximates is rounded correctly here, by one instruction each.
__forceinline__ float fast_sqrt(float a) { return __builtin_sqrtf(a); }
__forceinline__ float __fdividef(float a, float b) { return a / b; }

// The same functions of float64, by the names that cuda/math/ calls them by.
using ::expf, ::logf, ::tanhf, ::erff;
__forceinline__ double expf(double a) { return exp(a); }
__forceinline__ double logf(double a) { return log(a); }
__forceinline__ double tanhf(double a) { return tanh(a); }
__forceinline__ double erff(double a) { return erf(a); }
__forceinline__ double fmaxf(double a, double b) { return a >= b || b != b ? a : b; }
__forceinline__ double fabsf(double a) { return __builtin_fabs(a); }
__forceinline__ double fast_sqrt(double a) { return __builtin_sqrt(a); }
__forceinline__ double __fdividef(double a, double b) { return a / b; }
__forceinline__ double log_plus_one(double a) { return log1p(a); }
__forceinline__ double exp_minus_one(double a) { return expm1(a); }

}  // namespace mlpgpu

inline uint64_t multiply_wide(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b; }

// Threads of a warp or block: named in functions of those headers that no loop here calls, and nowhere defined.
struct ThreadNumber {
    int x;
};
extern const ThreadNumber threadIdx, blockIdx, blockDim, gridDim;
void __syncthreads();
float __ldcg(const float*);
void prefetch_to_l2(const void*);
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes);
