"""Prefix sums (``primitives/scan.cuh``), sorts (``primitives/sort.cuh``), histograms (``primitives/histogram.cuh``),
rows and columns of arrays, and random words (``elementwise/random.cuh``); and what measures the card
(``bench/peak_rates.cuh``), for which no plan asks."""

from __future__ import annotations

from ...base import MOST_BINS
from .entry import ITEM_BYTES, ROW_THREADS, SOURCES, WARP, WARPS_PER_BLOCK, Entry, arguments, ceil_div, strided_grid

SCAN_THREADS, SCAN_TILE_BYTES, SCAN_STAGES = 512, 24576, 2  # of primitives/scan.cuh
SCAN_BLOCKS = 512  # at most: two for each multiprocessor of the largest cards
SCANNED = {"float32": "float", "int32": "int", "float64": "double"}  # C types of summands
SORT_DIGITS, SORT_THREADS, SORT_TILE_BYTES = 256, 512, 32768  # of primitives/sort.cuh
KEYS = {"uint32": "uint32_t", "uint64": "uint64_t"}  # C types of keys that can be sorted
WORD_BYTES = (16, 4, 1)  # of what rows are taken by
# Blocks that take rows.  A resident one delays the next product, whose blocks have a multiprocessor each, until it
# ends: so all multiprocessors ask for rows, and have them as soon as the link allows.
PARTITION_BLOCKS = 264
# Of primitives/send_messages.cuh: blocks at most, bytes for which there is one, and from one block's word to another's.
MESSAGE_BLOCKS, MESSAGE_BLOCK_BYTES, MESSAGE_WORD_BYTES = 32, 16384, 32
CHAINS = 8  # of bench/peak_rates.cuh


def prefix_sum(dtype: str) -> Entry:
    """The prefix sum of numbers whose type is one of :data:`SCANNED`."""
    ctype = SCANNED[dtype]
    signature = f"const {ctype}* x[n], {ctype}* y[n], int64_t n, int exclusive, uint64_t* tile_sums[0]"
    shared = SCAN_STAGES * SCAN_TILE_BYTES + (SCAN_THREADS // WARP) * (8 + ITEM_BYTES[ctype]) + 4
    name, function = f"prefix_sum_{dtype}", f"prefix_sum<{ctype}>"
    return Entry(
        name,
        "primitives/scan.cuh",
        function,
        arguments(signature),
        SCAN_THREADS,
        shared,
        blocks=2,
        block=f"ScanTile<{ctype}>",
    )


def scan_tiles(dtype: str, n: int) -> int:
    """How many tiles n elements make: ScanTile of primitives/scan.cuh."""
    return ceil_div(n, SCAN_TILE_BYTES // ITEM_BYTES[SCANNED[dtype]])


def scan_grid(dtype: str, n: int) -> tuple[int, int, int]:
    """The grid of a prefix sum of n elements, whose blocks take tile after tile."""
    return min(scan_tiles(dtype, n), SCAN_BLOCKS), 1, 1


def scan_words(dtype: str, n: int) -> int:
    """How many words a prefix sum of n elements finds at 0 and leaves at 0: a count of tiles, and each tile's sum."""
    return 1 + scan_tiles(dtype, n)


def sort_tile(dtype: str) -> int:
    """How many keys a block sorts: SortTile of primitives/sort.cuh."""
    return SORT_TILE_BYTES // ITEM_BYTES[KEYS[dtype]]


def sort_counts(dtype: str) -> Entry:
    """A pass of a sort counts the digits of each tile; ``dtype`` is one of :data:`KEYS`."""
    signature = f"const {KEYS[dtype]}* keys[n], int64_t n, int shift, int* counts[{SORT_DIGITS},grid.x]"
    name, shared = f"sort_counts_{dtype}", 4 * SORT_DIGITS
    return Entry(
        name, "primitives/sort.cuh", "sort_counts", arguments(signature), SORT_THREADS, shared, block="SortCountsBlock"
    )


def sort_scatter(dtype: str) -> Entry:
    """A pass of a sort moves keys and values where the counts tell; ``dtype`` is one of :data:`KEYS`."""
    key = KEYS[dtype]
    signature = (
        f"const {key}* keys[n], const int* values[n], int64_t n, int shift, const int* starts[{SORT_DIGITS},grid.x], "
        f"{key}* keys_out[n], int* values_out[n]"
    )
    warps = SORT_THREADS // WARP
    shared = SORT_TILE_BYTES + 4 * (SORT_DIGITS * (warps + 1) + warps)
    name, takes = f"sort_scatter_{dtype}", arguments(signature)
    # On sm_75 and sm_80; sm_120 takes 128.  A second block hides more than that costs.
    return Entry(
        name,
        "primitives/sort.cuh",
        "sort_scatter",
        takes,
        SORT_THREADS,
        shared,
        blocks=2,
        spill_bytes=16,
        block=f"SortScatterBlock<{key}>",
    )


def extremes() -> Entry:
    signature, shared = "const float* x[n], int64_t n, float* partials[grid.x,2]", 4 * 2 * WARPS_PER_BLOCK
    return Entry(
        "extremes",
        "primitives/histogram.cuh",
        "extremes",
        arguments(signature),
        ROW_THREADS,
        shared,
        block="ExtremesBlock",
    )


def histogram() -> Entry:
    signature = (
        "const float* x[n], int64_t n, const double* edges[bins], int bins, inout unsigned long long* counts[bins]"
    )
    return Entry(
        "histogram",
        "primitives/histogram.cuh",
        "histogram",
        arguments(signature),
        ROW_THREADS,
        4 * MOST_BINS,
        block="HistogramBlock",
    )


def find_nonfinite() -> Entry:
    signature = "const float* x[n], int64_t n, inout unsigned* found[]"
    return Entry("find_nonfinite", "primitives/histogram.cuh", "find_nonfinite", arguments(signature), ROW_THREADS)


def row_checksums() -> Entry:
    signature = (
        "const unsigned char* x[count,row_bytes], const int* rows[count], int64_t count, int64_t row_bytes, "
        "unsigned* checksums[count]"
    )
    return Entry(
        "row_checksums", "primitives/checksum.cuh", "row_checksums", arguments(signature), ROW_THREADS, 4 * 256,
        block="ChecksumBlock",
    )  # fmt: skip


def take_rows(source: str) -> Entry:
    """Rows that a list names, of an array whose elements are of one of :data:`SOURCES`."""
    ctype = SOURCES[source]
    signature = (
        f"const {ctype}* x[count,width], const int* rows[count], int64_t count, int64_t width, {ctype}* y[count,width]"
    )
    function = f"take_rows<{ctype}>"
    return Entry(f"take_rows_{source}", "primitives/take_rows.cuh", function, arguments(signature), ROW_THREADS)


def take_partition(row_bytes: int) -> Entry:
    """Rows that lie in one card's partition of a data set, in words as wide as rows of so many bytes have."""
    word = next(size for size in WORD_BYTES if row_bytes % size == 0)
    signature = (
        "const int* places[count], int64_t first, int of_batch, int batch_rows, int count, int begin, int end, "
        "const unsigned char* partition[count,row_bytes], int64_t row_bytes, inout unsigned char* rows[count,row_bytes]"
    )
    name, function = f"take_partition_{word}", f"take_partition<{word}>"
    return Entry(name, "primitives/take_rows.cuh", function, arguments(signature), ROW_THREADS)


def partition_grid(count: int, row_bytes: int) -> tuple[int, int, int]:
    """The grid that takes so many rows."""
    return strided_grid(count * row_bytes, PARTITION_BLOCKS, min(row_bytes, max(WORD_BYTES)))


def message_blocks(nbytes: int) -> int:
    """Blocks that send a message of so many bytes.

    Those that wait delay the next product, as blocks that take rows do: so of short messages there are few.
    """
    return max(1, min(MESSAGE_BLOCKS, ceil_div(nbytes, MESSAGE_BLOCK_BYTES)))


def send_messages() -> Entry:
    """Messages of one card to others, and the wait for theirs, by as many blocks of each card."""
    signature = "const int64_t* table[words], const uint32_t* aborted[1], inout unsigned char* memory[bytes]"
    return Entry(
        "send_messages", "primitives/send_messages.cuh", "send_messages", arguments(signature), ROW_THREADS
    )  # fmt: skip


def put_column(source: str) -> Entry:
    """A column of an array, whose elements are of one of :data:`SOURCES`."""
    ctype = SOURCES[source]
    signature = f"const {ctype}* x[count], int64_t count, int64_t width, int64_t column, inout {ctype}* y[count,width]"
    function = f"put_column<{ctype}>"
    return Entry(f"put_column_{source}", "primitives/take_rows.cuh", function, arguments(signature), ROW_THREADS)


def random_words() -> Entry:
    signature = "uint64_t seed, uint64_t purpose, uint64_t step, int64_t n, uint64_t* words[n]"
    return Entry("random_words", "elementwise/random.cuh", "random_words", arguments(signature), ROW_THREADS)


def initial_uniform() -> Entry:
    signature = "uint64_t seed, uint64_t purpose, uint64_t layer, double limit, int64_t n, float* x[n]"
    return Entry("initial_uniform", "elementwise/random.cuh", "initial_uniform", arguments(signature), ROW_THREADS)


def primitive_entries() -> list[Entry]:
    """The entries of all primitives, of every type."""
    sorts = [entry(dtype) for dtype in KEYS for entry in (sort_counts, sort_scatter)]
    counts = [extremes(), find_nonfinite(), histogram(), row_checksums()]
    rows = [entry(source) for source in SOURCES for entry in (take_rows, put_column)]
    rows += [take_partition(size) for size in WORD_BYTES]
    others = [send_messages(), random_words(), initial_uniform()]
    return [*(prefix_sum(dtype) for dtype in SCANNED), *sorts, *counts, *rows, *others]


def multiply_add() -> Entry:
    """Chains of multiply-adds that do not wait for each other."""
    signature = f"float a, float b, int rounds, float* y[grid.x,{ROW_THREADS}]"
    return Entry("multiply_add", "bench/peak_rates.cuh", "multiply_add", arguments(signature), ROW_THREADS)
