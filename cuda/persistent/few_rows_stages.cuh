// The persistent kernel of few rows: its layers, how their weights are cut into tiles, and the stages of a step, of which each
// block works out its own once.
#pragma once

#include "common/integers.cuh"
#include "common/portable.cuh"

namespace mlpgpu {

// A layer as the host describes it (persistent/few_rows.py). Offsets into shared memory count floats.
struct FewRowsLayer {
    int n_in, rows, n;  // `rows` of the weight matrix, of which the biases are the last one; its columns
    int parameters;     // offset of the weight matrix in the flat arrays
    int activation, saves_z, is_trained;
    int row_slices, column_slices;
    int z, dx;  // offsets of the messages of even steps; those of odd ones follow
    int weights, pitch;  // the tile in shared memory: (rows, pitch), where the columns beyond the tile's hold 0
    int slots, slot_pitch;  // its slots there, or -1 where they stay in the flat arrays
    int inputs, dz, factors;  // (rows or columns, ROWS)
    int dropout;
    uint32_t least;
    float keep;
};

// A block's tile of a layer.
struct FewRowsTile {
    int row_slice, column_slice, first_row, rows, first_column, columns;
    int input_rows;    // those that are no biases'
    int column_shift;  // a warp's columns or more
    bool is_mine;
};

// A stage of a step: what a block receives, then what it multiplies and sends, then what else it does. Numbers that are
// received, and outputs of a product, have 1 << shift threads, at least as many as there are.
struct FewRowsStage {
    enum Then { NOTHING, FETCH, LOSS, UPDATE };
    int layer, then;
    bool is_skipped;

    // Number i of row r is the sum of `terms` messages, `pitch` words apart, from words + r · row_pitch + i on.
    int words, words_of_parity, row_pitch, count, shift, terms, pitch;
    int log_parts;                // threads that share a sum
    int column;                   // of number 0 in the layer
    int h, h_pitch, h_row_pitch;  // where dropout(f(z)) goes in shared memory, by i and r, or -1
    int factors, first, end;      // where f'(z) · dropout goes, of numbers from `first` to `end`, or -1
    int dz;                       // where deltas times these factors go, or -1 for sums that are z

    // Sums over `inputs` elements e of x (e, ROWS) times w[o · to_output + e · to_input] are sent to sent + r · sent_pitch + o.
    int x, x_of_parity, w, to_output, to_input, outputs, output_shift, log_groups, inputs, sent, sent_of_parity, sent_pitch;
};

struct FewRowsBlock {
    static constexpr int THREADS = 512, LOG_THREADS = 9, WARPS = THREADS / WARP;
};

// What a block knows of a network; all of it lies in shared memory.
template <int ROWS>
struct FewRowsStages {
    static constexpr int LOG_THREADS = FewRowsBlock::LOG_THREADS, LOG_ROWS = ROWS == 8 ? 3 : ROWS / 2;
    static_assert(1 << LOG_THREADS == FewRowsBlock::THREADS && 1 << LOG_ROWS == ROWS);

    const FewRowsLayer* layers;
    FewRowsTile* tiles;
    FewRowsStage* stages;
    int last;    // number of the last layer
    int logits;  // offset of the last layer's outputs (ROWS, n)

    static __device__ __forceinline__ int shift_of(int count) {
        int shift = 0;
        while (1 << shift < count) ++shift;
        return shift;
    }
    // As many threads as share outputs or columns, a warp at least.
    static __device__ __forceinline__ int shared_by(int count) { return min(max(shift_of(count), 5), LOG_THREADS); }

    __device__ __forceinline__ void find_tile(int l) const {
        const FewRowsLayer& layer = layers[l];
        FewRowsTile& t = tiles[l];
        t.is_mine = static_cast<int>(blockIdx.x) < layer.row_slices * layer.column_slices;
        t.row_slice = blockIdx.x / layer.column_slices, t.column_slice = blockIdx.x % layer.column_slices;
        t.first_row = layer.rows * t.row_slice / layer.row_slices;
        t.rows = layer.rows * (t.row_slice + 1) / layer.row_slices - t.first_row;
        t.first_column = layer.n * t.column_slice / layer.column_slices;
        t.columns = layer.n * (t.column_slice + 1) / layer.column_slices - t.first_column;
        t.input_rows = max(0, min(t.rows, layer.n_in - t.first_row));
        t.column_shift = shared_by(t.columns);
    }

    // Forward stages of the layers, each before one that fetches a batch or finds factors; the loss; backward stages.
    __device__ __forceinline__ int count() const { return 3 * last + 4; }
    __device__ __forceinline__ void find_stage(int s) const {
        const int l = s < 2 * last + 2 ? s / 2 : s == 2 * last + 2 ? last : 3 * last + 3 - s;
        FewRowsStage& g = stages[s];
        g = {};
        g.layer = l, g.h = g.dz = g.factors = -1;
        if (s >= 2 * last + 2) {
            g.is_skipped = !tiles[l].is_mine;
            s == 2 * last + 2 ? find_loss(g) : find_backward(g);
        } else if (s % 2 == 0) {
            g.is_skipped = !tiles[l].is_mine;
            find_forward(g);
        } else if (l == 0) {
            g.then = FewRowsStage::FETCH;
        } else {
            g.layer = l - 1, g.is_skipped = !tiles[l - 1].is_mine;
            const FewRowsTile& t = tiles[l - 1];
            receive_z(g, l - 1, t.first_column, t.columns);
            g.factors = layers[l - 1].factors, g.end = t.columns;
        }
    }
    __device__ __forceinline__ void receive_z(FewRowsStage& g, int l, int first, int count) const {
        const FewRowsLayer& layer = layers[l];
        g.words = layer.z + first, g.words_of_parity = layer.row_slices * ROWS * layer.n, g.row_pitch = layer.n;
        g.count = count, g.shift = shift_of(count), g.terms = layer.row_slices, g.pitch = ROWS * layer.n;
        g.column = first, share(g);
    }
    // A thread has four messages in flight; to add up what several threads received takes a barrier.
    __device__ __forceinline__ void share(FewRowsStage& g) const {
        g.log_parts = min(LOG_THREADS - min(g.shift + LOG_ROWS, LOG_THREADS), shift_of(ceil_div(g.terms, 4)));
    }
    // Groups multiply eight elements or more each, since their sums are then added up.
    __device__ __forceinline__ void group(FewRowsStage& g) const {
        g.output_shift = shared_by(g.outputs);
        g.log_groups = min(LOG_THREADS - g.output_shift, shift_of(ceil_div(g.inputs, 8)));
    }
    __device__ __forceinline__ void find_forward(FewRowsStage& g) const {
        const int l = g.layer;
        const FewRowsLayer& layer = layers[l];
        const FewRowsTile& t = tiles[l];
        if (l > 0) {
            g.layer = l - 1;
            receive_z(g, l - 1, t.first_row, t.input_rows);
            g.h = layer.inputs, g.h_pitch = ROWS, g.h_row_pitch = 1;
        }
        g.x = layer.inputs, g.x_of_parity = l == 0 ? round_up(t.rows, 4) * ROWS : 0, g.inputs = t.rows;
        g.w = layer.weights, g.to_output = 1, g.to_input = layer.pitch;
        g.outputs = t.columns, group(g);
        g.sent = layer.z + t.row_slice * ROWS * layer.n + t.first_column, g.sent_pitch = layer.n;
        g.sent_of_parity = layer.row_slices * ROWS * layer.n;
    }
    __device__ __forceinline__ void find_loss(FewRowsStage& g) const {
        const FewRowsTile& t = tiles[last];
        receive_z(g, last, 0, layers[last].n);
        g.h = logits, g.h_pitch = 1, g.h_row_pitch = layers[last].n;
        g.factors = layers[last].factors, g.first = t.first_column, g.end = t.first_column + t.columns;
        g.then = FewRowsStage::LOSS;
    }
    __device__ __forceinline__ void find_backward(FewRowsStage& g) const {
        const int l = g.layer;
        const FewRowsLayer& layer = layers[l];
        const FewRowsTile& t = tiles[l];
        if (l < last) {
            const FewRowsLayer& above = layers[l + 1];
            g.words = above.dx + t.first_column, g.words_of_parity = above.column_slices * ROWS * above.n_in;
            g.row_pitch = above.n_in, g.count = t.columns, g.shift = shift_of(t.columns);
            g.terms = above.column_slices, g.pitch = ROWS * above.n_in;
            g.dz = layer.dz, g.factors = layer.factors, share(g);
        }
        if (l > 0) {
            g.x = layer.dz, g.inputs = t.columns;
            g.w = layer.weights, g.to_output = layer.pitch, g.to_input = 1;
            g.outputs = t.input_rows, group(g);
            g.sent = layer.dx + t.column_slice * ROWS * layer.n_in + t.first_row, g.sent_pitch = layer.n_in;
            g.sent_of_parity = layer.column_slices * ROWS * layer.n_in;
        }
        g.then = layer.is_trained ? FewRowsStage::UPDATE : FewRowsStage::NOTHING;
    }
};

}  // namespace mlpgpu
