// The kernels of dense/dense.cuh and dense/update.cuh for tiles of gemm/split_sm80.cuh: what is instantiated with a SplitTile.
#pragma once

#include "dense/update.cuh"
#include "gemm/split_sm80.cuh"
