// The last dense layer's product on tensor cores and a loss of its logits in one kernel, which stores no logits: for
// losses that are sums or means over outputs (math/losses.cuh), with dense targets that are not standardized, of 8 · i
// columns.
//
// Targets are read by plain loads: a warp reads eight columns of eight rows at once; by texture the whole kernel took a
// third longer (docs/experiments/losses-and-heads.md).
#pragma once

#include "common/dependent_launch.cuh"
#include "common/batch_total.cuh"
#include "math/losses.cuh"
#include "math/teams.cuh"
#include "dense/tensor_dense.cuh"

namespace mlpgpu {

// An epilogue that makes deltas of logits, as a component of bfloat16, and adds up the values that a thread sees.
template <class Loss>
struct LossEpilogue {
    const float* b;        // (n,)
    const int* order;      // of the shard's rows in the data set
    const float* targets;  // (data rows, n)
    const float* weights;  // (data rows,), or null
    uint16_t* deltas;
    int rows, n;
    double& value;   // this thread's part of the loss
    double& weight;  // of the rows' weights, which the thread of their first column adds up

    struct Row {
        const float* targets;
        float weight, sum;
        bool is_inside;
    };

    // Rows beyond the shard are replaced by its last row, and add nothing.
    __device__ __forceinline__ Row row(int row, int column) const {
        const int from = rows > 0 ? order[min(row, rows - 1)] : 0;
        const Row found = {targets + static_cast<int64_t>(from) * n, weights ? weights[from] : 1.0f, 0.0f, row < rows};
        if (column == 0 && found.is_inside) weight += found.weight;
        return found;
    }

    __device__ __forceinline__ void finish_row(const Row& row) const {
        if (row.is_inside) value += static_cast<double>(row.sum) * (Loss::term_weight(n) * row.weight);
    }

    __device__ __forceinline__ float delta(Row& row, float z, float t) const {
        float found;
        row.sum += Loss::term(z, t, found);
        return found * Loss::term_weight(n) * row.weight;
    }

    // Quads.
    __device__ __forceinline__ bool is_aligned() const { return is_vectored_or_null(b, n); }

    struct Read {
        float4 b, t;
        Row row;
    };
    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ Read read(int tile_row, int column) const {
        const Row found = row(tile_row, column);
        return {b ? load_row<ALIGNED>(b, n, column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f),
                *reinterpret_cast<const float4*>(found.targets + column), found};
    }
    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ void write(int tile_row, int column, const float4& sum, Read read) const {
        const float4 made = make_float4(
            delta(read.row, sum.x + read.b.x, read.t.x), delta(read.row, sum.y + read.b.y, read.t.y),
            delta(read.row, sum.z + read.b.z, read.t.z), delta(read.row, sum.w + read.b.w, read.t.w));
        finish_row(read.row);
        store_padded<Bfloat16, ALIGNED>(deltas, 0, tile_row, rows, column, n, made);
    }
    __device__ __forceinline__ void columns(int, int, int, int) const {}
    __device__ __forceinline__ float* column_partials() const { return nullptr; }

    // Pairs.
    static constexpr bool WRITES_COMPONENTS = true, READS_COMPONENTS = false, HAS_ROW_OPERAND = true, MAY_DROP = false;
    static constexpr int SAVED_COMPONENTS = 1;
    __device__ __forceinline__ bool is_components_alone() const { return true; }
    __device__ __forceinline__ const uint16_t* saved() const { return nullptr; }
    __device__ __forceinline__ uint16_t* components() const { return deltas; }
    __device__ __forceinline__ int64_t component_stride() const { return 0; }  // there is one
    __device__ __forceinline__ int filled() const { return rows; }
    template <int COUNT>
    __device__ __forceinline__ void column_operands(int column, float2 (&operands)[COUNT]) const {
        load_column_pairs(b, n, column, operands);
    }
    __device__ __forceinline__ float2 load_row_operand(const Row& row, int column) const {
        return *reinterpret_cast<const float2*>(row.targets + column);
    }
    __device__ __forceinline__ float2 pair(const float2& sum, const float2& bias, Row& row, const float2& t) const {
        return make_float2(delta(row, sum.x + bias.x, t.x), delta(row, sum.y + bias.y, t.y));
    }
};

// Stores the deltas of x W + b, each row's times its weight, as a component of bfloat16; and sums of values and
// weights, totals and losses as the kernel of elementwise/loss.cuh does. Other arrays are those of tensor_forward.
template <class Product, class Loss>
__device__ __forceinline__ void tensor_forward_loss(const Step* step, int shard, int shards,
                                                    typename Product::Source x_components, int64_t x_stride,
                                                    typename Product::Source w_components, const float* b,
                                                    const int* order, const float* targets, const float* weights,
                                                    double* sums, unsigned* arrived, double* totals, double* losses,
                                                    uint16_t* delta_components, int k, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int pitch_k = padded_columns(k), pitch_n = padded_columns(n);
    double value = 0.0, weight = 0.0;
    const LossEpilogue<Loss> end = {b, order + rows.order + rows.first, targets, weights, delta_components,
                                    rows.count, n, value, weight};
    Product::template multiply<true, false>(x_components, x_stride, pitch_k, w_components, padded_rows(k) * pitch_n,
                                            pitch_n, filled_rows(rows.count), n, k, PREFETCH_A | PREFETCH_B | PREFETCH_EPILOGUE,
                                            epilogue_of(Unscaled(), end));
    __syncthreads();  // since the sums take the product's shared memory
    add_threads_up(step, value, weight, sums, arrived, totals, losses);
}

}  // namespace mlpgpu
