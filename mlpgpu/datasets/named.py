"""Data sets by name: bundled, from a folder, or downloaded once; always held to their SHA-256."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DownloadError, FileFormatError, StorageError, lookup
from ..storage.files import as_path
from .dataset import Dataset
from .idx import read_idx

FOLDER_VARIABLE = "MLPGPU_DATA"
CHUNK_BYTES = 1 << 20
_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the repository's folder `datasets` is the package `mlpgpu._datasets`.
BUNDLED_FOLDERS = (_PACKAGE / "_datasets", _PACKAGE.parent / "datasets")


class File(NamedTuple):
    """An IDX file."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where a named data set comes from and what its bytes mean."""

    files: tuple[tuple[File, File], ...]  # (images, labels) to train on and to test on, or of all rows
    scale: float
    url: str | None  # of the folder that holds the files, with its last slash; None: they are bundled
    classes: tuple[str, ...] | None = None


SOURCES: dict[str, Source] = {
    "digits": Source(
        files=(
            (
                File("images.idx3-ubyte.gz", "16bf71e8bfa958f11ad68a045567f2a2f5362b27ab1e7cadd4cf9a3cbb37176e"),
                File("labels.idx1-ubyte.gz", "22e1486adc7849d49bbac7f3e6227134ade1aea8cf5289c8dceeecd5a005d43c"),
            ),
        ),
        scale=1 / 16,
        url=None,
    ),
    "mnist": Source(
        files=(
            (
                File("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                File("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            ),
            (
                File("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                File("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            ),
        ),
        scale=1 / 255,
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    ),
    "fashion-mnist": Source(
        files=(
            (
                File("train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
                File("train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            ),
            (
                File("t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
                File("t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            ),
        ),
        scale=1 / 255,
        url="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        classes=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
    ),
}


def load(name: str, folder: str | PathLike[str] | None = None) -> tuple[Dataset, Dataset]:
    """A named data set, (train, test): images as uint8 with a scale to [0, 1], and class labels.

    ===============  ======  ======  ========  ============================================================
    name             train   test    features  where it is looked for
    ===============  ======  ======  ========  ============================================================
    digits           1,438   359     64        bundled; the split is ``Dataset.split(0.2, seed=0)`` of all
    mnist            60,000  10,000  784       ``$MLPGPU_DATA``, else downloaded once
    fashion-mnist    60,000  10,000  784       ``$MLPGPU_DATA``, else downloaded once
    ===============  ======  ======  ========  ============================================================

    Args:
        name: one of the above.
        folder: if given the files are looked for there, or in its subfolder ``name``, and nowhere else.

    Raises:
        UnknownNameError: there is no such data set.
        StorageError: ``folder`` lacks some of the files, or one cannot be read.
        DownloadError: the files are not in ``$MLPGPU_DATA`` and cannot be downloaded.
        FileFormatError: a file found has another SHA-256 than the published one.
    """
    name = lookup("data set", name, SOURCES)
    source = SOURCES[name]
    paths = _locate(name, source, folder)
    parts = [
        Dataset(_read(images, paths), _read(labels, paths), classes=source.classes, scale=source.scale)
        for images, labels in source.files
    ]
    if len(parts) == 1:
        return parts[0].split(0.2, seed=0)
    train, test = parts
    return train, test


def _locate(name: str, source: Source, folder: str | PathLike[str] | None) -> dict[str, Path]:
    """The path of each file of ``source``, by the file's name."""
    if folder is not None:
        folders = [as_path("folder", folder)]
    elif source.url is None:
        folders = [*BUNDLED_FOLDERS]
    else:
        folders = [Path(os.environ[FOLDER_VARIABLE])] if os.environ.get(FOLDER_VARIABLE) else []

    paths, missing = {}, []
    for file in (file for pair in source.files for file in pair):
        places = [place / file.name for parent in folders for place in (parent / name, parent)]
        found = next((path for path in places if os.path.isfile(path)), None)
        if found is None:
            missing.append(file)
        else:
            paths[file.name] = found
    if missing and (folder is not None or source.url is None):
        places_tried = " or ".join(str(place) for parent in folders for place in (parent / name, parent))
        names = ", ".join(file.name for file in missing)
        raise StorageError(f"data set {name!r}", expected=f"all its files in {places_tried}", got=f"no {names}")
    return paths | {file.name: _download(name, source.url, file, folders) for file in missing}


def _download(name: str, url: str | None, file: File, folders: list[Path]) -> Path:
    """The file in the user's cache, downloaded if it is not there; pooch moves it in only when whole and as pinned."""
    what = f"data set {name!r}"
    tried = ", ".join(str(folder) for folder in folders) or f"${FOLDER_VARIABLE} is not set"
    hint = f"not in a folder: {tried}; fetch the file elsewhere and name its folder by folder= or ${FOLDER_VARIABLE}"
    try:
        import pooch
    except ImportError as error:
        got = "no package pooch: pip install 'mlpgpu[data]'"
        raise DownloadError(what, expected=f"to download {url}{file.name}", got=got, hint=hint) from error
    try:
        cache = Path(pooch.os_cache("mlpgpu")) / name
        return Path(pooch.retrieve(f"{url}{file.name}", f"sha256:{file.sha256}", file.name, cache))
    except (OSError, ValueError) as error:  # no network, no room, another SHA-256
        raise DownloadError(what, expected=f"to download {url}{file.name}", got=error, hint=hint) from error


def _read(file: File, paths: dict[str, Path]) -> np.ndarray:
    """The array in ``file`` once its SHA-256 is found to be the pinned one."""
    path, digest = paths[file.name], hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise StorageError(str(path), expected="a readable file", got=error.strerror or error) from error
    if digest.hexdigest() != file.sha256:
        raise FileFormatError(str(path), expected=f"SHA-256 {file.sha256}", got=digest.hexdigest())
    return read_idx(path)
