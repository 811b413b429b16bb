// The copy engine of sm_90a (TMA): boxes of a tensor, and stretches of bytes.
#pragma once

#include "common/portable.cuh"


namespace mlpgpu {

// A tensor as the copy engine sees it, made by cuTensorMapEncodeTiled; lies in global memory.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

// Where a byte of a copied box lies: in rows of 128 bytes, whose eight vectors are permuted by the row's number modulo 8.
__device__ __forceinline__ uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

#if !defined(MLPGPU_HOST)

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

__device__ __forceinline__ uint2 load_shared(uint32_t address) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
    return words;
}

#endif

}  // namespace mlpgpu
