// The copy engine of sm_90a (TMA): boxes of a tensor, and contiguous bytes.
#pragma once

#include "common/portable.cuh"


namespace mlpgpu {

// The copy engine's description of a tensor, made by cuTensorMapEncodeTiled, in global memory.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

// Where a byte of a copied box lies: in rows of 128 bytes, whose eight vectors are permuted by the row's number modulo 8.
__device__ __forceinline__ uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

#if !defined(MLPGPU_HOST)

// Makes the engine see a map that a copy from the host has written.
__device__ __forceinline__ void tensor_map_acquire(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// Copies one box of the tensor, from element (x, y, z) on, to shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void tensor_copy(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y,
                                            int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(destination),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same to all blocks of the cluster, to the same address in each.
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

// Copies bytes of global memory to shared memory; `barrier` counts them. Addresses and lengths are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t barrier, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(
                     destination),
                 "l"(source), "r"(barrier), "r"(bytes)
                 : "memory");
}

// Copies bytes of shared memory to global memory. Addresses and lengths are multiples of 16.
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
                 : "memory");
}

// Makes a group of what this thread has stored since the last group.
__device__ __forceinline__ void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups but the last PENDING have been read from shared memory.
template <int PENDING>
__device__ __forceinline__ void await_bulk_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Orders what this thread wrote to shared memory before later reads by the copy engine and by wgmma.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory.
__device__ __forceinline__ void publish_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ uint2 load_shared(uint32_t address) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
    return words;
}

#endif

}  // namespace mlpgpu
