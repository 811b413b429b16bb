// The persistent kernel's batches. The block that has a row stages its inputs for all tiles in global memory, two steps
// before they are needed: each input is fetched and converted to the products' operand once, instead of once for each
// tile. A tile's inputs of a whole batch are then contiguous, and one copy brings them while the tile's weights are
// updated.
//
//     StagedInputs::stage    producers, step j: scale, standardize, drop the block's rows of batch j + 2
//     fetch_batch            producers, step j: row weights, targets of the block's rows, rates, of batch j + 1
//     InputCopies::request   one compute thread, step j: the copy engine brings the tile's inputs of batch j + 1
//
// No barrier orders the staging: a tile requests the inputs of step j + 1 when it has dZ of step j of all rows, and
// their blocks sent dZ after they had staged those inputs. Three buffers are enough: the one that is written in step j
// was last read before the tiles sent Z of step j - 1, which the rows had received before their step j.
#pragma once

#include "common/async_copy.cuh"
#include "arch/barriers.cuh"
#include "arch/bulk_copy.cuh"
#include "persistent/memory.cuh"
#include "persistent/step_range.cuh"

namespace mlpgpu {

__device__ __forceinline__ int producer_thread() { return threadIdx.x % PRODUCER_THREADS; }

__device__ __forceinline__ void store_four(uint16_t* to, const float* from) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bfloat_pair(from[0], from[1]), bfloat_pair(from[2], from[3]));
}

// The inputs of three batches, cut up as the tiles read them: (BUFFERS, row slices, rows, X_PITCH).
template <class K>
struct StagedInputs {
    using Net = typename K::Network;
    using T = LayerOf<K, 0>;
    using X = typename K::X;
    static constexpr int STEPS_BEFORE = 2, BUFFERS = 3;
    static constexpr int SLICE = K::ROWS * K::X_PITCH, BATCH = T::ROW_SLICES * SLICE;

    static __device__ __forceinline__ X* of(const K& k, uint32_t sequence) {
        return k.staged + sequence % BUFFERS * BATCH;
    }

    static __device__ __forceinline__ void stage(const K& k, const Batch& batch) {
        constexpr int FOURS = K::X_PITCH / 4;
        if (batch.rows == 0) return;
        for (int row = blockIdx.x; row < K::ROWS; row += K::BLOCKS) {
            const int64_t from = row < batch.rows ? k.data.order[batch.first + row] * static_cast<int64_t>(T::N_IN) : 0;
#pragma unroll 1
            for (int i = producer_thread(); i < T::ROW_SLICES * FOURS; i += PRODUCER_THREADS) {
                const int slice = i / FOURS, weight_row = T::ROW_QUADS * slice / T::ROW_SLICES * 4 + i % FOURS * 4;
                const int end = min(T::ROW_QUADS * (slice + 1) / T::ROW_SLICES * 4, T::WEIGHT_ROWS);
                float four[4] = {};
                if (row < batch.rows) load_inputs(k, batch, k.data.inputs + from, row, weight_row, end, four);
                store_four(of(k, batch.sequence) + slice * SLICE + row * K::X_PITCH + i % FOURS * 4, four);
            }
        }
    }

  private:
    // Four inputs of a row from `weight_row` on, as far as they are before `end`; the input of the biases, after the
    // last, is 1.
    static __device__ __forceinline__ void load_inputs(const K& k, const Batch& batch, const typename K::Input* inputs,
                                                   int row, int weight_row, int end, float (&four)[4]) {
        using Input = typename K::Input;
        const DropoutKey key = {k.key.seed, batch.step};
        const int64_t element = static_cast<int64_t>(row) * T::N_IN + weight_row;
        const int last = min(end, T::N_IN);
        Input raw[4] = {};
        if (T::N_IN % 4 == 0) {
            if (weight_row < last) load_four(inputs + weight_row, raw);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (weight_row + j < last) raw[j] = inputs[weight_row + j];
        }
        DropoutWords drawn = Net::InputDropout::words(key, element);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (T::N_IN % 4 != 0 && j > 0 && (element + j) % DROPOUT_BLOCK == 0)
                drawn = Net::InputDropout::words(key, element + j);
            if (weight_row + j < last) {
                float value = k.data.scale * static_cast<float>(raw[j]);
                if constexpr (Net::IS_STANDARDIZED)
                    value = (value - k.data.mean[weight_row + j]) / k.data.deviation[weight_row + j];
                four[j] = Net::InputDropout::apply(drawn, element + j, value);
            } else if (T::HAS_BIAS && weight_row + j == T::N_IN && weight_row + j < end) {
                four[j] = 1.0f;
            }
        }
    }
};

// Makes what the producers wrote visible to other blocks, before anything that this block sends after its next barrier.
template <class K>
__device__ __forceinline__ void publish_staged() {
    if constexpr (K::HAS_COPY_ENGINE) publish_global();
    __threadfence();
}

// How a tile's inputs of a batch reach shared memory: by the copy engine or, on cards without one, by the producers.
template <class K>
struct InputCopies {
    static constexpr int BYTES = StagedInputs<K>::SLICE * sizeof(typename K::X);

    static __device__ __forceinline__ uint32_t barrier(const K& k) {
        return shared_address(k.shared + BatchMemory<K>::BARRIER);
    }
    // Called by all threads of the block, after they cleared its shared memory.
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
    // Called by compute threads once the inputs are staged: one starts the copy engine, or the producers may begin to
    // copy.
    static __device__ __forceinline__ void request(const K& k, const Batch& batch) {
        if constexpr (!K::HAS_COPY_ENGINE) {
            sync_all();
        } else if (compute_thread() == 0 && tile_of<0>(k).is_mine && batch.rows > 0) {
            publish_global();
            barrier_expect(barrier(k), BYTES);
            bulk_copy(shared_address(inputs_of<0>(k, batch.sequence)), from(k, batch), barrier(k), BYTES);
        }
    }
    // Called by producers at the same time.
    static __device__ __forceinline__ void copy(const K& k, const Batch& batch) {
        if constexpr (!K::HAS_COPY_ENGINE) {
            sync_all();
            if (!tile_of<0>(k).is_mine || batch.rows == 0) return;
            float* const to = reinterpret_cast<float*>(inputs_of<0>(k, batch.sequence));
            for (int i = producer_thread() * 4; i < BYTES / 4; i += PRODUCER_THREADS * 4)
                copy_async<16>(to + i, reinterpret_cast<const float*>(from(k, batch)) + i);
            wait_copies();
        }
    }
    // Waits for the engine's copy number `count`. Copies by producers are complete at the step's last barrier.
    static __device__ __forceinline__ void wait(const K& k, int count) {
        if constexpr (K::HAS_COPY_ENGINE)
            if (tile_of<0>(k).is_mine) barrier_wait(barrier(k), count & 1);
    }

  private:
    static __device__ __forceinline__ const typename K::X* from(const K& k, const Batch& batch) {
        return StagedInputs<K>::of(k, batch.sequence) + tile_of<0>(k).row_slice * StagedInputs<K>::SLICE;
    }
};

// Fetches what a batch has beside inputs: the rows' weights, the targets of the block's rows, the step's rates.
template <class K>
__device__ __forceinline__ void fetch_batch(const K& k, const Batch& batch) {
    const int* const order = k.data.order + batch.first;
    const int parity = batch.sequence & 1;
    if (producer_thread() < RATES_PER_STEP && batch.rows > 0)
        k.shared[BatchMemory<K>::RATES + parity * RATES_PER_STEP + producer_thread()] =
            schedule[batch.run * RATES_PER_STEP + producer_thread()];
    if (k.data.weights)
        for (int row = producer_thread(); row < batch.rows; row += PRODUCER_THREADS)
            k.shared[BatchMemory<K>::WEIGHTS + parity * K::ROWS + row] = k.data.weights[order[row]];
    float* const targets = k.shared + BatchMemory<K>::TARGETS + parity * K::ROWS_PER_BLOCK * K::TARGETS;
    for (int i = producer_thread(); i < K::ROWS_PER_BLOCK * K::TARGETS; i += PRODUCER_THREADS)
        if (const int row = k.block_row(i / K::TARGETS); row < batch.rows)
            targets[i] = texel(k.targets, static_cast<int64_t>(order[row]) * K::TARGETS + i % K::TARGETS);
}

// Stores 1 / the batch's summed weight, the same in every block, after a barrier of the producers, who fetched the
// weights.
template <class K>
__device__ __forceinline__ void store_scale(const K& k, const Batch& batch) {
    if (producer_thread() >= WARP) return;
    const int parity = batch.sequence & 1;
    double sum = batch.rows;
    if (k.data.weights) {
        sum = 0.0;
        const float* const weights = k.shared + BatchMemory<K>::WEIGHTS + parity * K::ROWS;
        for (int row = producer_thread(); row < batch.rows; row += WARP) sum += weights[row];
        sum = warp_sum(sum);
    }
    if (producer_thread() == 0)
        k.shared[BatchMemory<K>::SCALE + parity] = static_cast<float>(sum > 0.0 ? 1.0 / sum : 0.0);
}

}  // namespace mlpgpu
