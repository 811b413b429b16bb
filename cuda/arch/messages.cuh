// Values from block to block while both run.
//
// A value travels in a word of 64 bits, beside a *tag*, which tells it from what lay there before: the step's number.
//
//     sender                       a word in the cache that all blocks share        receiver
//                                  [ tag 6 | a value of step 6 ]  <-- load          not yet of step 8: load again
//     store [ tag 8 | value ] -->  [ tag 8 | a value of step 8 ]  <-- load          of step 8: there it is
//
// Words are stored and loaded whole, so who waits polls the word itself: it arrives in the time of one store and one
// load, with no flag, no fence and nothing to reset.  One instruction can move a *pair* of words, each with its own tag.
// Blocks that wait for each other must run at once.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

__host__ __device__ constexpr int largest(int a) { return a; }
template <class... More>
__host__ __device__ constexpr int largest(int a, int b, More... more) {
    return largest(a < b ? b : a, more...);
}

__host__ __device__ constexpr int smallest(int a, int b) { return a < b ? a : b; }

// The smallest power of two from n on.
__host__ __device__ constexpr int power_from(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

// Counts the rounds of a wait: mail that has not come for seconds never will, and a kernel that ends with an error is
// better than one that does not end.
struct Patience {
    int rounds = 0;
    __device__ __forceinline__ void wait() {
        pause_spinning();
        if (++rounds == 1 << 25) give_up();
    }
};

// What is on its way: a value in a word, or two in a pair of them.  A blank one counts as arrived, or as not, before it
// is loaded.  Places of pairs are multiples of 16 bytes.
struct MailWord {
    static constexpr int MOST_AT_ONCE = 8;  // that a thread has on their way
    uint64_t word;

    static __device__ __forceinline__ MailWord of(float value, uint32_t tag) {
        return {static_cast<uint64_t>(tag) << 32 | __float_as_uint(value)};
    }
    static __device__ __forceinline__ MailWord blank(bool has_arrived, uint32_t tag) {
        return of(0.0f, has_arrived ? tag : ~tag);
    }
    __device__ __forceinline__ bool has_arrived(uint32_t tag) const { return static_cast<uint32_t>(word >> 32) == tag; }
    __device__ __forceinline__ float value() const { return __uint_as_float(static_cast<uint32_t>(word)); }
    __device__ __forceinline__ void load(const uint64_t* place) { word = load_word(place); }
};

struct MailPair {
    static constexpr int MOST_AT_ONCE = 4;
    MailWord first, second;

    static __device__ __forceinline__ MailPair blank(bool has_arrived, uint32_t tag) {
        return {MailWord::blank(has_arrived, tag), MailWord::blank(has_arrived, tag)};
    }
    __device__ __forceinline__ bool has_arrived(uint32_t tag) const {
        return first.has_arrived(tag) && second.has_arrived(tag);
    }
    __device__ __forceinline__ float2 value() const { return make_float2(first.value(), second.value()); }
    __device__ __forceinline__ void load(const uint64_t* place) { load_word_pair(place, first.word, second.word); }
};

__device__ __forceinline__ void send(uint64_t* place, float value, uint32_t tag) {
    store_word(place, MailWord::of(value, tag).word);
}

__device__ __forceinline__ void send(uint64_t* place, float2 values, uint32_t tag) {
    store_word_pair(place, MailWord::of(values.x, tag).word, MailWord::of(values.y, tag).word);
}

// At most MOST letters that THREADS threads wait for, a block or a warp of it: `place(i)` tells where number i < count
// is, and `take(i, value)` gets it.  Each of the threads waits for every THREADS-th.
template <class Letter, int THREADS, int MOST, class Place, class Take>
struct Letters {
    static constexpr int ALL = ceil_div(MOST, THREADS), COUNT = smallest(ALL, Letter::MOST_AT_ONCE);
    static constexpr int BATCHES = ceil_div(ALL, COUNT);
    int count;
    uint32_t tag;
    Place place;
    Take take;
    Letter letter[COUNT];

    static __device__ __forceinline__ int number(int batch, int i) {
        return threadIdx.x % THREADS + (batch * COUNT + i) * THREADS;
    }
    __device__ __forceinline__ bool has(int batch) const { return batch * COUNT * THREADS < count; }
    __device__ __forceinline__ void begin(int batch) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) letter[i] = Letter::blank(number(batch, i) >= count, tag);
        load(batch);
    }
    // Those that have not arrived.
    __device__ __forceinline__ void load(int batch) {
        if (!has(batch)) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!letter[i].has_arrived(tag)) letter[i].load(place(number(batch, i)));
    }
    __device__ __forceinline__ bool have_arrived() const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) all &= letter[i].has_arrived(tag);
        return all;
    }
    __device__ __forceinline__ void use(int batch) const {
        if (!has(batch)) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (number(batch, i) < count) take(number(batch, i), letter[i].value());
    }
};

template <int THREADS, int MOST, class Letter = MailWord, class Place, class Take>
__device__ __forceinline__ Letters<Letter, THREADS, MOST, Place, Take> letters(int count, uint32_t tag, Place place,
                                                                               Take take) {
    return {count, tag, place, take, {}};
}

// Waits for all of several kinds of letters at once, and does other work while they are on their way.
template <class Work, class... Kinds>
__device__ __forceinline__ void receive_beside(Work work, Kinds... kinds) {
    constexpr int BATCHES = largest(1, Kinds::BATCHES...);
    (kinds.begin(0), ...);
    work();
    for (int batch = 0; batch < BATCHES; ++batch) {
        if (batch > 0) (kinds.begin(batch), ...);
        for (Patience patience; !(kinds.have_arrived() & ... & true);) {
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

// The sums of the first MOST of the pairs at 0, pitch, 2 pitch, … of which there are `count`; in this order.
template <int MOST>
__device__ __forceinline__ float2 receive_sums(const uint64_t* pairs, int pitch, int count, uint32_t tag) {
    constexpr int COUNT = smallest(MOST, MailPair::MOST_AT_ONCE);
    float2 sum = make_float2(0.0f, 0.0f);
    count = min(count, MOST);
    for (int first = 0; first < MOST; first += COUNT) {
        MailPair pair[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) pair[i] = MailPair::blank(first + i >= count, tag);
        Patience patience;
        for (bool is_waiting = true; is_waiting;) {
            is_waiting = false;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (!pair[i].has_arrived(tag)) pair[i].load(pairs + (first + i) * pitch);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) is_waiting |= !pair[i].has_arrived(tag);
            if (is_waiting) patience.wait();
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float2 values = pair[i].value();  // a blank's are 0
            sum.x += values.x, sum.y += values.y;
        }
    }
    return sum;
}

}  // namespace mlpgpu
