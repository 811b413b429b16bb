"""What each kernel is held to: launches, the NumPy specification's results in float64, and bounds.

A case is plain data.  Whoever can launch a kernel runs it: on the host (test_kernels.py) or on a card.
Each entry of the table has at least one; activations, losses and optimizers are enumerated from the
tables of the specification, so a new row brings its own.

Rows of inputs that belong to another shard hold NaN, and outputs hold before the launch what no kernel
computes: what is read, written or left out by mistake shows.  Every bound is derived from the number of
roundings, at most EPS32 each, by which a result is made, and from the magnitudes that are rounded; none
depends on what a kernel returned.
"""

from __future__ import annotations

from functools import cache

from .case import Case
from .dense import dense_cases
from .input_layer import input_layer_cases
from .local import local_cases
from .losses import loss_cases
from .metrics import metric_cases, rank_cases
from .network import network_cases
from .parts import part_cases
from .primitives import primitive_cases
from .row_step import row_step_cases
from .rows import row_cases
from .tensor import tensor_cases
from .updates import step_cases
from .whole_batch import tensor_whole_batch_cases, whole_batch_cases


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case.  `initialise_steps` has none: its steps are no arrays of numbers, and test_kernels.py tests it."""
    return (
        *dense_cases(),
        *local_cases(),
        *row_cases(),
        *loss_cases(),
        *metric_cases(),
        *step_cases(),
        *primitive_cases(),
        *rank_cases(),
        *tensor_cases(),
        *network_cases(),
        *part_cases(),
        *row_step_cases(),
        *input_layer_cases(),
        *whole_batch_cases(),
        *tensor_whole_batch_cases(),
    )
