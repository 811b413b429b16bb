// A bulk tile: rows of a weight and of its slots in shared memory. One warp lets the copy engine load them, other warps
// update them, and the first warp lets the engine store them. Rows in flight occupy no registers.
#pragma once

#include "arch/barriers.cuh"
#include "arch/bulk_copy.cuh"

namespace mlpgpu {

template <class Rule, int ROWS>
struct BulkTile {
    static constexpr int ARRAYS = 1 + Rule::SLOTS;
    float* tile;            // (ARRAYS, ROWS, n) in shared memory
    float *weight, *slots;  // (count, n) each in global memory; the next slot is `size` elements further
    int64_t size;
    int n, count;
    bool vectored;          // whether addresses and lengths are those that the copy engine takes

    __device__ __forceinline__ BulkTile(float* tile, float* weight, float* slots, int64_t size, int n, int count)
        : tile(tile), weight(weight), slots(slots), size(size), n(n), count(count),
          vectored(count * n % 4 == 0 && reinterpret_cast<uintptr_t>(weight) % 16 == 0 &&
                   (Rule::SLOTS == 0 || reinterpret_cast<uintptr_t>(slots) % 16 == 0) &&
                   (Rule::SLOTS < 2 || size % 4 == 0)) {}

    __device__ __forceinline__ float* stored(int array) const {
        return array == 0 ? weight : slots + (array - 1) * size;
    }
    __device__ __forceinline__ float* staged(int array) const { return tile + array * ROWS * n; }

    // Loads the first `arrays` arrays. The barrier expects one arrival, and its phase ends when all bytes have come.
    __device__ __forceinline__ void load(uint32_t barrier, int arrays = ARRAYS) const {
        const int length = count * n, lane = threadIdx.x % WARP;
        if (!vectored) {
            for (int i = 0; i < arrays; ++i)
                for (int j = lane; j < length; j += WARP) staged(i)[j] = stored(i)[j];
            __syncwarp();
        }
        if (lane > 0) return;
        barrier_expect(barrier, vectored ? arrays * 4 * length : 0);
        for (int i = 0; vectored && i < arrays; ++i)
            bulk_copy(shared_address(staged(i)), stored(i), barrier, 4 * length);
    }

    // Starts to store the tile, whose shared memory must not be written before wait_stored().
    __device__ __forceinline__ void store() const {
        const int length = count * n, lane = threadIdx.x % WARP;
        if (vectored) publish_shared();
        __syncwarp();
        if (!vectored) {
            for (int i = 0; i < ARRAYS; ++i)
                for (int j = lane; j < length; j += WARP) stored(i)[j] = staged(i)[j];
        } else if (lane == 0) {
            for (int i = 0; i < ARRAYS; ++i) bulk_store(stored(i), shared_address(staged(i)), 4 * length);
        }
        if (lane == 0) commit_bulk_stores();
    }

    // Waits until the tiles that the warp has stored may be written again, all but the last PENDING.
    template <int PENDING>
    static __device__ __forceinline__ void wait_stored() {
        if (threadIdx.x % WARP == 0) await_bulk_stores<PENDING>();
        __syncwarp();
    }
};

}  // namespace mlpgpu
