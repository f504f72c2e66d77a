"""Tests of one group share a process: what a group starts, such as workers or a
framework, is started once.
"""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("here")
def test_group_is_seen(request: pytest.FixtureRequest) -> None:
    """pytest-xdist schedules a group by the end of its tests' names."""
    grouped = hasattr(request.config, "workerinput") and request.config.getvalue(
        "loadgroup"
    )
    assert request.node.nodeid.endswith("@here") == bool(grouped)
