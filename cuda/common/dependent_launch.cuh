// Programmatic dependent launch (PDL, since compute capability 9.0): launches of a step that overlap.
//
// A kernel that calls these functions may begin while the launch before it in the stream still runs, as soon as all blocks
// of that launch have triggered. Three rules make that safe; docs/decisions.md derives it from them:
//   1. Each block waits for the launch before it, at the latest before it writes to global memory.
//   2. Only then it triggers the next launch. So when a launch begins, all launches but the one before it are complete.
//   3. Before it has waited, a block reads nothing that the launch before it writes; and it reads arrays of earlier
//      launches past the first-level cache.
// A launch without the attribute begins when all launches before it are complete, and its waits return at once.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

#if !defined(MLPGPU_HOST)

// Waits until the launch before is complete and what it wrote is visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch begin, as far as this block is concerned.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif

// Both, for kernels that prefetch nothing.
__device__ __forceinline__ void pdl_wait_and_trigger() {
    pdl_wait();
    pdl_trigger();
}

// What a product of split operands may read before it has waited, as a mask: its operands, and what its epilogue reads.
constexpr int PREFETCH_A = 1, PREFETCH_B = 2, PREFETCH_EPILOGUE = 4;

}  // namespace mlpgpu
