"""A card and its context: who may call the driver, and what an error of it means.

All calls are made inside ``with device:``, which makes the device's primary context current on the calling thread and
afterwards restores what was current before.  An error of the driver that leaves the block becomes a
:class:`BackendError`.  Blocks nest, and what one thread made another may use.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ....errors import BackendError
from ....locks import Mutex
from .bindings import CallError, cu, drv


def forked(what: str) -> BackendError:
    """The error for using ``what`` in a child of the process that it belongs to."""
    hint = "CUDA does not survive a fork: start processes by multiprocessing's 'spawn', or by loky"
    return BackendError(what, expected="use by the process that started CUDA", got="a forked child of it", hint=hint)


# After one of these errors every later call on the context fails, until the process ends.
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


class Device:
    """A card, and its primary context, which is retained at first use and released when Python exits.

    Attributes:
        compute_capability: such as (9, 0).
        total_bytes: the card's memory.
        shared_bytes: the most dynamic shared memory that a block may ask for.
        most_texels: the most elements that a texture over linear memory reaches.
        last_launch: the kernel or graph that was put on a stream last; the message of a fault names it.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._device = drv.Device(index)
        self._context: Any = None
        self._lock = Mutex()
        self._process = os.getpid()
        self._fault = ""
        self._is_hung = False
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
        """The architecture that kernels are compiled for; a card of 9.0 has ``sm_90a``, with its own instructions."""
        name = "sm_{}{}".format(*self.compute_capability)
        return name + "a" if name == "sm_90" else name

    @property
    def bus_id(self) -> str:
        """Where the card is in its host, whatever number a process knows it by."""
        return str(self._device.pci_bus_id())

    def reaches(self, bus_id: str) -> bool:
        """Whether this card can copy to and from the memory of another one, which this process sees."""
        try:
            return bool(self._device.can_access_peer(drv.Device(bus_id)))
        except drv.Error:
            return False

    @property
    def free_bytes(self) -> int:
        """How much of the card's memory no process has taken."""
        return int(drv.mem_get_info()[0])

    def synchronize(self) -> None:
        """Wait for everything that was put on the context's streams."""
        drv.Context.synchronize()

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that the context belongs to, which may not call the driver."""
        return self._process != os.getpid()

    def check_process(self) -> None:
        """Raise BackendError in a forked child, before any call of the driver and any lock."""
        if self.is_forked:
            raise forked(f"GPU {self.index}")

    def __enter__(self) -> Device:
        self.check_process()
        if self._fault:
            raise self._faulted()
        try:
            self._retain()
            self._context.push()
        except drv.Error as error:
            hint = "another library may have started CUDA before this process was forked: start it by 'spawn'"
            raise BackendError(f"GPU {self.index}", expected="a context", got=error, hint=hint) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, (drv.Error, CallError)):
            drv.Context.pop()
            return
        if not self._fault:  # an abandoned card would be waited for without end
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

    def abandon(self) -> None:
        """Give up the card, whose work does not end: no further call of the driver, which might wait for it.

        Nothing on it is destroyed, not even when Python exits: PyCUDA would keep all threads from running meanwhile.
        """
        self._fault, self._is_hung = "work that does not end", True
        for kept in (self._context, self._abandoned):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def _retain(self) -> None:
        with self._lock:
            if self._context is None:
                self._context = self._device.retain_primary_context()
                atexit.register(self._release)

    def _release(self) -> None:
        if self.is_forked or self._is_hung:
            return
        # PyCUDA's objects destroy nothing once their context is gone.  Detaching it leaves it on CUDA's own stack,
        # where the push put it, so it is popped there.  A context that faulted may refuse; the process ends anyway.
        with contextlib.suppress(drv.Error):
            self._context.push()
            self._context.detach()
            cu.cuCtxPopCurrent()
        self._context = None

    def destroy(self, box: list[Any], how: Callable[[Any], object] | None = None) -> None:
        """Empty ``box`` of its one handle, in the device's context.

        ``how`` destroys the handle; without it the handle destroys itself when the last reference to it goes.
        """
        if self.is_forked:
            # The parent destroys it; PyCUDA would call the driver as soon as nobody held the handle here.
            for handle in box:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
            return
        if self._context is None or self._fault:
            self._abandoned += box  # the context takes it along when it ends
            return
        with self:
            if how is not None:
                how(box[0])
            box.clear()


class Resource:
    """Something that lives in a device's context until it is closed or nobody holds it any longer."""

    handle: Any = None

    def __init__(self, device: Device, handle: Any) -> None:
        self.device, self.handle = device, handle

    def _destroy(self, handle: Any) -> None:
        """PyCUDA's objects destroy themselves; handles of cuda-bindings need a call."""

    def close(self) -> None:
        """Destroy it now.  Work that uses it must have ended; closing twice does nothing."""
        box, self.handle = [self.handle], None
        if box[0] is not None:
            self.device.destroy(box, self._destroy)

    def __del__(self) -> None:
        self.close()
