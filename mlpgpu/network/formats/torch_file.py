"""State dicts in files of ``torch.save``, read by PyTorch's safe loading alone, after a look at what they name."""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FileFormatError, MlpgpuError
from ..saved import SavedNetwork
from .hints import Hints
from .limits import MOST_ARRAYS, MOST_JSON_BYTES, MOST_MEMBERS, check_bytes, missing_package
from .state_dict import network_of_state_dict

PICKLE = "data.pkl"  # of the archive: what it holds, with the numbers in other members
# What a pickle of a state dict names.  PyTorch's safe loading knows more, of which some takes any memory.
STORAGES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {name}Storage" for name in STORAGES),
}
# Operations by which a pickle would name other things, or that no file of torch.save has.
REFUSED = ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "FRAME")
NESTED = ("state_dict", "model_state_dict")  # where checkpoints have a model's values


def is_torch(names: list[str]) -> bool:
    """Whether an archive's members are those of ``torch.save``."""
    return any(name.rpartition("/")[2] == PICKLE for name in names)


def read_torch(path: Path, hints: Hints) -> SavedNetwork:
    """The network in a state dict of Linear layers.

    Raises:
        BackendError: PyTorch is missing.
        FileFormatError: the file is damaged, or has other things than a state dict of Linear layers.
        ConfigurationError: ``hints`` are needed and not given.
    """
    try:
        import torch
    except ImportError as error:
        raise missing_package("load of a file of torch.save", "torch", error) from error

    what = f"file {path}"
    try:
        _check_archive(what, path)
        found = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {name: _array(what, torch, name, tensor) for name, tensor in _state(what, torch, found)}
    except MlpgpuError:
        raise
    except Exception as error:  # archives, pickles and PyTorch have errors of every kind
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise FileFormatError(what, expected="an undamaged state dict of torch.save", got=got) from error
    return network_of_state_dict(what, tensors, hints, is_ordered=True)


def _check_archive(what: str, path: Path) -> None:
    """Refuse an archive that claims more than it has, or whose pickle names what is in no state dict."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        size = path.stat().st_size
        pickles = [member for member in members if member.filename.rpartition("/")[2].endswith(".pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MOST_JSON_BYTES or any("/code/" in name for name in names):
            hint = "torch.save(model.state_dict(), path)"
            raise FileFormatError(what, expected="one pickle of a state dict", got="a whole program", hint=hint)
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if len(members) > MOST_MEMBERS or not stored or sum(member.file_size for member in members) > size:
            got = f"{len(members)} members of {sum(member.file_size for member in members)} bytes in a file of {size}"
            raise FileFormatError(what, expected=f"at most {MOST_MEMBERS} members stored as they are", got=got)
        check_bytes(what, 4 * size)
        for operation, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if operation.name in REFUSED or (operation.name == "GLOBAL" and argument not in GLOBALS):
                got = repr(argument if operation.name == "GLOBAL" else operation.name)
                raise FileFormatError(what, expected="a state dict: names and tensors alone", got=got[:100])


def _state(what: str, torch: Any, found: Any) -> Iterator[tuple[str, Any]]:
    """The names and tensors of a state dict, or of that in a checkpoint."""
    if isinstance(found, Mapping):
        nested = [found[name] for name in NESTED if isinstance(found.get(name), Mapping)]
        found = nested[0] if nested else found
    if not isinstance(found, Mapping) or len(found) > MOST_ARRAYS:
        raise FileFormatError(what, expected=f"a state dict of at most {MOST_ARRAYS} tensors", got=type(found).__name__)
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise FileFormatError(what, expected="tensors by name", got=f"{name!r}: {type(tensor).__name__}"[:100])
        yield name, tensor


def _array(what: str, torch: Any, name: str, tensor: Any) -> np.ndarray:
    """The numbers of a tensor as a float32 or float64 array of its own."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.device.type != "cpu":
        got = f"{tensor.dtype}, {tensor.layout} of {name!r}"
        raise FileFormatError(what, expected="tensors of floating point numbers", got=got[:200])
    # A stride of 0 makes any number of elements of one.
    claimed, stored = math.prod(tensor.shape) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if claimed > stored:
        raise FileFormatError(what, expected=f"{claimed} bytes of {name!r}"[:200], got=stored)
    check_bytes(what, claimed * 4)
    wide = tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    return np.array(wide.numpy(), order="C")
