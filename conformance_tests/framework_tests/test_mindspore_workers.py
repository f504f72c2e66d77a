"""Two processes under msrun: windows over both of them, and a loss whose classes they
share.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from . import mindspore_workers
from .mindspore_workers.common import WORLD
from .recipes import Recipe, run_recipe

pytestmark = [pytest.mark.xdist_group("mindspore_workers"), pytest.mark.slow]
PROGRAM = Path(mindspore_workers.__file__).with_name("__main__.py").read_text()
COMMAND = (
    f"msrun --worker_num={WORLD} --local_worker_num={WORLD} --master_port=8118"
    " --join=True --log_dir=logs checks.py"
)
SECONDS = "120"
"""For one reduction: a worker waits while another one compiles, on a busy machine for
longer than MindSpore's 30 seconds.
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process says of each check; one run for all tests."""
    folder = tmp_path_factory.mktemp("workers")
    with suppress(AssertionError):  # The reports say which check failed.
        run_recipe(
            Recipe("checks", PROGRAM, COMMAND),
            folder,
            PYTHONPATH=os.pathsep.join(sys.path),
            MS_CPU_COMM_OP_TIMEOUT=SECONDS,
        )
    return [read(folder / f"{rank}.json") for rank in range(WORLD)]


def read(report: Path) -> dict[str, str]:
    return json.loads(report.read_text("utf-8")) if report.exists() else {}


@pytest.mark.parametrize("name", mindspore_workers.CHECKS)
def test_two_workers(name: str, reports: list[dict[str, str]]) -> None:
    for rank, report in enumerate(reports):
        assert (
            report.get(name, "not run: a check before it failed, or took too long")
            == "passed"
        ), f"rank {rank}:\n{report.get(name)}"
