"""Kernels on a card: loaded from machine code, given their arguments, launched."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ....errors import BackendError, lookup
from ..kernels import Entry
from . import compiler
from .bindings import CallError, call, cu, drv, version_text
from .device import Device, Resource
from .streams import Stream

PDL_CAPABILITY = (9, 0)  # from which on a launch may begin before the one before it has ended
PLAIN_SHARED_BYTES = 48 << 10  # dynamic shared memory of a block that need not be asked for

# How struct names the C types of kernel arguments; a pointer is "P".
_TYPES = {
    "float": "f",
    "double": "d",
    "int": "i",
    "int32_t": "i",
    "uint32_t": "I",
    "int64_t": "q",
    "uint64_t": "Q",
    "Texture": "Q",
}


def _layout(entry: Entry) -> str:
    types = ("P" if a.is_pointer else _TYPES[lookup("argument type", a.ctype, _TYPES)] for a in entry.arguments)
    return "@" + "".join(types)


def pack(entry: Entry, values: Sequence[float | None]) -> bytes:
    """The argument buffer of a launch; None stands for a null pointer, a device address for any other.

    Raises:
        BackendError: they are not as many as the entry takes, or one does not fit its type.
    """
    try:
        return struct.pack(_layout(entry), *(0 if value is None else value for value in values))
    except struct.error as error:
        expected = ", ".join(f"{a.ctype} {a.name}" for a in entry.arguments)
        got = f"{tuple(values)}: {error}"
        raise BackendError(f"arguments of {entry.name}", expected=f"({expected})", got=got) from error


class Function(Resource):
    """A kernel that is ready to launch.

    Attributes:
        module: what it was loaded from, which stays loaded as long as one of its functions is held.
        registers: of a thread.
        local_bytes: of a thread, for its stack and for what did not fit into registers.
        static_shared_bytes: of a block, beside the entry's dynamic shared memory.
    """

    def __init__(self, module: Module, entry: Entry, handle: Any) -> None:
        device = module.device
        super().__init__(device, handle)
        self.entry, self.module = entry, module
        if entry.shared_bytes > device.shared_bytes:
            expected = f"at most {device.shared_bytes:,} bytes of dynamic shared memory"
            raise BackendError(f"kernel {entry.name}", expected=expected, got=f"{entry.shared_bytes:,}")
        if entry.shared_bytes > PLAIN_SHARED_BYTES:
            self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", entry.shared_bytes)
        self.registers = self._get("NUM_REGS")
        self.local_bytes = self._get("LOCAL_SIZE_BYTES")
        self.static_shared_bytes = self._get("SHARED_SIZE_BYTES")

    def _get(self, attribute: str) -> int:
        return int(self.handle.get_attribute(getattr(drv.function_attribute, attribute)))

    def _set(self, attribute: str, value: int) -> None:
        self.handle.set_attribute(getattr(drv.function_attribute, attribute), value)

    def launch(self, stream: Stream, grid: tuple[int, ...], arguments: bytes, *, pdl: bool = False) -> None:
        """Put the kernel on a stream: ``grid`` blocks, (x,), (x, y) or (x, y, z), with arguments from :func:`pack`.

        ``pdl`` concerns functions of an :class:`ExtendedModule`; others begin when all work before is complete.
        """
        self.device.last_launch = self.entry.name
        block = (self.entry.threads, 1, 1)
        self.handle._launch_kernel(grid, block, arguments, self.entry.shared_bytes, stream.handle)


class ExtendedFunction(Function):
    """A kernel that is launched with attributes: cooperatively, or by programmatic dependent launch (PDL).

    Blocks of a cooperative kernel wait for each other, so all of them must run at once; a launch of more than fit on
    the card fails.
    """

    def __init__(self, module: Module, entry: Entry, handle: Any) -> None:
        super().__init__(module, entry, handle)
        layout = _layout(entry)
        ends = [struct.calcsize(layout[: i + 2]) for i in range(len(layout) - 1)]
        # Where each argument begins in the buffer.
        self.offsets = [end - struct.calcsize("@" + code) for end, code in zip(ends, layout[1:], strict=True)]
        codes = [struct.Struct("@" + code) for code in layout[1:]]
        names = [argument.name for argument in entry.arguments]
        self.places = dict(zip(names, zip(codes, self.offsets, strict=True), strict=True))

    def _get(self, attribute: str) -> int:
        kind = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        return int(call(cu.cuFuncGetAttribute, kind, self.handle))

    def _set(self, attribute: str, value: int) -> None:
        kind = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        call(cu.cuFuncSetAttribute, self.handle, kind, value)

    def launch(self, stream: Stream, grid: tuple[int, ...], arguments: bytes, *, pdl: bool = False) -> None:
        """Like :meth:`Function.launch`; with ``pdl`` it may begin before the launch before it is complete.

        That is a permission: where the card cannot, or has no room for the blocks, they begin later.
        """
        PreparedLaunch(self, stream, grid, arguments, pdl=pdl).launch()


class PreparedLaunch:
    """A launch of an :class:`ExtendedFunction` whose description is made once; arguments may change between launches.

    Raises:
        BackendError: the function is none.
    """

    def __init__(
        self, function: Function, stream: Stream, grid: tuple[int, ...], arguments: bytes, *, pdl: bool = False
    ) -> None:
        entry = function.entry
        if not isinstance(function, ExtendedFunction):
            raise BackendError(f"kernel {entry.name}", expected="an ExtendedModule", got="a Module")
        self._function, self._stream = function, stream
        # This call takes no buffer, but a pointer to each argument.
        self._buffer = ctypes.create_string_buffer(arguments, len(arguments))
        start, offsets = ctypes.addressof(self._buffer), function.offsets
        self._pointers = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
        self._address = ctypes.addressof(self._pointers)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = entry.threads, 1, 1
        config.sharedMemBytes, config.hStream = entry.shared_bytes, stream.bound
        attributes = _attributes(entry, pdl and function.device.compute_capability >= PDL_CAPABILITY)
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._config = config

    def launch(self, **changed: float) -> None:
        """Put the launch on its stream, with the arguments that have changed, by name."""
        for name, value in changed.items():
            code, offset = self._function.places[name]
            code.pack_into(self._buffer, offset, value)
        self._function.device.last_launch = self._function.entry.name
        call(cu.cuLaunchKernelEx, self._config, self._function.handle, self._address, 0)


def _attributes(entry: Entry, pdl: bool) -> list[Any]:
    found = []
    if entry.cooperative:
        found.append(cu.CUlaunchAttribute())
        found[-1].id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        found[-1].value.cooperative = 1
    if pdl:
        found.append(cu.CUlaunchAttribute())
        found[-1].id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        found[-1].value.programmaticStreamSerializationAllowed = 1
    return found


class Module(Resource):
    """Kernels and constants loaded from a cubin.

    Raises:
        BackendError: the driver cannot load it.
    """

    def __init__(self, device: Device, image: bytes) -> None:
        try:
            super().__init__(device, self._load(image))
        except (drv.Error, CallError) as error:
            expected = f"a cubin for {device.arch} and a driver as new as the nvcc that made it"
            got = f"{error}; the driver is for CUDA {version_text(drv.get_driver_version())}"
            raise BackendError("loading kernels", expected=expected, got=got, hint="update the driver") from error

    def _load(self, image: bytes) -> Any:
        return drv.module_from_buffer(image)

    def function(self, entry: Entry) -> Function:
        """The kernel of an entry.

        Raises:
            BackendError: it must be launched cooperatively, or takes more shared memory than the card has.
        """
        if entry.cooperative:
            raise BackendError(f"kernel {entry.name}", expected="an ExtendedModule", got="a Module")
        return Function(self, entry, self.handle.get_function(entry.name))

    def constant(self, name: str) -> tuple[int, int]:
        """Address and bytes of a ``__constant__`` or ``__device__`` variable, with an ``extern "C"`` name."""
        address, nbytes = self.handle.get_global(name)
        return int(address), int(nbytes)


class ExtendedModule(Module):
    """Kernels to launch with attributes, by cuda-bindings: PyCUDA cannot, and hides the handles of what it loaded."""

    def _load(self, image: bytes) -> Any:
        return call(cu.cuModuleLoadData, image)

    def _destroy(self, handle: Any) -> None:
        call(cu.cuModuleUnload, handle)

    def function(self, entry: Entry) -> Function:
        """The kernel of an entry."""
        return ExtendedFunction(self, entry, call(cu.cuModuleGetFunction, self.handle, entry.name.encode()))

    def constant(self, name: str) -> tuple[int, int]:
        """Like :meth:`Module.constant`; each module has variables of its own."""
        address, nbytes = call(cu.cuModuleGetGlobal, self.handle, name.encode())
        return int(address), int(nbytes)


def module_of(entries: Iterable[Entry]) -> type[Module]:
    """The kind of module that can launch each of these entries."""
    return ExtendedModule if any(entry.is_extended for entry in entries) else Module


class LoadedKernels:
    """Kernels by entry, compiled and loaded when they are first asked for.

    Entries that were compiled together and are loaded together are one module, with constant variables of its own.

    Arguments:
        sources: a folder where headers are looked for before those of the package.
    """

    def __init__(self, device: Device, entries: Iterable[Entry] = (), *, sources: Path | None = None) -> None:
        self._device, self._sources = device, sources
        self._functions: dict[Entry, Function] = {}
        self.load(entries)

    def load(self, entries: Iterable[Entry]) -> None:
        """Compile and load those that are missing, all of them together.

        Raises:
            BackendError: a kernel cannot be compiled or loaded.
        """
        missing = [entry for entry in dict.fromkeys(entries) if entry not in self._functions]
        if not missing:
            return
        images: dict[bytes, list[Entry]] = {}
        for entry, cubin in compiler.compile_entries(missing, self._device.arch, sources=self._sources).items():
            images.setdefault(cubin.image, []).append(entry)
        for image, entries in images.items():
            module = module_of(entries)(self._device, image)
            self._functions |= {entry: module.function(entry) for entry in entries}

    def are_compiled(self, entries: Iterable[Entry]) -> bool:
        """Whether to load these runs no compiler."""
        missing = {entry for entry in entries if entry not in self._functions}
        return compiler.are_compiled(missing, self._device.arch, sources=self._sources)

    def constants(self, name: str) -> list[int]:
        """The addresses of a constant variable, one in each module with an entry that reads it."""
        modules = dict.fromkeys(
            function.module for entry, function in self._functions.items() if name in entry.constant_names
        )
        return [module.constant(name)[0] for module in modules]

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._functions

    def __getitem__(self, entry: Entry) -> Function:
        return self._functions[entry]
