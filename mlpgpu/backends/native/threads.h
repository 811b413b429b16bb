// Who computes: the calling thread, and helpers that all callers of a library share.  A helper that has nothing to do
// stays awake for a while, since to wake a thread takes longer than to copy a megabyte, and sleeps then.
//
// A job is so many pieces, and stands in a slot while it is under way.  Its ticket says how many pieces nobody has begun
// yet; who lowers it by one, caller or helper, computes that piece.  So nobody waits for a helper that has begun nothing,
// and there is no lock.
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
#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace mlpgpu {

constexpr int SLOTS = 16;
constexpr int APART = 128;  // bytes between what threads write, two cache lines
constexpr int PAUSES = 64;  // between two looks at the clock, 1 to 3 us
constexpr int PATIENCE = 256;  // pauses of a thread that waits for another, before it offers it its core each time

// What the caller has others help with: `compute(what, piece)` for each piece.
struct Job {
    void (*compute)(void* what, int64_t piece);
    void* what;
    int64_t pieces;
    int64_t slot, number;  // where it stands while it is under way
};

struct alignas(APART) Slot {
    std::atomic<uint32_t> is_taken{0};
    std::atomic<uint64_t> ticket{0};  // number of the job, pieces that nobody has begun: 32 bits each
    std::atomic<int64_t> unfinished{0};  // pieces
    Job job;
};

struct Pool {
    Slot slots[SLOTS];
    alignas(APART) std::atomic<uint32_t> published{0};  // jobs so far; helpers sleep until it changes
    std::atomic<uint32_t> numbers{0};
    std::atomic<int64_t> awake_nanoseconds{0};
    std::atomic<int> caller_core{-1};  // of the latest job
    alignas(APART) std::atomic<int64_t> threads{0}, asleep{0};
    std::atomic<uint32_t> is_starting{0};
};

static Pool pool;  // never destroyed: helpers look at it until the process ends

inline void relax() {
#if defined(__SSE2__)
    _mm_pause();
#endif
}

// What a thread does while it waits for another one, after so many pauses: that one may wait for this core.
inline void wait_a_little(int pauses) {
    if (pauses < PATIENCE) relax();
    else sched_yield();
}

inline void compute_taken_piece(Slot& slot, uint64_t ticket) {
    const int64_t left = static_cast<uint32_t>(ticket);
    slot.job.compute(slot.job.what, slot.job.pieces - left);
    slot.unfinished.fetch_sub(1, std::memory_order_release);
}

// Computes a piece of the oldest job that has one left; returns whether there was one.
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
        // From here on to its end the piece is this thread's, and the slot stays as it is until then.
        if (oldest->ticket.compare_exchange_strong(ticket, ticket - 1, std::memory_order_acq_rel)) {
            compute_taken_piece(*oldest, ticket);
            return true;
        }
    }
}

// While it lives, the calling thread keeps off a core, if it may run on others: the system often wakes a helper on its
// caller's core, where the two would take turns for milliseconds.
class Elsewhere {
public:
    explicit Elsewhere(int core) {
        if (core < 0 || sched_getaffinity(0, sizeof(allowed), &allowed)) return;
        others = allowed;
        CPU_CLR(core, &others);
        is_set = CPU_COUNT(&others) && !CPU_EQUAL(&others, &allowed) && !sched_setaffinity(0, sizeof(others), &others);
    }
    // Unless somebody else has said meanwhile where it may run.
    ~Elsewhere() {
        cpu_set_t now;
        if (is_set && !sched_getaffinity(0, sizeof(now), &now) && CPU_EQUAL(&now, &others))
            sched_setaffinity(0, sizeof(allowed), &allowed);
    }

private:
    cpu_set_t allowed, others;
    bool is_set = false;
};

// Moves the calling thread off a core that it is on.
inline void leave(int core) {
    if (sched_getcpu() == core) Elsewhere moves(core);
}

// Waits for another job than those that were `seen`, for as long as helpers stay awake; returns whether one came.
inline bool stays_awake(uint32_t seen) {
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(pool.awake_nanoseconds.load(std::memory_order_relaxed));
    do {
        for (int i = 0; i < PAUSES; ++i) {
            if (pool.published.load(std::memory_order_relaxed) != seen) return true;
            relax();
        }
        leave(pool.caller_core.load(std::memory_order_relaxed));
        sched_yield();  // others may have more to do
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
        Elsewhere sleeps(pool.caller_core.load(std::memory_order_relaxed));
        pool.asleep.fetch_add(1);
        // Whoever wakes a helper counts it as awake, for the next job comes sooner than it does.
        if (futex(FUTEX_WAIT_PRIVATE, seen)) pool.asleep.fetch_sub(1);  // a job came before it slept
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

// A forked child has no helpers, and none of the threads whose jobs were under way.
inline void forget_threads() {
    for (Slot& slot : pool.slots) slot.ticket.store(0), slot.is_taken.store(0);
    pool.threads.store(0), pool.asleep.store(0), pool.is_starting.store(0);
}

static const int is_registered = pthread_atfork(nullptr, nullptr, forget_threads);

// Has up to so many helpers begin, if a slot is free; else the thread that asks for the end computes alone.
inline void begin(Job& job, int64_t helpers, int64_t awake_nanoseconds) {
    job.slot = -1;
    for (int place = 0; place < SLOTS && job.slot < 0; ++place) {
        Slot& slot = pool.slots[place];
        if (slot.is_taken.load(std::memory_order_relaxed) || slot.is_taken.exchange(1, std::memory_order_acquire)) continue;
        const uint32_t number = pool.numbers.fetch_add(1) + 1;
        job.slot = place, job.number = number;
        slot.job = job;
        slot.unfinished.store(job.pieces, std::memory_order_relaxed);
        slot.ticket.store(static_cast<uint64_t>(number) << 32 | static_cast<uint64_t>(job.pieces));
    }
    if (job.slot < 0) return;
    pool.awake_nanoseconds.store(awake_nanoseconds, std::memory_order_relaxed);
    pool.caller_core.store(sched_getcpu(), std::memory_order_relaxed);
    start_helpers(helpers);
    pool.published.fetch_add(1);
    const int64_t asleep = pool.asleep.load(), wanted = helpers - (pool.threads.load() - asleep);
    const int64_t woken = wanted < asleep ? wanted : asleep;
    if (woken > 0) pool.asleep.fetch_sub(futex(FUTEX_WAKE_PRIVATE, static_cast<uint32_t>(woken)));
}

// Where a job stands; null if nobody helps with it: no slot was free, or it began before a fork.
inline Slot* slot_of(const Job& job) {
    Slot* slot = job.slot < 0 ? nullptr : &pool.slots[job.slot];
    return slot && slot->ticket.load() >> 32 == static_cast<uint64_t>(job.number) ? slot : nullptr;
}

// Waits until none of the pieces that were begun is unfinished, and gives the slot back.
inline void await(Slot& slot) {
    for (int i = 0; slot.unfinished.load(std::memory_order_acquire); ++i) wait_a_little(i);
    slot.is_taken.store(0, std::memory_order_release);
}

// Computes what is left, beside those who have begun, and waits for them.
inline void finish(const Job& job) {
    Slot* slot = slot_of(job);
    if (!slot) {
        for (int64_t piece = 0; piece < job.pieces; ++piece) job.compute(job.what, piece);
        return;
    }
    uint64_t ticket = slot->ticket.load();
    while (static_cast<uint32_t>(ticket)) {
        if (!slot->ticket.compare_exchange_strong(ticket, ticket - 1)) continue;
        compute_taken_piece(*slot, ticket);
        ticket = slot->ticket.load();
    }
    await(*slot);
}

// Takes back what nobody has begun, and waits for those who have.
inline void take_back(const Job& job) {
    Slot* slot = slot_of(job);
    if (!slot) return;
    uint64_t ticket = slot->ticket.load();
    while (const uint32_t left = static_cast<uint32_t>(ticket)) {
        if (slot->ticket.compare_exchange_strong(ticket, ticket - left)) {
            slot->unfinished.fetch_sub(left);
            break;
        }
    }
    await(*slot);
}

}  // namespace mlpgpu

extern "C" int64_t helper_count() { return mlpgpu::pool.threads.load(); }
