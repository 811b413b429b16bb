"""Hostile files: good ones of each format, changed by structure, with checksums that bear out the changes.

A *base* is a good file.  :func:`hostile_file` changes a base at random: most changes keep the file readable as what
it is, so that what it says is looked at, and not only how it is stored.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import io
import json
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np

import mlpgpu as mg
from mlpgpu.datasets import write_idx

Tree = dict[str, Any]

HOSTILE_JSON: tuple[Callable[[Random], Any], ...] = (
    lambda draw: None,
    lambda draw: draw.choice([True, False]),
    lambda draw: draw.choice([0, -1, 1, 2, 3, 7, 255, 2**31, 2**53, 2**63, 2**70, -(2**70), 10**400]),
    lambda draw: draw.choice([0.0, -0.0, 0.5, -1.5, 1e-320, 1e39, 1e308, -1e308, 1.0000000001]),
    lambda draw: draw.choice(
        ["", "\x00", "a" * 10_000, "ä雪", "../..", "Dense", "relu", "identity", "nan", "1", "__class__"]
    ),
    lambda draw: [],
    lambda draw: {},
    lambda draw: [[]],
    lambda draw: [draw.randrange(5) for _ in range(draw.choice([1, 2, 3, 5000]))],
    lambda draw: {"kind": draw.choice(["Dense", "Dropout", "Standardize", "same", "Adam", "WarmUp", "object", ""])},
    lambda draw: {str(place): place for place in range(draw.choice([1, 1000]))},
    lambda draw: nested(draw.choice([3, 20, 500]), as_list=draw.random() < 0.5),
)


def nested(depth: int, *, as_list: bool) -> Any:
    """Lists or descriptions inside each other."""
    value: Any = 0.1
    for _ in range(depth):
        value = [value] if as_list else {"kind": "WarmUp", "rate": value, "epochs": 1.0, "steps": None}
    return value


def places(tree: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Each place of a JSON value as its container and its key there."""
    found = [] if found is None else found
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        found.append((tree, key))
        places(value, found)
    return found


def change_json(draw: Random, tree: Tree) -> None:
    """Change some places of a JSON value."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        everywhere = places(tree)
        if not everywhere:
            return
        owner, key = draw.choice(everywhere)
        kind = draw.randrange(9)
        if kind < 4:
            owner[key] = draw.choice(HOSTILE_JSON)(draw)
        elif kind == 4:
            del owner[key]
        elif kind == 5:  # what stands elsewhere
            other, place = draw.choice(everywhere)
            with contextlib.suppress(RecursionError):  # of values that an earlier change nested deeply
                owner[key] = copy.deepcopy(other[place])
        elif kind == 6 and isinstance(owner[key], (int, float)):
            owner[key] = owner[key] + draw.choice([1, -1, 0.5, 1e10, -(2**40)])
        elif kind == 7 and isinstance(owner, list):
            copies = draw.choice([1, 2, 50, 2000])
            with contextlib.suppress(RecursionError):
                if copies * len(json.dumps(owner[key])) < 1 << 20:
                    owner[key:key] = [copy.deepcopy(owner[key]) for _ in range(copies)]
        elif isinstance(owner, dict):
            owner[draw.choice(["kind", "", "extra", "layers", "trainable", "\x00"])] = draw.choice(HOSTILE_JSON)(draw)


# --- our own files ---


def change_array(draw: Random, array: np.ndarray) -> np.ndarray:
    """Other numbers, another shape or another type."""
    kind = draw.randrange(7)
    if kind == 0 and array.size and array.dtype.kind == "f":
        array = array.copy()
        array.reshape(-1)[draw.randrange(array.size)] = draw.choice([np.nan, np.inf, -np.inf, 3e38, 1e-45])
    elif kind == 1:
        array = array.astype(draw.choice(["<f4", "<f8", "<i8", "|u1"]))
    elif kind == 2:
        array = array.reshape(-1) if draw.random() < 0.5 else array[np.newaxis]
    elif kind == 3:
        array = np.zeros(draw.choice([(), (0,), (0, 3), (1,), (3, 0, 5), (1, 1, 1, 1, 1, 1, 1)]), array.dtype)
    elif kind == 4:
        array = np.concatenate([array.reshape(-1), array.reshape(-1)[:1]])
    elif kind == 5 and array.ndim == 2:
        array = np.ascontiguousarray(array.T)
    elif array.dtype.kind in "iu" and array.size:
        array = np.full_like(array, draw.choice([0, 255, np.iinfo(array.dtype).max, np.iinfo(array.dtype).min]))
    return array


@functools.cache
def parts_of(image: bytes) -> tuple[bytes, dict[str, np.ndarray]]:
    """The description and the arrays of a good file of ours."""
    with h5py.File(io.BytesIO(image), "r") as file:
        text = file["/mlpgpu/description"][()].tobytes()
        return text, {path: np.asarray(file[path][()]) for path in json.loads(text)["arrays"]}


def hostile_hdf5(draw: Random, image: bytes) -> bytes:
    """A file of ours with its description, its arrays, or how they are stored, changed; its checksums are right."""
    text, arrays = parts_of(image)
    document, arrays = json.loads(text), dict(arrays)
    change_storage: Callable[[h5py.File], None] | None = None
    attributes: dict[str, Any] = {"format_version": np.int64(1)}
    kind = draw.randrange(12)
    if kind < 5:
        change_json(draw, document["content"])
    elif kind < 7:
        for path in draw.sample(sorted(arrays), min(len(arrays), draw.choice([1, 1, 3]))):
            arrays[path] = change_array(draw, arrays[path])
    elif kind == 7:
        if draw.random() < 0.5 or not arrays:
            arrays[draw.choice(["/a", "/layers/x", "/mlpgpu/run/slots/x", "/" + "/".join("abcdefghij")])] = np.zeros(2)
        else:
            del arrays[draw.choice(sorted(arrays))]
    elif kind == 8:
        value = draw.choice([0, 2, -1, 2**62, 1.0, "1", [1], [1, 1], b"x" * 1000])
        attributes[draw.choice(["format_version", "extra"])] = value
    if kind not in (9, 10) or draw.random() < 0.2:
        document["arrays"] = {
            path: {
                "shape": list(a.shape),
                "dtype": a.dtype.newbyteorder("<").str,
                "crc32": zlib.crc32(np.ascontiguousarray(a)),
            }
            for path, a in arrays.items()
        }
    if kind == 9:
        change_json(draw, document["arrays"] if draw.random() < 0.7 else document)
    elif kind >= 10:
        change_storage = draw.choice(STORAGE)(draw, sorted(arrays))
    try:
        text = json.dumps(document, sort_keys=draw.random() < 0.9).encode()
    except (ValueError, TypeError, RecursionError):
        text = b'{"content": ' + b"[" * draw.choice([10, 100_000]) + b"}"
    if draw.random() < 0.03:
        text = draw.choice([text[:-1], text + b"}", b"", b"[]", b"null", b'{"a": NaN}', b"\xff" + text, text * 2])
    return image_of(
        text, arrays, document.get("groups", []) if isinstance(document, dict) else [], attributes, change_storage
    )


def image_of(
    text: bytes, arrays: dict[str, np.ndarray], groups: Any, attributes: dict[str, Any],
    change_storage: Callable[[h5py.File], None] | None,
) -> bytes:  # fmt: skip
    """An HDF5 file of these arrays and this description."""
    image = io.BytesIO()
    with h5py.File(image, "w", libver="earliest") as file:
        for group in groups if isinstance(groups, list) else []:
            if isinstance(group, str) and group.startswith("/"):
                attempt(lambda group=group: file.require_group(group))
        for path, array in arrays.items():
            attempt(lambda path=path, array=array: file.create_dataset(path, data=array, track_times=False))
        file.require_group("/mlpgpu").create_dataset(
            "description", data=np.frombuffer(text, np.uint8), track_times=False
        )
        attempt(lambda: file["/mlpgpu"].attrs.create("crc32", zlib.crc32(text), dtype="<i8"))
        for name, value in attributes.items():
            attempt(lambda name=name, value=value: file["/mlpgpu"].attrs.__setitem__(name, value))
        if change_storage is not None:
            attempt(lambda: change_storage(file))
    return image.getvalue()


def attempt(call: Callable[[], object]) -> None:
    """What HDF5 refuses to write stays as it was."""
    with contextlib.suppress(ValueError, TypeError, OSError, RuntimeError, KeyError, OverflowError):
        call()


def again(**options: Any) -> Callable[[Random, list[str]], Callable[[h5py.File], None]]:
    """An array stored in another way."""

    def choose(draw: Random, paths: list[str]) -> Callable[[h5py.File], None]:
        path = draw.choice([*paths, "/mlpgpu/description"])

        def change(file: h5py.File) -> None:
            data = file[path][()]
            del file[path]
            file.create_dataset(path, data=data, **options)

        return change

    return choose


def instead(
    make: Callable[[h5py.File, str, Random], object],
) -> Callable[[Random, list[str]], Callable[[h5py.File], None]]:
    """Something else in place of an array, or in a new place."""

    def choose(draw: Random, paths: list[str]) -> Callable[[h5py.File], None]:
        path = draw.choice([*paths, *paths, "/mlpgpu/description", "/new", "/layers/new", "/mlpgpu/new"])

        def change(file: h5py.File) -> None:
            if path in file:
                del file[path]
            make(file, path, draw)

        return change

    return choose


def _virtual(file: h5py.File, path: str, draw: Random) -> None:
    layout = h5py.VirtualLayout(shape=(4,), dtype="<f4")
    layout[:] = h5py.VirtualSource(draw.choice([".", "/etc/passwd", "other.h5"]), "/layers", shape=(4,))
    file.create_virtual_dataset(path, layout)


def _sparse(file: h5py.File, path: str, draw: Random) -> None:
    file.create_dataset(path, shape=(draw.choice([1 << 20, 1 << 34, 1 << 40]),), dtype=draw.choice(["<f4", "|u1"]))


def _chunk_bomb(file: h5py.File, path: str, draw: Random) -> None:
    shape = (1 << draw.choice([20, 34, 44]),)
    file.create_dataset(path, shape=shape, dtype="<f4", chunks=(1 << 16,), compression="gzip", fillvalue=1.0)


def _external(file: h5py.File, path: str, draw: Random) -> None:
    file.create_dataset(path, shape=(4,), dtype="|u1", external=[("/etc/passwd", 0, 4)])


def _deep(file: h5py.File, path: str, draw: Random) -> None:
    group = file
    for _ in range(draw.choice([3, 40, 300])):
        group = group.require_group("g")
    group["x"] = np.zeros(2)


def _many(file: h5py.File, path: str, draw: Random) -> None:
    for number in range(draw.choice([3, 600])):
        file.require_group("/many").require_group(str(number))


def _alias(file: h5py.File, path: str, draw: Random) -> None:
    everything: list[str] = []
    file.visit(everything.append)
    file[path] = file[draw.choice(everything)]


def _cycle(file: h5py.File, path: str, draw: Random) -> None:
    file[path] = file[draw.choice(["/", "/mlpgpu"])]


def _attributes(file: h5py.File, path: str, draw: Random) -> None:
    for owner in (file, file["/mlpgpu"]):
        owner.attrs["x"] = draw.choice([np.zeros(5000), "text", [b"a", b"b"], h5py.Empty("<f4")])
    for name in ("crc32", "format_version"):
        if draw.random() < 0.5:
            del file["/mlpgpu"].attrs[name]
            value = draw.choice([h5py.Empty("<i8"), np.zeros((1,), "<i8"), "5", np.int32(5), np.uint64(5), 5.0])
            file["/mlpgpu"].attrs[name] = value


COMPOUND = np.dtype([("a", "<f4"), ("b", "<i8")])
STORAGE: tuple[Callable[[Random, list[str]], Callable[[h5py.File], None]], ...] = (
    again(chunks=True),
    again(chunks=True, compression="gzip"),
    again(chunks=True, shuffle=True),
    again(chunks=True, fletcher32=True),
    again(dtype=">f4"),
    again(dtype="<f2"),
    again(dtype="<c8"),
    again(dtype="<i4"),
    again(maxshape=None, chunks=True, fillvalue=3),
    again(track_times=True),
    instead(lambda file, path, draw: file.create_dataset(path, data=np.zeros(3, COMPOUND))),
    instead(lambda file, path, draw: file.create_dataset(path, data=["text", "x"])),
    instead(lambda file, path, draw: file.create_dataset(path, data=np.array([b"ab", b"c"]))),
    instead(lambda file, path, draw: file.create_dataset(path, shape=(2,), dtype=h5py.vlen_dtype(np.int32))),
    instead(lambda file, path, draw: file.create_dataset(path, shape=(2,), dtype=h5py.ref_dtype)),
    instead(lambda file, path, draw: file.create_dataset(path, data=np.zeros(2, bool))),
    instead(lambda file, path, draw: file.create_dataset(path, shape=(2,), dtype=h5py.enum_dtype({"A": 1}, "i"))),
    instead(lambda file, path, draw: file.create_dataset(path, shape=(2,), dtype=np.dtype(("<f4", (3,))))),
    instead(lambda file, path, draw: file.create_dataset(path, data=h5py.Empty("<f4"))),
    instead(lambda file, path, draw: file.create_dataset(path, data=np.float32(1))),
    instead(lambda file, path, draw: file.create_group(path)),
    instead(lambda file, path, draw: file.__setitem__(path, h5py.SoftLink(draw.choice(["/mlpgpu", "/gone", path])))),
    instead(
        lambda file, path, draw: file.__setitem__(path, h5py.ExternalLink(draw.choice(["/etc/passwd", "no"]), "/"))
    ),
    instead(lambda file, path, draw: file.__setitem__(path, np.dtype("<f4"))),
    instead(_virtual),
    instead(_sparse),
    instead(_chunk_bomb),
    instead(_external),
    instead(_deep),
    instead(_many),
    instead(_alias),
    instead(_cycle),
    instead(_attributes),
)


# --- files of others ---


def hostile_idx(draw: Random, image: bytes) -> bytes:
    """An IDX file whose header says something else, perhaps compressed."""
    axes = image[3]
    lengths, numbers = list(struct.unpack(f">{axes}I", image[4 : 4 + 4 * axes])), image[4 + 4 * axes :]
    code, count = image[2], axes
    for _ in range(draw.choice([1, 1, 2])):
        kind = draw.randrange(6)
        if kind == 0:
            code = draw.choice([0, 8, 9, 10, 11, 12, 13, 14, 255])
        elif kind == 1:
            count = draw.choice([0, 1, 2, 3, 64, 65, 255])
        elif kind == 2:
            lengths[draw.randrange(axes)] = draw.choice([0, 1, 2, 2**31, 2**32 - 1])
        elif kind == 3:
            lengths = [draw.choice([0, 1, 2, 3, 2**16, 2**32 - 1]) for _ in range(draw.randrange(70))] or [1]
            axes = count = len(lengths)
        elif kind == 4:
            numbers = numbers[: draw.randrange(len(numbers) + 1)]
        else:
            numbers += bytes(draw.randrange(5))
    made = (
        bytes([draw.choice([0, 0, 0, 1]), 0, code, count & 255]) + struct.pack(f">{len(lengths)}I", *lengths) + numbers
    )
    if draw.random() < 0.5:
        return made
    packed = gzip.compress(made, mtime=0)
    kind = draw.randrange(6)
    if kind == 0:
        return damaged(draw, packed)
    if kind == 1:
        return packed + draw.choice([b"\0" * 7, b"x", packed])
    if kind == 2:  # what unpacks to much more than the header says, and to as much
        lengths = [draw.choice([1, 1 << 24, 1 << 31]), 28, 28]
        return gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", *lengths) + bytes(4 << 20), mtime=0)
    return packed


def hostile_npy(draw: Random, image: bytes) -> bytes:
    """An ``.npy`` file with another header."""
    length = struct.unpack("<H", image[8:10])[0]
    header, numbers = image[10 : 10 + length].decode("latin1"), image[10 + length :]
    version = draw.choice([(1, 0), (1, 0), (2, 0), (3, 0), (9, 9)])
    for _ in range(draw.choice([1, 2])):
        shape = draw.choice(
            ["()", "(0,)", "(-1,)", "(2**40,)", "(1099511627776,)", "(3, 1000000000000)", "[3]", "(True,)", "None"]
        )
        descr = draw.choice(
            ["'|O'", "'<f4'", "'<U1000000'", "'V0'", "'|S0'", "[('a', '<f4')]", "'<M8[ns]'", "'x'", "3", "'<f16'"]
        )
        change = draw.randrange(5)
        if change == 0:
            header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        elif change == 1:
            header = f"{{'descr': {descr}, 'fortran_order': {draw.choice(['True', '1', 'x'])}, 'shape': (3, 2), }}"
        elif change == 2:
            header = draw.choice(
                ["", "{}", "__import__('os').abort()", "(" * 3000, "{'descr': '<f4'}", "[" * 200 + "]" * 200]
            )
        elif change == 3:
            numbers = numbers[: draw.randrange(len(numbers) + 1)]
        else:
            header = header.replace(draw.choice(["False", "shape", "<", "("]), draw.choice(["True", "x", ">", "(("]))
    encoded = header.encode("latin1") + b"\n"
    size = struct.pack(
        "<H" if version[0] == 1 else "<I", draw.choice([len(encoded), len(encoded), len(encoded) + 5, 3])
    )
    return b"\x93NUMPY" + bytes(version) + size + encoded + numbers


def hostile_zip(draw: Random, image: bytes) -> bytes:
    """An archive with members that are hostile, missing, many, compressed or of other names."""
    with zipfile.ZipFile(io.BytesIO(image)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(sorted(members))
    kind = draw.randrange(7)
    if kind < 3:
        members[name] = change_member(draw, name, members[name])
    elif kind == 3:
        members[draw.choice(["../../x.npy", "y.npy", "/abs", "x", "a" * 500, "", "weight.npy"])] = members.pop(name)
    elif kind == 4:
        members[name] = bytes(draw.choice([1 << 16, 8 << 20]))
    elif kind == 5:
        members |= {f"extra{number}": b"x" for number in range(draw.choice([1, 300]))}
    else:
        members[name] = damaged(draw, members[name])
    made = io.BytesIO()
    with zipfile.ZipFile(
        made, "w", draw.choice([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED] * 4 + [zipfile.ZIP_LZMA])
    ) as archive:
        for each, data in members.items():
            archive.writestr(each or "empty", data)
        if draw.random() < 0.05:
            with_duplicate = draw.choice(sorted(members))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                archive.writestr(with_duplicate or "empty", b"again")
    return damaged(draw, made.getvalue()) if draw.random() < 0.1 else made.getvalue()


def change_member(draw: Random, name: str, data: bytes) -> bytes:
    if name.endswith(".npy"):
        return hostile_npy(draw, data)
    if name.endswith(".json"):
        tree = json.loads(data)
        change_json(draw, tree)
        return json.dumps(tree).encode()
    if name.endswith(".h5"):
        return hostile_foreign_hdf5(draw, data)
    return damaged(draw, data)


def hostile_foreign_hdf5(draw: Random, image: bytes) -> bytes:
    """Another program's HDF5 file, its arrays, attributes or the way they are stored changed."""
    copied = io.BytesIO(image)
    with h5py.File(copied, "r+") as file:
        everything: list[str] = []
        file.visit(everything.append)
        arrays = [f"/{name}" for name in everything if isinstance(file[name], h5py.Dataset)]
        owners = [file, *(file[name] for name in everything)]
        owner = draw.choice([each for each in owners if each.attrs] or [file])
        kind = draw.randrange(4)
        if kind == 0 and arrays:
            path = draw.choice(arrays)
            data = change_array(draw, np.asarray(file[path][()]))
            attempt(lambda: (file.__delitem__(path), file.create_dataset(path, data=data)))
        elif kind == 1 and arrays:
            attempt(lambda: draw.choice(STORAGE[:-1])(draw, arrays)(file))
        elif owner.attrs:
            name = draw.choice(sorted(owner.attrs))
            value = owner.attrs[name]
            text = value.decode() if isinstance(value, bytes) else value
            changed: Any = draw.choice([1, "x", b"\xff", [b"a"], np.zeros(3), "{}", "[" * 5000])
            if isinstance(text, str) and text.startswith("{"):
                tree = json.loads(text)
                change_json(draw, tree)
                changed = json.dumps(tree)
            attempt(
                lambda: owner.attrs.__setitem__(name, changed) if draw.random() < 0.8 else owner.attrs.__delitem__(name)
            )
    return copied.getvalue()


def hostile_safetensors(draw: Random, image: bytes) -> bytes:
    """A safetensors file with another header, whose length is right."""
    length = int.from_bytes(image[:8], "little")
    header, data = json.loads(image[8 : 8 + length]), image[8 + length :]
    if draw.random() < 0.4 and "mlpgpu" in header.get("__metadata__", {}):
        described = json.loads(header["__metadata__"]["mlpgpu"])
        change_json(draw, described)
        header["__metadata__"]["mlpgpu"] = json.dumps(described)
    else:
        change_json(draw, header)
    encoded = json.dumps(header).encode()
    if draw.random() < 0.1:
        encoded = draw.choice([b"{", b"", b"[" * 1000, encoded + b" " * 7, b"{}"])
    size = draw.choice([len(encoded)] * 8 + [0, 2**40, 2**63])
    return size.to_bytes(8, "little") + encoded + (data if draw.random() < 0.9 else data[: len(data) // 2])


def damaged(draw: Random, image: bytes) -> bytes:
    """Bytes changed, cut off, left out, doubled or zeroed, whatever they are."""
    data = bytearray(image)
    for _ in range(draw.choice([1, 1, 2, 8])):
        if not data:
            break
        place, kind = draw.randrange(len(data)), draw.randrange(6)
        if kind < 3:
            data[place] = draw.choice([0, 255, data[place] ^ (1 << draw.randrange(8)), draw.randrange(256)])
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            data[place : place + draw.choice([1, 8, 64])] = bytes(draw.choice([0, 1, 8]))
        else:
            data[place:place] = data[place : place + draw.choice([1, 8, 512])]
    return bytes(data)


# --- bases ---


@dataclass(frozen=True)
class Base:
    """A good file: its bytes, how it is changed, and how its name ends, which says what reads it."""

    image: bytes
    change: Callable[[Random, bytes], bytes]
    suffix: str


def bases() -> dict[str, Base]:
    """Good files of all formats, by name; of other programs' only what the packages that are installed can write."""
    draw = np.random.default_rng(5)
    x, labels = draw.normal(size=(24, 6)), draw.integers(0, 3, 24)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        found: dict[str, Base] = {}
        for name, trainer in _trainers(x, labels).items():
            trainer.network.save(at / "network.h5")
            trainer.save(at / "run.h5")
            found[f"network {name}"] = Base((at / "network.h5").read_bytes(), hostile_hdf5, ".h5")
            found[f"run {name}"] = Base((at / "run.h5").read_bytes(), hostile_hdf5, ".run.h5")
        write_idx(at / "x.idx", np.arange(60, dtype=np.uint8).reshape(5, 3, 4))
        found["idx"] = Base((at / "x.idx").read_bytes(), hostile_idx, ".idx")
        np.save(at / "x.npy", x[:3, :2].astype(np.float32))
        found["npy"] = Base((at / "x.npy").read_bytes(), hostile_npy, ".npy")
        np.savez(at / "x.npz", x=x.astype(np.float32), y=labels, weight=np.ones(24))
        found["npz"] = Base((at / "x.npz").read_bytes(), hostile_zip, ".npz")
        network = mg.Network([mg.Dense(6, 5, "relu"), mg.Dense(5, 3)], seed=1)
        for suffix, change in ((".safetensors", hostile_safetensors), (".keras", hostile_zip)):
            try:
                network.export(at / f"x{suffix}")
            except (mg.MlpgpuError, ImportError):
                continue
            found[suffix[1:]] = Base((at / f"x{suffix}").read_bytes(), change, suffix)
        network.save(at / "x.weights.h5")
        found["weights alone"] = Base((at / "x.weights.h5").read_bytes(), hostile_foreign_hdf5, ".foreign.h5")
    return found


def _trainers(x: np.ndarray, labels: np.ndarray) -> dict[str, mg.Trainer]:
    """Trainers whose files have something of everything."""
    values = np.stack([x[:, 0] * 3.0 + 1.0, x[:, 1]], axis=1)
    shared = mg.Dense(6, 6, "tanh")
    described: dict[str, tuple[list[Any], Any, Any, np.ndarray, dict[str, Any]]] = {
        "a": ([mg.Dense(6, 4, "relu"), mg.Dropout(0.2), mg.Dense(4, 3)], "softmax_cross_entropy", mg.Adam(0.01), labels,
              {"class_weight": {0: 2.0, 2: 0.5}, "metrics": ["accuracy"]}),
        "b": ([mg.Standardize(6), mg.Dense(6, 4), mg.Dense(4, 2), mg.Standardize(2)], mg.Huber(delta=2.0),
              mg.Momentum(mg.WarmUp(mg.StepDecay(0.02, 0.5, epochs=2), steps=5), l2=0.01), values, {}),
        "c": ([shared, shared, mg.LocallyConnected(6, 3, "relu", trainable=False), mg.Dense(4, 3)],
              "softmax_cross_entropy", mg.RMSprop(mg.ReduceOnPlateau(0.01, monitor="loss")), labels,
              {"precision": "float64", "streams": 2, "class_weight": "balanced"}),
    }  # fmt: skip
    found = {}
    for name, (layers, loss, optimizer, y, options) in described.items():
        trainer = mg.Trainer(mg.Network(layers, seed=2), loss, optimizer, batch_size=8, backend="cpu", **options)
        callbacks = [mg.EarlyStopping(patience=1)] if name != "c" else []
        trainer.fit((x, y), 3, validation=0.25, callbacks=callbacks, progress=False)
        found[name] = trainer
    return found


def hostile_file(draw: Random, base: Base) -> bytes:
    """A hostile file made of a good one: most by structure, some by bytes."""
    return damaged(draw, base.image) if draw.random() < 0.15 else base.change(draw, base.image)
