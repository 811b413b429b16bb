"""What a model can be exported to: one row of FORMATS each."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConfigurationError
from ..network import Network
from ..storage.files import check_path, replace_file


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Attributes:
        about: for people.
        write: writes a network to a path, whole or not at all.
    """

    about: str
    write: Callable[[Network, Path], None]


def _save(network: Network, path: Path) -> None:
    network.save(path)


def _write_npz(network: Network, path: Path) -> None:
    """Parameters by name, such as ``0.weight`` (n_in, n_out), and the statistics of ``Standardize`` layers."""
    arrays = dict(network.parameters)
    contents = network.contents().arrays
    prefix = "/mlpgpu/statistics/"
    arrays |= {name.removeprefix(prefix): array for name, array in contents.items() if name.startswith(prefix)}
    image = io.BytesIO()
    np.savez(image, allow_pickle=False, **arrays)
    replace_file(f"file {path}", path, image.getvalue())


def _write_json(network: Network, path: Path) -> None:
    """Layers and columns, as the description in a model's file has them."""
    description = network.contents().description["network"]
    replace_file(f"file {path}", path, (json.dumps(description, indent=1) + "\n").encode())


# By the end of the name; the longest that suits is meant.
FORMATS: dict[str, Format] = {
    ".weights.h5": Format("weights that Keras 3 loads, and mlpgpu", _save),
    ".h5": Format("the network, without the run that it was trained in", _save),
    ".npz": Format("parameters as arrays of NumPy", _write_npz),
    ".json": Format("layers and columns, without parameters", _write_json),
}


def format_of(path: Path) -> Format:
    """The format that a file's name asks for.

    Raises:
        ConfigurationError: there is none.
    """
    checked = check_path("exported file", path)
    suiting = [suffix for suffix in FORMATS if checked.name.lower().endswith(suffix)]
    if not suiting:
        raise ConfigurationError("exported file", expected=f"a name that ends in {', '.join(FORMATS)}", got=path)
    return FORMATS[max(suiting, key=len)]
