// A ring of stages in shared memory, between the warps that fill it and those that read it.
#pragma once

#include "arch/barriers.cuh"

namespace mlpgpu {

// T::STAGES stages of T::STAGE_BYTES each. A stage has two barriers: `full` is passed once it has been filled, `empty`
// once T::CONSUMERS readers in each of T::CLUSTER blocks have released it.
template <class T>
struct Ring {
    uint32_t stages, full, empty;  // addresses of the first stage and of its barriers
    int stage = 0, parity = 0;

    __device__ __forceinline__ explicit Ring(const void* shared)
        : stages((shared_address(shared) + T::ALIGNMENT - 1) & ~(T::ALIGNMENT - 1u)),
          full(stages + T::STAGES * T::STAGE_BYTES),
          empty(full + 8 * T::STAGES) {}

    // By one thread: so many arrivals of producers fill a stage, and so many of each block's readers release it.
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

    // To the next one of the first `count` stages.
    __device__ __forceinline__ void advance(int count = T::STAGES) {
        if (++stage == count) stage = 0, parity ^= 1;
    }
};

}  // namespace mlpgpu
