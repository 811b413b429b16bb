// The instructions of tensor cores since sm_80, each under a name.  On the host the functions of the
// same names in tests/kernels/shim/matrix.h stand in for them.
//
// A fragment is a warp's share of a small matrix in registers, two 16-bit elements to a register.  Lane
// 4 g + t of a warp holds
//     of A (16, 16)  rows g, g + 8, g, g + 8; columns 2 t, 2 t + 1 in the first two registers, 8 further in the others
//     of B (16, 8)   column g; rows 2 t, 2 t + 1 in the first register, 8 further in the second
//     of C (16, 8)   columns 2 t, 2 t + 1 of row g in the first two floats, of row g + 8 in the others.
#pragma once

#include "common/portable.cuh"

#if !defined(MLPGPU_HOST)

namespace mlpgpu {

// Four 8 x 8 matrices of 16-bit elements from shared memory; lane 8 i + j points at row j of matrix i, 16
// bytes.  Lane 4 g + t gets elements 2 t, 2 t + 1 of row g of each; transposed, of column g.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const uint16_t* row) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
}

// C += A · B on halves, or on bfloat16.
template <bool HALF>
__device__ __forceinline__ void multiply_matrices(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if (HALF)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// C += A · B on tf32: float32 whose lower 13 bits are ignored.  An element has a register to itself; lane 4 g + t holds
//     of A (16, 8)  rows g, g + 8, g, g + 8; column t in the first two registers, t + 4 in the others
//     of B (8, 8)   column g; row t in the first register, t + 4 in the second.
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace mlpgpu

#endif

namespace mlpgpu {

// The lane's fragments of 16 outer by 16 inner indices from (outer0, inner0) of a matrix in shared memory, whose stored
// rows begin `pitch` elements apart.  INNER_FIRST tells which index is contiguous; OUTER_BIT by which of the lane's bits the
// second 8 outer indices are chosen, 0 for A's fragments and 1 for B's: the other bit chooses the second 8 inner ones.
template <bool INNER_FIRST, int OUTER_BIT>
__device__ __forceinline__ void load_fragments(unsigned (&to)[4], const uint16_t* matrix, int pitch, int outer0, int inner0) {
    const int lane = threadIdx.x % WARP, row = lane % 8, low = lane / 8 % 2, high = lane / 16;
    const int outer = outer0 + 8 * (OUTER_BIT == 0 ? low : high), inner = inner0 + 8 * (OUTER_BIT == 0 ? high : low);
    if (INNER_FIRST)
        load_matrices<false>(to, matrix + (outer + row) * pitch + inner);
    else
        load_matrices<true>(to, matrix + (inner + row) * pitch + outer);
}

}  // namespace mlpgpu
