// Lines of a weight and of its slots on their way through shared memory: a warp has the copy engine bring them to a
// place there, they are moved in it, and taken back.  So what is on its way needs no registers.
#pragma once

#include "arch/barriers.cuh"
#include "arch/bulk_copy.cuh"

namespace mlpgpu {

template <class Rule, int LINES>
struct BulkTile {
    static constexpr int ARRAYS = 1 + Rule::SLOTS;
    float* place;            // (ARRAYS, LINES, n)
    float *weight, *slots;   // (count, n) each; a further slot lies `size` elements on
    int64_t size;
    int n, count;
    bool vectored;           // whether the copy engine can take them

    __device__ __forceinline__ BulkTile(float* place, float* weight, float* slots, int64_t size, int n, int count)
        : place(place), weight(weight), slots(slots), size(size), n(n), count(count),
          vectored(count * n % 4 == 0 && reinterpret_cast<uintptr_t>(weight) % 16 == 0 &&
                   (Rule::SLOTS == 0 || reinterpret_cast<uintptr_t>(slots) % 16 == 0) &&
                   (Rule::SLOTS < 2 || size % 4 == 0)) {}

    __device__ __forceinline__ float* stored(int array) const {
        return array == 0 ? weight : slots + (array - 1) * size;
    }
    __device__ __forceinline__ float* placed(int array) const { return place + array * LINES * n; }

    // The first so many arrays come; the barrier, for which one arrives, tells when they are there.
    __device__ __forceinline__ void bring(uint32_t barrier, int arrays = ARRAYS) const {
        const int length = count * n, lane = threadIdx.x % WARP;
        if (!vectored) {
            for (int i = 0; i < arrays; ++i)
                for (int at = lane; at < length; at += WARP) placed(i)[at] = stored(i)[at];
            __syncwarp();
        }
        if (lane > 0) return;
        barrier_expect(barrier, vectored ? arrays * 4 * length : 0);
        for (int i = 0; vectored && i < arrays; ++i)
            bulk_copy(shared_address(placed(i)), stored(i), barrier, 4 * length);
    }

    // They go back.  The place must not be used again before release() says so.
    __device__ __forceinline__ void send() const {
        const int length = count * n, lane = threadIdx.x % WARP;
        if (vectored) publish_shared();
        __syncwarp();
        if (!vectored) {
            for (int i = 0; i < ARRAYS; ++i)
                for (int at = lane; at < length; at += WARP) stored(i)[at] = placed(i)[at];
        } else if (lane == 0) {
            for (int i = 0; i < ARRAYS; ++i) bulk_store(stored(i), shared_address(placed(i)), 4 * length);
        }
        if (lane == 0) commit_bulk_stores();
    }

    // Waits until the places of all but the last PENDING that the warp sent are free.
    template <int PENDING>
    static __device__ __forceinline__ void release() {
        if (threadIdx.x % WARP == 0) await_bulk_stores<PENDING>();
        __syncwarp();
    }
};

}  // namespace mlpgpu
