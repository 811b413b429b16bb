// Runs the kernels of a unit on the host: fibres, their scheduler, and the program around them.
//
// Each thread of a block is a fibre that runs until its next barrier, warp operation or pause; so the
// order in which threads run is known, and a test chooses it.  Blocks run one after the other, those
// of a cluster or of a cooperative kernel side by side.  Global buffers and the block's shared memory
// are heap blocks of their exact size, so that the address sanitizer sees a border crossed.  Breaking
// a rule of CUDA ends the program with a message: a barrier not reached by all, a shuffle from a lane
// that is not there, a texel outside of its texture, a wait without end.
//
// The sanitizers check the kernels, not this file: its loops over threads take a large part of a test's time.
//
// What this does not show: memory order, races between warps that run truly at once, speed.

#include <dlfcn.h>
#include <link.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "cuda.h"

#if !defined(__x86_64__) || !defined(__SANITIZE_ADDRESS__)
#error "the shim switches fibres in x86-64 assembly and needs -fsanitize=address"
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// ---------------------------------------------------------------------------------------------------
// Fibres.

// Saves the registers a function must keep on this stack, its top in *save, and goes on where `load`
// was saved.  (swapcontext would not do: the sanitizer's own version of it clears what is known of the
// stack, and so overlooks a thread's arrays from the first barrier on.)
extern "C" void shim_switch(void** save, void* load);
asm(R"(
    .pushsection .text
    .type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size shim_switch, . - shim_switch
    .popsection
)");

namespace shim {

constexpr unsigned LANES = 32;
constexpr size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 4 << 10;
constexpr size_t GIFT_BYTES = 32;
constexpr int BARRIERS = 4;  // of a block, by number: as many as kernels use
constexpr int PATIENCE = 1000;  // rounds of nothing but pauses until a wait counts as endless

// Texts are literals, of which a compiler mostly keeps one copy: where they lie tells most of them apart or alike.
bool same_text(const char* a, const char* b) { return a == b || !strcmp(a, b); }

bool operator==(const Site& a, const Site& b) {
    return a.line == b.line && same_text(a.operation, b.operation) && same_text(a.file, b.file);
}

enum class State { ready, at_barrier, in_warp, pausing, exited };

struct Block;

struct Fibre {
    char* stack;           // STACK_BYTES, below them a page that must not be touched
    void* top;             // of the stack, while the fibre does not run
    void* fake_stack;      // the sanitizer's
    Block* block;
    uint3 thread;
    State state;
    Site site;             // in any state but ready and exited
    int barrier, threads;  // at a barrier: its number, and how many it waits for
    // of a warp operation: the lanes that take part, this one's value, and the lane it reads or VOTE
    unsigned mask;
    uint64_t value;
    int source;
    uint64_t result;
    // what it gave to the other lanes, of the last two times
    alignas(16) char gifts[2][GIFT_BYTES];
    int gift;
};

struct Block {
    uint3 index;
    std::vector<Fibre*> fibres;  // by thread, x fastest
    void* shared;
};

// The launch that runs, and the scheduler's own place.
struct Buffer {
    void* memory;
    size_t bytes;
    bool returned, late;
    std::string contents;  // of a late one, which come when the launch before is complete
};

struct Launch {
    const char* kernel;
    void (*call)(void** arguments);
    void** arguments;
    bool descending;
    std::vector<Block*> blocks;  // that run side by side
    int64_t events;              // what threads did other than pause
    std::vector<Buffer>* buffers;
    int poison;
    bool follows;                     // the launch before may still run when it begins
    std::vector<bool> blocks_waited;  // for that one, by their number
};
Launch launch;
Fibre* current;
void* scheduler_top;
void* scheduler_fake_stack;
const void* scheduler_stack;
size_t scheduler_stack_bytes;

// Says where in the launch the program stands; the sanitizers call it after their report.
void describe() {
    if (!launch.kernel) return;
    fprintf(stderr, "in kernel %s, %s order", launch.kernel, launch.descending ? "descending" : "ascending");
    if (current)
        fprintf(stderr, ", block (%u, %u, %u), thread (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
                threadIdx.y, threadIdx.z);
    fprintf(stderr, "\n");
}

void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "SHIM ERROR: ");
    vfprintf(stderr, format, values);
    va_end(values);
    fprintf(stderr, "\n");
    describe();
    _exit(1);
}

bool wait_together(const Fibre& a, const Fibre& b) {
    if (a.state != b.state) return false;
    return a.state == State::exited || (a.site == b.site && (a.state != State::in_warp || a.mask == b.mask));
}

// Ends the program, with a line for each place where threads wait.
[[noreturn]] void fail_waiting(const char* message) {
    std::vector<const Fibre*> left;
    for (const Block* block : launch.blocks) left.insert(left.end(), block->fibres.begin(), block->fibres.end());
    while (!left.empty()) {
        const Fibre& first = *left.front();
        std::vector<const Fibre*> others;
        for (const Fibre* fibre : left)
            if (!wait_together(*fibre, first)) others.push_back(fibre);
        fprintf(stderr, "%zu threads, first block (%u, %u, %u) thread (%u, %u, %u), ", left.size() - others.size(),
                first.block->index.x, first.block->index.y, first.block->index.z, first.thread.x, first.thread.y,
                first.thread.z);
        if (first.state == State::exited) fprintf(stderr, "exited");
        else fprintf(stderr, "wait in %s at %s:%d", first.site.operation, first.site.file, first.site.line);
        if (first.state == State::in_warp) fprintf(stderr, " for lanes %08x", first.mask);
        fprintf(stderr, "\n");
        left = others;
    }
    fail("%s", message);
}

// Called by a fibre: stops it in `state` until the scheduler lets it go on.
void park(State state, const Site& site) {
    Fibre* const fibre = current;
    fibre->state = state;
    fibre->site = site;
    __sanitizer_start_switch_fiber(&fibre->fake_stack, scheduler_stack, scheduler_stack_bytes);
    shim_switch(&fibre->top, scheduler_top);
    __sanitizer_finish_switch_fiber(fibre->fake_stack, nullptr, nullptr);
}

// What a fibre does: the kernel, for one thread after another.
[[noreturn]] void fibre_main() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
    for (;;) {
        launch.call(launch.arguments);
        park(State::exited, {});
    }
}

Fibre* new_fibre() {
    void* const pages = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages, GUARD_BYTES, PROT_NONE)) fail("no memory for another thread's stack");
    Fibre* const fibre = new Fibre{};
    fibre->stack = static_cast<char*>(pages) + GUARD_BYTES;
    // As if fibre_main had been called, by nobody, and had called shim_switch in its first instruction.
    void** const top = reinterpret_cast<void**>(fibre->stack + STACK_BYTES) - 8;
    top[6] = reinterpret_cast<void*>(fibre_main);
    fibre->top = top;
    return fibre;
}

// Called by the scheduler: runs the fibre until it parks.
void resume(Fibre* fibre) {
    current = fibre;
    threadIdx = fibre->thread;
    blockIdx = fibre->block->index;
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fibre->stack, STACK_BYTES);
    shim_switch(&scheduler_top, fibre->top);
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
    current = nullptr;
    if (fibre->state != State::pausing) ++launch.events;
}

// ---------------------------------------------------------------------------------------------------
// The scheduler.

// Calls visit(i) for 0 <= i < count in the launch's order.
template <class Visit>
void in_order(size_t count, Visit visit) {
    for (size_t i = 0; i < count; ++i) visit(launch.descending ? count - 1 - i : i);
}

// The lanes of one warp: fibres[first + lane], as far as the block has threads.
struct Warp {
    const std::vector<Fibre*>& fibres;
    size_t first;

    size_t lanes() const { return fibres.size() - first < LANES ? fibres.size() - first : LANES; }

    bool takes_part(unsigned lane, unsigned mask) const {
        return (mask >> lane & 1) && lane < lanes() && fibres[first + lane]->state != State::exited;
    }

    // Whether every lane that `asker` waits for has come to the same operation.
    bool complete(const Fibre* asker) const {
        for (unsigned lane = 0; lane < LANES; ++lane) {
            if (!takes_part(lane, asker->mask)) continue;
            const Fibre* fibre = fibres[first + lane];
            if (fibre->state != State::in_warp || fibre->mask != asker->mask || !(fibre->site == asker->site))
                return false;
        }
        return true;
    }

    // Carries out the operation in which the lanes of `mask` wait.
    void exchange(unsigned mask) const {
        uint64_t votes = 0;
        for (unsigned lane = 0; lane < LANES; ++lane)
            if (takes_part(lane, mask) && fibres[first + lane]->value) votes |= uint64_t(1) << lane;
        for (unsigned lane = 0; lane < LANES; ++lane) {
            if (!takes_part(lane, mask)) continue;
            Fibre* const fibre = fibres[first + lane];
            if (fibre->source != VOTE && !takes_part(fibre->source, mask))
                fail("%s at %s:%d: lane %u of warp %zu reads lane %d, which does not take part (mask %08x, %zu lanes)",
                     fibre->site.operation, fibre->site.file, fibre->site.line, lane, first / LANES, fibre->source,
                     mask, lanes());
            fibre->result = fibre->source == VOTE ? votes : fibres[first + fibre->source]->value;
        }
        for (unsigned lane = 0; lane < LANES; ++lane)
            if (takes_part(lane, mask)) fibres[first + lane]->state = State::ready;
    }

    // Runs the lanes until each has exited or waits for other warps.
    void run() const {
        for (bool again = true; again;) {
            in_order(lanes(), [&](size_t lane) {
                if (fibres[first + lane]->state == State::ready) resume(fibres[first + lane]);
            });
            again = false;
            for (size_t lane = 0; lane < lanes(); ++lane) {
                const Fibre* fibre = fibres[first + lane];
                if (fibre->state == State::in_warp && complete(fibre)) {
                    exchange(fibre->mask);
                    again = true;
                }
            }
        }
    }
};

// Opens the barrier of a number if all threads that it waits for stand at it.
bool pass_barrier(const Block* block, int number) {
    const Fibre* first = nullptr;
    int waiting = 0, live = 0;
    for (const Fibre* fibre : block->fibres) {
        live += fibre->state != State::exited;
        if (fibre->state != State::at_barrier || fibre->barrier != number) continue;
        if (!first) first = fibre;
        ++waiting;
    }
    if (!first || waiting < (number == 0 ? live : first->threads)) return false;
    for (Fibre* fibre : block->fibres) {
        if (fibre->state != State::at_barrier || fibre->barrier != number) continue;
        if (number == 0 && !(fibre->site == first->site))
            fail_waiting("divergent barrier: threads of a block wait at different ones");
        if (fibre->threads != first->threads || waiting > live)
            fail_waiting("threads of a block wait at one barrier for different numbers of others");
    }
    for (Fibre* fibre : block->fibres)
        if (fibre->state == State::at_barrier && fibre->barrier == number) fibre->state = State::ready;
    return true;
}

bool pass_barriers(const Block* block) {
    bool any = false;
    for (int number = 0; number < BARRIERS; ++number) any |= pass_barrier(block, number);
    return any;
}

// Runs the launch's blocks until all threads have exited.
void run_blocks() {
    for (int idle = 0;;) {
        const int64_t events = launch.events;
        size_t live = 0, pausing = 0;
        in_order(launch.blocks.size(), [&](size_t i) {
            Block* const block = launch.blocks[i];
            for (Fibre* fibre : block->fibres)
                if (fibre->state == State::pausing) fibre->state = State::ready;
            do {
                in_order((block->fibres.size() + LANES - 1) / LANES,
                         [&](size_t warp) { Warp{block->fibres, warp * LANES}.run(); });
            } while (pass_barriers(block));
            for (const Fibre* fibre : block->fibres) {
                live += fibre->state != State::exited;
                pausing += fibre->state == State::pausing;
            }
        });
        if (live == 0) return;
        if (pausing == 0) fail_waiting("deadlock: threads wait for others that never come to the same place");
        idle = launch.events == events ? idle + 1 : 0;
        if (idle == PATIENCE) fail_waiting("deadlock: threads pause for a change that nobody makes");
    }
}

// ---------------------------------------------------------------------------------------------------
// What the built-ins of cuda.h stand on.

unsigned lane() {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % LANES;
}

uint64_t exchange(unsigned mask, uint64_t value, int source, const Site& site) {
    if (!(mask >> lane() & 1))
        fail("%s at %s:%d: the mask %08x leaves out the calling lane %u", site.operation, site.file, site.line, mask,
             lane());
    current->mask = mask;
    current->value = value;
    current->source = source;
    park(State::in_warp, site);
    return current->result;
}

void give(const void* bytes, size_t count, const Site& site) {
    if (count > GIFT_BYTES) fail("%s at %s:%d gives %zu bytes", site.operation, site.file, site.line, count);
    current->gift ^= 1;
    if (count) memcpy(current->gifts[current->gift], bytes, count);
    if (~static_cast<unsigned>(exchange(WARP_ALL, 1, VOTE, site)))
        fail("%s at %s:%d: not all lanes of the warp take part", site.operation, site.file, site.line);
}

const void* given(int lane) {
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    return current->block->fibres[thread / LANES * LANES + static_cast<unsigned>(lane)]->gifts[current->gift];
}

void check_width(int width, const Site& site) {
    if (width < 1 || width > static_cast<int>(LANES) || (width & (width - 1)))
        fail("%s at %s:%d: a width is a power of two up to 32, not %d", site.operation, site.file, site.line, width);
}

void wait_at_barrier(const Site& site, int number, int threads) {
    if (number < 0 || number >= BARRIERS) fail("%s at %s:%d: no barrier %d", site.operation, site.file, site.line, number);
    current->barrier = number;
    current->threads = threads;
    park(State::at_barrier, site);
}

void pause(const Site& site) { park(State::pausing, site); }

void* shared_memory() { return current->block->shared; }

void* shared_memory_of(unsigned block) {
    if (block == blockIdx.x) return shared_memory();
    for (const Block* other : launch.blocks)
        if (other->index.x == block) return other->shared;
    fail("block %u does not run beside this one", block);
}

// ---------------------------------------------------------------------------------------------------
// The program: launches come in on standard input, buffers go back on standard output.  Numbers are of
// 64 bits, bytes come after their count.

bool read_exactly(void* bytes, size_t count) { return fread(bytes, 1, count, stdin) == count; }

int64_t read_number() {
    int64_t number;
    if (!read_exactly(&number, sizeof number)) fail("the request ends early");
    return number;
}

std::string read_bytes() {
    std::string bytes(static_cast<size_t>(read_number()), '\0');
    if (!read_exactly(bytes.data(), bytes.size())) fail("the request ends early");
    return bytes;
}

dim3 read_dim3() {
    dim3 size;
    for (unsigned* axis : {&size.x, &size.y, &size.z}) *axis = static_cast<unsigned>(read_number());
    return size;
}

// Heap memory of exactly this size.  The sanitizer guards both of its ends.
void* allocate(size_t alignment, size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, bytes)) fail("no memory for %zu bytes", bytes);
    return memory;
}


// Fills the variable from its first byte on, and poisons the rest of it.
void set_constant(const std::string& name, const std::string& bytes, int poison) {
    void* const address = dlsym(RTLD_DEFAULT, name.c_str());
    Dl_info information;
    void* symbol = nullptr;
    if (!address || !dladdr1(address, &information, &symbol, RTLD_DL_SYMENT) || !symbol)
        fail("no constant %s declared extern \"C\"", name.c_str());
    const size_t size = static_cast<const ElfW(Sym)*>(symbol)->st_size;
    if (size < bytes.size()) fail("constant %s has %zu bytes, not %zu", name.c_str(), size, bytes.size());
    memset(address, poison, size);
    memcpy(address, bytes.data(), bytes.size());
}

// Runs a launch; blocks are numbered with x fastest.  Shared memory is filled with `poison` before each block.
void run(const Kernel& kernel, size_t shared_bytes, int poison) {
    static std::vector<Fibre*> pool;
    const size_t threads = size_t(blockDim.x) * blockDim.y * blockDim.z;
    const size_t blocks = size_t(gridDim.x) * gridDim.y * gridDim.z;
    std::vector<Block> resident(kernel.together == 0 ? blocks : kernel.together);
    while (pool.size() < resident.size() * threads) pool.push_back(new_fibre());
    for (size_t i = 0; i < resident.size(); ++i) {
        resident[i].fibres.assign(pool.begin() + i * threads, pool.begin() + (i + 1) * threads);
        resident[i].shared = allocate(16, shared_bytes);
        launch.blocks.push_back(&resident[i]);
    }
    const auto prepare = [&](Block& block, size_t number) {
        block.index = {static_cast<unsigned>(number % gridDim.x),
                       static_cast<unsigned>(number / gridDim.x % gridDim.y),
                       static_cast<unsigned>(number / gridDim.x / gridDim.y)};
        memset(block.shared, poison, shared_bytes);
        for (unsigned i = 0; i < threads; ++i) {
            block.fibres[i]->block = &block;
            block.fibres[i]->thread = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
            block.fibres[i]->state = State::ready;
            block.fibres[i]->gift = 0;
        }
    };
    if (blocks % resident.size() != 0) fail("%zu blocks are no whole clusters of %zu", blocks, resident.size());
    in_order(blocks / resident.size(), [&](size_t group) {
        for (size_t i = 0; i < resident.size(); ++i) prepare(resident[i], group * resident.size() + i);
        run_blocks();
    });
    for (const Block& block : resident) free(block.shared);
}

// A launch that neither ends nor pauses: the timer counts the seconds that the program runs.
[[noreturn]] void out_of_time(int) { fail("the launch does not end; does a loop wait without pause_spinning()?"); }

void limit_seconds(int64_t seconds) {
    const itimerval limit = {{0, 0}, {static_cast<time_t>(seconds), 0}};
    setitimer(ITIMER_VIRTUAL, &limit, nullptr);
}

// What the launch before makes is there when the first thread has waited for it; and nobody wrote before.
void complete_launch_before() {
    for (Buffer& buffer : *launch.buffers) {
        if (!buffer.late) continue;
        const unsigned char* const bytes = static_cast<const unsigned char*>(buffer.memory);
        for (size_t i = 0; i < buffer.bytes; ++i)
            if (bytes[i] != launch.poison) fail("%s writes before it has waited for the launch before", launch.kernel);
        memcpy(buffer.memory, buffer.contents.data(), buffer.bytes);
        buffer.late = false;
    }
}

void wait_for_launch_before() {
    complete_launch_before();
    const size_t number = (size_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    launch.blocks_waited.at(number) = true;
}

void begin_launch_after(const Site& site) {
    const size_t number = (size_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    if (launch.follows && !launch.blocks_waited.at(number))
        fail("%s:%d: a launch may begin after a block that has not waited for the one before", site.file, site.line);
}

// Reads one launch, runs it and writes the buffers it changed to `reply`.
void answer(FILE* reply) {
    const std::string name = read_bytes();
    const Kernel* kernel = nullptr;
    for (size_t i = 0; i < kernel_count; ++i)
        if (kernels[i].name == name) kernel = &kernels[i];
    if (!kernel) fail("no kernel %s in this program", name.c_str());
    gridDim = read_dim3();
    blockDim = read_dim3();
    const size_t shared_bytes = static_cast<size_t>(read_number());
    const bool descending = read_number() != 0;
    const int poison = static_cast<int>(read_number());
    const int64_t seconds = read_number();
    const bool follows = read_number() != 0;

    for (int64_t constants = read_number(); constants > 0; --constants) {
        const std::string constant = read_bytes();
        set_constant(constant, read_bytes(), poison);
    }

    std::vector<Buffer> buffers(static_cast<size_t>(read_number()));
    for (Buffer& buffer : buffers) {
        buffer.returned = read_number() != 0;
        buffer.late = read_number() != 0;
        buffer.bytes = static_cast<size_t>(read_number());
        buffer.memory = allocate(256, buffer.bytes);  // as cudaMalloc aligns
        if (!read_exactly(buffer.memory, buffer.bytes)) fail("the request ends early");
        if (!buffer.late) continue;
        buffer.contents.assign(static_cast<const char*>(buffer.memory), buffer.bytes);
        memset(buffer.memory, poison, buffer.bytes);
    }

    // An argument is a value, or names a buffer: by a pointer so many bytes into it, or as a texture.
    std::vector<std::string> values(static_cast<size_t>(read_number()));
    if (values.size() != kernel->arguments)
        fail("%s takes %zu arguments, not %zu", kernel->name, kernel->arguments, values.size());
    std::vector<void*> arguments;
    for (std::string& value : values) {
        const int64_t kind = read_number();
        if (kind == 'v') {
            value = read_bytes();
        } else {
            const Buffer& buffer = buffers.at(static_cast<size_t>(read_number()));
            if (kind == 't') {
                const Texture texture = {static_cast<const float*>(buffer.memory),
                                         static_cast<int64_t>(buffer.bytes / sizeof(float))};
                value.assign(reinterpret_cast<const char*>(&texture), sizeof texture);
            } else {
                char* const pointer = static_cast<char*>(buffer.memory) + read_number();
                value.assign(reinterpret_cast<const char*>(&pointer), sizeof pointer);
            }
        }
        const size_t expected = kernel->argument_bytes[arguments.size()];
        if (value.size() != expected)
            fail("argument %zu of %s has %zu bytes, not %zu", arguments.size(), kernel->name, expected, value.size());
        arguments.push_back(value.data());
    }

    launch = {kernel->name, kernel->call, arguments.data(), descending, {}, 0, &buffers, poison, follows, {}};
    launch.blocks_waited.resize(size_t(gridDim.x) * gridDim.y * gridDim.z);
    limit_seconds(seconds);
    run(*kernel, shared_bytes, poison);
    limit_seconds(0);
    for (size_t i = 0; follows && i < launch.blocks_waited.size(); ++i)
        if (!launch.blocks_waited[i]) fail("block %zu of %s ends before the launch before it may have", i, kernel->name);
    launch = {};
    for (const Buffer& buffer : buffers) {
        if (buffer.returned) fwrite(buffer.memory, 1, buffer.bytes, reply);
        free(buffer.memory);
    }
    fputc('.', reply);
    fflush(reply);
}

}  // namespace shim

extern "C" const char* __asan_default_options() {
    return "detect_leaks=0:detect_stack_use_after_return=0:exitcode=1";
}
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:exitcode=1"; }

int main() {
    // What a kernel prints goes to standard error.
    FILE* const reply = fdopen(dup(STDOUT_FILENO), "wb");
    dup2(STDERR_FILENO, STDOUT_FILENO);
    setvbuf(stdout, nullptr, _IOLBF, 0);
    signal(SIGVTALRM, shim::out_of_time);
    __sanitizer_set_death_callback(shim::describe);
    for (int next; (next = fgetc(stdin)) != EOF;) {
        ungetc(next, stdin);
        shim::answer(reply);
    }
    return 0;
}
