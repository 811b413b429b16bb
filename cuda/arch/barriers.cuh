// Barriers in shared memory (mbarrier) and clusters of blocks, for sm_90a.
//
// The functions of arch/barriers.cuh, arch/bulk_copy.cuh and arch/wgmma.cuh are one instruction each.  On the host the
// functions of the same names in tests/kernels/shim/hopper.h stand in for them.  Names and rules: NVIDIA's PTX ISA,
// "mbarrier", "cp.async.bulk", "cp.async.bulk.tensor", "Asynchronous warpgroup level matrix instructions".
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

#if !defined(MLPGPU_HOST)

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- barriers: a phase ends when `count` arrivals and all announced bytes have come ---

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Makes new barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and announces bytes that the copy engine will deliver.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier at this address of block `rank` of the cluster; of this block if CLUSTER is 1, in whatever cluster
// it may be.
template <int CLUSTER>
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int rank) {
    if (CLUSTER == 1) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
        return;
    }
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Arrives once all of this thread's asynchronous copies have come.
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity has ended: 0 for the first phase, then 1, 0, ….
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

// Four floats at this address of shared memory of block `rank` of the cluster.
template <int CLUSTER>
__device__ __forceinline__ float4 load_of_block(uint32_t address, int rank) {
    float4 four;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
        "}"
        : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
        : "r"(address), "r"(CLUSTER == 1 ? 0 : rank)
        : "memory");
    return four;
}

// A float at this address of shared memory of block `rank` of the cluster.
template <int CLUSTER>
__device__ __forceinline__ float load_number_of_block(uint32_t address, int rank) {
    float number;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.f32 %0, [remote];\n"
        "}"
        : "=f"(number)
        : "r"(address), "r"(rank)
        : "memory");
    return number;
}

// A barrier of all threads of all blocks of the cluster.
template <int CLUSTER>
__device__ __forceinline__ void cluster_synchronize() {
    if (CLUSTER == 1)
        __syncthreads();
    else
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#endif

}  // namespace mlpgpu
