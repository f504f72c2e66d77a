"""Two workers choose one size of micro-batch."""

from __future__ import annotations

import json

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from conformance_tests.framework_tests.torch_auto_size import CHECKS
from conformance_tests.framework_tests.torch_workers.common import WORLD
from conformance_tests.framework_tests.torch_workers.jobs import run_workers

pytestmark = pytest.mark.xdist_group("torch_auto_size_workers")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process says of each check; one run for all tests."""
    folder = tmp_path_factory.mktemp("auto_size")
    run_workers("conformance_tests.framework_tests.torch_auto_size", folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CHECKS)
def test_two_workers(name: str, reports: list[dict[str, str]]) -> None:
    for rank, report in enumerate(reports):
        assert report.get(name, "not run: a check before it failed") == "passed", f"rank {rank}:\n{report.get(name)}"
