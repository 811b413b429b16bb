// A whole network forward for few rows in one launch, from inputs to predictions, which may both lie in page-locked memory of
// the host.
//
// Of a few rows a launch for each layer would take longer than their products, and copies to the card and back longer than
// either. So the blocks fetch the inputs together, and compute layer after layer; between two layers they meet. Layers with
// few weights at the network's end are computed by the block that arrives last at the one before, and that block writes the
// predictions, then a word that the host waits for.
//
// Each z is one chain of multiply-adds over ascending k, as those of gemm/simt.cuh are: the bits are the same.
#pragma once

#include "common/async_copy.cuh"
#include "common/reduce.cuh"
#include "math/losses.cuh"
#include "math/teams.cuh"

namespace mlpgpu {

// A layer as the host describes it.  Offsets are into the parameters, and -1 where there is none.
struct NetworkLayer {
    int n;        // columns; its inputs are those of the layer before
    int weight;
    int bias;
    int activation;
    int shift;  // a tile has 1 << shift columns, 8 to 64
};

struct NetworkForward {
    static constexpr int THREADS = 256, WARPS = THREADS / WARP;
    static constexpr int STAGE = 3584;        // weights of a stage, and inputs of a stage without their padding
    static constexpr int MOST_ROWS = 32, PAD = 4;
    static constexpr int STAGED_X = STAGE + MOST_ROWS * PAD;
    static constexpr int SPREAD_ROWS = 8;     // of a tile whose layer all blocks share
    static constexpr int OUTPUTS = 512;       // of a tile at most: two for each thread
    static constexpr int SHARED_BYTES = 4 * 2 * (STAGE + STAGED_X);
};

// What the blocks of a launch share.
struct NetworkMemory {
    float* scratch;      // (3, rows, pitch): what a layer reads and what it writes, in turns, and predictions
    int pitch;           // a multiple of 4
    unsigned* arrived;   // 0 between launches
    uint64_t* meetings;  // how often blocks have met
};

// A tile of a layer's outputs: rows from `row` on, columns from `column` on.
struct NetworkTile {
    const float* x;  // (rows, pitch)
    const float* w;  // (k, n)
    int pitch, k, n, row, rows, column, shift;

    __device__ __forceinline__ int columns() const { return 1 << shift; }

    // The k of a stage, a multiple of four.
    __device__ __forceinline__ int depth() const { return NetworkForward::STAGE / max(columns(), rows) / 4 * 4; }

    // Starts to copy rows [first, first + depth) of W's columns.
    __device__ __forceinline__ void fetch_weights(float* staged, int first) const {
        const int count = min(depth(), k - first) << (shift - 2);
        const bool vectored = n % 4 == 0 && reinterpret_cast<uintptr_t>(w) % 16 == 0;
        for (int i = threadIdx.x; i < count; i += NetworkForward::THREADS) {
            const int inner = i >> (shift - 2), offset = (i << 2) & (columns() - 1);
            const float* const from = w + static_cast<int64_t>(first + inner) * n + column + offset;
            float* const to = staged + (inner << shift) + offset;
            if (vectored && column + offset + 4 <= n) {
                copy_async<16>(to, from);
                continue;
            }
            for (int j = 0; j < 4; ++j) {
                if (column + offset + j < n)
                    copy_async<4>(to + j, from + j);
                else
                    to[j] = 0.0f;
            }
        }
    }

    // The same of x; what lies beyond k is padding, and is not used.
    __device__ __forceinline__ void fetch_inputs(float* staged, int first) const {
        const int length = min(depth(), k - first), staged_pitch = depth() + NetworkForward::PAD;
        for (int r = threadIdx.x / WARP; r < rows; r += NetworkForward::WARPS)
            for (int i = threadIdx.x % WARP * 4; i < length; i += WARP * 4)
                copy_async<16>(staged + r * staged_pitch + i, x + static_cast<int64_t>(row + r) * pitch + first + i);
    }

    // Adds a stage's products to the sums of the thread's outputs, of which it has every 256th.
    __device__ __forceinline__ void multiply(const float* staged_w, const float* staged_x, int length,
                                             float (&sums)[2]) const {
        const int staged_pitch = depth() + NetworkForward::PAD;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int output = threadIdx.x + i * NetworkForward::THREADS;
            if (output >= rows << shift) break;
            const float* const of_row = staged_x + (output >> shift) * staged_pitch;
            const float* const of_column = staged_w + (output & (columns() - 1));
            float sum = sums[i];
            int inner = 0;
#pragma unroll 4
            for (; inner + 4 <= length; inner += 4) {
                const float4 four = *reinterpret_cast<const float4*>(of_row + inner);
                sum = fmaf(four.x, of_column[(inner + 0) << shift], sum);
                sum = fmaf(four.y, of_column[(inner + 1) << shift], sum);
                sum = fmaf(four.z, of_column[(inner + 2) << shift], sum);
                sum = fmaf(four.w, of_column[(inner + 3) << shift], sum);
            }
            for (; inner < length; ++inner) sum = fmaf(of_row[inner], of_column[inner << shift], sum);
            sums[i] = sum;
        }
    }
};

// Two stages of a tile's operands in shared memory.
struct NetworkStages {
    float* shared;

    __device__ __forceinline__ float* weights(int stage) const { return shared + stage % 2 * NetworkForward::STAGE; }
    __device__ __forceinline__ float* inputs(int stage) const {
        return shared + 2 * NetworkForward::STAGE + stage % 2 * NetworkForward::STAGED_X;
    }

    // Starts to copy the weights of a tile's first two stages, which depend on no layer before.
    __device__ __forceinline__ void begin(const NetworkTile& tile) const {
        tile.fetch_weights(weights(0), 0);
        if (tile.depth() < tile.k) tile.fetch_weights(weights(1), tile.depth());
    }

    // z of a tile that was begun, in the thread's sums.
    __device__ __forceinline__ void finish(const NetworkTile& tile, float (&sums)[2]) const {
        const int depth = tile.depth();
        tile.fetch_inputs(inputs(0), 0);
        commit_copies();
        if (depth < tile.k) tile.fetch_inputs(inputs(1), depth);
        commit_copies();
        for (int first = 0, stage = 0; first < tile.k; first += depth, ++stage) {
            wait_copies<1>();
            __syncthreads();
            tile.multiply(weights(stage), inputs(stage), min(depth, tile.k - first), sums);
            __syncthreads();
            if (first + 2 * depth < tile.k) {
                tile.fetch_weights(weights(stage), first + 2 * depth);
                tile.fetch_inputs(inputs(stage), first + 2 * depth);
            }
            commit_copies();
        }
    }
};

// Waits for all blocks, and lets each see what the others wrote before.
__device__ __forceinline__ void meet(const NetworkMemory& memory) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint64_t before = load_word(memory.meetings);
        __threadfence();
        if (atomicAdd(memory.arrived, 1u) == gridDim.x - 1) {
            *memory.arrived = 0;
            __threadfence();
            store_word(memory.meetings, before + 1);
        } else {
            while (load_word(memory.meetings) == before) pause_spinning();
        }
        __threadfence();
    }
    __syncthreads();
}

// A network's layers, in the order in which a launch computes them.
struct NetworkWalk {
    const NetworkLayer* layers;
    const float* parameters;
    NetworkMemory memory;
    NetworkStages stages;
    int n_in, rows;

    __device__ __forceinline__ float* buffer(int number) const {
        return memory.scratch + static_cast<int64_t>(number) * rows * memory.pitch;
    }

    __device__ __forceinline__ int tiles(int l, int tile_rows) const {
        return ceil_div(rows, tile_rows) * ceil_div(layers[l].n, 1 << layers[l].shift);
    }

    __device__ __forceinline__ NetworkTile tile(int l, int tile_rows, int number) const {
        const NetworkLayer layer = layers[l];
        const int across = ceil_div(layer.n, 1 << layer.shift), row = number / across * tile_rows;
        return {buffer(l % 2), parameters + layer.weight, memory.pitch, l > 0 ? layers[l - 1].n : n_in, layer.n, row,
                min(tile_rows, rows - row), number % across << layer.shift, layer.shift};
    }

    // Computes a tile that was begun, and stores y.
    __device__ __forceinline__ void compute(int l, const NetworkTile& tile) const {
        float sums[2] = {};
        stages.finish(tile, sums);
        const NetworkLayer layer = layers[l];
        const float* const b = layer.bias >= 0 ? parameters + layer.bias : nullptr;
        float* const y = buffer((l + 1) % 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int output = threadIdx.x + i * NetworkForward::THREADS, column = tile.column + (output & (tile.columns() - 1));
            if (output >= tile.rows << tile.shift || column >= tile.n) continue;
            float result[1] = {sums[i] + (b ? b[column] : 0.0f)};
            Activations::forwards(layer.activation, result);
            y[static_cast<int64_t>(tile.row + (output >> tile.shift)) * memory.pitch + column] = result[0];
        }
    }
};

// data (rows, n_in) as Source, times `scale` if it is bytes, less `mean` over `deviation` (n_in,) unless they are null;
// layers in the order of the network, the first `spread` of them by all blocks, the others by one.  Leaves predictions, or
// logits with `is_logits`, in y (rows, n), and then `sequence` in done.  Scratch memory is for as many rows as there are.
// Grid: any, of one dimension; one block where no layer is spread.
template <class Source>
__device__ __forceinline__ void network_forward(const Source* data, float scale, const float* mean,
                                                const float* deviation, const float* parameters,
                                                const NetworkLayer* layers, int layer_count, int spread,
                                                float* scratch, int pitch, unsigned* arrived, uint64_t* meetings,
                                                const float* target_mean, const float* target_scale, float* y,
                                                unsigned* done, int n_in, int n, int rows, int output, int is_logits,
                                                uint32_t sequence) {
    SHARED(float, shared);
    const NetworkWalk walk = {layers, parameters, {scratch, pitch, arrived, meetings}, {shared}, n_in, rows};
    constexpr int THREADS = NetworkForward::THREADS;
    const int block = blockIdx.x, blocks = gridDim.x;

    // The inputs, while the first layer's weights are copied.
    if (spread > 0 && block < walk.tiles(0, NetworkForward::SPREAD_ROWS))
        walk.stages.begin(walk.tile(0, NetworkForward::SPREAD_ROWS, block));
    float* const x = walk.buffer(0);
    for (int i = block * THREADS + threadIdx.x; i < rows * n_in; i += blocks * THREADS) {
        const int row = i / n_in, column = i - row * n_in;
        float value = static_cast<float>(data[i]);
        if (sizeof(Source) == 1) value = __fmul_rn(scale, value);  // rounded as where it is stored in between
        if (deviation) value = (value - mean[column]) / deviation[column];
        x[row * pitch + column] = value;
    }

    for (int l = 0; l < spread; ++l) {
        meet(walk.memory);
        const int count = walk.tiles(l, NetworkForward::SPREAD_ROWS);
        for (int number = block; number < count; number += blocks) {
            const NetworkTile tile = walk.tile(l, NetworkForward::SPREAD_ROWS, number);
            if (number != block) walk.stages.begin(tile);
            walk.compute(l, tile);
        }
        if (l + 1 < spread && block < walk.tiles(l + 1, NetworkForward::SPREAD_ROWS))
            walk.stages.begin(walk.tile(l + 1, NetworkForward::SPREAD_ROWS, block));
    }
    if (blocks > 1) {
        __syncthreads();
        const Arrival arrival = arrive(arrived);
        if (!was_last(arrival, shared)) return;
    }

    for (int l = spread; l < layer_count; ++l) {
        __syncthreads();  // what the layer before stored
        const int tile_rows = min(rows, NetworkForward::OUTPUTS >> layers[l].shift);
        const int count = walk.tiles(l, tile_rows);
        for (int number = 0; number < count; ++number) {
            const NetworkTile tile = walk.tile(l, tile_rows, number);
            walk.stages.begin(tile);
            walk.compute(l, tile);
        }
    }
    __syncthreads();

    const float* const logits = walk.buffer(layer_count % 2);
    float* const predictions = walk.buffer(2);
    for (int row = threadIdx.x / WARP; row < rows; row += NetworkForward::WARPS) {
        const float* const z = logits + row * pitch;
        float* const made = predictions + row * pitch;
        if (!is_logits) Outputs::row<WarpTeam>(output, z, made, n);
        for (int j = WarpTeam::rank(); j < n; j += WARP) {
            float value = is_logits ? z[j] : made[j];
            if (target_scale && !is_logits) value = value * target_scale[j] + target_mean[j];
            y[static_cast<int64_t>(row) * n + j] = value;
        }
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) store_for_host(done, sequence);
}

}  // namespace mlpgpu
