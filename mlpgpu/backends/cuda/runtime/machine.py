"""The cards of this machine: finding one by its number, and describing them all."""

from __future__ import annotations

import os

from ....errors import BackendError, check_integer
from .bindings import drv, missing, pycuda, version_text
from .device import Device, forked

LEAST_CAPABILITY = (7, 5)

_devices: dict[int, Device] = {}
_started: list[int] = []  # the process in which the driver was started


def find_device(index: int = 0) -> Device:
    """The card number ``index``, the same object each time.  Nothing is allocated on it yet.

    Raises:
        DtypeError, ConfigurationError: ``index`` is no number of a card.
        BackendError: there is no PyCUDA, no driver, no card, no card of that number, or it is too old.
    """
    check_integer("GPU number", index, least=0)
    count = count_devices()
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
    """PyCUDA, the driver and the cards of this machine, by name; without a card the reason, under ``GPU``."""
    try:
        count = count_devices()
    except BackendError as error:
        return {"GPU": str(error)}
    found = {"PyCUDA": f"{pycuda.VERSION_TEXT}, CUDA {'.'.join(map(str, drv.get_version()[:2]))}"}
    found["NVIDIA driver"] = f"for CUDA {version_text(drv.get_driver_version())}"
    for index in range(count):
        device = Device(index)
        capability = "compute capability {}.{}".format(*device.compute_capability)
        if device.compute_capability < LEAST_CAPABILITY:
            capability += " (too old: {}.{} is needed)".format(*LEAST_CAPABILITY)
        memory = f"{device.total_bytes / 2**30:.1f} GiB"
        found[f"GPU {index}"] = f"{device.name}, {capability}, {device.multiprocessors} multiprocessors, {memory}"
    return found


def count_devices() -> int:
    """Start the driver and count its devices, of which there is at least one."""
    if isinstance(missing, ModuleNotFoundError):
        hint = "pip install mlpgpu[cuda]; without a CUDA toolkit, make train-gpu in a clone shows how"
        raise BackendError("CUDA", expected="the packages pycuda and cuda-bindings", got=missing, hint=hint)
    if missing is not None:
        hint = "install NVIDIA's driver, or build PyCUDA again with the CUDA toolkit that is installed"
        raise BackendError("CUDA", expected="the NVIDIA driver that PyCUDA was built for", got=missing, hint=hint)
    if _started and _started[0] != os.getpid():
        raise forked("CUDA")
    try:
        drv.init()
        _started[:] = [os.getpid()]
        count, driver, toolkit = drv.Device.count(), drv.get_driver_version(), drv.get_version()
    except drv.Error as error:
        hint = "nvidia-smi and CUDA_VISIBLE_DEVICES show which GPUs the driver sees"
        raise BackendError("CUDA", expected="an NVIDIA GPU and a driver that runs", got=error, hint=hint) from error
    if driver // 1000 < toolkit[0]:
        expected, hint = f"one for CUDA {toolkit[0]}.0 or newer", "update it, or build PyCUDA with an older toolkit"
        raise BackendError("NVIDIA driver", expected=expected, got=f"one for CUDA {version_text(driver)}", hint=hint)
    if not count:
        raise BackendError("CUDA", expected="an NVIDIA GPU", got="none", hint="CUDA_VISIBLE_DEVICES may hide it")
    return count
