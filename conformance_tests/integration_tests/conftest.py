"""torchvision is made importable before a neighbour imports it."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") is not None:
    from conformance_tests.integration_tests import torchvision_ops  # noqa: F401
