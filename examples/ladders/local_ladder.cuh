// One locally connected layer, y_i = f(b + Σ_r w[r, i] x_{i + r}), rung by rung: x (n + WINDOW - 1,), y (n,), one
// bias b, f the logistic function.  The weights are each output's own, and they are what the time goes to: of the
// 2 WINDOW operations for an output, WINDOW read a word that nobody reads again.
//
// Every sum is one chain of fused multiply-adds over ascending r, so all rungs with weights give the same bits.
// Grid: (outputs / 256,).
#pragma once

#include "math/activations.cuh"

namespace mlpgpu {

__device__ __forceinline__ int output_index() { return blockIdx.x * blockDim.x + threadIdx.x; }

// 1. Stencil: no weights at all.  How fast everything else is.
template <int WINDOW>
__device__ __forceinline__ void local_stencil(const float* x, float* y, float bias, int n) {
    const int i = output_index();
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < WINDOW; ++r) sum += x[i + r];
    y[i] = Sigmoid::forward(sum + bias);
}

// 2. Row-major: w (outputs, WINDOW).  The weights of an output lie together, so a warp's threads read words that are
// WINDOW apart: each read of a warp touches as many memory lines as it can.
template <int WINDOW>
__device__ __forceinline__ void local_row_major(const float* x, const float* w, float* y, float bias, int n) {
    const int i = output_index();
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < WINDOW; ++r) sum = fmaf(w[static_cast<int64_t>(i) * WINDOW + r], x[i + r], sum);
    y[i] = Sigmoid::forward(sum + bias);
}

// 3. Transposed: w (WINDOW, pitch).  Neighbouring threads read neighbouring weights.
template <int WINDOW>
__device__ __forceinline__ void local_transposed(const float* x, const float* w, float* y, float bias, int n,
                                                 int pitch) {
    const int i = output_index();
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < WINDOW; ++r) sum = fmaf(w[static_cast<int64_t>(r) * pitch + i], x[i + r], sum);
    y[i] = Sigmoid::forward(sum + bias);
}

// Brings a block's inputs to shared memory, with the WINDOW - 1 beyond its outputs that its last ones see.
template <int WINDOW>
__device__ __forceinline__ void stage_with_halo(const float* x, float* staged, int n) {
    const int outputs = blockDim.x, first = blockIdx.x * outputs, end = n + WINDOW - 1;
    for (int j = threadIdx.x; j < outputs + WINDOW - 1 && first + j < end; j += outputs) staged[j] = x[first + j];
    __syncthreads();
}

// 4. Staged: a block reads each input once, and its threads share it.
template <int WINDOW>
__device__ __forceinline__ void local_staged(const float* x, const float* w, float* y, float bias, int n, int pitch) {
    SHARED(float, staged);
    stage_with_halo<WINDOW>(x, staged, n);
    const int i = output_index();
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < WINDOW; ++r) sum = fmaf(w[static_cast<int64_t>(r) * pitch + i], staged[threadIdx.x + r], sum);
    y[i] = Sigmoid::forward(sum + bias);
}

// 5. Read-only loads: the compiler is told that nobody writes to the weights meanwhile, and reads them by the path of
// textures.
template <int WINDOW>
__device__ __forceinline__ void local_read_only(const float* x, const float* w, float* y, float bias, int n,
                                                int pitch) {
    SHARED(float, staged);
    stage_with_halo<WINDOW>(x, staged, n);
    const int i = output_index();
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < WINDOW; ++r)
        sum = fmaf(__ldg(w + static_cast<int64_t>(r) * pitch + i), staged[threadIdx.x + r], sum);
    y[i] = Sigmoid::forward(sum + bias);
}

// 6. Separate arrays: as many as the window is wide, w_r (n,), each with a pointer of its own; no index is computed
// but i.
template <class... Weights>
__device__ __forceinline__ void local_separate(const float* x, float* y, float bias, int n, Weights... weights) {
    SHARED(float, staged);
    stage_with_halo<sizeof...(Weights)>(x, staged, n);
    const int i = output_index();
    if (i >= n) return;
    float sum = 0.0f;
    const float* next = staged + threadIdx.x;
    ((sum = fmaf(weights[i], *next++, sum)), ...);
    y[i] = Sigmoid::forward(sum + bias);
}

// 7. Both: separate arrays by read-only loads.
template <class... Weights>
__device__ __forceinline__ void local_separate_read_only(const float* x, float* y, float bias, int n,
                                                         Weights... weights) {
    SHARED(float, staged);
    stage_with_halo<sizeof...(Weights)>(x, staged, n);
    const int i = output_index();
    if (i >= n) return;
    float sum = 0.0f;
    const float* next = staged + threadIdx.x;
    ((sum = fmaf(__ldg(weights + i), *next++, sum)), ...);
    y[i] = Sigmoid::forward(sum + bias);
}

}  // namespace mlpgpu
