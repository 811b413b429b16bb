"""Where rows come from, piece by piece: frames, CSV and Parquet files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Protocol

from ..errors import BackendError, FileFormatError, StorageError
from ..storage.files import check_path, reason
from .csv_file import CHUNK_ROWS, CSV
from .csv_file import SUFFIXES as CSV_SUFFIXES
from .frames import as_frame, check_names

PARQUET_SUFFIXES = (".parquet", ".pq")


class Source(Protocol):
    """Rows with named columns, which can be read more than once."""

    is_text: bool  # whether cells are text, of which pandas guesses what it is
    what: str  # of errors

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns."""

    def chunks(
        self, names: Sequence[str], as_text: Collection[str] = (), missing: Collection[str] = ()
    ) -> Iterator[tuple[int, Any]]:
        """The number of the first row, and a frame of these columns, for each piece in order."""


class FrameSource:
    """A frame in memory."""

    is_text, what = False, "table"

    def __init__(self, x: Any) -> None:
        self._frame = as_frame(x)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._frame.columns)

    def chunks(
        self, names: Sequence[str], as_text: Collection[str] = (), missing: Collection[str] = ()
    ) -> Iterator[tuple[int, Any]]:
        for start in range(0, len(self._frame), CHUNK_ROWS):
            yield start, self._frame.iloc[start : start + CHUNK_ROWS]


class ParquetSource:
    """A Parquet file, of which a piece at a time is in memory."""

    is_text = False

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = check_path("table", path, PARQUET_SUFFIXES)
        self.what = f"file {self.path}"
        try:
            import pyarrow.parquet
        except ImportError as error:
            hint = "pip install pyarrow"
            raise BackendError(self.what, expected="the package pyarrow", got=error, hint=hint) from error
        self._open = pyarrow.parquet.ParquetFile
        with _errors(self.what), self._open(self.path) as file:
            self._names = tuple(file.schema_arrow.names)
        check_names(list(self._names))

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def chunks(
        self, names: Sequence[str], as_text: Collection[str] = (), missing: Collection[str] = ()
    ) -> Iterator[tuple[int, Any]]:
        first_row = 0
        with _errors(self.what), self._open(self.path) as file:
            for batch in file.iter_batches(batch_size=CHUNK_ROWS, columns=list(names)):
                frame = batch.to_pandas()
                yield first_row, frame
                first_row += len(frame)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Make errors of ours of pyarrow's."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise StorageError(what, expected="a readable file", got=reason(error)) from error
        raise FileFormatError(what, expected="a Parquet file", got=error) from error
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
        raise FileFormatError(what, expected="a Parquet file", got=error) from error


def as_source(x: Any) -> Source:
    """Rows of a frame, or of the file at a path.

    Raises:
        MlpgpuError: it is no table, or cannot be read.
    """
    if isinstance(x, (CSV, FrameSource, ParquetSource)):
        return x
    if not isinstance(x, (str, PathLike)):
        return FrameSource(x)
    path = check_path("table", x, (*CSV_SUFFIXES, *PARQUET_SUFFIXES))
    return ParquetSource(path) if path.suffix.lower() in PARQUET_SUFFIXES else CSV(path)
