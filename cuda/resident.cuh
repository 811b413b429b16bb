// Training for many steps in one launch: weights, optimizer slots and activations stay on the chip.
//
// Every layer's weights, with the biases as their last line, are cut into tiles, one for each block, which
// keeps them and their slots in shared memory and alone updates them.  Every row of the batch has one block
// that does what lies between products: activations, dropout, the loss.  A step goes to and fro:
//
//     tile   Z += X W               a slice of the lines, a slice of the columns, all rows
//     row    h = f(z), loss, dz     one row, all columns
//     tile   dX += dZ Wᵀ, dW, w     as before; W after dX
//
// A layer with few weights is *replicated*: every block that has rows holds a copy of them, so that the row
// does its products by itself, and only dW and the update are left to the tiles, which send the new weights.
//
// Blocks do not wait at barriers of the grid: what one needs of another comes as mail (mail.cuh), tagged with the
// step's number.  Each word has two places that take turns.  That is enough: whoever writes a word again two steps
// later has meanwhile had mail, perhaps by way of others, that its readers sent after they read it.
//
// All sums have a fixed order.  The blocks must run at once: the launch is cooperative.
#pragma once

#include "loss.cuh"
#include "mail.cuh"
#include "philox.cuh"
#include "update.cuh"

namespace mlpgpu {

constexpr int RESIDENT_THREADS = 512, RESIDENT_WARPS = RESIDENT_THREADS / WARP;

// How many neighbouring lanes share each of so many sums of so many terms: a power of two.
__host__ __device__ constexpr int lanes_for(int sums, int terms) {
    int lanes = 1;
    while (2 * lanes <= WARP && 2 * lanes <= terms && 2 * lanes * sums <= RESIDENT_THREADS) lanes *= 2;
    return lanes;
}

// COUNT sums of TERMS terms each, by all threads of the block: part(i, lane, lanes) gives a lane's share of sum
// i, and use(i, sum) takes it.
template <int COUNT, int TERMS, class Part, class Use>
__device__ __forceinline__ void sum_by_lanes(Part part, Use use) {
    constexpr int LANES = lanes_for(COUNT, TERMS), SUMS = RESIDENT_THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    for (int first = 0; first < COUNT; first += SUMS) {
        const int i = first + threadIdx.x / LANES;
        float sum = i < COUNT ? part(i, lane, LANES) : 0.0f;
        for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(WARP_ALL, sum, offset);
        if (i < COUNT && lane == 0) use(i, sum);
    }
}

// --- the network's shape ---

// Where the random words of a dropout come from: the same as for `dropout` in rows.cuh.
struct DropoutKey {
    uint64_t seed, purpose, step;
};

template <uint64_t LAYER, uint64_t THRESHOLD, uint32_t KEEP>  // KEEP: the bits of 1 / (1 - rate)
struct Dropped {
    static __device__ __forceinline__ PhiloxBlock words(const DropoutKey& key, int64_t element) {
        return philox(key.seed, key.purpose, element / 4, key.step, LAYER, 0);
    }
    static __device__ __forceinline__ float apply(const PhiloxBlock& words, int lane, float x) {
        const uint64_t low = lane & 1 ? words.word[1] : words.word[0], high = lane & 1 ? words.word[3] : words.word[2];
        return keep_or_drop(lane & 2 ? high : low, THRESHOLD, __uint_as_float(KEEP), x);
    }
    static __device__ __forceinline__ float element(const DropoutKey& key, int64_t at, float x) {
        return apply(words(key, at), static_cast<int>(at % 4), x);
    }
};

struct NotDropped {
    static __device__ __forceinline__ PhiloxBlock words(const DropoutKey&, int64_t) { return {}; }
    static __device__ __forceinline__ float apply(const PhiloxBlock&, int, float x) { return x; }
    static __device__ __forceinline__ float element(const DropoutKey&, int64_t, float x) { return x; }
};

// A dense layer: its weights are LINES by N_OUT, cut into LINE_SLICES by COLUMN_SLICES tiles, which the blocks
// from FIRST_BLOCK on hold, one each.  Slices of lines begin at multiples of four lines, a *quad*.
template <int N_IN_, int N_OUT_, bool HAS_BIAS_, class Activation_, bool SAVES_Z_, class Dropout_, bool IS_REPLICATED_,
          int LINE_SLICES_, int COLUMN_SLICES_, int FIRST_BLOCK_>
struct ResidentDense {
    static constexpr int N_IN = N_IN_, N_OUT = N_OUT_, LINES = N_IN + HAS_BIAS_;
    static constexpr bool HAS_BIAS = HAS_BIAS_, SAVES_Z = SAVES_Z_, IS_REPLICATED = IS_REPLICATED_;
    static constexpr int LINE_SLICES = LINE_SLICES_, COLUMN_SLICES = COLUMN_SLICES_, FIRST_BLOCK = FIRST_BLOCK_;
    using Activation = Activation_;
    using Dropout = Dropout_;

    static constexpr int ALL_QUADS = ceil_div(LINES, 4);
    static constexpr int QUADS = ceil_div(ALL_QUADS, LINE_SLICES), COLUMNS = ceil_div(N_OUT, COLUMN_SLICES);
    // In shared memory: pitches that are odd multiples of four spread neighbouring quads over all banks.
    static constexpr int PITCH = round_up(COLUMNS, 4);          // of a line of a tile, and of a row of its dz
    static constexpr int QUAD_PITCH = 4 * PITCH + 4;            // of four lines of a tile
    static constexpr int TILE = QUADS * QUAD_PITCH;             // floats of a tile
    static constexpr int INPUT_PITCH = 4 * (QUADS | 1);         // of a row of the tile's inputs
    static constexpr int COPY_PITCH = N_OUT | 1;                // of a line of a replicated layer's copy
};

// The layers, for at most ROWS rows a batch on BLOCKS blocks; inputs may be standardized and dropped before.
template <int ROWS_, int BLOCKS_, bool IS_STANDARDIZED_, class InputDropout_, class... Layers>
struct ResidentNetwork {
    static constexpr int ROWS = ROWS_, BLOCKS = BLOCKS_, LAST = sizeof...(Layers) - 1;
    static constexpr int OWN_ROWS = ceil_div(ROWS, BLOCKS);  // the most rows of a block: every BLOCKS-th
    static constexpr bool IS_STANDARDIZED = IS_STANDARDIZED_;
    using InputDropout = InputDropout_;

    template <int I, class First, class... Rest>
    struct Pick : Pick<I - 1, Rest...> {};
    template <class First, class... Rest>
    struct Pick<0, First, Rest...> {
        using Type = First;
    };
    template <int L>
    using Layer = typename Pick<L, Layers...>::Type;
};

// The tile of a layer that a block has; without one it has no lines.
struct ResidentTile {
    bool is_mine;
    int line_slice, column_slice;
    int first_line, lines, first_column, columns;
};

template <class T>
__device__ __forceinline__ ResidentTile tile_of(int block, int blocks) {
    const int place = (block + blocks - T::FIRST_BLOCK) % blocks;
    const int k = place / T::COLUMN_SLICES, c = place % T::COLUMN_SLICES;
    if (k >= T::LINE_SLICES) return {};
    const int line = T::ALL_QUADS * k / T::LINE_SLICES * 4, column = T::N_OUT * c / T::COLUMN_SLICES;
    const int next_line = min(T::ALL_QUADS * (k + 1) / T::LINE_SLICES * 4, T::LINES);
    const int next_column = T::N_OUT * (c + 1) / T::COLUMN_SLICES;
    return {true, k, c, line, next_line - line, column, next_column - column};
}

// --- the kernel ---

template <class Input>
struct ResidentData {
    const int* order;
    const Input* inputs;
    float scale;                       // of inputs
    const float *mean, *deviation;     // of standardized inputs, or null
    const float* weights;              // of rows, or null
    const float *target_mean, *target_scale;
};

// A batch to come.
struct Batch {
    uint32_t tag;   // of its step
    int64_t step;   // since training began
    int64_t first;  // place of its first row in the order
    int rows;       // 0 after the last batch
};

// How inputs come into shared memory: each block fetches its tile's slice of the rows through registers, where they
// are scaled, standardized and dropped.
template <class Kernel>
struct OwnInputs {
    using Net = typename Kernel::Network;
    using T = typename Net::template Layer<0>;
    using Input = typename Kernel::InputType;
    static constexpr int VECTOR = T::N_IN % 4 == 0 ? 4 : 1;  // rows of the data are aligned to it
    static constexpr int ROW_ITEMS = 4 * T::QUADS / VECTOR;
    static constexpr int ITEMS = ceil_div(Kernel::ROWS * ROW_ITEMS, RESIDENT_THREADS);  // of a thread
    Input item[ITEMS][VECTOR];

    // What is beyond the batch or the slice is loaded from inside, so that no load waits for a branch.
    __device__ __forceinline__ void fetch(const Kernel& kernel, const Batch& its) {
        const ResidentTile t = kernel.template tile<0>();
        const int lines = Kernel::data_lines(t);
        if (its.rows == 0 || lines <= 0) return;
        const int* const from = kernel.places(its.tag);
        const Input* const slice = kernel.data.inputs + t.first_line;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int number = threadIdx.x + i * RESIDENT_THREADS, row = min(number / ROW_ITEMS, its.rows - 1);
            const int line = min(number % ROW_ITEMS * VECTOR, lines - VECTOR);
            const Input* const at = slice + static_cast<int64_t>(from[row]) * T::N_IN + line;
            if constexpr (VECTOR == 4) load_four(at, item[i]);
            else item[i][0] = *at;
        }
    }

    __device__ __forceinline__ void stage(const Kernel& kernel, const Batch& its) const {
        const ResidentTile t = kernel.template tile<0>();
        const int lines = Kernel::data_lines(t);
        const auto& data = kernel.data;
        const DropoutKey key = {kernel.key.seed, kernel.key.purpose, static_cast<uint64_t>(its.step)};
        float* const x = kernel.template inputs<0>(its.tag);
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
template <class Kernel>
struct AsyncInputs {
    using T = typename Kernel::Network::template Layer<0>;
    static_assert(T::N_IN % 4 == 0);

    __device__ __forceinline__ void fetch(const Kernel& kernel, const Batch& its) {
        const ResidentTile t = kernel.template tile<0>();
        const int lines = Kernel::data_lines(t);
        const int* const from = kernel.places(its.tag);
        const float* const slice = kernel.data.inputs + t.first_line;
        float* const x = kernel.template inputs<0>(its.tag);
#pragma unroll 4
        for (int number = threadIdx.x; number < its.rows * T::QUADS; number += RESIDENT_THREADS) {
            const int row = number / T::QUADS, line = number % T::QUADS * 4;
            const float* const at = slice + static_cast<int64_t>(from[row]) * T::N_IN + line;
            if (line < lines) copy_four(x + row * T::INPUT_PITCH + line, at);
        }
    }
    __device__ __forceinline__ void stage(const Kernel&, const Batch&) const {}
    // Before a barrier that comes before the rows are read.
    __device__ __forceinline__ void wait() const { wait_for_copies(); }
};

template <class Net, class Loss, template <class> class Target, class Source, class Rule, class Input,
          template <class> class Inputs>
struct Resident {
    using Network = Net;
    using InputType = Input;
    static constexpr int ROWS = Net::ROWS, BLOCKS = Net::BLOCKS, LAST = Net::LAST, OWN_ROWS = Net::OWN_ROWS;
    static constexpr int THREADS = RESIDENT_THREADS;
    // A product's rows go to the lanes of a warp, one or two each; what warps are left over share the lines.
    static constexpr int LANE_ROWS = ROWS > WARP ? 2 : 1, ROW_WARPS = ceil_div(ROWS, LANE_ROWS * WARP);
    template <int L>
    using Layer = typename Net::template Layer<L>;
    static constexpr int TARGETS = Target<const float*>::count(Layer<LAST>::N_OUT);  // of a row

    // Into how many parts the warps cut a tile's lines for Z.
    template <class T>
    static __host__ __device__ constexpr int line_parts() {
        return smallest(T::QUADS, largest(1, RESIDENT_WARPS / ROW_WARPS));
    }
    // For dW half the block's threads go to a tile's quads and to groups of rows: so many lanes, and groups.
    static constexpr int HALF = THREADS / 2;
    template <class T>
    static __host__ __device__ constexpr int quad_lanes() {
        int lanes = 1;
        while (lanes < T::QUADS) lanes *= 2;
        return lanes;
    }
    template <class T>
    static __host__ __device__ constexpr int groups() {
        return smallest(ceil_div(ROWS, 4), HALF / quad_lanes<T>());
    }
    // Shared memory, in floats: one layer after the other, then what belongs to the batch.
    template <int L>
    struct Place {
        using T = Layer<L>;
        static constexpr int begin() {
            if constexpr (L == 0) return 0;
            else return Place<L - 1>::END;
        }
        static constexpr int OUTPUTS = round_up(OWN_ROWS * T::N_OUT, 4);
        static constexpr int WEIGHTS = begin();                                 // the tile
        static constexpr int SLOTS = WEIGHTS + T::TILE;                         // (slots, tile)
        static constexpr int INPUTS = SLOTS + Rule::SLOTS * T::TILE;            // of the first layer two, in turn
        static constexpr int DZ = INPUTS + (L == 0 ? 2 : 1) * ROWS * T::INPUT_PITCH;
        static constexpr int COPY = DZ + ROWS * T::PITCH;                       // all weights, if replicated
        static constexpr int H = COPY + (T::IS_REPLICATED ? round_up(T::LINES * T::COPY_PITCH, 4) : 0);
        static constexpr int SAVED = H + OUTPUTS;                               // of own rows, as is H and DELTA
        static constexpr int DELTA = SAVED + OUTPUTS;
        static constexpr int END = DELTA + OUTPUTS;

        // What threads leave each other before it is added up: of Z for one layer at a time, of dW for all at once.
        static __host__ __device__ constexpr int begin_dw() {
            if constexpr (L == 0) return 0;
            else return Place<L - 1>::DW_END;
        }
        static constexpr int Z = line_parts<T>() * ROWS * (T::PITCH + 4);
        static constexpr int DW = begin_dw(), DW_END = DW + groups<T>() * T::TILE;
        static constexpr int MOST_Z = L == 0 ? Z : largest(Z, Place<(L > 0 ? L - 1 : 0)>::MOST_Z);
    };
    static constexpr int PLACES = Place<LAST>::END;                             // (2, rows): in the data, as ints
    static constexpr int ROW_WEIGHTS = PLACES + round_up(2 * ROWS, 4);          // (2, rows)
    static constexpr int ROW_TARGETS = ROW_WEIGHTS + round_up(2 * ROWS, 4);     // (2, own rows, targets)
    static constexpr int SUMS = ROW_TARGETS + round_up(2 * OWN_ROWS * TARGETS, 4);
    static constexpr int SHARED_FLOATS = SUMS + largest(Place<LAST>::MOST_Z, Place<LAST>::DW_END);

    // Mail, in words, each for even and odd steps.
    template <int L>
    struct Mail {
        using T = Layer<L>;
        static constexpr int64_t begin() {
            if constexpr (L == 0) return 0;
            else return Mail<L - 1>::END;
        }
        static constexpr bool IS_TILED = !T::IS_REPLICATED;
        static constexpr int64_t Z = begin();                                   // (2, rows, line slices, n_out)
        static constexpr int64_t DX = Z + (IS_TILED ? 2ll * ROWS * T::LINE_SLICES * T::N_OUT : 0);
        static constexpr int64_t H = DX + (IS_TILED && L > 0 ? 2ll * ROWS * T::COLUMN_SLICES * T::N_IN : 0);
        static constexpr int64_t DZ = H + (L < LAST ? 2ll * ROWS * T::N_OUT : 0);  // (2, rows, n_out), as is H
        static constexpr int64_t COPY = DZ + 2ll * ROWS * T::N_OUT;             // (2, lines, n_out)
        static constexpr int64_t END = COPY + (T::IS_REPLICATED ? 2ll * T::LINES * T::N_OUT : 0);
    };
    static constexpr int64_t MAIL_WORDS = Mail<LAST>::END;

    ResidentData<Input> data;
    Source targets;
    uint64_t* mail;
    float* shared;
    DropoutKey key;  // of the step
    uint32_t tag;    // of the step; mail begins with another
    int rows;        // of the step's batch

    __device__ __forceinline__ int parity() const { return tag & 1; }
    template <int L>
    __device__ __forceinline__ ResidentTile tile() const {
        return tile_of<Layer<L>>(blockIdx.x, BLOCKS);
    }
    template <int L>
    __device__ __forceinline__ float* inputs(uint32_t its_tag) const {
        return shared + Place<L>::INPUTS + (L == 0 ? (its_tag & 1) * ROWS * Layer<L>::INPUT_PITCH : 0);
    }
    // A place of mail whose words for one step are (count, …).
    __device__ __forceinline__ uint64_t* words(int64_t first, int64_t count) const {
        return mail + first + parity() * count;
    }
    __device__ __forceinline__ bool has_rows() const { return static_cast<int>(blockIdx.x) < rows; }
    // The row of the batch that is a block's own number `i`.
    __device__ __forceinline__ int own_row(int i) const { return blockIdx.x + i * BLOCKS; }

    // --- tiles ---

    // The tile's part of Z.  All lanes of a warp read the same weights, each for its own rows.
    template <int L>
    __device__ __forceinline__ void sum_z() const {
        using T = Layer<L>;
        constexpr int P = T::PITCH, PARTS = line_parts<T>();
        if (!tile<L>().is_mine) return;
        const float* const w = shared + Place<L>::WEIGHTS;
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = warp / ROW_WARPS;
        for (int row_warp = warp % ROW_WARPS; row_warp < ROW_WARPS && part < PARTS; row_warp += RESIDENT_WARPS) {
            const int first = row_warp * LANE_ROWS * WARP + lane;  // and WARP further, if there are two
            const float* x[LANE_ROWS];
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i)
                x[i] = inputs<L>(tag) + min(first + i * WARP, ROWS - 1) * T::INPUT_PITCH;
            float sum[LANE_ROWS][P] = {};
#pragma unroll 1  // instructions come faster from a loop
            for (int quad = part; quad < T::QUADS; quad += PARTS) {
                float four[LANE_ROWS][4];
#pragma unroll
                for (int i = 0; i < LANE_ROWS; ++i) load_four(x[i] + 4 * quad, four[i]);
#pragma unroll
                for (int line = 0; line < 4; ++line) {
                    float weight[P];
#pragma unroll
                    for (int c = 0; c < P; c += 4) load_four(w + quad * T::QUAD_PITCH + line * P + c, weight + c);
#pragma unroll
                    for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                        for (int c = 0; c < P; ++c) sum[i][c] = fmaf(four[i][line], weight[c], sum[i][c]);
                }
            }
            float* const to = shared + SUMS + (part * ROWS + first) * (P + 4);  // (parts, rows, P + 4)
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                for (int c = 0; c < P; c += 4)
                    if (first + i * WARP < ROWS) store_four(to + i * WARP * (P + 4) + c, sum[i] + c);
        }
    }

    // The parts added up and sent to the rows' blocks.
    template <int L>
    __device__ __forceinline__ void send_z() const {
        using T = Layer<L>;
        constexpr int P = T::PITCH;
        const ResidentTile t = tile<L>();
        if (!t.is_mine) return;
        const float* const sums = shared + SUMS;
        uint64_t* const z = words(Mail<L>::Z, static_cast<int64_t>(ROWS) * T::LINE_SLICES * T::N_OUT);
        for (int i = threadIdx.x; i < rows * P; i += THREADS) {  // neighbouring words by neighbouring lanes
            const int row = i / P, column = i % P;
            float sum = sums[row * (P + 4) + column];
#pragma unroll
            for (int part = 1; part < line_parts<T>(); ++part) sum += sums[(part * ROWS + row) * (P + 4) + column];
            const int64_t to = (static_cast<int64_t>(row) * T::LINE_SLICES + t.line_slice) * T::N_OUT + t.first_column;
            if (column < t.columns) send(z + to + column, sum, tag);
        }
    }

    // Mail for a tile: its inputs, which are the rows' outputs of the layer below.  The line of ones is always there.
    template <int L>
    __device__ __forceinline__ auto inputs_mail() const {
        using T = Layer<L>;
        constexpr int WIDTH = 4 * T::QUADS;
        const ResidentTile t = tile<L>();
        const int lines = min(t.lines, T::N_IN - t.first_line);
        const uint64_t* const h = words(Mail<L - 1>::H, static_cast<int64_t>(ROWS) * T::N_IN) + t.first_line;
        float* const x = inputs<L>(tag);
        return letters<THREADS, ROWS * WIDTH>(
            lines > 0 ? rows * WIDTH : 0, tag,
            [=](int i) { return h + i / WIDTH * static_cast<int64_t>(T::N_IN) + min(i % WIDTH, lines - 1); },
            [=](int i, float value) {
                if (i % WIDTH < lines) x[i / WIDTH * T::INPUT_PITCH + i % WIDTH] = value;
            });
    }

    // Mail for a tile: its columns of the rows' dZ.
    template <int L>
    __device__ __forceinline__ auto dz_mail() const {
        using T = Layer<L>;
        constexpr int N = T::COLUMNS;
        const ResidentTile t = tile<L>();
        const uint64_t* const dz = words(Mail<L>::DZ, static_cast<int64_t>(ROWS) * T::N_OUT) + t.first_column;
        float* const to = shared + Place<L>::DZ;
        return letters<THREADS, ROWS * N>(
            t.is_mine ? rows * N : 0, tag,
            [=](int i) { return dz + i / N * static_cast<int64_t>(T::N_OUT) + min(i % N, t.columns - 1); },
            [=](int i, float value) {
                if (i % N < t.columns) to[i / N * T::PITCH + i % N] = value;
            });
    }

    // The tile's part of dX = dZ Wᵀ, sent to the rows' blocks.
    template <int L>
    __device__ __forceinline__ void send_dx() const {
        using T = Layer<L>;
        const ResidentTile t = tile<L>();
        if (!t.is_mine) return;
        const float* const w = shared + Place<L>::WEIGHTS;
        const float* const dz = shared + Place<L>::DZ;
        uint64_t* const dx = words(Mail<L>::DX, static_cast<int64_t>(ROWS) * T::COLUMN_SLICES * T::N_IN);
        const int lines = min(t.lines, T::N_IN - t.first_line);
        constexpr int WIDTH = 4 * T::QUADS;
        for (int i = threadIdx.x; i < rows * WIDTH; i += THREADS) {
            const int row = i / WIDTH, line = i % WIDTH;
            if (line >= lines) continue;
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < T::PITCH; c += 4) {
                float delta[4], weight[4];
                load_four(dz + row * T::PITCH + c, delta);
                load_four(w + line / 4 * T::QUAD_PITCH + line % 4 * T::PITCH + c, weight);
#pragma unroll
                for (int j = 0; j < 4; ++j) sum = fmaf(delta[j], weight[j], sum);
            }
            const int64_t to = (static_cast<int64_t>(row) * T::COLUMN_SLICES + t.column_slice) * T::N_IN;
            send(dx + to + t.first_line + line, sum, tag);
        }
    }

    // A thread's number, from which layers count in turn: of two, each has a half of the block to itself.
    template <int L>
    __device__ __forceinline__ static int turned_thread() {
        return (threadIdx.x + L % 2 * HALF) % THREADS;
    }

    // dW of the tile, in groups of rows: a thread takes four lines of every groups-th row.
    template <int L>
    __device__ __forceinline__ void sum_dw() const {
        using T = Layer<L>;
        constexpr int P = T::PITCH, GROUPS = groups<T>(), LANES = quad_lanes<T>();
        const int quad = turned_thread<L>() % LANES, group = turned_thread<L>() / LANES;
        if (!tile<L>().is_mine || group >= GROUPS || quad >= T::QUADS) return;
        const float* const x = inputs<L>(tag) + 4 * quad;
        const float* const dz = shared + Place<L>::DZ;
        float sum[4][P] = {};
#pragma unroll 2
        for (int row = group; row < rows; row += GROUPS) {
            float four[4], delta[P];
            load_four(x + row * T::INPUT_PITCH, four);
#pragma unroll
            for (int c = 0; c < P; c += 4) load_four(dz + row * P + c, delta + c);
#pragma unroll
            for (int line = 0; line < 4; ++line)
#pragma unroll
                for (int c = 0; c < P; ++c) sum[line][c] = fmaf(four[line], delta[c], sum[line][c]);
        }
        float* const to = shared + SUMS + Place<L>::DW + group * T::TILE + quad * T::QUAD_PITCH;
#pragma unroll
        for (int line = 0; line < 4; ++line)
#pragma unroll
            for (int c = 0; c < P; c += 4) store_four(to + line * P + c, sum[line] + c);
    }

    // The groups' sums added up, and the optimizer's rule.  `scale` divides by the batch's weight.
    template <int L>
    __device__ __forceinline__ void update(float scale, const float* rates) const {
        using T = Layer<L>;
        const ResidentTile t = tile<L>();
        if (!t.is_mine) return;
        float* const w = shared + Place<L>::WEIGHTS;
        float* const slots = shared + Place<L>::SLOTS;
        const float* const sums = shared + SUMS + Place<L>::DW;
        for (int i = turned_thread<L>(); i < T::QUADS * T::PITCH; i += THREADS) {  // four columns of a line
            const int line = i / (T::PITCH / 4), column = i % (T::PITCH / 4) * 4;
            if (line >= t.lines) continue;
            const int at = line / 4 * T::QUAD_PITCH + line % 4 * T::PITCH + column;
            float g[4];
            load_four(sums + at, g);
#pragma unroll
            for (int group = 1; group < groups<T>(); ++group) {
                float more[4];
                load_four(sums + group * T::TILE + at, more);
#pragma unroll
                for (int c = 0; c < 4; ++c) g[c] += more[c];
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (column + c >= t.columns) continue;
                float slot[Rule::SLOTS > 0 ? Rule::SLOTS : 1];
                for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = slots[s * T::TILE + at + c];
                step_parameter<Rule>(w[at + c], slot, g[c], scale, rates);
                for (int s = 0; s < Rule::SLOTS; ++s) slots[s * T::TILE + at + c] = slot[s];
                if constexpr (T::IS_REPLICATED) {
                    const int to = (t.first_line + line) * T::N_OUT + t.first_column + column + c;
                    send(words(Mail<L>::COPY, T::LINES * T::N_OUT) + to, w[at + c], tag);
                }
            }
        }
    }

    // --- rows ---

    // Mail for rows: the weights of a replicated layer as the step before left them.
    template <int L>
    __device__ __forceinline__ auto copy_mail() const {
        using T = Layer<L>;
        constexpr int COUNT = T::LINES * T::N_OUT;
        const uint64_t* const from = mail + Mail<L>::COPY + (parity() ^ 1) * COUNT;
        float* const copy = shared + Place<L>::COPY;
        return letters<THREADS, COUNT>(
            COUNT, tag - 1, [=](int i) { return from + i; },
            [=](int i, float value) { copy[i / T::N_OUT * T::COPY_PITCH + i % T::N_OUT] = value; });
    }

    template <int L, class Work, class... Kinds>
    __device__ __forceinline__ void receive_copies_beside(Work work, Kinds... kinds) const {
        if constexpr (L == 0) {
            if constexpr (sizeof...(Kinds) > 0) receive_beside(work, kinds...);
            else work();
        } else if constexpr (Layer<L>::IS_REPLICATED) {
            receive_copies_beside<L - 1>(work, copy_mail<L>(), kinds...);
        } else {
            receive_copies_beside<L - 1>(work, kinds...);
        }
    }

    // h = dropout(f(z)) of the block's own rows.
    template <int L>
    __device__ __forceinline__ void rows_forward() const {
        using T = Layer<L>;
        constexpr int N = T::N_OUT, TERMS = T::IS_REPLICATED ? T::N_IN : T::LINE_SLICES;
        float* const h = shared + Place<L>::H;
        float* const saved = shared + Place<L>::SAVED;
        const auto part = [&](int i, int lane, int lanes) {
            if (own_row(i / N) >= rows) return 0.0f;
            if constexpr (T::IS_REPLICATED) {
                const float* const below = shared + Place<L - 1>::H + i / N * T::N_IN;
                const float* const w = shared + Place<L>::COPY + i % N;
                float sum = 0.0f;
#pragma unroll 8
                for (int k = lane; k < T::N_IN; k += lanes) sum = fmaf(below[k], w[k * T::COPY_PITCH], sum);
                return sum;
            } else {
                constexpr int MOST = ceil_div(TERMS, lanes_for(OWN_ROWS * N, TERMS));
                const int64_t first = static_cast<int64_t>(own_row(i / N)) * TERMS + lane * MOST;
                const uint64_t* const z = words(Mail<L>::Z, static_cast<int64_t>(ROWS) * TERMS * N) + first * N + i % N;
                return lane * MOST < TERMS ? receive_sum<MOST>(z, N, min(MOST, TERMS - lane * MOST), tag) : 0.0f;
            }
        };
        sum_by_lanes<OWN_ROWS * N, TERMS>(part, [&](int i, float z) {
            const int64_t at = static_cast<int64_t>(own_row(i / N)) * N + i % N;
            if (own_row(i / N) >= rows) return;
            if constexpr (T::IS_REPLICATED && T::HAS_BIAS)
                z += shared[Place<L>::COPY + T::N_IN * T::COPY_PITCH + i % N];
            const float y = T::Activation::forward(z);
            saved[i] = T::SAVES_Z ? z : y;
            h[i] = T::Dropout::element(key, at, y);
            if constexpr (L < LAST) send(words(Mail<L>::H, static_cast<int64_t>(ROWS) * N) + at, h[i], tag);
        });
    }

    // Each own row's value and weight to `errors` (rows, 2), and its delta by the logits.  A warp takes a row.
    __device__ __forceinline__ void rows_loss(float* errors) const {
        constexpr int N = Layer<LAST>::N_OUT;
        const int lane = threadIdx.x % WARP;
        for (int i = threadIdx.x / WARP; i < OWN_ROWS; i += RESIDENT_WARPS) {
            const int row = own_row(i);
            if (row >= rows) continue;
            const float w = data.weights ? shared[ROW_WEIGHTS + parity() * ROWS + row] : 1.0f;
            float* const delta = shared + Place<LAST>::DELTA + i * N;
            const float* const wanted = shared + ROW_TARGETS + parity() * OWN_ROWS * TARGETS;
            const Target<const float*> target = {wanted, i, N, data.target_mean, data.target_scale};
            const float value = weighted_row<Loss>(shared + Place<LAST>::H + i * N, N, target, w,
                                                   [=](int j, float d) { delta[j] = d; });
            if (lane == 0) errors[2 * row] = value, errors[2 * row + 1] = w;
        }
    }

    // dz of the block's own rows, from the delta by what the layer gives: of the loss, or of the layer above.
    template <int L>
    __device__ __forceinline__ void rows_backward() const {
        using T = Layer<L>;
        using Above = Layer<(L < LAST ? L + 1 : L)>;
        constexpr int N = T::N_OUT, TERMS = L == LAST ? 1 : Above::IS_REPLICATED ? Above::N_OUT : Above::COLUMN_SLICES;
        float* const deltas = shared + Place<L>::DELTA;
        const auto part = [&](int i, int lane, int lanes) {
            if (own_row(i / N) >= rows) return 0.0f;
            if constexpr (L == LAST) {
                return deltas[i];
            } else if constexpr (Above::IS_REPLICATED) {
                const float* const dz = shared + Place<L + 1>::DELTA + i / N * Above::N_OUT;
                const float* const w = shared + Place<L + 1>::COPY + i % N * Above::COPY_PITCH;
                float sum = 0.0f;
#pragma unroll 8
                for (int j = lane; j < Above::N_OUT; j += lanes) sum = fmaf(dz[j], w[j], sum);
                return sum;
            } else {
                constexpr int MOST = ceil_div(TERMS, lanes_for(OWN_ROWS * N, TERMS));
                const int64_t first = static_cast<int64_t>(own_row(i / N)) * TERMS + lane * MOST;
                const int64_t count = static_cast<int64_t>(ROWS) * TERMS * N;
                const uint64_t* const dx = words(Mail<L + 1>::DX, count) + first * N + i % N;
                return lane * MOST < TERMS ? receive_sum<MOST>(dx, N, min(MOST, TERMS - lane * MOST), tag) : 0.0f;
            }
        };
        sum_by_lanes<OWN_ROWS * N, TERMS>(part, [&](int i, float dy) {
            const int64_t at = static_cast<int64_t>(own_row(i / N)) * N + i % N;
            if (own_row(i / N) >= rows) return;
            dy = T::Dropout::element(key, at, dy);
            const float dz = dy * T::Activation::derivative(shared[Place<L>::SAVED + i]);
            deltas[i] = dz;
            send(words(Mail<L>::DZ, static_cast<int64_t>(ROWS) * N) + at, dz, tag);
        });
    }

    // --- the passes ---

    template <int L>
    __device__ __forceinline__ void forward() const {
        if (has_rows()) rows_forward<L>();
        if constexpr (L < LAST) {
            if constexpr (!Layer<L + 1>::IS_REPLICATED) receive(inputs_mail<L + 1>());
            __syncthreads();
            if constexpr (!Layer<L + 1>::IS_REPLICATED) {
                sum_z<L + 1>();
                __syncthreads();
                send_z<L + 1>();
            }
            forward<L + 1>();
        }
    }

    template <int L>
    __device__ __forceinline__ void backward() const {
        if (has_rows()) rows_backward<L>();
        if constexpr (L > 0) {
            if constexpr (!Layer<L>::IS_REPLICATED) receive(dz_mail<L>());
            __syncthreads();
            if constexpr (!Layer<L>::IS_REPLICATED) send_dx<L>();
            backward<L - 1>();
        }
    }

    // What the tiles still lack for dW: dZ of the first layer, which the rows send last, and with it all that
    // replicated layers need.
    template <int L, class... Kinds>
    __device__ __forceinline__ void receive_rest(Kinds... kinds) const {
        if constexpr (L == 0) receive(dz_mail<0>(), kinds...);
        else if constexpr (Layer<L>::IS_REPLICATED) receive_rest<L - 1>(dz_mail<L>(), inputs_mail<L>(), kinds...);
        else receive_rest<L - 1>(kinds...);
    }

    template <int L>
    __device__ __forceinline__ void sum_all_dw() const {
        sum_dw<L>();
        if constexpr (L > 0) sum_all_dw<L - 1>();
    }

    template <int L>
    __device__ __forceinline__ void update_all(float scale, const float* rates) const {
        update<L>(scale, rates);  // the last layer first: copies of it are on their way while the others move
        if constexpr (L > 0) update_all<L - 1>(scale, rates);
    }

    // --- the batch ---

    // What a thread brings of the next batch beside inputs: weights, and targets of own rows.
    struct Fetched {
        float weight[ceil_div(ROWS, THREADS)];
        float target[ceil_div(OWN_ROWS * TARGETS, THREADS)];
    };

    __device__ __forceinline__ const int* places(uint32_t its_tag) const {
        return reinterpret_cast<const int*>(shared + PLACES) + (its_tag & 1) * ROWS;
    }
    // The lines of the tile that are in the data: without the line of ones.
    __device__ __forceinline__ static int data_lines(const ResidentTile& t) {
        return min(t.lines, Layer<0>::N_IN - t.first_line);
    }

    // The places of a batch's rows in the data.
    __device__ __forceinline__ void find_places(const Batch& its) const {
        int* const to = reinterpret_cast<int*>(shared + PLACES) + (its.tag & 1) * ROWS;
        for (int row = threadIdx.x; row < its.rows; row += THREADS) to[row] = data.order[its.first + row];
    }

    __device__ __forceinline__ void fetch(const Batch& its, Fetched& fetched) const {
        const int* const from = places(its.tag);
        if (data.weights)
            for (int i = 0; i < ceil_div(ROWS, THREADS); ++i)
                if (const int row = threadIdx.x + i * THREADS; row < its.rows)
                    fetched.weight[i] = data.weights[from[row]];
        for (int i = 0; i < ceil_div(OWN_ROWS * TARGETS, THREADS); ++i) {
            const int item = threadIdx.x + i * THREADS, row = own_row(item / TARGETS);
            if (item < OWN_ROWS * TARGETS && row < its.rows)
                fetched.target[i] = texel(targets, static_cast<int64_t>(from[row]) * TARGETS + item % TARGETS);
        }
    }

    __device__ __forceinline__ void stage(const Batch& its, const Fetched& fetched) const {
        const int its_parity = its.tag & 1;
        if (data.weights)
            for (int i = 0; i < ceil_div(ROWS, THREADS); ++i)
                if (const int row = threadIdx.x + i * THREADS; row < its.rows)
                    shared[ROW_WEIGHTS + its_parity * ROWS + row] = fetched.weight[i];
        for (int i = 0; i < ceil_div(OWN_ROWS * TARGETS, THREADS); ++i) {
            const int item = threadIdx.x + i * THREADS;
            if (item < OWN_ROWS * TARGETS && own_row(item / TARGETS) < its.rows)
                shared[ROW_TARGETS + its_parity * OWN_ROWS * TARGETS + item] = fetched.target[i];
        }
    }

    // 1 / the batch's summed weight, the same in every thread and block.
    __device__ __forceinline__ float inverse_row_weight() const {
        double sum = rows;
        if (data.weights) {
            sum = 0.0;
            const float* const weights = shared + ROW_WEIGHTS + parity() * ROWS;
            for (int row = threadIdx.x % WARP; row < rows; row += WARP) sum += weights[row];
            sum = warp_sum(sum);
        }
        return static_cast<float>(sum > 0.0 ? 1.0 / sum : 0.0);
    }

    // --- the state ---

    // Calls visit(place in the tile, place in the flat arrays) for the tile's weights.
    template <int L, class Visit>
    __device__ __forceinline__ void each_weight(Visit visit) const {
        using T = Layer<L>;
        const ResidentTile t = tile<L>();
        for (int i = threadIdx.x; i < t.lines * T::COLUMNS; i += THREADS) {
            const int line = i / T::COLUMNS, column = i % T::COLUMNS;
            const int64_t at = static_cast<int64_t>(t.first_line + line) * T::N_OUT + t.first_column + column;
            if (column < t.columns)
                visit(line / 4 * T::QUAD_PITCH + line % 4 * T::PITCH + column, first_parameter<L>() + at);
        }
    }

    // A layer's biases follow its weights, and so are the last line of one matrix.
    template <int L>
    static __host__ __device__ constexpr int64_t first_parameter() {
        if constexpr (L == 0) return 0;
        else return first_parameter<L - 1>() + static_cast<int64_t>(Layer<L - 1>::LINES) * Layer<L - 1>::N_OUT;
    }
    static constexpr int64_t PARAMETERS =
        first_parameter<LAST>() + static_cast<int64_t>(Layer<LAST>::LINES) * Layer<LAST>::N_OUT;

    template <int L>
    __device__ __forceinline__ void load(const float* parameters, const float* slots) const {
        using T = Layer<L>;
        float* const w = shared + Place<L>::WEIGHTS;
        each_weight<L>([=](int at, int64_t from) {
            w[at] = parameters[from];
            for (int s = 0; s < Rule::SLOTS; ++s) w[(s + 1) * T::TILE + at] = slots[s * PARAMETERS + from];
        });
        const ResidentTile t = tile<L>();
        if (T::HAS_BIAS && t.is_mine && t.first_line + t.lines == T::LINES) {  // the line of ones
            constexpr int ALL = (L == 0 ? 2 : 1) * ROWS;
            for (int row = threadIdx.x; row < ALL; row += THREADS)
                shared[Place<L>::INPUTS + row * T::INPUT_PITCH + t.lines - 1] = 1.0f;
        }
        if constexpr (T::IS_REPLICATED)
            for (int i = threadIdx.x; i < T::LINES * T::N_OUT; i += THREADS) {
                const int at = i / T::N_OUT * T::COPY_PITCH + i % T::N_OUT;
                shared[Place<L>::COPY + at] = parameters[first_parameter<L>() + i];
            }
        if constexpr (L < LAST) load<L + 1>(parameters, slots);
    }

    template <int L>
    __device__ __forceinline__ void store(float* parameters, float* slots) const {
        using T = Layer<L>;
        const float* const w = shared + Place<L>::WEIGHTS;
        each_weight<L>([=](int at, int64_t to) {
            parameters[to] = w[at];
            for (int s = 0; s < Rule::SLOTS; ++s) slots[s * PARAMETERS + to] = w[(s + 1) * T::TILE + at];
        });
        if constexpr (L < LAST) store<L + 1>(parameters, slots);
    }

    // --- all of it ---

    __device__ __forceinline__ void train(Step step, int steps, float* parameters, float* slots, float* errors) {
        for (int i = threadIdx.x; i < SHARED_FLOATS; i += THREADS) shared[i] = 0.0f;  // what pads must be 0
        __syncthreads();
        load<0>(parameters, slots);
        // The batch `ahead` steps later, as far as there are steps.
        const auto batch = [&](int done, int ahead) -> Batch {
            Step its = step;
            its.batch += ahead;
            const int64_t first = static_cast<int64_t>(its.batch) * its.batch_rows;
            return {tag + ahead, step.number + ahead, first, done + ahead < steps ? batch_rows(its) : 0};
        };
        Inputs<Resident> inputs_of;
        Fetched fetched;
        Batch next = batch(0, 0);
        rows = next.rows;
        find_places(next);
        __syncthreads();
        inputs_of.fetch(*this, next);
        fetch(next, fetched);
        inputs_of.stage(*this, next);
        stage(next, fetched);
        find_places(batch(0, 1));
        inputs_of.wait();
        __syncthreads();

        for (int done = 0; done < steps; ++done) {
            key.step = step.number;
            next = batch(done, 1);
            inputs_of.fetch(*this, next);
            fetch(next, fetched);
            sum_z<0>();
            __syncthreads();
            send_z<0>();
            const auto stage_next = [&] {  // while Z is on its way
                inputs_of.stage(*this, next);
                stage(next, fetched);
            };
            if (done > 0 && has_rows()) receive_copies_beside<LAST>(stage_next);
            else stage_next();
            const float scale = inverse_row_weight();
            float rates[COLUMNS];
            for (int i = 0; i < COLUMNS; ++i) rates[i] = schedule[step.run * COLUMNS + i];
            forward<0>();
            __syncthreads();
            rows_loss(errors + 2ll * ROWS * step.run);
            __syncthreads();
            backward<LAST>();
            receive_rest<LAST>();
            __syncthreads();
            find_places(batch(done, 2));
            sum_all_dw<LAST>();
            __syncthreads();
            update_all<LAST>(scale, rates);
            inputs_of.wait();
            __syncthreads();
            tag += 1, step.number += 1, step.run += 1, step.batch += 1;
            rows = next.rows;
        }
        store<0>(parameters, slots);
    }
};

// Trains for `steps` steps from *step on, which are of one epoch.  Each row leaves its value and weight in errors
// (steps of a run, rows, 2).  `tag` goes on from launch to launch, so that no mail of an earlier one is taken.
// Grid: Net::BLOCKS blocks.
template <class Net, class Loss, template <class> class Target, class Source, class Rule, class Input,
          template <class> class Inputs, int SHARED_BYTES, int64_t MAIL_WORDS>
__device__ __forceinline__ void resident(const Step* step, int steps, uint32_t tag, const int* order,
                                         const Input* inputs, float scale, const float* mean, const float* deviation,
                                         Source targets, const float* weights, const float* target_mean,
                                         const float* target_scale, uint64_t seed, uint64_t purpose, float* parameters,
                                         float* slots, uint64_t* mail, float* errors) {
    using Kernel = Resident<Net, Loss, Target, Source, Rule, Input, Inputs>;
    static_assert(Kernel::SHARED_FLOATS * 4 == SHARED_BYTES && Kernel::MAIL_WORDS == MAIL_WORDS,
                  "resident.py lays the kernel's memory out in another way");
    SHARED(float, shared);
    const ResidentData<Input> data = {order, inputs, scale, mean, deviation, weights, target_mean, target_scale};
    Kernel kernel = {data, targets, mail, shared, {seed, purpose, 0}, tag, 0};
    kernel.train(*step, steps, parameters, slots, errors);
}

}  // namespace mlpgpu
