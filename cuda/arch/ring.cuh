// A ring of stages in shared memory, between the warps that fill it and those that read it.
#pragma once

#include "arch/barriers.cuh"

namespace mlpgpu {

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
