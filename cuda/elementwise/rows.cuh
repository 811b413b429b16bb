// Kernels that go through the rows of a shard element by element: zero, gather, standardize, dropout and
// the derivative of an activation.  Grid: any, of one dimension.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/step.cuh"
#include "common/vectors.cuh"
#include "gemm/operand_formats.cuh"
#include "math/activations.cuh"
#include "math/dropout.cuh"
#include "math/kept_elements.cuh"

namespace mlpgpu {

__device__ __forceinline__ int64_t first_element() {
    return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
}

__device__ __forceinline__ int64_t element_stride() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// x = 0, before atomics add to it.
__device__ __forceinline__ void zero(const Step* step, int shard, int shards, float* x, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    for (int64_t i = first_element(); i < size; i += element_stride()) x[first + i] = 0.0f;
}

// x[row, :] = scale · data[order[row], :].  Source is float, or unsigned char with its scale.
template <class Source>
__device__ __forceinline__ void gather(const Step* step, int shard, int shards, const int* order, const Source* data,
                                       float scale, float* x, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t size = static_cast<int64_t>(rows.count) * n;
    const bool is_short = size <= 0x7fffffff;  // a division of 64 bits takes a hundred instructions
    for (int64_t i = first_element(); i < size; i += element_stride()) {
        const int64_t row = is_short ? static_cast<unsigned>(i) / static_cast<unsigned>(n) : i / n;
        const int64_t column = i - row * n, from = order[rows.order + rows.first + row];
        x[(rows.first + row) * n + column] = scale * static_cast<float>(data[from * n + column]);
    }
}

// *found = 1 if an element of data is not finite.
__device__ __forceinline__ void find_nonfinite_rows(const Step* step, int shard, int shards, const float* data,
                                                    unsigned* found, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    bool is_finite = true;
#pragma unroll 4
    for (int64_t i = first_element(); i < size; i += element_stride())
        is_finite = is_finite && fabsf(data[first + i]) < INFINITY;
    if (!is_finite) *found = 1;
}

// y = (x - mean) / scale, column by column.
__device__ __forceinline__ void standardize(const Step* step, int shard, int shards, const float* x, const float* mean,
                                            const float* scale, float* y, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    for (int64_t i = first_element(); i < size; i += element_stride())
        y[first + i] = (x[first + i] - mean[i % n]) / scale[i % n];
}

// What a dropout reads and writes, of the elements from `first` to `end` of a batch; arrays as of `dropout` below.
template <class Activation>
struct DroppedRows {
    static constexpr int OF_WARP = WARP * DROPOUT_BLOCK;  // elements, whose half words a warp draws at once

    const float *x, *saved;
    float* y;
    uint16_t* components;
    int64_t component_stride;
    int component_count, n;
    int64_t first, end;
    float keep;

    // Whether four neighbours are a vector in each array. Among components a vector belongs to one row.
    __device__ __forceinline__ bool has_vectors() const {
        return is_vectored(x, 4) && is_vectored_or_null(saved, 4) && is_vectored_or_null(y, 4) && (!components || n % 4 == 0);
    }

    // The warp's elements from `place` on. Each lane has drawn for a block of them, which ones are `kept`; it finishes others:
    // WIDTH neighbours, and those that lie as many lanes on, so that a warp reads and writes what lies side by side. Only
    // single ones may lie outside the shard.
    template <int WIDTH>
    __device__ __forceinline__ void drop(int64_t place, unsigned kept) const {
        constexpr int COUNT = DROPOUT_BLOCK / WIDTH;
        const auto place_of = [=](int i) { return place + (i * WARP + threadIdx.x % WARP) * WIDTH; };
        const auto inside = [&](int i) { return WIDTH > 1 || (place_of(i) >= first && place_of(i) < end); };
        const auto load = [&](const float* from, float (&to)[COUNT][WIDTH]) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if constexpr (WIDTH == 4) load_four(from + place_of(i), to[i]);
                else to[i][0] = inside(i) ? from[place_of(i)] : 0.0f;
            }
        };
        float of[COUNT][WIDTH], slopes[COUNT][WIDTH];
        load(x, of);
        if (saved) load(saved, slopes);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int in_warp = static_cast<int>(place_of(i) - place);
            const unsigned bits = __shfl_sync(WARP_ALL, kept, in_warp / DROPOUT_BLOCK) >> in_warp % DROPOUT_BLOCK;
#pragma unroll
            for (int q = 0; q < WIDTH; ++q) {
                of[i][q] *= bits >> q & 1 ? keep : 0.0f;
                if (saved) of[i][q] *= Activation::derivative(slopes[i][q]);
            }
            if (!inside(i)) continue;
            if (components) put_components(place_of(i), of[i]);
            if (!y) continue;
            if constexpr (WIDTH == 4) store_four(y + place_of(i), of[i]);
            else y[place_of(i)] = of[i][0];
        }
    }

    // A division of 64 bits takes a hundred instructions.
    __device__ __forceinline__ int64_t row_of(int64_t in_shard) const {
        return end - first <= 0x7fffffff ? static_cast<unsigned>(in_shard) / static_cast<unsigned>(n) : in_shard / n;
    }

    template <int WIDTH>
    __device__ __forceinline__ void put_components(int64_t place, const float (&of)[WIDTH]) const {
        float2 pairs[(WIDTH + 1) / 2];
#pragma unroll
        for (int q = 0; q < WIDTH; q += 2) pairs[q / 2] = make_float2(of[q], q + 1 < WIDTH ? of[q + 1] : 0.0f);
        unsigned split[MOST_COMPONENTS][(WIDTH + 1) / 2];
        split_to_bfloats(pairs, component_count, split);
        const int64_t row = row_of(place - first);
        uint16_t* const to = components + row * padded_columns(n) + (place - first - row * n);
#pragma unroll
        for (int p = 0; p < MOST_COMPONENTS; ++p) {
            if (p >= component_count) continue;
            if constexpr (WIDTH == 4)
                *reinterpret_cast<uint2*>(to + p * component_stride) = make_uint2(split[p][0], split[p][1]);
            else
                to[p * component_stride] = static_cast<uint16_t>(split[p][0]);
        }
    }
};

// A dropout whose elements are drawn for products that end with it: of a layer, n wide; its words begin `begin` behind those
// of the first one.
struct DrawnDropout {
    int layer, n;
    uint32_t least;
    int begin;
};

// kept (steps, words) = which elements of a shard's rows `count` dropouts keep, as math/kept_elements.cuh has them.
// Grid: (a thread for each word of a step, steps).
__device__ __forceinline__ void draw_dropouts(const Step* step, int shard, int shards, const int* described, int count,
                                              uint32_t* kept, int words, uint64_t seed) {
    constexpr int OF_WORD = KeptElements::OF_WORD;
    pdl_wait_and_trigger();
    const int word = blockIdx.x * blockDim.x + threadIdx.x;
    if (word >= words) return;
    const DrawnDropout* of = reinterpret_cast<const DrawnDropout*>(described);
    for (int i = 1; i < count && word >= of[1].begin; ++i) ++of;
    const Rows rows = shard_rows(step + blockIdx.y, shard, shards);
    const int n = of->n, of_row = ceil_div(n, OF_WORD), row = (word - of->begin) / of_row;
    if (row >= rows.count) return;
    const int column = (word - of->begin - row * of_row) * OF_WORD;
    const int64_t first = (static_cast<int64_t>(rows.first) + row) * n + column;
    // The first block of half words begins `before` elements ahead of the word; from `end` on no element is the row's.
    const int before = static_cast<int>(first % DROPOUT_BLOCK), end = before + min(OF_WORD, n - column);
    const int64_t number = step[blockIdx.y].number;
    const auto of_block = [&](int i) {
        const DropoutWords drawn = dropout_words<true>(seed, number, of->layer, (first + i) / DROPOUT_BLOCK);
        return static_cast<uint64_t>(kept_of_block(drawn, of->least)) << i;
    };
    uint64_t bits = end > OF_WORD ? of_block(OF_WORD) : 0;
#pragma unroll
    for (int i = 0; i < OF_WORD; i += DROPOUT_BLOCK) bits |= of_block(i);
    kept[static_cast<int64_t>(blockIdx.y) * words + word] = static_cast<uint32_t>(bits >> before);
}

// y = x · mask · keep. In the backward pass x is a delta, and y = x · mask · keep ∘ f'(saved) unless `saved` is null. Half word
// (row in batch · n + column) of the layer's step decides (math/dropout.cuh), so that nothing is stored between the passes. The
// kernel stores y as floats, as `component_count` components of bfloat16, or as both: the form that nobody reads is null.
// Components have rows of padding behind the shard's, which become 0.
template <class Activation>
__device__ __forceinline__ void dropout(const Step* step, int shard, int shards, const float* x, const float* saved, float* y,
                                        uint16_t* components, int64_t component_stride, int component_count, int n,
                                        uint64_t seed, int layer, uint32_t least, float keep) {
    pdl_wait_and_trigger();
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, end = first + static_cast<int64_t>(rows.count) * n;
    const DroppedRows<Activation> of = {x, saved, y, components, component_stride, component_count, n, first, end, keep};
    const bool has_vectors = of.has_vectors();
    const int64_t warps = element_stride() / WARP;
#pragma unroll 1
    for (int64_t block = first / of.OF_WARP + first_element() / WARP; block * of.OF_WARP < end; block += warps) {
        const int64_t place = block * of.OF_WARP;
        const DropoutWords drawn = dropout_words(seed, step->number, layer, place / DROPOUT_BLOCK + threadIdx.x % WARP);
        unsigned kept = 0;  // a bit for each element of the lane's block of half words
#pragma unroll
        for (int i = 0; i < DROPOUT_BLOCK; ++i) kept |= static_cast<unsigned>(drawn[i] >= least) << i;
        const bool is_whole = place >= first && place + of.OF_WARP <= end;
        is_whole && has_vectors ? of.template drop<4>(place, kept) : of.template drop<1>(place, kept);
    }
    const int pitch = padded_columns(n);
    const int64_t padding = components ? (filled_rows(rows.count) - rows.count) * pitch : 0;
#pragma unroll 1
    for (int64_t i = first_element(); i < padding; i += element_stride())
#pragma unroll 1
        for (int p = 0; p < component_count; ++p)
            components[p * component_stride + static_cast<int64_t>(rows.count) * pitch + i] = 0;
}

// dz = dy ∘ f'(saved), in place.
template <class Activation>
__device__ __forceinline__ void activation_backward(const Step* step, int shard, int shards, const float* saved,
                                                    float* dy, int n) {
    const Rows rows = shard_rows(step, shard, shards);
    const int64_t first = static_cast<int64_t>(rows.first) * n, size = static_cast<int64_t>(rows.count) * n;
    for (int64_t i = first_element(); i < size; i += element_stride())
        dy[first + i] *= Activation::derivative(saved[first + i]);
}

}  // namespace mlpgpu
