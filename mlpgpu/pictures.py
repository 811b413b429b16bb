"""Figures of matplotlib, for a file or for a notebook."""

from __future__ import annotations

import io
from os import PathLike
from pathlib import Path
from typing import Any

from .storage.files import check_path, replace_file

PICTURES = (".png", ".svg")
DOTS_PER_INCH = 150


def check_picture(path: str | PathLike[str] | None) -> Path | None:
    """``path``, if it is one, as that of a picture."""
    return None if path is None else check_path("picture", path, PICTURES)


def deliver(figure: Any, path: Path | None) -> Any:
    """Write ``figure`` to ``path`` and return that; without a path return the figure, which a notebook shows.

    Raises:
        StorageError: the picture cannot be written.
    """
    if path is None:
        figure._repr_png_ = lambda: _rendered(figure, "png")  # what notebooks ask for; pyplot is not needed
        return figure
    replace_file(f"picture {path}", path, _rendered(figure, path.suffix[1:].lower()))
    return path


def _rendered(figure: Any, form: str) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format=form, dpi=DOTS_PER_INCH)
    return picture.getvalue()
