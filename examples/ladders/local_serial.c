// A locally connected layer as a loop on one thread: what the ladder's speed-ups are against.  w (n, window): the
// weights of an output lie together, which is the best order for one thread.

#include <math.h>

void layer(int n, int window, const float *x, const float *w, float bias, float *y) {
    for (long i = 0; i < n; i++) {
        float sum = bias;
        for (long r = 0; r < window; r++) sum += w[i * window + r] * x[i + r];
        y[i] = 1.0f / (1.0f + expf(-sum));
    }
}
