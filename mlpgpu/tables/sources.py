"""Where rows come from, piece by piece: frames, CSV and Parquet files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Protocol

import psutil

from ..errors import BackendError, FileFormatError, StorageError
from ..storage.files import check_path, reason
from .csv_file import CHUNK_ROWS, CSV
from .csv_file import SUFFIXES as CSV_SUFFIXES
from .frames import as_frame, check_names, load_pandas

PARQUET_SUFFIXES = (".parquet", ".pq")
KEPT_SHARE = 0.25  # of the memory that is free, what the rows of a file may take that are kept


class Source(Protocol):
    """Rows with named columns, which can be read more than once."""

    is_text: bool  # whether cells are text, of which pandas guesses what it is
    what: str  # of errors
    codes: frozenset[str]  # columns whose digits are no numbers
    rows: int | None  # how many there are, where that is known

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns."""

    def chunks(
        self, names: Sequence[str], as_text: Collection[str] = (), missing: Collection[str] = ()
    ) -> Iterator[tuple[int, Any]]:
        """The number of the first row, and a frame of these columns, for each piece in order."""


class FrameSource:
    """A frame in memory."""

    is_text, what, codes = False, "table", frozenset[str]()

    def __init__(self, x: Any) -> None:
        self._frame = as_frame(x)
        self.rows: int | None = len(self._frame)

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

    is_text, codes = False, frozenset[str]()

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
            self.rows: int | None = int(file.metadata.num_rows)
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


class Kept:
    """Rows of a file that are kept once they were read, if they fit into a share of the free memory.

    So a file that fits is parsed once, and a larger one as often as it is asked for.
    """

    def __init__(self, source: Source) -> None:
        self._source, self.is_text, self.what, self.codes = source, source.is_text, source.what, source.codes
        self.rows = source.rows
        self._pieces: list[tuple[int, Any]] | None = None  # of all columns that were read
        self._as_text: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return self._source.names

    def chunks(
        self, names: Sequence[str], as_text: Collection[str] = (), missing: Collection[str] = ()
    ) -> Iterator[tuple[int, Any]]:
        if self._pieces is not None and self._has(names, as_text):
            for first_row, frame in self._pieces:
                yield first_row, frame[list(names)]
            return
        pieces: list[tuple[int, Any]] | None = [] if self._pieces is None else None
        most = psutil.virtual_memory().available * KEPT_SHARE
        rows = 0
        for first_row, frame in self._source.chunks(names, as_text, missing):
            rows = first_row + len(frame)
            if pieces is not None:
                most -= frame.memory_usage(deep=True).sum()
                pieces = [*pieces, (first_row, frame)] if most > 0 else None
            yield first_row, frame
        self.rows = rows
        if pieces is not None:
            self._pieces, self._as_text = pieces, set(as_text)

    def _has(self, names: Sequence[str], as_text: Collection[str]) -> bool:
        """Whether the columns were read, and as text where that is asked for or they were text anyway."""
        types = load_pandas().api.types
        assert self._pieces is not None
        kept = [frame for _, frame in self._pieces]
        if not all(set(names) <= set(frame.columns) for frame in kept):
            return False
        others = [name for name in names if name in as_text and name not in self._as_text]
        return all(not types.is_numeric_dtype(frame[name].dtype) for frame in kept for name in others)


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
    if isinstance(x, (CSV, FrameSource, Kept, ParquetSource)):
        return x
    if not isinstance(x, (str, PathLike)):
        return FrameSource(x)
    path = check_path("table", x, (*CSV_SUFFIXES, *PARQUET_SUFFIXES))
    return ParquetSource(path) if path.suffix.lower() in PARQUET_SUFFIXES else CSV(path)
