// Launches of a step that overlap (programmatic dependent launch, from compute capability 9.0 on).
//
// A kernel that includes this may begin while the launch before it in the stream still runs, as soon as all blocks of
// that one have allowed it.  Three rules make that safe; docs/decisions.md derives it from them:
//   1. Each block waits for the launch before, at the latest before it writes to global memory.
//   2. It allows the one after only then.  So when a launch begins, all but the one before it are complete.
//   3. Before it has waited, it reads nothing that the launch before writes; and what it reads of earlier launches'
//      arrays, past the first-level cache.
// Where a launch is not given leave to overlap, it begins when all before it are complete, and waits for nothing.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

#if !defined(MLPGPU_HOST)

// Until the launch before is complete, and what it wrote can be seen.  At once where it was complete at the start.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// As far as this block is concerned, the one after may begin.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif

// The two together, where nothing is to be done ahead.
__device__ __forceinline__ void pdl_wait_and_trigger() {
    pdl_wait();
    pdl_trigger();
}

// What a product of split operands may read before it has waited, as a mask.
constexpr int PREFETCH_A = 1, PREFETCH_B = 2, PREFETCH_EPILOGUE = 4;  // its operands; and what its epilogue reads

}  // namespace mlpgpu
