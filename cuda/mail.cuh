// Values from block to block while both run.
//
// A value travels in a word of 64 bits, beside a *tag*, a number that tells it from what lay there before.  Tags may be
// the numbers of steps:
//
//     sender                       a word in the cache that all blocks share        receiver
//                                  [ tag 6 | a value of step 6 ]  <-- load          not of step 8: load again
//     store [ tag 8 | value ] -->  [ tag 8 | a value of step 8 ]  <-- load          of step 8: there it is
//
// Words are stored and loaded whole, so who waits for one polls the word itself: it arrives in the time of one store and
// one load, with no flag, no fence and nothing to reset.  Blocks that wait for each other must run at once.
#pragma once

#include "portable.cuh"

namespace mlpgpu {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

__host__ __device__ constexpr int largest(int a) { return a; }
template <class... More>
__host__ __device__ constexpr int largest(int a, int b, More... more) {
    return largest(a < b ? b : a, more...);
}

__host__ __device__ constexpr int smallest(int a, int b) { return a < b ? a : b; }

// Counts the rounds of a wait: mail that has not come for seconds never will, and a kernel that ends with an error is
// better than one that does not end.
struct Patience {
    int rounds = 0;
    __device__ __forceinline__ void wait() {
        pause_spinning();
        if (++rounds == 1 << 25) give_up();
    }
};

__device__ __forceinline__ void send(uint64_t* word, float value, uint32_t tag) {
    store_word(word, static_cast<uint64_t>(tag) << 32 | __float_as_uint(value));
}

constexpr int MAIL_BATCH = 8;  // words that a thread has on their way at once

// At most MOST words that THREADS threads wait for, a block or a warp of it: `place(i)` tells where number i < count
// is, and `take(i, value)` gets it.  Each of the threads waits for every THREADS-th.
template <int THREADS, int MOST, class Place, class Take>
struct Letters {
    static constexpr int ALL = ceil_div(MOST, THREADS), COUNT = ALL < MAIL_BATCH ? ALL : MAIL_BATCH;
    static constexpr int BATCHES = ceil_div(ALL, COUNT);
    int count;
    uint32_t tag;
    Place place;
    Take take;
    uint64_t word[COUNT];

    __device__ __forceinline__ static int number(int batch, int i) {
        return threadIdx.x % THREADS + (batch * COUNT + i) * THREADS;
    }
    __device__ __forceinline__ bool has(int batch) const { return batch * COUNT * THREADS < count; }
    __device__ __forceinline__ void load(int batch) {
        if (!has(batch)) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) word[i] = load_word(place(min(number(batch, i), count - 1)));
    }
    __device__ __forceinline__ bool is_missing(int batch) const {
        bool found = false;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) found |= static_cast<uint32_t>(word[i] >> 32) != tag;
        return found && has(batch);
    }
    __device__ __forceinline__ void use(int batch) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (number(batch, i) < count) take(number(batch, i), __uint_as_float(static_cast<uint32_t>(word[i])));
    }
};

template <int THREADS, int MOST, class Place, class Take>
__device__ __forceinline__ Letters<THREADS, MOST, Place, Take> letters(int count, uint32_t tag, Place place,
                                                                       Take take) {
    return {count, tag, place, take, {}};
}

// Waits for all of several kinds of letters at once, and does other work while they are on their way.
template <class Work, class... Kinds>
__device__ __forceinline__ void receive_beside(Work work, Kinds... kinds) {
    constexpr int BATCHES = largest(Kinds::BATCHES...);
    (kinds.load(0), ...);
    work();
    for (int batch = 0; batch < BATCHES; ++batch) {
        if (batch > 0) (kinds.load(batch), ...);
        for (Patience patience; (kinds.is_missing(batch) | ...);) {
            patience.wait();
            (kinds.load(batch), ...);
        }
        (kinds.use(batch), ...);
    }
}

template <class... Kinds>
__device__ __forceinline__ void receive(Kinds... kinds) {
    receive_beside([] {}, kinds...);
}

// The sum of words 0, pitch, 2 pitch, … of which there are `count`, at least one and at most MOST; in this order.
template <int MOST>
__device__ __forceinline__ float receive_sum(const uint64_t* words, int64_t pitch, int count, uint32_t tag) {
    constexpr int COUNT = MOST < MAIL_BATCH ? MOST : MAIL_BATCH;
    float sum = 0.0f;
    for (int first = 0; first < count; first += COUNT) {
        uint64_t word[COUNT];
        Patience patience;
        for (bool is_waiting = true; is_waiting;) {
            is_waiting = false;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) word[i] = load_word(words + min(first + i, count - 1) * pitch);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) is_waiting |= static_cast<uint32_t>(word[i] >> 32) != tag;
            if (is_waiting) patience.wait();
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (first + i < count) sum += __uint_as_float(static_cast<uint32_t>(word[i]));
    }
    return sum;
}

}  // namespace mlpgpu
