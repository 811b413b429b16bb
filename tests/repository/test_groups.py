"""Tests of one ``xdist_group`` are run by one process, so that what they share is made once."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("groups")
def test_a_group_is_seen_by_who_deals_tests_to_processes(request: pytest.FixtureRequest) -> None:
    """pytest-xdist sees it at the end of a test's name, which a version of pytest may not let it write."""
    if request.config.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith("@groups")
