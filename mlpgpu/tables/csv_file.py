"""CSV files: how one is written, found out from its beginning, and its rows, piece by piece."""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import io
import os
import re
import stat
import warnings
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, BinaryIO, cast

from ..errors import ConfigurationError, DtypeError, EmptyDataError, FileFormatError, StorageError, shown
from ..storage.files import check_path, reason
from .frames import check_names, load_pandas

SUFFIXES = (".csv", ".tsv", ".txt", ".gz")
CHUNK_ROWS = 1 << 17  # of a piece
SAMPLE_BYTES = 1 << 18  # of the beginning that is looked at
MOST_SAMPLE_ROWS = 1000
DELIMITERS = (",", ";", "\t", "|")
GZIP_MAGIC = b"\x1f\x8b"
# The mark at a file's beginning that tells its encoding; UTF-32's begins with UTF-16's.
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
CODE = re.compile(r"0\d+")  # digits that are no number
COMMA_NUMBER, POINT_NUMBER = re.compile(r"\s*[-+]?\d+,\d+\s*"), re.compile(r"\s*[-+]?\d*\.\d+\s*")


class CSV:
    """A file of rows of cells, plain or gzip, whose first row has the names of the columns.

    What is not given is found out from the file's beginning.

    Arguments:
        path: ends in ``.csv``, ``.tsv``, ``.txt`` or ``.gz``.
        delimiter: between cells: the one of comma, semicolon, tab and ``|`` that the first row has most of.
        decimal: in numbers, ``"."`` or ``","``: a comma where it is no delimiter and numbers have it.
        encoding: of the text: UTF-8, or UTF-16 or UTF-32 if the file's mark says so.

    Attributes:
        names: of the columns.
        codes: columns whose first rows have a number with a zero in front, such as 007; they are read as text.

    Raises:
        StorageError: the file cannot be read.
        EmptyDataError: there is nothing in it.
        FileFormatError: it is no text in this encoding, or the first row has no names.
        ConfigurationError, DtypeError: an argument has no meaning.
    """

    is_text = True
    rows: int | None = None

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        delimiter: str | None = None,
        decimal: str | None = None,
        encoding: str | None = None,
    ) -> None:
        self.path = check_path("table", path, SUFFIXES)
        self.what = f"file {self.path}"
        if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1):
            raise ConfigurationError("delimiter", expected="one character", got=shown(delimiter, typed=False))
        if decimal is not None and (not isinstance(decimal, str) or decimal not in (".", ",") or decimal == delimiter):
            expected = "'.' or ',', other than the delimiter"
            raise ConfigurationError("decimal", expected=expected, got=shown(decimal, typed=False))
        self.encoding = _check_encoding(encoding)
        with self._errors(), self._open() as stream:
            sample = stream.read(SAMPLE_BYTES)
        if not sample.strip():
            raise EmptyDataError(self.what, expected="a row of names and rows of cells", got="nothing")
        rows = self._sample_rows(sample, delimiter)
        if not rows:
            raise EmptyDataError(self.what, expected="a row of names and rows of cells", got="nothing")
        self.names = _check_header(self.what, rows[0])
        if len(sample) == SAMPLE_BYTES and len(rows) > 1:
            del rows[-1]  # which may be cut off
        self._check_widths(rows)
        self.decimal = _decimal(rows[1:], self.delimiter) if decimal is None else str.__str__(decimal)
        self.codes = frozenset(
            name for name, *cells in zip(self.names, *rows[1:], strict=True) if any(map(CODE.fullmatch, cells))
        )

    def __repr__(self) -> str:
        return f"CSV({str(self.path)!r}, delimiter={self.delimiter!r}, encoding={self.encoding!r})"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Make errors of ours of what reading raises."""
        try:
            yield
        except UnicodeError as error:
            hint = 'CSV(path, encoding="cp1252") or another one reads it'
            got = getattr(error, "reason", None) or error
            if isinstance(error, UnicodeDecodeError):
                got = f"byte 0x{error.object[error.start]:02x}, {error.reason}"
            raise FileFormatError(self.what, expected=f"text in {self.encoding}", got=got, hint=hint) from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise FileFormatError(self.what, expected="a whole gzip file", got=error) from error
        except OSError as error:
            raise StorageError(self.what, expected="a readable file", got=reason(error)) from error

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            # Asked first because opening a pipe would wait for its other end.
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise OSError(errno.EINVAL, "a folder or a device")
        except ValueError as error:  # a NUL in the path
            raise OSError(errno.EINVAL, str(error)) from error
        with open(self.path, "rb") as stream:
            if stream.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
                with gzip.GzipFile(fileobj=stream) as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield stream

    def _sample_rows(self, sample: bytes, delimiter: str | None) -> list[list[str]]:
        """The first rows of cells, once encoding and delimiter are known."""
        if self.encoding is None:
            self.encoding = next((name for mark, name in MARKS.items() if sample.startswith(mark)), "utf-8")
        with self._errors():
            decoder = codecs.getincrementaldecoder(self.encoding)()
            text = decoder.decode(sample, final=len(sample) < SAMPLE_BYTES)
        if "\0" in text:
            raise FileFormatError(self.what, expected=f"text in {self.encoding}", got="NUL characters")
        first = next((row for row in text.splitlines() if row.strip()), "")
        self.delimiter = _delimiter(first) if delimiter is None else str.__str__(delimiter)
        try:
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter)
            rows = [row for row, _ in zip(reader, range(MOST_SAMPLE_ROWS), strict=False) if row]
        except csv.Error as error:
            raise FileFormatError(self.what, expected="rows of cells", got=error) from error
        return rows

    def _check_widths(self, rows: list[list[str]]) -> None:
        """Refuse rows at the beginning that have more cells than names, or fewer; pandas fills up the latter."""
        for number, row in enumerate(rows[1:]):
            if len(row) != len(self.names):
                expected = f"rows of {len(self.names)} cells, with {self.delimiter!r} as delimiter"
                raise FileFormatError(self.what, expected=expected, got=f"{len(row)} at row {number}")

    def chunks(
        self, names: Sequence[str], as_text: Collection[str] = (), missing: Collection[str] = ()
    ) -> Iterator[tuple[int, Any]]:
        """The number of the first row, and a frame of these columns, for each piece in order.

        Arguments:
            as_text: columns whose cells stay text, as they are written.
            missing: further texts of cells without a value.

        Raises:
            FileFormatError: a row has too many cells, or the file is damaged.
            StorageError: it cannot be read.
        """
        pandas = load_pandas()
        has_exact_numbers = tuple(map(int, pandas.__version__.split(".")[:2])) >= (3, 1)
        options: dict[str, Any] = {
            "sep": self.delimiter,
            "decimal": self.decimal,
            "encoding": self.encoding,
            "dtype": {name: str for name in as_text if name in self.names},
            "na_values": list(missing),
            "index_col": False,
            "chunksize": CHUNK_ROWS,
        }
        if not has_exact_numbers:  # an older pandas gives one number in four another last digit than the file has
            options["float_precision"] = "round_trip"
        first_row = 0
        with (
            self._errors(),
            self._pandas_errors(pandas),
            self._open() as stream,
            pandas.read_csv(stream, **options) as reader,
        ):
            while (frame := _next(reader)) is not None:
                yield first_row, frame[list(names)]
                first_row += len(frame)

    @contextmanager
    def _pandas_errors(self, pandas: Any) -> Iterator[None]:
        expected = f"rows of {len(self.names)} cells"
        try:
            yield
        except pandas.errors.EmptyDataError as error:
            raise EmptyDataError(self.what, expected="a row of names and rows of cells", got="nothing") from error
        except (pandas.errors.ParserError, pandas.errors.ParserWarning, OverflowError) as error:
            got = str(error).removeprefix("Error tokenizing data. C error: ").strip()
            raise FileFormatError(self.what, expected=expected, got=got) from error


def _next(reader: Any) -> Any:
    """The next piece, or None at the end; what pandas warns of, such as cells left over, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", load_pandas().errors.ParserWarning)
        try:
            return reader.get_chunk()
        except StopIteration:
            return None


def _check_encoding(encoding: str | None) -> str | None:
    if encoding is None:
        return None
    if not isinstance(encoding, str):
        raise DtypeError("encoding", expected="a name", got=shown(encoding, typed=False))
    try:
        return codecs.lookup(encoding).name
    except (LookupError, ValueError) as error:
        raise ConfigurationError("encoding", expected="one that Python has", got=repr(encoding)) from error


def _delimiter(row: str) -> str:
    """The delimiter that a row has most of outside quotes."""
    unquoted = re.sub(r'"[^"]*"', "", row)
    return max(DELIMITERS, key=unquoted.count)  # the first of equals


def _decimal(rows: list[list[str]], delimiter: str) -> str:
    if delimiter == ",":
        return "."
    cells = [cell for row in rows for cell in row]
    has_point = any(POINT_NUMBER.fullmatch(cell) for cell in cells)
    return "," if not has_point and any(COMMA_NUMBER.fullmatch(cell) for cell in cells) else "."


def _check_header(what: str, row: list[str]) -> tuple[str, ...]:
    """The names in a file's first row, as pandas has them."""
    if all(_is_number(name) for name in row):
        hint = "put a row of names before the first one"
        raise FileFormatError(what, expected="names of columns in the first row", got="numbers", hint=hint)
    names = [name if name else f"Unnamed: {place}" for place, name in enumerate(row)]
    check_names(names)
    return tuple(names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
