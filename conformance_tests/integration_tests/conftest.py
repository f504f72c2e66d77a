"""torchvision is made importable before a neighbour imports it."""

from conformance_tests.integration_tests import torchvision_ops  # noqa: F401
