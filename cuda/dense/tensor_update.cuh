// The gradient of a dense layer on tensor cores and the optimizer's step in one kernel, like dense/update.cuh; or that step
// alone, behind a product that has stored the gradient.
#pragma once

#include "common/dependent_launch.cuh"
#include "math/optimizers.cuh"
#include "dense/tensor_dense.cuh"

namespace mlpgpu {

// A quad of the other shard's dW, if there is one: without it nothing is held, by whose size products plan their registers.
template <bool RECEIVES>
struct ReceivedQuad {
    float4 received;
};
template <>
struct ReceivedQuad<false> {};

// An epilogue: updates parameters along quads of dW, and biases along db.  If it RECEIVES, dW is that of one of two shards
// of the batch, and the other one's lies in memory.
template <class Format, class Rule, bool RECEIVES>
struct UpdateEpilogue : NoComponents {
    static constexpr int SLOTS = Rule::SLOTS;
    float* weight;  // (k, n)
    float* bias;    // (n,), or null
    uint16_t* components;  // of the weights as bfloat16, for the next step; or null
    int64_t component_stride;
    float* weight_slots;
    float* bias_slots;
    int64_t pitch;  // elements from one slot to the next
    const float* db;
    float* db_partials;  // (row tiles, n padded), if db is not known yet: another launch adds them up and updates the bias
    int n;
    const Step* of_step;
    const double* totals;
    const float* received;  // (k, n)
    float scale = 0.0f;
    float rates[RATES_PER_STEP] = {};  // this step's

    __device__ __forceinline__ void begin() {
        scale = static_cast<float>(inverse_weight(totals));
        const float* const row = schedule + of_step->run * RATES_PER_STEP;
#pragma unroll
        for (int i = 0; i < RATES_PER_STEP; ++i) rates[i] = row[i];
    }

    struct Read : ReceivedQuad<RECEIVES> {
        float4 w;
        float4 slot[SLOTS > 0 ? SLOTS : 1];
    };

    __device__ __forceinline__ bool is_aligned() const {
        bool all = is_vectored_or_null(weight, n) && (!RECEIVES || is_vectored_or_null(received, n));
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) all = all && is_vectored_or_null(weight_slots + s * pitch, n);
        return all;
    }

    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ Read read(int row, int column) const {
        const int64_t offset = static_cast<int64_t>(row) * n;
        Read found = {};
        found.w = load_row<ALIGNED, APART>(weight + offset, n, column);
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) found.slot[s] = load_row<ALIGNED, APART>(weight_slots + s * pitch + offset, n, column);
        if constexpr (RECEIVES) found.received = load_row<ALIGNED, APART>(received + offset, n, column);
        return found;
    }

    template <bool ALIGNED, int APART = 1>
    __device__ __forceinline__ void write(int row, int column, float4 sum, Read found) const {
        const int64_t offset = static_cast<int64_t>(row) * n;
        if constexpr (RECEIVES) sum = added(sum, found.received);
        step(found, sum);
        store_row<ALIGNED, APART>(weight + offset, n, column, found.w);
        if (!Format::SCALED && components)
            store_quad<Format, ALIGNED, APART>(components + static_cast<int64_t>(row) * padded_columns(n), component_stride, column, n,
                                               found.w, n);
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) store_row<ALIGNED, APART>(weight_slots + s * pitch + offset, n, column, found.slot[s]);
    }

    __device__ __forceinline__ InPlace<BiasRule<Rule>> of_bias() const { return {bias, bias_slots, pitch, n, scale, rates}; }
    __device__ __forceinline__ void columns(int first, int count, int thread, int threads) const {
        for (int j = first + thread; bias && j < min(n, first + count); j += threads) of_bias()(0, j, db[j]);
    }

    __device__ __forceinline__ float* column_partials() const { return db_partials; }

    static __device__ __forceinline__ float4 added(const float4& a, const float4& b) {
        return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }

    __device__ __forceinline__ void step(Read& read, const float4& sum) const {
        step_one(read.w.x, sum.x, read, [](float4& quad) -> float& { return quad.x; });
        step_one(read.w.y, sum.y, read, [](float4& quad) -> float& { return quad.y; });
        step_one(read.w.z, sum.z, read, [](float4& quad) -> float& { return quad.z; });
        step_one(read.w.w, sum.w, read, [](float4& quad) -> float& { return quad.w; });
    }

    template <class Element>
    __device__ __forceinline__ void step_one(float& w, float sum, Read& read, const Element& element) const {
        float slot[SLOTS > 0 ? SLOTS : 1];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) slot[s] = element(read.slot[s]);
        step_parameter<Rule>(w, slot, sum, scale, rates, penalty_slope(w));
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) element(read.slot[s]) = slot[s];
    }
};

// Updates the weights (k, n) and their slots along dW = xᵀ dz, and the bias along db (n,); slot s begins s · size elements
// after the first. If db is not known yet, its partials are stored, and `bias` is null. Components of W are stored if the
// format has no scales; else they are null. `received` (k, n) is added to dW if it RECEIVES. Other arrays are those of
// tensor_backward_weight.
template <class Product, class Rule, bool RECEIVES = false>
__device__ __forceinline__ void tensor_backward_update(const Step* step, int shard, int shards,
                                                       typename Product::Source x_components, int64_t x_stride,
                                                       typename Product::Source dz_components, int64_t dz_stride,
                                                       const int* x_column_scales, const int* w_row_scales, const int* dz_column_scales,
                                                       const float* x, const float* dz, const float* db,
                                                       float* db_partials, const double* totals, float* weight,
                                                       float* bias, uint16_t* w_components, float* weight_slots,
                                                       float* bias_slots, int64_t size, int prefetch, int k, int n,
                                                       const float* received = nullptr) {
    UpdateEpilogue<typename Product::Format, Rule, RECEIVES> end = {
        {}, weight, bias, w_components, padded_rows(k) * padded_columns(n), weight_slots, bias_slots, size, db, db_partials, n,
        step, totals, received};
    if constexpr (!Product::BEGINS_EPILOGUE) {
        if (!(prefetch & PREFETCH_EPILOGUE)) pdl_wait();
        end.begin();
    }
    multiply_backward_weight<Product>(step, shard, shards, x_components, x_stride, dz_components, dz_stride, x_column_scales, w_row_scales,
                                      dz_column_scales, x, dz, prefetch, k, n, end);
}

template <bool ALIGNED, class End>
__device__ __forceinline__ void move_quads(const End& end, const float* gradient, int k, int n) {
    const int quads = ceil_div(n, 4);
    const int64_t count = static_cast<int64_t>(k) * quads, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count; i += stride) {
        const int row = static_cast<int>(i / quads), column = 4 * static_cast<int>(i % quads);
        const float4 sum = load_row<ALIGNED>(gradient + static_cast<int64_t>(row) * n, n, column);
        end.template write<ALIGNED>(row, column, sum, end.template read<ALIGNED>(row, column));
    }
}

// Updates a weight (k, n) along the sum of its gradient and the one received, and writes its components, as
// tensor_backward_update does.
template <class Format, class Rule>
__device__ __forceinline__ void move_weight(const Step* step, const double* totals, const float* gradient, const float* received,
                                            float* weight, uint16_t* w_components, float* weight_slots, int64_t size, int k, int n) {
    UpdateEpilogue<Format, Rule, true> end = {{}, weight, nullptr, w_components, padded_rows(k) * padded_columns(n), weight_slots,
                                              nullptr, size, nullptr, nullptr, n, step, totals, received};
    end.begin();
    if (end.is_aligned() && is_vectored(gradient, n)) move_quads<true>(end, gradient, k, n);
    else move_quads<false>(end, gradient, k, n);
}

}  // namespace mlpgpu
