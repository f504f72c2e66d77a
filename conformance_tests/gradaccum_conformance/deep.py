"""The cases of a test that wait for ``--deep``."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def deep_but(kept: Container[Any], values: Iterable[Any]) -> list[Any]:
    """`values` for ``parametrize``: those in `kept` always run, the others with
    ``--deep``.
    """
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.deep)
        for value in values
    ]
