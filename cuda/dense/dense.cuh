// A dense layer: x (B, k), W (k, n), b (n,), y (B, n); a gradient is `d` and the name.  All arrays are
// row-major; B is the capacity, and a launch works on one shard of the batch's rows.  Where `order` is not
// null, x is the data set, and the order says which of its rows the batch has.
//
// Formulas: docs/mathematics.md.  The layer's products are those of gemm/simt.cuh with the epilogues below.
#pragma once

#include "math/activations.cuh"
#include "math/kept_elements.cuh"
#include "gemm/simt.cuh"
#include "dense/batch_rows.cuh"

namespace mlpgpu {

// The epilogues of gemm/simt.cuh for arrays of n columns, from the shard's first row on.
struct RowsEpilogue {
    static constexpr int OVERLAPPING = 4;
    int n;
    __device__ __forceinline__ void prefetch(int, int) const {}
    __device__ __forceinline__ int64_t offset(int row, int column) const { return static_cast<int64_t>(row) * n + column; }
};

// Stores elements of C.
struct StoreRows : RowsEpilogue {
    float* to;
    struct Loaded {};
    __device__ __forceinline__ Loaded load(int, int) const { return {}; }
    __device__ __forceinline__ float finish(float sum, Loaded) const { return sum; }
    __device__ __forceinline__ void put(int row, int column, float value) const { to[offset(row, column)] = value; }
};

// z = C + b, y = f(z); z and b may be null.
template <class Activation>
struct ForwardRows : RowsEpilogue {
    const float* b;
    float *z, *y;
    using Loaded = float;
    struct Made {
        float z, y;
    };
    __device__ __forceinline__ Loaded load(int, int column) const { return b ? b[column] : 0.0f; }
    __device__ __forceinline__ Made finish(float sum, Loaded bias) const { return {sum + bias, Activation::forward(sum + bias)}; }
    __device__ __forceinline__ void put(int row, int column, const Made& made) const {
        if (z) z[offset(row, column)] = made.z;
        y[offset(row, column)] = made.y;
    }
};

// dx = C ∘ f'(saved) · keep; `saved` may be null.
template <class Activation>
struct BackwardInputRows : RowsEpilogue {
    const float* saved;
    float* dx;
    float keep;
    using Loaded = float;
    __device__ __forceinline__ Loaded load(int row, int column) const { return saved ? saved[offset(row, column)] : 0.0f; }
    __device__ __forceinline__ float finish(float sum, Loaded of) const {
        return saved ? sum * (Activation::derivative(of) * keep) : sum;
    }
    __device__ __forceinline__ void put(int row, int column, float value) const { dx[offset(row, column)] = value; }
};

// z = C + b, and y is what a dropout leaves of f(z); z and b may be null.
template <class Activation>
struct DroppedForwardRows : RowsEpilogue {
    const float* b;
    float *z, *y;
    KeptElements kept;
    struct Loaded {
        float bias;
        uint32_t word;
    };
    struct Made {
        float z, y;
        uint32_t word;
    };
    __device__ __forceinline__ Loaded load(int row, int column) const {
        return {b ? b[column] : 0.0f, kept.word(row, column)};
    }
    __device__ __forceinline__ Made finish(float sum, const Loaded& of) const {
        return {sum + of.bias, Activation::forward(sum + of.bias), of.word};
    }
    __device__ __forceinline__ void put(int row, int column, const Made& made) const {
        if (z) z[offset(row, column)] = made.z;
        y[offset(row, column)] = kept(kept.has(made.word, column), made.y);
    }
};

// dx is what a dropout leaves of C ∘ f'(saved · restore); `saved` may be null.
template <class Activation>
struct DroppedInputRows : RowsEpilogue {
    const float* saved;
    float* dx;
    float restore;
    KeptElements kept;
    struct Loaded {
        float saved;
        uint32_t word;
    };
    struct Made {
        float dx;
        uint32_t word;
    };
    __device__ __forceinline__ Loaded load(int row, int column) const {
        return {saved ? saved[offset(row, column)] : 0.0f, kept.word(row, column)};
    }
    __device__ __forceinline__ Made finish(float sum, const Loaded& of) const {
        return {saved ? sum * Activation::derivative(of.saved * restore) : sum, of.word};
    }
    __device__ __forceinline__ void put(int row, int column, const Made& made) const {
        dx[offset(row, column)] = kept(kept.has(made.word, column), made.dx);
    }
};

// z = x W + b, y = f(z); where the kernel DROPS elements, y is what the dropout leaves of f(z), and `kept` are the bits of those
// that stay.  z is null where f' takes y.  Grid: (row tiles, column tiles).
template <class Activation, class T, bool DROPS = false>
__device__ __forceinline__ void dense_forward(const Step* step, int shard, int shards, const float* x, const int* order,
                                              const float* w, const float* b, float* z, float* y, const uint32_t* kept,
                                              float keep, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const Operand<true> a = {first_input_row(rows, x, order, k), rows.count, k, k, row_indices(rows, order)};
    const Operand<false> weights = {w, n, k, n};
    const int64_t first = static_cast<int64_t>(rows.first) * n;
    if constexpr (DROPS)
        gemm_tile(T(), a, weights, m0, n0, 0, k, NoColumnSum(),
                  DroppedForwardRows<Activation>{{n}, b, z ? z + first : z, y + first, {kept, keep, n}});
    else
        gemm_tile(T(), a, weights, m0, n0, 0, k, NoColumnSum(), ForwardRows<Activation>{{n}, b, z ? z + first : z, y + first});
}

// dx = (dz Wᵀ) ∘ f'(saved), f being the activation that made x; `saved` is null where there was none, or where the derivative
// is applied later. Where there was a dropout between f and W, and the kernel DROPS elements, dx is what the dropout leaves:
// those whose bits are `kept`, times keep = 1 / (1 - rate). If f' takes y, the array `saved` has what the dropout left of y, and
// restore = 1 - rate makes y of it. Behind a ReLU the zeros of what is left tell what was dropped: a kernel that DROPS nothing
// multiplies by keep, which is 1 without a dropout.  Grid: (row tiles, tiles of k).
template <class Activation, class T, bool DROPS = false>
__device__ __forceinline__ void dense_backward_input(const Step* step, int shard, int shards, const float* dz,
                                                     const float* w, const float* saved, float* dx, const uint32_t* kept,
                                                     float keep, float restore, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    if (m0 >= rows.count) return;
    const Operand<true> a = {dz + static_cast<int64_t>(rows.first) * n, rows.count, n, n};
    const Operand<true> weights = {w, k, n, n};
    const int64_t first = static_cast<int64_t>(rows.first) * k;
    saved = saved ? saved + first : saved;
    if constexpr (DROPS)
        gemm_tile(T(), a, weights, m0, n0, 0, n, NoColumnSum(),
                  DroppedInputRows<Activation>{{k}, saved, dx + first, restore, {kept, keep, k}});
    else
        gemm_tile(T(), a, weights, m0, n0, 0, n, NoColumnSum(), BackwardInputRows<Activation>{{k}, saved, dx + first, keep});
}

// dW = xᵀ dz (k, n) and db = Σ dz (n,) over the shard's rows, in order; db is null without a bias.
// Grid: (tiles of k, tiles of n).
template <class T>
__device__ __forceinline__ void dense_backward_weight(const Step* step, int shard, int shards, const float* x,
                                                      const int* order, const float* dz, float* dw, float* db, int k,
                                                      int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int m0 = blockIdx.x * T::M, n0 = blockIdx.y * T::N;
    const Operand<false> a = {first_input_row(rows, x, order, k), k, rows.count, k, row_indices(rows, order)};
    const Operand<false> b = {dz + static_cast<int64_t>(rows.first) * n, n, rows.count, n};
    const auto columns = column_sum(db ? n : 0, [=](int, int column, float sum) { db[column] = sum; });
    gemm_tile(T(), a, b, m0, n0, 0, rows.count, columns, StoreRows{{n}, dw});
}

}  // namespace mlpgpu
