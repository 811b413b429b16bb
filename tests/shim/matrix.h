// Host versions of the functions of cuda/arch/mma.cuh, whose lanes meet in shuffles.
#pragma once

namespace mlpgpu {

inline float matrix_element(bool is_half, unsigned pair, int i) {
    const uint16_t bits = static_cast<uint16_t>(pair >> 16 * i);
    return is_half ? half_value(bits) : shim::from_bits<float>(static_cast<unsigned>(bits) << 16);
}

template <bool TRANSPOSED>
void load_matrices(unsigned (&to)[4], const uint16_t* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) shim::fail("load_matrices: a row does not begin at 16 bytes");
    const int g = static_cast<int>(shim::lane()) / 4, t = static_cast<int>(shim::lane()) % 4;
    for (int i = 0; i < 4; ++i) {
        unsigned pair[2];
        for (int j = 0; j < 2; ++j) {
            const int line = 8 * i + (TRANSPOSED ? 2 * t + j : g);
            const uint64_t from = __shfl_sync(WARP_ALL, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(row)), line);
            pair[j] = reinterpret_cast<const uint16_t*>(static_cast<uintptr_t>(from))[TRANSPOSED ? g : 2 * t + j];
        }
        to[i] = pair[0] | pair[1] << 16;
    }
}

// Each sum of 16 products and the accumulator is rounded once.
template <bool HALF>
void multiply_matrices(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int g = static_cast<int>(shim::lane()) / 4, t = static_cast<int>(shim::lane()) % 4;
    const unsigned own[2] = {b0, b1};
    double sum[4] = {c[0], c[1], c[2], c[3]};
    for (int other = 0; other < 4; ++other)  // whose columns of A and rows of B are multiplied
        for (int half = 0; half < 2; ++half) {
            unsigned from_a[2], from_b[2];
            for (int i = 0; i < 2; ++i) {
                from_a[i] = __shfl_sync(WARP_ALL, a[2 * half + i], 4 * g + other);
                from_b[i] = __shfl_sync(WARP_ALL, own[half], 4 * (2 * t + i) + other);
            }
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 2; ++j)
                    sum[i] += static_cast<double>(matrix_element(HALF, from_a[i / 2], j)) *
                              matrix_element(HALF, from_b[i % 2], j);
        }
    for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(sum[i]);
}

// Each sum of 8 products and the accumulator is rounded once.
inline void multiply_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int g = static_cast<int>(shim::lane()) / 4, t = static_cast<int>(shim::lane()) % 4;
    const unsigned own[2] = {b0, b1};
    const auto value = [](unsigned bits, int lane) {
        return static_cast<double>(shim::from_bits<float>(__shfl_sync(WARP_ALL, bits, lane) & 0xffffe000u));
    };
    double sum[4] = {c[0], c[1], c[2], c[3]};
    for (int other = 0; other < 4; ++other)  // whose columns of A and rows of B are multiplied
        for (int half = 0; half < 2; ++half) {
            const double from_a[2] = {value(a[2 * half], 4 * g + other), value(a[2 * half + 1], 4 * g + other)};
            const double from_b[2] = {value(own[half], 4 * (2 * t) + other), value(own[half], 4 * (2 * t + 1) + other)};
            for (int i = 0; i < 4; ++i) sum[i] += from_a[i / 2] * from_b[i % 2];
        }
    for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(sum[i]);
}

}  // namespace mlpgpu
