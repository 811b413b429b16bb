"""Cards that may not be called: in a forked child of the process that uses one, and when one was abandoned."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from children import answer_of_child

from mlpgpu.backends.cuda.inference import inference
from mlpgpu.backends.cuda.runtime import Device, describe_machine, device, find_device, machine
from mlpgpu.backends.cuda.runtime.device import Resource
from mlpgpu.errors import BackendError
from mlpgpu.locks import Mutex

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Driver:
    """All that is asked of PyCUDA's driver, by name, in the order of the calls."""

    class Error(Exception):
        pass

    device_attribute = SimpleNamespace(
        MULTIPROCESSOR_COUNT=1, L2_CACHE_SIZE=2, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=3, MAXIMUM_TEXTURE1D_LINEAR_WIDTH=4
    )

    def __init__(self) -> None:
        self.calls: list[str] = []
        card = SimpleNamespace(
            name=lambda: "a card",
            compute_capability=lambda: (9, 0),
            total_memory=lambda: 1 << 30,
            get_attribute=lambda kind: kind,
            retain_primary_context=lambda: self._said("retain", self.context),
        )
        self.context = SimpleNamespace(push=lambda: self._said("push", None), detach=lambda: self._said("detach", None))
        self.Device: Any = lambda index: self._said("Device", card)
        self.Device.count = lambda: self._said("count", 1)
        self.Context = SimpleNamespace(pop=lambda: self._said("pop", None))

    def _said(self, name: str, result: Any) -> Any:
        self.calls.append(name)
        return result

    def init(self) -> None:
        self._said("init", None)

    def get_driver_version(self) -> int:
        return self._said("driver version", 13000)

    def get_version(self) -> tuple[int, int, int]:
        return self._said("version", (13, 0, 0))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for module in (device, machine):
        monkeypatch.setattr(module, "drv", made)
    monkeypatch.setattr(machine, "missing", None)
    monkeypatch.setattr(machine, "_devices", {})
    monkeypatch.setattr(machine, "_started", [])
    monkeypatch.setattr(device.atexit, "register", lambda call: None)
    return made


class Handle:
    """A handle of PyCUDA's, which destroys itself."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __del__(self) -> None:
        self.calls.append("destroyed")


def test_a_child_is_refused_before_any_call_of_the_driver(driver: Driver) -> None:
    card = find_device(0)
    with card:
        resource = Resource(card, Handle(driver.calls))
    assert driver.calls[-3:] == ["retain", "push", "pop"]

    def of_child() -> tuple[list[str], list[str]]:
        driver.calls.clear()
        messages = []

        def refused(call: Any) -> None:
            with pytest.raises(BackendError, match=r"CUDA does not survive a fork.*'spawn'") as caught:
                call()
            messages.append(str(caught.value))

        refused(card.__enter__)
        refused(lambda: find_device(0))
        refused(lambda: find_device(1))
        messages.append(describe_machine()["GPU"])
        resource.close()
        other = Resource(card, Handle(driver.calls))
        del other
        card._release()
        return messages, driver.calls

    messages, calls = answer_of_child(of_child)
    assert calls == []
    assert messages[0].startswith("GPU 0: expected use by the process that started CUDA, got a forked child of it")
    assert all("got a forked child of it" in message for message in messages)
    resource.close()
    assert driver.calls[-3:] == ["push", "destroyed", "pop"]


def test_an_abandoned_card_is_never_called_again(driver: Driver) -> None:
    """Not when it is used or freed, nor when Python exits: each of these might wait for it without end."""
    card = find_device(0)
    with card:
        resource = Resource(card, Handle(driver.calls))
        card.abandon()
    driver.calls.clear()
    with pytest.raises(BackendError, match=r"work that does not end after launching nothing.*a new process"), card:
        pass
    resource.close()
    del resource
    card._release()
    del card
    assert driver.calls == []


def test_a_process_whose_parent_never_used_a_card_may(driver: Driver) -> None:
    def of_child() -> list[str]:
        with find_device(0):
            pass
        return driver.calls

    assert answer_of_child(of_child)[-3:] == ["retain", "push", "pop"]


def test_a_predictor_in_a_child_waits_for_no_lock(driver: Driver) -> None:
    """Not even for one that a thread of the parent held: it is refused before."""
    made = inference.CudaInference.__new__(inference.CudaInference)
    made._device, made._lock, made._is_closed = find_device(0), Mutex(), False

    def of_child() -> str:
        made.close()  # gives nothing back
        with pytest.raises(BackendError, match="got a forked child") as caught, made._at_work():
            pass
        return str(caught.value)

    with made._lock:
        assert "spawn" in answer_of_child(of_child)
    assert isinstance(find_device(0), Device)
