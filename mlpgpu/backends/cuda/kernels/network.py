"""A whole network forward for few rows (``fused/network.cuh``)."""

from __future__ import annotations

from ....losses import OUTPUTS, OutputName
from .entry import SOURCES, Entry, Product, arguments

# NetworkForward of fused/network.cuh.
NETWORK_THREADS, NETWORK_STAGE, NETWORK_MOST_ROWS, NETWORK_SPREAD_ROWS = 256, 3584, 32, 8
NETWORK_SHARED_BYTES = 4 * 2 * (NETWORK_STAGE + NETWORK_STAGE + 4 * NETWORK_MOST_ROWS)
NETWORK_TILE_COLUMNS = (8, 16, 32, 64)
NETWORK_BUFFERS = 3  # in scratch memory


def output_number(name: OutputName) -> int:
    """The index of an output function in its table, by which kernels know it that serve all of them."""
    return OUTPUTS.index(name)


def network_forward(source: str) -> Entry:
    """Inputs of one of :data:`SOURCES` to predictions of any output function, or to logits.

    Its launches tell the ``products`` of a row and the length of the ``parameters``.
    """
    signature = (
        f"const {SOURCES[source]}* data[rows,n_in], float scale, const float* mean[n_in], "
        "const float* deviation[n_in], const float* parameters[parameters], const NetworkLayer* layers[layer_count], "
        "int layer_count, int spread, float* scratch[0,3,rows,pitch], int pitch, inout unsigned* arrived[], "
        "inout uint64_t* meetings[], const float* target_mean[n], const float* target_scale[n], float* y[rows,n], "
        "unsigned* done[], int n_in, int n, int rows, int output, int is_logits, uint32_t sequence"
    )
    function = f"network_forward<{SOURCES[source]}>"
    return Entry(
        f"network_forward_{source}", "fused/network.cuh", function, arguments(signature), NETWORK_THREADS,
        NETWORK_SHARED_BYTES, cooperative=True, block="NetworkForward", products=(Product(("rows", "products")),),
    )  # fmt: skip


def network_entries() -> list[Entry]:
    """The entries of all types of inputs."""
    return [network_forward(source) for source in SOURCES]
