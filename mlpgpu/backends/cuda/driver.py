"""The one door to CUDA: the context, memory, streams, modules, launches and graphs.

All calls are made inside ``with device:``.  It makes the device's primary context current on whichever
thread enters, puts back what was current before, and turns every error of the driver that leaves the
block into a :class:`BackendError`.  Blocks nest.  What was made in one thread may be used in another.

PyCUDA owns the context, memory, streams and modules, and launches kernels.  cuda-bindings does what it
cannot: graphs, texture objects, tensor maps, launches that are cooperative or overlap.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ...errors import BackendError, check_integer, lookup
from .kernels import TENSOR_MAP_BYTES, Entry, padded_rows

_missing: ImportError | None = None
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyCUDA warns of what it then raises
        import pycuda
        import pycuda.driver as drv
    from cuda.bindings import driver as cu
except ImportError as error:
    _missing = error

LEAST_CAPABILITY = (7, 5)
ALIGNMENT = 512  # bytes; what a texture over linear memory asks for, and cuMemAlloc keeps
OVERLAP_CAPABILITY = (9, 0)  # from which on launches may overlap
PLAIN_SHARED_BYTES = 48 << 10  # dynamic shared memory of a block that need not be asked for

# After one of these every call on the context fails, in this process, for ever.
_FAULTS = {
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
}


class _CallError(Exception):
    """A call of cuda-bindings failed."""


def _call(function: Callable[..., tuple], *arguments: object) -> Any:
    """Call a function of cuda-bindings; its result, a list of them if there are several, or None."""
    status, *results = function(*arguments)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise _CallError(f"{function.__name__} failed: {status.name}")
    return results if len(results) > 1 else results[0] if results else None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _count_devices() -> int:
    """Start the driver and count its devices, of which there is at least one."""
    if isinstance(_missing, ModuleNotFoundError):
        hint = "pip install mlpgpu[cuda]; PyCUDA is built with the CUDA toolkit's nvcc"
        raise BackendError("CUDA", expected="the packages pycuda and cuda-bindings", got=_missing, hint=hint)
    if _missing is not None:
        hint = "install NVIDIA's driver, or build PyCUDA again with the CUDA toolkit that is installed"
        raise BackendError("CUDA", expected="the NVIDIA driver that PyCUDA was built for", got=_missing, hint=hint)
    try:
        drv.init()
        count, driver, toolkit = drv.Device.count(), drv.get_driver_version(), drv.get_version()
    except drv.Error as error:
        hint = "nvidia-smi and CUDA_VISIBLE_DEVICES show which GPUs the driver sees"
        raise BackendError("CUDA", expected="an NVIDIA GPU and a driver that runs", got=error, hint=hint) from error
    if driver // 1000 < toolkit[0]:
        expected, hint = f"one for CUDA {toolkit[0]}.0 or newer", "update it, or build PyCUDA with an older toolkit"
        raise BackendError("NVIDIA driver", expected=expected, got=f"one for CUDA {_version(driver)}", hint=hint)
    if not count:
        raise BackendError("CUDA", expected="an NVIDIA GPU", got="none", hint="CUDA_VISIBLE_DEVICES may hide it")
    return count


_devices: dict[int, Device] = {}


def find_device(index: int = 0) -> Device:
    """The card number ``index``, the same object each time.  Nothing is allocated on it yet.

    Raises:
        DtypeError, ConfigurationError: ``index`` is no number of a card.
        BackendError: there is no PyCUDA, no driver, no card, no card of that number, or it is too old.
    """
    check_integer("GPU number", index, least=0)
    count = _count_devices()
    if index >= count:
        hint = "the numbers are those that CUDA_VISIBLE_DEVICES leaves"
        raise BackendError("GPU number", expected=f"a number from 0 to {count - 1}", got=index, hint=hint)
    device = _devices.setdefault(index, Device(index))
    if device.compute_capability < LEAST_CAPABILITY:
        expected = "compute capability {}.{} or more".format(*LEAST_CAPABILITY)
        got = "{} with {}.{}".format(device.name, *device.compute_capability)
        raise BackendError(f"GPU {index}", expected=expected, got=got)
    return device


def describe_machine() -> dict[str, str]:
    """What there is of CUDA here, by name; without a card, under ``GPU``, why."""
    try:
        count = _count_devices()
    except BackendError as error:
        return {"GPU": str(error)}
    found = {"PyCUDA": f"{pycuda.VERSION_TEXT}, CUDA {'.'.join(map(str, drv.get_version()[:2]))}"}
    found["NVIDIA driver"] = f"for CUDA {_version(drv.get_driver_version())}"
    for index in range(count):
        device = Device(index)
        capability = "compute capability {}.{}".format(*device.compute_capability)
        if device.compute_capability < LEAST_CAPABILITY:
            capability += " (too old: {}.{} is needed)".format(*LEAST_CAPABILITY)
        memory = f"{device.total_bytes / 2**30:.1f} GiB"
        found[f"GPU {index}"] = f"{device.name}, {capability}, {device.multiprocessors} multiprocessors, {memory}"
    return found


class Device:
    """A card, and its primary context, retained at first use and released when Python exits.

    Attributes:
        compute_capability: such as (9, 0).
        total_bytes: its memory.
        shared_bytes: the most dynamic shared memory that a block may ask for.
        most_texels: of a texture over linear memory.
        last_launch: what was last put on a stream, for the message of a fault.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._device = drv.Device(index)
        self._context: Any = None
        self._lock = threading.Lock()
        self._fault = ""
        self._abandoned: list[object] = []
        self.last_launch = "nothing"
        attribute = drv.device_attribute
        self.name: str = self._device.name()
        self.compute_capability: tuple[int, int] = self._device.compute_capability()
        self.total_bytes: int = self._device.total_memory()
        self.multiprocessors: int = self._device.get_attribute(attribute.MULTIPROCESSOR_COUNT)
        self.l2_bytes: int = self._device.get_attribute(attribute.L2_CACHE_SIZE)
        self.shared_bytes: int = self._device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.most_texels: int = self._device.get_attribute(attribute.MAXIMUM_TEXTURE1D_LINEAR_WIDTH)

    @property
    def arch(self) -> str:
        """What to compile for.  Of 9.0 it is ``sm_90a``, which has the instructions of that card alone."""
        name = "sm_{}{}".format(*self.compute_capability)
        return name + "a" if name == "sm_90" else name

    @property
    def free_bytes(self) -> int:
        """What is left of its memory, to all processes."""
        return int(drv.mem_get_info()[0])

    def synchronize(self) -> None:
        """Wait for everything that was put on its streams."""
        drv.Context.synchronize()

    def __enter__(self) -> Device:
        if self._fault:
            raise self._faulted()
        try:
            self._retain()
            self._context.push()
        except drv.Error as error:
            hint = "a process that was forked after CUDA started cannot use it: start it by 'spawn'"
            raise BackendError(f"GPU {self.index}", expected="a context", got=error, hint=hint) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, (drv.Error, _CallError)):
            drv.Context.pop()
            return
        status = cu.cuCtxSynchronize()[0].name
        self._fault = status if status in _FAULTS else ""
        drv.Context.pop()
        if self._fault:
            raise self._faulted() from error
        raise BackendError(f"GPU {self.index}", expected="a call that succeeds", got=error) from error

    def _faulted(self) -> BackendError:
        hint = (
            "what was computed since is lost, and GPU work needs a new process; an earlier launch may be to blame: "
            "CUDA_LAUNCH_BLOCKING=1 in the environment shows which"
        )
        got = f"{self._fault} after launching {self.last_launch}"
        return BackendError(f"GPU {self.index}", expected="kernels that run to their end", got=got, hint=hint)

    def _retain(self) -> None:
        with self._lock:
            if self._context is None:
                self._context = self._device.retain_primary_context()
                atexit.register(self._release)

    def _release(self) -> None:
        # Without their context PyCUDA's objects have nothing left to do.  Detaching leaves it on CUDA's own
        # stack, where the push put it.  A context that faulted may refuse; the process ends anyway.
        with contextlib.suppress(drv.Error):
            self._context.push()
            self._context.detach()
            cu.cuCtxPopCurrent()
        self._context = None

    def destroy(self, box: list[Any], how: Callable[[Any], object] | None = None) -> None:
        """Empty ``box`` of its one handle, in its context: by ``how``, or by letting go of the last reference."""
        if self._context is None or self._fault:
            self._abandoned += box  # it ends with the context
            return
        with self:
            if how is not None:
                how(box[0])
            box.clear()


class _Resource:
    """Something that lives in a device's context until it is closed or nobody holds it any longer."""

    handle: Any = None

    def __init__(self, device: Device, handle: Any) -> None:
        self.device, self.handle = device, handle

    def _destroy(self, handle: Any) -> None:
        """PyCUDA's objects destroy themselves."""

    def close(self) -> None:
        """Destroy it now.  Work that uses it must have ended; closing twice does nothing."""
        box, self.handle = [self.handle], None
        if box[0] is not None:
            self.device.destroy(box, self._destroy)

    def __del__(self) -> None:
        self.close()


def aligned(nbytes: int) -> int:
    """``nbytes`` as an arena takes them up: a multiple of 512."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena(_Resource):
    """Device memory, allocated once and handed out piece by piece.

    Raises:
        BackendError: the card has not that much free.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        try:
            super().__init__(device, drv.mem_alloc(max(nbytes, ALIGNMENT)))
        except drv.MemoryError as error:
            free, total = drv.mem_get_info()
            raise BackendError(
                f"memory of GPU {device.index}",
                expected=f"{nbytes:,} bytes free",
                got=f"{free:,} of {total:,}",
                hint="lower the batch size, the streams or the layers' widths, or end what else uses the card",
            ) from error
        self._next = int(self.handle)
        self._end = self._next + nbytes

    @property
    def left_bytes(self) -> int:
        """What is not handed out yet."""
        return self._end - self._next

    def take(self, nbytes: int) -> int:
        """The address of the next ``nbytes``, a multiple of 512.  They are not cleared.

        Raises:
            BackendError: there is less left.
        """
        if nbytes > self.left_bytes:
            raise BackendError("arena", expected=f"at most the {self.left_bytes:,} bytes left", got=f"{nbytes:,}")
        address = self._next
        self._next += aligned(nbytes)
        return address


def pinned(device: Device, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array in page-locked memory, which copies to and from the card need to be asynchronous.

    It lives as long as the array and its views; copies that use it must have ended by then.

    Raises:
        BackendError: the system does not grant that much.
    """
    try:
        array: np.ndarray = drv.pagelocked_empty(shape, dtype)
    except drv.MemoryError as error:
        expected = f"{np.dtype(dtype).itemsize * int(np.prod(shape)):,} bytes to lock"
        raise BackendError("page-locked memory", expected=expected, got=error, hint="end other programs") from error
    weakref.finalize(array, device.destroy, [array.base], drv.PagelockedHostAllocation.free)
    return array


class Event(_Resource):
    """A place in a stream's work.  Only with ``timing`` does it know when it was reached."""

    def __init__(self, device: Device, *, timing: bool = False) -> None:
        super().__init__(device, drv.Event(0 if timing else drv.event_flags.DISABLE_TIMING))

    def synchronize(self) -> None:
        """Wait until the work before it is done."""
        self.handle.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """Between two events that were reached, both with timing."""
        return float(self.handle.time_since(earlier.handle)) / 1000


class Stream(_Resource):
    """A queue of work, which does not wait for the default stream.

    Addresses are device addresses.  An array that a copy reads or writes stays as it is, and alive, until
    the stream comes past the copy; one that is not page-locked makes the host wait.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device, drv.Stream(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self.bound = cu.CUstream(self.handle.handle)  # as cuda-bindings take it

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a C-contiguous array to the card."""
        _check_contiguous(array)
        drv.memcpy_htod_async(address, array, self.handle)

    def download(self, array: np.ndarray, address: int) -> None:
        """Fill a C-contiguous array from the card."""
        _check_contiguous(array)
        drv.memcpy_dtoh_async(array, address, self.handle)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy within the card."""
        drv.memcpy_dtod_async(destination, source, nbytes, self.handle)

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        """Set every byte of a stretch of memory."""
        drv.memset_d8_async(address, byte, nbytes, self.handle)

    def record(self, event: Event) -> None:
        """Mark the end of the work so far."""
        event.handle.record(self.handle)

    def wait(self, event: Event) -> None:
        """Start nothing from here on before ``event`` is reached."""
        self.handle.wait_for_event(event.handle)

    def synchronize(self) -> None:
        """Wait until the work so far is done."""
        self.handle.synchronize()


def _check_contiguous(array: np.ndarray) -> None:
    if not array.flags.c_contiguous:
        raise BackendError("copy", expected="a C-contiguous array", got=f"strides {array.strides} of {array.shape}")


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
        wanted = ", ".join(f"{a.ctype} {a.name}" for a in entry.arguments)
        got = f"{tuple(values)}: {error}"
        raise BackendError(f"arguments of {entry.name}", expected=f"({wanted})", got=got) from error


class Function(_Resource):
    """A kernel, ready to launch.

    Attributes:
        registers: of a thread.
        local_bytes: of a thread: its stack and what did not fit into registers.
        static_shared_bytes: of a block, beside the entry's own dynamic ones.
    """

    def __init__(self, module: Module, entry: Entry, handle: Any) -> None:
        device = module.device
        super().__init__(device, handle)
        self.entry = entry
        self._module = module  # without anybody to hold it, it would be unloaded, and its kernels with it
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

    def launch(self, stream: Stream, grid: tuple[int, ...], arguments: bytes, *, overlaps: bool = False) -> None:
        """Put it on a stream: ``grid`` blocks, (x,), (x, y) or (x, y, z), with arguments from :func:`pack`.

        ``overlaps`` is for functions of an :class:`ExtendedModule`; others always begin when all before is complete.
        """
        self.device.last_launch = self.entry.name
        block = (self.entry.threads, 1, 1)
        self.handle._launch_kernel(grid, block, arguments, self.entry.shared_bytes, stream.handle)


class ExtendedFunction(Function):
    """A kernel that is launched with more than a grid: cooperatively, or so that it may overlap.

    Blocks of a cooperative one wait for each other, so that all of them must run at once; a launch of more than fit on
    the card fails.
    """

    def __init__(self, module: Module, entry: Entry, handle: Any) -> None:
        super().__init__(module, entry, handle)
        layout = _layout(entry)
        ends = [struct.calcsize(layout[: i + 2]) for i in range(len(layout) - 1)]
        # Of each argument in the buffer.
        self._places = [end - struct.calcsize("@" + code) for end, code in zip(ends, layout[1:], strict=True)]

    def _get(self, attribute: str) -> int:
        kind = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        return int(_call(cu.cuFuncGetAttribute, kind, self.handle))

    def _set(self, attribute: str, value: int) -> None:
        kind = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        _call(cu.cuFuncSetAttribute, self.handle, kind, value)

    def launch(self, stream: Stream, grid: tuple[int, ...], arguments: bytes, *, overlaps: bool = False) -> None:
        """As of any function; what ``overlaps`` may begin before the launch before it on the stream is complete.

        That is a permission: where a card cannot, or has no room for its blocks, they begin later.
        """
        self.device.last_launch = self.entry.name
        # This call takes no buffer, but a pointer to each argument.
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(self._places))(*(start + place for place in self._places))
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self.entry.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.entry.shared_bytes, stream.bound
        attributes = self._attributes(overlaps and self.device.compute_capability >= OVERLAP_CAPABILITY)
        config.attrs, config.numAttrs = attributes, len(attributes)
        _call(cu.cuLaunchKernelEx, config, self.handle, ctypes.addressof(pointers), 0)

    def _attributes(self, overlaps: bool) -> list[Any]:
        """How it is launched beside its grid."""
        found = []
        if self.entry.cooperative:
            found.append(cu.CUlaunchAttribute())
            found[-1].id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            found[-1].value.cooperative = 1
        if overlaps:
            found.append(cu.CUlaunchAttribute())
            found[-1].id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            found[-1].value.programmaticStreamSerializationAllowed = 1
        return found


class Module(_Resource):
    """Kernels and constants loaded from a cubin.

    Raises:
        BackendError: the driver cannot load it.
    """

    def __init__(self, device: Device, image: bytes) -> None:
        try:
            super().__init__(device, self._load(image))
        except (drv.Error, _CallError) as error:
            expected = f"a cubin for {device.arch} and a driver as new as the nvcc that made it"
            got = f"{error}; the driver is for CUDA {_version(drv.get_driver_version())}"
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
    """Kernels to launch with attributes.  PyCUDA cannot, and does not show the handles of what it loaded."""

    def _load(self, image: bytes) -> Any:
        return _call(cu.cuModuleLoadData, image)

    def _destroy(self, handle: Any) -> None:
        _call(cu.cuModuleUnload, handle)

    def function(self, entry: Entry) -> Function:
        """The kernel of an entry."""
        return ExtendedFunction(self, entry, _call(cu.cuModuleGetFunction, self.handle, entry.name.encode()))

    def constant(self, name: str) -> tuple[int, int]:
        """As of any module; each module has variables of its own."""
        address, nbytes = _call(cu.cuModuleGetGlobal, self.handle, name.encode())
        return int(address), int(nbytes)


class Texture(_Resource):
    """A texture object over ``texels`` float32 at ``address``; ``int(texture)`` is what a kernel takes.

    Raises:
        BackendError: the card's textures do not reach that far.
    """

    def __init__(self, device: Device, address: int, texels: int) -> None:
        if not 1 <= texels <= device.most_texels:
            raise BackendError("texture", expected=f"1 to {device.most_texels:,} texels", got=f"{texels:,}")
        resource = cu.CUDA_RESOURCE_DESC()
        resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        resource.res.linear.devPtr = address
        resource.res.linear.format = cu.CUarray_format.CU_AD_FORMAT_FLOAT
        resource.res.linear.numChannels = 1
        resource.res.linear.sizeInBytes = 4 * texels
        super().__init__(device, _call(cu.cuTexObjectCreate, resource, cu.CUDA_TEXTURE_DESC(), None))

    def _destroy(self, handle: Any) -> None:
        _call(cu.cuTexObjectDestroy, handle)

    def __int__(self) -> int:
        return int(self.handle)


def tensor_map(address: int, shape: tuple[int, int, int], pitch: int, box_rows: int) -> np.ndarray:
    """What the copy engine of compute capability 9.0 has to know of a 16-bit tensor: 128 bytes, for the card's memory.

    Args:
        address: of the first element, a multiple of 16.
        shape: planes, rows and columns; beyond them the engine reads zeros.
        pitch: elements from one row to the next, a multiple of 8.  A plane has ``rows`` padded as all planes are.
        box_rows: of what a kernel asks for at once, 64 columns wide.

    Raises:
        BackendError: the engine cannot read such a tensor.
    """
    planes, rows, columns = shape
    bytes_of_row = 2 * pitch
    try:
        tensor = _call(
            cu.cuTensorMapEncodeTiled, cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, address,
            [cu.cuuint64_t(size) for size in (columns, rows, planes)],
            [cu.cuuint64_t(step) for step in (bytes_of_row, bytes_of_row * padded_rows(rows))],
            [cu.cuuint32_t(size) for size in (64, box_rows, 1)], [cu.cuuint32_t(1)] * 3,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
    except _CallError as error:
        expected = "an address that is a multiple of 16, a pitch of 8, and at most 256 rows in a box"
        got = f"address {address:#x}, shape {shape}, pitch {pitch}, {box_rows} rows: {error}"
        raise BackendError("tensor map", expected=expected, got=got) from error
    return np.frombuffer(ctypes.string_at(tensor.getPtr(), TENSOR_MAP_BYTES), np.uint8)


class Graph(_Resource):
    """Work that a stream was given while :func:`capture` watched, to be replayed as one launch."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(device, None)
        self.name = name

    def _destroy(self, handle: Any) -> None:
        _call(cu.cuGraphDestroy, handle)

    @property
    def nodes(self) -> int:
        """How many launches and copies it holds."""
        _, count = _call(cu.cuGraphGetNodes, self.handle)
        return int(count)

    def instantiate(self) -> Replay:
        """Make it ready to launch.  The graph may be closed then; modules and memory that it uses may not."""
        return Replay(self.device, _call(cu.cuGraphInstantiate, self.handle, 0), self.name)


class Replay(_Resource):
    """A graph ready to launch."""

    def __init__(self, device: Device, handle: Any, name: str) -> None:
        super().__init__(device, handle)
        self.name = name

    def _destroy(self, handle: Any) -> None:
        _call(cu.cuGraphExecDestroy, handle)

    def launch(self, stream: Stream) -> None:
        """Put the whole graph on a stream."""
        self.device.last_launch = self.name
        _call(cu.cuGraphLaunch, self.handle, stream.bound)


@contextlib.contextmanager
def capture(stream: Stream, name: str = "a graph") -> Iterator[Graph]:
    """Put what ``stream`` is given inside the block into a graph instead of running it.

    Other streams take part from where they wait for an event recorded on this one until it waits for one
    of theirs, which it must do before the block ends.  An error in the block leaves no graph.
    """
    graph = Graph(stream.device, name)
    # Relaxed: the garbage collector may free device memory meanwhile, which any other mode would take amiss.
    _call(cu.cuStreamBeginCapture, stream.bound, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield graph
    except BaseException:
        _, broken = cu.cuStreamEndCapture(stream.bound)
        if broken is not None and int(broken):
            cu.cuGraphDestroy(broken)
        raise
    graph.handle = _call(cu.cuStreamEndCapture, stream.bound)
