"""Files of other programs, damaged by structure and by bytes: each is refused by an error of ours, or is a network.

    python tests/fuzz/foreign_files.py --files 5000 [--seed 7] [--kind keras]

Structure comes first: configurations with values of other kinds, tensors of other shapes, names that are missing or
twice there, in containers whose own checksums are right.  What is read must predict, and be saved and read back with
the same bits.  Counted is what became of each file; what went wrong is told of by its number, and is the same again for
the same seed.
"""

from __future__ import annotations

import argparse
import copy
import io
import itertools
import json
import random
import secrets
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from safetensors.numpy import save

import mlpgpu as mg
from mlpgpu.errors import MlpgpuError

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**70, 0.5, -1e308, "", "relu", "Lambda", "../x", "x" * 5000),
    *([], {}, [None], [[1, 2], [3]], {"class_name": "Dense", "config": {}}, {"kind": "same", "place": 0}),
    json.loads("[" * 200 + "]" * 200),
)
WIDTHS = (5, 6, 4, 3)
PARTS = ("document", "tensors", "bytes")


class Damage:
    """Changes that a seed draws; ``part`` is what is changed, so that other parts of the same file stay whole."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.part = self.random.choice(PARTS)

    def document(self, whole: Any) -> Any:
        """A copy of JSON data with values replaced, removed, or doubled."""
        changed = copy.deepcopy(whole)
        for _ in range(self.random.choice((1, 1, 2, 5)) if self.part == "document" else 0):
            places = list(_places(changed))
            if not places:
                return self.random.choice(HOSTILE)
            parent, key = self.random.choice(places)
            action = self.random.random()
            if action < 0.2:
                del parent[key]
            elif action < 0.3 and isinstance(parent, list):
                parent[:] = parent * self.random.choice((2, 2, 400))
            else:
                parent[key] = copy.deepcopy(self.random.choice(HOSTILE))
        return changed

    def tensors(self, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Tensors of other shapes, types and names."""
        changed = dict(whole)
        for _ in range(self.random.choice((1, 1, 2, 4)) if self.part == "tensors" else 0):
            if not changed:
                break
            name = self.random.choice(sorted(changed))
            array = np.atleast_1d(changed[name])
            actions: dict[str, Callable[[], Any]] = {
                "transposed": lambda array=array: array.T,
                "one more axis": lambda array=array: array[np.newaxis],
                "flat": lambda array=array: array.ravel(),
                "empty": lambda array=array: array[:0],
                "scalar": lambda: np.float32(2.0),
                "halved": lambda array=array: array[: max(1, len(array) // 2)] if array.ndim else array,
                "integers": lambda array=array: array.astype("int64"),
                "double": lambda array=array: array.astype("float64"),
                "half": lambda array=array: array.astype("float16"),
                "bytes": lambda array=array: array.astype("uint8"),
                "NaN": lambda array=array: np.full_like(array, np.nan),
                "huge": lambda array=array: np.full_like(array, 3e38),
                "negative": lambda array=array: -np.abs(array) - 1,
            }
            action = self.random.choice([*actions, "gone", "renamed", "twice"])
            if action in actions:
                with np.errstate(all="ignore"):
                    changed[name] = np.array(actions[action](), order="C")
                continue
            if action != "twice":
                del changed[name]
            if action != "gone":
                changed[self.random.choice((f"{name}9", "dense_7", "a/b", "x.weight", "0.mean"))] = array
        return changed

    def bytes(self, whole: bytes) -> bytes:
        """Some bytes replaced, or the end gone."""
        if self.part != "bytes":
            return whole
        data = bytearray(whole)
        for _ in range(self.random.choice((1, 1, 3, 20))):
            data[self.random.randrange(len(data))] = self.random.randrange(256)
        return bytes(data[: self.random.randrange(len(data))] if self.random.random() < 0.1 else data)


def _places(data: Any) -> Any:
    """Each place in JSON data that has a value: what holds it, and its key there."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(entries):
        yield data, key
        if not isinstance(value, list) or len(value) < 50:
            yield from _places(value)


def network() -> mg.Network:
    layers = [mg.Standardize(5), *(mg.Dense(n, m, "relu") for n, m in itertools.pairwise(WIDTHS))]
    net = mg.Network([*layers, mg.Dropout(0.2)], seed=1)
    net.adapt(np.random.default_rng(1).standard_normal((20, 5)))
    return net


def ours_as_safetensors(damage: Damage, net: mg.Network, path: Path) -> None:
    net.export(path.with_suffix(".safetensors"))
    data = path.with_suffix(".safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    described = json.loads(header["__metadata__"]["mlpgpu"])
    values = {name: np.float32(v).T if v.ndim == 2 else np.asarray(v) for name, v in net.saved().named().items()}
    # The names of the file: statistics, then a module for each layer and each function after it.
    names = {"0.mean": "0.mean", "0.scale": "0.scale"}
    for place in (1, 2, 3):
        names |= {f"{place}.{part}": f"{2 * place - 1}.{part}" for part in ("weight", "bias")}
    tensors = {names[name]: np.array(v, order="C") for name, v in values.items()}
    text = json.dumps(damage.document(described))
    path.write_bytes(damage.bytes(save(damage.tensors(tensors), {"mlpgpu": text})))


def others_as_safetensors(damage: Damage, net: mg.Network, path: Path) -> None:
    found = {n: np.array(v.T, order="C") for n, v in net.parameters.items()}
    path.write_bytes(damage.bytes(save(damage.tensors(found))))


def archive(damage: Damage, net: mg.Network, path: Path) -> None:
    """As Keras saves what it loaded of us."""
    net.export(path.with_suffix(".keras"))
    with zipfile.ZipFile(path.with_suffix(".keras")) as file:
        document, weights = json.loads(file.read("config.json")), io.BytesIO(file.read("model.weights.h5"))
    with h5py.File(weights, "r+") as file:
        if damage.random.random() < 0.9:
            del file["mlpgpu"]
        _damage_layers(damage, file)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("config.json", json.dumps(damage.document(document)))
        file.writestr("model.weights.h5", damage.bytes(weights.getvalue()))


def weights_alone(damage: Damage, net: mg.Network, path: Path) -> None:
    net.save(path)
    with h5py.File(path, "r+") as file:
        del file["mlpgpu"]
        _damage_layers(damage, file)
    path.write_bytes(damage.bytes(path.read_bytes()))


def _damage_layers(damage: Damage, file: h5py.File) -> None:
    """Replace the arrays of a file's layers by what becomes of them."""
    paths: dict[str, np.ndarray] = {}
    file["layers"].visititems(lambda name, item: paths.update({name: item[()]} if hasattr(item, "shape") else {}))
    if damage.part != "tensors":
        return
    del file["layers"]
    for name, array in damage.tensors(paths).items():
        if f"layers/{name}" not in file:
            file[f"layers/{name}"] = array


def legacy(damage: Damage, net: mg.Network, path: Path) -> None:
    """As Keras 2 saves a whole model."""
    layers: list[dict[str, Any]] = []
    with h5py.File(path, "w") as file:
        group = file.create_group("model_weights")
        for place in (1, 2, 3):
            config = {"name": f"d{place}", "units": WIDTHS[place], "activation": "relu", "use_bias": True}
            layers.append({"class_name": "Dense", "config": config})
            arrays = {f"d{place}/{part}:0": net.parameters[f"{place}.{part}"] for part in ("weight", "bias")}
            found = damage.tensors(arrays)
            layer = group.create_group(f"d{place}")
            layer.attrs["weight_names"] = damage.document([name.encode() for name in arrays])[:9]
            for name, array in found.items():
                layer[name] = array
        names = damage.document([f"d{place}" for place in (1, 2, 3)])
        file.attrs["model_config"] = json.dumps(
            damage.document({"class_name": "Sequential", "config": {"name": "s", "layers": layers}})
        )
        group.attrs["layer_names"] = [str(name).encode() for name in names][:9] if isinstance(names, list) else []
    path.write_bytes(damage.bytes(path.read_bytes()))


KINDS: dict[str, tuple[Callable[[Damage, mg.Network, Path], None], dict[str, str]]] = {
    "ours": (ours_as_safetensors, {}),
    "safetensors": (others_as_safetensors, {"activation": "relu"}),
    "keras": (archive, {}),
    "weights": (weights_alone, {"activation": "relu", "output": "softmax"}),
    "legacy": (legacy, {}),
}


def judge(kind: str, seed: str, net: mg.Network, folder: Path) -> str:
    """What became of one file: ``"refused"`` or ``"read"``, or else what is wrong."""
    make, hints = KINDS[kind]
    path, damage = folder / "file", Damage(seed)
    try:
        make(damage, net, path)
    except Exception:  # no container takes this damage
        return "not made"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = mg.load(path, **hints)
            x = np.random.default_rng(2).standard_normal((4, found.n_in)).astype("float32")
            x = x if found.scale is None else np.arange(4 * found.n_in, dtype="uint8").reshape(4, found.n_in)
            predicted = found.predict(x)
            found.save(folder / "again.h5")
            if mg.load(folder / "again.h5").predict(x).tobytes() != predicted.tobytes():
                return "other bits"
        return "read"
    except MlpgpuError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def attack(seed: int, files: int, folder: Path, only: str | None = None) -> tuple[Counter[str], list[tuple[str, str]]]:
    """How often each came of it, and the seeds of files of which something wrong came, with that."""
    net = network()
    counts: Counter[str] = Counter()
    wrong: list[tuple[str, str]] = []
    kinds = [only] if only else list(KINDS)
    for number in range(files):
        kind = kinds[number % len(kinds)]
        outcome = judge(kind, f"{seed} {kind} {number}", net, folder)
        known = outcome in ("read", "refused", "not made")
        counts[outcome if known else "wrong"] += 1
        if not known:
            wrong.append((f"{seed} {kind} {number}", outcome))
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kind", choices=KINDS, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = attack(seed, options.files, Path(folder), options.kind)
    for which, outcome in wrong[:20]:
        print(f"{which}: {outcome}")
    print(f"seed {seed}: {options.files} files: {', '.join(f'{n} {name}' for name, n in counts.most_common())}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
