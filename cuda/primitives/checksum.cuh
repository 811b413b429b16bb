// CRC-32, the checksum of zlib and IEEE 802.3, of each row of an array of bytes; the host makes that of all rows of them.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

struct ChecksumBlock {
    static constexpr int THREADS = 256, VALUES = 256, SHARED_BYTES = sizeof(unsigned) * VALUES;  // of a byte
};

// checksums (count,) = those of rows of `row_bytes` bytes: of those that `rows` lists, or if it is null of the first ones
// of x. A thread takes a row at a time, byte by byte. Grid: any, of one dimension.
__device__ __forceinline__ void row_checksums(const unsigned char* x, const int* rows, int64_t count, int64_t row_bytes,
                                              unsigned* checksums) {
    SHARED(unsigned, of_byte);
    for (int value = threadIdx.x; value < ChecksumBlock::VALUES; value += blockDim.x) {
        unsigned rest = value;
        for (int bit = 0; bit < 8; ++bit) rest = rest & 1 ? 0xedb88320u ^ (rest >> 1) : rest >> 1;
        of_byte[value] = rest;
    }
    __syncthreads();
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const unsigned char* const row = x + (rows ? rows[i] : i) * row_bytes;
        unsigned rest = 0xffffffffu;
        for (int64_t j = 0; j < row_bytes; ++j) rest = of_byte[(rest ^ row[j]) & 0xff] ^ (rest >> 8);
        checksums[i] = ~rest;
    }
}

}  // namespace mlpgpu
