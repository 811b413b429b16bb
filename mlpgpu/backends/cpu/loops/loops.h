// A step's and a prediction's passes over numbers as loops, over the structs of cuda/math/ that the kernels are made of.
// They compute in float32, or in float64 where `real` is double.  A processor's vector instructions take several numbers
// at a time, and threads run side by side, since nothing here needs Python.
//
// Arrays are row-major: rows are samples, of n columns.  Where y may be z, loops say so.
#pragma once

#include "host.h"
#include <string.h>

#include "math/activations.cuh"
#include "math/dropout.cuh"
#include "math/losses.cuh"
#include "math/optimizers.cuh"
#include "rows.h"

namespace mlpgpu {

// Elements of a loop do not depend on each other, though its arrays may be one.
#define EACH _Pragma("omp simd")

// Of sums REGISTERS vectors, which leaves some registers for factors, and of tiles at most so many rows.
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, REGISTERS = 24, MOST_ROWS = 8;
#else
constexpr int VECTOR_BYTES = 32, REGISTERS = 12, MOST_ROWS = 4;
#endif
constexpr int LANES = VECTOR_BYTES / sizeof(real);

// What is left of an array beside whole vectors, as a vector; copied back at the end, unless it is only read.
template <class Number>
struct Rest {
    Number* place;
    size_t bytes;
    real values[LANES] = {};
    Rest(Number* place, int64_t count) : place(place), bytes(count * sizeof(real)) { memcpy(values, place, bytes); }
    ~Rest() {
        if constexpr (!std::is_const_v<Number>) memcpy(place, values, bytes);
    }
};

// A call that is no part of its caller: where the compiler sees all numbers of a vector it would take them one by one.
template <class Compute, class... Numbers>
[[gnu::noinline]] void apart(const Compute& compute, Numbers*... arrays) {
    compute(arrays...);
}

// Calls `compute` for each vector of some arrays' elements.  What is left is a vector too: so a number has the same bits
// wherever it stands, since functions of vectors round otherwise than those of single numbers.
template <class Compute, class... Numbers>
__forceinline__ void by_vectors(int64_t count, const Compute& compute, Numbers*... arrays) {
    int64_t first = 0;
    for (; first + LANES <= count; first += LANES) compute(arrays + first...);
    if (first < count) [&](auto&&... rest) { apart(compute, rest.values...); }(Rest<Numbers>(arrays + first, count - first)...);
}

// --- products ---

using Transposed = bool;

// c (m, n) = a b, or c += a b if it `adds`.  `gemm` points to BLAS's cblas_sgemm or cblas_dgemm, and Integer is the type of
// its integers.
template <class Integer>
void product(void* gemm, Transposed a_is, Transposed b_is, int64_t m, int64_t n, int64_t k, const real* a, int64_t lda,
             const real* b, int64_t ldb, real* c, int64_t ldc, int64_t adds) {
    using Function = void (*)(int, int, int, Integer, Integer, Integer, real, const real*, Integer, const real*, Integer,
                              real, real*, Integer);
    constexpr int ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112;
    reinterpret_cast<Function>(gemm)(ROW_MAJOR, a_is ? TRANSPOSED : AS_IT_IS, b_is ? TRANSPOSED : AS_IT_IS,
                                     static_cast<Integer>(m), static_cast<Integer>(n), static_cast<Integer>(k), 1.0f, a,
                                     static_cast<Integer>(lda), b, static_cast<Integer>(ldb), adds ? 1.0f : 0.0f, c,
                                     static_cast<Integer>(ldc));
}

// result = matrix vector, or its transpose's product, or result += that if it `adds`, of a matrix (rows, columns) whose
// rows lie `pitch` elements apart.  `gemv` points to BLAS's cblas_sgemv or cblas_dgemv; its product of matrices takes up to
// eight times as long.
template <class Integer>
void vector_product(void* gemv, Transposed is_transposed, int64_t rows, int64_t columns, const real* matrix, int64_t pitch,
                    const real* vector, real* result, int64_t adds) {
    using Function =
        void (*)(int, int, Integer, Integer, real, const real*, Integer, const real*, Integer, real, real*, Integer);
    constexpr int ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112;
    reinterpret_cast<Function>(gemv)(ROW_MAJOR, is_transposed ? TRANSPOSED : AS_IT_IS, static_cast<Integer>(rows),
                                     static_cast<Integer>(columns), 1.0f, matrix, static_cast<Integer>(pitch), vector, 1,
                                     adds ? 1.0f : 0.0f, result, 1);
}

// A vector register; in memory it may lie anywhere.
typedef real Vector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

// Keeps a vector in a register.  Else the compiler has each instruction that uses it read it from memory, which takes two
// reads where the vector lies in two cache lines.
inline void hold(Vector& vector) {
#if defined(__AVX__)
    asm("" : "+v"(vector));
#endif
}

// A tile of unpacked_product: ROWS rows of c, by VECTORS vectors of neighbouring columns.  It prefetches later rows of b
// where these come from a far cache, or from memory.
template <int ROWS, int VECTORS, bool PREFETCHES>
void unpacked_tile(const real* a, int64_t row_stride, int64_t k_stride, const real* b, real* c, int64_t n, int64_t k,
                   bool adds) {
    constexpr int64_t AHEAD = 8;  // rows of b
    Vector sum[ROWS][VECTORS] = {};
    if (adds) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 32
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = reinterpret_cast<const Vector*>(c + r * n)[v];
        }
    }
    for (int64_t i = 0; i < k; ++i) {
        if constexpr (PREFETCHES) {
            const real* ahead = b + (i + AHEAD < k ? i + AHEAD : i) * n;
#pragma GCC unroll 32
            for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(ahead + v * LANES);
            __builtin_prefetch(ahead + VECTORS * LANES - 1);  // its line, where vectors begin in the middle of one
        }
        const Vector* b_row = reinterpret_cast<const Vector*>(b + i * n);
        // Beside the sums there are registers for a's numbers or for b's vectors, whichever are fewer.
        if constexpr (ROWS <= VECTORS) {
            Vector factors[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                factors[r] = a[r * row_stride + i * k_stride] - Vector{};
                hold(factors[r]);
            }
#pragma GCC unroll 32
            for (int v = 0; v < VECTORS; ++v) {
                Vector loaded = b_row[v];
                hold(loaded);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) sum[r][v] += factors[r] * loaded;
            }
        } else {
            Vector loaded[VECTORS];
#pragma GCC unroll 32
            for (int v = 0; v < VECTORS; ++v) {
                loaded[v] = b_row[v];
                hold(loaded[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const real factor = a[r * row_stride + i * k_stride];
#pragma GCC unroll 32
                for (int v = 0; v < VECTORS; ++v) sum[r][v] += factor * loaded[v];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 32
        for (int v = 0; v < VECTORS; ++v) reinterpret_cast<Vector*>(c + r * n)[v] = sum[r][v];
    }
}

// The tile of so many rows, at most ROWS.
template <int ROWS, int VECTORS>
void unpacked_rest(const real* a, int64_t row_stride, int64_t k_stride, const real* b, real* c, int64_t m, int64_t n,
                   int64_t k, bool adds) {
    if (m == ROWS) unpacked_tile<ROWS, VECTORS, false>(a, row_stride, k_stride, b, c, n, k, adds);
    else if constexpr (ROWS > 1) unpacked_rest<ROWS - 1, VECTORS>(a, row_stride, k_stride, b, c, m, n, k, adds);
}

// All rows of a panel, which is VECTORS vectors of columns: b's panel stays in a cache from the first tile on, which
// prefetches it if it is FAR.  A panel with ROWS < MOST_ROWS has exactly so many rows.
template <int ROWS, int VECTORS, bool FAR>
void unpacked_panel(const real* a, int64_t row_stride, int64_t k_stride, const real* b, real* c, int64_t m, int64_t n,
                    int64_t k, bool adds) {
    int64_t i = 0;
    if (FAR && ROWS <= m) {
        unpacked_tile<ROWS, VECTORS, true>(a, row_stride, k_stride, b, c, n, k, adds);
        i = ROWS;
    }
    for (; i + ROWS <= m; i += ROWS)
        unpacked_tile<ROWS, VECTORS, false>(a + i * row_stride, row_stride, k_stride, b, c + i * n, n, k, adds);
    if constexpr (ROWS == MOST_ROWS)
        if (i < m)
            unpacked_rest<ROWS - 1, VECTORS>(a + i * row_stride, row_stride, k_stride, b, c + i * n, m - i, n, k, adds);
}

// Columns from `first` up to `end`, whole vectors: panels of as many as registers take, and then of fewer.
template <int ROWS, int VECTORS, bool FAR>
void unpacked_columns(const real* a, int64_t row_stride, int64_t k_stride, const real* b, real* c, int64_t m, int64_t n,
                      int64_t k, bool adds, int64_t first, int64_t end) {
    for (; first + VECTORS * LANES <= end; first += VECTORS * LANES)
        unpacked_panel<ROWS, VECTORS, FAR>(a, row_stride, k_stride, b + first, c + first, m, n, k, adds);
    if constexpr (VECTORS > 1)
        unpacked_columns<ROWS, VECTORS / 2, FAR>(a, row_stride, k_stride, b, c, m, n, k, adds, first, end);
}

template <int ROWS>
void unpacked_rows(const real* a, int64_t row_stride, int64_t k_stride, const real* b, real* c, int64_t m, int64_t n,
                   int64_t k) {
    constexpr int64_t BLOCK = 512;     // terms of a sum at a time, so that a panel of b and its pages stay in a cache
    constexpr int64_t NEAR = 1 << 14;  // numbers of b that all stay in the first cache, so that c may go row by row
    const bool is_near = k * n <= NEAR;
    const int64_t whole = n / LANES * LANES, at_once = is_near ? ROWS : m;
    const auto columns =
        is_near ? unpacked_columns<ROWS, REGISTERS / ROWS, false> : unpacked_columns<ROWS, REGISTERS / ROWS, true>;
    for (int64_t i = 0; i < m; i += at_once) {
        const int64_t rows = m - i < at_once ? m - i : at_once;
        const real* a_rows = a + i * row_stride;
        real* c_rows = c + i * n;
        for (int64_t q = 0; q < k; q += BLOCK)
            columns(a_rows + q * k_stride, row_stride, k_stride, b + q * n, c_rows, rows, n, k - q < BLOCK ? k - q : BLOCK,
                    q > 0, 0, whole);
        // The last vector ends with the row: some of its columns are there already, with the same bits.
        if (whole < n)
            unpacked_panel<ROWS, 1, false>(a_rows, row_stride, k_stride, b + n - LANES, c_rows + n - LANES, rows, n, k, false);
    }
}

// Adds the products of ROWS numbers, k_stride apart, and as many rows of b (n columns each) to c from column `first` up to
// `end`, whole vectors, or begins c with them.
template <int ROWS>
void add_rows(const real* a, int64_t k_stride, const real* b, real* c, int64_t n, int64_t first, int64_t end, bool begins) {
    real factors[ROWS];
    for (int i = 0; i < ROWS; ++i) factors[i] = a[i * k_stride];
    for (int64_t j = first; j < end; j += LANES) {
        Vector sum = begins ? Vector{} : *reinterpret_cast<const Vector*>(c + j);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) sum += factors[i] * *reinterpret_cast<const Vector*>(b + i * n + j);
        *reinterpret_cast<Vector*>(c + j) = sum;
    }
}

// One row of c, as long as it takes to read b, whose rows are read from end to end, some of them side by side.
inline void row_product(const real* a, int64_t, int64_t k_stride, const real* b, real* c, int64_t, int64_t n, int64_t k) {
    constexpr int64_t ROWS = 8, COLUMNS = 4096;  // of b at once; of c, which stay in the first cache
    const int64_t whole = n / LANES * LANES;
    if (!k) memset(c, 0, n * sizeof(real));
    for (int64_t first = 0; first < whole; first += COLUMNS) {
        const int64_t end = whole - first < COLUMNS ? whole : first + COLUMNS;
        int64_t i = 0;
        for (; i + ROWS <= k; i += ROWS) add_rows<ROWS>(a + i * k_stride, k_stride, b + i * n, c, n, first, end, i == 0);
        for (; i < k; ++i) add_rows<1>(a + i * k_stride, k_stride, b + i * n, c, n, first, end, i == 0);
    }
    if (whole < n) unpacked_tile<1, 1, false>(a, 0, k_stride, b + n - LANES, c + n - LANES, n, k, false);
}

// Rows of narrow_product, ROWS at a time: of b's first `whole` rows vectors begin in b, and of those behind them in `tail`.
template <int ROWS>
void narrow_rows(const real* a, int64_t row_stride, int64_t k_stride, const real* b, const real* tail, int64_t whole, real* c,
                 int64_t m, int64_t n, int64_t k) {
    int64_t first = 0;
    for (; first + ROWS <= m; first += ROWS) {
        const real* const of_rows = a + first * row_stride;
        Vector sum[ROWS] = {};
        for (int64_t i = 0; i < k; ++i) {
            const Vector loaded = *reinterpret_cast<const Vector*>(i < whole ? b + i * n : tail + (i - whole) * n);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sum[r] += of_rows[r * row_stride + i * k_stride] * loaded;
        }
        for (int r = 0; r < ROWS; ++r) memcpy(c + (first + r) * n, &sum[r], n * sizeof(real));
    }
    if constexpr (ROWS > 1)
        if (first < m)
            narrow_rows<ROWS / 2>(a + first * row_stride, row_stride, k_stride, b, tail, whole, c + first * n, m - first, n, k);
}

// Fewer columns than a vector has: vectors begin with b's rows, and what they have of the next rows is left out.
inline void narrow_product(const real* a, int64_t row_stride, int64_t k_stride, const real* b, real* c, int64_t m, int64_t n,
                           int64_t k) {
    const int64_t whole = k * n < LANES ? 0 : (k * n - LANES) / n + 1;  // rows of b whose vectors lie in it
    real tail[3 * LANES] = {};
    memcpy(tail, b + whole * n, (k - whole) * n * sizeof(real));
    narrow_rows<MOST_ROWS>(a, row_stride, k_stride, b, tail, whole, c, m, n, k);
}

// c (m, n) = a (m, k) b (k, n), where a's element (i, j) lies at i * row_stride + j * k_stride.  Each element is one sum
// in the order of k.  Nothing is packed, which takes BLAS longer than the product where rows are few.
inline void unpacked_product(const real* a, int64_t row_stride, int64_t k_stride, const real* b, real* c, int64_t m,
                             int64_t n, int64_t k) {
    constexpr decltype(&row_product) of_few[] = {row_product, row_product, unpacked_rows<2>, unpacked_rows<3>,
#if defined(__AVX512F__)
                                                unpacked_rows<4>, unpacked_rows<5>, unpacked_rows<6>, unpacked_rows<7>,
#endif
    };
    const auto of_rows = n < LANES ? narrow_product : m < MOST_ROWS ? of_few[m] : unpacked_rows<MOST_ROWS>;
    of_rows(a, row_stride, k_stride, b, c, m, n, k);
}

// y (rows, n), whose rows lie `pitch` elements apart, = x (n, rows) transposed.
inline void transpose(const real* x, real* y, int64_t rows, int64_t n, int64_t pitch) {
    constexpr int64_t BLOCK = 16;  // rows of x whose cache lines are in use together
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t end = first + BLOCK < n ? first + BLOCK : n;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = first; j < end; ++j) y[i * pitch + j] = x[j * rows + i];
    }
}

// sums (n,) = the sums of dz's columns, of blocks of rows first, so that rounding grows with their number's root, or
// sums += these if it `adds`.  dz's rows lie `pitch` elements apart.
inline void column_sums(const real* dz, real* sums, int64_t rows, int64_t n, int64_t pitch, int64_t adds) {
    constexpr int64_t ROWS = 64, COLUMNS = 256;
    for (int64_t first = 0; first < n; first += COLUMNS) {
        const int64_t count = n - first < COLUMNS ? n - first : COLUMNS;
        real total[COLUMNS];
        for (int64_t start = 0; start < rows; start += ROWS) {
            const int64_t end = start + ROWS < rows ? start + ROWS : rows;
            real part[COLUMNS] = {};
            for (int64_t i = start; i < end; ++i) {
                const real* row = dz + i * pitch + first;
                for (int64_t j = 0; j < count; ++j) part[j] += row[j];
            }
            for (int64_t j = 0; j < count; ++j) total[j] = start ? total[j] + part[j] : part[j];
        }
        if (!rows) memset(total, 0, sizeof(total));
        for (int64_t j = 0; j < count; ++j) sums[first + j] = adds ? sums[first + j] + total[j] : total[j];
    }
}

// y (count,) = the sum of `parts` arrays, in order, each `pitch` elements behind the one before.
inline void add_parts(const real* first, int64_t pitch, int64_t parts, real* y, int64_t count) {
    EACH for (int64_t i = 0; i < count; ++i) y[i] = first[i] + first[pitch + i];
    for (int64_t part = 2; part < parts; ++part) {
        EACH for (int64_t i = 0; i < count; ++i) y[i] += first[part * pitch + i];
    }
}

// --- locally connected layers ---

constexpr int64_t LOCAL_BLOCK = 1024;  // columns whose sums stay in the first-level cache

// y (count,) += the products of `terms` pairs of arrays, each `a_step` and `b_step` elements behind the pair before, in order.
__forceinline__ void add_products(real* y, const real* a, int64_t a_step, const real* b, int64_t b_step, int64_t terms,
                                  int64_t count) {
    int64_t term = 0;
    for (; term + 4 <= terms; term += 4, a += 4 * a_step, b += 4 * b_step) {
        const real *a1 = a + a_step, *a2 = a1 + a_step, *a3 = a2 + a_step;
        const real *b1 = b + b_step, *b2 = b1 + b_step, *b3 = b2 + b_step;
        EACH for (int64_t j = 0; j < count; ++j) y[j] = y[j] + a[j] * b[j] + a1[j] * b1[j] + a2[j] * b2[j] + a3[j] * b3[j];
    }
    for (; term < terms; ++term, a += a_step, b += b_step) {
        EACH for (int64_t j = 0; j < count; ++j) y[j] += a[j] * b[j];
    }
}

// z_j = bias_j + the sum over r of w_r,j x_j+r, for n columns of some rows.  The bias of a column lies `bias_step` elements
// behind that of the one before; it may be null.  Each pitch is the distance from one row of its array to the next.
inline void local_forward(const real* x, int64_t x_pitch, const real* w, int64_t w_pitch, int64_t window, const real* bias,
                          int64_t bias_step, real* z, int64_t z_pitch, int64_t rows, int64_t n) {
    for (int64_t first = 0; first < n; first += LOCAL_BLOCK) {
        const int64_t count = n - first < LOCAL_BLOCK ? n - first : LOCAL_BLOCK;
        for (int64_t i = 0; i < rows; ++i) {
            real* const to = z + i * z_pitch + first;
            for (int64_t j = 0; j < count; ++j) to[j] = bias ? bias[(first + j) * bias_step] : real(0);
            add_products(to, x + i * x_pitch + first, 1, w + first, w_pitch, window, count);
        }
    }
}

// dw_r,j = the sum over rows of dz_j x_j+r, of blocks of rows first, as in `column_sums`, for n columns.
inline void local_gradient(const real* dz, int64_t dz_pitch, const real* x, int64_t x_pitch, real* dw, int64_t dw_pitch,
                           int64_t window, int64_t rows, int64_t n) {
    constexpr int64_t ROWS = 64, COLUMNS = 256;
    for (int64_t first = 0; first < n; first += COLUMNS) {
        const int64_t count = n - first < COLUMNS ? n - first : COLUMNS;
        for (int64_t r = 0; r < window; ++r) memset(dw + r * dw_pitch + first, 0, count * sizeof(real));
        for (int64_t start = 0; start < rows; start += ROWS) {
            const int64_t block = rows - start < ROWS ? rows - start : ROWS;
            const real *from = dz + start * dz_pitch + first, *inputs = x + start * x_pitch + first;
            for (int64_t r = 0; r < window; ++r) {
                real part[COLUMNS] = {}, *const to = dw + r * dw_pitch + first;
                add_products(part, from, dz_pitch, inputs + r, x_pitch, block, count);
                EACH for (int64_t j = 0; j < count; ++j) to[j] += part[j];
            }
        }
    }
}

// dx_j = the sum over r of w_r,j-r dz_j-r, for columns `first` to `end` of some rows, to dx; dz and w have n columns.
inline void local_input_gradient(const real* dz, int64_t dz_pitch, const real* w, int64_t w_pitch, int64_t window, int64_t n,
                                 real* dx, int64_t dx_pitch, int64_t rows, int64_t first, int64_t end) {
    for (int64_t begin = first; begin < end; begin += LOCAL_BLOCK) {
        const int64_t stop = end - begin < LOCAL_BLOCK ? end : begin + LOCAL_BLOCK;
        for (int64_t i = 0; i < rows; ++i) {
            const real* const delta = dz + i * dz_pitch;
            real* const to = dx + i * dx_pitch - first;
            memset(to + begin, 0, (stop - begin) * sizeof(real));
            // Columns from `all` to `most` are seen by a whole window of outputs.  Fewer outputs see those on either side,
            // which are added weight by weight.
            const int64_t all = begin > window - 1 ? begin : window - 1, most = stop < n ? stop : n;
            if (all < most) add_products(to + all, delta + all, -1, w + all, w_pitch - 1, window, most - all);
            for (int64_t r = 0; r < window; ++r) {
                const int64_t low = begin > r ? begin : r, high = stop < n + r ? stop : n + r;
                const auto add = [&](int64_t from, int64_t until) {
                    if (from < until) add_products(to + from, delta + from - r, 0, w + r * w_pitch + from - r, 0, 1, until - from);
                };
                if (all >= most) {
                    add(low, high);
                    continue;
                }
                add(low, high < all ? high : all);
                add(low > most ? low : most, high);
            }
        }
    }
}

// --- activations ---

constexpr int64_t FEW_COLUMNS = 4 * LANES;

// Calls `compute` for each vector of a bias (n,) and of arrays (rows, n).  A row of few columns would be a vector's rest each
// time; LANES rows together are whole vectors, and read the bias from an array that repeats it for each row.
template <class Compute, class... Numbers>
void by_rows_of_bias(const real* bias, int64_t rows, int64_t n, const Compute& compute, Numbers*... arrays) {
    if (n % LANES == 0 || n > FEW_COLUMNS || rows == 1) {
        for (int64_t i = 0; i < rows; ++i) by_vectors(n, compute, bias, arrays + i * n...);
        return;
    }
    real repeated[LANES * FEW_COLUMNS];
    const int64_t at_once = rows < LANES ? rows : LANES;
    for (int64_t i = 0; i < at_once; ++i) memcpy(repeated + i * n, bias, n * sizeof(real));
    for (int64_t i = 0; i < rows; i += at_once) {
        const int64_t count = (rows - i < at_once ? rows - i : at_once) * n;
        by_vectors(count, compute, static_cast<const real*>(repeated), arrays + i * n...);
    }
}

// y = f(z + bias); y may be z, and bias null.
template <class Activation>
void activate(const real* z, const real* bias, real* y, int64_t rows, int64_t n) {
    const auto without = [](const real* z, real* y) {
        EACH for (int i = 0; i < LANES; ++i) y[i] = Activation::forward(z[i]);
    };
    const auto with = [](const real* bias, const real* z, real* y) {
        EACH for (int i = 0; i < LANES; ++i) y[i] = Activation::forward(z[i] + bias[i]);
    };
    if (!bias) by_vectors(rows * n, without, z, y);
    else by_rows_of_bias(bias, rows, n, with, z, y);
}

// y = f(z + bias), z = f'(z + bias), for derivatives that need z; bias may be null.
template <class Activation>
void activate_with_slope(real* z, const real* bias, real* y, int64_t rows, int64_t n) {
    const auto add = [](const real* bias, real* z) {
        EACH for (int i = 0; i < LANES; ++i) z[i] += bias[i];
    };
    if (bias) by_rows_of_bias(bias, rows, n, add, z);
    const auto both = [](real* z, real* y) {
        EACH for (int i = 0; i < LANES; ++i) {
            const real sum = z[i];
            y[i] = Activation::forward(sum), z[i] = Activation::derivative(sum);
        }
    };
    by_vectors(rows * n, both, z, y);
}

// dy *= f'(y).
template <class Activation>
void activation_backward(const real* y, real* dy, int64_t count) {
    const auto multiplied = [](const real* y, real* dy) {
        EACH for (int i = 0; i < LANES; ++i) dy[i] *= Activation::derivative(y[i]);
    };
    by_vectors(count, multiplied, y, dy);
}

// y = exp(z); y may be z.
inline void exponential(const real* z, real* y, int64_t count) {
    const auto power = [](const real* z, real* y) {
        EACH for (int i = 0; i < LANES; ++i) y[i] = expf(z[i]);
    };
    by_vectors(count, power, z, y);
}

// y = a * b, element by element; y may be either.
inline void multiply(const real* a, const real* b, real* y, int64_t count) {
    EACH for (int64_t i = 0; i < count; ++i) y[i] = a[i] * b[i];
}

// y = (x - mean) / scale; y may be x.
inline void standardize(const real* x, const real* mean, const real* scale, real* y, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows; ++i) {
        EACH for (int64_t j = 0; j < n; ++j) y[i * n + j] = (x[i * n + j] - mean[j]) / scale[j];
    }
}

// y = x * scale + mean; y may be x.
inline void unstandardize(const real* x, const real* mean, const real* scale, real* y, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows; ++i) {
        EACH for (int64_t j = 0; j < n; ++j) y[i * n + j] = x[i * n + j] * scale[j] + mean[j];
    }
}

// numbers = half words 8 · first … of a layer's step, of LANES blocks.
inline void draw_blocks(uint16_t* numbers, int64_t first, uint64_t seed, int64_t step, int64_t layer) {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    EACH for (int i = 0; i < LANES; ++i) {
        c0[i] = static_cast<uint32_t>(first + i), c1[i] = static_cast<uint32_t>(step);
        c2[i] = static_cast<uint32_t>(layer), c3[i] = static_cast<uint32_t>(step >> 32);
    }
    PhiloxKey key = philox_key(seed);
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        EACH for (int i = 0; i < LANES; ++i) philox_round(c0[i], c1[i], c2[i], c3[i], key);
        key.raise();
    }
    for (int i = 0; i < LANES; ++i) {
        const DropoutWords made = {{c0[i], c1[i], c2[i], c3[i]}};
        for (int j = 0; j < DROPOUT_BLOCK; ++j) numbers[i * DROPOUT_BLOCK + j] = static_cast<uint16_t>(made[j]);
    }
}

// mask = 0 where an element's half word is below `least`, else `keep`; y = x * mask, which may be x.  They are rows of n
// elements; a row's first is element `first` of the batch, and the next one's `pitch` further on.
inline void dropout(const real* x, real* mask, real* y, int64_t first, int64_t pitch, int64_t rows, int64_t n,
                    const uint64_t* seed_and_step, int64_t layer, int64_t least, real keep) {
    if (pitch == n) n *= rows, rows = 1;
    constexpr int64_t DRAWN = LANES * DROPOUT_BLOCK;
    uint16_t numbers[DRAWN];
    for (int64_t row = 0; row < rows; ++row, first += pitch) {
        real* const of_row = mask + row * n;
        for (int64_t begin = first / DROPOUT_BLOCK * DROPOUT_BLOCK; begin < first + n; begin += DRAWN) {
            draw_blocks(numbers, begin / DROPOUT_BLOCK, seed_and_step[0], static_cast<int64_t>(seed_and_step[1]), layer);
            const int64_t from = begin < first ? first : begin, end = begin + DRAWN < first + n ? begin + DRAWN : first + n;
            const uint16_t* const of = numbers + (from - begin);
            real* const to = of_row + (from - first);
            EACH for (int64_t i = 0; i < end - from; ++i) to[i] = of[i] >= least ? keep : 0.0f;
        }
    }
    multiply(x, mask, y, rows * n);
}

// --- losses ---

// Multiplies a row's value and deltas by its weight, unless weight is null; sums = the loss and the weight of the rows.
inline void weigh(const real* weight, real* value, real* delta, int64_t rows, int64_t n, double* sums) {
    double loss = 0.0, total = 0.0;
    if (weight) {
        for (int64_t i = 0; i < rows; ++i) {
            value[i] *= weight[i];
            EACH for (int64_t j = 0; j < n; ++j) delta[i * n + j] *= weight[i];
        }
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < rows; ++i) total += weight[i];
    }
#pragma omp simd reduction(+ : loss)
    for (int64_t i = 0; i < rows; ++i) loss += value[i];
    sums[0] = loss, sums[1] = weight ? total : static_cast<double>(rows);
}

// A loss that is a sum or a mean over outputs: value (rows,) and delta (rows, n); terms (rows, n) is scratch.
template <class Loss>
void loss_of_terms(const real* logits, const real* target, real* value, real* delta, real* terms, int64_t rows,
                   int64_t n, const LossNumbers* numbers) {
    loss_numbers = *numbers;
    const real scale = Loss::term_weight(static_cast<int>(n));
    const auto each = [scale](const real* z, const real* t, real* terms, real* delta) {
        EACH for (int i = 0; i < LANES; ++i) {
            real slope;
            terms[i] = Loss::term(z[i], t[i], slope);
            delta[i] = slope * scale;
        }
    };
    by_vectors(rows * n, each, logits, target, terms, delta);
    for (int64_t i = 0; i < rows; ++i) {
        real sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; ++j) sum += terms[i * n + j];
        value[i] = sum * scale;
    }
}

// powers = exp(z - the row's largest); value = log of their sums; shifted = z - the row's largest.
inline void shifted_powers(const real* z, real* shifted, real* powers, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows; ++i) {
        const real* z_row = z + i * n;
        real largest = z_row[0];
#pragma omp simd reduction(max : largest)
        for (int64_t j = 1; j < n; ++j) largest = z_row[j] > largest ? z_row[j] : largest;
        EACH for (int64_t j = 0; j < n; ++j) shifted[i * n + j] = z_row[j] - largest;
    }
    exponential(shifted, powers, rows * n);
}

inline real sum_of(const real* x, int64_t n) {
    real sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; ++j) sum += x[j];
    return sum;
}

// -log softmax(z)[t] of a class t, and its derivative; scratch is (rows, n).
inline void softmax_cross_entropy_of_index(const real* logits, const int64_t* target, real* value, real* delta,
                                           real* scratch, int64_t rows, int64_t n) {
    shifted_powers(logits, scratch, delta, rows, n);
    for (int64_t i = 0; i < rows; ++i) {
        real* powers = delta + i * n;
        value[i] = sum_of(powers, n);
        const real inverse = 1.0f / value[i];
        EACH for (int64_t j = 0; j < n; ++j) powers[j] *= inverse;
        powers[target[i]] -= 1.0f;
    }
    const auto logarithm = [](real* value) {
        EACH for (int i = 0; i < LANES; ++i) value[i] = logf(value[i]);
    };
    by_vectors(rows, logarithm, value);
    for (int64_t i = 0; i < rows; ++i) value[i] -= scratch[i * n + target[i]];
}

// -sum of t log softmax(z) of distributions t (rows, n), and its derivative; scratch is (rows, n).
inline void softmax_cross_entropy_of_dense(const real* logits, const real* target, real* value, real* delta,
                                           real* scratch, int64_t rows, int64_t n) {
    shifted_powers(logits, scratch, delta, rows, n);
    for (int64_t i = 0; i < rows; ++i) {
        real *powers = delta + i * n, *shifted = scratch + i * n;
        const real* t = target + i * n;
        const real sum = sum_of(powers, n), mass = sum_of(t, n), factor = mass / sum;
        real dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < n; ++j) dot += t[j] * shifted[j];
        EACH for (int64_t j = 0; j < n; ++j) powers[j] = powers[j] * factor - t[j];
        value[i] = mass * logf(sum) - dot;
    }
}

// y = softmax(z), of fewer columns than a vector has lanes, each of which has a row; y may be z.
inline void softmax_of_few(const real* z, real* y, int64_t rows, int64_t n) {
    real powers[LANES * LANES], largest[LANES];  // powers by columns
    for (int64_t i = 0; i < rows; i += LANES) {
        const int64_t last = rows - 1 - i < LANES - 1 ? rows - 1 - i : LANES - 1;
        const real* z_row[LANES];
        for (int64_t row = 0; row < LANES; ++row) z_row[row] = z + (i + (row < last ? row : last)) * n;
        for (int row = 0; row < LANES; ++row) largest[row] = z_row[row][0];
        for (int64_t j = 0; j < n; ++j) {
            real* column = powers + j * LANES;
            for (int row = 0; row < LANES; ++row) column[row] = z_row[row][j];
            EACH for (int row = 0; row < LANES; ++row) largest[row] = column[row] > largest[row] ? column[row] : largest[row];
        }
        for (int64_t j = 0; j < n; ++j) {
            EACH for (int row = 0; row < LANES; ++row) powers[j * LANES + row] -= largest[row];
        }
        exponential(powers, powers, n * LANES);
        const Vector* columns = reinterpret_cast<const Vector*>(powers);
        Vector sum = columns[0];
        for (int64_t j = 1; j < n; ++j) sum += columns[j];
        const Vector inverse = 1.0f / sum;
        for (int64_t row = 0; row <= last; ++row)
            for (int64_t j = 0; j < n; ++j) y[(i + row) * n + j] = powers[j * LANES + row] * inverse[row];
    }
}

// y = softmax(z); y may be z.
inline void softmax(const real* z, real* y, int64_t rows, int64_t n) {
    if (n < LANES && rows > 1) {
        softmax_of_few(z, y, rows, n);
        return;
    }
    shifted_powers(z, y, y, rows, n);
    for (int64_t i = 0; i < rows; ++i) {
        const real inverse = 1.0f / sum_of(y + i * n, n);
        EACH for (int64_t j = 0; j < n; ++j) y[i * n + j] *= inverse;
    }
}

// found = 1 if one of x is infinite or NaN.
inline void find_infinite(const real* x, int64_t count, int64_t* found) {
    uint32_t is_found = 0;  // bits, since each sum of floats would wait for the one before
#pragma omp simd reduction(| : is_found)
    for (int64_t i = 0; i < count; ++i) is_found |= is_infinite(x[i]);
    if (is_found) *found = 1;
}

// --- updates ---

// Moves parameters w (count,) and their slots, `pitch` elements from each to the next, by one step along the gradient
// `sum`, which `scale` divides by the batch's weight.
template <class Rule>
void update(real* w, const real* sum, real* slots, int64_t pitch, int64_t count, real scale, const real* row,
            const Hyper* numbers) {
    hyper = *numbers;
    const real rates[RATES_PER_STEP] = {row[0], row[1], row[2]};
#pragma GCC ivdep  // for a loop of `omp simd` the compiler would keep each lane's slots in memory
    for (int64_t i = 0; i < count; ++i) {
        real value = w[i], slot[Rule::SLOTS > 0 ? Rule::SLOTS : 1];
        for (int s = 0; s < Rule::SLOTS; ++s) slot[s] = slots[s * pitch + i];
        step_parameter<Rule>(value, slot, sum[i], scale, rates, penalty_slope(value));
        w[i] = value;
        for (int s = 0; s < Rule::SLOTS; ++s) slots[s * pitch + i] = slot[s];
    }
}

// --- calls ---

union Word {
    int64_t integer;
    double number;
    void* address;
};

template <class T>
T taken(Word word) {
    if constexpr (std::is_pointer_v<T>) return static_cast<T>(word.address);
    else if constexpr (std::is_floating_point_v<T>) return static_cast<T>(word.number);
    else return static_cast<T>(word.integer);
}

template <auto function, class Signature = decltype(function)>
struct Taking;

// Calls a function with arguments from an array of words.
template <auto function, class... Arguments>
struct Taking<function, void (*)(Arguments...)> {
    template <size_t... I>
    static void call(const Word* words, std::index_sequence<I...>) {
        function(taken<Arguments>(words[I])...);
    }
    static void call(const Word* words) { call(words, std::index_sequence_for<Arguments...>()); }
};

struct Call {
    void (*function)(const Word*);
    const Word* words;
};

extern "C" const char* const compiler = "g++ " __VERSION__;
extern "C" const int vector_bytes = mlpgpu::VECTOR_BYTES;

// While it lives, numbers below the smallest normal one count as 0: with them a processor takes tens of times as long,
// and squares of small gradients, which Adam sums, are among them.
struct NoDenormals {
#if defined(__SSE2__)
    static constexpr unsigned FLUSHED = 1 << 15, TAKEN_AS_ZERO = 1 << 6;
    const unsigned before = _mm_getcsr();
    NoDenormals() { _mm_setcsr(before | FLUSHED | TAKEN_AS_ZERO); }
    ~NoDenormals() { _mm_setcsr(before); }
#endif
};

}  // namespace mlpgpu

// A function of C for a loop, inside the namespace.
#define LOOP(name, ...) \
    extern "C" void loop_##name(const Word* words) { Taking<&__VA_ARGS__>::call(words); }
