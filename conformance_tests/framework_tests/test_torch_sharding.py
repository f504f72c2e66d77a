"""Parameters that are split over processes (FSDP2, tensor parallel): windows over two
processes that share them.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "torch.distributed.fsdp", reason="needs a torch with distributed support"
)
if not torch.distributed.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from conformance_tests.framework_tests.torch_fsdp import NEEDS_FSDP2_ON_CPU
from conformance_tests.framework_tests.torch_shards import CHECKS, EARLY
from conformance_tests.framework_tests.torch_workers.jobs import (
    reports_of,
    require_passed,
)

pytestmark = pytest.mark.xdist_group("torch_shards")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """One run for all tests."""
    return reports_of(
        "conformance_tests.framework_tests.torch_shards",
        tmp_path_factory.mktemp("shards"),
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in EARLY else [NEEDS_FSDP2_ON_CPU])
        for name in CHECKS
    ],
)
def test_two_workers(name: str, reports: list[dict[str, str]]) -> None:
    require_passed(name, reports)
