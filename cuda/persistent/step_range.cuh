// The steps of a launch that trains inside one kernel, and the batch of each.
#pragma once

#include "common/step.cuh"

namespace mlpgpu {

// A batch of the launch.
struct Batch {
    uint32_t sequence;  // of the messages of its step
    int64_t step;  // since training began
    int run;  // since the run began
    int64_t first;  // number of its first row in the order
    int rows;  // 0 after the last batch
};

// The steps of a launch: the first one, their count, and the sequence number of the first one's messages.
struct StepRange {
    Step step;
    int steps;
    uint32_t sequence;

    // The batch of step number `done` of the launch; it has no rows if there is no such step.
    __device__ __forceinline__ Batch batch(int done) const {
        Step next = step;
        next.batch += done;
        const int64_t first = static_cast<int64_t>(next.batch) * next.batch_rows;
        return {sequence + done, step.number + done, step.run + done, first, done < steps ? batch_rows(next) : 0};
    }
};

}  // namespace mlpgpu
