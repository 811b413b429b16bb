// The instructions of sm_90a that C++ has no words for, one thin function each: barriers in shared memory,
// the tensor copy engine (TMA), clusters, and matrix products by a warpgroup (wgmma); and the ring of stages that
// a copy engine fills.
//
// On the host the functions of the same names in tests/shim/hopper.h stand in for them.  Names and rules:
// NVIDIA's PTX ISA, "mbarrier", "cp.async.bulk.tensor", "Asynchronous warpgroup level matrix instructions".
#pragma once

#include "common/dependent_launch.cuh"
#include "common/portable.cuh"

namespace mlpgpu {

constexpr int WARPGROUP = 128;  // threads: four warps, the first of a number divisible by four

// A tensor as the copy engine sees it, made by cuTensorMapEncodeTiled; lies in global memory.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

template <bool HALF>
struct ElementIs {};  // else bfloat16

// Where an operand's tile lies, in lines of 128 bytes swizzled as the copy engine leaves them: eight lines
// to the next eight, and, where the lines run along the outer axis, from 64 outer elements to the next 64.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, int next_64_outer) {
    constexpr uint64_t EIGHT_LINES = 1024 >> 4, SWIZZLE_128 = 1;
    return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(next_64_outer >> 4) << 16 | EIGHT_LINES << 32 |
           SWIZZLE_128 << 62;
}

// The same of a matrix that lies in 8 x 8 matrices of 128 bytes, lines along k: from one to the next along k, and along
// the outer axis, in bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor_plain(uint32_t address, int next_inner, int next_outer) {
    return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(next_inner >> 4) << 16 |
           static_cast<uint64_t>(next_outer >> 4) << 32;
}

#if !defined(MLPGPU_HOST)

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- barriers: a phase ends when `count` arrivals and all announced bytes have come ---

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Barriers just made become visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrive, and announce bytes that the copy engine will bring.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive at the same barrier of another block of the cluster, or of this one.
template <int CLUSTER>
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Arrive once all that this thread had copied by copy_or_clear has come.
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Wait until the phase of this parity has ended: 0 for the first one, then 1, 0, ….
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// --- clusters ---

template <int CLUSTER>
__device__ __forceinline__ int cluster_rank() {
    if (CLUSTER == 1) return 0;
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster.
template <int CLUSTER>
__device__ __forceinline__ void cluster_synchronize() {
    if (CLUSTER == 1)
        __syncthreads();
    else
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- the tensor copy engine ---

// The map was written by a copy from the host: make the engine see it.
__device__ __forceinline__ void tensor_map_acquire(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// One box of the tensor, from element (x, y, z) on, to shared memory; its bytes count at `barrier`.
__device__ __forceinline__ void tensor_copy(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y,
                                            int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(destination),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same to all blocks of the cluster, at the same place in each.
template <int CLUSTER>
__device__ __forceinline__ void tensor_copy_to_all(uint32_t destination, const TensorMap* map, uint32_t barrier, int x,
                                                   int y, int z) {
    const uint16_t mask = (1 << CLUSTER) - 1;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask)
        : "memory");
}

// Bytes of global memory to shared memory, which count at `barrier`; all three are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t barrier, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(
                     destination),
                 "l"(source), "r"(barrier), "r"(bytes)
                 : "memory");
}

// Bytes of shared memory to global memory; all three are multiples of 16.
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
                 : "memory");
}

// What this thread stored since the last one forms a group.
__device__ __forceinline__ void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all of this thread's groups but the last PENDING have been read from shared memory.
template <int PENDING>
__device__ __forceinline__ void await_bulk_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// What this thread wrote to shared memory comes before what the copy engine and products read of it, once they are told.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of what it wrote to global memory.
__device__ __forceinline__ void publish_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- what it brought: lines of 128 bytes, whose sixteens change places by the line's place among eight ---

__device__ __forceinline__ uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

__device__ __forceinline__ uint2 load_shared(uint32_t address) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
    return words;
}

// --- copies that threads ask for ---

// SIZE bytes, 4 or 16, to shared memory while the thread goes on: the first `bytes` from `source`, and zeros.
template <int SIZE>
__device__ __forceinline__ void copy_or_clear(uint32_t destination, const void* source, int bytes) {
    if (SIZE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// --- registers: a warpgroup gives some back, others take them ---

template <int COUNT>
__device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- products of a warpgroup: C (64, N) += A (64, 16) · B (16, N), A and B in shared memory ---

// Registers of C were written, or will be, by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The products issued since the last one form a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// In thread t of the warpgroup, c[4 j + 2 h + i] is element (16 (t / 32) + t % 32 / 4 + 8 h, 8 j + 2 (t % 4) + i) of C.
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C16(i) C4(i), C4(i + 4), C4(i + 8), C4(i + 12)
#define C32(i) C16(i), C16(i + 16)
#define R32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R48 R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R64 R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R128 R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// A_INNER, B_INNER: whether an operand's lines run along k instead of along C's rows or columns.  Without
// `add`, C is overwritten.
template <bool A_INNER, bool B_INNER>
struct Wgmma {
#define WGMMA(ELEMENT, TYPE, COUNT, N, LIST, A, B, ADD, AT, BT, ...)                                                   \
    static __device__ __forceinline__ void multiply(ELEMENT, float (&c)[COUNT], uint64_t a, uint64_t b, bool add) {    \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST "}, " A ", " B           \
                     ", add, 1, 1, " AT ", " BT ";\n}"                                                                 \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(!A_INNER), "n"(!B_INNER));                      \
    }
#define WGMMA_OF(ELEMENT, TYPE)                                                                                        \
    WGMMA(ELEMENT, TYPE, 32, "64", R32, "%32", "%33", "%34", "%35", "%36", C32(0))                                     \
    WGMMA(ELEMENT, TYPE, 64, "128", R64, "%64", "%65", "%66", "%67", "%68", C32(0), C32(32))                           \
    WGMMA(ELEMENT, TYPE, 128, "256", R128, "%128", "%129", "%130", "%131", "%132", C32(0), C32(32), C32(64), C32(96))
    WGMMA_OF(ElementIs<false>, "bf16")
    WGMMA_OF(ElementIs<true>, "f16")
#undef WGMMA_OF
#undef WGMMA
};

// C (64, 96) += A · B on bfloat16, A in registers, a warp's 16 rows as arch/mma.cuh says, and B as wgmma_descriptor_plain does.
__device__ __forceinline__ void wgmma_of_registers(float (&c)[48], const unsigned (&a)[4], uint64_t b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %53, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" R48 "}, {%48, %49, %50, %51}, %52, add, 1, 1, 0;\n}"
                 : C32(0), C16(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#undef C4
#undef C16
#undef C32
#undef R32
#undef R48
#undef R64
#undef R128

#endif

// A ring of T::STAGES stages of T::STAGE_BYTES each: of a stage, one barrier that is passed when it is full, and one
// when all that read it, in each of T::CLUSTER blocks, have given it back.
template <class T>
struct Ring {
    uint32_t stages, full, empty;  // addresses
    int stage = 0, parity = 0;

    __device__ __forceinline__ explicit Ring(const void* shared)
        : stages((shared_address(shared) + T::ALIGNMENT - 1) & ~(T::ALIGNMENT - 1u)),
          full(stages + T::STAGES * T::STAGE_BYTES),
          empty(full + 8 * T::STAGES) {}

    // `producers` fill a stage, and `readers` of each block give it back.
    __device__ __forceinline__ void make(int producers = 1, int readers = T::CONSUMERS) const {
        for (int i = 0; i < T::STAGES; ++i) {
            barrier_init(full + 8 * i, producers);
            barrier_init(empty + 8 * i, readers * T::CLUSTER);
        }
        barrier_publish();
    }

    __device__ __forceinline__ uint32_t address() const { return stages + stage * T::STAGE_BYTES; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full + 8 * stage, parity); }
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + 8 * stage, parity ^ 1); }

    __device__ __forceinline__ void advance() {
        if (++stage == T::STAGES) stage = 0, parity ^= 1;
    }
};

}  // namespace mlpgpu
