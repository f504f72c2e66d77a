"""Windows over two processes that train one `DistributedDataParallel` module."""

from __future__ import annotations

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from conformance_tests.framework_tests.torch_workers import CHECKS
from conformance_tests.framework_tests.torch_workers.jobs import (
    reports_of,
    require_passed,
)

pytestmark = pytest.mark.xdist_group("torch_workers")
PACKAGE = "conformance_tests.framework_tests.torch_workers"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """One run for all tests."""
    return reports_of(PACKAGE, tmp_path_factory.mktemp("workers"))


@pytest.mark.parametrize("name", CHECKS)
def test_two_workers(name: str, reports: list[dict[str, str]]) -> None:
    require_passed(name, reports)
