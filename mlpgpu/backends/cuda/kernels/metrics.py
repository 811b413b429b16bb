"""Metrics added up batch by batch (``elementwise/metrics.cuh``), and those of ranks (``elementwise/ranking.cuh``)."""

from __future__ import annotations

from ....metrics import METRICS
from .entry import ROW_THREADS, SUM_BYTES, Entry, arguments, camel
from .losses import target_reader
from .patterns import prefix_sum, sort_counts, sort_scatter

METRIC_THREADS = 1024  # where the sums have one column, one block adds up the whole batch


def classes(kind: str, *, textured: bool = True) -> Entry:
    """Arguments as of :func:`.losses.loss`."""
    source, target, suffix = target_reader(kind, textured)
    signature = (
        f"const Step* step, const int* order, const float* output, {source} targets, int* predicted, int* actual, "
        "int n, int classes"
    )
    return Entry(
        f"classes_{kind}{suffix}", "elementwise/metrics.cuh", f"classes<{target}>", arguments(signature), ROW_THREADS
    )


def metric(name: str, *, textured: bool = True) -> Entry:
    """``textured`` makes a difference to metrics of numbers."""
    if METRICS[name].of == "classes":
        output, source, compared, suffix = "const int*", "const int*", "Classes", ""
    else:
        source, _, suffix = target_reader("dense", textured)
        output, compared = "const float*", f"Numbers<{source}>"
    signature = (
        f"const Step* step, const int* order, const float* weights, {output} output, {source} targets, double* sums, "
        "int n"
    )
    function = f"metric<{camel(name)}Metric, {compared}>"
    return Entry(
        f"metric_{name}{suffix}", "elementwise/metrics.cuh", function, arguments(signature), METRIC_THREADS, SUM_BYTES
    )


def metric_entries(kind: str, *, textured: bool = True) -> list[Entry]:
    """All that metrics added up by batches can ask for on targets of one kind."""
    added = (name for name, row in METRICS.items() if row.of != "rankings")
    return [classes(kind, textured=textured), *(metric(name, textured=textured) for name in added)]


def rank_keys() -> Entry:
    signature = (
        "const Step* step, const int* order, const float* weights, const float* output, const int* actual, "
        "uint32_t* keys, int* of_class, float* of_weight, int n, int curves"
    )
    return Entry("rank_keys", "elementwise/ranking.cuh", "rank_keys", arguments(signature), ROW_THREADS)


def rank_weights() -> Entry:
    signature = (
        "const int* rows, const int* of_class, const float* of_weight, int64_t n, int positive, double* positives, "
        "double* negatives"
    )
    return Entry("rank_weights", "elementwise/ranking.cuh", "rank_weights", arguments(signature), ROW_THREADS)


def rank_area(metric: str) -> Entry:
    signature = (
        "const uint32_t* keys, const double* positives, const double* negatives, int64_t n, double* parts, "
        "unsigned* arrived, double* sums, int curve, int curves"
    )
    function = f"rank_area<{camel(metric)}Metric>"
    return Entry(
        f"rank_area_{metric}", "elementwise/ranking.cuh", function, arguments(signature), ROW_THREADS, SUM_BYTES
    )


def rank_entries() -> list[Entry]:
    """All that metrics of ranks can ask for, beside the classes of rows."""
    areas = [rank_area(name) for name, row in METRICS.items() if row.of == "rankings"]
    sort = [sort_counts("uint32"), prefix_sum("int32"), sort_scatter("uint32")]
    return [rank_keys(), *sort, rank_weights(), prefix_sum("float64"), *areas]
