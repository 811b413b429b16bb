"""The IDX format: what is written is read back, and whatever is not IDX is refused by name."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mlpgpu.datasets import read_idx, write_idx
from mlpgpu.errors import ConfigurationError, DtypeError, FileFormatError, ShapeError, StorageError

DTYPES = {0x08: np.uint8, 0x09: np.int8, 0x0B: np.int16, 0x0C: np.int32, 0x0D: np.float32, 0x0E: np.float64}


def header(code: int, *shape: int) -> bytes:
    return struct.pack(f">4B{len(shape)}I", 0, 0, code, len(shape), *shape)


def written(folder: Path, contents: bytes, *, packed: bool = False) -> Path:
    path = folder / "numbers"
    path.write_bytes(gzip.compress(contents) if packed else contents)
    return path


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 2), (2, 3, 4), (0,), (0, 28, 28)])
@pytest.mark.parametrize("name", ["numbers", "numbers.gz"])
def test_round_trip(tmp_path: Path, code: int, shape: tuple[int, ...], name: str) -> None:
    array = np.random.default_rng(1).integers(-100, 100, shape).astype(DTYPES[code])
    write_idx(tmp_path / name, array)
    back = read_idx(tmp_path / name)
    np.testing.assert_array_equal(back, array, strict=True)
    assert back.dtype.isnative
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_bytes_by_hand(tmp_path: Path) -> None:
    contents = bytes.fromhex("00000B02 00000002 00000001 0102 FFFE")
    path = written(tmp_path, contents)
    np.testing.assert_array_equal(read_idx(path), np.array([[0x0102], [-2]], np.int16), strict=True)
    write_idx(path, np.array([[0x0102], [-2]], np.int16))
    assert path.read_bytes() == contents


def test_byte_order_and_strides_are_the_writers_business(tmp_path: Path) -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)
    for given in (array, array.astype("<i4"), np.asfortranarray(array)):
        write_idx(tmp_path / "numbers", given)
        np.testing.assert_array_equal(read_idx(tmp_path / "numbers"), array)


def test_gzip_is_told_by_its_bytes(tmp_path: Path) -> None:
    contents = header(0x08, 2) + b"\1\2"
    np.testing.assert_array_equal(read_idx(written(tmp_path, contents, packed=True)), [1, 2])
    path = tmp_path / "plain.gz"
    path.write_bytes(contents)
    np.testing.assert_array_equal(read_idx(path), [1, 2])


def test_gzip_bytes_repeat(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write_idx(tmp_path / name, np.arange(9, dtype=np.uint8))
    first = (tmp_path / "a.gz").read_bytes()
    assert first == (tmp_path / "b.gz").read_bytes()
    assert first[3:8] == bytes(5)  # no flags, so no name; no time


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "got 0x$"),
        (b"\0\0\x08", "got 0x000008$"),
        (b"\x89PNG....", "got 0x89504e47$"),
        (b"\0\0\x0a\x01\0\0\0\1\7", "got 0x00000a01$"),
        (b"\0\0\x08\0\7", "1 to 64 axes, got 0$"),
        (b"\0\0\x08\xff" + bytes(4 * 255), "1 to 64 axes, got 255$"),
        (b"\0\0\x08\x02\0\0\0\1\0", "a header of 12 bytes, got 9 bytes$"),
        (header(0x0B, 3) + bytes(5), "expected 6 bytes after a header of shape .3,., got 5 bytes$"),
        (header(0x0B, 3) + bytes(7), "expected 6 bytes .* got more$"),
        (header(0x08, 0) + b"\0", "expected 0 bytes .* got more$"),
        (header(0x0E, 0, *[2**32 - 1] * 3), "a size that memory can address"),
        (header(0x0E, *[2**32 - 1] * 3), "a size that memory can address"),
    ],
)
def test_bad_contents(tmp_path: Path, contents: bytes, message: str, packed: bool) -> None:
    path = written(tmp_path, contents, packed=packed)
    with pytest.raises(FileFormatError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "trailer", "checksum", "bits", "tail"])
def test_corrupt_gzip(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(header(0x08, 1000) + np.random.default_rng(0).bytes(1000))
    flipped = bytearray(whole)
    flipped[{"checksum": len(whole) - 8}.get(damage, 10)] ^= 0xFF
    contents = {"truncated": whole[:-300], "trailer": whole[:-4], "tail": whole + b"tail"}.get(damage, bytes(flipped))
    path = tmp_path / "numbers.gz"
    path.write_bytes(contents)
    with pytest.raises(FileFormatError, match="a whole gzip file") as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_lying_header_costs_no_memory(tmp_path: Path, packed: bool) -> None:
    path = written(tmp_path, header(0x08, 2**28) + bytes(100), packed=packed)
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="got 100 bytes"):
            read_idx(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_a_gzip_bomb_is_unpacked_no_further_than_its_header_claims(tmp_path: Path) -> None:
    path = written(tmp_path, header(0x08, 10) + bytes(64 << 20), packed=True)
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="got more"):
            read_idx(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_a_gzip_bomb_that_keeps_its_claim_takes_no_memory_unless_it_may(tmp_path: Path) -> None:
    path = written(tmp_path, header(0x08, 64 << 20) + bytes(64 << 20), packed=True)
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match=r"at most 1000 bytes once unpacked.*most_bytes=67108864"):
            read_idx(path, most_bytes=1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert read_idx(path).shape == (64 << 20,)
    plain = written(tmp_path, header(0x08, 10) + bytes(10), packed=False)
    assert read_idx(plain, most_bytes=0).shape == (10,)  # a plain file takes no more than it has


@pytest.mark.parametrize("most_bytes", [-1, 1.5, "1 GB", None])
def test_a_limit_is_a_number_of_bytes(tmp_path: Path, most_bytes: object) -> None:
    with pytest.raises((DtypeError, ConfigurationError), match="most_bytes"):
        read_idx(tmp_path / "missing", most_bytes=most_bytes)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="a folder or a device"):
        read_idx(tmp_path / "pipe")


@pytest.mark.parametrize(("path", "error"), [(7, DtypeError), (None, DtypeError), ("a\0b", StorageError)])
def test_what_is_no_path(path: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="IDX file"):
        read_idx(path)  # type: ignore[arg-type]


def test_unreadable(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(StorageError, match="a readable file"):
            read_idx(path)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.bool_, np.float16, np.complex64, "U3", object])
def test_unwritable_dtypes(tmp_path: Path, dtype: object) -> None:
    with pytest.raises(DtypeError, match="one of uint8, int8, int16, int32, float32, float64"):
        write_idx(tmp_path / "numbers", np.zeros(3, dtype))
    assert not any(tmp_path.iterdir())


def test_unwritable_shapes(tmp_path: Path) -> None:
    for array in (np.zeros((), np.uint8), np.broadcast_to(np.uint8(0), (2**32, 0))):
        with pytest.raises(ShapeError, match="axes"):
            write_idx(tmp_path / "numbers", array)
    assert not any(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "numbers"
    write_idx(path, np.arange(3, dtype=np.uint8))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_idx(path, np.arange(4, dtype=np.uint8))
    assert [file.name for file in tmp_path.iterdir()] == ["numbers"]
    np.testing.assert_array_equal(read_idx(path), [0, 1, 2])


def test_no_folder_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="that can be written to"):
        write_idx(tmp_path / "missing" / "numbers", np.zeros(3, np.uint8))
