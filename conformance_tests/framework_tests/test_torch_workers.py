"""Windows over two processes that train one `DistributedDataParallel` module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from conformance_tests.framework_tests.torch_workers import CHECKS, WORLD  # noqa: E402

pytestmark = pytest.mark.xdist_group("torch_workers")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process says of each check; one run for all tests."""
    folder = tmp_path_factory.mktemp("workers")
    command = [sys.executable, "-m", "conformance_tests.framework_tests.torch_workers"]
    running = [subprocess.Popen([*command, str(rank), str(folder)], cwd=Path(__file__).parents[2]) for rank in range(WORLD)]
    try:
        for process in running:
            process.wait(timeout=240)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CHECKS)
def test_two_workers(name: str, reports: list[dict[str, str]]) -> None:
    for rank, report in enumerate(reports):
        assert report.get(name, "not run: a check before it failed") == "passed", f"rank {rank}:\n{report.get(name)}"
