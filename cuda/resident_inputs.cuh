// A resident network's batches: while workers compute a step, couriers bring what the next one needs to shared memory,
// a few rows at a time, so that mail finds its way between them.
//
//     find_places     two steps ahead, where the rows are in the data, from the epoch's order
//     fetch           a step ahead, inputs of the tile, made what the products read; weights of rows, targets of own rows
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

__device__ __forceinline__ int courier() { return threadIdx.x % COURIERS; }

template <class K>
__device__ __forceinline__ int* places_of(const K& k, uint32_t tag) {
    return reinterpret_cast<int*>(k.shared + BatchPlace<K>::ROWS) + (tag & 1) * K::ROWS;
}

// The places of a batch's rows in the data.
template <class K>
__device__ __forceinline__ void find_places(const K& k, const Batch& its) {
    int* const to = places_of(k, its.tag);
    for (int row = courier(); row < its.rows; row += COURIERS)
        copy_one(to + row, k.data.order + its.first + row);
}

// The lines of the first layer's tile that are in the data: without the line of ones.
template <class K>
__device__ __forceinline__ int data_lines(const ResidentTile& t) {
    return min(t.lines, LayerOf<K, 0>::N_IN - t.first_line);
}

// How inputs come into shared memory: couriers copy the tile's slice of the rows as it is, several rows at once, and then
// each scales, standardizes and drops what it copied, in place.  Neighbouring lanes have neighbouring parts of a row, four
// inputs each where rows of the data are aligned to that.  Single bytes, too short to be copied so, go through registers.
template <class K>
struct Inputs {
    using Net = typename K::Network;
    using T = LayerOf<K, 0>;
    using Input = typename K::Input;
    static constexpr int VECTOR = T::N_IN % 4 == 0 ? 4 : 1, BYTES = VECTOR * sizeof(Input);
    static constexpr bool ARE_FLOATS = sizeof(Input) == 4, ARE_COPIED = BYTES >= 4;
    static constexpr bool ARE_CHANGED = !ARE_FLOATS || Net::IS_STANDARDIZED || Net::InputDropout::DROPS;
    static constexpr int LANES = smallest(COURIERS, 4 / VECTOR * power_from(T::QUADS)), TEAMS = COURIERS / LANES;
    static constexpr int AT_ONCE = 8;  // rows of a team that are on their way

    static __device__ __forceinline__ void fetch(const K& k, const Batch& its) {
        const int first_line = tile_of<0>(k).first_line, lines = data_lines<K>(tile_of<0>(k));
        const int* const places = places_of(k, its.tag);
        float* const x = inputs_of<0>(k, its.tag);
        for (int line = courier() % LANES * VECTOR; line < lines; line += LANES * VECTOR)
            for (int first = courier() / LANES; first < its.rows; first += AT_ONCE * TEAMS) {
                Input item[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int row = first + i * TEAMS;
                    if (row >= its.rows) break;
                    const Input* const at =
                        k.data.inputs + static_cast<int64_t>(places[row]) * T::N_IN + first_line + line;
                    float* const to = x + row * T::INPUT_PITCH + line;
                    if constexpr (BYTES == 16) copy_four(to, reinterpret_cast<const float*>(at));
                    else if constexpr (BYTES == 4) copy_one(to, at);
                    else item[i] = *at;
                }
                wait_for_copies();
                if constexpr (ARE_CHANGED)
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i)
                        if (const int row = first + i * TEAMS; row < its.rows)
                            change(k, its, row, first_line + line, item[i], x + row * T::INPUT_PITCH + line);
            }
    }

  private:
    // From what the data hold, at `to` or, of single bytes, `item`, to what the first layer gets.
    static __device__ __forceinline__ void change(const K& k, const Batch& its, int row, int column, Input item,
                                                  float* to) {
        const DropoutKey key = {k.key.seed, k.key.purpose, static_cast<uint64_t>(its.step)};
        Input raw[VECTOR];
        if constexpr (VECTOR == 4) load_four(reinterpret_cast<const Input*>(to), raw);
        else raw[0] = ARE_COPIED ? *reinterpret_cast<const Input*>(to) : item;
        const int64_t at = static_cast<int64_t>(row) * T::N_IN + column;
        const PhiloxBlock random = Net::InputDropout::words(key, at);
        float value[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            value[j] = k.data.scale * static_cast<float>(raw[j]);
            if constexpr (Net::IS_STANDARDIZED)
                value[j] = (value[j] - k.data.mean[column + j]) / k.data.deviation[column + j];
            value[j] = Net::InputDropout::apply(random, static_cast<int>((at + j) % 4), value[j]);
        }
        if constexpr (VECTOR == 4) store_four(to, value);
        else *to = value[0];
    }
};

// What a batch brings beside inputs: the rows' weights, and targets of own rows.
template <class K>
__device__ __forceinline__ void fetch(const K& k, const Batch& its) {
    Inputs<K>::fetch(k, its);
    const int* const places = places_of(k, its.tag);
    const int parity = its.tag & 1;
    if (k.data.weights)
        for (int row = courier(); row < its.rows; row += COURIERS)
            k.shared[BatchPlace<K>::WEIGHTS + parity * K::ROWS + row] = k.data.weights[places[row]];
    float* const targets = k.shared + BatchPlace<K>::TARGETS + parity * K::OWN_ROWS * K::TARGETS;
    for (int i = courier(); i < K::OWN_ROWS * K::TARGETS; i += COURIERS)
        if (const int row = k.own_row(i / K::TARGETS); row < its.rows)
            targets[i] = texel(k.targets, static_cast<int64_t>(places[row]) * K::TARGETS + i % K::TARGETS);
}

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
