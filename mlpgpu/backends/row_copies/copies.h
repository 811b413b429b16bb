// Copies of rows, chunk by chunk, by whoever has time.
#pragma once

#include "rows.h"
#include "threads.h"

namespace mlpgpu {

// A copy and who helps with it.
struct Copying {
    Copy copy;
    Job job;
    int64_t is_infinite;  // whether a chunk has a number that is infinite or NaN
};

inline void copy_piece(void* what, int64_t chunk) {
    Copying& copying = *static_cast<Copying*>(what);
    if (copy_chunk(copying.copy, chunk)) __atomic_store_n(&copying.is_infinite, 1, __ATOMIC_RELAXED);
}

}  // namespace mlpgpu

// Has up to so many helpers begin; `copying` stays where it is until the copy is finished.
extern "C" void begin_copy(mlpgpu::Copying* copying, int64_t helpers, int64_t awake_nanoseconds) {
    copying->job = {mlpgpu::copy_piece, copying, mlpgpu::chunks_of(copying->copy), -1, 0};
    mlpgpu::begin(copying->job, helpers, awake_nanoseconds);
}

// Copies what is left, beside those who have begun, and waits for them; returns whether all numbers are finite.
extern "C" int64_t finish_copy(mlpgpu::Copying* copying) {
    if (!copying->job.compute) copying->job = {mlpgpu::copy_piece, copying, mlpgpu::chunks_of(copying->copy), -1, 0};
    mlpgpu::finish(copying->job);
    return !copying->is_infinite;
}
