"""The HDF5 container: exact round trips, replacement as a whole, and every kind of bad file."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mlpgpu import storage
from mlpgpu.errors import ConfigurationError, DtypeError, FileFormatError, StorageError
from mlpgpu.storage import Contents, container, read, write

KERNEL = "/layers/dense/vars/0"


def contents() -> Contents:
    random_ = np.random.default_rng(3)
    arrays = {
        KERNEL: random_.standard_normal((3, 2)).astype("<f4"),
        "/layers/dense/vars/1": np.array([np.nan, -0.0], "<f4"),
        "/mlpgpu/slots/velocity": random_.standard_normal(8),
        "/mlpgpu/order": np.array([2**63 - 1, -(2**63)]),
        "/mlpgpu/mask": np.array([0, 255], np.uint8),
        "/mlpgpu/step": np.array(7),
        "/mlpgpu/empty": np.zeros((0, 4)),
    }
    description = {"rate": 0.1 + 0.2, "tiny": 5e-324, "names": ["ä", "雪", ""], "none": None, "nested": {"yes": True}}
    return Contents(description, arrays, ("/layers/dropout/vars",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file in a folder of its own."""
    path = tmp_path / "net.h5"
    write(path, contents())
    return path


def assert_same(got: Contents, expected: Contents) -> None:
    assert got.description == expected.description
    assert got.groups == expected.groups
    assert list(got.arrays) == sorted(expected.arrays)
    for name, array in expected.arrays.items():
        assert got.arrays[name].dtype == array.dtype
        assert got.arrays[name].shape == array.shape
        assert got.arrays[name].tobytes() == array.tobytes()


def test_round_trip_keeps_every_bit(path: Path) -> None:
    assert_same(read(path), contents())
    assert_same(read(str(path)), contents())
    assert os.listdir(path.parent) == [path.name]


def test_same_contents_give_the_same_bytes(path: Path) -> None:
    first = path.read_bytes()
    time.sleep(1.1 - time.time() % 1)  # HDF5's time stamps count seconds
    shuffled = contents()
    write(path, Contents(shuffled.description, dict(reversed(shuffled.arrays.items())), shuffled.groups))
    assert path.read_bytes() == first


def test_byte_order_and_strides_do_not_matter(path: Path) -> None:
    array = np.arange(12, dtype=">f4").reshape(3, 4).T
    write(path, Contents({}, {"/a": array}))
    got = read(path).arrays["/a"]
    assert got.dtype == np.dtype("<f4") and got.flags.c_contiguous
    np.testing.assert_array_equal(got, array)


def test_empty_contents(path: Path) -> None:
    write(path, Contents({}))
    assert_same(read(path), Contents({}))


def test_layout_is_what_the_documentation_says(path: Path) -> None:
    with h5py.File(path) as file:
        assert sorted(file) == ["layers", "mlpgpu"] and not file.attrs
        assert dict(file["mlpgpu"].attrs).keys() == {"format_version", "crc32"}
        text = file["mlpgpu/description"][()].tobytes()
        assert file["mlpgpu"].attrs["crc32"] == zlib.crc32(text)
        document = json.loads(text)
        assert list(document) == ["arrays", "content", "groups"]
        expected = {"shape": [3, 2], "dtype": "<f4", "crc32": zlib.crc32(file[KERNEL][()])}
        assert document["arrays"][KERNEL] == expected


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (Contents({}, {"a": np.zeros(2)}), ConfigurationError, "'a', which is no absolute path"),
        (Contents({}, {"/a/../b": np.zeros(2)}), ConfigurationError, "no absolute path"),
        (Contents({}, {"/a//b": np.zeros(2)}), ConfigurationError, "no absolute path"),
        (Contents({}, {}, ("/a/b/c/d/e/f/g/h/i",)), ConfigurationError, "no absolute path"),
        (Contents({}, {3: np.zeros(2)}), ConfigurationError, "no absolute path"),  # type: ignore[dict-item]
        (Contents({}, {"/a": np.zeros(2), "/a/b": np.zeros(2)}), ConfigurationError, "'/a' as an array and as a group"),
        (Contents({}, {"/a": np.zeros(2)}, ("/a",)), ConfigurationError, "'/a' as an array and as a group"),
        (Contents({}, {"/mlpgpu": np.zeros(2)}), ConfigurationError, "'/mlpgpu' as an array and as a group"),
        (Contents({}, {}, ("/mlpgpu/description",)), ConfigurationError, "as an array and as a group"),
        (Contents({}, {"/mlpgpu/description": np.zeros(2)}), ConfigurationError, "the description's own"),
        (Contents({}, {"/a": [1.0]}), DtypeError, "expected a NumPy array, got list"),  # type: ignore[dict-item]
        (Contents({}, {"/a": np.zeros(2, np.float16)}), DtypeError, "got float16"),
        (Contents({}, {"/a": np.zeros(2, bool)}), DtypeError, "got bool"),
        (Contents({}, {"/a": np.array([None])}), DtypeError, "got object"),
        (Contents([]), DtypeError, "expected a dict, got list"),  # type: ignore[arg-type]
        (Contents({"a": float("nan")}), ConfigurationError, "plain JSON data"),
        (Contents({"a": np.float32(1)}), ConfigurationError, "plain JSON data"),
        (Contents({"a": "\ud800"}), ConfigurationError, "plain JSON data"),
        (Contents({"a": (1, 2)}), ConfigurationError, "a tuple"),
        (Contents({1: 2}), ConfigurationError, "a key that is no string"),  # type: ignore[dict-item]
    ],
)
def test_bad_contents_are_refused_before_anything_is_written(
    path: Path, bad: Contents, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write(path, bad)
    assert_same(read(path), contents())


def test_too_long_a_description_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.container, "MOST_DESCRIPTION_BYTES", 100)
    with pytest.raises(ConfigurationError, match="at most 100 bytes of JSON"):
        write(path, contents())
    with pytest.raises(FileFormatError, match="at most 100 bytes"):
        read(path)


@pytest.mark.parametrize("function", [read, lambda path: write(path, Contents({}))])
@pytest.mark.parametrize("bad", [3, None, b"net.h5"])
def test_path_must_be_a_path(function: Callable[[Any], object], bad: object) -> None:
    with pytest.raises(DtypeError, match="a string or a path"):
        function(bad)


# The file system refuses


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("missing/net.h5", "No such file"),
        ("net.h5/inside.h5", "Not a directory"),
        (".", "a folder or a device"),
        ("nul\0.h5", "null byte|null character"),
        ("n" * 300, "name too long"),
    ],
)
def test_bad_places(path: Path, place: str, message: str) -> None:
    target = path.parent / place
    with pytest.raises(StorageError, match=message) as caught:
        write(target, Contents({}))
    assert str(target) in str(caught.value)
    with pytest.raises(StorageError, match=message):
        read(target)
    assert os.listdir(path.parent) == [path.name]
    assert_same(read(path), contents())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no pipes")
def test_a_pipe_is_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="a folder or a device"):
        read(tmp_path / "pipe")
    with pytest.raises(StorageError, match="a folder or a device"):
        write(tmp_path / "pipe", Contents({}))
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_refusal_keeps_the_previous_file(path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError, match=os.strerror(code)):
        write(path, Contents({"new": True}))
    assert os.listdir(path.parent) == [path.name]
    assert_same(read(path), contents())


def test_an_interrupt_keeps_the_previous_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path, Contents({"new": True}))
    assert os.listdir(path.parent) == [path.name]
    assert_same(read(path), contents())


@pytest.mark.skipif(sys.platform == "win32", reason="the platform has no limit on a file's size")
def test_a_limit_on_the_size_of_files_keeps_the_previous_file(path: Path) -> None:
    script = """
import resource, signal, sys
import numpy as np
from mlpgpu.errors import StorageError
from mlpgpu.storage import Contents, write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    write(sys.argv[1], Contents({}, {"/a": np.zeros(10_000)}))
except StorageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, path], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert os.strerror(errno.EFBIG) in done.stdout
    assert os.listdir(path.parent) == [path.name]
    assert_same(read(path), contents())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no pipes")
@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe", "file"])
def test_whatever_lies_under_an_expected_name_is_left_alone(path: Path, kind: str) -> None:
    other, trap = path.with_name("other"), path.with_name(f".{path.name}.partial")
    other.write_bytes(b"precious")
    if kind == "symlink":
        trap.symlink_to(other)
    elif kind == "hard link":
        os.link(other, trap)
    elif kind == "pipe":
        os.mkfifo(trap)
    else:
        trap.write_bytes(b"half a file")
    before = os.lstat(trap)
    write(path, Contents({"new": True}))
    assert_same(read(path), Contents({"new": True}))
    assert other.read_bytes() == b"precious"
    assert (os.lstat(trap).st_ino, os.lstat(trap).st_size) == (before.st_ino, before.st_size)
    assert sorted(os.listdir(path.parent)) == sorted([path.name, other.name, trap.name])


@pytest.mark.parametrize("unnamed", [True, False])
def test_two_processes_that_save_to_one_path_leave_a_whole_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    contents = [Contents({"writer": k}, {"/a": np.full(50_000, k, np.int64)}) for k in range(4)]

    def save(own: Contents) -> None:
        for _ in range(20):
            write(path, own)

    threads = [threading.Thread(target=save, args=(own,)) for own in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = read(path)
        if "writer" in found.description:
            assert_same(found, contents[found.description["writer"]])
    for thread in threads:
        thread.join()
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(sys.platform == "win32", reason="the platform has no such permissions")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_new_file_has_the_permissions_of_the_one_before(path: Path, mode: int) -> None:
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    before = path.stat()
    write(path, Contents({"new": True}))
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino


@pytest.mark.skipif(sys.platform == "win32", reason="the platform has no such permissions")
@pytest.mark.parametrize("unnamed", [True, False])
def test_a_first_file_has_the_usual_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool) -> None:
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    write(tmp_path / "new.h5", Contents({}))
    (tmp_path / "usual").touch()
    assert (tmp_path / "new.h5").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_symbolic_link_stays_one(path: Path) -> None:
    link = path.with_name("latest.h5")
    link.symlink_to(path)
    write(link, Contents({"new": True}))
    assert link.is_symlink()
    assert_same(read(path), Contents({"new": True}))


# Files that are not to be trusted


def describe(file: h5py.File, text: bytes) -> None:
    """Put ``text`` in place of the description, with the CRC that belongs to it."""
    del file["mlpgpu/description"]
    file["mlpgpu/description"] = np.frombuffer(text, np.uint8)
    file["mlpgpu"].attrs.create("crc32", zlib.crc32(text), dtype="<i8")


def inventory(**changes: object) -> Callable[[h5py.File], None]:
    """Change what the inventory says of the kernel."""

    def change(file: h5py.File) -> None:
        document = json.loads(file["mlpgpu/description"][()].tobytes())
        document["arrays"][KERNEL].update(changes)
        describe(file, json.dumps(document).encode())

    return change


def document(**changes: object) -> Callable[[h5py.File], None]:
    return lambda file: describe(
        file, json.dumps({**json.loads(file["mlpgpu/description"][()].tobytes()), **changes}).encode()
    )


def instead(make: Callable[[h5py.File], object]) -> Callable[[h5py.File], None]:
    """Put something else in the kernel's place."""

    def change(file: h5py.File) -> None:
        del file[KERNEL]
        make(file)

    return change


def instead_dataset(**arguments: Any) -> Callable[[h5py.File], None]:
    return instead(lambda file: file.create_dataset(KERNEL, **arguments))


def link(place: str, target: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        if place in file:
            del file[place]
        file[place] = target

    return change


def shared_bytes(file: h5py.File) -> None:
    """Many arrays that are one: a small file that would ask for a hundred times its size."""
    big = np.zeros(10_000)
    entry = {"shape": [10_000], "dtype": "<f8", "crc32": zlib.crc32(big)}
    file["a0"] = big
    for number in range(1, 100):
        file[f"a{number}"] = file["a0"]
    known = json.loads(file["mlpgpu/description"][()].tobytes())
    known["arrays"].update({f"/a{number}": entry for number in range(100)})
    describe(file, json.dumps(known).encode())


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((3, 2), "<f4")
    layout[:] = h5py.VirtualSource("other.h5", "a", (3, 2))
    file.create_virtual_dataset(KERNEL, layout)


def cycle(file: h5py.File) -> None:
    file["layers/dense/again"] = file["layers"]


HOSTILE: dict[str, tuple[Callable[[h5py.File], object], str]] = {
    "foreign": (lambda file: file.__delitem__("mlpgpu"), "mlpgpu.load reads some files of other programs"),
    "newer": (lambda file: file["mlpgpu"].attrs.modify("format_version", 2), "got 2 .written by a newer mlpgpu"),
    "version 0": (lambda file: file["mlpgpu"].attrs.modify("format_version", 0), "format version from 1 to 1, got 0"),
    "no version": (lambda file: file["mlpgpu"].attrs.__delitem__("format_version"), "format_version"),
    "text as version": (lambda file: file["mlpgpu"].attrs.create("format_version", "1"), "expected one int64"),
    "list as version": (lambda file: file["mlpgpu"].attrs.create("format_version", [1, 1]), "expected one int64"),
    "no description": (lambda file: file.__delitem__("mlpgpu/description"), "description|name"),
    "array for /mlpgpu": (link("mlpgpu", np.zeros(3)), "/mlpgpu: expected a group"),
    "group for description": (
        lambda file: (file.__delitem__("mlpgpu/description"), file.create_group("mlpgpu/description")),
        "/mlpgpu/description: expected a dataset",
    ),
    "text as description": (link("mlpgpu/description", "{}"), "description: expected numbers of dtype .u1"),
    "null description": (link("mlpgpu/description", h5py.Empty("u1")), "undamaged"),
    "another description": (
        lambda file: file["mlpgpu/description"].write_direct(np.zeros(file["mlpgpu/description"].shape, np.uint8)),
        "bytes that bear out their CRC",
    ),
    "no JSON": (lambda file: describe(file, b"\x80\x04K\x01."), "undamaged"),
    "deep JSON": (lambda file: describe(file, b"[" * 500_000), "RecursionError"),
    "NaN in JSON": (lambda file: describe(file, b'{"content": {"a": NaN}}'), "NaN in JSON"),
    "list as JSON": (lambda file: describe(file, b"[1]"), "undamaged"),
    "list as content": (document(content=[1]), "a dict as content, got list"),
    "number as inventory": (document(arrays=7), "undamaged"),
    "bad path": (document(groups=["/a/../.."]), "no absolute path"),
    "number as path": (document(groups=[7]), "no absolute path"),
    "clash": (document(groups=[KERNEL]), "as an array and as a group"),
    "missing group": (document(groups=["/layers/dropout/vars", "/b"]), "a file without /b"),
    "missing array": (instead(lambda file: None), f"a file without {KERNEL}"),
    "extra array": (link("layers/dense/vars/2", np.zeros(3)), "got '/layers/dense/vars/2'"),
    "extra group": (lambda file: file.create_group("other"), "got '/other'"),
    "array for group": (link("layers/dropout/vars", np.zeros(3)), "expected a group"),
    "group for array": (instead(lambda file: file.create_group(KERNEL)), "expected a dataset"),
    "type for array": (link(KERNEL, np.dtype("<f4")), "expected a dataset"),
    "another shape": (inventory(shape=[2, 3]), r"shape \(2, 3\), got \(3, 2\)"),
    "text as shape": (inventory(shape="ab"), r"got \(3, 2\)"),
    "number as shape": (inventory(shape=6), "undamaged"),
    "another dtype": (inventory(dtype="<f8"), "expected numbers of dtype <f8"),
    "object dtype": (inventory(dtype="|O"), "a dtype of <f4, <f8, <i8, .u1"),
    "list as dtype": (inventory(dtype=["<f4"]), "a dtype of"),
    "another CRC": (inventory(crc32=1), "bear out their CRC"),
    "other numbers": (lambda file: file[KERNEL].__setitem__((0, 0), 1.0), f"{KERNEL}: expected numbers that bear out"),
    "soft link": (link(KERNEL, h5py.SoftLink("/layers/dense/vars/1")), "expected a hard link"),
    "soft link to a group": (link("layers/dropout", h5py.SoftLink("/layers/dense")), "expected a hard link"),
    "dangling link": (link(KERNEL, h5py.SoftLink("/nowhere")), "expected a hard link"),
    "external link": (link(KERNEL, h5py.ExternalLink("/etc/passwd", "/")), "expected a hard link"),
    "link for /mlpgpu": (link("mlpgpu", h5py.ExternalLink("other.h5", "/mlpgpu")), "expected a hard link"),
    "link for description": (link("mlpgpu/description", h5py.SoftLink(KERNEL)), "expected a hard link"),
    "cycle": (cycle, "got '/layers/dense/again'"),
    "cycle of its own name": (instead(lambda file: file.__setitem__(KERNEL, file["/"])), "expected a dataset"),
    "shared bytes": (shared_bytes, "arrays of at most the file's"),
    "text array": (instead_dataset(data="text"), "got another type"),
    "object array": (instead_dataset(shape=(3, 2), dtype=h5py.vlen_dtype(np.float32)), "got another type"),
    "references": (instead_dataset(shape=(3, 2), dtype=h5py.ref_dtype), "got another type"),
    "compound": (instead_dataset(shape=(3, 2), dtype=[("a", "<f4")]), "got another type"),
    "big-endian": (instead_dataset(shape=(3, 2), dtype=">f4"), "got another type"),
    "enumeration": (instead_dataset(shape=(3, 2), dtype=bool), "got another type"),
    "null": (instead_dataset(data=h5py.Empty("<f4")), "got None"),
    "chunked": (instead_dataset(data=np.zeros((3, 2), "<f4"), chunks=(1, 2)), "chunked, compressed"),
    "compressed": (instead_dataset(data=np.zeros((3, 2), "<f4"), compression="gzip"), "chunked, compressed"),
    "external": (instead_dataset(shape=(3, 2), dtype="<f4", external=[("numbers", 0, 24)]), "external storage"),
    "virtual": (instead(virtual), "virtual"),
    "never written": (instead_dataset(shape=(3, 2), dtype="<f4"), "expected 24 bytes, got 0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(path: Path, name: str) -> None:
    change, message = HOSTILE[name]
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(FileFormatError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_huge_claim_allocates_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1 << 20, 1 << 20)
    with h5py.File(path, "r+") as file:
        inventory(shape=list(shape))(file)
        instead_dataset(shape=shape, dtype="<f4")(file)
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("allocated"))
    with pytest.raises(FileFormatError, match=f"expected {1 << 42} bytes, got 0"):
        read(path)


def test_a_sparse_file_takes_no_memory_before_its_checksum_refuses_it(path: Path) -> None:
    count = 64 << 20
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)

    def claim(file: h5py.File) -> None:
        inventory(shape=[count], dtype="|u1", crc32=1)(file)
        del file[KERNEL]
        space = h5py.h5s.create_simple((count,))
        h5py.h5d.create(file.id, KERNEL.encode(), h5py.h5t.NATIVE_UINT8, space, properties)

    with h5py.File(path, "r+") as file:
        claim(file)
    assert path.stat().st_size > count
    assert path.stat().st_blocks * 512 < count // 8
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="bear out their CRC"):
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_too_deep_descriptions_are_neither_written_nor_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(depth: int) -> Contents:
        value: Any = 1
        for place in range(depth):
            value = [value] if place % 2 else {"a": value}
        return Contents({"content": value})

    write(path, nested(container.MOST_NESTING - 2))
    assert_same(read(path), nested(container.MOST_NESTING - 2))
    with pytest.raises(ConfigurationError, match="JSON nested at most 64 deep"):
        write(path, nested(container.MOST_NESTING - 1))
    with monkeypatch.context() as patch:
        patch.setattr(container, "MOST_NESTING", 500)
        write(path, nested(300))
    with pytest.raises(FileFormatError, match="JSON nested at most 64 deep"):
        read(path)


def test_too_many_paths_are_neither_written_nor_read(path: Path) -> None:
    many = tuple(f"/g{number}" for number in range(container.MOST_PATHS))
    with pytest.raises(ConfigurationError, match="more than 16384"):
        write(path, Contents({}, {"/a": np.zeros(1)}, many))
    with h5py.File(path, "r+") as file:
        document(groups=[f"/g{number}" for number in range(container.MOST_PATHS)])(file)
    with pytest.raises(FileFormatError, match="more than 16384"):
        read(path)


def test_a_huge_claim_on_storage_allocates_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = (1 << 40).to_bytes(8, "little")
    with h5py.File(path, "r+") as file:
        inventory(shape=[1 << 38])(file)
        instead_dataset(data=np.zeros(12_345, "<f4"))(file)
    image = path.read_bytes()
    # Both the dataspace and the layout now say 2^38 numbers.
    for old, new in [(12_345, 1 << 38), (4 * 12_345, 1 << 40)]:
        assert old.to_bytes(8, "little") in image
        image = image.replace(old.to_bytes(8, "little"), new.to_bytes(8, "little"))
    assert claim in image
    path.write_bytes(image)
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("allocated"))
    with pytest.raises(FileFormatError):
        read(path)


@pytest.mark.parametrize("data", [b"", b"weights", b"\x89HDF\r\n\x1a\n", b"\x80\x04K\x01.", bytes(4096)])
def test_other_files_are_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match="an undamaged HDF5 file"):
        read(path)


def test_every_truncation_is_noticed(path: Path) -> None:
    image = path.read_bytes()
    for length in random.Random(1).sample(range(len(image)), 200):
        path.write_bytes(image[:length])
        with pytest.raises(FileFormatError):
            read(path)


def test_a_damaged_byte_is_noticed_or_harmless(path: Path) -> None:
    image = path.read_bytes()
    chance = random.Random(2)
    noticed = 0
    for offset in chance.sample(range(len(image)), 600):
        damaged = bytearray(image)
        damaged[offset] ^= chance.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            got = read(path)
        except FileFormatError:
            noticed += 1
        else:
            assert_same(got, contents())
    assert noticed > 60


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::DeprecationWarning:keras")
def test_keras_loads_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    expected = Contents({}, {KERNEL: np.ones((3, 2), "<f4"), "/layers/dense/vars/1": np.full(2, 5, "<f4")})
    write(tmp_path / "net.weights.h5", expected)
    model.load_weights(tmp_path / "net.weights.h5")
    for got, array in zip(model.get_weights(), expected.arrays.values(), strict=True):
        np.testing.assert_array_equal(got, array)
