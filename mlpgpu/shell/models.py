"""The network that a command trains."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigurationError, check_integer
from ..layers import Dense, Dropout, Layer, Standardize
from ..names import ActivationName
from ..network import Network
from .data import Data

BATCHES_PER_EPOCH = 1000  # about, where the batch size is left open
LEAST_BATCH, MOST_BATCH = 32, 512


def build(
    data: Data, widths: Sequence[int], activation: ActivationName, dropout: float, seed: int, *, scales_targets: bool
) -> Network:
    """Dense layers of these widths, with dropout after each, and a last one for the targets.

    Floats that nothing has scaled are standardized first, and so are targets last if ``scales_targets``.

    Raises:
        MlpgpuError: a width or a name has no meaning.
    """
    layers: list[Layer] = [Standardize(data.dataset.n_in)] if data.standardizes else []
    n_in = data.dataset.n_in
    for width in widths:
        if width < 1:
            raise ConfigurationError("--layers", expected="widths of at least 1", got=width)
        layers.append(Dense(n_in, width, activation=activation))
        layers += [Dropout(dropout)] if dropout else []
        n_in = width
    layers.append(Dense(n_in, data.n_out))
    layers += [Standardize(data.n_out)] if scales_targets else []
    return Network(layers, check_integer("--seed", seed, least=0))


def batch_size_of(rows: int) -> int:
    """A power of two with about BATCHES_PER_EPOCH batches, within bounds."""
    return min(MOST_BATCH, max(LEAST_BATCH, 1 << (rows // BATCHES_PER_EPOCH).bit_length()))
