"""The card that tests run on."""

from __future__ import annotations

import os

import pytest

from mlpgpu.backends.cuda.driver import Device, find_device
from mlpgpu.errors import BackendError


@pytest.fixture(scope="session")
def device() -> Device:
    """Card 0.  Without one the tests skip, or with ``MLPGPU_REQUIRE_GPU=1`` fail: there, nobody would notice."""
    try:
        return find_device(0)
    except BackendError as error:
        if os.environ.get("MLPGPU_REQUIRE_GPU") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
