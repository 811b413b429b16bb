"""Metrics added up batch by batch (``elementwise/metrics.cuh``), and ranking metrics (``elementwise/ranking.cuh``)."""

from __future__ import annotations

from ....metrics import SUMS
from ...sources import camel
from .entry import ROW_THREADS, SUM_BYTES, Entry, arguments
from .losses import TargetReader
from .primitives import prefix_sum, sort_counts, sort_scatter

METRIC_THREADS = 1024  # where the sums have one column, one block adds up the whole batch


def classes(kind: str, *, textured: bool = True) -> Entry:
    """The classes of predictions and of targets; arguments are those of :func:`.losses.loss`."""
    reader = TargetReader(kind, textured)
    signature = (
        f"const Step* step[0], const int* order[rows], const float* output[rows,n], {reader.argument()}, "
        "int* predicted[rows], int* actual[rows], int n, int classes"
    )
    name, function = f"classes_{kind}{reader.suffix}", f"classes<{reader.struct}>"
    return Entry(name, "elementwise/metrics.cuh", function, arguments(signature), ROW_THREADS)


def true_class_ranks() -> Entry:
    signature = "const Step* step[0], const float* output[rows,n], const int* actual[rows], int* ranks[rows], int n"
    return Entry("true_class_ranks", "elementwise/metrics.cuh", "true_class_ranks", arguments(signature), ROW_THREADS)


def metric(name: str, kind: str = "dense", *, textured: bool = True) -> Entry:
    """A row of SUMS; how targets of a ``kind`` are read matters where it is not their classes that are compared."""
    of = SUMS[name].of
    if of in ("classes", "ranks"):
        output, targets, compared, suffix = "const int* output[rows]", "const int* targets[rows]", "Classes", ""
    else:
        reader = TargetReader(kind if of == "probabilities" else "dense", textured)
        output, targets, suffix = "const float* output[rows,n]", reader.argument(), reader.suffix
        compared = f"Numbers<{reader.source}>"
        if of == "probabilities":
            compared, suffix = f"Probabilities<{reader.struct}, {reader.source}>", f"_{kind}{reader.suffix}"
    signature = (
        f"const Step* step[0], const int* order[rows], const float* weights[rows], {output}, {targets}, "
        "inout double* sums[0], int n"
    )
    function = f"metric<{camel(name)}Metric, {compared}>"
    return Entry(
        f"metric_{name}{suffix}",
        "elementwise/metrics.cuh",
        function,
        arguments(signature),
        METRIC_THREADS,
        SUM_BYTES,
        block="MetricBlock",
    )


def metric_entries(kind: str, *, textured: bool = True) -> list[Entry]:
    """The entries of all sums that are added up batch by batch, on targets of one kind."""
    added = (name for name, row in SUMS.items() if row.of != "rankings")
    entries = [classes(kind, textured=textured), true_class_ranks()]
    return [*entries, *(metric(name, kind, textured=textured) for name in added)]


def rank_keys() -> Entry:
    signature = (
        "const Step* step[0], const int* order[rows], const float* weights[rows], const float* output[rows,curves], "
        "const int* actual[rows], uint32_t* keys[curves,rows], int* of_class[rows], float* of_weight[rows], int n, "
        "int curves"
    )
    return Entry("rank_keys", "elementwise/ranking.cuh", "rank_keys", arguments(signature), ROW_THREADS)


def rank_labels(*, textured: bool = True) -> Entry:
    reader = TargetReader("dense", textured)
    signature = f"const Step* step[0], const int* order[rows], {reader.argument()}, int* of_class[n,rows], int n"
    name, function = f"rank_labels{reader.suffix}", f"rank_labels<{reader.source}>"
    return Entry(name, "elementwise/ranking.cuh", function, arguments(signature), ROW_THREADS)


def rank_weights() -> Entry:
    signature = (
        "const int* rows[n], const int* of_class[n], const float* of_weight[n], int64_t n, int positive, "
        "double* positives[n], double* negatives[n]"
    )
    return Entry("rank_weights", "elementwise/ranking.cuh", "rank_weights", arguments(signature), ROW_THREADS)


def rank_area(metric: str) -> Entry:
    signature = (
        "const uint32_t* keys[n], const double* positives[n], const double* negatives[n], int64_t n, "
        "double* partials[grid.x], inout unsigned* arrived[], double* sums[3], int curve, int curves"
    )
    function = f"rank_area<{camel(metric)}Metric>"
    return Entry(
        f"rank_area_{metric}",
        "elementwise/ranking.cuh",
        function,
        arguments(signature),
        ROW_THREADS,
        SUM_BYTES,
        block="SumBlock",
    )


def rank_entries(*, textured: bool = True) -> list[Entry]:
    """The entries of ranking metrics, beside those that find the classes of rows."""
    areas = [rank_area(name) for name, row in SUMS.items() if row.of == "rankings"]
    sort = [sort_counts("uint32"), prefix_sum("int32"), sort_scatter("uint32")]
    return [rank_keys(), rank_labels(textured=textured), *sort, rank_weights(), prefix_sum("float64"), *areas]
