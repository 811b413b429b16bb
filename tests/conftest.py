"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every run and no clock: a red run can be repeated on any machine.
settings.register_profile("mlpgpu", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("mlpgpu")
