// A resident network's batches.  The block that has a row deals its inputs out to the tiles, in memory that all share,
// two steps before they are needed; so each input is fetched and made what the products read once, and not once for
// each tile.  A tile's inputs of a whole batch then lie together, and come by one copy while the tile's weights move.
//
//     deal     couriers, step j: own rows of the batch of step j + 2, scaled, standardized, dropped     -> dealt
//     fetch    couriers, step j: weights of rows and their sum, targets of own rows, and rates, of step j + 1
//     ask      a worker, step j: for the tile's inputs of step j + 1, which the copy engine brings      dealt ->
//
// Nobody waits for that: a tile asks for the inputs of step j + 1 when it has dZ of step j of all rows, which their
// blocks sent after they had dealt those inputs.  Of the three places that take turns, the one that is written in step
// j was read for the last time before the tiles sent Z of step j - 1, which rows had before their step j.
#pragma once

#include "arch/hopper.cuh"
#include "persistent/memory.cuh"

namespace mlpgpu {

// A batch to come.
struct Batch {
    uint32_t tag;   // of its step
    int64_t step;   // since training began
    int run;        // since the run began
    int64_t first;  // place of its first row in the order
    int rows;       // 0 after the last batch
};

__device__ __forceinline__ int courier() { return threadIdx.x % COURIERS; }

__device__ __forceinline__ void store_four(uint16_t* to, const float* from) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bfloat_pair(from[0], from[1]), bfloat_pair(from[2], from[3]));
}

// The inputs of a few batches, cut up as the tiles need them: (PLACES, line slices, rows, INPUT_PITCH).
template <class K>
struct Dealt {
    using Net = typename K::Network;
    using T = LayerOf<K, 0>;
    using X = typename K::X;
    static constexpr int AHEAD = 2, PLACES = 3;
    static constexpr int SLICE = K::ROWS * K::X_PITCH, BATCH = T::LINE_SLICES * SLICE;

    static __device__ __forceinline__ X* of(const K& k, uint32_t tag) { return k.dealt + tag % PLACES * BATCH; }

    static __device__ __forceinline__ void deal(const K& k, const Batch& its) {
        constexpr int FOURS = K::X_PITCH / 4;
        if (its.rows == 0) return;
        for (int row = blockIdx.x; row < K::ROWS; row += K::BLOCKS) {
            const int64_t from = row < its.rows ? k.data.order[its.first + row] * static_cast<int64_t>(T::N_IN) : 0;
#pragma unroll 1
            for (int i = courier(); i < T::LINE_SLICES * FOURS; i += COURIERS) {
                const int slice = i / FOURS, line = T::LINE_QUADS * slice / T::LINE_SLICES * 4 + i % FOURS * 4;
                const int end = min(T::LINE_QUADS * (slice + 1) / T::LINE_SLICES * 4, T::LINES);
                float four[4] = {};
                if (row < its.rows) four_of(k, its, k.data.inputs + from, row, line, end, four);
                store_four(of(k, its.tag) + slice * SLICE + row * K::X_PITCH + i % FOURS * 4, four);
            }
        }
    }

  private:
    // Inputs `line` to `line` + 3 of a row, as far as they are before `end`; behind the last one follows a one.
    static __device__ __forceinline__ void four_of(const K& k, const Batch& its, const typename K::Input* inputs,
                                                   int row, int line, int end, float (&four)[4]) {
        using Input = typename K::Input;
        const DropoutKey key = {k.key.seed, k.key.purpose, static_cast<uint64_t>(its.step)};
        const int64_t at = static_cast<int64_t>(row) * T::N_IN + line;
        const int last = min(end, T::N_IN);
        Input raw[4] = {};
        if (T::N_IN % 4 == 0) {
            if (line < last) load_four(inputs + line, raw);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (line + j < last) raw[j] = inputs[line + j];
        }
        PhiloxBlock random = Net::InputDropout::words(key, at);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (T::N_IN % 4 != 0 && (at + j) % 4 == 0) random = Net::InputDropout::words(key, at + j);
            if (line + j < last) {
                float value = k.data.scale * static_cast<float>(raw[j]);
                if constexpr (Net::IS_STANDARDIZED)
                    value = (value - k.data.mean[line + j]) / k.data.deviation[line + j];
                four[j] = Net::InputDropout::apply(random, static_cast<int>((at + j) % 4), value);
            } else if (T::HAS_BIAS && line + j == T::N_IN && line + j < end) {
                four[j] = 1.0f;
            }
        }
    }
};

// What couriers wrote is there for the other blocks before what this block sends after its next barrier.
template <class K>
__device__ __forceinline__ void publish_dealt() {
    if constexpr (K::HAS_COPY_ENGINE) publish_global();
    __threadfence();
}

// How a tile's inputs of a batch come to shared memory: by the copy engine, or, where there is none, by couriers.
template <class K>
struct Copies {
    static constexpr int BYTES = Dealt<K>::SLICE * sizeof(typename K::X);

    static __device__ __forceinline__ uint32_t barrier(const K& k) {
        return shared_address(k.shared + BatchPlace<K>::BARRIER);
    }
    // All threads of the block, after they cleared its memory.
    static __device__ __forceinline__ void make(const K& k) {
        __syncthreads();
        if constexpr (K::HAS_COPY_ENGINE) {
            if (threadIdx.x == 0) {
                barrier_init(barrier(k), 1);
                barrier_publish();
            }
            publish_shared();
            __syncthreads();
        }
    }
    // Workers, when the inputs have been dealt: one asks the engine, or couriers may begin.
    static __device__ __forceinline__ void ask(const K& k, const Batch& its) {
        if constexpr (!K::HAS_COPY_ENGINE) {
            sync_all();
        } else if (worker() == 0 && tile_of<0>(k).is_mine && its.rows > 0) {
            publish_global();
            barrier_expect(barrier(k), BYTES);
            bulk_copy(shared_address(inputs_of<0>(k, its.tag)), from(k, its), barrier(k), BYTES);
        }
    }
    // Couriers, beside that.
    static __device__ __forceinline__ void answer(const K& k, const Batch& its) {
        if constexpr (!K::HAS_COPY_ENGINE) {
            sync_all();
            if (!tile_of<0>(k).is_mine || its.rows == 0) return;
            float* const to = reinterpret_cast<float*>(inputs_of<0>(k, its.tag));
            for (int i = courier() * 4; i < BYTES / 4; i += COURIERS * 4)
                copy_four(to + i, reinterpret_cast<const float*>(from(k, its)) + i);
            wait_for_copies();
        }
    }
    // The engine's copy number `count` has come; what couriers copied has come by the step's last barrier.
    static __device__ __forceinline__ void wait(const K& k, int count) {
        if constexpr (K::HAS_COPY_ENGINE)
            if (tile_of<0>(k).is_mine) barrier_wait(barrier(k), count & 1);
    }

  private:
    static __device__ __forceinline__ const typename K::X* from(const K& k, const Batch& its) {
        return Dealt<K>::of(k, its.tag) + tile_of<0>(k).line_slice * Dealt<K>::SLICE;
    }
};

// What a batch brings beside inputs: the rows' weights, and targets of own rows.
template <class K>
__device__ __forceinline__ void fetch(const K& k, const Batch& its) {
    const int* const order = k.data.order + its.first;
    const int parity = its.tag & 1;
    if (courier() < COLUMNS && its.rows > 0)
        k.shared[BatchPlace<K>::RATES + parity * COLUMNS + courier()] = schedule[its.run * COLUMNS + courier()];
    if (k.data.weights)
        for (int row = courier(); row < its.rows; row += COURIERS)
            k.shared[BatchPlace<K>::WEIGHTS + parity * K::ROWS + row] = k.data.weights[order[row]];
    float* const targets = k.shared + BatchPlace<K>::TARGETS + parity * K::OWN_ROWS * K::TARGETS;
    for (int i = courier(); i < K::OWN_ROWS * K::TARGETS; i += COURIERS)
        if (const int row = k.own_row(i / K::TARGETS); row < its.rows)
            targets[i] = texel(k.targets, static_cast<int64_t>(order[row]) * K::TARGETS + i % K::TARGETS);
}

// 1 / the batch's summed weight, the same in every block, behind a barrier of the couriers who fetched the weights.
template <class K>
__device__ __forceinline__ void leave_scale(const K& k, const Batch& its) {
    if (courier() >= WARP) return;
    const int parity = its.tag & 1;
    double sum = its.rows;
    if (k.data.weights) {
        sum = 0.0;
        const float* const weights = k.shared + BatchPlace<K>::WEIGHTS + parity * K::ROWS;
        for (int row = courier(); row < its.rows; row += WARP) sum += weights[row];
        sum = warp_sum(sum);
    }
    if (courier() == 0) k.shared[BatchPlace<K>::SCALE + parity] = static_cast<float>(sum > 0.0 ? 1.0 / sum : 0.0);
}

}  // namespace mlpgpu
