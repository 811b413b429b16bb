"""
Writing a kernel's test
=======================

Kernels are tested without a GPU: g++ compiles the same CUDA source under sanitizers, each thread is a fibre that
runs to its next barrier, and every launch runs in two orders of threads and blocks, which must write the same bits.
This page writes a kernel, tests it, and plants a fault that the test has to find. It needs g++ on x86-64 Linux.
"""

import os
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import mlpgpu
from mlpgpu.backends.cuda.kernels import Entry, arguments

tests = Path(mlpgpu.__file__).parents[1] / "tests"  # of a checkout
sys.path[:0] = [str(tests), str(tests / "kernels")]
os.environ.setdefault("MLPGPU_CACHE", tempfile.mkdtemp())  # where compiled kernels are kept

from shim_runner import KernelFault, Unwritten, run  # noqa: E402 (found by the path above)

# %%
# A kernel that sums each row of a matrix, a block for a row.  Threads add up every 64th element, then halve the
# number of partial sums in shared memory until one is left; a barrier stands between the halvings.

SOURCE = """
#include "common/portable.cuh"

namespace mlpgpu {

template <bool BARRIER>
__device__ void row_sums(const float* x, float* y, int columns) {
    SHARED(float, partial);
    const int thread = threadIdx.x, threads = blockDim.x;
    float sum = 0;
    for (int i = thread; i < columns; i += threads) sum += x[blockIdx.x * columns + i];
    partial[thread] = sum;
    __syncthreads();
    for (int half = threads / 2; half > 0; half /= 2) {
        if (thread < half) partial[thread] += partial[thread + half];
        if (BARRIER) __syncthreads();
    }
    if (thread == 0) y[blockIdx.x] = partial[0];
}

}
"""
header = Path(tempfile.mkdtemp()) / "row_sums.cuh"
header.write_text(SOURCE)
THREADS, ROWS = 64, 20
given = arguments("const float* x, float* y, int columns")
right, faulty = (
    Entry(f"row_sums_{barrier}", str(header), f"row_sums<{barrier}>", given, THREADS, 4 * THREADS, block=None)
    for barrier in ("true", "false")
)

# %%
# The bound follows from the number of roundings and is not tuned: an element passes through at most ⌈columns / 64⌉
# additions in its thread and 6 halvings, each of which rounds by at most 2⁻²⁴ of what it adds up.  Sizes are those at
# which borders go wrong: 1, and one more or less than the number of threads.

random = np.random.default_rng(1)
sizes = [1, 31, 63, 64, 65, 127, 257, 1000, 4095]
errors, bounds = [], []
for columns in sizes:
    x = random.normal(size=(ROWS, columns)).astype(np.float32)
    y = run(right, ROWS, THREADS, {"x": x, "y": Unwritten((ROWS,), np.float32), "columns": columns})["y"]
    expected = x.astype(np.float64).sum(axis=1)
    bound = (-(-columns // THREADS) + 6) * 2.0**-24 * abs(x.astype(np.float64)).sum(axis=1)
    assert np.all(abs(y - expected) <= bound), columns
    errors.append(abs(y - expected))
    bounds.append(bound)
print(f"{len(sizes)} sizes are within their bounds")

# %%
# The same kernel without the barrier between halvings.  On a card it may well pass, for years; here the two orders
# differ.

try:
    x = random.normal(size=(ROWS, 257)).astype(np.float32)
    run(faulty, ROWS, THREADS, {"x": x, "y": Unwritten((ROWS,), np.float32), "columns": 257})
except KernelFault as fault:
    print("found:", fault)
else:
    raise AssertionError("the missing barrier was not found")

figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
for columns, error, bound in zip(sizes, errors, bounds, strict=True):
    seen = np.maximum(error, 1e-9)  # exact sums would be below any axis
    axes.plot(np.full(ROWS, columns), seen, ".", color="C0", label="error of a row's sum" if columns == 1 else None)
    axes.plot(np.full(ROWS, columns), bound, "_", color="C1", label="bound of that row" if columns == 1 else None)
axes.set(xlabel="columns of the matrix", ylabel="|sum − that in float64|", xscale="log", yscale="log")
axes.legend()
plt.show()

# %%
# Every error lies below its row's bound, by a factor that grows with the number of roundings, since roundings of
# either sign cancel.  A single column is summed exactly (drawn at 10⁻⁹).
