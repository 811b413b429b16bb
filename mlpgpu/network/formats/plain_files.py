"""Our own file without the run, and what a script reads without this package: arrays of NumPy, and JSON."""

from __future__ import annotations

import io
import json

import numpy as np

from ... import storage
from ..saved import SavedNetwork


def write_hdf5(network: SavedNetwork) -> bytes:
    """The file that ``Network.save`` writes."""
    return storage.image("exported network", network.contents()).getvalue()


def write_npz(network: SavedNetwork) -> bytes:
    """Parameters by name, such as ``0.weight`` (n_in, n_out), and ``mean`` and ``scale`` of ``Standardize`` layers."""
    image = io.BytesIO()
    # Before NumPy 2.2 allow_pickle= would be one more array; these are numbers, of which none is pickled.
    np.savez(image, **network.named())  # type: ignore[arg-type]
    return image.getvalue()


def write_json(network: SavedNetwork) -> bytes:
    """Layers and columns, as the description in our own file has them."""
    return (json.dumps(network.described(), indent=1) + "\n").encode()
