// Backpropagation as one writes it first: one thread, one pattern after another, no blocking.
//
// A multilayer perceptron of sigmoid units, the error half the sum of squares, all patterns in one step
// with momentum: DeltaW <- eta * sum of gradients + alpha * DeltaW, W <- W - DeltaW.
// All arrays are row-major.  `parameters`, `velocity` and `gradient` hold, layer after layer, the weights
// (n_in, n_out) and then the biases (n_out); `h` and `delta` one row for each layer, inputs included.

#include <math.h>
#include <string.h>

static float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

// Adds one pattern's gradient to `gradient`, and returns its error.
static double backpropagate(int layers, const int *widths, const float *x, const float *target,
                            const float *parameters, float *gradient, float *h, float *delta) {
    memcpy(h, x, widths[0] * sizeof *h);
    const float *w = parameters;
    for (int l = 0; l < layers; l++) {
        const int n_in = widths[l], n_out = widths[l + 1];
        float *y = h + n_in;
        memcpy(y, w + (long)n_in * n_out, n_out * sizeof *y);
        for (int i = 0; i < n_in; i++)
            for (int j = 0; j < n_out; j++) y[j] += h[i] * w[(long)i * n_out + j];
        for (int j = 0; j < n_out; j++) y[j] = sigmoid(y[j]);
        w += (long)(n_in + 1) * n_out;
        h = y;
        delta += n_in;
    }

    double error = 0.0;
    for (int j = 0; j < widths[layers]; j++) {
        const float difference = h[j] - target[j];
        error += 0.5 * difference * difference;
        delta[j] = difference * h[j] * (1.0f - h[j]);
    }

    float *dw = gradient + (w - parameters);
    for (int l = layers - 1; l >= 0; l--) {
        const int n_in = widths[l], n_out = widths[l + 1];
        const float *dy = delta;
        w -= (long)(n_in + 1) * n_out;
        dw -= (long)(n_in + 1) * n_out;
        h -= n_in;
        delta -= n_in;
        for (int i = 0; i < n_in; i++)
            for (int j = 0; j < n_out; j++) dw[(long)i * n_out + j] += h[i] * dy[j];
        for (int j = 0; j < n_out; j++) dw[(long)n_in * n_out + j] += dy[j];
        if (l == 0) break;
        for (int i = 0; i < n_in; i++) {
            float sum = 0.0f;
            for (int j = 0; j < n_out; j++) sum += w[(long)i * n_out + j] * dy[j];
            delta[i] = sum * h[i] * (1.0f - h[i]);
        }
    }
    return error;
}

// One epoch over `patterns` rows of x and targets; returns the total error before the update.
double train_epoch(int layers, const int *widths, int patterns, const float *x, const float *targets, float eta,
                   float alpha, float *parameters, float *velocity, float *gradient, float *h, float *delta) {
    long count = 0;
    for (int l = 0; l < layers; l++) count += (long)(widths[l] + 1) * widths[l + 1];
    memset(gradient, 0, count * sizeof *gradient);

    double error = 0.0;
    for (int p = 0; p < patterns; p++)
        error += backpropagate(layers, widths, x + (long)p * widths[0], targets + (long)p * widths[layers], parameters,
                               gradient, h, delta);

    for (long i = 0; i < count; i++) {
        velocity[i] = eta * gradient[i] + alpha * velocity[i];
        parameters[i] -= velocity[i];
    }
    return error;
}
