// What tensor cores and the tensor copy engine do, on the host.  It has a file of its own because most of a test's
// time is spent here: it is compiled once, and optimized.

#include "cuda.h"

namespace shim {
namespace {

struct Halves {
    float value[1 << 16];
    Halves() {
        for (unsigned bits = 0; bits < 1 << 16; ++bits) value[bits] = half_value(static_cast<uint16_t>(bits));
    }
};

float bfloat16_value(unsigned bits) { return from_bits<float>(bits << 16); }

template <bool HALF>
float element(unsigned bits) {
    static const Halves halves;
    return HALF ? halves.value[bits & 0xffff] : bfloat16_value(bits & 0xffff);
}

struct Fragments {
    unsigned a[4], b[2];
};

const Fragments& fragments_of(int lane) { return *static_cast<const Fragments*>(given(lane)); }

// Columns of A and rows of B lie with four lanes, two of each 16-bit or one of each tf32 word.
template <class Add>
void multiply_fragments(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Add add) {
    const Fragments own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    give(&own, sizeof own, {"multiply", __FILE__, __LINE__});
    const int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
    double sum[4] = {c[0], c[1], c[2], c[3]};
    for (int other = 0; other < 4; ++other)
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 4; ++i)
                sum[i] += add(fragments_of(4 * g + other).a[2 * half + i / 2],
                              fragments_of(4 * (2 * t + i % 2) + other).b[half]);
    for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(sum[i]);
}

template <bool HALF>
double product_of_pairs(unsigned a, unsigned b) {
    return static_cast<double>(element<HALF>(a)) * element<HALF>(b) +
           static_cast<double>(element<HALF>(a >> 16)) * element<HALF>(b >> 16);
}

// Rows of 128 or of 32 bytes: their sixteens change places by the place of their 128 bytes among eight, or among two.
uint32_t swizzled(uint32_t address, uint32_t row_bytes) { return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4; }

// The 16-bit words of an operand in shared memory, where its descriptor says they are.
struct Operand {
    const char* shared = static_cast<const char*>(shared_memory());
    uint32_t start, next_inner, next_outer, row_bytes;

    explicit Operand(uint64_t descriptor)
        : start((descriptor & 0x3fff) << 4),
          next_inner((descriptor >> 16 & 0x3fff) << 4),
          next_outer((descriptor >> 32 & 0x3fff) << 4),
          row_bytes(descriptor >> 62 == 3 ? 32 : 128) {}

    uint16_t word(uint32_t address) const { return *reinterpret_cast<const uint16_t*>(shared + address); }

    // Element (outer, k) of a swizzled operand.
    uint16_t swizzled_word(bool is_inner, int outer, int k) const {
        const int length = static_cast<int>(row_bytes) / 2;
        const int row = is_inner ? outer : k, along = is_inner ? k : outer % length;
        const uint32_t of_row = is_inner ? 0 : outer / length * next_inner;
        return word(swizzled(start + of_row + row / 8 * next_outer + row % 8 * row_bytes + 2 * along, row_bytes));
    }
};

template <bool HALF>
void multiply_shared(bool a_inner, bool b_inner, float* c, int count, uint64_t a, uint64_t b, bool add) {
    const Operand left(a), right(b);
    const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / 32 * 16 + thread % 32 / 4;
    float row_values[2][16];
    for (int k = 0; k < 16; ++k)
        for (int h = 0; h < 2; ++h) row_values[h][k] = element<HALF>(left.swizzled_word(a_inner, row + 8 * h, k));
    for (int j = 0; j < count / 4; ++j)
        for (int i = 0; i < 2; ++i) {
            double sums[2] = {};
            for (int k = 0; k < 16; ++k) {
                const double of_b = element<HALF>(right.swizzled_word(b_inner, 8 * j + thread % 4 * 2 + i, k));
                for (int h = 0; h < 2; ++h) sums[h] += row_values[h][k] * of_b;
            }
            for (int h = 0; h < 2; ++h) {
                float& to = c[4 * j + 2 * h + i];
                to = static_cast<float>(sums[h] + (add ? to : 0.0f));
            }
        }
}

}  // namespace

void load_matrices(unsigned (&to)[4], const uint16_t* row, bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("load_matrices: a row does not begin at 16 bytes");
    give(&row, sizeof row, {"load_matrices", __FILE__, __LINE__});
    const int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
    for (int i = 0; i < 4; ++i) {
        unsigned pair[2];
        for (int j = 0; j < 2; ++j) {
            const auto from = *static_cast<const uint16_t* const*>(given(8 * i + (transposed ? 2 * t + j : g)));
            pair[j] = from[transposed ? g : 2 * t + j];
        }
        to[i] = pair[0] | pair[1] << 16;
    }
    // No lane goes on, and overwrites the rows, before all have read.
    give(nullptr, 0, {"load_matrices", __FILE__, __LINE__});
}

void multiply_matrices(bool is_half, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if (is_half) multiply_fragments(c, a, b0, b1, product_of_pairs<true>);
    else multiply_fragments(c, a, b0, b1, product_of_pairs<false>);
}

void multiply_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const auto value = [](unsigned bits) { return static_cast<double>(from_bits<float>(bits & 0xffffe000u)); };
    multiply_fragments(c, a, b0, b1, [&](unsigned of_a, unsigned of_b) { return value(of_a) * value(of_b); });
}

void wgmma(bool is_half, bool a_inner, bool b_inner, float* c, int count, uint64_t a, uint64_t b, bool add) {
    (is_half ? multiply_shared<true> : multiply_shared<false>)(a_inner, b_inner, c, count, a, b, add);
}

void wgmma_of_registers(float* c, int count, const unsigned (&a)[4], uint64_t b, bool add) {
    if (b >> 46) fail("wgmma_of_registers: B is swizzled");
    give(&a, sizeof a, {"wgmma_of_registers", __FILE__, __LINE__});
    const Operand right(b);
    const int own = static_cast<int>(lane());
    float of_a[2][16];  // of the rows of this lane's elements of C
    for (int k = 0; k < 16; ++k)
        for (int half = 0; half < 2; ++half) {
            const unsigned* const words = static_cast<const unsigned*>(given(own / 4 * 4 + k % 8 / 2));
            of_a[half][k] = element<false>(words[k / 8 * 2 + half] >> 16 * (k % 2));
        }
    for (int i = 0; i < count; ++i) {
        const int column = i / 4 * 8 + own % 4 * 2 + i % 2;
        double sum = add ? c[i] : 0.0;
        for (int k = 0; k < 16; ++k)
            sum += static_cast<double>(of_a[i / 2 % 2][k]) *
                   element<false>(right.word(right.start + column / 8 * right.next_outer + column % 8 * 16 +
                                             k / 8 * right.next_inner + k % 8 * 2));
        c[i] = static_cast<float>(sum);
    }
}

int copy_box(uint32_t destination, const uint64_t* map, int x, int y, int z, unsigned first, int blocks) {
    const int64_t components = map[0], rows = map[1], columns = map[2], pitch = map[3], box_rows = map[4],
                  box_columns = map[5];
    const auto row_bytes = static_cast<uint32_t>(2 * box_columns);
    const uint16_t* const data = reinterpret_cast<const uint16_t*>(map + 16);
    if (destination % 128 != 0) fail("tensor_copy: the destination is no cache line");
    for (int block = 0; block < blocks; ++block) {
        char* const shared = static_cast<char*>(shared_memory_of(first + block));
        for (int64_t row = 0; row < box_rows; ++row)
            for (int64_t i = 0; i < box_columns; ++i) {
                const bool inside = z < components && y + row < rows && x + i < columns;
                const uint32_t address = swizzled(static_cast<uint32_t>(destination + row * row_bytes + i * 2), row_bytes);
                *reinterpret_cast<uint16_t*>(shared + address) = inside ? data[(z * rows + y + row) * pitch + x + i] : 0;
            }
    }
    return static_cast<int>(box_rows * row_bytes);
}

}  // namespace shim
