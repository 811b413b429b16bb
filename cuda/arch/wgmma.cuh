// Matrix products by a warpgroup of sm_90a.
#pragma once

#include "common/portable.cuh"


namespace mlpgpu {

constexpr int WARPGROUP = 128;  // threads: four warps, the first of a number divisible by four

template <bool HALF>
struct ElementIs {};  // else bfloat16

// The descriptor of an operand in rows of 128 or of 32 bytes, swizzled as the copy engine leaves them. `next_row_outer`
// bytes lie between a row's outer elements and the next ones if the rows run along the outer axis.
template <int ROW_BYTES = 128>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, int next_row_outer) {
    static_assert(ROW_BYTES == 128 || ROW_BYTES == 32);
    constexpr uint64_t EIGHT_ROWS = 8 * ROW_BYTES >> 4, SWIZZLE = ROW_BYTES == 128 ? 1 : 3;
    return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(next_row_outer >> 4) << 16 | EIGHT_ROWS << 32 | SWIZZLE << 62;
}

// The descriptor of an operand in 8 x 8 matrices of 128 bytes without a swizzle, rows along k: the bytes to the next matrix
// along k, and along the outer axis.
__device__ __forceinline__ uint64_t wgmma_descriptor_plain(uint32_t address, int next_inner, int next_outer) {
    return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(next_inner >> 4) << 16 |
           static_cast<uint64_t>(next_outer >> 4) << 32;
}

#if !defined(MLPGPU_HOST)

// A warpgroup lowers the registers of its threads, or raises them, for which it waits until others have lowered theirs.

template <int COUNT>
__device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Products: C (64, N) += A (64, 16) · B (16, N), A and B in shared memory.

// Orders other accesses to the registers of C before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes a group of the products issued since the last group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// In thread t of the warpgroup, c[4 j + 2 h + i] is element (16 (t / 32) + t % 32 / 4 + 8 h, 8 j + 2 (t % 4) + i) of C.
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C8(i) C4(i), C4(i + 4)
#define C16(i) C4(i), C4(i + 4), C4(i + 8), C4(i + 12)
#define C32(i) C16(i), C16(i + 16)
#define R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R16 R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R48 R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R64 R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R96 R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R128 R96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// A_INNER, B_INNER: whether an operand's rows run along k, not along C's rows or columns. Without `add`, C is overwritten.
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
    WGMMA(ELEMENT, TYPE, 8, "16", R8, "%8", "%9", "%10", "%11", "%12", C8(0))                                          \
    WGMMA(ELEMENT, TYPE, 16, "32", R16, "%16", "%17", "%18", "%19", "%20", C16(0))                                     \
    WGMMA(ELEMENT, TYPE, 32, "64", R32, "%32", "%33", "%34", "%35", "%36", C32(0))                                     \
    WGMMA(ELEMENT, TYPE, 64, "128", R64, "%64", "%65", "%66", "%67", "%68", C32(0), C32(32))                           \
    WGMMA(ELEMENT, TYPE, 96, "192", R96, "%96", "%97", "%98", "%99", "%100", C32(0), C32(32), C32(64))                 \
    WGMMA(ELEMENT, TYPE, 128, "256", R128, "%128", "%129", "%130", "%131", "%132", C32(0), C32(32), C32(64), C32(96))
    WGMMA_OF(ElementIs<false>, "bf16")
    WGMMA_OF(ElementIs<true>, "f16")
#undef WGMMA_OF
#undef WGMMA
};

// C (64, 96) += A · B on bfloat16, A in registers, a warp's 16 rows as arch/mma.cuh says, and B as wgmma_descriptor_plain
// does.
__device__ __forceinline__ void wgmma_of_registers(float (&c)[48], const unsigned (&a)[4], uint64_t b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %53, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" R48 "}, {%48, %49, %50, %51}, %52, add, 1, 1, 0;\n}"
                 : C32(0), C16(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#undef C4
#undef C8
#undef C16
#undef C32
#undef R8
#undef R16
#undef R32
#undef R48
#undef R64
#undef R96
#undef R128

#endif

}  // namespace mlpgpu
