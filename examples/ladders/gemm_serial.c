// C = A B as a loop on one thread: what the ladder's speed-ups are against.  The innermost index runs along lines of B
// and C, which is the best order without blocks.

#include <string.h>

void multiply(int m, int n, int k, const float *a, const float *b, float *c) {
    memset(c, 0, (size_t)m * n * sizeof *c);
    for (long i = 0; i < m; i++)
        for (long p = 0; p < k; p++)
            for (long j = 0; j < n; j++) c[i * n + j] += a[i * k + p] * b[p * n + j];
}
