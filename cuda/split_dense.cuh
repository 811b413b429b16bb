// The kernels of dense.cuh and dense_update.cuh for tiles of split.cuh: what is instantiated with a SplitTile.
#pragma once

#include "dense_update.cuh"
#include "split.cuh"
