// Copies from global to shared memory that a thread starts and does not wait for: cp.async, since sm_80.
//
// Copies belong to the group that the thread commits next.  They have arrived once that group is not among the PENDING
// last ones that the thread waits for; other threads see them after a barrier.
#pragma once

#include "common/portable.cuh"


#if !defined(MLPGPU_HOST)

namespace mlpgpu {

// BYTES are 4 or 16, and both addresses multiples of them.  Cards before sm_80 copy through registers.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    static_assert(BYTES == 4 || BYTES == 16);
#if __CUDA_ARCH__ >= 800
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
#else
    if (BYTES == 16)
        *static_cast<float4*>(to) = *static_cast<const float4*>(from);
    else
        *static_cast<unsigned*>(to) = *static_cast<const unsigned*>(from);
#endif
}

// Only since sm_80: the first `count` bytes come from memory; the rest of the BYTES are zeros.
template <int BYTES>
__device__ __forceinline__ void copy_async_or_clear(uint32_t to, const void* from, int count) {
    static_assert(BYTES == 4 || BYTES == 16);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(count) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(count) : "memory");
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Waits for all of the thread's copies, committed or not.
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace mlpgpu

#endif
