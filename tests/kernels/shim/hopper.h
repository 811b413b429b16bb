// Host versions of the functions of cuda/arch/barriers.cuh, bulk_copy.cuh and wgmma.cuh.  A copy by the tensor copy engine is made at once, and
// so is a product: what reads too early shows on a GPU alone, but what nobody waits for, brings, or gives
// back shows here.  Shared addresses are offsets.  A map is followed in memory by the components themselves.
#pragma once

namespace shim {  // in products.cpp
void wgmma(bool is_half, bool a_inner, bool b_inner, float* c, int count, uint64_t a, uint64_t b, bool add);
void wgmma_of_registers(float* c, int count, const unsigned (&a)[4], uint64_t b, bool add);
// To shared memory of blocks that run side by side; returns its bytes.
int copy_box(uint32_t destination, const uint64_t* map, int x, int y, int z, unsigned first, int blocks);
}  // namespace shim

namespace mlpgpu {

struct TensorMap;
template <bool HALF>
struct ElementIs;

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - static_cast<const char*>(shim::shared_memory()));
}

template <class T>
T& shared_at(uint32_t address, unsigned block = blockIdx.x) {
    return *reinterpret_cast<T*>(static_cast<char*>(shim::shared_memory_of(block)) + address);
}

// --- barriers ---

struct HostBarrier {
    int32_t bytes;  // announced, and not there yet; less than 0 where they came first
    uint8_t expected, pending, phase, unused;

    void arrive() {
        if (pending == 0) shim::fail("barrier: more arrivals than it was made for");
        --pending;
        end_phase();
    }
    void bring(int count) {
        bytes -= count;
        end_phase();
    }
    void end_phase() {
        if (pending == 0 && bytes == 0) pending = expected, phase ^= 1;
    }
};

inline void barrier_init(uint32_t barrier, int count) {
    shared_at<HostBarrier>(barrier) = {0, static_cast<uint8_t>(count), static_cast<uint8_t>(count), 0, 0};
}

inline void barrier_publish() {}

inline void barrier_expect(uint32_t barrier, int bytes) {
    HostBarrier& at = shared_at<HostBarrier>(barrier);
    at.bytes += bytes;
    at.arrive();
}

inline void barrier_arrive_copied(uint32_t barrier) { shared_at<HostBarrier>(barrier).arrive(); }

inline void barrier_wait(uint32_t barrier, int parity) {
    while (shared_at<HostBarrier>(barrier).phase == parity) pause_spinning();
}

// --- clusters: their blocks run side by side ---

template <int CLUSTER>
int cluster_rank() {
    return static_cast<int>(blockIdx.x) % CLUSTER;
}

template <int CLUSTER>
void barrier_arrive(uint32_t barrier, int rank) {
    shared_at<HostBarrier>(barrier, blockIdx.x / CLUSTER * CLUSTER + rank).arrive();
}

template <int CLUSTER>
float4 load_of_block(uint32_t address, int rank) {
    return shared_at<float4>(address, blockIdx.x / CLUSTER * CLUSTER + rank);
}

template <int CLUSTER>
float load_number_of_block(uint32_t address, int rank) {
    return shared_at<float>(address, blockIdx.x / CLUSTER * CLUSTER + rank);
}

// A block's threads meet, and then one of each block at a barrier of this function's own.
template <int CLUSTER>
void cluster_synchronize() {
    static HostBarrier barriers[1024];
    HostBarrier& barrier = barriers[blockIdx.x / CLUSTER];
    __syncthreads();
    if (threadIdx.x == 0) {
        if (barrier.expected == 0) barrier = {0, CLUSTER, CLUSTER, 0, 0};
        const int parity = barrier.phase;
        barrier.arrive();
        while (barrier.phase == parity) pause_spinning();
    }
    __syncthreads();
}

// --- the tensor copy engine ---

inline void tensor_map_acquire(const TensorMap*) {}

// `blocks` of the cluster get the box, at the same place in each.
inline void copy_box(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z, unsigned first,
                     int blocks) {
    const int bytes = shim::copy_box(destination, reinterpret_cast<const uint64_t*>(map), x, y, z, first, blocks);
    for (int block = 0; block < blocks; ++block) shared_at<HostBarrier>(barrier, first + block).bring(bytes);
}

inline void tensor_copy(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z) {
    copy_box(destination, map, barrier, x, y, z, blockIdx.x, 1);
}

template <int CLUSTER>
void tensor_copy_to_all(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z) {
    copy_box(destination, map, barrier, x, y, z, blockIdx.x / CLUSTER * CLUSTER, CLUSTER);
}

inline uint2 load_shared(uint32_t address) { return shared_at<uint2>(address); }

inline void bulk_copy(uint32_t destination, const void* source, uint32_t barrier, int bytes) {
    if (destination % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16)
        shim::fail("bulk_copy: %d bytes from %p to %u, not all multiples of 16", bytes, source, destination);
    memcpy(&shared_at<char>(destination), source, bytes);
    shared_at<HostBarrier>(barrier).bring(bytes);
}

inline void bulk_store(void* destination, uint32_t source, int bytes) {
    if (source % 16 || reinterpret_cast<uintptr_t>(destination) % 16 || bytes % 16)
        shim::fail("bulk_store: %d bytes from %u to %p, not all multiples of 16", bytes, source, destination);
    memcpy(destination, &shared_at<char>(source), bytes);
}

inline void commit_bulk_stores() {}
template <int PENDING>
void await_bulk_stores() {}
inline void publish_shared() {}
inline void publish_global() {}

template <int SIZE>
void copy_async_or_clear(uint32_t destination, const void* source, int bytes) {
    if (destination % SIZE || reinterpret_cast<uintptr_t>(source) % SIZE || bytes < 0 || bytes > SIZE)
        shim::fail("copy_async_or_clear: %d of %d bytes from %p to %u", bytes, SIZE, source, destination);
    char* const to = &shared_at<char>(destination);
    memset(to, 0, SIZE);
    memcpy(to, source, bytes);
}

template <int COUNT>
void registers_lower() {}
template <int COUNT>
void registers_raise() {}

// --- products of a warpgroup: each thread makes its own elements ---

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
void wgmma_wait() {}

template <bool A_INNER, bool B_INNER>
struct Wgmma {
    // Each sum of 16 products and the accumulator is rounded once.
    template <bool HALF, int COUNT>
    static void multiply(ElementIs<HALF>, float (&c)[COUNT], uint64_t a, uint64_t b, bool add) {
        shim::wgmma(HALF, A_INNER, B_INNER, c, COUNT, a, b, add);
    }
};

// Lanes give each other their elements of A; B lies in 8 x 8 matrices.
inline void wgmma_of_registers(float (&c)[48], const unsigned (&a)[4], uint64_t b, bool add) {
    shim::wgmma_of_registers(c, 48, a, b, add);
}

}  // namespace mlpgpu
