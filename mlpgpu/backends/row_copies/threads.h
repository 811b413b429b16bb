// Who copies: the calling thread, and helpers that all callers share.  A helper that has nothing to do stays awake for a
// while, since to wake a thread takes longer than to copy a megabyte, and sleeps then.
//
// A copy stands in a slot while it is under way.  Its ticket says how many chunks nobody has begun yet; who lowers it by
// one, caller or helper, copies that chunk.  So nobody waits for a helper that has begun nothing, and there is no lock.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>

#include "rows.h"

namespace mlpgpu {

constexpr int SLOTS = 16;
constexpr int PAUSES = 64;  // between two looks at the clock, 1 to 3 us
constexpr int PATIENCE = 2048;  // pauses of a caller that waits for a helper, before it offers it the core

struct alignas(2 * CACHE_LINE) Slot {
    std::atomic<uint32_t> is_taken{0};
    std::atomic<uint64_t> ticket{0};  // number of the copy, chunks that nobody has begun: 32 bits each
    std::atomic<int64_t> unfinished{0};  // chunks
    std::atomic<uint32_t> found{0};      // whether one has an infinite number
    int64_t chunks;
    Copy copy;
};

struct Pool {
    Slot slots[SLOTS];
    alignas(2 * CACHE_LINE) std::atomic<uint32_t> published{0};  // copies so far; helpers sleep until it changes
    std::atomic<uint32_t> numbers{0};
    std::atomic<int64_t> awake_nanoseconds{0};
    std::atomic<int> caller_core{-1};  // of the latest copy
    alignas(2 * CACHE_LINE) std::atomic<int64_t> threads{0}, asleep{0};
    std::atomic<uint32_t> is_starting{0};
};

static Pool pool;  // never destroyed: helpers look at it until the process ends

inline void relax() {
#if defined(__SSE2__)
    _mm_pause();
#endif
}

inline void copy_taken_chunk(Slot& slot, uint64_t ticket) {
    const int64_t left = static_cast<uint32_t>(ticket);
    if (copy_chunk(slot.copy, slot.chunks - left)) slot.found.store(1, std::memory_order_relaxed);
    slot.unfinished.fetch_sub(1, std::memory_order_release);
}

// Copies a chunk of the oldest copy that has one left; returns whether there was one.
inline bool help_once() {
    for (;;) {
        Slot* oldest = nullptr;
        uint64_t ticket = 0;
        for (Slot& slot : pool.slots) {
            const uint64_t now = slot.ticket.load(std::memory_order_acquire);
            if (!static_cast<uint32_t>(now)) continue;
            const auto older = static_cast<uint32_t>(ticket >> 32) - static_cast<uint32_t>(now >> 32);
            if (!oldest || static_cast<int32_t>(older) > 0) oldest = &slot, ticket = now;
        }
        if (!oldest) return false;
        // From here on to its end the chunk is this thread's, and the slot stays as it is until then.
        if (oldest->ticket.compare_exchange_strong(ticket, ticket - 1, std::memory_order_acq_rel)) {
            copy_taken_chunk(*oldest, ticket);
            return true;
        }
    }
}

// Moves the calling thread to another core, if it may and is on this one: the system often wakes a helper on its
// caller's core, where the two would take turns for milliseconds.
inline void leave(int core) {
    cpu_set_t allowed;
    if (sched_getcpu() != core || sched_getaffinity(0, sizeof(allowed), &allowed)) return;
    cpu_set_t others = allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof(others), &others))
        sched_setaffinity(0, sizeof(allowed), &allowed);
}

// Waits for another copy than those that were `seen`, for as long as helpers stay awake; returns whether one came.
inline bool stays_awake(uint32_t seen) {
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(pool.awake_nanoseconds.load(std::memory_order_relaxed));
    do {
        for (int i = 0; i < PAUSES; ++i) {
            if (pool.published.load(std::memory_order_relaxed) != seen) return true;
            relax();
        }
        leave(pool.caller_core.load(std::memory_order_relaxed));
    } while (std::chrono::steady_clock::now() < until);
    return false;
}

inline long futex(int operation, uint32_t value) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&pool.published), operation, value, nullptr, nullptr, 0);
}

inline void* help(void*) {
#if defined(__SSE2__)
    _mm_setcsr(0x1f80);  // as processes begin: whoever started this thread may have had small numbers count as 0
#endif
    for (;;) {
        const uint32_t seen = pool.published.load();
        while (help_once()) {}
        if (stays_awake(seen)) continue;
        pool.asleep.fetch_add(1);
        // Whoever wakes a helper counts it as awake, for the next copy comes sooner than it does.
        if (futex(FUTEX_WAIT_PRIVATE, seen)) pool.asleep.fetch_sub(1);  // a copy came before it slept
    }
}

// Helpers up to so many; fewer where the system gives no more.  No signal is theirs.
inline void start_helpers(int64_t count) {
    if (pool.threads.load() >= count || pool.is_starting.exchange(1)) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool.threads.load() < count && !pthread_create(&thread, &attributes, help, nullptr)) pool.threads.fetch_add(1);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pool.is_starting.store(0);
}

// A forked child has no helpers, and none of the threads whose copies were under way.
inline void forget_threads() {
    for (Slot& slot : pool.slots) slot.ticket.store(0), slot.is_taken.store(0);
    pool.threads.store(0), pool.asleep.store(0), pool.is_starting.store(0);
}

static const int is_registered = pthread_atfork(nullptr, nullptr, forget_threads);

}  // namespace mlpgpu

using mlpgpu::Copy;

// Has up to so many helpers begin, if a slot is free; else the thread that asks for the end copies alone.
extern "C" void begin_copy(Copy* copy, int64_t helpers, int64_t awake_nanoseconds) {
    using namespace mlpgpu;
    copy->slot = -1;
    for (int place = 0; place < SLOTS && copy->slot < 0; ++place) {
        Slot& slot = pool.slots[place];
        if (slot.is_taken.load(std::memory_order_relaxed) || slot.is_taken.exchange(1, std::memory_order_acquire)) continue;
        const uint32_t number = pool.numbers.fetch_add(1) + 1;
        copy->slot = place, copy->number = number;
        slot.copy = *copy, slot.chunks = chunks_of(*copy);
        slot.unfinished.store(slot.chunks, std::memory_order_relaxed);
        slot.found.store(0, std::memory_order_relaxed);
        slot.ticket.store(static_cast<uint64_t>(number) << 32 | static_cast<uint64_t>(slot.chunks));
    }
    if (copy->slot < 0) return;
    pool.awake_nanoseconds.store(awake_nanoseconds, std::memory_order_relaxed);
    pool.caller_core.store(sched_getcpu(), std::memory_order_relaxed);
    start_helpers(helpers);
    pool.published.fetch_add(1);
    const int64_t asleep = pool.asleep.load(), wanted = helpers - (pool.threads.load() - asleep);
    const int64_t woken = wanted < asleep ? wanted : asleep;
    if (woken > 0) pool.asleep.fetch_sub(futex(FUTEX_WAKE_PRIVATE, static_cast<uint32_t>(woken)));
}

// Copies what is left, beside those who have begun, and waits for them; returns whether all numbers are finite.
extern "C" int64_t finish_copy(Copy* copy) {
    using namespace mlpgpu;
    Slot* slot = copy->slot < 0 ? nullptr : &pool.slots[copy->slot];
    if (!slot || slot->ticket.load() >> 32 != static_cast<uint64_t>(copy->number)) {  // by nobody, or before a fork
        uint32_t found = 0;
        for (int64_t chunk = 0, chunks = chunks_of(*copy); chunk < chunks; ++chunk) found |= copy_chunk(*copy, chunk);
        return !found;
    }
    uint64_t ticket = slot->ticket.load();
    while (static_cast<uint32_t>(ticket)) {
        if (!slot->ticket.compare_exchange_strong(ticket, ticket - 1)) continue;
        copy_taken_chunk(*slot, ticket);
        ticket = slot->ticket.load();
    }
    for (int i = 1; slot->unfinished.load(std::memory_order_acquire); ++i) {
        if (i % PATIENCE) relax();
        else sched_yield();  // the helper may wait for this core
    }
    const bool is_finite = !slot->found.load(std::memory_order_relaxed);
    slot->is_taken.store(0, std::memory_order_release);
    return is_finite;
}

extern "C" int64_t helper_count() { return mlpgpu::pool.threads.load(); }
