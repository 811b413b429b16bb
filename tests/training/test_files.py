"""Paths, and files that are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlpgpu.errors import ConfigurationError, DtypeError, StorageError
from mlpgpu.storage.files import check_path, replace_file


@pytest.mark.parametrize(
    ("path", "error"),
    [(None, DtypeError), (7, DtypeError), (b"a.png", DtypeError), ("", ConfigurationError), ("a/..", None)],
)
def test_check_path(path: object, error: type[Exception] | None) -> None:
    if error is None:
        assert check_path("file", path) == Path(str(path))
    else:
        with pytest.raises(error, match=r"^file: expected a"):
            check_path("file", path)


def test_replace_file_leaves_the_old_one_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.csv"
    replace_file("table", path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        replace_file("table", path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
