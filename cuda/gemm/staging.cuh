// Epilogue staging: how the sums of gemm/gemm_sm90.cuh pass from a consumer's registers to the epilogue.
//
// A thread's registers hold pairs of columns of rows that lie far apart in memory. So each warp stages 16 rows and some
// columns at a time in its staging tile in shared memory, and takes them back in whole rows. T is an Sm90Tile.
#pragma once

#include "arch/wgmma.cuh"
#include "gemm/epilogue.cuh"

namespace mlpgpu {

// Passes a consumer's part of C, from row m0 and column n0 on, to the epilogue in quads. Each warp stages pieces of 16 rows
// and up to 32 columns and takes them back with a lane for each quad of a row, so that global memory is accessed in whole rows.
// Where rows are no vectors, a quad's columns are LANES apart, so that neighbouring lanes access neighbouring columns. Of an
// epilogue that reads components they stay neighbours, since those are vectors in every row.
template <class T, class Epilogue>
struct StagedEpilogue {
    static constexpr int WIDTH = T::STAGING_WIDTH, PITCH = T::STAGING_PITCH, LANES = WIDTH / 4, QUADS = 16 * LANES / WARP;
    static constexpr int PIECES = T::WIDTH / WIDTH;
    // How quads lie: ALIGNED as vectors, or APART columns from one number to the next.
    template <bool ALIGNED_, int APART_>
    struct Form {
        static constexpr bool ALIGNED = ALIGNED_;
        static constexpr int APART = APART_, STRIDE = APART == 1 ? 4 : 1;  // from a lane's first column to the next lane's
    };
    using Vectors = Form<true, 1>;
    using Neighbours = Form<false, 1>;
    using Spread = Form<false, LANES>;
    using Read = typename Epilogue::Read;
    using Scales = typename Epilogue::Scales;
    // Where registers can hold all that the epilogue reads, it is loaded while the product is made.
    static constexpr int SUMS = T::SUMS * T::COUNT;
    static constexpr int READ_WORDS = sizeof(Read) / 4, SCALE_WORDS = sizeof(Scales) / 4;
    static constexpr bool RESCALES = SCALE_WORDS > 0;  // this makes the code of an epilogue long
    static constexpr bool PREFETCHES = !Epilogue::READS_COMPONENTS && !RESCALES && SUMS + PIECES * QUADS * READ_WORDS <= 192;
    static constexpr bool READS_IN_GROUPS = READ_WORDS > 8;  // of quads, not in whole pieces

    const Epilogue& epilogue;
    int m0, n0, m, n;
    Read prefetched[PREFETCHES ? PIECES : 1][PREFETCHES ? QUADS : 1];

    __device__ __forceinline__ StagedEpilogue(const Epilogue& epilogue, int m0, int n0, int m, int n, bool reads)
        : epilogue(epilogue), m0(m0 + threadIdx.x % WARPGROUP / WARP * 16), n0(n0), m(m), n(n) {
        if (reads) prefetch();
    }

    __device__ __forceinline__ void prefetch() {
        if constexpr (PREFETCHES) {
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
                for (int i = 0; i < QUADS; ++i) prefetched[piece][i] = read<Vectors>(piece, i);
        }
    }

    // Quad i of a lane in a piece.
    __device__ __forceinline__ int row_in_piece(int i) const { return i * (16 / QUADS) + threadIdx.x % WARP / LANES; }
    template <class Quads>
    __device__ __forceinline__ int column(int piece) const {
        return n0 + piece * WIDTH + threadIdx.x % LANES * Quads::STRIDE;
    }
    template <class Quads>
    __device__ __forceinline__ bool inside(int piece, int i) const {
        const int end = Epilogue::WRITES_COMPONENTS && Quads::APART > 1 ? (n + 3) / 4 * 4 : n;  // behind n components are 0
        return m0 + row_in_piece(i) < m && column<Quads>(piece) < end;
    }

    template <class Quads>
    __device__ __forceinline__ Read read(int piece, int i) const {
        if (!inside<Quads>(piece, i)) return Read();
        return epilogue.template read<Quads::ALIGNED, Quads::APART>(m0 + row_in_piece(i), column<Quads>(piece));
    }

    template <class Quads>
    __device__ __forceinline__ uint64_t kept(int piece, int i) const {
        if (!Epilogue::MAY_DROP || !inside<Quads>(piece, i)) return 0;
        return epilogue.template kept<Quads::APART>(m0 + row_in_piece(i), column<Quads>(piece));
    }

    // Sums are rescaled as quads of neighbours.
    __device__ __forceinline__ Scales scales(int piece, int i) const {
        return inside<Neighbours>(piece, i) ? epilogue.scales(m0 + row_in_piece(i), column<Neighbours>(piece)) : Scales();
    }

    __device__ __forceinline__ void stage(const float* c, float* staging) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
            float* const to = staging + (lane / 4 + i % 2 * 8) * PITCH + i / 2 * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = make_float2(c[i * 2], c[i * 2 + 1]);
        }
    }

    template <class Quads>
    __device__ __forceinline__ void finish(float* staging, int piece, int i, const Read& read, const Scales& scales,
                                           uint64_t kept) const {
        const int row = m0 + row_in_piece(i);
        float* const staged = staging + row_in_piece(i) * PITCH;
        float4* const neighbours = reinterpret_cast<float4*>(staged + threadIdx.x % LANES * 4);
        float4 quad = *neighbours;
        if (RESCALES || Quads::APART == 1) epilogue.rescale(row, column<Neighbours>(piece), quad, scales);
        if constexpr (Quads::APART > 1) {
            if constexpr (RESCALES) {
                *neighbours = quad;
                __syncwarp();
            }
            const float* const from = staged + threadIdx.x % LANES;
            quad = make_float4(from[0], from[LANES], from[2 * LANES], from[3 * LANES]);
        }
        if (inside<Quads>(piece, i)) epilogue.template write<Quads::ALIGNED, Quads::APART>(row, column<Quads>(piece), quad, read, kept);
    }

    __device__ __forceinline__ void run(const float (&c)[T::COUNT], float* staging) const {
        if constexpr (RESCALES)
            epilogue.is_aligned() ? rescale_in_loop<Vectors>(c, staging) : rescale_in_loop<Spread>(c, staging);
        else if (!epilogue.is_aligned())
            run_unaligned(c, staging);
        else if constexpr (PREFETCHES)
            run_unrolled(c, staging);
        else
            run_in_loop<Vectors>(c, staging);
    }

    __device__ __forceinline__ void run_unaligned(const float (&c)[T::COUNT], float* staging) const {
        if constexpr (Epilogue::READS_COMPONENTS || Epilogue::HAS_ROW_OPERAND)
            run_in_loop<Neighbours>(c, staging);
        else
            run_in_loop<Spread>(c, staging);
    }

    __device__ __forceinline__ void run_unrolled(const float (&c)[T::COUNT], float* staging) const {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            uint64_t kept_of_piece[QUADS];
#pragma unroll
            for (int i = 0; i < QUADS; ++i) kept_of_piece[i] = kept<Vectors>(piece, i);
            stage(c + piece * (WIDTH / 2), staging);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < QUADS; ++i) finish<Vectors>(staging, piece, i, prefetched[piece][i], Scales(), kept_of_piece[i]);
            __syncwarp();
        }
    }

    // Registers cannot be indexed at run time: these select an element of an array in registers, and a piece.
    template <class Value, int COUNT>
    static __device__ __forceinline__ Value pick(const Value (&of)[COUNT], int i) {
        Value found = of[0];
#pragma unroll
        for (int j = 1; j < COUNT; ++j)
            if (j == i) found = of[j];
        return found;
    }

    __device__ __forceinline__ void stage_piece(const float (&c)[T::COUNT], int piece, float* staging) const {
#pragma unroll
        for (int register_piece = 0; register_piece < PIECES; ++register_piece)
            if (register_piece == piece) stage(c + register_piece * (WIDTH / 2), staging);
    }

    // Where sums are rescaled, a loop goes over the quads, since unrolled code would take longer to fetch than to execute.
    // What the epilogue reads for DEEP pieces, or for a few quads of one, is loaded together.
    template <class Quads>
    __device__ __forceinline__ void rescale_in_loop(const float (&c)[T::COUNT], float* staging) const {
        constexpr int TAKEN = T::COUNT + QUADS * SCALE_WORDS + 60, ROOM = T::CONSUMERS > 1 ? 168 : 200;  // registers
        constexpr int DEEP = READ_WORDS <= 8 && PIECES % 2 == 0 && TAKEN + 2 * QUADS * READ_WORDS <= ROOM ? 2 : 1;
        constexpr bool WHOLE = READ_WORDS <= 8 && TAKEN + QUADS * READ_WORDS <= ROOM;
        constexpr int GROUP = WHOLE ? QUADS : 2;
#pragma unroll 1
        for (int first = 0; first < PIECES * QUADS; first += DEEP * GROUP) {
            Read loaded[DEEP][GROUP];
#pragma unroll
            for (int d = 0; d < DEEP; ++d)
#pragma unroll
                for (int i = 0; i < GROUP; ++i) loaded[d][i] = read<Quads>(first / QUADS + d, first % QUADS + i);
#pragma unroll
            for (int d = 0; d < DEEP; ++d) {
                const int piece = first / QUADS + d, begin = first % QUADS;
                Scales scales_of_group[GROUP];
                uint64_t kept_of_group[GROUP];
#pragma unroll
                for (int i = 0; i < GROUP; ++i) scales_of_group[i] = scales(piece, begin + i), kept_of_group[i] = kept<Quads>(piece, begin + i);
                if (begin == 0) {
                    __syncwarp();  // all lanes have read the piece before
                    stage_piece(c, piece, staging);
                    __syncwarp();
                }
#pragma unroll 1
                for (int i = 0; i < GROUP; ++i)
                    finish<Quads>(staging, piece, begin + i, pick(loaded[d], i), pick(scales_of_group, i), pick(kept_of_group, i));
            }
        }
        __syncwarp();
    }

    // A quad of the next piece is loaded as soon as the registers of the same quad are free. Where quads need too many
    // registers or are not vectors, GROUP quads are loaded together. The code of the epilogue occurs once.
    template <class Quads>
    __device__ __forceinline__ void run_in_loop(const float (&c)[T::COUNT], float* staging) const {
        constexpr bool LOADS_NEXT = (Quads::ALIGNED || Quads::APART > 1) && !READS_IN_GROUPS;
        constexpr int GROUP = LOADS_NEXT ? QUADS : Quads::ALIGNED || Quads::APART > 1 ? 2 : 1;
        Read loaded[GROUP];
#pragma unroll
        for (int i = 0; LOADS_NEXT && i < GROUP; ++i) loaded[i] = read<Quads>(0, i);
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            stage_piece(c, piece, staging);
            __syncwarp();
#pragma unroll 1
            for (int first = 0; first < QUADS; first += GROUP) {
                uint64_t kept_of_group[GROUP];
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    if (!LOADS_NEXT) loaded[i] = read<Quads>(piece, first + i);
                    kept_of_group[i] = kept<Quads>(piece, first + i);
                }
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    finish<Quads>(staging, piece, first + i, loaded[i], Scales(), kept_of_group[i]);
                    if (LOADS_NEXT && piece + 1 < PIECES) loaded[i] = read<Quads>(piece + 1, i);
                }
            }
            __syncwarp();
        }
    }
};

// The same for an epilogue of components alone. Pairs pass through it as registers hold them, and a warp stages only the
// results, 16 rows and up to 64 columns of a component at a time. The components that it reads come the same way. Epilogues
// without components use the empty version.
template <class T, class Epilogue, bool WRITES_COMPONENTS = Epilogue::WRITES_COMPONENTS>
struct StagedComponents {
    __device__ __forceinline__ StagedComponents(const Epilogue&, int, int, int, int, bool) {}
    __device__ __forceinline__ void prefetch() {}
    __device__ __forceinline__ void run(const float (&)[T::COUNT], float*) const {}
};

template <class T, class Epilogue>
struct StagedComponents<T, Epilogue, true> {
    // In 16-bit numbers. Where sums take most registers, pieces are narrower.
    static constexpr int SUMS = T::SUMS * T::COUNT, MOST = SUMS > 128 ? 32 : 64;
    static constexpr int WIDTH = T::WIDTH < MOST ? T::WIDTH : MOST, PITCH = WIDTH + 8, PIECES = T::WIDTH / WIDTH;
    static constexpr int LANES = WIDTH / 8, VECTORS = 16 * LANES / WARP;             // of a row; of a lane
    static constexpr int COMPONENTS = T::COMPONENTS, PAIRS = WIDTH / 4;                      // of a thread in a piece
    static constexpr int SAVED = Epilogue::SAVED_COMPONENTS;
    static constexpr bool PREFETCHES = SUMS + 4 * SAVED * VECTORS <= 208;  // where registers can hold both
    static_assert(16 * PITCH * sizeof(uint16_t) <= T::STAGING_SIZE * sizeof(float));

    const Epilogue& epilogue;
    int m0, n0, m, n;
    // What the epilogue reads for the next piece.
    uint4 saved[SAVED][VECTORS];
    float2 column_operand[WIDTH / 8];
    float2 row_operand[Epilogue::HAS_ROW_OPERAND ? WIDTH / 8 : 1][2];
    // The states of a lane's two rows, which lie eight rows apart.
    typename Epilogue::Row rows[2];

    __device__ __forceinline__ StagedComponents(const Epilogue& epilogue, int m0, int n0, int m, int n, bool reads)
        : epilogue(epilogue), m0(m0 + threadIdx.x % WARPGROUP / WARP * 16), n0(n0), m(m), n(n), saved(), column_operand(), row_operand(), rows() {
        if (reads) prefetch();
    }

    __device__ __forceinline__ void prefetch() {
        if (PREFETCHES) read(0);
        if constexpr (Epilogue::HAS_ROW_OPERAND) {
#pragma unroll
            for (int h = 0; h < 2; ++h) rows[h] = epilogue.row(m0 + threadIdx.x % WARP / 4 + h * 8, pair_column(0, 0));
#pragma unroll
            for (int i = 0; i < WIDTH / 8; ++i) load_row_operand(0, i);
        }
    }

    // Whether eight columns of a piece begin inside C: they end there as well if the epilogue HAS_ROW_OPERAND.
    __device__ __forceinline__ bool begins(int piece, int i) const { return n0 + piece * WIDTH + i * 8 < n; }

    __device__ __forceinline__ int pair_column(int piece, int i) const {
        return n0 + piece * WIDTH + i * 8 + threadIdx.x % 4 * 2;
    }

    __device__ __forceinline__ void load_row_operand(int piece, int i) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (begins(piece, i)) row_operand[i][h] = epilogue.load_row_operand(rows[h], pair_column(piece, i));
    }

    static constexpr int ROWS = 16 / VECTORS;  // from a lane's vector to its next one
    __device__ __forceinline__ int row_in_piece(int v) const { return v * ROWS + threadIdx.x % WARP / LANES; }
    __device__ __forceinline__ int column(int piece) const { return n0 + piece * WIDTH + threadIdx.x % LANES * 8; }
    // A lane's first vector of a piece.
    __device__ __forceinline__ int64_t offset(int piece, int component) const {
        return component * epilogue.component_stride() + static_cast<int64_t>(m0 + row_in_piece(0)) * padded_columns(n) + column(piece);
    }

    __device__ __forceinline__ void read(int piece) {
        const uint16_t* const from = epilogue.saved();
        if (from && column(piece) < n) {
            const bool is_whole = m0 + 16 <= m;
            const int stride = ROWS * padded_columns(n);
#pragma unroll
            for (int p = 0; p < SAVED; ++p) {
                const uint16_t* const first = from + offset(piece, p);
#pragma unroll
                for (int v = 0; v < VECTORS; ++v)
                    if (is_whole || m0 + row_in_piece(v) < m)
                        saved[p][v] = __ldcg(reinterpret_cast<const uint4*>(first + v * stride));
            }
        }
        epilogue.column_operands(pair_column(piece, 0), column_operand);
    }

    // Which elements a dropout keeps of the pairs of a lane's two rows.
    static constexpr bool MAY_DROP = Epilogue::MAY_DROP;
    static constexpr int KEPT_WORDS = ceil_div(WIDTH, KeptElements::OF_WORD);
    __device__ __forceinline__ void read_kept(int piece, uint32_t (&kept)[2][KEPT_WORDS]) const {
#pragma unroll
        for (int i = 0; i < 2 * KEPT_WORDS; ++i) {
            const int row = m0 + threadIdx.x % WARP / 4 + i % 2 * 8, from = pair_column(piece, i / 2 * KeptElements::OF_WORD / 8);
            const bool is_inside = row < epilogue.filled() && from < n;
            kept[i % 2][i / 2] = is_inside ? epilogue.dropout().word(row, from) : 0;
        }
    }
    __device__ __forceinline__ float2 dropped(const uint32_t (&kept)[2][KEPT_WORDS], int piece, int i, const float2& pair) const {
        const uint32_t word = kept[i % 2][i / 2 * 8 / KeptElements::OF_WORD];
        const int column = pair_column(piece, i / 2);
        const KeptElements& dropout = epilogue.dropout();
        return make_float2(dropout(KeptElements::has(word, column), pair.x), dropout(KeptElements::has(word, column + 1), pair.y));
    }

    // Addresses in the staging tile: of a lane's vector v, as memory holds it, and of a pair's word, as registers hold it.
    __device__ __forceinline__ uint4* vector(uint16_t* staging, int v) const {
        return reinterpret_cast<uint4*>(staging + row_in_piece(v) * PITCH + threadIdx.x % LANES * 8);
    }
    __device__ __forceinline__ unsigned* word(uint16_t* staging, int pair) const {
        const int lane = threadIdx.x % WARP;
        return reinterpret_cast<unsigned*>(staging + (lane / 4 + pair % 2 * 8) * PITCH + pair / 2 * 8 + lane % 4 * 2);
    }

    __device__ __forceinline__ void stage(int component, uint16_t* staging) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) *vector(staging, v) = saved[component][v];
        __syncwarp();
    }

    // The first `count` numbers of a vector; those behind a row's end are padding, which is 0.
    static __device__ __forceinline__ uint4 inside_row(const uint4& vector, int count) {
        const auto kept = [&](int i, unsigned word) { return 2 * i + 1 < count ? word : 2 * i < count ? word & 0xffff : 0; };
        return make_uint4(kept(0, vector.x), kept(1, vector.y), kept(2, vector.z), kept(3, vector.w));
    }

    __device__ __forceinline__ void store(uint16_t* staging, int piece, int component) const {
        __syncwarp();
        const int count = n - column(piece);  // of the row's numbers, from a lane's first one on
        uint16_t* const first = epilogue.components() + offset(piece, component);
        const int stride = ROWS * padded_columns(n);
        if (count >= 8 && m0 + 16 <= min(m, epilogue.filled())) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) *reinterpret_cast<uint4*>(first + v * stride) = *vector(staging, v);
        } else if (count > 0) {
#pragma unroll 1
            for (int v = 0; v < VECTORS; ++v) {
                const int row = m0 + row_in_piece(v);
                if (row < m)
                    *reinterpret_cast<uint4*>(first + v * stride) =
                        row < epilogue.filled() ? inside_row(*vector(staging, v), count) : make_uint4(0, 0, 0, 0);
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run(const float (&c)[T::COUNT], float* staging_tile) {
        uint16_t* const staging = reinterpret_cast<uint16_t*>(staging_tile);
        constexpr bool MANY = COMPONENTS > 1;
        if (!PREFETCHES) read(0);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            float2 rest[PAIRS];  // at first the later components of what is read, then those of the results
            if (epilogue.saved()) {
#pragma unroll
                for (int p = SAVED - 1; p > 0; --p) {
                    stage(p, staging);
#pragma unroll
                    for (int i = 0; i < PAIRS; ++i) {
                        const float2 found = bfloats(*word(staging, i));
                        rest[i] = p == SAVED - 1 ? found : joined<COMPONENTS>(found, rest[i]);
                    }
                    __syncwarp();
                }
                stage(0, staging);
            }
            float2 operand[WIDTH / 8];
#pragma unroll
            for (int i = 0; i < WIDTH / 8; ++i) operand[i] = column_operand[i];
            uint32_t kept[2][KEPT_WORDS] = {};
            if constexpr (MAY_DROP) read_kept(piece, kept);
            if (!MANY && piece + 1 < PIECES) read(piece + 1);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float* const sum = c + piece * (WIDTH / 2) + i * 2;
                unsigned* const staged = word(staging, i);
                float2 made = make_float2(sum[0], sum[1]), loaded = {};
                if (epilogue.saved()) loaded = SAVED > 1 ? joined<COMPONENTS>(bfloats(*staged), rest[i]) : bfloats(*staged);
                if constexpr (Epilogue::HAS_ROW_OPERAND)
                    made = begins(piece, i / 2) ? epilogue.pair(made, operand[i / 2], rows[i % 2], row_operand[i / 2][i % 2]) : made;
                else
                    made = epilogue.pair(made, operand[i / 2], loaded);
                if constexpr (MAY_DROP) made = dropped(kept, piece, i, made);
                if (MANY)
                    rest[i] = made;
                else
                    *staged = bfloat_pair(made.x, made.y);
                if constexpr (Epilogue::HAS_ROW_OPERAND)
                    if (i % 2 == 1 && piece + 1 < PIECES) load_row_operand(piece + 1, i / 2);
            }
            if (!MANY) {
                store(staging, piece, 0);
                continue;
            }
            unsigned words[COMPONENTS][PAIRS];
            split_to_bfloats(rest, words);
#pragma unroll
            for (int p = 0; p < COMPONENTS; ++p) {
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) *word(staging, i) = words[p][i];
                store(staging, piece, p);
                if (p == 0 && piece + 1 < PIECES) read(piece + 1);  // only now are there enough registers
            }
        }
        if constexpr (Epilogue::HAS_ROW_OPERAND) {
#pragma unroll
            for (int h = 0; h < 2; ++h) epilogue.finish_row(rows[h]);
        }
    }
};

}  // namespace mlpgpu
