// Messages between blocks of one kernel, in *flagged words* (as the LL protocol of NCCL has them).
//
// A value travels in a word of 64 bits, beside a *sequence number*, which tells it from what the word held before.
//
//     sender                        a word in the cache that all blocks share     receiver
//                                   [ number 6 | value ]  <-- load              expects 8, so it loads again
//     store [ number 8 | value ] -> [ number 8 | value ]  <-- load              expects 8, and has the value
//
// Words are stored and loaded whole, so a receiver polls the word itself: a message takes one store and one load, with
// no separate flag, no fence and nothing to reset. One instruction can move a *pair* of words, each with its sequence
// number. Blocks that wait for each other must run at once.
#pragma once

#include "common/integers.cuh"
#include "common/portable.cuh"

namespace mlpgpu {

// Limits the rounds of a wait: a message that is seconds late will never come, and then the kernel ends with an error,
// which is better than a kernel that never ends.
struct SpinLimit {
    int rounds = 0;
    __device__ __forceinline__ void wait() {
        pause_spinning();
        if (++rounds == 1 << 25) give_up();
    }
};

// A message: a value in a flagged word, or two in a pair of words. A blank message counts as arrived, or as missing,
// before it is loaded. Addresses of pairs are multiples of 16 bytes.
struct FlaggedWord {
    static constexpr int MOST_AT_ONCE = 8;  // loads that a thread has in flight
    uint64_t word;

    static __device__ __forceinline__ FlaggedWord of(float value, uint32_t sequence) {
        return {static_cast<uint64_t>(sequence) << 32 | __float_as_uint(value)};
    }
    static __device__ __forceinline__ FlaggedWord blank(bool has_arrived, uint32_t sequence) {
        return of(0.0f, has_arrived ? sequence : ~sequence);
    }
    __device__ __forceinline__ bool has_arrived(uint32_t sequence) const {
        return static_cast<uint32_t>(word >> 32) == sequence;
    }
    __device__ __forceinline__ float value() const { return __uint_as_float(static_cast<uint32_t>(word)); }
    __device__ __forceinline__ void load(const uint64_t* address) { word = load_word(address); }
};

struct FlaggedPair {
    static constexpr int MOST_AT_ONCE = 4;
    FlaggedWord first, second;

    static __device__ __forceinline__ FlaggedPair blank(bool has_arrived, uint32_t sequence) {
        return {FlaggedWord::blank(has_arrived, sequence), FlaggedWord::blank(has_arrived, sequence)};
    }
    __device__ __forceinline__ bool has_arrived(uint32_t sequence) const {
        return first.has_arrived(sequence) && second.has_arrived(sequence);
    }
    __device__ __forceinline__ float2 value() const { return make_float2(first.value(), second.value()); }
    __device__ __forceinline__ void load(const uint64_t* address) { load_word_pair(address, first.word, second.word); }
};

__device__ __forceinline__ void send(uint64_t* address, float value, uint32_t sequence) {
    store_word(address, FlaggedWord::of(value, sequence).word);
}

__device__ __forceinline__ void send(uint64_t* address, float2 values, uint32_t sequence) {
    store_word_pair(address, FlaggedWord::of(values.x, sequence).word, FlaggedWord::of(values.y, sequence).word);
}

// At most MOST messages that THREADS threads, a block or a warp of it, wait for: `address(i)` tells where message i <
// count lies, and `take(i, value)` consumes it. Each thread waits for every THREADS-th message.
template <class Word, int THREADS, int MOST, class Address, class Take>
struct Receiver {
    static constexpr int ALL = ceil_div(MOST, THREADS), COUNT = smallest(ALL, Word::MOST_AT_ONCE);
    static constexpr int BATCHES = ceil_div(ALL, COUNT);
    int count;
    uint32_t sequence;
    Address address;
    Take take;
    Word words[COUNT];

    static __device__ __forceinline__ int number(int batch, int i) {
        return threadIdx.x % THREADS + (batch * COUNT + i) * THREADS;
    }
    __device__ __forceinline__ bool has(int batch) const { return batch * COUNT * THREADS < count; }
    __device__ __forceinline__ void begin(int batch) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) words[i] = Word::blank(number(batch, i) >= count, sequence);
        load(batch);
    }
    // Loads the messages that have not arrived.
    __device__ __forceinline__ void load(int batch) {
        if (!has(batch)) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!words[i].has_arrived(sequence)) words[i].load(address(number(batch, i)));
    }
    __device__ __forceinline__ bool have_arrived() const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) all &= words[i].has_arrived(sequence);
        return all;
    }
    __device__ __forceinline__ void use(int batch) const {
        if (!has(batch)) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (number(batch, i) < count) take(number(batch, i), words[i].value());
    }
};

template <int THREADS, int MOST, class Word = FlaggedWord, class Address, class Take>
__device__ __forceinline__ Receiver<Word, THREADS, MOST, Address, Take> receiver(int count, uint32_t sequence,
                                                                                Address address, Take take) {
    return {count, sequence, address, take, {}};
}

// Waits for the messages of several receivers at once, and runs `work` while they are in flight.
template <class Work, class... Receivers>
__device__ __forceinline__ void receive_during(Work work, Receivers... receivers) {
    constexpr int BATCHES = largest(1, Receivers::BATCHES...);
    (receivers.begin(0), ...);
    work();
    for (int batch = 0; batch < BATCHES; ++batch) {
        if (batch > 0) (receivers.begin(batch), ...);
        for (SpinLimit limit; !(receivers.have_arrived() & ... & true);) {
            limit.wait();
            (receivers.load(batch), ...);
        }
        (receivers.use(batch), ...);
    }
}

template <class... Receivers>
__device__ __forceinline__ void receive(Receivers... receivers) {
    receive_during([] {}, receivers...);
}

// The sum of `count` words, which lie at 0, pitch, 2 pitch, …; they are added in this order.
__device__ __forceinline__ float receive_sum(const uint64_t* words, int pitch, int count, uint32_t sequence) {
    constexpr int COUNT = FlaggedWord::MOST_AT_ONCE / 2;
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < count; first += COUNT) {
        FlaggedWord word[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) word[i] = FlaggedWord::blank(first + i >= count, sequence);
        SpinLimit limit;
        for (bool is_waiting = true; is_waiting;) {
            is_waiting = false;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (!word[i].has_arrived(sequence)) word[i].load(words + (first + i) * pitch);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) is_waiting |= !word[i].has_arrived(sequence);
            if (is_waiting) limit.wait();
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sum += word[i].value();  // a blank message holds 0
    }
    return sum;
}

// The sum of the first MOST of `count` pairs, which lie at 0, pitch, 2 pitch, …; they are added in this order.
template <int MOST>
__device__ __forceinline__ float2 receive_sums(const uint64_t* pairs, int pitch, int count, uint32_t sequence) {
    constexpr int COUNT = smallest(MOST, FlaggedPair::MOST_AT_ONCE);
    float2 sum = make_float2(0.0f, 0.0f);
    count = min(count, MOST);
    for (int first = 0; first < MOST; first += COUNT) {
        FlaggedPair pair[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) pair[i] = FlaggedPair::blank(first + i >= count, sequence);
        SpinLimit limit;
        for (bool is_waiting = true; is_waiting;) {
            is_waiting = false;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (!pair[i].has_arrived(sequence)) pair[i].load(pairs + (first + i) * pitch);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) is_waiting |= !pair[i].has_arrived(sequence);
            if (is_waiting) limit.wait();
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float2 values = pair[i].value();  // a blank message holds 0
            sum.x += values.x, sum.y += values.y;
        }
    }
    return sum;
}

}  // namespace mlpgpu
