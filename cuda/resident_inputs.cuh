// A resident network's batches: while a step computes, what the next one needs comes to shared memory.
//
// find_places  the rows' places in the data, from the epoch's order   two steps ahead
// fetch        loads begin: inputs of the tile, weights of rows, targets of own rows   a step ahead
// stage        what came through registers is put away
#pragma once

#include "resident_memory.cuh"

namespace mlpgpu {

// A batch to come.
struct Batch {
    uint32_t tag;   // of its step
    int64_t step;   // since training began
    int64_t first;  // place of its first row in the order
    int rows;       // 0 after the last batch
};

template <class K>
__device__ __forceinline__ int* places_of(const K& k, uint32_t tag) {
    return reinterpret_cast<int*>(k.shared + BatchPlace<K>::ROWS) + (tag & 1) * K::ROWS;
}

// The places of a batch's rows in the data.
template <class K>
__device__ __forceinline__ void find_places(const K& k, const Batch& its) {
    int* const to = places_of(k, its.tag);
    for (int row = threadIdx.x; row < its.rows; row += RESIDENT_THREADS) to[row] = k.data.order[its.first + row];
}

// The lines of the first layer's tile that are in the data: without the line of ones.
template <class K>
__device__ __forceinline__ int data_lines(const ResidentTile& t) {
    return min(t.lines, LayerOf<K, 0>::N_IN - t.first_line);
}

// How inputs come into shared memory: each block fetches its tile's slice of the rows through registers, where they
// are scaled, standardized and dropped.
template <class K>
struct OwnInputs {
    using Net = typename K::Network;
    using T = LayerOf<K, 0>;
    using Input = typename K::Input;
    static constexpr int VECTOR = T::N_IN % 4 == 0 ? 4 : 1;  // rows of the data are aligned to it
    static constexpr int ROW_ITEMS = 4 * T::QUADS / VECTOR;
    static constexpr int ITEMS = ceil_div(K::ROWS * ROW_ITEMS, RESIDENT_THREADS);  // of a thread
    Input item[ITEMS][VECTOR];

    // What is beyond the batch or the slice is loaded from inside, so that no load waits for a branch.
    __device__ __forceinline__ void fetch(const K& k, const Batch& its) {
        const ResidentTile t = tile_of<0>(k);
        const int lines = data_lines<K>(t);
        if (its.rows == 0 || lines <= 0) return;
        const int* const from = places_of(k, its.tag);
        const Input* const slice = k.data.inputs + t.first_line;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int number = threadIdx.x + i * RESIDENT_THREADS, row = min(number / ROW_ITEMS, its.rows - 1);
            const int line = min(number % ROW_ITEMS * VECTOR, lines - VECTOR);
            const Input* const at = slice + static_cast<int64_t>(from[row]) * T::N_IN + line;
            if constexpr (VECTOR == 4) load_four(at, item[i]);
            else item[i][0] = *at;
        }
    }

    __device__ __forceinline__ void stage(const K& k, const Batch& its) const {
        const ResidentTile t = tile_of<0>(k);
        const int lines = data_lines<K>(t);
        const auto& data = k.data;
        const DropoutKey key = {k.key.seed, k.key.purpose, static_cast<uint64_t>(its.step)};
        float* const x = inputs_of<0>(k, its.tag);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int number = threadIdx.x + i * RESIDENT_THREADS;
            const int row = number / ROW_ITEMS, line = number % ROW_ITEMS * VECTOR;
            if (row >= its.rows || line >= lines) continue;
            const int64_t at = static_cast<int64_t>(row) * T::N_IN + t.first_line + line;
            const PhiloxBlock random = Net::InputDropout::words(key, at);
            float value[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const int column = t.first_line + line + j;
                value[j] = data.scale * static_cast<float>(item[i][j]);
                if constexpr (Net::IS_STANDARDIZED) value[j] = (value[j] - data.mean[column]) / data.deviation[column];
                value[j] = Net::InputDropout::apply(random, static_cast<int>((at + j) % 4), value[j]);
            }
            float* const to = x + row * T::INPUT_PITCH + line;
            if constexpr (VECTOR == 4) store_four(to, value);
            else *to = value[0];
        }
    }

    __device__ __forceinline__ void wait() const {}
};

// The same for float32 that is taken as it is: straight into shared memory, four numbers at a time.
template <class K>
struct AsyncInputs {
    using T = LayerOf<K, 0>;
    static_assert(T::N_IN % 4 == 0);

    __device__ __forceinline__ void fetch(const K& k, const Batch& its) {
        const ResidentTile t = tile_of<0>(k);
        const int lines = data_lines<K>(t);
        const int* const from = places_of(k, its.tag);
        const float* const slice = k.data.inputs + t.first_line;
        float* const x = inputs_of<0>(k, its.tag);
#pragma unroll 4
        for (int number = threadIdx.x; number < its.rows * T::QUADS; number += RESIDENT_THREADS) {
            const int row = number / T::QUADS, line = number % T::QUADS * 4;
            const float* const at = slice + static_cast<int64_t>(from[row]) * T::N_IN + line;
            if (line < lines) copy_four(x + row * T::INPUT_PITCH + line, at);
        }
    }
    __device__ __forceinline__ void stage(const K&, const Batch&) const {}
    // Before a barrier that comes before the rows are read.
    __device__ __forceinline__ void wait() const { wait_for_copies(); }
};

// What a thread brings of the next batch beside inputs: weights, and targets of own rows.
template <class K>
struct RowData {
    static constexpr int WEIGHTS = ceil_div(K::ROWS, RESIDENT_THREADS);
    static constexpr int TARGETS = ceil_div(K::OWN_ROWS * K::TARGETS, RESIDENT_THREADS);
    float weight[WEIGHTS];
    float target[TARGETS];

    __device__ __forceinline__ void fetch(const K& k, const Batch& its) {
        const int* const from = places_of(k, its.tag);
        if (k.data.weights)
            for (int i = 0; i < WEIGHTS; ++i)
                if (const int row = threadIdx.x + i * RESIDENT_THREADS; row < its.rows)
                    weight[i] = k.data.weights[from[row]];
        for (int i = 0; i < TARGETS; ++i) {
            const int item = threadIdx.x + i * RESIDENT_THREADS, row = k.own_row(item / K::TARGETS);
            if (item < K::OWN_ROWS * K::TARGETS && row < its.rows)
                target[i] = texel(k.targets, static_cast<int64_t>(from[row]) * K::TARGETS + item % K::TARGETS);
        }
    }

    __device__ __forceinline__ void stage(const K& k, const Batch& its) const {
        const int parity = its.tag & 1;
        if (k.data.weights)
            for (int i = 0; i < WEIGHTS; ++i)
                if (const int row = threadIdx.x + i * RESIDENT_THREADS; row < its.rows)
                    k.shared[BatchPlace<K>::WEIGHTS + parity * K::ROWS + row] = weight[i];
        for (int i = 0; i < TARGETS; ++i) {
            const int item = threadIdx.x + i * RESIDENT_THREADS;
            if (item < K::OWN_ROWS * K::TARGETS && k.own_row(item / K::TARGETS) < its.rows)
                k.shared[BatchPlace<K>::TARGETS + parity * K::OWN_ROWS * K::TARGETS + item] = target[i];
        }
    }
};

// 1 / the batch's summed weight, the same in every thread and block.
template <class K>
__device__ __forceinline__ float inverse_row_weight(const K& k) {
    double sum = k.rows;
    if (k.data.weights) {
        sum = 0.0;
        const float* const weights = k.shared + BatchPlace<K>::WEIGHTS + k.parity() * K::ROWS;
        for (int row = threadIdx.x % WARP; row < k.rows; row += WARP) sum += weights[row];
        sum = warp_sum(sum);
    }
    return static_cast<float>(sum > 0.0 ? 1.0 / sum : 0.0);
}

}  // namespace mlpgpu
