// What a copy of rows is: numbers of an array of the caller's, in the type that a card or a loop takes, one after another.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINED __attribute__((always_inline))  // a loop whose elements are calls is no loop of vectors

namespace mlpgpu {

constexpr int64_t CACHE_LINE = 64;
constexpr int64_t CHUNK_BYTES = 64 << 10;  // of what is written: threads come for so much at a time, some 6 us

// Types of the caller's numbers; rows.py lists them in this order.  BYTES stay bytes, all others become float or double.
enum Kind : int64_t { BYTES, FLOAT32, FLOAT64, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64 };

// `count` rows of an array, from row `first` on, or from that place of the list `rows` on, to `to`, (count, columns).
struct Copy {
    const char* x;                       // its element (0, 0)
    int64_t kind, row_bytes, item_bytes;  // from each row and each element to the next
    int64_t columns;
    const int64_t* rows;  // null: all in order
    int64_t row_count;    // of x, in which listed rows are taken to lie
    const double *mean, *scale;  // of each column: numbers become (x - mean) / scale, in float64; or null
    int64_t first, count;
    char* to;
    int64_t is_past_caches;  // whether what is written goes to memory at once
};

template <class Number = float>
int64_t target_bytes(const Copy& copy) {
    return copy.kind == BYTES ? 1 : sizeof(Number);
}

template <class Number = float>
int64_t chunks_of(const Copy& copy) {
    return (copy.count * copy.columns * target_bytes<Number>(copy) + CHUNK_BYTES - 1) / CHUNK_BYTES;
}

inline uint32_t is_infinite(uint8_t) { return 0; }
inline uint32_t is_infinite(float value) { return __builtin_fabsf(value) <= __FLT_MAX__ ? 0 : 1; }
inline uint32_t is_infinite(double value) { return __builtin_fabs(value) <= __DBL_MAX__ ? 0 : 1; }

// Writes a cache line past the caches; `to` begins one.
inline void write_past_caches(const void* from, void* to) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
#elif defined(__SSE2__)
    for (int i = 0; i < 4; ++i)
        _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
#else
    memcpy(to, from, CACHE_LINE);
#endif
}

// to[i] = read(first + i); returns whether one of them is infinite or NaN.
template <class To, class Read>
INLINED inline uint32_t write(const Read& read, int64_t first, To* to, int64_t count) {
    uint32_t found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t i = 0; i < count; ++i) {
        const To value = read(first + i);
        to[i] = value;
        found |= is_infinite(value);
    }
    return found;
}

// The same, where that is asked for by whole cache lines.
template <class To, class Read>
INLINED inline uint32_t write_all(const Read& read, To* to, int64_t count, bool is_past_caches) {
    constexpr int64_t LANES = CACHE_LINE / sizeof(To);
    const int64_t before = -reinterpret_cast<uintptr_t>(to) % CACHE_LINE / sizeof(To);
    if (!is_past_caches || count < before + LANES) return write(read, 0, to, count);
    uint32_t found = write(read, 0, to, before);
    int64_t done = before;
    alignas(CACHE_LINE) To values[LANES];
    for (; done + LANES <= count; done += LANES) {
        found |= write(read, done, values, LANES);
        write_past_caches(values, to + done);
    }
    return found | write(read, done, to + done, count - done);
}

// Copies `count` elements that lie in one row, or in an array without gaps, from element `column` of it on.
template <class From, class To>
uint32_t copy_elements(const Copy& copy, const char* row, int64_t column, To* to, int64_t count) {
    const char* from = row + column * copy.item_bytes;
    const int64_t item_bytes = copy.item_bytes;
    const bool past = copy.is_past_caches;
    const auto at = [=](int64_t i) INLINED { return *reinterpret_cast<const From*>(from + i * item_bytes); };
    if constexpr (std::is_floating_point_v<To>) {
        if (copy.mean) {
            const double *mean = copy.mean + column, *scale = copy.scale + column;
            return write_all(
                [=](int64_t i) INLINED { return static_cast<To>((static_cast<double>(at(i)) - mean[i]) / scale[i]); }, to, count,
                past);
        }
    }
    if (item_bytes != sizeof(From)) return write_all([=](int64_t i) INLINED { return static_cast<To>(at(i)); }, to, count, past);
    const From* dense = reinterpret_cast<const From*>(from);
    return write_all([=](int64_t i) INLINED { return static_cast<To>(dense[i]); }, to, count, past);
}

template <class From, class To>
uint32_t copy_chunk_of(const Copy& copy, int64_t chunk) {
    constexpr int64_t ELEMENTS = CHUNK_BYTES / sizeof(To);
    const int64_t all = copy.count * copy.columns, begin = chunk * ELEMENTS;
    const int64_t end = begin + ELEMENTS < all ? begin + ELEMENTS : all;
    To* to = reinterpret_cast<To*>(copy.to);
    const bool is_without_gaps = copy.row_bytes == copy.columns * copy.item_bytes;
    if (!copy.rows && !copy.mean && is_without_gaps)
        return copy_elements<From>(copy, copy.x + copy.first * copy.row_bytes, begin, to + begin, end - begin);
    uint32_t found = 0;
    int64_t row = begin / copy.columns, column = begin % copy.columns;
    for (int64_t place = begin; place < end; ++row, column = 0) {
        int64_t number = copy.first + row;
        if (copy.rows) {
            const int64_t last = copy.row_count - 1, listed = copy.rows[number];
            number = listed < 0 ? 0 : listed > last ? last : listed;
        }
        const int64_t left = end - place, count = copy.columns - column < left ? copy.columns - column : left;
        found |= copy_elements<From>(copy, copy.x + number * copy.row_bytes, column, to + place, count);
        place += count;
    }
    return found;
}

// Copies one chunk, as Numbers unless it is of BYTES; returns whether one that is written is infinite or NaN.
template <class Number = float>
uint32_t copy_chunk(const Copy& copy, int64_t chunk) {
    uint32_t found = 0;
    switch (copy.kind) {
        case BYTES: found = copy_chunk_of<uint8_t, uint8_t>(copy, chunk); break;
        case FLOAT32: found = copy_chunk_of<float, Number>(copy, chunk); break;
        case FLOAT64: found = copy_chunk_of<double, Number>(copy, chunk); break;
        case INT8: found = copy_chunk_of<int8_t, Number>(copy, chunk); break;
        case UINT8: found = copy_chunk_of<uint8_t, Number>(copy, chunk); break;
        case INT16: found = copy_chunk_of<int16_t, Number>(copy, chunk); break;
        case UINT16: found = copy_chunk_of<uint16_t, Number>(copy, chunk); break;
        case INT32: found = copy_chunk_of<int32_t, Number>(copy, chunk); break;
        case UINT32: found = copy_chunk_of<uint32_t, Number>(copy, chunk); break;
        case INT64: found = copy_chunk_of<int64_t, Number>(copy, chunk); break;
        case UINT64: found = copy_chunk_of<uint64_t, Number>(copy, chunk); break;
    }
#if defined(__SSE2__)
    if (copy.is_past_caches) _mm_sfence();  // before whoever waits for this chunk is told
#endif
    return found;
}

}  // namespace mlpgpu
