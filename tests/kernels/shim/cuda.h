// CUDA's built-ins for the host, so that tests run the kernels of cuda/ without a GPU.
//
//     g++ -std=c++17 -fsanitize=address,undefined -include tests/kernels/shim/cuda.h -c unit.cpp
//
// compiles the text that nvcc compiles for the device.  Linked with tests/kernels/shim/host.cpp, which runs the
// threads, it is a program that tests/kernels/shim_runner.py starts.
#pragma once

#define MLPGPU_HOST

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>
#include <utility>

// ---------------------------------------------------------------------------------------------------
// Words and types of the language.  There is no __shared__: kernels take SHARED.

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define SHIM_VECTOR(name, T, align2, align4)                                            \
    struct alignas(align2) name##2 { T x, y; };                                         \
    struct name##3 { T x, y, z; };                                                      \
    struct alignas(align4) name##4 { T x, y, z, w; };                                   \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                          \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                  \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTOR(char, signed char, 2, 4)
SHIM_VECTOR(uchar, unsigned char, 2, 4)
SHIM_VECTOR(short, short, 4, 8)
SHIM_VECTOR(ushort, unsigned short, 4, 8)
SHIM_VECTOR(int, int, 8, 16)
SHIM_VECTOR(uint, unsigned, 8, 16)
SHIM_VECTOR(longlong, long long, 16, 16)
SHIM_VECTOR(ulonglong, unsigned long long, 16, 16)
SHIM_VECTOR(float, float, 8, 16)
SHIM_VECTOR(double, double, 16, 16)
#undef SHIM_VECTOR

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ---------------------------------------------------------------------------------------------------
// What host.cpp does for the built-ins below.

namespace shim {

// Where in the kernel a thread waits.
struct Site {
    const char* operation;
    const char* file;
    int line;
};

constexpr int VOTE = -1;  // the source that stands for all lanes

unsigned lane();
// Barrier number 0 waits for all threads that have not exited, the others for so many.
void wait_at_barrier(const Site& site, int number = 0, int threads = 0);
void pause(const Site& site);
// Waits for the lanes of `mask`; the value of lane `source`, or with VOTE the mask of values not 0.
uint64_t exchange(unsigned mask, uint64_t value, int source, const Site& site);
// Gives bytes, 32 at the most, to the other lanes of a whole warp: `given` has them until the next but one call.
void give(const void* bytes, size_t count, const Site& site);
const void* given(int lane);
void check_width(int width, const Site& site);
// See cuda/common/dependent_launch.cuh.
void wait_for_launch_before();
void begin_launch_after(const Site& site);
void* shared_memory();
void* shared_memory_of(unsigned block);  // of the block of that x, which runs beside this one
// Ends the program with a message.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

template <class T>
uint64_t to_bits(T value) {
    static_assert(std::is_arithmetic_v<T>, "warp operations take numbers");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class To, class From>
To from_bits(From bits) {
    static_assert(sizeof(To) <= sizeof(From));
    To value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace shim

// ---------------------------------------------------------------------------------------------------
// Barriers, warp operations, atomics.  Default arguments tell the place of the call.

#define SHIM_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SHIM_PLACE) { shim::wait_at_barrier({"__syncthreads", file, line}); }

template <int NUMBER, int THREADS>
void sync_some(SHIM_PLACE) {
    shim::wait_at_barrier({"sync_some", file, line}, NUMBER, THREADS);
}

// A wait for other threads: every loop that polls memory calls it.
inline void pause_spinning(SHIM_PLACE) { shim::pause({"pause_spinning", file, line}); }

namespace mlpgpu {
inline void pdl_wait() { shim::wait_for_launch_before(); }
inline void pdl_trigger(SHIM_PLACE) { shim::begin_launch_after({"pdl_trigger", file, line}); }
}  // namespace mlpgpu

inline void __syncwarp(unsigned mask = 0xffffffffu, SHIM_PLACE) {
    shim::exchange(mask, 0, shim::VOTE, {"__syncwarp", file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, SHIM_PLACE) {
    return static_cast<unsigned>(shim::exchange(mask, predicate != 0, shim::VOTE, {"__ballot_sync", file, line}));
}

inline unsigned lanes_like(int bits, SHIM_PLACE) {
    const unsigned set = __ballot_sync(0xffffffffu, bits, file, line);
    return bits ? set : ~set;
}

inline int __any_sync(unsigned mask, int predicate, SHIM_PLACE) {
    return shim::exchange(mask, predicate != 0, shim::VOTE, {"__any_sync", file, line}) != 0;
}

inline int __all_sync(unsigned mask, int predicate, SHIM_PLACE) {
    return shim::exchange(mask, predicate == 0, shim::VOTE, {"__all_sync", file, line}) == 0;
}

// Shuffles: lanes form segments of `width`; one that would read over its segment's end keeps its value.
#define SHIM_SHUFFLE(name, Offset, inside, expression)                                                \
    template <class T>                                                                                \
    T name(unsigned mask, T value, Offset offset, int width = 32, SHIM_PLACE) {                       \
        const shim::Site site{#name, file, line};                                                     \
        shim::check_width(width, site);                                                               \
        const int lane = static_cast<int>(shim::lane()), first = lane & -width, end = first + width;  \
        const int source = expression;                                                                \
        const uint64_t bits = shim::to_bits(value);                                                   \
        return shim::from_bits<T>(shim::exchange(mask, bits, (inside) ? source : lane, site));        \
    }
SHIM_SHUFFLE(__shfl_sync, int, source < end, first + (offset & (width - 1)))
SHIM_SHUFFLE(__shfl_up_sync, unsigned, source >= first && source < end, lane - static_cast<int>(offset))
SHIM_SHUFFLE(__shfl_down_sync, unsigned, source >= first && source < end, lane + static_cast<int>(offset))
SHIM_SHUFFLE(__shfl_xor_sync, int, source >= 0 && source < end, lane ^ offset)
#undef SHIM_SHUFFLE
#undef SHIM_PLACE

inline void give_up() { shim::fail("a kernel gave up"); }

// Words between blocks: no thread runs while another is at one.
inline void store_word(uint64_t* place, uint64_t word) { *place = word; }
inline uint64_t load_word(const uint64_t* place) { return *place; }
inline void store_word_pair(uint64_t* place, uint64_t first, uint64_t second) {
    *reinterpret_cast<ulonglong2*>(place) = {first, second};
}
inline void load_word_pair(const uint64_t* place, uint64_t& first, uint64_t& second) {
    const ulonglong2 words = *reinterpret_cast<const ulonglong2*>(place);
    first = words.x, second = words.y;
}
inline void store_for_host(unsigned* place, unsigned word) { *place = word; }
inline void store_for_card(unsigned* place, unsigned word) { *place = word; }
inline unsigned load_from_card(const unsigned* place) { return *place; }
inline void store_word_for_card(uint64_t* place, uint64_t word) { *place = word; }
inline uint64_t load_word_from_card(const uint64_t* place) { return *place; }
inline unsigned count_up(unsigned* word) { return (*word)++; }

// Copies that a thread goes on beside: here they are done at once.
template <int BYTES>
void copy_async(void* to, const void* from) {
    if (reinterpret_cast<uintptr_t>(to) % BYTES || reinterpret_cast<uintptr_t>(from) % BYTES)
        shim::fail("copy_async: an address is no multiple of %d bytes", BYTES);
    memcpy(to, from, BYTES);
}
inline void commit_copies() {}
template <int PENDING> void wait_copies() {}
inline void wait_copies() {}

#define SHIM_ATOMIC(name, T, expression)                  \
    inline T name(T* address, T value) {                  \
        const T old = *address;                           \
        *address = (expression);                          \
        return old;                                       \
    }
SHIM_ATOMIC(atomicAdd, float, old + value)
SHIM_ATOMIC(atomicAdd, double, old + value)
SHIM_ATOMIC(atomicExch, float, value)
#define SHIM_INTEGER_ATOMICS(T)                           \
    SHIM_ATOMIC(atomicMax, T, old < value ? value : old)  \
    SHIM_ATOMIC(atomicMin, T, value < old ? value : old)  \
    SHIM_ATOMIC(atomicExch, T, value)                     \
    SHIM_ATOMIC(atomicOr, T, old | value)                 \
    SHIM_ATOMIC(atomicAnd, T, old & value)                \
    inline T atomicCAS(T* address, T expected, T value) { \
        const T old = *address;                           \
        if (old == expected) *address = value;            \
        return old;                                       \
    }
SHIM_INTEGER_ATOMICS(int)
SHIM_INTEGER_ATOMICS(unsigned)
SHIM_INTEGER_ATOMICS(unsigned long long)
// Sums wrap, and a signed sum in C++ must not: it is one of unsigned numbers.
SHIM_ATOMIC(atomicAdd, int, static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value)))
SHIM_ATOMIC(atomicAdd, unsigned, old + value)
SHIM_ATOMIC(atomicAdd, unsigned long long, old + value)
#undef SHIM_INTEGER_ATOMICS
#undef SHIM_ATOMIC

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// ---------------------------------------------------------------------------------------------------
// Memory.

#define WARP_ALL 0xffffffffu

// The block's dynamic shared memory, as cuda/portable.cuh defines it for the device.
#define SHARED(T, name) T* const name = static_cast<T*>(shim::shared_memory())

struct Texture {
    const float* texels;
    int64_t length;
};

// The hardware reads 0 outside of a texture; no kernel of ours means to.
inline float texel(Texture texture, int64_t i) {
    if (i < 0 || i >= texture.length)
        shim::fail("texel %lld of a texture of %lld", static_cast<long long>(i), static_cast<long long>(texture.length));
    return texture.texels[i];
}

inline void prefetch_to_l2(const void*) {}

template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldca(const T* address) { return *address; }
template <class T> T __ldcg(const T* address) { return *address; }
template <class T> T __ldcs(const T* address) { return *address; }
template <class T> void __stcg(T* address, T value) { *address = value; }
template <class T> void __stcs(T* address, T value) { *address = value; }

// ---------------------------------------------------------------------------------------------------
// Arithmetic that <math.h> lacks.

// 16-bit floats, rounded to nearest with ties to even.
inline uint16_t half_bits(float x) {
    const _Float16 half = static_cast<_Float16>(x);
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
inline float half_value(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return static_cast<float>(half);
}

#define SHIM_MIN_MAX(T)                                 \
    inline T min(T a, T b) { return b < a ? b : a; }    \
    inline T max(T a, T b) { return a < b ? b : a; }
SHIM_MIN_MAX(int)
SHIM_MIN_MAX(unsigned)
SHIM_MIN_MAX(long)
SHIM_MIN_MAX(unsigned long)
SHIM_MIN_MAX(long long)
SHIM_MIN_MAX(unsigned long long)
#undef SHIM_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
// The device's fast versions are less accurate; tests of their accuracy run on a GPU.
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float fast_sqrt(float x) { return sqrtf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
// Rounded to nearest and never fused: g++ must not contract either (-ffp-contract=off).
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

inline int __float_as_int(float x) { return shim::from_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return shim::from_bits<unsigned>(x); }
inline float __int_as_float(int bits) { return shim::from_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return shim::from_bits<float>(bits); }
inline long long __double_as_longlong(double x) { return shim::from_bits<long long>(x); }
inline double __longlong_as_double(long long bits) { return shim::from_bits<double>(bits); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t(a) * b >> 32); }

inline uint64_t multiply_wide(uint32_t a, uint32_t b) { return uint64_t(a) * b; }
inline void multiply_wide(uint64_t a, uint64_t b, uint64_t& high, uint64_t& low) {
    __extension__ using uint128 = unsigned __int128;
    const uint128 product = static_cast<uint128>(a) * b;
    high = static_cast<uint64_t>(product >> 64);
    low = static_cast<uint64_t>(product);
}

// ---------------------------------------------------------------------------------------------------
// The entries of a unit, which defines `kernels`.

namespace shim {

struct Kernel {
    const char* name;
    size_t together;  // neighbouring blocks that run side by side, or 0 for all
    void (*call)(void** arguments);
    const size_t* argument_bytes;
    size_t arguments;
};

extern const Kernel kernels[];
extern const size_t kernel_count;

template <auto function> struct Entry;
template <class... Parameter, void (*function)(Parameter...)>
struct Entry<function> {
    static constexpr size_t argument_bytes[] = {sizeof(Parameter)..., 0};

    template <size_t... i>
    static void call_with([[maybe_unused]] void** arguments, std::index_sequence<i...>) {
        function(*static_cast<Parameter*>(arguments[i])...);
    }
    static void call(void** arguments) { call_with(arguments, std::index_sequence_for<Parameter...>()); }

    static constexpr Kernel kernel(const char* name, size_t together) {
        return {name, together, call, argument_bytes, sizeof...(Parameter)};
    }
};

}  // namespace shim

#include "matrix.h"
#include "hopper.h"
