// The products of a dense layer on tensor cores: x (B, k), W (k, n), y (B, n), in planes beside the float32
// arrays, as dense/dense.cuh has them on plain cores.
//
// A Product is how C = A · B is made of planes: gemm/gemm_sm80.cuh's, or gemm/gemm_sm90.cuh's.
//     Form    of gemm/operands.cuh
//     Source  what it is given of an operand: the planes, or the copy engine's map of them
//     multiply<A_INNER, B_INNER>(a, a_plane, a_pitch, b, b_plane, b_pitch, m, n, k, early, epilogue)
//             INNER tells whether the operand's rows run along k, what is summed over; `plane` and `pitch` are
//             elements from one plane and one row to the next
// Where an array is null it is not wanted.  Lines and columns are those of gemm/operands.cuh.
#pragma once

#include "gemm/epilogue.cuh"
#include "common/dependent_launch.cuh"

namespace mlpgpu {

// z = x W + b, y = f(z).  Planes of y are written where they need no scale.
template <class Product, class Activation>
__device__ __forceinline__ void tensor_forward(const Step* step, int shard, int shards,
                                               typename Product::Source x_planes, int64_t x_plane,
                                               typename Product::Source w_planes, const int* x_lines,
                                               const int* w_columns, const float* x, const float* w, const float* b,
                                               float* z, float* y, uint16_t* y_planes, int64_t y_plane, int early,
                                               int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = rows.first;
    const int pitch_k = padded_columns(k), pitch_n = padded_columns(n);
    const Forward<typename Product::Form, Activation> end = {
        b, z ? z + first * n : z, y ? y + first * n : y, y_planes, y_plane, rows.count, n};
    const auto multiply = [&](int written, const auto& epilogue) {
        Product::template multiply<true, false>(x_planes, x_plane, pitch_k, w_planes, padded_rows(k) * pitch_n, pitch_n,
                                                written, n, k, early, epilogue);
    };
    if constexpr (Product::Form::SCALED)
        multiply(rows.count,
                 epilogue_of(Scaled(x_lines, nullptr, w_columns, {x + first * k, k, 1}, {w, 1, n}, k), end));
    else
        multiply(y_planes ? padded_rows(rows.count) : rows.count, epilogue_of(AsIs(), end));
}

// dx = (dz Wᵀ) ∘ f'(saved), f being the activation that made x; planes of dx, and of what is saved, as of y above.
template <class Product, class Activation>
__device__ __forceinline__ void tensor_backward_input(const Step* step, int shard, int shards,
                                                      typename Product::Source dz_planes, int64_t dz_plane,
                                                      typename Product::Source w_planes, const int* dz_lines,
                                                      const int* w_lines, const float* dz, const float* w,
                                                      const float* saved, const uint16_t* saved_planes, float* dx,
                                                      uint16_t* dx_planes, int64_t dx_plane, int early, int k,
                                                      int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = rows.first;
    const int pitch = padded_columns(n);
    const BackwardInput<typename Product::Form, Activation> end = {
        saved ? saved + first * k : saved, saved_planes, dx ? dx + first * k : dx, dx_planes, dx_plane, rows.count, k};
    const auto multiply = [&](int written, const auto& epilogue) {
        Product::template multiply<true, true>(dz_planes, dz_plane, pitch, w_planes, padded_rows(k) * pitch, pitch,
                                               written, k, n, early, epilogue);
    };
    if constexpr (Product::Form::SCALED)
        multiply(rows.count,
                 epilogue_of(Scaled(dz_lines, nullptr, w_lines, {dz + first * n, n, 1}, {w, n, 1}, n), end));
    else
        multiply(dx_planes ? padded_rows(rows.count) : rows.count, epilogue_of(AsIs(), end));
}

// dW = xᵀ dz (k, n), for `end` to make of it what it wants.
template <class Product, class Write>
__device__ __forceinline__ void multiply_backward_weight(const Step* step, int shard, int shards,
                                                         typename Product::Source x_planes, int64_t x_plane,
                                                         typename Product::Source dz_planes, int64_t dz_plane,
                                                         const int* x_columns, const int* w_lines,
                                                         const int* dz_columns, const float* x, const float* dz,
                                                         int early, int k, int n, const Write& end) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = rows.first;
    const auto multiply = [&](const auto& epilogue) {
        Product::template multiply<false, false>(x_planes, x_plane, padded_columns(k), dz_planes, dz_plane,
                                                 padded_columns(n), k, n, rows.count, early, epilogue);
    };
    if constexpr (Product::Form::SCALED)
        multiply(epilogue_of(
            Scaled(x_columns, w_lines, dz_columns, {x + first * k, 1, k}, {dz + first * n, 1, n}, rows.count), end));
    else
        multiply(epilogue_of(AsIs(), end));
}

template <class Product>
__device__ __forceinline__ void tensor_backward_weight(const Step* step, int shard, int shards,
                                                       typename Product::Source x_planes, int64_t x_plane,
                                                       typename Product::Source dz_planes, int64_t dz_plane,
                                                       const int* x_columns, const int* w_lines, const int* dz_columns,
                                                       const float* x, const float* dz, float* dw, int early,
                                                       int k, int n) {
    multiply_backward_weight<Product>(step, shard, shards, x_planes, x_plane, dz_planes, dz_plane, x_columns, w_lines,
                                      dz_columns, x, dz, early, k, n, Store{{}, dw, n});
}

}  // namespace mlpgpu
