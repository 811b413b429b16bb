"""Losses and outputs (``elementwise/loss.cuh``), and a loss in one kernel with the last dense layer
(``fused/head.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ....activations import ACTIVATIONS
from ....losses import LOSSES, OUTPUTS
from .entry import ROW_THREADS, ROWS, SUM_BYTES, WARP, Entry, arguments, camel

# Of these each output has a term by itself: SumOfTerms and MeanOfTerms of elementwise/loss.cuh.
SUMS_OF_TERMS = tuple(name for name, row in LOSSES.items() if row.output != "softmax")

# Head of fused/head.cuh.
HEAD_THREADS, HEAD_ROWS, HEAD_MOST_N = 288, 8, 32
HEAD_SHARED_BYTES = 4 * (12 * 1028 + HEAD_ROWS * (8 + 2) * HEAD_MOST_N + 4 * HEAD_ROWS)


def target_reader(kind: str, textured: bool) -> tuple[str, str, str]:
    """The C type of targets, the struct that reads one, and the end of the entry's name."""
    source = "Texture" if textured else "const float*"
    return source, {"index": "Index", "dense": "DenseTarget"}[kind] + f"<{source}>", "" if textured else "_plain"


# What a loss takes beside logits and targets, and what it leaves.
_WEIGHED = (
    "const float* weights, const float* mean, const float* scale, float* delta, double* sums, unsigned* arrived, "
    "double* totals, double* losses"
)


@dataclass(frozen=True)
class Team:
    """The threads that take a row of a loss or an output."""

    struct: str
    block_threads: int
    block_rows: int
    suffix: str

    @staticmethod
    def of(n: int) -> Team:
        """For rows so wide: the order of their sums must follow from that alone."""
        return WIDE_TEAM if n >= WIDE_LEAST_N else WARP_TEAM


WARP_TEAM = Team("WarpTeam", ROW_THREADS, ROW_THREADS // WARP, "")
WIDE_TEAM = Team("BlockTeam", 1024, 1, "_wide")
WIDE_LEAST_N = 16384


def loss(name: str, kind: str, *, textured: bool = True, team: Team = WARP_TEAM) -> Entry:
    """``kind`` is ``index`` or ``dense``; ``textured`` whether targets are read through a texture object."""
    source, target, suffix = target_reader(kind, textured)
    signature = (
        f"{ROWS}, const int* order, const float* logits, {source} targets, {_WEIGHED}, uint16_t* planes, "
        "int64_t plane, int plane_count, int n"
    )
    function, full = f"loss<{camel(name)}, {target}, {team.struct}>", f"loss_{name}_{kind}{suffix}{team.suffix}"
    return Entry(full, "elementwise/loss.cuh", function, arguments(signature), team.block_threads, SUM_BYTES)


def total_error() -> Entry:
    signature = "const Step* step, const double* sums, int count, double* totals, double* losses"
    return Entry("total_error", "elementwise/loss.cuh", "total_error", arguments(signature), ROW_THREADS, SUM_BYTES)


def step_errors() -> Entry:
    """Follows a resident kernel, whose own entry :mod:`~mlpgpu.backends.cuda.resident` makes for each plan."""
    signature = "const Step* step, const float* errors, int capacity, double* losses"
    return Entry("step_errors", "elementwise/loss.cuh", "step_errors", arguments(signature), ROW_THREADS, SUM_BYTES)


def output(function: str, *, team: Team = WARP_TEAM) -> Entry:
    signature = f"{ROWS}, const float* logits, const float* mean, const float* scale, float* y, int n"
    name, instance = f"output_{function}{team.suffix}", f"output<{camel(function)}Output, {team.struct}>"
    return Entry(name, "elementwise/loss.cuh", instance, arguments(signature), team.block_threads, SUM_BYTES)


def head(name: str, kind: str, *, textured: bool = True) -> Entry:
    """The last dense layer, a loss, and dx; arguments as of :func:`loss`."""
    source, target, suffix = target_reader(kind, textured)
    signature = (
        f"{ROWS}, const int* order, const float* x, const float* w, const float* b, {source} targets, {_WEIGHED}, "
        "const float* saved, int activation, float* dx, uint16_t* dx_planes, int64_t dx_plane, int dx_plane_count, "
        "int* dx_lines, int k, int n"
    )
    function = f"head<{camel(name)}, {target}>"
    return Entry(
        f"head_{name}_{kind}{suffix}",
        "fused/head.cuh",
        function,
        arguments(signature),
        HEAD_THREADS,
        HEAD_SHARED_BYTES,
        spill_bytes=32,  # on sm_120 alone
        early=tuple((name, 0) for name in ("order", "w", "b", "targets", "weights", "mean", "scale")),
    )


# Tail of fused/tail.cuh.
TAIL_THREADS, TAIL_MOST_WEIGHTS, TAIL_MOST_UNITS, TAIL_MOST_LAYERS = 1024, 10240, 1024, 32
TAIL_SHARED_BYTES = 4 * (TAIL_THREADS + TAIL_MOST_WEIGHTS + 3 * TAIL_MOST_UNITS + 5 * TAIL_MOST_LAYERS)


def tail(name: str, kind: str, *, textured: bool = True) -> Entry:
    """The layers behind a long first one, a loss, and the deltas; arguments as of :func:`loss`."""
    source, target, suffix = target_reader(kind, textured)
    signature = (
        f"{ROWS}, const int* order, const float* parts, const float* parameters, const TailLayer* described, "
        f"int layer_count, {source} targets, const float* weights, const float* mean, const float* scale, float* y, "
        "float* dz, double* sums, unsigned* arrived, double* totals, double* losses, int count, int capacity, int n"
    )
    function = f"tail<{camel(name)}, {target}>"
    return Entry(
        f"tail_{name}_{kind}{suffix}", "fused/tail.cuh", function, arguments(signature), TAIL_THREADS, TAIL_SHARED_BYTES
    )


def activation_number(name: str) -> int:
    """The place in the table, which kernels know it by that are made for all activations."""
    return list(ACTIVATIONS).index(name)


def loss_entries() -> list[Entry]:
    """All of every loss and output."""
    entries = []
    for name, row in LOSSES.items():
        for kind, textured in product(row.targets, (True, False)):
            entries += [make(name, kind, textured=textured) for make in (loss, head, tail)]
            entries.append(loss(name, kind, textured=textured, team=WIDE_TEAM))
    outputs = (output(function, team=team) for function in OUTPUTS for team in (WARP_TEAM, WIDE_TEAM))
    return [*entries, total_error(), step_errors(), *outputs]
