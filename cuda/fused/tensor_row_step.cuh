// Blocks of rows on tensor cores: all of a training step but the sum of its gradients in one launch, for networks of narrow
// layers. A block takes `tile` rows of the batch from the data set through all layers and the loss back to the deltas, and
// leaves their part of the gradients. Where inputs are too long for that, fused/input_layer.cuh makes the first layer's sums
// before, and its gradient afterwards.
//
// What passes from layer to layer stays in shared memory, as components of bfloat16 (gemm/components.cuh). Weights come as
// components that fused/update_from_blocks.cuh leaves, the next one while one is multiplied where there is room for two. A
// gradient is the product of what the block has in shared memory in any case.
//
// `Level` l is what layer l makes, level 0 the inputs, or what a first layer apart makes.
#pragma once

#include "arch/barriers.cuh"
#include "arch/bulk_copy.cuh"
#include "common/batch_total.cuh"
#include "common/dependent_launch.cuh"
#include "gemm/components.cuh"
#include "math/dropout.cuh"
#include "math/losses.cuh"
#include "math/teams.cuh"

namespace mlpgpu {

// A level as the host describes it.
struct TensorRowStepLevel {
    int n;           // columns; those of the level before are the layer's inputs
    int bias;        // its offset in the parameters, or -1
    int activation;
    int saves_z;     // whether f' takes z instead of y
    int dropout;     // the number of the dropout that follows, or -1
    uint32_t least;  // half word that it keeps
    float keep;
    int slopes;      // padded columns of `slopes` before the level's; -1 where they follow from y, a ReLU's and dropout's too
    int place;       // elements before it in a component of a row
    int first;       // columns of layers before
    int image;       // elements before the layer's weight in `images`
    int partial;     // floats before the layer's gradient in a block's partials
};

struct TensorRowStepShape {
    static constexpr int THREADS = 512, WARPS = THREADS / WARP, MOST_LEVELS = 32, MOST_ROWS = 128;
    static constexpr int LEVEL_WORDS = sizeof(TensorRowStepLevel) / 4, BARRIER_WORDS = 4;
    static constexpr int STEP = ComponentsShape::STEP;
    static constexpr int ROWS_PER_OUTPUT = 5;  // a block with more rows than that has a thread make a row's loss, not a warp
};

template <int BYTES>
struct TensorRowStep : TensorRowStepShape {
    static constexpr int SHARED_BYTES = BYTES;
};

// Floats of a row of a layer's gradient among a block's partials, whose last row is the bias's.
__device__ __forceinline__ int partial_pitch(int n) { return round_up(n, 8); }

// The weights of all layers in the order in which a block's rows meet them, forward and back, one after another in shared
// memory. The last one serves both ways, and the first one is met again if level 0 HAS_DELTAS.
template <int COMPONENTS, bool HAS_DELTAS>
struct WeightsInTurn {
    const TensorRowStepLevel* levels;
    int layer_count, room, room_count;  // elements of each room for a weight
    const uint16_t* images;
    uint16_t* rooms;
    uint64_t* arrived;  // a barrier for each room
    int came = 0;       // weights that have come to the block so far
    int turn = 0;       // of the next one, for these rows
    bool is_fetched = false;  // whether that is in flight

    __device__ __forceinline__ WeightsInTurn(const TensorRowStepLevel* levels, int layer_count, int room, int room_count,
                                             const uint16_t* images, uint16_t* rooms, uint64_t* arrived)
        : levels(levels), layer_count(layer_count), room(room), room_count(room_count), images(images), rooms(rooms),
          arrived(arrived) {}

    // Starts to copy the next weight to room `place`, if there is one left for these rows and it is not in flight.
    __device__ __forceinline__ void fetch(int place) {
        const int layer = turn < layer_count ? turn + 1 : 2 * layer_count - 1 - turn;
        if (is_fetched || layer < 1 || (layer == 1 && turn > 0 && !HAS_DELTAS)) return;
        is_fetched = true;
        if (threadIdx.x != 0) return;
        const int pitch = components_pitch(levels[layer].n);
        const int bytes = 2 * COMPONENTS * padded_to_step(levels[layer - 1].n) * pitch;
        const uint32_t barrier = shared_address(arrived + place % room_count);
        barrier_expect(barrier, bytes);
        bulk_copy(shared_address(rooms + place % room_count * room), images + levels[layer].image, barrier, bytes);
    }

    // For other rows the weights come anew.
    __device__ __forceinline__ void restart() {
        turn = 0, is_fetched = false;
        fetch(came);
    }

    // Has the next weight come where the last one was, which nobody reads any more.
    __device__ __forceinline__ void replace() {
        if (room_count == 1) fetch(came);
    }

    // Waits for the next weight, layer `layer`'s, and for all threads. Where there are two rooms the one after it begins to
    // come.
    __device__ __forceinline__ Components<COMPONENTS> next(int layer) {
        if (room_count == 1 && !is_fetched) {
            __syncthreads();
            fetch(came);
        }
        barrier_wait(shared_address(arrived + came % room_count), came / room_count % 2);
        __syncthreads();
        ++came, ++turn, is_fetched = false;
        if (room_count > 1) fetch(came);
        return last(layer);
    }

    // The one that came last.
    __device__ __forceinline__ Components<COMPONENTS> last(int layer) const {
        const int pitch = components_pitch(levels[layer].n);
        return {rooms + (came - 1) % room_count * room, pitch, padded_to_step(levels[layer - 1].n) * pitch};
    }
};

// The levels of the block's rows, and what is done to their elements. A level's activation is a number in the list.
template <int COMPONENTS, class Activations>
struct LevelsOfRows {
    using T = TensorRowStepShape;
    const TensorRowStepLevel* levels;
    int tile;
    uint16_t* operands;
    float4* slopes;  // as lanes have them: of 16 rows and 8 columns a lane has four
    int rows;
    int64_t first;  // of the rows, in the batch
    uint64_t seed;
    int64_t number;  // of the step

    __device__ __forceinline__ Components<COMPONENTS> level(int l) const {
        const int pitch = components_pitch(levels[l].n), stride = tile * pitch;
        return {operands + COMPONENTS * tile * levels[l].place, pitch, stride};
    }

    // The slopes at `row` and `row` + 8 of two columns of a level.
    __device__ __forceinline__ float4* slopes_at(const TensorRowStepLevel& of, int row, int column) const {
        const int block = tile / T::STEP * of.slopes / 8 + row / T::STEP * (padded_to_step(of.n) / 8) + column / 8;
        return slopes + block * WARP + threadIdx.x % WARP;
    }

    // Whether a dropout keeps each of four elements of a level, at `row` and `row` + 8 of two columns.
    __device__ __forceinline__ void drop(const TensorRowStepLevel& of, int row, int column, float (&values)[4]) const {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int64_t element = (first + row + q / 2 * 8) * of.n + column + q % 2;
            const DropoutWords drawn = dropout_words(seed, number, of.dropout, element / DROPOUT_BLOCK);
            values[q] = keep_or_drop(drawn[element], of.least, of.keep, values[q]);
        }
    }

    // Turns z, at `row` and `row` + 8 of two columns, into what the next layer takes. Padding becomes 0.
    __device__ __forceinline__ void activate(const TensorRowStepLevel& of, int row, int column, float (&values)[4]) const {
        float slope[4] = {values[0], values[1], values[2], values[3]};
        Activations::forwards(of.activation, values);
        if (of.slopes >= 0) {
#pragma unroll
            for (int q = 0; q < 4; ++q) slope[q] = of.saves_z ? slope[q] : values[q];
            Activations::derivatives(of.activation, slope);
        }
        if (of.dropout >= 0) {
            float kept[4] = {1.0f, 1.0f, 1.0f, 1.0f};
            drop(of, row, column, kept);
#pragma unroll
            for (int q = 0; q < 4; ++q) values[q] *= kept[q], slope[q] *= kept[q];
        }
        if (of.slopes >= 0) *slopes_at(of, row, column) = make_float4(slope[0], slope[1], slope[2], slope[3]);
#pragma unroll
        for (int q = 0; q < 4; ++q)
            if (column + q % 2 >= of.n) values[q] = 0.0f;
    }

    // The slopes of what was activated there: as they were stored, or of y.
    __device__ __forceinline__ float4 slope_of(const TensorRowStepLevel& of, const Components<COMPONENTS>& y, int row,
                                               int column) const {
        if (of.slopes >= 0) return *slopes_at(of, row, column);
        const float2 upper = y.at(row, column), lower = y.at(row + 8, column);
        return make_float4(upper.x, upper.y, lower.x, lower.y);
    }

    // Multiplies gradients by them.
    __device__ __forceinline__ void derive(const TensorRowStepLevel& of, const float4& begun, int column,
                                           float (&values)[4]) const {
        float slope[4] = {begun.x, begun.y, begun.z, begun.w};
        if (of.slopes < 0) {
            Activations::derivatives(of.activation, slope);
            if (of.dropout >= 0)
#pragma unroll
                for (int q = 0; q < 4; ++q) slope[q] *= of.keep;
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) values[q] = column + q % 2 < of.n ? values[q] * slope[q] : 0.0f;
    }
};

// The rows of the data set that `fetched` names, as floats or as bytes times `scale`, less `mean` over `deviation` (n,)
// unless they are null, as level 0.
template <class Levels>
__device__ __forceinline__ void fetch_rows(const Levels& own, const int* fetched, const float* data, const unsigned char* bytes,
                                           float scale, const float* mean, const float* deviation) {
    using T = TensorRowStepShape;
    constexpr int AT_ONCE = 4;  // of a thread's quads whose loads are in flight
    const TensorRowStepLevel of = own.levels[0];
    const auto to = own.level(0);
    const int pairs = padded_to_step(of.n) / 2;
    int lanes = 8;  // that share two rows: as many as there are pairs of columns, up to a warp
    while (lanes < WARP && lanes < pairs) lanes *= 2;
    const int rows_at_once = T::THREADS / lanes, across = ceil_div(pairs, lanes);
    const int count = ceil_div(own.tile / 2, rows_at_once) * across;
    int pair_row = threadIdx.x / lanes, pair = threadIdx.x % lanes;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += AT_ONCE) {
        float values[AT_ONCE][4];
        int rows[AT_ONCE], columns[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            rows[i] = pair_row / 8 * 16 + pair_row % 8, columns[i] = 2 * pair;
            pair += lanes;
            if (pair >= pairs) pair = threadIdx.x % lanes, pair_row += rows_at_once;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int row = rows[i] + q / 2 * 8, column = columns[i] + q % 2;
                const bool is_there = row < own.rows && column < of.n;  // other lanes than pairs are idle
                const int64_t from = is_there ? static_cast<int64_t>(fetched[row]) * of.n + column : 0;
                values[i][q] = !is_there ? 0.0f : bytes ? static_cast<float>(bytes[from]) : data[from];
            }
        }
#pragma unroll 1
        for (int i = 0; i < AT_ONCE; ++i) {
            float four[4];
            int row = rows[0], column = columns[0];
#pragma unroll
            for (int q = 0; q < 4; ++q) four[q] = values[0][q];
#pragma unroll
            for (int other = 1; other < AT_ONCE; ++other)
                if (other == i) {
                    row = rows[other], column = columns[other];
#pragma unroll
                    for (int q = 0; q < 4; ++q) four[q] = values[other][q];
                }
            if (row >= own.tile || column >= 2 * pairs) continue;
            if (bytes)
#pragma unroll
                for (int q = 0; q < 4; ++q) four[q] = __fmul_rn(scale, four[q]);
            if (deviation)
#pragma unroll
                for (int q = 0; q < 4; ++q)
                    if (column + q % 2 < of.n) four[q] = (four[q] - mean[column + q % 2]) / deviation[column + q % 2];
            if (of.dropout >= 0) own.drop(of, row, column, four);
#pragma unroll
            for (int q = 0; q < 4; ++q)
                if (row + q / 2 * 8 >= own.rows || column + q % 2 >= of.n) four[q] = 0.0f;
            to.put(row, column, four[0], four[1]);
            to.put(row + 8, column, four[2], four[3]);
        }
    }
}

// The losses of the block's rows, from logits (rows, pitch), whose deltas become the last level. `fetched` names the rows of
// the data set. Adds to a thread's part of the batch's value and weight.
template <class Loss, class Target, int COMPONENTS, class Source>
__device__ __forceinline__ void losses_of_rows(const float* logits, int pitch, const Components<COMPONENTS>& deltas, int n,
                                               int tile, int rows, const int* fetched, Source targets, const float* weights,
                                               const float* mean, const float* scale, double& value, double& weight) {
    using T = TensorRowStepShape;
    const auto target_of = [&](int row) { return Target{targets, fetched[row], n, mean, scale}.of_row(); };
    const auto loss_of = [&](auto team, int row, const auto& target, float row_weight) {
        uint16_t* const of_row = deltas.data + row * deltas.pitch;
        const float v = weighted_row<Loss, decltype(team)>(logits + row * pitch, n, target, row_weight, [=](int j, float d) {
            float rest = d, none = 0.0f;
#pragma unroll
            for (int p = 0; p < COMPONENTS; ++p)
                of_row[p * deltas.stride + j] = static_cast<uint16_t>(split_off(rest, none) & 0xffffu);
        });
        if (decltype(team)::rank() == 0) value += v, weight += row_weight;
    };
    if (T::ROWS_PER_OUTPUT * n < tile) {
        for (int row = threadIdx.x; row < rows; row += T::THREADS)
            loss_of(ThreadTeam(), row, target_of(row), weights ? weights[fetched[row]] : 1.0f);
        return;
    }
    // A lane reads what a later row of its warp needs, so that all rows' loads are in flight together.
    const int warp = threadIdx.x / WARP, read = min(warp + static_cast<int>(threadIdx.x) % WARP * T::WARPS, rows - 1);
    const auto read_target = target_of(read);
    const float read_weight = weights ? weights[fetched[read]] : 1.0f;
#pragma unroll 1
    for (int row = warp; row < rows; row += T::WARPS) {
        const float row_weight = __shfl_sync(WARP_ALL, read_weight, row / T::WARPS);
        auto target = read_target;
        if constexpr (Target::IS_CLASS) target.column = __shfl_sync(WARP_ALL, read_target.column, row / T::WARPS);
        else target = target_of(row);
        loss_of(WarpTeam(), row, target, row_weight);
    }
}

// A layer's gradient over the block's rows, to (inputs + 1, n padded to 8), the bias's as its last row: beside what rows before
// have left there, unless they are the first.
template <int COMPONENTS>
__device__ __forceinline__ void gradient_of_rows(const Components<COMPONENTS>& x, int inputs, const Components<COMPONENTS>& dz,
                                                 int n, int tile, bool is_first, float* gradient) {
    const int k = padded_to_step(inputs), pitch = partial_pitch(n);
    // An element's place, or null if there is none: row k is the bias's, and others from `inputs` on are padding.
    const auto place = [=](int i, int column) {
        const bool is_there = column < pitch && (i < inputs || i == k);
        return is_there ? reinterpret_cast<float2*>(gradient + min(i, inputs) * pitch + column) : nullptr;
    };
    const auto before = [&](int row, int column) {
        const float2* const upper = is_first ? nullptr : place(row, column);
        const float2* const lower = is_first ? nullptr : place(row + 8, column);
        const float2 first = upper ? *upper : float2(), second = lower ? *lower : float2();
        return make_float4(first.x, first.y, second.x, second.y);
    };
    multiply_by_warps<TensorRowStepShape::WARPS, COMPONENTS, false, false, true>(
        x, k, dz, padded_to_step(n), tile, true, before, [&](int row, int column, float (&c)[4], const float4& begun) {
            if (float2* const upper = place(row, column)) *upper = make_float2(begun.x + c[0], begun.y + c[1]);
            if (float2* const lower = place(row + 8, column)) *lower = make_float2(begun.z + c[2], begun.w + c[3]);
        });
}

// Level 0 as rows of the data set, whose deltas nobody needs.
struct InputsOfData {
    static constexpr bool HAS_DELTAS = false;
    const float* data;
    const unsigned char* bytes;
    float scale;
    const float* mean;
    const float* deviation;

    template <class Levels>
    __device__ __forceinline__ void fetch(const Levels& own, const int* fetched) const {
        fetch_rows(own, fetched, data, bytes, scale, mean, deviation);
    }
};

// Level 0 as what a first layer makes: its sums over `parts` of the inputs are (parts, capacity, n padded to 16), and its
// deltas become components (components, delta_rows, n padded to 16 and 8), as fused/input_layer.cuh has both.
struct SumsOfInputLayer {
    static constexpr bool HAS_DELTAS = true;
    const float* sums;
    int parts, capacity;
    const float* parameters;
    uint16_t* deltas;
    int delta_rows;

    template <class Levels>
    __device__ __forceinline__ void add_up(const Levels& own) const {
        using T = TensorRowStepShape;
        const TensorRowStepLevel of = own.levels[0];
        const auto to = own.level(0);
        const int lane = threadIdx.x % WARP, columns = padded_to_step(of.n), across = columns / 8;
        const int64_t stride = static_cast<int64_t>(capacity) * columns;
#pragma unroll 1
        for (int item = threadIdx.x / WARP; item < own.tile / T::STEP * across; item += T::WARPS) {
            const int band = item / across, row = band * T::STEP + lane / 4, column = (item - band * across) * 8 + lane % 4 * 2;
            const float* const from = sums + (own.first + row) * columns + column;
            float2 upper = {}, lower = {};
            const auto add = [&](float2& sum, const float* part) {
                const float2 two = __ldcg(reinterpret_cast<const float2*>(part));
                sum = make_float2(sum.x + two.x, sum.y + two.y);
            };
#pragma unroll 4
            for (int part = 0; part < parts; ++part) {
                if (row < own.rows) add(upper, from + part * stride);
                if (row + 8 < own.rows) add(lower, from + part * stride + 8 * columns);
            }
            float values[4] = {upper.x, upper.y, lower.x, lower.y};
#pragma unroll
            for (int q = 0; q < 4; ++q)
                if (of.bias >= 0 && column + q % 2 < of.n) values[q] += parameters[of.bias + column + q % 2];
            own.activate(of, row, column, values);
            to.put(row, column, values[0], values[1]);
            to.put(row + 8, column, values[2], values[3]);
        }
    }

    // Stores what level 0 has become.
    template <class Levels>
    __device__ __forceinline__ void store_deltas(const Levels& own) const {
        const auto from = own.level(0);
        const int vectors = from.pitch / 8;  // the last one of a row has nothing
        for (int p = 0; p < from.COUNT; ++p) {
            const uint4* const of_block = reinterpret_cast<const uint4*>(from.data + p * from.stride);
            uint4* const to = reinterpret_cast<uint4*>(deltas) + (static_cast<int64_t>(p) * delta_rows + own.first) * vectors;
            for (int i = threadIdx.x; i < own.rows * vectors; i += TensorRowStepShape::THREADS)
                to[i] = (i + 1) % vectors == 0 ? make_uint4(0, 0, 0, 0) : of_block[i];
        }
    }
};

// Runs a batch in one shard. There are `layer_count` layers, so one level more is described. Block b leaves the sum of its
// rows' gradients in `partials`, `pitch` floats from those of block b - 1, (k + 1, n padded to 8) of one layer after another;
// and the batch's loss goes where elementwise/loss.cuh puts it. `images` is what fused/update_from_blocks.cuh leaves; `slopes`
// may be null where no level has any, and has `slope_columns` of all rows else. All layers have `bias_count` columns; each of
// `room_count` rooms holds any weight.
// Grid: any; each block takes every so many-th `tile` rows.
template <class Loss, class Target, int COMPONENTS, class Activations, class Inputs, class Source>
__device__ __forceinline__ void tensor_row_step_of(const Inputs& inputs, const Step* step, int shard, int shards,
                                                   const int* order, const float* parameters, const uint16_t* images,
                                                   const TensorRowStepLevel* described, int layer_count, int tile, int room,
                                                   int room_count, int bias_count, Source targets, const float* weights,
                                                   const float* target_mean, const float* target_scale, uint64_t seed,
                                                   float* slopes, int slope_columns, float* partials, int pitch,
                                                   double* sums, unsigned* arrived, double* totals, double* losses) {
    using T = TensorRowStepShape;
    SHARED(float, shared);
    TensorRowStepLevel* const levels = reinterpret_cast<TensorRowStepLevel*>(shared);
    int* const fetched = reinterpret_cast<int*>(shared) + T::MOST_LEVELS * T::LEVEL_WORDS;
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(fetched + T::MOST_ROWS);
    float* const biases = reinterpret_cast<float*>(barriers) + T::BARRIER_WORDS;
    float* const logits = biases + round_up(bias_count, 4);
    for (int i = threadIdx.x; i < (layer_count + 1) * T::LEVEL_WORDS; i += T::THREADS)
        reinterpret_cast<int*>(levels)[i] = reinterpret_cast<const int*>(described)[i];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) barrier_init(shared_address(barriers + i), 1);
        barrier_publish();
    }
    const Rows shard_of = shard_rows(step, shard, shards);
    __syncthreads();
    const int outputs = levels[layer_count].n, logits_pitch = outputs | 1;
    uint16_t* const rooms = reinterpret_cast<uint16_t*>(logits + round_up(tile * logits_pitch, 4));
    float* const of_block = partials + static_cast<int64_t>(blockIdx.x) * pitch;
    WeightsInTurn<COMPONENTS, Inputs::HAS_DELTAS> in_turn(levels, layer_count, room, room_count, images, rooms, barriers);
    double value = 0.0, weight = 0.0;
    bool is_first = true;
    for (int row0 = blockIdx.x * tile; row0 < shard_of.count; row0 += gridDim.x * tile) {
        const int rows = min(tile, shard_of.count - row0);
        const LevelsOfRows<COMPONENTS, Activations> own = {
            levels, tile, rooms + room_count * room,
            reinterpret_cast<float4*>(slopes + static_cast<int64_t>(row0) * slope_columns), rows, row0, seed, step->number};
        for (int i = threadIdx.x; i < rows; i += T::THREADS) fetched[i] = order[shard_of.order + row0 + i];
        __syncthreads();
        if constexpr (!Inputs::HAS_DELTAS) inputs.fetch(own, fetched);
        if (is_first) {
            pdl_wait_and_trigger();
            for (int l = 1; l <= layer_count; ++l)
                for (int j = threadIdx.x; j < levels[l].n; j += T::THREADS)
                    biases[levels[l].first + j] = levels[l].bias >= 0 ? parameters[levels[l].bias + j] : 0.0f;
        }
        in_turn.restart();
        if constexpr (Inputs::HAS_DELTAS) inputs.add_up(own);

        const auto nothing = [](int, int) { return float4(); };
        for (int l = 1; l <= layer_count; ++l) {
            const TensorRowStepLevel of = levels[l];
            const Components<COMPONENTS> w = in_turn.next(l), y = own.level(l);
            multiply_by_warps<T::WARPS, COMPONENTS, true, false>(
                own.level(l - 1), tile, w, padded_to_step(of.n), padded_to_step(levels[l - 1].n), false, nothing,
                [&](int row, int column, float (&c)[4], const float4&) {
#pragma unroll
                    for (int q = 0; q < 4; ++q)
                        if (column + q % 2 < of.n) c[q] += biases[of.first + column + q % 2];
                    if (l < layer_count) {
                        own.activate(of, row, column, c);
                        y.put(row, column, c[0], c[1]);
                        y.put(row + 8, column, c[2], c[3]);
                    } else {
#pragma unroll
                        for (int q = 0; q < 4; ++q)
                            if (column + q % 2 < of.n) logits[(row + q / 2 * 8) * logits_pitch + column + q % 2] = c[q];
                    }
                });
        }

        const Components<COMPONENTS> deltas = own.level(layer_count);
        for (int i = threadIdx.x; i < COMPONENTS * deltas.stride / 2; i += T::THREADS)
            reinterpret_cast<unsigned*>(deltas.data)[i] = 0;
        __syncthreads();
        losses_of_rows<Loss, Target>(logits, logits_pitch, deltas, outputs, tile, rows, fetched, targets, weights, target_mean,
                                     target_scale, value, weight);

        for (int l = layer_count; l >= 1; --l) {
            const TensorRowStepLevel below = levels[l - 1];
            const Components<COMPONENTS> x = own.level(l - 1), dz = own.level(l);
            __syncthreads();
            if (l < layer_count) in_turn.replace();
            gradient_of_rows(x, below.n, dz, levels[l].n, tile, is_first, of_block + levels[l].partial);
            if (l == 1 && !Inputs::HAS_DELTAS) break;
            if (l == layer_count) __syncthreads();  // x becomes the deltas of layer l - 1
            const Components<COMPONENTS> w = l == layer_count ? in_turn.last(l) : in_turn.next(l);
            multiply_by_warps<T::WARPS, COMPONENTS, true, true>(
                dz, tile, w, padded_to_step(below.n), padded_to_step(levels[l].n), false,
                [&](int row, int column) { return own.slope_of(below, x, row, column); },
                [&](int row, int column, float (&c)[4], const float4& slope) {
                    own.derive(below, slope, column, c);
                    x.put(row, column, c[0], c[1]);
                    x.put(row + 8, column, c[2], c[3]);
                });
        }
        is_first = false;
        __syncthreads();
        if constexpr (Inputs::HAS_DELTAS) {
            inputs.store_deltas(own);
            __syncthreads();
        }
    }
    if (is_first) {  // a batch that ends before the block's rows
        pdl_wait_and_trigger();
        for (int i = threadIdx.x; i < pitch; i += T::THREADS) of_block[i] = 0.0f;
    }
    add_threads_up(step, value, weight, sums, arrived, totals, losses);
}

// The rows of the data set are `data` or `bytes`; the other one is null. What follows them is that of tensor_row_step_of().
template <class Loss, class Target, int COMPONENTS, class Activations, class... Others>
__device__ __forceinline__ void tensor_row_step(const Step* step, int shard, int shards, const int* order,
                                                const float* data, const unsigned char* bytes, float scale,
                                                const float* mean, const float* deviation, Others... others) {
    const InputsOfData inputs = {data, bytes, scale, mean, deviation};
    tensor_row_step_of<Loss, Target, COMPONENTS, Activations>(inputs, step, shard, shards, order, others...);
}

// Behind a first layer apart.
template <class Loss, class Target, int COMPONENTS, class Activations, class... Others>
__device__ __forceinline__ void tensor_row_step_behind(const Step* step, int shard, int shards, const int* order,
                                                       const float* input_sums, int input_parts, int capacity,
                                                       uint16_t* deltas, int delta_rows, const float* parameters,
                                                       Others... others) {
    const SumsOfInputLayer inputs = {input_sums, input_parts, capacity, parameters, deltas, delta_rows};
    tensor_row_step_of<Loss, Target, COMPONENTS, Activations>(inputs, step, shard, shards, order, parameters, others...);
}

}  // namespace mlpgpu
