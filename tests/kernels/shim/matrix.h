// Host versions of the functions of cuda/arch/mma.cuh, whose lanes give each other their registers.
#pragma once

namespace shim {  // in products.cpp
void load_matrices(unsigned (&to)[4], const uint16_t* row, bool transposed);
void multiply_matrices(bool is_half, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void multiply_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
}  // namespace shim

namespace mlpgpu {

template <bool TRANSPOSED>
void load_matrices(unsigned (&to)[4], const uint16_t* row) {
    shim::load_matrices(to, row, TRANSPOSED);
}

// Each sum of 16 products and the accumulator is rounded once.
template <bool HALF>
void multiply_matrices(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    shim::multiply_matrices(HALF, c, a, b0, b1);
}

// Each sum of 8 products and the accumulator is rounded once.
inline void multiply_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    shim::multiply_tf32(c, a, b0, b1);
}

}  // namespace mlpgpu
